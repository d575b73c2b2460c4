r"""Decides whether an answer equals the gold answer.

    grade(r"\frac12", "0.5")     # True

`quick_grade` decides most pairs of an answer and a gold answer. `grade` also computes the values of
expressions, with mpmath. Neither hangs: the length and the depth of a text are limited, and no large number
is computed.

Equality is decided in four steps:

1. `tokens.tokens_of` splits a text into tokens: `5~\text{ meters}` becomes `5 "meters`.
2. `statements.read` removes what stands around a formula, such as `the answer is` and `k\in\mathbb{Z}`, and
   parses it to a tree of nodes (trees.py). A text that is no formula is a node of words.
3. `_same` compares trees by the types of their nodes, part by part.
4. `values.math_equal` compares the values of two expressions or equations, such as `2(x+1)`, at a few points.

What counts as equal:

- Expressions with the same value: `\sqrt{242}` and `11\sqrt{2}`. But an unfinished calculation is wrong:
  `3+4` does not equal 7. The rules are in values.py, from `_is_finished` on.
- An answer that can't be read as a whole, such as `3@\frac{1}{2}`, is wrong. `grade` may raise ValueError
  for such a gold answer.
- A decimal may be rounded if it differs from the other number by at most one part in a million: `0.3333333`
  equals `1/3`, `0.33` does not. Two decimals with the same number of places must be equal. Integers are
  exact. In an expression such as `1.8333333333333\pi`, an answer's decimal may differ by one part in
  10^{12}, or in a million if the gold answer also has a decimal. If the gold answer is a number, an
  expression such as `\pi` is wrong, even for 3.1415927.
- A percent is a hundredth: `5\%` equals 0.05, not 5.
- Numbers with a base are not converted: neither `101_2` nor `5_{10}` equals 5.
- Units are not converted, apart from degrees. If only the gold answer has a unit, the unit is ignored: 10
  equals `10 cm`.
- If only the answer has a unit, a word of it must be in UNIT_NAMES or match MANY, as English plurals do:
  `28 pizzas` and `28元` equal 28, `28 halved` and `28万` do not. After -1 to 1, a singular will do:
  `1 pizza`.
- If only one of the two has the letter of a choice, the letter is ignored: `(B) 15` equals `15`. Several
  letters from A to H are one text: `B, D` equals `BD`.
- The order counts in tuples, not in lists and sets, unless the problem asks for an order (see `repeats`).
  `\{2,2,3\}` equals `\{2,3\}`. A column vector equals the tuple of its numbers.
- A solved inequality in one variable is an interval: `1<x<2` equals `(1,2)`. `x>1 and x<2` (or with a comma)
  means that too, but `x<1 and x>2` means the union, as `or` does. `x\ne3` removes the point 3.
- Upper and lower case are the same in words (`Yes`, `yes`), but not in single letters.
- `x=5` and `f(1)+f(2)=5` equal the gold answer 5, but `x+1=5` is an equation in one unknown, and gives no
  value. If the gold answer is `x=5`, neither `y=5` nor `x-5=0` equals it. If the gold answer is an equation
  with a sum, or a product of small letters, on its left, such as `x+y=5`, the answer must be an equation
  too. `x=2, y=3` equals `(2,3)`. An identity with the same letters on both sides, such as
  `(x+1)^2=x^2+2x+1`, equals its right side, if both sides are equal.
- `f(t)=2t` and `y=2x` equal `f(x)=2x`. `e_1` is a name, not a number. `[x]` is the integer part of x.
- A condition such as `k\in\mathbb{Z}` is ignored, but `k\in\mathbb{N}` does not equal it. If the gold answer
  has one, its letter may differ: `n\pi, n\in\mathbb{Z}` equals `k\pi, k\in\mathbb{Z}`, and `f(x)=kx` equals
  `f(x)=cx for any constant c`. Also the CONSTANT_NAMES of a formula in x or t: `y=Ae^x` equals `y=Ce^x`.
- If one of two formulas with \pi says that k is an integer, they need only have the same values for all k:
  `-\frac\pi4+k\pi` equals `\frac{3\pi}4+k\pi, k\in\mathbb{Z}`. `7k+3` and `-4 \pmod 7` equal `3 \pmod 7`.
- `\log` has the base 10. But if one of the two has `\ln`, `\log` is `\ln`, too.
- If both have roots and none has `|x|`, letters are positive: `x^{2/3}` equals `\sqrt[3]{x^2}`. But `x` does
  not equal `\sqrt{x^2}`.
- `60^\circ` equals `\frac\pi3`. `22^\circ30'` equals `22.5^\circ`.
- Cases are compared by their values: `0 if n is odd, n if n is even` equals `\frac{n+n(-1)^n}2`, also in an
  environment cases. `3\nmid n` and `n is not divisible by 3` equal `n\equiv1,2\pmod3`.
- `(4-7k,1+3k)` equals `(4+7k,1-3k)` for integers k. `2i-3j` equals `(2,-3)`. `\cos x+i\sin x` and its value
  equal `e^{ix}`. `3 \pmod 7` equals the gold answer 3.
- Antiderivatives may differ by a number: `-\frac12\cos^2x+C` equals `\frac12\sin^2x+C`. But `x+2+C` is
  unfinished. Formulas with \lfloor \rfloor of an integer n are equal if they are for n = 1 to 60 and for
  three larger n.
- `(1,2,3) and its permutations` is the list of all six tuples.
- A reason after the answer is ignored: `5, since x>0`. `Bob wins` equals `Bob`.
- A formula that is copied from the problem is wrong, although it may equal the gold answer, unless the gold
  answer is this formula (see `repeats`).
- In `3+4=7`, each part must equal the last part, which is the answer. So `6=7` does not equal 7.
- After `\approx`, an answer that is no integer may add one number that is right within one percent:
  `\frac56\approx0.83`. A decimal may be rounded to fewer places: not `3.00\approx3.02`. A gold answer with a
  decimal point may equal this number: `\frac56\approx0.83` also equals 0.83.
"""

