"""Plans a run before it starts: its batches, memory, disk space and seconds.

    python -m tools.plan orz-7b --layout production [--gpu H200] [--json] [flags of train.py]

The plan needs no torch and no GPU. train.py makes the same plan, and refuses a run that does not fit.

Memory is counted for one rank's device. Seconds are estimates. docs/measured.md compares them with what was
measured on a GPU.

Two terms of this file:

    root     all weights outside the decoder layers (embedding, last norm, LM head); one FSDP group
    shard    one rank's part of a model's weights, gradients or optimizer state
"""

import json
import math
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Literal, NamedTuple

import configs
from configs import CHUNK_BYTES, KV_PAGE, LLAMA_LIKE, NODE, Config
from grading.rows import problem_of, read_rows
from guard.files import read_json
from guard.messages import GIB, UserError, gib, require, user_errors

MOMENTS = 2  # numbers that AdamW keeps for each trained weight
SAMPLER_COPIES = 6  # copies of the fp32 logits in the sampler of vLLM, or of an engine on a CPU
CHUNKS_ALIVE = 3  # chunks of logits that are in memory at once on a CPU (layers/head.py)
CUDA_CONTEXT = 0.6 * GIB  # GPU memory of CUDA's context and kernels
NCCL_BUFFERS = 0.9 * GIB  # GPU memory of NCCL
ENGINE_BUFFERS = 1.5 * GIB  # GPU memory of vLLM's activations and CUDA graphs
SLEEPING_ENGINE = 0.5 * GIB  # GPU memory of vLLM at sleep level 2
LIBRARIES = 5 * GIB  # host memory of torch, CUDA and vLLM on one rank
HOLES = 0.015  # unused memory between tensors, as a share of the tensors (activations, weights, moments)
HEADROOM = 0.08  # share of a device's memory that choices of the plan leave free
ASSUMED_PROMPTS = 57_000  # number of prompts in an epoch, if the data can't be read
PACK_LEN = 16384  # smallest value that is chosen for --pack_len 0

