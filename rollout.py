"""Graded rollouts and evaluation, and the command that evaluates any Hugging Face folder.

    with engine.awake(full_weights(policy), version=step):
        samples = rollout(engine, grader, {prompt_id: problem, …}, n=8, key=(seed, step), …)

    python rollout.py MODEL DATA [DATA …] [--eval_samples 16] [--template chat] …
    torchrun --nproc-per-node 8 rollout.py MODEL DATA …        # on 8 GPUs; flags as in train.py
"""

import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import dist
from configs import Config, parse, require, user_errors
from data import Problem, Sample, group_by_prompt, load_problems
from engine import Engine
from engine_torch import TorchEngine
from engine_vllm import VLLMEngine
from log import Meter
from model import files_weights, load_config, load_tokenizer
from reward import KINDS, Grader

ENGINES = {"torch": TorchEngine, "vllm": VLLMEngine}
TRAIN, EVAL, CHECK = 1, 2, 3  # random streams: the second number of a sample's key


def make_engine(path: str, tokenizer: Any, cfg: Config, device: torch.device, dtype: torch.dtype) -> Engine:
    """The engine that cfg names, for the model folder `path`. Raises UserError where it can't run."""
    kind = cfg.engine if cfg.engine != "auto" else "vllm" if device.type == "cuda" else "torch"
    require(kind == "vllm" or cfg.tp == 1, f"--tp {cfg.tp} with the torch engine", "--engine vllm, or --tp 1")
    known = max_positions(load_config(path))
    require(cfg.engine_len <= known, f"{path} has {known:,} positions, and a prompt with its response may "
            f"take {cfg.engine_len:,}", "smaller --max_response_len or --eval_response_len, "
            f"--max_model_len {known}, or another --model")
    return ENGINES[kind](path, tokenizer, cfg, device, dtype)


def max_positions(config: Any) -> float:
    """Longest sequence that the model was made for, with what its rope scaling adds; infinite where it has no
    limit."""
    rope = getattr(config, "rope_parameters", None) or {}
    known = getattr(config, "max_position_embeddings", None) or math.inf
    original = rope.get("original_max_position_embeddings") or known
    scaled = rope.get("rope_type") in ("linear", "dynamic", "yarn")
    return max(known, original * rope.get("factor", 1)) if scaled else known


def make_grader(cfg: Config) -> Grader:
    """Grading processes beside this rank, for cfg's reward. Raises UserError for a reward that doesn't
    exist."""
    custom = cfg.reward if ":" in cfg.reward else None
    require(bool(custom) or cfg.reward in KINDS, f"no reward {cfg.reward!r}",
            f"--reward {', '.join(KINDS)} or path/to/file.py:function")
    return Grader(workers=cfg.grade_workers, deadline=cfg.grade_deadline, reward=custom)


def rollout(engine: Engine, grader: Grader, problems: Mapping[int, Problem], n: int, temperature: float,
            max_tokens: int, key: tuple[int, ...], version: int,
            on_response: Callable[[], bool] = lambda: False) -> list[Sample]:
    """`n` graded samples of each problem (prompt_id -> problem), ordered by (prompt_id, sample_id).

    Each response is graded while others are still sampled. `on_response` is called at each response. If it
    returns True, sampling is aborted and the result is empty. The other arguments are those of
    Engine.generate."""
    samples = {}
    prompts = {prompt_id: p.ids for prompt_id, p in problems.items()}
    for s in engine.generate(prompts, n, temperature, max_tokens, key, version):
        if on_response():
            return []
        samples[s.prompt_id, s.sample_id] = s
        problem = problems[s.prompt_id]
        grader.submit((s.prompt_id, s.sample_id), s.text, problem.answer, s.stopped, problem.kind)
    grades = grader.results()
    return [replace(samples[k], reward=grades[k].reward, reason=grades[k].reason, answer=grades[k].answer)
            for k in sorted(samples)]


def engine_part(problems: Mapping[int, Problem], engine: Engine) -> dict[int, Problem]:
    """The problems (prompt_id -> problem) that this engine samples: every `engine.engines`-th, so that
    engines have equally many."""
    return dict(itertools.islice(problems.items(), engine.engine_id, None, engine.engines))


def sample_row(s: Sample, problem: Problem) -> dict[str, Any]:
    """A sample as a row of samples/*.jsonl and eval/*.jsonl."""
    same = {name: getattr(s, name) for name in "prompt_id sample_id answer reward reason stopped".split()}
    return same | dict(problem=problem.text, gold=problem.answer, response=s.text, tokens=len(s.ids))


# --- evaluation


