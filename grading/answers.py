r"""Extracts the answer from a response, and decides whether it equals the gold answer.

    extract(r"so </think> $\boxed{\frac12}$", "boxed")     # \frac12
    grade(r"\frac12", "0.5")                               # True

`quick_grade` decides most pairs of an answer and a gold answer. `grade` gives the other pairs to the library
math-verify, which may hang or crash. So grading/worker.py runs `grade` in processes that can be killed.

Equality is decided in three steps:

1. `normalise` rewrites both texts in one common spelling: `5~\text{ meters}` becomes `5 "meters"`. It removes
   introductions such as `the answer is`, and conditions such as `k\in\mathbb{Z}` (see TIDY).
2. `read` gives each text a type, such as number or list. Texts of the same type are compared part by part.
3. math-verify compares expressions and equations, such as `x+1`.

What counts as equal:

- Expressions with the same value: `\sqrt{242}` and `11\sqrt{2}`. But an unfinished calculation is wrong:
  `3+4` does not equal 7. The comment above OPERATIONS has the rules.
- An answer that can't be read as a whole, such as `3@\frac{1}{2}`, is wrong. `grade` may raise ValueError for
  such a gold answer.
- A decimal may be rounded if it differs from the other number by at most one part in a million: `0.3333333`
  equals `1/3`, `0.33` does not. Two decimals with the same number of places must be equal. Integers are
  exact. In an expression such as `1.8333333333333\pi`, an answer's decimal must be right to 12 digits, unless
  the gold answer also has a decimal.
- A percent is a hundredth: `5\%` equals 0.05, not 5.
- Numbers in other bases are not converted: `101_2` does not equal 5.
- Units are not converted. If only the gold answer has a unit, the unit is ignored: 10 equals `10 cm`.
- If only the answer has a unit, the unit must be in UNIT_NAMES or an English plural: `28 pizzas` and `28元`
  equal 28, `28 halved` and `28万` do not.
- If only one of the two has the letter of a choice, the letter is ignored: `(B) 15` equals `15`. Several
  letters from A to H are one text: `B, D` equals `BD`.
- The order counts in tuples, not in lists and sets, unless the problem asks for an order (see `repeats`).
  `\{2,2,3\}` equals `\{2,3\}`. A column vector equals the tuple of its numbers.
- An inequality in one variable is an interval: `1<x<2` equals `(1,2)`. `x>1 and x<2` (or with a comma) means
  that too, but `x<1 and x>2` means the union, as `or` does. `x\ne3` removes the point 3.
- Upper and lower case are the same in words (`Yes`, `yes`), but not in single letters.
- `x=5` and `f(1)+f(2)=5` equal `5`, but `x+1=5` is an equation in one unknown, and gives no value. `x=5`
  equals neither `y=5` nor `x-5=0`. If the gold answer is an equation with an operation on its left, such as
  `x+y=5`, the answer must be an equation too. `x=2, y=3` equals `(2,3)`.
- `f(t)=2t` and `y=2x` equal `f(x)=2x`. `e_1` is a name, not a number. `[x]` is the integer part of x.
- A condition such as `k\in\mathbb{Z}` is ignored, but `k\in\mathbb{N}` does not equal it. If the gold
  answer has one, its letter may differ: `n\pi, n\in\mathbb{Z}` equals `k\pi, k\in\mathbb{Z}`, and `f(x)=kx`
  equals `f(x)=cx for any constant c`. Also the constants of an equation: `y=Ae^x` equals `y=Ce^x`.
- `\frac\pi4+\frac{k\pi}2` equals `\frac{(2k+1)\pi}4`: the same values for all integers k. `7k+3` and
  `-4 \pmod 7` equal `3 \pmod 7`.
- `\log` has the base 10. But if one of the two has `\ln`, `\log` is `\ln`, too.
- If both have roots, letters are positive: `x^{2/3}` equals `\sqrt[3]{x^2}`. But `x` does not equal
  `\sqrt{x^2}`.
- `60^\circ` equals `\frac\pi3`. `22^\circ30'` equals `22.5^\circ`.
- Antiderivatives may differ by a number: `-\frac12\cos^2x+C` equals `\frac12\sin^2x+C`. Formulas with
  \lfloor \rfloor of an integer n are equal if they are for n = 1 to 60 and for three larger n.
- `(1,2,3) and its permutations` is the list of all six tuples.
- A reason after the answer is ignored: `5, since x>0`. `Bob wins` equals `Bob`.
- A formula that is copied from the problem is wrong, although it may equal the gold answer (see `repeats`).
- In `3+4=7`, each part must equal the last part, which is the answer. So `6=7` does not equal 7.
- After `\approx`, an answer that is no integer may add one number that is right within one percent:
  `\frac56\approx0.83`. A gold answer with a decimal point may equal this number: `\frac56\approx0.83` also
  equals 0.83.
"""

import re
import unicodedata
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache, partial
from itertools import permutations, repeat
from typing import NamedTuple

from configs import require

KINDS = ("math", "choice", "exact")

# --- extraction. It runs in the trainer, so no response may slow it down. The time of each pattern is linear
# in the length of the text.


def _table(*rows):
    r"""Returns a dict. A row has pairs: a text, and what replaces it. A replacement that ends with a letter
    gets a space. Without it, \le and x would make \lex."""
    words = iter(" ".join(rows).split())
    return {word: new + " " * new[-1].isalpha() for word, new in zip(words, words, strict=True)}


# Unicode characters and what replaces them. Unicode's normal form NFKC replaces others, such as full-width
# digits.
STYLED = {
    "[⁰¹²³⁴-⁹⁺⁻ⁿ]+": r"^{\g<0>}",
    "[₀-₉ₙ]+": r"_{\g<0>}",
    "[¼½¾⅐-⅞]": r" \g<0>",
    "[①-⑳]": r"\\textcircled{\g<0>}",
    "[ℝℤℕℚℂ]": r"\\mathbb{\g<0>}",
    "[“”\u00ad\u200b-\u200f\u2060\ufe0f\ufeff]": "",  # invisible
}
CHARACTERS = _table(
    r"− - – - ‐ - — - × * · * ⋅ * ÷ / ⁄ / ’ ' ′ ' ″ '' ⟨ ( ⟩ ) 、 , 。 . ∪ \cup ∩ \cap",
    r"∞ \infty ± \pm ≤ \le ≥ \ge ⩽ \le ⩾ \ge ≠ \ne ∈ \in ∅ \emptyset ° ^\circ",
    r"π \pi θ \theta α \alpha β \beta γ \gamma δ \delta λ \lambda μ \mu ρ \rho",
    r"σ \sigma φ \phi ω \omega ∶ : ∠ \angle △ \triangle ⌊ \lfloor ⌋ \rfloor",
    r"€ \text{euros} £ \text{pounds} ¢ \text{cents} ₹ \text{Rs} ¥ \text{yuan}",
)
CHARACTERS = str.maketrans(CHARACTERS | {'"': "", "\0": "", "~": " "})
# Group 1 matches \boxed{ or {, and group 2 matches }. `_boxes` skips all other matches: the printed braces \{
# and \}, and the line break \\. In \\{, group 1 matches the brace.
BRACE = re.compile(r"\\\\(?!boxed)|\\[{}]|((?:\\boxed\s*)?\{)|(\})")
# What may stand between two boxes of one answer, such as `and` or `, y=` (see `_boxed`).
# (?>…) and *+ never try a second way to match, so the time is linear.
BETWEEN_BOXES = re.compile(
    r"(?>[\s,;，、；$&和或]|\\(?:q?quad|lor|vee|cup|[,;:() ])|[a-z](?:_\d)? ?="
    r"|(?:\\text\s*\{\s*)?(?:and|or|as well as)\b(?:\s*\})?)*+"
)
STATED = re.compile(r"\banswer\**(?:[ \t]+is\b|[ \t]*:)[ \t]*:?", re.IGNORECASE)
GSM8K = re.compile(r"####[ \t]*(\S[^\n]*)")
LAST_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:/\d+)?", re.ASCII)
CHOICE = re.compile(  # "answer is (C)", \boxed{C}, or a line that begins with (C), C. or C:
    r"(?:\b(?i:answer|option|choice)(?:\**[ \t]+is\b)?|\\boxed\{|^)[ \t*$:]*"
    r"(?:\\(?:boxed|text|textbf|mathrm)\{)?[(\[]?"
    r"([A-Z])(?![\w'])(?=[)\]}.:*$]|[ \t]*$)",
    re.MULTILINE,
)


def extract_answer(text: str) -> str | None:
    r"""Returns the content of the last balanced \boxed{}, stripped. Reads only the last <answer>...</answer>
    block that contains a box. Returns None if there is no box, or if the box is empty.

    A block without its end does not count, so `text` must include the stop string `</answer>`.
    """
    for block in reversed(text.split("</answer>")[:-1]):
        boxes = _boxes(block.partition("<answer>")[2])
        if boxes:
            return boxes[-1][2] or None
    return None


def _boxes(text):
    r"""Returns all balanced \boxed{}, sorted by start: (start, end, content)."""
    found, opened = [], []  # opened: matches of { and \boxed{ that are not closed yet
    for brace in BRACE.finditer(text):
        if brace[1]:
            opened.append(brace)
        elif brace[2] and opened:
            first = opened.pop()  # the match that this } closes
            if first[1] != "{":  # \boxed{
                content = text[first.end() : brace.start()].strip()
                found.append((first.start(), brace.end(), content))
    return sorted(found)


def _boxed(text):
    r"""Returns the content of the last \boxed{}; "" if there is none. Boxes that
    are joined only by words such as "and" become one list: `\boxed{2} and \boxed{5}` gives "2; 5". The list
    is graded as one answer, so a response can't win by offering several."""
    bare = r"\\boxed(?:\s+|(?=\d))([^\s{}$\\]*[^\s{}$\\.,;:!?])"  # \boxed 5
    text = re.sub(bare, r"\\boxed{\1}", text.replace(r"\fbox", r"\boxed"))
    parts = []
    next_start = len(text)
    for start, end, content in reversed(_boxes(text)):
        gap = text[end:next_start]
        if parts and (end > next_start or not BETWEEN_BOXES.fullmatch(gap)):
            break
        parts.insert(0, content)
        next_start = start
    return "; ".join(parts)


def _stated(text):
    r"""Returns the rest of the line after the last `answer is` or `answer:`. If the rest of the line has a
    \boxed{}, returns only the content of the box. Returns "" if there is no such line."""
    *before, rest = STATED.split(text)
    if not before:
        return ""
    line = re.split("\n|</answer>", rest.strip(" *\t"))[0]
    # Responses in Minerva's format end with ". I hope it is correct."
    return _boxed(line) or line.partition(". I hope")[0].strip(" *")


def _answer_tag(text):
    block, closed, _ = text.rpartition("</answer>")
    _, opened, inside = block.rpartition("<answer>")
    return opened and closed and (_boxed(inside) or _stated(inside) or inside)


def _dapo(text):
    lines = filter(str.strip, text.splitlines())
    return _stated("\n".join([*lines][-2:]))


def _plain(text):
    """Returns `text` with Unicode characters replaced by ASCII and LaTeX: `x²` by `x^{2}`."""
    if not text.isascii():
        for pattern, new in STYLED.items():
            text = re.sub(pattern, new, text)
        text = unicodedata.normalize("NFKC", text)
        text = re.sub(r"\d", lambda digit: str(int(digit[0])), text)  # of any script
    return text.translate(CHARACTERS)


def _last(pattern, text):
    return ["", *pattern.findall(_plain(text))][-1]


# Name of an extractor -> function that takes a response and returns the answer in it. All extractors except
# orz read only the text after `</think>`.
EXTRACTORS = {
    "orz": extract_answer,  # the last box in the last <answer> block that has a box
    "boxed": _boxed,  # the last \boxed{}, \fbox{} or \boxed 5
    "answer_tag": _answer_tag,  # last <answer> block: its box, else its text after `answer is`, else all
    "gsm8k": partial(_last, GSM8K),  # the last `#### 42`
    "dapo": _dapo,  # `Answer: 42` or `The answer is 42` in the last two lines
    "letter": partial(_last, CHOICE),  # the last letter A to Z that is given as the answer
    "last_number": partial(_last, LAST_NUMBER),
    "whole": str,
}


