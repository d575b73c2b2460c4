"""Graded rollouts and evaluation, and the command that evaluates any Hugging Face folder.

    with engine.awake(full_weights(policy), version=step):
        samples = rollout(engine, grader, {prompt_id: problem, …}, n=8, key=(seed, step), …)

    python rollout.py MODEL [MODEL …] DATA [DATA …] [--eval_samples 16] [--template chat] …
    torchrun --nproc-per-node 8 rollout.py MODEL DATA …        # on 8 GPUs; the flags in EVAL_FLAGS
"""

import contextlib
import functools
import gc
import io
import itertools
import json
import math
import os
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

import dist
from ckpt import VERSIONS
from configs import DATA_FILES, Config, UserError, help_class, parse, require, user_errors
from data import Problem, Problems, Sample, load_problems, numbers_at, step_of
from engine import Engine, eos_ids, free_cache
from engine_torch import TorchEngine
from engine_vllm import VLLMEngine
from model import (
    files_weights,
    folder_fingerprint,
    load_config,
    load_tokenizer,
    resolve,
    ropes,
    vocabulary_hash,
)
from reward import MAX_ANSWER, Grader, extract, grade
from scores import Scores, accuracy, comparison_table, differences, mean, save_results, score_table, summary
from trajectories import (
    Key,
    Trajectories,
    check_graders,
    extractors,
    graders_of,
    moves,
    reward_files,
    terms_of,
)

ENGINES = {"torch": TorchEngine, "vllm": VLLMEngine}
TRAIN, EVAL, CHECK = 1, 2, 3  # random streams: the second number of a sample's key


def make_engine(path: str, tokenizer: Any, cfg: Config, device: torch.device, dtype: torch.dtype) -> Engine:
    """The engine that cfg names, for the model folder `path`. Raises UserError where it can't run."""
    check_engine_flags(path, cfg, device)
    return ENGINES[engine_kind(cfg, device)](path, tokenizer, cfg, device, dtype)


def check_engine_flags(path: str, cfg: Config, device: torch.device) -> None:
    """Raises UserError where the engine that cfg names can't run the model folder `path`."""
    kind = engine_kind(cfg, device)
    require(kind == "vllm" or cfg.tp == 1, f"--tp {cfg.tp} with the torch engine", "--engine vllm, or --tp 1")
    known = max_positions(load_config(path))
    require(cfg.engine_len <= known, f"{path} has {known:,} positions, and a prompt with its response may "
            f"take {cfg.engine_len:,}", "smaller --max_response_len or --eval_response_len, "
            f"--max_model_len {known}, or another --model")


def engine_kind(cfg: Config, device: torch.device) -> str:
    """The name in ENGINES of the engine that cfg means on this device."""
    return cfg.engine if cfg.engine != "auto" else "vllm" if device.type == "cuda" else "torch"


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
                  any(t.kind for t in terms), cfg.env)


# --- rollouts


def rollout(engine: Engine, grader: Grader, problems: Mapping[int, Problem], n: int, temperature: float,
            max_tokens: int, key: tuple[int, ...], version: int,
            on_response: Callable[[], bool] = lambda: False) -> list[Sample]:
    """`n` graded samples of each problem (prompt_id -> problem), ordered by (prompt_id, sample_id).

    Each response is graded while others are still sampled. `on_response` is called at each response, with
    --env at each turn. If it returns True, sampling is aborted and the result is empty. The other arguments
    are those of Engine.generate."""
    trajectories = Trajectories(engine, grader, problems, n, max_tokens)
    trajectories.begin(problems, version)
    while trajectories.new or trajectories.going:
        if not trajectories.advance(temperature, key, version, on_response):
            return []
    return trajectories.graded()


