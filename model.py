"""Policy, critic and reference: Hugging Face decoders that run on packs.

A pack (data.Pack) is N segments end to end. A segment is one prompt with one response. If several segments
begin with the same tokens, these tokens are computed once.

Logits and log-probs are fp32: bf16 is too imprecise for a clipped ratio.

Letters in the shapes of tensors:

    N           segments of a pack
    T           tokens of a pack
    U           tokens of a pack that are computed
    S           tokens that attention reads: the U computed tokens, some of them copied (see Segments)
    V, D        sizes of the vocabulary and of the hidden states
    H, Hkv, d   heads of queries, heads of keys and values, size of a head"""

import contextlib
import inspect
import math
import operator
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.activations import SiLUActivation

import dist
from configs import CHUNK_BYTES, LLAMA_LIKE, explained, from_hub, model_folder, read_json, require
from data import Pack
from dist import Device, Weights

if torch.cuda.is_available():  # CPU builds of torch have no Triton
    import gpu_kernels

# --- families

# The supported model types -> names of the settings that must be off, because vLLM ignores them. In families
# with "sliding_window", only vLLM uses that setting. The names "untied head" and "gates" are no settings:
# `check_settings` computes them. docs/models.md says why other model types are refused.
FAMILIES = {
    "qwen2": ["use_sliding_window"],
    "qwen3": ["use_sliding_window", "attention_bias"],
    "llama": ["sliding_window"],
    "mistral": [],
    "granite": ["sliding_window"],
    "olmo2": ["sliding_window"],
    "olmo3": [],
    "smollm3": [],
    "phi3": [],
    "gemma3_text": [],
    "glm": ["sliding_window"],
    "glm4": ["sliding_window"],
    "cohere": ["attention_bias", "untied head", "sliding_window"],
    "seed_oss": ["sliding_window"],
    "ernie4_5": ["use_bias", "sliding_window"],
    "exaone4": [],
    "qwen3_5": ["attention_bias", "gates"],
    "qwen3_5_text": ["attention_bias", "gates"],
}

# Settings that must be off, because this file does not implement them.
MUST_BE_OFF = [
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "quantization_config",
]
# The supported types of rotary embeddings. The frequencies of "dynamic" and "longrope" depend on the longest
# sequence of the batch, so log-probs would depend on the pack.
ROPES = {"default", "linear", "llama3", "yarn"}
LAYERS = {"full_attention", "sliding_attention"}  # the supported types of layers


def check_settings(config: PreTrainedConfig, path: str) -> None:
    """Raises UserError for a setting that the trainer or vLLM would compute wrong."""
    family = config.model_type
    settings = config.to_dict() | {"untied head": not config.tie_word_embeddings}
    # For Qwen3.5. transformers ignores attn_output_gate and output_gate_type, and the kernels know only silu.
    # None: the config lacks the setting.
    gates = [settings.get(name) for name in ("attn_output_gate", "output_gate_type", "hidden_act")]
    settings["gates"] = not set(gates) <= {None, True, "silu", "swish"}
    # transformers makes the family ministral of a mistral config with layer_types.
    must_be_off = MUST_BE_OFF + FAMILIES.get(family, ["layer_types"])
    wrong = [name for name in must_be_off if settings.get(name)]
    for rope in ropes(config):
        kind = rope.get("rope_type") or "default"  # a config without a type means the default
        if kind not in ROPES:
            wrong.append(kind)
    layers = set(settings.get("layer_types") or ()) - LAYERS
    if family == "qwen3_5_text":  # see `delta_net`
        layers -= {"linear_attention"}
    wrong += layers
    require(
        not wrong,
        f"{path} ({family}) has settings that the trainer or vLLM would compute wrong: "
        f"{', '.join(wrong)}",
        "a model without them (docs/models.md)",
    )


def ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Returns a list of dicts with the parameters of the rotary embeddings. The list has one dict for the
    whole model, or one for each type of layer."""
    # the parameters, or type of layer -> parameters
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [r for r in rope.values() if isinstance(r, dict)]
    return by_layer_type or [rope]


# --- copying rows of a tensor


class TakeRows(torch.autograd.Function):
    """Returns x[index] (n, …), for x (rows, …) and index (n,). `index` may name a row several times.

    The gradients of a row's copies are summed in fp32. index_select would sum them in the dtype of x."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, g):
        (index,) = ctx.saved_tensors
        total = g.new_zeros(ctx.shape, dtype=torch.float32)
        total.index_add_(0, index, g.float())
        return total.to(g.dtype), None


# --- attention


