"""Graded rollouts and evaluation, and the command that evaluates any Hugging Face folder.

    with engine.awake(full_weights(policy), version=step):
        samples = rollout(engine, grader, {prompt_id: problem, …}, n=8, key=(seed, step), …)

    python rollout.py MODEL DATA [DATA …] [--eval_samples 16] [--template chat] …
    torchrun --nproc-per-node 8 rollout.py MODEL DATA …        # on 8 GPUs; the flags in EVAL_FLAGS
"""

import hashlib
import itertools
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dist
import grpo
from configs import PRESETS, Config, parse, require, user_errors
from data import Problem, Problems, Sample, group_by_prompt, load_problems
from engine import Engine
from engine_torch import TorchEngine
from engine_vllm import VLLMEngine
from log import Meter
from model import files_weights, load_config, load_tokenizer, resolve, ropes
from reward import (
    MAX_ANSWER,
    Grader,
    Term,
    extract,
    grade,
    parse_terms,
    repetition,
    tag_count,
    think_then_answer,
)

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
    known = getattr(config, "max_position_embeddings", None) or math.inf
    rope, *others = ropes(config)
    original = rope.get("original_max_position_embeddings") or known
    # Where types of layers have their own rotary embeddings, the config's number counts the scaling already.
    scaled = not others and rope.get("rope_type") in ("linear", "yarn")
    return max(known, original * rope.get("factor", 1)) if scaled else known


def make_grader(cfg: Config) -> Grader:
    """Grading processes beside this rank, for cfg's rewards. Raises UserError for a reward or an extractor
    that doesn't exist."""
    terms = terms_of(cfg)
    for name in extractors(cfg).values():
        extract("", name)
    return Grader(cfg.grade_workers, cfg.grade_deadline, [t.custom for t in terms if t.custom],
                  any(t.kind for t in terms))


# --- rewards


def overlong(group: Sequence[Sample], cfg: Config) -> list[float]:
    """DAPO's penalty for responses near the length limit (arXiv 2503.14476, eq. 13). After a long prompt the
    limit may be that of prompt and response together."""
    limits = [min(cfg.max_response_len, cfg.model_len - len(s.prompt)) for s in group]
    return [grpo.overlong_penalty(len(s.ids), limit, cfg.overlong_buffer)
            for s, limit in zip(group, limits, strict=True)]


def nonstop(group: Sequence[Sample], cfg: Config) -> list[float]:
    """Open-Instruct's penalty for responses that the length limit ended."""
    return [0.0 if s.stopped else -cfg.nonstop_penalty for s in group]


def length(group: Sequence[Sample], cfg: Config) -> list[float]:
    """Kimi k1.5's length reward (arXiv 2501.12599, sec. 2.3.3): from 0.5 for the shortest of a prompt's
    responses to -0.5 for the longest; for a wrong response at most 0."""
    lengths = [len(s.ids) for s in group]
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    rewards = [0.5 - (n - shortest) / spread if spread else 0.0 for n in lengths]
    return [x if s.reward > 0 else min(0.0, x) for s, x in zip(group, rewards, strict=True)]


# What training may add to the reward, by name: functions of the samples of one prompt. A part is on if
# --reward names it, or its flag in BY_FLAG is given. Each is logged as reward/NAME.
REWARD_PARTS = {
    "format": lambda group, cfg: [think_then_answer(s.text) for s in group],
    "tags": lambda group, cfg: [tag_count(s.text) for s in group],
    "repetition": lambda group, cfg: [-repetition(s.text) for s in group],
    "length": length,
    "overlong": overlong,
    "nonstop": nonstop,
}
BY_FLAG = {"overlong": "overlong_buffer", "nonstop": "nonstop_penalty"}  # parts that a flag of their own adds


def terms_of(cfg: Config) -> list[Term]:
    """The terms of --reward, graders first. Raises UserError for one that doesn't exist."""
    terms = parse_terms(cfg.reward, [name for name in REWARD_PARTS if name not in BY_FLAG])
    clash = sorted({t.name for t in terms if t.kind or t.custom} & REWARD_PARTS.keys())
    require(not clash, f"--reward has a function named {', '.join(clash)}, as a part is", "another name")
    return terms


def weighted_parts(cfg: Config) -> dict[str, float]:
    """Name and weight of the parts that are on."""
    named = {t.name: t.weight for t in terms_of(cfg) if not t.kind and not t.custom}
    return named | {name: 1.0 for name, flag in BY_FLAG.items() if getattr(cfg, flag)}


