"""Tests of the command line: which value wins, and which values are allowed."""

import dataclasses
import importlib.metadata
import itertools
import math
import os
import re

import pytest
import torch
from conftest import ROOT

import configs
from configs import PRESETS, Config, check_paths, parse
from guard.messages import UserError


def test_a_flag_beats_the_layout_which_beats_the_preset(monkeypatch):
    assert parse(["orz-7b"]).critic_updates == 12
    assert parse(["orz-7b", "--layout=debug"]).critic_updates == 1
    assert parse(["orz-7b", "--layout", "debug", "--critic-updates", "3"]).critic_updates == 3
    # with --data, the preset's evaluation sets are not used
    assert parse(["tiny-ppo"]).eval_data and not parse(["tiny-ppo", "--data", "mine.jsonl"]).eval_data
    # as for any flag that is given twice, the last value counts
    debug, production = (f"--layout {name}".split() for name in ("debug", "production"))
    assert parse(["orz-7b", *production, *debug]) == parse(["orz-7b", *debug])
    assert parse(["orz-7b", *debug, *production]) == parse(["orz-7b", *production])
    monkeypatch.setenv("DEBUG_MODE", "True")
    assert parse(["orz-7b"]).ranks == 8
    monkeypatch.setenv("DEBUG_MODE", "False")
    assert parse(["orz-7b"]).layout == "any"


def test_without_a_preset_torchrun_starts_orz_7b_in_the_layout_for_its_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for ranks, layout in (("8", "debug"), ("16", "any"), ("32", "production")):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        assert parse(["--seed", "1"]) == parse(["orz-7b", "--layout", layout, "--seed", "1"])
        assert parse(["orz-7b"]).layout == "any" and parse(["--layout", "any"]).layout == "any"


@pytest.mark.parametrize("name", ["dapo-7b", "scale-rl-7b"])
@pytest.mark.parametrize("other", ["--algo ppo", "--advantage return_whiten"])
def test_what_compares_no_samples_is_accepted_with_the_flags_that_the_refusal_names(name, other):
    with pytest.raises(UserError, match="compare the samples") as e:
        parse([name, *other.split()])
    typed = re.search("needed: (.+?),", str(e.value))[1].split()
    cfg = parse([name, *other.split(), *typed])
    assert not cfg.compares_samples and not cfg.resample_rounds and not cfg.drop_uniform
    with pytest.raises(UserError, match="compare the samples"):
        parse([name, *other.split(), *typed, "--resample_rounds", "1"])


def test_the_length_of_a_run_is_given_once():
    assert parse(["orz-7b"]).with_steps(57000).steps == -(-20 * 57000 // 128)
    assert parse(["orz-7b", "--steps", "7"]).with_steps(57000).steps == 7
    assert parse(["orz-7b", "--total_episodes", "81920"]).with_steps(57000).steps == 10
    with pytest.raises(UserError, match="--freeze_policy_steps 5: none of the 5 steps"):
        parse(["tiny-ppo", "--freeze_policy_steps", "5", "--steps", "5"]).with_steps(100)


def test_learning_rates_depend_on_the_counts_alone():
    c = parse(["orz-7b", "--steps", "1000"])
    assert c.lr("policy", 0, 0) == pytest.approx(1e-6 / 50)  # the first update has a rate above 0
    assert c.lr("policy", 49, 0) == c.lr("policy", 999, 0) == 1e-6
    assert c.lr("critic", 4, 1) == c.lr("critic", 900, 11) == 5e-6  # the 50th update ends the warm-up
    anneal = parse(["orz-32b", "--steps", "100", "--lr_decay", "linear", "--lr_end", "3e-7",
                    "--warmup_updates", "0"])
    assert anneal.lr("policy", 99, 0) == pytest.approx(3e-7 + 7e-7 / 100)  # the last update has a rate, too
    assert anneal.lr("policy", 50, 0) == pytest.approx((1e-6 + 3e-7) / 2)
    uneven = dataclasses.replace(PRESETS["tiny-grpo"], warmup_updates=1.5, policy_lr=3e-4,
                                 lr_decay="constant")
    assert [uneven.lr("policy", step, 0) for step in range(3)] == pytest.approx([2e-4, 3e-4, 3e-4])
    # a cosine, and a warm-up that is a fraction of the run
    c = dataclasses.replace(PRESETS["open-r1-1.5b-grpo"], steps=100, policy_lr=1.0, lr_end=0.1, epochs=0)
    rates = [c.lr("policy", step, 0) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[55] == pytest.approx(0.55) and rates[99] > 0.1
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("end", [0.0, 0.3])
@pytest.mark.parametrize("decay", ["linear", "cosine"])
@pytest.mark.parametrize("steps,updates", [(1, 1), (7, 1), (5, 3), (100, 2)])
def test_decay_is_that_of_torchs_schedulers(decay, end, steps, updates):
    """No update has the rate 0, if --lr_end is 0: not even the last."""
    cfg = dataclasses.replace(PRESETS["tiny-grpo"], steps=steps, policy_updates=updates, policy_lr=0.9,
                              lr_decay=decay, lr_end=end, warmup_updates=0)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.9)
    total = steps * updates
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, end / 0.9, total) if decay == "linear" else (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total, end))
    for step, update in itertools.product(range(steps), range(updates)):
        assert cfg.lr("policy", step, update) == pytest.approx(rates.get_last_lr()[0], abs=1e-12) != end
        optimizer.step()
        rates.step()


