"""Tests of rows of data files, chat templates, gold answers, and the order of problems."""

import itertools
import json
import random
import re
import tracemalloc
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import ranks
import torch
from conftest import run_ranks
from tokenizers.processors import TemplateProcessing

import data
import dist
import rollout
from configs import PRESETS
from grading import rows
from grading.worker import Grader
from guard import checks
from guard.identity import fingerprint
from guard.messages import UserError
from model import load_config, load_tokenizer

CFG = replace(PRESETS["tiny-ppo"], max_prompt_len=4096, max_response_len=64, pack_len=8192)
CHAT = replace(CFG, template="chat")
Q = "1+1="


def said(*turns: tuple[str, str]) -> str:
    return json.dumps([{"role": role, "content": content} for role, content in turns])


SHORT = {  # word in a row -> text that replaces the word
    "USER": said(("user", Q)),
    "TALK": said(("system", "Be brief."), ("user", "0+1="), ("assistant", "1"), ("user", Q),
                 ("assistant", "2")),
    "ASSISTANT": said(("assistant", "x")),
    "BLANK": said(("user", " ")), "EMPTY": said(("system", ""), ("user", Q)),
    "SYSTEM_LAST": said(("user", Q), ("system", "x")), "NARRATOR": said(("narrator", "x"), ("user", Q)),
    "FOUR": f'"question": "{Q}", "choices": ["5", "2", "6", "7"]', "DEEP": "[" * 99_999,
    "MANY": json.dumps(list(range(27)))}


def fill(line: str) -> str:
    return re.sub("|".join(sorted(SHORT, reverse=True)), lambda m: SHORT[m[0]], line)


ABCD = f"{Q}\nA. 5\nB. 2\nC. 6\nD. 7"

# Row -> (problem, gold answer, kind of answer).
READ = {'{"prompt": "1+1=", "answer": "2"}': (Q, "2", "math"),
    # format of GSM8K
    r'{"question": "1+1=", "answer": "We add 1 and 1.\n#### 42"}': (Q, "42", "math"),
    r'{"question": "1+1=", "answer": "So <<1+1=2>>2.\n#### 1,234\n"}': (Q, "1,234", "math"),
    r'{"question": "1+1=", "answer": "On one line. #### -7"}': (Q, "-7", "math"),
    r'{"question": "1+1=", "answer": "We add.\n#### 42", "reward": "exact"}': (Q, "42", "exact"),
    r'{"question": "1+1=", "answer": "a #### b", "reward": "exact"}': (Q, "a #### b", "exact"),
    # formats of MATH and Open-R1
    r'{"problem": "1+1=", "solution": "first \\boxed{1}, then \\boxed{2}."}': (Q, "2", "math"),
    r'{"problem": "1+1=", "solution": "$\\boxed{\\frac{\\sqrt{2}}{\\frac{1}{3}}}$"}':
        (Q, r"\frac{\sqrt{2}}{\frac{1}{3}}", "math"),
    r'{"problem": "1+1=", "solution": "so \\fbox{2}"}': (Q, "2", "math"),
    r'{"problem": "1+1=", "solution": "so \\boxed 3.5."}': (Q, "3.5", "math"),
    r'{"problem": "1+1=", "solution": "\\boxed{2} and \\boxed{3"}': (Q, "2", "math"),
    r'{"problem": "1+1=", "solution": "\\boxed{3}", "answer": "2"}': (Q, "2", "math"),
    r'{"problem": "1+1=", "solution": "\\boxed{2}", "answer": null}': (Q, "2", "math"),
    **{f'{{"problem": "1+1=", "solution": {x}, "answer": {x}}}': (Q, "2", "math") for x in ('"2"', "2")},
    # formats of verl, DAPO, TRL and RLVR
    '{"prompt": USER, "reward_model": {"ground_truth": "2", "style": "rule"}}': (Q, "2", "math"),
    '{"prompt": TALK, "reward_model": {"ground_truth": 2}, "data_source": "d"}': (Q, "2", "math"),
    '{"prompt": USER, "solution": "2"}': (Q, "2", "math"),
    r'{"prompt": "1+1=", "solution": "$\\frac{1}{2}$"}': (Q, r"$\frac{1}{2}$", "math"),
    '{"prompt": "1+1=", "ground_truth": "2"}': (Q, "2", "math"),
    '{"messages": USER, "ground_truth": ["2"], "dataset": "gsm8k"}': (Q, "2", "math"),
    '{"messages": TALK, "ground_truth": "2", "dataset": ["gsm8k"]}': (Q, "2", "math"),
    # format of ORZ
    '[{"from": "human", "value": "1+1="}, {"from": "assistant", "ground_truth": {"value": "2"}}]':
        (Q, "2", "math"),
    '[{"from": "human", "value": "1+1=", "ground_truth": {"value": "2"}}]': (Q, "2", "math"),
    '[{"value": "1+1="}, {"from": "gpt", "value": "2!", "ground_truth": {"value": "2"}}]': (Q, "2", "math"),
    '{"prompt": [{"from": "user", "value": "1+1="}], "final_answer": "2"}': (Q, "2", "math"),
    '{"prompt": [{"from": "user", "value": "1+1=\\nA. x\\nB. y"}], "final_answer": "B", '
    '"choices": {"A": "x", "B": "y"}}': ("1+1=\nA. x\nB. y", "B", "choice"),
    # format of MMLU
    **{f'{{FOUR, "answer": {x}}}': (ABCD, "B", "choice") for x in ("1", "1.0", '"2"', '"B"', '"(b)"')},
    '{"question": "1+1=", "options": [5, 2], "answer": "B"}': (f"{Q}\nA. 5\nB. 2", "B", "choice"),
    '{"question": "1+1= (A) 5 (B) 2", "choices": ["5", "2"], "answer": 1}':
        ("1+1= (A) 5 (B) 2", "B", "choice"),
    '{"question": "1+1=", "choices": ["2", "2"], "answer": 1}': (f"{Q}\nA. 2\nB. 2", "B", "choice"),
    '{"question": "1+1=", "choices": ["1", "2"], "answer": 1}': (f"{Q}\nA. 1\nB. 2", "B", "choice"),  # MMLU
    '{"question": "1+1=", "choices": [0, 1, 2], "answer": 2}': (f"{Q}\nA. 0\nB. 1\nC. 2", "C", "choice"),
    '{"question": "1+1=", "choices": [5, 2, 7], "answer": 7}': (f"{Q}\nA. 5\nB. 2\nC. 7", "C", "choice"),
    **{f'{{"prompt": "1+1=", "answer": "2", "choices": {x}}}': (Q, "2", "math") for x in ("[]", "null")},
    '{"prompt": "1+1=", "reward_model": "2"}': (Q, "2", "math"),
    # Invisible characters at both ends of an answer are removed. An answer of the kind math may be a list of
    # one item, as text: ["2"] becomes 2. Skywork-OR1 has such answers.
    r'{"prompt": "1+1=", "answer": "\ufeff\u200b 2\u200e\u0000\n"}': (Q, "2", "math"),
    r'{"prompt": "1+1=", "answer": "a\u200cb", "reward": "exact"}': (Q, "a\u200cb", "exact"),
    r'{"prompt": "1+1=", "reward_model": {"ground_truth": "[\"\\\\frac{1}{2}\"]"}}':
        (Q, r"\frac{1}{2}", "math"),
    r'{"prompt": "1+1=", "answer": "[\"2\", \"3\"]"}': (Q, '["2", "3"]', "math"),
    r'{"prompt": "1+1=", "answer": "[\"2\"]", "reward": "exact"}': (Q, '["2"]', "exact"),
    **{f'{{"prompt": "1+1=", "answer": {x}}}': (Q, y, "math") for x, y in
       (("1.50", "1.5"), ("1e3", "1000"), ("-3.0", "-3"), ("6.02e23", "6.02e+23"), ("7" * 400, "7" * 400))},
    # The field `reward` sets the kind of answer, also in a row with choices.
    '{"prompt": "1+1=", "answer": "2", "reward": null}': (Q, "2", "math"),
    '{"prompt": "1+1=", "answer": "2", "reward": "exact"}': (Q, "2", "exact"),
    '{"prompt": "1+1=", "answer": "2", "choices": ["1", "2"], "reward": "math"}': (Q, "2", "math"),
    '{"prompt": "1+1=", "answer": 2, "choices": [1, 2], "reward": "math"}': (Q, "2", "math"),
    '{FOUR, "answer": "B", "reward": "exact"}': (Q, "B", "exact"),
    r'{"prompt": "1+1=", "ground_truth": "{\"keywords\": 2}"}': (Q, '{"keywords": 2}', "math")}

