"""Measures the host memory that a rank needs to load its shard of a model, as train.py does.

    python -m bench.loading [--size 1.5b] [--layers 16] [--ranks 2] [--folder runs/loading]    # 1B parameters

The default model takes 2 GB of disk. Prints one JSON line per rank:
    share_gib        size of the rank's shard in fp32
    peak_gib         peak memory while loading, minus the memory before
    by_share         peak_gib / share_gib; about 1 if the rank reads only its own slices
    within           whether peak_gib is at most 1.3 × share_gib + one layer
    file_pages_gib   peak memory of mapped files (the weights), minus the memory before; not in peak_gib
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

from bench.common import TORCHRUN, arguments, environment, say
from bench.shape import build


def memory() -> dict[str, float]:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    kib = {"anonymous": lines["RssAnon"], "files": lines["RssFile"]}
    return {kind: int(text.split()[0]) / 2**20 for kind, text in kib.items()}


def load(folder: str) -> None:
    import dist
    from model import load_policy
    from tools.plan import read_shape

    world = dist.init("cpu", "float32")
    dist.gather(None)
    before, peak, done = memory(), memory(), threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            now = memory()
            peak.update({k: max(peak[k], v) for k, v in now.items()})

    threading.Thread(target=watch, daemon=True).start()
    began = time.perf_counter()
    policy = load_policy(folder, "cpu", partial(dist.shard, over=dist.mesh(world), dtype=world.dtype))
    seconds = time.perf_counter() - began
    done.set()
    shape, count = read_shape(folder), sum(p.numel() for p in policy.parameters())
    share, layer = 4 * count / world.size / 2**30, 4 * shape.layer / 2**30
    used, bound = peak["anonymous"] - before["anonymous"], 1.3 * share + layer
    say({
        "bench": "loading", "rank": world.rank, "ranks": world.size, "parameters": count,
        "seconds": round(seconds, 1), "share_gib": round(share, 3), "peak_gib": round(used, 3),
        "by_share": round(used / share, 3), "bound_gib": round(bound, 3), "within": used <= bound,
        "file_pages_gib": round(peak["files"] - before["files"], 3)})
    dist.gather(None)


def main() -> None:
    args = arguments(__doc__, size="1.5b", layers=16, ranks=2, folder="runs/loading")
    if "RANK" in os.environ:
        return load(args.folder)
    if not (Path(args.folder) / "train.jsonl").exists():
        build(args.folder, args.size, layers=args.layers)
    command = [sys.executable, *TORCHRUN, str(args.ranks), "-m", "bench.loading", "--folder", args.folder]
    sys.exit(subprocess.call(command, env=environment()))


if __name__ == "__main__":
    main()
