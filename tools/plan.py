"""Plans a run before it starts: its batches, memory, disk space and seconds.

    python -m tools.plan orz-7b --layout production [--gpu H200] [--json] [flags of train.py]

The plan needs no torch and no GPU. train.py makes the same plan, and refuses a run that does not fit.

Memory is counted for one rank's device. Seconds are estimates. docs/measured.md compares them with what was
measured on a GPU.

Two terms of this file:

    root     all weights outside the decoder layers (embedding, last norm, LM head); one FSDP group
    shard    one rank's part of a model's weights, gradients or optimizer state
"""

import itertools
import json
import textwrap
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import configs
from configs import CHUNK_BYTES, GIB, NODE, Config, UserError, gib, read_json, require
from grading.rows import read_rows

STATE_BYTES = 12  # bytes per parameter in a checkpoint: fp32 weight and AdamW's two fp32 moments
CHUNKS_ALIVE = 3  # chunks of logits that are in memory at once on a CPU (model.py)
CUDA_CONTEXT = 0.6 * GIB  # GPU memory of CUDA's context and kernels
NCCL_BUFFERS = 0.9 * GIB  # GPU memory of NCCL
ENGINE_BUFFERS = 1.5 * GIB  # GPU memory of vLLM's activations and CUDA graphs
TORCH_BUFFERS = (
    0.35 * GIB
)  # GPU memory of the torch engine's activations, and free memory in pieces
SLEEPING_ENGINE = 0.5 * GIB  # GPU memory of vLLM at sleep level 2
LIBRARIES = 5 * GIB  # host memory of torch, CUDA and vLLM on one rank
HOLES = 0.015  # unused memory between activations, as a share of the activations
HEADROOM = 0.08  # share of a device's memory that choices of the plan leave free
ASSUMED_PROMPTS = 57_000  # number of prompts in an epoch, if the data can't be read

# Speeds. If no source stands here, they were measured on one H200 with 16 CPU cores (docs/measured.md).
MFU = 0.35  # share of a GPU's peak FLOP/s that layers reach; torchtitan: 0.33 to 0.39 (8B model, H100)
MATMUL = (
    0.8  # share of a GPU's peak FLOP/s that one large matrix product reaches: 792 of 989 TFLOP/s
)
STREAM = 0.85  # share of a GPU's peak memory bandwidth that a copy reaches: 4.12 of 4.8 TB/s
BANDWIDTH = 0.6  # share of a GPU's peak memory bandwidth that decoding reaches
LINK = 0.8  # share of a link's peak that NCCL reaches; nccl-tests on 8 H100s: 360 of 450 GB/s
HOST_COPY = 20e9  # bytes/s between pinned host memory and the device
PIN = 1.8e9  # bytes/s at which host memory is pinned, in the first step
PUSH = 125e9  # bytes/s at which vLLM takes new weights
WAKE = 0.09  # seconds in which vLLM wakes and falls asleep
START = 35.0  # seconds from the command to the first step, without loading the model
LOAD = 1.5e9  # bytes/s at which a model's files are read
# Host seconds of one decode step in an engine: for the step, and for each response in it.
DECODE_HOST = {"vllm": (1.1e-3, 16e-6), "torch": (0.1e-3, 0.5e-6)}
# Host seconds of one layer and pack: forward and backward pass; added by FSDP; added by recomputation.
LAYER_HOST, FSDP_HOST, RECOMPUTE_HOST = 1.4e-3, 2.1e-3, 1.5e-3
# Host seconds of one layer in an optimizer step: of FSDP's DTensors, and of plain tensors.
OPTIMIZER_HOST = {True: 4e-3, False: 0.3e-3}
# Bytes that the output layer moves for each logit (fp32, and the gradient in the compute dtype), in a forward
# and a backward pass.
HEAD_BYTES = 8, 14


class GPU(NamedTuple):
    """A GPU's memory, and peak speeds from its datasheet. An unknown speed is 0."""

    name: str
    memory: float  # bytes of memory, as torch reports them
    flops: float = 0.0  # peak FLOP/s of dense bf16 products
    hbm: float = 0.0  # peak bandwidth of its memory in bytes/s
    link: float = 0.0  # peak bytes/s that it sends within its node (L40S, 4090: PCIe 4.0)
    network: float = 0.0  # Gb/s that a usual node sends to other nodes; a DGX H100: 8 × 400


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("H100", 79.1 * GIB, 989e12, 3.35e12, 450e9, 3200),
        GPU("H200", 139.8 * GIB, 989e12, 4.80e12, 450e9, 3200),
        GPU("B200", 178.3 * GIB, 2250e12, 8.00e12, 900e9, 3200),
        GPU("A100-80", 79.2 * GIB, 312e12, 2.04e12, 300e9, 1600),
        GPU("A100-40", 39.4 * GIB, 312e12, 1.56e12, 300e9, 1600),
        GPU("L40S", 44.4 * GIB, 362e12, 0.86e12, 32e9, 400),
        GPU("4090", 23.5 * GIB, 165e12, 1.01e12, 32e9, 100),
    )
}


def gpu_of(device: str, memory: float) -> GPU:
    """Returns a GPU with the name `device`, which the driver reports, and with `memory` bytes. Its speeds are
    those of the GPU in GPUS whose name before "-" occurs in `device`. Without such a GPU, the speeds
    are 0."""
    same = (gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in device)
    return next(same, GPU(device, 0))._replace(name=device, memory=memory)


# --- the model


