"""Tests of model.py and layers/: recomputation, shared prefixes, log-probs in chunks, and the critic."""

import json
import shutil
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Operations, make_model
from ranks import make_samples
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

import configs
import data
import model
from guard.messages import UserError
from layers import attention, head
from tools import plan


def test_recomputing_costs_the_products_of_whole_layers_only(tiny):
    """A recomputed layer repeats its forward pass, except the last matrix product, whose result no gradient
    needs."""
    p, cost = data.pack(make_samples(8)), {}
    layers = model.load_config(tiny).num_hidden_layers
    for whole in range(layers + 1):
        policy = model.load_policy(tiny)
        policy.recompute(whole)
        with FlopCounterMode(display=False) as forward:
            logp = policy(p, 1.0)[0]
        with FlopCounterMode(display=False) as backward:
            logp.sum().backward()
        cost[whole] = backward.get_total_flops()
    c, unique, loss = policy.config, len(p.unique), len(p.loss_tokens)
    of_layer = (forward.get_total_flops() - 2 * loss * c.vocab_size * c.hidden_size) / layers
    last_product = 2 * unique * c.intermediate_size * c.hidden_size  # no gradient needs its result
    for whole in range(layers):
        assert cost[whole + 1] - cost[whole] == of_layer - last_product


def attention_gradients(qkv, p, grad):
    """Returns the gradients for queries, keys and values, (1, heads, tokens, d) each."""
    qkv = [x.clone().requires_grad_() for x in qkv]
    segments = attention.Segments(p.cu_seqlens, p.longest, p.unique, p.inverse)
    out = attention.packed_attention(None, *qkv, None, 0.25, segments)[0]
    return torch.autograd.grad(out, qkv, grad)


def test_gradients_of_a_shared_prompt_are_as_exact_as_those_of_its_copies():
    """With 64 responses to a prompt, the bf16 error (against fp64) is at most 1.2 times the error without
    sharing."""
    n, prompt, length = 64, 256, 384
    p = data.pack([data.Sample(0, i, tuple(range(prompt)), np.full(length - prompt, i, np.int32),
                               np.zeros(length - prompt, np.float32), True, "", 0) for i in range(n)])
    g = torch.Generator().manual_seed(0)
    unique = [torch.randn(1, 2, len(p.unique), 16, generator=g).bfloat16() for _ in range(3)]
    grad = torch.randn(1, len(p.unique), 2, 16, generator=g).bfloat16()
    grad[:, :prompt] = 0  # as in training, only outputs at response tokens have gradients
    want = attention_gradients([x.double() for x in unique], p, grad.double())
    got = attention_gradients(unique, p, grad)
    # Without sharing, each segment has its own copy of the prompt.
    all_tokens = torch.arange(n * length)
    apart = data.replace(p, unique=all_tokens, inverse=all_tokens)
    whole = torch.zeros(1, n * length, 2, 16).bfloat16().index_copy(1, p.unique, grad)
    copies = attention_gradients([x[:, :, p.inverse] for x in unique], apart, whole)
    for x, w, c in zip(got[1:], want[1:], copies[1:], strict=True):
        alone = c.double().unflatten(2, (n, length))[:, :, :, :prompt].sum(2)
        x, w = x[:, :, :prompt], w[:, :, :prompt]
        error, of_copies = ((y.double() - w).norm() / w.norm() for y in (x, alone))
        print(f"{float(error):.2e} {float(of_copies):.2e}")
        assert error <= 1.2 * of_copies


def test_a_layer_takes_few_operations(tmp_path):
    """On a GPU each operation costs the launch of a kernel."""
    counts = []
    for layers in (1, 2):
        policy = model.load_policy(make_model(tmp_path / str(layers), layers=layers))
        p = data.pack(make_samples(3))
        with Operations(lambda op: not op.is_view and op is not torch.ops.aten.detach.default) as ops:
            policy(p, 1.0)[0].sum().backward()
        counts.append(ops.counts[True])
    assert counts[1] - counts[0] <= 126


def test_copied_rows_get_the_sum_of_their_copies_gradients():
    g = torch.Generator().manual_seed(0)
    x, index = torch.randn(30, 3, 5, generator=g), torch.randint(0, 20, (200,), generator=g)
    index[:40] = 7
    grad, a, b = torch.randn(200, 3, 5, generator=g), *(y.requires_grad_() for y in (x.clone(), x.double()))
    got, = torch.autograd.grad(attention.TakeRows.apply(a, index), a, grad)
    want, = torch.autograd.grad(b.index_select(0, index), b, grad.double())
    assert (got - want).abs().max() < 1e-5 and not got[20:].any()


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_log_probs_equal_the_full_softmax(chunk, monkeypatch):
    monkeypatch.setitem(configs.CHUNK_BYTES, "cpu", 4 * 50 * chunk)
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(23, 8, generator=g), torch.randn(50, 8, generator=g)
    targets = torch.randint(0, 50, (23,), generator=g)
    a, b = torch.randn(23, generator=g), torch.randn(23, generator=g)
    got = [x.clone().requires_grad_() for x in (hidden, weight)]
    want = [x.clone().double().requires_grad_() for x in (hidden, weight)]
    logp, entropy = head.ChunkedLogProbs.apply(*got, targets, 0.8)
    full = (want[0] @ want[1].t() / 0.8).log_softmax(-1)
    logp_want, entropy_want = full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
    assert (logp - logp_want).abs().max() < 1e-5 and (entropy - entropy_want).abs().max() < 1e-5
    (logp * a + entropy * b).sum().backward()
    (logp_want * a + entropy_want * b).sum().backward()
    for x, y in zip(got, want, strict=True):
        assert (x.grad - y.grad).abs().max() < 1e-4


