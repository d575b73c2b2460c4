"""The contract of an engine, and what all engines share.

An engine samples responses with the policy's weights. The engine holds weights only inside `awake`:

    with engine.awake(full_weights(policy), version=step):
        for sample in engine.generate(requests, limits, temperature, key, version=step):
            ...  # requests: (prompt_id, sample_id) -> tokens

To add an engine, write a subclass with two methods, `load(weights)` and `generate(…)`, and add its name to
rollout.ENGINES. An engine that can give memory back also has `unload()`. The base class does the rest: it
checks that every weight came once, allows one `awake` at a time, refuses stale weights, and records memory.

Stale weights (of an earlier step) are the costliest silent fault of such systems. So an engine gets weights
only through `awake`. `generate` raises if the engine's version is not the requested version.

Randomness is counter-based: a sample is a function of (key, prompt_id, sample_id). Samples that were drawn
before do not change it."""

from __future__ import annotations

import abc
import contextlib
import operator
import os
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dist
from configs import Config
from data import Sample
from dist import Device, Weights
from model import Policy, load_config

Key = tuple[int, int]  # prompt_id and sample_id

# --- memory


@dataclass(frozen=True)
class MemoryReading:
    """Memory use at one moment. torch's own counts are not used. They include the tensors of a sleeping
    engine, which use no memory."""

    held: float  # GiB used by all processes on the GPU; on a CPU: GiB of host memory used by this process
    seconds: float  # since the previous reading


class MemoryLedger:
    """Records memory at each stage of an engine's last `awake`, in GiB. Also records the residual: the memory
    that the engine keeps while it sleeps. Make the ledger before the engine, because the first reading must
    be the memory without the engine."""

    def __init__(self, device: Device) -> None:
        self.device, self.readings, self.time = torch.device(device), {}, time.perf_counter()
        self.bytes = 0  # size of the last weights
        self.mark("before")
        self.residual, self.least_residual = 0.0, float("inf")

    def mark(self, stage: str) -> None:
        """Record memory at the end of `stage`. Waits for the device."""
        statm = Path("/proc/self/statm")
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            held = total - free
        elif statm.is_file():
            held = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        else:  # not Linux: only the peak is known
            held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before, self.time = self.time, time.perf_counter()
        self.readings[stage] = MemoryReading(held / 2**30, self.time - before)

    def begin(self) -> None:
        """Start the readings of an `awake`. Give torch's cached memory back, then record the trainer's
        memory."""
        free_cache(self.device)
        self.readings.clear()
        self.mark("trainer")

    def end(self) -> None:
        """End the readings, after the engine fell asleep. Add to the residual: memory held now minus memory
        held at the first reading."""
        before = next(iter(self.readings.values()))
        free_cache(self.device)
        self.mark("asleep")
        self.residual += self.readings["asleep"].held - before.held

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last `awake`, in GiB and seconds."""
        seconds = {stage: r.seconds for stage, r in self.readings.items()}
        return {f"mem/{stage}_gb": self.readings[stage].held for stage in ("trainer", "awake", "asleep")} | {
            "mem/residual_gb": self.residual, "time/wake": seconds.get("weights", 0.0) + seconds["awake"],
            "time/sync": seconds["sync"], "time/sleep": seconds["asleep"]}

    def table(self) -> str:
        """Returns the readings of the last `awake` as text, one line a stage."""
        lines = [f"  {stage:10} {r.held:9.3f} {r.seconds:10.3f}" for stage, r in self.readings.items()]
        return "\n".join(["memory (GiB)    held    seconds", *lines, f"  residual   {self.residual:9.3f}"])

    def pending_warning(self, residual: float) -> str:
        """Returns a warning if `residual` (mem/residual_gb) is at least 1 GiB above its lowest value since
        the last warning, else ""."""
        growth = residual - self.least_residual
        self.least_residual = min(self.least_residual, residual) if growth < 1 else residual
        return "" if growth < 1 else (
            f"the sleeping engine keeps {residual:.1f} GiB of the device, {growth:.1f} more than before, "
                "and memory will run out; a smaller --engine_share or --pack_len leaves more room; the same "
                "command starts a fresh process from the last checkpoint; --verbose shows where memory grows")


def free_cache(device: torch.device) -> None:
    """Give torch's cached memory back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- the contract


