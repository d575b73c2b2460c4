"""Tests of the presets against their sources, of rewards, and of tools/evaluate.py."""

import dataclasses
import itertools
import json
import os
import platform
import random
import re
import resource
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import ranks
import torch
import transformers
from conftest import ROOT, forked, make_model, maths, run, run_ranks, taught

import configs
import data
import dist
import log
import reward
import rollout
from bench import shape, tasks
from configs import PRESETS, parse
from guard.checks import check_parts
from guard.files import read_jsonl
from guard.messages import UserError
from model import load_tokenizer
from rollout import accuracy
from tools import evaluate
from tools.evaluate import (
    EVAL_FLAGS,
    eval_configs,
    load_candidate,
    main,
    model_name,
    paired_differences,
)

# The expected values of the presets. Comments name the sources, papers by their arXiv numbers.
ORZ = dict(  # Open-Reasoner-Zero (2503.24290): playground/orz_7b_ppo.py
    algo="ppo", template="orz", prompts_per_step=128, samples_per_prompt=64, policy_updates=1,
    critic_updates=12, policy_lr=1e-6, critic_lr=5e-6, warmup_updates=50, lr_decay="constant",
    betas=(0.9, 0.95), weight_decay=0.0, grad_clip=1.0, max_prompt_len=2048, max_response_len=8000,
    model_len=8192, pack_len=0, temperature=1.0, stop=("User:", "Human:", "Assistant:", "</answer>"),
    gamma=1.0, lam=1.0, clip_low=0.2, clip_high=0.2, value_clip=0.2, kl_coef=0.0, kl_estimator="k3",
    entropy_coef=0.0, epochs=20, save_every=50, eval_every=10, engine_share=0.7, tp=1, mask_truncated=False,
    ref_refresh=True, resample_rounds=0, overlong_buffer=0, mismatch="token-truncate", passes_per_step=1,
    nonstop_penalty=0.0, drop_uniform=False, extractor=("orz",), reward=("math",), system_prompt="",
    mismatch_bounds=(0.0, 2.0),
    adam_eps=1e-8, eval_top_p=1.0)  # the defaults of torch's AdamW and of vLLM
# orz_7b_ppo.py with the option use_grpo. Aggregation and ratio are from ORZ's loss function.
GRPO = ORZ | dict(algo="grpo", critic_updates=1, engine_share=0.75, advantage="group_mean_std", ratio="token",
                  aggregation="token")
OWN_KL = dict(kl_coef=1e-3, ref_refresh=False)  # our own KL weight, from no source
TABLE = {"orz-7b": ORZ,
    "orz-0.5b": ORZ | dict(engine_share=0.75),  # orz_0p5b_ppo.py
    "orz-0.5b-1gpu": ORZ | dict(engine_share=0.75),  # orz_0p5b_ppo_1gpu.py
    "orz-1.5b": ORZ | dict(engine_share=0.7),  # orz_1p5b_ppo.py
    "orz-32b": ORZ | dict(tp=4, max_response_len=16384, model_len=2048 + 16384,
                          eval_response_len=32768),  # tp is from orz_32b_ppo.py; the lengths are a guess
    "orz-7b-grpo": GRPO | dict(advantage="group_mean_whiten"),
    "orz-qwen3.5-2b": ORZ | dict(engine_share=0.7),  # as orz-1.5b
    "gsm8k-0.5b-1gpu": {},  # no source: our own
    "gsm8k-qwen3.5-0.8b-1gpu": {},  # no source: our own
    # thinkingmachines.ai/blog/lora: 10 times the rate of full training, alpha 32
    "gsm8k-7b-1gpu": dict(lora=32, lora_alpha=32, policy_lr=1e-5, algo="grpo"),
    "orz-7b-lora": ORZ | dict(lora=32, lora_alpha=32, policy_lr=1e-5, critic_lr=5e-5),
    # 2503.14476 section 4.1 (batch, updates, warm-up, lengths, clip, evaluation), eq. 11 and 13; verl's
    # recipe/dapo/run_dapo_qwen2.5_32b.sh (prompt length, weight decay) and fsdp_workers.py (betas)
    "dapo-7b": GRPO | dict(
        template="chat", extractor=("dapo",), stop=(), prompts_per_step=512, samples_per_prompt=16,
        policy_updates=16, clip_high=0.28, resample_rounds=4, overlong_buffer=4096, max_response_len=20480,
        model_len=22528, warmup_updates=20 * 16, reward=("math=2",), betas=(0.9, 0.999),
        weight_decay=0.1, eval_samples=(32,), eval_temperature=(1.0,), eval_top_p=0.7),
    "dr-grpo-7b": GRPO | dict(advantage="group_mean", aggregation="max_len"),  # 2503.20783 section 3.2
    "rloo-7b": GRPO | dict(advantage="leave_one_out"),  # 2402.14740 section 3
    "reinforce++-7b": GRPO | OWN_KL | dict(advantage="return_whiten", samples_per_prompt=1,
                                           prompts_per_step=1024, kl_in="reward", kl_estimator="k1"),
    "reinforce++-baseline-7b": GRPO | OWN_KL | dict(advantage="group_mean_whiten", kl_estimator="k2"),
    "gspo-7b": GRPO | dict(ratio="sequence", aggregation="response", clip_low=3e-4, clip_high=4e-4,
                           policy_updates=4),  # 2507.18071 eq. 5 to 7, section 5.1 (clips, updates)
    "cispo-7b": GRPO | dict(  # 2506.13585 eq. 4, section 3.1 (updates, no lower clip), section 3.2 (AdamW)
        ratio="clipped", policy_updates=16, clip_low=1.0, clip_high=4.0, adam_eps=1e-15, betas=(0.9, 0.95)),
    # 2510.13786 section 2 (lengths), section 3.1 (k = 8 updates of 48 prompts), section 3.2 (prompts with a
    # pass rate of 0.9 are removed), section 4 (loss), A.3 (AdamW)
    "scale-rl-7b": GRPO | dict(
        advantage="group_mean_batch_std", ratio="clipped", aggregation="prompt", drop_uniform=True,
        clip_low=1.0, clip_high=4.0, prompts_per_step=8 * 48, samples_per_prompt=16, policy_updates=8,
        max_response_len=12288 + 2048, model_len=16384, policy_lr=5e-7, warmup_updates=100, skip_solved=0.9,
        weight_decay=0.01, adam_eps=1e-15),
    "open-r1-1.5b-grpo": GRPO | dict(  # Open-R1's recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml
        template="chat", reward=("math", "format", "tags"), extractor=("answer_tag",), stop=(), epochs=1,
        system_prompt="You are a helpful AI Assistant that provides well-reasoned and detailed responses. "
        "You first think about the reasoning process as an internal monologue and then provide the user with "
        "the answer. Respond in the following format: <think>\n...\n</think>\n<answer>\n...\n</answer>",
        prompts_per_step=7 * 16 * 4 // 16, samples_per_prompt=16, aggregation="response", max_prompt_len=512,
        max_response_len=1024, model_len=1536, policy_lr=2e-5, lr_decay="cosine",
        warmup_updates=0.1, betas=(0.9, 0.999)),
    # 2411.15124 table 21; Open-Instruct's docs/tulu3.md (GPUs × local_mini_batch_size, episodes) and
    # ppo_vllm_thread_ray_gtrl.py (torch's AdamW, KL estimator)
    "rlvr-8b": ORZ | dict(
        template="chat", reward=("math=10",), nonstop_penalty=10.0, stop=(), kl_coef=0.05, kl_in="reward",
        kl_estimator="k1", ref_refresh=False, lam=0.95, prompts_per_step=7 * 32, samples_per_prompt=1,
        critic_updates=1, passes_per_step=4, max_response_len=2048, model_len=4096, policy_lr=3e-7,
        critic_lr=3e-7, lr_decay="linear", warmup_updates=0, betas=(0.9, 0.999), weight_decay=0.01, epochs=0,
        total_episodes=10_000_000, extractor=("boxed", "gsm8k=last_number"))}
