"""Tests of files that can't be read, have wrong content, or are read and written by several processes."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch
from conftest import ROOT, forked, run_ranks, start_ranks, wait_until
from safetensors.torch import load_file, save_file
from test_ckpt import copy_of, flip, marked, small, tree

import ckpt
import configs
import data
import dist
import train
from configs import UserError, misfit
from engine import MemoryLedger, eos_ids
from guard.checks import is_run
from guard.lock import FolderLock
from guard.watch import handle_signals
from log import Logger, read_metrics
from model import files_weights, load_config, load_policy, load_tokenizer
from tools import report

OTHER = 65534  # the user nobody


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(configs, "PATIENCE", 0.3)


def spoil(path: Path, how: str) -> None:
    """Puts something that can't be read in the place of a file or folder."""
    path.rename(path.with_name(f"{path.name}.real"))
    if how == "folder":
        path.mkdir()
    else:
        path.symlink_to({"loop": path, "input/output error": "/proc/self/mem"}[how])


def faulty(part: str, number: int, seconds: float, events=("open", "os.listdir", "os.scandir")) -> None:
    """For some seconds, opening a file or listing a folder whose path ends in `part` raises an OSError."""
    end = time.monotonic() + seconds

    def hook(event, args):
        if event in events and str(args[0]).endswith(part) and time.monotonic() < end:
            raise OSError(number, os.strerror(number), args[0])

    sys.addaudithook(hook)


# --- what can't be read is not absent


@pytest.mark.parametrize("how", ["loop", "input/output error", "folder"])
@pytest.mark.parametrize("name", ["COMPLETE", "state.json", "shard-00000.safetensors"])
def test_a_checkpoint_that_cannot_be_read_is_refused_and_stays(two_ranks, tmp_path, name, how):
    out = copy_of(two_ranks, tmp_path / "run")
    newest = out / "ckpt/step_000004"
    spoil(newest / name, how)
    if (name, how) != ("COMPLETE", "loop"):
        assert [p.name for p in ckpt.complete(out)] == ["step_000002", "step_000004"]
    with pytest.raises(UserError, match="step_000004") as said:
        ckpt.read_state(ckpt.find(out, "auto"))
    assert "\n" not in str(said.value) and newest.is_dir()


@pytest.mark.parametrize("place", ["ckpt", "ckpt/step_000004", "ckpt/step_000004/COMPLETE"])
def test_no_older_checkpoint_stands_in_for_one_that_cannot_be_read(two_ranks, tmp_path, place):
    out = copy_of(two_ranks, tmp_path / "run")
    spoil(out / place, "loop")
    for look in (lambda: ckpt.find(out, "auto"), lambda: ckpt.named(str(out)), lambda: ckpt.verify(out),
                 lambda: ckpt.named(f"{out}/4")):
        with pytest.raises(UserError, match=f"{place}.* can't be read"):
            look()


def as_nobody(out, look):
    os.chmod(out, 0o755)
    os.seteuid(OTHER)
    try:
        return ranks.message_of(look, out)
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("place,mode", [("ckpt", 0o700), ("ckpt/step_000004", 0o600), ("config.json", 0o600)])
def test_what_belongs_to_another_user_is_not_absent(tmp_path_factory, place, mode):
    if os.geteuid():
        pytest.skip("another user takes root")
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        marked(out, [4])
        (out / "config.json").write_text('{"algo": 1, "versions": {}}')
        os.chmod(out / place, mode)
        look = is_run if place == "config.json" else ckpt.complete
        said, = run_ranks(1, as_nobody, out, look)
        assert "can't be read (Permission denied); needed: permission" in said and place in said


def resumed(cfg, part, number, seconds):
    configs.PATIENCE = 5.0
    faulty(part, number, seconds)
    found = ranks.prepared(cfg)
    return found if isinstance(found, str) else found["start"]


@pytest.mark.parametrize("part", ["step_000004/COMPLETE", "/run/ckpt", "metrics.jsonl", "config.json"])
def test_a_file_server_that_fails_for_a_second_changes_nothing(base, two_ranks, tmp_path, part):
    cfg = dataclasses.replace(base, out=str(tmp_path / "run"))
    shutil.copytree(two_ranks[0], tmp_path / "run", symlinks=True)
    assert run_ranks(1, resumed, cfg, part, errno.ESTALE, 1.0) == [4]


