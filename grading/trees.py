r"""Parses the tokens of an answer to a tree.

A node is a tuple: its kind, then its parts.

    ("number", value, places)     value: a Fraction; places: digits after the point; None: exact, as 5, 1/3
    ("name", "x_1")               also e, i, \pi, \infty. AB is one name, xy is a product
    ("words", "no solution")
    ("+", a, b), ("*", a, b), ("/", a, b), ("^", a, b), ("neg", a)
    ("call", name, a, ...)        \sin x, f(x), |x|, [x], n!
    ("root", a, degree)
    ("quantity", a, unit)         5 m/s has the unit "m / s"
    ("list", a, ...), ("set", a, ...)
    ("tuple", form, a, ...)       forms: "()", "[)", "=" for x=1, y=2, ":" for 1:2:3, "mod" for 3 \pmod 7,
                                  "rows" and "&" of a matrix
    ("union", edge, ...)          an interval has two edges: tuples such as ("tuple", r"\ge", a)
    ("named", name, a)            x=5, x+y=5; x<5 names a union
    ("relation", sign, a, b)      x+1=5, x+y<2
    ("chain", a, steps, roundings)    3+4=7: the value 7, the tuple of the steps before it
    ("choice", letter, a)         (B) 15
"""

import re
from fractions import Fraction
from itertools import permutations

from grading.tokens import NO_UNIT, Unreadable, any_of, table, tokens_of, unit_of

BASES = table(
    "zero 0 one 1 two 2 three 3 four 4 five 5 six 6 seven 7 eight 8 nine 9 ten 10 "
    "eleven 11 twelve 12 thirteen 13 fourteen 14 fifteen 15 sixteen 16 seventeen 17 "
    "eighteen 18 nineteen 19 twenty 20 thirty 30 forty 40 fifty 50"
)


def with_unit(value, words):
    """5 meters per second has the unit "m / s" """
    text = words[1].lower()
    residue = meaning_of(words)
    if value[0] == "name" and "mod" in residue:  # n even
        return "named", value, residue
    if NO_UNIT.search(words[1]) and value[0] != "words":
        raise Unreadable
    if value[0] in ("quantity", "words"):
        return *value[:-1], f"{value[-1]} {text}"
    return "quantity", value, text


# How tightly signs bind: infixes, then postfixes (9), then what ends an expression (-1). A new infix also
# needs an entry in INFIXES or NODES.
BINDS = {"": -1}
for _row in (
    r"0.5 \choose \over",
    "1 ; &&",
    "1.5 &",
    "2 ,",
    '2.5 "if "for "when "for~even "for~odd',
    r"3 = < > \le \ge \ne \in \equiv \approx",
    r"4 : \pmod",
    r"5 \cup \setminus \cap",
    "6 + -",
    "7 * /",
    "9 ^ ! !! % ° '",
    r"-1 ) ] } \} \rfloor \rceil .",
):
    _level, *_signs = _row.split()
    BINDS |= dict.fromkeys(_signs, float(_level))
# An opening bracket, and those that close it
CLOSED = {}
for _row in ("( ) ]", "[ ] )", "{ }", r"\{ \} | :", "| |", r"\lfloor \rfloor", r"\lceil \rceil"):
    _left, *_closing = _row.split()
    CLOSED[_left] = _closing
TRIGONOMETRIC = r"\sin \cos \tan \cot \sec \csc \arcsin \arccos \arctan".split()
FUNCTIONS = [
    *TRIGONOMETRIC,
    *r"\cis \ln \log \exp \sinh \cosh \tanh \det \gcd \lcm \max \min \int \iint \sum \prod \lim".split(),
]
CALCULUS = FUNCTIONS[-10:]
# Commands with one argument, which are calls
PREFIXES = r"\triangle \overline \overarc \Delta \dot \ddot".split()
SYMBOLS = (
    r"\alpha \beta \gamma \delta \epsilon \zeta \eta \theta \kappa \lambda \mu "
    r"\nu \xi \pi \rho \sigma \tau \phi \chi \Delta "
    r"\psi \omega \Gamma \Theta \Lambda \Sigma \Phi \Psi \Omega \infty "
    r"\emptyset \ell \hbar \partial \mathbbR \mathbbZ \mathbbN "
    r"\mathbbQ \mathbbC \ldots \circ"
).split()
INFINITY = ("name", r"\infty")
REALS = ("tuple", "()", ("neg", INFINITY), INFINITY)


