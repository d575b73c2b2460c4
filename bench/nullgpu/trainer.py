"""Measures memory, copies and waits of one training rank on a stub CUDA device, which computes nothing.

    PYTHONPATH=NULLGPU sh NULLGPU/run.sh python -m bench.nullgpu.trainer [--preset orz-7b] [--size 7b]
                                                          [--world 32] [--packs 1] [flags of train.py]

NULLGPU is the folder of a stub CUDA driver, which is not in this repository. Its setup.sh installs CUDA
builds of torch and vLLM. Computed numbers and times mean nothing.

Prints one JSON line per phase of this rank. The phases:
    sync             weights are gathered for the engine
    on, off          a model's state moves to the device and back
    values           the critic's forward passes
    critic, policy   the updates
All phases but sync run in two steps. NAME[0] belongs to the first step, which creates the optimizer's state.
NAME[1] is like every later step.
Some of the fields:
    planned_gib      peak memory that tools/plan.py plans, without NCCL's buffers and the engine
    peak_gib         peak memory of torch's tensors
    driver_peak_gib  peak memory of the process
    h2d, d2h         number of copies from host to device, and back
    pageable         bytes copied from or to host memory that is not pinned
    waits            how often the host waited for the device
    host_s           CPU seconds of the process. With --plain 1, without the cost of counting `pageable`
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python bench/nullgpu/trainer.py`

import configs

configs.set_allocator()

import nullgpu
import numpy as np
import torch
import torch.distributed as td
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import data
import dist
import model
import train
from bench.common import say
from bench.nullgpu.memory import planned
from bench.shape import config_of
from guard.start import Role, make_optimizer
from log import Meter
from tools import plan

GIB = 2**30


# --- host copies of tensors whose values decide the shapes of other tensors

HOST: dict[int, Tensor] = {}  # device address of a pack's tensor -> the same tensor on the host


def host_values() -> None:
    """Patches Tensor.nonzero and Tensor.cpu. Their results decide the shapes of other tensors, but the stub
    device computes no values. So for a tensor in HOST, both methods read its copy on the host."""
    nonzero, cpu = Tensor.nonzero, Tensor.cpu

    def known(x):
        host = HOST.get(x.data_ptr()) if x.is_cuda else None
        same = host is not None and (host.shape, host.dtype) == (x.shape, x.dtype)
        return host if same else None  # if not `same`, an earlier tensor had this address

    def of_host(function):
        def call(x, *args, **kwargs):
            host = known(x)
            found = function(x if host is None else host, *args, **kwargs)
            return found if host is None else found.pin_memory().to(x.device)
        return call

    Tensor.nonzero = of_host(nonzero)
    Tensor.cpu = lambda x, *args, **kwargs: cpu(x, *args, **kwargs) if known(x) is None else known(x)


def make_pack(args: argparse.Namespace, cfg: configs.Config, device: torch.device, seed: int) -> data.Pack:
    rng, samples = np.random.default_rng(seed), []
    count = args.segment - args.prompt
    for i in range(max(1, cfg.pack_len // args.segment)):
        prompt_id, sample_id = divmod(i, args.group)
        prompt = np.random.default_rng([seed, prompt_id]).integers(0, 1000, args.prompt)
        ids = rng.integers(0, 1000, count).astype(np.int32)
        samples.append(data.Sample(prompt_id, sample_id, tuple(prompt.tolist()), ids,
                                   np.full(count, -1.0, np.float32), True, "", 0, reward=float(i % 2),
                                   advantage=0.5))
    host = data.pack(samples)
    pack = host.to(device)
    for name in ("mask", "cu_seqlens"):
        HOST[getattr(pack, name).data_ptr()] = getattr(host, name)
    return pack


# --- the trainer


def case_of(args: argparse.Namespace, cfg: configs.Config, world: dist.World) -> plan.Case:
    shape = dataclasses.replace(plan.KNOWN[args.size], layers=args.layers or plan.KNOWN[args.size].layers)
    gpu = plan.gpu_of(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1])
    return plan.Case(cfg, world.size, [shape] * 3, gpu, local=min(world.size, configs.NODE))


def make_role(name: str, config, args: argparse.Namespace, cfg: configs.Config,
              world: dist.World, base: model.PackModel | None = None) -> Role:
    """base: with --lora, the policy's base, for a critic"""
    kind, lr = {"policy": (model.Policy, cfg.policy_lr), "critic": (model.Critic, cfg.critic_lr)}[name]
    case = case_of(args, cfg, world)
    if base is None:
        with torch.device("meta"):
            base = kind(config)
        if cfg.lora:
            model.freeze(lambda base: base, cfg.lora, cfg.lora_alpha, world.dtype, base)
        base = made(base, case, name, world)
    if cfg.lora:
        base = model.Adapted(base, critic=name == "critic").to(world.device)
    return Role(name, base, make_optimizer(base, lr, cfg))