class Segments:
    """Arranges the tokens of a pack for attention. A forward pass makes one object of this class.

    If several segments begin with the same tokens, the model computes these tokens once, but attention needs
    them in each segment. So queries, keys and values are copied to slots, the rows of attention's input.
    varlen_attn reads the slots end to end. On a CPU or with fp32, scaled_dot_product_attention reads blocks
    of slots instead: each segment is a padded row of a block.

        segments of the pack     p q a | p q b c | p q r s t u          T = 13
        computed tokens          p q a b c r s t u                      U = 9
        slots (bf16 on CUDA)     p q a p q b c p q r s t u              S = T
        slots (CPU or fp32)      p q a . . .
                                 p q b c . .      block of 3 x 6
                                 p q r s t u                            S = 18"""

    def __init__(
        self,
        cu_seqlens: Tensor,
        longest: int,
        unique: Tensor | None = None,
        inverse: Tensor | None = None,
    ) -> None:
        """cu_seqlens (N+1,): where the segments start and end. longest: tokens of the longest segment.
        unique (U,): index in the pack of each computed token. None: all tokens are computed.
        inverse (T,): number, 0 to U - 1, of the computed token that stands for each token of the pack.
        Both: see data.unique_prefixes."""
        self.cu_seqlens = cu_seqlens
        self.longest = longest
        self.blocks: list[tuple[int, int]] = []  # (rows, columns) of each block; empty before `pad`
        # A slot is a position in the pack or, after `pad`, in the blocks. token_of_slot (S,): number, 0 to
        # U - 1, of the computed token in each slot. slot_of_token (U,): the slot from which a computed
        # token's output is read. Both are None if slot i holds computed token i.
        self.token_of_slot = None
        self.slot_of_token = None
        if unique is not None and len(unique) < len(inverse):  # U < T: segments share prefixes
            self.token_of_slot = inverse
            self.slot_of_token = unique

    def pad(self) -> None:
        """Arranges the segments in padded blocks. A row of a block is one segment. Segments of similar length
        share a block.

        Copies the lengths to the host, because the sizes of the blocks depend on them."""
        # exponent -> (start, end) of the segments whose lengths round up to 2 ** exponent, at least 16
        groups = defaultdict(list)
        bounds = self.cu_seqlens.tolist()
        for start, end in pairwise(bounds):
            at_least = max(16, end - start)
            exponent = (at_least - 1).bit_length()
            groups[exponent].append((start, end))
        slot_of = [0] * bounds[-1]  # index of a token in the pack -> its slot in the blocks
        index_of = []  # slot in the blocks -> index of its token in the pack
        for segments in groups.values():
            columns = max(end - start for start, end in segments)
            self.blocks.append((len(segments), columns))
            for start, end in segments:
                length = end - start
                slot = len(index_of)  # of the segment's first token
                slot_of[start:end] = range(slot, slot + length)
                index_of += range(start, end)
                # Padding: copies of the first token. Nothing reads their output.
                index_of += [start] * (columns - length)
        device = self.cu_seqlens.device
        slot_of = torch.tensor(slot_of, device=device)
        index_of = torch.tensor(index_of, device=device)
        if self.token_of_slot is None:  # a token's number is its index in the pack
            self.token_of_slot = index_of
            self.slot_of_token = slot_of
        else:  # until now, a slot was an index in the pack
            self.token_of_slot = self.token_of_slot[index_of]
            self.slot_of_token = slot_of[self.slot_of_token]

    def run(self, fused: Callable, padded: Callable, *rows: Tensor) -> Tensor:
        """Returns the output (U, …) of a computation that reads whole segments. rows: tensors (U, …)

        fused: the computation for all slots (S, …); used with bf16 or fp16 on a GPU, which its kernels need
        padded: the computation for one block (rows, columns, …)"""
        is_fused = rows[0].is_cuda and rows[0].dtype != torch.float32
        if not (is_fused or self.blocks):
            self.pad()
        if self.token_of_slot is not None:
            rows = [TakeRows.apply(x, self.token_of_slot) for x in rows]
        if is_fused:
            out = fused(*rows)
        else:
            # split, not slices: the backward pass of split is one concatenation. The backward pass of each
            # slice would allocate a gradient of the full size, filled with zeros.
            sizes = [math.prod(block) for block in self.blocks]  # numbers of slots
            parts = [x.split(sizes) for x in rows]  # for each tensor, its rows in each block
            outs = []
            for block, *of_block in zip(self.blocks, *parts, strict=True):
                out = padded(*[x.unflatten(0, block) for x in of_block])
                outs.append(out.flatten(0, 1))
            out = torch.cat(outs)
        if self.slot_of_token is not None:
            out = out.index_select(0, self.slot_of_token)
        return out


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    segments: Segments | None = None,
    engine_cache: Any = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns the attention output (1, U, H, d) of a pack, and None in place of attention weights. The model
    computes U of the pack's tokens, because it computes shared prefixes only once. A token attends to itself
    and to earlier tokens of its segment. transformers or `rotary_attention` calls this function.

    module: the layer's attention. mask and `_`: not used.
    query: (1, H, U, d). key, value: (1, Hkv, U, d).
    sliding_window: number of tokens that a token attends to, itself included. None: no limit.
    engine_cache: an engines.torch_engine.Cache. None in training. Not named `cache`, because transformers
        has an argument of that name.
    segments: None when the engine decodes one token for each of R responses. Then query is (R, H, 1, d), and
        the output is (R, 1, H, d)."""
    if segments is None:
        qkv = [x.squeeze(2) for x in (query, key, value)]  # (R, heads, d)
    else:
        # squeeze, because the backward pass of x[0] would copy the gradient once more.
        qkv = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]  # (U, heads, d)
    if engine_cache is not None:
        engine_cache.write(module.layer_idx, *qkv[1:])
    if segments is None:
        out = engine_cache.read(module.layer_idx, qkv[0], scaling, sliding_window)
        return out[:, None], None
    out = segments.run(
        partial(_varlen, segments, scaling, sliding_window),
        partial(_padded, scaling, sliding_window),
        *qkv,
    )
    return out[None], None


@cache
def varlen_attn() -> Callable:
    """Returns torch's varlen_attn, set to accept fewer heads of keys than of queries. torch 2.11 accepts them
    without a flag."""
    from torch.nn.attention import varlen

    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        return partial(varlen.varlen_attn, enable_gqa=True)
    return varlen.varlen_attn


def _varlen(segments, scaling, window, query, key, value):
    """Returns the attention output (S, H, d), computed by one kernel for all segments (see Segments)."""
    before = window - 1 if window else -1
    cu = segments.cu_seqlens
    longest = segments.longest
    return varlen_attn()(
        query,
        key,
        value,
        cu,  # of queries
        cu,  # of keys
        longest,
        longest,
        scale=scaling,
        window_size=(before, 0),  # numbers of tokens before and after; -1: no limit
    )


def _padded(scaling, window, *qkv):
    """Returns the attention output (rows, columns, H, d) of a block (see Segments)."""
    q, k, v = [x.transpose(1, 2) for x in qkv]  # (rows, heads, columns, d)
    # On a GPU (here always fp32), repeat k and v so that they have as many heads as q. With fewer heads,
    # torch's fp32 attention would store all attention scores.
    if q.is_cuda:
        times = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(times, 1)
        v = v.repeat_interleave(times, 1)
    mask = None
    columns = q.shape[2]
    if window and window < columns:  # mask[i, j]: token i attends to token j
        every = q.new_ones(columns, columns, dtype=torch.bool)
        mask = every.tril().triu(1 - window)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2)


AttentionInterface.register("torz", packed_attention)


# --- linear attention: the gated delta net of Qwen3.5


def delta_net(net: nn.Module, hidden_states: Tensor, segments: Segments, **_: Any) -> Tensor:
    """Returns the output (1, U, D) of a gated delta net (Yang et al. 2024, arXiv 2412.06464) on a pack.

    net: a Qwen3_5GatedDeltaNet of transformers. hidden_states: (1, U, D).

    The net's convolution and its recurrence read a whole segment from the start, as attention does. So the
    rows of shared prefixes are copied into each segment (see Segments). Only convolution and recurrence run
    on the copies."""
    x = hidden_states.squeeze(0)
    projections = (net.in_proj_qkv, net.in_proj_b, net.in_proj_a)
    out = segments.run(
        lambda rows: _recur(net, rows[None], segments.cu_seqlens).squeeze(0),  # rows (S, …)
        lambda rows: _recur(net, rows, None),  # rows (rows, columns, …) of a block
        torch.cat([project(x) for project in projections], -1),
    )
    z = net.in_proj_z(x)
    z = z.unflatten(-1, (-1, net.head_v_dim))  # (U, heads, d)
    normed = net.norm(out, z)  # times silu(z), the output gate
    return net.out_proj(normed.flatten(1))[None]


def _recur(net, rows, cu_seqlens):
    """Returns the outputs (B, L, heads, d) of convolution and recurrence, which begin anew in each of the B
    rows, or with cu_seqlens (N+1,) in each of the N segments of the only row.

    rows: (B, L, …), the projections for queries, keys, values, beta and decay, side by side"""
    heads = net.num_v_heads
    qkv, beta, decay = rows.split([net.conv_dim, heads, heads], -1)
    if cu_seqlens is None:
        # The convolution pads both ends, so its first outputs are the causal ones.
        length = rows.shape[1]
        convolved = net.conv1d(qkv.mT)[..., :length]
        convolved = F.silu(convolved).mT
        rule = _chunked_rule()
    else:
        convolve, rule = _fused_rule()
        convolved, _ = convolve(
            qkv,
            net.conv1d.weight.squeeze(1),
            activation="silu",
            cu_seqlens=cu_seqlens,
        )
    q, k, v = convolved.split([net.key_dim, net.key_dim, net.value_dim], -1)
    times = heads // net.num_k_heads  # value heads that share a query head and a key head
    q = q.unflatten(-1, (-1, net.head_k_dim)).repeat_interleave(times, 2)
    k = k.unflatten(-1, (-1, net.head_k_dim)).repeat_interleave(times, 2)
    # A_log and dt_bias are fp32 (dist.FP32).
    rate = F.softplus(decay.float() + net.dt_bias)
    out, _ = rule(
        q,
        k,
        v.unflatten(-1, (heads, -1)),
        -net.A_log.exp() * rate,  # log of the factor by which the state decays
        beta.sigmoid(),  # strength of the state's update
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )
    return out


@cache
def _chunked_rule():
    """Returns transformers' delta rule in plain PyTorch, which computes in fp32."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)


