r"""Tests of the Grader and of custom rewards."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run, run_ranks, wait_until

import dist
import reward
import train
from configs import PRESETS, parse
from data import Problem, Sample
from grading import worker
from grading.answers import grade
from grading.extract import extract_answer
from grading.worker import Grade, Grader
from guard.checks import ungradable
from guard.messages import UserError
from reward import check_functions, think_then_answer
from rollout import make_grader, sample_row

SLOW = "def score(response, answer, kind):\n    time.sleep(float(response))\n    return 1"


def boxed(answer: str) -> str:
    return rf" so it is clear.</think> <answer> The answer is \boxed{{{answer}}}. </answer>"


def children(pid: int = 0) -> set[int]:
    below, found = {}, set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            below.setdefault(int(parent), set()).add(int(stat.parent.name))
    stack = [pid or os.getpid()]
    while stack:
        new = below.get(stack.pop(), set())
        found |= new
        stack += new
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ready(grader: Grader, spec: str) -> bool:
    """Waits for the Grader's server. Returns whether the reward function `spec` ran."""
    grader.submit("ready", "0", "", True, custom=spec)
    return grader.results()["ready"].reason != "error"


def graded(grader: Grader) -> int:
    grader._read(0)
    return len(grader._grades)


def server_of(grader: Grader) -> subprocess.Popen:
    """Returns the process of the first function's server."""
    return grader.servers[0].process


@pytest.fixture(scope="module")
def grader():
    """Returns a Grader for all tests of this file. When closed, it must leave no open file and no process."""
    handles, processes = len(os.listdir("/proc/self/fd")), children()
    with Grader(workers=4, deadline=1.0) as grader:
        yield grader
    # Fewer if files of other tests were closed
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= handles)
    assert children() == processes


