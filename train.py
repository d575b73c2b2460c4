"""The training loop: reinforcement learning from verifiable rewards, with PPO or with GRPO.

    python -m tools.tiny && python train.py tiny-ppo --ranks 2 --steps 30
    torchrun --nnodes 4 --nproc-per-node 8 … train.py orz-7b --layout production --model PATH --data FILE
    python train.py PRESET --help

The function `train` is the algorithm. Three differences from Open-Reasoner-Zero:

1. A loss is averaged over the whole update (all packs of all ranks), not over each pack.
2. No sample is dropped or repeated to fill a batch.
3. With one policy update per step, no extra forward pass computes old log-probs, unless the reward has a KL
   term."""

import gc
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from configs import (
    NODE,
    Config,
    Say,
    UserError,
    check_paths,
    parse,
    printable,
    require,
    set_allocator,
    show,
    tell_torchrun,
    user_errors,
)
from guard.lock import FolderLock

if (
    __name__ == "__main__"
):  # before the slow `import torch`: --help and wrong flags get a quick answer
    with user_errors("train.py"):
        CONFIG = parse()
        check_paths(CONFIG)
        if os.environ.get("RANK", "0") == "0":
            FolderLock(Path(CONFIG.out).absolute() / "lock").refuse_living()
    set_allocator()
    signal.signal(
        signal.SIGINT, lambda *_: sys.exit(130)
    )  # no traceback if ctrl-C comes during the start
    if 1 < CONFIG.ranks <= NODE and "RANK" not in os.environ:
        import dist  # not at the top: dist imports torch, which is slow

        sys.exit(dist.launch(CONFIG.ranks))
    if os.environ.get("RANK", "0") == "0":
        print("loading torch and transformers …", flush=True)

BEGIN = time.perf_counter()
import numpy as np
import torch
from torch import Tensor, nn

import ckpt
import dist
import grpo
import ppo
from data import (
    Pack,
    Problem,
    Sample,
    Solved,
    assign,
    batch_at,
    group_by_prompt,
    load_problems,
    numbers_at,
    pack,
    replacement_batch,
    step_of,
)
from engine import Engine
from grading.worker import Grader
from guard.alarms import new_alarms
from guard.selfcheck import check_engine
from guard.start import (
    case_of,
    check_fit,
    check_gold,
    check_keep_best,
    check_parts,
    check_same,
    check_vocabularies,
    checkpoint_id,
    first_look,
    preflight,
    read_facts,
    settled,
    with_date,
)
from guard.watch import handle_signals, watch
from log import Logger, Meter, measure_samples
from model import load_config, load_critic, load_policy, load_tokenizer, logprobs, resolve
from rollout import (
    TRAIN,
    Sets,
    check_graders,
    check_tokens,
    load_sets,
    make_engine,
    make_grader,
    mean,
    part_names,
    rollout,
    sample_row,
    score_sets,
    shape_rewards,
)
from tools import plan, report

dist.SECONDS["start/imports"] = time.perf_counter() - BEGIN
SAVED_PROMPTS = 8
Minibatches = list[list[Pack]]  # one list of this rank's packs for each minibatch


