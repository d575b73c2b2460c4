"""Atomic checkpoints, resuming a run, and Hugging Face exports.

A checkpoint is the folder `ckpt/step_000020/` of a run:

    shard-00000.safetensors   one file per rank: the rank's slices of all tensors, in DCP's format
    carried-00000.json        with --carry, one file per rank: responses that no step has trained on yet
    state.json                number of finished steps, config, hashes of what the run reads, versions
    COMPLETE                  CRC-32 of every other file; without it, the checkpoint is ignored

DCP (torch.distributed.checkpoint) loads the shards on any number of ranks. No random state is saved, because
every random choice is a function of (seed, step).

A complete checkpoint is never overwritten, and only `prune` deletes complete checkpoints. An export removes
nothing: an earlier export gets another name.

Checkpoints and exports are written to a hidden folder beside their place, which is then renamed.

Usage:

    python ckpt.py export RUN last OUT       # the policy of the newest checkpoint as a Hugging Face folder
    python ckpt.py export RUN best OUT       # the policy of the best checkpoint (--keep_best)
    python ckpt.py export RUN 20 OUT critic  # the critic after 20 steps
    python ckpt.py export RUN 20 OUT adapter # the policy's adapters (--lora), in the format of PEFT

RUN is a run's folder, such as runs/tiny-ppo. If the base model was moved, add --model PATH at the end.
"""

import errno
import fcntl
import fnmatch
import itertools
import json
import os
import re
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import configs  # noqa: F401 (first, because it says what to type if no package is installed)

# isort: split
import numpy as np
import torch
import torch.distributed as td
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.optim import Optimizer
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING, PreTrainedConfig

import dist
from configs import MARKER, Config, Say, prompt_form
from data import Sample, chat_template, fix_date, set_arguments
from engine import eos_ids
from guard.files import exists, follow_umask, if_there, lock_file, names_in, read_json
from guard.identity import (
    Facts,
    check_base,
    check_unchanged,
    source_of,
)
from guard.messages import UserError, differences, explained, require, shorten, show, user_errors
from log import read_metrics
from model import (
    Adapted,
    Critic,
    Policy,
    freeze,
    load_config,
    load_critic,
    load_policy,
    load_tokenizer,
)

STEP = re.compile(r"step_(\d{6}|[1-9]\d{6,})")  # the name of a checkpoint's folder
# The files of a checkpoint
FILES = re.compile(r"COMPLETE|shard-\d{5,}\.safetensors|carried-\d{5,}\.json|state\.json")
# "policy", "critic" or "ref" (the reference) -> (model, optimizer); the reference has no optimizer
Models = Mapping[str, tuple[nn.Module, Optimizer | None]]


def _is_main():
    return not td.is_initialized() or td.get_rank() == 0


# --- what a checkpoint holds


class StagingBuffer:
    """Copy of this rank's weights and optimizer states in host memory. Checkpoints are written from this
    copy. Its memory is kept between saves, because allocating memory is slow."""

    def __init__(self, models: Models) -> None:
        self.models = models
        # Names are such as "policy.model.norm.weight".
        self.slices: dict[str, Tensor] = {}  # name -> this rank's slice
        # name -> where the slice begins in the whole tensor. Only of slices that this rank writes.
        self.offsets: dict[str, list[int]] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Copies the current weights and optimizer states. All ranks must call this method together."""
        live = {}
        for who, (model, optimizer) in self.models.items():
            for name, tensor in dist.tensors_of(model, optimizer).items():
                live[f"{who}.{name}"] = tensor
        local = {key: dist.local(x) for key, x in live.items()}
        # The names differ at the first save, and after an optimizer's first step, which creates its state.
        if self.slices.keys() != local.keys():
            for key, x in local.items():
                # Copies from a GPU to memory that is not pinned are several times slower.
                self.slices[key] = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
            self.offsets = owned_offsets(live)  # a collective
        copies = [self.slices[key] for key in local]
        torch._foreach_copy_(copies, list(local.values()), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def check_finite(self) -> None:
        """Raises UserError if a slice that this rank writes has NaN or infinity."""
        for key in self.offsets:
            # One NaN or infinity makes the sum not finite. Testing each number is slower.
            if not self.slices[key].sum().isfinite():
                raise UserError(f"{key} is not finite")

    def write(self, file: Path) -> None:
        """Writes this rank's slices to `file` in DCP's format. DCP's own writer is not used: it would hold
        the GIL, and so block the training thread."""
        offsets = {key: {"saved_offsets": offset} for key, offset in self.offsets.items()}
        info = {  # a file's metadata: DCP reads these names
            "DCP_SHARDING_INFO": json.dumps(offsets),
            "DCP_VERSION": "1.0",
            "format": "pt",
        }
        owned = {key: self.slices[key] for key in self.offsets}
        save_file(owned, file, info)
        follow_umask(file)
        _sync(file)


def owned_offsets(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Returns a dict with the slices that this rank writes: name of a tensor -> offset of the slice in the
    whole tensor. If several ranks hold the same slice (--shard_ranks), only the lowest rank writes it."""
    # A plan of DCP is a list of slices. This plan: all slices that this rank holds.
    plan = create_default_local_save_plan(dict(tensors), is_coordinator=True)
    plans = dedup_save_plans(dist.gather(plan), save_to_lowest_rank=True)  # a plan for each rank
    mine = plans[td.get_rank()]
    offsets = {}
    for item in mine.items:  # index.fqn: the tensor's name
        offsets[item.index.fqn] = list(item.tensor_data.chunk.offsets)
    return offsets


