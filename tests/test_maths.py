"""ppo.py and grpo.py against naive references, one sequence at a time in float64, on 200 random ragged cases each: values
and gradients. The references are written from the papers' equations, not from the code under test."""

import math

import pytest
import torch

import grpo
import ppo

CASES = 200
WORST: dict[str, float] = {}  # largest error of each function: conftest prints them at the end


def ragged(seed: int):
    """A pack of 1-6 segments: prompt and response lengths, mask, cu_seqlens, and a generator."""
    g = torch.Generator().manual_seed(seed)
    n = int(torch.randint(1, 7, (), generator=g))
    lengths = [(int(torch.randint(1, 5, (), generator=g)), int(torch.randint(1, 9, (), generator=g))) for _ in range(n)]
    mask = torch.cat([torch.tensor([False] * p + [True] * r) for p, r in lengths])
    cu = torch.tensor([0, *[p + r for p, r in lengths]]).cumsum(0).int()
    return lengths, mask, cu, g


def per_sequence(x, lengths):
    """The response parts of x, one tensor a segment."""
    out, at = [], 0
    for p, r in lengths:
        out.append(x[at + p:at + p + r])
        at += p + r
    return out


def close(name, got, want, tolerance=1e-9):
    error = float((torch.as_tensor(got) - torch.as_tensor(want)).abs().max())
    WORST[name] = max(WORST.get(name, 0.0), error)
    assert error < tolerance, (name, error)


def compare(name, f, reference, x, tolerance=1e-9):
    """Values and gradients in x of two scalar functions."""
    a, b = (x.clone().requires_grad_() for _ in range(2))
    fa, fb = f(a), reference(b)
    close(name, fa.detach(), fb.detach(), tolerance)
    fa.backward()
    fb.backward()
    close(f"{name}, gradient", a.grad, b.grad, tolerance)


@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (0.9, 0.8), (1.0, 0.95)])
def test_gae(gamma, lam):
    for seed in range(CASES):
        lengths, mask, cu, g = ragged(seed)
        rewards, values = (torch.randn(len(mask), generator=g, dtype=torch.float64) for _ in range(2))
        rewards = torch.where(mask, rewards, 0)
        adv, ret = ppo.gae(rewards, values, cu, mask, gamma, lam)
        assert not adv[~mask].any() and not ret[~mask].any()
        for r, v, a, rt in zip(*(per_sequence(x, lengths) for x in (rewards, values, adv, ret)), strict=True):
            want, carry = [0.0] * len(r), 0.0
            for t in reversed(range(len(r))):
                after = float(v[t + 1]) if t + 1 < len(r) else 0.0
                carry = float(r[t]) + gamma * after - float(v[t]) + gamma * lam * carry
                want[t] = carry
            close("gae", a, torch.tensor(want, dtype=torch.float64))
            close("gae returns", rt, torch.tensor(want, dtype=torch.float64) + v)


def test_gae_without_discount_is_score_minus_value():
    for seed in range(CASES):
        lengths, mask, cu, g = ragged(seed)
        values = torch.randn(len(mask), generator=g, dtype=torch.float64)
        rewards = torch.zeros_like(values)
        scores = torch.randn(len(lengths), generator=g, dtype=torch.float64)
        rewards[cu[1:].long() - 1] = scores
        adv, ret = ppo.gae(rewards, values, cu, mask)
        score = scores[ppo.segment_ids(cu)]
        close("score - V", adv[mask], (score - values)[mask])
        close("return = score", ret[mask], score[mask])


