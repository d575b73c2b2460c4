"""All use of torch.distributed, except in ckpt.py and guard/watch.py.

FSDP2 (fully_shard) shards parameters over all ranks, or over groups of --shard_ranks ranks. Gradients are
*summed* over ranks, because each rank divides its loss by all ranks' number of tokens (or responses)."""

import contextlib
import datetime
import logging
import os
import secrets
import signal
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from guard.messages import UserError, explained, require, short_hash

# torch.distributed.checkpoint (DCP) warns if a single process reads or writes a checkpoint. This is no error.
warnings.filterwarnings("ignore", "torch.distributed is disabled")
T = TypeVar("T")
WAIT = 10.0  # seconds after which a rank says for which ranks it waits
# Added to the time limit of a collective, because a rank may wait for another rank's rollout for hours.
# guard.watch ends hung runs earlier.
LONGEST_WAIT = datetime.timedelta(days=1)
Device = torch.device | str
# layout[minibatch][rank][pack]: indices of the pack's samples among the samples of all ranks
Layout = list[list[list[list[int]]]]
Weights = Iterable[tuple[str, Tensor]]  # name and whole tensor of each parameter
# Last parts of the names of parameters that stay fp32 in every computation. Only Qwen3.5's delta nets have
# them. bf16 would round the rate at which a state decays by up to 0.8 %.
FP32 = ("A_log", "dt_bias")


@dataclass(frozen=True)
class World:
    rank: int  # of this process, from 0
    size: int  # number of ranks
    device: torch.device  # of this rank
    dtype: torch.dtype  # of compute and all-gathers

    @property
    def main(self) -> bool:
        return self.rank == 0


def launch(ranks: int, grace: float) -> int | str:
    """Run the command line sys.argv on `ranks` ranks of this machine, as torchrun does. Returns the exit
    status, or, if a rank failed, one line that says why the first failed rank ended.

    grace: seconds that the ranks may take to save after a signal"""
    from torch.distributed import run  # imported here, because only this function needs torchrun
    from torch.distributed.elastic.multiprocessing import SignalException, errors

    os.environ["TORZ_LAUNCHED"] = ""  # tells the ranks that this process prints their errors
    # torchrun's default is 30 seconds, after which it kills the ranks.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", f"{grace + 5:.0f}")
    logging.disable()  # hides torchrun's log, a line for each rank that it terminates
    times = []  # of each ctrl-C

    def interrupt(number, frame):
        times.append(time.monotonic())
        if len(times) == 1:
            raise SignalException("", signal.SIGINT)  # as torchrun does for its signals
        if times[-1] - times[0] > 2:
            os._exit(130)  # then each rank gets a second ctrl-C (see train.py)

    signal.signal(signal.SIGINT, interrupt)
    # torchrun would handle signals that nohup ignores. To a second ctrl-C, it would answer with SIGTERM.
    signals = {number.name for number in handled_signals()} - {"SIGINT"}
    options = [
        "--standalone",
        "--nnodes=1",  # else PET_NNODES, which Kubeflow sets: torchrun would wait for machines
        "--max-restarts=0",  # else PET_MAX_RESTARTS: a stopped run would start again
        "--local-addr=127.0.0.1",  # a host may be unable to resolve its own name
        f"--signals-to-handle={','.join(signals)}",
        "--monitor-interval=1",
        f"--nproc-per-node={ranks}",
    ]
    try:
        # torchrun replaces $$ by $, and ${local_rank} by a number.
        run.run(run.parse_args([*options, *(word.replace("$", "$$") for word in sys.argv)]))
    except SignalException as e:  # such as ctrl-C; the ranks have ended
        return 128 + e.sigval  # number of the signal; shells report it like this
    except errors.ChildFailedError as e:
        rank, failure = e.get_first_failure()
        if failure.exitcode == 130:  # a signal to a rank stopped the run (see train.py)
            return 130
        if isinstance(failure.message, dict):  # from guard.messages.tell_torchrun
            return failure.message["message"].strip().splitlines()[-1]
        by = f"status {failure.exitcode}"
        if failure.exitcode < 0:  # a signal ended the rank
            by = f"{failure.signal_name()} (the cause may be a lack of host memory)"
        return (
            f"train.py: rank {rank} ended with {by}; "
            "needed: the same command, which resumes if there is a checkpoint"
        )
    return 0


