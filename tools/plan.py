"""What a run will need, before it starts: batches, memory, disk and seconds.

    python -m tools.plan orz-7b --layout production [--gpu H200] [--json] [flags of train.py]

Arithmetic on the config and on the sizes in a model's config.json. It needs no torch and no device. A run
makes the same plan for the devices that it finds, prints the plan's first section, and refuses what can't fit
them.

Memory is counted at the instants of a step when one rank's device may be fullest, as dist.py, model.py and
train.py use it. Seconds are estimates from datasheets, right within a factor of about two.
"""

import json
import textwrap
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import configs
from configs import CHUNK_BYTES, GIB, NODE, Config, UserError, gib, require
from grading.rows import read_rows

STATE_BYTES = 12  # per parameter, in memory and in a checkpoint: fp32 weight and AdamW's two fp32 moments
CHUNKS_ALIVE = 3  # chunks of CHUNK_BYTES alive at once while model.py makes log-probs
SAMPLER_COPIES = 6  # copies that an engine's sampler makes of its fp32 logits
CUDA_CONTEXT = 0.6 * GIB  # per GPU, outside PyTorch's allocator: context and kernels
NCCL_BUFFERS = 0.9 * GIB  # per GPU, outside PyTorch's allocator
ENGINE_BUFFERS = 1.5 * GIB  # vLLM's activations and CUDA graphs, without its sampler
SLEEPING_ENGINE = 0.5 * GIB  # GPU memory that vLLM keeps at sleep level 2; a 7B model keeps 0.48 GiB
LIBRARIES = 5 * GIB  # host memory of one rank's libraries: torch, CUDA, vLLM
HOLES = 0.015  # unused memory between a pack's activations, as a share of the activations
HEADROOM = 0.08  # share of a device that --recompute auto leaves free
MFU = 0.35  # share of a GPU's peak FLOP/s that training reaches; torchtitan has 33 to 39 % (8B model, H100)
BANDWIDTH = 0.6  # share of a datasheet's bandwidth that is reached
ASSUMED_PROMPTS = 57_000  # prompts of an epoch where no data can be read: about ORZ's


class GPU(NamedTuple):
    """A GPU's datasheet. A GPU that is not in GPUS has a known memory size and zeros for the rates."""

    name: str
    memory: float  # bytes, as torch reports them
    flops: float = 0.0  # FLOP/s, dense bf16
    hbm: float = 0.0  # bytes/s from its own memory


GPUS = {gpu.name: gpu for gpu in (
    GPU("H100", 79.1 * GIB, 989e12, 3.35e12),
    GPU("H200", 139.8 * GIB, 989e12, 4.80e12),
    GPU("B200", 178.3 * GIB, 2250e12, 8.00e12),
    GPU("A100-80", 79.2 * GIB, 312e12, 2.04e12),
    GPU("A100-40", 39.4 * GIB, 312e12, 1.56e12),
    GPU("L40S", 44.4 * GIB, 362e12, 0.86e12),
    GPU("4090", 23.5 * GIB, 165e12, 1.01e12))}


def gpu_of(device: str, memory: float) -> GPU:
    """Returns the GPU that the driver calls `device`, with `memory` bytes."""
    same = (gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in device)
    return next(same, GPU(device, 0))._replace(name=device, memory=memory)


# --- the model