def test_a_shape_is_checked_at_every_depth():
    shape = {"step": int, "names": [str], str: {"bytes": int, "note": str | None}}
    good = {"step": 1, "names": ["a"], "f": {"bytes": 2}, "g": {"bytes": 3, "note": "x", "more": []}}
    assert misfit(good, shape) == ""
    for key, value, words in (("step", "1", "step is '1'; needed: int"), ("step", None, "step is None"),
                              ("names", ["a", 2], r"names[1] is 2; needed: str"),
                              ("names", {}, "names is {}"),
                              ("f", 3, "f is 3; needed: dict"), ("f", {"bytes": 1.5}, "bytes is 1.5"),
                              ("f", {}, "bytes is None"), ("f", {"bytes": 1, "note": 2}, "note is 2")):
        assert words in misfit(good | {key: value}, shape), key
    assert misfit([], shape) == "it is []; needed: dict" and misfit({"names": []}, shape)


WRONG = ["[1]", "5", '"x"', "null", '{"step": "x"}', '{"step": null}', '{"step": [], "a": 1}', "{",
         "", "\ud800".encode("utf-8", "surrogatepass"), "[" * 100_000, "1" * 5000, '{"step": 1e400}',
         b"\xff\xfe\0"]


@pytest.mark.parametrize("text", WRONG)
def test_json_of_the_wrong_shape_is_one_line(two_ranks, tmp_path, text):
    text = text if isinstance(text, bytes) else text.encode()
    out = copy_of(two_ranks, tmp_path / "run")
    folder = out / "ckpt/step_000004"

    def rewrite(name):
        """A checkpoint whose checksums are right."""
        (folder / name).write_bytes(text)
        mark = json.loads((folder / "COMPLETE").read_text())
        (folder / "COMPLETE").write_text(json.dumps(mark | ckpt._describe(folder / name)))

    def carried():
        rewrite("carried-00000.json")
        ckpt.read_carried(folder)

    def state():
        rewrite("state.json")
        ckpt.read_state(folder)

    def complete():
        (folder / "COMPLETE").write_bytes(text)
        ckpt.read_state(folder)

    def lock():
        (tmp_path / "lock").write_bytes(b'{"host": ' + text + b"}")
        FolderLock(tmp_path / "lock").owner()

    def generation():
        (tmp_path / "generation_config.json").write_bytes(text)
        eos_ids(str(tmp_path), make(), None)

    def export():
        (tmp_path / "E").mkdir(exist_ok=True)
        (tmp_path / "E/torz.json").write_bytes(text)
        ckpt.check_export_path(tmp_path / "E")

    for look in (carried, state, complete, lock, generation, export):
        with contextlib.suppress(UserError):
            look()
            assert look in (generation, lock) and (text[:1] == b"{" or text == b"1" * 5000) or (
                look is carried and text == b""), look
    for name, read in (("metrics", read_metrics), ("alarms", report.story)):
        (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 1, "time/step": 1}\n')
        (tmp_path / f"{name}.jsonl").write_bytes(text + b"\n")
        try:
            read(tmp_path)
        except UserError as e:
            assert f"{name}.jsonl, line 1: " in str(e)


def make():
    from tools.tiny import make_tokenizer

    return make_tokenizer()


# --- exports

EXPORT = "torz.json"


def export(run_, step, out, who="policy"):
    ckpt.main(["export", str(run_), str(step), str(out), *([who] if who != "policy" else [])])


def exporting(run_, step, out, times):
    for _ in range(times):
        export(run_, step, out)
    return ""


def test_exports_to_one_folder_at_once_are_both_whole(two_ranks, tmp_path):
    """Four processes write two policies. The last one stays."""
    jobs = [start_ranks(1, exporting, two_ranks[0], step, tmp_path / "E", 4) for step in (2, 4, 2, 4)]
    for (process,), _ in jobs:
        process.join(120)
        assert process.exitcode == 0
    step = json.loads((tmp_path / "E" / EXPORT).read_text())["step"]
    export(two_ranks[0], step, tmp_path / "alone")
    assert tree(tmp_path / "E") == tree(tmp_path / "alone")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["E", "alone"]


def killed_at(run_, out, call):
    """Exports, and is killed at the call number `call` of Path.rename."""
    rename, count = Path.rename, []

    def until(self, target):
        count.append(target)
        if len(count) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.rename = until
    export(run_, 4, out)


