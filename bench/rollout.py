"""Measures how fast an engine samples, wakes, loads the trainer's weights (sync) and falls asleep.

    python -m bench.rollout --model runs/tiny-base-0 [--engine auto] [--prompts 16] [--samples 8]
                            [--tokens 256] [--rounds 5]

Prints one JSON line per figure. The engine's speeds and times are medians over the rounds after the first.
Fields of the line `tokens_per_s`:
    value       the engine's sampling speed
    bare_vllm   sampling speed of vLLM's own `generate`
    limit       upper bound of the sampling speed: a decoding step reads the weights and the KV cache once
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch

import dist
import model
from bench.common import arguments, say
from bench.limits import copy_bandwidth
from configs import PRESETS
from data import load_problems
from rollout import ENGINES, make_engine


def run_bare_vllm(engine, prompts: dict, n: int, tokens: int, seed: int) -> int:
    from vllm import SamplingParams

    engine.llm.reset_prefix_cache()
    params = [SamplingParams(n=n, temperature=1.0, max_tokens=tokens, seed=seed + p) for p in prompts]
    requests = [{"prompt_token_ids": ids} for ids in prompts.values()]
    outputs = engine.llm.generate(requests, params, use_tqdm=False)
    return sum(len(o.token_ids) for output in outputs for o in output.outputs)


def measure_round(engine, name: str, weights, prompts: dict, args: argparse.Namespace, seed: int) -> dict:
    figures = {}
    with engine.awake(weights, version=seed):
        start = time.perf_counter()
        requests = {(i, j): ids for i, ids in prompts.items() for j in range(args.samples)}
        samples = list(engine.generate(requests, dict.fromkeys(requests, args.tokens), 1.0, (0, seed), seed))
        figures["tokens_per_s"] = sum(len(s.ids) for s in samples) / (time.perf_counter() - start)
        if name == "vllm":
            start = time.perf_counter()
            tokens = run_bare_vllm(engine, prompts, args.samples, args.tokens, 1000 * seed)
            figures["bare_vllm"] = tokens / (time.perf_counter() - start)
    return figures | engine.ledger.metrics() | {"gb": bytes_of_weights(engine) / 1e9}


def bytes_of_weights(engine) -> int:
    return engine.dtype.itemsize * sum(p.numel() for p in engine.policy.parameters())


def speed_limit(engine, prompts: dict, args: argparse.Namespace, bandwidth: float) -> float:
    """Returns an upper bound of the tokens per second. `bandwidth` is in bytes per second."""
    c = engine.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kv_bytes = 2 * c.num_hidden_layers * c.num_key_value_heads * head_dim * engine.dtype.itemsize  # per token
    length = mean(len(ids) for ids in prompts.values()) + args.tokens / 2  # mean context while decoding
    running = min(len(prompts) * args.samples, engine.cfg.max_num_seqs)
    return running * bandwidth / (bytes_of_weights(engine) + running * length * kv_bytes)


def summary(rounds: list[dict], bandwidth: float, limit: float) -> dict[str, dict[str, float]]:
    middle = {name: median(row[name] for row in rounds) for name in rounds[0]}
    speed = middle["tokens_per_s"]
    tokens = {"value": speed, "limit": limit, "share_of_limit": speed / limit}
    if "bare_vllm" in middle:
        tokens |= {"bare_vllm": middle["bare_vllm"], "share_of_bare": speed / middle["bare_vllm"]}
    seconds = {stage: middle[f"time/{stage}"] for stage in ("wake", "sync", "sleep")}
    memory = {name.removeprefix("mem/").removesuffix("_gb"): value for name, value in rounds[-1].items()
              if name.startswith("mem/")}
    sync = {"value": middle["gb"] / seconds["sync"], "gb": middle["gb"], "seconds": seconds["sync"]}
    return {
        "copy_bandwidth_gb_per_s": {"value": bandwidth / 1e9},
        "tokens_per_s": tokens,
        "sync_gb_per_s": sync,
        "wake_sync_sleep_s": {"value": sum(seconds.values()), **seconds},
        "memory_gib": {**memory, "residual_first": rounds[0]["mem/residual_gb"]},
    }


def main() -> None:
    args = arguments(__doc__, model="runs/tiny-base-0", engine="auto", prompts=16, samples=8, tokens=256,
                     rounds=5)
    world, total = dist.init(), args.prompts * args.samples
    cfg = replace(PRESETS["orz-0.5b-1gpu"], model=args.model, template="plain", engine=args.engine, stop=(),
                  max_prompt_len=64, max_response_len=args.tokens, max_num_seqs=min(total, 512))
    tokenizer = model.load_tokenizer(args.model)
    problems = load_problems([f"{args.model}/train.jsonl"], tokenizer, cfg, lambda text: None)
    prompts = {i: list(p.ids) for i, p in enumerate(problems[:args.prompts])}
    engine = make_engine(args.model, tokenizer, cfg, world.device, world.dtype)
    name = next(name for name, kind in ENGINES.items() if type(engine) is kind)
    shard_fn = partial(dist.shard, over=dist.mesh(world), dtype=world.dtype)
    policy = model.load_policy(args.model, "cpu" if cfg.offload else world.device, shard_fn)
    rounds = []
    for i in range(args.rounds + 1):
        weights = dist.full_weights(policy, world.device)
        rounds.append(measure_round(engine, name, weights, prompts, args, i))
    bandwidth = copy_bandwidth(world.device)  # last, because its tensors raise the peak memory
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    facts = {"bench": "rollout", "device": device, "engine": name, "torch": torch.__version__,
             "vllm": sys.modules["vllm"].__version__ if name == "vllm" else None, "dtype": str(world.dtype),
             "model": Path(args.model).name, "responses": total, "tokens": args.tokens}
    limit = speed_limit(engine, prompts, args, bandwidth)
    for figure, values in summary(rounds[1:], bandwidth, limit).items():
        say(facts | {"figure": figure} | {k: float(f"{v:.4g}") for k, v in values.items()})


if __name__ == "__main__":
    main()
