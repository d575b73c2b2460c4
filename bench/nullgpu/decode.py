"""Measures and computes a decoding step of the PyTorch engine, beside vLLM's.

    PYTHONPATH=NULLGPU sh NULLGPU/run.sh python -m bench.nullgpu.decode [--slots 64 256 512] [--tokens 512]
    python -m bench.nullgpu.decode --model ""                # without a driver: only the computed part

bench/nullgpu/trainer.py explains NULLGPU, a CUDA driver that computes nothing. Prints JSON lines, and writes
them to bench/results/nullgpu-decode.jsonl.

Measured, with the shape of Qwen2.5-0.5B: the host's CPU milliseconds a step (without the texts of responses,
which vLLM's engine makes too), graph launches a step, and the driver's peak memory beside the plan's.

Computed: milliseconds of a step on the device, kernel by kernel. A kernel takes the longest of three times:
its bytes / bandwidth, its FLOP / speed, and LEAST. The sum has the kernels that FusedDecoder launches.
    torch_ms    the step of the PyTorch engine: device or host, whichever is longer
    vllm_ms     vLLM's step. Its device time is that of the same products and attention, with other small
                kernels. Its host time was measured on an H200: 1.6 ms and 22 µs a response
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python bench/nullgpu/decode.py`

from bench.common import RESULTS, arguments, say
from tools.plan import GPUS, KNOWN, Case, memory

SHAPES, CONTEXTS, BATCHES, DEVICES = ("0.5b", "1.5b", "7b"), (512, 8000), (64, 256, 512), ("H100", "H200")
SHARE = 0.85  # share of the peak bandwidth that large kernels reach; an H200 copied at 0.86 of it
SPEED = 0.7  # share of the peak FLOP/s that products of a few hundred rows reach
LEAST = 2e-6  # seconds of the smallest kernel in a graph
HOST = (1.6e-3, 22e-6)  # vLLM's seconds of a step, and of a response


# --- computed


def kernels(shape, batch: int, context: int, fused: bool) -> list[tuple[str, int, float, float]]:
    """Returns (name, number of launches, bytes, FLOP) of a step's kernels. context: tokens of each response.
    fused: with vLLM's small kernels, else with those of FusedDecoder"""
    d, q, kv, inner, layers = shape.hidden, shape.q, shape.kv, shape.inner, shape.layers

    def product(name, times, rows, columns):
        return name, times, 2 * (rows * columns + batch * (rows + columns)), 2 * batch * rows * columns

    def pointwise(name, times, width):
        return name, times, 2 * batch * width, 0.0

    logits = 4 * batch * shape.vocab
    small = [pointwise("norms", 2 * layers, 3 * d), pointwise("activation", layers, 3 * inner),
             pointwise("rotary, keys and values", layers, 2 * q + 6 * kv)]
    if fused:
        small += [pointwise("keys and values", layers, 4 * kv), ("sampler", 8, logits * 6 / 8, 0.0)]
    else:
        small += [pointwise("residuals", 2 * layers, 3 * d), ("state of the slots", 20, 1e4, 0.0),
                  ("draw", 2, logits / 2, 0.0)]
    return [product("q, k, v", layers, d, q + 2 * kv), product("o", layers, q, d),
            product("gate, up", layers, d, 2 * inner), product("down", layers, inner, d),
            product("head", 1, d, shape.vocab), ("logits", 1, logits, 0.0),
            ("attention", layers, 4 * batch * context * kv, 4 * batch * context * q), *small]


def device_seconds(shape, gpu, batch: int, context: int, fused: bool) -> float:
    total = 0.0
    for _, times, size, flop in kernels(shape, batch, context, fused):
        total += times * max(size / (SHARE * gpu.hbm), flop / (SPEED * gpu.flops), LEAST)
    return total


def computed(host: dict[int, float]) -> list[dict]:
    """Returns a row for each model, GPU, batch and context. host: measured host seconds of a step"""
    rows = []
    for size in SHAPES:
        shape = KNOWN[size]
        for device in DEVICES:
            for context in CONTEXTS:
                for batch in BATCHES:
                    rows.append(computed_row(shape, GPUS[device], batch, context, host))
    return rows