def part_names(cfg: Config) -> list[str]:
    """Names of all that may enter a sample's score beside the first grader, whose mean is the reward's. Where
    a data set has its own grader, the first one differs, and all graders are named."""
    graders = [t for t in terms_of(cfg) if t.kind or t.custom]
    own = any(t.dataset for t in graders)
    return [*(t.name for t in graders[0 if own else 1:]), *weighted_parts(cfg)]


def reward_files(cfg: Config) -> dict[str, str]:
    """Path -> hash of the text of each file that --reward names; "" for one that can't be read."""
    paths = {t.custom.rpartition(":")[0] for t in terms_of(cfg) if t.custom}
    files = {path: Path(path) for path in sorted(paths)}
    return {path: hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""
            for path, file in files.items()}


def shape_rewards(samples: Sequence[Sample], cfg: Config) -> list[Sample]:
    """The samples, ordered by (prompt_id, sample_id), with their reward parts. With --mask_truncated, a
    truncated one does not enter the loss."""
    shaped, weights = [], weighted_parts(cfg)
    for group in group_by_prompt(samples):
        values = {name: REWARD_PARTS[name](group, cfg) for name in weights}
        for i, s in enumerate(group):
            parts = s.parts | {name: weights[name] * values[name][i] for name in weights}
            shaped.append(replace(s, parts=parts, in_loss=s.stopped or not cfg.mask_truncated))
    return shaped


def graders_of(dataset: str, terms: Sequence[Term]) -> list[Term]:
    """The terms that grade a data set's responses; the first one's value is the reward. Terms of the data set
    itself come first, and replace the comparison of answers."""
    own = [t for t in terms if t.dataset and t.dataset == dataset.casefold()]
    return own + [t for t in terms if not t.dataset and (t.custom or (t.kind and not own))]


def extractors(cfg: Config) -> dict[str, str]:
    """Name of the extractor by data set; "" is that of all others. Raises UserError for two of one."""
    found = {}
    for dataset, _, name in (spec.rpartition("=") for spec in cfg.extractor):
        whose = f"data set {dataset.casefold()!r}" if dataset else "all other rows"
        require(dataset.casefold() not in found, f"--extractor {' '.join(cfg.extractor)} has two extractors "
                f"for {whose}", "one each: NAME, and DATASET=NAME for the rows of a data set")
        found[dataset.casefold()] = name
    return {"": "orz"} | found


def check_graders(sets: Iterable[Problems], cfg: Config) -> None:
    """Raises UserError where a row's data set has no grader, or where --reward or --extractor name a data set
    that no row has. `sets`: the run's problems, of training and evaluation."""
    terms, datasets = terms_of(cfg), set().union(*(problems.datasets() for problems in sets))
    there = {dataset.casefold() for dataset in datasets} - {""}
    of_presets = {name for preset in PRESETS.values() for name in extractors(preset)}  # rows may lack these
    named = {t.dataset for t in terms} | extractors(cfg).keys()
    unknown = ", ".join(map(repr, sorted(named - there - of_presets)))
    require(not unknown, f"--reward or --extractor has a data set's own, but no row is of data set {unknown}",
            f"one of {', '.join(sorted(there))}" if there else "rows with a field dataset")
    for dataset in sorted(datasets):
        found = graders_of(dataset, terms)
        require(bool(found) and not (dataset.casefold().startswith("ifeval") and found[0].kind),
                f"rows of data set {dataset!r} have no answer to compare, and --reward no grader for them",
                f"--reward math {dataset}@FILE.py:FUNCTION")


# --- rollouts


def rollout(engine: Engine, grader: Grader, problems: Mapping[int, Problem], n: int, temperature: float,
            max_tokens: int, key: tuple[int, ...], version: int,
            on_response: Callable[[], bool] = lambda: False) -> list[Sample]:
    """`n` graded samples of each problem (prompt_id -> problem), ordered by (prompt_id, sample_id).

    Each response is graded while others are still sampled. `on_response` is called at each response. If it
    returns True, sampling is aborted and the result is empty. The other arguments are those of
    Engine.generate."""
    samples, terms, by_dataset = {}, terms_of(engine.cfg), extractors(engine.cfg)
    prompts = {prompt_id: p.ids for prompt_id, p in problems.items()}
    graders = {prompt_id: graders_of(p.dataset, terms) for prompt_id, p in problems.items()}
    for s in engine.generate(prompts, n, temperature, max_tokens, key, version):
        if on_response():
            return []
        samples[s.prompt_id, s.sample_id] = s
        problem = problems[s.prompt_id]
        extractor = by_dataset.get(problem.dataset.casefold(), by_dataset[""])
        for i, term in enumerate(graders[s.prompt_id]):
            grader.submit((s.prompt_id, s.sample_id, i), s.text, problem.answer, s.stopped, problem.kind,
                          extractor, term.custom)
    grades = grader.results()
    return [_graded(samples[k], graders[k[0]], [grades[*k, i] for i in range(len(graders[k[0]]))])
            for k in sorted(samples)]


