"""Graded rollouts and evaluation, and the command that evaluates any Hugging Face folder.

    with engine.awake(full_weights(policy), version=step):
        samples = rollout(engine, grader, {prompt_id: problem, …}, n=8, key=(seed, step), …)

    python -m tools.evaluate MODEL [MODEL …] DATA [DATA …] [--eval_samples 16] [--template chat] …
    torchrun --nproc-per-node 8 -m tools.evaluate MODEL DATA …        # on 8 GPUs; the flags in EVAL_FLAGS
"""

import hashlib
import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import dist
import grpo
from configs import PRESETS, Config, require
from data import (
    Problem,
    Sample,
    answered,
    extended,
    group_by_prompt,
    load_problems,
    numbers_at,
    step_of,
)
from engine import Engine
from engines.torch_engine import TorchEngine
from engines.vllm_engine import VLLMEngine
from grading.answers import extract
from grading.worker import Grade, Grader
from model import load_config, ropes
from reward import Term, parse_terms, repetition, tag_count, think_then_answer

Key = tuple[int, int]  # prompt_id and sample_id
K = TypeVar("K")
ROUND = 4  # the key of a later round: that of the first, ROUND and the round

# --- rewards


def overlong(group: Sequence[Sample], cfg: Config) -> list[float]:
    """DAPO's penalty for responses near the length limit (arXiv 2503.14476, eq. 13). After a long prompt the
    limit may be that of prompt and response together."""
    limits = [min(cfg.max_response_len, cfg.model_len - len(s.prompt)) for s in group]
    return [grpo.overlong_penalty(len(s.ids), limit, cfg.overlong_buffer)
            for s, limit in zip(group, limits, strict=True)]


def nonstop(group: Sequence[Sample], cfg: Config) -> list[float]:
    """Open-Instruct's penalty for responses that the length limit ended."""
    return [0.0 if s.stopped else -cfg.nonstop_penalty for s in group]


def length(group: Sequence[Sample], cfg: Config) -> list[float]:
    """Kimi k1.5's length reward (arXiv 2501.12599, sec. 2.3.3): from 0.5 for the shortest of a prompt's
    responses to -0.5 for the longest; for a wrong response at most 0. An environment's tokens don't count."""
    lengths = [int(s.is_sampled.sum()) for s in group]
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    rewards = [0.5 - (n - shortest) / spread if spread else 0.0 for n in lengths]
    return [x if s.reward > 0 else min(0.0, x) for s, x in zip(group, rewards, strict=True)]


# What training may add to the reward, by name: functions of the samples of one prompt. A part is on if
# --reward names it, or its flag in BY_FLAG is given. Each is logged as reward/NAME.
REWARD_PARTS = {
    "format": lambda group, cfg: [think_then_answer(s.text) for s in group],
    "tags": lambda group, cfg: [tag_count(s.text) for s in group],
    "repetition": lambda group, cfg: [-repetition(s.text) for s in group],
    "length": length,
    "overlong": overlong,
    "nonstop": nonstop,
}
BY_FLAG = {"overlong": "overlong_buffer", "nonstop": "nonstop_penalty"}  # parts that a flag of their own adds


def terms_of(cfg: Config) -> list[Term]:
    """The terms of --reward, graders first. Raises UserError for one that doesn't exist."""
    terms = parse_terms(cfg.reward, [name for name in REWARD_PARTS if name not in BY_FLAG])
    clash = sorted({t.name for t in terms if t.kind or t.custom} & REWARD_PARTS.keys())
    require(not clash, f"--reward has a function named {', '.join(clash)}, as a part is", "another name")
    return terms


def weighted_parts(cfg: Config) -> dict[str, float]:
    """Name and weight of the parts that are on."""
    named = {t.name: t.weight for t in terms_of(cfg) if not t.kind and not t.custom}
    return named | {name: 1.0 for name, flag in BY_FLAG.items() if getattr(cfg, flag)}


