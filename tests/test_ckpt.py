"""Nothing is lost: on other ranks, killed, asked to stop, with a full disk, stalled or not finite, a run goes
on."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time

import pytest
import ranks
import torch
from conftest import maths, run, run_ranks, start_ranks
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
import dist
from configs import PRESETS, UserError, changed
from log import read_metrics


def same(run_, two_ranks):
    """Whether metrics and weights are those of the run `two_ranks`, bit by bit."""
    rows, policy = run_
    _, rows_, policy_ = two_ranks
    return maths(rows) == maths(rows_) and all(torch.equal(policy[k], policy_[k]) for k in policy_)


def restore(count, base, out):
    """What each of `count` ranks loads from the newest checkpoint of `out`: whole tensors by key, and
    `step`."""
    return run_ranks(count, ranks.restored, base, out)


def equal(a, b):
    """Whether two dictionaries of tensors and numbers are the same, bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


@pytest.mark.parametrize("count", [1, 4])
def test_a_checkpoint_of_two_ranks_is_the_same_on_any_number(two_ranks, base, count):
    """Whole weights and optimizer state, loaded on 1 and on 4 ranks, are those of 2 ranks, bit by bit."""
    two = restore(2, base, two_ranks[0])[0]
    assert two["step"] == 4 and len(two) > 50
    assert all(equal(other, two) for other in restore(count, base, two_ranks[0]))


def test_a_checkpoint_is_plain_safetensors_and_nothing_is_pickled(two_ranks, base):
    """Any safetensors reader opens the files. Their slices, placed at the offsets in the headers, fill the
    whole tensors, which are what resume loads. Beside them there is JSON only."""
    path, (whole,) = two_ranks[0] / "ckpt" / "step_000004", restore(1, base, two_ranks[0])
    assert whole.pop("step") == 4
    found = {key: torch.full_like(x, torch.nan) for key, x in whole.items()}
    for file in sorted(path.iterdir()):
        if file.suffix != ".safetensors":
            assert json.loads(file.read_text()) and file.name in ("state.json", "COMPLETE")
            continue
        with safe_open(file, "pt") as f:  # raises where a byte of the file belongs to no tensor
            offsets = json.loads(f.metadata()["DCP_SHARDING_INFO"])
            for key in f.keys():
                piece = f.get_tensor(key)
                at = zip(offsets[key]["saved_offsets"], piece.shape, strict=True)
                found[key][tuple(slice(start, start + n) for start, n in at)] = piece
    assert equal(found, whole)
    weight = "policy.model.embed_tokens.weight"
    assert {weight, f"{weight}.exp_avg", f"{weight}.exp_avg_sq", "policy.optimizer.step"} < set(found)
    assert found["policy.optimizer.step"] == 4 and found["critic.optimizer.step"] == 8


def test_a_policy_that_has_not_stepped_is_resumed_as_it_was(base, tmp_path):
    """The first 3 of 4 steps train the critic alone. The run resumed after 2 steps ends with the weights,
    moments and step counts of the run that was never stopped. After 2 steps no policy state is saved."""
    cfg = dataclasses.replace(base, freeze_policy_steps=3, weight_decay=0.1)
    rows, policy = run(cfg, tmp_path / "a", ranks=2)
    shutil.copytree(ckpt.step_folder(tmp_path / "a", 2), ckpt.step_folder(tmp_path / "b", 2))
    rows_, policy_ = run(cfg, tmp_path / "b", ranks=2)
    assert maths(rows_) == [r for r in maths(rows) if r["step"] >= 2] and equal(policy_, policy)
    whole, resumed = (restore(1, cfg, tmp_path / name)[0] for name in "ab")
    assert equal(whole, resumed) and whole["step"] == 4
    assert whole["policy.optimizer.step"] == 1 and whole["critic.optimizer.step"] == 8
    files = ckpt.step_folder(tmp_path / "a", 2).glob("*.safetensors")
    early = {key for file in files for key in load_file(file)}
    state = {k for k in whole if k.startswith("policy") and ("exp_avg" in k or "optimizer" in k)}
    assert whole.keys() - early == state | {"step"}


OPTIMIZERS = {  # and how many tensors a checkpoint holds of its state, for two linear layers
    "Adam": (lambda p: torch.optim.Adam(p, amsgrad=True), 13),
    "Adagrad": (torch.optim.Adagrad, 5),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), 13),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
    "no state": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
}


