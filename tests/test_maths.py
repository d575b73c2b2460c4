"""Tests that ppo.py and grpo.py equal naive references, in values and gradients. The references compute one
sequence at a time, from the papers' equations."""

import itertools
import math

import pytest
import torch

import data
import grpo
import ppo
import train
from bench.algorithms import RECIPES
from configs import PRESETS
from log import Meter

CASES = 60
WORST: dict[str, float] = {}  # function -> largest error; conftest.py prints this at the end


def ragged(seed: int):
    """Returns a random pack of T tokens in N segments: the mask (T,) of sampled tokens, cu_seqlens (N + 1,),
    and the random generator."""
    g = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(int(torch.randint(1, 7, (), generator=g))):
        prompt, more = (int(torch.randint(1, 9, (), generator=g)) for _ in range(2))
        sampled = torch.rand(more - 1, generator=g) < 0.75
        parts.append(torch.cat([torch.zeros(prompt, dtype=torch.bool), torch.tensor([True]), sampled]))
    return torch.cat(parts), torch.tensor([0, *map(len, parts)]).cumsum(0).int(), g


def normal(g: torch.Generator, count: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(count, generator=g, dtype=torch.float64) * scale


def sequences(mask, cu, *tensors):
    """Yields, for each segment, the values of each tensor at the segment's sampled tokens."""
    for start, end in itertools.pairwise(cu.tolist()):
        yield [x[start:end][mask[start:end]] for x in tensors]


def close(name, got, want, tolerance=1e-9):
    error = float((torch.as_tensor(got) - torch.as_tensor(want)).abs().max())
    WORST[name] = max(WORST.get(name, 0.0), error)
    assert error < tolerance, (name, error)


def compare(name, f, reference, x, tolerance=1e-9):
    """Asserts that two scalar functions of x have the same value and gradient."""
    a, b = (x.clone().requires_grad_() for _ in range(2))
    fa, fb = f(a), reference(b)
    close(name, fa.detach(), fb.detach(), tolerance)
    fa.backward()
    fb.backward()
    close(f"{name}, gradient", a.grad, b.grad, tolerance)


@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (0.9, 0.8), (1.0, 0.95)])
def test_gae_equals_the_backward_recursion_over_sampled_tokens(gamma, lam):
    for seed in range(CASES):
        mask, cu, g = ragged(seed)
        rewards, values = normal(g, len(mask)) * mask, normal(g, len(mask))
        adv, returns = ppo.gae(rewards, values, cu, mask, gamma, lam)
        assert not adv[~mask].any() and not returns[~mask].any()
        want = torch.zeros_like(values)
        for start, end in itertools.pairwise(cu.tolist()):
            later, next_value = 0.0, 0.0
            for t in reversed(range(start, end)):
                if mask[t]:
                    delta = float(rewards[t]) + gamma * next_value - float(values[t])
                    want[t] = later = delta + gamma * lam * later
                    next_value = float(values[t])
        close("gae", adv, want)
        close("gae returns", returns[mask], (want + values)[mask])
        if gamma == lam == 1:
            for start, end in itertools.pairwise(cu.tolist()):
                first = start + int(mask[start:end].nonzero()[0])
                close("return = score", returns[first], rewards[first:end].sum())
    nothing = torch.zeros(1)  # a filler pack: one token outside the loss
    assert ppo.gae(nothing, nothing, torch.tensor([0, 1]), nothing > 0, gamma, lam) == (nothing, nothing)


