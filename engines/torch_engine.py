"""An engine in plain PyTorch with a static KV cache, for laptops and tests. It needs no vLLM.

Responses are decoded in waves of at most `max_num_seqs`, longest prompts first. A row of the batch is a
*prefix*, and responses that are equal so far share a row. All samples of a prompt start in one row; they part
where their tokens differ. Rows of finished responses are dropped. With two samples of prompt `p q` and one of
`r`:

    step   responses          rows (prefixes)      where (row of each response)
    0      1: -  2: -  3: -   p q | r              0 0 1
    1      1: a  2: a  3: x   p q a | r x          0 0 1
    2      1: b  2: c  3: y   p q a b | r x y | p q a c        0 2 1
    3      1: .  2: d  3: z   p q a c d | r x y z  (1 ended)   0 1     (2 and 3 are left)

Prompts are padded on the left so that they end in one column. So at each step all rows write the same column:

    column      0 1 2 3 4 5
    prompt A    p q r s a b      the dots are padding, which `allowed` masks
    prompt B    . . t u x y
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import Engine, first_stop
from model import Policy, Segments, has_window, rms_norm


class Cache:
    """Keys and values of up to `capacity` rows: for each layer (2, capacity, Hkv, columns, d)."""

    def __init__(self, config: Any, capacity: int, lengths: Tensor, steps: int, like: Tensor) -> None:
        """Allocate memory. lengths (R,): tokens of the prompts in the first R rows. steps: tokens that are
        sampled after a prompt. like: a tensor with the cache's dtype and device."""
        self.rows, self.width = len(lengths), int(lengths.max())
        self.column = self.width  # where a decoding step writes
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = 2, capacity, config.num_key_value_heads, self.width + steps, head
        # Zeros, because new memory may contain NaN. A masked value is multiplied by 0, and 0 x NaN is NaN.
        self.layers = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.allowed = None  # (capacity, 1, 1, columns); None: all prompts are equally long
        if int(lengths.min()) < self.width:
            padding = lengths.new_zeros(capacity)
            padding[:self.rows] = self.width - lengths
            column = torch.arange(self.width + steps, device=like.device)
            self.allowed = (column >= padding[:, None])[:, None, None]
        self.prefill = None  # in a prefill: (row, column) of each token of the pack

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values: (1, Hkv, T, d) in a prefill, (R, Hkv, 1, d) in a decoding step."""
        for cached, new in zip(self.layers[layer], (key, value), strict=True):
            if self.prefill is None:
                cached[:self.rows].select(2, self.column).copy_(new[:, :, 0])
            else:
                row, column = self.prefill
                cached[row, :, column] = new[0].transpose(0, 1)

    def read(self, layer: int, window: int | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns 1. the keys and 2. the values up to the current column, and 3. the mask of the columns that
        each row may see, or None for all. window: number of last columns to return; None: all columns."""
        end = self.column + 1
        start = max(0, end - window) if window else 0
        key, value = self.layers[layer][:, :self.rows, :, start:end]
        return key, value, None if self.allowed is None else self.allowed[:self.rows, ..., start:end]

    def compact(self, parents: Tensor) -> Tensor:
        """Compact the cache to the sorted rows `parents` (n,), which may repeat. Returns their new indices
        (n,), all below n. A row moves only if its index is n or more; a repeated row is copied."""
        n = self.rows = len(parents)
        stays = parents < n
        stays[1:] &= parents[1:] != parents[:-1]  # only the first of equal parents
        is_free = torch.ones_like(stays)
        is_free[parents[stays]] = False
        source, target = parents[~stays], is_free.nonzero()[:, 0]
        if len(target):
            for cached in self.layers:
                cached[:, target, :, :self.column + 1] = cached[:, source, :, :self.column + 1]
            if self.allowed is not None:
                self.allowed[target] = self.allowed[source]
        return parents.masked_scatter(~stays, target)


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # model types whose layers FusedDecoder knows


