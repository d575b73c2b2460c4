"""Recipes: every preset has its published numbers. What only some recipes use equals naive references."""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import ranks
import torch
import transformers
from conftest import ROOT, make_model, maths, run, run_ranks
from taught import taught

import data
import dist
import log
import rollout
from bench import shape, tasks
from configs import OPEN_R1_SYSTEM, PRESETS, STEP_BY_STEP, UserError, parse, read_jsonl
from guard.start import check_parts
from model import load_tokenizer
from rollout import accuracy, majority, pass_at
from tools import evaluate
from tools.evaluate import EVAL_FLAGS, eval_configs, main, model_name, paired_differences

# The numbers of Open-Reasoner-Zero's files, and what each paper changes, by preset.
ORZ = dict(
    algo="ppo", template="orz", prompts_per_step=128, samples_per_prompt=64, policy_updates=1,
    critic_updates=12, policy_lr=1e-6, critic_lr=5e-6, warmup_updates=50, lr_decay="constant",
    betas=(0.9, 0.95), weight_decay=0.0, grad_clip=1.0, max_prompt_len=2048, max_response_len=8000,
    model_len=8192, pack_len=16384, temperature=1.0, stop=("User:", "Human:", "Assistant:", "</answer>"),
    gamma=1.0, lam=1.0, clip_low=0.2, clip_high=0.2, value_clip=0.2, kl_coef=0.0, kl_estimator="k3",
    entropy_coef=0.0, epochs=20, save_every=50, eval_every=10, engine_share=0.7, tp=1, tis_clip=2.0,
    ref_refresh=True, resample_rounds=0, overlong_buffer=0, mask_truncated=False, passes_per_step=1,
    nonstop_penalty=0.0, drop_uniform=False, extractor=("orz",), reward=("math",), system_prompt="")
GRPO = ORZ | dict(algo="grpo", critic_updates=1, engine_share=0.75, advantage="group_mean_std", ratio="token",
                  aggregation="token")
TABLE = {
    "orz-7b": ORZ,
    "orz-0.5b": ORZ | dict(pack_len=10048, engine_share=0.75),
    "orz-0.5b-1gpu": ORZ | dict(pack_len=10048, engine_share=0.75),
    "orz-1.5b": ORZ | dict(pack_len=10048, engine_share=0.75),
    "orz-32b": ORZ | dict(tp=4, max_response_len=16384, model_len=2048 + 16384, pack_len=18432,
                          eval_response_len=32768),
    "orz-7b-grpo": GRPO | dict(advantage="group_mean_whiten"),
    "gsm8k-0.5b-1gpu": GRPO | dict(
        template="chat", system_prompt=STEP_BY_STEP, extractor=("boxed",), stop=(), steps=234, epochs=0,
        prompts_per_step=64, samples_per_prompt=8, max_prompt_len=512, max_response_len=1024,
        model_len=512 + 1024, ref_refresh=False, warmup_updates=10, eval_every=25),
    "dapo-7b": GRPO | dict(
        template="chat", extractor=("dapo",), stop=(), prompts_per_step=512, samples_per_prompt=16,
        policy_updates=16, clip_high=0.28, resample_rounds=4, overlong_buffer=4096, max_response_len=20480,
        model_len=22528, pack_len=22528, warmup_updates=20 * 16, reward=("math=2",)),
    "dr-grpo-7b": GRPO | dict(advantage="group_mean", aggregation="max_len"),
    "rloo-7b": GRPO | dict(advantage="leave_one_out"),
    "reinforce++-7b": GRPO | dict(advantage="return_whiten", samples_per_prompt=1, prompts_per_step=1024,
                                  kl_coef=1e-3, kl_in="reward", kl_estimator="k1", ref_refresh=False),
    "reinforce++-baseline-7b": GRPO | dict(advantage="group_mean_whiten", kl_coef=1e-3, kl_estimator="k2",
                                           ref_refresh=False),
    "gspo-7b": GRPO | dict(ratio="sequence", aggregation="response", clip_low=3e-4, clip_high=4e-4,
                           policy_updates=4),
    "cispo-7b": GRPO | dict(ratio="clipped", policy_updates=16, clip_low=1.0, clip_high=4.0),
    "scale-rl-7b": GRPO | dict(
        advantage="group_mean_batch_std", ratio="clipped", aggregation="prompt", drop_uniform=True,
        clip_low=1.0, clip_high=4.0, prompts_per_step=48, samples_per_prompt=16, policy_updates=8,
        max_response_len=14336, model_len=16384, policy_lr=5e-7, warmup_updates=100, weight_decay=0.01),
    "open-r1-1.5b-grpo": GRPO | dict(
        template="chat", system_prompt=OPEN_R1_SYSTEM, reward=("math", "format", "tags"),
        extractor=("answer_tag",), stop=(), epochs=1,
        prompts_per_step=7 * 16 * 4 // 16, samples_per_prompt=16, aggregation="response", max_prompt_len=512,
        max_response_len=1024, model_len=1536, pack_len=10048, policy_lr=2e-5, lr_decay="cosine",
        warmup_updates=0.1, betas=(0.9, 0.999)),
    "rlvr-8b": ORZ | dict(
        template="chat", reward=("math=10",), nonstop_penalty=10.0, stop=(), kl_coef=0.05, kl_in="reward",
        kl_estimator="k1", ref_refresh=False, lam=0.95, prompts_per_step=7 * 32, samples_per_prompt=1,
        critic_updates=1, passes_per_step=4, max_response_len=2048, model_len=4096, policy_lr=3e-7,
        critic_lr=3e-7, lr_decay="linear", warmup_updates=0, betas=(0.9, 0.999), epochs=0,
        total_episodes=10_000_000, extractor=("boxed", "gsm8k=last_number")),
}
PRODUCTION_RANKS = {"orz-0.5b": 8, "orz-0.5b-1gpu": 1, "orz-1.5b": 16}  # others: 32
DEBUG = dict(prompts_per_step=16, samples_per_prompt=2, critic_updates=1, engine_share=0.5)


