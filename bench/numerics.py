"""Compares bf16 log-probs and gradients of packs with those of transformers in fp32, on a GPU.

    python -m bench.numerics [--shapes 0.5b-4 7b-2] [--families NAME …]

Shapes: SIZE-LAYERS, with random weights. Families: small models of tests/families.py; default: all. Prints
one JSON line for each model and setting of recomputation. Some of the fields:
    logp_rms, logp_max     error of the log-probs in nats
    grad_error             norm of the gradient's error, divided by the gradient's norm
    hf_…                   the same for transformers in bf16, one sample a forward pass
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # for `python bench/numerics.py`, and for tests/families.py

import families
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import data
import dist
import model
from bench.common import arguments, say
from bench.shape import build

TEMPERATURE = 0.7


def make_samples(vocabulary: int, prompts: int, per_prompt: int, prompt_len: int,
                 response_len: int) -> list[data.Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for i in range(prompts):
        prompt = tuple(rng.integers(5, vocabulary, int(rng.integers(2, prompt_len))).tolist())
        for j in range(per_prompt):
            ids = rng.integers(5, vocabulary, int(rng.integers(1, response_len))).astype(np.int32)
            logp = np.zeros(len(ids), np.float32)
            samples.append(data.Sample(i, j, prompt, ids, logp, True, "", 0, reward=1.0))
    return samples


def whole(gradient: Tensor) -> Tensor:
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).detach().float()


def backward(logp: Tensor, named: Callable) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the log-probs, and the gradients of a random weighted sum of them."""
    weights = torch.randn(len(logp), generator=torch.Generator().manual_seed(0)).to(logp.device)
    (logp * weights).sum().backward()
    return logp.detach(), {name: whole(p.grad) for name, p in named() if p.grad is not None}


def of_transformers(path: str, samples: list[data.Sample], dtype: torch.dtype, device: torch.device):
    attention = "eager" if dtype == torch.float32 else "sdpa"
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    hf = hf.eval().to(device)
    parts = []
    for s in samples:
        ids = torch.tensor([*s.prompt, *s.ids], device=device)
        logp = (hf(ids[None]).logits[0].float() / TEMPERATURE).log_softmax(-1)
        sampled = logp[:-1].gather(1, ids[1:, None])[len(s.prompt) - 1:, 0]
        parts += [logp.new_zeros(len(s.prompt)), sampled]
    return backward(torch.cat(parts), hf.named_parameters)


def errors(found: tuple, wanted: tuple, mask: Tensor, prefix: str) -> dict[str, float]:
    gap = (found[0] - wanted[0]).cpu()[mask.cpu()]  # on the host: a stub CUDA device can't select
    names = found[1].keys() & wanted[1].keys()
    square = sum(float((found[1][n] - wanted[1][n]).pow(2).sum()) for n in names)
    norm = sum(float(wanted[1][n].pow(2).sum()) for n in names)
    figures = {"logp_rms": float(gap.pow(2).mean().sqrt()), "logp_max": float(gap.abs().max()),
               "grad_error": (square / norm) ** 0.5 if norm else float("nan")}
    return {prefix + name: float(f"{x:.4g}") for name, x in figures.items()}


def compare(name: str, path: str, samples: list[data.Sample], recompute: int,
            world: dist.World) -> None:
    pack = data.pack(samples).to(world.device)
    shard = partial(dist.shard, over=dist.mesh(world), dtype=world.dtype, recompute=recompute)
    policy = model.load_policy(path, world.device, shard)
    ours = backward(policy(pack, TEMPERATURE)[0], policy.named_parameters)
    wanted = of_transformers(path, samples, torch.float32, world.device)
    theirs = of_transformers(path, samples, torch.bfloat16, world.device)
    say({"bench": "numerics", "name": name, "recompute": recompute, "tokens": len(pack.tokens),
         "unique": len(pack.unique)} | errors(ours, wanted, pack.mask, "")
        | errors(theirs, wanted, pack.mask, "hf_"))


def main() -> None:
    args = arguments(__doc__, shapes=("0.5b-4", "7b-2"), families=tuple(families.MODELS))
    torch.backends.cuda.matmul.allow_tf32 = False
    world, failed = dist.init(), False
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            size, _, layers = shape.rpartition("-")
            path = build(f"{folder}/{shape}", size, layers=int(layers), device=world.device.type)
            for recompute in (0, 999):
                compare(shape, path, make_samples(40000, 6, 4, 300, 700), recompute, world)
                torch.cuda.empty_cache()
        for name in args.families:
            try:
                compare(name, families.make(Path(folder), name), make_samples(90, 8, 3, 40, 60), 0, world)
            except Exception as e:  # such as a missing package: the other families are still compared
                say({"bench": "numerics", "name": name, "error": f"{type(e).__name__}: {e}"})
                failed = True
    sys.stdout.flush()
    os._exit(failed)  # NCCL's threads may not end


if __name__ == "__main__":
    main()
