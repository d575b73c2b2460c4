"""The loop: reinforcement learning from verifiable rewards, PPO with its own critic or a critic-free GRPO.

    torchrun --nproc-per-node 2 train.py tiny-ppo --steps 30
    torchrun --nnodes 4 --nproc-per-node 8 … train.py orz-7b --layout production --model PATH --data FILE
    python train.py PRESET --help

One process per GPU, all running this same program. Each step: the engine wakes with the policy's weights and samples,
answers are graded meanwhile, samples are laid out in packs of equal work, and critic and policy take their updates.
Reads top down: `main` is the paper's algorithm, the functions below it are its lines.

Departs from Open-Reasoner-Zero: losses are divided by token counts of the whole update over all ranks, so a run doesn't
depend on how many ranks or packs it took; no sample is dropped or repeated; the old log-prob pass is left out where the
ratio is 1 anyway.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from configs import Config, UserError, check_ranks, need, parse

if __name__ == "__main__":  # before torch is imported: --help and typing mistakes are answered at once
    try:
        CONFIG = parse()
    except UserError as e:
        sys.exit(f"train.py: {e}" if os.environ.get("RANK", "0") == "0" else 2)

import torch
from torch import Tensor, nn
from tqdm import tqdm

import ckpt
import dist
import grpo
import plan
import ppo
from data import Pack, Problem, Sample, assign, batch_at, by_prompt, epoch_len, fingerprint, load_problems, pack, spare_at
from log import Logger, Meter, story
from model import load_critic, load_policy, load_tokenizer, logprobs, values
from reward import REASONS, Grader
from rollout import (
    TRAIN,
    Engine,
    VLLMEngine,
    check_prompts,
    evaluate,
    make_engine,
    make_grader,
    reflections,
    repetition,
    rollout,
    row_of,
    selfcheck,
    share,
)

SHOWN = 8  # prompts of a step whose samples go to samples/


@dataclass
class Trainee:
    """A model in training: its shards, its optimizer, its name in logs and checkpoints."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    skipped: int = 0  # updates in a row that were not finite


@dataclass
class Run:
    """Everything that a run has, once it is ready to take its first step."""

    cfg: Config  # its length in steps
    world: dist.World
    problems: list[Problem]
    held_out: dict[str, list[Problem]]
    tokenizer: Any
    grader: Grader
    engine: Engine
    policy: Trainee
    critic: Trainee | None
    ref: nn.Module | None
    start: int  # steps done by the run that this one continues
    saver: ckpt.Saver
    log: Logger


def main(cfg: Config) -> None:
    """Train as cfg says. Raises UserError, the same on every rank, for what a user can mend."""
    run = prepare(cfg)
    with dist.heed_signals(cfg.grace):
        done = train(run)
        if done:
            finish(run)
        else:
            run.log.say(f"asked to stop: {run.saver.saved} steps are saved in {run.saver.out}; the same command goes on there")
    run.grader.close()
    run.log.close()
    gc.unfreeze()  # in a notebook the next run needs the memory
    if done and run.world.main:
        print(story(Path(os.path.relpath(run.log.out))))


