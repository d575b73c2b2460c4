"""Tests of the torch engine and of vLLM (CPU build)."""

import contextlib
import dataclasses
import functools
import gc
import io
import math
import os

import numpy as np
import pytest
import ranks
import torch
from conftest import maths, responses, run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import data
import dist
import model
import rollout
import train
from configs import PRESETS
from engines import torch_engine, vllm_engine
from guard import selfcheck as checks
from guard.messages import UserError
from layers import attention
from log import read_metrics

# max_prompt_len is 200, so a prompt can fill a block of vLLM's prefix cache (128 tokens on a CPU).
CFG = dataclasses.replace(PRESETS["tiny-ppo"], max_prompt_len=200, max_response_len=24, max_num_seqs=24,
                          stop=("</answer>",))
OPTIONS = dict(n=1, temperature=1.0, max_tokens=24, seed=(0, 1, 0), version=3)  # for conftest.responses
TEXTS = ["12+34=", "7+8=<think>", "5", "99+1=<think>"]


@pytest.fixture(scope="session")
def env(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("env") / "env.py"
    file.write_text("def respond(problem, text, turn): return '=' * (turn < 3) or None\n")
    return f"{file}:respond"


@pytest.fixture(scope="session")
def tp_samples(tiny, env):
    """Returns each rank's vLLM samples with --tp 2. Forks processes, so it must run before the fixture
    `engines`, which starts vLLM in this process."""
    vllm_engine._import_vllm()
    ids = model.load_tokenizer(tiny)(TEXTS).input_ids
    cfg, world = dataclasses.replace(CFG, model=tiny, tp=2), 4 if os.cpu_count() >= 4 else 2
    return run_ranks(world, ranks.engine_samples, cfg, dict(enumerate(ids)), env)


@pytest.mark.parametrize("slots", [1, 5, 16, 100, 256, 512])
def test_vllm_gets_graphs_up_to_its_number_of_slots_and_compiles_only_if_slots_are_refilled(slots):
    settings = vllm_engine._graphs(slots, slots)
    sizes = settings["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == slots
    assert all(b - a <= max(a, 32) for a, b in zip(sizes, sizes[1:], strict=False))
    assert settings["mode"] == 0 and vllm_engine._graphs(slots, slots + 1)["mode"] == 3


def test_engines_of_two_ranks_sample_the_tokens_of_an_engine_of_one_rank(tp_samples, engines, prompts, env):
    engines, policy, _ = engines
    for temperature in (0.0, 1.0):
        alone = generate(engines["vllm"], policy, prompts, n=3, temperature=temperature)
        by_rank = [r[temperature] for r in tp_samples]
        assert sorted(k for samples in by_rank for k in samples) == sorted(alone)
        assert {len(samples) for samples in by_rank} == {len(alone) // len(tp_samples)}
        for samples in by_rank:
            for k, s in samples.items():
                assert s.ids.tolist() == alone[k].ids.tolist()
                assert np.abs(s.logp - alone[k].logp).max() < 1e-4
    assert all(error == "" and gap < 1e-4 for error, gap in (r["selfcheck"] for r in tp_samples))
    alone = ranks.turns_in_rounds(engines["vllm"], policy, prompts, env)
    assert alone == {k: v for r in tp_samples for k, v in r["turns"].items()}
    assert sum(len(r["turns"]) for r in tp_samples) == len(alone)
    assert {turns for _, turns, _ in alone.values()} >= {2, 3}


@pytest.fixture(scope="session")
def engines(tiny):
    gc.freeze()  # see conftest._rank
    dist.init("cpu", "float32")
    tokenizer = model.load_tokenizer(tiny)
    cfg = dataclasses.replace(CFG, model=tiny)
    both = {"vllm": vllm_engine.VLLMEngine(tiny, tokenizer, cfg),
            "torch": torch_engine.TorchEngine(tiny, tokenizer, cfg)}
    return both, model.load_policy(tiny), tokenizer


@pytest.fixture(params=["torch", "vllm"])
def engine(request, engines):
    return engines[0][request.param]


@pytest.fixture
def policy(engines):
    return engines[1]


@pytest.fixture
def prompts(engines):
    return {i: engines[2](t).input_ids for i, t in enumerate(TEXTS)}


def generate(engine, policy, prompts, **changes):
    """Returns samples by (prompt_id, sample_id). `changes` replaces some of OPTIONS."""
    with engine.awake(dist.full_weights(policy), version=3):
        return {(s.prompt_id, s.sample_id): s for s in responses(engine, prompts, **OPTIONS | changes)}


def check_logprobs(samples, policy, temperature):
    pack = data.pack(list(samples.values()))
    with torch.no_grad():
        logp, _ = policy(pack, temperature)
    assert (logp - pack.engine_logp)[pack.mask].abs().max() < 1e-4


def naive_nucleus(logits, top_p) -> dict:
    """Returns token -> log-prob for the nucleus: the fewest tokens whose probabilities sum to `top_p`."""
    probs, kept = logits.double().softmax(-1).tolist(), {}
    for token in sorted(range(len(probs)), key=lambda i: -probs[i]):
        if sum(kept.values()) < top_p or top_p == 1:
            kept[token] = probs[token]
    return {token: math.log(p / sum(kept.values())) for token, p in kept.items()}


@pytest.mark.parametrize("temperature,top_p", [(0, 0.5), (1.0, 1.0), (0.6, 1.0), (0.7, 0.6), (1.5, 0.95)])
def test_tokens_and_log_probs_are_those_of_a_naive_nucleus(engine, policy, prompts, temperature, top_p):
    """Temperature 0 takes the most likely token."""
    samples = generate(engine, policy, prompts, n=3, temperature=temperature, top_p=top_p)
    assert sorted(samples) == [(prompt_id, i) for prompt_id in prompts for i in range(3)]
    for k, s in samples.items():
        ids = torch.tensor([*prompts[k[0]], *s.ids.tolist()])
        segments = attention.Segments(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        with torch.no_grad():
            hidden = policy.hidden(ids[None], torch.arange(len(ids))[None], segments=segments)[0]
            logits = (hidden @ policy.lm_head.weight.T)[-len(s.ids) - 1:-1]
        for token, logp, x in zip(s.ids.tolist(), s.logp, logits, strict=True):
            if temperature:
                assert naive_nucleus(x / temperature, top_p)[token] == pytest.approx(logp, abs=1e-4)
            else:
                assert token == int(x.argmax())


def test_a_nucleus_is_vllms():
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    logits *= torch.linspace(0.1, 9, 40)[:, None]
    for top_p in (0.05, 0.5, 0.9, 0.999):
        vllms = apply_top_k_top_p(logits.clone(), None, torch.full((40,), top_p))
        assert torch_engine.nucleus(logits, top_p).equal(vllms)


def test_log_probs_do_not_depend_on_what_memory_held_before(engines, policy, prompts, monkeypatch):
    """The test fills fresh memory with NaN."""
    with dist.deterministic(True):
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        assert torch.empty(3).isnan().all() and len({len(p) for p in prompts.values()}) > 1
        samples = generate(engines[0]["torch"], policy, prompts, n=3)
    check_logprobs(samples, policy, 1.0)


def test_a_sample_is_a_function_of_the_seed_and_its_key(engine, policy, prompts):
    many = generate(engine, policy, prompts, n=4)
    again = generate(engine, policy, {k: prompts[k] for k in (3, 1)}, n=4)
    for k in again:
        assert many[k].ids.tolist() == again[k].ids.tolist()
    assert len({tuple(many[1, i].ids.tolist()) for i in range(4)}) > 1
    other = generate(engine, policy, prompts, n=4, seed=(0, 1, 1))
    assert any(many[k].ids.tolist() != other[k].ids.tolist() for k in many)


def test_each_prompt_may_have_a_limit_of_its_own(engine, policy, prompts):
    limits = {(i, j): 2 + 3 * i for i in prompts for j in range(2)}
    whole, requests = generate(engine, policy, prompts, n=2), {k: prompts[k[0]] for k in limits}
    with engine.awake(dist.full_weights(policy), version=3):
        samples = engine.generate(requests, limits, 1.0, OPTIONS["seed"], 3)
        cut = {(s.prompt_id, s.sample_id): s for s in samples}
    assert len(cut) == len(whole) and any(len(s.ids) < len(whole[k].ids) for k, s in cut.items())
    for k, s in cut.items():
        assert s.ids.tolist() == whole[k].ids[:limits[k]].tolist()
        assert s.stopped == (whole[k].stopped and len(whole[k].ids) <= limits[k])


def test_a_signal_ends_sampling_although_no_response_ends(engine, policy, prompts, monkeypatch):
    """The other response is not finished, and the engine can be used again."""
    whole = generate(engine, policy, prompts, n=1)
    longest = max(whole, key=lambda k: len(whole[k].ids))
    first = min(whole.keys() - {longest})
    limits = {first: 1, longest: 24}
    requests = {k: prompts[k[0]] for k in limits}
    with engine.awake(dist.full_weights(policy), version=3):
        stream = engine.generate(requests, limits, 1.0, OPTIONS["seed"], 3)
        assert next(stream).key == first and len(whole[longest].ids) > 8
        monkeypatch.setattr(dist, "stop_signal", ["SIGTERM", 0.0])
        assert list(stream) == []
    monkeypatch.undo()
    again = generate(engine, policy, prompts, n=1)
    assert all(again[k].ids.tolist() == whole[k].ids.tolist() for k in whole)


def test_prompts_may_have_more_tokens_than_an_engine_reads_at_once(engine, policy):
    """vLLM on a CPU reads up to 4,096 tokens in a step, so some prompts must wait."""
    length = CFG.model_len - 8
    prompts = {i: [5 + i, *range(5, 4 + length)] for i in range(CFG.max_num_seqs)}
    assert CFG.max_num_seqs * length > 5000
    check_logprobs(generate(engine, policy, prompts), policy, 1.0)


def test_trajectories_with_turns_have_the_trainers_logprobs(engine, policy, engines, env, monkeypatch):
    cfg = dataclasses.replace(engine.cfg, env=env, stop=tuple("aeiou0123456789"))
    monkeypatch.setattr(engine, "cfg", cfg)
    problems = {i: data.Problem(t, tuple(engines[2](t).input_ids), "1") for i, t in enumerate(TEXTS)}
    prompts = {i: p.ids for i, p in problems.items()}
    first = generate(engine, policy, prompts, n=2, seed=(0, 1, 3))
    with rollout.make_grader(cfg) as grader, engine.awake(dist.full_weights(policy), version=3):
        samples, _ = rollout.rollout(engine, grader, problems, rollout.Sampling(2, 1.0, 24, (0, 1, 3), 3))
    assert max(s.turns for s in samples) > 1 and max(len(s.ids) for s in samples) <= 24
    for s in samples:
        before = first[s.prompt_id, s.sample_id].ids
        assert s.ids[:len(before)].tolist() == before.tolist() and s.is_sampled[:len(before)].all()
    check_logprobs({(s.prompt_id, s.sample_id): s for s in samples}, policy, 1.0)


def test_a_response_ends_after_a_stop_string_or_eos(engine, policy, prompts, monkeypatch):
    """The text includes the stop string, but not the EOS token."""
    free = generate(engine, policy, prompts, temperature=0)
    prompt_id, s = next((k[0], s) for k, s in free.items() if len(s.ids) > 8 and not s.stopped)
    stop = s.text[4:6]  # two characters, from more than one token
    cut = s.text.index(stop) + len(stop)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "cfg", dataclasses.replace(engine.cfg, stop=(stop,)))
        short = generate(engine, policy, prompts, temperature=0)[prompt_id, 0]
    assert short.stopped and short.text == s.text[:cut] and len(short.ids) < len(s.ids)
    token = int(s.ids[6])
    monkeypatch.setattr(engine, "eos", {token})
    short = generate(engine, policy, prompts, temperature=0)[prompt_id, 0]
    first = s.ids.tolist().index(token)
    assert short.stopped and short.ids.tolist() == s.ids.tolist()[:first + 1]
    assert short.text == engine.tokenizer.decode(s.ids.tolist()[:first])


class ByteTokenizer:
    """Decodes token i to the byte i % 6 of a text whose characters have 2, 3 and 1 bytes. So the tiny model's
    responses often have these characters, and the stop strings below."""

    text = "é→a".encode()

    def __len__(self):
        return 256

    def decode(self, ids):
        return bytes(self.text[i % 6] for i in ids).decode(errors="replace")

    def batch_decode(self, rows):
        return [self.decode(row) for row in rows]


STOPS = ("éa", "→é", "aa")  # of 3, 5 and 2 tokens


def ends_at_stop(s, tokenizer):
    """Returns whether the response `s` ends with its first stop string."""
    texts = [tokenizer.decode(s.ids.tolist()[:n]) for n in (len(s.ids) - 1, len(s.ids))]
    return [any(stop in text for stop in STOPS) for text in texts] == [False, True]


@pytest.mark.parametrize("ahead", [False, True])
def test_vllms_responses_end_with_the_first_stop_string(vllm, policy, prompts, monkeypatch, ahead):
    """With `ahead`, vLLM has sampled one more token when torz reads an output, as on a GPU (asynchronous
    scheduling)."""
    core, tokenizer = vllm.llm.llm_engine.engine_core, ByteTokenizer()
    real, outputs = core.get_output, []

    def two_steps():
        both = real()
        both.outputs += real().outputs
        outputs.append(len(both.outputs))
        return both

    monkeypatch.setattr(vllm, "cfg", dataclasses.replace(vllm.cfg, stop=()))
    free = generate(vllm, policy, prompts, n=8)
    monkeypatch.setattr(vllm, "tokenizer", tokenizer)
    monkeypatch.setattr(vllm, "cfg", dataclasses.replace(vllm.cfg, stop=STOPS))
    if ahead:
        monkeypatch.setattr(core, "get_output", two_steps)
    cut = generate(vllm, policy, prompts, n=8)
    assert not core.engine_core.scheduler.has_unfinished_requests()
    assert sorted(cut) == sorted(free) and (not ahead or max(outputs) > 40)
    for k, s in cut.items():
        assert s.ids.tolist() == free[k].ids.tolist()[:len(s.ids)] and len(s.logp) == len(s.ids)
        assert np.abs(s.logp - free[k].logp[:len(s.ids)]).max() < 1e-4
        at_stop = ends_at_stop(s, tokenizer)
        assert at_stop or len(s.ids) == len(free[k].ids)
        assert s.stopped == (at_stop or free[k].stopped)
        assert not any(stop in tokenizer.decode(s.ids.tolist()[:-1]) for stop in STOPS)
    assert sum(ends_at_stop(s, tokenizer) and len(s.ids) < len(free[k].ids) for k, s in cut.items()) > 9


@pytest.mark.parametrize("round_len", [1, 2])
def test_a_stop_string_that_begins_in_an_earlier_round_ends_vllms_response(vllm, policy, prompts, monkeypatch,
                                                                           round_len):
    """The engine gets the tokens of earlier rounds as a part of the prompt."""
    cfg, tokenizer = dataclasses.replace(vllm.cfg, stop=STOPS, round_len=round_len), ByteTokenizer()
    monkeypatch.setattr(vllm, "tokenizer", tokenizer)
    monkeypatch.setattr(vllm, "cfg", cfg)
    problems = {i: data.Problem(str(i), tuple(ids), "1") for i, ids in prompts.items()}
    with rollout.make_grader(cfg) as grader, vllm.awake(dist.full_weights(policy), version=3):
        samples, _ = rollout.rollout(vllm, grader, problems, rollout.Sampling(8, 1.0, 24, (0, 1, 0), 3),
                                     carried=[])
    assert len(samples) == 8 * len(prompts)
    for s in samples:
        assert s.stopped == (ends_at_stop(s, tokenizer) or int(s.ids[-1]) in vllm.eos)
        assert not any(stop in tokenizer.decode(s.ids.tolist()[:-1]) for stop in STOPS)
    assert sum(ends_at_stop(s, tokenizer) for s in samples) > 9


def test_the_torch_engine_samples_from_the_softmax():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0]).repeat(20000, 1)
    u = torch.from_numpy(torch_engine.uniforms((7,), 20000))
    token, logp = torch_engine.sample_token(logits, u, 0.5)
    want = (logits[0] / 0.5).softmax(-1)
    share = torch.bincount(token, minlength=5) / 20000
    assert (share - want).abs().max() < 4 * 0.5 / 20000 ** 0.5  # four standard deviations
    assert (logp - want.log()[token]).abs().max() < 1e-5
    assert np.array_equal(torch_engine.uniforms((7,), 10), torch_engine.uniforms((7,), 20)[:10])


def grpo_run(base, out, **changes):
    return dataclasses.replace(base, algo="grpo", critic_updates=1, steps=2, eval_data=(), out=str(out),
                               **changes)


@pytest.fixture(scope="session")
def run_with(engines, base, tmp_path_factory):
    """Returns a function: name of an engine, settings -> folder of a run, and what the run printed."""
    @functools.cache
    def run(name, **changes):
        out = tmp_path_factory.mktemp("run") / name
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
            patch.setattr("guard.start.make_engine", lambda *_: engines[0][name])
            patch.setattr("train.report.write_report", lambda folder: None)
            train.main(grpo_run(base, out, **changes))
        return out, said.getvalue()

    return run


@pytest.mark.parametrize("name", ["torch", "vllm"])
def test_a_run_with_either_engine_exports_what_vllm_loads(name, run_with, engines):
    """With the exported weights, vLLM and transformers sample the same greedy tokens."""
    out, _ = run_with(name)
    assert [r["logp_gap/mean"] < 1e-4 for r in read_metrics(out)[:2]] == [True, True]

    exported = out / "export" / "policy"
    hf = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    prompt = engines[2]("12+34=").input_ids
    want = hf.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt):].tolist()
    vllm, options = engines[0]["vllm"], OPTIONS | {"temperature": 0, "max_tokens": 8}
    with vllm.awake(load_file(exported / "model.safetensors").items(), version=3):
        got = next(iter(responses(vllm, {0: prompt}, **options))).ids.tolist()
    assert got == want[:len(got)] and len(got) > 0


