"""PPO as pure tensor maths (Schulman et al., arXiv 1707.06347; GAE, 1506.02438), in Open-Reasoner-Zero's form (2503.24290).

Everything acts on packs: T tokens of N segments end to end. `mask` is true on response tokens, `cu_seqlens` (N+1,) says
where segments begin and end, `values[t]` is the critic's value before token t. Denominators are arguments: the caller
passes the global count of its optimizer step, so neither packing nor the number of ranks changes a gradient.

Departs from Open-Reasoner-Zero: losses are sums over tokens by the step's token count; it averages within packs first.
"""

import torch
from torch import Tensor


def segment_ids(cu_seqlens: Tensor) -> Tensor:
    """(T,) index of the segment that each token belongs to."""
    lengths = cu_seqlens.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def gae(rewards: Tensor, values: Tensor, cu_seqlens: Tensor, mask: Tensor, gamma: float = 1.0,
        lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """Generalised advantages and returns, (T,) each, 0 outside `mask` (1506.02438, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t with V = 0 after a segment's last token; A_t = delta_t + gamma lam A_{t+1};
    R_t = A_t + V_t. The scan doubles its reach each round: log2(longest segment) passes instead of one a token.
    """
    segment = segment_ids(cu_seqlens)

    def ahead(x: Tensor, s: int) -> Tensor:  # x_{t+s}, 0 beyond the segment's end
        same = segment[s:] == segment[:-s]
        return torch.cat([torch.where(same, x[s:], 0), x.new_zeros(s)])

    if len(values) < 2:
        return torch.where(mask, rewards - values, 0), torch.where(mask, rewards, 0)
    values = torch.where(mask, values, 0)
    adv = torch.where(mask, rewards + gamma * ahead(values, 1) - values, 0)
    reach, longest = 1, int(cu_seqlens.diff().max())
    while reach < longest:
        adv = adv + (gamma * lam) ** reach * ahead(adv, reach)
        reach *= 2
    adv = torch.where(mask, adv, 0)
    return adv, adv + values


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """(3,) float64: count, sum and sum of squares of x where mask. Summed over packs and ranks, then for `whiten`."""
    x = x[mask].double()
    return torch.stack([x.new_tensor(x.numel()), x.sum(), (x * x).sum()])


def whiten(x: Tensor, mask: Tensor, total: Tensor) -> Tensor:
    """x with the mean and the population standard deviation of `total` (see `moments`) taken out; 0 outside mask."""
    count, first, second = total.tolist()
    mean = first / max(count, 1)
    std = max(second / max(count, 1) - mean * mean, 0.0) ** 0.5
    return torch.where(mask, (x - mean) / (std + 1e-8), 0)


def kl(logp: Tensor, ref: Tensor, estimator: str = "k3") -> Tensor:
    """(T,) estimates of KL(policy || ref) from samples of the policy, in nats (Schulman, "Approximating KL divergence").
    k3 is clamped at e^20, where fp32 still is finite and the run is lost anyway."""
    d = logp - ref
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    return torch.exp((-d).clamp(max=20)) - 1 + d


def policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, tokens: float, clip_low: float = 0.2,
                clip_high: float = 0.2, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Clipped surrogate (1707.06347, eq. 7), summed over mask and divided by `tokens`; and how many tokens it clipped.

    Pass `logp.detach()` as old_logp where the policy takes one update a step: the ratio is 1, its gradient REINFORCE's.
    `weight` (T,): truncated importance weight of the engine's mismatch, detached.
    """
    ratio = torch.exp(logp - old_logp)
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -torch.minimum(free, clipped)
    if weight is not None:
        loss = loss * weight
    return torch.where(mask, loss, 0).sum() / tokens, ((clipped < free) & mask).sum()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, tokens: float,
               clip: float | None = 0.2) -> Tensor:
    """Half the squared error of the returns, summed over mask and divided by `tokens`; with `clip`, the larger of that
    and the error of values kept within `clip` of the step's first values (as OpenAI baselines' ppo2 does)."""
    loss = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return torch.where(mask, loss, 0).sum() / (2 * tokens)