def train(run: Run) -> bool:
    """The algorithm. Returns whether it came to its end; false: it was asked to stop, and has saved its whole steps."""
    cfg, world, engine, policy, critic, ref, log = run.cfg, run.world, run.engine, run.policy, run.critic, run.ref, run.log
    for step in range(run.start, cfg.steps + 1):
        began, meter, metrics, last = time.perf_counter(), Meter(world.device), {}, step == cfg.steps
        with engine.awake(dist.full_weights(policy.model, world.device), version=step):
            if run.held_out and (step % cfg.eval_every == 0 or last):
                with dist.phase("eval"):
                    metrics |= evaluate_all(run, step)
            if not last:
                with dist.phase("rollout"):
                    batch, samples = sample_step(run, step, meter)
        with dist.phase("wait"):  # for the slowest engine
            stopping = dist.stop_asked()
        if stopping:  # nothing of this step has been learned yet
            return stop(run, step)
        if last:
            if metrics:
                log.step(step, metrics)
            break
        with dist.phase("pack"):
            if cfg.algo == "grpo":
                samples = add_group_advantages(samples, cfg)
            parts = make_packs(samples, step, cfg, world, policy.model)
            measure_work(meter, samples, parts, policy.model, cfg)
            if step % (cfg.eval_every or 10) == 0:
                log.rows("samples", step, dist.gather_rows([row_of(s, batch[s.slot]) for s in samples if s.slot < SHOWN]))
        if ref:
            with dist.phase("ref"), dist.resident(ref, None, world.device, cfg.offload):
                parts = each(parts, lambda p: replace(p, ref_logp=frozen(logprobs, ref, p, cfg.temperature)[0]))
        if cfg.policy_updates > 1 or (ref and cfg.kl_in == "reward"):
            with dist.phase("old_logp"), resident(policy, world, cfg):
                parts = each(parts, lambda p: replace(p, old_logp=frozen(logprobs, policy.model, p, cfg.temperature)[0]))
        if critic:
            with dist.phase("critic"), resident(critic, world, cfg):
                parts = estimate_advantages(critic, parts, cfg, meter)
                train_critic(critic, parts, step, cfg, meter, log)
        elif cfg.advantage == "group_mean_whiten":
            parts = whiten_advantages(parts)
        if step >= cfg.freeze_policy_steps:
            with dist.phase("policy"), resident(policy, world, cfg):
                train_policy(policy, parts, step, cfg, meter, log)
        if ref and cfg.ref_refresh and epoch_ends(run, step):
            refresh(ref, policy.model)

        if cfg.save_every and (step + 1) % cfg.save_every == 0 and step + 1 < cfg.steps:
            with dist.phase("save"):
                log.alarm(run.saver.save(step + 1))
        metrics |= report(meter, cfg, world, engine, began)
        log.step(step, metrics)
        if cfg.verbose:
            log.say(engine.ledger.table())
        check_gap(metrics, cfg)
        log.alarm(engine.ledger.news(metrics["mem/residual_gb"]))
        log.alarm(run.saver.news())
        if dist.stop_asked():
            return stop(run, step + 1)
    return True


def stop(run: Run, step: int) -> bool:
    """Save a run that was asked to stop after `step` whole steps."""
    run.log.alarm(run.saver.save(step, wait=True))
    return False


def finish(run: Run) -> None:
    """The last checkpoint, and what others load: Hugging Face folders of policy and critic."""
    run.log.alarm(run.saver.save(run.cfg.steps, wait=True))
    for t in (run.policy, run.critic) if run.critic else (run.policy,):
        weights, to = dist.full_weights(t.model, run.world.device), run.log.out / "export" / t.name
        ckpt.export_hf(weights, t.model, run.tokenizer, run.cfg.model, to)


# --- starting


def prepare(cfg: Config) -> Run:
    """Check, load and resume. Raises UserError, the same on every rank."""
    world = dist.init(cfg.device, cfg.dtype, cfg.stall_limit)
    check_ranks(cfg, world.size)
    out = ckpt.preflight(cfg)
    say = print if world.main else lambda text: None
    tokenizer = load_tokenizer(cfg.model)
    problems = load_problems(cfg.data, tokenizer, cfg, say)
    held_out = {Path(p).stem: load_problems([p], tokenizer, cfg, say) for p in cfg.eval_data if cfg.eval_every}
    cfg = cfg.with_steps(epoch_len(problems))
    told = check_plan(cfg, world, epoch_len(problems), say)
    grader = make_grader(cfg)
    engine = make_engine(cfg.model, tokenizer, cfg, world.device, world.dtype)
    policy, critic, ref = load_models(cfg, world)
    models = {t.name: (t.model, t.optimizer) for t in (policy, critic) if t}
    models |= {"ref": (ref, None)} if ref and cfg.ref_refresh else {}  # else it is --model
    facts = {"config": asdict(cfg), "problems": fingerprint(problems), "versions": ckpt.VERSIONS}
    found = ckpt.find(out, cfg.resume)
    start = ckpt.resume(found, models, facts) if found else 0
    agreed = check_engine(engine, policy, problems, world, cfg) if cfg.selfcheck and isinstance(engine, VLLMEngine) else ""
    elsewhere = found is not None and found.parent.parent != out
    saver = ckpt.Saver(out, models, cfg, facts, None if elsewhere else start, aside=isinstance(engine, VLLMEngine))
    log = Logger(out, cfg, world.main, start, ckpt.VERSIONS)
    log.plan(told)
    if agreed:
        log.say(agreed)
    if found:
        log.say(f"resumed after {start} steps from {found}")
    gc.freeze()  # what is here now stays; else Python looks through all of it again and again, 0.2 s each time
    return Run(cfg, world, problems, held_out, tokenizer, grader, engine, policy, critic, ref, start, saver, log)


