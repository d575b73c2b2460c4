"""Tests of --round_len (sampling in rounds) and --carry (continuing trajectories in the next step)."""

import dataclasses
import string
from collections import Counter

import numpy as np
import pytest
import ranks
import torch
from conftest import make_model, maths, run, run_ranks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import ckpt
import data
import dist
import model
import rollout
from configs import PRESETS
from data import Problem
from engine import first_stop, may_stop
from engines.torch_engine import TorchEngine
from log import read_metrics
from rollout import moves

CFG = dataclasses.replace(PRESETS["tiny-grpo"], prompts_per_step=4, round_len=2, carry=0.75)
PAIRS = tuple(a + b for a in string.ascii_lowercase for b in string.ascii_lowercase)
BFLOAT16 = 2 ** -7  # tolerance for exported weights: one unit in the last place of bfloat16
ANSWER = '''
def answer(problem, text, turn):
    """A text of several tokens, twice."""
    return f"<{turn}>" if turn < 3 else None
'''


@pytest.fixture(scope="module")
def carrying(base):
    """Returns a config whose rollouts work on 1.5 times as many prompts as a step trains on."""
    return dataclasses.replace(base, algo="grpo", critic_updates=1, round_len=5, carry=0.5, max_staleness=2)


def setup(folder: str, **settings):
    settings = dict(stop=tuple("abcdefghijklm"), samples_per_prompt=3, device="cpu", max_response_len=30,
                    max_staleness=2) | settings
    cfg = dataclasses.replace(CFG, model=folder, **settings)
    tokenizer = model.load_tokenizer(folder)
    texts = [f"{a}+{b}=" for a in range(10, 14) for b in range(5, 8)]
    problems = [Problem(text, tuple(tokenizer(text).input_ids), "1") for text in texts]
    return TorchEngine(folder, tokenizer, cfg), problems


def sampled(folders: list[str], settings: dict) -> tuple[list, list]:
    """Does one rollout for each step. Step i has the weights of folders[i]. Returns two lists with one entry
    for each step:

    1. (prompt_ids of the samples on all ranks, samples of this rank)
    2. the trajectories that this rank carries to the next step, finished or not"""
    dist.init("cpu", "float32")
    engine, problems = setup(folders[0], **settings)
    cfg, carried, steps, left = engine.cfg, [], [], []
    with rollout.make_grader(cfg) as grader:
        for step, folder in enumerate(folders):
            flight = {}
            for begin in range(0 if cfg.carry else step, step + 1):
                flight |= zip(data.numbers_at(begin, cfg), data.batch_at(problems, begin, cfg), strict=True)
            with engine.awake(model.files_weights(folder, torch.device("cpu"), torch.float32), version=step):
                sampling = rollout.Sampling(cfg.samples_per_prompt, cfg.temperature, cfg.max_response_len,
                                            (cfg.seed, rollout.TRAIN, step), step)
                samples, carried = rollout.rollout(engine, grader, flight, sampling, carried=carried)
            chosen = sorted(set().union(*dist.gather({s.prompt_id for s in samples})))
            steps.append((chosen, samples))
            left.append(carried)
    return steps, left


def content(samples) -> list[tuple]:
    return sorted((s.prompt_id, s.sample_id, s.prompt, s.ids.tolist(), s.token_versions.tolist(), s.text,
                   s.stopped, s.turns, s.reward, s.reason) for s in samples)


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("versions")
    return [tiny, make_model(root / "b", seed=1), make_model(root / "c", seed=2)] * 2


@pytest.fixture(scope="module")
def six_steps(folders):
    return run_ranks(1, sampled, folders, {})[0]


def test_each_step_has_its_prompts_and_none_is_lost_or_drawn_twice(six_steps):
    (steps, left), seen = six_steps, []
    for step, ((chosen, samples), rest) in enumerate(zip(steps, left, strict=True)):
        assert Counter(s.prompt_id for s in samples) == dict.fromkeys(chosen, 3) and len(chosen) == 4
        assert all(step - 2 <= data.step_of(i, CFG) <= step for i in chosen) and chosen == sorted(chosen)
        assert all(s.reason and (s.stopped or len(s.ids) == 30) for s in samples)
        seen += chosen
        still = {s.prompt_id for s in rest}
        assert len(still) == 3 and Counter(s.prompt_id for s in rest) == dict.fromkeys(still, 3)
        assert sorted([*seen, *still]) == list(range(7 + 4 * step))
    assert len(set(seen)) == 24