# Speeds. If no source stands here, they were measured on one H200 with 16 CPU cores (docs/measured.md).
# Layers reach the share MFU * hidden / (hidden + MFU_HALF) of a GPU's peak FLOP/s: products grow with the
# square of the hidden size, all else grows in proportion to it. Measured: 0.37 (896), 0.52 (3584).
MFU, MFU_HALF = 0.6, 600
MATMUL = 0.8  # share of peak FLOP/s that one large matrix product reaches: 792 of 989 TFLOP/s
STREAM = 0.85  # share of a GPU's peak memory bandwidth that a copy reaches: 4.12 of 4.8 TB/s
BANDWIDTH = 0.6  # share of a GPU's peak memory bandwidth that decoding reaches
LINK = 0.8  # share of a link's peak that NCCL reaches; nccl-tests on 8 H100s: 360 of 450 GB/s
HOST_COPY = 20e9  # bytes/s between pinned host memory and the device
PIN = 1.8e9  # bytes/s at which host memory is pinned, in the first step
PUSH = 125e9  # bytes/s at which vLLM takes new weights
WAKE = 0.09  # seconds in which vLLM wakes and falls asleep
# Seconds from the command to the first step with each engine, without loading the model
START = {"vllm": 33.0, "torch": 12.0}
# Seconds of a layer in a decode step besides reading and computing, because its kernels are small.
LAYER_DECODE = 45e-6
LOAD = 1.5e9  # bytes/s at which a model's files are read
# Host seconds of one decode step in an engine: for the step, and for each response in it.
DECODE_HOST = {"vllm": (1.6e-3, 22e-6), "torch": (0.1e-3, 0.5e-6)}
# Host seconds for each layer of each pack: forward and backward pass; added by FSDP; added by recomputation.
LAYER_HOST, FSDP_HOST, RECOMPUTE_HOST = 1.4e-3, 2.1e-3, 1.5e-3
# Host seconds of one layer in an optimizer step. True: of FSDP's DTensors (several ranks); False: of plain
# tensors.
OPTIMIZER_HOST = {True: 4e-3, False: 0.3e-3}
# Bytes that the output layer moves for each logit (fp32, and the gradient in the compute dtype): in a forward
# pass, in a backward pass.
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
    for gpu in (  # name, bytes of memory, FLOP/s, bytes/s of memory, bytes/s in the node, Gb/s to others
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
    those of the GPU in GPUS whose name before "-" is a word of `device`; if there are several, of the one
    with the most similar memory. Without such a GPU, the speeds are 0."""
    words = device.replace("-", " ").split()
    known = [gpu for name, gpu in GPUS.items() if name.partition("-")[0] in words]
    nearest = min(known, key=lambda gpu: abs(gpu.memory - memory), default=GPU("", 0))
    return nearest._replace(name=device, memory=memory)


# --- the model


class DeltaNets(NamedTuple):
    """The sizes of Qwen3.5's gated delta nets (layers.attention.delta_net)."""

    layers: int = 0  # number of layers that have one in place of attention
    heads: int = 0  # number of heads of values
    key_heads: int = 16  # number of heads of keys, and of queries
    key_dim: int = 128  # width of a head of keys
    dim: int = 128  # width of a head of values
    kernel: int = 4  # tokens that the convolution reads

    @property
    def mixed(self) -> int:
        """Width of queries, keys and values together, which the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.dim


@dataclass
class Shape:
    """The sizes of a dense decoder like Llama, Qwen2 or Qwen3.5."""

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
    silu: bool = True  # the MLP's activation; others store one more tensor (layers.mlp.gated_mlp)
    fused: bool = True  # whether the torch engine's FusedDecoder computes the layers itself
    delta: DeltaNets = DeltaNets()

    @property
    def q(self) -> int:
        """Width of the queries of all heads together."""
        of_head = self.head_dim or self.hidden // self.heads
        return self.heads * of_head

    @property
    def kv(self) -> int:
        """Width of the keys of all heads together. The values have the same width."""
        return self.q * self.kv_heads // self.heads

    @property
    def attention_layers(self) -> int:
        return self.layers - self.delta.layers

    @property
    def layer(self) -> int:
        """Number of parameters of a layer: matrices, two norms, biases. With delta nets, the mean of both
        kinds of layers."""
        qkv = self.q + 2 * self.kv
        biases = qkv if self.qkv_bias else 0
        # All widths are numbers of parameters divided by `hidden`.
        mixer = qkv + self.q  # width of all matrices of attention together
        net = self.delta
        if net.layers:
            mixer += self.q  # the gate of attention's output
            # A delta net: queries, keys, values; gate, output and two numbers of each head; convolution
            of_net = net.mixed + 2 * net.heads * (net.dim + 1)
            of_net += net.kernel * net.mixed / self.hidden
            mixer += net.layers / self.layers * (of_net - mixer)  # the mean over all layers
        width = mixer + 3 * self.inner + 2  # 3 matrices of the MLP, 2 norms
        return int(self.hidden * width) + biases

    def adapters(self, rank: int) -> int:
        """Returns the number of parameters of the adapters (--lora) of all layers' matrices. rank: --lora"""
        # Inputs plus outputs of a layer's 7 matrices (4 of attention, 3 of the MLP)
        sides = 2 * (self.q + self.kv) + 7 * self.hidden + 3 * self.inner
        return self.layers * rank * sides

    @property
    def critic_params(self) -> int:
        """Number of parameters of a critic: layers, embedding, last norm, and a vector as its head."""
        return self.layers * self.layer + (self.vocab + 2) * self.hidden

    @property
    def policy_params(self) -> int:
        """Number of parameters of a policy. It has an LM head instead of the critic's vector."""
        head = 0 if self.tied else self.vocab
        return self.critic_params + (head - 1) * self.hidden


# Columns: name, layers, hidden, heads, inner, vocab, KV heads
KNOWN = {
    "0.5b": Shape("Qwen2.5-0.5B", 24, 896, 14, 4864, 151936, 2, tied=True),
    "1.5b": Shape("Qwen2.5-1.5B", 28, 1536, 12, 8960, 151936, 2, tied=True),
    "7b": Shape("Qwen2.5-7B", 28, 3584, 28, 18944, 152064, 4),
    "32b": Shape("Qwen2.5-32B", 64, 5120, 40, 27648, 152064, 8),
    "8b": Shape("Llama-3.1-Tulu-3-8B", 32, 4096, 32, 14336, 128256, 8, qkv_bias=False),
    "tiny": Shape("tiny-base", 2, 128, 4, 384, 263, 2, tied=True),  # the model of tools/tiny.py
}


# Size of Qwen3.5 -> layers, hidden, heads, inner, vocab, KV heads, heads of values in a delta net
QWEN3_5 = {
    "0.8B": (24, 1024, 8, 3584, 248320, 2, 16),
    "2B": (24, 2048, 8, 6144, 248320, 2, 16),
    "4B": (32, 2560, 16, 9216, 248320, 4, 32),
    "9B": (32, 4096, 16, 12288, 248320, 4, 32),
    "27B": (64, 5120, 24, 17408, 248320, 4, 48),
}
for size, (*sizes, value_heads) in QWEN3_5.items():
    nets = DeltaNets(sizes[0] * 3 // 4, value_heads)  # in three of four layers
    tied = size in ("0.8B", "2B", "4B")
    shape = Shape(f"Qwen3.5-{size}", *sizes, tied, head_dim=256, qkv_bias=False, delta=nets)
    KNOWN[f"3.5-{size.lower()}"] = shape
# Model types that tie LM head and embedding if config.json has no tie_word_embeddings.
TIED = ("gemma3_text", "smollm3", "cohere", "ernie4_5")


def shape_of(config: dict, name: str) -> Shape:
    """Returns the Shape for `config`, the content of a config.json. Raises UserError if a size is missing.
    name: the model's path, for the message"""
    if "text_config" in config:  # Qwen3.5 with its vision tower
        config = config | config["text_config"]
    family = config.get("model_type", "")
    # Sizes that every config must have, in the order of Shape's fields. `given`: sizes that it may lack.
    sizes = "num_hidden_layers hidden_size num_attention_heads intermediate_size vocab_size".split()
    given = filter(config.get, ("num_key_value_heads", "head_dim"))
    for size in (*sizes, *given):
        value = config.get(size)
        require(
            isinstance(value, int) and value > 0,
            f"the config of {name} ({family}) has no {size} above 0: {value}",
            "a dense decoder like Llama or Qwen",
        )
    layers = config.get("layer_types") or []
    # In the order of DeltaNets' fields after `layers`
    words = "num_value_heads num_key_heads key_head_dim value_head_dim conv_kernel_dim".split()
    nets = [config.get(f"linear_{word}", 0) for word in words]
    return Shape(
        name,
        *(config[size] for size in sizes),
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        tied=config.get("tie_word_embeddings", family in TIED),
        head_dim=config.get("head_dim") or 0,
        qkv_bias=config.get("attention_bias") or family == "qwen2",
        silu=config.get("hidden_act") == "silu",
        fused=family in LLAMA_LIKE,
        delta=DeltaNets(layers.count("linear_attention"), *nets),
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
    params: float,
    layers: int,
    width: int,
    tokens: float,
    square_lengths: float,
) -> float:
    """Returns the FLOP of a forward pass over `tokens` tokens: 2 per parameter and token, plus attention.

    layers: number of layers with attention (others have Qwen3.5's delta nets, which are not counted)
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
    shapes: list[Shape]  # of policy, critic and reference, also of those that the run lacks
    gpu: GPU | None  # the GPU of each rank; None for a run on CPUs
    local: int = 1  # number of ranks on one machine
    host: float = 0.0  # bytes of free memory on one machine; 0 if unknown
    prompts: int = 0  # number of prompts of an epoch; 0 if unknown

    def __post_init__(self) -> None:
        """Replace `auto` in --shard_ranks and --offload, and --pack_len 0 (see `settle`)."""
        self.cfg = settle(self)

    @property
    def models(self) -> dict[str, Shape]:
        """A dict: name of a trained model -> its Shape."""
        policy, critic, _ = self.shapes
        trained = {"critic": critic, "policy": policy}
        return trained if self.cfg.algo == "ppo" else {"policy": policy}

    @property
    def params(self) -> dict[str, int]:
        """A dict: name of a trained model -> its number of parameters. If the critic shares the policy's
        frozen base (see `shared`), it has the policy's number, with the LM head."""
        found = {}
        for name, shape in self.models.items():
            found[name] = shape.critic_params
            if name == "policy" or self.shared:
                found[name] = shape.policy_params
        return found

    @property
    def shared(self) -> bool:
        """Whether one frozen base serves policy and critic: with --lora without another --critic_model."""
        return self.cfg.lora and self.cfg.critic_model in ("", self.cfg.model)

    def shard(self, name: str) -> float:
        """Returns the bytes of a rank's part of a model's trained fp32 weights. With --lora, these are the
        adapters, and every rank holds all of them."""
        if self.cfg.lora:
            return 4 * self.models[name].adapters(self.cfg.lora)
        return 4 * self.params[name] / self.shards

    @property
    def saved(self) -> float:
        """Bytes of a rank's part of the tensors that a checkpoint holds: trained weights, AdamW's moments,
        and with cfg.keeps_ref the reference."""
        ref = self.shard("policy") * self.cfg.keeps_ref  # keeps_ref: True or False
        return (1 + MOMENTS) * sum(map(self.shard, self.params)) + ref

    @property
    def ref(self) -> float:
        """Bytes of a rank's shard of the reference's weights."""
        weight_bytes = self.number_bytes if self.cfg.lora else 4
        _, _, ref = self.shapes
        return weight_bytes * ref.policy_params / self.shards

    def base(self, name: str) -> float:
        """Returns the bytes of a rank's shard of a model's frozen base; 0 without --lora."""
        if not self.cfg.lora:
            return 0
        return self.number_bytes * self.params[name] / self.shards

    @property
    def timed(self) -> bool:
        """Whether the GPU's speeds are known."""
        return self.gpu is not None and self.gpu.flops > 0

    @property
    def number_bytes(self) -> int:
        """Bytes of one number in the compute dtype (--dtype), which activations and gathered weights have."""
        bf16 = self.cfg.dtype == "bfloat16"
        if self.cfg.dtype == "auto":
            bf16 = self.gpu is not None
        return 2 if bf16 else 4

    @property
    def capacity(self) -> float:
        """Bytes of memory of a rank's device; infinite if unknown. On CPUs, the ranks of a machine share its
        memory."""
        if self.gpu:
            return self.gpu.memory
        return self.host / self.local or float("inf")

    @property
    def within(self) -> float:
        """Bytes/s that a rank sends to other ranks of its node. Only for cases that are `timed`."""
        return LINK * self.gpu.link

    @property
    def between(self) -> float:
        """Bytes/s that a node sends to other nodes. Only for cases that are `timed`."""
        gigabits = self.cfg.network or self.gpu.network
        return LINK * gigabits * 1e9 / 8

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of prompt and response in the longest sample. Its response has the maximum length."""
        response = self.cfg.max_response_len
        return self.cfg.model_len - response, response

    def minibatch(self, length: float) -> float:
        """Returns the tokens of a rank's part of a minibatch. length: mean tokens of a sample"""
        parts = self.cfg.minibatches * self.world
        return self.cfg.samples_per_step * length / parts

    def packs(self, length: float) -> int:
        """Returns the number of a rank's packs in a step. length: mean tokens of a sample"""
        of_minibatch = math.ceil(self.minibatch(length) / self.cfg.pack_len)
        return self.cfg.minibatches * of_minibatch

    @property
    def shards(self) -> int:
        """Number of ranks that share one copy of the weights and of the optimizer state. With 1, nothing is
        gathered."""
        return self.cfg.shard_ranks or self.world

    @property
    def offloads(self) -> bool:
        """Whether the state waits in host memory while it is not used."""
        return self.cfg.offload == "on" and self.gpu is not None

    @property
    def state(self) -> float:
        """Bytes of a rank's shards: all weights, also the reference's, and AdamW's moments."""
        cfg = self.cfg
        total = self.saved + self.base("policy")
        if not self.shared:
            total += self.base("critic")
        # A reference that is not in `saved` (see cfg.keeps_ref). With --lora, the policy's base is also the
        # reference, unless --ref_model gives another one.
        shares = cfg.lora and cfg.ref_model in ("", cfg.model)
        if cfg.has_ref and not (cfg.keeps_ref or shares):
            total += self.ref
        return total

    @property
    def engine_sleeps(self) -> bool:
        """Whether the engine frees its weights during training. On a GPU, every engine except the torch
        engine is planned like vLLM, which does."""
        return self.gpu is not None and self.cfg.engine != "torch"

    @property
    def engine_weights(self) -> float:
        """Bytes of the weights that one rank's engine reads."""
        return self.number_bytes * self.params["policy"] / self.cfg.tp

    @property
    def responses(self) -> int:
        """Number of responses that one engine samples in a step."""
        cfg = self.cfg
        engines = self.world // cfg.tp
        prompts = cfg.prompts_per_step + cfg.extra_prompts
        return math.ceil(prompts * cfg.samples_per_prompt / engines)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token in a rank's KV cache. A rank has at least one KV head."""
        policy = self.models["policy"]
        head = policy.q // policy.heads
        width = max(policy.kv // self.cfg.tp, head)
        return 2 * policy.attention_layers * width * self.number_bytes

    @property
    def state_bytes(self) -> float:
        """Bytes of a response's recurrent states in a rank's engine. vLLM keeps two: the running one, and the
        one at the last whole page, for its prefix cache."""
        net = self.models["policy"].delta
        recurrent = 4 * net.heads * net.dim * net.key_dim  # fp32
        inputs = self.number_bytes * (net.kernel - 1) * net.mixed  # of the convolution
        return 2 * net.layers * (recurrent + inputs) / self.cfg.tp

    @cached_property
    def recompute(self) -> dict[str, int]:
        """A dict: name of a trained model -> number of its layers that the backward pass recomputes. Models
        that share a base have the policy's number."""
        return {
            name: recomputed_layers(self, "policy" if self.shared else name) for name in self.models
        }


def recomputed_layers(case: Case, name: str) -> int:
    """Returns how many layers of a model the backward pass recomputes. With --recompute auto, this is the
    smallest number that leaves the share HEADROOM of the device's memory free, or else all layers."""
    layers = case.models[name].layers
    if case.cfg.recompute != "auto":
        words = {"none": 0, "layers": layers}
        count = words.get(case.cfg.recompute, case.cfg.recompute)
        return min(int(count), layers)
    limit = (1 - HEADROOM) * case.capacity
    for count in range(layers):
        instants = _update_instants(case, name, count)
        if max(usage["total"] for usage in instants) <= limit:
            return count
    return layers


def settle(case: Case) -> Config:
    """Returns the config with a value in place of `auto` in --engine (on a GPU), --shard_ranks and --offload,
    and of --pack_len 0:

    engine       see `faster_engine`
    shard_ranks  the ranks of one node, if the run then fits in device and host memory; else 0 (all ranks)
    offload      "off" if the run then fits, else "on"
    pack_len     PACK_LEN tokens, or as many as the longest sample; up to four times as many if that fits and
                 is not slower

    If nothing fits, it returns the values that need the least memory."""
    cfg = case.cfg
    if case.gpu and cfg.engine == "auto":
        return _with_engine(case, faster_engine(case)).cfg
    # The values to try for --shard_ranks and --offload, in order
    shard_ranks = [cfg.shard_ranks]
    if cfg.shard_ranks == "auto":  # case.local: the ranks of a node; 0: all ranks
        shard_ranks = [0] if case.world % case.local else [case.local, 0]
    offload = [cfg.offload]
    if cfg.offload == "auto":
        offload = ["off", "on"] if case.gpu else ["off"]
    least = cfg.pack_len or max(PACK_LEN, cfg.model_len)
    for ranks, place in product(shard_ranks, offload):
        choice = replace(
            cfg,
            shard_ranks=ranks,
            offload=place,
            pack_len=least,
        )
        if choice == cfg:  # nothing is to be chosen
            return cfg
        if _leaves_room(replace(case, cfg=choice)):
            break  # if no choice fits, the last one stays: it needs the least memory
    if cfg.pack_len or not case.timed:
        return choice
    best = math.inf  # seconds of a step with the packs of `choice`
    for length in (least, 2 * least, 4 * least):
        planned = replace(case, cfg=replace(choice, pack_len=length))
        step = seconds(planned, *planned.longest)["step"]
        # Otherwise one pack of half the length holds a rank's whole part of a minibatch, too.
        useful = length < 2 * case.minibatch(cfg.model_len)
        if useful and step <= 1.001 * best and _leaves_room(planned):
            choice = planned.cfg
            best = step
    return choice


def _quarter_lengths(cfg):
    """Returns the mean tokens of prompt and response in a step of quarter length: its responses have a
    quarter of --max_response_len, and its prompts an eighth of --max_prompt_len."""
    return cfg.max_prompt_len / 8, cfg.max_response_len / 4


def faster_engine(case: Case) -> str:
    """Returns the engine for --engine auto on a GPU. With vLLM, the GPU waits for the host, so the torch
    engine may be faster. It is chosen only if its planned step is over a tenth shorter, and if the run is
    like those that were measured: bf16, a model type that FusedDecoder computes, and neither environment nor
    rounds (vLLM keeps earlier turns and rounds in its cache)."""
    cfg = case.cfg
    policy = case.models["policy"]
    measured = policy.fused and case.number_bytes == 2 and not case.state_bytes
    measured = measured and cfg.tp == 1 and not (cfg.env or cfg.round_len)
    if not (measured and case.timed):
        return "vllm"
    lengths = _quarter_lengths(cfg)
    torch = _with_engine(case, "torch")
    vllm = _with_engine(case, "vllm")
    faster = seconds(torch, *lengths)["step"] < 0.9 * seconds(vllm, *lengths)["step"]
    return "torch" if faster and _leaves_room(torch) else "vllm"


def _with_engine(case, engine):
    """Returns the same case with this --engine."""
    return replace(case, cfg=replace(case.cfg, engine=engine))


def _leaves_room(case):
    """Returns whether the case fits, with the share HEADROOM of a GPU's memory left free."""
    if shortage(case):
        return False
    if host_need(case)["machine"] > case.host > 0:  # 0: unknown
        return False
    _, usage = fullest(case)
    limit = (1 - HEADROOM) * case.capacity
    return not case.gpu or usage["total"] <= limit


def check_ranks(cfg: Config, ranks: int) -> None:
    """Raises UserError if --layout, --tp or --shard_ranks does not fit this number of ranks."""
    require(
        cfg.ranks in (0, ranks),
        f"--ranks is {cfg.ranks} (--layout {cfg.layout}), and {ranks} were started",
        f"torchrun with {cfg.ranks} processes, or --ranks {ranks}",
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

# Item -> bytes of memory that the item uses on one rank's device at one instant.
Usage = dict[str, float]


def _per_token(case, shape, recompute):
    """Returns two sizes in bytes per token:

    1. the activations that all layers together keep for the backward pass
    2. the activations that one recomputed layer adds in the backward pass

    recompute: number of layers to recompute. All layers: as in a forward pass without training, the only
        activations are those of the layer that runs"""
    d = shape.hidden
    inner = shape.inner
    # What a layer stores: the inputs of norms and matrix products, tensors of the MLP (layers/mlp.py),
    # and attention's inputs and output. If segments share prefixes, the latter are stored for the tokens of
    # all segments, and attention's output once more. Sharing saves 4 % of the tokens or more
    # (data.LEAST_SHARED).
    of_mlp = 3 - shape.silu if case.gpu else 4  # number of tensors of size `inner`
    shared = 4 * d + shape.q + of_mlp * inner  # numbers a token
    of_segments = 2 * shape.q + 2 * shape.kv  # numbers a token
    # Bytes a token of one layer
    stored = case.number_bytes * (0.96 * shared + of_segments)
    # What a delta net stores besides, fitted to one run of bench/nullgpu/trainer.py (0.8B, one rank)
    net = shape.delta
    stored += case.number_bytes * 6 * net.mixed * net.layers / shape.layers
    whole = stored * (shape.layers - recompute)  # of the layers that are not recomputed
    inputs = case.number_bytes * d * recompute  # a recomputed layer keeps only its input
    # When the backward pass reaches a recomputed layer, the layers after it are freed, and this layer's
    # activations are stored again: as for other layers, but without its input, which is counted already, and
    # without one tensor of the MLP (bench/nullgpu/memory.py).
    again = stored - case.number_bytes * (d + inner)
    return inputs + whole, max(0, again - whole)


def _logits(case, vocab, tokens):
    """Returns the bytes of the chunks of logits that are in memory at once. A GPU holds one chunk of fp32
    logits, and its gradient in the compute dtype. vocab: 0 for a model without logits"""
    chunk = CHUNK_BYTES["cuda" if case.gpu else "cpu"]  # most bytes of a chunk
    alive = 1 + case.number_bytes / 4 if case.gpu else CHUNKS_ALIVE  # number of chunks
    return alive * min(chunk, 4 * vocab * tokens)


def _allocator_loss(case, shape, root, logits, kept):
    """Returns the bytes that torch's allocator holds beyond the tensors in use; 0 on CPUs.

    root: number of weights outside the layers
    logits: bytes of the chunks of logits (see `_logits`)
    kept: bytes of the activations that are kept for the backward pass"""
    if not case.gpu:
        return 0
    # An estimate of the free memory in pieces that are too small for later tensors: a layer in fp32, and a
    # share of the kept activations.
    pieces = 4 * shape.layer + HOLES * kept
    of_root = 0 if case.cfg.lora else 4 * root / case.shards  # a rank's shard in fp32
    if case.shards == 1:  # fitted to measurements
        return pieces + max(of_root, logits / 2)
    # Outputs (the whole weights) and inputs (a rank's shard) of two all-gathers: the root's and one layer's.
    # Only FSDP's CUDA stream can reuse this memory.
    outputs = case.number_bytes * (root + shape.layer)
    inputs = outputs / case.shards
    return pieces + of_root + logits + outputs + inputs


def _update_instants(case, name, recompute):
    """Returns a list: the memory (Usage with its total) at two instants of an update of the model `name`,
    whose backward pass recomputes `recompute` layers. The peak is at one of the instants, because the fused
    AdamW step needs no further memory."""
    shape = case.models[name]
    params = case.params[name]
    b = case.number_bytes  # bytes of a number in the compute dtype
    d = shape.hidden
    lora = case.cfg.lora > 0  # only adapters are trained
    # The root (all weights outside the layers) stays gathered until the end of the backward pass.
    root = params - shape.layers * shape.layer  # number of weights
    vocab = shape.vocab if name == "policy" else 0  # the critic makes no logits
    head = 0 if lora else d * max(vocab, 1)  # weights of the head that have gradients
    layer = 0 if lora else shape.layer  # weights of a layer that have gradients
    samples = math.ceil(case.minibatch(length=1))  # of a rank's part of a minibatch
    tokens = min(case.cfg.pack_len, samples * case.cfg.model_len)  # of the largest pack
    kept, again = _per_token(case, shape, recompute)  # bytes a token
    activations = tokens * (kept + 2 * b * d)  # 2: tensors of size d outside the layers
    # A layer's backward pass also holds the gradients of down_proj's input and of the MLP's gate and up
    # projections, and two gradients of size d.
    width = 3 * shape.inner + 2 * d
    working = tokens * (again + b * width)
    logits = _logits(case, vocab, tokens)
    copied = 0 if lora and case.shards == 1 else b  # bytes of a weight's copy for computing
    gathered = copied * root  # bytes
    if case.shards == 1:
        # Nothing is gathered, but a layer that is not recomputed keeps copies of its weights.
        gathered += copied * shape.layer * (shape.layers - recompute)
    shard = case.shard(name)
    common = _asleep(case) | {  # in memory at both instants
        "weights": shard + case.base(name),
        "gradients": shard,
        "AdamW": MOMENTS * shard,
        "allocator": _allocator_loss(case, shape, root, logits, activations),
    }
    # "whole gradients" are the gradients that FSDP has not yet reduced to shards.
    # 1. Backward pass of the LM head. Its gradient is in memory twice: in fp32 and in the compute dtype.
    of_head = {
        "gathered weights": gathered,
        "activations": activations,
        "logits": logits,
        "whole gradients": (4 + b) * head,
    }
    # 2. Backward pass of layer i. In memory are the gradients of the LM head (in the compute dtype) and of
    #    layer i + 1 (in fp32).
    of_layer = {
        "gathered weights": gathered + copied * shape.layer,
        "activations": activations + working,
        "whole gradients": b * head + 4 * layer,
    }
    return [_with_total(case, common | usage) for usage in (of_head, of_layer)]


def _engine_memory(case):
    """Returns the memory of an engine while it samples, as a Usage. On a GPU, an engine uses --engine_share
    of the memory: first for weights and buffers, and the rest for the KV cache. The torch engine takes no
    more than --max_num_seqs responses of full length need."""
    cfg = case.cfg
    rows = cfg.max_num_seqs  # number of responses that are decoded at once
    if not (case.gpu or cfg.eval_data):  # an evaluation may have more responses than a step
        rows = min(rows, case.responses)
    policy = case.models["policy"]
    buffers = SAMPLER_COPIES * 4 * rows * policy.vocab  # bytes
    cache = rows * cfg.engine_len * case.kv_bytes
    if case.gpu:
        buffers += ENGINE_BUFFERS
        if not case.engine_sleeps:  # the torch engine
            sizes = policy.hidden, policy.inner, policy.vocab
            buffers = cfg.torch_buffers(*sizes, case.number_bytes)
        share = cfg.engine_share * case.gpu.memory
        room = max(share - case.engine_weights - buffers, 0.0)
        pages = 1 + rows * math.ceil(cfg.engine_len / KV_PAGE)  # 1: a page for empty slots
        cache = min(room, pages * KV_PAGE * case.kv_bytes)
        if case.engine_sleeps:
            cache = room
    return {"engine weights": case.engine_weights, "engine buffers": buffers, "KV cache": cache}


def _asleep(case):
    """Returns the engine's memory while models are trained, as a Usage with one item: "sleeping engine" for
    vLLM; "engine weights" for the torch engine, which keeps its weights. The KV cache of vLLM on a CPU
    (0.25 GiB) is neglected."""
    if case.engine_sleeps:
        return {"sleeping engine": SLEEPING_ENGINE}
    return {"engine weights": case.engine_weights}


def memory(case: Case) -> list[tuple[str, Usage]]:
    """Returns a list of (phase, Usage): the memory at several instants of a training step, in order of time.
    The peak is at one of these instants. The phases: "sync" (the engine gets new weights), "rollout", "ref",
    "critic" and "policy"."""
    policy = case.models["policy"]
    # A sync gathers one layer or the root (all other weights) at a time. FSDP copies this rank's shard,
    # gathers all shards in a buffer, and copies the buffer to tensors. So each gathered weight is in memory
    # twice, and this rank's shard once more. These are numbers of weights; in `sync`, they become bytes.
    root = case.params["policy"] - policy.layers * policy.layer
    largest = max(root, policy.layer)
    gathered = 2 * largest
    if case.shards > 1:
        gathered += largest / case.shards
    elif case.cfg.lora:
        # Nothing is gathered. Merging the adapters copies one matrix, partly in fp32: 8 times its size.
        gathered = 8 * policy.hidden * policy.inner
    # While vLLM loads the embedding, or the output layer, it has this matrix two more times
    # (VLLMEngine.load). If both are tied, it also keeps the memory of an output layer. Without engine_sleeps
    # (torch engine, CPUs), no copies are counted.
    copies = case.engine_sleeps * (2 + policy.tied) * policy.vocab * policy.hidden  # numbers
    sync = {
        "weights": case.shard("policy") + case.base("policy"),
        # HOLES: between the tensors of a frozen base (--lora)
        "gathered weights": case.number_bytes * gathered + HOLES * case.base("policy"),
        "engine weights": case.engine_weights + case.number_bytes * copies,
    }
    # `_asleep` adds the memory that vLLM has even at sleep. For the torch engine, it has the same "engine
    # weights" as sync.
    instants = [
        ("sync", sync | _asleep(case)),
        ("rollout", _engine_memory(case)),
    ]
    # Without --ref_model, ref has the policy's shape. Then the policy's update needs more memory than ref.
    if case.cfg.ref_model:
        _, _, shape = case.shapes  # the reference's
        tokens = case.cfg.pack_len
        # The reference is not trained. Only the layer that runs has activations, most of them in its MLP: for
        # each token three tensors of size `inner` (four without silu), and up to six of size `hidden`. A
        # delta net needs as much as a recomputed layer. All activations are freed before there are logits.
        _, of_net = _per_token(case, shape, recompute=shape.layers)
        of_mlp = case.number_bytes * ((4 - shape.silu) * shape.inner + 6 * shape.hidden)
        activations = tokens * max(of_net, of_mlp)
        root_and_layer = shape.policy_params - (shape.layers - 1) * shape.layer
        ref = {
            "weights": case.ref,
            "activations": max(activations, _logits(case, shape.vocab, tokens)),
            "gathered weights": case.number_bytes * root_and_layer,
        }
        instants.append(("ref", ref | _asleep(case)))
    found = [(phase, _with_total(case, usage)) for phase, usage in instants]
    for name, recompute in case.recompute.items():  # the phases "critic" and "policy"
        found += [(name, usage) for usage in _update_instants(case, name, recompute)]
    return found


def _with_total(case, usage):
    """Returns `usage` with two more items:

    CUDA and idle state: the memory of CUDA and NCCL, plus the weights and AdamW's moments that are on the
        device but not counted in `usage`
    total: the sum of all items"""
    idle = CUDA_CONTEXT + NCCL_BUFFERS if case.gpu else 0.0
    if not case.offloads:
        counted = usage.get("weights", 0.0) + usage.get("AdamW", 0.0)
        idle += case.state - counted
        idle += HOLES * case.state  # unused memory between many small tensors
    elif case.cfg.lora:  # Only the base moves to the host. Adapters and their moments stay,
        idle += case.saved  # which are what a checkpoint holds.
    usage = usage | {"CUDA and idle state": idle}
    return {"total": sum(usage.values())} | usage


def fullest(case: Case) -> tuple[str, Usage]:
    """Returns the phase and Usage of the instant that needs the most memory."""
    return max(memory(case), key=lambda instant: instant[1]["total"])


def kv_tokens(case: Case) -> int:
    """Returns the number of tokens that an engine's KV cache can hold, beside the recurrent states of
    --max_num_seqs responses."""
    states = min(case.cfg.max_num_seqs, case.responses) * case.state_bytes
    room = _engine_memory(case)["KV cache"] - states
    return max(0, int(room / case.kv_bytes))


# --- host, disk, seconds


# The files with the memory limit of a container, for both versions of cgroups
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> float:
    """Returns the bytes of free memory on this machine, at most the limit of the container; 0 where the
    system does not report it."""
    found = []
    for file in CGROUPS:
        with suppress(OSError, ValueError):  # ValueError: the limit is "max"
            found.append(float(Path(file).read_text()))
    with suppress(OSError):
        words = Path("/proc/meminfo").read_text().split()
        found.append(1024.0 * int(words[words.index("MemAvailable:") + 1]))
    return min(found, default=0.0)


def host_need(case: Case) -> dict[str, float]:
    """Returns a dict: item -> bytes of host memory of one rank. But the item "machine" is the host memory of
    all ranks of a machine."""
    rank = {
        "rank's waiting state": case.state if case.offloads else 0,
        "rank's checkpoint copy": case.saved,
        "rank's libraries": LIBRARIES if case.gpu else LIBRARIES / 10,
    }
    of_rank = sum(rank.values())
    if not case.gpu:  # then the models and the engine are in host memory
        _, usage = fullest(case)
        of_rank += usage["total"]
    return rank | {"machine": case.local * of_rank}


def disk(case: Case) -> dict[str, int]:
    """Returns a dict: item -> bytes on the disk. The items: one checkpoint, the bf16 exports of all trained
    models, and all checkpoints that are kept at once with the exports."""
    cfg = case.cfg
    checkpoint = case.saved
    if not cfg.lora:  # with --lora, one rank's part already has all adapters
        checkpoint *= case.shards
    exports = 2 * sum(case.params.values())  # bf16: 2 bytes a weight
    # Besides the --keep newest checkpoints: the one that is being written, and the best one.
    count = cfg.keep + 1
    # "auto" is a mean over the evaluation sets.
    if cfg.keep_best and (cfg.eval_data or cfg.keep_best != "auto"):
        count += 1
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


def sent(size: float, ranks: int, nodes: int) -> Sent:
    """Returns the bytes that a rank sends in a collective over `ranks` ranks on `nodes` nodes.

    size: bytes of the whole tensor; for an all-reduce, which is a reduce-scatter and an all-gather, twice
        these bytes"""
    # In NCCL's ring, each rank sends `total` bytes to the next rank (nccl-tests, doc/PERFORMANCE.md, "bus
    # bandwidth"). Only one rank of each node has its next rank on another node.
    total = size * (ranks - 1) / ranks
    outside = 0  # share of the ranks that send to another node
    if nodes > 1:
        outside = nodes / ranks
    return Sent(total * (1 - outside), total * outside)


def traffic(case: Case, name: str) -> dict[str, Sent]:
    """Returns a dict: collective in the updates of the model `name` -> bytes that a rank sends.

    forward: all-gathers in a pack's forward pass
    backward: all-gathers in a pack's backward pass
    reduce: reduce-scatter of a pack's gradients
    all-reduce: sum of the gradients over all copies of the model (--shard_ranks), once an update"""
    shape = case.models[name]
    params = case.params[name]
    nodes = math.ceil(case.shards / case.local)  # that share one copy of the weights
    copies = case.world // case.shards
    reduced = 4 * params  # fp32 gradients
    if case.cfg.lora:  # every rank holds all adapters
        reduced = 0
        copies = case.world
    nodes_of_copies = min(copies, math.ceil(case.world / case.local))
    # Bytes of all layers' weights. The root stays gathered after the forward pass.
    layers = case.number_bytes * shape.layers * shape.layer
    return {
        "forward": sent(case.number_bytes * params, case.shards, nodes),
        "backward": sent(layers, case.shards, nodes),
        "reduce": sent(reduced, case.shards, nodes),
        "all-reduce": sent(2 * case.shard(name), copies, nodes_of_copies),
    }


def sent_in_step(case: Case) -> Sent:
    """Returns the bytes that a rank sends in a step, if all samples have the maximum length. The samples
    themselves (8 bytes a token) are not counted."""
    cfg = case.cfg
    packs = case.packs(cfg.model_len)
    passes = cfg.passes_per_step * packs
    within = 0.0
    between = 0.0
    for name, params in case.params.items():
        extra = packs  # forward passes without training: the critic's values
        if name == "policy":
            # One sync, and the old log-probs (needs_old_logp: True or False)
            extra = 1 + packs * cfg.needs_old_logp
            if cfg.has_ref:  # the reference, in passes of the policy's size
                _, _, ref = case.shapes
                extra += packs * ref.policy_params / params
        counts = {  # how often each collective runs in a step
            "forward": passes + extra,
            "backward": passes,
            "reduce": passes,
            "all-reduce": cfg.passes_per_step * getattr(cfg, f"{name}_updates"),
        }
        for collective, size in traffic(case, name).items():
            within += counts[collective] * size.within
            between += counts[collective] * size.between
    return Sent(within, between)


def _network(case, size):
    """Returns the seconds in which each rank sends `size` (a Sent). Transfers within and between nodes run at
    the same time, so the result is the longer time."""
    of_node = case.local * size.between  # bytes that all ranks of a node send to other nodes
    return max(size.within / case.within, of_node / case.between)


def layer_flops(gpu: GPU, hidden: int) -> float:
    """Returns the FLOP per second that layers of this hidden size reach."""
    return MFU * hidden / (hidden + MFU_HALF) * gpu.flops


def _passes(case, name, prompt, response):
    """Returns the seconds of two kinds of passes of the model `name` in a step. FSDP computes and transfers
    at the same time, so only the longer of both times counts.

    1. a forward pass on each pack, without training
    2. all updates of all epochs (--passes_per_step): forward and backward passes, and the optimizer

    The recurrence of Qwen3.5's delta nets is not counted: 1 to 5 % of the FLOP of the matrices."""
    cfg = case.cfg
    shape = case.models[name]
    layers = shape.layers
    length = prompt + response
    packs = case.packs(length)
    tokens = cfg.samples_per_step * length / case.world / packs  # of a pack
    flop = forward_flops(
        layers * shape.layer,
        shape.attention_layers,
        shape.q,
        tokens,
        tokens * length,  # sum of the squared lengths: tokens / length samples, each of length²
    )
    device = flop / layer_flops(case.gpu, shape.hidden)  # seconds of the layers' forward pass
    host = layers * LAYER_HOST  # seconds of a forward and a backward pass together
    if case.shards > 1:
        host += layers * FSDP_HOST
    # A forward pass is a third of forward and backward pass, for the device and about for the host. A
    # backward pass costs two forward passes, or one if the weights are frozen, and one more in each
    # recomputed layer.
    computed_forward = max(device, host / 3)
    recomputed = case.recompute[name]
    forwards = 2 - bool(cfg.lora) + recomputed / layers
    host_back = host * 2 / 3 + recomputed * RECOMPUTE_HOST
    computed_backward = max(device * forwards, host_back)
    if name == "policy":
        head_forward, head_backward = _head_seconds(case, shape, tokens * response / length)
        computed_forward += head_forward
        computed_backward += head_backward
    sending = {}  # collective -> seconds
    for collective, size in traffic(case, name).items():
        sending[collective] = _network(case, size)
    transfer = sending["backward"] + sending["reduce"]
    forward = max(computed_forward, sending["forward"])
    backward = max(computed_backward, transfer)
    # The last backward pass of an update also sums the gradients over all copies of the model.
    last = max(computed_backward, transfer + sending["all-reduce"])
    updates = getattr(cfg, f"{name}_updates")
    optimizer = OPTIMIZER_HOST[case.shards > 1] * layers
    epoch = packs * (forward + backward)
    epoch += updates * (last - backward + optimizer)
    return packs * forward, cfg.passes_per_step * epoch


def _head_seconds(case, shape, tokens):
    """Returns the seconds of a forward and of a backward pass of the output layer, for `tokens` tokens. A
    forward pass has one matrix product, a backward pass three: it computes the logits again."""
    logits = tokens * shape.vocab  # number of logits
    product = 2 * logits * shape.hidden / (MATMUL * case.gpu.flops)  # seconds
    # Each chunk reads and writes the fp32 gradient of the output layer's weight: 4 + 4 bytes a weight.
    chunks = 4 * logits / CHUNK_BYTES["cuda"]  # number of chunks
    gradient = 8 * shape.vocab * shape.hidden
    forward, backward = HEAD_BYTES  # bytes a logit
    moved = backward * logits + chunks * gradient
    copy = STREAM * case.gpu.hbm  # bytes/s
    return product + forward * logits / copy, 3 * product + moved / copy


def decode_seconds(case: Case, prompt: float, response: float) -> float:
    """Returns the seconds in which an engine decodes the responses of a step.

    prompt, response: mean lengths in tokens"""
    cfg = case.cfg
    gpu = case.gpu
    # To decode one token of each response in a batch, an engine reads the weights and the KV cache once. This
    # costs the time for reading or the time for computing, whichever is longer.
    fitting = kv_tokens(case) // (prompt + response)  # responses that the KV cache holds
    batch = max(1, min(cfg.max_num_seqs, case.responses, fitting))
    cached = batch * (prompt + response / 2)  # tokens in the KV cache, as a mean over the response
    # A step reads and writes the running state of each response (half of state_bytes).
    read = case.engine_weights + cached * case.kv_bytes + batch * case.state_bytes
    speed = BANDWIDTH * gpu.hbm  # bytes/s
    reading = read / speed  # seconds, as `kernels` and `device`
    flop = 2 * case.params["policy"] * batch / cfg.tp
    policy = case.models["policy"]
    kernels = LAYER_DECODE * policy.layers  # seconds besides reading and computing
    device = max(reading, flop / layer_flops(gpu, policy.hidden)) + kernels
    # tokens: of all responses of one engine. steps: decode steps for them, with full batches.
    tokens = cfg.samples_per_step * cfg.tp / case.world * response
    steps = tokens / batch
    of_step, of_response = DECODE_HOST.get(cfg.engine, DECODE_HOST["vllm"])  # host seconds
    # The longest of three:
    # 1. All steps with full batches. Between two steps, the device waits for the host.
    full = steps * (device + of_step)
    # 2. The longest response. Near its end it is decoded almost alone: a step reads little but the weights.
    longest = cfg.max_response_len * (case.engine_weights / speed + kernels + of_step)
    # 3. The host, if it is slower than the device.
    host = max(steps, cfg.max_response_len) * of_step + tokens * of_response
    return max(full, longest, host)


def _moved_bytes(case, phase):
    """Returns how many bytes of a rank's weights and optimizer state move between host and device in the
    phase (see `seconds`), if the run offloads."""
    if phase in case.models:
        # With --lora, only the base moves, and only to the device, because it does not change. Otherwise the
        # weights move with their optimizer's state, to the device and back.
        return case.base(phase) or 2 * (1 + MOMENTS) * case.shard(phase)
    if phase in ("sync", "old_logp"):
        return case.base("policy") or case.shard("policy")
    return case.ref if phase == "ref" else 0


def seconds(case: Case, prompt: float, response: float) -> dict[str, float]:
    """Returns a dict: phase -> estimated seconds in a step of the run. The item "step" is the sum of all
    phases. case.gpu must have speeds.

    prompt, response: mean lengths in tokens"""
    cfg = case.cfg
    forward, training = _passes(case, "policy", prompt, response)
    gathering = _network(case, traffic(case, "policy")["forward"])  # of all weights, for the engine
    phases = {
        "sync": gathering + case.engine_weights / PUSH + WAKE * case.engine_sleeps,
        "rollout": decode_seconds(case, prompt, response),
    }
    if cfg.has_ref:  # a parameter costs the same time as in the policy's forward passes
        _, _, ref = case.shapes
        phases["ref"] = forward * ref.policy_params / case.params["policy"]
    if cfg.needs_old_logp:
        phases["old_logp"] = forward
    if "critic" in case.models:
        # As for the policy: forward passes (the critic's values), training
        phases["values"], phases["critic"] = _passes(case, "critic", prompt, response)
    phases["policy"] = training
    if case.offloads:
        for phase in phases:
            phases[phase] += _moved_bytes(case, phase) / HOST_COPY
    return phases | {"step": sum(phases.values())}


def extra_seconds(case: Case) -> dict[str, float]:
    """Returns the seconds of a run besides its steps: of the start, and those that the first step takes
    longer than others because it pins host memory."""
    cfg = case.cfg
    read = case.number_bytes * sum(case.params.values()) / case.shards  # bytes
    pinned = case.offloads * case.state  # bytes; offloads: True or False
    start = START.get(cfg.engine, START["vllm"])  # "auto" is left only on CPUs
    return {"start": start + read / LOAD, "first step, longer by": pinned / PIN}


# --- does it fit?


def shortage(case: Case) -> str:
    """Returns a sentence that says which memory is too small; "" if the run fits. The plan for CPUs is not
    exact, so a run on CPUs may need up to twice the available memory."""
    phase, usage = fullest(case)
    limit = case.capacity if case.gpu else 2 * case.capacity
    if usage["total"] > limit:
        largest = sorted(usage, key=usage.get, reverse=True)[1:4]  # without the total
        items = ", ".join(f"{item} {gib(usage[item])}" for item in largest)
        return (
            f"phase {phase} needs {gib(usage['total'])} a rank ({items}), but a rank has "
            f"{gib(case.capacity)}"
        )
    tokens = kv_tokens(case)
    length = case.cfg.engine_len
    if case.gpu and tokens < length:
        return (
            f"the engine's {case.cfg.engine_share:.0%} of {gib(case.capacity)} holds "
            f"{tokens:,} tokens beside the weights, but a prompt with its response may "
            f"have {length:,}"
        )
    if case.offloads and 0 < case.host < case.state * case.local:
        return (
            f"each rank keeps {gib(case.state)} in host memory, but the {case.local} "
            f"ranks of a machine share {gib(case.host)}"
        )
    return ""


def remedy(case: Case) -> str:
    """Returns flags that make the case fit, as text: the first of `_changes` that fits. If none fits, tries
    all of them with 2, 4, 8, … times as many ranks. If none fits then, returns the advice to use a smaller
    model or other devices."""
    cfg = case.cfg
    of_machine = case.local  # most ranks of a machine
    if case.gpu and case.world <= of_machine:  # one machine; it may have NODE GPUs
        of_machine = max(of_machine, NODE)
    for doublings, change in product(range(11), _changes(case)):
        ranks = case.world * 2**doublings
        local = min(ranks, of_machine)
        other = replace(cfg, **change)
        if shortage(replace(case, world=ranks, local=local, cfg=other)):
            continue
        words = []
        if ranks > case.world:
            words.append(f"{ranks} ranks, {local} a machine,")
        for name, value in change.items():
            if getattr(cfg, name) != value:
                words.append(f"--{name} {value}")
        return " ".join(words).rstrip(",")
    return "a smaller --model, or devices with more memory"


def _changes(case):
    """Returns the changes that `remedy` tries, in order. A change is a dict: flag -> value. No flag changes
    the algorithm, and the flags in `free` cost only speed. The order is: no flag, single flags, all flags in
    `free`, and all flags in `free` with another flag."""
    free = {
        "recompute": "auto",
        "offload": "on",
        "pack_len": case.cfg.model_len,
        "shard_ranks": "auto",
    }
    single = [*free.items()]
    # 0.2 to 0.95, the nearest to the given share first
    shares = [share / 20 for share in range(4, 20)]
    shares.sort(key=lambda share: abs(share - case.cfg.engine_share))
    single += product(["engine_share"], shares)
    for size in (2, 4, 8):
        if case.engine_sleeps and case.world % size == 0:
            single.append(("tp", size))
    single += product(["max_num_seqs"], (256, 64, 16, 8))
    changes = [{}]
    changes += [{flag: value} for flag, value in single]
    changes += [free | {flag: value} for flag, value in single]  # the first four are `free` itself
    return changes


def verdict(case: Case) -> str:
    """Returns a line that says whether the case fits, and if not, the `remedy`."""
    if lack := shortage(case):
        return f"does not fit: {lack}; needed: {remedy(case)}"
    phase, usage = fullest(case)
    return f"fits: {gib(usage['total'])} of a rank's {gib(case.capacity)} in phase {phase}"


def engine_choice(case: Case) -> str:
    """Returns a line: the engine that samples, and the seconds of a rollout of quarter length with each
    engine that can run the case; "" if the GPU's speeds are unknown."""
    if not case.timed:
        return ""
    cfg = case.cfg
    # The torch engine has neither tensor parallelism (--tp) nor recurrent states (Qwen3.5).
    engines = ["vllm"] if cfg.tp > 1 or case.state_bytes else ["vllm", "torch"]
    times = []
    for engine in engines:
        time = decode_seconds(_with_engine(case, engine), *_quarter_lengths(cfg))
        times.append(f"{engine} {time:,.1f} s")
    return f"engine: {cfg.engine}; a rollout of quarter length: {', '.join(times)}"


# --- the plan as a table

# section -> row -> cell, or section -> row -> column -> cell. A cell is a number or a word.
Plan = dict[str, dict]


def plan_of(case: Case) -> Plan:
    """Returns the whole plan (see Plan)."""
    cfg = case.cfg
    samples = cfg.samples_per_step
    steps = cfg.with_steps(case.prompts or ASSUMED_PROMPTS).steps
    peaks = {}  # phase -> the Usage with the largest total
    for phase, usage in memory(case):
        if phase not in peaks or usage["total"] > peaks[phase]["total"]:
            peaks[phase] = usage
    needs = host_need(case) | disk(case)
    models = {name: _model_rows(case, name, steps) for name in case.models}
    assumed = f"{ASSUMED_PROMPTS:,} (assumed)"
    plan = {
        "run": {
            "ranks": case.world,
            "ranks of a shard group": case.shards,
            "device": case.gpu.name if case.gpu else "CPU",
            "steps": steps,
            "prompts, at most" if cfg.skip_solved else "prompts": case.prompts or assumed,
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
        "models": _columns(models),  # _columns makes the inner dict's keys the rows
        "memory of a rank, GiB": _columns({phase: _in_gib(peak) for phase, peak in peaks.items()}),
        "host and disk, GiB": _in_gib(needs),
    }
    if cfg.template_args:
        plan["run"]["--template_args"] = " ".join(cfg.template_args)
    if case.state_bytes:
        plan["batches"]["states of a response, MiB"] = case.state_bytes / 2**20
    if case.timed:
        plan["estimated seconds"] = _columns(_times(case, steps))
    if case.timed and case.world > 1:
        plan["network, full length"] = _network_rows(case)
        if case.world > case.local:
            machine = cfg.network or case.gpu.network
            plan["run"]["network of a machine"] = f"{machine:,.0f} Gb/s (--network)"
    return plan


def _times(case, steps):
    """Returns a dict: length of the responses -> phase -> estimated seconds of the phase in one step. The
    inner dicts also have the seconds of the start, and the hours of 1,000 steps and of the whole run.

    steps: number of steps of the run"""
    times = {
        "quarter length": seconds(case, *_quarter_lengths(case.cfg)),
        "full length": seconds(case, *case.longest),
    }
    for phases in times.values():
        phases |= extra_seconds(case)
        for n in (1000, steps):
            phases[f"{n:,} steps, hours"] = n * phases["step"] / 3600
    return times


def _network_rows(case):
    """Returns the section of the plan about the network: what a rank sends, and how fast."""
    sends = sent_in_step(case)
    of_rank = case.between / case.local  # bytes/s, if all ranks of a node send at the same time
    return {
        "GiB a rank sends/step": {
            "in its node": sends.within / GIB,
            "between nodes": sends.between / GIB,
        },
        "assumed GB/s of a rank": {
            "in its node": case.within / 1e9,
            "between nodes": of_rank / 1e9,
        },
    }


def _in_gib(sizes):
    return {name: size / GIB for name, size in sizes.items()}


def _model_rows(case, name, steps):
    """Returns the rows of one model in the section "models" of the plan. steps: number of steps of the run"""
    cfg = case.cfg
    updates = getattr(cfg, f"{name}_updates")
    if name == "policy":
        steps -= cfg.freeze_policy_steps
    return {
        "parameters": case.params[name],
        "updates": steps * cfg.passes_per_step * updates,
        "samples an update": cfg.samples_per_step / updates,
        "layers recomputed": case.recompute[name] or "none",
    }


def _columns(columns):
    """Turns column -> name -> number into name -> column -> number. A missing number is 0."""
    rows = {}
    for column, numbers in columns.items():
        for name, number in numbers.items():
            row = rows.setdefault(name, dict.fromkeys(columns, 0))
            row[column] = number
    return rows


def as_text(plan: Plan) -> list[str]:
    """Returns the plan as lines of at most 80 characters (94 with a critic and --ref_model)."""
    lines = []
    for section, rows in plan.items():
        head = f"{section:24}"
        of_rows = []
        for name, cells in rows.items():
            if not isinstance(cells, dict):
                cells = {"": cells}
            text = "".join(f" {_shown(x):>13}" for x in cells.values())
            of_rows.append(f"  {name:22}{text}")
        # `cells` is the last row's. All rows of a section have the same columns.
        head += "".join(f"{column:>14}" for column in cells)
        lines += ["", head.rstrip(), *of_rows]
    return lines


def _shown(x):
    """Returns a cell as text. A number below 100 gets one decimal if it is no whole number."""
    if isinstance(x, str):
        return x
    return f"{x:,.1f}" if x % 1 and x < 100 else f"{x:,.0f}"


# --- the command


@dataclass(frozen=True)
class PlanConfig(Config):
    """The flags of tools.plan: all flags of train.py, and two more."""

    gpu: Literal[tuple(GPUS)] = "H100"  # the GPU to plan for; --device cpu plans for CPUs
    json: bool = False  # print JSON: the plan, whether it fits, and all flags


def ranks_of_machine(world: int) -> int:
    """Returns the number of ranks on one machine, at most NODE. torchrun starts equally many ranks on each
    machine. world: number of all ranks"""
    return max(n for n in range(1, NODE + 1) if world % n == 0)


def command(case: Case, words: Sequence[str]) -> str:
    """Returns the command that starts the planned run. words: those of this program's command line"""
    # All words except --gpu and --json, which train.py does not have
    flags = re.sub(r" --(gpu[= ]\S+|(no[-_])?json)\b", "", f" {shlex.join(words)}")
    if case.world <= NODE:
        return f"python train.py{flags}"
    local = ranks_of_machine(case.world)
    ranks = f"--nnodes {case.world // local} --nproc-per-node {local}"
    place = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun {ranks} {place} train.py{flags}"


def main() -> None:
    """Print the plan."""
    cfg = configs.parse(prog="tools.plan", kind=PlanConfig)
    world = cfg.ranks or 1
    prompts = 0
    with suppress(UserError):  # without the data, `prompts` is 0
        # A set, because repeated rows are dropped. "": no error of a row is printed.
        prompts = len({problem_of(row, "") for _, row in chain(*map(read_rows, cfg.data))})
    check_ranks(cfg, world)
    paths = (cfg.model, cfg.critic_model, cfg.ref_model)
    shapes = [read_shape(path or cfg.model) for path in paths]
    gpu = None if cfg.device == "cpu" else GPUS[cfg.gpu]
    host = 0.0 if gpu else host_memory()  # GPUs are of another machine, whose memory is unknown (0)
    case = Case(cfg, world, shapes, gpu, ranks_of_machine(world), host, prompts)
    plan = plan_of(case)
    said = {"verdict": verdict(case), "engine": engine_choice(case)}
    if cfg.json:
        print(json.dumps(plan | said | {"config": vars(cfg)}))
        return
    print("\n".join(as_text(plan)), end="\n\n")
    for line in filter(None, said.values()):
        print(textwrap.fill(line, 80))
    print(f"command: {command(case, sys.argv[1:])}")


if __name__ == "__main__":
    with user_errors("tools.plan"):
        main()
