"""The samples of a training step, and the evaluation. In the order of a step:

evaluate          scores the policy on the evaluation sets
sample_step       samples and grades the responses of the step
draw_and_carry    with --carry: continues the responses that the previous step began
resample          with --resample_rounds: replaces prompts that teach nothing
save_samples      writes responses to the run's folder

rollout.py has the rollout itself."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

import dist
from data import (
    Problem,
    Sample,
    batch_at,
    group_by_prompt,
    numbers_at,
    replacement_batch,
    step_of,
)
from guard.checks import first_look
from guard.start import Run
from log import Meter, measure_samples
from rollout import (
    TRAIN,
    mean,
    part_names,
    rollout,
    sample_row,
    score_sets,
    shape_rewards,
)

SAVED_PROMPTS = 8  # with --save_samples some


@dist.phase("eval")
def evaluate(run: Run, step: int) -> dict[str, float]:
    """Evaluate the policy on all evaluation sets, and write its responses to eval/. Returns a dict:
    metric -> value. The dict is empty if no evaluation is due."""
    cfg = run.cfg
    if not run.held_out or (step % cfg.eval_every and step < cfg.steps):
        return {}
    with run.log.bar("Eval", 0) as bar:
        scores, rows = score_sets(run.engine, run.grader, run.held_out, cfg, step, bar.update)
    run.log.save_samples("eval", step, rows)
    metrics = {}
    for name, of_set in scores.items():
        metrics |= {f"eval/{name}/{metric}": mean(values) for metric, values in of_set.items()}
    return metrics


def sample_step(
    run: Run,
    step: int,
    meter: Meter,
) -> tuple[list[Problem], list[Sample], list[Sample]]:
    """Sample and grade the responses of a step. Returns
    1. the batch: the problems of the step, the same list on all ranks;
    2. this rank's graded samples, ordered by (prompt_id, sample_id). prompt_id is an index into the batch;
    3. with --carry, this rank's trajectories (prompts with the response so far) for the next step."""
    cfg = run.cfg
    if cfg.carry:
        batch, samples, carried = draw_and_carry(run, step, meter)
    else:
        batch = batch_at(run.problems, step, cfg, run.solved)
        samples, carried = draw(run, dict(enumerate(batch)), (step,))
    measure_samples(meter, samples, part_names(cfg), cfg.env != "", cfg.samples_per_prompt)
    if cfg.skip_solved:
        meter.add("solved", len(run.solved), len(run.problems))
    if dist.stop_requested():  # the samples are not complete
        return batch, samples, carried
    if step == 0:
        save_samples(run, step, batch, samples)  # now, because first_look may end the run
        errors = run.grader.errors.values()
        first_look(cfg, run.tokenizer, batch, samples, run.log.say, errors)
    if cfg.resample_rounds:
        batch, samples = resample(run, step, batch, samples)
    return batch, samples, carried


def draw_and_carry(
    run: Run,
    step: int,
    meter: Meter,
) -> tuple[list[Problem], list[Sample], list[Sample]]:
    """Do the sampling of `sample_step` with --carry: continue the previous step's trajectories and begin new
    ones, in all more than this step trains on. Returns the same three values as `sample_step`. The batch has
    only the prompts that this step trains on."""
    cfg = run.cfg
    begun = dist.gather_all(s.prompt_id for s in run.carried)
    problems = {}  # number of a prompt in the run -> its problem
    for begin in sorted({step, *(step_of(i, cfg) for i in begun)}):
        batch = batch_at(run.problems, begin, cfg, run.solved)
        problems |= zip(numbers_at(begin, cfg), batch, strict=True)
    samples, left = draw(run, problems, (step,), run.carried)
    meter.add("carried", sum(not s.reason for s in left))
    ages = [step - s.token_versions[s.is_sampled] for s in samples]
    ages = np.concatenate([np.zeros(0), *ages])
    meter.add_mean_and_max("staleness", torch.from_numpy(ages))
    drawn = {s.prompt_id for s in samples}
    numbers = sorted(set(dist.gather_all(drawn)))
    samples = [replace(s, prompt_id=numbers.index(s.prompt_id)) for s in samples]
    return [problems[number] for number in numbers], samples, left


