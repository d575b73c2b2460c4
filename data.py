"""The data path: from rows of a file to problems, and from samples to packs.

A pack is the tokens of one forward pass: several samples end to end.

    problems    = load_problems(cfg.data, tokenizer, cfg)
    batch       = batch_at(problems, step, cfg)
    minibatches = assign(lengths, cost, prompts, ranks, cfg, step)
    packs       = [pack([samples[i] for i in indices]) for indices in minibatches[0][rank]]

Unlike in Open-Reasoner-Zero, no sample is dropped or repeated to fill a batch."""

import datetime
import itertools
import json
import math
import os
import re
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jinja2.sandbox import SandboxedEnvironment
from torch import Tensor

from configs import Config, Say, limit_memory, prompt_form
from dist import Layout
from grading.rows import MARKUP, problem_rows, suspicious
from guard.messages import explained, require, show
from reward import kind_of

# The second number of each random seed in this file. So the order of the problems, the minibatches and the
# replacements of solved problems have different seeds.
ORDER, MINIBATCH, REPLACE = 1, 2, 3
TEMPLATE_SECONDS = 5  # CPU seconds that the chat template of one row may take
TEMPLATE_BYTES = 2**28  # bytes that it may allocate in addition


@dataclass(frozen=True)
class Problem:
    """A prompt with a verifiable answer."""

    text: str  # without the template
    ids: tuple[int, ...]  # tokens of the prompt, with the template
    answer: str
    kind: str = "math"  # how answers are compared: math, choice or exact
    dataset: str = ""  # name of the row's data set (see --extractor and --reward)
    file: str = ""  # path of the data file
    row: int = 0  # number of the row in `file`, from 1
    index: int = 0  # index in the list that load_problems returns
    fields: str = ""  # the whole row as JSON, if a reward function reads it

    @property
    def where(self) -> str:
        return f"{os.path.basename(self.file)}:{self.row}"

    @property
    def row_values(self) -> Any:
        """Returns the row of the data file, or {} if `fields` was not kept."""
        return json.loads(self.fields) if self.fields else {}


@dataclass(frozen=True, eq=False)
class Sample:
    """One response to one prompt. Training uses the token ids that the engine sampled, not the text."""

    # Index in the step's batch; while sampling with --carry, index among the run's prompts
    prompt_id: int
    sample_id: int  # index among the prompt's samples
    prompt: tuple[int, ...]  # tokens
    ids: np.ndarray  # (L,) int32 response tokens, including the environment's and EOS
    # (L,) float32 log-probs from the engine, after temperature; 0 at the environment's tokens
    logp: np.ndarray
    stopped: bool  # by EOS or a stop string, not by the length limit
    text: str
    version: int  # the step whose weights sampled the last tokens
    reward: float = 0.0  # from the grader
    reason: str = ""  # why the grader gave this reward: one of grading.worker.REASONS
    answer: str | None = None  # extracted from the response
    grader: str = ""  # name of the --reward term that gave the reward
    weight: float = 1.0  # of the --reward term `grader`
    # Other terms of --reward: name -> weighted value
    parts: dict[str, float] = field(default_factory=dict)
    failed: tuple[str, ...] = ()  # names of the graders that raised an exception
    in_loss: bool = True  # False: none of its tokens enters the loss
    # (L,) bool, false at the environment's tokens; None: all true. Read `is_sampled` instead.
    sampled: np.ndarray | None = None
    # (L,) int32: the step whose weights sampled each token; None: `version`. Read `token_versions` instead.
    versions: np.ndarray | None = None
    turns: int = 1  # number of the policy's turns
    turn_start: int = 0  # index in `ids` of the last turn's start
    # Texts before the last turn: policy's, environment's, policy's, …
    earlier: tuple[str, ...] = ()
    env_reward: float | None = None  # replaces the grader's reward, if given
    advantage: float = 0.0  # GRPO's advantage
    prompt_share: float = 0.0  # loss weight of each token, for --aggregation prompt

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt_id, self.sample_id

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)

    @property
    def is_sampled(self) -> np.ndarray:
        """Returns (L,) bool: true at tokens of the policy, false at the environment's."""
        if self.sampled is None:
            return np.ones(len(self.ids), bool)
        return self.sampled

    @property
    def policy_text(self) -> str:
        """Returns the text that graders read: the policy's turns, joined by line breaks."""
        return "\n".join(self.turn_texts[::2])

    @property
    def turn_texts(self) -> list[str]:
        """Returns the parts of `text`: the policy's first turn, the environment's text, the policy's next
        turn, …. The last turn is what follows `earlier` in `text`."""
        return [*self.earlier, self.text[len("".join(self.earlier)) :]]

    @property
    def token_versions(self) -> np.ndarray:
        """Returns (L,) int32: for each response token, the step whose weights sampled it."""
        if self.versions is None:
            return np.full(len(self.ids), self.version, np.int32)
        return self.versions

    @property
    def right(self) -> bool:
        return self.reward >= 1

    @property
    def entered(self) -> dict[str, float]:
        """Returns a dict: name -> weighted value of each term of the score (the grader and all `parts`)."""
        return {self.grader: self.weight * self.reward} | self.parts

    @property
    def score(self) -> float:
        """The number that training maximises."""
        return sum(self.entered.values())


