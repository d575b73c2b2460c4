"""Loads a run, or continues it from a checkpoint, and ends it. In the order of a start:

prepare       starts the process group, takes the folder's lock, looks for a checkpoint
load          reads all that a run needs, checks it (guard/checks.py), and returns the Run
read_inputs   reads tokenizer, reward functions, problems and evaluation sets
state_of      collects who the run is (guard/identity.py)
load_models   loads and shards the models, and makes their optimizers
stop, finish  save the last checkpoint; `finish` also exports the models"""

import gc
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import ckpt
import dist
from configs import Config, Say
from data import Problem, Sample, Solved, load_problems, set_template
from engine import Engine
from grading.worker import Grader
from guard.checks import (
    case_of,
    check_fit,
    check_gold,
    check_parts,
    check_vocabularies,
    preflight,
)
from guard.files import read_json
from guard.identity import (
    Facts,
    check_same,
    facts_of,
    source_of,
)
from guard.lock import FolderLock
from guard.messages import UserError, require
from guard.selfcheck import check_engine
from guard.watch import watch
from log import Logger, tell
from model import (
    Adapted,
    freeze,
    left_out,
    load_config,
    load_critic,
    load_policy,
    load_tokenizer,
    resolve,
)
from rollout import (
    Sets,
    check_graders,
    check_tokens,
    load_sets,
    make_engine,
    make_grader,
)
from tools import plan


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
    start: int  # the first step to run
    lengthened: bool  # an earlier, shorter run ended before step `start`
    carried: list[Sample]  # with --carry: this rank's responses that no step has trained on yet
    solved: Solved  # with --skip_solved: the problems solved so far, the same on all ranks
    saver: ckpt.Saver
    log: Logger
    lock: FolderLock
    critic: Role | None = None  # with PPO
    ref: Role | None = None  # see Config.has_ref


def prepare(cfg: Config) -> Run:
    """Returns a run, ready for its first step. If the folder --out has checkpoints, the run continues from
    the newest. If a check fails, all ranks raise the same UserError."""
    if cfg.deterministic:  # cuBLAS is deterministic only with this setting
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    world = dist.init(cfg.device, cfg.dtype, cfg.stall_limit)
    watch(cfg.stall_limit)
    paths = {name: resolve(getattr(cfg, name)) for name in ("model", "critic_model", "ref_model")}
    cfg = replace(cfg, **paths)
    plan.check_ranks(cfg, world.size)
    lock = FolderLock(cfg.folder / "lock")
    with ExitStack() as on_error:  # after an error, a notebook's process lives on: release all
        on_error.callback(lock.release)
        preflight(cfg, lock, world.main)
        # All ranks read the checkpoint that rank 0 has found.
        path, resumes = dist.gather(dist.together(checkpoint_of, cfg))[0]
        with ExitStack() as stack:
            if path:  # no other run may delete the checkpoint while it is read
                dist.together(stack.enter_context, ckpt.hold(path))
            run = load(cfg, world, lock, path, resumes, on_error)
        on_error.pop_all()  # the run keeps its lock and its grader
    return run


def checkpoint_of(cfg: Config) -> tuple[Path | None, bool]:
    """Returns the checkpoint that the run reads, or None; and whether the run continues from it. A run that
    does not continue takes only the weights (--start_from)."""
    found = ckpt.find(cfg.folder, cfg.resume)
    if found or not cfg.start_from:
        return found, found is not None
    return ckpt.named(cfg.start_from), False


# Stands for the content of state.json in a new run.
NEW = {"step": 0, "read": {}, "solved": {}, "config": {"steps": None}}


