"""Tests of environments with state (--env FILE.py:CLASS): replay, closing, killed workers, resumed runs."""

import dataclasses
import json
import os
import re
import runpy
import signal
from collections import Counter
from pathlib import Path

import pytest
import ranks
import torch
from conftest import ROOT, maths, run, run_ranks, wait_until
from test_turns import content, sampled

from grading.rows import problem_rows
from grading.worker import Grade, Grader, Reply
from guard.messages import UserError
from log import read_metrics

LOGGED = '''
import os
import signal

class Counts:
    """Replies with the number of turns so far, and a secret that it was made with."""
    def __init__(self, problem, row, seed):
        self.secret, self.turns = seed % 89 + 10, 0
        self.log("open")

    def step(self, text):
        self.turns += 1
        self.secret = (self.secret * 7 + len(text)) % 89 + 10
        if self.turns == 2 and os.path.exists(f"{FOLDER}/kill"):
            try:
                os.rename(f"{FOLDER}/kill", f"{FOLDER}/killed")
                os.kill(os.getppid() if SERVER else os.getpid(), signal.SIGKILL)
            except FileNotFoundError:
                pass  # another worker was faster
        if self.secret % 11 == 0:
            raise RuntimeError("lost")
        return f"{self.turns}:{self.secret}" if self.turns < 4 else None

    def close(self):
        self.log("close")

    def log(self, word):
        with open(f"{FOLDER}/log", "a") as file:
            file.write(word + "\\n")

class NoStep:
    def __init__(self, problem):
        pass

class Wants:
    def __init__(self, problem, tokenizer):
        pass
'''


def logged(folder: Path, server: bool = True) -> str:
    file = folder / "env.py"
    file.write_text(f"FOLDER, SERVER = {str(folder)!r}, {server}\n{LOGGED}")
    return f"{file}:Counts"


def log(folder: Path) -> Counter:
    return Counter((folder / "log").read_text().split())


