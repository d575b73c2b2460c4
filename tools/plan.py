"""What a run will need, before it starts: batches, memory, disk and seconds.

    python -m tools.plan orz-7b --layout production [--gpu H200] [--price USD] [--json] [flags of train.py]

Arithmetic on the config and on the sizes in a model's config.json. It needs no torch and no device. A run
makes the same plan for the devices that it finds, prints it, and refuses what can't fit them.

Memory is counted at the instants of a step when one rank's device may be fullest, as dist.py, model.py and
train.py use it. Seconds are estimates from datasheets, right within a factor of about two.
"""

import argparse
import ast
import json
import textwrap
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import configs
from configs import CHUNK_BYTES, GIB, NODE, Config, UserError, gib, require
from grading.rows import read_rows

STATE_BYTES = 12  # per parameter, stored and in a checkpoint: weight and AdamW's two moments, fp32
CHUNKS_ALIVE = 3  # chunks alive at once, of CHUNK_BYTES each, while model.py makes log-probs
SAMPLER_COPIES = 6  # an engine's sampler takes its fp32 logits so many times
CUDA_CONTEXT = 0.6 * GIB  # per GPU, outside PyTorch's allocator: context and kernels
NCCL_BUFFERS = 0.9 * GIB  # per GPU, outside PyTorch's allocator
ENGINE_BUFFERS = 1.5 * GIB  # vLLM's activations and CUDA graphs, without its sampler
SLEEPING_ENGINE = 0.5 * GIB  # what vLLM keeps of a GPU at sleep level 2, without CUDA graphs; 0.48 for a 7B
LIBRARIES = 5 * GIB  # host memory of one rank's libraries: torch, CUDA, vLLM
DISCOUNT = 0.85  # discount on estimated terms: a run is refused only if this share of them doesn't fit
ESTIMATED = ("gathered weights", "gather buffers", "fragments", "activations", "logits",
             "whole gradients", "AdamW's step")
HOLES = 0.015  # between a pack's activations, as a share of them
HEADROOM = 0.08  # share of a device that --recompute auto leaves free
MFU = 0.35  # share of a GPU's peak FLOP/s that training reaches; torchtitan: 33 to 39 % on H100s, 8B model
BANDWIDTH = 0.6  # share of a datasheet's bandwidth that is reached
NETWORK = 50e9  # bytes/s to other machines that each GPU adds: 400 Gb/s
PROBLEMS = {"gsm8k": 7473, "": 57_000}  # prompts by part of the preset's name, without data; "": about ORZ's


def _table(text):
    """The rows of a table, which are the lines with `|` between their cells. A row is a list of cells."""
    return [[" ".join(cell.split()) for cell in line.split("|")] for line in text.splitlines() if "|" in line]


@dataclass(frozen=True)
class GPU:
    """A GPU's datasheet. Of a GPU that isn't in GPUS only the memory is known."""

    name: str
    memory: float  # bytes, as torch reports them
    flops: float = 0.0  # FLOP/s, dense bf16
    hbm: float = 0.0  # bytes/s from its own memory
    link: float = 0.0  # bytes/s to other GPUs of the machine, one way
    host: float = 0.0  # bytes/s to the host, one way


# name | memory in GiB | flops | hbm | link | host
GPUS = {name: GPU(name, GIB * float(memory), *map(float, rates)) for name, memory, *rates in _table("""
    H100    |  79.1 |  989e12 | 3.35e12 | 450e9 | 64e9
    H200    | 139.8 |  989e12 | 4.80e12 | 450e9 | 64e9
    B200    | 178.3 | 2250e12 | 8.00e12 | 900e9 | 64e9
    A100-80 |  79.2 |  312e12 | 2.04e12 | 300e9 | 32e9
    A100-40 |  39.4 |  312e12 | 1.56e12 | 300e9 | 32e9
    L40S    |  44.4 |  362e12 | 0.86e12 |  32e9 | 32e9
    4090    |  23.5 |  165e12 | 1.01e12 |  32e9 | 32e9
""")}


def gpu_of(device: str, memory: float) -> GPU:
    """The GPU that the driver names `device`, with `memory` bytes. An A100 may have 40 or 80 GB: the nearest
    in memory."""
    for gpu in sorted(GPUS.values(), key=lambda gpu: abs(gpu.memory - memory)):
        if gpu.name.partition("-")[0] in device:
            return replace(gpu, memory=memory)
    return GPU(device, memory)


# --- the model