def number_node(value, places=None):
    return "number", Fraction(value), places


class _Parser:
    """Reads tokens into a tree; each operand is read once."""

    def __init__(self, text):
        self.tokens = [*text.split(" "), ""]
        self.at = 0
        self.depth = self.steps = 0
        self.closers = []  # of the innermost bracket

    @property
    def token(self):
        return self.tokens[self.at]

    def next(self):
        """Goes past the next token, and returns it."""
        self.at += 1
        return self.tokens[self.at - 1]

    def take(self, *tokens):
        """Goes past the next token, if it is one of `tokens`; returns whether it is."""
        found = self.token in tokens
        self.at += found
        return found

    def binds(self):
        """Returns how tightly the next token binds. Raises Unreadable at the 800th call, so that no tree is
        too deep."""
        self.steps += 1
        if self.steps > 800:
            raise Unreadable
        token = self.token
        # Without a sign, an operand binds with 8, as in 2x, but a function with 7.5. So in \sin x\cos y,
        # the cosine is no part of the sine.
        if token in FUNCTIONS:
            return 7.5
        if token in self.closers:
            return -1
        if token[0:1] == "_":
            return 9
        return BINDS.get(token, 8)

    def parse(self, least=0):
        """Reads operands and what joins them at least as tightly as `least`."""
        left = self.operand(least)
        while (bind := self.binds()) >= least:
            if bind in (7.5, 8):
                left = self.juxtaposed(left, self.token)
            elif self.take("^"):
                left = _power(left, self.parse(10))
            elif bind == 9:
                self.steps += 7  # x!'!'!' would be too deep
                left = _postfix(left, self.next())
            else:
                left = self.joined(left, bind)
        return left

    def joined(self, left, bind):
        """Reads all operands that are joined by signs of this strength."""
        signs, operands = [], [left]
        while self.binds() == bind:
            signs.append(self.next())
            is_separator = bind <= 2
            if not is_separator or self.binds() not in (-1, 1, 1.5, 2):
                operands.append(self.parse(bind + 0.5))
        return _joined(signs, operands)

    def operand(self, least=9):
        self.depth += 1
        if self.depth > 40:
            raise Unreadable
        found = self.read_operand(least)
        self.depth -= 1
        return found

    def read_operand(self, least):
        token = self.next()
        if token[0:1].isdigit():
            number = _read_number(token)
            return self.mixed(number) if least < 10 else number  # \sin^2\frac x2 has the exponent 2
        if token[0:1] == '"':
            return "words", token[1:].replace("~", " ")
        if token in ("+", "-"):
            value = self.parse(max(least, 7))
            return _neg(value) if token == "-" else value
        if token in CLOSED:
            return self.bracket(token)
        if token == r"\frac":
            return _fraction(self.argument(), self.argument())
        if token == r"\binom":
            return "call", token, self.argument(), self.argument()
        if token in ("√", r"\sqrt"):
            degree = number_node(2)
            if self.take("["):
                degree = self.bracket("[")[2]
            return "root", self.operand(), degree
        if token in FUNCTIONS:
            return self.function(token)
        if token in PREFIXES and self.binds() > 7:
            return "call", token, self.argument()
        if token.startswith("begin:"):
            kind = token[6:]
            return _matrix(kind, self.closed([f"end:{kind}"]))
        if token in SYMBOLS or token.isalpha():
            return self.name(token)
        raise Unreadable

    def mixed(self, whole):
        r"""4\frac23, 4 2/3"""
        if self.token != r"\frac" and "/" not in self.token[1:]:
            return whole
        part = self.operand()
        if is_integer(whole) and part[0] == "number" and part[1] < 1:
            return number_node(whole[1] + part[1])
        return product_of(whole, part)

    def index(self):
        """Returns the next token if it is an index, such as _1, without its _; else "" """
        if self.token[0:1] != "_":
            return ""
        return self.next()[1:]

    def name(self, name):
        r"""Reads what may follow a name: primes, an index, arguments. Returns a name such as x_1, a call such
        as f(x), or \binom for C_5^2."""
        while self.take("'"):
            name += "'"
        index = self.index()
        if name in "Cc" and index and self.take("^"):  # C_5^2: the index is the upper number
            top = parse_tokens(tokens_of(index))
            return "call", r"\binom", top, self.parse(10)
        name += f"_{index}" if index else ""
        following = self.tokens[self.at : self.at + 3]
        is_function = name[0] in "fghFGPE" and self.token == "("
        if is_function or following == ["(", "0", ")"]:  # y(0) is a call, y(x) may be a product
            return "call", name, *_arguments(self.operand())
        return REALS if name == r"\mathbbR" else ("name", name)

    def argument(self):
        r"""\frac12 is \frac{1}{2}"""
        token = self.token
        if token.isdigit() and len(token) > 1:
            self.tokens[self.at] = token[1:]
            return number_node(token[0])
        return self.operand()

    def function(self, name):
        r"""\sin x, \sin^2 2x, \log_2(x+1), \sum_{k=1}^n k"""
        index = self.index()
        power = self.parse(10) if self.take("^") else None
        if name in SUMS:
            return self.sum(name, index, power)
        if power == number_node(-1) and name in TRIGONOMETRIC:
            name = r"\arc" + name[1:]
            power = None
        is_closed = self.token in ("(", "{")
        inside = self.operand() if is_closed else self.parse(8)
        arguments = _arguments(inside)
        if name in CALCULUS:
            found = "call", name, *arguments
        elif name == r"\exp":
            found = "^", ("name", "e"), *arguments
        elif index:
            found = "call", name, *arguments, parse_tokens(index)
        else:
            found = "call", name, *arguments
        return _power(found, power) if power else found

    def sum(self, name, index, end):
        r"""\sum_{k=1}^n k equals \sum_{i=1}^n i"""
        letter, _, start = index.partition("=")
        body = self.parse(7)
        if start:
            body = with_letters(body, {letter: "index"})
        return "call", name, body, ("name", start or index), end

    def closed(self, closers):
        """Reads to a closing token."""
        outer, self.closers = self.closers, closers
        found = ("list",)
        if self.token != r"\}":
            found = self.parse()
        self.closers = outer
        if self.next() not in closers:
            raise Unreadable
        return found

    def bracket(self, left):
        r"""(5), (1,2), [0,1), \{1,2\}, \{x|x>2\}, |x|, {10 \choose 3}"""
        found = self.closed(CLOSED[left])
        while left == r"\{" and self.tokens[self.at - 1] in "|:":
            found = _such_that(found, self.closed(CLOSED[left]))
        parts = parts_of(found, "list", found)
        form = left + self.tokens[self.at - 1]
        match form, parts:
            case "{}", _:
                return found
            case r"\{\}", []:
                return "name", r"\emptyset"
            case r"\{\}", _:
                return "set", *dict.fromkeys(_flat(parts))
            case "()", [_]:
                return found
            case "[]", [("tuple", "rows" | "()", *_)]:
                return found
            case "()" | "[]" | "(]" | "[)", [_, _, *_]:
                return "tuple", form, *parts
        return "call", left.replace(r"\lfloor", "["), *parts

    def juxtaposed(self, left, token):
        """2x, 4\frac23, f(x), 5 cm"""
        before = self.tokens[self.at - 1]
        right = self.parse(9)
        is_named = token == "(" and self.token == "="
        match left, right:
            case _, ("words", _):
                return with_unit(left, right)
            case ("name", name), ("name" | "number" | "tuple", *_) if is_named:  # y(x)=
                return "call", name, *_arguments(right)
            case ("quantity", (_, degrees, _), "degree"), (
                "call",
                "'",
                (_, minutes, _),
            ):  # 22^\circ30'
                return "quantity", number_node(degrees + minutes / 60), "degree"
            case (("words" | "tuple"), *_), _:
                raise Unreadable
            case ("name", "i"), ("number", *_):  # i5
                pass
            case _, ("number", *_) if token != "(" and before != ")":  # 46 1, x5
                raise Unreadable
        return product_of(left, right)


