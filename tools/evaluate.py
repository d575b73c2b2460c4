"""Evaluates models on problems with known answers: avg@n, pass@k and maj@n. For
a metric's standard error, each problem counts as one observation.

    python -m tools.evaluate MODEL [MODEL …] DATA [DATA …] [--flags]
    python -m tools.evaluate Qwen/Qwen2.5-0.5B eval_sets/aime2024.json
    torchrun --nproc-per-node 8 -m tools.evaluate MODEL DATA …    # on 8 GPUs

MODEL: a Hugging Face folder, or an id of the Hub. DATA: a .json, .jsonl,
.parquet or .arrow file, or a file of the Hub (OWNER/NAME:FILE). All paths
before the first file with such an ending are models. If there is no such file,
only the first path is a model. Several models are evaluated one after the other
with the same random seed. Every other model is compared with the first model.

If a model is an export of torz, all models get the template, stop strings,
temperature and lengths of its training, unless flags set other values.

Results go to --out, or to runs/eval/MODEL/DATA without it. The folder must be
new or empty. --write_rows 'rate<0.1' HARD.jsonl also writes the rows of DATA
on which the first model's avg@n is below 0.1.
"""

import contextlib
import functools
import gc
import itertools
import json
import math
import os
import re
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from configs import (
    DATA_FILES,
    MARKER,
    Config,
    Say,
    check_model,
    check_paths,
    from_hub,
    given_flags,
    meanings,
    parse,
    prompt_form,
)
from guard.files import read_json, replace_text, write_jsonl
from guard.messages import differences, explained, require, show, user_errors
from reward import check_functions, graders_of, terms_of

# --- the command line


@dataclass(frozen=True)
class EvalConfig(Config):
    """The flags of train.py, and --write_rows."""

    write_rows: tuple[str, str] | None = None  # 'rate<0.1' FILE: write rows with avg@n < 0.1


# The flags that an evaluation uses, besides --out.
EVAL_FLAGS = """
    template system_prompt template_args date extractor reward env max_turns seed
    max_prompt_len max_response_len max_model_len engine stop engine_share max_num_seqs tp
    eval_samples eval_temperature eval_top_p eval_response_len grade_workers grade_deadline
    device dtype stall_limit go save_logps write_rows
""".split()
# A preset and flags that give the default values of all flags. They remove the preset's critic, and its limit
# on prompt plus response.
PRESET = ["orz-7b", "--algo", "grpo", "--max_model_len", "0"]
CONDITION = r"((0|0?\.\d+)<=?)?rate[<>]=?(0|1|0?\.\d+)"  # the conditions that --write_rows accepts


def show_help() -> None:
    """Print the text at the top of this file, which explains --out, and the meanings of the other flags."""
    print(__doc__)
    default = parse(PRESET, kind=EvalConfig)
    known = meanings() | meanings(EvalConfig)
    for name in EVAL_FLAGS:
        text = f"--{name}: {known[name]} (default: {getattr(default, name)!r})"
        print(textwrap.fill(text, 80, initial_indent="  ", subsequent_indent="      "))


def eval_configs(argv: Sequence[str]) -> list[Config]:
    """Returns a config for each model of the command line (syntax: see the top of this file). A flag that is
    not given has the value with which the models were trained (see `as_trained`), or else the default value.
    Raises UserError for wrong arguments."""
    if {"-h", "--help"} & set(argv):
        show_help()
        sys.exit(0)
    paths = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    flags = argv[len(paths) :]
    models = paths[:1]  # if no path has the ending of a data file
    for i, path in enumerate(paths[1:], 1):
        if path.endswith(DATA_FILES):
            models = paths[:i]
            break
    files = paths[len(models) :]
    for model in models:
        check_model(model)
    require(
        bool(files),
        "no data file",
        "python -m tools.evaluate MODEL [MODEL …] DATA [DATA …] [--flags]",
    )
    names = set(map(model_name, models))
    require(len(names) == len(models), "the same model twice", "each model once")
    # The content of torz.json of each model that is an export of torz
    exports = list(filter(None, map(_trained, models)))
    # Some flags are allowed only with a certain template, so the models' template replaces the preset's.
    template = exports[0]["template"] if exports else Config.template
    words = [
        *PRESET,
        "--template",
        template,
        "--model",
        models[0],
        "--eval_data",
        *files,
        "--out",
        "",
        *flags,
    ]
    cfg = parse(words, "tools.evaluate", EvalConfig)
    given = given_flags(flags)
    check_flags(cfg, given)
    # The default stop strings fit --template orz.
    if cfg.template == "chat" and "stop" not in given:
        cfg = replace(cfg, stop=())
    cfg = replace(cfg, **as_trained(exports, given, prompt_form(cfg.template)))
    return [replace(cfg, model=model) for model in models]