# Row that is refused -> words of the error message.
REFUSED = {**{line: "no problem" for line in ("[1, 2]", "5", '"text"', "null", "[]", "{}")},
    **{f'{{"prompt": {x}, "answer": "2"}}': "no problem" for x in
       ('""', '{"role": "user"}', "ASSISTANT", "BLANK", r'"\u200b"')},
    '[{"value": "1"}, {"ground_truth": {"value": "1"}}, {"value": "2"}, {"ground_truth": {"value": "2"}}]':
        "no answer as text (found: [{",  # the first answer would be missing in the prompt
    '["A box", {"value": "1"}, {"ground_truth": {"value": "1"}}]': "no problem as text (found: ['A box'",
    '{"prompt": 5, "answer": "2"}': "no problem as text (found: 5)",
    '{"prompt": "x", "answer": ["1", "2"]}': "no answer as text (found: ['1', '2'])",
    '{"prompt": ["x"], "answer": "2"}': "a turn without text",
    r'{"prompt": "1+1=", "answer": "\ufeff"}': "no answer",
    r'{"prompt": "1+1=", "answer": "[\"\"]"}': "no answer",
    r'{"prompt": "1+1=", "answer": "[\"\\sqrt2\"]"}': r"""has the answer '["\\sqrt2"]' (JSONDecodeError: """,
    '{"prompt": SYSTEM_LAST, "answer": "2"}': "ends in a system turn",
    '{"prompt": NARRATOR, "answer": "2"}': "an unknown role",
    '{"prompt": [{"role": ["user"], "content": "x"}], "answer": "2"}': "an unknown role",
    '{"prompt": [{"role": "user", "content": [{"text": "x"}]}], "answer": "2"}': "a turn without text",
    **{f'{{"prompt": "1+1=", "answer": {value}}}': "no answer" for value in
       ("null", "NaN", "Infinity", "true", "false", "[]", "{}", '""', r'" \n\t"', "[[]]")},
    r'{"question": "1+1=", "answer": "We add.\n####"}': "no answer",
    r'{"problem": "1+1=", "solution": "We add, so it is 2."}': "a solution without a boxed answer",
    r'{"problem": "1+1=", "solution": "2"}': "a solution without a boxed answer",
    r'{"prompt": "1+1=", "solution": "We add them and get two."}': "a solution without a boxed answer",
    r'{"problem": "1+1=", "solution": "so \\boxed{2"}': "no answer in its box",
    r'{"problem": "1+1=", "solution": "so \\boxed{ }"}': "no answer",
    '{"prompt": "1+1=", "reward_model": {"style": "rule"}}': "no answer",
    **{f'{{"prompt": "1+1=", "answer": "2", "reward": {kind}}}': "unknown reward" for kind in
       ('"vibes"', "1", "[]", '["math"]', '""', "false")},
    **{f'{{FOUR, "answer": {x}}}': "fits 0 of its choices" for x in
       ("4", "-1", '"E"', "0.5", "true", "null")},
    '{"question": "1+1=", "choices": ["2", "2"], "answer": "2"}': "fits 2 of its choices",
    '{"question": "1+1=", "choices": [1, 2, 3], "answer": 2}': "fits 2 of its choices",  # B, or C by index
    **{f'{{"question": "1+1=", "choices": {x}, "answer": "A"}}': "fits 2 of its choices" for x in
       ('["B", "A"]', '{"A": "B", "B": "A"}')},
    **{f'{{"question": "1+1=", "choices": {x}, "answer": 0}}': "over 26 choices, or one that" for x in
       ('["1", null]', '"1 or 2"', '{"1": "x"}', "MANY")},
    r'{"question": "1+1=\nA. 2\nB. 3", "choices": ["3", "2"], "answer": 0}': "problem lists other choices",
    # With the reward "choice", a number may be an index. With "math" or "exact", it must be a choice's text.
    '{FOUR, "answer": 1, "reward": "math"}': "none of its choices",
    '{FOUR, "answer": 3.0, "reward": "exact"}': "none of its choices",
    **dict.fromkeys(['{"prompt": "1+1=", "answer": "2"', '{"prompt": "A", "prompt": "1+1=", "answer": "2"}',
                     "oops", "[" * 100_000], "can't be read")}


def load(path, tokenizer, cfg=CFG, **kwargs) -> list[data.Problem]:
    return data.load_problems([str(path)], tokenizer, cfg, lambda text: None, **kwargs)


@pytest.fixture(scope="session")
def tokenizer(tiny):
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]")
    return tokenizer


@pytest.mark.parametrize("line", READ, ids=range(len(READ)))
@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
def test_a_row_of_every_format_is_read(line, form, tmp_path):
    path, text = tmp_path / f"d.{form}", fill(line)
    if form == "parquet":
        write_parquet(path, text)
    else:
        path.write_text(text + "\n" if form == "jsonl" else f"[{text},\n{text}]")
    found = [r for _, r in rows.problem_rows(str(path), "math")]
    assert {(r.text, r.answer, r.kind) for r in found if r} == {READ[line]} and found[1:] in ([], [None])


def write_parquet(path: Path, line: str) -> None:
    """Writes one row as Parquet. Skips the test if Parquet can't keep this row."""
    row = json.loads(line) if "777" not in line else []
    if not isinstance(row, dict) or any(isinstance(v, list) and v and len({type(x) for x in v}) > 1
                                        for v in row.values()):
        pytest.skip("not a Parquet row")
    parquet.write_table(pa.Table.from_pylist([row]), path)


