"""The base class of the engines.

An engine samples responses with the policy's weights, but only inside `awake`, which loads the weights:

    with engine.awake(full_weights(policy), version=step):
        for sample in engine.generate(requests, limits, temperature, seed, version=step):
            ...  # requests: (prompt_id, sample_id) -> tokens

To add an engine, write a subclass with `load(weights)` and `generate(…)`, and add its name to
rollout.ENGINES.

`generate` raises an error if the engine holds weights of another step than `version`. Without this check,
nobody would notice training on samples of old weights."""

import abc
import contextlib
import functools
import os
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dist
from configs import Config
from data import Sample
from dist import Device, Weights
from guard.files import read_json
from guard.messages import require
from model import Policy, load_config

Key = tuple[int, int]  # prompt_id and sample_id

# --- memory


class MemoryLedger:
    """Records the GiB in use at the end of each stage of the last `with engine.awake(…)` block. The stages
    are "trainer" (before the block), "weights" (vLLM's memory for weights is back), "sync" (the new weights
    are there), "awake" (with vLLM, the KV cache is back, too), "sampled" (the block's end) and "asleep" (the
    engine has given its memory back). `residual` is the GiB that the engine holds while it sleeps. Create the
    ledger before the engine allocates memory, because the first reading must not include the engine's memory.

    On a GPU, the readings count the memory of all processes. torch's own statistics would also count tensors
    whose memory a sleeping engine has given back."""

    def __init__(self, device: Device) -> None:
        self.device = torch.device(device)
        self.time = time.perf_counter()  # of the previous reading, in seconds
        # stage -> (GiB in use, seconds since the previous reading)
        self.readings: dict[str, tuple[float, float]] = {}
        self.mark("trainer")
        self.residual = 0.0  # GiB

    def mark(self, stage: str) -> None:
        """Record the memory in use at the end of `stage`, and the seconds since the previous reading."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            held = total - free  # bytes
        else:
            try:
                # The second number is the number of resident pages.
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                held = pages * resource.getpagesize()
            except OSError:  # not Linux, or no free file descriptor: only the peak is known
                held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        now = time.perf_counter()
        self.readings[stage] = held / 2**30, now - self.time
        self.time = now

    def begin(self) -> None:
        """Forget the last block's readings, and take the first reading, "trainer"."""
        torch.cuda.empty_cache()
        self.readings.clear()
        self.mark("trainer")

    def end(self) -> None:
        """Take the last reading, "asleep". Add to `residual` the memory that the engine did not give back."""
        torch.cuda.empty_cache()
        self.mark("asleep")
        self.residual += self.readings["asleep"][0] - self.readings["trainer"][0]

    def metrics(self) -> dict[str, float]:
        """Returns metric -> value: GiB in use (mem/…) and seconds (time/…) of the stages."""
        held = {f"mem/{stage}_gb": gib for stage, (gib, _) in self.readings.items()}
        seconds = {stage: s for stage, (_, s) in self.readings.items()}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
        return held | {
            "mem/residual_gb": self.residual,
            "mem/host_peak_gb": peak / 2**20,
            # vLLM wakes in two parts: "weights" before "sync", and the KV cache ("awake") after it. The torch
            # engine has only the second part.
            "time/wake": seconds.get("weights", 0.0) + seconds["awake"],
            "time/sync": seconds["sync"],
            "time/sleep": seconds["asleep"],
        }

    def text(self) -> str:
        """Returns the stages with the GiB in use, for an error message."""
        return ", ".join(f"{stage} {held:.1f}" for stage, (held, _) in self.readings.items())


# --- the base class


