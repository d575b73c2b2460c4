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
TRAIN, EVAL, CHECK, ROUND = 1, 2, 3, 4  # random streams; the key of a later round ends in (ROUND, round)
PROMPTS_PER_ENGINE = 16  # with this many prompts or more, one engine samples all responses of a prompt

# --- rewards


def overlong(group: Sequence[Sample], cfg: Config) -> list[float]:
    """Returns DAPO's penalty for responses near the length limit (arXiv 2503.14476, eq. 13). The limit is
    max_response_len. After a long prompt, model_len (prompt and response together) may set a lower limit."""
    limits = [min(cfg.max_response_len, cfg.model_len - len(s.prompt)) for s in group]
    return [grpo.overlong_penalty(len(s.ids), limit, cfg.overlong_buffer)
            for s, limit in zip(group, limits, strict=True)]


def nonstop(group: Sequence[Sample], cfg: Config) -> list[float]:
    """Returns Open-Instruct's penalty: -nonstop_penalty for a response that was cut at the length limit, else
    0."""
    return [0.0 if s.stopped else -cfg.nonstop_penalty for s in group]


def length(group: Sequence[Sample], cfg: Config) -> list[float]:
    """Returns Kimi k1.5's length reward (arXiv 2501.12599, sec. 2.3.3). The shortest response of a prompt
    gets 0.5, and the longest gets -0.5. A wrong response gets at most 0. Tokens of an environment don't
    count."""
    lengths = [int(s.is_sampled.sum()) for s in group]
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    rewards = [0.5 - (n - shortest) / spread if spread else 0.0 for n in lengths]
    return [x if s.reward > 0 else min(0.0, x) for s, x in zip(group, rewards, strict=True)]


# Reward parts: training may add them to the graders' reward. A part is a function of (samples of one prompt,
# config). It is on if --reward names it, or if its flag in BY_FLAG is given. It is logged as reward/NAME.
REWARD_PARTS = {
    "format": lambda group, cfg: [think_then_answer(s.text) for s in group],
    "tags": lambda group, cfg: [tag_count(s.text) for s in group],
    "repetition": lambda group, cfg: [-repeated_ngrams(s.text) for s in group],
    "length": length,
    "overlong": overlong,
    "nonstop": nonstop,
}
BY_FLAG = {"overlong": "overlong_buffer", "nonstop": "nonstop_penalty"}  # part -> the flag that adds it


def terms_of(cfg: Config) -> list[Term]:
    """Returns the terms of --reward, graders first. Raises UserError for a term that doesn't exist."""
    terms = parse_terms(cfg.reward, [name for name in REWARD_PARTS if name not in BY_FLAG])
    clash = sorted({t.name for t in terms if t.kind or t.custom} & REWARD_PARTS.keys())
    require(not clash, f"--reward has a function named {', '.join(clash)}, as a part is", "another name")
    return terms


def weighted_parts(cfg: Config) -> dict[str, float]:
    """Returns name -> weight of the reward parts that are on."""
    named = {t.name: t.weight for t in terms_of(cfg) if not t.kind and not t.custom}
    return named | {name: 1.0 for name, flag in BY_FLAG.items() if getattr(cfg, flag)}


def part_names(cfg: Config) -> list[str]:
    """Returns the names of the graders and reward parts that are logged as reward/NAME. The first grader is
    left out, because its mean is already logged as `reward`. If some data set has its own grader, rows differ
    in their first grader, so all graders are named."""
    graders = [t for t in terms_of(cfg) if t.kind or t.custom]
    own = any(t.dataset for t in graders)
    return [*(t.name for t in graders[0 if own else 1:]), *weighted_parts(cfg)]


def reward_files(cfg: Config) -> dict[str, str]:
    """Returns path -> hash for each file that --reward and --env name. The hash is "" if there is no such
    file."""
    functions = [*(t.custom for t in terms_of(cfg)), cfg.env]
    paths = {function.rpartition(":")[0] for function in functions if function}
    files = {path: Path(path) for path in sorted(paths)}
    return {path: hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""
            for path, file in files.items()}