@pytest.fixture
def vllm(engines):
    return engines[0]["vllm"]


def selfcheck(engine, policy, tokenizer):
    """Returns guard/selfcheck.py's error message on TEXTS, and its largest gap of log-probs in nats."""
    problems = [data.Problem(t, tuple(tokenizer(t).input_ids), "") for t in TEXTS]
    prompts = checks.check_prompts(problems, engine.cfg)
    assert len(prompts[4]) >= 128
    return ranks.checked(engine, policy, prompts)


def test_awake_calls_vllm_in_one_order(vllm, policy, prompts, monkeypatch):
    calls = []

    def recorded(name):
        real = getattr(vllm.llm, name)

        def call(*args, **kwargs):
            calls.append((name, *kwargs.get("tags", [])))
            return real(*args, **kwargs)

        return call

    for name in ("wake_up", "collective_rpc", "apply_model", "reset_prefix_cache", "sleep", "enqueue"):
        monkeypatch.setattr(vllm.llm, name, recorded(name))
    generate(vllm, policy, prompts)
    assert calls == [("wake_up", "weights"), ("collective_rpc",), ("apply_model",), ("wake_up", "kv_cache"),
                     ("reset_prefix_cache",), ("enqueue",), ("sleep",)]


def test_stale_weights_and_a_second_awake_are_refused(engine, policy, prompts):
    with pytest.raises(RuntimeError, match="step None"):
        next(iter(responses(engine, prompts, **OPTIONS)))
    with engine.awake(dist.full_weights(policy), version=2), pytest.raises(RuntimeError, match="step 2"):
        next(iter(responses(engine, prompts, **OPTIONS)))
    with engine.awake(dist.full_weights(policy), version=3):
        with pytest.raises(RuntimeError, match="awake already, with the weights of step 3"):
            with engine.awake(dist.full_weights(policy), version=4):
                raise AssertionError("it woke")
        samples = {(s.prompt_id, s.sample_id): s for s in responses(engine, prompts, **OPTIONS)}
    check_logprobs(samples, policy, 1.0)


