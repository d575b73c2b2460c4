"""Tests of files that can't be read, have wrong content, or are read and written by several processes."""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import ranks
import torch
from conftest import ROOT, forked, run_ranks, start_ranks, wait_until
from safetensors.torch import load_file, save_file
from test_ckpt import copy_of, marked, small, tree

import ckpt
import configs
import dist
import train
from engine import MemoryLedger, eos_ids
from grading.rows import problem_rows, read_rows
from guard import files
from guard.checks import is_run
from guard.files import checked, exists
from guard.lock import FolderLock
from guard.messages import UserError
from guard.watch import handle_signals
from log import Logger, read_metrics
from model import files_weights, load_config, load_policy, load_tokenizer
from reward import check_function
from tools import report

OTHER = 65534  # the user nobody


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0.05)


def spoil(path: Path, how: str) -> None:
    """Puts something that can't be read in the place of a file or folder."""
    path.rename(path.with_name(f"{path.name}.real"))
    if how == "folder":
        path.mkdir()
    else:
        path.symlink_to({"loop": path, "input/output error": "/proc/self/mem"}[how])


def faulty(part: str, number: int, times: int, events=("open", "os.listdir", "os.scandir")) -> list:
    """Opening a file or listing a folder whose path ends in `part` raises an OSError, `times` times. Returns
    a list with an entry for each error that is still to come. The caller may empty it."""
    left = [None] * times

    def hook(event, args):
        if left and event in events and str(args[0]).endswith(part):
            left.pop()
            raise OSError(number, os.strerror(number), args[0])

    sys.addaudithook(hook)
    return left


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
    for look in (lambda: ckpt.find(out, "auto"), lambda: ckpt.named(str(out)),
                 lambda: ckpt.named(f"{out}/4")):
        with pytest.raises(UserError, match=f"{place}.* can't be read"):
            look()


@pytest.mark.parametrize("place", ["ckpt", "ckpt/step_000004", "ckpt/step_000004/COMPLETE", "config.json"])
def test_a_link_to_a_disk_that_is_not_mounted_is_not_absent(two_ranks, tmp_path, place):
    out = shutil.copytree(two_ranks[0], tmp_path / "run", symlinks=True)
    (out / place).rename(tmp_path / "disk")
    (out / place).symlink_to(tmp_path / "disk")
    look = is_run if place == "config.json" else functools.partial(ckpt.find, resume="auto")
    assert look(out) in (True, out / "ckpt/step_000004")
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    with pytest.raises(UserError, match=f"{place}.* can't be read .a link without its target.; needed: "):
        look(out)
    assert ckpt.find(tmp_path / "new", "auto") is None and not is_run(tmp_path / "new")


@pytest.mark.parametrize("how", ["loop", "input/output error"])
@pytest.mark.parametrize("name", ["d.json", "d.jsonl", "d.parquet", "d.arrow", "r.py", "t.txt"])
def test_a_file_of_the_user_that_cannot_be_read_is_one_line(tmp_path, name, how):
    """Data, a reward and a template."""
    path = tmp_path / name
    path.write_text("{problem}")
    spoil(path, how)
    look = {"r": lambda: check_function(f"{path}:score"), "t": lambda: configs.prompt_form(str(path))}
    with pytest.raises(UserError, match=rf"^{path} can't be read \(.*; needed: ") as e:
        look.get(name[0], lambda: list(read_rows(str(path))))()
    assert "\n" not in str(e.value)


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


def rows_in(out):
    return list(problem_rows(f"{out}/data/d.json", "math"))


def test_data_of_another_user_is_one_line():
    """On several machines, each rank reads --data without an earlier look at its path."""
    if os.geteuid():
        pytest.skip("another user takes root")
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        (out / "data").mkdir(0o700)
        (out / "data/d.json").write_text('[{"prompt": "1+1=", "answer": "2"}]')
        said, = run_ranks(1, as_nobody, out, rows_in)
        assert said.startswith(f"{out}/data/d.json can't be read (Permission denied); needed: permission")


def resumed(cfg, part, number, times):
    files.PATIENCE = 60.0
    left = faulty(part, number, times)
    found = ranks.prepared(cfg)
    return found if isinstance(found, str) or left else found["start"]


