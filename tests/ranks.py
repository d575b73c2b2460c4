"""What test_ranks.py and test_train.py run inside ranks; importable by name from fresh processes."""

import dataclasses

import matplotlib
import numpy as np
import torch
import torch.utils.tensorboard  # noqa: F401  loaded here once instead of in every rank that is forked

import data
import dist
import model
import train
from log import Meter

matplotlib.use("Agg")
import matplotlib.pyplot  # noqa: E402, F401


def make_samples(count: int, seed: int = 0, vocabulary: int = 100) -> list[data.Sample]:
    """Random ragged samples with rewards, as an engine would have made them."""
    g = np.random.default_rng(seed)
    out = []
    for i in range(count):
        prompt = tuple(g.integers(3, vocabulary, g.integers(2, 9)).tolist())
        ids = g.integers(3, vocabulary, g.integers(1, 25)).astype(np.int32)
        logp = -g.random(len(ids)).astype(np.float32) * 5
        out.append(data.Sample(i // 4, i % 4, prompt, ids, logp, True, "", 0, reward=float(g.integers(0, 2)),
                               advantage=float(g.standard_normal())))
    return out


def all_gradients(jobs) -> list[dict]:
    """gradients(cfg, samples) of each job, in one start of the ranks."""
    return [gradients(*job) for job in jobs]


def gradients(cfg, samples) -> dict[str, torch.Tensor]:
    """Whole gradients of one policy and one critic update over all samples, by this many ranks: dispatched, packed and
    summed by the very functions that train.py uses."""
    world = dist.init("cpu", "float32")
    policy, critic, ref = train.load_models(cfg, world)
    if ref is not None:
        with torch.no_grad():
            for p in ref.parameters():
                p.mul_(0.9)
    mine = [s for s in samples if s.slot % world.size == world.rank]
    parts = train.make_packs(mine, 0, cfg, world, policy.model)
    assert len({len(p) for p in dist.gather([len(p) for p in parts])}) == 1
    meter = Meter()
    if ref is not None:
        parts = train.each(parts, lambda p: dataclasses.replace(
            p, ref_logp=train.frozen(model.logprobs, ref, p, cfg.temperature)[0]))
    if cfg.algo == "ppo":
        parts = train.estimate_advantages(critic, parts, cfg, meter)
    elif cfg.advantage == "group_mean_whiten":
        parts = train.whiten_advantages(parts)
    packs = train.updates_of(parts, 1)[0]
    tokens, responses = train.counts(packs)
    out = {}
    for p in packs:
        loss, _ = train.policy_pack_loss(policy.model, p, tokens, responses, cfg, meter)
        loss.backward()
    out |= {f"policy.{n}": p.grad.full_tensor() for n, p in policy.model.named_parameters()}
    if critic:
        for p in packs:
            v = model.values(critic.model, p)
            train.ppo.value_loss(v, p.values, p.returns, p.mask, tokens, cfg.value_clip).backward()
        out |= {f"critic.{n}": p.grad.full_tensor() for n, p in critic.model.named_parameters()}
    metrics = meter.reduce(dist.all_sum, dist.all_max)
    return out | {"metrics": metrics, "packs": len(packs)}


def weights(path: str) -> dict[str, torch.Tensor]:
    """What dist.full_weights yields for the model at path, sharded over the ranks."""
    world = dist.init("cpu", "float32")
    place = train.partial(dist.shard, over=dist.mesh(world), dtype=torch.float32)
    policy = model.load_policy(path, "cpu", place)
    first = {n: t.clone() for n, t in dist.full_weights(policy)}
    shares = sum(p.to_local().numel() for p in policy.parameters())
    assert shares < 1.2 * sum(t.numel() for t in first.values()) / world.size + 1000  # each rank holds its share only
    return first


def main(cfg) -> str:
    """A training run; returns the message of a user's mistake, or nothing."""
    try:
        train.main(cfg)
    except train.UserError as e:
        return str(e)
    return ""
