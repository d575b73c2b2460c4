"""Graded rollouts and evaluation, and the command that evaluates any Hugging Face folder.

    with engine.awake(full_weights(policy), version=step):
        samples = rollout(engine, grader, {prompt_id: problem, …}, n=8, key=(seed, step), …)

    python -m tools.evaluate MODEL [MODEL …] DATA [DATA …] [--eval_samples 16] [--template chat] …
    torchrun --nproc-per-node 8 -m tools.evaluate MODEL DATA …        # on 8 GPUs
"""

import hashlib
import itertools
import math
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
    step_of,
)
from engine import Engine, Key, first_stop
from engines.torch_engine import TorchEngine
from engines.vllm_engine import VLLMEngine
from grading.answers import extract
from grading.worker import Grade, Grader
from model import load_config, ropes
from reward import Term, parse_terms, repeated_ngrams, tag_count, think_then_answer

K = TypeVar("K")
TRAIN, EVAL, CHECK, ROUND = 1, 2, 3, 4  # random streams; the key of a later round ends in ROUND, its number
PROMPTS_PER_ENGINE = 16  # from here on an engine samples whole prompts

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
    "repetition": lambda group, cfg: [-repeated_ngrams(s.text) for s in group],
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
    """The trajectories of one rollout that are on this rank. A trajectory is a function of the rollout's key,
    its prompt_id and sample_id, the rounds, and the environment; not of the rank that it is on.

    Each is in one of four places. A round samples all `open` ones: to the end of their turn, or `round_len`
    tokens. What ended its turn waits for the environment, if there is one, and is open or complete after it.

        add ──> open ──round──> waiting (--env) ──> complete ──graders──> graded
                  ^───────────────┘

    A trajectory is complete when it reaches the length limit of all its segments together, or stops by itself
    and no environment goes on with it (it says so, fails, or has answered --max_turns)."""

    def __init__(self, engine: Engine, grader: Grader, problems: Mapping[int, Problem], max_tokens: int,
                 round_len: int = 0) -> None:
        """`problems`: prompt_id -> problem of every trajectory that may come here. `max_tokens`: of a
        trajectory. `round_len`: tokens of a round; 0: a round ends with the turn."""
        self.engine, self.grader, self.problems, self.cfg = engine, grader, problems, engine.cfg
        self.max_tokens, self.round_len, self.rounds = max_tokens, round_len, 0
        self.terms, self.extractors = terms_of(self.cfg), extractors(self.cfg)
        self.open: dict[Key, Sample] = {}  # .text: of the turns before the one that goes on
        self.waiting: dict[Key, Sample] = {}
        self.complete: dict[Key, Sample] = {}
        self.graded: dict[Key, Sample] = {}
        self.failures: dict[Key, str] = {}  # why the environment failed
        self.results = {}  # of the grader

    def begin(self, keys: Iterable[Key], version: int) -> None:
        """Add new trajectories."""
        ids, logp = np.zeros(0, np.int32), np.zeros(0, np.float32)
        for i, j in keys:
            self.open[i, j] = Sample(i, j, self.problems[i].ids, ids, logp, False, "", version)

    def add(self, trajectories: Iterable[Sample]) -> None:
        """Add trajectories that began on another rank or in an earlier step."""
        for s in trajectories:
            (self.graded if s.reason else self.open)[s.prompt_id, s.sample_id] = s

    def move(self, target: Mapping[Key, int]) -> None:
        """Move open trajectories to the ranks target[key]. Every rank must call it with the same `target`."""
        if target and self.engine.ranks > 1:
            outgoing = [[self.open.pop(key) for key in list(self.open) if target.get(key) == rank]
                        for rank in range(self.engine.ranks)]
            for arrived in dist.exchange(outgoing):
                self.add(arrived)

    def sample_round(self, temperature: float, key: tuple[int, ...], version: int,
                     on_response: Callable[[], bool]) -> bool:
        """One round, with weights of `version`. `on_response` is called at each end of a turn; if it returns
        True, the round is aborted. Returns whether the round was sampled to its end."""
        before = dict(self.open)
        requests = {k: (*s.prompt, *s.ids.tolist()) for k, s in before.items()}
        limits = {k: min(self._left(s), self.round_len or self.max_tokens) for k, s in before.items()}
        round_key = (*key, ROUND, self.rounds + 1) if self.rounds else key
        for s in self.engine.generate(requests, limits, temperature, round_key, version):
            if self._take(before[s.prompt_id, s.sample_id], s) and on_response():
                return False
        self._read_environment()
        self.rounds += 1
        return True

    def _take(self, before, segment):
        """Add a segment to its trajectory. Returns whether this ends the trajectory's turn."""
        s = self._join(before, segment) if len(before.ids) else segment
        key = s.prompt_id, s.sample_id
        del self.open[key]
        if not s.stopped and self._left(s) > 0:
            self.open[key] = replace(s, text=before.text)
            return False
        if self.cfg.env and s.stopped:
            self.waiting[key] = s
            self.grader.ask(key, self.problems[s.prompt_id].text, s.text[len(before.text):], s.turns)
        else:
            self._complete(s)
        return True

    def _join(self, before, segment):
        """The trajectory with its next segment, and with the text of its whole turn."""
        turn, text = before.ids[before.turn_start:], segment.text
        if len(turn):  # the turn began in an earlier round
            count = first_stop(turn, segment.ids, self.cfg.stop, self.engine.tokenizer)
            if count:
                segment = replace(segment, ids=segment.ids[:count], logp=segment.logp[:count], stopped=True)
            # Decoded as one: the bytes of a character may be on both sides of the cut.
            text = self.engine.text_of(np.concatenate([turn, segment.ids]))
        return replace(extended(before, segment), text=before.text + text)

    def _complete(self, s):
        """Give a complete trajectory to the graders of its data set."""
        key, problem = (s.prompt_id, s.sample_id), self.problems[s.prompt_id]
        self.complete[key] = s
        extractor = self.extractors.get(problem.dataset.casefold(), self.extractors[""])
        for i, term in enumerate(graders_of(problem.dataset, self.terms)):
            self.grader.submit((*key, i), s.text, problem.answer, s.stopped, problem.kind, extractor,
                               term.custom)

    def _fail(self, s, reason):
        """Complete a trajectory whose environment failed. Its reward is 0."""
        self.failures[s.prompt_id, s.sample_id] = reason
        self._complete(s)

    def _read_environment(self):
        """Wait for the environment's replies of this round."""
        if self.waiting:
            self.results |= self.grader.results()
            waiting, self.waiting = self.waiting, {}
            for key, s in sorted(waiting.items()):
                self._continue(key, s, self.results.pop(key))

    def _continue(self, key, s, reply):
        """Append the environment's text to the trajectory, and open or complete it."""
        if isinstance(reply, Grade):
            return self._fail(s, reply.reason)
        if reply.reward is not None:  # kept in the trajectory, which may move to another rank
            s = replace(s, env_reward=reply.reward)
        if reply.done or reply.text is None or s.turns == self.cfg.max_turns:
            return self._complete(s)
        ids, left = self.engine.tokenizer(reply.text, add_special_tokens=False).input_ids, self._left(s)
        if 0 < left < len(ids):
            self.grader.errors.setdefault("Flood", f"Flood: the environment's text has {len(ids)} tokens, "
                                          f"and the response may have {left} more")
            return self._fail(s, "error")
        if len(ids) >= left:  # no room for another turn
            return self._complete(replace(s, stopped=False))
        self.open[key] = answered(s, reply.text, ids)

    def _left(self, s):
        """Number of tokens that the trajectory may still get. The length limit is model_len in training and
        engine_len in a longer evaluation."""
        cfg = self.cfg
        length = cfg.model_len if self.max_tokens <= cfg.max_response_len else cfg.engine_len
        return min(self.max_tokens, length - len(s.prompt)) - len(s.ids)

    def grades(self) -> list[Sample]:
        """The complete trajectories with their grades, ordered by (prompt_id, sample_id). The first grade is
        the reward; the others are parts."""
        self.results |= self.grader.results()
        for key, s in self.complete.items():
            terms = graders_of(self.problems[s.prompt_id].dataset, self.terms)
            first, *others = grades = [self.results[*key, i] for i in range(len(terms))]
            reward, reason = first.reward, first.reason
            if key in self.failures:
                reward, reason = 0.0, self.failures[key]
            elif s.env_reward is not None:
                reward, reason = s.env_reward, "correct" if s.env_reward > 0 else "wrong"
            self.graded[key] = replace(
                s, reward=reward, reason=reason, answer=first.answer, grader=terms[0].name,
                weight=terms[0].weight,
                parts={t.name: t.weight * g.reward for t, g in zip(terms[1:], others, strict=True)},
                failed=tuple(t.name for t, g in zip(terms, grades, strict=True) if g.reason == "error"))
        return [self.graded[key] for key in sorted(self.graded)]


