"""Disturbs training runs with faults. Every run must end with the weights of an undisturbed run, bit by bit.

    python -m bench.chaos [--runs 20]                       # kill -9 of a random rank in a random phase
    python -m bench.chaos --faults all [--runs 200]         # every fault of FAULTS; docs/faults.md lists them
    python -m bench.chaos --nodes 2 [--runs 2]              # kills a node (torchrun and ranks), restarts it

One fault strikes each run, in a randomly chosen phase of the run, such as `rollout`. If the run ends before
the fault strikes, a new run takes its place, up to TRIES runs.

A run is ok if all of this holds:
- It ends by itself, after at most 4 starts of its command, with the metrics and weights of the undisturbed
  run.
- It loses no saved step, and it reports what it could not write.
- It prints no unexplained error.

The exit status is 1 if a run is not ok; the run's folder is then kept. Some faults need root and are skipped
without it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python bench/chaos.py`

from bench.common import ROOT, environment, new_folder, say

RANKS, STEPS, SAVE_EVERY = 2, 8, 2  # RANKS is per node
TRIES = 6  # attempts to strike in the chosen phase
TYPED = 4  # maximum number of times that the command of a run is typed
HANG = 120.0  # seconds without output, after which a command counts as hung


# --- code that runs inside the ranks and chooses the moment of the fault

# Fault -> the signals that the struck rank sends to itself
SIGNALS = {"kill": [signal.SIGKILL], "usr1": [signal.SIGUSR1], "freeze": [signal.SIGSTOP],
           "storm": 30 * [signal.SIGTERM, signal.SIGUSR1]}


def be_a_rank() -> None:
    """Runs train.py. In the rank order["rank"], a thread also runs `watch` until the fault strikes."""
    order = json.loads(os.environ["CHAOS"])
    if int(os.environ["RANK"]) == order["rank"] and not Path(order["file"]).exists():
        threading.Thread(target=watch, args=(order,), daemon=True).start()
    sys.argv[0] = "train.py"
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def watch(order: dict) -> None:
    """Lets the fault strike at the chosen time: writes a message to order["file"], for which the main program
    waits, and sends the fault's SIGNALS to this process.

    A visit is a stay of this rank in a phase. The chosen time is order["after"] seconds after the begin of
    visit number order["visit"] to the phase order["phase"].

    In the undisturbed run, no fault strikes. At exit, the begin and end of all visits are written to
    order["file"]."""
    visits, before, file = {}, set(), Path(order["file"])
    if not order["phase"]:
        atexit.register(lambda: file.write_text(json.dumps(dict(visits))))
    while True:
        now, phases = time.monotonic(), current_phases(Path(order["out"]))
        for phase in phases:
            if phase not in before:
                visits.setdefault(phase, []).append([now, now])
            visits[phase][-1][1] = now
        before = phases
        mine = visits.get(order["phase"], [])
        if order["phase"] in phases and len(mine) >= order["visit"] and now - mine[-1][0] >= order["after"]:
            break
        time.sleep(0.0002)
    temp = file.with_suffix(".part")
    temp.write_text(json.dumps({"pid": os.getpid(), "time": time.time()}))
    temp.rename(file)
    for number in SIGNALS.get(order["fault"], ()):
        os.kill(os.getpid(), number)


def current_phases(out: Path) -> set[str]:
    current = getattr(sys.modules.get("dist"), "CURRENT", None)
    phases = {current.name if current else "import"}
    with contextlib.suppress(OSError):
        phases |= {"files"} if any(p.endswith(".part") for p in os.listdir(out / "ckpt")) else set()
    return phases | ({"end"} if (out / "export").exists() else set())


# --- a run


class Nodes:
    """A run with one torchrun agent per node."""

    def __init__(self, count: int, base: str, out: Path, namespaces: bool, order: dict) -> None:
        self.count, self.out, self.order = count, out, order
        self.names = [f"torz{i}" for i in range(count)] if namespaces else []
        self.program = ["tiny-ppo", "--model", base, "--data", f"{base}/train.jsonl",
                        "--eval_data", f"{base}/heldout.jsonl", "--steps", str(STEPS),
                        "--save_every", str(SAVE_EVERY), "--eval_every", "4", "--prompts_per_step", "8",
                        "--out", str(out)]
        self.agents: dict[int, subprocess.Popen] = {}
        self.typed, self.hung = 0, False
        self.expected = ""  # regex of the error that a command must print; "": no error
        self.had = 0  # number of steps that were saved before the fault
        self.copy: Path | None = None  # a copied checkpoint that the run must not remove
        self.type()

    def type(self) -> None:
        self.typed += 1
        for node in range(self.count):
            self.start(node)

    def start(self, node: int) -> None:
        """Starts the node's torchrun agent. In the run's first start, the ranks run `be_a_rank`, which
        injects the fault. In later starts they run train.py."""
        where, host, of_agent = ["--standalone"], [], []
        if self.count > 1:
            where = rendezvous(self.out, "10.77.0.1" if self.names else "localhost")
        env = {}
        if self.names:
            env["GLOO_SOCKET_IFNAME"] = f"eth{node}"
            # In a namespace, the host name does not resolve to the node's address, so torchrun needs
            # these options.
            of_agent = ["--rdzv-conf", f"is_host={node == 0}", "--local-addr", f"10.77.0.{node + 1}"]
            host = ["ip", "netns", "exec", self.names[node]]
        program = ["-m", "bench.chaos"] if self.typed == 1 else ["train.py"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *where, *of_agent,
                    "--nproc-per-node", str(RANKS), "--max-restarts", "3", "--monitor-interval", "1"]
        self.agents[node] = self.popen([*host, *torchrun, *program, *self.program], node, env)

    def popen(self, command: list[str], node: int, env: dict[str, str]) -> subprocess.Popen:
        """Starts an agent in its own process group, which kill_node kills."""
        env = environment() | env | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(self.count > 1)),
                                     "CHAOS": json.dumps(self.order)}
        with Path(f"{self.out}.{node}.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log,
                                    start_new_session=True)

    def ranks(self, node: int | None = None) -> dict[int, int]:
        agents = {a.pid for n, a in self.agents.items() if node in (None, n)}
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, UnicodeDecodeError, KeyError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) in agents:
                    lines = (entry / "environ").read_text().split("\0")
                    found[int(dict(line.partition("=")[::2] for line in lines)["RANK"])] = int(entry.name)
        return found

    def running(self) -> bool:
        return all(agent.poll() is None for agent in self.agents.values())

    def hangs(self) -> bool:
        return time.time() - max(log.stat().st_mtime for log in self.logs()) > HANG

    def logs(self) -> list[Path]:
        return sorted(self.out.parent.glob(f"{self.out.name}.*.log"))

    def text(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self.logs())

    def wait(self) -> list[int]:
        while any(agent.poll() is None for agent in self.agents.values()):
            if self.hangs():
                self.hung = True
                self.kill_all()
            time.sleep(0.05)
        return [agent.returncode for agent in self.agents.values()]

    def wait_for_strike(self) -> dict | None:
        """Waits for the message of `watch`. Returns it: a dict with the struck rank's "pid" and the "time".
        Returns None if the run ends or hangs first."""
        file = Path(self.order["file"])
        while not file.exists():
            if not self.running() or self.hangs():
                return None
            time.sleep(0.002)
        self.had = newest(self.out)
        return json.loads(file.read_text())

    def kill_node(self, node: int) -> None:
        """Kills the process groups of the node's agent and of each of its ranks."""
        agent = self.agents[node]
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGSTOP)  # a stopped agent starts no more ranks
        ranks = self.ranks(node).values()
        for pid in [agent.pid, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        agent.wait()

    def kill_all(self) -> None:
        for node in self.agents:
            self.kill_node(node)


def rendezvous(out: Path, host: str) -> list[str]:
    port = random.Random(str(out)).randint(20000, 40000)
    return ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", out.name,
            "--rdzv-endpoint", f"{host}:{port}"]


