"""Samples and grades responses, for training and evaluation.

with engine.awake(full_weights(policy), version=step):
    samples, _ = rollout(engine, grader, {prompt_id: problem, …}, n=8, key=(seed, step), …)"""

import itertools
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dist
import grpo
from configs import PRESETS, Config, Say, UserError, require
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
from grading.worker import Grade, Grader, reason_of
from model import load_config, ropes
from reward import TEXT_PARTS, Term, graders_of, parse_terms

Sets = Mapping[str, Sequence[Problem]]  # evaluation set -> problems
# Random seeds contain these numbers, so that training, evaluations, the self-check and later rounds of a
# rollout draw different random numbers.
TRAIN, EVAL, CHECK, ROUND = 1, 2, 3, 4
PROMPTS_PER_ENGINE = (
    32  # with fewer prompts per engine, `deal` spreads a prompt's samples over the ranks
)

# --- rewards


def overlong(group: Sequence[Sample], cfg: Config) -> list[float]:
    """Returns DAPO's length penalty for each sample, from -1 to 0 (arXiv 2503.14476, eq. 13)."""
    return [
        grpo.overlong_penalty(
            len(s.ids),
            min(cfg.max_response_len, cfg.model_len - len(s.prompt)),
            cfg.overlong_buffer,
        )
        for s in group
    ]


def nonstop(group: Sequence[Sample], cfg: Config) -> list[float]:
    """Returns Open-Instruct's penalty for each sample: -nonstop_penalty if the length limit cut the response,
    else 0."""
    return [0.0 if s.stopped else -cfg.nonstop_penalty for s in group]


def length(group: Sequence[Sample], cfg: Config) -> list[float]:
    """Returns Kimi k1.5's length rewards (arXiv 2501.12599, sec. 2.3.3): from 0.5 for the prompt's shortest
    response to -0.5 for the longest. A wrong response gets at most 0."""
    lengths = [int(s.is_sampled.sum()) for s in group]
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    rewards = [0.5 - (n - shortest) / spread if spread else 0.0 for n in lengths]
    return [x if s.reward > 0 else min(0.0, x) for s, x in zip(group, rewards, strict=True)]


# Name of a reward part -> its function, which takes the samples of one prompt and the config, and returns an
# extra reward for each sample. A run uses a part if --reward names it, or if its flag (BY_FLAG) is not 0.
REWARD_PARTS = {
    **{
        name: lambda group, cfg, part=part: [part(s.policy_text) for s in group]
        for name, part in TEXT_PARTS.items()
    },
    "length": length,
    "overlong": overlong,
    "nonstop": nonstop,
}
BY_FLAG = {"overlong": "overlong_buffer", "nonstop": "nonstop_penalty"}  # part -> its flag


def terms_of(cfg: Config) -> list[Term]:
    """Returns the terms of --reward: first the graders, then the reward parts. Raises UserError for an
    unknown term, a name that comes twice, or a weight of 0 without a teacher (--ref_model)."""
    terms = parse_terms(cfg.reward, [name for name in REWARD_PARTS if name not in BY_FLAG])
    clash = sorted({t.name for t in terms if t.kind or t.custom} & REWARD_PARTS.keys())
    require(
        not clash,
        f"--reward has a term with the name of the built-in part {', '.join(clash)}",
        "another name for the function or the data set",
    )
    require(
        all(t.weight for t in terms) or cfg.ref_model and cfg.kl_coef,
        "a weight in --reward is 0",
        "another weight, or a teacher: --ref_model, and --kl_coef above 0",
    )
    return terms


def weighted_parts(cfg: Config) -> dict[str, float]:
    """Returns a dict: name -> weight of each built-in reward part (REWARD_PARTS) that this run uses."""
    named = {t.name: t.weight for t in terms_of(cfg) if t.name in REWARD_PARTS}
    return named | {name: 1.0 for name, flag in BY_FLAG.items() if getattr(cfg, flag)}


def part_names(cfg: Config) -> list[str]:
    """Returns the names of the run's graders and reward parts. Each name has a metric `reward/NAME`."""
    return [*(t.name for t in terms_of(cfg) if t.kind or t.custom), *weighted_parts(cfg)]


