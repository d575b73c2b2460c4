"""Every recipe learns: each of the family on the tiny task with three seeds, PPO and GRPO also on sums of three digits, where
the working out is longer than a guess by far, in one table and one plot.

    python bench/algorithms.py [--seeds 3] [--steps 30] [--jobs 2] [--only ppo grpo …] [--out runs/algorithms]

A job is a run of one rank, forked from this process, which has imported everything; base models are grown where they are
missing. Results: bench/results/algorithms.json (final held-out accuracy, steps to a mean reward of 0.9, response length at
both ends, per recipe and seed), algorithms.md and algorithms.png.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import train
from configs import PRESETS, Config
from grpo import RECIPES
from log import read_metrics
from tiny import build

HARD = "-3-digits"


def configs(steps: int) -> dict[str, Config]:
    """What is compared: PPO, and each recipe of grpo.py with what its paper adds, at the demo's size."""
    tiny = replace(PRESETS["tiny-grpo"], steps=steps, eval_every=steps, save_every=0, pack_len=4096)
    more = {"dapo": dict(resample_rounds=2, overlong_buffer=16)} | dict.fromkeys(("gspo", "cispo"), dict(policy_updates=2))
    every = {"ppo": replace(tiny, algo="ppo", critic_updates=4)} | {
        name: replace(tiny, **fields | more.get(name, {})) for name, fields in RECIPES.items()}
    return every | {f"{name}{HARD}": every[name] for name in ("ppo", "grpo")}


def job(cfg: Config) -> None:
    """One run, its words to a file."""
    torch.set_num_threads(1)
    Path(cfg.out).mkdir(parents=True, exist_ok=True)
    with open(f"{cfg.out}/log.txt", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    train.main(cfg)
    os._exit(0)


def result(out: Path) -> dict:
    """What a run came to."""
    rows = read_metrics(out)
    steps = [r for r in rows if "reward" in r]
    rewards = [r["reward"] for r in steps]
    smooth = [statistics.mean(rewards[max(0, i - 1):i + 2]) for i in range(len(rewards))]
    evals = [r["eval/eval/avg@1"] for r in rows if "eval/eval/avg@1" in r]
    return {"base": evals[0], "accuracy": evals[-1], "steps_to_0.9": next((i for i, r in enumerate(smooth) if r >= 0.9), None),
            "len_first": steps[0]["response_len"], "len_last": steps[-1]["response_len"], "rewards": rewards,
            "lengths": [r["response_len"] for r in steps]}


def table(results: dict[str, list[dict]]) -> str:
    """Markdown: mean and spread (largest less smallest) over seeds."""
    lines = ["| recipe | accuracy, mean (spread) | steps to 0.9 | response length | seeds |", "|---|---|---|---|---|"]
    for name, runs in results.items():
        acc = [r["accuracy"] for r in runs]
        to = ", ".join(str(r["steps_to_0.9"] or "never") for r in runs)
        first, last = (statistics.mean(r[k] for r in runs) for k in ("len_first", "len_last"))
        lines.append(f"| {name} | {statistics.mean(acc):.3f} ({max(acc) - min(acc):.3f}) | {to} | {first:.0f} → {last:.0f} "
                     f"| {len(runs)} |")
    return "\n".join(lines) + "\n"


def draw(results: dict[str, list[dict]], path: Path) -> None:
    """Mean reward of the seeds over the steps, a panel a recipe, against PPO in grey; for the longer sums their length too."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-len(results) // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(11, 2.6 * rows), sharex=True, sharey=True, constrained_layout=True)
    for axis, (name, runs) in zip(axes.flat, results.items(), strict=False):
        for r in results.get("ppo", []):
            axis.plot(r["rewards"], color="0.75", lw=1)
        for i, r in enumerate(runs):
            axis.plot(r["rewards"], lw=1.2, label=f"seed {i}: {r['accuracy']:.3f}")
        axis.set_title(name, fontsize=10)
        axis.legend(fontsize=7, loc="lower right", title="held-out accuracy", title_fontsize=7)
        axis.grid(alpha=0.3)
        axis.set_ylim(0.4, 1.01)
        if name.endswith(HARD):
            lengths = axis.twinx()
            for r in runs:
                lengths.plot(r["lengths"], lw=1, ls=":", color="0.3")
            lengths.set_ylabel("tokens a response (dotted)", fontsize=8)
    for axis in axes.flat[len(results):]:
        axis.axis("off")
    figure.supxlabel("step (256 samples)", fontsize=9)
    figure.supylabel("mean reward of the step's samples; grey: ppo", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one core each")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", default="runs/algorithms")
    parser.add_argument("--base", default="runs/tiny-base", help="base models lie in BASE-SEED")
    args = parser.parse_args()
    names = {k: c for k, c in configs(args.steps).items() if not args.only or k in args.only}
    waiting = []
    for seed in range(args.seeds):
        for name, c in names.items():
            b = build(f"{args.base}-{seed}", seed) if HARD not in name else build(f"{args.base}3-{seed}", seed, digits=3)
            waiting.append(replace(c, seed=seed, model=b, data=(f"{b}/train.jsonl",), eval_data=(f"{b}/eval.jsonl",),
                                   out=str(Path(args.out).absolute() / f"{name}-{seed}")))
    waiting = [c for c in waiting if not (Path(c.out) / "export").exists()]  # what ended before an interruption stays
    context, began, running = mp.get_context("fork"), time.monotonic(), []
    while waiting or running:
        while waiting and len(running) < args.jobs:
            cfg = waiting.pop(0)
            running.append((cfg, context.Process(target=job, args=(cfg,))))
            running[-1][1].start()
        time.sleep(1)
        ended = [(c, p) for c, p in running if p.exitcode is not None]
        for cfg, process in ended:
            print(f"{time.monotonic() - began:5.0f} s  {Path(cfg.out).name}: exit {process.exitcode}", flush=True)
        running = [r for r in running if r not in ended]
    results = {n: [result(Path(args.out) / f"{n}-{s}") for s in range(args.seeds)]
               for n in names}
    to = ROOT / "bench/results"
    facts = {"steps": args.steps, "samples_per_step": 256, "results": results}
    (to / "algorithms.json").write_text(json.dumps(facts) + "\n")
    (to / "algorithms.md").write_text(table(results))
    draw(results, to / "algorithms.png")
    print(table(results))


if __name__ == "__main__":
    main()