@pytest.mark.parametrize("call", [2, 3, 4])
@pytest.mark.parametrize("next_fails", [True, False])
def test_an_export_that_is_killed_anywhere_keeps_the_earlier_one(two_ranks, tmp_path, call, next_fails):
    """Calls: the unfinished export gets its name; rename to OUT (refused), rename of the earlier export,
    rename to OUT."""
    out, bad = tmp_path / "E", copy_of(two_ranks, tmp_path / "run")
    export(two_ranks[0], 2, out)
    before = tree(out)
    (process,), _ = start_ranks(1, killed_at, two_ranks[0], out, call)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and out.exists() == (call < 4)
    flip(bad / "ckpt/step_000004/shard-00000.safetensors")
    if next_fails:
        with pytest.raises(UserError, match="is damaged"):
            export(bad, 4, out)
        assert tree(out) == before
    else:
        export(two_ranks[0], 4, out)
        assert json.loads((out / EXPORT).read_text())["step"] == 4
    assert {p.name for p in tmp_path.iterdir()} == {"E", "run"}


def theirs(out, what):
    """Adds something of the user's to the folder of an export."""
    new = out / what
    if what == "folder/model.safetensors":
        new.parent.mkdir()
        shutil.copy(out / "model.safetensors", new)
    elif what == "folder/torz.json":
        new.parent.mkdir()
        shutil.copy(out / EXPORT, new)
    elif what == "dead link":
        new.symlink_to("nowhere")
    elif what == "link":
        new.symlink_to("config.json")
    elif what == "config.json":
        new.rename(out / "real")
        new.symlink_to("real")
    elif what == "fifo":
        os.mkfifo(new)
    elif what == EXPORT:
        new.write_text('{"project": "mine", "files": {}}')
    elif what == "notes.txt":
        new.write_text("mine")
    else:
        new.mkdir(parents=True)


THEIRS = ["folder/model.safetensors", "folder/torz.json", "dead link", "link", "config.json", "fifo", EXPORT,
          "notes.txt", "empty folder", "empty/inside"]


@pytest.mark.parametrize("what", THEIRS)
def test_an_export_removes_only_files_that_it_wrote(two_ranks, tmp_path, what):
    out = tmp_path / "E"
    export(two_ranks[0], 2, out)
    theirs(out, what)
    before = sorted(out.rglob("*"))
    words = "E exists, and an export would replace .*; needed: a new path"
    with pytest.raises(UserError, match=words) as said:
        export(two_ranks[0], 4, out)
    assert sorted(out.rglob("*")) == before and (what.split("/")[0] in str(said.value) or what == EXPORT)


def test_what_a_user_adds_while_an_export_is_written_stays(two_ranks, tmp_path, monkeypatch):
    out = tmp_path / "E"
    export(two_ranks[0], 2, out)
    write = ckpt.save_torch_state_dict
    monkeypatch.setattr(ckpt, "save_torch_state_dict",
                        lambda *a: [write(*a), (out / "late.txt").write_text("mine")])
    with pytest.raises(UserError, match="would replace late.txt"):
        export(two_ranks[0], 4, out)
    assert (out / "late.txt").exists() and json.loads((out / EXPORT).read_text())["step"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["E"]


def test_a_folder_without_export_that_has_a_torz_json_is_refused(two_ranks, tmp_path):
    for i, text in enumerate(["{}", '{"files": {}}', "mine", '{"run": "", "step": 1, "who": "policy"}']):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}" / EXPORT).write_text(text)
        with pytest.raises(UserError, match="would replace .*torz.json"):
            export(two_ranks[0], 4, tmp_path / f"{i}")
        assert (tmp_path / f"{i}" / EXPORT).read_text() == text


def test_an_export_inside_a_checkpoint_is_refused(two_ranks, tmp_path):
    out = copy_of(two_ranks, tmp_path / "run")
    for place in ("step_000004/E", "step_000004/a/b", "step_000099", "step_000099/E", "best/E"):
        (out / "ckpt/best").unlink(missing_ok=True)
        (out / "ckpt/best").symlink_to("step_000002")
        with pytest.raises(UserError, match="is inside a checkpoint; needed: a path outside"):
            export(out, 4, out / "ckpt" / place)
        assert not (out / "ckpt" / place).exists()
    export(out, 4, out / "ckpt/mine")  # a name of its own in ckpt/ is the user's