import re
from itertools import permutations, product, repeat

from grading.statements import NAME, read
from grading.tokens import MANY, PLURAL, any_of, unit_of
from grading.trees import (
    UPPER,
    as_text,
    edges_of,
    in_order,
    inner_nodes,
    is_integer,
    is_name,
    letters_of,
    number_node,
    parts_of,
    product_of,
    scientific,
    short_name,
    with_letters,
)
from grading.values import EQUATIONS, math_equal
from guard.messages import require

KINDS = ("math", "choice", "exact")


def grade(answer: str, gold: str, kind: str = "math") -> bool:
    r"""Returns whether `answer` equals `gold`: True for \frac12 and 0.5. The three kinds:

        math      equality as described at the top of this file
        choice    equal letters; D, d, (D), D. and \text{D} are the same letter
        exact     equal texts, apart from spaces at the ends

    Runs in this process and has no deadline. Grade untrusted answers with grading.worker.Grader instead.
    Raises UserError for an unknown kind, and ValueError for a gold answer that can't be read.
    """
    return bool(quick_grade(answer, gold, kind, math_equal))


class Undecided(Exception):
    """Raised if only the values of two expressions can decide whether they are equal: 2(x+1) and 2x+2."""


def _undecided(*_, **__):
    """Compares no values: raises Undecided, for example for 2(x+1) and 2x+2."""
    raise Undecided


