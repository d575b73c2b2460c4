r"""Decides whether an answer equals the gold answer.

DOC
"""

import re
from fractions import Fraction
from functools import lru_cache
from html import unescape
from math import comb, factorial, prod
from typing import NamedTuple

from configs import require
from grading.extract import plain

KINDS = ("math", "choice", "exact")


def _table(text):
    """Returns a dict of the words of `text`. Each row, which ends with ";", begins with the common word."""
    rows = [row.split() for row in text.split(";")]
    return {word: row[0] for row in rows for word in row}


# --- words. A word that is a unit, or that changes a value, is added here.

UNITS = _table("""mm millimeter millimetre; cm centimeter centimetre 厘米 см; m meter metre 米 метр;
    km kilometer kilometre 千米 公里 км; in inch inche; ft foot feet; yd yard; mi mile; mg milligram;
    g gram 克; kg kilogram 千克 кг; lb pound; oz ounce; ton tonne; s sec second 秒; ms millisecond;
    min minute 分钟 минут; h hr hour 小时 часов; day 天 дней; week; month; yr year 岁 年 лет;
    l liter litre; ml milliliter millilitre; gal gallon; degree deg ° 度; radian rad; cent; euro;
    dollar usd $ долларов; yuan 元; mph; hz hertz; degc; degf; n newton; j joule; w watt; v volt;
    pa pascal; am; pm; sq square; cubic; unit; 个; 人; 种""")
SCALES = dict(hundred=2, thousand=3, million=6, billion=9, trillion=12)
# After a number, these words and PART change its value or meaning: `10 dozen` does not equal 10.
NO_UNIT = _table("""not; no; or; on; if; is; are; was; be; it; at; by; more; less; fewer; than; over; under;
    above; below; about; least; most; between; times; plus; minus; half; halves; third; quarter; from; binary;
    base; ten; score; gross; dozen; lakh; crore; basis; greater; maybe; perhaps; otherwise; modulo; mod""")
PART = re.compile(r"(?:[^o\W]n|d|i[ef]|ix|lf|igh|ur)ths?\b|(?:illion|ward)s?\b|\b[MG](?:[WVJNg]|Hz|Pa)?\b")
# Only with these words, a unit of the answer alone is ignored. After a number up to 1, ONE is used.
MANY = re.compile("[a-z]{2,}s|people|children|w?o?men|sheep|fish|mice")
ONE = re.compile("[a-z]{3,}(?<!ed)(?<!ly)")
# A phrase with one of these words is no introduction of the answer: `its opposite is 7`.
CHANGED = _table("""not; no; never; wrong; incorrect; false; negative; minus; opposite; half; twice; double;
    reciprocal; inverse; more; less; most; least; bound; excluded; neither; nothing; but; except; divisible;
    exceeds; up""")
CODES = _table("""i is are equals answer equal; v for where with when if; a solution solutions value values;
    o only; t to""")
CONDITION = re.compile(r"\b(?:integers?|real|constants?|natural)\b")
BASES = "two three four five six seven eight nine ten eleven twelve".split()
BASES = {word: i for i, word in enumerate(BASES, 2)}
BASE = re.compile(r"\(?([0-9A-F]*\d[0-9A-F]*)\)?_(\d{1,2}|[A-Za-z]{3,6})")  # 52_9

# --- tokens


class Token(NamedTuple):
    """kind: 9 (number), x (name), w (word), f (function), ( (group) or an operator's sign.
    gap: whether a space is before it. parts: the tokens inside of a group, whose text is its brackets."""

    kind: str
    text: str
    gap: bool = False
    parts: tuple = ()


SIGNS = _table(r""", land wedge and; | lvert rvert vert mid; < lt; > gt; : colon; / div;
    * times cdot ast; % percent percents; frac dfrac tfrac cfrac; ≤ le leq leqslant; ≥ ge geq geqslant;
    ≠ ne neq; overline bar dot; ° circ degree; ∅ varnothing emptyset; ∖ backslash setminus; ∪ bigcup cup;
    ∩ bigcap cap; ∈ in; ≈ approx; ≡ equiv; ± pm; over; choose; mod pmod bmod; ∞ infty infinity;
    binom dbinom tbinom; sqrt; ⌊ lfloor; ⌋ rfloor; ⌈ lceil; ⌉ rceil; boxed; π pi; φ phi varphi; θ theta""")
SIGNS |= {"<=": "≤", ">=": "≥", "!=": "≠", "**": "^", **dict.fromkeys(("lor", "vee", "or"), ";"), "Omega": "ohms"}
SPELLED = set("or and percent percents infinity mod sqrt pi theta".split())  # words without a backslash
FUNCTIONS = _table("""sin; cos; tan tg; cot ctg; sec; csc; arcsin; arccos; arctan arctg; ln; log; lg; exp;
    gcd; lcm; max; min; det; lim; int; sum; prod""")
DROPPED = set("""displaystyle textstyle boldsymbol bm mathit mathbf mathsf mathcal mathbb bf it rm limits hat
    vec overrightarrow checkmark large Large underline angle triangle""".split())
CLEANED = [
    (r"\\!\s*|\\(?:text)?color ?\{\w+\}|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-z])\.?", ""),
    (r"(?<!\\)\$([^$]*)(?<!\\)\$", r" \1 "),
    (r"\\\\\[[\d.]+ ?\w+\]", r"\\\\"),  # \\[4pt] ends a row
    (r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-z]))", "°"),
    (r"(?:° *|\bdegrees? )(?:\\\w+\{)? ?([CF])(?:elsius|ahrenheit)?\b\}?", r" \\text{deg\1}"),
    (r"\b([ap])\. ?m\b\.?", r"\1m"),
    (r"(?<=\d)(?:st|nd|rd|th)\b", ""),  # July 4th
    (r"\{(:|,(?=\}\d{3}))\}", r"\1"),  # 7{:}45 and 1{,}234
    (r"(?<=[\d}]) ?(?:\\text\{ ?)?to ?\}? ?(?=[\d\\])", ":"),  # 3 to 4
    (r"\bper cent\b", "%"),
    (r"\\q?quad *(?=\(|[a-z] ?\\in)", ","),
    (r"^(.*[tux].*)\+ ?[cK]$", r"\1+C"),  # the constant of an integral
    (r"(?<=\b[A-Z]) (?=[A-Z]\b)", ""),
    (r"(hours?|minutes?|feet),? and (?=\}? ?\d)", r"\1 "),
    (r"\\mathbb ?\{? ?([A-Z]) ?\}?", r" \\set\1 "),
    (r"\](?=[^][(),;]+[,;][^][(),;]+[][])", "("),  # ]0,1[ is (0,1)
    (r"(?<=[^][(])\[(?=$|\\c[ua]p(?![a-z]))", ")"),
]
# In (1,234) the comma separates two numbers. In 1,234 and in the argument {1,234}, it separates thousands.
GROUPED = re.compile(
    r"""(?<=[A-Za-z^}]\{) \d{1,3}(?:,\d{3})+ (?=\}) | (?<![\d.,(\[{])\d{1,3} (?:,\d{3})+ (?![\d,)\]}\\])
    | (?<![\d.,])\d{1,3} (?:(?:\\[ ,;:]|[ ~])\d{3})+ (?!\d)""",
    re.VERBOSE,
)
DELIMITED = re.compile(
    r"\$\$(.+)\$\$|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]|\*\*(.+)\*\*|`(.+)`|\\(?:boxed|fbox) ?\{(.+)\}",
    re.DOTALL,
)
TOKEN = re.compile(
    r"""(?P<space> [\s~]+ | \\q?quad(?![a-z]) | \\[,;:\ ] | \\[()[\]])
    | (?P<open> (?P<text> \\(?:text\w*|mbox|mathrm|operatorname\*?)\s*\{)
        | \\begin\s*\{\w+\*?\}(?:\{[lcr|]*\})? | \\\{ | \\lbrace(?![a-z]) | \\langle(?![a-z]) | [([{])
    | (?P<close> \\end\s*\{\w+\*?\} | \\\} | \\rbrace(?![a-z]) | \\rangle(?![a-z]) | [)\]}])
    | (?P<number> (?:\d*\.\d+ | \d+\.(?=\() | \d*\.(?=\\(?:overline|bar|dot)) | \d+)(?:[eE][+-]?\d{1,3}(?!\d))?)
    | (?P<letters> \\?[^\W\d_]+) | (?P<sign> <= | >= | != | \*\* | \\. | .)""",
    re.VERBOSE | re.DOTALL,
)
BRACKETS = {"\\langle": "(", "\\rangle": ")", "\\lbrace": "\\{", "\\rbrace": "}"}
DEPTH = 12  # a text with more brackets inside of brackets is not read