@cache
def _fused_rule():
    """Returns two functions with GPU kernels: the convolution and the delta rule. Raises UserError if their
    package is missing."""
    with explained(
        "Qwen3.5 on a GPU needs flash-linear-attention, which can't be imported",
        "pip install flash-linear-attention==0.6.0",
        ImportError,
    ):
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    return causal_conv1d, chunk_gated_delta_rule


# --- heads


class ChunkedLogProbs(torch.autograd.Function):
    """Computes log-probs and entropies in fp32 from hidden states, with a linear output layer. The logits
    (n, V) of all rows would need too much memory, so the rows are computed in chunks, one after another.

    Inputs: hidden (n, D), weight (V, D), targets (n,), temperature. Outputs: log-probs (n,) and entropies
    (n,)."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        logp, entropy, lse = hidden.new_empty(3, len(targets), dtype=torch.float32)
        scale = 1 / temperature
        z = None  # logits of a chunk
        for c in chunks(hidden, weight):  # c: a slice of the rows
            del z  # frees its memory before the next chunk needs memory
            z = logits_fp32(hidden[c], weight)
            logp[c], entropy[c], lse[c] = log_probs(z, targets[c], scale)
        ctx.save_for_backward(hidden, weight, targets, entropy, lse)
        ctx.scale = scale
        ctx.last = z  # backward begins with this last chunk
        return logp, entropy

    @staticmethod
    def backward(ctx, g_logp, g_entropy):
        hidden, weight, targets, entropy, lse = ctx.saved_tensors
        rows = targets, lse, entropy, g_logp, g_entropy  # the last arguments of logits_grad
        g_hidden = torch.empty_like(hidden)
        g_weight = None  # for a frozen output layer (--lora)
        if ctx.needs_input_grad[1]:  # of `weight`
            g_weight = torch.zeros_like(weight, dtype=torch.float32)
        # The last chunk comes first, because `forward` has kept its logits in ctx.last.
        for c in reversed(chunks(hidden, weight)):
            z = ctx.last
            ctx.last = None
            if z is None:
                z = logits_fp32(hidden[c], weight)
            of_chunk = [x[c] for x in rows]
            # (rows of the chunk, V): gradient of the logits
            g = logits_grad(z, ctx.scale, weight.dtype, *of_chunk)
            del z
            g_hidden[c] = g @ weight
            if g_weight is not None:
                add_product(g_weight, g.t(), hidden[c])
            del g
        return g_hidden, g_weight, None, None  # torch casts the fp32 gradient to the weight's dtype


def log_probs(
    z: Tensor,
    targets: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors (n,) in nats: the log-probs of the targets (n,), the entropies, and the
    logsumexps of z * scale. z (n, V): fp32 logits. scale: 1 / temperature"""
    if z.is_cuda:
        return gpu_kernels.log_probs(z, targets, scale)
    log_p = (z * scale).log_softmax(-1)
    at_target = targets[:, None]  # indices for gather
    logp = log_p.gather(1, at_target)[:, 0]
    lse = z.gather(1, at_target)[:, 0] * scale - logp
    entropy = -log_p.exp().mul_(log_p).sum(-1)
    return logp, entropy, lse


