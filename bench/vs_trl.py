"""Runs the same GRPO job in torz and in TRL, and compares samples per second, memory and reward.

    python -m bench.vs_trl [--task sums] [--pairs 5] [--steps 24] [--trl_python PATH]    # needs trl 1.16

Tasks:
    sums     the demo's base model; a response is right or wrong
    digits   random weights of the same shape; the reward is the fraction of digits in the response

Sides:
    torz        this project
    trl         TRL with its defaults: bf16, activations recomputed
    trl_tuned   TRL in fp32 without recomputation, its fastest setting on a CPU

The sides take turns of four steps: if the machine slows down, all suffer. --trl_python is the Python of an
environment with TRL. The program sets --side, --seed and --out itself, for the processes that it starts.

Each side trains once for each of --pairs seeds. Prints one JSON line per side and seed. The last line, and
bench/results/vs_trl-TASK.json, compare the sides.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python bench/vs_trl.py`

from bench.common import RESULTS, arguments, say, torchrun

SIDES = ("torz", "trl", "trl_tuned")
MARK = "vs_trl: "
TURN = 4  # steps that a process trains before it pauses for the other processes
PROMPTS, SAMPLES, TOKENS, LR, BETAS = 16, 8, 64, 3e-4, (0.9, 0.99)
MALLOC = {"MALLOC_TRIM_THRESHOLD_": "2147483647", "MALLOC_TOP_PAD_": "67108864",
          "MALLOC_MMAP_THRESHOLD_": "33554432"}
REWARD = '''
def exact(response, answer, kind):
    """1 if the response ends with the boxed answer inside its tags, else 0."""
    return float(response.replace("</answer>", "").rstrip().endswith("<answer>\\\\boxed{" + answer + "}"))

def digits(response, answer, kind):
    """Share of digits."""
    return sum(c.isdigit() for c in response) / max(len(response), 1)
'''


# --- the process that trains with torz or with TRL


class Turns:
    """Pauses this process while another one trains."""

    def __init__(self) -> None:
        self.start, self.steps = 0.0, 0

    def step(self, reward: float) -> None:
        """Prints a step's seconds and reward. After TURN steps, pauses until Job.turn writes to stdin."""
        self.steps += 1
        if os.environ.get("RANK", "0") == "0":
            row = {"seconds": time.monotonic() - self.start, "reward": reward}
            print(MARK + json.dumps(row), flush=True)
            if self.steps % TURN == 0:
                sys.stdin.readline()
        self.start = time.monotonic()


def torz(base: str, reward: str, steps: int, seed: int, out: str, dtype: str) -> None:
    import log
    import train
    from configs import PRESETS

    turns, log_step = Turns(), log.Logger.step

    def step(self: log.Logger, number: int, metrics: dict) -> None:
        log_step(self, number, metrics)
        turns.step(metrics["reward"])

    log.Logger.step = step
    train.main(replace(
        PRESETS["tiny-grpo"], model=base, data=(f"{base}/train.jsonl",), go=True, seed=seed, dtype=dtype,
        reward=(f"{out}/reward.py:{reward}",), out=f"{out}/run", prompts_per_step=PROMPTS,
        samples_per_prompt=SAMPLES, max_response_len=TOKENS, pack_len=8192, stop=(), steps=steps,
        policy_lr=LR, betas=BETAS, lr_decay="constant", warmup_updates=0, weight_decay=0.0, eval_every=0,
        save_every=0))


def trl_reward(reward: str, tokenizer, means: list[float]) -> Callable:
    """Returns the reward function for TRL. Each call appends the mean reward to `means`."""
    functions: dict = {}
    exec(REWARD, functions)

    def score(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_) -> list[float]:
        scores = []
        for text, gold, ids in zip(completions, answer, completion_ids, strict=True):
            ended = ids[-1] == tokenizer.eos_token_id  # else the score is 0, as in torz
            scores.append(functions[reward](text, gold, "") * ended)
        means.append(mean(scores))
        return scores

    return score


def trl(base: str, reward: str, steps: int, seed: int, out: str, tuned: bool) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    turns, means = Turns(), []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            turns.step(means[-1])

    rows = [json.loads(line) for line in open(f"{base}/train.jsonl")]
    data = Dataset.from_list([{"prompt": r["prompt"] + "<think>", "answer": r["answer"]} for r in rows])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    fastest = {"bf16": False, "gradient_checkpointing": False} if tuned else {}
    config = GRPOConfig(
        output_dir=f"{out}/trl", per_device_train_batch_size=PROMPTS * SAMPLES // world,
        num_generations=SAMPLES, max_completion_length=TOKENS, learning_rate=LR, adam_beta1=BETAS[0],
        adam_beta2=BETAS[1], lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, beta=0.0,
        loss_type="dapo", epsilon=0.2, temperature=1.0, num_iterations=1, max_steps=steps, use_cpu=True,
        save_strategy="no", report_to=[], logging_strategy="no", disable_tqdm=True, seed=seed, **fastest)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    GRPOTrainer(model, trl_reward(reward, tokenizer, means), config, train_dataset=data,
                processing_class=tokenizer, callbacks=[Clock()]).train()


# --- memory


def processes_of(leader: int) -> set[int]:
    """Returns the ids of the processes in the session of `leader`, and of their descendants."""
    parents, found = {}, set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        if leader in (pid, int(fields[3])):
            found.add(pid)
    before = 0
    while len(found) > before:
        before = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