@pytest.mark.parametrize("name", [n for n in PRESETS if not n.startswith("tiny")])
def test_every_preset_is_its_recipe(name):
    """The preset has every number of its table. A layout sets the number of ranks; the debug layout also sets
    ORZ's batch for debugging, on ORZ's own presets and no others."""
    preset, want = PRESETS[name], TABLE[name]
    assert {k: getattr(preset, k) for k in want} == want
    production, debug = (parse([name, "--layout", layout]) for layout in ("production", "debug"))
    assert (production.ranks, debug.ranks) == (PRODUCTION_RANKS.get(name, 32), 8)
    assert {k: getattr(production, k) for k in want} == want
    want = want | (DEBUG if name.startswith("orz-") else {})
    assert {k: getattr(debug, k) for k in want} == want


# What tells each preset from the others: fields, and values that would make it another algorithm.
TERMS = {
    "orz-7b-grpo": [dict(advantage="group_mean")],
    "dapo-7b": [dict(clip_high=0.2), dict(policy_updates=1), dict(overlong_buffer=0), dict(resample_rounds=0),
                dict(aggregation="response"), dict(reward=("digits",))],
    "dr-grpo-7b": [dict(advantage="group_mean_std"), dict(aggregation="token")],
    "rloo-7b": [dict(advantage="group_mean")],
    "reinforce++-7b": [dict(kl_coef=0.0), dict(kl_in="loss", kl_estimator="k2"), dict(kl_estimator="k2")],
    "reinforce++-baseline-7b": [dict(kl_coef=0.0), dict(kl_estimator="k3"), dict(advantage="group_mean")],
    "gspo-7b": [dict(ratio="token"), dict(aggregation="token"), dict(clip_high=0.2, clip_low=0.2)],
    "cispo-7b": [dict(ratio="token"), dict(clip_high=0.2), dict(policy_updates=1)],
    "scale-rl-7b": [dict(advantage="group_mean"), dict(aggregation="token"), dict(drop_uniform=False),
                    dict(ratio="token")],
    "open-r1-1.5b-grpo": [dict(aggregation="token"), dict(lr_decay="constant")],
    "rlvr-8b": [dict(passes_per_step=1), dict(kl_coef=0.0), dict(kl_in="loss", kl_estimator="k3"),
                dict(nonstop_penalty=0.0), dict(lam=1.0), dict(reward=("digits",))],
}


def analogue(name, base, folder):
    """The preset's algorithm on the tests' tiny model. Rates, lengths and batch are made smaller."""
    preset = PRESETS[name]
    sizes = """model data eval_data template system_prompt stop device dtype prompts_per_step
        samples_per_prompt max_prompt_len max_response_len max_model_len pack_len max_num_seqs policy_lr
        critic_lr go out save_every epochs total_episodes recompute""".split()
    weight = preset.reward[0].partition("=")[2] or "1"
    (folder / "some.py").write_text(
        "def digits(response, answer, kind):\n"
        "    return 0.0 if int(answer) % 3 else sum(c.isdigit() for c in response) / max(len(response), 1)\n")
    return dataclasses.replace(
        preset, **{k: getattr(base, k) for k in sizes}, steps=2, eval_every=0, warmup_updates=0,
        policy_updates=min(preset.policy_updates, 4), critic_updates=min(preset.critic_updates, 2),
        resample_rounds=min(preset.resample_rounds, 1), overlong_buffer=8 * bool(preset.overlong_buffer),
        kl_coef=5000 * preset.kl_coef, reward=(f"{folder}/some.py:digits={weight}",))


@pytest.mark.parametrize("name", TERMS)
def test_every_term_of_a_preset_has_an_effect(name, base, tmp_path):
    """Without any one of its distinguishing terms, the preset's analogue is another run."""
    whole = analogue(name, base, tmp_path)
    changes = [{k: (v if k != "reward" else (f"{tmp_path}/some.py:{v[0]}",)) for k, v in term.items()}
               for term in TERMS[name]]
    cfgs = [dataclasses.replace(whole, **change, out=f"{tmp_path}/{i}")
            for i, change in enumerate([{}, *changes])]
    first, *others = run_ranks(1, ranks.first_rows, cfgs)[0]
    keys = ("policy_loss", "grad_norm/policy", "entropy", "score", "clip_share")
    for change, rows in zip(TERMS[name], others, strict=True):
        pairs = [(a[key], b[key]) for a, b in zip(first, rows, strict=True) for key in keys if key in a]
        assert any(abs(a - b) > 1e-3 * max(abs(a), abs(b), 1e-6) for a, b in pairs), change


@pytest.mark.parametrize("name,style,steps,gain", [("open-r1-1.5b-grpo", "open-r1", 8, 0.3),
                                                   ("rlvr-8b", "rlvr", 12, 0.15)])
def test_recipes_for_chat_models_learn(name, style, steps, gain, tmp_path):
    """A tiny chat model that answers in the recipe's own format, often with a guess, learns to work sums out.
    Prompt, extractor, rewards and algorithm are those of the preset, sizes and rates those of the demo. Over
    five seeds accuracy rose by 0.49 ± 0.04 and 0.38 ± 0.08: a gain below `gain` has 1 chance in 1,000."""
    model = taught(tasks.TASKS[style], tmp_path / "model", count=12, batches=160, batch=16)
    sizes = """samples_per_prompt prompts_per_step max_model_len pack_len max_num_seqs policy_lr critic_lr
        betas recompute warmup_updates""".split()
    cfg = dataclasses.replace(
        PRESETS[name], **{k: getattr(PRESETS["tiny-ppo"], k) for k in sizes}, model=model, steps=steps,
        data=(f"{model}/train.jsonl",), eval_data=(f"{model}/heldout.jsonl",), eval_every=steps, save_every=0,
        eval_samples=(16,), epochs=0, total_episodes=0, max_prompt_len=32, max_response_len=56)
    if PRESETS[name].samples_per_prompt == 1:
        cfg = dataclasses.replace(cfg, samples_per_prompt=1, prompts_per_step=64)
    rows, _ = run(cfg, tmp_path / "run")
    first, *_, last = [row["eval/heldout/avg@16"] for row in rows if "eval/heldout/avg@16" in row]
    assert first <= 0.6 and last >= first + gain


