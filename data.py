"""Problems in, packs out.

Reads the file formats of Open-Reasoner-Zero, Open-Instruct's RLVR and Open-R1. Draws each step's prompts as a
pure function of (seed, step). Cuts a step's samples into minibatches and balanced packs, and lays packs out
for the model.

    problems    = load_problems(cfg.data, tokenizer, cfg)
    batch       = batch_at(problems, step, cfg)
    minibatches = assign(lengths, ranks, cfg, step)      # minibatch, rank and pack of each sample
    packs       = [pack([samples[i] for i in indices]) for indices in minibatches[0][rank]]

Departs from Open-Reasoner-Zero: no remainder is dropped, and no sample is duplicated as padding.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import os
import re
from collections import ChainMap, Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs import Config, read_rows, require
from reward import KINDS

TEMPLATES = {
    # Open-Reasoner-Zero's prompt, verbatim (its playground files).
    "orz": (
        "A conversation between User and Assistant. The User asks a question, and the Assistant "
        "solves it. The Assistant first thinks about the reasoning process in the mind and then "
        "provides the User with the answer. The reasoning process is enclosed within <think> </think>"
        " and answer is enclosed within <answer> </answer> tags, respectively, i.e., <think> "
        "reasoning process here </think> <answer> answer here </answer>. User: You must put your "
        "answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final "
        "answer will be extracted automatically by the \\boxed{} tag.\n"
        "This is the problem:\n{problem}\nAssistant: <think>"),
    "plain": "{problem}<think>",
}
ORDER, MINIBATCH, REPLACE = 1, 2, 3  # random streams of this file: np.random.default_rng([seed, stream, …])


@dataclass(frozen=True)
class Problem:
    """A prompt with a verifiable answer."""

    text: str  # the problem as the file has it
    ids: tuple[int, ...]  # tokens of the templated prompt
    answer: str  # the gold answer
    kind: str = "math"  # how answers are compared: math, choice or exact; passed to a user's own reward too
    weight: float = 1.0  # how often it comes in an epoch


@dataclass(frozen=True, eq=False)
class Sample:
    """One response to one prompt. Training uses the token ids that the engine sampled; text is never
    re-tokenised."""

    prompt_id: int  # which prompt of the step's batch
    sample_id: int  # which of the prompt's samples
    prompt: tuple[int, ...]
    ids: np.ndarray  # (L,) int32 response tokens, with those of the stop string or EOS
    logp: np.ndarray  # (L,) float32 log-probs from the engine, at its temperature
    stopped: bool  # ended by EOS or a stop string, not by the length limit
    text: str  # the response, decoded
    version: int  # of the weights that sampled it
    reward: float = 0.0  # from the grader
    reason: str = ""  # why that reward: one of reward.REASONS
    answer: str | None = None  # what was extracted from the response
    parts: dict[str, float] = field(default_factory=dict)  # added to the reward in training
    in_loss: bool = True  # whether its tokens enter the loss
    advantage: float = 0.0  # grpo: from the group's scores. ppo computes one per token later

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.ids)

    @property
    def score(self) -> float:
        """What training maximises: the reward and its parts."""
        return self.reward + sum(self.parts.values())


@dataclass(frozen=True, eq=False)
class Pack:
    """N segments (prompt + response) end to end, T tokens in all. No tensor is written to after it was
    made."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, from 0 in each segment
    cu_seqlens: Tensor  # (N+1,) int32, where segments start and end
    mask: Tensor  # (T,) bool, true where tokens[t] was sampled and enters the loss
    engine_logp: Tensor  # (T,) log p(tokens[t] | the tokens before it in its segment), from the engine
    rewards: Tensor  # (T,) the sample's score on its last token, else 0
    advantages: Tensor  # (T,)
    longest: int  # tokens of the longest segment
    responses: int  # samples that enter the loss; 0 in a filler
    unique: Tensor  # (U,) indices of the tokens that the model computes (see unique_prefixes)
    inverse: Tensor  # (T,) for each token, its position in `unique`
    old_logp: Tensor | None = None  # (T,) from the policy before the step's first update
    ref_logp: Tensor | None = None  # (T,) from the reference
    values: Tensor | None = None  # (T,) from the critic before its first update of the step
    returns: Tensor | None = None  # (T,)

    def to(self, device: torch.device | str) -> Pack:
        """The same pack on another device."""
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


# --- problems


