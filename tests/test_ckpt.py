"""Nothing is lost: on other ranks, killed, asked to stop, out of disk, stalled or not finite, a run goes on."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import ranks
import torch
from conftest import maths, run, run_ranks, start_ranks

import ckpt
import dist
from configs import PRESETS, UserError, changed
from log import read_metrics


def same(run_, two_ranks):
    """Whether metrics and weights are the two_ranks run's, bit by bit."""
    rows, policy = run_
    _, rows_, policy_ = two_ranks
    return maths(rows) == maths(rows_) and all(torch.equal(policy[k], policy_[k]) for k in policy_)


@pytest.mark.parametrize("count", [1, 4])
def test_a_checkpoint_of_two_ranks_is_the_same_on_any_number(two_ranks, base, count):
    """Whole weights and optimizer state, loaded on 1 and 4 ranks, are those of 2, bit by bit."""
    path, (two, *_) = two_ranks[0] / "ckpt" / "step_000002", run_ranks(2, ranks.restored, base, two_ranks[0])
    for other in run_ranks(count, ranks.restored, base, two_ranks[0]):
        assert other["step"] == two["step"] == 4 and set(other) == set(two) and len(two) > 50
        assert all(torch.equal(torch.as_tensor(other[k]), torch.as_tensor(two[k])) for k in two)
    assert ckpt.is_complete(path)


def test_a_rank_killed_anywhere_costs_nothing_saved(base, two_ranks, tmp_path):
    """kill -9 of either rank, before the first save and inside it: the run started again is the one never disturbed."""
    for i, moment in enumerate(("samples/step_000000*", "ckpt/.step_000002*")):
        out = tmp_path / str(i)
        processes = start_ranks(2, ranks.main, dataclasses.replace(base, out=str(out)))[0]
        deadline = time.monotonic() + 500
        while not list(out.glob(moment)) and all(p.is_alive() for p in processes) and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(processes[i % 2].pid, signal.SIGKILL)
        processes[i % 2].join()
        processes[1 - i % 2].terminate()  # as torchrun does
        for p in processes:
            p.join(120)
            assert p.exitcode not in (0, None)
        assert same(run(base, out, ranks=2), two_ranks), moment
        assert not list(out.glob("ckpt/.step*"))


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(base, two_ranks, tmp_path):
    """SIGUSR1 to one of two ranks: both save all whole steps and return; what goes on from there is the two_ranks run."""
    out = tmp_path / "s"
    cfg = dataclasses.replace(base, out=str(out), save_every=0)
    assert run_ranks(2, ranks.stopped, cfg, 1) == ["", ""]
    steps = [int(p.name[-6:]) for p in ckpt.complete(out)]
    assert len(steps) == 1 and 1 <= steps[0] < 4 and not (out / "export").exists()
    assert same(run(dataclasses.replace(base, save_every=0), out, ranks=2), two_ranks)


