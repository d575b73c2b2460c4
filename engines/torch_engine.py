"""An engine in plain PyTorch with a static KV cache, for laptops and tests.

At most `max_num_seqs` responses are decoded at once, in a batch called a wave. Responses to the same prompt
share a row of the KV cache as long as their tokens are equal. Example: responses 1 and 2 to the prompt `p q`,
and response 3 to the prompt `r`:

    step   sampled tokens       rows of the cache (| separates rows)   row of each response (`where`)
    0      -                    p q | r                                1: 0   2: 0   3: 1
    1      1: a   2: a  3: x    p q a | r x                            1: 0   2: 0   3: 1
    2      1: b   2: c  3: y    p q a b | r x y | p q a c              1: 0   2: 2   3: 1
    3      1: EOS 2: d  3: z    p q a c d | r x y z                    1 ended   2: 0   3: 1

Prompts are padded on the left, so each decoding step writes the same column in all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import Engine, first_stop, may_stop
from model import Policy, Segments, rms_norm


class Cache:
    """The KV cache. Each layer has one tensor (2, capacity, Hkv, columns, d), with the keys at index 0 and
    the values at index 1, for Hkv heads of size d. Each of the `capacity` rows holds a prompt and its
    response, one token a column."""

    def __init__(self, config: Any, capacity: int, lengths: Tensor, steps: int, like: Tensor) -> None:
        """Allocate a cache without keys and values.

        capacity: number of rows, enough for every response to have its own
        lengths (R,): number of tokens of each distinct prompt
        steps: largest number of tokens of a response
        like: a tensor with the dtype and device of the cache"""
        self.rows, self.width = len(lengths), int(lengths.max())
        self.column = self.width  # the column that the next decoding step writes
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = 2, capacity, config.num_key_value_heads, self.width + steps, head
        # zeros: unwritten memory may be NaN, and attention computes 0 × NaN = NaN for a masked column
        self.layers = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        padding = lengths.new_zeros(capacity)
        padding[:self.rows] = self.width - lengths
        column = torch.arange(self.width + steps, device=like.device)
        # (capacity, 1, 1, columns) bool, false at padding
        self.allowed = (column >= padding[:, None])[:, None, None]
        # In a prefill of T tokens: the tokens' rows (T,) and columns (T,) in the cache. Otherwise None.
        self.prefill = None

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store new keys and values: (1, Hkv, T, d) in a prefill of T tokens, (R, Hkv, 1, d) in a decoding
        step of R rows."""
        for cached, new in zip(self.layers[layer], (key, value), strict=True):
            if self.prefill is None:
                cached[:self.rows].select(2, self.column).copy_(new[:, :, 0])
            else:
                row, column = self.prefill
                cached[row, :, column] = new[0].transpose(0, 1)

    def read(self, layer: int, window: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns keys, values and a mask that is false at padding, for the last `window` columns (None: for
        all columns)."""
        end = self.column + 1
        start = max(0, end - window) if window else 0
        key, value = self.layers[layer][:, :self.rows, :, start:end]
        return key, value, self.allowed[:self.rows, ..., start:end]

    def compact(self, parents: Tensor) -> Tensor:
        """Drop the rows of ended responses. Copy a row that responses share, once their tokens differ.

        parents (n,): numbers of the rows to keep, sorted. A number that is given k times makes k equal rows.
        Returns the new row numbers (n,), in the order of `parents`. To save time, few rows change place."""
        n = self.rows = len(parents)
        stays = parents < n
        stays[1:] &= parents[1:] != parents[:-1]  # of equal rows, only the first stays in its place
        is_free = torch.ones_like(stays)
        is_free[parents[stays]] = False
        source, target = parents[~stays], is_free.nonzero()[:, 0]
        if len(target):
            for cached in self.layers:
                cached[:, target, :, :self.column + 1] = cached[:, source, :, :self.column + 1]
            self.allowed[target] = self.allowed[source]
        return parents.masked_scatter(~stays, target)


LLAMA_LIKE = ("llama", "qwen2")  # model types that FusedDecoder can compute itself


class FusedDecoder:
    """Computes a decoding step. For the model types LLAMA_LIKE, it needs fewer operations than Policy.hidden,
    and so less time on a CPU. For other model types, it calls Policy.hidden."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.fused = policy.config.model_type in LLAMA_LIKE

    def prepare(self, positions: int) -> None:
        """Join weight matrices of the current weights (see `fuse`), and compute the rotary embedding of the
        first `positions` positions."""
        if not self.fused:
            return
        model, like = self.policy.model, self.policy.lm_head.weight
        self.layers = [(layer, fuse(layer.self_attn, "q_proj", "k_proj", "v_proj"),
                        fuse(layer.mlp, "gate_proj", "up_proj")) for layer in model.layers]
        cos, sin = model.rotary_emb(like, torch.arange(positions, device=like.device)[None])
        first, second = sin[0, :, None].chunk(2, -1)
        self.cos, self.sin = cos[0, :, None], torch.cat([-first, second], -1)  # (positions, 1, d)

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Runs the model on one new token in each row of the cache. Returns the hidden states (R, D) after
        the last norm. tokens, positions: (R,)."""
        if not self.fused:
            return self.policy.hidden(tokens[:, None], positions[:, None], cache=cache)[:, 0]
        x = F.embedding(tokens, self.policy.model.embed_tokens.weight)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        for i, (layer, qkv, gate_up) in enumerate(self.layers):
            heads = F.linear(rms_norm(layer.input_layernorm, x), *qkv)
            x = x + self._attention(layer.self_attn, heads, cos, sin, cache, i)
            gate, up = F.linear(rms_norm(layer.post_attention_layernorm, x), *gate_up).chunk(2, -1)
            x = x + layer.mlp.down_proj(layer.mlp.act_fn(gate) * up)
        return rms_norm(self.policy.model.norm, x)

    def _attention(self, attention, heads, cos, sin, cache, i):
        """Returns the output (R, D) of the attention of layer i, for the next token of each of R responses.

        heads (R, (H + 2 Hkv) d): query heads, key heads and value heads, concatenated"""
        rows, d, kv = len(heads), attention.head_dim, self.policy.config.num_key_value_heads
        heads = heads.view(rows, -1, d)
        qk, value = heads[:, :-kv], heads[:, -kv:]
        qk = torch.addcmul(qk * cos, qk.roll(d // 2, -1), sin)
        cache.write(i, qk[:, -kv:, None], value[:, :, None])
        key, value, allowed = cache.read(i)
        # With one query a row, matrix products are faster on a CPU than scaled_dot_product_attention.
        query = (qk[:, :-kv] * attention.scaling).view(rows, kv, -1, d)
        scores = query @ key.transpose(2, 3)  # (R, Hkv, H / Hkv, positions in the cache)
        scores.masked_fill_(~allowed, -torch.inf)
        out = scores.softmax(-1, torch.float32).to(value.dtype) @ value
        return attention.o_proj(out.view(rows, -1))


def fuse(module: nn.Module, *names: str) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias of one linear layer. Its output is the concatenated outputs of the layers
    `names` of `module`. The bias is None if these layers have no bias."""
    linears = [getattr(module, name) for name in names]
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return torch.cat([linear.weight for linear in linears]), bias


class TorchEngine(Engine):
    def __init__(self, path, tokenizer, cfg, device="cpu", dtype=torch.float32):
        super().__init__(path, tokenizer, cfg, device, dtype)
        self.policy.to(dtype).requires_grad_(False)
        self.policy.allocate(device)
        self.decoder = FusedDecoder(self.policy)
        self.eos_tensor = self._tensor(sorted(self.eos))
        self.may_stop = self._tensor(may_stop(tokenizer, self.config.vocab_size, cfg.stop))
        self.ledger.end()

    def load(self, weights):
        parameters = dict(self.policy.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                parameters[name].copy_(tensor)
        self.ledger.mark("sync")

    @torch.inference_mode()
    def generate(self, requests, limits, temperature, key, version, top_p=1.0):
        self.check(version)
        longest_first = sorted(requests, key=lambda k: (-len(requests[k]), k))
        for start in range(0, len(longest_first), self.cfg.max_num_seqs):
            wave = longest_first[start:start + self.cfg.max_num_seqs]
            yield from self._wave(wave, requests, limits, temperature, key, top_p)

    def _wave(self, wave, requests, limits, temperature, key, top_p):
        """Decodes the responses to requests[k], for k in `wave`, as one batch. Yields each response as a
        Sample when it has ended."""
        limit = self._tensor([limits[k] for k in wave])
        steps = int(limit.max())
        draws = self._tensor(np.stack([uniforms((*key, *k), steps) for k in wave]))
        lengths = self._tensor([len(requests[k]) for k in wave])
        self.decoder.prepare(int(lengths.max()) + steps)
        cache, where, hidden = self._prefill([tuple(requests[k]) for k in wave], steps)
        ids = torch.zeros(len(wave), steps, dtype=torch.int32, device=self.device)
        logp = torch.zeros(len(wave), steps, device=self.device)
        for t in range(steps):
            logits = self.policy.lm_head.logits(hidden)
            token, ids_logp = sample_token(logits[where], draws[:, t], temperature, top_p)
            ids[:, t], logp[:, t] = token, ids_logp
            stopped = self._stopped(token, ids, t)
            ended = stopped | (limit == t + 1)
            done = ended.nonzero()[:, 0].tolist()
            if done:
                columns = (x[done].cpu().numpy() for x in (ids[:, :t + 1], logp[:, :t + 1], stopped))
                for j, *sampled in zip(done, *columns, strict=True):
                    yield self.sample(wave[j], requests[wave[j]], *sampled)
                running = (~ended).nonzero()[:, 0]
                if len(running) == 0:
                    return
                wave = [wave[j] for j in running.tolist()]
                where, token, ids, logp, draws, limit, lengths = (
                    x[running] for x in (where, token, ids, logp, draws, limit, lengths))
            if done or cache.rows < len(where):
                # Responses share a row if they shared a row before and sampled the same token.
                prefix, of_response = (where * self.config.vocab_size + token).unique(return_inverse=True)
                where = cache.compact(prefix // self.config.vocab_size)[of_response]
            cache.column = cache.width + t
            of_row = (x.new_empty(cache.rows).index_copy(0, where, x) for x in (token, lengths + t))
            hidden = self.decoder.step(*of_row, cache)

    def _prefill(self, prompts, steps):
        """Runs the model on B `prompts` (tuples of tokens), of which R are distinct. Returns the cache with
        a row for each distinct prompt, the row number of each prompt (B,), and the hidden state of the last
        token in each row (R, D)."""
        row_of = {p: row for row, p in enumerate(dict.fromkeys(prompts))}
        distinct, last = list(row_of), []
        lengths = self._tensor([len(p) for p in distinct])
        cache = Cache(self.config, len(prompts), lengths, steps, self.policy.lm_head.weight)
        rows = torch.arange(len(distinct), device=self.device)
        for some in rows.split(max(1, self.cfg.pack_len // cache.width)):  # the rows of one forward pass
            length = lengths[some]
            tokens = self._tensor([i for row in some.tolist() for i in distinct[row]])
            ends = length.cumsum(0)
            position = torch.arange(len(tokens), device=self.device)
            position -= (ends - length).repeat_interleave(length)
            # The cache is padded on the left, so that all prompts end at the same column.
            column = position + (cache.width - length).repeat_interleave(length)
            cache.prefill = some.repeat_interleave(length), column  # where the cache stores these tokens
            segments = Segments(F.pad(ends, (1, 0)).int(), int(length.max()))
            hidden = self.policy.hidden(tokens[None], position[None], segments=segments, cache=cache)[0]
            last.append(hidden[ends - 1])
        cache.prefill = None
        return cache, self._tensor([row_of[p] for p in prompts]), torch.cat(last)

    def _stopped(self, token, ids, t):
        """Returns (B,) bool: true for a response that ends at step t, by EOS or a stop string. Decoding to
        text is slow, so a stop string is looked for only after a token that may complete one (`may_stop`).

        token (B,): the tokens of step t. ids (B, steps): the tokens of steps 0 to t"""
        stopped = torch.isin(token, self.eos_tensor)
        if self.cfg.stop:
            for j in (self.may_stop[token] & ~stopped).nonzero()[:, 0].tolist():
                stopped[j] = first_stop(ids[j, :t], ids[j, t:t + 1], self.cfg.stop, self.tokenizer) > 0
        return stopped

    def _tensor(self, values):
        return torch.tensor(values, device=self.device)


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Returns the logits (B, V), with -inf outside the nucleus (arXiv 1904.09751): the fewest tokens whose
    probabilities sum to `top_p` or more."""
    if top_p == 1:
        return logits
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1, torch.float64)
    outside = probs.cumsum(-1) - probs >= top_p
    return logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)


def sample_token(logits: Tensor, u: Tensor, temperature: float,
                 top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns tokens (B,), drawn from the nucleus of logits (B, V) / temperature, and their log-probs (B,) in
    nats. With temperature 0, the tokens are those with the highest logits.

    u (B,): uniform random numbers in [0, 1)."""
    if temperature == 0:
        logp = logits.log_softmax(-1)
        token = logp.argmax(-1)
    else:
        logp = nucleus(logits / temperature, top_p).log_softmax(-1)
        cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
        token = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
        token = token.clamp(max=logits.shape[1] - 1)  # a rounding error could give the index V
    return token, logp.gather(1, token[:, None])[:, 0]


def uniforms(key: tuple[int, ...], count: int) -> np.ndarray:
    """Returns `count` uniform random numbers in [0, 1). A larger count gives the same numbers, then more."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)