@pytest.mark.parametrize("line", REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_any_other_row_is_refused_in_one_line_with_file_and_row(line, form, tmp_path):
    good = '{"prompt": "1+1=", "answer": "2"}'
    path, text = tmp_path / f"d.{form}", fill(line)
    path.write_text(f"{good}\n{text}\n{good}\n" if form == "jsonl" else f"[{good}, {text}, {good}]")
    with pytest.raises(UserError) as e:
        list(rows.problem_rows(str(path), "math"))
    message = str(e.value)
    no_json = form == "json" and REFUSED[line] == "can't be read"
    assert message.startswith(str(path) if no_json else f"{path} row 2")
    assert "\n" not in message and len(message) < 500
    assert REFUSED[line] in message and "needed: " in message


@pytest.mark.parametrize("fields,dataset", [
    ("", ""), ('"dataset": "gsm8k"', "gsm8k"), ('"dataset": ["gsm8k"]', "gsm8k"), ('"dataset": " a "', "a"),
    *((f'"dataset": {nothing}', "") for nothing in ("null", '[""]', "[null]")), ('"dataset": 5', None),
    ('"data_source": "openai/gsm8k"', "openai/gsm8k"), ('"dataset": null, "data_source": "d"', "d"),
    ('"dataset": "a", "data_source": "b"', "a"),
    *((f'"{name}": {several}', None) for name in ("dataset", "data_source")
      for several in ('["a", "b"]', '{"name": "a"}', "true", '[["a"]]', "NaN"))])
def test_a_row_names_one_data_set_as_rlvr_or_verl_do(fields, dataset):
    row = json.loads('{"prompt": "1+1=", "answer": "2"%s}' % (fields and f", {fields}"))
    error = pytest.raises(UserError, match="has the data set .*; needed: the name of one data set$")
    with error if dataset is None else nullcontext():
        assert rows.problem_of(row, "row 1").dataset == dataset


def test_parquet_keeps_what_it_can_and_refuses_the_rest(tmp_path):
    """pandas writes a column of integers and nulls as floats, so 2.0 is read as "2"."""
    mixed = [{"prompt": [{"role": "user", "content": Q}], "answer": "2", "choices": None},
             {"prompt": [{"role": None, "from": "human", "value": Q}], "answer": "B",
              "choices": {"A": "x", "B": "y", "C": None}}]
    table = pa.Table.from_pylist(mixed, pa.schema([
        ("prompt", pa.list_(pa.struct([(n, pa.string()) for n in ("role", "content", "from", "value")]))),
        ("answer", pa.string()), ("choices", pa.struct([(n, pa.string()) for n in "ABC"]))]))
    parquet.write_table(table, tmp_path / "mixed.parquet")
    found = [r for _, r in rows.problem_rows(str(tmp_path / "mixed.parquet"), "math")]
    assert [(r.text, r.answer, r.kind) for r in found] == [
        (Q, "2", "math"), (f"{Q}\nA. x\nB. y", "B", "choice")]
    columns = (([2.0, 0.5, float("nan")], ["2", "0.5", None]), ([2, -3, None], ["2", "-3", None]),
               ([Decimal("1.10")] * 3, ["1.10"] * 3))
    for column, expected in columns:
        path = str(tmp_path / "column.parquet")
        parquet.write_table(pa.table({"prompt": [Q, Q + Q, "?"], "answer": column}), path)
        reader = rows.problem_rows(path, "math")
        for want in expected:
            if want is None:
                with pytest.raises(UserError, match=r"\.parquet row 3 has no answer"):
                    next(reader)
            else:
                assert next(reader)[1].answer == want
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="broken.parquet can't be read"):
        list(rows.problem_rows(str(tmp_path / "broken.parquet"), "math"))


GOOD = b'{"prompt": "1+1=", "answer": "2"}'


@pytest.mark.parametrize("form", [pa.ipc.new_stream, pa.ipc.new_file])
@pytest.mark.parametrize("cut,error", [(0, None), (8, "EOF|Invalid"), (264, "EOF|Invalid"), (100, "")])
def test_an_arrow_file_that_was_not_finished_is_refused(cut, error, form, tmp_path):
    """pyarrow reads a stream without its end mark, and without its last rows, as a complete one."""
    path = tmp_path / "d.arrow"
    schema = pa.schema([("prompt", pa.string()), ("answer", pa.string())])
    with pa.OSFile(str(path), "wb") as file, form(file, schema) as writer:
        for text in "12345":
            writer.write_batch(pa.record_batch({"prompt": [text], "answer": ["1"]}, schema))
    path.write_bytes(path.read_bytes()[:-cut or None])
    with pytest.raises(UserError, match=f"d.arrow can't be read .*({error})") if cut else nullcontext():
        assert len(list(rows.problem_rows(str(path), "math"))) == 5


@pytest.mark.parametrize("name,content,numbers", [
    ("d.jsonl", b"\xef\xbb\xbf" + GOOD + b"\n" + GOOD, [1, 2]),
    ("d.json", b"\xef\xbb\xbf[" + GOOD + b"]", [1]),
    ("d.jsonl", b"\n\n" + GOOD + b"\r\n\n" + GOOD + b"\n\n", [3, 5]),  # row number = line number
    ("d.json", b" \n [ " + GOOD + b" ,\n" + GOOD + b" ] \n", [1, 2]),
    ("d.json", GOOD + b"\n" + GOOD, [1, 2]),  # JSON Lines, although the name ends in .json
    ("d.jsonl", '{"prompt": "a\u2028b", "answer": "\u00e9"}'.encode(), [1]),
    ("d.jsonl", b"\xff\xfe" + GOOD.decode().encode("utf-16-le"), "row 1 can't be read"),
    ("d.jsonl", GOOD + b"\n" + GOOD.replace(b"2", b"\xe9"), "row 2 can't be read"),
    ("d.json", b"[" + GOOD + b" " + GOOD + b"]", "can't be read"),
    ("d.json", b"[" + GOOD + b", " + GOOD, "can't be read"), ("d.json", b"[" + GOOD + b",", "can't be read"),
    ("d.json", b"[]", "is empty"), ("d.json", b"\xef\xbb\xbf", "is empty"), ("d.jsonl", b"\n \n", "is empty"),
    ("d.json", b"[" + GOOD + b"] more", "can't be read")])
def test_files_are_read_row_by_row(name, content, numbers, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    if isinstance(numbers, list):
        assert [number for number, _ in rows.problem_rows(str(path), "math")] == numbers
    else:
        with pytest.raises(UserError) as e:
            list(rows.problem_rows(str(path), "math"))
        assert f"{path} {numbers}" in str(e.value) and "\n" not in str(e.value)


def test_the_chat_template_shows_all_turns_up_to_the_question(tokenizer, tmp_path):
    """The assistant's turn after the last question is left out."""
    path = tmp_path / "d.jsonl"
    path.write_text(fill('{"messages": TALK, "answer": "2"}\n') + GOOD.decode())
    talk, plain = load(path, tokenizer, CHAT)
    assert tokenizer.decode(list(talk.ids)) == "[system]Be brief.[user]0+1=[assistant]1[user]1+1=[assistant]"
    for p, turns in ((talk, json.loads(SHORT["TALK"])[:-1]), (plain, [{"role": "user", "content": Q}])):
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert list(p.ids) == ids and p.text == Q
    for template in ("plain", "orz"):
        with pytest.raises(UserError, match=r"row 1: 3 turns come before its problem \(system, user, a"
                                            rf"ssistant\).*--template {template}.*needed: --template chat"):
            load(path, tokenizer, replace(CFG, template=template))
    path.write_text(f'{GOOD.decode()}\n{{"prompt": "raise", "answer": "2"}}\n')
    with pytest.raises(UserError, match="row 2: the chat template refuses its turns"):
        load(path, tokenizer, CHAT)
    path.write_text(fill('{"messages": EMPTY, "answer": "2"}'))  # an empty system turn is no chat
    assert tokenizer.decode(list(load(path, tokenizer)[0].ids)) == "1+1=<think>"
    assert tokenizer.decode(list(load(path, tokenizer, CHAT)[0].ids)) == "[system][user]1+1=[assistant]"
    with pytest.raises(UserError, match="row 1 has an empty system turn in place of --system_prompt; needed"):
        load(path, tokenizer, replace(CHAT, system_prompt="Be brief."))


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
LOSSY = {  # refused chat template -> words of the error, for a row with a --system_prompt
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}": "doesn't show the system turn",
    "{{ messages[0].content }}": "doesn't show the user turn",
    "{{ messages[-1].content[:9] }}": "doesn't show the system turn",
    TURNS + "{{ messages | length + 'x' }}": r"refuses its turns \(TypeError: ",
    TURNS + "{{ messages[0].name.first }}": r"refuses its turns \(UndefinedError: ",
    TURNS + "{{ 1 / (messages | length - 2) }}": r"refuses its turns \(ZeroDivisionError: ",
    TURNS + "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4:
        r"refuses its turns \(TimeoutError: no end after 1 CPU",
    TURNS + "{{ 'a' * 10**10 }}": r"refuses its turns \(ArithmeticError: a power",
    TURNS + "{{ 'a' * 10000000000 }}": r"refuses its turns \(MemoryError",
    TURNS + "{{ [0] * 10000000000 }}": r"refuses its turns \(MemoryError",
    TURNS + "{{ 'a' | center(10000000000) }}": r"refuses its turns \(MemoryError",
    TURNS + "{{ 9**9**9 }}": r"refuses its turns \(ArithmeticError: a power",
    TURNS + "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}":
        r"refuses its turns \((Timeout|Memory|Overflow)Error",
    TURNS + "{% if %}": r"refuses its turns \(TemplateSyntaxError: "}


