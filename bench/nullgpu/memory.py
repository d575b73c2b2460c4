"""Compares the memory that tools/plan.py plans with the memory that torch takes from a stub CUDA driver.

    PYTHONPATH=NULLGPU sh NULLGPU/run.sh python -m bench.nullgpu.memory [--only 7B …]

bench/nullgpu/trainer.py explains NULLGPU. --only WORDS runs the cases with one of these words in their names.
The other cases keep their rows in bench/results/nullgpu-memory.md.

The exit status is 1
- if the plan is below the driver's peak, or over 9 % above it;
- if memory ran out;
- if --recompute auto leaves less than 8 % of the device free, and could recompute more layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python bench/nullgpu/memory.py`

import configs
from bench.common import RESULTS, arguments, markdown
from guard.messages import GIB
from tools import plan

FILE = RESULTS / "nullgpu-memory.json"
H100, H200 = ("NVIDIA H100 80GB HBM3", 79.1), ("NVIDIA H200", 139.8)  # (name, GiB)
CARD = ("NVIDIA GeForce RTX 4090", 23.5)
BIG, SMALL = "orz-32b", "gsm8k-0.5b-1gpu"
# case -> (device, preset, size, ranks, tokens per sample)
CASES = {
    "7B on 8 × H100": (H100, "orz-7b", "7b", 8, 2048),
    "7B on 32 × H100": (H100, "orz-7b", "7b", 32, 2048),
    "7B on 32 × H200": (H200, "orz-7b", "7b", 32, 2048),
    "7B on one H200": (H200, "orz-7b-grpo --offload off", "7b", 1, 2048),
    "7B on 2 × H200": (H200, "orz-7b-grpo --offload off", "7b", 2, 2048),
    "7B on 2 × H100": (H100, "orz-7b-grpo", "7b", 2, 2048),
    "32B on 16 × H100": (H100, BIG, "32b", 16, 9216),
    "32B on 32 × H100": (H100, BIG, "32b", 32, 9216),
    "0.5B on one 24-GB card": (CARD, SMALL, "0.5b", 1, 1024),
    "7B, adapters, on one H100": (H100, "orz-7b --lora 32 --offload off", "7b", 1, 2048),
    "7B, adapters, on 8 × H100": (H100, "orz-7b --lora 32", "7b", 8, 2048),
    "7B, adapters, offloading, on 4 × H100": (H100, "orz-7b --lora 32 --offload on", "7b", 4, 2048),
    "32B, adapters, on 8 × H100": (H100, "orz-32b --lora 32 --offload off", "32b", 8, 9216),
}
PHASES = {"sync": ["sync"], "critic": ["critic[0]", "critic[1]"], "policy": ["policy[0]", "policy[1]"]}
ABOVE = 1.09  # largest accepted ratio of the plan to the driver's peak

LEGEND = """\
Peak memory of one rank, without the engine and NCCL: planned by tools/plan.py, and counted by a stub CUDA
driver that computes nothing.

