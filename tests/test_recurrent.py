"""Tests of Qwen3.5: its gated delta nets on packs, its files, and its fp32 parameters. The reference is
transformers' model, which reads one sample a forward pass."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from conftest import run_ranks
from ranks import all_gradients, full, make_samples
from torch.distributed.tensor import DTensor

import ckpt
import data
import dist
import model
import rollout
from configs import PRESETS
from guard.messages import UserError
from layers import attention

NEAR = 1e-5
# Segments around the chunk of 64 tokens, and eight samples of one prompt of 70 tokens.
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that also reads images, with its language model inside."""
    return families.make(tmp_path_factory.mktemp("recurrent"), "qwen3_5")


def sample(i: int, prompt: np.ndarray, ids: np.ndarray) -> data.Sample:
    return data.Sample(i, 0, tuple(prompt.tolist()), ids.astype(np.int32), np.zeros(len(ids), np.float32),
                       True, "", 0)


@functools.cache
def samples() -> list[data.Sample]:
    g = np.random.default_rng(0)
    tokens = functools.partial(g.integers, 3, 100)
    made = [sample(i, tokens(1), tokens(n - 1)) for i, n in enumerate(LENGTHS)]
    prompt = tokens(70)
    return made + [sample(100 + i, prompt, tokens(1 + 10 * i)) for i in range(8)]


def weights_of(mine: list[data.Sample]) -> torch.Tensor:
    """Returns (T,): weights of the log-probs in a sum, whose gradient is compared."""
    parts = []
    for s in mine:
        g = torch.Generator().manual_seed(s.prompt_id)
        parts.append(torch.randn(s.length, generator=g))
    return torch.cat(parts)


@pytest.fixture(scope="module")
def reference(folder):
    """Returns transformers' log-probs and gradients."""
    hf = families.original(folder)
    logp = families.original_logp(hf, samples(), 0.7)
    (logp * weights_of(samples())).sum().backward()
    return logp.detach(), {name: p.grad for name, p in hf.named_parameters()}


def ours(path: str, count: int = 1) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Returns this rank's log-probs, of every `count`-th sample, and the gradients over all ranks."""
    world = dist.init("cpu", "float32")
    shard_fn = functools.partial(dist.shard, over=dist.mesh(world), dtype=torch.float32, recompute=1)
    policy = model.load_policy(path, "cpu", shard_fn)
    mine = samples()[world.rank::world.size]
    p = data.pack(mine)
    for _ in dist.accumulate(policy, [p]):
        logp = policy(p, 0.7)[0]
        (logp * weights_of(mine)).sum().backward()
    gradients = {name: full(p.grad) for name, p in policy.named_parameters()}
    return logp.detach().split([s.length for s in mine]), gradients


@pytest.mark.parametrize("world", [1, 4])
def test_packs_on_any_number_of_ranks_equal_transformers(world, folder, reference):
    want, gradients = reference
    want = want.split([s.length for s in samples()])
    whole = torch.stack([g.norm() for g in gradients.values()]).norm()
    for rank, (logps, found) in enumerate(run_ranks(world, ours, folder)):
        for a, b in zip(logps, want[rank::world], strict=True):
            assert (a - b).abs().max() < NEAR
        assert found.keys() == gradients.keys()
        for name, g in gradients.items():
            assert (found[name] - g).norm() < NEAR * (g.norm() + 1e-3 * whole), name


def test_prompts_are_computed_once_and_their_states_in_each_segment(folder, monkeypatch):
    """The projections run on the unique tokens. Only convolution and recurrence run on copies."""
    policy, p, seen = model.load_policy(folder), data.pack(samples()[-8:]), []
    policy.model.layers[0].linear_attn.in_proj_qkv.register_forward_hook(
        lambda module, args, out: seen.append(len(out)))
    recur = attention._recur
    monkeypatch.setattr(attention, "_recur", lambda net, rows, cu: seen.append(rows[..., 0].numel()) or
                        recur(net, rows, cu))
    policy(p, 1.0)
    computed, *blocks = seen
    assert computed == len(p.unique) == len(p.tokens) - 7 * 70
    assert len(p.tokens) <= sum(blocks) < 2 * len(p.tokens)