def test_the_gsm8k_preset_takes_a_step_at_its_models_shape(tmp_path):
    """Qwen2.5-0.5B's shape with two layers, a smaller vocabulary and random weights; GSM8K's rows as Parquet:
    one step, saved and exported. The process never has more memory than the plan says for the machine."""
    model = shape.build(f"{tmp_path}/model", "0.5b", layers=2, vocab=32768, chat=True)
    rows = [{"question": f"Ann has {a} apples and buys {b:,} more. How many has she?",
             "answer": f"She has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b:,}"}
            for a in range(20) for b in (990, 1005)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    keep_memory = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_TOP_PAD_": str(2**26)}
    subprocess.run(
        [sys.executable, f"{ROOT}/train.py", "gsm8k-0.5b-1gpu", "--model", model, "--steps", "1", "--go",
         "--data", f"{tmp_path}/train.parquet", "--eval_every", "0", "--prompts_per_step", "2",
         "--samples_per_prompt", "3", "--max_response_len", "12", "--max_num_seqs", "8", "--keep_best", "",
         "--entropy_coef", "0.01",  # a gradient although a random model is never right
         "--out", f"{tmp_path}/run", "--device", "cpu"],
        check=True, env=os.environ | keep_memory | {"OMP_NUM_THREADS": "2"})
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    planned = plan["host and disk, GiB"]["machine"]
    print(f"peak {row['mem/host_peak_gb']:.1f} GiB, planned for the machine {planned:.1f}")
    assert row["grad_norm/policy"] > 0 and row["response_len"] > 6
    assert 1 < row["mem/host_peak_gb"] < planned
    assert transformers.AutoConfig.from_pretrained(tmp_path / "run/export/policy").vocab_size == 32768


# --- data


def problems(count, weight=1.0, kind="math"):
    return [data.Problem(f"{weight}:{i}", (1, 2), "3", kind, weight) for i in range(count)]


def test_weights_say_how_often_a_file_comes_in_each_epoch():
    """Weight 2: every problem twice. Weight 1: once. Weight 0.25: a quarter of the problems, a different one
    in each epoch. The same on every call."""
    files = problems(20, 2.0) + problems(30, 1.0) + problems(40, 0.25)
    assert data.epoch_len(files) == 40 + 30 + 10
    cfg = dataclasses.replace(PRESETS["tiny-ppo"], prompts_per_step=80)
    epochs = [[p.text for p in data.batch_at(files, e, cfg)] for e in range(2)]
    for texts in epochs:
        seen = Counter(texts)
        assert all(seen[f"2.0:{i}"] == 2 for i in range(20))
        assert all(seen[f"1.0:{i}"] == 1 for i in range(30))
        assert sum(seen[f"0.25:{i}"] for i in range(40)) == 10
    assert epochs[0] != epochs[1]
    quarters = [{t for t in texts if t.startswith("0.25")} for texts in epochs]
    assert quarters[0] != quarters[1]
    tens = dataclasses.replace(cfg, prompts_per_step=10)
    assert epochs[1] == [p.text for s in range(8, 16) for p in data.batch_at(files, s, tens)]


def test_a_row_may_say_how_it_is_graded(tiny, tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "x", "reward": "exact"},
            {"prompt": [{"from": "human", "value": "c"}], "final_answer": "B", "choices": ["1", "2"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = dataclasses.replace(PRESETS["tiny-ppo"], data=(f"{tmp_path}/a.jsonl",), max_prompt_len=24,
                              data_weights=(0.5,))
    tokenizer = load_tokenizer(tiny)
    found = data.load_problems(cfg.data, tokenizer, cfg, lambda text: None)
    assert [(p.kind, p.weight) for p in found] == [("math", 0.5), ("exact", 0.5), ("choice", 0.5)]
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "a", "answer": "1", "reward": "vibes"}))
    with pytest.raises(UserError, match="b.jsonl row 1 has reward 'vibes'"):
        data.load_problems([f"{tmp_path}/b.jsonl"], tokenizer, cfg, lambda text: None)


def test_a_flag_with_a_value_per_file_needs_as_many_values_as_files():
    for argv in (["--data", "a", "b", "--data_weights", "1"],
                 ["--eval_data", "a", "b", "c", "--eval_samples", "1", "2"]):
        with pytest.raises(UserError, match="values for . files"):
            parse(["tiny-ppo", *argv])
    assert parse(["tiny-ppo", "--eval_data", "a", "b", "--eval_samples", "16", "4"]).eval_samples == (16, 4)


class Canned:
    """Where an engine is due: answers each prompt with the same text."""

    def __init__(self, cfg):
        self.cfg, self.rank, self.ranks, self.engines = cfg, 0, 1, 1

    def gather(self, x):
        return [x]

    def generate(self, requests, *_):
        for i, j in requests:
            yield dataclasses.replace(sample(3, 0.0), prompt_id=i, sample_id=j, text="so it is 12.")


def test_a_data_set_may_have_its_own_grader_and_extractor(base, tiny, tmp_path):
    """Rows name their data set. Its function replaces the comparison, and its extractor the usual one. Rows
    that only a function can grade are refused without one."""
    (tmp_path / "mine.py").write_text("def follows(response, answer, kind):\n    return 0.25\n")
    cfg = dataclasses.replace(base, extractor=("boxed", "GSM8K=last_number"),
                              reward=("math=3", f"ifeval@{tmp_path}/mine.py:follows", "format"))
    terms = rollout.terms_of(cfg)
    chosen = {name: [t.name for t in rollout.graders_of(name, terms)] for name in ("", "math", "IFEval")}
    assert chosen == {"": ["accuracy"], "math": ["accuracy"], "IFEval": ["ifeval"]}
    texts = {("gsm8k", 0): "so it is 12.", ("math", 1): "so it is 12.", ("IFEval", 2): "so it is 12."}
    found = {i: data.Problem("?", (1,), "12", dataset=name) for name, i in texts}

    with rollout.make_grader(cfg) as grader:
        samples, _ = rollout.rollout(Canned(cfg), grader, found, 1, 1.0, 8, (0,), 0)
    assert [(s.reward, s.weight, s.answer) for s in samples] == [(1.0, 3.0, "12"), (0.0, 3.0, None),
                                                                 (0.25, 1.0, None)]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "dataset": "ifeval"}\n')
    rows = data.load_problems([f"{tmp_path}/rows.jsonl"], load_tokenizer(tiny), cfg, lambda text: None)
    rollout.check_graders([rows], cfg)
    with pytest.raises(UserError, match="rows of data set 'ifeval' have no answer to compare"):
        rollout.check_graders([rows], dataclasses.replace(cfg, reward=("math",)))