class Engine(abc.ABC):
    """Base class of the engines. All ranks must construct their engine at the same time."""

    # whether guard.selfcheck compares engine and trainer before the first step
    needs_selfcheck = False

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        cfg: Config,
        device: Device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.device = torch.device(device)
        self.dtype = dtype
        self.config = load_config(path)
        with torch.device("meta"):
            self.policy = Policy(self.config)  # names and shapes of all weights, without memory
        self.eos = eos_ids(path, tokenizer, self.config)
        self.version = None  # the step of the weights that were loaded; None outside `awake`
        self.ledger = MemoryLedger(device)
        self.rank = int(os.environ.get("RANK", 0))
        self.ranks = int(os.environ.get("WORLD_SIZE", 1))  # number of ranks
        self.engines = self.ranks // cfg.tp  # number of engines; each has cfg.tp ranks
        # The tensor-parallel ranks that form this engine; None without --tp
        self.group = dist.neighbours(cfg.tp)

    @abc.abstractmethod
    def load(self, weights: Weights) -> None:
        """Load all weights, then call self.ledger.mark("sync"). `weights` yields (name, whole tensor). When
        you ask for the next tensor, the memory of the last tensor may be freed. So copy each tensor first."""

    @abc.abstractmethod
    def generate(
        self,
        requests: Mapping[Key, Sequence[int]],
        limits: Mapping[Key, int],
        temperature: float,
        seed: tuple[int, ...],
        version: int,
        top_p: float = 1.0,
    ) -> Iterator[Sample]:
        """Yields one response (a Sample) for each request, in the order in which the responses end.

        requests: k -> tokens of the prompt, perhaps with an unfinished response; k is (prompt_id, sample_id)
        limits: k -> largest number of tokens to sample
        temperature: 0 means greedy
        seed: the random numbers of a response depend on `seed` and its k
        version: step of the weights; a subclass must first call self.check(version)
        top_p: nucleus sampling; 1: all tokens

        A subclass must call self.goes_on() before each decoding step, and end if it returns False.

        With --tp, all ranks of one engine call `generate` at the same time, each with its own requests."""

    def goes_on(self) -> bool:
        """Returns whether to sample on: False after a signal to stop. With --tp it is always True, because
        the engine's other ranks would wait for ever. Also restarts the time limit of guard.watch."""
        dist.progress()
        return self.cfg.tp > 1 or not dist.stop_signal

    def unload(self) -> None:  # noqa: B027  not abstract, because some engines have nothing to free
        """Free memory at the end of `awake`."""

    @contextlib.contextmanager
    def awake(self, weights: Weights, version: int) -> Iterator["Engine"]:
        """Context manager: wakes the engine and loads `weights`, of the step `version`. On exit the engine
        sleeps. Raises RuntimeError for missing, repeated or unknown weights, and inside another `awake`."""
        if self.version is not None:
            raise RuntimeError(
                f"the engine is awake already, with the weights of step {self.version}; "
                "leave that `with engine.awake(…)` first"
            )
        self.version = version
        self.ledger.begin()
        try:
            with (
                dist.watched("load"),
                self.engine_errors(f"to load the weights of step {version}"),
            ):
                stream = self.checked_weights(weights)  # an iterator; `load` reads it
                self.load(stream)
                # `load` should have read all of `stream`. At its end, checked_weights raises an error for
                # missing weights, so its end must be reached.
                for name, _ in stream:
                    raise RuntimeError(f"the engine did not read the weight {name}")
                self.ledger.mark("awake")
            yield self
        except BaseException:
            with contextlib.suppress(Exception):  # raise the first error, not one of _sleep
                self._sleep()
            raise
        else:
            self._sleep()

    @dist.watched("unload")
    def _sleep(self):
        self.version = None
        self.ledger.mark("sampled")
        with self.engine_errors("to fall asleep"):
            self.unload()
        self.ledger.end()

    def gather(self, x: Any) -> list[Any]:
        """Returns the objects x of this engine's ranks, in rank order."""
        return dist.gather(x, self.group) if self.group else [x]

    def check(self, version: int) -> None:
        """Raises RuntimeError unless the engine is awake with the weights of `version`."""
        if self.version != version:
            raise RuntimeError(
                f"the engine holds weights of step {self.version}, but generate was called "
                f"for step {version}; call it inside `with engine.awake(full_weights(policy), "
                "version=step)`"
            )

    def checked_weights(self, weights: Weights) -> Weights:
        """Yields the weights unchanged. Raises RuntimeError for a repeated, unknown or missing name."""
        missing = dict(self.policy.named_parameters())  # names that have not come yet
        for name, tensor in weights:
            if missing.pop(name, None) is None:
                raise RuntimeError(f"{name} came twice, or the model has no such parameter")
            yield name, tensor
        if missing:
            raise RuntimeError(
                f"{len(missing)} parameters did not come: {', '.join([*missing][:3])}"
            )

    @contextlib.contextmanager
    def engine_errors(self, doing: str) -> Iterator[None]:
        """Context manager: turns an exception into a RuntimeError that says what failed, with the memory
        readings."""
        try:
            yield
        except Exception as e:
            message = (str(e).strip().splitlines() or [""])[0]
            raise RuntimeError(
                f"the engine failed {doing}: {type(e).__name__}: {message}\n"
                f"GiB in use: {self.ledger.text()}\n"
                f"if memory was short: a smaller --engine_share ({self.cfg.engine_share}) or "
                f"--max_num_seqs ({self.cfg.max_num_seqs})"
            ) from e

    def sample(
        self,
        key: Key,
        prompt: Sequence[int],
        ids: Sequence[int],
        logp: Sequence[float],
        stopped: bool,
    ) -> Sample:
        """Returns the Sample of a response.

        ids, logp (L,): the sampled tokens and their log-probs
        stopped: true if EOS or a stop string ended the response"""
        ids = np.asarray(ids, np.int32)
        logp = np.asarray(logp, np.float32)
        return Sample(*key, tuple(prompt), ids, logp, stopped, self.text_of(ids), self.version)

    @property
    def may_stop(self) -> np.ndarray:
        """Returns (V,) bool for the V ids of the model: see the function `may_stop`, which caches it."""
        return may_stop(self.tokenizer, self.config.vocab_size, self.cfg.stop)

    def at_stop(self, ids: Sequence[int]) -> bool:
        """Returns whether a stop string ends at the last token of a response. Decoding to text is slow, so
        this function does it only after a token that may complete a stop string."""
        if not self.may_stop[ids[-1]]:
            return False
        return first_stop(ids[:-1], ids[-1:], self.cfg.stop, self.tokenizer) > 0

    def text_of(self, ids: np.ndarray) -> str:
        """Returns the text of response tokens, without EOS at the end."""
        body = ids[:-1] if len(ids) and int(ids[-1]) in self.eos else ids
        return self.tokenizer.decode(body.tolist())


