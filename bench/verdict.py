"""Checks the metrics of a run's engine: memory, log-probs, seconds. Prints one JSON line per check.

    python -m bench.verdict runs/NAME/metrics.jsonl [--steps 20]

--steps: the run must have at least this number of steps. The exit status is 0 if all checks pass, else 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from bench.common import say
from guard.files import read_json, read_jsonl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("metrics")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    rows = [r for r in read_jsonl(Path(args.metrics)) if "reward" in r]
    config, kept = read_json(Path(args.metrics).with_name("config.json")), 0.0
    if config.get("engine") == "torch":  # this engine keeps its weights
        kept = sum(f.stat().st_size for f in Path(config["model"]).glob("*.safetensors")) / 2**30

    def values(*names: str) -> list[float]:
        """Returns each step's sum of these metrics. Without steps: [NaN], which fails every check."""
        return [sum(r[name] for name in names) for r in rows] or [float("nan")]

    residual = values("mem/residual_gb")
    seconds = values("time/wake", "time/sync", "time/sleep")
    # Reasons for two of the limits:
    # 2.0 GiB: a sleeping vLLM held 0.8 to 1.0 GiB on a stub CUDA driver without NCCL. NCCL needs buffers too.
    # 0.06 nats: with random weights, rounding makes a mean gap of 0.009 (0.5B) to 0.043 (7B). Stale weights
    # or a wrong temperature make 0.1 or more.
    at_most = {  # demand -> (found value, largest allowed value)
        "GiB that the sleeping engine holds, largest": (max(residual), 2.0 + kept),
        "GiB by which that grows after the first step": (max(residual) - residual[0], 0.25),
        "mean |engine - trainer| log-prob, nats": (statistics.mean(values("logp_gap/mean")), 0.06),
        "seconds to wake, sync and sleep, median": (statistics.median(seconds), 3.0),
    }
    found = [("steps trained (at least)", len(rows), args.steps, len(rows) >= args.steps)]
    found += [(demand, value, bound, value <= bound) for demand, (value, bound) in at_most.items()]
    for demand, value, bound, met in found:
        say({"bench": "verdict", "demand": demand, "found": round(value, 5), "bound": round(bound, 2),
             "met": met})
    sys.exit(not all(met for *_, met in found))


if __name__ == "__main__":
    main()