def check_plan(cfg: Config, world: dist.World, problems: int, say: Callable[[str], None]) -> dict[str, str]:
    """Print the plan for the devices that are there, and return it for the report. Raises UserError, the same on every rank,
    where it can't fit them."""
    cuda = world.device.type == "cuda"
    seen = (torch.cuda.mem_get_info()[1] if cuda else 0, plan.host_memory())
    memory, host = (min(x) for x in zip(*dist.gather(seen), strict=True))
    case = plan.case_of(cfg, world.size, ckpt.shapes(cfg), plan.gpu_of(torch.cuda.get_device_name(), memory) if cuda else None,
                        local=int(os.environ.get("LOCAL_WORLD_SIZE", world.size)), host=host, problems=problems)
    rows = plan.sections(case)
    say("\n".join(plan.lines(rows)))
    lack = plan.misfit(case)
    need(not lack, lack, lack and plan.fix(case))
    say(f"\n{plan.verdict(case)}\n")
    return plan.as_text(rows)


def check_engine(engine: Engine, policy: Trainee, problems: Sequence[Problem], world: dist.World, cfg: Config) -> str:
    """A line about the agreement of engine and trainer. Raises UserError, the same on every rank, where there is none."""
    def trainers(samples: Sequence[Sample], temperature: float) -> Tensor:
        p = pack(samples).to(world.device)
        with dist.resident(policy.model, None, world.device, cfg.offload):
            return frozen(logprobs, policy.model, p, temperature)[0][p.mask]

    with dist.phase("selfcheck"):
        found = dist.gather(selfcheck(engine, partial(dist.full_weights, policy.model, world.device), trainers,
                                      check_prompts(problems, cfg)))
    dist.times()  # the seconds aren't the first step's
    wrong = next((f"on rank {rank}, {said}" for rank, (said, _) in enumerate(found) if said), "")
    need(not wrong, f"self-check: {wrong}", "that put right, or --no-selfcheck to train on it all the same")
    return f"self-check: engine and trainer agree to {max(gap for _, gap in found):.1e} nats a token"


def load_models(cfg: Config, world: dist.World) -> tuple[Trainee, Trainee | None, nn.Module | None]:
    """Policy, critic (PPO only) and reference (only where its coefficient isn't 0), sharded, in fp32."""
    over = dist.mesh(world, cfg.shard_ranks)
    place = partial(dist.shard, over=over, dtype=world.dtype, checkpoint=cfg.checkpoint_activations)
    home = "cpu" if cfg.offload else world.device

    def trainee(name: str, model: nn.Module, lr: float) -> Trainee:
        # Without `fused` a CPU steps through the parameters one by one.
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=cfg.betas, weight_decay=cfg.weight_decay,
                                      fused=world.device.type == "cpu" or None)
        return Trainee(name, model, optimizer)

    policy = trainee("policy", load_policy(cfg.model, home, place), cfg.policy_lr)
    critic = None
    if cfg.algo == "ppo":
        critic = trainee("critic", load_critic(cfg.critic_model or cfg.model, home, place, cfg.seed), cfg.critic_lr)
    ref = load_policy(cfg.model, home, place).requires_grad_(False) if cfg.kl_coef else None
    return policy, critic, ref


def epoch_ends(run: Run, step: int) -> bool:
    """Whether a pass over the prompts ends in this step."""
    n, per_step = epoch_len(run.problems), run.cfg.prompts_per_step
    return (step + 1) * per_step // n > step * per_step // n


@torch.no_grad()
def refresh(ref: nn.Module, policy: nn.Module) -> None:
    """Make the reference what the policy is now; both are sharded alike."""
    for old, new in zip(ref.parameters(), policy.parameters(), strict=True):
        old.copy_(new)


def resident(who: Trainee, world: dist.World, cfg: Config):
    """`who` has the device while inside."""
    return dist.resident(who.model, who.optimizer, world.device, cfg.offload)


# --- sampling