def part_names(cfg: Config) -> list[str]:
    """Names of all that may enter a sample's score beside the first grader, whose mean is the reward's. Where
    a data set has its own grader, the first one differs, and all graders are named."""
    graders = [t for t in terms_of(cfg) if t.kind or t.custom]
    own = any(t.dataset for t in graders)
    return [*(t.name for t in graders[0 if own else 1:]), *weighted_parts(cfg)]


def reward_files(cfg: Config) -> dict[str, str]:
    """Path -> hash of the text of each file that --reward and --env name; "" for one that can't be read."""
    functions = [*(t.custom for t in terms_of(cfg)), cfg.env]
    paths = {function.rpartition(":")[0] for function in functions if function}
    files = {path: Path(path) for path in sorted(paths)}
    return {path: hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""
            for path, file in files.items()}


def shape_rewards(samples: Sequence[Sample], cfg: Config) -> list[Sample]:
    """The samples, ordered by (prompt_id, sample_id), with their reward parts. With --mask_truncated, a
    truncated one does not enter the loss."""
    shaped, weights = [], weighted_parts(cfg)
    if not weights and not cfg.mask_truncated:  # as in most recipes
        return list(samples)
    for group in group_by_prompt(samples):
        values = {name: REWARD_PARTS[name](group, cfg) for name in weights}
        for i, s in enumerate(group):
            parts = s.parts | {name: weights[name] * values[name][i] for name in weights}
            shaped.append(replace(s, parts=parts, in_loss=s.stopped or not cfg.mask_truncated))
    return shaped


def graders_of(dataset: str, terms: Sequence[Term]) -> list[Term]:
    """The terms that grade a data set's responses; the first one's value is the reward. Terms of the data set
    itself come first, and replace the comparison of answers."""
    own = [t for t in terms if t.dataset and t.dataset == dataset.casefold()]
    return own + [t for t in terms if not t.dataset and (t.custom or (t.kind and not own))]


def extractors(cfg: Config) -> dict[str, str]:
    """Name of the extractor by data set; "" is that of all others. Raises UserError for two of one."""
    found = {}
    for dataset, _, name in (spec.rpartition("=") for spec in cfg.extractor):
        whose = f"data set {dataset.casefold()!r}" if dataset else "all other rows"
        require(dataset.casefold() not in found, f"--extractor {' '.join(cfg.extractor)} has two extractors "
                f"for {whose}", "one each: NAME, and DATASET=NAME for the rows of a data set")
        found[dataset.casefold()] = name
    return {"": "orz"} | found


def check_graders(sets: Iterable[Sequence[Problem]], cfg: Config) -> None:
    """Raises UserError where a row's data set has no grader, or where --reward or --extractor name a data set
    that no row has. `sets`: the run's problems, of training and evaluation."""
    terms, datasets = terms_of(cfg), {p.dataset for problems in sets for p in problems}
    there = {dataset.casefold() for dataset in datasets} - {""}
    of_presets = {name for preset in PRESETS.values() for name in extractors(preset)}  # rows may lack these
    named = {t.dataset for t in terms} | extractors(cfg).keys()
    unknown = ", ".join(map(repr, sorted(named - there - of_presets)))
    require(not unknown, f"--reward or --extractor has a data set's own, but no row is of data set {unknown}",
            f"one of {', '.join(sorted(there))}" if there else "rows with a field dataset")
    for dataset in sorted(datasets):
        found = graders_of(dataset, terms)
        require(bool(found) and not (dataset.casefold().startswith("ifeval") and found[0].kind),
                f"rows of data set {dataset!r} have no answer to compare, and --reward no grader for them",
                f"--reward math {dataset}@FILE.py:FUNCTION")


# --- trajectories


