"""The training loop: reinforcement learning from verifiable rewards, with PPO or with GRPO.

    python -m tools.tiny && python train.py tiny-ppo --ranks 2 --steps 30
    torchrun --nnodes 4 --nproc-per-node 8 … train.py orz-7b --layout production --model PATH --data FILE
    python train.py PRESET --help

The function `train` is the algorithm. Three differences from Open-Reasoner-Zero:

1. A loss is averaged over the whole update (all packs of all ranks), not over each pack.
2. No sample is dropped or repeated to fill a batch.
3. With one policy update per step, no extra forward pass computes old log-probs, unless the reward has a KL
   term."""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from configs import NODE, Config, check_paths, parse, set_allocator
from guard.lock import FolderLock
from guard.messages import UserError, require, user_errors
from reward import check_functions, terms_of
from tools.plan import check_ranks

# Before the slow `import torch`, so that --help and wrong flags get a quick answer.
if __name__ == "__main__":
    with user_errors("train.py"):
        CONFIG = parse()
        check_paths(CONFIG)
        check_functions(CONFIG)
        main_rank = os.environ.get("RANK", "0") == "0"
        starts = 0  # number of ranks that this process starts; 0 under torchrun, which starts them
        if "RANK" not in os.environ:
            # NODE is 8. If --ranks is larger, `check_ranks` fails and asks for torchrun.
            starts = CONFIG.ranks if 1 < CONFIG.ranks <= NODE else 1
            check_ranks(CONFIG, starts)
        # Now, because a second run must take no memory of the GPUs that the first one uses.
        if main_rank:
            FolderLock(CONFIG.folder / "lock").refuse_living()
    set_allocator()
    # No traceback if ctrl-C comes during the start. An import may ignore the exception of sys.exit.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # PR_SET_PDEATHSIG: if torchrun is killed, a rank gets a ctrl-C, instead of training on alone
        ctypes.CDLL(None).prctl(1, signal.SIGINT)
    if starts > 1:
        import dist  # not at the top: dist imports torch, which is slow

        sys.exit(dist.launch(starts, CONFIG.grace))  # exit status, or an error message
    if main_rank:
        with contextlib.suppress(OSError):  # the disk of a log file is full
            print("loading torch and transformers …", flush=True)

BEGIN = time.perf_counter()  # seconds
import numpy as np
import torch
from torch import Tensor, nn

import dist
import grpo
import ppo
from data import (
    Pack,
    Problem,
    Sample,
    assign,
    batch_at,
    group_by_prompt,
    numbers_at,
    pack,
    replacement_batch,
    step_of,
)
from guard.alarms import new_alarms
from guard.checks import first_look
from guard.start import Role, Run, finish, prepare, stop
from guard.watch import handle_signals, report_crash
from log import Logger, Meter, measure_samples, tell
from rollout import (
    TRAIN,
    Sampling,
    mean,
    rollout,
    sample_row,
    score_sets,
    shape_rewards,
)
from tools import plan, report

dist.SECONDS["start/imports"] = time.perf_counter() - BEGIN
SAVED_PROMPTS = 8  # number of a step's prompts that `--save_samples some` saves
Minibatches = list[list[Pack]]  # one list of this rank's packs for each minibatch


def main(cfg: Config) -> bool:
    """Train with the config `cfg`. Returns True after the last step, and False if a signal stopped the run.
    Raises UserError, with the same text on all ranks."""
    run = prepare(cfg)
    try:
        with run.log, run.grader, handle_signals(cfg.grace), dist.watched("training"):
            done = train(run)
            if done:
                finish(run)
            else:
                run.log.say(
                    f"stopped: saved up to step {run.saver.saved} in {run.saver.out}; "
                    "the same command continues the run"
                )
        if run.world.main:
            write_report(Path(cfg.out), done)
        return done
    except UserError:  # on all ranks
        run.saver.pool.shutdown()  # another run in this folder would delete a save in progress
        raise
    finally:
        run.lock.release()
        gc.unfreeze()  # undo the gc.freeze of `load`, so that a notebook can free the run's memory
        dist.SECONDS.clear()  # the next run of this process has its own


def write_report(folder: Path, done: bool) -> None:
    """Write the report of a run. If the run is `done`, also print the summary."""
    try:
        report.write_report(folder)
        if done:
            tell(report.story(folder))
    except Exception as e:  # also matplotlib's: the run itself is complete
        tell(f"!! can't write the report to {folder} ({e})")