def graded(cfg, datasets):
    """One shaped sample for each data set of `datasets`, of a response that math grades as right and the
    function `half` with 0.5; every second `ifeval` raises."""
    golds = "raise", "12"
    found = {i: data.Problem("?", (1,), golds[i % 2], dataset=name) for i, name in enumerate(datasets)}

    with rollout.make_grader(cfg) as grader:
        samples, _ = rollout.rollout(Canned(cfg), grader, found, 1, 1.0, 8, (0,), 0)
        return rollout.shape_rewards(samples, cfg)


@pytest.mark.parametrize("first", [True, False])
def test_a_grader_of_one_data_set_is_logged_over_its_own_samples(base, tmp_path, first):
    """reward/NAME is the mean, over the samples that NAME graded, of what it adds to their score. What graded
    no sample is not logged."""
    (tmp_path / "mine.py").write_text(
        "def half(response, answer, kind):\n    return 1 / 0 if answer == 'raise' else 0.5\n")
    terms = [f"ifeval@{tmp_path}/mine.py:half=2", "math=3"]
    cfg = dataclasses.replace(base, extractor=("last_number",), reward=(*terms[::1 if first else -1], "tags"))
    samples = graded(cfg, ["ifeval", "", "math", "ifeval", "ifeval", "IFEval"])

    def logged(samples):
        meter = log.Meter()
        log.measure_samples(meter, samples, rollout.part_names(cfg))
        rows = meter.reduce(lambda x: x, lambda x: x)
        return {k: v for k, v in rows.items() if k.startswith("reward/")}

    assert logged(samples) == {
        "reward/ifeval": 2 * 0.5 / 2, "reward/ifeval/failed": 0.5, "reward/accuracy": 3 / 2,
        "reward/accuracy/failed": 0, "reward/tags": 0, "reward/tags/failed": 0}
    assert "reward/ifeval" not in logged(samples[1:3]) and logged(samples[1:3])["reward/accuracy"] == 1.5
    assert [s.score for s in samples] == [0, 3, 0, 1, 0, 1]
    assert all(sum(s.entered.values()) == s.score for s in samples)


def test_a_function_is_not_named_like_a_part_that_a_flag_adds(base):
    for spec in ("r.py:overlong", "nonstop@r.py:f", "r.py:format"):
        with pytest.raises(UserError, match="has a function named .*, as a part is"):
            rollout.terms_of(dataclasses.replace(base, reward=("math", spec)))


def rows_of(folder, tokenizer, cfg, **datasets):
    """Problems by name of a set, with one row for each data set of it."""
    found = {}
    for name, names in datasets.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{name}{i}", "answer": "2", "dataset": d}) + "\n"
                                for i, d in enumerate(names)))
        found[name] = data.load_problems([str(path)], tokenizer, cfg, lambda text: None)
    return list(found.values())


@pytest.mark.parametrize("change,words", [
    (dict(extractor=("orz", "nosuch=letter")), "no row is of data set 'nosuch'.*needed: one of aime, gsm8k"),
    (dict(reward=("math", "nosuch@r.py:f")), "no row is of data set 'nosuch'.*needed: one of aime, gsm8k"),
    (dict(extractor=("boxed", "orz")), "two extractors for all other rows"),
    (dict(extractor=("boxed", "gsm8k=letter", "GSM8K=orz")), "two extractors for data set 'gsm8k'"),
    (dict(reward=("math", "gsm8k@r.py:f"), extractor=("orz", "AIME=letter")), ""),
    (dict(extractor=PRESETS["rlvr-8b"].extractor), "")])
def test_graders_and_extractors_are_for_data_sets_that_there_are(base, tiny, tmp_path, change, words):
    """In training or in evaluation. A preset's own may wait for rows."""
    cfg = dataclasses.replace(base, **change)
    sets = rows_of(tmp_path, load_tokenizer(tiny), base, train=["GSM8K", ""], test=["aime"])
    if words:
        with pytest.raises(UserError, match=words):
            rollout.check_graders(sets, cfg)
    else:
        rollout.check_graders(sets, cfg)
        rollout.check_graders(sets[::-1], cfg)


def test_an_edited_reward_file_ends_a_resumed_run(base, tmp_path):
    """The run says which file. The same text, from another folder, goes on."""
    file = tmp_path / "mine.py"
    text = "def score(response, answer, kind):\n    return len(set(response)) / 9\n"
    file.write_text(text)
    cfg = dataclasses.replace(base, reward=(f"{file}:score=2",), eval_every=0, steps=1, lr_decay="constant",
                              out=str(tmp_path / "run"))
    assert run_ranks(1, ranks.main, cfg) == [""]
    file.write_text(text.replace("9", "8"))
    (message,) = run_ranks(1, ranks.main, dataclasses.replace(cfg, steps=2))
    assert f"reward file {file} was edited" in message
    file.write_text(text)
    assert run_ranks(1, ranks.main, dataclasses.replace(cfg, steps=2)) == [""]


