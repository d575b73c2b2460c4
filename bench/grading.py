"""The grader: typical answers a second, right ones graded right at any load, a thousand hostile ones.

    python bench/grading.py [--count 4096] [--workers 2]

Typical: an answer beside its gold one as mathematical data sets write them (integers and decimals, fractions, expressions,
intervals, sets and tuples, words and units), no two alike, so that none is decided by memory; all are in flight at once.
What the trainer's process decides itself and what goes to math-verify are counted apart. Hostile: the kinds of the tests, five
of each. One JSON line a figure; exit status 1 where a right answer is not graded right or a hostile one passes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), str(HERE.parent / "tests")] + [p for p in sys.path if p != str(HERE)]


def typical(count: int, seed: int = 0) -> list[tuple[str, str, bool]]:
    """(answer, gold, whether they are equal), two of three equal."""
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


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hostile", type=int, default=1000)
    args = parser.parse_args()
    from test_reward import hostile

    import reward
    from reward import Grader

    def box(answer: str) -> str:
        return f"so</think><answer>\\boxed{{{answer}}}</answer>"

    bad = 0
    with Grader(args.workers) as grader:
        grader.submit("warm", box(r"\frac{1}{2}x"), r"\frac{x}{2}", True)
        grader.results()
        cases = typical(args.count)
        asked = [reward._quick(a, g, "math") is None for a, g, _ in cases]
        begin = time.perf_counter()
        for i, (answer, gold, _) in enumerate(cases):
            grader.submit(i, box(answer), gold, True)
        grades = grader.results()
        seconds = time.perf_counter() - begin
        wrong = [(a, g, grades[i].reason) for i, (a, g, same) in enumerate(cases)
                 if grades[i].reason != ("correct" if same else "wrong")]
        bad += len(wrong)
        print(json.dumps({"bench": "grading", "figure": "typical", "answers": args.count, "workers": args.workers,
                          "a_second": round(args.count / seconds), "math_verify_a_second": round(sum(asked) / seconds),
                          "share_for_math_verify": round(sum(asked) / args.count, 2), "graded_otherwise": len(wrong),
                          "examples": wrong[:5]}), flush=True)
        if args.hostile:
            before = descriptors(os.getpid()), descriptors(grader._server.process.pid)
            texts = [(f"{h}{'+' * (k > 0)}{k or ''}") for k in range(5) for h in hostile()][:args.hostile]
            begin = time.perf_counter()
            for i, answer in enumerate(texts):
                grader.submit(("hostile", i), box(answer), "7+x", True)
            found = [g.reason for g in grader.results().values()]
            after = descriptors(os.getpid()), descriptors(grader._server.process.pid)
            passed = sum(r not in ("timeout", "unparsed", "wrong") for r in found)
            grader.submit("after", box("x+7"), "7+x", True)
            alive = grader.results()["after"].reason == "correct"
            bad += passed + (not alive)
            print(json.dumps({"bench": "grading", "figure": "hostile", "answers": len(texts),
                              "seconds": round(time.perf_counter() - begin, 1), "passed": passed, "grades_on": alive,
                              **{r: found.count(r) for r in ("timeout", "unparsed", "wrong")},
                              "descriptors_before": before, "descriptors_after": after}), flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