def made(module: model.PackModel, case: plan.Case, name: str, world: dist.World) -> model.PackModel:
    """Shards a model and allocates its memory."""
    module = dist.shard(module, dist.mesh(world, case.shards), world.dtype, case.recompute[name])
    module.to_empty(device="cpu" if case.offloads else world.device)
    module.tie()
    rotary, home = module.model.rotary_emb, next(module.parameters()).device
    module.model.rotary_emb = type(rotary)(module.config).to(home)  # to_empty() has erased its values
    return module


# --- the measurement


class Pageable(TorchDispatchMode):
    """Counts bytes copied between the device and host memory that is not pinned."""

    bytes = 0
    supports_higher_order_operators = True  # vLLM compiles its Qwen3.5 while this mode is on

    def take(self) -> int:
        taken, self.bytes = self.bytes, 0
        return taken

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **kwargs or {})
        source = {torch.ops.aten.copy_.default: 1, torch.ops.aten._to_copy.default: 0}.get(op)
        if source is not None:
            ends = {x.device.type: dist.local(x) for x in (out, args[source])}
            if ends.keys() == {"cpu", "cuda"} and not ends["cpu"].untyped_storage().is_pinned():
                self.bytes += ends["cpu"].nbytes
        return out


def launches(*words: str) -> int:
    return sum(n for name, n in nullgpu.kernels() if any(word in name for word in words))


class Phases:
    def __init__(self, planned: dict[str, float], pageable: Pageable) -> None:
        self.planned, self.pageable = planned, pageable

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        nullgpu.reset()
        self.start = time.process_time()

    def end(self, name: str) -> None:
        torch.cuda.synchronize()
        seen, calls = nullgpu.counters(), nullgpu.calls
        plans = self.planned.get(name.partition("[")[0])
        memory = {**({"planned": plans} if plans else {}), "peak": torch.cuda.max_memory_allocated() / GIB,
                  "reserved": torch.cuda.max_memory_reserved() / GIB,
                  "stays": torch.cuda.memory_allocated() / GIB, "driver_peak": seen["peak_gib"]}
        moved = {k.removesuffix("_bytes"): n / GIB for k, n in {**seen, **calls}.items()
                 if k.endswith("_bytes") and n > 2**20}
        copies = {"h2d": seen["h2d"], "d2h": seen["d2h"], "pageable": self.pageable.take()}
        waits = sum(seen[f"sync_{what}"] for what in ("stream", "device", "event")) - 1  # synchronize above
        kernels = {"flash": launches("flash"), "fmha": launches("fmha"), "index_add": launches("indexFunc")}
        say({"phase": name, **{f"{k}_gib": round(x, 2) for k, x in {**memory, **moved}.items()},
             **copies, "gemm_tflop": round(seen["tflop"], 1), "launches": seen["launch"], **kernels,
             "waits": waits,
             "collectives": sum(n for k, n in calls.items() if not k.endswith("_bytes")),
             "out_of_memory": seen["oom"], "host_s": round(time.process_time() - self.start, 3)})
        self.begin()


