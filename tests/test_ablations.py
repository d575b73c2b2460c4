"""Tests of bench/tasks.py and bench/ablations.py."""

import dataclasses
import json
import random
import re
import sys
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pytest
import torch

import grpo
import ppo
import train
from bench import ablations, tasks
from bench.countdown import reaches
from data import Sample
from engines import torch_engine
from guard.files import read_jsonl
from guard.messages import UserError
from tools import tiny

# Task -> (function that writes a solution, function that lists problems).
WORKS = {"chain": (tasks.chain, tasks.chains), "product": (tasks.product, tasks.two_digits),
         "countdown": (tasks.countdown, tasks.countdowns), "think": (tasks.think, tasks.think_pairs),
         "sums": (tasks.sums, tasks.two_digits)}


@pytest.mark.parametrize("task", WORKS)
def test_a_worked_solution_is_right_in_each_of_its_steps(task):
    rng, (work, problems) = random.Random(1), WORKS[task]
    for numbers in problems(rng)[:200]:
        problem, thought, answer = work(numbers, rng, 0)
        if task == "countdown":
            assert reaches(boxed(answer), answer, "") == 1
            target, reached = int(problem[:-1].split(">")[1]), int(thought.rpartition("=")[2])
            assert eval(answer) == target == reached
            assert re.findall(r"\d", answer) == problem.split(">")[0].split(",")
        else:
            assert eval(problem[:-1]) == int(answer)
        for a, b in zip(thought.split("="), thought.split("=")[1:], strict=False):
            sum_of = re.search(r"[\d+*/-]+$", a)[0]
            assert eval(sum_of) == int(re.match(r"\d+", b)[0]), thought


def boxed(answer):
    return f"<answer>\\boxed{{{answer}}}</answer>"


@pytest.mark.parametrize("name", ["chain", "product", "countdown", "think"])
def test_with_slips_most_texts_are_wrong_and_some_are_right(name):
    rng, task, right = random.Random(1), tasks.TASKS[name], []
    for numbers in task.problems(rng)[:500]:
        gold, (_, text) = task.row(numbers)["answer"], task.text(numbers, rng, True)
        right.append(reaches(text, gold, "") if name == "countdown" else text.endswith(boxed(gold)))
    # More answers are right in countdown, because wrong tries before the last calculation do no harm.
    least, most = (0.3, 0.8) if name == "countdown" else (0.02, 0.3)
    assert least < fmean(right) < most


def test_countdown_takes_any_solution_and_no_other_expression():
    gold = "((8-3)*4)+2"
    for right in ("((8-3)*4)+2", "((4*8)-7)-3"):
        assert reaches("x" + boxed(right), right, "") == 1
    assert reaches(boxed("((6*2)+8)+4"), "((8*4)-6)-2", "") == 1  # both expressions are 24
    for wrong in ("((8-3)*4)+1", "((8-3)*2)+4", "((8/0)*4)+2", "22", "((8-3)*4)+2+0", "((8-3)*4)+²", ""):
        assert reaches(boxed(wrong), gold, "") == 0, wrong
    assert reaches(gold, gold, "") == 0


def test_a_base_model_is_a_function_of_task_and_seed_and_nothing_is_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "BATCHES", 1)
    path, again = (Path(tasks.build(f"{tmp_path}/{name}", "countdown")) for name in ("base", "again"))
    for name in ("train.jsonl", "heldout.jsonl", "model.safetensors", "tokenizer.json"):
        assert (path / name).read_bytes() == (again / name).read_bytes()
    train_set, held_out = ({row["prompt"] for row in read_jsonl(path / f"{name}.jsonl")}
                           for name in ("train", "heldout"))
    assert len(held_out) == tiny.HELD_OUT and not held_out & train_set
    (path / "notes").write_text("mine")
    assert tasks.build(str(path), "countdown") == str(path)
    other = Path(tiny.build(f"{tmp_path}/other"))
    weights = (other / "model.safetensors").read_bytes()
    for out, seed in ((path, 0), (other, 1), (tmp_path, 0)):
        with pytest.raises(UserError, match="is not the base model of .*'sums'.*; needed: another folder"):
            tiny.build(str(out), seed)
    assert (path / "notes").is_file() and (other / "model.safetensors").read_bytes() == weights


