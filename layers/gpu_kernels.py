"""Triton kernels for GPUs: the output layer's log-probs and entropies, the gated MLP's activation, rotary
embeddings, and the random draw of a token.

PyTorch would read and write the large tensors of these formulas up to ten times. Each kernel reads its inputs
once and writes its outputs once. Sums are fp32 where nothing else is said. Kernels run as a grid of programs;
tl.program_id gives a program's place in the grid. Tensor arguments of kernels are pointers.

The other files import this one only on a GPU, because CPU builds of torch have no Triton. The same
formulas stand in layers/ and engines/torch_engine.py, in PyTorch, for CPUs."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # logits that one program of the output layer reads at a time
COLUMNS = 2048  # columns of the MLP that one program reads
PIECE = 4096  # logits of a piece of a row, see `draw`


@triton.jit
def _log_probs(
    z,
    targets,
    logp,
    entropy,
    lse,
    scale,
    V,
    BLOCK: tl.constexpr,
):
    """One program computes one row of the logits z (n, V) in one pass. It keeps three numbers, for the values
    x = z * scale so far:

    m: the largest x
    s: the sum of exp(x - m)
    t: the sum of exp(x - m) (x - m)"""
    row = tl.program_id(0).to(tl.int64)
    z += row * V  # the start of the row
    m = -float("inf")
    s = 0.0
    t = 0.0
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < V
        x = tl.load(z + i, mask=inside, other=-float("inf"))
        x = x * scale
        largest = tl.maximum(m, tl.max(x, 0))
        # Move s and t from the old maximum to the new one. In the first block, s is 0 and m is -inf.
        moved = tl.where(s > 0, m - largest, 0.0)
        factor = tl.exp(moved)
        t = factor * (t + s * moved)
        s = s * factor
        m = largest
        x = x - m
        e = tl.exp(x)
        s += tl.sum(e, 0)
        t += tl.sum(tl.where(inside, e * x, 0.0), 0)
    target = tl.load(targets + row)
    y = tl.load(z + target) * scale
    log_s = tl.log(s)
    tl.store(lse + row, m + log_s)
    tl.store(logp + row, y - m - log_s)
    tl.store(entropy + row, log_s - t / s)  # the mean of m + log_s - x


def log_probs(z: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See layers.head.log_probs."""
    n, V = z.shape
    logp, entropy, lse = z.new_empty(3, n)
    _log_probs[(n,)](
        z,
        targets,
        logp,
        entropy,
        lse,
        scale,
        V,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return logp, entropy, lse


@triton.jit
def _logits_grad(
    z,
    out,
    scale,
    targets,
    lse,
    entropy,
    g_logp,
    g_entropy,
    V,
    BLOCK: tl.constexpr,
):
    """One program computes the gradients of BLOCK logits of one row (formula: layers.head.logits_grad).

    z (n, V): logits. out (n, V): gets their gradients. The others (n,): see layers.head.logits_grad"""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < V
    at = row * V + i
    x = tl.load(z + at, mask=inside, other=0.0)
    logp = x * scale - tl.load(lse + row)
    p = tl.exp(logp)
    d_logp = tl.load(g_logp + row)
    d_entropy = tl.load(g_entropy + row)
    is_target = i == tl.load(targets + row)
    grad = tl.where(is_target, d_logp, 0.0) - p * d_logp
    grad -= p * (logp + tl.load(entropy + row)) * d_entropy
    grad = grad * scale
    tl.store(out + at, grad.to(out.dtype.element_ty), mask=inside)


def logits_grad(z: Tensor, scale: float, dtype: torch.dtype, *rows: Tensor) -> Tensor:
    """See layers.head.logits_grad. rows: targets, lse, entropy, g_logp, g_entropy"""
    g = torch.empty_like(z, dtype=dtype)
    n, V = z.shape
    grid = n, triton.cdiv(V, BLOCK)
    _logits_grad[grid](
        z,
        g,
        scale,
        *rows,
        V,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return g


@triton.jit
def _gate_and_up(gate, up, stride, width, BLOCK: tl.constexpr):
    """Returns BLOCK columns of one row of gate and of up, in fp32; their places in a tensor without gaps
    between rows; and a mask, true for the columns below `width`. stride, width: see `layout`"""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    read = row * stride + i
    x = tl.load(gate + read, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + read, mask=inside, other=0.0).to(tl.float32)
    return x, u, row * width + i, inside


@triton.jit
def _swiglu(
    gate,
    up,
    out,
    stride,
    width,
    BLOCK: tl.constexpr,
):
    """One program computes BLOCK columns of one row of silu(gate) * up."""
    x, u, at, inside = _gate_and_up(gate, up, stride, width, BLOCK)
    y = x * tl.sigmoid(x) * u
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_grad(
    g,
    gate,
    up,
    g_gate,
    g_up,
    stride,
    width,
    BLOCK: tl.constexpr,
):
    """One program computes the gradients of BLOCK columns of one row of gate and of up."""
    x, u, at, inside = _gate_and_up(gate, up, stride, width, BLOCK)
    d = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)  # gradient of silu(x) * u
    sigmoid = tl.sigmoid(x)
    silu = x * sigmoid
    of_up = d * silu
    of_gate = d * u * (sigmoid + silu * (1 - sigmoid))
    tl.store(g_up + at, of_up.to(g_up.dtype.element_ty), mask=inside)
    tl.store(g_gate + at, of_gate.to(g_gate.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up, for two tensors (…, width) with the same strides."""
    out = gate.new_empty(gate.shape)
    grid, stride, width = layout(gate)
    _swiglu[grid](gate, up, out, stride, width, BLOCK=COLUMNS)
    return out


def swiglu_grad(g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up, for the gradient `g` of silu(gate) * up."""
    g_gate = gate.new_empty(gate.shape)
    g_up = gate.new_empty(gate.shape)
    grid, stride, width = layout(gate)
    _swiglu_grad[grid](
        g.contiguous(),
        gate,
        up,
        g_gate,
        g_up,
        stride,
        width,
        BLOCK=COLUMNS,
    )
    return g_gate, g_up


def layout(x: Tensor) -> tuple[tuple[int, int], int, int]:
    """Returns the grid of programs for x (…, width), the stride of its rows, and the width. The stride is
    larger than the width if x is a half of a wider tensor."""
    rows = x.view(-1, x.shape[-1])  # not reshape: a copy would have another stride
    n, width = rows.shape
    grid = n, triton.cdiv(width, COLUMNS)
    return grid, rows.stride(0), width


# --- sampling: `draw` first runs _pieces, then _draw


@triton.jit
def _pieces(
    z,
    largest,
    sums,
    V,
    pieces,
    PIECE: tl.constexpr,
):
    """One program stores two numbers of one piece (PIECE logits) of one row of z (n, V): the largest logit m,
    in `largest`, and the sum of exp(z - m), in `sums`. pieces: number of pieces of a row"""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    i = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(z + row * V + i, mask=i < V, other=-float("inf"))
    m = tl.max(x, 0)
    # If top-p has set the whole piece to -inf, x - m would be NaN.
    shift = tl.where(m == -float("inf"), 0.0, m)
    at = row * pieces + piece
    tl.store(largest + at, m)
    tl.store(sums + at, tl.sum(tl.exp(x - shift), 0))


@triton.jit
def _first_above(threshold, mass, i):
    """Returns the first of the places i where the cumulative sum of `mass` exceeds `threshold`. Never returns
    a place without mass: if a rounding error makes the threshold too large, returns the last place with
    mass."""
    last = tl.max(tl.where(mass > 0, i, 0), 0)  # the last place with mass
    above = (tl.cumsum(mass, 0) > threshold) & (mass > 0)
    return tl.min(tl.where(above, i, last), 0)


@triton.jit
def _draw(
    z,
    u,
    largest,
    sums,
    token,
    logp,
    V,
    pieces,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """One program draws the token of one row: first its piece of the row, then its place there. It computes
    with masses: a logit x has the mass exp(x - top), its probability up to a factor. top: the row's largest
    logit.

    u, largest, sums, token, logp: see `draw` and `_pieces`. PIECES: `pieces`, rounded up to a power of 2"""
    row = tl.program_id(0).to(tl.int64)
    z += row * V
    j = tl.arange(0, PIECES)  # the pieces
    at = row * pieces + j
    m = tl.load(largest + at, mask=j < pieces, other=-float("inf"))
    s = tl.load(sums + at, mask=j < pieces, other=0.0)
    top = tl.max(m, 0)
    piece_mass = (s * tl.exp(m - top)).to(tl.float64)
    total = tl.sum(piece_mass, 0)
    threshold = tl.load(u + row) * total
    piece = _first_above(threshold, piece_mass, j)
    # The part of the threshold that lies in the drawn piece: without the mass of the pieces before it.
    in_piece = threshold - tl.sum(tl.where(j < piece, piece_mass, 0.0), 0)
    i = piece * PIECE + tl.arange(0, PIECE)  # the tokens of the piece
    x = tl.load(z + i, mask=i < V, other=-float("inf"))
    token_mass = tl.exp(x - top).to(tl.float64)
    chosen = _first_above(in_piece, token_mass, i)
    tl.store(token + row, chosen.to(tl.int64))
    y = tl.load(z + chosen) - top
    # z[chosen] - logsumexp(z), because logsumexp(z) = top + log(total)
    tl.store(logp + row, y - tl.log(total.to(tl.float32)))


def draw(z: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tokens (n,) drawn from softmax(z), for fp32 logits z (n, V), and their log-probs (n,) in nats.
    The logits are read once, and one piece of them a second time. Probabilities are added in fp64.

    u (n,): uniform random numbers in [0, 1), fp64. The token is the first whose cumulative probability
    exceeds u."""
    n, V = z.shape
    pieces = triton.cdiv(V, PIECE)
    largest, sums = z.new_empty(2, n, pieces)
    _pieces[n, pieces](
        z,
        largest,
        sums,
        V,
        pieces,
        PIECE=PIECE,
        num_warps=8,
    )
    token = z.new_empty(n, dtype=torch.int64)
    logp = z.new_empty(n)
    _draw[(n,)](
        z,
        u,
        largest,
        sums,
        token,
        logp,
        V,
        pieces,
        PIECES=triton.next_power_of_2(pieces),
        PIECE=PIECE,
        num_warps=8,
    )
    return token, logp


# --- rotary embeddings


@triton.jit
def _rotated(
    heads,
    cos,
    sin,
    row,
    count,
    rotated,
    half,
    h,
    j,
):
    """Returns three blocks for one row of heads (n, count, 2 half): first halves and second halves of its
    heads, in fp32, and the places of the first halves. The first `rotated` heads are rotated, the others are
    not.

    cos, sin: (n, 2 half)
    h (…, 1): numbers of heads. j (1, …): numbers of elements of a half. Both go on beyond count and half"""
    place = (row * count + h) * 2 * half + j
    inside = (h < count) & (j < half)
    a = tl.load(heads + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(heads + place + half, mask=inside, other=0.0).to(tl.float32)
    turns = (h < rotated) & (j < half)
    # Read the second halves of cos and sin. In cos, both halves are equal. In sin too, but FusedDecoder
    # negates the first half.
    angle = row * 2 * half + half + j
    c = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)  # other: the angle 0
    s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
    return a * c - b * s, b * c + a * s, place


@triton.jit
def _rotate(
    heads,
    cos,
    sin,
    out,
    count,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program rotates all heads of one row of heads (n, count, 2 half). HEADS, HALF: `count` and `half`,
    rounded up to powers of 2"""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    j = tl.arange(0, HALF)[None, :]
    first, second, place = _rotated(heads, cos, sin, row, count, count, half, h, j)
    inside = (h < count) & (j < half)
    tl.store(out + place, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + half, second.to(out.dtype.element_ty), mask=inside)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads (…, H, d), rotated by the angles of their tokens (arXiv 2104.09864). cos, sin (…, d): the
    cosines and sines of d / 2 angles, twice."""
    out = torch.empty_like(heads)
    *tokens, count, d = heads.shape
    _rotate[(math.prod(tokens),)](
        heads,
        cos,
        sin,
        out,
        count,
        d // 2,
        HEADS=triton.next_power_of_2(count),
        HALF=triton.next_power_of_2(d // 2),
    )
    return out


@triton.jit
def _rotate_and_store(
    heads,
    cos,
    sin,
    query,
    cached,
    page,
    place,
    kind_stride,
    page_stride,
    head_stride,
    H,
    KV,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program computes one row of heads (n, H + 2 KV, 2 half): a token's query heads, key heads and value
    heads, in this order. See rotate_and_store. HEADS, HALF: see _rotate"""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    j = tl.arange(0, HALF)[None, :]
    # The first H + KV heads, queries and keys, are rotated. The values are only loaded.
    first, second, _ = _rotated(heads, cos, sin, row, H + 2 * KV, H + KV, half, h, j)
    first = first.to(query.dtype.element_ty)
    second = second.to(query.dtype.element_ty)
    inside = j < half
    to_query = query + (row * H + h) * 2 * half + j
    of_query = inside & (h < H)
    tl.store(to_query, first, mask=of_query)
    tl.store(to_query + half, second, mask=of_query)
    at = tl.load(page + row) * page_stride + tl.load(place + row) * 2 * half + j
    kind = (h - H) // KV  # 0: a key, 1: a value; so the head is number (h - H) % KV of its kind
    to_cache = cached + kind * kind_stride + at + (h - H) % KV * head_stride
    of_cache = inside & (h >= H) & (h < H + 2 * KV)
    tl.store(to_cache, first, mask=of_cache)
    tl.store(to_cache + half, second, mask=of_cache)


def rotate_and_store(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    cached: Tensor,
    page: Tensor,
    place: Tensor,
) -> Tensor:
    """Returns the rotated queries (n, H, d) of n tokens. Stores their rotated keys and their values in
    `cached` (2, pages, KV, size, d), a layer of torch_engine.Cache: token j in page[j], at place[j].

    heads (n, H + 2 KV, d): H heads of queries, KV heads of keys, KV heads of values
    cos, sin (n, d): of the angles of the tokens' positions. Only the second halves are read: see _rotated"""
    n, count, d = heads.shape
    KV = cached.shape[2]
    H = count - 2 * KV
    query = heads.new_empty(n, H, d)
    kind_stride, page_stride, head_stride, _, _ = cached.stride()
    _rotate_and_store[(n,)](
        heads,
        cos,
        sin,
        query,
        cached,
        page,
        place,
        kind_stride,
        page_stride,
        head_stride,
        H,
        KV,
        d // 2,
        HEADS=triton.next_power_of_2(count),
        HALF=triton.next_power_of_2(d // 2),
    )
    return query