class FusedDecoder:
    """Computes a decoding step with fewer operations than the model's modules: one matrix product for query,
    key and value, one for gate and up, and no batch dimension. This helps because a small model on a CPU
    spends half of its time between operations.

    Models of other types than LLAMA_LIKE, and models with sliding windows, run through their own modules."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.layers = policy, []
        self.fused = policy.config.model_type in LLAMA_LIKE and not has_window(policy.config)

    def prepare(self, positions: int) -> None:
        """Prepare for a wave of responses: concatenate the loaded weights, and compute the rotary tables for
        positions 0 to `positions` - 1."""
        if not self.fused:
            return
        model, like = self.policy.model, self.policy.lm_head.weight
        self.layers = [(layer, fuse(layer.self_attn, "q_proj", "k_proj", "v_proj"),
                        fuse(layer.mlp, "gate_proj", "up_proj")) for layer in model.layers]
        cos, sin = model.rotary_emb(like, torch.arange(positions, device=like.device)[None])
        first, second = sin[0, :, None].chunk(2, -1)
        self.cos, self.sin = cos[0, :, None], torch.cat([-first, second], -1)  # (positions, 1, d)

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Returns the last hidden states (R, D) of tokens (R,) at positions (R,). Writes keys and values to
        column `cache.column`."""
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
        """Returns the output (R, D) of attention in layer i. heads: queries, keys and values side by side."""
        rows, d, kv = len(heads), attention.head_dim, self.policy.config.num_key_value_heads
        heads = heads.view(rows, -1, d)
        qk, value = heads[:, :-kv], heads[:, -kv:]
        if hasattr(attention, "q_norm"):
            query, key = rms_norm(attention.q_norm, qk[:, :-kv]), rms_norm(attention.k_norm, qk[:, -kv:])
            qk = torch.cat([query, key], 1)
        qk = torch.addcmul(qk * cos, qk.roll(d // 2, -1), sin)
        cache.write(i, qk[:, -kv:, None], value[:, :, None])
        key, value, allowed = cache.read(i)
        # For one query a row, batched products are faster on a CPU than scaled_dot_product_attention.
        query = (qk[:, :-kv] * attention.scaling).view(rows, kv, -1, d)
        scores = query @ key.transpose(2, 3)  # (R, Hkv, H / Hkv, columns)
        if allowed is not None:
            scores.masked_fill_(~allowed, -torch.inf)
        out = scores.softmax(-1, torch.float32).to(value.dtype) @ value
        return attention.o_proj(out.view(rows, -1))


def fuse(module: nn.Module, *names: str) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias of one linear layer that replaces the linear layers `names` of `module`. Its
    output is their outputs side by side."""
    linears = [getattr(module, name) for name in names]
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return torch.cat([linear.weight for linear in linears]), bias


class TorchEngine(Engine):
    """Batched decoding with a static cache; see the top of this file."""

    def __init__(self, path, tokenizer, cfg, device="cpu", dtype=torch.float32):
        super().__init__(path, tokenizer, cfg, device, dtype)
        self.policy.to(dtype).requires_grad_(False).eval()
        self.policy.allocate(device)
        self.decoder = FusedDecoder(self.policy)
        self.eos_tensor = self._tensor(sorted(self.eos))
        self.may_stop = self._tensor(_may_stop(tokenizer, self.config.vocab_size, cfg.stop))
        self.ledger.end()

    def load(self, weights):
        parameters = dict(self.policy.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                parameters[name].copy_(tensor)
        self.ledger.mark("sync")

    @torch.inference_mode()
    def generate(self, requests, limits, temperature, key, version):
        self.check(version)
        longest_first = sorted(requests, key=lambda k: (-len(requests[k]), k))
        for start in range(0, len(longest_first), self.cfg.max_num_seqs):
            wave = longest_first[start:start + self.cfg.max_num_seqs]
            yield from self._wave(wave, requests, limits, temperature, key)

    def _wave(self, wave, requests, limits, temperature, key):
        """Decodes the requests `wave` (keys) together. Yields each response when it ends. In the code, B is
        the number of responses that have not ended, and `where` (B,) is the cache row of each of them."""
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
            token, ids_logp = sample_token(logits[where], draws[:, t], temperature)
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
            if done or cache.rows < len(where):  # the rows change
                # Responses that share a row and took the same token keep sharing a row. Each other token
                # starts a new row.
                prefix, of_response = (where * self.config.vocab_size + token).unique(return_inverse=True)
                where = cache.compact(prefix // self.config.vocab_size)[of_response]
            cache.column = cache.width + t  # the column of the tokens that were just sampled
            of_row = (x.new_empty(cache.rows).index_copy(0, where, x) for x in (token, lengths + t))
            hidden = self.decoder.step(*of_row, cache)

    def _prefill(self, prompts, steps):
        """Runs the model on `prompts` (tuples of tokens), in packs of about pack_len tokens. Equal prompts
        share a row of the cache. Returns:

        1. the cache, with R rows, one for each distinct prompt;
        2. the row of each prompt (B,);
        3. the hidden state of the last token of each row (R, D)."""
        row_of = {p: row for row, p in enumerate(dict.fromkeys(prompts))}
        distinct, last = list(row_of), []
        lengths = self._tensor([len(p) for p in distinct])
        cache = Cache(self.config, len(prompts), lengths, steps, self.policy.lm_head.weight)
        rows = torch.arange(len(distinct), device=self.device)
        for row in rows.split(max(1, self.cfg.pack_len // cache.width)):
            length = lengths[row]
            tokens = self._tensor([i for r in row.tolist() for i in distinct[r]])
            ends = length.cumsum(0)
            position = torch.arange(len(tokens), device=self.device)
            position = position - (ends - length).repeat_interleave(length)
            column = position + (cache.width - length).repeat_interleave(length)
            cache.prefill = row.repeat_interleave(length), column
            segments = Segments(F.pad(ends, (1, 0)).int(), int(length.max()))
            hidden = self.policy.hidden(tokens[None], position[None], segments=segments, cache=cache)[0]
            last.append(hidden[ends - 1])
        cache.prefill = None
        return cache, self._tensor([row_of[p] for p in prompts]), torch.cat(last)

    def _stopped(self, token, ids, t):
        """Returns (B,): whether `token` is an end token or completes a stop string. Text is decoded only
        where the token could complete a stop string."""
        stopped = torch.isin(token, self.eos_tensor)
        if self.cfg.stop:
            for j in (self.may_stop[token] & ~stopped).nonzero()[:, 0].tolist():
                stopped[j] = first_stop(ids[j, :t], ids[j, t:t + 1], self.cfg.stop, self.tokenizer) > 0
        return stopped

    def _tensor(self, values):
        return torch.tensor(values, device=self.device)


def sample_token(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns 1. tokens (B,) drawn from softmax(logits / temperature) and 2. their log-probs (B,) in nats. A
    token is the point where the cumulative distribution reaches the uniform number u (B,). Temperature 0
    takes the likeliest token."""
    if temperature == 0:
        logp = logits.log_softmax(-1)
        token = logp.argmax(-1)
    else:
        logp = (logits / temperature).log_softmax(-1)
        cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
        token = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
        token = token.clamp(max=logits.shape[1] - 1)
    return token, logp.gather(1, token[:, None])[:, 0]


def uniforms(key: tuple[int, ...], count: int) -> np.ndarray:
    """Returns (count,) uniform numbers in [0, 1), a function of the key. With a larger count the first
    numbers stay the same."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)


def _may_stop(tokenizer, vocabulary, stop):
    """Returns for each token of the vocabulary whether a stop string can end inside the token's text."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    texts += [""] * (vocabulary - len(tokenizer))
    tails = tuple(s[i:] for s in stop for i in range(len(s)))
    if not all(s.isascii() for s in stop):  # a token with part of a character is decoded as this one
        tails += ("\N{REPLACEMENT CHARACTER}",)
    return [any(s in text for s in stop) or text.startswith(tails) for text in texts[:vocabulary]]
