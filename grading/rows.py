r"""Reads problems and gold answers from data files in many formats.

    for number, row in problem_rows("train.jsonl", "math"):
        row.turns, row.answer, row.kind

A file is JSON, JSONL, Parquet or Arrow, on the disk or on the Hugging Face Hub. Formats of a row:

    plain, TRL            prompt (text or turns); answer, ground_truth or solution
    Open-Reasoner-Zero    [{from, value}, {from, ground_truth: {value}}], or prompt (turns) and final_answer
    Open-Instruct RLVR    messages (turns); ground_truth
    verl, DAPO            prompt (turns); reward_model: {ground_truth}
    Open-R1, MATH         problem; answer, or a solution with \boxed{ANSWER}
    GSM8K                 question; an answer that ends in #### ANSWER
    MMLU                  question; choices (a list); answer (an index from 0, a letter or a choice's text)
    AGIEval, ARC          question; options, or choices {text: [...], label: [...]}; label or answerKey
                          (choices may also be objects [{label, text}, ...])

Optional fields:

    reward                    how answers are compared: "math", "choice" or "exact"
    dataset or data_source    name of a data set, for --reward and --extractor

Wrong rows raise a UserError that names the file and up to MOST_ERRORS rows. A prompt has only the problem and
its choices, so a row with another field that belongs to the question, such as `passage`, is refused. A
warning names the other fields that no prompt shows, except those that QUIET lists. Another warning counts the
rows in which two fields have different gold answers.
"""

import itertools
import json
import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from configs import data_file
from grading.answers import KINDS, grade, quick_grade
from grading.extract import extract
from guard.files import exists
from guard.messages import UserError, explained, require

# Fields of the problem and of the gold answer. The first field that is not null is used. `solution`, a text
# with the answer in a box, must be the last of ANSWER.
PROBLEM = ("prompt", "problem", "question", "messages")
ANSWER = ("final_answer", "answer", "ground_truth", "reward_model", "solution")
ROLES = ("system", "user", "assistant")
ORZ_ROLES = {"human": "user", "gpt": "assistant"}  # Open-Reasoner-Zero's names of the roles
TURN = ("role", "from", "content", "value")  # fields of a turn
WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")  # a word, but no LaTeX \command
EXAMPLE = 'a row like {"prompt": "1+1=", "answer": "2"}'
# Whitespace, NUL, and characters without width: a gold answer loses them at both ends.
INVISIBLE = " \t\n\r\v\f\0\x85\xa0\xad\u200b\u200e\u200f\u2028\u2029\u2060\u3000\ufeff"
MOST_ERRORS = 10  # wrong rows that one message names
# Names of fields that belong to the question. The last line has names of choices: option_a, answer_choices.
OF_QUESTION = re.compile(
    r"(body|passage|context|ctx|article|paragraph|story|document|premise|background|"
    r"table|image|figure|video|audio|input)(s|_?(text|url|path|file)s?|_?\d+)?|"
    r"[a-e]|(op|option|choice)_?([a-e]|\d+)|(answer|question)_(choice|option)s"
)
# Names of fields that no prompt needs, such as question_type: one of these words is a part of the name.
# Underscores divide a name into parts. But an answer_unit or output_format may belong to the question.
QUIET = re.compile(
    r"^(?!(.*_)?(unit|format)s?(_|$))(messages$|(.*_)?sources?$|"
    r"(.*_)?(id|idx|index|uuid|url|date|level|difficulty|type|subject|"
    r"topic|category|domain|tag|split|license|lang|language|style|ability|info|"
    r"meta|metadata|version|model|rate|score|count|reward|dataset|"
    r"answer|answerkey|label|truth|solution|rationale|explanation|reason|"
    r"reasoning|cot|generation|response|output|completion|correct|"
    r"correctness|valid|verified|complete|synthetic|is)s?(_|$))"
)
# Chat markup of some model, or a list of turns as text, as in data converted from CSV
MARKUP = (
    r"<\|\w+\|>|\[/?INST\]|<(start|end)_of_turn>|"
    r"""\[\s*\{\s*\\?['"](role|from)\\?['"]:"""
)
HUB = re.compile(r"([\w.-]+/[\w.-]+):(.+)")  # OWNER/NAME:FILE