def _such_that(element, condition):
    r"""\{x \mid x>2\} is x>2; \{x^2 \mid x>2\} is x^2"""
    if element[0] == "named" and element[2] != REALS:  # x\in\mathbb{Z}
        return "tuple", "|", element, condition
    return condition if element[0] in ("name", "named", "tuple") else element


def _arguments(inside):
    """Returns x and y for (x,y), and x for x."""
    if inside[0] == "tuple":
        return inside[2:]
    return (inside,)


def parse_tokens(text):
    parser = _Parser(text)
    found = parser.parse()
    if parser.tokens[parser.at]:
        raise Unreadable
    return found


def _read_number(token):
    r"""2.5e3, 0.1(6), 3/4"""
    top, slash, bottom = token.partition("/")
    if slash:
        return _fraction(number_node(top), number_node(bottom))
    number, _, repeat = token.rstrip(")").partition("(")
    digits = number.lower().partition("e")[0]
    decimals = digits.partition(".")[2]
    if repeat:  # 0.1(6) is 0.1 + 6 / 90
        below = 10 ** len(decimals) * (10 ** len(repeat) - 1)
        return number_node(Fraction(number) + Fraction(int(repeat), below))
    return number_node(number, len(decimals) or None)


def inner_nodes(node):
    """Returns the nodes in a node."""
    return [part for part in node[1:] if isinstance(part, tuple) and part]