def test_log_probs_take_memory_by_the_chunk_not_by_the_pack(monkeypatch, tmp_path):
    """At most CHUNKS_ALIVE chunks of logits are in memory at once, as tools/plan.py assumes."""
    monkeypatch.setitem(configs.CHUNK_BYTES, "cpu", chunk := 5 * 2**20)
    weight = torch.randn(20000, 8, requires_grad=True)

    def peak(tokens: int) -> int:
        hidden, targets = torch.randn(tokens, 8, requires_grad=True), torch.arange(tokens)

        def work() -> None:
            logp, entropy = head.ChunkedLogProbs.apply(hidden, weight, targets, 1.0)
            (logp + entropy).sum().backward()

        work()  # not measured: the first pass also allocates memory that later ones reuse
        return peak_allocated(work, tmp_path / "trace.json")

    few, many = peak(512), peak(2048)
    most = plan.CHUNKS_ALIVE * chunk + 2**21  # 2 MiB are for the gradients of the weight
    assert 0.9 * chunk < few < most and many < most and abs(many - few) < chunk / 50


def peak_allocated(f, trace: Path) -> int:
    """Returns the most bytes that f() has in use at once."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        f()
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    return max(accumulate(e["args"]["Bytes"] for e in events if e["name"] == "[memory]"))


def test_the_critic_reads_the_state_before_each_token(tiny):
    critic, samples = model.load_critic(tiny), make_samples(3)
    p = data.pack(samples)
    at = int(p.mask.nonzero()[3])
    tokens = p.tokens.clone()
    tokens[at] = 5 if tokens[at] != 5 else 6
    with torch.no_grad():
        a, b = critic(p), critic(data.replace(p, tokens=tokens))
    end = int(p.cu_seqlens[1:][p.cu_seqlens[1:] > at][0])
    assert torch.equal(a[:at + 1], b[:at + 1]) and torch.allclose(a[end:], b[end:], atol=1e-6)
    assert end == at + 1 or (a[at + 1:end] - b[at + 1:end]).abs().max() > 1e-4


def test_a_new_critic_head_is_drawn_from_the_seed(tiny):
    """The head's weights have standard deviation 1/(D + 1), with the hidden size D = 64."""
    heads = [model.load_critic(tiny, seed=s).score.weight.detach() for s in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert float(heads[0].std()) == pytest.approx(1 / 65, rel=0.35)


def test_first_values_at_the_width_of_7b_are_small_beside_rewards(tmp_path):
    """Hidden states have the norm √D, and head weights are about 1/(D + 1). So with the hidden size D = 3584,
    the values' standard deviation is about 0.017."""
    config = AutoConfig.for_model(
        "qwen2", vocab_size=64, hidden_size=3584, num_attention_heads=28, num_key_value_heads=4,
        intermediate_size=64, num_hidden_layers=1, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    p = data.pack(make_samples(8))
    p = data.replace(p, tokens=p.tokens % 64, mask=torch.ones_like(p.mask))
    with torch.no_grad():
        spread = model.load_critic(str(tmp_path))(p).std()
    assert 0.5 < spread * 3584**0.5 < 2


@pytest.mark.parametrize("names", [["tok_embeddings.weight"], ["score.weight"],
                                   ["model.embed_tokens.weight", "model.norm.weight"]])
@pytest.mark.parametrize("file", ["consolidated.safetensors", "consolidated.00.safetensors",
                                  "consolidated-00001-of-00002.safetensors"])
def test_consolidated_weights_beside_a_models_own_are_skipped(names, file, tiny, tmp_path):
    """A whole download of a Mistral model has its weights twice. Here, the copies have other values."""
    folder = shutil.copytree(tiny, tmp_path / "m")
    own = load_file(f"{tiny}/model.safetensors")
    save_file({name: torch.full_like(own["model.embed_tokens.weight"], 7.0) for name in names}, folder / file)
    found = model.load_policy(str(folder)).state_dict()
    assert all(torch.equal(found[name], x) for name, x in own.items() if name in found)
    read = dict(model.files_weights(str(folder), "cpu", torch.float32))
    assert read.keys() == found.keys() - {"lm_head.weight"} or read.keys() == found.keys()
    assert all(torch.equal(read[name], own[name]) for name in read)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no .safetensors files"):
        model.load_policy(str(folder))
