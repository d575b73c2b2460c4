"""How cost grows: with ranks at fixed work in all and at fixed work a rank, with pack and response length, with vocabulary.

    python bench/scaling.py [--base runs/tiny-base-0] [--size tiny] [--rounds 3] [--only ranks lengths]

Ranks: whole steps of tiny-grpo (bench/step.py) on this machine's cores, the kinds in turns, `rounds` times, medians. Lengths:
the trainer's phases (bench/train.py), 16,384 tokens each time; the head's are those that are sampled. One JSON line a figure,
then a table; both go to bench/results/scaling.json and scaling.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def lines_of(script: str, words: list[str], ranks: int = 1, threads: int = 1) -> list[dict]:
    """The JSON lines that a bench prints. Ends this program, with the last of what it said, where it fails."""
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone",
                                                 "--monitor-interval", "1", "--nproc-per-node", str(ranks)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([*start, f"bench/{script}", *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"bench/{script} {' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"bench"')]


def by_ranks(base: str, rounds: int) -> list[dict]:
    """Whole steps at 1, 2 and 4 ranks of a thread each, and at one rank of two threads."""
    data, rows = ["--model", base, "--data", f"{base}/train.jsonl"], []
    kinds = [("in all", 1, 1, 32), ("in all", 1, 2, 32), ("in all", 2, 1, 32), ("in all", 4, 1, 32),
             ("a rank", 1, 1, 16), ("a rank", 2, 1, 32), ("a rank", 4, 1, 64)]
    seconds: dict[tuple, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            _, ranks, threads, prompts = kind
            said = lines_of("step.py", ["tiny-grpo", *data, "--prompts_per_step", str(prompts)], ranks, threads)
            seconds[kind].append(next(r["value"] for r in said if r["figure"] == "step_s"))
    for kind in kinds:
        fixed, ranks, threads, prompts = kind
        step = statistics.median(seconds[kind])
        rows.append({"bench": "scaling", "by": "ranks", "fixed_work": fixed, "ranks": ranks, "threads_a_rank": threads,
                     "samples": 8 * prompts, "step_s": round(step, 3), "samples_per_s": round(8 * prompts / step)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def by_lengths(size: str) -> list[dict]:
    """The trainer's phases at 16,384 tokens: packs of 1k to 16k of segments of 1k, segments of 128 to 16k, vocabularies."""
    cases = [("pack", dict(pack=p, packs=16384 // p, segment=1024)) for p in (1024, 2048, 4096, 8192, 16384)]
    cases += [("segment", dict(pack=16384, packs=1, segment=s)) for s in (128, 512, 2048, 8192, 16384)]
    cases += [("vocab", dict(pack=4096, packs=4, segment=512, vocab=v)) for v in (1024, 8192, 32768)]
    rows = []
    for by, case in cases:
        words = ["--size", size, "--rounds", "3", *(w for k, v in case.items() for w in (f"--{k}", str(v)))]
        for r in lines_of("train.py", words, threads=os.cpu_count() or 1):
            if r["phase"] != "limits":
                rows.append({"bench": "scaling", "by": by, **case, "phase": r["phase"], "tflops": r["tflops"],
                             "us_a_token": round(1e6 / r["tokens_per_s_a_rank"], 2), "memory_gib": r["memory_gib"]})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict]) -> str:
    """Markdown: ranks, then microseconds a token by what grows."""
    out = []
    if ranks := [r for r in rows if r["by"] == "ranks"]:
        out += ["| work fixed | ranks × threads | samples a step | s a step | samples a second |", "|---|---|---|---|---|"]
        out += [f"| {r['fixed_work']} | {r['ranks']} × {r['threads_a_rank']} | {r['samples']} | {r['step_s']:.3f} "
                f"| {r['samples_per_s']} |" for r in ranks] + [""]
    for by in dict.fromkeys(r["by"] for r in rows if r["by"] != "ranks"):
        some = [r for r in rows if r["by"] == by]
        sizes = list(dict.fromkeys(r[by] for r in some))
        out += [f"| µs a token by {by} | " + " | ".join(f"{s:,}" for s in sizes) + " |", "|---|" + "---|" * len(sizes)]
        for phase in dict.fromkeys(r["phase"] for r in some):
            cells = [next(r["us_a_token"] for r in some if r["phase"] == phase and r[by] == s) for s in sizes]
            out.append(f"| {phase} | " + " | ".join(f"{c:.1f}" for c in cells) + " |")
        out.append("| GiB above what lies there | " + " | ".join(
            f"{max(r['memory_gib'] for r in some if r[by] == s):.2f}" for s in sizes) + " |")
        out.append("")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="runs/tiny-base-0")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=("ranks", "lengths"), default=("ranks", "lengths"))
    args = parser.parse_args()
    from tiny import build

    rows = by_ranks(build(args.base), args.rounds) if "ranks" in args.only else []
    rows += by_lengths(args.size) if "lengths" in args.only else []
    (ROOT / "bench/results/scaling.json").write_text(json.dumps(rows, indent=1) + "\n")
    (ROOT / "bench/results/scaling.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
