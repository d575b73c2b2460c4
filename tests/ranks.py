"""What test_ranks.py and test_train.py run inside ranks; importable by name from fresh processes."""

import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.utils.tensorboard  # noqa: F401  loaded here once instead of in every rank that is forked
from torch.distributed.tensor import DTensor

import ckpt
import data
import dist
import model
import rollout
import train
from configs import parse
from log import Logger, Meter, read_metrics

matplotlib.use("Agg")
import matplotlib.pyplot  # noqa: E402, F401


def make_samples(count: int, seed: int = 0, vocabulary: int = 100) -> list[data.Sample]:
    """Random ragged samples with rewards, as an engine would have made them: four of a prompt, two of which begin alike."""
    g = np.random.default_rng(seed)
    out = []
    for i in range(count):
        if i % 4 == 0:
            prompt = tuple(g.integers(3, vocabulary, g.integers(2, 9)).tolist())
        ids = g.integers(3, vocabulary, g.integers(1, 25)).astype(np.int32)
        if i % 4 == 1:
            ids[:5] = out[-1].ids[:5][:len(ids)] if len(ids) <= len(out[-1].ids) else ids[:5]
        logp = -g.random(len(ids)).astype(np.float32) * 5
        out.append(data.Sample(i // 4, i % 4, prompt, ids, logp, True, "", 0, reward=float(g.integers(0, 2)),
                               advantage=float(g.standard_normal())))
    return out


def meet(port: int, late: int) -> tuple[int, bool]:
    """Start beside the other rank on the store that an agent keeps, `late` after the other; sum something, leave a word."""
    os.environ["MASTER_PORT"] = str(port)
    if int(os.environ["RANK"]) == late:
        time.sleep(1)
    dist.init("cpu", "float32", stall_limit=10)
    total = int(dist.all_sum(torch.tensor(dist.td.get_rank() + 1)))
    store = dist.td.distributed_c10d._get_default_store()
    found = store.check(["word"])
    dist.gather(None)
    store.set("word", "")
    return total, found


def all_gradients(jobs) -> list[dict]:
    """gradients(cfg, samples) of each job, in one start of the ranks."""
    return [gradients(*job) for job in jobs]


def gradients(cfg, samples) -> dict[str, torch.Tensor]:
    """Whole gradients of one policy and one critic update over all samples, by this many ranks: dispatched, packed and
    summed by the very functions that train.py uses."""
    world = dist.init("cpu", "float32")
    policy, critic, ref = train.load_models(cfg, world)
    if ref is not None:
        with torch.no_grad():
            for p in ref.parameters():
                p.mul_(0.9)
    mine = [s for s in samples if s.slot % world.size == world.rank]
    parts = train.make_packs(mine, 0, cfg, world, policy.model)
    assert len({len(p) for p in dist.gather([len(p) for p in parts])}) == 1
    meter = Meter()
    if ref is not None:
        parts = train.each(parts, lambda p: dataclasses.replace(
            p, ref_logp=train.frozen(model.logprobs, ref, p, cfg.temperature)[0]))
    if cfg.algo == "ppo":
        parts = train.estimate_advantages(critic, parts, cfg, meter)
    elif cfg.advantage == "group_mean_whiten":
        parts = train.whiten_advantages(parts)
    packs = train.updates_of(parts, 1)[0]
    tokens, responses = train.counts(packs)
    out = {}
    for p in packs:
        loss, _ = train.policy_pack_loss(policy.model, p, tokens, responses, cfg, meter)
        loss.backward()
    out |= {f"policy.{n}": full(p.grad) for n, p in policy.model.named_parameters()}
    if critic:
        for p in packs:
            v = model.values(critic.model, p)
            train.ppo.value_loss(v, p.values, p.returns, p.mask, tokens, cfg.value_clip).backward()
        out |= {f"critic.{n}": full(p.grad) for n, p in critic.model.named_parameters()}
    metrics = meter.reduce(dist.all_sum, dist.all_max)
    return out | {"metrics": metrics, "packs": len(packs)}


