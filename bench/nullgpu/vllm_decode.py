"""Measures the host's time of a decoding step of vLLM on a stub CUDA device, which computes nothing.

    PYTHONPATH=NULLGPU sh NULLGPU/run.sh python -m bench.nullgpu.vllm_decode [--responses 64 256 512]
                                                            [--tokens 128] [--rounds 5] [--work DIR]

bench/nullgpu/trainer.py explains NULLGPU. The model has the shape of Qwen2.5-0.5B.

Prints one JSON line for each number of responses:
    host_ms    milliseconds from one decoding step to the next; one tenth of the steps is faster. So other
               processes on the machine change it little.
    median_ms  half of the steps are faster
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python bench/nullgpu/vllm_decode.py`

import nullgpu
import numpy as np
import torch

import configs
import dist
from bench.common import arguments, say
from bench.nullgpu.run import no_nccl, sampled_counts
from bench.shape import build
from model import load_tokenizer


def step_ms(engine, responses: int, tokens: int) -> list[float]:
    """Returns the milliseconds of the decoding steps of all responses, without the first and last steps."""
    core, times = engine.llm.llm_engine.engine_core, []
    get_output = core.get_output

    def timed():
        times.append(time.perf_counter())
        return get_output()

    core.get_output = timed
    requests = {(i, j): [5 + i] * 16 for i in range(responses // 8) for j in range(8)}
    samples = list(engine.generate(requests, dict.fromkeys(requests, tokens), 1.0, (0,), engine.version))
    core.get_output = get_output
    assert [len(s.ids) for s in samples] == [tokens] * responses
    return [1000 * (after - before) for before, after in pairwise(times[8:-4])]


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
            steps = []
            for _ in range(args.rounds):
                steps += step_ms(engine, responses, args.tokens)
            fast, median = np.percentile(steps, [10, 50])
            say(facts | {"responses": responses, "steps": len(steps), "host_ms": round(fast, 2),
                         "median_ms": round(median, 2)})
    nullgpu.quit()


if __name__ == "__main__":
    configs.set_allocator()
    main()