def load_problems(paths: Sequence[str], tokenizer: Any, cfg: Config,
                  say: Callable[[str], None] = print) -> list[Problem]:
    """All problems of the files, in file order. Over-long and repeated prompts are dropped, and `say` tells
    how many.

    cfg.data_weights apply if `paths` is cfg.data. Raises UserError with file and row for a row that can't be
    read, and where nothing is left."""
    require(len(paths) > 0, "no data files given", "--data FILE [FILE …]")
    encode = prompt_encoder(cfg.template, tokenizer)
    weights = cfg.data_weights if cfg.data_weights and tuple(paths) == cfg.data else (1.0,) * len(paths)
    default_kind = "math" if ":" in cfg.reward else cfg.reward
    problems, seen, too_long, repeated = [], set(), [], 0
    for path, weight in zip(paths, weights, strict=True):
        for number, row in enumerate(read_rows(path), 1):
            where = f"{path} row {number}"
            text, answer = problem_of(row, where)
            kind = kind_of(row, default_kind, where)
            if (text, answer) in seen:
                repeated += 1
                continue
            seen.add((text, answer))
            ids = encode(text)
            if len(ids) > cfg.max_prompt_len:
                too_long.append(f"{os.path.basename(path)}:{number}")
                continue
            problems.append(Problem(text, tuple(ids), answer, kind, weight))
    require(len(problems) > 0, f"every prompt of {', '.join(paths)} is longer than --max_prompt_len "
            f"{cfg.max_prompt_len} tokens", "a larger --max_prompt_len")
    dropped = f"; dropped {repeated} repeated" if repeated else ""
    if too_long:
        some = " ".join(too_long[:5]) + " …" * (len(too_long) > 5)
        dropped += f"; dropped {len(too_long)} over {cfg.max_prompt_len} tokens: {some}"
    say(f"{len(problems)} problems from {', '.join(paths)}{dropped}")
    return problems


def problem_of(row: Any, where: str) -> tuple[str, str]:
    """Problem and gold answer of a row in any of these formats: ORZ's training pairs and evaluation rows,
    RLVR's messages, Open-R1's problem and solution, plain prompt and answer. Raises UserError with `where`
    otherwise."""
    found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
    if isinstance(row, list):  # ORZ training: [{"from", "value"}, {"from", "ground_truth": {"value"}}]
        pair = ChainMap(*(turn for turn in row if isinstance(turn, dict)))
        gold = pair.get("ground_truth")
        row = {"prompt": pair.get("value"), "answer": gold.get("value") if isinstance(gold, dict) else None}
    fields = row if isinstance(row, dict) else {}
    text = _first(fields, "prompt", "problem", "question", "messages")
    answer = _first(fields, "final_answer", "answer", "ground_truth", "solution")
    if isinstance(text, list):  # a conversation: its last turn that isn't the assistant's
        turns = [turn for turn in text if isinstance(turn, dict)
                 and turn.get("role", turn.get("from")) not in ("assistant", "gpt")]
        text = _first(turns[-1], "value", "content") if turns else None
    if isinstance(answer, str) and answer is fields.get("solution"):
        answer = (re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", answer) or [answer])[-1]
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    example = 'a row like {"prompt": "1+1=", "answer": "2"}'
    for name, value, types in (("problem", text, str), ("answer", answer, str | int | float)):
        require(isinstance(value, types) and str(value).strip() != "",
                f"{where} has no {name} (found: {found})", example)
    return text, str(answer)


def _first(fields, *names):
    """The first of these fields that isn't None, or None."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def kind_of(row: Any, default: str, where: str) -> str:
    """How a row's answer is compared: its own "reward"; "choice" if it has "choices"; else `default`. Raises
    UserError for an unknown kind."""
    kind = default
    if isinstance(row, dict):
        kind = row.get("reward", "choice" if row.get("choices") else default)
    require(kind in KINDS, f"{where} has reward {kind!r}", f"one of {', '.join(KINDS)}")
    return kind


def prompt_encoder(template: str, tokenizer: Any) -> Callable[[str], list[int]]:
    """A function from a problem's text to its prompt's tokens. The tokenizer adds its BOS where it has one.
    Raises UserError for a template that doesn't exist or has no {problem}."""
    if template == "chat":
        require(bool(getattr(tokenizer, "chat_template", None)), "this tokenizer has no chat template",
                "--template orz or plain")
        return lambda text: tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=True, add_generation_prompt=True, return_dict=False)
    form = TEMPLATES.get(template)
    if form is None:
        require(os.path.isfile(template), f"no template {template!r}",
                "--template orz, plain, chat or a text file with {problem}")
        form = Path(template).read_text(encoding="utf-8")
        require("{problem}" in form, f"{template} lacks {{problem}}", "a text with {problem} in it")
    return lambda text: tokenizer(form.replace("{problem}", text)).input_ids


