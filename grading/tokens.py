r"""Splits an answer into tokens, in one pass: `5~\text{ meters}` becomes `5 "meters`."""

import re
import unicodedata


def table(*rows):
    """Returns a dict. A row has pairs: a text, and what replaces it. {"a": "b"} for `a b`"""
    words = iter(" ".join(rows).split())
    return dict(zip(words, words, strict=True))


# Unicode characters, and what they become. Unicode's normal form NFKC replaces others, such as full-width
# digits.
RUNS = {"[⁰¹²³⁴-⁹⁺⁻ⁿ]+": r"^{\g<0>}", "[₀-₉ₙ]+": r"_{\g<0>}"}  # x¹², a₁₂
TEMPLATES = {  # {} is the sign itself
    "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞": " {}",
    "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰⑱⑲⑳": r"\textcircled{{{}}}",
    "ℝℤℕℚℂ": r"\mathbb{{{}}}",
    "“”\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufe0f\ufeff": "",  # invisible
}
STYLED = {}
for _signs, _template in TEMPLATES.items():
    STYLED |= {ord(sign): _template.format(sign) for sign in _signs}
CHARACTERS = table(
    "− - – - ‐ - — - × * · * ⋅ * ÷ / ⁄ / ’ ' ′ ' ″ '' ⟨ ( ⟩ ) 、 , 。 .",
    r"∪ \cup ∩ \cap ∶ : ∠ \angle △ \triangle ⌊ \lfloor ⌋ \rfloor",
    r"∞ \infty ± \pm ≤ \le ≥ \ge ⩽ \le ⩾ \ge ≠ \ne ∈ \in ∅ \emptyset ° ^\circ",
    r"π \pi θ \theta α \alpha β \beta γ \gamma δ \delta λ \lambda μ \mu ρ \rho",
    r"σ \sigma φ \phi ω \omega Δ \Delta",
    r"€ \text{euros} £ \text{pounds} ¢ \text{cents} ₹ \text{Rs} ¥ \text{yuan}",
)
# A command gets a space. Without it, \le and x would make \lex.
CHARACTERS = {sign: new + " " * new[-1].isalpha() for sign, new in CHARACTERS.items()}
CHARACTERS = str.maketrans(CHARACTERS | {'"': "", "\0": "", "~": " "})


def any_of(words):
    """Returns a pattern that matches each of the words: (?:cm|km) for `cm km`"""
    return f"(?:{'|'.join(words.split())})"


def plain(text):
    """Returns `text` with Unicode characters replaced by ASCII and LaTeX: `x²` by `x^{2}`."""
    if not text.isascii():
        for pattern, new in RUNS.items():
            text = re.sub(pattern, new, text)
        text = unicodedata.normalize("NFKC", text.translate(STYLED))
        text = re.sub(r"[^\D0-9]", lambda digit: str(int(digit[0])), text)  # ٣ is 3
    return text.translate(CHARACTERS)


class Unreadable(Exception):
    """Raised if a text is no formula, such as `3+)`."""


# Commands and words that are left out. What stands in braces after a command stays.
STYLES = (
    r"\displaystyle \textstyle \boldsymbol \bm \mathit \mathbf \mathcal \rm \bf "
    r"\it \limits \hat \vec \angle \overrightarrow \operatorname \checkmark "
    r"\large \Large \underline \therefore \huge \hfill \blacksquare \boxed \fbox "
    r"\( \) \[ \] $ ` \ \quad \qquad \mathrm \mathsf \text option choice such "
    r"therefore thus hence 共 共有 故选 选 选项 选择 答案 答案是 答案为 因此 所以 ответ \!"
)
# A word, a sign or a command, and its common spelling
SPELLINGS = dict.fromkeys(STYLES.split(), "") | table(
    r"\lor ; \vee ; \land , \wedge , \lvert | \rvert | \vert | \mid | \| | \lt < "
    r"\gt > \lbrace \{ \rbrace \} \langle ( \rangle ) \colon : := = \div / "
    r"\times * \cdot * ** ^ \% % \dfrac \frac \tfrac \frac \cfrac \frac "
    r"\nicefrac \frac \sfrac \frac =< \le => \ge \leq \le \leqslant \le <= \le "
    r">= \ge \geq \ge \geqslant \ge != \ne <> \ne \neq \ne \backslash \setminus "
    r"\bigcup \cup \varphi \phi \varepsilon \epsilon \mod \pmod \bmod \pmod "
    r"mod \pmod \dots \ldots \cdots \ldots ... \ldots \simeq \approx "
    r"\doteq \approx approximately \approx approx \approx \surd √ \imath i "
    r"\jmath j cosec \csc oo \infty inf \infty infinity \infty infty \infty ou ; "
    "oder ; und , or ; 或 ; или ; and , 和 , 且 , и , percent % percents % "
    r"процент % процента % процентов % tg \tan ctg \cot arctg \arctan \tg \tan "
    r"\ctg \cot arcsin \arcsin arccos \arccos arctan \arctan sin \sin cos \cos "
    r"tan \tan cot \cot csc \csc cis \cis ln \ln log \log exp \exp sqrt √ pi \pi "
    r"minus - theta \theta gcd \gcd lcm \lcm \widehat \overarc \wideparen \overarc "
    r"\varnothing \emptyset \bar \overline \tbinom \binom \dbinom \binom "
    r'\forall "for \Omega "ohm \pounds "pounds \Pr P \dim "dim \nabla "grad '
    '{:} : {=} = {+} + {-} - not "not DNE "not~exist dne "not~exist degree ° '
    r'degrees ° deg ° \textcircled , \top T \degree ° градусов ° \$ "dollar'
)
SPELLINGS |= {
    "thousand": "* 10 ^ 3",
    "million": "* 10 ^ 6",
    "billion": "* 10 ^ 9",
    r"\lg": r"\log _10",
}
GAP = r"(?:\\[,;:! ]|\s)"  # a space, \,