def test_missing_repeated_and_unknown_weights_are_refused(engine, policy, prompts):
    def stream_of(times, prefix):
        """Yields the policy's weights. A weight whose name starts with `prefix` comes `times` times."""
        for name, tensor in dist.full_weights(policy):
            for _ in range(times if name.startswith(prefix) else 1):
                yield name, tensor

    unknown = iter([("model.mtp.weight", torch.zeros(1))])
    missing = "12 parameters did not come: model.layers.1.self_attn.q_proj"
    repeated = "model.layers.0.input_layernorm.weight came twice"
    for stream, words in ((stream_of(0, "model.layers.1."), missing),
                          (stream_of(2, "model.layers.0.input"), repeated),
                          (unknown, "model.mtp.weight came twice, or the model has no such parameter")):
        with pytest.raises(RuntimeError, match=words), engine.awake(stream, version=3):
            raise AssertionError("it woke")
        assert engine.version is None
        check_logprobs(generate(engine, policy, prompts), policy, 1.0)


def test_a_stale_head_is_caught(vllm, policy, engines, tiny, prompts, monkeypatch):
    other = model.load_policy(tiny)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.3)
    # On a CPU, vLLM uses a packed copy of the head. `generate` writes the head of `other` into the copy.
    # Without _repack_tied_head, the self-check's syncs leave the copy as it is.
    generate(vllm, other, prompts)
    monkeypatch.setattr(vllm_engine, "_repack_tied_head", lambda model: None)
    error, gap = selfcheck(vllm, policy, engines[2])
    assert "after the first sync" in error and "tied head" in error and gap > 0.1
    monkeypatch.undo()
    assert selfcheck(vllm, policy, engines[2])[0] == ""


