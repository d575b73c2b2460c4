r"""Decides whether an answer equals the gold answer.

    grade(r"\frac12", "0.5")                               # True

The file reads top-down: `tokens` splits a text into tokens, `Parser` builds a tree of them, `meaning` finds
lists, names, units and conditions in the tree, `_same` compares two trees by their kinds, and `math_equal`
compares the values of expressions. `quick_grade` does all but the last step; it returns None if that is
needed. grading/worker.py runs `grade` in processes that can be killed.

To add a command of LaTeX, write it into SIGNS or FUNCTIONS. To add a unit, write it into UNITS. To add a word
that changes a value, write it into NO_UNIT or CHANGED.

What counts as equal:

- Expressions with the same value: `\sqrt{242}` and `11\sqrt{2}`. But an unfinished calculation is wrong:
  `3+4` does not equal 7. `_unfinished` has the rules.
- An answer that can't be read as a whole, such as `3@\frac{1}{2}`, is wrong. `grade` may raise ValueError for
  such a gold answer.
- A decimal may be rounded if it differs from the other number by at most one part in a million: `0.3333333`
  equals `1/3`, `0.33` does not. Two decimals with the same number of places must be equal. Integers are
  exact. In an expression such as `1.8333333333333\pi`, an answer's decimal must be right to 12 digits, unless
  the gold answer also has a decimal.
- A percent is a hundredth: `5\%` equals 0.05, not 5.
- Numbers in other bases are not converted: `101_2` does not equal 5.
- Units are not converted. If only the gold answer has a unit, the unit is ignored: 10 equals `10 cm`.
- If only the answer has a unit, the unit must be in UNITS or a plural noun: `28 pizzas` equals 28,
  `28 halved` does not.
- If only one of the two has the letter of a choice, the letter is ignored: `(B) 15` equals `15`.
- The order counts in tuples, not in lists and sets, unless the problem asks for an order (see `repeats`).
  `\{2,2,3\}` equals `\{2,3\}`.
- An inequality in one variable is a set of numbers: `1<x<2` equals `(1,2)`. A comma, `and` and `or` between
  inequalities all mean the union. But `x\ne3` removes the point 3.
- Upper and lower case are the same in words (`Yes`, `yes`), but not in single letters.
- `x=5` and `m+n=5` equal `5`, but `x=5` equals neither `y=5` nor `x-5=0`. `x=2, y=3` equals `(2,3)`.
- A condition such as `k\in\mathbb{Z}` is ignored. If both texts have one, its letter may differ:
  `n\pi, n\in\mathbb{Z}` equals `k\pi, k\in\mathbb{Z}`.
- A formula that is copied from the problem is wrong, although it may equal the gold answer (see `repeats`).
- In `3+4=7`, each part must equal the last part, which is the answer. So `6=7` does not equal 7.
- After `\approx`, an answer that is no integer may add a number that is right within one percent:
  `\frac56\approx0.83`. A gold answer with a decimal point may equal this number: `\frac56\approx0.83` also
  equals 0.83.
"""

import re
from collections import Counter
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from html import unescape
from math import comb, factorial, prod
from typing import NamedTuple

from mpmath import mp

from configs import require
from grading.extract import plain

KINDS = ("math", "choice", "exact")


def _table(*rows):
    """Returns a dict: a word of a row -> the first word of its row. Rows end with ";"."""
    found = {}
    for row in " ".join(rows).split(";"):
        words = row.split()
        found |= dict.fromkeys(words, words[0])
    return found


# --- words: units, and words that change a value

UNITS = _table(
    "mm millimeter millimetre; cm centimeter centimetre 厘米 см; m meter metre 米 метр;",
    "km kilometer kilometre 千米 公里 км; in inch inche; ft foot feet; yd yard; mi mile;",
    "mg milligram; g gram 克; kg kilogram 千克 кг; lb pound; oz ounce; ton tonne;",
    "s sec second 秒; ms millisecond; min minute 分钟 минут; h hr hour 小时 часов;",
    "day 天 дней; week; month; yr year 岁 年 лет; l liter litre; gal gallon;",
    "ml milliliter millilitre; degree deg ° 度; radian rad; cent; euro; yuan 元;",
    "dollar usd $ долларов; mph; hz hertz; degc; degf; n newton; j joule; w watt;",
    "v volt; pa pascal; am; pm; sq square; cubic; unit; 个; 人; 种",
)
SCALES = dict(hundred=2, thousand=3, million=6, billion=9, trillion=12)
# After a number, these words and PART change its value or meaning: `10 dozen` does not equal 10.
NO_UNIT = _table(
    "not; no; or; on; if; is; are; was; be; it; at; by; more; less; fewer; than; over;",
    "under; above; below; about; least; most; between; times; plus; minus; half; halve;",
    "third; quarter; from; binary; base; ten; score; gross; dozen; lakh; crore; basis;",
    "greater; maybe; perhaps; otherwise; modulo; mod; halves; hundred; thousand",
)
PART = re.compile(
    r"(?:[^o\W]n|d|i[ef]|ix|lf|igh|ur)ths?\b|(?:illion|ward)s?\b|\b[MG](?:[WVJNg]|Hz|Pa)?\b"
)
# Only with these words, a unit of the answer alone is ignored. After a number up to 1, ONE is used.
MANY = re.compile("[a-z]{2,}s|people|children|w?o?men|sheep|fish|mice")
ONE = re.compile("[a-z]{3,}(?<!ed)(?<!ly)")
UNIT_SPELLINGS = [
    (r"(?<=[a-z]{2})s\b", ""),
    (r"\bmph\b", "mi/h"),
    (r"\bper\b", "/"),
    (r"(\w+) \^ - (\d)", r"/ \1 \2"),
    (r"\bcubic (\w+)", r"\1 3"),
    (r"\b(?:sq|square) (?:\. )?(\w+)", r"\1 2"),
    (r"\b(?:such|of|1)\b", ""),
]
TEXT_SPELLINGS = [
    (r"\b(?:an?|the|there (?:is|are)) (?=[a-z]{2})", ""),
    (r"( [a-z]{2,}[a-rt-z])s\b", r"\1"),
]
# A phrase with one of these words is no introduction of the answer: `its opposite is 7`.
CHANGED = _table(
    "not; no; never; wrong; incorrect; false; negative; minus; opposite; half; twice;",
    "double; reciprocal; inverse; more; less; most; least; bound; excluded; neither;",
    "nothing; but; except; divisible; exceeds; up",
)
CODES = _table(
    "1 is are equals answer equal; 2 for where with when if; 4 only; 5 to;",
    "3 solution solutions value values",
)
CONDITION = re.compile(r"\b(?:integers?|real|constants?|natural)\b")
BASES = "_ _ two three four five six seven eight nine ten eleven twelve".split()
BASE = re.compile(r"\(?([0-9A-F]*\d[0-9A-F]*)\)?_(\d{1,2}|[A-Za-z]{3,6})")  # 52_9


def _respelled(text, spellings):
    for pattern, new in spellings:
        text = re.sub(pattern, new, text)
    return text


# --- tokens


class Token(NamedTuple):
    """kind: 9 (number), x (name), w (word), f (function), ( (group), or the sign of an operator.
    gap: whether a space is before it. parts: the tokens inside of a group, whose text is its brackets."""

    kind: str
    text: str
    gap: bool = False
    parts: tuple = ()