@dataclass
class Role:
    """A model of the run: policy, critic or ref (the reference model of the KL term)."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer | None  # None for ref, which is not trained
    skipped: int = 0  # updates skipped in a row (gradient not finite)


@dataclass
class Run:
    """All objects of a run that is ready for its first step."""

    cfg: Config  # cfg.steps is the number of steps, even if the user gave --epochs or --total_episodes
    world: dist.World
    problems: list[Problem]
    held_out: Sets
    tokenizer: Any
    grader: Grader
    engine: Engine
    policy: Role
    critic: Role | None
    ref: Role | None
    start: int  # the first step to run
    carried: list[Sample]  # with --carry: this rank's responses that no step has trained on yet
    solved: Solved  # with --skip_solved: the problems solved so far, the same on all ranks
    saver: ckpt.Saver
    log: Logger
    lock: FolderLock


def main(cfg: Config) -> bool:
    """Train with the config `cfg`. Returns True after the last step, and False if a signal stopped the run.
    Raises UserError, with the same text on all ranks."""
    run = prepare(cfg)
    try:
        with run.log, handle_signals(cfg.grace):
            done = train(run)
            if done:
                finish(run)
            else:
                run.log.say(
                    f"stopped: {run.saver.saved} steps are saved in {run.saver.out}; "
                    "the same command continues the run"
                )
        run.grader.close()
        if run.world.main:
            folder = Path(os.path.relpath(run.log.out))
            try:
                report.write_report(folder)
                if done:
                    show(report.story(folder))
            except (OSError, UserError) as e:
                show(f"!! can't write the report to {folder} ({e})")
        return done
    finally:
        run.lock.release()
        gc.unfreeze()  # undo the gc.freeze of `load`, so that a notebook can free the run's memory


def train(run: Run) -> bool:
    """Run the remaining steps. Returns True after the last step. Returns False if a signal such as ctrl-C
    stopped the run; then a checkpoint of the finished steps is saved."""
    cfg, world, policy, log = run.cfg, run.world, run.policy, run.log
    for step in range(
        run.start, cfg.steps + 1
    ):  # iteration cfg.steps only evaluates the final policy
        start, meter = time.perf_counter(), Meter(world.device)
        with run.engine.awake(dist.full_weights(policy.model, world.device), version=step):
            metrics = evaluate(run, step)
            if step < cfg.steps:
                batch, samples, carried = sample_step(run, step, meter)
        with dist.phase("wait"):  # a collective: ranks wait here for the slowest engine
            stopping = dist.stop_requested()
        if stopping:  # a resumed run samples this step again
            return stop(run, step)
        if step == cfg.steps:
            if metrics:
                log.step(step, metrics)
            break
        with dist.phase("pack"):
            if cfg.compares_samples:
                samples = add_group_advantages(samples, cfg)
            minibatches = make_packs(samples, len(batch), step, cfg, world, policy.model, meter)
            save_samples(run, step, batch, samples)
        with dist.deterministic(cfg.deterministic):
            learn(run, step, minibatches, meter)
        if cfg.ref_refresh and run.ref and not cfg.ref_model:
            refresh_ref(run, step)
        run.carried = carried
        if end_of_step(run, step, metrics, meter, start):
            return stop(run, step + 1)
    return True


def learn(run: Run, step: int, minibatches: Minibatches, meter: Meter) -> None:
    """Train on a step's samples: compute log-probs and advantages, then update critic and policy."""
    cfg, world, policy, critic, ref, log = (
        run.cfg,
        run.world,
        run.policy,
        run.critic,
        run.ref,
        run.log,
    )
    if ref:
        with dist.phase("ref"), resident(ref, world):
            minibatches = add_logp(minibatches, "ref_logp", ref, cfg)
    # With a single update, the old log-probs equal those that policy_pack_loss computes, so this forward pass
    # is not needed. But a KL term in the reward needs the old log-probs earlier, for the advantages.
    if cfg.updates_per_step > 1 or (cfg.kl_coef and cfg.kl_in == "reward"):
        # optimizer=None: `resident` then leaves the optimizer's state on the CPU (--offload).
        with dist.phase("old_logp"), resident(replace(policy, optimizer=None), world):
            minibatches = add_logp(minibatches, "old_logp", policy, cfg)
            for p in sum(minibatches, []):
                meter.add_mean_and_max(
                    "logp_gap", (p.old_logp - p.engine_logp)[p.fresh_tokens].abs()
                )
    if critic:
        with dist.phase("critic"), resident(critic, world):
            minibatches = estimate_advantages(critic, minibatches, cfg, meter)
            train_role(critic, critic_pack_loss, minibatches, step, cfg, meter, log)
    elif cfg.advantage == "return_whiten":
        minibatches = estimate_advantages(None, minibatches, cfg, meter)
    elif cfg.advantage == "group_mean_whiten":
        minibatches = whiten_advantages(minibatches)
    if step >= cfg.freeze_policy_steps:
        with dist.phase("policy"), resident(policy, world):
            train_role(policy, policy_pack_loss, minibatches, step, cfg, meter, log)


def stop(run: Run, step: int) -> bool:
    """Save a checkpoint after `step` finished steps. Returns False, which `train` returns for a stopped
    run."""
    for _ in range(2):  # if the first save fails, the second one succeeds or raises UserError
        run.saver.save(step, run.carried)
        run.saver.finish()
    return False


def finish(run: Run) -> None:
    """Save the last checkpoint, and export policy and critic to export/."""
    stop(run, run.cfg.steps)
    for role in filter(None, (run.policy, run.critic)):
        weights = dist.full_weights(role.model, run.world.device)
        saved, source = run.saver.facts, ckpt.source_of(role.name, vars(run.cfg))
        read = dist.together(ckpt.model_facts, source, run.tokenizer, role.name)
        dist.together(
            ckpt.check_read, run.log.out, saved, read, f"the files that {source} had at the start"
        )
        facts = ckpt.marker(run.log.out, run.cfg.steps, role.name, saved)
        folder = run.log.out / "export" / role.name
        replaced = ckpt.export_hf(weights, role.model, run.tokenizer, source, folder, facts)
        if replaced:
            run.log.say(f"{folder} replaces {replaced}")


# --- starting


def prepare(cfg: Config) -> Run:
    """Returns a run, ready for its first step. If a check fails, all ranks raise the same UserError."""
    if cfg.deterministic:  # cuBLAS is deterministic only with this setting
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    world = dist.init(cfg.device, cfg.dtype, cfg.stall_limit)
    watch(cfg.stall_limit)
    cfg = replace(
        cfg,
        model=resolve(cfg.model),
        critic_model=resolve(cfg.critic_model),
        ref_model=resolve(cfg.ref_model),
    )
    plan.check_ranks(cfg, world.size)
    lock = FolderLock(Path(cfg.out).absolute() / "lock")
    try:
        preflight(cfg, lock, world.main)
        return load(cfg, world, lock)
    except UserError:  # a notebook process lives on, so release the lock
        lock.release()
        raise


