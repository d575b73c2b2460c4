"""What survives a crash: sharded checkpoints that appear whole or not at all, resume, and Hugging Face exports.

A checkpoint is `ckpt/step_000020/`. DCP writes it under a temporary name, beside the training; then it is checked, renamed
and marked COMPLETE, with the size of every file; what lacks the mark, or a file, doesn't count. It holds fp32 weights and
optimizer state, the number of steps done, the config and versions, nothing else: all randomness is a function of
(seed, step). Resharding to another number of ranks is DCP's.

    python ckpt.py export RUN STEP OUT [critic]      # the policy (or critic) of a checkpoint as a Hugging Face folder
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future as TorchFuture

import dist
import plan
from configs import Config, UserError, changed, need
from log import read_metrics
from model import Critic, Policy, load_config, load_tokenizer

VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}
SHARD_BYTES = 4 * 2**30  # of one exported safetensors file
MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter
Trained = tuple[nn.Module, torch.optim.Optimizer | None]  # a reference has none


# --- before anything is loaded


def preflight(cfg: Config) -> Path:
    """The run's folder, absolute and writable by every rank, which all must see rank 0's probe file in it, with room for the
    checkpoints to come; and all ranks run the same thing. Raises UserError, the same on every rank, naming hosts."""
    folder = Path(cfg.out).absolute()
    host, main = os.uname().nodename, td.get_rank() == 0
    said = dist.gather((host, _what_runs(cfg)))
    other = sorted({f"{h} ({', '.join(f'{k} {v}' for k, v in what.items() if v != said[0][1][k])})"
                    for h, what in said if what != said[0][1]})
    need(not other, f"not every rank runs what rank 0 on {said[0][0]} runs: {', '.join(other)}",
         "the same code, packages and command line on every machine")
    probe, trouble = folder / f".probe-{os.environ.get('MASTER_PORT', '0')}", ""
    try:
        if main:
            folder.mkdir(parents=True, exist_ok=True)
            again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
            need(cfg.resume != "never" or again or not any(folder.iterdir()), f"{folder} is not empty, and --resume is never",
                 "an empty --out, or --resume auto")
            probe.touch()
    except OSError as e:
        trouble = f"can't write to {folder} on {host} ({e.strerror}); needed: --out with a folder that can be written"
    except UserError as e:
        trouble = str(e)
    _agree(trouble)
    mine = folder / f".probe-{td.get_rank()}"
    try:
        blind = "" if probe.exists() else f"{host} doesn't see {folder} as rank 0 on {said[0][0]} does"
        mine.touch()
        mine.unlink()
    except OSError as e:
        blind = f"can't write to {folder} on {host} ({e.strerror})"
    found = sorted({b for b in dist.gather(blind) if b})
    if main:
        probe.unlink()
    need(not found, "; ".join(found), "--out on a file system that all ranks share")
    lack = _lack_of_space(cfg, folder)  # on every rank, for a missing --model is missing on all
    _agree(lack)
    return folder


def _agree(trouble: str) -> None:
    """Raise rank 0's trouble, if it has any, on every rank."""
    trouble = dist.gather(trouble)[0]
    if trouble:
        raise UserError(trouble)


def _what_runs(cfg: Config) -> dict[str, str]:
    """What must be the same on all ranks, in short."""
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        code.update(file.read_bytes())
    return VERSIONS | {"code": code.hexdigest()[:8],
            "config": hashlib.sha256(repr(cfg).encode()).hexdigest()[:8]}


def _lack_of_space(cfg: Config, folder: Path) -> str:
    """Why the disk is too small for this run, or nothing."""
    policy, critic = shapes(cfg)
    files = plan.disk(cfg, policy.policy, critic.critic if cfg.algo == "ppo" else 0)
    free = shutil.disk_usage(folder).free + sum(f.stat().st_size for f in folder.glob("ckpt/*step_*/*") if f.is_file())
    if free >= files["needed"]:
        return ""
    one, exports, all_of_it = (plan.size(files[name]) for name in ("checkpoint", "exports", "needed"))
    return (f"{plan.size(free)} free in {folder} for {files['checkpoints']} checkpoints of {one} and an export of {exports}; "
            f"needed: {all_of_it}, so a smaller --keep, or another --out")