def load_sets(cfg: Config, tokenizer: Any, say: Callable[[str], None]) -> dict[str, list[Problem]]:
    """The held-out problems of each file of cfg.eval_data, by the file's name. Raises UserError."""
    names = [Path(path).stem for path in cfg.eval_data]
    require(len(set(names)) == len(names), f"--eval_data has two files of one name: {' '.join(names)}",
            "another name for one of them")
    return {name: load_problems([path], tokenizer, cfg, say)
            for name, path in zip(names, cfg.eval_data, strict=True)}


def evaluate_sets(engine: Engine, grader: Grader, sets: Mapping[str, Sequence[Problem]], cfg: Config,
                  step: int, on_response: Callable[[], bool] = lambda: False,
                  ) -> tuple[dict[str, float], list[dict]]:
    """Metrics `NAME/…` over all ranks of each held-out set (name -> problems), and one row per response.

    avg@n is the mean reward of n samples. pass@k is unbiased, for k = 2, 4, … n. maj@n grades the answer that
    most samples gave. The randomness is the same at every step, so evaluations differ by the weights alone.
    """
    meter, rows = Meter(), []
    for i, (name, problems) in enumerate(sets.items()):
        n, temperature = (v[i % len(v)] for v in (cfg.eval_samples, cfg.eval_temperature))
        part, length = engine_part(dict(enumerate(problems)), engine), cfg.eval_response_len
        samples = rollout(engine, grader, part, n, temperature, length or cfg.max_response_len,
                          (cfg.seed, EVAL, i), step, on_response)
        for metric, (total, count) in accuracy(samples, n).items():
            meter.add(f"{name}/{metric}", total, count)
        rows += dist.gather_rows([{"set": name} | sample_row(s, problems[s.prompt_id]) for s in samples])
    return meter.reduce(dist.all_sum, dist.all_max), rows


def accuracy(samples: Sequence[Sample], n: int) -> dict[str, tuple[float, int]]:
    """(sum, count) of each evaluation metric over `n` samples per prompt; sums and counts add up over
    ranks."""
    groups = group_by_prompt(samples)
    right = [sum(s.reward > 0 for s in group) for group in groups]
    metrics = {f"avg@{n}": (sum(s.reward for s in samples) / n, len(groups))}
    for k in sorted({2**i for i in range(1, n.bit_length())} | {n} - {1}):
        metrics[f"pass@{k}"] = sum(pass_at(k, n, c) for c in right), len(groups)
    if n > 2:
        metrics[f"maj@{n}"] = sum(majority(group) for group in groups), len(groups)
    metrics["response_len"] = sum(len(s.ids) for s in samples), len(samples)
    metrics["truncated"] = sum(not s.stopped for s in samples), len(samples)
    return metrics


def pass_at(k: int, n: int, right: int) -> float:
    """Probability that k of n samples, of which `right` are right, contain a right one:
    1 - C(n - right, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(group: Sequence[Sample]) -> float:
    """1 if the most frequent answer of one prompt's samples is right, else 0. For several most frequent
    answers: the share of right ones. Samples without an answer don't vote."""
    votes = Counter(s.answer for s in group if s.answer is not None)
    top = [a for a, count in votes.items() if count == max(votes.values())]
    right = {s.answer for s in group if s.reward > 0}
    return sum(a in right for a in top) / len(top) if top else 0.0


# --- the command


def main(argv: Sequence[str]) -> None:
    """`python rollout.py MODEL DATA [DATA …] [--flag value …]`: see the top of this file. Raises
    UserError."""
    paths = list(itertools.takewhile(lambda a: not a.startswith("--"), argv))
    require(len(paths) >= 2 or "--help" in argv, f"rollout.py {' '.join(argv)}",
            "python rollout.py MODEL DATA [DATA …] [--flags]")
    model, flags = (paths or [""])[0], argv[len(paths):]
    out = f"runs/eval-{Path(model).name}"
    cfg = parse(["orz-7b", "--model", model, "--eval_data", *paths[1:], "--out", out, *flags], "rollout.py")
    world = dist.init(cfg.device, cfg.dtype, cfg.stall_limit)
    say = print if world.main else lambda text: None
    tokenizer = load_tokenizer(model)
    sets = load_sets(cfg, tokenizer, say)
    engine = make_engine(model, tokenizer, cfg, world.device, world.dtype)
    weights = files_weights(model, world.device, world.dtype)
    with make_grader(cfg) as grader, engine.awake(weights, version=0):
        metrics, rows = evaluate_sets(engine, grader, sets, cfg, 0)
    if not world.main:
        return
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "samples.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (out / "scores.json").write_text(json.dumps(metrics, indent=1) + "\n")
    for name, value in metrics.items():
        print(f"{name:40} {value:.4g}")
    print(f"{out / 'samples.jsonl'}, {out / 'scores.json'}")


if __name__ == "__main__":
    with user_errors("rollout.py"):
        main(sys.argv[1:])