@dataclass
class Shape:
    """The sizes of a dense decoder like Llama or Qwen2."""

    name: str  # the model; in KNOWN, a part of the model's path
    layers: int
    hidden: int
    heads: int
    inner: int  # width of the MLP
    vocab: int
    kv_heads: int
    tied: bool = False  # whether the head is the embedding
    head_dim: int = 0  # 0: hidden / heads
    qkv_bias: bool = True  # as in Qwen2

    def __post_init__(self) -> None:
        """Compute the derived sizes.

        q, kv: width of the queries of all heads, and of the keys of all heads.
        layer: parameters of one decoder layer.
        policy_params: parameters of the language model. critic_params: parameters of the value model.
        Two norms a layer are counted, as in Llama. Further norms are below 0.1 % of a model."""
        d, self.q = self.hidden, self.heads * (self.head_dim or self.hidden // self.heads)
        self.kv = self.q * self.kv_heads // self.heads
        biases = self.q + 2 * self.kv if self.qkv_bias else 0
        self.layer = d * (2 * self.q + 2 * self.kv + 3 * self.inner) + 2 * d + biases
        # A value model: the layers, the embedding, the last norm, and one vector as the head.
        self.critic_params = self.layers * self.layer + self.vocab * d + 2 * d
        self.policy_params = self.critic_params - d + (0 if self.tied else self.vocab * d)


KNOWN = {
    "0.5b": Shape("Qwen2.5-0.5B", 24, 896, 14, 4864, 151936, 2, tied=True),
    "1.5b": Shape("Qwen2.5-1.5B", 28, 1536, 12, 8960, 151936, 2, tied=True),
    "7b": Shape("Qwen2.5-7B", 28, 3584, 28, 18944, 152064, 4),
    "32b": Shape("Qwen2.5-32B", 64, 5120, 40, 27648, 152064, 8),
    "8b": Shape("Llama-3.1-Tulu-3-8B", 32, 4096, 32, 14336, 128256, 8, qkv_bias=False),
    "tiny": Shape("tiny-base", 2, 128, 4, 384, 263, 2, tied=True),  # of tools/tiny.py
}
# Model types that use the embedding as the output head, unless config.json says otherwise.
TIED = ("gemma3_text", "smollm3", "cohere", "ernie4_5")


def shape_of(config: dict, name: str) -> Shape:
    """Returns the shape that a config.json describes. Raises UserError where a size is missing."""
    get, family = config.get, config.get("model_type", "")
    sizes = "num_hidden_layers hidden_size num_attention_heads intermediate_size vocab_size".split()
    for size in sizes:
        require(bool(get(size)), f"the config of {name} ({family}) has no {size}",
                "a dense decoder like Llama or Qwen")
    return Shape(name, *map(get, sizes), get("num_key_value_heads") or get("num_attention_heads"),
                 get("tie_word_embeddings", family in TIED), get("head_dim") or 0,
                 get("attention_bias") or family == "qwen2")


def read_shape(path: str) -> Shape:
    """Returns the shape of the model in folder `path`. If there is no such folder, returns the shape of KNOWN
    whose name is part of `path`. Raises UserError where neither exists."""
    file = Path(path) / "config.json"
    known = [shape for shape in KNOWN.values() if shape.name in path]
    if known and not file.is_file():
        return known[0]
    require(file.is_file(), f"no {file}", "--model with a Hugging Face model folder")
    return shape_of(json.loads(file.read_bytes()), path)


def forward_flops(params: float, layers: int, width: int, tokens: float, square_lengths: float) -> float:
    """Returns the FLOP of a forward pass: 2 for each parameter and token, plus the FLOP of attention.

    width: width of the queries of all heads together.
    square_lengths: sum of the samples' squared lengths. Causal attention compares half that number of token
    pairs. Each pair costs two products of 2 x width FLOP.
    `tokens` and `square_lengths` may also be numpy arrays.
    """
    return 2 * params * tokens + 2 * layers * width * square_lengths


# --- the case


@dataclass
class Case:
    """What is planned: a config, its models and the machines."""

    cfg: Config
    world: int  # ranks
    shapes: list[Shape]  # 1. the policy; 2. the model that a critic starts from
    gpu: GPU | None  # None: on CPUs
    local: int = 1  # ranks on one machine
    host: float = 0.0  # bytes of free memory on one machine; 0: unknown
    prompts: int = 0  # prompts of an epoch; 0: unknown, so ASSUMED_PROMPTS

    def __post_init__(self) -> None:
        """Set the numbers that follow from the fields."""
        cfg, on_gpu = self.cfg, self.gpu is not None
        self.policy, critic = self.shapes
        # The trained models, and the number of parameters of each model.
        self.models = {"critic": critic} if cfg.algo == "ppo" else {}
        self.models["policy"] = self.policy
        self.params = {name: getattr(shape, f"{name}_params") for name, shape in self.models.items()}
        self.steps = cfg.with_steps(self.prompts or ASSUMED_PROMPTS).steps
        # Bytes of one number in forward, backward and gathered weights.
        self.number = 2 if cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and on_gpu) else 4
        # Every engine but the torch engine is counted like vLLM. Such an engine takes --engine_share of a
        # GPU's memory, and frees that memory when it sleeps.
        self.engine_sleeps = cfg.engine_kind(on_gpu) != "torch"
        # Whether a model is moved to host memory while it is not in use.
        self.offloads = cfg.offload and on_gpu
        # Bytes of the engine's weights on one rank.
        self.engine_weights = self.number * self.params["policy"] / cfg.tp
        # Bytes of one rank's GPU. On CPUs: the rank's part of the machine's free memory.
        self.capacity = self.gpu.memory if self.gpu else self.host / self.local or float("inf")
        # Ranks that share one copy of weights and optimizer.
        self.shards = cfg.shard_ranks or self.world
        # Bytes of one rank's shards: in a checkpoint, and in memory between updates. In memory the reference
        # model's shards are added if there is a KL term.
        self.checkpoint = STATE_BYTES * sum(self.params.values()) / self.shards
        self.state = self.checkpoint + (4 * self.params["policy"] / self.shards if cfg.kl_coef else 0)
        # Responses that one engine samples in a step, with the extra responses of --carry.
        engines = max(self.world // cfg.tp, 1)
        self.responses = -(-(cfg.prompts_per_step + cfg.extra_prompts) // engines) * cfg.samples_per_prompt
        # Bytes of one token's keys and values on one rank. Each rank keeps at least one key head.
        width = max(self.policy.kv // cfg.tp, self.policy.q // self.policy.heads)
        self.kv_bytes = 2 * self.policy.layers * width * self.number

    @cached_property
    def recompute(self) -> dict[str, int | None]:
        """Returns model name -> number of recomputed layers: see `recomputed`."""
        return {name: recomputed(self, name) for name in self.models}


def recomputed(case: Case, name: str) -> int | None:
    """Returns the number of layers, counted from the first layer, that the backward pass recomputes in whole.

    Every other layer keeps the results of its matrix products and of attention, which cost nearly all its
    FLOP, and recomputes the rest. None: every layer keeps all activations, and nothing is recomputed.

    --recompute auto tries None, 0, 1, …, all layers in this order. It takes the first one whose planned peak
    leaves HEADROOM of the device free."""
    wanted, layers = case.cfg.recompute, case.models[name].layers
    fixed = {"none": None, "layers": layers}
    if wanted != "auto":
        return fixed[wanted] if wanted in fixed else min(int(wanted), layers)
    for whole in (None, *range(layers)):  # from the most memory to the least
        peak = max(usage["total"] for usage in _update_instants(case, name, whole))
        if peak <= (1 - HEADROOM) * case.capacity:
            return whole
    return layers


# --- memory of the device

Usage = dict[str, float]  # item -> bytes of one rank's device at one instant; on a CPU, of its memory


def _per_token(case, shape, whole):
    """Returns two numbers of bytes per token:

    1. the activations that all layers together keep for the backward pass;
    2. the activations that the backward pass recomputes in one layer, the last.

    `whole`: the number of layers that are recomputed in whole, as `recomputed` returns it."""
    d, b = shape.hidden, case.number
    # The inputs of norms, matrix products, attention and the gate. The output of attention is counted twice,
    # for packs whose segments share a prefix. Such a pack keeps two copies: one with the prefix repeated in
    # front of each segment, and one with the prefix stored once.
    everything = b * (4 * d + 3 * shape.q + 2 * shape.kv + 4 * shape.inner)
    # The layer's input, the results of the layer's seven matrix products, the result of attention, and
    # attention's log-sums in fp32 (4 bytes a head).
    products = b * (3 * d + 2 * shape.q + 2 * shape.kv + 2 * shape.inner) + 4 * shape.heads
    if whole is None:
        return shape.layers * everything, 0
    again = everything if whole == shape.layers else everything - products
    return whole * b * d + (shape.layers - whole) * products, again


def _allocator_loss(case, shape, root, logits, kept):
    """Returns the bytes that torch's allocator holds beyond the tensors in use. {} on CPUs.

    root: parameters of the root (embedding, last norm, head).
    logits: bytes of the chunks of logits that are alive at once.
    kept: bytes of the activations that wait for the backward pass.

    gather buffers: FSDP gathers on a stream of its own, and the allocator gives each stream its own memory.
    This memory holds the root and one layer, each with a copy of this rank's shards.
    fragments: free memory that later tensors do not fit into. The allocator leaves it where an fp32 gradient
    of a layer, fp32 root shards or chunks of logits were, and between activations (HOLES).
    bench/nullgpu/memory.py compares the sum with the bytes that a driver counts."""
    if not case.gpu:
        return {}
    gathered = case.number * (root + shape.layer) * (1 + 1 / case.shards)
    return {"gather buffers": gathered if case.shards > 1 else 0,
            "fragments": 4 * shape.layer + 4 * root / case.shards + logits + HOLES * kept}


def _update_instants(case, name, whole):
    """Returns the memory at the five instants when the update of a model may need most of it.

    name: "policy" or "critic". whole: the number of layers that are recomputed in whole, as `recomputed`
    returns it. In the code, T is the number of tokens of the largest pack."""
    cfg, b, shape, params = case.cfg, case.number, case.models[name], case.params[name]
    d, layer = shape.hidden, shape.layer
    # The root (embedding, last norm, head) is gathered when the forward pass begins. The root stays gathered
    # until the backward pass ends.
    root = params - shape.layers * layer
    words = shape.vocab if name == "policy" else 0  # the critic's head is one vector and makes no logits
    head = d * max(words, 1)
    minibatch = -(-cfg.samples_per_step * cfg.model_len // (cfg.minibatches * case.world))
    T = min(cfg.pack_len, minibatch)
    kept, again = _per_token(case, shape, whole)
    kept = T * (kept + 2 * b * d)
    # The backward pass of the MLP allocates the gradients of gate, up and hidden states. The gradient of
    # gate x up needs no further memory: it reuses the memory of gate x up.
    working = T * (again + b * (2 * shape.inner + 3 * d))
    logits = CHUNKS_ALIVE * min(CHUNK_BYTES, 4 * words * T)
    shard = 4 * params / case.shards
    at_rest = {"weights": shard, "gradients": shard, "AdamW": 2 * shard}
    at_rest |= _allocator_loss(case, shape, root, logits, kept) | _asleep(case)
    instants = [
        # 1. Backward pass of the head. The activations of all layers are alive. The head's gradient exists
        # twice: the fp32 sum over chunks, and its cast to b bytes a number.
        {"gathered weights": b * root, "activations": kept, "logits": logits,
         "whole gradients": (4 + b) * head},
        # 2. Backward pass of a layer. The head's gradient is alive until the root is reduced. The previous
        # layer's fp32 gradient is still being reduced to shards.
        {"gathered weights": b * (root + layer), "activations": kept + working,
         "whole gradients": b * head + 4 * layer},
        # 3. End of a layer's backward pass. Alive are the head's gradient, the previous layer's fp32
        # gradient, this layer's gradient, and an fp32 copy of this layer's gradient.
        {"gathered weights": b * (root + layer), "activations": kept,
         "whole gradients": b * head + (b + 8) * layer},
        # 4. End of the backward pass. Alive are the root's gradient, an fp32 copy of the root's gradient,
        # and one layer's fp32 gradient.
        {"whole gradients": (4 + b) * root + 4 * layer},
        # 5. AdamW's step. AdamW allocates one temporary tensor as large as the weight shards.
        {"AdamW's step": shard}]
    return [_with_total(case, at_rest | usage) for usage in instants]


def _engine_memory(case):
    """Returns the bytes of an awake engine by item. On a GPU the KV cache of vLLM takes all memory of
    --engine_share that the other items leave."""
    cfg, policy = case.cfg, case.policy
    rows = cfg.max_num_seqs if case.engine_sleeps else min(cfg.max_num_seqs, case.responses)
    buffers = 4 * SAMPLER_COPIES * rows * policy.vocab
    cache = rows * cfg.engine_len * case.kv_bytes
    if case.engine_sleeps and case.gpu:
        buffers += ENGINE_BUFFERS
        cache = max(cfg.engine_share * case.gpu.memory - case.engine_weights - buffers, 0.0)
    elif case.engine_sleeps:
        cache = GIB / 4  # as engines/vllm_engine.py sets it
    return {"engine weights": case.engine_weights, "engine buffers": buffers, "KV cache": cache}


def _asleep(case):
    """Returns the bytes of the engine while models are trained. The torch engine keeps its weights."""
    if not case.engine_sleeps:
        return {"engine weights": case.engine_weights}
    return {"sleeping engine": SLEEPING_ENGINE} if case.gpu else {}


def memory(case: Case) -> list[tuple[str, Usage]]:
    """Returns the instants of a step in the order of time. Each is a pair:

    1. the phase: "sync", "rollout", or the name of the model that is updated;
    2. the bytes of each item, with their sum as "total"."""
    policy, params = case.policy, case.params["policy"]
    # Sync gathers one layer or the root at a time. The gather needs a buffer and the gathered weights.
    largest = max(params - policy.layers * policy.layer, policy.layer)
    own_part = 1 / case.shards if case.shards > 1 else 0
    sync = {"weights": 4 * params / case.shards, "gathered weights": case.number * largest * (2 + own_part)}
    # engines/vllm_engine.py copies embedding and head. FSDP would free the originals too early for vLLM.
    if case.engine_sleeps and (policy.tied or policy.vocab % (64 * case.cfg.tp)):
        sync["embedding's copy"] = case.number * policy.vocab * policy.hidden * (1 if policy.tied else 2)
    sync |= {"engine weights": case.engine_weights} | _asleep(case)
    instants = [("sync", _with_total(case, sync)), ("rollout", _with_total(case, _engine_memory(case)))]
    for name in case.models:
        instants += [(name, usage) for usage in _update_instants(case, name, case.recompute[name])]
    return instants


def _with_total(case, usage):
    """Returns the usage with two more items: the total, and the memory of CUDA together with the training
    state that is on the device without being used at this instant."""
    idle = 0.0 if case.offloads else case.state - usage.get("weights", 0.0) - usage.get("AdamW", 0.0)
    cuda = CUDA_CONTEXT + NCCL_BUFFERS if case.gpu else 0
    usage = usage | {"CUDA and idle state": cuda + idle}
    return {"total": sum(usage.values())} | usage


def fullest(case: Case) -> tuple[str, Usage]:
    """Returns the instant with the largest total: 1. the phase, 2. the bytes of each item."""
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
    """Returns bytes of host memory by item. One rank needs memory for its offloaded state, for a copy of its
    part of a checkpoint, and for libraries. "machine" is the need of all ranks of one machine; without GPUs
    it includes the memory of training."""
    rank = {"rank's waiting state": case.state if case.offloads else 0,
            "rank's checkpoint copy": case.checkpoint,
            "rank's libraries": LIBRARIES if case.gpu else LIBRARIES / 10}
    training = 0 if case.gpu else fullest(case)[1]["total"]
    return rank | {"machine": case.local * (sum(rank.values()) + training)}


def disk(cfg: Config, policy: int, critic: int = 0) -> dict[str, int]:
    """Returns bytes of one checkpoint, of the bf16 exports, and of all files of the run on the disk.

    policy, critic: numbers of parameters. A checkpoint contains the reference model only if that model
    changes during the run."""
    checkpoint, exports = STATE_BYTES * (policy + critic), 2 * (policy + critic)
    if cfg.keeps_ref:
        checkpoint += 4 * policy
    count = cfg.keep + 1 + bool(cfg.keep_best and cfg.eval_data)  # + 1: the one that is being written
    return {"disk, a checkpoint": checkpoint, "disk, exports": exports,
            "disk, all": count * checkpoint + exports}


def seconds(case: Case, prompt: float, response: float) -> dict[str, float]:
    """Returns the estimated seconds of a step by phase, with the sum as "step".

    prompt, response: mean lengths in tokens. The GPU must be one of GPUS. Communication is not counted."""
    cfg, gpu, params, length = case.cfg, case.gpu, case.params["policy"], prompt + response
    flops, hbm = MFU * gpu.flops, BANDWIDTH * gpu.hbm
    tokens = cfg.samples_per_step * length / case.world  # of this rank
    # A decode step reads the weights and the KV cache once. Rollout takes at least as long as the decode
    # steps of one response of maximal length.
    batch = max(1, min(cfg.max_num_seqs, case.responses, kv_tokens(case) // length))
    read = case.engine_weights + batch * (prompt + response / 2) * case.kv_bytes
    decode = max(read / hbm, 2 * params * batch / (cfg.tp * flops))
    longest = cfg.max_response_len * case.engine_weights / hbm
    rollout = cfg.samples_per_step * cfg.tp / case.world / batch * response * decode
    times = {"rollout": max(rollout, longest)}
    forward = {  # model name -> seconds of one forward pass over this rank's tokens
        name: forward_flops(case.params[name], shape.layers, shape.q, tokens, tokens * length) / flops
        for name, shape in case.models.items()}
    if cfg.kl_coef:
        times["ref"] = forward["policy"]
    if cfg.updates_per_step > 1 or (cfg.kl_coef and cfg.kl_in == "reward"):
        times["old_logp"] = forward["policy"]
    if "critic" in forward:
        times["values"] = forward["critic"]
    for name, shape in case.models.items():
        # The backward pass costs two forward passes; recomputed layers cost one more.
        passes = cfg.passes_per_step * (3 + (case.recompute[name] or 0) / shape.layers)
        times[name] = passes * forward[name]
    return times | {"step": sum(times.values())}


# --- does it fit?


def shortage(case: Case) -> str:
    """Returns which memory is too small for this run, as a sentence; "" if the run fits.

    On a stub of the CUDA driver a run takes 93 to 100 % of its planned memory
    (bench/results/nullgpu-memory.md). The plan for CPUs is less exact. There the run is refused only if the
    planned memory is more than twice the available memory."""
    phase, usage = fullest(case)
    if usage["total"] > case.capacity * (1 if case.gpu else 2):
        largest = sorted(usage, key=usage.get, reverse=True)[1:4]  # without the total
        items = ", ".join(f"{item} {gib(usage[item])}" for item in largest)
        return f"phase {phase} takes {gib(usage['total'])} a rank ({items}), which has {gib(case.capacity)}"
    tokens, length = kv_tokens(case), case.cfg.engine_len
    if case.gpu and tokens < length:
        return (f"the engine's {case.cfg.engine_share:.0%} of {gib(case.capacity)} holds {tokens:,} tokens "
                f"beside its weights, and a prompt with its response takes {length:,}")
    if case.offloads and 0 < case.host < case.state * case.local:
        return (f"each rank keeps {gib(case.state)} on the host, and {case.local} share a machine that has "
                f"{gib(case.host)}")
    return ""


def remedy(case: Case) -> str:
    """Returns flags that make the case fit, as text. None of them changes the algorithm.

    free: flags that save memory and cost only speed.
    single: changes of one flag.
    changes: all changes to try, in order. First each single change alone, then all free flags together, then
    all free flags with one further change. If none fits, the same list is tried with 2, 4, … times the
    ranks."""
    cfg, node = case.cfg, case.local
    if case.gpu and case.world <= node:  # the run is on one machine, and that machine may have more GPUs
        node = max(node, NODE)
    free = {"recompute": "auto", "offload": True, "pack_len": cfg.model_len, "shard_ranks": 0}
    shares = sorted((x / 20 for x in range(4, 20)), key=lambda share: abs(share - cfg.engine_share))
    single = [{flag: value} for flag, value in free.items()]  # the free ones cost only speed
    single += [{"engine_share": share} for share in shares]
    single += [{"tp": n} for n in (2, 4, 8) if case.engine_sleeps and case.world % n == 0]
    single += [{"max_num_seqs": n} for n in (256, 128, 64, 32, 16, 8)]
    changes = [base | one for base in ({}, free) for one in ({}, *single)]
    for ranks in (case.world << doublings for doublings in range(11)):
        local = min(ranks, node)
        for change in changes:
            if shortage(replace(case, world=ranks, local=local, cfg=replace(cfg, **change))):
                continue
            words = [f"{ranks} ranks, {local} a machine"] if ranks > case.world else []
            words += [f"--{flag} {value}".removesuffix(" True") for flag, value in change.items()
                      if getattr(cfg, flag) != value]
            return " ".join(words)
    return "a smaller --model, or devices with more memory"


def verdict(case: Case) -> str:
    """Returns one line: whether the case fits, and if not, the `remedy`."""
    if lack := shortage(case):
        return f"does not fit: {lack}; needed: {remedy(case)}"
    phase, usage = fullest(case)
    return f"fits: phase {phase} takes most, {gib(usage['total'])} of a rank's {gib(case.capacity)}"


# --- the plan as a table

Plan = dict[str, dict]  # section -> name -> a number, a word, or a dict: column -> number or word


def plan_of(case: Case) -> Plan:
    """Returns the whole plan. plan.json and --json contain this dict; `as_text` makes a table of it.
    docs/faq.md says how other libraries name the batches."""
    cfg, peaks = case.cfg, {}
    for phase, usage in memory(case):  # keeps the instant of each phase with the largest total
        usage = {item: n / GIB for item, n in usage.items()}
        peaks[phase] = max(peaks.get(phase, usage), usage, key=lambda usage: usage["total"])
    needs = host_need(case) | disk(cfg, **case.params)
    steps, samples = case.steps, cfg.samples_per_step
    plan = {
        "run": {
            "ranks": case.world, "device": case.gpu.name if case.gpu else "CPU", "steps": steps,
            "prompts": case.prompts or f"{ASSUMED_PROMPTS:,} (assumed)", "episodes": steps * samples},
        "batches": {
            "prompts a step": cfg.prompts_per_step, "samples a prompt": cfg.samples_per_prompt,
            "samples a step": samples, "samples a rank": samples / case.world,
            "samples an engine": case.responses, "longest pack, tokens": cfg.pack_len,
            "longest sample, tokens": cfg.model_len, "tokens a KV cache holds": kv_tokens(case)},
        "models": _columns({name: _model_rows(case, name) for name in case.models}),
        "memory of a rank, GiB": _columns(peaks),
        "host and disk, GiB": {name: n / GIB for name, n in needs.items()}}
    if case.gpu and case.gpu.flops:
        times = {"quarter length": seconds(case, cfg.max_prompt_len / 8, cfg.max_response_len / 4),
                 "full length": seconds(case, cfg.model_len - cfg.max_response_len, cfg.max_response_len)}
        plan["estimated seconds"] = _columns(times)
        for length, phases in times.items():
            plan["run"][f"hours, {length}"] = steps * phases["step"] / 3600
    return plan


def _model_rows(case, name):
    cfg, updates, whole = case.cfg, getattr(case.cfg, f"{name}_updates"), case.recompute[name]
    steps = case.steps - cfg.freeze_policy_steps if name == "policy" else case.steps
    return {"parameters": case.params[name], "updates": steps * cfg.passes_per_step * updates,
            "updates a pass": updates, "prompts an update": cfg.prompts_per_step / updates,
            "samples an update": cfg.samples_per_step / updates,
            "layers recomputed": "none" if whole is None else whole, "ranks a copy": case.shards}


def _columns(columns):
    """Swaps the two keys. Takes column -> name -> number and returns name -> column -> number."""
    names = dict.fromkeys(name for numbers in columns.values() for name in numbers)
    return {name: {column: numbers.get(name, 0) for column, numbers in columns.items()} for name in names}


def as_text(plan: Plan) -> list[str]:
    """Returns the plan as lines of at most 80 columns. A line has a name and the numbers of that name."""
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
    """The flags of train.py, and the flags that only tools.plan has."""

    gpu: Literal[tuple(GPUS)] = "H100"  # the GPU to plan for; --device cpu plans for CPUs
    json: bool = False  # print JSON: the plan, the verdict and all flags


def main() -> None:
    """`python -m tools.plan PRESET [--gpu NAME] [--json] [flags of train.py]`: print the plan."""
    cfg = configs.parse(prog="tools.plan", kind=PlanConfig)
    prompts, world = 0, cfg.ranks or 1
    with suppress(UserError):  # a plan needs no data
        prompts = sum(1 for path in cfg.data for _ in read_rows(path))
    shapes = [read_shape(cfg.model), read_shape(cfg.critic_model or cfg.model)]
    gpu, host = (None, host_memory()) if cfg.device == "cpu" else (GPUS[cfg.gpu], 0.0)
    case = Case(cfg, world, shapes, gpu, min(world, NODE), host, prompts)
    plan = plan_of(case)
    if cfg.json:
        print(json.dumps(plan | {"verdict": verdict(case), "config": vars(cfg)}, indent=1))
    else:
        print(*as_text(plan), "", textwrap.fill(verdict(case), 80), sep="\n")


if __name__ == "__main__":
    with configs.user_errors("tools.plan"):
        main()
