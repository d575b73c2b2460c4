"""Trains with GRPO in TRL, with vLLM in the same process, for a comparison with torz on one GPU.

    python bench/trl_side.py MODEL [--steps 4] [--prompts 32] [--samples 8] [--tokens 512] [--micro 32]

MODEL is a folder that bench/shape.py has written. Needs trl 1.16 and datasets. Activations are not
recomputed, which is TRL's fastest setting. Prints a line for each step, and one JSON line.
--micro: samples of a forward pass
"""

from __future__ import annotations

import argparse
import json
import os
import time
from statistics import median


def digits(response: str, answer: str, kind: str) -> float:
    """Returns the fraction of digits, a reward with which samples of a prompt rarely tie."""
    return sum(c.isdigit() for c in response) / max(len(response), 1)


def train(args: argparse.Namespace) -> dict:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds, total = [], args.prompts * args.samples

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__) -> None:
            torch.cuda.synchronize()
            seconds.append(-time.perf_counter())

        def on_step_end(self, *_, **__) -> None:
            torch.cuda.synchronize()
            seconds[-1] += time.perf_counter()
            print(f"step {seconds[-1]:.3f} s", flush=True)

    rows = [json.loads(line) for line in open(f"{args.model}/train.jsonl")]
    data = Dataset.from_list([{"prompt": r["prompt"] + "<think>", "answer": r["answer"]} for r in rows])
    config = GRPOConfig(
        output_dir=f"{args.model}/trl", per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=total // args.micro, num_generations=args.samples,
        max_completion_length=args.tokens, learning_rate=1e-6, lr_scheduler_type="constant", beta=0.0,
        loss_type="dapo", epsilon=0.2, temperature=1.0, num_iterations=1, max_steps=args.steps, bf16=True,
        save_strategy="no", report_to=[], logging_strategy="no", disable_tqdm=True, use_vllm=True,
        vllm_mode="colocate", vllm_gpu_memory_utilization=0.4, vllm_enable_sleep_mode=True, max_grad_norm=1.0,
        gradient_checkpointing=False)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")

    def reward(completions: list[str], **_) -> list[float]:
        return [digits(text, "", "") for text in completions]

    trainer = GRPOTrainer(args.model, reward, config, train_dataset=data, processing_class=tokenizer,
                          callbacks=[Clock()])
    trainer.train()
    step = median(seconds[1:])
    free, whole = torch.cuda.mem_get_info()
    return {"bench": "trl", "micro": args.micro, "step_s": round(step, 3),
            "all": [round(s, 3) for s in seconds], "samples_per_s": round(total / step, 1),
            "held_gib": round((whole - free) / 2**30, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    for flag, value in dict(steps=4, prompts=32, samples=8, tokens=512, micro=32).items():
        parser.add_argument(f"--{flag}", type=int, default=value)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    print(json.dumps(train(parser.parse_args())), flush=True)
    os._exit(0)  # vLLM's threads may not end
