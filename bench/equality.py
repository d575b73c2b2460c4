r"""Measures a grader's errors: the percent of right answers refused, and of wrong answers accepted.

    python -m bench.equality [--before 3d91407] [--failures] [--unseen] [--draws 4]

A pair is an answer, a gold answer, and whether they are equal. The pairs are divided into six parts:
    seen      two thirds of the synthetic pairs of bench/equality_pairs.py; --draws draws per template
    unseen    the other third of them
    foreign   794 pairs of bench/equality_foreign.jsonl, written by another author
    second    the file's other 204 pairs, written before the grader's second revision
    golds     two thirds of the pairs of bench/equality_golds.txt, written before the grader's third revision.
              Their gold answers look like those of competition data sets.
    others    the other third of them
Nobody looks at `unseen` and `others` while improving the grader. They need --unseen.

In bench/equality_golds.txt, a line `# name` begins a category. Its other lines have a gold answer, right
answers and wrong answers: `gold ~ right ~ right ~~ wrong ~ wrong`.

Three graders judge each pair: the present grading/answers.py (`after`), grading/answers.py as of the commit
--before (`before`), and math-verify. Prints one JSON line per grader and part.

--failures prints each wrong verdict of grading/answers.py, except on unseen pairs. --unseen writes
bench/results/equality.md and .json."""

from __future__ import annotations

import importlib.util
import json
import logging
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bench.common import RESULTS, ROOT, arguments, markdown, say
from bench.equality_pairs import Pair, pairs, unseen
from grading.answers import grade

SECONDS = 5  # CPU seconds for one pair; a grader that takes longer refuses the answer
PARTS = {"seen": "**synthetic, two thirds, seen**", "unseen": "**synthetic, one third, unseen**",
         "foreign": "**foreign: by another author**",
         "second": "**second: written before the grader's second revision**",
         "golds": "**golds: with gold answers as in competitions; two thirds, seen**",
         "others": "**golds, one third, unseen**"}


class Late(BaseException):
    """Raised at a timeout. Not an Exception, because sympy catches every Exception."""


def earlier(commit: str) -> Callable[[str, str], bool]:
    """Returns the function `grade` of grading/answers.py as it was in a commit."""
    source = subprocess.check_output(["git", "show", f"{commit}:grading/answers.py"], cwd=ROOT, text=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answers_before.py")
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("answers_before", path)
        module = sys.modules["answers_before"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.grade


def math_verify(answer: str, gold: str) -> bool:
    from math_verify import parse, verify

    boxes = [parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
    return verify(*boxes, timeout_seconds=None)


def verdict(grade: Callable[[str, str], bool], pair: Pair) -> bool:
    """Returns whether the grader accepts the pair; False if the grader raises or takes more than SECONDS."""
    def late(*_):
        raise Late

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with suppress(Exception, Late):
            return bool(grade(pair.answer, pair.gold))
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def count(cases: list[Pair], verdicts: list[bool]) -> dict[str, float]:
    wrong = Counter((p.same, p.same != v) for p, v in zip(cases, verdicts, strict=True))
    percent = {}
    for name, same in (("refused", True), ("accepted", False)):
        total = wrong[same, True] + wrong[same, False]
        percent[name] = round(100 * wrong[same, True] / total, 1) if total else 0.0
    return percent


def foreign() -> list[Pair]:
    found = []
    for line in (ROOT / "bench/equality_foreign.jsonl").read_text().splitlines():
        row = json.loads(line)
        name = row["category"] if row["category"].startswith("second ") else f"foreign {row['category']}"
        found.append(Pair(name, row["answer"], row["gold"], row["right"], unseen=False))
    return found


def golds() -> list[Pair]:
    """Returns the pairs of bench/equality_golds.txt. The category's name starts with "golds"."""
    found, category = [], ""
    for line in (ROOT / "bench/equality_golds.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            category = f"golds {line[2:]}"
            continue
        (gold, *right), wrong = (texts.split(" ~ ") for texts in line.split(" ~~ "))
        hidden = unseen(gold)
        found += [Pair(category, answer, gold, True, hidden) for answer in right]
        found += [Pair(category, answer, gold, False, hidden) for answer in wrong]
    return found


def part(pair: Pair) -> str:
    first = pair.category.split()[0]
    if first == "golds":
        return "others" if pair.unseen else "golds"
    return first if first in PARTS else "unseen" if pair.unseen else "seen"


def shares(cases: list[Pair], verdicts: list[bool], name: str) -> dict[str, float]:
    chosen = [i for i, p in enumerate(cases) if part(p) == name]
    return count([cases[i] for i in chosen], [verdicts[i] for i in chosen])


def table(cases: list[Pair], verdicts: dict[str, list[bool]]) -> str:
    """Returns a Markdown table. Rows: each category, then each part (PARTS). Columns: numbers of right and of
    wrong answers; for each grader, percent of right answers refused / of wrong answers accepted."""
    groups = {name: [p.category == name for p in cases] for name in dict.fromkeys(p.category for p in cases)}
    groups |= {title: [part(p) == name for p in cases] for name, title in PARTS.items()}
    lines = []
    for name, chosen in groups.items():
        some = [p for p, c in zip(cases, chosen, strict=True) if c]
        cells = []
        for of in verdicts.values():
            percent = count(some, [v for v, c in zip(of, chosen, strict=True) if c])
            cells.append(f"{percent['refused']} / {percent['accepted']}")
        right = sum(p.same for p in some)
        lines.append((name, right, len(some) - right, *cells))
    heads = (f"{name}: % of right refused / % of wrong accepted" for name in verdicts)
    return markdown(("category", "right answers", "wrong answers", *heads), lines)


def main() -> None:
    args = arguments(__doc__, before="3d91407", draws=4, failures=False, unseen=False)
    logging.disable(logging.WARNING)
    cases = [p for p in [*pairs(args.draws), *foreign(), *golds()] if args.unseen or not p.unseen]
    parts = [name for name in PARTS if args.unseen or name not in ("unseen", "others")]
    graders = {"after": grade}
    if args.unseen or not args.failures:
        graders = {"before": earlier(args.before), **graders, "math-verify": math_verify}
    verdicts = {name: [verdict(grader, p) for p in cases] for name, grader in graders.items()}
    figures = {name: {which: shares(cases, of, which) for which in parts} for name, of in verdicts.items()}
    for name, of in figures.items():
        for which, percent in of.items():
            total = sum(part(p) == which for p in cases)
            say({"bench": "equality", "grader": name, "part": which, "pairs": total, **percent})
    if args.failures:
        for p, v in zip(cases, verdicts["after"], strict=True):
            if p.same != v and not p.unseen:
                print(f"{p.category}: {p.answer!a} {'refused' if p.same else 'accepted'} for {p.gold!a}")
    if args.unseen:
        report = table(cases, verdicts)
        head = ("`before` is torz's grader at commit 3d91407. `after` is torz's grader when `python -m\n"
                "bench.equality --unseen` wrote this file. Nobody looked at unseen pairs while improving\n"
                "the grader. Each pair also counts in one of the rows in bold at the end.\n\n")
        (RESULTS / "equality.md").write_text(head + report)
        (RESULTS / "equality.json").write_text(json.dumps(figures, indent=1) + "\n")
        print(report)


if __name__ == "__main__":
    main()
