r"""Decides whether an answer equals the gold answer.

DOC
"""

import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache, partial
from html import unescape
from typing import NamedTuple

from configs import require
from grading.extract import EXTRACTORS, extract, extract_answer, plain, readers  # noqa: F401

KINDS = ("math", "choice", "exact")

# --- words


def _table(text):
    """Returns the dict of a table whose rows, separated by ";", are a value and its keys."""
    rows = [row.split() for row in text.split(";")]
    return {key: row[0] for row in rows for key in row}


# Units, each row with other names of the same unit.
UNITS = _table("""mm millimeter millimetre; cm centimeter centimetre 厘米 см; m meter metre 米 метр;
    km kilometer kilometre 千米 公里 км; in inch inche; ft foot feet; yd yard; mi mile; mg milligram;
    g gram 克; kg kilogram 千克 кг; lb pound; oz ounce; ton tonne; s sec second 秒; ms millisecond;
    min minute 分钟 минут; h hr hour 小时 часов часа; day 天 дней; week; month; yr year 岁 年 лет;
    l liter litre; ml milliliter millilitre; gal gallon; degree deg ° 度; radian rad; cent; euro;
    dollar usd $ долларов; yuan 元 人民币; рублей руб; mph; hz hertz; degc celsius; degf fahrenheit;
    n newton; j joule; w watt; v volt; pa pascal; am; pm; sq; unit; 个; 人; 种; 次""")
# Words that change the value or the meaning of the number before them: `10 dozen` does not equal 10.
NO_UNIT = set(
    """not no or on if is are was be it at by more less fewer than over under above below about least most
    between times plus minus half halves third quarter from binary base ten score gross dozen lakh crore
    hundred thousand basis greater maybe perhaps otherwise modulo""".split()
)
NO_UNIT |= {f"{word}s" for word in NO_UNIT}
PART = re.compile(  # tenths, millions, MW
    r"(?:(?:(?<!mo)n|d|ie|i[fx]|lf|igh|ur)th|illion|ward)s?\b|\b[MG](?:[WVJNg]|Hz|Pa)?\b"
)
# A word looks like a unit if it is in UNITS or matches MANY. After a number from -1 to 1, the noun may be
# singular (ONE): `1 pizza`.
MANY = re.compile("[a-z]{2,}s|people|children|w?o?men|sheep|fish|mice")
ONE = re.compile("[a-z]{3,}(?<!ed)(?<!ly)")
PLURAL = re.compile(r"(?<=[a-z]{2})s\b")
NOUNS = re.compile(r"( [a-z]{2,}[a-rt-z])s\b")
ARTICLE = re.compile(r"\b(?:an?|the|there (?:is|are)) (?=[a-z]{2})")
# A phrase before the answer may not have such a word: `its opposite is 7`.
CHANGED = set(
    """not no never wrong incorrect false negative minus opposite half twice double reciprocal inverse more
    less most least bound excluded neither nothing but except divisible exceeds up""".split()
)
DIGITS = dict(zip("two three four five six seven eight nine ten eleven twelve".split(), range(2, 13)))

# --- tokens


class Token(NamedTuple):
    """kind: number, name, word, op or group. gap: whether a space is before the token.
    parts: the tokens inside of a group, whose text is its two brackets."""

    kind: str
    text: str
    gap: bool = False
    parts: tuple = ()


# The spelling of a command or word, and then the token that it gives.
OPS = """lor ; vee ; or ; land , wedge , and , lvert | rvert | vert | mid | lt < gt > langle ( rangle ) colon :
    div / times * cdot * ast * % % percent % percents % dfrac frac tfrac frac cfrac frac le ≤ leq ≤ leqslant ≤
    ge ≥ geq ≥ geqslant ≥ ne ≠ neq ≠ bar overline dot overline degree ° circ ° varnothing ∅ emptyset ∅
    backslash ∖ setminus ∖ bigcup ∪ cup ∪ bigcap ∩ cap ∩ in ∈ approx ≈ equiv ≡ pm ± mp ∓ over over choose choose
    mod mod pmod mod bmod mod infty ∞ infinity ∞ dbinom binom tbinom binom binom binom frac frac sqrt sqrt
    lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ overline overline angle ∠ triangle △ quad quad qquad quad to to boxed boxed
    { { } } lbrace \\{ rbrace \\} & & \\ \\\\ $ $""".split()
OPS = dict(zip(OPS[::2], OPS[1::2], strict=True))
FUNCTIONS = _table("""sin; cos; tan tg; cot ctg; sec; csc; arcsin; arccos; arctan arctg; ln; log; lg; exp; sqrt;
    gcd; lcm; max; min; det; lim; int; sum; prod""")
SCALES = dict(hundred=2, thousand=3, million=6, billion=9, trillion=12)
DROPPED = set(
    """displaystyle textstyle boldsymbol bm mathit mathbf mathsf mathcal bf it rm limits hat vec overrightarrow
    checkmark large Large underline mathbb""".split()
)
TEXT = re.compile(r"\\(text\w*|mbox|mathrm|operatorname\*?)\s*\{")
TOKEN = re.compile(
    r"""(?P<space>[\s~]+ | \\[,;: ] | \\[()[\]]) | (?P<env>\\(?:begin|end)\s*\{\w+\*?\}(?:\{[lcr|]*\})?)
    | (?P<text>\\(?:text(?!color)\w*|mbox|mathrm|operatorname\*?)\s*\{) | (?P<set>\\mathbb\s*\{?\s*[A-Z]\s*\}?)
    | (?P<number>(?:\d*\.\d+|\d+\.(?=\()|\d*\.(?=\\(?:overline|bar|dot))|\d+)(?:[eE][+-]?\d{1,3}(?!\d))?) | (?P<word>\\?[^\W\d_]+)
    | (?P<op><= | >= | != | \*\* | \\. | .)""",
    re.VERBOSE | re.DOTALL | re.ASCII.__class__(0),
)
CLEANED = [
    (re.compile(pattern), new)
    for pattern, new in [
        (r"\\!\s*|\\(?:text)?color ?\{\w+\}|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-z])\.?", ""),
        (r"(?<!\\)\$([^$]*)(?<!\\)\$", r" \1 "),
        (r"\\\\\[[\d.]+ ?\w+\]", r"\\\\"),  # \\[4pt], the end of a row
        (r"\{:\}", ":"),
        (r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-z]))", "° "),
        (r"(?:° *|\bdegrees? )(?:\\\w+\{)? ?([CF])(?:elsius|ahrenheit)?\b\}?", r" \\text{deg\1}"),
        (r"\b([ap])\. ?m\b\.?", r"\1m"),  # p.m.
        (r"(?<=\d)(?:st|nd|rd|th)\b", ""),
        (r"per cent\b", "percent"),
        (r"(\d)\{,\}(?=\d{3})", r"\1"),
        (r"\](?=[^][(),;]+[,;][^][(),;]+[][])", "("),  # ]0,1[ is (0,1)
        (r"(?<=[^][(])\[(?=$|\\c[ua]p(?![a-z]))", ")"),
    ]
]
# 1,234 is a number, and (1,234) has two. In {1,234}, the argument of a command, the comma is dropped.
GROUPED = re.compile(
    r"(?<=[A-Za-z^}]\{)\d{1,3}(?:,\d{3})+(?=\})|(?<![\d.,(\[{])\d{1,3}(?:,\d{3})+(?![\d,)\]}\\])"
    r"|(?<![\d.,])\d{1,3}(?:(?:\\[ ,;:]|[ ~])\d{3})+(?!\d)"
)
DELIMITED = re.compile(
    r"\$\$(.+)\$\$|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]"
    r"|\*\*(.+)\*\*|`(.+)`|\\(?:boxed|fbox) ?\{(.+)\}",
    re.DOTALL,
)


def _tokens(text):
    text = text.strip()
    while match := DELIMITED.fullmatch(text.rstrip(".")):
        text = match[match.lastindex].strip()
    text = plain(text)
    for pattern, new in CLEANED:
        text = pattern.sub(new, text)
    text = GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text).rstrip(" .,;\\")
    found, gap = [], False
    braces = []  # for each open brace: whether its content is in words, and whether it is printed
    for match in TOKEN.finditer(text):
        kind, piece = match.lastgroup, match[0]
        if kind == "text":
            braces.append((True, False))
            gap = gap or piece[1:5] != "math"
        elif piece == "{":
            braces.append((bool(braces) and braces[-1][0], True))
            found.append(Token("op", "{", gap))
        elif piece == "}":
            if not braces or braces.pop()[1]:
                found.append(Token("op", "}", gap))
        elif kind != "space":
            words = bool(braces) and braces[-1][0]
            found += _token(kind, piece, match, words, gap)
        if kind != "text":
            gap = kind == "space"
    return found


