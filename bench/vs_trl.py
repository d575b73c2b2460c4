"""The same GRPO job in torz and in TRL: samples a second, memory and what is learned, pair by pair in one run.

    python bench/vs_trl.py [--task sums] [--pairs 5] [--steps 24] [--trl_python PATH]    # needs trl 1.16

Both train the same model on the same prompts with the same reward function: 16 prompts × 8 samples a step, at most 64 tokens,
temperature 1, one update a step, the same learning rate, no KL term. `sums`: the demo's base model, right or wrong, which ends
after some 20 tokens; `digits`: random weights of the same shape, the share of digits, which goes on for 37. TRL runs twice: as
it comes (bf16, activations recomputed), and tuned (`trl_tuned`: neither, which is its fastest on a CPU). Both are one process
with threads on all cores (--ranks, --trl_ranks). All three run at once and take four steps in turns, each waiting while another
works, so that a slow spell of the machine is all of theirs; a pair is such a run with one seed. A side's figure is the median
second of its steps after the first turn; its memory the peak of its processes, what they share counted once. One JSON line a
side; the last one, and bench/results/vs_trl-TASK.json, has the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SIDES = ("torz", "trl", "trl_tuned")
SAYS, TURN = "vs_trl: ", 4
PROMPTS, SAMPLES, TOKENS, LR, BETAS = 16, 8, 64, 3e-4, (0.9, 0.99)
REWARD = '''
def exact(response, answer, kind):
    """1 where the text ends with the boxed answer inside its tags."""
    return float(response.replace("</answer>", "").rstrip().endswith("<answer>\\\\boxed{" + answer + "}"))

def digits(response, answer, kind):
    """Share of digits."""
    return sum(c.isdigit() for c in response) / max(len(response), 1)
'''


class Turns:
    """What a side does between its steps: tell what the last one took and, after TURN of them, wait for its next turn."""

    def __init__(self) -> None:
        self.began, self.done = 0.0, 0

    def step(self, reward: float) -> None:
        self.done += 1
        if os.environ.get("RANK", "0") == "0":
            print(SAYS + json.dumps({"seconds": time.monotonic() - self.began, "reward": reward}), flush=True)
            if self.done % TURN == 0:
                sys.stdin.readline()
        self.began = time.monotonic()


def torz(base: str, reward: str, steps: int, seed: int, out: str, dtype: str) -> None:
    """One run of train.py's loop."""
    import log
    import train
    from configs import PRESETS

    turns, step = Turns(), log.Logger.step

    def noted(self: log.Logger, number: int, metrics: dict) -> None:
        step(self, number, metrics)
        turns.step(metrics["reward"])

    log.Logger.step = noted
    cfg = replace(PRESETS["tiny-grpo"], model=base, data=(f"{base}/train.jsonl",), reward=f"{out}/reward.py:{reward}", go=True,
                  seed=seed, dtype=dtype,
                  prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, max_response_len=TOKENS, pack_len=8192, stop=(),
                  steps=steps, policy_lr=LR, betas=BETAS, lr_decay="constant", warmup_updates=0, weight_decay=0.0, eval_every=0,
                  save_every=0, out=f"{out}/run")
    train.main(cfg)


def trl(base: str, reward: str, steps: int, seed: int, out: str, tuned: bool) -> None:
    """The same with TRL's trainer; `tuned`: not as it comes, but as it is fastest on these cores."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    space: dict = {}
    exec(REWARD, space)
    rows = [json.loads(line) for line in open(f"{base}/train.jsonl")]
    data = Dataset.from_list([{"prompt": r["prompt"] + "<think>", "answer": r["answer"]} for r in rows])
    turns = Turns()

    def score(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        scores = [space[reward](c, a, "") * (ids[-1] == tokenizer.eos_token_id)  # cut by length: 0, as in torz
                  for c, a, ids in zip(completions, answer, completion_ids, strict=True)]
        means.append(statistics.mean(scores))
        return scores

    means: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            turns.step(means[-1])

    world = int(os.environ.get("WORLD_SIZE", "1"))
    config = GRPOConfig(
        output_dir=f"{out}/trl", per_device_train_batch_size=PROMPTS * SAMPLES // world, num_generations=SAMPLES,
        max_completion_length=TOKENS, learning_rate=LR, adam_beta1=BETAS[0], adam_beta2=BETAS[1], lr_scheduler_type="constant",
        weight_decay=0.0, max_grad_norm=1.0, beta=0.0, loss_type="dapo", epsilon=0.2, temperature=1.0, num_iterations=1,
        max_steps=steps, use_cpu=True, save_strategy="no", report_to=[],
        logging_strategy="no", disable_tqdm=True, seed=seed,
        **({"bf16": False, "gradient_checkpointing": False} if tuned else {}))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    GRPOTrainer(model, score, config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]).train()


def memory_mb(group: int) -> float:
    """Peak memory of a session's processes in MB: their own, what they share, and the files of the one that maps most."""
    own, files = 0, [0]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == group or _started_by(int(entry.name), group):
                text = (entry / "status").read_text() + (entry / "smaps_rollup").read_text()
                kb = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in text.splitlines())
                      if name in ("VmHWM", "VmRSS", "RssFile", "Pss_Anon", "Pss_Shmem")}
                own += kb["Pss_Anon"] + kb["Pss_Shmem"] + kb["VmHWM"] - kb["VmRSS"]
                files.append(kb["RssFile"])
        except (OSError, KeyError):  # it has ended
            continue
    return (own + max(files)) / 1000


