"""How long a million problems take to load, how much memory they take, and what a step's batch costs.

    python bench/rows.py [--rows 1000000] [--file rows.jsonl|rows.parquet] >> bench/results/rows.jsonl

Writes rows of about 100 tokens (of the demo's tokenizer: one a byte) to a temporary file, then loads them as
train.py does, in this process. Memory is resident memory above what the process had before. One JSON line:
`held_gb` after loading, `peak_gb` while loading, `text_gb` the texts and answers alone, all in 1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent)] + [p for p in sys.path if p != str(HERE)]

from bench.limits import _status
from configs import PRESETS
from data import batch_at, epoch_len, fingerprint, load_problems, replacement_batch
from tools.tiny import make_tokenizer


def make_row(i: int) -> dict[str, str]:
    """The i-th row, in GSM8K's form."""
    pens, cups = i % 97, i % 89
    return {"question": f"Problem {i}: a box holds {pens} pens and {cups} cups. Somebody takes one of them. "
                        "How many things are left in it?",
            "answer": f"We add and subtract.\n#### {pens + cups - 1}"}


def write_rows(path: Path, count: int) -> int:
    """Write `count` rows. Returns the bytes of their problems and answers."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as parquet

        schema = pa.schema([("question", pa.string()), ("answer", pa.string())])
        with parquet.ParquetWriter(path, schema) as f:
            for start in range(0, count, 10_000):
                some = [make_row(i) for i in range(start, min(start + 10_000, count))]
                f.write_table(pa.Table.from_pylist(some))
    else:
        with path.open("w") as file:
            file.writelines(json.dumps(make_row(i)) + "\n" for i in range(count))
    rows = map(make_row, range(count))
    return sum(len(row["question"]) + len(row["answer"].rpartition("#### ")[2]) for row in rows)


def milliseconds(f: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    f()
    return round(1e3 * (time.perf_counter() - began), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--file", default="rows.jsonl")
    args = parser.parse_args()
    cfg = replace(PRESETS["orz-7b"], template="plain")
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, args.file)
        text = write_rows(path, args.rows)
        load_problems([str(HERE.parent / "eval_sets" / "aime2024.json")], tokenizer, cfg, str)  # warm up
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, began = _status("VmRSS"), time.perf_counter()
        problems = load_problems([str(path)], tokenizer, cfg, str)
        seconds = time.perf_counter() - began
        held, peak = _status("VmRSS") - before, _status("VmHWM") - before
    n, some = epoch_len(problems), problems[::max(1, args.rows // 1000)]
    steps = {
        "first_batch_ms": milliseconds(lambda: batch_at(problems, 0, cfg)),
        "batch_ms": round(milliseconds(lambda: [batch_at(problems, s, cfg) for s in range(1, 101)]) / 100, 3),
        "replacement_ms": milliseconds(lambda: replacement_batch(problems, 5, 1, cfg)),
        "epoch_len_ms": milliseconds(lambda: epoch_len(problems)),
        "fingerprint_ms": milliseconds(lambda: fingerprint(problems)),
    }
    print(json.dumps({
        "bench": "rows", "file": args.file, "rows": n, "prompts_per_step": cfg.prompts_per_step,
        "tokens_per_row": round(sum(len(p.ids) for p in some) / len(some)),
        "load_s": round(seconds, 1), "text_gb": round(text / 1e9, 3), "held_gb": round(held / 1e9, 3),
        "peak_gb": round(peak / 1e9, 3), "held_bytes_per_row": round((held - text) / n), **steps}))


if __name__ == "__main__":
    main()
