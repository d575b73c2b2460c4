"""Tests papers' claims about RL recipes with many short runs on a laptop.

    python -m bench.ablations [--part core] [--tasks chain think] [--seeds 5] [--jobs 2]
    python -m bench.ablations --report                     # train nothing: tables of the finished runs
    python -m bench.ablations --vary my.py:advantage       # your function against ours, on all tasks
    python -m bench.ablations --vary clip_high=0.2,0.28    # a flag of train.py with two or more values

A variant is a reference recipe with other flags or a patched function. --part all runs all variants. Finished
runs stay in bench/results/ablations.jsonl and are not repeated. The tables go to bench/results/ablations.md.
Two tasks' curves go to bench/results/ablations.png.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import inspect
import json
import math
import os
import random
import re
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
if __name__ == "__main__":
    print("loading torch …", flush=True)

import torch

import grpo
import ppo
import train
from bench.common import RESULTS, ROOT, in_forks, markdown
from bench.tasks import build
from configs import PRESETS, Config, parse
from engines import torch_engine
from grading.worker import user_files
from guard.files import read_jsonl
from guard.identity import VERSIONS
from guard.messages import UserError, explained, require, short_hash, user_errors
from log import read_metrics
from tools import tiny

VARIED = ROOT / "runs/ablations-vary.jsonl"
STEPS = 30
TASKS = {  # task -> (flags of its runs, threshold of the mean reward for `steps_to`)
    "chain": (dict(max_response_len=48), 0.3),
    "think": (dict(max_response_len=72), 0.1),
    "product": (dict(max_response_len=72), 0.3),
    "countdown": (dict(max_response_len=112), 0.1),
}
REFERENCE = replace(
    PRESETS["tiny-grpo"], steps=STEPS, eval_every=STEPS, save_every=0, eval_samples=(2,), prompts_per_step=16,
    policy_lr=2e-4, lr_decay="constant", reward=("exact",), keep_best="",
    aggregation="response", device="cpu", dtype="float32", max_logp_gap=100.0, go=True)
# With one update a step the ratio is 1, so the clip has no effect. grpo-4 has 4 updates, to test the clip.
REFERENCES = {"grpo": REFERENCE, "grpo-4": replace(REFERENCE, policy_updates=4),
              "ppo": replace(REFERENCE, algo="ppo", critic_updates=12, critic_lr=5e-4)}


# --- patches of the training code


def flip_sign(cfg: Config) -> None:
    right = train.add_group_advantages
    train.add_group_advantages = lambda samples, cfg: [
        replace(s, advantage=-s.advantage) for s in right(samples, cfg)]


def pack_mean(cfg: Config) -> None:
    """A deliberate bug: averages the loss over each pack, then over packs. This is wrong if packs have
    unequal numbers of responses (with --aggregation token: of tokens)."""
    right_counts, right_loss, packs_of = train.counts, train.policy_pack_loss, []

    def counts(packs):
        packs_of[:] = [sum(1 for p in packs if p.responses)]
        return right_counts(packs)

    def loss(model, p, tokens, responses, cfg, meter):
        n = packs_of[0]
        return right_loss(model, p, max(len(p.loss_tokens), 1) * n, max(p.responses, 1) * n, cfg, meter)

    train.counts, train.policy_pack_loss = counts, loss


def no_stop_gradient(cfg: Config) -> None:
    """A deliberate bug: takes the new log-probs as the old ones. Then the ratio is 1 and has no gradient."""
    right = grpo.policy_loss
    grpo.policy_loss = lambda logp, old_logp, *rest: right(logp, logp, *rest)


def engine_gap(cfg: Config, stale: int = 0, nats: float = 0.0) -> None:
    """Makes the engine sample with weights of `stale` steps ago, and with noise of standard deviation `nats`
    on each logit. The last evaluation uses the newest weights without noise."""
    right_load, right_sample, kept = torch_engine.TorchEngine.load, torch_engine.sample_token, []
    generator = torch.Generator().manual_seed(cfg.seed)

    def load(self, weights):
        kept.append([(name, x.clone()) for name, x in weights])
        last = len(kept) > cfg.steps
        right_load(self, kept[-1 if last else max(0, len(kept) - 1 - stale)])

    def sample_token(logits, u, temperature, *rest):
        noise = 0.0 if len(kept) > cfg.steps else nats * torch.randn(logits.shape, generator=generator)
        return right_sample(logits + noise, u, temperature, *rest)

    torch_engine.TorchEngine.load, torch_engine.sample_token = load, sample_token


def wrong_grades(cfg: Config, share: float) -> None:
    """Replaces each training reward r by 1 - r with probability `share`."""
    right = train.rollout

    def rollout(*args):
        def graded(s):
            wrong = random.Random(f"{cfg.seed} {s.version} {s.prompt_id} {s.sample_id}").random() < share
            return replace(s, reward=1.0 - s.reward) if wrong else s
        samples, left = right(*args)
        return [graded(s) for s in samples], left

    train.rollout = rollout


def forked(cfg: Config, file: str, name: str, files: dict[str, str], stale: int = 0) -> None:
    """Replaces HOOKS[name] by the function `name` of the user's file. stale: as for engine_gap

    files: hashes of the file and of the user's modules that it imports. Unused here. `key_of` puts them into
    a run's key, so an edited file runs again"""
    if stale:
        engine_gap(cfg, stale)
    spec = importlib.util.spec_from_file_location("fork", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    setattr(*HOOKS[name], getattr(module, name))


# --vary FILE:NAME replaces one of these functions: NAME -> (module, function).
HOOKS = {"advantage": (grpo, "group_advantages"), "policy_loss": (grpo, "policy_loss"),
         "token_weights": (grpo, "token_weights"), "mismatch_weight": (grpo, "mismatch_weight"),
         "gae": (ppo, "gae"), "value_loss": (ppo, "value_loss")}
STALE = 4  # steps by which --vary makes the engine's weights old, if the correction of its mismatch is varied


# --- the matrix


class Variant(NamedTuple):
    """A reference recipe with other `flags`, or with code that patch(cfg, **args) has changed."""

    reference: str
    flags: dict[str, Any] = {}
    patch: Callable | None = None
    args: dict[str, Any] = {}


def recipe(preset: str, reference: str = "grpo", **flags: Any) -> Variant:
    fields = ("advantage", "ratio", "aggregation", "clip_low", "clip_high", "drop_uniform")
    return Variant(reference, {f: getattr(PRESETS[preset], f) for f in fields} | flags)


def gap(stale: int = 0, nats: float = 0.0, mismatch: str = "none", high: float = 2.0) -> Variant:
    """Returns GRPO patched by engine_gap(stale, nats), with --mismatch `mismatch` and its upper bound."""
    flags = dict(mismatch=mismatch, mismatch_bounds=(0.0, high))
    return Variant("grpo", flags, engine_gap, dict(stale=stale, nats=nats))


DAPO = dict(clip_high=0.28, aggregation="token", resample_rounds=2, overlong_buffer=16)
CORE = {
    "grpo": Variant("grpo"),
    "ppo": Variant("ppo"),
    "wrong-sign": Variant("grpo", {}, flip_sign),
    "wrong-no-stop-gradient": Variant("grpo", {}, no_stop_gradient),
    "wrong-stale-weights": gap(STEPS),
    "wrong-pack-mean": Variant("grpo", dict(pack_len=256), pack_mean),
    "lam-0.95": Variant("ppo", dict(lam=0.95)),
    "kl-loss-0.1": Variant("ppo", dict(kl_coef=0.1)),
    "critic-1": Variant("ppo", dict(critic_updates=1)),
    "critic-warm-up": Variant("ppo", dict(freeze_policy_steps=3)),
    "dr-grpo": recipe("dr-grpo-7b"),
    "rloo": recipe("rloo-7b"),
    "orz-grpo": recipe("orz-7b-grpo"),
    "reinforce++": recipe("reinforce++-7b"),
    "reinforce++-baseline": recipe("reinforce++-baseline-7b", kl_coef=0.001, kl_estimator="k2"),
    "grpo-4": Variant("grpo-4"),
    "grpo-4-clip-0.28": Variant("grpo-4", dict(clip_high=0.28)),
    "gspo": recipe("gspo-7b", "grpo-4"),
    "cispo": recipe("cispo-7b", "grpo-4"),
    "dapo": Variant("grpo-4", DAPO),
    "resample": Variant("grpo", dict(resample_rounds=2)),
    "stale-4": gap(4),
    "stale-4-tis-2": gap(4, mismatch="token-truncate"),
    "stale-4-sequence": gap(4, mismatch="sequence-truncate"),
    "stale-4-mask": gap(4, mismatch="token-mask"),
    "stale-4-sequence-mask": gap(4, mismatch="sequence-mask"),
    "noise-0.3": gap(nats=0.3),
    "noise-0.3-tis-2": gap(nats=0.3, mismatch="token-truncate"),
    "noise-0.3-sequence": gap(nats=0.3, mismatch="sequence-truncate"),
    "noise-0.3-mask": gap(nats=0.3, mismatch="token-mask"),
    "noise-0.3-sequence-mask": gap(nats=0.3, mismatch="sequence-mask"),
    "wrong-grades-0.1": Variant("grpo", {}, wrong_grades, dict(share=0.1)),
    "max-rl": Variant("grpo", dict(advantage="group_mean_over_mean")),
    "two-rewards": Variant("grpo", dict(overlong_buffer=16)),
    "gdpo": Variant("grpo", dict(overlong_buffer=16, advantage="group_each_std")),
    "dppo-tv": Variant("grpo-4", dict(ratio="binary_tv", clip_low=0.15, clip_high=0.15)),
    "dppo-kl": Variant("grpo-4", dict(ratio="binary_kl", clip_low=0.05, clip_high=0.05)),
    "stale-4-negative-mask": Variant("grpo", dict(mismatch="negative-mask", mismatch_bounds=(0.6, 2.0)),
                                     engine_gap, dict(stale=4, nats=0.0)),
}


RATES = {  # name -> variants that differ only in the learning rate; the name stands for the best on a task
    "full-best": ("grpo", "full-rate-0.0001", "full-rate-0.0004"),
    **{f"lora-{rank}-best": tuple(f"lora-{rank}-rate-{rate}" for rate in (0.001, 0.002, 0.004))
       for rank in (1, 8, 32)}}


def matrix() -> dict[str, Variant]:
    found = dict(CORE)
    for rate in (1e-4, 4e-4):
        found[f"full-rate-{rate}"] = Variant("grpo", dict(policy_lr=rate))
    for rank in (1, 8, 32):
        for rate in (1e-3, 2e-3, 4e-3):
            found[f"lora-{rank}-rate-{rate}"] = Variant("grpo", dict(lora=rank, policy_lr=rate))
    for x in (0.9, 0.99):
        found[f"lam-{x}"] = Variant("ppo", dict(lam=x))
    for x in (0.99, 0.999):
        found[f"gamma-{x}"] = Variant("ppo", dict(gamma=x))
    for place in ("loss", "reward"):
        for x in (0.001, 0.01, 0.1):
            found[f"kl-{place}-{x}"] = Variant("ppo", dict(kl_coef=x, kl_in=place))
    found |= {"critic-4": Variant("ppo", dict(critic_updates=4)),
              "no-value-clip": Variant("ppo", dict(value_clip=None)),
              "scale-rl": recipe("scale-rl-7b", "grpo-4")}
    parts = dict(clip_high=0.2, aggregation="response", resample_rounds=0, overlong_buffer=0)
    found |= {f"dapo-without-{name}": Variant("grpo-4", DAPO | {name: x}) for name, x in parts.items()}
    for prompts, samples in ((4, 32), (8, 16), (32, 4), (64, 2)):
        found[f"{prompts}x{samples}"] = Variant(
            "grpo", dict(prompts_per_step=prompts, samples_per_prompt=samples))
    for passes in (2, 4):
        for x in (0.2, 0.28):
            found[f"passes-{passes}-clip-{x}"] = Variant("grpo", dict(passes_per_step=passes, clip_high=x))
    found |= {f"temperature-{x}": Variant("grpo", dict(temperature=x)) for x in (0.6, 0.8, 1.2)}
    corrections = {"": ("none",), "-tis-2": ("token-truncate",), "-tis-5": ("token-truncate", 5.0),
                   "-sequence": ("sequence-truncate",), "-mask": ("token-mask",),
                   "-sequence-mask": ("sequence-mask",)}
    for ending, correction in corrections.items():
        found |= {f"noise-{x}{ending}": gap(0, x, *correction) for x in (0.01, 0.03, 0.1, 0.3)}
        found |= {f"stale-{k}{ending}": gap(k, 0.0, *correction) for k in (1, 2, 4, 8)}
    for x in (0.01, 0.05, 0.2):
        found[f"wrong-grades-{x}"] = Variant("grpo", {}, wrong_grades, dict(share=x))
    return found | {"mask-truncated": Variant("grpo", dict(mask_truncated=True))}


# --- runs


def config_of(task: str, variant: Variant, seed: int, base: str) -> Config:
    flags = TASKS[task][0] | variant.flags
    if task == "countdown":
        flags["reward"] = (f"{ROOT}/bench/countdown.py:reaches", *flags.get("reward", ())[1:])
    return replace(REFERENCES[variant.reference], **flags, seed=seed, model=base,
                   data=(f"{base}/train.jsonl",), eval_data=(f"{base}/heldout.jsonl",))


NO_CHANGE = ("recompute",)  # settings that change a run's speed but not its results


def key_of(cfg: Config, variant: Variant) -> str:
    """Returns the hash of a run's settings and patch, by which finished runs are found. Settings with default
    values are left out, so that a new field of Config does not change the hash."""
    default = asdict(Config())
    settings = {name: value for name, value in asdict(cfg).items()
                if value != default[name] and name not in NO_CHANGE}
    settings |= {"model": tiny.VERSION, "data": "", "eval_data": "", "reward": cfg.reward[1:]}
    settings["save_samples"] = "none"  # a former choice, which changed no result; the committed runs have it
    change = (variant.patch.__name__ if variant.patch else "", variant.args)
    text = json.dumps([settings, change], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def train_one(cfg: Config, variant: Variant, file: Path) -> None:
    """Trains one run and writes the results to `file`. Must run in a new process, because it patches
    modules."""
    torch.set_num_threads(1)
    start = time.process_time()
    with tempfile.TemporaryDirectory(prefix="ablation-") as folder:
        cfg = replace(cfg, out=f"{folder}/run")
        if variant.patch:
            variant.patch(cfg, **variant.args)
        error, right, sampled = "", train.rollout, []

        def rollout(*args):
            samples, left = right(*args)
            sampled.append(len(samples))
            return samples, left

        train.rollout = rollout
        try:
            run = train.prepare(cfg)
            with run.log:
                train.train(run)
            run.lock.release()
            run.grader.close()
        except UserError as e:  # the run ended early
            error = str(e)
        found = figures(Path(cfg.out)) | {"error": error, "samples": sum(sampled)}
        found["cpu_seconds"] = round(time.process_time() - start, 1)
    file.write_text(json.dumps(found))


KEPT = {"reward": "rewards", "response_len": "lengths", "response_len/wrong": "lengths_wrong",
        "entropy": "entropy", "truncated": "truncated", "repetition": "repetition", "clip_share": "clipped",
        "logp_gap/mean": "gaps", "grad_norm/policy": "grad_norms", "pass@n": "pass_n"}


def figures(out: Path) -> dict[str, Any]:
    """Returns held-out accuracy before and after training (None if not measured), the values of KEPT's
    metrics at each step, and the first 20 alarms."""
    rows = read_metrics(out)
    steps = [r for r in rows if "reward" in r]
    accuracy = [r["eval/heldout/avg@2"] for r in rows if "eval/heldout/avg@2" in r]
    alarms = [(row["step"], row["text"]) for row in read_jsonl(out / "alarms.jsonl")]
    curves = {name: [round(r.get(metric, 0.0), 4) for r in steps] for metric, name in KEPT.items()}
    finished = len(accuracy) > 1
    return {"base": accuracy[0] if accuracy else None, "accuracy": accuracy[-1] if finished else None,
            **curves, "alarms": alarms[:20]}


def train_all(waiting: list[tuple[dict, Config, Variant]], jobs: int, results: Path) -> None:
    began = time.monotonic()
    print(f"{len(waiting)} runs to train, {jobs} at a time; earlier ones are in {results}", flush=True)
    results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ablations-") as folder:
        files = [Path(folder, f"{i}.json") for i in range(len(waiting))]
        calls = [(partial(train_one, cfg, variant, file), file.with_suffix(".log"))
                 for (_, cfg, variant), file in zip(waiting, files, strict=True)]
        for i, status in in_forks(calls, jobs):
            line = keep(waiting[i][0], files[i], status, results)
            print(f"{time.monotonic() - began:5.0f} s  {line}", flush=True)


def keep(name: dict, file: Path, status: int, results: Path) -> str:
    run = f"{name['task']} {name['variant']} seed {name['seed']}"
    if not file.is_file():
        return f"{run}: exit {status}, no result\n{file.with_suffix('.log').read_text()[-2000:]}"
    row = name | json.loads(file.read_text())
    if row["base"] is None:  # not one evaluation: the run was refused
        return f"{run}: no result: {row['error']}"
    with results.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    accuracy = "no accuracy" if row["accuracy"] is None else f"held-out accuracy {row['accuracy']:.3f}"
    return f"{run}: {accuracy} {row['error']}".rstrip()


# --- statistics

# Student's t for 95 % intervals of means of 2 to 30 values.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
         2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
         2.045)


class Estimate(NamedTuple):
    """The mean of n values, and half of its 95 % interval (infinite for n = 1)."""

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        digits = 3 if abs(self.mean) < 2 else 1
        half = f"± {self.half:.{digits}f}" if math.isfinite(self.half) else "(one seed)"
        return f"{self.mean:+.{digits}f} {half}"


def estimate(values: Sequence[float]) -> Estimate:
    n = len(values)
    half = T_975[min(n, 30) - 2] * stdev(values) / math.sqrt(n) if n > 1 else math.inf
    return Estimate(fmean(values), half, n)


def last(values: Sequence[float], n: int = 5) -> float:
    return fmean(values[-n:]) if values else math.nan


def means_of_five(row: dict) -> list[float]:
    rewards = row["rewards"]
    return [fmean(rewards[i:i + 5]) for i in range(len(rewards) - 4)]


def collapsed(row: dict) -> bool:
    """Returns whether a run ended early, or the mean reward of its last five steps is less than half of its
    best mean over five steps."""
    means = means_of_five(row)
    return row["accuracy"] is None or not means or means[-1] < max(means) / 2


def steps_to(row: dict, threshold: float) -> int:
    """Returns the first step where the mean reward of the last 3 steps reaches `threshold`, else STEPS."""
    rewards = row["rewards"]
    return next((i for i in range(2, len(rewards)) if fmean(rewards[i - 2:i + 1]) >= threshold), STEPS)


MEASURES = {  # name of a measure -> function(a run's results, the run's task)
    "accuracy": lambda row, task: row["accuracy"] or 0.0,
    "steps to threshold": lambda row, task: steps_to(row, TASKS[task][1]),
    "samples": lambda row, task: float(row["samples"]),
    "tokens of wrong responses": lambda row, task: last(row["lengths_wrong"]),
    "entropy": lambda row, task: last(row["entropy"]),
    "collapsed": lambda row, task: float(collapsed(row)),
}
Runs = dict[tuple[str, str], dict[tuple[str, int], dict]]  # (task, variant) -> (base model, seed) -> results


def with_best(runs: Runs) -> Runs:
    """Returns the runs, and those of each name of RATES. Rates are compared by their mean accuracy over the
    base models and seeds that all of them have; the best one may have more seeds."""
    found = dict(runs)
    for name, variants in RATES.items():
        for task in TASKS:
            rates = [runs.get((task, variant), {}) for variant in variants]
            common = set.intersection(*map(set, rates))
            best = max(rates, key=lambda rows: sum(rows[key]["accuracy"] or 0.0 for key in common))
            if common:
                found[task, name] = best
    return found


def difference(runs: Runs, task: str, variant: str, reference: str,
               measure: str = "accuracy") -> Estimate | None:
    """Returns the mean of variant minus reference, over pairs of runs with the same base model and seed."""
    ours, theirs = runs.get((task, variant), {}), runs.get((task, reference), {})
    f = MEASURES[measure]
    gaps = [f(ours[key], task) - f(theirs[key], task) for key in sorted(ours.keys() & theirs.keys())]
    return estimate(gaps) if gaps else None


# --- claims


class Claim(NamedTuple):
    """The claim that a variant's `measure` is higher (sign 1) or lower (sign -1) than the reference's.

    margin: the variant may be worse by this much
    why: for the report, why the runs may disagree with the claim
    unclear: for the report, why the verdict is "can't tell" on every task"""

    text: str
    source: str
    variant: str
    reference: str
    sign: int
    measure: str = "accuracy"
    margin: float = 0.0
    why: str = ""
    unclear: str = ""


ORZ, DR, DAPO_PAPER = "ORZ 2503.24290", "Dr. GRPO 2503.20783", "DAPO 2503.14476"
CLAIMS = (
    Claim("λ = 1 is better than 0.95", f"{ORZ}, ablations", "ppo", "lam-0.95", 1),
    Claim("a KL penalty hurts", f"{ORZ}, ablations", "kl-loss-0.1", "ppo", -1),
    Claim("PPO collapses less than GRPO", f"{ORZ}, key findings", "ppo", "grpo", -1, "collapsed"),
    Claim("PPO ends higher than GRPO", f"{ORZ}, key findings", "ppo", "grpo", 1),
    Claim("12 critic updates are better than 1", f"{ORZ}, settings", "ppo", "critic-1", 1),
    Claim("a critic that learns first helps", "VC-PPO 2503.01491", "critic-warm-up", "ppo", 1),
    Claim("GRPO's mean over responses makes wrong responses longer", f"{DR}, sec. 3.1", "grpo", "dr-grpo", 1,
          "tokens of wrong responses"),
    Claim("without GRPO's two biases accuracy is higher", f"{DR}, sec. 3.2", "dr-grpo", "grpo", 1),
    Claim("RLOO's baseline is better than GRPO's", "RLOO 2402.14740, experiments", "rloo", "grpo", 1),
    Claim("whitening over the step is better than a group's deviation", "REINFORCE++ 2501.03262, experiments",
          "reinforce++", "grpo", 1),
    Claim("clip-higher keeps entropy", f"{DAPO_PAPER}, sec. 3.1", "grpo-4-clip-0.28", "grpo-4", 1, "entropy"),
    Claim("clip-higher raises accuracy", f"{DAPO_PAPER}, tab. 1", "grpo-4-clip-0.28", "grpo-4", 1),
    Claim("dynamic sampling needs fewer steps", f"{DAPO_PAPER}, sec. 3.2", "resample", "grpo", -1,
          "steps to threshold"),
    Claim("dynamic sampling takes more samples", f"{DAPO_PAPER}, sec. 3.2", "resample", "grpo", 1, "samples"),
    Claim("DAPO's four parts together raise accuracy", f"{DAPO_PAPER}, tab. 1", "dapo", "grpo-4", 1),
    Claim("one ratio per response raises accuracy", "GSPO 2507.18071, sec. 5", "gspo", "grpo-4", 1,
          why="Here GSPO's clip range of 0.0003 stops the gradient of a third of the tokens."),
    Claim("CISPO needs fewer steps", "CISPO 2506.13585, sec. 3.1", "cispo", "grpo-4", -1,
          "steps to threshold"),
    Claim("samples from old weights lower accuracy", "AReaL 2505.24298, ablations", "stale-4", "grpo", -1),
    Claim("TIS helps if samples are from old weights", "TIS, Yao et al. 2025", "stale-4-tis-2", "stale-4", 1),
    Claim("noise on the engine's logits lowers accuracy", "TIS, Yao et al. 2025", "noise-0.3", "grpo", -1),
    Claim("TIS helps if logits have noise", "TIS, Yao et al. 2025", "noise-0.3-tis-2", "noise-0.3", 1),
    Claim("IcePop helps if logits have noise", "IcePop 2510.18855", "noise-0.3-mask", "noise-0.3", 1),
    Claim("MIS helps if samples are from old weights", "MIS, Liu et al. 2025", "stale-4-sequence-mask",
          "stale-4", 1),
    Claim("DeepSeek-V3.2's mask helps if samples are from old weights", "DeepSeek-V3.2 2512.02556, sec. 3.1",
          "stale-4-negative-mask", "stale-4", 1),
    Claim("dividing by the mean reward raises accuracy", "MaxRL 2602.02710", "max-rl", "grpo", 1),
    Claim("normalising each reward on its own raises accuracy", "GDPO 2601.05242, experiments", "gdpo",
          "two-rewards", 1),
    Claim("masks by total variation raise accuracy", "DPPO 2602.04879, experiments", "dppo-tv", "grpo-4", 1),
    Claim("masks by a binary KL raise accuracy", "DPPO 2602.04879, experiments", "dppo-kl", "grpo-4", 1),
    *(Claim(f"adapters of rank {rank} end as high as full training, less 0.05 at most",
            "LoRA Without Regret, Schulman et al. 2025", f"lora-{rank}-best", "full-best", 1, margin=0.05)
      for rank in (1, 8, 32)),
    Claim("10 % wrong grades cost accuracy", "ours", "wrong-grades-0.1", "grpo", -1),
    *(Claim("a deliberate bug lowers accuracy", "ours", name, "grpo", -1)
      for name in ("wrong-sign", "wrong-no-stop-gradient", "wrong-stale-weights")),
    Claim("a deliberate bug lowers accuracy", "ours", "wrong-pack-mean", "grpo", -1,
          unclear="The bug averages packs' means. Here packs have nearly equal numbers of responses."),
)


def verdict(found: Estimate, sign: int, margin: float = 0.0) -> str:
    """Returns "agrees" if the whole 95 % interval of sign * `found` is above -margin, "**disagrees**" if all
    of it is below 0, else "can't tell". Fewer than 3 pairs of runs can't tell either."""
    if found.n >= 3 and sign * found.mean - found.half > -margin:
        return "agrees"
    if found.n >= 3 and sign * found.mean + found.half < 0:
        return "**disagrees**"
    return "can't tell"


# --- tables

NAMES = (
    "", "## Names of the variants", "",
    "- `lam-0.95`, `temperature-0.6`, …: the flag has this value.",
    "- `4x32`: 4 prompts a step, 32 samples each. `grpo-4`: 4 updates a step.",
    "- `passes-2-clip-0.28`: 2 passes over the samples, and `--clip_high 0.28`.",
    "- `critic-1`: 1 critic update a step, not 12. `critic-warm-up`: steps 0 to 2 train only the critic.",
    "- `kl-loss-0.1`, `kl-reward-0.1`: a KL term with weight 0.1, in the loss or in the reward.",
    "- `resample`: replaces prompts whose samples score the same. `dapo-without-…`: DAPO without one part.",
    "- `stale-4`: samples from weights 4 steps old. `noise-0.3`: noise of deviation 0.3 on logits.",
    "- `stale-4-tis-2`: `stale-4` with `--mismatch token-truncate` (TIS) and importance weights up to 2.",
    "- `-sequence`: `--mismatch sequence-truncate`. `-mask`: `--mismatch token-mask` (IcePop).",
    "- `-sequence-mask`: `--mismatch sequence-mask` (MIS).",
    "- `wrong-sign`, `wrong-pack-mean` and `wrong-no-stop-gradient` are deliberate bugs.",
    "- `wrong-stale-weights`: a deliberate bug; samples come only from the base model.",
    "- `wrong-grades-0.1`: 10 % of the training rewards are wrong.",
    "- `two-rewards`: a length penalty from 16 tokens before the limit. `gdpo`: also GDPO's advantage.",
    "- `lora-8-rate-0.001`: adapters of rank 8, this learning rate. `full-rate-0.0004`: all weights.",
    "- `lora-8-best`, `full-best`: the best of three learning rates on a task. grpo has the third, 0.0002.",
    "- `-negative-mask`: `--mismatch negative-mask`, DeepSeek-V3.2's sequence mask, with LOW = 0.6.",
    "")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return markdown(head, rows).splitlines()


def claims_table(runs: Runs, tasks: Sequence[str]) -> list[str]:
    rows, notes = [], []
    for claim in CLAIMS:
        cells, verdicts = [], set()
        for task in tasks:
            found = difference(runs, task, claim.variant, claim.reference, claim.measure)
            said = verdict(found, claim.sign, claim.margin) if found else ""
            cells.append(f"{said}: {found}" if found else "not run")
            verdicts.add(said)
            if said == "**disagrees**":
                notes.append(f"- Contradicted on {task}: \"{claim.text}\". {claim.why or 'Cause unknown.'}")
        rows.append((claim.text, claim.source, f"{claim.measure}: {claim.variant} minus {claim.reference}",
                     *cells))
        if claim.unclear and verdicts == {"can't tell"}:
            notes.append(f"- Undecided on all tasks: {claim.variant}. {claim.unclear}")
    return [*table(("claim", "source", "difference", *tasks), rows), "", *notes]


def task_table(runs: Runs, task: str, variants: dict[str, Variant]) -> list[str]:
    rows, first = [], next(iter(variants))
    for name in variants:
        found = list(runs.get((task, name), {}).values())
        if not found:
            continue
        accuracy = fmean(MEASURES["accuracy"](row, task) for row in found)
        gap = difference(runs, task, name, first) if name != first else None
        rows.append((name, len(found), f"{accuracy:.3f}", gap or "", sum(map(collapsed, found))))
    head = ("variant", "runs", "mean accuracy", f"minus {first}", "collapsed runs")
    return table(head, rows)


RECIPES = ("ppo", "grpo", "orz-grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline",
           "grpo-4", "gspo", "cispo", "dapo")  # grpo-4 and the names after it make four updates a step


def recipes_table(runs: Runs, tasks: Sequence[str]) -> list[str]:
    rows = []
    for name in RECIPES:
        cells = []
        for task in tasks:
            found = runs.get((task, name), {}).values()
            mean = estimate([MEASURES["accuracy"](row, task) for row in found]) if found else None
            cells.append(f"{mean.mean:.3f} ± {mean.half:.3f}" if mean else "")
        rows.append((name, *cells))
    return table(("recipe", *tasks), rows)


def variants_table(runs: Runs, tasks: Sequence[str], variants: dict[str, Variant]) -> list[str]:
    rows = []
    for name, variant in variants.items():
        gaps = [difference(runs, task, name, variant.reference) for task in tasks]
        if name not in REFERENCES and any(gaps):
            rows.append((name, variant.reference, *(gap or "" for gap in gaps)))
    return table(("variant", "reference", *tasks), rows)


def report(runs: Runs) -> str:
    tasks = tasks_of(runs)
    lines = [
        "# Claims, tested on tasks for a laptop", "",
        f"`python -m bench.ablations` wrote this file. A run has {STEPS} steps of "
        f"{REFERENCE.samples_per_step} samples. bench/tasks.py shows the tasks.", "",
        "- Accuracy is that of 512 held-out problems, two samples each, after the last step.",
        "- A run that ended early has accuracy 0. It counts as collapsed.",
        "- A run has also collapsed if its last five steps have less than half of the best mean reward.",

        "- `steps to threshold`: the first step with the mean reward that TASKS in bench/ablations.py names.",
        "- A difference is a mean over pairs of runs with the same base model and seed.",
        "- ± is half of a 95 % interval. Without a real difference, one interval in 20 excludes 0.",
        "- A task may have several base models. On countdown, ppo's older variants have another one than "
        "grpo's; kl-loss-0.1 has a newer one on each task. ppo and grpo have runs with several.",

        *NAMES, "## Claims", "",
        "The verdict is `can't tell` if the 95 % interval contains 0, or with fewer than 3 pairs. A claim of "
        "\"less 0.05 at most\" agrees if the interval is above -0.05.", "",
        *claims_table(with_best(runs), tasks), "",
        "## Accuracy of recipes", "",
        "grpo-4, gspo, cispo and dapo make four policy updates a step, all others one.", "",
        *recipes_table(runs, tasks), "",
        "## Accuracy of all variants, minus that of the reference", "",
        *variants_table(runs, tasks, matrix())]
    return "\n".join(lines) + "\n"


def picture(runs: Runs, to: Path) -> None:
    """Draws the mean reward of ppo and grpo at each step on two tasks, with a band from the lowest to the
    highest seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), dpi=110, layout="constrained")
    for i, task in enumerate(("chain", "think"), 1):
        axis = figure.add_subplot(1, 2, i, title=task, xlabel="step", ylabel="reward")
        for name in ("ppo", "grpo"):
            curves = [row["rewards"] for row in runs[task, name].values() if len(row["rewards"]) == STEPS]
            steps, columns = range(STEPS), list(zip(*curves, strict=True))
            (line,) = axis.plot(steps, [fmean(c) for c in columns], label=f"{name}, {len(curves)} runs")
            axis.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns],
                              color=line.get_color(), alpha=0.2)
        axis.legend()
    figure.savefig(to)


# --- the command


def weights_of(base: str) -> str:
    return hashlib.sha256(Path(base, "model.safetensors").read_bytes()).hexdigest()[:12]


def read_runs(keys: dict[tuple[str, str, int], str], file: Path) -> Runs:
    """Returns the file's finished runs whose settings have the hash keys[task, variant, seed].

    keys: (task, variant, seed) -> result of `key_of`"""
    runs = {}
    for row in read_jsonl(file):
        task, variant, seed = name = row["task"], row["variant"], row["seed"]
        if keys.get(name) == row["settings"]:
            runs.setdefault((task, variant), {})[row["weights"], seed] = row
    return runs


# Words of train.py's command line that give a preset the method of a recipe of REFERENCES
COMMANDS = {"grpo": "tiny-grpo", "grpo-4": "tiny-grpo --policy_updates 4", "ppo": "tiny-ppo"}


# Flags that are not varied, because the runs set them themselves or their files are not in a run's key
OURS = ("seed model data eval_data eval_samples eval_every steps epochs total_episodes out resume start_from "
        "ranks layout tp reward env template critic_model ref_model").split()


def varied_flag(flag: str, values: str) -> dict[str, Variant]:
    """Returns a variant for each value of a flag: the first recipe of REFERENCES in which the flag has an
    effect, with this value. Raises UserError for a wrong flag or value."""
    texts, errors = values.split(","), []
    require(len(set(texts)) > 1, f"--vary {flag}={values}", "two or more values: FLAG=VALUE,VALUE")
    require(flag not in OURS, f"--vary {flag}, which these runs do not vary", f"none of {', '.join(OURS)}")
    for reference, command in COMMANDS.items():
        if flag == "ratio" and reference == "grpo":
            continue  # with one update a step, all ratios are 1
        try:
            cfgs = {text: parse([*command.split(), *words_of(flag, text)], "train.py")
                    for text in texts}
        except UserError as e:
            errors.append(e)
            continue
        patch = (engine_gap, dict(stale=STALE)) if flag.startswith("mismatch") else ()
        return {f"{flag}={text}": Variant(reference, {flag: getattr(cfg, flag)}, *patch)
                for text, cfg in cfgs.items()}
    raise errors[0]


def words_of(flag: str, text: str) -> list[str]:
    """Returns the words of train.py's command line that give the flag the value in the text."""
    if text in ("True", "False"):
        return [f"--{'no-' * (text == 'False')}{flag}"]
    return [f"--{flag}", *(text.split() or [""])]


def varied(spec: str) -> dict[str, Variant]:
    """Returns the two variants that --vary compares: a reference recipe, and the same recipe with the user's
    FUNCTION in place of HOOKS[FUNCTION]. Raises UserError if the file or HOOKS[FUNCTION] is missing.

    spec: FILE.py:FUNCTION, or FLAG=VALUE,VALUE"""
    if re.match(r"\w+=", spec):
        return varied_flag(*spec.split("=", 1))
    file, _, name = spec.rpartition(":")
    require(Path(file).is_file(), f"--vary {spec}, and no file {file!r}", "FILE.py:FUNCTION")
    require(name in HOOKS, f"--vary {spec}, and nothing here is replaced by {name!r}",
            f"one of {', '.join(HOOKS)}")
    before = set(sys.modules)
    sys.path.append(str(Path(file).absolute().parent))  # for modules beside the file
    with explained(f"--vary {spec}, and {file} can't be run", "a file that Python can run"):
        own = runpy.run_path(file).get(name)
    theirs = inspect.signature(getattr(*HOOKS[name]))
    require(callable(own), f"--vary {spec}, and {file} has no function {name}", f"def {name}{theirs}")
    with explained(f"--vary {spec}, and {name} has other arguments", f"def {name}{theirs}"):
        inspect.signature(own).bind(*theirs.parameters)
    files = user_files(file, sys.modules.keys() - before)
    args = dict(file=str(Path(file).absolute()), name=name, files=files)
    if name == "mismatch_weight":
        ours = gap(STALE, mismatch="token-truncate")
        return {"grpo, stale": ours, spec: ours._replace(patch=forked, args=args | {"stale": STALE})}
    # With one update a step, all ratios are 1.
    reference = {"gae": "ppo", "value_loss": "ppo", "policy_loss": "grpo-4"}.get(name, "grpo")
    return {reference: Variant(reference), spec: Variant(reference, {}, forked, args)}


def chosen(args: argparse.Namespace) -> tuple[dict[str, Variant], int]:
    if args.vary:
        return varied(args.vary), args.seeds
    variants = CORE if args.part == "core" else matrix()
    return {n: v for n, v in variants.items() if not args.only or n in args.only}, args.seeds


def tasks_of(runs: Runs) -> list[str]:
    return [task for task in TASKS if any(t == task for t, _ in runs)]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="core", choices=("core", "all"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each variant and task, at most 30")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one core each")
    parser.add_argument("--only", nargs="*", help="names of the variants to run")
    parser.add_argument("--vary", default="", help="FILE.py:FUNCTION, or FLAG=VALUE,VALUE")
    parser.add_argument("--report", action="store_true", help="train nothing, only write the tables")
    parser.add_argument("--base", default="runs/ablations-base", help="base models are the folders BASE-TASK")
    parser.error = partial(require, False, needed="python -m bench.ablations --help")
    args = parser.parse_args()
    require(1 <= args.seeds <= 30, f"--seeds {args.seeds}", "1 to 30")
    require(args.jobs >= 1, f"--jobs {args.jobs}", "1 or more")
    known = matrix() if args.part == "all" else CORE
    unknown = sorted(set(args.only or ()) - known.keys())
    require(not unknown, f"--only {' '.join(unknown)} with --part {args.part}", f"some of {', '.join(known)}")
    return args


def plan_of(variants: dict[str, Variant], base: dict[str, str]) -> dict[tuple, tuple[Config, Variant]]:
    """Returns (task, variant's name, seed) -> (config, Variant) of every possible run. base: task -> folder
    of the task's base model"""
    return {(task, name, seed): (config_of(task, variant, seed, base[task]), variant)
            for seed in range(30) for task in TASKS for name, variant in variants.items()}


def make_runs(args: argparse.Namespace, file: Path, plan: dict, keys: dict, wanted: dict, seeds: int) -> Runs:
    base = {task: build(f"{args.base}-{task}", task) for task in args.tasks}
    weights = {task: weights_of(path) for task, path in base.items()}
    runs, waiting = read_runs(keys, file), []
    for (task, name, seed), (cfg, variant) in plan.items():
        if name in wanted and task in base and seed < seeds and (
                (weights[task], seed) not in runs.get((task, name), {})):
            row = dict(task=task, variant=name, seed=seed, settings=keys[task, name, seed],
                       weights=weights[task])
            waiting.append((row, cfg, variant))
    train_all(waiting, args.jobs, file)
    runs = read_runs(keys, file)
    if args.vary:  # the same seeds of both variants, with the same base model
        for (task, _), found in runs.items():
            for key in [key for key in found if key[0] != weights.get(task) or key[1] >= seeds]:
                del found[key]
    return runs


def main() -> None:
    args = parse_args()
    wanted, seeds = chosen(args)
    base = {task: str(Path(f"{args.base}-{task}").absolute()) for task in TASKS}
    plan = plan_of(matrix() | wanted, base)
    # An edited torz, or another version of torch, makes new runs of --vary.
    code = short_hash(json.dumps(VERSIONS).encode()) if args.vary else ""
    keys = {name: key_of(*run) + code for name, run in plan.items()}
    file = VARIED if args.vary else RESULTS / "ablations.jsonl"
    if args.report:
        runs = read_runs(keys, file)
        require(bool(runs), "no runs of these settings and this code", "the same command without --report")
    else:
        runs = make_runs(args, file, plan, keys, wanted, seeds)
    if args.vary:
        print("A difference is a mean over pairs of runs with the same seed; ± is half of a 95 % interval.")
        for task in args.tasks:
            print("\n".join(["", f"## {task}", "", *task_table(runs, task, wanted)]))
        failed = [name for task in args.tasks for name in wanted if len(runs.get((task, name), {})) < seeds]
        require(not failed or args.report, f"runs without a result: {', '.join(sorted({*failed}))}",
                "a function without errors, or values that a run accepts (see the lines above)")
    else:
        (RESULTS / "ablations.md").write_text(report(runs))
        picture(runs, RESULTS / "ablations.png")
        print(report(runs))


if __name__ == "__main__":
    with user_errors("bench/ablations.py"):
        main()
