"""The MLP and the norm of a decoder layer, with less memory than in transformers; linear layers with LoRA."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

if torch.cuda.is_available():  # CPU builds of torch have no Triton
    from layers import gpu_kernels


def rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Returns the RMS norm of x over its last dimension. `norm`: a Hugging Face norm with Llama's formula."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


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


# --- a linear layer with an adapter (--lora)


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