def test_a_full_disk_costs_one_checkpoint(base, tmp_path, capfd):
    """The disk is full when steps 4 are saved and not afterwards: the run ends well, its other checkpoints whole."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        out = disk / "run"

        def fill():
            while not (out / "ckpt/step_000002/COMPLETE").exists():
                time.sleep(0.01)
            with (disk / "ballast").open("wb", buffering=0) as f:
                with pytest.raises(OSError, match="No space"):
                    while True:
                        f.write(bytes(2**16))
            while not list(out.glob("ckpt/.step_000004*")):
                time.sleep(0.001)
            while list(out.glob("ckpt/.step_000004*")):  # until it is given up
                time.sleep(0.001)
            (disk / "ballast").unlink()

        filler = threading.Thread(target=fill, daemon=True)
        filler.start()
        cfg = dataclasses.replace(base, out=str(out), steps=8, eval_every=0, keep=5, keep_best="")
        assert run_ranks(2, ranks.main, cfg) == ["", ""]
        filler.join(10)
        assert not filler.is_alive()
        assert [p.name for p in ckpt.complete(out)] == ["step_000002", "step_000006", "step_000008"]
        assert [r["step"] for r in read_metrics(out)] == list(range(8))
        said = capfd.readouterr().out
        assert "!! the checkpoint after 4 steps failed" in said and "needed); the last complete one: step_000002" in said
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_loaded(base, tmp_path):
    said, = run_ranks(1, ranks.main, dataclasses.replace(base, out=str(tmp_path / "o"), keep=10**9))
    assert "free in" in said and "--keep" in said and not (tmp_path / "o" / "metrics.jsonl").exists()


def test_two_ranks_with_folders_of_their_own_are_refused(base, tmp_path):
    """Each of two hosts sees another disk under the same name, as unshared folders look: told in seconds."""
    began = time.monotonic()
    for said in run_ranks(2, ranks.unshared, dataclasses.replace(base, out=str(tmp_path / "o"))):
        if said == "no root":
            pytest.skip("mounting a disk for one rank takes root")
        assert f"other doesn't see {tmp_path / 'o'} as rank 0 on {os.uname().nodename} does" in said
    assert time.monotonic() - began < 10


def test_what_is_cut_short_does_not_count(two_ranks, tmp_path):
    out = tmp_path / "c"
    shutil.copytree(two_ranks[0] / "ckpt", out / "ckpt", symlinks=True)
    assert [p.name for p in ckpt.complete(out)] == ["step_000002", "step_000004"]
    file = max((out / "ckpt" / "step_000004").iterdir(), key=lambda f: f.stat().st_size)
    os.truncate(file, file.stat().st_size - 1)
    assert ckpt.find(out, "auto").name == "step_000002"
    (out / "ckpt" / "step_000002" / "COMPLETE").unlink()
    assert ckpt.find(out, "auto") is None


def test_the_newest_and_the_best_are_kept(tmp_path):
    (tmp_path / "ckpt").mkdir()
    scores = {1: 0.3, 2: 0.9, 3: 0.5, 4: 0.4, 5: 0.6}
    rows = [json.dumps({"step": step, "eval/a/avg@1": score}) + "\n" for step, score in scores.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    for step in scores:
        folder = ckpt.step_folder(tmp_path, step)
        folder.mkdir()
        (folder / "COMPLETE").write_text("{}")
        ckpt.prune(tmp_path, 2, "auto")
    assert [p.name for p in ckpt.complete(tmp_path)] == ["step_000002", "step_000004", "step_000005"]
    assert os.readlink(tmp_path / "ckpt" / "best") == "step_000002"


def test_a_config_that_is_another_algorithm_is_refused(two_ranks, base):
    other = dataclasses.replace(base, out=str(two_ranks[0]), policy_lr=1e-4, clip_low=0.1, pack_len=512)
    said = run_ranks(2, ranks.main, other)
    assert all("policy_lr: 0.001 -> 0.0001; clip_low: 0.2 -> 0.1" in s and "pack_len" not in s for s in said)
    said, = run_ranks(1, ranks.main, dataclasses.replace(base, out=str(two_ranks[0]), resume="never"))
    assert "is not empty" in said


def test_what_may_differ_on_resume():
    old = json.loads(json.dumps(dataclasses.asdict(PRESETS["orz-7b"])))
    free = dict(ranks=4, engine_share=0.5, out="x", pack_len=20000, keep=7, data=("elsewhere.jsonl",), steps=9)
    assert changed(old, dataclasses.asdict(dataclasses.replace(PRESETS["orz-7b"], **free))) == []
    debug = dict(layout="debug", prompts_per_step=16, samples_per_prompt=2, critic_updates=1)
    assert changed(old, dataclasses.asdict(dataclasses.replace(PRESETS["orz-7b"], **debug))) == []
    other = dataclasses.replace(PRESETS["orz-7b"], prompts_per_step=16, betas=(0.9, 0.99), seed=1)
    assert changed(old, dataclasses.asdict(other)) == ["seed: 0 -> 1", "prompts_per_step: 128 -> 16",
                                                       "betas: [0.9, 0.95] -> [0.9, 0.99]"]


def test_an_update_that_is_not_finite_is_left_out(base, tmp_path):
    """Weights and moments stay as they were, the packs are kept; the third in a row ends the run."""
    left, again, ended = run_ranks(1, ranks.not_finite, dataclasses.replace(base, out=str(tmp_path)))[0]
    assert left and again and "three updates" in ended
    assert len(list((tmp_path / "nonfinite").iterdir())) >= 1


def test_a_stall_ends_every_rank_with_its_stack(base, tmp_path, capfd):
    """One of two ranks hangs in a phase: both print where they are and leave, in seconds."""
    began = time.monotonic()
    processes, _ = start_ranks(2, ranks.stalled)
    for p in processes:
        p.join(120)
    assert [p.exitcode for p in processes] == [1, 1] and time.monotonic() - began < 100
    said = capfd.readouterr().err
    assert all(f"rank {r}: stalled" in said for r in (0, 1)) and "this rank is in phase grading" in said
    assert re.search(r"^rank 1: .*/ranks.py\", line \d+ in hang$", said, re.MULTILINE)


def test_the_command_exports_either_model(two_ranks, tmp_path, capsys):
    for who, architecture in (("policy", "Qwen2ForCausalLM"), ("critic", "Qwen2ForSequenceClassification")):
        ckpt.main(["export", str(two_ranks[0]), "4", str(tmp_path / who), who])
        said = json.loads((tmp_path / who / "config.json").read_text())
        assert said["architectures"] == [architecture]
        ours, theirs = ((Path(f) / "model.safetensors").read_bytes() for f in (tmp_path / who, two_ranks[0] / "export" / who))
        assert ours == theirs
    with pytest.raises(ckpt.UserError, match="one of step_000002, step_000004"):
        ckpt.main(["export", str(two_ranks[0]), "3", str(tmp_path / "x")])


def test_a_run_begun_elsewhere_goes_on_in_its_own_folder(tmp_path, monkeypatch):
    """--resume PATH starts from PATH, after a restart from what the run has saved since; an older checkpoint of its own is
    refused, for what came after it would be lost."""
    def checkpoint(run, step):
        folder = ckpt.step_folder(tmp_path / run, step)
        folder.mkdir(parents=True)
        (folder / "COMPLETE").write_text("{}")
        return folder

    there, out = checkpoint("there", 6), tmp_path / "here"
    assert ckpt.find(out, "auto") is None and ckpt.find(out, str(tmp_path / "there")) == there == ckpt.find(out, str(there))
    eight, ten = checkpoint("here", 8), checkpoint("here", 10)
    assert ckpt.find(out, "auto") == ckpt.find(out, str(there)) == ckpt.find(out, str(ten)) == ten
    with pytest.raises(UserError, match="step_000008 is older than .*step_000010; needed: another --out"):
        ckpt.find(out, str(eight))
    with pytest.raises(UserError, match="no complete checkpoint"):
        ckpt.find(tmp_path / "new", str(tmp_path / "nothing"))


def test_signals_are_heeded_only_while_training():
    """Inside, a signal asks for a stop; afterwards the handlers of before are back and nothing ends the process later."""
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGINT)
    with dist.heed_signals(grace=0.2):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert dist.ASKED and signal.getsignal(signal.SIGINT) != before[1]
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGINT)) == before
    time.sleep(0.5)  # longer than the grace