def is_integer(node):
    return node[0] == "number" and node[1].denominator == 1 and node[2] is None


# Each of these functions makes a node, and returns a simpler one if it can.


def of_values(make):
    r"""Wraps a function that makes a node. A unit belongs to the whole: 45^\circ+180^\circ n"""

    def wrapped(*nodes):
        values = []
        units = set()
        for node in nodes:
            if node[0] == "quantity":
                _, node, unit = node
                units.add(unit)
            values.append(node)
        if len(units) > 1:  # 2 hours + 30 minutes
            raise Unreadable
        value = make(*values)
        return ("quantity", value, *units) if units else value

    return wrapped


def in_order(kind, *parts):
    r"""Returns a sum or a product with its operands in a fixed order: x+1 and 1+x are the same tree. Returns
    e^{ix} for \cos x+i\sin x."""
    flat = []
    for part in parts:
        flat += parts_of(part, kind, part)
    flat.sort(key=repr)
    match flat:
        case [("*", ("call", r"\sin", same), ("name", "i") as i), ("call", r"\cos", angle)] if (
            angle == same
        ):
            top, *bottom = parts_of(angle, "/", angle)
            exponent = product_of(i, top)
            if bottom:
                exponent = "/", exponent, *bottom
            return "^", ("name", "e"), exponent
    return kind, *flat


@of_values
def _sum(left, right):
    return in_order("+", left, right)


def _scaled(factor, cell):
    if factor[0] == cell[0] == "number":
        return number_node(factor[1] * cell[1])
    return product_of(factor, cell)


@of_values
def product_of(left, right):
    if number := scientific(left, right):
        return number
    match left, right:
        case factor, ("tuple", form, *cells):  # \frac12 times a matrix
            if factor[0] != "tuple":
                return "tuple", form, *(_scaled(factor, cell) for cell in cells)
    if number_node(1) in (left, right):
        return right if left == number_node(1) else left
    return in_order("*", left, right)


@of_values
def _neg(value):
    match value:
        case "number", number, places if number >= 0:
            return "number", -number, places
        case "tuple", *_:
            return product_of(number_node(-1), value)
    return "neg", value


@of_values
def _fraction(top, bottom):
    """3/4 is a number. 84/2 is a calculation, because its value is an integer."""
    if is_integer(top) and is_integer(bottom) and bottom[1]:
        value = number_node(top[1] / bottom[1])
        if not is_integer(value):
            return value
    return "/", top, bottom


def _power(base, exponent):
    match base, exponent:
        case ("words", unit), (_, number, _):  # cm^2, s^{-1}
            index = rf"\1 {number}" if number > 0 else rf"/ \1 {-number}"
            return "words", re.sub(r"(\S+)$", index, unit).removesuffix(" 1")
        case ("tuple", "()", *_), ("name", "T"):
            return base
    if exponent == number_node(1) and base[0] != "number":
        return base
    return "^", base, exponent


def _postfix(value, sign):
    r"""5\%, 30^\circ, n!, 101_2"""
    match value, sign[0]:
        case _, "°":
            return "quantity", value, "degree"
        case ("number", number, places), "%":
            return "number", number / 100, places and places + 2
        case _, "%":
            return "/", value, number_node(100)
        case ("number", number, None), "_":
            base = sign.strip("_()")
            return "words", f"{number} base {BASES.get(base, base)}"
    return "call", sign, value


