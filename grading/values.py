r"""Computes the values of two expressions at some points, and finds the calculations that an answer leaves
undone.

    2(x+1), 2x+2    equal values at all points: equal
    3+4, 7          equal values, but the sum is left undone: not equal
"""

import math
import operator
import re
from collections import Counter
from contextlib import suppress
from fractions import Fraction
from random import Random

import mpmath
from mpmath import e, mp, mpf, nint, pi, workdps

from grading.tokens import Unreadable, table
from grading.trees import (
    CALCULUS,
    SUMS,
    TRIGONOMETRIC,
    as_text,
    edges_of,
    inner_nodes,
    is_integer,
    letters_of,
    number_node,
    parts_of,
    short_name,
)

# --- the value of an expression at a point: a dict, letter -> number

CONSTANTS = {"e": e, "i": mpmath.j, r"\pi": pi, r"\log": mpf(10)}  # \log: the base of \log x
# The kind of a node or the name of a call -> the name of mpmath's function
OPERATIONS = table(
    "/ fdiv ^ power neg fneg | fabs",
    "named fsub relation fsub",  # x=5 has the value x-5
    "quantity radians",  # the only unit with a value is the degree
    r"[ floor \lceil ceil",
    r"! factorial !! fac2 \binom binomial",
    r"\log log \ln log \cis expj",
    r"\sinh sinh \cosh cosh \tanh tanh",
    r"\sin sin \cos cos \tan tan",
    r"\cot cot \sec sec \csc csc",
    r"\arcsin asin \arccos acos \arctan atan",
)
OPERATIONS = {key: getattr(mpmath, name) for key, name in OPERATIONS.items()}
OPERATIONS |= {
    "+": lambda *terms: sum(terms),
    "*": lambda *factors: math.prod(factors),
    "root": lambda value, degree: value ** (1 / degree),
    r"\max": max,
    r"\min": min,
}
INTEGER_OPERATIONS = {r"\gcd": math.gcd, r"\lcm": math.lcm}
FACTORIALS = "!", "!!", r"\binom"
# The largest exponent, and the largest n of n!
LARGEST = {"^": 10**5} | dict.fromkeys(FACTORIALS, 5000)
HOLDS = {
    "<": operator.lt,
    ">": operator.gt,
    r"\le": operator.le,
    r"\ge": operator.ge,
}
# Errors of an expression that has no value, such as 1/0, or whose value is too large to compute
FAILURES = (
    ArithmeticError,
    ValueError,
    TypeError,
    LookupError,
    Unreadable,
    MemoryError,
    RecursionError,
)


def _value(node, point):
    """Returns the value of an expression at a point: 7 for 2x+1 at x=3. Raises an error of FAILURES if it has
    none."""
    match node:
        case "number", number, _:
            return mpf(number.numerator) / number.denominator
        case "name", name if name.isupper() and name.isalpha():  # GM is G times M
            return math.prod(point[letter] for letter in name)
        case "name", name:
            return +point[name]
        case "list", *cases:
            for _, _, value, condition in cases:
                if _holds(condition, point):
                    return _value(value, point)
            raise Unreadable
    values = [_value(part, point) for part in inner_nodes(node)]
    kind = node[0]
    is_call = kind == "call"
    if is_call:
        kind = node[1]
    if kind == r"\log":
        values.append(point[kind])
        values = values[:2]  # \log_2 8 has its own base
    if is_call or kind == "^":
        if abs(values[-1]) > LARGEST.get(kind, 10**1000):
            raise OverflowError
    if kind in INTEGER_OPERATIONS and not any(value % 1 for value in values):
        return mpf(INTEGER_OPERATIONS[kind](*map(int, values)))
    if kind in OPERATIONS:
        return _result(kind, values)
    if is_call and kind not in SUMS:
        return _unknown(kind, values)
    raise Unreadable


