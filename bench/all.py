"""Runs the benches of speed, one after the other: on the GPU if there is one, else on the CPU.

    python -m bench.all [--only train step …] [--list]     # or: make bench; --list: only print the commands

Stop other programs first. The results go to bench/results/DEVICE.json. bench/vs_trl.py is left out, because
it needs TRL.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench.common import RESULTS, ROOT, arguments, environment, torchrun
from bench.shape import build

Case = tuple[str, list[str], int, int]  # name of the bench, its arguments, ranks, threads of each rank


def on_cpu(cores: int) -> list[Case]:
    base = "runs/tiny-base-0"
    data = ["--model", base, "--data", f"{base}/train.jsonl"]
    head = ["--size", "tiny", "--vocab", "151936", "--pack", "16384", "--packs", "1", "--rounds", "1"]
    layers = ["--size", "0.5b", "--layers", "2", "--pack", "1024", "--packs", "1", "--rounds", "2"]
    cases: list[Case] = [("train", args, 1, cores) for args in (["--size", "tiny"], head, layers)]
    cases += [("step", [preset, *data], cores, 1) for preset in ("tiny-ppo", "tiny-grpo")]
    for engine in ["torch", "vllm"] if importlib.util.find_spec("vllm") else ["torch"]:
        cases.append(("rollout", ["--model", base, "--engine", engine, "--tokens", "128"], 1, cores))
    cases.append(("saving", ["--model", base], cores, 1))
    cases.append(("grading", [], 1, 1))
    return cases


def on_gpu() -> list[Case]:
    model = "runs/shape-0.5b"
    if not Path(model, "train.jsonl").exists():
        build(model, "0.5b")
    cases: list[Case] = []
    for shape in (["--size", "0.5b"], ["--size", "1.5b"], ["--size", "7b", "--layers", "8"]):
        args = [*shape, "--pack", "16384", "--segment", "2048"]
        cases += [("train", args, 1, 1), ("train", [*args, "--recompute", "999"], 1, 1)]
    cases.append(("rollout", ["--model", model, "--engine", "vllm", "--prompts", "64",
                                 "--tokens", "512"], 1, 1))
    cases.append(("step", ["orz-0.5b-1gpu", "--model", model, "--data", f"{model}/train.jsonl",
                              "--prompts_per_step", "16", "--samples_per_prompt", "8",
                              "--max_response_len", "512", "--max_model_len", "0"], 1, 1))
    return cases


def device() -> str:
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        name = f"{models[0] if models else 'cpu'} {os.cpu_count()} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def run_bench(script: str, args: list[str], ranks: int = 1, threads: int = 1) -> list[dict]:
    """Runs bench/SCRIPT.py. Returns the JSON lines that it prints. Exits if it fails."""
    command = torchrun(ranks, "-m", f"bench.{script}", *args)
    done = subprocess.run(command, cwd=ROOT, env=environment(threads), capture_output=True, text=True,
                          check=False)
    if done.returncode:
        sys.exit(f"bench.{script} {' '.join(args)} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"bench"')]


def run_all(cases: list[Case], only_list: bool) -> tuple[list[dict], list[str]]:
    rows, failures = [], []
    for script, args, ranks, threads in cases:
        print(f"bench.{script} {' '.join(args)}  ({ranks} × {threads} threads)", flush=True)
        if only_list:
            continue
        began = time.monotonic()
        try:
            figures = run_bench(script, args, ranks, threads)
        except SystemExit as e:
            failures.append(str(e))
            print(e, flush=True)
        else:
            rows += figures
            print("\n".join(map(json.dumps, figures)))
            print(f"  {len(figures)} figures in {time.monotonic() - began:.0f} s", flush=True)
    return rows, failures


def main() -> None:
    args = arguments(__doc__, only=(), list=False)
    cases = on_gpu() if torch.cuda.is_available() else on_cpu(os.cpu_count() or 1)
    if args.only:
        cases = [case for case in cases if case[0] in args.only]
    rows, failures = run_all(cases, args.list)
    if rows:
        path = RESULTS / f"{device()}.json"
        earlier = json.loads(path.read_text())["figures"] if args.only and path.exists() else []
        measured = {r["bench"] for r in rows}
        rows = [r for r in earlier if r["bench"] not in measured] + rows
        path.write_text(json.dumps({"torch": torch.__version__, "figures": rows}, indent=1) + "\n")
        print(f"\n{path}")
    sys.exit("\n".join(failures) or 0)


if __name__ == "__main__":
    main()