def logits_grad(
    z: Tensor,
    scale: float,
    dtype: torch.dtype,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    g_logp: Tensor,
    g_entropy: Tensor,
) -> Tensor:
    """Returns the gradient (n, V), in `dtype`, of the fp32 logits z (n, V).

    targets, lse, entropy (n,): see `log_probs`. g_logp, g_entropy (n,): gradients of log-probs and
    entropies."""
    if z.is_cuda:
        return gpu_kernels.logits_grad(z, scale, dtype, targets, lse, entropy, g_logp, g_entropy)
    # p: softmax(z * scale), y: target, H: entropy.
    # d log p_y / d(z * scale) = onehot(y) - p;  dH / d(z * scale) = -p (log p + H)
    # Hence g below, which is minus the gradient of z * scale:
    # g = p (g_logp + g_entropy (log p + H)) - onehot(y) g_logp
    log_p = torch.add(-lse[:, None], z, alpha=scale)
    g = log_p.exp()
    factor = g_logp[:, None]
    if g_entropy.any():  # false without --entropy_coef: saves four passes over the logits
        log_p.add_(entropy[:, None])
        log_p.mul_(g_entropy[:, None])
        factor = log_p.add_(factor)
    g *= factor
    g.scatter_add_(1, targets[:, None], -g_logp[:, None])
    return g.mul_(-scale).to(dtype)


def chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Returns slices that divide the rows of hidden (n, D) into chunks. The fp32 logits of a chunk need at
    most CHUNK_BYTES. weight (V, D): weight of the output layer"""
    limit = CHUNK_BYTES[hidden.device.type]
    size = max(1, limit // (4 * len(weight)))
    return [slice(i, i + size) for i in range(0, len(hidden), size)]


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds the matrix product of a and b to the fp32 tensor `total`. Products are summed in fp32."""
    if total.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def logits_fp32(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns fp32 logits (c, V) of hidden states (c, D). weight (V, D): weight of the output layer. Products
    are summed in fp32."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.t().float()


class LMHead(nn.Linear):
    """The output layer of a language model. `forward` returns log-probs and entropies.

    Cohere and Granite multiply their logits by `scale`. Dividing the temperature by `scale` has the same
    effect."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        of_cohere = getattr(config, "logit_scale", 1.0)
        of_granite = getattr(config, "logits_scaling", 1.0)
        self.scale = of_cohere / of_granite

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        return ChunkedLogProbs.apply(hidden, self.weight, targets, temperature / self.scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the fp32 logits (n, V) of hidden states (n, D)."""
        logits = logits_fp32(hidden, self.weight)
        if self.scale != 1:
            logits *= self.scale
        return logits


# --- models


@cache
def backbone_class(config_class: type) -> type:
    """Returns a subclass of transformers' backbone class (the model without a head) that keeps the original
    `__init__` and `__call__`. Must be called before vLLM starts, because vLLM replaces both methods in some
    backbone classes."""
    kind = MODEL_MAPPING[config_class]
    kept = {name: getattr(kind, name) for name in ("__init__", "__call__", "__module__")}
    return type(kind.__name__, (kind,), kept)


class PackModel(nn.Module):
    """A Hugging Face backbone that runs on packs. Subclasses add a head."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32  # dist.shard may choose another
        backbone = backbone_class(type(config))
        self.model = backbone._from_config(
            config,
            attn_implementation="torz",
            dtype=torch.float32,
        )
        # eval() turns off dropout. With dropout, the log-probs of two forward passes would differ.
        self.model.eval()
        for module in self.model.modules():
            name = type(module).__name__
            if name.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
                module.forward = partial(rms_norm, module)  # one kernel instead of six
            if hasattr(module, "down_proj"):  # an MLP
                module.forward = partial(gated_mlp, module)
            if hasattr(module, "A_log"):  # a Qwen3_5GatedDeltaNet
                module.forward = partial(delta_net, module)
            if config.model_type in LLAMA_LIKE and name.endswith("Attention"):
                module.forward = partial(attention_forward, module)

    @property
    def base(self) -> "PackModel":
        """The model that FSDP shards: this model. With --lora, a role is an Adapted, whose `base` is a
        PackModel."""
        return self

    def tie(self) -> None:
        """Make the weights of output layer and embedding the same tensor, if the config says so. Call this
        method again after parameters were replaced. Here and in Critic, this method does nothing."""

    def recompute(self, layers: int) -> None:
        """Make the first `layers` layers store only their input for the backward pass, which then runs the
        layer's forward pass again."""
        for layer in self.model.layers[:layers]:
            # FSDP's hooks run around `forward`. `checkpoint` wraps only `forward`, so that the recomputation
            # does not gather and free the weights once more.
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )

    def hidden(self, tokens: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """Returns the last hidden states (…, D) of tokens (…,) at positions (…,).

        attention: `segments` or `engine_cache` or both, for packed_attention"""
        out = self.model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            **attention,
        )
        return out.last_hidden_state

    def hidden_before(self, pack: Pack) -> Tensor:
        """Returns (n, D): for each index i in pack.loss_tokens (n,), the last layer's hidden state at the
        token before i. A head computes the log-prob of token i, or a value, from this hidden state."""
        dist.progress()
        segments = Segments(
            pack.cu_seqlens,
            pack.longest,
            pack.unique,
            pack.inverse,
        )
        tokens = pack.tokens[pack.unique]
        positions = pack.positions[pack.unique]
        hidden = self.hidden(tokens[None], positions[None], segments=segments)
        return TakeRows.apply(hidden[0], pack.inverse[pack.loss_tokens - 1])

    def allocate(self, device: Device) -> None:
        """Allocate memory for this model, which is on the meta device (without memory) until then. Compute
        its buffers in fp32. The caller must then fill the parameters.

        A buffer that transformers does not compute stays NaN, and makes the outputs NaN instead of wrong."""
        self.to_empty(device=device)
        self.tie()
        for p in self.parameters():
            p._is_hf_initialized = True  # _init_weights must not change it
        for module in self.model.modules():
            buffers = dict(module.named_buffers(recurse=False))
            for name, buffer in buffers.items():
                unset = torch.full_like(buffer, torch.nan, dtype=torch.float32)
                setattr(module, name, unset)
            if buffers:
                self.model._init_weights(module)  # computes the module's buffers


def rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Returns the RMS norm of x over its last dimension. `norm`: a Hugging Face norm with Llama's formula."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def attention_forward(
    attention: nn.Module,
    hidden_states: Tensor,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """The forward method of Llama's and Qwen2's attention: `rotary_attention` on a GPU, otherwise the method
    of transformers."""
    forward = rotary_attention if hidden_states.is_cuda else type(attention).forward
    return forward(attention, hidden_states, *rest, **options)


def rotary_attention(
    attention: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **options: Any,
) -> tuple[Tensor, None]:
    """Returns what transformers' forward method returns. One kernel rotates all heads of the queries, and
    one kernel all heads of the keys. transformers launches five kernels for each.

    position_embeddings: cos and sin (see Rotary)"""
    *tokens, _ = hidden_states.shape  # (1, U, D), or while the engine decodes (R, 1, D)
    heads = []
    for name in ("q_proj", "k_proj", "v_proj"):
        x = getattr(attention, name)(hidden_states)
        x = x.view(*tokens, -1, attention.head_dim)
        if name != "v_proj":
            x = Rotary.apply(x, *position_embeddings)
        heads.append(x.transpose(1, 2))  # as packed_attention takes them
    window = getattr(attention, "sliding_window", None)
    out, _ = packed_attention(
        attention, *heads, mask=None, scaling=attention.scaling, sliding_window=window, **options
    )
    return attention.o_proj(out.flatten(2)), None


class Rotary(torch.autograd.Function):
    """Returns heads (…, H, d), rotated by the angles of their tokens (arXiv 2104.09864), on a GPU.
    cos, sin: (…, d)."""

    @staticmethod
    def forward(ctx, heads, cos, sin):
        ctx.save_for_backward(cos, sin)
        return gpu_kernels.rotate(heads, cos, sin)

    @staticmethod
    def backward(ctx, g):
        cos, sin = ctx.saved_tensors
        return gpu_kernels.rotate(g.contiguous(), cos, -sin), None, None  # rotated back


def gated_mlp(mlp: nn.Module, x: Tensor) -> Tensor:
    """Returns the output of a Hugging Face MLP: down_proj(act(gate) * up). Some families compute gate and up
    with one matrix."""
    if hasattr(mlp, "gate_up_proj"):
        gate, up = mlp.gate_up_proj(x).chunk(2, -1)
        act = mlp.activation_fn
    else:
        gate = mlp.gate_proj(x)
        up = mlp.up_proj(x)
        act = mlp.act_fn
    product = gated(act, gate, up)
    if not x.is_cuda:  # a CPU has more memory than time
        return mlp.down_proj(product)
    # `product` is not stored: DownProjection computes it again in the backward pass.
    down = mlp.down_proj
    project = partial(DownProjection.apply, act, gate, up)  # arguments as of F.linear
    if isinstance(down, FrozenLinear):
        return down(product, project)
    return project(product, down.weight, down.bias)


def gated(act: Callable, gate: Tensor, up: Tensor) -> Tensor:
    """Returns act(gate) * up."""
    if gate.is_cuda and isinstance(act, nn.SiLU | SiLUActivation):
        return SwiGLU.apply(gate, up)
    return act(gate) * up


class SwiGLU(torch.autograd.Function):
    """Returns silu(gate) * up, on a GPU. Stores only gate and up for the backward pass."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return gpu_kernels.swiglu(gate, up)

    @staticmethod
    def backward(ctx, g):
        return gpu_kernels.swiglu_grad(g, *ctx.saved_tensors)


class DownProjection(torch.autograd.Function):
    """Returns linear(product, weight, bias), for product = act(gate) * up. Does not store `product`, which is
    a fifth of a layer's activations: the backward pass computes it again from gate and up."""

    @staticmethod
    def forward(ctx, act, gate, up, product, weight, bias):
        ctx.act = act
        ctx.save_for_backward(gate, up, weight)
        return F.linear(product, weight, bias)

    @staticmethod
    def backward(ctx, g):
        gate, up, weight = ctx.saved_tensors
        rows = g.flatten(0, -2)  # a row for each token
        g_weight = None  # for a frozen weight (--lora)
        if ctx.needs_input_grad[4]:  # of `weight`; 5: of `bias`
            product = gated(ctx.act, gate, up).flatten(0, -2)
            g_weight = rows.t() @ product
        g_bias = rows.sum(0) if ctx.needs_input_grad[5] else None
        # gate and up get no gradient here, because they get theirs through `product`
        return None, None, None, g @ weight, g_weight, g_bias