def check_flags(cfg: Config, given: Collection[str]) -> None:
    """Raises UserError if a given flag, or a part of --reward, has no effect in evaluation, or if
    --write_rows is wrong."""
    for name in given:
        require(
            name in (*EVAL_FLAGS, "out"),
            f"--{name} has no effect in evaluation",
            "a flag that python -m tools.evaluate --help lists",
        )
    terms = terms_of(cfg)
    for term in terms:
        require(
            term.weight == 1 and term.is_grader and len(graders_of(term.dataset, terms)) == 1,
            f"--reward {' '.join(cfg.reward)} has a weight, a part or a second grader",
            "one grader for each row, because the others have no effect in evaluation",
        )
    if cfg.write_rows:
        condition, name = cfg.write_rows
        file = Path(name)
        new = file.suffix == ".jsonl" and file.parent.is_dir() and not file.exists()
        require(
            new and bool(re.fullmatch(CONDITION, condition)),
            f"--write_rows {condition} {name}",
            "a condition such as 'rate<0.1' or '0<rate<=0.9', "
            "and a new .jsonl file in a folder that exists",
        )


def as_trained(exports: Sequence[dict], given: Collection[str], form: str) -> dict[str, Any]:
    """Returns a dict: flag -> the value with which the models were trained. It has the flags that are in
    EVAL_FLAGS and not in `given`. Raises UserError if two models were trained with different settings.

    exports: the content of each export's torz.json
    given: names of the user's flags
    form: the text of --template, if this flag is in `given`"""
    found = {}
    for facts in exports:
        template = facts["template"]
        # Flags that keep their values. env: torz.json names a function, but must not run it
        unused = {*given, "env"}
        # Settings that an export's chat template already holds
        inside = [name for name in ("system_prompt", "date") if facts.get(name)]
        require(
            unused.isdisjoint(inside),
            "the chat template of an export has --system_prompt and --date inside",
            "neither of them",
        )
        if "template" not in given:
            require(
                prompt_form(template) == facts["prompt"],
                f"{template} has another text than at the training",
                "that text, or another --template",
            )
        elif form != facts["prompt"]:
            # The training's system prompt, arguments and stop strings do not fit.
            unused |= {"system_prompt", "template_args", "stop"}
        # Evaluate at the temperature at which the training sampled.
        facts["eval_temperature"] = [facts["temperature"]]
        # This model's part of `found`
        ours = {name: facts[name] for name in EVAL_FLAGS if name in facts and name not in unused}
        other = differences(found, ours)
        require(
            not other,
            f"the models were trained with different settings ({'; '.join(other)})",
            "one command for each model, or these flags",
        )
        found |= ours
    for name, value in found.items():  # Config has tuples where JSON has lists
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


def _trained(model):
    """Returns the content of the model's torz.json; {} if the model is no export of torz. Raises UserError as
    `read_json` does."""
    file = Path(model, MARKER)  # MARKER: torz.json
    if from_hub(model):
        from huggingface_hub import hf_hub_download

        with contextlib.suppress(Exception):  # the Hub has no such file, or can't be reached
            file = Path(hf_hub_download(model, MARKER))
    return read_json(file, {"template": str, "prompt": str, "temperature": int | float})


def model_name(path: str) -> str:
    """Returns the name of a model's result folder: the model's path with `--` in place of `/`."""
    inside = os.path.abspath(path).removeprefix(f"{Path.cwd()}/")
    return inside.strip("/").replace("/", "--")


if __name__ == "__main__":
    with user_errors("tools.evaluate"):
        for config in eval_configs(sys.argv[1:]):
            check_paths(config)
            check_functions(config)
    print("loading torch …", flush=True)

import torch