def load(
    cfg: Config,
    world: dist.World,
    lock: FolderLock,
    path: Path | None,
    resumes: bool,
    on_error: ExitStack,
) -> Run:
    """Returns the run, after reading and checking all that it needs. Raises UserError as `prepare` does.

    path, resumes: the results of `checkpoint_of`
    on_error: gets the grader, to close it if the start fails"""
    out = cfg.folder
    say = tell if world.main else lambda text: None
    own = not resumes or path.parent.parent == out  # False: --resume names another run's checkpoint
    cfg, saved = dist.together(with_checkpoint, cfg, world, path, resumes)
    cfg, inputs = read_inputs(cfg, say, on_error)
    cfg = cfg.with_steps(len(inputs.problems))
    case = case_of(cfg, world, len(inputs.problems))
    cfg = case.cfg  # without `auto` in --shard_ranks and --offload, and without --pack_len 0
    facts = state_of(cfg, world, inputs, saved)
    if resumes:  # now, because loading a large model takes minutes
        ckpt.check_resume(path, saved, facts)
    planned = check_fit(case, say)
    engine = dist.together(make_engine, cfg.model, inputs.tokenizer, cfg, world.device, world.dtype)
    for name, problems in ({"--data": inputs.problems} | inputs.held_out).items():
        check_gold(name, problems, inputs.grader, cfg, world, say)
    roles = load_models(case, world)
    # Checkpoints have the trained models, and the reference if cfg.keeps_ref.
    kept = [role for role in roles.values() if role.optimizer or cfg.keeps_ref]
    models = {role.name: (role.model, role.optimizer) for role in kept}
    say(f"the whole plan: {out / 'plan.json'}\n{left_out(cfg.model)}".rstrip())
    if resumes:
        say(ckpt.resume(path, saved, models, facts))
    elif path:
        say(ckpt.start_from(path, models, facts))
    if cfg.selfcheck and engine.needs_selfcheck:
        say(check_engine(engine, roles["policy"].model, inputs.problems))
    start = saved["step"]
    log = dist.together(Logger, out, cfg, world.main, start, facts["noted"], planned, own)
    saver = ckpt.Saver(out, models, cfg, facts, start if own else None, log.alarm)
    gc.freeze()  # otherwise every garbage collection scans the objects made so far
    return Run(
        cfg=cfg,
        world=world,
        **inputs._asdict(),
        **roles,
        engine=engine,
        start=start,
        lengthened=saved["config"]["steps"] == start < cfg.steps,
        carried=ckpt.read_carried(path)[world.rank :: world.size] if resumes else [],
        solved=facts["solved"],  # Saver has the same dict, and saves it
        saver=saver,
        log=log,
        lock=lock,
    )


def with_checkpoint(
    cfg: Config,
    world: dist.World,
    path: Path | None,
    resumes: bool,
) -> tuple[Config, Facts]:
    """Returns a pair:
    1. the run's config, with the values that the checkpoint decides
    2. the content of the checkpoint's state.json; NEW if the run does not resume

    path, resumes: the results of `checkpoint_of`"""
    if not resumes:
        return replace(cfg, start_from=str(path or "")), NEW
    saved = ckpt.read_state(path)
    begun = saved["config"]["start_from"]  # the path RUN/ckpt/step_… of a checkpoint, or ""
    # --start_from may name the same run again, or a run whose checkpoint no longer exists (None).
    if cfg.start_from and ckpt.run_of(cfg.start_from) not in (None, Path(begun).parent.parent):
        raise UserError(
            f"{path} began from {begun or '--model'}, not from {cfg.start_from}; "
            "needed: another --out, or the same command without --start_from"
        )
    cfg = replace(cfg, start_from=begun, resume="auto")
    # --engine auto means the engine that the run had before.
    if cfg.engine == "auto" and cfg.tp == 1 and world.device.type == "cuda":
        before = saved["config"]["engine"]  # "auto" in old checkpoints, when it was vllm
        cfg = replace(cfg, engine="vllm" if before == "auto" else before)
    if saved["ranks"] == world.size:
        cfg = as_before(cfg, saved["config"])
    return cfg, saved


def as_before(cfg: Config, before: Facts) -> Config:
    """Returns the config with the checkpoint's values in place of --shard_ranks auto and --pack_len 0. So
    gradients are rounded as before.

    before: the checkpoint's config"""
    if cfg.shard_ranks == "auto":
        cfg = replace(cfg, shard_ranks=before["shard_ranks"])
    if cfg.pack_len == 0:
        cfg = replace(cfg, pack_len=before["pack_len"])
    return cfg


class Inputs(NamedTuple):
    """What a run reads, except for the models."""

    problems: list[Problem]
    held_out: Sets
    tokenizer: Any
    grader: Grader


def read_inputs(cfg: Config, say: Say, on_error: ExitStack) -> tuple[Config, Inputs]:
    """Returns a pair: the config, with `date` as `set_template` sets it; and the inputs of the run.

    on_error: see `load`"""
    tokenizer = dist.together(load_tokenizer, cfg.model)
    day = cfg.date
    cfg = dist.together(set_template, tokenizer, cfg)
    require(
        cfg.date == day or day == Config.date,
        f"--date {day} has no effect: no chat template prints today's date",
        "no --date; for Llama 3.1: --template_args 'date_string=\"31 Jan 2026\"'",
    )
    # The grader is made first: load_data keeps the rows' fields only if a reward function reads them.
    grader = dist.together(make_grader, cfg, say)
    on_error.push(grader)
    problems, held_out = dist.together(load_data, cfg, tokenizer, say, grader.reads_rows)
    return cfg, Inputs(problems, held_out, tokenizer, grader)