class Policy(PackModel):
    """A causal language model. Its parameters are `model.*` and `lm_head.weight`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.lm_head = LMHead(config)
        self.tie()

    def tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, pack: Pack, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns two fp32 tensors (T,) in nats: each token's log-prob, and the entropy of the distribution
        that predicts the token. Both are 0 where pack.mask is false, because the head does not run there."""
        at = pack.loss_tokens  # indices where pack.mask is true
        hidden = self.hidden_before(pack)
        of_tokens = self.lm_head(hidden, pack.tokens[at], temperature)  # log-probs, entropies
        zero = hidden.new_zeros(len(pack.tokens), dtype=torch.float32)
        logp, entropy = [zero.index_put((at,), x) for x in of_tokens]
        return logp, entropy


class Critic(PackModel):
    """A value model. Its parameters are `model.*` and `score.weight`, a scalar head."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, pack: Pack) -> Tensor:
        return critic_values(self, self.score, pack)


def critic_values(model: PackModel, head: nn.Linear, pack: Pack) -> Tensor:
    """Returns fp32 (T,): the value of the text before each token; 0 where pack.mask is false. head: computes
    the value from a hidden state of `model`"""
    hidden = model.hidden_before(pack)
    # With --lora, the head is in fp32, and the hidden states may be in bf16.
    hidden = hidden.to(head.weight.dtype)
    value = head(hidden)[:, 0].float()
    zero = value.new_zeros(len(pack.tokens))
    return zero.index_put((pack.loss_tokens,), value)


# --- adapters (--lora)


class FrozenLinear(nn.Linear):
    """A frozen linear layer with LoRA (arXiv 2106.09685, section 4.1). Returns x Wᵀ + bias + scale (x Aᵀ) Bᵀ,
    or without an adapter x Wᵀ + bias. `freeze` sets `scale`. Adapted.forward sets `adapter`: A and B."""

    adapter = None

    def forward(self, x: Tensor, project: Callable = F.linear) -> Tensor:
        """project: computes what F.linear computes. gated_mlp passes a function that stores less."""
        y = project(x, self.weight, self.bias)
        if not self.adapter:
            return y
        a, b = self.adapter
        low = self.scale * project(x, a.to(x.dtype), None)
        return y + F.linear(low, b.to(x.dtype))


def freeze(
    shard_fn: Callable,
    rank: int,
    alpha: float,
    dtype: torch.dtype,
    model: PackModel,
) -> PackModel:
    """Turns a model without memory into a frozen base for adapters, with weights in `dtype`. Returns
    shard_fn(model). Raises UserError if the rank is above the smaller side of a matrix.

    shard_fn: see `load_policy`. rank, alpha: of the adapters (--lora, --lora_alpha)

    After this, base(function, *args) returns function(*args), because the forward method is operator.call.
    FSDP gathers the base's weights only inside such a call, so each role passes its own forward function to
    the base (see Adapted)."""
    # linears: name such as "model/layers/0/mlp/up_proj" -> layer. Adapted uses them in an nn.ModuleDict,
    # which accepts no "." in a name. vars: so that nn.Module does not register the layers once more.
    vars(model).update(rank=rank, alpha=alpha, linears={})
    for name, module in model.named_modules():
        if name.startswith("model.layers.") and isinstance(module, nn.Linear):  # (out, in)
            most = min(module.weight.shape)
            require(
                rank <= most,
                f"--lora {rank} is above {most}, the smaller side of {name}",
                f"--lora {most} or less",
            )
            module.__class__ = FrozenLinear  # keeps the module, and so its place in the model
            module.scale = alpha / rank
            model.linears[name.replace(".", "/")] = module
    model.forward = operator.call
    return shard_fn(dist.cast(model.requires_grad_(False), dtype))


class Adapted(nn.Module):
    """The model of a role with --lora: adapters over a frozen base, which several roles may share.

    Its parameters are in fp32, and every rank holds all of them: A (rank, in) and B (out, rank) for every
    linear layer (out, in) of the decoder layers, and a critic's head. At the start, A is Kaiming-uniform, as
    in PEFT, and B is 0. The base is no submodule. Only the base is sharded.

    base: see `freeze`
    critic: whether the role is a critic. Its head begins with the weight of the base's head, if the base is a
        critic, or else at random, as in `load_critic`"""

    def __init__(self, base: PackModel, seed: int = 0, critic: bool = False) -> None:
        super().__init__()
        vars(self).update(base=base, config=base.config)  # vars: so that the base is no submodule
        random = torch.Generator().manual_seed(seed)
        self.adapters = nn.ModuleDict()
        for name, linear in base.linears.items():
            a = torch.empty(base.rank, linear.in_features)
            nn.init.kaiming_uniform_(a, 5**0.5, generator=random)  # a slope of √5, as nn.Linear has
            b = torch.zeros(linear.out_features, base.rank)
            self.adapters[name] = nn.ParameterList([a, b])
        self.score = None  # the critic's head
        if critic:
            width = base.config.hidden_size
            self.score = nn.Linear(width, 1, bias=False)
            head = self.score.weight
            nn.init.normal_(head, 0, 1 / (width + 1), generator=random)
            if hasattr(base, "score"):
                head.data.copy_(dist.whole(base.score.weight))

    def forward(self, pack: Pack, *temperature: float) -> Any:
        """Returns what Policy.forward or Critic.forward returns. A role puts its adapters into the base only
        here. They stay there, because recomputation in the backward pass needs them.

        temperature: one number for a policy; none for a critic"""
        adapters = dict(self.adapters.items())
        for name, linear in self.base.linears.items():
            vars(linear)["adapter"] = adapters.get(name)
        # base(function, *args) returns function(*args), see `freeze`.
        if self.score:
            return self.base(critic_values, self.base, self.score, pack)
        return self.base(Policy.forward, self.base, pack, *temperature)

    @torch.no_grad()
    def merge(self, weights: Weights) -> Weights:
        """Yields the role's weights (name, whole tensor): the base's, with W + scale B A in place of each W
        that has an adapter. This sum is computed in fp32, and rounded once.

        weights: the base's weights (name, whole tensor)"""
        for name, weight in weights:
            key = name.removesuffix(".weight").replace(".", "/")  # as `freeze` names its layers
            if key in self.adapters:
                a, b = self.adapters[key]
                merged = weight.float().addmm(b, a, alpha=self.base.linears[key].scale)
                weight = merged.to(weight.dtype)
            if name.startswith("model.") or not self.score:  # a critic has no LM head
                yield name, weight
        if self.score:
            yield "score.weight", self.score.weight


