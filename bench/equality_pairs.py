r"""Synthetic pairs of an answer and a gold answer, by category. A pair also says whether the two are equal.

Most pairs come from the templates in equality_pairs.txt. A template has a name, random variables, gold
answers, other ways to write them (`right`), and answers that are nearly right (`wrong`):

    powers: a, b = r.choice([2, 3, 5]), r.randint(20, 60)
      gold  «a»^{«b»}
      right «a»**«b» | «a»^{«b - 1»}\cdot «a»
      wrong «a»^{«b + 1»} | «a»«b»

«EXPRESSION» stands for the value of a Python expression, and | separates answers. grading/answers.py has the
rules of equality."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    category: str
    answer: str
    gold: str
    same: bool
    unseen: bool  # held out: nobody looks at this pair while improving the grader


def pairs(draws: int = 4, seed: int = 0) -> list[Pair]:
    """Returns the pairs of `drawn` and `varied`, without repetitions. `drawn` fills each template `draws`
    times."""
    found = {}
    for name, answer, gold, same in (*drawn(draws, seed), *varied(seed)):
        found[answer, gold] = name, same
    return [Pair(name, answer, gold, same, unseen(gold)) for (answer, gold), (name, same) in found.items()]


def unseen(gold: str) -> bool:
    """Returns whether the pairs of this gold answer are held out. A hash chooses a third of all gold answers,
    so the choice never changes."""
    return hashlib.sha256(gold.encode()).digest()[0] % 3 == 0


# --- the templates

LENGTHS = [("cm", "centimeters", "m", "inches"), ("m", "meters", "feet", "km"),
           ("km", "kilometers", "miles", "m"), ("ft", "feet", "m", "yards"), ("mm", "millimeters", "cm", "m"),
           ("kg", "kilograms", "g", "pounds"), ("miles", "miles", "km", "hours"),
           ("hours", "hours", "minutes", "days"), ("seconds", "seconds", "minutes", "m"),
           ("days", "days", "weeks", "hours"), ("minutes", "min", "hours", "seconds"),
           ("inches", "inches", "cm", "feet")]
THINGS = ["pizzas", "apples", "students", "ways", "coins", "marbles", "square units", "dogs", "people"]
WORDS = ["Tuesday", "Evelyn", "ellipse", "parabola", "hyperbola", "odd", "isosceles", "Alice", "increasing",
         "east", "north", "circle", "Yes", "even", "Friday"]


def fill(template: str, values: dict) -> str:
    """Returns the template with each expression in «» replaced by its value."""
    def value(match):
        expression, form = re.fullmatch(r"(.*?)(?::([<>,.\dbf]*))?", match[1]).groups()
        return format(eval(expression, values), form or "")

    return re.sub("«(.*?)»", value, template)


def drawn(draws: int, seed: int) -> Iterator[tuple[str, str, str, bool]]:
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    for category in text.strip().split("\n\n"):
        head, *lists = re.split(r"\n  (?:gold |right|wrong) ", category)
        name, _, statements = head.partition(": ")
        golds, right, wrong = (re.split(r" \|\s+", templates) for templates in lists)
        r = random.Random(f"{seed} {name}")
        values = {"r": r, "LENGTHS": LENGTHS, "THINGS": THINGS, "WORDS": WORDS}
        for _ in range(draws):
            exec(statements, values)
            filled = [fill(template, values) for template in golds]
            gold = r.choice(filled) if len(filled) > 1 else filled[0]
            for same, templates in ((True, right), (False, wrong)):
                for template in templates:
                    yield name.replace("_", " "), fill(template, values), gold, same


# --- gold answers, and functions that turn them into right and wrong answers

GOLDS = r"""
numbers | 7 | -13 | 204 | 2048 | 1000000 | 3.75 | -0.125 | .5 | 120 | 025 | 6.02 \times 10^{23} | 10! |
    2^{100}-1
fractions | \frac{1}{2} | -\frac{25}{3} | \frac{243}{625} | \frac{2}{3}\pi | 5\frac{1}{3} | \dfrac{14}{3} |
    \frac{1}{2n+1}
