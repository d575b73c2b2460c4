r"""Finds the answer in a response.

    extract(r"so </think> $\boxed{\frac12}$", "boxed")     # \frac12

It runs in the trainer, so no response may slow it down. The time of each pattern is linear in the length of
the text.
"""

import re
from functools import partial

from grading.tokens import plain
from guard.messages import require

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


def _last(pattern, text):
    return ["", *pattern.findall(plain(text))][-1]


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
