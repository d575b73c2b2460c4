"""Compares torz with transformers, and the engines (torch, vLLM) with the trainer, for each model family.

    python -m bench.families [--only granite cohere …] [--no_vllm]

The models are those of tests/families.py. vLLM takes about 20 s per model; --no_vllm leaves vLLM out.

Writes bench/results/families.json and families.md. With --only, the other models keep their rows there. The
exit status is 1 if a difference is above its limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from bench.common import RESULTS, ROOT, arguments, environment, markdown, say

sys.path.append(str(ROOT / "tests"))
import families

# Largest allowed differences
LIMITS = {"log-probs": 1e-5, "gradient": 1e-5, "torch engine": 1e-4, "vLLM engine": 1e-4,
          "exported policy": 1e-4, "exported critic": 1e-4}

LEGEND = """\
Each row is a tiny model with random weights in fp32. The table has the largest differences in log-probs, in
nats.

- `log-probs`, `gradient`: torz's trainer against transformers. `gradient` is relative to the gradient's size.
- `torch engine`, `vLLM engine`: the engine against the trainer.
- `exported …`: torz's model against its export, run by transformers. `exported critic` compares values.

vLLM's CPU kernels of Qwen3.5's delta nets take only bf16. `qwen3_5` ran with them, `qwen3_5_text` in fp32,
with a plain delta rule in their place.

"""


def measure(path: str, vllm: bool) -> dict[str, float | str]:
    """Returns name -> the largest difference that the check finds, for each check in LIMITS. If vLLM did not
    run, "vLLM engine" has a text that begins with "not run" instead of a number."""
    training = families.compare_training(path)
    exported = families.compare_export(path, Path(path).parent / "export" / Path(path).name)
    name = Path(path).name
    in_torch = "refused" if name in families.RECURRENT else families.compare_engine(path, "torch")
    in_vllm = in_own_process(path) if vllm else "not run"
    if name == "qwen3_5" and isinstance(in_vllm, float):
        in_vllm = f"{in_vllm:.1e} (bf16)"  # without a limit
    return {"log-probs": training["logp"], "gradient": training["gradient"],
            "torch engine": in_torch, "vLLM engine": in_vllm,
            "exported policy": exported["policy"], "exported critic": exported["critic"]}


def in_own_process(path: str) -> float | str:
    """Returns the largest difference between the engine's log-probs and the trainer's, or an error text."""
    env = environment() | {"TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-m", "bench.families", "--vllm_engine", path], env=env, text=True,
                          capture_output=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return f"not run: {errors[-1].strip() if errors else f'exit status {done.returncode}'}"


def save(rows: list[dict], names: list[str]) -> str:
    """Writes `rows`, and the old rows of other models, to families.json and families.md. Returns the text of
    families.md."""
    file = RESULTS / "families.json"
    earlier = json.loads(file.read_text())["models"] if file.exists() else []
    by_name = {row["model"]: row for row in [*earlier, *rows]}
    rows = [by_name[name] for name in names if name in by_name]
    figures = {"torch": torch.__version__, "limits": LIMITS, "models": rows}
    file.write_text(json.dumps(figures, indent=1) + "\n")
    cells = [[f"{x:.1e}" if isinstance(x, float) else x for x in (row[n] for n in ("model", *LIMITS))]
             for row in rows]
    file.with_suffix(".md").write_text(LEGEND + markdown(("model", *LIMITS), cells))
    return file.with_suffix(".md").read_text()


def main() -> None:
    args = arguments(__doc__, only=(), no_vllm=False, vllm_engine="")
    torch.set_num_threads(1)
    if args.vllm_engine:
        say(families.compare_vllm([args.vllm_engine])[0])
        os._exit(0)  # without vLLM's exit handlers, which would hang
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only or families.MODELS:
            rows.append({"model": name} | measure(families.make(Path(folder), name), not args.no_vllm))
            say(rows[-1])
    print(save(rows, [*families.MODELS]))
    sys.exit(any(isinstance(row[name], float) and row[name] > limit
                 for row in rows for name, limit in LIMITS.items()))


if __name__ == "__main__":
    main()
