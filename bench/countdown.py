"""Reward function for the task `countdown` of bench/tasks.py, whose problems have many right answers.

    torchrun … train.py tiny-grpo --model BASE --data BASE/train.jsonl --reward bench/countdown.py:reaches

The problem `8,3,4,2>22=` means: reach 22 with the numbers 8, 3, 4 and 2. A right answer is `((8-3)*4)+2`.
"""

from __future__ import annotations

import re
from fractions import Fraction


def reaches(response: str, answer: str, kind: str) -> float:
    """Returns 1.0 if the last boxed answer has the value of `answer` and the same four numbers, else 0.0."""
    boxes = re.findall(r"<answer>\\boxed{([^{}]*)}</answer>", response)
    return float(bool(boxes) and read(boxes[-1]) == read(answer))


def read(text: str) -> tuple[list[str], Fraction] | None:
    """Returns the sorted digits and the value of a text such as `((8-3)*4)+2`; None for another form."""
    if not re.fullmatch(r"\(\(\d[-+*/]\d\)[-+*/]\d\)[-+*/]\d", text, re.ASCII):
        return None
    digits, signs = re.findall(r"\d", text), re.findall(r"[-+*/]", text)
    x = Fraction(digits[0])
    for sign, n in zip(signs, map(int, digits[1:]), strict=True):
        # `n or 1` avoids a division by 0. Answers with a 0 are wrong anyway: no problem has a 0.
        x = {"+": x + n, "-": x - n, "*": x * n, "/": x / (n or 1)}[sign]
    return sorted(digits), x