def test_a_state_that_leaks_into_the_next_segment_is_seen(folder):
    """Without the bounds of the segments, the log-probs of all but the first segment are wrong."""
    policy, mine = model.load_policy(folder), make_samples(4)
    p = data.pack(mine)
    with torch.no_grad():
        right = policy(p, 1.0)[0]
        alone = torch.cat([policy(data.pack([s]), 1.0)[0] for s in mine])
        whole = p.cu_seqlens[[0, -1]]  # the bounds of one segment
        everything = torch.arange(len(p.tokens))
        leaking = policy(replace(p, cu_seqlens=whole, longest=len(p.tokens), unique=everything,
                                 inverse=everything), 1.0)[0]
    assert (right - alone).abs().max() < NEAR
    first = mine[0].length
    assert (leaking - alone)[:first].abs().max() < NEAR < 1e-2 < (leaking - alone)[first:].abs().max()


def test_gradients_of_policy_and_critic_do_not_depend_on_ranks(folder):
    """On four ranks, each pair holds a whole model."""
    base = replace(PRESETS["tiny-ppo"], model=folder, device="cpu", dtype="float32", pack_len=64,
                   max_prompt_len=16, max_response_len=32, prompts_per_step=2, samples_per_prompt=4,
                   critic_updates=1)
    (alone,), = run_ranks(1, all_gradients, [(base, make_samples(8))])
    assert any(name.startswith("critic.") and name.endswith("A_log") for name in alone)
    for found, in run_ranks(4, all_gradients, [(replace(base, shard_ranks=2), make_samples(8))]):
        whole = torch.stack([g.norm() for g in alone.values() if isinstance(g, torch.Tensor)]).norm()
        for name in alone.keys() - {"metrics", "packs", "sent"}:
            gap = (found[name] - alone[name]).norm()
            assert gap < NEAR * (alone[name].norm() + 1e-2 * whole), name


def dtypes_in_bf16(path: str) -> tuple[set, set, set, set]:
    """Returns the dtypes of decay parameters and of other weights: while a bf16 forward pass computes with
    them; of the gradients; and as they go to the engine."""
    world, seen = dist.init("cpu", "bfloat16"), set()
    shard_fn = functools.partial(dist.shard, over=dist.mesh(world), dtype=torch.bfloat16)
    policy, recur = model.load_policy(path, "cpu", shard_fn), attention._recur

    def spy(net, rows, cu):
        seen.update([("A_log", net.A_log.dtype), ("dt_bias", net.dt_bias.dtype),
                     ("weight", net.conv1d.weight.dtype)])
        return recur(net, rows, cu)

    attention._recur = spy
    logp = policy(data.pack(make_samples(4)), 1.0)[0]
    logp.sum().backward()
    attention._recur = recur
    pushed = {(name.split(".")[-1], t.dtype) for name, t in dist.full_weights(policy)}
    gradients = {p.grad.dtype for p in policy.parameters()}
    assert all((full(p.grad) != 0).any() for n, p in policy.named_parameters() if n.endswith(dist.FP32))
    return seen, gradients, pushed, {type(t) for _, t in dist.full_weights(policy)} & {DTensor}


@pytest.mark.parametrize("world", [1, 2])
def test_decays_are_fp32_in_a_bf16_run(world, folder):
    for seen, gradients, pushed, sharded in run_ranks(world, dtypes_in_bf16, folder):
        decays = {("A_log", torch.float32), ("dt_bias", torch.float32)}
        assert seen == {*decays, ("weight", torch.bfloat16)}
        assert pushed == {*decays, ("weight", torch.bfloat16)} and not sharded
        assert gradients == {torch.float32}


