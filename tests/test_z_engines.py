"""One suite for both engines: plain PyTorch's, and the real vLLM (its CPU build). No mock of either."""

import dataclasses

import numpy as np
import pytest
import torch

import data
import dist
import model
import rollout
from configs import PRESETS

CFG = dataclasses.replace(PRESETS["tiny-ppo"], max_prompt_len=16, max_response_len=24, max_num_seqs=8, stop=("</answer>",))
GO = dict(n=1, temperature=1.0, max_tokens=24, key=(0, 1, 0), version=3)


@pytest.fixture(scope="session")
def engines(tiny):
    """Both engines, and the policy whose weights they are given."""
    dist.init("cpu", "float32")
    tokenizer = model.load_tokenizer(tiny)
    cfg = dataclasses.replace(CFG, model=tiny)
    vllm = rollout.VLLMEngine(tiny, tokenizer, cfg)
    return {"torch": rollout.TorchEngine(tiny, tokenizer, cfg), "vllm": vllm}, model.load_policy(tiny), tokenizer


@pytest.fixture(params=["torch", "vllm"])
def engine(request, engines):
    return engines[0][request.param]


@pytest.fixture
def policy(engines):
    return engines[1]


@pytest.fixture
def prompts(engines):
    return {i: engines[2](t).input_ids for i, t in enumerate(["12+34=", "7+8=<think>", "5", "99+1=<think>"])}


def go(engine, policy, prompts, **changes):
    """Samples by (slot, index)."""
    with engine.awake(dist.full_weights(policy), version=3):
        return {(s.slot, s.index): s for s in engine.generate(prompts, **GO | changes)}


def check_logprobs(samples, policy, temperature):
    """The engine's log-probs against the trainer's, on one pack."""
    pack = data.pack(list(samples.values()))
    with torch.no_grad():
        logp, _ = model.logprobs(policy, pack, temperature)
    assert (logp - pack.engine_logp)[pack.mask].abs().max() < 1e-4


def test_greedy_tokens_are_the_likeliest(engine, policy, prompts):
    for (slot, _), s in go(engine, policy, prompts, temperature=0).items():
        ids = list(prompts[slot])
        with torch.no_grad():
            for token in s.ids.tolist():
                at = torch.arange(len(ids))
                hidden = policy.hidden(torch.tensor(ids)[None], at[None], segments=model.Segments(
                    torch.tensor([0, len(ids)], dtype=torch.int32), len(ids)))[0, -1]
                assert token == int((policy.lm_head.weight @ hidden).argmax())
                ids.append(token)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_the_trainers(engine, policy, prompts, temperature):
    samples = go(engine, policy, prompts, n=3, temperature=temperature)
    assert sorted(samples) == [(slot, i) for slot in prompts for i in range(3)]
    check_logprobs(samples, policy, temperature)


