"""Functions that tests run on several ranks with conftest.run_ranks."""

import ctypes
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.utils.tensorboard  # noqa: F401  loaded once here, not in each forked rank
from conftest import Operations, wait_until
from torch.distributed.tensor import DTensor

from configs import parse
from guard.messages import UserError
from log import Logger, Meter, read_metrics

matplotlib.use("Agg")
import matplotlib.pyplot  # noqa: E402, F401

import ckpt
import data
import dist
import model
import train
from engines import vllm_engine
from guard import start
from guard.checks import case_of, check_gold
from guard.selfcheck import selfcheck
from guard.start import load_models
from guard.watch import handle_signals, watch
from rollout import Sampling, load_sets, make_grader, rollout


def make_samples(count: int, seed: int = 0, vocabulary: int = 100) -> list[data.Sample]:
    g = np.random.default_rng(seed)
    out = []
    for i in range(count):
        if i % 4 == 0:
            prompt = tuple(g.integers(3, vocabulary, g.integers(2, 9)).tolist())
        ids = g.integers(3, vocabulary, g.integers(1, 25)).astype(np.int32)
        if i % 4 == 1:
            before = out[-1].ids
            ids[:5] = before[:5][:len(ids)] if len(ids) <= len(before) else ids[:5]
        logp = -g.random(len(ids)).astype(np.float32) * 5
        reward, advantage = float(g.integers(0, 2)), float(g.standard_normal())
        out.append(data.Sample(i // 4, i % 4, prompt, ids, logp, True, "", 0, reward=reward,
                               advantage=advantage))
    return out


def meet(port: int, late: int) -> tuple[int, bool]:
    """Joins a process group at `port`, rank `late` one second after the others. Returns the sum of rank + 1
    over all ranks, and whether this group sees the "key" that an earlier group at this port has set."""
    os.environ["MASTER_PORT"] = str(port)
    if int(os.environ["RANK"]) == late:
        time.sleep(1)
    dist.init("cpu", "float32", stall_limit=10)
    total = int(dist.all_sum(torch.tensor(dist.td.get_rank() + 1)))
    store = dist.td.distributed_c10d._get_default_store()
    has_old_key = store.check(["key"])
    dist.gather(None)
    store.set("key", "")
    return total, has_old_key


def all_gradients(jobs) -> list[dict]:
    return [gradients(*job) for job in jobs]


LOADED = {}  # settings of the models -> roles (see load_models), which several jobs use


def gradients(cfg, samples, accumulate=dist.accumulate) -> dict[str, torch.Tensor]:
    """Computes the gradients of one update of policy and critic. Returns a dict: name -> whole gradient, and

    "metrics": name -> value over all ranks
    "packs": number of this rank's packs
    "sent": numbers of FSDP's all-gathers and all-reduces"""
    world = dist.init("cpu", "float32")
    models = (cfg.model, cfg.critic_model, cfg.ref_model, cfg.lora, cfg.algo, cfg.kl_coef > 0,
              cfg.shard_ranks, cfg.recompute)
    if models not in LOADED:
        LOADED[models] = load_models(case_of(cfg, world), world)
        if ref := LOADED[models].get("ref"):
            with torch.no_grad():
                for p in ref.model.parameters():
                    p.mul_(0.9)
    policy, critic, ref = map(LOADED[models].get, ("policy", "critic", "ref"))
    mine = [s for s in samples if s.prompt_id % world.size == world.rank]
    minibatches = train.make_packs(mine, 0, cfg, world, policy.model, Meter())
    counts = dist.gather([len(packs) for packs in minibatches])
    assert all(of_rank == counts[0] for of_rank in counts)
    meter = Meter()
    if ref:
        minibatches = train.add_logp(minibatches, "ref_logp", ref, cfg)
    if critic:
        minibatches = train.estimate_advantages(critic, minibatches, cfg, meter)
    elif cfg.advantage == "group_mean_whiten":
        minibatches = train.whiten_advantages(minibatches)
    packs = train.updates_of(minibatches, 1)[0]
    denominators = train.counts(packs)
    sent = Operations(lambda op: re.search("allgather|allreduce|$", op.name())[0])
    out = {}
    for role, pack_loss in ((policy, train.policy_pack_loss), (critic, train.critic_pack_loss)):
        if role:
            with sent:
                for p in accumulate(role.model, packs):
                    pack_loss(role.model, p, *denominators, cfg, meter).backward()
            out |= {f"{role.name}.{n}": full(p.grad) for n, p in role.model.named_parameters()}
            role.model.zero_grad()
    metrics = meter.reduce()
    return out | {"metrics": metrics, "packs": len(packs),
                  "sent": [sent.counts[kind] for kind in ("allgather", "allreduce")]}


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def weights(path: str) -> dict[str, torch.Tensor]:
    world = dist.init("cpu", "float32")
    shard_fn = train.partial(dist.shard, over=dist.mesh(world), dtype=torch.float32)
    policy = model.load_policy(path, "cpu", shard_fn)
    first = {n: t.clone() for n, t in dist.full_weights(policy)}
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in policy.parameters())
    whole = sum(t.numel() for t in first.values())
    assert held < 1.2 * whole / world.size + 1000  # each rank holds only its shards
    return first


