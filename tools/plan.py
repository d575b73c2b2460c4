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

STATE_BYTES = 12  # per parameter, stored and in a checkpoint: weight and AdamW's two moments, fp32
CHUNKS_ALIVE = 3  # chunks of CHUNK_BYTES alive at once while model.py makes log-probs
SAMPLER_COPIES = 6  # copies that an engine's sampler makes of its fp32 logits
CUDA_CONTEXT = 0.6 * GIB  # per GPU, outside PyTorch's allocator: context and kernels
NCCL_BUFFERS = 0.9 * GIB  # per GPU, outside PyTorch's allocator
ENGINE_BUFFERS = 1.5 * GIB  # vLLM's activations and CUDA graphs, without its sampler
SLEEPING_ENGINE = 0.5 * GIB  # what vLLM keeps of a GPU at sleep level 2, without CUDA graphs; 0.48 for a 7B
LIBRARIES = 5 * GIB  # host memory of one rank's libraries: torch, CUDA, vLLM
HOLES = 0.015  # unused memory between a pack's activations, as a share of them
HEADROOM = 0.08  # share of a device that --recompute auto leaves free
MFU = 0.35  # share of a GPU's peak FLOP/s that training reaches; torchtitan: 33 to 39 % on H100s, 8B model
BANDWIDTH = 0.6  # share of a datasheet's bandwidth that is reached
ASSUMED_PROMPTS = 57_000  # prompts of an epoch where no data can be read: about ORZ's


class GPU(NamedTuple):
    """A GPU's datasheet. Of a GPU that isn't in GPUS only the memory is known."""

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
    """The GPU that the driver names `device`, with `memory` bytes."""
    same = (gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in device)
    return next(same, GPU(device, 0))._replace(name=device, memory=memory)


# --- the model


@dataclass
class Shape:
    """The sizes of a dense decoder like Llama or Qwen2."""

    name: str  # where the sizes come from; of a known model, a part of its path
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
        """Set what follows from the sizes. q, kv: widths of all heads' queries and keys. layer,
        policy_params, critic_params: parameters of one decoder layer, of the language model, of the value
        model. Norms beyond Llama's two a layer are not counted: below 0.1 % of a model."""
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
# Model types whose head is the embedding unless the config denies it.
TIED = ("gemma3_text", "smollm3", "cohere", "ernie4_5")


def shape_of(config: dict, name: str) -> Shape:
    """The shape that a config.json describes. Raises UserError where a size is missing."""
    get, family = config.get, config.get("model_type", "")
    sizes = "num_hidden_layers hidden_size num_attention_heads intermediate_size vocab_size".split()
    for size in sizes:
        require(bool(get(size)), f"the config of {name} ({family}) has no {size}",
                "a dense decoder like Llama or Qwen")
    return Shape(name, *map(get, sizes), get("num_key_value_heads") or get("num_attention_heads"),
                 get("tie_word_embeddings", family in TIED), get("head_dim") or 0,
                 get("attention_bias") or family == "qwen2")


def read_shape(path: str) -> Shape:
    """The shape of the model in folder `path`. Without the folder, the known shape whose name is in `path`.
    Raises UserError."""
    file = Path(path) / "config.json"
    known = [shape for shape in KNOWN.values() if shape.name in path]
    if known and not file.is_file():
        return known[0]
    require(file.is_file(), f"no {file}", "--model with a Hugging Face model folder")
    return shape_of(json.loads(file.read_bytes()), path)


def forward_flops(params: float, layers: int, width: int, tokens: float, square_lengths: float) -> float:
    """FLOP of a forward pass: 2 per parameter and token, and attention's. `tokens` and `square_lengths` may
    also be numpy arrays.

    width: of the queries of all heads together. square_lengths: sum of the samples' squared lengths. Causal
    attention has half of them as pairs of tokens, and two products of 2 x width FLOP for each pair.
    """
    return 2 * params * tokens + 2 * layers * width * square_lengths


# --- the case