def make_namespaces(count: int) -> bool:
    """Makes one network namespace per node. Returns False if there is only one node, or no permission."""
    if count == 1 or shutil.which("ip") is None or not system("ip netns list"):
        return False
    for i in range(count):
        system(f"ip netns del torz{i}")
        atexit.register(system, f"ip netns del torz{i}")
    commands = [f"netns add torz{i}" for i in range(count)]
    commands.append("link add eth0 netns torz0 type veth peer name eth1 netns torz1")
    for i in range(count):
        commands += [f"-n torz{i} addr add 10.77.0.{i + 1}/24 dev eth{i}", f"-n torz{i} link set eth{i} up",
                     f"-n torz{i} link set lo up"]
    return all(system(f"ip {command}") for command in commands)


def system(command: str, *paths: Path) -> bool:
    words = [*command.split(), *map(str, paths)]
    return not os.geteuid() and subprocess.run(words, capture_output=True, check=False).returncode == 0


# --- the faults

# A fault is a function(nodes, what the rank to strike has reported, random generator). It returns False if it
# could not strike.


class Skipped(Exception):
    """This machine does not allow the fault."""


def by_signals(nodes: Nodes, struck: dict, rng: random.Random) -> bool:
    """For the faults in SIGNALS: `watch` has already sent the signals to the struck rank. For `storm`, this
    function sends them to all other ranks too. For `freeze`, it lets the stopped rank continue after 3 s."""
    if nodes.order["fault"] == "storm":
        for pid in nodes.ranks().values():
            for number in SIGNALS["storm"] * (pid != struck["pid"]):
                send(pid, number)
    if nodes.order["fault"] == "freeze":
        time.sleep(3)
        send(struck["pid"], signal.SIGCONT)
    return True


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def node(nodes: Nodes, struck: dict, rng: random.Random) -> bool:
    """Kills and restarts node 1. After the last save, does nothing: node 0 may end before node 1 is back."""
    if nodes.had == STEPS or not nodes.running():
        return False
    nodes.kill_node(1)
    time.sleep(rng.uniform(1, 10))
    nodes.start(1)
    return True