import dist
from data import set_template
from engine import Engine
from grading.rows import as_json, local_file, read_rows
from grading.worker import Grader
from guard.checks import check_gold, readers_of
from guard.identity import (
    VERSIONS,
    Facts,
    check_same,
    facts_of,
    fingerprint,
    folder_fingerprint,
    model_facts,
)
from guard.lock import FolderLock
from guard.watch import watch
from model import (
    Policy,
    files_weights,
    load_config,
    load_tokenizer,
    on_meta,
    resolve,
)
from rollout import (
    Scores,
    Sets,
    check_engine_flags,
    check_graders,
    check_tokens,
    load_sets,
    make_engine,
    make_grader,
    mean,
    score_sets,
    set_names,
)

# --- statistics


def std_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of the mean of n values, one value per problem; None if n < 2. If
    the values are differences between two models, it is the paired standard error (arXiv 2411.00640)."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def _estimates(metrics):
    """Returns a dict: metric -> its mean over the problems ("value") and the standard error ("stderr").

    metrics: metric -> one value per problem"""
    return {
        name: {"value": mean(values), "stderr": std_error(values)}
        for name, values in metrics.items()
    }


def paired_differences(
    sets: Sets, scores: Scores, first_sets: Sets, first_scores: Scores
) -> dict[str, Any]:
    """Returns a dict: evaluation set -> number of compared problems, and a model's metrics minus the first
    model's, with paired standard errors. Only problems that both models have are compared: a model lacks
    problems whose prompts are too long for it."""
    found = {}
    for name, problems in sets.items():
        # Problem.where: the name of its file, and the number of its row
        firsts = {problem.where: i for i, problem in enumerate(first_sets[name])}
        pairs = []  # of each common problem: index in the model's list, index in the first model's list
        for i, problem in enumerate(problems):
            if problem.where in firsts:
                pairs.append((i, firsts[problem.where]))
        gaps = {}
        for metric, values in scores[name].items():
            others = first_scores[name][metric]
            gaps[metric] = [values[i] - others[j] for i, j in pairs]
        found[name] = {"problems": len(pairs), "metrics": _estimates(gaps)}
    return found


# --- tables, at most 80 characters wide


def score_table(sets: Mapping[str, Any]) -> list[str]:
    """Returns a table of one model's metrics. sets: the item "sets" of scores.json"""
    lines = [f"{'set':26} {'metric':13}{'value':>12}{'std error':>12}{'problems':>9}{'n':>5}"]
    for name, found in sets.items():
        for metric, score in found["metrics"].items():
            lines.append(
                f"{name[-26:]:26} {metric:13}{_decimals(score['value']):>12}"
                f"{_decimals(score['stderr']):>12}{found['problems']:>9}{found['samples']:>5}"
            )
    return lines


def comparison_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a table with a line for each evaluation set, metric (avg@n, pass@k, maj@n) and model. From the
    second model on, it also has the value minus the first model's value.

    results: the content of each model's scores.json"""
    lines = [f"{'model':26} {'set/metric':19} {'value':>15} {'minus the first':>16}"]
    for name, found in results[0]["sets"].items():
        for metric, result in itertools.product(found["metrics"], results):
            if "@" not in metric:  # such as the response length
                continue
            score = result["sets"][name]["metrics"][metric]
            versus = ""
            if "differences" in result:
                gap = result["differences"][name]["metrics"][metric]
                versus = f"{gap['value']:+.4f} ± {_decimals(gap['stderr'])}"
            value = f"{_decimals(score['value'])} ± {_decimals(score['stderr'])}"
            # Exports differ in the part before.
            model = result["model"].removesuffix("/export/policy")[-26:]
            of_set = f"{name}/{metric}"[-19:]
            lines.append(f"{model:26} {of_set:19} {value:>15} {versus:>16}".rstrip())
    return lines


def _decimals(value):
    """Returns a number with 4 decimals as text; None: a standard error of fewer than two problems."""
    return "n/a" if value is None else f"{value:.4f}"


# --- results


def result_folder(cfg: Config, models: int) -> Path:
    """Returns the folder for cfg.model's results. models: the number of models."""
    name = model_name(cfg.model)
    if not cfg.out:
        return Path("runs/eval", name, "+".join(set_names(cfg.eval_data)))
    return Path(cfg.out, name) if models > 1 else Path(cfg.out)


def make_folders(folders: Sequence[Path]) -> None:
    """Make the result folders, each with a lock. Raises UserError for a folder that can't be made or is not
    empty."""
    for folder in folders:
        with explained(f"can't write to {folder}", "--out with a writable folder", OSError):
            FolderLock(folder / "lock").claim()
        names = os.listdir(folder)
        require(names == ["lock"], f"{folder} is not empty", "an --out that is new or empty")