def _joined(signs, operands):
    """Returns the node of operands that are joined by signs of the same strength."""
    sign = signs[0]
    if sign in NODES:
        return *NODES[sign], *operands
    if BINDS[sign] in (1, 2):
        return list_node(operands, sign == ";")
    if BINDS[sign] == 2.5:
        return _piece(*operands, sign[5:])
    if BINDS[sign] == 3:
        return _relation(signs, operands)
    if sign == ":":
        return _ratio(*operands)
    value = operands[0]
    for sign, other in zip(signs, operands[1:], strict=True):
        if value[0] == "quantity" and other[0] == "words" and sign in "*/":  # 5 m / s
            value = with_unit(value, ("words", f"{sign} {other[1]}".removeprefix("* ")))
        else:
            value = INFIXES[sign](value, other)
    return value


def _piece(value, condition, parity):
    """Returns a row of cases: n+1 if n even; f(n)=0 for even n."""
    if value[0] == "named":
        _, name, inner = value
        return "named", name, _piece(inner, condition, parity)
    if parity:
        condition = with_unit(condition, ("words", parity))
    return "tuple", "&", value, condition


def scientific(value, ten):
    r"""2.5\cdot10^3 is a number; 10^3 too"""
    match ten:
        case "^", ("number", 10, None), ("number", power, None) if (
            value[0] == "number" and power % 1 == 0 and abs(power) < 1000
        ):
            return number_node(value[1] * 10**power, value[2])
    return None


@of_values
def _ratio(*parts):
    """3:4 is a number, but 2:30 may be a time, which is not 1:15. AB:CD is a name."""
    if len(parts) == 2:
        value = _fraction(*parts)
        is_reduced = value[0] == "number" and value[1].denominator == parts[1][1]
        if is_reduced or letters_of(value):
            return value
    return "tuple", ":", *parts


# A set of real numbers is a union. It has two edges for each interval: \ge1 and <2 for [1,2).
EDGES = table(r"[ \ge ( > ] \le ) <")
MIRRORED = table(r"< > > < \le \ge \ge \le \ne \ne")
COMPLEMENT = table(r"< \ge > \le \le > \ge <")
UPPER = "<", r"\le"
LEFT_END = ("tuple", ">", REALS[2])
RIGHT_END = ("tuple", "<", INFINITY)


def _interval(low, high):
    """Returns the edges of an interval; [] for (2,1): the lower edge must come first."""
    bounds = low[2], high[2]
    numbers = [bound[1] for bound in bounds if bound[0] == "number"]
    if numbers != sorted({*numbers}):
        return []
    return [low, high]


def _ray(sign, bound):
    """Returns the edges of x<5 for the sign < and 5."""
    if sign == r"\ne":
        return [*_ray("<", bound), *_ray(">", bound)]
    edge = ("tuple", sign, bound)
    return [LEFT_END, edge] if sign in UPPER else [edge, RIGHT_END]


def edges_of(node):
    r"""Returns the edges of the set that a node stands for; [] for a node that is no set. A number x stands
    for [x,x]."""
    match node:
        case "union", *edges:
            return edges
        case "named", _, value:
            return edges_of(value)
        case (("list" | "set"), *nodes):
            found = [*map(edges_of, nodes)]
            return sum(found, []) if all(found) else []
        case "tuple", ("()" | "[]" | "(]" | "[)") as form, low, high:
            return _interval(
                ("tuple", EDGES[form[0]], low),
                ("tuple", EDGES[form[1]], high),
            )
    return [("tuple", r"\ge", node), ("tuple", r"\le", node)]


def _complement(node):
    edges = edges_of(node)
    flipped = [("tuple", COMPLEMENT[sign], end) for _, sign, end in edges]
    return "union", *flipped


def _union(*nodes):
    edges = edges_of(("list", *nodes))
    if not edges:
        raise Unreadable
    return "union", *edges


NODES = {
    "&": ("tuple", "&"),
    r"\choose": ("call", r"\binom"),
    r"\pmod": ("tuple", "mod"),
}
INFIXES = {
    "+": _sum,
    "-": lambda a, b: _sum(a, _neg(b)),
    "*": product_of,
    r"\cap": product_of,
    "/": _fraction,
    r"\over": _fraction,
    r"\cup": _union,
    r"\setminus": lambda a, b: _union(a, _complement(b)),
}