def _crc32s(*files):
    """Returns a dict: name of the file -> the CRC-32 of its content, as 8 hexadecimal digits."""
    found = {}
    for file in files:
        value = 0
        with file.open("rb") as f:
            while chunk := f.read(2**20):
                value = zlib.crc32(chunk, value)
        found[file.name] = f"{value:08x}"
    return found


def _sync(*paths):
    """Waits until the files and folders are on the disk, so that they survive a loss of power."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as e:
            if e.errno != errno.EINVAL:  # some file systems can't sync folders
                raise
        finally:
            os.close(fd)


# --- trajectories that the next step continues

TUPLES = ("prompt", "failed", "earlier")  # fields of Sample that JSON has as lists
# Fields of Sample that are arrays -> dtype
ARRAYS = {"ids": np.int32, "logp": np.float32, "sampled": bool, "versions": np.int32}


def write_samples(file: Path, samples: Sequence[Sample]) -> None:
    """Writes {"samples": [...]} to a JSON file, with a dict of its fields for each sample."""
    rows = [vars(s) for s in samples]
    text = json.dumps({"samples": rows}, default=np.ndarray.tolist)
    file.write_text(text)
    _sync(file)


def read_carried(folder: Path) -> list[Sample]:
    """Returns the trajectories in the checkpoint `folder`, ordered by (prompt_id, sample_id). A trajectory is
    a prompt with the response so far. With --carry, a step leaves some trajectories for the next step."""
    found = []
    for name in names_in(folder):
        if name.startswith("carried-"):
            carried = read_json(folder / name, {"samples": list})
            found += map(_sample, carried["samples"])
    return sorted(found, key=lambda sample: sample.key)


def _sample(row):
    """Returns the Sample from a row of JSON, the result of `write_samples`."""
    for key in TUPLES:
        row[key] = tuple(row[key])
    for key, kind in ARRAYS.items():
        if row[key] is not None:
            row[key] = np.array(row[key], kind)
    return Sample(**row)


# --- saving


def _attempt(work: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """Calls work(*args). Returns ("", the result of `work`). If `work` raises OSError, SafetensorError or
    UserError, returns (the error in one line, None). Of a UserError's text "FOUND; needed: NEEDED", the line
    has only FOUND."""
    try:
        return "", work(*args)
    except (OSError, SafetensorError, UserError) as e:
        text = shorten(str(e), 300) or type(e).__name__
        found, _, _ = text.partition("; needed: ")
        return found, None


class Saver:
    """Writes a run's checkpoints, one at a time, in a thread.

    facts: content of state.json, to which Saver adds "models", "prompt" and "step"
    saved: number of steps of the newest checkpoint in `out`, or 0 in a new run. `save` does not save this
        number of steps again. None: the first call of `save` always saves
    warn: called with a line of text if a save or the deletion of an old checkpoint fails
    """

    def __init__(
        self,
        out: Path,
        models: Models,
        cfg: Config,
        facts: Facts,
        saved: int | None,
        warn: Say,
    ) -> None:
        self.out = out
        self.cfg = cfg
        self.saved = saved
        self.warn = warn
        self.facts = facts | {"models": list(models), "prompt": prompt_form(cfg.template)}
        # The thread that saves needs its own process group. In the default group, its collectives would mix
        # with the collectives of training. Its time limit is long, because an upload in `publish` may take
        # hours. If the upload hangs, guard.watch ends the run, because the next save waits for it.
        self.group = td.new_group(backend="gloo", timeout=dist.LONGEST_WAIT)
        self.buffer = StagingBuffer(models)
        self.pool = ThreadPoolExecutor(1)
        self.in_flight: Future[None] | None = None
        self.failed = False  # whether the last save failed
        if _is_main():  # clean up after a run that was killed
            _attempt(remove_unfinished, out / "ckpt", STEP.pattern)
            self._prune()

    def save(self, step: int, carried: Sequence[Sample] = ()) -> None:
        """Waits for the previous save. Then starts a new save, unless `step` is saved already. Raises
        UserError as `finish` does.

        step: number of finished steps
        carried: this rank's trajectories that the next step continues"""
        self.finish()
        if step == self.saved:
            # If a finished run is started again, its last step is saved already, but its evaluation is new.
            # So `ckpt/best` is chosen again.
            if _is_main():
                self._prune()
            return
        self.buffer.update()
        # A process from before a restart may still write this checkpoint, so its folder gets a random name.
        token = dist.gather(secrets.token_hex(8))[0]  # rank 0's, on all ranks
        temp = unfinished(step_folder(self.out, step), token)
        self.in_flight = self.pool.submit(self._complete, step, temp, carried)

    def finish(self) -> None:
        """Waits until the last save has ended. Raises UserError, the same on every rank, if two saves in a
        row failed."""
        if self.in_flight:
            self.in_flight.result()

    def _complete(self, step, temp, carried):
        """Writes this rank's files. When all ranks have written their files, rank 0 publishes the checkpoint.
        Raises UserError if this save and the one before failed. A single failed save is only a warning.

        temp: the hidden folder of the checkpoint (see `unfinished`). carried: see `save`"""
        # from each rank: (error, its files)
        results = dist.gather(_attempt(self._write, temp, carried), self.group)
        error = self._publish(step, temp, results) if _is_main() else ""
        error = dist.gather(error, self.group)[0]  # rank 0's error, on all ranks
        require(
            not error or not self.failed,
            f"two saves in a row failed, the last one with: {error}",
            f"finite numbers, and space and permission to write to {self.out}",
        )
        self.failed = error != ""
        if error:
            self.warn(error)
        else:
            self.saved = step

    def _write(self, temp, carried):
        """Writes this rank's files into the folder `temp`. Returns a dict: name of the file -> its CRC-32.
        carried: this rank's trajectories that the next step continues"""
        self.buffer.check_finite()
        temp.mkdir(parents=True, exist_ok=True)
        files = [temp / f"shard-{td.get_rank():05d}.safetensors"]
        self.buffer.write(files[0])
        if carried:
            files.append(temp / f"carried-{td.get_rank():05d}.json")
            write_samples(files[1], carried)
        return _crc32s(*files)

    def _publish(self, step, temp, results):
        """Publishes the checkpoint in the folder `temp`. Returns "", or a line that says why it was not
        saved. Only rank 0 calls it.

        results: from each rank, (error, files), the result of _attempt(self._write, …)"""
        error = max(error for error, _ in results)  # "" only if no rank has an error
        if not error:
            files = {}  # name -> CRC-32, of all ranks
            for _, of_rank in results:
                files |= of_rank
            final = step_folder(self.out, step)
            error, _ = _attempt(publish, temp, final, self.facts | {"step": step}, files)
        if not error:
            self._prune()
            return ""
        shutil.rmtree(temp, ignore_errors=True)  # makes room, because the disk may be full
        return f"the checkpoint after {step} steps was not saved: {error}"

    def _prune(self):
        """Calls `prune`. Its errors are only warnings."""
        error, _ = _attempt(prune, self.out, self.cfg.keep, self.cfg.keep_best)
        if error:
            self.warn(f"an old checkpoint was not removed, or ckpt/best not made: {error}")