def one_rank_with_and_without_fsdp(path: str) -> list[dict[str, torch.Tensor]]:
    """Returns log-probs, gradients and weights for the engine of a policy that computes in bf16 on one rank:
    as dist.shard makes it, with 0, 1 and 2 recomputed layers, and sharded by FSDP over a mesh of one rank."""
    world, found = dist.init("cpu", "bfloat16"), []
    packs = [data.pack(make_samples(8, seed)) for seed in range(3)]
    over = dist.mesh(world)

    def by_fsdp(policy):
        policy.compute_dtype = torch.bfloat16
        precision = dist.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
                                              cast_forward_inputs=False)
        for group in (*policy.model.layers, policy):
            dist.fully_shard(group, mesh=over, mp_policy=precision)
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
        return policy

    ways = [train.partial(dist.shard, over=over, dtype=torch.bfloat16, recompute=n) for n in (0, 1, 2)]
    for way in (*ways, by_fsdp):
        policy, result = model.load_policy(path, "cpu", way), {}
        for i, pack in enumerate(dist.accumulate(policy, packs)):
            logp, entropy = policy(pack, 0.7)
            (logp.sum() + 0.1 * entropy.sum()).backward()
            result[f"logp {i}"] = logp.detach()
        for name, p in policy.named_parameters():
            assert p.dtype == p.grad.dtype == torch.float32
            result[f"gradient {name}"] = dist.local(p.grad)
        result |= {f"weight {n}": t.clone() for n, t in dist.full_weights(policy)}
        assert result["weight model.norm.weight"].dtype == torch.bfloat16
        found.append(result)
    return found


