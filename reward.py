r"""Reads the flag --reward, and computes extra rewards from a response's text. To try a reward on a file of
responses:

    python reward.py RESPONSES.jsonl --extractor boxed

To grade responses in your own code:

    from reward import Grader

    with Grader(workers=2) as grader:
        grader.submit("id", response, gold=r"\frac{1}{2}", stopped=True)
        print(grader.results())

--reward is a list of graders and reward parts. A grader compares answers with gold answers, or is a user's
function. A reward part is an extra reward, such as "format" (rollout.REWARD_PARTS)."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from configs import nearest, require, run_command
from grading.answers import KINDS, readers
from grading.rows import as_json, decoded, read_rows
from grading.worker import REASONS, SPEC, Grader, Reply  # noqa: F401  others import them

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


def parse_terms(reward: Sequence[str], parts: Collection[str]) -> list[Term]:
    """Returns the terms of --reward: first the graders, then the reward parts (see Term). Raises UserError if
    a term is wrong, if two terms have the same name, or if no term is a grader.

    reward: terms NAME or NAME=WEIGHT. NAME is one of KINDS, one of `parts`, FILE.py:FUNCTION, or
        DATASET@FILE.py:FUNCTION.
    parts: the names of all reward parts, such as "format"."""
    terms = [_term(spec, parts) for spec in reward]
    graders = [t for t in terms if t.kind or t.custom]
    names = {t.name for t in terms}
    require(
        len(graders) > 0,
        f"--reward {' '.join(reward)} has no grader",
        f"one of {', '.join(KINDS)}, or {SPEC}",
    )
    require(
        len(names) == len(terms),
        f"--reward {' '.join(reward)} has two terms with the same name",
        "at most one comparison of answers, and functions with different names",
    )
    return graders + [t for t in terms if t not in graders]


def _term(spec, parts):
    full, equals, number = spec.rpartition("=")
    # Without =, or if the last = is part of a file path, the weight is 1.
    if not equals or "/" in number or ":" in number:
        full, number = spec, "1"
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    require(
        math.isfinite(weight),
        f"the weight {number!r} of reward {spec!r} is not a finite number",
        "NAME=NUMBER",
    )
    if full in KINDS:
        return Term("accuracy", weight, kind=full)
    dataset = ""
    custom = full if ":" in full else ""
    if "@" in custom and not custom.startswith(
        ("/", ".")
    ):  # in /… and ./…, the @ belongs to the path
        dataset, _, custom = custom.partition("@")
        require(
            dataset != "",
            f"reward {full!r} has no data set before its @",
            f"DATASET@{SPEC}, or ./ in front of a path",
        )
        dataset = dataset.casefold()
    known = [*KINDS, *parts]
    require(
        bool(custom) or full in known,
        f"no reward {full!r}{nearest(full, known)}",
        f"--reward with some of, and spaces between: {' '.join(known)} [DATASET@]{SPEC}",
    )
    name = custom.rpartition(":")[2] or full
    if dataset:
        name = dataset.replace("/", "-")  # the metric is reward/NAME, with no / in NAME
    return Term(name, weight, custom=custom, dataset=dataset)


def kind_of(reward: Sequence[str]) -> str:
    """Returns how answers are compared for data rows without the field "reward" and without choices: the
    first of KINDS (math, choice, exact) in --reward, or "math" if --reward has none of them."""
    names = [spec.partition("=")[0] for spec in reward]
    return next((name for name in names if name in KINDS), "math")


def think_then_answer(text: str) -> float:
    """Returns 1 for the format <think> … </think> <answer> … </answer>, each tag on its own line, else 0
    (Open-R1's format reward)."""
    start, middle, end = "<think>\n", "\n</think>\n<answer>\n", "\n</answer>\n"
    _, _, answer = text[len(start) :].partition(middle)
    return float(text.startswith(start) and end in f"{answer}\n")


def tag_count(text: str) -> float:
    """Returns 0.25 × the number of `tags` that occur exactly once in the text (Open-R1's tag count)."""
    tags = "<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"
    return sum(0.25 for tag in tags if text.count(tag) == 1)


def repeated_ngrams(text: str, n: int = 3) -> float:
    """Returns the fraction of word n-grams that occurred earlier in the text (Open-R1's repetition penalty,
    times -1)."""
    words = text.lower().split()
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


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
    own = [t for t in terms if t.dataset and t.dataset == dataset.casefold()]
    return own + [t for t in terms if not t.dataset and (t.custom or (t.kind and not own))]


# --- grading a file


def _responses(path, kind="math"):
    """Yields the rows of a file of responses, which may be a file in a run's folder samples/. `kind`: how
    answers are compared in rows without a kind. Raises UserError for an invalid row."""
    for number, row in read_rows(path):
        where, found = f"{path}, row {number}", decoded(row, path, number)
        require(
            isinstance(found, dict),
            f"{where}: not a JSON object",
            '{"response": str, "answer": str}',
        )
        row = {"stopped": True, "kind": kind, **json.loads(as_json(found))}
        if "gold" in row:  # a row of a run's samples/
            row["answer"] = row["gold"]
            if "segments" in row:  # with --env, every second text is the environment's
                row["response"] = "\n".join(row["segments"][::2])
        for field, needed in (("response", str), ("answer", str), ("stopped", bool)):
            value = row.get(field)
            require(
                isinstance(value, needed),
                f"{where}: {field!r} is {value!r:.80}",
                f"{needed.__name__} (columns: {', '.join(found)})",
            )
        require(
            row["kind"] in KINDS,
            f"{where}: 'kind' is {row['kind']!r}",
            f"one of {', '.join(KINDS)}",
        )
        yield row


def dry_run(
    responses: str,
    /,
    reward: tuple[str, ...] = ("math",),
    workers: int = 2,
    deadline: float = 5.0,
    extractor: str = "orz",
) -> None:
    """Grade a file of responses. Print the number of responses with each outcome (correct, wrong, …), mean
    rewards, and the first three wrong or unparsed responses.

    Args:
        responses: .jsonl, .json or .parquet file of rows {"response": str, "answer": str, "stopped": true,
            "kind": "math"}, or a file in a run's folder samples/. stopped is false for a response cut at the
            length limit. stopped and kind may be left out
        reward: terms NAME or NAME=WEIGHT, such as math format=0.5 path/to/file.py:function
        workers: number of grading processes
        deadline: CPU seconds that grading one answer may take
        extractor: how the answer is found in a response: orz, boxed, answer_tag, gsm8k, dapo, letter,
            last_number or whole"""
    rows, terms, values = (
        list(_responses(responses, kind_of(reward))),
        parse_terms(reward, TEXT_PARTS),
        {},
    )
    customs = [t.custom for t in terms if t.custom]
    with Grader(workers, deadline, customs) as grader:
        for i, row in enumerate(rows):
            for t in graders_of(row.get("dataset") or "", terms):
                grader.submit(
                    (t, i),
                    row["response"],
                    row["answer"],
                    row["stopped"],
                    row["kind"],
                    extractor,
                    t.custom,
                    problem=row.get("problem"),
                    row=row.get("row", row),
                    sample=row,
                )
        every = grader.results()
        grader.check()
    for (t, _), grade in every.items():
        values.setdefault(t, []).append(grade.reward)
    for t in terms:
        if t.name in TEXT_PARTS:
            values[t] = [TEXT_PARTS[t.name](row["response"]) for row in rows]
    grades = {
        i: grade
        for (t, i), grade in every.items()
        if t == graders_of(rows[i].get("dataset") or "", terms)[0]
    }
    require(
        len(grades) == len(rows),
        f"no grader for {len(rows) - len(grades)} of {len(rows)} rows",
        "--reward with a grader for their data sets, such as math",
    )
    for reason in REASONS:
        count = sum(grade.reason == reason for grade in grades.values())
        print(f"{reason:10}{count:8}{count / len(rows):8.1%}")
    for t, numbers in values.items():
        print(f"mean {t.name} {sum(numbers) / len(numbers):.4f}, weight {t.weight:g}")
    failures = [i for i, grade in grades.items() if grade.reason in ("wrong", "unparsed")]
    for i in sorted(failures)[:3]:
        row, grade = rows[i], grades[i]
        print(
            f"row {i + 1}, {grade.reason}: {grade.answer!a}, gold {row['answer']!a}, "
            f"ends {row['response'][-200:]!a}"
        )
        if grade.reason == "unparsed":
            print(f"  found by --extractor {' or '.join(readers(row['response'])) or 'none'}")
    failed = sum(grade.reason in ("error", "timeout") for grade in every.values())
    require(
        not failed,
        f"{failed} of {len(every)} failed or were late: {[*grader.errors.values()]!a}",
        "a --reward that raises no error, or a larger --deadline",
    )


if __name__ == "__main__":
    run_command(dry_run, "reward.py")
