"""An engine in plain PyTorch. On a GPU, a decoding step is one CUDA graph and costs the host almost nothing.

A slot is a place in the batch and decodes one response. The cache holds keys and values in pages. Example:
pages of 4 tokens, two responses to the prompt `p q r s t u`, and one response to the prompt `v w`:

    slot   sampled tokens   next input   its position   pages          page   tokens of the keys and values
    0      a b              b            7              1 2            0      scratch: for empty slots
    1      c d              d            7              1 3            1      p q r s      full, shared
    2      e f g            g            4              4 5            2      t u a .
                                                                       3      t u c .
                                                                       4      v w e f
                                                                       5      . . . .

A decoding step reads the next input of each slot, stores its keys and values, and samples a token. The first
input is the last token of the prompt. The host looks at the sampled tokens only after every LOOK steps: it
ends responses, cuts what was sampled past their ends, and gives their slots and pages to waiting requests.
When few slots are left, a smaller graph is used.

On a CPU, or in fp32, a page is a whole row, and slots whose tokens are equal share a row (see Rows). Then the
host looks after every step."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import configs
from engine import Engine, Key
from engines import vllm_engine
from model import Policy, Segments, rms_norm

LOOK = 8  # decoding steps between two looks of the host


@dataclass(eq=False)
class Response:
    """A request, and the response sampled so far."""

    key: Key
    prompt: tuple[int, ...]
    limit: int  # largest number of tokens to sample
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    stopped: bool = False  # true if EOS or a stop string ended the response
    pages: list[int] = field(default_factory=list)  # the pages with its keys and values

    @property
    def read(self) -> int:
        """Number of tokens of the prompt that the prefill reads. A decoding step reads the last token."""
        return len(self.prompt) - 1


# --- the cache


class Cache:
    """Keys and values. Each layer has one tensor (2, pages, Hkv, tokens of a page, d), with the keys at index
    0 and the values at index 1, for Hkv heads of size d."""

    def __init__(
        self, config: Any, pages: int, size: int, slots: int, width: int, like: Tensor
    ) -> None:
        """Allocate a cache.

        pages: number of pages, of `size` tokens each
        width: largest number of pages of a response
        like: a tensor with the dtype and device of the cache"""
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = 2, pages, config.num_key_value_heads, size, head
        # zeros: unwritten memory may be NaN, and attention computes 0 × NaN = NaN for a masked token
        self.layers = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.size, self.vocabulary = size, config.vocab_size
        # table[j]: the pages of the response in slot j
        self.table = torch.zeros(slots, width, dtype=torch.int32, device=like.device)
        self.longest = width * size  # largest number of tokens of a response
        self.numbers = torch.arange(max(self.longest, slots), device=like.device)
        self.unread: list[Response] = []  # responses whose prompts the next prefill must read

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the keys and values (T, Hkv, d) of T tokens. `self.at` has two tensors (T,): the page of each
        token, and its place in the page."""
        page, place = self.at
        for cached, new in zip(self.layers[layer], (key, value), strict=True):
            cached[page, :, place] = new

    def mask(self, position: Tensor, tokens: int) -> None:
        """Prepare `attend` for a step whose new tokens are at `position` (R,), in rows of `tokens` tokens."""
        self.distance = position[:, None] - self.numbers[:tokens]
        self.masked = (self.distance < 0)[:, None, None]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        """Store the keys and values (R, Hkv, d) of one new token of each of R responses. Returns the
        attention output (R, H, d) for these tokens. query: (R, H, d)."""
        self.write(layer, key, value)
        key, value = self.read(layer)
        masked = self.masked
        if window:
            masked = masked | (self.distance >= window)[:, None, None]
        # With one query a row, matrix products are faster on a CPU than scaled_dot_product_attention.
        query = (query * scaling).unflatten(1, (key.shape[1], -1))
        scores = query @ key.transpose(2, 3)  # (R, Hkv, H / Hkv, tokens)
        scores.masked_fill_(masked, -torch.inf)
        out = scores.softmax(-1, torch.float32).to(value.dtype) @ value
        return out.flatten(1, 2)