# A number has a whole part, a point, decimals, digits that repeat, and an exponent.
# `1,234` is one number, but not beside a bracket or another comma: (1,234) is a tuple.
WHOLE = (
    r"(?P<whole>(?<![\d.,(\[])(?<!\\\{)(?!0)\d{1,3}"
    rf"(?:(?:,(?:\\!\s*)?|\{{,\}}|{GAP}+)\d{{3}})+(?![\d/,)\]]|\s*\\\}})|\d+)?"
)
# 0.5, 2{,}5, 0{,}125, and 2,5 before a word that is not English: 2,5 км
POINT = (
    r"(?:\.(?!\.)|\{,\}(?=\d\d?(?!\d))|(?<=\b0)\{,\}(?=\d)"
    r"|,(?=\d+\s*(?:\\text\{\s*)?[^\W\d\0-ɏ]))"
)
DECIMALS = rf"(?P<decimals>\d{{3}}(?:{GAP}\d{{3}})*{GAP}\d{{1,3}}(?!\d)|\d*)"  # 5, 141 592
# 0.\overline{3}, 0.\dot12\dot3, 0.1(6), 0.333\ldots
REPEAT = (
    r"(?P<repeat>\\(?:overline|bar|dot)\s*\{?\d+\}?(?:\d*\\dot\s*\{?\d+\}?)?"
    r"|(?<=[.\d])\(\d+\)(?=\W*$)|(?<=\d\d\d)\s*(?:\\l?c?dots|\.\.\.))?"
)
EXPONENT = r"(?P<exponent>[eE][+-]?\d{1,3}(?![a-z\d]))?"  # e-3
# The kinds of tokens. The first that matches decides.
PATTERNS = {
    # a space, the last point, \color{red}, \left, \Big
    "gap": (
        rf"{GAP}+|\.(?=[\s}}$]*$)|\\(?:text)?color\s*\{{\w+\}}"
        r"|\\(?:left|right|middle|[bB]igg?[lrm]?)\b\.?"
    ),
    "row": r"\\\\(?:\s*\[[\d.]+\s*\w+\])?",  # \\, \\[2pt]
    "set": r"\\(?:mathbb|Bbb)\s*\{?\s*(?P<letter>[A-Z])\}?",  # \mathbb{Z}
    # \text{ but not \mathrm{e}, which is the number e
    "text": (
        r"\\(?:text(?!c)\w*|mbox|math(?:rm|sf|it|op|ord)|operatorname)"
        r"\s*\{(?!\s*[eid]\s*\})"
    ),
    # \begin{cases}, \end{array}
    "environment": r"\\(?P<edge>begin|end)\s*\{(?P<name>\w+)\*?\}(?:\{[lcr|]*\}|\[\w\])?",
    "degree": r"\^\s*(?:\{\s*(?:\\circ|o)\s*\}|(?:\\circ|o)(?![a-z]))",  # ^\circ, ^{\circ}, ^o
    "prime": r"\^\s*(?:\{\s*(?:\\prime\s*|')+\}|\\prime)|'",  # ', ^\prime
    "index": r"_\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\w|\\\w+(?:\s*\{\w+\})?)",  # _1, _{k=1}
    # 3/4, but not of x^3/4 or 3/4x
    "fraction": r"(?<![\w.^_)}/√])\d{1,40}/\d{1,40}(?![\w/^!({]|\\(?!%)|\.\d)",
    # 1.5, .5, 3rd
    "number": (
        r"(?=\d|(?<![A-Z])\.\d|\.\\[obd])"
        rf"{WHOLE}(?:{POINT}{DECIMALS})?{REPEAT}{EXPONENT}(?:(?:st|nd|rd|th)\b)?"
    ),
    "letters": r"[A-Za-z]{3,}'[st]\b|[A-Za-zÀ-ɏ]+|[^\W\d_A-Za-zÀ-ɏ]+",  # Bob's, xy, 米
    # \pi, \{, <=, or any other character
    "sign": (
        r"\\[A-Za-z]+|\\.|<[=>]|>=|=[<>]|(?<![\d)])!=(?!=)|\*\*|\.\.\.|:=|!!"
        r"|\{[:=+-]\}|."
    ),
}
_groups = [f"(?P<{kind}>{pattern})" for kind, pattern in PATTERNS.items()]
TOKEN = re.compile("|".join(_groups), re.DOTALL)