def test_whiten():
    for seed in range(CASES):
        _, mask, _, g = ragged(seed)
        x = torch.randn(len(mask), generator=g, dtype=torch.float64) * 3 + 1
        other = torch.randn(7, generator=g, dtype=torch.float64)  # what another pack or rank holds
        total = ppo.moments(x, mask) + ppo.moments(other, torch.ones(7, dtype=torch.bool))
        both = torch.cat([x[mask], other])
        want = (x[mask] - both.mean()) / (both.std(correction=0) + 1e-8)
        close("whiten", ppo.whiten(x, mask, total)[mask], want, 1e-8)
        assert not ppo.whiten(x, mask, total)[~mask].any()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(estimator):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(CASES, generator=g, dtype=torch.float64) for _ in range(2))
    d = [float(x - y) for x, y in zip(a, b, strict=True)]
    want = {"k1": d, "k2": [x * x / 2 for x in d], "k3": [math.exp(-x) - 1 + x for x in d]}[estimator]
    close(f"kl {estimator}", ppo.kl(a, b, estimator), torch.tensor(want, dtype=torch.float64))
    if estimator == "k3":
        assert (ppo.kl(a, b, "k3") >= 0).all()
        assert torch.isfinite(ppo.kl(torch.tensor([-200.0]), torch.tensor([0.0]), "k3")).all()


def clipped(ratio, a, low, high):
    inside = 1 - low if ratio < 1 - low else 1 + high if ratio > 1 + high else ratio
    return -(ratio * a if ratio * a <= inside * a else inside * a)


def test_ppo_policy_loss():
    for seed in range(CASES):
        lengths, mask, _, g = ragged(seed)
        logp, old, adv = (torch.randn(len(mask), generator=g, dtype=torch.float64) * s for s in (0.4, 0.4, 1))
        weight = torch.rand(len(mask), generator=g, dtype=torch.float64)

        def naive(x, lengths=lengths, old=old, adv=adv, weight=weight):
            total = (x * 0).sum()
            for lp, o, a, w in zip(*(per_sequence(y, lengths) for y in (x, old, adv, weight)), strict=True):
                for t in range(len(lp)):
                    total = total + w[t] * clipped(torch.exp(lp[t] - o[t]), a[t], 0.2, 0.28)
            return total / 11

        compare("ppo.policy_loss", lambda x, o=old, a=adv, m=mask, w=weight: ppo.policy_loss(x, o, a, m, 11, 0.2, 0.28, w)[0],
                naive, logp)


def test_one_update_a_step_is_reinforce_with_a_baseline():
    for seed in range(CASES):
        _, mask, _, g = ragged(seed)
        logp, adv = (torch.randn(len(mask), generator=g, dtype=torch.float64) for _ in range(2))
        a, b = (logp.clone().requires_grad_() for _ in range(2))
        ppo.policy_loss(a, a.detach(), adv, mask, 5)[0].backward()
        (-(adv * b)[mask].sum() / 5).backward()
        close("PPO = REINFORCE, gradient", a.grad, b.grad)


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_loss(clip):
    for seed in range(CASES):
        lengths, mask, _, g = ragged(seed)
        v, old, ret = (torch.randn(len(mask), generator=g, dtype=torch.float64) * 0.5 for _ in range(3))

        def naive(x, lengths=lengths, old=old, ret=ret):
            total = x.new_zeros(())
            for vs, os, rs in zip(*(per_sequence(y, lengths) for y in (x, old, ret)), strict=True):
                for t in range(len(vs)):
                    plain = (vs[t] - rs[t]) ** 2
                    near = (os[t] + torch.clamp(vs[t] - os[t], -0.2, 0.2) - rs[t]) ** 2
                    total = total + 0.5 * (plain if clip is None or plain >= near else near)
            return total / 7

        compare(f"ppo.value_loss, clip {clip}",
                lambda x, o=old, r=ret, m=mask: ppo.value_loss(x, o, r, m, 7, clip), naive, v)


@pytest.mark.parametrize("kind", ["group_mean_std", "group_mean", "group_mean_whiten", "leave_one_out"])
def test_group_advantages(kind):
    for seed in range(CASES):
        g = torch.Generator().manual_seed(seed)
        rewards = torch.randint(0, 2, (4, int(torch.randint(2, 9, (), generator=g))), generator=g).double()
        got = grpo.group_advantages(rewards, kind)
        for row, out in zip(rewards.tolist(), got, strict=True):
            n, mean = len(row), sum(row) / len(row)
            if len(set(row)) == 1:
                assert (out == 0).all()
                continue
            if kind == "leave_one_out":
                want = [r - (sum(row) - r) / (n - 1) for r in row]
            else:
                std = math.sqrt(sum((r - mean) ** 2 for r in row) / (n - 1)) + 1e-6 if kind == "group_mean_std" else 1.0
                want = [(r - mean) / std for r in row]
            close(f"group_advantages {kind}", out, torch.tensor(want, dtype=torch.float64))


