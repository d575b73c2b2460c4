"""Seconds of rollouts with a few long responses: sampled whole, in rounds (--round_len), carried (--carry).

    python -m bench.tail                # a simulator: orz-7b and orz-32b on 32 H100, by the plan's speeds
    python -m bench.tail --measure      # the trainer on a long-tailed task on this machine, 20 minutes on two
                                        # cores, and the simulator beside it

The simulator knows the engines' cost of a decoding step by batch and context, and a distribution of lengths.
It runs the rules of rollout.sample_until_enough on them: who goes on where, when a step has enough samples,
what is carried. With `one round`, as long as the longest response, the samples of a prompt are dealt to all
engines, and stay there. `ideal` is what no rule reaches: all engines always decode a full batch. `idle` is
the share of the engines' seconds in which they wait for others.

The measured task is the demo's, except that one response in 50 or so begins with hundreds of dots: these are
twenty times as long as the others. The base model is trained to do so, here, in a minute. The engine is
vLLM. Each rank is bound to one core, which it may share. The simulator has the engine's cost measured alone,
and the lengths that the run had."""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; as a rank of train.py has it

import dist
from bench.common import ROOT
from bench.vs_trl import MALLOC
from configs import PRESETS, Config
from data import prompt_form, step_of
from rollout import PROMPTS_PER_ENGINE, moves
from tools import plan

os.environ |= MALLOC  # for the processes that start here: they keep the memory that they free
STEPS, WARM = 16, 6  # steps of a simulation, and the first ones, which do not count


@dataclass(frozen=True)
class Cost:
    """Seconds that an engine takes."""

    step: Callable[[np.ndarray, np.ndarray], np.ndarray]  # of a decoding step: (responses, cached tokens)
    prefill: float  # of a token that is read again: after new weights, and after a move
    response: float = 0.0  # of a response in a round, beside its tokens
    round: float = 0.0  # of a round, beside that
    exchange: float = 0.0  # of a message to all engines. One ends a round; rounds have two more a step
    cores: int = sys.maxsize  # engine i is bound to core i % cores
    beside: float = 1.0  # speed of a core while all cores are busy; alone it is 1
    shared: float = 1.0  # speed of a core that several engines share


# --- the simulator


def decode_seconds(tokens: np.ndarray, context: np.ndarray, slots: int, cost: Cost) -> float:
    """Seconds in which one engine gives each trajectory `tokens` more, after `context` tokens, with at most
    `slots` at once; the next one starts when one ends."""
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


def together(seconds: Sequence[float], cost: Cost) -> float:
    """Seconds until the last engine is done, if each takes `seconds` on a core of its own."""
    left, elapsed = {i: s for i, s in enumerate(seconds) if s > 0}, 0.0
    while left:
        of_core = Counter(i % cost.cores for i in left)
        own = cost.beside if len(of_core) == cost.cores else 1.0
        speeds = {i: (own if (n := of_core[i % cost.cores]) == 1 else cost.shared) / n for i in left}
        passed = min(s / speeds[i] for i, s in left.items())  # until the next engine is done
        elapsed += passed
        left = {i: rest for i, s in left.items() if (rest := s - passed * speeds[i]) > 1e-9}
    return elapsed


