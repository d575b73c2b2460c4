"""Tests of whole runs."""

import dataclasses
import itertools
import shutil

import pytest
import torch
from conftest import maths, run, run_ranks, taught
from ranks import in_turn, main
from safetensors.torch import load_file

import ckpt
from configs import PRESETS
from guard.files import read_jsonl
from tools import tiny


def test_one_rank_and_two_ranks_are_the_same_run(one_rank, two_ranks):
    out, rows, _ = two_ranks
    other, others, _ = one_rank
    samples = "samples/step_000000.jsonl"
    assert (other / samples).read_text() == (out / samples).read_text()
    assert (out / samples).read_text().count("\n") == 32
    for a, b in zip(others[:-1], rows[:-1], strict=True):
        assert abs(a["reward"] - b["reward"]) < 0.02
    assert others[0]["value_loss"] == pytest.approx(rows[0]["value_loss"], rel=1e-4)
    assert others[0]["grad_norm/policy"] == pytest.approx(rows[0]["grad_norm/policy"], rel=1e-4)


@pytest.mark.parametrize("metric", ["kl", "solved"])
def test_what_only_measures_changes_no_bit(base, one_rank, untied, tmp_path, metric):
    """--ref_model without a KL term, and --skip_solved while no problem is solved, only add a metric."""
    changes = dict(ref_model=untied, ref_refresh=True) if metric == "kl" else dict(skip_solved=0.9)
    rows, policy = run(dataclasses.replace(base, **changes), tmp_path / "t")
    assert all((row.pop(metric) > 0) == (metric == "kl") for row in rows[:-1])
    assert maths(rows) == maths(one_rank[1]) and rows[-1]["step"] == 4
    assert all(torch.equal(policy[k], one_rank[2][k]) for k in policy)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Returns the folder of a model that never learned to guess."""
    task = tiny.SUMS._replace(text=lambda pair, rng, final: tiny.sum_text(pair, rng, False))
    return taught(task, tmp_path_factory.mktemp("taught") / "model", 4, batches=80, batch=8)


@pytest.mark.parametrize("changes", [
    dict(algo="grpo", critic_updates=1, kl_estimator="k2"),
    dict(kl_in="reward", kl_estimator="k1")], ids=["KL in the loss", "KL in the reward"])
def test_a_teacher_teaches_without_any_reward(half_right, teacher, tmp_path, changes):
    """Because the reward has weight 0, the policy can improve only through the KL term."""
    cfg = dataclasses.replace(
        PRESETS["tiny-ppo"], **changes, model=half_right, ref_model=teacher, reward=("math=0",), kl_coef=1.0,
        data=(f"{half_right}/train.jsonl",), eval_data=(f"{half_right}/heldout.jsonl",), eval_samples=(64,),
        steps=5, eval_every=5, save_every=0, prompts_per_step=8)
    rows, _ = run(cfg, tmp_path / "run")
    assert all(row["score"] == 0 < row["reward"] for row in rows if "score" in row)
    first, last = (row["eval/heldout/avg@64"] for row in rows if "eval/heldout/avg@64" in row)
    assert first < 0.6 and last > 0.8


@pytest.mark.parametrize("changes", [dict(resample_rounds=2), dict(round_len=5, carry=0.5)],
                         ids=["resampling", "carrying"])
def test_a_run_draws_solved_problems_once_also_after_a_resume(base, tmp_path, changes):
    """A problem is solved if at least 3 of its 4 responses get reward 1. Here, all responses to problems with
    odd answers get reward 1. A step has 8 of the 40 problems, so the last step is in the second epoch."""
    cfg = dataclasses.replace(base, **changes, reward=(base.reward[0].replace("digits", "odd"),), algo="grpo",
                              critic_updates=1, skip_solved=0.75, steps=6, save_samples="all", eval_data=())

    def drawn(out):  # for each step: (prompt_id, problem) -> number of right responses
        rows = [read_jsonl(out / f"samples/step_{step:06d}.jsonl") for step in range(6)]
        return [{key: sum(s["reward"] >= 1 for s in group) for key, group in itertools.groupby(
            step, lambda s: (s["prompt_id"], s["problem"]))} for step in rows]

    ranks = 2 if cfg.carry else 1
    rows, policy = run(cfg, tmp_path / "a", ranks)
    prompts, solved, again = drawn(tmp_path / "a"), set(), 0
    for row, step in zip(rows, prompts, strict=False):
        again += sum(problem in solved for _, problem in step)
        solved |= {problem for (_, problem), right in step.items() if right >= 3}
        assert row["solved"] == len(solved) / 40 or cfg.resample_rounds
    assert rows[5]["solved"] > 0.25 and (again == 0 or cfg.carry and again < 5)
    for count in range(ranks, 0, -1):
        out = shutil.copytree(tmp_path / "a", tmp_path / str(count), ignore=shutil.ignore_patterns(
            "export", "step_000006", "best"))
        assert not cfg.carry or ckpt.read_carried(ckpt.step_folder(out, 4))
        others, other = run(cfg, out, ranks=count)
        assert drawn(out) == prompts
        assert count != ranks or maths(others) == maths(rows)
        assert count != ranks or all(torch.equal(policy[k], other[k]) for k in policy)


def test_rewards_of_several_parts_are_weighted_and_counted_apart(base, tmp_path):
    """The metric `reward` is the mean of --reward's first term without its weight. A failed call gives 0."""
    reward = (f"{base.reward[0]}=2", base.reward[0].replace("digits", "broken"), "repetition=0.5")
    cfg = dataclasses.replace(base, reward=reward, nonstop_penalty=3.0, steps=1)
    (row, *_), _ = run(cfg, tmp_path / "r")
    assert row["reward"] > 0 and row["grade/error"] == 0
    assert row["reward/broken"] == 0 and row["reward/broken/failed"] == 1 > row["truncated"] > 0
    assert row["reward/nonstop"] == -3 * row["truncated"] and row["reward/repetition"] <= 0
    parts = [value for name, value in row.items() if name.startswith("reward/") and name.count("/") == 1]
    assert row["score"] == pytest.approx(sum(parts)) and row["reward/digits"] == 2 * row["reward"]
    assert row["returns"] != pytest.approx(row["reward"])
    assert "no_such_attribute" in (tmp_path / "r" / "alarms.jsonl").read_text()