def shape_rewards(samples: Sequence[Sample], cfg: Config) -> list[Sample]:
    """Returns the samples with their reward parts. `samples` must be ordered by (prompt_id, sample_id). With
    --mask_truncated, a truncated sample does not enter the loss."""
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
    """Returns the terms that grade a data set's responses. The first term gives the reward. Terms for this
    data set alone come first. They replace the comparison of answers."""
    own = [t for t in terms if t.dataset and t.dataset == dataset.casefold()]
    return own + [t for t in terms if not t.dataset and (t.custom or (t.kind and not own))]


def extractors(cfg: Config) -> dict[str, str]:
    """Returns data set -> name of its extractor. The key "" stands for all other data sets. Raises UserError
    if a data set has two extractors."""
    found = {}
    for dataset, _, name in (spec.rpartition("=") for spec in cfg.extractor):
        whose = f"data set {dataset.casefold()!r}" if dataset else "all other rows"
        require(dataset.casefold() not in found, f"--extractor {' '.join(cfg.extractor)} has two extractors "
                f"for {whose}", "one each: NAME, and DATASET=NAME for the rows of a data set")
        found[dataset.casefold()] = name
    return {"": "orz"} | found


def check_graders(sets: Iterable[Sequence[Problem]], cfg: Config) -> None:
    """Raises UserError if a row's data set has no grader, or if --reward or --extractor names a data set that
    no row has. `sets`: the problems of training and of each evaluation set."""
    terms, datasets = terms_of(cfg), {p.dataset for problems in sets for p in problems}
    there = {dataset.casefold() for dataset in datasets} - {""}
    of_presets = {name for preset in PRESETS.values() for name in extractors(preset)}  # rows may lack them
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
    """This rank's trajectories of one rollout. A trajectory is a prompt with the response so far. It depends
    on the rollout's key, prompt_id, sample_id, the rounds and the environment. It does not depend on the
    rank.

    Each trajectory is in one of four dicts. A round samples every `open` trajectory up to the end of its
    turn, or for `round_len` tokens. With --env, a trajectory that ended its turn is `waiting` for the
    environment. After the environment's reply, the trajectory is `open` again or `complete`. `graded` ones
    have rewards.

        add ──> open ──round──> waiting (--env) ──> complete ──graders──> graded
                  ^───────────────┘

    A trajectory is complete in two cases. 1. It reached the length limit, which counts all its tokens. 2. The
    policy ended the turn, and no turn follows: there is no environment, or the environment ended the
    trajectory, or the environment failed, or the trajectory has --max_turns turns."""

    def __init__(self, engine: Engine, grader: Grader, problems: Mapping[int, Problem], max_tokens: int,
                 round_len: int = 0) -> None:
        """`problems`: prompt_id -> problem, for every trajectory that may move to this rank. `max_tokens`:
        limit of a response, in tokens. `round_len`: limit of a round, in tokens; 0: a round is a whole
        turn."""
        self.engine, self.grader, self.problems, self.cfg = engine, grader, problems, engine.cfg
        self.max_tokens, self.round_len, self.rounds = max_tokens, round_len, 0
        self.terms, self.extractors = terms_of(self.cfg), extractors(self.cfg)
        self.open: dict[Key, Sample] = {}  # .text has the earlier turns, without the unfinished turn
        self.waiting: dict[Key, Sample] = {}
        self.complete: dict[Key, Sample] = {}
        self.graded: dict[Key, Sample] = {}
        self.failures: dict[Key, str] = {}  # why the environment failed
        self.results = {}  # the grader's results: grades, and replies of the environment

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
        """Sample one round with the weights of `version`. `on_response` is called at each end of a turn; if
        it returns True, the round is aborted. Returns False if the round was aborted, else True."""
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
        """Add a segment (the tokens of one round) to its trajectory `before`. Returns whether the
        trajectory's turn ended."""
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
        """Returns the trajectory `before` with its next segment. The text then includes the whole turn."""
        turn, text = before.ids[before.turn_start:], segment.text
        if len(turn):  # the turn began in an earlier round
            count = first_stop(turn, segment.ids, self.cfg.stop, self.engine.tokenizer)
            if count:
                segment = replace(segment, ids=segment.ids[:count], logp=segment.logp[:count], stopped=True)
            # Decode the turn as a whole: a character's bytes may be on both sides of the cut between rounds.
            text = self.engine.text_of(np.concatenate([turn, segment.ids]))
        return replace(extended(before, segment), text=before.text + text)

    def _complete(self, s):
        """Mark a trajectory as complete, and submit it to the graders of its data set."""
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
        """Wait for the environment's replies to this round's turns, and apply them."""
        if self.waiting:
            self.results |= self.grader.results()
            waiting, self.waiting = self.waiting, {}
            for key, s in sorted(waiting.items()):
                self._continue(key, s, self.results.pop(key))

    def _continue(self, key, s, reply):
        """Append the environment's text to the trajectory, and open or complete it."""
        if isinstance(reply, Grade):
            return self._fail(s, reply.reason)
        if reply.reward is not None:  # stored in the Sample, because the trajectory may move to another rank
            s = replace(s, env_reward=reply.reward)
        if reply.done or reply.text is None or s.turns == self.cfg.max_turns:
            return self._complete(s)
        ids, left = self.engine.tokenizer(reply.text, add_special_tokens=False).input_ids, self._left(s)
        # Three cases. 1. The environment's text is longer than the room that is left: the environment failed.
        if 0 < left < len(ids):
            self.grader.errors.setdefault("Flood", f"Flood: the environment's text has {len(ids)} tokens, "
                                          f"and the response may have {left} more")
            return self._fail(s, "error")
        # 2. No room is left, or the text would fill it exactly. The policy could not answer, so the
        # trajectory ends here as truncated, without the text.
        if len(ids) >= left:
            return self._complete(replace(s, stopped=False))
        # 3. The text fits, and at least one token is left for the policy's next turn.
        self.open[key] = answered(s, reply.text, ids)

    def _left(self, s):
        """Returns the number of tokens that may still be added to the trajectory. The limit of prompt and
        response together is model_len in training. It is engine_len if evaluation allows longer responses."""
        cfg = self.cfg
        length = cfg.model_len if self.max_tokens <= cfg.max_response_len else cfg.engine_len
        return min(self.max_tokens, length - len(s.prompt)) - len(s.ids)

    def grades(self) -> list[Sample]:
        """Wait for the graders. Returns this rank's graded trajectories, ordered by (prompt_id, sample_id).
        The first grader's grade is the reward. The other grades are reward parts."""
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
    """Sample and grade `n` responses to each problem. Every rank must call `rollout` with the same `problems`
    (prompt_id -> problem). Returns
    1. this rank's graded samples, ordered by (prompt_id, sample_id). All samples of a prompt are on one rank;
    2. with --carry: this rank's trajectories that the next step continues.

    Finished responses are graded while other responses are still sampled. `on_response` is called at each
    response, or at each turn with --env. If `on_response` returns True, sampling is aborted and both results
    are empty. `max_tokens`: limit of a response. `key` seeds the randomness. `version`: step of the weights.

    `carried` is None in evaluation. In training it has this rank's unfinished trajectories from the step
    before. In training, --round_len cuts sampling into rounds, and --carry ends sampling early
    (`sample_until_enough`). With --carry, a prompt_id is the prompt's number in the run (data.numbers_at)."""
    cfg, training = engine.cfg, carried is not None
    carries, round_len = training and cfg.carry > 0, cfg.round_len if training else 0
    trajectories = Trajectories(engine, grader, problems, max_tokens, round_len)
    trajectories.add(carried or ())
    # Greedy samples of a prompt are equal. So one sample is drawn and copied at the end.
    new = [(i, j) for i in problems if not carries or step_of(i, cfg) == version
           for j in range(n if temperature else 1)]
    old = itertools.chain(*dist.gather(list(trajectories.open))) if carries else ()
    home, by_prompt = deal([*new, *old], engine)
    trajectories.begin([k for k in new if home[k] == engine.rank], version)
    if carries:  # the ranks of carried trajectories differ in a resumed run; `move` makes both runs the same
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
    """Sample round after round until there are enough samples. Returns the keys of the samples to train on,
    or None if sampling was aborted.

    With --round_len a round is at most that number of tokens. After each round, all ranks rebalance their
    open (unfinished) trajectories. Without --round_len a round is a whole turn, and trajectories stay on
    their rank. Then only the ranks of one engine exchange their keys, because these ranks sample together.

    If `carries` is false, sampling ends when all trajectories are complete. If `carries` is true, sampling
    ends when samples_per_step trajectories are complete; the prompts that began first are taken. If the
    advantage compares a prompt's samples, a prompt counts only when all its samples are complete. Sampling
    also continues while a prompt that began --max_staleness steps ago or earlier has an open trajectory."""
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
    """Distribute the samples over the ranks. Returns 1. key -> rank, 2. whether all samples of a prompt are
    on one rank.

    If there are PROMPTS_PER_ENGINE prompts or more for each engine, all samples of a prompt are on one rank:
    the engine then reads each prompt once. With fewer prompts, samples are dealt one by one. Then a prompt
    with long responses does not keep one engine busy while the others wait."""
    prompts = sorted({i for i, _ in keys})
    if len(prompts) >= PROMPTS_PER_ENGINE * engine.engines:
        place = {i: at % engine.ranks for at, i in enumerate(prompts)}
        return {key: place[key[0]] for key in keys}, True
    return {key: at % engine.ranks for at, key in enumerate(sorted(keys))}, False