SIGNS = _table(
    ", land wedge and; | lvert rvert vert mid; < lt; > gt; : colon; / div; * times cdot ast;",
    "% percent percents; frac dfrac tfrac cfrac; ≤ <= =< le leq leqslant; ≥ >= ge geq geqslant;",
    "≠ != ne neq; ° circ degree; ∅ varnothing emptyset; ∖ backslash setminus; ∪ bigcup cup;",
    "∩ bigcap cap; ∈ in; ≈ approx; ≡ equiv; ± pm; over; choose; mod pmod bmod; ^ **; sqrt;",
    "∞ infty infinity; binom dbinom tbinom; ⌊ lfloor; ⌋ rfloor; ⌈ lceil; ⌉ rceil; boxed;",
    "π pi; θ theta; φ phi varphi",
)
SIGNS |= dict.fromkeys(("lor", "vee", "or"), ";")
SPELLED = set(
    "or and percent percents infinity mod sqrt pi theta".split()
)  # also without a backslash
FUNCTIONS = _table(
    "sin; cos; tan tg; cot ctg; sec; csc; arcsin; arccos; arctan arctg; ln; log; lg; exp;",
    "gcd; lcm; max; min; det; lim; int; sum; prod",
)
OPAQUE = set("gcd lcm max min det lim int sum prod".split())
DROPPED = set(
    "displaystyle textstyle boldsymbol bm mathit mathbf mathsf mathcal bf it rm limits hat"
    " vec overrightarrow checkmark large Large underline overline bar angle triangle".split()
)
CLEANED = [
    (r"\\!\s*|\\(?:text)?color ?\{\w+\}|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-z])\.?", ""),
    (r"(?<!\\)\$([^$]*)(?<!\\)\$", r" \1 "),
    (r"(?:\\?\$|\\text\{\\\$\}) ?((?:\d|[,.](?=\d)|\\,(?=\d)|\{,\})+)", r"\1 \\text{dollars} "),
    (r"^\\text\{(euros|pounds|cents)\} ?([\d.,]+)", r"\2 \\text{\1}"),
    (r"\\\\\[[\d.]+ ?\w+\]", r"\\\\"),  # \\[4pt] ends a row
    (r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-z]))", "°"),
    (r"(?:° *|\bdegrees? )(?:\\\w+\{)? ?([CF])(?:elsius|ahrenheit)?\b\}?", r" \\text{deg\1}"),
    (r"\b([ap])\. ?m\b\.?", r"\1m"),
    (r"(?<=\d)(?:st|nd|rd|th)\b", ""),  # July 4th
    (r"\{(:|,(?=\}\d{3}))\}", r"\1"),  # 7{:}45 and 1{,}234
    (r"(?<=[\d}]) ?(?:\\text\{ ?)?to ?\}? ?(?=[\d\\])", ":"),  # 3 to 4
    (r"\bper cent\b", "%"),
    (r"\\mathbb ?\{? ?([A-Z]) ?\}?", r" \\set\1 "),
    (r"\\q?quad *(?=\(|[a-z] ?\\in)", ","),
    (r"^(.*[tux].*)\+ ?[cK]$", r"\1+C"),  # the constant of an integral
    (r"(?<=\b[A-Z]) (?=[A-Z]\b)", ""),  # \angle A B C
    (r"(hours?|minutes?|feet),? and (?=\}? ?\d)", r"\1 "),
    (r"(\d*\.\d*)\\(?:overline|bar|dot) ?\{?(\d+)\}?", r"\1r\2"),  # 0.1\overline{6} becomes 0.1r6
    (r"(?<=\d\.)\((\d+)\)$|(?<=\d\.\d)\((\d+)\)$", r"r\1\2"),  # 0.(3)
    (r"(?<![\d.])(\d+) +(\d+)/(\d+)(?!\.?\d)", r"\1\\frac{\2}{\3}"),  # 4 2/3
    (r"\](?=[^][(),;]+[,;][^][(),;]+[][])", "("),  # ]0,1[ is (0,1)
    (r"(?<=[^][(])\[(?=$|\\c[ua]p(?![a-z]))", ")"),
]
# In (1,234) the comma separates two numbers. In 1,234 and in the argument {1,234}, it separates thousands.
GROUPED = re.compile(
    r"(?<=[A-Za-z^}]\{)\d{1,3}(?:,\d{3})+(?=\})"
    r"|(?<![\d.,(\[{])\d{1,3}(?:,\d{3})+(?![\d,)\]}\\])"
    r"|(?<![\d.,])\d{1,3}(?:(?:\\[ ,;:]|[ ~])\d{3})+(?!\d)"
)
DELIMITED = re.compile(
    r"\$\$(.+)\$\$|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]|\*\*(.+)\*\*"
    r"|`(.+)`|\\(?:boxed|fbox) ?\{(.+)\}",
    re.DOTALL,
)
TOKEN = re.compile(
    r"""(?P<space> [\s~]+ | \\q?quad(?![a-z]) | \\[,;:\ ] | \\[()[\]])
    | (?P<open> (?P<text> \\(?:text\w*|mbox|mathrm|operatorname\*?)\s*\{)
        | \\begin\s*\{\w+\*?\}(?:\{[lcr|]*\})? | \\\{ | \\lbrace(?![a-z]) | \\langle(?![a-z]) | [([{])
    | (?P<close> \\end\s*\{\w+\*?\} | \\\} | \\rbrace(?![a-z]) | \\rangle(?![a-z]) | [)\]}])
    | (?P<number> (?:\d*\.\d+ | \d*\.(?=r\d) | \d+\.(?=/) | \d+)(?:r\d+ | [eE][+-]?\d{1,3}(?!\d))?)
    | (?P<letters> \\?[^\W\d_]+) | (?P<sign> [<>!]= | =< | \*\* | \\. | .)""",
    re.VERBOSE | re.DOTALL,
)
BRACKETS = {r"\langle": "(", r"\rangle": ")", r"\lbrace": r"\{", r"\rbrace": "}"}
DEPTH = 12  # a text with more brackets inside of brackets is not read


class Unread(Exception):
    """Raised for a text that the grammar can't read as a whole, such as `3@2`."""


def tokens(text: str) -> list[Token]:
    """Returns the tokens of a text. Raises Unread if brackets are nested more than DEPTH times."""
    text = text.strip()
    while match := DELIMITED.fullmatch(text.rstrip(".")):
        text = match[match.lastindex].strip()
    text = _respelled(plain(text), CLEANED)
    text = GROUPED.sub(lambda found: re.sub(r"\D", "", found[0]), text).rstrip(" .,;\\")
    levels, opened, gap = [[]], [], False
    for match in TOKEN.finditer(text):
        if match["space"]:
            gap = True
            continue
        if match["open"]:
            opened.append(("text" if match["text"] else match[0], gap))
            levels.append([])
        elif match["close"] and opened:
            _close(levels, opened, match[0])
        else:
            in_text = any(bracket == "text" for bracket, _ in opened)
            levels[-1] += _token(match, in_text, gap)
        gap = gap and bool(match["text"])
        if len(levels) > DEPTH:
            raise Unread
    while opened:
        _close(levels, opened, "")
    return levels[0]


def _close(levels, opened, end):
    r"""Makes a group of the tokens since the last open bracket. \text{}, (cm) and (mod 7) are no groups."""
    inside = levels.pop()
    start, gap = opened.pop()
    while inside and inside[-1].text == ".":
        inside.pop()
    unit = len(inside) == 1 and inside[0].kind == "w" and (levels[-1] or len(inside[0].text) > 1)
    spliced = unit or levels[-1] and inside and inside[0].kind == "mod"
    if start == "text" or spliced:
        levels[-1] += inside
        return
    start = re.sub(r"\s|\{[lcr|]*\}$|\*", "", BRACKETS.get(start, start)).replace("array", "matrix")
    levels[-1].append(Token("(", start + BRACKETS.get(end, end[-1:]), gap, tuple(inside)))


def _token(match, in_text, gap):
    """Returns the tokens of one match of TOKEN."""
    piece = match[0]
    name = piece.lstrip("\\")
    low = name.lower() if piece == name else name
    if match["number"]:
        return [Token("9", piece, gap)]
    if name in DROPPED and piece != name:
        return []
    if name in FUNCTIONS and (piece != name or name not in OPAQUE and name != "sec"):
        return [Token("f", FUNCTIONS[name], gap)]
    if match["letters"] and piece == low and low not in SPELLED or piece == name != low:
        return _letters(match, in_text, gap)
    if piece == r"\Omega" or name == "$":
        return [Token("w", {"$": "$"}.get(name, "ohms"), gap)]
    sign = SIGNS.get(low, piece if piece in (r"\\", r"\&") else name)
    letter = unescape(f"&{name};") if sign == name and len(name) > 1 else sign
    if re.fullmatch("set[A-Z]", name) or len(letter) == 1 and letter.isalpha():
        return [Token("x", name if name[:3] == "set" else letter, gap)]
    return [Token(sign, sign, gap)]


def _letters(match, in_text, gap):
    """Decides what letters mean: a word such as `meters`, or the variables x and y of `xy`."""
    run = match[0]
    if in_text and run in ("e", "i", "d") or len(run) == 1 and "α" <= run <= "ω":
        return [Token("x", run, gap)]
    if in_text or not run.isascii() or _is_word(run, match.string, match.start(), match.end()):
        return [Token("w", run, gap)]
    if run.isupper():
        return [Token("x", run, gap)]
    return [Token("x", letter, gap and i == 0) for i, letter in enumerate(run)]