def test_log_probs_do_not_depend_on_what_memory_held_before(engines, policy, prompts):
    """The torch engine with all memory that it asks for filled with NaN; prompts of several lengths."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    try:
        assert torch.empty(3).isnan().all() and len({len(p) for p in prompts.values()}) > 1
        samples = go(engines[0]["torch"], policy, prompts, n=3)
    finally:
        torch.use_deterministic_algorithms(False)
    check_logprobs(samples, policy, 1.0)


def test_weights_that_changed_are_the_ones_that_speak(engine, tiny, policy, prompts):
    before = go(engine, policy, prompts, temperature=0)
    other = model.load_policy(tiny)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.3)
    after = go(engine, other, prompts, temperature=0)
    check_logprobs(go(engine, other, prompts), other, 1.0)
    assert any(before[k].ids.tolist() != after[k].ids.tolist() for k in before)


def test_stale_weights_are_refused(engine, policy, prompts):
    with pytest.raises(RuntimeError, match="step None"):
        next(iter(engine.generate(prompts, **GO)))
    with engine.awake(dist.full_weights(policy), version=2), pytest.raises(RuntimeError, match="step 2"):
        next(iter(engine.generate(prompts, **GO)))


def test_samples_depend_on_their_key_and_on_nothing_else(engine, policy, prompts):
    """Not on the other requests, not on what was drawn before; and they differ from each other."""
    many = go(engine, policy, prompts, n=4)
    again = go(engine, policy, {k: prompts[k] for k in (3, 1)}, n=4)
    for k in again:
        assert many[k].ids.tolist() == again[k].ids.tolist()
    assert len({tuple(many[1, i].ids.tolist()) for i in range(4)}) > 1
    other = go(engine, policy, prompts, n=4, key=(0, 1, 1))
    assert any(many[k].ids.tolist() != other[k].ids.tolist() for k in many)


def test_length_ends_a_response_unstopped(engine, policy, prompts):
    for s in go(engine, policy, prompts, max_tokens=3, n=2).values():
        assert len(s.ids) <= 3 and (s.stopped or len(s.ids) == 3)
    room = {0: [5] * 38}  # of 40 tokens that a prompt and its response may have
    assert len(go(engine, policy, room)[0, 0].ids) <= 2


def test_stop_strings_and_eos_end_a_response_and_are_part_of_it(engines, engine, policy, prompts):
    free = go(engine, policy, prompts, temperature=0)
    slot, s = next((k[0], s) for k, s in free.items() if len(s.ids) > 8 and not s.stopped)
    stop = s.text[4:6]  # ends in the middle of what it would say, across two tokens
    cut = s.text.index(stop) + len(stop)
    cfg, ends = engine.cfg, getattr(engine, "may_stop", None)
    try:
        engine.cfg = dataclasses.replace(cfg, stop=(stop,))
        if ends is not None:
            engine.may_stop = torch.tensor(rollout._may_end(engine.tokenizer, engine.config.vocab_size, (stop,)))
        short = go(engine, policy, prompts, temperature=0)[slot, 0]
        assert short.stopped and short.text == s.text[:cut] and len(short.ids) < len(s.ids)
        engine.cfg, eos = cfg, engine.eos
        token = int(s.ids[6])
        engine.eos = {token}
        if ends is not None:
            engine.may_stop, engine.ends = ends, torch.tensor([token])
        short = go(engine, policy, prompts, temperature=0)[slot, 0]
        first = s.ids.tolist().index(token)
        assert short.stopped and short.ids.tolist() == s.ids.tolist()[:first + 1]
        assert short.text == engine.tokenizer.decode(s.ids.tolist()[:first])
    finally:
        engine.cfg, engine.eos = cfg, eos
        if ends is not None:
            engine.may_stop, engine.ends = ends, torch.tensor(sorted(eos))


def test_the_torch_engine_draws_from_the_softmax():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0]).repeat(20000, 1)
    u = torch.from_numpy(rollout.uniforms((7,), 20000))
    token, logp = rollout.choose(logits, u, 0.5)
    want = (logits[0] / 0.5).softmax(-1)
    share = torch.bincount(token, minlength=5) / 20000
    assert (share - want).abs().max() < 4 * 0.5 / 20000 ** 0.5  # four deviations
    assert (logp - want.log()[token]).abs().max() < 1e-5
    assert np.array_equal(rollout.uniforms((7,), 10), rollout.uniforms((7,), 20)[:10])


def test_rollouts_are_graded_and_ordered(engine, policy, engines):
    from reward import Grader

    tokenizer = engines[2]
    problems = {i: data.Problem(t, tuple(tokenizer(t).input_ids), "4", "") for i, t in enumerate(["2+2=", "1+3=", "8/2="])}
    with Grader() as grader, engine.awake(dist.full_weights(policy), version=3):
        samples = rollout.rollout(engine, grader, problems, 2, 1.0, 24, (0, 1, 0), 3)
    assert [(s.slot, s.index) for s in samples] == [(i, j) for i in range(3) for j in range(2)]
    assert all(s.reason == ("unparsed" if s.stopped else "truncated") for s in samples)


def test_the_loop_runs_with_either_engine_and_its_export_loads_in_vllm(engine, engines, tiny, tmp_path, monkeypatch):
    """The whole of train.py around this process's engine; then vLLM's loader takes the exported file's tensors."""
    import json

    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    import train
    from log import read_metrics

    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10, 20)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    cfg = dataclasses.replace(PRESETS["tiny-grpo"], model=tiny, data=(str(tmp_path / "d.jsonl"),), eval_data=(), steps=2,
                              max_response_len=24, prompts_per_step=4, samples_per_prompt=4, out=str(tmp_path / "run"),
                              device="cpu", dtype="float32", advantage="group_mean", entropy_coef=1.0, policy_lr=1e-3)
    monkeypatch.setattr(train, "make_engine", lambda *_: engine)
    train.main(cfg)
    assert [r["logp_gap/mean"] < 1e-4 for r in read_metrics(tmp_path / "run")] == [True, True]

    exported = tmp_path / "run" / "export" / "policy"
    hf, prompt = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32), engines[2]("12+34=").input_ids
    want = hf.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt):].tolist()
    with engines[0]["vllm"].awake(load_file(exported / "model.safetensors").items(), version=3):
        got = next(iter(engines[0]["vllm"].generate({0: prompt}, **GO | {"temperature": 0, "max_tokens": 8}))).ids.tolist()
    assert got == want[:len(got)] and len(got) > 0