@pytest.mark.parametrize("part", ["step_000004/COMPLETE", "/run/ckpt", "metrics.jsonl", "config.json"])
def test_a_file_server_that_fails_a_few_times_changes_nothing(base, two_ranks, tmp_path, part):
    cfg = dataclasses.replace(base, out=str(tmp_path / "run"))
    shutil.copytree(two_ranks[0], tmp_path / "run", symlinks=True)
    assert run_ranks(1, resumed, cfg, part, errno.ESTALE, 4) == [4]


def prepared_with_a_fault(cfg, part, event):
    if os.environ["RANK"] == "1":
        faulty(part, errno.EIO, 10**6, [event])
    return ranks.prepared(cfg)


@pytest.mark.parametrize("part,event", [("ckpt/step_000004", "os.listdir"), ("model/merges.txt", "open")])
def test_a_file_that_one_rank_cannot_read_is_the_line_that_all_show(base, two_ranks, tmp_path, part, event):
    """The list of a checkpoint's files, and a file of the model that only the hash of its folder reads."""
    model = shutil.copytree(base.model, tmp_path / "model")
    (model / "merges.txt").touch()
    cfg = dataclasses.replace(base, out=str(tmp_path / "run"), model=str(model))
    copy_of(two_ranks, tmp_path / "run")
    first, second = run_ranks(2, prepared_with_a_fault, cfg, part, event)
    assert first == second and f"{part} can't be read" in first and "; needed: " in first


def test_the_types_of_json_values_are_checked():
    shape, good = {"step": int, "note": str | None}, {"step": 1, "f": {"bytes": 2}}
    assert checked(good, shape, "file") is good and checked(good | {"note": "x"}, shape, "file")
    for value, words in ((good | {"step": "1"}, "file: step is '1'; needed: int"), ({}, "step is None"),
                         (good | {"note": 3}, "note is 3"), ([], r"file: \[\]; needed: dict")):
        with pytest.raises(UserError, match=words):
            checked(value, shape, "file")


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
        (folder / "COMPLETE").write_text(json.dumps(mark | ckpt._crc32s(folder / name)))

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
        (tmp_path / "lock").write_bytes(text)
        FolderLock(tmp_path / "lock").owner()

    def generation():
        (tmp_path / "generation_config.json").write_bytes(text)
        eos_ids(str(tmp_path), make(), types.SimpleNamespace(vocab_size=1000))

    for look in (carried, state, complete, lock, generation):
        with contextlib.suppress(UserError):
            look()
            assert look is generation and (text[:1] == b"{" or text == b"1" * 5000) or (
                look in (carried, lock) and text == b""), look
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


def test_exports_to_one_folder_at_once_are_all_whole(two_ranks, tmp_path):
    """Four processes write two policies, two times each."""
    jobs = [start_ranks(1, exporting, two_ranks[0], step, tmp_path / "E", 2) for step in (2, 4, 2, 4)]
    for (process,), _ in jobs:
        process.join(300)
        assert process.exitcode == 0
    exports = sorted(tmp_path.iterdir())
    assert [p.name for p in exports] == ["E", *(f"E.{i}" for i in range(1, 8))]
    alone = {step: tree(two_ranks[0] / "export/policy") if step == 4 else None for step in (2, 4)}
    export(two_ranks[0], 2, tmp_path / "alone")
    alone[2] = tree(tmp_path / "alone")
    for path in exports:
        step = json.loads((path / EXPORT).read_text())["step"]
        assert tree(path) == alone[step]


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


@pytest.mark.parametrize("call", [1, 2])
def test_an_export_that_is_killed_anywhere_keeps_the_earlier_one(two_ranks, tmp_path, call):
    """Calls: the earlier export gets another name, the new one gets the name OUT."""
    out = tmp_path / "E"
    export(two_ranks[0], 2, out)
    before = tree(out)
    (process,), _ = start_ranks(1, killed_at, two_ranks[0], out, call)
    process.join(300)
    assert process.exitcode == -signal.SIGKILL and out.exists() == (call == 1)
    export(two_ranks[0], 4, out)
    assert tree(tmp_path / "E.1") == before and json.loads((out / EXPORT).read_text())["step"] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["E", "E.1"]


