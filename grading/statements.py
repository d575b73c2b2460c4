r"""Reads an answer: removes what stands around a formula, such as `the answer is` and `k\in\mathbb{Z}`, and
parses the formula.

The patterns of this file read tokens, joined by spaces. `read`, at the end, goes through these steps:

    The answer is $2k\pi$ $k\in\mathbb{Z}$
    "The~answer~is 2 k \pi k \in \mathbbZ         the tokens
    "The~answer~is 2 k \pi , k \in \mathbbZ       after TIDY: a comma before the condition
    2 k \pi , k \in \mathbbZ                      without the introduction
    2 k \pi                                       without the condition
    ("*", ...)                                    the tree
"""

import re
import unicodedata
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from grading.tokens import any_of, plain, tokens_of, unit_of
from grading.trees import list_node, meaning_of, number_node, parse_tokens


class Reading(NamedTuple):
    r"""The tree of an answer; the tokens of the conditions after it, such as `, k \in \mathbbZ`; the formula
    as a text, such as 2k\pi"""

    tree: tuple
    conditions: str = ""
    text: str = ""


def _replaced(table, text):
    """Returns a text with each pattern of a table replaced: `5 pm` for `5 p.m.`"""
    for pattern, new in table:
        if pattern.search(text):  # faster than `sub`, and most patterns match nothing
            text = pattern.sub(new, text)
    return text


def _vulgar(match):
    r"""Returns the match of a fraction sign as LaTeX: \frac{1}{2} for ½. So ½x is half of x."""
    top, bottom = unicodedata.normalize("NFKC", match[0]).split("⁄")
    return rf" \frac{{{top}}}{{{bottom}}}"


# Patterns of an answer's text, and what replaces them
ABBREVIATIONS = {
    r"(?i)\b([ap])\. ?m\b\.?": r"\1m",  # 5 p.m.
    r"\bsq\.": "sq",  # 5 sq. ft
    r"\bper cent\b": "percent",  # 5 per cent
    r"\bas well as\b": "and",  # 2 as well as 3
}
ABBREVIATIONS = [(re.compile(pattern), new) for pattern, new in ABBREVIATIONS.items()]

NAME = any_of(r"[a-zA-CK] \\alpha \\beta \\lambda \\mu \\theta")  # of a parameter