def quick_grade(answer: str, gold: str, kind: str = "math", prove=_undecided) -> bool | None:
    """Returns what `grade` returns, or None if only `math_equal` can decide, as for 2(x+1) and 2x+2.
    Raises UserError for an unknown kind.

    prove: a function that compares such expressions, as `math_equal` does (see `_same`)."""
    require(kind in KINDS, f"answer kind {kind!r} is unknown", f"one of {', '.join(KINDS)}")
    answer = answer.strip()
    gold = gold.strip()
    if not answer or not gold:
        return False
    if kind == "choice":
        return _letter(answer) == _letter(gold) != ""
    if answer == gold or kind == "exact":
        return answer == gold
    ours = read(answer)
    theirs = read(gold)
    if ours.text and ours[1:] == theirs[1:]:  # the same text and conditions
        return True
    try:
        equal = _same_reading(ours, theirs, prove)
    except Undecided:
        return None
    if equal or theirs.tree[0] != "unread":
        return equal
    if prove is _undecided:
        return None
    raise ValueError(f"the gold answer {gold[:80]!r} cannot be parsed")


def _letter(text):
    """Returns the letter of a choice or a name: B for `(B) 15` and `b`; "" for another text."""
    kind, letter, *_ = read(text).tree
    is_letter = kind in ("choice", "name") and re.fullmatch("[A-Za-z]", letter)
    return letter.upper() if is_letter else ""


def _same_reading(answer, gold, prove):
    r"""Returns whether two Readings are equal: n\pi, n\in\mathbb{Z} equals k\pi, k\in\mathbb{Z}"""
    domains = _domains(answer)  # {"Z"} for n\in\mathbb{Z}
    needed = _domains(gold)
    if domains and needed and domains.isdisjoint(needed):  # n\in\mathbb{N} is not n\in\mathbb{Z}
        return False
    ours = answer.tree
    theirs = gold.tree
    for tree in (ours, *_renamed(answer, gold)):
        if _same(tree, theirs, prove):
            return True
    # If the answer is x=\frac\pi4+k\pi, k\in\mathbb{Z}, many gold answers do not say that k is an integer.
    text = as_text(theirs)
    # 0 \pmod3 is 3k, k\in\mathbb{Z} and n=3k. But `even or odd` is not n+1 or the choice B.
    if needed == {"Z"} or theirs[0] == "named":
        text += as_text(ours)
    is_family = domains | needed == {"Z"} and re.search(r"\\pi|tuple", text)
    if is_family or "tuple(mod" in text:
        return prove(ours, theirs, is_family=True)
    return False


# --- trees


def _same(answer, gold, prove):
    """Returns whether two trees are equal. prove(answer, gold) compares two expressions, such as 2(x+1) and
    2x+2. Its errors pass through."""
    if answer == gold:
        return True
    one = number_node(1)
    answer = scientific(one, answer) or answer  # 10^6 is a number
    gold = scientific(one, gold) or gold
    kinds = {answer[0], gold[0]}
    for kind, same in COMPARE.items():  # the functions below
        if kind in kinds:
            return same(answer, gold, prove)
    if kinds == {"name"}:  # AB is not BA
        return False
    if kinds == {"number"}:
        return _same_number(answer, gold)
    if gold[0] == "number":
        return False
    return prove(answer, gold)


def _same_number(answer, gold):
    """Returns whether two numbers are equal. A decimal may be a rounding of the other number: less than one
    unit of its last place away, and at most one part in a million. So 0.3333333 equals 1/3."""
    _, a, places = answer
    _, b, needed = gold
    if places == needed:
        return a == b
    fewest = min(places or needed, needed or places)
    difference = abs(a - b)
    if difference * 10**fewest >= 1:
        return False
    return difference * 10**6 <= max(abs(a), abs(b))


def _same_words(answer, gold, prove):
    """Returns whether words are equal: EAST equals east."""
    if not {answer[0], gold[0]} <= {"words", "name"}:
        return False
    return answer[1].casefold() == gold[1].casefold()


AXES = [("name", axis) for axis in "ijk"]


def _vector(node):
    r"""Returns 2i-5k for (2,0,-5), and another node unchanged."""
    if node[0] != "tuple":
        return node
    terms = map(product_of, node[2:], AXES)
    return in_order("+", *terms)


def _ordered(answer, gold, prove):
    """Returns whether two lists have the same parts in the same order: 1, 2 is not 2, 1."""
    if len(answer) != len(gold):
        return False
    return all(map(_same, answer, gold, repeat(prove)))