def kill_all(nodes: Nodes, struck: dict, rng: random.Random) -> bool:
    nodes.kill_all()
    return True


def stop(nodes: Nodes, struck: dict, rng: random.Random) -> bool:
    send(nodes.agents[0].pid, signal.SIGTERM)
    return True


def full(nodes: Nodes, struck: dict, rng: random.Random) -> bool:
    ballast = nodes.out / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass
    time.sleep(rng.uniform(2, 4))
    ballast.unlink()
    return True


def read_only(nodes: Nodes, struck: dict, rng: random.Random) -> bool:
    """Makes the run's folder read-only for 2 to 4 seconds, by a read-only bind mount over it. Remounting the
    folder itself would fail, because TensorBoard writes to an open file."""
    other = nodes.out.with_suffix(".ro")
    other.mkdir()
    done = (system("mount --bind", nodes.out, other) and system("mount -o remount,bind,ro", other)
            and system("mount --bind", other, nodes.out))
    time.sleep(rng.uniform(2, 4))
    assert done and system("umount -l", nodes.out) and system("umount -l", other), "mount failed"
    other.rmdir()
    return True


def flip(nodes: Nodes, struck: dict, rng: random.Random) -> bool:
    """Flips one bit of the newest checkpoint. The next command must refuse this checkpoint."""
    nodes.kill_all()
    if not newest(nodes.out):
        return False
    folder = checkpoint(nodes.out)
    file = rng.choice([p for p in sorted(folder.iterdir()) if p.name != "COMPLETE"])
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    nodes.expected = folder.name
    nodes.type()
    nodes.wait()
    shutil.rmtree(folder, ignore_errors=True)
    nodes.had = newest(nodes.out)
    return True


