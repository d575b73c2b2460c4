"""Simulates how long rollouts take if a few responses are much longer than the others.

    python -m bench.tail [--out FILE]     # orz-7b and orz-32b on 32 H100s; takes two minutes

Decoding has the speed that tools/plan.py estimates. In a round, a response gets at most --round_len tokens.
Between rounds, unfinished responses may move to other engines. Compares these settings:
    whole                   without --round_len: an engine samples its responses to their ends
    one round               --round_len is the length limit: like `whole`, but the engines exchange messages
    rounds                  --round_len is a sixteenth of the length limit
    carry X, staleness N    like `rounds`, with --carry X --max_staleness N
    ideal                   a lower bound of the time: all engines always decode a full batch

--out writes the rows of the printed tables as JSON lines.
"""

from __future__ import annotations

import heapq
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

os.environ["OMP_NUM_THREADS"] = "1"  # must be set before torch is imported

from bench.common import arguments
from configs import PRESETS, Config
from data import step_of
from rollout import moves
from tools import plan

STEPS, WARM = 16, 6  # the first WARM of STEPS steps are not counted


@dataclass(frozen=True)
class Cost:
    """Durations of an engine's operations, in seconds."""

    step: Callable[[np.ndarray, np.ndarray], np.ndarray]  # (responses, cached tokens) -> time of a step
    prefill: float  # per token that is prefilled again
    exchange: float  # per message to all engines


# --- the simulator


def decode_seconds(tokens: np.ndarray, context: np.ndarray, slots: int, cost: Cost) -> float:
    """Returns how many seconds one engine takes to decode. Response i starts with context[i] tokens (prompt
    and response so far) and gets tokens[i] more. At most `slots` responses run at once."""
    ends, starts = [], np.zeros(len(tokens), np.int64)
    for i, count in enumerate(tokens):
        starts[i] = heapq.heappop(ends) if len(ends) == slots else 0
        heapq.heappush(ends, int(starts[i] + count))
    steps = int((starts + tokens).max(initial=0))
    running, cached = np.zeros(steps + 1), np.zeros(steps + 1)
    for where, sign in ((starts, 1), (starts + tokens, -1)):
        np.add.at(running, where, sign)
        np.add.at(cached, where, sign * (context - starts))
    running, cached = running.cumsum()[:steps], cached.cumsum()[:steps]
    return float(cost.step(running, cached + running * np.arange(steps)).sum())


class Simulation:
    """Simulates consecutive rollouts. prompt: number of tokens of every prompt. lengths(count) draws the
    lengths of `count` responses to one prompt."""

    def __init__(self, cfg: Config, engines: int, cost: Cost, prompt: int,
                 lengths: Callable[[int], np.ndarray]) -> None:
        self.cfg, self.engines, self.cost, self.prompt, self.draw = cfg, engines, cost, prompt, lengths
        # key: (prompt number, sample number). segments: [(step, tokens sampled in this step), …]
        self.going = {}  # unfinished: key -> [tokens left, tokens so far, segments]
        self.ended = {}  # finished, and not used by a step yet: key -> segments
        self.next = 0

    def step(self, step: int) -> dict[str, float]:
        """Simulates one step's rollout. Returns a dict:

            seconds              duration of the rollout
            idle                 fraction of the time in which an engine computes nothing; mean over engines
            staleness, oldest    mean and largest age of a token: number of steps since it was sampled
            tokens               number of tokens in the step's samples"""
        cfg, n = self.cfg, self.cfg.samples_per_prompt
        moved = set(self.going)  # keys to prefill again: all, as the weights are new
        new = cfg.prompts_per_step + (cfg.extra_prompts if step == 0 else 0)
        for number in range(self.next, self.next + new):
            for sample, length in enumerate(self.draw(n)):
                self.going[number, sample] = [int(length), 0, []]
        self.next += new
        keys = sorted(self.going)
        held = [keys[r::self.engines] for r in range(self.engines)]
        seconds, busy = 2 * self.cost.exchange * bool(cfg.round_len), 0.0
        while True:
            each = [self._round(of_engine, moved, step) for of_engine in held]
            seconds += max(each) + self.cost.exchange
            busy += sum(each)
            held = [[k for k in of_engine if k in self.going] for of_engine in held]
            unfinished = {number for number, _ in self.going}
            waits = unfinished if cfg.compares_samples else ()
            ready = sorted(key for key in self.ended if key[0] not in waits)
            due = any(step - step_of(i, cfg) >= cfg.max_staleness or not cfg.carry for i in unfinished)
            if len(ready) >= cfg.samples_per_step and not due:
                break
            target = moves(held)
            moved = set(target)
            for key, rank in target.items():
                held[rank].append(key)
            held = [[k for k in of_engine if target.get(k, r) == r] for r, of_engine in enumerate(held)]
        done = [self.ended.pop(key) for key in ready[:cfg.samples_per_step]]
        ages = [(step - version, tokens) for segments in done for version, tokens in segments]
        total = sum(tokens for _, tokens in ages)
        return {"seconds": seconds, "idle": 1 - busy / (seconds * self.engines),
                "staleness": sum(age * tokens for age, tokens in ages) / max(total, 1),
                "oldest": max((age for age, _ in ages), default=0), "tokens": total}

    def _round(self, keys, moved, step):
        """Simulates one round of one engine: each response of `keys` gets up to --round_len tokens (0: all
        its tokens). Returns the duration in seconds. moved: keys to prefill again."""
        if not keys:
            return 0.0
        reread = 0
        of = [self.going[k] for k in keys]
        segment = np.array([min(left, self.cfg.round_len or left) for left, _, _ in of])
        context = np.array([self.prompt + had for _, had, _ in of])
        for key, count, was in zip(keys, segment.tolist(), context.tolist(), strict=True):
            trajectory = self.going[key]
            if key in moved:
                reread += was
            trajectory[0] -= count
            trajectory[1] += count
            trajectory[2].append((step, count))
            if trajectory[0] == 0:
                self.ended[key] = self.going.pop(key)[2]
        return reread * self.cost.prefill + decode_seconds(segment, context, self.cfg.max_num_seqs, self.cost)


