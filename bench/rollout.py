"""What an engine costs: sampling against bare vLLM and against the memory's bandwidth, and waking, syncing and sleeping.

    python bench/rollout.py --model runs/tiny-base-0 [--engine auto] [--prompts 16] [--samples 8] [--tokens 256] [--rounds 5]

The engine and the trainer's policy live in this one process, as in train.py. One JSON line a figure; medians over the rounds,
the first of which warms up. `limit` is the tokens a second at which each decoding step reads the weights and the cached keys
and values once at the bandwidth that a large copy reaches here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [ROOT] + [p for p in sys.path if p != str(Path(__file__).resolve().parent)]  # rollout.py is not this file


def bare(engine, prompts: dict, n: int, tokens: int, seed: int) -> int:
    """Tokens of vLLM's own generate, nothing asked for but tokens."""
    from vllm import SamplingParams

    engine.llm.reset_prefix_cache()
    params = [SamplingParams(n=n, temperature=1.0, max_tokens=tokens, seed=seed + s) for s in prompts]
    outs = engine.llm.generate([{"prompt_token_ids": p} for p in prompts.values()], params, use_tqdm=False)
    return sum(len(o.token_ids) for out in outs for o in out.outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="runs/tiny-base-0")
    parser.add_argument("--engine", choices=("auto", "torch", "vllm"), default="auto")
    for name, value in dict(prompts=16, samples=8, tokens=256, rounds=5).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    import torch

    import dist
    import model
    from bench.limits import copy_bandwidth
    from configs import PRESETS
    from data import load_problems
    from rollout import VLLMEngine, make_engine

    world, total = dist.init(), args.prompts * args.samples
    cfg = replace(PRESETS["orz-0.5b-1gpu"], model=args.model, template="plain", engine=args.engine, max_prompt_len=64,
                  max_response_len=args.tokens, max_num_seqs=min(total, 512), stop=())
    tokenizer = model.load_tokenizer(args.model)
    ids = [list(p.ids) for p in load_problems([f"{args.model}/train.jsonl"], tokenizer, cfg, lambda text: None)]
    prompts = dict(enumerate(ids[:args.prompts]))
    bandwidth = copy_bandwidth(world.device)
    engine = make_engine(args.model, tokenizer, cfg, world.device, world.dtype)
    policy = model.load_policy(args.model, "cpu" if cfg.offload else world.device,
                               partial(dist.shard, over=dist.mesh(world), dtype=world.dtype))
    rounds: list[dict[str, float]] = []
    for r in range(args.rounds + 1):
        row = {}
        with engine.awake(dist.full_weights(policy, world.device), version=r):
            begin = time.perf_counter()
            samples = list(engine.generate(prompts, args.samples, 1.0, args.tokens, (0, r), r))
            row["engine"] = sum(len(s.ids) for s in samples) / (time.perf_counter() - begin)
            if isinstance(engine, VLLMEngine):
                begin = time.perf_counter()
                row["bare"] = bare(engine, prompts, args.samples, args.tokens, 1000 * r) / (time.perf_counter() - begin)
        rounds.append(row | engine.ledger.metrics() | {"gb": engine.ledger.bytes / 1e9})
    rounds = rounds[1:]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rounds)

    c, size = engine.config, world.dtype.itemsize
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kv = 2 * c.num_hidden_layers * c.num_key_value_heads * head * size  # bytes a token
    length = statistics.mean(len(p) for p in prompts.values()) + args.tokens / 2
    running = min(total, cfg.max_num_seqs)
    limit = running * bandwidth / (engine.ledger.bytes + running * length * kv)
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    what = {"bench": "rollout", "device": device, "engine": type(engine).__name__, "torch": torch.__version__,
            "vllm": sys.modules["vllm"].__version__ if "vllm" in sys.modules else None, "dtype": str(world.dtype),
            "model": os.path.basename(os.path.normpath(args.model)), "responses": total, "tokens": args.tokens}

    def say(figure: str, **values: float) -> None:
        print(json.dumps(what | {"figure": figure} | {k: float(f"{v:.4g}") for k, v in values.items()}), flush=True)

    say("copy_bandwidth_gb_per_s", value=bandwidth / 1e9)
    say("tokens_per_s", value=median("engine"), limit=limit, share_of_limit=median("engine") / limit,
        **({"bare_vllm": median("bare"), "share_of_bare": median("engine") / median("bare")} if "bare" in rounds[0] else {}))
    say("sync_gb_per_s", value=median("gb") / median("time/sync"), gb=median("gb"), seconds=median("time/sync"))
    say("wake_sync_sleep_s", value=sum(median(f"time/{k}") for k in ("wake", "sync", "sleep")),
        **{k: median(f"time/{k}") for k in ("wake", "sync", "sleep")})
    say("memory_gib", **{k.removeprefix("mem/").removesuffix("_gb"): v for k, v in rounds[-1].items() if k.startswith("mem/")},
        residual_first=rounds[0]["mem/residual_gb"])


if __name__ == "__main__":
    main()