def rollout_in_rounds(engine: Engine, grader: Grader, problems: Mapping[int, Problem],
                      carried: Sequence[Sample], cfg: Config, step: int,
                      on_response: Callable[[], bool]) -> tuple[list[int], list[Sample], list[Sample]]:
    """Sample in rounds of --round_len tokens until there are enough samples for a step: the oldest that have
    ended. Where samples of a prompt are compared, they count only once all of them have ended. Between two
    rounds all ranks share out what is unfinished. Every rank must call it.

    `problems`: by number (data.numbers_at), those that were carried here and those that begin in the step.
    `carried`: the trajectories that this rank was left with. Returns the numbers of the step's prompts; this
    rank's graded samples, whose prompt_id counts these prompts from 0; and the trajectories that this rank is
    left with. All are empty if a stop was requested."""
    trajectories = Trajectories(engine, grader, problems, cfg.samples_per_prompt, cfg.max_response_len,
                                cfg.round_len)
    trajectories.add(carried)
    trajectories.begin(engine_part({i: problems[i] for i in numbers_at(step, cfg)}, engine), step)
    must_end = {i for i in problems if step - step_of(i, cfg) >= cfg.max_staleness or not cfg.carry}
    with dist.phase("wait"):  # a resumed run deals as this one, wherever trajectories were before
        keys = sorted(itertools.chain(*dist.gather(list(trajectories.going))))
        move(trajectories, {key: i % engine.engines for i, key in enumerate(keys)}, engine.engines)
    while True:
        with dist.phase("rollout"):
            trajectories.advance(cfg.temperature, (cfg.seed, TRAIN, step), step, on_response)
        with dist.phase("wait"):
            going, ended = zip(*dist.gather((sorted(trajectories.going), trajectories.keys_of_ended())),
                               strict=True)
            if dist.stop_requested():
                return [], [], []
            unfinished = {number for number, _ in itertools.chain(*going)}
            waits = unfinished if cfg.compares_samples else ()
            ready = sorted(key for key in itertools.chain(*ended) if key[0] not in waits)
            if len(ready) >= cfg.samples_per_step and not must_end & unfinished:
                break
            move(trajectories, moves(going), engine.engines)
    with dist.phase("rollout"):
        graded = trajectories.graded()
    with dist.phase("wait"):
        chosen = set(ready[:cfg.samples_per_step])
        numbers = sorted({number for number, _ in chosen})
        place = {number: i for i, number in enumerate(numbers)}
        # Samples of one prompt meet on one rank, where they are compared.
        mine = [replace(s, prompt_id=place[s.prompt_id]) for s in graded
                if (s.prompt_id, s.sample_id) in chosen]
        outgoing = [[s for s in mine if s.prompt_id % engine.engines == rank]
                    for rank in range(engine.engines)]
        samples = sorted(itertools.chain(*dist.exchange(outgoing)), key=lambda s: (s.prompt_id, s.sample_id))
    left = [s for s in graded if (s.prompt_id, s.sample_id) not in chosen]
    return numbers, samples, [*trajectories.going.values(), *left]


def move(trajectories: Trajectories, target: Mapping[Key, int], ranks: int) -> None:
    """Move trajectories that go on to the rank target[key]. All ranks have the same `target`."""
    if target:
        outgoing = [trajectories.remove([key for key in trajectories.going if target.get(key) == rank])
                    for rank in range(ranks)]
        for arrived in dist.exchange(outgoing):
            trajectories.add(arrived)


def engine_part(problems: Mapping[int, Problem], engine: Engine) -> dict[int, Problem]:
    """The problems (prompt_id -> problem) that this engine samples: every `engine.engines`-th, so that
    engines have equally many."""
    return dict(itertools.islice(problems.items(), engine.engine_id, None, engine.engines))


