"""How far each supported family is from transformers' own model: log-probs, gradients, engines, exports.

    python bench/families.py [--only granite cohere …] [--no-vllm]

Every model of tests/families.py: two layers, random weights, fp32, no default values. Prints one JSON line a
model, and writes bench/results/families.json and families.md. With --only the other models keep their rows.
vLLM gets a process for each model, about 20 s.

Exit status 1 if a difference is over its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), str(HERE.parent / "tests")] + [p for p in sys.path if p != str(HERE)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LIMITS = {"log-probs": 1e-5, "gradient": 1e-5, "torch engine": 1e-4, "vLLM engine": 1e-4,
          "exported policy": 1e-4, "exported critic": 1e-4}  # nats; shares of a norm; nats; values


def measure(path: str, vllm: bool) -> dict[str, float | str]:
    """The largest differences of the model in a folder, by the names of LIMITS. A text says why a number is
    missing."""
    import families

    training = families.compare_training(path)
    exported = families.compare_export(path, Path(path).parent / "export" / Path(path).name)
    return {"log-probs": training["logp"], "gradient": training["gradient"],
            "torch engine": families.compare_engine(path, "torch"),
            "vLLM engine": in_own_process(path) if vllm else "not run",
            "exported policy": exported["policy"], "exported critic": exported["critic"]}


def in_own_process(path: str) -> float | str:
    """compare_engine with vLLM, which allows one engine a process. Text: its error."""
    env = os.environ | dict(OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1")
    done = subprocess.run([sys.executable, __file__, "--vllm_engine", path], env=env, text=True,
                          capture_output=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return f"not run: {errors[-1].strip() if errors else f'exit status {done.returncode}'}"


def table(rows: list[dict]) -> str:
    """Markdown: a line a model, with its largest differences."""
    head = ["model", *LIMITS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [f"{v:.1e}" if isinstance(v, float) else v for v in (row[name] for name in LIMITS)]
        lines.append(f"| {' | '.join([row['model'], *cells])} |")
    return "\n".join(lines) + "\n"


def save(rows: list[dict], names: list[str]) -> str:
    """Write the results, in the order of `names`. Models that were not measured this time keep their earlier
    row. Returns the table."""
    import torch

    file = HERE / "results" / "families.json"
    earlier = json.loads(file.read_text())["models"] if file.exists() else []
    by_name = {row["model"]: row for row in [*earlier, *rows]}
    rows = [by_name[name] for name in names if name in by_name]
    figures = {"torch": torch.__version__, "limits": LIMITS, "models": rows}
    file.write_text(json.dumps(figures, indent=1) + "\n")
    file.with_suffix(".md").write_text(table(rows))
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--vllm_engine", metavar="FOLDER", help="measure vLLM on one folder, here")
    args = parser.parse_args()
    import families
    import torch

    torch.set_num_threads(1)
    if args.vllm_engine:
        print(json.dumps(families.compare_vllm([args.vllm_engine])[0]), flush=True)
        os._exit(0)  # without vLLM's exit handlers, which wait
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only or families.MODELS:
            rows.append({"model": name} | measure(families.make(Path(folder), name), not args.no_vllm))
            print(json.dumps(rows[-1]), flush=True)
    print(save(rows, [*families.MODELS]))
    sys.exit(any(isinstance(row[name], float) and row[name] > limit
                 for row in rows for name, limit in LIMITS.items()))


if __name__ == "__main__":
    main()
