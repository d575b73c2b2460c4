"""Is a run's engine as it must be? Reads its metrics.jsonl; one JSON line a demand; the exit status is 0 where all are met.

    python bench/verdict.py runs/NAME/metrics.jsonl [--steps 20]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("metrics")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    lines = Path(args.metrics).read_text().splitlines() if Path(args.metrics).is_file() else []
    rows = [r for r in map(json.loads, lines) if "reward" in r]
    residual = [r["mem/residual_gb"] for r in rows] or [float("nan")]
    seconds = [r["time/wake"] + r["time/sync"] + r["time/sleep"] for r in rows] or [float("nan")]
    gaps = [r["logp_gap/mean"] for r in rows] or [float("nan")]
    demands = {  # what, found, bound
        "steps trained (at least)": (-len(rows), -args.steps),
        "GiB that the engine keeps asleep, more than before it was made": (max(residual), 1.0),
        "GiB by which that grows after the first step": (max(residual) - residual[0], 0.25),
        "mean |engine - trainer| log-prob, nats": (statistics.mean(gaps), 0.02),
        "seconds to wake, sync and sleep, median": (statistics.median(seconds), 3.0),
    }
    for what, (found, most) in demands.items():
        print(json.dumps({"bench": "verdict", "demand": what, "found": round(abs(found), 5), "bound": abs(most),
                          "met": found <= most}))
    sys.exit(not all(found <= most for found, most in demands.values()))


if __name__ == "__main__":
    main()
