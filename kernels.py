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
def _log_probs(z, targets, logp, entropy, lse, scale, V, BLOCK: tl.constexpr):
    """One program computes one row of z (n, V) in one pass. It keeps three numbers:

    m: the largest of the logits so far
    s: the sum of exp(x - m)
    t: the sum of exp(x - m) (x - m)"""
    row = tl.program_id(0).to(tl.int64)
    z += row * V
    m, s, t = -float("inf"), 0.0, 0.0
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(z + i, mask=i < V, other=-float("inf")) * scale
        largest = tl.maximum(m, tl.max(x, 0))
        # Move s and t from the old maximum to the new one. In the first block, s is 0 and m is -inf.
        moved = tl.where(s > 0, m - largest, 0.0)
        t = tl.exp(moved) * (t + s * moved)
        s = s * tl.exp(moved)
        x = x - largest
        e = tl.exp(x)
        s += tl.sum(e, 0)
        t += tl.sum(tl.where(i < V, e * x, 0.0), 0)
        m = largest
    y = tl.load(z + tl.load(targets + row)) * scale
    log_s = tl.log(s)
    tl.store(lse + row, m + log_s)
    tl.store(logp + row, y - m - log_s)
    tl.store(entropy + row, log_s - t / s)


def log_probs(z: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See model.log_probs."""
    logp, entropy, lse = (z.new_empty(len(z)) for _ in range(3))
    _log_probs[(len(z),)](
        z, targets, logp, entropy, lse, scale, z.shape[1], BLOCK=BLOCK, num_warps=8
    )
    return logp, entropy, lse


@triton.jit
def _logits_grad(z, g, scale, targets, lse, entropy, g_logp, g_entropy, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(z + row * V + i, mask=i < V, other=0.0) * scale
    logp = x - tl.load(lse + row)
    p = tl.exp(logp)
    weight = tl.load(g_logp + row)
    grad = tl.where(i == tl.load(targets + row), weight, 0.0) - p * weight
    grad -= p * (logp + tl.load(entropy + row)) * tl.load(g_entropy + row)
    tl.store(g + row * V + i, (grad * scale).to(g.dtype.element_ty), mask=i < V)


def logits_grad(z: Tensor, scale: float, dtype: torch.dtype, *rows: Tensor) -> Tensor:
    """See model.logits_grad. rows: targets, lse, entropy, g_logp, g_entropy"""
    g = torch.empty_like(z, dtype=dtype)
    n, V = z.shape
    _logits_grad[(n, triton.cdiv(V, BLOCK))](z, g, scale, *rows, V, BLOCK=BLOCK, num_warps=8)
    return g


@triton.jit
def _swiglu(gate, up, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    x = tl.load(gate + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, (x * tl.sigmoid(x) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_grad(g, gate, up, g_gate, g_up, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    x = tl.load(gate + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    at = row * width + i
    d = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(x)
    silu = x * sigmoid
    tl.store(g_up + at, (d * silu).to(g_up.dtype.element_ty), mask=inside)
    grad = d * u * (sigmoid + silu * (1 - sigmoid))
    tl.store(g_gate + at, grad.to(g_gate.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up, for two tensors (…, width) with the same strides."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = rows_of(gate, up)
    n, width = gate.shape
    _swiglu[(n, triton.cdiv(width, COLUMNS))](gate, up, out, gate.stride(0), width, BLOCK=COLUMNS)
    return out


def swiglu_grad(g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up, for the gradient `g` of silu(gate) * up."""
    g_gate, g_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    gate, up = rows_of(gate, up)
    n, width = gate.shape
    _swiglu_grad[(n, triton.cdiv(width, COLUMNS))](
        g.contiguous(), gate, up, g_gate, g_up, gate.stride(0), width, BLOCK=COLUMNS
    )
    return g_gate, g_up


def rows_of(gate: Tensor, up: Tensor) -> list[Tensor]:
    """Returns both tensors as (n, width), without a copy. They may be the two halves of a wider tensor."""
    return [x.view(-1, x.shape[-1]) for x in (gate, up)]