# --- rollouts


def rollout(engine: Engine, grader: Grader, problems: Mapping[int, Problem], n: int, temperature: float,
            max_tokens: int, key: tuple[int, ...], version: int,
            on_response: Callable[[], bool] = lambda: False,
            carried: Sequence[Sample] | None = None) -> tuple[list[Sample], list[Sample]]:
    """`n` graded samples of each problem (prompt_id -> problem), over all ranks: this rank's, ordered by
    (prompt_id, sample_id), with all samples of a prompt on one rank. And the trajectories that this rank goes
    on with in the next step.

    Every rank must call it, with the same problems. Responses are graded while others are still sampled.
    `on_response` is called at each response, with --env at each turn; if it returns True, sampling is aborted
    and both results are empty. `key` seeds the randomness. `version` is the step of the weights.

    `carried` is given in training only: the trajectories that this rank was left with by the step before.
    Then --round_len cuts sampling into rounds, and --carry ends it early (`sample_until_enough`). With
    --carry a prompt_id is a number of data.numbers_at."""
    cfg, training = engine.cfg, carried is not None
    carries, round_len = training and cfg.carry > 0, cfg.round_len if training else 0
    trajectories = Trajectories(engine, grader, problems, max_tokens, round_len)
    trajectories.add(carried or ())
    # Greedy samples are all equal: one is drawn, and copied at the end.
    new = [(i, j) for i in problems if not carries or step_of(i, cfg) == version
           for j in range(n if temperature else 1)]
    old = itertools.chain(*dist.gather(list(trajectories.open))) if carries else ()
    home, by_prompt = deal([*new, *old], engine)
    trajectories.begin([k for k in new if home[k] == engine.rank], version)
    if carries:  # a resumed run deals as this one, whichever rank the trajectories were on
        trajectories.move(home)
    chosen = sample_until_enough(trajectories, temperature, key, version, on_response, carries)
    scattered = engine.ranks > 1 and (round_len > 0 or not by_prompt)
    if any(dist.gather(chosen is None)) if scattered else chosen is None:
        return [], []
    graded = trajectories.grades()
    samples = [s for s in graded if (s.prompt_id, s.sample_id) in chosen]
    left = [*trajectories.open.values(),
            *(s for s in graded if (s.prompt_id, s.sample_id) not in chosen)]
    if not temperature:
        samples = [replace(s, sample_id=j) for s in samples for j in range(n)]
    return meet(samples, engine) if scattered else samples, left