def tokens_of(text):
    r"""Returns the tokens of a text, joined by spaces: 5 "cm for `5~\text{ cm}`. Words begin with a quote,
    and words that follow each other are one token: "the~area"""
    tokens = [""]
    # For each open brace: True for the brace of a \text, None for a brace inside of one, else False
    braces = [False]
    for match in TOKEN.finditer(text):
        kind = match.lastgroup
        found = match[0]
        if kind == "text":
            braces.append(True)
        elif kind == "letters":
            tokens += _letters(match, tokens, braces[-1])
        elif found == "}" and len(braces) > 1 and braces.pop():
            continue
        elif token := _token(kind, found, match):
            tokens.append(token)
        if found == "{":
            braces.append(None if braces[-1] else False)
    return " ".join(tokens[1:])


def _token(kind, found, match):
    r"""Returns the token of a match of TOKEN: begin:cases for `\begin{cases}`; "" for a gap."""
    match kind:
        case "number":
            return _plain_number(match)
        case "set":
            return r"\mathbb" * (match["letter"] in "CNQRZ") + match["letter"]
        case "row":
            return "&&"
        case "degree":
            return "°"
        case "prime":
            return " ".join("'" * (found.count("'") + found.count("prime")))  # \prime\prime
        case "index":
            return "_" + re.sub(r"\\text|[{}\s]", "", found[1:])
        case "environment":
            return f"{match['edge']}:{match['name']}"
        case "sign" | "fraction":
            return SPELLINGS.get(found, found)
    return ""


def _plain_number(match):
    """Returns a number as digits: 1234.5, 0.1(6), 2.5e3"""
    whole, decimals, repeat = (
        re.sub(r"\D", "", match[part] or "") for part in ("whole", "decimals", "repeat")
    )
    if match["repeat"] and not repeat:  # 0.333\ldots, 0.1212\ldots
        found = re.fullmatch(r"(\d*?)(?:(\d)\2{2,}|(\d{2,9}?)\3+)", decimals)
        if not found:
            return f"{whole or 0}.{decimals}".rstrip(".") + r" \ldots"
        decimals = found[1]
        repeat = found[2] or found[3]
    number = f"{whole or 0}.{decimals}"
    if repeat:
        number += f"({repeat})"
    return number.rstrip(".") + (match["exponent"] or "")


def _letters(match, tokens, in_text):
    """Returns the tokens of letters: a word, or variables. `xy` is the product of x and y."""
    run = match[0]
    word = run.lower()
    if word in SPELLINGS and (len(word) > 1 or not word.isascii()):
        return SPELLINGS[word].split()
    if not _is_word(match, tokens, in_text):
        return [run] if run.isupper() else [*run]
    if tokens[-1].startswith('"'):
        return [f"{tokens.pop()}~{run}"]
    return [f'"{run}']


def _is_word(match, tokens, in_text):
    """Returns whether letters are a word or a unit, not variables: the, or m in `5 m`, but not xy."""
    run = match[0]
    before = match.string[match.start() - 1 : match.start()]
    after = match.string[match.end() : match.end() + 9]
    if not run.isascii():
        return True
    has_noun = re.match(r" (?!and|or|for|where|with|sqrt)[a-z]{3}", after)  # a circle
    if run in ("a", "A") and has_noun:
        return True
    is_name = unit_of(run) or before == " " and MANY.fullmatch(run.lower())
    is_unit = is_name and _takes_unit(tokens)  # 5m, 5 kJ
    if (in_text or run[1:] == "m") and tokens[-1] == r"\pi":  # 3\pi\text{ m}, 3\pi cm
        is_unit = unit_of(run)
    if in_text is not False:
        return is_unit or len(run) > 1
    is_apart = before == "/" or before.isspace() and not any(map(str.isalpha, tokens))
    if is_unit and (len(run) > 1 or is_apart):  # not 5 m+1, 5 m n
        is_factor = re.match(r"\s?\\[a-z]|[_^]?[-+(]| [a-z]\b", after)
        return not is_factor and run not in "njvwGMSH"
    if re.match(r"[\w^})\\{=]", before) or re.match(r"[\^_+=/-]", after):  # 2abc, abc+1
        return False
    is_product = re.search("[a-z][A-Z]|^[A-Z]{2,4}$", run)  # aB, ABC
    is_short = run.lower() in SHORT and before not in [*"-+*"]  # not e^{-at}
    return len(run) > 2 and not is_product or is_short