@pytest.mark.parametrize(("carry", "most"), [(1.0, 1), (2.0, 2)])
def test_no_token_is_older_than_the_maximum(tiny, carry, most):
    (steps, _), = run_ranks(1, sampled, [tiny] * 5, dict(carry=carry, max_staleness=most))
    ages = [step - s.token_versions.min() for step, (_, samples) in enumerate(steps) for s in samples]
    assert max(ages) == most


def test_where_samples_are_not_compared_they_come_one_by_one(folders):
    """GRPO needs all samples of a prompt. PPO does not, so a step takes the oldest finished samples."""
    settings = dict(algo="ppo", max_staleness=1)
    (steps, left), = run_ranks(1, sampled, folders[:4], settings)
    parts, seen = run_ranks(2, sampled, folders[:4], settings), []
    for step, ((numbers, samples), rest) in enumerate(zip(steps, left, strict=True)):
        keys = [(s.prompt_id, s.sample_id) for s in samples]
        assert len(keys) == 12 and keys == sorted(keys) and {i for i, _ in keys} == set(numbers)
        ended = [(s.prompt_id, s.sample_id) for s in rest if s.reason]
        assert all(step - 1 <= data.step_of(i, CFG) for i, _ in keys)
        assert not ended or min(ended) > max(keys)
        seen += keys
        assert len(rest) == 9
        assert sorted([*seen, *((s.prompt_id, s.sample_id) for s in rest)]) == [
            (i, j) for i in range(7 + 4 * step) for j in range(3)]
        both = sum((of_rank[step][1] for of_rank, _ in parts), [])
        assert content(both) == content(samples)
    counts = [count for _, samples in steps for count in Counter(s.prompt_id for s in samples).values()]
    assert 0 < min(counts) < 3 == max(counts)


def test_a_mean_over_prompts_gets_whole_prompts(tiny):
    settings = dict(advantage="return_whiten", aggregation="prompt", max_staleness=1)
    (steps, _), = run_ranks(1, sampled, [tiny] * 4, settings)
    for _, samples in steps:
        assert [*Counter(s.prompt_id for s in samples).values()] == [3] * 4


def drawn(folder: str, round_len: int) -> list[list[tuple[int, int]]]:
    """Does one rollout. Returns the keys (prompt_id, sample_id) that this rank requests in each call of
    `generate`."""
    dist.init("cpu", "float32")
    engine, problems = setup(folder, round_len=round_len, carry=0.0)
    generate, rounds = engine.generate, []
    engine.generate = lambda requests, *args: (rounds.append(list(requests)), generate(requests, *args))[1]
    flight = dict(enumerate(data.batch_at(problems, 0, engine.cfg)))
    weights = model.files_weights(folder, torch.device("cpu"), torch.float32)
    with rollout.make_grader(engine.cfg) as grader, engine.awake(weights, version=0):
        rollout.rollout(engine, grader, flight, rollout.Sampling(3, 1.0, 30, (0,), 0), carried=[])
    return rounds


def test_a_round_as_long_as_a_response_deals_samples_once(folders):
    settings = dict(round_len=30, carry=0.0)
    folders = folders[:2]  # nothing is carried from step to step
    whole = [content(samples) for _, samples in run_ranks(1, sampled, folders, settings)[0][0]]
    assert all(len(step) == 12 for step in whole)
    for count in (2, 3):
        parts = [steps for steps, left in run_ranks(count, sampled, folders, settings)]
        assert [content(sum((of_rank[i][1] for of_rank in parts), [])) for i in range(2)] == whole
        rounds = run_ranks(count, drawn, folders[0], 30)
        assert all(len(of_rank) == 1 for of_rank in rounds)
        assert all({prompt for prompt, _ in only} == set(range(4)) for (only,) in rounds)
        assert sorted(sum((only for (only,) in rounds), [])) == [(i, j) for i in range(4) for j in range(3)]