def updates_with_moves(path: str) -> list[dict[str, torch.Tensor]]:
    """Makes three updates twice: with moves of model and optimizer between host and device, and without.
    Returns the weights and optimizer states of both."""
    world, p = dist.init("cpu", "bfloat16"), data.pack(make_samples(5))
    shard_fn = train.partial(dist.shard, over=dist.mesh(world), dtype=torch.bfloat16)
    results = []
    for moves in (True, False):
        policy = model.load_policy(path, "cpu", shard_fn)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, fused=True)
        for _ in range(3):
            if moves:
                dist.move(policy, None, "cpu")
                assert all(x.isfinite().all() for _, x in dist.full_weights(policy))
                dist.move(policy, None, None)
                dist.move(policy, optimizer, "cpu")
            policy(p, 1.0)[0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if moves:
                dist.move(policy, optimizer, None)
        results.append({k: dist.local(x).clone() for k, x in dist.tensors_of(policy, optimizer).items()})
    return results


def message_of(function, *args) -> str:
    """Returns the message of the user error that function(*args) raises, or ""."""
    try:
        function(*args)
    except UserError as e:
        return str(e)
    return ""


def resolved(name: str) -> str:
    dist.init("cpu", "float32")
    found = []
    return message_of(lambda: found.append(model.resolve(name))) or found[0]


def sharded_logp(paths: list[str]) -> list[torch.Tensor]:
    world, p = dist.init("cpu", "float32"), data.pack(make_samples(5))
    shard_fn = train.partial(dist.shard, over=dist.mesh(world), dtype=torch.float32)
    with torch.no_grad():
        return [model.load_policy(path, "cpu", shard_fn)(p, 0.7)[0] for path in paths]


def in_bf16(path: str) -> tuple[float, bool]:
    """Computes log-probs in bf16. Returns their largest difference from log-probs in fp32, and whether the
    shards' weights and gradients are fp32."""
    world, p = dist.init("cpu", "bfloat16"), data.pack(make_samples(8))
    shard_fn = train.partial(dist.shard, over=dist.mesh(world), dtype=world.dtype)
    policy = model.load_policy(path, "cpu", shard_fn)
    logp, _ = policy(p, 1.0)
    logp.sum().backward()
    gap = (logp - model.load_policy(path)(p, 1.0)[0]).abs().max()
    return float(gap), all(x.dtype == x.grad.dtype == torch.float32 for x in policy.parameters())


def main(cfg, with_report: bool = False) -> str:
    """Trains. Returns the message of a user error, or ""."""
    if not with_report:
        train.report.write_report = lambda folder: None
    return message_of(train.main, cfg)


def in_turn(*cfgs) -> list[str]:
    """Trains with each config, in the same process. Returns the messages of user errors."""
    return [main(cfg) for cfg in cfgs]


def prepared(cfg) -> dict | str:
    """Prepares a run. Returns {"start": its first step, name: whole tensor}, or a UserError's message."""
    try:
        run = train.prepare(cfg)
    except UserError as e:
        return str(e)
    tensors = {f"{role.name}.{k}": full(v).detach().clone() for role in (run.policy, run.critic, run.ref)
               if role for k, v in dist.tensors_of(role.model, role.optimizer).items()}
    run.lock.release()
    return {"start": run.start} | tensors


def has_steps(cfg, count: int) -> bool:
    return sum("reward" in r for r in read_metrics(Path(cfg.out))) >= count


def samples_for_a_second() -> bool:
    """If this rank is sampling, sleeps for a second. Returns whether it was sampling."""
    if sampling := dist.CURRENT.name == "rollout":
        time.sleep(1)
    return sampling


def stopped(cfg, due, *args) -> str:
    """Trains. When due(*args) is true, the last rank sends itself SIGUSR1."""
    def send() -> None:
        while not due(*args):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGUSR1)

    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        threading.Thread(target=send, daemon=True).start()
    return main(cfg)


def elsewhere(cfg, folder: str, other: str) -> str:
    """Trains as if rank 1 ran on another machine, where the path `folder` leads to `other`. Needs root."""
    if os.geteuid():
        return "no root"
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks for an address of the host "other"
    if os.environ["RANK"] == "1":
        libc = ctypes.CDLL(None, use_errno=True)
        new_mounts_and_name, private, bind = 0x20000 | 0x4000000, 0x44000, 0x1000
        if (libc.unshare(new_mounts_and_name) or libc.sethostname(b"other", 5)
                or libc.mount(b"none", b"/", None, private, None)
                or libc.mount(other.encode(), folder.encode(), None, bind, None)):
            os._exit(1)
    return main(cfg)


def not_finite(cfg) -> tuple[bool, bool, str]:
    """Makes five updates, with gradients NaN, 1, infinity, NaN, NaN. Returns whether the first update left
    the weights unchanged, whether the second changed the weights, and the error message of the fifth."""
    world = dist.init("cpu", "float32")
    policy = load_models(case_of(cfg, world), world)["policy"]
    log, meter = Logger(Path(cfg.out), cfg, True, 0, {}, {}), Meter()

    def update(value: float) -> bool:
        before = [p.detach().clone() for p in policy.model.parameters()]
        for p in policy.model.parameters():
            p.grad = torch.full_like(p, value)
        train.update(policy, 1e-3, 0, cfg, meter, log)
        return all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))

    left = update(float("nan")) and not policy.optimizer.state
    moved = not update(1.0) and policy.skipped == 0
    update(float("inf")), update(float("nan"))
    return left, moved, message_of(update, float("nan"))