@dataclass(frozen=True, slots=True)
class Row:
    """One problem of a data file, with its gold answer."""

    turns: tuple[tuple[str, str], ...]  # (role, content); the last turn is the problem
    answer: str  # the gold answer
    kind: str  # "math", "choice" or "exact"
    dataset: str  # name of the data set, or ""
    # Name and hash of each field that no prompt shows. Rows that differ in such a field are no repeats.
    unused: tuple[tuple[str, int], ...] = ()
    differs: bool = False  # whether two fields have different gold answers
    fields: str = ""  # the whole row as JSON, if `keep_fields` was set in `problem_rows`

    @property
    def text(self) -> str:
        """Returns the problem's text."""
        return self.turns[-1][1]


# --- files


def problem_rows(
    path: str, default: str, keep_fields: bool = False
) -> Iterator[tuple[int, Row | None]]:
    """Yields (row number, Row) for each row of a file, with None for the copy of an earlier row. Raises
    UserError for a wrong file. The error names up to MOST_ERRORS wrong rows.

    default: see `problem_of`. keep_fields: whether to set Row.fields"""
    seen = set()
    wrong = []  # for each wrong row: (what is wrong, the separator, what is needed)
    for number, stored in stored_rows(local_file(path)):
        # A hash has 64 bits: two of a million different rows have the same hash with probability 3e-8.
        key = hash(repr(stored))
        if key in seen:
            yield number, None
            continue
        seen.add(key)
        where = f"{path} row {number}"
        try:
            row = _decoded(stored, where)
            found = problem_of(row, where, default)
        except UserError as error:
            wrong.append(str(error).partition("; needed: "))
            if len(wrong) == MOST_ERRORS:
                break
            continue
        if keep_fields:
            found = replace(found, fields=as_json(row))
        yield number, found
    if wrong:
        all_found = "; ".join(what for what, _, _ in wrong)
        raise UserError(f"{all_found}; needed: {wrong[0][2]}")


def as_json(row: Any) -> str:
    """Returns a row as JSON. Values of types that JSON lacks, such as dates, become texts."""
    return json.dumps(row, default=str)


def local_file(path: str) -> str:
    """Returns the path of the file on this machine. A file on the Hub (OWNER/NAME:FILE) is downloaded to the
    Hub's cache. Raises UserError if the download fails."""
    match = HUB.fullmatch(path)
    if exists(Path(path)) or not match:
        return path
    from huggingface_hub import hf_hub_download

    repo, file = match.groups()
    with explained(
        f"no file {path}, and it can't be downloaded from the Hub",
        f"a file that exists, or first: hf download --repo-type dataset {repo} {file}",
    ):
        return hf_hub_download(repo, file, repo_type="dataset")


# --- rows


def problem_of(row: Any, where: str, default: str = "math") -> Row:
    """Returns the problem of a row in one of the formats above. Raises UserError for any other row.

    where: file and number of the row, for the error message
    default: how answers are compared ("math", …) if a row has neither the field `reward` nor choices"""
    fields = _fields(row)
    problem = _first(fields, *PROBLEM)
    turns = _turns(problem, where)
    _check_text(turns[-1][1] if turns else None, "problem", problem, row, where)
    choices = _choices(fields, where)
    # [:-1]: `solution` may be an explanation
    if choices and _first(fields, *ANSWER[:-1]) is None:
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
        answer = _letter_of(choices, fields, where)
        fields = fields | {"choices": None, "options": None}  # the prompt shows them
    else:
        answer = gold_answer(fields, kind, where)
        # A number may be the index of the right choice. Then a response with this choice's text would count
        # as wrong. So only a number that is a choice itself is allowed.
        require(
            not choices or not _is_number(gold) or answer in choices.values(),
            f"{where} has the answer {answer}, which is none of its choices",
            'a choice\'s text, or "reward": "choice"',
        )
    _check_text(answer, "answer", gold, row, where)
    dataset = dataset_of(fields, where)
    unused = _unused(fields, problem, turns, where)
    differs = _differs(fields, answer, kind, choices)
    return Row(turns, answer.strip(INVISIBLE), kind, dataset, unused, differs)