def _unordered(answer, gold, prove):
    """Returns whether two lists have the same parts in any order. If one list has a single part, every part
    of the other list must equal this part: `1, 1` equals `1`."""
    if len(answer) != len(gold):
        if min(len(answer), len(gold)) != 1:
            return False
        return all(_same(a, b, prove) for a, b in product(answer, gold))
    left = list(answer)
    for b in gold:
        for a in left:
            if _same(a, b, prove):
                left.remove(a)
                break
        else:  # no part is left that equals b
            return False
    return True


def _same_tuple(answer, gold, prove):
    """Returns whether two tuples have the same form and the same parts in the same order. (1,2) is not (2,1)
    or [1,2)."""
    match answer, gold:
        case ("tuple", "mod", rest, ("number", modulus, _)), ("number", value, _):
            return rest == gold and value < modulus > 2  # 3 \pmod 7 is 3
    if answer[0] != gold[0]:  # 2i-5k and (2,0,-5)
        letters = letters_of(answer) | letters_of(gold)
        if letters.isdisjoint("jk"):
            return False
        return prove(_vector(answer), _vector(gold))
    forms = {answer[1], gold[1]}
    # A tuple of the form "=", such as x=1, y=2, may equal a tuple (1,2).
    if len(forms) > 1 and forms != {"=", "()"}:
        return False
    return _ordered(answer[2:], gold[2:], prove)


def _each(node):
    """Returns y=1,2 as the list y=1, y=2."""
    match node:
        case "named", name, ("list", *values):
            return "list", *(("named", name, value) for value in values)
    return node


def _same_named(answer, gold, prove):
    """Does the work of `_same` if one or both have a name: x=5 equals 5 and x=5, but not y=5."""
    for node in (answer, gold):
        if node[0] == "list" and node[-1][0] in EQUATIONS:  # x^2=1, y=2
            return _same_list(_each(answer), _each(gold), prove)
    name, a = parts_of(answer, "named", None, answer)
    needed, b = parts_of(gold, "named", None, gold)
    match answer:
        case ("named", left, right) | ("relation", "=", left, right) if gold[0] not in EQUATIONS:
            is_identity = set() != letters_of(left) == letters_of(right)
            if is_identity and not is_name(left):  # (x+1)^2=x^2+2x+1
                return _same(right, gold, prove) and prove(left, right)
    # Whether the gold answer is a value, alone or with a name: 5, x=5, V=ah. Then equations that are not
    # solved, such as x-5=0 and V/a=h, are wrong.
    is_value = needed is None or is_name(needed)
    # xy=5 and x+y=5 may be equations of curves. So the answer y=5-x is right, and the answer 5 is wrong.
    if needed and needed[0] == "*" and as_text(needed).islower():
        is_value = False
    names = (name or answer)[:2], (needed or gold)[:2]
    is_size = name != needed and ("call", "|") in names  # |x|
    if is_size and "union" in (a[0], b[0]):  # 1<|x|<2 is not (1,2)
        is_value = False
    if is_value and _same_name(name, needed) and "relation" not in (a[0], b[0]):
        return _same(a, b, prove)
    if answer[0] not in EQUATIONS or gold[0] not in EQUATIONS:
        return False
    letters = letters_of(gold)
    is_curve = len(letters) > 1 and letters <= set("Ctxyz")  # y=2x is y-2x=0
    if is_value and needed and not is_curve:
        return False
    return prove(answer, gold)


def _same_name(name, needed):
    """Returns whether two names, or None, may stand for each other: x and x_1, but not x_2 and x_1."""
    short = short_name(name)  # x for x_1
    short_needed = short_name(needed)
    if {short, short_needed} == {("name", "y"), ("name", "f")}:
        return True
    if name in (None, needed, short_needed):
        return True
    return needed in (None, short)