def init(device: str = "auto", dtype: str = "auto", stall_limit: float = 3600.0) -> World:
    """Join the ranks that torchrun started; without torchrun, this process is the only rank. Returns the
    World. With CUDA, raises UserError if a machine has more ranks than GPUs. stall_limit: in seconds"""
    alone = {  # the variables that torchrun sets, for a process that is the only rank
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # any free port
    }
    if "RANK" not in os.environ:
        os.environ |= alone
    for name in alone:
        value = os.environ.get(name, "")
        is_valid = value != ""
        if name != "MASTER_ADDR":
            is_valid = value.isdecimal() and int(value) < 2**16
        require(is_valid, f"RANK is set, but {name} is {value!r}", "unset RANK, or torchrun")
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    require(rank < size, f"RANK is {rank}, and WORLD_SIZE {size}", "unset RANK, or torchrun")
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if cuda:
        gpus = torch.cuda.device_count()
        require(
            local_rank < gpus,
            f"{gpus} GPUs on {os.uname().nodename} are too few: each rank takes one",
            "a GPU for each rank of a machine (--ranks), or --device cpu",
        )
        torch.cuda.set_device(local_rank)
        check_allocator()
    if not td.is_initialized():
        # longer than `stall_limit`, after which guard.watch ends a hung run and prints why
        timeout = datetime.timedelta(seconds=1.5 * stall_limit + 60)
        # A process alone needs no network.
        store = td.HashStore() if size == 1 else fresh_store(rank, size, timeout)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        # LONGEST_WAIT: a rank may wait for another rank's rollout for hours.
        td.init_process_group(
            backend, timeout=timeout + LONGEST_WAIT, rank=rank, world_size=size, store=store
        )
        # Without this barrier, a rank that ends early, by a user's mistake, would break the connections that
        # slower ranks are still making.
        td.all_reduce(torch.zeros(1))
    if dtype == "auto":
        dtype = "bfloat16" if cuda else "float32"
    place = f"cuda:{local_rank}" if cuda else "cpu"
    return World(rank, size, torch.device(place), getattr(torch, dtype))


