"""The GRPO family as pure tensor maths: critics replaced by what the other samples of the same prompt scored.

GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, RLOO 2402.14740, REINFORCE++ 2501.03262, GSPO 2507.18071,
CISPO 2506.13585. Each is a choice of advantage, ratio and aggregation; RECIPES names them. Packs and denominators are as
in ppo.py: T tokens of N segments, `mask` on response tokens, global counts as arguments.

Departs from Open-Reasoner-Zero, whose GRPO means to divide by the group's deviation and, by operator precedence, never
does: its true behaviour is "group_mean_whiten", GRPO's is "group_mean_std".
"""

import torch
from torch import Tensor

RECIPES: dict[str, dict] = {  # fields of configs.Config
    "grpo": dict(advantage="group_mean_std", ratio="token", aggregation="response"),
    "orz-grpo": dict(advantage="group_mean_whiten", ratio="token", aggregation="token"),
    "dr-grpo": dict(advantage="group_mean", ratio="token", aggregation="max_len"),
    "dapo": dict(advantage="group_mean_std", ratio="token", aggregation="token", clip_high=0.28),
    "rloo": dict(advantage="leave_one_out", ratio="token", aggregation="token"),
    "reinforce++": dict(advantage="group_mean_whiten", ratio="token", aggregation="token"),
    "gspo": dict(advantage="group_mean_std", ratio="sequence", aggregation="response", clip_low=3e-4, clip_high=4e-4),
    "cispo": dict(advantage="group_mean_std", ratio="clipped", aggregation="token"),
}


def group_advantages(rewards: Tensor, kind: str = "group_mean_std") -> Tensor:
    """(P, n) advantages of n samples of each of P prompts from their rewards; exactly 0 in a group of equal rewards.

    "group_mean_std" divides by the sample deviation (n-1) + 1e-6; "leave_one_out" compares with the mean of the others
    (RLOO); "group_mean_whiten" is "group_mean" here, the caller whitens it over the step's tokens.
    """
    n = rewards.shape[1]
    centred = rewards - rewards.mean(1, keepdim=True)
    if kind == "group_mean_std":
        centred = centred / (rewards.std(1, keepdim=True) + 1e-6)
    elif kind == "leave_one_out":
        centred = centred * (n / (n - 1))
    return torch.where(keep_groups(rewards)[:, None], centred, 0)  # the mean of equal floats may be off by an ulp


def keep_groups(rewards: Tensor) -> Tensor:
    """(P,) true where a prompt's rewards (P, n) differ, that is, where there is something to learn (DAPO, eq. 11)."""
    return (rewards != rewards[:, :1]).any(1)


def overlong_penalty(length: int, max_len: int, buffer: int) -> float:
    """DAPO's soft punishment (2503.14476, eq. 13): 0 up to max_len - buffer tokens, then linearly down to -1."""
    return -min(max((length - (max_len - buffer)) / buffer, 0.0), 1.0)


def token_weights(mask: Tensor, segment: Tensor, aggregation: str, tokens: float, responses: float,
                  max_len: int) -> Tensor:
    """(T,) weight of each token's loss in the step's: its mean over "token"s, over "response"s of their means, or, for
    "max_len", the sum over tokens by responses × max_len (Dr. GRPO: no bias by length)."""
    if aggregation == "token":
        return mask / tokens
    if aggregation == "max_len":
        return mask / (responses * max_len)
    return mask / (responses * _segment_sum(mask.float(), segment).clamp(min=1))


def policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, segment: Tensor, weights: Tensor,
                ratio: str = "token", clip_low: float = 0.2, clip_high: float = 0.2,
                weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The family's loss of one pack, summed with `weights` (see `token_weights`), and the number of clipped tokens.

    ratio "token": exp(logp - old), clipped (GRPO and most); "sequence": exp of its mean over the response, so that
    gradients spread over its tokens (GSPO, eq. 7); "clipped": -stop_grad(clip(ratio)) A logp (CISPO, eq. 4).
    `segment` (T,): ppo.segment_ids; `weight` (T,): truncated importance weight of the engine's mismatch, detached.
    """
    log_ratio = torch.where(mask, logp - old_logp, 0)
    if ratio == "sequence":
        log_ratio = _segment_sum(log_ratio, segment) / _segment_sum(mask.float(), segment).clamp(min=1)
    rho = torch.exp(log_ratio)
    inside = rho.clamp(1 - clip_low, 1 + clip_high)
    if ratio == "clipped":
        loss, clipped = -inside.detach() * advantages * logp, inside != rho
    else:
        loss = -torch.minimum(rho * advantages, inside * advantages)
        clipped = inside * advantages < rho * advantages
    if weight is not None:
        loss = loss * weight
    return (torch.where(mask, loss, 0) * weights).sum(), (clipped & mask).sum()


def _segment_sum(x: Tensor, segment: Tensor) -> Tensor:
    """(T,) sum of x over the segment of each token."""
    sums = x.new_zeros(int(segment[-1]) + 1).index_add(0, segment, x)
    return sums[segment]