@pytest.mark.parametrize("reward,words", {
    ("maths",): "no reward 'maths' (did you mean math?)", ("math=x",): "weight 'x'",
    ("math", "exact"): "two parts of one name", ("format",): "no grader", ("overlong",): "no reward",
    ("math", "a.py:f", "b.py:f"): "two parts of one name", ("math=nan",): "weight 'nan'",
    ("math=inf",): "weight 'inf'", ("math", "format=-inf"): "weight '-inf'", ("math=0",): "weight '0'",
    ("math", "tags=0.0"): "weight '0.0'", ("math", "d@a.py:f", "D@b.py:g"): "two parts of one name",
    ("math", "a/b@a.py:f", "a-b@b.py:g"): "two parts of one name",
    ("@a.py:f",): "no data set before its @"}.items())
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
    """Open-R1's rewards look for <think> in the response."""
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = template.replace("m[0]", "messages[0]")
    name = template if template in data.TEMPLATES else "chat"
    cfg = dataclasses.replace(base, template=name, max_prompt_len=2048, max_response_len=24, pack_len=4096)
    problems = data.load_problems(cfg.data, tokenizer, cfg, lambda text: None)
    check_parts(problems, tokenizer, cfg)
    for part in ("format", "tags"):
        with_part = dataclasses.replace(cfg, reward=("math", f"{part}=0.5"))
        if opens:
            with pytest.raises(UserError, match=f"^--reward {part} .*--template {name} .*; needed: "):
                check_parts(problems, tokenizer, with_part)
        else:
            check_parts(problems, tokenizer, with_part)


def test_a_length_reward_needs_samples_to_compare(base, tiny):
    tokenizer = load_tokenizer(tiny)
    problems = data.load_problems(base.data, tokenizer, base, lambda text: None)
    cfg = dataclasses.replace(base, reward=("math", "length"), samples_per_prompt=2)
    check_parts(problems, tokenizer, cfg)
    with pytest.raises(UserError, match="--reward length compares the samples of a prompt, and there is one"):
        check_parts(problems, tokenizer, dataclasses.replace(cfg, samples_per_prompt=1))


def test_an_empty_stop_string_is_refused():
    """Every response would end at once, or never."""
    for argv in (["--stop", ""], ["--stop", "</answer>", ""]):
        with pytest.raises(UserError, match="--stop has an empty text; needed: "):
            parse(["tiny-ppo", *argv])
    assert parse(["tiny-ppo", "--stop", " "]).stop == (" ",)


@pytest.mark.parametrize("argv,words", [
    (["tiny-grpo", "--lam", "0.9"], "--lam has no effect"), (["tiny-ppo", "--ratio", "token"], "--algo grpo"),
    (["tiny-grpo", "--clip_high", "0.28"], "--policy_updates 2"),
    (["tiny-ppo", "--kl_in", "loss"], "--kl_coef"), (["orz-7b", "--lr_end", "1e-7"], "--lr_decay linear"),
    (["reinforce++-7b", "--drop_uniform"], "does not compare"),
    (["reinforce++-7b", "--resample_rounds", "2"], "does not compare"),
    (["tiny-grpo", "--kl_coef", "0.1", "--kl_estimator", "k1"], "k2 or k3")])
def test_a_flag_without_an_effect_is_refused(argv, words):
    with pytest.raises(UserError, match=re.escape(words)):
        parse(argv)


def test_a_run_that_never_trains_its_policy_is_refused():
    with pytest.raises(UserError, match="--freeze_policy_steps 5 of 5 steps"):
        parse(["tiny-ppo", "--freeze_policy_steps", "5", "--steps", "5"]).with_steps(100)


