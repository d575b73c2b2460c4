"""Tests of layers/gpu_kernels.py, in Triton's interpreter, and of the layers that use them."""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import families
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

import data
import model
from layers import attention, head, mlp


@pytest.fixture(scope="module")
def kernels():
    """A function that calls a function of layers/gpu_kernels.py in Triton's interpreter. Triton reads
    TRITON_INTERPRET when it is imported, so the interpreter runs in another process, which imports Triton
    again."""
    with ProcessPoolExecutor(1, get_context("fork"), interpreted) as pool:
        yield lambda name, *args: pool.submit(call, name, args).result()


def interpreted():
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    for name in [*sys.modules]:
        is_triton = name.partition(".")[0] == "triton" and not name.startswith("triton._C")
        if is_triton or name == "layers.gpu_kernels":
            del sys.modules[name]


def call(name, args):
    from layers import gpu_kernels as kernels

    if name == "rotated_and_stored":  # in another process: return what it has written
        return kernels.rotate_and_store(*args), args[3]
    return getattr(kernels, name)(*args)


def in_pytorch(name, *args):
    return getattr(head, name)(*args)


def in_fp64(z, targets, temperature, g_logp, g_entropy):
    """Returns log-probs, entropies and the gradient of the logits z, from a whole softmax in fp64."""
    z = z.double().requires_grad_()
    log_p = (z / temperature).log_softmax(-1)
    logp = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (g_logp * logp + g_entropy * entropy).sum().backward()
    return logp.detach(), entropy.detach(), z.grad


@pytest.mark.parametrize("form", ["kernels", "head"])
@pytest.mark.parametrize("vocabulary,rows", [(1000, 5), (8192, 1), (8193, 3), (250000, 1)])
def test_the_head_equals_a_softmax_in_fp64(form, vocabulary, rows, kernels):
    """The logits reach ±12, so at temperature 0.05 their rounding to fp32 is 1e-5. The first row's gradients
    are 0, as those of a token outside the loss."""
    form = {"kernels": kernels, "head": in_pytorch}[form]
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


def test_draws_are_those_of_a_cumulative_sum_in_fp64(kernels):
    """Half of the random numbers are within 1e-6 of an edge between two tokens, where the neighbour may be
    drawn. A part of the logits is -inf, as outside a nucleus, in one row all but one."""
    g = torch.Generator().manual_seed(0)
    for vocabulary in (1, 300, 4097, 9000):
        z = 4 * torch.randn(32, vocabulary, generator=g)
        z[1::2, vocabulary // 3 + 1:] = -torch.inf
        z[3, 1:] = -torch.inf
        p = z.double().softmax(-1)
        edges = p.cumsum(-1)
        u = torch.rand(32, generator=g, dtype=torch.float64)
        u[:16] = edges[:16].gather(1, torch.randint(0, vocabulary, (16, 1), generator=g))[:, 0]
        u = u.clamp(0, 1 - 1e-9)
        u[4], u[5] = 0, 1 - 2**-53
        token, logp = kernels("draw", z, u)
        low = torch.searchsorted(edges, (u - 1e-6)[:, None], right=True)[:, 0]
        high = torch.searchsorted(edges, (u + 1e-6)[:, None], right=True)[:, 0]
        assert ((low <= token) & (token <= high)).all()
        assert (token == low)[low == high].all() and (low == high).sum() > 10
        of_token = p.gather(1, token[:, None])[:, 0]
        assert (of_token > 0).all() and (logp - of_token.log()).abs().max() < 1e-5


def test_a_draw_from_logits_that_are_no_numbers_is_a_token_without_a_log_prob(kernels):
    token, logp = kernels("draw", torch.full((2, 5000), torch.nan), torch.rand(2, dtype=torch.float64))
    assert ((token >= 0) & (token < 5000)).all() and logp.isnan().all()


@pytest.mark.parametrize("H,KV,d", [(14, 2, 64), (3, 1, 80), (1, 1, 2)])
def test_rotated_keys_and_values_are_stored(H, KV, d, kernels):
    """The reference is transformers' rotary embedding."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    g, n, pages, size = torch.Generator().manual_seed(d), 5, 4, 3
    heads = torch.randn(n, H + 2 * KV, d, generator=g)
    angle = torch.randn(n, 1, d // 2, generator=g).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    page, place = torch.tensor([3, 1, 1, 2, 3]), torch.tensor([0, 2, 1, 2, 1])
    cached = torch.randn(2, pages, KV, size, d, generator=g)
    signed = torch.cat([-sin[..., :d // 2], sin[..., d // 2:]], -1)  # as in FusedDecoder.step
    query, stored = kernels("rotated_and_stored", heads, cos, signed, cached, page, place)
    q, k, v = heads.split([H, KV, KV], 1)
    want = [x[:, :, 0] for x in apply_rotary_pos_emb(q[:, :, None], k[:, :, None], cos, sin)]
    torch.testing.assert_close(query, want[0])
    torch.testing.assert_close(kernels("rotate", q.contiguous(), cos, sin), want[0])
    back = kernels("rotate", want[0], cos, -sin)  # what the backward pass computes
    torch.testing.assert_close(back, q)
    cached[0, page, :, place], cached[1, page, :, place] = want[1], v
    torch.testing.assert_close(stored, cached)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_attention_with_the_rotary_kernel_equals_that_of_transformers(family, tmp_path, monkeypatch):
    """The kernel is replaced by transformers' formula; the test above compares both."""
    from types import SimpleNamespace

    from transformers.models.qwen2.modeling_qwen2 import rotate_half

    folder, results = families.make(tmp_path, family), []
    g = torch.Generator().manual_seed(0)
    lengths = [7, 12, 5]
    p = data.pack([data.Sample(i, 0, (3, 4), torch.randint(5, 90, (n,), generator=g).int().numpy(),
                               torch.zeros(n).numpy(), True, "", 0) for i, n in enumerate(lengths)])
    calls = []

    def rotate(x, cos, sin):
        calls.append(x.shape)
        return x * cos.unsqueeze(-2) + rotate_half(x) * sin.unsqueeze(-2)

    monkeypatch.setattr(attention, "gpu_kernels", SimpleNamespace(rotate=rotate), raising=False)
    for replaced in (False, True):
        if replaced:
            monkeypatch.setattr(model, "attention_forward", attention.rotary_attention)
        policy = model.load_policy(folder)
        logp, _ = policy(p, 1.0)
        (logp.sum()).backward()
        assert replaced == bool(calls)  # tensors on a CPU never reach the kernel, also beside a GPU
        results.append([logp.detach(), *(x.grad for x in policy.parameters())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


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
                   mlp.DownProjection.apply(act, *inputs, product, linear.weight, linear.bias))
        assert kept == any(x.data_ptr() == product.data_ptr() for x in stored[count:])
        results.append((out, *torch.autograd.grad(out, parameters, grad)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
