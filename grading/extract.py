r"""Extracts the answer from a response.

    extract(r"so </think> $\boxed{\frac12}$", "boxed")     # \frac12

This runs in the trainer, so no response may slow it down: the time of each pattern is linear in the text.
"""

import re
import unicodedata

from configs import require

# Unicode characters and what replaces them. Unicode's normal form NFKC replaces others, such as full-width
# digits.
STYLED = [
    ("[⁰¹²³⁴-⁹⁻]+", r"^{\g<0>}"),
    ("[₀-₉]+", r"_{\g<0>}"),
    ("[¼½¾⅐-⅞]", r" \g<0>"),
    ("ℝ", r"\\mathbb{R}"),
]
CHARACTERS = str.maketrans(
    {
        **dict(zip("−–‐—×·⋅÷⁄’~⟨⟩、。", "----***//' (),.", strict=True)),
        **dict(
            zip(
                "π∞±≤≥≠∪∩∈∅θαβ",
                re.findall(
                    r"\S+ ",
                    r"\pi \infty \pm \le \ge \ne \cup \cap \in \emptyset \theta \alpha \beta ",
                ),
                strict=True,
            )
        ),
        **dict.fromkeys(
            '"\0\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff', ""
        ),  # the last 8 are invisible
        "°": r"^\circ ",
        "€": r"\text{euros}",
        "£": r"\text{pounds}",
        "¢": r"\text{cents}",
    }
)
# Group 1 matches \boxed{, and group 2 any other brace. `_boxes` skips all other matches: the printed braces
# \{ and \}, and the line break \\. In \\{, group 2 matches the brace.
BRACE = re.compile(r"\\\\(?!boxed)|\\[{}]|(\\boxed\s*\{)|([{}])")
BARE_BOX = re.compile(r"\\boxed(?:\s+|(?=\d))([^\s{}$\\]*[^\s{}$\\.,;:!?])")  # \boxed 5
# What may stand between two boxes of one answer, such as `and` (see `_boxed`).
# (?>…) and *+ never try a second way to match, so the time is linear.
BETWEEN_BOXES = re.compile(
    r"(?>[\s,;$&]|\\(?:q?quad|lor|vee|cup|[,;:() ])"
    r"|(?:\\text\s*\{\s*)?(?:and|or)\b(?:\s*\})?)*+"
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
        _, opened, inside = block.partition("<answer>")
        if opened and (boxes := _boxes(inside)):
            return inside[slice(*boxes[-1][1:3])].strip() or None
    return None


def _boxes(text):
    r"""Returns the positions of all balanced \boxed{}, sorted: (start of the box, start of its content, end
    of its content, end of the box)."""
    # `stack` has an entry for each open brace: (start of \boxed, start of the content), or None if the brace
    # belongs to no \boxed.
    found, stack = [], []
    for match in BRACE.finditer(text):
        if match[1]:
            stack.append((match.start(), match.end()))
        elif match[2] == "{":
            stack.append(None)
        elif match[2] and stack and (box := stack.pop()):
            found.append((*box, match.start(), match.end()))
    return sorted(found)


def _after_thought(text):
    after = text.rpartition("</think>")[2]
    return "" if "<think>" in after else after


def _boxed(text):
    r"""Returns the content of the last \boxed{} after `</think>`; "" if there is none. Boxes that
    are joined only by words such as "and" become one list: `\boxed{2} and \boxed{5}` gives "2; 5". The list
    is graded as one answer, so a response can't win by offering several."""
    text = BARE_BOX.sub(r"\\boxed{\1}", _after_thought(text).replace(r"\fbox", r"\boxed"))
    parts, start = [], None
    for box in reversed(_boxes(text)):
        gap = text[box[3] : start]
        if parts and (box[3] > start or not BETWEEN_BOXES.fullmatch(gap)):
            break
        parts.insert(0, text[box[1] : box[2]].strip())
        start = box[0]
    return "; ".join(parts)


def _stated(text):
    r"""Returns the rest of the line after the last `answer is` or `answer:`. If the rest of the line has a
    \boxed{}, returns only the content of the box. Returns "" if there is no such line."""
    *before, rest = STATED.split(text)
    line = rest.strip(" *\t").partition("\n")[0].partition("</answer>")[0] if before else ""
    # Responses in Minerva's format end with ". I hope it is correct."
    return _boxed(line) or line.partition(". I hope")[0].strip(" *")


def _answer_tag(text):
    block, closed, _ = _after_thought(text).rpartition("</answer>")
    _, opened, inside = block.rpartition("<answer>")
    return opened and closed and (_boxed(inside) or _stated(inside) or inside)


def _dapo(text):
    lines = [line for line in _after_thought(text).splitlines() if line.strip()]
    return _stated("\n".join(lines[-2:]))


def plain(text):
    """Returns `text` with Unicode characters replaced by ASCII and LaTeX: `x²` by `x^{2}`."""
    for pattern, new in STYLED:
        text = re.sub(pattern, new, text)
    return unicodedata.normalize("NFKC", text).translate(CHARACTERS)


def _last(pattern):
    return lambda text: (pattern.findall(plain(_after_thought(text))) or [""])[-1]


# Name of an extractor -> function that takes a response and returns the answer in it. All extractors except
# orz read only the text after `</think>`.
EXTRACTORS = {
    "orz": extract_answer,  # the last box in the last <answer> block that has a box
    "boxed": _boxed,  # the last \boxed{}, \fbox{} or \boxed 5
    "answer_tag": _answer_tag,  # last <answer> block: its box, else its text after `answer is`, else all
    "gsm8k": _last(GSM8K),  # the last `#### 42`
    "dapo": _dapo,  # `Answer: 42` or `The answer is 42` in the last two lines
    "letter": _last(CHOICE),  # the last letter A to Z that is given as the answer (CHOICE)
    "last_number": _last(LAST_NUMBER),
    "whole": _after_thought,
}


def extract(text: str, extractor: str = "orz") -> str | None:
    """Returns the answer in the response `text`, stripped; None if the extractor finds no answer. Raises
    UserError for an unknown extractor."""
    require(
        extractor in EXTRACTORS,
        f"extractor {extractor!r} is unknown",
        f"one of {', '.join(EXTRACTORS)}",
    )
    return (EXTRACTORS[extractor](text) or "").strip() or None


def readers(text: str) -> list[str]:
    """Returns the names of the extractors that find an answer in a response."""
    return [name for name in EXTRACTORS if extract(text, name)]
