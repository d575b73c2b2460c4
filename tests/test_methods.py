"""Recipes of 2026 against naive versions of their papers' equations."""

import dataclasses
import itertools
import json
import math

import pytest
import ranks
import torch
from conftest import maths, run, run_ranks
from test_maths import CASES, close, compare, normal, ragged, sequences

import configs
import grpo
import ppo
import train
from configs import PRESETS
from guard.messages import UserError


def test_maxrl_divides_by_the_mean():
    """MaxRL (2602.02710): (r - m) / m. For rewards 0 and 1, the sum of A × ∇log π over a group is n times the
    mean of ∇log π over the right responses, minus the sum over all (the paper's control variate)."""
    for seed in range(CASES):
        g = torch.Generator().manual_seed(seed)
        n = int(torch.randint(2, 9, (), generator=g))
        rewards = torch.randint(0, 2, (5, n), generator=g).double()
        got = grpo.group_advantages(rewards, "group_mean_over_mean")
        for row, out in zip(rewards.tolist(), got.tolist(), strict=True):
            right = sum(row)
            want = [n / right * r - 1 if 0 < right < n else 0.0 for r in row]
            close("maxrl", torch.tensor(out), torch.tensor(want), 1e-6)


def binary(kind, p, q):
    """DPPO's divergence (2602.04879) of two events: "this token" (p and q) and "another token"."""
    events = [(p, q), (1 - p, 1 - q)]
    if kind == "binary_tv":
        return sum(abs(a - b) for a, b in events) / 2
    return sum(b * math.log(b / a) for a, b in events)


@pytest.mark.parametrize("kind", ["binary_tv", "binary_kl"])
def test_dppo_masks_tokens_that_move_away_from_the_engine(kind):
    """DPPO: loss -M × (π / π_engine) × A. M is 0 if A > 0, π > π_engine and D > δ, or A < 0, π < π_engine and
    D > δ; else 1. The factor π_old / π_engine is the correction."""
    masked = 0
    for seed in range(CASES):
        mask, cu, g = ragged(seed)
        segment = ppo.segment_ids(cu, len(mask))
        engine, old, logp = (-0.05 - normal(g, len(mask)).abs() for _ in range(3))
        old, logp = engine + (old - engine) * 0.1, engine + (logp - engine) * 0.3
        adv = normal(g, len(cu) - 1)[segment]
        low, high = (0.1, 0.15) if kind == "binary_tv" else (0.03, 0.05)

        def naive(x, mask=mask, cu=cu, engine=engine, adv=adv, low=low, high=high):
            total = (x * 0).sum()
            for lp, e, a in sequences(mask, cu, x, engine, adv):
                for t in range(len(lp)):
                    p, q = math.exp(lp[t]), math.exp(e[t])
                    far = binary(kind, p, q) > (high if a[t] > 0 else low)
                    if not (far and (a[t] > 0) == (p > q)):
                        total = total - torch.exp(lp[t] - e[t]) * a[t] / 7
            return total

        weights = mask / 7.0
        correction, _ = grpo.mismatch_weight(old, engine, mask, segment, "none", 0, 2)

        def ours(x, mask=mask, old=old, adv=adv, segment=segment, engine=engine, low=low, high=high,
                 weights=weights, correction=correction):
            loss, cut = grpo.policy_loss(x, old, adv, mask, segment, weights, kind, low, high, correction,
                                         engine)
            nonlocal masked
            masked += int(cut)
            return loss

        compare(f"dppo {kind}", ours, naive, logp, 1e-6)
        _, cut = grpo.policy_loss(logp, old, 0 * adv, mask, segment, weights, kind, low, high, 1.0, engine)
        assert cut == 0  # M is 1 where A is 0
    assert masked > 20
    sure = torch.tensor([0.0, -1e-9, -30.0])
    for other in (sure, sure.flip(0)):
        assert grpo.divergence(sure, other, kind).isfinite().all()


def test_the_sequence_mask_leaves_out_bad_responses_that_the_policy_has_left():
    """DeepSeek-V3.2 (2512.02556): M is 0 if A < 0 and the response's mean of log(π_engine / π) is above δ."""
    cut_tokens = 0
    for seed in range(CASES):
        mask, cu, g = ragged(seed)
        segment = ppo.segment_ids(cu, len(mask))
        engine, old, now = (normal(g, len(mask), 0.4) for _ in range(3))
        adv, delta = normal(g, len(cu) - 1)[segment], 0.1
        want = []
        for e, o, n, a in sequences(mask, cu, engine, old, now, adv):
            gap = sum(float(x - y) for x, y in zip(e, n, strict=True)) / len(e)
            want += [0.0 if a[0] < 0 and gap > delta else math.exp(x - y) for x, y in zip(o, e, strict=True)]
        weight, cut = grpo.mismatch_weight(old, engine, mask, segment, "negative-mask", math.exp(-delta), 2,
                                           now.requires_grad_(), adv)
        close("negative-mask", weight[mask], torch.tensor(want, dtype=torch.float64))
        assert not weight.requires_grad and not weight[~mask].any() and not cut[~mask].any()
        assert cut[mask].tolist() == [x == 0 for x in want]
        cut_tokens += int(cut.sum())
    assert cut_tokens > 20


TERMS = dict(algo="grpo", critic_updates=1, advantage="group_each_std", samples_per_prompt=4,
             reward=("math=2", "format=-0.5", "tags=0"))


def gdpo(cfg) -> list:
    """Returns this rank's samples with their advantages."""
    world = train.dist.init("cpu", "float32")
    samples = [s for s in terms() if s.prompt_id % world.size == world.rank]
    return train.add_group_advantages(samples, cfg)


