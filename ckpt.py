"""What survives a crash: sharded checkpoints that are whole or do not count, resume, Hugging Face exports.

A checkpoint is the folder `ckpt/step_000020/` of a run:

    shard-00000.safetensors   one a rank: its slices of all tensors; the header holds their offsets
    carried-00000.npz         one a rank that has some: the trajectories it goes on with (--carry)
    state.json                steps done, config, fingerprint of the problems, versions
    COMPLETE                  bytes and CRC-32 of every file; without it the checkpoint does not count

The files have the format of DCP (torch.distributed.checkpoint) for sharded safetensors. A thread writes them
while the training goes on, and DCP loads them on any number of ranks. Their keys are `policy.NAME` (the fp32
weight), `policy.NAME.exp_avg` and so on (the optimizer's state for it), and `policy.optimizer.step` (0-d
optimizer state, once for all parameters); the same for `critic` and `ref`. Nothing is pickled. Random state
is not needed: every random choice is a function of (seed, step).

DCP does not write the files itself. For each save it would plan anew and build each file in memory, and it
needs another process to leave the GIL to vLLM; that process gets the state through /dev/shm.

A checkpoint is written once: nothing replaces it, and only `prune` removes it. An export replaces an earlier
export, which `torz.json` marks, and nothing else. A state that is not finite is neither saved nor exported.

    python ckpt.py export RUN STEP|best|last OUT [critic]  # the policy (or critic) as a Hugging Face folder
    python ckpt.py verify RUN                              # compare every file with its checksum
"""

import fnmatch
import json
import os
import re
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING, PreTrainedConfig

import dist
from configs import Config, UserError, changed, gib, require, user_errors
from data import Sample, chat_template, prompt_form
from log import read_metrics
from model import Critic, Policy, load_config, load_tokenizer

MARKER = "torz.json"  # of an exported folder
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}
OURS = re.compile(r"shard-\d{5,}\.safetensors|carried-\d{5,}\.npz|state\.json")  # files of a checkpoint
Models = Mapping[str, tuple[nn.Module, Optimizer | None]]  # by name: policy, critic, ref (without optimizer)


# --- what a checkpoint holds


def tensors_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """The live tensors that a checkpoint keeps: the weights, and all tensors in the optimizer's state. An
    optimizer that has not stepped yet has none.

    The keys are unique, because no module has a parameter and a submodule of the same name.
    """
    out = {}
    for name, p in model.named_parameters():  # a tied head comes once, as the embedding
        out[name] = p.detach()
        for kind, value in optimizer.state.get(p, {}).items() if optimizer else ():
            first = out.setdefault(f"{name}.{kind}" if value.ndim else f"optimizer.{kind}", value)
            assert first is value or first == value, f"{kind} is not the same for all parameters"
    return out


class StagingBuffer:
    """A copy of this rank's slices of the models' state in host memory, from which a checkpoint is written.
    Its memory is kept for the next save, because new memory costs as much time as the copy."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.slices, self.offsets, self.nbytes = {}, {}, 0

    @torch.no_grad()
    def update(self) -> None:
        """Copy what the models hold now. All ranks must call this together."""
        live = {f"{who}.{key}": tensor for who, (model, optimizer) in self.models.items()
                for key, tensor in tensors_of(model, optimizer).items()}
        local = {key: x.to_local() if isinstance(x, DTensor) else x for key, x in live.items()}
        if self.slices.keys() != local.keys():  # at the first save with this optimizer state
            self.slices = {key: torch.empty(x.shape, dtype=x.dtype) for key, x in local.items()}
            self.offsets = owned_offsets(live)
            self.nbytes = sum(x.numel() * x.itemsize for x in live.values())  # over all ranks
        torch._foreach_copy_(list(self.slices.values()), list(local.values()))

    def not_finite(self) -> str:
        """Name of a tensor of which this rank's slice holds NaN or infinity, or ""."""
        return next((key for key in self.offsets if not is_finite(self.slices[key])), "")

    def write(self, file: Path) -> str:
        """Write the slices that this rank owns, for DCP's HuggingFaceStorageReader, and wait until they
        are on the disk. save_file writes from their memory, without the GIL: training and vLLM go on.
        Returns the file's checksum."""
        offsets = {key: {"saved_offsets": at} for key, at in self.offsets.items()}
        info = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: self.slices[key] for key in self.offsets}, file, info)
        _sync(file)
        return crc32(file)