PRODUCTION_RANKS = {"orz-0.5b": 8, "orz-0.5b-1gpu": 1, "orz-1.5b": 16,  # the others have 32
                    "orz-qwen3.5-2b": 16}
DEBUG = dict(prompts_per_step=16, samples_per_prompt=2, critic_updates=1, engine_share=0.5)
# Preset -> what its source says: ((samples per step, policy updates per step, samples per update), place in
# the source). None: the source does not say.
OF_ORZ = (128 * 64, 1, 128 * 64), "ORZ's playground files"
BATCHES = {name: OF_ORZ for name in TABLE if name.startswith("orz-")} | {
    "dapo-7b": ((512 * 16, 16, 512), "sec. 4.1"),
    "dr-grpo-7b": ((128 * 8, 8, 128),
                   "the script for Qwen2.5-7B in the paper's code; the preset has ORZ's batch instead"),
    "gspo-7b": ((None, 4, None), "sec. 5.1"), "cispo-7b": ((None, 16, None), "sec. 3.1"),
    "scale-rl-7b": ((8 * 768, 8, 768), "sec. 3.1 (PPO-off-policy-8) and A.3"),
    "open-r1-1.5b-grpo": ((7 * 16 * 4, 1, 448), "config_demo.yaml"),
    "rlvr-8b": ((7 * 32, 4, 224), "table 21, Open-Instruct's tulu3.md")}


def test_the_batches_of_the_presets_are_those_of_the_papers():
    """A preset's row in docs/algorithms.md has the word "instead" if its batch differs from the source."""
    for name, (paper, source) in BATCHES.items():
        p = PRESETS[name]
        ours = p.samples_per_step, p.updates_per_step, p.samples_per_step // p.policy_updates
        pairs = [["–" if x is None else f"{x:,}" for x in xs] for xs in (ours, paper)]
        line = f"| `{name}` | {' | '.join(pairs[0])} | {' / '.join(pairs[1])} | {source} |"
        assert line in (ROOT / "docs/algorithms.md").read_text(encoding="utf-8").splitlines(), line
        assert "instead" in source or all(x in (None, y) for x, y in zip(paper, ours, strict=True)), name


@pytest.mark.parametrize("name", [n for n in PRESETS if not n.startswith("tiny")])
def test_every_preset_is_its_recipe(name):
    preset, want = PRESETS[name], TABLE[name]
    assert {k: getattr(preset, k) for k in want} == want
    production, debug = (parse([name, "--layout", layout]) for layout in ("production", "debug"))
    assert (production.ranks, debug.ranks) == (PRODUCTION_RANKS.get(name, 32), 8)
    assert {k: getattr(production, k) for k in want} == want
    want = want | (DEBUG if name.startswith("orz-") else {})
    assert {k: getattr(debug, k) for k in want} == want


# Preset -> changes. Each change takes away one part of the preset's algorithm.
TERMS = {"orz-7b-grpo": [dict(advantage="group_mean")],
    "dapo-7b": [dict(clip_high=0.2), dict(policy_updates=1), dict(overlong_buffer=0), dict(resample_rounds=0),
                dict(aggregation="response"), dict(reward=("digits",))],
    "dr-grpo-7b": [dict(advantage="group_mean_std"), dict(aggregation="token")],
    "rloo-7b": [dict(advantage="group_mean")],
    "reinforce++-7b": [dict(kl_coef=0.0), dict(kl_in="loss", kl_estimator="k2"), dict(kl_estimator="k2")],
    "reinforce++-baseline-7b": [dict(kl_coef=0.0), dict(advantage="group_mean")],
    "gspo-7b": [dict(ratio="token"), dict(aggregation="token"), dict(clip_high=0.2, clip_low=0.2)],
    "cispo-7b": [dict(ratio="token"), dict(clip_high=0.2), dict(policy_updates=1), dict(adam_eps=1.0)],
    "scale-rl-7b": [dict(advantage="group_mean"), dict(aggregation="token"), dict(drop_uniform=False),
                    dict(ratio="token")],
    "open-r1-1.5b-grpo": [dict(aggregation="token"), dict(lr_decay="constant")],
    "rlvr-8b": [dict(passes_per_step=1), dict(kl_coef=0.0), dict(kl_in="loss", kl_estimator="k3"),
                dict(nonstop_penalty=0.0), dict(lam=1.0), dict(reward=("digits",)), dict(adam_eps=1.0)]}


def analogue(name, base, folder):
    """Returns a config with the algorithm of preset `name` and the sizes of `base`, but half as many prompts.
    It does not save."""
    preset = PRESETS[name]
    sizes = """model data eval_data template system_prompt stop device dtype samples_per_prompt max_prompt_len
        max_response_len max_model_len pack_len max_num_seqs policy_lr critic_lr go out epochs total_episodes
        recompute""".split()
    weight = preset.reward[0].partition("=")[2] or "1"
    (folder / "some.py").write_text(
        "def digits(response, answer, kind):\n"
        "    return 0.0 if int(answer) % 3 else sum(c.isdigit() for c in response) / max(len(response), 1)\n")
    return dataclasses.replace(
        preset, **{k: getattr(base, k) for k in sizes}, eval_every=0, save_every=0, warmup_updates=0,
        # The reference differs from the policy after the first step, the rate's decay shows in the third.
        steps=3 if dict(lr_decay="constant") in TERMS[name] else 2 if preset.kl_coef else 1,
        prompts_per_step=base.prompts_per_step // 2,
        policy_updates=min(preset.policy_updates, 4), critic_updates=min(preset.critic_updates, 2),
        passes_per_step=min(preset.passes_per_step, 2),
        resample_rounds=min(preset.resample_rounds, 1), overlong_buffer=8 * bool(preset.overlong_buffer),
        kl_coef=5000 * preset.kl_coef, reward=(f"{folder}/some.py:digits={weight}",))


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "one", layers=1)


@pytest.mark.parametrize("name", TERMS)
def test_every_term_of_a_preset_has_an_effect(name, base, one_layer, tmp_path):
    whole = dataclasses.replace(analogue(name, base, tmp_path), model=one_layer)
    changes = [{k: (v if k != "reward" else (f"{tmp_path}/some.py:{v[0]}",)) for k, v in term.items()}
               for term in TERMS[name]]
    cfgs = [dataclasses.replace(whole, **change, out=f"{tmp_path}/{i}")
            for i, change in enumerate([{}, *changes])]
    first, *others = run_ranks(1, ranks.first_rows, cfgs)[0]
    keys = ("policy_loss", "grad_norm/policy", "entropy", "score", "clip_share")
    for change, rows in zip(TERMS[name], others, strict=True):
        pairs = [(a[key], b[key]) for a, b in zip(first, rows, strict=True) for key in keys if key in a]
        assert any(abs(a - b) > 1e-3 * max(abs(a), abs(b), 1e-6) for a, b in pairs), change