@dataclass(frozen=True, eq=False)
class Pack:
    """The tokens of one forward pass: N segments end to end, T tokens in all. A segment is the prompt and the
    response of one sample. The tensors are never changed in place. Here the samples score 1 and 0 (x: true):

        tokens       p q r a b | p q r c d e       prompt p q r with the responses a b and c d e
        positions    0 1 2 3 4 | 0 1 2 3 4 5
        cu_seqlens   0           5           11
        mask         . . . x x | . . . x x x
        rewards      0 0 0 0 1 | 0 0 0 0 0 0
    """

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, from 0 in each segment
    cu_seqlens: Tensor  # (N+1,) int32, where segments start and end
    mask: Tensor  # (T,) bool, true where tokens[t] was sampled and enters the loss
    loss_tokens: Tensor  # (L,) indices where `mask` is true; mask.nonzero() would wait for the GPU
    fresh_tokens: Tensor  # (F,) indices of the loss tokens that this step's weights sampled
    engine_logp: Tensor  # (T,) log p(tokens[t] | earlier tokens of its segment), from the engine
    rewards: Tensor  # (T,) the sample's score on its last sampled token, else 0
    advantages: Tensor  # (T,)
    prompt_share: Tensor  # (T,) the loss weight for --aggregation prompt
    longest: int  # tokens of the longest segment
    responses: int  # number of samples in the loss; 0 in a filler pack
    unique: Tensor  # (U,) indices of the tokens that the model computes (see unique_prefixes)
    inverse: Tensor  # (T,) tokens[t] gets the hidden state of the token with the index unique[inverse[t]]
    old_logp: Tensor | None = None  # (T,) from the policy before the step's first update
    ref_logp: Tensor | None = None  # (T,) from the KL term's reference model
    values: Tensor | None = None  # (T,) from the critic before the step's first update
    returns: Tensor | None = None  # (T,)

    def to(self, device: torch.device | str) -> "Pack":
        """Returns the pack on another device."""
        moved = {}
        for name, x in vars(self).items():
            if isinstance(x, Tensor):
                moved[name] = x.to(device)
        return replace(self, **moved)


# --- problems