def gap_checked(cfg, gap: float) -> str:
    """Returns train.check_gap's error message for a gap in nats per token, or ""."""
    dist.init("cpu", "float32")
    meter = Meter()
    meter.add("logp_gap/mean", gap, 1)
    return message_of(train.check_gap, meter, cfg)


def stalled() -> None:
    """Rank 1 hangs in the phase "grading", and rank 0 waits for rank 1."""
    def hang() -> None:
        time.sleep(1000)

    dist.init("cpu", "float32")
    watch(5.0)
    with dist.phase("grading"):
        if os.environ["RANK"] == "1":
            hang()
    with dist.phase("waiting"):
        dist.all_sum(torch.ones(1))


def patient() -> None:
    """Rank 0 waits 9 seconds for rank 1, which makes progress. The limit is 6 seconds."""
    dist.init("cpu", "float32")
    watch(6.0)
    with dist.phase("rollout"):
        for _ in range(90 * int(os.environ["RANK"])):
            dist.progress()
            time.sleep(0.1)
        dist.all_sum(torch.ones(1))


def hears() -> list[bool]:
    """Two runs. In the first, rank 0 gets SIGUSR1 while it waits for rank 1. Returns for each run: whether
    this rank heard of the signal before both ranks met, and the answer of dist.stop_requested."""
    dist.init("cpu", "float32")
    watch(1000.0)
    found = []
    for seconds in (60.0, 2.0):
        with handle_signals(grace=600.0):
            if os.environ["RANK"] == "0":
                if not found:
                    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGUSR1]).start()
            else:
                found.append(wait_until(lambda: dist.stop_signal, seconds))
            found.append(dist.stop_requested())
    return found


def resampled(cfg) -> dict:
    """Samples step 0 with --resample_rounds. Returns:

    drawn, prompts: texts of the prompts before and after some are replaced
    rewards: prompt_id -> rewards, on this rank
    measured: number of prompts in the metric pass@n
    alarms: text of alarms.jsonl"""
    run = train.prepare(cfg)
    meter = Meter()
    with run.engine.awake(dist.full_weights(run.policy.model), version=0):
        batch, samples, _ = train.sample_step(run, 0, meter)
    run.grader.close()
    rewards = {g[0].prompt_id: [s.reward for s in g] for g in data.group_by_prompt(samples)}
    drawn = [p.text for p in data.batch_at(run.problems, 0, cfg)]
    alarms = "".join(file.read_text() for file in Path(cfg.out).glob("alarms.jsonl"))
    return {"drawn": drawn, "alarms": alarms, "prompts": [p.text for p in batch], "rewards": rewards,
            "measured": int(meter.sums["pass@n", 1])}


def turns_in_rounds(engine, policy, prompts, env: str) -> dict:
    """Samples in rounds of 5 tokens, with the environment `env`. Returns (prompt_id, sample_id) -> (tokens,
    number of turns, whether the policy sampled each token)."""
    before = engine.cfg
    engine.cfg = data.replace(before, env=env, stop=tuple("aeiou0123456789"), round_len=5)
    problems = {i: data.Problem(str(i), tuple(ids), "1") for i, ids in prompts.items()}
    with make_grader(engine.cfg) as grader, engine.awake(dist.full_weights(policy), version=3):
        samples, left = rollout(engine, grader, problems, Sampling(3, 1.0, 24, (0, 1, 0), 3), carried=[])
    engine.cfg = before
    assert not left
    return {(s.prompt_id, s.sample_id): (s.ids.tolist(), s.turns, s.is_sampled.tolist()) for s in samples}


def checked(engine, policy, prompts) -> tuple[str, float]:
    """Runs the self-check (guard/selfcheck.py). Returns its error message and its largest gap."""
    def trainer_logp(samples, temperature):
        pack = data.pack(samples)
        with torch.no_grad():
            return policy(pack, temperature)[0][pack.mask]

    return selfcheck(engine, lambda: dist.full_weights(policy), trainer_logp, prompts)


