"""Tests of the checks at a run's start, of the lock of its folder, and of signals."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
import ranks
from conftest import ROOT, maths, run_ranks, start_ranks, wait_until

import ckpt
import dist
from guard.checks import check_space
from guard.lock import FolderLock
from guard.messages import UserError
from guard.watch import handle_signals, watch
from log import read_metrics

HOST = os.uname().nodename


def refused(cfg, folder, other):
    """Trains as if rank 1 ran on another host, where the folder `other` is at the path `folder`. Returns the
    error message, which must be the same on both ranks."""
    first, second = run_ranks(2, ranks.elsewhere, cfg, str(folder), str(other))
    if first == "no root":
        pytest.skip("mounting a folder for one rank takes root")
    assert first == second
    return first


def test_two_ranks_with_folders_of_their_own_are_refused(base, tmp_path):
    (tmp_path / "own").mkdir()
    said = refused(dataclasses.replace(base, out=f"{tmp_path}/o"), tmp_path / "o", tmp_path / "own")
    assert f"not every rank finds what rank 0 on {HOST} finds: other (the lock in {tmp_path}/o: " in said


PROBLEMS = "problems (--data, --template, --reward)"


@pytest.mark.parametrize("differs", [PROBLEMS, "--model", "--eval_data train"])
def test_ranks_that_read_other_files_are_refused(base, tmp_path, differs):
    """Rank 1's host lacks one problem, or a byte of its weights differs."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        shutil.copytree(base.model if differs == "--model" else Path(base.data[0]).parent, folder)
    copy = there / ("model.safetensors" if differs == "--model" else "train.jsonl")
    data = copy.read_bytes()
    copy.write_bytes(data[:-9] + b"x" + data[-8:] if differs == "--model" else data[:data[:-1].rindex(b"\n")])
    changes = {PROBLEMS: dict(data=(f"{here}/train.jsonl",)), "--model": dict(model=str(here)),
               "--eval_data train": dict(eval_data=(f"{here}/train.jsonl",))}[differs]
    said = refused(dataclasses.replace(base, out=str(tmp_path / "o"), **changes), here, there)
    name = differs.replace("--model", "files of the policy")
    assert f"not every rank reads what rank 0 on {HOST} reads: other ({name}: " in said


def test_a_mistake_on_one_host_is_the_line_that_all_show(base, tmp_path):
    shutil.copytree(Path(base.data[0]).parent, tmp_path / "here")
    (tmp_path / "empty").mkdir()
    cfg = dataclasses.replace(base, out=str(tmp_path / "o"), data=(f"{tmp_path}/here/train.jsonl",))
    assert refused(cfg, tmp_path / "here", tmp_path / "empty").startswith(
        f"other: no data file {tmp_path}/here/train.jsonl; needed: ")


def test_ranks_that_would_resume_from_other_checkpoints_are_refused(base, two_ranks, tmp_path):
    for name, step in (("here", 4), ("there", 2)):
        shutil.copytree(ckpt.step_folder(two_ranks[0], step), ckpt.step_folder(tmp_path / name, step))
    cfg = dataclasses.replace(base, out=str(tmp_path / "o"), resume=str(tmp_path / "here"))
    said = refused(cfg, tmp_path / "here", tmp_path / "there")
    assert said.startswith(f"other: {tmp_path}/here/ckpt/step_000004 was removed by its run")