def sample_row(s: Sample, problem: Problem, tokenizer: Any = None) -> dict[str, Any]:
    """A sample as a row of samples/*.jsonl and eval/*.jsonl. With a tokenizer (--save_logps) the row has the
    response's tokens, as ids and as texts, and their log-probs from the engine, rounded to 4 digits: null for
    tokens of an environment."""
    same = {name: getattr(s, name) for name in "prompt_id sample_id answer reward reason stopped".split()}
    row = same | dict(problem=problem.text, gold=problem.answer, response=s.text, tokens=len(s.ids))
    if s.turns > 1:
        row |= dict(turns=s.turns)
    if tokenizer:
        ids = s.ids.tolist()
        row |= dict(ids=ids, texts=tokenizer.batch_decode([[i] for i in ids]),
                    logps=[round(x, 4) if of_policy else None
                           for x, of_policy in zip(s.logp.tolist(), s.is_sampled, strict=True)])
    return row


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
    """Metrics `NAME/…` over all ranks of each held-out set (name -> problems), and one row per response. A
    metric is the mean over the set's problems of the values that `score_sets` returns."""
    scores, rows = score_sets(engine, grader, sets, cfg, step, on_response)
    return {f"{name}/{metric}": mean(values)
            for name, metrics in scores.items() for metric, values in metrics.items()}, rows


def score_sets(engine: Engine, grader: Grader, sets: Mapping[str, Sequence[Problem]], cfg: Config,
               step: int, on_response: Callable[[], bool] = lambda: False) -> tuple[Scores, list[dict]]:
    """Value of each metric for each problem of each held-out set (name -> problems), on every rank, and one
    row per response. The randomness is the same at every step, so evaluations differ by the weights alone."""
    scores, rows, tokenizer = {}, [], engine.tokenizer if cfg.save_logps else None
    for i, (name, problems) in enumerate(sets.items()):
        n, temperature = (v[i % len(v)] for v in (cfg.eval_samples, cfg.eval_temperature))
        part, length = engine_part(dict(enumerate(problems)), engine), cfg.eval_response_len
        samples = rollout(engine, grader, part, n, temperature, length or cfg.max_response_len,
                          (cfg.seed, EVAL, i), step, on_response)
        scores[name] = gather_scores(samples, n)
        rows += dist.gather_rows([{"set": name} | sample_row(s, problems[s.prompt_id], tokenizer)
                                  for s in samples])
    return scores, rows


def gather_scores(samples: Sequence[Sample], n: int) -> dict[str, list[float]]:
    """`accuracy` of all ranks' samples, in the order of the problems. So the number of ranks changes no sum,
    not even its rounding."""
    ids = list(dict.fromkeys(s.prompt_id for s in samples))
    ids, scores = zip(*dist.gather((ids, accuracy(samples, n))), strict=True)
    order, gathered = np.argsort(list(itertools.chain(*ids))), {}
    for metric in scores[0]:
        values = [v for of_rank in scores for v in of_rank[metric]]
        gathered[metric] = [values[i] for i in order]
    return gathered


# --- the command: models, data and flags

EVAL_FLAGS = tuple("""
    template system_prompt extractor reward env max_turns seed out max_prompt_len max_response_len
    max_model_len pack_len engine stop engine_share max_num_seqs tp eval_samples eval_temperature
    eval_response_len grade_workers grade_deadline device dtype stall_limit go verbose save_logps
""".split())  # what an evaluation reads
NO_SCORE = "out grade_workers stall_limit go verbose save_logps".split()  # flags that change no score
USAGE = "rollout.py MODEL [MODEL …] DATA [DATA …]"
EVAL_INSTEAD = {"temperature": "--eval_temperature", "samples_per_prompt": "--eval_samples",
                **dict.fromkeys(["model", "data", "eval_data"], "rollout.py MODEL DATA [DATA …] [--flags]")}
ABOUT = """Evaluates models on problems with known answers: avg@n, pass@k and maj@n, with
standard errors by problem. An example:

    python rollout.py Qwen/Qwen2.5-0.5B eval_sets/aime2024.json --eval_samples 4

MODEL: a Hugging Face folder, or an id of the Hub. DATA: a .json, .jsonl or
.parquet file, or a file of the Hub (OWNER/NAME:FILE). The models end at the
first such file; where there is none, only the first path is a model. Several
models are evaluated one after the other with the same randomness, and each is
compared with the first.

Results go to runs/eval/MODEL/DATA. No result is overwritten: where that folder
is there already, the next one is DATA-2."""