def _same_chain(answer, gold, prove):
    """Does the work of `_same` if one or both are a chain, such as 3+4=7. If `gold` is a chain, only its
    value (7) counts. If `answer` is a chain, the steps before its value must equal the value. Roundings
    after the value must be right within one percent. If the value is an integer, they must be exact. More
    than one rounding is wrong: otherwise one of many could be right by chance."""
    value, steps, rounded = parts_of(answer, "chain", answer, (), ())
    needed, *_ = parts_of(gold, "chain", gold)
    if len(rounded) > 1:
        return False
    has_point = "." in as_text(gold)  # \frac56\approx0.83 equals 0.83
    is_rounding = has_point and any(_same(node, gold, prove) for node in rounded)
    if not is_rounding and not _same(value, needed, prove):
        return False
    value, *_ = parts_of(value, "quantity", value)
    for number in rounded:
        if value[0] == number[0] == "number":
            _, _, places = value
            if places and places <= (number[2] or 0):  # 3.00\approx3.02
                return False
        if not prove(number, value, 0.01):
            return False
    return all(prove(step, value, 1e-6) for step in steps)


def _same_quantity(answer, gold, prove):
    """Does the work of `_same` if one or both have a unit. If only the answer has a unit, one of the unit's
    words must look like a unit: `5 cm` equals 5, but `5 nearly` differs from 5."""
    a, unit = parts_of(answer, "quantity", answer, "")
    b, needed = parts_of(gold, "quantity", gold, "")
    if {unit, needed} == {"degree", ""}:
        radians = b if unit else a
        if r"\pi" in as_text(radians):  # 60^\circ is \frac\pi3
            return prove(answer, gold)
    if unit and needed:
        is_right = _unit_name(unit) == _unit_name(needed)
    else:
        is_right = not unit or _is_unit(unit, a)
    return is_right and _same(a, b, prove)


def _unit_name(text):
    """Returns the same text, m 2, for `square meters` and m^2."""
    text = re.sub(r"\b(?:sq(?:uare)? |平方)(\w+)", r"\1 2", text)  # 平方米
    text = re.sub(r"\bcubic (\w+)", r"\1 3", text)  # cubic cm
    words = text.replace("mph", "mi / h").split()
    return " ".join(unit_of(word) or PLURAL.sub("", word) for word in words)


# A noun after a number from -1 to 1: pizza, not halved or nearly
ONE = re.compile(MANY.pattern + "|[a-z]{3,}(?<!ed)(?<!ly)")


def _is_unit(text, value):
    """Returns whether one of the words after a number looks like a unit: 5 cm, 5 pizzas, 1 pizza."""
    words = re.findall(r"[^\W\d]+", re.sub("平方|立方", "", text))  # 平方米
    unknown = [word for word in words if not unit_of(word)]
    if not all(map(str.isascii, unknown)):
        return False
    is_single = value[0] == "number" and abs(value[1]) <= 1
    noun = ONE if is_single else MANY
    if len(unknown) < len(words):
        return True
    return any(map(noun.fullmatch, unknown))


def _same_union(answer, gold, prove):
    r"""Does the work of `_same` if one or both are intervals. These must be the same, or else their edges:
    1<x<2 equals (1,2)."""
    edges = edges_of(answer)
    needed = edges_of(gold)
    a = _intervals(edges)
    b = _intervals(needed)
    if a and b:
        return _unordered(a, b, prove)
    return _unordered(edges, needed, prove)


def _intervals(edges):
    r"""Returns the intervals, such as (1,2) and (3,4), of a union's edges. Returns [] if the edges are not a
    lower and an upper one in turns, as those of x<5, x\ne3."""
    intervals = []
    ends = iter(edges)
    for low in ends:
        high = next(ends)
        if high[1] not in UPPER:  # < and \le
            return []
        intervals.append(("tuple", "()", low, high))
    return intervals