def row(accuracy, rewards=(0.5,) * 10):
    return {"accuracy": accuracy, "rewards": list(rewards)}


def test_fewer_than_three_pairs_of_runs_tell_nothing():
    for few in ([0.3], [0.3, 0.3], [0.3, 0.1, -0.2]):
        assert ablations.verdict(ablations.estimate(few), 1) == "can't tell"


def test_the_best_rate_is_that_of_the_common_runs_and_a_margin_is_kept():
    runs = {("chain", v): {("a", i): row(x) for i in range(3)}
            for v, x in zip(ablations.RATES["full-best"], (0.5, 0.6, 0.4), strict=True)}
    runs["chain", "grpo"]["b", 0] = row(1.0)
    assert ablations.with_best(runs)["chain", "full-best"] is runs["chain", "full-rate-0.0001"]
    few = ablations.estimate([-0.02, -0.03, -0.025])
    assert ablations.verdict(few, 1, 0.05) == "agrees" and ablations.verdict(few, 1) == "**disagrees**"
    assert ablations.verdict(few, 1, 0.02) == "**disagrees**"


def test_a_run_that_loses_half_of_its_reward_or_stops_has_collapsed():
    up, down = [i / 20 for i in range(20)], [i / 20 for i in range(10)] + [0.1] * 10
    assert not ablations.collapsed(row(0.9, up)) and ablations.collapsed(row(0.1, down))
    assert ablations.collapsed(row(None, up))


def test_the_committed_tables_are_those_of_the_committed_runs():
    """To update the tables, run `python -m bench.ablations`."""
    rows = read_jsonl(ablations.RESULTS / "ablations.jsonl")
    variants, keys = ablations.matrix(), {}
    for task, name, seed in {(row["task"], row["variant"], row["seed"]) for row in rows}:
        cfg = ablations.config_of(task, variants[name], seed, "base")
        keys[task, name, seed] = ablations.key_of(cfg, variants[name])
    runs = ablations.read_runs(keys, ablations.RESULTS / "ablations.jsonl")
    assert sum(map(len, runs.values())) == len(rows) > 300
    assert ablations.report(runs) == (ablations.RESULTS / "ablations.md").read_text()