def test_a_rollout_after_a_signal_samples_nothing(tiny, monkeypatch):
    """So no evaluation set is sampled after a signal."""
    engine, problems = setup(tiny)
    monkeypatch.setattr(engine, "generate", None)
    monkeypatch.setattr(dist, "stop_signal", ["SIGTERM", 0.0])
    sampling = rollout.Sampling(3, 1.0, 30, (0,), 0)
    assert rollout.rollout(engine, None, {0: problems[0]}, sampling) == ([], [])


def test_every_token_is_of_the_weights_it_says(folders, six_steps):
    """A token's version is the step whose weights sampled it. With the weights of that step, the trainer and
    the engine compute the same log-prob."""
    most = 0
    for step, (_, samples) in enumerate(six_steps[0]):
        p = data.pack(samples, step)
        versions = torch.full(p.tokens.shape, -1)
        versions[p.mask] = torch.from_numpy(np.concatenate([s.token_versions for s in samples])).long()
        assert torch.equal(p.fresh_tokens, (versions == step).nonzero()[:, 0])
        for version in range(step + 1):
            with torch.no_grad():
                logp, _ = model.load_policy(folders[version])(p, 1.0)
            gap = (logp - p.engine_logp)[versions == version].abs()
            assert not len(gap) or float(gap.max()) < 1e-4
        most = max(most, *(len(set(s.token_versions.tolist())) for s in samples))
    assert most == 3


def test_four_ranks_have_the_trajectories_of_one(folders, six_steps):
    parts = run_ranks(4, sampled, folders[:4], {})
    for step, (chosen, samples) in enumerate(six_steps[0][:4]):
        assert all(steps[step][0] == chosen for steps, _ in parts)
        assert content(sum((steps[step][1] for steps, _ in parts), [])) == content(samples)
        assert content(sum((left[step] for _, left in parts), [])) == content(six_steps[1][step])
    for steps, _ in parts:  # all 3 samples of a prompt are on one rank
        assert all(set(Counter(s.prompt_id for s in samples).values()) <= {3} for _, samples in steps)


def test_ranks_go_on_with_equally_many():
    rng = np.random.default_rng(0)
    for _ in range(200):
        held = [[(rank, i) for i in range(rng.integers(0, 12))] for rank in range(rng.integers(1, 7))]
        target, counts = moves(held), [len(keys) for keys in held]
        assert set(target) <= set(sum(held, [])) and all(target[key] != key[0] for key in target)
        for key, rank in target.items():
            counts[key[0]] -= 1
            counts[rank] += 1
        assert max(counts) - min(counts) <= 1 and sum(counts) == sum(map(len, held))
        least = sum(map(len, held)) // len(held)
        assert len(target) == max(sum(max(0, len(keys) - least - 1) for keys in held),
                                  sum(max(0, least - len(keys)) for keys in held))


def test_without_carry_rounds_change_neither_prompts_nor_versions(tiny):
    steps, left = run_ranks(2, sampled, [tiny] * 2, dict(carry=0.0))[0]
    assert [chosen for chosen, _ in steps] == [[0, 1, 2, 3], [4, 5, 6, 7]] and left == [[], []]
    assert all((s.token_versions == step).all() for step in (0, 1) for s in steps[step][1])


@pytest.mark.parametrize("round_len", [1, 3])
def test_a_stop_string_that_a_round_cuts_ends_the_response(tiny, round_len):
    settings = dict(round_len=round_len, stop=PAIRS, prompts_per_step=8)
    samples = run_ranks(1, sampled, [tiny], settings)[0][0][0][1]
    tokenizer, ended = model.load_tokenizer(tiny), 0
    for s in samples:
        before = tokenizer.decode(s.ids[:-1].tolist())
        assert not any(stop in before for stop in PAIRS)
        has = any(stop in s.text for stop in PAIRS)
        assert s.stopped or not has
        ended += has
    assert ended > 3