def half(nodes: Nodes, struck: dict, rng: random.Random) -> bool:
    """Damages the newest checkpoint in one of two ways: deletes its file COMPLETE (the next command must
    ignore the checkpoint), or cuts its largest file in half (the next command must refuse it)."""
    nodes.kill_all()
    if not newest(nodes.out):
        return False
    folder = checkpoint(nodes.out)
    largest = max(folder.iterdir(), key=lambda p: p.stat().st_size)
    if rng.random() < 0.5:
        (folder / "COMPLETE").unlink()
    else:
        os.truncate(largest, largest.stat().st_size // 2)
    nodes.had = newest(nodes.out)
    nodes.type()
    if any(nodes.wait()) and (folder / "COMPLETE").exists():
        nodes.expected = folder.name
        shutil.rmtree(folder)
        nodes.had = newest(nodes.out)
    return True


def second(nodes: Nodes, struck: dict, rng: random.Random) -> bool:
    """Stops the first run with SIGSTOP, starts a second run in the same folder, and lets the first run
    continue. The second run must be refused, because the first run holds the lock."""
    owner = {}
    while owner.get("pid") not in nodes.ranks().values():  # until this run has written the lock
        if not nodes.running():
            return False
        with contextlib.suppress(OSError, ValueError):
            owner = json.loads((nodes.out / "lock").read_text())
    ranks = nodes.ranks().values()
    for pid in ranks:
        send(pid, signal.SIGSTOP)
    if (nodes.out / "lock").exists():
        nodes.expected = f"in use by process {owner['pid']} on {owner['host']}; needed"
        process = nodes.popen([sys.executable, "train.py", *nodes.program], 9, {})
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(HANG)
        process.kill()
    for pid in ranks:
        send(pid, signal.SIGCONT)
    return nodes.expected != ""


def skew(nodes: Nodes, struck: dict, rng: random.Random) -> bool:
    """Sets the times of all files to 1970 or 2100. In half of the cases, also kills the run."""
    when = rng.choice([0, 4102444800])
    for path in nodes.out.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (when, when), follow_symlinks=False)
    if rng.random() < 0.5:
        nodes.kill_all()
    return True


def stale(nodes: Nodes, struck: dict, rng: random.Random) -> bool:
    """Kills the run. Adds another machine's old lock. If the run has begun, also adds an unfinished save, and
    a copy of a checkpoint. The next command must take over the lock, remove the unfinished save, and keep the
    copy."""
    nodes.kill_all()
    lock, ckpt = nodes.out / "lock", nodes.out / "ckpt"
    lock.write_text(json.dumps({"host": "gone", "pid": 1, "id": "x"}))
    if not (nodes.out / "config.json").exists():  # before it, no save can have begun
        return True
    (ckpt / ".step_000004.0123456789abcdef.part").mkdir(parents=True)
    nodes.copy = ckpt / "step_000002_copy"
    if nodes.had:
        shutil.copytree(checkpoint(nodes.out), nodes.copy)
    else:
        nodes.copy.mkdir()
    return True


def elsewhere(nodes: Nodes, struck: dict, rng: random.Random) -> bool:
    """Kills the run, then starts it again with two agents. A mount namespace gives the second agent another
    folder at the path --out, as if the disk were not shared. Both agents must end with an error and write
    nothing."""
    if not system("unshare -m true"):
        raise Skipped("unshare is not allowed")
    nodes.kill_all()
    before, other = contents(nodes.out), nodes.out.with_suffix(".other")
    other.mkdir()
    nodes.expected = "is another folder than on rank 0's host"
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous(nodes.out, "localhost"),
               "--nproc-per-node", "1", "train.py", *nodes.program]
    hidden = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', str(other),
              str(nodes.out)]
    nodes.agents = {0: nodes.popen(command, 0, {}), 1: nodes.popen([*hidden, *command], 1, {})}
    codes = nodes.wait()
    del nodes.agents[1]
    assert all(codes) and "another folder" in nodes.logs()[1].read_text(), "both should be refused"
    assert contents(nodes.out) == before and not contents(other), "something was written"
    other.rmdir()
    return True


