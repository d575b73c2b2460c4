"""Problems in, packs out.

Tokenises the rows that grading/rows.py reads. Draws each step's prompts as a pure function of (seed, step).
Cuts a step's samples into minibatches and balanced packs, and lays packs out for the model.

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
import operator
import os
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs import Config, UserError, require
from grading.rows import Row, problem_rows
from reward import kind_of

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
CHUNK = 128  # rows that are tokenised at once; 1000 take longer a row, for caches
ORDER, MINIBATCH, REPLACE = 1, 2, 3  # random streams of this file: np.random.default_rng([seed, stream, …])


@dataclass(frozen=True)
class Problem:
    """A prompt with a verifiable answer."""

    text: str  # the problem as the file has it
    ids: tuple[int, ...]  # tokens of the templated prompt
    answer: str  # the gold answer
    kind: str = "math"  # how answers are compared: math, choice or exact; passed to a user's own reward too
    weight: float = 1.0  # how often it comes in an epoch
    earlier: tuple[tuple[str, str], ...] = ()  # (role, content) of the turns before it, a system turn too
    dataset: str = ""  # the row's data set, which may have an extractor and a grader of its own

    @property
    def turns(self) -> list[dict[str, str]]:
        """The conversation that a chat template takes. Its last turn is the problem."""
        return conversation((*self.earlier, ("user", self.text)))


@dataclass(frozen=True, eq=False)
class Sample:
    """One response to one prompt. Training uses the token ids that the engine sampled; text is never
    re-tokenised. With --env, segments that the policy sampled and texts of the environment alternate."""

    prompt_id: int  # which prompt of the step's batch
    sample_id: int  # which of the prompt's samples
    prompt: tuple[int, ...]
    ids: np.ndarray  # (L,) int32 response tokens of all segments, with those of the stop strings or EOS
    logp: np.ndarray  # (L,) float32 log-probs from the engine, at its temperature; 0 where not sampled
    stopped: bool  # ended by EOS or a stop string, not by the length limit
    text: str  # the response, decoded
    version: int  # of the weights that sampled its last segment
    reward: float = 0.0  # from the grader
    reason: str = ""  # why that reward: one of reward.REASONS
    answer: str | None = None  # what was extracted from the response
    grader: str = ""  # the term of --reward that gave it
    weight: float = 1.0  # of the reward, in training
    parts: dict[str, float] = field(default_factory=dict)  # added to it, by name
    failed: tuple[str, ...] = ()  # graders whose function raised
    in_loss: bool = True  # whether its sampled tokens enter the loss
    sampled: np.ndarray | None = None  # (L,) bool, false at tokens of the environment; None: all were sampled
    versions: np.ndarray | None = None  # (L,) int32 version of the weights for each token; None: `version`
    turns: int = 1  # its texts of the environment, and 1
    turn_start: int = 0  # where its last turn starts in ids
    env_reward: float | None = None  # from the environment, in place of the grader's; None: it gave none
    advantage: float = 0.0  # grpo: from the group's scores. ppo computes one per token later
    prompt_share: float = 0.0  # weight of its tokens, with --aggregation prompt

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.ids)

    @property
    def is_sampled(self) -> np.ndarray:
        """(L,) bool: the response tokens that the policy sampled."""
        return np.ones(len(self.ids), bool) if self.sampled is None else self.sampled

    @property
    def token_versions(self) -> np.ndarray:
        """(L,) int32: version of the weights that sampled each token."""
        return np.full(len(self.ids), self.version, np.int32) if self.versions is None else self.versions

    @property
    def entered(self) -> dict[str, float]:
        """The weighted reward and its parts, by name."""
        return {self.grader: self.weight * self.reward} | self.parts

    @property
    def score(self) -> float:
        """What training maximises: the sum of the weighted reward and its parts."""
        return self.weight * self.reward + sum(self.parts.values())


@dataclass(frozen=True, eq=False)
class Pack:
    """N segments (prompt + response) end to end, T tokens in all. No tensor is written to after it was
    made."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, from 0 in each segment
    cu_seqlens: Tensor  # (N+1,) int32, where segments start and end
    mask: Tensor  # (T,) bool, true where tokens[t] was sampled and enters the loss
    loss_tokens: Tensor  # (L,) indices of these tokens; made on the host, where their number is known
    fresh_tokens: Tensor  # (F,) those of them that the step's own weights sampled: all, without --carry
    engine_logp: Tensor  # (T,) log p(tokens[t] | the tokens before it in its segment), from the engine
    rewards: Tensor  # (T,) the sample's score on its last token, else 0
    advantages: Tensor  # (T,)
    prompt_share: Tensor  # (T,) weight of the token with --aggregation prompt
    longest: int  # tokens of the longest segment
    responses: int  # samples that enter the loss; 0 in a filler
    unique: Tensor  # (U,) indices of the tokens that the model computes (see unique_prefixes)
    inverse: Tensor  # (T,) for each token, its position in `unique`
    old_logp: Tensor | None = None  # (T,) from the policy before the step's first update
    ref_logp: Tensor | None = None  # (T,) from the reference
    values: Tensor | None = None  # (T,) from the critic before its first update of the step
    returns: Tensor | None = None  # (T,)

    def to(self, device: torch.device | str) -> Pack:
        """The same pack on another device. To a GPU it goes from pinned memory, so that nobody waits."""
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}
        if torch.device(device).type == "cuda":
            tensors = {k: v.pin_memory() for k, v in tensors.items()}
        return replace(self, **{k: v.to(device, non_blocking=True) for k, v in tensors.items()})


