"""Scores of an evaluation: what each metric is, its standard error, two models' differences, and the files
and tables that show them.

    accuracy(samples, n)                  # metric -> its value for each problem
    summary(…), differences(…)            # values with standard errors, by set
    save_results(…), score_table(…)       # scores.json, lm_eval.json, samples.jsonl; lines of 80 columns
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
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import dist
from ckpt import VERSIONS
from configs import DATA_FILES, Config, UserError, help_class, parse, require, user_errors
from data import Problem, fingerprint
from engine import Engine, eos_ids, free_cache
from grading.worker import Grader
from guard.start import GOLD_NEEDED, compared_datasets, hopeless_as_text, too_many_hopeless, try_golds
from guard.watch import watch
from model import files_weights, folder_fingerprint, load_config, load_tokenizer, resolve, vocabulary_hash
from rollout import (
    Scores,
    check_engine_flags,
    check_graders,
    engine_kind,
    load_sets,
    make_engine,
    make_grader,
    mean,
    reward_files,
    score_sets,
    set_names,
    terms_of,
)


def std_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of the problems' values: their standard deviation (with n - 1) divided by
    √n. None for fewer than two. Of two models' differences on the same problems it is the paired one (arXiv
    2411.00640)."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


# --- results


def summary(cfg: Config, problems: Mapping[str, Sequence[Problem]], scores: Scores) -> dict[str, Any]:
    """Value and standard error of each metric, and what it was measured on, by set."""
    found = {}
    for i, (name, metrics) in enumerate(scores.items()):
        found[name] = {
            "file": cfg.eval_data[i], "hash": fingerprint(problems[name]), "problems": len(problems[name]),
            "samples": cfg.eval_samples[i % len(cfg.eval_samples)],
            "metrics": {metric: {"value": mean(values), "stderr": std_error(values)}
                        for metric, values in metrics.items()}}
    return found


def differences(problems: Mapping[str, Sequence[Problem]], scores: Scores,
                first: Mapping[str, Sequence[Problem]], of_first: Scores) -> dict[str, Any]:
    """Differences of a model's metrics to the first model's, with paired standard errors, by set. Problems
    that only one of them has, because the other's prompt is too long, are left out."""
    found = {}
    for name, metrics in scores.items():
        rows, rows_of_first = ([p.where for p in x] for x in (problems[name], first[name]))
        place = {row: i for i, row in enumerate(rows_of_first)}
        pairs = [(i, place[row]) for i, row in enumerate(rows) if row in place]
        gaps = {metric: [values[i] - of_first[name][metric][j] for i, j in pairs]
                for metric, values in metrics.items()}
        found[name] = {"problems": len(pairs), "metrics": {
            metric: {"value": mean(values), "stderr": std_error(values)} for metric, values in gaps.items()}}
    return found


def lm_eval_form(facts: Mapping[str, Any], sets: Mapping[str, Any]) -> dict[str, Any]:
    """The same results in the form of lm-evaluation-harness 0.4, which other programs read. A set is a task
    there, its version is the hash of its problems, and the filter's name is none."""
    results, better = {}, {}
    for name, found in sets.items():
        results[name] = {"alias": name}
        better[name] = {m: m != "truncated" for m in found["metrics"] if m != "response_len"}
        for metric, score in found["metrics"].items():
            stderr = "N/A" if score["stderr"] is None else score["stderr"]
            results[name] |= {f"{metric},none": score["value"], f"{metric}_stderr,none": stderr}
    counts = {name: {"original": found["problems"], "effective": found["problems"]}
              for name, found in sets.items()}
    configs = {name: {"task": name, "dataset_path": found["file"], "repeats": found["samples"],
                      "num_fewshot": 0} for name, found in sets.items()}
    return {"results": results, "group_subtasks": {name: [] for name in sets}, "configs": configs,
            "versions": {name: found["hash"] for name, found in sets.items()},
            "n-shot": dict.fromkeys(sets, 0), "higher_is_better": better, "n-samples": counts,
            "config": {"model": "torz", "model_args": f"pretrained={facts['model']}",
                       "random_seed": facts["flags"]["seed"], "gen_kwargs": facts["flags"]},
            "model_name": facts["model"], "date": datetime.fromisoformat(facts["date"]).timestamp(),
            **{f"{name.replace('-', '_')}_version": found for name, found in facts["versions"].items()}}