# Patterns of tokens, and what replaces them
MONEY = any_of("dollars? usd euros? pounds? cents? yuan rs")
EVERY = any_of("all any every")
ALL_REALS = rf'"(?i:{EVERY})~(?i:the~)?real(?:(?:s|~numbers?)(?: [a-z]$)?| [a-z]$)'
EXCEPT = any_of("except other~than excluding")
UNSURE = any_of("but only if no yes unless sometimes or")
TIDY = {
    r"^\{ ([^{}]*)$": r"\1",  # \boxed{5
    r"(?<!\S)([fgP]) \\equiv ": r"\1 ( x ) = ",  # f\equiv0
    r"\( (\\pmod [^()]+) \)": r"\1",  # (\bmod 7)
    # parts of an answer: (1) 5; (2) 7
    r"^(?!(?:\( \d \)[ ,]*)+$)(?:\( )?[1Ii] \) (.{1,300}?)[ ;,.&]* (?:\( )?"
    r'"?(?:2|II|i i|ii) \)(?= [^)+*/^])': r"\1 ;",
    r'^(?:\( )?"?a \) (.{1,300}?)[ ;,.&]* (?:\( )?"?b \)': r"a = \1 ; b =",
    # numbers and units
    r'(?<=[\d)}]) "to (?=[\d\\(])': " : ",  # 3 to 4
    r" [+-] 0 i$|^0 (?:\+ |(?=- ))(?=\S* ?\S* ?i$)": "",  # 5+0i, 0-2i
    r'(?<=\d) (?:\^ )?\{? ?"?(?:s ?t|n ?d|r ?d|t ?h)(?: \})?$': "",  # 3^{rd}
    r'^(\d+) "?[Rr](?:emainder)? (\d+)$': r'\1 "remainder~\2',  # 5 R 2
    r'° "?([CF])(?:elsius|ahrenheit)?(?= |$)': r'"deg\1',  # 5°C
    rf'(?<![\d}}] )"(?i:({MONEY}))(?: \.)? (- )?([\d.]+)': r'\2\3 "\1',  # $5
    r'(?<=\d) \\frac \{ "?(m|km|cm) \} \{ "?(s|h|min) \}$': r' "\1 / "\2',  # 5\frac{m}{s}
    r'("\w+) , (?=\d+ "minutes?$)': r"\1 ",  # 2 hours and 30 minutes
    # intervals and sets
    r'(?<=[)\]]) "?U (?=[(\[])': r" \\cup ",  # (0,1)U(2,3)
    r"(^|\\(?:cup|in) )\] ": r"\1( ",  # ]0,1[
    r" \[(?= \\cup|$)": " )",  # [0,1[
    rf'(?<!\S)([^\s"]*[\w)}}]) (?={NAME} \\in )': r"\1 , ",  # 2k\pi\quad k\in\mathbb{Z}
    rf"(?<=\S )({NAME}) = ([01]) , (?:\d+ , )*\\ldots$": r"\1 \\ge \2",  # n=0,1,2,\ldots
    r"\\mathbbR - (?=\\\{)": r"\\mathbbR \\setminus ",  # \mathbb{R}-\{0\}
    rf"{ALL_REALS}~{EXCEPT}(?:~for)? (.*)$": r"\\mathbbR \\setminus \\{ \1 \\}",  # all reals except 0
    rf"{ALL_REALS}(?= |$)": r"\\mathbbR",  # all real numbers
    r'^"(?:all~)?permutations~of (.*)$': r'\1 , "permutations',  # permutations of (1,2,3)
    # \mathbb{R}^+, all positive reals
    r"^\\mathbbR (\^ (\{ )?\+( \})?|_>0)$": r"( 0 , \\infty )",
    r'^"(?i:all~)?positive~real(s|~numbers?)$': r"( 0 , \\infty )",
    # names and functions
    r"^(?:\\frac \{ )?d ([a-z]) (?:\} \{|/) d [a-z] (?:\} )?(?==)": r"\1 ' ",  # dy/dx=2x
    r"^(?=.*\b[tux]\b)(?!.* c )(.*) \+ [cK]$": r"\1 + C",  # x^2+c
    r"(?<=P \( )(\S+) \| (?=\S+ \))": r"\1 , ",  # P(A|B)
    r'["\\]m(ax|in) \\\{ (.*?) \\\}': r"\\m\1 ( \2 )",  # \max\{1,2\}
    r"\| ([A-Z]{2}) \|(?= (?:_\S+ )?=)": r"\1",  # |AB|=5
    r"\\overset \{ \\frown \}": r"\\overarc",  # \overset{\frown}{AB}
    r"^(\d+) \| ([a-z])$": r'"\2~divisible~by~\1',  # 3|n
    r"^(\d+) \\nmid ([a-z])$": r'"\2~not~divisible~by~\1',  # 3\nmid n
    r"([fg]) \^ \{ - 1 \} (?=\()": r"\1 _-1 ",  # the name f^{-1}(x)
    r'"(?i:rank|card|tr|var|dim|grad|re|im)(?= )': r"\\det",  # rank A, a name like \det A
    r"(?<!\S)([A-TV-Z](?: _\w| ')?) (?=\( [^()]*, [^()]*\)(?: [,;]|$))": r"\1 = ",  # the point A(1,2)
    # the maximum is 5
    r'"(?i:(?:the~)?(max|min)(?:imum)?(?:~value)?(?:~is)?) (?:[=:] )?(?=[-\d√\\])': r'"\1 = ',
    r"\\(max|min|gcd|lcm) =": r'"\1 =',  # \max=5
    # rows of cases and systems
    r'(?<=&) "(?:if|for|when)(?= )': "",  # x^2 & if x>0
    r' "for~all [a-z](?= (?:[,;] )+[fgP])': "",  # f(x)=x for all x, and f(x)=0
    # \{\begin{array}{l} x=1 \\ y=2 \end{array}
    r"\\\{ begin:(array|matrix|aligned|cases) (.*) end:\1(?: \\\})?": r"begin:cases \2 end:cases",
    r" & (?=[=<>]|\\[lg]e )|(?<= =|&&|ed) & ": " ",  # x &= 1
    # words around an answer
    r'(?i)^"(?:the~)?(?:(?:correct|final)~)*answer~is~(?!not?\b)': '"',  # the answer is yes
    r'^"(?i:either|both) (?=.*[,;])': "",  # either 5 or 7
    r'^"(?i:the~)?(?:set|line|curve|equation) (?=\\\{|.*=)': "",  # the line y=x
    rf'^"(?i:(yes|да)) [,.] "(?!.*(?i:\b{UNSURE}|\bnot|n\Wt|\bfalse)\b).*$': r'"\1',  # Yes, it is
    rf'^"(?i:(no|нет)) [,.] "(?!.*\b(?i:{UNSURE})\b).*$': r'"\1',  # No, it is not
    r'\( "(?:double~root|repeated~root|min\w*|max\w*) \)$': "",  # 5 (double root)
    # 5 is the only solution
    r'(?<=\w) "is~the~(?:(?:only|min\w+|max\w+)~)?(?:answer|solution|value)s?$': "",
    r"[,;(] (\\approx [^()]*?)(?: \))?$": r"\1",  # \sqrt5 (\approx 2.24)
}