def test_a_uniform_group_has_exactly_no_gradient():
    for kind in ("group_mean_std", "group_mean", "leave_one_out"):
        for value in (0.1, 1 / 3, 1.0, -0.7):
            assert (grpo.group_advantages(torch.full((3, 7), value), kind) == 0).all()


def test_overlong_penalty():
    lengths = [0, 80, 81, 90, 100, 120]
    assert [grpo.overlong_penalty(n, 100, 20) for n in lengths] == pytest.approx([0, 0, -0.05, -0.5, -1, -1])


@pytest.mark.parametrize("name", grpo.RECIPES)
def test_grpo_family(name):
    recipe = {"clip_low": 0.2, "clip_high": 0.2} | grpo.RECIPES[name]
    low, high, ratio, aggregation = (recipe[k] for k in ("clip_low", "clip_high", "ratio", "aggregation"))
    scale = 4e-4 if ratio == "sequence" else 0.3
    tokens, responses, longest = 31.0, 9.0, 50
    for seed in range(CASES):
        lengths, mask, cu, g = ragged(seed)
        old = torch.randn(len(mask), generator=g, dtype=torch.float64)
        logp = old + scale * torch.randn(len(mask), generator=g, dtype=torch.float64)
        adv = torch.randn(len(lengths), generator=g, dtype=torch.float64)[ppo.segment_ids(cu)]

        def naive(x, lengths=lengths, old=old, adv=adv):
            total = (x * 0).sum()
            for lp, o, a in zip(*(per_sequence(y, lengths) for y in (x, old, adv)), strict=True):
                inner = x.new_zeros(())
                whole = torch.exp((lp - o).mean())
                for t in range(len(lp)):
                    rho = whole if ratio == "sequence" else torch.exp(lp[t] - o[t])
                    if ratio == "clipped":
                        inner = inner - rho.detach().clamp(1 - low, 1 + high) * a[t] * lp[t]
                    else:
                        inner = inner + clipped(rho, a[t], low, high)
                total = total + inner / {"token": tokens, "response": responses * len(lp), "max_len": responses * longest}[
                    aggregation]
            return total

        segment = ppo.segment_ids(cu)
        weights = grpo.token_weights(mask, segment, aggregation, tokens, responses, longest)
        compare(f"grpo.policy_loss {name}",
                lambda x, o=old, a=adv, m=mask, s=segment, w=weights: grpo.policy_loss(x, o, a, m, s, w, ratio, low, high)[0],
                naive, logp, 1e-7)  # weights are fp32


def test_gspo_with_one_token_a_response_is_grpo():
    g = torch.Generator().manual_seed(0)
    mask = torch.tensor([False, True] * 8)
    segment = torch.arange(8).repeat_interleave(2)
    old, step, adv = (torch.randn(16, generator=g, dtype=torch.float64) for _ in range(3))
    weights = grpo.token_weights(mask, segment, "token", 8, 8, 1)
    out = [grpo.policy_loss(old + step * 0.3, old, adv, mask, segment, weights, r)[0] for r in ("sequence", "token")]
    close("GSPO = GRPO at one token", out[0], out[1])


def test_dr_grpo_weighs_every_token_alike_whatever_its_response_is():
    mask = torch.tensor([False, True, False, True, True, True])
    segment = torch.tensor([0, 0, 1, 1, 1, 1])
    weights = grpo.token_weights(mask, segment, "max_len", 4, 2, 10)
    assert weights[mask].tolist() == pytest.approx([1 / 20] * 4)