def test_a_prefix_cache_that_is_not_reset_is_caught(vllm, policy, engines, monkeypatch):
    """The cache has keys and values of the old weights. If reset_prefix_cache returns True but resets
    nothing, the self-check finds wrong log-probs."""
    core = vllm.llm.llm_engine.engine_core.engine_core
    monkeypatch.setattr(core.scheduler, "reset_prefix_cache", lambda *a, **k: True)
    error, _ = selfcheck(vllm, policy, engines[2])
    assert "after a sync of other weights and back" in error
    assert "prefix cache" in error
    monkeypatch.setattr(core.scheduler, "reset_prefix_cache", lambda *a, **k: False)
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        with vllm.awake(dist.full_weights(policy), version=3):
            raise AssertionError("it woke")
    monkeypatch.undo()
    assert selfcheck(vllm, policy, engines[2])[0] == ""


def test_a_sync_that_does_not_arrive_is_caught(vllm, policy, engines, prompts, monkeypatch):
    """The engine already has the policy's weights when the test drops all syncs. So only the stage with
    halved weights finds the fault: engine and trainer still agree."""
    generate(vllm, policy, prompts)

    def drop(name, kwargs):
        list(kwargs["weights_iterator"])

    monkeypatch.setattr(vllm.llm, "collective_rpc", drop)
    assert "halved weights changed nothing" in selfcheck(vllm, policy, engines[2])[0]


