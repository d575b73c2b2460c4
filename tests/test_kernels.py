"""Tests of kernels.py, in Triton's interpreter, and of the MLP in model.py that uses them."""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

import model


@pytest.fixture(scope="module")
def kernels():
    """A function that calls a function of kernels.py in Triton's interpreter. Triton reads TRITON_INTERPRET
    when it is imported, so the interpreter runs in another process, which imports Triton again."""
    with ProcessPoolExecutor(1, get_context("fork"), interpreted) as pool:
        yield lambda name, *args: pool.submit(call, name, args).result()


def interpreted():
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    for name in [*sys.modules]:
        if name == "kernels" or name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]


def call(name, args):
    import kernels

    return getattr(kernels, name)(*args)


def in_pytorch(name, *args):
    return getattr(model, name)(*args)


def in_fp64(z, targets, temperature, g_logp, g_entropy):
    """Returns log-probs, entropies and the gradient of the logits z, from a whole softmax in fp64."""
    z = z.double().requires_grad_()
    log_p = (z / temperature).log_softmax(-1)
    logp = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (g_logp * logp + g_entropy * entropy).sum().backward()
    return logp.detach(), entropy.detach(), z.grad


@pytest.mark.parametrize("form", ["kernels", "model"])
@pytest.mark.parametrize("vocabulary,rows", [(1000, 5), (8192, 1), (8193, 3), (250000, 1)])
def test_the_head_equals_a_softmax_in_fp64(form, vocabulary, rows, kernels):
    """The logits reach ±12, so at temperature 0.05 their rounding to fp32 is 1e-5. The first row's gradients
    are 0, as those of a token outside the loss."""
    form = {"kernels": kernels, "model": in_pytorch}[form]
    g = torch.Generator().manual_seed(vocabulary)
    z = 3 * torch.randn(rows, vocabulary, generator=g)
    targets = torch.randint(0, vocabulary, (rows,), generator=g)
    g_logp, g_entropy = (torch.randn(rows, generator=g) for _ in range(2))
    if rows > 1:
        g_logp[0] = g_entropy[0] = 0
    for temperature in (0.05, 1.0, 5.0):
        scale = 1 / temperature
        logp, entropy, lse = form("log_probs", z, targets, scale)
        for of_entropy in (g_entropy, 0 * g_entropy):
            saved = targets, lse, entropy, g_logp, of_entropy
            grad = form("logits_grad", z, scale, torch.float32, *saved)
            want = in_fp64(z, targets, temperature, g_logp, of_entropy)
            for got, exact in zip((logp, entropy, grad), want, strict=True):
                assert (got - exact).abs().max() <= 1e-4 * max(1.0, float(exact.abs().max()))
            assert rows == 1 or not grad[0].any()
        rounded = form("logits_grad", z, scale, torch.bfloat16, *saved)
        torch.testing.assert_close(rounded.float(), grad, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("width", [1, 300, 2048, 4864])
@pytest.mark.parametrize("one_matrix", [False, True])
def test_swiglu_equals_pytorch(width, one_matrix, kernels):
    """one_matrix: gate and up are the two halves of one tensor, as in Phi-3."""
    both = torch.randn(1, 5, 2 * width, generator=torch.Generator().manual_seed(width))
    gate, up = both.chunk(2, -1) if one_matrix else (x.contiguous() for x in both.chunk(2, -1))
    want = [x.double().requires_grad_() for x in (gate, up)]
    product = F.silu(want[0]) * want[1]
    g = torch.randn(product.shape)
    product.backward(g.double())
    assert (kernels("swiglu", gate, up) - product).abs().max() < 1e-5
    for got, exact in zip(kernels("swiglu_grad", g, gate, up), want, strict=True):
        assert got.shape == gate.shape and (got - exact.grad).abs().max() < 1e-5


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_down_projection_that_does_not_store_its_input_has_the_same_gradients(act, bias):
    g, act = torch.Generator().manual_seed(0), ACT2FN[act]
    linear = nn.Linear(6, 4, bias=bias).double()
    inputs = [torch.randn(2, 3, 6, generator=g).double().requires_grad_() for _ in range(2)]
    grad = torch.randn(2, 3, 4, generator=g).double()
    parameters, results, stored = [*inputs, *linear.parameters()], [], []

    def record(x):
        stored.append(x)
        return x

    for kept in (True, False):
        with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
            product = act(inputs[0]) * inputs[1]
            count = len(stored)
            out = (linear(product) if kept else
                   model.DownProjection.apply(act, *inputs, product, linear.weight, linear.bias))
        assert kept == any(x.data_ptr() == product.data_ptr() for x in stored[count:])
        results.append((out, *torch.autograd.grad(out, parameters, grad)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
