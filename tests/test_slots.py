"""Tests of the torch engine's slots and pages, without a GPU: families.paged_attention replaces the kernel.
tests/test_z_engines.py tests both engines' contract."""

import contextlib
import dataclasses

import families
import numpy as np
import pytest
import ranks
import torch

import configs
import data
import dist
import model
from configs import PRESETS
from engines.torch_engine import Response, TorchEngine, uniforms

KEY, VERSION = (0, 1, 0), 3
# Prompts of 1 token, of exactly one and two pages of 8 tokens, around a page, and of more pages.
LENGTHS = (1, 2, 7, 8, 9, 16, 17, 29)


@pytest.fixture(autouse=True)
def several_packs_of_prompts(monkeypatch):
    monkeypatch.setattr(configs, "PREFILL", 64)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Returns a model folder, its tokenizer, its policy, and prompt_id -> prompt."""
    folder = families.make(tmp_path_factory.mktemp("slots"), "qwen2-untied")
    ids = np.random.default_rng(0).integers(5, 90, (len(LENGTHS), max(LENGTHS)))
    prompts = {i: ids[i, :n].tolist() for i, n in enumerate(LENGTHS)}
    return folder, model.load_tokenizer(folder), model.load_policy(folder), prompts


def make_engine(case, page=0, slots=5, look=4, **changes):
    cfg = dataclasses.replace(PRESETS["tiny-ppo"], model=case[0], max_prompt_len=32, max_response_len=24,
                              max_num_seqs=slots, stop=(), **changes)
    engine = TorchEngine(case[0], case[1], cfg)
    engine.page, engine.look, engine.kernel = page, look, families.paged_attention
    engine._pages = lambda wanted, size: wanted  # a CPU's memory is not shared out
    return engine


def sampled(engine, case, requests, limits, temperature=1.0, top_p=1.0, cut=0):
    """Returns k -> Sample. cut: number of samples after which `generate` is abandoned; 0: never"""
    with engine.awake(dist.full_weights(case[2]), VERSION):
        if cut:
            stream = engine.generate(requests, limits, temperature, KEY, VERSION, top_p)
            for _ in range(cut):
                next(stream)
            stream.close()
        samples = list(engine.generate(requests, limits, temperature, KEY, VERSION, top_p))
    return {(s.prompt_id, s.sample_id): s for s in samples}


def requests_of(case, n=3):
    requests = {(i, j): prompt for i, prompt in case[3].items() for j in range(n)}
    limits = {(i, j): 24 - 5 * j - i for i, j in requests}
    return requests, limits


def naive(hf, eos, prompt, ids, limit, k, temperature, top_p):
    """Returns the tokens that transformers' model draws after `prompt` and each beginning of the response
    `ids`, and their log-probs. If `ids` was sampled rightly, these are the tokens of `ids`."""
    with torch.no_grad():
        of_tokens = hf(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1:-1]
    assert len(ids) == limit or ids[-1] in eos
    assert not eos & set(ids[:-1])
    tokens, logps, draws = [], [], uniforms((*KEY, *k), limit)
    for logits, draw in zip(of_tokens, draws[:len(ids)], strict=True):
        if temperature == 0:
            tokens.append(int(logits.argmax()))
            logps.append(float(logits.log_softmax(-1)[tokens[-1]]))
            continue
        probs = (logits.double() / temperature).softmax(-1).numpy()
        order = np.argsort(-probs)
        outside = np.cumsum(probs[order]) - probs[order] >= top_p
        probs[order[outside]] = 0
        probs /= probs.sum()
        tokens.append(int(np.searchsorted(np.cumsum(probs), draw, side="right")))
        logps.append(float(np.log(probs[tokens[-1]])))
    return tokens, logps


@pytest.mark.parametrize("temperature,top_p", [(1.0, 1.0), (0.7, 0.8), (0, 1.0)])
def test_tokens_and_log_probs_are_those_of_transformers(case, temperature, top_p):
    """There are more requests than slots, and prompts of one page and more."""
    hf, (requests, limits) = families.original(case[0]), requests_of(case)
    engines = [make_engine(case, page) for page in (0, 8)]
    each = [sampled(engine, case, requests, limits, temperature, top_p) for engine in engines]
    eos = engines[0].eos
    assert all(samples.keys() == requests.keys() for samples in each)
    for k in requests:
        ids = each[0][k].ids.tolist()
        tokens, logps = naive(hf, eos, requests[k], ids, limits[k], k, temperature, top_p)
        assert tokens == ids
        for s in (samples[k] for samples in each):
            assert s.ids.tolist() == ids and s.stopped == (ids[-1] in eos)
            assert np.abs(s.logp - logps).max() < 1e-5


def test_tokens_are_equal_whatever_the_pages_the_slots_and_the_looks_are(case):
    requests, limits = requests_of(case, n=1)
    plain = sampled(make_engine(case), case, requests, limits, 1.3)
    text = next(s.text for s in plain.values() if len(s.text) > 12)
    engines = [make_engine(case, page, slots, look)
               for page, slots, look in [(0, 16, 1), (8, 5, 3), (4, 1, 16), (256, 3, 5)]]
    for stop in ((), (text[5:8], "=", "9")):
        for engine in engines:
            engine.cfg = dataclasses.replace(engine.cfg, stop=stop)
        first, *others = (sampled(engine, case, requests, limits, 1.3) for engine in engines)
        assert any(s.stopped for s in first.values()) or not stop
        for other in others:
            for k, s in first.items():
                assert (other[k].ids.tolist(), other[k].stopped) == (s.ids.tolist(), s.stopped)


@pytest.mark.parametrize("page", [0, 8])
def test_on_a_gpu_the_cache_takes_no_more_than_the_engines_share(case, page, monkeypatch):
    """Also in fp32, where a page is a whole row. The share has room for half of all responses."""
    waiting = [Response((0, j), (5,) * 32, 24) for j in range(64)]
    engine = make_engine(case, page, slots=64)
    every = sum(x.nbytes for x in engine._allocate(waiting).cache.layers)
    del engine._pages
    engine.unload()
    engine.device = torch.device("cuda")
    c = engine.config
    beside = engine.cfg.torch_buffers(c.hidden_size, c.intermediate_size, c.vocab_size, number_bytes=4)
    beside += sum(p.nbytes for p in engine.policy.parameters())
    total = (beside + every / 2) / engine.cfg.engine_share
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, total))
    cached = sum(x.nbytes for x in engine._allocate(waiting).cache.layers)
    assert every / 3 < cached <= every / 2


@pytest.mark.parametrize("page", [0, 8])
def test_packs_of_prompts_are_short_whatever_pack_len_is(case, page, monkeypatch):
    """In a run, --pack_len is chosen for the memory of training, when no engine has a cache."""
    requests, limits = requests_of(case, n=1)
    tokens = []
    for limit in (64, 20):  # 20: less than the longest prompt, which is a pack of its own
        monkeypatch.setattr(configs, "PREFILL", limit)
        engine = make_engine(case, page, slots=16, pack_len=4096)
        hidden, longest = engine.policy.hidden, []

        def recorded(ids, *rest, hidden=hidden, longest=longest, **options):
            longest.append(ids.numel() if "segments" in options else 0)
            return hidden(ids, *rest, **options)

        monkeypatch.setattr(engine.policy, "hidden", recorded)
        tokens.append({k: s.ids.tolist() for k, s in sampled(engine, case, requests, limits).items()})
        assert max(longest) <= max(limit, max(LENGTHS) - 1)
    assert tokens[0] == tokens[1]


def test_responses_wait_for_free_pages(case, monkeypatch):
    """The cache has room for the pages of the longest request and little more."""
    requests, limits = requests_of(case)
    plain = sampled(make_engine(case, 8), case, requests, limits)
    engine = make_engine(case, 8)
    monkeypatch.setattr(engine, "_pages", lambda wanted, size: 9)
    samples = sampled(engine, case, requests, limits)
    assert all(samples[k].ids.tolist() == s.ids.tolist() for k, s in plain.items())
    monkeypatch.setattr(engine, "_pages", lambda wanted, size: 5)
    with pytest.raises(RuntimeError, match="no room for 46 tokens; needed: "):
        sampled(engine, case, requests, limits)


@pytest.mark.parametrize("page", [0, 8])
def test_an_abandoned_call_leaves_nothing_behind(case, page):
    requests, limits = requests_of(case)
    plain, again = (sampled(make_engine(case, page), case, requests, limits, cut=cut) for cut in (0, 2))
    assert all(again[k].ids.tolist() == s.ids.tolist() for k, s in plain.items())


def test_an_abandoned_response_writes_to_no_page_of_the_next_call(case):
    """The next call has 3 responses, but a decoding step computes 4 slots. The abandoned call has filled the
    fourth."""
    requests = {(0, j): case[3][7] for j in range(5)}
    limits = {k: 1 if k == (0, 0) else 24 for k in requests}
    after = {(0, j): 20 for j in range(3)}
    plain = sampled(make_engine(case, 1, slots=4), case, {k: requests[k] for k in after}, after)
    engine = make_engine(case, 1, slots=4, look=1)
    with engine.awake(dist.full_weights(case[2]), VERSION):
        stream = engine.generate(requests, limits, 1.0, KEY, VERSION)
        assert next(stream).key == (0, 0) and len(engine.slots.responses) == 4
        stream.close()
        for s in engine.generate({k: requests[k] for k in after}, after, 1.0, KEY, VERSION):
            assert s.ids.tolist() == plain[s.key].ids.tolist()
            assert np.abs(s.logp - plain[s.key].logp).max() < 1e-5


def test_a_prompt_is_read_once(case):
    engine, reads = make_engine(case, 8, slots=8), []
    hidden = engine.policy.hidden
    engine.policy.hidden = lambda tokens, *rest, **options: (
        reads.append(tokens.numel()), hidden(tokens, *rest, **options))[1]
    requests = {(0, j): case[3][7] for j in range(8)}  # 29 tokens: 3 full pages, and 4 tokens on a fourth
    with engine.awake(dist.full_weights(case[2]), VERSION):
        stream = engine.generate(requests, {k: 4 if k == (0, 5) else 12 for k in requests}, 1.0, KEY, VERSION)
        assert next(stream).key == (0, 5) and reads == [28]
        pages = [page for r in engine.slots.responses for page in r.pages]
        assert len(pages) == len({*pages}) == 7 * 5  # each response has pages of its own
        stream.close()


@pytest.mark.parametrize("page", [0, 8])
def test_a_signal_ends_sampling_although_no_response_ends(case, page, monkeypatch):
    """The other response is not finished, and the engine can be used again."""
    engine, limits = make_engine(case, page, look=1), {(0, 0): 1, (1, 0): 24}
    requests = {k: case[3][k[0]] for k in limits}
    whole = sampled(engine, case, requests, limits)
    assert len(whole[1, 0].ids) > 8
    with engine.awake(dist.full_weights(case[2]), VERSION):
        stream = engine.generate(requests, limits, 1.0, KEY, VERSION)
        steps = dist.CURRENT.steps
        assert next(stream).key == (0, 0) and dist.CURRENT.steps > steps  # of guard.watch's clock
        monkeypatch.setattr(dist, "stop_signal", ["SIGTERM", 0.0])
        assert list(stream) == []
    monkeypatch.undo()
    again = sampled(engine, case, requests, limits)
    assert all(again[k].ids.tolist() == whole[k].ids.tolist() for k in limits)


def test_a_hung_engine_is_in_a_phase(case, monkeypatch):
    """Waking, the sync of weights and falling asleep are watched, also inside another phase."""
    engine, seen = make_engine(case), []

    def weights():
        for pair in dist.full_weights(case[2]):
            seen.append((dist.CURRENT.name, dist.CURRENT.watched))
            yield pair

    monkeypatch.setattr(engine, "unload", lambda: seen.append((dist.CURRENT.name, dist.CURRENT.watched)))
    for outer in (contextlib.nullcontext(), dist.watched("outer")):
        with outer, engine.awake(weights(), VERSION):
            watched = dist.CURRENT.watched
        assert {*seen[:-1]} == {("load", True)} and seen[-1] == ("unload", True)
        seen.clear()
    assert watched and not dist.CURRENT.watched


def test_each_pack_restarts_the_clock(case):
    samples = ranks.make_samples(8, vocabulary=90)
    before = dist.CURRENT.steps
    for _ in range(3):
        case[2](data.pack(samples), 1.0)
    assert dist.CURRENT.steps == before + 3


def test_first_tokens_have_the_policys_probabilities(case):
    """A chi-square test. Its statistic is normal with mean `df` and variance 2 df, for many tokens."""
    requests = {(0, j): case[3][4] for j in range(4000)}
    samples = sampled(make_engine(case, 8, slots=512), case, requests, dict.fromkeys(requests, 1), 0.8)
    counts = np.bincount([s.ids[0] for s in samples.values()], minlength=case[2].config.vocab_size)
    with torch.no_grad():
        logits = families.original(case[0])(torch.tensor([case[3][4]])).logits[0, -1]
    expected = 4000 * (logits.double() / 0.8).softmax(-1).numpy()
    often = expected > 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    df = len(observed) - 1
    assert df > 20 and ((observed - expected) ** 2 / expected).sum() < df + 4 * (2 * df) ** 0.5