# --- problems


class Problems(Sequence[Problem]):
    """Problems of files, in the order of the files. Takes 4 bytes a token and the texts; a `Problem` is built
    when it is looked up. A million problems of 109 tokens take 0.7 GB beside their texts."""

    def __init__(self) -> None:
        self.files: list[tuple[str, float, range]] = []  # path, weight, indices of its problems
        self.digest = hashlib.sha256()  # see `fingerprint`
        self._texts, self._answers, self._kinds, self._datasets = [], [], [], []
        self._earlier = {}  # index -> earlier turns, of the few problems that have some
        self._rows = array("i")  # number of the problem's row in its file
        self._tokens, self._ends = array("i"), array("q", [0])  # of all problems, end to end

    def add_file(self, path: str, weight: float) -> None:
        """The problems added from now on are this file's."""
        self.files.append((path, weight, range(len(self), len(self))))

    def add(self, number: int, row: Row, ids: Sequence[int]) -> None:
        """Append a row's problem. `number`: the row's in its file; `ids`: its prompt's tokens."""
        if row.turns[1:]:
            self._earlier[len(self)] = row.turns[:-1]
        self._texts.append(row.text)
        self._answers.append(row.answer)
        self._kinds.append(row.kind)
        self._datasets.append(row.dataset)
        self._rows.append(number)
        self._tokens.extend(array("i", ids))
        self._ends.append(len(self._tokens))
        path, weight, indices = self.files[-1]
        self.files[-1] = path, weight, range(indices.start, len(self))
        self.digest.update(_identity(tuple(ids), row.answer, row.kind, weight, row.dataset))

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[operator.index(index)]
        ids = tuple(self._tokens[self._ends[i]:self._ends[i + 1]])
        return Problem(self._texts[i], ids, self._answers[i], self._kinds[i], self._file(i)[1],
                       self._earlier.get(i, ()), self._datasets[i])

    def datasets(self) -> set[str]:
        """The data sets that the rows name."""
        return set(self._datasets)

    def of_datasets(self, names: Collection[str]) -> list[int]:
        """Indices of the problems of these data sets."""
        return [i for i, name in enumerate(self._datasets) if name in names]

    def where(self, index: int) -> str:
        """`FILE:ROW` of a problem."""
        return f"{os.path.basename(self._file(index)[0])}:{self._rows[index]}"

    def _file(self, index):
        return next(file for file in self.files if index in file[2])


