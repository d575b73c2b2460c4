"""Measures how cost grows: with ranks, pack length, response length and vocabulary.

    python bench/scaling.py [--base runs/tiny-base-0] [--size tiny] [--rounds 3] [--only ranks lengths]

Ranks: whole steps of tiny-grpo (bench/step.py) with the same total work, and with the same work a rank. Each
round runs every case once; the figure is the median of the rounds. Lengths: the trainer's phases
(bench/train.py) over 16,384 tokens; the head runs on the sampled tokens only. Prints one JSON line a figure,
then a table. Both go to bench/results/scaling.json and scaling.md.
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

RANK_CASES = (  # fixed work, ranks, threads of each rank, prompts a step
    ("in all", 1, 1, 32), ("in all", 1, 2, 32), ("in all", 2, 1, 32), ("in all", 4, 1, 32),
    ("a rank", 1, 1, 16), ("a rank", 2, 1, 32), ("a rank", 4, 1, 64))
LENGTH_CASES = {  # what grows: the arguments of bench/train.py
    "pack": [dict(pack=n, packs=16384 // n, segment=1024) for n in (1024, 2048, 4096, 8192, 16384)],
    "segment": [dict(pack=16384, packs=1, segment=n) for n in (128, 512, 2048, 8192, 16384)],
    "vocab": [dict(pack=4096, packs=4, segment=512, vocab=n) for n in (1024, 8192, 32768)],
}


def run_bench(script: str, args: list[str], ranks: int = 1, threads: int = 1) -> list[dict]:
    """The figures (JSON lines) that a bench prints. If it fails, exits with the end of its error output."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--monitor-interval", "1",
                  "--nproc-per-node", str(ranks)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([*start, f"bench/{script}", *args], cwd=ROOT, env=env, capture_output=True,
                          text=True, check=False)
    if done.returncode:
        sys.exit(f"bench/{script} {' '.join(args)} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"bench"')]


def by_ranks(base: str, rounds: int) -> list[dict]:
    """Seconds of whole steps, for each of RANK_CASES."""
    seconds: dict[tuple, list[float]] = {case: [] for case in RANK_CASES}
    for _ in range(rounds):
        for case in RANK_CASES:
            _, ranks, threads, prompts = case
            args = ["tiny-grpo", "--model", base, "--data", f"{base}/train.jsonl",
                    "--prompts_per_step", str(prompts)]
            figures = run_bench("step.py", args, ranks, threads)
            seconds[case].append(next(r["value"] for r in figures if r["figure"] == "step_s"))
    rows = []
    for fixed, ranks, threads, prompts in RANK_CASES:
        step = statistics.median(seconds[fixed, ranks, threads, prompts])
        samples = 8 * prompts
        rows.append({"bench": "scaling", "by": "ranks", "fixed_work": fixed, "ranks": ranks,
                     "threads_a_rank": threads, "samples": samples, "step_s": round(step, 3),
                     "samples_per_s": round(samples / step)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def by_lengths(size: str) -> list[dict]:
    """Microseconds a token and memory of the trainer's phases, for each of LENGTH_CASES."""
    rows = []
    for by, cases in LENGTH_CASES.items():
        for case in cases:
            args = ["--size", size, "--rounds", "3"]
            for name, value in case.items():
                args += [f"--{name}", str(value)]
            for r in run_bench("train.py", args, threads=os.cpu_count() or 1):
                if r["phase"] != "limits":
                    us = round(1e6 / r["tokens_per_s_a_rank"], 2)
                    rows.append({"bench": "scaling", "by": by, **case, "phase": r["phase"],
                                 "tflops": r["tflops"], "us_a_token": us, "memory_gib": r["memory_gib"]})
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def line(*cells: object) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def ranks_table(rows: list[dict]) -> list[str]:
    """Markdown lines: seconds of a step by ranks."""
    lines = [line("work fixed", "ranks × threads", "samples a step", "s a step", "samples a second"),
             "|---|---|---|---|---|"]
    for r in rows:
        lines.append(line(r["fixed_work"], f"{r['ranks']} × {r['threads_a_rank']}", r["samples"],
                          f"{r['step_s']:.3f}", r["samples_per_s"]))
    return [*lines, ""]


def lengths_table(rows: list[dict], by: str) -> list[str]:
    """Markdown lines: microseconds a token of each phase, and the largest memory, by what grows."""
    sizes = list(dict.fromkeys(r[by] for r in rows))
    lines = [line(f"µs a token by {by}", *(f"{n:,}" for n in sizes)), "|---|" + "---|" * len(sizes)]
    for phase in dict.fromkeys(r["phase"] for r in rows):
        lines.append(line(phase, *(f"{r['us_a_token']:.1f}" for r in rows if r["phase"] == phase)))
    memory = [max(r["memory_gib"] for r in rows if r[by] == n) for n in sizes]
    lines.append(line("GiB above what is held at rest", *(f"{m:.2f}" for m in memory)))
    return [*lines, ""]


def table(rows: list[dict]) -> str:
    """All figures in Markdown."""
    ranks = [r for r in rows if r["by"] == "ranks"]
    lines = ranks_table(ranks) if ranks else []
    for by in LENGTH_CASES:
        if some := [r for r in rows if r["by"] == by]:
            lines += lengths_table(some, by)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="runs/tiny-base-0")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    kinds = ("ranks", "lengths")
    parser.add_argument("--only", nargs="*", choices=kinds, default=kinds)
    args = parser.parse_args()
    from tools.tiny import build

    rows = by_ranks(build(args.base), args.rounds) if "ranks" in args.only else []
    rows += by_lengths(args.size) if "lengths" in args.only else []
    (ROOT / "bench/results/scaling.json").write_text(json.dumps(rows, indent=1) + "\n")
    (ROOT / "bench/results/scaling.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