def shape_rewards(samples: Sequence[Sample], cfg: Config) -> list[Sample]:
    """Returns the samples with the reward parts added to Sample.parts. With --mask_truncated, samples cut at
    the length limit get in_loss=False. `samples` must be ordered by (prompt_id, sample_id)."""
    shaped, weights = [], weighted_parts(cfg)
    if not weights and not cfg.mask_truncated:
        return list(samples)  # unchanged; to copy every sample would take 1 % of the demo's step
    for group in group_by_prompt(samples):
        values = {name: REWARD_PARTS[name](group, cfg) for name in weights}
        for i, s in enumerate(group):
            parts = s.parts | {name: weights[name] * values[name][i] for name in weights}
            shaped.append(replace(s, parts=parts, in_loss=s.stopped or not cfg.mask_truncated))
    return shaped


def extractors(cfg: Config) -> dict[str, str]:
    """Returns a dict: name of a data set -> its extractor. The name "" stands for all other data sets. Raises
    UserError if --extractor has two extractors for one data set."""
    found = {}
    for dataset, _, name in (spec.rpartition("=") for spec in cfg.extractor):
        dataset = dataset.casefold()
        require(
            dataset not in found,
            f"--extractor {' '.join(cfg.extractor)} has two extractors "
            f"for {dataset or 'all other rows'}",
            "one each: NAME, and DATASET=NAME for the rows of a data set",
        )
        found[dataset] = name
    return {"": "orz"} | found


def check_graders(sets: Iterable[Sequence[Problem]], cfg: Config) -> None:
    """Raises UserError if a data set has no grader, or if --reward or --extractor names an unknown data set.
    `sets`: the problems of each data file."""
    terms, datasets = terms_of(cfg), {p.dataset for problems in sets for p in problems}
    there = {dataset.casefold() for dataset in datasets} - {""}
    # Any data set that a preset's --extractor names (rlvr-8b: gsm8k) is allowed, even if it has no rows.
    of_presets = {name for preset in PRESETS.values() for name in extractors(preset)}
    named = {t.dataset for t in terms} | extractors(cfg).keys()
    unknown = ", ".join(map(repr, sorted(named - there - of_presets)))
    require(
        not unknown,
        f"--reward or --extractor names data set {unknown}, but no row belongs to it",
        f"one of {', '.join(sorted(there))}" if there else "rows with a field dataset",
    )
    for dataset in sorted(datasets):
        found = graders_of(dataset, terms)
        require(
            bool(found) and not (dataset.casefold().startswith("ifeval") and found[0].kind),
            f"--reward names no grader that can grade the rows of data set {dataset!r}",
            f"a grader for them, such as --reward math{dataset and f' {dataset}@FILE.py:FUNCTION'}",
        )


def check_tokens(sets: Iterable[Sequence[Problem]], config: Any) -> None:
    """Raises UserError if a prompt has a token for which the model has no embedding. `config`: the model's"""
    for p in itertools.chain(*sets):
        require(
            max(p.ids) < config.vocab_size,
            f"{p.file} row {p.row}: its prompt has the token {max(p.ids)}, and the model's embedding has "
            f"{config.vocab_size} tokens",
            "rows and a template without tokens that were added to the "
            "tokenizer, or another --model",
        )


# --- trajectories


