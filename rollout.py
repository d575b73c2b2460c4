"""Samples and grades responses, for training and evaluation.

with engine.awake(full_weights(policy), version=step):
    sampling = Sampling(n=8, temperature=1.0, max_tokens=512, seed=(cfg.seed, TRAIN, step), version=step)
    samples, _ = rollout(engine, grader, {prompt_id: problem, …}, sampling)"""

import itertools
import math
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import dist
from configs import PRESETS, Config, Say
from data import (
    EMPTY,
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
from grading.worker import Grade, Grader, reason_of
from guard.messages import UserError, require
from model import load_config, ropes
from reward import REWARD_PARTS, check_functions, extractors, graders_of, terms_of

Sets = Mapping[str, Sequence[Problem]]  # evaluation set -> problems
# Random seeds contain these numbers, so that training, evaluations, the self-check and later rounds of a
# rollout draw different random numbers.
TRAIN, EVAL, CHECK, ROUND = 1, 2, 3, 4

# --- rewards


def shape_rewards(samples: Sequence[Sample], cfg: Config) -> list[Sample]:
    """Returns the samples with the reward parts added to Sample.parts. With --mask_truncated, samples cut at
    the length limit get in_loss=False. `samples` must be ordered by (prompt_id, sample_id)."""
    parts = [t for t in terms_of(cfg) if not t.is_grader]
    shaped = []
    for group in group_by_prompt(samples):
        # reward part -> its value for each sample of the group
        values = {t: REWARD_PARTS[t.name](group, cfg) for t in parts}
        for i, s in enumerate(group):
            added = {t.name: t.weight * values[t][i] for t in parts}
            s = replace(
                s,
                parts=s.parts | added,
                in_loss=s.stopped or not cfg.mask_truncated,
            )
            shaped.append(s)
    return shaped


def check_graders(sets: Iterable[Sequence[Problem]], cfg: Config) -> None:
    """Raises UserError if a data set has no grader, or if --reward or --extractor names an unknown data set.

    sets: the problems of each data file"""
    terms = terms_of(cfg)
    # Names of the rows' data sets. "": the rows without one
    in_rows = {p.dataset.casefold() for p in itertools.chain(*sets)}
    # Names of data sets in the flags. "": all data sets
    in_flags = {t.dataset for t in terms}
    # The --extractor of a preset (rlvr-8b: gsm8k) may name a data set without rows.
    if cfg.extractor not in [preset.extractor for preset in PRESETS.values()]:
        in_flags |= extractors(cfg).keys()
    unknown = sorted(in_flags - in_rows - {""})
    require(
        not unknown,
        f"--reward or --extractor names data sets without rows: {', '.join(unknown)}",
        f"some of the rows' data sets: {', '.join(sorted(in_rows - {''})) or 'none'}",
    )
    for dataset in sorted(in_rows):
        found = graders_of(dataset, terms)
        # A grader with a `kind` is built in. None of these can grade ifeval.
        require(
            bool(found) and not (dataset.startswith("ifeval") and found[0].kind),
            f"--reward names no grader that can grade the rows of data set {dataset!r}",
            "a grader for them: --reward math, or DATASET@FILE.py:FUNCTION",
        )


def check_tokens(sets: Iterable[Sequence[Problem]], config: Any) -> None:
    """Raises UserError if a prompt has a token for which the model has no embedding. config: the model's
    config"""
    for p in itertools.chain(*sets):
        require(
            max(p.ids) < config.vocab_size,
            f"{p.file} row {p.row}: its prompt has the token {max(p.ids)}, and "
            f"the model's embedding has {config.vocab_size} tokens",
            "rows and a template without tokens that were added to the "
            "tokenizer, or another --model",
        )


# --- trajectories


class Sampling(NamedTuple):
    """How a rollout samples its responses."""

    n: int  # number of responses to each problem
    temperature: float  # 0: greedy
    max_tokens: int  # largest number of tokens of a response
    seed: tuple[int, ...]  # a response's random numbers depend on it and on the response's key
    version: int  # the step whose weights the engine has
    top_p: float = 1.0  # nucleus sampling; 1: all tokens


@dataclass(eq=False)
class Trajectories:
    """This rank's trajectories of one rollout. A trajectory is a prompt with the response so far. It is in
    one of the dicts `open`, `waiting` and `finished`: key -> trajectory."""

    engine: Engine
    grader: Grader
    problems: Mapping[int, Problem]  # prompt_id -> problem, for the prompts of all ranks
    sampling: Sampling
    progress: Callable  # called when a turn ends
    round_len: int  # largest number of new tokens of a trajectory in one round; 0: no limit
    carries: bool  # whether unfinished trajectories go on in the next step (--carry, in training)
    rounds: int = 0  # number of finished rounds
    # Unfinished. Sample.text has only the finished turns, not the turn that the engine is sampling.
    open: dict[Key, Sample] = field(default_factory=dict)
    # The environment (--env) has not replied to the last turn yet.
    waiting: dict[Key, Sample] = field(default_factory=dict)
    finished: dict[Key, Sample] = field(default_factory=dict)  # graded if Sample.grader is not ""
    # What `grader` has returned, for two kinds of keys:
    # (prompt_id, sample_id) -> the environment's Reply
    # (prompt_id, sample_id, i) -> the Grade of the i-th term in the list that `graders_of` returns
    results: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cfg = self.engine.cfg
        self.terms = terms_of(self.cfg)
        # name of a data set -> its extractor; "": for all other data sets
        self.extractors = extractors(self.cfg)

    def begin(self, keys: Iterable[Key]) -> None:
        """Add new trajectories with empty responses."""
        for prompt_id, sample_id in keys:
            prompt = self.problems[prompt_id].ids
            self.open[prompt_id, sample_id] = Sample(
                prompt_id,
                sample_id,
                prompt,
                EMPTY,  # no token yet
                np.float32(EMPTY),
                stopped=False,
                text="",
                version=self.sampling.version,
            )

    def add(self, trajectories: Iterable[Sample]) -> None:
        """Add trajectories of another rank or of an earlier step, graded or unfinished."""
        for s in trajectories:
            place = self.finished if s.grader else self.open
            place[s.key] = s

    def move(self, target: Mapping[Key, int]) -> None:
        """Move unfinished trajectories between ranks. All ranks must call this method together.

        target: key of a trajectory -> its new rank; the same dict on every rank. A trajectory whose key is
            not in `target` stays on its rank."""
        keys = [key for key in self.open if key in target]
        moved = [self.open.pop(key) for key in keys]
        self.add(dist.deal(moved, [target[key] for key in keys]))

    def sample_round(self) -> None:
        """Continue each unfinished trajectory up to the end of its turn, by at most `round_len` tokens. A
        signal may abort the round (see Engine.goes_on)."""
        before = dict(self.open)  # the trajectories as they are before this round
        sampling = self.sampling
        seed = sampling.seed
        requests = {}  # key -> tokens of prompt and response so far
        limits = {}  # key -> largest number of new tokens
        for key, s in before.items():
            requests[key] = (*s.prompt, *s.ids.tolist())
            limits[key] = min(self._left(s), self.round_len or sampling.max_tokens)
        if self.rounds:  # later rounds need other random numbers than the first
            seed = (*seed, ROUND, self.rounds + 1)
        for new in self.engine.generate(  # new: a Sample with only the new tokens
            requests,
            limits,
            sampling.temperature,
            seed,
            sampling.version,
            sampling.top_p,
        ):
            if self._take(before[new.key], new):
                self.progress()
        if self.waiting:  # wait until all environments have replied
            self.results |= self.grader.results()
            for key in sorted(self.waiting):
                self._continue(self.waiting.pop(key), self.results.pop(key))
        self.rounds += 1

    def _take(self, before, new):
        """Append `new`, the tokens of this round, to the trajectory `before`. Put the result into `open`,
        `waiting` or `finished`. Returns True if the turn ended."""
        s = self._join(before, new) if len(before.ids) else new
        del self.open[s.key]
        if not s.stopped and self._left(s) > 0:
            # Without the unfinished turn's text, because the next `_join` decodes the whole turn.
            self.open[s.key] = replace(s, text=before.text)
            return False
        if self.cfg.env and s.stopped:
            self.waiting[s.key] = s
            problem = self.problems[s.prompt_id]
            self.grader.ask(
                s.key,
                s.turn_texts[::2],  # the policy's turns, without the environment's texts
                seed=self._seed(s),
                problem=problem.text,
                row=problem.row_values,
            )
        else:
            self._complete(s)
        return True

    def _join(self, before, new):
        """Returns `before` with the tokens of `new`. The text of `before` ends with its last finished turn,
        so the text of the unfinished turn is made again."""
        turn = before.ids[before.turn_start :]  # tokens of the unfinished turn
        text = new.text
        if len(turn):
            # The engine does not see a stop string that began in an earlier round. So cut after it here.
            # count: number of tokens to keep; 0: all
            count = first_stop(turn, new.ids, self.cfg.stop, self.engine.tokenizer)
            if count:
                new = replace(
                    new,
                    ids=new.ids[:count],
                    logp=new.logp[:count],
                    stopped=True,
                )
            # Decode the whole turn: a character's bytes may be divided between `before` and `new`.
            text = self.engine.text_of(np.concatenate([turn, new.ids]))
        return replace(extended(before, new), text=before.text + text)

    def _seed(self, s):
        """Returns the seed of a response's environment. With --carry, the seed stays the same when the
        response continues in a later step."""
        seed = self.sampling.seed
        if self.carries:
            # (cfg.seed, TRAIN), without the step. A prompt_id is unique in the whole run.
            seed = seed[:2]
        return random.Random(f"{seed} {s.key}").getrandbits(48)

    def _complete(self, s):
        """Put `s` into `finished`, and submit it to the graders of its data set."""
        if self.cfg.env:
            self.grader.release(self._seed(s))  # the environment's state is not needed any more
        problem = self.problems[s.prompt_id]
        self.finished[s.key] = s
        extractor = self.extractors.get(problem.dataset.casefold(), self.extractors[""])
        # The argument `sample` of a reward function
        facts = {"tokens": len(s.ids), "turns": s.turns, "stopped": s.stopped}
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
                row=problem.row_values,
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
        ids = self.engine.tokenizer(reply.text, add_special_tokens=False).input_ids
        # A text that fits into no response, or a token without an embedding, is an error of the environment.
        most = self.sampling.max_tokens
        vocabulary = self.engine.config.vocab_size
        if len(ids) >= most or max(ids, default=0) >= vocabulary:
            self.grader.errors["Flood", self.cfg.env] = (
                f"Flood: the environment's text has {len(ids)} tokens, the largest is {max(ids)}; needed: "
                f"fewer tokens than a response may have ({most}), all of them below {vocabulary}"
            )
            return self._complete(replace(s, reason="error"))
        # No room for another turn: drop the text, and end the trajectory as truncated.
        if len(ids) >= self._left(s):
            return self._complete(replace(s, stopped=False))
        self.open[s.key] = answered(s, reply.text, ids)

    def _left(self, s):
        """Returns how many tokens may still be appended to `s`. A response may have max_tokens tokens. Prompt
        plus response may have cfg.model_len tokens, or cfg.engine_len in an evaluation with longer responses
        (--eval_response_len)."""
        most = self.sampling.max_tokens
        length = self.cfg.model_len
        if most > self.cfg.max_response_len:
            length = self.cfg.engine_len
        return min(most, length - len(s.prompt)) - len(s.ids)

    def grades(self) -> list[Sample]:
        """Wait for the graders. Returns this rank's graded trajectories, ordered by (prompt_id,
        sample_id)."""
        self.results |= self.grader.results()
        for key, s in self.finished.items():
            if s.grader:  # graded in an earlier step (--carry)
                continue
            terms = graders_of(self.problems[s.prompt_id].dataset, self.terms)
            grades = {t: self.results[*key, i] for i, t in enumerate(terms)}
            first = terms[0]  # the grader that decides whether the response is right
            reward, reason, answer = grades[first]
            if s.reason:  # the environment failed
                reward = 0.0
                reason = s.reason
            elif s.env_reward is not None:
                reward = s.env_reward
                reason = reason_of(reward)
            self.finished[key] = replace(
                s,
                reward=reward,
                reason=reason,
                answer=answer,
                grader=first.name,
                weight=first.weight,
                parts={t.name: t.weight * grades[t].reward for t in terms[1:]},
                failed=tuple(t.name for t in terms if grades[t].reason == "error"),
            )
        return [self.finished[key] for key in sorted(self.finished)]


# --- rollouts


def rollout(
    engine: Engine,
    grader: Grader,
    problems: Mapping[int, Problem],
    sampling: Sampling,
    progress: Callable = lambda: None,
    carried: Sequence[Sample] | None = None,
) -> tuple[list[Sample], list[Sample]]:
    """Sample and grade responses to each problem. All ranks must call this function together. Returns
    1. this rank's graded samples, ordered by (prompt_id, sample_id). All samples of a prompt are on one rank.
    2. with --carry: the rest of this rank's trajectories, for the next step. Otherwise an empty list.

    Both lists are empty if a signal has aborted the rollout.

    problems: prompt_id -> problem, the same on every rank. With --carry, prompt_id is the
        prompt's number in the run (data.numbers_at).
    progress: called when a turn ends.
    carried: in training, result 2 of the previous step's call, or () without --carry. None in evaluation."""
    if dist.stop_requested():
        return [], []
    cfg = engine.cfg
    training = carried is not None
    trajectories = Trajectories(
        engine,
        grader,
        problems,
        sampling,
        progress,
        round_len=cfg.round_len if training else 0,
        carries=training and cfg.carry > 0,
    )
    trajectories.add(carried or ())
    begin_and_move(trajectories)
    chosen = sample_until_enough(trajectories)
    if dist.stop_requested():  # some ranks have aborted; their `chosen` is None
        return [], []
    samples = []
    left = list(trajectories.open.values())  # with --carry, for later steps; without it, empty
    for s in trajectories.grades():  # finished samples that are not in `chosen` go to `left`, too
        place = samples if s.key in chosen else left
        place.append(s)
    if not sampling.temperature:  # greedy: copy the only sample of each prompt
        copies = itertools.product(samples, range(sampling.n))
        samples = [replace(s, sample_id=j) for s, j in copies]
    return meet(samples, engine), left


def begin_and_move(trajectories: Trajectories) -> None:
    """Deal new trajectories to the ranks. A prompt's samples are spread over the ranks, so that no engine has
    all samples of a prompt with long responses. With --carry, also move the carried trajectories. All ranks
    must call this function together."""
    engine = trajectories.engine
    sampling = trajectories.sampling
    begun = trajectories.problems  # prompt_ids that get new samples
    old = []  # keys of the carried unfinished trajectories of all ranks
    if trajectories.carries:
        # `problems` also has the prompts of carried samples. These prompts get no new samples.
        begun = [i for i in begun if step_of(i, engine.cfg) == sampling.version]
        old = dist.gather_all(trajectories.open)
    # At temperature 0, all samples of a prompt are equal, so one is enough.
    samples = range(sampling.n if sampling.temperature else 1)
    new = list(itertools.product(begun, samples))
    home = {}  # key -> rank
    for position, key in enumerate(sorted(new + old)):
        home[key] = position % engine.ranks
    trajectories.begin(k for k in new if home[k] == engine.rank)
    # `home` does not depend on where trajectories are now, so a resumed run moves them to the same ranks.
    if trajectories.carries:
        trajectories.move(home)


def sample_until_enough(trajectories: Trajectories) -> set[Key] | None:
    """Run rounds of sampling until enough trajectories are complete. Returns the keys of these trajectories.
    With --round_len, all ranks decide together, and the keys are of all ranks. Without it, each engine
    decides alone, and the keys are of its own ranks. Returns None if a signal has aborted sampling."""
    in_lockstep = trajectories.round_len > 0
    gather = dist.gather if in_lockstep else trajectories.engine.gather
    while True:
        trajectories.sample_round()
        stops = not trajectories.engine.goes_on()
        # With --round_len, the ranks exchange data after each round, so all ranks must stop together.
        # goes_on() may differ between ranks. stop_requested() is the same on all of them.
        if in_lockstep:
            stops = dist.stop_requested()
        if stops:
            return None
        # Each list has one list of keys for each rank.
        open_keys = gather(sorted(trajectories.open))
        finished = gather(list(trajectories.finished))
        unfinished = {prompt_id for prompt_id, _ in itertools.chain(*open_keys)}
        chosen = choose(trajectories, sorted(itertools.chain(*finished)), unfinished)
        if chosen is not None:
            return chosen
        # Deal the unfinished trajectories anew, so that all ranks have about as many for the next round.
        if in_lockstep:
            trajectories.move(moves(open_keys))


def choose(
    trajectories: Trajectories, finished: list[Key], unfinished: set[int]
) -> set[Key] | None:
    """Returns the keys of the trajectories that this step trains on; None if too few are complete.

    Without --carry, all must be complete. With --carry, cfg.samples_per_step are enough, but all that began
    --max_staleness or more steps ago must be complete.

    finished: keys of the complete trajectories. unfinished: ids of the prompts with incomplete ones"""
    cfg = trajectories.cfg
    if not trajectories.carries:
        return None if unfinished else set(finished)
    step = trajectories.sampling.version
    if any(step - step_of(i, cfg) >= cfg.max_staleness for i in unfinished):
        return None
    # If the samples of a prompt are compared, or share an update (--aggregation prompt), none of them is
    # ready before all are complete. A key k is (prompt_id, sample_id).
    whole = cfg.compares_samples or cfg.whole_prompts
    ready = [k for k in finished if not (whole and k[0] in unfinished)]
    if len(ready) < cfg.samples_per_step:
        return None
    # The oldest prompts come first: `finished` is sorted, and a later prompt has a larger prompt_id.
    return set(ready[: cfg.samples_per_step])


def meet(samples: Sequence[Sample], engine: Engine) -> list[Sample]:
    """Move samples so that all samples of a prompt are on one rank. All ranks must call this function.
    Returns this rank's samples, ordered by (prompt_id, sample_id)."""
    arrived = dist.deal(samples, [s.prompt_id % engine.ranks for s in samples])
    return sorted(arrived, key=lambda s: s.key)


def moves(held: Sequence[Sequence[Key]]) -> dict[Key, int]:
    """Returns a dict: key of a trajectory -> its new rank. These are the fewest moves after which the ranks'
    numbers of unfinished trajectories differ by at most 1.

    held[r]: keys of the unfinished trajectories on rank r"""
    keys = [list(of_rank) for of_rank in held]  # `held` after the moves so far
    target = {}
    while True:
        fullest = max(keys, key=len)
        emptiest = min(keys, key=len)
        if len(fullest) - len(emptiest) < 2:
            return target
        key = fullest.pop()
        emptiest.append(key)
        target[key] = keys.index(emptiest)


# --- metrics of problems

Scores = dict[str, dict[str, list[float]]]  # evaluation set -> metric -> value of each problem


def accuracy(group: Sequence[Sample], n: int) -> dict[str, float]:
    """Returns a dict: metric -> value of one problem, from its `n` samples.

    avg@n         mean reward
    pass@k        see `pass_at`; k = 2, 4, 8, … up to n, and n
    maj@n         see `majority`; for n above 2
    response_len  mean number of tokens
    truncated     fraction cut at the length limit"""
    right = sum(s.right for s in group)
    metrics = {f"avg@{n}": sum(s.reward for s in group) / n}
    powers = (2**i for i in range(1, n.bit_length()))
    for k in sorted({n, *powers} - {1}):  # pass@1 is left out
        metrics[f"pass@{k}"] = pass_at(k, n, right)
    if n > 2:
        metrics[f"maj@{n}"] = majority(group)
    metrics["response_len"] = sum(len(s.ids) for s in group) / n
    metrics["truncated"] = sum(not s.stopped for s in group) / n
    return metrics


def pass_at(k: int, n: int, right: int) -> float:
    """Returns pass@k (arXiv 2107.03374, eq. 1): the probability that k of the n samples, drawn without
    replacement, include a right one. right: number of right samples among the n."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(group: Sequence[Sample]) -> float:
    """Returns 1 if a prompt's most frequent answer is right, else 0 (also if no answer was found). With a
    tie, returns 1 / (number of tied answers) if one of them is right. All responses that were graded right
    count as one answer. Wrong answers are equal if their texts are; wrong responses without an answer do not
    count."""
    right = {s.answer for s in group if s.right}
    # A right response has the answer None if its --reward or --env reads none. A wrong response without an
    # answer must not count as right.
    right.discard(None)
    votes = Counter()  # answer -> number of responses; True stands for all right answers
    for s in group:
        if s.right or s.answer in right:
            votes[True] += 1
        elif s.answer is not None:
            votes[s.answer] += 1
    most = max(votes.values(), default=0)
    top = [answer for answer, count in votes.items() if count == most]
    return 1 / len(top) if True in top else 0.0


def mean(values: Sequence[float]) -> float:
    """Returns the mean of the values, or 0 for an empty list."""
    return math.fsum(values) / max(len(values), 1)


# --- evaluation

# Fields of Sample that the rows of samples/ and eval/ have under the same names
SAVED = "prompt_id sample_id answer reward reason stopped score turns".split()


def sample_row(
    s: Sample,
    problem: Problem,
    save_logps: bool,
) -> dict[str, Any]:
    """Returns the sample as one row of a file in samples/ or eval/, which reward.py can grade again.
    `save_logps` adds token ids and the engine's log-probs (nats)."""
    row = {name: getattr(s, name) for name in SAVED}
    row |= dict(
        terms=s.entered,
        problem=problem.text,
        gold=problem.answer,
        kind=problem.kind,
        dataset=problem.dataset,
        response=s.text,
        tokens=len(s.ids),
    )
    if problem.fields:
        row["row"] = problem.row_values
    if s.turns > 1:
        row["segments"] = s.turn_texts
    if save_logps:
        row["ids"] = s.ids.tolist()
        row["logps"] = np.where(s.is_sampled, s.logp.astype(float).round(4), None).tolist()
    return row


def load_sets(
    cfg: Config,
    tokenizer: Any,
    say: Say,
    keep_fields: bool = False,
) -> Sets:
    """Returns a dict: name of an evaluation set -> its problems. Each file of --eval_data is one set. Raises
    UserError as set_names and load_problems do."""
    sets = {}
    for name, path in zip(set_names(cfg.eval_data), cfg.eval_data, strict=True):
        sets[name] = load_problems(
            [path],
            tokenizer,
            cfg,
            say,
            longest=cfg.engine_len,
            keep_fields=keep_fields,
        )
    return sets


def set_names(paths: Sequence[str]) -> list[str]:
    """Returns a short name for each evaluation file. If two files have the same name, all names also have
    the last folders of the files. Raises UserError if this does not help.

    eval_sets/aime2024.json                          aime2024
    gsm8k/test.jsonl math/test.jsonl                 gsm8k-test math-test
    openai/gsm8k:main/test-00000-of-00001.parquet    gsm8k-test"""
    parts = []  # for each path, its folders and the file's name without its end
    for path in paths:
        repo, _, file = path.rpartition(":")  # repo: OWNER/NAME of the Hub, or ""
        stem = Path(file).stem.removesuffix("-00000-of-00001")
        if repo:
            stem = f"{Path(repo).name}-{stem}"
        folder = Path(repo).parent / Path(file).parent
        inside = folder.relative_to(folder.anchor)  # without the root "/"
        parts.append([*inside.parts, stem])
    # Use the last n parts of each path, with the smallest n that gives different names.
    for n in range(1, 1 + max(map(len, parts), default=1)):
        names = ["-".join(part[-n:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(
        f"two files of --eval_data have the same name: {' '.join(paths)}; "
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
    scores = {}
    rows = []
    # Each set has its own value of these two flags. If there are fewer values than sets, they repeat.
    many = itertools.cycle(cfg.eval_samples)  # numbers of samples of a problem
    temperatures = itertools.cycle(cfg.eval_temperature)
    for (name, problems), n, temperature in zip(sets.items(), many, temperatures, strict=False):
        # The name, not the position: an added evaluation set changes no response of the others.
        seed = cfg.seed, EVAL, zlib.crc32(name.encode())
        longest = cfg.eval_response_len or cfg.max_response_len
        sampling = Sampling(
            n,
            temperature,
            longest,
            seed,
            version=step,
            top_p=cfg.eval_top_p,
        )
        numbered = dict(enumerate(problems))
        samples, _ = rollout(engine, grader, numbered, sampling, progress)
        dist.together(grader.check)  # raises UserError if a user's function can't be used
        scores[name] = gather_scores(samples, n)
        mine = [sample_row(s, problems[s.prompt_id], cfg.save_logps) for s in samples]
        rows += dist.gather_rows([{"set": name} | row for row in mine])
    return scores, rows


def gather_scores(samples: Sequence[Sample], n: int) -> dict[str, list[float]]:
    """Returns a dict: metric -> list with one value for each problem (see `accuracy`). The lists have the
    problems of all ranks, ordered by prompt_id."""
    mine = [(group[0].prompt_id, accuracy(group, n)) for group in group_by_prompt(samples)]
    scores = defaultdict(list)
    # `sorted` orders the pairs (prompt_id, metrics of one problem).
    for _, metrics in sorted(dist.gather_all(mine)):  # no two have the same prompt_id
        for metric, value in metrics.items():
            scores[metric].append(value)
    return dict(scores)


# --- the engine and the graders of a run

ENGINES = {"torch": TorchEngine, "vllm": VLLMEngine}


def make_engine(
    path: str,
    tokenizer: Any,
    cfg: Config,
    device: torch.device,
    dtype: torch.dtype,
) -> Engine:
    """Returns a new engine for the model folder `path`. Raises UserError if it can't run this model."""
    check_engine_flags(path, cfg, device)
    engine_class = ENGINES[cfg.engine_kind(device.type == "cuda")]
    return engine_class(path, tokenizer, cfg, device, dtype)


def check_engine_flags(path: str, cfg: Config, device: torch.device) -> None:
    """Raises UserError for --tp without vLLM, for Qwen3.5 without vLLM or in fp32 on a CPU, or if the model
    in `path` does not support cfg.engine_len tokens (prompt plus response)."""
    kind = cfg.engine_kind(device.type == "cuda")
    require(
        kind == "vllm" or cfg.tp == 1,
        f"--tp {cfg.tp} with --engine torch",
        "--engine vllm, or --tp 1",
    )
    config = load_config(path)
    cpu_fp32 = device.type == "cpu" and cfg.dtype != "bfloat16"
    require(
        config.model_type != "qwen3_5_text" or (kind == "vllm" and not cpu_fp32),
        f"--engine {kind} can't decode {path}, a model with recurrent states",
        "--engine vllm, on a CPU with --dtype bfloat16, which vllm's kernels take",
    )
    positions = max_positions(config)
    require(
        cfg.engine_len <= positions,
        f"{path} has {positions:,} positions, and a prompt with its response may "
        f"take {cfg.engine_len:,}",
        "smaller --max_response_len and --eval_response_len, or another --model",
    )


def max_positions(config: Any) -> float:
    """Returns the longest sequence that the model supports, in tokens, or infinity if the config does not
    name a limit."""
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    rope, *others = ropes(config)  # parameters of each rotary embedding (RoPE)
    original = rope.get("original_max_position_embeddings") or limit  # before scaling
    # With several RoPEs, max_position_embeddings is already the length after scaling.
    if not others and rope.get("rope_type") in ("linear", "yarn"):
        return max(limit, original * rope.get("factor", 1))
    return limit


def make_grader(cfg: Config, say: Say = print) -> Grader:
    """Returns a new Grader. Raises UserError if a reward or an extractor does not exist."""
    return Grader(
        cfg.grade_workers,
        cfg.grade_deadline,
        [t.custom for t in check_functions(cfg) if t.custom],
        cfg.env,
        say,
        stop=dist.stop_signal,  # a signal puts an entry into this list, and ends the wait for grades
        progress=dist.progress,
    )