@pytest.mark.parametrize("template", LOSSY)
def test_a_chat_template_that_fails_is_one_line_with_file_and_row(template, tiny, tmp_path, monkeypatch):
    """Also one that never ends, or needs all memory or an hour of C code."""
    monkeypatch.setattr(data, "TEMPLATE_SECONDS", 1)
    path, tokenizer = tmp_path / "d.jsonl", load_tokenizer(tiny)
    path.write_bytes(b"\n" + GOOD + b"\n")
    cfg = replace(CFG, template="chat", system_prompt="Answer \n in French. ")
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=f"d.jsonl row 2: the chat template {LOSSY[template]}") as e:
        load(path, tokenizer, cfg)
    assert "\n" not in str(e.value) and "needed: " in str(e.value)
    tokenizer.chat_template = TURNS  # a template may remove spaces
    assert tokenizer.decode(load(path, tokenizer, cfg)[0].ids) == "[system]Answer \n in French.[user]1+1="


def test_chat_templates_without_a_default_are_one_line(tiny):
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = {"tool_use": TURNS, "rag": TURNS}
    with pytest.raises(UserError, match="^the chat template can't be read .* no default.*; needed: --templ"):
        data.set_template(tokenizer, CHAT)


@pytest.mark.parametrize("call,shown", [
    ("strftime_now('%d %b')", "26 Jul"), ("strftime_now(\n  \"%d %b\" )", "26 Jul"), ("f(strftime_now)", ""),
    ("strftime_now('%d' ~ ' %b')", None), ("strftime_now(f)", None), ("strftime_now(format='%d %b')", None)])
def test_a_chat_template_shows_the_date_of_the_flag_or_is_refused(call, shown, tiny):
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = f"{{% macro f(x) %}}{{% endmacro %}}{{{{ {call} }}}}"
    error = pytest.raises(UserError, match="^the chat template prints today's date, in a format that is")
    with error if shown is None else nullcontext():
        assert data.set_template(tokenizer, CHAT).date == "2024-07-26" * bool(shown)
        assert tokenizer.apply_chat_template([{}], tokenize=False) == shown


def test_a_long_prompt_is_dropped_before_it_is_tokenized(tokenizer, tmp_path, monkeypatch):
    """With 50 MB instead of this 1 MB, tokenizing would take minutes and gigabytes."""
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+" * 500_000, "answer": "3"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize, lengths, said = type(tokenizer).__call__, [], []

    def spy(self, text, **options):
        lengths.append(len(text))
        return tokenize(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", spy)
    found = data.load_problems([f"{tmp_path}/a.jsonl"], tokenizer, CFG, said.append)
    assert [p.text for p in found] == ["1+1="] and "1 prompts over 4096 tokens" in said[-1]
    assert max(lengths) < 1000


def test_a_template_file_is_text(tokenizer, tmp_path):
    path, template = tmp_path / "d.jsonl", tmp_path / "t.txt"
    path.write_bytes(GOOD)
    template.write_bytes("\ufeffQ: {problem}\r\nA:".encode())
    cfg = replace(CFG, template=str(template))
    assert tokenizer.decode(list(load(path, tokenizer, cfg)[0].ids)) == "Q: 1+1=\nA:"
    template.write_bytes(b"Q: {problem} \xe9")
    with pytest.raises(UserError, match=r"t.txt can't be read .*; needed: a UTF-8 text with \{") as e:
        load(path, tokenizer, cfg)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("template", ["{{ messages[0].content }}<eos>", "plain"])
def test_a_prompt_that_ends_in_the_end_token_is_refused(template, tiny, tmp_path):
    path, tokenizer = tmp_path / "d.jsonl", load_tokenizer(tiny)
    path.write_bytes(GOOD)
    cfg = replace(CFG, template="chat" if "{" in template else template)
    tokenizer.chat_template = template
    if template == "plain":
        assert len(load(path, tokenizer, cfg)) == 1
        eos = tokenizer.eos_token, tokenizer.eos_token_id
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$0 <eos>", special_tokens=[eos])
    with pytest.raises(UserError, match=r"d.jsonl row 1: its prompt ends in the end token '<eos>'; needed: "):
        load(path, tokenizer, cfg)


def random_json(rng: random.Random, depth: int = 0):
    words = ["1+1=", "2", "", " ", "A", "B", "x\ny", "\\boxed{2}", "\\boxed{", "#### 7", "user", "assistant",
             "system", "math", "choice", "é\u2028", "\ud800", "9" * 30]
    names = ["prompt", "problem", "question", "messages", "answer", "final_answer", "ground_truth",
             "solution", "reward_model", "reward", "choices", "options", "role", "content", "from", "value"]
    what = rng.randrange(9 if depth < 4 else 6)
    if what < 4:
        return rng.choice(words)
    if what < 6:
        return rng.choice([None, True, False, 0, 1, 3, -1, 0.5, 1e400, float("nan"), 10**40])
    if what == 6:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(names): random_json(rng, depth + 1) for _ in range(rng.randrange(6))}


def test_any_json_row_is_a_problem_or_an_error_with_file_and_row():
    rng, counts = random.Random(0), Counter()
    for i in range(30_000):
        value = random_json(rng)
        if i % 2:  # nearly a valid row
            choices = rng.choice([["A", "2"], {"A": "x"}, random_json(rng, 3)])
            value = {rng.choice(["prompt", "problem"]): rng.choice([Q, "x\ny", random_json(rng, 3)]),
                     rng.choice(["answer", "solution"]): random_json(rng, 3),
                     rng.choice(["choices", "dataset", "other"]): choices,
                     **(value if isinstance(value, dict) else {})}
        value = json.loads(json.dumps(value))
        try:
            row = rows.problem_of(value, "f.jsonl row 3")
        except UserError as e:
            assert str(e).startswith("f.jsonl row 3") and "\n" not in str(e) and len(str(e)) < 400, value
            counts["refused"] += 1
        else:
            assert type(row.answer) is str and row.answer.strip() and row.text.strip(), value
            assert row.kind in ("math", "choice", "exact"), value
            counts["read"] += 1
    assert min(counts.values()) > 1000, counts