def train(run: Run) -> bool:
    """Run the remaining steps. Returns True after the last step. Returns False if a signal such as ctrl-C
    stopped the run; then a checkpoint of the finished steps is saved."""
    cfg = run.cfg
    policy = run.policy.model
    device = run.world.device
    # `profiled` yields these steps, and profiles the step --profile.
    for step in dist.profiled(range(run.start, cfg.steps + 1), cfg.profile, run.log):
        began = time.perf_counter()
        meter = Meter(device)
        with run.engine.awake(dist.full_weights(policy, device), version=step):
            metrics = evaluate(run, step)
            if step < cfg.steps:  # iteration cfg.steps only evaluates the final policy
                batch, samples, carried = sample_step(run, step, meter)
        with dist.phase("wait"):  # a collective: ranks wait here for the slowest engine
            stopping = dist.stop_requested()
        if stopping:
            stop(run, step)  # a resumed run samples this step again
            return False
        if step == cfg.steps:
            if metrics:  # empty without evaluation sets
                run.log.step(step, metrics)
                log_errors(run, step)
            break
        with dist.phase("pack"):
            if cfg.compares_samples:  # GRPO, except with --advantage return_whiten
                samples = add_group_advantages(samples, cfg)
            minibatches = make_packs(samples, step, cfg, run.world, policy, meter)
            save_samples(run, step, batch, samples)
        with dist.deterministic(cfg.deterministic):
            learn(run, step, minibatches, meter)
        if cfg.refreshes_ref:
            refresh_ref(run, step)
        # Only now: an earlier `stop` saves the old run.carried, because this step will be sampled again.
        run.carried = carried
        if end_of_step(run, step, metrics, meter, began):
            stop(run, step + 1)
            return False
    return True


def learn(
    run: Run,
    step: int,
    minibatches: Minibatches,
    meter: Meter,
) -> None:
    """Train on a step's samples: compute log-probs and advantages, then update critic and policy."""
    cfg = run.cfg
    world = run.world
    policy, critic, ref = run.policy, run.critic, run.ref
    if ref:
        with dist.phase("ref"), resident(ref, world):
            minibatches = add_logp(minibatches, "ref_logp", ref, cfg)
    if cfg.needs_old_logp:  # with several policy updates a step, or a KL term in the reward
        # None: the optimizer's state stays on the CPU (--offload)
        with dist.phase("old_logp"), dist.on_device(policy.model, None, world.device):
            minibatches = add_logp(minibatches, "old_logp", policy, cfg)
    if critic:
        with dist.phase("critic"), resident(critic, world):
            minibatches = estimate_advantages(critic, minibatches, cfg, meter)
            train_role(critic, critic_pack_loss, minibatches, step, cfg, meter, run.log)
    elif cfg.advantage == "return_whiten":  # REINFORCE++: returns without a critic
        minibatches = estimate_advantages(None, minibatches, cfg, meter)
    elif cfg.advantage == "group_mean_whiten":
        minibatches = whiten_advantages(minibatches)
    if step >= cfg.freeze_policy_steps:  # earlier steps train only the critic
        with dist.phase("policy"), resident(policy, world):
            train_role(policy, policy_pack_loss, minibatches, step, cfg, meter, run.log)


def resident(role: Role, world: dist.World):
    """Returns a context manager. Inside it, the role's model and optimizer state are on world.device."""
    return dist.on_device(role.model, role.optimizer, world.device)


@torch.no_grad()
def refresh_ref(run: Run, step: int) -> None:
    """Copy the policy's weights to the reference model if an epoch (one pass over the prompts) ends in this
    step."""
    per_step = run.cfg.prompts_per_step
    n = len(run.problems)  # prompts of an epoch
    # Finished epochs after this step, and before it
    if (step + 1) * per_step // n > step * per_step // n:
        for old, new in zip(run.ref.model.parameters(), run.policy.model.parameters(), strict=True):
            old.copy_(new)


# --- sampling


