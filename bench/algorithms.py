"""Trains a tiny model to add numbers, with every recipe and three seeds, to show that each recipe learns. A
recipe is an RL algorithm with its settings.

    python -m bench.algorithms [--seeds 3] [--steps 30] [--jobs 2] [--only ppo grpo …] [--out runs/algorithms]

PPO and GRPO also train on sums of three-digit numbers. Finished runs are not repeated. The results go to
bench/results/algorithms.json, .md and .png.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import train
from bench import tasks
from bench.common import RESULTS, arguments, in_forks, markdown
from configs import PRESETS, Config
from log import read_metrics
from tools import tiny

HARD = "-3-digits"
# Recipe -> its preset. The preset of any other recipe is f"{recipe}-7b".
PRESET_OF = {"grpo": "open-r1-1.5b-grpo", "orz-grpo": "orz-7b-grpo"}
NAMES = ("grpo", "orz-grpo", "dr-grpo", "dapo", "rloo", "reinforce++", "reinforce++-baseline", "gspo",
         "cispo", "scale-rl")
FIELDS = ("advantage", "ratio", "aggregation", "clip_low", "clip_high")
# Recipe of the GRPO family -> its preset's values of FIELDS
RECIPES = {name: {field: getattr(PRESETS[PRESET_OF.get(name, f"{name}-7b")], field) for field in FIELDS}
           for name in NAMES}


def configs(steps: int) -> dict[str, Config]:
    tiny = replace(PRESETS["tiny-grpo"], steps=steps, eval_every=steps, save_every=0, pack_len=4096)
    additions = {"dapo": dict(resample_rounds=2, overlong_buffer=16, policy_updates=2),
                 "gspo": dict(policy_updates=2), "cispo": dict(policy_updates=2),
                 "scale-rl": dict(policy_updates=2, drop_uniform=True)}
    found = {"ppo": replace(tiny, algo="ppo", critic_updates=4)}
    for name, fields in RECIPES.items():
        found[name] = replace(tiny, **fields, **additions.get(name, {}))
    return found | {f"{name}{HARD}": found[name] for name in ("ppo", "grpo")}


def seeded(cfg: Config, name: str, seed: int, base: str, out: Path) -> Config:
    if name.endswith(HARD):
        model = tasks.build(f"{base}3-{seed}", "sums-3", seed)
    else:
        model = tiny.build(f"{base}-{seed}", seed)
    return replace(cfg, seed=seed, model=model, data=(f"{model}/train.jsonl",),
                   eval_data=(f"{model}/heldout.jsonl",), out=str(out / f"{name}-{seed}"))


def result(out: Path) -> dict:
    rows = read_metrics(out)
    steps = [r for r in rows if "reward" in r]
    rewards = [r["reward"] for r in steps]
    lengths = [r["response_len"] for r in steps]
    accuracy = [r["eval/heldout/avg@1"] for r in rows if "eval/heldout/avg@1" in r]
    return {"base": accuracy[0], "accuracy": accuracy[-1],
            "len_first": lengths[0], "len_last": lengths[-1], "rewards": rewards, "lengths": lengths}


def table(results: dict[str, list[dict]]) -> str:
    lines = []
    for name, runs in results.items():
        first, last = mean(r["len_first"] for r in runs), mean(r["len_last"] for r in runs)
        lines.append((name.removesuffix(HARD), 3 if name.endswith(HARD) else 2,
                      f"{mean(r['accuracy'] for r in runs):.3f}", f"{first:.0f} → {last:.0f}"))
    head = ("recipe", "digits of each number", "accuracy", "tokens per response, first → last step")
    return ("Each recipe trains the demo's model to add two numbers. Accuracy is the share of held-out sums\n"
            "that are right after training. It is a mean over the seeds.\n\n" + markdown(head, lines))


def draw(results: dict[str, list[dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-len(results) // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(11, 2.6 * rows), sharex=True, sharey=True,
                                constrained_layout=True)
    for axis, (name, runs) in zip(axes.flat, results.items(), strict=False):
        for r in results.get("ppo", []):
            axis.plot(r["rewards"], color="0.75", lw=1)
        draw_panel(axis, name, runs)
    for axis in axes.flat[len(results):]:
        axis.axis("off")
    figure.supxlabel("step (256 samples)", fontsize=9)
    figure.supylabel("mean reward of the step's samples; grey: ppo", fontsize=9)
    figure.savefig(path, dpi=110)


def draw_panel(axis, name: str, runs: list[dict]) -> None:
    for seed, r in enumerate(runs):
        axis.plot(r["rewards"], lw=1.2, label=f"seed {seed}: {r['accuracy']:.3f}")
    axis.set_title(name, fontsize=10)
    axis.legend(fontsize=7, loc="lower right", title="held-out accuracy", title_fontsize=7)
    axis.grid(alpha=0.3)
    axis.set_ylim(0.4, 1.01)
    if name.endswith(HARD):
        right = axis.twinx()
        for r in runs:
            right.plot(r["lengths"], lw=1, ls=":", color="0.3")
        right.set_ylabel("tokens a response (dotted)", fontsize=8)


def main() -> None:
    args = arguments(__doc__, seeds=3, steps=30, jobs=2, only=(), out="runs/algorithms",
                     base="runs/tiny-base")
    torch.set_num_threads(1)
    began, out = time.monotonic(), Path(args.out).absolute()
    recipes = {k: c for k, c in configs(args.steps).items() if not args.only or k in args.only}
    seeds = range(args.seeds)
    runs = [seeded(cfg, name, seed, args.base, out) for seed in seeds for name, cfg in recipes.items()]
    runs = [c for c in runs if not (Path(c.out) / "export").exists()]
    for i, status in in_forks([(partial(train.main, c), Path(c.out, "log.txt")) for c in runs], args.jobs):
        print(f"{time.monotonic() - began:5.0f} s  {Path(runs[i].out).name}: exit {status}", flush=True)
    results = {name: [result(out / f"{name}-{seed}") for seed in seeds] for name in recipes}
    facts = {"steps": args.steps, "samples_per_step": 256, "results": results}
    (RESULTS / "algorithms.json").write_text(json.dumps(facts) + "\n")
    (RESULTS / "algorithms.md").write_text(table(results))
    draw(results, RESULTS / "algorithms.png")
    print(table(results))


if __name__ == "__main__":
    main()
