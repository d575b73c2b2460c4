"""The production layout on one machine: 4 torchrun agents × 8 ranks train the tiny model, save, and 8 ranks of the debug
layout go on from there.

    python bench/rehearse.py [--base runs/tiny-base-0] [--out runs/rehearse]     # or: make rehearse

What a cluster would meet first, met here: the rendezvous of four agents, 32 ranks sharded over one mesh, the layout's own
batch (128 × 64), a sharded save, and a resume on another number of ranks. One JSON line a phase: seconds, and the most
memory that the machine had less than before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def available_gb() -> float:
    """Memory that could still be had, by the kernel's estimate."""
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    return int(line.split()[1]) / 2**20


def phase(name: str, commands: list[list[str]], out: Path) -> None:
    """Run the commands side by side to their end; print what they took. Exits where one fails."""
    before, low, done, began = available_gb(), [available_gb()], threading.Event(), time.monotonic()

    def watch() -> None:
        while not done.wait(1):
            low[0] = min(low[0], available_gb())

    threading.Thread(target=watch, daemon=True).start()
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    logs = [out.parent / f"{out.name}-{name}-{i}.log" for i in range(len(commands))]
    agents = [subprocess.Popen(c, cwd=ROOT, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT)
              for c, log in zip(commands, logs, strict=True)]
    codes = [a.wait() for a in agents]
    done.set()
    if any(codes):
        sys.exit(f"rehearse.py: {name} ended with {codes}; its words: {', '.join(map(str, logs))}")
    print(json.dumps({"bench": "rehearse", "phase": name, "seconds": round(time.monotonic() - began),
                      "memory_gb": round(before - low[0], 1)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="runs/tiny-base-0")
    parser.add_argument("--out", default="runs/rehearse")
    args = parser.parse_args()
    out = Path(args.out).absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def torchrun(where: list[str], layout: str, steps: int) -> list[str]:
        return [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", "8", "--monitor-interval", "2",
                "train.py", "tiny-ppo", "--layout", layout, "--model", args.base, "--data", f"{args.base}/train.jsonl",
                "--eval_data", f"{args.base}/eval.jsonl", "--eval_every", "0", "--lr_decay", "constant",
                "--steps", str(steps), "--out", str(out)]

    cluster = ["--nnodes", "4", "--rdzv-backend", "c10d", "--rdzv-id", "rehearse", "--rdzv-endpoint", f"localhost:{port}"]
    phase("production", [torchrun(cluster, "production", 2)] * 4, out)
    phase("debug", [torchrun(["--standalone"], "debug", 4)], out)
    from log import read_metrics

    rows = [r for r in read_metrics(out) if "reward" in r]
    said = (out.parent / f"{out.name}-debug-0.log").read_text()
    assert [r["step"] for r in rows] == [0, 1, 2, 3] and "resumed after 2 steps" in said, rows
    print(json.dumps({"bench": "rehearse", "rewards": [round(r["reward"], 3) for r in rows],
                      "gap_max": max(r["logp_gap/max"] for r in rows), "resumed": True}))


if __name__ == "__main__":
    main()
