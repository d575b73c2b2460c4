"""Measures the phases of training without an engine, on synthetic packs and random models of any shape.

    python -m bench.train [--size tiny] [--pack 4096] [--segment 512] [--packs 2] [--rounds 5]
                          [--recompute none] [--layers 0] [--vocab 0]

The phases:
    logprobs   log-probs without gradients
    policy     a PPO update of the policy
    critic     an update of the critic
    head       the policy's output layer alone: log-probs from random hidden states, and gradients

--size names the shape of the models (KNOWN in tools/plan.py). --layers and --vocab, if not 0, replace the
shape's number of layers and vocabulary size. An update has --packs packs. A pack has --pack tokens, in
samples of --segment tokens. With --recompute N, the backward pass recomputes the first N layers completely.

Prints one JSON line per phase. Times are medians over the rounds after the first.
    mfu          FLOP per second, divided by the FLOP per second of a large matrix product
    limit_s      lower bound of the seconds: the time to compute the FLOP at the speed of a large matrix
                 product, or to move the bytes at the speed of a large copy, whichever is longer
    memory_gib   peak memory in the phase, minus the memory before it
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import numpy as np
import torch

import dist
import grpo
import ppo
from bench.common import arguments, say
from bench.limits import copy_bandwidth, device_name, matmul_flops, peak_memory
from bench.shape import config_of
from configs import PRESETS
from data import Pack, Sample, pack
from layers.head import ChunkedLogProbs
from model import Critic, Policy


def random_model(kind: type, config, shard_fn, device: torch.device) -> torch.nn.Module:
    with torch.device("meta"):
        model = kind(config)
    model = shard_fn(model)
    model.allocate(device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.02)
            else:
                p.fill_(1.0 if "norm" in name else 0.0)
    return model


def synthetic_pack(tokens: int, segment: int, vocabulary: int, device: torch.device, seed: int) -> Pack:
    rng, prompt_len = np.random.default_rng(seed), max(1, segment // 4)
    logp = np.full(segment - prompt_len, -1.0, np.float32)
    samples = []
    for i in range(max(1, tokens // segment)):
        ids = rng.integers(0, vocabulary, segment).astype(np.int32)
        prompt, response = tuple(ids[:prompt_len].tolist()), ids[prompt_len:]
        samples.append(Sample(i, 0, prompt, response, logp, True, "", 0,
                              reward=float(i % 2), advantage=float(i % 2) - 0.5))
    return pack(samples).to(device)


def flops(config, packs: list[Pack], head: int) -> float:
    """Returns the FLOP of a forward and a backward pass on all packs: 6 FLOP for each weight and token, plus
    causal attention. The output layer computes only the tokens that enter the loss.

    head: number of outputs for a token: the vocabulary size for a policy, 1 for a critic"""
    c = config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    q, kv = c.num_attention_heads * head_dim, c.num_key_value_heads * head_dim
    layer = 2 * c.hidden_size * (q + kv) + 3 * c.hidden_size * c.intermediate_size
    total = 0.0
    for p in packs:
        square_lengths = float((p.cu_seqlens.diff().double() ** 2).sum())
        total += 6 * c.num_hidden_layers * (layer * len(p.tokens) + q * square_lengths)
        total += 6 * head * c.hidden_size * int(p.mask.sum())
    return total


@torch.no_grad()
def score(policy: torch.nn.Module, packs: list[Pack]) -> None:
    for p in packs:
        policy(p, 1.0)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, packs: list[Pack], count: float) -> None:
    """Runs a PPO update. `count`: number of response tokens in the update."""
    for p in packs:
        if isinstance(model, Policy):
            logp, _ = model(p, 1.0)
            segment = ppo.segment_ids(p.cu_seqlens, len(p.tokens))
            loss, _ = grpo.policy_loss(logp, logp.detach(), p.advantages, p.mask, segment, p.mask / count)
        else:
            v = model(p)
            loss = ppo.value_loss(v, v.detach(), p.rewards, p.mask, count, 0.2)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def head_alone(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    logp, entropy = ChunkedLogProbs.apply(hidden, weight, targets, 1.0)
    torch.autograd.grad((logp + entropy).sum(), (hidden, weight))


class Phases:
    def __init__(self, world: dist.World, facts: dict, rounds: int) -> None:
        self.world, self.facts, self.rounds = world, facts, rounds
        self.peak = matmul_flops(world.device, world.dtype)  # FLOP per second
        self.bandwidth = copy_bandwidth(world.device)  # bytes per second
        self.say({"phase": "limits", "matmul_tflops": self.peak / 1e12,
                  "copy_gb_per_s": self.bandwidth / 1e9})

    def say(self, row: dict) -> None:
        if self.world.main:
            rounded = {k: v if isinstance(v, str) else float(f"{v:.4g}") for k, v in row.items()}
            say(self.facts | rounded)

    def measure(self, name: str, work, flop: float, moved: float, tokens: int) -> None:
        """Measures work(), which computes `flop` FLOP for `tokens` tokens and moves `moved` bytes."""
        seconds = []
        for _ in range(self.rounds + 1):
            start = time.perf_counter()
            work()
            if self.world.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        taken, limit = median(seconds[1:]), max(flop / self.peak, moved / self.bandwidth)
        memory = peak_memory(work, self.world.device) / 2**30
        self.say({"phase": name, "seconds": taken, "tokens_per_s_a_rank": tokens / taken,
                  "mfu": flop / taken / self.peak, "tflops": flop / taken / 1e12, "limit_s": limit,
                  "share_of_limit": limit / taken, "memory_gib": memory})


def measure_models(phases: Phases, config, packs: list[Pack], recompute: int) -> None:
    world = phases.world
    shard_fn = partial(dist.shard, over=dist.mesh(world), dtype=world.dtype, recompute=recompute)
    tokens, count = sum(len(p.tokens) for p in packs), float(sum(int(p.mask.sum()) for p in packs))
    for kind, head in ((Policy, config.vocab_size), (Critic, 1)):
        model = random_model(kind, config, shard_fn, world.device)
        betas = PRESETS["orz-7b"].betas
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=betas, weight_decay=0.0, fused=True)
        size, flop = sum(p.numel() for p in model.parameters()), flops(config, packs, head)
        # A forward pass reads the weights once per pack, a backward pass twice. An update also reads and
        # writes four fp32 tensors (weights, gradients, two moments): 4 * 2 * 4 bytes per weight.
        read = size * world.dtype.itemsize * len(packs)
        if kind is Policy:
            phases.measure("logprobs", partial(score, model, packs), flop / 3, read, tokens)
        moved = 3 * read + 32 * size / world.size
        work = partial(update, model, optimizer, packs, count)
        phases.measure(kind.__name__.lower(), work, flop, moved, tokens)
        del model, optimizer


def measure_head(phases: Phases, config, p: Pack) -> None:
    world, targets = phases.world, p.tokens[p.mask]
    options = dict(device=world.device, dtype=world.dtype, requires_grad=True)
    hidden = torch.randn(len(targets), config.hidden_size, **options)
    weight = torch.randn(config.vocab_size, config.hidden_size, **options)
    flop = 6 * len(targets) * config.vocab_size * config.hidden_size
    phases.measure("head", partial(head_alone, hidden, weight, targets), flop, 0, len(targets))


def main() -> None:
    args = arguments(__doc__, size="tiny", pack=4096, segment=512, packs=2, layers=0, vocab=0, rounds=5,
                     recompute="none")
    world, config = dist.init(), config_of(args.size, args.layers, args.vocab)
    packs = [synthetic_pack(args.pack, args.segment, config.vocab_size, world.device, 100 * world.rank + i)
             for i in range(args.packs)]
    facts = {"bench": "train", "device": device_name(world.device), "dtype": str(world.dtype),
             "torch": torch.__version__, "ranks": world.size, "size": args.size,
             "layers": config.num_hidden_layers, "vocab": config.vocab_size, "pack": args.pack,
             "segment": args.segment, "recompute": args.recompute}
    phases = Phases(world, facts, args.rounds)
    recompute = 0 if args.recompute == "none" else int(args.recompute)
    measure_models(phases, config, packs, recompute)
    measure_head(phases, config, packs[0])


if __name__ == "__main__":
    main()