class Unread(Exception):
    """Raised for a text that the grammar can't read as a whole, such as `3@2`."""


def tokens(text: str) -> list[Token]:
    """Returns the tokens of a text. Raises Unread if brackets are nested more than DEPTH times."""
    text = text.strip()
    while match := DELIMITED.fullmatch(text.rstrip(".")):
        text = match[match.lastindex].strip()
    text = plain(text)
    for pattern, new in CLEANED:
        text = re.sub(pattern, new, text)
    text = GROUPED.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    levels, opened, gap = [[]], [], False
    for match in TOKEN.finditer(text.rstrip(" .,;\\")):
        kind = match.lastgroup
        if kind == "space":
            gap = True
            continue
        if kind == "open":
            opened.append((match["text"] and "text" or match[0], gap))
            levels.append([])
        elif kind == "close" and opened:
            _close(levels, opened, match[0])
        else:
            in_text = any(bracket == "text" for bracket, _ in opened)
            levels[-1] += _token(match, in_text, gap)
        gap = gap and kind == "open" and match["text"] is not None
        if len(levels) > DEPTH:
            raise Unread
    while opened:
        _close(levels, opened, "")
    return levels[0]


def _close(levels, opened, end):
    """Makes a group of the tokens since the last open bracket. \text{} is no group."""
    inside = levels.pop()
    start, gap = opened.pop()
    while inside and inside[-1].text == ".":
        inside.pop()
    words = inside and levels[-1] and inside[0].kind in ("mod", "w") and (len(inside) == 1 or inside[0].kind == "mod")
    if start == "text" or words:  # 5 (cm) and 3 (mod 7)
        levels[-1] += inside
        return
    start = re.sub(r"\s|\{[lcr|]*\}$|\*", "", BRACKETS.get(start, start)).replace("array", "matrix")
    levels[-1].append(Token("(", start + BRACKETS.get(end, end[-1:]), gap, tuple(inside)))


def _token(match, in_text, gap):
    """Returns the tokens of one match of TOKEN."""
    piece = match[0]
    name = piece.lstrip("\\")
    if match["number"]:
        return [Token("9", piece, gap)]
    if name in DROPPED and piece != name:
        return []
    if name in FUNCTIONS and (piece != name or len(name) != 3 or name in ("sin", "cos", "tan", "log", "exp")):
        return [Token("f", FUNCTIONS[name], gap)]
    if match["letters"] and piece == name and name.lower() not in SPELLED:
        return _letters(match, in_text, gap)
    if name[:3] == "set" and len(name) == 4:
        return [Token("x", name, gap)]
    sign = SIGNS.get(name.lower() if piece == name else name, piece if piece == "\\\\" else name)
    letter = unescape(f"&{name};") if len(name) > 1 and sign == name else sign
    if sign == "ohms" or sign == "$":
        return [Token("w", sign, gap)]
    if len(letter) == 1 and letter.isalpha():
        return [Token("x", letter, gap)]
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
    """Returns whether letters outside of \text{} are a word."""
    before, after = text[max(start - 2, 0) : start], text[end : end + 3]
    unit = re.sub(r"(?<=..)s$", "", run.lower()) in UNITS
    if unit and len(run) > 1:
        return bool(re.search(r"[\d })°]$", before))
    if unit:  # 5 m, but not 2x m, 2 n or 2 s+t
        far = re.search(r"[\d})] $", before) and not re.search("[A-Za-z]", text[:start])
        return bool(far) and run not in "njvwNJVW" and not re.match(r" ?[-+(]| [a-z]\b", after)
    if re.search("[a-z][A-Z]", run) or re.search(r"[\w^})\\]$", before) or after[:1] in tuple("^_+-=/"):
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
    """A node of the tree. NODES"""

    kind: str
    parts: tuple = ()
    value: object = None


LEVELS = {";": 1, ",": 2, "\\\\": 1, "&": 2, "~": 2, "over": 1, "choose": 1, **dict.fromkeys("=≈≡∈<>≤≥≠", 4)}
LEVELS |= {"∪": 5, "∩": 5, "∖": 5, "mod": 5, ":": 6, "w": 7, "+": 8, "-": 8, "±": 8, "*": 9, "/": 9}
LEVELS |= dict.fromkeys(("9", "x", "f", "(", "frac", "binom", "sqrt", "√", "overline", "|", "⌊", "⌈", "∞"), 9)
LEVELS |= dict.fromkeys("^!%°'", 10)
ZERO, ONE_, TEN, TWO = (Node("num", (), Number(Fraction(n))) for n in (0, 1, 10, 2))
ARGUMENTS = dict(frac=2, binom=2, sqrt=1, overline=1)
DIGIT = Node("num", (), None)


