"""Tests of data.py: prompts, minibatches and packs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import make_samples

import data
import dist
import train
from configs import PRESETS
from guard.messages import UserError
from log import Meter
from model import load_policy, load_tokenizer

CFG = replace(PRESETS["tiny-ppo"], max_prompt_len=64, max_response_len=64)


def test_the_orz_prompt_ends_at_think(tiny):
    tokenizer = load_tokenizer(tiny)
    encode = data.prompt_encoder("orz", tokenizer)
    text = tokenizer.decode(encode([("user", "What is 1+1?")]))
    assert text.startswith("A conversation between User and Assistant.")
    assert text.endswith("Assistant: <think>")
    assert "This is the problem:\nWhat is 1+1?\n" in text


def test_partition_is_balanced_and_respects_the_cap():
    g = np.random.default_rng(0)
    lengths = g.integers(10, 1000, 500)
    bins = data.partition(lengths, 32, cost=lengths * (1 + 1e-3 * lengths))
    assert sorted(i for b in bins for i in b) == list(range(500))
    work = [sum(lengths[i] * (1 + 1e-3 * lengths[i]) for i in b) for b in bins]
    assert max(work) < 1.05 * min(work)
    capped = data.partition(lengths, 32, cap=int(lengths.sum() / 32 * 1.1))
    assert max(sum(lengths[i] for i in b) for b in capped) <= lengths.sum() / 32 * 1.1
    assert data.partition(lengths, 32, cap=int(lengths.sum() / 32 * 0.9)) is None


def test_a_pack_that_is_not_in_the_loss_counts_as_computed(tiny):
    """The trainer computes it, too. With --mask_truncated, it may hold one long response."""
    cfg, world = replace(CFG, pack_len=128), dist.World(0, 1, "cpu", torch.float32)
    samples, found = make_samples(64), []
    for excluded in (0, 15):  # prompts whose samples are not in the loss
        some = [replace(s, in_loss=s.prompt_id >= excluded) for s in samples]
        meter = Meter()
        packs = sum(train.make_packs(some, 0, cfg, world, load_policy(tiny), meter), [])
        found.append(meter.reduce())
    assert any(p.responses == 0 for p in packs)
    assert found[0] == found[1]


def test_each_sample_is_in_one_minibatch_for_any_number_of_ranks():
    cfg = replace(CFG, critic_updates=4, pack_len=200)
    lengths, prompts = np.random.default_rng(0).integers(5, 100, 256), np.arange(256) // 4
    on_one_rank = None
    for ranks in (1, 2, 4, 32):
        minibatches = data.assign(lengths, lengths, prompts, ranks, cfg, step=3)
        members = [sorted(i for packs in minibatch for p in packs for i in p) for minibatch in minibatches]
        assert sorted(i for some in members for i in some) == list(range(256))
        on_one_rank = on_one_rank or members
        assert members == on_one_rank
        for minibatch in minibatches:
            assert len({len(packs) for packs in minibatch}) == 1
            tokens = [sum(lengths[i] for p in packs for i in p) for packs in minibatch]
            assert max(tokens) < 1.2 * min(tokens)
            assert all(sum(lengths[p]) <= 200 for packs in minibatch for p in packs)


@pytest.mark.parametrize("name,prompts,an_update", [
    ("scale-rl-7b", 384, 48),  # 2510.13786 A.3: 48 prompts an update
    ("scale-rl-7b", 48 * 3, 18), ("scale-rl-7b", 8, 1), ("dr-grpo-7b", 96, None)])
def test_an_update_has_whole_prompts_if_the_mean_is_over_prompts(name, prompts, an_update):
    """Updates of other presets have samples that are shuffled apart."""
    cfg = replace(PRESETS[name], prompts_per_step=prompts, samples_per_prompt=16, policy_updates=8,
                  pack_len=16384)
    lengths, ids = np.random.default_rng(1).integers(50, 9000, prompts * 16), np.arange(prompts * 16) // 16
    seen = []
    for ranks, step in ((1, 0), (4, 0), (1, 1)):
        minibatches = data.assign(lengths, lengths, ids, ranks, cfg, step)
        members = [sorted(ids[i] for packs in ranks for p in packs for i in p) for ranks in minibatches]
        assert len(members) == 8 and sum(map(len, members)) == len(ids)
        sizes = {(len(set(some)), len(some)) for some in members}
        assert sizes == {(an_update, 16 * an_update)} if an_update else min(sizes)[0] > 0.78 * prompts
        seen.append(members)
    assert seen[0] == seen[1] != seen[2]


def test_more_updates_than_whole_prompts_are_refused():
    cfg = replace(PRESETS["scale-rl-7b"], prompts_per_step=8)
    with pytest.raises(UserError, match="^8 updates a step, but only 7 prompts; needed: fewer"):
        replace(cfg, prompts_per_step=7)
    assert replace(cfg, prompts_per_step=7, aggregation="response").policy_updates == 8


def test_short_samples_of_a_prompt_stay_together():
    """Short samples of a prompt share a pack. Long samples are spread over packs. With fewer prompts than
    ranks, short samples are spread too, so that every pack has samples."""
    cfg = replace(CFG, algo="grpo", critic_updates=1, samples_per_prompt=8, pack_len=4096)
    lengths = np.random.default_rng(0).integers(20, 40, 256)

    def packs_of_prompts(lengths: np.ndarray, ranks: int) -> list[set[int]]:
        """Returns, for each prompt, the numbers of the packs that have its samples."""
        prompts = np.arange(len(lengths)) // 8
        minibatch, = data.assign(lengths, lengths, prompts, ranks, cfg, step=0)
        numbers = [set() for _ in range(len(lengths) // 8)]
        for number, pack in enumerate(pack for packs in minibatch for pack in packs):
            for i in pack:
                numbers[i // 8].add(number)
        return numbers

    assert all(len(packs) == 1 for packs in packs_of_prompts(lengths, 2))
    assert sum(len(packs) > 1 for packs in packs_of_prompts(lengths * 60, 2)) > 16
    assert set.union(*packs_of_prompts(lengths[:16], 8)) == set(range(8))


def test_shared_prefixes_are_computed_once():
    """Tokens with equal prefixes share one entry of `unique`. `inverse` maps each token to its entry."""
    samples = make_samples(12)
    samples.append(data.replace(samples[5], sample_id=9))  # this response occurs twice
    other = samples[7]
    samples.append(data.replace(other, ids=other.ids[:1], logp=other.logp[:1]))
    p = data.pack(samples)
    prefixes = [(*s.prompt, *s.ids)[:k + 1] for s in samples for k in range(s.length)]
    assert len(p.unique) == len(set(prefixes)) < len(prefixes) == len(p.tokens)
    assert [prefixes[i] for i in p.unique[p.inverse].tolist()] == prefixes


@pytest.mark.parametrize("counts", [(8,), (2, 4), (4, 4, 3), (5, 3), (2, 2), (1,) * 4, (0, 12)])
def test_groups_of_another_size_than_the_configs_are_an_error(counts):
    """From Python, samples of another config would otherwise mix the samples of several prompts."""
    cfg = replace(PRESETS["tiny-grpo"], samples_per_prompt=4)
    one = make_samples(1)[0]
    samples = [replace(one, prompt_id=i, sample_id=j, reward=float(j % 2))
               for i, count in enumerate(counts) for j in range(count)]
    with pytest.raises(AssertionError, match="not 4 samples of each prompt"):
        train.add_group_advantages(samples, cfg)
    right = [replace(one, prompt_id=i // 4, sample_id=i % 4, reward=float(i % 2)) for i in range(8)]
    assert len(train.add_group_advantages(right, cfg)) == 8 and train.add_group_advantages([], cfg) == []
    with pytest.raises(AssertionError):  # not ordered by prompt
        train.add_group_advantages(right[::2] + right[1::2], cfg)