def _is_word(run, text, start, end):
    r"""Returns whether letters outside of \text{} are a word."""
    before, after = text[max(start - 2, 0) : start], text[end : end + 3]
    unit = re.sub(r"(?<=..)s$", "", run.lower()) in UNITS
    if unit and len(run) > 1:
        return bool(re.search(r"[\d })°]$", before))
    if unit:  # 5 m, but not 2x m, 2 n or 2 s+t
        far = re.search(r"[\d})] $", before) and not re.search("[A-Za-z]", text[:start])
        return bool(far) and run not in "njvwNJVW" and not re.match(r" ?[-+(]| [a-z]\b", after)
    if (
        re.search("[a-z][A-Z]", run)
        or re.search(r"[\w^})\\]$", before)
        or re.match("[-^_+=/]", after)
    ):
        return False
    return len(run) > 2 or run.lower() in NO_UNIT or run in ("an", "of", "as", "to")


def spell(tokens: list[Token]) -> str:
    """Returns the text of tokens without spaces and braces."""
    found = ""
    for token in tokens:
        inside = spell(token.parts)
        if token.kind == "(" and token.text != "{}":
            inside = f"{token.text[:-1]}{inside}{token.text[-1]}"
        found += inside or token.text.strip("{}")
    return found


# --- the tree


class Number(NamedTuple):
    value: Fraction
    places: int | None = None  # number of digits after the decimal point; None for an exact number


class Node(NamedTuple):
    """A node of the tree.

    kind        parts, and value
    num         none; a Number
    x           none; a variable or a constant, such as x_1, π or ∞
    text        none; words in lower case
    + * / ^     the operands. A difference is a sum with a "neg"
    neg ! % °   the operand; also abs, floor, ceil, and functions such as sin
    root binom  the operand and its degree; n and k
    opaque      none; the text of an integral, a sum, a maximum, ...
    ( {         the elements. The value of "(" is its brackets, "=" for x=1, y=2, the shape of a matrix,
                or "mod 7"
    , ; :       the elements of a list, the terms of a ratio
    ∪ ∩ ∖       the sets
    =           before `meaning`: the sides; the signs between them
    <           the sides of an inequality in one variable; the signs
    equation    the sides; the sign
    chain       the parts of 3+4=7≈7.0; the index of the value 7
    named       the value of x=5, and its left side if that is no system; the name
    unit        the value of 5 cm; the words of the unit, and whether it looks like a unit
    given       none; a condition such as k∈Z
    unread      none; a text that the grammar can't read"""

    kind: str
    parts: tuple = ()
    value: object = None


def num(value, places: int | None = None) -> Node:
    return Node("num", (), Number(Fraction(value), places))


def var(name: str) -> Node:
    return Node("x", (), name)


# How strongly a token binds what follows to what is before. 9 is also the level of a factor: 2x.
LEVELS = {
    **dict.fromkeys([";", r"\\", "over", "choose"], 1),
    **dict.fromkeys(",&", 2),
    **dict.fromkeys("=≈≡∈<>≤≥≠", 4),
    **dict.fromkeys(["∪", "∩", "∖", "mod"], 5),
    **{":": 6, "w": 7, "+": 8, "-": 8, "±": 8},
    **dict.fromkeys(["frac", "binom", "sqrt", *"*/9xf(√|⌊⌈∞"], 9),
    **dict.fromkeys("^!%°", 10),
}
EXPRESSIONS = {
    *"+*/^!%°±",
    *"num x neg abs floor ceil root binom opaque".split(),
    *FUNCTIONS.values(),
}
EXPRESSIONS |= {"arcsin", "arccos", "arctan"}
ZERO, TWO, TEN = num(0), num(2), num(10)
END = Token("end", "")


class Parser:
    """Reads tokens by the precedence of their operators (Pratt's method)."""

    def __init__(self, tokens):
        self.all = [*tokens, END]
        self.at = 0
        self.bars = False

    @property
    def next(self):
        return self.all[self.at]

    def take(self, *kinds):
        """Returns the next token and goes on; None if it has none of these kinds."""
        if kinds and self.next.kind not in kinds or self.next is END:
            return None
        self.at += 1
        return self.all[self.at - 1]

    def until(self, level):
        """Returns the tokens before the next operator that binds no stronger than `level`."""
        start = self.at
        while self.next is not END and not 0 < LEVELS.get(self.next.kind, 9) <= level:
            self.at += 1
        return self.all[start : self.at]

    def whole(self):
        node = self.parse()
        if self.next is not END:
            raise Unread
        return node

    def parse(self, power=0):
        """Reads the operators that bind stronger than `power`."""
        start = self.at
        left = self.first()
        while LEVELS.get(self.next.kind, 0) > power and not (self.bars and self.next.kind == "|"):
            if self.next.kind == "w":
                left = self.words(left, start)
            elif LEVELS[self.next.kind] == 9 and self.next.kind not in "*/":
                left = self.factor(left)
            else:
                left = self.operator(left)
        return left

    def operator(self, left):
        kind = self.take().kind
        level = LEVELS[kind]
        if kind == "^":
            return Node("^", (left, self.argument(whole=True)))
        if level == 10:
            return Node(kind, (left,))
        if level <= 2 and self.next.kind in ("end", ",", ";", r"\\"):
            return left  # a separator at the end, or before another one
        if kind == "mod":
            return Node("(", (left,), f"mod {spell(self.until(0))}")
        right = self.parse(level)
        if kind == "-" and left.value == "setR":
            kind = "∖"
        elif kind == "-":
            kind, right = "+", Node("neg", (right,))
        if level == 4:
            return merged("=", left, right, kind)
        if kind in ("/", "±", "∖", "over", "choose"):
            return Node({"over": "/", "choose": "binom"}.get(kind, kind), (left, right))
        return merged(kind, left, right)

    def factor(self, left):
        token = self.next
        right = self.parse(9)
        if right.kind == "given":
            return left
        if right.kind == "(" and "matrix" in right.value:
            return scaled(left, right)
        if right.kind == "(" and left.kind == "x" and left.value.isupper():  # the point A(1,2)
            return Node("=", (left, right), "=")
        digits = token.kind == "9" or token.text == "{}" and token.parts[0].kind == "9"
        last = left.parts[-1] if left.kind == "*" else left
        if digits and last.kind == "num" or not {left.kind, right.kind} <= EXPRESSIONS:
            raise Unread  # 7 5 and 7{5}
        return merged("*", left, right)

    def first(self):
        """Reads an operand."""
        token = self.take()
        kind = token.kind if token else "end"
        if kind in ("+", "-", "±"):
            inside = self.parse(8)
            if kind == "-" and inside.kind == "(":
                return scaled(num(-1), inside)
            return {"+": inside, "-": Node("neg", (inside,)), "±": Node("±", (ZERO, inside))}[kind]
        if kind == "9":
            return self.number(token.text)
        if kind == "x":
            return self.name(token.text)
        if kind == "(":
            return bracket(token)
        if kind == "f":
            return self.function(token.text)
        if kind == "w":
            self.at -= 1
            return text_node(self.until(4))
        if kind in ("frac", "binom"):
            return Node("/" if kind == "frac" else kind, (self.argument(), self.argument()))
        if kind in ("sqrt", "√"):
            index = bracket(self.take()).parts[0] if self.next.text == "[]" else TWO
            return Node("root", (self.argument(whole=kind == "√"), index))
        if kind in ("∞", "∅"):
            return INFINITY if kind == "∞" else Node("{")
        if kind not in CLOSED:
            raise Unread
        self.bars = kind == "|"
        inside = self.parse(7)
        self.bars = False
        if not self.take(CLOSED[kind][0]):
            raise Unread
        return Node(CLOSED[kind][1], (inside,))

    def argument(self, whole=False):
        r"""Reads the argument of a command: a group, or one character such as the 1 of \frac12. whole: the
        argument may be a number of several digits."""
        token = self.next
        if token.kind == "9" and not whole and len(token.text) > 1:
            self.all[self.at] = Token("9", token.text[1:])
            return decimal(token.text[0])
        sign = self.take("-", "+") if whole else None
        inside = self.first()
        return Node("neg", (inside,)) if sign and sign.kind == "-" else inside

    def number(self, text):
        start = self.at
        if text.isdecimal() and self.take("frac"):
            self.at = start
            part = number(self.first())
            if part and 0 < part.value < 1:  # 4\frac23
                return num(int(text) + part.value)
            self.at = start
        return decimal(text)

    def name(self, text):
        if self.take("_"):
            index = [self.take() or END]
            if text == "C" and self.take("^"):  # C_5^2
                return Node("binom", (Parser(index).whole(), self.argument(whole=True)))
            text += "_" + spell(index)
        while self.take("'"):
            text += "'"
        group = self.next.kind == "(" and self.next.text != "{}" and not self.next.gap
        point = text.isupper() and any(t.kind == "," for t in self.next.parts)
        if group and text[0] in "fgFGPEQ" and not point:
            text += spell([self.take()])  # f(x)
        return var(text)

    def function(self, fn):
        if fn in OPAQUE:
            return Node("opaque", (), fn + spell(self.until(4)))
        scripts = {}
        while sign := self.take("^", "_"):
            scripts[sign.kind] = self.argument(whole=sign.kind == "^")
        if self.next.kind == "(" and self.next.text[0] in "({":
            node = self.first()
        else:
            node = self.parse(9)
            while LEVELS.get(self.next.kind) == 9 and self.next.kind not in "f*/|":
                node = merged("*", node, self.parse(9))
        power, index = scripts.get("^"), TEN if fn == "lg" else scripts.get("_")
        if power == Node("neg", (num(1),)):
            return Node("arc" + fn, (node,))
        call = Node("log" if fn == "lg" else fn, (node, index) if index else (node,))
        return Node("^", (call, power)) if power else call

    def words(self, left, start):
        """Reads the words after a value: its unit, or a condition such as `for x>0`."""
        low = self.next.text.lower()
        if CODES.get(low) == "2":
            self.until(2)
            return left
        words = self.until(4)
        if low in SCALES:
            left = merged("*", left, Node("^", (TEN, num(SCALES[low]))))
            words = words[1:]
        if left.kind == "x" and CONDITION.search(" ".join(t.text for t in words)):
            return Node("given")
        found = quantity(left, words) if words else left
        return found or text_node(self.all[start : self.at])


