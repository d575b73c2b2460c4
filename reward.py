r"""Reads the flag --reward, and computes extra rewards from a response's text. To try a reward on a file of
responses:

    python reward.py RESPONSES.jsonl --extractor boxed

To grade responses in your own code:

    from reward import Grader

    with Grader(workers=2) as grader:
        grader.submit("id", response, gold=r"\frac{1}{2}", stopped=True)
        print(grader.results())

--reward is a list of graders and reward parts. A grader compares answers with gold answers, or is a user's
function. A reward part is an extra reward, such as "format" (REWARD_PARTS)."""

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from configs import Config, nearest, run_command
from grading.answers import KINDS
from grading.extract import extract
from grading.rows import dataset_of, gold_answer, read_rows
from grading.worker import SPEC, Grader, Reply  # noqa: F401  others import Reply
from guard.files import checked, is_file
from guard.messages import explained, require

# --- the terms of --reward


@dataclass(frozen=True)
class Term:
    """One term of --reward. A term with `kind` or `custom` is a grader. Any other term is a reward part: an
    extra reward, such as "format"."""

    name: str  # the NAME of the metric `reward/NAME`
    weight: float
    kind: str = ""  # how to compare answers: one of KINDS; "": not at all
    custom: str = ""  # a user's function, as FILE.py:FUNCTION; "": none
    dataset: str = ""  # grades only responses of this data set; "": all data sets

    @property
    def is_grader(self) -> bool:
        return bool(self.kind or self.custom)


# [DATASET@]NAME[=WEIGHT], where NAME may be FILE.py:FUNCTION. The groups are DATASET, NAME and WEIGHT. If the
# term begins with / or ., an @ belongs to the path. An = before a / or : also belongs to the path.
TERM = re.compile(r"(?:([^/.@][^@]*)@)?(.*?)(?:=([^/:=]+))?")


def parse_terms(reward: Sequence[str], parts: Collection[str]) -> list[Term]:
    """Returns the terms of --reward: first the graders, then the reward parts (see Term). Raises UserError if
    a term is wrong, if two terms have the same name, or if no term is a grader.

    reward: terms NAME or NAME=WEIGHT. NAME is one of KINDS, one of `parts`, FILE.py:FUNCTION, or
        DATASET@FILE.py:FUNCTION.
    parts: the names of all reward parts, such as "format"."""
    terms = [_term(spec, parts) for spec in reward]
    names = {t.name for t in terms}
    require(
        any(t.is_grader for t in terms),
        f"--reward {' '.join(reward)} has no grader",
        f"one of {', '.join(KINDS)}, or {SPEC}",
    )
    require(
        len(names) == len(terms),
        f"--reward {' '.join(reward)} has two terms with the same name",
        "at most one of math, choice and exact, at most one function for a data set, and different names",
    )
    return sorted(terms, key=lambda t: not t.is_grader)


def _term(spec, parts):
    """Returns the Term for one word of --reward, such as format=0.5. Errors: see `parse_terms`.

    parts: names of the reward parts"""
    # full: NAME or FILE.py:FUNCTION; only a function has a colon
    dataset, full, number = TERM.fullmatch(spec).groups(default="")
    try:
        weight = float(number or 1)
    except ValueError:
        weight = math.nan
    require(
        math.isfinite(weight),
        f"the weight {number!r} of reward {spec!r} is not a finite number",
        "NAME=NUMBER",
    )
    known = [*KINDS, *parts]
    require(
        ":" in full or full in known,
        f"no reward {full!r}{nearest(full, known)}",
        f"--reward with some of, and spaces between: {' '.join(known)} [DATASET@]{SPEC}",
    )
    require(
        not dataset or ":" in full,
        f"--reward {spec} names a data set, but no function",
        f"DATASET@{SPEC}, or {full} for all rows",
    )
    if full in KINDS:
        return Term("accuracy", weight, kind=full)
    if full in parts:
        return Term(full, weight)
    # A user's function. Its metric is reward/NAME, with no / in NAME.
    name = dataset.casefold().replace("/", "-") or full.rpartition(":")[2]
    return Term(name, weight, custom=full, dataset=dataset.casefold())


def kind_of(reward: Sequence[str]) -> str:
    """Returns how answers are compared for data rows without the field "reward" and without choices: the
    first of KINDS (math, choice, exact) in --reward, or "math" if --reward has none of them."""
    names = [spec.partition("=")[0] for spec in reward]
    return next((name for name in names if name in KINDS), "math")


def think_then_answer(text: str) -> float:
    """Returns 1 for the format <think> … </think> <answer> … </answer>, each tag on its own line, else 0
    (Open-R1's format reward)."""
    start = "<think>\n"
    _, _, answer = text[len(start) :].partition("\n</think>\n<answer>\n")
    # f"{answer}\n": the text may also end with </answer>
    return float(text.startswith(start) and "\n</answer>\n" in f"{answer}\n")


