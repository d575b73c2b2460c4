"""Alarms: signs of trouble in a run's metrics, with the likely cause and what to change.

for text in new_alarms(log.history, cfg): print(text)"""

import fnmatch
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from configs import Config
from reward import terms_of

MEAN_STEPS = 5  # alarms use means over the last 5 steps
QUIET_STEPS = 10  # an alarm is printed again only after 10 steps in which it was inactive
# With a mean reward of SOLVED or more, the alarms of UNSOLVED are inactive.
SOLVED = 0.9
UNSOLVED = ("entropy", "uniform")
History = Sequence[Mapping[str, float]]  # one row of metrics for each training step so far

# Name of an alarm -> (function that returns whether the alarm is active, text). `now` has the mean of each
# metric over the last MEAN_STEPS steps, and values that active_alarms adds, such as first_entropy. A missing
# metric is NaN, so its comparisons are false.
ALARMS = {
    "entropy": (
        lambda now, cfg: now["entropy"] < max(0.1 * now["first_entropy"], 0.01),
        "entropy is {now[entropy]:.2g} nats a token "
        "(first step: {now[first_entropy]:.2g}): the policy stops exploring; try a "
        "lower --policy_lr, or a small --entropy_coef",
    ),
    "truncated": (
        lambda now, cfg: now["truncated"] > 0.5,
        "{now[truncated]:.0%} of the responses are cut at --max_response_len "
        "{cfg.max_response_len}; try a larger one, or a --stop that fits the "
        "responses in samples/",
    ),
    "uniform": (
        lambda now, cfg: (
            now["uniform_groups"] > 0.8
            and cfg.samples_per_prompt > 1
            and any(term.weight for term in terms_of(cfg))  # else a teacher trains the policy
        ),
        "{now[uniform_groups]:.0%} of the prompts have samples with equal scores "
        "and teach little (reward {now[reward]:.2f}); try problems nearer to reward "
        "0.5, more --samples_per_prompt, or reward.py on samples/, because --reward "
        "may ignore the response",
    ),
    "term": (
        lambda now, cfg: now["constant_terms"],
        "a term of --reward has had the same mean in all steps and teaches nothing: "
        "{now[constant_terms]}; try reward.py on samples/, or --reward without it",
    ),
    "gap": (
        lambda now, cfg: now["logp_gap/mean"] > 0.1 * cfg.max_logp_gap,
        "engine and trainer differ by {now[logp_gap/mean]:.2g} nats a token; the run "
        "stops at --max_logp_gap {cfg.max_logp_gap:g}; try --dtype float32; if that "
        "doesn't help, look for a bug",
    ),
    "grading": (
        lambda now, cfg: now["grade/error"] + now["grade/timeout"] > 0.05,
        "{now[grade/error]:.0%} of the answers raised an error in grading and "
        "{now[grade/timeout]:.0%} took too long, so they score 0; repair --reward, "
        "or raise --grade_deadline (now {cfg.grade_deadline:g})",
    ),
    "best": (
        lambda now, cfg: not now["known_best"],
        "no metric so far is named {cfg.keep_best} (--keep_best), so no checkpoint is "
        "kept as the best; see the names in metrics.jsonl",
    ),
}


def active_alarms(history: History, cfg: Config) -> dict[str, str]:
    """Returns a dict with the alarms that are active after the last step of `history`: name -> text."""
    now = defaultdict(lambda: math.nan)
    now["first_entropy"] = next((row["entropy"] for row in history if "entropy" in row), math.nan)
    for name in history[-1]:
        last = [row[name] for row in history[-MEAN_STEPS:] if name in row]
        now[name] = sum(last) / len(last)  # not fmean, which raises ValueError for inf - inf
    now["constant_terms"] = constant_terms(history, cfg)
    best = cfg.keep_best  # name of a metric, may have wildcards; auto: mean eval/*/avg@k
    now["known_best"] = best in ("", "auto") or any(fnmatch.filter(row, best) for row in history)
    active = {}
    inactive = UNSOLVED if now["reward"] >= SOLVED else ()
    for name, (condition, text) in ALARMS.items():
        if condition(now, cfg) and name not in inactive:
            active[name] = text.format(now=now, cfg=cfg)
    return active


def constant_terms(history: History, cfg: Config) -> str:
    """Returns the names of the terms of --reward whose mean was the same in all steps; "" in the first
    MEAN_STEPS - 1 steps."""
    found = []
    for term in terms_of(cfg):
        means = [row[f"reward/{term.name}"] for row in history if f"reward/{term.name}" in row]
        if term.weight and len(means) >= MEAN_STEPS and max(means) - min(means) < 1e-9:
            found.append(f"{term.name} ({means[0]:g})")
    return ", ".join(found)


def new_alarms(history: History, cfg: Config) -> list[str]:
    """Returns the texts of alarms that are active now, but were active in none of the QUIET_STEPS steps
    before."""
    new = active_alarms(history, cfg)
    if not new:
        return []
    # history[:end]: the rows of metrics after an earlier step
    for end in range(max(len(history) - QUIET_STEPS, 1), len(history)):
        for name in active_alarms(history[:end], cfg):
            new.pop(name, None)
    return list(new.values())
