"""Forks for a paper: changes that the README's "To change X, open Y" points to, made in a copy of this repository in under
20 lines, and what they do to numbers."""

import shutil
import sys

import pytest
import torch
from conftest import ROOT, run_ranks

# OPO (arXiv 2505.23585): the baseline is the group's mean reward weighted by the responses' lengths.
OPO = [
    ("configs.py", '"leave_one_out"] =', '"leave_one_out", "length_weighted"] ='),
    ("grpo.py", 'kind: str = "group_mean_std") ->', 'kind: str = "group_mean_std", lengths: Tensor | None = None) ->'),
    ("grpo.py", "    return torch.where(keep_groups(rewards)[:, None], centred, 0)",
     '    elif kind == "length_weighted":\n'
     "        centred = rewards - (rewards * lengths).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)\n"
     "    return torch.where(keep_groups(rewards)[:, None], centred, 0)"),
    ("train.py", "    advantages = grpo.group_advantages(scores(samples, cfg), cfg.advantage).flatten().tolist()",
     "    rewards = scores(samples, cfg)\n"
     "    lengths = torch.tensor([len(s.ids) for s in samples], dtype=torch.float64).view_as(rewards)\n"
     "    advantages = grpo.group_advantages(rewards, cfg.advantage, lengths).flatten().tolist()"),
]

# SAPO (2511.20347): a sigmoid that closes softly instead of a clip, a little sooner for negative advantages.
SAPO = [
    ("configs.py", 'ratio: Literal["token", "sequence", "clipped"]', 'ratio: Literal["token", "sequence", "clipped", "soft"]'),
    ("grpo.py", "        loss, clipped = -inside.detach() * advantages * logp, inside != rho\n",
     "        loss, clipped = -inside.detach() * advantages * logp, inside != rho\n"
     '    elif ratio == "soft":\n'
     "        tau = torch.where(advantages > 0, 1.0, 1.05)\n"
     "        loss, clipped = -torch.sigmoid(tau * (rho - 1)) * 4 / tau * advantages, inside != rho\n"),
]


def fork(folder, edits) -> str:
    """A copy of the repository with each (file, old, new) made in it; returns the folder."""
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    for name, old, new in edits:
        text = (folder / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name} has changed: {old!r}"
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")
    changed = sum(line not in (ROOT / f.name).read_text(encoding="utf-8").splitlines()
                  for f in folder.glob("*.py") for line in f.read_text(encoding="utf-8").splitlines())
    assert 0 < changed < 20
    return str(folder)


def become(folder: str) -> None:
    """From here on this process imports the project's modules from `folder`."""
    for file in ROOT.glob("*.py"):
        sys.modules.pop(file.stem, None)
    sys.modules.pop("ranks", None)
    sys.path.insert(0, folder)


def configured(model: str, *flags: str):
    """A config as the command line makes it, on one pack."""
    from configs import parse

    return parse(["tiny-grpo", "--model", model, "--device", "cpu", "--samples_per_prompt", "4", "--prompts_per_step", "6",
                  "--pack_len", "4096", *flags])


def advantages_and_gradients(folder: str, model: str, kinds: list[str]) -> dict:
    """Of each kind of advantage: what the samples get, and the policy's gradient, by the functions that train.py uses."""
    become(folder)
    import ranks

    import train

    samples, out = ranks.make_samples(24), {}
    for kind in kinds:
        cfg = configured(model, "--advantage", kind)
        given = train.add_group_advantages(samples, cfg)
        got = ranks.gradients(cfg, given)
        out[kind] = [s.advantage for s in given], {k: v for k, v in got.items() if k.startswith("policy.")}
    assert train.__file__.startswith(folder)
    return out | {"rewards": [s.reward for s in samples], "lengths": [len(s.ids) for s in samples]}