class Simulation:
    """Rollouts of cfg on `engines` engines. lengths(count) draws lengths of responses in tokens."""

    def __init__(self, cfg: Config, engines: int, cost: Cost, prompt: int,
                 lengths: Callable[[int], np.ndarray]) -> None:
        self.cfg, self.engines, self.cost, self.prompt, self.draw = cfg, engines, cost, prompt, lengths
        self.going = {}  # (number, sample) -> [tokens left, tokens so far, [(version, tokens), ...]]
        self.ended = {}  # (number, sample) -> segments
        self.next = 0

    def step(self, step: int) -> dict[str, float]:
        """Seconds, idle share, staleness and tokens of the step's rollout."""
        cfg, n = self.cfg, self.cfg.samples_per_prompt
        moved = set(self.going)  # what was carried is read again, by the step's weights
        new = cfg.prompts_per_step + (cfg.extra_prompts if step == 0 else 0)
        for number in range(self.next, self.next + new):
            for sample, length in enumerate(self.draw(n)):
                self.going[number, sample] = [int(length), 0, []]
        self.next += new
        keys = sorted(self.going)
        held = [keys[r::self.engines] for r in range(self.engines)]
        if len({number for number, _ in keys}) >= PROMPTS_PER_ENGINE * self.engines:
            held = [[k for k in keys if k[0] % self.engines == r] for r in range(self.engines)]
        seconds, busy = 2 * self.cost.exchange * bool(cfg.round_len), 0.0
        while True:
            each = [self._round(of_engine, moved, step) for of_engine in held]
            seconds += together(each, self.cost) + self.cost.exchange
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
        return {"seconds": seconds, "idle": 1 - busy / (seconds * min(self.engines, self.cost.cores)),
                "staleness": sum(age * tokens for age, tokens in ages) / max(total, 1),
                "oldest": max((age for age, _ in ages), default=0), "tokens": total}

    def _round(self, keys, moved, step):
        """Seconds of one engine's round."""
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
        return (self.cost.round + reread * self.cost.prefill + len(keys) * self.cost.response
                + decode_seconds(segment, context, self.cfg.max_num_seqs, self.cost))


def simulate(cfg: Config, engines: int, cost: Cost, prompt: int, lengths: Callable[[int], np.ndarray],
             steps: int = STEPS, warm: int = WARM) -> dict[str, float]:
    """Means over the steps after the first `warm`."""
    simulation = Simulation(cfg, engines, cost, prompt, lengths)
    rows = [simulation.step(i) for i in range(steps)][warm:]
    return {name: (max if name == "oldest" else fmean)(row[name] for row in rows) for name in rows[0]}


def lognormal(mean: float, sigma: float, cap: int, alike: float,
              seed: int = 0) -> Callable[[int], np.ndarray]:
    """Draws the lengths of a prompt's responses: log-normal, cut at `cap`, with about this mean after the
    cut. `alike`: correlation of two responses to one prompt, of the logarithms of their lengths."""
    rng, normal = np.random.default_rng(seed), np.random.default_rng(1).standard_normal(200_000)
    center = math.log(mean)
    for _ in range(30):  # the cut takes some of the mean away
        center += math.log(mean / np.minimum(np.exp(center + sigma * normal), cap).mean())

    def draw(count):
        z = math.sqrt(alike) * rng.standard_normal() + math.sqrt(1 - alike) * rng.standard_normal(count)
        return np.clip(np.exp(center + sigma * z), 1, cap).astype(int)

    return draw


# --- on H100s, by the plan's speeds


def gpu_cost(preset: str, model: str, gpus: int) -> tuple[Config, Cost]:
    """The preset, and what its engine costs on H100s: a decoding step reads the weights and the cache."""
    cfg, gpu = PRESETS[preset], plan.GPUS["H100"]
    params, kv_bytes = SHAPES[model]
    hbm, flops = cfg.tp * plan.BANDWIDTH * gpu.hbm, cfg.tp * plan.MFU * gpu.flops

    def step(running, cached):
        return np.maximum((2 * params + cached * kv_bytes) / hbm, 2 * params * running / flops)

    return cfg, Cost(step, 2 * params / flops, exchange=0.1)


SHAPES = {"7b": (7.6e9, 2 * 28 * 4 * 128 * 2), "32b": (32.8e9, 2 * 64 * 8 * 128 * 2)}  # parameters, KV bytes


def table(preset: str, model: str, gpus: int, mean: float, sigma: float, alike: float) -> list[dict]:
    """One row a rule."""
    cfg, cost = gpu_cost(preset, model, gpus)
    engines, cap, prompt = gpus // cfg.tp, cfg.max_response_len, 200
    cfg = replace(cfg, tp=1)  # an engine is a rank here
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
    """Print rows of `table`."""
    first = rows[0]
    print(f"\n{first['preset']} on {first['gpus']} H100: responses of {first['mean']:,} tokens on average, "
          f"log-normal with sigma {first['sigma']}, at most {first['cap']:,};\n"
          f"those to the same prompt have lengths whose logarithms are correlated by {first['alike']}\n")
    print(f"  {'rule':24}{'seconds':>9}{'speed-up':>10}{'idle':>7}{'staleness':>11}{'oldest':>8}")
    for row in rows:
        print(f"  {row['rule']:24}{row['seconds']:9.1f}{row['speedup']:10.2f}{row['idle']:7.0%}"
              f"{row['staleness']:11.2f}{row['oldest']:8.0f}")


