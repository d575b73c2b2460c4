"""The command line: precedence, and mistakes answered in one line with the nearest name."""

import dataclasses
import re

import pytest
from conftest import ROOT

from configs import PRESETS, Config, UserError, check_ranks, help_text, parse


def test_a_flag_beats_the_layout_which_beats_the_preset(monkeypatch):
    assert parse(["orz-7b"]).critic_updates == 12
    debug = parse(["orz-7b", "--layout", "debug"])
    assert (debug.prompts_per_step, debug.samples_per_prompt, debug.critic_updates, debug.engine_share, debug.ranks) == (
        16, 2, 1, 0.5, 8)
    assert parse(["orz-7b", "--layout", "debug", "--critic-updates", "3"]).critic_updates == 3
    production = parse(["orz-7b", "--layout=production"])
    assert (production.prompts_per_step, production.samples_per_prompt, production.ranks) == (128, 64, 32)
    monkeypatch.setenv("DEBUG_MODE", "True")
    assert parse(["orz-7b"]).ranks == 8
    monkeypatch.setenv("DEBUG_MODE", "maybe")
    with pytest.raises(UserError, match="DEBUG_MODE"):
        parse(["orz-7b"])


def test_orz_7b_is_open_reasoner_zeros_recipe():
    c = parse(["orz-7b", "--layout", "production"])
    want = dict(policy_lr=1e-6, critic_lr=5e-6, warmup_updates=50, betas=(0.9, 0.95), weight_decay=0.0, grad_clip=1.0,
                max_prompt_len=2048, max_response_len=8000, model_len=8192, pack_len=16384, temperature=1.0, gamma=1.0,
                lam=1.0, clip_low=0.2, clip_high=0.2, value_clip=0.2, kl_coef=0.0, kl_estimator="k3", entropy_coef=0.0,
                epochs=20, save_every=50, eval_every=10, policy_updates=1, critic_updates=12, engine_share=0.7,
                stop=("User:", "Human:", "Assistant:", "</answer>"))
    assert {k: getattr(c, k) for k in want} == want


@pytest.mark.parametrize("argv,words", [
    ([], ["preset", "tiny-ppo"]),
    (["tiny-pppo"], ["tiny-pppo", "did you mean tiny-ppo"]),
    (["tiny-ppo", "--polcy_lr", "1"], ["--polcy_lr", "did you mean --policy_lr"]),
    (["tiny-ppo", "--layout", "prodution"], ["prodution", "did you mean production"]),
    (["tiny-ppo", "--steps", "many"], ["steps", "many"]),
    (["tiny-ppo", "--algo", "dpo"], ["algo", "dpo"]),
    (["tiny-ppo", "--pack_len", "60"], ["pack_len 60", "--pack_len 64"]),
    (["tiny-ppo", "--critic_updates", "5", "--policy_updates", "2"], ["nest"]),
    (["tiny-ppo", "--prompts_per_step", "0"], ["--prompts_per_step is 0"]),
])
def test_mistakes_are_one_line_with_the_fix(argv, words):
    with pytest.raises(UserError) as e:
        parse(argv)
    assert "\n" not in str(e.value) and all(w in str(e.value) for w in words), str(e.value)


def test_rank_counts_are_checked_with_the_command_that_fits():
    with pytest.raises(UserError, match="--nnodes 4 --nproc-per-node 8"):
        check_ranks(parse(["orz-7b", "--layout", "production"]), 8)
    with pytest.raises(UserError, match="--tp 4"):
        check_ranks(parse(["orz-32b"]), 6)
    check_ranks(parse(["orz-32b"]), 8)


def test_the_length_of_a_run_is_given_once():
    assert parse(["orz-7b"]).with_steps(57000).steps == -(-20 * 57000 // 128)
    assert parse(["orz-7b", "--steps", "7"]).with_steps(57000).steps == 7
    assert parse(["orz-7b", "--total_episodes", "81920"]).with_steps(57000).steps == 10
    with pytest.raises(UserError, match="2 times"):
        parse(["orz-7b", "--steps", "7", "--epochs", "2"]).with_steps(10)


def test_learning_rates_are_a_function_of_the_counts():
    c = parse(["orz-7b", "--steps", "1000"])
    assert c.lr("policy", 0, 0) == pytest.approx(1e-6 / 50)  # the first update moves
    assert c.lr("policy", 49, 0) == c.lr("policy", 999, 0) == 1e-6
    assert c.lr("critic", 4, 1) == c.lr("critic", 900, 11) == 5e-6  # 50 updates are 4 steps and 2 updates
    anneal = parse(["orz-32b", "--steps", "100", "--lr_decay", "linear", "--lr_end", "3e-7", "--warmup_updates", "0"])
    assert anneal.lr("policy", 99, 0) == pytest.approx(3e-7)
    assert anneal.lr("policy", 49, 0) == pytest.approx((1e-6 + 3e-7) / 2)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_whole(name):
    assert isinstance(parse([name]), Config)


def test_help_has_every_flag_in_its_group_with_meaning_and_value():
    """At 80 columns; no comment of the dataclass is lost, and each flag shows the preset's own value."""
    source = (ROOT / "configs.py").read_text(encoding="utf-8")
    source = source[source.index("class Config"):source.index("def __post_init__")]
    text = help_text(PRESETS["orz-7b"], "train.py")
    assert all(len(line) <= 80 for line in text.splitlines())
    flat = " ".join(text.split())
    flags = re.split(r" (?=--(?!no-)\w+)", flat)
    for f in dataclasses.fields(Config):
        meaning = re.search(rf"^    {f.name}: .*?  # (.+)$", source, re.M)[1]
        value = getattr(PRESETS["orz-7b"], f.name)
        shown = (" ".join(map(str, value)) if isinstance(value, tuple) else str(value)) or "none"
        assert any(x.startswith(f"--{f.name} ") or x.startswith(f"--{f.name},") for x in flags), f.name
        assert f"[{shown}]" in flat and meaning in flat, f.name
    assert all(group in flat for group in re.findall(r"^    # --- (.+)$", source, re.M))
    assert flat.count("--no-") == sum(f.type == "bool" for f in dataclasses.fields(Config))
