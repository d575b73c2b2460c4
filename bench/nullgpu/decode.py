"""Measures the host's time of a decoding step of vLLM on a stub CUDA device, which computes nothing.

    PYTHONPATH=NULLGPU sh NULLGPU/run.sh python -m bench.nullgpu.decode [--responses 64 256 512] [--tokens 128]
                                                                        [--rounds 5] [--work DIR]

bench/nullgpu/trainer.py explains NULLGPU. The model has the shape of Qwen2.5-0.5B.

Prints one JSON line for each number of responses:
    host_ms  milliseconds of a decoding step
    rest_ms  milliseconds of `generate` outside the decoding steps: queueing, prefill and the end
Both are computed from the times of short and of long responses, each the minimum over the rounds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python bench/nullgpu/decode.py`

import nullgpu
import torch

import configs
import dist
from bench.common import arguments, say
from bench.nullgpu.run import no_nccl, sampled_counts
from bench.shape import build
from model import load_tokenizer


SHORT = 16  # tokens of the short responses


def milliseconds(engine, responses: int, tokens: int) -> float:
    requests = {(i, j): [5 + i] * 16 for i in range(responses // 8) for j in range(8)}
    start = time.perf_counter()
    samples = list(engine.generate(requests, dict.fromkeys(requests, tokens), 1.0, (0,), engine.version))
    seconds = time.perf_counter() - start
    assert [len(s.ids) for s in samples] == [tokens] * responses
    return 1000 * seconds


def main() -> None:
    args = arguments(__doc__, responses=(64, 256, 512), tokens=128, rounds=5, work="")
    sizes = sorted(map(int, args.responses))
    path = args.work or tempfile.mkdtemp()
    if not Path(path, "config.json").is_file():
        build(path, "0.5b")
    no_nccl()
    world = dist.init()
    cfg = replace(configs.PRESETS["orz-7b-grpo"], model=path, max_prompt_len=64, max_response_len=args.tokens,
                  max_num_seqs=max(sizes))
    from engines.vllm_engine import VLLMEngine

    engine = VLLMEngine(path, load_tokenizer(path), cfg, world.device, world.dtype)
    facts = {"bench": "nullgpu-decode", "torch": torch.__version__, "vllm": sys.modules["vllm"].__version__}
    zeros = {name: torch.zeros(p.shape, dtype=world.dtype) for name, p in engine.policy.named_parameters()}
    sampled_counts()
    with engine.awake(zeros.items(), version=0):
        for responses in sizes:
            short, long = (min(milliseconds(engine, responses, tokens) for _ in range(args.rounds))
                           for tokens in (SHORT, args.tokens))
            step = (long - short) / (args.tokens - SHORT)
            say(facts | {"responses": responses, "tokens": args.tokens, "host_ms": round(step, 2),
                         "rest_ms": round(short - SHORT * step)})
    nullgpu.quit()


if __name__ == "__main__":
    configs.set_allocator()
    main()
