"""What survives a crash: sharded checkpoints that appear whole or not at all, resume, and Hugging Face exports.

A checkpoint is `ckpt/step_000020/`, written by DCP under a temporary name, renamed, then marked COMPLETE; what lacks the
mark doesn't count. It holds fp32 weights and optimizer state and the number of steps done, nothing else: all randomness is
a function of (seed, step). Resharding to another number of ranks is DCP's.

    python ckpt.py export RUN STEP OUT      # the policy of a checkpoint as a Hugging Face folder
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dist
from configs import UserError, need
from model import Critic, load_config, load_tokenizer, state_keys

SHARD_BYTES = 4 * 2**30  # of one exported safetensors file
Trained = tuple[nn.Module, torch.optim.Optimizer]


def preflight(out: str) -> Path:
    """The run's folder, absolute and writable by every rank, which all must see rank 0's probe file in it. Raises
    UserError, the same on every rank, naming the hosts where it fails."""
    folder = Path(out).absolute()
    probe, trouble = folder / f".probe-{os.environ.get('MASTER_PORT', '0')}", ""
    try:
        if td.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
    except OSError as e:
        trouble = f"can't write to {folder} on {os.uname().nodename} ({e.strerror})"
    trouble = dist.gather(trouble)[0]
    need(not trouble, trouble, "--out with a folder that can be written")
    mine = folder / f".probe-{td.get_rank()}"
    try:
        blind = "" if probe.exists() else f"{os.uname().nodename} doesn't see {folder} as rank 0 does"
        mine.touch()
        mine.unlink()
    except OSError as e:
        blind = f"can't write to {folder} on {os.uname().nodename} ({e.strerror})"
    found = sorted({b for b in dist.gather(blind) if b})
    if td.get_rank() == 0:
        probe.unlink()
    need(not found, "; ".join(found), "--out on a file system that all ranks share")
    return folder


def step_folder(out: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return out / "ckpt" / f"step_{step:06d}"


def save(out: Path, step: int, models: dict[str, Trained], keep: int) -> Path:
    """Checkpoint after `step` steps; then remove all but the newest `keep`."""
    final = step_folder(out, step)
    part = final.with_name(f".{final.name}.part")
    if td.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    td.barrier()
    dcp.save(_state(models), checkpoint_id=part)
    td.barrier()
    if td.get_rank() == 0:
        (part / "state.json").write_text(json.dumps(dict(step=step, models=list(models))))
        for file in part.iterdir():
            _sync(file)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        (final / "COMPLETE").touch()
        _sync(final.parent)
        for old in complete(out)[:-keep]:
            shutil.rmtree(old)
    td.barrier()
    return final


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def complete(out: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    return sorted(p.parent for p in (out / "ckpt").glob("step_*/COMPLETE"))


def find(out: Path, resume: str) -> Path | None:
    """The checkpoint to start from: "auto" takes the newest complete one in out, "never" refuses a folder with one, a path
    must be a complete checkpoint or a run that has one. Raises UserError."""
    have = complete(out)
    if resume == "auto":
        return have[-1] if have else None
    if resume == "never":
        need(not have, f"{out} already holds a run ({len(have)} checkpoints)", "another --out, or --resume auto")
        return None
    path = Path(resume).absolute()
    path = (complete(path) or [path])[-1]
    need((path / "COMPLETE").is_file(), f"{resume} is no complete checkpoint", "a folder ckpt/step_NNNNNN with COMPLETE in it")
    return path


def resume(path: Path, models: dict[str, Trained]) -> int:
    """Fill models and optimizers from a checkpoint of any number of ranks; returns how many steps were done."""
    said = json.loads((path / "state.json").read_text())
    need(set(models) == set(said["models"]), f"{path} holds {' and '.join(said['models'])}, this run trains "
         f"{' and '.join(models)}", "the --algo that the checkpoint was made with")
    for _, optimizer in models.values():
        _init(optimizer)
    state = _state(models)
    dcp.load(state, checkpoint_id=path)
    for name, (model, optimizer) in models.items():
        set_state_dict(model, optimizer, model_state_dict=state[name], optim_state_dict=state[f"{name}_optimizer"])
    return said["step"]


def _state(models: dict[str, Trained]) -> dict[str, Any]:
    state = {}
    for name, (model, optimizer) in models.items():
        state[name], state[f"{name}_optimizer"] = get_state_dict(model, optimizer)
    return state


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


def main(argv: list[str]) -> None:
    """`python ckpt.py export RUN STEP OUT`."""
    need(len(argv) == 4 and argv[0] == "export" and argv[2].isdigit(), f"ckpt.py {' '.join(argv)}",
         "python ckpt.py export RUN STEP OUT")
    from configs import Config
    from model import Policy

    run = Path(argv[1])
    path = step_folder(run, int(argv[2]))
    need((path / "COMPLETE").is_file(), f"no complete checkpoint {path}",
         f"one of {', '.join(p.name for p in complete(run)) or 'none: this run has no checkpoint'}")
    source = json.loads((run / "config.json").read_text())["model"] or Config().model
    policy = Policy(load_config(source))
    state = {"policy": state_keys(policy)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    export_hf(dist.full_weights(policy), policy, load_tokenizer(source), source, Path(argv[3]))
    print(f"{argv[3]}: the policy after {argv[2]} steps")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as e:
        sys.exit(f"ckpt.py: {e}")