@dist.phase("eval")
def evaluate(run: Run, step: int) -> dict[str, float]:
    """Evaluate the policy on all evaluation sets, and write its responses to eval/. Returns a dict:
    metric -> value. The dict is empty if no evaluation is due, or if a signal came."""
    cfg = run.cfg
    # A shorter run ended before this step. Its last row has only the evaluation of this step. A new row
    # replaces it, so evaluate again.
    again = run.lengthened and step == run.start
    if not run.held_out or (step % cfg.eval_every and step < cfg.steps and not again):
        return {}
    with run.log.bar("Eval", total=0) as bar:  # 0: a counter without a total
        scores, rows = score_sets(run.engine, run.grader, run.held_out, cfg, step, bar.update)
    if dist.stop_requested():  # not all sets are complete; `train` will stop
        return {}
    run.log.save_samples("eval", step, rows)
    metrics = {}
    for name, of_set in scores.items():  # of_set: metric -> value of each problem
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
        samples, carried = draw(run, dict(enumerate(batch)), seed=(step,))
    measure_samples(meter, samples, cfg)
    if cfg.skip_solved:
        meter.add("solved", len(run.solved), len(run.problems))
    if dist.stop_requested():  # the samples are not complete; `train` will stop
        return batch, samples, carried
    if step == 0:
        # Now, because first_look may end the run. `train` writes this file again, with advantages.
        save_samples(run, step, batch, samples)
        errors = run.grader.errors.values()  # messages
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
    ones. Together these are more than this step trains on. Returns the same three values as `sample_step`.
    The batch has only the prompts that this step trains on."""
    cfg = run.cfg
    # The steps in which the carried trajectories began. Here, prompt_id is the prompt's number in the run.
    begun = dist.gather_all(step_of(s.prompt_id, cfg) for s in run.carried)
    problems = {}  # number of a prompt in the run -> its problem
    for begin in sorted({step, *begun}):
        batch = batch_at(run.problems, begin, cfg, run.solved)
        problems |= zip(numbers_at(begin, cfg), batch, strict=True)
    samples, left = draw(run, problems, seed=(step,), carried=run.carried)
    meter.add("carried", sum(not s.reason for s in left))  # no reason: unfinished, so not graded
    ages = [step - s.token_versions[s.is_sampled] for s in samples]  # in steps, of each token
    ages = np.concatenate([np.zeros(0), *ages])  # zeros(0): there may be no sample
    meter.add_mean_and_max("staleness", torch.from_numpy(ages))
    # From here on, prompt_id is an index into the batch.
    numbers = sorted(set(dist.gather_all(s.prompt_id for s in samples)))
    samples = [replace(s, prompt_id=numbers.index(s.prompt_id)) for s in samples]
    return [problems[number] for number in numbers], samples, left


@dist.phase("rollout")
def draw(
    run: Run,
    problems: Mapping[int, Problem],
    seed: tuple[int, ...],
    carried: Sequence[Sample] = (),
) -> tuple[list[Sample], list[Sample]]:
    """Call `rollout` with the settings of training. Add the extra rewards (reward.REWARD_PARTS) to the
    samples, and the solved problems to run.solved. Returns this rank's graded samples, and with --carry the
    trajectories that the next step continues.

    problems: prompt_id -> problem, the same on all ranks
    seed: part of the random seed: (step,), or (step, round) in a round of `resample`
    carried: with --carry, this rank's trajectories from earlier steps"""
    cfg = run.cfg
    step = seed[0]
    n = cfg.samples_per_prompt
    sampling = Sampling(
        n,
        cfg.temperature,
        cfg.max_response_len,
        seed=(cfg.seed, TRAIN, *seed),
        version=step,
    )
    # The bar's total is about one rank's share of the samples.
    with run.log.bar("Rollout", cfg.samples_per_step // run.engine.ranks) as bar:
        samples, left = rollout(run.engine, run.grader, problems, sampling, bar.update, carried)
    dist.together(run.grader.check)  # raises UserError if a user's function can't be used
    if cfg.skip_solved:  # the share of right samples from which a problem is solved
        solved = []
        for group in group_by_prompt(samples):
            right = sum(s.right for s in group)
            if right / n >= cfg.skip_solved:
                solved.append(problems[group[0].prompt_id].index)
        for index in dist.gather_all(solved):
            # step + 1 is the first step that skips the problem. A run that is resumed before that step drops
            # the entry (guard.start.state_of), and solves the problem again.
            run.solved.setdefault(index, step + 1)
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
    round = 0
    while uniform := uniform_prompts(samples):
        if round == cfg.resample_rounds:
            run.log.alarm(
                f"step {step}: {len(uniform)} of {len(batch)} prompts are still uniform after "
                f"{round} rounds (--resample_rounds): these prompts are too "
                "easy or too hard for the policy"
            )
            break
        round += 1
        others = replacement_batch(run.problems, step, round, cfg, run.solved)
        problems = {i: others[i] for i in uniform}  # prompt_id -> the new problem
        batch = [problems.get(i, problem) for i, problem in enumerate(batch)]
        drawn, _ = draw(run, problems, seed=(step, round))
        if dist.stop_requested():  # `draw` was aborted on some rank
            return batch, samples
        kept = [s for s in samples if s.prompt_id not in uniform]
        samples = sorted(kept + drawn, key=lambda s: s.key)
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
    """Write samples to samples/step_NNNNNN.jsonl. `--save_samples some` writes those of the first
    SAVED_PROMPTS prompts, every --eval_every steps (every 10 steps if --eval_every is 0)."""
    cfg = run.cfg
    save_all = cfg.save_samples == "all"
    if not save_all and step % (cfg.eval_every or 10):
        return
    rows = []
    for s in samples:
        if save_all or s.prompt_id < SAVED_PROMPTS:
            row = sample_row(s, batch[s.prompt_id], cfg.save_logps)
            if cfg.compares_samples:
                row["advantage"] = s.advantage
            rows.append(row)
    run.log.save_samples("samples", step, dist.gather_rows(rows))


# --- packs and advantages


def add_group_advantages(samples: list[Sample], cfg: Config) -> list[Sample]:
    """Returns the samples with the advantages from grpo.group_advantages. `samples` must be ordered by
    (prompt_id, sample_id), with all samples of a prompt on the same rank. With --drop_uniform, a prompt whose
    samples all have the same score is not in the loss."""
    n = cfg.samples_per_prompt
    sizes = {len(group) for group in group_by_prompt(samples)}
    # <=: `sizes` is empty on a rank without samples.
    assert sizes <= {n}, f"not {n} samples of each prompt: {sizes}"
    scores = torch.tensor([s.score for s in samples], dtype=torch.float64)
    scores = scores.view(-1, n)  # (P, n): P prompts
    if cfg.advantage == "group_mean_over_mean":
        negative = "--advantage group_mean_over_mean with a negative score"
        # All ranks raise the error, if any rank has such a score.
        dist.together(require, bool((scores >= 0).all()), negative, "rewards from 0")
    if cfg.advantage == "group_each_std":
        advantages = decoupled_advantages(samples, cfg)
    else:
        advantages = grpo.group_advantages(scores, cfg.advantage)
    advantages = advantages.flatten()  # (P, n) -> one for each sample
    kept = torch.ones(len(samples), dtype=torch.bool)  # which samples enter the loss
    if cfg.drop_uniform:
        kept = grpo.not_uniform(scores).repeat_interleave(n)
    if cfg.advantage in ("group_mean_batch_std", "group_each_std"):
        of_kept = advantages[kept]
        sums = torch.stack([kept.sum(), (of_kept * of_kept).sum()])
        advantages /= grpo.batch_std(dist.all_sum(sums))  # standard deviation over all ranks
    changed = []
    for s, advantage, is_kept in zip(samples, advantages.tolist(), kept.tolist(), strict=True):
        changed.append(replace(s, advantage=advantage, in_loss=s.in_loss and is_kept))
    return changed


def decoupled_advantages(samples: list[Sample], cfg: Config) -> Tensor:
    """Returns the advantages (P, n) of P groups of n samples (GDPO, arXiv 2601.05242). Each term of --reward
    gets a group_mean_std advantage of its own. The result is their sum, weighted by the terms' weights. The
    caller divides it by `grpo.batch_std`."""
    total = 0
    for term in terms_of(cfg):
        # entered: name of a term -> its value times its weight, which is divided out here. A term that does
        # not grade the sample is not in it, and counts as 0.
        values = [s.entered.get(term.name, 0) / (term.weight or 1) for s in samples]
        rewards = torch.tensor(values, dtype=torch.float64)
        rewards = rewards.view(-1, cfg.samples_per_prompt)
        total += term.weight * grpo.group_advantages(rewards)
    return total


def make_packs(
    samples: list[Sample],
    step: int,
    cfg: Config,
    world: dist.World,
    model: nn.Module,
    meter: Meter,
) -> Minibatches:
    """Distribute the samples over the ranks, in packs. Returns this rank's packs, one list for each
    minibatch. Every rank gets about equal work and the same number of packs.

    model: the policy; only its config is read"""
    # All ranks number the samples of all ranks in the same order, and compute the same layout.
    rows = []
    for s in samples:
        of_loss = int(s.is_sampled.sum()) if s.in_loss else 0  # its loss tokens
        rows.append((*s.key, s.length, of_loss))
    every = sorted(dist.gather_all(rows))
    number = {row[:2]: i for i, row in enumerate(every)}  # (prompt_id, sample_id) -> its number
    prompts, _, lengths, loss_tokens = np.array(every).T
    shape = plan.shape_of(model.config.to_dict(), "the policy")
    params = shape.policy_params
    # A function: (tokens, sum of the samples' squared lengths) -> FLOP of a forward pass
    forward_flops = partial(plan.forward_flops, params, shape.attention_layers, shape.q)
    cost = forward_flops(lengths, lengths**2)  # of each sample
    layout = assign(lengths, cost, prompts, world.size, cfg, step)
    if cfg.aggregation == "prompt":
        samples = add_prompt_shares(samples, layout, prompts, loss_tokens)
    # With --carry, earlier weights sampled some tokens. `pack` finds them by the step.
    fresh_step = step if cfg.carry else None
    mine = dist.balance(samples, number, layout)  # number -> sample

    def packed(indices):
        return pack([mine[i] for i in indices], fresh_step).to(world.device)

    minibatches = each([ranks[world.rank] for ranks in layout], packed)
    packs = [p for p in chain(*minibatches) if p.longest > 1]  # no fillers, which have one token
    unique = sum(len(p.unique) for p in packs)  # tokens, with shared prompts counted once
    meter.add("tokens", sum(s.length for s in samples))
    meter.add("unique_share", unique, sum(len(p.tokens) for p in packs))
    # A backward pass costs as much as two forward passes, or as one if the weights are frozen (--lora). The
    # critic also runs one forward pass for `values`.
    forwards = (2 if cfg.lora else 3) * cfg.passes_per_step
    if cfg.algo == "ppo":
        trained_models = 1 if step < cfg.freeze_policy_steps else 2
        forwards = trained_models * forwards + 1
    squares = sum(s.length**2 for s in samples)
    meter.add("flops", forwards * forward_flops(unique, squares))
    return minibatches


def add_prompt_shares(
    samples: list[Sample],
    layout: dist.Layout,
    prompts: np.ndarray,
    trained: np.ndarray,
) -> list[Sample]:
    """Returns copies of the samples with `prompt_share` set to 1 / (tokens of the prompt in the minibatch's
    loss × number of prompts in this loss). --aggregation prompt multiplies each token's loss by prompt_share.

    layout[minibatch][rank][pack]: indices of the pack's samples among the samples of all ranks
    prompts: prompt_id of each sample of all ranks
    trained: number of tokens in the loss, for each sample of all ranks"""
    tokens = np.bincount(prompts, trained)  # of each prompt; a minibatch has whole prompts
    share = np.zeros(len(tokens))
    for ranks in layout:  # ranks: one minibatch, [rank][pack] -> indices
        chosen = np.unique(prompts[list(chain(*chain(*ranks)))])  # the prompts of the minibatch
        chosen = chosen[tokens[chosen] > 0]  # without prompts that are not in the loss
        share[chosen] = 1 / (tokens[chosen] * len(chosen))
    return [replace(s, prompt_share=float(share[s.prompt_id])) for s in samples]


def each(minibatches: list[list], f: Callable) -> Minibatches:
    """Returns the minibatches with f(p) in place of each pack p."""
    changed = []
    for packs in minibatches:
        changed.append([f(p) for p in packs])
    return changed


@torch.no_grad()
def add_logp(
    minibatches: Minibatches,
    field: str,
    role: Role,
    cfg: Config,
) -> Minibatches:
    """Returns the minibatches with the role's log-probs in `field`: "old_logp" or "ref_logp"."""

    def added(p):
        logp, _ = role.model(p, cfg.temperature)  # _: the entropy
        return replace(p, **{field: logp})

    return each(minibatches, added)


@torch.no_grad()
def estimate_advantages(
    critic: Role | None,
    minibatches: Minibatches,
    cfg: Config,
    meter: Meter,
) -> Minibatches:
    """Returns the minibatches with values, returns and whitened advantages. Without a critic, all values are
    0 (REINFORCE++, arXiv 2501.03262)."""

    def estimate(p):
        v = critic.model(p) if critic else torch.zeros_like(p.rewards)
        rewards = p.rewards
        if cfg.kl_in_reward:
            kl = ppo.kl(p.old_logp, p.ref_logp, cfg.kl_estimator)
            rewards = rewards - torch.where(p.mask, cfg.kl_coef * kl, 0)
        advantages, returns = ppo.gae(rewards, v, p.cu_seqlens, p.mask, cfg.gamma, cfg.lam)
        if critic:
            # value_error is only for the metric explained_variance.
            measured = {"values": v, "returns": returns, "value_error": returns - v}
            for name, x in measured.items():
                meter.add_values(name, x[p.loss_tokens])
        return replace(p, values=v, advantages=advantages, returns=returns)

    return whiten_advantages(each(minibatches, estimate))


def whiten_advantages(minibatches: Minibatches) -> Minibatches:
    """Returns the minibatches with whitened advantages. Mean and standard deviation are over all loss tokens
    of the step, on all ranks."""
    packs = chain(*minibatches)
    stats = sum(ppo.whitening_stats(p.advantages, p.mask) for p in packs)
    stats = dist.all_sum(stats)  # (3,): count, sum, sum of squares

    def whitened(p):
        return replace(p, advantages=ppo.whiten(p.advantages, p.mask, stats))

    return each(minibatches, whitened)


# --- updates


def updates_of(minibatches: Minibatches, count: int) -> Minibatches:
    """Returns `count` lists of packs, one for each update. If there are more minibatches than updates, an
    update gets the packs of several neighbouring minibatches. The number of minibatches is a multiple of
    `count`, because Config requires it."""
    size = len(minibatches) // count
    starts = range(0, count * size, size)
    return [list(chain(*minibatches[i : i + size])) for i in starts]


def counts(packs: Sequence[Pack]) -> tuple[float, float]:
    """Returns how many tokens and responses enter the loss of an update, over all ranks."""
    tokens = sum(len(p.loss_tokens) for p in packs)
    responses = sum(p.responses for p in packs)
    both = torch.tensor([tokens, responses])
    return tuple(dist.all_sum(both).tolist())


def train_role(
    role: Role,
    pack_loss: Callable,
    minibatches: Minibatches,
    step: int,
    cfg: Config,
    meter: Meter,
    log: Logger,
) -> None:
    """Do all updates of a step for one role. pack_loss: policy_pack_loss or critic_pack_loss"""
    updates = updates_of(minibatches, getattr(cfg, f"{role.name}_updates"))
    for n in range(cfg.passes_per_step):
        title = f"{role.name.title()} Train epoch [{n + 1}/{cfg.passes_per_step}]"
        with log.bar(title, sum(map(len, updates))) as bar:  # the number of packs
            # i: number of the update in the step, from 0
            for i, packs in enumerate(updates, n * len(updates)):
                tokens, responses = counts(packs)
                # Skipped, because AdamW's momentum would move the weights even without gradients.
                if tokens == 0:
                    log.alarm(
                        f"no token is in the loss of update {i + 1} of the {role.name}; it is skipped",
                        step,
                    )
                    continue
                for p in dist.accumulate(role.model, packs):
                    loss = pack_loss(role.model, p, tokens, responses, cfg, meter)
                    loss.backward()
                    bar.update()
                if role.name == "policy":
                    check_gap(meter, cfg)
                lr = cfg.lr(role.name, step, i)
                update(role, lr, step, cfg, meter, log)


def critic_pack_loss(
    model: nn.Module,
    p: Pack,
    tokens: float,
    responses: float,
    cfg: Config,
    meter: Meter,
) -> Tensor:
    """Returns the value loss of one pack. An update's loss is the sum over its packs on all ranks.

    tokens: number of tokens in the loss of the whole update
    responses: not used, but `train_role` passes the same arguments to both losses"""
    loss = ppo.value_loss(
        model(p),
        p.values,
        p.returns,
        p.mask,
        tokens,
        cfg.value_clip,
    )
    # `loss` is a sum over tokens, divided by `tokens`. The meter needs the sum.
    meter.add("value_loss", loss * tokens, len(p.loss_tokens))
    return loss


def policy_pack_loss(
    model: nn.Module, p: Pack, tokens: float, responses: float, cfg: Config, meter: Meter
) -> Tensor:
    """Returns the policy loss of one pack. An update's loss is the sum over its packs on all ranks.

    tokens, responses: numbers of tokens and responses in the loss of the whole update"""
    logp, entropy = model(p, cfg.temperature)
    # Without old_logp, this is the step's only update (Config.needs_old_logp).
    old = logp.detach() if p.old_logp is None else p.old_logp
    gap = (old - p.engine_logp).abs()
    meter.add_mean_and_max("logp_gap", gap[p.fresh_tokens])  # only tokens of this step's weights
    segment = ppo.segment_ids(p.cu_seqlens, len(p.tokens))
    low, high = cfg.mismatch_bounds  # of the importance weights p_trainer / p_engine
    importance, cut = grpo.mismatch_weight(
        old, p.engine_logp, p.mask, segment, cfg.mismatch, low, high, logp, p.advantages
    )
    # With --mismatch none, the importance weights are only logged.
    correction = 1.0 if cfg.mismatch == "none" else importance
    # PPO takes the mean over tokens, also if the preset has another --aggregation.
    aggregation = cfg.aggregation if cfg.algo == "grpo" else "token"
    longest = cfg.max_response_len
    weights = grpo.token_weights(
        p.mask, segment, aggregation, tokens, responses, longest, p.prompt_share
    )
    loss, clipped = grpo.policy_loss(
        logp,
        old,
        p.advantages,
        p.mask,
        segment,
        weights,
        ratio=cfg.ratio if cfg.algo == "grpo" else "token",
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        correction=correction,
        engine_logp=p.engine_logp,
    )
    sums = {  # metric -> its sum over the loss tokens, which the meter divides by their number
        "policy_loss": loss * tokens,
        "clip_share": clipped,
        "entropy": entropy.sum(),
        "mismatch/cut": cut.sum(),
    }
    if p.ref_logp is not None:
        # 0 outside the mask, because there both log-probs are 0
        sums["kl"] = ppo.kl(logp, p.ref_logp, cfg.kl_estimator).sum()
        if cfg.kl_coef and not cfg.kl_in_reward:
            # The same `correction` as in the policy's loss: the same engine sampled the tokens.
            kl = ppo.kl_loss(logp, old, p.ref_logp) * correction
            loss = loss + cfg.kl_coef * (kl * weights).sum()
    if cfg.entropy_coef:
        loss = loss - cfg.entropy_coef * (entropy * weights).sum()
    for name, total in sums.items():
        meter.add(name, total, len(p.loss_tokens))
    squares = importance * importance  # for the variance, from which step_metrics computes "ess"
    meter.add("mismatch/mean", importance.sum(), len(p.loss_tokens), squares.sum())
    return loss


def check_gap(meter: Meter, cfg: Config) -> None:
    """Raises UserError if the mean of |trainer log-prob - engine log-prob| exceeds --max_logp_gap nats. Call
    this check before the policy's optimizer step, so that no gradient from wrong log-probs is applied."""
    # i = 0: sum of the gaps; i = 1: number of tokens (see Meter.add)
    sums = torch.stack([meter.sums["logp_gap/mean", i] for i in (0, 1)])
    total, tokens = dist.all_sum(sums).tolist()
    gap = total / max(tokens, 1)
    require(
        gap <= cfg.max_logp_gap,  # a NaN gap fails this check too
        f"engine and trainer differ by {gap:.3g} nats a token on average "
        f"(--max_logp_gap {cfg.max_logp_gap}); likely causes, in order: weights "
        "that didn't arrive, a stale prefix cache, another temperature or dtype",
        "a fix of the cause, or a larger --max_logp_gap if the dtype is "
        "imprecise; nothing of this step is saved",
    )


def update(
    role: Role,
    lr: float,
    step: int,
    cfg: Config,
    meter: Meter,
    log: Logger,
) -> None:
    """Clip the gradient and take one optimizer step. All ranks skip an update whose gradient is not finite.
    Raises UserError after three skipped updates in a row."""
    meter.add(f"lr/{role.name}", lr, 1)
    for group in role.optimizer.param_groups:
        group["lr"] = lr
    # the norm before clipping, the same on all ranks
    norm = dist.whole(nn.utils.clip_grad_norm_(role.model.parameters(), cfg.grad_clip))
    finite = bool(norm.isfinite())
    if finite:
        role.skipped = 0  # number of skipped updates in a row
        role.optimizer.step()
    else:
        role.skipped += 1
        log.alarm(f"the {role.name}'s gradient is not finite; the update is skipped", step)
    role.optimizer.zero_grad(set_to_none=True)
    # A skipped update adds a total of 0 and a count of 0, so the metric's mean leaves it out.
    meter.add(f"grad_norm/{role.name}", norm if finite else 0.0, finite)
    meter.add("skipped_updates", not finite, 1)
    require(
        role.skipped < 3,
        f"three updates of the {role.name} in a row are not finite, last in step {step}",
        "a smaller learning rate, or --dtype float32",
    )


# --- metrics


def end_of_step(
    run: Run,
    step: int,
    metrics: dict[str, float],
    meter: Meter,
    began: float,
) -> bool:
    """Save a checkpoint if one is due, and write the step's metrics and alarms. Returns True if a stop was
    requested.

    metrics: metrics of this step's evaluation, or {}
    began: time.perf_counter() at the step's start, in seconds"""
    cfg = run.cfg
    log = run.log
    done = step + 1  # number of finished steps
    # At the last step, `finish` saves.
    if cfg.save_every and done % cfg.save_every == 0 and done < cfg.steps:
        with dist.phase("save"):
            run.saver.save(done, run.carried)
    metrics |= step_metrics(run, meter, began)
    log.step(step, metrics)
    if run.world.main and log.history:  # history: the rows of this step and of all earlier steps
        for text in new_alarms(log.history, cfg):
            log.alarm(text, step)
    log_errors(run, step)
    return dist.stop_requested()


def log_errors(run: Run, step: int) -> None:
    """Raise an alarm for each new error of a function of --reward or --env, on any rank."""
    for error in sorted(set(dist.gather_all(run.grader.new_errors()))):
        text = f"grading failed, and the term of --reward or the reward of --env is 0: {error!a}"
        run.log.alarm(text, step)


def step_metrics(run: Run, meter: Meter, began: float) -> dict[str, float]:
    """Returns a dict: name -> value of each metric of the step, computed over all ranks.

    began: time.perf_counter() at the step's start, in seconds"""
    world = run.world
    with dist.phase("report"):
        for name, value in run.engine.ledger.metrics().items():
            meter.add_max(name, value)
        m = meter.reduce()  # m: metric -> value

    variance = meter.variances  # metric -> variance
    # A step may have no finished response (--carry).
    m["response_len/std"] = variance.get("response_len", 0.0) ** 0.5
    if "returns" in m:
        m["explained_variance"] = 0.0
        # fp32 rounds equal returns R to numbers that differ by about 1e-7 R
        if variance["returns"] > 1e-12 * max(1, m["returns"] ** 2):
            m["explained_variance"] = 1 - variance["value_error"] / variance["returns"]
        del m["value_error"]
    if m.get("mismatch/mean"):
        # Effective sample size as a share of the tokens: mean² / mean of the squares
        square = m["mismatch/mean"] ** 2
        m["ess"] = square / (square + variance["mismatch/mean"])
    seconds = time.perf_counter() - began
    m |= {f"time/{name}": s for name, s in dist.SECONDS.items()}  # seconds of each phase
    dist.SECONDS.clear()
    m |= {"time/step": seconds, "tokens_per_s": m["tokens"] / seconds}
    m["tflops"] = m.pop("flops") / (seconds * world.size * 1e12)
    if world.device.type == "cuda":
        peak = plan.gpu_of(torch.cuda.get_device_name(), memory=0).flops  # FLOP a second
        if peak:  # 0: an unknown GPU
            m["mfu"] = m["tflops"] * 1e12 / peak
    return m


if __name__ == "__main__":
    try:
        with user_errors("train.py"):
            # A stopped run ends with status 130. Under torchrun, it ends with 0, so that torchrun does not
            # restart it; but with --ranks, rank 0 tells dist.launch.
            told = main_rank and "TORZ_LAUNCHED" in os.environ
            if not main(CONFIG) and (told or "TORCHELASTIC_RUN_ID" not in os.environ):
                raise KeyboardInterrupt
    except Exception:
        report_crash()
        os._exit(1)  # not sys.exit, which waits for threads that may wait for another rank