def is_finite(x: Tensor) -> bool:
    """Whether no number of `x` is NaN or infinite. aminmax returns NaN where there is one, and takes 0.1 s a
    GB on one core; isfinite takes 1.5."""
    return not x.numel() or not x.is_floating_point() or all(end.isfinite() for end in x.aminmax())


def crc32(file: Path) -> str:
    """A file's CRC-32 in 8 hexadecimal digits, without the GIL: 0.33 s a GB on one core, and SHA-256, where
    the CPU has instructions for it, 0.65."""
    value, chunk = 0, bytearray(2**20)
    with file.open("rb", buffering=0) as f:
        while size := f.readinto(chunk):
            value = zlib.crc32(memoryview(chunk)[:size], value)
    return f"{value:08x}"


def owned_offsets(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Where this rank's slice of each tensor begins. Of a slice that several ranks hold, the first of them is
    the owner; the others leave it out."""
    items = create_default_local_save_plan(dict(tensors), is_coordinator=True).items
    mine = {item.index.fqn: list(item.tensor_data.chunk.offsets) for item in items}
    lower_ranks = dist.gather(mine)[:td.get_rank()]
    return {key: offset for key, offset in mine.items()
            if all(other.get(key) != offset for other in lower_ranks)}


# --- saving


class SaveFailed(OSError):
    """A checkpoint that could not be written, in one line."""


class Saver:
    """Writes a run's checkpoints, one at a time. `save` waits for the copy to host memory only; a thread
    writes the files beside the training.

    `facts` goes into state.json. `saved` is the number of steps in the newest complete checkpoint.
    """

    def __init__(self, out: Path, models: Models, cfg: Config, facts: dict[str, Any],
                 saved: int | None) -> None:
        self.out, self.cfg = out, cfg
        self.facts = facts | {"models": list(models), "prompt": prompt_form(cfg.template)}
        for who in models:  # before the training, not after it
            _raise_on_all(refusal(out / "export" / who))
        self.saved = self.step = saved  # `step` is that of the save in flight
        self.group = td.new_group(backend="gloo")  # its collectives run beside the training's
        self.buffer = StagingBuffer(models)
        self.pool = ThreadPoolExecutor(1)
        self.in_flight = None
        self.reported = False  # whether `pending_warning` returned the error of the save in flight
        self.failures = 0  # in a row
        self.not_finite = ""  # the tensor that made the save in flight fail
        self.told = set()  # what could not be pruned, each said once
        if saved is not None and td.get_rank() == 0:  # the run before may have been killed before it did so
            self._remove_unfinished()
            prune(out, cfg.keep, cfg.keep_best)

    def save(self, step: int, carried: Sequence[Sample] = (), wait: bool = False) -> str:
        """Wait for the previous save, then start the checkpoint of `step`; with `wait`, finish it too.
        `carried`: the trajectories that this rank goes on with. Returns the error of the last save that
        ended, or "". What is saved already is not saved again.

        Raises UserError after two failures in a row.
        """
        warning = self.finish()
        if step == self.saved:
            return warning
        self.step, self.reported = step, False
        self.buffer.update()
        self.in_flight = self.pool.submit(self._complete, self._temporary_folder(), carried)
        return (self.finish() if wait else "") or warning

    def _temporary_folder(self):
        """Folder to write to, the same on all ranks and new in the run. Removes those of dead runs."""
        temp = self.out / "ckpt" / f".step_{self.step:06d}.{secrets.token_hex(8)}.part"
        if td.get_rank() == 0:
            self._remove_unfinished()
        return dist.gather(temp)[0]

    def _remove_unfinished(self):
        """Remove the folders of saves that dead runs did not finish."""
        for old in (self.out / "ckpt").glob(".step_*.part"):
            shutil.rmtree(old, ignore_errors=True)

    def pending_warning(self) -> str:
        """What went wrong in the save in flight, once, as soon as this rank knows it; else ""."""
        if self.reported or self.in_flight is None or not self.in_flight.done():
            return ""
        warning = "".join(self._outcome())
        self.reported = warning != ""
        return warning

    def _outcome(self):
        """Wait for the save in flight. Returns its error, or "", and what could not be pruned."""
        error = self.in_flight.exception()
        return (str(error), "") if error else ("", self.in_flight.result())

    def finish(self) -> str:
        """Wait for the save in flight. Returns what went wrong, unless it was reported, else "".

        Raises UserError after two failures in a row, and where the state is not finite: it never heals.
        """
        if self.in_flight is None:
            return ""
        error, left = max(dist.gather(self._outcome()))  # of any rank that has one
        self.in_flight = None
        self.failures = self.failures + 1 if error else 0
        if not error:
            self.saved = self.step
        require(not self.not_finite, error, "another --out, with smaller learning rates")
        require(self.failures < 2, f"two saves in a row failed, the last one with: {error}",
                f"a {self.out} that can be written to")
        return "" if self.reported else error + left

    def _complete(self, temp, carried):
        """Check and write; when all ranks have, rank 0 publishes the checkpoint and prunes. Returns what
        could not be pruned. Raises SaveFailed."""
        bad, error, checksum, rank = self.buffer.not_finite(), "", "", f"{td.get_rank():05d}"
        if not bad:
            error, checksum = _attempt(self.buffer.write, temp / f"shard-{rank}.safetensors")
        if not bad and not error and carried:
            error, _ = _attempt(write_samples, temp / f"carried-{rank}.npz", carried)
        every = dist.gather((bad, error, checksum), self.group)
        self.not_finite, error, left = max(x[0] for x in every), max(x[1] for x in every), ""
        if self.not_finite:
            error = f"{self.not_finite} is not finite"
        if not error and td.get_rank() == 0:
            error, left = _attempt(self._publish, temp, [x[2] for x in every])
        if error:
            raise self._failed(temp, error)
        return left

    def _publish(self, temp, checksums):
        (temp / "state.json").write_text(json.dumps(self.facts | {"step": self.step}))
        of_file = {f"shard-{rank:05d}.safetensors": checksum for rank, checksum in enumerate(checksums)}
        publish(temp, step_folder(self.out, self.step), self.buffer.nbytes, of_file)
        new = set(prune(self.out, self.cfg.keep, self.cfg.keep_best)) - self.told
        self.told |= new
        return "; ".join(sorted(new))

    def _failed(self, temp, error):
        """The error in one line. Removes what was written, because it may be what fills the disk."""
        free = shutil.disk_usage(self.out).free
        if td.get_rank() == 0:
            shutil.rmtree(temp, ignore_errors=True)
        last = next((p.name for p in reversed(complete(self.out))), "none")
        return SaveFailed(
            f"the checkpoint after {self.step} steps failed: {error} ({gib(free)} free in {self.out}, "
            f"{gib(self.buffer.nbytes)} needed); the last complete one: {last}")


def _attempt(work: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """"" and what work(*args) returns; or what went wrong, in one line, and ""."""
    try:
        return "", work(*args)
    except (OSError, SafetensorError) as e:
        return (str(e).strip() or type(e).__name__).splitlines()[0], ""


def publish(temp: Path, final: Path, nbytes: int, checksums: Mapping[str, str]) -> None:
    """Verify what was written to `temp`, mark it COMPLETE and rename it to `final`. Each change is on the
    disk before the next one. `checksums`: by file name; files without one are read. Runs on rank 0, beside
    the training.

    Raises SafetensorError where a file does not end where its header says, and OSError where the files
    together are smaller than `nbytes`, the size of the tensors, or where `final` exists.
    """
    for file in temp.glob("*.safetensors"):
        safe_open(file, "pt")
    mark = {file.name: {"bytes": file.stat().st_size, "crc32": checksums.get(file.name) or crc32(file)}
            for file in temp.iterdir()}
    if sum(file["bytes"] for file in mark.values()) < nbytes:
        raise OSError("files are missing")
    _remove_leftover(final)
    (temp / "COMPLETE").write_text(json.dumps(mark))
    _sync(temp / "state.json", temp / "COMPLETE", temp)
    temp.rename(final)  # fails where there is anything but an empty folder
    _sync(final.parent)


def _remove_leftover(final):
    """Remove what a crash left of a checkpoint: files without a mark. Raises OSError for anything else."""
    if os.path.lexists(final):
        others = [p.name for p in final.iterdir() if not OURS.fullmatch(p.name)]
        if others or final.is_symlink():
            raise OSError(f"{final} exists, with {others[0] if others else 'a link'} in its place")
        shutil.rmtree(final)


def _sync(*paths):
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


# --- trajectories that go on in the next step

ARRAYS = {"ids": "ids", "logp": "logp", "sampled": "is_sampled", "versions": "token_versions"}


def write_samples(file: Path, samples: Sequence[Sample]) -> None:
    """Write samples to `file`, and wait until they are on the disk."""
    rows = [{f.name: getattr(s, f.name) for f in fields(s) if f.name not in ARRAYS} for s in samples]
    arrays = {name: np.concatenate([getattr(s, source) for s in samples]) for name, source in ARRAYS.items()}
    text = np.frombuffer(json.dumps(rows).encode(), np.uint8)
    np.savez(file, rows=text, lengths=[len(s.ids) for s in samples], **arrays)
    _sync(file)


def read_carried(folder: Path) -> list[Sample]:
    """The trajectories that all ranks of a checkpoint's run go on with, in order."""
    found = []
    for file in sorted(folder.glob("carried-*.npz")):
        with np.load(file) as arrays:  # nothing pickled is loaded
            rows, ends = json.loads(arrays["rows"].tobytes()), arrays["lengths"].cumsum()[:-1]
            columns = {name: np.split(arrays[name], ends) for name in ARRAYS}
        for i, row in enumerate(rows):
            lists = {name: tuple(row[name]) for name in ("prompt", "failed")}
            found.append(Sample(**row | lists | {name: column[i] for name, column in columns.items()}))
    return sorted(found, key=lambda s: (s.prompt_id, s.sample_id))


# --- the checkpoints of a run


def step_folder(out: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return out / "ckpt" / f"step_{step:06d}"


def read_mark(folder: Path) -> dict[str, tuple[int, str]] | None:
    """Bytes and checksum of each file that a checkpoint's mark names; None without a mark. A mark that can't
    be read names itself. Earlier versions had no checksums: ""."""
    try:
        mark = json.loads((folder / "COMPLETE").read_text())
        return {name: (x, "") if isinstance(x, int) else (x["bytes"], x["crc32"]) for name, x in mark.items()}
    except OSError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return {"COMPLETE": (-1, "")}


def marked(out: Path) -> list[Path]:
    """The run's checkpoints with a mark, oldest first. Folders with other names are the user's."""
    named = [p for p in (out / "ckpt").glob("step_*") if re.fullmatch(r"step_(\d{6}|[1-9]\d{6,})", p.name)]
    return sorted((p for p in named if read_mark(p) is not None), key=_step)


def _step(folder):
    return int(folder.name.removeprefix("step_"))


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint has its mark, and every file that the mark names in its full size."""
    mark = read_mark(folder)
    return mark is not None and all(_is_as_saved(folder / name, size) for name, (size, _) in mark.items())


def _is_as_saved(file, size, checksum=""):
    try:
        return file.stat().st_size == size and checksum in ("", crc32(file) if checksum else "")
    except OSError:
        return False


def complete(out: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    return [p for p in marked(out) if is_complete(p)]


def damaged(folder: Path, rank: int = 0, ranks: int = 1) -> str:
    """Name of a file that is not as it was saved, or "". Reads every `ranks`-th of the files, in threads."""
    extra = {p.name: (-1, "") for p in folder.glob("*.safetensors")}  # DCP would read these too
    mine = sorted((extra | (read_mark(folder) or {})).items())[rank::ranks]
    with ThreadPoolExecutor() as pool:
        right = list(pool.map(lambda item: _is_as_saved(folder / item[0], *item[1]), mine))
    return next((name for (name, _), ok in zip(mine, right, strict=True) if not ok), "")


def check(folder: Path) -> None:
    """Raises UserError, the same on every rank, where a file of a checkpoint is not as it was saved. Each
    rank reads its part of the files."""
    here = (td.get_rank(), td.get_world_size()) if td.is_initialized() else (0, 1)
    bad = min(filter(None, dist.gather(damaged(folder, *here))), default="")
    others = [p.name for p in complete(folder.parent.parent) if p.name != folder.name]
    require(not bad, f"{folder / bad} is damaged: its bytes are not those that were saved",
            f"move {folder} away; the newest one is then {others[-1] if others else 'none'}")


def verify(run: Path) -> None:
    """Print whether each checkpoint of a run is as it was saved. Raises UserError where one is not."""
    found, bad = marked(run), 0
    for folder in found:
        mark, name = read_mark(folder), damaged(folder)
        has_checksums = all(checksum for _, checksum in mark.values())
        told = f"{name} is damaged" if name else "whole" if has_checksums else "sizes are right, no checksums"
        print(f"{folder.name}: {told}")
        bad += name != ""
    require(found != [], f"{run} has no checkpoint", "the folder of a run that has saved one")
    require(bad == 0, f"{bad} of {len(found)} checkpoints are damaged", "one of the others, or a copy")


def prune(out: Path, keep: int, keep_best: str) -> list[str]:
    """Remove complete checkpoints, except the newest `keep` and the one with the best evaluation
    (`keep_best`, see Config). `ckpt/best` is a link to the latter. Links are the user's. Returns what went
    wrong, a line each."""
    checkpoints = complete(out)
    best = _best(out, checkpoints, keep_best)
    old = [p for p in checkpoints[:-keep] if p != best and not p.is_symlink()]
    errors = {f"the old checkpoint {p} can't be removed": _attempt(_remove, p)[0] for p in old}
    if best:
        errors["ckpt/best can't be made"] = _attempt(_link_best, out / "ckpt" / "best", best.name)[0]
    return [f"{what} ({error})" for what, error in errors.items() if error]


def _remove(folder):
    """Remove a checkpoint's own files, its mark first: half of a checkpoint must not count. Raises OSError,
    also where something else is in the folder."""
    (folder / "COMPLETE").unlink()
    for file in list(folder.iterdir()):
        if OURS.fullmatch(file.name):
            file.unlink()
    folder.rmdir()


def _link_best(link, name):
    if link.exists() and not link.is_symlink():
        raise OSError(f"{link} is no link")
    temp = link.with_name(".best")
    temp.unlink(missing_ok=True)
    temp.symlink_to(name)
    temp.rename(link)


def _best(out, checkpoints, metric):
    """The checkpoint with the highest evaluation, the newest of equals; None where none has one."""
    scores = {}
    for row in read_metrics(out):
        values = [row[key] for key in fnmatch.filter(row, "eval/*/avg@*" if metric == "auto" else metric)]
        folder = step_folder(out, row["step"])
        if values and folder in checkpoints:
            scores[folder] = sum(values) / len(values)
    return max(scores, key=lambda p: (scores[p], _step(p)), default=None)


# --- resuming


def find(out: Path, resume: str) -> Path | None:
    """The checkpoint to start from, or None. The newest one in `out` comes first; without one, the path
    `resume`: a checkpoint, or a run that has one. `resume` below checks its bytes. Raises UserError."""
    *older, newest = marked(out) or [None]
    if resume in ("auto", "never"):
        return newest
    path = named(resume)
    require(path not in [p.resolve() for p in older], f"{resume} is older than {newest}",
            "another --out: the newer checkpoints here then stay")
    return newest or path


def named(name: str) -> Path:
    """The checkpoint that a path names: its own folder (or ckpt/best, a link to it); a run, whose newest it
    is; or RUN/STEP, RUN/best, RUN/last. Raises UserError."""
    path = Path(name)
    run, which = (path, "last") if marked(path) else (path.parent, path.name)
    if not path.exists() and which.isdigit():
        path = step_folder(run, int(which))
    elif which == "last" and marked(run):
        path = marked(run)[-1]
    elif not path.exists() and which == "best":
        path = run / "ckpt" / "best"
    there = ", ".join(p.name for p in marked(run))
    require(read_mark(path) is not None, f"{name} is no complete checkpoint",
            f"one of {there}" if there else "a folder ckpt/step_NNNNNN with COMPLETE in it, or a run's")
    return path.resolve()


def resume(path: Path, models: Models, facts: Mapping[str, Any]) -> int:
    """Fill models and optimizers from a checkpoint of any number of ranks; returns the number of steps done.

    Raises UserError where a file is damaged, and where the checkpoint's run and this one do not compute the
    same or this one is shorter (`facts`: this run's config, problems and reward files).
    """
    check(path)
    saved = json.loads((path / "state.json").read_text())
    require(saved["step"] <= facts["config"]["steps"], f"{path} is after {saved['step']} steps, and this run "
            f"has {facts['config']['steps']}", f"--steps {saved['step']} or more, or another --out")
    changes = changed(saved["config"], facts["config"])
    if saved["problems"] != facts["problems"]:
        changes.append("other problems or another template")
    require(not changes, f"{path} is of a run with another config ({'; '.join(changes)})",
            "the flags and the data it was made with, or another --out")
    old, new = (x.get("reward_files", {}) for x in (saved, facts))  # path -> hash
    for file in sorted(old.keys() & new.keys()):
        require(old[file] == new[file], f"reward file {file} is not what it was when the run started",
                "that version, or another --out")
    for who, (model, optimizer) in models.items():
        _fill(path, who, model, optimizer)
    return saved["step"]


def start_from(path: Path, models: Models, facts: Mapping[str, Any]) -> str:
    """Fill models with the weights of another run's checkpoint; their optimizers start anew. The reference
    becomes that run's policy. Returns a line that says which models were filled.

    Raises UserError where a file is damaged, or the models or their tokenizer are others. `facts`: this
    run's.
    """
    check(path)
    saved = json.loads((path / "state.json").read_text())
    require(saved.get("tokenizer", facts["tokenizer"]) == facts["tokenizer"],
            f"{path} has another tokenizer than --model {facts['config']['model']}",
            f"--model {saved['config']['model']}, which that run started from")
    sizes = dcp.HuggingFaceStorageReader(path).read_metadata().state_dict_metadata
    taken = {who: "policy" if who == "ref" else who for who in models if who in (*saved["models"], "ref")}
    for who, source in taken.items():
        model = models[who][0]
        other = [name for name, p in model.named_parameters()
                 if getattr(sizes.get(f"{source}.{name}"), "size", None) != p.shape]
        require(not other, f"{path} has a {source} of another shape ({', '.join(other[:3])})",
                f"--model {source_of(source, saved['config'])}, which that run started from")
        _fill(path, source, model, None)
    left = ", ".join(f"the {who} is new" for who in models if who not in taken)
    return f"started from {path}: {', '.join(taken)}" + f"; {left}" * bool(left)


def _fill(path, who, model, optimizer):
    """Fill a model and its optimizer with what a checkpoint holds of `who`."""
    reader = dcp.HuggingFaceStorageReader(path)
    keys = reader.read_metadata().state_dict_metadata
    require(len(keys) > 0, f"{path} has no safetensors files: another version of ckpt.py made it",
            "that version, or another --out")
    if optimizer:
        # `policy.NAME.exp_avg` belongs to `policy.NAME`.
        _make_state(who, model, optimizer, {key.rpartition(".")[0] for key in keys})
    state = tensors_of(model, optimizer)
    dcp.load({who: state}, storage_reader=reader)
    for p_state in optimizer.state.values() if optimizer else ():
        for kind, value in p_state.items():
            if not value.ndim:
                value.copy_(state[f"optimizer.{kind}"])


def _make_state(who, model, optimizer, owners):
    """Make the optimizer's state tensors for the parameters in `owners`, by a step with zero gradients. The
    values are loaded afterwards, so the step's effect is lost. An optimizer that had not stepped when it was
    saved has no owners: it stays without state."""
    for name, p in model.named_parameters():
        p.grad = torch.zeros_like(p) if f"{who}.{name}" in owners else None
    optimizer.step()
    optimizer.zero_grad()


# --- Hugging Face


def source_of(who: str, config: Mapping[str, Any]) -> str:
    """The folder from which policy, critic or ref started. `config`: the run's, as a dict."""
    return (config["critic_model"] if who == "critic" else "") or config["model"]


def is_export(folder: Path) -> bool:
    """Whether torz exported this folder."""
    try:
        return not folder.is_symlink() and json.loads((folder / MARKER).read_text())["torz"] == "export"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def refusal(out: Path) -> str:
    """Why nothing may be exported to `out`, in one line, or ""."""
    found = ""
    if out.is_symlink():
        found = "is a link"
    elif out.exists() and not out.is_dir():
        found = "is a file"
    elif out.name in ("", "..") or out.is_mount():
        found = "can't be renamed"
    elif out.exists() and any(out.iterdir()) and not is_export(out):
        found = f"has files, and no {MARKER} of an export"
    return found and f"{out} {found}; needed: a new path, an empty folder, or an earlier export"


def _raise_on_all(error):
    """Raise UserError on every rank if rank 0 has an error."""
    error = dist.gather(error)[0]
    if error:
        raise UserError(error)


def export_hf(weights: dist.Weights, model: nn.Module, tokenizer: Any, source: str, out: Path,
              facts: Mapping[str, Any] | None = None) -> None:
    """Write the Hugging Face folder `out`: bf16 safetensors, config, tokenizer, generation config, and with
    `facts` (from `marker`) how it was asked. An earlier export there is replaced.

    `weights`: name and whole tensor of every parameter. All ranks must iterate them, because
    dist.full_weights gathers; rank 0 writes, from its host memory. `source`: the model folder that this
    model came from; its configs are copied. Raises UserError, the same on every rank, for weights that are
    not finite, and before they are gathered where anything else is at `out`.
    """
    main = not td.is_initialized() or td.get_rank() == 0
    _raise_on_all(refusal(out) if main else "")
    config = load_config(source)  # a fresh copy: the model's own names our attention
    config.dtype = "bfloat16"
    if isinstance(model, Critic):
        config.architectures = [critic_class(config).__name__]
        config.num_labels = 1
    state = {}
    for name, tensor in weights:
        if main:
            state[name] = dist.on_host(tensor.to(torch.bfloat16)).clone()  # and free what is pinned
    bad = next((name for name, x in state.items() if not is_finite(x)), "")
    _raise_on_all(bad and f"{bad} is not finite, so {out} was not written; needed: an older checkpoint")
    error = _attempt(_write_export, out, state, config, tokenizer, source, facts or {})[0] if main else ""
    if error:
        _attempt(_remove_unfinished, out)
    _raise_on_all(error and f"{out} can't be written ({error}); needed: space and permission there, and then "
                  "the same command, or ckpt.py export; the checkpoints are whole")


def _write_export(out, state, config, tokenizer, source, facts):
    """Write a folder beside `out`, then put it in the place of an earlier export. Raises OSError where
    anything else has come there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(out)
    temp = out.with_name(f".{out.name}.{secrets.token_hex(8)}.part")
    old = temp.with_suffix(".old")
    temp.mkdir()
    (temp / MARKER).write_text(json.dumps({"torz": "export", **facts}, indent=1))
    save_torch_state_dict(state, temp)
    config.save_pretrained(temp)
    tokenizer.save_pretrained(temp)
    template = chat_template(tokenizer, facts["prompt"], facts["system_prompt"]) if facts else ""
    if template:
        (temp / "chat_template.jinja").write_text(template, encoding="utf-8")
    for file in Path(source).glob("generation_config.json"):
        shutil.copy(file, temp)
    if is_export(out):
        out.rename(old)
    temp.rename(out)  # fails where there is anything but an empty folder
    shutil.rmtree(old, ignore_errors=True)


def _remove_unfinished(out):
    """Remove what exports to `out` that were killed or failed have left beside it."""
    unfinished = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{16}}\.(part|old)")
    for folder in list(out.parent.iterdir()):
        if unfinished.fullmatch(folder.name) and is_export(folder):
            shutil.rmtree(folder)


def critic_class(config: PreTrainedConfig) -> type:
    """The transformers class for an exported critic: the family's sequence classifier or, where it has none,
    its backbone. model.load_critic reads both."""
    kind = type(config)
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(kind, None) or MODEL_MAPPING[kind]


def marker(run: Path, step: int, who: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What an export's marker says: where the model is from, and how it was asked in training. `facts`: what
    state.json says. `prompt` is the text of --template, or "" for the tokenizer's chat template."""
    config, names = facts["config"], ("template", "system_prompt", "stop", "temperature")
    prompt = facts["prompt"] if "prompt" in facts else prompt_form(config["template"])  # earlier versions
    return {"run": str(run), "step": step, "who": who, "prompt": prompt} | {k: config[k] for k in names}


def export(run: Path, step: str, out: Path, who: str = "policy", base: str = "") -> None:
    """Write the policy, critic or ref of a run's checkpoint to the Hugging Face folder `out`. `step`: a
    number of steps, "best" or "last". `base`: where the model that it started from is now. Raises
    UserError."""
    _raise_on_all(refusal(out))
    path = named(f"{run}/{step}")
    check(path)
    saved = json.loads((path / "state.json").read_text())
    require(who in saved["models"], f"{path} holds no {who}", f"one of {', '.join(saved['models'])}")
    source = base or source_of(who, saved["config"])
    with torch.device("meta"):
        model = (Critic if who == "critic" else Policy)(load_config(source))
    weights = {name: torch.empty(p.shape, dtype=torch.bfloat16) for name, p in model.named_parameters()}
    dcp.load({who: weights}, storage_reader=dcp.HuggingFaceStorageReader(path), no_dist=True)
    facts = marker(run.absolute(), saved["step"], who, saved)
    export_hf(weights.items(), model, load_tokenizer(base or saved["config"]["model"]), source, out, facts)
    print(f"{out}: the {who} after {saved['step']} steps")


def main(argv: list[str]) -> None:
    """The command. Raises UserError."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    if argv[:1] == ["verify"] and len(argv) == 2:
        return verify(Path(argv[1]))
    words, base = (argv[:-2], argv[-1]) if argv[-2:-1] == ["--model"] else (argv, "")
    require(len(words) in (4, 5) and words[0] == "export"
            and (words[2].isdigit() or words[2] in ("best", "last")), f"ckpt.py {' '.join(argv)}",
            "python ckpt.py export RUN STEP|best|last OUT [critic] [--model PATH], or ckpt.py verify RUN")
    export(Path(words[1]), words[2], Path(words[3]), *words[4:], base=base)


if __name__ == "__main__":
    with user_errors("ckpt.py"):
        main(sys.argv[1:])