def _graded(sample, terms, grades):
    """The sample with its grades: the first is the reward, the others are parts."""
    first, *others = grades
    return replace(
        sample, reward=first.reward, reason=first.reason, answer=first.answer,
        grader=terms[0].name, weight=terms[0].weight,
        parts={t.name: t.weight * g.reward for t, g in zip(terms[1:], others, strict=True)},
        failed=tuple(t.name for t, g in zip(terms, grades, strict=True) if g.reason == "error"))


def engine_part(problems: Mapping[int, Problem], engine: Engine) -> dict[int, Problem]:
    """The problems (prompt_id -> problem) that this engine samples: every `engine.engines`-th, so that
    engines have equally many."""
    return dict(itertools.islice(problems.items(), engine.engine_id, None, engine.engines))


def sample_row(s: Sample, problem: Problem) -> dict[str, Any]:
    """A sample as a row of samples/*.jsonl and eval/*.jsonl."""
    same = {name: getattr(s, name) for name in "prompt_id sample_id answer reward reason stopped".split()}
    return same | dict(problem=problem.text, gold=problem.answer, response=s.text, tokens=len(s.ids))


# --- gold answers that can't be graded

GOLD_SAMPLE = 20_000  # gold answers that are checked: all of them, or so many at random
GOLD_LIMIT = 0.01  # share of them that may fail
GOLD_NEEDED = 'answers that math-verify reads, another --reward, "reward": "exact" in such rows, or --go'


def compared_datasets(problems: Problems, cfg: Config) -> set[str]:
    """The data sets whose answers are compared. Gold answers that only a custom reward sees may be
    anything."""
    terms = terms_of(cfg)
    return {d for d in problems.datasets() if any(t.kind for t in graders_of(d, terms))}


def too_many_hopeless(result: Mapping[str, Any]) -> bool:
    """Whether more gold answers than GOLD_LIMIT can't be graded. `result`: of try_golds."""
    return len(result["hopeless"]) > GOLD_LIMIT * result["checked"]


def hopeless_as_text(problems: Problems, result: Mapping[str, Any]) -> str:
    """The number of gold answers that can't be graded, and the first five; "" where there are none."""
    bad = result["hopeless"]
    some = [f"{problems.where(i)} {problems[i].answer!a:.60}" for i in bad[:5]] + ["…"] * (len(bad) > 5)
    return f"{len(bad)} of {result['checked']} gold answers can't be graded: {', '.join(some)}" if bad else ""


def try_golds(problems: Problems, compared: Collection[str], grader: Grader, cfg: Config,
              world: dist.World) -> dict[str, Any]:
    """How many gold answers were checked by all ranks, the indices of hopeless ones, and the seconds.
    `compared`: the data sets whose answers are compared."""
    start, indices = time.perf_counter(), np.array(problems.of_datasets(compared))
    if len(indices) > GOLD_SAMPLE:
        indices = np.random.default_rng([cfg.seed, CHECK]).choice(indices, GOLD_SAMPLE, replace=False)
    parts = dist.gather(hopeless(problems, indices[world.rank::world.size].tolist(), grader))
    return {"checked": len(indices), "hopeless": sorted(sum(parts, [])),
            "seconds": round(time.perf_counter() - start, 1)}


def hopeless(problems: Sequence[Problem], indices: Sequence[int], grader: Grader) -> list[int]:
    """Those of `indices` whose gold answers no answer can equal, or that raise an error when another answer
    is compared with them. An equal text would not do: it is right before anything is parsed."""
    bad = []
    for i in indices:
        gold, kind = problems[i].answer.strip(), problems[i].kind
        if not gold or len(gold) > MAX_ANSWER or (kind == "choice" and not grade(gold, gold, kind)):
            bad.append(i)
        elif kind == "math":
            # Of two numbers the grader knows at once that they differ, if both or none are decimals.
            other = "-1.5" if "." in gold else "-1"
            grader.submit(i, rf"<answer>\boxed{{{other}}}</answer>", gold, True, kind)
    grades = grader.results()
    assert all(g.reason not in ("unparsed", "truncated") for g in grades.values()), "the box was not read"
    return bad + [i for i, g in grades.items() if g.reason in ("error", "timeout")]


# --- evaluation