def sample_step(run: Run, step: int, meter: Meter) -> tuple[list[Problem], list[Sample]]:
    """The step's problems, and this rank's graded samples of them, ordered by (slot, index). What is measured is what the
    policy did on the batch as it was drawn, whatever then replaces a part of it."""
    cfg, batch = run.cfg, batch_at(run.problems, step, run.cfg)
    arrived = [time.perf_counter()]

    def draw(problems: dict[int, Problem], *key: int) -> list[Sample]:
        with run.log.bar("Rollout", len(problems) * cfg.samples_per_prompt) as bar:
            found = rollout(run.engine, run.grader, problems, cfg.samples_per_prompt, cfg.temperature, cfg.max_response_len,
                            (cfg.seed, TRAIN, step, *key), step, partial(asked, cfg, bar, arrived))
        return [shape(s, cfg) for s in found]

    samples = draw(share(batch, run.engine))
    measure_samples(meter, samples)
    meter.add("rollout_tail", arrived[-1] - arrived[int(0.9 * len(arrived))], arrived[-1] - arrived[0])
    if step == 0:
        first_look(run, batch, samples)
    if cfg.resample_rounds and not dist.stop_asked():
        batch, samples = resample(run, step, batch, samples, draw)
    return batch, samples


def first_look(run: Run, batch: Sequence[Problem], samples: Sequence[Sample]) -> None:
    """Before anything is trained: three of the first step's prompts as text and tokens, each with a response, and how all were
    graded. Raises UserError, the same on every rank, where every one scored 0 or most were cut by length, unless --go; all of
    the step's samples are asked, for a base model may be right one time in twenty."""
    cfg, say = run.cfg, run.log.say
    found = dist.gather((Counter(s.reason for s in samples), sum(s.reward != 0 for s in samples),
                         [s for s in samples if s.index == 0 and s.slot < 3]))
    if dist.stop_asked():
        return
    reasons, scored = sum((c for c, _, _ in found), Counter()), sum(n for _, n, _ in found)
    for s in sorted((s for _, _, some in found for s in some), key=lambda s: s.slot):
        text = " ".join(run.tokenizer.decode(list(s.prompt)).split())
        say(f"\nprompt    {text if len(text) < 400 else f'{text[:200]} … {text[-190:]}'}")
        say(f"tokens    {' '.join(map(str, s.prompt[:12]))}{' …' * (len(s.prompt) > 12)} ({len(s.prompt)})")
        say(f"response  {' '.join(s.text.split())[:400] or '(empty)'}")
        say(f"graded    {s.reason}, {s.reward:g}: {s.answer!r}, and it is {batch[s.slot].answer!r}")
    total = sum(reasons.values())
    say(f"\nof the first {total} responses: " + ", ".join(f"{n} {why}" for why, n in reasons.most_common()) + "\n")
    cut, limit = reasons["truncated"], cfg.max_response_len
    need(cfg.go or cut <= total / 2, f"{cut} of the first {total} responses were cut at --max_response_len {limit} and score 0",
         "a larger one, a --template or --stop that lets the model end, or --go to train all the same")
    why = {"unparsed": "a --template that asks for \\boxed{} inside <answer> tags, or another --reward",
           "error": "a --reward that doesn't raise", "timeout": "a larger --grade_deadline"}.get(
               reasons.most_common(1)[0][0], "easier --data, or a --model that is right at times")
    need(cfg.go or scored > 0, f"all of the first {total} responses score 0 ({reasons.most_common(1)[0][0]} mostly)",
         f"{why}, or --go to train all the same")


def shape(s: Sample, cfg: Config) -> Sample:
    """A sample with what its length costs it (DAPO, arXiv 2503.14476, eq. 13), or left out of the loss for it."""
    if not cfg.overlong_buffer and not cfg.mask_truncated:
        return s
    penalty = grpo.overlong_penalty(len(s.ids), cfg.max_response_len, cfg.overlong_buffer) if cfg.overlong_buffer else 0.0
    return replace(s, penalty=penalty, trained=s.stopped or not cfg.mask_truncated)