def test_an_export_says_what_it_replaces(two_ranks, tmp_path, capsys):
    for step, who, words in ((2, "policy", ""), (4, "critic", f"the policy after 2 steps of {two_ranks[0]}"),
                             (2, "policy", "the critic after 4 steps")):
        export(two_ranks[0], step, tmp_path / "E", who)
        said = capsys.readouterr().out
        assert f"the {who} after {step} steps" in said and ("in place of" in said) == bool(words)
        assert words in said


def test_files_follow_the_umask(two_ranks, tmp_path):
    modes = {p: p.stat().st_mode & 0o777 for p in two_ranks[0].rglob("*")
             if p.is_file() and "/tb/" not in str(p)}
    assert set(modes.values()) == {0o666 & ~umask()}, modes
    before = os.umask(0o027)
    try:
        export(two_ranks[0], 4, tmp_path / "E")
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "E").iterdir()} == {0o640}


def umask():
    value = os.umask(0o022)
    os.umask(value)
    return value


def test_a_checkpoint_that_is_read_is_not_pruned(tmp_path):
    """Another process reads it. Later, the next save removes it."""
    one, two, three = marked(tmp_path, [1, 2, 3])
    (process,), _ = start_ranks(1, holding, one, tmp_path / "held")
    assert wait_until((tmp_path / "held").exists)
    assert ckpt.prune(tmp_path, 1, "") == [] and ckpt.complete(tmp_path) == [one, three]
    process.kill()
    process.join()
    assert ckpt.prune(tmp_path, 1, "") == [] and ckpt.complete(tmp_path) == [three]
    with pytest.raises(UserError, match="step_000001 was removed by its run"), ckpt.hold(one):
        pass


def holding(folder, file):
    with ckpt.hold(folder):
        file.touch()
        time.sleep(60)


def test_exports_of_a_run_that_goes_on_have_its_checkpoints(base, tmp_path):
    """With --keep 1 and a checkpoint after each step."""
    cfg = dataclasses.replace(base, out=str(tmp_path / "run"), steps=12, save_every=1, keep=1, eval_every=0,
                              lr_decay="constant")
    (process,), _ = start_ranks(1, ranks.main, cfg)
    done = []
    while process.is_alive():
        if ckpt.complete(tmp_path / "run"):
            export(tmp_path / "run", "last", tmp_path / "E")
            done.append(json.loads((tmp_path / "E" / EXPORT).read_text())["step"])
    assert len(set(done)) > 2 and process.exitcode == 0
    # The last save leaves a checkpoint that an export reads.
    assert [p.name for p in ckpt.complete(tmp_path / "run")][-1] == "step_000012"
    assert len(ckpt.complete(tmp_path / "run")) <= 2


# --- auxiliary files


def test_a_metrics_file_that_cannot_be_read_is_one_warning_of_a_save(tmp_path):
    """Nothing is pruned meanwhile: the best checkpoint is not known."""
    marked(tmp_path, [1, 2, 3])
    (tmp_path / "metrics.jsonl").mkdir()
    (said,) = run_ranks(1, saved_twice, tmp_path, "")
    assert len(said) == 3 and all("no old checkpoint was removed: " in line for line in said), said
    assert [p.name for p in ckpt.complete(tmp_path)] == [f"step_00000{i}" for i in range(1, 6)]


def saved_twice(out, part):
    configs.PATIENCE = 0.2
    if part:
        faulty(part, errno.EIO, 1.0, ["os.listdir"])
    saver, _, said = small(out, keep=1, keep_best="reward")
    saver.saved = 3
    for step in (4, 5):
        saver.save(step)
        saver.finish()
        assert saver.saved == step
        time.sleep(1.0)
    return said


def test_a_folder_of_checkpoints_that_cannot_be_listed_once_ends_no_run(tmp_path):
    marked(tmp_path, [1, 2, 3])
    (said,) = run_ranks(1, saved_twice, tmp_path, str(tmp_path / "ckpt"))
    assert said and all("can't be read (Input/output error)" in line for line in said), said
    assert [p.name for p in ckpt.complete(tmp_path)] == ["step_000005"]


def measured_without_descriptors():
    ledger = MemoryLedger("cpu")
    free = os.open("/dev/null", os.O_RDONLY)
    import resource

    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ledger.mark("weights")
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[::-1][:1] * 2)
    return ledger.readings["weights"][0]


def test_the_memory_metric_needs_no_free_descriptor():
    gib, = run_ranks(1, measured_without_descriptors)
    assert 0.01 < gib < 100