class Pages(Cache):
    """A cache whose responses keep their pages from the first step to the last. Responses to one prompt share
    its full pages. Page 0 belongs to empty slots."""

    def __init__(self, *sizes: Any, kernel: Callable | None) -> None:
        """sizes: see Cache. kernel: a function like torch_kernel. None: attention in plain PyTorch, which the
        tests use on a CPU."""
        super().__init__(*sizes)
        self.kernel = kernel
        self.cu_seqlens = torch.arange(
            len(self.table) + 1, dtype=torch.int32, device=self.table.device
        )
        self.clear()

    def clear(self) -> None:
        """Forget all responses."""
        pages = self.layers[0].shape[1]
        self.free = [*range(1, pages)]
        self.uses = [0] * pages  # number of responses that have this page
        self.latest: dict[tuple[int, ...], Response] = {}  # prompt -> its response that came last
        self.copies: dict[int, int] = {}  # page -> the page that is copied to it after the prefill
        self.unread = []

    def admit(self, r: Response) -> bool:
        """Give `r` pages for its prompt and the whole response. Returns False if there are too few."""
        other, full = self.latest.get(r.prompt), r.read // self.size
        shared = other.pages[:full] if other else []
        needed = -(-(r.read + r.limit) // self.size) - len(shared)
        if needed > len(self.free):
            return False
        r.pages = shared + [self.free.pop() for _ in range(needed)]
        for page in r.pages:
            self.uses[page] += 1
        if other:  # the prompt's last tokens are in a page that the other response goes on to fill
            source = other.pages[full]
            self.copies[r.pages[full]] = self.copies.get(source, source)
        else:
            self.unread.append(r)
        self.latest[r.prompt] = r
        return True

    def release(self, r: Response) -> None:
        for page in r.pages:
            self.uses[page] -= 1
            if self.uses[page] == 0:
                self.free.append(page)
        if self.latest.get(r.prompt) is r:
            del self.latest[r.prompt]

    def prefilled(self) -> None:
        """Finish `admit`, after the prefill."""
        if self.copies:
            pairs = np.array([*self.copies.items()])
            target, source = to_device(pairs, self.table.device).T
            for cached in self.layers:
                cached[:, target] = cached[:, source]
        self.copies, self.unread = {}, []

    def begin(self, slots: int, position: Tensor) -> tuple[slice, slice]:
        """Begin a decoding step. Returns the slots that the model computes, and the rows of the slots in its
        output: here all. position (slots,): positions of the new tokens."""
        self.used = (position + 1).int()
        page = self.table[:slots].gather(1, (position // self.size)[:, None])[:, 0]
        self.at = page.long(), position % self.size
        if not self.kernel:
            self.mask(position, self.longest)
        return slice(None), slice(None)

    def attend(self, layer, query, key, value, scaling, window=None):
        if not self.kernel:
            return super().attend(layer, query, key, value, scaling, window)
        self.write(layer, key, value)
        keys, values = self.layers[layer].transpose(2, 3)
        slots = len(query)
        return self.kernel(
            query,
            keys,
            values,
            self.cu_seqlens[: slots + 1],
            self.longest,
            scaling,
            window,
            seqused_k=self.used,
            block_table=self.table[:slots],
        )

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values (slots, Hkv, tokens, d) of the responses in all slots of the step."""
        pages = self.layers[layer][
            :, self.table[: len(self.used)]
        ]  # (2, slots, width, Hkv, size, d)
        return pages.transpose(2, 3).flatten(3, 4)

    def split(self, token: Tensor, ended: bool) -> None:
        """Does nothing: a response writes only to pages of its own."""


class Rows(Cache):
    """A cache whose pages are rows: one holds a whole response. Slots share a row as long as their tokens are
    equal, and the model computes it once. Example: slots 0 and 1 have the prompt `p q`, slot 2 has `r`:

        step   sampled tokens       rows of the cache (| separates rows)   rows of the slots (`table`)
        0      -                    p q | r                                0 0 1
        1      0: a   1: a   2: x   p q a | r x                            0 0 1
        2      0: b   1: c   2: y   p q a b | r x y | p q a c              0 2 1
        3      0: EOS 1: d   2: z   p q a c d | r x y z                    0 1     (one slot is gone)"""

    def __init__(self, *sizes: Any) -> None:
        """sizes: see Cache"""
        super().__init__(*sizes)
        self.table = self.table.long()
        self.clear()

    def clear(self) -> None:
        """Forget all responses."""
        self.rows, self.unread = 0, []

    def admit(self, r: Response) -> bool:
        """Give `r` a row: the row of its prompt, if another response that is still unread has it."""
        same = [other for other in self.unread if other.prompt == r.prompt]
        if same:
            r.pages = same[0].pages
        else:
            r.pages = [self.rows]
            self.rows += 1
            self.unread.append(r)
        return True

    def release(self, r: Response) -> None:
        """Does nothing: `split` drops a row that no slot has."""

    def prefilled(self) -> None:
        """Finish `admit`, after the prefill."""
        self.unread = []

    def begin(self, slots: int, position: Tensor) -> tuple[Tensor, Tensor]:
        """Begin a decoding step. Returns the slot that the model computes for each row, and the row of each
        slot. position (slots,): positions of the new tokens."""
        row = self.table[:slots, 0]
        slot = row.new_empty(self.rows).index_copy_(0, row, self.numbers[:slots])
        position = position[slot]
        self.end = int(position.max()) + 1
        self.at = self.numbers[: self.rows], position
        self.mask(position, self.end)
        return slot, row

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values (rows, Hkv, tokens, d)."""
        return self.layers[layer][:, : self.rows, :, : self.end]

    def split(self, token: Tensor, ended: bool) -> None:
        """Give slots with one row and different tokens rows of their own. Drop the rows that no slot has.

        token (slots,): the last sampled tokens. ended: whether responses have ended"""
        slots = len(token)
        if ended or self.rows < slots:
            row = self.table[:slots, 0]
            pair, of_slot = (row * self.vocabulary + token).unique(return_inverse=True)
            self.table[:slots, 0] = self._compact(pair // self.vocabulary)[of_slot]

    def _compact(self, parents):
        """Keep the rows `parents` (n,), which is sorted. A number that comes k times makes k equal rows.
        Returns the new row numbers (n,), in the order of `parents`. To save time, few rows change place."""
        n = self.rows = len(parents)
        stays = parents < n
        stays[1:] &= parents[1:] != parents[:-1]  # of equal rows, only the first stays in its place
        is_free = torch.ones_like(stays)
        is_free[parents[stays]] = False
        source, target = parents[~stays], is_free.nonzero()[:, 0]
        if len(target):
            for cached in self.layers:
                cached[:, target, :, : self.end] = cached[:, source, :, : self.end]
        return parents.masked_scatter(~stays, target)


# --- attention over pages


def paged_kernel() -> Callable:
    """Returns a function that computes attention over pages on a GPU: torch's, or vLLM's if torch has none.
    Raises UserError if there is neither."""
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" in inspect.signature(varlen_attn).parameters:
        return torch_kernel
    return vllm_engine.paged_kernel()


def torch_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scaling: float,
    window: int | None,
    **pages: Tensor,
) -> Tensor:
    """Returns the attention output (n, H, d) for one token of each of n responses. query: (n, H, d).

    keys, values: (pages, size, Hkv, d)
    cu_seqlens (n + 1,): 0 to n. longest: largest number of tokens of a response
    window: number of tokens that a token attends to, itself included; None: no limit
    pages: seqused_k (n,): tokens of each response. block_table (n, width): pages of each response"""
    from torch.nn.attention.varlen import varlen_attn

    # The last token attends to all tokens. Only without any limit does the kernel read keys and values once
    # for all query heads that share them.
    limits = (window - 1, 0) if window else (-1, -1)
    return varlen_attn(
        query,
        keys,
        values,
        cu_seqlens,
        cu_seqlens,
        1,
        longest,
        scale=scaling,
        window_size=limits,
        enable_gqa=True,
        **pages,
    )


# --- the model


LLAMA_LIKE = ("llama", "qwen2")  # model types that FusedDecoder can compute itself


class FusedDecoder:
    """Computes a decoding step. For the model types LLAMA_LIKE, it needs fewer operations than Policy.hidden,
    and so less time. For other model types, it calls Policy.hidden."""

    def __init__(self, policy: Policy) -> None:
        """Changes the storage of the weights, see `join`."""
        self.policy = policy
        self.fused = policy.config.model_type in LLAMA_LIKE
        if self.fused:
            self.layers = [
                (
                    layer,
                    join(layer.self_attn, "q_proj", "k_proj", "v_proj"),
                    join(layer.mlp, "gate_proj", "up_proj"),
                )
                for layer in policy.model.layers
            ]

    def prepare(self, positions: int) -> None:
        """Compute the rotary embedding of the first `positions` positions."""
        if not self.fused:
            return
        model, like = self.policy.model, self.policy.lm_head.weight
        cos, sin = model.rotary_emb(like, torch.arange(positions, device=like.device)[None])
        first, second = sin[0, :, None].chunk(2, -1)
        self.cos, self.sin = cos[0, :, None], torch.cat([-first, second], -1)  # (positions, 1, d)

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Runs the model on one new token of each of R responses. Returns the hidden states (R, D) after the
        last norm. tokens, positions: (R,)."""
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
        """Returns the output (R, D) of the attention of layer i.

        heads (R, (H + 2 Hkv) d): query heads, key heads and value heads, concatenated"""
        d, kv = attention.head_dim, self.policy.config.num_key_value_heads
        heads = heads.unflatten(1, (-1, d))
        qk, value = heads[:, :-kv], heads[:, -kv:]
        qk = torch.addcmul(qk * cos, qk.roll(d // 2, -1), sin)
        out = cache.attend(i, qk[:, :-kv], qk[:, -kv:], value, attention.scaling)
        return attention.o_proj(out.flatten(1))


def join(module: nn.Module, *names: str) -> list[Tensor | None]:
    """Returns weight and bias of one linear layer. Its output is the concatenated outputs of the layers
    `names` of `module`. The bias is None if these layers have no bias. The weights of these layers become
    views of the result, so new weights of a layer are new weights of the result."""
    linears, joined = [getattr(module, name) for name in names], []
    for kind in ("weight", "bias"):
        parts = [getattr(linear, kind) for linear in linears]
        if parts[0] is None:
            joined.append(None)
            continue
        whole = torch.cat(parts)
        for linear, part in zip(linears, whole.split([len(part) for part in parts]), strict=True):
            setattr(linear, kind, nn.Parameter(part, requires_grad=False))
        joined.append(whole)
    return joined


# --- the engine


class Slots:
    """The responses that are decoded, and their state on the device."""

    def __init__(self, cache: Cache, count: int, steps: int, look: int) -> None:
        """count: number of slots. steps: largest number of tokens of a response."""
        self.cache, self.count, self.look = cache, count, look
        self.is_paged = isinstance(cache, Pages)
        self.responses: list[Response] = []  # responses[j] is in slot j
        device = cache.table.device
        # Of each slot: the next input, its position, the position of the first input and of the last
        self.inputs = torch.zeros(count, 4, dtype=torch.int64, device=device)
        self.draws = torch.zeros(count, steps, dtype=torch.float64, device=device)
        # The tokens and the log-probs of the steps since the last look. fp32 holds all numbers below 2^24.
        self.recent = torch.zeros(count, 2, look, device=device)
        self.step = torch.zeros(
            1, dtype=torch.int64, device=device
        )  # number of steps since the last look
        self.graphs: dict[
            tuple, torch.cuda.CUDAGraph
        ] = {}  # (batch, temperature, top_p) -> its step

    def batch(self) -> int:
        """Returns the number of slots of a decoding step. With pages, there are few numbers: 1, 2, 4, ..."""
        n = len(self.responses)
        return min(self.count, 1 << (n - 1).bit_length()) if self.is_paged else n

    def add(self, new: Sequence[Response], key: tuple[int, ...]) -> None:
        """Put responses into the next free slots."""
        places = slice(len(self.responses), len(self.responses) + len(new))
        self.responses += new
        inputs = [(r.prompt[-1], r.read, r.read, r.read + r.limit - 1) for r in new]
        draws = np.zeros((len(new), self.draws.shape[1]))
        table = np.zeros((len(new), self.cache.table.shape[1]), np.int32)
        for j, r in enumerate(new):
            draws[j, : r.limit] = uniforms((*key, *r.key), r.limit)
            table[j, : len(r.pages)] = r.pages
        for x, values in (
            (self.inputs, np.array(inputs)),
            (self.draws, draws),
            (self.cache.table, table),
        ):
            x[places] = to_device(values, x.device)

    def keep(self, kept: Sequence[int]) -> None:
        """Move the responses of the slots `kept` to the first slots. The other slots become empty."""
        self.responses = [self.responses[j] for j in kept]
        index = to_device(np.array(kept, np.int64), self.inputs.device)
        for x in (self.inputs, self.draws, self.cache.table):
            x[: len(kept)] = x[index]
            if self.is_paged:
                x[len(kept) :] = 0
        if self.is_paged:  # `recent` has tokens that the host has not seen
            self.recent[: len(kept)] = self.recent[index]

    def copy(self, slots: int) -> Callable[[], np.ndarray]:
        """Begin to copy the tokens and log-probs of the first slots since the last look to the host.
        Returns a function that waits for the copy and returns it: (slots, 2, steps)."""
        copied = self.recent[:slots].to("cpu", non_blocking=True, copy=True)
        self.step.zero_()
        done = torch.cuda.current_stream().record_event() if self.recent.is_cuda else None

        def read():
            if done:
                done.synchronize()
            return copied.numpy()

        return read


class TorchEngine(Engine):
    def __init__(self, path, tokenizer, cfg, device="cpu", dtype=torch.float32):
        super().__init__(path, tokenizer, cfg, device, dtype)
        self.policy.to(dtype).requires_grad_(False)
        self.policy.allocate(device)
        self.decoder = FusedDecoder(self.policy)
        flash = (
            self.device.type == "cuda" and dtype != torch.float32
        )  # FlashAttention takes bf16 and fp16
        self.kernel = paged_kernel() if flash else None
        self.page = configs.KV_PAGE if flash else 0  # tokens of a page; 0: rows
        self.look = LOOK
        self.slots = None
        self.stream = None
        self.loaded = set()  # the calls of `_step` that have run
        self.ledger.end()

    def load(self, weights):
        parameters = dict(self.policy.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                parameters[name].copy_(tensor)
        self.ledger.mark("sync")

    def unload(self):
        """Free the cache and the graphs."""
        self.slots = None

    @torch.inference_mode()
    def generate(self, requests, limits, temperature, key, version, top_p=1.0):
        self.check(version)
        longest_first = sorted(requests, key=lambda k: (-len(requests[k]), k))
        waiting = deque(Response(k, tuple(requests[k]), limits[k]) for k in longest_first)
        if not waiting:
            return
        # Whether a token may end a response. For most tokens it is false, which saves time.
        self.may_end = self.may_stop.copy()
        self.may_end[sorted(self.eos)] = True
        slots = self._allocate(waiting)
        self._fill(slots, waiting, key)
        seen = 0  # number of slots that have decoded since the last look
        while slots.responses:
            # With pages, the host looks at the steps before the last ones, so the GPU never waits for it.
            read = slots.copy(seen) if slots.is_paged else None
            self._decode(slots, temperature, top_p)
            read = read or slots.copy(len(slots.responses))
            ended = self._look(slots, read())
            seen = len(slots.responses)
            self._fill(slots, waiting, key)
            for r in ended:
                ids, logp = np.array(r.ids, np.int32), np.array(r.logp, np.float32)
                yield self.sample(r.key, requests[r.key], ids, logp, r.stopped)

    def _allocate(self, waiting):
        """Returns the Slots for the requests. With pages, they are allocated once, and keep their graphs
        until the engine sleeps."""
        cfg, like = self.cfg, self.policy.lm_head.weight
        if not self.page:
            count = min(cfg.max_num_seqs, len(waiting))
            steps = max(r.limit for r in waiting)
            longest = max(len(r.prompt) + r.limit for r in waiting)
            self.decoder.prepare(longest)
            return Slots(Rows(self.config, count, longest, count, 1, like), count, steps, 1)
        if self.slots is None:
            width = -(-cfg.engine_len // self.page)
            pages = self._pages(1 + cfg.max_num_seqs * width)
            self.decoder.prepare(width * self.page)
            cache = Pages(
                self.config, pages, self.page, cfg.max_num_seqs, width, like, kernel=self.kernel
            )
            self.slots = Slots(cache, cfg.max_num_seqs, cfg.engine_len, self.look)
        self.slots.responses = []
        self.slots.cache.clear()
        return self.slots

    def _pages(self, wanted):
        """Returns the number of pages: as many as wanted, if --engine_share has room for them."""
        if self.device.type != "cuda":
            return wanted
        c, weight = self.config, self.dtype.itemsize
        head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        page = 2 * c.num_hidden_layers * c.num_key_value_heads * head * self.page * weight
        weights = weight * sum(p.numel() for p in self.policy.parameters())
        sampler = 4 * configs.SAMPLER_COPIES * self.cfg.max_num_seqs * c.vocab_size
        share = self.cfg.engine_share * torch.cuda.mem_get_info(self.device)[1]
        return max(1, min(wanted, int(share - weights - sampler) // page))

    def _fill(self, slots, waiting, key):
        """Move waiting requests to free slots, as far as the cache has room. On a CPU, wait until all slots
        are free, because a prefill costs as much as a decoding step of the whole batch."""
        new, cache = [], slots.cache
        if slots.responses and not slots.is_paged:
            return
        while waiting and len(slots.responses) + len(new) < slots.count and cache.admit(waiting[0]):
            new.append(waiting.popleft())
        if new:
            self._prefill(cache)
            slots.add(new, key)
        elif not slots.responses and waiting:
            r = waiting[0]
            raise RuntimeError(
                f"the KV cache has no room for {len(r.prompt) + r.limit} tokens; needed: a "
                "larger --engine_share, or a smaller --max_response_len"
            )

    def _prefill(self, cache):
        """Compute the keys and values of unread prompts, in packs."""
        packs, size = [], 0
        for r in cache.unread:
            if not packs or size + r.read > self.cfg.pack_len:
                packs.append([])
                size = 0
            packs[-1].append(r)
            size += r.read
        for pack in packs:
            self._prefill_pack(cache, [r for r in pack if r.read])
        cache.prefilled()

    def _prefill_pack(self, cache, pack):
        if not pack:
            return
        lengths = [r.read for r in pack]
        tokens = chain.from_iterable(r.prompt[:-1] for r in pack)
        position = np.concatenate([np.arange(n) for n in lengths])
        page = np.concatenate([np.repeat(r.pages, cache.size)[: r.read] for r in pack])
        values = np.stack([np.fromiter(tokens, np.int64), position, page, position % cache.size])
        tokens, position, *cache.at = to_device(values, self.device)
        cu_seqlens = to_device(np.cumsum([0, *lengths], dtype=np.int32), self.device)
        self.policy.hidden(
            tokens[None], position[None], segments=Segments(cu_seqlens, max(lengths)), cache=cache
        )

    def _decode(self, slots, temperature, top_p):
        """Run the decoding steps up to the next look."""
        call = slots.batch(), temperature, top_p
        for _ in range(slots.look):
            if self.kernel and call in self.loaded and call not in slots.graphs:
                slots.graphs[call] = self._capture(slots, call)
            if call in slots.graphs:
                slots.graphs[call].replay()
                continue
            self._step(slots, *call)
            # A capture can't load kernels, so the first step of a batch size runs without a graph. What it
            # has freed must be free for the graph.
            self.loaded.add(call)
            if self.kernel:
                torch.cuda.empty_cache()

    def _capture(self, slots, call):
        """Returns the graph of a decoding step. Nothing is computed."""
        graph = torch.cuda.CUDAGraph()
        pool = next((g.pool() for g in slots.graphs.values()), None)
        # One stream for all captures, because cuBLAS keeps memory for each stream.
        self.stream = self.stream or torch.cuda.Stream(self.device)
        with torch.cuda.stream(self.stream):
            # "thread_local": other threads may use the GPU during the capture
            graph.capture_begin(pool, capture_error_mode="thread_local")
            self._step(slots, *call)
            graph.capture_end()
        return graph

    def _step(self, slots, batch, temperature, top_p):
        """Sample the next token of the first `batch` slots."""
        inputs, cache = slots.inputs[:batch], slots.cache
        token, position, first, last = inputs.T
        slot, row = cache.begin(batch, position)
        hidden = self.decoder.step(token[slot], position[slot], cache)
        logits = self.policy.lm_head.logits(hidden)[row]
        draws = slots.draws[:batch].gather(1, (position - first)[:, None])[:, 0]
        sampled, logp = sample_token(logits, draws, temperature, top_p)
        pair = torch.stack([sampled.float(), logp], 1)
        slots.recent[:batch].index_copy_(2, slots.step, pair[:, :, None])
        slots.step += 1
        token.copy_(sampled)
        position.copy_(
            torch.minimum(position + 1, last)
        )  # past its end, a response stays in its pages

    def _look(self, slots, recent):
        """Append the sampled tokens to their responses. Returns the responses that have ended. Their slots
        and pages are then free. recent: see Slots.copy."""
        ended, kept = [], []
        ids = recent[:, 0].astype(np.int64)
        may_end = self.may_end[ids].any(1).tolist()
        sampled = zip(slots.responses, may_end, ids.tolist(), recent[:, 1].tolist(), strict=False)
        for slot, (r, check, ids, logp) in enumerate(sampled):
            r.ids += ids
            r.logp += logp
            if (check or len(r.ids) >= r.limit) and self._ends(r, len(ids)):
                ended.append(r)
                slots.cache.release(r)
            else:
                kept.append(slot)
        if ended:
            slots.keep([*kept, *range(len(recent), len(slots.responses))])
        slots.cache.split(slots.inputs[: len(slots.responses), 0], bool(ended))
        return ended

    def _ends(self, r, new):
        """Returns whether a response has ended in its last `new` tokens. Removes the tokens after its end."""
        for end in range(len(r.ids) - new + 1, len(r.ids) + 1):
            r.stopped = r.ids[end - 1] in self.eos or self.at_stop(r.ids[:end])
            if r.stopped or end == r.limit:
                del r.ids[end:], r.logp[end:]
                return True
        return False


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Returns the values as a tensor on the device. The host does not wait for the copy."""
    x = torch.from_numpy(values)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


# --- sampling


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Returns the logits (B, V), with -inf outside the nucleus (arXiv 1904.09751): the fewest tokens whose
    probabilities sum to `top_p` or more."""
    if top_p == 1:
        return logits
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1, torch.float64)
    outside = probs.cumsum(-1) - probs >= top_p
    return logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)


def sample_token(
    logits: Tensor, u: Tensor, temperature: float, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns tokens (B,), drawn from the nucleus of logits (B, V) / temperature, and their log-probs (B,) in
    nats. With temperature 0, the tokens are those with the highest logits.

    u (B,): uniform random numbers in [0, 1)."""
    if temperature == 0:
        logp = logits.log_softmax(-1)
        token = logp.argmax(-1)
    else:
        if temperature != 1:  # the tensors of a large batch are large, so none is made without need
            logits = logits / temperature
        logp = nucleus(logits, top_p).log_softmax(-1)
        cumulative = logp.exp().double()
        cumulative = torch.cumsum(cumulative, -1, out=cumulative)
        token = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
        token = token.clamp(max=logits.shape[1] - 1)  # a rounding error could give the index V
    return token, logp.gather(1, token[:, None])[:, 0]


def uniforms(key: tuple[int, ...], count: int) -> np.ndarray:
    """Returns `count` uniform random numbers in [0, 1). A larger count gives the same numbers, then more."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)
