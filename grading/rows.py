r"""Reads problems and gold answers from data files in many formats.

    for number, row in problem_rows("train.jsonl", "math"):
        row.turns, row.answer, row.kind

A file is JSON, JSONL or Parquet, on the disk or on the Hugging Face Hub. Formats of a row:

    plain, TRL            prompt (text or turns); answer, ground_truth or solution
    Open-Reasoner-Zero    [{from, value}, {from, ground_truth: {value}}], or prompt (turns) and final_answer
    Open-Instruct RLVR    messages (turns); ground_truth
    verl, DAPO            prompt (turns); reward_model: {ground_truth}
    Open-R1, MATH         problem; answer, or a solution with \boxed{ANSWER}
    GSM8K                 question; an answer that ends in #### ANSWER
    MMLU                  question; choices (a list); answer (an index from 0, a letter or a choice's text)
    AGIEval, ARC          question; options or choices; label or answerKey

Optional fields:

    reward                    how answers are compared: "math", "choice" or "exact"
    dataset or data_source    name of a data set, for --reward and --extractor

A wrong row raises a UserError that names file and row. A prompt has only the problem and its choices,
so a row with another field that belongs to the question, such as `passage`, is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import string
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from configs import UserError, data_file, explained, require
from grading.answers import KINDS, extract, grade

# Fields of the problem and of the gold answer. The first field that is not null is used.
PROBLEM = ("prompt", "problem", "question", "messages")
ANSWER = ("final_answer", "answer", "ground_truth", "reward_model", "solution")
ROLES = ("system", "user", "assistant")
ORZ_ROLES = {"human": "user", "gpt": "assistant"}  # Open-Reasoner-Zero's names of the roles
WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")  # a word, but no LaTeX \command
# In data converted from CSV, a list of turns or the object reward_model may be a text. Such a row is refused.
TURNS_AS_TEXT = re.compile(
    r"""\s*\[\s*\{\s*["'](?:role|from|content|value)["']\s*:.*\}\s*\]\s*""", re.DOTALL
)
GOLD_AS_TEXT = re.compile(r"""\s*\{.*["']ground_truth["']\s*:""", re.DOTALL)
SURROGATE = re.compile("[\ud800-\udfff]")
EXAMPLE = 'a row like {"prompt": "1+1=", "answer": "2"}'
# Spaces, NUL, and characters without width.
INVISIBLE = "\0\u00ad\u200b\u200e\u200f\u2060\ufeff" + "".join(
    filter(str.isspace, map(chr, range(0x3001)))
)
# Fields that belong to the question; also choices in fields of their own, such as option_a.
OF_QUESTION = re.compile(
    r"(body|passage|context|ctx|article|paragraph|story|document|premise|background|"
    r"table|image|figure|video|audio|input)(s|_?text|\d+)?|(op|option_?|choice_?)?[a-e]"
)
# Fields that no prompt needs: one of these words between underscores, such as question_type.
QUIET = re.compile(
    r"(^|_)(id|idx|index|uuid|url|date|source|level|difficulty|type|subject|topic|"
    r"category|domain|tag|split|license|lang|language|style|ability|info|meta|metadata|"
    r"version|model|rate|score|count|reward|dataset|choice|option|answer|answerkey|label|"
    r"solution|rationale|explanation|reason|reasoning|cot|generation|response|output|"
    r"completion|message|correct|correctness|valid|verified|complete|synthetic|is)s?(_|$)"
)
MARKUP = r"<\|\w+\|>|\[/?INST\]|<(start|end)_of_turn>"  # chat markup of some model
HUB = re.compile(r"([\w.-]+/[\w.-]+):(.+)")


@dataclass(frozen=True, slots=True)
class Row:
    """One problem of a data file, with its gold answer."""

    turns: tuple[tuple[str, str], ...]  # (role, content); the last turn is the problem
    answer: str  # the gold answer
    kind: str  # "math", "choice" or "exact"
    dataset: str  # name of the data set, or ""
    form: str = field(compare=False)  # where the gold answer was found (see `_form`)
    # Name and hash of each field that the prompt does not show (see `_unused`)
    unused: tuple[tuple[str, int], ...] = ()
    fields: str = ""  # the whole row as JSON, if `keep_fields` was set in `problem_rows`

    @property
    def text(self) -> str:
        """Returns the problem's text."""
        return self.turns[-1][1]


# --- files


MOST_ERRORS = 10  # wrong rows that one message names


def problem_rows(
    path: str, default: str, keep_fields: bool = False
) -> Iterator[tuple[int, Row | None]]:
    """Yields (row number, Row) for each row of a file, with None for the copy of an earlier row. Raises
    UserError for a wrong file. The error names up to MOST_ERRORS wrong rows.

    default: see `problem_of`. keep_fields: whether to set Row.fields"""
    seen, wrong = set(), []
    for number, row in read_rows(local_file(path)):
        # 64 bits: two of a million different rows have the same hash with probability 3e-8.
        key = hash(row if isinstance(row, bytes) else repr(row))
        if key in seen:
            yield number, None
            continue
        seen.add(key)
        try:
            row = decoded(row, path, number)
            found = problem_of(row, f"{path} row {number}", default)
        except UserError as e:
            wrong.append(str(e).partition("; needed: "))
            if len(wrong) == MOST_ERRORS:
                break
            continue
        yield number, replace(found, fields=as_json(row)) if keep_fields else found
    if wrong:
        raise UserError("; ".join(found for found, *_ in wrong) + "; needed: " + wrong[0][2])


def as_json(row: Any) -> str:
    """Returns a row as JSON. Values of types that JSON lacks, such as dates, become texts."""
    text = json.dumps(row, default=lambda x: f"\0{x}\0" if isinstance(x, JsonNumber) else str(x))
    return re.sub(r'"\\u0000([^"]*)\\u0000"', r"\1", text)  # numbers as in the file: 1.10, not 1.1


def local_file(path: str) -> str:
    """Returns the path of the file on this machine. A file on the Hub (OWNER/NAME:FILE) is downloaded to the
    Hub's cache. Raises UserError if the download fails."""
    match = HUB.fullmatch(path)
    if Path(path).exists() or not match:
        return path
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    repo, file = match.groups()
    with explained(
        f"no file {path}, and it can't be downloaded from the Hub",
        f"a file that exists, or first: hf download --repo-type dataset {repo} {file}",
    ):
        cached = try_to_load_from_cache(repo, file, repo_type="dataset")
        return (
            cached if isinstance(cached, str) else hf_hub_download(repo, file, repo_type="dataset")
        )


# --- rows


def problem_of(row: Any, where: str, default: str = "math") -> Row:
    """Returns the problem of a row in one of the formats above. Raises UserError for any other row.

    where: file and number of the row, for the error message
    default: how answers are compared ("math", …) if a row has neither the field `reward` nor choices"""
    fields = _fields(row)
    turns = _turns(_first(fields, *PROBLEM), where)
    _check_text(turns[-1][1] if turns else None, "problem", _first(fields, *PROBLEM), row, where)
    choices = _choices(fields, where)
    if choices and _first(fields, *ANSWER) is None:
        fields = fields | {"answer": _first(fields, "label", "answerKey")}
    gold = _gold(fields)
    kind = fields.get("reward")
    if kind is None:
        kind = "choice" if choices else default
    require(
        kind in KINDS, f"{where} has the unknown reward {kind!r:.80}", f"one of {', '.join(KINDS)}"
    )
    if kind == "choice" and choices:
        role, text = turns[-1]
        turns = (*turns[:-1], (role, _with_choices(text, choices, where)))
        answer = _letter_of(gold, fields, choices, where)
    else:
        answer = _answer(fields, where)
        if answer and kind == "math":
            answer = _out_of_list(answer)
        # A number that is no choice's text may be a choice's index. It is refused, because a right response
        # with the choice's text would count as wrong.
        named = not choices or not _is_number(gold) or answer in choices.values()
        require(
            named,
            f"{where} has the answer {answer}, which is none of its choices",
            'a choice\'s text, or "reward": "choice"',
        )
    _check_text(answer, "answer", gold, row, where)
    dataset = _dataset(fields, where)
    contents = [content for role, content in turns]
    require(
        not SURROGATE.search("".join([answer, dataset, *contents])),
        f"{where} has a lone surrogate, which is not a character",
        "text in UTF-8",
    )
    form = _form(_plain_text(gold) or "")
    return Row(
        turns,
        answer.strip(INVISIBLE),
        sys.intern(kind),
        sys.intern(dataset),
        form,
        _unused(fields, "".join(_texts(contents)), where),
    )


def _unused(fields, shown, where):
    """Returns (name, hash of the value) for each field with a text that is not in `shown`. Fields with a name
    of QUIET are left out. Raises UserError if a field has a name of OF_QUESTION.

    shown: words of the prompt, from `_texts`"""
    found = []
    for name, value in fields.items():
        of_question = OF_QUESTION.fullmatch(name.casefold())
        if value is _first(fields, *PROBLEM) or not of_question and QUIET.search(name.casefold()):
            continue
        if not all(text in shown for text in _texts(value)):
            require(
                not of_question,
                f"{where} has a field {name!a:.40} that is in no part of the prompt: {value!a:.60}",
                "its text in the problem, choices in a field choices, or rows without it",
            )
            found.append((name, hash(repr(value))))
    return tuple(found)


def _texts(value):
    """Returns the texts in a value, also in lists and objects: each as words and signs between spaces. Null,
    false, NaN and empty texts are left out."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [text for part in parts for text in _texts(part)]
    words = (
        [] if value in (None, False) or value != value else re.findall(r"\w+|[^\w\s]", str(value))
    )
    return [" ".join(["", *words, ""])] if words else []


def _fields(row):
    """Returns the row as a dict. In Open-Reasoner-Zero a row is a list of turns, and one turn has
    the gold answer."""
    if not isinstance(row, list):
        return row if isinstance(row, dict) else {}
    turns = [turn for turn in row if isinstance(turn, dict)]
    golds = [turn["ground_truth"] for turn in turns if turn.get("ground_truth") is not None]
    return {
        "prompt": [turn for turn in turns if _first(turn, "value", "content") is not None],
        "answer": golds[-1] if golds else None,
    }


def _first(fields, *names):
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _check_text(text, name, value, row, where):
    require(
        text is not None or not value,
        f"{where} has no {name} as text (found: {value!a:.80})",
        EXAMPLE,
    )
    if text is None or not text.strip(INVISIBLE):
        found = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise UserError(
            f"{where} has no {name} (found: {ascii(found)[1:-1]:.80}); needed: {EXAMPLE}"
        )


def _turns(prompt, where):
    """Returns a prompt as pairs (role, content); () if the prompt is neither str nor list. The assistant's
    turns at the end are an example response and are left out."""
    if isinstance(prompt, str):
        turns = TURNS_AS_TEXT.fullmatch(prompt)
        require(not turns, f"{where} has a conversation as text", "a list of turns, not a text")
        return (("user", prompt),)
    if not isinstance(prompt, list):
        return ()
    turns = []
    for turn in prompt:
        fields = turn if isinstance(turn, dict) else {}
        role, text = _first(fields, "role", "from"), _first(fields, "content", "value")
        role = "user" if role is None else ORZ_ROLES.get(str(role), role)
        require(
            role in ROLES and isinstance(text, str),
            f"{where} has a turn without text or with an unknown role",
            '{"role": "system", "user" or "assistant", "content": "1+1="}',
        )
        turns.append((role, text))
    while turns and turns[-1][0] == "assistant":
        turns.pop()
    require(
        not turns or turns[-1][0] == "user",
        f"{where} ends in a system turn",
        "a user's turn at the end",
    )
    return tuple(turns)


def _dataset(fields, where):
    """Returns the name of the row's data set; "" if the row has none. In Open-Instruct RLVR the field is a
    list of one text."""
    value = _first(fields, "dataset", "data_source")
    if isinstance(value, list) and len(value) < 2:
        value = value[0] if value else None
    text = "" if value is None else _plain_text(value)
    require(text is not None, f"{where} has the data set {value!a:.80}", "the name of one data set")
    return text.strip()


# --- gold answers


def _gold(fields):
    """Returns the row's gold answer. In the row, it may be inside a dict or a list of one value."""
    gold = _first(fields, *ANSWER)
    if isinstance(gold, dict):
        gold = _first(gold, "ground_truth", "value")
    return gold[0] if isinstance(gold, list) and len(gold) == 1 else gold


def _is_number(value):
    return isinstance(value, JsonNumber | int | float | Decimal) and not isinstance(value, bool)


def _plain_text(value):
    """Returns `value` as text if `value` is a text or a finite number, else None."""
    if isinstance(value, str):
        return value
    if isinstance(value, JsonNumber):
        return value.text
    if not _is_number(value) or not math.isfinite(value):
        return None
    # Some programs write 5 as 5.0 if the column has nulls. Undo this.
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def _answer(fields, where):
    """Returns the gold answer as text, without its worked solution. Returns None if the row has no gold
    answer that is a text or a number."""
    text = _plain_text(_gold(fields))
    as_text = isinstance(fields.get("reward_model"), str) and GOLD_AS_TEXT.match(
        fields["reward_model"]
    )
    require(
        not as_text, f"{where} has its reward_model as text", 'an object: {"ground_truth": "2"}'
    )
    if text is None:
        return None
    if _form(text) == "a box":
        boxed = extract(text, "boxed")
        require(
            boxed is not None,
            f"{where} has no answer in its box: the box is empty or not closed",
            r"\boxed{ANSWER}",
        )
        return boxed.strip()
    _, marked, last = text.rpartition("####")  # GSM8K
    if marked and "\n" not in last.strip():
        return last.strip()
    if _first(fields, *ANSWER) is fields.get("solution"):  # the gold answer is the field `solution`
        # In TRL's format, `solution` may be the answer alone: one line with fewer than 4 words.
        bare = "prompt" in fields and "\n" not in text and len(WORD.findall(text)) < 4
        require(
            bare,
            f"{where} has a solution without a boxed answer",
            r"\boxed{ANSWER}, or a field answer",
        )
    return text


def _form(text):
    """Returns where `text` has the gold answer: in "a box", after "####", or in "the whole text"."""
    return (
        "a box"
        if "\\boxed" in text or "\\fbox" in text
        else "####"
        if "####" in text
        else "the whole text"
    )


def suspicious(rows: Sequence[tuple[int, Row]], special: re.Pattern) -> list[str]:
    """Returns warnings, one line each, about rows that may be wrong: 1. rows that have the gold answer in
    another place than most rows (see `_form`); 2. math problems whose gold answer has several words;
    3. problems with a match of `special`; 4. fields that no part of the prompt shows (see `_unused`).

    rows: (number, Row) of one file"""
    forms = Counter(row.form for _, row in rows)
    usual = max(forms, key=forms.get, default="")
    odd = {
        f"the gold answer is {form}, in most rows {usual}": [
            n for n, row in rows if row.form == form
        ]
        for form in forms.keys() - {usual}
    }
    odd["the gold answer has several words"] = [
        n for n, row in rows if row.kind == "math" and len(WORD.findall(row.answer)) > 1
    ]
    odd["the problem has chat markup or special tokens"] = [
        n for n, row in rows if any(special.search(content) for _, content in row.turns)
    ]
    for n, row in rows:
        for name, _ in row.unused:
            odd.setdefault(f"the field {name!a:.40} is in no part of the prompt", []).append(n)
    return [
        f"in {len(found)} of {len(rows)} rows (the first: {' '.join(map(str, found[:3]))}) {what}"
        for what, found in odd.items()
        if found
    ]


def _out_of_list(text):
    """If `text` is a JSON list of one string, such as ["5"], returns the string. Else returns `text`."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text) if text.startswith('["') else None
        if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str):
            return found[0]
    return text


# --- choices


def _choices(fields, where):
    """Returns the row's choices as a dict: letter -> text. It is empty if the row has no choices."""
    found = _first(fields, "choices", "options") or {}
    pairs = [(None, found)]
    if isinstance(found, dict):
        # In Parquet, missing letters are null.
        pairs = [(letter, text) for letter, text in found.items() if _texts(text)]
        if isinstance(found.get("text"), list):  # ARC
            pairs = itertools.zip_longest(found.get("label") or (), found["text"])
    elif isinstance(found, list):
        pairs = itertools.zip_longest(string.ascii_uppercase[: len(found)], found)
        if all(isinstance(choice, dict) for choice in found):
            pairs = [(choice.get("label"), choice.get("text")) for choice in found]
    pairs = [(str(letter), _plain_text(text)) for letter, text in pairs]
    right = all(re.fullmatch("[A-Z]", k) and v and v.strip() for k, v in pairs)
    require(
        right and len(dict(pairs)) == len(pairs),
        f"{where} has over 26 choices, or one that is not a text (found: {found!a:.80})",
        '"choices": ["5", "6"], or {"A": "5", "B": "6"}',
    )
    # Choices that begin with their letters, such as "A) 5", are read without them.
    bare = {letter: re.sub(rf"^\s*\(?{letter}[.):]\s*", "", text) for letter, text in pairs}
    return bare if all(bare[letter] not in ("", text) for letter, text in pairs) else dict(pairs)


def _with_choices(text, choices, where):
    """Returns `text` with a line `A. choice` for each choice, unless `text` already lists the choices."""
    words = " ".join(text.split())
    if all(
        re.search(rf"(?:^|\s)\(?{letter}[.):]\s*{re.escape(' '.join(choice.split()))}(?!\w)", words)
        for letter, choice in choices.items()
    ):
        return text
    lists_others = all(
        re.search(rf"^\s*\(?{letter}[.):]", text, re.MULTILINE) for letter in choices
    )
    require(
        not lists_others,
        f"{where}: its problem lists other choices than its field choices",
        "the same choices in both",
    )
    return "\n".join([text, *(f"{letter}. {choice}" for letter, choice in choices.items())])


def _letter_of(gold, fields, choices, where):
    """Returns the letter of the right choice. gold: an index from 0, a letter, or the text of a choice"""
    if _is_number(gold):
        index = re.fullmatch(r"(\d{1,2})(\.0+)?", _plain_text(gold) or "")
        found = list(choices)[int(index[1]) :][:1] if index else []
    else:
        text = (_answer(fields, where) or "").strip()
        found = [letter for letter, choice in choices.items() if text in (letter, choice.strip())]
        # With the choices {"A": "B", "B": "C"}, the answer "B" is a letter. With the choices ["B", "C"], the
        # answer "B" is refused: it may be a letter or a text.
        names_letters = isinstance(_first(fields, "choices", "options"), dict)
        if not found or (names_letters and text in choices):
            found = [letter for letter in choices if grade(text, letter, "choice")]
        require(
            len(found) < 2,
            f"{where} has the answer {text!a:.80}, which fits {len(found)} choices",
            f"one of {', '.join(choices)}",
        )
    require(
        len(found) == 1,
        f"{where} has the answer {gold!a:.80}, which is none of its choices",
        f"one of {', '.join(choices)}, or a choice's text, or its index from 0",
    )
    return found[0]


@dataclass(frozen=True, slots=True)
class JsonNumber:
    """A number from a JSON file. Its text keeps the digits: 1.10 does not become 1.1."""

    text: str

    def __repr__(self) -> str:
        return self.text


ROW = json.JSONDecoder(parse_float=JsonNumber, parse_int=JsonNumber)
BOM = b"\xef\xbb\xbf"
READABLE = "JSON in UTF-8, one object a line (in .json also a list), or intact Parquet or Arrow"


def read_rows(path: str) -> Iterator[tuple[int, Any]]:
    """Yields (number, row) for each row of a .json (a list, or one row a line), .jsonl, .parquet or .arrow
    file. A row that is one line of JSON is yielded as bytes, for `decoded`. Raises UserError if the file has
    no row or can't be read."""
    file, row = data_file(path), None
    if file.suffix in (".parquet", ".arrow"):
        rows = _arrow_rows(file)
    else:
        with file.open("rb") as f:
            is_list = f.read(4096).removeprefix(BOM).lstrip()[:1] == b"["
        rows = _list_rows(file) if is_list and file.suffix != ".jsonl" else _line_rows(file)
    for row in rows:
        yield row
    require(row is not None, f"{path} is empty", "at least one row")


def decoded(row: Any, path: str, number: int) -> Any:
    """Returns a row of `read_rows`, with a line of JSON decoded. Raises UserError if the line is no JSON."""
    if not isinstance(row, bytes):
        return row
    with explained(f"{path} row {number} can't be read", READABLE):
        try:
            return ROW.decode(row.decode().rstrip())
        except json.JSONDecodeError as e:  # its own text would say line 1
            raise ValueError(f"{e.msg}: line {number} column {e.colno}") from None


def _arrow_rows(file):
    import pyarrow.parquet

    with explained(f"{file} can't be read", READABLE):
        if file.suffix == ".parquet":
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(
                1000
            )  # 1000 rows in memory at once
        else:  # written by save_to_disk of the library `datasets`
            batches = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file)))
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)


def _line_rows(file):
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(BOM) if number == 1 else line
            if line.strip():
                yield number, line


def _list_rows(file):
    with explained(f"{file} can't be read", READABLE):
        rows = ROW.decode(file.read_text(encoding="utf-8-sig"))
    return enumerate(rows, 1)