def unfinished(final: Path, token: str) -> Path:
    """Returns the path of a hidden folder beside `final`. The caller writes all files into it, and then
    renames it to `final`.

    token: 16 random hexadecimal digits"""
    return final.with_name(f".{final.name}.{token}.part")


def remove_unfinished(folder: Path, name: str) -> None:
    """Deletes the hidden folders in `folder` (see `unfinished`) that killed processes left half-written, or
    half-deleted.

    name: a regular expression for the names of the finished folders"""
    pattern = rf"\.{name}\.[0-9a-f]{{16}}\.part"
    for found in names_in(folder):
        if re.fullmatch(pattern, found):
            shutil.rmtree(folder / found, ignore_errors=True)


def publish(temp: Path, final: Path, facts: Facts, files: Mapping[str, str]) -> None:
    """Writes state.json and COMPLETE into the folder `temp`, and renames it to `final`, the checkpoint's
    path. To upload checkpoints, add the upload at the end of this function.

    facts: content of state.json
    files: name of each other file in `temp` -> its CRC-32

    Raises OSError if a file is missing, as on a disk that ranks do not share, or if `final` is a complete
    checkpoint."""
    for name in files:
        os.stat(temp / name)  # raises OSError if the file is missing
    state = temp / "state.json"
    mark = temp / "COMPLETE"
    state.write_text(json.dumps(facts))
    mark.write_text(json.dumps({**files, **_crc32s(state)}))
    # A crash has left an incomplete checkpoint. If `final` is a link, `rename` below fails.
    is_folder = final.is_dir() and not final.is_symlink()
    if is_folder and not exists(final / "COMPLETE"):
        _empty(final)
    _sync(state, mark, temp)
    temp.rename(final)  # fails if `final` exists and is not an empty folder
    _sync(final.parent)


