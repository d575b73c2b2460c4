"""Measures how many typical answers the grader grades per second. Then tests it with hostile answers, which
are made to crash, block or exploit it.

    python -m bench.grading [--count 4096] [--workers 2] [--hostile 1000]

The printed `in_workers_a_second` counts only the answers whose values a worker must compute. The function
`hostile` of tests/test_reward.py returns the hostile answers. This program tests five variants of each. Their
grade must be "timeout", "unparsed" or "wrong".

The exit status is 1 if an answer gets another grade than it must, or if the grader no longer works after the
hostile answers.
"""

from __future__ import annotations

import os
import random
import sys
import time

from bench.common import ROOT, arguments, say
from grading import worker
from grading.worker import Grader

sys.path.append(str(ROOT / "tests"))


def typical(count: int, seed: int = 0) -> list[tuple[str, str, bool]]:
    """Returns `count` tuples (answer, gold answer, whether the answer is right)."""
    rng, cases = random.Random(seed), []
    while len(cases) < count:
        a, b, c, k = rng.randint(2, 9999), rng.randint(2, 99), rng.randint(2, 9), len(cases)
        pairs = [
            (f"{a}{k}", f"{a}{k}", f"{a + 1}{k}"),
            (f"{a:,}", str(a), str(a + 1)),
            (rf"\dfrac{{{a}}}{{{b}}}", rf"\frac{{{2 * a}}}{{{2 * b}}}", rf"\frac{{{a}}}{{{b + 1}}}"),
            (rf"{a}\sqrt{{{b}}}+{k}", rf"{k}+{a}\sqrt{{{b}}}", rf"{k}+{a}\sqrt{{{b + 1}}}"),
            (rf"x^{c}+{a}x+{b}", rf"{b}+{a}x+x^{c}", rf"{b}+{a}x-x^{c}"),
            (rf"({a},{a + b}]", rf"({a}, {a + b}]", rf"[{a}, {a + b}]"),
            (rf"\{{{a},{a + b},{a + b + c}\}}", rf"\{{{a + b}, {a}, {a + b + c}\}}", rf"\{{{a}, {b}\}}"),
            (rf"\frac{{\pi}}{{{a}}}", rf"\pi/{a}", rf"\pi/{a + 1}"),
            (rf"{a}\text{{ cm}}", f"{a}", f"{a + 1}"),
            (rf"({a},{b})", rf"\left({a}, {b}\right)", rf"({b}, {a + 1})"),
        ]
        answer, equal, other = pairs[k % len(pairs)]
        cases.append((answer, other if k % 3 == 2 else equal, k % 3 != 2))
    return cases


def box(answer: str) -> str:
    return f"so</think><answer>\\boxed{{{answer}}}</answer>"


def descriptors(grader: Grader) -> list[int]:
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), grader.comparisons.process.pid)]


def bench_typical(grader: Grader, count: int, workers: int) -> bool:
    cases = typical(count)
    to_workers = sum(worker.quick_grade(answer, gold) is None for answer, gold, _ in cases)
    start = time.perf_counter()
    for i, (answer, gold, _) in enumerate(cases):
        grader.submit(i, box(answer), gold, True)
    grades = grader.results()
    seconds = time.perf_counter() - start
    wrong = [(answer, gold, grades[i].reason) for i, (answer, gold, same) in enumerate(cases)
             if grades[i].reason != ("correct" if same else "wrong")]
    say({
        "bench": "grading", "figure": "typical", "answers": count, "workers": workers,
        "a_second": round(count / seconds), "in_workers_a_second": round(to_workers / seconds),
        "share_in_workers": round(to_workers / count, 2), "graded_otherwise": len(wrong),
        "examples": wrong[:5]})
    return not wrong


def bench_hostile(grader: Grader, count: int) -> bool:
    from test_reward import hostile

    before = descriptors(grader)
    texts = [f"{text}{'+' * (k > 0)}{k or ''}" for k in range(5) for text in hostile()][:count]
    start = time.perf_counter()
    for i, answer in enumerate(texts):
        grader.submit(("hostile", i), box(answer), "7+x", True)
    reasons = [grade.reason for grade in grader.results().values()]
    after = descriptors(grader)
    harmless = {reason: reasons.count(reason) for reason in ("timeout", "unparsed", "wrong")}
    passed = len(reasons) - sum(harmless.values())
    grader.submit("after", box("x+7"), "7+x", True)
    works = grader.results()["after"].reason == "correct"
    say({
        "bench": "grading", "figure": "hostile", "answers": len(texts),
        "seconds": round(time.perf_counter() - start, 1), "passed": passed, "grades_on": works, **harmless,
        "descriptors_before": before, "descriptors_after": after})
    return works and not passed


def main() -> None:
    args = arguments(__doc__, count=4096, workers=2, hostile=1000)
    with Grader(args.workers) as grader:
        grader.submit("warm", box(r"\frac{1}{2}x"), r"\frac{x}{2}", True)
        grader.results()
        ok = bench_typical(grader, args.count, args.workers)
        if args.hostile:
            ok = bench_hostile(grader, args.hostile) and ok
    sys.exit(not ok)


if __name__ == "__main__":
    main()