def eval_config(argv: Sequence[str]) -> Config:
    """Config of the first model of `MODEL [MODEL …] DATA [DATA …] [--flag value …]`. With a chat template
    nothing but the end token stops a response, unless --stop is given. Raises UserError, also for flags that
    only training reads. --help prints the flags and exits with status 0."""
    models, files, flags = split_argv(argv)
    asks_help = bool({"-h", "--help"} & set(flags))
    require(bool(files) or asks_help, f"rollout.py {' '.join(argv)}", f"python {USAGE} [--flags]")
    twice = [path for path, count in Counter(map(model_name, models)).items() if count > 1]
    require(not twice, f"rollout.py {' '.join(argv)}: the same model twice", "each model once")
    # Without the preset's limit of 8192, which would cut what --max_response_len allows.
    first = ["orz-7b", "--max_model_len", "0", "--model", models[0] if models else "", "--eval_data", *files,
             "--out", ""]
    if asks_help:
        show_help(parse(first, "rollout.py"))
    cfg = parse([*first, *flags], "rollout.py")
    given = [re.sub(r"^no_", "", word[2:].partition("=")[0].replace("-", "_"))
             for word in flags if re.match("--[a-zA-Z]", word)]
    for flag in given:
        require(flag in EVAL_FLAGS, f"--{flag} does nothing in evaluation",
                EVAL_INSTEAD.get(flag, f"only flags of these: {' '.join(EVAL_FLAGS)}"))
    check_unweighted(cfg)
    return replace(cfg, stop=()) if cfg.template == "chat" and "stop" not in given else cfg


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The models, the data files and the flags of a command line. See ABOUT."""
    paths = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    is_data = [i > 0 and path.endswith(DATA_FILES) and not Path(path).is_dir()
               for i, path in enumerate(paths)]
    models = is_data.index(True) if any(is_data) else 1
    return paths[:models], paths[models:], list(argv[len(paths):])


def show_help(cfg: Config) -> None:
    """Print the flags of an evaluation with their meanings, ranges and values in cfg, and exit."""
    import tyro  # here, because imports must be quick

    own = {"out": "folder for the results, new or empty; empty: runs/eval/MODEL/DATA",
           "go": "evaluate although gold answers can't be graded"}
    hints = {f.name: f.type for f in fields(help_class()) if f.name in EVAL_FLAGS}
    hints |= {name: Annotated[type(getattr(cfg, name)), tyro.conf.arg(help=text)]
              for name, text in own.items()}
    default = make_dataclass("Evaluation", hints.items())(*(getattr(cfg, name) for name in hints))
    text = io.StringIO()
    with contextlib.redirect_stdout(text), suppress(SystemExit):
        tyro.cli(type(default), default=default, args=["--help"], prog=USAGE, use_underscores=True,
                 description="")
    usage, flags = text.getvalue().split("\n", 1)
    flags = "\n".join(line.rstrip() for line in flags.strip().splitlines())
    print(f"{usage}\n\n{ABOUT}\n\n{flags}")  # tyro would join the lines of ABOUT
    sys.exit(0)


def check_unweighted(cfg: Config) -> None:
    """Raises UserError for what --reward has beside one grader for each row: evaluation reports its value."""
    terms = terms_of(cfg)
    first = [t for t in terms if not t.dataset and (t.kind or t.custom)][:1]
    for t in terms:
        name = (t.custom or t.kind or t.name) + (f"={t.weight:g}" if t.weight != 1 else "")
        read = t.weight == 1 and (bool(t.dataset) or t in first)
        require(read, f"--reward {name} does nothing in evaluation", "one grader a row, without a weight")


# --- the command: results


def model_name(path: str) -> str:
    """Name of a model in the folder of its results: its path from the working folder, or from the root where
    it is not in there, with `--` for `/`."""
    whole = Path(os.path.abspath(path))
    inside = whole.is_relative_to(Path.cwd()) and whole != Path.cwd()
    return "--".join(whole.relative_to(Path.cwd()).parts if inside else whole.parts[1:])


def check_out(cfg: Config) -> None:
    """Raises UserError, the same on every rank, where rank 0's --out is neither new nor empty."""
    found = dist.gather(sorted(os.listdir(cfg.out)) if Path(cfg.out).is_dir() and cfg.out else [])[0]
    require(not found, f"{cfg.out} has {', '.join(found[:3])}{', …' * (len(found) > 3)} already",
            "an --out that is new or empty, or no --out")