def _started_by(pid: int, ancestor: int) -> bool:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid == ancestor:
            return True
    return False


class Job:
    """One side in processes of its own. Exits with their log where they fail."""

    def __init__(self, side: str, python: str, ranks: int, args: argparse.Namespace, base: str, seed: int) -> None:
        self.side, self.seed, self.ranks, self.threads = side, seed, ranks, max(1, (os.cpu_count() or 1) // ranks)
        self.out, self.rows = tempfile.TemporaryDirectory(), []
        out = self.out.name
        env = os.environ | {"OMP_NUM_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        start = [python] if ranks == 1 else [python, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "1",
                                             "--nproc-per-node", str(ranks)]
        command = [*start, __file__, "--side", side, "--base", base, "--task", args.task, "--steps", str(args.steps),
                   "--seed", str(seed), "--out", out, "--dtype", args.dtype]
        Path(f"{out}/reward.py").write_text(REWARD)
        with open(f"{out}/log", "w") as log:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                            text=True, start_new_session=True)
        self.turn()  # it starts by itself

    def turn(self) -> None:
        """Have it take a turn, the first with its start, and wait for it."""
        if self.rows:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(SAYS):
                self.rows.append(json.loads(line.removeprefix(SAYS)))
                if len(self.rows) % TURN == 0:
                    return
        sys.exit(f"vs_trl.py: {self.side} failed:\n{Path(self.out.name, 'log').read_text()[-6000:]}")

    def end(self) -> dict:
        """End it; its figures."""
        memory = memory_mb(self.process.pid)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.out.cleanup()
        rows = self.rows
        seconds, tail = statistics.median(r["seconds"] for r in rows[TURN:]), rows[-max(1, len(rows) // 4):]
        return {"side": self.side, "ranks": self.ranks, "threads": self.threads, "seed": self.seed, "step_s": round(seconds, 4),
                "samples_per_s": round(PROMPTS * SAMPLES / seconds, 1), "memory_mb": round(memory),
                "reward_first": round(rows[0]["reward"], 3),
                "reward_last_quarter": round(statistics.mean(r["reward"] for r in tail), 3),
                "rewards": [round(r["reward"], 3) for r in rows]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--task", choices=("sums", "digits"), default="sums")
    parser.add_argument("--base", help="the model's folder, grown where it is missing")
    parser.add_argument("--trl_python", default=sys.executable, help="the interpreter that has trl")
    parser.add_argument("--trl_ranks", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="of torz")
    parser.add_argument("--dtype", default="float32", help="of torz")
    parser.add_argument("--side", choices=SIDES, help="run one side in this process: for the program itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    base, reward, pairs = args.base or f"runs/vs-trl-{args.task}", {"sums": "exact", "digits": "digits"}[args.task], []
    if args.side == "torz":
        return torz(base, reward, args.steps, args.seed, args.out, args.dtype)
    if args.side:
        return trl(base, reward, args.steps, args.seed, args.out, args.side == "trl_tuned")
    if args.task == "sums":
        from tiny import build

        build(base)
    elif not (Path(base) / "train.jsonl").exists():
        from bench.shape import build

        build(base, "tiny")
    for seed in range(args.pairs):
        ours, theirs = (sys.executable, args.ranks), (args.trl_python, args.trl_ranks)
        jobs = [Job(side, *(ours if side == "torz" else theirs), args, base, seed) for side in SIDES]
        for turn in range(1, args.steps // TURN):
            for job in jobs if turn % 2 else jobs[::-1]:
                job.turn()
        pairs.append({job.side: job.end() for job in jobs})
        for row in pairs[-1].values():
            print(json.dumps({k: v for k, v in row.items() if k != "rewards"}), flush=True)
    found = {"bench": "vs_trl", "task": args.task, "cores": os.cpu_count(), "prompts": PROMPTS, "samples": SAMPLES,
             "tokens": TOKENS, "dtype": args.dtype}
    for other in SIDES[1:]:
        faster = [p["torz"]["samples_per_s"] / p[other]["samples_per_s"] for p in pairs]
        found[f"against_{other}"] = {
            "times_faster": round(statistics.median(faster), 2), "pairs": [round(x, 2) for x in faster],
            "memory_share": round(statistics.median(p["torz"]["memory_mb"] / p[other]["memory_mb"] for p in pairs), 2)}
    for side in SIDES:
        found[side] = {k: round(statistics.median(p[side][k] for p in pairs), 3)
                       for k in ("step_s", "samples_per_s", "memory_mb", "reward_last_quarter")}
    print(json.dumps(found))
    (ROOT / f"bench/results/vs_trl-{args.task}.json").write_text(json.dumps(found | {"runs": pairs}) + "\n")


if __name__ == "__main__":
    main()