def sample_until_enough(trajectories: Trajectories, temperature: float, key: tuple[int, ...], version: int,
                        on_response: Callable[[], bool], carries: bool) -> set[Key] | None:
    """Sample round after round. Returns the keys of the samples to train on, or None if sampling was aborted.

    With rounds of --round_len tokens all ranks share out the open trajectories after each. Else a round is a
    turn, and only the ranks of one engine, which sample together, tell each other what is open.

    If `carries` is false, all trajectories must be complete. If true, enough of them for a step: the oldest.
    Where samples of a prompt are compared, they count only once all of them are complete. Prompts that are
    --max_staleness steps old are waited for."""
    cfg, engine, shares = trajectories.cfg, trajectories.engine, trajectories.round_len > 0
    while True:
        aborted = not trajectories.sample_round(temperature, key, version, on_response)
        if dist.stop_requested() if shares else aborted:
            return None
        state = sorted(trajectories.open), [*trajectories.graded, *trajectories.complete]
        states = dist.gather(state) if shares else engine.gather(state)
        open_keys, complete = [x for x, _ in states], itertools.chain(*(x for _, x in states))
        unfinished = {i for i, _ in itertools.chain(*open_keys)}
        if not carries:
            if not unfinished:
                return set(complete)
        else:
            waits = unfinished if cfg.compares_samples else ()
            ready = sorted(k for k in complete if k[0] not in waits)
            too_old = any(version - step_of(i, cfg) >= cfg.max_staleness for i in unfinished)
            if len(ready) >= cfg.samples_per_step and not too_old:
                return set(ready[:cfg.samples_per_step])
        if shares:
            trajectories.move(moves(open_keys))


def deal(keys: Sequence[Key], engine: Engine) -> tuple[dict[Key, int], bool]:
    """The rank that samples each key, and whether each prompt's samples are on one rank. They are where an
    engine gets PROMPTS_PER_ENGINE prompts or more: it reads each prompt once. With fewer prompts the samples
    are dealt one by one, so that a prompt with long responses does not keep one engine busy."""
    prompts = sorted({i for i, _ in keys})
    if len(prompts) >= PROMPTS_PER_ENGINE * engine.engines:
        place = {i: at % engine.ranks for at, i in enumerate(prompts)}
        return {key: place[key[0]] for key in keys}, True
    return {key: at % engine.ranks for at, key in enumerate(sorted(keys))}, False


