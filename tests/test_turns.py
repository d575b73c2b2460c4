"""Tests of --env: an environment answers each turn, and training uses only the policy's tokens."""

import dataclasses
import itertools
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, run, run_ranks, taught

import data
import dist
import model
import rollout
import train
from bench import tasks
from configs import PRESETS, Config
from data import Problem, Sample
from engines.torch_engine import TorchEngine
from grading.extract import extract
from grading.worker import Grade, Grader, Reply
from log import Meter, measure_samples

ENV = '''
import os

from reward import Reply

class Marked(str):
    pass

def hangs(problem, text, turn):
    while True:
        pass

def raises(problem, text, turn):
    raise KeyError(turn)

def called(problem, text, turn):
    return globals()[problem](problem, text, turn)

def fails_on_some(problem, text, turn):
    if problem.startswith("10"):
        os._exit(3)
    return None
'''
ENV += "".join(f"def {name}(problem, text, turn): return {value}\n" for name, value in {
    "twice": "f'{turn}:{problem}' if turn < 3 else None", "exits": "os._exit(3)",
    "paid": "Reply('go on', reward=turn / 2) if turn < 2 else Reply('left out', reward=-3.0, done=True)",
    "solves": r"r'<answer>\boxed{1}</answer>' if turn == 1 else None", "marked": "Marked(problem)",
    "shows": "Reply(repr((problem, text, turn)), 1.0 if turn == 1 else -1.0)",
    "counts": "(f'{len(text)};', None, False)",
    "endless": "'>'", "floods": "'1' * 1000", "strange": "'<far>'", "drowns": "'1' * 10**8", "mumbles": "3.5",
    "steps": "('obs', 0.0, True, False, {})",  # as in gymnasium
    "half": "chr(0xd800)", "lies": "Reply('text', reward=float('nan'))",
    "ends": "('text', 1.0, 'no')",
    "fines": "('7' * 12, -1.0, False)"}.items())


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    file = tmp_path_factory.mktemp("env") / "env.py"
    file.write_text(ENV)
    return str(file)