def contents(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


FAULTS = {"kill": by_signals, "kill_all": kill_all, "stop": stop, "usr1": by_signals, "storm": by_signals,
          "freeze": by_signals, "full": full, "read_only": read_only, "flip": flip, "half": half,
          "second": second, "skew": skew, "stale": stale, "elsewhere": elsewhere}
DISK = {"full", "read_only"}  # for these faults, the run's folder is on a small file system
DAMAGE = {"flip", "half"}
LOSES_A_RANK = {"kill", "node", "stop", "usr1", "storm"}  # after these, ranks may print connection errors


# --- the checks of a run


def checkpoint(out: Path) -> Path:
    return out / "ckpt" / f"step_{newest(out):06d}"


def newest(out: Path) -> int:
    """Returns the step of the newest complete checkpoint; 0 if there is none."""
    from ckpt import complete

    names = [p.name for p in complete(out)]
    return max((int(name[5:]) for name in names if name[5:].isdigit()), default=0)


def outcome(out: Path) -> tuple[list[dict], list[bytes]]:
    """Returns what must be equal in all runs: metrics without times and memory, and exported weights. Raises
    ValueError if a metric is not finite, OSError if a file is missing."""
    clock = ("time", "tokens_per_s", "tflops", "mem")

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in (out / "metrics.jsonl").open()]
    rows = [{k: v for k, v in r.items() if not k.startswith(clock)} for r in rows]
    return rows, [(out / f"export/{name}/model.safetensors").read_bytes() for name in ("policy", "critic")]


def files(out: Path) -> set[str]:
    patterns = ("*", "samples/*", "eval/*", "ckpt/*/COMPLETE")
    return {p.relative_to(out).as_posix() for pattern in patterns for p in out.glob(pattern)}


ERROR = re.compile(r"^(?:\[rank\d\]: )?([\w.]+(?:Error|Exception|Interrupt|Failed)\b.*)", re.M)
OF_TORCHRUN = re.compile(r"^torch\.distributed\.elastic\.|^torch\.distributed\.DistNetworkError")
# Errno 28: full; 30: read-only. `!!` begins a line of another thread, which may cut this line.
OF_A_DISK = re.compile(r"OSError(?:: \[Errno (?:28|30)\]|!!)")
OF_A_LOST_RANK = re.compile(r"^(RuntimeError|torch\.distributed\.Dist\w+Error): .*"
                            r"([Cc]onnection|closed|reset|peer|[Bb]roken pipe|waited|recv|[Ss]ocket)")


def lines_of(text: str) -> list[str]:
    refused = dict.fromkeys(re.findall(r"train\.py: (.*; needed: .*)", text))
    return [*refused, *re.findall(r"^!! .*(?:failed|can't write).*", text, re.M)]


def faults_of(nodes: Nodes, want: Path, codes: list[int]) -> list[str]:
    """Returns what is wrong with a struck run. `want` is the folder of the undisturbed run."""
    text, fault, wrong = nodes.text(), nodes.order["fault"], []
    lines, resumed = lines_of(text), resumed_after(text)
    refused = [line for line in lines if not line.startswith("!!")]
    if nodes.hung or any(codes):
        wrong.append("it hung" if nodes.hung else f"exit {codes} after {nodes.typed} commands")
    # After a disk fault, a thread of TensorBoard prints its error, which may have the run's own error (a line
    # of `refused`) as its context. log.Logger then replaces the writer whose thread failed.
    wrong += [f"error: {e[:200]}" for e in set(ERROR.findall(text)) if not OF_TORCHRUN.search(e)
              and not (fault in LOSES_A_RANK and OF_A_LOST_RANK.search(e))
              and not (fault in DISK and (OF_A_DISK.match(e) or e.endswith(tuple(refused))))]
    if nodes.expected and not (len(refused) == 1 and re.search(nodes.expected, refused[0])):
        wrong.append(f"not the one line that names {nodes.expected}")
    if not nodes.expected and lines and fault not in DISK:
        wrong.append("a line that nothing was the reason for")
    if nodes.had and (resumed and min(resumed) < nodes.had or text.count(f"step 0/{STEPS}") > 1):
        wrong.append("a saved step was lost")
    if fault in DISK and not lines and (missing := files(want) - files(nodes.out)):
        wrong.append(f"not told: {', '.join(sorted(missing))} is missing")
    if nodes.copy and not nodes.copy.is_dir():
        wrong.append("the user's copy is gone")
    if not (nodes.out / "ckpt/best/COMPLETE").exists():
        wrong.append("no best checkpoint")
    if left := [p.name for p in nodes.out.glob("ckpt/.step_*")]:
        wrong.append(f"{', '.join(left)} is left")
    return wrong