def gold_rows(hopeless: int, count: int, few: int = 7) -> str:
    """few: how many of the good answers are no integers. Only with 0, no answer needs a worker."""
    wrong = {"answer": "no", "reward": "choice"}, {"answer": "$$"}
    bad = [{"prompt": f"p{i}="} | wrong[i % 2 * bool(few)] for i in range(hopeless)]
    kinds = [rf"\frac{{{i}}}{{7}}" for i in (1, 2)] + ["3.5", "x^2+4", "x^2+5", "east_6", "east_7"]
    answers = (kinds[:few] + [str(i) for i in range(count)])[:count - hopeless]
    good = [{"prompt": f"q{i}=", "answer": answer} for i, answer in enumerate(answers)]
    return "".join(json.dumps(row) + "\n" for row in bad + good)


@pytest.fixture(scope="module")
def gold_check(tokenizer):
    """Returns a function: config -> messages of the check of gold answers on one rank."""
    world = dist.World(0, 1, torch.device("cpu"), torch.float32)
    with Grader(workers=1, deadline=20) as grader:
        yield lambda cfg: ranks.gold_messages(cfg, tokenizer, grader, world)


def test_gold_answers_that_cannot_be_graded_end_the_start(base, gold_check, tmp_path, monkeypatch):
    path = tmp_path / "gold.jsonl"
    cfg = replace(base, data=(str(path),), reward=("math",), out=str(tmp_path), go=False, max_prompt_len=64)
    path.write_text(gold_rows(2, 150))
    found, refused = gold_check(cfg)
    assert found == "--data: 2 of 150 gold answers can't be graded: gold.jsonl:1 'no', gold.jsonl:2 '$$'"
    assert refused.startswith(f"refused: {found}; needed: ") and "--go" in refused
    assert gold_check(replace(cfg, go=True)) == [found]
    path.write_text(gold_rows(1, 150))
    (said,) = gold_check(cfg)
    assert said.startswith("--data: 1 of 150")
    assert gold_check(replace(cfg, reward=base.reward)) == []
    monkeypatch.setattr("guard.checks.GOLD_SAMPLE", 100)
    path.write_text(gold_rows(75, 150, few=0))
    sample = gold_check(cfg)
    assert run_ranks(2, ranks.gold_check, cfg) == [sample, sample]
    assert 30 < int(re.match(r"--data: (\d+) of 100 gold answers", sample[0])[1]) < 70


def test_gold_answers_of_evaluation_sets_and_of_a_second_comparison_are_checked(base, gold_check, tmp_path):
    """Gold answers of --data are checked even if only the second term of --reward compares answers."""
    train, test = tmp_path / "gold.jsonl", tmp_path / "held.jsonl"
    train.write_text(gold_rows(0, 10))
    test.write_text(gold_rows(2, 4))
    cfg = replace(base, data=(str(train),), eval_data=(str(test),), reward=("math",), out=str(tmp_path),
                  go=False, max_prompt_len=64)
    bad = "2 of 4 gold answers can't be graded: held.jsonl:1 'no', held.jsonl:2 '$$'"
    told, refused = gold_check(cfg)
    assert told == f"held: {bad}" and refused.startswith(f"refused: {told}; needed: ")
    train.write_text(gold_rows(3, 10))
    said = gold_check(replace(cfg, reward=(base.reward[0], "math")))
    assert said[-1].startswith("refused: --data: 3 of 10 gold answers can't be graded: gold.jsonl:1 'no'")


def test_order_and_batches_are_those_of_earlier_versions():
    cfg = replace(CFG, prompts_per_step=5)
    one = [data.Problem(str(i), (i,), str(i)) for i in range(12)]
    assert [int(p.text) for s in range(4) for p in data.batch_at(one, s, cfg)] == [
        5, 6, 8, 9, 1, 3, 7, 4, 0, 11, 2, 10, 9, 4, 6, 7, 11, 3, 8, 2]
    assert data.batch_at(one, 0, cfg) != data.batch_at(one, 0, replace(cfg, seed=1))
    assert [int(p.text) for p in data.replacement_batch(one, 3, 1, cfg)] == [0, 8, 1, 5, 2]


def test_a_solved_problem_is_not_drawn_again():
    problems = [data.Problem("", (i,), "1", index=i) for i in range(30)]
    cfg, few = replace(CFG, prompts_per_step=5), dict.fromkeys(range(26), 1)
    for step, count in itertools.product(range(9), range(31)):
        solved = {i: step + (i % 3 == 0) for i in range(count)}
        known = {i for i, begin in solved.items() if begin <= step}
        others = data.replacement_batch(problems, step, 0, cfg, solved)
        assert data.batch_at(problems, step, cfg, solved) == [b if a.index in known else a for a, b in zip(
            data.batch_at(problems, step, cfg), others, strict=True)]
        assert len({p.index for p in others}) == 5 and not known & {p.index for p in others}
    assert len({p.index for step in range(1, 60) for p in data.batch_at(problems, step, cfg, few)}) == 30


def test_data_set_file_and_text_are_parts_of_a_problem(tokenizer, tmp_path):
    path, prints = tmp_path / "d.jsonl", set()
    for name in ("", "gsm8k", "ifeval"):
        path.write_text(json.dumps({"prompt": Q, "answer": "2", "dataset": name}))
        prints.add(fingerprint(load(path, tokenizer)))
    assert len(prints) == 3
    problem = data.Problem("", (1,), "1", file="a")
    prints = [fingerprint([replace(problem, **change)]) for change in ({}, {"text": " "}, {"file": "b"})]
    assert prints[0] == prints[2] != prints[1]
    a = {"dataset": "a"}
    marks = [a, {"dataset": "b"}, {"reward": "exact"}, {}, a, {"reward": "math"}]
    path.write_text("\n".join(json.dumps({"prompt": Q, "answer": "2"} | mark) for mark in marks))
    assert [(p.dataset, p.kind) for p in load(path, tokenizer)] == [
        ("a", "math"), ("b", "math"), ("", "exact"), ("", "math")]


def test_a_problem_of_two_files_is_the_first_files(tokenizer, tmp_path):
    rows = [json.dumps({"prompt": str(i), "answer": "1"}) + "\n" for i in range(6)]
    files, told = [str(tmp_path / name) for name in ("0.jsonl", "1.jsonl")], []
    for file, count in zip(files, (5, 6), strict=True):
        Path(file).write_text("".join(rows[:count]))
    problems = data.load_problems(files, tokenizer, CFG, told.append)
    assert [p.where for p in problems] == [*(f"0.jsonl:{i}" for i in range(1, 6)), "1.jsonl:6"]
    assert "6 problems" in told[0] and "dropped 5 repeated rows (the first of each stays)" in told[0]
    assert len(data.load_problems([files[0], files[0]], tokenizer, CFG, told.append)) == 5


