"""Measures whole training steps: seconds of each phase, samples and tokens per second, MFU and memory.

    python -m bench.step tiny-grpo --model runs/tiny-base-0 --data runs/tiny-base-0/train.jsonl
    torchrun --standalone --nproc-per-node 2 -m bench.step tiny-ppo …

Takes all flags of train.py. Prints one JSON line per measurement: medians over the steps after the third.
`mfu` is a rank's training FLOPs in a step, divided by the step's seconds and by the FLOP/s of a large matrix
product.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import dist
import train
from bench.common import say
from bench.limits import device_name, matmul_flops
from configs import Config, parse
from guard.messages import require, user_errors
from log import read_metrics

WARMUP = 3
PASSES = ("rollout", "eval", "ref", "old_logp", "critic", "policy")  # phases that run a model


def phases_of(row: dict) -> dict[str, float]:
    return {k.removeprefix("time/"): v for k, v in row.items() if k.startswith("time/") and k != "time/step"}


def figures(rows: list[dict], cfg: Config, ranks: int, peak: float) -> dict[str, dict[str, float]]:
    """Returns name of a measurement -> {field of its JSON line: number}. peak: measured FLOP/s of a rank."""
    samples = cfg.samples_per_step

    def middle(name: str) -> float:
        return median(r.get(name, 0.0) for r in rows)

    phases = {name: middle(f"time/{name}") for name in phases_of(rows[-1])}
    in_phases = [sum(phases_of(r).values()) / r["time/step"] for r in rows]
    other = [1 - sum(r.get(f"time/{name}", 0.0) for name in PASSES) / r["time/step"] for r in rows]
    sampled = [r["response_len"] * samples / r["time/rollout"] for r in rows]
    return {
        "step_s": {"value": middle("time/step"), **phases},
        "share_of_step_in_phases": {"value": median(in_phases), "least": min(in_phases)},
        "not_sampling_nor_passes": {"value": median(other)},
        "samples_per_s": {"value": samples / middle("time/step")},
        "tokens_per_s_a_rank": {"value": middle("tokens_per_s") / ranks},
        "sampled_tokens_per_s": {"value": median(sampled)},
        "mfu": {"value": middle("tflops") * 1e12 / peak, "peak_tflops": peak / 1e12},
        "memory_gb_a_rank": {"host": middle("mem/host_peak_gb"), "device_awake": middle("mem/awake_gb")},
    }


def main() -> None:
    defaults = ["--eval_every", "0", "--save_every", "0", "--steps", "12"]
    cfg = parse([*sys.argv[1:2], *defaults, *sys.argv[2:]], "step.py")
    world = dist.init(cfg.device, cfg.dtype, cfg.stall_limit)
    peak = matmul_flops(world.device, world.dtype)
    with tempfile.TemporaryDirectory() as own_folder:
        folder = dist.gather(own_folder)[0]
        run = train.prepare(replace(cfg, out=f"{folder}/run", go=True))
        train.train(run)
        run.grader.close()
        run.log.close()
        rows = [r for r in read_metrics(Path(folder, "run")) if "reward" in r][WARMUP:]
        dist.gather(None)  # rank 0 removes the folder next, so wait until every rank has read it
    if not world.main:
        return
    require(len(rows) > 0, f"no steps after the first {WARMUP}", f"--steps {WARMUP + 1} or more")
    facts = {"bench": "step", "device": device_name(world.device), "ranks": world.size, "algo": cfg.algo,
             "model": Path(cfg.model).name, "samples": cfg.samples_per_step, "pack_len": cfg.pack_len}
    for name, values in figures(rows, cfg, world.size, peak).items():
        say(facts | {"figure": name} | {k: float(f"{v:.4g}") for k, v in values.items()})


if __name__ == "__main__":
    with user_errors("step.py"):
        main()