def load_problems(
    paths: Sequence[str],
    tokenizer: Any,
    cfg: Config,
    say: Say = show,
    longest: int = 0,
    keep_fields: bool = False,
) -> list[Problem]:
    """Returns all problems of the files, without repeated rows and too long prompts. Raises UserError if no
    problem is left, or if a row can't be read.

    longest: maximum tokens of prompt plus response; 0: cfg.model_len
    keep_fields: whether to set Problem.fields"""
    require(
        len(paths) > 0,
        "no data files given",
        "--data FILE [FILE …]; the README tells which data a preset is made for",
    )
    limit = min(cfg.max_prompt_len, (longest or cfg.model_len) - 1)  # tokens of a prompt
    encode = prompt_encoder(cfg.template, tokenizer, cfg.system_prompt, limit)
    special = re.compile("|".join([MARKUP, *map(re.escape, tokenizer.all_special_tokens)]))
    problems = []
    seen = set()  # the rows of all files so far
    repeated = too_long = 0
    for path in paths:
        rows, copies = _new_rows(path, seen, cfg, keep_fields)
        repeated += copies
        for line in suspicious(rows, special):
            say(f"{path}: {line}")
        for number, row in rows:
            ids = encode(row.turns, f"{path} row {number}")
            if ids is None or len(ids) > limit:  # None: its text is far too long
                too_long += 1
            else:
                problem = Problem(
                    row.text,
                    tuple(ids),
                    row.answer,
                    row.kind,
                    row.dataset,
                    file=path,
                    row=number,
                    index=len(problems),
                    fields=row.fields,
                )
                problems.append(problem)
    files = ", ".join(paths)
    require(
        len(problems) > 0,
        f"every prompt of {files} has more than {limit} tokens",
        "a larger --max_prompt_len or --max_model_len, or another --template",
    )
    say(
        f"{len(problems)} problems from {files}; dropped {repeated} repeated rows "
        f"(the first of each stays) and {too_long} prompts over {limit} tokens"
    )
    return problems


def _new_rows(path, seen, cfg, keep_fields):
    """Returns two things: the rows of a file that are not in the set `seen`, as pairs (row number, Row); and
    how many rows were left out as repeats. Adds the new rows to `seen`."""
    rows = []
    repeated = 0
    for number, row in problem_rows(path, kind_of(cfg.reward), keep_fields):
        if row is None or row in seen:  # None: a copy of an earlier row of this file
            repeated += 1
        else:
            rows.append((number, row))
            seen.add(row)
    return rows, repeated


def prompt_encoder(
    template: str, tokenizer: Any, system_prompt: str = "", limit: float = math.inf
) -> Callable:
    """Returns a function: (turns of a conversation, name of the row) -> tokens of the prompt. A turn is a
    pair (role, content). The last turn is the problem. Only the template "chat" can show earlier turns.

    The function returns None for a text so long that it must have more than `limit` tokens. Such a text may
    have millions of characters, so it is not tokenized.

    Raises UserError for a wrong template. The returned function raises UserError if the template can't show
    the conversation, or if the prompt has no token or ends in EOS."""
    form = prompt_form(template)  # "" for chat
    require(
        bool(form or tokenizer.chat_template),
        "this tokenizer has no chat template",
        "--template orz or plain",
    )
    most_chars = limit * max(map(len, tokenizer.get_vocab()))  # characters of `limit` tokens

    def encode(turns, row="the row"):
        if form:
            earlier = [role for role, content in turns[:-1] if content.strip()]
            require(
                not earlier,
                f"{row}: {len(earlier)} turns come before its problem "
                f"({', '.join(earlier[:3])}), which --template {template} can't show",
                "--template chat",
            )
            text = form.replace("{problem}", turns[-1][1])
        else:
            text = _fill_chat_template(tokenizer, turns, system_prompt, row)
        if len(text) > most_chars:
            return None
        # A chat template writes special tokens, such as BOS, into the text itself.
        with explained(f"{row}: its text can't be tokenized", "text in UTF-8"):
            ids = tokenizer(text, add_special_tokens=bool(form)).input_ids
        require(len(ids) > 0, f"{row}: its prompt has no token", "a prompt with text")
        require(
            ids[:2] != [tokenizer.bos_token_id] * 2,
            f"{row}: its prompt begins with {tokenizer.bos_token!r} twice",
            "a template without it, because the tokenizer adds it",
        )
        require(
            ids[-1] != tokenizer.eos_token_id,
            f"{row}: its prompt ends in the end token {tokenizer.eos_token!r}",
            "a template that does not end in it, and a tokenizer without add_eos_token",
        )
        return ids

    return encode