def run_sync(policy: Role, world: dist.World, phases: Phases) -> None:
    torch.cuda.empty_cache()
    phases.begin()
    for name, weight in dist.full_weights(policy.model, world.device):
        dtype = dist.pushed_dtype(name, world.dtype)
        assert weight.is_cuda and weight.dtype == dtype and type(weight) is Tensor, name
    phases.end("sync")


def run_updates(role: Role, i: int, args: argparse.Namespace, cfg: configs.Config, world: dist.World,
                phases: Phases) -> None:
    """Runs a step's updates of a role. i: number of the step"""
    count = args.updates if role.name == "critic" else 1
    log = MagicMock(alarm=lambda text, *_: say({"alarm": text}))
    cfg = dataclasses.replace(cfg, **{f"{role.name}_updates": count})
    loss = {"policy": train.policy_pack_loss, "critic": train.critic_pack_loss}[role.name]
    HOST.clear()
    packs = [[make_pack(args, cfg, world.device, 10 * u + k) for k in range(args.packs)]
             for u in range(count)]
    torch.cuda.empty_cache()
    phases.begin()
    with train.resident(role, world), dist.deterministic(cfg.deterministic):
        phases.end(f"{role.name} on[{i}]")
        if role.name == "critic":
            packs = train.estimate_advantages(role, packs, cfg, Meter(world.device))
            phases.end(f"values[{i}]")
        train.train_role(role, loss, packs, 0, cfg, Meter(world.device), log)
        phases.end(f"{role.name}[{i}]")
    phases.end(f"{role.name} off[{i}]")


def parse() -> tuple[argparse.Namespace, configs.Config]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="orz-7b")
    parser.add_argument("--size", default="7b", help="a shape that bench/shape.py knows")
    for name, value in dict(layers=0, world=32, packs=1, updates=2, segment=2048, prompt=192,
                            group=1, plain=0).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args, flags = parser.parse_known_args()
    production = args.world == 32 and args.preset.startswith("orz")
    layout = ["--layout", "production"] * production
    return args, configs.parse([args.preset, *layout, "--model", args.size, *flags], "trainer.py")


def main() -> None:
    args, cfg = parse()
    os.environ |= dict(RANK="0", WORLD_SIZE=str(args.world), LOCAL_RANK="0")
    if cfg.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.cuda.set_device(0)
    dist.check_allocator()
    td.init_process_group("fake", rank=0, world_size=args.world, store=FakeStore())
    nullgpu.collectives()
    host_values()
    dtype = torch.float32 if cfg.dtype == "float32" else torch.bfloat16
    world = dist.World(0, args.world, torch.device("cuda", 0), dtype)
    config, case = config_of(args.size, args.layers), case_of(args, cfg, world)
    cfg = case.cfg  # with the plan's choices
    phases = Phases(planned(case), pageable := Pageable())
    say({"bench": "nullgpu-trainer", "torch": torch.__version__, "device": torch.cuda.get_device_name(),
         "device_gib": round(case.gpu.memory / GIB, 1), **vars(args), "dtype": str(dtype),
         "pack_len": case.cfg.pack_len, "offload": case.cfg.offload, "params": case.params,
         "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF", ""), "shards": case.shards,
         "recompute": case.recompute})
    policy = make_role("policy", config, args, cfg, world)
    base = policy.model.base if cfg.lora else None
    roles = [policy, *([make_role("critic", config, args, cfg, world, base)] if cfg.algo == "ppo" else [])]
    with contextlib.nullcontext() if args.plain else pageable:
        for i, role in itertools.product(range(2), reversed(roles)):
            run_updates(role, i, args, cfg, world, phases)
        run_sync(policy, world, phases)
    nullgpu.quit()


if __name__ == "__main__":
    main()