def test_a_cosine_falls_to_its_end_and_a_warm_up_may_be_a_share():
    cfg = dataclasses.replace(PRESETS["open-r1-1.5b-grpo"], steps=100, policy_lr=1.0, lr_end=0.1, epochs=0)
    rates = [cfg.lr("policy", step, 0) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[54] == pytest.approx(0.55) and rates[99] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


# --- the numbers of an evaluation


def test_pass_at_k_is_the_mean_over_all_subsets():
    for n, k in ((1, 1), (4, 2), (6, 4), (7, 7)):
        for right in range(n + 1):
            subsets = list(itertools.combinations([1] * right + [0] * (n - right), k))
            assert pass_at(k, n, right) == pytest.approx(sum(map(max, subsets)) / len(subsets))


def test_majority_is_the_share_of_the_most_frequent_answers_that_are_right():
    def share(*answers):
        return majority([SimpleNamespace(answer=a, reward=float(a == "7")) for a in answers])

    assert share("7", "7", "8") == 1 and share("7", "8", "8") == 0
    assert share("7", "8") == 0.5 and share("7", None, None, None) == 1
    assert share(None) == 0


def test_each_problem_has_its_own_value_of_each_metric():
    """Against loops over the answers of random problems."""
    rng, n = random.Random(1), 4
    answers = [[rng.choice(["7", "8", "9", None]) for _ in range(n)] for _ in range(50)]
    samples = [SimpleNamespace(prompt_id=i, answer=a, reward=float(a == "7"), ids=range(rng.randrange(9)),
                               stopped=rng.random() < 0.5) for i, some in enumerate(answers) for a in some]
    found = accuracy(samples, n)
    assert list(found) == ["avg@4", "pass@2", "pass@4", "maj@4", "response_len", "truncated"]
    for i, some in enumerate(answers):
        mine = [s for s in samples if s.prompt_id == i]
        pairs = list(itertools.combinations(some, 2))
        assert found["avg@4"][i] == some.count("7") / n
        assert found["pass@2"][i] == pytest.approx(sum("7" in pair for pair in pairs) / len(pairs))
        assert found["pass@4"][i] == ("7" in some)
        assert found["maj@4"][i] == majority(mine)
        assert found["response_len"][i] == sum(len(s.ids) for s in mine) / n
        assert found["truncated"][i] == sum(not s.stopped for s in mine) / n
    two = run_ranks(2, gathered, samples, n)
    assert two == [found, found]  # in the order of the problems


def gathered(samples, n):
    """What gather_scores returns where each rank has every second problem."""
    world = dist.init("cpu", "float32")
    return rollout.gather_scores([s for s in samples if s.prompt_id % world.size == world.rank], n)


def test_the_standard_error_is_that_of_the_bootstrap_over_problems():
    rng = np.random.default_rng(2)
    values = rng.beta(0.5, 0.5, 80)
    variance = sum((x - sum(values) / 80) ** 2 for x in values) / 79
    assert evaluate.std_error(values.tolist()) == pytest.approx((variance / 80) ** 0.5)
    means = rng.choice(values, (20_000, 80)).mean(1)
    assert evaluate.std_error(values.tolist()) == pytest.approx(means.std(), rel=0.03)
    assert evaluate.std_error([0.5]) is None and evaluate.std_error([]) is None


def test_two_models_are_compared_on_the_problems_that_both_have(base, tiny, tmp_path):
    """One of them dropped the long prompts. The paired error equals the formula and the bootstrap over
    problems, and is smaller than that of independent models, because hard problems are hard for both."""
    path, rng = tmp_path / "d.jsonl", np.random.default_rng(3)
    path.write_text("".join(json.dumps({"prompt": "1" * (2 + i % 4), "answer": str(i)}) + "\n"
                            for i in range(80)))
    cfg = dataclasses.replace(base, eval_data=(str(path),), max_prompt_len=16)
    tokenizer = load_tokenizer(tiny)
    first, other = (rollout.load_sets(cfg, tokenizer, str) for _ in range(2))
    lengths = sorted({len(p.ids) for p in first["d"]})
    fewer = rollout.load_sets(dataclasses.replace(cfg, max_prompt_len=lengths[-2]), tokenizer, str)
    assert (len(other["d"]), len(fewer["d"])) == (80, 60)
    hard = rng.random(80)
    a, b = (np.clip(hard + rng.normal(0, 0.1, 80) + shift, 0, 1) for shift in (0, 0.05))
    of_first, of_other = ({"d": {"avg@4": values.tolist()}} for values in (a, b))
    found = paired_differences(other, of_other, first, of_first)["d"]
    gap, error = found["metrics"]["avg@4"]["value"], found["metrics"]["avg@4"]["stderr"]
    assert found["problems"] == 80 and gap == pytest.approx((b - a).mean())
    assert error == pytest.approx((b - a).std(ddof=1) / 80 ** 0.5)
    drawn = rng.integers(80, size=(20_000, 80))
    assert error == pytest.approx((b[drawn].mean(1) - a[drawn].mean(1)).std(), rel=0.03)
    assert error < 0.5 * (evaluate.std_error(a.tolist()) ** 2 + evaluate.std_error(b.tolist()) ** 2) ** 0.5
    kept = np.arange(80) % 4 != 3
    of_fewer = {"d": {"avg@4": b[kept].tolist()}}
    found = paired_differences(fewer, of_fewer, first, of_first)["d"]
    assert found["problems"] == 60
    assert found["metrics"]["avg@4"]["value"] == pytest.approx((b - a)[kept].mean())
    assert found["metrics"]["avg@4"]["stderr"] == pytest.approx((b - a)[kept].std(ddof=1) / 60 ** 0.5)


def common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_repeat_score_is_the_naive_score():
    """2 Σ LCP / n(n+1) over sorted suffixes, for random texts of two letters, periodic texts, and
    non-ASCII."""
    def naive(text):
        suffixes = sorted((text[i:] for i in range(len(text))), key=lambda s: [ord(c) for c in s])
        total = sum(common_prefix(a, b) for a, b in itertools.pairwise(suffixes))
        return 2 * total / (len(text) * (len(text) + 1))

    rng = random.Random(0)
    texts = ["".join(rng.choice("ab") for _ in range(rng.randrange(2, 60))) for _ in range(60)]
    for text in [*texts, "a" * 50, "abc" * 20, "né∑" * 5 + "\U0001f600", "ab"]:
        assert log.repeat_score(text) == pytest.approx(naive(text)), text
    assert log.repeat_score("") == log.repeat_score("a") == 0 < log.repeat_score("ab" * 99) < 1


def test_reflections_counts_the_words_of_second_thoughts():
    assert log.reflections("Wait, however, wait, I recheck. However so.") == 4


# --- what enters the loss


def sample(length: int, reward: float, stopped: bool = True) -> data.Sample:
    ids, logp = np.arange(length, dtype=np.int32), np.zeros(length, np.float32)
    return data.Sample(0, 0, (1, 2), ids, logp, stopped, "", 0, reward=reward)


def test_a_long_response_costs_reward_and_a_truncated_one_may_be_left_out():
    """DAPO's penalty falls from 0 to -1 over the buffer and enters the pack's rewards. A response that is
    left out of the loss adds to no count."""
    cfg = dataclasses.replace(PRESETS["tiny-grpo"], overlong_buffer=16, mask_truncated=True)
    samples = [sample(length, 1.0, stopped=length < 48) for length in (10, 32, 40, 48)]
    shaped = rollout.shape_rewards(samples, cfg)
    assert [s.parts.get("overlong", 0) for s in shaped] == [0, 0, -0.5, -1]
    assert [s.in_loss for s in shaped] == [True, True, True, False]
    p = data.pack(shaped)
    assert p.rewards[p.cu_seqlens[1:].long() - 1].tolist() == [1, 1, 0.5, 0]
    assert p.responses == 3 and int(p.mask.sum()) == 82 and not p.mask[p.cu_seqlens[3]:].any()
    (plain,) = rollout.shape_rewards([sample(48, 0.0, stopped=False)], PRESETS["tiny-grpo"])
    assert not plain.parts and plain.in_loss


def test_the_length_penalty_ends_where_the_response_is_cut():
    """--max_model_len 40 leaves 38 tokens after a prompt of 2."""
    cfg = dataclasses.replace(PRESETS["tiny-grpo"], overlong_buffer=16, max_model_len=40)
    lengths = (22, 30, 38)
    assert rollout.overlong([sample(n, 1.0) for n in lengths], cfg) == [0, -0.5, -1]
    longer = dataclasses.replace(cfg, max_model_len=60)  # then --max_response_len 48 cuts
    assert rollout.overlong([sample(n, 1.0) for n in lengths], longer) == [0, 0, -6 / 16]


def test_uniform_groups_are_replaced_by_other_prompts(base, tmp_path):
    """The rewards of a prompt can differ only if 3 divides its answer. After the rounds, prompts whose
    rewards differ are of that kind, and uniform ones have been replaced. Two ranks and one rank do the
    same."""
    (tmp_path / "r.py").write_text(
        "def some(response, answer, kind):\n"
        "    return sum(map(ord, response)) % 2 if int(answer) % 3 == 0 else 0\n")
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
    assert one["measured"] == len(first)  # the reward of the metrics is that of the batch before replacement
    assert len(varied) < len(rewards) and "prompts are still uniform" in one["alarms"]


def test_there_is_no_alarm_if_nothing_is_uniform_after_the_last_round(base, tmp_path):
    """The rewards of most prompts differ, so that one round after the other replaces the few others."""
    (tmp_path / "r.py").write_text("def some(response, answer, kind):\n"
                                   "    return sum(map(ord, response)) % 5 == 0\n")
    cfg = dataclasses.replace(base, algo="grpo", critic_updates=1, steps=1, eval_data=(),
                              reward=(f"{tmp_path}/r.py:some",))
    for rounds in range(1, 9):
        out = f"{tmp_path}/{rounds}"
        one = run_ranks(1, ranks.resampled, dataclasses.replace(cfg, resample_rounds=rounds, out=out))[0]
        left = sum(len(set(rewards)) == 1 for rewards in one["rewards"].values())
        assert bool(left) == ("prompts are still uniform" in one["alarms"])
        if not left:
            break
    assert left == 0 and one["drawn"] != one["prompts"]


def test_a_refreshed_reference_is_resumed(base, tmp_path):
    """The reference becomes the policy after each pass over the 40 problems, every 2 steps of 20: the KL is 0
    again. A run that is resumed in the second epoch equals the uninterrupted run, bit for bit."""
    cfg = dataclasses.replace(base, kl_coef=0.1, ref_refresh=True, prompts_per_step=20, samples_per_prompt=2,
                              critic_updates=1, steps=4, save_every=3, eval_data=())
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
    ("--temperature 0.1", "--temperature does nothing in evaluation; needed: a flag that python -m"),
    ("--samples_per_prompt=4", "--samples_per_prompt does nothing"), ("--model y", "--model does nothing"),
    ("--no-selfcheck", "--selfcheck does nothing"), ("--policy-lr 1", "--policy_lr does nothing"),
    ("--reward math tags", "--reward tags does nothing"), ("--reward math=2", "--reward math=2 does nothing"),
    ("--reward math r.py:f", "--reward r.py:f does nothing"),
    ("--template chat --steps 3", "--steps does nothing"), ("--temprature 1", "no flag --temprature")])
