"""Runs PPO and then GRPO on a stub CUDA device, which counts memory and computes nothing. train.py's `main`
and vLLM are the real ones.

    PYTHONPATH=NULLGPU sh NULLGPU/run.sh python -m bench.nullgpu.run [--size 0.5b] [--layers 24] [--work DIR]
                                            [--algo ppo grpo] [--preset NAME] [--flags="flags of train.py"]

bench/nullgpu/trainer.py explains NULLGPU. For each algorithm, one process makes two steps, saves and exports.
A second process resumes and makes two more steps. With 24 layers PPO takes 27 GiB of host memory, and GRPO
13 GiB.

Prints one JSON line for each phase of the loop, and for "sync", the part of "before eval" in which the engine
gets new weights. The line "before NAME" is about the time between the previous line and NAME.
    held_gib       device memory in use at the end of the phase
    expected_gib   what held_gib should be
    peak_gib       peak of the device memory in use
    plan_gib       peak planned by tools/plan.py, without NCCL's buffers, which the stub does not have
    share          plan_gib / peak_gib
    waits          how often the host waited for the device

The exit status is 1 if a run fails, or if `held_gib` is 1.3 or more above `expected_gib`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python bench/nullgpu/run.py`

import configs

if __name__ == "__main__":
    configs.set_allocator()  # as train.py does before it imports torch

import nullgpu
import numpy as np
import torch

import ckpt
import dist
import engine
from bench.common import arguments, say
from bench.shape import build
from guard.checks import model_shapes
from tools import plan

GIB = 2**30
PRESETS = {"ppo": "orz-0.5b-1gpu", "grpo": "orz-7b-grpo"}
# GiB allowed above expected_gib: cuBLAS workspaces, packs, metrics, and free pieces between the tensors of a
# state that stays on the device
TOLERANCE = 1.3
# All prompts of bench.shape have PROMPT tokens. A longer limit would make the plan too high.
PROMPT = 7
FLAGS = f"""--template plain --prompts_per_step 32 --samples_per_prompt 8 --max_prompt_len {PROMPT}
    --max_response_len 256 --max_model_len 0 --policy_updates 1 --eval_every 0 --save_every 1 --keep 1
    --no-selfcheck --go --engine vllm""".split()


# --- one measured process


class Phases:
    """Replaces dist.phase. Also prints a JSON line of measurements before and after each phase."""

    def __init__(self, cfg: configs.Config, phase: Callable) -> None:
        self.phase = phase
        case = case_of(cfg)
        self.planned = planned(case)
        idle = case.state  # on the device between the phases
        if case.offloads:
            idle = case.saved if cfg.lora else 0.0
        own = float(os.environ.get("NULLGPU_OWN_GIB", "0.55"))
        self.asleep = own + (plan.SLEEPING_ENGINE + idle) / GIB
        self.synced = self.asleep + case.engine_weights / GIB
        self.awake = cfg.engine_share * nullgpu.counters()["capacity_gib"] + idle / GIB

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.tell(f"before {name}")
        with self.phase(name):
            yield
        self.tell(name)

    def tell(self, name: str) -> None:
        seen = nullgpu.counters()
        expected = self.synced if name == "sync" else self.asleep
        if name in ("start/engine", "rollout", "eval", "before eval", "before rollout"):
            expected = self.awake
        memory = {"held": seen["used_gib"], "expected": expected, "peak": seen["peak_gib"]}
        if name in self.planned:
            memory["plan"] = self.planned[name]
        row = {f"{k}_gib": round(x, 2) for k, x in memory.items()}
        if name in self.planned:
            row["share"] = round(memory["plan"] / memory["peak"], 3)
        for way in ("h2d", "d2h"):
            row[way], row[f"{way}_gib"] = seen[way], round(seen[f"{way}_bytes"] / GIB, 2)
        row["pageable"] = self.pageable.take()
        row["pinned_gib"] = round(seen["pinned_bytes"] / GIB, 2)
        row["waits"] = sum(seen[f"sync_{what}"] for what in ("stream", "device", "event"))
        say({"phase": name, **row, "launches": seen["launch"], "out_of_memory": seen["oom"]})
        nullgpu.reset()


def case_of(cfg: configs.Config) -> plan.Case:
    gpu = plan.gpu_of(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1])
    return plan.Case(cfg, 1, model_shapes(cfg), gpu)


def planned(case: plan.Case) -> dict[str, float]:
    """Returns phase -> planned peak in GiB, without NCCL's buffers."""
    totals = {}
    for name, usage in plan.memory(case):
        totals[name] = max(totals.get(name, 0.0), (usage["total"] - plan.NCCL_BUFFERS) / GIB)
    return totals