def simulate(cfg: Config, engines: int, cost: Cost, prompt: int, lengths: Callable[[int], np.ndarray],
             steps: int = STEPS, warm: int = WARM) -> dict[str, float]:
    """Returns the mean of each result of Simulation.step (`oldest`: maximum). Skips `warm` steps."""
    simulation = Simulation(cfg, engines, cost, prompt, lengths)
    rows = [simulation.step(i) for i in range(steps)][warm:]
    return {name: (max if name == "oldest" else fmean)(row[name] for row in rows) for name in rows[0]}


def lognormal(mean: float, sigma: float, cap: int, alike: float,
              seed: int = 0) -> Callable[[int], np.ndarray]:
    """Returns a function that draws log-normal lengths of the responses to one prompt.

    cap, mean: maximum and mean of the lengths
    sigma: standard deviation of the lengths' logarithms
    alike: correlation of these logarithms between two responses to the same prompt"""
    rng, normal = np.random.default_rng(seed), np.random.default_rng(1).standard_normal(200_000)
    center = math.log(mean)
    for _ in range(30):  # moves the center until lengths cut at `cap` have this mean
        center += math.log(mean / np.minimum(np.exp(center + sigma * normal), cap).mean())

    def draw(count):
        z = math.sqrt(alike) * rng.standard_normal() + math.sqrt(1 - alike) * rng.standard_normal(count)
        return np.clip(np.exp(center + sigma * z), 1, cap).astype(int)

    return draw


# --- the cost on H100s


def gpu_cost(preset: str, model: str) -> tuple[Config, Cost]:
    """Returns the preset's config, and the estimated Cost of an engine on H100s. A decoding step takes the
    time for reading memory or the time for computing, whichever is longer."""
    cfg, gpu = PRESETS[preset], plan.GPUS["H100"]
    params, hidden, kv_bytes = SHAPES[model]
    hbm, flops = cfg.tp * plan.BANDWIDTH * gpu.hbm, cfg.tp * plan.layer_flops(gpu, hidden)

    def step(running, cached):
        return np.maximum((2 * params + cached * kv_bytes) / hbm, 2 * params * running / flops)

    return cfg, Cost(step, prefill=2 * params / flops, exchange=0.1)


# Model -> (parameters, hidden size, bytes of one token's keys and values).
SHAPES = {"7b": (7.6e9, 3584, 2 * 28 * 4 * 128 * 2), "32b": (32.8e9, 5120, 2 * 64 * 8 * 128 * 2)}


def table(preset: str, model: str, gpus: int, mean: float, sigma: float, alike: float) -> list[dict]:
    cfg, cost = gpu_cost(preset, model)
    engines, cap, prompt = gpus // cfg.tp, cfg.max_response_len, 200
    cfg = replace(cfg, tp=1)  # `cost` already counts all GPUs of an engine
    rules = {"whole": {}, "one round": dict(round_len=cap), "rounds": dict(round_len=cap // 16)} | {
        f"carry {carry}, staleness {most}": dict(round_len=cap // 16, carry=carry, max_staleness=most)
        for carry, most in ((0.1, 2), (0.25, 2), (0.5, 4), (1.0, 8))}
    rows = [{"rule": name} | simulate(replace(cfg, **changes), engines, cost, prompt,
                                      lognormal(mean, sigma, cap, alike)) for name, changes in rules.items()]
    full = cfg.samples_per_step / engines
    batch = np.array([min(full, cfg.max_num_seqs)])
    ideal = rows[0]["tokens"] / engines / batch[0] * float(cost.step(batch, batch * (prompt + mean / 2))[0])
    rows.append({"rule": "ideal", "seconds": ideal, "idle": 0.0, "staleness": 0.0, "oldest": 0})
    facts = {"preset": preset, "gpus": gpus, "mean": mean, "sigma": sigma, "cap": cap, "alike": alike}
    return [facts | row | {"speedup": rows[0]["seconds"] / row["seconds"]} for row in rows]


def show(rows: Sequence[dict]) -> None:
    first = rows[0]
    print(f"\n{first['preset']} on {first['gpus']} H100: responses of {first['mean']:,} tokens on average, "
          f"log-normal with sigma {first['sigma']}, at most {first['cap']:,};\n"
          f"those to the same prompt have lengths whose logarithms are correlated by {first['alike']}\n")
    print(f"  {'rule':24}{'seconds':>9}{'speed-up':>10}{'idle':>7}{'staleness':>11}{'oldest':>8}")
    for row in rows:
        print(f"  {row['rule']:24}{row['seconds']:9.1f}{row['speedup']:10.2f}{row['idle']:7.0%}"
              f"{row['staleness']:11.2f}{row['oldest']:8.0f}")


def main() -> None:
    args = arguments(__doc__, out="")
    rows = []
    for preset, mean in (("orz-7b", 2000), ("orz-7b-grpo", 2000), ("orz-32b", 4000)):
        for alike in (0.0, 0.5):
            found = table(preset, "32b" if "32b" in preset else "7b", 32, mean, 1.0, alike)
            show(found)
            rows += found
    if args.out:
        Path(args.out).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