def resample(run: Run, step: int, batch: list[Problem], samples: list[Sample],
             draw: Callable[..., list[Sample]]) -> tuple[list[Problem], list[Sample]]:
    """Put other prompts in the place of those whose samples all score the same and so teach nothing (DAPO's dynamic sampling),
    for up to --resample_rounds rounds; what is uniform then stays, with advantage 0."""
    cfg, batch = run.cfg, list(batch)
    groups = {g[0].slot: g for g in by_prompt(samples)}
    for round in range(1, cfg.resample_rounds + 1):
        dull = torch.zeros(len(batch), dtype=torch.int64)
        dull[list(groups)] = 1 - grpo.keep_groups(scores([s for g in groups.values() for s in g], cfg)).long()
        slots = dist.all_sum(dull).nonzero()[:, 0].tolist()
        if not slots:
            return batch, [s for slot in sorted(groups) for s in groups[slot]]
        spare = spare_at(run.problems, step, round, cfg)
        for slot in slots:
            batch[slot] = spare[slot]
            groups.pop(slot, None)
        groups |= {g[0].slot: g for g in by_prompt(draw(share({s: batch[s] for s in slots}, run.engine), round))}
    run.log.alarm(f"step {step}: prompts are still uniform after {cfg.resample_rounds} rounds (--resample_rounds), and "
                  "train with advantage 0: the data is too easy or too hard")
    return batch, [s for slot in sorted(groups) for s in groups[slot]]


def asked(cfg: Config, bar: tqdm, arrived: list[float]) -> bool:
    """Called at each response: whether this rank may leave sampling early, for it was asked to stop and no other waits for its
    engine's part. Moves the bar and notes the time."""
    bar.update()
    arrived.append(time.perf_counter())
    return bool(dist.ASKED) and cfg.tp == 1


def evaluate_all(run: Run, step: int) -> dict[str, float]:
    """Scores on every held-out set, all ranks sharing the work; raw outputs go to eval/step_NNNNNN.jsonl."""
    cfg, meter, rows = run.cfg, Meter(), []
    for which, (name, problems) in enumerate(run.held_out.items()):
        part = share(problems, run.engine)
        n = cfg.eval_samples[which % len(cfg.eval_samples)]
        with run.log.bar(f"Eval {name}", len(part) * n) as bar:
            samples, scores = evaluate(run.engine, run.grader, part, cfg, step, which, partial(asked, cfg, bar, []))
        for k, (total, count) in scores.items():
            meter.add(f"eval/{name}/{k}", total, count)
        rows += dist.gather_rows([{"set": name} | row_of(s, problems[s.slot]) for s in samples])
    run.log.rows("eval", step, rows)
    return meter.reduce(dist.all_sum, dist.all_max)


# --- packs and advantages


def scores(samples: Sequence[Sample], cfg: Config) -> Tensor:
    """(P, n) what each sample of each prompt scored."""
    return torch.tensor([s.score for s in samples], dtype=torch.float64).view(-1, cfg.samples_per_prompt)


def add_group_advantages(samples: list[Sample], cfg: Config) -> list[Sample]:
    """Each sample's advantage over the others of its prompt, which all are on this rank."""
    advantages = grpo.group_advantages(scores(samples, cfg), cfg.advantage).flatten().tolist()
    return [replace(s, advantage=a) for s, a in zip(samples, advantages, strict=True)]


def make_packs(samples: list[Sample], step: int, cfg: Config, world: dist.World, model: nn.Module) -> list[list[Pack]]:
    """The step's samples as parts (one an update of whoever takes more of them) of packs, equal work on every rank."""
    keys = [s.slot * cfg.samples_per_prompt + s.index for s in samples]
    lengths = torch.zeros(cfg.samples_per_step, dtype=torch.int64)
    lengths[keys] = torch.tensor([s.length for s in samples], dtype=torch.int64)
    layers, width = model.config.num_hidden_layers, model.config.hidden_size
    quad = layers * width / sum(p.numel() for p in model.parameters())  # attention's share: 6·layers·width·L of 6N a token
    layout = assign(dist.all_sum(lengths).numpy(), world.size, cfg, step, quad)
    return [[pack(bin).to(world.device) for bin in part] for part in dist.balance(samples, keys, layout)]


def each(parts: list[list[Pack]], f: Callable[[Pack], Pack]) -> list[list[Pack]]:
    """f over every pack."""
    return [[f(p) for p in part] for part in parts]


@torch.no_grad()
def frozen(f: Callable, *args):
    """f without a graph."""
    return f(*args)