TIDY = [(re.compile(pattern), new) for pattern, new in TIDY.items()]

# An introduction or a name with one of these words does not give the answer: `its opposite is 7`.
CONTRARY = any_of(
    "no not never wrong incorrect false negative minus opposite half twice double "
    "reciprocal inverse more less at.most at.least bound excluded neither nothing "
    "third but except divisible exceeds up outside beyond reflection complement "
)
CONTRARY = re.compile(rf"(?i)\b{CONTRARY}\b|不|не\b")
IS = any_of(r"\bis \bare \bequals \bexactly \bonly \bgets? \bhas \btakes \bequal~to 为 是")
SUBJECT = r'(?:(?:"\S+|[A-Za-z]+(?: [+-] [A-Za-z])*) ){0,5}?'
KINDS = any_of("positive real integers? numbers? with pairs")
INTRODUCTION = (
    r'"\S*answer(?:~is)?(?: :)? (?=.)',  # the answer is: 5
    rf'{SUBJECT}"\S*{IS}(?: :)? (?!")',  # the area of A B C is 5
    r'(?:"\S+ )+: (?!"|.*:)',  # hours: 3
    r'"\S+ (?=\( .+ , .+ \)$)',  # center (1,2)
    # all positive integers n of the form n=2k
    rf'"{EVERY}(?:~{KINDS})*(?: [a-z] "of~the~form)? (?=.* (?:[=<>(]|\\[lgne]))',
)
INTRODUCTION = [re.compile(rf"(?i)^{pattern}") for pattern in INTRODUCTION]


def _without_introduction(tokens):
    """Returns the tokens after an introduction: 5 for `"the~answer~is 5`. A unit goes to the end: `3 "hours`
    for `"hours : 3`."""
    for pattern in INTRODUCTION * 2:  # an introduction may follow another
        found = pattern.search(tokens)
        if found and not CONTRARY.search(found[0]):
            tokens = tokens[found.end() :]
            word = found[0].strip('": ')
            tokens += f' "{word}' if unit_of(word) else ""
    return tokens


# A reason at the end: 5, since x>0; 5, where equality holds for x=1
LEAD = any_of("which~is~ where~ with~ equality~is~")
REASON = any_of(
    "since because equality~(?:holds|occurs|when|if|at|iff|for) attained achieved reached"
)
REASON = rf'(?<=\S) (?:[,;(] )?"{LEAD}*{REASON}\b(?!.*\b(?:answer|but)\b)[^,;]*$'