def test_first_stop_is_the_first_end_of_a_stop_string_over_the_cut(tiny):
    tokenizer, rng = model.load_tokenizer(tiny), np.random.default_rng(0)
    stop, found = ("abc", "ba", "é"), 0
    for _ in range(500):
        text = "".join(rng.choice([*"abcé "], 12))
        ids = np.array(tokenizer(text).input_ids)
        cut = int(rng.integers(1, len(ids)))
        before, after = ids[:cut], ids[cut:]
        ends = [i for i in range(len(after) + 1)
                if any(s in tokenizer.decode(ids[:cut + i].tolist()) for s in stop)]
        first = ends[0] if ends else 0
        if ends[:1] != [0]:  # no stop string lies in `before`
            assert first_stop(before, after, stop, tokenizer) == (first if first <= 8 + 3 else 0)
            found += first > 0
    assert found > 100 and first_stop(before, after, (), tokenizer) == 0


def small_tokenizers():
    """Returns tokenizers whose tokens may be parts of characters: byte-level BPE as in Qwen, and metaspace
    with bytes as in Llama 2, which removes the space at the start of a text."""
    texts = ["Die Straße: né à Köln. User: 你好。 </answer>", "Human: ok. Assistant: é。 User: "] * 3
    level = Tokenizer(models.BPE())
    level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    level.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    level.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    vocab = {f"<0x{i:02X}>": i for i in range(256)}
    vocab |= {piece: 256 + i for i, piece in enumerate("▁ : :▁ ▁e er r▁ é ▁: er:".split())}
    meta = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    meta.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    return [PreTrainedTokenizerFast(tokenizer_object=t) for t in (level, meta)]


@pytest.mark.parametrize("stop", [("er:", "。"), ("r: ", "é"), (" e",), (": ",), ()])
def test_a_token_after_which_a_response_stops_may_stop_it(stop):
    rng = np.random.default_rng(0)
    for tokenizer in small_tokenizers():
        table = may_stop(tokenizer, len(tokenizer) + 9, stop)
        whole = [i for i in range(len(tokenizer)) if set(tokenizer.decode([i])) <= set("er: é")]
        pieces = [*whole, *tokenizer("é。").input_ids]
        found = 0
        for _ in range(400):
            ids = rng.choice(pieces, 12)
            for t in range(1, 12):
                if any(s in tokenizer.decode(ids[:t].tolist()) for s in stop):
                    break
                if first_stop(ids[:t], ids[t:t + 1], stop, tokenizer):
                    assert table[ids[t]], tokenizer.decode(ids[:t + 1].tolist())
                    found += 1
        assert bool(found) == bool(stop) and not table[len(tokenizer):].any()


@pytest.mark.parametrize("before", ["😀" * 4, "你😀" * 4, "😀 r " * 3])
@pytest.mark.parametrize("stop", ["\n", "\ner:"])
def test_a_stop_string_is_found_after_characters_of_several_tokens(before, stop):
    level, meta = small_tokenizers()
    # `meta` has bytes as tokens, also the line break, and decodes them only if all are valid.
    of_meta = [*(before + "\n").encode(), *meta.convert_tokens_to_ids(["er:"][:len(stop) - 1])]
    for tokenizer, ids in ((level, level(before + stop).input_ids), (meta, of_meta)):
        assert tokenizer.decode(ids) == before + stop
        ends = [first_stop(ids[:t], ids[t:t + 1], (stop,), tokenizer) for t in range(len(ids))]
        assert ends == [0] * (len(ids) - 1) + [1]
    wrong = meta.decode(0x9F)
    assert first_stop([], [0x9F], (wrong,), meta) == 1  # the whole response may begin with a wrong character


def test_turns_and_rounds_go_together(tiny, tmp_path):
    """The environment answers at the end of a turn, not of a round."""
    (tmp_path / "env.py").write_text(ANSWER)
    settings = dict(env=f"{tmp_path}/env.py:answer", max_response_len=60, grade_deadline=2.0)
    one, left = run_ranks(1, sampled, [tiny] * 2, settings)[0]
    tokenizer = model.load_tokenizer(tiny)
    eos = tokenizer.eos_token_id
    for _, samples in one:
        assert Counter(s.turns for s in samples)[3] > 3
        for s in samples:
            assert s.text == tokenizer.decode([i for i in s.ids.tolist() if i != eos])
            for turn in range(1, s.turns):
                ids = tokenizer(f"<{turn}>", add_special_tokens=False).input_ids
                assert f"<{turn}>" in s.text and len(ids) > 1
            assert int((~s.is_sampled).sum()) == (s.turns - 1) * len(ids) if s.turns > 1 else True
    two = run_ranks(2, sampled, [tiny] * 2, settings)
    for step in (0, 1):
        assert content(sum((steps[step][1] for steps, _ in two), [])) == content(one[step][1])