def test_another_temperature_is_caught_and_the_right_one_passes(engine, policy, engines, monkeypatch):
    real = engine.generate
    monkeypatch.setattr(engine, "generate", lambda q, limits, t, *rest: real(q, limits, 1.2 * t, *rest))
    error, _ = selfcheck(engine, policy, engines[2])
    assert "after the first sync" in error and "a temperature other than --temperature" in error
    monkeypatch.undo()
    error, gap = selfcheck(engine, policy, engines[2])
    assert error == "" and 0 < gap < 1e-4


def test_abandoned_requests_are_aborted(engine, policy, prompts):
    with engine.awake(dist.full_weights(policy), version=3):
        next(iter(responses(engine, prompts, **OPTIONS | {"n": 4})))
    samples = generate(engine, policy, prompts, n=2)
    assert sorted(samples) == [(prompt_id, i) for prompt_id in prompts for i in range(2)]
    check_logprobs(samples, policy, 1.0)


def test_requests_that_nobody_reads_do_not_reach_the_next_call(engine, policy, prompts):
    with engine.awake(dist.full_weights(policy), version=3):
        next(iter(responses(engine, prompts, **OPTIONS | {"n": 4})))
        samples = list(responses(engine, {1: prompts[1]}, **OPTIONS))
    alone = generate(engine, policy, {1: prompts[1]})
    assert [s.ids.tolist() for s in samples] == [s.ids.tolist() for s in alone.values()]