CLOSED = {"|": ("|", "abs"), "⌊": ("⌋", "floor"), "⌈": ("⌉", "ceil")}
INFINITY = var("∞")


def merged(kind: str, left: Node, right: Node, sign: str = "") -> Node:
    """Returns a node of `kind`. If `left` is one, `right` becomes its last part."""
    if left.kind == kind:
        return Node(kind, (*left.parts, right), (left.value or "") + sign or None)
    return Node(kind, (left, right), sign or None)


def scaled(factor: Node, matrix: Node) -> Node:
    """Returns a number times a matrix."""
    found = []
    for part in matrix.parts:
        a, b = number(factor), number(part)
        found.append(num(a.value * b.value) if a and b else merged("*", factor, part))
    return matrix._replace(parts=tuple(found))


def decimal(text: str) -> Node:
    """Returns the node of a decimal number: 1.5, 3e4, or 0.1r6 for 0.1666..."""
    if not text.isascii() or len(text) > 300:
        raise Unread
    digits, _, repeated = text.partition("r")
    digits, _, power = digits.lower().partition("e")
    places = len(digits.partition(".")[2])
    value = Fraction(f"0{digits}0e{power or 0}" if "." in digits else f"{digits}e{power or 0}")
    if repeated:
        return num(value + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10**places))
    return num(value, max(places - int(power or 0), 0) if places else None)


def text_node(tokens: list[Token]) -> Node:
    """Returns the node of a text: its words in lower case, without articles and plural s."""
    found, word = "", True
    for token in tokens:
        found += " " * (token.gap or word or token.kind == "w") + spell([token])
        word = token.kind == "w"
    found = found.strip()
    if len(tokens) == 1 and (len(found) == 1 or found.isupper()):
        return var(found)
    found = _respelled(found.casefold(), TEXT_SPELLINGS)
    if re.fullmatch("all real(?: number)?s?", found):
        return var("setR")
    return Node("{") if found == "empty set" else Node("text", (), found)


def quantity(value: Node, words: list[Token]) -> Node | None:
    """Returns a value with its unit; None if one of the words is no part of a unit. The node's value is the
    unit, and whether it looks like one."""
    flat = [t for token in words for t in token.parts or [token]]
    text = " ".join(t.text for t in flat)
    names = re.findall(r"[^\W\d_]+|[$°]", text)
    lower = [name.lower() for name in names]
    bad = {n.removesuffix(s) for n in lower for s in ("", "s")} & NO_UNIT.keys() or PART.search(
        text
    )
    strange = any(t.kind not in "w9/*^-." and t.text not in UNITS for t in flat)
    if bad or strange or not 0 < len(names) < 5 or value.kind not in EXPRESSIONS | {":"}:
        return None
    noun = ONE if (n := number(value)) and abs(n.value) <= 1 else MANY
    free = text[:6] == "choice" or any(
        noun.fullmatch(n) or n.removesuffix("s") in UNITS for n in lower
    )
    spelled = re.findall(r"\w+|[/$°]", _respelled(text.lower(), UNIT_SPELLINGS))
    return Node("unit", (value,), (tuple(UNITS.get(word, word) for word in spelled), free))


def bracket(token: Token) -> Node:
    """Reads a group."""
    text, inside = token.text, token.parts
    if text[:2] == r"\b":
        return _environment(text, inside)
    if text[0] == "\\":
        return _set(inside)
    node = Parser(inside).whole()
    if text[0] == "{" or node.kind == "(" and node.value[:3] != "mod":
        return node
    if node.kind in (",", ";"):
        return Node("(", node.parts, text)
    if text[0] == "[":
        return Node("floor", (node,))
    return Node("given") if node.kind in ("given", "text", "=") else node


def _environment(text, inside):
    """Reads a matrix as its cells, with its shape, and a system of equations as a list."""
    if "matrix" not in text or any(t.kind == "=" for t in inside):
        rows = [Token(",", ",") if t.kind == r"\\" else t for t in inside if t.kind != "&"]
        return Parser(rows).whole()
    node = Parser(inside).whole()
    rows = [
        row.parts if row.kind == "&" else (row,)
        for row in (node.parts if node.kind == r"\\" else (node,))
    ]
    shape = re.sub(r"\W|begin|[pbB](?=m)", "", text)
    return Node("(", sum(rows, ()), f"{shape} {[len(row) for row in rows]}")


def _set(inside):
    r"""Reads \{1,2\}, \{x \mid x>2\} and \{2k \mid k\in\mathbb{Z}\}."""
    for i, token in enumerate(inside[1:-1], 1):
        if token.kind in ("|", ":") and inside[0].kind != "|":
            head, rest = (Parser(part).whole() for part in (inside[:i], inside[i + 1 :]))
            if head.kind == "=" and head.parts[1] != var("setR"):
                raise Unread
            return rest if head.kind in ("x", "=", "(") else head
    if not inside:
        return Node("{")
    node = Parser(inside).whole()
    if node.kind == "=":
        raise Unread
    return Node("{", node.parts if node.kind in (",", ";") else (node,))


# --- meaning

REALS = Node("(", (Node("neg", (INFINITY,)), INFINITY), "()")
DOMAIN = re.compile(r"(?:set)?[ZNQR](?:[_^].*)?")
INTRODUCTION = re.compile(r"[=≈:]+|[wx3]{0,12}15?[:=]*(?=[^=])|w[wx]{0,9}:(?=.)")


@lru_cache(4096)
def read(text: str) -> Node:
    """Returns the tree of an answer. Its kind is "unread" if the grammar can't read the whole text."""
    try:
        return meaning(Parser(introduced(tokens(text))).whole())
    except (Unread, RecursionError, ValueError, IndexError, ZeroDivisionError):
        return Node("unread", (), "".join(text.split()))


def introduced(found: list[Token]) -> list[Token]:
    """Drops the introduction `The value of x is`. Turns `hours: 3` into `3 hours`, and `(B) 15` into 15 with
    the unit `choiceB`."""
    if match := BASE.fullmatch(spell(found)):
        base = BASES.index(match[2].lower()) if match[2].lower() in BASES else match[2]
        return [Token("w", f"{match[1].lstrip('0')}base{base}")]
    code = ""
    for t in found:
        word = CODES.get(t.text.lower(), "n" if t.text.lower() in CHANGED else "w")
        code += word if t.kind == "w" else t.kind[0]
    if match := INTRODUCTION.match(code):
        rest = found[match.end() :]
        if match.end() == 2 and found[0].text.lower().endswith("s"):
            return [*rest, found[0]]
        return introduced(rest) if rest else found
    if match := re.search(r"(?<=.)(?:1[w4]*3|4)$", code):
        return found[: match.start()]
    if re.fullmatch(r"w+\(|b\(", code) and (
        code[0] == "b" or any(t.kind == "," for t in found[-1].parts)
    ):
        return list(found[-1].parts) if code[0] == "b" else found[-1:]  # center (5,-3); \boxed{5
    letter = spell(found[:1]).strip("()")
    rest = found[1:] if found[0].text == "()" else found[2:] if re.match(r"[xw][.)].", code) else []
    if rest and len(letter) == 1 and letter.isupper() and rest[0].kind not in ",;+":
        if rest[0].gap or rest[0].kind == "9":
            return [*rest, Token("w", f"choice{letter}")]
    return found