def trained(kind, out, shard_ranks=0):
    """Weights and optimizer state of two sharded models after 6 steps, saved and resumed after 3 where `out`
    is a folder: one with the optimizer `kind`, and one without. Returns them with what the save said."""
    mesh = dist.mesh(dist.init("cpu", "float32"), shard_ranks)
    facts = {"config": dataclasses.asdict(PRESETS["tiny-ppo"]), "problems": "some"}

    def new():
        torch.manual_seed(0)
        model, ref = (fully_shard(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)), mesh=mesh)
                      for _ in range(2))
        return {"policy": (model, OPTIMIZERS[kind][0](model.parameters())), "ref": (ref, None)}

    def train(models, steps):
        model, optimizer = models["policy"]
        for step in steps:
            model(torch.arange(10.0).view(2, 5) * (1 + step) / 60).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    models, said = new(), ""
    train(models, range(3))
    if out:
        saver = ckpt.Saver(out, models, PRESETS["tiny-ppo"], facts, 0)
        said = saver.save(3)
        train(models, range(3, 4))  # while the save is in flight
        said += saver.finish()
        models = new()
        assert ckpt.resume(ckpt.find(out, "auto"), models, facts) == 3
    train(models, range(3, 6))
    states = [ckpt.tensors_of(*pair) for pair in models.values()]
    return said, [{key: ranks.full(x).detach() for key, x in state.items()} for state in states]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_resumes_as_if_never_stopped(kind, tmp_path):
    """Checkpoints know no optimizer by name: whatever tensors its state holds are saved and restored. The
    write is beside the training, and the training beside it changes nothing in it."""
    straight = run_ranks(2, trained, kind, None)
    resumed = run_ranks(2, trained, kind, tmp_path)
    for (_, (a, ref_a)), (said, (b, ref_b)) in zip(straight, resumed, strict=True):
        assert said == "" and equal(a, b) and equal(ref_a, ref_b)
        assert len(ref_b) == 4 and len(b) == 4 + OPTIMIZERS[kind][1]


def test_a_slice_that_replicas_share_is_written_once(tmp_path):
    """Two groups of two ranks hold the same: the second one's files are empty, and a resumed run is the one
    never stopped."""
    straight = run_ranks(4, trained, "Adam", None, 2)
    for (_, a), (said, b) in zip(straight, run_ranks(4, trained, "Adam", tmp_path, 2), strict=True):
        assert said == "" and equal(a[0], b[0]) and equal(a[1], b[1])
    files = sorted((tmp_path / "ckpt" / "step_000003").glob("*.safetensors"))
    assert [len(load_file(file)) > 0 for file in files] == [True, True, False, False]


def test_files_that_are_not_whole_are_not_published(two_ranks, tmp_path):
    """A file cut short and a file that is missing are found before the checkpoint gets its name."""
    whole = two_ranks[0] / "ckpt" / "step_000004"
    nbytes = sum(x.nbytes for file in whole.glob("*.safetensors") for x in load_file(file).values())
    for name in ("as it is", "cut", "missing"):
        temp, final = tmp_path / f".{name}.part", tmp_path / name
        shutil.copytree(whole, temp)
        (temp / "COMPLETE").unlink()
        file = next(temp.glob("shard-00001*"))
        if name == "cut":
            os.truncate(file, file.stat().st_size - 1)
            with pytest.raises(SafetensorError):
                ckpt.publish(temp, final, nbytes)
        elif name == "missing":
            file.unlink()
            with pytest.raises(OSError, match="files are missing"):
                ckpt.publish(temp, final, nbytes)
        else:
            ckpt.publish(temp, final, nbytes)
        assert ckpt.is_complete(final) == (name == "as it is") and temp.exists() != final.exists()


