"""The output layer of a language model: log-probs and entropies in fp32, computed in chunks of rows.

Letters in the shapes of tensors: n rows, V and D the sizes of the vocabulary and of the hidden states."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from configs import CHUNK_BYTES

if torch.cuda.is_available():  # CPU builds of torch have no Triton
    from layers import gpu_kernels


class LMHead(nn.Linear):
    """The output layer of a language model. `forward` returns log-probs and entropies.

    Cohere and Granite multiply their logits by `scale`. Dividing the temperature by `scale` has the same
    effect."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        of_cohere = getattr(config, "logit_scale", 1.0)
        of_granite = getattr(config, "logits_scaling", 1.0)
        self.scale = of_cohere / of_granite

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        return ChunkedLogProbs.apply(hidden, self.weight, targets, temperature / self.scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the fp32 logits (n, V) of hidden states (n, D)."""
        logits = logits_fp32(hidden, self.weight)
        if self.scale != 1:
            logits *= self.scale
        return logits


class ChunkedLogProbs(torch.autograd.Function):
    """Computes log-probs and entropies in fp32 from hidden states, with a linear output layer. The logits
    (n, V) of all rows would need too much memory, so the rows are computed in chunks, one after another.

    Inputs: hidden (n, D), weight (V, D), targets (n,), temperature. Outputs: log-probs (n,) and entropies
    (n,)."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        logp, entropy, lse = hidden.new_empty(3, len(targets), dtype=torch.float32)
        scale = 1 / temperature
        z = None  # logits of a chunk
        for c in chunks(hidden, weight):  # c: a slice of the rows
            del z  # frees its memory before the next chunk needs memory
            z = logits_fp32(hidden[c], weight)
            logp[c], entropy[c], lse[c] = log_probs(z, targets[c], scale)
        ctx.save_for_backward(hidden, weight, targets, entropy, lse)
        ctx.scale = scale
        ctx.last = z  # backward begins with this last chunk
        return logp, entropy

    @staticmethod
    def backward(ctx, g_logp, g_entropy):
        hidden, weight, targets, entropy, lse = ctx.saved_tensors
        rows = targets, lse, entropy, g_logp, g_entropy  # the last arguments of logits_grad
        g_hidden = torch.empty_like(hidden)
        g_weight = None  # for a frozen output layer (--lora)
        if ctx.needs_input_grad[1]:  # of `weight`
            g_weight = torch.zeros_like(weight, dtype=torch.float32)
        # The last chunk comes first, because `forward` has kept its logits in ctx.last.
        for c in reversed(chunks(hidden, weight)):
            z = ctx.last
            ctx.last = None
            if z is None:
                z = logits_fp32(hidden[c], weight)
            of_chunk = [x[c] for x in rows]
            # (rows of the chunk, V): gradient of the logits
            g = logits_grad(z, ctx.scale, weight.dtype, *of_chunk)
            del z
            g_hidden[c] = g @ weight
            if g_weight is not None:
                add_product(g_weight, g.t(), hidden[c])
            del g
        return g_hidden, g_weight, None, None  # torch casts the fp32 gradient to the weight's dtype


def log_probs(
    z: Tensor,
    targets: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors (n,) in nats: the log-probs of the targets (n,), the entropies, and the
    logsumexps of z * scale. z (n, V): fp32 logits. scale: 1 / temperature"""
    if z.is_cuda:
        return gpu_kernels.log_probs(z, targets, scale)
    log_p = (z * scale).log_softmax(-1)
    at_target = targets[:, None]  # indices for gather
    logp = log_p.gather(1, at_target)[:, 0]
    lse = z.gather(1, at_target)[:, 0] * scale - logp
    entropy = -log_p.exp().mul_(log_p).sum(-1)
    return logp, entropy, lse


def logits_grad(
    z: Tensor,
    scale: float,
    dtype: torch.dtype,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    g_logp: Tensor,
    g_entropy: Tensor,
) -> Tensor:
    """Returns the gradient (n, V), in `dtype`, of the fp32 logits z (n, V).

    targets, lse, entropy (n,): see `log_probs`. g_logp, g_entropy (n,): gradients of log-probs and
    entropies."""
    if z.is_cuda:
        return gpu_kernels.logits_grad(z, scale, dtype, targets, lse, entropy, g_logp, g_entropy)
    # p: softmax(z * scale), y: target, H: entropy.
    # d log p_y / d(z * scale) = onehot(y) - p;  dH / d(z * scale) = -p (log p + H)
    # Hence g below, which is minus the gradient of z * scale:
    # g = p (g_logp + g_entropy (log p + H)) - onehot(y) g_logp
    log_p = torch.add(-lse[:, None], z, alpha=scale)
    g = log_p.exp()
    factor = g_logp[:, None]
    if g_entropy.any():  # false without --entropy_coef: saves four passes over the logits
        log_p.add_(entropy[:, None])
        log_p.mul_(g_entropy[:, None])
        factor = log_p.add_(factor)
    g *= factor
    g.scatter_add_(1, targets[:, None], -g_logp[:, None])
    return g.mul_(-scale).to(dtype)


def chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Returns slices that divide the rows of hidden (n, D) into chunks. The fp32 logits of a chunk need at
    most CHUNK_BYTES. weight (V, D): weight of the output layer"""
    limit = CHUNK_BYTES[hidden.device.type]
    size = max(1, limit // (4 * len(weight)))
    return [slice(i, i + size) for i in range(0, len(hidden), size)]


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds the matrix product of a and b to the fp32 tensor `total`. Products are summed in fp32."""
    if total.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def logits_fp32(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns fp32 logits (c, V) of hidden states (c, D). weight (V, D): weight of the output layer. Products
    are summed in fp32."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.t().float()