"""


def planned(case: plan.Case) -> dict[str, float]:
    """Returns phase -> planned peak in GiB. Leaves out NCCL's buffers and the engine, because
    bench/nullgpu/trainer.py has neither."""
    absent, most = ("engine weights", "sleeping engine"), {}
    for phase, usage in plan.memory(case):
        total = usage["total"] - plan.NCCL_BUFFERS - sum(usage.get(item, 0.0) for item in absent)
        most[phase] = max(most.get(phase, 0.0), total / GIB)
    return most


def flags_of(preset: str, recompute: str) -> list[str]:
    """Returns the flags of a case. preset: a preset, perhaps with flags"""
    preset, *more = preset.split()
    # For SMALL, longer packs are planned to be as fast. The plan would choose them.
    pack_len = ["--pack_len", "16384"] if preset == SMALL else []
    return ["--recompute", recompute, "--shard_ranks", "0", "--engine", "vllm", *pack_len, *more]


def case_of(name: str, recompute: str) -> plan.Case:
    (device, gib), preset, size, world, _ = CASES[name]
    cfg = configs.parse([preset.split()[0], *flags_of(preset, recompute)])
    shape, gpu = plan.KNOWN[size], plan.gpu_of(device, gib * GIB)
    return plan.Case(cfg, world, [shape] * 3, gpu, local=min(world, configs.NODE))


def measure(name: str, recompute: str) -> list[dict]:
    (device, gib), preset, size, world, segment = CASES[name]
    env = os.environ | {"NULLGPU_NAME": device, "NULLGPU_GIB": str(gib)}
    # The worst case for memory is a short prompt that several responses share: attention copies the queries,
    # keys and values, and computing a short prompt only once saves little. It must save data.LEAST_SHARED.
    options = dict(preset=preset.split()[0], size=size, world=world, segment=segment, packs=2, group=2,
                   prompt=segment // 11)
    flags = [word for flag, value in options.items() for word in (f"--{flag}", str(value))]
    flags += flags_of(preset, recompute)
    command = [sys.executable, "-m", "bench.nullgpu.trainer", *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    head, *lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    of = {line["phase"]: line for line in lines if "phase" in line}
    return [row_of(name, recompute, head, phase, [of[step] for step in steps if step in of])
            for phase, steps in PHASES.items() if steps[0] in of]


def row_of(name: str, recompute: str, head: dict, phase: str, steps: list[dict]) -> dict:
    """Returns the planned and measured memory of one phase, as a row for the results in FILE.

    steps: JSON lines of bench/nullgpu/trainer.py for this phase; the row has the maximum of each value"""
    def most(field):
        return max(step[field] for step in steps)

    row = {"case": name, "flag": recompute, "phase": phase, "layers": head["recompute"].get(phase, ""),
           "planned_gib": round(most("planned_gib"), 2), "allocated_gib": most("peak_gib"),
           "reserved_gib": most("reserved_gib"), "driver_gib": most("driver_peak_gib"),
           "out_of_memory": most("out_of_memory"), "torch": head["torch"]}
    row["share"] = round(row["planned_gib"] / row["driver_gib"], 3)
    if phase in head["params"]:
        tokens = head["pack_len"] // head["segment"] * head["segment"] * head["packs"]
        updates = head["updates"] if phase == "critic" else 1
        row["n_a_token"] = round(most("gemm_tflop") * 1e12 / tokens / updates / head["params"][phase], 2)
    return row


def wrong(row: dict) -> str:
    if row["out_of_memory"]:
        return "out of memory"
    if not 1 <= row["share"] <= ABOVE:
        return f"the plan is {row['share']:.3f} of the driver's peak"
    beside, limit = (plan.NCCL_BUFFERS + plan.SLEEPING_ENGINE) / GIB, 1 - plan.HEADROOM
    (_, gib), _, size, *_ = CASES[row["case"]]
    could = row["flag"] == "auto" and row["layers"] != plan.KNOWN[size].layers  # recompute more layers
    if could and row["driver_gib"] + beside > limit * gib:
        return f"more than {limit:.0%} of the device"
    return ""


def table(rows: list[dict]) -> str:
    lines = []
    for r in rows:
        gib = [f"{r[k]:.1f}" for k in ("planned_gib", "driver_gib")]
        lines.append((r["case"], r["flag"], r["phase"], *gib, f"{r['share']:.3f}"))
    head = ("case", "--recompute", "phase", "planned GiB", "counted GiB", "planned / counted")
    return LEGEND + markdown(head, lines)


def main() -> None:
    args = arguments(__doc__, only=())
    chosen = [name for name in CASES if not args.only or any(word in name for word in args.only)]
    earlier = json.loads(FILE.read_text())["rows"] if FILE.exists() else []
    by_case = {name: [r for r in earlier if r["case"] == name] for name in CASES}
    for name in chosen:
        by_case[name] = measure(name, "auto") + measure(name, "layers")
        print(table(by_case[name]), flush=True)
        rows = sum(by_case.values(), [])
        FILE.write_text(json.dumps({"bench": "nullgpu-memory", "rows": rows}, indent=1) + "\n")
        FILE.with_suffix(".md").write_text(table(rows))
    mistakes = [f"{r['case']}, {r['flag']}, {r['phase']}: {wrong(r)}" for r in rows if wrong(r)]
    sys.exit("\n".join(mistakes) or 0)


if __name__ == "__main__":
    main()