def sampled_counts() -> None:
    """Makes vLLM count one sampled token per decoding step. The stub computes nothing, so vLLM would count 0
    and no response would end."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    get = AsyncOutput.get_output

    def get_output(self):
        self.num_sampled_tokens_np = np.ones_like(self.num_sampled_tokens_np)
        return get(self)

    AsyncOutput.get_output = get_output


def different_responses() -> None:
    """Makes engines return random tokens. Otherwise most tokens would be 0, so samples would share most of
    their responses, and the trainer would compute these once."""
    sample = engine.Engine.sample

    def random_tokens(self, key, prompt, ids, *rest):
        ids = np.random.default_rng([*key, len(ids)]).integers(0, 200, len(ids)).astype(np.int32)
        return sample(self, key, prompt, ids, *rest)

    engine.Engine.sample = random_tokens


def remember_packs(known: dict) -> None:
    """Makes Pack.to store the host's `mask` and `cu_seqlens` in `known` (device address -> host tensor). The
    stub device has no values, so the patches of trainer.host_values read these two tensors from `known`."""
    import data

    to = data.Pack.to

    def moved(host, device):
        pack = to(host, device)
        for name in ("mask", "cu_seqlens"):
            known[getattr(pack, name).data_ptr()] = getattr(host, name)
        return pack

    data.Pack.to = moved


def no_nccl() -> None:
    """Makes collectives of device tensors do nothing."""
    import torch.distributed as td
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    init = td.init_process_group
    td.init_process_group = lambda backend, **kwargs: init(backend.replace("nccl", "fake"), **kwargs)


def stand_ins() -> None:
    """Replaces NCCL and the functions that read values from the device. The stub computes no values."""
    from bench.nullgpu.trainer import HOST, host_values
    from engines import vllm_engine

    no_nccl()
    ckpt.StagingBuffer.check_finite = lambda buffer: None  # the stub never fills this buffer
    host_values()
    remember_packs(HOST)
    different_responses()
    load = vllm_engine.VLLMEngine.load
    vllm_engine.VLLMEngine.load = lambda engine, weights: sampled_counts() or load(engine, weights)


def one_process(argv: list[str]) -> None:
    cfg = configs.parse(argv, "run.py")
    dist.phase = phases = Phases(cfg, dist.phase)  # before `import train`, whose decorators call dist.phase
    import train
    from bench.nullgpu.trainer import Pageable

    stand_ins()
    mark = engine.MemoryLedger.mark

    def marked(ledger, stage):
        mark(ledger, stage)
        if stage == "sync":
            phases.tell("sync")

    engine.MemoryLedger.mark = marked
    with Pageable() as phases.pageable:
        train.main(cfg)
    nullgpu.quit()


# --- all processes


def run(algo: str, steps: int, args: argparse.Namespace, model: str, out: Path) -> bool:
    argv = [args.preset or PRESETS[algo], "--model", model, "--data", f"{model}/train.jsonl",
            "--out", str(out), "--steps", str(steps), *FLAGS, *args.flags.split()]
    say({"run": algo, "to_step": steps, "flags": " ".join([argv[0], *FLAGS, args.flags]).rstrip(),
         "size": args.size, "layers": args.layers})
    command = [sys.executable, "-m", "bench.nullgpu.run", "--one", *argv]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    for line in done.stdout.splitlines():
        print(line, file=sys.stdout if line in rows else sys.stderr, flush=True)
    saved = sorted(p.parent.name for p in out.glob("ckpt/*/COMPLETE"))
    exported = {p.name: round(sum(f.stat().st_size for f in p.glob("*.safetensors")) / GIB, 2)
                for p in out.glob("export/*")}
    say({"ended": done.returncode, "saved": saved, "exported_gib": exported})
    held = [(row["held_gib"], row["expected_gib"]) for row in map(json.loads, rows)]
    return done.returncode == 0 and all(found < needed + TOLERANCE for found, needed in held)


def main() -> None:
    args = arguments(__doc__, size="0.5b", layers=24, algo=("ppo", "grpo"), work="", preset="", flags="")
    work = Path(args.work or tempfile.mkdtemp())
    say({"bench": "nullgpu-run", "torch": torch.__version__, "device": torch.cuda.get_device_name()})
    model, good = build(str(work / "model"), args.size, layers=args.layers), True
    for algo in args.algo:
        good &= run(algo, 2, args, model, work / algo) and run(algo, 4, args, model, work / algo)
        shutil.rmtree(work / algo / "ckpt", ignore_errors=True)
    if not args.work:
        shutil.rmtree(work)
    sys.exit(not good)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one_process(sys.argv[2:])
    main()
