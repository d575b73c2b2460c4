"""Measures what a checkpoint costs. A block is five training steps. Half of the blocks begin with a save, and
are compared to the blocks without a save.

    torchrun --standalone --nproc-per-node 2 -m bench.saving --model runs/tiny-base-0 [--pairs 20]
             [--out runs/saving]

Prints one JSON line:
    waits_s            seconds that training waits for the copy to host memory
    difference_share   seconds that a save adds to a block, divided by the seconds of a block; mean over
                       pairs of blocks, after the lowest and the highest tenth are dropped
    cpu_share          the same for the CPU seconds of rank 0
"""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import replace

import dist
import train
from bench.common import arguments, new_folder, say
from configs import PRESETS
from guard.messages import user_errors

BLOCK = 5  # training steps in a block


def middle(values: list[float]) -> list[float]:
    cut = len(values) // 10
    return sorted(values)[cut:len(values) - cut]


def differences(blocks: dict[bool, list[float]]) -> list[float]:
    """Returns (seconds with a save - seconds without) / median seconds without, for each pair of blocks."""
    usual = statistics.median(blocks[False])
    return [(a - b) / usual for a, b in zip(blocks[True], blocks[False], strict=True)]


def main() -> None:
    args = arguments(__doc__, model="runs/tiny-base-0", pairs=20, preset="tiny-ppo", out="runs/saving")
    still = 1e-30  # a learning rate that changes no weight, so every block does the same work
    cfg = replace(PRESETS[args.preset], model=args.model, data=(f"{args.model}/train.jsonl",), eval_data=(),
                  out=args.out, lr_decay="constant", save_every=0, steps=1 + BLOCK, policy_lr=still,
                  critic_lr=still)
    dist.init()
    with user_errors("saving.py"):
        out = dist.together(new_folder, args.out)
    run, waits = train.prepare(cfg), []
    seconds: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    run.start = 1  # not 0, because step 0 prints samples
    for block in range(-2, 2 * args.pairs):  # the first two blocks warm up
        # Of four blocks, only the second and the third begin with a save. In this order, a slow drift of the
        # machine's speed cancels out.
        saves = block % 4 in (1, 2)
        began, cpu_began = time.perf_counter(), time.process_time()
        if saves:
            run.saver.save(1000 + block)
            assert not run.saver.failed
            waits.append(time.perf_counter() - began)
        train.train(run)
        if block >= 0:
            seconds[saves].append(time.perf_counter() - began)
            cpu[saves].append(time.process_time() - cpu_began)
    run.saver.finish()
    usual, found = statistics.median(seconds[False]), differences(seconds)
    kept, kept_cpu = middle(found), middle(differences(cpu))
    if run.world.main:
        say({
            "bench": "saving", "preset": args.preset, "ranks": run.world.size, "pairs": args.pairs,
            "block_s_without": round(usual, 3),
            "block_s_with": round(statistics.median(seconds[True]), 3),
            "waits_s": round(statistics.median(waits), 4),
            "waits_share": round(statistics.median(waits) / usual, 4),
            "difference_share_median": round(statistics.median(found), 4),
            "difference_share_mean": round(statistics.mean(found), 4),
            "difference_share": round(statistics.mean(kept), 4),
            "difference_stderr": round(statistics.stdev(kept) / len(kept) ** 0.5, 4),
            "cpu_share": round(statistics.mean(kept_cpu), 4),
            "cpu_stderr": round(statistics.stdev(kept_cpu) / len(kept_cpu) ** 0.5, 4)})
    run.grader.close()
    run.log.close()
    run.lock.release()
    dist.gather(None)
    if run.world.main:
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