def terms():
    g = torch.Generator().manual_seed(0)
    samples = []
    for s in ranks.make_samples(32):
        format_, right = torch.randint(0, 2, (2,), generator=g).tolist()
        samples.append(dataclasses.replace(s, reward=float(right), grader="accuracy", weight=2.0,
                                           parts={"format": -0.5 * format_, "tags": 0.0}))
    return samples


def test_gdpo_normalises_each_reward_on_its_own():
    """GDPO (2601.05242): A = Σ_k w_k (r_k - mean_k) / (std_k + ε), with group statistics, then whitened over
    the responses of the batch; the same on 1 and 4 ranks."""
    cfg = dataclasses.replace(PRESETS["tiny-grpo"], **TERMS)
    samples = terms()
    want = {}
    for _, group in itertools.groupby(samples, key=lambda s: s.prompt_id):
        group = list(group)
        for weight, values in ((2.0, [s.reward for s in group]),
                               (-0.5, [s.parts["format"] / -0.5 for s in group])):
            mean = sum(values) / 4
            std = math.sqrt(sum((v - mean) ** 2 for v in values) / 3) + 1e-6
            for s, v in zip(group, values, strict=True):
                want[s.key] = want.get(s.key, 0.0) + weight * (v - mean) / std
    mean = sum(want.values()) / len(want)
    assert abs(mean) < 1e-9
    std = math.sqrt(sum((x - mean) ** 2 for x in want.values()) / len(want))
    for count in (1, 4):
        found = {s.key: s.advantage for part in run_ranks(count, gdpo, cfg) for s in part}
        assert found.keys() == want.keys()
        close(f"gdpo on {count} ranks", torch.tensor([found[k] for k in want]),
              torch.tensor([(want[k] - mean) / (std + 1e-6) for k in want]), 1e-6)


RECIPES = {
    "tv": dict(ratio="binary_tv", clip_low=0.02, clip_high=0.02, policy_updates=2),
    "kl": dict(ratio="binary_kl", clip_low=1e-4, clip_high=1e-4, policy_updates=2),
    "sequence": dict(mismatch="negative-mask", mismatch_bounds=(0.999, 2.0)),
}


def test_masks_have_the_same_gradient_on_four_ranks(base):
    """The packs hold log-probs of an engine that differs from the trainer, so masks cut some tokens."""
    cfgs = [dataclasses.replace(base, **TERMS | flags) for flags in RECIPES.values()]
    jobs = [(cfg, terms()) for cfg in cfgs]
    (ones,), (fours, *_) = (run_ranks(n, ranks.all_gradients, jobs) for n in (1, 4))
    for name, one, four in zip(RECIPES, ones, fours, strict=True):
        weights = [k for k in one if isinstance(one[k], torch.Tensor)]
        assert len(weights) > 10
        for k in weights:
            torch.testing.assert_close(one[k], four[k], rtol=1e-4, atol=1e-6)
        metric = "mismatch/cut" if name == "sequence" else "clip_share"
        assert 0 < one["metrics"][metric] < 1
        assert one["metrics"][metric] == pytest.approx(four["metrics"][metric])


def test_what_a_recipe_can_not_do_is_refused(base):
    tiny = "tiny-grpo --clip_high 0.1"
    with pytest.raises(UserError, match="--clip_high has no effect"):
        configs.parse(tiny.split())
    assert configs.parse(f"{tiny} --ratio binary_tv".split()).clip_high == 0.1
    with pytest.raises(UserError, match="masks nothing; needed: --mismatch_bounds 0.6 2"):
        configs.parse("tiny-grpo --mismatch negative-mask".split())
    for penalty in ("--overlong_buffer 4", "--nonstop_penalty 1"):
        maxrl = f"tiny-grpo --advantage group_mean_over_mean {penalty}"
        with pytest.raises(UserError, match="a length penalty makes negative ones; needed: "):
            configs.parse(maxrl.split())
    cfg = dataclasses.replace(PRESETS["tiny-grpo"], samples_per_prompt=4, advantage="group_mean_over_mean")
    samples = [dataclasses.replace(s, reward=-1.0) for s in terms()[:4]]
    with pytest.raises(UserError, match="with a negative score; needed: rewards from 0"):
        train.add_group_advantages(samples, cfg)


def test_a_profiled_step_is_in_a_trace_with_its_phases_and_changes_no_bit(base, one_rank, tmp_path, capfd):
    rows, weights = run(dataclasses.replace(base, profile=1), tmp_path / "p")
    assert maths(rows) == maths(one_rank[1])
    assert all(torch.equal(weights[k], one_rank[2][k]) for k in weights)
    events = json.loads((tmp_path / "p/profile_000001.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"rollout", "critic", "policy", "aten::mm", "[memory]"} <= names and "start/models" not in names
    said = capfd.readouterr().out
    assert f"trace of step 1: {tmp_path}/p/profile_000001.json" in said and "Self CPU %" in said
    (table,) = [part for part in said.split("-  \n") if "ProfilerStep" not in part and "\n  " in part][1:2]
    assert 1 <= len(table.strip().splitlines()) <= 11
    assert not list((tmp_path / "p").glob("profile_000000*"))


def test_a_trace_that_cannot_be_written_is_said(base, tmp_path, capfd):
    (tmp_path / "p/profile_000001.json/notes").mkdir(parents=True)
    run(dataclasses.replace(base, profile=1), tmp_path / "p")
    assert f"\ncan't write the trace of step 1: {tmp_path}/p/profile_000001.json" in capfd.readouterr().out