class Engine(abc.ABC):
    """Base class of the engines; see the top of this file. All ranks must construct the engine together."""

    needs_selfcheck = False  # True: guard.selfcheck compares its log-probs with the trainer's before step 0

    def __init__(self, path: str, tokenizer: Any, cfg: Config, device: Device = "cpu",
                 dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer, self.cfg, self.device, self.dtype = tokenizer, cfg, torch.device(device), dtype
        self.config = load_config(path)
        with torch.device("meta"):
            self.policy = Policy(self.config)  # names and shapes, without memory
        self.names = [name for name, _ in self.policy.named_parameters()]
        self.eos = eos_ids(path, tokenizer, self.config)
        self.version = None  # version of the engine's weights; None while asleep
        self.busy = False  # True inside `awake`
        self.ledger = MemoryLedger(device)
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.engines = self.ranks // cfg.tp
        self.group = dist.neighbours(cfg.tp)  # the tensor-parallel ranks that form this engine

    # What a new engine writes:

    @abc.abstractmethod
    def load(self, weights: Weights) -> None:
        """Load all weights (name, whole tensor). Then call self.ledger.mark("sync"). A tensor is valid only
        until the next tensor is requested."""

    @abc.abstractmethod
    def generate(self, requests: Mapping[Key, Sequence[int]], limits: Mapping[Key, int], temperature: float,
                 key: tuple[int, ...], version: int) -> Iterator[Sample]:
        """Yields one response to each request k, in the order in which responses end. requests[k]: prompt
        tokens; limits[k]: largest number of response tokens; k: (prompt_id, sample_id). Temperature 0 is
        greedy. `key` seeds the randomness.

        An engine must call self.check(version) first; it raises RuntimeError on stale weights. Construct
        samples with self.sample. With --tp, all ranks of one engine call `generate` together, each with its
        own requests."""

    def unload(self) -> None:  # noqa: B027  an engine may have nothing to give back
        """Give memory back at the end of `awake`."""

    # What the trainer uses:

    @contextlib.contextmanager
    def awake(self, weights: Weights, version: int) -> Iterator[Engine]:
        """Load the weights (name, whole tensor) of `version`. Inside, `generate` works; afterwards the engine
        sleeps. Raises RuntimeError for missing, repeated or unknown weights, and inside another `awake`."""
        if self.busy:
            raise RuntimeError(f"the engine is awake already, with the weights of step {self.version}; "
                               "leave that `with engine.awake(…)` first")
        self.busy = True
        self.ledger.begin()
        try:
            with self.engine_errors(f"to load the weights of step {version}"):
                stream = self.counted_weights(weights)
                self.load(stream)
                for name, _ in stream:  # asks for more: the stream then checks that nothing is missing
                    raise RuntimeError(f"the engine did not take {name}")
                self.ledger.mark("awake")
            self.version = version
            yield self
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                self._sleep()
            raise
        else:
            self._sleep()
        finally:
            self.busy = False

    def _sleep(self):
        self.version = None
        self.ledger.mark("sampled")
        with self.engine_errors("to fall asleep"):
            self.unload()
        self.ledger.end()

    def gather(self, x: Any) -> list[Any]:
        """Returns a list of the objects x of all ranks of this engine."""
        return dist.gather(x, self.group) if self.group else [x]

    def check(self, version: int) -> None:
        """Raises RuntimeError unless the engine is awake with the weights of `version`."""
        if self.version != version:
            raise RuntimeError(
                f"the engine holds weights of step {self.version} and was asked for step {version}; "
                "generate inside `with engine.awake(full_weights(policy), version=step)`")

    def counted_weights(self, weights: Weights) -> Weights:
        """Yields the weights, and counts them. Raises RuntimeError for a name that comes twice, for a name
        that the model does not have, and at the end for missing names."""
        missing, self.ledger.bytes = dict.fromkeys(self.names), 0
        for name, tensor in weights:
            if name not in missing:
                known = name in self.names
                raise RuntimeError(f"{name} came twice" if known else f"the model has no parameter {name}")
            del missing[name]
            self.ledger.bytes += tensor.nbytes
            yield name, tensor
        if missing:
            raise RuntimeError(f"{len(missing)} of {len(self.names)} parameters did not come: "
                               f"{', '.join([*missing][:3])}{', …' * (len(missing) > 3)}")

    @contextlib.contextmanager
    def engine_errors(self, doing: str) -> Iterator[None]:
        """Context manager: turns an exception into a RuntimeError. Its message says what the engine failed to
        do, and has the table of memory readings."""
        try:
            yield
        except Exception as e:
            message = (str(e).strip().splitlines() or [""])[0]
            remedy = ""
            if isinstance(e, torch.OutOfMemoryError) or "out of memory" in message.lower():
                share, seqs = self.cfg.engine_share, self.cfg.max_num_seqs
                remedy = (f"\nneeded: a smaller --engine_share ({share}) if the trainer or other processes "
                          f"hold the memory, a smaller --max_num_seqs ({seqs}) if sampling does")
            raise RuntimeError(f"the engine failed {doing}: {type(e).__name__}: {message}\n"
                               f"{self.ledger.table()}{remedy}") from e

    def sample(self, key: Key, prompt: Sequence[int], ids: np.ndarray, logp: np.ndarray,
               stopped: bool) -> Sample:
        """Returns the Sample of one finished response."""
        return Sample(*key, tuple(prompt), ids, logp, bool(stopped), self.text_of(ids), self.version)

    def text_of(self, ids: np.ndarray) -> str:
        """Returns the text of a response. An EOS token at the end is left out."""
        body = ids[:-1] if len(ids) and int(ids[-1]) in self.eos else ids
        return self.tokenizer.decode(body.tolist())


def eos_ids(path: str, tokenizer: Any, config: Any) -> set[int]:
    """Returns the ids of all EOS tokens: those in the tokenizer, the model config and the generation config.
    Base and chat models have different EOS tokens. If one were missing here, responses that end with it would
    count as truncated."""
    found = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    if (Path(path) / "generation_config.json").is_file():
        from transformers import GenerationConfig

        found.append(GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id)
    lists = [f if isinstance(f, list | tuple) else [f] for f in found]
    return {int(i) for ids in lists for i in ids if i is not None}


def first_stop(before: np.ndarray, after: np.ndarray, stop: Sequence[str], tokenizer: Any) -> int:
    """Find the first stop string that ends in the tokens `after`. Returns the number of tokens of `after` up
    to its end, or 0 if there is none. The stop string may begin in `before`, the tokens in front of `after`.
    Only the first `window` tokens of `after` are searched."""
    # A token has at least one byte. 8 more tokens, because the window may cut a character of up to four
    # bytes.
    window = 8 + max((len(s.encode()) for s in stop), default=0)
    tail, after = before[-window:].tolist(), after[:window].tolist()

    def count(tokens):
        text = tokenizer.decode([*tail, *after[:tokens]])
        return [text.count(s) for s in stop]

    if not stop:
        return 0
    previous, whole = count(0), count(len(after))
    for i in range(1, len(after) + 1) if whole != previous else ():  # nearly always they are equal
        now = whole if i == len(after) else count(i)
        if any(map(operator.gt, now, previous)):
            return i
        previous = now
    return 0