def _same_list(answer, gold, prove):
    """Does the work of `_same` if one or both are a list or a set. {5} equals 5; x=1, y=2 equals 1, 2."""
    kinds = {answer[0], gold[0]}
    if kinds == {"list", "tuple"} and "=" in (answer[1], gold[1]):  # a tuple ("tuple", "=", 1, 2)
        a = parts_of(answer, "list", *answer[2:])
        b = parts_of(gold, "list", *gold[2:])
        return _ordered(a, b, prove)
    a = _elements(answer)
    b = _elements(gold)
    for last in a[-1:] + b[-1:]:
        if last[:2] == ("tuple", "&"):  # a row of a function given by cases
            return letters_of(answer) == letters_of(gold) and prove(answer, gold)
    return _unordered(a, b, prove)


def _elements(node):
    """Returns the elements of a list or a set; another node as a list of one."""
    if node[0] in ("list", "set"):
        return node[1:]
    return (node,)


def _same_choice(answer, gold, prove):
    """Does the work of `_same` if one or both have a letter: (B) 15 equals B, 15 and (B) 15."""
    letter, a = parts_of(answer, "choice", "", answer)
    needed, b = parts_of(gold, "choice", "", gold)
    if letter and needed and letter != needed:
        return False
    if ("name", letter or needed) in (answer, gold):  # B
        return True
    return _same(a, b, prove)


# If one of two nodes has this kind, the function compares them. The first such kind decides.
COMPARE = dict(
    unread=_same_words,
    choice=_same_choice,
    chain=_same_chain,
    named=_same_named,
    union=_same_union,
    list=_same_list,
    set=_same_list,
    quantity=_same_quantity,
    tuple=_same_tuple,
    words=_same_words,
    relation=_same_named,
)


# --- parameters: n\pi, n\in\mathbb{Z} equals k\pi, k\in\mathbb{Z}

IN = r"\\in (\{ )?(\\mathbb)?"  # k \in \mathbbZ
# The values that a parameter may have: all integers (Z), those from 0 or from 1, or all reals (R). Natural
# numbers may begin with 0 or 1.
DOMAINS = {
    # integers k, but not positive integers k; \mathbbZ, but not \mathbbZ ^ +
    "Z": rf"(?<!tive~)\bintegers?\b|{IN}Z(?!( \}})? [\^*+]| _)",
    # \mathbbN, natural k
    "0": rf"{IN}N(?!( \}})? [\^*+])|\bnatural|non-?negative",
    # \mathbbR, real k
    "R": rf"(?<!x ){IN}R(?!( \}})? [\^*+]| _)|\breal",
    # \mathbbQ, \mathbbC
    "Q": rf"(?<!z ){IN}[QC]",
    # \mathbbN, \mathbbZ ^ +, positive k
    "1": rf"{IN}(N(?! _0)|Z(?=( \}})? [\^*+]| _))|\bnatural|\bpositive",
}
# A bound and its sign; no sign for a lower bound: k \ge 3; k = 1 , 2 , \ldots
BOUND = re.compile(r"(?:([<>]|\\[ln]eq?)|\\geq?|=(?= \d .*dots)) ?(-?\d+)\b")
CONSTANT_NAMES = set("A B C K a c k C_1 C_2 C_3 c_1 c_2 c_3".split())


def _domains(reading):
    r"""Returns which values an answer's parameter may have: its bounds, such as "3" for k\ge3 and k>2, and
    "<3" for k<3. Without bounds, the keys of DOMAINS whose patterns match."""
    bounds = set()
    for sign, bound in BOUND.findall(reading.conditions.replace("- ", "-")):
        if sign == ">":
            sign = ""
            bound = int(bound) + 1
        bounds.add(f"{sign}{bound}")
    if bounds:
        return bounds
    for name, pattern in DOMAINS.items():
        if re.search(pattern, reading.conditions):
            bounds.add(name)
    return bounds


def _declared(reading):
    """Returns the letters of an answer's conditions, such as k in `for all integers k`."""
    return {*re.findall(rf"(?<=[\s(,]){NAME}(?!\S)", reading.conditions)}