def extract(text: str, extractor: str = "orz") -> str | None:
    """Returns the answer in the response `text`, stripped; None if the extractor finds no answer. Raises
    UserError for an unknown extractor."""
    require(
        extractor in EXTRACTORS,
        f"extractor {extractor!r} is unknown",
        f"one of {', '.join(EXTRACTORS)}",
    )
    if extractor != "orz":
        text = text.rpartition("</think>")[2]
        if "<think>" in text:
            return None
    return (EXTRACTORS[extractor](text) or "").strip() or None


def readers(text: str) -> list[str]:
    """Returns the names of the extractors that find an answer in a response."""
    return [name for name in EXTRACTORS if extract(text, name)]


# --- normalise: gives equal things one spelling, and puts words into quotes: 5 "meters"

DELIMITED = re.compile(
    r"\$(.+)\$|\\[(\[](.+)\\[\])]|\*\*(.+)\*\*|`+([^`]+)`+|\\f?boxe?d? ?\{(.+?)\}?",
    re.DOTALL,
)

# A word, a sign or a command, and its common spelling.
SPELLINGS = _table(
    r"\lor ; \vee ; \land , \wedge , \lvert | \rvert | \vert | \mid | \lt < \gt >",
    r"\lbrace \{ \rbrace \} \langle ( \rangle ) \colon : {:} : \div / \times *",
    r"\cdot * ** ^ % \% \dfrac \frac \tfrac \frac \cfrac \frac \prime ' <= \le",
    r"=< \le => \ge \leq \le \leqslant \le >= \ge \geq \ge \geqslant \ge != \ne",
    r"\neq \ne \bar \overline \dot \overline \degree ^\circ \varnothing \emptyset",
    r"\backslash \setminus \bigcup \cup \varphi \phi \over \infix_frac \mod \pmod",
    r"\choose \infix_binom \bmod \pmod mod \pmod \lg \log_{10} \dots \ldots",
    r"... \ldots \simeq \approx \doteq \approx approximately \approx approx \approx",
    r'\nicefrac \frac \sfrac \frac \varepsilon \epsilon \surd \sqrt \forall "for"',
    r'\imath i \jmath j \pounds "pounds" cosec \csc',
    r"oo \infty inf \infty ou ; oder ; und ,",
    r"\cdots \ldots percent \% percents \% infinity \infty tg \tan ctg \cot",
    r"процент \% процента \% процентов \%",
    r'arctg \arctan \Omega "ohms" to "to" or ; and , 和 , 且 , и , 或 ; или ;',
    r"arcsin \arcsin arccos \arccos arctan \arctan sin \sin cos \cos tan \tan",
    r"cot \cot csc \csc ln \ln log \log exp \exp sqrt \sqrt pi \pi infty \infty",
    "hundred *10^{2} thousand *10^{3} million *10^{6} billion *10^{9}",
    r"trillion *10^{12} <> \ne theta \theta",
    r"\widehat \overarc \wideparen \overarc",
)
TOKENS = (
    r"\\(?:begin|end)\{\w+\*?\}|\\mathbb\s*\{\w\}",
    r"\\(?:text(?:bf|rm|it)?|mbox|math(?:rm|sf)(?!\{[eid]\})|operatorname)\s*"
    r"\{(?P<text>[^{}]*(?:(?:\^|\\text)\{[^{}]*\}[^{}]*)?)\}",
    r"\\\\|\{:\}|<[=>]|>=|=[<>]|(?<![\d)])!=|\*\*|\.\.\.|\\?%|\\[,;:! ]",
    r"\\[A-Za-z]+ ?",
    r"(?P<word>(?![njvw]\b|\w ?[-+(]|\w [a-z]\b|[A-Za-z]*[a-z][A-Z]"
    r"|(?:mg|[ghlms]) ?\\(?:sin|cos|tan|ln|log|sqrt|frac|pi|[a-z]*ta|alpha)"  # mg\sin\theta
    r"(?![a-z]))[A-Za-zÀ-ɏ]+",
    r"[À-ɏ][a-zÀ-ɏ]*|[^\W\d_A-Za-z]+)",  # a word of another script
)
TOKEN = re.compile("|".join(TOKENS))
SLASHED = re.compile(r"(?<!\d)[¼½¾⅐-⅞]|(?<![\d√])\d{1,9}⁄\d{1,9}")


def _digits(match):
    return re.sub(r"\D", "", match[0])


def _without_bound(match):
    r"""Removes a condition such as x>0, unless it is a part of the answer: x<5, x\ne1."""
    answer = match.string[: match.start()]
    part = rf"[<>]|\\[gln]e|^{match[1]}(?:=|\\in)|^[^{match[1]}]*$"
    return match[0] if re.search(part, answer) else ""


def _progression(match):
    """Returns the integers that `...` leaves out: `1,3,...,9` as 1,3,5,7,9."""
    first, second, last = map(int, match.groups())
    step = second - first
    found = range(first, last + step, step) if step else ()
    if not 3 < len(found) < 101 or found[-1] != last:
        return match[0]
    return ",".join(map(str, found))


def _minutes(match):
    """Returns degrees, minutes and seconds as degrees: 22°30' as 45/2."""
    degrees, minutes, seconds = map(int, match.groups("0"))
    return f'{degrees + Fraction(60 * minutes + seconds, 3600)}"degrees"'


def _permuted(match):
    """Returns all permutations of the tuples in an answer such as `(1,2,3) and its cyclic permutations`."""
    found = {}
    for inside in re.findall(r"\(([^()]*)\)", match[1] or match[3]):
        parts = inside.split(",")
        orders = permutations(parts)
        if len(parts) > 4:
            return match[0]
        if match[2]:  # cyclic
            orders = [parts[i:] + parts[:i] for i in range(len(parts))]
        found |= {f"({','.join(order)})": None for order in orders}
    return ",".join(found)


def _choices(match):
    """Returns several letters of choices in order: `C, A` as AC."""
    return "".join(sorted(re.findall("[A-H]", match[0])))


def _system(match):
    r"""Returns the rows of a system of equations as a list: \begin{cases}x=1\\y=2\end{cases} as x=1,y=2."""
    return re.sub(r"[.,;]? ?\\\\", ",", match[1].replace("&", ""))


