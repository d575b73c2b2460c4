"""Problems in, packs out.

Reads every shape of file that Open-Reasoner-Zero, Open-Instruct's RLVR and Open-R1 ship, draws each step's prompts as a
pure function of (seed, step), cuts a step's samples into updates and balanced packs, and lays packs out for the model.

    problems = load_problems(cfg.data, tokenizer, cfg)
    prompts  = batch_at(problems, step, cfg)
    packs    = [pack([samples[i] for i in bin]) for bin in partition(lengths, bins=8, cap=16384)]

Departs from Open-Reasoner-Zero: no remainder is dropped, no sample is duplicated as padding.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs import Config, UserError, need
from reward import KINDS

TEMPLATES = {
    # Open-Reasoner-Zero's prompt, verbatim (its playground files).
    "orz": (
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
        "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
        "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
        "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: You "
        "must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final "
        "answer will be extracted automatically by the \\boxed{} tag.\nThis is the problem:\n{problem}\n"
        "Assistant: <think>"),
    "plain": "{problem}<think>",
}


@dataclass(frozen=True)
class Problem:
    """A prompt with a verifiable answer."""

    text: str  # the problem as it stands in the file
    ids: tuple[int, ...]  # the templated prompt's tokens
    answer: str
    where: str  # file and row, for messages
    kind: str = "math"  # how its answer is compared: math, choice or exact; a reward of the user's own is told it
    weight: float = 1.0  # how often it comes in an epoch


@dataclass(frozen=True, eq=False)
class Sample:
    """One response to one prompt. What the engine sampled is what is trained on: ids are never made again from text."""

    slot: int  # place of the prompt in the step's batch
    index: int  # which of the prompt's samples
    prompt: tuple[int, ...]
    ids: np.ndarray  # (L,) int32 response tokens, the stop string's or EOS's included
    logp: np.ndarray  # (L,) float32 log-probs as the engine saw them, at its temperature
    stopped: bool  # by EOS or a stop string, not by length
    text: str  # the response, decoded
    version: int  # of the weights that made it
    reward: float = 0.0
    reason: str = ""  # why that reward
    answer: str | None = None  # what was extracted from the response
    penalty: float = 0.0  # added to the reward in training, not in what is reported
    trained: bool = True  # whether it enters the loss
    advantage: float = 0.0  # grpo: what the group says; ppo: computed per token, later

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)

    @property
    def score(self) -> float:
        """What training wants more of: the reward, less what the length costs."""
        return self.reward + self.penalty


@dataclass(frozen=True, eq=False)
class Pack:
    """N segments (prompt + response) end to end, T tokens in all. Tensors are never written after they are made."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, from 0 in each segment
    cu_seqlens: Tensor  # (N+1,) int32
    mask: Tensor  # (T,) bool, true where tokens[t] was sampled
    engine_logp: Tensor  # (T,) log p(tokens[t] | what precedes it), as the engine saw it
    rewards: Tensor  # (T,) on each response's last token
    advantages: Tensor  # (T,)
    longest: int  # tokens of the longest segment
    responses: int  # trained responses in the pack: N, less what is masked; 0 in a filler
    computed: Tensor  # (U,) places of the tokens that a model computes: what segments begin with in common only once
    source: Tensor  # (T,) which of those stands for each token
    old_logp: Tensor | None = None  # (T,) the trainer's, before the step's first update
    ref_logp: Tensor | None = None  # (T,)
    values: Tensor | None = None  # (T,) the critic's, before its first update of the step
    returns: Tensor | None = None  # (T,)

    def to(self, device: torch.device | str) -> Pack:
        """The same pack on another device."""
        return replace(self, **{k: v.to(device, non_blocking=True) for k, v in vars(self).items()
                                if isinstance(v, Tensor)})


# --- problems