def _holds(condition, point):
    r"""Returns whether a condition such as x\ge0, x=0, n even or otherwise holds: x\ge0 holds at x=2."""
    match condition:
        case "words", "otherwise" | "else":
            return True
        case "named", name, ("tuple", "mod", rest, modulus):
            difference = _value(name, point) - _value(rest, point)
            return difference % _value(modulus, point) == 0
        case "named", name, value:
            x = _value(name, point)
            point = point | {r"\infty": math.inf}
            edges = edges_of(value)
            held = 0
            for _, sign, bound in edges:
                held += HOLDS[sign](x, _value(bound, point))
            # Of the two edges of 1<x<2, both hold in the interval, and one holds outside of it.
            return held > len(edges) / 2
    raise Unreadable


def _result(kind, values):
    """Returns the result of an operation on values: 8 for ^ and 2, 3. Raises an error if it would take long
    or needs more digits."""
    has_many_digits = mp.dps > 60
    if has_many_digits and kind in FACTORIALS:  # mpmath would need minutes for (10/3)!
        if any(value % 1 for value in values):
            raise ValueError
    result = OPERATIONS[kind](*values)
    # The digits must reach from the largest term to the smallest, as in 2^{999}+1. A decimal digit has 3.3
    # bits, so 1.5 bits for each digit are less than half of all.
    if has_many_digits and result:
        bits = abs(mpmath.mag(result))
        if bits > 1.5 * mp.dps:
            raise OverflowError
    return result


def _unknown(name, values):
    r"""Returns a number that stands for the value of an unknown function, such as f(1,2). It differs for each
    name and each list of arguments: f(1,2) and f(2,1) differ. The order of a command's arguments does not
    count: \gcd(n,2) and \gcd(2,n) are equal."""
    total = mpf(Random(f"{name}{len(values)}").random())
    for place, value in enumerate(values, 1):
        total += place * mpmath.atan(value + place) if name[0].isalpha() else mpmath.atan(value)
    return mpmath.cos(total)


# --- points

# Where the letters' values are at the four points. First near 1, because 1.02^{2023}+1 has few digits.
RANGES = (0.98, 1.02), (0, 5), (0, -5), (0, -5)
INTEGERS = *range(1, 61), 59_820, 60_817, 61_814
HAS_ROOT = r"root|\^\(-?\d+/"  # \sqrt x, x^{2/3}


def _points(letters, ours, theirs):
    r"""Yields points with a value for each letter, such as {"x": 1.02}. The texts of the two trees tell which
    values are needed: positive ones for \sqrt{x^2} and x^{2/2}, integers for \lfloor n\rfloor."""
    text = ours + theirs
    constants = CONSTANTS
    if r"\ln" in text:  # \log is \ln, too
        constants = constants | {r"\log": e}
    if len(letters) == 1 and re.search(r"ceil|\[|mod|&", text):  # \lceil x\rceil, [x], cases
        [letter] = letters
        for number in INTEGERS:
            value = mpf(number)
            if letter not in "nmkN":  # no integer: also negative values, and quarters
                value = value / 4 - 10
            yield constants | {letter: value}
        return
    have_roots = re.search(HAS_ROOT, ours) and re.search(HAS_ROOT, theirs)
    for seed, (low, high) in enumerate(RANGES):
        random = Random(seed)
        point = {}
        if have_roots and "|" not in text:
            high = abs(high)
        for letter in sorted(letters):
            point[letter] = mpf(random.uniform(low, high))
        yield constants | point
        if not letters:  # all points are the same
            return


# --- equality

EQUATIONS = "named", "relation"
C = ("name", "C")