# Commands that change only how a text looks
STYLES = (
    "displaystyle|textstyle|boldsymbol|bm|mathit|mathbf|mathrm|mathsf|text|textbf"
    "|textrm|textit|mbox|rm|bf|it|limits|hat|vec|overrightarrow|checkmark"
    "|large|Large|underline|therefore|huge|hfill|blacksquare|mathord|mathop"
)
# An introduction with one of these words does not give the answer: `its opposite is 7`.
CONTRARY = (
    r'(?![^"]*\b(?i:no|not|never|wrong|incorrect|false|negative|minus|opposite'
    r"|half|twice|double|reciprocal|inverse|more|less|at.(?:most|least)|bound"
    r"|excluded|neither|nothing|but|except|divisible|exceeds|up|outside|beyond"
    r"|reflection|complement)\b)"
)
IS = r"(?:(?i:is|are|equals|exactly|only|gets?|has|takes)|[^\W不]*[为是])\b"
SOME = r"(?i:an?|any|some|integers?|constants?|arbitrary|reals?|numbers?|positive|natural)\b"
FOR = rf"(?:(?i:for|all|every|each|where|with|if|when|at|since|attained|achieved)\b ?|{SOME} ?)+"
NAMES_OF = r"[a-zC](?:,[a-z]){0,9}\b"
# What stands between an answer and its condition
BEFORE = rf'(?<=[^,;( ])(?:[,;(]| (?=[a-zC](?:\\|[<>]))| ?"{FOR}"){{1,9}} ?'
EMPTY = r"\\emptyset "
# Pattern -> replacement: the rules that `normalise` applies, in this order, after it has replaced the matches
# of TOKEN.
TIDY = {
    rf"(\\\\)|\\(?:!\s*|(?:{STYLES})(?![A-Za-z]) ?)": r"\1",
    r"(\\\\)|\\(?:q?quad(?![a-z])|[ ,;:]) ?": r"\1 ",
    # Words that say nothing; the others mean "choose" and "answer"
    '(?i)"(?:such|therefore|thus|hence|so|共有?|故选|选[项择]?|答案[是为]?|ответ)",?': "",
    r"^\s+|\s+$": "",
    r"\\(?:left|right|middle|[bB]igg?[lr]?)(?![a-z])\.? ?": "",
    r"(?<!\\)\$([^$]*)(?<!\\)\$|\\[()]": r" \1 ",
    # (1) x=2 (2) y=3
    r"^\(?[1Ii]\) +(.{1,300}?)[;,.]? ?\(?(?:2|II|ii)\) *(?=[^ )+*/^])": r"\1; ",
    r'^\(?"?a"?\) ?(.{1,300}?)[;,.]? ?\(?"?b"?\) *(?=[^ )+*/^])': r"a=\1; b=",  # (a) 5 (b) 7
    r"^ ?([+-]?)\$ ?(?=-?[\d.])|\\\$": r'\1"dollars"',
    r"^ ?Rs\.? ?(?=\d)": '"Rs"',
    r'"per" ?"cent"|"per cent"': r"\\%",
    r'"(gcd|lcm)" ?(?=\()': r"\\\1",
    r'(?<=[\d})]) *"to" *(?=[\d\\(])': ":",
    r"√ ?(\d+|\w|\([^()]*\)|\{[^{}]*\})": r"\\sqrt{\1}",
    r"\b([ap])\. ?m\b\.?": r'"\1m"',
    r'(?<=\d)(?:\^ ?\{?)?"?(?:st|nd|rd|th)\b"?\}?': "",
    r'\\(?:text)?color ?\{"?\w+"?\}': "",
    r'\\\\ ?\[[\d.]+ ?"?\w+"?\]': r"\\\\",  # \\[2pt], a row's end with extra space, becomes \\
    r"\^ ?(?:\{ ?\\circ ?\}|\\circ ?)": '"degrees"',
    r"\^ ?\{?('+)\}?": r"\1",
    r"(?<!\d)(\d{1,9})\"degrees\" ?(\d{1,2})'(?: ?(\d{1,2})'*)?": _minutes,  # 22°30'
    r"\\textcircled ?\{(\d+)\}": r",\1,",
    r"(?<=\d)\.(?=[/}])": "",  # 3./2
    r'(\\(?:sin|cos|tan|cot|sec|csc)[^"]{0,20}?)(?<![\d.])([\d.]{1,9})"degrees"': r"\1\\frac{\2\\pi}{180}",
    r'"degrees" ?"?([CF])(?:elsius|ahrenheit)?(?![a-z])"?': r'"deg\1"',
    r'^\(?"?([A-Z])"?(?:[).:] *(?=\d|\\)|[).] +(?=[^";,]))(.+)': r'\2 "choices \1"',  # (B) 15
    r'\\\{ ?\\\}|(?:"the" ?)?"empty" ?"set"': EMPTY,
    r"\\(begin|end)\{array\}(?:\{[lcr|]*\})?": r"\\\1{matrix}",
    r"small(?=matrix\})": "",
    r"^\\begin\{(?:align|gather)\w*\*?\}(?:\[\w\])?[ &]*((?:[^&]|& *=)*)\\end\{\w+\*?\}$": _system,
    r'(?i)(?:"(?:for|over)" ?)?"all" ?(?:"the" ?)?"real(?:s|" ?"numbers)"': r"\\mathbb{R}",
    r"\\mathbb ?([A-Z])": r"\\mathbb{\1}",
    r"(?<=\b[A-Z]) (?=[A-Z]\b)": "",  # \angle A B C
    r"^(?:\\\{)?\\begin\{\w+\}(?=[^=]*=)((?:[^&]|&=)*)\\end\{\w+\}$": _system,
    r"\\\{ ?\\begin\{matrix\}(.*)\\end\{matrix\}$": r"\\begin{cases}\1\\end{cases}",
    r"((?<![\d.])-?0)\{,\}(?=\d)|(\d)\{,\}(?=\d\d?(?!\d))": r"\1\2.",  # decimal commas
    r"(\d)\{,\}(?=\d{3})": r"\1",
    r"(?<=[A-Za-z^}]\{)\d{1,3}(?:,\d{3})+(?=\})": _digits,
    r"(?<![\d.,(\[{])(?!0)\d{1,3}(?:,\d{3})+(?![\d,)\]}\\])": _digits,
    r"\s+": " ",
    r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d/])|(?<=\.)\d{3}(?: \d{3})*(?: \d{1,3})(?!\d)": _digits,
    r'" ?"': " ",
    r" ?([-+*/=<>,;:^_(){}\[\]|]) ?": r"\1",
    r" (?=\\)": "",
    r"\](?=[^][(),;]+[,;][^][(),;]+[][])": "(",  # ]0,1[ is (0,1)
    r"(?<=[^][(])\[(?=$|\\c[ua]p(?![a-z]))": ")",
    r"^([+-]?\d*\.\d*)\((\d+)\)$": r"\1\\overline{\2}",  # 0.(3)
    r"^([+-]?\d{0,9}\.\d{0,9}?)(?:(\d)\2{2,9}|(\d{2,9})\3{1,3})\\ldots$": r"\1\\overline{\2\3}",  # 0.333...
    r'^([+-]?\d+),(?=\d+ ?"[^!-~])': r"\1.",  # 7,2 см
    r'(?<=")/(h|s|g|kg|m|cm|min|[Ll])(?![A-Za-z])': r'/"\1"',  # 5 "m"/s
    r'\\frac\{("\w+")\}\{("\w+")\}': r"\1/\2",
    r"(\\m(?:ax|in))\\\{([^{}]*)\\\}": r"\1(\2)",
    r'(?i)^"?(?:DNE|(?:the limit )?does(?: not|n.t) exist)"?$': '"does not exist"',
    # No such n exists
    r'(?i)^"(?:none"|无解"|(?:there (?:is|are|exists?) |(?:the )?(?:equation|system) has )?no\b(?!"?$)'
    r"(?: real| positive| such)*"
    r'(?: (?:solution|root|integer|number|value|function|pair|prime)s?)?"?(?: ?[a-z]\b ?"?)?'
    r'(?: ?exists?)?"?)\W*$': EMPTY,
    r'(?i)^"(?:there are )?(?:infinitely many|an infinite number of|infinite)(?: [a-z]+)?"$': r"\\infty ",
    r"(?i) (?:(?:(?:can|will) )?(?:always )?(?:wins?(?: the game)?|force a win)"
    r'|has (?:(?:a|the) )?winning strategy|is the winner)"$': '"',
    r'(?i)^"(?:minus|negative)" ?(?=[\d\\])': "-",
    r'"degrees"(?= ?[-+*a-z])': "",  # 30 "degrees"+180 "degrees"n
    r'(?<=[)\]]) ?"?U"? ?(?=[(\[])': r"\\cup ",
    r"(?<![\w)}/.^])(?<!\d )(\d+)/(\d+) (?=[a-z\\])": r"\\frac{\1}{\2}",  # 1/2 x
    r'(?i)^"(yes|да)"[,.] ?"(?![^"]*\b(?:but|only|if|not?|unless|sometimes)\b)[^"]*"$': r'"\1"',
    r'(?i)^"(no|нет)"[,.] ?"(?![^"]*\b(?:but|only|if|yes|unless)\b)[^"]*"$': r'"\1"',
    r'(?i)^"(?:true|да|是|对|正确)"\.?$': '"yes"',
    r'(?i)^"(?:false|нет|否|错|错误)"\.?$': '"no"',
    r'(?:"(?:[Tt]he )?|\\)?\b(max|min)(?:imum)?(?: value)?(?: is)?"? ?[=:]? ?(?=-?(?:\d|\\[fsp]))': r'"\1"=',
    r"(?<![\d.])(-?\d{1,9}),(-?\d{1,9}),\\ldots ?,(-?\d{1,9})(?![\d.])": _progression,
    r"\\angle (?=[A-Z]=)": "",
    r"\|([A-Z]{2})\|(?==)": r"\1",
    r"[,;]+([,;])": r"\1",
    r'^(?:(?:\("?[A-H]"?\)|"?[A-H]"?)(?:[,;]|[ .]*$)){2,}$': _choices,
    r"\\(frac|binom|overline|sqrt(?:\[\w\])?|log_) ?(\w|\\pi(?![a-z]))": r"\\\1{\2}",
    r"(\\(?:frac|binom)\{(?:[^{}]|\{[^{}]*\})*\}) ?(\w|\\pi(?![a-z]))": r"\1{\2}",
    r"(\\(?:frac|sqrt)|\^) ?(\\(?:frac\{[^{}]*\}\{[^{}]*\}|sqrt\{[^{}]*\}))": r"\1{\2}",
    r"\\overline\{(\d)\}(\d*)\\overline\{(\d)\}": r"\\overline{\1\2\3}",  # 0.\dot1\dot8
    r"(\d\.?)\\%": r"\1*10^{-2}",
    r"\{([^{}]*)\\infix_(frac|binom) ?([^{}]*)\}": r"\\\2{\1}{\3}",
    r"(\\sqrt|\^)\(([^()]*)\)": r"\1{\2}",
    r"([\^_])([+-]?\d+|[A-Za-z])": r"\1{\2}",
    r"(?<![^,;=])([a-z][_{\w}]*)=(?=(?:[a-z][_{\w}]*=){1,9}([^,;=()]+)(?![^,;]))": r"\1=\2,",  # x=y=2
    r"C_\{([\w+-]+)\}\^\{(\w+)\}": r"\\binom{\1}{\2}",
    r"\b[cC]_\{1\}": "A",  # constants of an equation
    r"\b[cC]_\{2\}": "B",
    r"^(-?)(\\(?:sqrt|l)[^-+*/]+)/(\\(?:sqrt|l)[^-+*/]+)$": r"\1\\frac{\2}{\3}",  # \ln5/\ln2
    r"^([+-]?)(\()?([+-]?\d+)(?(2)\))/(\()?(\d+)(?(4)\))$": r"\1\\frac{\3}{\5}",  # (1)/(2)
    r"^(?:l|\\ell ?):(?=.*=)|:(?==)": "",  # the line l: y=2x; x:=5
    r"[,;](?=\\approx)": "",
    r"\((\\approx[^()]*)\)$": r"\1",
    r'\("(?:(?:double|repeated) root|(?:min|max)imum|approx)"\)$': "",  # 3 (double root)
    r'\(("[^"]*")\)$': r"\1",  # 5 (cm)
    r"^-\((\\frac\{\d+\}\{\d+\}|[\d./]+)\)$": r"-\1",  # -(1/2)
    r"(?<![^,;])([A-Z](?:_\{\w\})?'*)(?=\([^()]*,[^()]*\)(?![^,;.]))": r"\1=",  # A(1,2)
    r"^(\([^()]*,[^()]*\))\^\{(?:T|\\top ?)\}$": r"\1",  # (1,2)^T
    r'^"(?:either|both)" ?(?=.*[,;])': "",
    r'"as well as"': ",",
    # {x | x>2} and {(x,y) | x+y=1}
    r"\\\{(?:[a-z]|\([a-z],[a-z]\))(?:\\in ?\\mathbb\{R\})?[|:]((?:(?!\\\}).)+)\\\}": r" \1",
    r"^\\\{([^|:]+)[|:]([a-z]\\in ?(?:\\mathbb|\{?[A-Z])[^|:]*)\\\}$": r"\1,\2",  # {2k | k in Z}
    r"(\\mathbb\{R\})-(?=\\\{)": r"\1\\setminus ",
    r'(\\mathbb\{R\}) ?"(?:except(?: for)?|excluding|other than)" ?([^"]+)$': r"\1\\setminus\\{\2\\}",
    r'^"((?!answer)[a-z]+s)":([\d.]+)$': r'\2 "\1"',  # hours: 3
    r'^("[A-Z][a-z]+"):([^,;:]+)[,;]("[A-Z][a-z]+"):': r"\1=\2,\3=",  # Bob: 5, Al: 3
    r"^([^=<>\\a-z]+)=([a-z])$": r"\2=\1",  # 5=x
    r'^(\d+) ?"?[Rr]"? ?(\d+)$': r'\1 "remainder" \2',
    # k\in\mathbb{Z}
    rf"{BEFORE}{NAMES_OF}\\in ?(?:\\mathbb ?)?\{{?[A-Z]"
    r"(?:[\^_{}+*]|\\ge ?\d|>\d)*\)?$": "",
    rf"{BEFORE}[a-z]=[01](?:,\d){{0,3}},\\ldots ?\)?$": "",  # k=0,1,2,...
    # x=2, since y=1
    r'(?<=[^,;( ])[,;(]? ?"(?:since|because|(?:where )?equality'
    r"|(?:which is )?(?:attained|achieved|reached))\b(?!.*\b(?:answer|but)\b)[^,;]*$": "",
    r'^"(?i:all|any|every)(?: positive)?(?: integers?| numbers?)?"? ?[a-z]? ?"? ?of the form" ?': "",
    # 1,5 \pmod 6
    r"(^|\\equiv )([^,;\\]+)[,;]([^,;\\(]+)(\(?\\pmod ?\{?\d+\}?\)?)$": r"\1\2\4,\3\4",
    rf'{BEFORE}{NAMES_OF}(?: ?"?(?:{IS}|{SOME}|[a-z])(?:[ "]|$))+\)?$': "",  # k is an integer
    rf'(?<=[^,;( ])[,;(]? ?"{FOR}" ?{NAMES_OF}\)?(?=$|[,;])': "",  # for all x
    # 5 when x=2, but not x^2 when x=2
    rf'^(?=.*"{FOR}" ?([a-z])=)((?:(?!\1).)+?)[,;(]? ?"{FOR}" ?(?:[a-z]=)+[-\w.]+\)?$': r"\2",
    rf"{BEFORE}([a-zC])(?:[<>]|\\[gln]e(?![a-z])) ?(?:-|\\\w+ ?)?[\w.]+\)?$": _without_bound,
    r'(?i)(?<=^")(?:(?:the|final|correct) )*answer(?: is)? (?!is")(?=\w)': "",  # the answer is Tuesday
    # the value of x is 5
    rf'^"{CONTRARY}(?:[^\W\d]+ ){{0,9}}'
    rf'(?:(?:[^\W\d]+" [a-z](?:[-+]?[a-z])* ?")?(?:{IS}|(?i:answer|equal \w+))" ?:?'
    r'|[^\W\d]+" ?:)(?=.)': "",
    r'^(?:\([a-z,]+\)=)?((?:\([^()]*,[^()]*\)[,;]?){1,20}) ?"(?:(?:all|its|their|the|any) )*(cyclic )?'
    r'permutations?(?: thereof)?"$'
    r'|^"(?:all )?permutations of" ?((?:\([^()]*,[^()]*\)[,;]?){1,20})$': _permuted,
    rf'^"{CONTRARY}[^\W\d]+(?: [^\W\d]+)*"(?=\(.+,.+\)$)': "",  # center (5,-3)
    r'^"(?i:(?:the )?(?:set|line|curve|equation))" ?(?=\\\{|.*=)': "",
    # the constant of integration, unless the answer has another c
    r"^(?!.*(?<![a-z\\])c(?!os|sc|ot|$))(.*[tux].*)\+[cK]$": r"\1+C",
    r"\\mathbb\{R\}": r"(-\\infty,\\infty)",
    r'"(?:is|are) the (?:(?:only|min\w+|max\w+) )?(?:answer|solution|value)s?"$': "",
    r'(?<=.) ?"only"\.?$': "",
    r'(?<=\w)(?: only|(?<=ient|sary) condition|条件)"\.?$': '"',  # "sufficient condition"
    r'(?<![\w.})])("(?:dollars|euros|pounds|cents|yuan|Rs|USD)")\.? ?'
    r"(-?\d*\.?\d+(?:\*10\^\{\d+\})?)": r"\2 \1",
    r'("(\w+)")[,;](?=[\d.]+ "(?!\2)\w+"$)': r"\1 ",  # 2 hours and 30 minutes
    r'_ ?"(\w+)"': r'_{"\1"}',
    r"\b[Pp]er ": "/",
    "mph": "mi/h",
    r'([A-Za-z]+)"\^\{-(\d)\}': r'/\1 \2"',  # s^{-2}
    r"(?:[Ss]q(?:uare)? |平方)(\w+)": r"\1 2",
    r"[Cc]ubic (\w+)": r"\1 3",
    r"(?<![\\\w}^\])])\{([^{}]*)\}": r"\1",
    r"(?<=\d)\{([a-z])\}": r"\1",  # 2{x}
    r"(?<=\d)[+-]0i$|^0(?:\+|(?=-))(?=-?\d*i$)": "",
    r"^\|(\w)\|(>|\\ge ?)([\w{}\\.]+)$": r"\1\2\3;-\3\2 \1",
    r"^\|(\w)\|(<|\\le ?)([\w{}\\.]+)$": r"-\3\2 \1\2\3",
    r"^-([a-z])(<|>|\\[gl]e ?)-([\w.{}\\]+)$": r"\3\2 \1",  # -x<-3
    r"^-([a-z])(<|>|\\[gl]e ?)([\w.{}\\]+)$": r"-\3\2 \1",
    r"^\((\w),(\w)\)=\(([^(),]+),([^(),]+)\)$": r"\1=\3,\2=\4",
    r"^(?:\\approx|\\Rightarrow|\\implies|[=:,])+ ?": "",
}
TIDY = [(re.compile(pattern), new) for pattern, new in TIDY.items()]