def meet(samples: Sequence[Sample], engine: Engine) -> list[Sample]:
    """Exchange samples so that all samples of a prompt are on one rank. Returns this rank's samples, ordered
    by (prompt_id, sample_id)."""
    outgoing = [[s for s in samples if s.prompt_id % engine.ranks == rank] for rank in range(engine.ranks)]
    return sorted(itertools.chain(*dist.exchange(outgoing)), key=lambda s: (s.prompt_id, s.sample_id))


def moves(held: Sequence[Sequence[K]]) -> dict[K, int]:
    """Returns key -> new rank, for the keys that must move to balance the ranks. Then the numbers of keys on
    two ranks differ by at most 1. The smallest possible number of keys moves. held[r]: the keys on rank r."""
    ranks, total = len(held), sum(map(len, held))
    fullest = sorted(range(ranks), key=lambda r: -len(held[r]))  # the remainder goes to the fullest ranks
    share = {r: total // ranks + (i < total % ranks) for i, r in enumerate(fullest)}
    surplus = [key for r in range(ranks) for key in held[r][share[r]:]]
    room = [r for r in range(ranks) for _ in range(share[r] - len(held[r]))]
    return dict(zip(surplus, room, strict=True))


# --- metrics of problems

Scores = dict[str, dict[str, list[float]]]  # evaluation set -> metric -> one value a problem


def accuracy(samples: Sequence[Sample], n: int) -> dict[str, list[float]]:
    """Returns metric -> values, one value for each problem. A problem has `n` samples.

    avg@n is the mean reward of n samples. pass@k, for k = 2, 4, … n, is the unbiased estimate. maj@n grades
    the most frequent answer. response_len is in tokens. truncated is a share from 0 to 1."""
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
    """Returns the probability that k samples, drawn from n samples without replacement, contain a right one.
    `right` of the n samples are right: 1 - C(n - right, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(group: Sequence[Sample]) -> float:
    """Returns 1 if the most frequent answer among one prompt's samples is right, else 0. If several answers
    are equally frequent, returns the share of right ones among them. A sample without an answer doesn't
    vote."""
    votes = Counter(s.answer for s in group if s.answer is not None)
    top = [a for a, count in votes.items() if count == max(votes.values())]
    right = {s.answer for s in group if s.reward > 0}
    return sum(a in right for a in top) / len(top) if top else 0.0


def mean(values: Sequence[float]) -> float:
    """Returns the mean of the problems' values. Without values (sampling was aborted) it returns 0."""
    return math.fsum(values) / max(len(values), 1)


# --- evaluation


def sample_row(s: Sample, problem: Problem, save_logps: bool) -> dict[str, Any]:
    """Returns a sample as a row of samples/*.jsonl or eval/*.jsonl. With `save_logps` the row also has the
    response's token ids and the engine's log-probs, rounded to 4 decimals. The log-prob of an environment's
    token is null."""
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
    """Returns name -> problems, for each file of cfg.eval_data. `set_names` gives the names. Raises UserError
    as load_problems does."""
    longer = cfg.eval_response_len > cfg.max_response_len  # then engine_len is longer than model_len
    longest = cfg.engine_len if longer else cfg.model_len
    return {name: load_problems([path], tokenizer, cfg, say, longest)
            for name, path in zip(set_names(cfg.eval_data), cfg.eval_data, strict=True)}


SPLITS = {"eval", "test", "train", "validation", "valid", "val", "dev", "data", "default", "main"}


def set_names(paths: Sequence[str]) -> list[str]:
    """Returns a short name for each evaluation file. Raises UserError if a file is given twice.

    The name is the file name without its suffix. If another file has the same name, or if the name is one of
    SPLITS, the folder's name is put in front. This repeats with the next folder up.

        eval_sets/aime2024.json                          aime2024
        gsm8k/test.jsonl                                 gsm8k-test
        openai/gsm8k:main/test-00000-of-00001.parquet    gsm8k-test     (a file on the Hugging Face Hub)"""
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
    """Sample and grade the held-out sets (name -> problems). Returns, on every rank, 1. the scores, 2. one
    row per response. The randomness is the same at every step, so evaluations differ only by the weights."""
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
    """Returns `accuracy` of the samples of all ranks, in the order of the problems. This order is the same
    for any number of ranks, so a mean has the same rounding."""
    values = accuracy(samples, n)
    rows = zip(dict.fromkeys(s.prompt_id for s in samples), *values.values(), strict=True)
    by_problem = sorted(itertools.chain(*dist.gather(list(rows))))
    return {metric: [row[i] for row in by_problem] for i, metric in enumerate(values, 1)}


# --- the engine and the graders of a run

ENGINES = {"torch": TorchEngine, "vllm": VLLMEngine}


def make_engine(path: str, tokenizer: Any, cfg: Config, device: torch.device, dtype: torch.dtype) -> Engine:
    """Returns the engine that cfg names, for the model folder `path`. Raises UserError if it can't run
    there."""
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
    """Returns the engine's name in ENGINES. --engine auto depends on the device."""
    return cfg.engine_kind(device.type == "cuda")


def max_positions(config: Any) -> float:
    """Returns the longest sequence that the model supports, in tokens. Scaling of its rotary embeddings
    (rope) is included. Returns infinity if the config has no limit."""
    known = getattr(config, "max_position_embeddings", None) or math.inf
    rope, *others = ropes(config)
    original = rope.get("original_max_position_embeddings") or known
    # If layer types have separate rotary embeddings, max_position_embeddings already includes the scaling.
    scaled = not others and rope.get("rope_type") in ("linear", "yarn")
    return max(known, original * rope.get("factor", 1)) if scaled else known


def make_grader(cfg: Config) -> Grader:
    """Start this rank's grading processes for cfg's rewards. Returns the Grader. Raises UserError for a
    reward or an extractor that doesn't exist."""
    terms = terms_of(cfg)
    for name in extractors(cfg).values():
        extract("", name)
    return Grader(cfg.grade_workers, cfg.grade_deadline, [t.custom for t in terms if t.custom],
                  any(t.kind for t in terms), cfg.env)