def memory_mb(leader: int) -> float:
    """Returns the peak memory of processes_of(leader) in MB."""
    total = 0
    for pid in processes_of(leader):
        folder, kb = Path(f"/proc/{pid}"), {}
        try:
            lines = (folder / "status").read_text() + (folder / "smaps_rollup").read_text()
        except OSError:  # the process has ended
            continue
        for name, _, rest in (line.partition(":") for line in lines.splitlines()):
            if name in ("VmHWM", "VmRSS", "Pss_Anon", "Pss_Shmem"):
                kb[name] = int(rest.split()[0])
        if kb:
            total += kb["Pss_Anon"] + kb["Pss_Shmem"] + kb["VmHWM"] - kb["VmRSS"]
    return total * 1024 / 1e6


# --- the comparison


class Job:
    def __init__(self, side: str, python: str, ranks: int, args: argparse.Namespace, base: str,
                 seed: int) -> None:
        self.side, self.seed, self.ranks = side, seed, ranks
        self.threads = max(1, (os.cpu_count() or 1) // ranks)
        self.folder, self.rows = tempfile.TemporaryDirectory(), []
        out = self.folder.name
        inherited = {name: value for name, value in os.environ.items() if name not in MALLOC}
        env = inherited | ({} if side == "trl" else MALLOC) | {
            "OMP_NUM_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        command = [python, *torchrun(ranks, "-m", "bench.vs_trl", "--side", side, "--base", base, "--task",
                                     args.task, "--steps", args.steps, "--seed", seed, "--out", out,
                                     "--dtype", args.dtype)[1:]]
        Path(out, "reward.py").write_text(REWARD)
        with open(f"{out}/log", "w") as log:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=log, text=True, start_new_session=True)
        self.turn()

    def turn(self) -> None:
        if self.rows:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.rows.append(json.loads(line.removeprefix(MARK)))
                if len(self.rows) % TURN == 0:
                    return
        sys.exit(f"vs_trl.py: {self.side} failed:\n{Path(self.folder.name, 'log').read_text()[-6000:]}")

    def end(self) -> dict:
        memory = memory_mb(self.process.pid)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()
        rewards = [row["reward"] for row in self.rows]
        seconds = median(row["seconds"] for row in self.rows[TURN:])
        return {"side": self.side, "ranks": self.ranks, "threads": self.threads, "seed": self.seed,
                "step_s": round(seconds, 4), "samples_per_s": round(PROMPTS * SAMPLES / seconds, 1),
                "memory_mb": round(memory), "reward_first": round(rewards[0], 3),
                "reward_last_quarter": round(mean(rewards[-max(1, len(rewards) // 4):]), 3),
                "rewards": [round(r, 3) for r in rewards]}


def run_pair(args: argparse.Namespace, base: str, seed: int) -> dict[str, dict]:
    ours, theirs = (sys.executable, args.ranks), (args.trl_python, args.trl_ranks)
    jobs = [Job(side, *(ours if side == "torz" else theirs), args, base, seed) for side in SIDES]
    for turn in range(1, args.steps // TURN):
        for job in jobs if turn % 2 else jobs[::-1]:
            job.turn()
    figures = {job.side: job.end() for job in jobs}
    for row in figures.values():
        say({k: v for k, v in row.items() if k != "rewards"})
    return figures


def summary(pairs: list[dict[str, dict]], args: argparse.Namespace) -> dict:
    result = {"bench": "vs_trl", "task": args.task, "cores": os.cpu_count(), "prompts": PROMPTS,
              "samples": SAMPLES, "tokens": TOKENS, "dtype": args.dtype}
    for other in SIDES[1:]:
        faster = [p["torz"]["samples_per_s"] / p[other]["samples_per_s"] for p in pairs]
        memory = [p["torz"]["memory_mb"] / p[other]["memory_mb"] for p in pairs]
        result[f"against_{other}"] = {"times_faster": round(median(faster), 2),
                                      "pairs": [round(x, 2) for x in faster],
                                      "memory_share": round(median(memory), 2)}
    for side in SIDES:
        result[side] = {k: round(median(p[side][k] for p in pairs), 3)
                        for k in ("step_s", "samples_per_s", "memory_mb", "reward_last_quarter")}
    return result


def main() -> None:
    args = arguments(__doc__, pairs=5, steps=24, task="sums", base="", trl_python=sys.executable, trl_ranks=1,
                     ranks=1, dtype="float32", side="", seed=0, out="")
    base = args.base or f"runs/vs-trl-{args.task}"
    reward = {"sums": "exact", "digits": "digits"}[args.task]
    if args.side == "torz":
        return torz(base, reward, args.steps, args.seed, args.out, args.dtype)
    if args.side:
        return trl(base, reward, args.steps, args.seed, args.out, args.side == "trl_tuned")
    if args.task == "sums":
        from tools.tiny import build

        build(base)
    elif not (Path(base) / "train.jsonl").exists():
        from bench.shape import build

        build(base, "tiny")
    pairs = [run_pair(args, base, seed) for seed in range(args.pairs)]
    result = summary(pairs, args)
    say(result)
    (RESULTS / f"vs_trl-{args.task}.json").write_text(json.dumps(result | {"runs": pairs}) + "\n")


if __name__ == "__main__":
    main()