def engine_samples(cfg, prompts, env: str) -> dict:
    """Runs vLLM. Returns temperature -> samples, "turns" -> result of turns_in_rounds, and "selfcheck" ->
    result of `checked`."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

    # vLLM's CPU build names its shared memory by rank numbers alone, so two tests would use the same memory.
    name, port = Shared.make_group_name, os.environ["MASTER_PORT"]
    Shared.make_group_name = staticmethod(lambda communicator: name(communicator).replace("/", port))
    world = dist.init("cpu", "float32")
    tokenizer = model.load_tokenizer(cfg.model)
    engine = vllm_engine.VLLMEngine(cfg.model, tokenizer, cfg)
    shard_fn = train.partial(dist.shard, over=dist.mesh(world), dtype=torch.float32)
    policy = model.load_policy(cfg.model, "cpu", shard_fn)
    keys = [(i, j) for i in prompts for j in range(3)]
    mine, out = {k: prompts[k[0]] for k in keys[engine.rank::engine.ranks]}, {}
    for temperature in (0.0, 1.0):
        with engine.awake(dist.full_weights(policy), version=3):
            samples = engine.generate(mine, dict.fromkeys(mine, 24), temperature, (0, 1, 0), 3)
            out[temperature] = {(s.prompt_id, s.sample_id): s for s in samples}
    out["turns"] = turns_in_rounds(engine, policy, prompts, env)
    out["selfcheck"] = checked(engine, policy, prompts)
    dist.gather(None)
    for file in Path("/dev/shm").glob(f"*{port}*cpushm*"):
        file.unlink(missing_ok=True)
    return out


def mistakes(commands: list[list[str]]) -> list[str]:
    """Returns the error message of each command line, as if vLLM were not installed."""
    sys.modules["vllm"] = None
    return [message_of(lambda words: train.main(parse(words)), argv) for argv in commands]


def first_rows(cfgs):
    """Trains with each config. Returns the metrics of the steps. No run exports its models, and runs with
    the same reward share a grading server, which ends with this process."""
    graders = {}

    def grader_of(cfg, say):
        if cfg.reward not in graders:
            graders[cfg.reward] = make_grader(cfg, say)
            graders[cfg.reward].close = lambda: None
        return graders[cfg.reward]

    train.finish, start.make_grader = lambda run: None, grader_of
    assert not any(main(cfg) for cfg in cfgs)
    return [read_metrics(Path(cfg.out)) for cfg in cfgs]


def copies_at_two_saves() -> list[tuple[dict, dict]]:
    """Returns (copies, tensors) at two saves. Only before the second save has the first optimizer a state."""
    dist.init("cpu", "float32")
    models, found = {}, []
    for who in ("policy", "critic"):
        layer = torch.nn.Linear(3, 2)
        models[who] = layer, torch.optim.AdamW(layer.parameters(), lr=0.1)
    buffer = ckpt.StagingBuffer(models)
    for who in ("critic", "policy"):
        layer, optimizer = models[who]
        layer(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        buffer.update()
        live = {f"{name}.{key}": x.detach().clone()
                for name, pair in models.items() for key, x in dist.tensors_of(*pair).items()}
        found.append(({k: x.clone() for k, x in buffer.slices.items()}, live))
    return found


def gold_messages(cfg, tokenizer, grader, world) -> list[str]:
    """Returns what check_gold prints for all data. After a UserError, the last line is "refused: MESSAGE"."""
    problems, said = data.load_problems(cfg.data, tokenizer, cfg, str), []
    try:
        check_gold("--data", problems, grader, cfg, world, said.append)
        for name, part in load_sets(cfg, tokenizer, str).items():
            check_gold(name, part, grader, cfg, world, said.append)
    except UserError as e:
        said.append(f"refused: {e}")
    return said


def gold_check(cfg) -> list[str]:
    world = dist.init("cpu", "float32")
    with make_grader(cfg) as grader:
        said = gold_messages(cfg, model.load_tokenizer(cfg.model), grader, world)
    dist.gather(None)
    return said