def test_a_rank_killed_anywhere_costs_nothing_saved(base, two_ranks, tmp_path):
    """kill -9 of either rank, before the first save and during it: the run started again ends as the run that
    was never disturbed."""
    for i, moment in enumerate(("samples/step_000000*", "ckpt/.step_000002*")):
        out = tmp_path / str(i)
        processes = start_ranks(2, ranks.main, dataclasses.replace(base, out=str(out)))[0]
        deadline = time.monotonic() + 500
        alive = True
        while alive and not list(out.glob(moment)) and time.monotonic() < deadline:
            time.sleep(0.002)
            alive = all(p.is_alive() for p in processes)
        os.kill(processes[i % 2].pid, signal.SIGKILL)
        processes[i % 2].join()
        processes[1 - i % 2].terminate()  # as torchrun does
        for p in processes:
            p.join(120)
            assert p.exitcode not in (0, None)
        assert same(run(base, out, ranks=2), two_ranks), moment
        assert not list(out.glob("ckpt/.step*"))


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(base, two_ranks, tmp_path):
    """SIGUSR1 to one of two ranks: both save all whole steps and return. The run that goes on from there ends
    as `two_ranks` did."""
    out = tmp_path / "s"
    cfg = dataclasses.replace(base, out=str(out), save_every=0)
    assert run_ranks(2, ranks.stopped, cfg, 1) == ["", ""]
    steps = [int(p.name[-6:]) for p in ckpt.complete(out)]
    assert len(steps) == 1 and 1 <= steps[0] < 4 and not (out / "export").exists()
    assert same(run(dataclasses.replace(base, save_every=0), out, ranks=2), two_ranks)