def with_gaps(seed: int, count: int = 12) -> list[Sample]:
    g, samples = np.random.default_rng(seed), []
    for i in range(count):
        prompt = tuple(g.integers(3, 90, 4).tolist())
        parts = [np.full(g.integers(1, 6), side % 2 == 0) for side in range(int(g.integers(1, 6)))]
        sampled = np.concatenate(parts)
        logp = np.where(sampled, -g.random(len(sampled)), 0).astype(np.float32)
        samples.append(Sample(
            i // 3, i % 3, prompt, g.integers(3, 90, len(sampled)).astype(np.int32), logp, True, "", 0,
            reward=float(g.standard_normal()), advantage=float(g.standard_normal()),
            sampled=None if len(parts) == 1 else sampled, turns=(len(parts) + 1) // 2, in_loss=i % 5 != 4))
    return samples


def steps_of(samples: list[Sample]) -> list[list[int]]:
    """Returns, for each sample, the indices (in the pack) of its tokens in the loss."""
    found, start = [], 0
    for s in samples:
        first = start + len(s.prompt)
        mine = (first + s.is_sampled.nonzero()[0]).tolist() if s.in_loss else []
        found.append(mine)
        start = first + len(s.ids)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_pack_trains_on_sampled_tokens_alone(seed):
    samples = with_gaps(seed)
    p, steps = data.pack(samples), steps_of(samples)
    assert p.mask.nonzero()[:, 0].tolist() == sum(steps, [])
    assert p.tokens.tolist() == [i for s in samples for i in (*s.prompt, *s.ids.tolist())]
    assert p.cu_seqlens.tolist() == [0, *itertools.accumulate(s.length for s in samples)]
    assert p.positions.tolist() == [i for s in samples for i in range(s.length)]
    for s, mine in zip(samples, steps, strict=True):
        assert [round(float(x), 5) for x in p.advantages[mine]] == [round(s.advantage, 5)] * len(mine)
        assert p.engine_logp[mine].tolist() == s.logp[s.is_sampled].tolist()[:len(mine)]
    sampled = steps_of([dataclasses.replace(s, in_loss=True) for s in samples])
    last = [mine[-1] for mine in sampled]
    assert p.rewards[last].tolist() == pytest.approx([s.score for s in samples])
    assert int((p.rewards != 0).sum()) == len(samples)
    outside = torch.ones(len(p.tokens), dtype=torch.bool)
    outside[sum(sampled, [])] = False
    assert not p.advantages[outside].any() and not p.engine_logp[outside].any()


def shares(samples: list[Sample]) -> list[Sample]:
    prompts, trained = np.array([(s.prompt_id, s.is_sampled.sum() * s.in_loss) for s in samples]).T
    return train.add_prompt_shares(samples, [[[list(range(len(samples)))]]], prompts, trained)


def test_prompts_weigh_the_same_and_share_their_weight_over_sampled_tokens():
    p = data.pack(shares(with_gaps(1)))
    prompts = np.repeat([i // 3 for i in range(12)], np.diff(p.cu_seqlens))
    for i in range(4):
        mine = p.mask.numpy() & (prompts == i)
        assert np.allclose(p.prompt_share[mine], 1 / 4 / mine.sum(), rtol=1e-5), i


def test_metrics_tell_sampled_tokens_from_all():
    samples, meter = with_gaps(2), Meter()
    measure_samples(meter, samples, Config(env="env.py:f"))
    sampled = [int(s.is_sampled.sum()) for s in samples]
    found = meter.reduce()
    assert found["response_len"] == np.mean([len(s.ids) for s in samples]) > np.mean(sampled)
    assert found["response_len/sampled"] == np.mean(sampled)
    assert found["turns"] == np.mean([s.turns for s in samples]) > 1


def replies(env: str, questions) -> tuple[list, dict]:
    """Returns the environment's replies to the questions (problem, text, turn), and the Grader's errors."""
    with Grader(workers=2, deadline=0.5, env=env) as grader:
        for i, question in enumerate(questions):
            problem, text, turn = question
            grader.ask(i, [""] * (turn - 1) + [text], problem=problem)
        found = grader.results()
        return [found[i] for i in range(len(questions))], grader.errors


def test_an_environment_may_return_a_text_none_or_a_reply(env):
    got, errors = replies(f"{env}:twice", [("a", "x", 1), ("b", "x", 2), ("b", "x", 3), ("a", "y", 1)])
    assert got == [Reply("1:a"), Reply("2:b"), Reply(None), Reply("1:a")] and not errors
    assert replies(f"{env}:paid", [("a", "x", 1), ("a", "x", 2)])[0] == [
        Reply("go on", 0.5, False), Reply("left out", -3.0, True)]
    assert replies(f"{env}:marked", [("p", "x", 1)])[0] == [Reply("p")]
    text = "\0 ä\ud83d\n" * 3  # what a policy may write
    assert replies(f"{env}:shows", [("p", text, 1)])[0] == [Reply(repr(("p", text, 1)), 1.0)]


def test_an_environment_that_fails_is_a_reason(env):
    """Each function fails twice, in one server."""
    with Grader(workers=2, deadline=0.5, env=f"{env}:called") as grader:
        for name, reason, message in (
                ("hangs", "timeout", "Timeout: "), ("raises", "error", "KeyError: 1"),
                ("drowns", "error", "ValueError: the environment's text has 100000000 characters"),
                ("exits", "error", "WorkerDied"), ("lies", "error", "ValueError: the reward is nan"),
                ("mumbles", "error", "TypeError: --env returned 3.5; needed: a text, None or (text, rew"),
                ("steps", "error", "TypeError: --env returned ('obs', 0.0, True, False, {}); needed: a text"),
                ("ends", "error", "TypeError: --env returned done='no'"),
                ("half", "error", "UnicodeEncodeError")):
            grader.errors.clear()
            for i in range(2):
                grader.ask(i, [f"{i}"], problem=name)
            assert grader.results() == dict.fromkeys(range(2), Grade(0.0, reason, None)), name
            errors = grader.errors.values()
            assert errors and all(x.startswith(message) for x in errors), errors


def test_one_failure_is_that_trajectorys_alone(env):
    got, _ = replies(f"{env}:fails_on_some", [(f"{n}", "x", 1) for n in range(5, 25)])
    assert [isinstance(reply, Grade) for reply in got] == [n == 10 for n in range(5, 25)]


PROBLEMS = [f"{a}+{b}=" for a in (10, 11) for b in (12, 17)]


def setup(tiny, env, **settings):
    """Returns an engine, and prompt_id -> problem. Letters are stop strings, so turns are short."""
    settings = dict(stop=tuple("abcdefghijklmnopqrstuvwxyz"), samples_per_prompt=3, max_response_len=60,
                    eval_samples=(2,), reward=("math",), device="cpu", grade_deadline=1.0) | settings
    cfg = dataclasses.replace(PRESETS["tiny-ppo"], model=tiny, env=env, **settings)
    tokenizer = model.load_tokenizer(tiny)
    problems = {i: Problem(text, tuple(tokenizer(text).input_ids), "1") for i, text in enumerate(PROBLEMS)}
    return TorchEngine(tiny, tokenizer, cfg), problems


def sampled(tiny, env, step=5, **settings) -> tuple[list[Sample], dict]:
    """Returns this rank's trajectories of a step, and the Grader's errors."""
    engine, problems = setup(tiny, env, **settings)
    cfg, weights = engine.cfg, model.files_weights(tiny, torch.device("cpu"), torch.float32)
    if engine.ranks > 1:
        dist.init("cpu", "float32")
    with rollout.make_grader(cfg) as grader, engine.awake(weights, version=step):
        samples, _ = rollout.rollout(engine, grader, problems, rollout.Sampling(
            cfg.samples_per_prompt, 1.0, cfg.max_response_len, (cfg.seed, rollout.TRAIN, step), step))
        return samples, grader.errors


@pytest.fixture(scope="module")
def plain(tiny):
    return sampled(tiny, "")[0]


@pytest.fixture(scope="module")
def twice(tiny, env):
    samples, errors = sampled(tiny, f"{env}:twice")
    assert not errors and max(s.turns for s in samples) == 3
    return samples


def content(samples) -> list[tuple]:
    return [(s.prompt_id, s.sample_id, s.prompt, s.ids.tolist(), s.is_sampled.tolist(), s.text, s.stopped,
             s.turns, s.reward, s.reason) for s in samples]


def test_a_trajectory_is_its_turns_and_the_environments_texts(tiny, plain, twice):
    """The first turn equals the response that is sampled without an environment."""
    engine, problems = setup(tiny, "")
    assert [(s.prompt_id, s.sample_id) for s in plain] == [(i, j) for i in problems for j in range(3)]
    assert all(s.reason == ("unparsed" if s.stopped else "truncated") for s in plain)
    for first, s in zip(plain, twice, strict=True):
        assert (s.prompt, s.turns == 1) == (first.prompt, not first.stopped)
        assert s.ids[:len(first.ids)].tolist() == first.ids.tolist()
        text, cut = first.text, len(first.ids)
        assert s.is_sampled[:cut].all() and s.text.startswith(text)
        if s.turns > 1:
            answer = f"1:{problems[s.prompt_id].text}"
            ids = engine.tokenizer(answer, add_special_tokens=False).input_ids
            assert s.ids[cut:cut + len(ids)].tolist() == ids and s.text.startswith(text + answer)
            assert not s.is_sampled[cut:cut + len(ids)].any() and not s.logp[cut:cut + len(ids)].any()
            assert s.is_sampled[cut + len(ids)]
        runs = np.diff(np.flatnonzero(np.diff(np.r_[0, s.is_sampled, 0])))[::2]
        assert len(runs) == s.turns and s.is_sampled[-1]
        saved = rollout.sample_row(s, problems[s.prompt_id], save_logps=True)
        assert [x is not None for x in saved["logps"]] == s.is_sampled.tolist()


def test_graders_read_the_policys_turns_alone(tiny, env, plain, twice):
    samples, errors = sampled(tiny, f"{env}:solves", max_response_len=200)
    engine, _ = setup(tiny, "")
    solved = [s for s in samples if r"\boxed{1}" in s.text]
    assert solved and not errors and {s.reason for s in solved} <= {"unparsed", "truncated"}
    for s in twice:
        turns = np.split(s.ids, np.flatnonzero(np.diff(s.is_sampled)) + 1)[::2]
        assert s.policy_text == "\n".join(map(engine.text_of, turns))
    both = data.answered(dataclasses.replace(plain[0], text=r"<answer>\boxed{4"), "2} ", [5])
    assert extract(dataclasses.replace(both, text=both.text + "2}</answer>").policy_text) == "4\n2"


def test_the_environment_reads_the_last_segment_alone(tiny, env):
    """The environment gets the text of the policy's last turn, with the stop string but without EOS."""
    samples, errors = sampled(tiny, f"{env}:counts", max_turns=4)
    engine, _ = setup(tiny, "")
    assert not errors and max(s.turns for s in samples) == 4
    for s in samples:
        borders = np.flatnonzero(np.diff(s.is_sampled)) + 1
        segments = [engine.tokenizer.decode([i for i in part.tolist() if i not in engine.eos])
                    for part in np.split(s.ids, borders)]
        assert len(segments) == 2 * s.turns - 1
        assert segments[1::2] == [f"{len(text)};" for text in segments[:-1:2]]


def test_later_turns_have_their_own_randomness(tiny, env):
    seen = []

    class Spy(TorchEngine):
        def generate(self, requests, limits, temperature, seed, version, top_p=1.0):
            seen.extend((*seed, *k) for k in requests)
            return super().generate(requests, limits, temperature, seed, version)

    engine, problems = setup(tiny, f"{env}:twice")
    engine.__class__ = Spy
    weights = model.files_weights(tiny, torch.device("cpu"), torch.float32)
    with rollout.make_grader(engine.cfg) as grader, engine.awake(weights, version=0):
        for round in ((), (2,), (3,), (4,)):  # what each round of --resample_rounds adds to the seed
            sampling = rollout.Sampling(3, 1.0, 60, (0, rollout.TRAIN, 0, *round), 0)
            rollout.rollout(engine, grader, problems, sampling)
    assert len(seen) > 60 and len(set(seen)) == len(seen)


@pytest.mark.parametrize(("settings", "most"), [(dict(max_response_len=60), 60), (
    dict(max_response_len=39, max_model_len=40), 40 - 6), (dict(max_response_len=60, max_turns=2), 60)])
def test_all_turns_share_the_budget(tiny, env, settings, most):
    """All turns share one length limit. A trajectory that --max_turns ends does not count as truncated."""
    samples, errors = sampled(tiny, f"{env}:endless", **settings)
    turns = settings.get("max_turns", 8)
    assert max(len(s.ids) for s in samples) <= most and not errors
    assert max(s.turns for s in samples) == turns
    for s in samples:
        # With one token left, the environment's text (one token) is dropped: it leaves no room for a turn.
        assert s.turns == turns if s.stopped else len(s.ids) >= most - 1
        assert (s.reason == "truncated") == (not s.stopped) and s.is_sampled[-1]


def test_the_room_that_is_left_erases_no_penalty(tiny, env):
    """A text that leaves no room for a turn ends the trajectory as truncated, with the reward it has."""
    samples, errors = sampled(tiny, f"{env}:fines", max_response_len=30, max_turns=9)
    assert not errors and {s.reward for s in samples if s.turns > 1} == {-1.0}
    ended = [s for s in samples if s.env_reward is not None]
    assert {s.reward for s in ended} == {-1.0} and not any(s.stopped for s in ended)
    room = {30 - len(s.ids) for s in ended}  # the text has 12 tokens, and a turn needs one more
    assert room <= {*range(13)} and len(room) > 2 and min(room - {0}) < 12


def test_the_environments_reward_is_the_trajectorys(tiny, env):
    samples, _ = sampled(tiny, f"{env}:paid")
    seen = {(s.turns, s.stopped): (s.reward, s.reason) for s in samples}
    assert seen[2, True] == (-3.0, "wrong") and "left out" not in "".join(s.text for s in samples)
    assert seen.get((2, False), (0.5, "correct")) == (0.5, "correct")
    assert seen.get((1, False), (0.0, "truncated")) == (0.0, "truncated")


@pytest.mark.parametrize(("name", "reason"), [
    ("hangs", "timeout"), ("floods", "error"), ("strange", "error")])
def test_a_failing_environment_ends_the_trajectory_and_nothing_else(tiny, env, plain, name, reason, tmp_path):
    """The trajectory keeps its tokens and gets the reward 0. The text of "strange" is one token, for which
    the model has no embedding."""
    if name == "strange":
        tiny = shutil.copytree(tiny, tmp_path / "m")
        tokenizer = model.load_tokenizer(str(tiny))
        tokenizer.add_special_tokens({"additional_special_tokens": ["<far>"]})
        tokenizer.save_pretrained(tiny)
    tiny = str(tiny)
    samples, errors = sampled(tiny, f"{env}:{name}", grade_deadline=0.3, samples_per_prompt=1)
    firsts = [s for s in plain if s.sample_id == 0]
    assert any(s.stopped for s in firsts) and errors
    for first, s in zip(firsts, samples, strict=True):
        assert s.ids.tolist() == first.ids.tolist() and s.turns == 1 and s.reward == 0
        assert s.reason == (reason if first.stopped else "truncated")
    meter = Meter()
    measure_samples(meter, samples, Config(env="env.py:f"))
    found = meter.reduce()
    assert found[f"grade/{reason}"] == np.mean([s.stopped for s in firsts])


def evaluated(tiny, env, *before) -> tuple[dict, list[dict]]:
    """Returns the scores of an evaluation, and a row for each response. before: sets before the set `sums`"""
    dist.init("cpu", "float32")
    engine, problems = setup(tiny, env)
    weights = model.files_weights(tiny, torch.device("cpu"), torch.float32)
    with rollout.make_grader(engine.cfg) as grader, engine.awake(weights, version=0):
        sets = dict.fromkeys((*before, "sums"), list(problems.values()))
        return rollout.score_sets(engine, grader, sets, engine.cfg, 0)


def test_evaluation_uses_the_environment(tiny, env):
    """A response's row has the field `segments` only if the response has several turns."""
    ((scores, rows),) = run_ranks(1, evaluated, tiny, f"{env}:twice")
    assert max(row["turns"] for row in rows) == 3
    assert all(("1:" in row["response"]) == ("segments" in row) == (row["turns"] > 1) for row in rows)
    lengths = [row["tokens"] for row in rows]
    assert scores["sums"]["response_len"] == [sum(lengths[i:i + 2]) / 2 for i in range(0, 8, 2)]
    ((_, more),) = run_ranks(1, evaluated, tiny, f"{env}:twice", "other")
    assert [row for row in more if row["set"] == "sums"] == rows


def test_a_model_learns_to_call_the_calculator(tmp_path):
    text = (ROOT / "docs/forking.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "def respond(" in block]
    assert len(code.splitlines()) <= 15
    (tmp_path / "calculator.py").write_text(code)
    base = taught(tasks.TASKS["tool"], tmp_path / "base", count=12, batches=160, batch=8)
    cfg = dataclasses.replace(
        PRESETS["tiny-grpo"], model=base, data=(f"{base}/train.jsonl",), eval_data=(f"{base}/heldout.jsonl",),
        env=f"{tmp_path}/calculator.py:respond", stop=("</tool>", "</answer>"), device="cpu", dtype="float32",
        steps=7, eval_every=7, policy_lr=7e-4, save_samples="all")
    rows, _ = run(cfg, tmp_path / "run")
    score = [row["eval/heldout/avg@1"] for row in rows if "eval/heldout/avg@1" in row]
    trained = [row for row in rows if "reward" in row]
    assert score[0] <= 0.4 and score[-1] >= 0.8, score
    calls = [row["turns"] - 1 for row in trained]
    assert calls[0] < 0.4 and calls[-1] > 0.8, calls
    assert all(row["response_len/sampled"] < row["response_len"] for row in trained)
    assert max(row["logp_gap/max"] for row in trained) < 1e-3