def _intersection(*sets):
    r"""Returns 1<x<3 for x>1, x<3, and (-\infty,3)\cup(3,5) for x<5, x\ne3. Rays that do not meet, such as
    x<1 and x>3, stand for their union."""
    edges = sum(map(edges_of, sets), [])
    inner = [*edges]
    for _ in sets[1:]:
        if LEFT_END in inner and RIGHT_END in inner:
            inner.remove(LEFT_END)
            inner.remove(RIGHT_END)
    if len(inner) == 2:
        inner.sort(key=lambda edge: edge[1] in UPPER)
        inner = _interval(*inner) or edges
    return "union", *inner


def _relation(signs, parts):
    r"""x=5, 1<x\le2, 3+4=7, x+1=5"""
    if MIRRORED.keys() & signs:
        return _inequality(signs, parts)
    *names, value = parts
    if len(names) == 1 and is_name(value) and not is_name(*names):  # 5=x
        parts = parts[::-1]
    if len(names) > 1 and all(map(is_name, names)):  # x=y=2
        return list_node([("named", name, value) for name in names])
    left, *rest = parts
    right = rest[0]
    if len(rest) > 1:
        right = _relation(signs[1:], rest)
    if left[:2] == ("tuple", "()") and len(left) == len(right):  # (x,y)=(1,2)
        pairs = zip(left[2:], right[2:], strict=True)
        return list_node([("named", *pair) for pair in pairs])
    if not any(map(_variables, parts)) and left[0] != "words":
        return _chain(signs, parts)
    # x+y=7 gives the value of x+y. But 2x+1=7 must be solved for its only variable.
    if is_name(left) or len(_variables(left)) > 1:
        return "named", left, right
    return "relation", "".join(signs), *parts


def _chain(signs, parts):
    """3+4=7\\approx7.0 has the value 7."""
    place = [*signs, r"\approx"].index(r"\approx")
    steps = [parts_of(part, "quantity", part)[0] for part in parts]
    exact = tuple(steps[:place])
    rounded = tuple(steps[place + 1 :])
    return "chain", parts[place], exact, rounded


def letters_of(node):
    """Returns the names in a tree, apart from e, i, \\pi and \\infty."""
    if node[0] == "name":
        return {node[1]} - {"e", "i", *CONSTANTS}
    return set().union(*map(letters_of, inner_nodes(node)))


CONSTANTS = r"\pi \infty \emptyset \ldots".split()


NO_NAME = any_of("half twice not never wrong false opposite negative.of double root third")


def is_name(node):
    """Returns whether a node may stand before `=`: x, f(x), AB:CD."""
    match node:
        case "name", name:
            return name not in CONSTANTS
        case "words", text:
            return not re.search(rf"(?i)\b{NO_NAME}\b", text)
        case "call", "[", inside:
            return inside[0] == "name" and len(inside[1]) > 1
        case "call", name, inside, *_ if name in TRIGONOMETRIC:  # \cos A
            return not re.search(r"\b[a-z]\b", as_text(inside))
        case "call", name, *_ if name in CALCULUS or _is_function(node):
            return True
        case "^", ("name", "A" | "B" | "f" | "g" | "s" | r"\sigma"), _:
            return True
    if node[0] not in ("/", "*", "tuple", "call"):
        return False
    if node[1] in FUNCTIONS or node[1] == "!":
        return False
    return all(map(is_name, inner_nodes(node)))


def _is_function(node):
    """f(x), \phi(x)"""
    if node[0] != "call" or node[1] == "x":
        return False
    return node[1][0].isalpha() or node[1] in SYMBOLS


def _variables(node):
    """Returns the names in a tree; f(x) is one of them."""
    if _is_function(node) or node[0] == "name" and letters_of(node):
        return {node}
    return set().union(*map(_variables, inner_nodes(node)))