def test_whitening_uses_the_stats_of_all_packs():
    for seed in range(CASES):
        mask, _, g = ragged(seed)
        x = normal(g, len(mask), 3) + 1
        other = normal(g, 7)  # advantages of another pack
        stats = ppo.whitening_stats(x, mask) + ppo.whitening_stats(other, torch.ones(7, dtype=torch.bool))
        both = torch.cat([x[mask], other])
        want = (x[mask] - both.mean()) / (both.std(correction=0) + 1e-8)
        close("whiten", ppo.whiten(x, mask, stats)[mask], want, 1e-8)
        assert not ppo.whiten(x, mask, stats)[~mask].any()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(estimator):
    g = torch.Generator().manual_seed(0)
    a, b = normal(g, CASES), normal(g, CASES)
    d = [float(x - y) for x, y in zip(a, b, strict=True)]
    want = {"k1": d, "k2": [x * x / 2 for x in d], "k3": [math.exp(-x) - 1 + x for x in d]}[estimator]
    close(f"kl {estimator}", ppo.kl(a, b, estimator), torch.tensor(want, dtype=torch.float64))
    if estimator == "k3":
        assert (ppo.kl(a, b, "k3") >= 0).all()
        assert torch.isfinite(ppo.kl(torch.tensor([-200.0]), torch.tensor([0.0]), "k3")).all()


class Table:
    """A policy over responses of two tokens, in fp64: logits (4,) of the first token, and logits (4, 4) of
    the second token after each first token."""

    def __init__(self, seed: int, start: "Table | None" = None, scale: float = 1.0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.logits = [scale * torch.randn(*shape, generator=g, dtype=torch.float64)
                       for shape in ((4,), (4, 4))]
        for mine, other in zip(self.logits, start.logits if start else (), strict=False):
            mine += other.detach()
        for x in self.logits:
            x.requires_grad_()

    def rows(self, first):
        """Returns the log-probs (2, 4) of both tokens, after a response whose first token is `first`."""
        return torch.stack([self.logits[0], self.logits[1][first]]).log_softmax(-1)

    def __call__(self, pack, temperature=1.0):
        """Returns log-probs and entropies (T,), as model.Policy does."""
        logp, entropy = (torch.zeros(len(pack.tokens), dtype=torch.float64) for _ in range(2))
        for start, end in itertools.pairwise(pack.cu_seqlens.tolist()):
            rows = self.rows(int(pack.tokens[start + 1]))[:end - start - 1]
            chosen = pack.tokens[start + 1:end, None]
            logp = logp.index_put((torch.arange(start + 1, end),), rows.gather(1, chosen)[:, 0])
            entropy = entropy.index_put((torch.arange(start + 1, end),), -(rows.exp() * rows).sum(1))
        return logp, entropy

    def gradient(self, loss) -> torch.Tensor:
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, self.logits)])


def packed(responses, engine=None, **fields):
    """Returns a pack of one-token prompts with these responses, with `fields` set to tables' log-probs."""
    samples = [data.Sample(i, 0, (0,), torch.tensor(ids, dtype=torch.int32).numpy(),
                           torch.zeros(len(ids)).numpy(), True, "", 0, prompt_share=0.25 / len(ids))
               for i, ids in enumerate(responses)]
    p = data.pack(samples)
    logps = {name: table(p)[0].detach() for name, table in fields.items()}
    return data.replace(p, engine_logp=logps.get("old_logp", p.engine_logp), **logps)


KL = data.replace(PRESETS["tiny-grpo"], kl_coef=1.0, mismatch="none")


@pytest.mark.parametrize("cfg", [KL, data.replace(KL, kl_estimator="k2"), data.replace(KL, kl_estimator="k1"),
                                 data.replace(KL, ratio="clipped"), data.replace(KL, algo="ppo")])