def _unused(fields, problem, turns, where):
    """Returns (name, hash of the value) for each field whose text no prompt shows. The fields are those of
    the row, of the problem's turns, and of a gold answer that is a dict. Raises UserError if the name of such
    a field is in OF_QUESTION. Leaves out other fields whose name is in QUIET.

    problem: the value of the problem's field
    turns: (role, content) of each turn that the prompt shows, read from `problem`
    where: file and row, for messages"""
    every = [*fields.items()]  # (name, value) of all fields
    # A gold answer that is a dict may have a tolerance, or more right answers.
    parts = problem if isinstance(problem, list) else []  # turns
    for part in [_first(fields, *ANSWER), *parts]:
        if isinstance(part, dict):
            every += [(name, value) for name, value in part.items() if name not in TURN]
    contents = [content for _, content in turns]
    # Turns in `messages` may stand beside the problem's field. UserError: turns of another format
    with suppress(UserError):
        for role, text in _turns(fields.get("messages"), where):
            if text not in contents:
                every.append((f"messages: {role}", text))
    found = []
    shown = ""
    for name, value in every:
        of_question = OF_QUESTION.fullmatch(name.casefold())
        is_quiet = QUIET.search(name.casefold()) and not of_question
        if value is problem or is_quiet:
            continue
        # Join the prompt's texts only when a field needs them: most rows have no such field, and prompts may
        # be long.
        shown = shown or "".join(_texts(contents))
        if all(text in shown for text in _texts(value)):  # also if the value has no text
            continue
        require(
            not of_question,
            f"{where} has a field {name!a:.40} that is in no part of the prompt: {value!a:.50}",
            "its text in the problem, choices in a field choices, or rows without it",
        )
        found.append((name, hash(repr(value))))
    return tuple(found)


def _texts(value):
    """Returns the texts in a value, also in lists and objects. Each text is given as words and signs between
    spaces, so that " m " is not found in " cm ". Null, false, NaN and empty texts are left out."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return list(itertools.chain(*map(_texts, value)))
    text = "" if value is None or value is False or value != value else str(value)
    words = re.findall(r"\w+|[^\w\s]", text)
    joined = " ".join(words)
    return [f" {joined} "] if words else []


def _fields(row):
    """Returns the row as a dict. In Open-Reasoner-Zero a row is a list of turns, and one turn has
    the gold answer."""
    if isinstance(row, dict):
        return row
    if not isinstance(row, list) or not all(isinstance(turn, dict) for turn in row):
        return {}
    golds = [turn["ground_truth"] for turn in row if "ground_truth" in turn]
    return {
        "prompt": [turn for turn in row if "ground_truth" not in turn or "value" in turn],
        "answer": golds[0] if len(golds) == 1 else None,
    }


def _first(fields, *names):
    """Returns the value of the first of these fields that is not null; None if all are null or missing."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _check_text(text, name, value, row, where):
    """Raises UserError if `text` is None or empty. The message shows `value`, from which `text` was read; the
    whole row if there is no value.

    name: what `text` is: problem or answer"""
    found = row if value is None else value
    require(
        text is not None and text.strip(INVISIBLE) != "",
        f"{where} has no {name} as text (found: {found!a:.80})",
        EXAMPLE,
    )