def load_problems(paths: Sequence[str], tokenizer: Any, cfg: Config, say: Callable[[str], None] = print) -> list[Problem]:
    """All problems of the files, in their order; cfg.data_weights are theirs if these are cfg.data. Over-long prompts and
    repeated ones are dropped, counted and named.

    Raises UserError naming file and row for what can't be read, and when nothing is left.
    """
    need(len(paths) > 0, "no data files given", "--data FILE [FILE …]")
    make_ids = templater(cfg.template, tokenizer)
    problems, seen, long, twice = [], set(), [], 0
    weights = cfg.data_weights if cfg.data_weights and tuple(paths) == cfg.data else (1.0,) * len(paths)
    usual = "math" if ":" in cfg.reward else cfg.reward
    for path, weight in zip(paths, weights, strict=True):
        for row, raw in enumerate(read_rows(path), 1):
            text, answer = problem_of(raw, f"{path} row {row}")
            kind = kind_of(raw, usual, f"{path} row {row}")
            if (text, answer) in seen:
                twice += 1
                continue
            seen.add((text, answer))
            ids = make_ids(text)
            if len(ids) > cfg.max_prompt_len:
                long.append(f"{os.path.basename(path)}:{row}")
                continue
            problems.append(Problem(text, tuple(ids), answer, f"{path} row {row}", kind, weight))
    need(len(problems) > 0, f"every prompt of {', '.join(paths)} is longer than --max_prompt_len {cfg.max_prompt_len} tokens",
         "a larger --max_prompt_len")
    dropped = f"; dropped {twice} repeated" if twice else ""
    if long:
        dropped += f"; dropped {len(long)} over {cfg.max_prompt_len} tokens: {' '.join(long[:5])}{' …' * (len(long) > 5)}"
    say(f"{len(problems)} problems from {', '.join(paths)}{dropped}")
    return problems


def read_rows(path: str) -> list[Any]:
    """Rows of a .json (a list), .jsonl or .parquet file. Raises UserError where there are none."""
    file = Path(path)
    need(file.is_file(), f"no data file {path}", "--data or --eval_data with a file that exists")
    if file.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise UserError(f"{path} is Parquet, and pyarrow is missing; needed: pip install pyarrow") from None
        rows = parquet.read_table(file).to_pylist()
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"{path} is not UTF-8 (byte {e.start}); needed: .json, .jsonl or .parquet") from None
        try:
            rows = json.loads(text) if text.lstrip().startswith("[") and file.suffix != ".jsonl" else None
        except json.JSONDecodeError as e:
            raise UserError(f"{path} line {e.lineno} is not JSON ({e.msg}); needed: a JSON list") from None
        rows = _jsonl(path, text) if rows is None else rows
    need(len(rows) > 0, f"{path} is empty", "at least one row with a problem and its answer")
    return rows


def _jsonl(path: str, text: str) -> list[Any]:
    rows = []
    for i, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as e:
                raise UserError(f"{path} row {i} is not JSON ({e.msg}); needed: one JSON object a line") from None
    return rows


def problem_of(row: Any, where: str) -> tuple[str, str]:
    """Problem and answer of a row in any of the known shapes: ORZ's training pairs and evaluation rows, RLVR's messages,
    Open-R1's problem/solution, plain prompt/answer. Raises UserError naming the row and what it lacks."""
    if isinstance(row, list):  # ORZ training: [{"from", "value"}, {"from", "ground_truth": {"value"}}]
        turns = [t for t in row if isinstance(t, dict)]
        text = next((t["value"] for t in turns if "value" in t), None)
        answer = next((t["ground_truth"].get("value") for t in turns if isinstance(t.get("ground_truth"), dict)), None)
    elif isinstance(row, dict):
        prompt = next((row[k] for k in ("prompt", "problem", "question", "messages") if row.get(k) is not None), None)
        answer = next((row[k] for k in ("final_answer", "answer", "ground_truth", "solution") if row.get(k) is not None), None)
        if isinstance(prompt, list):  # turns; the last that isn't the assistant's
            turns = [t for t in prompt if isinstance(t, dict) and t.get("role", t.get("from")) not in ("assistant", "gpt")]
            prompt = (turns[-1].get("value") or turns[-1].get("content")) if turns else None
        if "answer" not in row and isinstance(answer, str) and answer is row.get("solution"):
            answer = (re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", answer) or [answer])[-1]
        text = prompt
    else:
        text = answer = None
    keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
    need(isinstance(text, str) and text.strip() != "", f"{where} has no problem (found: {keys})",
         'a row like {"prompt": "1+1=", "answer": "2"}')
    answer = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    need(isinstance(answer, str | int | float) and str(answer).strip() != "", f"{where} has no answer (found: {keys})",
         'a row like {"prompt": "1+1=", "answer": "2"}')
    return text, str(answer)


def kind_of(row: Any, usual: str, where: str) -> str:
    """How a row's answer is compared: as its "reward" says, by its letter if it has "choices", else as usual."""
    kind = row.get("reward", "choice" if row.get("choices") else usual) if isinstance(row, dict) else usual
    need(kind in KINDS, f"{where} has reward {kind!r}", f"one of {', '.join(KINDS)}")
    return kind


def templater(template: str, tokenizer: Any) -> Callable[[str], list[int]]:
    """Function from a problem's text to its prompt's tokens, the tokenizer's BOS in front where it has one."""
    if template == "chat":
        need(bool(getattr(tokenizer, "chat_template", None)), "this tokenizer has no chat template", "--template orz or plain")
        return lambda text: tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=True,
                                                          add_generation_prompt=True, return_dict=False)
    if template not in TEMPLATES:
        need(os.path.isfile(template), f"no template {template!r}", "--template orz, plain, chat or a text file with {problem}")
        form = Path(template).read_text(encoding="utf-8")
        need("{problem}" in form, f"{template} lacks {{problem}}", "a text with {problem} where the problem goes")
    else:
        form = TEMPLATES[template]
    return lambda text: tokenizer(form.replace("{problem}", text)).input_ids