class Trajectories:
    """This rank's trajectories of one rollout. A trajectory is a prompt with the response so far. It is in
    one of these dicts:

        open      unfinished
        waiting   the environment (--env) has not replied to the last turn yet
        complete  finished, not graded yet
        graded    finished, with its reward"""

    def __init__(
        self,
        engine: Engine,
        grader: Grader,
        problems: Mapping[int, Problem],
        max_tokens: int,
        round_len: int,
        top_p: float,
    ) -> None:
        """problems: prompt_id -> problem, for the prompts of all ranks
        max_tokens: largest number of tokens of a response
        round_len: largest number of new tokens of a trajectory in one call of the engine; 0: no limit"""
        self.engine, self.grader, self.problems, self.cfg = engine, grader, problems, engine.cfg
        self.max_tokens, self.round_len, self.rounds, self.top_p = max_tokens, round_len, 0, top_p
        self.terms, self.extractors = terms_of(self.cfg), extractors(self.cfg)
        self.open: dict[Key, Sample] = {}  # Sample.text has only the finished turns
        self.waiting: dict[Key, Sample] = {}
        self.complete: dict[Key, Sample] = {}
        self.graded: dict[Key, Sample] = {}
        # (prompt_id, sample_id) -> the environment's Reply; (prompt_id, sample_id, i) -> grader i's Grade
        self.results = {}

    def begin(self, keys: Iterable[Key], version: int) -> None:
        """Add new trajectories with empty responses."""
        ids, logp = np.zeros(0, np.int32), np.zeros(0, np.float32)
        for i, j in keys:
            self.open[i, j] = Sample(i, j, self.problems[i].ids, ids, logp, False, "", version)

    def add(self, trajectories: Iterable[Sample]) -> None:
        """Add trajectories of another rank or of an earlier step. A trajectory with a grader's `reason`, such
        as "wrong", is graded already and goes to `graded`. Any other goes to `open`."""
        for s in trajectories:
            (self.graded if s.reason else self.open)[s.key] = s

    def move(self, target: Mapping[Key, int]) -> None:
        """Move unfinished trajectories between ranks. All ranks must call this method together.

        target: key of a trajectory -> its new rank; the same dict on every rank. A trajectory whose key is
            not in `target` stays on its rank."""
        if target and self.engine.ranks > 1:
            outgoing = [
                [self.open.pop(key) for key in list(self.open) if target.get(key) == rank]
                for rank in range(self.engine.ranks)
            ]
            for arrived in dist.exchange(outgoing):
                self.add(arrived)

    def sample_round(
        self, temperature: float, key: tuple[int, ...], version: int, progress: Callable
    ) -> bool:
        """Continue each unfinished trajectory up to the end of its turn, by at most `round_len` tokens.

        Returns False if a signal has aborted the round, else True. With --tp, a signal aborts no round,
        because the engine's other ranks would wait for ever."""
        before = dict(self.open)
        requests = {k: (*s.prompt, *s.ids.tolist()) for k, s in before.items()}
        limits = {
            k: min(self._left(s), self.round_len or self.max_tokens) for k, s in before.items()
        }
        round_key = (*key, ROUND, self.rounds + 1) if self.rounds else key
        for s in self.engine.generate(
            requests, limits, temperature, round_key, version, self.top_p
        ):
            if self._take(before[s.key], s):
                progress()
                if dist.stop_signal and self.cfg.tp == 1:
                    return False
        if self.waiting:
            self.results |= self.grader.results()
            for key in sorted(self.waiting):
                self._continue(self.waiting.pop(key), self.results.pop(key))
        self.rounds += 1
        return True

    def _take(self, before, segment):
        """Append `segment`, this round's tokens, to the trajectory `before`. Returns True if the turn
        ended."""
        s = self._join(before, segment) if len(before.ids) else segment
        del self.open[s.key]
        if not s.stopped and self._left(s) > 0:
            self.open[s.key] = replace(s, text=before.text)
            return False
        if self.cfg.env and s.stopped:
            self.waiting[s.key] = s
            self.grader.ask(
                s.key, self.problems[s.prompt_id].text, s.text[len(before.text) :], s.turns
            )
        else:
            self._complete(s)
        return True

    def _join(self, before, segment):
        turn, text = before.ids[before.turn_start :], segment.text
        if len(turn):
            # The engine does not see a stop string that began in an earlier round. So cut after it here.
            count = first_stop(turn, segment.ids, self.cfg.stop, self.engine.tokenizer)
            if count:
                segment = replace(
                    segment, ids=segment.ids[:count], logp=segment.logp[:count], stopped=True
                )
            # Decode the whole turn: a character's bytes may be divided between `before` and `segment`.
            text = self.engine.text_of(np.concatenate([turn, segment.ids]))
        return replace(extended(before, segment), text=before.text + text)

    def _complete(self, s):
        problem = self.problems[s.prompt_id]
        self.complete[s.key] = s
        extractor = self.extractors.get(problem.dataset.casefold(), self.extractors[""])
        row = json.loads(problem.fields) if problem.fields else {}
        facts = {"tokens": len(s.ids), "turns": s.turns}
        for i, term in enumerate(graders_of(problem.dataset, self.terms)):
            self.grader.submit(
                (*s.key, i),
                s.policy_text,
                problem.answer,
                s.stopped,
                problem.kind,
                extractor,
                term.custom,
                problem=problem.text,
                row=row,
                sample=facts,
            )

    def _continue(self, s, reply):
        """Append the environment's text to `s`, so that the policy gets another turn. Complete `s` instead if
        the environment failed or ended the response, if `s` has --max_turns turns, or if the text leaves no
        room for another turn.

        reply: a Reply, or a Grade if the environment failed"""
        if isinstance(reply, Grade):
            return self._complete(replace(s, reason=reply.reason))
        if reply.reward is not None:
            s = replace(s, env_reward=reply.reward)
        if reply.done or reply.text is None or s.turns == self.cfg.max_turns:
            return self._complete(s)
        ids, left = (
            self.engine.tokenizer(reply.text, add_special_tokens=False).input_ids,
            self._left(s),
        )
        # The response has room, but not for the whole text, or the model has no embedding for a token: an
        # error of the environment.
        known = self.engine.config.vocab_size
        if 0 < left < len(ids) or max(ids, default=0) >= known:
            self.grader.errors.setdefault(
                "Flood",
                f"Flood: the environment's text has {len(ids)} tokens, "
                f"but the response has room for only {left}; its largest token is "
                f"{max(ids)}, and the model has {known}",
            )
            return self._complete(replace(s, reason="error"))
        # No room for another turn: drop the text, and end the trajectory as truncated.
        if len(ids) >= left:
            return self._complete(replace(s, stopped=False))
        self.open[s.key] = answered(s, reply.text, ids)

    def _left(self, s):
        """Returns how many tokens may still be appended to `s`. A response may have max_tokens tokens. Prompt
        plus response may have cfg.model_len tokens, or cfg.engine_len in an evaluation with longer responses
        (--eval_response_len)."""
        cfg = self.cfg
        length = cfg.model_len if self.max_tokens <= cfg.max_response_len else cfg.engine_len
        return min(self.max_tokens, length - len(s.prompt)) - len(s.ids)

    def grades(self) -> list[Sample]:
        """Wait for the graders. Returns this rank's graded trajectories, ordered by (prompt_id,
        sample_id)."""
        self.results |= self.grader.results()
        for key, s in self.complete.items():
            terms = graders_of(self.problems[s.prompt_id].dataset, self.terms)
            first, *others = grades = [self.results[*key, i] for i in range(len(terms))]
            reward, reason, answer = first
            if s.reason:
                reward, reason = 0.0, s.reason
            elif s.env_reward is not None:
                reward, reason = s.env_reward, reason_of(s.env_reward)
            self.graded[key] = replace(
                s,
                reward=reward,
                reason=reason,
                answer=answer,
                grader=terms[0].name,
                weight=terms[0].weight,
                parts={t.name: t.weight * g.reward for t, g in zip(terms[1:], others, strict=True)},
                failed=tuple(
                    t.name for t, g in zip(terms, grades, strict=True) if g.reason == "error"
                ),
            )
        return [self.graded[key] for key in sorted(self.graded)]