def save_results(folder: Path, facts: Mapping[str, Any], sets: Mapping[str, Any], rows: Sequence[dict],
                 compared: Mapping[str, Any]) -> None:
    """Write samples.jsonl, scores.json and lm_eval.json to a model's folder. compared: {} or what is to be
    said of the first model."""
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    results = {"scores.json": {**facts, "sets": sets, **compared}, "lm_eval.json": lm_eval_form(facts, sets)}
    for name, content in results.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")


# --- tables of at most 80 columns


def score_table(sets: Mapping[str, Any]) -> list[str]:
    """Lines with the metrics of one model."""
    lines = [f"{'set':26} {'metric':13}{'value':>12}{'std error':>12}{'problems':>9}{'n':>5}"]
    for name, found in sets.items():
        for metric, score in found["metrics"].items():
            lines.append(f"{tail(name, 26)} {metric:13}{decimals(score['value']):>12}"
                         f"{decimals(score['stderr']):>12}{found['problems']:>9}{found['samples']:>5}")
    return lines


def comparison_table(models: Sequence[tuple[str, dict, dict]]) -> list[str]:
    """Lines with avg@n of each set and model, and its difference to the first model. models: name, `summary`
    and `differences`, which are empty for the first one."""
    lines = [f"{'model':26} {'set/metric':19} {'value':>15} {'minus the first':>16}"]
    for set_name, found in models[0][1].items():
        metric = next(iter(found["metrics"]))
        for model, sets, gaps in models:
            score, gap = (part[set_name]["metrics"][metric] if part else {} for part in (sets, gaps))
            value = f"{decimals(score['value'])} ± {decimals(score['stderr'])}"
            versus = f"{gap['value']:+.4f} ± {decimals(gap['stderr'])}" if gap else ""
            line = f"{tail(model, 26)} {tail(f'{set_name}/{metric}', 19)} {value:>15} {versus:>16}"
            lines.append(line.rstrip())
    return lines


def tail(text: str, width: int) -> str:
    """The end of a text, padded to `width` columns."""
    return (text if len(text) <= width else "…" + text[1 - width:]).ljust(width)


def decimals(value: float | None) -> str:
    """A number with four decimals; n/a for None."""
    return "n/a" if value is None else f"{value:.4f}"


# --- the command: models, data and flags

EVAL_FLAGS = tuple("""
    template system_prompt extractor reward env max_turns seed out max_prompt_len max_response_len
    max_model_len pack_len engine stop engine_share max_num_seqs tp eval_samples eval_temperature
    eval_response_len grade_workers grade_deadline device dtype stall_limit go verbose save_logps
""".split())  # what an evaluation reads
NO_SCORE = "out grade_workers stall_limit go verbose save_logps".split()  # flags that change no score
USAGE = "-m tools.evaluate MODEL [MODEL …] DATA [DATA …]"
EVAL_INSTEAD = {"temperature": "--eval_temperature", "samples_per_prompt": "--eval_samples",
                **dict.fromkeys(["model", "data", "eval_data"], "-m tools.evaluate MODEL DATA [--flags]")}
ABOUT = """Evaluates models on problems with known answers: avg@n, pass@k and maj@n, with
standard errors by problem. An example:

    python -m tools.evaluate Qwen/Qwen2.5-0.5B eval_sets/aime2024.json --eval_samples 4

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
    require(bool(files) or asks_help, f"tools.evaluate {' '.join(argv)}", f"python {USAGE} [--flags]")
    twice = [path for path, count in Counter(map(model_name, models)).items() if count > 1]
    require(not twice, f"tools.evaluate {' '.join(argv)}: the same model twice", "each model once")
    # Without the preset's limit of 8192, which would cut what --max_response_len allows.
    first = ["orz-7b", "--max_model_len", "0", "--model", models[0] if models else "", "--eval_data", *files,
             "--out", ""]
    if asks_help:
        show_help(parse(first, "tools.evaluate"))
    cfg = parse([*first, *flags], "tools.evaluate")
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
    sets: dict[str, list[Problem]]
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
    """`python -m tools.evaluate MODEL [MODEL …] DATA [DATA …] [--flags]`: see ABOUT. Raises UserError."""
    cfg, (models, _, _) = eval_config(argv), split_argv(argv)
    world = dist.init(cfg.device, cfg.dtype, cfg.stall_limit)
    watch(cfg.stall_limit)
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
    with user_errors("tools.evaluate"):
        main(sys.argv[1:])