def test_another_advantage(tiny, tmp_path):
    """OPO's advantages are its formula's, the length-weighted sum of a group's is 0, and the gradient is another."""
    seen = run_ranks(1, advantages_and_gradients, fork(tmp_path, OPO), tiny, ["group_mean", "length_weighted"])[0]
    advantages, gradient = seen["length_weighted"]
    for g in range(0, 24, 4):
        r, n, a = (x[g:g + 4] for x in (seen["rewards"], seen["lengths"], advantages))
        baseline = sum(x * y for x, y in zip(r, n, strict=True)) / sum(n)
        assert a == pytest.approx([x - baseline if len(set(r)) > 1 else 0.0 for x in r])
        assert sum(x * y for x, y in zip(a, n, strict=True)) == pytest.approx(0, abs=1e-9)
    other, theirs = seen["group_mean"]
    assert max(abs(x - y) for x, y in zip(advantages, other, strict=True)) > 0.05
    assert all(g.isfinite().all() for g in gradient.values())
    change = sum(((gradient[k] - theirs[k]) ** 2).sum() for k in gradient) / sum((g**2).sum() for g in theirs.values())
    assert change > 1e-3


def losses(folder: str, model: str, kinds: list[str]) -> dict:
    """Of each kind of ratio: the loss of one pack whose old log-probs are another policy's, and its gradient in log p and in
    the weights; with the log-probs, advantages and mask that entered it."""
    become(folder)
    from dataclasses import replace

    import ranks

    import data
    import grpo
    import ppo
    import train
    from log import Meter
    from model import load_policy, logprobs

    policy, p = load_policy(model), data.pack(ranks.make_samples(24))
    with torch.no_grad():
        logp, _ = logprobs(policy, p, 1.0)
    noise = torch.randn(len(logp), generator=torch.Generator().manual_seed(0))
    p = replace(p, old_logp=torch.where(p.mask, logp + 0.5 * noise, 0))
    tokens, segment, out = int(p.mask.sum()), ppo.segment_ids(p.cu_seqlens), {}
    for kind in kinds:
        cfg = configured(model, "--ratio", kind, "--tis_clip", "None")
        policy.zero_grad()
        loss, _ = train.policy_pack_loss(policy, p, tokens, p.responses, cfg, Meter())
        loss.backward()
        x = logp.clone().requires_grad_()
        grpo.policy_loss(x, p.old_logp, p.advantages, p.mask, segment, p.mask / tokens, kind)[0].backward()
        out[kind] = loss.item(), x.grad, torch.cat([w.grad.flatten() for w in policy.parameters()])
    assert train.__file__.startswith(folder)
    return out | {"pack": (logp, p.old_logp, p.advantages, p.mask)}


def test_another_ratio(tiny, tmp_path):
    """SAPO's loss and gradient are the paper's, token by token; none loses its gradient, where clipping takes it from many."""
    seen = run_ranks(1, losses, fork(tmp_path, SAPO), tiny, ["token", "soft"])[0]
    logp, old, advantages, mask = (x[seen["pack"][3]].double() for x in seen["pack"])
    loss, gradient, weights = seen["soft"]
    tau = torch.tensor([1.0 if a > 0 else 1.05 for a in advantages], dtype=torch.float64)
    rho = (logp - old).exp()
    gate = 1 / (1 + (-tau * (rho - 1)).exp())
    assert loss == pytest.approx(float(-(4 / tau * gate * advantages).mean()), rel=1e-5)
    want = -4 * gate * (1 - gate) * rho * advantages / len(rho)  # eq. 8: at a ratio of 1 that of REINFORCE, then ever less
    assert torch.allclose(gradient[seen["pack"][3]].double(), want, rtol=1e-4, atol=1e-9)
    assert not gradient[~seen["pack"][3]].any()
    clipped = seen["token"][1][seen["pack"][3]] == 0
    assert clipped.sum() > 20 and (want[clipped] != 0).all()
    assert (weights - seen["token"][2]).norm() / seen["token"][2].norm() > 0.05 and mask.all()