# --- rollouts


def rollout(
    engine: Engine,
    grader: Grader,
    problems: Mapping[int, Problem],
    n: int,
    temperature: float,
    max_tokens: int,
    key: tuple[int, ...],
    version: int,
    progress: Callable = lambda: None,
    carried: Sequence[Sample] | None = None,
    top_p: float = 1.0,
) -> tuple[list[Sample], list[Sample]]:
    """Sample and grade `n` responses to each problem. All ranks must call this function together. Returns
    1. this rank's graded samples, ordered by (prompt_id, sample_id). All samples of a prompt are on one rank.
    2. with --carry: the rest of this rank's trajectories, for the next step. Otherwise an empty list.

    Both lists are empty if a signal has aborted the rollout.

    problems: prompt_id -> problem, the same on every rank. With --carry, prompt_id is the
        prompt's number in the run (data.numbers_at).
    max_tokens: largest number of tokens of a response.
    progress: called when a turn ends.
    carried: in training, result 2 of the previous step's call, or () without --carry. None in evaluation.
    temperature, key, version, top_p: see Engine.generate."""
    cfg, training = engine.cfg, carried is not None
    carries, round_len = training and cfg.carry > 0, cfg.round_len if training else 0
    trajectories = Trajectories(engine, grader, problems, max_tokens, round_len, top_p)
    trajectories.add(carried or ())
    # At temperature 0, all samples of a prompt are equal, so one is enough. With --carry, `problems` also has
    # the prompts of carried samples. These prompts get no new samples.
    new = [
        (i, j)
        for i in problems
        if not carries or step_of(i, cfg) == version
        for j in range(n if temperature else 1)
    ]
    old = dist.gather_all(trajectories.open) if carries else ()  # from all ranks
    home = deal([*new, *old], engine)  # key -> rank
    trajectories.begin([k for k in new if home[k] == engine.rank], version)
    # `home` does not depend on where trajectories are now, so a resumed run moves them to the same ranks.
    if carries:
        trajectories.move(home)
    chosen = sample_until_enough(trajectories, temperature, key, version, progress, carries)
    if any(dist.gather(chosen is None)):
        return [], []
    graded = trajectories.grades()
    samples = [s for s in graded if s.key in chosen]  # with --carry, the rest is for later steps
    left = [*trajectories.open.values(), *(s for s in graded if s.key not in chosen)]
    if not temperature:  # greedy: copy the only sample of each prompt
        samples = [replace(s, sample_id=j) for s in samples for j in range(n)]
    if engine.ranks > 1:
        samples = meet(samples, engine)
    return samples, left