def test_evaluation_sets_of_one_name_are_told_apart(tokenizer, tmp_path):
    for folder in ("a/math", "b/math", "b/logic"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "test.jsonl").write_bytes(GOOD)
    paths = [f"{tmp_path}/{name}/test.jsonl" for name in ("a/math", "b/math", "b/logic")]
    sets = rollout.load_sets(replace(CFG, eval_data=tuple(paths)), tokenizer, str)
    assert list(sets) == ["a-math-test", "b-math-test", "b-logic-test"]
    part = "test-00000-of-00001.parquet"
    for files, names in (
            ([f"openai/gsm8k:main/{part}", "x/eval.jsonl"], ["gsm8k-test", "eval"]),
            ([f"openai/gsm8k:main/{part}", f"a/math:{part}"], ["gsm8k-test", "math-test"]),
            ([f"o/gsm8k:{kind}/{part}" for kind in ("main", "socratic")],
             ["main-gsm8k-test", "socratic-gsm8k-test"]),
            ([f"{owner}/math:{part}" for owner in "ab"], ["a-math-test", "b-math-test"]),
            (["aime24/test.jsonl", "math/test.jsonl", "x.json"], ["aime24-test", "math-test", "x"]),
            (["/x.json", "/a/x.json"], ["x", "a-x"]), ([], [])):
        assert rollout.set_names(files) == names
    for twice in ([paths[0], paths[0]], ["d.json", "d.jsonl"]):
        with pytest.raises(UserError, match="two files of --eval_data have the same name"):
            rollout.set_names(twice)


def test_a_prompt_without_room_for_a_response_is_dropped(tokenizer, tmp_path):
    """The prompts have 19, 20 and 21 tokens. The second fills --max_model_len 20, so it is dropped. With
    --eval_response_len 99, evaluations have room for its response. The third exceeds --max_prompt_len."""
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1" * n, "answer": "1"}) + "\n" for n in (18, 19, 20)))
    cfg = replace(CFG, max_prompt_len=20, max_response_len=9, max_model_len=20, eval_data=(str(path),))
    told = []
    kept = data.load_problems([str(path)], tokenizer, cfg, told.append)
    assert [len(p.ids) for p in kept] == [19]
    assert "2 prompts over 19 tokens" in told[0]
    assert len(rollout.load_sets(cfg, tokenizer, str)["d"]) == 1
    assert len(rollout.load_sets(replace(cfg, eval_response_len=99), tokenizer, str)["d"]) == 2
    for short in (dict(max_model_len=12), dict(max_prompt_len=11)):
        with pytest.raises(UserError, match="every prompt of .* has more than 11 tokens"):
            load(path, tokenizer, replace(cfg, **short))