@dataclass
class Case:
    """What is planned: a config, its models and the machines."""

    cfg: Config
    world: int  # ranks
    shapes: list[Shape]  # of the policy, and of the model that a critic starts from
    gpu: GPU | None  # None: on CPUs
    local: int = 1  # ranks on one machine
    host: float = 0.0  # bytes of free memory on one machine; 0: unknown
    prompts: int = 0  # prompts of an epoch; 0: unknown, so ASSUMED_PROMPTS

    def __post_init__(self) -> None:
        """Set the numbers that follow from the fields."""
        cfg, on_gpu = self.cfg, self.gpu is not None
        self.policy, critic = self.shapes
        # The trained models, and the parameters of each.
        self.models = {"critic": critic} if cfg.algo == "ppo" else {}
        self.models["policy"] = self.policy
        self.params = {name: getattr(shape, f"{name}_params") for name, shape in self.models.items()}
        self.steps = cfg.with_steps(self.prompts or ASSUMED_PROMPTS).steps
        # Bytes of a number in compute and gathers.
        self.number = 2 if cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and on_gpu) else 4
        # Any engine but torch's is counted like vLLM: on a GPU it takes --engine_share of the memory, and
        # gives it back when it sleeps.
        self.engine_sleeps = cfg.engine_kind(on_gpu) != "torch"
        # Whether a model waits on the host while it isn't used.
        self.offloads = cfg.offload and on_gpu
        # Bytes of the engine's weights on one rank.
        self.engine_weights = self.number * self.params["policy"] / cfg.tp
        # Bytes of one rank's device, or of its part of the machine's memory.
        self.capacity = self.gpu.memory if self.gpu else self.host / self.local or float("inf")
        # Ranks that share one copy of weights and optimizer.
        self.shards = cfg.shard_ranks or self.world
        # Bytes of one rank's shards in a checkpoint, and between updates, where a reference may wait too.
        self.checkpoint = STATE_BYTES * sum(self.params.values()) / self.shards
        self.state = self.checkpoint + (4 * self.params["policy"] / self.shards if cfg.kl_coef else 0)
        # Responses that one engine samples at a time: a step's, and the extra ones of --carry.
        engines = max(self.world // cfg.tp, 1)
        self.responses = -(-(cfg.prompts_per_step + cfg.extra_prompts) // engines) * cfg.samples_per_prompt
        # Bytes of one token's keys and values on one rank, which keeps at least one head.
        width = max(self.policy.kv // cfg.tp, self.policy.q // self.policy.heads)
        self.kv_bytes = 2 * self.policy.layers * width * self.number

    @cached_property
    def recompute(self) -> dict[str, int | None]:
        """For each trained model, how many of its layers are recomputed: see `recomputed`."""
        return {name: recomputed(self, name) for name in self.models}


def recomputed(case: Case, name: str) -> int | None:
    """Number of layers, from the first, that the backward pass of a model recomputes in whole. The other
    layers keep their products and attention, which are nearly all their FLOP, and recompute the rest. None:
    all layers keep everything.

    --recompute auto takes the first of None, 0, 1, …, all whose planned peak leaves the device HEADROOM."""
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
    """Bytes per token that all layers keep for the backward pass, and bytes that are made again in the last
    layer, where the backward pass begins. `whole`: as `recomputed` returns it."""
    d, b = shape.hidden, case.number
    # Inputs of norms and products, of attention and of the gate's parts. Where segments share a prefix, the
    # output of attention is there twice: as it is laid out, and of the unique tokens.
    everything = b * (4 * d + 3 * shape.q + 2 * shape.kv + 4 * shape.inner)
    # A layer's input, the results of its seven products and of attention, whose log-sums are fp32.
    products = b * (3 * d + 2 * shape.q + 2 * shape.kv + 2 * shape.inner) + 4 * shape.heads
    if whole is None:
        return shape.layers * everything, 0
    again = everything if whole == shape.layers else everything - products
    return whole * b * d + (shape.layers - whole) * products, again


def _allocator_loss(case, shape, root, logits, kept):
    """What torch's allocator keeps for FSDP's streams, each of which has memory of its own, and in holes.

    The root is gathered first and the first layer beside it, in flat buffers with a copy of this rank's
    shards. Gradients of a second pack are reduced beside the first pack's. Holes are as large as a layer's
    fp32 gradient and the chunks of logits, and lie between activations. bench/nullgpu/memory.py compares the
    sum with what a driver counts."""
    if not case.gpu:
        return {}
    gathered = case.number * (root + shape.layer) * (1 + 1 / case.shards)
    return {"gather buffers": gathered if case.shards > 1 else 0,
            "fragments": 4 * shape.layer + 4 * root / case.shards + logits + HOLES * kept}


def _update_instants(case, name, whole):
    """The instants when the update of a model, "policy" or "critic", may be fullest. T: tokens of the largest
    pack. `whole`: as `recomputed` returns it."""
    cfg, b, shape, params = case.cfg, case.number, case.models[name], case.params[name]
    d, layer = shape.hidden, shape.layer
    # The root (embedding, last norm, head) is gathered for the first layer's forward and stays whole until
    # the first layer's backward, which is the last.
    root = params - shape.layers * layer
    words = shape.vocab if name == "policy" else 0  # the critic's head is one vector and makes no logits
    head = d * max(words, 1)
    minibatch = -(-cfg.samples_per_step * cfg.model_len // (cfg.minibatches * case.world))
    T = min(cfg.pack_len, minibatch)
    kept, again = _per_token(case, shape, whole)
    kept = T * (kept + 2 * b * d)
    # In the MLP's backward: gradients of gate, up and hidden states. The gradient of their product takes the
    # place of the product, which was freed.
    working = T * (again + b * (2 * shape.inner + 3 * d))
    logits = CHUNKS_ALIVE * min(CHUNK_BYTES, 4 * words * T)
    shard = 4 * params / case.shards
    at_rest = {"weights": shard, "gradients": shard, "AdamW": 2 * shard}
    at_rest |= _allocator_loss(case, shape, root, logits, kept) | _asleep(case)
    instants = [
        # The head's backward. The activations of all layers wait. The head's gradient is summed over chunks
        # in fp32, then cast.
        {"gathered weights": b * root, "activations": kept, "logits": logits,
         "whole gradients": (4 + b) * head},
        # A layer's backward. The head's gradient waits for the rest of the root's. The fp32 gradient of the
        # layer before is still being reduced to shards.
        {"gathered weights": b * (root + layer), "activations": kept + working,
         "whole gradients": b * head + 4 * layer},
        # A layer's end. Its gradient and its fp32 copy are alive too.
        {"gathered weights": b * (root + layer), "activations": kept,
         "whole gradients": b * head + (b + 8) * layer},
        # The end of backward. The root's gradient and its fp32 copy are alive, and a layer's.
        {"whole gradients": (4 + b) * root + 4 * layer},
        # AdamW makes one temporary of the shards' size.
        {"AdamW's step": shard}]
    return [_with_total(case, at_rest | usage) for usage in instants]


def _engine_memory(case):
    """Bytes of an awake engine. On a GPU, the cache of an engine that sleeps fills its share."""
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
    """Bytes of the engine while models are trained. The torch engine keeps its weights."""
    if not case.engine_sleeps:
        return {"engine weights": case.engine_weights}
    return {"sleeping engine": SLEEPING_ENGINE} if case.gpu else {}


def memory(case: Case) -> list[tuple[str, Usage]]:
    """The instants of a step, in its order: the phase (sync, rollout, or the model in update), and the items
    with their "total"."""
    policy, params = case.policy, case.params["policy"]
    # Sync gathers a layer or the root at a time: a buffer and the weights.
    largest = max(params - policy.layers * policy.layer, policy.layer)
    own_part = 1 / case.shards if case.shards > 1 else 0
    sync = {"weights": 4 * params / case.shards, "gathered weights": case.number * largest * (2 + own_part)}
    # engines/vllm_engine.py copies embedding and head, which FSDP would free too early for vLLM.
    if case.engine_sleeps and (policy.tied or policy.vocab % (64 * case.cfg.tp)):
        sync["embedding's copy"] = case.number * policy.vocab * policy.hidden * (1 if policy.tied else 2)
    sync |= {"engine weights": case.engine_weights} | _asleep(case)
    instants = [("sync", _with_total(case, sync)), ("rollout", _with_total(case, _engine_memory(case)))]
    for name in case.models:
        instants += [(name, usage) for usage in _update_instants(case, name, case.recompute[name])]
    return instants


def _with_total(case, usage):
    """The usage, with CUDA's memory, the state that stays on the device unused, and the total."""
    idle = 0.0 if case.offloads else case.state - usage.get("weights", 0.0) - usage.get("AdamW", 0.0)
    cuda = CUDA_CONTEXT + NCCL_BUFFERS if case.gpu else 0
    usage = usage | {"CUDA and idle state": cuda + idle}
    return {"total": sum(usage.values())} | usage


def fullest(case: Case) -> tuple[str, Usage]:
    """The phase and the items of the instant with the largest total."""
    return max(memory(case), key=lambda instant: instant[1]["total"])


def kv_tokens(case: Case) -> int:
    """Tokens that an engine's cache holds."""
    return int(_engine_memory(case)["KV cache"] / case.kv_bytes)


# --- host, disk, seconds


def host_memory() -> float:
    """Bytes of free memory on this machine; 0 where the system doesn't tell."""
    try:
        words = Path("/proc/meminfo").read_text().split()
        return 1024.0 * int(words[words.index("MemAvailable:") + 1])
    except OSError:
        return 0.0


def host_need(case: Case) -> dict[str, float]:
    """Bytes of host memory: of one rank for its waiting state, a checkpoint's copy and libraries, and of the
    whole machine. Without GPUs, a rank's training is in host memory too."""
    rank = {"rank's waiting state": case.state if case.offloads else 0,
            "rank's checkpoint copy": case.checkpoint,
            "rank's libraries": LIBRARIES if case.gpu else LIBRARIES / 10}
    training = 0 if case.gpu else fullest(case)[1]["total"]
    return rank | {"machine": case.local * (sum(rank.values()) + training)}


def disk(cfg: Config, policy: int, critic: int = 0) -> dict[str, int]:
    """Bytes of one checkpoint, of the bf16 exports, and of the run's disk. policy, critic: parameters. A
    reference is saved only if it changes."""
    checkpoint, exports = STATE_BYTES * (policy + critic), 2 * (policy + critic)
    if cfg.keeps_ref:
        checkpoint += 4 * policy
    count = cfg.keep + 1 + bool(cfg.keep_best and cfg.eval_data)  # one is being written
    return {"disk, a checkpoint": checkpoint, "disk, exports": exports,
            "disk, all": count * checkpoint + exports}


def seconds(case: Case, prompt: float, response: float) -> dict[str, float]:
    """Seconds of a step by phase, for prompts and responses of these mean lengths in tokens. Needs a GPU of
    GPUS. Communication is not counted."""
    cfg, gpu, params, length = case.cfg, case.gpu, case.params["policy"], prompt + response
    flops, hbm = MFU * gpu.flops, BANDWIDTH * gpu.hbm
    tokens = cfg.samples_per_step * length / case.world  # of this rank
    # A decode step reads the weights and the cache once. The longest response takes all its steps, even
    # alone.
    batch = max(1, min(cfg.max_num_seqs, case.responses, kv_tokens(case) // length))
    read = case.engine_weights + batch * (prompt + response / 2) * case.kv_bytes
    decode = max(read / hbm, 2 * params * batch / (cfg.tp * flops))
    longest = cfg.max_response_len * case.engine_weights / hbm
    rollout = cfg.samples_per_step * cfg.tp / case.world / batch * response * decode
    times = {"rollout": max(rollout, longest)}
    forward = {  # of each model, over this rank's tokens
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
    """What is too small for this run, or "". A run takes 93 to 100 % of its planned memory on a stub of the
    driver (bench/results/nullgpu-memory.md). On CPUs, where less is known, half of the bytes must fit."""
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
    """The first change that makes the case fit and keeps the algorithm: one flag, several flags, or more
    ranks."""
    cfg, node = case.cfg, case.local
    if case.gpu and case.world <= node:  # one machine, which may have more GPUs
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
    """Whether the case fits, and if not, what would make it fit. One line."""
    if lack := shortage(case):
        return f"does not fit: {lack}; needed: {remedy(case)}"
    phase, usage = fullest(case)
    return f"fits: phase {phase} takes most, {gib(usage['total'])} of a rank's {gib(case.capacity)}"


# --- the plan as a table

Plan = dict[str, dict]  # section -> name -> a number, a word, or a dict of one for each column


def plan_of(case: Case) -> Plan:
    """The whole plan. plan.json and --json hold it as it is; `as_text` prints it. docs/faq.md says how other
    libraries name the batches."""
    cfg, peaks = case.cfg, {}
    for phase, usage in memory(case):  # the fullest instant of each phase
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
    """name -> column -> number, from column -> name -> number."""
    names = dict.fromkeys(name for numbers in columns.values() for name in numbers)
    return {name: {column: numbers.get(name, 0) for column, numbers in columns.items()} for name in names}


def as_text(plan: Plan) -> list[str]:
    """Lines of at most 80 columns: a name and its numbers."""
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
    """The flags of train.py, and the plan's own."""

    gpu: Literal[tuple(GPUS)] = "H100"  # the GPU that is planned for, without --device cpu
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
