"""Kills training again and again. Every run must end by itself, equal bit for bit to the undisturbed run.

    python bench/chaos.py [--runs 20]           # kills a random rank; in each third run during a save
    python bench/chaos.py --nodes 2 [--runs 2]  # kills a node: torchrun's agent and its ranks; it comes back

A run is `tiny-ppo`: 8 steps on 2 ranks a node under torchrun --max-restarts 3, with a save after every second
step. Two nodes are network namespaces, joined by a virtual cable. If that is not allowed (it needs root),
both are on loopback. Prints one JSON line a run, and one for all. The exit status is 1 if a run differs,
fails, or loses a saved step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RANKS, STEPS, SAVE_EVERY = 2, 8, 2  # RANKS: of each node


class Nodes:
    """A run on one or two nodes: one torchrun agent a node, and the ranks that the agents start."""

    def __init__(self, count: int, base: str, out: Path) -> None:
        self.count, self.out = count, out
        self.names = [f"torz{i}" for i in range(count)] if count > 1 and make_namespaces(count) else []
        where = ["--standalone"]
        if count > 1:
            host = "10.77.0.1" if self.names else "localhost"
            port = random.Random(out.name).randint(20000, 40000)
            where = ["--nnodes", str(count), "--rdzv-backend", "c10d", "--rdzv-id", out.name,
                     "--rdzv-endpoint", f"{host}:{port}"]
        self.torchrun = [sys.executable, "-m", "torch.distributed.run", *where,
                         "--nproc-per-node", str(RANKS), "--max-restarts", "3", "--monitor-interval", "1"]
        self.program = ["train.py", "tiny-ppo", "--model", base, "--data", f"{base}/train.jsonl",
                        "--eval_data", f"{base}/eval.jsonl", "--steps", str(STEPS),
                        "--save_every", str(SAVE_EVERY), "--eval_every", "4", "--prompts_per_step", "8",
                        "--out", str(out)]
        self.agents: dict[int, subprocess.Popen] = {}
        for node in range(count):
            self.start(node)

    def start(self, node: int) -> None:
        """Starts the node's agent, in a session of its own: killing the session is the loss of the node."""
        env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.count > 1:
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see dist.fresh_store
        command = [*self.torchrun, *self.program]
        if self.names:
            env["GLOO_SOCKET_IFNAME"] = f"eth{node}"
            # The host's name does not resolve to the namespace's address, so torchrun is told who is the
            # host.
            own = ["--rdzv-conf", f"is_host={node == 0}", "--local-addr", f"10.77.0.{node + 1}"]
            command = ["ip", "netns", "exec", self.names[node], *self.torchrun, *own, *self.program]
        with Path(f"{self.out}.{node}.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log,
                                                 start_new_session=True)

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that train now, by rank."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"--out\0{self.out}\0".encode() in (entry / "cmdline").read_bytes():
                    lines = (entry / "environ").read_text().split("\0")
                    env = dict(line.partition("=")[::2] for line in lines)
                    if "LOCAL_RANK" in env:
                        found[int(env["RANK"])] = int(entry.name)
            except (OSError, UnicodeDecodeError):  # the process has ended
                continue
        return found

    def running(self) -> bool:
        """Whether no agent has ended."""
        return all(agent.poll() is None for agent in self.agents.values())

    def wait(self) -> list[int]:
        """Exit status of each agent."""
        return [agent.wait() for agent in self.agents.values()]

    def kill_node(self, node: int) -> None:
        """Kills the agent and its ranks, as a power cut does. The ranks have sessions of their own."""
        os.killpg(self.agents[node].pid, signal.SIGKILL)
        for rank, pid in self.ranks().items():
            if rank // RANKS == node:
                os.kill(pid, signal.SIGKILL)
        self.agents[node].wait()


def make_namespaces(count: int) -> bool:
    """Makes network namespaces torz0 and torz1, joined by a virtual cable. False if that is not allowed."""
    def ip(command: str) -> bool:
        return subprocess.run(["ip", *command.split()], capture_output=True, check=False).returncode == 0

    if os.geteuid() or shutil.which("ip") is None or not ip("netns list"):
        return False
    for i in range(count):
        ip(f"netns del torz{i}")
    commands = [f"netns add torz{i}" for i in range(count)]
    commands.append("link add eth0 netns torz0 type veth peer name eth1 netns torz1")
    for i in range(count):
        commands += [f"-n torz{i} addr add 10.77.0.{i + 1}/24 dev eth{i}", f"-n torz{i} link set eth{i} up",
                     f"-n torz{i} link set lo up"]
    return all(ip(command) for command in commands)