# --- conditions, such as k\in\mathbb{Z}

SAYS = (
    "for all every each where with if when at a an any some is are the and integer "
    "integers constant constants arbitrary real reals number numbers positive "
    "natural non-negative nonnegative holds "
)
SAYS = set(SAYS.split())
VALUE = rf"(?:{NAME} = )+(?:- )?[\w.]+"  # x = y = 2
CLAUSES = (
    NAME,  # k
    rf"{NAME} \\in (?:\{{ )?(?:\\mathbb)?[A-Z](?: [\^_+*{{}}\d]| _\S+)*",  # k \in \mathbbZ
    rf"{NAME} (?:[<>]|\\[lgn]e) (?:- |\\pm )?\S+",  # k > 0
)


def _is_clause(text, is_said):
    """Returns whether tokens may be a clause of a condition: k > 0, or after words also x = 2."""
    patterns = [*CLAUSES, VALUE] if is_said else CLAUSES
    return any(re.fullmatch(pattern, text) for pattern in patterns)


def _split_condition(text):
    r"""Returns the tokens of a value, and those of a condition after it that says nothing about the value:
    `k \pi` and `, k \in \mathbbZ`. Reads clauses from the end. Between two clauses are commas or words:

        2 k \pi "where k > 0 , k \in \mathbbZ
                       -----   -------------- this clause is read first
    """
    tokens = text.split(" ")
    start = len(tokens)
    end = start - (tokens[-1] == ")")
    is_condition = False
    for at in range(end - 1, 0, -1):
        token = tokens[at]
        is_said = token[0:1] == '"' and SAYS.issuperset(token[1:].split("~"))
        if not is_said and token not in (",", "("):
            continue
        clause = " ".join(tokens[at + 1 : end])
        if clause and not _is_clause(clause, is_said):
            break
        end = at
        is_condition = is_condition or is_said or " " in clause
        if clause and is_condition:
            start = at
        if token == "(":
            break
    value = " ".join(tokens[:start]).removesuffix(" (")
    condition = " ".join(["", *tokens[start:]])
    return (value, condition) if _says_nothing(value, condition) else (text, "")


def _says_nothing(value, condition):
    r"""Returns whether a condition says nothing about the value: k\in\mathbb{Z} for k\pi. But x=2 says that
    x^2 is 4, and x\ne1 is a second bound for x<5."""
    if re.search(r'"(if|for|when) ', value):  # x if x>0, 0 if x<0
        return False
    relation = re.search(r" (=|[<>]|\\[lgn]e) ", condition)  # k > 0
    names = filter(str.isalpha, condition.split())
    if not relation or {*names}.isdisjoint(value.split()):
        return True
    return relation[1] != "=" and not re.search(r" ([<>]|\\([lgn]e|in)) ", value)  # x < 5


def _without_braces(tokens):
    r"""Returns the tokens in the braces of a set with a condition: x=2k, k\in\mathbb{Z} for
    \{x|x=2k, k\in\mathbb{Z}\}, and 2k, k\in\mathbb{Z} for \{2k|k\in\mathbb{Z}\}. Returns other sets
    unchanged."""
    # Groups: what stands before | or :, and what stands after it
    found = re.fullmatch(r"(?:x \\in )?\\\{ ([^|:]*) [|:] ([^|]*) \\\}", tokens)
    if not found or r"\in" in found[1]:
        return tokens
    element, condition = found.groups()
    declared = re.match(rf"({NAME}(?: , {NAME})*) \\in ", condition)
    if declared and declared[1] != element:  # \{2k|k\in\mathbb{Z}\}
        return f"{element} , {condition}"
    are_names = re.fullmatch(r"(\( )?\w+( , \w+)*( \))?", element)  # not \{x^2 \mid x>2\}
    return condition if are_names else tokens


def _stripped(tokens):
    """Returns the tokens without signs and commas at their ends: 5 for `= 5 .`"""
    tokens = re.sub(r"^(?:(?:=|\\approx|\\Rightarrow|\\implies|[:,.]|&&) )+", "", tokens)
    return re.sub(r'(?: (?:[.,;:]|&&|"only)|~only)+$', "", tokens)