def load(cfg: Config, world: dist.World, lock: FolderLock) -> Run:
    """Load the run of the lock's folder, and check it. If the folder has checkpoints, the run continues from
    the newest. If a check fails, all ranks raise the same UserError."""
    out = lock.file.parent
    found = dist.together(ckpt.find, out, cfg.resume)
    origin = dist.together(ckpt.named, cfg.start_from) if cfg.start_from and not found else None
    check_same(
        "starts from", {"checkpoint": checkpoint_id(found or origin)}, "a path that all share"
    )
    with ExitStack() as stack:
        dist.together(stack.enter_context, ckpt.hold(found or origin))
        return load_from(found, origin, cfg, world, lock)


def load_from(
    found: Path | None, origin: Path | None, cfg: Config, world: dist.World, lock: FolderLock
) -> Run:
    """Do the work of `load`. found: the checkpoint that continues, or None. origin: the checkpoint of
    --start_from, or None"""
    out, say = lock.file.parent, show if world.main else lambda text: None
    saved = ckpt.read_state(found) if found else {"step": 0, "config": {"date": ""}, "noted": {}}
    own = (
        found is None or found.parent.parent == out
    )  # False: --resume names a checkpoint in another folder
    if found:  # a resumed run keeps its first --start_from
        for flag in ("start_from", "resume"):
            if own and getattr(cfg, flag) not in ("", "auto", "never", saved["config"][flag]):
                say(f"--{flag} is not used: {out} has a checkpoint, and its run continues")
        cfg = replace(cfg, start_from=saved["config"]["start_from"], resume="auto")
    start, tokenizer = saved["step"], dist.together(load_tokenizer, cfg.model)
    cfg = dist.together(with_date, cfg, tokenizer, saved["config"]["date"], say)
    # The grader is made first: load_data keeps the rows' fields only if a reward function reads them.
    grader = dist.together(make_grader, cfg, say)
    problems, held_out = dist.together(load_data, cfg, tokenizer, say, grader.reads_rows)
    read, noted = read_facts(cfg, problems, held_out, tokenizer, grader)
    noted["--start_from"] = checkpoint_id(origin) if origin else saved["noted"].get("--start_from")
    check_same("reads", read | noted, "the same files on every machine")
    if world.device.type == "cpu":  # another number of threads sums in another order
        noted["threads of a rank"] = torch.get_num_threads()
    cfg = settled(cfg.with_steps(len(problems)), world, saved)
    planned = check_fit(cfg, world, len(problems), say)
    engine = dist.together(make_engine, cfg.model, tokenizer, cfg, world.device, world.dtype)
    check_gold("--data", problems, grader, cfg, world, say)
    for name, part in held_out.items():
        check_gold(f"evaluation set {name}", part, grader, cfg, world, say, refuse=False)
    policy, critic, ref = load_models(cfg, world)
    kept = [policy, critic, ref if cfg.keeps_ref else None]
    models = {role.name: (role.model, role.optimizer) for role in kept if role}
    # Problems that were solved in the interrupted step `start` do not count, because the step is repeated.
    solved = {int(i): step for i, step in saved.get("solved", {}).items() if step <= start}
    # A run may be resumed without an evaluation set or a model that it read before. The old entry of "read"
    # stays, so that the content is compared if a later resume uses this set or model again.
    facts = {
        "config": asdict(cfg),
        "ranks": world.size,
        "noted": noted,
        "solved": solved,
        "read": saved.get("read", {}) | read,
    }
    carried = ckpt.read_carried(found)[world.rank :: world.size] if found else []
    taken = ckpt.resume(found, saved, models, facts) if found else ""
    if origin:
        taken = ckpt.start_from(origin, models, facts)
    check = cfg.selfcheck and engine.needs_selfcheck
    agreement = check_engine(engine, policy.model, problems, world, cfg) if check else ""
    log = dist.together(Logger, out, cfg, world.main, start, noted, planned, own, lock.check)
    saver = ckpt.Saver(out, models, cfg, facts, start if own else None, log.alarm, lock.check)
    for line in filter(None, (agreement, taken, dist.start_line())):
        log.say(line)
    gc.freeze()  # otherwise every garbage collection scans the objects made so far
    return Run(
        cfg,
        world,
        problems,
        held_out,
        tokenizer,
        grader,
        engine,
        policy,
        critic,
        ref,
        start,
        carried,
        solved,
        saver,
        log,
        lock,
    )


@dist.starting("data")
def load_data(
    cfg: Config, tokenizer: Any, say: Say, keep_fields: bool
) -> tuple[list[Problem], Sets]:
    """Returns the problems of --data, and the evaluation sets. Raises UserError if a file can't be used or a
    check fails."""
    check_vocabularies(cfg, tokenizer)
    problems = load_problems(cfg.data, tokenizer, cfg, say, keep_fields=keep_fields)
    held_out = load_sets(cfg, tokenizer, say, keep_fields) if cfg.eval_every else {}
    if cfg.eval_every and not held_out:
        say("nothing is evaluated; for evaluations: --eval_data FILE [FILE …]")
    known = {p.ids for p in problems}
    for name, part in held_out.items():
        if same := sum(p.ids in known for p in part):
            say(f"evaluation set {name}: {same} of {len(part)} prompts are also in --data")
    if cfg.prompts_per_step > len(problems):
        say("each step repeats problems, because --prompts_per_step is above their number")
    check_graders([problems, *held_out.values()], cfg)
    check_tokens([problems, *held_out.values()], load_config(cfg.model))
    check_parts(problems, tokenizer, cfg)
    check_keep_best(cfg, list(held_out))
    return problems, held_out