def test_top_p_changes_the_evaluation_and_nothing_else(base, one_rank, tmp_path):
    rows, policy = run(dataclasses.replace(base, eval_top_p=0.3), tmp_path)
    for ours, others in zip(maths(rows), maths(one_rank[1]), strict=True):
        assert ours.keys() == others.keys()
        assert {k for k in ours if ours[k] != others[k]} <= {k for k in ours if k.startswith("eval/")}
        assert "eval/train/avg@1" not in ours or ours["eval/train/avg@1"] != others["eval/train/avg@1"]
    assert all(torch.equal(policy[k], one_rank[2][k]) for k in policy)


@pytest.mark.parametrize("name,style,batch,steps,gain", [("open-r1-1.5b-grpo", "open-r1", 8, 4, 0.3),
                                                         ("rlvr-8b", "rlvr", 16, 6, 0.1)])
def test_recipes_for_chat_models_learn(name, style, batch, steps, gain, tmp_path):
    model = taught(tasks.TASKS[style], tmp_path / "model", count=4, batches=80, batch=batch)
    sizes = """samples_per_prompt max_model_len pack_len max_num_seqs policy_lr critic_lr betas recompute
        warmup_updates""".split()
    cfg = dataclasses.replace(
        PRESETS[name], **{k: getattr(PRESETS["tiny-ppo"], k) for k in sizes}, model=model, steps=steps,
        data=(f"{model}/train.jsonl",), eval_data=(f"{model}/heldout.jsonl",), eval_every=steps, save_every=0,
        eval_samples=(24,), epochs=0, total_episodes=0, max_prompt_len=32, max_response_len=56,
        prompts_per_step=8)
    if PRESETS[name].samples_per_prompt == 1:
        cfg = dataclasses.replace(cfg, samples_per_prompt=1, prompts_per_step=32)
    rows, _ = run(cfg, tmp_path / "run")
    first, *_, last = [row["eval/heldout/avg@24"] for row in rows if "eval/heldout/avg@24" in row]
    assert first <= 0.6 and last >= first + gain