@pytest.fixture
def custom(tmp_path):
    """Returns a function that writes a custom reward to mine.py and returns "PATH/mine.py:score"."""
    def write(body: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text("import os, time\n\n\n" + textwrap.dedent(body))
        return f"{path}:score"
    return write


# --- extraction

@pytest.mark.parametrize(("text", "answer"), [
    (r"<answer>\boxed{5}</answer>", "5"), ("<answer>\n so \\boxed{\n5\n}\n</answer>", "5"),
    (r"<answer>\boxed{1}</answer><answer>\boxed{2}</answer>", "2"),
    (r"<answer>\boxed{1}</answer><answer>none</answer>", "1"),  # only a block with a box counts
    (r"<answer>\boxed{1} or \boxed{2}</answer>", "2"),
    (r"<answer>\boxed{\frac{1}{2}}</answer>", r"\frac{1}{2}"),
    (r"<answer>\boxed{\{1,2\}}</answer>", r"\{1,2\}"),
    (r"<answer>\boxed{\left\{x\right.}</answer>", r"\left\{x\right."),  # an escaped brace opens no group
    (r"<answer>\boxed{1} \boxed{2</answer>", "1"),  # only a box with balanced braces counts
    (r"<answer>\boxed{7 \boxed{5}}</answer>", "5"), (r"<answer>} \boxed{5} {</answer>", "5"),
    (r"<answer>\\boxed{5}</answer>", "5"), (r"<answer>\boxed {5}</answer>", "5"),
    (r"<answer>\boxed{a\\{b}}</answer>", r"a\\{b}"), (r"<answer><answer>\boxed{5}</answer></answer>", "5"),
    (r"use <answer> answer here </answer>: <answer>\boxed{5}</answer>", "5"),
    (r"<answer>\boxed{}</answer>", None), (r"<answer>\boxed{ }</answer>", None), (r"<answer>\boxed{5}", None),
    (r"\boxed{5}</answer>", None), (r"\boxed{5}", None), (r"</answer>\boxed{5}<answer>", None),
    (r"<answer>\boxed{6</answer>}", None), (r"<answer>5</answer> \boxed{5}", None),
    (r"<answer>\fbox{5}</answer>", None), ("", None)])
def test_the_last_box_of_the_last_answer_is_extracted(text, answer):
    assert extract_answer(text) == answer


# --- choices and exact answers


def test_a_choice_is_one_letter():
    for answer in ("D", "d", "(D)", "D.", r"\text{D}", r"\textbf{(D)}", " D ",
                   "Option D", "choice D", "D. 15", "D) 15", "(D) 15"):
        assert grade(answer, "D", "choice") is True, answer
    for answer in ("C", "D)", "D or C", "DD", "ABCD", "4", r"\text{D} \text{C}", "The D", "",
                   "wrong choice D", "A choice D", "C. 15", "(D) 15 or C", "(D) 15 (C) 16", "D. is wrong"):
        assert grade(answer, "D", "choice") is False, answer
    assert grade("D", "(D)", "choice") and not grade("", "", "choice")


def test_exact_is_equal_text_and_an_unknown_kind_is_an_error(grader):
    assert grade(" a b ", "a b", "exact") and not grade("A", "a", "exact") and not grade("1.0", "1", "exact")
    assert not grade("", "", "exact") and not grade(" ", "") and not grade("", "5")
    with pytest.raises(UserError, match="maths.*needed: one of math, choice, exact"):
        grade("1", "1", "maths")
    with pytest.raises(UserError, match="answer kind 'vibes' is unknown; needed: one of math"):
        grader.submit(0, boxed("2"), "1", True, "vibes")
    assert grader.results() == {}


@pytest.mark.parametrize("name,kind", [("aime2024", "math"), ("gpqa_diamond", "choice"), ("math500", "math")])
def test_gold_answers_equal_only_themselves(grader, name, kind):
    golds = [row["final_answer"] for row in json.loads((ROOT / "eval_sets" / f"{name}.json").read_text())]
    for i, gold in enumerate(golds):
        grader.submit(i, boxed(gold), gold, True, kind)
    assert [g.reason for _, g in sorted(grader.results().items())] == ["correct"] * len(golds)
    assert not ungradable([Problem("?", (1,), gold, kind) for gold in golds], range(len(golds)), grader)
    some = set(golds) if name != "math500" else ()
    assert all(grade(a, b, kind) == (a.lstrip("0") == b.lstrip("0")) for a in some for b in some)


# --- the Grader

def test_waiting_in_the_queue_does_not_count(custom):
    """One worker needs 3 s for all 12 answers. The time limit of each answer is 2 s."""
    assert worker.WALL == 4
    spec = custom(SLOW)
    with Grader(workers=1, deadline=0.5, customs=[spec]) as grader:
        for i in range(12):
            grader.submit(i, "0.25", str(i), True, custom=spec)
        assert {g.reason for g in grader.results().values()} == {"correct"}


def test_equal_answers_are_graded_once_and_each_grade_is_returned_once(grader):
    server = grader.comparisons
    grader.submit("warm", boxed("x+1"), "1+x", True)
    grader.results()
    os.kill(server.process.pid, signal.SIGSTOP)  # so no grade arrives before all answers are submitted
    before = server.count
    for i in range(500):
        grader.submit(i, boxed(r"\sqrt{12345}"), r"\sqrt{12345} + 0", True)
    os.kill(server.process.pid, signal.SIGCONT)
    assert grader.results() == dict.fromkeys(range(500), Grade(1.0, "correct", r"\sqrt{12345}"))
    assert server.count == before + 1 and grader.results() == {}


def test_each_reason_occurs(grader, custom):
    grader.submit("correct", boxed("x+1"), "1+x", True)
    grader.submit("wrong", boxed("x+2"), "1+x", True)
    grader.submit("repeats", boxed(r"\sqrt{242}"), r"11\sqrt2", True, problem=r"Simplify $\sqrt{242}$.")
    grader.submit("unparsed", "no idea", "1", True)
    grader.submit("long", boxed("1" * (worker.MAX_ANSWER + 1)), "1", True)
    grader.submit("truncated", boxed("5"), "5", False)
    grader.submit("too large", boxed("9^{9^{9^9}}"), "2^{99}", True)
    grader.submit("error", boxed("x+1"), "$ $", True)  # an unreadable gold answer
    grades = grader.results()
    assert grades.pop("long").reason == "unparsed"
    assert grades.pop("repeats").reason == grades.pop("too large").reason == "wrong"
    # No comparison of answers is late; a user's function may be (see below).
    assert {key: g.reason for key, g in grades.items()} == {
        reason: reason for reason in worker.REASONS if reason not in ("partial", "timeout")}
    assert {key for key, g in grades.items() if g.reward} == {"correct"}
    assert "gold answer" in grader.errors["ValueError", ""]


def hostile() -> list[str]:
    towers = [f"9^{{{'9^{' * k}9{'}' * k}}}" for k in range(2, 4)] + ["7^{99999999999}"]
    towers += [r"1000000000!", r"\binom{10^9}{5 \cdot 10^8}", r"\sum_{n=1}^{10^{12}} \frac{1}{n^2}"]
    pairs = (("{", "}"), ("(", ")"), ("|", "|"), (r"\sqrt{", "}"), (r"\frac{1}{", "}"), ("x^{", "}"),
             (r"\left(", r"\right)"))
    deep = [left * n + "7" + right * n for n in (20, 300) for left, right in pairs]
    endless = [r"\frac{1}{2+" * n + "3" + "}" * n for n in (10, 200)] + ["1+" * n + "7" for n in (20, 900)]
    bytes_ = ["\0", "7\0", "\0" * 1000, "\ud800", "7\udcff", "\udc80" * 500, "\ufffd7", "\udcc3(", "\u202e7",
              "\r\n7\n8", "\x1b[2J", "\uff17\uff18", "\u0663", "7\u0301"]
    big = ["{" * 100_000, "}" * 100_000, "{}" * 50_000, "7" * 100_000, r"\boxed{" * 10_000,
           " " * 100_000 + "8"]
    code = ["__import__('os').system('exit 1')", r"\input{/etc/passwd}", "exit()", "lambda: 0", "[7]*10**9",
            "$(id)", "7; drop table", "os.abort()", r"\def\a{\a\a}\a", "{{7*8}}", "None", "nan", "inf",
            r"\infty", "1/0", "0^0"]
    odd = [f"{mark}{k}{mark}" for mark in "^_&#~=<,;:!%\\'\"|" for k in range(8, 18)]
    cases = towers + deep + endless + bytes_ + big + code + odd
    return cases[:200]


def test_hostile_answers_end_within_the_deadline():
    cases = hostile()
    assert len(cases) == len(set(cases)) == 200
    with Grader(workers=2, deadline=0.4) as grader:
        for i, answer in enumerate(cases):
            grader.submit(i, f"<answer>\\boxed{{{answer}}}</answer>", "7+x", True)
        reasons = {i: g.reason for i, g in grader.results().items()}
        bad = {cases[i][:60]: r for i, r in reasons.items() if r not in ("timeout", "unparsed", "wrong")}
        assert not bad, (bad, grader.errors)
        grader.submit("after", boxed("x+7"), "7+x", True)
        assert grader.results()["after"].reason == "correct"


# --- custom rewards

@pytest.mark.parametrize(("spec", "message"), [
    ("score", "can't use score .*; needed: path/to/file.py:function"), ("mine.py", "can't use mine.py "),
    ("mine.txt:score", "can't use .*No such file"),
    ("{dir}/mine.py:", r"no function ''\); needed: path/to/file.py:function"),
    ("{dir}/mine.py:scor", r"no function 'scor' \(did you mean score\?\)\); needed: path/to"),
    ("{dir}/bad.py:score", r"can't use .*bad.py, line 1"),
    ("{dir}/verl.py:score", "(missing a required argument: 'data_source'|rename solution_str to response)"),
    ("{dir}/any.py:score", "unexpected keyword argument"),
    ("{dir}/raises.py:score", r"can't use .*RuntimeError: at import \(.*/raises.py, line 2\)"),
    ("{dir}/leaves.py:score", r"can't use /.*SystemExit: 0 \(.*/leaves.py, line 1\)"),
    ("{dir}/dies.py:score", "can't use .*its import ended"),
    ("{dir}/kind.py:score", "score is a class; only --env may be one"),
    ("{dir}/names.py:score", "can't use .*missing a required argument"),
    ("{dir}/endless.py:score", "can't use .*seconds = inf, not a number from 0 to 1e7")])
def test_a_wrong_spec_is_a_user_error_of_one_line(custom, tmp_path, spec, message):
    """If the parameters are wrong, also as an environment, which may have others."""
    custom("def score(response, answer, kind): return 1")
    files = {"bad": "def score(", "any": "def score(*args): return 1", "leaves": "raise SystemExit(0)",
             "verl": "def score(data_source, solution_str, ground_truth): return 1",
             "raises": "\nraise RuntimeError('at import')", "dies": "import os\nos._exit(7)",
             "endless": "seconds = float('inf')\ndef score(response): return 1",
             "names": "def score(response, row, other, one): return 1", "kind": "class score: pass"}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    spec = spec.format(dir=tmp_path)
    for roles in (dict(customs=[spec]), dict(env=spec))[:1 + ("argument" in message)]:
        with pytest.raises(UserError, match=message) as error:
            Grader(**roles)
        assert "\n" not in str(error.value)


def test_custom_reward(custom):
    """If a custom reward raises, exits or crashes, only the current answer fails."""
    spec = custom("""
        def score(response, answer, kind):
            print("this must not mix with the replies")
            if response == "raise":
                raise LookupError("a\\n\\n  b\\u2028c")
            if response.startswith("exit"):
                os._exit(int(response[4:]))
            if response.startswith("signal"):
                os.kill(os.getpid(), int(response[6:]))
            if response == "hang":
                time.sleep(60)
            if response == "leave":
                raise SystemExit(1)
            if response.startswith("return "):
                return eval(response[7:])
            return len(response) / 10 if (answer, kind) == ("gold", "essay") else -1
    """)
    want = {"raise": "error", "exit 0": "error", "exit 3": "error", "exit 255": "error", "signal 9": "error",
            "signal 11": "error", "hang": "timeout", "leave": "error",
            "return None": "error", "return 'x'": "error", "return True": "correct", "12345": "partial",
            "": "wrong", "return 3.4028234e38": "correct",  # the largest float32
            **{f"return {x}": "error" for x in ("1e39", "-1e39", "10**400", "float('inf')", "float('nan')")}}
    with Grader(workers=2, deadline=0.5, customs=[spec]) as grader:
        for response in want:
            grader.submit(response, response, "gold", True, "essay", custom=spec)
        # The length limit cut these, and in "other kind" below the same response ended.
        for response, kind in (("12345", "essay"), ("12345", "math"), ("raise", "essay"), ("hang", "essay")):
            grader.submit(("cut", response, kind), response, "gold", False, kind, custom=spec)
        grader.submit("boxed", boxed("5"), "gold", True, "essay", custom=spec)
        grader.submit("other kind", "12345", "gold", True, "math", custom=spec)
        grader.submit("big", "\0\ud800" * 50_000, "gold", True, "essay", custom=spec)
        grades = grader.results()
    assert {r: grades[r].reason for r in want} == want
    rewards = {k: grades[k].reward for k in ("12345", "return True", "other kind", "big")}
    assert rewards == {"12345": 0.5, "return True": 1.0, "other kind": -1.0, "big": 10_000.0}
    # A cut response earns nothing and escapes no penalty. It has no answer, so no vote in the metric maj@n.
    assert {k[1:]: g for k, g in grades.items() if "cut" in k} == {
        ("12345", "essay"): Grade(0.0, "truncated", None), ("12345", "math"): Grade(-1.0, "truncated", None),
        ("raise", "essay"): Grade(0.0, "error", None), ("hang", "essay"): Grade(0.0, "timeout", None)}
    assert grades["boxed"].answer == "5" and grades["other kind"].reason == "wrong"
    assert all(g.reward == 0 for g in grades.values() if g.reason in ("error", "timeout"))
    assert grades["return 3.4028234e38"].reward == 3.4028234e38
    assert f"LookupError: a b c ({spec[:-6]}, line 8)" in grader.new_errors()
    assert grader.errors["timeout", spec] == (
        f"Timeout: a call of {spec} took too long; needed: a larger --grade_deadline, or `seconds = …` in "
        "its file")
    assert re.match("WorkerDied: the process ended with status (0|3|255|-9|-11) while grading",
                    grader.errors["WorkerDied", spec])
    assert {kind for kind, _ in grader.errors} == {
        "LookupError", "WorkerDied", "SystemExit", "ValueError", "TypeError", "OverflowError", "timeout"}


# A reward file (mine.py) and its imports. mine.py must not get torz's own configs.py, guard and answers.py.
SIBLINGS = {
    "utils.py": "VALUE = {n}", "package/__init__.py": "", "package/part.py": "VALUE = {n}",
    "folder/part.py": "VALUE = {n}", "late.py": "VALUE = {n}", "configs.py": "VALUE = {n}",
    "guard.py": "VALUE = {n}", "answers.py": "from configs import VALUE", "mine.py": """
import answers
import guard
import package.part
import utils
from folder import part
def score(response, answer, kind):
    import late
    values = {{answers.VALUE, guard.VALUE, package.part.VALUE, utils.VALUE, part.VALUE, late.VALUE}}
    return values.pop() if len(values) == 1 else -1
"""}


def with_siblings(folder) -> list[str]:
    """Writes two reward files and the modules beside each. Returns their functions."""
    for n, name in enumerate(("a", "b"), 1):
        for file, text in SIBLINGS.items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(n=n))
    return [f"{folder}/{name}/mine.py:score" for name in "ab"]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """Grades with reward functions that disturb each other, or would if they could. All have one Grader,
    whose comparisons must be right, too. Returns (kind of function, its number) -> grades; the Grader's
    errors; and whether a user's file stood in for a module of the standard library."""
    folder, found = tmp_path_factory.mktemp("crowd"), {}
    specs = {"siblings": with_siblings(folder), "shadowed": with_shadows(folder),
             "descriptors": with_descriptors(folder), "patches": with_patches(folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "working")
        with Grader(workers=1, customs=sum(specs.values(), [])) as grader:
            for i in range(8):
                for kind, functions in specs.items():
                    for spec in functions:
                        grader.submit((kind, i, spec), f"x{i}", "", True, custom=spec)
            grader.submit("compared", boxed("x+1"), "1+x", True)
            grades = grader.results()
    assert grades.pop("compared").reason == "correct"
    for (kind, _, spec), of_call in sorted(grades.items()):
        found.setdefault((kind, specs[kind].index(spec)), []).append(of_call)
    return found, grader.errors, (folder / "ran").exists()


def test_each_reward_file_sees_the_modules_beside_it(crowd):
    grades, errors, _ = crowd
    assert [[g.reward for g in grades["siblings", i]] for i in (0, 1)] == [[1] * 8, [2] * 8], errors


def test_a_reward_file_may_import_from_a_zip_file(custom, tmp_path):
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as file:
        file.writestr("zipped.py", "VALUE = 1")
    spec = custom(f"import sys\nsys.path.insert(0, '{tmp_path}/m.zip')\nimport zipped\n"
                  "def score(response): return zipped.VALUE")
    with Grader(customs=[spec]) as grader:
        assert ready(grader, spec) and [*grader.files[spec]] == [""]


IMPORTS = "import numpy\nimport torch\nimport transformers\nfrom transformers import AutoConfig\n"


@pytest.mark.parametrize("inside", [False, True])
def test_a_reward_file_may_import_torch_and_transformers(tmp_path, inside):
    """A worker must not read the __path__ of all modules: torch.classes.__path__ is not iterable."""
    body = "    return float(torch.ones(len(response)).sum()) + numpy.zeros(1)[0]\n"
    head = "def score(response, answer, kind):\n"
    file = tmp_path / "mine.py"
    file.write_text(head + textwrap.indent(IMPORTS, "    ") + body if inside else IMPORTS + head + body)
    with Grader(customs=[f"{file}:score"], deadline=60) as grader:
        for response in ("12345", "123"):
            grader.submit(response, response, "", True, custom=f"{file}:score")
        assert {key: g.reward for key, g in grader.results().items()} == {"12345": 5, "123": 3}, grader.errors


def open_r1_format(text: str) -> float:
    """The reference for `think_then_answer`: Open-R1's regular expression, which takes quadratic time."""
    pattern = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
    return float(bool(re.match(pattern, text, re.DOTALL | re.MULTILINE)))


GOOD = "<think>\na\n</think>\n<answer>\nb\n</answer>"


FORMATS = [
    GOOD, GOOD + "\n", GOOD + "\nmore text", GOOD + " more", GOOD + " \n", f"{GOOD}x\n</answer>", f"\n{GOOD}",
    f"so\n{GOOD}", GOOD + GOOD, GOOD + "\n" + GOOD, GOOD[8:], GOOD[:-1], GOOD.replace("\n", " "),
    GOOD.replace("\na\n", "\n"), GOOD.replace("\nb\n", "\n"), GOOD.replace("\na\n", "\n\n"),
    GOOD.replace("\nb\n", "\n\n"), GOOD.replace("</think>\n", "</think>\n\n"), GOOD.replace("a", GOOD), "",
    GOOD + "\r\n", "<think>\n" + GOOD, GOOD.replace("b", "\n</answer>")]


def test_the_format_reward_is_open_r1s_and_takes_linear_time():
    for text in FORMATS:
        assert think_then_answer(text) == open_r1_format(text), text
    rng, right = random.Random(0), 0
    pieces = ["<think>\n", "\n</think>\n<answer>\n", "\n</answer>", "\n", "a", "</answer>", "</think>", " "]
    for i in range(20_000):
        text = "".join(rng.choices(pieces, k=rng.randrange(8)))
        text = "<think>\na" + text if i % 2 else text
        assert think_then_answer(text) == open_r1_format(text), text
        right += open_r1_format(text) == 1
    assert right > 500
    # In quadratic time, the next line would take an hour.
    think_then_answer("<think>\n" + "\n</think>\n<answer>\n" * 100_000 + "\n</answer> " * 100_000)


def test_a_function_gets_what_its_parameters_name_and_may_wait(custom):
    """The 4 calls wait for each other, so they need `parallel`. `seconds` replaces the deadline."""
    spec = custom("""
        parallel, seconds = 4, 30
        def score(row, response, sample, problem):
            folder = os.path.dirname(__file__)
            open(f"{folder}/call{row['weights'][1]}", "w").close()
            while len(os.listdir(folder)) < 5:
                time.sleep(0.1)
            return row["weights"][1] * sample["tokens"] * ((problem, response) == ("p", "r"))
    """)
    with Grader(workers=1, deadline=0.1, customs=[spec]) as grader:
        for i in range(4):
            grader.submit(i, "r", "", True, custom=spec, problem="p", row={"weights": [0, i / 2]},
                          sample={"tokens": 2})
        rewards = {i: (g.reward, g.reason) for i, g in grader.results().items()}
        assert rewards == {0: (0, "wrong"), 1: (1, "correct"), 2: (2, "correct"), 3: (3, "correct")}


@pytest.mark.parametrize("stops", [False, True])
def test_a_function_that_hangs_is_given_up(custom, monkeypatch, stops):
    """After 8 timeouts in a row, or a signal to stop, the remaining calls count as timeouts."""
    monkeypatch.setattr(worker, "TELL", 0)
    spec, told, stop = custom(f"{SLOW}\nseconds, parallel = 0.3, 2"), [], []
    say = lambda text: (told.append(text), stop.extend([1] * (stops and "40 calls" in text)))  # noqa: E731
    with Grader(customs=[spec], say=say, stop=stop) as grader:
        for i in range(40):
            grader.submit(i, "99", str(i), True, custom=spec)
        assert [g.reason for g in grader.results().values()] == ["timeout"] * 40
        assert told[0] == f"grading: waits for 0 calls of {spec}"  # its import
        assert f"grading: waits for 40 calls of {spec}" in told
        if not stops:
            with pytest.raises(UserError, match=r"mine.py:score timed out or ended .* in a row; needed: "):
                grader.check()


def test_a_function_that_ends_its_process_is_given_up(custom):
    spec = custom("def score(response, answer, kind): os._exit(3)")
    with Grader(customs=[spec]) as grader:
        for i in range(40):
            grader.submit(i, "r", str(i), True, custom=spec)
        assert {g.reason for g in grader.results().values()} <= {"error", "timeout"}
        with pytest.raises(UserError, match=r"mine.py:score timed out or ended its process \d+ times"):
            grader.check()


class Judge(BaseHTTPRequestHandler):
    """Stands in for an LLM judge behind HTTP. A response's score is the fraction of its characters that are
    in the rubric. Four of the replies are faulty."""

    calls, good, log_message = 0, 0, lambda *_: None
    odd = [b"{}", b'{"score": NaN}', b"no JSON", None]

    def do_POST(self):
        Judge.calls += 1
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        right = sum(c in asked["rubric"] for c in asked["response"]) / max(len(asked["response"]), 1)
        text = Judge.odd.pop() if Judge.odd and Judge.calls % 10 == 0 else b'{"score": %f}' % right
        if text is None:
            self.rfile.read(1)  # until `judge` has given up, after 2 s
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text or b"")
        Judge.good += right > 0.5
        if Judge.good >= 64 or Judge.calls >= 420:  # later calls raise URLError
            threading.Thread(target=end, args=(self.server,)).start()