def load_sets(cfg: Config, tokenizer: Any, say: Callable[[str], None]) -> dict[str, Problems]:
    """The held-out problems of each file of cfg.eval_data, by the names of `set_names`. Raises UserError as
    load_problems does."""
    longer = cfg.eval_response_len > cfg.max_response_len  # then the engine takes longer sequences too
    longest = cfg.engine_len if longer else cfg.model_len
    return {name: load_problems([path], tokenizer, cfg, say, longest)
            for name, path in zip(set_names(cfg.eval_data), cfg.eval_data, strict=True)}


def set_names(paths: Sequence[str]) -> list[str]:
    """A name for each file: its own without suffix, and in front as many of its folders as tell it from files
    of the same name, and from files that are named for a split. Raises UserError for the same file twice.

    eval_sets/aime2024.json is aime2024; gsm8k/test.jsonl is gsm8k-test, and so is the hub's
    openai/gsm8k:main/test-00000-of-00001.parquet."""
    parts = [_words(path) for path in paths]

    def name(part):
        depth = next(n for n in itertools.count(1) if sum(other[-n:] == part[-n:] for other in parts) == 1)
        while depth < len(part) and part[-depth] in SPLITS:
            depth += 1
        return "-".join(part[-depth:])

    names = list(map(name, parts)) if len(set(parts)) == len(parts) else []
    require(len(set(names)) == len(paths), f"--eval_data has two files of one name: {' '.join(paths)}",
            "another name for one of them")
    return names


SPLITS = {"eval", "test", "train", "validation", "valid", "val", "dev", "data", "default", "main"}


def _words(path):
    """Folders and name of a data file, without suffix, number of the shard, and the hub's usual folders."""
    file = Path(path.replace(":", "/"))
    name = re.sub(r"-00000-of-00001$", "", file.stem)
    folders = [part for part in file.parts[:-1] if ":" not in path or part not in SPLITS]
    return *folders, name


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

EVAL_FLAGS = tuple("""
    template system_prompt extractor reward seed out max_prompt_len max_response_len max_model_len pack_len
    engine stop engine_share max_num_seqs tp eval_samples eval_temperature eval_response_len grade_workers
    grade_deadline device dtype stall_limit verbose
""".split())  # what an evaluation reads
EVAL_INSTEAD = {"temperature": "--eval_temperature", "samples_per_prompt": "--eval_samples",
                **dict.fromkeys(["model", "data", "eval_data"], "rollout.py MODEL DATA [DATA …] [--flags]")}


def eval_config(argv: Sequence[str]) -> Config:
    """Config of `MODEL DATA [DATA …] [--flag value …]`. With a chat template nothing but the end token stops
    a response, unless --stop is given. Raises UserError, also for flags that only training reads."""
    paths = list(itertools.takewhile(lambda a: not a.startswith("--"), argv))
    require(len(paths) >= 2 or "--help" in argv, f"rollout.py {' '.join(argv)}",
            "python rollout.py MODEL DATA [DATA …] [--flags]")
    model, flags = (paths or [""])[0], argv[len(paths):]
    out = f"runs/eval-{Path(model).name}"
    # Without the preset's limit of 8192, which would cut what --max_response_len allows.
    first = ["orz-7b", "--max_model_len", "0", "--model", model, "--eval_data", *paths[1:], "--out", out]
    cfg = parse([*first, *flags], "rollout.py")
    given = [re.sub(r"^no_", "", word[2:].partition("=")[0].replace("-", "_"))
             for word in flags if re.match("--[a-zA-Z]", word)]
    for flag in given:
        require(flag in EVAL_FLAGS, f"--{flag} does nothing in evaluation",
                EVAL_INSTEAD.get(flag, f"only flags of these: {' '.join(EVAL_FLAGS)}"))
    check_unweighted(cfg)
    return replace(cfg, stop=()) if cfg.template == "chat" and "stop" not in given else cfg


def check_unweighted(cfg: Config) -> None:
    """Raises UserError for what --reward has beside one grader for each row: evaluation reports its value."""
    terms = terms_of(cfg)
    first = [t for t in terms if not t.dataset and (t.kind or t.custom)][:1]
    for t in terms:
        name = (t.custom or t.kind or t.name) + (f"={t.weight:g}" if t.weight != 1 else "")
        read = t.weight == 1 and (bool(t.dataset) or t in first)
        require(read, f"--reward {name} does nothing in evaluation", "one grader a row, without a weight")


def main(argv: Sequence[str]) -> None:
    """`python rollout.py MODEL DATA [DATA …] [--flag value …]`: see the top of this file. Raises
    UserError."""
    cfg = eval_config(argv)
    world = dist.init(cfg.device, cfg.dtype, cfg.stall_limit)
    say = print if world.main else lambda text: None
    model = resolve(cfg.model)
    tokenizer = load_tokenizer(model)
    sets = load_sets(cfg, tokenizer, say)
    check_graders(sets.values(), cfg)
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
