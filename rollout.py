"""Sampling: two engines with one interface, grading as responses finish, and evaluation.

    with engine.awake(full_weights(policy), version=step):
        samples = rollout(engine, grader, {slot: problem, …}, n=8, key=(seed, step), …)

    python rollout.py MODEL DATA [DATA …] [--eval_samples 16] [--template chat] …    # evaluate any Hugging Face folder
    torchrun --nproc-per-node 8 rollout.py MODEL DATA …                              # on 8 GPUs; flags as in train.py

`TorchEngine` is plain PyTorch with a static KV cache and needs nothing else: the default on a CPU. `VLLMEngine` lives
inside the training rank, has the device while it is awake and gives it back asleep. All contact with vLLM is here.

Weights come only through `awake`, each exactly once, and `generate` refuses to run on any other version than it is told:
stale weights are the costliest silent fault of such systems. `selfcheck` proves before the first step that what is synced
is what speaks. Randomness is counted: a sample depends on (key, slot, index) and on nothing that was drawn before it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs import Config, UserError, need, parse
from data import Problem, Sample, by_prompt
from model import Policy, Segments, load_config, logits_fp32
from reward import KINDS, Grader

TRAIN, EVAL, CHECK = 1, 2, 3  # streams of randomness


# --- memory


@dataclass(frozen=True)
class Row:
    """A line of the ledger, in GiB."""

    held: float  # of the device, by everyone; on a CPU: of the host, by this process
    free: float
    allocated: float  # by torch's tensors; a sleeping engine's are counted, though nothing backs them
    reserved: float  # by torch's allocator
    seconds: float  # since the line before


class Ledger:
    """What the device holds at each transition of an engine's last wake, and what the engine keeps of it asleep. Made before
    the engine is."""

    def __init__(self, device: torch.device | str) -> None:
        self.device, self.rows, self.at = torch.device(device), {}, time.perf_counter()
        self.bytes = 0  # of the weights that came
        self.mark("before")
        self.residual, self.least = 0.0, float("inf")  # GiB; the least is of all wakes

    def mark(self, stage: str) -> None:
        """Note what is held now that `stage` is done. Waits for the device."""
        allocated = reserved = 0.0
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            held, allocated, reserved = total - free, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        else:
            now, page = Path("/proc/self/statm"), os.sysconf("SC_PAGE_SIZE")
            if now.is_file():
                held, free = int(now.read_text().split()[1]) * page, os.sysconf("SC_AVPHYS_PAGES") * page
            else:  # not Linux: the peak
                held, free = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
        was, self.at = self.at, time.perf_counter()
        self.rows[stage] = Row(*(x / 2**30 for x in (held, free, allocated, reserved)), self.at - was)

    def begin(self) -> None:
        """A wake begins: what torch has cached goes back to the device, and what the trainer still holds is noted."""
        free_cache(self.device)
        self.rows.clear()
        self.mark("trainer")

    def end(self) -> None:
        """The engine sleeps again: what is held more than before it woke (at first: before it was made) it has kept."""
        first = next(iter(self.rows.values()))
        free_cache(self.device)
        self.mark("asleep")
        self.residual += self.rows["asleep"].held - first.held

    def metrics(self) -> dict[str, float]:
        """The last wake in numbers (GiB, seconds)."""
        seconds = {stage: row.seconds for stage, row in self.rows.items()}
        return {f"mem/{stage}_gb": self.rows[stage].held for stage in ("trainer", "awake", "asleep")} | {
            "mem/residual_gb": self.residual, "time/wake": seconds.get("weights", 0.0) + seconds["awake"],
            "time/sync": seconds["sync"], "time/sleep": seconds["asleep"]}

    def table(self) -> str:
        """The last wake, a line a transition."""
        lines = ["memory (GiB)    held    free   torch: allocated  reserved   seconds"]
        lines += [f"  {stage:10} {r.held:9.3f} {r.free:7.2f} {r.allocated:18.3f} {r.reserved:9.3f} {r.seconds:9.3f}"
                  for stage, r in self.rows.items()]
        return "\n".join([*lines, f"  kept by the engine asleep: {self.residual:.3f}"])

    def news(self, residual: float) -> str:
        """A warning at each GiB by which `residual` (mem/residual_gb) has outgrown its least."""
        grown = residual - self.least
        self.least = min(self.least, residual) if grown < 1 else residual
        return "" if grown < 1 else (
            f"the sleeping engine keeps {residual:.1f} GiB of the device, {grown:.1f} more than it did: it will run out of "
            "memory; smaller --engine_share or --pack_len leave it more room, and the same command again starts afresh "
            "from the last checkpoint; --verbose shows where it grows")


def free_cache(device: torch.device) -> None:
    """Give what torch's allocator has cached back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- what both engines share