def meaning(node: Node) -> Node:
    """Returns a tree with the meaning of lists and relations: without conditions, with the elements of 1±2,
    and with names."""
    kind, parts, value = node
    if value == "setR":
        return REALS
    inner = parts[0] if kind == "neg" else node
    if inner.kind == "°":
        value = Node("neg", inner.parts) if kind == "neg" else inner.parts[0]
        return Node("unit", (value,), (("degree",), True))
    if kind in EXPRESSIONS:
        signs = sum(n.kind == "±" for n in walk(node))
        if signs > 1:
            raise Unread
        return Node(",", tuple(_with_sign(node, sign) for sign in "+-")) if signs else node
    parts = tuple(meaning(part) for part in parts)
    if kind == "=":
        return _relation(parts, value)
    if kind not in (",", ";", "{"):
        return node._replace(parts=parts)
    found = []
    for part in parts:
        found += part.parts if part.kind == "," else [part]
    letters = set()
    for part in found:
        letters |= variables(part) if part.kind in EXPRESSIONS or part.kind == "equation" else set()
    found = [part for part in found if not _is_condition(part, letters, len(found))]
    if kind == "{":
        return Node("{", tuple(dict.fromkeys(found)))
    return _system(found) if len(found) > 1 else found[0]


def _is_condition(node, letters, count):
    """Returns whether an element of a list is a condition, such as k∈Z, or x≠1 beside an expression in x."""
    if node.kind == "named" and node.parts[0] == REALS:
        return count > 1
    if node.kind == "text":
        return node.value[1:2] == " " and CONDITION.search(node.value) is not None
    return node.kind == "given" or node.kind == "<" and bool(variables(node) & letters)


def _with_sign(node, sign):
    parts = tuple(_with_sign(part, sign) for part in node.parts)
    if node.kind != "±":
        return node._replace(parts=parts)
    right = parts[1] if sign == "+" else Node("neg", parts[1:])
    return right if parts[0] == ZERO else Node("+", (parts[0], right))


def _system(found):
    """Returns a list as one node. x=1, x=2 becomes x with the list 1, 2. x=1, y=2 becomes (x,y)=(1,2)."""
    names = sorted(
        {part.value for part in found if part.kind == "named"}, key=lambda n: (not n.isascii(), n)
    )
    if not names or any(part.kind != "named" for part in found):
        return Node(",", tuple(found))
    found = sorted(found, key=lambda part: names.index(part.value))
    bare = {re.sub(r"(?<=[kmtxyz])_[\d,]+$", "", name) for name in names}
    values = tuple(part.parts[0] for part in found)
    if len(bare) == 1:
        values = sum((v.parts if v.kind == "," else (v,) for v in values), ())
        return Node("named", (Node(",", values, "=" if len(names) > 1 else None),), bare.pop())
    if len(names) == len(found):
        return Node("named", (Node("(", values, "="),), f"({','.join(names)})")
    return Node(",", tuple(found))


def _relation(parts, signs):
    """Returns x=5 as 5 with the name x; 3+4=7 as a chain; x<5 as a set; other relations as equations."""
    first, last = parts[0], parts[-1]
    if set(signs) & set("<>≤≥≠"):
        free = [part for part in parts if variables(part)]
        inside = (
            free[0].parts[0] if free and free[0].kind in ("abs", "neg") else (free or [ZERO])[0]
        )
        return Node("<" if len(free) == 1 and inside.kind == "x" else "equation", parts, signs)
    if signs == "∈" and last.kind == "x" and last.value != "setR" and DOMAIN.fullmatch(last.value):
        return Node("given")
    name = _name(first)
    if (
        name
        and len(parts) > 2
        and "≈" not in signs
        and all(part.kind == "x" for part in parts[:-1])
    ):
        return _system([Node("named", (last,), part.value) for part in parts[:-1]])  # x=y=2
    if name:
        rest = last if len(parts) == 2 else _relation(parts[1:], signs[1:])
        return Node("named", (rest, first), name)
    if not any(map(variables, parts)):
        return Node("chain", parts, [*signs, "≈"].index("≈"))
    if len(parts) > 2:
        raise Unread
    return Node("equation", parts, signs)


def _name(node):
    """Returns the name that a left side is, such as x, f(x), |AB|, AB:CD, (x,y) or m+n; None for the left
    side of an equation to solve, such as 2x or x^2."""
    kind, parts, value = node
    if kind in ("x", "text"):
        return None if {*value.casefold().split()} & (CHANGED.keys() | {"π", "∞"}) else value
    if kind in (":", "/", "("):
        names = [_name(part) for part in parts]
        text = None if None in names else ":".join(names)
        return f"({text.replace(':', ',')})" if text and kind == "(" else text
    letters = variables(node)
    if "".join(sorted(letters)) == "not" or not letters:
        return None
    total = kind in ("+", "*") and len(letters) > 1
    shape = kind == "floor" and len(min(letters)) > 1 or kind in ("sin", "cos", "tan", "cot", "abs")
    return (
        key(node)
        if total or shape or key(node) in ("^None(σ 2)", "^None(A -1)", "^None(f -1)")
        else None
    )


# --- numbers


@lru_cache(4096)
def number(node: Node) -> Number | None:
    """Returns the Number of a decimal, fraction, mixed number or percent; None for any other node, also for a
    fraction whose value is an integer, such as 84/2."""
    kind, parts, value = node
    if kind == "num":
        return value
    inside = [number(part) for part in parts]
    if kind == "+" and len(parts) == 2 and key(parts[1]) in ("*(0 i)", "neg(*(0 i))"):  # 5+0i
        return inside[0]
    if not parts or not all(inside):
        return None
    (first, places), last = inside[0], inside[-1]
    if kind == "neg" and parts[0].kind != "neg":
        return Number(-first, places)
    if kind == "%":
        return Number(
            first / 100, places + 2 if places is not None else 2 if parts[0].kind == "num" else None
        )
    if kind == "^" and parts[0] == TEN and is_integer(last) and abs(last.value) < 400:
        return Number(Fraction(10) ** int(last.value))
    if kind == "*" and len(parts) == 2 and parts[1].kind == "^" and parts[0].kind == "num":
        return Number(first * last.value, None if places is None else 0)
    if kind in ("/", ":") and len(parts) == 2 and all(map(is_integer, inside)) and last.value:
        found = first / last.value
        if found.denominator > 1 and (kind == "/" or found.denominator == last.value):
            return Number(found)
    return None


def is_integer(found: Number | None) -> bool:
    return bool(found) and found.places is None and found.value.denominator == 1


def walk(node: Node):
    """Yields a node and all nodes below it."""
    yield node
    for part in node.parts:
        yield from walk(part)


def variables(node: Node) -> set[str]:
    found = {n.value for n in walk(node) if n.kind == "x"}
    return found - ({"e", "π", "∞"} if "j" in found else {"e", "i", "π", "∞"})


def has_decimal(node: Node) -> bool:
    return any(n.kind == "num" and n.value.places is not None for n in walk(node))


def key(node: Node) -> str:
    """Returns a text that is the same for x^2-9 and -9+x^2."""
    kind, parts, value = node
    if kind in ("num", "neg") and (found := number(node)):
        return str(found.value)
    if kind == "x":
        return value
    if kind == "named" and len(parts) > 1:
        kind, value = "equation", "="
    keys = [key(part) for part in parts]
    if kind in ("+", "*", "equation"):
        keys = sorted(k for k in keys if kind != "*" or k != "1")
    if len(keys) == 1 and kind in "+*" or kind == "^" and keys[1] == "1":
        return keys[0]
    return f"{kind}{'' if kind in ('*', 'neg') else value}({' '.join(keys)})"


# --- equality