def test_the_gsm8k_preset_takes_a_step_at_its_models_shape(tmp_path):
    model = shape.build(f"{tmp_path}/model", "0.5b", layers=1, vocab=8192, chat=True)
    rows = [{"question": f"Ann has {a} apples and buys {b:,} more. How many has she?",
             "answer": f"She has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b:,}"}
            for a in range(20) for b in (990, 1005)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    process = forked(
        f"{ROOT}/train.py", "gsm8k-0.5b-1gpu", "--model", model, "--steps", "1", "--go", "--device", "cpu",
        "--data", f"{tmp_path}/train.parquet", "--eval_every", "0", "--prompts_per_step", "2",
        "--samples_per_prompt", "3", "--max_response_len", "12", "--max_num_seqs", "8", "--keep_best", "",
        "--entropy_coef", "0.01", "--out", f"{tmp_path}/run")  # without entropy, there is no gradient
    assert process.communicate() and process.returncode == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert row["grad_norm/policy"] > 0 and row["response_len"] > 6
    # The run is a fork of pytest's process, which holds more after other tests.
    assert 0.5 < row["mem/host_peak_gb"] < plan["host and disk, GiB"]["machine"]
    assert transformers.AutoConfig.from_pretrained(tmp_path / "run/export/policy").vocab_size == 8192


class Canned:
    """An engine with the same response to every prompt."""

    def __init__(self, cfg):
        self.cfg, self.rank, self.ranks, self.engines = cfg, 0, 1, 1

    def gather(self, x):
        return [x]

    def goes_on(self):
        return True

    def generate(self, requests, *_):
        for i, j in requests:
            yield dataclasses.replace(sample(3, 0.0), prompt_id=i, sample_id=j, text="so it is 12.")


def graded(cfg, *problems):
    found = {i: data.Problem("?", (1,), gold, dataset=name) for i, (gold, name) in enumerate(problems)}
    with rollout.make_grader(cfg) as grader:
        return rollout.rollout(Canned(cfg), grader, found, rollout.Sampling(1, 1.0, 8, (0,), 0))[0]


def test_a_data_set_may_have_its_own_grader_and_extractor(base, tmp_path):
    (tmp_path / "mine.py").write_text("def follows(response, answer, kind):\n    return 0.25\n")
    cfg = dataclasses.replace(base, extractor=("boxed", "GSM8K=last_number"),
                              reward=("math=3", f"ifeval@{tmp_path}/mine.py:follows", "format"))
    samples = graded(cfg, ("12", "gsm8k"), ("12", "math"), ("12", "IFEval"))
    assert [(s.reward, s.weight, s.answer) for s in samples] == [(1.0, 3.0, "12"), (0.0, 3.0, None),
                                                                 (0.25, 1.0, None)]
    rows = [data.Problem("?", (1,), "2", dataset="ifeval")]
    rollout.check_graders([rows], dataclasses.replace(cfg, extractor=("boxed",)))
    with pytest.raises(UserError, match="names no grader that can grade the rows of data set 'ifeval'"):
        rollout.check_graders([rows], dataclasses.replace(cfg, extractor=("boxed",), reward=("math",)))


@pytest.mark.parametrize("first", [True, False])
def test_a_grader_of_one_data_set_is_logged_over_its_own_samples(base, tmp_path, first):
    """reward/NAME is the mean of weight × score over the samples that grader NAME graded."""
    (tmp_path / "mine.py").write_text(
        "def half(response, answer, kind):\n    return 1 / 0 if answer == 'raise' else 0.5\n")
    terms = [f"ifeval@{tmp_path}/mine.py:half=2", "math=3"]
    cfg = dataclasses.replace(base, extractor=("last_number",), reward=(*terms[::1 if first else -1], "tags"))
    samples = rollout.shape_rewards(graded(cfg, ("raise", "ifeval"), ("12", ""), ("raise", "math"),
                                           ("12", "ifeval"), ("raise", "ifeval"), ("12", "IFEval")), cfg)

    def logged(samples):
        meter = log.Meter()
        log.measure_samples(meter, samples, cfg)
        rows = meter.reduce()
        return {k: v for k, v in rows.items() if k.startswith("reward/")}

    assert logged(samples) == {
        "reward/ifeval": 2 * 0.5 / 2, "reward/ifeval/failed": 0.5, "reward/accuracy": 3 / 2,
        "reward/accuracy/failed": 0, "reward/tags": 0, "reward/tags/failed": 0}
    assert "reward/ifeval" not in logged(samples[1:3]) and logged(samples[1:3])["reward/accuracy"] == 1.5
    assert [s.score for s in samples] == [0, 3, 0, 1, 0, 1]
    assert all(sum(s.entered.values()) == s.score for s in samples)


@pytest.mark.parametrize("change,words", [
    (dict(reward=("math", "nosuch@r.py:f")), "without rows: nosuch; needed: some of .*: aime, gsm8k"),
    (dict(extractor=("orz", "nosuch=letter")), "without rows: nosuch; needed: some of .*: aime, gsm8k"),
    (dict(extractor=("boxed", "orz")), "two extractors for the same rows"),
    (dict(extractor=("boxed", "gsm8k=letter", "GSM8K=orz")), "two extractors for the same rows"),
    (dict(reward=("math", "gsm8k@r.py:f"), extractor=("orz", "AIME=letter")), ""),
    (dict(extractor=PRESETS["rlvr-8b"].extractor), ""),
    (dict(extractor=("orz", "gsm8k=letter")), ""),
    (dict(extractor=("orz", "gsm8k=letter", "math=boxed")), "without rows: math; needed: some of")])
def test_graders_and_extractors_are_for_data_sets_that_there_are(base, change, words):
    cfg = dataclasses.replace(base, **change)
    sets = [[data.Problem("?", (1,), "2", dataset=name) for name in names]
            for names in (["GSM8K", ""], ["aime"])]
    with pytest.raises(UserError, match=words) if words else nullcontext():
        rollout.check_graders(sets, cfg)
        rollout.check_graders(sets[::-1], cfg)


def test_a_typed_extractor_is_for_data_sets_that_there_are(base, tiny, tmp_path, monkeypatch):
    """The preset rlvr-8b may name gsm8k without rows. An evaluation takes the extractors of a model's
    training for other data sets, but not the user's."""
    monkeypatch.chdir(tmp_path)
    sets = [[data.Problem("?", (1,), "2", dataset="openai/gsm8k")]]
    with pytest.raises(UserError, match="without rows: gsm8k; needed: some of .*: openai/gsm8k"):
        rollout.check_graders(sets, dataclasses.replace(base, extractor=("boxed", "gsm8k=gsm8k")))
    shutil.copytree(tiny, "m")
    facts = {"template": "", "prompt": "", "temperature": 1, "extractor": ["boxed", "gsm8k=gsm8k"]}
    Path("m/torz.json").write_text(json.dumps(facts))
    Path("a.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "dataset": "openai/gsm8k"}')
    argv = ["m", "a.jsonl", *EVAL]
    assert run_ranks(1, outcome, [*argv, "--out", "o"]) == [""]
    said, = run_ranks(1, outcome, [*argv, "--extractor", *facts["extractor"], "--out", "p"])
    assert "names data sets without rows: gsm8k; needed: some of the rows' data sets: openai/gsm8k" in said


def test_an_edited_reward_file_ends_a_resumed_run(base, tmp_path, monkeypatch):
    """Also its imports, another function of the same file, and an evaluation set that was left out
    meanwhile. Paths may change."""
    cfg, messages = dataclasses.replace(base, lr_decay="constant", out=f"{tmp_path}/run"), []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for steps, name, edit, one in ((1, "a", "", 1), (2, "a", "#", 1), (2, "b/c", "", 2), (2, "b/c", "", 1)):
        file, package = tmp_path / f"{name}.py", (tmp_path / name).parent / "pkg"
        package.mkdir(parents=True, exist_ok=True)
        file.write_text("from pkg.helper import ONE\nimport score\n\n"
                        "def score(response, answer, kind):\n    return ONE\n"
                        f"def turn(problem, text, turn):\n    return None\n\nother = turn\n{edit}")
        (package / "helper.py").write_text("from .one import ONE")
        (package / "one.py").write_text(f"import far\nONE = {one}")
        (tmp_path / "far.py").write_text(f"{one}")
        (tmp_path / "score.py").write_text("")  # a module with the function's name
        cfg = dataclasses.replace(cfg, steps=steps, reward=(f"{file}:score=2",), env=f"{file}:turn")
        messages += run_ranks(1, ranks.main, cfg)
        cfg = dataclasses.replace(cfg, eval_every=0)
    assert all("files of --reward and --env: " in message for message in messages[1:3])
    assert "'pkg.one': " in messages[2] and "'far': " in messages[2]
    assert messages[::3] == ["", ""]
    other = dataclasses.replace(cfg, env=f"{file}:other")
    assert "(--env: turn -> other)" in run_ranks(1, ranks.main, other)[0]
    (tmp_path / "train.jsonl").write_text(open(base.data[0]).readline())
    cfg = dataclasses.replace(cfg, steps=3, eval_every=1, eval_data=(f"{tmp_path}/train.jsonl",))
    assert "--eval_data train: " in run_ranks(1, ranks.main, cfg)[0]


@pytest.mark.parametrize("reward,words", {
    ("maths",): "no reward 'maths' (did you mean math?)", ("math=x",): "weight 'x'",
    ("math=",): "no reward 'math=' (did you mean math?)",  # as of an unset variable: math=$W
    ("math", "exact"): "two terms with the same name", ("format",): "no grader", ("overlong",): "no reward",
    ("math", "a.py:f", "b.py:f"): "two terms with the same name", ("math=nan",): "weight 'nan'",
    ("math=inf",): "weight 'inf'", ("math", "format=-inf"): "weight '-inf'",
    ("math", "d@a.py:f", "D@b.py:g"): "two terms with the same name",
    ("math", "a/b@a.py:f", "a-b@b.py:g"): "two terms with the same name",
    ("math", "format", "r.py:format"): "two terms with the same name",
}.items())
def test_a_wrong_reward_is_one_line(base, reward, words):
    with pytest.raises(UserError, match=re.escape(words)):
        rollout.terms_of(dataclasses.replace(base, reward=reward))


@pytest.mark.parametrize("spec,dataset,custom", [
    ("ifeval@r.py:f", "ifeval", "r.py:f"), ("openai/gsm8k@r.py:f", "openai/gsm8k", "r.py:f"),
    ("/a/e@x/r.py:f", "", "/a/e@x/r.py:f"), ("./e@x/r.py:f", "", "./e@x/r.py:f"),
    ("../e@x/r.py:f", "", "../e@x/r.py:f"), ("d@/a/e@x/r.py:f=0.5", "d", "/a/e@x/r.py:f"),
    ("d@e@x/r.py:f", "d", "e@x/r.py:f"), ("/a/d=1/r.py:f", "", "/a/d=1/r.py:f")])
def test_a_data_set_ends_at_the_first_at_sign_of_what_is_no_path(base, spec, dataset, custom):
    (term,) = rollout.terms_of(dataclasses.replace(base, reward=(spec,)))
    assert (term.dataset, term.custom) == (dataset, custom)


@pytest.mark.parametrize("template,opens", [
    ("orz", True), ("plain", True), ("{{ m[0].content }}<think>\n", True), ("{{ m[0].content }}:", False),
    ("{{ m[0].content }}<think>\n\n</think>\n\n", False)])
def test_format_rewards_are_refused_where_the_prompt_opens_the_thought(base, tiny, template, opens):
    """`format` and `tags` look for <think> in the response."""
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = template.replace("m[0]", "messages[0]")
    name = template if template in configs.TEMPLATES else "chat"
    cfg = dataclasses.replace(base, template=name, max_prompt_len=2048, max_response_len=24, pack_len=4096)
    problems = data.load_problems(cfg.data, tokenizer, cfg, lambda text: None)

    def refused(*parts):
        with_parts = dataclasses.replace(cfg, reward=("math", *parts))
        with pytest.raises(UserError) as e:
            check_parts(problems, tokenizer, with_parts)
        return str(e.value)

    for part in ("format", "tags"):
        if opens:
            assert re.match(f"--reward {part} .*--template {name} .*; needed: ", refused(f"{part}=0.5"))
        else:
            check_parts(problems, tokenizer, dataclasses.replace(cfg, reward=("math", f"{part}=0.5")))
        check_parts(problems, tokenizer, dataclasses.replace(cfg, reward=("math", f"r.py:{part}")))


def test_each_problem_has_its_own_value_of_each_metric():
    """pass@k equals a naive mean over all subsets of k samples."""
    rng, n = random.Random(1), 6
    answers = [[rng.choice(["7", "8", "9", None]) for _ in range(n)] for _ in range(50)] + [[None] * n]
    samples = [SimpleNamespace(prompt_id=i, answer=a, reward=float(a == "7"), right=a == "7",
                               ids=range(rng.randrange(9)), stopped=rng.random() < 0.5)
               for i, some in enumerate(answers) for a in some]
    groups = data.group_by_prompt(samples)
    each = [accuracy(group, n) for group in groups]
    found = {metric: [values[metric] for values in each] for metric in each[0]}
    assert list(found) == ["avg@6", "pass@2", "pass@4", "pass@6", "maj@6", "response_len", "truncated"]
    for i, some in enumerate(answers):
        mine, votes = [s for s in samples if s.prompt_id == i], Counter(filter(None, some))
        winners = [a for a in votes if votes[a] == max(votes.values())]
        assert found["avg@6"][i] == some.count("7") / n
        for k in (2, 4, 6):
            subsets = list(itertools.combinations(some, k))
            assert found[f"pass@{k}"][i] == pytest.approx(sum("7" in s for s in subsets) / len(subsets))
        assert found["maj@6"][i] == (1 / len(winners) if "7" in winners else 0)
        assert found["response_len"][i] == sum(len(s.ids) for s in mine) / n
        assert found["truncated"][i] == sum(not s.stopped for s in mine) / n
    assert list(accuracy(samples[:1], 1)) == ["avg@1", "response_len", "truncated"]
    assert run_ranks(2, gathered, samples, n) == [found, found]  # values are in the order of the problems


@pytest.mark.parametrize("votes,found", [
    (r"\frac34+ \dfrac{3}{4}+ 1 1", 0.5), (r"\frac34+ \dfrac{3}{4}+ 0.75+ 1 1", 1.0), ("1 1 2+", 0.0),
    ("2+ 2 1 1 1", 0.0), ("2+ 2 2.0+ 1 1", 1.0), ("- - 2+", 1.0), ("- -", 0.0), ("1 2 3+", 1 / 3),
    ("-+ 1", 0.5), ("-+ -+ 1", 1.0), ("-+ - - 1 1", 0.0), ("-+ - -", 1.0),
    ("1+ 2+ 3+ 4 4 4", 0.5), ("4 4 1+ 2+ 3+", 1.0)])
def test_right_answers_are_one_answer_in_a_majority(votes, found):
    """A plus marks a right sample, and - one without an answer, which --reward or --env may call right. A
    response that was cut has reward 0, but its answer can be a right one."""
    group = [SimpleNamespace(answer=None if vote[0] == "-" else vote.strip("+"), right=vote[-1] == "+")
             for vote in votes.split()]
    assert rollout.majority(group) == pytest.approx(found)


def gathered(samples, n):
    """Returns the result of gather_scores if each rank has some of the problems."""
    world = dist.init("cpu", "float32")
    return rollout.gather_scores([s for s in samples if s.prompt_id % world.size == world.rank], n)


def test_two_models_are_compared_on_the_problems_that_both_have():
    """The standard error of the mean difference is nearly that of a bootstrap."""
    rng = np.random.default_rng(3)
    hard, first = rng.random(80), {"d": [SimpleNamespace(where=i) for i in range(80)]}
    a, b = (np.clip(hard + rng.normal(0, 0.1, 80) + shift, 0, 1) for shift in (0, 0.05))
    drawn = rng.integers(80, size=(20_000, 80))
    for kept in np.arange(80) >= 0, np.arange(80) % 4 != 3:
        other = {"d": [p for p, keep in zip(first["d"], kept, strict=True) if keep]}
        scores = ({"d": {"avg@4": values.tolist()}} for values in (b[kept], a))
        found = paired_differences(other, next(scores), first, next(scores))["d"]
        gaps, metric = (b - a)[kept], found["metrics"]["avg@4"]
        assert found["problems"] == kept.sum() and metric["value"] == pytest.approx(gaps.mean())
        assert metric["stderr"] == pytest.approx(gaps.std(ddof=1) / len(gaps) ** 0.5)
    assert evaluate.std_error((b - a).tolist()) == pytest.approx((b - a)[drawn].mean(1).std(), rel=0.03)
    independent = (evaluate.std_error(a.tolist()) ** 2 + evaluate.std_error(b.tolist()) ** 2) ** 0.5
    assert evaluate.std_error((b - a).tolist()) < 0.5 * independent
    assert evaluate.std_error([0.5]) is None and evaluate.std_error([]) is None


def test_repetition_and_reflections_of_a_text():
    """Repetition: the share of repeated word trigrams. Reflections: words like "wait,"."""
    repetition = {"": 0, "a b": 0, "a b c d": 0, "a b c a b c": 1 / 4, "So so SO so": 1 / 2}
    assert {text: reward.repeated_ngrams(text) for text in repetition} == repetition
    assert log.reflections("Wait, however, wait, I recheck. However so.") == 4


def sample(length: int, reward: float, stopped: bool = True) -> data.Sample:
    ids, logp = np.arange(length, dtype=np.int32), np.zeros(length, np.float32)
    return data.Sample(0, 0, (1, 2), ids, logp, stopped, "", 0, reward=reward)


def test_a_long_response_costs_reward_and_a_truncated_one_may_be_left_out():
    """DAPO's extra reward falls from 0 to -1 over the last --overlong_buffer tokens before the limit."""
    cfg = dataclasses.replace(PRESETS["tiny-grpo"], overlong_buffer=16, mask_truncated=True)
    samples = [sample(length, 1.0, stopped=length < 48) for length in (10, 32, 40, 48)]
    shaped = rollout.shape_rewards(samples, cfg)
    assert [s.parts.get("overlong", 0) for s in shaped] == [0, 0, -0.5, -1]
    assert [s.in_loss for s in shaped] == [True, True, True, False]
    p = data.pack(shaped)
    assert p.rewards[p.cu_seqlens[1:].long() - 1].tolist() == [1, 1, 0.5, 0]
    assert p.responses == 3 and int(p.mask.sum()) == 82 and not p.mask[p.cu_seqlens[3]:].any()
    short = dataclasses.replace(cfg, max_response_len=39, max_model_len=40)  # leaves 38 tokens here
    assert reward.overlong([sample(n, 1.0) for n in (22, 30, 38)], short) == [0, -0.5, -1]
    (plain,) = rollout.shape_rewards([sample(48, 0.0, stopped=False)], PRESETS["tiny-grpo"])
    assert not plain.parts and plain.in_loss


def test_uniform_groups_are_replaced_by_other_prompts(base, tmp_path):
    """In a uniform group, all samples have the same reward. An alarm says if uniform groups remain."""
    (tmp_path / "r.py").write_text(
        "def some(response, answer, kind):\n"
        "    return sum(map(ord, response)) % 2 if int(answer) % 3 == 0 else 0\n"
        "def most(response, answer, kind):\n"
        "    return sum(map(ord, response)) % 5 == 0\n")
    cfg = dataclasses.replace(base, algo="grpo", critic_updates=1, resample_rounds=2, steps=1, eval_data=(),
                              reward=(f"{tmp_path}/r.py:some",))
    two = run_ranks(2, ranks.resampled, dataclasses.replace(cfg, out=f"{tmp_path}/2"))
    one = run_ranks(1, ranks.resampled, dataclasses.replace(cfg, out=f"{tmp_path}/1"))[0]
    first, last, rewards = one["drawn"], one["prompts"], one["rewards"]
    assert two[0]["prompts"] == two[1]["prompts"] == last
    assert two[0]["rewards"] | two[1]["rewards"] == rewards and len(rewards) == cfg.prompts_per_step
    varied = [prompt_id for prompt_id in rewards if len(set(rewards[prompt_id])) > 1]
    assert varied and all(int(eval(last[prompt_id][:-1])) % 3 == 0 for prompt_id in varied)
    assert any(a != b for a, b in zip(first, last, strict=True))
    assert one["measured"] == len(first)  # metrics are computed before prompts are replaced
    assert len(varied) < len(rewards) and "prompts are still uniform" in one["alarms"]
    most = dataclasses.replace(cfg, resample_rounds=8, reward=(f"{tmp_path}/r.py:most",), out=f"{tmp_path}/3")
    one = run_ranks(1, ranks.resampled, most)[0]
    assert all(len(set(rewards)) > 1 for rewards in one["rewards"].values())
    assert "still uniform" not in one["alarms"] and one["drawn"] != one["prompts"]


def test_a_refreshed_reference_is_resumed(base, tmp_path):
    """After an epoch (2 steps of 4 problems), the reference is a copy of the policy, so the KL is 0 again."""
    (tmp_path / "few.jsonl").write_text("".join(open(base.data[0]).readlines()[:8]))
    cfg = dataclasses.replace(base, algo="grpo", kl_coef=0.1, ref_refresh=True, prompts_per_step=4,
                              data=(f"{tmp_path}/few.jsonl",), critic_updates=1, steps=4, save_every=3,
                              eval_data=())
    rows, policy = run(cfg, tmp_path / "a", ranks=2)
    kl = [r["kl"] for r in rows if "kl" in r]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[1] > 1e-4
    assert kl[2] == pytest.approx(0, abs=1e-6) and kl[3] > 1e-4
    out = tmp_path / "b"
    (out / "ckpt").mkdir(parents=True)
    (tmp_path / "a" / "ckpt" / "step_000003").rename(out / "ckpt" / "step_000003")
    resumed_rows, resumed_policy = run(cfg, out, ranks=2)
    assert maths(resumed_rows) == [r for r in maths(rows) if r["step"] == 3]
    assert all(torch.equal(policy[k], resumed_policy[k]) for k in policy)


@pytest.mark.parametrize("argv,words", [
    ("--temperature 0.1", "--temperature has no effect in evaluation; needed: a flag that python -m"),
    ("--pack_len 99999", "--pack_len has no effect in evaluation; needed: a flag that python -m"),
    ("--samples_per_prompt=4", "--samples_per_prompt has no effect"), ("--model y", "--model has no effect"),
    ("--no-selfcheck", "--selfcheck has no effect"), ("--policy-lr 1", "--policy_lr has no effect"),
    ("--reward math tags", "--reward math tags has a weight, a part or a second grader"),
    ("--reward math=2", "--reward math=2 has a weight"), ("--reward d@r.py:f tags", "d@r.py:f tags has"),
    ("--reward math r.py:f", "--reward math r.py:f has"),
    *((f"--write_rows {words}", f"--write_rows {words}; needed: a condition such as") for words in (
        "rate<2 x.jsonl", "rat<0.1 x.jsonl", "rate x.jsonl", "rate<nan x.jsonl", "rate<0.1 x.json",
        "rate<0.1 no/x.jsonl", "rate=0 x.jsonl")),
    ("--temprature 1", "no flag --temprature (did you mean --temperature?)")])
def test_a_flag_that_evaluation_does_not_read_is_refused(argv, words):
    with pytest.raises(UserError, match=re.escape(words)) as e:
        main(["/no/model", "x.jsonl", *argv.split()])
    assert "\n" not in str(e.value)


def test_the_help_has_the_flags_that_evaluation_reads(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--help"])
    text = capsys.readouterr().out
    assert "\n    python -m tools.evaluate MODEL [MODEL …] DATA [DATA …] [--flags]\n" in text
    assert e.value.code == 0 and max(map(len, text.splitlines())) <= 80
    assert set(re.findall(r"^  --(\w+): \S", text, re.M)) == set(EVAL_FLAGS)
    assert "the only source of randomness (default: 0)" in text and "(default: (16,))" in text


def test_the_command_line_has_models_then_data_then_flags():
    def split(text):
        cfgs = eval_configs(text.split())
        return " ".join(cfg.model for cfg in cfgs), " ".join(cfgs[0].eval_data), cfgs[0]

    def stops(flags):
        return split(f"m a.json {flags}")[2].stop

    assert split("m n O/N a.jsonl O/D")[:2] == ("m n O/N", "a.jsonl O/D")
    assert split("m O/D:main/a.parquet b.json --seed=2")[:2] == ("m", "O/D:main/a.parquet b.json")
    assert split("m O/D")[:2] == ("m", "O/D") and split("a.json b.json")[:2] == ("a.json", "b.json")
    flags = "--eval_temperature 0 --reward math d@r.py:f --max_response_len 20000"
    cfg = split(f"m a.json {flags} --env e.py:f")[2]
    assert cfg.eval_temperature == (0.0,) and cfg.reward == ("math", "d@r.py:f") and cfg.env == "e.py:f"
    assert cfg.model_len == cfg.max_prompt_len + 20000  # the preset's limit of 8192 does not hold
    assert split("m a.json --max_response_len 70000")[2].max_response_len == 70000
    assert stops("") == PRESETS["orz-7b"].stop == stops("--template orz")
    assert stops("--template chat") == () == stops("--template=chat")
    assert stops("--template chat --stop </answer>") == ("</answer>",)
    for argv, words in (["m"], "no data file; needed: python -m"), ([], "no data"), (
            ["m", "./m", "a.json"], "the same model twice; needed: each"):
        with pytest.raises(UserError, match=re.escape(words)):
            eval_configs(argv)


def test_an_export_is_asked_as_it_was_trained(tmp_path, monkeypatch):
    facts = dict(template="plain", prompt=configs.TEMPLATES["plain"], system_prompt="", stop=["</a>"],
                 extractor=["boxed"], temperature=0.6, max_response_len=64, max_model_len=70, max_turns=3,
                 env="e.py:f")
    kinds = {"a": {}, "b": {"stop": ["</b>"]}, "c": {}, "run/ckpt": {},
             "chat": {"template": "chat", "prompt": "", "template_args": ["enable_thinking=false"]},
             "d": {"max_response_len": 20000}, "old": {"prompt": "", "date": "1"}}
    for name, changes in kinds.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "torz.json").write_text(json.dumps(facts | changes))
    a, b = f"{tmp_path}/a", f"{tmp_path}/b"
    cfg, other = eval_configs(["base", a, "a.json"])
    assert (cfg.template, cfg.stop, cfg.extractor) == ("plain", ("</a>",), ("boxed",))
    assert cfg.eval_temperature == (0.6,) and cfg.max_response_len == 64 and cfg.model_len == 70
    assert cfg.max_turns == 3 and cfg.env == ""  # what is read runs no code
    assert other == dataclasses.replace(cfg, model=a) == eval_configs([a, f"{tmp_path}/c", "a.json"])[0]
    assert eval_configs([f"{tmp_path}/d", "a.json", "--max_model_len", "0"])[0].max_response_len == 20000
    assert {c.stop for c in eval_configs([a, b, "a.json", "--stop", "x"])} == {("x",)}
    assert eval_configs([a, "a.json", "--template", "orz"])[0].stop == PRESETS["orz-7b"].stop
    chat, _ = eval_configs([f"{tmp_path}/chat", "base", "a.json", "--template_args", "enable_thinking=true"])
    assert chat.template_args == ("enable_thinking=true",) and chat.stop == ("</a>",)
    for model in eval_configs(["base", f"{tmp_path}/chat", "a.json"]):
        assert model.template_args == ("enable_thinking=false",)
    assert eval_configs([f"{tmp_path}/chat", "a.json", "--template", "plain"])[0].template_args == ()
    assert eval_configs([a, "a.json", "--template", "plain"])[0].stop == ("</a>",)
    hub = tmp_path / "models--me--mine"  # the Hub's cache
    shutil.copytree(a, hub / "snapshots/0")
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert eval_configs(["me/mine", "a.json"])[0].template == "plain"
    for text, words in (('{"template": "p', " is damaged "), ('{"template": 5}', ": template is 5; needed"),
                        ('{"template": "", "prompt": ""}', ": temperature is None; needed: int | float")):
        (hub / "snapshots/0/torz.json").write_text(text)
        with pytest.raises(UserError, match=re.escape(f"torz.json{words}")):
            eval_configs(["me/mine", "a.json"])
    for argv, words in (([a, b, "a.json"], "different settings (stop: "),
                        ([f"{tmp_path}/old", "a.json"], "plain has another text than at the train"),
                        ([f"{tmp_path}/old", "a.json", "--date", "2"], "export has --system_prompt and --d"),
                        ([f"{tmp_path}/run", "a.json"], "is the folder of a run or an adapter, not of a")):
        with pytest.raises(UserError, match=re.escape(words)):
            eval_configs(argv)


def test_exports_of_runs_whose_names_end_alike_have_rows_that_differ():
    score = {"metrics": {"avg@4": {"value": 0.5, "stderr": 0.1}}}
    names = [f"runs/lr1e-{i}-grpo-baseline" for i in (5, 6)]
    results = [{"model": f"{name}/export/policy", "sets": {"a": score}} for name in names]
    assert [row.split()[0] for row in evaluate.comparison_table(results)[1:]] == names


def test_models_of_one_folder_name_have_names_that_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"runs/a/export/policy": "runs--a--export--policy", "/else/export/policy": "else--export--policy",
             f"{tmp_path}/runs/../policy/": "policy", "Qwen/Qwen2.5-0.5B": "Qwen--Qwen2.5-0.5B"}
    assert {path: model_name(path) for path in names} == names


EVAL = ["--template", "plain", "--eval_samples", "4", "--max_response_len", "24",
        "--max_prompt_len", "16", "--device", "cpu", "--dtype", "float32"]


def outcome(argv) -> str:
    try:
        main(argv)
    except (UserError, RuntimeError) as e:
        return str(e)
    return ""


def test_several_models_have_the_scores_that_each_has_alone(base, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shutil.copy(base.data[0], "sums.jsonl")
    models = [make_model(f"runs/{name}/policy", seed, layers)
              for name, seed, layers in (("a", 1, 2), ("b", 2, 2), ("c", 3, 1))]
    argv = ["sums.jsonl", *EVAL, "--reward", *base.reward]
    run_ranks(2, main, [*models, *argv])
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rewards = []
    for i, (x, model) in enumerate(zip("abc", models, strict=True)):
        run_ranks(1, main, [model, *argv, "--out", f"alone/{x}"])
        together, alone = Path(f"runs/eval/runs--{x}--policy/sums"), Path(f"alone/{x}")
        found, only = (json.loads((folder / "scores.json").read_text()) for folder in (together, alone))
        rows = read_jsonl(together / "samples.jsonl")
        assert {k: v for k, v in found.items() if k in only} == only
        assert (found["model"], found["flags"]["max_response_len"]) == (model, 24)
        assert found["flags"]["engine"] == "torch"
        assert set(found["versions"]) >= {"code", "torch", "transformers", "mpmath"}
        ids = [(row["prompt_id"], row["sample_id"]) for row in rows]
        assert ids == list(itertools.product(range(40), range(4)))
        sums = found["sets"]["sums"]
        assert {"pass@2", "pass@4", "maj@4", "response_len", "truncated"} <= set(sums["metrics"])
        assert (sums["problems"], sums["samples"]) == (40, 4)
        rewards.append(np.array([row["reward"] for row in rows]).reshape(40, 4).mean(1))
        mean, error = rewards[i].mean(), rewards[i].std(ddof=1) / 40 ** 0.5
        assert sums["metrics"]["avg@4"] == pytest.approx({"value": mean, "stderr": error})
        words = f"{model} sums/avg@4 {mean:.4f} ± {error:.4f}"
        assert ("differences" in found) == bool(i)
        if i:
            mean, error = (rewards[i] - rewards[0]).mean(), (rewards[i] - rewards[0]).std(ddof=1) / 40 ** 0.5
            gap = found["differences"]["sums"]["metrics"]["avg@4"]
            assert gap == pytest.approx({"value": mean, "stderr": error})
            words += f" {mean:+.4f} ± {error:.4f}"
        assert words.split() in map(str.split, lines)
    assert len({values.mean() for values in rewards}) == 3
    for out in [], ["--out", str(together)]:
        assert run_ranks(2, outcome, [model, *argv, *out]) == [
            f"{platform.node()}: {together} is not empty; needed: an --out that is new or empty"] * 2
    assert json.loads((together / "scores.json").read_text()) == found


def outcome_on_its_host(argv) -> str:
    os.chdir(os.environ["RANK"])  # each host has files of its own at the same paths
    return outcome(argv)


@pytest.mark.parametrize("differs", ["files of the policy", "--eval_data sums"])
def test_ranks_that_evaluate_other_files_are_refused(base, tmp_path, monkeypatch, differs):
    monkeypatch.chdir(tmp_path)
    lines = Path(base.data[0]).read_text().splitlines()[:4]
    for rank in range(2):
        make_model(f"{rank}/m", seed=rank if "files" in differs else 0)
        Path(f"{rank}/sums.jsonl").write_text("\n".join(lines[rank if "sums" in differs else 0 :]))
    found, same = run_ranks(2, outcome_on_its_host, ["m", "sums.jsonl", *EVAL, "--out", f"{tmp_path}/out"])
    assert found == same and re.fullmatch(
        rf"not every rank reads what rank 0 on .* reads: .* \({differs}: \w+ -> \w+\); needed: the same "
        "files on every machine", found) and not Path("out").exists()


def test_an_export_of_turns_says_that_no_environment_asks_it(base, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "m")
    facts = {"env": "e.py:f", "template": "", "prompt": "", "temperature": 1}
    (tmp_path / "m/torz.json").write_text(json.dumps(facts))
    cfg = dataclasses.replace(eval_configs([tiny, *base.data, *EVAL])[0], model=f"{tmp_path}/m")
    told = []
    load_candidate(cfg, told.append, False)
    assert [line for line in told if "--env" in line] == [
        f"{tmp_path}/m was trained with --env e.py:f, and is evaluated without --env"]
    told.clear()
    load_candidate(dataclasses.replace(cfg, env="e.py:g"), told.append, False)
    assert not [line for line in told if "--env" in line]


def test_the_rows_of_hard_problems_are_written_as_they_are(base, tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    lines = [line.replace("}", ', "n": 1.5}') for line in Path(base.data[0]).read_text().splitlines()]
    Path("a.jsonl").write_text("\n".join(lines[:25]))
    Path("b.json").write_text(f"[{','.join(lines[25:])}]")
    argv = [tiny, "a.jsonl", "b.json", *EVAL, "--reward", *base.reward, "--write_rows"]
    run_ranks(2, main, [*argv, "0<rate<.1", "hard.jsonl", "--out", "out"])
    rewards = [row["reward"] for row in read_jsonl(Path("out/samples.jsonl"))]
    hard = [i for i, rate in enumerate(np.array(rewards).reshape(40, 4).mean(1)) if 0 < rate < 0.1]
    assert Path("hard.jsonl").read_text().splitlines() == [lines[i] for i in hard] and 0 < len(hard) < 40
    assert f"\n{len(hard)} rows with 0<rate<.1 in hard.jsonl\n" in capfd.readouterr().out
    Path("bad.py").write_text("def score(response, answer): return 1 / 0")
    argv = [tiny, "a.jsonl", *EVAL, "--reward", "bad.py:score", "--write_rows", "rate<1", "no.jsonl"]
    message, = run_ranks(1, outcome, [*argv, "--out", "e"])
    assert message.startswith("--write_rows has written nothing, because") and not Path("no.jsonl").exists()
    assert "!! grading failed, and the reward is 0: 'ZeroDivisionError" in capfd.readouterr().out


def outcome_on_a_full_disk(argv) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, -1))  # bytes of a file; samples.jsonl has more
    return outcome(argv)


def test_a_full_disk_does_not_cost_the_scores(base, tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    argv = [tiny, base.data[0], *EVAL, "--reward", *base.reward, "--out", "out"]
    message, = run_ranks(1, outcome_on_a_full_disk, argv)
    assert message.startswith("can't write to out (OSError: ") and "; needed: space there" in message
    assert re.search(r" avg@4 +\d\.\d{4} ", capfd.readouterr().out)
    Path("long.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2", "id": "x" * 30_000}))
    argv = [tiny, "long.jsonl", *EVAL, "--write_rows", "rate<=1", "hard.jsonl", "--out", "long"]
    message, = run_ranks(1, outcome_on_a_full_disk, argv)
    assert re.match("can't write hard.jsonl \\(OSError: .*; needed: space there$", message)
    assert Path("long/scores.json").exists() and not Path("hard.jsonl").exists()