class Engine:
    """What both engines share: versions, what must arrive, what ends a response, and how a Sample is made."""

    def __init__(self, path: str, tokenizer: Any, cfg: Config, device: torch.device | str, dtype: torch.dtype) -> None:
        self.tokenizer, self.cfg, self.dtype = tokenizer, cfg, dtype
        self.config = load_config(path)
        with torch.device("meta"):
            self.names = [n for n, _ in Policy(self.config).named_parameters()]
        self.eos = eos_ids(path, tokenizer, self.config)
        self.version: int | None = None  # of the weights it holds; None while asleep
        self.taken = False  # by someone's `with engine.awake`
        self.ledger = Ledger(device)
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.group, self.groups, self.place = rank // cfg.tp, world // cfg.tp, rank % cfg.tp  # engine, of how many, seat in it

    def check(self, version: int) -> None:
        """Raises RuntimeError unless the engine is awake with just these weights."""
        if self.version != version:
            raise RuntimeError(f"the engine holds weights of step {self.version} and was asked for step {version}; "
                               "generate inside `with engine.awake(full_weights(policy), version=step)`")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One wake at a time. Raises RuntimeError inside another."""
        if self.taken:
            raise RuntimeError(f"the engine is awake already, with the weights of step {self.version}; "
                               "leave that `with engine.awake(…)` first")
        self.taken = True
        self.ledger.begin()
        try:
            yield
        finally:
            self.taken = False

    def arriving(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights as they come, ticked off. Raises RuntimeError for one that comes twice or is none of the model's."""
        self.missing, self.ledger.bytes = dict.fromkeys(self.names), 0
        for name, tensor in weights:
            if name not in self.missing:
                raise RuntimeError(f"{name} came twice" if name in self.names else f"the model has no parameter {name}")
            del self.missing[name]
            self.ledger.bytes += tensor.nbytes
            yield name, tensor

    def check_arrived(self) -> None:
        """Raises RuntimeError unless every parameter of the model has arrived."""
        if self.missing:
            raise RuntimeError(f"{len(self.missing)} of {len(self.names)} parameters did not come: "
                               f"{', '.join([*self.missing][:3])}{', …' * (len(self.missing) > 3)}")

    @contextlib.contextmanager
    def blamed(self, doing: str) -> Iterator[None]:
        """What fails inside is told as the engine's fault, with the ledger."""
        try:
            yield
        except Exception as e:
            words = (str(e).strip().splitlines() or [""])[0]
            fix = ""
            if isinstance(e, torch.OutOfMemoryError) or "out of memory" in words.lower():
                fix = (f"\nneeded: a smaller --engine_share ({self.cfg.engine_share}) where the trainer's state or other "
                       f"processes are in the way, fewer --max_num_seqs ({self.cfg.max_num_seqs}) where sampling itself is")
            raise RuntimeError(f"the engine failed {doing}: {type(e).__name__}: {words}\n{self.ledger.table()}{fix}") from e

    def sample(self, slot: int, index: int, prompt: Sequence[int], ids: np.ndarray, logp: np.ndarray,
               stopped: bool) -> Sample:
        """The Sample of one finished response; its text goes without the EOS token that ended it."""
        body = ids[:-1] if len(ids) and int(ids[-1]) in self.eos else ids
        return Sample(slot, index, tuple(prompt), ids, logp, stopped, self.tokenizer.decode(body.tolist()), self.version)

    def room(self, prompt: Sequence[int], max_tokens: int) -> int:
        """Tokens that the response to `prompt` may have."""
        whole = self.cfg.model_len if max_tokens <= self.cfg.max_response_len else self.cfg.engine_len
        return min(max_tokens, whole - len(prompt))


def eos_ids(path: str, tokenizer: Any, config: Any) -> set[int]:
    """Every token that ends a response: the tokenizer's, the model's and the generation config's (base and chat models
    name different ones, and a missed one counts as a truncation)."""
    found: list[Any] = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    if (Path(path) / "generation_config.json").is_file():
        from transformers import GenerationConfig

        found.append(GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id)
    return {int(i) for f in found if f is not None for i in (f if isinstance(f, list | tuple) else [f])}


# --- plain PyTorch


class Cache:
    """Static keys and values of up to B rows, (B, Hkv, columns, d) a layer. Prompts end at one column, `width`, so all rows
    write the same column at each step; what lies left of a shorter prompt is masked."""

    def __init__(self, config: Any, most: int, lengths: Tensor, steps: int, like: Tensor) -> None:
        """Room for `most` rows of `steps` tokens after prompts of `lengths` (R,), which are the first R."""
        self.rows, self.width = len(lengths), int(lengths.max())
        self.at, columns = self.width, self.width + steps
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (most, config.num_key_value_heads, columns, head)
        # Zeros, for what is masked still enters sums: 0 times whatever the memory held before, which may be NaN.
        self.k = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.v = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.allowed: Tensor | None = None  # (B, 1, 1, columns), None where all prompts are as long
        if int(lengths.min()) < self.width:
            first = like.new_zeros(most, dtype=torch.int64).index_copy(
                0, torch.arange(self.rows, device=like.device), self.width - lengths)
            self.allowed = (torch.arange(columns, device=like.device) >= first[:, None])[:, None, None]
        self.place: tuple[Tensor, Tensor] | None = None  # while prefilling: (row, column) of each token

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Prefill: key, value (1, Hkv, T, d) to their places. Decode: (R, Hkv, 1, d) to column `at`."""
        if self.place is not None:
            row, column = self.place
            self.k[layer][row, :, column] = key[0].transpose(0, 1)
            self.v[layer][row, :, column] = value[0].transpose(0, 1)
        else:
            self.k[layer][:self.rows].select(2, self.at).copy_(key[:, :, 0])
            self.v[layer][:self.rows].select(2, self.at).copy_(value[:, :, 0])

    def read(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values up to column `at`, and which of them a row may see."""
        n, end = self.rows, self.at + 1
        return (self.k[layer][:n, :, :end], self.v[layer][:n, :, :end],
                None if self.allowed is None else self.allowed[:n, ..., :end])

    def arrange(self, parents: Tensor) -> Tensor:
        """Go on with the rows `parents` (n,), in ascending order, one as often as it comes, and with no others. Returns the
        places (n,) they have now, the first n in some order: a row stays where it is if it can."""
        n = len(parents)
        stays = parents < n
        stays[1:] &= parents[1:] != parents[:-1]
        free = torch.ones(n, dtype=torch.bool, device=parents.device).index_fill_(0, parents[stays], False)
        source, to = parents[~stays], free.nonzero()[:, 0]
        if len(to):
            for t in (*self.k, *self.v):
                t[to, :, :self.at + 1] = t[source, :, :self.at + 1]
            if self.allowed is not None:
                self.allowed[to] = self.allowed[source]
        self.rows = n
        return parents.masked_scatter(~stays, to)


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # model types whose layers Decoder knows