def result_folder(cfg: Config, models: int) -> Path:
    """Make and return the folder for the results of cfg.model, one of `models` models. Raises UserError where
    it can't be made."""
    name = model_name(cfg.model)
    folder = Path(cfg.out or "runs/eval", name if models > 1 or not cfg.out else "")
    if not cfg.out:
        folder /= "+".join(set_names(cfg.eval_data))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for count in itertools.count(1):
            found = folder if count == 1 else folder.with_name(f"{folder.name}-{count}")
            with suppress(FileExistsError):  # two evaluations at once get two folders
                found.mkdir(exist_ok=bool(cfg.out))
                return found
    except OSError as e:
        raise UserError(f"can't write to {folder} ({e.strerror}); needed: --out with a folder that can be "
                        "written to") from None


@dataclass(frozen=True, eq=False)
class Candidate:
    """One of the models to evaluate, with what it needs but its weights."""

    cfg: Config  # model: as the user gave it
    path: str  # its folder
    tokenizer: Any
    sets: dict[str, Problems]
    engine_key: tuple  # models of one key can share an engine


def engine_key(path: str, tokenizer: Any) -> tuple:
    """What an engine is made for, beside the weights: the model's config, its tokens and its end tokens."""
    config = load_config(path)
    shape = config.to_dict()
    for name in ("_name_or_path", "dtype", "torch_dtype", "transformers_version"):
        shape.pop(name, None)
    as_text = json.dumps(shape, sort_keys=True, default=str)
    return as_text, vocabulary_hash(tokenizer), sorted(eos_ids(path, tokenizer, config))


def describe(c: Candidate, engine: Engine) -> dict[str, Any]:
    """What decides a model's scores: model, tokenizer, flags, versions; and the date."""
    flags = {k: v for k, v in asdict(c.cfg).items() if k in EVAL_FLAGS and k not in NO_SCORE}
    flags |= {"engine": engine_kind(c.cfg, engine.device), "device": engine.device.type,
              "dtype": str(engine.dtype).removeprefix("torch.")}
    used = {"math-verify": version_of("math-verify")}
    if flags["engine"] == "vllm":  # its CPU build is installed under another name
        used["vllm"] = sys.modules["vllm"].__version__
    return {"model": c.cfg.model, "model_files": folder_fingerprint(c.path),
            "tokenizer": vocabulary_hash(c.tokenizer), "flags": flags, "reward_files": reward_files(c.cfg),
            "versions": VERSIONS | used,
            "date": datetime.now(UTC).isoformat(timespec="seconds")}


# --- the command: its steps


def prepare(cfg: Config, say: Callable[[str], None]) -> Candidate:
    """All that a model needs but its weights. Raises UserError."""
    path = resolve(cfg.model)
    tokenizer = load_tokenizer(path)
    sets = load_sets(cfg, tokenizer, say)
    check_graders(sets.values(), cfg)
    return Candidate(cfg, path, tokenizer, sets, engine_key(path, tokenizer))


