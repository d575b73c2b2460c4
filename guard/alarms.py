"""Alarms: what looks wrong in a run's metrics, as a line with the likely cause and what to change."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from configs import Config
from log import NAN

LAST = 5  # steps that an alarm's numbers are means over: a single odd step raises no alarm
QUIET = 10  # an alarm is raised again only after so many steps in which it was inactive
SOLVED = 0.9  # from this reward on, low entropy, short responses and uniform groups are a success
Rows = Sequence[Mapping[str, float]]

# name: (when the alarm is active, its line). `now` has the mean of every metric over the last LAST steps, and
# a few earlier values; see `alarms`. A line says what was found, the likely cause, and what to change.
ALARMS = {
    "entropy": (
        lambda now, cfg: now["reward"] < SOLVED and now["entropy"] < max(0.1 * now["first_entropy"], 0.01),
        "entropy is {now[entropy]:.2g} nats a token (at the first step {now[first_entropy]:.2g}) at reward "
        "{now[reward]:.2f}; the policy has nearly stopped exploring; try a lower --policy_lr, "
        "--clip_high 0.28 or a small --entropy_coef"),
    "length": (
        lambda now, cfg: (now["reward"] < SOLVED and now["response_len"] < now["longest"] / 3
                          and now["reward"] <= now["reward_at_longest"]),
        "responses have {now[response_len]:.0f} tokens, after {now[longest]:.0f} at their longest, and "
        "reward went from {now[reward_at_longest]:.2f} to {now[reward]:.2f}; the policy writes less and "
        "gains nothing; try a lower --policy_lr, and read samples/"),
    "truncated": (
        lambda now, cfg: now["truncated"] > 0.5,
        "{now[truncated]:.0%} of the responses are cut at --max_response_len {cfg.max_response_len}; they "
        "score 0; try a larger --max_response_len, or a --stop that ends what samples/ shows"),
    "uniform": (
        lambda now, cfg: (now["reward"] < SOLVED and now.get("uniform_groups", 0) > 0.8
                          and cfg.samples_per_prompt > 1),
        "{now[uniform_groups]:.0%} of the prompts have samples with equal scores, at reward "
        "{now[reward]:.2f}; such prompts teach little; try easier problems in --data (harder ones where "
        "reward is over 0.5), or more --samples_per_prompt"),
    "critic": (
        lambda now, cfg: now["explained"] <= 0 and 0.05 < now["reward"] < SOLVED,
        "for 10 steps the critic explained none of the returns' variance (at best {now[explained]:.2g}); "
        "its advantages are noise; try a higher --critic_lr, more --critic_updates, or "
        "--freeze_policy_steps to train the critic first"),
    "clip": (
        lambda now, cfg: now["clip_share"] > 0.3,
        "{now[clip_share]:.0%} of the tokens are clipped; the updates move the policy too far from the "
        "step's samples; try a lower --policy_lr, or fewer --policy_updates (now {cfg.policy_updates})"),
    "gap": (
        lambda now, cfg: now["logp_gap/mean"] > 0.1 * cfg.max_logp_gap,
        "engine and trainer differ by {now[logp_gap/mean]:.2g} nats a token, and the run stops at "
        "--max_logp_gap {cfg.max_logp_gap:g}; it is rounding, or an error if it grows; try --dtype float32, "
        "which has almost no rounding"),
    "ess": (
        lambda now, cfg: now["ess"] < 0.9,
        "the effective sample size is {now[ess]:.0%}; engine and trainer disagree, so few tokens carry the "
        "update; try --dtype float32 to see whether it is rounding, or cap the weights with a lower "
        "--tis_clip (now {cfg.tis_clip})"),
    "finite": (
        lambda now, cfg: bool(now["nonfinite"]),
        "no finite number: {now[nonfinite]}; the weights or the samples may be damaged; stop the run, and "
        "look at samples/ and nonfinite/"),
    "grading": (
        lambda now, cfg: now["grade/error"] + now["grade/timeout"] > 0.05,
        "{now[grade/error]:.0%} of the answers raised an error in grading and {now[grade/timeout]:.0%} took "
        "too long; they score 0; repair --reward, or raise --grade_deadline (now {cfg.grade_deadline:g})"),
}


def _mean(rows, name):
    """The mean of a metric over the last LAST of `rows`; one of them must have it."""
    return fmean(row[name] for row in rows[-LAST:] if name in row)


def alarms(rows: Rows, cfg: Config) -> dict[str, str]:
    """What is wrong after the training steps `rows`, one or more: name of the alarm -> its line."""
    lengths = [row.get("response_len", 0.0) for row in rows]
    longest = lengths.index(max(lengths))
    explained = [row.get("explained_variance", 1.0) for row in rows[-10:]]
    now = defaultdict(lambda: NAN, {
        "longest": lengths[longest],
        "reward_at_longest": _mean(rows[:longest + 1], "reward"),
        "first_entropy": next((row["entropy"] for row in rows if "entropy" in row), NAN),
        # Of 10 steps, but not of a new critic's first 20.
        "explained": max(explained) if len(rows) >= 30 else 1.0,
        "nonfinite": ", ".join(name for name, x in rows[-1].items() if not math.isfinite(x))})
    for name in rows[-1]:
        now[name] = _mean(rows, name)
    return {name: text.format(now=now, cfg=cfg)
            for name, (active, text) in ALARMS.items() if active(now, cfg)}


def new_alarms(rows: Rows, cfg: Config) -> list[str]:
    """The lines of the alarms that the last row raises: active now, and inactive during the QUIET steps
    before. Depends on the rows alone, so a resumed run raises the same alarms as one never stopped."""
    before = set()
    for end in range(max(len(rows) - QUIET, 1), len(rows)):
        before |= alarms(rows[:end], cfg).keys()
    return [text for name, text in alarms(rows, cfg).items() if name not in before]