@dist.starting("models")
def load_models(cfg: Config, world: dist.World) -> tuple[Role, Role | None, Role | None]:
    """Returns the roles policy, critic (None with GRPO) and ref (None if not `cfg.has_ref`). Their models are
    sharded."""
    case = case_of(cfg, world)
    shard_fn = partial(dist.shard, over=dist.mesh(world, case.shards), dtype=world.dtype)
    device = "cpu" if case.offloads else world.device
    model = load_policy(cfg.model, device, partial(shard_fn, recompute=case.recompute["policy"]))
    policy, critic, ref = (
        Role("policy", model, make_optimizer(model, cfg.policy_lr, cfg)),
        None,
        None,
    )
    if cfg.algo == "ppo":
        shard_critic = partial(shard_fn, recompute=case.recompute["critic"])
        model = load_critic(cfg.critic_model or cfg.model, device, shard_critic, cfg.seed)
        critic = Role("critic", model, make_optimizer(model, cfg.critic_lr, cfg))
    if cfg.has_ref:
        model = load_policy(cfg.ref_model or cfg.model, device, shard_fn).requires_grad_(False)
        ref = Role("ref", model, None)
    return policy, critic, ref


def make_optimizer(model: nn.Module, lr: float, cfg: Config) -> torch.optim.Optimizer:
    """Returns a new AdamW optimizer. Checkpoints save its state. Another optimizer: see docs/forking.md."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=lr,
        betas=cfg.betas,
        weight_decay=cfg.weight_decay,
        eps=cfg.adam_eps,
        fused=True,
    )  # one kernel for all weights


def resident(role: Role, world: dist.World):
    """Returns a context manager. Inside it, the role's model and optimizer state are on world.device."""
    return dist.on_device(role.model, role.optimizer, world.device)


@torch.no_grad()
def refresh_ref(run: Run, step: int) -> None:
    """Copy the policy's weights to the reference model if an epoch (one pass over the prompts) ends in this
    step."""
    n, per_step = len(run.problems), run.cfg.prompts_per_step
    if (step + 1) * per_step // n > step * per_step // n:
        for old, new in zip(run.ref.model.parameters(), run.policy.model.parameters(), strict=True):
            old.copy_(new)


# --- sampling