@dataclass
class Shape:
    """The sizes of a dense decoder."""

    name: str  # where the sizes come from
    layers: int
    hidden: int
    heads: int
    inner: int  # width of the MLP
    vocab: int
    kv_heads: int
    tied: bool = False
    head_dim: int = 0  # 0: hidden / heads
    qkv_bias: bool = True  # as in Qwen2
    o_bias: bool = False
    mlp_bias: bool = False
    norms: int = 2  # of the hidden states, a layer
    qk_norm: str = ""  # weights that norm queries and keys: "", of one "head", of "all" heads

    def __post_init__(self) -> None:
        """Set what follows from the sizes. q, kv: widths of all heads' queries and keys. layer, policy,
        critic: parameters of one decoder layer, of the language model, of the value model."""
        d, inner = self.hidden, self.inner
        q = self.q = self.heads * (self.head_dim or d // self.heads)
        kv = self.kv = q * self.kv_heads // self.heads
        biases = self.qkv_bias * (q + 2 * kv) + self.o_bias * d + self.mlp_bias * (2 * inner + d)
        norms = self.norms * d + {"": 0, "head": 2 * q // self.heads, "all": q + kv}[self.qk_norm]
        self.layer = d * (2 * q + 2 * kv + 3 * inner) + biases + norms
        # A value model: the layers, the embedding, the last norm, and one vector as the head.
        self.critic = self.layers * self.layer + self.vocab * d + 2 * d
        self.policy = self.critic - d + self.vocab * d * (not self.tied)


# a part of the preset's name | the fields of Shape, from `name` to `qkv_bias`
KNOWN = {part: Shape(name, *map(ast.literal_eval, sizes)) for part, name, *sizes in _table("""
    0.5b | Qwen2.5-0.5B    | 24 |  896 | 14 |  4864 | 151936 | 2 | True  | 0 | True
    1.5b | Qwen2.5-1.5B    | 28 | 1536 | 12 |  8960 | 151936 | 2 | True  | 0 | True
    32b  | Qwen2.5-32B     | 64 | 5120 | 40 | 27648 | 152064 | 8 | False | 0 | True
    7b   | Qwen2.5-7B      | 28 | 3584 | 28 | 18944 | 152064 | 4 | False | 0 | True
    8b   | Llama-3.1-8B    | 32 | 4096 | 32 | 14336 | 128256 | 8 | False | 0 | False
    tiny | tools/tiny.py's model |  2 |  128 |  4 |   384 |    263 | 2 | True  | 0 | True
""")}


# Model types that differ from Llama: norms of the hidden states in a layer, norms of queries and keys, and
# whether the embedding is tied where the config does not say so.
UNLIKE_LLAMA = {"qwen3": (2, "head", False), "olmo2": (2, "all", False), "olmo3": (2, "all", False),
                "gemma3_text": (4, "head", True), "glm4": (4, "", False), "smollm3": (2, "", True),
                "cohere": (1, "all", True), "ernie4_5": (2, "", True)}


def shape_of(config: dict, name: str) -> Shape:
    """The shape that a config.json describes; an unknown family is counted as Llama. Raises UserError for a
    mixture of experts and where a size is missing."""
    get, family = config.get, config.get("model_type", "")
    sizes = "num_hidden_layers hidden_size num_attention_heads intermediate_size vocab_size".split()
    missing = ", ".join(size for size in sizes if not get(size))
    require(not missing, f"the config of {name} ({family}) has no {missing}",
            "a dense decoder like Llama or Qwen")
    experts = get("num_experts") or get("num_local_experts")
    require(not experts, f"{name} is a mixture of experts ({family})", "a dense decoder")
    norms, qk_norm, tied = UNLIKE_LLAMA.get(family, (2, "", False))
    qk_norm = qk_norm if get("use_qk_norm", True) else ""
    bias = bool(get("attention_bias"))
    o_bias = bool(get("attention_out_bias", bias and family not in ("qwen2", "glm", "glm4")))
    return Shape(
        name, *map(get, sizes), get("num_key_value_heads") or get("num_attention_heads"),
        bool(get("tie_word_embeddings", tied)), get("head_dim") or 0, bias or family == "qwen2", o_bias,
        bool(get("mlp_bias")), norms, qk_norm)


def read_shape(path: str) -> Shape:
    """The shape of the model in folder `path`. Raises UserError."""
    file = Path(path) / "config.json"
    require(file.is_file(), f"no {file}", "--model with a Hugging Face model folder")
    return shape_of(json.loads(file.read_bytes()), path)


def find_shape(path: str, preset: str = "") -> Shape:
    """The shape of a folder's model; without a folder, one that the name `path` or the preset's tells. Raises
    UserError."""
    known = [shape for part, shape in KNOWN.items() if shape.name in path or part in preset]
    return known[0] if known and not Path(path, "config.json").is_file() else read_shape(path)


def forward_flops(params: float, layers: int, width: int, tokens: float, square_lengths: float) -> float:
    """FLOP of a forward pass: 2 per parameter and token, and those of causal attention. `tokens` and
    `square_lengths` may also be numpy arrays.

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
    problems: int = PROBLEMS[""]  # prompts of an epoch
    assumed: bool = False  # whether this number is a guess, because no data was read

    def __post_init__(self) -> None:
        """Set the numbers that follow from these."""
        cfg, on_gpu = self.cfg, self.gpu is not None
        policy, critic = self.shapes
        self.policy = policy
        # The trained models, and the parameters of each.
        self.models = {"critic": critic, "policy": policy} if cfg.algo == "ppo" else {"policy": policy}
        self.params = {name: getattr(shape, name) for name, shape in self.models.items()}
        self.steps = cfg.with_steps(self.problems).steps
        # Bytes of a number in compute and gathers.
        self.number = 2 if cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and on_gpu) else 4
        self.vllm = cfg.engine == "vllm" or (cfg.engine == "auto" and on_gpu)
        # Whether a model waits on the host while it isn't used.
        self.offloads = cfg.offload and on_gpu
        # Ranks that share one copy of weights and optimizer.
        self.shards = cfg.shard_ranks or self.world
        # Bytes of one rank's shards in a checkpoint, and between updates, where a reference may wait too.
        self.checkpoint = STATE_BYTES * sum(self.params.values()) / self.shards
        self.state = self.checkpoint + 4 * policy.policy * bool(cfg.kl_coef) / self.shards
        # Responses that one engine samples at a time: a step's, and the extra ones of --carry.
        engines = max(self.world // cfg.tp, 1)
        self.responses = -(-(cfg.prompts_per_step + cfg.extra_prompts) // engines) * cfg.samples_per_prompt
        # Bytes of one token's keys and values on one rank, which keeps at least one head.
        width = max(policy.kv // cfg.tp, policy.q // policy.heads)
        self.kv_bytes = 2 * policy.layers * width * self.number

    @cached_property
    def recompute(self) -> dict[str, int | None]:
        """By trained model, how many of its layers are recomputed: see `recomputed`."""
        return {name: recomputed(self, name) for name in self.models}


def recomputed(case: Case, name: str) -> int | None:
    """How many layers of a model, the first ones, the backward pass recomputes in whole. The others keep
    their products and attention, which are nearly all their FLOP, and recompute the rest. None: all layers
    keep everything.

    --recompute auto takes the first of None, 0, 1, …, all whose planned peak leaves the device HEADROOM."""
    wanted, layers = case.cfg.recompute, case.models[name].layers
    by_name = {"none": None, "layers": layers}
    if wanted in by_name:
        return by_name[wanted]
    if wanted != "auto":
        return min(int(wanted), layers)
    limit = (1 - HEADROOM) * (case.gpu.memory if case.gpu else case.host / case.local or float("inf"))

    def fits(whole):
        return max(usage["total"] for usage in _update_instants(case, name, whole)) <= limit

    choices = [None, *range(layers)]  # from the most memory to less: the first that fits
    at = bisect_left(choices, True, key=fits)
    return choices[at] if at < len(choices) else layers


# --- memory of the device

Usage = dict[str, float]  # bytes of one rank's device at one instant, by item; on a CPU, of its memory


def _per_token(case, shape, whole):
    """Bytes per token that all layers keep for the backward pass, and those that it makes again in the last
    layer, which is the first that it reaches. `whole`: as `recomputed` returns it."""
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


def _stream_buffers(case, shape, root, logits, kept):
    """What torch's allocator keeps for FSDP's streams, each of which has memory of its own, and in holes.

    The root is gathered first and the first layer beside it, in flat buffers with a copy of this rank's
    shards. Gradients of a second pack are reduced beside those of the first. Holes are as large as a layer's
    fp32 gradient and the chunks of logits, and lie between activations. bench/nullgpu/memory.py compares the
    sum with what a driver counts."""
    if not case.gpu:
        return {}
    gathers = case.shards > 1
    return {"gather buffers": gathers * case.number * (root + shape.layer) * (1 + 1 / case.shards),
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
    at_rest |= _stream_buffers(case, shape, root, logits, kept) | _asleep(case)
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
        # The end of backward. The root's gradient and its fp32 copy are alive, and that of a layer.
        {"whole gradients": (4 + b) * root + 4 * layer},
        # AdamW makes one temporary of the shards' size.
        {"AdamW's step": shard}]
    return [_with_total(case, at_rest | usage) for usage in instants]


def _engine_memory(case):
    """What an awake engine takes. vLLM's cache is what is left of its share of the GPU."""
    cfg, policy = case.cfg, case.policy
    weights = case.number * policy.policy / cfg.tp
    rows = cfg.max_num_seqs if case.vllm else min(cfg.max_num_seqs, case.responses)
    buffers = 4 * SAMPLER_COPIES * rows * policy.vocab
    cache = rows * cfg.engine_len * case.kv_bytes
    if case.vllm and case.gpu:
        buffers += ENGINE_BUFFERS
        cache = max(cfg.engine_share * case.gpu.memory - weights - buffers, 0.0)
    elif case.vllm:
        cache = GIB / 4
    return {"engine weights": weights, "engine buffers": buffers, "KV cache": cache}


def _sync_copies(case):
    """Bytes that engines/vllm_engine.py copies of embedding and head, which FSDP would free too early for
    vLLM."""
    policy = case.policy
    copied = case.vllm and (policy.tied or policy.vocab % (64 * case.cfg.tp))
    return case.number * policy.vocab * policy.hidden * (2 - policy.tied) if copied else 0


def memory(case: Case) -> list[tuple[str, Usage]]:
    """The instants of a step, in its order: the phase (sync, rollout, or the model in update), and the items
    with their "total"."""
    policy, engine = case.policy, _engine_memory(case)
    weights = {"engine weights": engine["engine weights"]}
    # Sync gathers a layer or the root at a time: a buffer and the weights.
    largest = max(policy.policy - policy.layers * policy.layer, policy.layer)
    sync = {"weights": 4 * policy.policy / case.shards,
            "gathered weights": case.number * largest * (2 + (case.shards > 1) / case.shards)}
    if _sync_copies(case):
        sync["embedding's copy"] = _sync_copies(case)
    instants = [("sync", _with_total(case, sync | weights | _residual(case))),
                ("rollout", _with_total(case, engine))]
    for name in case.models:
        instants += [(name, usage) for usage in _update_instants(case, name, case.recompute[name])]
    return instants


def _residual(case):
    """What vLLM keeps of a GPU while it sleeps."""
    return {"sleeping engine": SLEEPING_ENGINE} if case.vllm and case.gpu else {}


def _asleep(case):
    """What an engine takes while models are trained. vLLM frees its weights."""
    return _residual(case) if case.vllm else {"engine weights": _engine_memory(case)["engine weights"]}


def _with_total(case, usage):
    """The usage with what is on the device at any time, and the total."""
    used = usage.get("weights", 0.0) + usage.get("AdamW", 0.0)
    idle = 0.0 if case.offloads else case.state - used
    usage = usage | {"CUDA and idle state": (CUDA_CONTEXT + NCCL_BUFFERS) * bool(case.gpu) + idle}
    return usage | {"total": sum(usage.values())}


def _fullest_first(case):
    """The instants, the one with the largest total first."""
    return sorted(memory(case), key=lambda instant: -instant[1]["total"])


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


def disk(cfg: Config, policy: int, critic: int = 0) -> dict[str, int]:
    """Bytes of one checkpoint, the largest number of checkpoints, bytes of the bf16 exports, and bytes of all
    of it. policy, critic: parameters. A reference is saved only if it changes."""
    ref = policy * cfg.keeps_ref
    checkpoint, exports = STATE_BYTES * (policy + critic) + 4 * ref, 2 * (policy + critic)
    count = cfg.keep + 1 + bool(cfg.keep_best and cfg.eval_data)
    return {"checkpoint": checkpoint, "checkpoints": count, "exports": exports,
            "needed": count * checkpoint + exports}


def seconds(case: Case, prompt: float, response: float) -> dict[str, float]:
    """Seconds of a step by phase, for prompts and responses of these mean lengths in tokens. Needs a GPU of
    GPUS."""
    cfg, gpu, params, length = case.cfg, case.gpu, case.policy.policy, prompt + response
    flops, hbm = MFU * gpu.flops, BANDWIDTH * gpu.hbm
    link = BANDWIDTH * (gpu.link if case.world <= case.local else min(gpu.link, case.local * NETWORK))
    weights, tokens = case.number * params, cfg.samples_per_step * length / case.world
    forward = {  # of each model, over this rank's share of the step's tokens
        name: forward_flops(case.params[name], shape.layers, shape.q, tokens, tokens * length) / flops
        for name, shape in case.models.items()}
    # A decode step reads the weights and the cache once. The longest response takes all its steps, even
    # alone.
    batch = max(1, min(cfg.max_num_seqs, case.responses, kv_tokens(case) // length))
    read = weights / cfg.tp + batch * (prompt + response / 2) * case.kv_bytes
    decode = max(read / hbm, 2 * params * batch / (cfg.tp * flops))
    longest = cfg.max_response_len * weights / (cfg.tp * hbm)
    made = case.responses * cfg.prompts_per_step / (cfg.prompts_per_step + cfg.extra_prompts)  # in a step
    # The backward pass costs two forward passes; recomputed activations cost one more.
    passes = {name: (3 + (case.recompute[name] or 0) / shape.layers) * cfg.passes_per_step
              for name, shape in case.models.items()}
    once = forward["policy"]
    times = {"sync": weights / hbm + (weights / link if case.world > 1 else 0.0),
             "rollout": max(response * made / batch * decode, longest)}
    if cfg.kl_coef:
        times["ref"] = once
    if cfg.updates_per_step > 1 or (cfg.kl_coef and cfg.kl_in == "reward"):
        times["old_logp"] = once
    if "critic" in case.params:
        times["critic"] = (1 + passes["critic"]) * forward["critic"]
    times["policy"] = passes["policy"] * once
    if case.offloads:
        times["offload"] = 2 * (case.state + 4 * params / case.shards) / (BANDWIDTH * gpu.host)
    return times | {"step": sum(times.values())}


# --- does it fit?


def shortage(case: Case) -> str:
    """What is too small for this run, or "". On CPUs, where less is known, half of the bytes must fit."""
    limit = case.gpu.memory if case.gpu else 2 * case.host / case.local or float("inf")
    for phase, usage in _fullest_first(case):
        total, estimated = usage["total"], sum(usage.get(item, 0.0) for item in ESTIMATED)
        if total - bool(case.gpu) * (1 - DISCOUNT) * estimated > limit:
            largest = sorted(usage, key=usage.get, reverse=True)[1:4]  # without the total
            items = ", ".join(f"{item} {gib(usage[item])}" for item in largest)
            return f"phase {phase} takes {gib(total)} a rank ({items}), and {_available(case)}"
    tokens, length = kv_tokens(case), case.cfg.engine_len
    if case.gpu and tokens < length:
        return (f"the engine's {case.cfg.engine_share:.0%} of {gib(limit)} holds {tokens:,} tokens beside "
                f"its weights, and a prompt with its response takes {length:,}")
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
    single = [{flag: value} for flag, value in free.items()]  # the free ones cost only speed
    shares = sorted((x / 20 for x in range(4, 20)), key=lambda share: abs(share - cfg.engine_share))
    single += [{"engine_share": share} for share in shares]
    single += [{"tp": n} for n in (2, 4, 8) if case.vllm and case.world % n == 0]
    single += [{"max_num_seqs": n} for n in (256, 128, 64, 32, 16, 8)]
    changes = [{}, *single, free, *(free | one for one in single)]
    for ranks in (case.world << doublings for doublings in range(11)):
        local = min(ranks, node)
        for change in changes:
            changed = replace(case, world=ranks, local=local, cfg=replace(cfg, **change))
            if not shortage(changed):
                words = [f"{ranks} ranks, {local} a machine"] if ranks > case.world else []
                for flag, value in change.items():
                    if getattr(cfg, flag) != value:
                        words.append(f"--{flag} {value}".removesuffix(" True"))
                return " ".join(words)
    return "a smaller --model, or devices with more memory"


def verdict(case: Case) -> str:
    """Whether the case fits, and if not, what would make it fit. One line."""
    if lack := shortage(case):
        return f"does not fit: {lack}; needed: {remedy(case)}"
    phase, usage = _fullest_first(case)[0]
    fits = "may fit" if case.gpu and usage["total"] > case.gpu.memory else "fits"
    discount = f" (estimated terms count {DISCOUNT:.0%})" if fits == "may fit" else ""
    return (f"{fits}: the fullest phase, {phase}, takes {gib(usage['total'])} a rank, and "
            f"{_available(case)}{discount}")


def _available(case):
    if case.gpu:
        return f"a GPU has {gib(case.gpu.memory)}"
    memory = gib(case.host) if case.host else "an unknown amount of memory"
    return f"a machine has {memory} for {case.local} of the ranks"


# --- the rows of the plan
# A section is a table: name | number, or a dict of a number for each column | unit | note.


@dataclass
class PlanRow:
    """One line of the plan. JSON, text and the report's table are made from it."""

    section: str
    name: str
    value: float | dict[str, float]  # one number, or one for each column; {}: only a note
    unit: str
    note: str

    def cells(self) -> dict[str, str]:
        """Column -> number as text. The column of a single number is ""."""
        values = self.value if isinstance(self.value, dict) else {"": self.value}
        return {column: _shown(n, self.unit) for column, n in values.items()}


def _shown(n, unit):
    """A number and its unit as text; "bytes" become GiB or MiB."""
    if not n:
        return "0"
    if unit == "bytes":
        return gib(n)
    decimals = 1 if n < 100 and n % 1 else 0
    return f"{n:,.{decimals}f} {unit}".strip()


def rows_of(case: Case) -> list[PlanRow]:
    """All rows of the plan, section by section."""
    sections = {"run": _run, "batches": _batches, "memory": _memory, "host and disk": _host_and_disk,
                "seconds": _seconds}
    return [PlanRow(section, name, ast.literal_eval(value), unit, "|".join(note))
            for section, write in sections.items() for name, value, unit, *note in _table(write(case))]


def _run(case):
    cfg, steps = case.cfg, case.steps
    active = steps - cfg.freeze_policy_steps
    critic = f"""
        critic parameters | {case.params["critic"]} || sizes of {case.shapes[1].name}, with a scalar head
        critic updates | {cfg.critic_updates * cfg.passes_per_step * steps} || \
            {cfg.critic_updates * cfg.passes_per_step} a step
        """ if "critic" in case.params else ""
    return f"""
        ranks | {case.world} || {case.local} on a machine; {cfg.tp} in an engine; {case.shards} share one \
            copy of weights and optimizer
        prompts | {case.problems} || in --data; where that can't be read, as in the preset's
        steps | {steps} ||
        episodes | {steps * cfg.samples_per_step} || prompt-response pairs: total_episodes (Open-Instruct)
        policy parameters | {case.policy.policy} || sizes of {case.policy.name}
        policy updates | {active * cfg.updates_per_step} || {cfg.updates_per_step} a step, in \
            {cfg.passes_per_step} passes over its samples
        {critic}"""


def _batches(case):
    """Which batch is which, with its name in Open-Reasoner-Zero, OpenRLHF, verl and TRL."""
    cfg, prompts, samples = case.cfg, case.cfg.prompts_per_step, case.cfg.samples_per_step
    policy, critic = samples / cfg.policy_updates, samples / cfg.critic_updates
    critic_rows = f"""
        critic update | {critic} | samples | minibatch: critic_update_steps {cfg.critic_updates} (ORZ)
        critic update a rank | {critic / case.world} | samples | on average: ranks have equal tokens
        """ if "critic" in case.params else ""
    return f"""
        prompts per step | {prompts} || rollout_batch_size (ORZ, OpenRLHF), train_batch_size (verl)
        samples per prompt | {cfg.samples_per_prompt} || the group: n_samples_per_prompt (ORZ, OpenRLHF), \
            rollout.n (verl), num_generations (TRL)
        samples per step | {samples} | samples | global batch: \
            {prompts} × {cfg.samples_per_prompt} = {samples} episodes
        samples per engine | {case.responses} | samples | up to {cfg.max_num_seqs} are decoded at once: \
            max_num_seqs (vLLM)
        {critic_rows}
        policy update | {policy} | samples | minibatch: policy_update_steps {cfg.policy_updates} (ORZ), \
            train_batch_size {policy:.0f} (OpenRLHF), \
            ppo_mini_batch_size {prompts / cfg.policy_updates:g} prompts (verl)
        policy update a rank | {policy / case.world} | samples | on average: ranks have equal tokens
        pack | {cfg.pack_len} | tokens | micro batch: one forward pass on one rank; gradients are summed \
            over packs. packing_max_len (ORZ), ppo_max_token_len_per_gpu (verl)
        longest sample | {cfg.model_len} | tokens | prompt up to {cfg.max_prompt_len}, response up to \
            {cfg.max_response_len}
        """


def _memory(case):
    cfg, instants, items, table = case.cfg, memory(case), {}, ""
    for phase, usage in instants:
        for item, n in usage.items():
            most = items.setdefault(item, dict.fromkeys(dict(instants), 0.0))
            most[phase] = max(most[phase], n)
    total = items.pop("total")
    for item, most in items.items():
        table += f"{item} | {most} | bytes |\n"
    return f"""{table}
        total | {total} | bytes |
        recomputed | {{}} || {"; ".join(_recomputed_words(case, name) for name in case.models)} (--recompute)
        KV cache, tokens | {kv_tokens(case)} || {case.kv_bytes * cfg.tp / 1024:g} KiB each
        KV cache, samples | {kv_tokens(case) / cfg.model_len} || of full length at once; an engine makes \
            {case.responses} a step
        note | {{}} || Of one rank. Each item at its largest; total: at the fullest instant. N parameters: \
            weights and gradients 4 N / {case.shards} each, AdamW 8 N / {case.shards}, engine weights \
            {case.number} N / {cfg.tp}. Activations: of {cfg.pack_len} tokens, with what \
            --recompute keeps of each layer. Gathered weights: embedding, head and the layers at work. \
            Gather buffers, fragments: what PyTorch's allocator keeps for FSDP's streams and in holes. \
            Whole gradients: before they are reduced to shards. Idle state: what the phase doesn't use and \
            doesn't move to the host.
        """


def _recomputed_words(case, name):
    """What the backward pass of a model recomputes, as text."""
    whole, layers = case.recompute[name], case.models[name].layers
    if whole is None:
        return f"{name}: nothing"
    rest = ", and in the others all but products and attention" * (whole < layers)
    return f"{name}: {whole} of {layers} layers in whole{rest}"


def _libraries(case):
    return LIBRARIES if case.gpu else LIBRARIES / 10


def host_need(case: Case) -> float:
    """Bytes that a machine's host memory has to hold."""
    device = 0.0 if case.gpu else _fullest_first(case)[0][1]["total"]
    return case.local * (case.state * case.offloads + case.checkpoint + _libraries(case) + device)


def _host_and_disk(case):
    files = disk(case.cfg, **case.params)
    return f"""
        host, state | {case.state * case.offloads} | bytes | a rank: models that wait, pinned (--offload)
        host, checkpoint | {case.checkpoint} | bytes | a rank: the copy that is written
        host, libraries | {_libraries(case)} | bytes | a rank: torch, on a GPU also CUDA and vLLM
        host, machine | {host_need(case)} | bytes | \
            {case.local} × the three above; without GPUs, also the ranks' memory above
        disk, checkpoint | {files["checkpoint"]} | bytes | 12 N of each trained model
        disk, total | {files["needed"]} | bytes | {files["checkpoints"]} checkpoints (--keep, --keep_best, \
            one being written) and exports of {gib(files["exports"])}
        """


def _lengths(cfg):
    """Mean tokens of prompt and response for which seconds are estimated."""
    return {"quarter": (cfg.max_prompt_len / 8, cfg.max_response_len / 4),
            "full": (cfg.model_len - cfg.max_response_len, cfg.max_response_len)}


def run_hours(case: Case) -> dict[str, float]:
    """Hours of all steps with responses of a quarter of their limit and of the full limit. Empty where the
    GPU's datasheet isn't known."""
    if not (case.gpu and case.gpu.flops):
        return {}
    return {name: case.steps * seconds(case, *lengths)["step"] / 3600
            for name, lengths in _lengths(case.cfg).items()}


def _seconds(case):
    """The seconds of each phase, and hours. No rows where the GPU's datasheet isn't known."""
    gpu, table, hours = case.gpu, "", run_hours(case)
    if not hours:
        return ""
    prompt, response = _lengths(case.cfg)["quarter"]
    every = {name: seconds(case, *lengths) for name, lengths in _lengths(case.cfg).items()}
    for phase in every["full"]:
        table += f"{phase} | { {name: times[phase] for name, times in every.items()} } | s |\n"
    return f"""{table}
        run | {hours} | h | {case.steps:,} steps, without evaluations
        note | {{}} || Estimates for {case.world} × {gpu.name}. Quarter: responses of {response:,.0f} tokens \
            after prompts of {prompt:,.0f}. N parameters: sync takes 2 N / link + 2 N / HBM, a decode step \
            (2 N + KV) / HBM, a forward pass 2 N FLOP a token and attention, training three or four passes. \
            Datasheet: {gpu.flops / 1e12:.0f} bf16 TFLOP/s, of which {MFU:.0%} are reached (MFU); HBM \
            {gpu.hbm / 1e12:.2f} TB/s, link {gpu.link / 1e9:.0f} GB/s ({NETWORK / 1e9:.0f} a GPU between \
            machines), host {gpu.host / 1e9:.0f} GB/s, of which {BANDWIDTH:.0%} are reached.
        """


# --- output


def summary(case: Case, price: float = 0.0) -> list[str]:
    """The plan in eight lines, none over 80 columns. price: dollars of a GPU hour; 0: no word of money."""
    cfg, policy, steps, each = case.cfg, case.policy, case.steps, case.cfg.samples_per_step
    critic = f", critic {_count(case.params['critic'])}" if "critic" in case.params else ""
    updates = f"policy {cfg.updates_per_step}" + f", critic {cfg.critic_updates * cfg.passes_per_step}" * (
        cfg.algo == "ppo")
    phase, usage = _fullest_first(case)[0]
    device = f" of {gib(case.gpu.memory)}" if case.gpu else ""
    host = f" of {gib(case.host)}" if case.host else ""
    over = case.gpu and usage["total"] > case.gpu.memory
    fitting = "does not fit" if shortage(case) else "may fit (estimates are discounted)" if over else "fits"
    lines = {
        "devices": f"{case.world} × {case.gpu.name if case.gpu else 'CPU'}, {case.local} on a machine",
        "model": f"{Path(policy.name).name}: policy {_count(policy.policy)}{critic} parameters",
        "length": f"{steps:,} steps, {steps * each:,} responses to {case.problems:,} prompts"
                  + " (assumed)" * case.assumed,
        "a step": f"{cfg.prompts_per_step} prompts × {cfg.samples_per_prompt} responses; updates: {updates}",
        "tokens": f"prompt up to {cfg.max_prompt_len:,}, response up to {cfg.max_response_len:,}; packs of "
                  f"{cfg.pack_len:,}",
        "memory": f"{gib(usage['total'])}{device} a rank, in phase {phase}: {fitting}",
        "host": f"{gib(host_need(case))}{host} a machine; disk {gib(disk(cfg, **case.params)['needed'])}",
        "time": _time(case, price)}
    return [f"{name:8} {text}" for name, text in lines.items()]


def _count(n):
    """A number of parameters as text."""
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.3g}M"


def _time(case, price):
    """Hours of the whole run, and dollars, as text."""
    spans = run_hours(case)
    if not spans:
        return "unknown: only GPUs of tools/plan.py's table are estimated"
    low, high = spans.values()
    dollars = " to ".join(_rounded(hours * case.world * price) for hours in (low, high))
    return f"{_hours(low)} to {_hours(high)}" + f", ${dollars}" * (price > 0) + " (estimated)"


def _rounded(x):
    """Two significant digits: the estimate has no more."""
    return f"{float(f'{x:.2g}'):,g}"


def _hours(hours):
    if hours < 1:
        return f"{60 * hours:.0f} minutes"
    return f"{hours:.1f} hours" if hours < 100 else f"{hours / 24:.0f} days"


def as_json(rows: list[PlanRow]) -> dict[str, dict]:
    """Section -> name -> number, or numbers by column: counts, bytes, seconds."""
    sections = {row.section: {} for row in rows}
    for row in rows:
        if row.value != {}:
            sections[row.section][row.name] = row.value
    return sections


def as_table(rows: list[PlanRow]) -> dict[str, str]:
    """Name -> numbers and note, for the report."""
    table = {}
    for row in rows:
        numbers = ", ".join(f"{column} {number}".strip() for column, number in row.cells().items())
        table[f"{row.section}: {row.name}"] = f"{numbers}; {row.note}".strip("; ")
    return table


def as_text(rows: list[PlanRow], width: int = 80) -> list[str]:
    """Lines of at most `width` columns: name, numbers, and the note, which wraps in its own column."""
    lines, section = [], ""
    for row in rows:
        cells = row.cells()
        if row.section != section:
            section = row.section
            columns = "".join(f"{column:>10}" for column in cells)
            lines += ["", f"{section.upper():22}{columns}".rstrip()]
        cell = 10 if len(cells) > 1 else 16
        numbers = "".join(f"{number:>{cell}}" for number in cells.values())
        left = f"  {row.name:20}{numbers}  "
        lines += textwrap.wrap(left + row.note, width, subsequent_indent=" " * len(left))
    return lines


# --- the command


def main() -> None:
    """`python -m tools.plan PRESET [--gpu NAME] [--price USD] [--json] [flags of train.py]`: print the
    plan."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu", default="")
    parser.add_argument("--price", default="0")  # dollars of a GPU hour
    parser.add_argument("--json", action="store_true")
    options, argv = parser.parse_known_args()
    cfg = configs.parse(argv, prog="tools.plan [--gpu NAME] [--price USD] [--json]")
    preset, world = argv[0], cfg.ranks or 1
    on_cpu = preset.startswith("tiny") or cfg.device == "cpu"
    price = _dollars(options.price)
    gpu = options.gpu or ("" if on_cpu else "H100")
    require(gpu in ("", *GPUS), f"no GPU {gpu!r}{configs.nearest(gpu, list(GPUS))}",
            "--gpu " + ", ".join(GPUS))
    # Without a folder, the name of the model tells the shape, or else that of the preset which names it.
    named = preset if cfg.model == configs.PRESETS[preset].model else ""
    policy = find_shape(cfg.model, named)
    critic = find_shape(cfg.critic_model) if cfg.critic_model else policy
    problems = next(count for part, count in PROBLEMS.items() if part in preset)
    read = 0
    with suppress(UserError):  # a plan needs no data
        read = sum(1 for path in cfg.data for _ in read_rows(path))
    case = Case(cfg, world, [policy, critic], GPUS.get(gpu), min(world, NODE), problems=read or problems,
                assumed=not read)
    rows = rows_of(case)
    if options.json:
        print(json.dumps({"preset": preset, "gpu": gpu, **as_json(rows), "verdict": verdict(case),
                          "config": vars(cfg)}, indent=1))
        return
    print(f"{preset}, layout {cfg.layout}", *summary(case, price), *as_text(rows), "",
          textwrap.fill(verdict(case), 80), sep="\n")


def _dollars(text):
    with suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise UserError(f"--price {text}; needed: dollars of a GPU hour, as --price 2.5")


if __name__ == "__main__":
    with configs.user_errors("tools.plan"):
        main()
