"""One suite for both engines: plain PyTorch's, and the real vLLM (its CPU build). No mock of either."""

import ast
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from conftest import maths, run_ranks

import data
import dist
import model
import rollout
from configs import PRESETS, UserError

# Long enough for a block of vLLM's prefix cache, which has 128 tokens on a CPU.
CFG = dataclasses.replace(PRESETS["tiny-ppo"], max_prompt_len=200, max_response_len=24, max_num_seqs=8, stop=("</answer>",))
GO = dict(n=1, temperature=1.0, max_tokens=24, key=(0, 1, 0), version=3)
TEXTS = ["12+34=", "7+8=<think>", "5", "99+1=<think>"]


@pytest.fixture(scope="session")
def spread(tiny):
    """What the ranks of two engines of two ranks each said, by rank; of one where cores are few, for the ranks wait for each
    other by spinning. Before this process has a process group of its own."""
    rollout._import_vllm()
    ids = model.load_tokenizer(tiny)(TEXTS).input_ids
    cfg, world = dataclasses.replace(CFG, model=tiny, tp=2), 4 if os.cpu_count() >= 4 else 2
    return run_ranks(world, ranks.engine_samples, cfg, dict(enumerate(ids)), GO)


def test_engines_of_two_ranks_say_what_an_engine_of_one_rank_says(spread, engines, prompts):
    """Token for token, each sample kept by one rank; weights streamed from shards on all ranks; the self-check passes."""
    engines, policy, _ = engines
    for temperature in (0.0, 1.0):
        alone = go(engines["vllm"], policy, prompts, n=3, temperature=temperature)
        kept = [r[temperature] for r in spread]
        assert sorted(k for r in kept for k in r) == sorted(alone)
        assert {len(r) for r in kept} == {len(alone) // len(spread)}  # seats of an engine share out its prompts
        for k, s in ((k, s) for r in kept for k, s in r.items()):
            assert s.ids.tolist() == alone[k].ids.tolist()
            assert np.abs(s.logp - alone[k].logp).max() < 1e-4
    assert all(said == "" and gap < 1e-4 for said, gap in (r["selfcheck"] for r in spread))


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
    return {i: engines[2](t).input_ids for i, t in enumerate(TEXTS)}


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


def test_samples_that_agree_so_far_are_decoded_once(engines, policy, prompts, monkeypatch):
    engine, rows = engines[0]["torch"], []
    step = engine.decoder.step
    monkeypatch.setattr(engine.decoder, "step", lambda tokens, *rest: rows.append(len(tokens)) or step(tokens, *rest))
    two = {k: prompts[k] for k in (0, 1)}  # one wave with four samples each
    greedy = go(engine, policy, two, n=4, temperature=0)
    assert max(rows) == 2
    assert all(greedy[slot, i].ids.tolist() == greedy[slot, 0].ids.tolist() for slot, i in greedy)
    rows.clear()
    samples = go(engine, policy, two, n=4, temperature=0.1)
    for t, n in enumerate(rows):
        running = [(slot, *s.ids[:t + 1].tolist()) for (slot, _), s in samples.items() if len(s.ids) > t + 1]
        assert len(set(running)) <= n <= 8
    assert 2 < sum(rows[:6]) / 6 < 8, rows
    check_logprobs(samples, policy, 0.1)
    alone = go(engine, policy, {1: prompts[1]}, temperature=0.1)
    assert alone[1, 0].ids.tolist() == samples[1, 0].ids.tolist()


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
    room = {0: [5] * (CFG.model_len - 2)}
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


def tiny_run(tiny, tmp_path, **changes):
    """Two steps of GRPO on ten sums."""
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10, 20)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return dataclasses.replace(PRESETS["tiny-grpo"], model=tiny, data=(str(tmp_path / "d.jsonl"),), eval_data=(), steps=2,
                               max_response_len=24, prompts_per_step=4, samples_per_prompt=4, device="cpu", dtype="float32",
                               advantage="group_mean", entropy_coef=1.0, policy_lr=1e-3, go=True, **changes)