@lru_cache(4096)
def normalise(text: str) -> str:
    r"""Returns `text` in one common spelling of spaces, styles, fractions and symbols, with words in quotes:
    `10~\text{ meters}.` becomes `10 "meters"`.
    """
    text = text.strip()
    if text.isdecimal() and text.isascii():  # most answers; no rule changes them
        return text
    # Unwrap $5$, \(5\), **5**, `5` and \boxed{5}. lastindex: the group of the content
    while match := DELIMITED.fullmatch(text.rstrip(".")):
        text = match[match.lastindex].strip()
    text = SLASHED.sub(_slashed, text)  # ½ becomes \frac{1}{2}
    text = _plain(text)  # Unicode becomes ASCII and LaTeX
    text = TOKEN.sub(_token, text).rstrip(" .")  # common spellings; words get quotes
    for pattern, new in TIDY:
        # Most patterns don't match. Then `search` is faster than `sub`.
        if pattern.search(text):
            text = pattern.sub(new, text)
    return text.rstrip(" .,;\\").lstrip()


def _slashed(match):
    """Returns ½ and 1⁄2 as a fraction. In ½x, the x is not below the fraction line."""
    top, bottom = unicodedata.normalize("NFKC", match[0]).split("⁄")
    return rf" \frac{{{top}}}{{{bottom}}}"


def _token(match):
    if match["text"] is not None:
        text = re.sub(r"(?<!\\)\$|\\[,;:!]|\\text\{(\w+)\}", r" \1", match["text"])
        words = r"^[A-Z](?=\. )|[A-Za-zÀ-ɏ]['A-Za-zÀ-ɏ.]*|[^\W\d_A-Za-z]+"
        return re.sub(words, _quoted, text.replace(r"\cdot", "*"))
    if match["word"]:
        return _quoted(match) if _is_word(match) else match[0]
    return SPELLINGS.get(match[0].rstrip(), match[0])


def _quoted(match):
    word = match[0].replace(".", "")
    return SPELLINGS.get(word.lower(), f'"{word}"')


def _is_word(match):
    r"""Returns whether the matched letters, which are outside of \text{}, are a word, such as `meters`. If
    not, each letter is a variable, as in `xy`."""
    word = match[0].lower()
    start, end = match.span()
    before = match.string[max(0, start - 99) : start]  # more would take quadratic time
    after = match.string[end : end + 9]
    if not word.isascii():
        return True
    if PLURAL.sub("", word) in ALIASES:
        number = r"[\d })]$" if len(word) > 1 else r"^(?:[^A-Za-z]|times|cdot|approx)*[\d})]\$? $"
        return re.search(number, before)
    if word in SPELLINGS or word == "of":
        return True
    if len(word) < 3 and before.endswith("="):  # f(t)=at
        return False
    if word == "a":
        return re.search(r"[A-Za-z]{2}\}? $", before) and re.match(" (?!and|or)[a-z]{3}", after)
    if re.search(r"[\w^})\\]$|(?:frac|sqrt|\})\{$", before) or re.match(r"[\^_+=/-]", after):
        return False
    return len(word) > 2 or word in NO_UNIT


# --- read: finds the type of a text, and splits the text into its parts


class Number(NamedTuple):
    value: Fraction
    # number of digits after the decimal point; None for an exact number such as 5 or 1/3
    places: int | None


class Reading(NamedTuple):
    r"""A normalised text, its type, and its parts.

        kind        parts
        number      a Number
        quantity    (Reading of the number, words of the unit, whether one of the words looks like a unit).
                    The word `cm` looks like a unit; the word `nearly` does not
        list        Readings of the elements of a list or set
        tuple       (form, Readings of the elements). The form is "()" for (1,2), "=" for x=1, y=2, ":" for
                    1:2:3, "mod 7" for 3 \pmod 7, "matrix" for rows, and "&" for the cells of a row
        intervals   edges. An interval has two edges. An edge is (bracket, [Reading of the number])
        named       (name, Reading of the value): x=5 is ("x", Reading of 5). 1<x\le2 is ("x", intervals) with
                    the edges ("(", [Reading of 1]) and ("]", [Reading of 2])
        chain       (Reading of the value, texts before it, roundings after it). 3+4=7 is (Reading of 7,
                    ["3+4"], []), and \frac56\approx0.83 is (Reading of \frac56, [], ["0.83"])
        text        words in lower case, without articles and plural s; or letters such as C or AB; or
                    "101 base 2" for 101_2, a number with its base

    Two kinds have no parts (None): expression, and equation (also an inequality that is no interval)."""

    kind: str
    text: str
    parts: object = None


# A unit's first name, and other names of the same unit. English plurals need no entry. After a number, a
# short name such as mm is the unit, not the product of two variables.
UNIT_NAMES = (
    "mm millimeter millimetre мм 毫米; cm centimeter centimetre см 厘米; dm decimeter дм 分米",
    "m meter metre м 米; km kilometer kilometre км 千米 公里; in inch inche",
    "ft foot feet; yd yard; mi mile; mg milligram; g gram г 克; lb pound",
    "kg kilogram кг 千克 公斤; oz ounce; ton tonne т 吨; ms millisecond",
    "s sec second с 秒 секунд секунды; min minute 分钟 минут минуты минута",
    "h hr hour ч 小时 час часа часов; day 天 день дня дней; week; month 月",
    "yr year 年 岁 год года лет; l liter litre л 升; gal gallon; mph; hz hertz",
    "ml milliliter millilitre мл 毫升; degree deg 度 градусов градуса",
    "radian rad; dollar usd 美元 доллар доллара долларов; cent; yuan 元; yen 円 日元",
    "euro 欧元 евро; rs rupee; rouble ruble руб рубль рубля рублей; шт штук штуки",
    "degc celsius; degf fahrenheit; n newton; j joule; w watt; v volt",
    "pa pascal; am; pm; sq; unit; 个; 人; 种; 本; 张; 只; 支; 条; 块; 件; 辆; 棵; 页; 名; furlong; zentner",
)
ALIASES = {}
for row in ";".join(UNIT_NAMES).split(";"):
    names = row.split()
    ALIASES |= dict.fromkeys(names, names[0])
PLURAL = re.compile(r"(?<=[a-z]{2})s\b")
BASES = _table(
    "one 1 two 2 three 3 four 4 five 5 six 6 seven 7 eight 8 nine 9 ten 10",
    "eleven 11 twelve 12 thirteen 13 fourteen 14 fifteen 15 sixteen 16",
    "seventeen 17 eighteen 18 nineteen 19",
)
# Words after a number are its unit: `5 meters`. But a word of NO_UNIT or PART changes the number's value or
# meaning. With such a word, the Reading has the kind "text", not "quantity": `10 dozen` does not equal 10.
NO_UNIT = (
    "not no or on if is are was be it at by more less fewer than over under above "
    "below about least most between times plus minus half from binary "
    "base ten gross basis greater except "
    "maybe perhaps otherwise modulo point negative short twenty thirty forty "
    "fifty sixty googol squared"
)
NO_UNIT = BASES.keys() | set(NO_UNIT.split())
PART = re.compile(  # tenths, millions, MW
    r"(?i:(?:(?<!mo)n|d|i[efx]|lf|gh|ur)th|illion|ward)s?\b"
    r"|\b(?i:halve|third|quarter|couple|score|dozen|docena|douzaine|dutzend|lakh|crore|hundred|thousand)s?\b"
    r"|\b[MG](?:[WVJNg]|Hz|Pa)?\b"
)
# A word looks like a unit if it is in ALIASES or matches MANY. So if the gold answer is 5, `5 cm` and
# `5 pizzas` are right. After a number from -1 to 1, the pattern ONE is used instead of MANY, because the noun
# may be singular: `1 pizza`.
MANY = re.compile(
    "[a-z]{2,}s|people|children|w?o?men|sheep|fish|mice"
    "|kj|kw|kwh|kpa|khz|ev|nm|mole?|atm|bar|kelvin|k?cal|erg|db|ppm|rpm|au"
)
ONE = re.compile(MANY.pattern + "|[a-z]{3,}(?<!ed)(?<!ly)")
# A number and its unit, which has at most five words
QUANTITY = re.compile(
    r' ?(?!(?i:an?) ?")([^"]*[^-+*/=<>^_,({\[|" ]) ?'
    r'(?=(?:[^ ]* ){0,3}[^ ]*$)((?:"[^"]*"(?:\^\{-?\d\})?[ /*]?)+)'
)
DECIMAL = re.compile(
    r"([+-]?)(?=\.?\d|\.\\)(\d{1,40})?"
    r"(?:\.(\d{0,40})(?:\\overline\{(\d{1,20})\})?)?"
    r"(?:(?:[eE]|\*10\^)\{?([+-]?\d{1,3})\}?)?",
    re.ASCII,
)
FRACTION = re.compile(
    r"([+-]?)(?:(\d{1,40}) )? ?([+-]?\d{1,40})[/:]([+-]?\d{1,40})(\\%)?", re.ASCII
)
BASE = re.compile(r'\(?([0-9A-F]*[0-9][0-9A-F]*)\)?_\{[("]*(\w{1,8})[)"]*\}', re.ASCII)
# The letters and LaTeX commands that a chain such as 3+4=7 may have. Units may have any letters.
VALUES = set(r"\frac \sqrt \binom \pi \ln \log \sin \cos \tan e i \approx".split())
# A name may stand before `=`. It is one of NAMES, and then any of ENDS in this order
NAMES = (
    r'(?:(?:m ?)?\\(?!pi|infty|not|ln|log|sqrt)P?[a-z]++ ?\d?)+(?:\{"?[A-Za-z]+"?\})?',  # m\angle
    r"(?!not)[A-Za-z]{1,4}|[A-Z]\\c[au]p(?: ?[A-Z])?",  # x, ABC
    r'"(?![^"]*\b(?i:half|twice|not|never|wrong|false|opposite|negative of)\b)[^"]*"',  # "Tom"
    r'\\?\|[^|=<>+-]*[A-Za-z][^|=<>+-]*\||[|\[]"?[A-Z]{2,}"?[|\]]',  # |z|, |AB|, [ABC]
    r"\\?[({][^-+*/^=<>]*,[^-+*/^=<>]*[)}]",  # (r,\theta)
    r"\\(?:sum|i*int|prod|lim)(?![a-z]).*|\\(?:Delta|nabla) [A-Za-z]",
)
ENDS = (
    r' ?(?:"[A-Z]{1,4}"|[A-Z]{1,4})',  # \angle ABC
    r"(?:_\{[^{}]*\})?'*",  # a_{1}, f'
    r"(?<=[A-Zf])\^\{-1\}|(?<=sigma)\^\{2\}",
    r"\((?:[^()]|\([^()]*\))*\)|\[[A-Z]\]",  # f(x), E[X]
)
NAME = re.compile(f"(?:{'|'.join(NAMES)})(?:{')?(?:'.join(ENDS)})?")
# Group 1 is a variable of a formula, with index and argument: x, a_{1}, f(1), AB, \alpha
VARIABLE = re.compile(
    r"\\(?!(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|phi|omega)(?![a-z]))[A-Za-z]+"
    r"|[ei](?![_(])|((?:\\[a-z]+|[A-Z]{2,}|[A-Za-z])(?:_\{[^{}]*\})?'*(?:\([^()]*\))?)"
)
MATRIX = re.compile(
    r"[(\[]?\\begin\{(cases|[pbBvV]?matrix)\}"
    r"((?:(?!matrix|cases).)*)\\end\{\1\}[)\]]?"
)
# An opening bracket, a closing one, or a command or a sign that may separate parts
MARK = re.compile(r"([({[]|\\\{|\\begin)|([])}]|\\\}|\\end)|\\(?:[A-Za-z]+|\\)|[,;:=<>&]")
EQUAL = r"= \in \equiv \approx".split()
RELATIONS = r"< > \le \ge \ne".split()