class Trajectories:
    """The trajectories of one rollout that are on this rank: those that go on, and those that ended and are
    graded. A trajectory is a function of the rollout's key, its prompt_id and sample_id, the rounds, and the
    environment. Ranks change nothing but where it is.

    A trajectory ends when it stops by itself and no environment goes on with it (it says so, fails, or has
    answered --max_turns), and at the length limit, which is that of all segments together."""

    def __init__(self, engine: Engine, grader: Grader, problems: Mapping[int, Problem], n: int,
                 max_tokens: int, round_len: int = 0) -> None:
        """`problems`: prompt_id -> problem of every trajectory that may come here. `n`: samples of each.
        `max_tokens`: of a trajectory. `round_len`: of a round; 0: a round ends with the turn."""
        self.engine, self.grader, self.problems, self.n = engine, grader, problems, n
        self.max_tokens, self.round_len = max_tokens, round_len
        self.terms, self.extractors = terms_of(engine.cfg), extractors(engine.cfg)
        self.rounds = 0  # that are over
        self.new = {}  # prompt_id -> tokens: the samples of these are drawn together in the first round
        self.going = {}  # Key -> trajectory that goes on
        self.asked = {}  # Key -> trajectory that the environment reads
        self.ended = {}  # Key -> trajectory that ended in this rollout
        self.graded_before = {}  # Key -> trajectory that ended in an earlier one
        self.failures = {}  # Key -> reason why the environment failed
        self.results = {}  # of the grader

    def begin(self, prompt_ids: Iterable[int], version: int) -> None:
        """Add all samples of these prompts, before the first round. With --round_len each is a trajectory of
        its own from the start, so that the samples of one prompt can be on several ranks."""
        self.new = {i: self.problems[i].ids for i in prompt_ids}
        if self.round_len:
            none = np.zeros(0)
            self.going |= {(i, j): Sample(i, j, ids, none.astype(np.int32), none.astype(np.float32), False,
                                          "", version) for i, ids in self.new.items() for j in range(self.n)}
            self.new = {}

    def add(self, trajectories: Iterable[Sample]) -> None:
        """Add trajectories that began elsewhere: on another rank, or in an earlier step."""
        for s in trajectories:
            (self.graded_before if s.reason else self.going)[s.prompt_id, s.sample_id] = s

    def remove(self, keys: Iterable[Key]) -> list[Sample]:
        """Take trajectories that go on away from here, and return them."""
        return [self.going.pop(key) for key in keys]

    def advance(self, temperature: float, key: tuple[int, ...], version: int,
                on_response: Callable[[], bool] = lambda: False) -> bool:
        """One round, with weights of `version`. `on_response` is called at each end of a turn; if it returns
        True, the round is aborted. Returns False if it was."""
        before = {prompt_id * self.n + sample_id: s for (prompt_id, sample_id), s in self.going.items()}
        prompts = self.new or {i: (*s.prompt, *s.ids.tolist()) for i, s in before.items()}
        limits = {i: min(self._left(s), self.round_len or self.max_tokens) for i, s in before.items()}
        round_key = (*key, ROUND, self.rounds + 1) if self.rounds else key
        for s in self.engine.generate(prompts, self.n if self.new else 1, temperature,
                                      self.max_tokens if self.new else limits, round_key, version):
            if not self._take(s, before.get(s.prompt_id)) and on_response():
                return False
        self._ask_environment()
        self.new, self.rounds = {}, self.rounds + 1
        return True

    def _take(self, s, before):
        """Take a segment of this round; `before` is its trajectory so far, if there is one. Returns whether
        its turn goes on."""
        earlier = before.text if before else ""  # of the turns before
        whole = self._join(before, s) if before else s
        key = whole.prompt_id, whole.sample_id
        self.going.pop(key, None)
        if not whole.stopped and self._left(whole) > 0:
            self.going[key] = replace(whole, text=earlier)
            return True
        if self.engine.cfg.env and whole.stopped:
            self.asked[key] = whole
            self.grader.ask(key, self.problems[whole.prompt_id].text, whole.text[len(earlier):], whole.turns)
        else:
            self._end(whole)
        return False

    def _join(self, before, s):
        """The trajectory with its next segment."""
        here, text = before.ids[before.turn_start:], s.text
        if len(here):  # the turn goes on
            count = stop_across(here, s.ids, self.engine.cfg.stop, self.engine.tokenizer)
            if count:
                s = replace(s, ids=s.ids[:count], logp=s.logp[:count], stopped=True)
            # Decoded as one: a character's bytes may be on both sides of the seam.
            text = self.engine.text_of(np.concatenate([here, s.ids]))
        return replace(extended(before, s), text=before.text + text)

    def _fail(self, s, reason):
        """End a trajectory whose environment failed. Its reward is 0."""
        self.failures[s.prompt_id, s.sample_id] = reason
        self._end(s)

    def _end(self, s):
        """Give a whole trajectory to the graders."""
        key, problem = (s.prompt_id, s.sample_id), self.problems[s.prompt_id]
        self.ended[key] = s
        extractor = self.extractors.get(problem.dataset.casefold(), self.extractors[""])
        for i, term in enumerate(graders_of(problem.dataset, self.terms)):
            self.grader.submit((*key, i), s.text, problem.answer, s.stopped, problem.kind, extractor,
                               term.custom)

    def _ask_environment(self):
        """Wait for the environment's replies of this round."""
        if not self.asked:
            return
        self.results |= self.grader.results()
        asked, self.asked = self.asked, {}
        for key, s in sorted(asked.items()):
            going = self._read(s, self.results.pop(key))
            if going:
                self.going[key] = going

    def _read(self, s, reply):
        """The trajectory with the environment's text, or None where it ended."""
        failed = isinstance(reply, Grade)
        if failed:
            return self._fail(s, reply.reason)
        if reply.reward is not None:  # kept in the trajectory, which may go on elsewhere
            s = replace(s, env_reward=reply.reward)
        if reply.done or reply.text is None or s.turns == self.engine.cfg.max_turns:
            return self._end(s)
        ids = self.engine.tokenizer(reply.text, add_special_tokens=False).input_ids
        left = self._left(s)
        if 0 < left < len(ids):
            self.grader.errors.setdefault("Flood", f"Flood: the environment's text has {len(ids)} tokens, "
                                          f"and the response may have {left} more")
            return self._fail(s, "error")
        if len(ids) >= left:  # no room for another turn
            return self._end(replace(s, stopped=False))
        return answered(s, reply.text, ids)

    def keys_of_ended(self) -> list[Key]:
        """Keys of the trajectories that `graded` will return."""
        return [*self.graded_before, *self.ended]

    def _left(self, s):
        """Tokens that the trajectory may still get."""
        return self.engine.response_limit(s.prompt, self.max_tokens) - len(s.ids)

    def graded(self) -> list[Sample]:
        """The trajectories that ended, with their grades, in order."""
        self.results |= self.grader.results()
        found = dict(self.graded_before)
        for key, s in self.ended.items():
            terms = graders_of(self.problems[s.prompt_id].dataset, self.terms)
            first, *others = (self.results[*key, i] for i in range(len(terms)))
            if key in self.failures:
                first = replace(first, reward=0.0, reason=self.failures[key])
            elif s.env_reward is not None:
                reason = "correct" if s.env_reward > 0 else "wrong"
                first = replace(first, reward=s.env_reward, reason=reason)
            found[key] = _graded(s, terms, [first, *others])
        return [found[key] for key in sorted(found)]