@pytest.fixture(scope="module")
def documented(tmp_path_factory):
    """Returns the file with the three classes of docs/forking.md."""
    text = (ROOT / "docs/forking.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    classes = [b for b in blocks if re.search(r"^class (Guess|Memory|Repair)\b", b, re.M)]
    assert len(classes) == 3
    file = tmp_path_factory.mktemp("env") / "three.py"
    file.write_text("\n\n".join(classes))
    return file


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def played(env: str, policy, row=None, kill=False) -> list:
    """Returns the replies in one response. policy: replies so far -> the next turn, or None
    kill: whether the workers are killed between turns"""
    found, turns = [], []
    with Grader(workers=2, deadline=2.0, env=env) as grader:
        while turn := policy(found):
            turns.append(turn)
            grader.ask(0, turns, problem="p", row=row, seed=5)
            found.append(grader.results()[0])
            if kill:
                server = grader.functions[env].process.pid
                old = children(server)
                for pid in old:
                    os.kill(pid, signal.SIGKILL)
                assert old and wait_until(lambda old=old, server=server: not {*old} & {*children(server)})
    return found


def bisects(replies: list) -> str | None:
    low, high = 10, 99
    for reply in replies:
        middle = (low + high) // 2
        if reply.text is None:
            return None
        low, high = (middle + 1, high) if "higher" in reply.text else (low, middle - 1)
    return f"<tool>{(low + high) // 2}</tool>"


def says(*turns: str):
    return lambda replies: [*turns, None][len(replies)]


def test_the_documented_classes_keep_their_state_and_are_replayed(documented):
    sums = says("<tool>17+25</tool>", "<tool>ans+8</tool>", "<tool>ans+1</tool>", "done")
    want = [Reply(f"<result>{n}</result>") for n in (42, 50, 51)] + [Reply()]
    assert played(f"{documented}:Memory", sums) == want == played(f"{documented}:Memory", sums, kill=True)
    replies = played(f"{documented}:Guess", bisects)
    assert replies[-1].reward == 1 / len(replies) and 2 < len(replies) <= 7
    row = {"tests": ["assert f(2) == 4", "assert f(3) == 9", "assert f(0) == 0"]}
    programs = ["def f(x): return 2 * x", "def f(x): return x * x"]
    want = [Reply("\nfailed: assert f(3) == 9\n"), Reply(reward=1.0)]
    assert played(f"{documented}:Repair", says(*programs), row) == want
    assert played(f"{documented}:Repair", says(*programs[:1] * 3), row)[-1].reward == pytest.approx(2 / 3)


@pytest.mark.parametrize(("name", "words"), [("NoStep", "no attribute 'step'"), ("Wants", "'tokenizer'")])
def test_a_class_that_is_no_environment_is_one_line(tmp_path, name, words):
    env = logged(tmp_path).replace("Counts", name)
    needed = "needed: .*; or a class with methods step and close, and .*: problem row seed"
    with pytest.raises(UserError, match=f"{words}.*{needed}"):
        Grader(env=env)


def test_every_environment_is_closed_once(tiny, tmp_path):
    """Responses end by a reply, an error, --max_turns, the length limit, or a text that leaves no room."""
    env = logged(tmp_path)
    samples, errors = sampled(tiny, env, max_response_len=40, samples_per_prompt=6, grade_workers=2)
    assert "RuntimeError" in {kind for kind, _ in errors}
    assert {True, False} == {s.stopped for s in samples if s.turns > 1}
    assert "error" in {s.reason for s in samples} and max(s.turns for s in samples) == 4
    with_env = [s for s in samples if s.turns > 1 or s.stopped]
    found = log(tmp_path)
    assert found["open"] == found["close"] == len(with_env)
    sampled(tiny, env, max_response_len=40, samples_per_prompt=6, max_turns=2)
    found = log(tmp_path)
    assert found["open"] == found["close"] > len(with_env)


def test_an_environment_that_always_hangs_ends_the_run_after_eight_calls(tmp_path):
    """Also if its responses end one by one. Releasing a response is no call."""
    (tmp_path / "e.py").write_text("import time\nclass E:\n    def step(self, text): time.sleep(60)\n"
                                   "    def close(self): pass\n")
    with Grader(deadline=0.05, env=f"{tmp_path}/e.py:E") as grader:
        for seed in range(8):
            assert not grader.failure
            grader.ask(0, ["x"], problem="", row=None, seed=seed)
            assert grader.results()[0].reason == "timeout"
            grader.release(seed)
        with pytest.raises(UserError, match="timed out or ended its process 8 times in a row"):
            grader.check()


@pytest.mark.parametrize("server", [False, True])
def test_a_killed_process_loses_no_state(tiny, tmp_path, server):
    """The server's end changes nothing. The end of a worker ends the response whose turn it worked on."""
    env = logged(tmp_path, server)
    samples, _ = sampled(tiny, env, grade_workers=1)
    (tmp_path / "kill").touch()
    again, errors = sampled(tiny, env, grade_workers=1)
    assert (tmp_path / "killed").exists()
    lost = [a for a, b in zip(content(samples), content(again), strict=True) if a != b]
    kinds = {kind for kind, _ in errors}
    assert len(lost) == (0 if server else 1) and ("WorkerDied" in kinds) == (not server)


def shows_no_disturbance(cfg, folder: Path) -> None:
    """Compares a run with one whose servers are killed, which is stopped, resumed, and killed again. The
    environment of `cfg` kills its server when the file FOLDER/kill exists, and renames it to `killed`."""
    cfg = dataclasses.replace(cfg, algo="grpo", critic_updates=1, round_len=5, carry=0.5, max_staleness=2,
                              eval_data=(), steps=3, save_every=1, max_response_len=40)
    rows, weights = run(cfg, folder / "a", ranks=2)
    assert max(row["turns"] for row in rows) > 1.5 and sum(row["carried"] for row in rows) > 5
    (folder / "kill").touch()
    stopping = dataclasses.replace(cfg, out=str(folder / "b"))
    assert run_ranks(2, ranks.stopped, stopping, ranks.has_steps, stopping, 1) == ["", ""]
    assert (folder / "killed").exists() and len(read_metrics(folder / "b")) < 3
    (folder / "killed").rename(folder / "kill")
    other_rows, other = run(cfg, folder / "b", ranks=2)
    assert (folder / "killed").exists()
    assert maths(other_rows) == maths(rows) and all(torch.equal(weights[k], other[k]) for k in weights)


def test_killed_resumed_and_carried_runs_are_equal_to_the_undisturbed(base, tmp_path):
    shows_no_disturbance(dataclasses.replace(base, env=logged(tmp_path)), tmp_path)


def test_a_function_is_no_class(tmp_path):
    """An environment without state is asked as before: by problem, text and turn."""
    (tmp_path / "e.py").write_text("def f(problem, text, turn):\n    return f'{problem}{text}{turn}'\n")
    with Grader(env=f"{tmp_path}/e.py:f") as grader:
        grader.ask(0, ["x", "y"], problem="p", row={}, seed=1)
        grader.release(1)
        assert grader.results() == {0: Reply("py2")}
    assert Grade(0.0, "error", None).reward == 0


def test_rows_and_scores_of_reasoning_gym(tmp_path, monkeypatch, capsys):
    """The documented file makes the same rows from the same seed, and its reward is that of the verifier."""
    gym = pytest.importorskip("reasoning_gym")
    text = (ROOT / "docs/forking.md").read_text(encoding="utf-8")
    (code,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "reasoning_gym" in b]
    (tmp_path / "gym_rows.py").write_text(code)
    names = {}
    exec(compile(code.split("if __name__")[0], "gym_rows.py", "exec"), names)
    specs = ["countdown:size=3", "chain_sum:size=4,max_terms=2"]
    lines = []
    for seed in (0, 0, 1):
        names["write_rows"](seed, specs)
        lines.append(capsys.readouterr().out)
    assert lines[0] == lines[1] != lines[2]
    (tmp_path / "gym.jsonl").write_text(lines[0])
    found = [row for _, row in problem_rows(f"{tmp_path}/gym.jsonl", "math", keep_fields=True)]
    assert [row.dataset for row in found] == ["countdown"] * 3 + ["chain_sum"] * 4
    expected = list(gym.create_dataset("chain_sum", size=4, max_terms=2, seed=0))
    assert [row.text for row in found[3:]] == [entry["question"] for entry in expected]
    spec = f"{tmp_path}/gym_rows.py:score"
    with Grader(customs=[spec], deadline=20.0) as grader:
        for i, row in enumerate(found):
            for answer in (row.answer, "17"):
                response = f"<answer> \\boxed{{{answer}}} </answer>"
                grader.submit((i, answer), response, row.answer, True, "exact", custom=spec,
                              row=json.loads(row.fields))
        grades = grader.results()
        assert not grader.errors
    for (i, answer), grade in grades.items():
        row = json.loads(found[i].fields)
        verifier = gym.create_dataset(row["dataset"], **json.loads(row["settings"]))
        assert grade.reward == pytest.approx(verifier.score_answer(answer, row["entry"]))
        assert grade.reward == 1 or answer == "17"


HINTS = '''
import re
import verifiers.v1 as vf

class Data(vf.TaskData):
    hidden: int

class Number(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def found(self, trace) -> float:
        return float(f"<tool>{self.data.hidden}</tool>" in trace.last_reply)

    @vf.reward(weight=0.5)
    async def quick(self, trace) -> float:
        return 1 / trace.num_turns

class Stops(Number):
    @vf.stop
    async def late(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 3

class Numbers(vf.Taskset[Number, vf.TasksetConfig]):
    def load(self):
        for i in range(42):
            kind = Stops if i > 39 else Number
            yield kind(Data(prompt=f"number {i}", hidden=10 + 37 * i % 90), self.config.task)

class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Hints(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as chat:
            segment = await chat.turn()
            while guess := re.search(r"<tool>(\\d+)</tool>$", segment.last_reply):
                if int(guess[1]) == task.data.hidden:
                    break
                segment = await chat.turn("higher" if int(guess[1]) < task.data.hidden else "lower")

__all__ = ["Hints", "Numbers"]
'''
COUNTS = '''
import contextlib
import os
import signal
import verifiers.v1 as vf
from hints import Config, Numbers

class Counts(vf.Env[Config]):
    async def run(self, task, agents):
        secret = task.data.hidden
        async with agents.player.interaction(task) as chat:
            segment = await chat.turn()
            for turn in range(task.data.hidden % 6):
                secret = (secret * 7 + len(segment.last_reply)) % 89 + 10
                if secret % 9 == 0:
                    break
                if turn == 1:
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(f"{FOLDER}/kill", f"{FOLDER}/killed")
                        os.kill(os.getppid(), signal.SIGKILL)
                segment = await chat.turn(f"{turn}:{secret}")

__all__ = ["Counts", "Numbers"]
'''


@pytest.fixture
def verifiers(tmp_path, monkeypatch, capsys):
    """Returns the spec of the documented file, and a function: name, first, last -> file of rows."""
    pytest.importorskip("verifiers.v1")
    text = (ROOT / "docs/forking.md").read_text(encoding="utf-8")
    (code,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "verifiers.v1" in b]
    (tmp_path / "vf_env.py").write_text(code)
    (tmp_path / "hints.py").write_text(HINTS)
    (tmp_path / "counts.py").write_text(f"FOLDER = {str(tmp_path)!r}\n{COUNTS}")
    monkeypatch.syspath_prepend(tmp_path)
    names = runpy.run_path(f"{tmp_path}/vf_env.py")

    def rows(name, first, last):
        names["write_rows"](name, first, last)
        (tmp_path / f"{name}.jsonl").write_text(capsys.readouterr().out)
        return f"{tmp_path}/{name}.jsonl"

    return f"{tmp_path}/vf_env.py:Verifiers", rows


def test_an_environment_of_verifiers(verifiers):
    """The documented file plays an environment's agent. A killed worker loses no state."""
    env, file_of = verifiers
    rows = [json.loads(r.fields) for _, r in problem_rows(file_of("hints", 0, 3), "math", keep_fields=True)]
    assert [row["task"]["hidden"] for row in rows] == [10, 47, 84]
    replies = played(env, bisects, rows[1])
    assert replies == played(env, bisects, rows[1], kill=True)
    assert len(replies) > 3 and replies[-1].reward == pytest.approx(1 + 0.5 / len(replies))
    assert {reply.text for reply in replies[:-1]} == {"<result>higher</result>", "<result>lower</result>"}
    # Otherwise the row's grader would pay for the answer "none" in a response that --max_turns ends.
    assert {reply.reward for reply in replies[:-1]} == {0.0}
    assert played(env, says("no guess"), rows[0]) == [Reply(reward=0.5)]
    with pytest.raises(SystemExit, match="hints needs a rule @stop or @intercept; vf_env.py has no such"):
        file_of("hints", 39, 41)


def test_killed_resumed_and_carried_runs_of_verifiers_are_equal_to_the_undisturbed(base, verifiers, tmp_path):
    env, file_of = verifiers
    file = Path(env.partition(":")[0])
    file.write_text(file.read_text().replace("<result>{}</result>", "{}"))  # as short as a random turn
    data = (file_of("counts", 0, 40),)
    shows_no_disturbance(dataclasses.replace(base, env=env, data=data), tmp_path)


def test_a_reward_of_another_library_is_told_the_new_names(tmp_path):
    (tmp_path / "r.py").write_text(
        "def trl(prompts, completions, ground_truth, **kwargs):\n    return [0.0]\n"
        "def verl(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
        "def ours(response, ground_truth=None):\n    return 1.0\n")
    for name, parameter in ("trl", "prompts"), ("verl", "data_source"):
        words = f"missing a required argument: '{parameter}'.*; needed: .* response answer .*solution_str, "
        with pytest.raises(UserError, match=words):
            Grader(customs=[f"{tmp_path}/r.py:{name}"])
    with Grader(customs=[f"{tmp_path}/r.py:ours"]) as grader:
        assert grader.functions[f"{tmp_path}/r.py:ours"].facts["names"] == ["response"]