def _merged(plus, minus):
    r"""Returns one tree for two, which read \pm as + and as -: the list 1+2, 1-2 for 1\pm2; the set
    \{0,1,-1\} for \{0,\pm1\}."""
    match plus, minus:
        case ("named", name, ("list" | "set", *_) as a), ("named", _, b):
            return "named", name, _merged(a, b)
        case ("set" | "list" as kind, *a), (_, *b):
            return kind, *dict.fromkeys(a + b)
    return list_node([plus, minus])


CHOICE = (
    r'(?:\(|\[(?= [A-H])) "?([A-Za-z]) [)\]](?: (?![-+;^=_/*,!])(.*))?',  # (B) 15
    r'"?([A-Za-z]) (?:[.:]|\)(?= ))(?!.* [A-Ja-j]+\b)(?: (?![-+;^=_/*,!])(.*))?',  # B. 15
)
# Two choices, two answers or a denial: (A) and (B), not (C)
NO_CHOICE = any_of("not wrong incorrect false but except")
NO_CHOICE = re.compile(rf"(?i)\( [A-H] \) .*\( [A-H] \)| ; |\b{NO_CHOICE}\b")
# B, D; \{B, D\}
LETTERS = re.compile(r'(\\\{ )?(?:(?:\( "?[A-H] \)|"?[A-H]+)(?:(?: [,;])+ | |$)){2,}(?(1)\\\})')


def _statement(tokens, choices=CHOICE):
    """Returns the tree of tokens: the letter of a choice, a formula, or else words. It has the kind "choice"
    for `( B ) 15`."""
    if LETTERS.fullmatch(tokens):  # B, D
        return "name", "".join(sorted(re.findall("[A-H]", tokens)))
    if re.fullmatch(r"(?:\( \d \) ?){2,}", tokens):  # (1)(3), the statements that are true
        return list_node([number_node(digit) for digit in re.findall(r"\d", tokens)])
    for pattern in choices:
        found = re.fullmatch(pattern, tokens)
        if found and not NO_CHOICE.search(tokens):
            letter = found[1]
            rest = _stripped(found[2] or "")
            return ("choice", letter, _statement(rest, ())) if rest else ("name", letter)
    plus = tokens.replace(r"\pm ", "+ ").replace(r"\mp ", "- ")
    minus = tokens.replace(r"\pm ", "- ").replace(r"\mp ", "+ ")
    with suppress(Exception):  # whatever an answer is, it raises no error
        tree = parse_tokens(plus)
        return list_node([tree]) if plus == minus else _merged(tree, parse_tokens(minus))
    if '"' in tokens or "|" in tokens:
        return meaning_of(("words", tokens))
    return "unread", tokens


@lru_cache(4096)
def read(text: str) -> Reading:
    """Returns the Reading of a text: the tree of 5 for `The answer is 5.` The tree has the kind "unread" if
    the text is neither a formula nor words."""
    text = text.strip("*` \n")
    if text.count("$") - text.count(r"\$") == 1:  # $5 is money, $5$ is not
        text = text.replace("$", r"\$")
    text = _replaced(ABBREVIATIONS, text)
    text = re.sub(r"[¼½¾⅐-⅞]|(?<![\d√])\d{1,9}⁄\d{1,9}", _vulgar, text)  # ½, 2⁄3
    if len(text) > 2000:  # longer than any answer; so the time is limited
        return Reading(("unread", text))
    tokens = tokens_of(plain(text))
    tokens = _replaced(TIDY, _stripped(tokens))
    tokens = _without_introduction(tokens)
    tokens = re.sub(REASON, "", tokens)
    tokens = _without_braces(tokens)
    tokens, conditions = _split_condition(tokens)
    tokens = _stripped(tokens)
    # 2 k \pi is shown as 2k\pi
    shown = re.sub(r"(?<!\d) | (?!\d)", "", tokens.replace('"', ""))
    return Reading(_statement(tokens), conditions, shown)
