"""PPO as pure tensor maths: advantages, KL, and the critic's loss. The policy's loss is grpo.policy_loss.

Papers: PPO arXiv 1707.06347, GAE 1506.02438, Open-Reasoner-Zero (ORZ) 2503.24290.

A pack has N segments (a prompt with a response) end to end, T tokens in all.

    mask        (T,) bool, true on the response tokens that enter the loss
    cu_seqlens  (N+1,) index of each segment's first token; the last entry is T
    values      (T,) the critic's value of the text before each token

Log-probabilities and KL are in nats.

A loss is a sum over tokens, divided by the number of response tokens in the whole update. ORZ instead
averages over the tokens of each pack."""

import torch
import torch.nn.functional as F
from torch import Tensor


def segment_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Returns (T,): the index of each token's segment, from 0 to N-1.

    tokens: T. The caller passes T, because reading cu_seqlens[-1] would make the host wait for the GPU."""
    lengths = cu_seqlens.diff()
    ids = torch.arange(len(lengths), device=lengths.device)
    return torch.repeat_interleave(ids, lengths, output_size=tokens)


def gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Returns two tensors (T,): advantages A and returns R, both 0 outside `mask` (GAE, 1506.02438, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lam A_{t+1}
    R_t     = A_t + V_t

    The time steps t are the tokens in `mask`. At a segment's last time step, V_{t+1} and A_{t+1} are 0.

    rewards (T,): 0 outside `mask`"""
    steps = mask.nonzero()[:, 0]  # (S,) index of each time step's token
    segment = segment_ids(cu_seqlens, len(mask))[steps]  # (S,), as r, v, delta and adv below
    r = rewards[steps]
    v = values[steps]

    def shifted(x: Tensor, k: int) -> Tensor:
        """Returns x_{t+k} for each time step t, or 0 if step t + k is not in t's segment."""
        same_segment = segment[k:] == segment[:-k]
        later = torch.where(same_segment, x[k:], 0)
        return F.pad(later, (0, k))

    delta = r + gamma * shifted(v, 1) - v
    # A_t is the discounted sum of delta_t, delta_{t+1}, … Before each iteration, adv_t is the sum of the
    # first `reach` terms. An iteration adds the next `reach` terms, which are adv_{t+reach}, discounted.
    adv = delta
    reach = 1
    while reach < len(steps):
        discount = (gamma * lam) ** reach
        adv = adv + discount * shifted(adv, reach)
        reach *= 2
    zeros = torch.zeros_like(values)
    advantages = zeros.index_put((steps,), adv)
    returns = zeros.index_put((steps,), adv + v)  # R_t = A_t + V_t
    return advantages, returns


def whitening_stats(x: Tensor, mask: Tensor) -> Tensor:
    """Returns (3,) float64: count, sum and sum of squares of x (T,) where `mask` is true. Add these stats up
    over packs and ranks."""
    x = torch.where(mask, x, 0).double()
    count = mask.sum().double()
    total = x.sum()
    squares = (x * x).sum()
    return torch.stack([count, total, squares])


def whiten(x: Tensor, mask: Tensor, stats: Tensor) -> Tensor:
    """Returns (T,): x minus the mean, divided by the population standard deviation; 0 outside `mask`.

    stats (3,): the sum of `whitening_stats` over all packs and ranks."""
    count, total, squares = stats.to(x.device)
    # 0 / 0 if no token of the step is in the loss; then `mask` is false everywhere.
    mean = total / count
    variance = squares / count - mean * mean
    std = variance.clamp(min=0).sqrt()
    whitened = (x - mean) / (std + 1e-8)
    return torch.where(mask, whitened, 0)


def kl(logp: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Returns (T,): an estimate of KL(policy || ref) at each token, in nats. It is for metrics and rewards;
    for the loss, use `kl_loss`.

    logp, ref (T,): log-probs of tokens that the policy has sampled.
    estimator: k1, k2 or k3 of Schulman's note "Approximating KL Divergence". Raises ValueError for another
        name."""
    d = logp - ref
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    if estimator == "k3":
        inverse = torch.exp((-d).clamp(max=20))  # exp overflows in fp32 above 88
        return inverse - 1 + d
    raise ValueError(f"unknown KL estimator {estimator!r}")


def kl_loss(
    logp: Tensor,
    old_logp: Tensor,
    ref: Tensor,
) -> Tensor:
    """Returns (T,): the KL term of each token's loss. Its expected gradient is the gradient of KL(policy ||
    ref) at that token, also after the policy has moved away from `old_logp`.

        sg(rho) d² / 2        rho = exp(logp - old_logp),  d = logp - ref,  sg: without gradient

    Its gradient is rho d ∇logp. That is also the gradient of rho k3 (DeepSeek-V3.2, 2512.02556). k3 without
    rho has the gradient of KL(ref || policy) (2506.09477, 2510.01555).

    old_logp (T,): log-probs of the policy that sampled the tokens."""
    rho = torch.exp(logp - old_logp).detach()
    d = logp - ref
    return rho * d**2 / 2


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    tokens: float,
    clip: float | None,
) -> Tensor:
    """Returns a scalar: (values - returns)² / 2, summed over the tokens in `mask`, divided by `tokens`, the
    number of response tokens in the whole update.

    old_values (T,): values before the step's first update.
    clip: a token's loss is the larger of two losses. The first is computed with `values`, the second with
        `values` clamped to old_values ± clip (ppo2 of OpenAI's baselines). None: no clipping."""
    loss = (values - returns) ** 2
    if clip is not None:
        change = (values - old_values).clamp(-clip, clip)
        near = old_values + change  # `values`, clamped
        clipped = (near - returns) ** 2
        loss = torch.maximum(loss, clipped)
    total = torch.where(mask, loss, 0).sum()
    return total / (2 * tokens)