def test_a_line_for_a_closed_terminal_or_a_full_disk_ends_no_run(base, tmp_path, monkeypatch):
    logger = Logger(tmp_path, base, True, 0, {}, {})
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        logger.say("text " * 10_000)
        logger.alarm("text")
        logger.step(0, {"reward": 1.0})
        with contextlib.suppress(OSError):
            full.close()
    monkeypatch.undo()
    assert len(read_metrics(tmp_path)) == 1


def stopped_twice(base, out):
    run_ = train.prepare(dataclasses.replace(base, out=str(out)))
    write, calls = run_.saver._write, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    run_.saver._write = failing
    train.stop(run_, 1)
    return len(calls)


def test_a_stop_tries_to_save_twice(base, tmp_path):
    assert run_ranks(1, stopped_twice, base, tmp_path / "run") == [2]
    assert [p.name for p in ckpt.complete(tmp_path / "run")] == ["step_000001"]


def test_a_checkpoint_under_the_name_of_another_step_is_refused_and_prunes_nothing(two_ranks, base, tmp_path):
    out = copy_of(two_ranks, tmp_path / "run")
    shutil.copytree(out / "ckpt/step_000002", out / "ckpt/step_000900")
    said, = run_ranks(1, ranks.main, dataclasses.replace(base, out=str(out), keep=1))
    assert "step_000900 is the checkpoint after 2 steps; needed: the name step_000002, or another" in said
    for name in ("900", "last"):
        with pytest.raises(UserError, match="is the checkpoint after 2 steps"):
            export(out, name, tmp_path / "E")
    assert [p.name for p in ckpt.complete(out)] == ["step_000002", "step_000004", "step_000900"]
    ckpt.prune(out, 1, "", 4)  # as of a run that saves step 4 while the copy is there
    assert [p.name for p in ckpt.complete(out)] == ["step_000004", "step_000900"]
    elsewhere = shutil.copytree(out / "ckpt/step_000900", tmp_path / "mine")  # any name that names no step
    assert ckpt.read_state(elsewhere)["step"] == 2


# --- the lock


@pytest.mark.parametrize("text,words", [
    (b"", "is empty or cut"), (b'{"host": "a", "pi', "is empty or cut"), (b'{"host"', "is empty or cut"),
    (b'{"host": "a", "pid": 1, "start": "2"}', "belongs to a run on another host")])
def test_a_lock_says_what_it_is(tmp_path, text, words, monkeypatch, capfd):
    monkeypatch.setattr("guard.lock.DEAD", 1.0)
    (tmp_path / "lock").write_bytes(text)
    FolderLock(tmp_path / "lock").claim()
    assert f"the lock {tmp_path}/lock {words}" in capfd.readouterr().out


@pytest.mark.parametrize("how", ["loop", "input/output error", "folder"])
def test_a_lock_that_cannot_be_read_is_refused(tmp_path, how):
    (tmp_path / "lock").touch()
    spoil(tmp_path / "lock", how)
    with pytest.raises(UserError, match="lock can't be read"):
        FolderLock(tmp_path / "lock").claim()


def test_no_empty_lock_is_left_on_a_full_disk(tmp_path, monkeypatch):
    lock = FolderLock(tmp_path / "lock")
    lock.mine["host"] = Full()
    with pytest.raises(OSError, match="No space"):
        lock.claim()
    assert not list(tmp_path.iterdir())


class Full(dict):
    """json.dump fails on it as a write to a full disk does."""

    def items(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    def __bool__(self):
        return True


def test_a_run_that_slept_writes_no_row_after_its_lock_was_taken(base, tmp_path):
    """The lock's thread would look again only after 20 s."""
    cfg = dataclasses.replace(base, out=str(tmp_path / "o"), steps=1000, save_every=0, eval_every=0)
    (process,), _ = start_ranks(1, ranks.main, cfg)
    assert wait_until(lambda: len(read_metrics(tmp_path / "o")) > 1)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.2)
    (tmp_path / "o/lock").write_text(json.dumps({"host": "other", "pid": 7, "start": "1"}))
    before = (tmp_path / "o/metrics.jsonl").read_bytes()
    os.kill(process.pid, signal.SIGCONT)
    process.join(15)
    assert process.exitcode == 1
    assert (tmp_path / "o/metrics.jsonl").read_bytes().count(b"\n") <= before.count(b"\n") + 1


