r"""Pairs of answer and gold answer by category, each with what the verdict should be. Made, not collected.

`pairs()` draws numbers from a seed, so it always returns the same pairs. A category is a function of a random
generator. It returns a gold answer, ways to write the same answer, and answers that are nearly right.

Choices that the labels state. Equal in value is equal, in whatever form: `\sqrt{242}` is `11\sqrt{2}`. But
where the gold answer is a plain number, a problem that is left to solve (`3+4`, `\binom{5}{2}`) is no answer.
A unit must agree with the gold answer's or be absent; no unit is converted. A percent is a hundredth.
A decimal counts if it is right to one part in a million. Words and letters are compared as text.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from typing import NamedTuple


class Pair(NamedTuple):
    category: str
    answer: str
    gold: str
    same: bool
    unseen: bool  # of the third that nobody looks at while working on the equality


def pairs(draws: int = 4, seed: int = 0) -> list[Pair]:
    """All pairs, without repetition. One gold answer in three is unseen, with everything paired with it."""
    found = {}
    for make in CATEGORIES:
        rng = random.Random(f"{seed} {make.__name__}")
        for _ in range(draws):
            gold, right, wrong = make(rng)
            for same, answers in ((True, right), (False, wrong)):
                for answer in answers:
                    found[answer, gold] = make.__name__.replace("_", " "), same
    found |= {(answer, gold): (name, same) for name, answer, gold, same in varied(seed)}
    return [Pair(name, answer, gold, same, hashlib.sha256(gold.encode()).digest()[0] % 3 == 0)
            for (answer, gold), (name, same) in found.items()]


def integers(r):
    n = r.randint(12, 999)
    return (str(n),
            [f"{n}.", f"{n}.0", f"+{n}", rf"\boldsymbol{{{n}}}", rf"\mathbf{{{n}}}", rf"\text{{{n}}}",
             f"${n}$", rf"\({n}\)", f"x = {n}", rf"n={n}", rf"\displaystyle {n}", f"0{n}", rf"\,{n}",
             f"{{{n}}}", f" {n}\\ ", rf"f(3)={n}", rf"\frac{{{2 * n}}}{{2}}", rf"\text{{Answer}}={n}"],
            [str(n + 1), f"-{n}", f"{n}0", f"{n}.5", f"{n - 1} 1", f"{n}_8", f"< {n}", rf"\neq {n}",
             rf"\ge {n}", rf"{n}\text{{ or }}{n + 1}", rf"{n}\text{{ is wrong, it is }}{n + 1}",
             f"{n - 1}={n}", f"{n}x", rf"\text{{not }}{n}", f"{n},{n + 1}", f"{n}abc", rf"{n}\%", f"{n}!",
             rf"\{{{n},{n + 2}\}}", f"{n}i", rf"{n} \text{{ or {n + 3}}}", f"x > {n}",
             f"{str(n)[0]} {str(n)[1:]}", f"about {n}", rf"{n}\pi"])


def thousands(r):
    n = r.randint(1, 99) * 1000 + r.randint(10, 999)
    head, tail = f"{n // 1000}", f"{n % 1000:03}"
    return (r.choice([str(n), f"{n:,}"]),
            [str(n), f"{n:,}", rf"{head}\,{tail}", rf"{head}{{,}}{tail}", rf"{head},\!{tail}",
             f"{head}~{tail}", rf"{head}\ {tail}", f"{n:,}.", f"{n:,}.00", rf"\${n:,}", f"{n:,} dollars",
             rf"{head}\;{tail}", f"{head}\u2009{tail}", rf"x={n:,}"],
            [rf"{head}\,{int(tail) + 1:03}", f"{head}.{tail}1", f"{n + 1:,}", str(int(head) + int(tail)),
             f"{head},{int(tail)},{int(tail)}", f"{head} + {tail}", f"-{n:,}", rf"{head}\cdot {tail}"])


def decimals(r):
    n, k = r.randint(1, 99), r.choice([25, 75, 125, 375, 625])
    d = f"{n}.{k}"
    return (d,
            [f"{d}0", f"{d}.", f"+{d}", rf"\frac{{{n * 1000 + int(f'{k:0<3}')}}}{{1000}}",
             rf"{d}\text{{ cm}}", f"x={d}", rf"\approx {d}", rf"\${d}", f"{d} meters", f"${d}$"],
            [f"{n}.{k + 1}", f"{n}", f"-{d}", f"{n},{k}", f"{n + 1}.{k}", f"{d}\\%", f"{n}.0{k}", f"{n} {k}",
             f"< {d}", f"{n}{k}", rf"{n}\cdot{k}"])


def leading_dots(r):
    k = r.randint(11, 97)
    return (f"0.{k}",
            [f".{k}", f"0.{k}0", rf"\frac{{{k}}}{{100}}", rf"{k}\%", f"{k}/100", f"{k}%"],
            [f"0.0{k}", f"{k}", f"0.{k + 1}", f"-.{k}", rf"0.{k}\%"])


def fractions(r):
    b = r.choice([7, 9, 11, 13, 17])
    a = r.randint(2, b - 1)
    return (rf"\frac{{{a}}}{{{b}}}",
            [f"{a}/{b}", rf"\dfrac{{{a}}}{{{b}}}", rf"\tfrac{{{a}}}{{{b}}}", rf"\frac{{{3 * a}}}{{{3 * b}}}",
             rf"\frac{{{a}}}{{{b}}}.", rf"\frac{{-{a}}}{{-{b}}}", rf"\left(\frac{{{a}}}{{{b}}}\right)",
             f"{a} / {b}", rf"\cfrac{{{a}}}{{{b}}}", f"({a}/{b})", f"{a / b:.9f}", rf"x=\frac{{{a}}}{{{b}}}",
             f"{a}\u2044{b}", rf"\frac{{ {a} }}{{ {b} }}", rf"{{{a} \over {b}}}",
             rf"P(A)=\dfrac{{{a}}}{{{b}}}", f"{a}\\div {b}"],
            [rf"\frac{{{b}}}{{{a}}}", rf"-\frac{{{a}}}{{{b}}}", rf"\frac{{{a + 1}}}{{{b}}}", f"{a / b:.3f}",
             rf"\frac{{{a}}}{{{b + 1}}}", f"{a},{b}", f"{a / b:.4f}", rf"{a}\frac{{{a}}}{{{b}}}",
             rf"1-\frac{{{a}}}{{{b}}}", rf"\frac{{{a}}}{{{b}}}\pi", f"({a},{b})", f"{a}{b}"])


def negative_fractions(r):
    b = r.choice([5, 7, 9])
    a = r.randint(1, b - 1)
    return (rf"-\frac{{{a}}}{{{b}}}",
            [f"-{a}/{b}", rf"\frac{{-{a}}}{{{b}}}", rf"\frac{{{a}}}{{-{b}}}", f"\u2212{a}/{b}",
             rf"-\frac{a}{b}", rf"-\dfrac {a}{b}", rf"-\frac{a}{{{b}}}", f"({-a})/{b}",
             rf"- \frac{{{a}}}{{{b}}}"],
            [f"{a}/{b}", rf"\frac{a}{b}", rf"\frac{{-{a}}}{{-{b}}}", f"-{b}/{a}", rf"-{a}\frac{{1}}{{{b}}}"])


def mixed_numbers(r):
    n, b = r.randint(2, 9), r.choice([3, 5, 7])
    a = r.randint(1, b - 1)
    whole = n * b + a
    return (r.choice([rf"{n}\frac{{{a}}}{{{b}}}", rf"\frac{{{whole}}}{{{b}}}"]),
            [rf"{n}\frac{{{a}}}{{{b}}}", rf"{n}\dfrac{{{a}}}{{{b}}}", rf"{n} \frac{a}{b}", f"{n} {a}/{b}",
             f"{whole}/{b}", rf"\frac{{{whole}}}{{{b}}}", rf"{n}\frac{{{a}}}{{{b}}}.",
             rf"{n}\,\frac{{{a}}}{{{b}}}", rf"{n}\tfrac{a}{b}", rf"{n}\ \frac{{{a}}}{{{b}}}\text{{ hours}}"],
            [rf"\frac{{{n * 10 + a}}}{{{b}}}", rf"\frac{{{n * a}}}{{{b}}}", rf"-{n}\frac{{{a}}}{{{b}}}",
             f"{n}{a}/{b}", rf"{n}-\frac{{{a}}}{{{b}}}", rf"{n}\cdot\frac{{{a}}}{{{b}}}",
             rf"{n + 1}\frac{{{a}}}{{{b}}}", rf"{n},\frac{{{a}}}{{{b}}}"])


def vulgar_fractions(r):
    n = r.randint(2, 30)
    mark, a, b = r.choice([("½", 1, 2), ("¼", 1, 4), ("¾", 3, 4), ("⅓", 1, 3), ("⅔", 2, 3), ("⅛", 1, 8)])
    return (rf"\frac{{{n * b + a}}}{{{b}}}",
            [f"{n}{mark}", f"{n} {mark}", f"{n}{mark}."],
            [mark, f"{n + 1}{mark}", f"{n}-{mark}", f"{n}×{mark}"])


def repeating_decimals(r):
    k = r.choice([1, 2, 4, 5, 7, 8])
    return (rf"\frac{{{k}}}{{9}}",
            [rf"0.\overline{{{k}}}", rf"0.\bar{{{k}}}", rf"0.\overline{k}", f"0.{str(k) * 8}",
             rf".\overline{{{k}}}", rf"0.{k}\overline{{{k}}}", rf"0.\dot{{{k}}}"],
            [f"0.{k}", rf"0.0\overline{{{k}}}", rf"0.\overline{{{k}0}}", f"0.{k}{k}", f"0.{k}{k}{k}",
             rf"{k}.\overline{{{k}}}"])


def repeating_golds(r):
    a, k = r.randint(1, 9), r.randint(12, 89)
    return (rf"{a}.\overline{{{k}}}",
            [rf"\frac{{{a * 99 + k}}}{{99}}", rf"{a}.{k}\overline{{{k}}}", f"{a + k / 99:.9f}"],
            [f"{a}.{k}", rf"{a}.{k // 10}\overline{{{k % 10}}}", rf"0.\overline{{{a}{k}}}", f"{a}.{k}{k}"])


def scientific(r):
    m, e = r.randint(11, 99), r.randint(3, 8)
    d = f"{m // 10}.{m % 10}"
    value = m * 10 ** (e - 1)
    return (rf"{d} \times 10^{{{e}}}",
            [rf"{d}\times10^{e}", rf"{d} \cdot 10^{{{e}}}", f"{d}e{e}", f"{d}E+{e}", str(value), f"{value:,}",
             f"{d}×10^{e}", rf"{d}\,\times\,10^{{{e}}}", f"{d} * 10^{e}", rf"{m}\times 10^{{{e - 1}}}",
             rf"{d}\times 10^{{{e}}}."],
            [rf"{d}\times 10^{{{e + 1}}}", rf"{d}\times 10^{{-{e}}}", f"{d}e-{e}", rf"{d}+10^{{{e}}}", d,
             rf"{d}\times {e}^{{10}}", rf"{d}\times 10 {e}", rf"{d}1\times 10^{{{e}}}"])


def tiny_numbers(r):
    m, e = r.randint(2, 9), r.randint(6, 9)
    return (rf"{m}\times 10^{{-{e}}}",
            [f"{m}e-{e}", f"0.{'0' * (e - 1)}{m}", rf"{m}\cdot 10^{{-{e}}}"],
            [f"{m}e{e}", f"0.{'0' * e}{m}", "0", f"0.{'0' * (e - 1)}{m - 1}", f"0.{'0' * (e - 1)}{m}1",
             f"0.{'0' * (e + 1)}"])


def rounding(r):
    b, a = r.choice([7, 13, 17, 19]), r.randint(100, 999) * 1000 + 1
    value = a / b
    return (rf"\frac{{{a}}}{{{b}}}",
            [f"{value:.3f}", f"{value:.6f}", f"{value:.9f}", f"{value:,.4f}"],
            [f"{value:.0f}", f"{value * 1.00001:.6f}", f"{value * 0.9999:.4f}", f"{value + 1:.6f}"])


def radicals(r):
    a, b = r.randint(2, 12), r.choice([2, 3, 5, 6, 7, 10, 13])
    value = a * b ** 0.5
    return (rf"{a}\sqrt{{{b}}}",
            [rf"{a} \sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}", f"{a}√{b}", f"{a}*sqrt({b})",
             rf"{a}\cdot\sqrt{{{b}}}", rf"{a}\sqrt {b}" if b < 10 else rf"{a}\sqrt {{{b}}}",
             rf"{a}\sqrt{{{b}}}.", rf"{a}\,\sqrt{{{b}}}", f"{value:.9f}", f"{a} * √{b}", f"{a}√({b})",
             rf"\sqrt{{{b}}}\cdot {a}", rf"{a}\sqrt{{{b}}}\text{{ cm}}", rf"{a}\cdot {b}^{{1/2}}",
             rf"\frac{{{a * b}}}{{\sqrt{{{b}}}}}", f"{a}sqrt({b})"],
            [rf"{b}\sqrt{{{a}}}" if a != b else "2", rf"{a}\sqrt{{{b + 1}}}",
             rf"\sqrt{{{a * b}}}" if a > 1 else "1", rf"{a + 1}\sqrt{{{b}}}", rf"-{a}\sqrt{{{b}}}",
             f"{value:.2f}", rf"{a}+\sqrt{{{b}}}", rf"{a}\sqrt[3]{{{b}}}", rf"\pm {a}\sqrt{{{b}}}",
             f"{value * 1.0001:.4f}", f"{a * b}", rf"< {a}\sqrt{{{b}}}"])


def surd_sums(r):
    a, b, c = r.randint(2, 30), r.choice([2, 3, 5, 7]), r.randint(2, 9)
    return (rf"{a}+{c}\sqrt{{{b}}}",
            [rf"{c}\sqrt{{{b}}}+{a}", rf"{a} + {c}\sqrt {b}", f"{a}+{c}√{b}", f"{a} + {c}*sqrt({b})",
             rf"\left({a}+{c}\sqrt{{{b}}}\right)", rf"{a}+\sqrt{{{c * c * b}}}", rf"x={a}+{c}\sqrt{{{b}}}",
             rf"{a}~+~{c}\sqrt{{{b}}}\text{{ units}}", f"{a + c * b ** 0.5:.9f}", rf"({a}+{c}\sqrt{{{b}}})."],
            [rf"{a}-{c}\sqrt{{{b}}}", rf"{a + c}\sqrt{{{b}}}", rf"{c}+{a}\sqrt{{{b}}}" if a != c else "1",
             rf"{a}\pm{c}\sqrt{{{b}}}", rf"{a}+{c}\sqrt{{{b + 1}}}", f"{a + c * b ** 0.5:.2f}",
             rf"{a},{c}\sqrt{{{b}}}"])


def plus_or_minus(r):
    a, b = r.randint(2, 30), r.choice([2, 3, 5, 7])
    return (rf"{a}\pm\sqrt{{{b}}}",
            [rf"{a}+\sqrt{{{b}}}, {a}-\sqrt{{{b}}}", rf"{a} \pm \sqrt{b}", f"{a}±√{b}",
             rf"x={a}\pm\sqrt{{{b}}}", rf"{a}-\sqrt{{{b}}}\text{{ and }}{a}+\sqrt{{{b}}}"],
            [rf"{a}+\sqrt{{{b}}}", rf"{a}-\sqrt{{{b}}}", rf"{a + 1}\pm\sqrt{{{b}}}", rf"-{a}\pm\sqrt{{{b}}}",
             rf"{a}\pm\sqrt{{{b + 1}}}"])


def multiples_of_pi(r):
    a, b = r.choice([3, 5, 7, 11]), r.choice([2, 4, 6, 8])
    return (rf"\frac{{{a}\pi}}{{{b}}}",
            [rf"\frac{{{a}}}{{{b}}}\pi", rf"{a}\pi/{b}", rf"\dfrac{{{a}\pi}}{{{b}}}", f"{a}π/{b}",
             f"{a}*pi/{b}", rf"{a / b}\pi", rf"\frac{{{a} \pi}}{{{b}}}.", rf"\frac{{\pi\cdot {a}}}{{{b}}}",
             f"{a}pi/{b}", rf"\frac{{{a}\,\pi}}{{{b}}}\text{{ radians}}", f"{a / b * 3.141592653589793:.9f}"],
            [rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{b}\pi}}{{{a}}}", rf"-\frac{{{a}\pi}}{{{b}}}",
             f"{a * 3.14 / b:.2f}", rf"\frac{{{a + 1}\pi}}{{{b}}}", rf"\frac{{{a}\pi}}{{{b}}}+2k\pi",
             rf"\frac{{{a}\pi^2}}{{{b}}}", rf"{a}+\frac{{\pi}}{{{b}}}"])


def logs_and_powers(r):
    a, b = r.choice([3, 5, 7]), r.randint(2, 9)
    return (rf"{b}\ln {a}",
            [rf"{b}\ln({a})", rf"\ln {a ** b}", rf"{b} \ln{{{a}}}", rf"{b}\,\ln {a}", f"{b}ln({a})",
             rf"{b}\ln {a}."],
            [rf"{a}\ln {b}" if a != b else "1", rf"\ln {a * b}" if a * b != a ** b else "1", rf"{b}+\ln {a}",
             rf"{b}\ln {a + 1}", rf"-{b}\ln {a}", rf"{b}\log_{{10}} {a}"])


def exponentials(r):
    a, b = r.randint(2, 9), r.randint(2, 9)
    return (rf"{a}e^{{{b}}}",
            [rf"{a} e^{b}", rf"{a}\cdot e^{{{b}}}", rf"e^{{{b}}}\cdot {a}", rf"{a}\mathrm{{e}}^{{{b}}}"],
            [rf"e^{{{a * b}}}", rf"{a}e^{{-{b}}}", rf"{a}e^{{{b + 1}}}", rf"{a}+e^{{{b}}}", rf"{a}^{{{b}}}",
             rf"{a}e{b}"])


def powers(r):
    a, b = r.choice([2, 3, 5]), r.randint(20, 60)
    return (rf"{a}^{{{b}}}",
            [rf"{a}^{{{b}}}.", f"{a}**{b}", rf"{a}^{{{b - 1}}}\cdot {a}", f"{a}^({b})", f"${a}^{{{b}}}$"],
            [rf"{a}^{{{b + 1}}}", f"{a}{b}", f"{a * b}", rf"{b}^{{{a}}}", rf"{a}^{{-{b}}}", rf"{a}_{{{b}}}",
             rf"{a}^{{{b}}}-1", rf"{a}\cdot{b}"])


def trigonometry(r):
    a = r.randint(2, 9)
    return (rf"{a}\sin x",
            [rf"{a}\sin(x)", rf"{a} \sin{{x}}", rf"{a}\,\sin\left(x\right)", f"{a}sin(x)", f"{a}*sin(x)"],
            [rf"{a}\cos x", rf"\sin {a}x", rf"{a}\sin^2 x", rf"-{a}\sin x", rf"{a}\sin y", rf"{a + 1}\sin x"])


def polynomials(r):
    a, b = r.randint(2, 9), r.randint(10, 30)
    return (rf"x^2+{a + b}x+{a * b}",
            [rf"(x+{a})(x+{b})", rf"{a * b}+{a + b}x+x^2", rf"x^{{2}} + {a + b} x + {a * b}",
             f"x²+{a + b}x+{a * b}", f"x^2+{a + b}*x+{a * b}", rf"\left(x+{b}\right)\left(x+{a}\right)",
             rf"x^2+{a + b}x+{a * b}.", rf"f(x)=x^2+{a + b}x+{a * b}", rf"y = x^2+{a + b}x+{a * b}",
             rf"x(x+{a + b})+{a * b}", rf"\big(x+{a}\big)\big(x+{b}\big)", f"x**2 + {a + b}x + {a * b}"],
            [rf"x^2-{a + b}x+{a * b}", rf"(x+{a})(x-{b})", rf"x^2+{a + b}x+{a * b + 1}",
             rf"x^3+{a + b}x+{a * b}", rf"x^2+{a + b}x", rf"t^2+{a + b}t+{a * b}", rf"x^2+{a + b}x+{a * b}=0",
             rf"x_2+{a + b}x+{a * b}", rf"x^2+{a + b}x>{a * b}", rf"2x+{a + b}x+{a * b}"])


def letter_terms(r):
    a, b = r.randint(2, 9), r.choice("abkmnpt")
    c = r.choice("uvwyz")
    return (f"{a}{b}{c}",
            [f"{a}{c}{b}", f"{a} {b} {c}", rf"{a}\cdot {b}\cdot {c}", f"{a}*{b}*{c}", rf"{a}\,{b}{c}"],
            [f"{a}{b}", f"{a}", f"{a}{b}^{c}", f"{a}{b}_{c}", f"{a + 1}{b}{c}", f"{a}{b.upper()}{c}",
             f"{a}+{b}{c}"])


def one_variable_term(r):
    a, v = r.randint(2, 40), r.choice("abcdghlmst")
    return (f"{a}{v}",
            [f"{a} {v}", rf"{a}\cdot {v}", f"{v}*{a}", f"{a}{v}.", f"${a}{v}$"],
            [f"{a}", f"{a}{v.upper()}", f"{a + 1}{v}", f"{v}", f"{a}{v}^2", f"{a}+{v}"])


def rational_functions(r):
    a, b = r.randint(2, 9), r.randint(10, 19)
    return (rf"\frac{{x+{a}}}{{x-{b}}}",
            [f"(x+{a})/(x-{b})", rf"\dfrac{{x+{a}}}{{x-{b}}}", rf"\frac{{-x-{a}}}{{{b}-x}}",
             rf"1+\frac{{{a + b}}}{{x-{b}}}", rf"\frac{{{a}+x}}{{x-{b}}}."],
            [rf"\frac{{x-{a}}}{{x-{b}}}", rf"\frac{{x-{b}}}{{x+{a}}}", f"x+{a}/x-{b}",
             rf"\frac{{x+{a}}}{{x+{b}}}"])


def equations(r):
    a, b = r.randint(2, 9), r.randint(2, 30)
    return (f"y={a}x+{b}",
            [f"y = {a}x + {b}", f"y={b}+{a}x", rf"{a}x+{b}", f"{a}x-y+{b}=0", f"y-{b}={a}x", f"$y={a}x+{b}$",
             f"y={a}x+{b}.", rf"y\,=\,{a}x+{b}", f"{a}x+{b}=y"],
            [f"y={b}x+{a}" if a != b else "y=x", f"y={a}x-{b}", f"x={a}y+{b}", f"y=-{a}x+{b}", f"y>{a}x+{b}",
             f"y={a}x", f"y={a + 1}x+{b}", f"z={a}x+{b}", rf"y\ne {a}x+{b}"])


def assignments(r):
    n, v = r.randint(3, 99), r.choice("xyznkm")
    return (f"{v}={n}",
            [str(n), f"{v} = {n}", f"{v}={n}.", rf"{v}\,=\,{n}", f"{n}.0", rf"{v}=\boldsymbol{{{n}}}"],
            [f"{v}={n + 1}", f"w={n}", f"{v}=-{n}", rf"{v}\ne {n}", f"{v}>{n}", rf"{v}\le {n}", f"{n}{v}", v,
             f"{n - 1}={n}"])


def open_rays(r):
    n, v = r.randint(1, 99), r.choice("xyt")
    return (r.choice([rf"({n},\infty)", rf"{v}>{n}"]),
            [rf"({n}, \infty)", f"{v} > {n}", f"{n}<{v}", rf"\left({n},\infty\right)",
             rf"{v} \in ({n},\infty)", rf"({n},+\infty)", f"({n},∞)", f"({n}, infinity)",
             rf"\{{{v} \mid {v} > {n}\}}", rf"{v}\gt {n}", f"{v}>{n}."],
            [rf"[{n},\infty)", rf"(-\infty,{n})", f"{v}<{n}", rf"{v}\ge {n}", rf"({n + 1},\infty)",
             rf"(-{n},\infty)", str(n), f"{v}={n}", f"> {n + 1}", rf"{v}\neq {n}", rf"[{n},\infty]"])


def closed_rays(r):
    n = r.randint(1, 99)
    return (r.choice([rf"(-\infty,{n}]", rf"x\le {n}", rf"x \leq {n}"]),
            [rf"(-\infty, {n}]", rf"x\leqslant {n}", f"x ≤ {n}", rf"{n}\ge x", f"x <= {n}",
             rf"\left(-\infty,{n}\right]", rf"x\in(-\infty,{n}]", f"(-∞,{n}]", rf"\{{x: x\le {n}\}}",
             rf"(-\infty,{n}]."],
            [rf"(-\infty,{n})", f"x<{n}", rf"x\ge {n}", rf"[{n},\infty)", rf"(-\infty,-{n}]",
             rf"x\le {n + 1}", f"x={n}"])


def intervals(r):
    a = r.randint(-20, 20)
    b = a + r.randint(1, 30)
    return (r.choice([f"[{a},{b})", rf"{a}\le x<{b}", rf"\left[{a}, {b}\right)"]),
            [f"[{a}, {b})", rf"{a} \leq x < {b}", rf"{b}>x\ge {a}", rf"x\in[{a},{b})",
             rf"\left[{a},{b}\right)", f"{a} ≤ x < {b}", rf"\big[{a},{b}\big)", rf"\{{x \mid {a}\le x<{b}\}}",
             rf"[{a},\,{b})", rf"[\,{a},{b}\,)."],
            [f"[{a},{b}]", f"({a},{b})", f"({a},{b}]", f"[{a},{b + 1})", f"{a},{b}", rf"\{{{a},{b}\}}",
             rf"{a}<x<{b}", f"[{b},{a})", rf"x\ge {a}", f"x<{b}"])


def unions(r):
    a = r.randint(-20, 20)
    b = a + r.randint(1, 30)
    return (r.choice([rf"(-\infty,{a})\cup({b},\infty)", rf"x<{a}\text{{ or }}x>{b}"]),
            [rf"(-\infty, {a}) \cup ({b}, \infty)", rf"({b},\infty)\cup(-\infty,{a})", f"(-∞,{a})∪({b},∞)",
             f"x<{a} or x>{b}", rf"\left(-\infty,{a}\right)\cup\left({b},\infty\right)",
             rf"x\in(-\infty,{a})\cup({b},\infty)", rf"x>{b}\text{{ or }}x<{a}",
             rf"(-\infty,{a})\,\cup\,({b},+\infty)."],
            [rf"(-\infty,{a}]\cup[{b},\infty)", rf"(-\infty,{a})", rf"({a},{b})",
             rf"(-\infty,{a})\cap({b},\infty)", rf"(-\infty,{b})\cup({a},\infty)", f"{a}<x<{b}",
             rf"(-\infty,{a})\cup({b + 1},\infty)", f"x>{b}", rf"(-\infty,{a})\cup[{b},\infty)",
             f"x<{a} or x>={b}"])


def points(r):
    a, b = r.randint(-20, 20), r.randint(21, 60)
    return (f"({a},{b})",
            [f"({a}, {b})", rf"\left({a},{b}\right)", f"({a},{b}).", f"(x,y)=({a},{b})", rf"({a},\,{b})",
             f"({a}.0,{b})", rf"\big({a},{b}\big)", rf"\left( {a}, \; {b} \right)", f"${(a, b)}$",
             rf"\left(\frac{{{2 * a}}}{{2}},{b}\right)", rf"(x, y) = \left({a}, {b}\right)"],
            [f"({b},{a})", f"({a},{b + 1})", f"(-{b},{a})", f"[{a},{b}]", f"({a}{b})" if a > 0 else "(1)",
             f"({a},{b},0)", rf"\{{{a},{b}\}}", str(a), f"({a},-{b})", f"({a},{b}]", f"({a}.{b})", f"{a}"])


def triples(r):
    a, b, c = r.sample(range(-30, 31), 3)
    return (f"({a},{b},{c})",
            [f"({a}, {b}, {c})", rf"\left({a},{b},{c}\right)", rf"({a},~{b},~{c})", f"(a,b,c)=({a},{b},{c})",
             f"({a},{b},{c})."],
            [f"({b},{a},{c})", f"({a},{b})", f"({a},{b},{c + 1})", f"({a},{c},{b})", rf"\{{{a},{b},{c}\}}",
             f"({c},{b},{a})"])


def sets(r):
    a, b, c = r.sample(range(1, 90), 3)
    return (rf"\{{{a},{b},{c}\}}",
            [rf"\{{{b}, {a}, {c}\}}", rf"\left\{{{c},{b},{a}\right\}}", rf"\lbrace {a}, {b}, {c} \rbrace",
             rf"\{{{a},{b},{c}\}}.", f"{a}, {b}, {c}", rf"\{{{a};{b};{c}\}}", rf"S=\{{{a},{b},{c}\}}"],
            [rf"\{{{a},{b}\}}", f"({a},{b},{c})", rf"\{{{a},{b},{c + 1}\}}", rf"\{{{a},{b},{c},0\}}", f"{a}",
             f"[{a},{b},{c}]", rf"\{{{a + b},{c}\}}"])


def lists(r):
    a, b, c = r.sample(range(2, 90), 3)
    return (r.choice([f"{a}, {b}, {c}", f"{a},{b},{c}"]),
            [f"{a},{b},{c}", f"{c}, {a}, {b}", rf"{a},\ {b},\ {c}", rf"{a}, {b}\text{{ and }}{c}",
             f"{a}, {b}, and {c}", rf"x={a},{b},{c}", rf"{a}; {b}; {c}", rf"\{{{a},{b},{c}\}}",
             f"{a}, {b}, {c}.", rf"x={a}, x={b}, x={c}", rf"{a}\text{{ or }}{b}\text{{ or }}{c}",
             rf"{a},\,{b},\,{c}"],
            [f"{a}, {b}", f"{a}, {b}, {c + 1}", f"{a}", f"{a}{b}{c}", f"{a + b}, {c}", f"({a},{b},{c})",
             f"{a}, {b}, {c}, {a + c}", rf"{a}, {b}\text{{ or not }}{c}", f"{a} {b} {c}", f"-{a}, {b}, {c}",
             f"{a}, {a}, {b}"])


def two_solutions(r):
    a, b = r.sample(range(2, 60), 2)
    return (rf"{a}\text{{ or }}{b}",
            [f"{a}, {b}", f"{b} or {a}", rf"{b}\text{{ and }}{a}", f"{a} or {b}.",
             rf"x={a}\text{{ or }}x={b}", rf"\{{{a},{b}\}}"],
            [str(a), str(b), f"{a}, {b + 1}", f"{a} or not {b}", f"{a + b}", f"({a},{b})", f"{a}/{b}",
             f"{a} {b}"])


def plus_minus_integers(r):
    a = r.randint(2, 60)
    return (rf"\pm {a}",
            [rf"\pm{a}", f"{a}, -{a}", f"-{a}, {a}", f"±{a}", rf"x=\pm {a}", rf"{a}\text{{ and }}-{a}",
             rf"\{{-{a},{a}\}}"],
            [str(a), f"-{a}", rf"\pm {a + 1}", f"({a},-{a})", f"{a}, {-a - 1}"])


def vectors(r):
    a, b, c = r.sample(range(-9, 20), 3)
    m = rf"\begin{{pmatrix}} {a} \\ {b} \\ {c} \end{{pmatrix}}"
    return (m,
            [rf"\begin{{pmatrix}}{a}\\{b}\\{c}\end{{pmatrix}}",
             rf"\begin{{bmatrix}}{a}\\{b}\\{c}\end{{bmatrix}}", m + ".",
             rf"\left(\begin{{matrix}}{a}\\{b}\\{c}\end{{matrix}}\right)", rf"\mathbf{{v}}={m}",
             rf"\begin{{pmatrix}} {a}.0 \\ {b} \\ {c} \end{{pmatrix}}"],
            [rf"\begin{{pmatrix}} {b} \\ {a} \\ {c} \end{{pmatrix}}",
             rf"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}",
             rf"\begin{{pmatrix}} {a} \\ {b} \\ {c + 1} \end{{pmatrix}}", rf"-{m}", f"{a},{b},{c}", rf"2{m}"])


def matrices(r):
    a, b, c, d = r.sample(range(-9, 20), 4)
    return (rf"\begin{{pmatrix}} {a} & {b} \\ {c} & {d} \end{{pmatrix}}",
            [rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d}\end{{pmatrix}}",
             rf"\begin{{bmatrix}}{a}&{b}\\{c}&{d}\end{{bmatrix}}",
             rf"\begin{{pmatrix}} {a} & {b} \\ {c} & {d} \\ \end{{pmatrix}}",
             rf"A=\begin{{pmatrix}}{a}&{b}\\{c}&{d}\end{{pmatrix}}",
             rf"\begin{{pmatrix}} {a} & \frac{{{2 * b}}}{{2}} \\ {c} & {d} \end{{pmatrix}}"],
            [rf"\begin{{pmatrix}} {a} & {c} \\ {b} & {d} \end{{pmatrix}}",
             rf"\begin{{pmatrix}} {a} & {b} \\ {c} & {d + 1} \end{{pmatrix}}",
             rf"\begin{{pmatrix}} {a} & {b} & {c} & {d} \end{{pmatrix}}",
             rf"\begin{{vmatrix}} {a} & {b} \\ {c} & {d} \end{{vmatrix}}",
             rf"\begin{{pmatrix}} {c} & {d} \\ {a} & {b} \end{{pmatrix}}"])


def percents(r):
    n = r.randint(2, 98)
    return (rf"{n}\%",
            [f"{n}%", rf"{n}\,\%", f"{n} percent", rf"{n}\text{{ percent}}", f"0.{n:02}",
             rf"\frac{{{n}}}{{100}}", rf"{n}\%.", rf"{n}.0\%", rf"${n}\%$", rf"x = {n}\%"],
            [str(n), rf"{n + 1}\%", rf"-{n}\%", f"{n}.{n}%", rf"{n}00\%", f"0.{n:02}%",
             rf"{n}\text{{ dollars}}", f"{n}^\\circ"])


def money(r):
    n, c = r.randint(2, 98), r.choice([25, 50, 75, 99])
    return (rf"\${n}.{c}",
            [f"{n}.{c}", f"${n}.{c}", rf"\$ {n}.{c}", f"{n}.{c} dollars", rf"{n}.{c}\text{{ dollars}}",
             rf"\${n}.{c}.", f"x={n}.{c}"],
            [rf"\${n}.{c - 1}", f"{n}.{c} cents", f"{n}.{c} euros", f"€{n}.{c}", rf"\${n}", f"{n}.{c}%",
             rf"-\${n}.{c}", rf"\${c}.{n}"])


def big_money(r):
    n, k = r.randint(2, 98), r.randint(100, 999)
    return (rf"\${n},{k}",
            [f"{n}{k}", f"{n},{k}", rf"\${n},{k}.00", f"${n},{k}", f"{n},{k} dollars", rf"\${n}{{,}}{k}",
             rf"\${n}\,{k}"],
            [rf"\${n},{k - 1}", rf"\${n}.{k}", rf"\${n}", f"{n},{k} cents", f"{n},{k} yen",
             rf"\${n},{k} million"])


LENGTHS = [("cm", "centimeters", "m", "inches"), ("m", "meters", "feet", "km"),
           ("km", "kilometers", "miles", "m"), ("ft", "feet", "m", "yards"), ("mm", "millimeters", "cm", "m"),
           ("kg", "kilograms", "g", "pounds"), ("miles", "miles", "km", "hours"),
           ("hours", "hours", "minutes", "days"), ("seconds", "seconds", "minutes", "m"),
           ("days", "days", "weeks", "hours"), ("minutes", "min", "hours", "seconds"),
           ("inches", "inches", "cm", "feet")]


def units(r):
    n, (unit, long, other, third) = r.randint(2, 300), r.choice(LENGTHS)
    return (rf"{n}\text{{ {unit}}}",
            [str(n), f"{n} {unit}", rf"{n}\text{{ {long}}}", f"{n} {long}", rf"{n}~\text{{{unit}}}",
             rf"{n}\,\text{{{unit}}}", rf"{n}\ \mathrm{{{unit}}}", rf"{n}\mbox{{ {unit}}}",
             rf"{n}\text{{ {unit}.}}", rf"{n}.0\text{{ {unit}}}", rf"x={n}\text{{ {unit}}}",
             rf"{n}\;\textrm{{{unit}}}"],
            [rf"{n}\text{{ {other}}}", f"{n} {third}", f"{n + 1}", rf"{n + 1}\text{{ {unit}}}",
             rf"{n}\text{{ {unit}}}^2", rf"-{n}\text{{ {unit}}}", rf"{n}\%", rf"\${n}",
             rf"{n}\text{{ {other}}}^2", rf"{n}\text{{ {unit} or }}{n + 5}\text{{ {unit}}}"])


THINGS = ["pizzas", "apples", "students", "ways", "coins", "marbles", "square units", "dogs", "people"]


def unit_in_the_answer(r):
    n, (unit, long, *_) = r.randint(2, 300), r.choice(LENGTHS)
    thing = r.choice(THINGS)
    return (str(n),
            [rf"{n}\text{{ {unit}}}", f"{n} {long}", rf"{n}~\mathrm{{{unit}}}", f"{n} {thing}",
             rf"{n}\text{{ {thing}}}", rf"{n}\ {thing}", f"{n} {thing}."],
            [f"{n + 1} {thing}", f"{n} or more {thing}", rf"\text{{no }}{thing}", f"{n} less than x",
             f"{n} dozen {thing}", rf"{n}\text{{ million}}", f"{n} {thing} and {n + 1} {long}",
             f"{n} is wrong", f"not {n} {thing}", rf"{n - 1}\text{{ {unit}}}"])


def areas(r):
    n = r.randint(2, 300)
    unit, long = r.choice([("cm", "centimeters"), ("m", "meters"), ("ft", "feet"), ("km", "kilometers")])
    return (rf"{n}\text{{ {unit}}}^2",
            [str(n), rf"{n}\text{{ {unit}}}^{{2}}", f"{n} square {long}", rf"{n}\text{{ square {long}}}",
             f"{n} {unit}^2", rf"{n}~\mathrm{{{unit}}}^2", rf"{n}\text{{ {unit}}}²",
             rf"{n}\,\text{{sq {unit}}}", rf"{n}\text{{ {unit}$^2$}}"],
            [rf"{n}\text{{ {unit}}}", rf"{n}\text{{ {unit}}}^3", f"{n} {long}", f"{n} cubic {long}",
             rf"{n + 1}\text{{ {unit}}}^2", rf"{n}^2\text{{ {unit}}}", rf"{n}\text{{ mm}}^2"])


def speeds(r):
    n = r.randint(2, 300)
    return (rf"{n}\text{{ km/h}}",
            [str(n), f"{n} km/h", rf"{n}\text{{ km per hour}}", rf"{n}\ \mathrm{{km/h}}",
             rf"{n}\text{{ kilometers per hour}}", rf"{n}~\text{{km}}/\text{{h}}"],
            [rf"{n}\text{{ m/s}}", rf"{n}\text{{ km}}", f"{n} mph", f"{n} miles per hour",
             rf"{n}\text{{ km/s}}", f"{n + 1} km/h"])


def degrees(r):
    n = r.randint(2, 179)
    return (rf"{n}^\circ",
            [str(n), f"{n}°", rf"{n}^{{\circ}}", rf"{n} \text{{ degrees}}", f"{n} degrees", rf"{n}^\circ.",
             rf"\angle ABC={n}^\circ", rf"{n}\,^\circ", rf"{n}\degree", rf"x={n}^{{\circ}}"],
            [rf"{n + 1}^\circ", rf"{n}\text{{ radians}}", rf"-{n}^\circ",
             rf"{180 - n}^\circ" if n != 90 else "91", rf"{n}\%", rf"{n}\text{{ cm}}", f"{n}0°"])


def bases(r):
    base = r.choice([5, 6, 7, 8])
    n = "".join(str(r.randint(1, base - 1)) for _ in range(r.randint(2, 4)))
    word = {5: "five", 6: "six", 7: "seven", 8: "eight"}[base]
    return (rf"{n}_{{{base}}}" if r.random() < 0.5 else f"{n}_{base}",
            [f"{n}_{base}", f"{n}_{{{base}}}", rf"{n}_\text{{{base}}}", rf"{n}_{{\text{{{word}}}}}",
             f"{n}_{base}.", f"${n}_{base}$", rf"({n})_{{{base}}}", rf"{n} _ {base}"],
            [n, f"{n}_{base + 1}", f"{n}_{{{base - 1}}}", f"{int(n) + 1}_{base}", str(int(n, base)),
             f"{n}{base}", f"{n[::-1]}0_{base}", f"{n}^{base}", f"{n}_{{10}}"])


def binary(r):
    n = f"{r.randint(9, 200):b}"
    return (n,
            [f"{n}.", f"${n}$"],
            [f"{n}_2", f"{n}_{{10}}", n[:-1] + str(1 - int(n[-1])), str(int(n, 2)), f"{n}0"])


def complex_numbers(r):
    a, b = r.randint(1, 30), r.randint(2, 30)
    return (f"{a}-{b}i",
            [f"{a} - {b}i", rf"{a}-{b}\,i", f"-{b}i+{a}", f"{a}-i{b}", rf"{a}-{b}\cdot i",
             rf"{a}-{b}\mathrm{{i}}", f"{a}-{b}*i", f"z={a}-{b}i", rf"\left({a}-{b}i\right)", f"{a}-{b}i."],
            [f"{a}+{b}i", f"{a}-{b}", f"{b}-{a}i" if a != b else "i", f"-{a}-{b}i", f"({a},-{b})",
             f"{a}-{b + 1}i", f"{a}-{b}j^2", f"{a}", rf"{a}\pm {b}i"])


WORDS = ["Tuesday", "Evelyn", "ellipse", "parabola", "hyperbola", "odd", "isosceles", "Alice", "increasing",
         "east", "north", "circle", "Yes", "even", "Friday"]


def words(r):
    word, other = r.sample(WORDS, 2)
    low = word.lower()
    return (rf"\text{{{word}}}",
            [word, low, rf"\text{{{low}}}", rf"\textbf{{{word}}}", rf"\mathrm{{{word}}}", f"{word}.",
             rf"\text{{{word}.}}", rf"\text{{ {word} }}", word.upper()],
            [other, f"not {word}", word[:-1], low[::-1], rf"\text{{{word} or {other}}}", f"un{low}",
             rf"\text{{{word}}} 1", f"{word} and {other}", f"{word} is wrong"])


def phrases(r):
    a, b = r.sample(["red", "blue", "green", "white", "black", "yellow"], 2)
    thing = r.choice(["ball", "square", "house", "card"])
    return (rf"\text{{the {a} {thing}}}",
            [f"the {a} {thing}", f"The {a} {thing}.", rf"\text{{ The {a} {thing} }}",
             rf"\textit{{the {a} {thing}}}"],
            [f"the {b} {thing}", f"the {thing}", f"not the {a} {thing}",
             f"the {a} {thing} or the {b} {thing}", f"{thing}", f"the {a}"])


def names(r):
    a, b, c = r.sample("ABCDEFGHKLMNPQ", 3)
    return (f"{a}{b}{c}",
            [rf"\text{{{a}{b}{c}}}", f"{a}{b}{c}.", rf"\mathrm{{{a}{b}{c}}}", f"${a}{b}{c}$"],
            [f"{c}{b}{a}", f"{b}{a}{c}", f"{a}{b}", f"{a}{b}{c}{c}", f"{a}, {b}", a, f"{a}+{b}+{c}"])


def choice_lists(r):
    a, b, c, d = r.sample("ABCDEFG", 4)
    return (f"{a}, {b}, {c}",
            [f"{a},{b},{c}", f"{c}, {a}, {b}", rf"\text{{{a}, {b}, {c}}}", rf"{a}, {b}\text{{ and }}{c}",
             f"{a}, {b}, {c}."],
            [f"{a}, {b}", f"{a}, {b}, {d}", a, f"{a}, {b}, {c}, {d}"])


def letters(r):
    a, b = r.sample("ABCDE", 2)
    return (r.choice([a, rf"\text{{{a}}}", rf"\text{{({a})}}"]),
            [a, f"({a})", rf"\text{{{a}}}", rf"\textbf{{({a})}}", f"{a}.", rf"\mathrm{{{a}}}", f"${a}$"],
            [b, f"{a}{b}", f"{a} or {b}", f"{a}, {b}", f"not {a}", f"{a}_1", f"2{a}", rf"\text{{{b}}}",
             f"{a}'"])


def variables(r):
    a = r.choice("xyzabn")
    return (a,
            [f"{a}.", f"${a}$", rf"\boldsymbol{{{a}}}"],
            [a.upper(), f"2{a}", f"-{a}", f"{a}^2", "w", f"{a}_1", f"1/{a}"])


def ratios(r):
    a, b = r.sample([2, 3, 5, 7, 11, 13], 2)
    return (f"{a}:{b}",
            [f"{a} : {b}", rf"{a}\colon {b}", rf"{a}\!:\!{b}", f"{a}:{b}.", rf"\frac{{{a}}}{{{b}}}",
             rf"{a}\text{{ : }}{b}", f"{a} to {b}"],
            [f"{b}:{a}", f"{a}:{b + 1}", f"{a},{b}", f"{a}{b}", f"({a},{b})", f"{a}:{b}:1", f"{a}.{b}"])


def times(r):
    h, m = r.randint(1, 12), r.choice([10, 15, 25, 40, 55])
    return (rf"{h}\!:\!{m} \text{{ p.m.}}" if r.random() < 0.3 else rf"{h}:{m}\text{{ p.m.}}",
            [f"{h}:{m}", f"{h}:{m} PM", f"{h}:{m} pm", rf"{h}:{m}\text{{ pm}}", f"{h}:{m} p.m.",
             rf"{h}:{m}~\text{{p.m.}}"],
            [f"{h}:{m} a.m.", f"{h}:{m - 5}", f"{m}:{h}", f"{h}:{m - 1} pm", rf"{h}:{m}\text{{ AM}}",
             f"{h}{m}", f"{h},{m}"])


def infinities(r):
    sign = r.choice(["", "-"])
    return (rf"{sign}\infty",
            [f"{sign}∞", rf"{sign}\infty.", f"{sign}infinity", rf"${sign}\infty$"],
            ["0", r"(-\infty,\infty)", r"\emptyset", "1"])


def real_line(r):
    return (r"(-\infty,\infty)",
            [r"\mathbb{R}", r"(-\infty, \infty)", "(-∞,∞)", r"x\in\mathbb{R}", r"(-\infty,+\infty)",
             r"\left(-\infty,\infty\right)"],
            [r"\mathbb{Z}", r"(0,\infty)", r"\infty", r"\emptyset", r"[-\infty,0)", r"\mathbb{N}"])


def exclusions(r):
    n = r.randint(1, 60)
    return (rf"(-\infty,{n})\cup({n},\infty)",
            [rf"x\ne {n}", rf"x \neq {n}", f"x ≠ {n}", rf"\mathbb{{R}}\setminus\{{{n}\}}", f"x<{n} or x>{n}"],
            [f"x={n}", rf"(-\infty,{n})", rf"x\ne -{n}", r"\mathbb{R}", rf"x\neq {n + 1}", rf"\{{{n}\}}"])


def unsolved(r):
    a, b = r.randint(3, 40), r.randint(2, 9)
    return (str(a + b),
            [f"{a + b}.0"],
            [f"{a}+{b}", f"{a + 2 * b}-{b}", rf"\int_0^1 {a + b}\,dx", rf"\sum_{{k=1}}^{{{a + b}}} 1",
             rf"\gcd({a + b},{2 * a + 2 * b})", rf"\sqrt{{{(a + b) ** 2}}}", rf"\binom{{{a + b}}}{{1}}",
             rf"|-{a + b}|", f"{a} - (-{b})", rf"\log_2 {2 ** (a + b)}", rf"\lim_{{x\to 0}} ({a + b}+x)"])


def expressions_in_words(r):
    a, b = r.randint(2, 30), r.choice([2, 3, 5, 7])
    return (rf"\frac{{{a}\sqrt{{{b}}}}}{{{b + 1}}}",
            [f"({a}√{b})/{b + 1}", f"{a}*sqrt({b})/{b + 1}", rf"{a}\sqrt{{{b}}}/{b + 1}",
             rf"\frac{{{a}}}{{{b + 1}}}\sqrt{b}", rf"\dfrac{{{a}\sqrt{b}}}{{{b + 1}}}"],
            [rf"\frac{{{a}\sqrt{{{b}}}}}{{{b + 2}}}", rf"\frac{{{a + 1}\sqrt{{{b}}}}}{{{b + 1}}}",
             rf"\frac{{\sqrt{{{a}}}}}{{{b + 1}}}" if a > 1 else "1",
             rf"\frac{{{a}+\sqrt{{{b}}}}}{{{b + 1}}}"])


CATEGORIES = [value for value in list(globals().values())
              if getattr(value, "__module__", None) == __name__ and getattr(value, "__name__", "").islower()
              and value is not pairs]


# --- gold answers of every kind, rewritten and spoiled by rules that know nothing about the kind

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

RIGHT = [  # each takes and returns a whole answer; the rules are applied in this order, two or three at once
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
    """`t` with one digit changed, or None. A leading zero and exponents of one half are left alone."""
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
    """(category, answer, gold, same) of each gold answer with six right and eight wrong answers."""
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