def test_a_flag_that_evaluation_does_not_read_is_refused(argv, words):
    with pytest.raises(UserError, match=re.escape(words)) as e:
        main(["/no/model", "x.jsonl", *argv.split()])
    assert "\n" not in str(e.value)


def test_evaluation_takes_the_flags_that_it_reads():
    argv = "/no/model x.jsonl --eval_temperature 0 --reward math d@r.py:f"
    cfg, = eval_configs(argv.split())
    assert (cfg.model, cfg.eval_data, cfg.eval_temperature) == ("/no/model", ("x.jsonl",), (0.0,))
    assert cfg.reward == ("math", "d@r.py:f")
    long, = eval_configs([*argv.split(), "--max_response_len", "20000", "--pack_len", "30000"])
    assert long.model_len == long.max_prompt_len + 20000  # and not the preset's 8192
    assert set(EVAL_FLAGS) <= {f.name for f in dataclasses.fields(cfg)}


def test_a_chat_model_is_evaluated_without_orzs_stop_strings():
    def stops(*argv):
        return eval_configs(["/no/model", "x.jsonl", *argv])[0].stop

    assert stops() == PRESETS["orz-7b"].stop == stops("--template", "orz")
    assert stops("--template", "chat") == () == stops("--template=chat")
    assert stops("--template", "chat", "--stop", "</answer>") == ("</answer>",)