radicals | \sqrt{5} | 3\sqrt{13} | \frac{\sqrt{3}}{2} | 2+\sqrt{3} | \sqrt[3]{4} | \frac{-1+\sqrt{5}}{2} |
    8\sqrt{2}-4 | \sqrt{2}+\sqrt{6}
constants | \pi | 12\pi | \frac{\pi}{6} | e^2 | \ln 2 | 1+\ln 3 | 36\pi-9\sqrt{3} | \log_2 3 |
    \frac{\pi^2}{6} | e^{-1} | 2\cos\frac{\pi}{7}
algebra | x^2-4x+3 | 2x+7 | (x-3)(x+5) | 6x^2y | \frac{x+2}{x-1} | a^2+b^2 | n(n+1) | 3t-5 | -4x^4+x^3+x^2+x |
    \frac{n(n-1)}{2} | x^{-2}
equations | y=2x+1 | x=4 | y=-\frac{1}{2}x+3 | x^2+y^2=25 | f(x)=3x-2 | a_n=2n-1 | (x-1)^2+(y+2)^2=9
intervals | (2,5] | [0,1] | (-\infty,4) | [-2,\infty) | (-\infty,-1)\cup(3,\infty) | [1,2)\cup(2,5] | x\ge 7 |
    -3<x<8 | x\le -2 | (0,\frac{1}{2}]
points | (3,-4) | \left(\frac{3}{2},-2\right) | (1,2,3) | (\sqrt{2},5) | (-1,0,7) | (2,\frac{\pi}{3})
collections | \{1,3,5\} | 2,5 | -1, 4, 6 | \{-2,2\} | 1,2,3,6 | \frac{1}{2}, 3 | 3\text{ and }8 | 1\pm\sqrt{7}
matrices | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix} -5 \\ 7 \end{pmatrix} |
    \begin{pmatrix} 0 & -1 \\ 1 & 0 \end{pmatrix}
units | 5\text{ cm} | 48\text{ square units} | 60\text{ mph} | 12\pi\text{ cm}^3 | 3.5\text{ hours} |
    \$18.90 | \$32,\!500 | 45^\circ | 25\% | 14\text{ feet}
bases | 1011_2 | 2516_8 | 343_6 | 12_{7} | 4343_6
complex | 3+4i | -2i | 1-i\sqrt{3} | \frac{1}{2}+\frac{3}{2}i | 5-12i
texts | \text{Evelyn} | \text{even} | \text{Yes} | \text{east} | \text{Monday} | \text{no solution} |
    \text{circle} | \text{Navin} | \text{neither}