@pytest.mark.parametrize("updates", [1, 3])
def test_the_kl_term_has_the_gradient_of_the_kl(cfg, updates):
    """Enumerates all 16 responses of two tokens. The expected gradient of the loss is that of the KL of each
    token, KL(policy || ref), after the prefixes that the sampling policy writes. So it is after the first
    update (the policy has sampled) and after later ones (an older policy has)."""
    ref, policy, every = Table(1), Table(2), list(itertools.product(range(4), repeat=2))
    sampler = Table(0, start=policy, scale=0)
    for update in range(updates):
        total, exact = 0.0, 0.0
        for first, second in every:
            old = {"old_logp": sampler} if updates > 1 else {}
            p = packed([(first, second)], ref_logp=ref, **old)
            share = float(sampler.rows(first)[0, first].exp() * sampler.rows(first)[1, second].exp())
            total = total + share * 2 * policy.gradient(
                train.policy_pack_loss(policy, p, 2.0, 1.0, cfg, Meter()))
            rows = policy.rows(first)
            kl = (rows.exp() * (rows - ref.rows(first).detach())).sum(1).sum()
            exact = exact + share * policy.gradient(kl)
        close(f"KL in the loss, update {update + 1}", total, exact, 1e-12)
        for x, g in zip(policy.logits, total.split([4, 16]), strict=True):
            x.data -= 0.7 * g.view(x.shape)
    assert updates == 1 or float((policy.logits[1] - sampler.logits[1]).detach().abs().max()) > 0.1


def test_the_kl_term_counts_tokens_as_the_engine_sampled_them():
    """The engine's probabilities differ from the trainer's. The weights of --mismatch are in the KL, too."""
    ref, policy, engine = Table(1), Table(2), Table(3)
    cfg = data.replace(KL, mismatch="token-truncate", mismatch_bounds=(0.0, 1e9))
    total, exact = 0.0, 0.0
    for first, second in itertools.product(range(4), repeat=2):
        p = data.replace(packed([(first, second)], ref_logp=ref), engine_logp=engine(
            packed([(first, second)]))[0].detach())
        share = float(engine.rows(first)[0, first].exp() * engine.rows(first)[1, second].exp())
        total = total + share * 2 * policy.gradient(train.policy_pack_loss(policy, p, 2.0, 1.0, cfg, Meter()))
        rows = policy.rows(first)
        exact = exact + share * policy.gradient((rows.exp() * (rows - ref.rows(first).detach())).sum())
    close("KL in the loss, engine's samples", total, exact, 1e-12)


@pytest.mark.parametrize("aggregation,algo", [("token", "ppo"), ("max_len", "ppo"), *(
    (name, "grpo") for name in ("token", "response", "max_len", "prompt"))])
def test_kl_and_entropy_are_averaged_as_the_loss_is(aggregation, algo):
    """GRPO (2402.03300), eq. 3: the KL is inside the mean over each response. Here 3 responses have 5 tokens.
    The reference differentiates rho k3 through rho (DeepSeek-V3.2, 2512.02556). PPO averages over tokens."""
    responses, ref, policy, old = [(1,), (2, 3), (0, 2)], Table(1), Table(2), Table(3)
    cfg = data.replace(KL, aggregation=aggregation, algo=algo, entropy_coef=0.5, max_response_len=16)
    p = packed(responses, ref_logp=ref, old_logp=old)
    ours = policy.gradient(train.policy_pack_loss(policy, p, 5.0, 3.0, cfg, Meter()))
    total = 0.0
    for ids in responses:
        rows, before, at = policy.rows(ids[0]), old.rows(ids[0]).detach(), ref.rows(ids[0]).detach()
        weight = {"token": 1 / 5, "response": 1 / 3 / len(ids), "max_len": 1 / 3 / 16,
                  "prompt": 0.25 / len(ids)}["token" if algo == "ppo" else aggregation]
        for t, token in enumerate(ids):
            d = rows[t, token] - at[t, token]
            rho = torch.exp(rows[t, token] - before[t, token])
            entropy = -(rows[t].exp() * rows[t]).sum()
            total = total + weight * (rho * (torch.exp(-d) - 1 + d) - 0.5 * entropy)
    close(f"KL and entropy, {aggregation}", ours, policy.gradient(total), 1e-7)  # the weights are fp32


def clipped(ratio, a, low, high):
    """Returns the loss of one token with the advantage a: -min(ratio a, clip(ratio) a)."""
    inside = 1 - low if ratio < 1 - low else 1 + high if ratio > 1 + high else ratio
    return -(ratio * a if ratio * a <= inside * a else inside * a)