class Decoder:
    """A model's decoding step in fewer operations than its modules take: one product makes query, key and value, one the gate
    and what it gates, rows lie flat. A small model on a CPU spends half its time between operations. Model types that aren't
    known here go through their modules."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.layers = policy, []
        rope = getattr(policy.config, "rope_parameters", None) or {}
        if policy.config.model_type in LLAMA_LIKE and rope.get("rope_type", "default") not in ("dynamic", "longrope"):
            for layer in policy.model.layers:
                a, m = layer.self_attn, layer.mlp
                self.layers.append((layer, a, m, joined(a.q_proj, a.k_proj, a.v_proj), joined(m.gate_proj, m.up_proj)))

    def begin(self, positions: int) -> None:
        """Make the rotations of as many positions."""
        if self.layers:
            like = self.policy.lm_head.weight
            self.cos, sin = (x[0, :, None] for x in self.policy.model.rotary_emb(  # (positions, 1, d)
                like, torch.arange(positions, device=like.device)[None]))
            first, second = sin.chunk(2, -1)
            self.sin = torch.cat([-first, second], -1)

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Last hidden states (B, D) of tokens (B,) at positions (B,), whose keys and values go to the cache's column `at`."""
        if not self.layers:
            return self.policy.hidden(tokens[:, None], positions[:, None], cache=cache)[:, 0]
        model = self.policy.model
        x = F.embedding(tokens, model.embed_tokens.weight)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        for i, (layer, a, m, qkv, gate_up) in enumerate(self.layers):
            heads = F.linear(normed(layer.input_layernorm, x), *qkv).view(len(x), -1, a.head_dim)
            kv = cache.k[i].shape[1]
            if hasattr(a, "q_norm"):
                heads = torch.cat([normed(a.q_norm, heads[:, :-2 * kv]), normed(a.k_norm, heads[:, -2 * kv:-kv]),
                                   heads[:, -kv:]], 1)
            qk = heads[:, :-kv]
            qk = torch.addcmul(qk * cos, qk.roll(a.head_dim // 2, -1), sin)
            cache.write(i, qk[:, -kv:, None], heads[:, -kv:, None])
            key, value, allowed = cache.read(i)
            # Products of batches, which for one query a row are faster on a CPU than scaled_dot_product_attention.
            scores = (qk[:, :-kv] * a.scaling).view(len(x), kv, -1, a.head_dim) @ key.transpose(2, 3)  # (R, Hkv, H / Hkv, L)
            if allowed is not None:
                scores.masked_fill_(~allowed, -torch.inf)
            out = scores.softmax(-1, torch.float32).to(x.dtype) @ value
            x = x + F.linear(out.view(len(x), -1), a.o_proj.weight, a.o_proj.bias)
            gate, up = F.linear(normed(layer.post_attention_layernorm, x), *gate_up).chunk(2, -1)
            x = x + F.linear(m.act_fn(gate) * up, m.down_proj.weight, m.down_proj.bias)
        return normed(model.norm, x)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """x by an RMSNorm of Hugging Face's, in one call."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def joined(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of linears over the same input, one below the other; the linears' own become views of them."""
    weight = torch.cat([each.weight for each in linears])
    bias = None if linears[0].bias is None else torch.cat([each.bias for each in linears])
    sizes = [len(each.weight) for each in linears]
    for each, part in zip(linears, weight.split(sizes), strict=True):
        each.weight = nn.Parameter(part, requires_grad=False)
    for each, part in zip(linears, bias.split(sizes) if bias is not None else (), strict=bias is not None):
        each.bias = nn.Parameter(part, requires_grad=False)
    return weight, bias


class TorchEngine(Engine):
    """Batched decoding in waves of `max_num_seqs` responses, longest prompts first. A row of the batch is a prefix: a prompt is
    one row for all its samples, and they part where their tokens do; finished rows are dropped as the batch thins out."""

    def __init__(self, path: str, tokenizer: Any, cfg: Config, device: torch.device | str = "cpu",
                 dtype: torch.dtype = torch.float32) -> None:
        super().__init__(path, tokenizer, cfg, device, dtype)
        with torch.device("meta"):
            policy = Policy(self.config)
        self.policy = policy.to(dtype).to_empty(device=device).requires_grad_(False).eval()
        self.policy.tie()
        self.policy.model.rotary_emb = type(self.policy.model.rotary_emb)(self.config).to(device)
        self.decoder = Decoder(self.policy)
        self.device = device
        self.ends = torch.tensor(sorted(self.eos), device=device)
        self.may_stop = torch.tensor(_may_end(tokenizer, self.config.vocab_size, cfg.stop), device=device)
        self.ledger.end()

    @contextlib.contextmanager
    def awake(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[TorchEngine]:
        """Take the weights (name, whole tensor), every one of them once, and be able to generate while inside. Raises
        RuntimeError for weights that are missing, doubled or unknown, and inside another `awake`."""
        with self.turn():
            have = dict(self.policy.named_parameters())
            with torch.no_grad():
                for name, tensor in self.arriving(weights):
                    have[name].copy_(tensor)
            self.check_arrived()
            self.ledger.mark("sync")
            self.ledger.mark("awake")
            self.version = version
            try:
                yield self
            finally:
                self.version = None
                self.ledger.mark("sampled")
                self.ledger.end()

    @torch.inference_mode()
    def generate(self, prompts: Mapping[int, Sequence[int]], n: int, temperature: float, max_tokens: int,
                 key: tuple[int, ...], version: int) -> Iterator[Sample]:
        """`n` responses to each prompt (slot -> tokens), in the order in which they finish. temperature 0 is greedy.
        Raises RuntimeError on stale weights."""
        self.check(version)
        rows = [(slot, i) for slot in sorted(prompts, key=lambda s: (-len(prompts[s]), s)) for i in range(n)]
        for first in range(0, len(rows), self.cfg.max_num_seqs):
            yield from self._wave(rows[first:first + self.cfg.max_num_seqs], prompts, temperature, max_tokens, key)

    def _wave(self, rows: list[tuple[int, int]], prompts: Mapping[int, Sequence[int]], temperature: float,
              max_tokens: int, key: tuple[int, ...]) -> Iterator[Sample]:
        room = torch.tensor([self.room(prompts[s], max_tokens) for s, _ in rows], device=self.device)
        steps = int(room.max())
        draws = torch.from_numpy(np.stack([uniforms((*key, *row), steps) for row in rows])).to(self.device)
        cache, where, hidden = self._prefill([s for s, _ in rows], prompts, steps)
        lengths = torch.tensor([len(prompts[s]) for s, _ in rows], device=self.device)
        ids = torch.zeros(len(rows), steps, dtype=torch.int32, device=self.device)
        logp = torch.zeros(len(rows), steps, device=self.device)
        running, least = torch.ones(len(rows), dtype=torch.bool, device=self.device), int(room.min())
        left, vocabulary = len(rows), self.config.vocab_size
        self.decoder.begin(int(lengths.max()) + steps)
        for t in range(steps):
            scores = logits_fp32(hidden, self.policy.lm_head.weight)
            token, lp = choose(scores if where is None else scores[where], draws[:, t], temperature)
            ids[:, t], logp[:, t] = token, lp
            stopped = self._stopped(token, ids, t) & running
            done = stopped if t + 1 < least else stopped | (running & (room == t + 1))
            if done.any():
                at = done.nonzero()[:, 0]
                ended = (x[at, :t + 1].cpu().numpy() for x in (ids, logp))
                for j, whole, its, mine in zip(at.tolist(), stopped[at].tolist(), *ended, strict=True):
                    slot, index = rows[j]
                    yield self.sample(slot, index, prompts[slot], its, mine, whole)
                running = running & ~done
                left = int(running.sum())
                if left == 0:
                    return
            if where is not None or left <= 0.9 * len(running):  # moving rows costs a little: when a tenth has gone
                stay = running.nonzero()[:, 0]
                came = stay if where is None else where[stay]
                distinct, which = (came * vocabulary + token[stay]).unique(return_inverse=True)
                where = cache.arrange(distinct // vocabulary)[which]
                if len(distinct) == len(stay):  # from now on each has a row of its own: in its order
                    stay, where = stay[where.argsort()], None
                if len(stay) < len(running) or where is None:
                    rows = [rows[j] for j in stay.tolist()]
                    ids, logp, draws, room, lengths, token, running = (
                        x[stay] for x in (ids, logp, draws, room, lengths, token, running))
            fed = token, lengths + t
            if where is not None:
                fed = (x.new_empty(cache.rows).index_copy(0, where, x) for x in fed)
            cache.at = cache.width + t
            hidden = self.decoder.step(*fed, cache)

    def _prefill(self, slots: list[int], prompts: Mapping[int, Sequence[int]], steps: int) -> tuple[Cache, Tensor, Tensor]:
        """The cache with the distinct prompts, each computed once; which of its rows is each of `slots`; their last hidden
        states (R, D)."""
        unique = list(dict.fromkeys(slots))
        lengths = torch.tensor([len(prompts[s]) for s in unique], device=self.device)
        cache = Cache(self.config, len(slots), lengths, steps, self.policy.lm_head.weight)
        last, pending, tokens = [], [], 0
        for r, s in enumerate(unique):
            pending.append((r, prompts[s]))
            tokens += len(prompts[s])
            if tokens >= self.cfg.pack_len or r == len(unique) - 1:
                last.append(self._prefill_pack(cache, pending))
                pending, tokens = [], 0
        cache.place = None
        return cache, torch.tensor([unique.index(s) for s in slots], device=self.device), torch.cat(last)

    def _prefill_pack(self, cache: Cache, prompts: list[tuple[int, Sequence[int]]]) -> Tensor:
        lengths = [len(p) for _, p in prompts]
        ends = torch.tensor(lengths).cumsum(0)
        cu = torch.cat([torch.zeros(1), ends]).int().to(self.device)
        row = torch.cat([torch.full((len(p),), r) for r, p in prompts])
        column = torch.cat([torch.arange(cache.width - len(p), cache.width) for _, p in prompts])
        cache.place = (row.to(self.device), column.to(self.device))
        tokens = torch.cat([torch.tensor(p) for _, p in prompts]).to(self.device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(self.device)
        hidden = self.policy.hidden(tokens[None], positions[None], segments=Segments(cu, max(lengths)), cache=cache)[0]
        return hidden[ends.to(self.device) - 1]

    def _stopped(self, token: Tensor, ids: Tensor, t: int) -> Tensor:
        """(B,) whether EOS or a stop string has just been completed. Text is looked at only where a token could do so."""
        stopped = torch.isin(token, self.ends)
        for j in (self.may_stop[token] & ~stopped).nonzero()[:, 0].tolist() if self.cfg.stop else ():
            tail = self.tokenizer.decode(ids[j, max(0, t - 31):t + 1].tolist())
            before = self.tokenizer.decode(ids[j, max(0, t - 31):t].tolist())
            stopped[j] = any(tail.count(s) > before.count(s) for s in self.cfg.stop)
        return stopped


def choose(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Token (B,) drawn from softmax(logits / temperature) by the uniforms u (B,), by inverting the cumulative
    distribution, and its log-prob there; temperature 0 takes the likeliest."""
    if temperature == 0:
        logp = logits.log_softmax(-1)
        token = logp.argmax(-1)
    else:
        logp = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
        cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
        token = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
        token = token.clamp(max=logits.shape[1] - 1)
    return token, logp.gather(1, token[:, None])[:, 0]


def uniforms(key: tuple[int, ...], count: int) -> np.ndarray:
    """(count,) uniforms in [0, 1) that depend on the key alone; a longer draw begins with the shorter one."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)


def _may_end(tokenizer: Any, vocabulary: int, stop: Sequence[str]) -> list[bool]:
    """For each token, whether some stop string can end inside its text."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))]) + [""] * (vocabulary - len(tokenizer))
    tails = [s[i:] for s in stop for i in range(len(s))]
    return [any(s in t for s in stop) or any(t.startswith(tail) for tail in tails) for t in texts[:vocabulary]]


# --- vLLM


class VLLMEngine(Engine):
    """vLLM inside the rank. `awake` owns the choreography: only it wakes the engine and gives it weights, and only `_sleep`
    puts it to sleep, at level 2, which keeps none: they come anew each step. For vLLM 0.26 to 0.32."""

    def __init__(self, path: str, tokenizer: Any, cfg: Config, device: torch.device | str = "cpu",
                 dtype: torch.dtype = torch.float32) -> None:
        super().__init__(path, tokenizer, cfg, device, dtype)
        LLM = _import_vllm()
        memory = (dict(gpu_memory_utilization=cfg.engine_share, enable_sleep_mode=True) if self.ledger.device.type == "cuda"
                  else dict(kv_cache_memory_bytes=2**28, enforce_eager=True))  # compiling takes a CPU minutes
        rng = torch.get_rng_state()
        with self.blamed("to start"), contextlib.nullcontext() if cfg.verbose else _muted():
            self.llm = LLM(model=path, dtype=str(dtype).removeprefix("torch."), max_model_len=cfg.engine_len,
                           max_num_seqs=cfg.max_num_seqs, seed=self.group, tensor_parallel_size=cfg.tp,
                           distributed_executor_backend="external_launcher", logprobs_mode="processed_logprobs",
                           load_format="dummy", enable_prefix_caching=True, disable_log_stats=True, **memory)
        torch.set_rng_state(rng)  # LLM() reseeds every generator
        self._sleep()

    @contextlib.contextmanager
    def awake(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[VLLMEngine]:
        """Take the weights (name, whole tensor), every one of them once, and be able to generate while inside. Raises
        RuntimeError for weights that are missing, doubled or unknown, and inside another `awake`."""
        with self.turn():
            try:
                with self.blamed(f"to take the weights of step {version}"):
                    self.llm.wake_up(tags=["weights"])
                    self.ledger.mark("weights")
                    # vLLM takes a tied embedding in only at the very end, when FSDP has long freed what was yielded; and any
                    # embedding or head whose rows it pads, for it waits for rows that never come.
                    late = ("embed_tokens.weight", "lm_head.weight")
                    held = self.config.tie_word_embeddings or self.config.vocab_size % (64 * self.cfg.tp)
                    stream = ((n, t.clone() if held and n.endswith(late) else t) for n, t in self.arriving(weights))
                    self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
                    self.check_arrived()
                    self.llm.apply_model(_repack_tied_head)
                    free_cache(self.ledger.device)  # what was gathered, for the KV cache needs the room
                    self.ledger.mark("sync")
                    self.llm.wake_up(tags=["kv_cache"])
                    if self.llm.reset_prefix_cache() is False:
                        raise RuntimeError("vLLM would not forget its cached prefixes")
                    assert not self.llm.llm_engine.is_sleeping(), "vLLM did not wake"
                    self.ledger.mark("awake")
                self.version = version
                yield self
            except BaseException:
                with contextlib.suppress(Exception):  # what failed first is what to tell
                    self._sleep()
                raise
            self._sleep()

    def _sleep(self) -> None:
        """Drop requests, give the memory back, and note what was kept. An engine that has woken in part only, for something
        failed, can't: it is left as it is."""
        self.version = None
        self.ledger.mark("sampled")
        engine = self.llm.llm_engine
        with self.blamed("to fall asleep"):
            if engine.has_unfinished_requests():
                # Its own names for them, which newer versions tell apart from the caller's.
                own = {"internal": True} if "internal" in inspect.signature(engine.abort_request).parameters else {}
                engine.abort_request(list(engine.output_processor.request_states), **own)
            if not engine.is_sleeping():
                self.llm.sleep(level=2)
                assert engine.is_sleeping(), "vLLM did not fall asleep"
        self.ledger.end()

    def generate(self, prompts: Mapping[int, Sequence[int]], n: int, temperature: float, max_tokens: int,
                 key: tuple[int, ...], version: int) -> Iterator[Sample]:
        """`n` responses to each prompt (slot -> tokens), a prompt's as soon as all are done. temperature 0 is greedy.
        Raises RuntimeError on stale weights."""
        from vllm import SamplingParams

        self.check(version)
        slots = sorted(prompts, key=lambda s: (-len(prompts[s]), s))  # longest first: it would end last
        drawn = n if temperature else 1  # vLLM takes greedy requests one by one, and they all say the same
        params = [SamplingParams(
            n=drawn, temperature=temperature, seed=int(np.random.SeedSequence((*key, s)).generate_state(1, np.uint32)[0]),
            max_tokens=self.room(prompts[s], max_tokens), stop=list(self.cfg.stop), stop_token_ids=sorted(self.eos),
            logprobs=0, flat_logprobs=True, skip_special_tokens=False) for s in slots]
        ids = self.llm.enqueue([{"prompt_token_ids": list(prompts[s])} for s in slots], params, use_tqdm=False)
        slot_of = {i.partition("-")[0]: s for i, s in zip(ids, slots, strict=True)}  # outputs lack the "-uuid" of newer ids
        mine = set(sorted(slots)[self.place::self.cfg.tp])  # the ranks of one engine see all and share out what is kept
        engine, began = self.llm.llm_engine, time.monotonic()
        while engine.has_unfinished_requests():
            with self.blamed(f"to sample with the weights of step {version}"):
                outs = engine.step()
                if time.monotonic() - began > 0.9 * self.cfg.stall_limit:  # just before dist.watch, which knows less
                    left, limit = engine.get_num_unfinished_requests(), self.cfg.stall_limit
                    raise TimeoutError(f"{left} of {drawn * len(slots)} responses have not ended "
                                       f"after {time.monotonic() - began:.0f} s (--stall_limit {limit:g})")
            for out in outs:
                slot = slot_of[out.request_id]
                if not out.finished or slot not in mine:
                    continue
                for o in out.outputs:
                    tokens = np.array(o.token_ids, dtype=np.int32)
                    for index in (o.index,) if temperature else range(n):
                        yield self.sample(slot, index, prompts[slot], tokens, _sampled_logprobs(o.logprobs, tokens),
                                          o.finish_reason == "stop")


def _import_vllm() -> Any:
    """vLLM's LLM class, set up for life inside a training rank before it is first imported."""
    for k, v in dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1",
                     TOKENIZERS_PARALLELISM="false").items():
        os.environ.setdefault(k, v)
    if not torch.cuda.is_available():  # a compile of 13 s hides in the first call; the environment was read long ago
        torch._dynamo.config.disable = True
    try:
        from vllm import LLM
    except ImportError as e:
        raise UserError(f"--engine vllm, and vllm can't be imported ({str(e).splitlines()[0][:80]}); needed: "
                         "pip install -r requirements.txt, or --engine torch") from None
    return LLM


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """vLLM's loading bars and native warnings go nowhere; --verbose lets them through."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        for fd, old in zip((1, 2), saved, strict=True):
            os.dup2(old, fd)
            os.close(old)


def _repack_tied_head(model: Any) -> None:
    """vLLM's CPU build keeps a packed copy of a tied head, which a reload leaves stale, silently."""
    head = getattr(model, "lm_head", None)
    if head is not None and head.weight is model.model.embed_tokens.weight and head.weight.device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)


def _sampled_logprobs(logprobs: Any, tokens: np.ndarray) -> np.ndarray:
    """(L,) log-probs of the sampled tokens, which stand first at each position of vLLM's flat list."""
    flat = np.array(logprobs.logprobs, dtype=np.float32)
    starts = np.array(logprobs.start_indices)
    assert (np.array(logprobs.token_ids)[starts] == tokens).all()
    return flat[starts]


# --- is it the trainer's policy that speaks?

CHECK_TOKENS = 16  # a response
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # mean |engine - trainer| log-prob, nats a token


def check_prompts(problems: Sequence[Problem], cfg: Config) -> dict[int, list[int]]:
    """A few prompts for `selfcheck`, by slot: four problems, and one of many laid end to end, so long that it fills blocks of a
    prefix cache (16 tokens on GPUs, 128 in vLLM's CPU build)."""
    most = max(1, cfg.model_len - CHECK_TOKENS)
    long = itertools.islice(itertools.cycle([i for p in problems[:64] for i in p.ids]), min(300, most))
    return dict(enumerate([*(list(p.ids)[:most] for p in problems[:4]), list(long)]))


def selfcheck(engine: Engine, weights: Callable[[], Iterable[tuple[str, Tensor]]],
              logprobs: Callable[[list[Sample], float], Tensor], prompts: Mapping[int, Sequence[int]]) -> tuple[str, float]:
    """What is wrong with the engine, or "", and the largest mean |engine - trainer| log-prob in nats.

    Greedy and sampled responses to the prompts (slot -> tokens): after a first sync; after sleeping and waking; to the prompts
    read backwards, new to a prefix cache, after a sync of halved weights; and to those after one of the right weights. The
    engine's log-probs must be the trainer's, `logprobs(samples, temperature)` (total tokens,), except that halved weights must
    change them. `weights()` is the stream that `awake` takes. All ranks run all of it, whatever they find. What is drawn here
    hangs on a key of its own, so the run is what it is without.
    """
    cfg, limit, gaps = engine.cfg, TOLERANCE[engine.dtype], [0.0]
    temperatures = {"greedy": 0.0, "sampled": cfg.temperature}

    backwards = {slot: list(prompt)[::-1] for slot, prompt in prompts.items()}

    def hear(prompts: Mapping[int, Sequence[int]], scale: float = 1.0) -> dict[str, tuple[list[Sample], list[float]]]:
        """Responses and each one's mean gap to the trainer's unscaled weights, greedy and sampled."""
        stream = weights() if scale == 1 else ((n, t * scale) for n, t in weights())
        with engine.awake(stream, version=-1):
            said = {kind: sorted(engine.generate(prompts, 1, t, CHECK_TOKENS, (cfg.seed, CHECK), -1), key=lambda s: s.slot)
                    for kind, t in temperatures.items()}
        return {kind: (samples, gaps_of(samples, logprobs(samples, temperatures[kind] or 1.0)))
                for kind, samples in said.items()}

    def differ(when: str, heard: dict, causes: str) -> str:
        for kind, (samples, gap) in heard.items():
            lengths = [len(s.ids) for s in samples]
            mean = float(np.average(gap, weights=lengths)) if samples else 0.0
            gaps[0] = max(gaps[0], mean)
            if not mean <= limit:  # nor where it is not a number
                worst = int(np.argmax(gap))
                if kind == "sampled":  # and greedy was right
                    causes = f"another temperature than {cfg.temperature:g} in the engine, or top-p or top-k"
                text = engine.tokenizer.decode(list(samples[worst].prompt))[-40:]
                return (f"{when}, engine and trainer differ by {mean:.3g} nats a token on {kind} responses (may: {limit:g}), "
                        f"by {gap[worst]:.3g} after prompt {samples[worst].slot} (…{text!r}); likely causes: {causes}")
        return ""

    first, again, halved, last = hear(prompts), hear(prompts), hear(backwards, 0.5), hear(backwards)
    arrive = "weights that didn't arrive (a layer, a tied head), another dtype, a model that the engine computes otherwise"
    change = [g for _, gap in halved.values() for g in gap]
    moved = ("" if not change or np.mean(change) > limit else
             f"a sync of halved weights changed nothing (engine and trainer still agree to {np.mean(change):.3g} nats); "
             "likely cause: syncs don't reach the weights that the engine computes with")
    wrong = (differ("after the first sync", first, arrive)
             or differ("after sleeping and waking", again, "something that sleeping loses and a sync doesn't bring (buffers)")
             or other_tokens(first["greedy"][0], again["greedy"][0], limit)
             or moved or differ("after a sync of other weights and back", last,
                                "a prefix cache that was not forgotten, weights that only the first sync brings"))
    return wrong, gaps[0]


def gaps_of(samples: Sequence[Sample], logp: Tensor) -> list[float]:
    """Mean |engine - trainer| log-prob of each sample, of the trainer's (total tokens,)."""
    parts = logp.float().cpu().split([len(s.ids) for s in samples])
    return [float((p - torch.from_numpy(s.logp)).abs().mean()) for s, p in zip(samples, parts, strict=True)]


def other_tokens(before: Sequence[Sample], after: Sequence[Sample], limit: float) -> str:
    """Where two greedy runs with the same weights part, other than at a tie within `limit` nats; or nothing."""
    for a, b in zip(before, after, strict=True):
        n = min(len(a.ids), len(b.ids))
        parted = (a.ids[:n] != b.ids[:n]).nonzero()[0]
        if len(parted) and abs(float(a.logp[parted[0]] - b.logp[parted[0]])) > limit:
            t = parted[0]
            return (f"sleeping and waking changed the greedy response to prompt {a.slot} at token {t}: {a.ids[t]} "
                    f"({a.logp[t]:.3f} nats) before, {b.ids[t]} ({b.logp[t]:.3f}) after")
    return ""


# --- what the loop calls


def make_engine(path: str, tokenizer: Any, cfg: Config, device: torch.device, dtype: torch.dtype) -> Engine:
    """The engine that cfg asks for. Raises UserError where it can't be had."""
    kind = cfg.engine if cfg.engine != "auto" else "vllm" if device.type == "cuda" else "torch"
    need(kind == "vllm" or cfg.tp == 1, f"--tp {cfg.tp} with the torch engine", "--engine vllm, or --tp 1")
    known, wanted = positions(load_config(path)), cfg.engine_len
    need(wanted <= known, f"{path} knows {known:,} positions, and a prompt with its response may take {wanted:,}",
         f"smaller --max_response_len or --eval_response_len, --max_model_len {known}, or another --model")
    return (VLLMEngine if kind == "vllm" else TorchEngine)(path, tokenizer, cfg, device, dtype)


def positions(config: Any) -> float:
    """How long a sequence the model was made for, or was stretched to by its rope's factor."""
    rope = getattr(config, "rope_parameters", None) or {}
    known = getattr(config, "max_position_embeddings", None) or math.inf
    if rope.get("rope_type") in ("linear", "dynamic", "yarn"):
        known = max(known, (rope.get("original_max_position_embeddings") or known) * rope.get("factor", 1))
    return known


def make_grader(cfg: Config) -> Grader:
    """Grading processes beside this rank, with the user's own function if there is one. Raises UserError."""
    custom = cfg.reward if ":" in cfg.reward else None
    need(custom or cfg.reward in KINDS, f"no reward {cfg.reward!r}", f"--reward {', '.join(KINDS)} or path/to/file.py:function")
    try:
        return Grader(workers=cfg.grade_workers, deadline=cfg.grade_deadline, reward=custom)
    except ValueError as e:
        raise UserError(str(e)) from None


def rollout(engine: Engine, grader: Grader, problems: Mapping[int, Problem], n: int, temperature: float,
            max_tokens: int, key: tuple[int, ...], version: int, quit: Callable[[], bool] = lambda: False) -> list[Sample]:
    """`n` graded samples of each problem (slot -> problem), ordered by (slot, index). Grading goes on beside generation. None
    once `quit()`."""
    samples: dict[tuple[int, int], Sample] = {}
    for s in engine.generate({k: p.ids for k, p in problems.items()}, n, temperature, max_tokens, key, version):
        if quit():
            return []
        samples[s.slot, s.index] = s
        grader.submit((s.slot, s.index), s.text, problems[s.slot].answer, s.stopped, problems[s.slot].kind)
    grades = grader.results()
    return [replace(samples[k], reward=grades[k].reward, reason=grades[k].reason, answer=grades[k].answer)
            for k in sorted(samples)]


def share(problems: Sequence[Problem] | Mapping[int, Problem], engine: Engine) -> dict[int, Problem]:
    """This engine's part of a batch, by slot: every `engine.groups`-th, so that no engine waits long for another."""
    slots = dict(problems) if isinstance(problems, Mapping) else dict(enumerate(problems))
    return {slot: p for i, (slot, p) in enumerate(slots.items()) if i % engine.groups == engine.group}


def row_of(s: Sample, problem: Problem) -> dict:
    """A sample as people and scripts read it."""
    return dict(slot=s.slot, index=s.index, problem=problem.text, gold=problem.answer, response=s.text,
                answer=s.answer, reward=s.reward, reason=s.reason, stopped=s.stopped, tokens=len(s.ids))


# --- evaluation


def evaluate(engine: Engine, grader: Grader, problems: Mapping[int, Problem], cfg: Config, step: int, which: int = 0,
             quit: Callable[[], bool] = lambda: False) -> tuple[list[Sample], dict[str, tuple[float, int]]]:
    """Responses to the held-out problems (slot -> problem) of the `which`-th set, and metrics as (sum, count), which add up
    over ranks: avg@n, the mean of n samples; pass@k, unbiased, for k = 2, 4, … n; maj@n, of the answer that most samples
    gave. The randomness is the same at every step, so that evaluations differ by the weights alone."""
    n, temperature = (v[which % len(v)] for v in (cfg.eval_samples, cfg.eval_temperature))
    samples = rollout(engine, grader, problems, n, temperature, cfg.eval_response_len or cfg.max_response_len,
                      (cfg.seed, EVAL, which), step, quit)
    groups = by_prompt(samples)
    right = [sum(s.reward > 0 for s in g) for g in groups]
    metrics = {f"avg@{n}": (sum(s.reward for s in samples) / n, len(groups))}
    for k in sorted({2**i for i in range(1, n.bit_length())} | {n} - {1}):
        metrics[f"pass@{k}"] = sum(pass_at(k, n, c) for c in right), len(groups)
    if n > 2:
        metrics[f"maj@{n}"] = sum(majority(g) for g in groups), len(groups)
    return samples, metrics | {"response_len": (sum(len(s.ids) for s in samples), len(samples)),
                               "truncated": (sum(not s.stopped for s in samples), len(samples))}


def pass_at(k: int, n: int, right: int) -> float:
    """Chance that k of n samples, `right` of them right, hold a right one: 1 - C(n - right, k) / C(n, k)
    (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(group: Sequence[Sample]) -> float:
    """Whether the answer that most samples of one prompt gave is right; of several such answers the share that is. Samples
    without an answer don't vote."""
    votes = Counter(s.answer for s in group if s.answer is not None)
    most = [a for a, c in votes.items() if c == max(votes.values())]
    right = {s.answer for s in group if s.reward > 0}
    return sum(a in right for a in most) / len(most) if most else 0.0


REFLECTIONS = ("wait,", "recheck", "retry", "alternatively,", "however,")


def reflections(text: str) -> int:
    """How often a response takes a step back, by the words that Open-Reasoner-Zero counts."""
    text = text.lower()
    return sum(text.count(word) for word in REFLECTIONS)


def repetition(text: str) -> float:
    """How much a text repeats itself, 0 to nearly 1: 2 Σ LCP / n(n+1) over the neighbours in its suffix array, n characters
    (Open-Reasoner-Zero's score). Prefix doubling, then Kasai et al. 2001 for the LCPs."""
    n = len(text)
    if n < 2:
        return 0.0
    rank = np.unique(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32), return_inverse=True)[1]
    step = 1
    while True:
        second = np.full(n, -1)
        second[:-step or None] = rank[step:] if step < n else -1
        order = np.lexsort((second, rank))
        new = np.any([np.diff(rank[order]) != 0, np.diff(second[order]) != 0], axis=0)
        rank = np.empty(n, dtype=np.int64)
        rank[order] = np.concatenate([[0], np.cumsum(new)])
        if rank[order[-1]] == n - 1:
            break
        step *= 2
    total = common = 0
    for i in range(n):
        if rank[i] == 0:
            common = 0
            continue
        j = int(order[rank[i] - 1])
        while i + common < n and j + common < n and text[i + common] == text[j + common]:
            common += 1
        total += common
        common = max(common - 1, 0)
    return 2 * total / (n * (n + 1))


def main(argv: Sequence[str]) -> None:
    """`python rollout.py MODEL DATA [DATA …] [--flag value …]`: see the top of this file."""
    import dist
    from data import load_problems
    from log import Meter
    from model import files_weights, load_tokenizer

    paths = list(itertools.takewhile(lambda a: not a.startswith("--"), argv))
    need(len(paths) >= 2 or "--help" in argv, f"rollout.py {' '.join(argv)}", "python rollout.py MODEL DATA [DATA …] [--flags]")
    model, sets = (paths or [""])[0], paths[1:]
    argv = ["orz-7b", "--model", model, "--eval_data", *sets, *argv[len(paths):]]
    cfg = parse(argv, prog="rollout.py")
    world = dist.init(cfg.device, cfg.dtype, cfg.stall_limit)
    tokenizer = load_tokenizer(cfg.model)
    say = print if world.main else lambda text: None
    held_out = [load_problems([p], tokenizer, cfg, say) for p in cfg.eval_data]
    engine = make_engine(cfg.model, tokenizer, cfg, world.device, world.dtype)
    out = Path(cfg.out if "--out" in " ".join(argv) else Path("runs") / f"eval-{Path(cfg.model).name}")
    meter, rows = Meter(), []
    with make_grader(cfg) as grader, engine.awake(
            files_weights(cfg.model, world.device, world.dtype), version=0):
        for which, (path, problems) in enumerate(zip(cfg.eval_data, held_out, strict=True)):
            samples, scores = evaluate(engine, grader, share(problems, engine), cfg, 0, which)
            name = Path(path).stem
            for k, (total, count) in scores.items():
                meter.add(f"{name}/{k}", total, count)
            rows += dist.gather_rows([{"set": name} | row_of(s, problems[s.slot]) for s in samples])
    metrics = meter.reduce(dist.all_sum, dist.all_max)
    if world.main:
        out.mkdir(parents=True, exist_ok=True)
        (out / "samples.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
        (out / "scores.json").write_text(json.dumps(metrics, indent=1) + "\n")
        for k, v in metrics.items():
            print(f"{k:40} {v:.4g}")
        print(f"{out / 'samples.jsonl'}, {out / 'scores.json'}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as e:
        sys.exit(f"rollout.py: {e}" if os.environ.get("RANK", "0") == "0" else 2)