def test_updates_without_a_token_in_the_loss_change_no_weight(base, tmp_path):
    """Here --mask_truncated leaves all responses out of the loss."""
    cfg = dataclasses.replace(base, stop=(), max_response_len=2, mask_truncated=True, steps=2,
                              weight_decay=9.0, eval_every=0)
    rows, policy = run(cfg, tmp_path / "m", ranks=2)
    start = load_file(f"{base.model}/model.safetensors")
    assert all(torch.equal(policy[name], start[name].bfloat16()) for name in start)
    assert rows[0]["truncated"] == 1
    assert not {"policy_loss", "value_loss", "explained_variance"} & rows[0].keys()
    assert "no token is in the loss of update 1 of the critic" in (tmp_path / "m/alarms.jsonl").read_text()


def test_equal_returns_have_the_explained_variance_0_whatever_their_size(base, tmp_path):
    """fp32 rounds the returns of -100 to slightly different numbers."""
    reward = (base.reward[0].replace("digits", "penalty=100"),)
    rows, _ = run(dataclasses.replace(base, reward=reward, steps=2, eval_data=()), tmp_path / "r")
    for row in rows:
        assert row["returns"] == pytest.approx(-100) and row["explained_variance"] == 0


def test_a_run_has_no_seconds_of_an_earlier_run_of_its_process(base, tmp_path):
    """As in a notebook. The first run ends in step 0, after its critic's updates. GRPO has no critic."""
    first = dataclasses.replace(base, max_logp_gap=1e-30, out=str(tmp_path / "a"))
    second = dataclasses.replace(base, algo="grpo", critic_updates=1, steps=1, out=str(tmp_path / "b"))
    (message, none), = run_ranks(1, in_turn, first, second)
    assert "nothing of this step is saved" in message and none == ""
    row = read_jsonl(tmp_path / "b/metrics.jsonl")[0]
    assert "time/policy" in row and "time/critic" not in row


@pytest.mark.parametrize("changes,words", [
    (dict(reward=("math",)), ["of the first 32 responses: ", " unparsed", "needed: answers that", "--go"]),
    (dict(stop=()), ["of the first 32 responses: ", " truncated, ", "--go"]),
    (dict(reward=("broken",)), [": 32 error; first error", "needed: a --reward (or --env) without errors"]),
    (dict(reward=("penalty",)), [" wrong", "--go"])],
    ids=["none right", "most cut", "all errors", "all the same penalty"])
def test_a_hopeless_start_is_refused_before_anything_is_trained(base, tmp_path, capfd, changes, words):
    if changes.get("reward", ("math",)) != ("math",):
        changes = {"reward": (base.reward[0].replace("digits", *changes["reward"]),)}
    cfg = dataclasses.replace(base, out=str(tmp_path / "o"), eval_data=(), go=False, **changes)
    messages = run_ranks(2, main, cfg)
    assert messages[0] == messages[1] and "\n" not in messages[0], messages
    assert all(w in messages[0] for w in words), messages
    output = capfd.readouterr().out
    assert output.count("\nprompt    ") == output.count("\nresponse  ") == 3
    assert not (tmp_path / "o/metrics.jsonl").read_text() and not (tmp_path / "o/export").exists()
    assert len((tmp_path / "o/samples/step_000000.jsonl").read_text().splitlines()) == 32  # for reward.py