class Parser:
    """Reads tokens by the precedence of their operators (Pratt's method)."""

    def __init__(self, tokens):
        self.all = list(tokens)
        self.at = 0
        self.bars = False

    def peek(self, *kinds, ahead=0):
        place = self.at + ahead
        return place < len(self.all) and (not kinds or self.all[place].kind in kinds)

    def accept(self, *kinds):
        found = self.peek(*kinds)
        self.at += found
        return found

    def parse(self, power=0):
        """Reads the operators that bind stronger than `power`."""
        start = self.at
        left = self.first()
        while self.peek():
            token = self.all[self.at]
            level = LEVELS.get(token.kind, 0)
            if level <= power or self.bars and token.kind == "|":
                break
            left = self.more(left, token, level, start)
        return left

    def whole(self):
        node = self.parse()
        if self.peek():
            raise Unread
        return node

    def more(self, left, token, level, start):
        """Reads what follows the operand `left`: an operator, a unit or a factor."""
        kind = token.kind
        self.at += 1
        if kind == "w":
            return self.unit(left, start)
        if kind == "^":
            return Node("^", (left, self.argument(whole=True)))
        if level == 10:
            return Node(kind, (left,))
        if level <= 2 and (not self.peek() or self.peek(",", ";", "\\\\", "~")):
            return left  # a separator at the end, or before another one
        if kind in ("over", "choose"):
            return Node("/" if kind == "over" else "binom", (left, self.parse(1)))
        if kind == "mod":
            return Node("(", (left,), f"mod {spell(self.rest())}")
        if level == 4:
            return _merged("=", left, self.parse(4), kind)
        if kind in "+-±" or level < 9 or kind in "*/":
            right = self.parse(level)
            if kind == "-" and left.value == "setR":
                return Node("∖", (left, right))
            if kind == "-":
                return _merged("+", left, Node("neg", (right,)))
            return Node(kind, (left, right)) if kind in "/±∖" else _merged(kind, left, right)
        self.at -= 1
        return self.factor(left, token)

    def factor(self, left, token):
        right = self.parse(9)
        if right.kind == "given":
            return left
        if right.kind == "(" and "matrix" in right.value:
            return scaled(left, right)
        if right.kind == "(" and left.kind == "x" and left.value.isupper():  # the point A(1,2)
            return Node("=", (left, right), "=")
        number = token.kind == "9" or token.text == "{}" and token.parts[:1] and token.parts[0].kind == "9"
        last = left.parts[-1] if left.kind == "*" else left
        if number and last.kind == "num" or right.kind not in EXPRESSIONS or left.kind not in EXPRESSIONS:
            raise Unread  # 7 5 and 7{5}
        return _merged("*", left, right)

    def rest(self):
        found = self.all[self.at :]
        self.at = len(self.all)
        return found

    def first(self):
        """Reads an operand."""
        if not self.peek():
            raise Unread
        token = self.all[self.at]
        self.at += 1
        kind = token.kind
        if kind in "-+±":
            inside = self.parse(8)
            if kind == "-" and inside.kind == "(":
                return scaled(Node("neg", (decimal("1"),)), inside)
            return inside if kind == "+" else Node(kind, (ZERO, inside)) if kind == "±" else Node("neg", (inside,))
        if kind == "9":
            return self.number(token.text)
        if kind == "x":
            return self.name(token.text)
        if kind == "(":
            return bracket(token)
        if kind == "f":
            return self.function(token.text)
        if kind == "w":
            return self.words(token)
        if kind in ARGUMENTS:
            return self.command(kind)
        if kind == "√":
            return Node("root", (self.argument(whole=True), TWO))
        if kind == "|":
            self.bars = True
            inside = self.parse(7)
            self.bars = False
        elif kind in "⌊⌈":
            inside = self.parse(7)
        elif kind in "∞∅":
            return Node("x", (), kind) if kind == "∞" else Node("{")
        else:
            raise Unread
        if not self.accept("|", "⌋", "⌉"):
            raise Unread
        return Node({"|": "abs", "⌊": "floor", "⌈": "ceil"}[kind], (inside,))

    def argument(self, whole=False):
        r"""Reads the argument of a command: a group, or one character such as the 1 of \frac12. whole: the
        argument may be a number of several digits."""
        token = self.all[self.at] if self.peek() else Token("end", "")
        if token.kind == "9" and not whole and len(token.text) > 1:
            self.all[self.at] = Token("9", token.text[1:])
            return decimal(token.text[0])
        sign = whole and self.peek("-", "+")
        self.at += sign
        inside = self.first()
        return Node("neg", (inside,)) if sign and token.kind == "-" else inside

    def command(self, kind):
        index = TWO
        if kind == "sqrt" and self.peek("(") and self.all[self.at].text == "[]":
            index = Parser(self.all[self.at].parts).whole()
            self.at += 1
        found = tuple(self.argument() for _ in range(ARGUMENTS[kind]))
        if kind == "overline":
            return found[0]
        return Node("root", (found[0], index)) if kind == "sqrt" else Node({"frac": "/"}.get(kind, kind), found)

    def number(self, text):
        following = self.all[self.at] if self.peek("overline", "(") else None
        if "." in text and following:  # 0.\overline{3} and 0.(3)
            self.at += 1 + (following.kind == "overline")
            inside = self.all[self.at - 1 : self.at]
            digits = spell(inside).strip("()")
            if not re.fullmatch(r"\d{1,20}", digits, re.ASCII):
                raise Unread
            end = Fraction(int(digits), (10 ** len(digits) - 1) * 10 ** len(text.partition(".")[2]))
            return Node("num", (), Number(decimal(text).value.value + end))
        start = self.at
        part = None
        if self.accept("frac"):
            part = number(self.command("frac"))
        elif self.peek("9") and self.all[self.at].gap and self.peek("/", ahead=1) and self.peek("9", ahead=2):
            part = number(self.parse(8))
        if part and 0 < part.value < 1 and part.places is None and text.isdecimal():  # 4\frac23 and 4 2/3
            return Node("num", (), Number(int(text) + part.value))
        self.at = start
        return decimal(text)

    def name(self, text):
        if self.accept("_"):
            start = self.at
            self.at += 1
            index = self.all[start : self.at]
            if text == "C" and self.accept("^"):  # C_5^2
                return Node("binom", (Parser(index).whole(), self.argument(whole=True)))
            text += "_" + spell(index)
        while self.accept("'"):
            text += "'"
        point = self.peek("(") and text.isupper() and any(t.kind == "," for t in self.all[self.at].parts)
        if text[0] in "fgFGPEQ" and not point and self.peek("(") and not self.all[self.at].gap and self.all[self.at].text != "{}":
            text += spell(self.all[self.at : self.at + 1])  # f(x)
            self.at += 1
        return Node("x", (), text)

    def function(self, fn):
        scripts = {}
        while self.peek("^", "_"):
            sign = self.all[self.at].kind
            self.at += 1
            scripts[sign] = self.argument(whole=sign == "^")
        if fn in ("int", "sum", "prod", "lim", "det"):
            return Node("opaque", (), fn + str(scripts) + spell(self.rest()))
        if self.peek("(") and self.all[self.at].text[0] in "({":
            node = self.first()
        else:
            node = self.parse(9)
            while self.peek() and LEVELS.get(self.all[self.at].kind) == 9 and not self.peek("f", "*", "/", "|"):
                node = _merged("*", node, self.parse(9))
        if fn in ("gcd", "lcm", "max", "min"):
            return Node("opaque", (), f"{fn}{node}")
        if fn == "exp":
            return Node("^", (Node("x", (), "e"), node))
        power, index = scripts.get("^"), TEN if fn == "lg" else scripts.get("_")
        if power and number(power) == (-1, None):
            return Node("arc" + fn, (node,))
        call = Node("log" if fn == "lg" else fn, (node, index) if index else (node,))
        return Node("^", (call, power)) if power else call

    def words(self, token):
        """Reads a text, or an amount after its currency."""
        if token.text == "$" or token.text in ("dollars", "euros", "pounds", "cents"):
            if self.peek("9"):
                inside = self.parse(7)
                unit = () if self.peek() and False else (token,)
                return quantity(inside, list(unit))
        start = self.at - 1
        while self.peek() and not 0 < LEVELS.get(self.all[self.at].kind, 9) < 5:
            self.at += 1
        return text_node(self.all[start : self.at])

    def unit(self, left, start):
        """Reads the words after a value: its unit, or a condition."""
        first = self.at - 1
        low = self.all[first].text.lower()
        if CODES.get(low) == "v":
            right = self.parse(3)
            return left if right.kind in ("=", "text") else left
        while self.peek() and not 0 < LEVELS.get(self.all[self.at].kind, 9) < 5:
            self.at += 1
        words = self.all[first : self.at]
        if low in SCALES:
            left = _merged("*", left, Node("^", (TEN, decimal(str(SCALES[low])))))
            words = words[1:]
        if CONDITION.search(" ".join(t.text for t in words)) and left.kind == "x":
            return Node("given")
        found = quantity(left, words) if words else left
        return text_node(self.all[start : self.at]) if found is None else found


EXPRESSIONS = set("num x + * / neg ^ ! % ° ± abs floor ceil root binom opaque".split()) | {*FUNCTIONS.values()}
EXPRESSIONS |= {f"arc{name}" for name in ("sin", "cos", "tan")}