class Candidate(NamedTuple):
    """A model to evaluate, without its weights."""

    cfg: Config  # cfg.model: a folder, or an id of the Hub
    path: str  # the model's folder on the disk
    tokenizer: Any
    sets: Sets  # name of an evaluation set -> its problems
    engine_key: Facts  # models with equal keys can use the same engine


def load_candidate(cfg: Config, say: Say, keep_fields: bool) -> Candidate:
    """Returns the candidate for cfg.model. Raises UserError if the model or the problems can't be used.

    keep_fields: whether each Problem keeps its row of the data file, for graders that read `row`"""
    path = resolve(cfg.model)
    on_meta(Policy, path)  # checks config.json and the weights' names and shapes (UserError)
    tokenizer = load_tokenizer(path)
    cfg = set_template(tokenizer, cfg)
    env = _trained(cfg.model).get("env")
    if env and not cfg.env:
        say(f"{cfg.model} was trained with --env {env}, and is evaluated without --env")
    sets = load_sets(cfg, tokenizer, say, keep_fields)
    check_tokens(sets.values(), load_config(path))
    return Candidate(cfg, path, tokenizer, sets, model_facts(path, tokenizer))


def result_of(c: Candidate, engine: Engine, grader: Grader, scores: Scores) -> dict[str, Any]:
    """Returns the content of scores.json: how a model was evaluated, and its scores."""
    flags = {name: getattr(c.cfg, name) for name in EVAL_FLAGS}
    flags["engine"] = c.cfg.engine_kind(engine.device.type == "cuda")
    flags["device"] = engine.device.type
    flags["dtype"] = str(engine.dtype).removeprefix("torch.")
    sets = {}
    for i, (name, problems) in enumerate(c.sets.items()):
        sets[name] = {
            "file": problems[0].file,
            "hash": fingerprint(problems),
            "problems": len(problems),
            # eval_samples has one number for all sets, or one for each set.
            "samples": c.cfg.eval_samples[i % len(c.cfg.eval_samples)],
            "metrics": _estimates(scores[name]),
        }
    return {
        "model": c.cfg.model,
        "model_files": folder_fingerprint(c.path),
        "tokenizer": c.engine_key["policy's tokenizer"],
        "flags": flags,
        "reward_files": grader.files,
        "versions": VERSIONS,
        "sets": sets,
    }


# --- the evaluation


def write_rows(c: Candidate, scores: Scores, stored: Mapping[str, Mapping[int, Any]]) -> str:
    """Write the data rows whose avg@n, `rate`, meets the condition of --write_rows. Returns a line that says
    how many rows these are. stored: name of an evaluation set -> row number -> row"""
    condition, file = c.cfg.write_rows
    rows = []
    for name, problems in c.sets.items():
        rates, *_ = scores[name].values()  # the first metric is avg@n
        for problem, rate in zip(problems, rates, strict=True):
            if eval(condition, {"rate": rate}):  # CONDITION allows nothing but a comparison
                rows.append(f"{as_json(stored[name][problem.row])}\n")
    with explained(f"can't write {file}", "space there", OSError):
        replace_text(Path(file), "".join(rows))
    return f"{len(rows)} rows with {condition} in {file}"


def check_candidates(candidates: Sequence[Candidate], world: dist.World) -> None:
    """Raises UserError if the engine can't run one of the models, or if vLLM can't run all models in one
    process."""
    first = candidates[0]
    for c in candidates:
        check_engine_flags(c.path, c.cfg, world.device)
        kind = c.cfg.engine_kind(world.device.type == "cuda")
        require(
            c.engine_key == first.engine_key or kind != "vllm",
            f"vLLM runs only models of one kind in a process, and {c.cfg.model} differs "
            f"from {first.cfg.model} in config.json, tokenizer or end tokens",
            "a separate command for each, or --engine torch",
        )


