r"""Measures a grader's errors: the percent of right answers refused, and of wrong answers accepted.

    python -m bench.equality [--before 3d91407] [--failures] [--unseen] [--draws 4]

A pair is an answer and a gold answer. The sets of pairs:
    seen      synthetic pairs (bench/equality_pairs.py), with --draws random draws per template
    unseen    synthetic pairs that are held out
    foreign   794 pairs by another author (bench/equality_foreign.jsonl)
    second    204 more pairs of equality_foreign.jsonl, written before the grader's second revision
    attack    more pairs of equality_foreign.jsonl: new notations, and pairs that were written to find errors
              of the grader's third revision. The revision was made with these pairs in sight
    third     1,098 pairs of equality_foreign.jsonl. Their two authors had not seen the grader. It refused
              10.6 and 18.2 % of the right answers, and accepted 0.0 and 1.3 % of the wrong ones. Then it was
              mended with these pairs in sight. Two pairs were left out: grading/answers.py has other rules
    fourth    1,040 pairs of equality_foreign.jsonl. Their two authors had not seen the grader. It refused
              4.0 % of the right answers and accepted 0.2 % of the wrong ones (math-verify: 25.3 and 14.6 %).
              Then it was mended with these pairs in sight
    fifth     2,122 pairs of equality_foreign.jsonl, written by two authors who had the grader's code and
              looked for its errors. Of the first it accepted 32 % of the wrong answers, of the second it
              refused 33 % of the right ones. Then the common kinds were mended
    sixth     535 pairs of equality_foreign.jsonl. Their author had not seen the grader. It refused 2.5 % of
              the right answers and accepted none of the wrong ones (math-verify: 22.5, 16.4 %). Then three
              notations were added with these pairs in sight
    seventh   1,127 pairs of equality_foreign.jsonl, written with the grader's code at hand, most of them
              against rules that were new. The common kinds were mended
    eighth    1,300 pairs of equality_foreign.jsonl. Their two authors had not seen the grader, and wrote many
              sentences, parameters and other scripts. It refused 22.3 % of the right school answers and
              46.6 % of the right competition answers, and accepted 0.9 and 0.4 % of the wrong ones. Then it
              was mended with these pairs in sight. 23 labels follow grading/answers.py, most of them because
              units are not converted
    ninth     1,232 pairs of equality_foreign.jsonl, written with the grader's code at hand against the rules
              that the eighth set had brought. The common kinds were mended
    tenth     936 pairs of equality_foreign.jsonl. The author of 450 had not seen the grader, and wrote what
              policies answer to the problems of common data sets. It refused 10.7 % of the right answers and
              accepted none of the wrong ones (math-verify: 32.1, 2.7 %). The others were written with the
              grader's code at hand against new rules. Then it was mended with these pairs in sight. One
              label follows grading/answers.py: 40 does not equal 40 %
    eleventh  544 pairs of equality_foreign.jsonl. Their two authors had not seen the grader, and left out
              easy pairs. It refused 25.4 % of the right school answers and 38.1 % of the right competition
              answers, and accepted 2.2 and 0.0 % of the wrong ones (math-verify: 45.2 and 59.0, 6.5 and
              7.1 %). Then some notations were added with these pairs in sight. 26 pairs were left out,
              because grading/answers.py has other rules: units are not converted
    twelfth   556 pairs of equality_foreign.jsonl. Their two authors had not seen the grader, and wrote what
              policies usually answer. The grader, by then a grammar, refused 8.8 % of the right school
              answers and 9.8 % of the right competition answers, and accepted none of the wrong ones
              (math-verify: 39.2 and 41.4, 5.2 and 6.1 %). 79 pairs were left out afterwards: 73 that other
              sets have, and six for which grading/answers.py has other rules: 60 does not equal 60 %
    thirteenth
              421 pairs of equality_foreign.jsonl, by two more authors, written as the twelfth set. The grader
              refused 5.1 % of the right school answers and 15.2 % of the right competition answers, and
              accepted 0.0 and 1.6 % of the wrong ones (math-verify: 17.6 and 38.6, 6.5 and 3.9 %). 99 pairs
              were left out afterwards: 95 that other sets have, and four because of other rules, as above.
              Then three kinds were mended with these pairs in sight
    golds     pairs with competition-style gold answers (bench/equality_golds.txt)
    others    pairs of equality_golds.txt that are held out
Three labels of equality_foreign.jsonl were wrong until the third revision: grading/answers.py says that units
are not converted (150 cm does not equal 1.5 m, nor 120 minutes 2 hours), and that x+1=0 does not equal x=-1.

Nobody looks at held-out pairs while improving the grader. They are about a third of the synthetic pairs and
of equality_golds.txt. Only --unseen measures them.

The graders:
    before         grading/answers.py of the commit --before
    after          grading/answers.py of the working tree
    math-verify    the Python package of this name

Counts also the problems of MATH-500 that have a formula which the grader takes for the gold answer. Copying
such a formula solves nothing, so grading.answers.repeats finds it.

--failures prints the wrong verdicts of `after`, except on held-out pairs. --unseen writes
bench/results/equality.md and equality.json.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from bench.common import RESULTS, ROOT, arguments, markdown, say
from bench.equality_pairs import Pair, pairs, unseen
from grading.answers import FORMULA, grade, repeats

SECONDS = 5  # maximum CPU seconds for one pair
PARTS = {"seen": "synthetic, two thirds, seen", "unseen": "synthetic, one third, unseen",
         "foreign": "by another author", "second": "written before the grader's second revision",
         "attack": "new notations and attacks, seen by its third revision",
         "third": "by two more authors, seen by its fourth revision",
         "fourth": "by two more authors, seen by its fifth revision",
         "fifth": "written with its code at hand to find errors, seen by its fifth revision",
         "sixth": "by another author, seen by its sixth revision",
         "seventh": "written with its code at hand to find errors, seen by its sixth revision",
         "eighth": "by two more authors, sentences and parameters, seen by its seventh revision",
         "ninth": "written with its code at hand to find errors, seen by its seventh revision",
         "tenth": "by one more author, and one with its code at hand, seen by its eighth revision",
         "eleventh": "by two more authors, easy pairs left out, seen by its ninth revision",
         "twelfth": "by two more authors, usual answers, seen by its eleventh revision",
         "thirteenth": "by two other authors, usual answers, seen by its eleventh revision",
         "golds": "gold answers as in competitions, two thirds, seen",
         "others": "gold answers as in competitions, one third, unseen"}


HEAD = """\
Each cell has two numbers: % of right answers refused / % of wrong answers accepted. `before` is torz's grader
at commit 3d91407. `after` is torz's grader when this file was written. Nobody looked at unseen pairs while
improving the grader.

