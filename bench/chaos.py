"""Kill training again and again; every run must end by itself as the undisturbed one did, bit by bit.

    python bench/chaos.py [--runs 20]            # kill -9 of a random rank at a random moment, one in three inside a save
    python bench/chaos.py --nodes 2 [--runs 2]   # of a whole node: torchrun's agent and its ranks; it comes back later

The runs are `tiny-ppo` of 8 steps on 2 ranks a node under torchrun --max-restarts 3, saved after every second step. Two
nodes are network namespaces with a cable between them where the machine lets us (root), else both are on loopback. Prints
one JSON line a run, and one for all; exit status 1 where a run differs, fails or has lost a saved step.
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
RANKS, STEPS, EVERY = 2, 8, 2


class Nodes:
    """One or two machines, as far as a process can tell: where torchrun's agents run, and the ranks below them."""

    def __init__(self, count: int, base: str, out: Path) -> None:
        self.count, self.out = count, out
        self.names = [f"torz{i}" for i in range(count)] if count > 1 and _wired(count) else []
        where = ["--standalone"] if count == 1 else [
            "--nnodes", str(count), "--rdzv-backend", "c10d", "--rdzv-id", out.name, "--rdzv-endpoint",
            f"{'10.77.0.1' if self.names else 'localhost'}:{random.Random(out.name).randint(20000, 40000)}"]
        self.torchrun = [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", str(RANKS),
                         "--max-restarts", "3", "--monitor-interval", "1"]
        self.program = ["train.py", "tiny-ppo", "--model", base, "--data", f"{base}/train.jsonl", "--eval_data",
                        f"{base}/eval.jsonl", "--steps", str(STEPS), "--save_every", str(EVERY), "--eval_every", "4",
                        "--prompts_per_step", "8", "--out", str(out)]
        self.agents: list[subprocess.Popen] = []

    def start(self, node: int) -> None:
        """Begin node's agent in a session of its own, so that a signal to the session is the loss of the machine."""
        inside = ["ip", "netns", "exec", self.names[node]] if self.names else []
        # A namespace's address is not what the host's name stands for, so torchrun is told who it is.
        here = ["--rdzv-conf", f"is_host={node == 0}", "--local-addr", f"10.77.0.{node + 1}"] if self.names else []
        env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        env |= {"GLOO_SOCKET_IFNAME": f"eth{node}"} if self.names else {}
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.count > 1 else {}  # see dist.fresh_store
        with (self.out.parent / f"{self.out.name}.{node}.log").open("ab") as log:
            agent = subprocess.Popen([*inside, *self.torchrun, *here, *self.program], cwd=ROOT, env=env, stdout=log, stderr=log,
                                     start_new_session=True)
        self.agents[node:node + 1] = [agent]

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that train now, by rank."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"--out\0{self.out}\0".encode() in (entry / "cmdline").read_bytes():
                    env = dict(p.partition("=")[::2] for p in (entry / "environ").read_text().split("\0"))
                    if "LOCAL_RANK" in env:
                        found[int(env["RANK"])] = int(entry.name)
            except (OSError, UnicodeDecodeError):
                continue
        return found

    def wait(self) -> list[int]:
        """Exit status of each agent."""
        return [a.wait() for a in self.agents]

    def lose(self, node: int) -> None:
        """What a power cut does: the agent and all that it started go at once."""
        os.killpg(self.agents[node].pid, signal.SIGKILL)
        here = {pid for rank, pid in self.ranks().items() if rank // RANKS == node}
        for pid in here:  # torchrun's ranks have sessions of their own
            os.kill(pid, signal.SIGKILL)
        self.agents[node].wait()


def _wired(count: int) -> bool:
    """Make `count` network namespaces joined by a bridge; whether the machine let us."""
    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0

    if os.geteuid() or shutil.which("ip") is None or not ip("netns", "list"):
        return False
    for i in range(count):
        ip("netns", "del", f"torz{i}")
    done = all(ip("netns", "add", f"torz{i}") for i in range(count)) and ip(
        "link", "add", "eth0", "netns", "torz0", "type", "veth", "peer", "name", "eth1", "netns", "torz1")
    return done and all(ip("-n", f"torz{i}", "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"eth{i}")
                        and ip("-n", f"torz{i}", "link", "set", f"eth{i}", "up")
                        and ip("-n", f"torz{i}", "link", "set", "lo", "up") for i in range(count))


def outcome(out: Path) -> tuple[list[dict], dict[str, bytes]]:
    """What must not depend on what happened: metrics without clock and memory, and the exported weights."""
    from log import read_metrics

    clock = ("time", "tokens_per_s", "tflops", "mem", "rollout_tail")
    rows = [{k: v for k, v in r.items() if not k.startswith(clock)} for r in read_metrics(out)]
    return rows, {w: (out / f"export/{w}/model.safetensors").read_bytes() for w in ("policy", "critic")}


def newest(out: Path) -> int:
    """Steps that the newest complete checkpoint holds."""
    from ckpt import complete

    return max((int(p.name[-6:]) for p in complete(out)), default=0)


def disturb(nodes: Nodes, rng: random.Random, length: float, in_save: bool) -> dict | None:
    """Start the nodes and kill a rank, or lose a node, at a random moment of a run that takes `length` seconds, or inside a
    save; says what was done. None: the run was quicker."""
    shutil.rmtree(nodes.out, ignore_errors=True)
    for i in range(nodes.count):
        nodes.start(i)
    began, moment = time.monotonic(), rng.uniform(0.1, 0.9) * length
    save = rng.choice(range(EVERY, STEPS, EVERY))
    while all(a.poll() is None for a in nodes.agents):
        if in_save and list((nodes.out / "ckpt").glob(f".step_{save:06d}*")):
            time.sleep(rng.uniform(0, 0.05))
            break
        if not in_save and time.monotonic() - began > moment and nodes.ranks():
            break
        time.sleep(0.001 if in_save else 0.05)
    ranks, had = nodes.ranks(), newest(nodes.out)
    late = had == STEPS and nodes.count > 1  # an agent that comes back to a run that has ended finds nobody
    if not ranks or late or any(a.poll() is not None for a in nodes.agents):
        return None
    if nodes.count > 1:
        nodes.lose(1)
        time.sleep(rng.uniform(1, 10))
        nodes.start(1)
        done = "node 1 lost"
    else:
        victim = rng.choice(sorted(ranks))
        os.kill(ranks[victim], signal.SIGKILL)
        done = f"rank {victim} killed"
    return {"done": done, "after_s": round(time.monotonic() - began, 1), "in_save": in_save, "had": had}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", default="runs/tiny-base-0", help="folder of tiny.py's base model, grown where it is missing")
    parser.add_argument("--out", default="runs/chaos")
    args = parser.parse_args()
    from tiny import build

    base, out, rng = build(args.base), Path(args.out).absolute(), random.Random(args.seed)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    calm, began = Nodes(args.nodes, base, out / "calm"), time.monotonic()
    for i in range(args.nodes):
        calm.start(i)
    assert calm.wait() == [0] * args.nodes, f"the undisturbed run failed: see {out}/calm.0.log"
    length, want = time.monotonic() - began, outcome(calm.out)
    print(json.dumps({"run": "undisturbed", "seconds": round(length, 1), "namespaces": bool(calm.names)}), flush=True)
    bad = 0
    for i in range(args.runs):
        said = None
        while said is None:
            nodes = Nodes(args.nodes, base, out / f"run{i:02d}")
            said, codes = disturb(nodes, rng, length, in_save=i % 3 == 2), nodes.wait()
        text = Path(f"{nodes.out}.0.log").read_text(errors="replace")
        resumed = [int(n) for n in re.findall(r"resumed after (\d+) steps", text)]
        same = not any(codes) and outcome(nodes.out) == want
        kept = (resumed or [0])[-1] >= said["had"]
        bad += not (same and kept)
        print(json.dumps({"run": i} | said | {"resumed_after": resumed, "exit": codes, "identical": same,
                                              "nothing_saved_lost": kept}), flush=True)
        if same and kept:
            shutil.rmtree(nodes.out)
    print(json.dumps({"runs": args.runs, "nodes": args.nodes, "identical": args.runs - bad}))
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
