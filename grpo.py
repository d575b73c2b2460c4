"""The GRPO family as pure tensor maths: no critic, the samples of one prompt are compared with each other.

Papers: GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, RLOO 2402.14740,
REINFORCE++ 2501.03262, GSPO 2507.18071, CISPO 2506.13585, ScaleRL 2510.13786.

Each algorithm is three choices: an advantage (`group_advantages`), an aggregation of the tokens' losses
(`token_weights`) and a ratio (`policy_loss`). The presets of configs.py name them. A new algorithm is a
branch in one of these functions.

Shapes (packs and denominators as in ppo.py):
    P, n  prompts, and samples of each prompt
    T, N  tokens and segments of a pack
    mask     (T,) bool, true on the response tokens that enter the loss
    segment  (T,) index of each token's segment: ppo.segment_ids

Difference from Open-Reasoner-Zero: its GRPO should divide by the group's standard deviation, but does not,
because of operator precedence. What it computes is "group_mean_whiten". GRPO itself is "group_mean_std".
"""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, kind: str = "group_mean_std") -> Tensor:
    """Returns advantages (P, n) from rewards (P, n); exactly 0 in a group whose rewards are all equal.

    "group_mean": reward minus the group's mean. "group_mean_std": "group_mean" divided by the sample standard
    deviation (n-1) + 1e-6. "leave_one_out": reward minus the mean of the other samples (RLOO).
    "group_mean_whiten": "group_mean" here; the caller then whitens over the step's tokens.
    "group_mean_batch_std": "group_mean" here; the caller then divides by `batch_std` (ScaleRL).
    Raises ValueError for another kind.
    """
    n = rewards.shape[1]
    centred = rewards - rewards.mean(1, keepdim=True)
    if kind == "group_mean_std":
        centred = centred / (rewards.std(1, keepdim=True) + 1e-6)
    elif kind == "leave_one_out":
        centred = centred * (n / (n - 1))
    elif kind not in ("group_mean", "group_mean_whiten", "group_mean_batch_std"):
        raise ValueError(f"unknown advantage {kind!r}")
    # The mean of equal floats may differ from them by a rounding error, so 0 is set here.
    return torch.where(keep_groups(rewards)[:, None], centred, 0)


def keep_groups(rewards: Tensor) -> Tensor:
    """Returns (P,): true where the rewards (P, n) of a prompt differ. Only such prompts have a gradient
    (DAPO, eq. 11)."""
    return (rewards != rewards[:, :1]).any(1)


def batch_std(total: Tensor) -> float:
    """Returns the standard deviation of advantages whose mean is 0, plus 1e-6 (ScaleRL, 2510.13786). total
    (2,): the number of advantages and the sum of their squares, over all samples of the step."""
    count, squares = total.tolist()
    return (squares / max(count, 1)) ** 0.5 + 1e-6


def overlong_penalty(length: int, max_len: int, buffer: int) -> float:
    """Returns DAPO's penalty of a response of `length` tokens (2503.14476, eq. 13). The penalty is 0 up to
    max_len - buffer tokens. Then it falls linearly to -1 at max_len tokens."""
    return -min(max((length - (max_len - buffer)) / buffer, 0.0), 1.0)


def token_weights(mask: Tensor, segment: Tensor, aggregation: str, tokens: float, responses: float,
                  max_len: int, prompt_share: Tensor | None = None) -> Tensor:
    """(T,) weight of each token's loss in the update's loss; 0 outside `mask`.

    `tokens`, `responses`: counts of the whole update, over all packs and ranks.
    "token": mean over all tokens. "response": mean over each response's tokens, then over responses.
    "max_len": sum over tokens / (responses × max_len), so that length has no influence (Dr. GRPO).
    "prompt": mean over the tokens of each prompt's responses, then over prompts (ScaleRL). It needs
    prompt_share (T,): 1 / (tokens of this prompt's responses in the update × prompts of the update).
    Raises ValueError for another aggregation.
    """
    if aggregation == "token":
        return mask / tokens
    if aggregation == "response":
        return mask / (responses * _segment_sum(mask.float(), segment).clamp(min=1))
    if aggregation == "max_len":
        return mask / (responses * max_len)
    if aggregation == "prompt":
        return mask * prompt_share
    raise ValueError(f"unknown aggregation {aggregation!r}")


def policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, segment: Tensor,
                weights: Tensor, ratio: str = "token", clip_low: float = 0.2, clip_high: float = 0.2,
                weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns two scalars: 1. the loss of a pack, a sum weighted with `weights` (T,) from `token_weights`;
    2. the number of clipped tokens.

    "token": ratio exp(logp - old_logp) of each token, clipped as in PPO (GRPO and most others).
    "sequence": exp of the mean log-ratio of the response, clipped as in PPO (GSPO, eq. 7).
    "clipped": -A logp × the clipped ratio, detached, so every token keeps its gradient (CISPO, eq. 4).
    weight (T,): detached importance weights that correct for the engine's log-probabilities; None: all 1.
    Raises ValueError for another ratio.
    """
    log_ratio = torch.where(mask, logp - old_logp, 0)
    if ratio == "sequence":
        log_ratio = _segment_sum(log_ratio, segment) / _segment_sum(mask.float(), segment).clamp(min=1)
    rho = torch.exp(log_ratio)
    inside = rho.clamp(1 - clip_low, 1 + clip_high)
    if ratio == "clipped":
        loss = -inside.detach() * advantages * logp
        clipped = inside != rho
    elif ratio in ("token", "sequence"):
        free, near = rho * advantages, inside * advantages
        loss = -torch.minimum(free, near)
        clipped = near < free
    else:
        raise ValueError(f"unknown ratio {ratio!r}")
    if weight is not None:
        loss = loss * weight
    return (torch.where(mask, loss, 0) * weights).sum(), (clipped & mask).sum()


def _segment_sum(x: Tensor, segment: Tensor) -> Tensor:
    """Returns (T,): for each token, the sum of x over the token's segment."""
    sums = torch.zeros_like(x).index_add(0, segment, x)  # there are no more segments than tokens
    return sums[segment]