def _turns(prompt, where):
    """Returns a prompt as a tuple of pairs (role, content); () if the prompt is neither str nor list. The
    assistant's turns at the end are an example response and are left out."""
    if isinstance(prompt, str):
        return (("user", prompt),)
    if not isinstance(prompt, list):
        return ()
    turns = []
    for turn in prompt:
        fields = turn if isinstance(turn, dict) else {}
        role = _first(fields, "role", "from")
        text = _first(fields, "content", "value")
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


def dataset_of(fields: dict, where: str) -> str:
    """Returns the name of the row's data set; "" if the row has none. In Open-Instruct RLVR the field is a
    list of one text."""
    value = _first(fields, "dataset", "data_source")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    require(
        value is None or isinstance(value, str),
        f"{where} has the data set {value!a:.80}",
        "the name of one data set",
    )
    return (value or "").strip()


# --- gold answers


def _gold(fields):
    """Returns the row's gold answer as it is stored: a text, a number or another value; None if it is
    missing. In the row, it may be inside a dict or a list of one value."""
    gold = _first(fields, *ANSWER)
    if isinstance(gold, dict):
        gold = _first(gold, "ground_truth", "value")
    if isinstance(gold, list) and len(gold) == 1:
        return gold[0]
    return gold


def _is_number(value):
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def plain_text(value: Any) -> str | None:
    """Returns `value` as text if `value` is a text or a finite number, else None."""
    if isinstance(value, str):
        return value
    # value != value: NaN
    if not _is_number(value) or value != value or abs(value) == math.inf:
        return None
    # Some programs write 5 as 5.0 if the column has nulls. Undo this, but 1e23 has no 24 exact digits.
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return f"{value:.0f}"
    return str(value)


def gold_answer(fields: dict, kind: str, where: str) -> str | None:
    """Returns the gold answer as text, without its worked solution. Returns None if the row has no gold
    answer that is a text or a number."""
    text = plain_text(_gold(fields))
    if text is None:
        return None
    if "\\boxed" in text or "\\fbox" in text:
        boxed = extract(text, "boxed")
        require(
            boxed is not None,
            f"{where} has no answer in its box: the box is empty or not closed",
            r"\boxed{ANSWER}",
        )
        return boxed
    before, marked, last = text.rpartition("####")  # GSM8K
    if marked and "\n" not in last.strip() and (kind != "exact" or before.endswith("\n")):
        return last.strip()
    if _first(fields, *ANSWER[:-1]) is None:  # the gold answer is the last field, `solution`
        # In TRL's format, `solution` may be the answer alone: one line with fewer than 4 words.
        bare = "prompt" in fields and "\n" not in text and len(WORD.findall(text)) < 4
        require(
            bare,
            f"{where} has a solution without a boxed answer",
            r"\boxed{ANSWER}, or a field answer",
        )
    # In Skywork-OR1 the answer is a JSON list of one text: ["5"].
    inner = re.fullmatch(r'\["((?:[^"\\]|\\.)*)"\]', text)
    if inner and kind == "math":
        with explained(
            f"{where} has the answer {text!r:.80}", "a text, or a list of one text in JSON"
        ):
            return json.loads(f'"{inner[1]}"', strict=False)
    return text


def _differs(fields, answer, kind, choices):
    """Returns whether another field of the row has a gold answer that is certainly not equal to `answer`."""
    # Rows with one gold answer each, because `gold_answer` reads the first one of a row.
    golds = [{name: fields[name]} for name in ANSWER if fields.get(name) is not None]
    for gold in golds[1:]:  # `answer` is from the first one
        with suppress(UserError):  # a solution without a boxed answer
            if kind == "choice" and choices:
                other = _letter_of(choices, gold | {"choices": choices}, "")
            else:
                other = gold_answer(gold, kind, "")
            if other and other != answer and quick_grade(other, answer, kind) is False:
                return True
    return False