def test_the_loss_of_ppo_with_corrections_and_its_number_of_clipped_tokens():
    for seed in range(CASES):
        mask, cu, g = ragged(seed)
        logp, old, adv = (normal(g, len(mask), scale) for scale in (0.4, 0.4, 1))
        weight = torch.rand(len(mask), generator=g, dtype=torch.float64)
        rest = mask, ppo.segment_ids(cu, len(mask)), mask.double() / 11, "token", 0.2, 0.28

        def naive(x, mask=mask, cu=cu, old=old, adv=adv, weight=weight):
            total = (x * 0).sum()
            for lp, o, a, w in sequences(mask, cu, x, old, adv, weight):
                for t in range(len(lp)):
                    total = total + w[t] * clipped(torch.exp(lp[t] - o[t]), a[t], 0.2, 0.28)
            return total / 11

        def ours(x, old=old, adv=adv, rest=rest, weight=weight):
            return grpo.policy_loss(x, old, adv, *rest, weight)[0]

        compare("grpo.policy_loss of PPO", ours, naive, logp)
        ratio = (logp - old).exp()
        cut = [clipped(r, x, 0.2, 0.28) > -r * x for r, x in zip(ratio[mask], adv[mask], strict=True)]
        assert int(grpo.policy_loss(logp, old, adv, *rest)[1]) == sum(cut)


def test_one_update_a_step_is_reinforce_with_a_baseline():
    for seed in range(CASES):
        mask, cu, g = ragged(seed)
        logp, adv = normal(g, len(mask)), normal(g, len(mask))
        segment = ppo.segment_ids(cu, len(mask))
        a, b = (logp.clone().requires_grad_() for _ in range(2))
        grpo.policy_loss(a, a.detach(), adv, mask, segment, mask.double() / 5)[0].backward()
        (-(adv * b)[mask].sum() / 5).backward()
        close("PPO = REINFORCE, gradient", a.grad, b.grad)


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_loss(clip):
    for seed in range(CASES):
        mask, cu, g = ragged(seed)
        v, old, ret = (normal(g, len(mask), 0.5) for _ in range(3))

        def naive(x, mask=mask, cu=cu, old=old, ret=ret):
            total = x.new_zeros(())
            for vs, os, rs in sequences(mask, cu, x, old, ret):
                for t in range(len(vs)):
                    plain = (vs[t] - rs[t]) ** 2
                    near = (os[t] + torch.clamp(vs[t] - os[t], -0.2, 0.2) - rs[t]) ** 2
                    total = total + 0.5 * (plain if clip is None or plain >= near else near)
            return total / 7

        def ours(x, old=old, ret=ret, mask=mask):
            return ppo.value_loss(x, old, ret, mask, 7, clip)

        compare(f"ppo.value_loss, clip {clip}", ours, naive, v)


@pytest.mark.parametrize("kind", ["group_mean_std", "group_mean", "group_mean_whiten", "leave_one_out",
                                  "group_mean_batch_std"])
def test_group_advantages(kind):
    for seed in range(CASES):
        g = torch.Generator().manual_seed(seed)
        n = int(torch.randint(2, 9, (), generator=g))
        rewards = torch.tensor([-0.7, 1 / 3])[torch.randint(0, 2, (4, n), generator=g)].double()
        got = grpo.group_advantages(rewards, kind)
        for row, out in zip(rewards.tolist(), got, strict=True):
            mean, std = sum(row) / n, 1.0
            if len(set(row)) == 1:
                assert (out == 0).all()
                continue
            if kind == "leave_one_out":
                want = [r - (sum(row) - r) / (n - 1) for r in row]
            else:
                if kind == "group_mean_std":
                    std = math.sqrt(sum((r - mean) ** 2 for r in row) / (n - 1)) + 1e-6
                want = [(r - mean) / std for r in row]
            close(f"group_advantages {kind}", out, torch.tensor(want, dtype=torch.float64))


# What policy_loss gets from a recipe -> the last recipe of these
LOSSES = {tuple(recipe[k] for k in ("clip_low", "clip_high", "ratio", "aggregation")): name
          for name, recipe in RECIPES.items()}