def test_files_with_a_vision_tower_become_a_text_model(folder, tmp_path):
    """What is left out is said in one line. The export is the language model alone."""
    line = model.left_out(folder)
    count = sum(name.startswith(model.LEFT_OUT) for name in dist.tensors_in(folder))
    assert count > 10 and f"{count} tensors of model.visual. and mtp. are left out" in line
    assert "\n" not in line
    policy = model.load_policy(folder)
    facts = {"prompt": "{problem}", "system_prompt": ""}
    out = tmp_path / "text"
    ckpt.export_hf(dist.full_weights(policy), policy, model.load_tokenizer(folder), folder, out, facts)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text" and config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["tie_word_embeddings"] and model.left_out(str(out)) == ""
    names = dist.tensors_in(str(out))
    assert names.keys() == {name for name, _ in policy.named_parameters()}
    decay = "model.layers.0.linear_attn.A_log"
    stored = {}
    for name, tensor in model.files_weights(str(out), "cpu", torch.bfloat16):
        stored[name] = tensor
    assert stored[decay].dtype == torch.float32
    assert torch.equal(stored[decay], policy.get_parameter(decay))


@pytest.mark.parametrize("engine,dtype,ok", [
    ("auto", "auto", False), ("torch", "bfloat16", False), ("vllm", "float32", False),
    ("vllm", "bfloat16", True)])
def test_an_engine_that_cannot_decode_it_is_refused_in_one_line(engine, dtype, ok, folder):
    cfg = replace(PRESETS["tiny-ppo"], model=folder, engine=engine, dtype=dtype)
    check = functools.partial(rollout.check_engine_flags, folder, cfg, torch.device("cpu"))
    if ok:
        return check()
    with pytest.raises(UserError, match="recurrent states; needed: --engine vllm, .*--dtype bfloat16") as e:
        check()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("changes", [dict(attention_bias=True), dict(attn_output_gate=False),
                                     dict(output_gate_type="sigmoid"), dict(hidden_act="gelu")])
def test_settings_that_transformers_or_vllm_ignores_are_refused(changes, folder, tmp_path):
    config = json.loads(Path(folder, "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(Path(folder, "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"\(qwen3_5_text\) has settings .*: (attention_bias|gates)"):
        model.load_config(str(tmp_path))


SWITCH = ("{% generation %}{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
          "{% endgeneration %}"
          "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% else %}<think>"
          "{% endif %}{{ level | default(0) }}")


def with_switch(path: str):
    tokenizer = model.load_tokenizer(path)
    tokenizer.chat_template = SWITCH
    return tokenizer


def test_arguments_of_a_chat_template_reach_prompts_and_exports(folder):
    turns, prompts = (("user", "1+1="),), {}
    for words in ((), ("enable_thinking=false",), ("enable_thinking=true", "level=2"), ('level="x"',)):
        tokenizer = with_switch(folder)
        data.set_arguments(tokenizer, words)
        ids = data.prompt_encoder("chat", tokenizer)(turns)
        prompts[words] = tokenizer.decode(ids).split("= ")[-1]
        served = with_switch(folder)  # the export's
        served.chat_template = data.chat_template(tokenizer, "")
        example = [{"role": "user", "content": "1+1="}]
        assert served.apply_chat_template(example, add_generation_prompt=True, return_dict=False) == ids
        chosen = served.apply_chat_template(example, tokenize=False, enable_thinking=False)
        assert "<think></think>" in chosen  # a caller can still choose
    assert [*prompts.values()] == ["<think>0", "<think></think>0", "<think>2", "<think>x"]


@pytest.mark.parametrize("word", ["enable_thinkng=false", "messages=1", "enable_thinking",
                                  "enable_thinking=no", "enable_thinking=null", "m=1", "eos_token=1",
                                  "level=[1]"])
def test_a_wrong_argument_of_a_chat_template_is_refused_in_one_line(word, folder):
    with pytest.raises(UserError, match=f"--template_args {re.escape(word)}.*needed: NAME=VALUE") as e:
        data.set_arguments(with_switch(folder), (word,))
    assert "\n" not in str(e.value)
    other = with_switch(folder)  # as of a model that tools.evaluate compares with an export
    other.chat_template = "{{ messages }}"
    with pytest.raises(UserError, match="; or --template_args without a value$"):
        data.set_arguments(other, ("enable_thinking=false",))
    with pytest.raises(UserError, match="--template_args has no effect with --template orz"):
        replace(PRESETS["tiny-ppo"], template="orz", template_args=(word,))
