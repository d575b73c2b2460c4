"""Data in, packs out: formats, errors that name the row, batches as functions of (seed, step), balanced packs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import make_samples

import data
from configs import PRESETS, UserError
from model import load_tokenizer

CFG = replace(PRESETS["tiny-ppo"], max_prompt_len=64, max_response_len=64)


def write(path: Path, rows) -> str:
    text = json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(r) + "\n" for r in rows)
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("row", [
    [{"from": "human", "value": "1+1="}, {"from": "assistant", "ground_truth": {"value": "2"}}],
    {"prompt": [{"from": "user", "value": "1+1="}], "final_answer": "2"},
    {"messages": [{"role": "user", "content": "1+1="}], "ground_truth": "2", "dataset": "sums"},
    {"problem": "1+1=", "solution": "We add them, so \\boxed{2}."},
    {"problem": "1+1=", "solution": "long words \\boxed{3}", "answer": "2"},
    {"prompt": "1+1=", "answer": 2},
])
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_every_known_shape_of_row(row, suffix, tiny, tmp_path):
    found = data.load_problems([write(tmp_path / f"d.{suffix}", [row])], load_tokenizer(tiny), CFG)
    assert [(p.text, p.answer) for p in found] == [("1+1=", "2")]


@pytest.mark.parametrize("content,words", [
    (None, ["no data file", "d.jsonl"]),
    ("", ["empty", "d.jsonl"]),
    ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n', ["row 2", "no answer", "prompt"]),
    ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": ""}\n', ["row 2", "no answer"]),
    ('{"answer": "2"}\n', ["row 1", "no problem"]),
    ('{"prompt": "1+1=", "answer": "2"}\n{oops}\n', ["row 2", "not JSON"]),
    ('{"prompt": "' + "1+" * 99 + '1=", "answer": "2"}\n', ["longer", "--max_prompt_len"]),
])
def test_mistakes_name_the_file_and_the_row_in_one_line(content, words, tiny, tmp_path):
    path = tmp_path / "d.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as e:
        data.load_problems([str(path)], load_tokenizer(tiny), CFG)
    assert "\n" not in str(e.value) and all(w in str(e.value) for w in words)


def test_long_and_repeated_prompts_are_dropped_and_counted(tiny, tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1" * 99, "answer": "2"}, {"prompt": "1+1=", "answer": "2"}]
    said = []
    found = data.load_problems([write(tmp_path / "d.jsonl", rows)], load_tokenizer(tiny), CFG, said.append)
    assert len(found) == 1
    assert "1 repeated" in said[0] and "1 over 64 tokens: d.jsonl:2" in said[0]


def test_the_orz_prompt_ends_at_think(tiny):
    tokenizer = load_tokenizer(tiny)
    text = tokenizer.decode(data.templater("orz", tokenizer)("What is 1+1?"))
    assert text.startswith("A conversation between User and Assistant.") and text.endswith("Assistant: <think>")
    assert "This is the problem:\nWhat is 1+1?\n" in text


def test_batches_are_a_function_of_seed_and_step():
    problems = [data.Problem(str(i), (i,), str(i), "") for i in range(10)]
    cfg = replace(CFG, prompts_per_step=4)
    stream = [p.text for step in range(10) for p in data.batch_at(problems, step, cfg)]
    for epoch in range(4):
        assert sorted(stream[epoch * 10:epoch * 10 + 10]) == sorted(p.text for p in problems)  # each once an epoch
    assert stream[:10] != stream[10:20]  # reshuffled
    assert [p.text for p in data.batch_at(problems, 7, cfg)] == stream[28:32]
    assert stream[:4] != [p.text for p in data.batch_at(problems, 0, replace(cfg, seed=1))]


def test_partition_is_balanced_and_keeps_to_the_cap():
    g = np.random.default_rng(0)
    lengths = g.integers(10, 1000, 500)
    bins = data.partition(lengths, 32, cost=lengths * (1 + 1e-3 * lengths))
    assert sorted(i for b in bins for i in b) == list(range(500))
    work = [sum(lengths[i] * (1 + 1e-3 * lengths[i]) for i in b) for b in bins]
    assert max(work) < 1.05 * min(work)
    capped = data.partition(lengths, 32, cap=int(lengths.sum() / 32 * 1.1))
    assert max(sum(lengths[i] for i in b) for b in capped) <= lengths.sum() / 32 * 1.1
    assert data.partition(lengths, 32, cap=int(lengths.sum() / 32 * 0.9)) is None


def test_every_sample_is_trained_on_once_in_parts_that_no_rank_count_changes():
    cfg = replace(CFG, critic_updates=4, pack_len=200)
    lengths = np.random.default_rng(0).integers(5, 100, 256)
    whole = None
    for ranks in (1, 2, 4, 32):
        parts = data.assign(lengths, ranks, cfg, step=3)
        sets = [sorted(i for rank in part for b in rank for i in b) for part in parts]
        assert sorted(i for s in sets for i in s) == list(range(256))
        whole = whole or sets
        assert sets == whole
        for part in parts:
            assert len({len(rank) for rank in part}) == 1
            tokens = [sum(lengths[i] for b in rank for i in b) for rank in part]
            assert max(tokens) < 1.2 * min(tokens)
            assert all(sum(lengths[b]) <= 200 for rank in part for b in rank)


def test_short_samples_of_a_prompt_stay_together():
    """On two ranks all eight of each prompt; long ones, and few on many ranks, go one by one."""
    cfg = replace(CFG, algo="grpo", critic_updates=1, samples_per_prompt=8, pack_len=4096)
    lengths = np.random.default_rng(0).integers(20, 40, 256)

    def places(lengths: np.ndarray, ranks: int) -> list[set[int]]:
        """Of each prompt the packs that have samples of it."""
        part, = data.assign(lengths, ranks, cfg, step=0)
        found = [set() for _ in range(len(lengths) // 8)]
        for number, bin in enumerate(b for rank in part for b in rank):
            for i in bin:
                found[i // 8].add(number)
        return found

    assert all(len(packs) == 1 for packs in places(lengths, 2))
    assert sum(len(packs) > 1 for packs in places(lengths * 60, 2)) > 16
    assert set.union(*places(lengths[:16], 8)) == set(range(8))


def test_a_pack_is_aligned():
    samples = make_samples(5)
    p = data.pack(samples)
    assert len(p.tokens) == sum(s.length for s in samples) == p.cu_seqlens[-1]
    for s, a, b in zip(samples, p.cu_seqlens[:-1].tolist(), p.cu_seqlens[1:].tolist(), strict=True):
        n = len(s.prompt)
        assert p.tokens[a:b].tolist() == [*s.prompt, *s.ids]
        assert p.positions[a:b].tolist() == list(range(b - a))
        assert p.mask[a:b].tolist() == [False] * n + [True] * len(s.ids)
        assert torch.equal(p.engine_logp[a + n:b], torch.from_numpy(s.logp))
        assert p.rewards[a:b].tolist() == [0.0] * (b - a - 1) + [s.reward]
        assert p.advantages[a + n:b].tolist() == pytest.approx([s.advantage] * len(s.ids))
    assert not data.pack([]).mask.any()


def test_what_samples_begin_with_is_computed_once():
    samples = make_samples(12)
    samples.append(data.replace(samples[5], index=9))  # one twice
    samples.append(data.replace(samples[7], ids=samples[7].ids[:1], logp=samples[7].logp[:1]))  # one that ends in another
    p = data.pack(samples)
    heads = [(*s.prompt, *s.ids)[:k + 1] for s in samples for k in range(s.length)]
    assert len(p.computed) == len(set(heads)) < len(heads) == len(p.tokens)
    assert [heads[i] for i in p.computed[p.source].tolist()] == heads