def sample_until_enough(
    trajectories: Trajectories,
    temperature: float,
    key: tuple[int, ...],
    version: int,
    progress: Callable,
    carries: bool,
) -> set[Key] | None:
    """Run rounds of sampling until enough trajectories are complete. Returns the keys of these trajectories:
    with --round_len those on all ranks, otherwise those on the ranks of this rank's engine. Returns None if a
    signal has aborted sampling.

    carries: whether --carry is on. Without --carry, all trajectories must be complete. With --carry,
        cfg.samples_per_step trajectories are enough, but all that began --max_staleness or more steps ago
        must be complete."""
    cfg, engine, shares = trajectories.cfg, trajectories.engine, trajectories.round_len > 0
    while True:
        aborted = not trajectories.sample_round(temperature, key, version, progress)
        # With --round_len, the ranks exchange data after each round, so all ranks must stop together.
        if dist.stop_requested() if shares else aborted:
            return None
        state = sorted(trajectories.open), [*trajectories.graded, *trajectories.complete]
        states = dist.gather(state) if shares else engine.gather(state)
        open_keys, complete = [x for x, _ in states], itertools.chain(*(x for _, x in states))
        unfinished = {i for i, _ in itertools.chain(*open_keys)}
        if carries:
            # If the samples of a prompt are compared, none of them is ready before all are complete.
            waits = unfinished if cfg.compares_samples else ()
            ready = sorted(k for k in complete if k[0] not in waits)
            too_old = any(version - step_of(i, cfg) >= cfg.max_staleness for i in unfinished)
            if len(ready) >= cfg.samples_per_step and not too_old:
                return set(ready[: cfg.samples_per_step])
        elif not unfinished:
            return set(complete)
        if shares:
            trajectories.move(moves(open_keys))


def deal(keys: Sequence[Key], engine: Engine) -> dict[Key, int]:
    """Returns a dict: key of a sample -> the rank that samples it.

    All samples of a prompt go to one rank, which computes the prompt once. With fewer than PROMPTS_PER_ENGINE
    prompts per engine, the samples of a prompt are spread over the ranks, so that all ranks have work."""
    prompts = sorted({i for i, _ in keys})
    if len(prompts) >= PROMPTS_PER_ENGINE * engine.engines:
        place = {i: at % engine.ranks for at, i in enumerate(prompts)}
        return {key: place[key[0]] for key in keys}
    return {key: at % engine.ranks for at, key in enumerate(sorted(keys))}


def meet(samples: Sequence[Sample], engine: Engine) -> list[Sample]:
    """Move samples so that all samples of a prompt are on one rank. All ranks must call this function.
    Returns this rank's samples, ordered by (prompt_id, sample_id)."""
    outgoing = [
        [s for s in samples if s.prompt_id % engine.ranks == rank] for rank in range(engine.ranks)
    ]
    return sorted(itertools.chain(*dist.exchange(outgoing)), key=lambda s: s.key)