@lru_cache(64)
def _marks(text):
    """Returns the matches of MARK that are outside of brackets, and the closing brackets of the outermost."""
    found = []
    depth = 0
    for match in MARK.finditer(text):
        if match[1]:
            depth += 1
        if match[2]:
            depth -= 1
        if depth == 0:
            found.append(match)
    return found


def _split(text, *separators):
    """Splits `text` at the separators that are outside of brackets. Returns the parts and the separators:
    `1,(2,3)` gives ["1", "(2,3)"] and [","]."""
    parts = []
    start = 0
    found = [mark for mark in _marks(text) if mark[0] in separators]
    for mark in found:
        parts.append(text[start : mark.start()].strip())
        start = mark.end()
    return [*parts, text[start:].strip()], [mark[0] for mark in found]


@lru_cache(4096)
def read(text: str, depth: int = 0) -> Reading:
    """Returns the Reading (type and parts) of a normalised text. depth: how deep the text is nested in the
    answer; 0 for the whole answer.

    A reader gets the text and the function `inner`, which reads a part of it. It returns a kind and its
    parts, or the Reading of what is in brackets, or None if the text is of another kind."""
    if depth <= 8 and text:  # a text that is nested deeper is one expression
        inner = partial(read, depth=depth + 1)
        for reader in (
            _read_list,
            _read_equation,
            _read_union,
            _read_inequality,
            _read_matrix,
            _read_brackets,
            _read_scalar,
            _read_text,
        ):
            if found := reader(text, inner):
                return found if len(found) == 3 else Reading(found[0], text, found[1])
    return Reading("expression", text)


def _read_list(text, inner):
    r"""Returns the Reading of a list; None for any other text. The separator is `;`, or `,` if there is no
    `;`. 1\pm2 is a list of 1+2 and 1-2. The Reading's kind is "list", but "named" for "x=1; x=2" and
    "x<1; x>2"."""
    parts, found = _split(text, ";", r"\\")
    if not found:
        parts, found = _split(text, ",")
    if not found:
        parts = re.split(r"\\pm(?![a-z]) ?", text)
        if len(parts) != 2 or text.startswith(r"\{"):
            return None
        parts = [sign.join(parts).replace("=+", "=") for sign in "+-"]
    # A part such as 1\pm2 gives two elements. A part that is a set is one element.
    elements = _flat(inner(part.rstrip(",")) for part in parts)
    if all(e.kind == "named" and _is_name(e.parts[0]) for e in elements):
        # Sort by name. Greek names, such as \theta, come last.
        named = sorted((e.parts for e in elements), key=lambda p: p[0].replace("\\", "~"))
        names, values = zip(*named, strict=True)
        # "x=1 or x=2" and "x_1=1, x_2=2" have no order. f(1)=1, f(2)=2 and a_1=1, a_2=2 have one.
        bare = {re.sub(r"(?<=[kmtxyz])_\{[\d,]+\}$", "", name) for name in names}
        if len(bare) == 1:
            value = Reading("list", text, _flat(values))
            if {v.kind for v in values} == {"intervals"}:
                value = Reading("intervals", text, _edges(value))
            return "named", (bare.pop(), value)
        # "y=2, x=1" is read as (x,y)=(1,2)
        return "named", (f"({','.join(names)})", Reading("tuple", text, ("=", values)))
    return "list", elements


def _flat(readings):
    """Returns the Readings; instead of a list that has no braces, such as `2; 5`, its elements."""
    elements = []
    for reading in readings:
        bare = reading.kind == "list" and not reading.text.startswith(r"\{")
        elements += reading.parts if bare else [reading]
    return elements


def _read_equation(text, inner):
    r"""Returns a Reading of the kind "chain" for 3+4=7, "equation" for 2x+1=7, or "named" for x=7 and x+y=7;
    None for a text without a sign of EQUAL."""
    parts, found = _split(text, *EQUAL)
    if not found:
        return None
    # a ratio AB/CD has the name AB:CD
    name = re.sub(r"^\\frac\{(.*?)\}\{(.*)\}$|^([^/]*)/([^/]*)$", r"\1\3:\2\4", parts[0])
    right = text[len(parts[0] + found[0]) :].strip()
    if _is_name(name):
        return "named", (name, inner(right))
    # The value of 2+3=5 is the last part, 5. The value of \frac56\approx0.83 is the last part before \approx.
    exact = found.index(r"\approx") if r"\approx" in found else len(found)
    bare = re.sub(r' ?"[^"]*"(\^\{\d\})?', "", text)  # without units
    if set(SYMBOL.findall(bare)) <= VALUES:
        value = inner(parts[exact])
        steps = _split(bare, *EQUAL)[0]
        return "chain", (value, steps[:exact], steps[exact + 1 :])
    if _gives_value(parts[0]):
        return "named", (name, inner(right))
    return "equation", None


def _gives_value(left):
    """Returns whether an equation tells the value of its left side, which is no name: x+y=7, f(1)+f(2)=7. But
    2x+1=7 must be solved for its only variable."""
    variables = [*filter(None, VARIABLE.findall(left))]
    if re.search(r'"|\b(?:not|neg)\b', left):
        return False
    is_sum = "+" in left and not re.search(r"\d", left)  # n+n
    return len({*variables}) > 1 or len(variables) > 1 and is_sum


def _is_name(text):
    """Returns whether a text may stand before `=`: x, f(x), AB:CD."""
    return all(map(NAME.fullmatch, text.split(":")))  # the ratio AB:CD has two names


def _read_union(text, inner):
    r"""Returns the Reading of a union (\cup) or a difference (\setminus) of intervals; None for any other
    text."""
    parts, signs = _split(text, r"\cup", r"\setminus")
    if not signs:
        return None
    edges = []
    for part, sign in zip(parts, ["", *signs], strict=True):
        found = _edges(inner(part))
        if not found:
            return None
        if sign == r"\setminus":
            found = [(side.translate(OPPOSITE), value) for side, value in found]
        edges += found
    return "intervals", edges


OPPOSITE = str.maketrans("[]()", ")(][")  # a set without [0,1] has the edges 0) and (1
# A relation between a name x and numbers -> the interval of x
INTERVALS = _table(
    r"x< (-\infty,{}) x> ({},\infty) x\le (-\infty,{}] x\ge [{},\infty)",
    r"<x ({},\infty) >x (-\infty,{}) \lex [{},\infty) \gex (-\infty,{}]",
    r"x\ne (-\infty,{0})\cup({0},\infty) \nex (-\infty,{0})\cup({0},\infty)",
    r"<x< ({},{}) <x\le ({},{}] \lex< [{},{}) \lex\le [{},{}]",
    r">x> ({1},{0}) >x\ge [{1},{0}) \gex> ({1},{0}] \gex\ge [{1},{0}]",
)


def _read_inequality(text, inner):
    r"""Returns a Reading of the kind "named" for x<2, 2>x, 1<x\le 2 and x\ne 1: the name of the intervals is
    x. Other inequalities, such as x+y<2, are of the kind "equation"."""
    parts, signs = _split(text, *RELATIONS)
    if not signs:
        return None
    place = 0 if len(parts) == 2 and _is_name(parts[0]) else 1
    name = parts.pop(place)
    signs.insert(place, "x")
    interval = INTERVALS.get("".join(signs))
    if interval and _is_name(name) and all(parts):
        edges = _edges(inner(interval.format(*parts)))
        if edges:
            return "named", (name, Reading("intervals", text, edges))
    return "equation", None


def _edges(reading):
    r"""Returns the edges (see Reading) of the intervals that a Reading stands for. A number x stands for
    [x,x]. Returns [] for a Reading that is no interval, such as (2,1): the lower edge must come first.
    x<5, x\ne3 stands for (-oo,3) and (3,5): x\ne3 ends one interval at 3 and begins another."""
    kind, _, parts = reading
    if kind == "intervals":
        return parts
    if kind == "named":
        return _edges(parts[1])
    if kind == "list":
        return _edges_of_list(reading)
    if kind in ("number", "expression"):
        return [("[", [reading]), ("]", [reading])]
    if kind != "tuple" or not re.fullmatch(r"[\[(][\])]", parts[0]):
        return []
    ends = [value.parts.value for value in parts[1] if value.kind == "number"]
    if len(parts[1]) != 2 or ends != sorted({*ends}):
        return []
    return [(side, [value]) for side, value in zip(*parts, strict=True)]


def _edges_of_list(reading):
    """See `_edges`. Returns [] if an element is no interval."""
    # `and` and commas join inequalities to one interval, `or` does not.
    joins = re.search(r"[<>]|\\[gl]e", reading.text) and ";" not in reading.text
    edges = []
    for part in sorted(reading.parts, key=lambda part: r"\ne" in part.text):
        found = _edges(part)
        if not found:
            return []
        # x\ne3 has the edges (-oo 3) (3 oo). Beside other intervals, only 3) and (3 count.
        edges += found[1:-1] if edges and r"\ne" in part.text else found
        if joins:
            edges = _intersection(edges)
    return edges


def _intersection(edges):
    r"""Returns the edges of 1<x<3 for those of the rays x>1 and x<3, and other edges unchanged. Rays that do
    not meet, such as x<1 and x>3, stand for their union; so do rays whose ends are no numbers (x>\sqrt2)."""
    ends = [edge for edge in edges if r"\infty" not in edge[1][0].text]
    ends.sort(key=lambda edge: edge[0] in "])")  # a lower end comes first
    values = [end.parts.value for _, (end,) in ends if end.kind == "number"]
    if len(values) == len(ends) == 2 and values[0] < values[1] and ends[1][0] in "])":
        return ends
    return edges


def _read_brackets(text, inner):
    match = re.fullmatch(r"(\\\{|[(\[{])(.*?)(\\\}|[)\]}])", text)
    # (1)+(2) is not in brackets
    if not match or any(mark.end() < len(text) for mark in _marks(text)):
        return None
    left, inside, right = match.groups()
    parts, _ = _split(inside, ",", ";")
    if left == r"\{":
        return "list", _flat(map(inner, dict.fromkeys(parts)))  # {2,2} is {2}
    if left == "{" or len(parts) == 1 and left + right == "()":
        return inner(inside.rstrip(" .,"))
    if not all(parts) or len(parts) == 1:
        return None  # [x] is the integer part of x
    return "tuple", (left + right, list(map(inner, parts)))


def _read_matrix(text, inner):
    if not (match := MATRIX.fullmatch(text)):
        return None
    kind, inside = match.groups()
    rows = []
    for row in filter(None, _split(inside, r"\\")[0]):
        if kind == "cases":  # x^2,& "if" x>0
            row = re.sub(r'^(.+?) *(?:[,& ]*"(?:if|for|when)"|,?&|,) ?(.+?)[., ]*$', r"\1&\2", row)
        cells, _ = _split(row, "&")
        rows.append(Reading("tuple", row, ("&", list(map(inner, cells)))))
    if not rows:
        return None
    if kind == "cases":
        return "list", rows
    kind = kind.strip("pbB")
    cells = [row.parts[1] for row in rows]
    if kind == "matrix" and {*map(len, cells)} == {1}:  # a column vector
        return "tuple", ("()", sum(cells, []))
    return "tuple", (kind, rows)


def _read_text(text, inner):
    """Returns the Reading of one letter (not e or i), of capitals (AB), or of a text with words in quotes
    (5 "m"; `normalise` adds the quotes). None for any other text."""
    if re.fullmatch(r'[A-Z]{2,}|"?(?![ei])[A-Za-z]"?', text):
        return "text", text.strip('"')
    if '"' not in text:
        return None
    match = QUANTITY.fullmatch(text)
    found = re.findall(r"(?:'|[^\W\d_])+|[2-9]|/", match[2].lower() if match else "")
    names = set(filter(str.isalpha, found))
    if not match or NO_UNIT & names or PART.search(match[2]):
        words = re.sub(r'[\s"]+', " ", text).strip().casefold()
        words = re.sub(r"\b(?:an?|the(?:re (?:is|are))?) (?=[a-z]{2})", "", words)
        words = re.sub(r"( [a-z]{2,}[a-rt-z])s\b", r"\1", words).split()
        return "text", " ".join(ALIASES.get(word, word) for word in words)  # 2 h 30 min
    inside = inner(match[1])
    noun = ONE if inside.kind == "number" and abs(inside.parts.value) <= 1 else MANY
    unknown = names - ALIASES.keys()
    known = unknown < names  # at least one of the words is a known unit
    is_unit = known or any(map(noun.fullmatch, names))
    # `"square meters"` and `"m"^{2}` have the same unit: ("m", "2").
    unit = PLURAL.sub("", " ".join(found)).split()
    unit = tuple(ALIASES.get(word, word) for word in unit)
    return "quantity", (inside, unit, is_unit and all(map(str.isascii, unknown)))


