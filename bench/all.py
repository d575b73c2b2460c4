"""Every bench that this machine allows, one after the other: `make bench`.

    python bench/all.py [--only train step …] [--list]

On a CPU the demo's model and two layers of Qwen2.5-0.5B's shape; on a GPU the shapes of 0.5B, 1.5B and 7B (8 of its layers),
packs of 16,384 tokens, vLLM beside the trainer. Nothing else should run meanwhile. What they print goes to
bench/results/DEVICE.json, and to DEVICE.md as a table. bench/vs_trl.py needs another project and is started by itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent)] + [p for p in sys.path if p != str(HERE)]  # bench/train.py is not train.py
Case = tuple[str, list[str], int, int]  # script, its words, ranks, threads a rank
KEPT = ("phase", "figure", "by", "fixed_work", "preset", "size", "layers", "vocab", "pack", "segment", "algo", "ranks",
        "engine", "samples")


def on_cpu(cores: int) -> list[Case]:
    """The demo's model on all cores, a rank each."""
    base = "runs/tiny-base-0"
    data = ["--model", base, "--data", f"{base}/train.jsonl"]
    engines = ["torch", "vllm"] if importlib.util.find_spec("vllm") else ["torch"]
    return [("train.py", ["--size", "tiny"], 1, cores),
            ("train.py", ["--size", "tiny", "--vocab", "151936", "--pack", "16384", "--packs", "1", "--rounds", "1"], 1, cores),
            ("train.py", ["--size", "0.5b", "--layers", "2", "--pack", "1024", "--packs", "1", "--rounds", "2"], 1, cores),
            ("step.py", ["tiny-ppo", *data], cores, 1), ("step.py", ["tiny-grpo", *data], cores, 1),
            *(("rollout.py", ["--model", base, "--engine", e, "--tokens", "128"], 1, cores) for e in engines),
            ("saving.py", ["--model", base], cores, 1), ("grading.py", [], 1, 1), ("scaling.py", ["--base", base], 1, 1)]


def on_gpu() -> list[Case]:
    """One GPU; `runs/shape-0.5b` is made for the engine and the step."""
    from bench.shape import build

    model = "runs/shape-0.5b"
    if not Path(model, "train.jsonl").exists():
        build(model, "0.5b")
    shapes = (["--size", "0.5b"], ["--size", "1.5b"], ["--size", "7b", "--layers", "8"])
    return [*(("train.py", [*s, "--pack", "16384", "--segment", "2048", *more], 1, 1) for s in shapes
              for more in ([], ["--checkpoint"])),
            ("rollout.py", ["--model", model, "--engine", "vllm", "--prompts", "64", "--tokens", "512"], 1, 1),
            ("step.py", ["orz-0.5b-1gpu", "--model", model, "--data", f"{model}/train.jsonl", "--prompts_per_step", "16",
                         "--samples_per_prompt", "8", "--max_response_len", "512", "--max_model_len", "0"], 1, 1)]


def device() -> str:
    """Its name as a file's: of the GPU, or of the processor with its cores."""
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        name = f"{(models or ['cpu'])[0]} {os.cpu_count()} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def table(rows: list[dict]) -> str:
    """Markdown, a line a figure: what it is of, and its numbers."""
    lines = ["| bench | of | found |", "|---|---|---|"]
    for row in rows:
        of = ", ".join(f"{k} {row[k]}" if k not in ("phase", "figure") else str(row[k]) for k in KEPT if row.get(k))
        found = ", ".join(f"{k} {v}" for k, v in row.items()
                          if k not in KEPT and isinstance(v, int | float) and not isinstance(v, bool) and v)
        lines.append(f"| {row['bench']} | {of} | {found} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="scripts, without .py")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    args = parser.parse_args()
    import torch

    from bench.scaling import lines_of

    cases = on_gpu() if torch.cuda.is_available() else on_cpu(os.cpu_count() or 1)
    rows, failed = [], []
    for script, words, ranks, threads in cases:
        if args.only and script.removesuffix(".py") not in args.only:
            continue
        print(f"bench/{script} {' '.join(words)}  ({ranks} × {threads} threads)", flush=True)
        if args.list:
            continue
        began = time.monotonic()
        try:
            found = lines_of(script, words, ranks, threads)
        except SystemExit as e:
            failed.append(str(e))
            print(e, flush=True)
            continue
        rows += found
        print(f"  {len(found)} figures in {time.monotonic() - began:.0f} s", flush=True)
    if rows:
        to = HERE / "results" / f"{device()}.json"
        said = json.loads(to.read_text()) if args.only and to.exists() else {}
        figures = [r for r in said.get("figures", ()) if r["bench"] not in {x["bench"] for x in rows}] + rows
        to.write_text(json.dumps({"torch": torch.__version__, "figures": figures}, indent=1) + "\n")
        to.with_suffix(".md").write_text(table(figures))
        print(f"{table(figures)}\n{to}")
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