# --- loading


# The files to download. Subfolders and consolidated.* are left out, because they repeat the same weights.
MODEL_FILES = dict(
    allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
    ignore_patterns=["*/*", "consolidated*"],
)


def resolve(name: str) -> str:
    """Returns the path of a model's folder. `name`: a path, or a model of the Hugging Face Hub. The model is
    downloaded unless the Hub's local cache has all of its files.

    A collective: all ranks must call it. If the download fails, all ranks raise the same UserError."""
    hub = from_hub(name)  # may differ between machines, because it depends on their folders
    dist.together(lambda: hub and _download(name))
    return snapshot_download(name, local_files_only=True, **MODEL_FILES) if hub else name


def _download(name):
    """Downloads a model of the Hub into the local cache, unless the cache has all of its files."""
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one rank of each machine downloads
        return
    with contextlib.suppress(OSError):  # raised if the cache does not have the model
        # local_files_only: returns the folder in the cache, even if files are missing there
        if _is_whole(Path(snapshot_download(name, local_files_only=True, **MODEL_FILES))):
            return
    with explained(
        f"no folder {name}, and the model can't be downloaded from the Hub",
        f"hf download {name} --local-dir DIR where there is a network, then --model DIR",
    ):
        # If the cache has a folder and there is no network, returns the folder, which may lack files.
        snapshot_download(name, **MODEL_FILES)


def _is_whole(folder):
    """Returns whether a folder of the Hub's cache has all files of a model. After an interrupted download, or
    after AutoTokenizer.from_pretrained, it has only some."""
    index = read_json(folder / "model.safetensors.index.json", {"weight_map": dict})
    # weight_map: tensor -> its file. A model without an index has only one file of weights.
    weights = index.get("weight_map", {"": "model.safetensors"}).values()
    names = ["config.json", "tokenizer_config.json", *weights]
    return any(folder.glob("tokenizer.*")) and all((folder / name).is_file() for name in names)


def load_config(path: str) -> PreTrainedConfig:
    """Returns the config of the model in a folder. Raises UserError if the folder has no model, or a model
    that torz does not support."""
    folder = model_folder(path)
    require(
        (folder / "config.json").is_file(),
        f"{path} has no config.json",
        "a Hugging Face model folder",
    )
    require(
        bool(dist.weight_files(folder)),
        f"{path} has no .safetensors files",
        "weights saved by save_pretrained",
    )
    family = str(read_json(folder / "config.json").get("model_type", ""))
    require(
        family in FAMILIES,
        f"{path} has model_type {family!r}, which is not supported (docs/models.md)",
        f"one of {', '.join(FAMILIES)}",
    )
    with explained(
        f"{folder}/config.json can't be used", "the config.json that belongs to the weights"
    ):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    if family == "qwen3_5":
        config = text_config(config)
    check_settings(config, path)
    if config.model_type == "qwen3_5_text" and torch.cuda.is_available():
        _fused_rule()  # only for its UserError
    return config


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of the language model in a Qwen3.5 model that also reads images."""
    text = config.get_text_config()
    for name in ("tie_word_embeddings", "quantization_config"):
        if hasattr(config, name):
            setattr(text, name, getattr(config, name))
    text.architectures = ["Qwen3_5ForCausalLM"]
    return text


def load_tokenizer(path: str) -> Any:
    """Returns the folder's tokenizer. Raises UserError if the folder has no usable tokenizer or no model, or
    a model that torz does not support."""
    # Without these files, AutoTokenizer would invent a tokenizer from the model's config.
    require(
        any(model_folder(path).glob("tokenizer*")),
        f"{path} has no tokenizer",
        "tokenizer.json and tokenizer_config.json there",
    )
    load_config(path)  # only for its UserError
    with explained(f"the tokenizer in {path} can't be read", "an intact copy of it"):
        # If the folder has tekken.json, the default is mistral_common's tokenizer (a package that comes with
        # vLLM), which has no chat template and can't be exported.
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, mistral_format=False)
    # Without tokenizer.json, AutoTokenizer may make a tokenizer that has no words and drops all text.
    require(
        "1+1" in tokenizer.decode(tokenizer("1+1").input_ids),
        f"the tokenizer in {path} can't encode 1+1",
        "its tokenizer.json or tokenizer.model there",
    )
    return tokenizer


def load_policy(
    path: str,
    device: Device = "cpu",
    shard_fn: Callable = lambda model: model,
) -> Policy:
    """Returns the causal language model of the folder `path` in fp32. Raises UserError if torz does not
    support the model, or if the files do not fit config.json.

    shard_fn: takes the model before memory is allocated, and returns it sharded, so that each rank reads
        only its own shards"""
    return _load(Policy, path, device, shard_fn)


def load_critic(
    path: str,
    device: Device = "cpu",
    shard_fn: Callable = lambda model: model,
    seed: int = 0,
) -> Critic:
    """Returns a critic with the folder's backbone. Raises UserError as `load_policy` does.

    If the folder has no critic head, the head's weights are random, drawn with `seed`: normal with standard
    deviation 1 / (D + 1), as in Open-Reasoner-Zero's code."""
    return _load(Critic, path, device, shard_fn, seed)