def tag_count(text: str) -> float:
    """Returns 0.25 × the number of `tags` that occur exactly once in the text (Open-R1's tag count)."""
    tags = "<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"
    return sum(0.25 for tag in tags if text.count(tag) == 1)


def repeated_ngrams(text: str) -> float:
    """Returns the fraction of word 3-grams that occurred earlier in the text (Open-R1's repetition penalty,
    times -1)."""
    words = text.lower().split()
    grams = list(zip(words, words[1:], words[2:], strict=False))
    if not grams:
        return 0.0
    return 1 - len(set(grams)) / len(grams)


# The reward parts that read only the response's text.
TEXT_PARTS = {
    "format": think_then_answer,
    "tags": tag_count,
    "repetition": lambda text: -repeated_ngrams(text),
}


def graders_of(dataset: str, terms: Sequence[Term]) -> list[Term]:
    """Returns the terms of --reward that grade the responses of a data set. The first term decides whether a
    response is correct. If a data set has a term DATASET@FILE.py:FUNCTION, the terms math, choice and exact
    do not grade its responses."""
    graders = [t for t in terms if t.is_grader]
    own = [t for t in graders if dataset and t.dataset == dataset.casefold()]
    others = [t for t in graders if not t.dataset]
    if own:
        others = [t for t in others if t.custom]
    return own + others


# --- rewards of a run
# group: the samples of one prompt (data.Sample)


def overlong(group: Sequence[Any], cfg: Config) -> list[float]:
    """Returns DAPO's length penalty for each sample (arXiv 2503.14476, eq. 13): 0 up to --overlong_buffer
    tokens before the limit, then linearly down to -1 at the limit."""
    buffer = cfg.overlong_buffer
    penalties = []
    for s in group:
        longest = min(cfg.max_response_len, cfg.model_len - len(s.prompt))
        over = len(s.ids) - (longest - buffer)  # tokens in the buffer; below 0: none
        share = max(over / buffer, 0.0)
        penalties.append(-min(share, 1.0))
    return penalties


def nonstop(group: Sequence[Any], cfg: Config) -> list[float]:
    """Returns Open-Instruct's penalty for each sample: -nonstop_penalty if the length limit cut the response,
    else 0."""
    return [0.0 if s.stopped else -cfg.nonstop_penalty for s in group]


def _of_texts(part, group, cfg):
    """Returns part(text) for each sample of the group. part: a function of TEXT_PARTS"""
    return [part(s.policy_text) for s in group]


# Name of a reward part -> its function, which takes the samples of one prompt and the config, and returns an
# extra reward for each sample. A run uses a part if --reward names it, or if its flag (BY_FLAG) is not 0.
REWARD_PARTS = {
    "overlong": overlong,
    "nonstop": nonstop,
}
REWARD_PARTS |= {name: partial(_of_texts, part) for name, part in TEXT_PARTS.items()}
BY_FLAG = {"overlong": "overlong_buffer", "nonstop": "nonstop_penalty"}  # part -> its flag


def terms_of(cfg: Config) -> list[Term]:
    """Returns the terms of --reward and those of BY_FLAG: first the graders, then the reward parts. Raises
    UserError for an unknown term, or a name that comes twice."""
    by_flag = [name for name, flag in BY_FLAG.items() if getattr(cfg, flag)]
    # A part with a flag is known only if its flag is set.
    known = [name for name in REWARD_PARTS if name not in BY_FLAG]
    return parse_terms([*cfg.reward, *by_flag], [*known, *by_flag])


def extractors(cfg: Config) -> dict[str, str]:
    """Returns a dict: name of a data set -> its extractor. The name "" stands for all other data sets. Raises
    UserError if --extractor has two extractors for one data set."""
    found = {}
    for spec in cfg.extractor:  # NAME or DATASET=NAME
        dataset, _, name = spec.rpartition("=")
        found[dataset.casefold()] = name
    require(
        len(found) == len(cfg.extractor),
        f"--extractor {' '.join(cfg.extractor)} has two extractors for the same rows",
        "one each: NAME, and DATASET=NAME for the rows of a data set",
    )
    return {"": "orz"} | found


