"""An engine in plain PyTorch. On a GPU, a decoding step is one CUDA graph and costs the host almost nothing.

A slot is a place in the batch and decodes one response. The cache holds keys and values in pages. Example:
pages of 4 tokens, two responses to the prompt `p q r s t u`, and one response to the prompt `v w`:

    slot   sampled tokens   next input   its position   pages          page   tokens of the keys and values
    0      a b              b            7              1 2            0      scratch: for empty slots
    1      c d              d            7              3 4            1      p q r s
    2      e f g            g            4              5 6            2      t u a .
                                                                       3      p q r s      a copy of page 1
                                                                       4      t u c .
                                                                       5      v w e f
                                                                       6      . . . .

A decoding step reads the next input of each slot, stores its keys and values, and samples a token. The first
input is the last token of the prompt. The host looks at the sampled tokens only after every LOOK steps: it
ends responses, cuts what was sampled past their ends, and gives their slots and pages to waiting requests.
When few slots are left, a smaller graph is used.

On a CPU, or in fp32, a page is a whole row, and slots whose tokens are equal share a row (see Rows). Then the
host looks after every step."""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import configs
from engine import Engine, Key
from engines import vllm_engine
from layers.attention import Segments, varlen_attn
from layers.mlp import gated, rms_norm
from model import Policy

if torch.cuda.is_available():  # CPU builds of torch have no Triton
    from layers import gpu_kernels

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
    start: int = 0  # the place of the prompt's first token in its page; not 0 only with Rows

    @property
    def prefix_len(self) -> int:
        """Number of tokens of the prompt that the prefill reads. A decoding step reads the last token."""
        return len(self.prompt) - 1


# --- the cache