def _merged(kind, left, right, sign=""):
    """Returns a node of `kind`. If `left` is one, `right` becomes its last part."""
    signs = (left.value or "") + sign if left.kind == kind else sign
    parts = left.parts if left.kind == kind else (left,)
    return Node(kind, (*parts, right), signs or None)


def scaled(factor: Node, matrix: Node) -> Node:
    """Returns a number times a matrix."""
    found = []
    for part in matrix.parts:
        pair = number(factor), number(part)
        found.append(_merged("*", factor, part) if None in pair else Node("num", (), Number(pair[0].value * pair[1].value)))
    return matrix._replace(parts=tuple(found))


def decimal(text: str) -> Node:
    """Returns the node of a decimal number, such as 1.5 or 3e4."""
    if not text.isascii() or len(text) > 300:
        raise Unread
    digits, _, power = text.lower().partition("e")
    places = digits.partition(".")[2]
    value = Fraction(f"0{digits}{'0' * digits.endswith('.')}e{power or 0}")
    return Node("num", (), Number(value, max(len(places) - int(power or 0), 0) if places else None))


def text_node(tokens: list[Token]) -> Node:
    """Returns the node of a text: its words in lower case, without articles and plural s."""
    found, word = "", True
    for token in tokens:
        space = token.gap or word or token.kind == "w"
        found += " " * space + (spell([token]) if token.kind == "(" else token.text)
        word = token.kind == "w"
    found = found.strip()
    if len(tokens) == 1 and (len(found) == 1 or found.isupper()):
        return Node("x", (), found)
    found = re.sub(r"\b(?:an?|the|there (?:is|are)) (?=[a-z]{2})", "", found.casefold())
    if re.fullmatch("all (?:the )?real(?: number)?s?", found):
        return REALS
    return Node("{") if found == "empty set" else Node("text", (), re.sub(r"( [a-z]{2,}[a-rt-z])s\b", r"\1", found))


def quantity(value: Node, words: list[Token]) -> Node | None:
    """Returns a value with its unit; None if one of the words is no part of a unit. Its value is the unit, and
    whether it looks like a unit."""
    flat = [t for token in words for t in (token.parts if token.kind == "(" else [token])]
    text = " ".join(t.text for t in flat)
    names = re.findall(r"[^\W\d_]+|[$°]", text)
    bad = {n.lower().removesuffix(s) for n in names for s in ("", "s")} & NO_UNIT.keys() or PART.search(text) or len(names) > 4
    strange = any(t.kind not in "w9/*^-." and t.text not in UNITS for t in flat)
    if bad or strange or not names or value.kind not in EXPRESSIONS | {":"}:
        return None
    noun = ONE if (n := number(value)) and abs(n.value) <= 1 else MANY
    text = re.sub(r"(?<=[a-z]{2})s\b", "", text.lower())
    text = re.sub(r"\bper\b", "/", text.replace("mph", "mi / h"))
    text = re.sub(r"(\w+) \^ - (\d)", r"/ \1 \2", text)
    text = re.sub(r"\b(?:sq|square|cubic) (?:\. )?(\w+)", lambda m: f"{m[1]} {3 if m[0][0] == 'c' else 2}", text)
    unit = [UNITS.get(word, word) for word in re.findall(r"\w+|[/$°]", text) if word not in ("such", "of", "1")]
    free = text[:6] == "choice" or any(noun.fullmatch(name.lower()) or re.sub("s$", "", name.lower()) in UNITS for name in names)
    return Node("unit", (value,), (tuple(unit), free))


def bracket(token: Token) -> Node:
    """Reads a group."""
    text, inside = token.text, token.parts
    if text.startswith("\\begin"):
        return _matrix(text, inside)
    if text[0] == "\\" and not inside:
        return Node("{")
    if text[0] == "\\":
        return _set(inside)
    node = Parser(inside).whole()
    if text[0] == "{":
        return node
    if node.kind in ",;":
        return Node("(", node.parts, text)
    if text[0] == "[" and node.kind != "(":
        return Node("floor", (node,))
    return Node("given") if node.kind in ("given", "text") or node.kind == "=" else node


def _matrix(text, inside):
    if "cases" in text or "aligned" in text:
        inside = [Token(",", ",") if t.kind == "\\\\" else t for t in inside if t.kind != "&"]
        return Parser(inside).whole()
    node = Parser(inside).whole()
    rows = node.parts if node.kind == "\\\\" else (node,)
    rows = [row.parts if row.kind == "&" else (row,) for row in rows]
    if all(row[0].kind == "=" for row in rows):
        return Node(",", tuple(row[0] for row in rows))
    shape = f"{re.sub('begin|[pbB{}]|matrix', '', text[1:-1])}matrix {[len(row) for row in rows]}"
    return Node("(", tuple(cell for row in rows for cell in row), shape)


def _set(inside):
    r"""Reads \{1,2\}, \{x \mid x>2\} and \{2k \mid k\in\mathbb{Z}\}."""
    for i, token in enumerate(inside):
        if token.kind in ("|", ":") and 0 < i < len(inside) - 1 and not inside[0].kind == "|":
            head, rest = Parser(inside[:i]).whole(), Parser(inside[i + 1 :]).whole()
            if head.kind == "=" and not head.parts[1] == Node("x", (), "setR"):
                raise Unread
            variable = head.kind in ("x", "=", "(")
            return rest if variable else head
    node = Parser(inside).whole()
    if node.kind == "=":
        raise Unread
    return Node("{", node.parts if node.kind in ",;" else (node,))


# --- meaning

INFINITY = Node("x", (), "∞")
REALS = Node("(", (Node("neg", (INFINITY,)), INFINITY), "()")
DOMAIN = re.compile(r"(?:set)?[ZNQR](?:[_^].*)?")


@lru_cache(4096)
def read(text: str) -> Node:
    """Returns the tree of an answer. Its kind is "unread" if the grammar can't read the whole text."""
    try:
        return meaning(Parser(_introduced(tokens(text))).whole())
    except (Unread, RecursionError, ValueError, IndexError, ZeroDivisionError):
        return Node("unread", (), "".join(text.split()))


def _introduced(found):
    """Drops the introduction `The value of x is`. Turns `hours: 3` into `3 hours`, and `(B) 15` into 15 with
    the unit `choice B`."""
    if match := BASE.fullmatch(spell(found)):
        return [Token("w", f"{match[1].lstrip('0')}base{BASES.get(match[2].lower(), match[2])}")]
    if len(found) == 2 and found[0].kind == "boxed":  # \boxed{5 without its end
        found = list(found[1].parts)
    code = ""
    for t in found:
        word = CODES.get(t.text.lower(), "n" if t.text.lower() in CHANGED else "w")
        code += word[0] if t.kind == "w" else t.kind[:1]
    if match := re.match(r"[=≈:]+|[wxa]{0,12}it?[:=]*(?=[^=])|w[wx]{0,9}:(?=.)", code):
        end = match.end()
        if end == 2 and found[0].text.lower().endswith("s") and end < len(found):
            return [*found[end:], found[0]]
        return _introduced(found[end:]) if end < len(found) else found
    if match := re.search(r"(?<=.)(?:i[wo]*a|o)$", code):
        return found[: match.start()]
    if re.match(r"w+\($", code) and any(t.kind == "," for t in found[-1].parts):  # center (5,-3)
        return found[-1:]
    first, letter = found[0], spell(found[:1]).strip("()")
    label = first.text == "()" or found[1:2] and found[1].text in (".", ")")
    rest = found[1:] if first.text == "()" else found[2:]
    if label and len(letter) == 1 and letter.isupper() and rest and rest[0].kind not in (",", ";", "+"):
        if rest[0].gap or rest[0].kind == "9":
            return [*rest, Token("w", f"choice{letter}")]
    return found