def math_equal(
    answer: tuple, gold: tuple, tolerance: float | None = None, is_family: bool = False
) -> bool:
    r"""Returns whether two expressions are equal, such as 2(x+1) and 2x+2. Two equations are equal if one is
    the other times a number: x+y=5 and 2x+2y=10. Returns False if one has no value, if the values are too
    large to compute, or (without `tolerance`) if `answer` has a calculation that `gold` lacks: 3+4 and 7.

    tolerance: largest relative difference of two numbers, if they are decimals (see `_limit`)
    is_family: whether to compare the values for all integers k: \frac\pi4+\frac{k\pi}2, \frac{(2k+1)\pi}4"""
    ours, theirs = as_text(answer), as_text(gold)
    text = ours + theirs
    if len(text) > 1000:  # longer than any answer; so the time is limited
        return False
    letters = letters_of(answer) | letters_of(gold)
    for name in filter(str.isupper, [*letters]):
        letters.update(name)  # G and M for GM
    digits = 20_000  # 2^{2023}+1 needs many digits
    # \sqrt2, \sin1, f(1), e^2 and 2^{1/3} take long with many digits, but \binom52 does not
    if re.search(r"root|\\(?!b)|call\([^!\\[|]|\be\b|\^\([\d-]+[./]", text):
        digits = 2000
    if letters:
        digits = 60
    with workdps(digits), suppress(*FAILURES):
        if tolerance is None and not _is_finished(answer, gold):
            return False
        if is_family:
            return _same_family(answer, gold)
        points = [*_points(letters, ours, theirs)]
        limit = _limit(answer, gold, tolerance)
        if gold[0] in EQUATIONS:
            return bool(letters) and _same_equation(answer, gold, points, limit)
        pairs = [(_value(answer, point), _value(gold, point)) for point in points]
        are_sums = answer[0] == gold[0] == "+"
        if are_sums and len(letters) == 2 and C in answer and C in gold:
            return _same_antiderivative(answer, pairs)
        return all(abs(a - b) <= limit * abs(b) for a, b in pairs)
    return False


def _limit(answer, gold, tolerance):
    r"""Returns the largest relative difference of two values. It is `tolerance` (None: 1e-6) if the gold
    answer has a decimal point or the answer is a decimal: 0.3333333 and 1/3. It is 1e-12 for an answer such
    as 1.83\pi. If the gold answer is an integer, or both are exact, all but 20 digits must be equal."""
    exact = mpf(10) ** (20 - mp.dps)
    if is_integer(gold):
        return exact
    if "." in as_text(gold):
        return tolerance or 1e-6
    if "." not in as_text(answer):
        return exact
    return tolerance or 1e-6 if answer[0] == "number" else 1e-12


def _same_antiderivative(answer, pairs):
    r"""Returns whether the values of two antiderivatives differ by the same number at all points, as those of
    \cos^2x+C and C-\sin^2x do. An answer with a number, such as x+2+C, is wrong."""
    if any(part[0] == "number" for part in answer[1:]):
        return False
    differences = [a - b for a, b in pairs]
    first = differences[0]
    return all(abs(other - first) < 1e-40 for other in differences)


def _same_equation(answer, gold, points, limit):
    """Returns whether two equations or inequalities are equal: if the ratio of their values is the same
    number at all points, and not 0. It is 2 for 2x+2y=10 and x+y=5."""
    sign, *_ = parts_of(answer, "relation", "=")
    needed, *_ = parts_of(gold, "relation", "=")
    ratios = [_cleared(answer, point) / _cleared(gold, point) for point in points]
    first = ratios[0]
    if sign != needed or min(map(abs, ratios)) <= limit:
        return False
    if sign != "=" and first <= 0:  # -x-y<2 is not x+y<2
        return False
    return all(abs(ratio - first) < abs(ratio) * limit for ratio in ratios)


def _cleared(node, point):
    """Returns the value of an equation times all that is below fraction lines: y=6/x is xy=6."""
    return _value(node, point) * _below(node, point)


def _below(node, point):
    """Returns the product of the values below fraction lines: x for y=6/x."""
    product = math.prod(_below(part, point) for part in inner_nodes(node))
    if node[0] == "/":
        product *= _value(node[2], point)
    return product


