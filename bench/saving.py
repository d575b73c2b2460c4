"""What checkpoints cost a run: five steps of the demo with a save before them against five without, alternating in one run.

    torchrun --standalone --nproc-per-node 2 bench/saving.py --model runs/tiny-base-0 [--pairs 20] [--out runs/saving]

Training waits for the copy to host memory (`waits`); the write goes on beside the steps, and what it takes from them shows in
the difference of the two kinds of block: `difference_share` is the mean of its middle four fifths. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
BLOCK = 5  # steps between saves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="runs/tiny-base-0")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--preset", default="tiny-ppo")
    parser.add_argument("--out", default="runs/saving")
    args = parser.parse_args()
    import dist
    import train
    from configs import PRESETS

    still = 1e-30  # a learning rate that moves no weight: every block does the same work
    cfg = replace(PRESETS[args.preset], model=args.model, data=(f"{args.model}/train.jsonl",), eval_data=(), out=args.out,
                  lr_decay="constant", save_every=0, steps=1 + BLOCK, policy_lr=still, critic_lr=still)
    if not dist.init().rank:
        shutil.rmtree(args.out, ignore_errors=True)
    dist.gather(None)
    run, waits = train.prepare(cfg), []
    seconds: dict[bool, list[float]] = {False: [], True: []}
    run.start = 1  # the first step prints samples
    for block in range(-2, 2 * args.pairs):  # the first two warm up
        saves, began = block % 4 in (1, 2), time.perf_counter()  # without, with, with, without: a drift cancels
        if saves:
            said = run.saver.save(1000 + block)
            assert not said, said
            waits.append(time.perf_counter() - began)
        train.train(run)
        if block >= 0:
            seconds[saves].append(time.perf_counter() - began)
    run.saver.finish()
    usual = statistics.median(seconds[False])
    differences = sorted((a - b) / usual for a, b in zip(seconds[True], seconds[False], strict=True))
    kept = differences[len(differences) // 10:-(-9 * len(differences) // 10)]  # a shared machine's pauses are in the tails
    if run.world.main:
        print(json.dumps({
            "bench": "saving", "preset": args.preset, "ranks": run.world.size, "pairs": args.pairs,
            "block_s_without": round(usual, 3),
            "block_s_with": round(statistics.median(seconds[True]), 3),
            "waits_s": round(statistics.median(waits), 4),
            "waits_share": round(statistics.median(waits) / usual, 4),
            "difference_share_median": round(statistics.median(differences), 4),
            "difference_share_mean": round(statistics.mean(differences), 4),
            "difference_share": round(statistics.mean(kept), 4),
            "difference_stderr": round(statistics.stdev(kept) / len(kept) ** 0.5, 4)}))
    run.grader.close()
    run.log.close()


if __name__ == "__main__":
    main()