@dist.phase("rollout")
def draw(
    run: Run,
    problems: Mapping[int, Problem],
    key: tuple[int, ...],
    carried: Sequence[Sample] = (),
) -> tuple[list[Sample], list[Sample]]:
    """Call `rollout` with the settings of training. Add the extra rewards (rollout.REWARD_PARTS) to the
    samples, and the solved problems to run.solved. Returns this rank's graded samples, and with --carry the
    trajectories that the next step continues.

    key: part of the random seed: (step,), or (step, round) in a round of `resample`"""
    cfg = run.cfg
    step = key[0]
    n = cfg.samples_per_prompt
    with run.log.bar("Rollout", cfg.samples_per_step // run.engine.ranks) as bar:
        samples, left = rollout(
            run.engine,
            run.grader,
            problems,
            n,
            cfg.temperature,
            cfg.max_response_len,
            (cfg.seed, TRAIN, *key),
            step,
            bar.update,
            carried,
        )
    dist.together(run.grader.check)
    if cfg.skip_solved:
        solved = []
        for group in group_by_prompt(samples):
            right = sum(s.right for s in group)
            if right / n >= cfg.skip_solved:
                solved.append(problems[group[0].prompt_id].index)
        for i in dist.gather_all(solved):
            run.solved.setdefault(i, step + 1)
    return shape_rewards(samples, cfg), left


def resample(
    run: Run,
    step: int,
    batch: list[Problem],
    samples: list[Sample],
) -> tuple[list[Problem], list[Sample]]:
    """Replace uniform prompts, in at most --resample_rounds rounds (DAPO's dynamic sampling, arXiv
    2503.14476, eq. 11). A prompt is uniform if all its samples have the same reward. Returns the new batch
    and this rank's samples."""
    cfg = run.cfg
    uniform = uniform_prompts(samples)
    for round in range(1, cfg.resample_rounds + 1):
        if not uniform:
            break
        others = replacement_batch(run.problems, step, round, cfg, run.solved)
        batch = [others[i] if i in uniform else problem for i, problem in enumerate(batch)]
        problems = {i: batch[i] for i in uniform}
        drawn, _ = draw(run, problems, (step, round))
        if dist.stop_requested():  # `draw` was aborted on some rank
            return batch, samples
        kept = [s for s in samples if s.prompt_id not in uniform]
        samples = sorted(kept + drawn, key=lambda s: s.key)
        uniform = uniform_prompts(samples)
    if uniform:
        run.log.alarm(
            f"step {step}: {len(uniform)} of {len(batch)} prompts are still uniform after "
            f"{cfg.resample_rounds} rounds (--resample_rounds): these prompts are too "
            "easy or too hard for the policy"
        )
    return batch, samples


def uniform_prompts(samples: list[Sample]) -> set[int]:
    """Returns the ids of prompts whose samples all have the same reward, gathered from all ranks. All samples
    of a prompt must be on the same rank."""
    uniform = []
    for group in group_by_prompt(samples):
        rewards = {s.reward for s in group}
        if len(rewards) == 1:
            uniform.append(group[0].prompt_id)
    return set(dist.gather_all(uniform))


def save_samples(
    run: Run,
    step: int,
    batch: list[Problem],
    samples: list[Sample],
) -> None:
    """Write samples to samples/step_NNNNNN.jsonl. `--save_samples some` writes the first SAVED_PROMPTS
    prompts of a step, every --eval_every steps (every 10 steps if --eval_every is 0)."""
    cfg = run.cfg
    every = cfg.save_samples == "all"
    if not every and step % (cfg.eval_every or 10):
        return
    rows = []
    for s in samples:
        if every or s.prompt_id < SAVED_PROMPTS:
            row = sample_row(s, batch[s.prompt_id], cfg.save_logps)
            if cfg.compares_samples:
                row["advantage"] = s.advantage
            rows.append(row)
    run.log.save_samples("samples", step, dist.gather_rows(rows))