def test_a_file_system_that_cannot_sync_folders_has_checkpoints(tmp_path, monkeypatch):
    sync = os.fsync
    broken = {"folder": errno.EINVAL, "file": 0}

    def fsync(descriptor):
        error = broken["folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"]
        if error:
            raise OSError(error, os.strerror(error))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for step, error in ((1, 0), (2, errno.EIO)):
        broken["file"] = error
        (temp := tmp_path / f".{step}").mkdir()
        with pytest.raises(OSError) if error else contextlib.nullcontext():
            ckpt.publish(temp, tmp_path / f"{step}", {"step": step}, {})
    assert [p.name for p in tmp_path.glob("[12]")] == ["1"]


def flock_of_nfs(real, descriptor, kind):
    """flock, with the rules of NFS: an exclusive lock needs a file that is open for writing."""
    mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    if (kind & fcntl.LOCK_EX and mode == os.O_RDONLY) or (kind & fcntl.LOCK_SH and mode == os.O_WRONLY):
        raise OSError(errno.EBADF, "Bad file descriptor")
    real(descriptor, kind)


def test_a_checkpoint_that_is_read_stays_also_on_nfs(tmp_path, monkeypatch):
    old, new = marked(tmp_path, [2, 4])
    monkeypatch.setattr(fcntl, "flock", functools.partial(flock_of_nfs, fcntl.flock))
    with ckpt.hold(old):
        ckpt.prune(tmp_path, 1, "")
        assert ckpt.complete(tmp_path) == [old, new]
    ckpt.prune(tmp_path, 1, "")
    assert ckpt.complete(tmp_path) == [new]


def test_steps_that_are_repeated_are_exported_again(base, two_ranks, tmp_path):
    """The last checkpoint of a finished run is gone. Its old export gets another name."""
    out = shutil.copytree(two_ranks[0], tmp_path / "run", symlinks=True)
    shutil.rmtree(out / "ckpt/step_000004")
    (out / "export/policy/note.txt").write_text("old")
    assert run_ranks(1, ranks.main, dataclasses.replace(base, out=str(out))) == [""]
    assert (out / "export/policy.1/note.txt").exists() and not (out / "export/policy/note.txt").exists()


def test_what_a_user_makes_while_an_export_is_written_stays(two_ranks, tmp_path, monkeypatch):
    out, write = tmp_path / "E", ckpt.save_torch_state_dict
    monkeypatch.setattr(ckpt, "save_torch_state_dict",
                        lambda *a: [write(*a), out.mkdir(), (out / "late.txt").write_text("mine")])
    with pytest.raises(UserError, match="E exists"):
        export(two_ranks[0], 4, out)
    assert [p.name for p in tmp_path.rglob("*")] == ["E", "late.txt"]


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


def trained_without_chmod(cfg):
    def refused(*args, **options):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    os.chmod = refused
    return ranks.main(cfg)


def test_a_disk_whose_files_belong_to_another_user_has_checkpoints_and_exports(base, tmp_path):
    """As one that root mounted with `-o umask=000`: all may write, and only root may call chmod."""
    cfg = dataclasses.replace(base, out=str(tmp_path), steps=1, eval_every=0)
    assert run_ranks(1, trained_without_chmod, cfg) == [""]
    assert len(ckpt.complete(tmp_path)) == 1 and (tmp_path / "export/policy/model.safetensors").exists()


def umask():
    value = os.umask(0o022)
    os.umask(value)
    return value


# --- auxiliary files


def test_a_metrics_file_that_cannot_be_read_is_one_warning_of_a_save(tmp_path):
    """Nothing is pruned meanwhile: the best checkpoint is not known."""
    marked(tmp_path, [1, 2, 3])
    (tmp_path / "metrics.jsonl").mkdir()
    (said,) = run_ranks(1, saved_twice, tmp_path, "")
    assert len(said) == 3 and all("an old checkpoint was not removed" in line for line in said), said
    assert [p.name for p in ckpt.complete(tmp_path)] == [f"step_00000{i}" for i in range(1, 6)]


def saved_twice(out, part):
    left = faulty(part, errno.EIO, 1000, ["os.listdir"]) if part else []
    saver, _, said = small(out, keep=1, keep_best="reward")
    saver.saved = 3
    for step in (4, 5):
        saver.save(step)
        saver.finish()
        assert saver.saved == step
        left.clear()
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


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_runs_with_closed_streams(closed):
    """As with `ssh HOST 'COMMAND >&- 2>&- <&- &'`. What it opens gets no number of these streams."""
    code = """
import os, subprocess, sys
from guard.messages import show, user_errors
with user_errors('x'):
    show('text')
    print('text', file=sys.stderr)
    assert os.open('.', os.O_RDONLY) > 2 and not subprocess.call('echo text; echo text >&2', shell=True)
"""
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}" {closed}'], cwd=ROOT, timeout=99)
    assert done.returncode == 0