def meet(samples: Sequence[Sample], engine: Engine) -> list[Sample]:
    """The samples of all ranks that this rank compares: all samples of a prompt meet on one rank."""
    outgoing = [[s for s in samples if s.prompt_id % engine.ranks == rank] for rank in range(engine.ranks)]
    return sorted(itertools.chain(*dist.exchange(outgoing)), key=lambda s: (s.prompt_id, s.sample_id))


def moves(held: Sequence[Sequence[K]]) -> dict[K, int]:
    """Which keys move to which rank, so that the ranks have equally many; some have one more. As few as
    possible move. held[r]: the keys on rank r."""
    ranks, total = len(held), sum(map(len, held))
    fullest = sorted(range(ranks), key=lambda r: -len(held[r]))  # they keep the one more
    share = {r: total // ranks + (i < total % ranks) for i, r in enumerate(fullest)}
    surplus = [key for r in range(ranks) for key in held[r][share[r]:]]
    room = [r for r in range(ranks) for _ in range(share[r] - len(held[r]))]
    return dict(zip(surplus, room, strict=True))


# --- metrics of problems

Scores = dict[str, dict[str, list[float]]]  # set -> metric -> its value for each problem


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


# --- evaluation


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


def load_sets(cfg: Config, tokenizer: Any, say: Callable[[str], None]) -> dict[str, list[Problem]]:
    """The held-out problems of each file of cfg.eval_data, by the names of `set_names`. Raises UserError as
    load_problems does."""
    longer = cfg.eval_response_len > cfg.max_response_len  # then the engine takes longer sequences too
    longest = cfg.engine_len if longer else cfg.model_len
    return {name: load_problems([path], tokenizer, cfg, say, longest)
            for name, path in zip(set_names(cfg.eval_data), cfg.eval_data, strict=True)}


SPLITS = {"eval", "test", "train", "validation", "valid", "val", "dev", "data", "default", "main"}


def set_names(paths: Sequence[str]) -> list[str]:
    """A name for each file: its own without suffix. Folders are put in front until no other file has the name
    and it does not begin with a split's. Raises UserError for the same file twice.

    eval_sets/aime2024.json is aime2024; gsm8k/test.jsonl is gsm8k-test, and so is the hub's
    openai/gsm8k:main/test-00000-of-00001.parquet."""
    parts = []
    for path in paths:
        repo, _, file = path.rpartition(":")
        folders = Path(repo).parts if repo else Path(path).parts[:-1]
        parts.append((*folders, re.sub(r"-00000-of-00001$", "", Path(file).stem)))

    def name(part):
        for n in range(1, len(part) + 1):
            is_alone = sum(other[-n:] == part[-n:] for other in parts) == 1
            if is_alone and (part[-n] not in SPLITS or n == len(part)):
                return "-".join(part[-n:])
        return ""

    names = [name(part) for part in parts]
    require(all(names), f"--eval_data has two files of one name: {' '.join(paths)}",
            "another name for one of them")
    return names


def score_sets(engine: Engine, grader: Grader, sets: Mapping[str, Sequence[Problem]], cfg: Config,
               step: int, on_response: Callable[[], bool] = lambda: False) -> tuple[Scores, list[dict]]:
    """Value of each metric for each problem of each held-out set (name -> problems), on every rank, and one
    row per response. The randomness is the same at every step, so evaluations differ by the weights alone."""
    scores, rows = {}, []
    for i, (name, problems) in enumerate(sets.items()):
        n, temperature = (v[i % len(v)] for v in (cfg.eval_samples, cfg.eval_temperature))
        samples, _ = rollout(engine, grader, dict(enumerate(problems)), n, temperature,
                             cfg.eval_response_len or cfg.max_response_len, (cfg.seed, EVAL, i), step,
                             on_response)
        scores[name] = gather_scores(samples, n)
        rows += dist.gather_rows([{"set": name} | sample_row(s, problems[s.prompt_id], cfg.save_logps)
                                  for s in samples])
    return scores, rows


def gather_scores(samples: Sequence[Sample], n: int) -> dict[str, list[float]]:
    """`accuracy` of all ranks' samples, in the order of the problems. So the number of ranks changes no sum,
    not even its rounding."""
    values = accuracy(samples, n)
    rows = zip(dict.fromkeys(s.prompt_id for s in samples), *values.values(), strict=True)
    by_problem = sorted(itertools.chain(*dist.gather(list(rows))))
    return {metric: [row[i] for row in by_problem] for i, metric in enumerate(values, 1)}


# --- the engine and the graders of a run

ENGINES = {"torch": TorchEngine, "vllm": VLLMEngine}


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
    return cfg.engine_kind(device.type == "cuda")


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