@pytest.mark.parametrize("loss", LOSSES, ids=LOSSES.values())
def test_grpo_family(loss):
    (low, high, ratio, aggregation), name = loss, LOSSES[loss]
    scale = 4e-4 if ratio == "sequence" else 0.3
    tokens, responses, max_len = 31.0, 9.0, 50
    for seed in range(CASES):
        mask, cu, g = ragged(seed)
        segment = ppo.segment_ids(cu, int(cu[-1]))
        old = normal(g, len(mask))
        logp = old + scale * normal(g, len(mask))
        adv = normal(g, len(cu) - 1)[segment]

        def naive(x, mask=mask, cu=cu, old=old, adv=adv):
            total = (x * 0).sum()
            for lp, o, a in sequences(mask, cu, x, old, adv):
                inner = x.new_zeros(())
                whole = torch.exp((lp - o).mean())
                for t in range(len(lp)):
                    rho = whole if ratio == "sequence" else torch.exp(lp[t] - o[t])
                    if ratio == "clipped":
                        inner = inner - rho.detach().clamp(1 - low, 1 + high) * a[t] * lp[t]
                    else:
                        inner = inner + clipped(rho, a[t], low, high)
                denominators = {"token": tokens, "response": responses * len(lp),
                                "max_len": responses * max_len, "prompt": 3 * 4}
                total = total + inner / denominators[aggregation]
            return total

        share = torch.full((len(mask),), 1 / (3 * 4))  # prompt_share, if 3 prompts have 4 tokens each
        weights = grpo.token_weights(mask, segment, aggregation, tokens, responses, max_len, share)

        def ours(x, old=old, adv=adv, mask=mask, segment=segment, weights=weights):
            return grpo.policy_loss(x, old, adv, mask, segment, weights, ratio, low, high)[0]

        compare(f"grpo.policy_loss {name}", ours, naive, logp, 1e-7)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_mismatch_weights(level):
    """A weight is the ratio p_trainer / p_engine of a token or of a response. The bounds are 0.5 and 2."""
    for seed in range(CASES):
        mask, cu, g = ragged(seed)
        logp, engine, segment = normal(g, len(mask)), normal(g, len(mask)), ppo.segment_ids(cu, len(mask))
        want = []
        for new, old in sequences(mask, cu, logp, engine):
            ratios = [math.exp(a - b) for a, b in zip(new, old, strict=True)]
            power = {"token": 0, "sequence": 1, "geometric": 1 / len(ratios)}[level]
            want += [math.prod(ratios) ** power for _ in ratios] if power else ratios
        wants = {"truncate": [min(max(x, 0.5), 2) for x in want], "mask": [x * (0.5 <= x <= 2) for x in want]}
        for action, values in wants.items():
            weight, cut = grpo.mismatch_weight(logp.requires_grad_(), engine, mask, segment,
                                               f"{level}-{action}", 0.5, 2)
            close(f"mismatch {level}-{action}", weight[mask], torch.tensor(values, dtype=torch.float64))
            assert not weight.requires_grad and not weight[~mask].any() and not cut[~mask].any()
            assert cut[mask].tolist() == [not 0.5 <= x <= 2 for x in want]


@pytest.mark.parametrize("call", [
    lambda x, mask, segment: ppo.kl(x, x, "wrong"),
    lambda x, mask, segment: grpo.group_advantages(x[None], "wrong"),
    lambda x, mask, segment: grpo.token_weights(mask, segment, "wrong", 2, 1, 2),
    lambda x, mask, segment: grpo.policy_loss(x, x, x, mask, segment, x, "wrong"),
    lambda x, mask, segment: grpo.policy_loss(x, x, x, mask, segment, x, "binary_wrong", engine_logp=x),
    lambda x, mask, segment: grpo.mismatch_weight(x, x, mask, segment, "token-wrong", 0, 2)])
def test_unknown_names_are_refused(call):
    with pytest.raises((ValueError, KeyError), match="wrong"):
        call(torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.zeros(2).long())
