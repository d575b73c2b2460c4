"""Rehearses --layout production (32 ranks) on one machine, with the tiny model, in three phases.

    python -m bench.rehearse [--base runs/tiny-base-0] [--out runs/rehearse]     # or: make rehearse

1. Four torchrun agents, with 8 ranks each, train two steps of 32 × 8 samples and save a checkpoint.
2. One agent with 8 ranks (--layout debug) resumes the run and trains two more steps.
3. Like phase 1, but each model is sharded over all 32 ranks, not over the 8 ranks of an agent. The
   rewards must be equal to those of phase 1.

Prints a JSON line per phase: seconds, memory, and what rank 0 sent (bench/traffic.py). --out must be a new or
empty folder. It is removed at the end.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from bench.common import ROOT, arguments, environment, new_folder, say
from guard.messages import user_errors
from log import read_metrics


def available_gb() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    line = next(x for x in lines if x.startswith("MemAvailable"))
    return int(line.split()[1]) / 2**20


def phase(name: str, commands: list[list[str]], out: Path) -> None:
    """Runs the commands in parallel and prints one line of results. Exits if a command fails."""
    before = lowest = available_gb()
    began = time.monotonic()
    logs = [out.parent / f"{out.name}-{name}-{i}.log" for i in range(len(commands))]
    agents = [subprocess.Popen(c, cwd=ROOT, env=environment(), stdout=log.open("w"), stderr=subprocess.STDOUT)
              for c, log in zip(commands, logs, strict=True)]
    while any(agent.poll() is None for agent in agents):
        lowest = min(lowest, available_gb())
        time.sleep(1)
    codes = [agent.returncode for agent in agents]
    if any(codes):
        sys.exit(f"rehearse.py: {name} ended with {codes}; see {', '.join(map(str, logs))}")
    lines = [line for log in logs for line in log.read_text().splitlines()]
    sent = [json.loads(line) for line in lines if line.startswith('{') and " within" in line]
    say({"bench": "rehearse", "phase": name, "seconds": round(time.monotonic() - began),
         "memory_gb": round(before - lowest, 1), "sent_gib": sent[0]})


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main() -> None:
    args = arguments(__doc__, base="runs/tiny-base-0", out="runs/rehearse")
    with user_errors("rehearse.py"):
        out = new_folder(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)

    def torchrun(layout: str, steps: int, out: Path, shards: str, *where: str) -> list[str]:
        return [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", "8",
                "--monitor-interval", "2", "-m", "bench.traffic", "tiny-ppo", "--layout", layout, "--model",
                args.base, "--data", f"{args.base}/train.jsonl", "--eval_data", f"{args.base}/heldout.jsonl",
                "--eval_every", "0", "--lr_decay", "constant", "--steps", str(steps), "--out", str(out),
                "--shard_ranks", shards]

    cluster = ("--nnodes", "4", "--rdzv-backend", "c10d", "--rdzv-id", "rehearse",
               "--rdzv-endpoint", f"localhost:{free_port()}")
    full = new_folder(f"{out}-full")
    phase("production", [torchrun("production", 2, out, "auto", *cluster)] * 4, out)
    phase("debug", [torchrun("debug", 4, out, "auto", "--standalone")], out)
    phase("production-full", [torchrun("production", 2, full, "0", *cluster)] * 4, full)
    rows, others = ([r for r in read_metrics(x) if "reward" in r] for x in (out, full))
    assert [r["reward"] for r in others] == [r["reward"] for r in rows[:2]], others
    text = (out.parent / f"{out.name}-debug-0.log").read_text()
    assert [r["step"] for r in rows] == [0, 1, 2, 3] and "resumed after 2 steps" in text, rows
    say({"bench": "rehearse", "rewards": [round(r["reward"], 3) for r in rows],
         "gap_max": max(r["logp_gap/max"] for r in rows), "resumed": True})
    shutil.rmtree(out)
    shutil.rmtree(full)


if __name__ == "__main__":
    main()
