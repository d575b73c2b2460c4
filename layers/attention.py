"""Attention in packs: segments of different lengths, end to end, whose shared prefixes are computed once.

Letters in the shapes of tensors:

    N           segments of a pack
    T           tokens of a pack
    U           tokens of a pack that are computed
    S           tokens that attention reads: the U computed tokens, some of them copied (see Segments)
    D           size of the hidden states
    H, Hkv, d   heads of queries, heads of keys and values, size of a head"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from guard.messages import explained

if torch.cuda.is_available():  # CPU builds of torch have no Triton
    from layers import gpu_kernels


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


# --- rotary embeddings, on a GPU


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
        convolve, rule = fused_rule()
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
def fused_rule():
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
