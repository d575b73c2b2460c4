r"""Rewards: the terms of --reward, the parts that read a response's text, and a dry run on a file.

    python reward.py RESPONSES.jsonl --extractor boxed              # try a reward on a file of responses
    with Grader(workers=2) as grader:                               # in a training loop
        grader.submit("id", response, gold=r"\frac{1}{2}", stopped=True)
        print(grader.results())

The reward is 1 if the response stopped by itself and the answer that the extractor finds equals the gold
answer, else 0. grading/answers.py says which answers are right. grading/worker.py runs graders in processes
that can be killed.
"""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from configs import nearest, require, user_errors
from grading.answers import KINDS, readers
from grading.rows import read_rows
from grading.worker import LARGEST, REASONS, SPEC, Grade, Grader, Reply  # noqa: F401  for those who import reward

# --- rewards in parts


@dataclass(frozen=True)
class Term:
    """One of --reward's graders or parts."""

    name: str  # logged as reward/NAME
    weight: float
    kind: str = ""  # how the term compares answers: one of KINDS; "": the term does not compare answers
    custom: str = ""  # FILE.py:FUNCTION of a user's function; "": none
    dataset: str = ""  # the only data set that the term grades; "": all data sets


def parse_terms(reward: Sequence[str], parts: Collection[str]) -> list[Term]:
    """Returns the terms of --reward, graders first. A term is written `NAME` or `NAME=WEIGHT`. NAME is one of
    KINDS, one of `parts`, FILE.py:FUNCTION, or DATASET@FILE.py:FUNCTION. Raises UserError."""
    terms = [_term(spec, parts) for spec in reward]
    graders = [t for t in terms if t.kind or t.custom]
    names = {t.name for t in terms}
    require(len(graders) > 0, f"--reward {' '.join(reward)} has no grader",
            f"one of {', '.join(KINDS)}, or {SPEC}")
    require(len(names) == len(terms), f"--reward {' '.join(reward)} has two parts of one name",
            "at most one comparison of answers, and functions of different names")
    return graders + [t for t in terms if t not in graders]


def _term(spec, parts):
    """One term of --reward. Raises UserError."""
    full, equals, number = spec.rpartition("=")
    if not equals or "/" in number or ":" in number:  # the = is in a path
        full, number = spec, "1"
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    require(weight != 0 and math.isfinite(weight), f"reward {spec!r} has weight {number!r}",
            "NAME=NUMBER, finite and not 0")
    if full in KINDS:
        return Term("accuracy", weight, kind=full)
    dataset, custom = _split_custom(full) if ":" in full else ("", "")
    known = [*KINDS, *parts]
    require(bool(custom) or full in known, f"no reward {full!r}{nearest(full, known)}",
            f"--reward {', '.join(known)}, {SPEC} or DATASET@{SPEC}")
    name = custom.rpartition(":")[2] or full
    if dataset:
        name = dataset.replace("/", "-")  # a / would make it another metric
    return Term(name, weight, custom=custom, dataset=dataset)


def _split_custom(spec):
    """Split DATASET@FILE.py:FUNCTION. Returns the data set (or "") and FILE.py:FUNCTION. The first @ ends the
    data set, because a folder's name may have an @ too. A spec that starts with / or . is a path without a
    data set. Raises UserError."""
    if "@" not in spec or spec.startswith(("/", ".")):
        return "", spec
    dataset, _, custom = spec.partition("@")
    require(dataset != "", f"reward {spec!r} has no data set before its @",
            f"DATASET@{SPEC}, or ./ in front of a path")
    return dataset.casefold(), custom


def kind_of(reward: Sequence[str]) -> str:
    """Returns how answers are compared if a row does not say so: the first of KINDS in --reward, or
    "math"."""
    names = [spec.partition("=")[0] for spec in reward]
    return next((name for name in names if name in KINDS), "math")


def think_then_answer(text: str) -> float:
    """Returns 1 if the response has the format <think> … </think> <answer> … </answer>, else 0. Each tag must
    be on its own line. Text may follow the last tag. This is Open-R1's format reward."""
    start, middle, end = "<think>\n", "\n</think>\n<answer>\n", "\n</answer>\n"
    _, _, answer = text[len(start):].partition(middle)
    return float(text.startswith(start) and end in f"{answer}\n")


def tag_count(text: str) -> float:
    """Returns 0.25 for each of the four tags (think and answer, opening and closing) that occurs exactly
    once, with its line breaks (Open-R1's tag count)."""
    tags = "<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"
    return sum(0.25 for tag in tags if text.count(tag) == 1)


def repeated_ngrams(text: str, n: int = 3) -> float:
    """Returns the share of word n-grams that repeat an earlier n-gram of the text, from 0 to 1. This is minus
    Open-R1's repetition penalty."""
    words = text.lower().split()
    grams = [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# --- the dry run

def _responses(path):
    """Yields the rows of a file of responses, with defaults filled in. Raises UserError with the row's
    number."""
    for number, row in read_rows(path):
        where = f"{path}, row {number}"
        require(isinstance(row, dict), f"{where}: not a JSON object", '{"response": str, "answer": str}')
        row = {"stopped": True, "kind": "math", **row}
        if "gold" in row:  # of a run's samples/, where `answer` is the extracted text
            row["answer"] = row["gold"]
        for field, needed in (("response", str), ("answer", str), ("stopped", bool)):
            value = row.get(field)
            require(isinstance(value, needed), f"{where}: {field!r} is {value!r:.80}", needed.__name__)
        require(row["kind"] in KINDS, f"{where}: 'kind' is {row['kind']!r}", f"one of {', '.join(KINDS)}")
        yield row


def dry_run(responses: str, /, reward: str | None = None, workers: int = 2, deadline: float = 5.0,
            extractor: str = "orz") -> None:
    """Grade a file of responses; print the reasons, mean reward, seconds and the first three failures.

    Args:
        responses: .jsonl, .json or .parquet file of rows {"response": str, "answer": str, "stopped": true,
            "kind": "math"}; the last two may be left out
        reward: your own path/to/file.py:function, called as function(response, answer, kind) -> float
        workers: processes
        deadline: CPU seconds for one answer
        extractor: finds the answer in a response: orz, boxed, answer_tag, gsm8k, dapo, letter, last_number or
            whole
    """
    rows, start = list(_responses(responses)), time.perf_counter()
    with Grader(workers, deadline, [reward] if reward else [], compares=not reward) as grader:
        for i, row in enumerate(rows):
            grader.submit(i, row["response"], row["answer"], row["stopped"], row["kind"], extractor,
                          reward or "")
        grades = grader.results()
    for reason in REASONS:
        count = sum(grade.reason == reason for grade in grades.values())
        print(f"{reason:10}{count:8}{count / len(rows):8.1%}")
    mean = sum(grade.reward for grade in grades.values()) / len(rows)
    print(f"mean reward {mean:.4f}, {time.perf_counter() - start:.1f} s")
    failures = [i for i, grade in grades.items() if grade.reason in ("wrong", "unparsed")]
    for i in sorted(failures)[:3]:
        row, grade = rows[i], grades[i]
        print(f"row {i + 1}, {grade.reason}: {grade.answer!a}, gold {row['answer']!a}, "
              f"ends {row['response'][-200:]!a}")
        if grade.reason == "unparsed":
            print(f"  an answer is found by --extractor {' or '.join(readers(row['response'])) or 'none'}")
    for message in grader.errors.values():
        print(f"error: {ascii(message)}")


if __name__ == "__main__":
    import tyro  # here: the trainer doesn't need it

    with user_errors("reward.py"):
        tyro.cli(dry_run)