def full(x: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def weights(path: str) -> dict[str, torch.Tensor]:
    """What dist.full_weights yields for the model at path, sharded over the ranks."""
    world = dist.init("cpu", "float32")
    place = train.partial(dist.shard, over=dist.mesh(world), dtype=torch.float32)
    policy = model.load_policy(path, "cpu", place)
    first = {n: t.clone() for n, t in dist.full_weights(policy)}
    shares = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in policy.parameters())
    assert shares < 1.2 * sum(t.numel() for t in first.values()) / world.size + 1000  # each rank holds its share only
    return first


def in_bf16(path: str) -> tuple[float, bool]:
    """One rank that computes in bf16: how far its log-probs are from fp32's, and whether masters and gradients are fp32."""
    world, p = dist.init("cpu", "bfloat16"), data.pack(make_samples(8))
    policy = model.load_policy(path, "cpu", train.partial(dist.shard, over=dist.mesh(world), dtype=world.dtype))
    logp, _ = model.logprobs(policy, p, 1.0)
    logp.sum().backward()
    gap = (logp - model.logprobs(model.load_policy(path), p, 1.0)[0]).abs().max()
    return float(gap), all(x.dtype == x.grad.dtype == torch.float32 for x in policy.parameters())


def main(cfg) -> str:
    """A training run; returns the message of a user's mistake, or nothing."""
    try:
        train.main(cfg)
    except train.UserError as e:
        return str(e)
    return ""


def restored(cfg, out) -> dict:
    """Whole weights, moments and the number of steps that the newest checkpoint of `out` brings back."""
    world = dist.init("cpu", "float32")
    policy, critic, _ = train.load_models(cfg, world)
    models = {t.name: (t.model, t.optimizer) for t in (policy, critic)}
    path = ckpt.find(out, "auto")
    facts = json.loads((path / "state.json").read_text())
    step = ckpt.resume(path, models, {"config": dataclasses.asdict(cfg.with_steps(0)), "problems": facts["problems"]})
    held = {f"{who}.{k}": v for who, state in ckpt.HostCopy(models).stage().items() for k, v in state.items()}
    return {"step": step} | {k: full(v) for k, v in held.items()}


def stopped(cfg, after: int) -> str:
    """A run of which the last rank is sent SIGUSR1 once `after` steps are in the metrics."""
    def ask() -> None:
        while sum("reward" in r for r in read_metrics(Path(cfg.out))) < after:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGUSR1)

    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        threading.Thread(target=ask, daemon=True).start()
    return main(cfg)


def unshared(cfg) -> str:
    """A run of two hosts: rank 1 has a name of its own, and a disk of its own where rank 0 sees the same folder."""
    if os.geteuid():
        return "no root"
    Path(cfg.out).mkdir(parents=True, exist_ok=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the other host's name leads nowhere
    if os.environ["RANK"] == "1":
        libc = ctypes.CDLL(None, use_errno=True)
        own_mounts_and_name, private = 0x20000 | 0x4000000, 0x44000
        if (libc.unshare(own_mounts_and_name) or libc.sethostname(b"other", 5) or libc.mount(b"none", b"/", None, private, None)
                or libc.mount(b"tmpfs", cfg.out.encode(), b"tmpfs", 0, b"size=1m")):
            os._exit(1)
    return main(cfg)


def not_finite(cfg) -> tuple[bool, bool, str]:
    """Updates with a gradient that isn't finite: whether the first left weights and moments alone, whether one that is finite
    after it moved them, and what the third in a row said."""
    world = dist.init("cpu", "float32")
    policy, _, _ = train.load_models(cfg, world)
    log, meter = Logger(Path(cfg.out), cfg, True, 0, {}), Meter()

    def update(value: float) -> bool:
        before = [p.detach().clone() for p in policy.model.parameters()]
        for p in policy.model.parameters():
            p.grad = torch.full_like(p, value)
        train.update(policy, [], 1e-3, 0, cfg, meter, log)
        return all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))

    left = update(float("nan")) and not policy.optimizer.state
    moved = not update(1.0) and policy.skipped == 0
    try:
        update(float("inf")), update(float("nan")), update(float("nan"))
    except RuntimeError as e:
        return left, moved, str(e)
    return left, moved, ""