def estimate_advantages(critic: Trainee, parts: list[list[Pack]], cfg: Config, meter: Meter) -> list[list[Pack]]:
    """Values, rewards less KL where it goes there, GAE, and advantages whitened over the whole step."""
    def estimate(p: Pack) -> Pack:
        v = frozen(values, critic.model, p)
        rewards = p.rewards
        if cfg.kl_coef and cfg.kl_in == "reward":
            rewards = rewards - torch.where(p.mask, cfg.kl_coef * ppo.kl(p.old_logp, p.ref_logp, cfg.kl_estimator), 0)
        advantages, returns = ppo.gae(rewards, v, p.cu_seqlens, p.mask, cfg.gamma, cfg.lam)
        n, error, r = p.mask.sum(), (returns - v)[p.mask].double(), returns[p.mask].double()
        meter.add("values", v[p.mask].sum(), n)
        meter.add("returns", r.sum(), n)
        meter.add("returns²", (r * r).sum(), n)
        meter.add("error", error.sum(), n)
        meter.add("error²", (error * error).sum(), n)
        return replace(p, values=v, advantages=advantages, returns=returns)

    return whiten_advantages(each(parts, estimate))


def whiten_advantages(parts: list[list[Pack]]) -> list[list[Pack]]:
    """Advantages with mean 0 and deviation 1 over all response tokens of the step, on all ranks."""
    total = dist.all_sum(sum(ppo.moments(p.advantages, p.mask) for part in parts for p in part))
    return each(parts, lambda p: replace(p, advantages=ppo.whiten(p.advantages, p.mask, total)))


# --- updates


def updates_of(parts: list[list[Pack]], count: int) -> list[list[Pack]]:
    """The step's parts joined to `count` updates."""
    size = len(parts) // count
    return [[p for part in parts[i * size:(i + 1) * size] for p in part] for i in range(count)]


def counts(packs: Sequence[Pack]) -> tuple[float, float]:
    """Response tokens and responses of an update on all ranks: the denominators of its losses."""
    tokens, responses = dist.all_sum(torch.tensor([sum(int(p.mask.sum()) for p in packs),
                                                   sum(p.responses for p in packs)])).tolist()
    return max(tokens, 1), max(responses, 1)


def train_critic(critic: Trainee, parts: list[list[Pack]], step: int, cfg: Config, meter: Meter, log: Logger) -> None:
    """The step's critic updates: values towards the returns."""
    updates = updates_of(parts, cfg.critic_updates)
    with log.bar("Critic Train epoch [1/1]", sum(map(len, updates))) as bar:
        for i, packs in enumerate(updates):
            tokens, _ = counts(packs)
            lr = cfg.lr("critic", step, i)
            for p in packs:
                v = values(critic.model, p)
                loss = ppo.value_loss(v, p.values, p.returns, p.mask, tokens, cfg.value_clip)
                loss.backward()
                meter.add("value_loss", loss * tokens, p.mask.sum())
                if not bar.disable:
                    mean = v.sum().item() / max(int(p.mask.sum()), 1)
                    bar.set_postfix({"critic_loss": f"{loss.item():.4f}", "values": f"{mean:.3f}", "critic_lr": f"{lr:.1e}"})
                bar.update()
            update(critic, packs, lr, step, cfg, meter, log)


def train_policy(policy: Trainee, parts: list[list[Pack]], step: int, cfg: Config, meter: Meter, log: Logger) -> None:
    """The step's policy updates."""
    updates = updates_of(parts, cfg.policy_updates)
    with log.bar("Actor Train epoch [1/1]", sum(map(len, updates))) as bar:
        for i, packs in enumerate(updates):
            tokens, responses = counts(packs)
            lr = cfg.lr("policy", step, i)
            for p in packs:
                loss, entropy = policy_pack_loss(policy.model, p, tokens, responses, cfg, meter)
                loss.backward()
                if not bar.disable:
                    n = max(p.responses, 1)
                    bar.set_postfix({
                        "pg": f"{loss.item():.4f}", "ret": f"{p.rewards.sum().item() / n:.3f}",
                        "glen": f"{p.mask.sum().item() / n:.0f}", "tlen": f"{len(p.tokens) / n:.0f}",
                        "kl": f"{meter.sums.get('kl', torch.zeros(2))[0]:.1e}", "act_lr": f"{lr:.1e}", "ent": f"{entropy:.2f}"})
                bar.update()
            update(policy, packs, lr, step, cfg, meter, log)