def meaning(node: Node) -> Node:
    """Returns a tree with the meaning of lists and relations: without conditions, with the elements of 1±2,
    and with names."""
    kind, parts, value = node
    if kind == "x" and value == "setR":
        return REALS
    if kind == "°" or kind == "neg" and parts[0].kind == "°":
        inner = parts[0] if kind == "°" else Node("neg", parts[0].parts)
        return Node("unit", (inner,), (("degree",), True))
    if kind == "unit":
        return node._replace(parts=(meaning(parts[0]),))
    if kind in EXPRESSIONS:
        return _plus_minus(node)
    parts = tuple(meaning(part) for part in parts)
    if kind == "=":
        return _relation(parts, value)
    if kind not in (",", ";", "{"):
        return node._replace(parts=parts)
    found = []
    for part in parts:
        found += part.parts if part.kind == "," else [part]
    found = [part for part in found if not _is_condition(part, found)]
    if kind == "{":
        return Node("{", tuple(dict.fromkeys(found)))
    return _system(found) if len(found) > 1 else found[0]


def _is_condition(node, others):
    """Returns whether an element of a list is a condition, such as k∈Z, or x≠1 beside an expression in x."""
    if node.kind == "given" or node.kind == "named" and node.parts[0] == REALS and len(others) > 1:
        return True
    if node.kind == "text":
        return node.value[1:2] == " " and CONDITION.search(node.value) is not None
    inside = [o for o in others if o.kind in EXPRESSIONS | {"equation"}]
    return node.kind == "<" and any(variables(node) & variables(o) for o in inside)


def _plus_minus(node):
    signs = [n for n in walk(node) if n.kind == "±"]
    if len(signs) > 1:
        raise Unread
    found = tuple(_with_sign(node, sign) for sign in (1, -1))
    return Node(",", found) if signs else node


def _with_sign(node, sign):
    if node.kind == "±":
        left, right = node.parts
        right = right if sign > 0 else Node("neg", (right,))
        return right if left == ZERO else Node("+", (left, right))
    return node._replace(parts=tuple(_with_sign(part, sign) for part in node.parts))


def _system(found):
    """Returns a list as one node. x=1, x=2 becomes x with the list 1, 2. x=1, y=2 becomes (x,y)=(1,2)."""
    if {part.kind for part in found} == {"named"}:
        found = sorted(found, key=lambda part: (not part.value.isascii(), part.value))
        names = [part.value for part in found]
        bare = {re.sub(r"(?<=[kmtxyz])_[\d,]+$", "", name) for name in names}
        values = tuple(part.parts[0] for part in found)
        if len(bare) == 1:
            values = sum((v.parts if v.kind == "," else (v,) for v in values), ())
            return Node("named", (Node(",", values, "ordered" if len(set(names)) > 1 else None),), bare.pop())
        if len(set(names)) == len(names):
            return Node("named", (Node("(", values, "="),), f"({','.join(names)})")
    return Node(",", tuple(found))


def _relation(parts, signs):
    """Returns x=5 as 5 with the name x; 3+4=7 as a chain; x<5 as a set; other relations as equations."""
    first, last = parts[0], parts[-1]
    if set(signs) & set("<>≤≥≠"):
        free = [part for part in parts if variables(part)]
        inside = free[0].parts[0] if free and free[0].kind == "abs" else free[0] if free else ZERO
        bounds = len(free) == 1 and inside.kind == "x"
        return Node("<" if bounds else "equation", parts, signs)
    if signs == "∈" and last.kind == "x" and DOMAIN.fullmatch(last.value):
        return Node("given")
    name = _name(first)
    if name and len(parts) > 2 and "≈" not in signs and all(part.kind == "x" for part in parts[:-1]):
        return _system([Node("named", (last,), part.value) for part in parts[:-1]])  # x=y=2
    if name:
        rest = last if len(parts) == 2 else _relation(parts[1:], signs[1:])
        return Node("named", (rest, first), name)
    if not any(variables(part) or part.kind == "unread" for part in parts):
        return Node("chain", parts, [*signs, "≈"].index("≈"))
    if len(parts) > 2:
        raise Unread
    return Node("equation", parts, signs)


def _name(node):
    """Returns the name that a left side is, such as x, f(x), |AB|, AB:CD, (x,y) or m+n; None for the left side
    of an equation to solve, such as 2x or x^2."""
    kind, parts, value = node
    if kind in ("x", "text"):
        return None if {*value.casefold().split()} & (CHANGED.keys() | {"π", "∞"}) else value
    if kind in (":", "/", "("):
        names = [_name(part) for part in parts]
        return None if None in names else f"({','.join(names)})" if kind == "(" else ":".join(names)
    letters = variables(node)
    if kind in ("+", "*") and len(letters) > 1 or kind in ("sin", "cos", "tan", "cot", "abs") and letters:
        if "".join(str(part.value) for part in parts) in CHANGED:
            return None
        numbers = [n for n in walk(node) if kind in "+*" and n.kind in ("num", "neg", "/", "root")]
        powers = [n.parts[1] for n in walk(node) if n.kind == "^"]
        return None if len(numbers) > len(powers) else key(node)
    if kind == "^" and (parts[0].value, number(parts[1])) in POWERS:
        return key(node)
    if kind == "floor" and parts[0].kind == "x" and len(parts[0].value) > 1:
        return key(node)
    return None


POWERS = {("σ", (2, None)), ("A", (-1, None)), ("f", (-1, None))}


# --- numbers


@lru_cache(4096)
def number(node: Node) -> Number | None:
    """Returns the Number of a decimal, fraction, mixed number or percent; None for any other node, also for a
    fraction whose value is an integer, such as 84/2."""
    kind, parts, value = node
    if kind == "num":
        return value
    inside = [number(part) for part in parts]
    if kind == "+" and len(parts) == 2 and _is_zero(parts[1]):
        return inside[0]
    if not parts or None in inside and kind != "*":
        return None
    first = inside[0]
    if kind == "neg" and parts[0].kind != "neg":
        return Number(-first.value, first.places)
    if kind == "%":
        places = None if first.places is None and parts[0].kind != "num" else (first.places or 0) + 2
        return Number(first.value / 100, places)
    if kind == "^" and parts[0] == TEN and is_integer(inside[1]) and abs(inside[1].value) < 400:
        return Number(Fraction(10) ** int(inside[1].value))
    if kind == "*" and len(parts) == 2 and parts[1].kind == "^" and inside[1] and parts[0].kind == "num":
        return Number(first.value * inside[1].value, None if first.places is None else 0)
    if kind in ("/", ":") and len(parts) == 2 and all(map(is_integer, inside)) and inside[1].value:
        found = first.value / inside[1].value
        if found.denominator > 1 and (kind == "/" or found.denominator == inside[1].value):
            return Number(found)
    return None


def is_integer(found: Number | None) -> bool:
    return found is not None and found.places is None and found.value.denominator == 1


def _is_zero(node):
    """Returns whether a node is the imaginary part of 5+0i."""
    inside = node.parts[0] if node.kind == "neg" else node
    return inside == Node("*", (ZERO, Node("x", (), "i")))


def walk(node: Node):
    """Yields a node and all nodes below it."""
    yield node
    for part in node.parts:
        yield from walk(part)


def variables(node: Node) -> set[str]:
    found = {n.value for n in walk(node) if n.kind == "x"}
    return found - ({"e", "π", "∞"} if "j" in found else {"e", "i", "π", "∞"})