def test_a_log_on_a_full_disk_changes_no_run(base, tiny, tmp_path):
    """Each line is lost, from the first one to the summary. -u: as torchrun starts a rank"""
    command = [sys.executable, "-u", f"{ROOT}/train.py", "tiny-ppo", "--model", tiny, "--data", *base.data,
               "--reward", *base.reward, "--device", "cpu", "--go", "--steps", "1", "--prompts_per_step", "2",
               "--samples_per_prompt", "2", "--out", f"{tmp_path}/run"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/export/policy").is_dir() and (tmp_path / "run/report.html").exists()


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


def refused_while_it_saves(cfg):
    real = os.fsync

    def slow(descriptor):
        time.sleep(0.5)
        real(descriptor)

    os.fsync = slow
    return ranks.main(cfg), os.listdir(cfg.folder / "ckpt")


def test_a_refused_run_ends_its_save_before_another_run_may_begin(base, tmp_path):
    """From the second step on, a reward is refused. The next run would delete the half-written checkpoint."""
    (tmp_path / "r.py").write_text("calls = []\ndef f(response, answer, kind):\n    calls.append(1)\n"
                                   "    return len(response) if len(calls) <= 32 else -1.0\n")
    cfg = dataclasses.replace(base, algo="grpo", critic_updates=1, advantage="group_mean_over_mean",
                              save_every=1, eval_every=0, reward=(f"{tmp_path}/r.py:f",),
                              out=str(tmp_path / "run"))
    ((said, found),) = run_ranks(1, refused_while_it_saves, cfg)
    assert "negative score" in said and found == ["step_000001"]


# --- the lock


@pytest.mark.parametrize("how", ["loop", "input/output error", "folder"])
def test_a_lock_that_cannot_be_read_is_refused(tmp_path, how):
    (tmp_path / "lock").touch()
    spoil(tmp_path / "lock", how)
    with pytest.raises(UserError, match="lock can't be read"):
        FolderLock(tmp_path / "lock").claim()


def test_a_lock_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "lock").write_text('{"host": "lost"}')

    def refused(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(FolderLock, "claim", refused)
    with pytest.raises(UserError, match="can't write .*lock .*Permission denied.*; needed: "):
        FolderLock(tmp_path / "lock").refuse_living()


def test_a_lock_that_cannot_be_filled_is_released_without_another_error(tmp_path):
    """As on a full disk. An error of the release would hide the line that says what is needed."""
    lock, (soft, hard) = FolderLock(tmp_path / "lock"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            lock.claim()
        lock.release()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_name_in_a_lock_is_on_the_disk_while_the_run_goes_on(tmp_path, monkeypatch):
    """NFS writes an open file to the server only when it must, and the other hosts look for the name."""
    lock, real, names = FolderLock(tmp_path / "lock"), os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda fd: names.append(lock.owner()) or real(fd))
    lock.claim()
    lock.release()
    assert names == [lock.mine]


def test_a_folder_in_use_on_this_host_is_refused_before_torch_is_imported(base, tiny, tmp_path):
    holder = FolderLock(tmp_path / "run/lock")
    holder.claim()
    done = subprocess.run([sys.executable, "-X", "importtime", f"{ROOT}/train.py", "tiny-ppo", "--ranks", "2",
                           "--model", tiny, "--data", *base.data, "--out", f"{tmp_path}/run"],
                          capture_output=True, text=True, timeout=300)
    holder.release()
    assert f"run is in use by process {os.getpid()} on " in done.stderr.splitlines()[-1]
    assert "| torch\n" not in done.stderr


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


def test_only_a_second_ctrl_c_to_the_same_process_ends_it():
    """Another rank's signal came 3 seconds earlier. The first ctrl-C here must not end the process."""
    code = """
import os, signal, sys, time
from guard import watch
with watch.handle_signals(100.0):
    watch.request_stop("a signal to another rank")
    watch.stop_signal[1] -= 3
    os.kill(os.getpid(), signal.SIGINT)
    print("goes on", flush=True)
    time.sleep(2.1)
    os.kill(os.getpid(), signal.SIGINT)
    print("must not be reached")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"RANK": "1"})
    assert done.stdout == "goes on\n" and done.returncode == 1, done.stderr


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL, signal.SIGUSR1])
def test_a_closed_terminal_saves_a_run_of_two_launched_ranks(base, tiny, tmp_path, number):
    """All processes get SIGHUP, as from a terminal, and their output has no reader. Only their launcher gets
    SIGKILL, and only a rank SIGUSR1. The run is then not complete, and its status says so."""
    command = [f"{ROOT}/train.py", "tiny-ppo", "--model", tiny, "--data", *base.data, "--ranks", "2",
               "--device", "cpu", "--go", "--steps", "500", "--eval_every", "0", "--save_every", "0",
               "--keep_best", "", "--reward", *base.reward, "--prompts_per_step", "2", "--samples_per_prompt",
               "2", "--out", f"{tmp_path}/run"]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, the run would go on
    environment = os.environ | {"PET_MAX_RESTARTS": "3"}  # of Kubeflow, for torchrun
    process = forked(*command, environment=environment, start_new_session=True)
    signal.signal(signal.SIGHUP, before)
    going = wait_until(lambda: len(read_metrics(tmp_path / "run")) > 1)
    process.stdout.close()
    if number == signal.SIGUSR1:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(children.split()[1]), number)
    else:
        os.killpg(process.pid, number)
    process.communicate(timeout=300)  # until the ranks have ended
    assert going and len(ckpt.complete(tmp_path / "run")) == 1 and not exists(tmp_path / "run/export")
    status = {signal.SIGKILL: -number, signal.SIGUSR1: 130}
    assert process.returncode == status.get(number, 128 + number)


def test_a_ctrl_c_that_comes_during_an_import_ends_the_start(base, tiny, tmp_path):
    """Python ignores exceptions in some places of an import, as this one does."""
    (tmp_path / "sitecustomize.py").write_text("""
import os, signal, sys
class Finder:
    def find_spec(name, *_):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                os._exit(99)
sys.meta_path.insert(0, Finder)
""")
    command = [f"{ROOT}/train.py", "tiny-ppo", "--model", tiny, "--data", *base.data, "--out",
               f"{tmp_path}/run"]
    done = subprocess.run([sys.executable, *command], timeout=300,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 130


def launched(tmp_path, grace):
    """Launches two ranks of rank.py, which print their process ids. Returns the launcher and these ids."""
    main = f"import sys, dist\nsys.argv = ['rank.py']\nsys.exit(dist.launch(2, {grace}))\n"
    (tmp_path / "main.py").write_text(main)
    process = forked(f"{tmp_path}/main.py", cwd=tmp_path)
    return process, [int(process.stdout.readline()) for _ in range(2)]


def test_a_second_ctrl_c_ends_the_launcher_at_once(tmp_path):
    """The kernel then ends the ranks (see train.py). These ranks ignore all signals."""
    (tmp_path / "rank.py").write_text("import os, signal, time\nfor number in (2, 15):\n"
                                      "    signal.signal(number, signal.SIG_IGN)\n"
                                      "print(os.getpid(), flush=True)\ntime.sleep(100)\n")
    process, pids = launched(tmp_path, 90)
    try:
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(2.5)
        assert process.wait(30) == 130
    finally:
        for pid in [process.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_the_launcher_goes_on_under_nohup_and_needs_no_name_of_its_host(tmp_path):
    """Launches two small ranks. Only root can change the name of the host."""
    (tmp_path / "rank.py").write_text("import os, sys, time\n"
                                      "sys.stdout.write(os.environ['MASTER_ADDR'] + '\\n')\n"
                                      "sys.stdout.flush()\nwhile not os.path.exists('go'):\n"
                                      "    time.sleep(0.02)\nsys.stdout.write('end\\n')\n")
    rename = "libc = ctypes.CDLL(None)\nlibc.unshare(0x4000000)\nlibc.sethostname(b'node-x7', 7)"
    (tmp_path / "main.py").write_text("import ctypes, signal, sys, dist\nsys.argv = ['rank.py']\n"
                                      "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
                                      f"{'' if os.geteuid() else rename}\nsys.exit(dist.launch(2, 9))\n")
    process = forked(f"{tmp_path}/main.py", cwd=tmp_path, start_new_session=True)
    assert [process.stdout.readline() for _ in range(2)] == ["127.0.0.1\n"] * 2
    os.killpg(process.pid, signal.SIGHUP)
    (tmp_path / "go").touch()
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and said.split() == ["end"] * 2


def test_the_launcher_passes_sigusr1_on(tmp_path):
    """Launches two small ranks, which end when they get the signal."""
    (tmp_path / "rank.py").write_text("import os, signal, time\nfrom pathlib import Path\n"
                                      "def hear(*_):\n    Path('heard' + os.environ['RANK']).touch()\n"
                                      "    os._exit(0)\n\nsignal.signal(signal.SIGUSR1, hear)\n"
                                      "print(os.getpid(), flush=True)\nwhile True:\n    time.sleep(0.02)\n")
    process, pids = launched(tmp_path, 9)
    try:
        process.send_signal(signal.SIGUSR1)
        assert process.wait(300) == 128 + signal.SIGUSR1
        assert (tmp_path / "heard0").exists() and (tmp_path / "heard1").exists()
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_the_launcher_passes_every_word_on_as_it_was_typed(tmp_path):
    """torchrun would replace $$ and ${local_rank}. Kubeflow's PET_NNODES is for torchrun."""
    words = ["$$", "a$$b$c", "${local_rank}", "$local_rank"]
    (tmp_path / "rank.py").write_text("import json, os, sys\nfrom pathlib import Path\n"
                                      "Path(os.environ['RANK']).write_text(json.dumps(sys.argv))\n")
    (tmp_path / "main.py").write_text(f"import sys, dist\nsys.argv = {['rank.py', *words]}\n"
                                      "sys.exit(dist.launch(2, 9))\n")
    process = forked(f"{tmp_path}/main.py", cwd=tmp_path, environment=os.environ | {"PET_NNODES": "2"})
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()
    assert [json.loads((tmp_path / rank).read_text()) for rank in "01"] == [["rank.py", *words]] * 2


@pytest.mark.parametrize("cause,line", [
    ("raise ValueError('the cause')", "ValueError: the cause"),
    ("os.kill(os.getpid(), 9)", "train.py: rank 1 ended with SIGKILL (the cause may be a lack of host m")])
def test_the_line_of_a_crash_is_the_cause_and_not_the_lost_connection(tmp_path, cause, line):
    (tmp_path / "rank.py").write_text("import os, dist\nfrom guard.watch import report_crash\n"
                                      "world = dist.init('cpu')\ntry:\n    if world.rank:\n"
                                      f"        {cause}\n    dist.gather(0)\n"
                                      "except Exception:\n    report_crash()\n    os._exit(1)\n")
    main = "import sys, dist\nsys.argv = ['rank.py']\nsys.exit(dist.launch(2, 9))\n"
    (tmp_path / "main.py").write_text(main)
    said = forked(f"{tmp_path}/main.py", cwd=tmp_path).communicate(timeout=300)[1]
    assert said.splitlines()[-1].startswith(line)


@pytest.mark.parametrize("environment,words", [
    ({"RANK": "x"}, "RANK is set, but RANK is 'x'"), ({"RANK": "0"}, "but WORLD_SIZE is ''"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}, "but MASTER_ADDR is ''")])