def _same_family(answer, gold):
    r"""Returns whether two expressions have the same values for all integers k: k\pi and -k\pi, but not
    x=k\pi and y=k\pi. Compares only the smallest values, a fifth of all: since k ends at 60, the largest
    values of two equal families may differ."""
    name, value = parts_of(answer, "named", "", answer)
    needed, gold_value = parts_of(gold, "named", "", gold)
    if name and needed and short_name(name) != short_name(needed):
        return False
    ours, theirs = _family(value), _family(gold_value)
    last = sorted(theirs)[len(theirs) // 5]
    return not any(found <= last for found in ours ^ theirs)


def _family(node):
    r"""Returns the values of expressions with a letter k, for integers k from -60 to 60, each as a tuple of
    its size, its form and its coordinates: 0, -7, 7, -14, ... for 7k, and also for 0 \pmod 7."""
    found = set()
    for part in parts_of(node, "list", node):
        match part:
            case "tuple", "mod", rest, modulus:
                part = "+", rest, ("*", modulus, ("name", "k"))
        [letter] = letters_of(part) - {"x"}
        form, *coordinates = parts_of(part, "tuple", "", part)
        for k in range(-60, 61):
            point = CONSTANTS | {letter: k}
            values = [round(float(_value(value, point)), 6) for value in coordinates]
            # (k,k+1) is not [k,k+1]
            found.add((max(map(abs, values)), form.strip("=()"), *values))
    return found


# --- unfinished calculations

# The name of a call -> its group of operations
GROUPS = table(r"\ln logarithm \log logarithm ' calculus")
GROUPS |= dict.fromkeys(CALCULUS, "calculus")
GROUPS |= dict.fromkeys(TRIGONOMETRIC, "trigonometric")


def _is_finished(answer, gold):
    r"""Returns whether an answer is worked out as far as the gold answer: it has no kind of operation that
    the gold answer lacks, as 3+4 has for 7. If the gold answer is a number, the answer has no more roots and
    no more logarithms: 2\sqrt3-\sqrt3 has one too many for \sqrt3."""
    ours, theirs = _operations(answer), _operations(gold)
    theirs["root"] += theirs["trigonometric"]  # \sqrt2-1 equals \tan\frac{\pi}{8}
    theirs["product"] += theirs["power"]
    if gold[0] in EQUATIONS:
        theirs["power"] += repr(gold).count("'^'")
    if not ours.keys() <= (+theirs).keys():
        return False
    if re.search(r"(?<![\\a-z])[a-zA-Z](?![a-z])", as_text(gold)):  # x, but not \pi
        return True
    return all(ours[name] <= theirs[name] for name in ("root", "logarithm"))


def _operations(node):
    r"""Returns a Counter of the operations that a tree leaves undone: a sum and a root for \sqrt3+2+5."""
    inner = [_operations(part) for part in inner_nodes(node)]
    found = sum(inner, Counter())
    match node:
        case "/", _, ("root" | "call", *_):  # \frac{\ln3}{\ln2} has one logarithm
            found = inner[0] | inner[1]
        case "call", r"\ln" | r"\log", ("root", *_), *_:  # \ln\sqrt2 is \frac12\ln2
            found["root"] -= 1
    found.update(_own_operations(node))
    return +found


def _own_operations(node):
    r"""Yields the operations that a node leaves undone, apart from those of its parts: "root" for \sqrt3."""
    kind, name, *_ = node
    if kind == "+" and _has_sum(node):
        yield "sum"
    if kind in ("*", "/", "neg") and _has_product(node):
        yield "product"
    if kind in ("^", "root", "call") and _has_power(node):
        yield "power"
    if kind == "root" or kind == "^" and re.match(r"-?\d*/", as_text(node[2])):  # x^{1/2}
        yield "root"
    if kind != "call":
        return
    if name in GROUPS:
        yield GROUPS[name]
    # \ln\frac32 is \ln3-\ln2. But \ln\frac12 is -\ln2.
    if name == r"\ln" and re.match(r"(?!1/)\d+[/.]|/\((?![1e] )", as_text(node[2])):
        yield "logarithm"


def _has_sum(node):
    """Returns whether a sum has like terms, such as 2x+3x, or the term 0."""
    units = []
    for term in _terms(node):
        others = [repr(pair) for pair in _factors(term) if not _is_rational(pair[0])]
        units.append(" ".join(sorted(others)))  # x for 2x
    return len({*units}) < len(units) or number_node(0) in node


def _is_rational(node):
    r"""Returns whether a node is a number or its power, such as 2^{10}, but not 2^{1/2}."""
    base, exponent = parts_of(node, "^", node, number_node(1))
    return base[0] == "number" and is_integer(exponent)


def _terms(node):
    """Returns the terms of a sum: x, 1, x and 3 for 2(x+1)-(x-3)."""
    match node:
        case ("*", ("number", *_), ("+", *parts)) | ("*", ("+", *parts), ("number", *_)):
            return parts
        case (("+" | "neg"), *parts):
            return sum(map(_terms, parts), [])
    return [node]


def _factors(node, side=1):
    """Returns the factors of a product or a quotient: pairs of a factor and 1, or -1 if it divides. For 2x/y,
    these are (2, 1), (x, 1) and (y, -1)."""
    match node:
        case "number", Fraction(numerator=top, denominator=bottom), None if bottom > 1:
            return [(number_node(top), side), (number_node(bottom), -side)]
        case "/", top, bottom:
            return _factors(top, side) + _factors(bottom, -side)
        case "*", *factors:
            found = []
            for factor in factors:
                found += _factors(factor, side)
            return found
    return [(node, side)]


def _has_product(node):
    r"""Returns whether a node is an unfinished product, such as 2\cdot3x, 4\pi/2, x^2/x, 1/i, -(-3), x/0.5"""
    match node:
        case "neg", inner:
            terms = parts_of(inner, "+", inner)
            return all(re.match("neg|-", as_text(term)) for term in terms)  # -(-3), -(-x-y)
        case "/", _, ("number", Fraction(denominator=below), _) if below > 1:
            return True
    factors = _factors(node)
    imaginary = [side for factor, side in factors if "'i'" in repr(factor)]
    if len(imaginary) > 1 or -1 in imaginary:
        return True
    return _has_number_product(factors, node[0]) or _has_like_factors(factors)


def _has_number_product(factors, kind):
    r"""Returns whether the numbers of a product can be multiplied or divided: 2\cdot3x, 4\pi/2."""
    numbers = {}  # 1 -> the number on top, -1 -> the number below
    for factor, side in factors:
        match factor:
            case "number", number, _ if abs(number) != 1:
                if side in numbers:
                    return True
                numbers[side] = number
    if len(numbers) < 2:
        return False
    below = (numbers[1] / numbers[-1]).denominator
    return below == 1 or kind == "*" and below < abs(numbers[-1])  # 150*\pi/180


def _has_like_factors(factors):
    r"""Returns whether two powers, or two factors of a quotient, have the same base: x^2/x, x^2x^3."""
    is_quotient = -1 in [side for factor, side in factors if factor[0] != "number"]
    bases = []
    for factor, _ in factors:
        kind = factor[0]
        if kind in ("^", "root"):
            bases.append(factor[1])
        elif is_quotient and kind != "number" and factor[:2] != ("call", "!"):  # not (2n)!/n!/n!
            bases.append(factor)
    return len({*bases}) < len(bases)


def _has_power(node):
    r"""Returns whether a node is a power to multiply out, such as 2^3, (2x)^3, (1+\sqrt2)^3 or (x^2)^3, or
    another calculation of a number, such as 5! or |1-\sqrt2|."""
    match node:
        case "^", base, ("number", Fraction(denominator=1), None):
            for factor, _ in _factors(base):
                is_number = factor[0] != "name" and not letters_of(factor)
                if is_number or factor[0] in ("^", "root"):
                    return True
    if letters_of(node):
        return False
    # 5040 is divisible by 1 to 10. So the product is an integer for \sqrt4 and \sin30^\circ.
    value = 5040 * _value(node, CONSTANTS)
    return node[1] == "|" or abs(value - nint(value)) < 1e-40