@pytest.mark.parametrize("changes,words", [
    ({"finish_reason": 3}, "vLLM ended a response: error"),
    ({"new_token_ids": [1, 2]}, "vLLM's log-prob is not that of one sampled token"),
    ({"new_token_ids": [-1]}, "vLLM's log-prob is not that of one sampled token"),
    ({"request_id": "other"}, "vLLM lost requests")])
def test_an_unknown_output_of_vllms_core_is_one_error(vllm, policy, prompts, monkeypatch, changes, words):
    from vllm.v1.engine import FinishReason

    core = vllm.llm.llm_engine.engine_core
    real = core.get_output

    def changed():
        outputs = real()
        for output in outputs.outputs:
            for name, value in changes.items():
                setattr(output, name, FinishReason(value) if name == "finish_reason" else value)
        return outputs

    monkeypatch.setattr(core, "get_output", changed)
    with pytest.raises(RuntimeError, match=f"failed to sample with the weights of step 3.*{words}"):
        generate(vllm, policy, prompts)
    monkeypatch.undo()
    check_logprobs(generate(vllm, policy, prompts), policy, 1.0)


def test_a_fault_while_sampling_is_one_clear_error(vllm, policy, prompts, monkeypatch):
    engine, steps = vllm.llm.llm_engine, []
    real = engine.model_executor.execute_model

    def fail(*args, **kwargs):
        steps.append(1)
        if len(steps) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(*args, **kwargs)

    monkeypatch.setattr(engine.model_executor, "execute_model", fail)
    with pytest.raises(RuntimeError) as e:
        generate(vllm, policy, prompts)
    assert "failed to sample with the weights of step 3: OutOfMemoryError" in str(e.value)
    words = "--engine_share", "--max_num_seqs", "GiB", "trainer", "sync", "awake"
    assert all(word in str(e.value) for word in words)
    assert len(steps) == 3 and vllm.version is None and engine.is_sleeping()
    monkeypatch.undo()
    check_logprobs(generate(vllm, policy, prompts), policy, 1.0)