def grade(answer: str, gold: str, kind: str = "math") -> bool:
    r"""Returns whether `answer` equals `gold`. The three kinds:

        math      equality as described at the top of this file
        choice    equal letters; D, d, (D), D. and \text{D} are the same letter
        exact     equal texts, apart from spaces at the ends

    Raises UserError for an unknown kind, and ValueError for a gold answer that can't be parsed. Runs in this
    process and has no deadline. Grade untrusted answers with grading.worker.Grader instead."""
    return bool(quick_grade(answer, gold, kind, math_equal))


def quick_grade(answer: str, gold: str, kind: str = "math", prove=lambda *_: None) -> bool | None:
    """Returns what `grade` returns, or None if that depends on the value of an expression. If `prove` is
    given, it compares such expressions (see `_same`). Raises UserError for an unknown kind."""
    require(kind in KINDS, f"answer kind {kind!r} is unknown", f"one of {', '.join(KINDS)}")
    answer, gold = answer.strip(), gold.strip()
    if not answer or not gold or answer == gold or kind == "exact":
        return bool(answer) and answer == gold
    b = read(gold)
    a = read(answer.replace(",", ", ") if b.kind == "," else answer)  # 45,135 may be two numbers
    letter = _letter(b)
    chosen = letter is not None and _letter(a) == letter
    if kind == "choice" or chosen and b.kind != "unit" and letter in answer and letter in gold:
        return chosen
    same = _same(a, b, prove)
    ours, theirs = (PARAMETER.search(text) for text in (answer, gold))
    if same is False and ours and theirs and ours[1] != theirs[1]:
        renamed = re.sub(rf"(\\[a-z]+)|{ours[1]}", lambda found: found[1] or theirs[1], answer)
        return quick_grade(renamed, gold, kind, prove)
    return same


# Finds the parameter n of 2\pi n, n\in\mathbb{Z}. The gold answer may use another letter for its parameter.
PARAMETER = re.compile(r"(?<![a-z\\])([a-z]) ?\\in ?\{?(?:\\mathbb ?\{?)?[ZN]")


def _letter(node):
    """Returns the letter of the choice that a node is or has; None if it has no letter."""
    if node.kind == ":":
        return _letter(node.parts[0])
    text = node.value[0][0] if node.kind == "unit" else node.value
    pattern = r"choice([a-z])" if node.kind == "unit" else r"(?:(?:choice|option) ?)?\(?([a-z])\)?"
    match = re.fullmatch(pattern, text.lower()) if node.kind in ("unit", "text", "x") else None
    return match and match[1].upper()


def _same(answer, gold, prove):
    """Returns whether two nodes are equal. prove(answer, gold) compares two expressions, equations or sets.
    It returns None if it can't decide. `_same` returns None if such a pair matters."""
    kinds = {answer.kind, gold.kind}
    if answer == gold or "unread" in kinds:
        return answer == gold or gold.kind == "unread" and prove(answer, gold)
    for kind, compare in (("chain", _same_chain), ("named", _same_named), ("unit", _same_unit)):
        if kind in kinds:
            return compare(answer, gold, prove)
    a, b = number(answer), number(gold)
    if a and b:
        return _same_number(a, b)
    system = "=" in (answer.value, gold.value) and kinds == {"(", ","}
    if system or len(kinds) == 1 and kinds <= {"(", ":"}:
        return _same_tuple(answer, gold, prove)
    elements = [n for node in (answer, gold) for n in (node, *node.parts)]
    if any(n.kind in SETS or n == REALS for n in elements) and "equation" not in kinds:
        return prove(answer, gold)
    if kinds & {",", "{"}:
        return _unordered(
            *(n.parts if n.kind in (",", "{") else (n,) for n in (answer, gold)), prove
        )
    if "text" in kinds and kinds <= {"text", "x"}:
        a, b = answer.value.casefold(), gold.value.casefold()
        return a == b and len(a) > 1
    comparable = kinds == {"equation"} or kinds <= EXPRESSIONS and not b
    return comparable and not _unfinished(answer, gold) and prove(answer, gold)


SETS = {"<", "∪", "∩", "∖"}


def _unwrapped(node, kind, empty):
    """Returns the value and the first part of a node of this kind; `empty` and the node itself for others."""
    return (node.value, node.parts[0]) if node.kind == kind else (empty, node)


def _same_named(answer, gold, prove):
    """Does the work of `_same` if one or both nodes have a name: x=5 equals 5 and x=5, but not y=5."""
    (name, a), (needed, b) = (_unwrapped(n, "named", "") for n in (answer, gold))
    if "<" in (a.kind, b.kind):
        return prove(answer, gold)
    # The name x may stand for x_1, and x_1 for x. But x_2 is not x_1.
    bare = [re.sub(r"(?:_[\w,+-]+|\(.*\))+$", "", text) for text in (name, needed)]
    other = name and needed and name not in (needed, bare[1]) and bare[0] != needed
    calls = [re.fullmatch(r"[A-Za-z]\(([a-z])\)", text) for text in (name, needed)]
    if other and all(calls) and bare[0] == bare[1]:  # f(t)=2t equals f(x)=2x
        return _same(_renamed(a, calls[0][1], calls[1][1]), b, prove)
    # The gold answer x+y=5 may be a line, and y=2x a curve: y-2x=0 is right. But x-5=0 must still be solved.
    equations = [
        Node("equation", n.parts[::-1], "=") if n.kind == "named" else n for n in (answer, gold)
    ]
    solved = all(n.kind == "equation" and len(n.parts) == 2 for n in equations)
    total = len(gold.parts) == 2 and needed and gold.parts[1].kind in ("+", "*")
    letters = variables(b)
    curve = total or not needed or letters and letters | {needed} <= set("Ctxyz")
    if total or other or "equation" in (a.kind, b.kind):
        return bool(curve and solved) and _same(*equations, prove)
    return _same(a, b, prove)


def _renamed(node, old, new):
    """Exchanges two names in a tree."""
    parts = tuple(_renamed(part, old, new) for part in node.parts)
    value = {old: new, new: old}.get(node.value, node.value) if node.kind == "x" else node.value
    return Node(node.kind, parts, value)


def _same_chain(answer, gold, prove):
    """Does the work of `_same` if one or both nodes are a chain, such as 3+4=7. Only the value (7) of the
    gold answer counts. In the answer, each part must equal the value; roundings must be right within one
    percent."""
    target = gold.parts[gold.value] if gold.kind == "chain" else gold
    if answer.kind != "chain":
        return _same(answer, target, prove)
    value, steps = answer.parts[answer.value], answer.parts
    same = _same(value, target, prove)
    if not same and has_decimal(gold):
        same = any(_same(step, gold, prove) for step in steps[answer.value + 1 :])
    if value.kind == "unit" and value.value[0] == ("degree",):
        value = Node("°", value.parts)
    verdicts = [same]
    for i, step in enumerate(steps if same else ()):
        verdicts.append(i == answer.value or prove(step, value, 1e-6 if i < answer.value else 0.01))
    return _all(verdicts)


def _all(verdicts):
    return False not in verdicts and (None if None in verdicts else True)


def _same_unit(answer, gold, prove):
    """Does the work of `_same` if one or both nodes have a unit. A unit of the answer alone must look like a
    unit: `5 cm` equals 5, but `5 nearly` differs from 5."""
    ((unit, free), a), ((needed, _), b) = (
        _unwrapped(n, "unit", ((), True)) for n in (answer, gold)
    )
    if needed and needed[0][:6] == "choice" and _letter(a):
        return needed[0][6:].upper() == _letter(a)
    if (
        len(unit) == 1 == len(unit[0]) and not needed and not number(b)
    ):  # 23 h equals the product 23h
        return _same(merged("*", a, var(unit[0])), b, prove)
    return (unit == needed if unit and needed else free) and _same(a, b, prove)


def _same_number(a, b):
    places = [n.places for n in (a, b) if n.places is not None]
    if not places or a.places == b.places:
        return a.value == b.value
    # A decimal may be a rounding of the other number.
    difference = abs(a.value - b.value)
    return difference < Fraction(1, 10 ** min(places)) and difference * 10**6 <= max(
        abs(a.value), abs(b.value)
    )


def _same_tuple(answer, gold, prove):
    forms = {answer.value, gold.value}
    if len(answer.parts) != len(gold.parts) or len(forms) > 1 and not forms <= {"=", "()", None}:
        return False
    return _all([_same(*pair, prove) for pair in zip(answer.parts, gold.parts, strict=True)])