# Ends of the names of tensors that are ignored if the Policy or Critic has no such parameter.
NOT_OURS = ("lm_head.weight", "rotary_emb.inv_freq")
# Tensors of Qwen3.5 that are not loaded, by the starts of their names: the vision tower, and the heads that
# predict several tokens.
LEFT_OUT = ("model.visual.", "mtp.")


def names_in_files(names: Iterable[str], config: PreTrainedConfig) -> dict[str, str]:
    """Returns a dict: a tensor's name in the model -> its name in the files. Without Qwen3.5's tensors that
    LEFT_OUT names. names: of all tensors in the files"""
    found = {}
    for stored in names:
        if config.model_type != "qwen3_5_text":
            found[stored] = stored
        elif not stored.startswith(LEFT_OUT):
            name = stored.replace("model.language_model.", "model.")
            found[name] = stored
    return found


def left_out(path: str) -> str:
    """Returns a line that says which of the folder's weights are not loaded; "" if all are."""
    names = dist.tensors_in(path)
    count = len(names) - len(names_in_files(names, load_config(path)))
    parts = f"{count} tensors of {' and '.join(LEFT_OUT)}"
    return f"{path}: {parts} are left out, also in exports" if count else ""


def on_meta(kind: type, path: str) -> PackModel:
    """Returns a Policy or Critic without memory for its weights. Raises UserError if the tensors in the files
    differ from the model's in names or shapes. A critic's files may lack score.weight; a policy's files must
    not have it. Other extra tensors are ignored if their names end in a name of NOT_OURS, such as
    lm_head.weight. But if the config ties the output layer to the embedding and the files have both, they
    must be equal: transformers would keep two different tensors apart, and this model has only one."""
    config = load_config(path)
    with explained(
        f"{path}/config.json describes no model", "the config.json that belongs to the weights"
    ):
        with torch.device("meta"):
            model = kind(config)
    files = dist.tensors_in(path)  # name in the files -> DCP's metadata (dtype, shape)
    require(
        all(len(tensor.chunks) == 1 for tensor in files.values()),
        f"two .safetensors files in {path} have the same tensors",
        "a folder with the files of one model",
    )
    model.names = names_in_files(files, config)
    # name in the model -> shape: of the tensors in the files, and of the model's parameters
    theirs = {name: files[stored].size for name, stored in model.names.items()}
    # named_parameters() lists a tied weight once; state_dict() would list it twice.
    ours = {name: p.shape for name, p in model.named_parameters()}
    for name in ours.keys() ^ theirs.keys():
        if name == "score.weight" and kind is Critic:
            del ours[name]  # `_load` draws a random head
        elif name.endswith(NOT_OURS):
            theirs.pop(name, None)
    wrong = sorted(f"{name} {list(shape)}" for name, shape in ours.items() ^ theirs.items())
    require(
        not wrong,
        f"config.json and weights of {path} differ in {', '.join(wrong[:2])}",
        "a folder that save_pretrained has written, and a critic only as --critic_model",
    )
    tied = "lm_head.weight", "model.embed_tokens.weight"
    if kind is Policy and config.tie_word_embeddings and tied[0] in model.names:
        stored = [model.names[name] for name in tied]
        pair = {name: torch.empty(files[name].size) for name in stored}
        dist.load_files(pair, path)
        require(
            torch.equal(*pair.values()),
            f"{path} has an output layer that differs from the embedding, "
            "and config.json ties them",
            '"tie_word_embeddings": false in config.json',
        )
    return model


def _load(kind, path, device, shard_fn, seed=0):
    """Returns a Policy or Critic with the folder's weights. If the folder has no critic head, the head is
    random (see `load_critic`). Raises UserError as `on_meta` does."""
    model = shard_fn(on_meta(kind, path))
    model.allocate(device)
    state = dict(model.named_parameters())
    if kind is Critic and "score.weight" not in model.names:
        head = state.pop("score.weight")  # no file has it
        random = torch.Generator().manual_seed(seed)
        drawn = torch.randn(head.shape, generator=random)
        drawn /= model.config.hidden_size + 1
        part = dist.local(head.detach())  # this rank's shard: the head's only row, or no row
        part.copy_(drawn[: len(part)])
    in_files = {model.names[name]: p for name, p in state.items()}  # name in the files -> parameter
    dist.load_files(in_files, path)
    dist.together(check_finite, model.named_parameters(), path)
    return model


def check_finite(weights: Weights, path: str) -> None:
    """Raises UserError if this rank's shard of a weight has NaN or infinity."""
    for name, weight in weights:
        total = dist.local(weight).sum(dtype=torch.float32)
        require(bool(total.isfinite()), f"{path} has NaN or infinity in {name}", "intact weights")


def files_weights(
    path: str,
    device: Device,
    dtype: torch.dtype,
) -> Weights:
    """Yields (name, whole tensor) for each parameter in the folder's files, for Engine.awake. Raises
    UserError as `on_meta` does."""
    model = on_meta(Policy, path)
    # name in the files -> name in the model
    name_of = {model.names[name]: name for name, _ in model.named_parameters()}
    for file in dist.weight_files(path):
        with safe_open(file, "pt") as f:
            for stored in sorted(name_of.keys() & f.keys()):
                name = name_of[stored]
                tensor = f.get_tensor(stored)
                check_finite([(name, tensor)], path)
                yield name, tensor.to(device, dist.pushed_dtype(name, dtype))
