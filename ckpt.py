"""What survives a crash: sharded checkpoints that are whole or do not count, resume, Hugging Face exports.

A checkpoint is the folder `ckpt/step_000020/` of a run:

    shard-00000.safetensors   one a rank: its slices of all tensors; the header holds their offsets
    state.json                steps done, config, fingerprint of the problems, versions
    COMPLETE                  the size of every file; without it the checkpoint does not count

The files have the format of DCP (torch.distributed.checkpoint) for sharded safetensors. A thread writes them
while the training goes on, and DCP loads them on any number of ranks. Their keys are `policy.NAME` (the fp32
weight), `policy.NAME.exp_avg` and so on (the optimizer's state for it), and `policy.optimizer.step` (0-d
optimizer state, once for all parameters); the same for `critic` and `ref`. Nothing is pickled. Random state
is not needed: every random choice is a function of (seed, step).

DCP does not write the files itself. For each save it would plan anew and build each file in memory, and it
needs another process to leave the GIL to vLLM; that process gets the state through /dev/shm.

    python ckpt.py export RUN STEP|best OUT [critic]      # the policy (or critic) as a Hugging Face folder
"""

import fnmatch
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
import plan
from configs import Config, changed, require, user_errors
from log import read_metrics
from model import Critic, Policy, load_config, load_tokenizer

VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}
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

    def write(self, file: Path) -> None:
        """Write the slices that this rank owns, for DCP's HuggingFaceStorageReader, and wait until they
        are on the disk. save_file writes from their memory, without the GIL: training and vLLM go on."""
        offsets = {key: {"saved_offsets": at} for key, at in self.offsets.items()}
        info = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: self.slices[key] for key in self.offsets}, file, info)
        _sync(file)


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
        self.facts = facts | {"models": list(models)}
        self.saved = self.step = saved  # `step` is that of the save in flight
        self.group = td.new_group(backend="gloo")  # its collectives run beside the training's
        self.buffer = StagingBuffer(models)
        self.pool = ThreadPoolExecutor(1)
        self.in_flight = None
        self.reported = False  # whether `pending_warning` returned the error of the save in flight
        self.failures = 0  # in a row

    def save(self, step: int, wait: bool = False) -> str:
        """Wait for the previous save, then start the checkpoint of `step`; with `wait`, finish it too.
        Returns the error of the last save that ended, or "". What is saved already is not saved again.

        Raises UserError after two failures in a row.
        """
        warning = self.finish()
        if step == self.saved:
            return warning
        self.step, self.reported = step, False
        self.buffer.update()
        self.in_flight = self.pool.submit(self._complete, self._temporary_folder())
        return (self.finish() if wait else "") or warning

    def _temporary_folder(self):
        """Folder to write to, the same on all ranks and new in the run. Removes those of dead runs."""
        temp = self.out / "ckpt" / f".step_{self.step:06d}.{secrets.token_hex(8)}.part"
        if td.get_rank() == 0:
            for old in temp.parent.glob(".step_*.part"):
                shutil.rmtree(old, ignore_errors=True)
        return dist.gather(temp)[0]

    def pending_warning(self) -> str:
        """The error of the save in flight, once, as soon as this rank knows it; else ""."""
        if self.reported or self.in_flight is None or not self.in_flight.done():
            return ""
        warning = str(self.in_flight.exception() or "")
        self.reported = warning != ""
        return warning

    def finish(self) -> str:
        """Wait for the save in flight. Returns its error unless it was reported, else "".

        Raises UserError after two failures in a row.
        """
        if self.in_flight is None:
            return ""
        warning = max(dist.gather(str(self.in_flight.exception() or "")))  # of any rank that has one
        self.in_flight = None
        self.failures = self.failures + 1 if warning else 0
        if not warning:
            self.saved = self.step
        require(self.failures < 2, f"two saves in a row failed, the last one with: {warning}",
                f"a {self.out} that can be written to")
        return "" if self.reported else warning

    def _complete(self, temp):
        """Write; when all ranks have, rank 0 publishes the checkpoint and prunes. Raises SaveFailed."""
        errors = dist.gather(_error_of(self.buffer.write, temp / f"shard-{td.get_rank():05d}.safetensors"),
                             self.group)
        error = max(errors)  # of any rank that has one
        if not error and td.get_rank() == 0:
            error = _error_of(self._publish, temp)
        if error:
            raise self._failed(temp, error)

    def _publish(self, temp):
        (temp / "state.json").write_text(json.dumps(self.facts | {"step": self.step}))
        publish(temp, step_folder(self.out, self.step), self.buffer.nbytes)
        prune(self.out, self.cfg.keep, self.cfg.keep_best)

    def _failed(self, temp, error):
        """The error in one line. Removes what was written, because it may be what fills the disk."""
        free = shutil.disk_usage(self.out).free
        if td.get_rank() == 0:
            shutil.rmtree(temp, ignore_errors=True)
        last = next((p.name for p in reversed(complete(self.out))), "none")
        return SaveFailed(
            f"the checkpoint after {self.step} steps failed: {error} ({plan.gib(free)} free in {self.out}, "
            f"{plan.gib(self.buffer.nbytes)} needed); the last complete one: {last}")