def end(server: ThreadingHTTPServer) -> None:
    """Ends the server. Its port refuses connections then, although the trainer, a fork, has the socket."""
    server.shutdown()  # else the server's thread would call accept() for ever, without a pause
    with suppress(OSError):  # it has ended already
        server.socket.shutdown(socket.SHUT_RDWR)
    server.server_close()


DOC = (ROOT / "docs/forking.md").read_text(encoding="utf-8")
DIGITS = "0123456789"


@pytest.mark.parametrize(("name", "columns", "changes"), [
    ("judge", [{"rubric": DIGITS}], {"steps": 8, "samples_per_prompt": 8}),
    ("passes", [{"tests": ["pass"]}, {"tests": ["'ok'"]}, {"tests": ["pass", "'ok'"]}, {"tests": ["pass"]}],
     {"steps": 5, "samples_per_prompt": 4, "stop": tuple(DIGITS), "max_response_len": 8})])
def test_a_tiny_model_learns_by_a_documented_reward(base, tmp_path, name, columns, changes):
    """Trains with two reward functions of docs/forking.md. `judge` asks an HTTP server, here Judge. `passes`
    runs a program for each test of the row: the response with the test appended."""
    server = type("", (ThreadingHTTPServer,), {"request_queue_size": 64})(("localhost", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (code,) = [x for x in re.findall(r"```python\n(.*?)```", DOC, re.DOTALL) if f"\ndef {name}(" in x]
    code = code.replace("8765", str(server.server_port)).replace("timeout=20", "timeout=2")
    (tmp_path / "mine.py").write_text(code)
    rows = [json.loads(line) | columns[i % len(columns)] for i, line in enumerate(open(base.data[0]))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = replace(base, data=(f"{tmp_path}/rows.jsonl",), eval_data=(), save_every=0,
                  policy_lr=8e-3, reward=(f"{tmp_path}/mine.py:{name}",), **changes)
    rewards = [row["reward"] for row in run(cfg, tmp_path / "run")[0]]
    end(server)
    assert rewards[0] < 0.15 and max(rewards) > 4 * rewards[0], rewards
    alarms = (tmp_path / "run/alarms.jsonl").read_text()
    errors = "KeyError", "mine.py, line 11", "URLError", "TimeoutError", "JSONDecodeError", "ValueError"
    assert name == "passes" or all(word in alarms for word in errors), alarms
    sample = json.loads((tmp_path / "run/samples/step_000000.jsonl").read_text().splitlines()[0])
    assert sample["row"] == next(row for row in rows if row["prompt"] == sample["problem"])


# --- killed processes

def test_a_killed_worker_fails_only_its_answer(custom):
    spec = custom(SLOW.replace("    ", "    open(__file__ + response, 'w').close()\n    ", 1))
    with Grader(workers=2, deadline=20, customs=[spec]) as grader:
        server = server_of(grader).pid
        assert ready(grader, spec) and wait_until(lambda: len(children(server)) == 2)
        grader.submit("victim", "15", "", True, custom=spec)
        assert wait_until(Path(f"{spec[:-6]}15").exists)
        for i in range(20):
            grader.submit(i, "0.1", str(i), True, custom=spec)
        assert wait_until(Path(f"{spec[:-6]}0.1").exists)
        for worker in children(server):  # one grades the victim, the other an answer of 0.1 seconds
            os.kill(worker, signal.SIGKILL)
        grades = grader.results()
    assert grades["victim"].reason == "error" and ("WorkerDied", spec) in grader.errors
    assert sum(g.reason == "correct" for g in grades.values()) >= 19


def test_requests_fail_alone_and_each_is_called_once(custom):
    spec = custom("""
        def score(response, answer, kind):
            open(__file__ + "calls", "a").write(response)
            if response in "abcd":
                time.sleep(0.3)
            if response == "x":
                os.kill(os.getpid(), 9)
            return 1""")
    calls = Path(f"{spec[:-6]}calls")
    with Grader(workers=1, customs=[spec], deadline=20) as grader:
        assert ready(grader, spec)
        for responses in "abcd", "efxg":
            calls.write_text("")
            for response in responses:
                grader.submit(response, response, "", True, custom=spec)
            reasons = {response: grade.reason for response, grade in grader.results().items()}
            assert reasons == {r: "error" if r == "x" else "correct" for r in responses}
            if responses == "abcd":
                assert calls.read_text() == "abcd"


def test_a_killed_idle_worker_fails_no_answer(custom):
    spec = custom(SLOW)
    with Grader(workers=1, customs=[spec]) as grader:
        for i in range(3):
            grader.submit(i, "0.01", "", True, custom=spec)
            assert grader.results()[i].reason == "correct"
            for worker in children(server_of(grader).pid):
                os.kill(worker, signal.SIGKILL)
            time.sleep(0.5)


def test_a_killed_server_is_replaced_and_its_answers_are_graded(custom):
    spec = custom(SLOW)
    with Grader(workers=2, customs=[spec]) as grader:
        for i in range(10):
            grader.submit(i, "0.3", str(i), True, custom=spec)
        assert wait_until(lambda: graded(grader) >= 2)
        workers = children(server_of(grader).pid)
        os.kill(server_of(grader).pid, signal.SIGKILL)
        assert [g.reason for g in grader.results().values()] == ["correct"] * 10
        assert wait_until(lambda: not any(map(alive, workers)))
        os.kill(server_of(grader).pid, signal.SIGKILL)  # kills the new, idle server
        grader.submit("next", "0", "", True, custom=spec)
        assert grader.results()["next"].reason == "correct"
        grader.check()
        custom(SLOW + "# edited"), grader.close()  # edits mine.py, and lets the next request start a server
        grader.submit("edited", "0", "", True, custom=spec)
        grader.results()
        with pytest.raises(UserError, match="mine.py:score was edited during the run, .*; needed: "):
            grader.check()


def test_a_server_that_dies_twice_is_an_error(custom):
    spec = custom("def score(response, answer, kind): os.kill(os.getppid(), 9)")
    with Grader(customs=[spec]) as grader:
        grader.submit(0, "x", "", True, custom=spec)
        assert grader.results()[0].reason == "timeout"
        with pytest.raises(UserError, match=f"can't use {spec}: a call ended or stopped its server; needed"):
            grader.check()


def test_a_stalled_server_is_replaced_and_never_blocks_the_trainer(custom):
    spec = custom("def score(response, answer, kind): return len(response)")
    with Grader(customs=[spec]) as grader:
        assert ready(grader, spec)
        os.kill(server_of(grader).pid, signal.SIGSTOP)
        for i in range(10):
            grader.submit(i, f"{i}" * 300_000, "", True, custom=spec)
        grader.patience = 5.0  # more than a new server needs for its first outcomes on a busy machine
        assert [g.reward for _, g in sorted(grader.results().items())] == [300_000] * 10


def test_a_server_may_be_silent_for_the_seconds_of_its_file(custom):
    spec = custom("seconds = 600\ndef score(response): time.sleep(2.5); return 1")
    with Grader(customs=[spec]) as grader:
        grader.patience = 0
        grader.submit(0, "x", "", True, custom=spec)
        assert grader.results()[0].reason == "correct"
        grader.check()


def test_each_outcome_is_progress_of_the_run(custom):
    """A judge may take hours for a step's responses: the run goes on while they arrive (--stall_limit)."""
    cfg = replace(PRESETS["tiny-grpo"], reward=(custom(SLOW),))
    with make_grader(cfg) as grader:
        for i in range(3):
            grader.submit(i, f"0.{i}", "", True, custom=cfg.reward[0])
        before = dist.CURRENT.steps
        assert len(grader.results()) == 3 and dist.CURRENT.steps >= before + 3


def test_no_worker_outlives_a_killed_server(custom):
    """Even if the trainer does not wait for the server, and its function never returns."""
    spec = custom("def score(response, answer, kind):\n    while response == 'x': pass\n    return 1")
    with Grader(workers=2, deadline=60, customs=[spec]) as grader:
        assert ready(grader, spec)
        grader.submit(0, "x", "y", True, custom=spec)
        time.sleep(0.5)
        workers = children(server_of(grader).pid)
        server_of(grader).kill()
        assert len(workers) == 2 and wait_until(lambda: not any(map(alive, workers)))


def test_a_server_that_was_idle_for_long_is_not_replaced(custom):
    spec = custom(SLOW)
    with Grader(customs=[spec], deadline=20) as grader:
        assert ready(grader, spec)
        server, grader.servers[0].heard = server_of(grader), 0
        grader.submit(0, "2", "", True, custom=spec)
        assert grader.results()[0].reason == "correct" and server_of(grader) is server


@pytest.mark.parametrize("held", [False, True])
def test_no_process_outlives_a_killed_trainer(custom, held):
    """`held`: whether another child of the trainer keeps the server's connection open."""
    spec = custom("def score(response, answer, kind):\n    while response == 'x': pass")
    code = f"""if True:
        import os, sys, time
        from reward import Grader
        grader = Grader(workers=2, deadline=60, customs=[{spec!r}])
        grader.submit(0, "short", "y", True, custom={spec!r})
        grader.results()
        grader.submit(0, "x", "y", True, custom={spec!r})
        if {held} and os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        time.sleep(0.5)
        print(grader.servers[0].process.pid, flush=True)
        time.sleep(60)"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    server = int(trainer.stdout.readline())
    group, fork = {server} | children(server), children(trainer.pid) - children(server) - {server}
    assert len(group) == 3 and len(fork) == held
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert wait_until(lambda: not any(map(alive, group)))
    for pid in fork:
        os.kill(pid, signal.SIGKILL)


def errors_of_starts(cfg, count: int) -> list[str]:
    """Starts a run in this process, as in a notebook. No grading server may outlive a start that failed."""
    found = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore ctrl-C
    for _ in range(count):
        with pytest.raises((UserError, KeyboardInterrupt)) as error:
            train.prepare(cfg)
        found.append(error.exconly())
        assert not children()
    return found


def test_a_start_that_fails_frees_the_folder_and_ends_the_servers(base, custom, tmp_path):
    """First by ctrl-C, while the reward's file is imported. Then by a wrong flag, after the import."""
    spec = custom(f"""
        if not os.path.exists("{tmp_path}/began"):
            open("{tmp_path}/began", "w").close()
            os.kill(os.getppid(), 2)
            time.sleep(60)
        def score(response):
            return 1.0
    """)
    cfg = replace(base, reward=(spec,), steps=1, profile=9, out=f"{tmp_path}/run")
    first, second = run_ranks(1, errors_of_starts, cfg, 2)[0]
    assert first == "KeyboardInterrupt" and "--profile 9 in a run of 1 steps" in second


def test_ctrl_c_does_not_end_the_server(custom):
    spec = custom(SLOW)
    with Grader(customs=[spec]) as grader:
        assert ready(grader, spec)
        grader.submit(0, "1", "", True, custom=spec)
        os.killpg(server_of(grader).pid, signal.SIGINT)
        assert os.getpgid(server_of(grader).pid) != os.getpgid(0)
        assert grader.results()[0].reason == "correct"


# --- the module reward.py

def dry_run(tmp_path, lines: list[str], *arguments: str) -> subprocess.CompletedProcess:
    path = tmp_path / "responses.jsonl"
    path.write_text("\n".join(lines))
    command = [sys.executable, "reward.py", str(path), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_dry_run_takes_the_terms_of_training(tmp_path):
    """A run's saved samples can be graded again: as the problem's kind and data set say. A reward function
    then gets the data row as `row`. In the last row, "82" is equal to "082" for math, but not for exact."""
    (tmp_path / "my.py").write_text(
        "def score(response, row, sample):\n    return row['n'] * sample['turns'] / (response != '0')\n")
    rows = [sample_row(Sample(0, 0, (1,), np.zeros(2, np.int32), np.zeros(2, np.float32), True, text, 0),
                       Problem("", (1,), gold, kind, dataset, fields='{"n": 0.5}'), save_logps=False)
            for text, gold, kind, dataset in ((GOOD, "1", "math", ""), (boxed("1"), "1", "math", ""),
                ("0", "1", "math", ""), (GOOD, "1", "math", "own"), (boxed("82"), "082", "exact", ""))]
    rows += [{"response": boxed("1"), "answer": "1", "row": {"n": 0.5}, "stopped": False, "turns": 1}]
    done = dry_run(tmp_path, [json.dumps(row) for row in rows], "--reward", "math", "format=0.5",
                   f"{tmp_path}/my.py:score=2", f"own@{tmp_path}/my.py:score")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:-1] == [
        "math correct 1", "math truncated 1", "math unparsed 2", "math wrong 1", "own partial 1",
        "score error 1", "score partial 4", "score truncated 1", "mean math 0.2000, weight 1",
        "mean score 0.3333, weight 2", "mean own 0.5000, weight 1", "mean format 0.3333, weight 0.5",
        f"mean of the sum {(5 * 0.2 + 2 * 4 * 0.5 + 0.5 + 0.5 * 2) / 6:.4f}"]
    assert f"by zero ({tmp_path}/my.py, line 2)" in lines[-1]


def test_dry_run_grades_by_a_function_that_has_the_name_of_a_reward_part(tmp_path, capsys):
    (tmp_path / "my.py").write_text("def tags(response):\n    return len(response)\n")
    (tmp_path / "r.jsonl").write_text('{"response": "four", "answer": "2"}')
    reward.dry_run(f"{tmp_path}/r.jsonl", reward=(f"{tmp_path}/my.py:tags",))
    assert "mean tags 4.0000, weight 1\nmean of the sum 4.0000\n" in capsys.readouterr().out


def test_dry_run_takes_numbers_as_gold_answers(tmp_path, capsys):
    """Also a worked solution, as in training. Null is no value, as Parquet gives it."""
    rows = [{"response": boxed("5"), "answer": answer, "dataset": None, "stopped": None, "segments": None}
            for answer in (5, 5.0, "2+3\n#### 5", 6)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.dry_run(f"{tmp_path}/r.jsonl")
    assert "mean math 0.7500" in capsys.readouterr().out


@pytest.mark.parametrize(("line", "message"), [
    ("[1]", "row 2: [1]; needed: dict"), ("{", "row 2 can't be read"),
    ('{"response": "x"}', "row 2 has no answer as text; needed: {\"response"),
    ('{"response": 1, "answer": "x"}', "row 2: response is 1; needed: str"),
    ('{"response": "x", "gold": 5}', "row 2: gold is 5; needed: str | None"),
    ('{"response": "x", "gold": "1", "segments": 5}', "row 2: segments is 5; needed: list | None"),
    ('{"response": "x", "answer": "1", "problem": ["1+1="]}', "row 2: problem is ['1+1=']; needed: str | N"),
    ('{"response": "x", "answer": "1", "dataset": ["a", "b"]}', "row 2 has the data set ['a', 'b']")])
def test_dry_run_names_the_bad_row_in_one_line(tmp_path, line, message):
    (tmp_path / "r.jsonl").write_text('{"response": "x", "answer": "x"}\n' + line)
    with pytest.raises(UserError) as error:
        reward.dry_run(f"{tmp_path}/r.jsonl")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("end", ["", "<|im_end|>", "<|eot_id|>\n"])
def test_a_special_token_at_the_end_is_no_part_of_the_answer(grader, end):
    """It stands there if it is not the model's EOS, or if it is a stop string."""
    for name, text in ("dapo", "So\nAnswer: 34"), ("gsm8k", "So\n#### 34"), ("whole", "34"):
        grader.submit(name, text + end, "34", True, extractor=name)
    grader.submit("letter", "Answer: B" + end, "B", True, "choice", "letter")
    assert {(g.reason, g.answer) for g in grader.results().values()} == {("correct", "34"), ("correct", "B")}


@pytest.mark.parametrize("parameters", ["response, **more", "**more"])
def test_a_function_with_kwargs_gets_all_arguments(custom, parameters):
    spec = custom(f"def score({parameters}): return float({{'answer', 'row', 'problem'}} <= more.keys())")
    with Grader(customs=[spec]) as grader:
        grader.submit(0, boxed("5"), "5", True, custom=spec, problem="2+3=", row={}, sample={})
        assert grader.results()[0].reward == 1.0


@pytest.mark.parametrize("value", ["'1.0'", "None", "(1.0,)", "{'score': 1.0}", "np.str_('1.0')"])
def test_what_is_no_number_is_no_reward_and_is_shown(custom, value):
    spec = custom(f"import numpy as np\ndef score(response): return {value}")
    with Grader(customs=[spec]) as grader:
        grader.submit(0, boxed("5"), "5", True, custom=spec)
        assert grader.results()[0].reason == "error"
        assert f"the reward is {value}; needed: a number" in str(grader.errors)


def test_a_sample_without_its_row_is_not_graded_by_a_function_of_rows(custom, tmp_path):
    """The sample itself has the policy's answer in its field `answer`."""
    spec = custom("def score(response, row): return 1.0")
    (tmp_path / "r.jsonl").write_text(json.dumps({"response": "x", "gold": "5", "answer": "x"}))
    with pytest.raises(UserError, match="row 1 is a sample without its row of the data file"):
        reward.dry_run(f"{tmp_path}/r.jsonl", (spec,))


def test_importing_is_light_and_starts_nothing():
    code = ("import sys, threading; import reward; assert threading.active_count() == 1; "
            "assert not {'math_verify', 'sympy', 'pebble', 'torch', 'numpy'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- what a user's files may not reach

SHADOWS = "types functools collections warnings importlib calendar statistics secrets csv json".split()


def with_shadows(root) -> list[str]:
    """Writes files with the names of modules to `root`/working, and beside one of two reward files. The
    rewards, pebble and mpmath import some of these modules. Returns the reward functions."""
    for place in ("working", "rewards"):
        (root / place).mkdir()
        for name in [*SHADOWS, *(["pebble", "mpmath"] if place == "working" else [])]:
            (root / place / f"{name}.py").write_text(f"open({str(root / 'ran')!r}, 'a').write({name!r})\n")
    specs = [f"{folder / 'mine.py'}:score" for folder in (root, root / "rewards")]
    for spec in specs:
        Path(spec[:-6]).write_text(f"import {', '.join(SHADOWS)}\n"
                                   "def score(response):\n"
                                   "    return len(calendar.day_name) / 7 * statistics.mean([1])")
    return specs


def test_no_file_of_a_user_stands_in_for_the_standard_library(crowd):
    """Ten names, in the working folder and beside the reward."""
    grades, errors, stood_in = crowd
    assert {g.reason for i in (0, 1) for g in grades["shadowed", i]} == {"correct"}, errors
    assert not stood_in


SPOIL = """
import os

def spoil(lowest, highest):
    for n in range(lowest, highest):
        for content in (b"[1, 2]\\n" * 99, b"\\xff" * 9999):
            try: os.write(n, content)
            except OSError: pass
    [os.dup2(2, n) for n in range(lowest, min(highest, 64))]
    os.closerange(lowest, min(highest, 64))
"""


def with_descriptors(folder) -> list[str]:
    codes = {"imports": "spoil(3, 64)\ndef score(response): return 1",
             "calls": "def score(response):\n    spoil(3, 64)\n    return 1"}
    for name, code in codes.items():
        (folder / f"{name}.py").write_text(SPOIL + code)
    return [f"{folder}/{name}.py:score" for name in codes]


def test_a_function_may_do_what_it_likes_with_descriptors_below_64(crowd):
    """At its import, and in a call."""
    grades, errors, _ = crowd
    assert [g.reason for i in (0, 1) for g in grades["descriptors", i]] == ["correct"] * 16, errors


def test_a_function_that_writes_to_every_descriptor_fails_alone(custom):
    spec = custom("")
    Path(spec[:-6]).write_text(SPOIL + "def score(response):\n    spoil(3, 1024)\n    return 1")
    with Grader(workers=1, deadline=0.5, customs=[spec]) as grader:
        grader.patience = 10
        grader.submit("all", "all", "", True, custom=spec)
        grader.submit("compared", boxed("x+1"), "1+x", True)
        grades = grader.results()
        assert grades["compared"].reason == "correct"
        assert grades["all"].reason in ("error", "timeout") or grader.failure
    Path(spec[:-6]).write_text(SPOIL + "spoil(3, 1024)\ndef score(response): return 1")
    with pytest.raises(UserError, match="its import ended or stopped its server"):
        Grader(customs=[spec])


def test_an_error_whose_text_raises_is_an_error(custom):
    """Between such calls, the function grades a response as usual."""
    errors = ["raise ValueError", "raise SystemExit", "return 1", "raise self", "raise KeyboardInterrupt",
              "os._exit(3)", "while True: pass"]
    classes = [f"class Bad{i}(Exception):\n    def __str__(self):\n        {error}\n"
               for i, error in enumerate(errors)]
    spec = custom(f"{''.join(classes)}def score(response):\n    if response:\n"
                  "        raise globals()[response]\n    return 1")
    with Grader(workers=1, deadline=0.5, customs=[spec]) as grader:
        for i, error in enumerate(errors):
            grader.submit("bad", f"Bad{i}", "", True, custom=spec)
            bad = grader.results()["bad"]
            assert bad.reward == 0 and bad.reason in ("error", "timeout"), error
            grader.submit("good", "", "", True, custom=spec)
            assert grader.results()["good"].reason == "correct", error
        assert grader.errors and bad.reason == "timeout"


def with_patches(folder) -> list[str]:
    patch = "import builtins, math; builtins.abs = math.sqrt = lambda x: 99; os.chdir('/')"
    for name, at_import, at_call in ("a", patch, ""), ("b", "", patch):
        (folder / f"{name}.py").write_text(f"import os\n{at_import}\ndef score(response):\n    {at_call}\n"
                                           "    return abs(-1) == 99\n")
    (folder / "c.py").write_text("import math, os\ndef score(response):\n"
                                 "    return math.sqrt(4) == 2 and abs(-1) == 1 and os.getcwd() != '/'\n")
    return [f"{folder}/{name}.py:score" for name in "abc"]


def test_what_one_function_changes_in_its_process_reaches_no_other(crowd):
    """At its import (a.py), and in a call (b.py)."""
    grades, errors, _ = crowd
    assert {g.reason for i in (0, 1, 2) for g in grades["patches", i]} == {"correct"}, errors


def test_what_a_function_prints_cannot_fail(custom, monkeypatch):
    """Standard error is, in turn, a full disk, a closed terminal and a pipe without a reader."""
    spec = custom("import sys\nprint('import')\ndef score(response):\n"
                  "    print(response, file=sys.stdout, flush=True)\n"
                  "    print(response, file=sys.stderr, flush=True)\n    return 1")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    before, closed, pipe = os.dup(2), os.openpty(), os.pipe()
    os.close(closed[0]), os.close(pipe[0])
    try:
        for output in (os.open("/dev/full", os.O_WRONLY), closed[1], pipe[1]):
            os.dup2(output, 2)
            os.close(output)
            with Grader(workers=1, customs=[spec]) as grader:
                grader.submit(0, "\ud800 é", "", True, custom=spec)
                assert grader.results()[0].reward == 1.0, grader.errors
    finally:
        os.dup2(before, 2)
        os.close(before)


def test_a_grader_that_waits_needs_no_terminal(custom, monkeypatch):
    spec = custom("def score(response):\n    time.sleep(0.3)\n    return 1")
    monkeypatch.setattr(worker, "TELL", 0)
    with Grader(customs=[spec], say=lambda text: os.write(-1, text.encode())) as grader:
        grader.submit(0, "", "", True, custom=spec)
        assert grader.results()[0].reward == 1.0


STARTS = {"child": "subprocess.Popen(['sleep', '777'])",
          "session": "subprocess.Popen(['sleep', '777'], start_new_session=True)",
          "orphan": "subprocess.run('setsid sleep 777 > /dev/null 2>&1 < /dev/null &', shell=True)",
          "fork": "os.fork() or (os.setsid(), time.sleep(777), os._exit(0))",
          "killer": "subprocess.Popen(['sleep', '777'], start_new_session=True); os.kill(os.getppid(), 9)"}


@pytest.mark.parametrize("killer", [False, True])
def test_no_process_of_a_function_outlives_the_grader(custom, killer):
    """killer: whether the function also kills the server"""
    starts = [code for how, code in STARTS.items() if killer == (how == "killer")]
    spec = custom("import subprocess\ndef score(response):\n    exec(response)\n    return 1")
    with Grader(workers=2, customs=[spec]) as grader:
        for i, code in enumerate(2 * starts):
            grader.submit(i, f"{code}  # {i}", "", True, custom=spec)
        grades = grader.results().values()
        mark = grader.servers[0].mark.encode()
        assert bool(grader.failure) == killer
        if killer:
            assert spec in grader.failure
        else:
            assert {g.reason for g in grades} == {"correct"}
            assert wait_until(lambda: len(marked_processes(mark)) > 2 * len(starts))
    assert wait_until(lambda: not marked_processes(mark))


def marked_processes(mark):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes() and alive(int(folder.name)):
                found.append(folder.name)
        except OSError:
            continue
    return found


def test_each_similar_name_of_a_users_file_is_named_once(tmp_path):
    file = tmp_path / "r.py"
    file.write_text("def score(response, answer, kind):\n    return score_of(response) + score_of(answer)\n")
    cfg = parse(["tiny-grpo", "--reward", f"{file}:scor"])
    with pytest.raises(UserError, match=r"no 'scor' \(did you mean score or score_of\?\) in "):
        check_functions(cfg)
    (term,) = check_functions(parse(["tiny-grpo", "--reward", f"{file}:score"]))
    assert term.custom == f"{file}:score"