def _token(kind, piece, match, in_words, gap):
    """Returns the tokens of one match of TOKEN."""
    name = piece.lstrip("\\")
    if kind == "set":
        return [Token("name", f"set{re.sub('[^A-Z]', '', piece[7:])}", gap)]
    if kind == "env":
        return [Token("op", re.sub(r"\s|\{[lcr|]*\}$", "", piece).replace("array", "matrix"), gap)]
    if kind == "number":
        return [Token("number", piece, gap)]
    if piece in ("\\{", "\\}", "\\\\"):
        return [Token("op", piece, gap)]
    if kind == "op" and piece not in OPS and name not in OPS:
        sign = {"<=": "≤", ">=": "≥", "!=": "≠", "**": "^"}.get(piece, name)
        return [] if name in DROPPED or sign == "!" != piece else [Token("op", sign, gap)]
    if piece[0] == "\\" or kind == "op":
        if name in DROPPED:
            return []
        if name in FUNCTIONS and name != "sqrt":
            return [Token("function", FUNCTIONS[name], gap)]
        letter = unescape(f"&{name};")
        if len(letter) == 1 and name not in OPS and name != "Omega":
            return [Token("name", letter, gap)]
        if name == "Omega":
            return [Token("word", "ohms", gap)]
        return [Token("op", OPS.get(name, piece), gap)]
    return _letters(name, match, in_words, gap)


def _letters(run, match, in_words, gap):
    """Returns the tokens of a run of letters: a word such as `meters`, or a variable for each letter of `xy`.
    All meanings of letters are decided here."""
    low, text = run.lower(), match.string
    if not run.isascii() and "\u0370" <= run[0] <= "\u03ff":
        return [Token("name", letter, gap) for letter in run]
    if in_words and run in ("e", "i", "d"):
        return [Token("name", run, gap)]
    if low in OPS and low not in ("in", "over", "pm", "div", "dot", "bar", "circ"):
        return [Token("op", OPS[low], gap)]
    if low in FUNCTIONS and low not in ("max", "min", "sum", "sec", "int", "lim", "prod"):
        fn = FUNCTIONS[low]
        return [Token("op" if fn == "sqrt" else "function", fn, gap)]
    if low in ("pi", "theta"):
        return [Token("name", unescape(f"&{low};"), gap)]
    if in_words or not run.isascii() or _is_word(run, text, match.start(), match.end()):
        return [Token("word", run, gap)]
    if run.isupper() and len(run) > 1:
        return [Token("name", run, gap)]
    return [Token("name", letter, gap and i == 0) for i, letter in enumerate(run)]


def _is_word(run, text, start, end):
    before, after = text[max(start - 2, 0) : start], text[end : end + 1]
    if PLURAL.sub("", run.lower()) in UNITS:
        if len(run) > 1:
            return bool(re.search(r"[\d })°]$", before))
        after = text[end : end + 3]
        if run in "njvwNJVW" or re.match(r" ?[-+(]| [a-z]\b", after):
            return False
        return bool(re.search(r"[\d})] $", before)) and not re.search("[A-Za-z]", text[:start])
    if re.search("[a-z][A-Z]", run) or re.search(r"[\w^})\\]$", before) or after in tuple("^_+-=/"):
        return False
    return len(run) > 2 or run.lower() in NO_UNIT | {"an", "of", "as", "to"} or run.lower() in SCALES


def _grouped(tokens):
    """Returns the tokens with each pair of brackets and what it holds as one token. An open bracket without
    its end ends with the text."""
    stack, opened = [[]], []
    for token in tokens:
        kind = token.text if token.kind == "op" else ""
        if kind in ("(", "[", "{", "\\{") or kind.startswith("\\begin"):
            opened.append(token)
            stack.append([])
        elif (kind in (")", "]", "}", "\\}") or kind.startswith("\\end")) and opened:
            start, inside = opened.pop(), stack.pop()
            while inside and inside[-1].text in (".", ",") and inside[-1].kind == "op":
                inside.pop()
            stack[-1].append(Token("group", start.text + kind, start.gap, tuple(inside)))
        else:
            stack[-1].append(token)
        if len(stack) > DEPTH:
            raise Unread
    while opened:
        start, inside = opened.pop(), tuple(stack.pop())
        stack[-1].append(Token("group", start.text, start.gap, inside))
    return stack[0]


DEPTH = 12  # brackets inside of brackets; a deeper text is not read


class Unread(Exception):
    """Raised for a text that the grammar does not read as a whole, such as `3@2`."""


class Node(NamedTuple):
    """A node of the tree: see the table at the top."""

    kind: str
    value: object = None
    parts: tuple = ()


class Number(NamedTuple):
    value: Fraction
    places: int | None  # number of digits after the decimal point; None for an exact number such as 1/3


# --- expressions

EXPRESSIONS = set("num name add mul neg div pow call degree percent pm".split())
POWERS = {"over": 1, "choose": 1, "+": 10, "-": 10, "±": 10, "*": 20, "/": 20}
STARTS = set("frac binom sqrt √ overline | ⌊ ⌈ ∠ ∞ choose".split())