letters | A | \text{(C)} | \text{B} | D, E | \text{A, C, E}
ratios | 3:5 | 2:3:4 | 7:30
"""

RIGHT = [  # functions that rewrite an answer without changing what it means
    lambda t: t.replace(r"\frac", r"\dfrac"),
    lambda t: t.replace("(", r"\left(").replace(")", r"\right)") if "_" not in t else t,
    lambda t: t.replace("+", " + ").replace("=", " = "), lambda t: re.sub(r",(?=[^!}])", r",\\,", t),
    lambda t: re.sub(r"^(\d+)(?=\\)", r"\1 ", t),
    lambda t: t.replace(r"\pi", "π").replace(r"\infty", "∞").replace(r"\cup", "∪"),
    lambda t: t.replace(r"^\circ", "°").replace(r"\pm", "±"),
    lambda t: re.sub(r"\\sqrt\{(\d+)\}", r"√\1", t), lambda t: t.replace("-", "−"),
    lambda t: re.sub(r"\\frac\{(\d+)\}\{(\d+)\}$", r"\1/\2", t) if not re.match(r"\d\\", t) else t,
    lambda t: t.replace(r"\text", r"\textbf"), lambda t: t.replace(r"\text{ ", r"\ \mathrm{"),
    lambda t: re.sub(r"\\text\{ ([a-z ]+)\}$", r" \1", t),
    lambda t: t.replace(r"\{", r"\left\{").replace(r"\}", r"\right\}"),
    lambda t: re.sub(r"\^(\w)(?!\w)", r"^{\1}", t), lambda t: t.replace("pmatrix", "bmatrix"),
    lambda t: re.sub(r"_(\d)$", r"_{\1}", t), lambda t: re.sub(r"^-?[\d.]+$", r"\\mathbf{\g<0>}", t),
    lambda t: rf"\displaystyle {t}", lambda t: rf"{t}\,", lambda t: rf"{t}.",
    lambda t: rf"\boldsymbol{{{t}}}" if "text" not in t and "," not in t else t, lambda t: rf"${t}$",
    lambda t: rf"\({t}\)" if "$" not in t else t, lambda t: f"\n{t} "]


def _other_digit(t, r):
    """Returns `t` with another digit at a random place; None if `t` has no digit."""
    places = [m.start() for m in re.finditer(r"\d", t)]
    at = r.choice(places) if places else None
    return None if at is None else t[:at] + str((int(t[at]) + r.randint(1, 8)) % 9 + (at == 0)) + t[at + 1:]


WRONG = [
    _other_digit, _other_digit, _other_digit,
    lambda t, r: f"-{t}" if t[0] not in "-(\\[{" and t != "0" and "," not in t else None,
    lambda t, r: rf"{t}\text{{ or }}{r.randint(100, 200)}", lambda t, r: rf"\text{{not }}{t}",
    lambda t, r: f"{t} is wrong", lambda t, r: f"{t}+1" if "," not in t else None, lambda t, r: rf"\ne {t}",
    lambda t, r: f"{t}_9" if t[-1].isdigit() else None, lambda t, r: f"{t}, {r.randint(100, 200)}",
    lambda t, r: f"{t} {r.randint(100, 200)}",
    lambda t, r: rf"{t}\text{{ kg}}" if "text" in t and t[0].isdigit() else None,
    lambda t, r: t.replace("x", "z") if "x" in t and not re.search(r"ma|=|<|\\[lg]e", t) else None,
    lambda t, r: t.replace("[", "(") if "[" in t and "sqrt" not in t else None,
    lambda t, r: f"[{t[1:-1]}]" if re.fullmatch(r"\([^()a-z]*,[^()]*\)", t) and "infty" not in t else None,
    lambda t, r: t.replace("<", r"\le ") if "<" in t else None,
    lambda t, r: re.sub(r"^\((.*),(.*)\)$", r"(\2,\1)", t) if re.fullmatch(r"\([^,]*,[^,]*\)", t) else None,
    lambda t, r: t.replace(r"\sqrt", "") if r"\sqrt{" in t else None,
    lambda t, r: t.replace("_", "") if re.search(r"\d_", t) else None,
    lambda t, r: t.replace("i", "") if re.search(r"\di", t) else None, lambda t, r: t.replace(r"\%", ""),
    lambda t, r: re.sub(r",[^,]*$", r"\\}" * t.endswith("}"), t) if re.match(r"[^($[]*\d, ?-?\d", t) else "",
    lambda t, r: rf"\text{{{r.choice(['odd', 'Tom', 'north', 'No', 'Friday'])}}}" if "text" in t else None,
    lambda t, r: t.replace("+", "-", 1) if "+" in t else None, lambda t, r: f"{r.randint(2, 9)}{t}",
    lambda t, r: rf"\frac{{{t}}}{{2}}" if t != "0" and "," not in t and "=" not in t else None]


def varied(seed: int = 0) -> Iterator[tuple[str, str, str, bool]]:
    """Yields 6 right and up to 8 wrong answers for each of GOLDS."""
    for line in GOLDS.replace(" |\n    ", " | ").strip().splitlines():
        name, *golds = (part.strip() for part in line.split(" | "))
        for gold in golds:
            r = random.Random(f"{seed} {gold}")
            for _ in range(6):
                answer = gold
                for i in sorted(r.sample(range(len(RIGHT)), 5)):
                    answer = RIGHT[i](answer)
                yield f"any {name}", answer, gold, True
            wrong = [spoil(gold, r) for spoil in r.sample(WRONG, len(WRONG))]
            for answer in [w for w in wrong if w and w != gold][:8]:
                yield f"any {name}", answer, gold, False