def fingerprint(problems: Sequence[Problem]) -> str:
    """What a checkpoint knows its problems by: the same prompts, token for token, with the same answers, in the same order."""
    digest = hashlib.sha256()
    for p in problems:
        digest.update(repr((p.ids, p.answer, p.kind, p.weight)).encode())
    return digest.hexdigest()[:16]


def batch_at(problems: Sequence[Problem], step: int, cfg: Config) -> list[Problem]:
    """The step's prompts: the problems in an order reshuffled each epoch, a pure function of (seed, step)."""
    weights = tuple(p.weight for p in problems)
    n, first = epoch_len(problems), step * cfg.prompts_per_step
    last = first + cfg.prompts_per_step
    orders = {epoch: _order(cfg.seed, epoch, weights) for epoch in range(first // n, -(-last // n))}
    return [problems[orders[i // n][i % n]] for i in range(first, last)]


def spare_at(problems: Sequence[Problem], step: int, round: int, cfg: Config) -> list[Problem]:
    """As many prompts again, to put in the place of the step's that teach nothing: as pure a function."""
    draw = np.random.default_rng([cfg.seed, 3, step, round])
    return [problems[i] for i in draw.choice(len(problems), cfg.prompts_per_step, len(problems) < cfg.prompts_per_step)]


def epoch_len(problems: Sequence[Problem]) -> int:
    """Prompts in an epoch: each file's problems times its weight."""
    return sum(_times(w, n) for w, n in Counter(p.weight for p in problems).items())


def _times(weight: float, n: int) -> int:
    return max(1, round(weight * n))


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, weights: tuple[float, ...]) -> np.ndarray:
    """An epoch's problems, shuffled: all as often as their weight says, a fraction of them once more."""
    rng, every = np.random.default_rng([seed, 1, epoch]), np.array(weights)
    parts = []
    for weight in dict.fromkeys(weights):
        mine = np.flatnonzero(every == weight)
        whole, rest = divmod(_times(weight, len(mine)), len(mine))
        parts += [mine] * whole + [rng.permutation(mine)[:rest]] * bool(rest)
    return rng.permutation(np.concatenate(parts))


# --- packs


def by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples that are ordered by (slot, index), a list a prompt."""
    return [list(group) for _, group in itertools.groupby(samples, lambda s: s.slot)]


def assign(lengths: np.ndarray, ranks: int, cfg: Config, step: int, quad: float = 0.0) -> list[list[list[list[int]]]]:
    """Which sample goes where: parts[update][rank][pack] -> indices into `lengths` (S,), the step's samples.

    Parts do not depend on the number of ranks, packs do not matter to the maths: so neither changes a run. Each rank gets
    the same number of packs in a part (FSDP's collectives need it), the k-th packs of all ranks being of like cost. Short
    samples of a prompt stay together, for what they begin with is computed once a pack: up to an eighth of a pack, or of a
    rank's share, go as one.
    """
    order = np.random.default_rng([cfg.seed, 2, step]).permutation(len(lengths))
    parts = []
    for part in partition(lengths[order], cfg.parts):
        part = sorted(order[part].tolist())
        most = min(cfg.pack_len, int(lengths[part].sum()) // ranks) // 8
        units = together(part, lengths, cfg.samples_per_prompt, most)
        tokens, cost = (np.array([x[unit].sum() for unit in units]) for x in (lengths, _cost(lengths, quad)))
        packs = max(1, -(-int(tokens.sum()) // (cfg.pack_len * ranks)))
        while (bins := partition(tokens, packs * ranks, cfg.pack_len, cost=cost)) is None:
            packs += 1
        bins.sort(key=lambda b: -cost[b].sum())
        parts.append([[[i for u in b for i in units[u]] for b in bins[r::ranks]] for r in range(ranks)])
    return parts


def together(samples: Sequence[int], lengths: np.ndarray, group: int, most: int) -> list[list[int]]:
    """Ascending numbers of samples, `group` a prompt, in runs of one prompt's of up to `most` tokens, or of one sample."""
    runs: list[list[int]] = []
    room = 0
    for i in samples:
        if runs and runs[-1][0] // group == i // group and lengths[i] <= room:
            runs[-1].append(i)
        else:
            runs.append([i])
            room = most
        room -= int(lengths[i])
    return runs


def partition(lengths: np.ndarray, bins: int, cap: int | None = None, cost: np.ndarray | None = None) -> list[list[int]] | None:
    """Indices of `lengths` in `bins` lists of nearly equal work (costliest first, into the lightest that has room: LPT),
    none with more than `cap` tokens; None where that fails. `cost`: the work of each, else its length."""
    cost = lengths if cost is None else cost
    heap = [(0.0, b, 0) for b in range(bins)]  # work, bin, tokens
    out: list[list[int]] = [[] for _ in range(bins)]
    for i in np.argsort(-cost, kind="stable"):
        full = []
        while heap and cap is not None and heap[0][2] + lengths[i] > cap:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        work, b, tokens = heapq.heappop(heap)
        out[b].append(int(i))
        for entry in [(work + float(cost[i]), b, tokens + int(lengths[i])), *full]:
            heapq.heappush(heap, entry)
    return out


def _cost(lengths: np.ndarray, quad: float) -> np.ndarray:
    """Work of samples: length + quad × length² (attention)."""
    return lengths * (1.0 + quad * lengths)


def pack(samples: Sequence[Sample]) -> Pack:
    """Lay samples end to end. No samples make a filler: one token that no loss sees, so that every rank runs as many passes."""
    if not samples:
        zero = torch.zeros(1)
        return Pack(zero.long(), zero.long(), torch.tensor([0, 1], dtype=torch.int32), zero.bool(), zero, zero, zero, 1, 0,
                    zero.long(), zero.long())
    lengths = np.array([s.length for s in samples])
    ends = lengths.cumsum()
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    response = positions >= np.repeat([len(s.prompt) for s in samples], lengths)
    logp, rewards = np.zeros((2, ends[-1]), np.float32)
    logp[response] = np.concatenate([s.logp for s in samples])
    rewards[ends - 1] = [s.score for s in samples]
    advantages = np.repeat(np.array([s.advantage for s in samples], np.float32), lengths) * response
    tokens = np.concatenate([x for s in samples for x in (s.prompt, s.ids)]).astype(np.int64)
    twin = np.arange(len(tokens))  # of each token the first that comes after the same tokens: neighbours in order share most
    rows = sorted(zip(np.split(tokens, ends[:-1]), (ends - lengths).tolist(), strict=True), key=lambda row: row[0].tobytes())
    for (a, at), (b, start) in itertools.pairwise(rows):
        differ = a[:len(b)] != b[:len(a)]
        same = int(differ.argmax()) if differ.any() else len(differ)
        twin[start:start + same] = twin[at:at + same]
    own = twin == np.arange(len(twin))
    return Pack(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        mask=torch.from_numpy(response & np.repeat([s.trained for s in samples], lengths)),
        engine_logp=torch.from_numpy(logp),
        rewards=torch.from_numpy(rewards),
        advantages=torch.from_numpy(advantages),
        longest=int(lengths.max()),
        responses=sum(s.trained for s in samples),
        computed=torch.from_numpy(own.nonzero()[0]),
        source=torch.from_numpy((own.cumsum() - 1)[twin]),
    )