def check_candidates(candidates: Sequence[Candidate], world: dist.World) -> None:
    """Raises UserError for a model that the engine can't run, and for models that vLLM can't hold in one
    process: before the first one is evaluated."""
    for c in candidates:
        check_engine_flags(c.path, c.cfg, world.device)
    first, *others = candidates
    alone = engine_kind(first.cfg, world.device) == "vllm"  # a process can't start it twice
    other = [c.cfg.model for c in others if alone and c.engine_key != first.engine_key]
    require(not other, f"vLLM takes models of one kind in a process, and {' '.join(other[:1])} differs from "
            f"{first.cfg.model} in config.json, tokenizer or end tokens",
            "a command for each, or --engine torch")


def check_set_golds(c: Candidate, grader: Grader, world: dist.World, say: Callable[[str], None]) -> None:
    """Tell which gold answers of the sets can't be graded. Raises UserError, unless cfg.go, where they are
    over 1 % of a set: no model could be right there."""
    for name, problems in c.sets.items():
        compared = compared_datasets(problems, c.cfg)
        result = try_golds(problems, compared, grader, c.cfg, world)
        found = hopeless_as_text(problems, result)
        require(c.cfg.go or not too_many_hopeless(result), f"{name}: {found}", GOLD_NEEDED)
        if found:
            say(f"{name}: {found}")


def evaluate_all(candidates: Sequence[Candidate], folders: Sequence[Path], grader: Grader,
                 world: dist.World, say: Callable[[str], None]) -> None:
    """Evaluate the models one after the other. Rank 0 saves and prints each one's results, and at the end
    their comparison. Models of one engine_key share an engine; before another one the old one is freed."""
    engine, key, first_scores, table = None, None, {}, []
    for c, folder in zip(candidates, folders, strict=True):
        if c.engine_key != key:
            engine = None
            gc.collect()
            free_cache(world.device)
            engine, key = make_engine(c.path, c.tokenizer, c.cfg, world.device, world.dtype), c.engine_key
        facts = describe(c, engine)
        with engine.awake(files_weights(c.path, world.device, world.dtype), version=0):
            scores, rows = score_sets(engine, grader, c.sets, c.cfg, 0)
        first_scores = first_scores or scores
        first = candidates[0]
        gaps = {} if c is first else differences(c.sets, scores, first.sets, first_scores)
        sets, compared = summary(c.cfg, c.sets, scores), {"minus": first.cfg.model, "differences": gaps}
        if world.main:
            save_results(folder, facts, sets, rows, compared if gaps else {})
        table.append((c.cfg.model, sets, gaps))
        say("\n".join(["", c.cfg.model, "", *score_table(sets), "", f"in {folder}"]))
    if len(table) > 1:
        say("\n".join(["", *comparison_table(table)]))


def main(argv: Sequence[str]) -> None:
    """`python rollout.py MODEL [MODEL …] DATA [DATA …] [--flag value …]`: see ABOUT. Raises UserError."""
    cfg, (models, _, _) = eval_config(argv), split_argv(argv)
    world = dist.init(cfg.device, cfg.dtype, cfg.stall_limit)
    say = print if world.main else lambda text: None
    told = functools.cache(lambda text: say(textwrap.fill(text, 80, break_long_words=False)))  # told once
    check_out(cfg)
    candidates = [prepare(replace(cfg, model=model), told) for model in models]
    check_candidates(candidates, world)
    with make_grader(cfg) as grader:
        check_set_golds(candidates[0], grader, world, told)  # those of the others are the same
        own = dist.together(lambda: [result_folder(c.cfg, len(models)) for c in candidates if world.main])
        try:
            evaluate_all(candidates, dist.gather(own)[0], grader, world, say)
        finally:
            for folder in own if not cfg.out else ():
                with suppress(OSError):  # an empty one is removed: an evaluation that failed leaves nothing
                    folder.rmdir()


if __name__ == "__main__":
    with user_errors("rollout.py"):
        main(sys.argv[1:])