def suspicious(rows: Sequence[tuple[int, Row]], special: re.Pattern) -> list[str]:
    """Returns warnings, one line each, about problems with a match of `special`, about gold answers that
    differ, and about fields that no prompt shows.

    rows: (number, Row) of one file
    special: finds chat markup and special tokens"""
    found = {
        "the problem has chat markup or special tokens": [
            number for number, row in rows if special.search(str(row.turns))
        ],
        "two fields have different gold answers": [number for number, row in rows if row.differs],
    }
    lines = []
    for what, numbers in found.items():
        if numbers:
            lines.append(f"{what} in {len(numbers)} of {len(rows)} rows, first in row {numbers[0]}")
    unused = Counter()  # name of a field -> number of rows
    for _, row in rows:
        unused.update(name for name, _ in row.unused)
    if unused:
        names = ", ".join(f"{name!a:.40} ({count})" for name, count in unused.items())
        lines.append(f"fields that no prompt shows, and their numbers of rows: {names}")
    return lines


# --- choices

LETTERS = str.maketrans("123456789", "ABCDEFGHI")  # ARC's labels -> letters


def _choices(fields, where):
    """Returns the row's choices as a dict: letter -> text. It is empty if the row has no choices."""
    found = _first(fields, "choices", "options") or {}
    if not isinstance(found, dict | list):
        pairs = [("", None)]  # refused below
    elif isinstance(found, list) and all(isinstance(choice, dict) for choice in found):
        pairs = [(choice.get("label"), choice.get("text")) for choice in found]
    elif isinstance(found, list):  # choices over 26 get the letter None, and are refused below
        pairs = list(itertools.zip_longest(string.ascii_uppercase[: len(found)], found))
    elif isinstance(found.get("text"), list):  # ARC, where some rows have the labels 1, 2, 3, …
        pairs = []
        for label, text in itertools.zip_longest(found.get("label") or (), found["text"]):
            pairs.append((str(label).translate(LETTERS), text))
    else:  # in Parquet, missing letters are null
        pairs = [(letter, text) for letter, text in found.items() if _texts(text)]
    choices = {str(letter): plain_text(text) for letter, text in pairs}
    valid = all(re.fullmatch("[A-Z]", k) and v and v.strip() for k, v in choices.items())
    require(
        valid and len(choices) == len(pairs),  # fewer choices: two have the same letter
        f"{where} has over 26 choices, or one that is not a text (found: {found!a:.80})",
        '"choices": ["5", "6"], or {"A": "5", "B": "6"}',
    )
    return choices


def _with_choices(text, choices, where):
    """Returns `text` with a line `A. choice` for each choice, unless `text` already lists the choices. A
    choice that begins with its letter, such as "(A) 5", gets no second one. Raises UserError if `text` lists
    other choices."""
    words = " ".join(text.split())
    lines = [text]
    listed = True  # whether `text` has every choice after its letter
    has_letters = True  # whether a line of `text` starts with the letter of every choice
    for letter, choice in choices.items():
        start = rf"\(?{letter}[.):]"
        lines.append(choice if re.match(start, choice) else f"{letter}. {choice}")
        pattern = re.escape(" ".join(choice.split()))
        listed = listed and re.search(rf"(?:^|\s){start}\s*{pattern}(?!\w)", words)
        has_letters = has_letters and re.search(rf"^\s*{start}", text, re.MULTILINE)
    if listed:
        return text
    require(
        not has_letters,
        f"{where}: its problem lists other choices than its field choices",
        "the same choices in both",
    )
    return "\n".join(lines)