def load_problems(paths: Sequence[str], tokenizer: Any, cfg: Config, say: Callable[[str], None] = print,
                  longest: int = 0) -> Problems:
    """All problems of the files, in file order. Repeated problems are dropped, and so are prompts over
    --max_prompt_len or without room for a response: `longest` is that of prompt and response together, in
    tokens (default: cfg.model_len). `say` tells how many.

    cfg.data_weights apply if `paths` is cfg.data. Raises UserError with file and row for a row that can't be
    read, and where nothing is left."""
    require(len(paths) > 0, "no data files given",
            "--data FILE [FILE …]; the README tells which data a preset is made for")
    encode = prompt_encoder(cfg.template, tokenizer, cfg.system_prompt)
    weights = cfg.data_weights if cfg.data_weights and tuple(paths) == cfg.data else (1.0,) * len(paths)
    default_kind = kind_of(cfg.reward)
    limit = min(cfg.max_prompt_len, (longest or cfg.model_len) - 1)
    end = getattr(tokenizer, "eos_token_id", None)
    problems, repeated, too_long, shortest = Problems(), Repeated(), [], sys.maxsize
    for path, weight in zip(paths, weights, strict=True):
        problems.add_file(path, weight)
        fresh = repeated.filter(problem_rows(path, default_kind))
        while rows := list(itertools.islice(fresh, CHUNK)):
            for (number, row), ids in zip(rows, _tokens(rows, encode, path, cfg), strict=True):
                if ids[-1] == end:
                    raise UserError(f"{path} row {number}: its prompt ends in the end token "
                                    f"{tokenizer.eos_token!r}; needed: a template that ends where the answer "
                                    "begins, and a tokenizer without add_eos_token")
                if len(ids) <= limit:
                    problems.add(number, row, ids)
                else:
                    shortest = min(shortest, len(ids))
                    too_long.append(f"{os.path.basename(path)}:{number}" if len(too_long) < 5 else "")
    name = "max_prompt_len" if limit == cfg.max_prompt_len else "max_model_len"
    require(len(problems) > 0, f"every prompt of {', '.join(paths)} is longer than --{name} "
            f"{getattr(cfg, name)} tokens, or leaves no room for a response: with --template {cfg.template} "
            f"the shortest has {shortest}", f"a larger --{name}, or another --template")
    dropped = str(repeated)
    if too_long:
        some = " ".join(too_long[:5]) + " …" * (len(too_long) > 5)
        dropped += f"; dropped {len(too_long)} over {limit} tokens: {some}"
    say(f"{len(problems)} problems from {', '.join(paths)}{dropped}")
    return problems