def shapes(cfg: Config) -> list[plan.Shape]:
    """Of the policy and of what the critic starts from. Raises UserError where a folder is no model that can be trained."""
    return [plan.shape_of(load_config(path).to_dict(), path) for path in (cfg.model, cfg.critic_model or cfg.model)]


# --- saving


class SaveFailed(OSError):
    """A checkpoint that could not be written, in one line."""


class HostCopy(AsyncStager):
    """The models' state in host memory, as a checkpoint holds it: of each parameter one tensor (3, *its shape), the weight and
    AdamW's moments (of a reference the weight alone, (1, *its shape)), sharded as the parameter is; of each optimizer the
    number of its steps. One tensor, not three, for each costs DCP half a millisecond of Python beside the training. Learning
    rates and betas are the config's."""

    def __init__(self, models: Mapping[str, Trained]) -> None:
        self.models = models
        self.state: dict[str, dict[str, Tensor]] = {}
        for who, (model, optimizer) in models.items():
            parts = 1 + len(MOMENTS) * bool(optimizer)
            self.state[who] = {n: torch.stack([p.detach()] * parts).cpu() for n, p in model.named_parameters()}
            if optimizer:
                self.state[who]["steps"] = torch.zeros(())

    @torch.no_grad()
    def stage(self, state: Any = None) -> dict[str, dict[str, Tensor]]:
        """Take what the models hold now; DCP calls it, and returns what it writes."""
        copies, originals = self._pairs()
        torch._foreach_copy_(copies, originals, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self.state

    @torch.no_grad()
    def restore(self) -> None:
        """Make the models what this is; every optimizer has its moments already."""
        copies, originals = self._pairs()
        torch._foreach_copy_(originals, copies)

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's parts: here, and in the models. What an optimizer that never stepped lacks is zeroed here."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for who, (model, optimizer) in self.models.items():
            for name, p in model.named_parameters():  # once each: a tied head is the embedding
                copy, kept = _local(self.state[who][name]), optimizer.state.get(p) if optimizer else None
                pairs.append((copy[0], _local(p)))
                if kept:
                    pairs += [(part, _local(kept[m])) for part, m in zip(copy[1:], MOMENTS, strict=True)]
                    pairs.append((self.state[who]["steps"], kept["step"]))
                else:
                    copy[1:].zero_()
        return [a for a, _ in pairs], [b for _, b in pairs]


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class Place(NamedTuple):
    """Where a rank's part of a tensor lies."""

    file: str
    offset: int  # bytes
    shape: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.offset + self.shape.numel() * self.dtype.itemsize


class Writer(dcp.FileSystemWriter):
    """DCP's, but for what is in a rank's file: the tensors' bytes end to end. DCP runs torch.save on each, which makes some
    twenty pieces of a zip file: half of what a small model's save cost the training beside it."""

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> TorchFuture[list[WriteResult]]:
        done, name = [], f"{plan.storage_data.prefix}0.distcp"
        with open(Path(self.path) / name, "wb", buffering=2**20) as file:
            for item in plan.items:
                tensor = planner.resolve_data(item).detach().contiguous()
                place = Place(name, file.tell(), tensor.shape, tensor.dtype)
                file.write(tensor.flatten().view(torch.uint8).numpy())
                done.append(WriteResult(item.index, place.end - place.offset, place))
            file.flush()
            os.fsync(file.fileno())
        return _future(done)


class Reader(dcp.FileSystemReader):
    """Reads what Writer wrote, of each tensor only the slices that are asked for."""

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> TorchFuture[None]:
        places = [self.storage_data[item.storage_index] for item in plan.items]
        files = {p.file: np.memmap(Path(self.path) / p.file, np.uint8, "c") for p in places}
        for item, p in zip(plan.items, places, strict=True):
            whole = torch.from_numpy(files[p.file][p.offset:p.end]).view(p.dtype).view(p.shape)
            part = whole[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
            target = planner.resolve_tensor(item).detach()
            target.copy_(part.view_as(target))
            planner.commit_tensor(item, target)
        return _future(None)


def _future(value: Any) -> TorchFuture:
    future: TorchFuture = TorchFuture()
    future.set_result(value)
    return future


class Planner(dcp.DefaultSavePlanner):
    """DCP's, that plans once: what lies where is the same at each save, and to find that out costs as much as to plan."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = f"{type(self).__name__} {id(self)}"  # DCP's caches are the class's; two runs may differ
        self.planned = False

    def create_local_plan(self) -> SavePlan:
        return SavePlan([], usable=False) if self.planned else super().create_local_plan()  # "as before"

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.planned = True
        return super().finish_plan(new_plan)


class Saver:
    """A run's checkpoints. `save` waits for the copy to host memory; the rest goes on beside the training, one at a time: in a
    process of its own where `aside` (vLLM's scheduler needs the GIL of this one), else in a thread."""

    def __init__(self, out: Path, models: Mapping[str, Trained], cfg: Config, facts: dict[str, Any],
                 saved: int | None, aside: bool) -> None:
        self.out, self.models, self.cfg, self.facts = out, models, cfg, facts
        self.saved = self.step = saved  # steps that a complete checkpoint holds; and the one in flight
        self.aside = aside
        self.group = td.new_group(backend="gloo")  # its collectives must not meet the training's
        self.planner = Planner()
        self.copy: HostCopy | None = None  # made at the first save, and kept: memory that is new costs as much as the copy
        self.pool = ThreadPoolExecutor(1)
        self.flying: Future | None = None
        self.told, self.failures = False, 0
        if td.get_rank() == 0:
            (out / "ckpt").mkdir(exist_ok=True)

    def save(self, step: int, wait: bool = False) -> str:
        """Begin the checkpoint after `step` steps, once the one before has ended; `wait`: and see it through, in this process.
        Returns what went wrong with the last one that ended, or "". Raises UserError when two in a row did. What is saved
        already, or hasn't begun, is not saved."""
        said = self.finish()
        if step == self.saved:
            return said
        self.step = step
        part = self.out / "ckpt" / f".step_{step:06d}.{os.getpid()}.{time.time_ns()}.part"  # no other writer, not a dead run's
        if td.get_rank() == 0:
            for left in part.parent.glob(".step_*.part"):
                shutil.rmtree(left, ignore_errors=True)
        part = dist.gather(part)[0]  # made by DCP, whose errors a run outlives
        self.copy = self.copy or HostCopy(self.models)
        how = dict(storage_writer=Writer(part), planner=self.planner, process_group=self.group)
        self.told = False
        if self.aside and not (wait or self.failures):  # after a failure without the process that may have caused it
            write = dcp.async_save(self.copy.state, async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                                   async_stager=self.copy, **how).result
        else:
            write = partial(dcp.save, self.copy.stage(), **how)
        self.flying = self.pool.submit(self._complete, part, write)
        return (self.finish() if wait else "") or said

    def news(self) -> str:
        """What went wrong with the save in flight, once, as soon as it is known; on rank 0."""
        if self.told or self.flying is None or not self.flying.done() or self.flying.exception() is None:
            return ""
        self.told = True
        return str(self.flying.exception())

    def finish(self) -> str:
        """Wait for the save in flight. Returns what went wrong, or ""; raises UserError when two in a row did."""
        if self.flying is None:
            return ""
        error, self.flying = self.flying.exception(), None
        words = next((w for w in dist.gather("" if error is None else str(error)) if w), "")
        if words:
            self.failures += 1
        else:
            self.failures, self.saved = 0, self.step
        need(self.failures < 2, f"two saves in a row failed, the last one so: {words}", f"a {self.out} that can be written to")
        return "" if self.told else words

    def _complete(self, part: Path, write: Callable[[], Any]) -> None:
        """Write; on rank 0 check, rename, mark and prune once all ranks have."""
        try:
            write()
            if td.get_rank() == 0:
                facts = self.facts | {"step": self.step, "models": list(self.models)}
                (part / "state.json").write_text(json.dumps(facts))
                sizes = _verify(part)
                _sync(part / "state.json")  # DCP synced its own
                _sync(part)
                final = step_folder(self.out, self.step)
                shutil.rmtree(final, ignore_errors=True)
                part.rename(final)
                (final / ".COMPLETE").write_text(json.dumps(sizes))
                _sync(final / ".COMPLETE")
                (final / ".COMPLETE").rename(final / "COMPLETE")
                _sync(final)
                _sync(final.parent)
                prune(self.out, self.cfg.keep, self.cfg.keep_best)
        except (Exception, CheckpointException) as e:  # DCP's is no Exception
            raise self._failed(part, e) from e

    def _failed(self, part: Path, error: BaseException) -> SaveFailed:
        """The error in a user's words; what was written goes, for it may be what fills the disk."""
        if isinstance(error, SaveFailed):
            return error
        cause = next((w[0] for w in error.failures.values()), error) if isinstance(error, CheckpointException) else error
        free = shutil.disk_usage(self.out).free
        if td.get_rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
        intact = complete(self.out)
        words = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        left, wanted, last = plan.size(free), plan.size(_bytes(self.models)), intact[-1].name if intact else "none"
        return SaveFailed(f"the checkpoint after {self.step} steps failed: {words} ({left} free in {self.out}, {wanted} "
                          f"needed); the last complete one: {last}")


def _bytes(models: Mapping[str, Trained]) -> int:
    return sum((plan.STATE_BYTES if o else 4) * p.numel() for model, o in models.values() for p in model.parameters())


def _verify(part: Path) -> dict[str, int]:
    """Size of every file of a checkpoint that is written. Raises OSError where one is shorter than DCP's manifest says."""
    ends: dict[str, int] = {}
    for place in Reader(part).read_metadata().storage_data.values():
        ends[place.file] = max(ends.get(place.file, 0), place.end)
    sizes = {f.name: f.stat().st_size for f in part.iterdir()}
    for name, end in ends.items():
        if sizes.get(name, 0) < end:
            raise OSError(f"{name} has {sizes.get(name, 0)} bytes of {end}")
    return sizes


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def step_folder(out: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return out / "ckpt" / f"step_{step:06d}"


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint has its mark and every file that the mark names, whole."""
    try:
        sizes = json.loads((folder / "COMPLETE").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def complete(out: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    return sorted(p for p in (out / "ckpt").glob("step_*") if is_complete(p))


def prune(out: Path, keep: int, keep_best: str) -> None:
    """Remove all complete checkpoints but the newest `keep` and the best by evaluation, which `ckpt/best` then points to."""
    have = complete(out)
    best = _best(out, have, keep_best)
    if best:
        link = out / "ckpt" / ".best"
        link.unlink(missing_ok=True)
        link.symlink_to(best.name)
        link.rename(out / "ckpt" / "best")
    for old in have[:-keep]:
        if old != best:
            (old / "COMPLETE").unlink()  # first: what is half removed must not count
            shutil.rmtree(old)


def _best(out: Path, have: list[Path], metric: str) -> Path | None:
    """The one of `have` whose evaluation was highest, the newest of equals."""
    scores: dict[str, float] = {}
    for row in read_metrics(out, [int(p.name.removeprefix("step_")) for p in have]):
        values = ([v for k, v in row.items() if k.startswith("eval/") and "/avg@" in k] if metric == "auto"
                  else [row[metric]] if metric in row else [])
        if values:
            scores[step_folder(out, int(row["step"])).name] = sum(values) / len(values)
    scored = [p for p in have if p.name in scores]
    return max(scored, key=lambda p: (scores[p.name], p.name), default=None)


# --- resuming


def find(out: Path, resume: str) -> Path | None:
    """The checkpoint to start from: the newest complete one in `out` (after a restart also of a run that began elsewhere);
    where there is none, `resume` as a path, which must be a complete checkpoint or a run that has one. Raises UserError."""
    own = complete(out)
    newest = own[-1] if own else None
    if resume in ("auto", "never"):
        return newest
    path = Path(resume).absolute()
    path = (complete(path) or [path])[-1]
    need(is_complete(path), f"{resume} is no complete checkpoint", "a folder ckpt/step_NNNNNN with COMPLETE in it, or a run's")
    need(path not in own[:-1], f"{resume} is older than {newest}", "another --out for a run that leaves this one there")
    return newest or path


def resume(path: Path, models: Mapping[str, Trained], facts: Mapping[str, Any]) -> int:
    """Fill models and optimizers from a checkpoint of any number of ranks; returns how many steps were done. Raises UserError
    where the run that left it and this one (`facts`: its config and its problems) are not the same algorithm."""
    said = json.loads((path / "state.json").read_text())
    differ = changed(said["config"], facts["config"])
    need(not differ, f"{path} is of a run with another config ({'; '.join(differ)})",
         "the flags it was made with, or another --out")
    need(said["problems"] == facts["problems"], f"{path} is of a run on other problems or another template",
         "the --data and --template it was made with, or another --out")
    for _, optimizer in models.values():
        if optimizer:
            _init(optimizer)
    copy = HostCopy(models)
    dcp.load(copy.state, storage_reader=Reader(path))
    copy.restore()
    return said["step"]


def _init(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state tensors, so that there is something to load into: a step with lr 0 and zero gradients."""
    for group in optimizer.param_groups:
        lr, group["lr"] = group["lr"], 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        group["lr"] = lr
    optimizer.zero_grad()


# --- Hugging Face


def export_hf(weights: Iterable[tuple[str, Tensor]], model: nn.Module, tokenizer: Any, source: str, out: Path) -> None:
    """Write a Hugging Face folder: bf16 safetensors, config, tokenizer, generation config. Every rank iterates the weights
    (dist.full_weights gathers), rank 0 writes."""
    main = not td.is_initialized() or td.get_rank() == 0
    part = out.with_name(f".{out.name}.part")
    if main:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    shard: dict[str, Tensor] = {}
    index: dict[str, str] = {}
    files = 0

    def flush() -> None:
        nonlocal files, shard
        files += 1
        name = f"model-{files:05d}.safetensors"
        save_file(shard, part / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard = {}

    for name, tensor in weights:
        if main:
            shard[name] = tensor.to("cpu", torch.bfloat16, copy=True).contiguous()
            if sum(t.numel() for t in shard.values()) * 2 > SHARD_BYTES:
                flush()
    if not main:
        return
    flush()
    if files == 1:
        (part / "model-00001.safetensors").rename(part / "model.safetensors")
    else:
        size = sum(f.stat().st_size for f in part.glob("*.safetensors"))
        (part / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}))
    _describe(model, tokenizer, source, part)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


def _describe(model: nn.Module, tokenizer: Any, source: str, folder: Path) -> None:
    config = load_config(source)  # a fresh copy: the model's own names our attention
    config.dtype = "bfloat16"
    if isinstance(model, Critic):
        kind = type(model.model).__name__.removesuffix("Model")
        config.architectures, config.num_labels = [f"{kind}ForSequenceClassification"], 1
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if (Path(source) / "generation_config.json").is_file():
        shutil.copy(Path(source) / "generation_config.json", folder)


def _weights(path: Path, who: str, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of a checkpoint's parameters, one at a time."""
    sizes = Reader(path).read_metadata().state_dict_metadata
    for name, _ in model.named_parameters():
        state = {who: {name: torch.empty(sizes[f"{who}.{name}"].size)}}
        dcp.load(state, storage_reader=Reader(path), no_dist=True)
        yield name, state[who][name][0]


def main(argv: list[str]) -> None:
    """`python ckpt.py export RUN STEP OUT [critic]`."""
    need(len(argv) in (4, 5) and argv[0] == "export" and argv[2].isdigit() and argv[4:] in ([], ["policy"], ["critic"]),
         f"ckpt.py {' '.join(argv)}", "python ckpt.py export RUN STEP OUT [critic]")
    run, who = Path(argv[1]), (argv[4:] or ["policy"])[0]
    path = step_folder(run, int(argv[2]))
    need(is_complete(path), f"no complete checkpoint {path}",
         f"one of {', '.join(p.name for p in complete(run)) or 'none: this run has no checkpoint'}")
    said = json.loads((path / "state.json").read_text())
    need(who in said["models"], f"{path} holds no {who}", f"one of {', '.join(said['models'])}")
    source = said["config"]["model"]
    with torch.device("meta"):
        model = (Critic if who == "critic" else Policy)(load_config(source))
    export_hf(_weights(path, who, model), model, load_tokenizer(source), source, Path(argv[3]))
    print(f"{argv[3]}: the {who} after {argv[2]} steps")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as e:
        sys.exit(f"ckpt.py: {e}")