class Cache:
    """Keys and values. Each layer has one tensor (2, pages, Hkv, tokens of a page, d), with the keys at index
    0 and the values at index 1, for Hkv heads of size d."""

    def __init__(
        self,
        config: Any,
        pages: int,
        size: int,
        slots: int,
        width: int,
        like: Tensor,
    ) -> None:
        """Allocate a cache.

        pages: number of pages, of `size` tokens each
        slots: number of slots
        width: largest number of pages of a response
        like: a tensor with the dtype and device of the cache"""
        heads = config.num_key_value_heads
        shape = (2, pages, heads, size, head_size(config))
        self.layers = []
        for _ in range(config.num_hidden_layers):
            # zeros: unwritten memory may be NaN, and attention computes 0 × NaN = NaN for a masked token
            self.layers.append(like.new_zeros(shape))
        self.size = size
        self.longest = width * size  # largest number of tokens of a response
        # table[j]: the pages of the response in slot j, then zeros
        self.table = like.new_zeros(slots, width, dtype=torch.int32)
        self.unread: list[Response] = []  # responses whose prompts the next prefill must read
        self.copies: dict[int, int] = {}  # page -> the page that is copied to it after the prefill

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the keys and values (T, Hkv, d) of T tokens. `begin` or TorchEngine._prefill_pack has set
        `self.at`: the page of each token (T,), and its place in the page (T,). In a decoding step of Rows,
        these are a slice of the rows and one column."""
        page, place = self.at
        keys, values = self.layers[layer]
        keys[page, :, place] = key
        values[page, :, place] = value

    def prefilled(self) -> None:
        """Finish `admit`, after the prefill: fill the pages in `copies`."""
        self.unread = []
        if not self.copies:
            return
        pairs = np.array([*self.copies.items()])  # (target, source)
        target, source = to_device(pairs, self.table.device).T
        for cached in self.layers:
            for into, page in zip(target.split(256), source.split(256), strict=True):  # less memory
                cached[:, into] = cached[:, page]
        self.copies = {}


class Pages(Cache):
    """A cache whose responses keep their pages from the first step to the last. A prompt is read once: other
    responses to it get copies of its pages. Page 0 belongs to empty slots."""

    def __init__(self, kernel: Callable, *sizes: Any) -> None:
        """kernel: a function like torch_kernel. sizes: the arguments of Cache"""
        super().__init__(*sizes)
        self.kernel = kernel
        slots = len(self.table)
        # 0, 1, 2, …: each response has one query, its new token
        self.cu_seqlens = torch.arange(
            slots + 1,
            dtype=torch.int32,
            device=self.table.device,
        )
        self.clear()

    def clear(self) -> None:
        """Forget all responses."""
        pages = self.layers[0].shape[1]
        self.free = list(range(1, pages))  # the free pages; page 0 is never given away
        self.latest: dict[tuple[int, ...], Response] = {}  # prompt -> its response that came last
        # An abandoned `generate` may leave work for the prefill.
        self.copies = {}
        self.unread = []

    def admit(self, r: Response) -> bool:
        """Give `r` pages for its prompt and the whole response. Returns False if there are too few."""
        # The last sampled token is never an input, so it needs no place.
        needed = math.ceil((r.prefix_len + r.limit) / self.size)
        left = len(self.free) - needed  # number of free pages that stay
        if left < 0:
            return False
        r.pages = self.free[left:]
        del self.free[left:]
        other = self.latest.get(r.prompt)
        if other:
            count = math.ceil(r.prefix_len / self.size)  # pages with tokens of the prompt
            for page, source in zip(r.pages[:count], other.pages[:count], strict=True):
                # If `source` itself waits for a copy, both become copies of the same page. The last page
                # may also have sampled tokens of `other`. `r` overwrites them before it reads them.
                self.copies[page] = self.copies.get(source, source)
        else:
            self.unread.append(r)
        self.latest[r.prompt] = r
        return True

    def release(self, r: Response) -> None:
        """Free the pages of `r`, which has ended."""
        self.free += r.pages
        if self.latest.get(r.prompt) is r:
            del self.latest[r.prompt]

    def begin(self, slots: int, position: Tensor) -> tuple[slice, slice]:
        """Begin a decoding step of the first `slots` slots. Returns two indices, as Rows.begin does. Here
        both select everything, because the model computes each slot.

        position (slots,): positions of the new tokens"""
        self.used = (position + 1).int()  # (slots,) tokens of each response, with the new one
        column = (position // self.size)[:, None]  # of the table, not of a row
        page = self.table[:slots].gather(1, column)[:, 0]
        self.at = (page.long(), position % self.size)
        every = slice(None)
        return every, every

    def read(
        self,
        layer: int,
        query: Tensor,
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        """Returns the attention output (R, H, d) for one new token of each of R responses, whose keys and
        values `write` has stored. query: (R, H, d)."""
        # each (pages, tokens of a page, Hkv, d), as the kernel needs
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

    def split(self, token: Tensor) -> None:
        """Does nothing: a response writes only to pages of its own."""


class Rows(Cache):
    """A cache whose pages are rows. A row holds a whole response. Slots share a row as long as their tokens
    are equal. The model computes a shared row once. All prompts end at the same column, so a decoding step
    writes one column. Example: slots 0 and 1 have the prompt `p q`, slot 2 has `r`:

        step   sampled tokens       rows of the cache (| separates rows)   rows of the slots (`table`)
        0      -                    p q | r                                0 0 1
        1      0: a   1: a   2: x   p q a | r x                            0 0 1
        2      0: b   1: c   2: y   p q a b | p q a c | r x y              0 1 2
        3      0: EOS 1: d   2: z   p q a c d | r x y z                    0 1     (one slot is gone)

    In step 2, slots 0 and 1 sample different tokens. Slot 1 gets row 1, a copy of row 0. In step 3, slot 0
    ends, and its row is dropped."""

    def __init__(self, config: Any, *sizes: Any) -> None:
        """config, sizes: the arguments of Cache, here with one page a response"""
        super().__init__(config, *sizes)
        self.vocabulary = config.vocab_size
        self.table = self.table.long()  # the row of each slot, as an index
        count = max(self.longest, len(self.table))
        # 0, 1, 2, …: numbers of slots, of rows and of columns
        self.numbers = torch.arange(count, device=self.table.device)
        self.rows = 0  # number of rows in use
        self.column = 0  # the next decoding step writes this column of each row

    def admit(self, r: Response) -> bool:
        """Give `r` a row. Responses to the same prompt share a row if the same prefill reads them."""
        for other in self.unread:
            if other.prompt == r.prompt:
                r.pages = other.pages
                return True
        if self.rows == 0:  # `generate` has sorted the requests, so the longest prompt comes first
            self.column = r.prefix_len
        r.start = self.column - r.prefix_len  # so that all prompts end at the same column
        r.pages = [self.rows]
        self.rows += 1
        self.unread.append(r)
        return True

    def release(self, r: Response) -> None:
        """Does nothing: `split` drops a row that no slot has."""

    def begin(self, slots: int, position: Tensor) -> tuple[Tensor, Tensor]:
        """Begin a decoding step of the first `slots` slots. Returns two tensors of indices:

        slot (rows,): one slot for each row. The model computes only these slots
        row (slots,): the row of each slot. Slots that share a row get the same output

        position (slots,): positions of the new tokens"""
        row = self.table[:slots, 0]
        slot = row.new_empty(self.rows)
        slot.index_copy_(0, row, self.numbers[:slots])  # of several slots with one row, any will do
        self.at = (slice(self.rows), self.column)
        first = self.column - position[slot]  # the column of a row's first token
        self.column += 1
        masked = self.numbers[: self.column] < first[:, None]  # (rows, columns): before the prompt
        self.masked = masked[:, None, None]  # (rows, 1, 1, columns): the same for all heads
        return slot, row

    def read(self, layer, query, scaling, window=None):
        """See Pages.read. Here R is the number of rows."""
        end = self.column  # `begin` has counted the new token's column
        begin = 0
        if window:
            begin = max(0, end - window)
        # (rows, Hkv, columns, d)
        keys, values = self.layers[layer][:, : self.rows, :, begin:end]
        # With one query a row, matrix products are faster on a CPU than scaled_dot_product_attention.
        query = query * scaling
        query = query.unflatten(1, (keys.shape[1], -1))
        scores = query @ keys.mT  # (R, Hkv, H / Hkv, columns)
        scores.masked_fill_(self.masked[..., begin:], -torch.inf)
        probs = scores.softmax(-1, torch.float32)
        out = probs.to(values.dtype) @ values
        return out.flatten(1, 2)

    def split(self, token: Tensor) -> None:
        """If slots that share a row have sampled different tokens, give each different token a row of its
        own, with the same contents. Drop the rows that no slot uses.

        token (slots,): the last sampled tokens"""
        row = self.table[: len(token), 0]
        pair_of_slot = row * self.vocabulary + token  # one number for each pair (row, token)
        # pairs: each pair once, sorted. new_row (slots,): index of the slot's pair in `pairs`
        pairs, new_row = pair_of_slot.unique(return_inverse=True)
        row.copy_(new_row)  # `row` is a view of the table
        source = pairs // self.vocabulary  # the old row of each new row, in ascending order
        self.rows = len(source)
        if source.equal(self.numbers[: self.rows]):
            return  # no row has moved
        for cached in self.layers:
            used = cached[:, :, :, : self.column]
            used[:, : self.rows] = used[:, source]


def head_size(config: Any) -> int:
    """Returns the size of an attention head."""
    equal = config.hidden_size // config.num_attention_heads
    return getattr(config, "head_dim", None) or equal


# --- attention over pages


def paged_kernel() -> Callable:
    """Returns a function that computes attention over pages on a GPU: torch's, or vLLM's if torch has none.
    Raises UserError if there is neither."""
    if "block_table" in inspect.signature(varlen_attn()).parameters:
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
    # The last token attends to all tokens. Only without any limit does the kernel read keys and values once
    # for all query heads that share them.
    limits = (window - 1, 0) if window else (-1, -1)
    return varlen_attn()(
        query,
        keys,
        values,
        cu_seqlens,
        cu_seqlens,
        1,
        longest,
        scale=scaling,
        window_size=limits,
        **pages,
    )


# --- the model


class FusedDecoder:
    """Computes a decoding step. For the model types configs.LLAMA_LIKE, it needs fewer operations than
    Policy.hidden, and so less time. For other model types, it calls Policy.hidden."""

    def __init__(self, policy: Policy) -> None:
        """Changes the storage of the weights, see `join`."""
        self.policy = policy
        self.fused = policy.config.model_type in configs.LLAMA_LIKE
        if self.fused:
            for layer in policy.model.layers:
                # [weight, bias] of one layer, for F.linear
                layer.self_attn.qkv = join(layer.self_attn, "q_proj", "k_proj", "v_proj")
                layer.mlp.gate_up = join(layer.mlp, "gate_proj", "up_proj")

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Runs the model on one new token of each of R responses. Returns the hidden states (R, D) after the
        last norm. tokens, positions: (R,)."""
        if not self.fused:
            tokens = tokens[:, None]
            positions = positions[:, None]
            hidden = self.policy.hidden(tokens, positions, engine_cache=cache)
            return hidden[:, 0]
        model = self.policy.model
        x = F.embedding(tokens, model.embed_tokens.weight)
        cos, sin = model.rotary_emb(x, positions[:, None])  # (R, 1, d)
        # With the halves a, b of x, rotate_half(x) is cat(-b, a), and x.roll(d / 2) is cat(b, a). The sign
        # moves into sin, so that rotate_half(x) * sin = x.roll(d / 2) * sin.
        first_half, _ = sin.chunk(2, -1)
        first_half.neg_()
        for layer in model.layers:
            mlp = layer.mlp
            normed = rms_norm(layer.input_layernorm, x)
            x = x + self._attention(
                layer.self_attn,
                normed,
                cos,
                sin,
                cache,
            )
            normed = rms_norm(layer.post_attention_layernorm, x)
            both = F.linear(normed, *mlp.gate_up)
            gate, up = both.chunk(2, -1)
            x = x + mlp.down_proj(gated(mlp.act_fn, gate, up))
        return rms_norm(model.norm, x)

    def _attention(self, attention, x, cos, sin, cache):
        """Returns the output (R, D) of a layer's attention for its inputs x (R, D)."""
        layer = attention.layer_idx
        d = attention.head_dim
        kv = self.policy.config.num_key_value_heads
        heads = F.linear(x, *attention.qkv)
        heads = heads.unflatten(1, (-1, d))  # (R, H + 2 kv, d): of queries, of keys, of values
        if x.is_cuda and isinstance(cache, Pages):
            query = gpu_kernels.rotate_and_store(
                heads,
                cos,
                sin,
                cache.layers[layer],
                *cache.at,
            )
        else:
            qk = heads[:, :-kv]
            turned = qk.roll(d // 2, -1)  # see `step`
            qk = torch.addcmul(qk * cos, turned, sin)
            query = qk[:, :-kv]
            key = qk[:, -kv:]
            value = heads[:, -kv:]
            cache.write(layer, key, value)
        out = cache.read(layer, query, attention.scaling)
        return attention.o_proj(out.flatten(1))


def join(module: nn.Module, *names: str) -> list[Tensor | None]:
    """Returns weight and bias of one linear layer. Its output is the concatenated outputs of the layers
    `names` of `module`. The bias is None if these layers have no bias. The weights of these layers become
    views of the result, so new weights of a layer are new weights of the result."""
    linears = [getattr(module, name) for name in names]
    joined = []
    for kind in ("weight", "bias"):
        parts = [getattr(linear, kind) for linear in linears]
        if parts[0] is None:
            joined.append(None)
            continue
        whole = torch.cat(parts)
        joined.append(whole)
        views = whole.split([len(part) for part in parts])
        for linear, view in zip(linears, views, strict=True):
            setattr(linear, kind, nn.Parameter(view, requires_grad=False))
    return joined


# --- the engine


class Slots:
    """The responses that are decoded, and their state on the device."""

    def __init__(self, cache: Cache, look: int) -> None:
        """look: number of decoding steps between two looks of the host at the sampled tokens"""
        count = len(cache.table)
        self.cache = cache
        self.count = count
        self.look = look
        self.is_paged = isinstance(cache, Pages)
        self.responses: list[Response] = []  # responses[j] is in slot j
        zeros = partial(torch.zeros, device=cache.table.device)
        # For each slot: the token to read next, its position, and the largest position that it may have
        self.inputs = zeros(count, 3, dtype=torch.int64)
        # draws[j, p]: the random number for the token after position p
        self.draws = zeros(count, cache.longest, dtype=torch.float64)
        # The tokens and the log-probs of the steps since the last look. fp32 is exact for integers below
        # 2^24, and so for ids of tokens.
        self.recent = zeros(count, 2, look)
        self.step = zeros(1, dtype=torch.int64)  # number of steps since the last look
        # (batch, temperature, top_p) -> a decoding step
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}

    def batch(self) -> int:
        """Returns the number of slots of a decoding step. With pages, it is 1, 2, 4, … or `count`, because
        each number needs a graph."""
        n = len(self.responses)
        if not self.is_paged:
            return n
        power = 1 << (n - 1).bit_length()
        return min(self.count, power)

    def add(self, new: Sequence[Response], seed: tuple[int, ...]) -> None:
        """Put responses into the next free slots."""
        first = len(self.responses)
        self.responses += new
        count = len(new)
        _, width = self.cache.table.shape
        inputs = np.zeros((count, 3))
        draws = np.zeros((count, self.cache.longest))
        table = np.zeros((count, width))
        for j, r in enumerate(new):
            position = r.prefix_len  # of the first input, the last token of the prompt
            end = position + r.limit  # the position of the last token that may be sampled
            last = end - 1  # of the inputs; the last sampled token is no input
            inputs[j] = r.prompt[-1], position, last
            draws[j, position:end] = uniforms((*seed, *r.key), r.limit)
            table[j, : len(r.pages)] = r.pages
        for state, values in (
            (self.inputs, inputs),
            (self.draws, draws),
            (self.cache.table, table),
        ):
            state[first : first + count] = to_device(values, state.device)

    def keep(self, kept: Sequence[int]) -> None:
        """Move the responses of the slots `kept` to the first slots. The other slots become empty."""
        n = len(kept)
        self.responses = [self.responses[j] for j in kept]
        index = np.array(kept, np.int64)
        index = to_device(index, self.inputs.device)
        for state in (
            self.inputs,
            self.draws,
            self.cache.table,
            self.recent,  # with pages, it has tokens that the host has not seen
        ):
            state[:n] = state[index]
            state[n:] = 0

    def copy(self, slots: int) -> Callable[[], np.ndarray]:
        """Begin to copy to the host what the first `slots` slots have sampled since the previous copy.
        Returns a function that waits until the copy is complete, and returns the array (slots, 2, steps):
        tokens and log-probs."""
        copied = self.recent[:slots].to(
            "cpu",
            non_blocking=True,
            copy=True,
        )
        self.step.zero_()  # the GPU does this after the copy, and before the next step writes
        if not self.recent.is_cuda:
            return copied.numpy  # the copy has ended
        done = torch.cuda.current_stream().record_event()

        def finish_copy():
            done.synchronize()
            return copied.numpy()

        return finish_copy