def resumed_after(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"resumed after (\d+) steps", text)]


# --- used by every run


@contextlib.contextmanager
def place(out: Path, fault: str) -> Iterator[None]:
    """Context manager. Makes the run's folder `out`. For a fault in DISK, `out` is a small tmpfs. At the end,
    a folder on the disk with the run's files replaces the tmpfs. Raises Skipped if it can't be mounted, for
    example without root."""
    out.mkdir(parents=True)
    if fault in DISK and not system("mount -t tmpfs -o size=160m chaos", out):
        out.rmdir()
        raise Skipped("mount is not allowed")
    try:
        yield
    finally:
        if fault in DISK:
            kept = out.with_suffix(".kept")
            if out.exists():
                shutil.copytree(out, kept, symlinks=True, ignore=shutil.ignore_patterns("ballast"))
            while system("umount -l", out):
                pass
            out.rmdir()
            kept.rename(out)


def remove(out: Path) -> None:
    for path in [out, *out.parent.glob(f"{out.name}.*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def struck_run(nodes: Nodes, want: Path, rng: random.Random) -> dict | None:
    """Causes the fault, then starts the run again until it is complete. Returns the fields to print about
    this run, or None if the fault could not strike."""
    try:
        struck = nodes.wait_for_strike()
        faults = FAULTS | {"node": node}
        if not struck or not faults[nodes.order["fault"]](nodes, struck, rng):
            return None
        codes = nodes.wait()
        while nodes.typed < TYPED and not nodes.hung and (
                any(codes) or not (nodes.out / "export/critic").exists()):
            nodes.type()
            codes = nodes.wait()
    finally:
        nodes.kill_all()
    text, wrong = nodes.text(), faults_of(nodes, want, codes)
    try:
        identical = outcome(nodes.out) == outcome(want)
    except (OSError, ValueError) as e:
        identical, wrong = False, [*wrong, str(e)]
    wrong += [] if identical else ["not identical"]
    return {"had": nodes.had, "typed": nodes.typed, "resumed_after": resumed_after(text),
            "identical": identical, "lines": lines_of(text)} | ({"wrong": wrong} if wrong else {})


Visits = dict[str, list[list[float]]]  # phase -> [begin, end] (s) of each visit, a stay in the phase


def possible(fault: str, visits: Visits) -> Visits:
    """Returns the visits (see Visits) in which the fault can strike: phase -> [(number of the visit, its
    length in s), …]. A fault in DAMAGE needs a checkpoint, so it can strike only after the first save."""
    saved = visits["files"][0][1] if fault in DAMAGE else 0  # the end of the first save
    found = {phase: [(i, end - began) for i, (began, end) in enumerate(times, 1) if began > saved]
             for phase, times in visits.items()}
    return {phase: times for phase, times in found.items() if times}


def choose(runs: int, faults: list[str], visits: Visits, rng: random.Random) -> Iterator[tuple]:
    """Yields for each run a fault, and the visit (see Visits) in which it strikes: (fault, phase, number of
    the visit, its length in s). Prefers faults and phases that no run has had."""
    new_faults, new_phases = rng.sample(faults, len(faults)), rng.sample(sorted(visits), len(visits))
    for _ in range(runs):
        fault = new_faults.pop() if new_faults else rng.choice(faults)
        times = possible(fault, visits)
        phase = next((p for p in new_phases if p in times), None) or rng.choice(sorted(times))
        new_phases = [p for p in new_phases if p != phase]
        yield fault, phase, *rng.choice(times[phase])


def run_once(args: argparse.Namespace, out: Path, want: Path, chosen: tuple, rng: random.Random) -> dict:
    """Trains with the fault and phase `chosen` (from `choose`). Returns the row to print."""
    fault, phase, visit, seconds = chosen
    rank = rng.randrange(RANKS * args.nodes)
    row = {"fault": fault, "phase": phase, "rank": rank}
    after = rng.uniform(0, 0.9) * seconds
    for _ in range(TRIES):
        order = {"fault": fault, "phase": phase, "visit": visit, "after": after, "rank": rank,
                 "out": str(out), "file": f"{out}.struck"}
        try:
            with place(out, fault):
                found = struck_run(Nodes(args.nodes, args.base, out, args.namespaces, order), want, rng)
        except Skipped as e:
            return row | {"skipped": str(e)}
        except AssertionError as e:
            return row | {"wrong": [str(e)]}
        if found:
            return row | found
        too_early = Path(order["file"]).exists() and fault in DAMAGE
        visit, after = max(1, visit + (1 if too_early else -1)), 0
        remove(out)
    return row | {"wrong": [f"{phase} was not met in {TRIES} runs"]}


def undisturbed_run(args: argparse.Namespace, out: Path) -> Visits:
    order = {"fault": "", "phase": "", "rank": 0, "out": str(out), "file": f"{out}.struck"}
    out.mkdir()
    began, nodes = time.monotonic(), Nodes(args.nodes, args.base, out, args.namespaces, order)
    try:
        assert not any(nodes.wait()), f"the undisturbed run failed: see {out}.0.log"
    finally:
        nodes.kill_all()
    visits = json.loads(Path(f"{out}.struck").read_text())
    say({"run": "undisturbed", "seconds": round(time.monotonic() - began, 1),
         "phases": {phase: len(times) for phase, times in visits.items()}, "namespaces": args.namespaces})
    return visits


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=0, help="default: 20, and 200 with --faults all")
    parser.add_argument("--faults", nargs="+", default=["kill"], choices=["all", *FAULTS])
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", default="runs/tiny-base-0", help="base model; made if it is missing")
    parser.add_argument("--out", default="runs/chaos", help="a new or empty folder; removed if all is well")
    args = parser.parse_args()
    args.runs = args.runs or (200 if args.faults == ["all"] else 20)
    if args.faults == ["all"]:
        args.faults = list(FAULTS)
    if args.nodes == 2:
        args.faults = ["node"]
    return args


def main() -> None:
    args = parse()
    from guard.messages import user_errors
    from tools.tiny import build

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `finally` ends processes and unmounts
    rng = random.Random(args.seed)
    with user_errors("chaos.py"):
        out = new_folder(args.out)
        args.base = build(args.base)
    out.mkdir(parents=True, exist_ok=True)
    args.namespaces = make_namespaces(args.nodes)
    visits = undisturbed_run(args, out / "undisturbed")
    rows = []
    for i, chosen in enumerate(choose(args.runs, args.faults, visits, rng)):
        folder = out / f"run{i:03d}"
        row = {"run": i} | run_once(args, folder, out / "undisturbed", chosen, rng)
        rows.append(row)
        if "wrong" not in row:
            remove(folder)
        else:
            row["folder"] = str(folder)
        say(row)
    done = [row for row in rows if "skipped" not in row]
    bad = sum("wrong" in row for row in done)
    say({"runs": args.runs, "ok": len(done) - bad, "skipped": len(rows) - len(done),
         "phases": Counter(row["phase"] for row in done), "faults": Counter(row["fault"] for row in done)})
    if not bad:
        shutil.rmtree(out)
    sys.exit(bad > 0)


if __name__ == "__main__":
    be_a_rank() if "CHAOS" in os.environ else main()