def fingerprint(problems: Sequence[Problem]) -> str:
    """Hash of the problems' tokens, answers, kinds and weights, in order. A checkpoint stores it: see
    ckpt.resume."""
    digest = hashlib.sha256()
    for p in problems:
        digest.update(repr((p.ids, p.answer, p.kind, p.weight)).encode())
    return digest.hexdigest()[:16]


def batch_at(problems: Sequence[Problem], step: int, cfg: Config) -> list[Problem]:
    """The step's prompts. The order is reshuffled each epoch and is a pure function of (seed, step)."""
    weights = tuple(p.weight for p in problems)
    n, first = epoch_len(problems), step * cfg.prompts_per_step
    last = first + cfg.prompts_per_step
    orders = {epoch: _order(cfg.seed, epoch, weights) for epoch in range(first // n, -(-last // n))}
    return [problems[orders[i // n][i % n]] for i in range(first, last)]


def replacement_batch(problems: Sequence[Problem], step: int, round: int, cfg: Config) -> list[Problem]:
    """Replacement prompts for uniform groups: one per prompt of the step, a pure function of (seed, step,
    round)."""
    rng, count = np.random.default_rng([cfg.seed, REPLACE, step, round]), cfg.prompts_per_step
    return [problems[i] for i in rng.choice(len(problems), count, replace=len(problems) < count)]


def epoch_len(problems: Sequence[Problem]) -> int:
    """Prompts in an epoch: each file's problems times its weight."""
    return sum(_draws(weight, n) for weight, n in Counter(p.weight for p in problems).items())


def _draws(weight, n):
    return max(1, round(weight * n))


@lru_cache(maxsize=2)
def _order(seed, epoch, weights):
    """Indices of an epoch's problems, shuffled. Each problem comes floor(weight) times; a random subset comes
    once more."""
    rng, of_each = np.random.default_rng([seed, ORDER, epoch]), np.array(weights)
    drawn = []
    for weight in dict.fromkeys(weights):
        same = np.flatnonzero(of_each == weight)
        whole, rest = divmod(_draws(weight, len(same)), len(same))
        drawn += [same] * whole + [rng.permutation(same)[:rest]]
    return rng.permutation(np.concatenate(drawn))


# --- packs


def group_by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """One list per prompt, of samples that are ordered by (prompt_id, sample_id)."""
    return [list(group) for _, group in itertools.groupby(samples, lambda s: s.prompt_id)]


def assign(lengths: np.ndarray, ranks: int, cfg: Config, step: int,
           work: np.ndarray | None = None) -> list[list[list[list[int]]]]:
    """Which sample goes where: minibatches[m][rank][pack] is a list of sample numbers. `lengths[i]` is the
    tokens of sample i; samples are ordered by (prompt_id, sample_id). `work[i]` is its cost in any unit;
    default: its tokens.

    Minibatches are the same for any number of ranks, and packs do not change the maths. So ranks and packing
    change no result. In a minibatch each rank gets equally many packs, because FSDP's collectives need it,
    and the k-th packs of all ranks cost about the same. Samples of one prompt are kept together, in units of
    at most an eighth of a pack and of a rank's tokens, because a prefix that they share is computed once per
    pack. """
    work = lengths if work is None else work
    order = np.random.default_rng([cfg.seed, MINIBATCH, step]).permutation(len(lengths))
    minibatches = []
    for chosen in partition(lengths[order], cfg.minibatches):
        minibatch = sorted(order[chosen].tolist())
        together = min(cfg.pack_len, int(lengths[minibatch].sum()) // ranks) // 8
        units = _neighbours(minibatch, lengths, cfg.samples_per_prompt, together)
        tokens, cost = (np.array([x[unit].sum() for unit in units]) for x in (lengths, work))
        packs = max(1, -(-int(tokens.sum()) // (cfg.pack_len * ranks)))
        while (bins := partition(tokens, packs * ranks, cfg.pack_len, cost)) is None:
            packs += 1
        bins.sort(key=lambda b: -cost[b].sum())  # costliest first, dealt in turn: k-th packs cost alike
        indices = [[i for u in b for i in units[u]] for b in bins]
        minibatches.append([indices[rank::ranks] for rank in range(ranks)])
    return minibatches


def _neighbours(indices, lengths, per_prompt, limit):
    """Ascending sample indices in lists of one prompt's samples with at most `limit` tokens, or of one
    sample."""
    lists = []
    room = 0
    for i in indices:
        if lists and lists[-1][0] // per_prompt == i // per_prompt and lengths[i] <= room:
            lists[-1].append(i)
        else:
            lists.append([i])
            room = limit
        room -= int(lengths[i])
    return lists


def partition(lengths: np.ndarray, bins: int, cap: int | None = None,
              cost: np.ndarray | None = None) -> list[list[int]] | None:
    """Indices of `lengths` in `bins` lists of nearly equal cost, none with more than `cap` tokens; None where
    that fails. Greedy: the costliest first, into the lightest list that has room (LPT). Default `cost`: the
    lengths."""
    cost = lengths if cost is None else cost
    heap = [(0.0, b, 0) for b in range(bins)]  # cost, bin, tokens
    out = [[] for _ in range(bins)]
    for i in np.argsort(-cost, kind="stable"):
        full = []
        while heap and cap is not None and heap[0][2] + lengths[i] > cap:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        total, b, tokens = heapq.heappop(heap)
        out[b].append(int(i))
        for entry in [(total + float(cost[i]), b, tokens + int(lengths[i])), *full]:
            heapq.heappush(heap, entry)
    return out


def pack(samples: Sequence[Sample]) -> Pack:
    """Lay samples end to end. Without samples: a filler of one token that no loss sees, so that every rank
    runs equally many passes."""
    if not samples:
        zero = torch.zeros(1)
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32)
        return Pack(zero.long(), zero.long(), cu_seqlens, zero.bool(), zero, zero, zero, longest=1,
                    responses=0, unique=zero.long(), inverse=zero.long())
    lengths = np.array([s.length for s in samples])
    ends = lengths.cumsum()
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    response = positions >= np.repeat([len(s.prompt) for s in samples], lengths)
    logp, rewards = np.zeros((2, ends[-1]), np.float32)
    logp[response] = np.concatenate([s.logp for s in samples])
    rewards[ends - 1] = [s.score for s in samples]
    segments = [np.array([*s.prompt, *s.ids], dtype=np.int64) for s in samples]
    unique, inverse = unique_prefixes(segments)
    arrays = dict(
        tokens=np.concatenate(segments),
        positions=positions,
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        mask=response & np.repeat([s.in_loss for s in samples], lengths),
        engine_logp=logp,
        rewards=rewards,
        advantages=np.repeat(np.array([s.advantage for s in samples], np.float32), lengths) * response,
        unique=unique,
        inverse=inverse,
    )
    return Pack(longest=int(lengths.max()), responses=sum(s.in_loss for s in samples),
                **{name: torch.from_numpy(array) for name, array in arrays.items()})


def unique_prefixes(segments: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Indices (U,) of the tokens that a model has to compute, and for each token (T,) its position among
    them.

    Attention is causal, so tokens that follow equal prefixes have equal hidden states. One of them is
    computed:

        segments    p q r a b | p q r a c | s d          (T = 12 tokens)
        unique      0 1 2 3 4           9   10 11        (U = 8: p q r a b c s d)
        inverse     0 1 2 3 4   0 1 2 3 5   6 7

    Sorting puts the segments with the longest common prefixes next to each other.
    """
    ends = np.cumsum([len(s) for s in segments])
    first = np.arange(ends[-1])  # index of the token that stands for all with the same prefix
    rows = sorted(zip(segments, ends, strict=True), key=lambda row: row[0].tobytes())
    for (a, a_end), (b, b_end) in itertools.pairwise(rows):
        unequal = a[:len(b)] != b[:len(a)]  # where the segments differ
        common = int(unequal.argmax()) if unequal.any() else len(unequal)
        a_start, b_start = a_end - len(a), b_end - len(b)
        first[b_start:b_start + common] = first[a_start:a_start + common]
    is_unique = first == np.arange(ends[-1])
    return is_unique.nonzero()[0], (is_unique.cumsum() - 1)[first]