@dataclass
class Shape:
    """The sizes of a dense decoder like Llama or Qwen2."""

    name: str  # the model's path; in KNOWN, a part of the path
    layers: int
    hidden: int
    heads: int
    inner: int  # width of the MLP
    vocab: int
    kv_heads: int
    tied: bool = False  # whether LM head and embedding share their weights
    head_dim: int = 0  # width of an attention head; 0 means hidden / heads
    qkv_bias: bool = True  # whether queries, keys and values have biases
    silu: bool = (
        True  # whether the MLP's activation is silu; others store one more tensor (model.gated)
    )

    def __post_init__(self) -> None:
        """Compute these sizes:

        q: width of the queries of all heads together
        kv: width of the keys of all heads together; the values have the same width
        layer, policy_params, critic_params: numbers of parameters of a layer, the policy and the critic"""
        d, self.q = self.hidden, self.heads * (self.head_dim or self.hidden // self.heads)
        self.kv = self.q * self.kv_heads // self.heads
        biases = self.q + 2 * self.kv if self.qkv_bias else 0
        self.layer = d * (2 * self.q + 2 * self.kv + 3 * self.inner) + 2 * d + biases
        # A critic has the layers, the embedding (vocab x d), the last norm (d), and a vector (d) as its head.
        self.critic_params = self.layers * self.layer + self.vocab * d + 2 * d
        self.policy_params = self.critic_params - d + (0 if self.tied else self.vocab * d)


KNOWN = {
    "0.5b": Shape("Qwen2.5-0.5B", 24, 896, 14, 4864, 151936, 2, tied=True),
    "1.5b": Shape("Qwen2.5-1.5B", 28, 1536, 12, 8960, 151936, 2, tied=True),
    "7b": Shape("Qwen2.5-7B", 28, 3584, 28, 18944, 152064, 4),
    "32b": Shape("Qwen2.5-32B", 64, 5120, 40, 27648, 152064, 8),
    "8b": Shape("Llama-3.1-Tulu-3-8B", 32, 4096, 32, 14336, 128256, 8, qkv_bias=False),
    "tiny": Shape("tiny-base", 2, 128, 4, 384, 263, 2, tied=True),  # the model of tools/tiny.py
}
# Model types that tie LM head and embedding if config.json has no tie_word_embeddings.
TIED = ("gemma3_text", "smollm3", "cohere", "ernie4_5")


def shape_of(config: dict, name: str) -> Shape:
    """Returns the Shape for the content of a config.json. Raises UserError if a size is missing."""
    get, family = config.get, config.get("model_type", "")
    sizes = "num_hidden_layers hidden_size num_attention_heads intermediate_size vocab_size".split()
    for size in sizes:
        require(
            isinstance(get(size), int) and get(size) > 0,
            f"the config of {name} ({family}) has no {size} above 0: {get(size)}",
            "a dense decoder like Llama or Qwen",
        )
    return Shape(
        name,
        *map(get, sizes),
        get("num_key_value_heads") or get("num_attention_heads"),
        get("tie_word_embeddings", family in TIED),
        get("head_dim") or 0,
        get("attention_bias") or family == "qwen2",
        get("hidden_act") == "silu",
    )


def read_shape(path: str) -> Shape:
    """Returns the Shape of the model in folder `path`. Without a config.json there, returns the entry of
    KNOWN whose name occurs in `path`. Raises UserError if there is neither."""
    config = read_json(Path(path) / "config.json")
    known = [shape for shape in KNOWN.values() if shape.name in path]
    if known and not config:
        return known[0]
    require(config != {}, f"no {path}/config.json", "--model with a Hugging Face model folder")
    return shape_of(config, path)


def forward_flops(
    params: float, layers: int, width: int, tokens: float, square_lengths: float
) -> float:
    """Returns the FLOP of a forward pass over `tokens` tokens: 2 per parameter and token, plus attention.

    width: width of the queries of all heads together
    square_lengths: the sum over all samples of the squared length in tokens"""
    # A sample of length L has L²/2 pairs of a query and a key. A pair costs 4 x width FLOP in each layer.
    return 2 * params * tokens + 2 * layers * width * square_lengths


# --- the run to plan


@dataclass
class Case:
    """A run to plan: its config, its models and its machines."""

    cfg: Config
    world: int  # number of ranks
    shapes: list[Shape]  # of policy, critic and reference
    gpu: GPU | None  # the GPU of each rank; None for a run on CPUs
    local: int = 1  # number of ranks on one machine
    host: float = 0.0  # bytes of free memory on one machine; 0 if unknown
    prompts: int = 0  # number of prompts of an epoch; 0 if unknown

    def __post_init__(self) -> None:
        """Compute the sizes of the run. Replace self.cfg by a config without `auto` in --shard_ranks and
        --offload, and without --pack_len 0 (see `settle`)."""
        self.cfg = settle(self)
        cfg, on_gpu = self.cfg, self.gpu is not None
        self.policy, critic, self.ref = self.shapes
        self.models = {"critic": critic} if cfg.algo == "ppo" else {}
        self.models["policy"] = self.policy
        self.params = {
            name: getattr(shape, f"{name}_params") for name, shape in self.models.items()
        }
        self.steps = cfg.with_steps(self.prompts or ASSUMED_PROMPTS).steps
        # Bytes of one number in activations and gathered weights.
        self.number = 2 if cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and on_gpu) else 4
        # On a GPU, every engine except the torch engine is planned like vLLM, which sleeps during training.
        self.engine_sleeps = on_gpu and cfg.engine_kind(on_gpu) != "torch"
        self.offloads = cfg.offload == "on" and on_gpu
        # Bytes of a chunk of logits, and the number of chunks that are in memory at once. A GPU holds the
        # fp32 logits, and their gradient in the compute dtype.
        self.chunk = CHUNK_BYTES["cuda" if on_gpu else "cpu"]
        self.chunks_alive = 1 + self.number / 4 if on_gpu else CHUNKS_ALIVE
        self.engine_weights = self.number * self.params["policy"] / cfg.tp
        self.capacity = self.gpu.memory if self.gpu else self.host / self.local or float("inf")
        gpu = self.gpu or GPU("", 0)
        # Tokens of prompt and response in the longest sample. Its response has the maximum length.
        self.longest = cfg.model_len - cfg.max_response_len, cfg.max_response_len
        # Bytes/s that a rank sends within its node, and that a node sends to other nodes.
        self.within, self.between = LINK * gpu.link, LINK * (cfg.network or gpu.network) * 1e9 / 8
        # Number of ranks over which one copy of the weights and of the optimizer state is sharded.
        self.shards = cfg.shard_ranks or self.world
        # checkpoint: bytes that a rank saves in a checkpoint
        # state: bytes of a rank's shards of all weights (the reference's too) and of AdamW's moments
        trained = STATE_BYTES * sum(self.params.values()) / self.shards
        ref = 4 * self.ref.policy_params / self.shards
        self.checkpoint = trained + (ref if cfg.keeps_ref else 0)
        self.state = trained + (ref if cfg.has_ref else 0)
        # Number of responses that one engine samples in a step.
        engines = max(self.world // cfg.tp, 1)
        self.responses = (
            -(-(cfg.prompts_per_step + cfg.extra_prompts) // engines) * cfg.samples_per_prompt
        )
        # Bytes of one token in a rank's KV cache. A rank has at least one KV head, even if --tp > kv_heads.
        width = max(self.policy.kv // cfg.tp, self.policy.q // self.policy.heads)
        self.kv_bytes = 2 * self.policy.layers * width * self.number

    @cached_property
    def kept(self) -> dict[str, "Kept"]:
        """A dict: "policy" or "critic" -> what the updates of this model keep in memory."""
        return {name: keep(self, name) for name in self.models}


class Kept(NamedTuple):
    """What the forward passes of a model's update keep in memory for the backward passes.

    recompute: number of layers that the backward pass recomputes
    reshard: how much of a layer's gathered weights a rank keeps for the backward pass. False: all weights.
        A number n: 1/n of them. True: none."""

    recompute: int
    reshard: bool | int


def keep(case: Case, name: str) -> Kept:
    """Returns what a model's updates keep in memory (a Kept). With --recompute auto:

    1. For each value of Kept.reshard, find the Kept that recomputes least and still leaves the share HEADROOM
       of the device's memory free. If the GPU's speeds are unknown, only reshard=True is tried.
    2. Return the first of them that is at most 1 % slower than the fastest. If there is none, return the Kept
       that needs the least memory: all layers are recomputed, and no gathered weights are kept."""
    cfg, layers = case.cfg, case.models[name].layers
    if cfg.recompute != "auto":
        typed = {"none": 0, "layers": layers}.get(cfg.recompute)
        return Kept(min(int(cfg.recompute), layers) if typed is None else typed, True)
    choices = [True]
    if case.within and case.shards > 1:
        if 1 < case.local < case.shards and case.shards % case.local == 0:
            choices.append(case.local)
        choices.append(False)
    needed = {}  # Kept -> planned seconds of the updates; 0 if the speeds are unknown
    for reshard in choices:
        for recompute in range(layers + 1):  # from the most memory to the least
            kept = Kept(recompute, reshard)
            peak = max(usage["total"] for usage in _update_instants(case, name, kept))
            if peak <= (1 - HEADROOM) * case.capacity:
                _, updates = _passes(case, name, kept, *case.longest) if case.within else (0, [])
                needed[kept] = _seconds(updates)
                break
    best = min(needed.values(), default=0)
    return next(
        (kept for kept, seconds in needed.items() if seconds <= 1.01 * best), Kept(layers, True)
    )


def settle(case: Case) -> Config:
    """Returns the config with a value in place of `auto` in --shard_ranks and --offload, and of --pack_len 0:

    shard_ranks  the ranks of one node, if the run then fits in device and host memory; else 0 (all ranks)
    offload      "off", unless "on" is at least 3 % faster or only "on" fits
    pack_len     PACK_LEN tokens, or as many as the longest sample; up to four times as many if that fits and
                 is not slower

    If nothing fits, it returns the values that need the least memory."""
    cfg, one_node = case.cfg, case.local if case.world % case.local == 0 else 0
    shards = dict.fromkeys((one_node, 0)) if cfg.shard_ranks == "auto" else (cfg.shard_ranks,)
    places = (
        ("off", "on")
        if cfg.offload == "auto" and case.gpu
        else (cfg.offload.replace("auto", "off"),)
    )
    packs = [cfg.pack_len or max(PACK_LEN, cfg.model_len)]
    minibatch = -(-cfg.samples_per_step * cfg.model_len // (cfg.minibatches * case.world))
    while (
        not cfg.pack_len
        and case.gpu
        and case.gpu.flops
        and packs[-1] < min(minibatch, 4 * packs[0])
    ):
        packs.append(2 * packs[-1])
    choices = [
        replace(cfg, shard_ranks=n, offload=place, pack_len=length)
        for n, place, length in itertools.product(shards, places, packs)
    ]
    if len(choices) == 1:
        return choices[0]
    found = {}  # shard_ranks -> (seconds of a step, config) of the best choice that fits
    for choice in choices:
        n, time = choice.shard_ranks, _seconds_if_fits(replace(case, cfg=choice))
        if time is None:
            continue
        fastest, best = found.get(n, (float("inf"), choice))
        limit = 1 if choice.offload == best.offload else 0.97
        if time <= limit * fastest:
            found[n] = time, choice
    for n in shards:
        if n in found:
            return found[n][1]
    return replace(cfg, shard_ranks=[*shards][-1], offload=places[-1], pack_len=packs[0])


def _seconds_if_fits(case):
    """Returns the seconds of a step, 0.0 if the speeds are unknown, or None if the case does not fit."""
    cfg = case.cfg
    takes_more = cfg.offload == "off" or cfg.pack_len > max(PACK_LEN, cfg.model_len)
    room = 1 - HEADROOM if case.gpu and takes_more else float("inf")
    if shortage(case) or fullest(case)[1]["total"] > room * case.capacity:
        return None
    if host_need(case)["machine"] > (case.host or float("inf")):
        return None
    return seconds(case, *case.longest)["step"] if case.within else 0.0


PACK_LEN = 16384


def check_ranks(cfg: Config, ranks: int) -> None:
    """Raises UserError if --layout, --tp or --shard_ranks does not fit this number of ranks."""
    each = max(n for n in range(1, NODE + 1) if cfg.ranks % n == 0)
    require(
        cfg.ranks in (0, ranks),
        f"--ranks is {cfg.ranks} (--layout {cfg.layout}), and {ranks} were started",
        f"torchrun --nnodes {cfg.ranks // each} --nproc-per-node {each} "
        f"train.py …, or --ranks {ranks}",
    )
    require(
        ranks % cfg.tp == 0,
        f"{ranks} ranks can't be divided into engines of --tp {cfg.tp}",
        f"a multiple of {cfg.tp} ranks, or --tp 1",
    )
    require(
        cfg.shard_ranks in ("auto", 0) or ranks % cfg.shard_ranks == 0,
        f"{ranks} ranks can't be divided into groups of --shard_ranks {cfg.shard_ranks}",
        "--shard_ranks auto, 0, or a divisor of the number of ranks",
    )


# --- memory of the device

Usage = dict[
    str, float
]  # item -> bytes of memory that the item uses on one rank's device at one instant


def _per_token(case, shape, recompute):
    """Returns two sizes in bytes per token:

    1. the activations that all layers together keep for the backward pass
    2. the activations that one recomputed layer adds in the backward pass

    recompute: number of layers to recompute (see Kept.recompute)"""
    d, b, q, kv, inner = shape.hidden, case.number, shape.q, shape.kv, shape.inner
    # What a layer stores: the inputs of norms and matrix products, tensors of the MLP (see model.gated_mlp),
    # and attention's inputs and output. If segments share prefixes, the latter are stored for the tokens of
    # all segments, and attention's output once more. Sharing saves 4 % of the tokens or more
    # (data.LEAST_SHARED).
    of_mlp = 4 if not case.gpu else 2 if shape.silu else 3
    stored = b * (0.96 * (4 * d + q + of_mlp * inner) + 2 * q + 2 * kv)
    # A recomputed layer needs this memory when the backward pass has freed the layers after it. Its input is
    # counted already. It holds one tensor of the MLP less than other layers (bench/nullgpu/memory.py).
    again = stored - b * (d + inner)
    whole = shape.layers - recompute
    return recompute * b * d + whole * stored, max(0, again - whole * stored) if recompute else 0


def _allocator_loss(case, shape, root, logits, kept):
    """Returns the memory that torch's allocator holds beyond the tensors in use (item -> bytes); {} on CPUs.

    gather buffers: inputs (a rank's shard) and outputs (the whole weights) of two all-gathers, the root's and
        one layer's. Only FSDP's CUDA stream can reuse this memory.
    fragments: an estimate of the free memory in pieces that are too small for later tensors"""
    if not case.gpu:
        return {}
    gathered = case.number * (root + shape.layer) * (1 + 1 / case.shards)
    return {
        "gather buffers": gathered if case.shards > 1 else 0,
        "fragments": 4 * shape.layer
        + 4 * root / case.shards
        + HOLES * kept
        + (logits / 2 if case.shards == 1 else logits),
    }


def _update_instants(case, name, kept):
    """Returns a list: the memory (Usage) at five instants of an update. The peak is at one of them."""
    # b: bytes of a number in the compute dtype; d: the hidden size
    cfg, b, shape, params = case.cfg, case.number, case.models[name], case.params[name]
    d, layer = shape.hidden, shape.layer
    # The root (all weights outside the layers) stays gathered until the end of the backward pass.
    root = params - shape.layers * layer
    words = (
        shape.vocab if name == "policy" else 0
    )  # the critic's head is one vector and makes no logits
    head = d * max(words, 1)
    minibatch = -(-cfg.samples_per_step * cfg.model_len // (cfg.minibatches * case.world))
    T = min(cfg.pack_len, minibatch)  # number of tokens of the largest pack
    per_token, again = _per_token(case, shape, kept.recompute)
    activations = T * (per_token + 2 * b * d)
    # Bytes of the layers' weights that stay gathered until the backward pass (Kept.reshard). One rank alone
    # gathers nothing, but a layer that is not recomputed keeps the copies of its weights.
    if case.shards == 1:
        layers = b * layer * (shape.layers - kept.recompute)
    else:
        layers = b * (params - root) / int(kept.reshard or 1) if kept.reshard is not True else 0
    gathered = b * root + layers
    one_more = gathered + (b * layer if kept.reshard else 0)
    # A layer's backward pass also holds the gradients of down_proj's input and of the MLP's gate and up
    # projections, and two gradients of size d.
    working = T * (again + b * (3 * shape.inner + 2 * d))
    logits = case.chunks_alive * min(case.chunk, 4 * words * T)
    shard = 4 * params / case.shards
    at_rest = {"weights": shard, "gradients": shard, "AdamW": 2 * shard}
    at_rest |= _allocator_loss(case, shape, root, logits, activations) | _asleep(case)
    instants = [  # "whole gradients" are the gradients that FSDP has not yet reduced to shards
        # 1. Backward pass of the LM head. The head's gradient is in memory twice: in fp32 and in the compute
        #    dtype.
        {
            "gathered weights": gathered,
            "activations": activations,
            "logits": logits,
            "whole gradients": (4 + b) * head,
        },
        # 2. Backward pass of layer i. In memory are the gradients of the LM head (in the compute dtype) and
        #    of layer i + 1 (in fp32).
        {
            "gathered weights": one_more,
            "activations": activations + working,
            "whole gradients": b * head + 4 * layer,
        },
        # 3. End of layer i's backward pass. In memory are the gradients of the LM head (in the compute
        #    dtype), of layer i (in both dtypes) and of layer i + 1 (in fp32).
        {
            "gathered weights": one_more,
            "activations": activations,
            "whole gradients": b * head + (b + 8) * layer,
        },
        # 4. End of the whole backward pass. The memory holds the root's gradients (in fp32 and in the compute
        #    dtype) and one layer's gradients (in fp32).
        {
            "gathered weights": 0 if kept.reshard else gathered,
            "whole gradients": (4 + b) * root + 4 * layer,
        },
        # 5. AdamW's step, with temporary memory of the size of the weight shards.
        {"AdamW's step": shard},
    ]
    return [_with_total(case, at_rest | usage) for usage in instants]


def _engine_memory(case):
    """Returns the memory of an engine while it samples, as a Usage. On a GPU, an engine uses --engine_share
    of the memory: first for weights and buffers, and the rest for the KV cache. The torch engine takes no
    more than --max_num_seqs responses of full length need."""
    cfg, policy = case.cfg, case.policy
    rows = cfg.max_num_seqs if case.gpu else min(cfg.max_num_seqs, case.responses)
    buffers = 4 * configs.SAMPLER_COPIES * rows * policy.vocab
    cache = rows * cfg.engine_len * case.kv_bytes
    if case.gpu:
        buffers += ENGINE_BUFFERS if case.engine_sleeps else TORCH_BUFFERS
        room = max(cfg.engine_share * case.gpu.memory - case.engine_weights - buffers, 0.0)
        pages = 1 + rows * -(-cfg.engine_len // configs.KV_PAGE)
        cache = room if case.engine_sleeps else min(room, pages * configs.KV_PAGE * case.kv_bytes)
    return {"engine weights": case.engine_weights, "engine buffers": buffers, "KV cache": cache}


def _asleep(case):
    """Returns the engine's memory while models are trained, as a Usage. The torch engine keeps its weights.
    The KV cache of vLLM on a CPU (0.25 GiB) is neglected."""
    if case.engine_sleeps:
        return {"sleeping engine": SLEEPING_ENGINE}
    return {"engine weights": case.engine_weights}


def memory(case: Case) -> list[tuple[str, Usage]]:
    """Returns a list of (phase, Usage): the memory at several instants of a training step, in order of time.
    The peak is at one of these instants. The phases: "sync" (the engine gets new weights), "rollout", "ref",
    "critic" and "policy"."""
    policy, params = case.policy, case.params["policy"]
    # A sync gathers one layer or the root (all other weights) at a time. FSDP gathers the weights into a
    # buffer, then copies them to tensors, so these weights are in memory twice.
    largest = max(params - policy.layers * policy.layer, policy.layer)
    own_part = (
        1 / case.shards if case.shards > 1 else 0
    )  # FSDP copies a rank's shard for an all-gather
    sync = {
        "weights": 4 * params / case.shards,
        "gathered weights": case.number * largest * (2 + own_part),
    }
    # VLLMEngine.load gives vLLM copies of embedding and LM head. vLLM keeps the copies until the end of the
    # sync if embedding and LM head are tied, or if vLLM pads the vocabulary to a multiple of 64 * tp.
    if case.engine_sleeps and (policy.tied or policy.vocab % (64 * case.cfg.tp)):
        sync["embedding's copy"] = (
            case.number * policy.vocab * policy.hidden * (1 if policy.tied else 2)
        )
    sync |= {"engine weights": case.engine_weights} | _asleep(case)
    instants = [
        ("sync", _with_total(case, sync)),
        ("rollout", _with_total(case, _engine_memory(case))),
    ]
    # Without --ref_model, ref has the policy's shape. Then the policy's update needs more memory than ref.
    if case.cfg.ref_model:
        shape, T = case.ref, case.cfg.pack_len
        _, working = _per_token(case, shape, shape.layers)  # activations of one layer
        usage = {
            "weights": 4 * shape.policy_params / case.shards,
            "activations": T * working,
            "gathered weights": case.number
            * (shape.policy_params - (shape.layers - 1) * shape.layer),
            "logits": case.chunks_alive * min(case.chunk, 4 * shape.vocab * T),
        }
        instants.append(("ref", _with_total(case, usage | _asleep(case))))
    for name in case.models:
        instants += [(name, usage) for usage in _update_instants(case, name, case.kept[name])]
    return instants


def _with_total(case, usage):
    """Returns `usage` with two more items:

    CUDA and idle state: the memory of CUDA and NCCL, plus the weights and AdamW's moments that are on the
        device but not counted in `usage`
    total: the sum of all items"""
    idle = 0.0
    if not case.offloads:  # HOLES: many small tensors
        idle = (1 + HOLES) * case.state - usage.get("weights", 0.0) - usage.get("AdamW", 0.0)
    cuda = CUDA_CONTEXT + NCCL_BUFFERS if case.gpu else 0
    usage = usage | {"CUDA and idle state": cuda + idle}
    return {"total": sum(usage.values())} | usage


def fullest(case: Case) -> tuple[str, Usage]:
    """Returns the phase and Usage of the instant that needs the most memory."""
    return max(memory(case), key=lambda instant: instant[1]["total"])


def kv_tokens(case: Case) -> int:
    """Returns the number of tokens that an engine's KV cache can hold."""
    return int(_engine_memory(case)["KV cache"] / case.kv_bytes)


# --- host, disk, seconds


def host_memory() -> float:
    """Returns the bytes of free memory on this machine; 0 where the system does not report it."""
    try:
        words = Path("/proc/meminfo").read_text().split()
        return 1024.0 * int(words[words.index("MemAvailable:") + 1])
    except OSError:
        return 0.0


def host_need(case: Case) -> dict[str, float]:
    """Returns a dict: item -> bytes of host memory of one rank. But the item "machine" is the host memory of
    all ranks of a machine."""
    rank = {
        "rank's waiting state": case.state if case.offloads else 0,
        "rank's checkpoint copy": case.checkpoint,
        "rank's libraries": LIBRARIES if case.gpu else LIBRARIES / 10,
    }
    training = 0 if case.gpu else fullest(case)[1]["total"]
    return rank | {"machine": case.local * (sum(rank.values()) + training)}


def disk(cfg: Config, policy: int, critic: int = 0) -> dict[str, int]:
    """Returns a dict: item -> bytes on the disk. The items: one checkpoint, the bf16 exports, and all
    checkpoints with the exports. policy, critic: numbers of parameters"""
    checkpoint, exports = STATE_BYTES * (policy + critic), 2 * (policy + critic)
    if cfg.keeps_ref:
        checkpoint += 4 * policy
    # Besides the --keep newest checkpoints: the one that is being written, and the best one.
    count = cfg.keep + 1 + bool(cfg.keep_best and cfg.eval_data)
    return {
        "disk, a checkpoint": checkpoint,
        "disk, exports": exports,
        "disk, all": count * checkpoint + exports,
    }


# --- network


class Sent(NamedTuple):
    """Bytes that a rank sends, as a mean over all ranks."""

    within: float  # to ranks of its node
    between: float  # to other nodes


def sent(size: float, ranks: int, nodes: int = 1, times: int = 1) -> Sent:
    """Returns the bytes that a rank sends in a collective over `ranks` ranks on `nodes` nodes.

    size: bytes of the whole tensor
    times: 1 for an all-gather or a reduce-scatter; 2 for an all-reduce, which does both"""
    # In NCCL's ring, each rank sends `total` bytes to the next rank (nccl-tests, doc/PERFORMANCE.md, "bus
    # bandwidth"). Only one rank of each node has its next rank on another node.
    total = times * size * (ranks - 1) / ranks
    outside = nodes / ranks if nodes > 1 else 0
    return Sent(total * (1 - outside), total * outside)


def traffic(case: Case) -> dict[str, dict[str, Sent]]:
    """Returns a dict of dicts: phase -> collective -> bytes that a rank sends. The phases "critic" and
    "policy" have these collectives:

    forward: all-gathers in a pack's forward pass
    backward: all-gathers in a pack's backward pass
    reduce: reduce-scatter of a pack's gradients
    all-reduce: sum of the gradients over all copies of the model (--shard_ranks), once an update"""
    cfg, world, local = case.cfg, case.world, case.local
    phases = {name: _collectives(case, name, kept) for name, kept in case.kept.items()}
    # share: bytes of samples that a rank sends to one other rank, if all samples have the maximum length. A
    # token has 8 bytes: an int32 id and a float32 log-prob.
    share = 8 * cfg.samples_per_step * cfg.model_len / world**2
    return phases | {
        "sync": {"gathers": phases["policy"]["forward"]},
        "samples": {"exchange": Sent((local - 1) * share, (world - local) * share)},
    }


def _collectives(case, name, kept):
    """Returns a dict for the model `name`: collective -> bytes that a rank sends. `traffic` describes the
    collectives."""
    shards, params, shape = case.shards, case.params[name], case.models[name]
    # over: number of ranks, and of nodes, that share one copy of the weights; groups: number of copies
    # again: number of ranks (and of nodes) that take part in an all-gather of the backward pass
    over, groups = (shards, -(-shards // case.local)), case.world // shards
    again = over if kept.reshard is True else (kept.reshard or 1,)
    return {
        "forward": sent(case.number * params, *over),
        "backward": sent(case.number * shape.layers * shape.layer, *again),
        "reduce": sent(4 * params, *over),
        "all-reduce": sent(
            4 * params / shards, groups, min(groups, -(-case.world // case.local)), 2
        ),
    }


def _network(case, n):
    """Returns the seconds in which each rank sends `n` (a Sent). Transfers within and between nodes run at
    the same time, so only the longer counts."""
    return max(n.within / case.within, case.local * n.between / case.between)


def _seconds(parts):
    """Returns the seconds of all `parts`. A part is (number of passes, seconds that a pass computes, seconds
    that a pass transfers). FSDP computes and transfers at the same time, so only the longer time counts."""
    return sum(count * max(compute, network) for count, compute, network in parts)


def _passes(case, name, kept, prompt, response):
    """Returns two lists of parts (see `_seconds`):

    1. a forward pass on each pack of a step, without training
    2. all updates of a step: their forward and backward passes, and the optimizer"""
    cfg, shape, length = case.cfg, case.models[name], prompt + response
    tokens = cfg.samples_per_step * length / case.world  # tokens that one rank trains on in a step
    packs = cfg.minibatches * -(-tokens // (cfg.minibatches * cfg.pack_len))
    flop = forward_flops(shape.layers * shape.layer, shape.layers, shape.q, tokens, tokens * length)
    device, share = flop / (MFU * case.gpu.flops) / packs, kept.recompute / shape.layers
    host = shape.layers * (LAYER_HOST + (FSDP_HOST if case.shards > 1 else 0))
    head = (
        _head_seconds(case, shape, tokens * response / length / packs)
        if name == "policy"
        else (0, 0)
    )
    # A forward pass is a third of forward and backward pass, for the device and about for the host.
    forward = max(device, host / 3) + head[0]
    # A backward pass costs two forward passes, and one more in each recomputed layer.
    backward = (
        max(device * (2 + share), host * 2 / 3 + shape.layers * share * RECOMPUTE_HOST) + head[1]
    )
    gather, *back, add_up = (_network(case, n) for n in _collectives(case, name, kept).values())

    # If a rank keeps all gathered weights, only the first forward pass of an update gathers them.
    def forwards(passes, updates):
        gathers = updates if kept.reshard is False else passes
        return [(gathers, forward, gather), (passes - gathers, forward, 0)]

    updates, passes = (cfg.passes_per_step * n for n in (getattr(cfg, f"{name}_updates"), packs))
    optimizer = OPTIMIZER_HOST[case.shards > 1] * shape.layers
    return forwards(packs, 1), [
        *forwards(passes, updates),
        (passes - updates, backward, sum(back)),
        (updates, backward, sum(back) + add_up),
        (updates, optimizer, 0),
    ]


def _head_seconds(case, shape, tokens):
    """Returns the seconds of a forward and of a backward pass of the output layer, for `tokens` tokens. A
    forward pass has one matrix product, a backward pass three: it computes the logits again."""
    product = 2 * tokens * shape.hidden * shape.vocab / (MATMUL * case.gpu.flops)
    forward, backward = (n * tokens * shape.vocab / (STREAM * case.gpu.hbm) for n in HEAD_BYTES)
    # Each chunk reads and writes the fp32 gradient of the output layer's weight.
    count = 4 * tokens * shape.vocab / case.chunk
    backward += count * 8 * shape.vocab * shape.hidden / (STREAM * case.gpu.hbm)
    return product + forward, 3 * product + backward


def decode_seconds(case: Case, prompt: float, response: float) -> float:
    """Returns the seconds in which an engine decodes the responses of a step.

    prompt, response: mean lengths in tokens"""
    cfg, gpu, params = case.cfg, case.gpu, case.params["policy"]
    # To decode one token of each response in a batch, an engine reads the weights and the KV cache once. This
    # costs the time for reading or the time for computing, whichever is longer.
    batch = max(1, min(cfg.max_num_seqs, case.responses, kv_tokens(case) // (prompt + response)))
    read = case.engine_weights + batch * (prompt + response / 2) * case.kv_bytes
    device = max(read / (BANDWIDTH * gpu.hbm), 2 * params * batch / (cfg.tp * MFU * gpu.flops))
    # tokens: of all responses of one engine. steps: decode steps for them, with full batches.
    tokens = cfg.samples_per_step * cfg.tp / case.world * response
    steps = tokens / batch
    of_step, of_response = DECODE_HOST.get(cfg.engine_kind(True), DECODE_HOST["vllm"])
    # The longest response alone needs max_response_len steps.
    host = max(steps, cfg.max_response_len) * of_step + tokens * of_response
    longest = cfg.max_response_len * case.engine_weights / (BANDWIDTH * gpu.hbm)
    return max(steps * device, longest, host)


def moved(case: Case) -> dict[str, float]:
    """Returns a dict: phase -> seconds in which a rank copies state between host and device; {} if the state
    stays on the device."""
    if not case.offloads:
        return {}
    # A model moves with its optimizer's state, to the device and back.
    seconds = {
        name: 2 * STATE_BYTES * n / case.shards / HOST_COPY for name, n in case.params.items()
    }
    weights = 4 * case.params["policy"] / case.shards / HOST_COPY
    seconds |= {"sync": weights, "old_logp": weights}
    if case.cfg.has_ref:
        seconds["ref"] = 4 * case.ref.policy_params / case.shards / HOST_COPY
    return seconds


def seconds(case: Case, prompt: float, response: float) -> dict[str, float]:
    """Returns a dict: phase -> estimated seconds in a step of the run. The item "step" is the sum of all
    phases. "only network" is the part of this sum during which no rank computes. case.gpu must have speeds.

    prompt, response: mean lengths in tokens"""
    cfg, params = case.cfg, case.params["policy"]
    parts = {
        phase: [(1, 0, _network(case, n)) for n in sends.values()]
        for phase, sends in traffic(case).items()
        if phase not in case.models
    }
    parts["sync"].append((1, case.engine_weights / PUSH + WAKE * case.engine_sleeps, 0))
    parts["rollout"] = [(1, decode_seconds(case, prompt, response), 0)]
    forward, updates = {}, {}  # name of a model -> the two results of `_passes`
    for name, kept in case.kept.items():
        forward[name], updates[name] = _passes(case, name, kept, prompt, response)
    if cfg.has_ref:  # time of the policy x parameters of the reference / parameters of the policy
        parts["ref"] = [
            (n * case.ref.policy_params / params, *times) for n, *times in forward["policy"]
        ]
    if cfg.needs_old_logp:
        parts["old_logp"] = forward["policy"]
    if "critic" in forward:
        parts["values"] = forward["critic"]
    parts |= updates
    for phase, time in moved(case).items():
        if phase in parts:
            parts[phase] = [*parts[phase], (1, time, 0)]
    every = [part for found in parts.values() for part in found]
    alone = sum(count * max(network - compute, 0) for count, compute, network in every)
    return {phase: _seconds(found) for phase, found in parts.items()} | {
        "step": _seconds(every),
        "only network": alone,
    }


def extra_seconds(case: Case) -> dict[str, float]:
    """Returns the seconds that a run takes besides its steps: of the start, and those that the first step
    takes longer because it pins host memory."""
    read = case.number * sum(case.params.values()) / case.shards / LOAD
    return {
        "start": START + read,
        "first step, longer by": case.state / PIN if case.offloads else 0.0,
    }


# --- does it fit?


def shortage(case: Case) -> str:
    """Returns a sentence that says which memory is too small; "" if the run fits. The plan for CPUs is not
    exact, so on CPUs a plan of up to twice the available memory counts as fitting."""
    phase, usage = fullest(case)
    if usage["total"] > case.capacity * (1 if case.gpu else 2):
        largest = sorted(usage, key=usage.get, reverse=True)[1:4]  # without the total
        items = ", ".join(f"{item} {gib(usage[item])}" for item in largest)
        return (
            f"phase {phase} needs {gib(usage['total'])} a rank ({items}), but a rank has "
            f"{gib(case.capacity)}"
        )
    tokens, length = kv_tokens(case), case.cfg.engine_len
    if case.gpu and tokens < length:
        return (
            f"the engine's {case.cfg.engine_share:.0%} of {gib(case.capacity)} holds "
            f"{tokens:,} tokens "
            f"beside the weights, but a prompt with its response may have {length:,}"
        )
    if case.offloads and 0 < case.host < case.state * case.local:
        return (
            f"each rank keeps {gib(case.state)} in host memory, but the {case.local} "
            f"ranks of a machine share {gib(case.host)}"
        )
    return ""


def remedy(case: Case) -> str:
    """Returns flags that make the case fit, as text. If no flags help, returns the advice to use a smaller
    model or other devices. No flag changes the algorithm, and the flags in `free` cost only speed.

    Tries single flags, then all flags in `free` together, then all flags in `free` with one more flag. If
    nothing fits, tries 2, 4, 8, … times as many ranks, without flags and with the same flags."""
    cfg, node = case.cfg, case.local
    if (
        case.gpu and case.world <= node
    ):  # a run on one machine, which is assumed to have at least NODE GPUs
        node = max(node, NODE)
    free = {"recompute": "auto", "offload": "on", "pack_len": cfg.model_len, "shard_ranks": "auto"}
    shares = sorted((x / 20 for x in range(4, 20)), key=lambda share: abs(share - cfg.engine_share))
    single = [*free.items(), *(("engine_share", share) for share in shares)]
    single += [("tp", n) for n in (2, 4, 8) if case.engine_sleeps and case.world % n == 0]
    single += [("max_num_seqs", n) for n in (256, 64, 16, 8)]
    changes = [
        base | one
        for base in ({}, free)
        for one in ({}, *({flag: value} for flag, value in single))
    ]
    for ranks in (case.world << doublings for doublings in range(11)):
        local = min(ranks, node)
        for change in changes:
            if shortage(replace(case, world=ranks, local=local, cfg=replace(cfg, **change))):
                continue
            words = [f"{ranks} ranks, {local} a machine,"] if ranks > case.world else []
            words += [
                f"--{flag} {value}" for flag, value in change.items() if getattr(cfg, flag) != value
            ]
            return " ".join(words).rstrip(",")
    return "a smaller --model, or devices with more memory"


def verdict(case: Case) -> str:
    """Returns a line that says whether the case fits, and if not, the `remedy`."""
    if lack := shortage(case):
        return f"does not fit: {lack}; needed: {remedy(case)}"
    phase, usage = fullest(case)
    return f"fits: phase {phase} needs most memory, {gib(usage['total'])} of a rank's {gib(case.capacity)}"


def engine_choice(case: Case) -> str:
    """Returns a line that says which engine samples, and why; "" without a GPU with known speeds."""
    if not (case.gpu and case.gpu.flops):
        return ""
    cfg, kind, costs = case.cfg, case.cfg.engine_kind(True), []
    for engine in ("vllm", "torch") if cfg.tp == 1 else ("vllm",):
        planned = replace(case, cfg=replace(cfg, engine=engine))
        rollout = seconds(planned, cfg.max_prompt_len / 8, cfg.max_response_len / 4)["rollout"]
        needs = sum(_engine_memory(planned).values())
        costs.append(f"{engine} {rollout:,.1f} s and {gib(needs)}")
    why = (
        "auto takes vllm until a GPU has measured both"
        if cfg.engine == "auto"
        else "as --engine says"
    )
    return f"engine: {kind} ({why}); a rollout of quarter length takes about: {', '.join(costs)}"


# --- the plan as a table

# section -> row -> cell, or section -> row -> column -> cell. A cell is a number or a word.
Plan = dict[str, dict]


def plan_of(case: Case) -> Plan:
    """Returns the whole plan (see Plan)."""
    cfg, peaks = case.cfg, {}
    for phase, usage in memory(case):  # keeps, for each phase, the instant with the largest total
        usage = {item: n / GIB for item, n in usage.items()}
        peaks[phase] = max(peaks.get(phase, usage), usage, key=lambda u: u["total"])
    needs = host_need(case) | disk(cfg, **case.params)
    steps, samples = case.steps, cfg.samples_per_step
    plan = {
        "run": {
            "ranks": case.world,
            "ranks of a shard group": case.shards,
            "device": case.gpu.name if case.gpu else "CPU",
            "steps": steps,
            "prompts, at most" if cfg.skip_solved else "prompts": case.prompts
            or f"{ASSUMED_PROMPTS:,} (assumed)",
            "episodes": steps * samples,
        },
        "batches": {
            "prompts a step": cfg.prompts_per_step,
            "samples a prompt": cfg.samples_per_prompt,
            "samples a step": samples,
            "samples a rank": samples / case.world,
            "samples an engine": case.responses,
            "longest pack, tokens": cfg.pack_len,
            "longest sample, tokens": cfg.model_len,
            "tokens a KV cache holds": kv_tokens(case),
        },
        "models": _columns({name: _model_rows(case, name) for name in case.models}),
        "memory of a rank, GiB": _columns(peaks),
        "host and disk, GiB": {name: n / GIB for name, n in needs.items()},
    }
    if case.gpu and case.gpu.flops:
        times = {
            "quarter length": seconds(case, cfg.max_prompt_len / 8, cfg.max_response_len / 4),
            "full length": seconds(case, *case.longest),
        }
        for phases in times.values():
            phases |= extra_seconds(case)
            phases |= {f"{n:,} steps, hours": n * phases["step"] / 3600 for n in (1000, steps)}
        plan["estimated seconds"] = _columns(times)
        plan["a rank sends, GiB"] = {
            f"{phase} {collective}": {
                "in its node": n.within / GIB,
                "between nodes": n.between / GIB,
            }
            for phase, sends in traffic(case).items()
            for collective, n in sends.items()
        }
    return plan


def _model_rows(case, name):
    cfg, updates, (recompute, reshard) = (
        case.cfg,
        getattr(case.cfg, f"{name}_updates"),
        case.kept[name],
    )
    steps = case.steps - cfg.freeze_policy_steps if name == "policy" else case.steps
    return {
        "parameters": case.params[name],
        "updates": steps * cfg.passes_per_step * updates,
        "samples an update": cfg.samples_per_step / updates,
        "layers recomputed": recompute or "none",
        "weights kept gathered": "none"
        if reshard is True
        else f"1/{reshard}"
        if reshard
        else "all",
    }


def _columns(columns):
    """Turns column -> name -> number into name -> column -> number. A missing number is 0."""
    names = dict.fromkeys(name for numbers in columns.values() for name in numbers)
    return {
        name: {column: numbers.get(name, 0) for column, numbers in columns.items()}
        for name in names
    }


def as_text(plan: Plan) -> list[str]:
    """Returns the plan as lines of at most 80 characters (94 with a critic and --ref_model)."""
    lines = []
    for section, rows in plan.items():
        first = next(iter(rows.values()))
        columns = first if isinstance(first, dict) else ()
        lines += ["", f"{section:24}" + "".join(f"{column:>14}" for column in columns)]
        for name, value in rows.items():
            cells = value.values() if isinstance(value, dict) else [value]
            lines.append(f"  {name:22}" + "".join(f" {_shown(x):>13}" for x in cells))
    return lines


def _shown(x):
    if isinstance(x, str):
        return x
    return f"{x:,.1f}" if x % 1 and x < 100 else f"{x:,.0f}"


# --- the command


@dataclass(frozen=True)
class PlanConfig(Config):
    """The flags of tools.plan: all flags of train.py, and two more."""

    gpu: Literal[tuple(GPUS)] = "H100"  # the GPU to plan for; --device cpu plans for CPUs
    json: bool = False  # print JSON: the plan, whether it fits, and all flags


def main() -> None:
    """Print the plan."""
    cfg = configs.parse(prog="tools.plan", kind=PlanConfig)
    prompts, world = 0, cfg.ranks or 1
    with suppress(UserError):  # without the data, `prompts` is 0
        prompts = sum(1 for path in cfg.data for _ in read_rows(path))
    check_ranks(cfg, world)
    shapes = [
        read_shape(path or cfg.model) for path in (cfg.model, cfg.critic_model, cfg.ref_model)
    ]
    gpu, host = (None, host_memory()) if cfg.device == "cpu" else (GPUS[cfg.gpu], 0.0)
    case = Case(cfg, world, shapes, gpu, min(world, NODE), host, prompts)
    plan = plan_of(case)
    if cfg.json:
        lines = {"verdict": verdict(case), "engine": engine_choice(case)}
        print(json.dumps(plan | lines | {"config": vars(cfg)}))
    else:
        lines = [textwrap.fill(line, 80) for line in (verdict(case), engine_choice(case)) if line]
        print(*as_text(plan), "", *lines, sep="\n")


if __name__ == "__main__":
    with configs.user_errors("tools.plan"):
        main()