def test_memory_that_stays_is_measured(engine, policy):
    def sleep_with(gib):
        """Allocates a tensor while the engine is awake. Returns the tensor, and mem/residual_gb of the
        sleeping engine."""
        with engine.awake(dist.full_weights(policy), version=3):
            memory = torch.ones(int(gib * 2**28))  # 2**28 float32 are 1 GiB
        return memory, engine.ledger.metrics()["mem/residual_gb"]

    sleep_with(0)
    before = sleep_with(0)[1]
    memory, grown = sleep_with(1.2)
    after = sleep_with(0)[1]
    assert grown - before == pytest.approx(1.2, abs=0.3) and after == pytest.approx(grown, abs=0.3)
    readings = engine.ledger.readings
    assert list(readings)[0] == "trainer" and list(readings)[-3:] == ["awake", "sampled", "asleep"]
    assert "sync" in readings and all(name in engine.ledger.text() for name in readings)


def test_the_selfcheck_does_not_change_a_run(run_with):
    runs = run_with("vllm"), run_with("vllm", selfcheck=False)
    assert ["self-check: engine and trainer agree to" in said for _, said in runs] == [True, False]
    checked, unchecked = (read_metrics(out) for out, _ in runs)
    assert maths(checked) == maths(unchecked) and len(checked) == 2
    assert {f"time/start/{part}" for part in ("data", "models", "selfcheck")} <= checked[0].keys()
    assert not any("/start/" in key for key in checked[1])
    for row in checked:
        assert 0 < row["mem/trainer_gb"] < row["mem/awake_gb"] + 0.1
        assert {"mem/asleep_gb", "mem/residual_gb"} < set(row)
        assert 0 < row["time/sync"] + row["time/wake"] + row["time/sleep"] < row["time/step"]


def test_a_run_with_an_engine_at_another_temperature_is_refused(vllm, base, tmp_path, monkeypatch):
    real = vllm.generate
    monkeypatch.setattr("guard.start.make_engine", lambda *_: vllm)
    monkeypatch.setattr(vllm, "generate", lambda q, limits, t, *rest: real(q, limits, 1.2 * t, *rest))
    with pytest.raises(UserError, match="self-check: on rank 0, .*a temperature other.*--no-selfcheck"):
        train.main(grpo_run(base, tmp_path / "a"))