def _read_scalar(text, inner):
    if number := _number(BASES.get(text.strip('"').lower(), text)):
        return "number", number
    if match := BASE.fullmatch(text):
        return "text", f"{match[1].lstrip('0')} base {BASES.get(match[2], match[2])}"
    if match := re.fullmatch(r"(.+?)\(?\\pmod ?\{?(\w+)\}?\)?", text):
        value = inner(match[1])
        if (
            value.kind == "number"
            and value.parts.value < 0
            and re.fullmatch(r"[1-9]\d{0,8}", match[2])
        ):
            value = inner(str(value.parts.value % int(match[2])))  # -4 \pmod 7 is 3 \pmod 7
        return "tuple", (f"mod {match[2]}", [value])
    parts, found = _split(text, ":")
    if not found or '"' in text:
        return None
    return "tuple", (":", list(map(inner, parts)))


def _number(text):
    """Returns the Number of a normalised decimal, repeating decimal, fraction or mixed number. None for any
    other text, also for a fraction whose value is an integer, such as 84/2.

    A fraction may end with a percent sign. In decimals, `normalise` has replaced the sign by *10^{-2}."""
    if text.startswith("10^"):
        text = "1*" + text
    if match := DECIMAL.fullmatch(text):
        sign, whole, decimals, repeated, power = match.groups("")
        power = int(power or 0)
        value = Fraction(
            f"{sign}0{whole}.{decimals}0e{power}"
        )  # 0: `whole` or `decimals` may be empty
        if repeated:  # 0.1\overline{6} is 0.1 + 0.6 / 9, and `end` is the 0.6
            end = Fraction(f"{sign}{repeated}e{power - len(decimals)}")
            return Number(value + end / (10 ** len(repeated) - 1), places=None)
        return Number(value, places=max(len(decimals) - power, 0) if decimals else None)
    match = FRACTION.fullmatch(re.sub(r"\\frac\{([^{}]+)\}\{([^{}]+)\}(?!\d)", r" \1/\2", text))
    if not match:
        return None
    sign, mixed, *digits, percent = match.groups()
    top, bottom = map(int, digits)
    if bottom == 0 or mixed and not 0 < top < bottom:  # 1 3/2 is no mixed number
        return None
    value = Fraction(top, bottom)
    # 84/2 is a calculation. A ratio with ":" must be in lowest terms: 2:30 may be a time, which is not 1:15.
    if value.denominator == 1 or ":" in text and value.denominator < bottom:
        return None
    value = (int(mixed or 0) + value) * int(sign + "1")
    return Number(value / 100 if percent else value, places=None)


# --- equality

# An answer must be worked out as far as the gold answer. Otherwise a policy could earn the reward by
# repeating the problem. If the gold answer is 7, the answer 3+4 is wrong. The table tells what an answer may
# contain, and when. In "A equals B" and "A does not equal B", A is the answer and B the gold answer.
#
#     fraction of integers        always: 6/8. But if its value is an integer (84/2), it counts as a product.
#     sum of like terms           if the gold answer has such a sum: 2\pi+3\pi does not equal 5\pi
#     product of numbers          if the gold answer has such a product or a power of a number:
#                                 2\cdot2^{2023} equals 2^{2024}
#     power or factorial          if the gold answer has one: 2^3x does not equal 8x, and (2x)^3 does not
#       of a number               equal 8x^3. Or if it is an equation with any power: x^2+y^2=5^2 equals
#                                 x^2+y^2=25
#     other + - * / and powers    if the gold answer is no number: 2x+6 equals 2(x+3)
#     match of an OPERATIONS      if the gold answer matches this pattern at least as often: \sin60^\circ does
#       pattern                   not equal \frac{\sqrt3}{2}, and \ln12-\ln4 does not equal \ln3. Roots may
#                                 be the value of a trigonometric function in the gold answer
#
# If the gold answer has a variable (also e or i), one match of a pattern in it allows any number of matches
# in the answer. A pattern that ends with .* counts several operations as one.
OPERATIONS = list(
    map(
        re.compile,
        (
            r"(?:\\(?:int|sum|prod|lim|gcd|lcm|det|max|min)(?![a-z])|\\frac\{(?:d|\\pa)).*",
            r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc).*",
            r"\\(?:log|ln).*",
            # roots, also as a power: x^{1/2}. The two roots of \frac{\sqrt2}{\sqrt3} count as one.
            r"(?<!\\ln)\\sqrt(?:\{\w+\}\}\{\\sqrt(?=\{\w+\}\}))?|\^\{[^{}]*[./]|\^\{[^{}]*\\frac",
            # Logarithms. The gold answer \ln\frac32 has two matches, so an answer may have two, such as
            # \ln3-\ln2. \frac{\ln3}{\ln2} has one match.
            r"(?<!\}\{)\\l(?:n|og)|(?<=\\ln|log|ln\() ?(?:\\frac(?!\{[1e]\})|\d+\.)",
        ),
    )
)
# Matches ratios of integers, products of an integer and a fraction, and the double minus of -(-3). The parser
# turns \frac{84}{2} into 42. So `_calculations` must search the text for such calculations.
RATIO = re.compile(
    r"\\frac\{-?\d+\}\{-?\d+\}(?:\*\d(?!\d*\^)|\(\d[^-+()]*\))?"
    r"|(?<![\d.])\d+/\d+|\d\*\\frac\{\\?[\dp]|-\(-[^()]*\)(?!\^)"
)
# math-verify misreads texts that match this pattern. It reads 46 1 as 47, 52_9 as 52, 5\approx 2 as 5,
# and 2f' as 2f.
MISREAD = re.compile(
    r"'|!!|\d \d|\d ?\{\d|\d_|\\(?:equiv|approx|sim|pmod)(?![a-z])"
    r"|\\\{|\\frac\{d\w\}"
)
# What math-verify's parser misreads -> how to write it. It reads \sin x*2 as \sin(2x), \ln2\sqrt3 as
# \sqrt3\ln2, 2(3) as 2+3, \gamma+1 as the gamma function of 1, and I as the imaginary unit. [x] is the
# integer part of x.
PARSED = {
    r"(\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)|l(?:n|og(?:_\{\w+\})?))) ?"
    r"([\w\\]+(?=\*)|\d+\\sqrt\{[^{}]*\})": r"\1(\2)",
    r"(?<=[\d)])(?=\()|(?<=\))(?=\d|\\frac)": "*",
    r"(?<!sqrt)\[([^][,]*)\]": r"\\lfloor \1\\rfloor ",
    r"\\([gG])amma(?![a-z])|(?<![\\a-z])(I(?![a-z])|[eE](?=_))": r"\\mathcal{\1\2}",
}
# The answers that math-verify compares with a gold matrix: a matrix, or a factor times a matrix. A sum of two
# matrices does not match, because it is an unfinished calculation.
SCALED = re.compile(r"-?[\w{}\\./]*\\begin\{[pbB]?matrix\}(?:(?!\\begin).)*matrix\}")
SYMBOL = re.compile(r"\\[A-Za-z]+(?:\{\w?matrix\})?|[A-Za-z]")
# Group 2 is the letter in a text that `_letter` has normalised: A, A., (A), Option A, A:15, or 15 choices A,
# which `normalise` makes of `(A) 15`. A) does not match.
LETTER = re.compile(
    r"(?!.*\b(?:[A-J]+\b.* choices|(?i:not|wrong|incorrect|false|but|except|or))\b)"
    r"(?:.+ choices |(?i:choice|option) ?)?"
    r"(\()?([A-Z])(?:(?(1)\))\.?|[.:)](?! ?[;,+]|.*\b[A-J]+\b).+)"
)


def grade(answer: str, gold: str, kind: str = "math") -> bool:
    r"""Returns whether `answer` equals `gold`. The three kinds:

        math      equality as described at the top of this file
        choice    equal letters; D, d, (D), D. and \text{D} are the same letter
        exact     equal texts, apart from spaces at the ends

    Runs in this process and has no deadline. Grade untrusted answers with grading.worker.Grader instead.
    Raises UserError for an unknown kind, and ValueError for a gold answer that can't be parsed. math-verify
    may raise further errors.
    """
    return bool(quick_grade(answer, gold, kind, math_equal))


class Undecided(Exception):
    """Raised if only math-verify can decide whether two answers are equal."""


def _undecided(*_):
    raise Undecided


def quick_grade(answer: str, gold: str, kind: str = "math", prove=_undecided) -> bool | None:
    """Returns what `grade` returns, or None if only math-verify can decide. If `prove` is given, it compares
    such expressions instead (see `_same`). Raises UserError for an unknown kind."""
    require(kind in KINDS, f"answer kind {kind!r} is unknown", f"one of {', '.join(KINDS)}")
    answer, gold = answer.strip(), gold.strip()
    if not answer or not gold:
        return False
    letter = _letter(gold)
    chosen = letter is not None and _letter(answer) == letter
    if kind == "choice":
        return chosen
    if answer == gold or kind == "exact":
        return answer == gold
    a, b = (read(normalise(text)) for text in (answer, gold))
    if chosen and b.parts == letter and letter in answer:  # `(A) 15` equals A
        return True
    try:
        renamed = _renamed(answer, gold, a.text, b.text)
        equal = _same(a, b, prove) or any(_same(read(text), b, prove) for text in renamed)
    except Undecided:
        return None
    if not equal and r"\pi" not in b.text:
        return False
    ours, theirs = map(_domains, (answer, gold))
    if equal:  # but n\in\mathbb{N} is not n\in\mathbb{Z}
        return not (ours and theirs and ours.isdisjoint(theirs))
    # x=\frac\pi4+\pi n: many gold answers do not say that n is an integer
    if ours | theirs != {"Z"} or not (theirs or b.text.startswith("x=")):
        return False
    return None if prove is _undecided else _same_family(a, b)


# The values that a parameter may have: all integers, or those from 0 or from 1. Natural numbers may
# begin with either.
IN = r"\\in ?\{?(?:\\(?:math(?:bb|bf|rm)|Bbb) ?\{?)?"
NATURAL = rf"{IN}N|\bnatural\b"
DOMAINS = {
    "Z": rf"{IN}Z(?!\w|\}}*[\^_+*>])|(?<!tive )\bintegers?\b",
    "0": rf"{NATURAL}|\bnon-?negative\b",
    "1": rf"{NATURAL}|{IN}Z\}}*[\^_+*]|\bpositive\b",
}
# The bound of a parameter: n\ge2, n=1,2,\ldots, n\in\mathbb{Z}_{\ge0}
BOUND = (
    r"(?:[,;(} ]\$? *[a-su-wA-CK]|[NZ]\}*_\{?) ?"
    r"(>|<|\\[gln]e|=(?= ?\d+, ?\d.*(?:dots|\.\.))) ?(\d+)\b(?![./])"
)
# Letters of parameters: the n of `2\pi n, n\in\mathbb{Z}`, of `2n for any integer n`, of `2n, where n is an
# integer`, and of `(n,2n) (n\ge1)`
LETTERS_OF = r"(?<![\w\\^*/+-])([a-zA-CK](?:(?:,| and ) *[a-zA-CK](?![a-z])){0,3})"
PARAMETERS = (
    rf"{LETTERS_OF} *(?:\\in|∈|= ?[01],|(?:is|are|an?|any|arbitrary)\b)"
    rf"|(?:[,;(]|\bfor) *{LETTERS_OF} *(?:\\ge?q?|[>≥]) ?\d"
    r"|\b(?:any|every|all|some|arbitrary|constants?|(?:real|integer|number)s?),? "
    rf"{LETTERS_OF}(?![a-z])"
)
# The arguments of a named function: the t of f(t)=2t
ARGUMENTS = re.compile(r"^[A-Za-z](?:\^\{-1\})?\(([a-z](?:,[a-z])*)\)=")
# The letters of a constant of an equation such as y=Ce^x
CONSTANTS = set("ABCKck")
# The signs before and after a formula in the text of a problem.
FORMULA = re.compile(r"\$|\\[][()]|\\(?:begin|end)\{(?:align|equation|gather)\w*\*?\}")
ORDERED = re.compile(
    r"(?i)(?:creas|scend)ing order|order of (?:in|de)creas"
    r"|\b(?:least|smallest|greatest|largest|lowest|highest) to\b"
)