def _stop_template(*_):
    """Handles SIGPROF: ends a chat template that takes too long."""
    raise TimeoutError(f"no end after {TEMPLATE_SECONDS} CPU seconds")


@contextmanager
def _limits():
    """Context manager that limits the CPU time and the memory of a chat template, which is code from the
    model's folder."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    signal.signal(signal.SIGPROF, _stop_template)
    # SIGPROF comes after TEMPLATE_SECONDS, and then each second until the template ends.
    signal.setitimer(signal.ITIMER_PROF, TEMPLATE_SECONDS, 1)
    limit_memory(TEMPLATE_BYTES)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _no_power(x, y):
    """Refuses x ** y in a chat template. No time limit would end 9**9**9, because it is C code."""
    raise ArithmeticError("a power")


# For all chat templates: transformers runs them in a subclass of SandboxedEnvironment.
SandboxedEnvironment.intercepted_binops = frozenset(["**"])
SandboxedEnvironment.default_binop_table["**"] = _no_power


def _fill_chat_template(tokenizer, turns, system_prompt, row):
    """Returns the prompt's text. Raises UserError if the chat template fails, or leaves out a system or user
    turn."""
    if system_prompt and turns[0][0] != "system":
        turns = (("system", system_prompt), *turns)
    require(
        not system_prompt or turns[0][1].strip() != "",
        f"{row} has an empty system turn in place of --system_prompt",
        "rows with a text in it, rows without it, or no --system_prompt",
    )
    messages = [{"role": role, "content": content} for role, content in turns]
    refused = f"{row}: the chat template refuses its turns"
    with explained(refused, "other roles, or another --template"), _limits():
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    shown = "".join(text.split())  # without whitespace, because templates strip some of it
    for role, content in turns:
        # Assistant turns are not checked, because a template may remove their text in <think> tags.
        require(
            role == "assistant" or "".join(content.split()) in shown,
            f"{row}: the chat template doesn't show the {role} turn",
            "a chat template that does, or another --template",
        )
    return text


def fix_date(tokenizer: Any, day: str) -> str:
    """Make the chat template print `day` (YYYY-MM-DD) instead of today's date. So a run has the same prompts
    on every day. Returns `day`, or "" if the template does not print today's date. Raises UserError if `day`
    is no date, or if the template has a call of strftime_now without a text as its argument."""
    if not day or not tokenizer.chat_template:
        return ""
    with explained("the chat template can't be read", "--template orz or plain"):
        template = tokenizer.get_chat_template()
    if "strftime_now(" not in template:
        return ""
    with explained(f"--date is {day}", "a day such as 2026-01-31"):
        date = datetime.date.fromisoformat(day)
    call = r"""strftime_now\(\s*(["'])([^"']*)\1\s*\)"""  # group 2: a format such as %d %b %Y
    fixed = re.sub(call, lambda match: repr(date.strftime(match[2])), template)
    require(
        "strftime_now(" not in fixed,
        "the chat template prints today's date, in a format that is no text",
        "strftime_now('%d %b %Y') in it, or --date '' for other prompts on each day",
    )
    tokenizer.chat_template = fixed
    return day


def set_template(tokenizer: Any, cfg: Config) -> Config:
    """Give the chat template its arguments (--template_args) and its date. Returns the config with `date` =
    "" if the prompts have no date. Raises UserError as `set_arguments` and `fix_date` do."""
    set_arguments(tokenizer, cfg.template_args)
    day = cfg.date if cfg.template == "chat" else ""
    return replace(cfg, date=fix_date(tokenizer, day))


# Variables of a chat template that transformers always sets.
ALWAYS_SET = {"messages", "tools", "documents", "add_generation_prompt"}


def set_arguments(tokenizer: Any, words: Sequence[str]) -> None:
    """Give arguments of the chat template, such as enable_thinking=false, other defaults. They stay in an
    export's template, where a caller can still set them.

    words: NAME=VALUE, with a text, a bool or a whole number in JSON as the value. Raises UserError for other
        values, and for names that the template does not read."""
    if not words:
        return
    from transformers.utils.chat_template_utils import _get_template_variables

    with explained("the chat template can't be read", "--template orz or plain"):
        template = tokenizer.get_chat_template()
        known = _get_template_variables(template)  # names of the variables that it reads
    known -= ALWAYS_SET | {*tokenizer.special_tokens_map}
    for word in words:
        name, _, text = word.partition("=")
        with explained(f"--template_args {word}", "NAME=VALUE, such as enable_thinking=false"):
            value = json.loads(text)
        require(
            name in known and isinstance(value, str | int),  # a bool is an int
            f"--template_args {word}: the chat template reads no such argument, or no such value",
            "NAME=VALUE, a text, a bool or a whole number for one of "
            f"{', '.join(sorted(known))}; or --template_args without a value",
        )
        default = f"{{% set {name} = {_as_jinja(value)} %}}"
        # {{ '' }} keeps a line break at the start of `template`, which Jinja would drop after a block's end.
        template = f"{{% if {name} is not defined %}}{default}{{% endif %}}{{{{ '' }}}}{template}"
        tokenizer.chat_template = template


def chat_template(tokenizer: Any, form: str, system_prompt: str = "") -> str:
    """Returns a Jinja chat template that makes the same prompts as in training. If `form` is given, tries the
    template on an example, and returns "" if the example gets other tokens than in training.

    form: the text of --template, with {problem} in place of the problem; "" for `--template chat`"""
    if not form:
        template = tokenizer.get_chat_template()
        if not system_prompt:
            return template
        first = _as_jinja({"role": "system", "content": system_prompt})
        # {{ '' }} keeps a line break at the start of `template`, which Jinja would drop after a block's end.
        return (
            "{% if messages[0]['role'] != 'system' %}{% set messages = ["
            + first
            + "] + messages %}{% endif %}{{ '' }}"
            + template
        )
    added = tokenizer("").input_ids  # BOS if the tokenizer adds it
    start = "".join(tokenizer.convert_ids_to_tokens(added))
    made = (
        "{% if messages | length != 1 or messages[0]['role'] != 'user' %}"
        "{{ raise_exception('this model was trained on one user turn') }}{% endif %}"
        "{{ " + _as_jinja(start + form) + ".replace('{problem}', messages[0]['content']) }}"
    )
    example = [{"role": "user", "content": "1 + 1"}]
    ids = tokenizer.apply_chat_template(example, chat_template=made, return_dict=False)
    trained = tokenizer(form.replace("{problem}", "1 + 1")).input_ids
    return made if ids == trained else ""


def _as_jinja(value):
    """Returns Jinja code for a text, a number or a dict."""
    return json.dumps(value, ensure_ascii=False)


# --- the prompts of a step

# With --skip_solved: Problem.index -> the first step that skips the problem
Solved = dict[int, int]
NONE: Solved = {}  # no problem is solved


def batch_at(
    problems: Sequence[Problem], step: int, cfg: Config, solved: Solved = NONE
) -> list[Problem]:
    """Returns the problems whose sampling begins in this step. They depend only on (seed, step) and `solved`.
    Random problems replace solved problems."""
    others = replacement_batch(problems, step, 0, cfg, solved)  # for solved problems
    batch = []
    for place, number in enumerate(numbers_at(step, cfg)):
        epoch, at = divmod(number, len(problems))  # at: place of the prompt in its epoch
        problem = problems[_order(len(problems), cfg.seed, epoch)[at]]
        if solved.get(problem.index, math.inf) <= step:
            # %: with --carry, step 0 begins more prompts than `others` has
            problem = others[place % len(others)]
        batch.append(problem)
    return batch


def numbers_at(step: int, cfg: Config) -> range:
    """Returns the numbers of the prompts whose sampling begins in this step. All prompts of the run are
    numbered from 0. A step begins cfg.prompts_per_step prompts. With --carry, step 0 begins
    cfg.extra_prompts prompts in addition."""
    start = step * cfg.prompts_per_step
    end = start + cfg.prompts_per_step + cfg.extra_prompts
    if step:
        start += cfg.extra_prompts  # step 0 began the prompts before them
    return range(start, end)


def step_of(number: int, cfg: Config) -> int:
    """Returns the step in which the sampling of prompt `number` begins."""
    return max(0, (number - cfg.extra_prompts) // cfg.prompts_per_step)


def replacement_batch(
    problems: Sequence[Problem], step: int, round: int, cfg: Config, solved: Solved = NONE
) -> list[Problem]:
    """Returns cfg.prompts_per_step random problems. They depend only on (seed, step, round) and `solved`.

    Round 0 replaces solved problems. Rounds 1, 2, … replace prompts whose responses all have the same
    reward."""
    rng = np.random.default_rng([cfg.seed, REPLACE, step, round])
    count = cfg.prompts_per_step
    left = [p for i, p in enumerate(problems) if solved.get(i, math.inf) > step]  # not solved
    if len(left) < count:
        left = problems  # if these are also too few, problems are drawn more than once
    return [left[i] for i in rng.choice(len(left), count, replace=len(left) < count)]


@lru_cache(2)  # a step may begin in one epoch and end in the next
def _order(n, seed, epoch):
    """Returns the indices of `n` problems in the random order of an epoch."""
    rng = np.random.default_rng([seed, ORDER, epoch])
    # Unused: without this draw, runs would have another order than in earlier versions.
    rng.permutation(n)
    return rng.permutation(n)


# --- trajectories


def extended(before: Sample, segment: Sample) -> Sample:
    """Returns the trajectory `before` with the tokens of `segment` appended. The caller must set `text`."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(before, name), getattr(segment, name)])

    return replace(
        before,
        ids=joined("ids"),
        logp=joined("logp"),
        sampled=joined("is_sampled"),
        versions=joined("token_versions"),
        version=segment.version,
        stopped=segment.stopped,
    )


def answered(s: Sample, text: str, ids: Sequence[int]) -> Sample:
    """Returns the trajectory `s` with the environment's `text` appended, so that a new turn begins."""
    reply = replace(
        s,
        ids=np.array(ids, np.int32),
        logp=np.zeros(len(ids), np.float32),
        sampled=np.zeros(len(ids), bool),
        versions=None,  # so all its tokens have the version of `s`
    )
    return replace(
        extended(s, reply),
        text=s.text + text,
        turns=s.turns + 1,
        turn_start=len(s.ids) + len(ids),
        earlier=(*s.turn_texts, text),  # all texts so far; the new turn is still empty
    )


# --- packs


def group_by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Returns the samples of each prompt. `samples` must be ordered by (prompt_id, sample_id)."""
    return [list(group) for _, group in itertools.groupby(samples, lambda s: s.prompt_id)]


def assign(
    lengths: np.ndarray, cost: np.ndarray, prompts: np.ndarray, ranks: int, cfg: Config, step: int
) -> Layout:
    """Returns nested lists: result[minibatch][rank][pack] is a list of sample indices. A minibatch has the
    same samples for any number of ranks. With --aggregation prompt, it has whole prompts, and the numbers of
    prompts of two minibatches differ by at most 1.

    lengths: tokens of each sample; samples are ordered by (prompt_id, sample_id)
    cost: of each sample, such as its FLOP; only the ratios of costs matter
    prompts: prompt_id of each sample"""
    assert cfg.pack_len, "the plan (tools/plan.py, settle) replaces --pack_len 0"
    rng = np.random.default_rng([cfg.seed, MINIBATCH, step])
    if cfg.whole_prompts:
        parts = np.array_split(rng.permutation(np.unique(prompts)), cfg.minibatches)
        minibatches = [np.isin(prompts, part).nonzero()[0] for part in parts]
    else:
        # `partition` is deterministic, so the samples are shuffled first. A part is a list of indices into
        # `order`.
        order = rng.permutation(len(lengths))
        parts = partition(lengths[order], cfg.minibatches)
        minibatches = [np.sort(order[part]) for part in parts]
    return [
        _packs_of_ranks(samples, lengths, cost, prompts, ranks, cfg.pack_len)
        for samples in minibatches
    ]


def _packs_of_ranks(samples, lengths, cost, prompts, ranks, pack_len):
    """Returns the packs of one minibatch: result[rank][k] is the list of sample indices of the rank's k-th
    pack. All ranks have equally many packs.

    The ranks compute their k-th packs at the same time, and wait for the slowest rank. So the k-th packs of
    all ranks have similar costs. Short samples of one prompt stay together, because a pack computes their
    prompt only once."""
    total = int(lengths[samples].sum())
    # A unit is a list of samples that stay together. It has at most an eighth of a pack, because large units
    # can't be balanced.
    unit_len = min(pack_len, total // ranks) // 8  # maximum tokens of a unit
    units = _units(samples.tolist(), lengths, prompts, unit_len)
    unit_tokens = np.array([lengths[unit].sum() for unit in units])
    unit_cost = np.array([cost[unit].sum() for unit in units])
    packs_per_rank = max(1, math.ceil(total / (pack_len * ranks)))
    # bins: for each pack, the indices of its units; None: a unit does not fit
    while (bins := partition(unit_tokens, packs_per_rank * ranks, pack_len, unit_cost)) is None:
        packs_per_rank += 1
    # The ranks take the sorted packs in turn. So the k-th packs of all ranks have similar costs.
    bins.sort(key=lambda b: -unit_cost[b].sum())
    packs = []  # sample indices of each pack
    for b in bins:
        packs.append(sum((units[u] for u in b), []))
    return [packs[rank::ranks] for rank in range(ranks)]


def _units(indices, lengths, prompts, limit):
    """Returns lists of samples that stay in one pack, so that the pack computes their prompt only once. A
    list has samples of one prompt, and at most `limit` tokens unless it is a single sample.

    indices: ascending sample indices"""
    lists = []
    room = 0  # tokens that the last list may still take
    for i in indices:
        if lists and prompts[lists[-1][0]] == prompts[i] and lengths[i] <= room:
            lists[-1].append(i)
        else:
            lists.append([i])
            room = limit
        room -= int(lengths[i])
    return lists


def partition(
    lengths: np.ndarray, bins: int, cap: float = math.inf, cost: np.ndarray | None = None
) -> list[list[int]] | None:
    """Divide items into `bins` lists of nearly equal cost. Returns lists of item indices, or None if an item
    fits in no list.

    lengths: tokens of each item
    cap: maximum tokens of a list
    cost: cost of each item; default: lengths

    Each item goes to the cheapest list with room, the most expensive item first (the LPT rule)."""
    cost = lengths if cost is None else cost
    lists = [[] for _ in range(bins)]
    tokens = np.zeros(bins)  # of each list
    costs = np.zeros(bins)
    for i in np.argsort(-cost, kind="stable"):
        has_room = tokens + lengths[i] <= cap
        if not has_room.any():
            return None
        b = np.where(has_room, costs, np.inf).argmin()
        lists[b].append(int(i))
        tokens[b] += lengths[i]
        costs[b] += cost[i]
    return lists


# FSDP needs the same number of passes on every rank. A rank without samples for a pass computes FILLER: a
# prompt of one token (id 0) with an empty response, outside the loss.
EMPTY = np.zeros(0, np.int32)
FILLER = Sample(0, 0, (0,), EMPTY, np.float32(EMPTY), False, "", 0, in_loss=False)


def pack(samples: Sequence[Sample], step: int | None = None) -> Pack:
    """Returns a pack with the samples end to end. Without samples, the pack has only FILLER.

    step: the step whose weights sampled the `fresh_tokens`; None: all loss tokens are fresh"""
    samples = samples or [FILLER]
    segments = [[*s.prompt, *s.ids.tolist()] for s in samples]
    lengths = np.array([s.length for s in samples])
    cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
    starts = cu_seqlens[:-1]
    index = np.arange(cu_seqlens[-1])  # of each token in the pack
    positions = index - np.repeat(starts, lengths)
    in_response = positions >= np.repeat([len(s.prompt) for s in samples], lengths)

    def of_responses(values):  # arrays (L,) of the responses -> (T,), 0 at prompt tokens
        flat = np.concatenate(values)
        out = np.zeros(len(index), flat.dtype)
        out[in_response] = flat
        return out

    sampled = of_responses([s.is_sampled for s in samples])
    mask = sampled & np.repeat([s.in_loss for s in samples], lengths)
    fresh = mask
    if step is not None:
        fresh = mask & (of_responses([s.token_versions for s in samples]) == step)
    last = np.maximum.reduceat(sampled * index, starts)  # a segment's last sampled token, or 0
    scores = np.array([s.score for s in samples])
    rewards = np.zeros(len(index), np.float32)
    rewards[last] = scores * (last > 0)  # last = 0: no sampled token, so the score is left out
    # A prompt that several samples share is computed once.
    unique, inverse = unique_prefixes(segments)
    arrays = dict(
        tokens=np.concatenate(segments),
        positions=positions,
        cu_seqlens=cu_seqlens,
        mask=mask,
        loss_tokens=mask.nonzero()[0],
        fresh_tokens=fresh.nonzero()[0],
        engine_logp=of_responses([s.logp for s in samples]),
        rewards=rewards,
        # Only sampled tokens have an advantage: not the prompt, and not the texts of an environment.
        advantages=np.repeat(np.float32([s.advantage for s in samples]), lengths) * sampled,
        prompt_share=np.repeat(np.float32([s.prompt_share for s in samples]), lengths),
        unique=unique,
        inverse=inverse,
    )
    return Pack(
        longest=int(lengths.max()),
        responses=sum(s.in_loss for s in samples),
        **{name: torch.from_numpy(array) for name, array in arrays.items()},
    )


LEAST_SHARED = 0.04  # smallest share of a pack's tokens for which prefixes are shared


def unique_prefixes(segments: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns two arrays that say which tokens the model computes. If several segments begin with the same
    tokens, the hidden states of these tokens are equal, so the model computes one copy of them. Prefixes are
    not shared if that saves less than LEAST_SHARED of the tokens.

    1. `unique` (U,): indices of the computed tokens
    2. `inverse` (T,): for each token, the position of its computed copy in `unique`

        index       0 1 2 3 4   5 6 7 8 9   10 11
        segments    p q r a b | p q r a c | s  d         (T = 12 tokens)
        unique      0 1 2 3 4           9   10 11        (U = 8: p q r a b c s d)
        inverse     0 1 2 3 4   0 1 2 3 5   6  7
    """
    starts = [0, *itertools.accumulate(map(len, segments))]
    computed = np.arange(starts[-1])  # computed[t]: the token whose hidden state token t gets
    # In sorted order, segment i comes right before j. No segment before i shares a longer prefix with j.
    order = sorted(range(len(segments)), key=lambda i: segments[i])
    for i, j in itertools.pairwise(order):
        common = len(os.path.commonprefix([segments[i], segments[j]]))
        computed[starts[j] : starts[j] + common] = computed[starts[i] : starts[i] + common]
    is_unique = computed == np.arange(starts[-1])
    # Attention copies shared prefixes in front of each segment. If few tokens are shared, that takes longer
    # than to compute them.
    if is_unique.mean() > 1 - LEAST_SHARED:
        is_unique[:] = True
        computed = np.arange(starts[-1])
    position = is_unique.cumsum() - 1  # index of a computed token in `unique`
    return is_unique.nonzero()[0], position[computed]