def test_the_allocator_is_set_where_the_user_has_not_set_it(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for given in ({}, *({name: "max_split_size_mb:64"} for name in names)):
        monkeypatch.setattr(os, "environ", dict(given))
        configs.set_allocator()
        ours = "expandable_segments:True,pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"
        assert os.environ == (given or {names[0]: ours})
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.11.0+cu130")
    configs.set_allocator()  # this version of torch does not know the other options
    assert os.environ == {names[0]: "expandable_segments:True"}


def test_help_shows_every_flag_with_its_meaning_and_value(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as e:
        parse(["tiny-grpo", "--help"])
    shown = capsys.readouterr().out
    assert not e.value.code and all(len(line) <= 80 for line in shown.splitlines())
    flat = " ".join(shown.split())
    source = (ROOT / "configs.py").read_text(encoding="utf-8")
    source = source[source.index("class Config"):source.index("def __post_init__")]
    order = re.findall(r"^    (?:(\w+): .*  # |# --- (.+)$)", source, re.M)
    assert re.findall(r"^ (?: --(\w+)|(\w.*\w)$)", shown, re.M) == order
    assert [i for i, (flag, title) in enumerate(order) if title][:2] == [0, 13]
    for f in dataclasses.fields(Config):
        meaning = re.search(rf"^    {f.name}: .*?  # (.+)$", source, re.M)[1]
        value = getattr(PRESETS["tiny-grpo"], f.name)
        if f.name == "out":
            value = "runs/tiny-grpo"
        assert f"--{f.name}" in flat and meaning in flat, f.name
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert f"{meaning} (default: {value})" in flat, f.name
    assert all(name in shown for name in PRESETS)


def test_a_number_out_of_its_range_is_one_line():
    allowed = configs.ranges()
    number = re.compile(r"\b(int|float|Count|Amount|Positive|NotNegative|Share|Part|Beta|Seconds)\b")
    numbers = {f.name for f in dataclasses.fields(configs.Config) if number.search(f.type)}
    assert allowed.keys() == numbers and len(numbers) > 40
    for name, only in allowed.items():
        default = getattr(PRESETS["tiny-ppo"], name)
        outside = [only.low - 1, math.nan, math.inf, -math.inf, *[only.low] * only.above,
                   *[2 * only.high] * (only.high < math.inf)]
        for x in outside:
            with pytest.raises(UserError, match=f"^--{name} is .*; needed: --{name} "):
                dataclasses.replace(PRESETS["tiny-ppo"], **{name: (x,) if isinstance(default, tuple) else x})


@pytest.mark.parametrize("words", [
    "--betas 1 0.9", "--betas 0.9 1", "--stall_limit 1e10", "--grace 1e10", "--grade_deadline 1e300",
    "--temperature 1e-300", "--eval_temperature 1 1e-300", "--mismatch_bounds 0 1e99", "--value_clip 1e99",
    "--clip_high 1e99 --policy_updates 2", "--lora_alpha 1e99 --lora 4", "--adam_eps 1e-50"])
def test_a_number_that_torch_or_the_system_can_t_use_is_one_line(words):
    flag = words.partition(" ")[0]
    with pytest.raises(UserError, match=f"^{flag} .*; needed: "):
        parse(["tiny-ppo", "--eval_data", "a.jsonl", "b.jsonl", *words.split()])


def test_paths_that_may_be_the_hubs_and_several_machines_are_left_to_later_checks(monkeypatch):
    check_paths(parse(["tiny-ppo", "--model", "Org/model", "--data", "org/set:train.parquet", "--eval_every",
                       "0"]))
    nowhere = parse(["tiny-ppo", "--model", "nowhere", "--data", "no.jsonl"])
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    check_paths(nowhere)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    with pytest.raises(UserError, match="no model folder 'nowhere'"):
        check_paths(nowhere)