def computed_row(shape, gpu, batch: int, context: int, host: dict[int, float]) -> dict:
    ours, theirs = (device_seconds(shape, gpu, batch, context, fused) for fused in (False, True))
    row = {"model": shape.name, "gpu": gpu.name, "batch": batch, "context": context,
           "torch_device_ms": ours, "torch_ms": max(ours, host.get(batch, 0.0)), "vllm_device_ms": theirs}
    step, response = HOST
    row["vllm_ms"] = max(theirs, step + response * batch)
    row = {k: round(1000 * v, 2) if k.endswith("ms") else v for k, v in row.items()}
    cache = 4 * shape.layers * shape.kv * batch * context
    row["fits"] = cache + 2 * shape.policy_params < 0.75 * gpu.memory
    if row["fits"]:
        row["faster"] = "torch" if row["torch_ms"] < row["vllm_ms"] else "vllm"
    return row


# --- measured


def timed(call, *args) -> float:
    start = time.process_time()
    call(*args)
    return time.process_time() - start


def measured(model: str, batch: int, tokens: int) -> dict:
    """Returns the figures of a rollout of `batch` responses of `tokens` tokens, on the driver that computes
    nothing. There, all sampled tokens are 0, so responses have full length."""
    import gc

    import nullgpu
    import torch

    import model as models
    from configs import PRESETS
    from engines.torch_engine import TorchEngine
    from tools import plan

    gc.collect()  # the engine of the last call
    cfg = replace(PRESETS["orz-0.5b-1gpu"], model=model, stop=(), max_prompt_len=256, max_model_len=0,
                  max_response_len=tokens, max_num_seqs=batch, engine="torch", algo="grpo")
    engine = TorchEngine(model, models.load_tokenizer(model), cfg, "cuda", torch.bfloat16)
    text_of, texts, seconds = engine.text_of, [], []
    engine.text_of = lambda ids: texts.append(timed(text_of, ids)) or ""
    requests = {(i, j): range(5, 185) for i in range(batch // 8) for j in range(8)}
    for version in range(5):  # the first rollout loads kernels
        weights = ((name, torch.empty_like(p)) for name, p in engine.policy.named_parameters())
        with engine.awake(weights, version):
            nullgpu.reset()
            before, start = len(texts), time.process_time()
            samples = list(engine.generate(requests, dict.fromkeys(requests, tokens), 1.0, (0,), version))
            seconds.append(time.process_time() - start - sum(texts[before:]))
            seen = nullgpu.counters()
    assert [len(s.ids) for s in samples] == [tokens] * batch
    case = Case(cfg, 1, [plan.read_shape(model)] * 3, plan.gpu_of(torch.cuda.get_device_name(), 79.1 * 2**30))
    planned = dict(memory(case))["rollout"]
    # The stub has no NCCL, and no trainer is there.
    parts = sum(planned[x] for x in ("engine weights", "engine buffers", "KV cache")) + plan.CUDA_CONTEXT
    return {"slots": batch, "tokens": tokens, "host_ms_a_step": round(1000 * min(seconds) / tokens, 3),
            "text_ms_a_response": round(1000 * min(texts), 3),
            "graph_launches_a_step": round(seen["graph_launch"] / tokens, 3),
            "graphs_captured": seen["graph_capture"], "waits": seen["sync_event"],
            "peak_gib": round(seen["peak_gib"], 2), "planned_gib": round(parts / 2**30, 2)}


def main() -> None:
    args = arguments(__doc__, slots=(64, 256, 512), tokens=512, model="build")
    rows, host = [], {}
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            from bench.shape import build

            path = build(folder, "0.5b") if args.model == "build" else args.model
            for batch in args.slots:
                rows.append(measured(path, int(batch), args.tokens))
                host[int(batch)] = rows[-1]["host_ms_a_step"] / 1000
    rows += computed(host)
    for row in rows:
        say(row)
    (RESULTS / "nullgpu-decode.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.model:
        import nullgpu

        nullgpu.quit()


if __name__ == "__main__":
    main()