def _letter_of(choices, fields, where):
    """Returns the letter of the right choice. Raises UserError unless the gold answer fits exactly one.

    choices: letter -> text
    fields: the row; its gold answer is an index from 0, a letter, ARC's label, or the text of a choice"""
    gold = _gold(fields)
    text = (gold_answer(fields, "choice", where) or "").strip()
    raw = _first(fields, "choices", "options")  # as the row has them
    labels = raw.get("label") if isinstance(raw, dict) else ()
    found = set()  # letters of the choices that the gold answer fits
    if text in (labels or ()):
        found.add(text.translate(LETTERS))
    if _is_number(gold):
        if text.isdecimal():
            found.update(list(choices)[int(text) :][:1])  # none if the index is too large
        if gold in raw:  # the number may also be a choice itself
            found.add(list(choices)[raw.index(gold)])
    elif not found or fields.get("answerKey") is None:  # an answerKey is never a choice's text
        for letter, choice in choices.items():
            if text == choice.strip() or grade(text, letter, "choice"):
                found.add(letter)
    require(
        len(found) == 1,
        f"{where} has the answer {gold!a:.80}, which fits {len(found)} of its choices",
        f"one of {', '.join(choices)}, or a choice's text, or its index from 0",
    )
    return found.pop()


# --- files


# Bytes to skip: UTF-8's byte-order mark, with which some files start, and whitespace.
BLANK = b"\xef\xbb\xbf \t\r\n"
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # the last bytes of a complete Arrow stream
READABLE = "JSON in UTF-8, an object a line (in .json also a list), or Parquet or Arrow"


def read_rows(path: str) -> Iterator[tuple[int, Any]]:
    """Yields (number, row) for each row of a .json (a list, or one row a line), .jsonl, .parquet or .arrow
    file. Raises UserError if the file has no row or can't be read."""
    for number, row in stored_rows(path):
        yield number, _decoded(row, f"{path} row {number}")


def stored_rows(path: str) -> Iterator[tuple[int, Any]]:
    """Yields (number, row) as `read_rows` does, but does not decode a line of JSON: then `row` is the line as
    bytes. So a reader can go on after a wrong line."""
    file = data_file(path)
    numbered = None  # stays None if the file has no row
    if file.suffix in (".parquet", ".arrow"):
        rows = _arrow_rows(file)
    else:
        rows = _json_rows(file)
    with explained(f"{path} can't be read", READABLE, OSError):
        for numbered in rows:
            yield numbered
    require(numbered is not None, f"{path} is empty", "at least one row")


def _decoded(row, where):
    """Returns a row of `stored_rows`, decoded if it is JSON as bytes."""
    if not isinstance(row, bytes):
        return row
    with explained(f"{where} can't be read", READABLE):
        return json.loads(row.decode("utf-8-sig").rstrip(), object_pairs_hook=_object)


def _object(pairs):
    """Returns a JSON object as a dict. Raises ValueError if a key comes twice: json would drop the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key twice among {[key for key, _ in pairs]}")
    return found


def _arrow_rows(file):
    """Yields (number, row) of a .parquet or .arrow file."""
    import pyarrow.parquet

    with explained(f"{file} can't be read", READABLE):
        if file.suffix == ".parquet":
            # 1000 rows are in memory at once.
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(1000)
        else:
            source = pyarrow.memory_map(str(file))
            if source.read_at(6, 0) == b"ARROW1":  # Arrow's file format, as polars writes it
                reader = pyarrow.ipc.open_file(source)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:  # Arrow's stream format, as save_to_disk of the library `datasets` writes it
                if source.read_at(8, source.size() - 8) != ARROW_END:
                    raise EOFError("the program that wrote it was stopped")
                batches = pyarrow.ipc.open_stream(source)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from enumerate(rows, 1)


def _json_rows(file):
    """Yields (number, row) of a file with a list of rows in JSON, or (number, line as bytes) of a file with
    one row a line. Skips empty lines."""
    with file.open("rb") as stream:
        is_list = stream.read(4096).lstrip(BLANK)[:1] == b"["
        stream.seek(0)
        if is_list and file.suffix != ".jsonl":  # a line of a .jsonl file may be a list
            yield from enumerate(_decoded(stream.read(), file), 1)
        else:
            for number, line in enumerate(stream, 1):
                if line.strip(BLANK):
                    yield number, line