# --- equality


def grade(answer: str, gold: str, kind: str = "math") -> bool:
    r"""Returns whether `answer` equals `gold`. The three kinds: KINDDOC"""
    return bool(quick_grade(answer, gold, kind, math_equal))


def quick_grade(answer: str, gold: str, kind: str = "math", prove=lambda *_: None) -> bool | None:
    """Returns what `grade` returns, or None if only values can decide."""
    require(kind in KINDS, f"answer kind {kind!r} is unknown", f"one of {', '.join(KINDS)}")
    answer, gold = answer.strip(), gold.strip()
    if not answer or not gold:
        return False
    if answer == gold or kind == "exact":
        return answer == gold
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
    if node.kind == ":" and node.parts:
        return _letter(node.parts[0])
    text = node.value[0][-1] if node.kind == "unit" else node.value if node.kind in ("text", "x") else ""
    match = re.fullmatch(r"(?:(?:choice|option) ?)?\(?([a-z])\)?", text.lower())
    return match[1].upper() if match and (node.kind != "unit" or text[:6] == "choice") else None


def _same(answer, gold, prove):
    """Returns whether two nodes are equal. prove(answer, gold) compares two expressions or equations. It
    returns None if it can't decide. `_same` returns None if such a pair matters."""
    kinds = {answer.kind, gold.kind}
    if answer == gold or "unread" in kinds:
        return answer == gold or gold.kind == "unread" and prove(answer, gold)
    if "chain" in kinds:
        return _same_chain(answer, gold, prove)
    if "named" in kinds:
        return _same_named(answer, gold, prove)
    if "unit" in kinds:
        return _same_unit(answer, gold, prove)
    a, b = number(answer), number(gold)
    if a and b:
        return _same_number(a, b)
    if kinds == {"(", ","} and "=" in (answer.value, gold.value) or kinds == {"(", ","} and "ordered" in (answer.value, gold.value) or kinds in ({"("}, {":"}):
        return _same_tuple(answer, gold, prove)
    if kinds & SETS or REALS in (answer, gold) or any(part.kind in SETS for node in (answer, gold) if node.kind in ",{" for part in node.parts):
        return prove(answer, gold)
    if kinds & {",", "{"}:
        ours, theirs = (n.parts if n.kind in ",{" else (n,) for n in (answer, gold))
        return _unordered(ours, theirs, prove)
    if "text" in kinds and kinds <= {"text", "x"}:
        words = answer.value, gold.value
        return min(map(len, words)) > 1 and words[0].casefold() == words[1].casefold()
    return (kinds == {"equation"} or kinds <= EXPRESSIONS and not b) and not _unfinished(answer, gold) and prove(answer, gold)


SETS = {"<", "∪", "∩", "∖"}


def _same_named(answer, gold, prove):
    """Does the work of `_same` if one or both nodes have a name: x=5 equals 5 and x=5, but not y=5."""
    (name, a), (needed, b) = ((n.value, n.parts[0]) if n.kind == "named" else (None, n) for n in (answer, gold))
    bare = [name and re.sub(r"(?:_[\w,+-]+|\(.*\))+$", "", name) for name in (name, needed)]
    other = name and needed and name not in (needed, bare[1]) and bare[0] != needed
    calls = [re.fullmatch(r"[A-Za-z]\(([a-z])\)", text or "") for text in (name, needed)]
    if other and all(calls) and bare[0] == bare[1]:  # f(t)=2t equals f(x)=2x
        return _same(_renamed(a, calls[0][1], calls[1][1]), b, prove)
    if "<" in (a.kind, b.kind):
        return prove(answer, gold)
    if other and not {a.kind, b.kind} <= EXPRESSIONS | {"text"}:
        return False
    equations = [Node("equation", n.parts[::-1], "=") if n.kind == "named" else n for n in (answer, gold)]
    solved = all(n.kind == "equation" and len(n.parts) == 2 for n in equations)
    if needed and len(gold.parts) > 1 and gold.parts[1].kind in "+*" and len(variables(gold.parts[1])) > 1:
        return solved and _same(*equations, prove)  # x+y=5 may be a line
    if other or "equation" in (a.kind, b.kind):
        letters = variables(b)
        curve = not needed or letters and letters | {needed} <= set("Ctxyz")
        return bool(curve and solved) and _same(*equations, prove)
    return _same(a, b, prove)


def _renamed(node, old, new):
    parts = tuple(_renamed(part, old, new) for part in node.parts)
    return Node(node.kind, parts, new if node.value == old else node.value)


def _same_chain(answer, gold, prove):
    """Does the work of `_same` if one or both nodes are a chain, such as 3+4=7 or 1/3≈0.33."""
    target = gold.parts[gold.value - 0] if gold.kind == "chain" else gold
    if answer.kind != "chain":
        return _same(answer, target, prove)
    value, steps = answer.parts[answer.value], answer.parts
    verdicts = [_same(value, target, prove)]
    if not verdicts[0] and _has_decimal(gold):
        verdicts = [any(_same(step, gold, prove) for step in steps[answer.value + 1 :])]
    if value.kind == "unit" and value.value[0] == ("degree",):
        value = Node("°", value.parts)
    for i, step in enumerate(steps if verdicts[0] else ()):
        verdicts.append(step == value or prove(step, value, 1e-6 if i < answer.value else 0.01))
    return _all(verdicts)


def _all(verdicts):
    return False not in verdicts and (None if None in verdicts else True)


def _has_decimal(node):
    return any(n.kind == "num" and n.value.places is not None for n in walk(node))


def _same_unit(answer, gold, prove):
    """Does the work of `_same` if one or both nodes have a unit. A unit of the answer alone must look like a
    unit: `5 cm` equals 5, but `5 nearly` differs from 5."""
    bare = ((), True)
    (unit, free), (needed, _) = (n.value if n.kind == "unit" else bare for n in (answer, gold))
    a, b = (n.parts[0] if n.kind == "unit" else n for n in (answer, gold))
    if needed and needed[0][:6] == "choice" and _letter(a):
        return needed[0][6:].upper() == _letter(a)
    if len(unit) == 1 == len(unit[0]) and not needed and not number(b):  # 23 h equals the product 23h
        return _same(_merged("*", a, Node("x", (), unit[0])), b, prove)
    if unit and (unit != needed if needed else not free):
        return False
    return _same(a, b, prove)


def _same_number(a, b):
    places = [n.places for n in (a, b) if n.places is not None]
    if not places or a.places == b.places:
        return a.value == b.value
    # A decimal may be a rounding of the other number.
    difference, largest = abs(a.value - b.value), max(abs(a.value), abs(b.value))
    return difference < Fraction(1, 10 ** min(places)) and difference * 10**6 <= largest


def _same_tuple(answer, gold, prove):
    forms = {answer.value, gold.value}
    if len(answer.parts) != len(gold.parts) or len(forms) > 1 and not forms <= {"=", "()", None, "ordered"}:
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


def _unfinished(answer, gold):
    """Returns whether an answer has a calculation that the gold answer lacks (see the top)."""
    ours, theirs = _calculations(answer), _calculations(gold)
    free = ("root", "log") if variables(gold) else ()
    theirs["product"] += theirs["power"]
    theirs["power"] += gold.kind == "equation" and any(n.kind == "^" for n in walk(gold))
    for name, count in ours.items():
        many = name in ("sum", "product", "power", "trig") or name in free
        if count > theirs[name] and not (many and theirs[name]):
            return True
    return False