"""


class Late(BaseException):
    """Raised at a timeout. Not an Exception, because sympy catches every Exception."""


def earlier(commit: str) -> Callable[[str, str], bool]:
    """Returns the function `grade` of a commit's grading/answers.py."""
    code = subprocess.check_output(["git", "archive", commit, "configs.py", "grading", "guard"], cwd=ROOT)
    folders = ("configs", "grading", "guard")
    ours = {n: module for n, module in sys.modules.items() if n.split(".")[0] in folders}
    with tempfile.TemporaryDirectory() as folder:
        tarfile.open(fileobj=io.BytesIO(code)).extractall(folder, filter="data")
        for name in ours:
            del sys.modules[name]
        sys.path.insert(0, folder)
        grade = importlib.import_module("grading.answers").grade
        sys.path.remove(folder)
    sys.modules.update(ours)
    return grade


def math_verify(answer: str, gold: str) -> bool:
    from math_verify import parse, verify

    boxes = [parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
    return verify(*boxes, timeout_seconds=None)


def verdict(grade: Callable[[str, str], bool], pair: Pair) -> bool:
    """Returns whether the grader accepts the pair; False if it raises or takes more than SECONDS."""
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
        known = row["category"].split()[0] in PARTS
        name = row["category"] if known else f"foreign {row['category']}"
        found.append(Pair(name, row["answer"], row["gold"], row["right"], unseen=False))
    return found


def golds() -> list[Pair]:
    """Returns the pairs of equality_golds.txt. Its lines: `# category` or `gold ~ right ~~ wrong ~ wrong`."""
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


def copied(grader: Callable[[str, str], bool]) -> int:
    """Returns the number of MATH-500 problems with a formula that the grader takes for the gold answer,
    although it is not the gold answer's text."""
    found = 0
    for row in json.loads((ROOT / "eval_sets/math500.json").read_text()):
        problem, gold = row["prompt"][0]["value"], row["final_answer"]
        formulas = [f.strip() for f in FORMULA.split(problem) if repeats(f, gold, problem)]
        found += any(verdict(grader, Pair("copied", f, gold, False, False)) for f in formulas)
    return found


def part(pair: Pair) -> str:
    first = pair.category.split()[0]
    if first == "golds":
        return "others" if pair.unseen else "golds"
    return first if first in PARTS else "unseen" if pair.unseen else "seen"


def shares(cases: list[Pair], verdicts: list[bool], name: str) -> dict[str, float]:
    chosen = [i for i, p in enumerate(cases) if part(p) == name]
    return count([cases[i] for i in chosen], [verdicts[i] for i in chosen])


def table(cases: list[Pair], figures: dict[str, dict]) -> str:
    lines = []
    for name, title in PARTS.items():
        right = [p.same for p in cases if part(p) == name]
        cells = (f"{of[name]['refused']} / {of[name]['accepted']}" for of in figures.values())
        lines.append((title, sum(right), len(right) - sum(right), *cells))
    return markdown(("pairs", "right answers", "wrong answers", *figures), lines)


def failures(cases: list[Pair], verdicts: list[bool]) -> str:
    """Returns a Markdown table of the categories with errors."""
    lines = []
    for name in dict.fromkeys(p.category for p in cases):
        chosen = [i for i, p in enumerate(cases) if p.category == name]
        percent = count([cases[i] for i in chosen], [verdicts[i] for i in chosen])
        if any(percent.values()):
            lines.append((name, *percent.values()))
    return markdown(("category", "% of right answers refused", "% of wrong answers accepted"), lines)


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
    copies = {name: copied(grader) for name, grader in graders.items()}
    say({"bench": "equality", "figure": "problems of MATH-500 with a formula that is accepted", **copies})
    if args.failures:
        for p, v in zip(cases, verdicts["after"], strict=True):
            if p.same != v and not p.unseen:
                print(f"{p.category}: {p.answer!a} {'refused' if p.same else 'accepted'} for {p.gold!a}")
    if args.unseen:
        report = (f"{HEAD}{table(cases, figures)}\n`after` makes errors only in these categories:\n\n"
                  f"{failures(cases, verdicts['after'])}\n"
                  "Problems of MATH-500 (of 500) with a formula that the grader takes for the gold answer: "
                  f"{', '.join(f'{name} {n}' for name, n in copies.items())}.\n"
                  "In a run, torz refuses such formulas before it compares (`grading.answers.repeats`).\n")
        (RESULTS / "equality.md").write_text(report)
        (RESULTS / "equality.json").write_text(json.dumps(figures, indent=1) + "\n")
        print(report)


if __name__ == "__main__":
    main()