# --- on this machine: a long-tailed task

LONG, SHARE = 360, 0.02  # mean number of dots; share of the responses with dots
RUNS = ROOT / "runs" / "tail"


def long_tailed(base: str, out: Path, steps: int = 200, seed: int = 0) -> Path:
    """A copy of the tiny model `base` that writes dots before a SHARE of its responses. It is trained on its
    own responses. An eighth of the texts get dots, and the token that decides counts accordingly."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (out / "config.json").exists():
        return out
    torch.manual_seed(seed)
    torch.set_num_threads(os.cpu_count())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    rows = [json.loads(line) for line in Path(base, "train.jsonl").read_text().splitlines()[:1024]]
    problems = [prompt_form("plain").replace("{problem}", row["prompt"]) for row in rows]
    prompts = tokenizer(problems, return_tensors="pt", padding=True)
    texts = model.generate(**prompts, do_sample=True, max_new_tokens=48, top_k=0, stop_strings="</answer>",
                           tokenizer=tokenizer)[:, prompts.input_ids.shape[1]:]
    asked = tokenizer(problems).input_ids
    said = [[i for i in text if i != tokenizer.pad_token_id] for text in texts.tolist()]
    (dot,) = tokenizer(".", add_special_tokens=False).input_ids
    rng, optimizer = np.random.default_rng(seed), torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(count, mean, first):
        """Sum of losses of `count` texts with `mean` dots on average; their first token counts `first`
        times."""
        chosen = rng.integers(0, len(rows), count)
        dots = np.minimum(rng.geometric(1 / mean, count), 2 * mean) if mean else np.zeros(count, int)
        ids = [torch.tensor([*asked[i], *[dot] * n, *said[i]]) for i, n in zip(chosen, dots, strict=True)]
        weights = [torch.ones(len(x)) for x in ids]
        for i, weight in zip(chosen, weights, strict=True):
            weight[:len(asked[i])], weight[len(asked[i])] = 0, first
        batch, weight = (torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (ids, weights))
        logp = model(batch).logits[:, :-1].log_softmax(-1).gather(2, batch[:, 1:, None])[..., 0]
        return -(logp * weight[:, 1:]).sum(), weight[:, 1:].sum()

    for step in range(steps):
        # The first tokens count 30-fold: they are few. The share of dots falls to SHARE from above.
        share = 2 / 16 if step < steps / 3 else SHARE
        parts = loss_of(14, 0, 30 * (1 - share) * 16 / 14), loss_of(2, LONG, 30 * share * 16 / 2)
        loss, count = (sum(x) for x in zip(*parts, strict=True))
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / steps)
        optimizer.step()
    model.config.max_position_embeddings = 4096
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for name in ("train.jsonl", "heldout.jsonl"):
        shutil.copy(Path(base, name), out)
    return out


RULES = {"whole": [], "rounds": ["--round_len", "48"],
         "carry": ["--round_len", "48", "--carry", "0.5", "--max_staleness", "16"]}
PORT = 29417
# Each rank is bound to one core: the system would give some of four ranks on two cores more time than others.
BOUND = f'exec taskset -c $((LOCAL_RANK % {os.cpu_count()})) "$0" "$@"'
MEASURED, BEFORE = 32, 16  # steps that count, and those before: the oldest of --carry are 16 steps old
SHAPE = dict(prompts_per_step=16, samples_per_prompt=4, max_response_len=800, max_num_seqs=512,
             pack_len=8192)


def train(model: Path, preset: str, rule: str, ranks: int, seed: int, steps: int,
          **more: float) -> list[dict]:
    """Metrics of a run, one row a step."""
    out = RUNS / f"{preset}-{rule}-{ranks}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    flags = SHAPE | dict(engine="vllm", model=model, data=model / "train.jsonl", eval_every=0, steps=steps,
                         save_every=0, seed=seed, out=out, save_samples="all") | more
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
               "--no-python", "sh", "-c", BOUND, sys.executable, "train.py", preset, "--go", *RULES[rule],
               *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def cpu_cost(model: Path, ranks: int) -> Cost:
    """What a round costs with vLLM on one core of this machine, now: fitted to rounds of several batches,
    prompts and lengths, right after other work. Relative errors count: the tail is many steps of few
    responses. Responses end one by one, as they do in training. vLLM takes more time for a step if one has
    just ended, here 15 % more in a rollout of 60."""
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(ranks), context.SimpleQueue()
    engines = [context.Process(target=cpu_figures, args=(model, rank, ranks, barrier, found))
               for rank in range(ranks)]
    for engine in engines:
        engine.start()
    (start, response, prefill, a, b, c), exchange, beside, shared = found.get()
    for engine in engines:
        engine.join()
    return Cost(lambda n, cached: np.where(n > 0, a + b * n + c * cached, 0), prefill, response, round=start,
                exchange=exchange, cores=os.cpu_count(), beside=beside, shared=shared)


def cpu_figures(model: Path, rank: int, ranks: int, barrier: Any, found: Any) -> None:
    """An engine's process. Rank 0 puts into `found` the seconds of a round, a response, a token that is read,
    a decoding step, a response in it and a token cached in it, measured alone; the seconds of a message to
    all; and the speed of a core beside busy ones, and of one that engines share."""
    import time

    from data import Problem, Sample
    from model import files_weights, load_tokenizer
    from rollout import Trajectories, make_engine, make_grader

    cores, rounds = os.cpu_count(), []
    os.sched_setaffinity(0, {rank % cores})
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
                   "MASTER_ADDR": "localhost", "MASTER_PORT": str(PORT)}
    world, path, rng = dist.init("cpu", "float32"), str(model), np.random.default_rng(0)
    cfg = replace(PRESETS["tiny-grpo"], model=path, engine="vllm", **SHAPE)
    engine, grader = make_engine(path, load_tokenizer(path), cfg, world.device, world.dtype), make_grader(cfg)

    def run(count, prompt, tokens, seed):
        """`count` trajectories of `tokens` tokens, after a prompt of random tokens, with from 0 to nearly all
        of their tokens before the round; the trajectories after it; and seconds."""
        problems = {i: Problem("", tuple(rng.integers(20, 90, prompt).tolist()), "0") for i in range(count)}
        before = [rng.integers(20, 90, tokens * i // count).astype(np.int32) for i in problems]
        trajectories = Trajectories(engine, grader, problems, tokens, tokens)
        trajectories.add(Sample(i, 0, problems[i].ids, ids, np.zeros(len(ids), np.float32), False, "", 0)
                         for i, ids in enumerate(before))
        with engine.awake(files_weights(path, world.device, world.dtype), version=0):
            np.ones(2**24).sum()  # training leaves nothing of the engine in the caches
            start = time.perf_counter()
            trajectories.sample_round(1.0, (seed,), 0, lambda: False)
            return before, trajectories.grades(), time.perf_counter() - start

    def seconds(times):
        return median(run(16, 8, 74, seed)[2] for seed in range(times))

    def message():
        start = time.perf_counter()
        dist.gather(list(range(32)))
        dist.exchange([sent[r::ranks] for r in range(ranks)])
        return time.perf_counter() - start

    sent = run(32, 8, 48, 0)[1]
    barrier.wait()
    shapes = itertools.product((1, 4, 16, 64), (8, 300), (1, 48, 200), range(5))
    for count, prompt, tokens, seed in shapes if rank == 0 else ():
        before, after, taken = run(count, prompt, tokens, seed)
        had = np.array([prompt + len(ids) for ids in before])
        new = np.array([s.length for s in after]) - had
        cached = (new * had + new * (new - 1) / 2).sum()
        rounds.append(np.array([1, count, had.sum(), new.max(), new.sum(), cached]) / taken)
    alone = seconds(9 if rank == 0 else 1)
    barrier.wait()
    beside = seconds(15 if rank < cores else 1)
    barrier.wait()
    shared = seconds(15) / -(-ranks // cores)  # its share of its core
    exchange = median(message() for _ in range(15))
    if rank == 0:
        figures = np.linalg.lstsq(np.array(rounds), np.ones(len(rounds)), rcond=None)[0]
        found.put((figures, exchange, alone / beside, alone / shared))


def lengths_of(rule_out: Path) -> list[list[int]]:
    """Lengths of each step's responses, by prompt and sample."""
    return [[json.loads(line)["tokens"] for line in file.read_text().splitlines()]
            for file in sorted((rule_out / "samples").glob("*.jsonl"))]


