"""The trainer's phases alone, on synthetic packs at any model's shape with random weights.

    python bench/train.py [--size tiny] [--pack 4096] [--segment 512] [--packs 2] [--layers 0] [--vocab 0] [--rounds 5]

Each round: log-probs without a graph, a policy update, a critic update, of `packs` packs whose segments have `segment` tokens,
a quarter of them a prompt's; and the head alone, log-probs and their gradients from one pack's hidden states. As in train.py:
FSDP2, chunked fp32 log-probs, AdamW, --checkpoint for recomputed activations.
One JSON line a phase: tokens a second, `mfu` (6N a token, with the head only where a token is trained on, and causal
attention; recomputation doesn't count) of the FLOP that a matrix product reaches here, seconds at the limit that FLOP and
bandwidth set, and memory above what lies there at rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent)] + [p for p in sys.path if p != str(HERE)]  # bench/train.py is not train.py

import torch

import dist
import ppo
from bench.limits import copy_bandwidth, device_name, matmul_flops, peak_memory
from bench.shape import config_of
from configs import PRESETS
from data import Pack, Sample, pack
from model import ChunkedLogProbs, Critic, Policy, logprobs, values


def random_model(kind: type, config, place, device: torch.device) -> torch.nn.Module:
    """A sharded model whose weights are drawn from N(0, 0.02²), norms 1 and biases 0."""
    with torch.device("meta"):
        model = kind(config)
    model = place(model).to_empty(device=device)
    model.tie()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0 if "norm" in name else 0.0) if p.ndim == 1 else p.normal_(0, 0.02)
    return model


def synthetic(tokens: int, segment: int, vocabulary: int, device: torch.device, seed: int) -> Pack:
    """A pack of whole segments, rewards and all."""
    import numpy as np

    rng, prompt = np.random.default_rng(seed), max(1, segment // 4)
    samples = []
    for i in range(max(1, tokens // segment)):
        ids = rng.integers(0, vocabulary, segment).astype(np.int32)
        samples.append(Sample(i, 0, tuple(ids[:prompt].tolist()), ids[prompt:], np.full(segment - prompt, -1.0, np.float32),
                              True, "", 0, reward=float(i % 2), advantage=float(i % 2) - 0.5))
    return pack(samples).to(device)


def flops(config, packs: list[Pack], head: int) -> float:
    """Of a forward and a backward pass (3 × 2 a weight and token, causal attention half of the square); `head`: its rows."""
    c = config
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    q, kv = c.num_attention_heads * dim, c.num_key_value_heads * dim
    layer = 2 * c.hidden_size * (q + kv) + 3 * c.hidden_size * c.intermediate_size
    total = 0.0
    for p in packs:
        squares = float((p.cu_seqlens.diff().double() ** 2).sum())
        total += 6 * c.num_hidden_layers * (layer * len(p.tokens) + q * squares) + 6 * head * c.hidden_size * int(p.mask.sum())
    return total


@torch.no_grad()
def score(policy: torch.nn.Module, packs: list[Pack]) -> None:
    """Log-probs as before the first update."""
    for p in packs:
        logprobs(policy, p, 1.0)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, packs: list[Pack], count: float) -> None:
    """An update as PPO's; `count` response tokens."""
    for p in packs:
        if isinstance(model, Policy):
            logp, _ = logprobs(model, p, 1.0)
            loss, _ = ppo.policy_loss(logp, logp.detach(), p.advantages, p.mask, count, 0.2, 0.2, None)
        else:
            v = values(model, p)
            loss = ppo.value_loss(v, v.detach(), p.rewards, p.mask, count, 0.2)
        loss.backward()
    dist.clip_grad_norm(model, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def head_alone(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    """Log-probs and entropies, and the gradients of both."""
    logp, entropy = ChunkedLogProbs.apply(hidden, weight, targets, 1.0)
    torch.autograd.grad((logp + entropy).sum(), (hidden, weight))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", help="a shape that bench/shape.py knows")
    for name, value in dict(pack=4096, segment=512, packs=2, layers=0, vocab=0, rounds=5).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations")
    args = parser.parse_args()
    world = dist.init()
    config = config_of(args.size, args.layers, args.vocab)
    place = partial(dist.shard, over=dist.mesh(world), dtype=world.dtype, checkpoint=args.checkpoint)
    peak, bandwidth = matmul_flops(world.device, world.dtype), copy_bandwidth(world.device)
    packs = [synthetic(args.pack, args.segment, config.vocab_size, world.device, 100 * world.rank + i)
             for i in range(args.packs)]
    tokens = sum(len(p.tokens) for p in packs)
    what = {"bench": "train", "device": device_name(world.device), "dtype": str(world.dtype), "torch": torch.__version__,
            "ranks": world.size, "size": args.size, "layers": config.num_hidden_layers, "vocab": config.vocab_size,
            "pack": args.pack, "segment": args.segment, "checkpoint": args.checkpoint}

    def measure(phase: str, work, need: float, moved: float, count: int) -> None:
        seconds = []
        for _ in range(args.rounds + 1):
            begin = time.perf_counter()
            work()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        taken, limit = statistics.median(seconds[1:]), max(need / peak, moved / bandwidth)
        row = {"phase": phase, "seconds": taken, "tokens_per_s_a_rank": count / taken, "mfu": need / taken / peak,
               "tflops": need / taken / 1e12, "limit_s": limit, "share_of_limit": limit / taken,
               "memory_gib": peak_memory(work, world.device) / 2**30}
        if world.main:
            print(json.dumps(what | {k: v if isinstance(v, str) else float(f"{v:.4g}") for k, v in row.items()}), flush=True)

    if world.main:
        print(json.dumps(what | {"phase": "limits", "matmul_tflops": round(peak / 1e12, 4),
                                 "copy_gb_per_s": round(bandwidth / 1e9, 1)}), flush=True)
    count = float(sum(int(p.mask.sum()) for p in packs))
    for kind, head in ((Policy, config.vocab_size), (Critic, 1)):
        model = random_model(kind, config, place, world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=PRESETS["orz-7b"].betas, weight_decay=0.0)
        size, need = sum(p.numel() for p in model.parameters()), flops(config, packs, head)
        # Bandwidth: a pass reads the weights; an update reads and writes weights, gradients and moments (fp32).
        read = size * world.dtype.itemsize * len(packs)
        if kind is Policy:
            measure("logprobs", partial(score, model, packs), need / 3, read, tokens)
        measure(kind.__name__.lower(), partial(update, model, optimizer, packs, count), need, 3 * read + 32 * size / world.size,
                tokens)
        del model, optimizer
    sampled = int(packs[0].mask.sum())
    hidden, weight = (torch.randn(n, config.hidden_size, device=world.device, dtype=world.dtype, requires_grad=True)
                      for n in (sampled, config.vocab_size))
    need = 6 * sampled * config.vocab_size * config.hidden_size
    measure("head", partial(head_alone, hidden, weight, packs[0].tokens[packs[0].mask]), need, 0, sampled)


if __name__ == "__main__":
    main()
