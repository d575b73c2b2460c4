"""Measures the start of train.py with vLLM on a stub CUDA device, which computes nothing.

    PYTHONPATH=NULLGPU sh NULLGPU/run.sh python -m bench.nullgpu.start [--work DIR]

bench/nullgpu/trainer.py explains NULLGPU. The run is GRPO with the shape of Qwen2.5-0.5B.

Prints three JSON lines: vLLM "cold" (the caches of vLLM, Inductor and Triton are empty) and "warm", and the
PyTorch engine. Their fields are CPU seconds of the start's parts. They include child processes, such as
Inductor's.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python bench/nullgpu/start.py`

from bench.common import arguments, say

FLAGS = """orz-7b-grpo --template plain --prompts_per_step 32 --samples_per_prompt 8 --max_prompt_len 64
    --max_response_len 512 --max_model_len 0 --policy_updates 1 --eval_every 0 --engine_share 0.4
    --max_num_seqs 256 --steps 6 --go""".split()
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its children and their children."""
    ticks, parents = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            ticks[int(file.parent.name)] = sum(map(int, fields[11:15]))  # with children that have ended

    def is_ours(pid: int) -> bool:
        return pid == os.getpid() or pid in parents and is_ours(parents[pid])

    return sum(n for pid, n in ticks.items() if is_ours(pid)) / os.sysconf("SC_CLK_TCK")


def one_start(words: list[str]) -> None:
    """Runs train.py's `prepare`. Prints the CPU seconds of the parts (dist.phase)."""
    import configs

    cfg = configs.parse(words, "start.py")
    configs.set_allocator()
    import dist

    parts = {}

    @contextlib.contextmanager
    def measured(part):
        before = cpu_seconds()
        yield
        part = part.removeprefix("start/")
        parts[part] = round(parts.get(part, 0.0) + cpu_seconds() - before, 1)

    dist.phase = measured
    import nullgpu
    import torch

    import train
    from bench.nullgpu.run import stand_ins
    from guard import selfcheck

    stand_ins()
    parts["imports"], check = round(cpu_seconds(), 1), selfcheck.selfcheck

    def without_values(engine, weights, logp, prompts):
        """The self-check on a device without values: runs all stages and reports no difference."""
        def zeros(samples, temperature):
            logp(samples, temperature)
            return torch.zeros(sum(len(s.ids) for s in samples))

        return "", check(engine, weights, zeros, prompts)[1]

    selfcheck.selfcheck = without_values
    train.prepare(cfg)
    say(parts | {"all": round(cpu_seconds(), 1)})
    nullgpu.quit()


def main() -> None:
    args = arguments(__doc__, work="")
    from bench.shape import build

    with tempfile.TemporaryDirectory() as work:
        model = args.work or f"{work}/model"
        if not Path(model, "config.json").is_file():
            build(model, "0.5b")
        words = [*FLAGS, "--model", model, "--data", f"{model}/train.jsonl"]
        caches = {name: f"{work}/{name}" for name in CACHES}
        for kind, engine in (("cold", "vllm"), ("warm", "vllm"), ("warm", "torch")):
            command = [sys.executable, __file__, "--one", *words, "--engine", engine,
                       "--out", f"{work}/{kind}-{engine}"]
            output = subprocess.check_output(command, env=os.environ | caches, text=True)
            rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
            say({"bench": "nullgpu-start", "runs": engine, "caches": kind} | rows[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one_start(sys.argv[2:])
    main()