def repeats(answer: str, gold: str, problem: str) -> bool:
    r"""Returns whether an answer, or its value after the last =, is a formula or an equation of the problem,
    such as `\sqrt{242}` of "Simplify $\sqrt{242}$". If the answer is a list, each of its elements must be
    such a formula. A formula that is the gold answer or one of its elements, or that has it on one side, does
    not count. Also if the answer is the gold list in another order, and the problem asks for an order."""
    parts, golds = (
        re.split("[;,]", normalise(text).partition(r"\approx")[0]) for text in (answer, gold)
    )
    if parts != golds and sorted(parts) == sorted(golds) and ORDERED.search(problem):
        return True
    known = set()
    right = {_bag(part.rpartition("=")[2]) for part in golds}
    for formula in map(normalise, FORMULA.split(problem)):
        # also without the number of (1) x=2
        sides = re.split(r"^\(?\d\)|[=<>,;&]|\\(?:in|[gl]e)(?![a-z])", formula)
        sides = {_bag(side) for side in (formula, *sides)}
        if not right & sides:
            known |= sides
    return all(
        any(
            re.search(r"\w[-+*/^]|\\[a-z]{2}", value) and _bag(value) in known
            for value in (part, part.rpartition("=")[2])
        )
        for part in parts
    )


def _bag(text):
    """Returns a text that is the same for x^2-9 and (-9+x^2): the sorted characters of a formula, without
    words, brackets, + and *. Another formula may have the same characters: x^9-2. In an equation, the terms
    of each side and the two sides are sorted, but not the characters of a term. A text that is one number is
    not sorted."""
    text = re.sub(
        r'"(?!choices)[^"]*"| |(?<![\w.])1(?:\*|(?=\\[sl]))|(?<=sqrt)\[2\]'
        r"|[*/]1(?![\d.])|\^\{1\}|\.0+(?!\d)",
        "",
        text,
    )
    if "=" in text:
        return str(sorted(sorted(re.findall("-?[^-+]+", side)) for side in text.split("=")))
    if _number(text):
        return text
    return "".join(sorted(re.sub(r"\\[{}]|[][(){}*+?]", "", text.replace(r"\frac", "/"))))


def _same_family(answer, gold):
    r"""Returns whether two Readings have the same values for all integers k: \frac\pi4+\frac{k\pi}2 and
    \frac{(2k+1)\pi}4. Each of their elements must grow steadily with k. Compares the values for k near 0."""
    name, answer = _parts(answer, "named", (None, answer))
    needed, gold = _parts(gold, "named", (None, gold))
    ours, theirs = ([r.text for r in _parts(side, "list", [side])] for side in (answer, gold))
    if len(ours) + len(theirs) > 18:  # would take too long
        return False
    families, others = (list(map(_family, texts)) for texts in (ours, theirs))
    if name and needed and name != needed or not all(families + others):
        return False
    # An unfinished calculation is wrong here, too.
    if any(op.search(answer.text) and not op.search(gold.text) for op in OPERATIONS):
        return False
    undone, allowed = (set().union(*map(_calculations, texts)) for texts in (ours, theirs))
    return undone <= allowed and _covers(families, others) and _covers(others, families)


def _covers(families, others):
    """Returns whether the values of `others` for k near 0 are values of `families`."""
    values = set(sum(families, []))
    return all(values.issuperset(other[54:67]) for other in others)


def _family(text):
    """Reads a text with one letter k, such as 2k+1. Returns its values at k = -60 to 60 if a step of 2 in k
    always adds the same number, which is not 0; else []. 2, because (-1)^k repeats after two steps"""
    parsed = _parse(text)
    if parsed is None or len(parsed.free_symbols) != 1 or re.search(r"\\(?:sum|prod|int)|!", text):
        return []
    try:
        values = [round(float(parsed.subs(*parsed.free_symbols, k)), 6) for k in range(-60, 61)]
    except (TypeError, OverflowError):  # no real numbers
        return []
    steps = {round(b - a, 4) for a, b in zip(values, values[2:], strict=False)}
    return values if len(steps) == 1 and steps != {0} else []


def _domains(text):
    r"""Returns which values an answer's parameter may have: its bounds, such as "3" for k\ge3 and k>2, and
    "<3" for k<3. Without bounds, the keys of DOMAINS whose patterns match."""
    plain = re.sub(r"\\([gln]e)q?(?:slant)?(?![a-z])", r"\\\1", _plain(text).replace(">=", r"\ge"))
    if bounds := re.findall(BOUND, plain):
        return {str(int(n) + 1) if sign == ">" else sign.lstrip(r"\ge=") + n for sign, n in bounds}
    return {name for name, pattern in DOMAINS.items() if re.search(pattern, plain)}


def _renamed(answer, gold, a, b):
    """Yields copies of the normalised answer `a` with letters of the normalised gold answer `b`. Replaced are
    the arguments of a function, and one or two parameters (see PARAMETERS), in every order."""
    if _variables(a) == _variables(b):
        return
    new = {}  # a letter of the answer -> a letter of the gold answer
    ours, theirs = map(ARGUMENTS.search, (a, b))
    if ours and theirs:
        new = dict(zip(ours[1].split(","), theirs[1].split(","), strict=False))
    # the letters in the values: without words, and without the names before `=`
    names = r'"[^"]*"|(?:^|(?<=[,;]))(?:[a-zA-Z]+(?:\^\{-1\})?)?(?:\([^()]*\))?='
    ours, theirs = (_variables(re.sub(names, "", text)) - {"e", "i"} for text in (a, b))
    if set(new.values()) & ours - new.keys():  # f(t)=xt is not f(x)=x^2
        return
    extra = ours - theirs - new.keys()  # letters that only the answer has
    missing = theirs - ours - set(new.values())  # letters that only the gold answer has
    if len(extra) != len(missing) or len(extra) > 2 or not (extra or new):
        return
    declared, needed = map(_parameters, (answer, gold))
    # An answer that declares no parameter may use any letters but x, y, z and t.
    allowed = declared or extra - set("txyz")
    are_parameters = missing <= needed and extra <= allowed
    is_equation = re.search(r"^[a-z](?:\([a-z]\))?=.*[xt]", b)
    are_constants = is_equation and missing <= CONSTANTS and extra <= CONSTANTS | declared
    if extra and not (are_parameters or are_constants):
        return
    for letters in permutations(missing):
        every = new | dict(zip(extra, letters, strict=True))
        yield re.sub(r"\\[a-z]+|[A-Za-z]", lambda m, every=every: every.get(m[0], m[0]), a)


def _parameters(text):
    """Returns the letters of an answer's parameters (see PARAMETERS)."""
    plain = re.sub(r"\\text|\\(?:quad|[,;: ])", " ", re.sub("[${}]", "", text))
    found = "".join(map("".join, re.findall(PARAMETERS, " ".join(plain.split()))))
    letters = set(re.findall(r"\w", found.replace("and", "")))
    return letters | {"C"} if "c" in letters else letters  # `normalise` writes +C for +c


def _letter(text):
    """Returns the letter of a choice, such as B for `(B) 15`, and also X for the variable x; else None."""
    text = normalise(text).replace('"choices', " choices").replace('"', "")
    match = LETTER.fullmatch(text.upper() if len(text) < 4 else text)  # (d) is the choice D
    return match and match[2]


def _same(answer, gold, prove):
    """Returns whether two Readings are equal. prove(answer, gold) compares the texts of two expressions. Its
    errors pass through."""
    if _squeeze(answer.text) == _squeeze(gold.text):
        return True
    kinds = {answer.kind, gold.kind}
    for kind, same in COMPARE.items():
        if kind in kinds:
            return same(answer, gold, prove)
    if kinds == {"tuple", "expression"}:
        answer, gold = map(_as_residue, (answer, gold))
        kinds = {answer.kind, gold.kind}
    if kinds == {"number"}:
        return _same_number(answer.parts, gold.parts)
    if kinds == {"tuple"}:
        return _same_tuple(answer.parts, gold.parts, prove)
    if kinds == {"text"}:
        return answer.parts == gold.parts
    return _same_expression(answer, gold, prove)


def _as_residue(reading):
    r"""Returns the Reading of 3 \pmod 7 for that of 7k+3, and other Readings unchanged."""
    match = re.fullmatch(r"(?:(\d{1,9})\+)?(\d{1,9})[kmnt]([+-]\d{1,9})?", reading.text)
    return read(rf"{match[1] or match[3] or 0}\pmod {match[2]}") if match else reading


def _parts(reading, kind, other):
    """Returns the parts of a Reading of this kind, and `other` for a Reading of another kind."""
    return reading.parts if reading.kind == kind else other


def _same_intervals(answer, gold, prove):
    """Does the work of `_same` if one or both Readings are intervals: their edges must be the same."""
    a, b = _edges(answer), _edges(gold)
    return bool(a and b) and _unordered(a, b, prove, _same_tuple)


def _same_list(answer, gold, prove):
    """Does the work of `_same` if one or both Readings are a list. {5} equals 5."""
    if "tuple" in (answer.kind, gold.kind) and r"\{" not in (answer.text[:2], gold.text[:2]):
        # "x=1, y=2" equals "1, 2", and x_{1}=1, x_{2}=2 equals (1,2)
        a, b = (
            _parts(r, "tuple", ("=" if "}=" in r.text else ",", r.parts)) for r in (answer, gold)
        )
        if "=" in (a[0], b[0]):
            return _same_tuple(a, b, prove)
    a = _parts(answer, "list", [answer])
    b = _parts(gold, "list", [gold])
    return _unordered(a, b, prove)