def _inequality(signs, parts):
    r"""x<5, 2>x, 1<x\le2 and x\ne1 are named unions; x+y<2 is a relation."""
    match parts:
        case ("neg", name), ("number", bound, _):  # -x<3
            signs = [MIRRORED[signs[0]]]
            parts = [name, number_node(-bound)]
    if {">", r"\ge"} & {*signs}:  # 2>x is x<2
        signs = [MIRRORED[sign] for sign in reversed(signs)]
        parts = parts[::-1]
    sign = signs[0]
    match parts:
        case [low, name, high]:
            low_edge = "tuple", MIRRORED[sign], low
            edges = _interval(low_edge, ("tuple", signs[1], high))
        case [name, bound] if is_name(name):
            edges = _ray(sign, bound)
        case [bound, name]:
            sign = MIRRORED[sign]
            edges = _ray(sign, bound)
    if not edges or not is_name(name) or name[0] == "*":
        return "relation", "".join(signs), *parts
    match name:
        case "call", "|", ("name", _) as inner if len(parts) == 2:
            name = inner
            mirrored = _ray(MIRRORED[sign], _neg(bound))
            edges = [*mirrored, *edges]  # |x|>2
            if sign in UPPER:  # |x|<2
                edges = _interval(edges[0], edges[3])
    return "named", name, ("union", *edges)


PERMUTED = re.compile("((all|its|their|any) )*(cyclic )?permutations?( thereof)?")


def _flat(nodes):
    r"""Returns the nodes; instead of a list, such as `2; 5`, its elements."""
    flat = []
    for node in nodes:
        for part in parts_of(node, "list", node):
            flat.append(meaning_of(part))
    match flat:
        case [
            ("number", first, _),
            ("number", second, _),
            *_,
            ("name", r"\ldots"),
            ("number", last, _),
        ]:
            step = second - first
            if 0 < last - first < 100 * step:  # 1,2,\ldots,9
                steps = int((last - first) / step)
                flat = [number_node(first + i * step) for i in range(steps + 1)]
        case [*tuples, ("words", text)] if (
            tuples and PERMUTED.fullmatch(text) and len(flat) < 9
        ):  # (1,2,3) and its permutations
            flat = []
            for kind, form, *parts in tuples:
                orders = permutations(parts[:4])
                if "cyclic" in text:
                    orders = [parts[i:] + parts[:i] for i in range(len(parts))]
                flat += [(kind, form, *order) for order in orders]
            return [*dict.fromkeys(flat)]
    return flat


def list_node(nodes, is_or=False):
    r"""1,2; x=1, x=2 is x=1,2; x=1, y=2 is (x,y)=(1,2); x>1, x<3 is 1<x<3; x\equiv 1,5 \pmod 6"""
    nodes = _flat(nodes)
    first, last = nodes[0], nodes[-1]
    kinds = {node[0] for node in nodes[1:]}
    if not kinds:
        return first
    if first[0] == "named" and not kinds & {"named", "words", "relation"}:
        values = [first[2], *nodes[1:]]
        return "named", first[1], list_node(values)  # x=2,3
    firsts = {node[0] for node in nodes[:-1]}
    if last[:2] == ("tuple", "mod") and firsts == {"number"}:
        nodes = [("tuple", "mod", rest, last[3]) for rest in nodes[:-1]]
        nodes.append(last)
    for node in nodes:
        if node[0] != "named" or not is_name(node[1]):
            return "list", *nodes
    nodes.sort(key=lambda node: repr(node[1]).replace("\\", "~"))  # Greek names come last
    _, names, values = zip(*nodes, strict=True)
    bare = {short_name(name) if name[1][0] in "kmtxyz" else name for name in names}
    if len(bare) > 1:
        return "named", ("tuple", "()", *names), ("tuple", "=", *values)
    if "union" not in {value[0] for value in values}:
        return "named", *bare, ("list", *_flat(values))
    join = _union if is_or else _intersection
    return "named", *bare, join(*values)


def short_name(name):
    """Returns the node of a for a_1, and P for P(A)."""
    if name and (name[0] == "name" or name[0] == "call" and name[1].isalpha()):
        return "name", name[1].partition("_")[0]
    return name


def _matrix(kind, inside):
    r"""\begin{pmatrix}1&2\\3&4\end{pmatrix}; a column vector is a tuple; the rows of cases are a list"""
    # not cases, align, gather
    is_matrix = kind[0] not in "acgs" or kind in ("array", "smallmatrix")
    if inside[0] not in ("list", "tuple") or not is_matrix:
        return inside
    if kind[0] in "vV":
        return "call", r"\det", inside
    is_column = inside[1][0] != "tuple"
    return "tuple", "()" if is_column else "rows", *inside[1:]