def test_under_torchrun_the_line_is_the_last_thing_on_the_screen(tmp_path):
    program = tmp_path / "rank.py"  # without torch, which is slow to import
    program.write_text("from guard.messages import UserError, user_errors\n"
                       "with user_errors('train.py'):\n    raise UserError('found; needed: more')\n")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program],
        capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)})
    *_, last, line = done.stderr.splitlines()
    assert set(line) == {"="} and "train.py: found; needed: more" in last
    assert "rank.py\", line" not in done.stderr


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(base, two_ranks, tmp_path):
    cfg = dataclasses.replace(base, out=str(tmp_path / "o"))
    processes, folder = start_ranks(2, ranks.main, cfg)
    with folder:
        assert wait_until((tmp_path / "o" / "metrics.jsonl").exists)
        said, = run_ranks(1, ranks.main, cfg)
        assert f"{tmp_path}/o is in use by process {processes[0].pid} on {HOST}; needed: " in said
        for p in processes:
            p.join(300)
            assert p.exitcode == 0
    assert maths(read_metrics(tmp_path / "o")) == maths(two_ranks[1])


def test_the_folder_of_a_killed_run_is_taken_over(base, tmp_path):
    cfg = dataclasses.replace(base, out=str(tmp_path / "o"), steps=1)
    processes, folder = start_ranks(1, ranks.main, cfg)
    with folder:
        assert wait_until((tmp_path / "o" / "lock").exists)
        processes[0].kill()
        processes[0].join()
    assert run_ranks(1, ranks.main, cfg) == [""]


def test_a_run_on_another_host_has_time_to_end(tmp_path, monkeypatch):
    """The operating system may release the lock of a lost host late."""
    file = tmp_path / "a/lock"
    sleep = time.sleep
    monkeypatch.setattr("guard.lock.time.sleep", lambda seconds: sleep(seconds / 50))
    monkeypatch.setattr("guard.lock.LOCK_PATIENCE", 0.3)
    first, second = FolderLock(file), FolderLock(file)
    first.mine["host"] = "other"
    first.claim()
    with pytest.raises(UserError, match=f"a is in use by process {os.getpid()} on other; needed: the end"):
        second.claim()
    monkeypatch.setattr("guard.lock.LOCK_PATIENCE", 300.0)
    threading.Timer(0.5, first.release).start()
    second.claim()
    assert first.owner() == second.mine != first.mine


def test_a_folder_that_no_run_made_is_not_written_to(base, tmp_path):
    (tmp_path / "config.json").write_text('{"algo": 1}')
    cfg = dataclasses.replace(base, out=str(tmp_path), steps=1)
    assert "has config.json, which a new run would replace" in run_ranks(1, ranks.main, cfg)[0]
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    (tmp_path / "config.json").rename(tmp_path / "notes.json")
    (tmp_path / "lock").write_bytes(b"\xff12345")
    assert "lock is damaged" in run_ranks(1, ranks.main, cfg)[0]
    assert (tmp_path / "lock").read_bytes() == b"\xff12345"
    (tmp_path / "lock").write_text("")  # by a crash
    assert run_ranks(1, ranks.main, cfg) == [""] and (tmp_path / "notes.json").read_text() == '{"algo": 1}'
    shutil.rmtree(tmp_path / "ckpt")
    assert "has export, which a new run would replace; needed: another" in run_ranks(1, ranks.main, cfg)[0]


@pytest.mark.parametrize("changes", [{}, dict(policy_updates=2)])
def test_a_step_whose_samples_are_not_the_policys_leaves_nothing(base, tmp_path, changes):
    cfg = dataclasses.replace(base, out=str(tmp_path / "o"), save_every=1, max_logp_gap=1e-12, **changes)
    said, = run_ranks(1, ranks.main, cfg)
    assert "engine and trainer differ by" in said and "nothing of this step is saved" in said
    assert not (tmp_path / "o" / "ckpt").exists() and read_metrics(tmp_path / "o") == []


def test_a_gap_that_is_not_a_number_is_no_agreement(base):
    assert "differ by nan" in run_ranks(1, ranks.gap_checked, base, float("nan"))[0]
    assert run_ranks(1, ranks.gap_checked, base, 0.01) == [""]