def _unordered(answer, gold, prove):
    """Returns whether two lists have equal elements in any order. A single element may be repeated."""
    table = [[_same(a, b, prove) for a in answer] for b in gold]
    if len(answer) != len(gold):
        return min(len(answer), len(gold)) == 1 and _all(sum(table, []))
    left = set(range(len(gold)))
    for verdicts in table:
        found = next((i for i in left if verdicts[i]), None)
        if found is None:
            return None if None in [verdicts[i] for i in left] else False
        left.remove(found)
    return True


# --- unfinished calculations

TRIG = set("sin cos tan cot sec csc arcsin arccos arctan".split())


def _unfinished(answer, gold):
    r"""Returns whether an answer has a calculation that the gold answer lacks. Otherwise a policy could earn
    the reward by repeating the problem: 3+4 does not equal 7. What an answer may contain, and when:

        fraction of integers    always: 6/8. But if its value is an integer (84/2), it counts as a product
        sum                     of like terms: if the gold answer has one. 2π+3π does not equal 5π
        product                 of two numbers, or a base twice: if the gold answer has such a product, or a
                                power of a number. 2·2^{2023} equals 2^{2024}
        power                   or factorial of a number: if the gold answer has one. (2x)^3 does not equal
                                8x^3. Or if it is an equation with any power: x^2+y^2=5^2
        trig, root, log,        as often as the gold answer has it. If that has a variable and a root, any
        opaque                  number of roots is right; the same for logarithms"""
    ours, theirs = calculations(answer), calculations(gold) + Counter()
    theirs["product"] += theirs["power"]
    theirs["power"] += gold.kind == "equation" and any(n.kind == "^" for n in walk(gold))
    many = {"sum", "product", "power", "trig"} | ({"root", "log"} if variables(gold) else set())
    return any(
        count > theirs[name] and not (name in many and theirs[name]) for name, count in ours.items()
    )


@lru_cache(4096)
def calculations(node: Node) -> Counter:
    """Returns how many calculations of each kind a tree leaves undone."""
    kind, parts, _ = node
    found = Counter()
    if number(node) and kind != "+":
        return found
    for part in parts:
        found += calculations(part)
    if kind == "+":
        found["sum"] += _like_terms(node)
    elif kind in ("*", "/"):
        found["product"] += _product(node)
    elif kind == "neg":
        found["product"] += "neg" in (parts[0].kind, *(n.kind for n in parts[0].parts[:1]))
    elif kind == "^":
        found[_power(*parts)] += 1
    elif kind in ("log", "ln"):
        found["log"] += 1 + (parts[0].kind == "/" or has_decimal(parts[0]))
    elif kind in ("root", "opaque"):
        found[kind] += 1
        found["power"] += kind == "root" and is_exact(*parts)
    elif kind in TRIG:
        found["trig"] += 1
    elif kind in ("!", "binom", "abs", "floor", "ceil"):
        found["power"] += not variables(node)
    del found[""]
    if kind == "/" and parts[0].kind == parts[1].kind in (
        "root",
        "log",
        "ln",
    ):  # \sqrt2/\sqrt3 is one root
        found["root" if parts[0].kind == "root" else "log"] -= 1
    return found


def is_exact(node: Node, index: Node) -> bool:
    """Returns whether a root of a number is rational, such as the square root of 16."""
    found, degree = number(node), number(index)
    if (
        not found
        or not is_integer(degree)
        or not 0 < degree.value < 64
        or abs(found.value) > 10**200
    ):
        return False
    pair = (abs(found.value.numerator), found.value.denominator)
    return all(round(n ** float(1 / degree.value)) ** int(degree.value) == n for n in pair)


def _like_terms(node):
    """Returns whether two terms of a sum could be added: 2π+3π, and also 5π-2(π-1)."""
    terms = _terms(node)
    zero = var("i") not in walk(node) and any(not factor for factor, _ in terms)
    return bool(zero) or len({rest for _, rest in terms}) < len(terms)


def _terms(node):
    """Returns the terms of a sum: whether a term's numbers are not 0, and keys of its other factors."""
    if node.kind in ("+", "neg"):
        return [term for part in node.parts for term in _terms(part)]
    tops, bottoms = factors(node)
    others = [part for part in (*tops, *bottoms) if not _is_rational(part)]
    if others == [part for part in tops if part.kind == "+"] and len(others) == 1:
        return _terms(others[0])
    zero = any(number(part) and not number(part).value for part in tops)
    return [
        (not zero, tuple(sorted(("/" if part in bottoms else "") + key(part) for part in others)))
    ]


def _is_rational(node):
    return (
        number(node)
        or node.kind == "^"
        and number(node.parts[0])
        and is_integer(number(node.parts[1]))
    )


def factors(node: Node) -> tuple[list, list]:
    """Returns the factors above and below the fraction bar."""
    if node.kind == "neg":
        return factors(node.parts[0])
    if node.kind not in ("*", "/") or number(node):
        return [node], []
    tops, bottoms = [], []
    for i, part in enumerate(node.parts):
        sides = factors(part)[:: -1 if node.kind == "/" and i else 1]
        tops += sides[0]
        bottoms += sides[1]
    return tops, bottoms


def _values(nodes):
    """Returns the values of the numbers among the nodes, without 1 and -1."""
    found = [number(node) for node in nodes]
    return [n.value for n in found if n and abs(n.value) != 1]


def _product(node):
    """Returns whether a product has two numbers (2·3x), an integer ratio (4π/2), or a base twice."""
    tops, bottoms = factors(node)
    many = (
        node.kind == "*" and sum(bool(_values(sum(factors(part), []))) for part in node.parts) > 1
    )
    above, below = _values(tops), _values(bottoms)
    ratio = prod(above, start=Fraction(1)) / (prod(below) or 1)
    reducible = (
        node.kind == "/"
        and below
        and (ratio.denominator == 1 or any(n.denominator > 1 for n in above))
    )
    powers = [f for f in (*tops, *bottoms) if f.kind == "^" or bottoms and not number(f)]
    bases = {key(f.parts[0] if f.kind == "^" else f) for f in powers}
    imaginary = sum(f.kind == "+" and _is_complex(f) for f in tops) > 1 or any(
        map(_is_complex, bottoms)
    )
    return many or bool(reducible) or len(bases) < len(powers) or imaginary


def _is_complex(node):
    return not variables(node) and var("i") in walk(node)


def _power(base, exponent):
    """Returns "root" for x^{1/2}; "power" for a power to multiply out, such as (2x)^3; "" for others."""
    power = number(exponent)
    if power and not is_integer(power) or any(n.kind == "/" for n in walk(exponent)):
        return "root"
    tops, bottoms = factors(base)
    number_or_power = _values(tops + bottoms) or any(f.kind == "^" for f in tops)
    surd = not variables(base) and base.kind not in ("x", "num") or base == var("i")
    inverse = base.kind == "num" and power and power.value == -1
    return "power" if power and (number_or_power or surd) and not inverse else ""


# --- values


def math_equal(answer: Node, gold: Node, tolerance: float | None = None) -> bool:
    r"""Returns whether two expressions, equations or sets are equal. Expressions are equal if they have the
    same values, to 40 digits, at three points (Schwartz, JACM 1980). Returns False if a value is too large to
    compute. Raises ValueError if `gold` can't be parsed.

    tolerance: largest relative difference of two numbers, if `gold` has a decimal point or `answer` is a
        decimal. None means 1e-6. If `gold` is an integer, no difference is allowed. For an answer such as
        1.83\pi, the limit is 1e-12 unless `gold` has a decimal point."""
    if gold.kind == "unread":
        raise ValueError(f"the gold answer {gold.value[:80]!r} cannot be parsed")
    answer, gold = (_unwrapped(n, "unit", None)[1] for n in (answer, gold))
    kinds = {answer.kind, gold.kind}
    names = variables(answer) | variables(gold)
    with suppress(*TOO_LARGE), mp.workdps(60):
        if kinds == {"equation"}:
            return answer.value == gold.value and _same_equation(answer, gold, names)
        if not kinds <= EXPRESSIONS:
            return "equation" not in kinds and _same_set(answer, gold, names)
        finite = INFINITY not in (*walk(answer), *walk(gold))
        return finite and all(
            _same_value(answer, gold, tolerance, point) for point in points(names)
        )
    return False


TOO_LARGE = (
    ArithmeticError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)


def points(names: set[str]) -> list[dict]:
    """Returns three points: values of the names that are not special, and not all of one sign."""
    found = []
    for start, step in ((7, 3), (-9, -4), (8, -5)):
        found.append(
            {
                name: Fraction(7 * start + step * i + i * i, 37)
                for i, name in enumerate(sorted(names))
            }
        )
    return found if names else found[:1]