class Repeated:
    """Finds problems that came before with the same answer, kind and data set, by hashes. As text: what was
    dropped."""

    def __init__(self) -> None:
        self.count, self.count_across = 0, 0
        self._files = 0
        self._file_of = {}  # hash -> number of the file that has it

    def filter(self, rows: Iterator[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
        """The rows of one more file that are not repeated."""
        self._files += 1
        for number, row in rows:
            same = repr((row.turns, row.answer, row.kind, row.dataset))
            key = hashlib.blake2b(same.encode(), digest_size=8).digest()
            file = self._file_of.get(key)
            if file is None:
                self._file_of[key] = self._files
                yield number, row
            else:
                self.count += 1
                self.count_across += file < self._files

    def __str__(self) -> str:
        across = f" ({self.count_across} of an earlier file, which keeps them)" if self.count_across else ""
        return f"; dropped {self.count} repeated{across}" if self.count else ""


def conversation(turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """(role, content) pairs as a chat template takes them."""
    return [{"role": role, "content": content} for role, content in turns]


def prompt_encoder(template: str, tokenizer: Any,
                   system_prompt: str = "") -> Callable[[list[list[dict[str, str]]]], list[list[int]]]:
    """A function from conversations, whose last turns are the problems, to their prompts' tokens. The chat
    template shows all turns, and `system_prompt` first where a conversation has no system turn. The others
    show the problem. The tokenizer adds its BOS where it has one. Raises UserError for a template that
    doesn't exist or has no {problem}; the function does for turns that the chat template leaves out."""
    if template == "chat":
        require(bool(getattr(tokenizer, "chat_template", None)), "this tokenizer has no chat template",
                "--template orz or plain")
        return _chat_encoder(tokenizer, system_prompt)
    form = prompt_form(template)
    return lambda prompts: tokenizer(
        [form.replace("{problem}", turns[-1]["content"]) for turns in prompts]).input_ids


def prompt_form(template: str) -> str:
    """The text of a template, with {problem} in it; "" for the tokenizer's chat template. Raises UserError
    for one that doesn't exist or has no {problem}."""
    form = "" if template == "chat" else TEMPLATES.get(template)
    if form is None:
        require(os.path.isfile(template), f"no template {template!r}",
                "--template orz, plain, chat or a text file with {problem}")
        try:
            form = Path(template).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise UserError(f"{template} is not UTF-8; needed: a UTF-8 text with {{problem}}") from None
        require("{problem}" in form, f"{template} lacks {{problem}}", "a text with {problem} in it")
    return form


def chat_template(tokenizer: Any, form: str, system_prompt: str = "") -> str:
    """A Jinja chat template that asks as `prompt_encoder` does. `form`: see prompt_form. With "" it is the
    tokenizer's own, with the system prompt where a conversation has none. Otherwise it shows one user turn,
    and raises for any other conversation. "" where the tokens would differ."""
    if not form:
        first = f"[{{'role': 'system', 'content': {_jinja(system_prompt)}}}]"
        start = ("{% if messages[0]['role'] != 'system' %}{% set messages = " + first
                 + " + messages %}{% endif %}{{ '' }}")
        return start * bool(system_prompt) + tokenizer.get_chat_template()
    bare, ids = (tokenizer("1", add_special_tokens=special).input_ids for special in (False, True))
    at = next(i for i in range(len(ids)) if ids[i:i + len(bare)] == bare)  # after the BOS, where there is one
    before, after = (tokenizer.convert_ids_to_tokens(some) for some in (ids[:at], ids[at + len(bare):]))
    pieces = map(_jinja, "".join([*before, form, *after]).split("{problem}"))
    found = ("{% if messages | length != 1 or messages[0]['role'] != 'user' %}"
             "{{ raise_exception('this model was trained on one user turn') }}{% endif %}"
             "{{ " + " + messages[0]['content'] + ".join(pieces) + " }}")
    asked = tokenizer.apply_chat_template(conversation([("user", "1 + 1")]), chat_template=found,
                                          return_dict=False)
    return found if asked == tokenizer(form.replace("{problem}", "1 + 1")).input_ids else ""


def _jinja(text):
    """The text as a string of Jinja, which reads the escapes of Python."""
    return "'" + text.encode("unicode_escape").decode().replace("'", "\\'") + "'"


def _chat_encoder(tokenizer, system_prompt):
    first = conversation([("system", system_prompt)] if system_prompt else [])
    looked_at = set()  # sequences of roles: a template shows the same turns of equal ones

    def encode(prompts):
        prompts = [turns if turns[0]["role"] == "system" else first + turns for turns in prompts]
        for turns in prompts:
            roles = tuple(turn["role"] for turn in turns)
            if roles not in looked_at:
                _check_shown(turns, tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=True))
                looked_at.add(roles)
        return tokenizer.apply_chat_template(prompts, tokenize=True, add_generation_prompt=True,
                                             return_dict=False)

    return encode


def _check_shown(turns, text):
    """Raises UserError where a turn is not in the prompt's text. Spaces don't count: templates strip them.
    Nor do the assistant's turns: templates cut their thoughts."""
    text = "".join(text.split())
    for turn in turns:
        shown = turn["role"] == "assistant" or "".join(turn["content"].split()) in text
        require(shown, f"the chat template doesn't show the {turn['role']} turn",
                "a chat template that does, or another --template")


def _tokens(rows, encode, path, cfg):
    """The tokens of the prompts of (number, row) pairs. Raises UserError with the row where the template
    can't show all turns, or fails."""
    for number, row in rows:
        earlier = [role for role, content in row.turns[:-1] if content.strip()]
        require(cfg.template == "chat" or not earlier, f"{path} row {number} has {len(earlier)} turns before "
                f"its problem ({', '.join(earlier[:3])}), which --template {cfg.template} can't show",
                "--template chat")
    conversations = [conversation(row.turns) for _, row in rows]
    try:
        return encode(conversations)
    except Exception:  # a chat template is a program, which may raise anything
        if cfg.template != "chat":
            raise
        for (number, _), turns in zip(rows, conversations, strict=True):
            try:
                encode([turns])
            except UserError as e:
                raise UserError(f"{path} row {number}: {e}") from None
            except Exception as e:
                why = " ".join(f"{type(e).__name__}: {e}".split())
                raise UserError(f"{path} row {number}: the chat template refuses its turns ({why:.80}); "
                                "needed: roles that it knows, or another --template") from None
        raise


def fingerprint(problems: Sequence[Problem]) -> str:
    """Hash of the problems' tokens, answers, kinds, weights and data sets, in order. A checkpoint stores it:
    see ckpt.resume."""
    digest = problems.digest if isinstance(problems, Problems) else hashlib.sha256(
        b"".join(_identity(p.ids, p.answer, p.kind, p.weight, p.dataset) for p in problems))
    return digest.hexdigest()[:16]


def _identity(*fields):
    *others, dataset = fields  # without one, the hash is that of versions that knew none
    return repr(fields if dataset else tuple(others)).encode()


def batch_at(problems: Sequence[Problem], step: int, cfg: Config) -> list[Problem]:
    """The prompts that begin in the step. The order is reshuffled each epoch and is a pure function of (seed,
    step)."""
    return list(problems_at(problems, numbers_at(step, cfg), cfg).values())


def problems_at(problems: Sequence[Problem], numbers: Iterable[int], cfg: Config) -> dict[int, Problem]:
    """The run's prompts by number. The number counts the prompts from the run's start."""
    groups, n = _groups(problems), epoch_len(problems)
    return {i: problems[_epoch(cfg.seed, i // n, groups)[1][i % n]] for i in numbers}


def numbers_at(step: int, cfg: Config) -> range:
    """Numbers of the prompts that begin in the step: as many as it trains on. The first step has the extra
    ones of --carry too."""
    count, extra = cfg.prompts_per_step, cfg.extra_prompts
    return range(step * count + (extra if step else 0), (step + 1) * count + extra)


def step_of(number: int, cfg: Config) -> int:
    """The step in which the prompt of that number begins."""
    return max(0, (number - cfg.extra_prompts) // cfg.prompts_per_step)


def replacement_batch(problems: Sequence[Problem], step: int, round: int, cfg: Config) -> list[Problem]:
    """Replacement prompts for uniform groups: one per prompt of the step, a pure function of (seed, step,
    round). A problem is as likely as it is frequent in the step's epoch."""
    rng, count = np.random.default_rng([cfg.seed, REPLACE, step, round]), cfg.prompts_per_step
    epoch = step * count // epoch_len(problems)
    drawn = _epoch(cfg.seed, epoch, _groups(problems))[0]
    return [problems[drawn[i]] for i in rng.choice(len(drawn), count, replace=len(drawn) < count)]


def epoch_len(problems: Sequence[Problem]) -> int:
    """Prompts in an epoch: each file's problems times its weight."""
    return sum(_draws(weight, sum(map(len, parts))) for weight, parts in _groups(problems))


def _draws(weight, n):
    return max(1, round(weight * n))


def _groups(problems):
    """(weight, ranges of indices) of the problems that an epoch draws from together. A file is a group of its
    own; a list of problems counts as one file for each run of equal weights."""
    if isinstance(problems, Problems):
        files = [(weight, indices) for _, weight, indices in problems.files]
    else:
        weights = [p.weight for p in problems]
        starts = [i for i in range(len(weights)) if i == 0 or weights[i] != weights[i - 1]]
        files = [(weights[a], range(a, b)) for a, b in itertools.pairwise([*starts, len(weights)])]
    groups = {}
    for number, (weight, indices) in enumerate(files):
        # Of files with one whole weight all problems come equally often: one group draws the same.
        key = weight, 0 if weight == int(weight) else number
        if indices:
            groups.setdefault(key, []).append(indices)
    return tuple((weight, tuple(parts)) for (weight, _), parts in groups.items())


@lru_cache(maxsize=2)
def _epoch(seed, epoch, groups):
    """Indices of an epoch's problems, in order and shuffled. Each problem comes floor(weight) times; of each
    group a random subset comes once more. Takes time in proportion to the problems, once an epoch."""
    rng, drawn = np.random.default_rng([seed, ORDER, epoch]), []
    for weight, parts in groups:
        same = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        whole, rest = divmod(_draws(weight, len(same)), len(same))
        drawn += [same] * whole + [rng.permutation(same)[:rest]]
    drawn = np.concatenate(drawn)
    return drawn, rng.permutation(drawn)


# --- trajectories


def extended(before: Sample, segment: Sample) -> Sample:
    """A trajectory with its next segment, whose prompt is all of `before`. Its text stays that of
    `before`."""
    sampled = np.concatenate([before.is_sampled, segment.is_sampled])
    versions = np.concatenate([before.token_versions, segment.token_versions])
    return replace(
        before, ids=np.concatenate([before.ids, segment.ids]), stopped=segment.stopped,
        logp=np.concatenate([before.logp, segment.logp]), sampled=None if sampled.all() else sampled,
        versions=None if (versions == segment.version).all() else versions, version=segment.version)


def answered(s: Sample, text: str, ids: Sequence[int]) -> Sample:
    """The trajectory with a text of the environment, after which its next turn starts. `ids`: the text's
    tokens."""
    reply = replace(s, ids=np.array(ids, np.int32), logp=np.zeros(len(ids), np.float32),
                    sampled=np.zeros(len(ids), bool), versions=None)
    return replace(extended(s, reply), text=s.text + text, turns=s.turns + 1,
                   turn_start=len(s.ids) + len(ids))


# --- packs


def group_by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """One list per prompt, of samples that are ordered by (prompt_id, sample_id)."""
    return [list(group) for _, group in itertools.groupby(samples, lambda s: s.prompt_id)]


def assign(lengths: np.ndarray, ranks: int, cfg: Config, step: int,
           work: np.ndarray | None = None,
           prompts: np.ndarray | None = None) -> list[list[list[list[int]]]]:
    """Which sample goes where: minibatches[m][rank][pack] is a list of sample numbers. `lengths[i]` is the
    tokens of sample i; samples are ordered by (prompt_id, sample_id). `work[i]` is its cost in any unit;
    default: its tokens. `prompts[i]` is its prompt_id; default: each has --samples_per_prompt samples.

    Minibatches are the same for any number of ranks, and packs do not change the maths. So ranks and packing
    change no result. In a minibatch each rank gets equally many packs, because FSDP's collectives need it,
    and the k-th packs of all ranks cost about the same. Samples of one prompt are kept together, in units of
    at most an eighth of a pack and of a rank's tokens, because a prefix that they share is computed once per
    pack. """
    work = lengths if work is None else work
    prompts = np.arange(len(lengths)) // cfg.samples_per_prompt if prompts is None else prompts
    order = np.random.default_rng([cfg.seed, MINIBATCH, step]).permutation(len(lengths))
    minibatches = []
    for chosen in partition(lengths[order], cfg.minibatches):
        minibatch = sorted(order[chosen].tolist())
        together = min(cfg.pack_len, int(lengths[minibatch].sum()) // ranks) // 8
        units = _neighbours(minibatch, lengths, prompts, together)
        tokens, cost = (np.array([x[unit].sum() for unit in units]) for x in (lengths, work))
        packs = max(1, -(-int(tokens.sum()) // (cfg.pack_len * ranks)))
        while (bins := partition(tokens, packs * ranks, cfg.pack_len, cost)) is None:
            packs += 1
        bins.sort(key=lambda b: -cost[b].sum())  # costliest first, dealt in turn: k-th packs cost alike
        indices = [[i for u in b for i in units[u]] for b in bins]
        minibatches.append([indices[rank::ranks] for rank in range(ranks)])
    return minibatches


def _neighbours(indices, lengths, prompts, limit):
    """Ascending sample indices in lists of one prompt's samples with at most `limit` tokens, or of one
    sample."""
    lists = []
    room = 0
    for i in indices:
        if lists and prompts[lists[-1][0]] == prompts[i] and lengths[i] <= room:
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


def pack(samples: Sequence[Sample], step: int | None = None) -> Pack:
    """Lay samples end to end. Without samples: a filler of one token that no loss sees, so that every rank
    runs equally many passes. `step`: the version of the weights whose tokens are fresh; None: all are."""
    if not samples:
        zero = torch.zeros(1)
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32)
        none = zero[:0].long()
        return Pack(zero.long(), zero.long(), cu_seqlens, zero.bool(), none, none, zero, zero, zero, zero,
                    longest=1, responses=0, unique=zero.long(), inverse=zero.long())
    lengths = np.array([s.length for s in samples])
    ends = lengths.cumsum()
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    response = positions >= np.repeat([len(s.prompt) for s in samples], lengths)
    logp, rewards = np.zeros((2, ends[-1]), np.float32)
    logp[response] = np.concatenate([s.logp for s in samples])
    sampled = np.zeros(ends[-1], bool)
    sampled[response] = np.concatenate([s.is_sampled for s in samples])
    rewards[ends - 1] = [s.score for s in samples]
    segments = [np.array([*s.prompt, *s.ids.tolist()], dtype=np.int64) for s in samples]
    unique, inverse = unique_prefixes(segments)
    mask = sampled & np.repeat([s.in_loss for s in samples], lengths)
    fresh = mask.copy()
    if step is not None:
        fresh[response] &= np.concatenate([s.token_versions for s in samples]) == step
    arrays = dict(
        tokens=np.concatenate(segments),
        positions=positions,
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        mask=mask,
        loss_tokens=mask.nonzero()[0],
        fresh_tokens=fresh.nonzero()[0],
        engine_logp=logp,
        rewards=rewards,
        advantages=np.repeat(np.array([s.advantage for s in samples], np.float32), lengths) * sampled,
        prompt_share=np.repeat(np.array([s.prompt_share for s in samples], np.float32), lengths),
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