def measure(base: str, seeds: int) -> tuple[list[dict], list[dict]]:
    """Seconds of each rule with weights that hardly move, so that lengths stay: measured and simulated. And
    the rewards of runs that learn, with and without --carry."""
    model, runs, costs, learnt = long_tailed(base, RUNS / "base"), {}, {}, []
    for preset, ranks in (("tiny-ppo", 2), ("tiny-grpo", 2), ("tiny-ppo", 4)):
        costs[preset, ranks] = cpu_cost(model, ranks)  # each time: this machine's speed may change
        for rule in RULES:
            rows = train(model, preset, rule, ranks, 0, BEFORE + MEASURED, policy_lr=1e-8)
            runs[preset, rule, ranks] = [row for row in rows if "reward" in row][BEFORE:]
            print(preset, rule, ranks, [round(r["time/step"], 2) for r in runs[preset, rule, ranks]],
                  file=sys.stderr)
    lengths = np.array(sum(lengths_of(RUNS / "tiny-ppo-whole-2-0"), []))
    long, short = lengths[lengths > 64], lengths[lengths <= 64]
    facts = {"responses": len(lengths), "long": len(long) / len(lengths), "times": long.mean() / short.mean()}
    found = []
    for (preset, rule, ranks), rows in runs.items():
        names, values = (word[2:] for word in RULES[rule][::2]), map(json.loads, RULES[rule][1::2])
        flags = dict(zip(names, values, strict=True))
        own = itertools.cycle(sum(lengths_of(RUNS / f"{preset}-{rule}-{ranks}-0"), []))  # the run's, in order
        predicted = simulate(replace(PRESETS[preset], **SHAPE, **flags), ranks, costs[preset, ranks], 8,
                             lambda n, own=own: np.fromiter(own, int, n), BEFORE + MEASURED, BEFORE)
        means = {name: fmean(row[f"time/{name}"] for row in rows) for name in ("rollout", "wait", "step")}
        found.append({"preset": preset, "rule": rule, "ranks": ranks,
                      "sampling_s": means["rollout"] + means["wait"], "simulated_s": predicted["seconds"],
                      "wait_s": means["wait"], "step_s": means["step"],
                      "staleness": fmean(row.get("staleness/mean", 0) for row in rows)} | facts)
    for seed in range(seeds):
        for rule in ("whole", "carry"):
            rows = train(model, "tiny-ppo", rule, 2, seed, 16, eval_every=8,
                         eval_data=model / "heldout.jsonl")
            learnt.append({"rule": rule, "seed": seed,
                           "rewards": [round(row["reward"], 3) for row in rows if "reward" in row],
                           "held_out": [round(value, 3) for row in rows for name, value in row.items()
                                        if name.startswith("eval/heldout/avg@")]})
            print(learnt[-1], file=sys.stderr)
    return found, learnt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="run the trainer here, beside the simulator")
    parser.add_argument("--base", default="runs/tiny-base-0")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", default="", help="also write the figures here, a JSON line each")
    args = parser.parse_args()
    if args.measure:
        rows = sum(measure(args.base, args.seeds), [])
        for row in rows:
            print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}))
    else:
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