def policy_pack_loss(model: nn.Module, p: Pack, tokens: float, responses: float, cfg: Config,
                     meter: Meter) -> tuple[Tensor, float]:
    """A pack's share of its update's loss, and its mean entropy; measures the engine's mismatch on the way."""
    logp, entropy = logprobs(model, p, cfg.temperature)
    old = logp.detach() if p.old_logp is None else p.old_logp
    n = p.mask.sum()
    weight = measure_gap(old, p, cfg, meter)
    if cfg.algo == "ppo":
        loss, clipped = ppo.policy_loss(logp, old, p.advantages, p.mask, tokens, cfg.clip_low, cfg.clip_high, weight)
    else:
        segment = ppo.segment_ids(p.cu_seqlens)
        weights = grpo.token_weights(p.mask, segment, cfg.aggregation, tokens, responses, cfg.max_response_len)
        loss, clipped = grpo.policy_loss(logp, old, p.advantages, p.mask, segment, weights, cfg.ratio, cfg.clip_low,
                                         cfg.clip_high, weight)
    meter.add("policy_loss", loss * tokens, n)
    meter.add("clip_share", clipped, n)
    total_entropy = torch.where(p.mask, entropy, 0).sum()
    meter.add("entropy", total_entropy, n)
    if p.ref_logp is not None:
        divergence = torch.where(p.mask, ppo.kl(logp, p.ref_logp, cfg.kl_estimator), 0).sum()
        meter.add("kl", divergence, n)
        if cfg.kl_in == "loss":
            loss = loss + cfg.kl_coef * divergence / tokens
    if cfg.entropy_coef:
        loss = loss - cfg.entropy_coef * total_entropy / tokens
    return loss, total_entropy.item() / max(int(n), 1)


def measure_gap(logp: Tensor, p: Pack, cfg: Config, meter: Meter) -> Tensor | None:
    """Measure how far the engine's log-probs are from the trainer's; returns the truncated importance weights (T,) that
    correct for it, or None where tis_clip is."""
    gap = (logp - p.engine_logp)[p.mask]
    weight = gap.exp() if cfg.tis_clip is None else gap.exp().clamp(max=cfg.tis_clip)
    meter.spread("logp_gap", gap.abs())
    meter.add("tis/mean", weight.sum(), len(gap))
    meter.add("tis²", (weight * weight).sum(), len(gap))
    return None if cfg.tis_clip is None else torch.zeros_like(logp).masked_scatter(p.mask, weight)


def update(who: Trainee, packs: list[Pack], lr: float, step: int, cfg: Config, meter: Meter, log: Logger) -> None:
    """One optimizer step on the gradients that are there. Where they aren't finite, the same on all ranks, it is left out and
    its packs are kept in nonfinite/ for a look. Raises RuntimeError at the third in a row."""
    norm = dist.clip_grad_norm(who.model, cfg.grad_clip)
    finite = bool(norm.isfinite())
    who.skipped = 0 if finite else who.skipped + 1
    for group in who.optimizer.param_groups:
        group["lr"] = lr
    if finite:
        who.optimizer.step()
    else:
        kept = log.dump(f"nonfinite/step_{step:06d}_{who.name}", packs)
        log.alarm(f"the {who.name}'s gradient is not finite; its update is left out, its packs are in {kept}", step)
    who.optimizer.zero_grad(set_to_none=True)
    meter.add(f"grad_norm/{who.name}", norm if finite else 0.0, finite)
    meter.add(f"lr/{who.name}", lr, 1)
    meter.add("skipped_updates", float(not finite), 1)
    if who.skipped == 3:
        raise RuntimeError(f"three updates of the {who.name} in a row were not finite; the checkpoints are of before")


# --- metrics


