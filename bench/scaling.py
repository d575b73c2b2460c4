"""Measures how the cost grows with ranks, pack length, segment length and vocabulary.

    python -m bench.scaling [--base runs/tiny-base-0] [--size tiny] [--rounds 3] [--only ranks lengths]

ranks: seconds of whole steps of tiny-grpo (bench/step.py), with 256 samples in all or 128 samples per rank.
lengths: seconds of the trainer's phases (bench/train.py) over 16,384 tokens, in packs (the inputs of one
forward pass) of several lengths. A segment is a prompt with its response.

Prints one JSON line per result, then a table. Both go to bench/results/scaling.json and scaling.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from bench.common import RESULTS, ROOT, arguments, environment, markdown, say, torchrun
from tools.tiny import build

RANK_CASES = (  # which work is fixed, ranks, threads of a rank, prompts of a step
    ("in all", 1, 1, 32), ("in all", 1, 2, 32), ("in all", 2, 1, 32), ("in all", 4, 1, 32),
    ("a rank", 1, 1, 16), ("a rank", 2, 1, 32), ("a rank", 4, 1, 64))
LENGTH_CASES = {  # what grows -> arguments of bench/train.py, one dict per case
    "pack": [dict(pack=n, packs=16384 // n, segment=1024) for n in (1024, 2048, 4096, 8192, 16384)],
    "segment": [dict(pack=16384, packs=1, segment=n) for n in (128, 512, 2048, 8192, 16384)],
    "vocab": [dict(pack=4096, packs=4, segment=512, vocab=n) for n in (1024, 8192, 32768)],
}


def run_bench(script: str, args: list[str], ranks: int = 1, threads: int = 1) -> list[dict]:
    """Runs bench/SCRIPT.py. Returns the JSON lines that it prints. Exits with the last errors if it fails."""
    command = torchrun(ranks, "-m", f"bench.{script}", *args)
    done = subprocess.run(command, cwd=ROOT, env=environment(threads), capture_output=True, text=True,
                          check=False)
    if done.returncode:
        sys.exit(f"bench.{script} {' '.join(args)} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"bench"')]


def by_ranks(base: str, rounds: int) -> list[dict]:
    seconds: dict[tuple, list[float]] = {case: [] for case in RANK_CASES}
    for _ in range(rounds):
        for case in RANK_CASES:
            _, ranks, threads, prompts = case
            args = ["tiny-grpo", "--model", base, "--data", f"{base}/train.jsonl",
                    "--prompts_per_step", str(prompts)]
            figures = run_bench("step", args, ranks, threads)
            seconds[case].append(next(r["value"] for r in figures if r["figure"] == "step_s"))
    rows = []
    for fixed, ranks, threads, prompts in RANK_CASES:
        step = statistics.median(seconds[fixed, ranks, threads, prompts])
        samples = 8 * prompts
        rows.append({"bench": "scaling", "by": "ranks", "fixed_work": fixed, "ranks": ranks,
                     "threads_a_rank": threads, "samples": samples, "step_s": round(step, 3),
                     "samples_per_s": round(samples / step)})
        say(rows[-1])
    return rows


def by_lengths(size: str) -> list[dict]:
    rows = []
    for by, cases in LENGTH_CASES.items():
        for case in cases:
            args = ["--size", size, "--rounds", "3"]
            for name, value in case.items():
                args += [f"--{name}", str(value)]
            for r in run_bench("train", args, threads=os.cpu_count() or 1):
                if r["phase"] != "limits":
                    us = round(1e6 / r["tokens_per_s_a_rank"], 2)
                    rows.append({"bench": "scaling", "by": by, **case, "phase": r["phase"],
                                 "tflops": r["tflops"], "us_a_token": us, "memory_gib": r["memory_gib"]})
                    say(rows[-1])
    return rows


RANKS = """\
Whole steps of `tiny-grpo`. Fixed work `in all`: a step has 256 samples, which the ranks share. `a rank`: a
step has 128 samples for each rank. `2 × 1`: two ranks with one thread each. All ranks use the same CPU cores.

"""
LENGTHS = """\
Microseconds per token, for each phase of `bench/train.py`: log-probs without gradients, an update of the
policy or the critic, and the policy's output layer alone (`head`). The columns are tokens of a pack (one
forward pass), tokens of a segment (a prompt with its response), or sizes of the vocabulary.

"""


def ranks_table(rows: list[dict]) -> str:
    head = ("fixed work", "ranks × threads", "samples per step", "seconds per step", "samples per second")
    return markdown(head, [(r["fixed_work"], f"{r['ranks']} × {r['threads_a_rank']}", r["samples"],
                            f"{r['step_s']:.3f}", r["samples_per_s"]) for r in rows])


def lengths_table(rows: list[dict], by: str) -> str:
    sizes = list(dict.fromkeys(r[by] for r in rows))
    lines = [(phase, *(f"{r['us_a_token']:.1f}" for r in rows if r["phase"] == phase))
             for phase in dict.fromkeys(r["phase"] for r in rows)]
    memory = [max(r["memory_gib"] for r in rows if r[by] == n) for n in sizes]
    lines.append(("GiB that the largest phase takes", *(f"{m:.2f}" for m in memory)))
    return markdown((f"µs per token, by {by} size", *(f"{n:,}" for n in sizes)), lines)


def table(rows: list[dict]) -> str:
    of = {by: [r for r in rows if r["by"] == by] for by in ("ranks", *LENGTH_CASES)}
    parts = [RANKS + ranks_table(of["ranks"])] if of["ranks"] else []
    lengths = [lengths_table(of[by], by) for by in LENGTH_CASES if of[by]]
    return "\n".join([*parts, *([LENGTHS + lengths[0], *lengths[1:]] if lengths else [])])


def main() -> None:
    args = arguments(__doc__, base="runs/tiny-base-0", size="tiny", rounds=3, only=("ranks", "lengths"))
    rows = by_ranks(build(args.base), args.rounds) if "ranks" in args.only else []
    rows += by_lengths(args.size) if "lengths" in args.only else []
    (RESULTS / "scaling.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "scaling.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