def _calculations(node, parent=""):
    """Returns a dict: kind of calculation -> how often the tree leaves it undone."""
    kind, parts, value = node
    found = dict.fromkeys("sum product power trig log root other".split(), 0)
    if number(node) and kind != "+":
        return found
    for part in parts:
        for name, count in _calculations(part, kind).items():
            found[name] += count
    fixed = not variables(node)
    if kind == "+":
        found["sum"] += _like_terms(node)
    elif kind in ("*", "/") or kind == "neg" and "neg" in (parts[0].kind, *(n.kind for n in parts[0].parts[:1])):
        found["product"] += kind == "neg" or _product(node)
    elif kind == "^":
        _power(node, found)
    elif kind in ("log", "ln"):
        found["log"] += 1 + (parts[0].kind == "/" or _has_decimal(parts[0]))
    elif kind == "root":
        found["root"] += 1
        found["power"] += is_exact(parts[0], parts[1])
    elif kind == "opaque":
        found["other"] += 1
    elif kind in TRIG:
        found["trig"] += 1
    elif kind in ("!", "binom", "abs", "floor", "ceil"):
        found["power"] += fixed
    if kind == "/" and parts[0].kind == parts[1].kind in ("root", "log", "ln"):  # \sqrt2/\sqrt3 is one root
        found["root" if parts[0].kind == "root" else "log"] -= 1
    return found


TRIG = set("sin cos tan cot sec csc arcsin arccos arctan".split())


def is_exact(node: Node, index: Node) -> bool:
    """Returns whether a root of a number is rational, such as the square root of 16."""
    found = number(node)
    if not found or index.kind != "num" or abs(found.value) > 10**200:
        return False
    power = float(1 / index.value.value)
    pair = found.value.numerator, found.value.denominator
    return all(round(abs(n) ** power) ** int(1 / power + 0.5) == abs(n) for n in pair)


def _like_terms(node):
    """Returns whether two terms of a sum could be added: 2π+3π, and also 5π-2(π-1)."""
    rests = []
    for factor, rest in _terms(node):
        if not factor and variables(node):
            return True
        rests.append(tuple(sorted(rest)))
    return len(set(rests)) < len(rests)


def _terms(node, factor=1):
    """Returns the terms of a sum: the product of a term's numbers, and keys of its other factors."""
    if node.kind == "+":
        return [term for part in node.parts for term in _terms(part, factor)]
    if node.kind == "neg":
        return _terms(node.parts[0], factor)
    tops, bottoms = factors(node)
    sums = [part for part in tops if part.kind == "+"]
    others = [part for part in (*tops, *bottoms) if not _rational(part)]
    if sums and others == sums[:1]:
        return _terms(sums[0])
    for part in tops:
        factor *= number(part).value if number(part) else 1
    return [(factor, [("/" if part in bottoms else "") + key(part) for part in others])]


def _rational(node):
    return number(node) or node.kind == "^" and number(node.parts[0]) and is_integer(number(node.parts[1]))


def factors(node: Node) -> tuple[list, list]:
    """Returns the factors above and below the fraction bar."""
    if node.kind == "neg":
        return factors(node.parts[0])
    if node.kind not in ("*", "/") or number(node):
        return [node], []
    tops, bottoms = [], []
    for i, part in enumerate(node.parts):
        top, bottom = factors(part)
        below = node.kind == "/" and i == 1
        tops += bottom if below else top
        bottoms += top if below else bottom
    return tops, bottoms


def _product(node):
    """Returns whether a product has two numbers (2·3x), a ratio that is an integer (4π/2), or a base twice."""
    tops, bottoms = factors(node)
    numeric = [part for part in node.parts if any(map(_number, sum(factors(part), [])))]
    above, below = ([number(f).value for f in side if _number(f)] for side in (tops, bottoms))
    ratio = prod(above, start=Fraction(1)) / (prod(below) or 1)
    reducible = node.kind == "/" and below and (ratio.denominator == 1 or any(n.denominator > 1 for n in above))
    powers = [f for f in (*tops, *bottoms) if f.kind == "^" or bottoms and not number(f)]
    bases = [key(f.parts[0] if f.kind == "^" else f) for f in powers]
    imaginary = sum(f.kind == "+" and _is_complex(f) for f in tops) > 1 or any(map(_is_complex, bottoms))
    many = node.kind == "*" and len(numeric) > 1
    return many or bool(reducible) or len(set(bases)) < len(bases) or imaginary


def _number(node):
    return number(node) and abs(number(node).value) != 1


def _is_complex(node):
    return not variables(node) and any(n == Node("x", (), "i") for n in walk(node))


def _power(node, found):
    """Counts a power: a root such as x^{1/2}, or a power that could be multiplied out, such as (2x)^3."""
    base, exponent = node.parts
    power = number(exponent)
    if power and not is_integer(power):
        found["root"] += 1
    elif any(n.kind == "/" for n in walk(exponent)):
        found["root"] += 1
    elif power:
        sides = factors(base)
        numbers = [f for f in sum(sides, []) if number(f) and abs(number(f).value) != 1]
        nested = [f for f in sides[0] if f.kind == "^"]
        surd = not variables(base) and base.kind not in ("x", "num") or base.value == "i"
        found["power"] += bool(numbers or nested or surd) and not (power.value == -1 and base.kind == "num")


# --- values


def math_equal(answer: Node, gold: Node, tolerance: float | None = None) -> bool:
    """Returns whether two expressions, equations or sets are equal."""
    from mpmath import mp

    if gold.kind == "unread":
        raise ValueError(f"the gold answer {gold.value[:80]!r} cannot be parsed")
    answer, gold = (n.parts[0] if n.kind == "unit" else n for n in (answer, gold))
    kinds = {answer.kind, gold.kind}
    try:
        with mp.workdps(60):
            if "equation" in kinds:
                return len(kinds) == 1 and answer.value == gold.value and _same_equation(answer, gold)
            if INFINITY in walk(Node("", (answer, gold))) and kinds <= EXPRESSIONS:
                return False
            if not kinds <= EXPRESSIONS:
                return _same_set(answer, gold)
            return all(_same_value(answer, gold, tolerance, point) for point in points(answer, gold))
    except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError, MemoryError, AttributeError, IndexError):
        return False


def points(*nodes: Node) -> list[dict]:
    """Returns points at which two expressions are compared: values of the variables that are not special."""
    names = sorted(set().union(*map(variables, nodes)))
    starts = [(Fraction(7, 5), Fraction(3, 11)), (Fraction(-9, 7), Fraction(-4, 13)), (Fraction(8, 3), Fraction(-5, 17))]
    found = []
    for start, step in starts[: 3 if names else 1]:
        found.append({name: start + step * i + Fraction(i * i, 101) for i, name in enumerate(names)})
    return found


def _same_value(answer, gold, tolerance, point):
    from mpmath import mpmathify

    a, b = value_of(answer, point), value_of(gold, point)
    ours, theirs = _has_decimal(answer), _has_decimal(gold)
    decimal = theirs or ours and number(answer) is not None
    whole = isinstance(b, Fraction) and b.denominator == 1 and not point
    if isinstance(a, Fraction) and isinstance(b, Fraction) and (whole or not (ours or theirs)):
        return a == b
    limit = 1e-40
    if decimal or ours:
        limit = tolerance or (1e-6 if decimal else 1e-12)
    a, b = mpmathify(a), mpmathify(b)
    return abs(a - b) <= limit * max(abs(b), 0 if decimal or ours else 1)