def prune(out: Path, keep: int, keep_best: str) -> None:
    """Deletes old checkpoints, and makes ckpt/best a link to the best checkpoint (--keep_best). Keeps the
    newest `keep` checkpoints, the best checkpoint, and symbolic links. Raises OSError if a checkpoint can't
    be deleted, or the link can't be made."""
    found = complete(out)  # oldest first
    link = out / "ckpt" / "best"
    best = best_of(out, found, keep_best)
    # None, although --keep_best is set: no checkpoint has the metric, so the old best is kept.
    if not best and keep_best and link.is_symlink():
        best = link.with_name(Path(os.readlink(link)).name)
    for old in found[:-keep]:
        if old != best and not old.is_symlink():
            _remove(old)
    if best:
        if link.is_symlink():
            link.unlink()
        link.symlink_to(best.name)


def _remove(folder):
    """Deletes a complete checkpoint, unless a process reads it (see `hold`): then a later call deletes it. If
    the folder has other files, they stay, and OSError is raised."""
    # r+: on NFS, only a file that is open for writing can be locked.
    with open(folder / "COMPLETE", "r+") as mark:
        if not lock_file(mark.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
            return
        if all(map(FILES.fullmatch, names_in(folder))):
            # If this process is killed from here on, the next start deletes the rest (see remove_unfinished).
            folder = folder.rename(unfinished(folder, secrets.token_hex(8)))
        (folder / "COMPLETE").unlink()  # first, so that a half-deleted checkpoint is ignored
    _empty(folder)
    folder.rmdir()


def _empty(folder):
    """Deletes the files of a checkpoint. Other files stay."""
    for name in filter(FILES.fullmatch, names_in(folder)):
        (folder / name).unlink()


def best_of(out: Path, folders: Sequence[Path], metric: str) -> Path | None:
    """Returns the checkpoint of `folders` with the highest `metric`, or None if no checkpoint has it. Rows of
    metrics.jsonl before the last change of the evaluation sets are ignored. Of equal checkpoints, the later
    one is best.

    Row N of metrics.jsonl and checkpoint N have the same weights, the weights after N steps. The row is
    written one step later than the checkpoint. So the newest checkpoint may have no row yet.

    metric: a metric's name; a pattern, for the mean of all matching metrics; "auto" (eval/*/avg@*); or "",
        which no checkpoint has"""
    pattern = "eval/*/avg@*" if metric == "auto" else metric
    scores = {}
    names = []  # metrics of the last evaluation so far
    for row in read_metrics(out):
        folder = step_folder(out, row["step"])
        found = fnmatch.filter(row, pattern)
        if found and found != names:  # the evaluation sets have changed
            names = found
            scores.clear()
        if found and folder in folders:
            mean = fmean(row[name] for name in found)
            scores[folder] = (mean, row["step"])  # pairs are compared by mean, then by step
    return max(scores, key=scores.get, default=None)


# --- the checkpoints of a run


def step_folder(out: Path, step: int) -> Path:
    return out / "ckpt" / f"step_{step:06d}"


def complete(out: Path) -> list[Path]:
    """Returns the folders of the run's complete checkpoints, oldest first."""
    names = filter(STEP.fullmatch, names_in(out / "ckpt"))
    # names_in sorts by name, so step_1000000 comes before step_999999. Sorting by length corrects this, and
    # keeps the order of names of equal length.
    names = sorted(names, key=len)
    folders = [out / "ckpt" / name for name in names]
    return [folder for folder in folders if exists(folder / "COMPLETE")]


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Context manager: inside it, no run deletes the checkpoint `folder`. Raises UserError if it is gone."""
    gone = f"{folder} was removed by its run"
    mark = if_there(open, folder / "COMPLETE")
    require(mark is not None, gone, "a newer checkpoint")
    with mark:
        # Several readers may hold this lock. While one holds it, `_remove` deletes nothing.
        lock_file(mark.fileno(), fcntl.LOCK_SH)
        require(exists(folder / "COMPLETE"), gone, "a newer checkpoint")
        yield


def damaged(folder: Path, rank: int = 0, ranks: int = 1) -> str:
    """Returns a text about a file that has changed since it was saved; "" if there is no such file. To share
    the work, each rank checks only every `ranks`-th file. Raises UserError if a file can't be read."""
    crcs = read_json(folder / "COMPLETE")  # name of a file -> its CRC-32
    names = {"state.json", *crcs}
    for name in names_in(folder):
        # A resumed run reads these files. If COMPLETE does not list such a file, it was added after the save.
        if name.startswith("carried-") or name.endswith(".safetensors"):
            names.add(name)
    for name in sorted(names)[rank::ranks]:
        # {name: CRC-32 of the file as it is now}; None if the file is gone
        found = if_there(_crc32s, folder / name)
        if found != {name: crcs.get(name)}:
            return f"{folder / name} is damaged: it has changed since it was saved, or is gone"
    return ""


# --- resuming


def find(out: Path, resume: str) -> Path | None:
    """Returns the newest checkpoint in `out`. If `out` has none, returns the checkpoint that --resume names,
    or None with --resume auto or never.

    Raises UserError if --resume names an older checkpoint in `out`. Also raises it if --resume names a path
    without a checkpoint, and `out` has no checkpoint."""
    # To resume from remote storage, download the checkpoint into `out` before the next line.
    *older, newest = complete(out) or [None]
    if resume in ("auto", "never"):
        return newest
    if not newest:
        return named(resume)
    # If --resume names no checkpoint (any more), path is None. That is no error, because `out` has one.
    _, path = _attempt(named, resume)
    require(
        path not in [p.resolve() for p in older],
        f"--resume {resume} is older than the newest checkpoint, {newest}",
        "another --out, so that the newer checkpoints stay",
    )
    return newest


def named(name: str) -> Path:
    """Returns the checkpoint that the path `name` stands for:

        RUN                     the newest checkpoint in the run's folder RUN
        RUN/STEP, RUN/best      the checkpoint after STEP steps, or the best checkpoint
        a checkpoint's folder   this checkpoint

    Raises UserError if there is no such complete checkpoint."""
    path = Path(name)
    of_run = path.parent / "ckpt"  # if `name` is RUN/STEP or RUN/best
    # the checkpoint itself; RUN's newest; RUN/best, a link in ckpt/; RUN/STEP, with zeros before STEP
    places = [path, *complete(path)[-1:], of_run / path.name, of_run / f"step_{path.name:0>6}"]
    for place in places:
        if exists(place / "COMPLETE"):
            return place.resolve()  # of a link such as best, the checkpoint
    needed = "a run's folder, RUN/STEP or RUN/best; for a model or an export, use --model"
    there = complete(path.parent)
    if there:  # the parent is a run, so the message lists its checkpoints
        needed = f"one of {', '.join(p.name for p in there)}"
    raise UserError(f"{name} is no complete checkpoint; needed: {needed}")


def run_of(name: str) -> Path | None:
    """Returns the folder of the run whose checkpoint `named` finds; None if it finds none."""
    _, path = _attempt(named, name)
    return path.parent.parent if path else None  # path: RUN/ckpt/step_000020


def read_state(folder: Path) -> Facts:
    """Returns the content of a checkpoint's state.json. Raises UserError, the same on every rank, if a file
    of the checkpoint is damaged, or if the checkpoint has the name of another step."""
    share = ()  # rank and ranks, for `damaged`; (): this process checks all files
    if td.is_initialized():
        share = (td.get_rank(), td.get_world_size())
    error, bad = _attempt(damaged, folder, *share)
    # A rank that can't read a file comes here, too. "" only if no rank has found a damaged file
    bad = max(dist.gather(error or bad))
    require(not bad, bad, f"an older checkpoint (move {folder} away and type the same command)")
    state = read_json(folder / "state.json", {"step": int})
    own = step_folder(folder.parent.parent, state["step"]).name
    require(
        # The user may give a copy of a checkpoint any name that is not the name of another step.
        folder.name == own or not STEP.fullmatch(folder.name),
        f"{folder} is the checkpoint after {state['step']} steps",
        f"the name {own}, or another place for this copy",
    )
    return state


def check_resume(path: Path, saved: Facts, facts: Facts) -> None:
    """Raises UserError if the checkpoint `path` has more steps than this run, or if a fact in "read" has
    changed since it was saved.

    saved: content of the checkpoint's state.json
    facts: this run's "config", and its facts "read" and "noted" (see guard/identity.py)"""
    steps = facts["config"]["steps"]
    needed = (
        "the flags, data, models and reward files of that run, or another --out, "
        f"where --start_from {path} trains on from these weights "
        "(with --lr_decay, --steps changes the rates)"
    )
    check_unchanged(path, saved, facts["read"], needed)
    require(
        saved["step"] <= steps,
        f"{path} was saved after {saved['step']} steps, but this run has {steps}",
        needed,
    )


@dist.phase("start/checkpoint")
def resume(path: Path, saved: Facts, models: Models, facts: Facts) -> str:
    """Fills models and optimizers from the checkpoint `path`, which has passed `check_resume`. Returns a line
    for the log, which lists the changes of the config, and of the facts in "noted".

    saved, facts: as for `check_resume`"""
    for who, (model, optimizer) in models.items():
        _fill(path, who, model, optimizer)
    return "; ".join(
        [
            f"resumed after {saved['step']} steps from {path}",
            *differences(saved["noted"], facts["noted"]),
            *differences(saved["config"], facts["config"]),
        ]
    )


@dist.phase("start/checkpoint")
def start_from(path: Path, models: Models, facts: Facts) -> str:
    """Fills models, but not optimizers, from another run's checkpoint. The reference gets the policy's
    weights. A critic that the checkpoint lacks is not changed. Returns a line for the log.

    Raises UserError if a file is damaged, or if the tokenizer or a model's config.json differs."""
    saved = read_state(path)
    other = saved["config"]  # of the other run
    needed = f"its --lora and --model {other['model']}"
    if other["critic_model"]:
        needed += f" --critic_model {other['critic_model']}"
    given = facts["config"]["critic_model"]  # this run's flag; "": not given
    require(
        "critic" not in saved["models"] or given in ("", other["critic_model"]),
        f"{path} has a critic, and --critic_model names another",
        needed,
    )
    # Only the models must be the same. Data and rewards may differ.
    of_models = {}
    for name, fact in facts["read"].items():
        if name.startswith(("policy's", "critic's", "lora")):
            of_models[name] = fact
    check_unchanged(path, saved, of_models, f"{needed}, or --model with its export")
    filled = []
    for who, (model, _) in models.items():
        source = "policy" if who == "ref" else who
        if source in saved["models"]:
            _fill(path, source, model, None)
            filled.append(who)
    return f"started from {path}: {', '.join(filled)}"


def _fill(path, who, model, optimizer):
    """Loads a model and its optimizer (None: only the model) from the checkpoint `path`, where the model's
    name is `who`. A new optimizer has no state to load into, so this function first creates the state with a
    step on zero gradients. Weights without state in the checkpoint get no gradient, and so no state."""
    if optimizer:
        # "policy.model.norm.weight.exp_avg" -> "policy.model.norm.weight"
        with_state = {key.rpartition(".")[0] for key in dist.tensors_in(path)}
        for name, p in model.named_parameters():
            if f"{who}.{name}" in with_state:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
    dist.load_files({who: dist.tensors_of(model, optimizer)}, path)


# --- Hugging Face


def check_export_path(out: Path) -> None:
    """Raises UserError unless `out` is a new path, an empty folder, or an earlier export. It must not be in a
    checkpoint."""
    is_new = if_there(os.lstat, out) is None  # no file, folder or link has this path
    is_empty = out.is_dir() and not names_in(out)
    is_export = not out.is_symlink() and exists(out / MARKER)
    require(
        is_new or is_empty or is_export,
        f"{out} exists",
        "a new path, an empty folder, or an earlier export",
    )
    require(
        not any(exists(folder / "COMPLETE") for folder in (out, *out.parents)),
        f"{out} is inside a checkpoint",
        "a path outside of it",
    )


def export_hf(
    weights: dist.Weights, model: nn.Module, tokenizer: Any, source: str, out: Path, facts: Facts
) -> None:
    """Writes the Hugging Face folder `out`. Its weights are bf16, except those named in dist.FP32, which are
    fp32. All ranks must call this function, but only rank 0 writes.

    weights: the result of dist.full_weights
    source: folder of the base model
    facts: content of the export's torz.json (see `marker`)

    Raises UserError, the same on every rank, if `check_export_path` refuses `out` or a write fails."""
    main = _is_main()
    state = {}
    for name, tensor in weights:
        if main:
            dtype = dist.pushed_dtype(name, torch.bfloat16)
            state[name] = tensor.to("cpu", dtype, copy=True)

    def fill(folder):
        save_torch_state_dict(state, folder)
        _save_config(folder, model, tokenizer, source, facts)

    dist.together(lambda: write_export(out, fill, facts) if main else None)


def write_export(out: Path, fill: Callable[[Path], None], facts: Facts) -> None:
    """Writes the export `out` atomically. `fill` gets a new folder and writes all files except torz.json,
    which gets `facts` (see `marker`). Raises UserError if a write fails, or if `out` is not what
    `check_export_path` allows."""
    needed = (
        "space and permission there; then repeat the command, or use ckpt.py export "
        "(the checkpoints are intact)"
    )
    with explained(f"{out} can't be written", needed, (OSError, SafetensorError)):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(out.parent, os.O_RDONLY)
        lock_file(lock, fcntl.LOCK_EX)  # other exports to this place wait
        temp = unfinished(out, secrets.token_hex(8))
        try:
            remove_unfinished(out.parent, re.escape(out.name))
            temp.mkdir()
            fill(temp)
            (temp / MARKER).write_text(json.dumps(facts, indent=1))
            for file in temp.glob("*.safetensors"):
                follow_umask(file)  # safetensors ignores the umask
            _sync(*temp.rglob("*"), temp)
            check_export_path(out)  # now, because `out` may have changed since the command's start
            if exists(out / MARKER):
                out.rename(_backup_path(out))
            temp.rename(out)
            _sync(out.parent)
        finally:
            shutil.rmtree(temp, ignore_errors=True)  # after an error; else it is already renamed
            os.close(lock)


def _backup_path(out):
    """Returns a path for an earlier export at `out`: OUT.1, or with the next free number."""
    for i in itertools.count(1):
        path = out.with_name(f"{out.name}.{i}")
        if if_there(os.lstat, path) is None:
            return path


def _save_config(folder, model, tokenizer, source, facts):
    """Writes the files of an export that are not weights.

    source: folder of the base model. facts: the content of torz.json, as `marker` returns it"""
    config = load_config(source)  # not model.config, which names torz's own attention function
    config.dtype = "bfloat16"
    if getattr(model, "score", None):  # a critic
        config.architectures = [critic_class(config).__name__]
        config.num_labels = 1
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    template = chat_template(tokenizer, facts["prompt"], facts["system_prompt"])
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    # `vllm serve` and transformers would take a temperature, top_k, repetition_penalty or max_new_tokens of
    # the source as defaults. The policy was trained without them, so only the ids of tokens stay.
    name = "generation_config.json"
    ids = {k: v for k, v in read_json(Path(source) / name).items() if k.endswith("token_id")}
    # transformers' `generate` reads this file alone, and must stop where training did.
    if ends := sorted(eos_ids(source, tokenizer, config)):
        ids["eos_token_id"] = ends
    if ids:
        (folder / name).write_text(json.dumps(ids, indent=1))


def write_adapter(folder: Path, model: Adapted, source: str) -> None:
    """Writes a policy's adapters to a folder in the format of PEFT. source: folder of the base model"""
    state = {}
    for name, pair in model.adapters.items():  # pair: the matrices A and B of a linear layer
        name = name.replace("/", ".")  # names in a ModuleDict can't have "."
        for matrix, weight in zip("AB", pair, strict=True):
            state[f"base_model.model.{name}.lora_{matrix}.weight"] = weight.detach()
    save_file(state, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.abspath(source),
        "r": model.base.rank,  # `freeze` stored the adapters' rank and alpha in the base
        "lora_alpha": model.base.alpha,
        "target_modules": sorted({name.rpartition("/")[2] for name in model.adapters}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))


def critic_class(config: PreTrainedConfig) -> type:
    """Returns the transformers class that an exported critic's config.json names: the family's class for
    sequence classification, or its backbone if it has no such class."""
    kind = type(config)
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(kind, None) or MODEL_MAPPING[kind]


def marker(run: Path, step: int, who: str, facts: Facts) -> Facts:
    """Returns the content of an export's file torz.json (MARKER). run, step: of the checkpoint. who: policy,
    critic or ref. facts: content of the checkpoint's state.json"""
    names = (
        "template system_prompt template_args date stop extractor temperature "
        "max_prompt_len max_response_len max_model_len env max_turns"
    ).split()
    return {
        "run": str(run),
        "step": step,
        "who": who,
        "prompt": facts["prompt"],
        # A checkpoint of an earlier version may lack a setting.
        **{name: facts["config"][name] for name in names if name in facts["config"]},
    }


def export(run: Path, step: str, out: Path, what: str = "policy", base: str = "") -> None:
    """Writes one model of a run's checkpoint to the Hugging Face folder `out`. Raises UserError if there is
    no such checkpoint or model, or if `out` can't be written.

    run: the run's folder; with `step` "last", also the folder of the checkpoint to export
    step: the checkpoint's step, such as "24", or "best" or "last"
    what: policy, critic or ref; or adapter, for the policy's adapters (--lora) in the format of PEFT
    base: the base model's folder, if it was moved"""
    check_export_path(out)
    require(step not in ("", "."), f"no step {step!r}", "a number, best or last")
    path = named(str(run) if step == "last" else f"{run}/{step}")
    who = what.replace("adapter", "policy")  # the checkpoint's model; adapters belong to the policy
    with hold(path):
        saved = read_state(path)
        config = saved["config"]
        lora = config.get("lora", 0)
        known = [*saved["models"]]
        if lora:
            known.append("adapter")
        require(what in known, f"{path} has no {what}", f"one of {', '.join(known)}")
        source = base or source_of(who, config)
        tokenizer = load_tokenizer(base or config["model"])
        set_arguments(tokenizer, config.get("template_args", ()))
        fix_date(tokenizer, config["date"])
        check_base(path, saved, who, source, tokenizer)
        settings = load_config(source)
        if lora:
            # freeze(shard_fn, rank, alpha, dtype, model); this shard_fn leaves the model whole
            frozen = partial(freeze, lambda m: m, lora, config["lora_alpha"], settings.dtype)
            load = load_critic if who == "critic" else load_policy
            model = Adapted(load(source, shard_fn=frozen), critic=who == "critic")
        else:
            kind = Critic if who == "critic" else Policy
            with torch.device("meta"):
                model = dist.cast(kind(settings), torch.bfloat16)
            model.allocate("cpu")
        dist.load_files({who: dist.tensors_of(model, None)}, path)
    facts = marker(run.absolute(), saved["step"], who, saved)
    if what == "adapter":
        write_export(out, partial(write_adapter, model=model, source=source), facts)
    else:
        export_hf(dist.full_weights(model), model, tokenizer, source, out, facts)
    show(f"{out}: the {what} after {saved['step']} steps")


def main(argv: list[str]) -> None:
    base = ""  # the folder that --model names
    if argv[-2:-1] == ["--model"]:
        *argv, _, base = argv
    match argv:
        case ["-h" | "--help"]:
            print(__doc__)
        case ["export", run, step, out, *what] if len(what) < 2:
            export(Path(run), step, Path(os.path.abspath(out)), *what, base=base)
        case _:
            raise UserError(
                f"unknown command: {' '.join(['ckpt.py', *argv])}; needed: "
                "python ckpt.py export RUN STEP|best|last OUT [critic|adapter] [--model DIR]"
            )


if __name__ == "__main__":
    with user_errors("ckpt.py"):
        main(sys.argv[1:])
