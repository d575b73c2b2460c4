"""PPO as pure tensor maths: advantages, KL, and the losses of policy and critic.

Papers: PPO arXiv 1707.06347, GAE 1506.02438, Open-Reasoner-Zero (ORZ) 2503.24290.

Shapes:
    T  tokens of a pack: N segments (prompt + response) laid end to end
    N  segments of a pack
    mask        (T,) bool, true on the response tokens that enter the loss
    cu_seqlens  (N+1,) start of each segment, and the end of the last one
    values      (T,) the critic's value before token t
Log-probabilities and KL are in nats.

Denominators are arguments. The caller passes the token count of the whole optimizer update, over all packs
and ranks. So neither the packing nor the number of ranks changes a gradient.

Difference from ORZ: losses are sums over tokens divided by the update's token count. ORZ takes the mean of
each pack first, then the mean of the packs.
"""

import torch
from torch import Tensor


def segment_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Returns (T,): the index of each token's segment, from 0 to N-1. tokens: T. It is an argument because
    reading it from the device would wait for the device."""
    lengths = cu_seqlens.diff()
    ids = torch.arange(len(lengths), device=lengths.device)
    return torch.repeat_interleave(ids, lengths, output_size=tokens)


def gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, mask: Tensor, gamma: float = 1.0,
        lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns 1. advantages (T,) and 2. returns (T,), both 0 outside `mask` (GAE, 1506.02438, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t, where V is 0 after a segment's last token
    A_t     = delta_t + gamma lam A_{t+1}
    R_t     = A_t + V_t

    The steps t are the tokens in `mask`. A token outside `mask` is no step: the policy did not sample it. Its
    reward is added to the last step before it in the same segment.
    """
    steps, is_step = mask.nonzero()[:, 0], mask.long()
    if len(steps) == 0:
        return torch.zeros_like(values), torch.zeros_like(values)
    segment = segment_ids(cu_seqlens, len(mask))
    step = (is_step.cumsum(0) - 1).clamp(min=0)  # (T,) index of the last step at or before each token
    # (T,) whether such a step exists in the token's own segment. Only then the token's reward counts.
    in_reach = (segment[steps[step]] == segment) & (is_step.cumsum(0) > 0)
    own = torch.where(in_reach, rewards, 0)
    rewards = torch.zeros_like(values[steps]).index_add(0, step, own)
    segment, v = segment[steps], values[steps]

    def shifted(x: Tensor, k: int) -> Tensor:
        """Returns x_{t+k} for each step t; 0 where step t+k is beyond the segment's end."""
        same_segment = segment[k:] == segment[:-k]
        return torch.cat([torch.where(same_segment, x[k:], 0), x.new_zeros(k)])

    adv = rewards + gamma * shifted(v, 1) - v
    # At the start of a round, adv_t is the discounted sum of delta_t to delta_{t+reach-1}. The round adds
    # adv_{t+reach}, the sum of the next `reach` deltas. So the loop takes log2(steps) rounds.
    reach = 1
    while reach < len(steps):
        adv = adv + (gamma * lam) ** reach * shifted(adv, reach)
        reach *= 2
    zeros = torch.zeros_like(values)
    return zeros.index_put((steps,), adv), zeros.index_put((steps,), adv + v)


def whitening_stats(x: Tensor, mask: Tensor) -> Tensor:
    """Returns (3,) float64: count, sum and sum of squares of x where `mask` is true. To whiten over several
    packs or ranks, add up their statistics."""
    x = torch.where(mask, x, 0).double()
    return torch.stack([mask.sum().double(), x.sum(), (x * x).sum()])


def whiten(x: Tensor, mask: Tensor, stats: Tensor) -> Tensor:
    """Returns (T,): x minus the mean, divided by the population standard deviation; 0 outside `mask`.

    `stats` (3,): the `whitening_stats` of all tokens that are whitened together, usually the whole step.
    """
    count, total, squares = stats.to(x.device)
    mean = total / count.clamp(min=1)
    std = (squares / count.clamp(min=1) - mean * mean).clamp(min=0).sqrt()
    return torch.where(mask, (x - mean) / (std + 1e-8), 0)


def kl(logp: Tensor, ref: Tensor, estimator: str = "k3") -> Tensor:
    """Returns (T,) estimates of KL(policy || ref) in nats, for tokens that the policy sampled.

    `estimator`: k1, k2 or k3 of Schulman's note "Approximating KL Divergence". Raises ValueError for another
    name.
    """
    d = logp - ref
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    if estimator == "k3":
        # e^20 is still finite in fp32. A run that gets there is lost anyway.
        return torch.exp((-d).clamp(max=20)) - 1 + d
    raise ValueError(f"unknown KL estimator {estimator!r}")


def policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, tokens: float,
                clip_low: float = 0.2, clip_high: float = 0.2,
                weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns two scalars: 1. PPO's clipped loss of a pack (1707.06347, eq. 7); 2. the number of clipped
    tokens.

    The loss is summed over `mask` and divided by `tokens`, the response tokens of the whole update.
    old_logp (T,): if the policy takes one update a step, pass `logp.detach()`. The ratio is then 1 and the
        gradient is that of REINFORCE.
    weight (T,): detached importance weights that correct for the engine's log-probabilities; None: all 1.
    """
    ratio = torch.exp(logp - old_logp)
    free = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -torch.minimum(free, clipped)
    if weight is not None:
        loss = loss * weight
    return torch.where(mask, loss, 0).sum() / tokens, ((clipped < free) & mask).sum()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, tokens: float,
               clip: float | None = 0.2) -> Tensor:
    """Returns half the squared error of `values`, summed over `mask` and divided by `tokens`; a scalar.

    old_values (T,): the values before the step's first update.
    With `clip`, each token counts the larger of two squared errors: the error of the value, and the error of
    the value clipped to old_value ± clip (as in OpenAI baselines' ppo2).
    """
    loss = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return torch.where(mask, loss, 0).sum() / (2 * tokens)