@pytest.mark.parametrize("call", ["step", "alarm", "save_samples", "_publish"])
def test_each_write_looks_at_the_lock(base, tmp_path, call):
    (said,) = run_ranks(1, looked, base, tmp_path, call)
    assert said == [call]


def looked(base, out, call):
    said = []

    def check():
        said.append(call)
        raise InterruptedError  # as the end of the process

    logger = Logger(out, base, True, 0, {}, {}, True, check)
    saver, _, _ = small(out)
    saver.check = check
    work = {"step": lambda: logger.step(0, {"reward": 1.0}), "alarm": lambda: logger.alarm("text"),
            "save_samples": lambda: logger.save_samples("samples", 0, []),
            "_publish": lambda: saver._publish(1, out / "x", [("", {})])}
    with pytest.raises(InterruptedError):
        work[call]()
    assert not [p for p in out.iterdir() if p.name in ("alarms.jsonl", "samples", "ckpt") and p.stat().st_size
                and p.is_file() or p.name == "samples"]
    assert read_metrics(out) == []
    return said


# --- signals and hosts


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_a_run_as_sigterm_does(number, ignored):
    before = signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with handle_signals(grace=5):
            os.kill(os.getpid(), number)
            assert bool(dist.stop_signal) != ignored
        assert signal.getsignal(number) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(number, before)


def test_a_closed_terminal_saves_a_run_of_two_launched_ranks(base, tiny, tmp_path):
    """All processes get the signal, as from a terminal. Their output has no reader."""
    command = [f"{ROOT}/train.py", "tiny-ppo", "--model", tiny, "--data", *base.data, "--ranks", "2",
               "--device", "cpu", "--go", "--steps", "500", "--eval_every", "0", "--save_every", "0",
               "--keep_best", "", "--out", f"{tmp_path}/run"]
    process = forked(*command, start_new_session=True)
    assert wait_until(lambda: len(read_metrics(tmp_path / "run")) > 1, 200)
    process.stdout.close()
    os.killpg(process.pid, signal.SIGHUP)
    process.wait(120)
    assert len(ckpt.complete(tmp_path / "run")) == 1 and process.returncode == 128 + signal.SIGHUP


def launched(folder, before: str) -> subprocess.Popen:
    """Launches two small ranks, after the code `before`."""
    (folder / "rank.py").write_text("import os, time\nprint(os.environ['MASTER_ADDR'], flush=True)\n"
                                    "time.sleep(3)\nprint('end')\n")
    (folder / "main.py").write_text("import ctypes, signal, sys, dist\nsys.argv = ['rank.py']\n"
                                    f"{before}\nsys.exit(dist.launch(2))\n")
    return forked(f"{folder}/main.py", cwd=folder, start_new_session=True)


def test_the_launcher_goes_on_under_nohup(tmp_path):
    process = launched(tmp_path, "signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    for _ in range(2):
        process.stdout.readline()
    os.killpg(process.pid, signal.SIGHUP)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and said == "end\nend\n"


def test_the_launcher_needs_no_name_of_its_host(tmp_path):
    if os.geteuid():
        pytest.skip("another host name takes root")
    process = launched(tmp_path, "libc = ctypes.CDLL(None)\nlibc.unshare(0x4000000)\n"
                       "libc.sethostname(b'node-x7', 7)")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and said.split() == ["127.0.0.1"] * 2 + ["end"] * 2


@pytest.mark.parametrize("environment,words", [
    ({"RANK": "x"}, "RANK is set, but RANK is 'x'"), ({"RANK": ""}, "but RANK is ''"),
    ({"RANK": "-1"}, "but RANK is '-1'"), ({"RANK": "0"}, "but WORLD_SIZE is ''"),
    ({"RANK": "0", "WORLD_SIZE": "2.0"}, "but WORLD_SIZE is '2.0'"),
    ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1", "MASTER_ADDR": "a"},
     "RANK is 2, and WORLD_SIZE is 2"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "x"}, "but MASTER_PORT is 'x'"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}, "but MASTER_ADDR is ''")])