def stalled() -> None:
    """Rank 1 hangs in a phase; rank 0 waits for it in the next."""
    def hang() -> None:
        time.sleep(1000)

    dist.init("cpu", "float32", stall_limit=3.0)
    with dist.phase("grading"):
        if os.environ["RANK"] == "1":
            hang()
    with dist.phase("waiting"):
        dist.all_sum(torch.ones(1))


def resampled(cfg) -> dict:
    """The prompts of step 0 as drawn and after replacement, this rank's rewards by slot, and how many groups were measured."""
    run = train.prepare(cfg)
    meter = Meter()
    with run.engine.awake(dist.full_weights(run.policy.model), version=0):
        batch, samples = train.sample_step(run, 0, meter)
    run.grader.close()
    rewards = {g[0].slot: [s.reward for s in g] for g in data.by_prompt(samples)}
    return {"drawn": [p.text for p in data.batch_at(run.problems, 0, cfg)], "prompts": [p.text for p in batch],
            "rewards": rewards, "measured": int(meter.sums["pass@n"][1])}


def trained_in_turn(cfgs) -> dict[str, list[dict]]:
    """Metrics of several runs in one process, by their folder's name. All stay until the end: a vLLM engine that is collected
    takes the state that it shares with the next along."""
    runs = []
    for cfg in cfgs:
        runs.append(train.prepare(cfg))
        assert train.train(runs[-1])
        train.finish(runs[-1])
        runs[-1].grader.close()
    return {Path(cfg.out).name: read_metrics(Path(cfg.out)) for cfg in cfgs}


def engine_samples(cfg, prompts, go) -> dict:
    """What this rank keeps of its engine's samples, by temperature and (slot, index), and what the self-check says."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

    # vLLM's CPU build names the memory that ranks share by their numbers alone, on the whole machine, and leaves it there.
    name, port = Shared.make_group_name, os.environ["MASTER_PORT"]
    Shared.make_group_name = staticmethod(lambda communicator: name(communicator).replace("/", port))
    world = dist.init("cpu", "float32")
    tokenizer = model.load_tokenizer(cfg.model)
    engine = rollout.VLLMEngine(cfg.model, tokenizer, cfg)
    place = train.partial(dist.shard, over=dist.mesh(world), dtype=torch.float32)
    policy = model.load_policy(cfg.model, "cpu", place)
    mine = {k: v for k, v in prompts.items() if k % engine.groups == engine.group}
    out = {}
    for temperature in (0.0, 1.0):
        with engine.awake(dist.full_weights(policy), version=3):
            out[temperature] = {(s.slot, s.index): s for s in engine.generate(
                mine, **go | {"n": 3, "temperature": temperature})}

    def trainers(samples, temperature):
        pack = data.pack(samples)
        with torch.no_grad():
            return model.logprobs(policy, pack, temperature)[0][pack.mask]

    out["selfcheck"] = rollout.selfcheck(engine, lambda: dist.full_weights(policy), trainers, prompts)
    dist.gather(None)
    for file in Path("/dev/shm").glob(f"*{port}*cpushm*"):
        file.unlink(missing_ok=True)
    return out


def mistakes(commands: list[list[str]]) -> list[str]:
    """What each command line ends with, vllm being not installed."""
    sys.modules["vllm"] = None  # as an import of what isn't there: ImportError
    said = []
    for argv in commands:
        try:
            train.main(parse(argv))
            said.append("")
        except train.UserError as e:
            said.append(str(e))
    return said