def _error_of(write: Callable[[Path], None], path: Path) -> str:
    """Call write(path). Returns what went wrong, in one line, or ""."""
    try:
        write(path)
        return ""
    except (OSError, SafetensorError) as e:
        return (str(e).strip() or type(e).__name__).splitlines()[0]


def publish(temp: Path, final: Path, nbytes: int) -> None:
    """Verify what was written to `temp`, rename it to `final` and mark it COMPLETE. Each change is on the
    disk before the next one. Runs on rank 0, beside the training.

    Raises SafetensorError where a file does not end where its header says, and OSError where the files
    together are smaller than `nbytes`, the size of the tensors.
    """
    for file in temp.glob("*.safetensors"):
        safe_open(file, "pt")
    sizes = {file.name: file.stat().st_size for file in temp.iterdir()}
    if sum(sizes.values()) < nbytes:
        raise OSError("files are missing")
    _sync(temp / "state.json", temp)
    shutil.rmtree(final, ignore_errors=True)
    temp.rename(final)
    mark = final / "COMPLETE"
    mark.write_text(json.dumps(sizes))  # half of it is no JSON, so it does not count
    _sync(mark, final, final.parent)


def _sync(*paths):
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


# --- the checkpoints of a run


def step_folder(out: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return out / "ckpt" / f"step_{step:06d}"


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint has its mark, and every file that the mark names in its full size."""
    try:
        sizes = json.loads((folder / "COMPLETE").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def complete(out: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    return sorted(filter(is_complete, (out / "ckpt").glob("step_*")))


def prune(out: Path, keep: int, keep_best: str) -> None:
    """Remove complete checkpoints, except the newest `keep` and the one with the best evaluation
    (`keep_best`, see Config). `ckpt/best` is a link to the latter."""
    checkpoints = complete(out)
    best = _best(out, checkpoints, keep_best)
    if best:
        link = out / "ckpt" / ".best"
        link.unlink(missing_ok=True)
        link.symlink_to(best.name)
        link.rename(out / "ckpt" / "best")
    for old in checkpoints[:-keep]:
        if old != best:
            (old / "COMPLETE").unlink()  # first: a half removed checkpoint must not count
            shutil.rmtree(old)


def _best(out, checkpoints, metric):
    """The checkpoint with the highest evaluation, the newest of equals; None where none has one."""
    scores = {}
    for row in read_metrics(out, [int(p.name.removeprefix("step_")) for p in checkpoints]):
        values = [row[key] for key in fnmatch.filter(row, "eval/*/avg@*" if metric == "auto" else metric)]
        if values:
            scores[step_folder(out, row["step"])] = sum(values) / len(values)
    return max(scores, key=lambda p: (scores[p], p), default=None)


# --- resuming


def find(out: Path, resume: str) -> Path | None:
    """The checkpoint to start from, or None. The newest complete one in `out` comes first; without one, the
    path `resume`: a complete checkpoint, or a run that has one. Raises UserError."""
    *older, newest = complete(out) or [None]
    if resume in ("auto", "never"):
        return newest
    path = Path(resume).absolute()
    path = (complete(path) or [path])[-1]
    require(is_complete(path), f"{resume} is no complete checkpoint",
            "a folder ckpt/step_NNNNNN with COMPLETE in it, or a run's folder")
    require(path not in older, f"{resume} is older than {newest}",
            "another --out: the newer checkpoints here then stay")
    return newest or path


def resume(path: Path, models: Models, facts: Mapping[str, Any]) -> int:
    """Fill models and optimizers from a checkpoint of any number of ranks; returns the number of steps done.

    Raises UserError where the checkpoint's run and this one do not compute the same (`facts`: this run's
    config and problems).
    """
    saved = json.loads((path / "state.json").read_text())
    changes = changed(saved["config"], facts["config"])
    if saved["problems"] != facts["problems"]:
        changes.append("other problems or another template")
    require(not changes, f"{path} is of a run with another config ({'; '.join(changes)})",
            "the flags and the data it was made with, or another --out")
    reader = dcp.HuggingFaceStorageReader(path)
    keys = reader.read_metadata().state_dict_metadata
    require(len(keys) > 0, f"{path} has no safetensors files: another version of ckpt.py made it",
            "that version, or another --out")
    owners = {key.rpartition(".")[0] for key in keys}  # `policy.NAME.exp_avg` belongs to `policy.NAME`
    for who, (model, optimizer) in models.items():
        if optimizer:
            _make_state(who, model, optimizer, owners)
        state = tensors_of(model, optimizer)
        dcp.load({who: state}, storage_reader=reader)
        for p_state in optimizer.state.values() if optimizer else ():
            for kind, value in p_state.items():
                if not value.ndim:
                    value.copy_(state[f"optimizer.{kind}"])
    return saved["step"]


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


def export_hf(weights: dist.Weights, model: nn.Module, tokenizer: Any, source: str,
              out: Path) -> None:
    """Write the Hugging Face folder `out`: bf16 safetensors, config, tokenizer, generation config.

    `weights`: name and whole tensor of every parameter. All ranks must iterate them, because
    dist.full_weights gathers; rank 0 writes, from its host memory. `source`: the model folder that this
    model came from; its configs are copied.
    """
    main = not td.is_initialized() or td.get_rank() == 0
    state = {}
    for name, tensor in weights:
        if main:
            state[name] = tensor.to("cpu", torch.bfloat16, copy=True)
    if not main:
        return
    temp = out.with_name(f".{out.name}.part")
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    save_torch_state_dict(state, temp)
    config = load_config(source)  # a fresh copy: the model's own names our attention
    config.dtype = "bfloat16"
    if isinstance(model, Critic):
        config.architectures = [critic_class(config).__name__]
        config.num_labels = 1
    config.save_pretrained(temp)
    tokenizer.save_pretrained(temp)
    for file in Path(source).glob("generation_config.json"):
        shutil.copy(file, temp)
    shutil.rmtree(out, ignore_errors=True)
    temp.rename(out)


def critic_class(config: PreTrainedConfig) -> type:
    """The transformers class for an exported critic: the family's sequence classifier or, where it has none,
    its backbone. model.load_critic reads both."""
    kind = type(config)
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(kind, None) or MODEL_MAPPING[kind]


def export(run: Path, step: str, out: Path, who: str = "policy") -> None:
    """Write the policy, critic or ref of a run's checkpoint to the Hugging Face folder `out`. `step`: a
    number of steps, or "best". Raises UserError."""
    path = step_folder(run, int(step)) if step.isdigit() else run / "ckpt" / step
    names = ", ".join(p.name for p in complete(run))
    require(is_complete(path), f"no complete checkpoint {path}",
            f"one of {names or 'none: this run has no checkpoint'}")
    saved = json.loads((path / "state.json").read_text())
    require(who in saved["models"], f"{path} holds no {who}", f"one of {', '.join(saved['models'])}")
    source = source_of(who, saved["config"])
    with torch.device("meta"):
        model = (Critic if who == "critic" else Policy)(load_config(source))
    weights = {name: torch.empty(p.shape, dtype=torch.bfloat16) for name, p in model.named_parameters()}
    dcp.load({who: weights}, storage_reader=dcp.HuggingFaceStorageReader(path), no_dist=True)
    export_hf(weights.items(), model, load_tokenizer(saved["config"]["model"]), source, out)
    print(f"{out}: the {who} after {saved['step']} steps")


def main(argv: list[str]) -> None:
    """The command. Raises UserError."""
    require(len(argv) in (4, 5) and argv[0] == "export" and (argv[2].isdigit() or argv[2] == "best"),
            f"ckpt.py {' '.join(argv)}", "python ckpt.py export RUN STEP|best OUT [critic]")
    export(Path(argv[1]), argv[2], Path(argv[3]), *argv[4:])


if __name__ == "__main__":
    with user_errors("ckpt.py"):
        main(sys.argv[1:])