def outcome(out: Path) -> tuple[list[dict], list[bytes]]:
    """What no disturbance may change: metrics without times and memory, and the exported weights."""
    from log import read_metrics

    clock = ("time", "tokens_per_s", "tflops", "mem", "rollout_tail")
    rows = [{k: v for k, v in r.items() if not k.startswith(clock)} for r in read_metrics(out)]
    return rows, [(out / f"export/{name}/model.safetensors").read_bytes() for name in ("policy", "critic")]


def newest(out: Path) -> int:
    """Steps in the newest complete checkpoint; 0: there is none."""
    from ckpt import complete

    return max((int(p.name[-6:]) for p in complete(out)), default=0)


def wait_for_moment(nodes: Nodes, rng: random.Random, length: float, in_save: bool) -> None:
    """Waits for a random moment of a run that takes `length` seconds, or for one inside a random save.
    Returns at once if an agent ends."""
    began, moment = time.monotonic(), rng.uniform(0.1, 0.9) * length
    step = rng.choice(range(SAVE_EVERY, STEPS, SAVE_EVERY))
    while nodes.running():
        if in_save and list((nodes.out / "ckpt").glob(f".step_{step:06d}*")):
            time.sleep(rng.uniform(0, 0.05))
            return
        if not in_save and time.monotonic() - began > moment and nodes.ranks():
            return
        time.sleep(0.001 if in_save else 0.05)


def disturb(nodes: Nodes, rng: random.Random, length: float, in_save: bool) -> dict | None:
    """Kills a random rank, or kills node 1 and restarts it. Returns what was done; None: it came too late."""
    began = time.monotonic()
    wait_for_moment(nodes, rng, length, in_save)
    ranks, saved = nodes.ranks(), newest(nodes.out)
    # When the last save is done, node 0 may end before node 1 is back: node 1 could then join nobody.
    too_late = saved == STEPS and nodes.count > 1
    if not ranks or too_late or not nodes.running():
        return None
    if nodes.count > 1:
        nodes.kill_node(1)
        time.sleep(rng.uniform(1, 10))
        nodes.start(1)
        done = "node 1 lost"
    else:
        victim = rng.choice(sorted(ranks))
        os.kill(ranks[victim], signal.SIGKILL)
        done = f"rank {victim} killed"
    return {"done": done, "after_s": round(time.monotonic() - began, 1), "in_save": in_save, "had": saved}


def disturbed_run(count: int, base: str, out: Path, rng: random.Random, length: float, in_save: bool,
                  want: tuple) -> dict:
    """One disturbed run, tried again until the disturbance comes in time, and how it compares with `want`."""
    done = None
    while done is None:
        shutil.rmtree(out, ignore_errors=True)
        nodes = Nodes(count, base, out)
        done = disturb(nodes, rng, length, in_save)
        codes = nodes.wait()
    text = Path(f"{out}.0.log").read_text(errors="replace")
    resumed = [int(n) for n in re.findall(r"resumed after (\d+) steps", text)]
    identical = not any(codes) and outcome(out) == want
    kept = (resumed or [0])[-1] >= done["had"]
    return done | {"resumed_after": resumed, "exit": codes, "identical": identical,
                   "nothing_saved_lost": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", default="runs/tiny-base-0", help="base model; made if it is missing")
    parser.add_argument("--out", default="runs/chaos")
    args = parser.parse_args()
    from tiny import build

    base, out, rng = build(args.base), Path(args.out).absolute(), random.Random(args.seed)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    began = time.monotonic()
    undisturbed = Nodes(args.nodes, base, out / "undisturbed")
    assert not any(undisturbed.wait()), f"the undisturbed run failed: see {out}/undisturbed.0.log"
    length, want = time.monotonic() - began, outcome(undisturbed.out)
    print(json.dumps({"run": "undisturbed", "seconds": round(length, 1),
                      "namespaces": bool(undisturbed.names)}), flush=True)
    identical = 0
    for i in range(args.runs):
        folder = out / f"run{i:02d}"
        row = disturbed_run(args.nodes, base, folder, rng, length, i % 3 == 2, want)
        print(json.dumps({"run": i} | row), flush=True)
        if row["identical"] and row["nothing_saved_lost"]:
            identical += 1
            shutil.rmtree(folder)
    print(json.dumps({"runs": args.runs, "nodes": args.nodes, "identical": identical}))
    sys.exit(identical < args.runs)


if __name__ == "__main__":
    main()