def _same_equation(answer, gold):
    """Returns whether the difference of an equation's sides is a number times that of the other."""
    from mpmath import mpmathify

    ratios = []
    for point in points(answer, gold, Node("x", (), "~")):
        a, b = (mpmathify(_difference(n, point)) for n in (answer, gold))
        if not a or not b:
            return False
        ratios.append(a / b)
    positive = answer.value in "=≠" or ratios[0] > 0
    return positive and all(abs(ratio - ratios[0]) < 1e-30 * abs(ratio) for ratio in ratios)


def _difference(equation, point):
    """Returns the difference of an equation's sides, times all different denominators of its terms."""
    left, right = equation.parts
    node = Node("+", (left, Node("neg", (right,))))
    bottoms = {}
    for part in walk(node):
        if part.kind == "/" or part.kind == "^" and part.parts[1].kind == "neg":
            below = part.parts[1] if part.kind == "/" else Node("^", (part.parts[0], part.parts[1].parts[0]))
            bottoms[key(below)] = below
    return value_of(Node("*", (node, *bottoms.values())), point)


def _same_set(answer, gold):
    """Returns whether two sets of real numbers have the same members among their ends and between them."""
    from mpmath import inf, mpmathify

    nodes = [*walk(answer), *walk(gold)]
    names = set().union(*(variables(n.parts[-1] if n.kind == "named" else n) for n in nodes if n.kind in ("<", "named")))
    values = [mpmathify(value_of(n, {})) for n in nodes if n.kind in EXPRESSIONS and not variables(n)]
    ends = sorted({*values, *(-value for value in values), inf, -inf})
    middles = [(a + b) / 2 for a, b in zip(ends[1:], ends[2:-1], strict=False)]
    samples = [*ends, *middles, *(end + 1 for end in ends[1:-1]), *(end - 1 for end in ends[1:-1]), mpmathify(0)]
    return len(names) < 2 and all(_has(answer, x) == _has(gold, x) for x in samples)


def _has(node, x):
    """Returns whether a number x is in a set."""
    kind, parts, value = node
    if kind == "<":
        values = [value_of(part, dict.fromkeys(variables(part), x)) for part in parts]
        return abs(x) < float("inf") and all(map(_holds, values, value, values[1:]))
    if kind == "(":
        low, high = (value_of(part, {}) for part in parts)
        return _holds(low, "≤" if value[0] == "[" else "<", x) and _holds(x, "≤" if value[1] == "]" else "<", high)
    if kind in EXPRESSIONS:
        return _holds(value_of(node, {}), "=", x)
    if kind == ",":  # x≠1 beside other inequalities removes 1
        cuts = [_has(part, x) for part in parts if part.value == "≠"]
        parts = [part for part in parts if part.value != "≠"]
        return all(cuts) and (not parts or sum(_has(part, x) for part in parts))
    if kind == "named":  # |z|∈[1,3]
        return _has(parts[0], value_of(parts[1], dict.fromkeys(variables(parts[1]), x)))
    members = [_has(part, x) for part in parts]
    if kind == "∖":
        return members[0] and not members[1]
    return all(members) if kind == "∩" else any(members)


def _holds(a, sign, b):
    from mpmath import mpmathify

    a, b = mpmathify(a), mpmathify(b)
    near = a == b or abs(a - b) < 1e-30
    return sign in ("=≤≥" if near else "≠<≤" if a < b else "≠>≥")


LARGEST = 20_000  # bits of a number that is computed exactly


def value_of(node: Node, point: dict):
    """Returns the value of an expression: a Fraction if it is exact, else a number of mpmath. Raises errors
    for values that are too large."""
    from mpmath import mp

    kind, parts, value = node
    if kind == "num":
        return value.value
    if kind == "x":
        constants = {"e": mp.e, "π": mp.pi, "i": mp.j, "∞": mp.inf}
        return point[value] if value in point else +constants[value]
    found = [value_of(part, point) for part in parts]
    if not all(isinstance(v, Fraction) for v in found):
        found = [mp.convert(v) for v in found]
    if kind in OPERATIONS:
        return OPERATIONS[kind](*found)
    whole = all(isinstance(v, Fraction) and v.denominator == 1 and 0 <= v < 3000 for v in found)
    if kind == "!":
        return Fraction(factorial(int(found[0]))) if whole else mp.gamma(found[0] + mp.one)
    if kind == "binom":
        return Fraction(comb(*map(int, found))) if whole else mp.binomial(*found)
    if kind == "log" and len(found) == 1:
        return mp.log10(found[0])
    return getattr(mp, NAMES.get(kind, kind))(*found)


def _raise(base, power):
    from mpmath import mp

    whole = isinstance(power, Fraction) and power.denominator == 1
    if abs(power) > 10**9:
        raise OverflowError
    if whole and isinstance(base, Fraction):
        if abs(power) * max(base.numerator.bit_length(), base.denominator.bit_length()) < LARGEST:
            return base ** int(power)
    return mp.power(mp.convert(base), int(power) if whole else mp.convert(power))


def _root(base, index):
    from mpmath import mp

    odd_root = isinstance(base, Fraction) and base < 0 and index % 2 == 1
    return -mp.root(-base, int(index)) if odd_root else mp.root(base, int(index))


def _degrees(value):
    from mpmath import mp

    return value * mp.pi / 180


OPERATIONS = {
    "+": lambda *v: sum(v),
    "*": lambda *v: prod(v),
    "/": lambda a, b: a / b,
    "neg": lambda a: -a,
    "%": lambda a: a / 100,
    "°": _degrees,
    "^": _raise,
    "root": _root,
    "abs": abs,
}
NAMES = dict(arcsin="asin", arccos="acos", arctan="atan")


# --- formulas of the problem

FORMULA = re.compile(r"\$|\\[][()]|\\(?:begin|end)\{(?:align|equation|gather)\w*\*?\}")
SIDE = re.compile(r"^\(?\d\)|[=<>,;&]|\\(?:in|[gl]e)(?![a-z])")
ORDERED = re.compile(
    r"""(?i)(?:creas|scend)ing\ order | order\ of\ (?:in|de)creas
    | \b(?:least|smallest|greatest|largest|lowest|highest)\ to\b""",
    re.VERBOSE,
)


def repeats(answer: str, gold: str, problem: str) -> bool:
    """REPEATSDOC"""
    parts, golds = _pieces(read(answer)), _pieces(read(gold))
    ours, theirs = ([key(part) for part in side] for side in (parts, golds))
    if ours != theirs and sorted(ours) == sorted(theirs) and ORDERED.search(problem):
        return True
    right = {*theirs, *(key(_side(part)) for part in golds)}
    known = set()
    for formula in FORMULA.split(problem):
        pieces = {p for text in (formula, *SIDE.split(formula)) for p in (read(text), *_pieces(read(text)))}
        sides = {key(p) for p in pieces} | {key(_side(p)) for p in pieces}
        if not right & sides:
            known |= sides
    return all(any(_is_formula(p) and key(p) in known for p in (part, _side(part))) for part in parts)


def _pieces(node):
    if node.kind == "chain" or node.kind == "named" and node.parts[0].kind in ",{":
        return _pieces(_side(node))
    return node.parts if node.kind in ",{" else (node,)


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


def key(node: Node) -> str:
    """Returns a text that is the same for x^2-9 and -9+x^2."""
    kind, parts, value = node
    if kind in ("num", "neg") and (found := number(node)):
        return str(found.value)
    if kind == "named" and len(parts) > 1:
        kind, value = "equation", "="
    keys = [key(part) for part in parts]
    if kind in ("+", "*", "equation"):
        keys = sorted(k for k in keys if kind != "*" or k != "1")
    if len(keys) == 1 and kind in "+*" or kind == "^" and keys[1] == "1":
        return keys[0]
    return f"{kind}{'' if kind == '*' else value}({' '.join(keys)})"