def eos_ids(path: str, tokenizer: Any, config: Any) -> set[int]:
    """Returns the ids of all EOS tokens: of the tokenizer, the model config and the generation config,
    which may name different tokens. Ids from the vocabulary's size on are left out, because the model can't
    sample them."""
    generation = read_json(Path(path) / "generation_config.json")
    ids = []
    for source in (  # each is an id, a list of ids, or None
        tokenizer.eos_token_id,
        getattr(config, "eos_token_id", None),
        generation.get("eos_token_id"),
    ):
        ids += source if isinstance(source, list | tuple) else [source]
    ids = [i for i in ids if i is not None]
    require(
        all(isinstance(i, int) and 0 <= i < 2**31 for i in ids),
        f"eos_token_id in {path} is {ids}",
        "ids of tokens in config.json and generation_config.json",
    )
    return {i for i in ids if i < config.vocab_size}


@functools.cache
def may_stop(tokenizer: Any, vocabulary: int, stop: tuple[str, ...]) -> np.ndarray:
    """Returns (vocabulary,) bool: whether a token can complete a stop string, so that `first_stop` must be
    called after it. For most tokens it is false. This saves most of the decoding to text, which is slow.

    vocabulary: number of ids of the model, which may be more than the tokenizer's

    A token completes a stop string if its text begins with an end of the string, or contains the string. Some
    tokenizers remove a space at the start of a text, so spaces at the start of both texts are ignored. Hence
    the result is true for every token if a stop string ends in a space. The text of a token that begins in
    the middle of a character begins with U+FFFD. Such a token may complete any character."""
    found = np.zeros(vocabulary, bool)
    if not stop:
        return found
    ends = set()  # every end of every stop string
    for s in stop:
        ends |= {s[i:].lstrip(" ") for i in range(len(s))}
    begins = "\N{REPLACEMENT CHARACTER}", *ends  # a text that begins with one of these may stop
    tokens = range(min(len(tokenizer), vocabulary))
    for token, text in enumerate(tokenizer.batch_decode([[i] for i in tokens])):
        found[token] = text.lstrip(" ").startswith(begins) or any(s in text for s in stop)
    return found


def first_stop(
    before: Sequence[int], after: Sequence[int], stop: Sequence[str], tokenizer: Any
) -> int:
    """Returns the number of tokens of `after` up to the end of the first stop string, or 0 if no stop string
    ends there.

    before, after: tokens of one response; the stop string may begin in `before`, but no stop string is in it

    Searches only the first tokens of `after`, because a stop string that begins in `before` ends there. A
    stop string farther on lies entirely in `after`, so the engine itself has stopped at it."""
    if not stop:
        return 0
    # A stop string has at most as many tokens as UTF-8 bytes, so this many tokens of `before` are enough.
    # These tokens may begin in the middle of a character, and then their text begins with wrong characters.
    # The 8 extra tokens keep wrong characters out of the stop string.
    window = 8 + max(len(s.encode()) for s in stop)
    ids = np.asarray(before[-window - 3 :], int).tolist()
    for count, token in enumerate(after[:window], 1):
        ids.append(int(token))
        # If tokens that are single bytes (in Llama 2 also a line break) begin in the middle of a character,
        # all of them become wrong. A character has at most 4 bytes, so one of four texts begins well.
        for start in range(4 if len(before) > window + 3 else 1):
            text = tokenizer.decode(ids[start:])
            if not text.startswith("\N{REPLACEMENT CHARACTER}"):
                break
        if any(s in text for s in stop):
            return count
    return 0