def _same_value(answer, gold, tolerance, point):
    a, b = value_of(answer, point), value_of(gold, point)
    ours, theirs = has_decimal(answer), has_decimal(gold)
    decimal = theirs or ours and number(answer) is not None
    exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    if exact and not (ours or theirs) or exact and b.denominator == 1 and not point:
        return a == b
    limit = tolerance or 1e-6 if decimal else 1e-12 if ours else 1e-40
    size = abs(mp.convert(b))
    return abs(mp.convert(a) - mp.convert(b)) <= limit * (size if decimal or ours else max(size, 1))


def _same_equation(answer, gold, names):
    """Returns whether the difference of an equation's sides is a number times that of the other."""
    ratios = []
    for point in points(names | {"~"}):
        a, b = (mp.convert(_difference(n, point)) for n in (answer, gold))
        if not a or not b:
            return False
        ratios.append(a / b)
    positive = answer.value in ("=", "≠") or ratios[0] > 0
    return positive and all(abs(ratio - ratios[0]) < 1e-30 * abs(ratio) for ratio in ratios)


def _difference(equation, point):
    """Returns the difference of an equation's sides, times all different denominators of its terms."""
    left, right = equation.parts
    node = Node("+", (left, Node("neg", (right,))))
    bottoms = {}
    for part in walk(node):
        if part.kind == "/":
            bottoms[key(part.parts[1])] = part.parts[1]
        elif part.kind == "^" and part.parts[1].kind == "neg":
            bottoms[key(part)] = Node("^", (part.parts[0], *part.parts[1].parts))
    return value_of(Node("*", (node, *bottoms.values())), point)


def _same_set(answer, gold, names):
    """Returns whether two sets of real numbers have the same members among their ends and between them."""
    nodes = [*walk(answer), *walk(gold)]
    values = [
        mp.convert(value_of(n, {})) for n in nodes if n.kind in EXPRESSIONS and not variables(n)
    ]
    ends = sorted({*values, *(-value for value in values), mp.inf, -mp.inf})
    samples = [mp.zero, *ends]
    for a, b in zip(ends[1:-1], ends[2:], strict=True):
        samples += [a - 1, a + 1, (a + b) / 2]
    return len(names) < 2 and all(_has(answer, x) == _has(gold, x) for x in samples)


def _has(node, x):
    """Returns whether a number x is in a set; for a list, in how many of its parts."""
    kind, parts, value = node
    if kind == "<":
        values = [value_of(part, dict.fromkeys(variables(part), x)) for part in parts]
        return mp.isfinite(x) and all(map(_holds, values, value, values[1:]))
    if kind == "(":
        low, high = (value_of(part, {}) for part in parts)
        return _holds(low, "≤" if value[0] == "[" else "<", x) and _holds(
            x, "≤" if value[1] == "]" else "<", high
        )
    if kind in EXPRESSIONS:
        return _holds(value_of(node, {}), "=", x)
    if kind == "named":  # |z|∈[1,3]
        return _has(parts[0], value_of(parts[1], dict.fromkeys(variables(parts[1]), x)))
    cut = [part for part in parts if part.value == "≠"]  # x≠1 beside other inequalities removes 1
    members = [_has(part, x) for part in parts if part not in cut or kind != ","]
    if kind == ",":
        return all(_has(part, x) for part in cut) and (sum(members) if members else True)
    if kind == "∖":
        return members[0] and not members[1]
    return all(members) if kind == "∩" else any(members)


def _holds(a, sign, b):
    a, b = mp.convert(a), mp.convert(b)
    near = a == b or abs(a - b) < 1e-30
    return sign in ("=≤≥" if near else "≠<≤" if a < b else "≠>≥")


LARGEST = 20_000  # bits of a power that is computed exactly


def value_of(node: Node, point: dict):
    """Returns the value of an expression: a Fraction if it is exact, else a number of mpmath. Raises one of
    TOO_LARGE for a value that is too large or not known."""
    kind, parts, value = node
    if kind == "num":
        return value.value
    if kind == "x":
        return point[value] if value in point else +CONSTANTS[value]
    found = [value_of(part, point) for part in parts]
    if not all(isinstance(v, Fraction) for v in found):
        found = [mp.convert(v) for v in found]
    operation = OPERATIONS.get(kind) or getattr(mp, kind)
    return operation(*found)


def _raise(base, power):
    whole = isinstance(power, Fraction) and power.denominator == 1
    if abs(power) > 10**9:
        raise OverflowError
    if whole and isinstance(base, Fraction):
        if abs(power) * max(base.numerator.bit_length(), base.denominator.bit_length()) < LARGEST:
            return base ** int(power)
    return mp.power(mp.convert(base), mp.convert(power))


def _root(base, index):
    odd = index % 2 == 1 and mp.im(base) == 0 and base < 0
    return -mp.root(-base, int(index)) if odd else mp.root(base, int(index))


def _choose(n, k):
    whole = all(isinstance(v, Fraction) and v.denominator == 1 and 0 <= v < 3000 for v in (n, k))
    return Fraction(comb(int(n), int(k))) if whole else mp.binomial(n, k)


def _factorial(n):
    whole = isinstance(n, Fraction) and n.denominator == 1 and 0 <= n < 3000
    return Fraction(factorial(int(n))) if whole else mp.gamma(n + mp.one)


CONSTANTS = {"e": mp.e, "π": mp.pi, "i": mp.j, "∞": mp.inf}
OPERATIONS = {
    "+": lambda *terms: sum(terms),
    "*": lambda *found: prod(found),
    "/": lambda a, b: a / b,
    "neg": lambda a: -a,
    "%": lambda a: a / 100,
    "°": lambda a: a * mp.one * mp.pi / 180,
    "^": _raise,
    "root": _root,
    "!": _factorial,
    "binom": _choose,
    "abs": abs,
    "log": lambda a, base=10: mp.log(a) / mp.log(base),
    "arcsin": mp.asin,
    "arccos": mp.acos,
    "arctan": mp.atan,
}


# --- formulas of the problem

FORMULA = re.compile(r"\$|\\[][()]|\\(?:begin|end)\{(?:align|equation|gather)\w*\*?\}")
SIDE = re.compile(r"^\(?\d\)|[=<>,;&]|\\(?:in|[gl]e)(?![a-z])")
ORDERED = re.compile(
    r"(?i)(?:creas|scend)ing order|order of (?:in|de)creas"
    r"|\b(?:least|smallest|greatest|largest|lowest|highest) to\b"
)


def repeats(answer: str, gold: str, problem: str) -> bool:
    r"""Returns whether an answer, or its value after the last =, is a formula or an equation of the problem,
    such as `\sqrt{242}` of "Simplify $\sqrt{242}$". If the answer is a list, each of its elements must be
    such a formula. A formula that is the gold answer or one of its elements, or that has it on one side, does
    not count. Also if the answer is the gold list in another order, and the problem asks for an order."""
    parts, golds = _pieces(read(answer)), _pieces(read(gold))
    ours, theirs = ([key(part) for part in side] for side in (parts, golds))
    if ours != theirs and sorted(ours) == sorted(theirs) and ORDERED.search(problem):
        return True
    right, known = _sides(golds), set()
    for formula in FORMULA.split(problem):
        pieces = [read(text) for text in (formula, *SIDE.split(formula))]
        sides = _sides(pieces) | _sides([part for piece in pieces for part in _pieces(piece)])
        if not right & sides:
            known |= sides
    return all(
        any(key(n) in known and _is_formula(n) for n in (part, _side(part))) for part in parts
    )


def _sides(nodes):
    return {key(n) for node in nodes for n in (node, _side(node))}


def _pieces(node):
    """Returns the elements of a list, also of a list in it; the node itself if it is no list."""
    inside = _side(node)
    if inside.kind in (",", "{"):
        return [piece for part in inside.parts for piece in _pieces(part)]
    return [inside if node.kind == "chain" else node]


def _side(node):
    """Returns the value of an equation or a chain."""
    if node.kind == "chain":
        return node.parts[node.value]
    if node.kind == "equation":
        return node.parts[1]
    return _side(node.parts[0]) if node.kind == "named" else node


def _is_formula(node):
    inside = node.parts[0] if node.kind == "neg" else node
    return inside.kind not in ("num", "x", "text", "unread", "unit", ",", "{")