def test_a_stop_is_heard_between_rounds_of_resampling(base, tmp_path):
    """All rewards are 0, so --resample_rounds would replace prompts for ever if no signal came."""
    cfg = dataclasses.replace(base, out=str(tmp_path / "o"), algo="grpo", critic_updates=1, reward=("exact",),
                              resample_rounds=10**6, eval_every=0)
    assert run_ranks(2, ranks.stopped, cfg, ranks.samples_for_a_second) == ["", ""]
    assert ckpt.complete(tmp_path / "o") == read_metrics(tmp_path / "o") == []


def storm(pid):
    for _ in range(400):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def stormed(rounds):
    """Handles 800 signals in each round. Returns in how many rounds a stop was requested."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    stops = 0
    for _ in range(rounds):
        sender = get_context("fork").Process(target=storm, args=(os.getpid(),))
        with handle_signals(30.0):
            sender.start()
            while sender.exitcode is None:
                time.sleep(0.001)
            stops += bool(dist.stop_signal)
    return stops


def test_a_signal_may_come_while_another_is_handled():
    assert run_ranks(1, stormed, 8) == [8]


def overdue():
    dist.init("cpu", "float32")
    dist.CURRENT.limit = 0.0  # in this process no thread watches yet
    watch(1000.0)
    with handle_signals(grace=0.1):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(300)


def test_a_run_that_goes_on_after_the_grace_period_is_ended():
    process = get_context("fork").Process(target=overdue)
    process.start()
    process.join()
    assert process.exitcode == 1


@pytest.mark.parametrize("name,free", [("step_000004", True), (".step_000004.0123456789abcdef.part", True),
                                       ("step_000004-copy", False), ("my_step_000004", False)])
def test_the_space_of_old_checkpoints_is_free_and_that_of_a_users_copies_is_not(tmp_path, name, free):
    (tmp_path / "ckpt" / name).mkdir(parents=True)
    (tmp_path / "ckpt/step_000002").symlink_to(name)  # a run deletes no link, and not what it leads to
    with (tmp_path / "ckpt" / name / "shard-00000.safetensors").open("w") as file:
        file.truncate(2**40)  # takes no space
    said = ranks.message_of(check_space, tmp_path, shutil.disk_usage(tmp_path).free + 2**39)
    assert said == "" if free else "free in" in said


@pytest.mark.parametrize("limit", [1000.0, 2.0])
def test_a_run_whose_terminal_was_closed_is_ended_in_time(limit):
    """Nobody reads the line that says why: --grace or --stall_limit."""
    code = f"""
import os, signal, time, dist
from guard.watch import handle_signals, watch
dist.init("cpu", "float32")
watch(1000.0)
watch({limit})  # a second run of this process
with dist.phase("x"), handle_signals(grace=0.1):
    if {limit} > 2:
        os.kill(os.getpid(), signal.SIGUSR1)
    print("waits", flush=True)
    time.sleep(300)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    process.stderr.close()
    assert process.wait(30) == 1 and process.stdout.read() == "waits\n"


@pytest.mark.parametrize("name", ["train", "$_$"])
def test_a_report_that_cannot_be_written_is_one_line(base, two_ranks, tmp_path, capfd, name):
    """A folder named plot.png, or a metric's name that matplotlib reads as a wrong formula, makes the report
    fail, after the models are saved."""
    shutil.copytree(two_ranks[0], tmp_path, dirs_exist_ok=True, symlinks=True)
    (tmp_path / "plot.png").unlink(missing_ok=True)
    if name == "train":
        (tmp_path / "plot.png").mkdir()
    lines = Path(base.eval_data[0]).read_text().splitlines(keepends=True)
    (tmp_path / f"{name}.jsonl").write_text("".join(lines if name == "train" else lines[1:]))
    cfg = dataclasses.replace(base, out=str(tmp_path), eval_data=(f"{tmp_path}/{name}.jsonl",))
    assert run_ranks(1, ranks.main, cfg, True) == [""]
    assert "!! can't write the report to " in capfd.readouterr().out
