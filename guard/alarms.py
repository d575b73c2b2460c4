"""Alarms: signs of trouble in a run's metrics, with the likely cause and what to change.

for text in new_alarms(log.history, cfg): print(text)"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from configs import Config
from log import NAN
from rollout import terms_of

MEAN_STEPS = 5  # most alarms use means over the last 5 steps
QUIET_STEPS = 10  # an alarm is printed again only after 10 steps in which it was inactive
WARM_STEPS = (
    30  # no alarm "critic" in the first 30 steps, because a new critic explains no variance
)
SOLVED = (
    0.9  # with this mean reward or more, "entropy", "length", "uniform" and "critic" are inactive
)
History = Sequence[Mapping[str, float]]  # one row of metrics for each training step so far

# Name of an alarm -> (function that returns whether the alarm is active, text). `now` has the mean of each
# metric over the last MEAN_STEPS steps, and values that active_alarms adds, such as first_entropy. A missing
# metric is NaN, so its comparisons are false.
ALARMS = {
    "entropy": (
        lambda now, cfg: (
            now["reward"] < SOLVED and now["entropy"] < max(0.1 * now["first_entropy"], 0.01)
        ),
        "entropy is {now[entropy]:.2g} nats a token "
        "(first step: {now[first_entropy]:.2g}): the policy stops exploring; try a "
        "lower --policy_lr, {now[clip]}or a small --entropy_coef",
    ),
    "length": (
        lambda now, cfg: (
            now["reward"] < SOLVED
            and now["response_len"] < now["longest"] / 3
            and now["score"] <= now["score_at_longest"]
        ),
        "responses have only {now[response_len]:.0f} tokens (before: up to "
        "{now[longest]:.0f}), and the score is no higher; try a lower "
        "--policy_lr, and read samples/",
    ),
    "truncated": (
        lambda now, cfg: now["truncated"] > 0.5,
        "{now[truncated]:.0%} of the responses are cut at --max_response_len "
        "{cfg.max_response_len} and score 0; try a larger one, or a --stop that "
        "fits the responses in samples/",
    ),
    "constant": (
        lambda now, cfg: now["always_uniform"] and cfg.samples_per_prompt > 1,
        "since the first step all samples of a prompt have had the same score "
        "(mean {now[score]:g}), and the run can't learn from it; try reward.py on "
        "samples/: --reward may ignore the response; or try other --data",
    ),
    "uniform": (
        lambda now, cfg: (
            now["reward"] < SOLVED
            and now["uniform_groups"] > 0.8
            and cfg.samples_per_prompt > 1
            and not now["always_uniform"]
        ),
        "{now[uniform_groups]:.0%} of the prompts have samples with equal scores "
        "and teach little (reward {now[reward]:.2f}); try problems nearer to reward "
        "0.5, or more --samples_per_prompt",
    ),
    "term": (
        lambda now, cfg: now["constant_terms"] and not ALARMS["constant"][0](now, cfg),
        "a term of --reward has had the same mean in all steps and teaches nothing: "
        "{now[constant_terms]}; try reward.py on samples/, or --reward without it",
    ),
    "critic": (
        lambda now, cfg: (
            now["explained_variance"] <= 0
            and now["step"] > WARM_STEPS
            and 0.05 < now["reward"] < SOLVED
        ),
        "the critic explains none of the returns' variance "
        "({now[explained_variance]:.2g}), so advantages are noise; try a higher "
        "--critic_lr, more --critic_updates, or --freeze_policy_steps",
    ),
    "clip": (
        lambda now, cfg: now["clip_share"] > 0.3,
        "{now[clip_share]:.0%} of the tokens are clipped: the updates move the "
        "policy too far from its samples; try a lower --policy_lr, or fewer updates "
        "(now {cfg.policy_updates} --policy_updates × {cfg.passes_per_step} --passes_per_step)",
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
    "memory": (
        lambda now, cfg: now["mem/residual_gb"] >= now["least_residual"] + 1,
        "the sleeping engine keeps {now[mem/residual_gb]:.1f} GiB of the device "
        "({now[least_residual]:.1f} at its lowest), and memory will run out; a smaller "
        "--engine_share or --pack_len leaves more room; if you stop the run and "
        "repeat its command, it continues in a new process; see the metrics mem/*",
    ),
}


def active_alarms(history: History, cfg: Config) -> dict[str, str]:
    """Returns a dict with the alarms that are active after the last step of `history`: name -> text."""
    recent = history[-MEAN_STEPS:]
    terms = [
        term.name for term in terms_of(cfg) if term.weight
    ]  # none if only a teacher trains the policy
    longest = max(history, key=lambda row: row["response_len"])
    now = defaultdict(
        lambda: NAN,
        {
            "first_entropy": next((row["entropy"] for row in history if "entropy" in row), NAN),
            "always_uniform": bool(terms)
            and all(row.get("uniform_groups") == 1 for row in history),
            "longest": longest["response_len"],
            "score_at_longest": longest.get("score", NAN),
            "constant_terms": constant_terms(history, terms),
            # With one update a step, the clip has no effect and its flags are refused.
            "clip": "--clip_high 0.28 " if cfg.updates_per_step > 1 else "",
            "least_residual": min(row.get("mem/residual_gb", NAN) for row in history),
        },
    )
    for name in history[-1]:
        now[name] = fmean(row[name] for row in recent if name in row)
    if not terms:
        now["uniform_groups"] = NAN
    return {
        name: text.format(now=now, cfg=cfg)
        for name, (active, text) in ALARMS.items()
        if active(now, cfg)
    }


def constant_terms(history: History, terms: Sequence[str]) -> str:
    """Returns the names of the terms of --reward whose mean was the same in all steps; "" in the first
    MEAN_STEPS - 1 steps."""
    found = []
    for name in terms:
        means = [row[f"reward/{name}"] for row in history if f"reward/{name}" in row]
        if len(means) >= MEAN_STEPS and max(means) - min(means) < 1e-9:
            found.append(f"{name} ({means[0]:g})")
    return ", ".join(found)


def new_alarms(history: History, cfg: Config) -> list[str]:
    """Returns the texts of alarms that are active now, but were active in none of the QUIET_STEPS steps
    before."""
    recent = set()
    for end in range(max(len(history) - QUIET_STEPS, 1), len(history)):
        recent |= active_alarms(history[:end], cfg).keys()
    return [text for name, text in active_alarms(history, cfg).items() if name not in recent]