class TorchEngine(Engine):
    def __init__(self, path, tokenizer, cfg, device="cpu", dtype=torch.float32):
        super().__init__(path, tokenizer, cfg, device, dtype)
        self.policy.to(dtype).requires_grad_(False)
        self.policy.allocate(device)
        self.decoder = FusedDecoder(self.policy)
        # The cache is Pages if `page` is set, otherwise Rows.
        self.page = 0  # tokens of a page; 0: none is set
        self.kernel = None  # attention over pages
        # FlashAttention takes bf16 and fp16
        if self.device.type == "cuda" and dtype != torch.float32:
            self.kernel = paged_kernel()
            self.page = configs.KV_PAGE
        self.look = LOOK  # with Pages. With Rows, the host looks after every step.
        self.slots = None  # with Pages: the Slots, until the engine sleeps
        self.ledger.end()  # adds the memory of the weights to `residual`: it stays while asleep

    def load(self, weights):
        parameters = dict(self.policy.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)
        self.ledger.mark("sync")

    def unload(self):
        """Free the cache and the graphs."""
        self.slots = None

    @torch.inference_mode()
    def generate(self, requests, limits, temperature, seed, version, top_p=1.0):
        self.check(version)
        if not requests:
            return
        # The longest prompts first: Rows.admit relies on this order.
        order = sorted(requests, key=lambda k: (-len(requests[k]), k))
        waiting = deque(Response(k, tuple(requests[k]), limits[k]) for k in order)
        # Whether a token may end a response. For most tokens it is false, which saves time.
        self.may_end = self.may_stop.copy()
        self.may_end[list(self.eos)] = True
        slots = self._allocate(waiting)
        self._fill(slots, waiting, seed)
        to_copy = 0  # number of slots whose last tokens are not yet copied
        while slots.responses and self.goes_on():
            if slots.is_paged:
                # Copy the tokens of the last turn while the GPU decodes, so that it never waits.
                finish_copy = slots.copy(to_copy)
                self._decode(slots, temperature, top_p)
            else:
                self._decode(slots, temperature, top_p)
                finish_copy = slots.copy(len(slots.responses))
            ended = self._look(slots, finish_copy())
            # Slots that `_fill` adds now have no tokens for the next copy.
            to_copy = len(slots.responses)
            self._fill(slots, waiting, seed)
            for r in ended:
                yield self.sample(
                    r.key,
                    r.prompt,
                    r.ids,
                    r.logp,
                    r.stopped,
                )

    def _allocate(self, waiting):
        """Returns the Slots for the requests. With pages, they are allocated once, and keep their graphs
        until the engine sleeps. waiting: Responses, see `generate`"""
        count = self.cfg.max_num_seqs
        like = self.policy.lm_head.weight  # has the cache's dtype and device
        if not self.page:
            count = min(count, len(waiting))
            columns = max(r.prefix_len for r in waiting) + max(r.limit for r in waiting)
            if self.device.type == "cuda":  # then a row must fit into --engine_share
                count = self._pages(count, columns)
            cache = Rows(
                self.config,
                count,  # pages: the rows
                columns,  # tokens of a page
                count,  # slots
                1,  # pages of a response
                like,
            )
            return Slots(cache, look=1)
        if self.slots is None:
            width = math.ceil(self.cfg.engine_len / self.page)
            cache = Pages(
                self.kernel,
                self.config,
                self._pages(1 + count * width, self.page),  # 1: the page of empty slots
                self.page,  # tokens of a page
                count,  # slots
                width,  # pages of the longest response
                like,
            )
            self.slots = Slots(cache, self.look)
        self.slots.keep([])  # an abandoned call has left responses there
        self.slots.cache.clear()
        return self.slots

    def _pages(self, wanted, size):
        """Returns the number of pages of `size` tokens: as many as wanted, or as many as fit into
        --engine_share of the GPU's memory beside weights and buffers. All memory is in bytes."""
        c = self.config
        of_token = 2 * c.num_key_value_heads * head_size(c)  # numbers in a layer: key and value
        page_bytes = self.dtype.itemsize * size * c.num_hidden_layers * of_token
        weights = sum(p.nbytes for p in self.policy.parameters())
        sizes = c.hidden_size, c.intermediate_size, c.vocab_size
        _, total = torch.cuda.mem_get_info(self.device)
        room = self.cfg.engine_share * total
        room -= weights + self.cfg.torch_buffers(*sizes, self.dtype.itemsize)
        fitting = max(1, int(room) // page_bytes)
        return min(wanted, fitting)

    def _fill(self, slots, waiting, seed):
        """Move waiting requests to free slots, as far as the cache has room. On a CPU, wait until all slots
        are free, because a prefill costs as much as a decoding step of the whole batch."""
        if slots.responses and not slots.is_paged:
            return
        new = []
        free = slots.count - len(slots.responses)
        while waiting and len(new) < free:
            if not slots.cache.admit(waiting[0]):
                break
            new.append(waiting.popleft())
        if new:
            self._prefill(slots.cache)  # reads the prompts that `admit` has put into cache.unread
            slots.add(new, seed)
        elif not slots.responses and waiting:  # all pages are free, and still too few
            r = waiting[0]
            tokens = len(r.prompt) + r.limit
            raise RuntimeError(
                f"the KV cache has no room for {tokens} tokens; needed: a "
                "larger --engine_share, or a smaller --max_response_len"
            )

    def _prefill(self, cache):
        """Compute the keys and values of unread prompts, in packs. --pack_len is not used: its packs may be
        too long for the memory beside the cache."""
        pack = []
        tokens = 0  # of `pack`
        for r in cache.unread:
            if tokens + r.prefix_len > configs.PREFILL:
                self._prefill_pack(cache, pack)
                pack = []
                tokens = 0
            pack.append(r)
            tokens += r.prefix_len
        self._prefill_pack(cache, pack)
        cache.prefilled()

    def _prefill_pack(self, cache, pack):
        """Compute the keys and values of the prompts in `pack`, a list of Response. Store them in the
        cache. The last token of each prompt is left out, because a decoding step reads it."""
        lengths = [r.prefix_len for r in pack if r.prefix_len]
        if not lengths:  # each prompt is a single token
            return
        tokens = []
        positions = []
        pages = []
        places = []
        for r in pack:
            tokens += r.prompt[: r.prefix_len]
            positions += range(r.prefix_len)
            of_tokens = np.repeat(r.pages, cache.size)  # the page of each token of the response
            pages += of_tokens[: r.prefix_len].tolist()
            places += range(r.start, r.start + r.prefix_len)
        values = np.array([tokens, positions, pages, places])
        token, position, page, place = to_device(values, self.device)
        cache.at = (page, place % cache.size)
        cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
        self.policy.hidden(
            token[None],
            position[None],
            segments=Segments(to_device(cu_seqlens, self.device), max(lengths)),
            engine_cache=cache,
        )

    def _decode(self, slots, temperature, top_p):
        """Run the decoding steps up to the next look."""
        call = (slots.batch(), temperature, top_p)  # the arguments of `_step`, fixed in a graph
        for _ in range(slots.look):
            if call in slots.graphs:
                slots.graphs[call].replay()
                continue
            self._step(slots, *call)
            # A capture can't load kernels, so it follows a step without a graph.
            if slots.is_paged and self.device.type == "cuda":
                slots.graphs[call] = self._capture(slots, call)

    def _capture(self, slots, call):
        """Returns the graph of a decoding step. The capture records the GPU's work and does not run it."""
        graph = torch.cuda.CUDAGraph()
        pools = [other.pool() for other in slots.graphs.values()]
        # All graphs share the memory of the first. "thread_local": other threads may use the GPU during the
        # capture.
        with torch.cuda.graph(graph, *pools[:1], capture_error_mode="thread_local"):
            self._step(slots, *call)
        return graph

    def _step(self, slots, batch, temperature, top_p):
        """Sample the next token of the first `batch` slots."""
        cache = slots.cache
        token, position, last = slots.inputs[:batch].T  # views. last: largest position of an input
        slot, row = cache.begin(batch, position)  # see Rows.begin
        hidden = self.decoder.step(token[slot], position[slot], cache)
        logits = self.policy.lm_head.logits(hidden)
        column = position[:, None]
        draw = slots.draws[:batch].gather(1, column)
        sampled, logp = sample_token(
            logits[row],
            draw[:, 0],
            temperature,
            top_p,
        )
        pair = torch.stack([sampled.float(), logp], 1)  # (batch, 2)
        recent = slots.recent[:batch]
        recent.index_copy_(2, slots.step, pair[:, :, None])
        slots.step += 1
        token.copy_(sampled)
        following = torch.minimum(position + 1, last)  # past its end, a response stays in its pages
        position.copy_(following)

    def _look(self, slots, recent):
        """Append the sampled tokens to their responses. Returns the responses that have ended. Their slots
        and pages are then free.

        recent (slots, 2, steps): the token ids and log-probs sampled since the last look (see Slots.copy)"""
        ended = []
        ids = recent[:, 0].astype(np.int64)
        may_end = self.may_end[ids].any(1).tolist()  # for each slot
        logp = recent[:, 1].tolist()
        # The last responses may be missing in `recent`: they were added after the previous look.
        of_slots = zip(slots.responses, ids.tolist(), logp, may_end, strict=False)
        for r, new_ids, new_logp, may in of_slots:
            start = len(r.ids)  # the first new token
            r.ids += new_ids
            r.logp += new_logp
            may = may or len(r.ids) >= r.limit
            if may and self._ends(r, start):
                ended.append(r)
                slots.cache.release(r)
        if ended:
            gone = set(ended)
            slots.keep([j for j, r in enumerate(slots.responses) if r not in gone])
        count = len(slots.responses)
        last = slots.inputs[:count, 0]  # sampled tokens
        # With Rows: if slots that share a row sampled different tokens, each token gets a copy of the row.
        slots.cache.split(last)
        return ended

    def _ends(self, r, start):
        """Returns whether a response has ended at r.ids[start] or later. Removes the tokens after its end."""
        for end in range(start + 1, len(r.ids) + 1):
            ids = r.ids[:end]
            r.stopped = ids[-1] in self.eos or self.at_stop(ids)
            if r.stopped or end == r.limit:
                del r.ids[end:], r.logp[end:]
                return True
        return False


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Returns the values as a tensor on the device. The host does not wait for the copy."""
    x = torch.from_numpy(values)
    if device.type == "cuda":
        x = x.pin_memory().to(device, non_blocking=True)
    return x


# --- sampling


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Returns the logits (B, V), with -inf outside the nucleus. The nucleus is the fewest tokens whose
    probabilities sum to `top_p` or more (arXiv 1904.09751)."""
    if top_p == 1:
        return logits
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1, torch.float64)
    before = probs.cumsum(-1).sub_(probs)  # sum of the probabilities of more probable tokens
    outside = before >= top_p
    outside = outside.scatter(-1, order, outside)  # back to the order of the vocabulary
    return logits.masked_fill(outside, -torch.inf)


def sample_token(
    logits: Tensor,
    u: Tensor,
    temperature: float,
    top_p: float = 1.0,
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
        logits = nucleus(logits, top_p)
        if logits.is_cuda:
            return gpu_kernels.draw(logits, u)
        logp = logits.log_softmax(-1)
        cumulative = logp.exp().double()  # (B, V)
        torch.cumsum(cumulative, -1, out=cumulative)
        drawn = u * cumulative[:, -1]  # times the sum, which is not exactly 1
        token = torch.searchsorted(
            cumulative,
            drawn[:, None],
            right=True,
        )
        last = logits.shape[1] - 1
        token = token[:, 0].clamp(max=last)  # a rounding error could give the index V
    logp = logp.gather(1, token[:, None])
    return token, logp[:, 0]


def uniforms(seed: tuple[int, ...], count: int) -> np.ndarray:
    """Returns `count` uniform random numbers in [0, 1). A larger count gives the same numbers, then more."""
    bits = np.random.Philox(seed)
    return np.random.Generator(bits).random(count)
