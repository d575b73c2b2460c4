"""An engine in plain PyTorch. On a GPU, a decoding step is one CUDA graph and costs the host almost nothing.

A slot is a place in the batch and decodes one response. The cache holds keys and values in pages. Example:
pages of 4 tokens, two responses to the prompt `p q r s t u`, and one response to the prompt `v w`:

    slot   sampled tokens   next input   its position   pages          page   tokens of the keys and values
    0      a b              b            7              1 2            0      scratch: for empty slots
    1      c d              d            7              3 4            1      p q r s
    2      e f g            g            4              5 6            2      t u a .
                                                                       3      p q r s
                                                                       4      t u c .
                                                                       5      v w e f
                                                                       6      . . . .

A prompt is read once for all responses that begin together. Its keys and values are copied to their pages.

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
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
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


class Cache:
    """Keys and values in pages. Page 0 belongs to empty slots.

    `layers` is a tensor (layers, 2, pages, Hkv, tokens of a page, d), for Hkv heads of size d. In its second
    dimension, the keys have index 0 and the values index 1."""

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
        heads = config.num_attention_heads
        d = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = config.num_hidden_layers, 2, pages, config.num_key_value_heads, size, d
        # zeros: unwritten memory may be NaN, and attention computes 0 × NaN = NaN for a masked token
        self.layers = like.new_zeros(shape)
        self.size = size
        self.longest = longest
        self.kernel = kernel
        # table[j]: the pages of the response in slot j
        shape = slots, math.ceil(longest / size)
        self.table = torch.zeros(shape, dtype=torch.int32, device=like.device)
        self.cu_seqlens = torch.arange(slots + 1, dtype=torch.int32, device=like.device)
        self.clear()

    def clear(self) -> None:
        """Forget all responses."""
        pages = self.layers.shape[2]
        self.free = [*range(pages - 1, 0, -1)]

    def admit(self, r: Response) -> bool:
        """Give `r` pages for its prompt and the whole response. Returns False if there are too few."""
        needed = math.ceil((r.read + r.limit) / self.size)
        if needed > len(self.free):
            return False
        r.pages = self.free[-needed:]
        del self.free[-needed:]
        return True

    def copy_prompts(
        self,
        new: Sequence[Response],
        first: dict[tuple[int, ...], Response],
    ) -> None:
        """Copy the keys and values of prompts. first: prompt -> the response whose pages have them"""
        target = []
        source = []
        for r in new:
            pages = first[r.prompt].pages[: r.read // self.size + 1]
            source += pages
            target += r.pages[: len(pages)]
        pairs = np.array([target, source])
        target, source = to_device(pairs, self.table.device)
        for cached in self.layers:
            cached[:, target] = cached[:, source]

    def move(
        self,
        target: Tensor,
        source: Tensor,
        slots: int,
    ) -> None:
        """Move the responses of the slots `source` to the slots `target`. Then only the first `slots` slots
        have responses."""
        self.table[target] = self.table[source]
        self.table[slots:] = 0

    def begin(self, position: Tensor) -> None:
        """Begin a decoding step. position (R,): positions of the new tokens of the first R slots"""
        self.used = (position + 1).int()
        column = (position // self.size)[:, None]
        page = self.table[: len(position)].gather(1, column)
        self.at = page[:, 0].long(), position % self.size
        if not self.kernel:
            self.end = int(self.used.max())
            numbers = torch.arange(self.end, device=position.device)
            self.distance = position[:, None] - numbers

    def write(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
    ) -> None:
        """Store the keys and values (T, Hkv, d) of T tokens. `self.at` has two tensors (T,): the page of each
        token, and its place in the page."""
        page, place = self.at
        keys, values = self.layers[layer]
        keys[page, :, place] = key
        values[page, :, place] = value

    def read(self, layer: int) -> Tensor:
        """Returns keys and values (2, R, Hkv, tokens, d) of the responses in the first R slots."""
        table = self.table[: len(self.used)]
        pages = self.layers[layer][:, table]  # (2, R, pages of a response, Hkv, size, d)
        rows = pages.transpose(2, 3).flatten(3, 4)
        return rows[:, :, :, : self.end]

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
            keys, values = self.layers[layer].transpose(2, 3)
            return self.kernel(
                query,
                keys,
                values,
                self.cu_seqlens[: n + 1],
                self.longest,
                scaling,
                window,
                seqused_k=self.used,
                block_table=self.table[:n],
            )
        key, value = self.read(layer)
        seen = self.distance >= 0
        if window:
            seen &= self.distance < window
        mask = seen[:, None, None]
        query = query[:, :, None]
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            scale=scaling,
            enable_gqa=True,
        )
        return out[:, :, 0]


class Rows(Cache):
    """A cache whose pages are rows: page j + 1 holds the whole response of slot j. So a decoding step reads
    keys and values where they are. All slots must be filled at once, in their order."""

    def move(self, target, source, slots):
        rows = self.layers[:, :, 1:, :, : self.end]
        rows[:, :, target] = rows[:, :, source]

    def read(self, layer):
        rows = self.layers[layer][:, 1:, :, : self.end]
        return rows[:, : len(self.used)]


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


# --- the engine


class Slots:
    """The responses that are decoded, and their state on the device."""

    def __init__(self, cache: Cache, look: int) -> None:
        """look: decoding steps between two looks of the host"""
        self.cache = cache
        self.look = look
        self.count = len(cache.table)
        self.responses: list[Response] = []  # responses[j] is in slot j
        zeros = partial(torch.zeros, device=cache.table.device)
        # Of each slot: the next input, its position, and the position of the last input
        self.inputs = zeros(self.count, 3, dtype=torch.int64)
        # Of each slot and position: the uniform random number that draws the next token
        self.draws = zeros(self.count, cache.longest, dtype=torch.float64)
        # The tokens and the log-probs of the steps since the last look. fp32 holds all numbers below 2^24.
        self.recent = zeros(self.count, 2, look)
        self.step = zeros(1, dtype=torch.int64)  # number of steps since the last look
        # (batch, temperature, top_p) -> graph of a decoding step
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}

    def add(
        self,
        new: Sequence[Response],
        key: tuple[int, ...],
    ) -> None:
        """Put responses into the next free slots."""
        start = len(self.responses)
        self.responses += new
        places = slice(start, len(self.responses))
        inputs = np.zeros((len(new), 3), np.int64)
        draws = np.zeros((len(new), self.cache.longest))
        table = np.zeros((len(new), self.cache.table.shape[1]), np.int32)
        for j, r in enumerate(new):
            end = r.read + r.limit
            inputs[j] = r.prompt[-1], r.read, end - 1
            seed = *key, *r.key
            draws[j, r.read : end] = uniforms(seed, r.limit)
            table[j, : len(r.pages)] = r.pages
        device = self.inputs.device
        self.inputs[places] = to_device(inputs, device)
        self.draws[places] = to_device(draws, device)
        self.cache.table[places] = to_device(table, device)

    def drop(self, ended: Sequence[int]) -> None:
        """Free the slots `ended`, and their pages. Responses of the last slots move to them."""
        count = len(self.responses) - len(ended)
        target = [j for j in ended if j < count]
        source = sorted({*range(count, len(self.responses))} - {*ended})
        for j in ended:
            self.cache.free += self.responses[j].pages
        for hole, last in zip(target, source, strict=True):
            self.responses[hole] = self.responses[last]
        del self.responses[count:]
        moves = np.array([target, source], np.int64)
        target, source = to_device(moves, self.inputs.device)
        for x in (self.inputs, self.draws, self.recent):
            x[target] = x[source]
        self.inputs[count:] = 0
        self.cache.move(target, source, count)

    def copy(self, slots: int) -> Callable[[], np.ndarray]:
        """Begin to copy the tokens and log-probs of the first slots since the last look to the host.
        Returns a function that waits for the copy and returns it: (slots, 2, steps)."""
        copied = self.recent[:slots].to("cpu", non_blocking=True, copy=True)
        self.step.zero_()
        if not self.recent.is_cuda:
            return copied.numpy
        done = torch.cuda.current_stream().record_event()

        def read():
            done.synchronize()
            return copied.numpy()

        return read


class TorchEngine(Engine):
    def __init__(
        self,
        path,
        tokenizer,
        cfg,
        device="cpu",
        dtype=torch.float32,
    ):
        super().__init__(path, tokenizer, cfg, device, dtype)
        self.policy.to(dtype).requires_grad_(False)
        self.policy.allocate(device)
        flash = self.device.type == "cuda" and dtype != torch.float32  # it takes bf16 and fp16
        self.kernel = paged_kernel() if flash else None
        self.page = configs.KV_PAGE if flash else 0  # tokens of a page; 0: rows
        self.look = LOOK
        self.slots = None
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
    def generate(
        self,
        requests,
        limits,
        temperature,
        key,
        version,
        top_p=1.0,
    ):
        self.check(version)
        waiting = deque()
        for k, prompt in requests.items():
            waiting.append(Response(k, tuple(prompt), limits[k]))
        if not waiting:
            return
        # Whether a token may end a response. For most tokens it is false, which saves the host's time.
        self.may_end = self.may_stop.copy()
        self.may_end[list(self.eos)] = True
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
                ids = np.array(r.ids, np.int32)
                logp = np.array(r.logp, np.float32)
                yield self.sample(r.key, r.prompt, ids, logp, r.stopped)

    def _allocate(self, waiting):
        """Returns the Slots for the requests. With pages, they are allocated once, and keep their graphs
        until the engine sleeps."""
        like = self.policy.lm_head.weight
        if not self.page:
            count = min(self.cfg.max_num_seqs, len(waiting))
            longest = max(len(r.prompt) + r.limit for r in waiting)
            cache = Rows(
                self.config,
                pages=1 + count,
                size=longest,
                slots=count,
                longest=longest,
                like=like,
            )
            return Slots(cache, 1)
        if self.slots is None:
            count = self.cfg.max_num_seqs
            longest = self.cfg.engine_len
            pages = self._pages(1 + count * math.ceil(longest / self.page))
            cache = Cache(
                self.config,
                pages=pages,
                size=self.page,
                slots=count,
                longest=longest,
                like=like,
                kernel=self.kernel,
            )
            self.slots = Slots(cache, self.look)
        self.slots.responses = []
        return self.slots

    def _pages(self, wanted):
        """Returns the number of pages: as many as wanted, if --engine_share has room for them."""
        if self.device.type != "cuda":
            return wanted
        config = self.config
        like = torch.empty(0, dtype=self.dtype, device="meta")
        page = Cache(config, 1, self.page, 1, 1, like).layers.nbytes
        weights = sum(p.nbytes for p in self.policy.parameters())
        sampler = 4 * configs.SAMPLER_COPIES * self.cfg.max_num_seqs * config.vocab_size
        memory = torch.cuda.mem_get_info(self.device)[1]
        room = self.cfg.engine_share * memory - weights - sampler
        return max(1, min(wanted, int(room) // page))

    def _fill(self, slots, waiting, key):
        """Move waiting requests to free slots, as far as the cache has room. On a CPU, wait until all slots
        are free, because a prefill costs as much as a decoding step of the whole batch."""
        cache = slots.cache
        if not slots.responses:
            cache.clear()
        elif not self.page:
            return
        free = slots.count - len(slots.responses)
        new = []
        first = {}  # prompt -> the response for which it is read
        while waiting and len(new) < free and cache.admit(waiting[0]):
            r = waiting.popleft()
            new.append(r)
            first.setdefault(r.prompt, r)
        if new:
            self._prefill(cache, first.values())
            cache.copy_prompts(new, first)
            slots.add(new, key)
        elif not slots.responses and waiting:
            r = waiting[0]
            raise RuntimeError(
                f"the KV cache has no room for {len(r.prompt) + r.limit} tokens; needed: a "
                "larger --engine_share, or a smaller --max_response_len"
            )

    def _prefill(self, cache, responses):
        """Compute the keys and values of prompts, in packs of --pack_len tokens."""
        pack = []
        size = 0
        for r in responses:
            if size + r.read > self.cfg.pack_len:
                self._prefill_pack(cache, pack)
                pack = []
                size = 0
            pack.append(r)
            size += r.read
        self._prefill_pack(cache, pack)

    def _prefill_pack(self, cache, pack):
        pack = [r for r in pack if r.read]
        if not pack:
            return
        tokens = []
        position = []
        page = []
        ends = [0]
        for r in pack:
            tokens += r.prompt[:-1]
            position += range(r.read)
            pages = np.repeat(r.pages, cache.size)
            page += pages[: r.read].tolist()
            ends.append(len(tokens))
        values = np.array([tokens, position, page])
        tokens, position, page = to_device(values, self.device)
        cache.at = page, position % cache.size
        cu_seqlens = to_device(np.array(ends, np.int32), self.device)
        longest = max(r.read for r in pack)
        self.policy.hidden(
            tokens[None],
            position[None],
            segments=Segments(cu_seqlens, longest),
            cache=cache,
        )

    def _decode(self, slots, temperature, top_p):
        """Run the decoding steps up to the next look."""
        batch = len(slots.responses)
        if self.page:  # few batch sizes, because each has a graph: 1, 2, 4, …
            power = (batch - 1).bit_length()
            batch = min(slots.count, 2**power)
        call = batch, temperature, top_p
        for _ in range(slots.look):
            if call in slots.graphs:
                slots.graphs[call].replay()
                continue
            # A capture can't load kernels, so the first step of a batch size runs without a graph.
            self._step(slots, *call)
            if self.kernel:
                slots.graphs[call] = self._capture(slots, call)

    def _capture(self, slots, call):
        """Returns the graph of a decoding step. Nothing is computed."""
        graph = torch.cuda.CUDAGraph()
        graphs = list(slots.graphs.values())
        pool = graphs[0].pool() if graphs else None
        # "thread_local": other threads may use the GPU during the capture
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            self._step(slots, *call)
        return graph

    def _step(self, slots, batch, temperature, top_p):
        """Sample the next token of the first `batch` slots."""
        token, position, last = slots.inputs[:batch].T
        cache = slots.cache
        cache.begin(position)
        places = position[:, None]
        hidden = self.policy.hidden(token[:, None], places, cache=cache)
        logits = self.policy.lm_head.logits(hidden[:, 0])
        draws = slots.draws[:batch].gather(1, places)
        sampled, logp = sample_token(logits, draws[:, 0], temperature, top_p)
        pair = torch.stack([sampled.float(), logp], 1)
        slots.recent[:batch].index_copy_(2, slots.step, pair[:, :, None])
        slots.step += 1
        token.copy_(sampled)
        # Past its end, a response stays in its pages.
        position.copy_(torch.minimum(position + 1, last))

    def _look(self, slots, recent):
        """Append the sampled tokens to their responses. Returns the responses that have ended. Their slots
        and pages are then free. recent: see Slots.copy."""
        ended = []  # slots
        ids = recent[:, 0].astype(np.int64)
        may_end = self.may_end[ids].any(1).tolist()
        logps = recent[:, 1].tolist()
        for slot, tokens in enumerate(ids.tolist()):
            r = slots.responses[slot]
            r.ids += tokens
            r.logp += logps[slot]
            if may_end[slot] or len(r.ids) >= r.limit:
                if self._ends(r, len(tokens)):
                    ended.append(slot)
        responses = [slots.responses[slot] for slot in ended]
        if ended:
            slots.drop(ended)
        return responses

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
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


# --- sampling


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Returns the logits (B, V), with -inf outside the nucleus (arXiv 1904.09751): the fewest tokens whose
    probabilities sum to `top_p` or more."""
    if top_p == 1:
        return logits
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1, torch.float64)
    outside = probs.cumsum(-1) - probs >= top_p
    outside = outside.scatter(-1, order, outside)
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
        token = logp.argmax(-1, keepdim=True)
    else:
        if temperature != 1:  # the tensors of a large batch are large, so none is made without need
            logits = logits / temperature
        logp = nucleus(logits, top_p).log_softmax(-1)
        cumulative = logp.exp().double()
        cumulative = torch.cumsum(cumulative, -1, out=cumulative)
        wanted = u[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, wanted, right=True)
        token = token.clamp(max=logits.shape[1] - 1)  # a rounding error could give the index V
    return token[:, 0], logp.gather(1, token)[:, 0]


def uniforms(key: tuple[int, ...], count: int) -> np.ndarray:
    """Returns `count` uniform random numbers in [0, 1). A larger count gives the same numbers, then more."""
    bits = np.random.Philox(np.random.SeedSequence(key))
    return np.random.Generator(bits).random(count)