class Parser:
    """Reads an expression by precedence (Pratt's method)."""

    def __init__(self, tokens):
        self.tokens = list(tokens)
        self.at = 0
        self.bars = 0  # open signs |

    @property
    def next(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else Token("end", "")

    def accept(self, *texts):
        if self.next.kind == "op" and self.next.text in texts:
            self.at += 1
            return True
        return False

    def whole(self):
        node = self.expression(0)
        if self.next.kind != "end":
            raise Unread
        return node

    def expression(self, power):
        """Reads operators that bind stronger than `power`."""
        left = self.prefix()
        while True:
            sign = self.next.text if self.next.kind == "op" else ""
            if POWERS.get(sign, 0) > power:
                self.at += 1
                left = _binary(sign, left, self.expression(POWERS[sign]))
            elif power < 20 and self.starts():
                left = self.juxtaposed(left)
            else:
                return left

    def starts(self):
        kind, text = self.next[:2]
        if kind == "op":
            return text in STARTS and not (text == "|" and self.bars)
        return kind in ("number", "name", "function", "group")

    def juxtaposed(self, left):
        token = self.next
        right = self.postfix()
        digits = token.kind == "number" or token.text[0] == "{" and token.parts[:1] and token.parts[0].kind == "number"
        if digits and (left.kind == "num" or left.kind == "mul" and left.parts[-1].kind == "num"):
            raise Unread  # 7 5 and 7{5}
        return Node("mul", None, (left, right))

    def prefix(self):
        if self.accept("-"):
            return Node("neg", None, (self.expression(10),))
        if self.accept("+"):
            return self.expression(10)
        if self.accept("±"):
            return Node("pm", None, (Node("num", Number(Fraction(0), None)), self.expression(10)))
        return self.postfix()

    def postfix(self):
        node = self.atom()
        while self.next.kind == "op":
            if self.accept("^"):
                node = Node("pow", None, (node, self.argument(whole=True)))
            elif self.accept("!"):
                node = Node("call", "!", (node,))
            elif self.accept("%"):
                node = Node("percent", None, (node,))
            elif self.accept("°"):
                node = Node("degree", None, (node,))
            else:
                break
        return node

    def argument(self, whole=False):
        """Reads the argument of a command: a group, or one character such as the 1 of \\frac12."""
        token = self.next
        if token.kind == "number" and not whole and len(token.text) > 1 and "." not in token.text:
            self.tokens[self.at] = Token("number", token.text[1:])
            return _number_node(token.text[0])
        sign = whole and self.accept("-")
        if whole:
            self.accept("+")
        node = self.atom()
        return Node("neg", None, (node,)) if sign else node

    def atom(self):
        token = self.next
        self.at += 1
        if token.kind == "number":
            return self.number(token)
        if token.kind == "name":
            return self.name(token)
        if token.kind == "function":
            return self.function(token.text)
        if token.kind == "group":
            return self.group(token)
        if token.kind != "op":
            raise Unread
        return self.command(token.text)

    def group(self, token):
        if token.text[0] not in "([{":
            raise Unread
        node = _math(token.parts)
        return Node("call", "floor", (node,)) if token.text[0] == "[" else node

    def command(self, text):
        if text == "frac":
            top = self.argument()
            return Node("div", None, (top, self.argument()))
        if text == "binom":
            top = self.argument()
            return Node("call", "binom", (top, self.argument()))
        if text == "sqrt" or text == "√":
            index = Node("num", Number(Fraction(2), None))
            if self.next.kind == "group" and self.next.text == "[]":
                index = self.group_parts()
            return Node("call", "root", (self.argument(whole=text == "√"), index))
        if text == "|":
            self.bars += 1
            node = self.expression(0)
            self.bars -= 1
            if not self.accept("|"):
                raise Unread
            return Node("call", "abs", (node,))
        if text in "⌊⌈":
            node = self.expression(0)
            if not self.accept("⌋" if text == "⌊" else "⌉"):
                raise Unread
            return Node("call", "floor" if text == "⌊" else "ceil", (node,))
        if text == "∞":
            return Node("name", "∞")
        if text == "overline":
            return self.argument()
        raise Unread

    def group_parts(self):
        token = self.next
        self.at += 1
        return _math(token.parts)

    def number(self, token):
        text = token.text
        start = self.at
        if text.isdecimal() and self.accept("frac"):
            part = number(self.command("frac"))
            if part and 0 < part.value < 1:
                return Node("num", Number(int(text) + part.value, None))
            self.at = start
        if "." in text and self.next.text == "overline":
            self.at += 1
            inside = self.next
            digits = inside.text if inside.kind == "number" else _spell(inside.parts)
            self.at += 1
            return _repeating(text, digits)
        if "." in text and self.next.text == "()" and not self.next.gap:
            digits = _spell(self.next.parts)
            if digits.isdecimal() and self.at + 1 == len(self.tokens):  # 0.(3)
                self.at += 1
                return _repeating(text, digits)
        rest = self.tokens[self.at : self.at + 3]
        if [t.kind for t in rest] == ["number", "op", "number"] and rest[0].gap and rest[1].text == "/":
            top, bottom = (_exact(rest[0].text), _exact(rest[2].text))
            if text.isdecimal() and top and bottom and top < bottom:  # 4 2/3
                self.at += 3
                return Node("num", Number(int(text) + Fraction(top, bottom), None))
        return _number_node(text)

    def name(self, token):
        text = token.text
        if self.accept("_"):
            start = self.at
            script = self.script()
            if text == "C" and self.accept("^"):  # C_5^2
                top = self.tokens[start]
                return Node("call", "binom", (_math(top.parts or [top]), self.argument(whole=True)))
            text += "_" + script
        while self.accept("'"):
            text += "'"
        if self.accept("_"):
            raise Unread
        return Node("name", text)

    def script(self):
        """Reads an index, such as the n of a_n, as text."""
        token = self.next
        self.at += 1
        if token.kind == "group":
            return _spell(token.parts)
        if token.kind == "number" and len(token.text) > 1:
            pass
        if token.kind not in ("number", "name", "word"):
            raise Unread
        return token.text

    def function(self, fn):
        index = power = None
        while self.next.text in ("^", "_") and self.next.kind == "op":
            if self.accept("^"):
                power = self.argument(whole=True)
            else:
                self.at += 1
                index = self.argument()
        if fn in ("int", "sum", "prod", "lim", "det"):
            rest = _spell(self.tokens[self.at :])
            self.at = len(self.tokens)
            return Node("call", fn, (Node("name", f"{index}{power}{rest}"),))
        if fn in ("gcd", "lcm", "max", "min") and self.next.kind == "group":
            found = _bracket(self.next)
            self.at += 1
            return Node("call", fn, found.parts)
        if self.next.kind == "group" and self.next.text[0] in "({":
            node = self.atom()
        else:
            node = self.prefix()
            while self.starts() and self.next.kind != "function":
                node = self.juxtaposed(node)
        if fn == "exp":
            return Node("pow", None, (Node("name", "e"), node))
        if power == Node("neg", None, (_number_node("1"),)) and fn in ("sin", "cos", "tan"):
            return Node("call", f"arc{fn}", (node,))
        if fn == "lg":
            fn, index = "log", _number_node("10")
        call = Node("call", fn, (node,) if index is None else (node, index))
        return call if power is None else Node("pow", None, (call, power))


def _binary(sign, left, right):
    if sign == "±":
        return Node("pm", None, (left, right))
    if sign == "choose":
        return Node("call", "binom", (left, right))
    if sign in "+-":
        return Node("add", None, (left, right if sign == "+" else Node("neg", None, (right,))))
    return Node("mul" if sign == "*" else "div", None, (left, right))


def _math(tokens):
    return Parser(tokens).whole()


def _exact(text):
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 40 else None


def _number_node(text):
    if not text.isascii() or len(text) > 400:
        raise Unread
    digits, _, exponent = text.lower().partition("e")
    whole, _, places = digits.partition(".")
    value = Fraction(f"0{whole}.{places}0e{exponent or 0}")
    count = max(len(places) - int(exponent or 0), 0) if places else None
    return Node("num", Number(value, count))


def _repeating(text, digits):
    if not digits.isdecimal() or len(digits) > 40 or len(text) > 80:
        raise Unread
    places = len(text.partition(".")[2])
    end = Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
    return Node("num", Number(_number_node(text).value.value + end, None))


def _spell(tokens):
    """Returns the text of tokens without spaces and braces."""
    found = []
    for token in tokens:
        inside = _spell(token.parts)
        if token.kind == "group":
            left, right = (token.text[:-1], token.text[-1:]) if token.text != "{}" else ("", "")
            inside = f"{left}{inside}{right}"
        found.append(inside or token.text)
    return "".join(found)


def _splits(tokens, signs):
    """Splits tokens at the operators `signs`. Returns the parts and the operators."""
    parts, found = [[]], []
    for token in tokens:
        if token.kind == "op" and token.text in signs:
            parts.append([])
            found.append(token.text)
        else:
            parts[-1].append(token)
    return parts, found


# --- answers


@lru_cache(4096)
def read(text: str) -> Node:
    """Returns the tree of an answer; a Node of the kind "unread" if the grammar can't read the whole text."""
    try:
        tokens = _grouped(_tokens(text))
        if len(tokens) == 2 and tokens[0].text == "boxed":  # \boxed{5 without its end
            tokens = list(tokens[1].parts)
        while tokens and tokens[-1].kind == "op" and tokens[-1].text in (".", ",", ";"):
            tokens.pop()
        return _labelled(tokens)
    except (Unread, RecursionError, ValueError, ZeroDivisionError, OverflowError):
        return Node("unread", "".join(text.split()))


def _labelled(tokens):
    while tokens and tokens[0].kind == "op" and tokens[0].text in "≈=:":
        tokens = tokens[1:]
    first = tokens[0] if tokens else None
    if first is not None and len(tokens) > 1:
        label = _label(tokens)
        if label:
            letter, rest = label
            if rest and not (rest[0].kind == "op" and rest[0].text in ";,+"):
                return Node("quantity", (("choice", letter.lower()), True), (_read(rest),))
    return _read(tokens)


def _label(tokens):
    """Returns the letter of a choice and the rest: of (B) 15, or B. 15."""
    first, second = tokens[:2]
    if first.kind == "group" and first.text == "()" and len(first.parts) == 1:
        letter = first.parts[0].text
        if len(letter) == 1 and letter.isupper() and (second.gap or second.kind == "number"):
            return letter, tokens[1:]
    if len(first.text) == 1 and first.text.isupper() and second.text in (".", ")") and tokens[2:]:
        if tokens[2].gap:
            return first.text, tokens[2:]
    return None


def _read(tokens):
    """Reads a list, or one element."""
    parts, found = _splits(tokens, ";")
    if not found:
        parts, found = _splits(tokens, ",")
    parts = [part for part in parts if part]
    if not parts:
        raise Unread
    elements = []
    for part in parts:
        elements += _elements(part, ";" in found)
    if len(elements) > 1:
        elements = [e for e in elements if not _is_condition(e, elements)] or elements
    if len(elements) == 1:
        return elements[0]
    return _list(elements)


def _elements(tokens, nested):
    """Returns the elements that a part of a list stands for: two for 1±2, and for x=y=2."""
    node = _read(tokens) if nested else _element(tokens)
    if node.kind == "list" and node.value != "{":
        return list(node.parts)
    return [node]


def _expand(node):
    """Returns [1+2, 1-2] for 1±2."""
    found = []
    for sign in (True, False):
        count, new = _choose(node, sign)
        found.append(new)
    if count != 1:
        return [node] if not count else []
    return found


def _choose(node, plus):
    if node.kind == "pm":
        left, right = node.parts
        right = right if plus else Node("neg", None, (right,))
        if left == Node("num", Number(Fraction(0), None)):
            return 1, right
        return 1, Node("add", None, (left, right))
    count, parts = 0, []
    for part in node.parts:
        n, new = _choose(part, plus) if isinstance(part, Node) else (0, part)
        count += n
        parts.append(new)
    return count, node._replace(parts=tuple(parts))


def _list(elements):
    kinds = {e.kind for e in elements}
    if "intervals" in kinds and kinds <= {"intervals", "named"}:
        bounds = _bounds(elements)
        if bounds:
            return bounds
    if kinds == {"named"}:
        named = sorted(elements, key=lambda e: (not e.value.isascii(), e.value))
        names = [e.value for e in named]
        bare = {ROOT.sub("", name) for name in names}
        values = tuple(e.parts[0] for e in named)
        if len(bare) == 1:
            flat = []
            for value in values:
                flat += value.parts if value.kind == "list" and value.value != "{" else [value]
            return Node("named", bare.pop(), (Node("list", "=" if len(set(names)) > 1 else ",", tuple(flat)),))
        if len(set(names)) == len(names):
            return Node("named", f"({','.join(names)})", (Node("tuple", "=", values),))
    return Node("list", ",", tuple(elements))


ROOT = re.compile(r"(?<=[kmtxyz])_[\d,]+$")  # the _1 of x_1, a root of an equation


def _is_condition(node, elements):
    """Returns whether an element is no part of the answer: k∈Z, k an integer, x≠1 beside an expression."""
    if node.kind == "condition":
        return True
    if node.kind == "text":
        return bool(re.search(r"\b(integers?|any|real|constants?|arbitrary)\b", node.value)) and node.value[1:2] == " "
    if node.kind == "named" and node.parts[0] == Node("intervals", None, REALS):
        return True
    if node.kind != "intervals" or not node.value or len(node.value) > 1:
        return False
    others = [e for e in elements if e is not node and e.kind != "condition"]
    return any(e.kind not in ("intervals", "named") and node.value in _names(e) for e in others)


BASE = re.compile(r"\(?([0-9A-F]*\d[0-9A-F]*)\)?_(\d{1,2}|[A-Za-z]{3,6})")
GIVEN = set("for where with when if given".split())


def _element(tokens):
    """Reads a part of a list, which has no comma outside of its brackets."""
    tokens = _without_condition(tokens)
    if match := BASE.fullmatch(_spell(tokens)):
        digits, base = match.groups()
        return Node("text", f"{digits.lstrip('0')} base {DIGITS.get(base.lower(), base)}")
    tokens = _without_phrase(tokens)
    if len(tokens) == 1 and tokens[0].kind == "group":
        return _bracket(tokens[0])
    if tokens[-1].text in ("c", "K") and tokens[-2:][0].text == "+" and {t.text for t in tokens} & set("tux"):
        tokens = [*tokens[:-1], Token("name", "C")]  # the constant of an integral
    parts, signs = _splits(tokens, "=≈≡∈<>≤≥≠")
    if signs:
        return _relation(parts, signs, tokens)
    parts, signs = _splits(tokens, "∪∖")
    if not signs and tokens and tokens[0].text == "setR" and len(tokens) == 3 and tokens[1].text == "-":
        parts, signs = [tokens[:1], tokens[2:]], ["∖"]
    if signs:
        return _union(parts, signs)
    if any(t.text == "mod" and t.kind == "op" for t in tokens):
        head, _ = _splits(tokens, ["mod"])
        return Node("tuple", f"mod {_spell(head[1])}", (_element(head[0]),))
    for i, token in enumerate(tokens):
        if token.kind == "word" and (not i or tokens[i - 1].text != "_") or token.text == "$":
            return _words(tokens, i)
    parts, signs = _splits(tokens, [":", "to"])
    if signs:
        if not all(parts):
            raise Unread
        return Node("tuple", ":", tuple(_element(part) for part in parts))
    return _scalar(tokens)


def _scalar(tokens):
    """Reads an expression. Returns a list for 1±2 and a quantity for 90°."""
    if len(tokens) == 1 and tokens[0].kind == "name" and tokens[0].text not in ("e", "i", "π"):
        name = tokens[0].text
        if name == "setR":
            return Node("intervals", None, REALS)
        return Node("name", name)
    if len(tokens) == 1 and tokens[0].text == "∅":
        return Node("list", "{", ())
    point = tokens[0].text.isupper() and len(tokens) == 2 and tokens[1].text == "()" and "," in [t.text for t in tokens[1].parts]
    if point:  # the point A(1,2)
        return Node("named", tokens[0].text, (_bracket(tokens[1]),))
    scaled = _scaled(tokens)
    if scaled:
        return scaled
    node = _math(tokens)
    if node.kind == "degree":
        return Node("quantity", (("degree",), True), node.parts)
    if node.kind == "neg" and node.parts[0].kind == "degree":
        return Node("quantity", (("degree",), True), (Node("neg", None, node.parts[0].parts),))
    several = _expand(node)
    if not several:
        raise Unread
    return several[0] if len(several) == 1 else Node("list", ",", tuple(several))


def _scaled(tokens):
    """Reads a factor times a matrix; None for other tokens."""
    last = tokens[-1]
    if "matrix" not in last.text or last.kind != "group":
        return None
    matrix = _bracket(last)
    factor = tokens[:-1]
    if not factor:
        return matrix
    if factor[-1].text == "*":
        factor = factor[:-1]
    node = Node("neg", None, (_number_node("1"),)) if [t.text for t in factor] == ["-"] else _math(factor)
    return Node("tuple", matrix.value, tuple(Node("mul", None, (node, part)) for part in matrix.parts))


def _without_condition(tokens):
    """Drops a condition at the end: (k∈Z), x≠1 after a wide space, `for all x∈R`."""
    last = tokens[-1]
    signs = {t.text for t in last.parts if t.kind == "op"} if last.kind == "group" else set()
    words = [t for t in last.parts if t.kind == "word"] if last.kind == "group" else []
    if last.text == "()" and len(tokens) > 1:
        if signs & set("∈<>≤≥≠") or len(words) > 1 and "mod" not in signs:
            return _without_condition(tokens[:-1])
        if words or "mod" in signs:  # 5 (cm), 3 (mod 7)
            tokens = [*tokens[:-1], *last.parts]
    for i, token in enumerate(tokens):
        wide = token.text == "quad" and token.kind == "op"
        if i and (wide or token.kind == "word" and token.text.lower() in GIVEN):
            rest = {t.text for t in tokens[i:] if t.kind == "op"}
            if rest & set("∈<>≤≥≠") and any(t.kind != "word" for t in tokens[:i]):
                return tokens[:i]
        if i > 1 and token.text == "∈" and tokens[i - 1].kind == "name" and tokens[i - 1].gap and _is_domain(tokens[i + 1 :]):
            return tokens[: i - 1]
    return [t for t in tokens if t.text != "quad" or t.kind != "op"]


def _is_domain(tokens):
    text = _spell(tokens)
    return bool(re.fullmatch(r"(?:set)?[ZNQR][\^_*+{}]*", text))


def _without_phrase(tokens):
    """Drops a phrase such as `The answer is`, or turns `hours: 3` into `3 hours`."""
    end = 0
    for i, token in enumerate(tokens):
        low = token.text.lower()
        if token.kind == "word" and low in ("is", "are", "equals", "answer", "equal") or i and token.text == ":" and tokens[i - 1].kind == "word":
            end = i + 1
        elif token.kind not in ("word", "name"):
            break
    lead = tokens[:end]
    words = {t.text.lower() for t in lead}
    last = [t.text.lower() for t in tokens]
    for i in range(1, len(tokens)):
        if last[i] in ("is", "are") and re.fullmatch(r"(is|are) the (only )?(answer|solution|value)s?", " ".join(last[i:])):
            return tokens[:i]
    if last[-1] == "only" and len(tokens) > 1:
        return tokens[:-1]
    if not end or end == len(tokens) or words & CHANGED or len(lead) > 12:
        return tokens
    if end == 2 and lead[1].text == ":" and lead[0].text.endswith("s"):  # hours: 3
        return [*tokens[2:], lead[0]]
    if tokens[end].text in ("to", ":", "=") or tokens[end].text.lower() == "is":
        return _without_phrase(tokens[end + 1 :])
    return tokens[end:]


def _words(tokens, i):
    """Reads tokens whose first word is tokens[i]: a number with its unit, or a text."""
    before, unit = tokens[:i], tokens[i:]
    if unit[0].text == "$" and len(unit) > 1 or unit[0].text.lower() in ("dollars", "euros", "pounds", "cents") and not before and len(unit) > 1:
        before, unit = [*before, *unit[1:]], unit[:1]  # $5
        for j, token in enumerate(before):
            if token.kind == "word":
                before, unit = before[:j], [*before[j:], *unit]
                break
    while unit and unit[0].text.lower() in SCALES and before:
        ten = Token("group", "{}", False, (Token("number", str(SCALES[unit[0].text.lower()])),))
        before = [*before, Token("op", "*"), Token("number", "10"), Token("op", "^"), ten]
        unit = unit[1:]
    if before and not unit:
        return _scalar(before)
    allowed = all(t.kind in ("word", "number", "group") or t.text in "/*^-.$°" or t.text in UNITS or t.text == "to" for t in unit)
    words = [t.text.lower() for t in unit if t.kind != "op" or t.text in "$°"]
    spelled = " ".join(words)
    names = [w for w in words if not w.isdigit()]
    bad = NO_UNIT & set(words) or PART.search(" ".join(t.text for t in unit)) or len(names) > 4
    if len(before) == 1 and before[0].kind == "name" and set(words) & set("integer integers real any constant natural".split()):
        return Node("condition", before[0].text)
    article = [t.text for t in before] in (["a"], ["an"])
    if not before or article or bad or not allowed or before[-1].kind == "op" and before[-1].text not in ")!%°'|":
        return _text(tokens)
    try:
        inside = _element(before)
    except Unread:
        return _text(tokens)
    inside = inside.parts[0] if inside.kind == "quantity" else inside
    value = number(inside)
    noun = ONE if value and abs(value.value) <= 1 else MANY
    free = any(noun.fullmatch(name) or PLURAL.sub("", name) in UNITS for name in names)
    return Node("quantity", (_unit(unit), free), (inside,))


def _text(tokens):
    pieces = []
    word = False
    for token in tokens:
        if token.gap or word or token.kind == "word":
            pieces.append(" ")
        pieces.append(f"({_plain_text(token.parts)})" if token.kind == "group" else token.text)
        word = token.kind == "word"
    words = "".join(pieces).strip()
    if len(tokens) == 1 and (len(words) == 1 or words.isupper()):
        return Node("name", words)
    words = words.casefold()
    return Node("text", NOUNS.sub(r"\1", ARTICLE.sub("", words)))


def _plain_text(tokens):
    return " ".join(_plain_text(t.parts) if t.kind == "group" else t.text for t in tokens)


def _unit(tokens):
    """Returns the words of a unit in one spelling: ("m", "2") for m^2 and for square meters."""
    found, minus, power = [], False, ""
    flat = []
    for token in tokens:
        flat += token.parts if token.kind == "group" else [token]
    for token in flat:
        word = PLURAL.sub("", token.text.lower())
        if word in ("per", "/"):
            found.append("/")
        elif word == "-":
            found.insert(-1, "/")
        elif word == "mph":
            found += ["mi", "/", "h"]
        elif word in ("square", "sq", "cubic"):
            power = "3" if word == "cubic" else "2"
        elif token.kind in ("word", "number", "name") or token.text in "$°":
            if word not in ("such", "of"):
                found += [UNITS.get(word, word), *power]
                power = ""
    text = " ".join(found).replace("degree c", "degc").replace("degree f", "degf")
    return tuple(text.replace("degree degc", "degc").replace("degree degf", "degf").split())


# --- relations and sets

OPPOSITE = str.maketrans("[]()", ")(][")
FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
SIDES = {"<": ")", "≤": "]", ">": "(", "≥": "["}
INFINITE = Node("name", "∞")
REALS = (Node("edge", "(", (Node("neg", None, (INFINITE,)),)), Node("edge", ")", (INFINITE,)))


def _relation(parts, signs, tokens):
    if set(signs) & set("<>≤≥≠"):
        return _inequality(parts, signs)
    if "≡" in signs and len(parts) == 2:
        return Node("named", _spell(parts[0]), (_element(parts[1]),))
    if "∈" in signs:
        if _is_domain(parts[-1]) and signs == ["∈"] and _spell(parts[-1]) not in ("setR",):
            return Node("condition", _spell(parts[0]))
        if signs != ["∈"]:
            raise Unread
    if not all(parts):
        raise Unread
    name = _name(parts[0])
    rest = tokens[len(parts[0]) + 1 :]
    if name:
        others = [_name(part) for part in parts[1:-1]]
        if others and all(others) and "≈" not in signs and name.isalnum():
            value = _element(parts[-1])
            return _list([Node("named", n, (value,)) for n in (name, *others)])
        lhs = None
        try:
            lhs = _math(parts[0])
        except Unread:
            pass
        value = _element(rest)
        return Node("named", name, (value, lhs) if lhs else (value,))
    exact = [*signs, "≈"].index("≈")
    values = []
    for part in parts:
        values.append(_element(part))
    if not any(_variables(v) for v in values):
        return Node("chain", exact, tuple(values))
    if len(values) == 2 and signs == ["="]:
        return Node("equation", "=", tuple(values))
    raise Unread


def _name(tokens):
    """Returns the text of a name before `=`: x, a_1, f(x), ∠A, |z|, AB:CD, (x,y), m+n. None for others."""
    text = _spell(tokens)
    if len(tokens) == 1 and tokens[0].kind == "group" and tokens[0].text == "()":
        inside, _ = _splits(tokens[0].parts, ",")
        return text if all(_name(part) for part in inside) else None
    if tokens and tokens[0].text == "frac" and len(tokens) == 3:
        top, bottom = _name(tokens[1].parts), _name(tokens[2].parts)
        return f"{top}:{bottom}" if top and bottom else None
    if re.fullmatch(r"\|[^|]*[A-Za-z][^|]*\||[|[][A-Z]{2,}[]|]", text):
        return text
    if len(tokens) == 1 and tokens[0].kind == "group" and tokens[0].text == "{}":
        return _name(tokens[0].parts)
    letters, total, script = 0, False, ""
    if text.lower() in CHANGED or {t.text.lower() for t in tokens} & CHANGED:
        return None
    for i, token in enumerate(tokens):
        low = token.text.lower()
        if token.kind == "op":
            if token.text in "+-*^":
                if not i:
                    return None
                total = True
            elif token.text not in "_'/:∠△":
                return None
            script = token.text
            continue
        if token.kind in ("name", "word") and token.text not in ("π", "∞"):
            letters += script != "_"
        elif token.kind == "function" and low[:3] in ("sin", "cos", "tan", "cot"):
            pass
        elif token.kind == "number" and (script in ("_", "^") or i and tokens[0].kind == "function"):
            pass
        elif token.kind == "group" and i:
            if script not in ("_", "^") and token.text == "{}":
                return None
        else:
            return None
        script = ""
    if not letters and not (tokens and tokens[0].kind == "function"):
        return None
    if "^" in text and letters < 2 and not re.match(r"[A-Zf]\^-1|σ\^2", text):
        return None
    return text.replace("/", ":") if total is False else text


TOTAL = re.compile(r"(?![A-Z]+$)(?:[A-Za-z](?:[_^]\w)?[-+*/]?)+[A-Za-z](?:[_^]\w)?")


def _inequality(parts, signs):
    if not all(parts):
        raise Unread
    first = len(parts) != 3 and _name(parts[0])
    if not first and (len(parts) == 2 or signs[0] in ">≥"):
        parts, signs = parts[::-1], [FLIPPED.get(sign, sign) for sign in signs[::-1]]
    *low, name, high = parts
    name = _name(name)
    if len(parts) > 3 or not name or set(signs) & set("=∈≡"):
        if len(parts) != 2:
            raise Unread
        return Node("equation", signs[0], tuple(_element(part) for part in parts))
    values = (_element(high),)
    if name[0] == "|" and not low and len(name) == 3:
        low_, high_ = Node("neg", None, values), values[0]
        name = name[1]
        edges = {"<": "()", "≤": "[]", ">": ")(", "≥": "]["}.get(signs[0])
        if not edges:
            raise Unread
        a, b = Node("edge", edges[0], (low_,)), Node("edge", edges[1], (high_,))
        inner = (a, b) if signs[0] in "<≤" else (REALS[0], a, b, REALS[1])
        return Node("intervals", name, inner)
    if signs == ["≠"]:
        several = values[0].parts if values[0].kind == "list" else values
        edges = [REALS[0], REALS[1]]
        for value in several:
            edges += [Node("edge", ")", (value,)), Node("edge", "(", (value,))]
        return Node("intervals", name, tuple(edges))
    if low:
        if len(signs) != 2 or not set(signs) <= set("<≤"):
            raise Unread
        pair = Node("tuple", SIDES[FLIPPED[signs[0]]] + SIDES[signs[1]], (_element(low[0]), *values))
        edges = _edges(pair)
        if not edges:
            raise Unread
        if name[0] == "|" and number(pair.parts[0]) == (0, None) and signs[0] == "≤":
            edges = (REALS[0], edges[1])
        return Node("intervals", name, tuple(edges))
    edge = Node("edge", SIDES[signs[0]], values)
    return Node("intervals", name, (edge, REALS[1]) if signs[0] in ">≥" else (edge, REALS[0]))


def _edges(node):
    """Returns the ends of the intervals that a node stands for: a number x stands for [x,x]."""
    if node.kind == "intervals":
        return node.parts
    if node.kind == "named":
        return _edges(node.parts[0])
    if node.kind == "list":
        edges = [_edges(part) for part in node.parts]
        return tuple(sum(map(list, edges), [])) if all(edges) else ()
    if node.kind in EXPRESSIONS:
        return Node("edge", "[", (node,)), Node("edge", "]", (node,))
    if node.kind != "tuple" or len(node.parts) != 2 or node.value not in ("()", "[]", "(]", "[)"):
        return ()
    ends = [number(part) for part in node.parts]
    if all(ends) and ends[0].value >= ends[1].value:
        return ()
    return tuple(Node("edge", side, (part,)) for side, part in zip(node.value, node.parts, strict=True))


def _union(parts, signs):
    found = []
    for i, part in enumerate(parts):
        edges = _edges(_element(part))
        if not edges:
            raise Unread
        if i and signs[i - 1] == "∖":
            edges = [Node("edge", e.value.translate(OPPOSITE), e.parts) for e in edges]
        found += edges
    return Node("intervals", None, tuple(found))


def _bounds(elements):
    """Returns one node for several inequalities in one variable, such as x<1 or x>2."""
    names = {e.value for e in elements}
    edges = []
    for e in elements:
        cut = [part.value for part in e.parts[2:]] == [")", "("] and e.parts[:2] == REALS
        found = _edges(e)
        edges.append((cut, found[2:] if cut else found))
    if len(names) > 1 or not all(found for _, found in edges):
        return None
    start = list(REALS) if all(cut for cut, _ in edges) else []
    for _, found in edges:
        start += found
    return Node("intervals", names.pop(), tuple(start))


def _bracket(token):
    """Reads a group."""
    text, tokens = token.text, token.parts
    if text.startswith("\\begin"):
        return _environment(text, tokens)
    if text.startswith("\\{"):
        return _set(tokens)
    if text in ("{}", "{"):
        return _read(tokens)
    parts, found = _splits(tokens, ";")
    if not found:
        parts, found = _splits(tokens, ",")
    if not found:
        if text in ("[]", "["):
            return Node("call", "floor", (_math(tokens),))
        return _read(tokens)
    if not all(parts):
        raise Unread
    return Node("tuple", text, tuple(_element(part) for part in parts))


def _set(tokens):
    if not tokens:
        return Node("list", "{", ())
    for sign in "|:":
        parts, found = _splits(tokens, sign)
        if len(found) == 1 and all(parts):
            head, rest = parts
            if _is_domain(head[2:]) and head[1].text == "∈" and _spell(head[2:]) != "setR":
                raise Unread
            if _name(head) or head[1:2] and head[1].text == "∈":
                return _read(rest)
            return _read(head)
    node = _read(tokens)
    parts = node.parts if node.kind == "list" and node.value != "{" else (node,)
    if node.kind == "named":
        raise Unread
    return Node("list", "{", tuple(dict.fromkeys(parts)))


def _environment(text, tokens):
    name = re.search(r"\{(\w+)\*?\}", text)[1]
    rows, _ = _splits(tokens, ["\\\\"])
    rows = [row for row in rows if row]
    if "matrix" not in name:
        flat = []
        for row in rows:
            flat += [t for t in row if t.text != "&"] + [Token("op", ",")]
        return _read(flat)
    cells = [_splits(row, "&")[0] for row in rows]
    if name == "matrix" and all("=" in [t.text for t in row] for row in rows):
        return _environment("{cases}", tokens)
    found = []
    for row in cells:
        found += [_element(cell) for cell in row]
    return Node("tuple", f"{name.strip('pbB')} {[len(row) for row in cells]}", tuple(found))


# --- numbers


@lru_cache(4096)
def number(node: Node) -> Number | None:
    """Returns the Number of a decimal, fraction, mixed number or percent; None for any other node, also for a
    fraction whose value is an integer, such as 84/2."""
    kind, value, parts = node
    if kind == "num":
        return value
    if kind == "add" and _zero(parts[1]):
        return number(parts[0])
    if kind == "neg" and parts[0].kind != "neg" and (inside := number(parts[0])):
        return Number(-inside.value, inside.places)
    if kind == "percent" and (inside := number(parts[0])):
        places = None if inside.places is None and parts[0].kind != "num" else (inside.places or 0) + 2
        return Number(inside.value / 100, places)
    if kind == "div" or kind == "tuple" and value == ":" and len(parts) == 2:
        pair = [_integer(part) for part in parts]
        if None not in pair and pair[1]:
            found = Fraction(*pair)
            reduced = kind == "div" or found.denominator == pair[1]
            return Number(found, None) if found.denominator > 1 and reduced else None
    if kind == "pow" and parts[0] == TEN and _integer(parts[1]) is not None:
        return _scientific(Number(Fraction(1), None), _integer(parts[1]))
    if kind == "mul" and parts[1].kind == "pow" and parts[0].kind == "num" and parts[1].parts[0] == TEN:
        power = _integer(parts[1].parts[1])
        return None if power is None else _scientific(parts[0].value, power)
    return None


def _zero(node):
    node = node.parts[0] if node.kind == "neg" else node
    return node == Node("mul", None, (_number_node("0"), Node("name", "i")))


TEN = _number_node("10")


def _integer(node):
    if node.kind == "neg" and node.parts[0].kind == "num":
        inside = _integer(node.parts[0])
        return None if inside is None else -inside
    exact = node.kind == "num" and node.value.places is None and node.value.value.denominator == 1
    return int(node.value.value) if exact else None


def _scientific(base, power):
    if abs(power) > 400:
        return None
    places = None if base.places is None else max(base.places - power, 0) or None
    return Number(base.value * Fraction(10) ** power, places)


def _walk(node):
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack += [part for part in node.parts if isinstance(part, Node)]


def _names(node):
    return {n.value for n in _walk(node) if n.kind == "name"}


def _variables(node):
    found = {n.value for n in _walk(node) if n.kind in ("name", "text") and n.value not in ("e", "i", "π", "∞")}
    return found | ({"i"} if "j" in found and "i" in _names(node) else set())


# --- equality


def grade(answer: str, gold: str, kind: str = "math") -> bool:
    r"""Returns whether `answer` equals `gold`."""
    return bool(quick_grade(answer, gold, kind, math_equal))


def quick_grade(answer: str, gold: str, kind: str = "math", prove=lambda *_: None) -> bool | None:
    require(kind in KINDS, f"answer kind {kind!r} is unknown", f"one of {', '.join(KINDS)}")
    answer, gold = answer.strip(), gold.strip()
    if not answer or not gold:
        return False
    if answer == gold or kind == "exact":
        return answer == gold
    a, b = read(answer), read(gold)
    if b.kind == "list" and "," in answer:  # 45,135 has two elements here
        a = read(answer.replace(",", ", "))
    letter = _letter(b)
    chosen = letter is not None and _letter(a) == letter
    if kind == "choice":
        return chosen
    if chosen and b.kind != "quantity" and letter in answer:
        return True  # `(A) 15` equals A
    same = _same(a, b, prove)
    ours, theirs = (PARAMETER.search(text) for text in (answer, gold))
    if same is False and ours and theirs and ours[1] != theirs[1]:
        renamed = re.sub(rf"(\\[a-z]+)|{ours[1]}", lambda found: found[1] or theirs[1], answer)
        return quick_grade(renamed, gold, kind, prove)
    return same


# Finds the parameter n of 2\pi n, n\in\mathbb{Z}. The gold answer may use another letter for its parameter.
PARAMETER = re.compile(r"(?<![a-z\\])([a-z]) ?\\in ?\{?(?:\\mathbb ?\{?)?[ZN]")


def _letter(node):
    if node.kind == "quantity" and node.value[0][:1] == ("choice",):
        return node.value[0][1].upper()
    if node.kind in ("text", "name") and (match := LETTER.fullmatch(node.value.lower())):
        return match[1].upper()
    if node.kind == "tuple" and node.value == ":":
        return _letter(node.parts[0])
    return None


LETTER = re.compile(r"(?:(?:choice|option) ?)?\(?([a-z])\)?")


def _same(answer, gold, prove):
    """Returns whether two nodes are equal. prove(answer, gold) compares two expressions. It returns True,
    False, or None if it can't decide. `_same` returns None if such a pair matters."""
    if answer == gold and answer.kind != "unread":
        return True
    kinds = {answer.kind, gold.kind}
    if "unread" in kinds:
        return answer == gold or (gold.kind == "unread" and prove(answer, gold))
    if "chain" in kinds:
        return _same_chain(answer, gold, prove)
    if "named" in kinds:
        return _same_named(answer, gold, prove)
    if "quantity" in kinds:
        return _same_quantity(answer, gold, prove)
    x, y = number(answer), number(gold)
    if x and y:
        return _same_number(x, y)
    if kinds == {"tuple"}:
        return _same_tuple(answer, gold, prove)
    if kinds <= {"text", "name"} and len(answer.value) > 1 < len(gold.value) and "text" in kinds:
        return answer.value.casefold() == gold.value.casefold()
    if kinds == {"tuple", "list"} and "=" in (answer.value, gold.value):
        return _same_tuple(answer, gold, prove)
    if "intervals" in kinds:
        names = {n.value for n in (answer, gold) if n.kind == "intervals"} - {None}
        a, b = _edges(answer), _edges(gold)
        return bool(a and b) and len(names) < 2 and _unordered(a, b, prove)
    if kinds == {"edge"}:
        return answer.value == gold.value and _same(*answer.parts, *gold.parts, prove)
    if "list" in kinds:  # {5} equals 5
        a, b = (n.parts if n.kind == "list" else (n,) for n in (answer, gold))
        return _unordered(a, b, prove)
    return _same_expression(answer, gold, prove)


def _same_expression(answer, gold, prove):
    kinds = {answer.kind, gold.kind}
    if kinds == {"equation"}:
        return prove(answer, gold) if answer.value == gold.value else False
    if not kinds <= EXPRESSIONS | {"text"} or number(gold) or number(answer) and kinds & {"text"}:
        return False
    if answer.kind == "text" and gold.kind == "text":
        return False
    if kinds & {"text"}:
        return False
    allowed, found = _calculations(gold), _calculations(answer)
    if found["sum"] > 0 == allowed["sum"] or found["product"] and not (allowed["product"] or allowed["power"]):
        return False
    if found["power"] and not allowed["power"]:
        return False
    free = bool(_variables(gold))
    for name in ("other", "trig", "log", "root"):
        loose = name in ("log", "root") and free and allowed[name]
        if found[name] > allowed[name] and not loose:
            return False
    return prove(answer, gold)


def _same_named(answer, gold, prove):
    """Does the work of `_same` if one or both nodes have a name: x=5 equals 5 and x=5, but not y=5."""
    name, a = (answer.value, answer.parts[0]) if answer.kind == "named" else (None, answer)
    needed, b = (gold.value, gold.parts[0]) if gold.kind == "named" else (None, gold)
    other = name and needed and name not in (needed, INDEX.sub("", needed)) and INDEX.sub("", name) != needed
    if name and needed and (ours := CALL.fullmatch(name)) and (theirs := CALL.fullmatch(needed)):
        if ours[1] == theirs[1] and other:  # f(t)=2t and f(x)=2x
            return _same(_renamed(a, ours[2], theirs[2]), b, prove)
    if other and {a.kind, b.kind} - EXPRESSIONS - {"text"}:
        return False
    equations = [_equation(n) for n in (answer, gold)]
    if needed and TOTAL.fullmatch(needed):
        return prove(*equations) if None not in equations else False
    if other or "equation" in (a.kind, b.kind):
        letters = _variables(b)
        curve = not needed or letters and letters | {needed} <= set("Ctxyz")
        return bool(curve and None not in equations) and prove(*equations)
    return _same(a, b, prove)


CALL = re.compile(r"([A-Za-z])\(([a-z])\)")
INDEX = re.compile(r"(?<=[^\W\d])(?:_[\w,+-]+|\([^()]*\))+$")  # the _1 of a_1, the (A) of P(A)


def _renamed(node, old, new):
    if node.kind in ("name", "text") and node.value == old:
        return node._replace(value=new)
    return node._replace(parts=tuple(_renamed(part, old, new) for part in node.parts))


def _equation(node):
    if node.kind == "named" and len(node.parts) == 2:
        return Node("equation", "=", node.parts)
    return node if node.kind == "equation" else None


def _same_chain(answer, gold, prove):
    if answer.kind != "chain":
        return _same(answer, _chain_value(gold), prove)
    value = _chain_value(answer)
    exact, rounded = answer.parts[: answer.value - 1 + 1], answer.parts[answer.value + 1 :]
    target = _chain_value(gold) if gold.kind == "chain" else gold
    decimal = any(n.kind == "num" and n.value.places is not None for n in _walk(gold))
    same = decimal and any(_same(text, gold, prove) for text in rounded)
    same = same or _same(value, target, prove)
    if not same:
        return same
    verdicts = [same]
    for step in exact:
        verdicts.append(step == value or prove(step, value, 1e-6))
    for step in rounded:
        verdicts.append(prove(step, value, 0.01))
    return _all(verdicts)


def _chain_value(node):
    return node.parts[node.value]


def _all(verdicts):
    return False not in verdicts and (None if None in verdicts else True)


def _same_quantity(answer, gold, prove):
    (unit, free), a = (answer.value, answer.parts[0]) if answer.kind == "quantity" else ((None, True), answer)
    (needed, _), b = (gold.value, gold.parts[0]) if gold.kind == "quantity" else ((None, True), gold)
    if a.kind in ("text", "name") and needed and needed[0] == "choice" and _letter(a):
        return needed[1] == _letter(a).lower()
    if unit and len(unit) == 1 == len(unit[0]) and not needed and not number(b):  # 23 h equals the product 23h
        return _same(Node("mul", None, (a, Node("name", unit[0]))), b, prove)
    if unit and (unit != needed if needed else not free):
        return False
    return _same(a, b, prove)


def _same_number(a, b):
    places = [n.places for n in (a, b) if n.places is not None]
    if not places or a.places == b.places:
        return a.value == b.value
    difference = abs(a.value - b.value)
    largest = max(abs(a.value), abs(b.value))
    return difference < Fraction(1, 10 ** min(places)) and difference * 10**6 <= largest


def _same_tuple(answer, gold, prove):
    kinds = {answer.value, gold.value}
    system = "=" in kinds and kinds <= {"=", "()", ","}
    if len(answer.parts) != len(gold.parts) or len(kinds) > 1 and not system:
        return False
    return _all([_same(*pair, prove) for pair in zip(answer.parts, gold.parts, strict=True)])


def _unordered(answer, gold, prove):
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


@lru_cache(4096)
def _calculations(node):
    """Returns a Counter of the calculations that a tree leaves undone."""
    found = Counter()
    stack = [(node, "")]
    while stack:
        node, parent = stack.pop()
        if number(node) and parent not in ("mul", "div"):
            continue
        _undone(node, parent, found)
        stack += [(part, node.kind) for part in node.parts if isinstance(part, Node)]
    return found


def _undone(node, parent, found):
    kind, value, parts = node
    if kind == "add" and parent not in ("add", "neg") or kind == "add" and parent == "neg":
        terms = _terms(node)
        rests = [tuple(sorted(map(repr, rest))) for _, rest in terms]
        zero = any(c == 0 for c, _ in terms) and _variables(node)
        if len(set(rests)) < len(rests) or zero:
            found["sum"] += 1
    if kind in ("mul", "div") and parent not in ("mul", "div"):
        _product(node, found)
    if kind == "div" and None not in map(_integer, parts) and not number(node):
        found["product"] += 1
    if kind == "neg" and parts[0].kind == "neg":
        found["product"] += 1
    if kind == "pow":
        _power(*parts, found)
    if kind == "call":
        numeric = not _variables(node)
        if value in TRIG:
            found["trig"] = 1
        elif value in ("log", "ln"):
            inside = parts[0]
            found["log"] += 1 + (inside.kind == "div" or inside.kind == "num" and inside.value.places is not None)
        elif value == "root":
            found["root"] += 1
            inside = number(parts[0])
            if inside and (exact := _exact_root(inside.value, _integer(parts[1]))):
                found["power"] += 1
        elif value in ("!", "binom", "abs", "floor", "ceil"):
            found["power"] += numeric
        else:
            found["other"] += 1
    if kind == "div" and parent != "div":
        for fn in ("root", "log", "ln"):
            if all(part.kind == "call" and part.value == fn and part.parts for part in parts):
                found[fn.replace("ln", "log")] -= 1


def _exact_root(value, index):
    if not index or index > 64:
        return False
    for n in (abs(value.numerator), value.denominator):
        root = round(n ** (1 / index)) if n < 10**300 else 0
        if root**index != n:
            return False
    return True


def _terms(node, factor=Fraction(1)):
    """Returns the terms of a sum: (coefficient, other factors)."""
    if node.kind == "add":
        return _terms(node.parts[0], factor) + _terms(node.parts[1], factor)
    if node.kind == "neg":
        return _terms(node.parts[0], -factor)
    if node.kind == "mul":
        for part, other in (node.parts, node.parts[::-1]):
            if other.kind == "add" and (n := number(part)):
                return _terms(other, factor * n.value)
    tops, bottoms = _factors(node)
    rest = []
    for part in tops:
        if n := number(part):
            factor *= n.value
        else:
            rest.append(part)
    rest += [Node("inverse", None, (part,)) for part in bottoms if not number(part)]
    return [(factor, rest)]


def _factors(node):
    """Returns the factors above and below the fraction bar."""
    if node.kind == "neg":
        return _factors(node.parts[0])
    if node.kind == "mul":
        pairs = [_factors(part) for part in node.parts]
        return pairs[0][0] + pairs[1][0], pairs[0][1] + pairs[1][1]
    if node.kind == "div" and not number(node):
        top, bottom = (_factors(part) for part in node.parts)
        return top[0] + bottom[1], top[1] + bottom[0]
    return [node], []


def _product(node, found):
    tops, bottoms = _factors(node)
    above = [n.value for f in tops if (n := number(f)) and abs(n.value) != 1]
    below = [n.value for f in bottoms if (n := number(f)) and abs(n.value) != 1]
    numerators = [n for n in above if abs(n.numerator) != 1]
    denominators = [n for n in above if n.denominator != 1] + below
    bases = []
    for factor in (*tops, *bottoms):
        base, power = factor.parts if factor.kind == "pow" else (factor, None)
        if not number(base) and (power or bottoms):
            bases.append(base)
    ratio = Fraction(1)
    for n in above:
        ratio *= n
    for n in below:
        ratio /= n or 1
    complex_ = [f for f in tops if f.kind == "add" and "i" in _names(f) and not _variables(f)]
    divided = any("i" in _names(f) and not _variables(f) for f in bottoms)
    whole = denominators and ratio.denominator == 1
    mixed = len(above) > 1
    if mixed or len(denominators) > 1 or whole or len(set(bases)) < len(bases) or len(complex_) > 1 or divided:
        found["product"] += 1


def _power(base, power, found):
    exact = _integer(power)
    if power.kind == "div" or power.kind == "num" and power.value.places is not None or power.kind == "neg" and power.parts[0].kind == "div":
        if not _variables(power):
            found["root"] += 1
        return
    if exact is None:
        return
    tops, bottoms = _factors(base)
    numbers = any((n := number(f)) and abs(n.value) != 1 for f in (*tops, *bottoms))
    surd = not _variables(base) and base.kind not in ("name", "num")
    nested = any(f.kind == "pow" for f in tops)
    if exact == -1 and base.kind == "num":
        return
    if numbers or surd or nested or base == Node("name", "i"):
        found["power"] += 1


# --- values


def math_equal(answer: Node, gold: Node, tolerance: float | None = None) -> bool:
    """Returns whether two expressions or equations have the same value."""
    from mpmath import mp

    if gold.kind == "unread":
        raise ValueError(f"the gold answer {gold.value[:80]!r} cannot be parsed")
    if isinstance(answer, Node) and answer.kind == "quantity":
        answer = answer.parts[0]
    if gold.kind == "quantity":
        gold = gold.parts[0]
    with mp.workdps(60):
        try:
            if gold.kind == "equation":
                return answer.kind == "equation" and _same_equation(answer, gold)
            return _same_value(answer, gold, tolerance)
        except (Unread, ZeroDivisionError, OverflowError, ValueError, TypeError, RecursionError, MemoryError):
            return False


POINTS = [(Fraction(7, 5), Fraction(3, 11)), (Fraction(-9, 7), Fraction(-4, 13)), (Fraction(8, 3), Fraction(-5, 17))]


def _points(names):
    """Returns three points: for each name a number, none of them special."""
    found = []
    for start, step in POINTS:
        point = {}
        for i, name in enumerate(sorted(names)):
            point[name] = start + step * i + Fraction(i * i, 101)
        found.append(point)
    return found


def _same_value(answer, gold, tolerance):
    names = _variables(answer) | _variables(gold)
    if "∞" in _names(answer) | _names(gold):
        return False
    decimals = [any(n.kind == "num" and n.value.places is not None for n in _walk(node)) for node in (answer, gold)]
    decimal = decimals[1] or decimals[0] and number(answer) is not None
    for point in _points(names) if names else [{}]:
        a, b = _value(answer, point), _value(gold, point)
        exact = isinstance(a, Fraction) and isinstance(b, Fraction)
        if exact and (b.denominator == 1 and not names or not decimal and not decimals[0]):
            if a != b:
                return False
            continue
        limit = 1e-40
        if decimal:
            limit = tolerance or 1e-6
        elif decimals[0]:
            limit = 1e-12
        a, b = _real(a), _real(b)
        if not abs(a - b) <= limit * max(abs(b), 1e-300 if decimals[0] or decimal else 1):
            return False
    return True


def _same_equation(answer, gold):
    """Returns whether the sides' difference of one equation is a number times that of the other."""
    names = _variables(answer) | _variables(gold)
    ratios = []
    for point in _points(names | {"~"}):
        a, b = (_difference(e, point) for e in (answer, gold))
        if not b or not a:
            return False
        ratios.append(_real(a) / _real(b))
    return all(abs(r - ratios[0]) < 1e-30 * abs(r) for r in ratios)


def _difference(equation, point):
    """Returns the numerator of the difference of an equation's sides."""
    left, right = (_ratio(part, point) for part in equation.parts)
    if left[1] == right[1]:
        return _real(left[0]) - _real(right[0])
    return _real(left[0]) * _real(right[1]) - _real(right[0]) * _real(left[1])


def _ratio(node, point):
    """Returns the values of the numerator and denominator of a tree."""
    if node.kind == "neg":
        top, bottom = _ratio(node.parts[0], point)
        return -_real(top), bottom
    if node.kind in ("add", "mul", "div"):
        (a, b), (c, d) = (_ratio(part, point) for part in node.parts)
        a, b, c, d = map(_real, (a, b, c, d))
        if node.kind == "mul":
            return a * c, b * d
        if node.kind == "div":
            return a * d, b * c
        return (a + c, b) if b == d else (a * d + c * b, b * d)
    exponent = _integer(node.parts[1]) if node.kind == "pow" else None
    if exponent is not None and abs(exponent) < 100:
        top, bottom = map(_real, _ratio(node.parts[0], point))
        return (top**exponent, bottom**exponent) if exponent >= 0 else (bottom**-exponent, top**-exponent)
    return _value(node, point), Fraction(1)


def _real(value):
    from mpmath import mpf

    return mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


LARGEST = 20_000  # bits of an exact number
EXACT = 3000  # largest n whose factorial is computed exactly


def _value(node, point):
    """Returns the value of an expression: a Fraction if it is exact, else an mpmath number."""
    from mpmath import mp

    kind, value, parts = node
    if kind == "num":
        return value.value
    if kind in ("name", "text"):
        if value in point:
            return point[value]
        return {"e": mp.e, "π": mp.pi, "i": mp.mpc(0, 1)}[value] * 1
    found = [_value(part, point) for part in parts]
    if kind == "call":
        return _called(value, found)
    if kind == "neg":
        return -found[0]
    if kind == "percent":
        return found[0] / 100
    if kind == "degree":
        return _real(found[0]) * mp.pi / 180
    if kind == "pow":
        return _raised(*found)
    if kind not in ("add", "mul", "div"):
        raise Unread
    a, b = found if all(isinstance(v, Fraction) for v in found) else map(_real, found)
    result = a + b if kind == "add" else a * b if kind == "mul" else a / b
    return _limited(result)


def _limited(value):
    if isinstance(value, Fraction) and value.numerator.bit_length() + value.denominator.bit_length() > LARGEST:
        return _real(value)
    return value


def _raised(base, power):
    from mpmath import mp

    if isinstance(power, Fraction) and power.denominator == 1 and isinstance(base, Fraction):
        bits = base.numerator.bit_length() + base.denominator.bit_length()
        if abs(power) * bits < LARGEST:
            return base ** int(power)
    if abs(power) > 10**9:
        raise Unread
    if isinstance(power, Fraction) and power.denominator == 1:
        return mp.power(_real(base), int(power))
    return mp.power(_real(base), _real(power))


def _called(fn, found):
    from mpmath import mp

    if fn == "root":
        base, index = found[0], int(found[1])
        if not 0 < index < 1000:
            raise Unread
        if isinstance(base, Fraction) and base < 0 and index % 2:
            return -mp.root(_real(-base), index)
        return mp.root(_real(base), index)
    whole = all(isinstance(v, Fraction) and v.denominator == 1 and 0 <= v < EXACT for v in found)
    if fn == "!":
        if whole:
            return Fraction(int(mp.factorial(1)) * _factorial(int(found[0])))
        if abs(found[0]) > 10**9:
            raise Unread
        return mp.gamma(_real(found[0]) + 1)
    if fn == "binom":
        if whole:
            return Fraction(comb(*map(int, found)))
        return mp.binomial(*map(_real, found))
    if fn in ("gcd", "lcm", "max", "min"):
        if fn in ("max", "min"):
            return (max if fn == "max" else min)(found)
        raise Unread
    if fn == "abs":
        return abs(found[0])
    if fn in ("floor", "ceil"):
        value = _real(found[0])
        return mp.floor(value) if fn == "floor" else mp.ceil(value)
    values = [_real(v) for v in found]
    if fn == "log" and len(values) == 1:
        return mp.log10(values[0])
    if fn == "log":
        return mp.log(values[0]) / mp.log(values[1])
    names = dict(arcsin="asin", arccos="acos", arctan="atan")
    if fn in ("int", "sum", "prod", "lim", "det"):
        raise Unread
    return getattr(mp, names.get(fn, fn))(values[0])


from math import comb  # noqa: E402
from math import factorial as _factorial  # noqa: E402


# --- formulas of the problem

FORMULA = re.compile(r"\$|\\[][()]|\\(?:begin|end)\{(?:align|equation|gather)\w*\*?\}")
SIDE = re.compile(r"^\(?\d\)|[=<>,;&]|\\(?:in|[gl]e)(?![a-z])")
ORDERED = re.compile(
    r"(?i)(?:creas|scend)ing order|order of (?:in|de)creas"
    r"|\b(?:least|smallest|greatest|largest|lowest|highest) to\b"
)


def repeats(answer: str, gold: str, problem: str) -> bool:
    a, b = read(answer), read(gold)
    parts, golds = _pieces(a), _pieces(b)
    keys = [_key(part) for part in parts], [_key(part) for part in golds]
    if keys[0] != keys[1] and sorted(keys[0]) == sorted(keys[1]) and ORDERED.search(problem):
        return True
    right = {_key(_side(part)) for part in golds} | {_key(part) for part in golds}
    known = set()
    for formula in FORMULA.split(problem):
        sides = set()
        for piece in (formula, *SIDE.split(formula)):
            node = read(piece)
            for part in (node, *_pieces(node)):
                sides |= {_key(part), _key(_side(part))}
        if not right & sides:
            known |= sides
    for part in parts:
        if not any(_worked(n) and _key(n) in known for n in (part, _side(part))):
            return False
    return bool(parts)


def _pieces(node):
    if node.kind == "chain":
        return _pieces(_chain_value(node))
    if node.kind == "named" and node.parts[0].kind == "list":
        return node.parts[0].parts
    return node.parts if node.kind == "list" else (node,)


def _side(node):
    if node.kind == "chain":
        return _chain_value(node)
    if node.kind == "equation":
        return node.parts[1]
    return _side(node.parts[0]) if node.kind == "named" else node


def _worked(node):
    """Returns whether a node is a formula, more than a name or a number such as 7."""
    return node.kind not in ("num", "name", "text", "unread", "quantity", "list") and not (
        node.kind == "neg" and node.parts[0].kind in ("num", "name")
    )


def _key(node):
    """Returns a text that is the same for x^2-9 and -9+x^2."""
    if node.kind == "chain":
        node = _chain_value(node)
    if (n := number(node)) and node.kind != "tuple":
        return f"{n.value}" if node.kind in ("num", "neg") else f"/{n.value.numerator}/{n.value.denominator}"
    if node.kind == "named" and len(node.parts) == 2:
        node = Node("equation", "=", node.parts)
    if node.kind == "pow" and _integer(node.parts[1]) == 1:
        return _key(node.parts[0])
    parts = [_key(part) for part in node.parts]
    if node.kind in ("add", "mul"):
        parts = sorted(sum((_flat(part, node.kind) for part in node.parts), []))
        if node.kind == "mul":
            parts = [p for p in parts if p != "1"]
            if len(parts) == 1:
                return parts[0]
    if node.kind == "equation":
        parts = sorted(parts)
    return f"{node.kind}{node.value}({' '.join(parts)})"


def _flat(node, kind):
    if node.kind != kind:
        return [_key(node)]
    return sum((_flat(part, kind) for part in node.parts), [])