def measure_samples(meter: Meter, samples: Sequence[Sample]) -> None:
    """What the step's samples were like, with Open-Reasoner-Zero's diagnostics."""
    n, lengths = len(samples), [len(s.ids) for s in samples]
    right = [s.reward > 0 for s in samples]
    groups = by_prompt(samples)
    meter.add("reward", sum(s.reward for s in samples), n)
    meter.add("pass@n", sum(any(s.reward > 0 for s in g) for g in groups), len(groups))
    meter.add("uniform_groups", sum(len({s.reward for s in g}) == 1 for g in groups), len(groups))
    meter.add("response_len", sum(lengths), n)
    meter.add("response_len²", sum(x * x for x in lengths), n)
    meter.add("response_len/right", sum(x for x, r in zip(lengths, right, strict=True) if r), sum(right))
    meter.add("response_len/wrong", sum(x for x, r in zip(lengths, right, strict=True) if not r), n - sum(right))
    meter.add("truncated", sum(not s.stopped for s in samples), n)
    meter.add("penalty", sum(s.penalty for s in samples), n)
    meter.add("reflections", sum(reflections(s.text) for s in samples), n)
    meter.add("repetition", sum(repetition(g[0].text) for g in groups), len(groups))  # of one each: it costs
    reasons = Counter(s.reason for s in samples)
    for reason in REASONS:
        meter.add(f"grade/{reason}", reasons[reason], n)


def measure_work(meter: Meter, samples: Sequence[Sample], parts: list[list[Pack]], model: nn.Module, cfg: Config) -> None:
    """Tokens that are trained on, how many of them are computed, and the FLOP that it takes: 6N a computed token and what
    attention takes."""
    tokens, packs = sum(s.length for s in samples), [p for part in parts for p in part if p.responses]
    computed = sum(len(p.computed) for p in packs)
    meter.add("tokens", tokens, 0)
    meter.add("computed", computed, sum(len(p.tokens) for p in packs))
    layers, width, size = model.config.num_hidden_layers, model.config.hidden_size, sum(p.numel() for p in model.parameters())
    passes = (2 if cfg.algo == "ppo" else 1) + (0 if cfg.algo == "grpo" else 1 / 3)  # critic's values: a forward, a third
    meter.add("flops", passes * (6 * size * computed + 6 * layers * width * sum(s.length**2 for s in samples)), 0)


def report(meter: Meter, cfg: Config, world: dist.World, engine: Engine, began: float) -> dict[str, float]:
    """The step's metrics over all ranks. Names ending in ² are second moments, used here and not shown."""
    with dist.phase("report"):
        peaks = engine.ledger.metrics() | {
            "mem/host_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # KiB on Linux
        if world.device.type == "cuda":
            peaks["mem/device_peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
        for name, value in peaks.items():
            meter.most(name, value)
        m = meter.reduce(dist.all_sum, dist.all_max)
    if "returns²" in m:
        spread = m["returns²"] - m["returns"] ** 2
        m["explained_variance"] = 1 - (m["error²"] - m["error"] ** 2) / spread if spread > 1e-12 else 0.0
        m.pop("error")
    m["response_len/std"] = max(m["response_len²"] - m["response_len"] ** 2, 0.0) ** 0.5
    if m.get("tis²"):
        m["ess"] = m["tis/mean"] ** 2 / m["tis²"]
    seconds = time.perf_counter() - began
    m |= {f"time/{k}": v for k, v in dist.times().items()} | {"time/step": seconds, "tokens_per_s": m["tokens"] / seconds}
    m["tflops"] = m.pop("flops") / (seconds * world.size * 1e12)
    peak = plan.gpu_of(torch.cuda.get_device_name(), 0).flops if world.device.type == "cuda" else 0
    if peak:
        m["mfu"] = m["tflops"] * 1e12 / peak
    return {k: v for k, v in m.items() if not k.endswith("²")}


def check_gap(metrics: dict[str, float], cfg: Config) -> None:
    """Stop where engine and trainer disagree on what they sample from: training on it would be on noise."""
    gap = metrics.get("logp_gap/mean", 0.0)
    if gap > cfg.max_logp_gap:
        raise UserError(f"engine and trainer differ by {gap:.3g} nats a token on average (--max_logp_gap {cfg.max_logp_gap}); "
                        "likely causes, in order: weights that didn't arrive, a stale prefix cache, another temperature, "
                        "another dtype; needed: a fix, or a larger --max_logp_gap for a dtype known to be rough")


if __name__ == "__main__":
    try:
        main(CONFIG)
    except UserError as e:
        sys.exit(f"train.py: {e}" if os.environ.get("RANK", "0") == "0" else 2)
    except Exception:
        print(f"rank {os.environ['RANK']} on {os.uname().nodename} failed in phase {dist.NOW[0]}:", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: threads that wait for other ranks must not keep this one, and so all of them, alive