def test_a_full_disk_costs_one_checkpoint(base, tmp_path, capfd):
    """The disk is full while step 4 is saved, and not afterwards: the run ends well, and its other
    checkpoints are whole."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", disk]
    mounted = subprocess.run(mount, capture_output=True, check=False)
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
            while list(out.glob("ckpt/.step_000004*")):  # until the run removes it
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
        assert "!! the checkpoint after 4 steps failed" in said
        assert "needed); the last complete one: step_000002" in said
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_loaded(base, tmp_path):
    """A run whose checkpoints will not fit ends with one line and leaves no metrics."""
    said, = run_ranks(1, ranks.main, dataclasses.replace(base, out=str(tmp_path / "o"), keep=10**9))
    assert "free in" in said and "--keep" in said and not (tmp_path / "o" / "metrics.jsonl").exists()


def test_what_is_cut_short_does_not_count(two_ranks, tmp_path):
    """A checkpoint with a file that lost a byte, or without its mark, is not found."""
    out = tmp_path / "c"
    shutil.copytree(two_ranks[0] / "ckpt", out / "ckpt", symlinks=True)
    assert [p.name for p in ckpt.complete(out)] == ["step_000002", "step_000004"]
    file = max((out / "ckpt" / "step_000004").iterdir(), key=lambda f: f.stat().st_size)
    os.truncate(file, file.stat().st_size - 1)
    assert ckpt.find(out, "auto").name == "step_000002"
    (out / "ckpt" / "step_000002" / "COMPLETE").unlink()
    assert ckpt.find(out, "auto") is None


def test_the_newest_and_the_best_are_kept(tmp_path):
    """Of 5 checkpoints with `keep` 2: the last two, and the one with the highest evaluation, which `best`
    names."""
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
    """A resumed run with other learning rates is refused, naming them; one with other packs is not."""
    other = dataclasses.replace(base, out=str(two_ranks[0]), policy_lr=1e-4, clip_low=0.1, pack_len=512)
    said = run_ranks(2, ranks.main, other)
    assert all("policy_lr: 0.001 -> 0.0001; clip_low: 0.2 -> 0.1" in s for s in said)
    assert not any("pack_len" in s for s in said)
    said, = run_ranks(1, ranks.main, dataclasses.replace(base, out=str(two_ranks[0]), resume="never"))
    assert "is not empty" in said


def test_what_may_differ_on_resume():
    old = json.loads(json.dumps(dataclasses.asdict(PRESETS["orz-7b"])))
    free = dict(ranks=4, engine_share=0.5, out="x", pack_len=20000, keep=7, data=("else.jsonl",), steps=9)
    assert changed(old, dataclasses.asdict(dataclasses.replace(PRESETS["orz-7b"], **free))) == []
    debug = dict(layout="debug", prompts_per_step=16, samples_per_prompt=2, critic_updates=1)
    assert changed(old, dataclasses.asdict(dataclasses.replace(PRESETS["orz-7b"], **debug))) == []
    debug["prompts_per_step"] = 7  # a flag beats the layout
    assert changed(old, dataclasses.asdict(dataclasses.replace(PRESETS["orz-7b"], **debug))) == [
        "prompts_per_step: 128 -> 7", "samples_per_prompt: 64 -> 2", "critic_updates: 12 -> 1"]
    share = dataclasses.replace(PRESETS["orz-7b"], warmup_updates=0.1)  # of the steps
    old_share = json.loads(json.dumps(dataclasses.asdict(share)))
    assert changed(old_share, dataclasses.asdict(dataclasses.replace(share, steps=9))) == ["steps: 0 -> 9"]
    other = dataclasses.replace(PRESETS["orz-7b"], prompts_per_step=16, betas=(0.9, 0.99), seed=1)
    assert changed(old, dataclasses.asdict(other)) == ["seed: 0 -> 1", "prompts_per_step: 128 -> 16",
                                                       "betas: [0.9, 0.95] -> [0.9, 0.99]"]


def test_an_update_that_is_not_finite_is_left_out(base, tmp_path):
    """Weights and moments stay as they were, and the packs are kept; the third such update in a row ends the
    run."""
    left, again, ended = run_ranks(1, ranks.not_finite, dataclasses.replace(base, out=str(tmp_path)))[0]
    assert left and again and "three updates" in ended
    assert "in step 0, and the last complete checkpoint is none" in ended
    assert len(list((tmp_path / "nonfinite").iterdir())) >= 1


def test_a_stall_ends_every_rank_with_its_stack(base, tmp_path, capfd):
    """One of two ranks hangs in a phase: in seconds both print where they are and end."""
    began = time.monotonic()
    processes, _ = start_ranks(2, ranks.stalled)
    for p in processes:
        p.join(120)
    assert [p.exitcode for p in processes] == [1, 1] and time.monotonic() - began < 100
    said = capfd.readouterr().err
    assert all(f"rank {r}: stalled" in said for r in (0, 1)) and "this rank is in phase grading" in said
    assert re.search(r"^rank 1: .*/ranks.py\", line \d+ in hang$", said, re.MULTILINE)


def test_the_command_exports_either_model(two_ranks, tmp_path):
    """Its weights are byte by byte those that the run exported; mistakes are told in one line."""
    out = two_ranks[0]
    for who, architecture in (("policy", "Qwen2ForCausalLM"), ("critic", "Qwen2ForSequenceClassification")):
        ckpt.main(["export", str(out), "4", str(tmp_path / who), who])
        assert json.loads((tmp_path / who / "config.json").read_text())["architectures"] == [architecture]
        folders = tmp_path / who, out / "export" / who
        ours, theirs = ((folder / "model.safetensors").read_bytes() for folder in folders)
        assert ours == theirs
    ckpt.main(["export", str(out), "best", str(tmp_path / "best"), "critic"])
    assert (tmp_path / "best" / "model.safetensors").is_file()
    for argv, said in ((["3", "x"], "one of step_000002, step_000004"), (["4", "x", "ref"], "holds no ref"),
                       (["four", "x"], "needed: python ckpt.py export RUN STEP.best OUT")):
        with pytest.raises(UserError, match=said):
            ckpt.main(["export", str(out), *argv])


def test_a_run_begun_elsewhere_goes_on_in_its_own_folder(tmp_path, monkeypatch):
    """--resume PATH starts from PATH, and after a restart from what the run has saved since. An older
    checkpoint of the run's own is refused, because what came after it would be lost."""
    def checkpoint(run, step):
        folder = ckpt.step_folder(tmp_path / run, step)
        folder.mkdir(parents=True)
        (folder / "COMPLETE").write_text("{}")
        return folder

    there, out = checkpoint("there", 6), tmp_path / "here"
    assert ckpt.find(out, "auto") is None
    assert ckpt.find(out, str(tmp_path / "there")) == there == ckpt.find(out, str(there))
    eight, ten = checkpoint("here", 8), checkpoint("here", 10)
    assert ckpt.find(out, "auto") == ckpt.find(out, str(there)) == ckpt.find(out, str(ten)) == ten
    with pytest.raises(UserError, match="step_000008 is older than .*step_000010; needed: another --out"):
        ckpt.find(out, str(eight))
    with pytest.raises(UserError, match="no complete checkpoint"):
        ckpt.find(tmp_path / "new", str(tmp_path / "nothing"))


def test_signals_are_handled_only_while_training():
    """Inside, a signal requests a stop. Afterwards the earlier handlers are back, and nothing ends the
    process."""
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGINT)
    with dist.handle_signals(grace=0.2):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert dist.stop_signal and signal.getsignal(signal.SIGINT) != before[1]
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGINT)) == before
    time.sleep(0.5)  # longer than the grace