def check_functions(cfg: Config) -> list[Term]:
    """Returns the terms of --reward. Raises UserError if a reward or an extractor does not exist, if all
    weights are 0 and no teacher trains the policy, or if a user's file lacks its function. Imports neither
    torch nor the user's file: the Grader does, and checks the function's parameters."""
    terms = terms_of(cfg)
    require(
        any(t.weight for t in terms) or (cfg.kl_coef > 0 and cfg.ref_model != ""),
        f"--reward {' '.join(cfg.reward)} has only weights of 0",
        "a weight other than 0, or a teacher: --ref_model TEACHER --kl_coef 1",
    )
    for name in extractors(cfg).values():
        extract("", name)  # raises UserError for an unknown name
    for term in terms:
        if term.custom:
            check_function(term.custom)
    if cfg.env:
        check_function(cfg.env)
    return terms


def check_function(spec: str) -> None:
    """Raises UserError if the file of FILE.py:FUNCTION can't be read, or lacks the function's name."""
    file, _, name = spec.rpartition(":")
    require(
        is_file(Path(file)),
        f"{spec!r} names no function in a file that exists",
        SPEC,
    )
    with explained(f"{file} can't be read", "permission to read it", OSError):
        text = Path(file).read_text(errors="ignore")
    words = set(re.findall(r"\w+", text))
    require(
        name in words or "import *" in text,
        f"no {name!r}{nearest(name, sorted(words))} in {file}",
        SPEC,
    )


# --- grading a file


def dry_run(responses: str, /, reward: tuple[str, ...] = ("math",), extractor: str = "orz") -> None:
    """Grade a file of responses. Print the number of responses with each outcome (correct, wrong, …), the
    mean of each term, and the errors.

    Args:
        responses: .jsonl, .json or .parquet file of rows {"response": str, "answer": str, "kind": "math"}, or
            a file in a run's folder samples/. kind may be left out
        reward: terms NAME or NAME=WEIGHT, such as math format=0.5 path/to/file.py:function
        extractor: how the answer is found in a response: orz, boxed, answer_tag, gsm8k, dapo, letter,
            last_number or whole"""
    terms = parse_terms(reward, TEXT_PARTS)
    values = {t: [] for t in terms}  # term -> its value for each response
    outcomes = Counter()
    rows = 0
    with Grader(workers=2, customs=[t.custom for t in terms if t.custom]) as grader:
        for number, row in read_rows(responses):
            rows += 1
            where = f"{responses} row {number}"
            text = _submit(grader, terms, reward, extractor, row, number, where)
            for t in terms:
                if not t.is_grader:  # a user's function may be named tags
                    values[t].append(TEXT_PARTS[t.name](text))
        # All other terms are graders. The keys of the results are (row number, term).
        for (_, t), grade in grader.results().items():
            values[t].append(grade.reward)
            outcomes[f"{t.kind or t.name} {grade.reason}"] += 1
        grader.check()
    for what, count in sorted(outcomes.items()):
        print(f"{what:20}{count:8}")
    _print_means(values, rows)
    for error in grader.errors.values():
        print(f"error: {error!a}")


def _submit(grader, terms, reward, extractor, row, number, where):
    """Submit a row of `dry_run` to the graders among `terms`. Returns the text that they read.

    terms, reward: --reward as Terms and as texts. where: the row's file and number"""
    # A row of a run's samples/ has a field "gold". It also has a field "row", the row of the data file, if a
    # reward function of that run reads it.
    shape = {"response": str, "gold": str | None, "problem": str | None, "segments": list | None}
    checked(row, shape, where)
    text = row["response"]
    if row.get("segments"):  # with --env, every second text is the environment's
        text = "\n".join(row["segments"][::2])
    kind = row.get("kind") or kind_of(reward)
    gold = row["gold"] if "gold" in row else gold_answer(row, kind, where)
    require(
        gold is not None, f"{where} has no answer as text", '{"response": "text", "answer": "text"}'
    )
    lacks_row = "gold" in row and "row" not in row
    require(
        not (lacks_row and grader.reads_rows),
        f"{where} is a sample without its row of the data file, which --reward reads",
        "samples of a run whose --reward reads it, too",
    )
    for t in graders_of(dataset_of(row, where), terms):
        grader.submit(
            (number, t),
            text,
            gold,
            row.get("stopped") is not False,  # without this field, the response was not cut
            kind,
            extractor,
            t.custom,
            problem=row.get("problem"),
            row=row.get("row", row),
            sample=row,
        )
    return text


def _print_means(values, rows):
    """Prints the mean of each term, and of the sum of all terms.

    values: term -> its value for each response that it grades. rows: number of responses"""
    total = 0.0
    for t, of_term in values.items():
        sum_of_term = math.fsum(of_term)
        total += t.weight * sum_of_term
        mean = f"{sum_of_term / len(of_term):.4f}" if of_term else f"no rows of {t.dataset}"
        print(f"mean {t.kind or t.name} {mean}, weight {t.weight:g}")
    print(f"mean of the sum {total / rows:.4f}")


if __name__ == "__main__":
    run_command(dry_run, "reward.py")