def test_rows_are_written_by_the_first_model_also_if_grading_of_the_second_fails(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny, "second")
    rows = [{"prompt": "1+1=", "answer": "2", "id": i} for i in (1, 2)]  # the second is a repeated row
    Path("one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("late.py").write_text("import os\ndef score(response):\n    print(file=open('calls', 'a'))\n"
                               "    open('one.jsonl', 'w')\n"  # the user rewrites the data meanwhile
                               "    return 1 / (os.path.getsize('calls') < 5)")  # 4 responses of a model
    argv = [tiny, "second", "one.jsonl", *EVAL, "--reward", "late.py:score", "--write_rows", "rate<=1"]
    assert run_ranks(1, outcome, [*argv, "rows.jsonl", "--out", "out"]) == [""]
    assert read_jsonl(Path("rows.jsonl")) == rows[:1] and len(list(Path("out").iterdir())) == 2


def test_an_evaluation_tells_that_another_extractor_finds_answers(tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("one.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    argv = [tiny, "one.jsonl", *EVAL, "--stop", "1", "2", "3", "4"]  # so responses end in a number
    for name in "gsm8k", "whole":
        assert run_ranks(1, outcome, [*argv, "--extractor", name, "--out", name]) == [""]
        unread = sum(row["reason"] == "unparsed" for row in read_jsonl(Path(name, "samples.jsonl")))
        said = f"!! --extractor finds no answer in {unread} of 4 responses\nanswers that another --extractor "
        assert (said in capfd.readouterr().out) == (name == "gsm8k") == (unread > 0)


def test_an_evaluation_with_gold_answers_that_cannot_be_graded_is_refused(tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{answer}?", "answer": answer, "reward": "choice"} for answer in ("A", "B", "no")]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = "sums: 1 of 3 gold answers can't be graded: sums.jsonl:3 'no'"
    (message,) = run_ranks(1, outcome, [tiny, "sums.jsonl", *EVAL])
    assert message.startswith(f"{found}; needed: ") and message.endswith("or --go")
    assert not Path("runs").exists()
    assert run_ranks(1, outcome, [tiny, "sums.jsonl", *EVAL, "--go", "--out", "out"]) == [""]
    assert found in capfd.readouterr().out and Path("out/scores.json").is_file()


def test_an_evaluation_that_fails_leaves_no_results(base, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [base.data[0], *EVAL, "--reward", *base.reward]
    settings = json.loads(Path(tiny, "config.json").read_text())
    for name, change in (("short", {"max_position_embeddings": 30}), ("broken", {"num_hidden_layers": 3}),
                         ("other", {"rms_norm_eps": 1e-3})):
        shutil.copytree(tiny, name)
        Path(name, "config.json").write_text(json.dumps(settings | {"layer_types": None} | change))
    message = run_ranks(2, outcome, [tiny, "short", *argv])
    assert message[0] == message[1] and message[0].startswith("short has 30 positions, and a prompt with its")
    assert run_ranks(1, outcome, [tiny, "other", *argv, "--engine", "vllm"]) == [
        f"vLLM runs only models of one kind in a process, and other differs from {tiny} in config.json, "
        "tokenizer or end tokens; needed: a separate command for each, or --engine torch"]
    assert run_ranks(2, outcome, [tiny, *argv, "--out", "short/config.json"])[0].endswith(
        "File exists: 'short/config.json'); needed: --out with a writable folder")
    assert "weights of broken differ in model.layers.2" in run_ranks(1, outcome, [tiny, "broken", *argv])[0]
    evaluate.FolderLock(Path("out/lock")).claim()  # as another evaluation with the same --out
    Path("late").mkdir()
    Path("late/scores.json").write_text("{}")  # by an evaluation that ended while this one loaded
    with pytest.raises(UserError, match="late is not empty; needed: an --out that is new or empty"):
        evaluate.make_folders([Path("late")])
    assert "out is in use by process " in run_ranks(1, outcome, [tiny, *argv, "--out", "out"])[0]
    assert not Path("runs").exists()