def test_an_environment_that_is_not_torchruns_is_one_line(environment, words, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{words}; needed: unset RANK, or torchrun"):
        dist.init()


def test_a_rank_that_waits_says_for_whom(capfd):
    started = [start_ranks(3, only, rank) for rank in (0, 1)]
    for processes, _ in started:
        for process in processes:
            process.join(300)
    said = "".join(capfd.readouterr())
    assert "rank 0 waits for ranks [1, 2] of 3 at 127.0.0.1" in said
    assert "rank 1 waits for rank 0 of 3 at 127.0.0.1" in said


def only(rank):
    if os.environ["RANK"] == str(rank):
        dist.WAIT = 0.1
        dist.init("cpu", "float32", stall_limit=-38)  # a timeout of 3 s
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


def test_end_tokens_that_the_model_cannot_sample_are_left_out(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    tokenizer, config = load_tokenizer(str(folder)), load_config(str(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, config.vocab_size]}))
    assert eos_ids(str(folder), tokenizer, config) == {5, tokenizer.eos_token_id}


# --- one line for strange paths


def test_a_line_break_in_a_path_is_one_line(tmp_path):
    done = subprocess.run([sys.executable, "reward.py", f"{tmp_path}/a\nb.jsonl"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and r"a\nb" in done.stderr