def test_an_environment_that_is_not_torchruns_is_one_line(environment, words, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{words}; needed: unset RANK, or torchrun"):
        dist.init()


def alone(wait):
    dist.WAIT = wait
    dist.init("cpu", "float32", stall_limit=-38)  # a timeout of 3 s
    return ""


@pytest.mark.parametrize("rank,words", [(0, r"waits for ranks \[1, 2\] of 3 at"), (2, "waits for rank 0 at")])
def test_a_rank_that_waits_says_for_whom(rank, words, capfd):
    started, _ = start_ranks(3, only, rank)
    for process in started:
        process.join(30)
    assert re.search(f"^rank {rank} {words} 127.0.0.1:", capfd.readouterr().err, re.MULTILINE)


def only(rank):
    if os.environ["RANK"] == str(rank):
        alone(0.5)
    return ""


# --- models and prompts


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight",
                                  "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(tiny, tmp_path, name, value):
    folder = shutil.copytree(tiny, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[3] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for load in (load_policy, lambda path: [*files_weights(path, "cpu", torch.float32)]):
        with pytest.raises(UserError, match=f"NaN or infinity in {name}; needed: intact weights"):
            load(str(folder))


@pytest.mark.parametrize("key,value", [("hidden_size", -1), ("hidden_size", 0), ("vocab_size", -5),
                                       ("num_hidden_layers", -1), ("num_attention_heads", -2),
                                       ("hidden_size", "64"), ("intermediate_size", 1e9), ("hidden_size", 7),
                                       ("num_key_value_heads", -1), ("hidden_size", None)])
def test_sizes_of_a_config_that_are_wrong_are_one_line(tiny, tmp_path, key, value):
    folder = shutil.copytree(tiny, tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError) as said:
        load_policy(str(folder))
    assert "\n" not in str(said.value) and str(folder) in str(said.value)


@pytest.mark.parametrize("ids", [10**30, -1, 1.5, "7", [5, 10**30], [[5]], {"a": 1}])
def test_end_tokens_that_are_no_ids_are_one_line(tiny, tmp_path, ids):
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(UserError, match="eos_token_id in .*model is .*; needed: ids of tokens"):
        eos_ids(str(folder), load_tokenizer(str(folder)), load_config(str(folder)))


ENDLESS = ["{{ 'a' * 10**10 }}", "{{ 'a' * 10**9 }}", "{{ 10**10**8 }}", "{{ (10**10**6) ** 10**6 }}",
           "{{ '%10000000000d' % 1 }}", "{{ 'a' | center(10**10) }}", "{{ ('a,' * 10**9).split(',') }}",
           "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
           "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
           "{{ 'x' | indent(10**10, true) }}", "{{ [0] * 10**10 }}", "{{ 'ab' | replace('', 'x' * 10**9) }}"]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_that_takes_all_memory_or_time_in_c_code_is_refused(template):
    tokenizer, began = make(), time.monotonic()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="the chat template (refuses the row's turns|doesn't show)") as said:
        data.prompt_encoder("chat", tokenizer)([("user", "12+3=")])
    assert time.monotonic() - began < 60 and "\n" not in str(said.value)
    tokenizer.chat_template = "{{ 2**10 }}{{ messages[0].content }}"
    assert data.prompt_encoder("chat", tokenizer)([("user", "1")]) == tokenizer("10241").input_ids


def test_a_long_prompt_is_dropped_before_it_is_tokenized(tmp_path, monkeypatch):
    """A text of 50 MB. Tokenizing it takes minutes and gigabytes."""
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+" * 25_000_000, "answer": "3"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, said, began = make(), [], time.monotonic()
    lengths = []

    class Spy(type(tokenizer)):
        def __call__(self, text, **options):
            lengths.append(len(text))
            return super().__call__(text, **options)

    tokenizer.__class__ = Spy
    cfg = dataclasses.replace(configs.PRESETS["tiny-ppo"], data=())
    found = data.load_problems([f"{tmp_path}/a.jsonl"], tokenizer, cfg, said.append)
    assert [p.text for p in found] == ["1+1="] and "dropped 1 prompts over 16 tokens" in said[-1]
    assert max(lengths) < 1000 and time.monotonic() - began < 30


# --- one line for strange paths


def test_a_line_break_or_nul_in_a_path_is_one_line(tmp_path):
    done = subprocess.run([sys.executable, "reward.py", f"{tmp_path}/a\nb.jsonl"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and r"a\nb" in done.stderr
    with pytest.raises(UserError, match="a flag has a NUL character"):
        configs.parse(["tiny-ppo", "--out", "a\0b"])
    done = subprocess.run(f"{sys.executable} reward.py none.jsonl >&-", cwd=ROOT, shell=True,
                          capture_output=True, text=True)
    assert done.stderr.startswith("reward.py: no data file none.jsonl") and done.stderr.count("\n") == 1