def _arguments(name, needed):
    """Returns the dict t -> x for the names f(t) and f(x)."""
    new = {}
    is_function = name[0] == needed[0] == "call" and name[1][0].isalpha()
    if is_function and len(name) == len(needed):
        for pair in zip(name, needed, strict=True):
            match pair:
                case ("name", old), ("name", letter) if not old.isupper():
                    new[old] = letter
    return new


def _renamed(answer, gold):
    """Yields the tree of `answer` with letters of `gold`, in every order. Renamed are arguments of a
    function, and up to three parameters or constants: f(t)=ct becomes f(x)=kx."""
    name, value = parts_of(answer.tree, "named", ("",), answer.tree)
    needed, gold_value = parts_of(gold.tree, "named", ("",), gold.tree)
    arguments = _arguments(name, needed)
    known = {*arguments.values()}
    ours = letters_of(value) - arguments.keys()
    theirs = letters_of(gold_value)
    if known & ours:  # f(t)=xt is not f(x)=x^2
        return
    extra = ours - theirs
    missing = theirs - ours - known
    if not extra and not arguments:
        return
    if not len(extra) == len(missing) <= 3:
        return
    declared = _declared(answer)
    # An answer that declares no parameter may use any letters but x, y, z and t.
    allowed = declared or extra - set("txyz")
    are_parameters = missing <= _declared(gold) and extra <= allowed
    if as_text(needed).partition("_")[2] in missing:  # a_n=2n
        are_parameters = False
    are_constants = missing <= CONSTANT_NAMES and extra <= CONSTANT_NAMES | declared
    if theirs.isdisjoint("xt"):
        are_constants = False
    if are_parameters or are_constants:
        for letters in permutations(missing):
            new = dict(zip(extra, letters, strict=True))
            yield with_letters(answer.tree, arguments | new)


# --- formulas that are copied from the problem

# The signs before and after a formula in the text of a problem: $5$, \(5\), \begin{align*}
FORMULA = re.compile(r"\$|\\[][()]|\\(?:begin|end)\{(?:align|equation|gather)\w*\*?\}")
SIZES = any_of("least smallest greatest largest lowest highest")
# in ascending order; in order of increasing size; from least to greatest
ORDERED = re.compile(rf"(?i)(?:creas|scend)ing order|order of (?:in|de)creas|\b{SIZES} to\b")


def _differ(*_):
    """Takes expressions for different without a look at their values."""
    return False


def repeats(answer: str, gold: str, problem: str) -> bool:
    r"""Returns whether an answer, or its value after the last =, is a formula or an equation of the problem,
    such as `\sqrt{242}` of "Simplify $\sqrt{242}$". If the answer is a list, each of its elements must be
    such a formula. A formula that is the gold answer or one of its elements, or that has it on one side, does
    not count. Also if the answer is the gold list in another order, and the problem asks for an order."""
    a = read(answer).tree
    b = read(gold).tree
    both = _elements(a), _elements(b), _differ
    if ORDERED.search(problem) and _unordered(*both) and not _ordered(*both):
        return True
    right = _formulas(b)
    known = set()
    for formula in FORMULA.split(problem):
        tree = read(formula.strip()).tree
        sides = _formulas(tree)
        if not right & sides:
            known |= sides
    return all(part in known or _last(part) in known for part in _elements(a))


def _last(node):
    """Returns the value of x=3+4=7, 7 cm and 7/1, which is 7."""
    match node:
        case ("named", _, value) | ("relation", "=", _, value) | ("/", value, ("number", 1, _)):
            return _last(value)
        case (("chain" | "quantity"), value, *_):
            return _last(value)
    return node


def _formulas(node):
    """Returns a set: a formula, and its sides and elements, if they are no plain words, names or integers.
    For x^2=5 it has x^2=5 and x^2."""
    kind, *parts = node
    if kind in ("name", "words", "unread") or is_integer(node):
        return set()
    inner = []
    if kind == "chain":
        value, steps, _ = parts
        inner = [value, *steps]
    elif kind in ("list", "set", "choice", *EQUATIONS):
        inner = inner_nodes(node)
    return {node}.union(*map(_formulas, inner))
