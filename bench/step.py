"""Whole steps of training: seconds a phase, samples and tokens a second, share of the device's arithmetic, memory.

    python bench/step.py tiny-grpo --model runs/tiny-base-0 --data runs/tiny-base-0/train.jsonl [any flag of train.py]
    torchrun --standalone --nproc-per-node 2 bench/step.py tiny-ppo …

Runs train.py's loop (12 steps without evaluation and saves, unless flags say otherwise) and reads its metrics. Medians over
the steps after the first three; `mfu` is of the FLOP that a matrix product reaches here. One JSON line a figure.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent)] + [p for p in sys.path if p != str(HERE)]  # bench/train.py is not train.py


def main() -> None:
    from configs import UserError, parse

    try:
        cfg = parse([*sys.argv[1:2], "--eval_every", "0", "--save_every", "0", "--steps", "12", *sys.argv[2:]], "step.py")
    except UserError as e:
        sys.exit(f"step.py: {e}")
    import dist
    import train
    from bench.limits import device_name, matmul_flops
    from log import read_metrics

    world = dist.init(cfg.device, cfg.dtype, cfg.stall_limit)
    peak = matmul_flops(world.device, world.dtype)
    with tempfile.TemporaryDirectory() as out:
        out = dist.gather(out)[0]  # rank 0's
        cfg = replace(cfg, out=f"{out}/run", go=True)
        run = train.prepare(cfg)
        train.train(run)
        run.grader.close()
        run.log.close()
        rows = [r for r in read_metrics(Path(cfg.out)) if "reward" in r][3:]
        dist.gather(None)
    if not world.main:
        return
    if not rows:
        sys.exit("step.py: no steps after the first three; needed: --steps 4 or more")

    def median(key: str) -> float:
        return statistics.median(r.get(key, 0.0) for r in rows)

    step, samples = median("time/step"), cfg.samples_per_step
    phases = {k.removeprefix("time/"): median(k) for k in rows[-1] if k.startswith("time/") and k != "time/step"}
    told = [sum(v for k, v in r.items() if k.startswith("time/") and k != "time/step") / r["time/step"] for r in rows]
    what = {"bench": "step", "device": device_name(world.device), "ranks": world.size, "algo": cfg.algo,
            "model": Path(cfg.model).name, "samples": samples, "pack_len": cfg.pack_len}

    def say(figure: str, **values: float) -> None:
        print(json.dumps(what | {"figure": figure} | {k: float(f"{v:.4g}") for k, v in values.items()}), flush=True)

    say("step_s", value=step, **phases)
    say("share_of_step_in_phases", value=statistics.median(told), least=min(told))
    say("not_sampling_nor_passes", value=statistics.median(
        1 - sum(r.get(f"time/{k}", 0.0) for k in ("rollout", "eval", "ref", "old_logp", "critic", "policy")) / r["time/step"]
        for r in rows))
    say("samples_per_s", value=samples / step)
    say("tokens_per_s_a_rank", value=median("tokens_per_s") / world.size)
    say("sampled_tokens_per_s", value=statistics.median(r["response_len"] * samples / r["time/rollout"] for r in rows))
    say("mfu", value=median("tflops") * 1e12 / peak, peak_tflops=peak / 1e12)
    say("memory_gb_a_rank", host=median("mem/host_peak_gb"), device=median("mem/device_peak_gb"))


if __name__ == "__main__":
    main()