def moves(held: Sequence[Sequence[Key]]) -> dict[Key, int]:
    """Returns a dict: key of a trajectory -> its new rank. These are the fewest moves after which the ranks'
    numbers of unfinished trajectories differ by at most 1.

    held[r]: keys of the unfinished trajectories on rank r"""
    ranks, total = len(held), sum(map(len, held))
    # If the ranks can't have equal numbers, the fullest ranks keep one trajectory more, so that fewer move.
    fullest = sorted(range(ranks), key=lambda r: -len(held[r]))
    share = {r: total // ranks + (i < total % ranks) for i, r in enumerate(fullest)}
    surplus = [key for r in range(ranks) for key in held[r][share[r] :]]
    room = [r for r in range(ranks) for _ in range(share[r] - len(held[r]))]
    return dict(zip(surplus, room, strict=True))


# --- metrics of problems

Scores = dict[str, dict[str, list[float]]]  # evaluation set -> metric -> value of each problem


def accuracy(samples: Sequence[Sample], n: int) -> dict[str, list[float]]:
    """Returns a dict: metric -> list with one value for each problem. Each problem has `n` samples.

    avg@n         mean reward
    pass@k        see `pass_at`; k = 2, 4, 8, … up to n, and n
    maj@n         see `majority`; for n above 2
    response_len  mean number of tokens
    truncated     fraction cut at the length limit"""
    groups = group_by_prompt(samples)
    right = [sum(s.right for s in group) for group in groups]
    metrics = {f"avg@{n}": [sum(s.reward for s in group) / n for group in groups]}
    for k in sorted({2**i for i in range(1, n.bit_length())} | {n} - {1}):
        metrics[f"pass@{k}"] = [pass_at(k, n, c) for c in right]
    if n > 2:
        metrics[f"maj@{n}"] = [majority(group) for group in groups]
    metrics["response_len"] = [sum(len(s.ids) for s in group) / n for group in groups]
    metrics["truncated"] = [sum(not s.stopped for s in group) / n for group in groups]
    return metrics


def pass_at(k: int, n: int, right: int) -> float:
    """Returns pass@k (arXiv 2107.03374, eq. 1): the probability that k of the n samples, drawn without
    replacement, include a right one. right: number of right samples among the n."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(group: Sequence[Sample]) -> float:
    """Returns 1 if a prompt's most frequent answer is right, else 0 (also if no answer was found). With a
    tie, returns 1 / (number of tied answers) if one of them is right. All answers that were graded right
    count as one answer. Wrong answers are equal if their texts are."""
    right = {s.answer for s in group if s.right}
    # True stands for all right answers.
    votes = Counter(s.answer in right or s.answer for s in group if s.answer is not None)
    top = [a for a, count in votes.items() if count == max(votes.values())]
    return (True in top) / max(len(top), 1)


def mean(values: Sequence[float]) -> float:
    """Returns the mean of the values, or 0 for an empty list."""
    return math.fsum(values) / max(len(values), 1)


# --- evaluation


def sample_row(s: Sample, problem: Problem, save_logps: bool) -> dict[str, Any]:
    """Returns the sample as one row of a file in samples/ or eval/. `save_logps` adds token ids and the
    engine's log-probs (nats)."""
    same = {
        name: getattr(s, name)
        for name in "prompt_id sample_id answer reward reason stopped".split()
    }
    row = same | dict(
        score=s.score,
        terms=s.entered,
        problem=problem.text,
        gold=problem.answer,
        response=s.text,
        tokens=len(s.ids),
    )
    if problem.fields:
        row["row"] = json.loads(problem.fields)
    if s.turns > 1:
        row |= dict(turns=s.turns, segments=s.segments)
    if save_logps:
        row |= dict(
            ids=s.ids.tolist(),
            logps=[
                round(x, 4) if of_policy else None
                for x, of_policy in zip(s.logp.tolist(), s.is_sampled, strict=True)
            ],
        )
    return row


def load_sets(cfg: Config, tokenizer: Any, say: Say, keep_fields: bool = False) -> Sets:
    """Returns a dict: name of an evaluation set -> its problems. Each file of --eval_data is one set. Raises
    UserError as set_names and load_problems do."""
    return {
        name: load_problems([path], tokenizer, cfg, say, cfg.engine_len, keep_fields)
        for name, path in zip(set_names(cfg.eval_data), cfg.eval_data, strict=True)
    }


def set_names(paths: Sequence[str]) -> list[str]:
    """Returns a short name for each evaluation file. Raises UserError if two files can't get different names.

    eval_sets/aime2024.json                          aime2024
    gsm8k/test.jsonl math/test.jsonl                 gsm8k-test math-test
    openai/gsm8k:main/test-00000-of-00001.parquet    gsm8k-test"""
    parts = []
    for path in paths:
        repo, _, file = path.rpartition(":")
        stem = re.sub(r"-00000-of-00001$", "", Path(file).stem)
        parts.append([f"{Path(repo).name}-{stem}"] if repo else [*Path(file).parts[:-1], stem])
    for n in range(1, 1 + max(map(len, parts), default=1)):
        names = ["-".join(part[-n:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(
        f"two files of --eval_data would have the same name: {' '.join(paths)}; "
        "needed: each file once, and different file names"
    )


def score_sets(
    engine: Engine,
    grader: Grader,
    sets: Sets,
    cfg: Config,
    step: int,
    progress: Callable = lambda: None,
) -> tuple[Scores, list[dict]]:
    """Sample and grade responses to the problems of each evaluation set. Returns, the same on every rank,
    1. the scores (see Scores above);
    2. one row for each response (see `sample_row`).

    step: the training step whose weights the engine holds"""
    scores, rows = {}, []
    for i, (name, problems) in enumerate(sets.items()):
        n, temperature = (v[i % len(v)] for v in (cfg.eval_samples, cfg.eval_temperature))
        key = zlib.crc32(
            name.encode()
        )  # not `i`: an added evaluation set changes no response of the others
        samples, _ = rollout(
            engine,
            grader,
            dict(enumerate(problems)),
            n,
            temperature,
            cfg.eval_response_len or cfg.max_response_len,
            (cfg.seed, EVAL, key),
            step,
            progress,
            top_p=cfg.eval_top_p,
        )
        dist.together(grader.check)
        scores[name] = gather_scores(samples, n)
        rows += dist.gather_rows(
            [{"set": name} | sample_row(s, problems[s.prompt_id], cfg.save_logps) for s in samples]
        )
    return scores, rows


def gather_scores(samples: Sequence[Sample], n: int) -> dict[str, list[float]]:
    """Returns a dict: metric -> list with one value for each problem (see `accuracy`). The lists have the
    problems of all ranks, ordered by prompt_id."""
    values = accuracy(samples, n)
    rows = zip(dict.fromkeys(s.prompt_id for s in samples), *values.values(), strict=True)
    by_problem = sorted(dist.gather_all(rows))
    return {metric: [row[i] for row in by_problem] for i, metric in enumerate(values, 1)}


# --- the engine and the graders of a run

ENGINES = {"torch": TorchEngine, "vllm": VLLMEngine}


def make_engine(
    path: str, tokenizer: Any, cfg: Config, device: torch.device, dtype: torch.dtype
) -> Engine:
    """Returns a new engine for the model folder `path`. Raises UserError if it can't run this model."""
    check_engine_flags(path, cfg, device)
    return ENGINES[cfg.engine_kind(device.type == "cuda")](path, tokenizer, cfg, device, dtype)


def check_engine_flags(path: str, cfg: Config, device: torch.device) -> None:
    """Raises UserError for --tp without vLLM, or if the model in `path` does not support cfg.engine_len
    tokens (prompt plus response)."""
    kind = cfg.engine_kind(device.type == "cuda")
    require(
        kind == "vllm" or cfg.tp == 1,
        f"--tp {cfg.tp} with --engine torch",
        "--engine vllm, or --tp 1",
    )
    known = max_positions(load_config(path))
    require(
        cfg.engine_len <= known,
        f"{path} has {known:,} positions, and a prompt with its response may "
        f"take {cfg.engine_len:,}",
        "smaller --max_response_len or --eval_response_len, "
        f"--max_model_len {known}, or another --model",
    )


def max_positions(config: Any) -> float:
    """Returns the longest sequence that the model supports, in tokens, or infinity if the config does not
    name a limit."""
    known = getattr(config, "max_position_embeddings", None) or math.inf
    rope, *others = ropes(config)
    original = rope.get("original_max_position_embeddings") or known
    # With several RoPEs, max_position_embeddings is already the length after scaling.
    scaled = not others and rope.get("rope_type") in ("linear", "yarn")
    return max(known, original * rope.get("factor", 1)) if scaled else known


def make_grader(cfg: Config, say: Say = print) -> Grader:
    """Returns a new Grader. Raises UserError if a reward or an extractor does not exist."""
    terms = terms_of(cfg)
    for name in extractors(cfg).values():
        extract("", name)
    return Grader(
        cfg.grade_workers,
        cfg.grade_deadline,
        [t.custom for t in terms if t.custom],
        cfg.env,
        say,
        dist.stop_signal,
    )