def test_data_sets_of_the_hub_come_from_its_cache(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    revision = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "datasets--openai--gsm8k"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    (folder / "snapshots" / revision / "main").mkdir(parents=True)
    (folder / "snapshots" / revision / "main/train.jsonl").write_bytes(GOOD)
    assert len(load("openai/gsm8k:main/train.jsonl", tokenizer)) == 1
    for missing in ("openai/gsm8k:main/nothing.jsonl", "other/set:train.jsonl"):
        with pytest.raises(UserError, match="needed: .*: hf download --repo-type dataset (openai|other)/.* "):
            rows.local_file(missing)
    for missing in ("runs/missing.jsonl", "openai/gsm8k"):
        with pytest.raises(UserError, match=f"no data file {missing}"):
            load(missing, tokenizer)


def told_of(lines, tokenizer, tmp_path, cfg=CFG):
    """Returns the problems of a file with these rows, and the lines that are said about the file."""
    path, told = tmp_path / "d.jsonl", []
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    problems = data.load_problems([str(path)], tokenizer, cfg, told.append)
    return problems, [line.removeprefix(f"{path}: ") for line in told]


ROW_OF = {"question": "How many are in it?", "answer": "10"}


@pytest.mark.parametrize("name", """body Body passage passages context contexts CONTEXT context_text ctx
    article articles paragraph paragraphs story document documents premise background table image images
    image1 image_2 image_url image_path figure video audio input input_text A e opa option_a optionA choice_b
    c option1 option_10 choice2 answer_choices question_options""".split())
@pytest.mark.parametrize("value", ["A crate holds four pears.", ["a.png"], {"text": "x y"}, 7, "10"])
def test_a_field_of_the_question_that_the_prompt_lacks_is_refused(name, value, tokenizer, tmp_path):
    """The name says that the field belongs to the question: a passage, a picture, a choice in its field."""
    with pytest.raises(UserError) as e:
        told_of([ROW_OF | {"id": 1}, ROW_OF | {name: value}], tokenizer, tmp_path)
    assert re.search(rf"d.jsonl row 2 has a field '{name}' that is in no part of the prompt: .*; needed: its "
                     "text in the problem", str(e.value)) and "\n" not in str(e.value)


@pytest.mark.parametrize("more,error", [
    ({"images": ["a.png"]}, "a field 'images'"), ({"passage": "Two pears."}, "a field 'passage'"),
    ({"tool": "x"}, None), ({"weight": 3, "images": None}, None), ({"name": ""}, "")])
def test_a_field_of_a_turn_is_as_a_field_of_the_row(more, error, tokenizer, tmp_path):
    row = {"prompt": [{"role": "user", "content": Q} | more], "answer": "2"}
    with pytest.raises(UserError, match=error) if error else nullcontext():
        *lines, _ = told_of([row], tokenizer, tmp_path)[1]
        told = f"fields that no prompt shows, and their numbers of rows: '{next(iter(more))}' (1)"
        assert lines == ([told] if error is None else [])


@pytest.mark.parametrize("row,told", [
    ({"answer": {"value": "10", "aliases": ["ten"]}}, "'aliases' (1)"),  # TriviaQA
    ({"answer": None, "reward_model": {"ground_truth": "10", "style": "rule", "error": 1}}, "'error' (1)"),
    ({"messages": json.loads(said(("system", "Base 7."), ("user", ROW_OF["question"]), ("assistant", "x")))},
     "'messages: system' (1)"),
    ({"messages": json.loads(said(("user", ROW_OF["question"]), ("assistant", "x")))}, None),  # NuminaMath
    ({"choices": ["10", "11"], "reward": "math"}, "'choices' (1)"),
    ({"choices": {"text": ["10", "11"], "label": ["1", "2"]}}, None)])
def test_parts_of_a_row_that_neither_prompt_nor_grader_reads_are_told(row, told, tokenizer, tmp_path):
    *lines, _ = told_of([ROW_OF | row], tokenizer, tmp_path)[1]
    assert lines == [f"fields that no prompt shows, and their numbers of rows: {told}"] * bool(told)


@pytest.mark.parametrize("row", [
    {"passage": "Two   pears.\n", "question": "Two pears. How many?"}, {"passage": None}, {"passage": ""},
    {"passage": " \n"}, {"passage": False}, {"passage": []}, {"passage": {}}, {"passage": float("nan")},
    {"passage": [None, ""]},
    {"context": ["Two", "are in"], "question": "Two are in it. How many?"}, {"images": []}, {"A": None},
    {"choices": {"A": "10", "B": "11"}, "A": "10", "B": "11", "answer": "A"}, {"contextual": "x"},
    {"choices": ["A) 10", "B) 11"], "answer": "B"},
    {"prompt": [{"role": "system", "content": "Two pears."}, {"role": "user", "content": "How many?"}],
     "body": "Two pears."}])
def test_a_field_that_the_prompt_shows_or_that_is_empty_is_read(row, tokenizer, tmp_path):
    told_of([ROW_OF | row], tokenizer, tmp_path, CHAT)


@pytest.mark.parametrize("row,differs", [
    ({"answer": "41", "ground_truth": "42"}, True), ({"answer": "41", "solution": r"So \boxed{42}."}, True),
    ({"answer": "42", "reward_model": {"ground_truth": "41"}}, True), ({"answer": "42"}, False),
    ({"answer": r"\frac{1}{2}", "solution": r"So \boxed{0.5}."}, False),
    ({"answer": "41", "solution": "So it is 42."}, False),  # a solution without a box may be anything
    ({"answer": 42, "ground_truth": ["42"], "solution": "We add.\n#### 42"}, False),
    ({"choices": ["41", "42"], "answer": 1, "solution": r"So \boxed{B}."}, False),
    ({"choices": ["41", "42"], "answer": 1, "ground_truth": "A"}, True),
    ({"choices": ["41", "42"], "answerKey": "B", "solution": r"So \boxed{41}."}, True),
    ({"choices": ["41", "42"], "answerKey": "B", "solution": "We add, so it is 42."}, False)])
def test_gold_answers_that_differ_are_told(row, differs, tokenizer, tmp_path):
    _, (*lines, _) = told_of([ROW_OF | {"answer": "7"}, {"prompt": "40+2="} | row], tokenizer, tmp_path)
    assert lines == ["two fields have different gold answers in 1 of 2 rows, first in row 2"] * differs


def test_only_fields_without_a_known_meaning_are_told(tokenizer, tmp_path):
    quiet = """id ID idx index uuid problem_id unique_id source sources data_source source_dataset url level
        difficulty type problem_type question_type subject topic category domain tags split license language
        ability style extra_info metadata model llama8b_solve_rate pass_rate score correctness_count
        is_reasoning_complete correctness_math_verify solution rationale explanation generations
        answer_type cot_content finish_reasons solution_is_valid synthetic date meta ground_truth label"""
    told = ("question_concat unit hint facts system_prompt equation name source_text message mc_choices "
            "answer_unit output_format")
    fields = {name: "not shown" for name in f"{quiet} {told}".split()} | {"ground_truth": ROW_OF["answer"]}
    rows = [ROW_OF | {"question": f"{i}?"} | (fields if i % 2 else {}) for i in range(8)]
    rows[0]["prompt"] = "the problem, and not the question"
    _, (line, _) = told_of(rows, tokenizer, tmp_path)
    shown = ", ".join(["'question' (1)", *(f"'{name}' (4)" for name in told.split())])
    assert line == f"fields that no prompt shows, and their numbers of rows: {shown}"


def test_rows_that_differ_in_a_field_of_their_own_are_no_repeats(tokenizer, tmp_path):
    """"cm" in the question does not make the unit "m" shown. With keep_fields, ids differ too."""
    units = ["km", "m", "km", None, "m"]
    rows = [ROW_OF | {"question": "In cm?", "unit": unit, "id": i} for i, unit in enumerate(units)]
    problems, told = told_of([*rows, rows[0]], tokenizer, tmp_path)
    assert [p.row for p in problems] == [1, 2, 4] and "dropped 3 repeated rows" in told[-1]
    kept = load(tmp_path / "d.jsonl", tokenizer, keep_fields=True)
    assert [p.row for p in kept] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("lines,words", [
    ([{"prompt": "1", "answer": None}, {"prompt": ""}, "{", {"prompt": "1", "answer": "2", "reward": "x"}],
     ["row 2 has no answer", "row 3 has no problem", "row 4 can't be read (JSONDecodeError: Expecting "
      "property name enclosed in double quotes", "row 5 has the unknown reward 'x'"]),
    (['{"prompt": "1+1=",\t"answer" "2"}'],
     ["row 2 can't be read", "Expecting ':' delimiter: line 1 column 29"]),
    (['{"prompt": "1+1=\\ud800", "answer": "2"}'], ["row 2: its text can't be tokenized"]),
    ([{"prompt": str(i)} for i in range(30)], [f"row {i} has no answer" for i in range(2, 12)])])
def test_the_first_ten_wrong_rows_are_in_one_message(lines, words, tokenizer, tmp_path):
    with pytest.raises(UserError) as e:
        told_of([GOOD.decode(), *lines], tokenizer, tmp_path)
    message = str(e.value)
    assert re.findall(r"row \d+", message) == re.findall(r"row \d+", " ".join(words))
    assert all(word in message for word in words) and message.count("; needed: ") == 1 and "\n" not in message


OTHER_CHOICES = {  # row -> (choices, answer)
    '"options": {"A":"1","B":"2"},"label":"B","answer":null': ("A. 1\nB. 2", "B"),
    '"options": ["(A)1","(B)2"], "label": "B"': ("(A)1\n(B)2", "B"),  # AGIEval
    '"choices": {"A": "3", "B": "4"}, "answer": 1': ("A. 3\nB. 4", "B"),
    '"choices": {"A": 0, "B": 1}, "answer": "A"': ("A. 0\nB. 1", "A"),
    '"choices": {"text": ["5", "2"], "label": ["A", "B"]}, "answerKey": "B"': ("A. 5\nB. 2", "B"),  # ARC
    '"choices": {"text": ["5", "2"], "label": ["1", "2"]}, "answerKey": "2"': ("A. 5\nB. 2", "B"),
    '"choices": {"text": ["B", "2"], "label": ["A", "B"]}, "answerKey": "B"': ("A. B\nB. 2", "B"),
    '"choices": [{"label": "A", "text": "5"}, {"label": "B", "text": "2"}], "answerKey": "B"':
        ("A. 5\nB. 2", "B"),
    '"choices": {"A": "5", "B": NaN, "C": "2"}, "answer": "C"': ("A. 5\nC. 2", "C"),
    '"choices": ["5", "2"], "label": 1': ("A. 5\nB. 2", "B"),
    **{f'"choices": {x}, "answer": "A"': f"one that is not a text (found: {found}" for x, found in {
        '[NaN, "I", "II"]': "[nan, 'I', 'II']", '"A) 3 B) 4"': "'A) 3 B) 4'", '["1", null]': "['1', None]",
        '{"text": ["5", "2"], "label": ["0", "1"]}': "{'text': ['5', '2'], 'label': ['0', '1']}",
        '{"text": ["5", "2"], "label": ["A"]}': "{'text'", '{"text": ["5", "2"]}': "{'text'",
        '[{"label": "A", "text": "5"}, {"label": "A", "text": "2"}]': "[{'label'", '[["5"], ["2"]]': "[['5']",
        '[{"text": "5"}, {"text": "2"}]': "[{'text'", '["5", {"text": "2"}]': "['5', {'text'",
        '5': "5", 'true': "True"}.items()},
    '"options": {"A":"1","B":"2"},"label":null': "has the answer None, which fits 0 of its choices",
    '"choices": {"text": ["5", "2"], "label": ["1", "2"]}, "answerKey": 1': "the answer 1, which fits 2",
    '"choices": {"text": ["2", "5"], "label": ["1", "2"]}, "answer": "2"': "fits 2 of its choices",
    '"choices": {"text": ["B", "2"], "label": ["A", "B"]}, "answer": "B"': "fits 2 of its choices",
    '"choices": {"text": ["2", "5"], "label": ["1", "2"]}, "answer": "5"': ("A. 2\nB. 5", "B"),
    '"label": "B"': "has no answer"}


@pytest.mark.parametrize("line", OTHER_CHOICES)
def test_choices_of_other_formats_are_read_or_named(line, tokenizer, tmp_path):
    want, found = OTHER_CHOICES[line], []
    error = pytest.raises(UserError, match=re.escape(want)) if isinstance(want, str) else nullcontext()
    with error:
        found, told = told_of([f'{{"question": "1+1=", {line}}}'], tokenizer, tmp_path)
    if found:
        assert (found[0].text, found[0].answer) == (f"1+1=\n{want[0]}", want[1]) and len(told) == 1


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
def test_copied_rows_cost_little(form, tokenizer, tmp_path, monkeypatch):
    """Of 40 copies of 300 rows, only the first is read as a problem."""
    path, told = tmp_path / f"d.{form}", []
    made = [{"prompt": [{"role": "user", "content": f"{i} " + "x y " * 80}], "id": f"uuid-{i}",
             "reward_model": {"ground_truth": str(i), "style": "rule"}} for i in range(300)] * 40
    if form == "parquet":
        parquet.write_table(pa.Table.from_pylist(made), path)
    else:
        text = "\n".join(map(json.dumps, made)) if form == "jsonl" else json.dumps(made)
        path.write_text(text)
    read, problem_of = [], rows.problem_of
    monkeypatch.setattr(rows, "problem_of", lambda row, *rest: read.append(row) or problem_of(row, *rest))
    problems = data.load_problems([str(path)], tokenizer, CFG, told.append)
    assert len(problems) == 300 and len(read) in (300, 301) and "dropped 11700 repeated rows" in told[-1]
    if form == "jsonl":
        monkeypatch.undo()
        tracemalloc.start()
        data.load_problems([str(path)], tokenizer, CFG, told.append)
        assert tracemalloc.get_traced_memory()[1] < 4e6
        tracemalloc.stop()


PLACEHOLDERS = ["proof", "Proof", "proof.", "notfound", "NotFound", "not found", r"\text{proof}", "$proof$",
                "N/A", "n/a", "nan", "null", "None", "???", "...", "…", "--", "[missing]", "<answer>",
                "see solution", "See the solution above", "No answer", "TBD", r"\boxed{proof}", "(proof)",
                "not_available", "todo", "<answer> 3 </answer>", '{"value": "4"}', "{'inputs': ['1']}",
                "If he is in 5th place, then 4 people crossed the line before him. So the number of people "
                "who crossed the finish line faster than he did is 4."]
REAL = ["-", "+", "<", "=", r"\infty", "∞", r"\emptyset", "∅", "Na", "undefined", "no solution", "()", "0",
        "N", "proofs", "na", "x_n", "nano", r"\text{nanometer}", "unknown", "yes", "?x", "1..2",
        "{1: 2}", r"\{'a','b'\}", "<3", "Alice wins if $n$ is even, and Bob wins if all the others are odd"]


@pytest.mark.parametrize("text", [*PLACEHOLDERS, *REAL])
def test_a_placeholder_or_a_solution_as_gold_answer_cannot_be_graded(text):
    problem = data.Problem("p", (1,), text)
    with Grader(workers=1, deadline=20) as grader:
        grader.submit = lambda *rest: None  # what a worker says of the text is no matter here
        assert checks.ungradable([problem], [0], grader) == ([0] if text in PLACEHOLDERS else [])
        assert checks.ungradable([replace(problem, kind="exact")], [0], grader) == []


def test_odd_gold_answers_are_told(base, gold_check, tmp_path):
    path = tmp_path / "g.jsonl"
    cfg = replace(base, data=(str(path),), reward=("math",), out=str(tmp_path), go=False, max_prompt_len=64)

    def said(*answers, kind="math"):
        path.write_text("".join(json.dumps({"prompt": f"{i // 2 if a[0] == '*' else i}=", "reward": kind,
                                            "answer": a.strip("*")}) + "\n" for i, a in enumerate(answers)))
        return gold_check(cfg)

    many = [str(i) for i in range(200)]
    assert said(*many) == said(*many, "7", "8", "9") == []
    assert said("*1", "*2", *many) == ["--data: 1 prompts have several gold answers, such as ['1', '2']"]
    assert said("*1", "*1", *many[4:]) == []  # the second row is a repeat
    assert said(*many, *["yes"] * 11) == ["--data: the gold answer of 11 of 211 problems is 'yes'"]
    assert said(*many, *["yes"] * 10) == [] == said(*["A"] * 90, kind="choice")
    *told, refused = said(*many, "proof", "proof", "notfound")
    assert told == ["--data: 3 of 203 gold answers can't be graded: g.jsonl:201 'proof', g.jsonl:202 'proof'"
                    ", g.jsonl:203 'notfound'"] and refused.startswith("refused: --data: 3 of 203")
    assert said(*many, "proof") == ["--data: 1 of 201 gold answers can't be graded: g.jsonl:201 'proof'"]


@pytest.mark.parametrize("text,told", [
    ("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n", True), ("[INST] 1+1= [/INST]", True),
    ("<start_of_turn>user\n1+1=", True), ("<|start_header_id|>user<|end_header_id|>", True),
    ("[{'role': 'user', 'content': '1+1='}]", True), ('[{"from": "human", "value": "1+1="}]', True),
    ("1<eos>2", True), ("<pad>1", True), ("<|endoftext|>", True), ("|x| < 3 and |y| > 2", False),
    ("a <| b |> c", False), ("[1, 2]", False), ("<think>", False), ("x<y>z", False), ("<|a b|>", False)])
def test_special_tokens_and_chat_markup_in_a_problem_are_told(text, told, tokenizer, tmp_path):
    _, lines = told_of([GOOD.decode(), {"prompt": text, "answer": "2"}], tokenizer, tmp_path)
    line = "the problem has chat markup or special tokens in 1 of 2 rows, first in row 2"
    assert lines[:-1] == [line] * told


@pytest.mark.parametrize("template,twice", [
    ("<pad>{problem}<think>", True), ("{problem}<think>", False), ("Q <pad>{problem}", False),
    ("chat", False), ("own", True)])
def test_two_tokens_at_the_start_of_a_prompt_are_refused(template, twice, tiny, tmp_path):
    """The tokenizer adds <pad> as its first token. A chat template adds it itself."""
    (tmp_path / "t.txt").write_text(template)
    path, tokenizer = tmp_path / "d.jsonl", load_tokenizer(tiny)
    path.write_bytes(GOOD)
    tokenizer.bos_token = "<pad>"
    tokenizer.chat_template = "<pad>" * (1 + twice) + "{{ messages[0].content }}"
    pad = tokenizer.pad_token, tokenizer.pad_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<pad> $0", special_tokens=[pad])
    cfg = replace(CFG, template="chat" if template in ("chat", "own") else str(tmp_path / "t.txt"))
    error = pytest.raises(UserError, match="d.jsonl row 1: its prompt begins with '<pad>' twice; needed: ")
    with error if twice else nullcontext():
        assert load(path, tokenizer, cfg)[0].ids[0] == tokenizer.pad_token_id


def test_a_token_beyond_the_embedding_is_refused_with_file_and_row(tokenizer, tiny, tmp_path):
    path, size = tmp_path / "d.jsonl", load_config(tiny).vocab_size
    longer = load_tokenizer(tiny)
    longer.add_special_tokens({"additional_special_tokens": [f"<r{i}>" for i in range(size)]})
    for text in ("1", "<r0>", f"1<r{size - 1}>2"):
        path.write_text(GOOD.decode() + "\n" + json.dumps({"prompt": text, "answer": "1"}))
        problems = load(path, longer)
        high = max(problems[1].ids) >= size
        assert high == ("<r" in text)
        with pytest.raises(UserError, match=r"d.jsonl row 2: its prompt has the token \d+, and the model's "
                                            rf"embedding has {size} tokens; ") if high else nullcontext():
            rollout.check_tokens([problems], load_config(tiny))
    rollout.check_tokens([[]], load_config(tiny))