def test_a_reward_of_the_environment_stays_with_its_trajectory(tiny, tmp_path):
    (tmp_path / "env.py").write_text("from reward import Reply\n\ndef pays(problem, text, turn):\n"
                                     "    return Reply('<>', reward=0.75) if turn == 1 else None\n")
    settings = dict(env=f"{tmp_path}/env.py:pays", algo="ppo", max_response_len=60, grade_deadline=2.0)
    parts, later = run_ranks(2, sampled, [tiny] * 2, settings), 0
    for s in (s for steps, _ in parts for _, samples in steps for s in samples if s.turns == 2):
        assert s.reward == 0.75 and s.reason == "partial"
        later += len(set(s.token_versions.tolist())) > 1
    assert later > 0


def test_every_prompt_begins_in_one_step():
    for count, carry in ((4, 0.0), (4, 0.5), (5, 0.3), (1, 0.9)):
        cfg = dataclasses.replace(CFG, prompts_per_step=count, carry=carry)
        numbers = [(i, step) for step in range(6) for i in data.numbers_at(step, cfg)]
        assert [i for i, _ in numbers] == list(range(6 * count + cfg.extra_prompts))
        assert all(data.step_of(i, cfg) == step for i, step in numbers)


def test_what_is_carried_is_written_and_read_as_it_is(six_steps, tmp_path):
    samples = sum(six_steps[1], [])
    ckpt.write_samples(tmp_path / "carried-00000.json", samples[:5])
    ckpt.write_samples(tmp_path / "carried-00001.json", samples[5:])
    read = ckpt.read_carried(tmp_path)
    assert sorted(map(repr, read)) == sorted(map(repr, samples))
    assert {(s.ids.dtype.name, s.logp.dtype.name) for s in read} == {("int32", "float32")}
    assert ckpt.read_carried(tmp_path / "nothing") == []


@pytest.fixture(scope="module")
def whole(carrying, tmp_path_factory):
    out = tmp_path_factory.mktemp("carried") / "a"
    return out, *run(carrying, out, ranks=2)


def test_a_carrying_run_is_the_same_on_one_rank(carrying, whole, tmp_path):
    _, rows, weights = whole
    assert sum(row["carried"] for row in rows[:-1]) > 5
    assert max(row["staleness/max"] for row in rows[:-1]) > 0
    other_rows, other = run(carrying, tmp_path / "1", ranks=1)
    for a, b in zip(maths(rows), maths(other_rows), strict=True):
        # The metric unique_share differs, because it depends on which samples share a pack.
        a, b = ({k: v for k, v in row.items() if k != "unique_share"} for row in (a, b))
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    assert all(torch.allclose(weights[name], other[name], rtol=BFLOAT16) for name in weights)


def test_a_carrying_run_that_is_stopped_while_it_samples_ends_the_same(carrying, whole, tmp_path):
    _, rows, weights = whole
    stopping = dataclasses.replace(carrying, out=str(tmp_path / "s"))
    assert run_ranks(2, ranks.stopped, stopping, ranks.has_steps, stopping, 1) == ["", ""]
    assert len(read_metrics(tmp_path / "s")) < len(rows)
    other_rows, other = run(carrying, tmp_path / "s", ranks=2)
    assert maths(other_rows) == maths(rows) and all(torch.equal(weights[k], other[k]) for k in weights)


def test_ppo_learns_from_carried_trajectories_too(base, tmp_path):
    cfg = dataclasses.replace(base, round_len=5, carry=0.5, steps=3, max_staleness=1)
    rows, _ = run(cfg, tmp_path / "p")
    assert sum(row["carried"] for row in rows[:-1]) > 2 and rows[0]["logp_gap/max"] < 1e-4
