"""Everything that torch.distributed does here: start, shard, gather for the engine, exchange samples, sum, time.

The rest of the project reads like single-device code. Parameters are sharded by FSDP2 (fully_shard) over all ranks, or
within groups of `shard_ranks` and replicated across them. Gradients are *summed* over ranks: losses are already divided
by global counts, so the rank count doesn't enter the maths.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import hashlib
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from configs import need


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype  # of compute and gathers

    @property
    def main(self) -> bool:
        return self.rank == 0


def init(device: str = "auto", dtype: str = "auto", stall_limit: float = 3600.0) -> World:
    """Join the ranks that torchrun started, or be the only one. Arguments: as in configs.Config. Raises UserError where a rank
    has no GPU to itself."""
    if "RANK" not in os.environ:  # vLLM's external_launcher reads these too
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                               MASTER_PORT=str(s.getsockname()[1]))
    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    local, here = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    need(not cuda or local < here, f"{here} GPUs on {os.uname().nodename} for rank {local + 1} of this machine",
         f"torchrun --nproc-per-node {here} …" if here else "--device cpu, or a CUDA build of torch and a GPU")
    where = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(where)
    else:
        keep_memory()
    if not td.is_initialized():
        # Our own watch ends a stalled phase first, with stacks.
        timeout = datetime.timedelta(seconds=1.5 * stall_limit + 60)
        td.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout, store=fresh_store(timeout),
                              rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        watch(stall_limit)
    kind = torch.bfloat16 if dtype == "bfloat16" or (dtype == "auto" and cuda) else torch.float32
    return World(td.get_rank(), td.get_world_size(), where, kind)


def keep_memory() -> None:
    """Have glibc keep what a step frees, in pieces of up to 32 MiB, its limit. Else it goes to the kernel and comes back a page
    at a time: some ten thousand faults and a tenth of the time in an update of the demo."""
    with contextlib.suppress(AttributeError, OSError):  # another libc
        mallopt, trim, pad, mmap = ctypes.CDLL(None).mallopt, -1, -2, -3  # malloc.h
        for what, size in ((trim, 2**31 - 1), (pad, 2**26), (mmap, 2**25)):
            mallopt(what, size)


def fresh_store(timeout: datetime.timedelta) -> td.Store | None:
    """Where these ranks, and none before them, leave each other word; None: where torch would. torchrun's agents keep one
    store over all restarts (torch 2.13), and a restarted rank that finds a dead one's address in it waits there forever. A
    count of restarts would not tell them apart, for it differs between nodes: so each rank puts a word of its own there, and
    all go where the words of all lead, which they do once every rank has read every new word.

    What can't be mended from here: agents that keep their store never tell its address to a node that takes a lost one's
    place."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if os.environ["RANK"] == "0" and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        print("torchrun will let no node back in that was lost; it does where TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is exported "
              "on every node before it starts")
    rank, size, mine = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), secrets.token_hex(8)
    store = td.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    store.set(f"torz/{size}/{rank}", mine)
    until = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < until:
        words = store.multi_get([f"torz/{size}/{r}" for r in range(size)])
        here = td.PrefixStore(hashlib.sha256(b"".join(words)).hexdigest(), store)
        here.set(f"read/{rank}", "")
        if here.check([f"read/{r}" for r in range(size)]):
            return here
        time.sleep(0.05)
    raise RuntimeError(f"rank {rank} waited {timeout.total_seconds():.0f} s for the others to start")


# --- parameters