def sample_step(
    run: Run, step: int, meter: Meter
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
    if step == 0:
        save_samples(run, step, batch, samples)  # now, because first_look may end the run
        first_look(
            cfg, run.tokenizer, batch, samples, run.log.say, list(run.grader.errors.values())
        )
    if cfg.resample_rounds and not dist.stop_requested():
        batch, samples = resample(run, step, batch, samples)
    return batch, samples, carried


def draw_and_carry(
    run: Run, step: int, meter: Meter
) -> tuple[list[Problem], list[Sample], list[Sample]]:
    """Do the sampling of `sample_step` with --carry: continue the previous step's trajectories and begin new
    ones, in all more than this step trains on. Returns the same three values as `sample_step`. The batch has
    only the prompts that this step trains on."""
    cfg, problems = run.cfg, {}
    begun = {step_of(i, cfg) for i in dist.gather_all(s.prompt_id for s in run.carried)}
    for begin in sorted(begun | {step}):
        batch = batch_at(run.problems, begin, cfg, run.solved)
        problems |= zip(numbers_at(begin, cfg), batch, strict=True)
    samples, left = draw(run, problems, (step,), run.carried)
    meter.add("carried", sum(not s.reason for s in left))
    ages = np.concatenate([step - s.token_versions[s.is_sampled] for s in samples] or [np.zeros(0)])
    meter.add_mean_and_max("staleness", torch.from_numpy(ages))
    numbers = sorted(set(dist.gather_all({s.prompt_id for s in samples})))
    place = {number: i for i, number in enumerate(numbers)}
    samples = [replace(s, prompt_id=place[s.prompt_id]) for s in samples]
    return [problems[i] for i in numbers], samples, left


@dist.phase("rollout")
def draw(
    run: Run, problems: Mapping[int, Problem], key: tuple[int, ...], carried: Sequence[Sample] = ()
) -> tuple[list[Sample], list[Sample]]:
    """Call `rollout` with the settings of training. Add the extra rewards (rollout.REWARD_PARTS) to the
    samples, and the solved problems to run.solved. Returns this rank's graded samples, and with --carry the
    trajectories that the next step continues.

    key: part of the random seed: (step,), or (step, round) in a round of `resample`"""
    cfg = run.cfg
    # With --carry, `problems` has more prompts than this step finishes.
    prompts = min(len(problems), cfg.prompts_per_step)
    with run.log.bar("Rollout", prompts * cfg.samples_per_prompt // run.engine.ranks) as bar:
        samples, left = rollout(
            run.engine,
            run.grader,
            problems,
            cfg.samples_per_prompt,
            cfg.temperature,
            cfg.max_response_len,
            (cfg.seed, TRAIN, *key),
            key[0],
            bar.update,
            carried,
        )
    dist.together(run.grader.check)
    if cfg.skip_solved:
        for i in dist.gather_all(
            problems[g[0].prompt_id].index
            for g in group_by_prompt(samples)
            if sum(s.right for s in g) / cfg.samples_per_prompt >= cfg.skip_solved
        ):
            run.solved.setdefault(i, key[0] + 1)
    return shape_rewards(samples, cfg), left


def resample(
    run: Run, step: int, batch: list[Problem], samples: list[Sample]
) -> tuple[list[Problem], list[Sample]]:
    """Replace uniform prompts, in at most --resample_rounds rounds (DAPO's dynamic sampling, arXiv
    2503.14476, eq. 11). A prompt is uniform if all its samples have the same reward. Returns the new batch
    and this rank's samples."""
    cfg, batch = run.cfg, list(batch)
    uniform = uniform_prompts(samples)
    for round in range(1, cfg.resample_rounds + 1):
        if not uniform:
            break
        replacements = replacement_batch(run.problems, step, round, cfg, run.solved)
        for prompt_id in uniform:
            batch[prompt_id] = replacements[prompt_id]
        drawn, _ = draw(run, {i: batch[i] for i in uniform}, (step, round))
        if dist.stop_requested():  # `draw` was aborted on some rank
            return batch, samples
        drawn += [s for s in samples if s.prompt_id not in uniform]
        samples = sorted(drawn, key=lambda s: s.key)
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
    groups = group_by_prompt(samples)
    return set(dist.gather_all(g[0].prompt_id for g in groups if len({s.reward for s in g}) == 1))


@dist.phase("eval")
def evaluate(run: Run, step: int) -> dict[str, float]:
    """Evaluate the policy on all evaluation sets, and write its responses to eval/ (not with --save_samples
    none). Returns a dict: metric -> value. The dict is empty if no evaluation is due."""
    cfg = run.cfg
    if not run.held_out or (step % cfg.eval_every and step < cfg.steps):
        return {}
    with run.log.bar("Eval", 0) as bar:
        scores, rows = score_sets(run.engine, run.grader, run.held_out, cfg, step, bar.update)
    if cfg.save_samples != "none":
        run.log.save_samples("eval", step, rows)
    return {
        f"eval/{name}/{metric}": mean(values)
        for name, metrics in scores.items()
        for metric, values in metrics.items()
    }


def save_samples(run: Run, step: int, batch: list[Problem], samples: list[Sample]) -> None:
    """Write samples to samples/step_NNNNNN.jsonl. `--save_samples some` writes the first SAVED_PROMPTS
    prompts of a step, every --eval_every steps (every 10 steps if --eval_every is 0)."""
    cfg, some = run.cfg, run.cfg.save_samples == "some"
    if cfg.save_samples == "none" or (some and step % (cfg.eval_every or 10)):
        return
    rows = []
    for s in samples:
        if s.prompt_id < SAVED_PROMPTS or not some:
            advantage = {"advantage": s.advantage} if cfg.compares_samples else {}
            rows.append(sample_row(s, batch[s.prompt_id], cfg.save_logps) | advantage)
    run.log.save_samples("samples", step, dist.gather_rows(rows))


# --- packs and advantages


def add_group_advantages(samples: list[Sample], cfg: Config) -> list[Sample]:
    """Returns the samples with the advantages from grpo.group_advantages. All samples of a prompt must be on
    the same rank. With --drop_uniform, a prompt whose samples all have the same score is not in the loss."""
    sizes = {len(group) for group in group_by_prompt(samples)}
    assert sizes <= {cfg.samples_per_prompt}, (
        f"not {cfg.samples_per_prompt} samples of each prompt: {sizes}"
    )
    # (P, n): P prompts with n samples each
    scores = torch.tensor([s.score for s in samples], dtype=torch.float64).view(
        -1, cfg.samples_per_prompt
    )
    advantages = grpo.group_advantages(scores, cfg.advantage)
    keep = (grpo.keep_groups(scores) | (not cfg.drop_uniform)).repeat_interleave(
        cfg.samples_per_prompt
    )
    if cfg.advantage == "group_mean_batch_std":
        kept = advantages.flatten()[keep]
        advantages /= grpo.batch_std(dist.all_sum(torch.stack([keep.sum(), (kept * kept).sum()])))
    return [
        replace(s, advantage=a, in_loss=s.in_loss and k)
        for s, a, k in zip(samples, advantages.flatten().tolist(), keep.tolist(), strict=True)
    ]


def make_packs(
    samples: list[Sample],
    n_prompts: int,
    step: int,
    cfg: Config,
    world: dist.World,
    model: nn.Module,
    meter: Meter,
) -> Minibatches:
    """Distribute the samples over the ranks, in packs. Returns this rank's packs, one list for each
    minibatch. Every rank gets about equal work and the same number of packs."""
    keys, prompts, lengths = number_samples(samples, n_prompts, cfg.samples_per_prompt)
    shape = plan.shape_of(model.config.to_dict(), "the policy")
    forward_flops = partial(plan.forward_flops, shape.policy_params, shape.layers, shape.q)
    layout = assign(lengths, forward_flops(lengths, lengths**2), prompts, world.size, cfg, step)
    if cfg.aggregation == "prompt":
        samples = add_prompt_shares(samples, keys, layout, torch.from_numpy(prompts))
    version = step if cfg.carry else None  # with --carry, earlier weights sampled some tokens
    minibatches = [
        [pack(some, version).to(world.device) for some in minibatch]
        for minibatch in dist.balance(samples, keys, layout)
    ]
    packs = [p for minibatch in minibatches for p in minibatch if p.responses]
    unique = sum(len(p.unique) for p in packs)
    meter.add("tokens", sum(s.length for s in samples))
    meter.add("unique_share", unique, sum(len(p.tokens) for p in packs))
    # A backward pass costs as much as two forward passes. The critic also runs one forward pass for `values`.
    forwards = 3 * cfg.passes_per_step * (1 + (cfg.algo == "ppo")) + (cfg.algo == "ppo")
    meter.add("flops", forwards * forward_flops(unique, sum(s.length**2 for s in samples)))
    return minibatches


def number_samples(
    samples: list[Sample], n_prompts: int, n: int
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Number the S samples of all ranks in the order of (prompt_id, sample_id), so that all ranks compute the
    same layout of packs. Returns
    1. the numbers (0 to S - 1) of this rank's samples;
    2. the prompt_ids (S,) of all samples;
    3. the lengths (S,) of all samples, in tokens.

    n: --samples_per_prompt"""
    # this rank's samples, as indices of `tokens`
    places = [s.prompt_id * n + s.sample_id for s in samples]
    tokens = torch.zeros(n_prompts * n, dtype=torch.int64)
    tokens[places] = torch.tensor([s.length for s in samples], dtype=torch.int64)
    tokens = dist.all_sum(tokens).numpy()
    found = tokens.nonzero()[0]  # indices of the samples that exist
    return np.searchsorted(found, places).tolist(), found // n, tokens[found]


def add_prompt_shares(
    samples: list[Sample], keys: Sequence[int], layout: dist.Layout, prompts: Tensor
) -> list[Sample]:
    """Returns copies of the samples with `prompt_share` set to 1 / (tokens of the prompt in the minibatch's
    loss × number of prompts in this loss). --aggregation prompt multiplies each token's loss by prompt_share.

    keys: index of each sample of this rank among the samples of all ranks
    layout[minibatch][rank][pack]: indices of the pack's samples among the samples of all ranks
    prompts: prompt_id of each sample of all ranks"""
    tokens, share = torch.zeros(len(prompts), dtype=torch.int64), torch.zeros(len(prompts))
    tokens[keys] = torch.tensor(
        [int(s.is_sampled.sum()) * s.in_loss for s in samples], dtype=torch.int64
    )
    tokens = dist.all_sum(tokens)
    for ranks in layout:
        chosen = torch.tensor([i for packs in ranks for indices in packs for i in indices])
        of_prompt = torch.zeros(int(prompts.max()) + 1).index_add(
            0, prompts[chosen], tokens[chosen].float()
        )
        count = (of_prompt > 0).sum().clamp(min=1)
        share[chosen] = 1 / (of_prompt[prompts[chosen]].clamp(min=1) * count)
    return [replace(s, prompt_share=x) for s, x in zip(samples, share[keys].tolist(), strict=True)]


def each(minibatches: Minibatches, f: Callable[[Pack], Pack]) -> Minibatches:
    return [[f(p) for p in minibatch] for minibatch in minibatches]


@torch.no_grad()
def add_logp(minibatches: Minibatches, field: str, role: Role, cfg: Config) -> Minibatches:
    """Returns the minibatches with the role's log-probs in `field`: "old_logp" or "ref_logp"."""
    return each(
        minibatches, lambda p: replace(p, **{field: logprobs(role.model, p, cfg.temperature)[0]})
    )


@torch.no_grad()
def estimate_advantages(
    critic: Role | None, minibatches: Minibatches, cfg: Config, meter: Meter
) -> Minibatches:
    """Returns the minibatches with values, returns and whitened advantages. Without a critic, all values are
    0 (REINFORCE++, arXiv 2501.03262)."""

    def estimate(p):
        v, rewards = critic.model(p) if critic else torch.zeros_like(p.rewards), p.rewards
        if cfg.kl_coef and cfg.kl_in == "reward":
            kl = ppo.kl(p.old_logp, p.ref_logp, cfg.kl_estimator)
            rewards = rewards - torch.where(p.mask, cfg.kl_coef * kl, 0)
        advantages, returns = ppo.gae(rewards, v, p.cu_seqlens, p.mask, cfg.gamma, cfg.lam)
        for name, x in (
            (("values", v), ("returns", returns), ("value_error", returns - v)) if critic else ()
        ):
            x = x[p.loss_tokens].double()
            meter.add(name, x.sum(), len(x))
            meter.add(f"{name}²", (x * x).sum(), len(x))
        return replace(p, values=v, advantages=advantages, returns=returns)

    return whiten_advantages(each(minibatches, estimate))


def whiten_advantages(minibatches: Minibatches) -> Minibatches:
    """Returns the minibatches with whitened advantages. Mean and standard deviation are over all loss tokens
    of the step, on all ranks."""
    packs = sum(minibatches, [])
    stats = dist.all_sum(sum(ppo.whitening_stats(p.advantages, p.mask) for p in packs))
    return each(
        minibatches, lambda p: replace(p, advantages=ppo.whiten(p.advantages, p.mask, stats))
    )


# --- updates


def updates_of(minibatches: Minibatches, count: int) -> Minibatches:
    """Returns `count` lists of packs, one for each update. If there are more minibatches than updates, an
    update gets the packs of several neighbouring minibatches."""
    size = len(minibatches) // count
    return [sum(minibatches[i * size : (i + 1) * size], []) for i in range(count)]


def counts(packs: Sequence[Pack]) -> tuple[float, float]:
    """Returns how many tokens and responses enter the loss of an update, over all ranks."""
    here = torch.tensor([sum(len(p.loss_tokens) for p in packs), sum(p.responses for p in packs)])
    return tuple(dist.all_sum(here).tolist())


def train_role(
    role: Role,
    pack_loss: Callable,
    minibatches: Minibatches,
    step: int,
    cfg: Config,
    meter: Meter,
    log: Logger,
) -> None:
    """Do all updates of a step for one role."""
    updates, passes = (
        updates_of(minibatches, getattr(cfg, f"{role.name}_updates")),
        cfg.passes_per_step,
    )
    for n in range(passes):
        with log.bar(
            f"{role.name.title()} Train epoch [{n + 1}/{passes}]", sum(map(len, updates))
        ) as bar:
            for i, packs in enumerate(updates, n * len(updates)):
                denominators, lr = counts(packs), cfg.lr(role.name, step, i)
                if (
                    denominators[0] == 0
                ):  # even without gradients, AdamW's momentum would move the weights
                    log.alarm(
                        f"no token is in the loss of update {i + 1} of the {role.name}; it is skipped",
                        step,
                    )
                    continue
                meter.add(f"lr/{role.name}", lr, 1)
                for p in dist.accumulate(role.model, packs):
                    pack_loss(role.model, p, *denominators, cfg, meter).backward()
                    bar.update()
                if role.name == "policy":
                    check_gap(meter, cfg)
                update(role, packs, lr, step, cfg, meter, log)


def critic_pack_loss(
    model: nn.Module, p: Pack, tokens: float, responses: float, cfg: Config, meter: Meter
) -> Tensor:
    """Returns the value loss of one pack. An update's loss is the sum over its packs on all ranks.

    tokens: number of tokens in the loss of the whole update
    responses: not used, but `train_role` passes the same arguments to both losses"""
    loss = ppo.value_loss(model(p), p.values, p.returns, p.mask, tokens, cfg.value_clip)
    meter.add("value_loss", loss * tokens, len(p.loss_tokens))
    return loss


def policy_pack_loss(
    model: nn.Module, p: Pack, tokens: float, responses: float, cfg: Config, meter: Meter
) -> Tensor:
    """Returns the policy loss of one pack. An update's loss is the sum over its packs on all ranks.

    tokens, responses: numbers of tokens and responses in the loss of the whole update"""
    logp, entropy = logprobs(model, p, cfg.temperature)
    old = p.old_logp
    if old is None:
        old = logp.detach()
        meter.add_mean_and_max("logp_gap", (old - p.engine_logp)[p.fresh_tokens].abs())
    segment = ppo.segment_ids(p.cu_seqlens, len(p.tokens))
    weight, cut = grpo.mismatch_weight(
        old, p.engine_logp, p.mask, segment, cfg.mismatch, *cfg.mismatch_bounds
    )
    correction = 1.0 if cfg.mismatch == "none" else weight
    weights = p.mask / tokens
    ratio = "token"
    if cfg.algo == "grpo":
        ratio = cfg.ratio
        weights = grpo.token_weights(
            p.mask,
            segment,
            cfg.aggregation,
            tokens,
            responses,
            cfg.max_response_len,
            p.prompt_share,
        )
    loss, clipped = grpo.policy_loss(
        logp,
        old,
        p.advantages,
        p.mask,
        segment,
        weights,
        ratio,
        cfg.clip_low,
        cfg.clip_high,
        correction,
    )
    sums = {  # metric -> its sum over the loss tokens
        "policy_loss": loss * tokens,
        "clip_share": clipped,
        "entropy": entropy.sum(),
        "mismatch/mean": weight.sum(),
        "mismatch/mean²": (weight * weight).sum(),
        "mismatch/cut": cut.sum(),
    }
    if p.ref_logp is not None:
        # 0 outside the mask, because there both log-probs are 0
        sums["kl"] = ppo.kl(logp, p.ref_logp, cfg.kl_estimator).sum()
        if cfg.kl_coef and cfg.kl_in == "loss":
            # The same weights as in the policy's loss, because the same engine sampled the tokens.
            loss = (
                loss
                + cfg.kl_coef * (ppo.kl_loss(logp, old, p.ref_logp) * correction * weights).sum()
            )
    if cfg.entropy_coef:
        loss = loss - cfg.entropy_coef * (entropy * weights).sum()
    for name, total in sums.items():
        meter.add(name, total, len(p.loss_tokens))
    return loss


def check_gap(meter: Meter, cfg: Config) -> None:
    """Raises UserError if the mean of |trainer log-prob - engine log-prob| exceeds --max_logp_gap nats. Call
    this check before the policy's optimizer step, so that no gradient from wrong log-probs is applied."""
    total, tokens = dist.on_host(dist.all_sum(meter.sums["logp_gap/mean"])).tolist()
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
    role: Role, packs: list[Pack], lr: float, step: int, cfg: Config, meter: Meter, log: Logger
) -> None:
    """Clip the gradient and take one optimizer step. All ranks skip an update whose gradient is not finite,
    and save its packs in nonfinite/. Raises UserError after three skipped updates in a row."""
    norm = dist.clip_grad_norm(role.model, cfg.grad_clip)
    finite = bool(norm.isfinite())
    for group in role.optimizer.param_groups:
        group["lr"] = lr
    if finite:
        role.skipped = 0
        role.optimizer.step()
    else:
        role.skipped += 1
        dumped = log.dump(f"nonfinite/step_{step:06d}_{role.name}", packs)
        log.alarm(
            f"the {role.name}'s gradient is not finite; the update is skipped, {dumped}", step
        )
    role.optimizer.zero_grad(set_to_none=True)
    meter.add(f"grad_norm/{role.name}", norm if finite else 0.0, finite)
    meter.add("skipped_updates", not finite, 1)
    if role.skipped == 3:
        saved = next((p.name for p in reversed(ckpt.complete(log.out))), "none")
        raise UserError(
            f"three updates of the {role.name} in a row were not finite, the last "
            f"one in step {step}, and the last complete checkpoint is {saved}; "
            "needed: a look at nonfinite/, a smaller learning rate, or --dtype float32"
        )


# --- metrics


def end_of_step(run: Run, step: int, metrics: dict[str, float], meter: Meter, start: float) -> bool:
    """Save a checkpoint if one is due, and write the step's metrics and alarms. Returns True if a stop was
    requested.

    metrics: metrics of this step's evaluation. start: time.perf_counter() at the step's start"""
    cfg, log = run.cfg, run.log
    if cfg.save_every and (step + 1) % cfg.save_every == 0 and step + 1 < cfg.steps:
        with dist.phase("save"):
            run.saver.save(step + 1, run.carried)
    metrics |= step_metrics(meter, run.world, run.engine, start)
    log.step(step, metrics)
    if run.world.main and log.history:
        for text in new_alarms(log.history, cfg):
            log.alarm(text, step)
    for error in sorted(set(dist.gather_all(run.grader.new_errors()))):
        log.alarm(f"grading failed, and the term of --reward is 0: {ascii(error)}", step)
    return dist.stop_requested()


def step_metrics(meter: Meter, world: dist.World, engine: Engine, start: float) -> dict[str, float]:
    """Returns a dict: name -> value of each metric of the step, computed over all ranks.

    start: time.perf_counter() at the step's start"""
    with dist.phase("report"):
        for name, value in engine.ledger.metrics().items():
            meter.add_max(name, value)
        m = meter.reduce(dist.all_sum, dist.all_max)

    def variance(name):
        return max(m.get(f"{name}²", 0.0) - m.get(name, 0.0) ** 2, 0.0)

    m["response_len/std"] = variance("response_len") ** 0.5
    if "returns" in m:
        of_returns = variance("returns")
        m["explained_variance"] = (
            1 - variance("value_error") / of_returns if of_returns > 1e-12 else 0.0
        )
        del m["value_error"]
    if m.get("mismatch/mean²"):
        m["ess"] = m["mismatch/mean"] ** 2 / m["mismatch/mean²"]
    seconds = time.perf_counter() - start
    m |= {f"time/{name}": s for name, s in dist.phase_seconds().items()}
    m |= {"time/step": seconds, "tokens_per_s": m["tokens"] / seconds}
    m["tflops"] = m.pop("flops") / (seconds * world.size * 1e12)
    peak = plan.gpu_of(torch.cuda.get_device_name(), 0).flops if world.device.type == "cuda" else 0
    if peak:
        m["mfu"] = m["tflops"] * 1e12 / peak
    return {name: value for name, value in m.items() if not name.endswith("²")}


if __name__ == "__main__":
    try:
        with user_errors("train.py"):
            # Under torchrun, a stopped run ends with status 0, so that torchrun does not restart it.
            if not main(CONFIG) and "TORCHELASTIC_RUN_ID" not in os.environ:
                raise KeyboardInterrupt
    except Exception:
        why = printable(traceback.format_exc())
        where = f"rank {os.environ['RANK']} on {os.uname().nodename}"
        lost = re.search(".*(?:by peer|ncclRemoteError).*", why)
        why = lost[0] if lost else why
        print(f"{where} failed in phase {dist.CURRENT.name}:\n{why}", file=sys.stderr, flush=True)
        if lost:
            time.sleep(
                2
            )  # let the failed peer end first, because torchrun prints the first failure
        else:
            tell_torchrun(why)
        os._exit(1)  # not sys.exit, which waits for threads that may wait for another rank