def _takes_unit(tokens):
    """Returns whether a unit may follow: 5, 5 square, 5 km /"""
    last = tokens[-1]
    if re.fullmatch(r'[\d.e()-]+|[})%°]|".*\b(square|sq|cubic)', last.replace("~", " ")):
        return True
    if last in ("*", "/"):
        last = tokens[-2]
    word = last.partition('"')[2]
    return unit_of(word) or MANY.fullmatch(word)


# A unit's first name, and other names of the same unit. English plurals need no entry. After a number, a
# short name such as mm is the unit, not the product of two variables.
UNIT_NAMES = (
    "mm millimeter millimetre мм 毫米 ; cm centimeter centimetre см 厘米 ; "
    "dm decimeter дм 分米 ; m meter metre м 米 ; km kilometer kilometre км 千米 公里 ; "
    "in inch inche ; ohm Ω ω ; ft foot feet ; yd yard ; mi mile ; "
    "mg milligram ; g gram г 克 ; lb pound ; kg kilogram кг 千克 公斤 ; oz ounce ; "
    "ton tonne т 吨 ; ms millisecond ; s sec second с 秒 секунд секунды ; "
    "min minute 分钟 минут минуты минута ; h hr hour ч 小时 час часа часов ; "
    "day 天 день дня дней ; week ; month 月 ; yr year 年 岁 год года лет ; "
    "l liter litre л 升 ; gal gallon ; mph ; hz hertz ; "
    "ml milliliter millilitre мл 毫升 ; degree deg 度 градусов градуса ; "
    "radian rad ; dollar usd 美元 доллар доллара долларов ; cent ; yuan 元 ; "
    "yen 円 日元 ; euro 欧元 евро ; rs rupee ; rouble ruble руб рубль рубля рублей ; "
    "шт штук штуки ; degc celsius ; degf fahrenheit ; n newton ; j joule ; "
    "w watt ; v volt ; per / ; pa pascal ; am ; pm ; unit ; 个 ; 人 ; 种 ; 本 ; 张 ; "
    "只 ; 支 ; 条 ; 块 ; 件 ; 辆 ; 棵 ; 页 ; 名 ; furlong ; fathom ; zentner"
)
ALIASES = {}
for _names in map(str.split, UNIT_NAMES.split(";")):
    ALIASES |= dict.fromkeys(_names, _names[0])
PLURAL = re.compile(r"(?<=[a-z]{2})s\b")  # meters, but not ms

# Words after a number are its unit: `5 meters`. But these words change the number's value or meaning:
# `10 dozen` does not equal 10. They are patterns. A plural needs no entry.
AMOUNTS = (
    r"half halve third quarter couple score dozen docena douzaine dutzend gross "
    r"lakh crore hundred thousand myriad \w*illion googol two three four five six "
    r"seven eight nine ten eleven twelve milliard \w*teen twenty thirty forty fifty sixty "
    r"\w*ward \w*(?:(?<!mo)n|d|i[efx]|lf|gh|ur)th times squared binary base basis "
    r"point "
)
CLAIMS = (
    r"_\w* not no or on if is are was be it at by more less fewer than over under "
    r"above below about least most between plus minus from greater except maybe "
    r"perhaps otherwise modulo negative short remainder even odd divisible "
    r"multiple "
)
# half, 3 dozens, MW, G
NO_UNIT = re.compile(rf"(?i)\b{any_of(AMOUNTS + CLAIMS)}s?\b|\b(?-i:[MG])(?-i:[WVJNg]|Hz|Pa)?\b")
# Short words that are no product of variables
SHORT = "rs sq is on or if are was be it at by no of an to as".split()
# A word looks like a unit if it is in ALIASES or matches MANY. So if the gold answer is 5, `5 cm` and
# `5 pizzas` are right. After a number from -1 to 1, the noun may be singular: `1 pizza`.
MANY = any_of(
    "[a-z]{2,}s people children w?o?men sheep fish mice left total altogether "
    "remaining kj kw kwh kpa khz ev nm mole? atm bar kelvin k?cal erg db ppm rpm au"
)
MANY = re.compile(MANY)


def unit_of(word):
    """Returns the first name of a word's unit: m for meters; None for another word."""
    return ALIASES.get(PLURAL.sub("", word.lower()))