def test_the_help_has_models_and_data_first_and_only_the_flags_that_evaluation_reads(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--help"])
    text = capsys.readouterr().out
    assert e.value.code == 0
    assert text.startswith("usage: python -m tools.evaluate MODEL [MODEL …] DATA [DATA …] [--flags]\n")
    assert max(map(len, text.splitlines())) <= 80 and "\n    python -m tools.evaluate " in text
    assert set(re.findall(r"^  --(\w+)", text, re.M)) == set(EVAL_FLAGS) - {"out"}
    for found in ("the only source of randomness (default: 0)", "(default: (16,))", "Results go to --out"):
        assert found in text


def test_models_end_at_the_first_data_file():
    def split(text):
        cfgs = eval_configs(text.split())
        return " ".join(cfg.model for cfg in cfgs), " ".join(cfgs[0].eval_data), cfgs[0].seed

    assert split("m a.json --seed 1") == ("m", "a.json", 1)
    assert split("m n O/N a.jsonl O/D") == ("m n O/N", "a.jsonl O/D", 0)
    assert split("m O/D:main/a.parquet b.json --seed=2") == ("m", "O/D:main/a.parquet b.json", 2)
    assert split("m O/D") == ("m", "O/D", 0) and split("a.json b.json") == ("a.json", "b.json", 0)
    for argv, words in (["m"], "tools.evaluate m; needed: python -m"), ([], "tools.evaluate ; needed"), (
            ["m", "./m", "a.json"], "the same model twice; needed: each model once"):
        with pytest.raises(UserError, match=re.escape(words)):
            eval_configs(argv)


def test_models_of_one_folder_name_have_names_that_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = ["runs/a/export/policy", "runs/b/export/policy", "/else/export/policy", "policy",
             "Qwen/Qwen2.5-0.5B"]
    assert [model_name(path) for path in paths] == [
        "runs--a--export--policy", "runs--b--export--policy", "else--export--policy", "policy",
        "Qwen--Qwen2.5-0.5B"]
    assert model_name(f"{tmp_path}/runs/../policy/") == "policy"


EVAL = ["--template", "plain", "--eval_samples", "4", "--max_response_len", "24", "--pack_len", "64",
        "--max_prompt_len", "16", "--device", "cpu", "--dtype", "float32"]


def outcome(argv) -> str:
    """The message with which an evaluation ends, or ""."""
    try:
        main(argv)
    except (UserError, RuntimeError) as e:
        return str(e)
    return ""


def test_a_model_folder_is_evaluated_without_training(base, tiny, tmp_path):
    """`python -m tools.evaluate` on two ranks gives all numbers of one rank, bit by bit. They are those of
    the samples, which are all in the file."""
    found, (name,) = [], rollout.set_names([base.data[0]])
    for count in (1, 2):
        out = tmp_path / str(count)
        argv = [tiny, base.data[0], *EVAL, "--reward", *base.reward, "--out", str(out)]
        run_ranks(count, main, argv)
        results = json.loads((out / "scores.json").read_text())
        assert results.pop("date").startswith("20")
        found.append(results)
        rows = read_jsonl(out / "samples.jsonl")
        ids = [(r["prompt_id"], r["sample_id"]) for r in rows]
        assert ids == list(itertools.product(range(40), range(4)))
        metrics = results["sets"][name]["metrics"]
        means = np.array([r["reward"] for r in rows]).reshape(40, 4).mean(1)
        assert metrics["avg@4"]["value"] == pytest.approx(means.mean())
        assert metrics["avg@4"]["stderr"] == pytest.approx(means.std(ddof=1) / 40 ** 0.5)
        assert {"pass@2", "pass@4", "maj@4", "response_len", "truncated"} <= set(metrics)
    assert found[0] == found[1]
    assert (found[0]["sets"][name]["problems"], found[0]["sets"][name]["samples"]) == (40, 4)
    assert found[0]["flags"]["max_response_len"] == 24 and found[0]["flags"]["engine"] == "torch"
    assert found[0]["model"] == tiny and {"torch", "transformers", "math-verify"} == set(found[0]["versions"])
    assert run_ranks(2, outcome, argv) == [
        f"{out} is not empty; needed: an --out that is new or empty, or no --out"] * 2
    assert json.loads((out / "scores.json").read_text())["sets"] == found[1]["sets"]


def test_several_models_have_the_scores_that_each_has_alone(base, tiny, tmp_path, monkeypatch, capfd):
    """Together on two ranks, alone on one; two of one shape share an engine, the third needs its own. A
    second evaluation gets a numbered folder. The last lines compare them, and no line is over 80 columns."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(base.data[0], "sums.jsonl")
    models = [make_model(f"runs/{name}/policy", seed, layers)
              for name, seed, layers in (("a", 1, 2), ("b", 2, 2), ("c", 3, 1))]
    argv = ["sums.jsonl", *EVAL, "--reward", *base.reward]
    run_ranks(2, main, [*models, *argv])
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    together = [json.loads(Path(f"runs/eval/runs--{x}--policy/sums/scores.json").read_text()) for x in "abc"]
    for x, model, several in zip("abc", models, together, strict=True):
        run_ranks(1, main, [model, *argv])
        alone = json.loads(Path(f"runs/eval/runs--{x}--policy/sums-2/scores.json").read_text())
        assert several["sets"] == alone["sets"] and several["model_files"] == alone["model_files"]
    assert len({s["sets"]["sums"]["metrics"]["avg@4"]["value"] for s in together}) == 3
    rows = [read_jsonl(Path(f"runs/eval/runs--{x}--policy/sums/samples.jsonl")) for x in "abc"]
    rewards = [np.array([r["reward"] for r in of_model]).reshape(40, 4).mean(1) for of_model in rows]
    assert "differences" not in together[0]
    for i, (results, line) in enumerate(zip(together, lines[-3:], strict=True)):
        words = f"{models[i]} sums/avg@4 {rewards[i].mean():.4f} ± {rewards[i].std(ddof=1) / 40 ** 0.5:.4f}"
        if i:
            gaps, found = rewards[i] - rewards[0], results["differences"]["sums"]["metrics"]["avg@4"]
            assert found["value"] == pytest.approx(gaps.mean())
            assert found["stderr"] == pytest.approx(gaps.std(ddof=1) / 40 ** 0.5)
            words += f" {gaps.mean():+.4f} ± {gaps.std(ddof=1) / 40 ** 0.5:.4f}"
        assert line.split() == words.split()


def test_vllm_takes_models_of_one_kind_in_a_process(base, tiny, tmp_path):
    """With the PyTorch engine any models may be compared."""
    other = make_model(tmp_path / "other", layers=1)
    argv = [tiny, other, base.data[0], *EVAL, "--reward", *base.reward, "--engine"]
    message = run_ranks(1, outcome, [*argv, "vllm"])[0]
    assert message == (f"vLLM takes models of one kind in a process, and {other} differs from {tiny} in "
                       "config.json, tokenizer or end tokens; needed: a command for each, or --engine torch")


def test_an_evaluation_with_gold_answers_that_cannot_be_graded_is_refused(tiny, tmp_path, monkeypatch, capfd):
    """Over 1 % of a set, as in training. With --go they are told."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{answer}?", "answer": answer, "reward": "choice"} for answer in ("A", "B", "no")]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = "sums: 1 of 3 gold answers can't be graded: sums.jsonl:3 'no'"
    message = run_ranks(1, outcome, [tiny, "sums.jsonl", *EVAL])[0]
    assert message.startswith(f"{found}; needed: ") and message.endswith("or --go")
    assert not Path("runs").exists()
    capfd.readouterr()
    assert run_ranks(1, outcome, [tiny, "sums.jsonl", *EVAL, "--go", "--out", "out"]) == [""]
    assert found in capfd.readouterr().out and Path("out/scores.json").is_file()


def test_an_evaluation_that_fails_leaves_no_folder(base, tiny, tmp_path, monkeypatch):
    """A second model that is too short is refused before the first one is evaluated. One that lacks weights
    fails when they are loaded, and the results of the first model stay."""
    monkeypatch.chdir(tmp_path)
    argv = [base.data[0], *EVAL, "--reward", *base.reward]
    settings = json.loads(Path(tiny, "config.json").read_text())
    for name, change in (("short", {"max_position_embeddings": 30}), ("broken", {"num_hidden_layers": 3})):
        shutil.copytree(tiny, name)
        Path(name, "config.json").write_text(json.dumps(settings | {"layer_types": None} | change))
    message = run_ranks(2, outcome, [tiny, "short", *argv])
    assert message[0] == message[1] and message[0].startswith("short has 30 positions, and a prompt with its")
    assert not Path("runs").exists()
    assert "parameters did not come" in run_ranks(1, outcome, [tiny, "broken", *argv])[0]
    (folder,) = Path("runs/eval").glob("*/*")
    assert (folder / "scores.json").is_file() and folder.parent.name == model_name(tiny)