SAME_WORDS = table(
    "true yes да yes 是 yes 对 yes 正确 yes false no нет no 否 no 错 no 错误 no √ yes × no 充分必要 充要 "
    "diverges divergent converges convergent possible yes impossible no",
)
# Words -> how to write them
SUBJECT = any_of(
    "it this that statement series integral function triangle slope limit "
    "graph curve winner day abc [a-z]"
)
SPOKEN = {
    r"\b(an?|the(re (is|are|exists?))?) (?=\S\S)": "",  # an ellipse
    r"^(equation|system) has (?=no )": "",
    r"^player who moves (first|second)": r"\1 player",
    r" ((can|will) )?(always )?(wins?( game)?|(force|guarantee) win|is winner)$": "",  # Bob wins
    r" has winning strategy$": "",
    rf"^{SUBJECT} ((is|was) )?(?=\w+$)": "",  # the series diverges
    r"^(it )?(is )?(not possible|can ?not be done)$": "impossible",
    r" only$|(?<=even) function$|(?<=odd) function$|(?<=ent|ary) condition$|条件$": "",
    r"^(limit )?do(es|esn't)( not|n't)? exist$|^dne$": "not exist",
    r"( [a-z]{2,}[a-rt-z])s\b": r"\1",  # two solutions
}
COUNTED = any_of("solution root integer number value function pair prime triple")
PHRASES = {
    rf"no( real| positive| such)*( {COUNTED})?( [a-z])?( exists?)?|none|无解|empty set": r"\emptyset",
    r"(infinitely many|infinite number of|infinite)( [a-z]+)?": r"\infty",
}
FILLER = any_of("all any every is integer number")
RESIDUE = r"(even|odd)|(not )?(?:divisible by|multiple of) ([2-9]|[1-9]\d)"
RESIDUES = rf"(?:{FILLER} )*(?:[a-z] )?(?:{FILLER} )*(?:{RESIDUE})(?: {FILLER})*(?: [a-z])?"
# Words for residues: n is even; odd integers; n not divisible by 3. Only one letter may stand there: "mn is
# even" is not "n is even".
RESIDUES = re.compile(RESIDUES)


def _residues(parity, is_not, divisor):
    r"""Returns 1, 2 \pmod 3 for the words `not divisible by 3`."""
    modulus = int(divisor or 2)
    rests = range(1, modulus) if parity == "odd" or is_not else [0]
    modulus = number_node(modulus)
    return list_node([("tuple", "mod", number_node(rest), modulus) for rest in rests])


def meaning_of(tree):
    """Returns what words mean, and other trees unchanged."""
    if tree[0] != "words":
        return tree
    text = re.sub(r'["~\s]+', " ", tree[1])
    text = text.strip().casefold()
    if text in BASES:
        return number_node(BASES[text])
    for pattern, new in SPOKEN.items():
        text = re.sub(pattern, new, text)
    for phrase, meaning in PHRASES.items():
        if text != "no" and re.fullmatch(phrase, text):
            return "name", meaning
    if found := RESIDUES.fullmatch(text):
        return _residues(*found.groups())
    words = text.split()
    words = [SAME_WORDS.get(word, unit_of(word) or word) for word in words]
    return "words", " ".join(words)


def parts_of(node, kind, *other):
    """Returns the parts of a node of this kind, and `other` for another node."""
    return node[1:] if node[0] == kind else other


def as_text(node):
    """Returns a tree as a text: +(x 1), ^(2 x) for x^2."""
    kind, *parts = node
    if kind == "name":
        return parts[0]
    if kind == "number":
        return f"{parts[0]}{'.' * (parts[1] is not None)}"
    if kind == "^":
        parts.reverse()
    shown = [as_text(part) if isinstance(part, tuple) else str(part) for part in parts if part]
    return f"{kind}({' '.join(shown)})"


def with_letters(node, new):
    if node[:1] == ("name",):
        return "name", new.get(node[1], node[1])
    parts = []
    for part in node:
        parts.append(with_letters(part, new) if isinstance(part, tuple) else part)
    if node and node[0] in ("+", "*"):
        return in_order(*parts)
    return tuple(parts)


SUMS = (r"\int", r"\iint", r"\sum", r"\prod", r"\lim")