def _graded(sample, terms, grades):
    """The sample with its grades: the first is the reward, the others are parts."""
    first, *others = grades
    return replace(
        sample, reward=first.reward, reason=first.reason, answer=first.answer,
        grader=terms[0].name, weight=terms[0].weight,
        parts={t.name: t.weight * g.reward for t, g in zip(terms[1:], others, strict=True)},
        failed=tuple(t.name for t, g in zip(terms, grades, strict=True) if g.reason == "error"))


def stop_across(before: np.ndarray, after: np.ndarray, stop: Sequence[str], tokenizer: Any) -> int:
    """How many tokens of `after` complete a stop string that began in `before`; 0: there is none. The engine
    sees `after` alone."""
    # A token has a byte at least. Before the string may be pieces of a character of up to four bytes.
    window = 8 + max((len(s.encode()) for s in stop), default=0)
    tail, after = before[-window:].tolist(), after[:window].tolist()

    def found(count):
        text = tokenizer.decode([*tail, *after[:count]])
        return [text.count(s) for s in stop]

    if not stop or found(len(after)) == found(0):  # nearly always
        return 0
    return next((n for n in range(1, len(after) + 1) if any(map(operator.gt, found(n), found(n - 1)))), 0)


def moves(held: Sequence[Sequence[K]]) -> dict[K, int]:
    """Which trajectories move to which rank, so that the ranks have equally many; some have one more. As few
    as possible move. held[r]: the keys on rank r."""
    ranks, total = len(held), sum(map(len, held))
    fullest = sorted(range(ranks), key=lambda r: -len(held[r]))  # they keep the one more
    share = {r: total // ranks + (i < total % ranks) for i, r in enumerate(fullest)}
    surplus = [key for r in range(ranks) for key in held[r][share[r]:]]
    room = [r for r in range(ranks) for _ in range(share[r] - len(held[r]))]
    return dict(zip(surplus, room, strict=True))


Scores = dict[str, dict[str, list[float]]]  # set -> metric -> its value for each problem


# --- metrics of problems


def accuracy(samples: Sequence[Sample], n: int) -> dict[str, list[float]]:
    """Values of each evaluation metric, one for each problem, over its `n` samples.

    avg@n is the mean reward of n samples. pass@k is unbiased, for k = 2, 4, … n. maj@n grades the answer that
    most samples gave. response_len is in tokens."""
    groups = group_by_prompt(samples)
    right = [sum(s.reward > 0 for s in group) for group in groups]
    metrics = {f"avg@{n}": [sum(s.reward for s in group) / n for group in groups]}
    for k in sorted({2**i for i in range(1, n.bit_length())} | {n} - {1}):
        metrics[f"pass@{k}"] = [pass_at(k, n, c) for c in right]
    if n > 2:
        metrics[f"maj@{n}"] = [majority(group) for group in groups]
    metrics["response_len"] = [sum(len(s.ids) for s in group) / n for group in groups]
    metrics["truncated"] = [sum(not s.stopped for s in group) / n for group in groups]
    return metrics


def pass_at(k: int, n: int, right: int) -> float:
    """Probability that k of n samples, of which `right` are right, contain a right one:
    1 - C(n - right, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(group: Sequence[Sample]) -> float:
    """1 if the most frequent answer of one prompt's samples is right, else 0. For several most frequent
    answers: the share of right ones. Samples without an answer don't vote."""
    votes = Counter(s.answer for s in group if s.answer is not None)
    top = [a for a, count in votes.items() if count == max(votes.values())]
    right = {s.answer for s in group if s.reward > 0}
    return sum(a in right for a in top) / len(top) if top else 0.0


def mean(values: Sequence[float]) -> float:
    """Mean of the problems' values; 0 where sampling was aborted and there are none."""
    return math.fsum(values) / max(len(values), 1)


ENGINES = {"torch": TorchEngine, "vllm": VLLMEngine}
TRAIN, EVAL, CHECK = 1, 2, 3  # random streams: the second number of a sample's key


def make_engine(path: str, tokenizer: Any, cfg: Config, device: torch.device, dtype: torch.dtype) -> Engine:
    """The engine that cfg names, for the model folder `path`. Raises UserError where it can't run."""
    check_engine_flags(path, cfg, device)
    return ENGINES[engine_kind(cfg, device)](path, tokenizer, cfg, device, dtype)


def check_engine_flags(path: str, cfg: Config, device: torch.device) -> None:
    """Raises UserError where the engine that cfg names can't run the model folder `path`."""
    kind = engine_kind(cfg, device)
    require(kind == "vllm" or cfg.tp == 1, f"--tp {cfg.tp} with the torch engine", "--engine vllm, or --tp 1")
    known = max_positions(load_config(path))
    require(cfg.engine_len <= known, f"{path} has {known:,} positions, and a prompt with its response may "
            f"take {cfg.engine_len:,}", "smaller --max_response_len or --eval_response_len, "
            f"--max_model_len {known}, or another --model")


def engine_kind(cfg: Config, device: torch.device) -> str:
    """The name in ENGINES of the engine that cfg means on this device."""
    return cfg.engine if cfg.engine != "auto" else "vllm" if device.type == "cuda" else "torch"


def max_positions(config: Any) -> float:
    """Longest sequence that the model was made for, with what its rope scaling adds; infinite where it has no
    limit."""
    known = getattr(config, "max_position_embeddings", None) or math.inf
    rope, *others = ropes(config)
    original = rope.get("original_max_position_embeddings") or known
    # Where types of layers have their own rotary embeddings, the config's number counts the scaling already.
    scaled = not others and rope.get("rope_type") in ("linear", "yarn")
    return max(known, original * rope.get("factor", 1)) if scaled else known


def make_grader(cfg: Config) -> Grader:
    """Grading processes beside this rank, for cfg's rewards. Raises UserError for a reward or an extractor
    that doesn't exist."""
    terms = terms_of(cfg)
    for name in extractors(cfg).values():
        extract("", name)
    return Grader(cfg.grade_workers, cfg.grade_deadline, [t.custom for t in terms if t.custom],
                  any(t.kind for t in terms), cfg.env)


# --- rollouts


def rollout(engine: Engine, grader: Grader, problems: Mapping[int, Problem], n: int, temperature: float,
            max_tokens: int, key: tuple[int, ...], version: int,
            on_response: Callable[[], bool] = lambda: False) -> list[Sample]:
    """`n` graded samples of each problem (prompt_id -> problem), ordered by (prompt_id, sample_id).

    Each response is graded while others are still sampled. `on_response` is called at each response, with
    --env at each turn. If it returns True, sampling is aborted and the result is empty. The other arguments
    are those of Engine.generate."""
    trajectories = Trajectories(engine, grader, problems, n, max_tokens)
    trajectories.begin(problems, version)
    while trajectories.new or trajectories.going:
        if not trajectories.advance(temperature, key, version, on_response):
            return []
    return trajectories.graded()


def rollout_in_rounds(engine: Engine, grader: Grader, problems: Mapping[int, Problem],
                      carried: Sequence[Sample], cfg: Config, step: int,
                      on_response: Callable[[], bool]) -> tuple[list[int], list[Sample], list[Sample]]:
    """Sample in rounds of --round_len tokens until there are enough samples for a step: the oldest that have
    ended. Where samples of a prompt are compared, they count only once all of them have ended. Between two
    rounds all ranks share out what is unfinished. Every rank must call it.

    `problems`: by number (data.numbers_at), those that were carried here and those that begin in the step.
    `carried`: the trajectories that this rank was left with. Returns the numbers of the step's prompts; this
    rank's graded samples, whose prompt_id counts these prompts from 0; and the trajectories that this rank is
    left with. All are empty if a stop was requested."""
    trajectories = Trajectories(engine, grader, problems, cfg.samples_per_prompt, cfg.max_response_len,
                                cfg.round_len)
    trajectories.add(carried)
    trajectories.begin(engine_part({i: problems[i] for i in numbers_at(step, cfg)}, engine), step)
    must_end = {i for i in problems if step - step_of(i, cfg) >= cfg.max_staleness or not cfg.carry}
    with dist.phase("wait"):  # a resumed run deals as this one, wherever trajectories were before
        keys = sorted(itertools.chain(*dist.gather(list(trajectories.going))))
        move(trajectories, {key: i % engine.engines for i, key in enumerate(keys)}, engine.engines)
    while True:
        with dist.phase("rollout"):
            trajectories.advance(cfg.temperature, (cfg.seed, TRAIN, step), step, on_response)
        with dist.phase("wait"):
            going, ended = zip(*dist.gather((sorted(trajectories.going), trajectories.keys_of_ended())),
                               strict=True)
            if dist.stop_requested():
                return [], [], []
            unfinished = {number for number, _ in itertools.chain(*going)}
            waits = unfinished if cfg.compares_samples else ()
            ready = sorted(key for key in itertools.chain(*ended) if key[0] not in waits)
            if len(ready) >= cfg.samples_per_step and not must_end & unfinished:
                break
            move(trajectories, moves(going), engine.engines)
    with dist.phase("rollout"):
        graded = trajectories.graded()
    with dist.phase("wait"):
        chosen = set(ready[:cfg.samples_per_step])
        numbers = sorted({number for number, _ in chosen})
        place = {number: i for i, number in enumerate(numbers)}
        # Samples of one prompt meet on one rank, where they are compared.
        mine = [replace(s, prompt_id=place[s.prompt_id]) for s in graded
                if (s.prompt_id, s.sample_id) in chosen]
        outgoing = [[s for s in mine if s.prompt_id % engine.engines == rank]
                    for rank in range(engine.engines)]
        samples = sorted(itertools.chain(*dist.exchange(outgoing)), key=lambda s: (s.prompt_id, s.sample_id))
    left = [s for s in graded if (s.prompt_id, s.sample_id) not in chosen]
    return numbers, samples, [*trajectories.going.values(), *left]


def move(trajectories: Trajectories, target: Mapping[Key, int], ranks: int) -> None:
    """Move trajectories that go on to the rank target[key]. All ranks have the same `target`."""
    if target:
        outgoing = [trajectories.remove([key for key in trajectories.going if target.get(key) == rank])
                    for rank in range(ranks)]
        for arrived in dist.exchange(outgoing):
            trajectories.add(arrived)


def engine_part(problems: Mapping[int, Problem], engine: Engine) -> dict[int, Problem]:
    """The problems (prompt_id -> problem) that this engine samples: every `engine.engines`-th, so that
    engines have equally many."""
    return dict(itertools.islice(problems.items(), engine.engine_id, None, engine.engines))


def sample_row(s: Sample, problem: Problem, save_logps: bool) -> dict[str, Any]:
    """A sample as a row of samples/*.jsonl and eval/*.jsonl. With `save_logps` it also has the response's
    token ids, and the engine's log-probs of them, rounded to 4 digits; null for an environment's tokens."""
    same = {name: getattr(s, name) for name in "prompt_id sample_id answer reward reason stopped".split()}
    row = same | dict(problem=problem.text, gold=problem.answer, response=s.text, tokens=len(s.ids))
    if s.turns > 1:
        row |= dict(turns=s.turns)
    if save_logps:
        row |= dict(ids=s.ids.tolist(), logps=[
            round(x, 4) if of_policy else None
            for x, of_policy in zip(s.logp.tolist(), s.is_sampled, strict=True)])
    return row


# --- evaluation


def load_sets(cfg: Config, tokenizer: Any, say: Callable[[str], None]) -> dict[str, list[Problem]]:
    """The held-out problems of each file of cfg.eval_data, by the names of `set_names`. Raises UserError as
    load_problems does."""
    longer = cfg.eval_response_len > cfg.max_response_len  # then the engine takes longer sequences too
    longest = cfg.engine_len if longer else cfg.model_len
    return {name: load_problems([path], tokenizer, cfg, say, longest)
            for name, path in zip(set_names(cfg.eval_data), cfg.eval_data, strict=True)}


def set_names(paths: Sequence[str]) -> list[str]:
    """A name for each file: its own without suffix, and in front as many of its folders as tell it from files
    of the same name, and from files that are named for a split. Raises UserError for the same file twice.

    eval_sets/aime2024.json is aime2024; gsm8k/test.jsonl is gsm8k-test, and so is the hub's
    openai/gsm8k:main/test-00000-of-00001.parquet."""
    parts = [_words(path) for path in paths]

    def name(part):
        depth = next(n for n in itertools.count(1) if sum(other[-n:] == part[-n:] for other in parts) == 1)
        while depth < len(part) and part[-depth] in SPLITS:
            depth += 1
        return "-".join(part[-depth:])

    names = list(map(name, parts)) if len(set(parts)) == len(parts) else []
    require(len(set(names)) == len(paths), f"--eval_data has two files of one name: {' '.join(paths)}",
            "another name for one of them")
    return names


SPLITS = {"eval", "test", "train", "validation", "valid", "val", "dev", "data", "default", "main"}


def _words(path):
    """Folders and name of a data file, without suffix, number of the shard, and the hub's usual folders."""
    file = Path(path.replace(":", "/"))
    name = re.sub(r"-00000-of-00001$", "", file.stem)
    folders = [part for part in file.parts[:-1] if ":" not in path or part not in SPLITS]
    return *folders, name


def evaluate_sets(engine: Engine, grader: Grader, sets: Mapping[str, Sequence[Problem]], cfg: Config,
                  step: int, on_response: Callable[[], bool] = lambda: False,
                  ) -> tuple[dict[str, float], list[dict]]:
    """Metrics `NAME/…` over all ranks of each held-out set (name -> problems), and one row per response. A
    metric is the mean over the set's problems of the values that `score_sets` returns."""
    scores, rows = score_sets(engine, grader, sets, cfg, step, on_response)
    return {f"{name}/{metric}": mean(values)
            for name, metrics in scores.items() for metric, values in metrics.items()}, rows


def score_sets(engine: Engine, grader: Grader, sets: Mapping[str, Sequence[Problem]], cfg: Config,
               step: int, on_response: Callable[[], bool] = lambda: False) -> tuple[Scores, list[dict]]:
    """Value of each metric for each problem of each held-out set (name -> problems), on every rank, and one
    row per response. The randomness is the same at every step, so evaluations differ by the weights alone."""
    scores, rows = {}, []
    for i, (name, problems) in enumerate(sets.items()):
        n, temperature = (v[i % len(v)] for v in (cfg.eval_samples, cfg.eval_temperature))
        part, length = engine_part(dict(enumerate(problems)), engine), cfg.eval_response_len
        samples = rollout(engine, grader, part, n, temperature, length or cfg.max_response_len,
                          (cfg.seed, EVAL, i), step, on_response)
        scores[name] = gather_scores(samples, n)
        rows += dist.gather_rows([{"set": name} | sample_row(s, problems[s.prompt_id], cfg.save_logps)
                                  for s in samples])
    return scores, rows


def gather_scores(samples: Sequence[Sample], n: int) -> dict[str, list[float]]:
    """`accuracy` of all ranks' samples, in the order of the problems. So the number of ranks changes no sum,
    not even its rounding."""
    ids = list(dict.fromkeys(s.prompt_id for s in samples))
    ids, scores = zip(*dist.gather((ids, accuracy(samples, n))), strict=True)
    order, gathered = np.argsort(list(itertools.chain(*ids))), {}
    for metric in scores[0]:
        values = [v for of_rank in scores for v in of_rank[metric]]
        gathered[metric] = [values[i] for i in order]
    return gathered