def test_the_loop_runs_with_either_engine_and_its_export_loads_in_vllm(engine, engines, tiny, tmp_path, monkeypatch):
    """The whole of train.py around this process's engine; then vLLM's loader takes the exported file's tensors."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    import train
    from log import read_metrics

    monkeypatch.setattr(train, "make_engine", lambda *_: engine)
    train.main(tiny_run(tiny, tmp_path, out=str(tmp_path / "run")))
    assert [r["logp_gap/mean"] < 1e-4 for r in read_metrics(tmp_path / "run")[:2]] == [True, True]

    exported = tmp_path / "run" / "export" / "policy"
    hf, prompt = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32), engines[2]("12+34=").input_ids
    want = hf.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt):].tolist()
    with engines[0]["vllm"].awake(load_file(exported / "model.safetensors").items(), version=3):
        got = next(iter(engines[0]["vllm"].generate({0: prompt}, **GO | {"temperature": 0, "max_tokens": 8}))).ids.tolist()
    assert got == want[:len(got)] and len(got) > 0


# --- the choreography, and faults put into it: each into the running engine, at the place where it would happen


@pytest.fixture
def vllm(engines):
    return engines[0]["vllm"]


def other_weights(tiny):
    """A policy with weights of its own."""
    other = model.load_policy(tiny)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.3)
    return other


def selfcheck(engine, policy, tokenizer):
    """rollout.selfcheck as train.py calls it."""
    def trainers(samples, temperature):
        pack = data.pack(samples)
        with torch.no_grad():
            return model.logprobs(policy, pack, temperature)[0][pack.mask]

    problems = [data.Problem(t, tuple(tokenizer(t).input_ids), "", "") for t in TEXTS]
    prompts = rollout.check_prompts(problems, engine.cfg)
    assert len(prompts[4]) >= 128
    return rollout.selfcheck(engine, lambda: dist.full_weights(policy), trainers, prompts)


def test_the_selfcheck_passes_where_nothing_is_wrong(engine, policy, engines):
    said, gap = selfcheck(engine, policy, engines[2])
    assert said == "" and 0 < gap < 1e-4


def test_awake_is_one_order_of_calls(vllm, policy, prompts, monkeypatch):
    calls = []

    def listen(name):
        real = getattr(vllm.llm, name)
        monkeypatch.setattr(vllm.llm, name, lambda *a, **k: (calls.append((name, *k.get("tags", []))), real(*a, **k))[1])

    for name in ("wake_up", "collective_rpc", "apply_model", "reset_prefix_cache", "sleep", "enqueue"):
        listen(name)
    go(vllm, policy, prompts)
    assert calls == [("wake_up", "weights"), ("collective_rpc",), ("apply_model",), ("wake_up", "kv_cache"),
                     ("reset_prefix_cache",), ("enqueue",), ("sleep",)]


def test_nothing_else_sleeps_wakes_or_loads():
    """In all of the project, by what is written in it."""
    found = set()
    for file in Path(rollout.__file__).parent.glob("*.py"):
        for c in ast.walk(ast.parse(file.read_text())):
            for f in c.body if isinstance(c, ast.ClassDef | ast.Module) else ():
                if isinstance(f, ast.FunctionDef):
                    names = {n.func.attr for n in ast.walk(f) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
                             and ast.unparse(n.func.value).endswith("llm")}
                    found |= {(getattr(c, "name", ""), f.name, n) for n in names & {
                        "wake_up", "sleep", "collective_rpc", "apply_model", "reset_prefix_cache"}}
    assert {(c, f) for c, f, n in found if n != "sleep"} == {("VLLMEngine", "awake")}
    assert {(c, f) for c, f, n in found if n == "sleep"} == {("VLLMEngine", "_sleep")}


def test_a_second_awake_is_refused_and_harms_nothing(engine, policy, prompts):
    with engine.awake(dist.full_weights(policy), version=3):
        with pytest.raises(RuntimeError, match="awake already, with the weights of step 3"):
            with engine.awake(dist.full_weights(policy), version=4):
                pass
        samples = {(s.slot, s.index): s for s in engine.generate(prompts, **GO)}
    check_logprobs(samples, policy, 1.0)


def test_weights_that_dont_arrive_or_come_twice_are_refused(engine, policy, prompts):
    def sent(times, prefix):
        return (nt for nt in dist.full_weights(policy) for _ in range(times if nt[0].startswith(prefix) else 1))

    for stream, words in ((sent(0, "model.layers.1."), "12 of 26 parameters did not come: model.layers.1.self_attn.q_proj"),
                          (sent(2, "model.layers.0.input"), "model.layers.0.input_layernorm.weight came twice"),
                          (iter([("model.mtp.weight", torch.zeros(1))]), "the model has no parameter model.mtp.weight")):
        with pytest.raises(RuntimeError, match=words), engine.awake(stream, version=3):
            raise AssertionError("it woke")
        assert engine.version is None
        check_logprobs(go(engine, policy, prompts), policy, 1.0)


def test_a_stale_head_is_caught(vllm, policy, engines, tiny, prompts, monkeypatch):
    go(vllm, other_weights(tiny), prompts)  # whose head stays
    monkeypatch.setattr(rollout, "_repack_tied_head", lambda model: None)
    said, gap = selfcheck(vllm, policy, engines[2])
    assert "after the first sync" in said and "greedy" in said and "tied head" in said and gap > 0.1
    monkeypatch.undo()
    assert selfcheck(vllm, policy, engines[2])[0] == ""


def test_a_prefix_cache_that_is_not_forgotten_is_caught(vllm, policy, engines, monkeypatch):
    """vLLM forgets when it falls asleep, too: so the fault is put where both end up."""
    core = vllm.llm.llm_engine.engine_core.engine_core
    monkeypatch.setattr(core.scheduler, "reset_prefix_cache", lambda *a, **k: True)
    said, _ = selfcheck(vllm, policy, engines[2])
    assert "after a sync of other weights and back" in said and "after prompt 4" in said and "prefix cache" in said
    monkeypatch.setattr(core.scheduler, "reset_prefix_cache", lambda *a, **k: False)
    with pytest.raises(RuntimeError, match="forget"), vllm.awake(dist.full_weights(policy), version=3):
        raise AssertionError("it woke")
    monkeypatch.undo()
    assert selfcheck(vllm, policy, engines[2])[0] == ""


def test_a_sync_that_does_not_arrive_is_caught(vllm, policy, engines, prompts, monkeypatch):
    """By the first look where the engine has other weights, by the sync of halved weights where it has the right ones."""
    go(vllm, policy, prompts)
    monkeypatch.setattr(vllm.llm, "collective_rpc", lambda name, kwargs: list(kwargs["weights_iterator"]))
    assert "halved weights changed nothing" in selfcheck(vllm, policy, engines[2])[0]


def test_another_temperature_is_caught(engine, policy, engines, monkeypatch):
    real = engine.generate
    monkeypatch.setattr(engine, "generate", lambda prompts, n, t, *rest: real(prompts, n, 1.2 * t, *rest))
    said, _ = selfcheck(engine, policy, engines[2])
    assert "after the first sync" in said and "sampled" in said and "another temperature than 1" in said


def test_requests_left_in_the_middle_are_gone(engine, policy, prompts):
    """And the next ones come whole."""
    with engine.awake(dist.full_weights(policy), version=3):
        next(iter(engine.generate(prompts, **GO | {"n": 4})))
    samples = go(engine, policy, prompts, n=2)
    assert sorted(samples) == [(slot, i) for slot in prompts for i in range(2)]
    check_logprobs(samples, policy, 1.0)


def test_a_fault_while_sampling_is_one_clear_error(vllm, policy, prompts, monkeypatch):
    """With the ledger; and the engine is asleep afterwards."""
    engine, steps = vllm.llm.llm_engine, []
    real = engine.model_executor.execute_model

    def fail(*args, **kwargs):
        steps.append(1)
        if len(steps) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(*args, **kwargs)

    monkeypatch.setattr(engine.model_executor, "execute_model", fail)
    with pytest.raises(RuntimeError) as e:
        go(vllm, policy, prompts)
    assert "failed to sample with the weights of step 3: OutOfMemoryError" in str(e.value)
    assert all(word in str(e.value) for word in ("--engine_share", "--max_num_seqs", "GiB", "trainer", "sync", "awake"))
    assert len(steps) == 3 and vllm.version is None and engine.is_sleeping()
    monkeypatch.undo()
    check_logprobs(go(vllm, policy, prompts), policy, 1.0)


def test_requests_that_do_not_end_are_an_error_before_the_watch_says_less(vllm, policy, prompts, monkeypatch):
    """A scheduler that schedules nothing."""
    core = vllm.llm.llm_engine.engine_core.engine_core
    monkeypatch.setattr(core, "step_fn", lambda: ({}, False))
    monkeypatch.setattr(vllm, "cfg", dataclasses.replace(vllm.cfg, stall_limit=1.0))
    with pytest.raises(RuntimeError, match="8 of 8 responses have not ended after 1 s .--stall_limit 1.") as e:
        go(vllm, policy, prompts, n=2)
    assert "memory (GiB)" in str(e.value)
    monkeypatch.undo()
    check_logprobs(go(vllm, policy, prompts), policy, 1.0)


def test_memory_that_stays_is_told_once_a_gib(engine, policy):
    def asleep(keep):
        with engine.awake(dist.full_weights(policy), version=3):
            kept = torch.ones(int(keep * 2**28))  # 4 bytes each
        return kept, engine.ledger.news(engine.ledger.metrics()["mem/residual_gb"])

    quiet = asleep(0)[1] + asleep(0)[1]
    kept, loud = asleep(1.2)
    again = asleep(0)[1]
    assert quiet == "" and again == "" and "1.2 more" in loud and "--engine_share" in loud
    rows = engine.ledger.rows
    assert list(rows)[0] == "trainer" and list(rows)[-3:] == ["awake", "sampled", "asleep"] and "sync" in rows
    assert all(name in engine.ledger.table() for name in rows)
    assert engine.ledger.bytes == sum(p.numel() * 4 for p in policy.parameters())


def test_the_selfcheck_changes_nothing_and_the_ledger_is_in_the_metrics(vllm, tiny, tmp_path, monkeypatch, capsys):
    import train
    from log import read_metrics

    monkeypatch.setattr(train, "make_engine", lambda *_: vllm)
    for check in (True, False):
        train.main(tiny_run(tiny, tmp_path, out=str(tmp_path / str(check)), selfcheck=check, verbose=check))
        said = capsys.readouterr().out
        assert check == ("self-check: engine and trainer agree to" in said) == ("memory (GiB)" in said)
    checked, unchecked = (read_metrics(tmp_path / str(check)) for check in (True, False))
    assert maths(checked) == maths(unchecked) and len(checked) == 2
    for row in checked:
        assert 0 < row["mem/trainer_gb"] < row["mem/awake_gb"] + 0.1 and {"mem/asleep_gb", "mem/residual_gb"} < set(row)
        assert 0 < row["time/sync"] + row["time/wake"] + row["time/sleep"] < row["time/step"]


def test_a_run_with_an_engine_at_another_temperature_is_refused(engine, tiny, tmp_path, monkeypatch):
    """vLLM's by the self-check; without one, and for either engine, by the first step's gap."""
    import train

    real = engine.generate
    monkeypatch.setattr(train, "make_engine", lambda *_: engine)
    monkeypatch.setattr(engine, "generate", lambda prompts, n, t, *rest: real(prompts, n, 1.2 * t, *rest))
    if isinstance(engine, rollout.VLLMEngine):
        with pytest.raises(UserError, match="self-check: on rank 0, .*another temperature.*--no-selfcheck"):
            train.main(tiny_run(tiny, tmp_path, out=str(tmp_path / "a")))
    with pytest.raises(UserError, match="differ by .* on average .--max_logp_gap"):
        train.main(tiny_run(tiny, tmp_path, out=str(tmp_path / "b"), selfcheck=False, max_logp_gap=0.05))