def state_of(
    cfg: Config,
    world: dist.World,
    inputs: Inputs,
    saved: Facts,
) -> Facts:
    """Returns the content of state.json, without the step. Raises UserError if ranks read different files, or
    if an evaluation set of the checkpoint has another name now."""
    read, noted = dist.together(facts_of, cfg, *inputs)
    check_same("reads", read | noted, "the same files on every machine")
    # Names that the checkpoint gives evaluation sets: hash of the problems -> "--eval_data NAME"
    before = {mark: name for name, mark in saved["read"].items() if name.startswith("--eval_data ")}
    for name in map("--eval_data {}".format, inputs.held_out):
        old = before.get(read[name], name)  # the name that this set had
        require(
            old in read,
            f"{old} of the checkpoint would get another name, {name}",
            "its old file name, and another name for a new file (ln -s FILE OTHER.jsonl)",
        )
    # Problems that were solved in the interrupted step do not count, because the step is repeated.
    solved = {int(i): step for i, step in saved["solved"].items() if step <= saved["step"]}
    # A run may be resumed without an evaluation set or a model that it read before. The old entry of "read"
    # stays, so that the content is compared if a later resume uses this set or model again.
    remembered = saved["read"] | read
    if world.device.type == "cpu":  # another number of threads sums in another order
        noted["threads of a rank"] = torch.get_num_threads()
    return {
        "config": vars(cfg),
        "ranks": world.size,
        "read": remembered,
        "noted": noted,
        "solved": solved,
    }


@dist.phase("start/data")
def load_data(
    cfg: Config,
    tokenizer: Any,
    say: Say,
    keep_fields: bool,
) -> tuple[list[Problem], Sets]:
    """Returns the problems of --data, and the evaluation sets. Raises UserError if a file can't be used or a
    check fails."""
    check_vocabularies(cfg, tokenizer)
    problems = load_problems(cfg.data, tokenizer, cfg, say, keep_fields=keep_fields)
    held_out = load_sets(cfg, tokenizer, say, keep_fields) if cfg.eval_every else {}
    known = {p.ids for p in problems}  # prompts of --data
    for name, part in held_out.items():
        same = sum(p.ids in known for p in part)
        if same:
            say(f"evaluation set {name}: {same} of {len(part)} prompts are also in --data")
    sets = [problems, *held_out.values()]
    check_graders(sets, cfg)
    check_tokens(sets, load_config(cfg.model))
    check_parts(problems, tokenizer, cfg)
    return problems, held_out


@dist.phase("start/models")
def load_models(case: plan.Case, world: dist.World) -> dict[str, Role]:
    """Returns a dict: name in cfg.models (policy, critic, ref) -> its Role. The models are sharded. With
    --lora, roles that start from the policy's model share its frozen base."""
    cfg = case.cfg
    device = "cpu" if case.offloads else world.device
    roles = {}
    bases = {}  # role that loaded a base (a model without adapters) -> the base
    for who in cfg.models:
        load_model = load_policy
        if who == "critic":
            load_model = partial(load_critic, seed=cfg.seed)
        path = source_of(who, vars(cfg))
        shard = partial(
            dist.shard,
            over=dist.mesh(world, case.shards),
            dtype=world.dtype,
            recompute=case.recompute.get(who, 0),  # the reference has no backward pass
        )
        if cfg.lora:
            owner = "policy" if path == cfg.model else who  # whose base this role uses
            if owner not in bases:
                frozen = partial(freeze, shard, cfg.lora, cfg.lora_alpha, world.dtype)
                bases[owner] = load_model(path, device, frozen)
            model = Adapted(bases[owner], cfg.seed, who == "critic").to(world.device)
            if who == "ref" and not cfg.keeps_ref:
                model.adapters.clear()  # this ref is the base and never changes: they would stay 0
        else:
            model = load_model(path, device, shard)
        roles[who] = Role(who, model, None)
        if who == "ref":
            model.requires_grad_(False)
        else:
            roles[who].optimizer = make_optimizer(model, getattr(cfg, f"{who}_lr"), cfg)
    return roles


def make_optimizer(
    model: nn.Module,
    lr: float,
    cfg: Config,
) -> torch.optim.Optimizer:
    """Returns a new AdamW optimizer. Checkpoints save its state. Another optimizer: see docs/forking.md."""
    options = dict(betas=cfg.betas, eps=cfg.adam_eps, weight_decay=cfg.weight_decay)
    return torch.optim.AdamW(model.parameters(), lr, **options, fused=True)


def stop(run: Run, step: int) -> None:
    """Save a checkpoint after `step` finished steps."""
    # If the first save fails, the second one succeeds or raises UserError. Else the second one saves nothing.
    for _ in range(2):
        run.saver.save(step, run.carried)
        run.saver.finish()


def finish(run: Run) -> None:
    """Save the last checkpoint, and export policy and critic to export/."""
    steps = run.cfg.steps  # number of steps that have finished
    stop(run, steps)
    out = run.log.out
    for role in filter(None, (run.policy, run.critic)):
        who = role.name
        source = source_of(who, vars(run.cfg))
        weights = dist.full_weights(role.model, run.world.device)
        facts = ckpt.marker(out, steps, who, run.saver.facts)
        folder = out / "export" / who
        if run.start == steps == read_json(folder / ckpt.MARKER).get("step"):
            continue  # a finished run that was started again
        ckpt.export_hf(weights, role.model, run.tokenizer, source, folder, facts)