def check_allocator() -> None:
    """Turn off expandable segments if this GPU can't use them. In torch 2.13 they fail on some GPUs before
    Hopper (PyTorch issue 186374)."""
    try:
        torch.empty(1, device="cuda")
    except RuntimeError as e:
        if "FabricInfo" not in str(e):
            raise
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def fresh_store(rank: int, size: int, timeout: datetime.timedelta) -> td.Store:
    """Returns a key-value store for torch's process group. After WAIT seconds, prints for which ranks it
    waits. Raises RuntimeError on timeout.

    After a restart, torchrun's store (torch 2.13) still has the addresses of dead ranks. So the ranks agree
    on a new prefix for their keys: a hash of random nonces, one from each rank.

    A rank that reads an old nonce, from before the restart, computes a wrong prefix. So each rank repeats
    two steps:

    1. Read all nonces. Their hash is the prefix.
    2. Write `read/RANK` under this prefix.

    It stops when every rank has written under its prefix. Then all ranks have read the same nonces."""
    address = os.environ["MASTER_ADDR"]
    line = f"rank {rank} waits for rank 0 of {size} at {address}"
    timer = threading.Timer(WAIT, print, [line], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    store = td.TCPStore(
        address,
        int(os.environ["MASTER_PORT"]),
        # Without torchrun's store, rank 0 is the server.
        is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    timer.cancel()
    keys = [f"torz/{size}/{r}" for r in range(size)]  # keys[r]: where rank r writes its nonce
    store.set(keys[rank], secrets.token_hex(8))
    start = time.monotonic()
    told = False
    while time.monotonic() - start < timeout.total_seconds():
        missing = [r for r in range(size) if not store.check([keys[r]])]
        if not missing:
            nonces = b"".join(store.multi_get(keys))
            agreed = td.PrefixStore(short_hash(nonces), store)  # adds this prefix to all keys
            agreed.set(f"read/{rank}", "")
            missing = [r for r in range(size) if not agreed.check([f"read/{r}"])]
        if not missing:  # all ranks have read the same nonces
            return agreed
        if not told and time.monotonic() - start > WAIT:
            print(f"rank {rank} waits for ranks {missing} of {size} at {address}", file=sys.stderr)
            told = True
        time.sleep(0.05)
    raise RuntimeError(f"rank {rank} waited for ranks {missing} of {size}, but they did not start")


# --- parameters


def neighbours(count: int) -> td.ProcessGroup | None:
    """Returns the process group of this rank and its neighbours, `count` ranks in all; None if `count` is 1.
    Every rank must call this function."""
    if count == 1:
        return None
    mine, _ = td.new_subgroups(count, timeout=LONGEST_WAIT, backend="gloo")
    return mine


def mesh(world: World, shard_ranks: int = 0) -> DeviceMesh:
    """Returns the device mesh for `shard`: 1-d over all ranks, or 2-d with 0 < shard_ranks < world.size. In
    2-d, parameters are sharded within groups of `shard_ranks` ranks, and replicated across the groups."""
    kind = world.device.type  # cpu or cuda
    if shard_ranks in (0, world.size):
        return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    shape = world.size // shard_ranks, shard_ranks
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def shard(
    model: nn.Module,
    over: DeviceMesh,
    dtype: torch.dtype,
    recompute: int = 0,
) -> nn.Module:
    """Shard a model of model.py in place and return it. Weights and gradients are fp32; compute and
    all-gathers are in `dtype`.

    With several ranks, each decoder layer is one FSDP group, and all other weights are one more group, the
    root. With one rank there is nothing to gather, and FSDP would take half of the host's time of an update.
    Then each layer copies its weights to `dtype` itself (see `compute_in`). The parameters of FP32 are a
    group of their own in each layer, because all parameters of a group are gathered in the same dtype.

    recompute: see PackModel.recompute"""
    model.compute_dtype = dtype
    alone = over.size() == 1
    if alone:  # before `recompute`: a recomputed layer copies its weights again, and stores no copy
        compute_in(model, dtype)
    model.recompute(recompute)
    if alone:
        return model
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # The parameters whose names end in one of FP32, and the modules that have them
    exact = {p for name, p in model.named_parameters() if name.endswith(FP32)}
    nets = [module for module in model.modules() if hasattr(module, FP32[0])]

    def make_group(
        module: nn.Module, precision: MixedPrecisionPolicy, ignored: set[Tensor]
    ) -> None:
        fully_shard(module, mesh=over, mp_policy=precision, ignored_params=ignored)
        module.set_gradient_divide_factor(1.0)  # gradients are summed, not averaged
        module.set_force_sum_reduction_for_comms(True)  # otherwise PREMUL_SUM, which gloo lacks

    # By FSDP's default, a rank frees a layer's gathered weights after the forward pass. It keeps the weights
    # of the root (`model`), because the backward pass needs them first.
    for module in (*model.model.layers, model):
        make_group(module, precision, exact)
    # MixedPrecisionPolicy() keeps fp32. The net's other parameters are ignored, because its layer's group has
    # them already.
    for net in nets:
        make_group(net, MixedPrecisionPolicy(), set(net.parameters()) - exact)
    return model


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Make a model on one rank compute in `dtype`. Its weights and their gradients stay fp32. In each forward
    pass, a decoder layer casts its own weights, and `model` casts all others (see `forward_in`). A frozen
    base (--lora) has weights in `dtype` already."""
    if dtype == next(model.parameters()).dtype:
        return
    layers = model.model.layers
    in_layers = set(layers.modules())
    for group in (*layers, model):
        places = []  # module and name of each weight that group.forward will cast
        for module in group.modules():
            if group is model and module in in_layers:
                continue  # the forward pass of its layer casts the module's weights
            for name, weight in module._parameters.items():
                if weight is not None and name not in FP32:
                    places.append((module, name))
        group.forward = partial(forward_in, dtype, places, group.forward)


def forward_in(
    dtype: torch.dtype,
    places: Sequence[tuple[nn.Module, str]],
    forward: Callable,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Returns forward(*args, **kwargs), computed with copies of the weights in `dtype`. During the call, each
    copy is an attribute of its module, which hides the parameter of the same name.

    places: module and name of each weight. Output layer and embedding may have the same weight."""
    copies = {}  # weight -> its copy
    for module, name in places:
        weight = module._parameters[name]
        if weight not in copies:
            copies[weight] = weight.to(dtype)
        vars(module)[name] = copies[weight]
    try:
        return forward(*args, **kwargs)
    finally:
        for module, name in places:
            del vars(module)[name]


def accumulate(model: nn.Module, packs: Sequence[T]) -> Iterator[T]:
    """Yields the packs of an update. The caller runs a forward and a backward pass on each pack before it
    asks for the next pack. It must read to the end, because gradients are complete only there. Every rank
    must have the same number of packs.

    With a 2-d mesh (see `mesh`), gradients are summed across the groups of ranks only in the last backward
    pass. This saves communication. The gradients of adapters (--lora) are summed only after the last pack."""
    for pack in packs:
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(pack is packs[-1])
        yield pack
    reshard_all(model.base)  # the optimizer updates shards, and gathered weights take memory
    if model.base is not model:  # with --lora: the parameters are the adapters
        grads = [p.grad for p in model.parameters()]
        flat = nn.utils.parameters_to_vector(grads)
        td.all_reduce(flat)
        nn.utils.vector_to_parameters(flat, grads)


def reshard_all(model: nn.Module) -> None:
    """Free the memory of all weights that FSDP has gathered."""
    before = set(model.parameters())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    # module.reshard() has replaced some parameters. FSDP (torch 2.13) does not free the memory of the old
    # parameters, so this loop does.
    for param in before - set(model.parameters()):
        local(param).untyped_storage().resize_(0)


def pushed_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which the parameter `name` leaves the trainer: fp32 if its name ends in one of
    FP32, else `dtype`."""
    return torch.float32 if name.endswith(FP32) else dtype


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns the model, with its parameters converted in place to `dtype`, or to fp32 if their names end
    in one of FP32."""
    for name, param in model.named_parameters():
        param.data = param.data.to(pushed_dtype(name, dtype))
    return model


def full_weights(model: nn.Module, device: Device = "cpu") -> Weights:
    """Yields (name, whole tensor) of every parameter. The tensors have the dtype model.compute_dtype, but
    fp32 if the name ends in "A_log" or "dt_bias" (FP32, Qwen3.5's delta nets). If the output layer is tied to
    the embedding, only the embedding comes. Adapters (--lora) are merged into the weights. A model on the
    host is moved to `device` during the iteration.

    The caller must not keep a tensor: its memory is freed before the next decoder layer is gathered."""
    if model.base is not model:  # with --lora
        yield from model.merge(full_weights(model.base, device))
        return
    groups = {"": model}
    for i, layer in enumerate(model.model.layers):
        groups[f"model.layers.{i}."] = layer
    with on_device(model, None, device):  # None: the optimizer's state is not needed
        for prefix, group in groups.items():
            is_root = group is model  # the root has the parameters outside of the layers
            parts = [model] if is_root else group.modules()
            parts = [part for part in parts if isinstance(part, FSDPModule)]
            for part in parts:
                part.unshard()
            for name, param in group.named_parameters():
                if is_root and name.startswith("model.layers."):
                    continue
                dtype = pushed_dtype(name, model.compute_dtype)
                yield prefix + name, param.detach().to(dtype)
            for part in parts:
                part.reshard()


@contextlib.contextmanager
def on_device(model: nn.Module, optimizer: Optimizer | None, device: Device) -> Iterator[None]:
    """Context manager. Inside, the model and its optimizer's state are on `device`. On exit, a model that was
    on the host goes back there, without gradients. If `optimizer` is None, the weights must not change
    inside, because changes are not copied to the host. With --lora, only the frozen base moves."""
    on_gpu = torch.device(device).type == "cuda"
    if model.base is not model:  # with --lora
        model = model.base
        optimizer = None  # the adapters and their optimizer's state stay where they are
    moves = on_gpu and next(model.parameters()).device.type == "cpu"
    if moves:
        move(model, optimizer, device)
    try:
        yield
    finally:
        reshard_all(model)  # a forward pass without a backward pass leaves weights gathered
        if moves:
            model.zero_grad()  # an exception may have left gradients on the device
            move(model, optimizer, None)
        if on_gpu:  # the next phase needs memory in other sizes
            torch.cuda.empty_cache()


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Context manager. If `on`, torch uses deterministic algorithms, and an operation that has no
    deterministic algorithm raises RuntimeError."""
    if not on:  # return early: use_deterministic_algorithms imports torch's compiler, which is slow
        yield
        return
    torch.use_deterministic_algorithms(True)
    # Off: filling new memory with NaN is slow, and not needed, because torz never reads unwritten memory.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def tensors_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Returns a dict: name -> tensor (not a copy), for a model's weights and its optimizer's state. The state
    of the weight NAME has names such as NAME.exp_avg."""
    # named_parameters() leaves out an output layer that is tied to the embedding.
    tensors = dict(model.named_parameters())
    if optimizer:
        for name, param in model.named_parameters():
            for kind, x in optimizer.state.get(param, {}).items():
                tensors[f"{name}.{kind}"] = x
    return tensors


def local(x: Tensor) -> Tensor:
    """Returns this rank's shard of x, or x if it is not sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """Returns x gathered from all ranks, or x itself if it is not sharded. All ranks must call it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def move(model: nn.Module, optimizer: Optimizer | None, device: Device | None) -> None:
    """Move a model and its optimizer's state from the host to `device`, without waiting for the copies. If
    `device` is None, move them back to the host. With optimizer=None, a move back copies nothing: the host
    tensors still have the weights, which must not have changed on the device.

    Each parameter, buffer and tensor of the optimizer has a home, a host tensor that is pinned (with CUDA).
    The model's attribute `homes` keeps the homes, because pinning is slow."""
    homes = vars(model).setdefault("homes", {})  # name -> host tensor
    new = {}  # tensor -> the tensor that replaces it
    values_at_home = device is None and optimizer is None  # a move back that copies nothing
    for name, x in (dict(model.named_buffers()) | tensors_of(model, optimizer)).items():
        if name not in homes:
            homes[name] = torch.empty_like(x, device="cpu", pin_memory=torch.cuda.is_available())
        home = homes[name]
        # Before a move to the device, x is on the host. There, x is its home (the same memory) if an earlier
        # move has put it there, and is not copied. New tensors, and shards that FSDP has padded, are copied.
        # Before a move back, x is on the device, and is copied unless `values_at_home`.
        if not values_at_home and local(x).data_ptr() != local(home).data_ptr():
            home.copy_(x, non_blocking=True)
        new[x] = home.to(device, non_blocking=True, copy=True) if device else home
    if torch.cuda.is_available() and not device:
        torch.cuda.synchronize()  # wait for the copies, because the host reads them
    # FSDP overrides _apply: after the call it uses the new tensors as its shards.
    model._apply(lambda x: new.get(x, x))
    if optimizer:
        for state in optimizer.state.values():
            for key, x in state.items():
                state[key] = new[x]


def weight_files(folder: str | Path) -> list[Path]:
    """Returns the .safetensors files in a folder. consolidated*.safetensors is left out, because it repeats a
    model's weights under other names."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("consolidated")]


def _reader(folder):
    """Returns DCP's reader of a folder. It reads only the files of `weight_files`."""
    reader = HuggingFaceStorageReader(folder)
    reader.fs.ls = lambda path: [str(file) for file in weight_files(path)]
    return reader


def tensors_in(folder: str) -> dict[str, Any]:
    """Returns a dict: name -> DCP's metadata (dtype, shape) of each tensor in a folder's safetensors files.
    Raises UserError if the files can't be read."""
    with explained(f"{folder}/*.safetensors can't be read", "intact copies of them"):
        return _reader(folder).read_metadata().state_dict_metadata


def load_files(state: dict[str, Tensor], folder: str) -> None:
    """Fill the tensors of `state`, which may be sharded, from a folder's safetensors files."""
    dcp.load(state, storage_reader=_reader(folder))


# --- numbers and samples


def several(group: td.ProcessGroup | None = None) -> bool:
    """Returns whether `group` (None: all ranks) has several ranks."""
    return td.is_initialized() and td.get_world_size(group) > 1


def all_sum(x: Tensor, op: Any = td.ReduceOp.SUM) -> Tensor:
    """Returns the sum (or reduction `op`) of x over all ranks."""
    x = x.clone()
    if several():
        td.all_reduce(x, op)
    return x


def all_max(x: Tensor) -> Tensor:
    """Returns the largest x of all ranks, element by element."""
    return all_sum(x, td.ReduceOp.MAX)


def gather(x: Any, group: td.ProcessGroup | None = None) -> list[Any]:
    """Returns the objects x of all ranks in `group` (None: all ranks), in rank order. Use it only for small
    objects, because every rank receives all of them."""
    if not several(group):
        return [x]
    out = [None] * td.get_world_size(group)
    td.all_gather_object(out, x, group)
    return out


def gather_all(items: Iterable[T]) -> list[T]:
    """Returns one list with the items of all ranks, in rank order."""
    return [*chain(*gather(list(items)))]


def together(work: Callable[..., T], *args: Any) -> T:
    """Call work(*args) on every rank. Returns this rank's result. If some ranks raise UserError, every rank
    raises the error of the lowest rank that failed."""
    result = None
    error = ""
    try:
        result = work(*args)
    except UserError as e:
        error = str(e)
    errors = gather((error, os.uname().nodename))  # for each rank; "": no error
    for text, host in errors:
        if text:
            # Unless all ranks have the same error, the message names the machine.
            same = all(other == text for other, _ in errors)
            raise UserError(text if same else f"{host}: {text}")
    return result


def gather_rows(rows: list[dict]) -> list[dict]:
    """Returns the rows of all ranks, ordered by (prompt_id, sample_id)."""
    return sorted(gather_all(rows), key=itemgetter("prompt_id", "sample_id"))


def deal(items: Sequence[T], ranks: Sequence[int]) -> list[T]:
    """Send items[i] to the rank ranks[i], for every i. Returns the received items, in the order of the
    senders. All ranks must call this function together."""
    if not several():
        return [*items]
    outgoing = [[] for _ in range(td.get_world_size())]  # outgoing[r]: this rank's items for rank r
    for item, rank in zip(items, ranks, strict=True):
        outgoing[rank].append(item)
    received = [None for _ in outgoing]
    # Loading a pickle can run code, so torz loads pickles only from ranks of this run.
    for rank, box in enumerate(outgoing):  # each turn sends the items of all ranks to one rank
        td.gather_object(box, received if rank == td.get_rank() else None, dst=rank)
    return [*chain(*received)]


def balance(samples: Sequence[Any], number: Mapping[Any, int], layout: Layout) -> dict[int, Any]:
    """Move samples to the ranks that train on them. Returns this rank's samples as a dict: number -> sample.

    number: Sample.key -> index of the sample among the samples of all ranks
    layout[minibatch][rank][pack]: the indices of one pack's samples, numbered as in `number`"""
    rank_of = {}  # index of a sample -> the rank that trains on it
    for minibatch in layout:
        for rank, packs in enumerate(minibatch):
            rank_of |= dict.fromkeys(chain.from_iterable(packs), rank)
    arrived = deal(samples, [rank_of[number[s.key]] for s in samples])
    return {number[s.key]: s for s in arrived}


# --- phases: their times, and a time limit that stops a hung run


@dataclass
class Phase:
    """The current phase of this rank: a named part of a step, such as "rollout"."""

    name: str = "start"
    watched: bool = False  # whether this rank is inside `with watched(…)`
    steps: int = 0  # how often this rank has called `progress`
    runs: int = 0  # number of runs of this process that have ended
    limit: float = 0.0  # maximum seconds without progress; 0: no thread of guard.watch looks yet
    grace: float = float("inf")  # maximum seconds from a signal to the end of the run


CURRENT = Phase()
SECONDS: dict[str, float] = defaultdict(float)  # phase -> seconds of this step


def progress() -> None:
    """Restart the time limit of guard.watch, on all ranks. Called for each phase, decoding step, pack
    and outcome of a grading server."""
    CURRENT.steps += 1


@contextlib.contextmanager
def watched(name: str) -> Iterator[None]:
    """Context manager and decorator. Inside it, guard.watch ends the run if no rank makes progress."""
    outer = CURRENT.watched
    CURRENT.name = name
    CURRENT.watched = True
    progress()
    try:
        yield
        CURRENT.name = f"after {name}"  # not after an error, whose report names the phase
    finally:
        CURRENT.watched = outer


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Context manager and decorator. Adds the seconds of a phase, including the GPU's work, to SECONDS. The
    parts of the start have names such as "start/models"."""
    start = time.perf_counter()
    with watched(name), torch.profiler.record_function(name):
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    SECONDS[name] += time.perf_counter() - start


def profiled(steps: Iterable[int], chosen: int | None, log: Any) -> Iterator[int]:
    """Yields the steps. PyTorch's profiler watches the step `chosen`: its times, its memory, and its phases
    as ranges. The trace of rank 0 goes to a file in the folder log.out, which https://ui.perfetto.dev opens.
    log.say prints the ten operations with the most time of their own."""
    for step in steps:
        if step != chosen or td.get_rank():  # only rank 0 profiles
            yield step
            continue
        with torch.profiler.profile(profile_memory=True) as profiler:
            yield step
        file = log.out / f"profile_{step:06d}.json"
        profiler.export_chrome_trace(f"{file}")
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        averages = profiler.key_averages()
        table = averages.table(
            sort_by=f"self_{device}_time_total",
            row_limit=10,
        )
        # The profiler raises no error, as in a read-only folder.
        written = "trace" if os.path.isfile(file) else "can't write the trace"
        log.say(f"{table}\n{written} of step {step}: {file}")


# --- stopping on a signal


def handled_signals() -> list[signal.Signals]:
    """Returns the signals that request a stop. SIGHUP and SIGQUIT are left out if the process's caller
    ignores them, as nohup does."""
    always = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    of_terminal = signal.SIGHUP, signal.SIGQUIT  # a closed terminal; ctrl-\
    return always + [x for x in of_terminal if signal.getsignal(x) != signal.SIG_IGN]


# [name, time.monotonic()] of the signal that requested a stop; empty: none. guard.watch fills it.
stop_signal: list[Any] = []


def stop_requested() -> bool:
    """Returns whether any rank got a signal to stop. All ranks must call this function. It waits for the
    slowest rank."""
    found = torch.tensor(len(stop_signal))
    if several():
        work = td.all_reduce(found, td.ReduceOp.MAX, async_op=True)
        # Python handles no signal inside work.wait().
        while not work.is_completed():
            time.sleep(0.001)
        work.wait()  # raises an error if a rank has ended
    return bool(found)
