"""Triton kernels for GPUs: the output layer's log-probs and entropies, and the gated MLP's activation.

PyTorch would read and write the large tensors of these formulas up to ten times. Each kernel reads its inputs
once and writes its outputs once. All sums are fp32.

model.py imports this file only for tensors on a GPU, because CPU builds of torch have no Triton. The same
formulas stand in model.py, in PyTorch, for CPUs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # logits that one program of the output layer reads at a time
COLUMNS = 2048  # columns of the MLP that one program reads


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
    """One program computes one row of z (n, V) in one pass. It keeps three numbers:

    m: the largest of the logits so far
    s: the sum of exp(x - m)
    t: the sum of exp(x - m) (x - m)"""
    row = tl.program_id(0).to(tl.int64)
    z += row * V
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
    tl.store(entropy + row, log_s - t / s)


def log_probs(z: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See model.log_probs."""
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
    g,
    scale,
    targets,
    lse,
    entropy,
    g_logp,
    g_entropy,
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < V
    at = row * V + i
    x = tl.load(z + at, mask=inside, other=0.0)
    logp = x * scale - tl.load(lse + row)
    p = tl.exp(logp)
    of_logp = tl.load(g_logp + row)
    of_entropy = tl.load(g_entropy + row)
    is_target = i == tl.load(targets + row)
    grad = tl.where(is_target, of_logp, 0.0) - p * of_logp
    grad -= p * (logp + tl.load(entropy + row)) * of_entropy
    grad = grad * scale
    tl.store(g + at, grad.to(g.dtype.element_ty), mask=inside)


def logits_grad(z: Tensor, scale: float, dtype: torch.dtype, *rows: Tensor) -> Tensor:
    """See model.logits_grad. rows: targets, lse, entropy, g_logp, g_entropy"""
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
def _swiglu(
    gate,
    up,
    out,
    stride,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    read = row * stride + i
    x = tl.load(gate + read, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + read, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(x) * u
    at = row * width + i
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
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    read = row * stride + i
    at = row * width + i
    x = tl.load(gate + read, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + read, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(x)
    silu = x * sigmoid
    of_up = d * silu
    of_gate = d * u * (sigmoid + silu * (1 - sigmoid))
    tl.store(g_up + at, of_up.to(g_up.dtype.element_ty), mask=inside)
    tl.store(g_gate + at, of_gate.to(g_gate.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up, for two tensors (…, width) with the same strides."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grid, stride, width = layout(gate)
    _swiglu[grid](gate, up, out, stride, width, BLOCK=COLUMNS)
    return out


def swiglu_grad(g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up, for the gradient `g` of silu(gate) * up."""
    g_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    g_up = torch.empty_like(g_gate)
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
    """Returns the grid of programs for x (…, width), the stride of its rows, and the width. x may be a half
    of a wider tensor."""
    rows = x.view(-1, x.shape[-1])  # not reshape: a copy would have another stride
    n, width = rows.shape
    grid = n, triton.cdiv(width, COLUMNS)
    return grid, rows.stride(0), width