def mesh(world: World, shard_ranks: int = 0) -> DeviceMesh:
    """1-d over all ranks, or 2-d (replicate across, shard within groups of shard_ranks)."""
    if shard_ranks in (0, world.size):
        return init_device_mesh(world.device.type, (world.size,))
    return init_device_mesh(world.device.type, (world.size // shard_ranks, shard_ranks),
                            mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, over: DeviceMesh, dtype: torch.dtype, checkpoint: bool = False) -> nn.Module:
    """Shard a model of model.py in place: each decoder layer a group of its own, the rest (embedding, norm, head) the
    root's. fp32 masters, `dtype` compute and gathers, fp32 reductions, sums instead of means. On one rank that computes in
    fp32 there is nothing to shard or cast: its parameters stay plain tensors, as in a notebook."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if checkpoint:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    if over.size() == 1 and dtype == torch.float32:
        return model
    for layer in model.model.layers:
        fully_shard(layer, mesh=over, mp_policy=precision)
    fully_shard(model, mesh=over, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return model


def full_weights(model: nn.Module, device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter, in the compute dtype, group by group: one gather a decoder layer, freed once
    the consumer asks for the next group's first tensor. A consumer may keep a tensor no longer than that. Shards that live
    on the host come to `device` for as long as it lasts."""
    groups = {n: m for n, m in model.named_modules() if isinstance(m, FSDPModule)} or {"": model}
    owned: dict[str, list[str]] = {g: [] for g in groups}
    for name, _ in model.named_parameters():  # once each: a tied head is the embedding
        owned[max((g for g in groups if g == "" or name.startswith(g + ".")), key=len)].append(name)
    home = next(model.parameters()).device
    with resident(model, None, device, offload=home.type == "cpu"):
        for g, group in groups.items():
            if isinstance(group, FSDPModule):
                group.unshard()
            for name in owned[g]:
                yield name, model.get_parameter(name).detach()
            if isinstance(group, FSDPModule):
                group.reshard()


@contextlib.contextmanager
def resident(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, device: torch.device | str = "cpu",
             offload: bool = True) -> Iterator[None]:
    """While inside, the model's shards and its optimizer's state are on `device`; afterwards, with offload, on the host. What a
    forward pass without a backward left gathered is let go."""
    move = torch.device(device).type == "cuda" and offload
    if move:
        _move(model, optimizer, device)
    try:
        yield
    finally:
        if isinstance(model, FSDPModule):
            model.reshard()
        if move:
            _move(model, optimizer, "cpu")
            torch.cuda.empty_cache()


def _move(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device | str) -> None:
    model.to(device)
    for state in optimizer.state.values() if optimizer else ():
        for k, v in state.items():
            if isinstance(v, Tensor) and v.ndim > 0:
                state[k] = v.to(device)


def clip_grad_norm(model: nn.Module, limit: float) -> Tensor:
    """Scale the gradients to a global norm of at most `limit`; returns the norm before, the same number on all ranks."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# --- numbers and samples


def all_sum(x: Tensor) -> Tensor:
    """Sum over ranks, a new tensor."""
    x = x.clone()
    td.all_reduce(x)
    return x


def all_max(x: Tensor) -> Tensor:
    """Maximum over ranks, a new tensor."""
    x = x.clone()
    td.all_reduce(x, td.ReduceOp.MAX)
    return x


def gather(x: Any) -> list[Any]:
    """Every rank's object, in rank order, on every rank. For small ones."""
    out: list[Any] = [None] * td.get_world_size()
    td.all_gather_object(out, x)
    return out


def gather_rows(rows: list[dict]) -> list[dict]:
    """All ranks' rows of samples, ordered by (slot, index), on every rank."""
    return sorted((row for part in gather(rows) for row in part), key=lambda r: (r["slot"], r["index"]))


def exchange(outgoing: Sequence[Any]) -> list[Any]:
    """Send outgoing[r] to rank r; returns what the ranks sent here, in rank order. Pickled bytes over gloo."""
    sent = [torch.frombuffer(bytearray(pickle.dumps(o)), dtype=torch.uint8) for o in outgoing]
    sizes = torch.tensor([len(s) for s in sent])
    arriving = torch.empty_like(sizes)
    td.all_to_all_single(arriving, sizes)
    inbox = torch.empty(int(arriving.sum()), dtype=torch.uint8)
    td.all_to_all_single(inbox, torch.cat(sent), arriving.tolist(), sizes.tolist())
    return [pickle.loads(part.numpy().tobytes()) for part in inbox.split(arriving.tolist())]


def balance(samples: Sequence[Any], keys: Sequence[int], plan: list[list[list[list[int]]]]) -> list[list[list[Any]]]:
    """Move samples to the ranks that will train on them. `keys[i]` is samples[i]'s number in the step, plan[part][rank]
    [pack] the numbers that data.assign laid out. Returns this rank's parts of packs of samples."""
    rank, size = td.get_rank(), td.get_world_size()
    mine = dict(zip(keys, samples, strict=True))
    outgoing = [{k: mine[k] for part in plan for bin in part[r] for k in bin if k in mine} for r in range(size)]
    here, outgoing[rank] = outgoing[rank], {}
    for box in exchange(outgoing):
        here |= box
    return [[[here[k] for k in bin] for bin in part[rank]] for part in plan]


# --- time, and what ends a run early


TIMES: dict[str, float] = defaultdict(float)  # seconds by phase, since the last `times()`
NOW = ["start", float("inf"), 0.0]  # the phase that this rank is in, when it began, and its limit in seconds


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Add the seconds spent inside to TIMES[name]; on CUDA, until the device is done. Watched: see `watch`."""
    start = time.perf_counter()
    NOW[:2] = [name, start]
    if NOW[2]:  # a thread of Python's can't look while C code holds the GIL; this one can
        faulthandler.dump_traceback_later(1.2 * NOW[2] + 30, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        faulthandler.cancel_dump_traceback_later()
        NOW[:2] = [f"after {name}", float("inf")]
        TIMES[name] += time.perf_counter() - start


def stacks() -> Iterator[str]:
    """Where each thread of this process is, innermost call first; source files aren't read, for a disk may be what hangs."""
    names = {t.ident: t.name for t in threading.enumerate()}
    for thread, frame in sys._current_frames().items():
        yield f"thread {names.get(thread, thread)}"
        while frame:
            yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
            frame = frame.f_back


def watch(limit: float) -> None:
    """End this process, with the stacks of its threads, once a phase takes longer than `limit` seconds here or on another
    rank: a hang becomes a restart, and every rank says where it was."""
    NOW[2] = limit
    store, every, over = td.distributed_c10d._get_default_store(), min(5.0, limit / 10), threading.Event()

    def look() -> None:
        while not over.wait(every) and td.is_initialized():
            late = time.perf_counter() - NOW[1] > limit
            try:
                if late:
                    store.set("stalled", f"rank {td.get_rank()} on {os.uname().nodename} in phase {NOW[0]}")
                elif not store.check(["stalled"]):
                    continue
                first = store.get("stalled").decode()
            except (RuntimeError, ValueError):  # the others are gone: whoever sees that first says so
                return
            for line in [f"stalled ({first} took more than {limit:.0f} s, --stall_limit); "
                         f"this rank is in phase {NOW[0]}; its stacks:", *stacks()]:
                os.write(sys.__stderr__.fileno(), f"rank {os.environ['RANK']}: {line}\n".encode())  # whole, among other ranks'
            time.sleep(3 * every)  # so that the others come to say where they are
            os._exit(1)

    thread = threading.Thread(target=look, daemon=True, name="watch")
    thread.start()

    def end() -> None:
        over.set()
        thread.join(10)

    atexit.register(end)  # Python ends a daemon thread wherever it is; inside the store's C++ that aborts the whole process


ASKED: list[str] = []  # the signal that asked this rank to stop, and when


@contextlib.contextmanager
def heed_signals(grace: float) -> Iterator[None]:
    """While inside, SIGTERM, SIGUSR1 and ctrl-C ask for a stop (`stop_asked`) instead of ending the process, which ends anyway,
    with exit status 1, if it is still inside after `grace` seconds or at a second ctrl-C."""
    timers: list[threading.Timer] = []

    def ask(number: int, frame: Any) -> None:
        if not ASKED:
            timers.append(threading.Timer(grace, give_up))
            timers[0].daemon = True
            timers[0].start()
            ASKED.extend((signal.Signals(number).name, str(time.monotonic())))
        elif number == signal.SIGINT and time.monotonic() - float(ASKED[1]) > 2:  # torchrun passes the first one on, again
            os._exit(1)

    def give_up() -> None:
        print(f"rank {os.environ['RANK']}: {ASKED[0]} came {grace:.0f} s ago (--grace), in phase {NOW[0]} no end is in sight: "
              "leaving without a save", file=sys.stderr)
        os._exit(1)

    ASKED.clear()
    before = {n: signal.signal(n, ask) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.cancel()
        ASKED.clear()


def stop_asked() -> bool:
    """Whether any rank was asked to stop: the same answer on all of them."""
    return bool(all_max(torch.tensor(len(ASKED))))


def times() -> dict[str, float]:
    """Seconds by phase since the last call."""
    out = dict(TIMES)
    TIMES.clear()
    return out
