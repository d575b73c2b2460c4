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

On a CPU, or in fp32, a page holds a whole response (see Rows), and the host looks after every step."""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

import configs
from engine import Engine, Key
from engines import vllm_engine
from model import Segments

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


def page_shape(config: Any, size: int) -> tuple[int, int, int]:
    """Returns (Hkv, size, d), for pages of `size` tokens and Hkv heads of size d."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, size, head


class Cache:
    """Keys and values in pages. Responses to one prompt share its full pages. Page 0 belongs to empty slots.

    Each layer has one tensor (2, pages, Hkv, tokens of a page, d), with the keys at index 0 and the values at
    index 1, for Hkv heads of size d."""

    def __init__(
        self,
        config: Any,
        pages: int,
        size: int,
        slots: int,
        longest: int,
        like: Tensor,
        kernel: Callable | None = None,
    ) -> None:
        """Allocate a cache.

        pages: number of pages, of `size` tokens each
        longest: largest number of tokens of a response
        like: a tensor with the dtype and device of the cache
        kernel: a function like torch_kernel. None: attention in plain PyTorch"""
        # zeros: unwritten memory may be NaN, and attention computes 0 × NaN = NaN for a masked token
        shape = 2, pages, *page_shape(config, size)
        self.layers = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.size, self.longest, self.kernel = size, longest, kernel
        # table[j]: the pages of the response in slot j
        width = -(-longest // size)
        self.table = torch.zeros(slots, width, dtype=torch.int32, device=like.device)
        self.cu_seqlens = torch.arange(slots + 1, dtype=torch.int32, device=like.device)
        self.clear()

    def clear(self) -> None:
        """Forget all responses."""
        pages = self.layers[0].shape[1]
        self.free = [*range(pages - 1, 0, -1)]
        self.uses = [0] * pages  # number of responses that have this page
        self.latest: dict[tuple[int, ...], Response] = {}  # prompt -> its response that came last
        self.copies: dict[int, int] = {}  # page -> the page that is copied to it after the prefill
        self.unread: list[Response] = []  # responses whose prompts the next prefill must read

    def admit(self, r: Response) -> bool:
        """Give `r` pages for its prompt and the whole response. Returns False if there are too few."""
        other = self.latest.get(r.prompt)
        full = r.read // self.size
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
        elif r.read:
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

    def move(self, target: Tensor, source: Tensor, slots: int) -> None:
        """Move the responses of the slots `source` to the slots `target`. Then only the first `slots` slots
        have responses."""
        self.table[target] = self.table[source]
        self.table[slots:] = 0

    def begin(self, position: Tensor) -> None:
        """Begin a decoding step. position (R,): positions of the new tokens of the first R slots"""
        self.used = (position + 1).int()
        page = self.table[: len(position)].gather(1, (position // self.size)[:, None])[:, 0]
        self.at = page.long(), position % self.size
        if not self.kernel:
            self.end = int(position.max()) + 1
            self.distance = position[:, None] - torch.arange(self.end, device=position.device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the keys and values (T, Hkv, d) of T tokens. `self.at` has two tensors (T,): the page of each
        token, and its place in the page."""
        page, place = self.at
        for cached, new in zip(self.layers[layer], (key, value), strict=True):
            cached[page, :, place] = new

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values (R, Hkv, tokens, d) of the responses in the first R slots."""
        table = self.table[: len(self.used)]
        pages = self.layers[layer][:, table]  # (2, R, pages of a response, Hkv, size, d)
        return pages.transpose(2, 3).flatten(3, 4)[:, :, :, : self.end]

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
        if self.kernel:
            n = len(query)
            pages = dict(seqused_k=self.used, block_table=self.table[:n])
            keys, values = self.layers[layer].transpose(2, 3)
            ends = self.cu_seqlens[: n + 1]
            return self.kernel(query, keys, values, ends, self.longest, scaling, window, **pages)
        key, value = self.read(layer)
        masked = self.distance < 0
        if window:
            masked = masked | (self.distance >= window)
        # With one query a row, matrix products are faster on a CPU than scaled_dot_product_attention.
        query = (query * scaling).unflatten(1, (key.shape[1], -1))
        scores = query @ key.transpose(2, 3)  # (R, Hkv, H / Hkv, tokens)
        scores.masked_fill_(masked[:, None, None], -torch.inf)
        out = scores.softmax(-1, torch.float32).to(value.dtype) @ value
        return out.flatten(1, 2)


class Rows(Cache):
    """A cache whose pages are rows: page j + 1 holds the whole response of slot j. So a decoding step reads
    keys and values where they are. All slots must be filled at once, in their order."""

    def move(self, target, source, slots):
        for cached in self.layers:
            cached[:, target + 1, :, : self.end] = cached[:, source + 1, :, : self.end]

    def read(self, layer):
        return self.layers[layer][:, 1 : len(self.used) + 1, :, : self.end]


# --- attention over pages


def paged_kernel() -> Callable:
    """Returns a function that computes attention over pages on a GPU: torch's, or vLLM's if torch has none.
    Raises UserError if there is neither."""
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" in inspect.signature(varlen_attn).parameters:
        return torch_kernel
    kernel = vllm_engine.paged_kernel()
    configs.require(
        kernel is not None,
        f"--engine torch on a GPU: torch {torch.__version__} has no attention over pages",
        "torch 2.13 or newer, or vllm, whose kernel is then used",
    )
    return kernel


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
    ends = cu_seqlens, cu_seqlens
    options = dict(scale=scaling, window_size=limits, enable_gqa=True)
    return varlen_attn(query, keys, values, *ends, 1, longest, **options, **pages)


# --- the engine


class Slots:
    """The responses that are decoded, and their state on the device."""

    def __init__(self, cache: Cache, look: int) -> None:
        """look: decoding steps between two looks of the host"""
        self.cache, self.look = cache, look
        self.count = count = len(cache.table)
        self.responses: list[Response] = []  # responses[j] is in slot j
        zeros = partial(torch.zeros, device=cache.table.device)
        # Of each slot: the next input, its position, the position of the first input and of the last
        self.inputs = zeros(count, 4, dtype=torch.int64)
        self.draws = zeros(count, cache.longest, dtype=torch.float64)
        # The tokens and the log-probs of the steps since the last look. fp32 holds all numbers below 2^24.
        self.recent = zeros(count, 2, look)
        self.step = zeros(1, dtype=torch.int64)  # number of steps since the last look
        # (batch, temperature, top_p) -> graph of a decoding step
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}

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

    def drop(self, ended: Sequence[int]) -> None:
        """Free the slots `ended`, and their pages. Responses of the last slots move to them."""
        count = len(self.responses) - len(ended)
        target = [j for j in ended if j < count]
        source = [j for j in range(count, len(self.responses)) if j not in ended]
        for j in ended:
            self.cache.release(self.responses[j])
        for hole, last in zip(target, source, strict=True):
            self.responses[hole] = self.responses[last]
        del self.responses[count:]
        moves = to_device(np.array([target, source], np.int64), self.inputs.device)
        for x in (self.inputs, self.draws, self.recent):
            x[moves[0]] = x[moves[1]]
        self.inputs[count:] = 0
        self.cache.move(*moves, count)

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
        flash = self.device.type == "cuda" and dtype != torch.float32  # it takes bf16 and fp16
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
            if self.page:
                read = slots.copy(seen)
            self._decode(slots, temperature, top_p)
            if not self.page:
                read = slots.copy(len(slots.responses))
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
            longest = max(len(r.prompt) + r.limit for r in waiting)
            return Slots(Rows(self.config, 1 + count, longest, count, longest, like), 1)
        if self.slots is None:
            count, longest = cfg.max_num_seqs, cfg.engine_len
            pages = self._pages(1 + count * -(-longest // self.page))
            cache = Cache(self.config, pages, self.page, count, longest, like, self.kernel)
            self.slots = Slots(cache, self.look)
        self.slots.responses = []
        return self.slots

    def _pages(self, wanted):
        """Returns the number of pages: as many as wanted, if --engine_share has room for them."""
        if self.device.type != "cuda":
            return wanted
        c, weight = self.config, self.dtype.itemsize
        page = 2 * c.num_hidden_layers * math.prod(page_shape(c, self.page)) * weight
        weights = weight * sum(p.numel() for p in self.policy.parameters())
        sampler = 4 * configs.SAMPLER_COPIES * self.cfg.max_num_seqs * c.vocab_size
        share = self.cfg.engine_share * torch.cuda.mem_get_info(self.device)[1]
        return max(1, min(wanted, int(share - weights - sampler) // page))

    def _fill(self, slots, waiting, key):
        """Move waiting requests to free slots, as far as the cache has room. On a CPU, wait until all slots
        are free, because a prefill costs as much as a decoding step of the whole batch."""
        new, cache = [], slots.cache
        if not slots.responses:
            cache.clear()
        elif not self.page:
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
        """Compute the keys and values of unread prompts, in packs of --pack_len tokens."""
        pack, size = [], 0
        for r in cache.unread:
            if pack and size + r.read > self.cfg.pack_len:
                self._prefill_pack(cache, pack)
                pack, size = [], 0
            pack.append(r)
            size += r.read
        if pack:
            self._prefill_pack(cache, pack)
        cache.prefilled()

    def _prefill_pack(self, cache, pack):
        lengths = [r.read for r in pack]
        tokens = chain.from_iterable(r.prompt[:-1] for r in pack)
        position = np.concatenate([np.arange(n) for n in lengths])
        page = np.concatenate([np.repeat(r.pages, cache.size)[: r.read] for r in pack])
        values = np.stack([np.fromiter(tokens, np.int64), position, page, position % cache.size])
        tokens, position, *cache.at = to_device(values, self.device)
        cu_seqlens = to_device(np.cumsum([0, *lengths], dtype=np.int32), self.device)
        segments = Segments(cu_seqlens, max(lengths))
        self.policy.hidden(tokens[None], position[None], segments=segments, cache=cache)

    def _decode(self, slots, temperature, top_p):
        """Run the decoding steps up to the next look."""
        batch = len(slots.responses)
        if self.page:  # few batch sizes, because each has a graph: 1, 2, 4, …
            batch = min(slots.count, 1 << (batch - 1).bit_length())
        call = batch, temperature, top_p
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
        token, position, first, last = slots.inputs[:batch].T
        slots.cache.begin(position)
        hidden = self.policy.hidden(token[:, None], position[:, None], cache=slots.cache)[:, 0]
        logits = self.policy.lm_head.logits(hidden)
        draws = slots.draws[:batch].gather(1, (position - first)[:, None])[:, 0]
        sampled, logp = sample_token(logits, draws, temperature, top_p)
        pair = torch.stack([sampled.float(), logp], 1)
        slots.recent[:batch].index_copy_(2, slots.step, pair[:, :, None])
        slots.step += 1
        token.copy_(sampled)
        # Past its end, a response stays in its pages.
        position.copy_(torch.minimum(position + 1, last))

    def _look(self, slots, recent):
        """Append the sampled tokens to their responses. Returns the responses that have ended. Their slots
        and pages are then free. recent: see Slots.copy."""
        ended = {}  # slot -> response
        ids = recent[:, 0].astype(np.int64)
        may_end = self.may_end[ids].any(1)
        for slot in range(len(recent)):
            r = slots.responses[slot]
            r.ids += ids[slot].tolist()
            r.logp += recent[slot, 1].tolist()
            if (may_end[slot] or len(r.ids) >= r.limit) and self._ends(r, ids.shape[1]):
                ended[slot] = r
        if ended:
            slots.drop(list(ended))
        return list(ended.values())

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