def evaluate_all(
    candidates: Sequence[Candidate],
    folders: Sequence[Path],
    grader: Grader,
    world: dist.World,
    say: Say,
) -> None:
    """Evaluate the models one after the other. Rank 0 saves and prints the results. Consecutive models with
    the same engine_key use one engine."""
    first = candidates[0]
    stored = {}  # see write_rows
    if world.main and first.cfg.write_rows:
        # Read again: with the fields in the problems, other rows would count as repeated. And now, because
        # the files may change during the evaluation.
        for name, problems in first.sets.items():
            stored[name] = dict(read_rows(local_file(problems[0].file)))
    engine = engine_key = None
    results = []
    for c, folder in zip(candidates, folders, strict=True):
        if c.engine_key != engine_key:
            engine_key = c.engine_key
            engine = None  # frees the old engine first: a GPU may be too small for two engines
            gc.collect()
            torch.cuda.empty_cache()
            engine = make_engine(c.path, c.tokenizer, c.cfg, world.device, world.dtype)
        with engine.awake(files_weights(c.path, world.device, world.dtype), version=0):
            scores, rows = score_sets(engine, grader, c.sets, c.cfg, step=0)
        result = result_of(c, engine, grader, scores)
        if c is first:
            first_scores = scores
        else:
            result["minus"] = first.cfg.model
            result["differences"] = paired_differences(c.sets, scores, first.sets, first_scores)
        results.append(result)
        errors = sorted(set(dist.gather_all(grader.new_errors())))
        lines = ["", c.cfg.model, "", *score_table(result["sets"]), "", f"in {folder}"]
        lines += [f"!! grading failed, and the reward is 0: {error!a}" for error in errors]
        unread = [row["response"] for row in rows if row["reason"] == "unparsed"]
        others = Counter(readers_of(unread)).most_common()
        if others and len(unread) > len(rows) / 20:
            found = f"!! --extractor finds no answer in {len(unread)} of {len(rows)} responses"
            lines += [found, f"answers that another --extractor finds: {dict(others)}"]
        say("\n".join(lines))  # first, because a full disk must not cost the scores
        writes = c is first and c.cfg.write_rows
        if world.main:
            with explained(f"can't write to {folder}", "space there or another --out", OSError):
                (folder / "scores.json").write_text(json.dumps(result, indent=1) + "\n")
                write_jsonl(folder / "samples.jsonl", rows)
                if writes and not errors:
                    say(write_rows(c, scores, stored))
        require(
            not (writes and errors),
            "--write_rows has written nothing, because grading failed",
            "functions of --reward and --env that raise no error",
        )
    if len(results) > 1:
        say("\n".join(["", *comparison_table(results)]))


def main(argv: Sequence[str]) -> None:
    """Run the command, which the top of this file describes. Raises UserError for a user's mistake."""
    cfgs = eval_configs(argv)
    cfg = cfgs[0]  # all configs have the same flags, but other models
    folders = [result_folder(cfg, len(cfgs)) for cfg in cfgs]
    world = dist.init(cfg.device, cfg.dtype, cfg.stall_limit)
    watch(cfg.stall_limit)
    say = show if world.main else lambda text: None  # only rank 0 prints
    # The same line for several models is printed once.
    say_once = functools.cache(lambda text: say(textwrap.fill(text, 80, break_long_words=False)))
    with make_grader(cfg, say) as grader:
        keep_fields = grader.reads_rows  # whether a reward function has the parameter `row`
        candidates = [load_candidate(cfg, say_once, keep_fields) for cfg in cfgs]
        # A model may have been trained with extractors for data sets that are not here.
        asked = cfg if "extractor" in given_flags(argv) else replace(cfg, extractor=())
        check_graders(candidates[0].sets.values(), asked)
        for c in candidates:
            inputs = replace(c.cfg, model=c.path), [], c.sets, c.tokenizer, grader
            read, noted = dist.together(facts_of, *inputs)
            check_same("reads", read | noted, "the same files on every machine")
        check_candidates(candidates, world)
        say_once(
            f"asked with --template {cfg.template}, stop strings {cfg.stop}, "
            f"--eval_temperature {cfg.eval_temperature}"
        )
        # Check the gold answers with only the first model's sets, because all models have the same answers.
        for name, problems in candidates[0].sets.items():
            check_gold(name, problems, grader, cfg, world, say_once)
        # Only rank 0 makes folders. If it raises UserError, `together` raises it on all ranks.
        dist.together(make_folders, folders if world.main else ())
        evaluate_all(candidates, folders, grader, world, say)


if __name__ == "__main__":
    with user_errors("tools.evaluate"):
        main(sys.argv[1:])
