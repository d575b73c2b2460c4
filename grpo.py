"""The GRPO family as pure tensor maths: algorithms that need no critic.

Papers: GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, RLOO 2402.14740, REINFORCE++ 2501.03262,
GSPO 2507.18071, CISPO 2506.13585, ScaleRL 2510.13786, DeepSeek-V3.2 2512.02556, GDPO 2601.05242,
MaxRL 2602.02710, DPPO 2602.04879.

Three flags make an algorithm:
    --advantage    how rewards become advantages: `group_advantages`, or ppo.gae for return_whiten
    --aggregation  how the losses of tokens are averaged: `token_weights`
    --ratio        the importance ratio and its clipping: `policy_loss`
To add an algorithm, add a branch to one of these functions. An advantage that depends on more than rewards
needs a branch in train.add_group_advantages.

Shapes (ppo.py explains packs, segments and updates):
    P, n     number of prompts, and number of samples of each; a group is the samples of one prompt
    T        number of tokens of a pack
    mask     (T,) bool, true on the response tokens that enter the loss
    segment  (T,) index of each token's segment, from ppo.segment_ids

The GRPO paper divides by the group's standard deviation ("group_mean_std"). Open-Reasoner-Zero's code
computes "group_mean_whiten", because of a mistake in operator precedence."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, kind: str = "group_mean_std") -> Tensor:
    """Returns advantages (P, n) for rewards (P, n): exactly 0 in a group whose rewards are all equal.

    kind:
        "group_mean"            reward minus the mean of the group
        "group_mean_std"        group_mean / (sample standard deviation of the group + 1e-6)
        "leave_one_out"         reward minus the mean of the group's other rewards (RLOO)
        "group_mean_whiten"     group_mean; train.py whitens it over the tokens of the step
        "group_mean_batch_std"  group_mean; train.py divides it by `batch_std` (ScaleRL)
        "group_mean_over_mean"  group_mean / mean of the group, for rewards from 0 (MaxRL, 2602.02710)
    train.decoupled_advantages computes the advantage "group_each_std" (GDPO). Raises ValueError for another
    kind."""
    n = rewards.shape[1]
    mean = rewards.mean(1, keepdim=True)  # (P, 1)
    centred = rewards - mean  # from here on divided or multiplied, as `kind` says
    if kind == "group_mean_std":
        centred /= rewards.std(1, keepdim=True) + 1e-6
    elif kind == "group_mean_over_mean":
        centred /= mean
    elif kind == "leave_one_out":
        centred *= n / (n - 1)  # = reward minus the mean of the n - 1 others
    elif kind not in (
        "group_mean",
        "group_mean_whiten",
        "group_mean_batch_std",
    ):
        raise ValueError(f"unknown advantage {kind!r}")
    # Equal rewards get 0 here, because a rounding error of the mean could make their advantages nonzero.
    return torch.where(not_uniform(rewards)[:, None], centred, 0)


def not_uniform(rewards: Tensor) -> Tensor:
    """Returns (P,) bool, for rewards (P, n): true if the rewards of a prompt differ, false if they are all
    equal (DAPO, eq. 11)."""
    return (rewards != rewards[:, :1]).any(1)


def batch_std(total: Tensor) -> float:
    """Returns 1e-6 + the standard deviation of a step's advantages (ScaleRL, 2510.13786). The mean of the
    advantages is 0, so it is not subtracted.

    total (2,): number of advantages and sum of their squares, over all ranks"""
    count, squares = total.tolist()
    return (squares / max(count, 1)) ** 0.5 + 1e-6


def token_weights(
    mask: Tensor,
    segment: Tensor,
    aggregation: str,
    tokens: float,
    responses: float,
    max_len: int,
    prompt_share: Tensor | None = None,
) -> Tensor:
    """Returns (T,): the weight of each token's loss in the update's loss; 0 outside `mask`.

    tokens, responses: numbers of response tokens and of responses in the update, over all ranks
    prompt_share (T,): 1 / (number of the prompt's response tokens × number of prompts in the update); used
        only by "prompt"
    aggregation:
        "token"     mean over all response tokens
        "response"  mean over the tokens of each response, then mean over responses
        "max_len"   sum over tokens / (responses × max_len) (Dr. GRPO)
        "prompt"    mean over the response tokens of a prompt, then mean over prompts (ScaleRL)
    Raises ValueError for another aggregation."""
    if aggregation == "token":
        return mask / tokens
    if aggregation == "response":  # a segment has one response
        return mask / (responses * _segment_tokens(mask, segment))
    if aggregation == "max_len":
        return mask / (responses * max_len)
    if aggregation == "prompt":
        return mask * prompt_share
    raise ValueError(f"unknown aggregation {aggregation!r}")


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segment: Tensor,
    weights: Tensor,
    ratio: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    correction: Tensor | float = 1.0,
    engine_logp: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss of a pack (a scalar: the sum of the tokens' losses times `weights`) and the number of
    clipped tokens.

    old_logp (T,): log-probs before the step's first update
    weights (T,): from `token_weights`; for PPO, mask / number of response tokens in the update
    correction (T,): factor of each token's loss, from `mismatch_weight`
    ratio:
        "token"     exp(logp - old_logp) of each token, clipped (PPO, 1707.06347, eq. 7; GRPO)
        "sequence"  exp of the mean of logp - old_logp over the response, clipped as in PPO (GSPO, eq. 7)
        "clipped"   loss = -advantage × logp × detach(clipped token ratio) (CISPO, eq. 4)
        "binary_tv", "binary_kl"
                    the token ratio without a clip. A token's loss is 0 if its advantage moves its probability
                    farther away from the engine's, and `divergence` is above clip_high (advantage above 0)
                    or clip_low (below 0) (DPPO, 2602.04879)
    engine_logp (T,): log-probs of the engine that sampled the tokens; only for "binary_…"
    Raises ValueError for another ratio."""
    log_ratio = torch.where(mask, logp - old_logp, 0)
    if ratio == "sequence":
        log_ratio = _segment_mean(log_ratio, mask, segment)
    rho = torch.exp(log_ratio)
    inside = rho.clamp(1 - clip_low, 1 + clip_high)
    if ratio == "clipped":
        loss = -inside.detach() * advantages * logp
        clipped = inside != rho
    elif ratio in ("token", "sequence"):
        free, near = rho * advantages, inside * advantages  # without and with the clip
        loss = -torch.minimum(free, near)
        clipped = near < free
    elif ratio in ("binary_tv", "binary_kl"):
        away = (logp - engine_logp) * advantages > 0
        bound = torch.where(advantages > 0, clip_high, clip_low)  # of the divergence, not of rho
        far = divergence(logp.detach(), engine_logp, ratio) > bound
        clipped = away & far
        loss = torch.where(clipped, 0, -rho * advantages)
    else:
        raise ValueError(f"unknown ratio {ratio!r}")
    return (torch.where(mask, loss * correction, 0) * weights).sum(), (clipped & mask).sum()


def divergence(logp: Tensor, engine_logp: Tensor, kind: str) -> Tensor:
    """Returns (T,): a divergence of trainer and engine at each token, from the sampled token's probabilities
    p and q alone (DPPO, 2602.04879): |p - q| for "binary_tv"; for "binary_kl" the KL from q to p, in nats, of
    the two events "this token" and "another token"."""
    edge = 1e-7  # the logarithms below need probabilities between 0 and 1
    p = logp.exp().clamp(edge, 1 - edge)
    q = engine_logp.exp().clamp(edge, 1 - edge)
    if kind == "binary_tv":
        return (p - q).abs()
    # KL from q to p of two events, with the probabilities q and 1 - q, and p and 1 - p
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()


@torch.no_grad()
def mismatch_weight(
    logp: Tensor,
    engine_logp: Tensor,
    mask: Tensor,
    segment: Tensor,
    kind: str,
    low: float,
    high: float,
    now: Tensor | None = None,
    advantages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns two tensors (T,), without gradient:
    1. importance weights, which correct the difference between trainer and engine; 0 outside `mask`
    2. whether a bound changed the token's weight

    logp (T,): the trainer's log-probs, before the step's first update
    engine_logp (T,): log-probs of the engine that sampled the tokens
    low, high: bounds of the ratio p_trainer / p_engine
    now, advantages (T,): the trainer's log-probs in this update; only for "negative-mask"
    kind: "none" (each token's ratio without bounds), "negative-mask" or LEVEL-ACTION
        "token-…"      the ratio of each token
        "sequence-…"   the product of a response's ratios
        "geometric-…"  the geometric mean of a response's ratios, as in verl
        "…-truncate"   the ratio is clamped to [low, high]
        "…-mask"       a ratio outside [low, high] becomes 0

        "negative-mask" is the ratio of each token, but 0 where the advantage is negative and the geometric
        mean of the response's exp(now - engine_logp) is below low.
    Raises KeyError for another LEVEL or ACTION.

    Sources: "token-truncate" with low = 0 is TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"), "token-mask" is IcePop (2510.18855), "sequence-mask" is MIS (Liu et
    al. 2025, "When Speed Kills Stability"), "negative-mask" with low = exp(-δ) is the sequence mask of
    DeepSeek-V3.2 (2512.02556, sec. 3.1)."""
    level, _, action = kind.partition("-")  # "none" has the action ""
    log_ratio = torch.where(mask, logp - engine_logp, 0)
    ratio = {
        "none": log_ratio,
        "negative": log_ratio,
        "token": log_ratio,
        "sequence": _segment_sum(log_ratio, segment),
        "geometric": _segment_mean(log_ratio, mask, segment),
    }[level].exp()
    clamped = ratio.clamp(low, high)
    kept = clamped == ratio  # the tokens that "…-mask" keeps
    if kind == "negative-mask":  # the response's mean decides, not the token's ratio
        gap = torch.where(mask, now - engine_logp, 0)
        kept = _segment_mean(gap, mask, segment).exp() >= low
        kept |= advantages >= 0  # only tokens with a negative advantage can get the weight 0
    weight = {"": ratio, "truncate": clamped, "mask": torch.where(kept, ratio, 0)}[action]
    return torch.where(mask, weight, 0), mask & (weight != ratio)


def _segment_mean(x: Tensor, mask: Tensor, segment: Tensor) -> Tensor:
    """Returns (T,): for each token, the mean of x over its segment's tokens in `mask`.

    x (T,): must be 0 outside `mask`"""
    return _segment_sum(x, segment) / _segment_tokens(mask, segment)


def _segment_tokens(mask: Tensor, segment: Tensor) -> Tensor:
    """Returns (T,): for each token, how many tokens of its segment are in `mask`, but at least 1, because the
    callers divide by this number."""
    return _segment_sum(mask.float(), segment).clamp(min=1)


def _segment_sum(x: Tensor, segment: Tensor) -> Tensor:
    """Returns (T,): for each token, the sum of x (T,) over its segment."""
    sums = torch.zeros_like(x).index_add(0, segment, x)  # (T,): a pack has at most T segments
    return sums[segment]
