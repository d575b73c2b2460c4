"""What loading a model takes of the host: each rank must read its own slices, not the model.

    python bench/loading.py [--size 1.5b] [--layers 16] [--ranks 2] [--folder runs/loading]    # 1B parameters, 2 GB of disk

A policy as train.py loads it: built without memory, sharded, then filled from the safetensors files. For each rank the peak of
its memory while it loads, above what it had before, by its share (fp32) and by the bound 1.3 × share + one layer. Anonymous
memory is what it allocated; pages of the mapped files, which the kernel takes back at will, are counted apart. JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent)] + [p for p in sys.path if p != str(HERE)]


def memory() -> dict[str, float]:
    """This process's resident memory in GiB: anonymous, of files."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {"anonymous": int(lines["RssAnon"].split()[0]) / 2**20, "files": int(lines["RssFile"].split()[0]) / 2**20}


def load(folder: str) -> None:
    """In each rank: load, watch, print."""
    import dist
    from model import load_policy
    from plan import read_shape

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
    used = peak["anonymous"] - before["anonymous"]
    print(json.dumps({"bench": "loading", "rank": world.rank, "ranks": world.size, "parameters": count,
                      "seconds": round(seconds, 1), "share_gib": round(share, 3), "peak_gib": round(used, 3),
                      "by_share": round(used / share, 3), "bound_gib": round(1.3 * share + layer, 3),
                      "within": used <= 1.3 * share + layer,
                      "file_pages_gib": round(peak["files"] - before["files"], 3)}), flush=True)
    dist.gather(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", default="runs/loading")
    args = parser.parse_args()
    if "RANK" in os.environ:
        return load(args.folder)
    if not (Path(args.folder) / "train.jsonl").exists():
        from bench.shape import build

        build(args.folder, args.size, layers=args.layers)
    sys.exit(subprocess.call([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                              str(args.ranks), __file__, "--folder", args.folder],
                             env=os.environ | {"OMP_NUM_THREADS": "1"}))


if __name__ == "__main__":
    main()