def test_runs_are_told_apart_by_base_model_and_other_settings_do_not_count(tmp_path):
    rows = [("old", "a"), ("new", "a"), ("new", "b"), ("new", "b")]
    lines = [dict(task="chain", variant="grpo", seed=i, settings=settings, weights=weights)
             for i, (settings, weights) in enumerate(rows)]
    (tmp_path / "ablations.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    keys = {("chain", "grpo", seed): "new" for seed in range(4)}
    runs = ablations.read_runs(keys, tmp_path / "ablations.jsonl")
    assert set(runs["chain", "grpo"]) == {("a", 1), ("b", 2), ("b", 3)}


def test_every_variant_is_a_config_and_every_claim_has_its_variants():
    variants, seen = ablations.matrix(), set()
    for task in ablations.TASKS:
        for name, variant in variants.items():
            cfg = ablations.config_of(task, variant, 0, "base")
            key = ablations.key_of(cfg, variant)
            assert key == ablations.key_of(ablations.config_of(task, variant, 0, "elsewhere"), variant)
            assert key != ablations.key_of(dataclasses.replace(cfg, policy_lr=1e-5), variant)
            assert (task, key) not in seen, name  # no two variants may have the same settings
            seen.add((task, key))
    known = ablations.CORE.keys() | ablations.RATES.keys()
    assert all({c.variant, c.reference} <= known for c in ablations.CLAIMS)
    assert {v for rates in ablations.RATES.values() for v in rates} <= variants.keys()


@pytest.fixture
def restored(monkeypatch):
    for module, name in [*ablations.HOOKS.values(), (train, "counts"), (train, "policy_pack_loss"),
                         (train, "add_group_advantages"), (train, "rollout")]:
        monkeypatch.setattr(module, name, getattr(module, name))


def gradient():
    logp = torch.tensor([-1.0, -2.0, -0.5, -1.5], requires_grad=True)
    mask, segment = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    advantages = torch.tensor([1.0, 1.0, -2.0, -2.0])
    loss, _ = grpo.policy_loss(logp, logp.detach(), advantages, mask, segment, mask / 4)
    return torch.autograd.grad(loss, logp)[0]


def test_without_the_stop_gradient_nothing_is_learned(restored):
    assert gradient().abs().sum() > 0
    ablations.no_stop_gradient(ablations.REFERENCE)
    assert gradient().abs().sum() == 0


def test_a_forks_function_takes_the_place_of_the_reference(tmp_path, restored):
    file, text = tmp_path / "my.py", (ablations.ROOT / "docs/forking.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "def advantage(" in block]
    file.write_text(code)
    reference, fork = ablations.varied(f"{file}:advantage").values()
    assert reference.patch is None and fork.reference == "grpo"
    fork.patch(ablations.REFERENCE, **fork.args)
    found = grpo.group_advantages(torch.tensor([[0.0, 1.0, 5.0]]), "group_mean_std")
    assert found.tolist() == [[-1.0, 0.0, 4.0]]
    gae, wrong = tmp_path / "gae.py", tmp_path / "wrong.py"
    gae.write_text("from ppo import gae\n")
    wrong.write_text("def gae(rewards):\n    return rewards\n")
    for spec in (f"{file}:other", f"{tmp_path}/none.py:advantage", f"{file}:gae", f"{wrong}:gae"):
        with pytest.raises(UserError):
            ablations.varied(spec)
    assert ablations.varied(f"{gae}:gae")["ppo"].reference == "ppo" and callable(ppo.gae)


def test_a_refused_run_leaves_no_result(tmp_path):
    file, results = tmp_path / "0.json", tmp_path / "rows.jsonl"
    name = dict(task="chain", variant="x", seed=0)
    for base, kept in ((None, False), (0.5, True)):
        file.write_text(json.dumps({"base": base, "accuracy": None, "error": "refused"}))
        assert "refused" in ablations.keep(name, file, 0, results) and results.exists() == kept


def test_a_function_is_varied_where_it_has_an_effect_and_an_edit_makes_new_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file, helper = tmp_path / "mine.py", tmp_path / "vary_helper.py"
    names = "policy_loss", "mismatch_weight"
    file.write_text(f"from grpo import {', '.join(names)}\nimport vary_helper\n")
    helper.write_text("K = 1\n")
    loss, weight = (ablations.varied(f"{file}:{name}") for name in names)
    assert {v.reference for v in loss.values()} == {"grpo-4"}
    assert {v.args["stale"] for v in weight.values()} == {ablations.STALE}
    ours, theirs = (ablations.config_of("chain", v, 0, "base") for v in weight.values())
    assert ours == theirs and ours.mismatch == "token-truncate"

    def key():
        sys.modules.pop("vary_helper", None)
        fork = ablations.varied(f"{file}:policy_loss")[f"{file}:policy_loss"]
        return ablations.key_of(ablations.config_of("chain", fork, 0, "base"), fork)

    before = key()
    assert before == key()
    helper.write_text("K = -1\n")
    assert before != key()
    for text, words in (("def policy_loss(:", "can't be run"), ("x = 1", "no function policy_loss")):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            ablations.varied(f"{file}:policy_loss")


def test_the_engine_gets_weights_of_some_steps_ago_and_at_last_the_newest(monkeypatch, restored):
    """Except in the last evaluation, the engine has weights of two steps ago."""
    loaded, logits = [], torch.zeros(1000, 4)

    def take(self, weights):
        loaded.append(dict(weights)["w"])

    monkeypatch.setattr(torch_engine.TorchEngine, "load", take)
    monkeypatch.setattr(torch_engine, "sample_token", torch_engine.sample_token)
    ablations.engine_gap(dataclasses.replace(ablations.REFERENCE, steps=5), stale=2, nats=0.3)
    spread = []
    for step in range(6):
        torch_engine.TorchEngine.load(None, iter([("w", torch.tensor(step))]))
        spread.append(torch_engine.sample_token(logits, torch.rand(1000), 1.0)[1].std().item())
    assert [x.item() for x in loaded] == [0, 0, 0, 1, 2, 5]
    assert min(spread[:5]) > 0.15 and spread[5] < 1e-5


def test_a_mean_of_packs_means_is_the_mean_only_of_equal_packs(restored, monkeypatch):
    """With packs of 4 and 12 tokens, the mean over all tokens gives each token the weight 1/16. `pack_mean`
    averages the packs' means, so a token has the weight 1/8 or 1/24."""
    class Packs(NamedTuple):
        loss_tokens: range
        responses: int

    packs = [Packs(range(4), 2), Packs(range(12), 2)]
    monkeypatch.setattr(train, "counts", lambda packs: (16, 4))
    monkeypatch.setattr(train, "policy_pack_loss", lambda model, p, tokens, *rest: 1 / tokens)
    ablations.pack_mean(ablations.REFERENCE)
    tokens, responses = train.counts(packs)
    found = [train.policy_pack_loss(None, p, tokens, responses, None, None) for p in packs]
    assert found == [1 / 8, 1 / 24]


def test_a_flipped_sign_and_wrong_grades_turn_what_they_say(restored, monkeypatch):
    sample = Sample(0, 0, (1,), np.array([1]), np.array([0.0]), True, "", 0)
    many = [dataclasses.replace(sample, prompt_id=i, reward=1.0) for i in range(2000)]
    monkeypatch.setattr(train, "rollout", lambda: (many, []))
    ablations.wrong_grades(ablations.REFERENCE, share=0.1)
    assert 0.08 < fmean(s.reward == 0 for s in train.rollout()[0]) < 0.12
    group = [dataclasses.replace(sample, sample_id=i, reward=float(i == 0)) for i in range(8)]
    right = [s.advantage for s in train.add_group_advantages(group, ablations.REFERENCE)]
    ablations.flip_sign(ablations.REFERENCE)
    flipped = [s.advantage for s in train.add_group_advantages(group, ablations.REFERENCE)]
    assert right[0] > 0 and flipped == [-a for a in right]


def test_a_flag_is_varied_in_a_recipe_where_it_has_an_effect():
    found = ablations.varied("clip_high=0.2,0.28")
    assert {k: (v.reference, v.flags) for k, v in found.items()} == {
        "clip_high=0.2": ("grpo-4", {"clip_high": 0.2}), "clip_high=0.28": ("grpo-4", {"clip_high": 0.28})}
    assert ablations.varied("advantage=group_mean,group_mean_over_mean")["advantage=group_mean"] == (
        "grpo", {"advantage": "group_mean"}, None, {})
    assert {v.reference for v in ablations.varied("value_clip=0.2,None").values()} == {"ppo"}
    assert {v.reference for v in ablations.varied("ratio=token,sequence").values()} == {"grpo-4"}
    bounds = ablations.varied("mismatch_bounds=0 2,0.5 1.5")
    assert [v.flags["mismatch_bounds"] for v in bounds.values()] == [(0.0, 2.0), (0.5, 1.5)]
    assert {v.args["stale"] for v in bounds.values()} == {ablations.STALE}
    switch = ablations.varied("drop_uniform=True,False")
    assert [v.flags["drop_uniform"] for v in switch.values()] == [True, False]
    for spec, words in (("clip_high=0.2", "needed: two or more"), ("clip_hi=1,2", "did you mean --clip_high"),
                        ("clip_high=0.2,0.2", "needed: two or more"), ("clipping=1,2", "train.py --help"),
                        ("template=a.txt,b.txt", "do not vary"), ("ref_model=a,b", "do not vary"),
                        ("advantage=a,b", "invalid choice"), ("seed=1,2", "do not vary"),
                        ("eval_samples=1,2", "do not vary")):
        with pytest.raises(UserError, match=words):
            ablations.varied(spec)
    runs = {("chain", f"clip_high={x}"): {("w", seed): row(x + seed / 100) for seed in range(3)}
            for x in (0.2, 0.28)}
    table = ablations.task_table(runs, "chain", found)
    assert "minus clip_high=0.2" in table[0] and "+0.080 ± 0.000" in table[-1]