def _squeeze(text):
    """Returns `text` without quotes and spaces. Only spaces between two digits are kept."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text.replace('"', ""))


def _same_expression(answer, gold, prove):
    kinds = {answer.kind, gold.kind}
    if kinds <= {"equation", "named"} or SCALED.fullmatch(answer.text) and r"\begin" in gold.text:
        return prove(answer.text, gold.text)
    if not kinds <= {"expression", "number"} or gold.kind == "number":
        return False
    _, trigonometric, _, roots, _ = OPERATIONS
    for operation in OPERATIONS:
        ours, theirs = (len(operation.findall(r.text)) for r in (answer, gold))
        if operation is roots and trigonometric.search(gold.text):
            continue  # \sqrt2-1 equals \tan\frac{\pi}{8}
        if ours > theirs and not (theirs and _variables(gold.text)):
            return False
    return prove(answer.text, gold.text)


def _variables(text):
    return {symbol for symbol in SYMBOL.findall(text) if len(symbol) == 1}


def _same_named(answer, gold, prove):
    """Does the work of `_same` if one or both Readings have a name: x=5 equals 5 and x=5, but not y=5."""
    name, a = _parts(answer, "named", (None, answer))
    gold_name, b = _parts(gold, "named", (None, gold))
    index = r"(?<=[A-Za-z}])(?:_\{[^{}]*\}|\([^()]*\))+$"  # the _{1} of a_{1}, the (A) of P(A)
    bare, gold_bare = (re.sub(index, "", n or "") for n in (name, gold_name))
    # The name x may stand for x_{1}, and x_{1} for x. But x_{2} is not x_{1}.
    names_agree = (
        name in (None, gold_name, gold_bare)
        or gold_name in (None, bare)
        or {name, gold_name} == {"y", "f(x)"}
    )
    kinds = {a.kind, b.kind}
    if "intervals" in kinds:
        if len(kinds) == 1 and name and gold_name and name != gold_name:  # b>a equals a<b
            return prove(answer.text, gold.text)
        return _same(a, b, prove)
    # The gold answer x+y=5 may be the equation of a line, not the value of x+y. So the answer y=5-x is right,
    # and the answer 5 is wrong.
    if gold_name and (not _is_name(gold_name) or re.fullmatch("[a-z]{2,}", gold_name)):
        return _same_expression(answer, gold, prove)
    # If the gold answer is x=5 or V=ah, the answers x-5=0 and V/a=h are wrong: the equation must still be
    # solved. But if the gold answer is the curve y=2x, the answer y-2x=0 is right.
    if not names_agree or "equation" in kinds:
        letters = _variables(gold.text) - {"e", "i"}
        is_curve = len(letters) > 1 and letters <= set("Ctxyz")
        return (not gold_name or is_curve) and _same_expression(answer, gold, prove)
    return _same(a, b, prove)


def _same_chain(answer, gold, prove):
    """Does the work of `_same` if one or both Readings are a chain, such as 3+4=7. If `gold` is a chain, only
    its value (7) counts. If `answer` is a chain, the texts before its value must equal the value. Roundings
    after the value must be right within one percent. If the value is an integer, they must be exact. More
    than one rounding is wrong: otherwise one of many could be right by chance."""
    value, exact, rounded = _parts(answer, "chain", (answer, (), ()))
    is_rounding = "." in gold.text and any(_same(read(text), gold, prove) for text in rounded)
    needed, *_ = _parts(gold, "chain", [gold])
    if len(rounded) > 1 or not is_rounding and not _same(value, needed, prove):
        return False
    if value.kind == "quantity":
        value = value.parts[0]
    if value.kind not in ("number", "expression"):
        return False
    text = str(value.parts.value) if value.kind == "number" else value.text
    limits = [1e-6] * len(exact) + [0.01] * len(rounded)
    return all(map(prove, [*exact, *rounded], repeat(text), limits))


def _same_quantity(answer, gold, prove):
    """Does the work of `_same` if one or both Readings have a unit. If only the answer has a unit, one of the
    unit's words must look like a unit (`is_unit`): `5 cm` equals 5, but `5 nearly` differs from 5."""
    # Without a unit, a Reading is its own number, with the unit None.
    a, unit, is_unit = _parts(answer, "quantity", (answer, None, True))
    b, needed, _ = _parts(gold, "quantity", (gold, None, True))
    if a.kind == "text" and needed:  # gold `(B) 15`, read as 15 with the unit ("choice", "b")
        return needed == ("choice", a.parts.lower())
    # If one side is in degrees and the other has π and no unit, the degrees become radians.
    if unit == ("degree",) and not needed and r"\pi" in b.text:
        a, unit = _in_radians(a), None
    if needed == ("degree",) and not unit and r"\pi" in a.text:
        b = _in_radians(b)
    # An answer without a unit may equal any gold answer. A unit must be the gold answer's, or look like one.
    agrees = unit == needed if needed else is_unit
    return (not unit or agrees) and _same(a, b, prove)


def _in_radians(reading):
    """Returns the Reading of an angle in radians for that of a number of degrees."""
    if reading.kind != "number" or abs(reading.parts.value) > 720:
        return reading
    share = reading.parts.value / 180
    return read(rf"\frac{{{share.numerator}\pi}}{{{share.denominator}}}")


def _same_number(answer, gold):
    a, b = answer.value, gold.value
    if answer.places == gold.places:
        return a == b
    places = [n.places for n in (answer, gold) if n.places is not None]
    # A decimal may be a rounding of the other number: less than one unit of its last place away, and at most
    # one part in a million.
    difference = abs(a - b)
    return difference * 10 ** min(places) < 1 and difference * 10**6 <= max(abs(a), abs(b))


def _same_tuple(answer, gold, prove):
    """Returns whether two tuples have the same form and the same parts in the same order."""
    (kind, a), (needed, b) = answer, gold
    # A tuple of kind "=", such as x=1, y=2, may equal a tuple (1,2) or a list 1,2.
    system = "=" in (kind, needed) and {kind, needed} < {"=", "()", ","}
    if len(a) != len(b) or kind != needed and not system:
        return False
    return all(map(_same, a, b, repeat(prove)))


def _unordered(answer, gold, prove, same=_same):
    """Returns whether the lists `answer` and `gold` have the same parts in any order. If one list has a
    single part, every part of the other list must equal this part: `1, 1` equals `1`."""
    if len(answer) != len(gold):
        alone = min(len(answer), len(gold)) == 1
        return alone and all(same(a, b, prove) for a in answer for b in gold)
    left = list(answer)
    for b in gold:
        for a in left:
            if same(a, b, prove):
                left.remove(a)
                break
        else:
            return False
    return True


# Kinds of which one of the two Readings suffices; the first that is there decides
COMPARE = {
    "chain": _same_chain,
    "named": _same_named,
    "quantity": _same_quantity,
    "intervals": _same_intervals,
    "list": _same_list,
}


# --- math-verify


@lru_cache(4096)
def _parse(text):
    """Parses `text` with math-verify's parser. Returns a sympy object, or None if the parser can't read the
    whole text."""
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from sympy import Float, I, Rational, evaluate, sympify

    if MISREAD.search(text):
        return None
    for pattern, new in PARSED.items():
        text = re.sub(pattern, new, text)
    # math_verify.parse would read only a part of some texts, such as the \frac34 of 5@\frac34. latex2sympy
    # refuses such texts.
    with suppress(Exception), evaluate(False):
        found = latex2sympy(
            text,
            is_real=True,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        # The parser reads i as a variable, but i is the imaginary unit. Decimals become exact fractions.
        new = {f: Rational(str(f)) for f in found.atoms(Float)}
        names = {s.name: s for s in found.free_symbols}
        if "i" in names and "j" not in names:  # if j is there too, i and j are unit vectors
            new[names["i"]] = I
        return sympify(found.xreplace(new))
    return None


def math_equal(answer: str, gold: str, tolerance: float | None = None) -> bool:
    r"""Returns whether two normalised expressions are equal. Two equations are equal if one is the other
    times a number. Returns False if `answer` can't be parsed, if the values are too large to compute, or
    (without `tolerance`) if `answer` has a calculation that `gold` lacks. Raises ValueError if `gold` can't
    be parsed. math-verify may raise further errors.

    tolerance: largest relative difference of two numbers, if `gold` has a decimal point or `answer` is a
        decimal. None means 1e-6. If `gold` is an integer, no difference is allowed. For an answer such as
        1.83\pi, the limit is 1e-12 unless `gold` has a decimal point."""
    from math_verify import verify
    from sympy import Eq, cancel, ceiling, floor, nan, numer, together

    if r"\ln" in answer + gold:  # beside \ln, \log is the natural logarithm, too
        answer, gold = (re.sub(r"\\log(?!_)", r"\\ln", text) for text in (answer, gold))
    right, left = _parse(gold), _parse(answer)
    if right is None:
        raise ValueError(f"the gold answer {gold[:80]!r} cannot be parsed")
    try:
        allowed = set(_calculations(gold))
        if "power" in allowed:
            allowed.add("product")
        if "^" in gold and "=" in gold:
            allowed.add("power")
        if left is None or tolerance is None and not _calculations(answer) <= allowed:
            return False
        numbers = [side.doit() for side in (left, right) if side.is_number]
        # `verify` may call 2*\infty equal to any number.
        if any(number is nan or number.is_infinite for number in numbers):
            return left == right
        if len(numbers) == 2 and r"\infty" not in answer + gold:
            decimal = "." in gold or "." in answer and _number(answer)
            limit = 1e-12 if "." in answer else 1e-300
            return _same_value(*numbers, (tolerance or 1e-6) if decimal else limit, decimal)
        if isinstance(left, Eq) and isinstance(right, Eq):
            a, b = (numer(together(e.lhs - e.rhs)) for e in (left, right))
            factor = cancel(a / b)  # 0 or nan if `answer` is an identity
            return bool(factor.is_number and factor.is_finite and factor != 0)
        letters = left.free_symbols | right.free_symbols
        names = {letter.name for letter in letters}
        if right.has(floor, ceiling) and len(names) == 1 and names < set("nmkN"):
            return _is_zero(left - right, *letters)
        if right.is_Symbol:  # verify ignores case: A_n would equal a_n
            return left == right
        # Antiderivatives may differ by a number. But x+2+C does not equal x+C.
        if answer.endswith("+C") and gold.endswith("+C") and len(names) == 2:
            if (left - right).is_number:
                return left - right == 0
            x = next(letter for letter in letters if letter.name != "C")
            left, right = left.diff(x), right.diff(x)
        left, right = _with_positive_letters(left, right)
        return verify(right, left, timeout_seconds=None, raise_on_error=True)
    # too large to compute, or not a number (TypeError): counts as wrong
    except (RecursionError, MemoryError, OverflowError, TypeError):
        return False


def _with_positive_letters(*sides):
    r"""Returns the two sides. If both have roots, their letters become positive: \sqrt{\frac ab} equals
    \frac{\sqrt a}{\sqrt b}. But \sqrt{x^2} does not equal x."""
    from sympy import Abs, Dummy, Pow

    for side in sides:
        roots = [power for power in side.atoms(Pow) if not power.exp.is_integer]
        if not roots or side.has(Abs):
            return sides
    letters = set().union(*(side.free_symbols for side in sides))
    positive = {letter: Dummy(letter.name, positive=True) for letter in letters}
    return [side.xreplace(positive) for side in sides]


def _same_value(a, b, limit, decimal):
    """Returns whether the relative difference of two numbers of sympy is at most `limit`. Fractions must be
    equal, unless `decimal` is true and b is no integer."""
    if a.is_Rational and b.is_Rational and (b.is_integer or not decimal):
        return a == b
    # maxn: largest number of digits to which sympy computes if a and b are nearly equal
    return bool(abs((a - b).evalf(maxn=500)) <= limit * abs(b.evalf()))


def _is_zero(difference, n):
    """Returns whether an expression is 0 for the integers n = 1 to 60 and three larger ones."""
    from sympy import Pow

    if any(power.exp.free_symbols for power in difference.atoms(Pow)):
        return False  # 2^{2^n} would be too large
    places = [*range(1, 61), 1001, 10007, 1000003]
    return all(difference.subs(n, place).doit() == 0 for place in places)


@lru_cache(4096)
def _calculations(text):
    """Returns the set of calculations that the text leaves undone: some of "sum", "product" and "power"."""
    from sympy import Add, Expr, flatten

    # The parser computes these calculations, so the tree lacks them. `_number` reads a plain fraction.
    found = {"product" for match in RATIO.finditer(text) if not _number(match[0])}
    for node in _parse(text).find(Expr):
        if node.is_Add:
            # The value of an undone sum has fewer terms than its summands together: 2x+3x, 5x-(2x-1).
            terms = [Add.make_args(summand.doit()) for summand in flatten([node], cls=Add)]
            if len(Add.make_args(node.doit())) < sum(map(len, terms)):
                found.add("sum")
        elif node.args:
            if _has_power(node):
                found.add("power")
            if _has_product(node):
                found.add("product")
    return found


def _factors(node):
    """Returns the factors of a node's numerator and of its denominator: two lists."""
    from sympy import Mul, flatten, fraction

    return [flatten([side], cls=Mul) for side in fraction(node, exact=True)]


def _has_power(node):
    r"""Returns whether a node is a power to multiply out, such as 2^3, (2x)^3, (1+\sqrt2)^3 or (x^2)^3, or
    another calculation of a number, such as 5! or |1-\sqrt2|."""
    from sympy import Abs, I

    base, exponent = node.as_base_exp()
    if node.is_Mul or exponent == -1:
        return False
    if exponent.is_integer and exponent != 1:
        for factor in sum(_factors(base), []):
            if factor.is_number and factor.args:
                return True
            if abs(factor) != 1 and (factor**exponent).as_base_exp()[1] != exponent:
                return True
    value = node.doit()
    return value.is_rational or value.is_number and (node.has(I) or isinstance(node, Abs))


def _has_product(node):
    r"""Returns whether a node is an unfinished product: numerator or denominator has two numbers
    (2\cdot3x), or they give an integer (4\pi/2), or a base comes twice (x^2/x), or i divides (1/i) or is in
    two factors."""
    from sympy import I

    above, below = _factors(node)
    imaginary = sum(f.has(I) for f in above) > 1 or any(f.has(I) for f in below)
    top, bottom = ([f for f in side if f.is_rational and abs(f) != 1] for side in (above, below))
    several = len(top) > 1 or len(bottom) > 1
    cancels = bool(top and bottom) and (top[0] / bottom[0]).is_integer
    divides = any(not f.is_rational for f in below)
    powers = [f.as_base_exp() for f in above + below if not f.is_rational]
    bases = [base for base, exponent in powers if exponent != 1 or divides]
    return imaginary or several or cancels or len({*bases}) < len(bases)
