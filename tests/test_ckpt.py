"""Tests of checkpoints and exports, with kills, full disks, stalls and NaNs."""

import binascii
import dataclasses
import datetime
import functools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import ranks
import torch
from conftest import ROOT, make_model, maths, run, run_ranks, start_ranks, wait_until
from jinja2 import TemplateError
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

import ckpt
import dist
import train
from bench.tasks import chat_tokenizer
from configs import PRESETS
from data import prompt_encoder, prompt_form
from guard.identity import VERSIONS, check_unchanged, differences, facts_of, settings
from guard.messages import UserError
from guard.watch import handle_signals
from log import read_metrics
from model import load_critic, load_policy, load_tokenizer
from tools import evaluate
from tools.tiny import make_tokenizer


def same(run_, two_ranks):
    rows, policy = run_
    _, rows_, policy_ = two_ranks
    return maths(rows) == maths(rows_) and all(torch.equal(policy[k], policy_[k]) for k in policy_)


def restore(count, base, out):
    """Resumes the run `out` on `count` ranks. Returns the results of `ranks.prepared`, one per rank."""
    cfg = dataclasses.replace(base, resume=str(out), out=f"{out}-on-{count}")
    return run_ranks(count, ranks.prepared, cfg)


@pytest.fixture(scope="module")
def resumed(base, two_ranks):
    """Returns a function: number of ranks -> result of `restore` for the run `two_ranks`."""
    return functools.cache(lambda count: restore(count, base, two_ranks[0]))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


def test_a_copy_for_checkpoints_follows_state_that_appears_later():
    """With --freeze_policy_steps, the critic's optimizer has state before the policy's."""
    for count, (copies, live) in zip((10, 16), run_ranks(1, ranks.copies_at_two_saves)[0], strict=True):
        assert equal(copies, live) and len(live) == count


@pytest.mark.parametrize("count", [1, 4])
def test_a_checkpoint_of_two_ranks_is_the_same_on_any_number(resumed, count):
    two = resumed(2)[0]
    assert two["start"] == 4 and len(two) > 50
    assert all(equal(other, two) for other in resumed(count))


def test_a_checkpoint_is_plain_safetensors_and_nothing_is_pickled(two_ranks, resumed):
    """The slices in the files, joined, equal the tensors of a resumed run. All other files are JSON."""
    path, whole = two_ranks[0] / "ckpt" / "step_000004", dict(resumed(1)[0])
    assert whole.pop("start") == 4
    found = {key: torch.full_like(x, torch.nan) for key, x in whole.items()}
    files = {p.name: p.read_bytes() for p in path.iterdir() if p.name != "COMPLETE"}
    assert json.loads((path / "COMPLETE").read_text()) == {
        name: f"{binascii.crc32(data):08x}" for name, data in files.items()}
    for file in sorted(path.iterdir()):
        if file.suffix != ".safetensors":
            assert json.loads(file.read_text()) and file.name in ("state.json", "COMPLETE")
            continue
        with safe_open(file, "pt") as f:  # an error if a byte of the file belongs to no tensor
            offsets = json.loads(f.metadata()["DCP_SHARDING_INFO"])
            for key in f.keys():
                piece = f.get_tensor(key)
                at = zip(offsets[key]["saved_offsets"], piece.shape, strict=True)
                found[key][tuple(slice(start, start + n) for start, n in at)] = piece
    assert equal(found, whole)
    weight = "policy.model.embed_tokens.weight"
    assert {weight, f"{weight}.exp_avg", f"{weight}.exp_avg_sq", f"{weight}.step"} < set(found)
    assert found[f"{weight}.step"] == 4 and found["critic.model.embed_tokens.weight.step"] == 8


OPTIMIZERS = {  # name -> (optimizer, number of state tensors for two linear layers)
    "Adam": (lambda p: torch.optim.Adam(p, amsgrad=True), 16),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
    "no state": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    "late": (torch.optim.AdamW, 12),  # this optimizer's first step comes after the checkpoint
}


def trained(kind, out, shard_ranks):
    """Trains for 6 steps. If `out` is a folder, saves a checkpoint there after 3 steps, and resumes from it.
    Returns the warnings and, for policy and reference, name -> whole tensor."""
    mesh = dist.mesh(dist.init("cpu", "float32"), shard_ranks)
    facts = {"config": dataclasses.asdict(PRESETS["tiny-ppo"]), "read": {}, "noted": {}}

    def new():
        torch.manual_seed(0)
        model, ref = (fully_shard(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)), mesh=mesh)
                      for _ in range(2))
        return {"policy": (model, OPTIMIZERS[kind][0](model.parameters())), "ref": (ref, None)}

    def train(models, steps):
        model, optimizer = models["policy"]
        for step in steps:
            model(torch.arange(10.0).view(2, 5) * (1 + step) / 60).square().mean().backward()
            if kind != "late" or step > 2:
                optimizer.step()
            optimizer.zero_grad()

    models, said = new(), []
    train(models, range(3))
    if out:
        saver = ckpt.Saver(out, models, PRESETS["tiny-ppo"], facts, 0, said.append)
        saver.save(3)
        train(models, range(3, 4))  # the checkpoint must not contain this step
        saver.finish()
        models = new()
        found = ckpt.find(out, "auto")
        assert ckpt.resume(found, ckpt.read_state(found), models, facts).startswith("resumed after 3 steps")
    train(models, range(3, 6))
    states = [dist.tensors_of(*pair) for pair in models.values()]
    return "".join(said), [{key: ranks.full(x).detach() for key, x in state.items()} for state in states]


def straight_and_resumed(kinds, out):
    """Returns kind of optimizer -> results of `trained` without and with a resume."""
    return {kind: (trained(kind, None, 2), trained(kind, out / kind, 2)) for kind in kinds}


@pytest.mark.parametrize("kinds,world", [([*OPTIMIZERS], 2), (["Adam"], 4)])
def test_any_optimizer_resumes_as_if_never_stopped(kinds, world, tmp_path):
    """Training continues during the save. Of four ranks, two hold copies of shards and write no tensors."""
    results = run_ranks(world, straight_and_resumed, kinds, tmp_path)
    for kind in kinds:
        for (_, (a, ref_a)), (said, (b, ref_b)) in (result[kind] for result in results):
            assert said == "" and equal(a, b) and equal(ref_a, ref_b), kind
            assert len(ref_b) == 4 and len(b) == 4 + OPTIMIZERS[kind][1]
        files = sorted((tmp_path / kind / "ckpt" / "step_000003").glob("*.safetensors"))
        assert [len(load_file(file)) > 0 for file in files] == [rank < 2 for rank in range(world)]


def test_a_checkpoint_that_lacks_a_file_is_not_published(two_ranks, tmp_path):
    """As if the ranks had different disks."""
    whole = two_ranks[0] / "ckpt" / "step_000004"
    files = json.loads((whole / "COMPLETE").read_text())
    del files["state.json"]
    for case in ("whole", "missing"):
        temp, final = tmp_path / f".{case}.part", tmp_path / case
        shutil.copytree(whole, temp)
        (temp / "COMPLETE").unlink()
        if case == "whole":
            ckpt.publish(temp, final, {"step": 4}, files)
        else:
            (temp / "shard-00001.safetensors").unlink()
            with pytest.raises(OSError, match="shard-00001.safetensors"):
                ckpt.publish(temp, final, {"step": 4}, files)
        assert temp.exists() != final.exists() == (case == "whole") == (ckpt.damaged(final) == "")


def test_a_rank_killed_anywhere_costs_nothing_saved(base, two_ranks, tmp_path):
    """A rank of the run is killed in its first step, and a rank of the restarted run while it saves."""
    for victim, moment in (0, "samples/step_000000*"), (1, "ckpt/.step_000002*"):
        processes, _ = start_ranks(2, ranks.main, dataclasses.replace(base, out=str(tmp_path)))
        assert wait_until(lambda moment=moment: list(tmp_path.glob(moment)), pause=0.002)
        processes[victim].kill()
        processes[victim].join()
        processes[1 - victim].terminate()  # as torchrun does when a rank dies
        for p in processes:
            p.join(300)
            assert p.exitcode not in (0, None)
    assert same(run(base, tmp_path, ranks=2), two_ranks)
    assert not list(tmp_path.glob("ckpt/.step*"))


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(base, two_ranks, tmp_path):
    out = tmp_path / "s"
    cfg = dataclasses.replace(base, out=str(out), save_every=0)
    assert run_ranks(2, ranks.stopped, cfg, ranks.has_steps, cfg, 1) == ["", ""]
    steps = [int(p.name[-6:]) for p in ckpt.complete(out)]
    assert len(steps) == 1 and 1 <= steps[0] < 4 and not (out / "export").exists()
    assert same(run(dataclasses.replace(base, save_every=0), out, ranks=2), two_ranks)


def trains():
    return "start" not in dist.CURRENT.name


def test_a_stop_in_an_evaluation_leaves_the_responses_of_the_one_before(base, two_ranks, tmp_path):
    """A finished run that is started again evaluates its last step again."""
    out = shutil.copytree(two_ranks[0], tmp_path / "run", symlinks=True)
    before = (out / "eval/step_000004.jsonl").read_bytes()
    assert run_ranks(2, ranks.stopped, dataclasses.replace(base, out=str(out)), trains) == ["", ""]
    assert (out / "eval/step_000004.jsonl").read_bytes() == before != b""


@pytest.fixture
def disk(request, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk takes root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("disk", ["32m"], indirect=True)
def test_a_full_disk_costs_one_checkpoint(disk, base, capfd):
    out = disk / "run"

    def fill():
        wait_until((out / "ckpt/step_000002/COMPLETE").exists)
        with (disk / "ballast").open("wb", buffering=0) as f:
            with pytest.raises(OSError, match="No space"):
                while True:
                    f.write(bytes(2**16))
        wait_until(lambda: list(out.glob("ckpt/.step_000004*")), pause=0.001)
        wait_until(lambda: not list(out.glob("ckpt/.step_000004*")), pause=0.001)
        (disk / "ballast").unlink()

    filler = threading.Thread(target=fill, daemon=True)
    filler.start()
    cfg = dataclasses.replace(base, algo="grpo", critic_updates=1, out=str(out), steps=6, eval_every=0,
                              keep=5, keep_best="")
    assert run_ranks(2, ranks.main, cfg) == ["", ""]
    filler.join(300)
    assert not filler.is_alive()
    assert [p.name for p in ckpt.complete(out)] == ["step_000002", "step_000006"]
    assert [r["step"] for r in read_metrics(out)] == list(range(6))
    said = capfd.readouterr().out
    assert re.search("^!! step .*: the checkpoint after 4 steps was not saved: .*No space left", said, re.M)


def marked(out, steps):
    for step in steps:
        ckpt.step_folder(out, step).mkdir(parents=True)
        (ckpt.step_folder(out, step) / "COMPLETE").write_text('{"state.json": {}}')
    return [ckpt.step_folder(out, step) for step in steps]


@pytest.mark.parametrize("scores,keep,best", [
    ({1: 0.3, 2: 0.9, 3: 0.5, 4: 0.4, 5: 0.6}, [2, 4, 5], 2),
    ({999_998: 0.1, 999_999: 0.5, 1_000_000: 0.5}, [999_999, 1_000_000], 1_000_000)])
def test_the_newest_and_the_best_are_kept(tmp_path, scores, keep, best):
    marked(tmp_path, scores)
    rows = [json.dumps({"step": step, "eval/a/avg@1": score}) + "\n" for step, score in scores.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    for _ in range(2):
        ckpt.prune(tmp_path, 2, "auto")
    assert ckpt.complete(tmp_path) == [ckpt.step_folder(tmp_path, step) for step in keep]
    assert os.readlink(tmp_path / "ckpt" / "best") == ckpt.step_folder(tmp_path, best).name
    newest = ckpt.find(tmp_path, "auto")
    assert newest == ckpt.step_folder(tmp_path, keep[-1])
    (newest / "COMPLETE").unlink()
    assert ckpt.find(tmp_path, "auto") == ckpt.step_folder(tmp_path, keep[-2])


def test_a_config_that_is_another_algorithm_is_refused(two_ranks, base):
    other = dataclasses.replace(base, out=str(two_ranks[0]), policy_lr=1e-4, clip_low=0.1, pack_len=512)
    said = run_ranks(2, ranks.main, other)
    assert all("policy_lr: 0.001 -> 0.0001; clip_low: 0.2 -> 0.1" in s for s in said)
    assert not any("pack_len" in s for s in said)
    said, = run_ranks(1, ranks.main, dataclasses.replace(base, out=str(two_ranks[0]), resume="never"))
    assert "is not empty" in said


def test_what_may_differ_on_resume():
    def differing(old, **changes):
        return differences(settings(old), settings(dataclasses.replace(old, **changes)))

    orz = PRESETS["orz-7b"]
    assert differing(orz, ranks=4, engine_share=0.5, out="x", pack_len=20000, keep=7, data=("else.jsonl",),
                     steps=9, track=("wandb",)) == []
    assert differing(orz, layout="production", ranks=32) == []
    assert differing(orz, dtype="float32") == ["dtype: auto -> float32"]
    assert differing(orz, layout="debug", samples_per_prompt=2) == ["samples_per_prompt: 64 -> 2"]
    share = dataclasses.replace(orz, warmup_updates=0.1)  # a fraction of all updates, so `steps` matters
    assert differing(share, steps=9) == ["steps: 0 -> 9"]
    assert differing(orz, prompts_per_step=16, betas=(0.9, 0.99), seed=1) == [
        "prompts_per_step: 128 -> 16", "seed: 0 -> 1", "betas: [0.9, 0.95] -> [0.9, 0.99]"]


def test_another_function_for_a_data_set_is_refused(base):
    """A checkpoint without this fact, from older code, can still be resumed."""
    def read(*reward):
        cfg = dataclasses.replace(base, algo="grpo", reward=reward)
        return facts_of(cfg, [], {}, make_tokenizer(), SimpleNamespace(files={}))[0]

    strict, loose, moved = read("a@r.py:strict"), read("a@r.py:loose"), read("a@new/r.py:strict")
    with pytest.raises(UserError, match=r"functions of --reward: \['strict'\] -> \['loose'\]\); needed: x"):
        check_unchanged(base.folder, {"read": strict}, loose, "x")
    check_unchanged(base.folder, {"read": strict}, moved, "")
    old = {name: value for name, value in strict.items() if name != "DATASET@ functions of --reward"}
    check_unchanged(base.folder, {"read": old}, loose, "")


def test_evaluation_sets_in_another_order_keep_their_temperatures(base):
    """With one temperature for all sets, they may be in any order, and some may be left out."""
    def read(sets, *temperatures):
        cfg = dataclasses.replace(base, eval_data=tuple(sets), eval_temperature=temperatures)
        return facts_of(cfg, [], dict.fromkeys(sets, []), make_tokenizer(), SimpleNamespace(files={}))[0]

    saved = {"read": read("ab", 0.0, 1.0)}
    with pytest.raises(UserError, match="of b: 1.0 -> 0.0; --eval_temperature of a: 0.0 -> 1.0.; needed: x"):
        check_unchanged(base.folder, saved, read("ba", 0.0, 1.0), "x")
    check_unchanged(base.folder, saved, read("ab", 0.0, 1.0), "")
    check_unchanged(base.folder, {"read": read("abc", 0.0)}, read("ca", 0.0), "")


def test_an_update_that_is_not_finite_is_left_out(base, tmp_path):
    left, again, ended = run_ranks(1, ranks.not_finite, dataclasses.replace(base, out=str(tmp_path)))[0]
    assert left and again and "three updates" in ended
    assert "in step 0; needed: a smaller" in ended


def test_a_stall_ends_every_rank_with_its_stack(base, tmp_path, capfd):
    processes, _ = start_ranks(2, ranks.stalled)
    for p in processes:
        p.join(300)
    assert [p.exitcode for p in processes] == [1, 1]
    said = capfd.readouterr().err
    assert all(f"rank {r}: stalled" in said for r in (0, 1)) and "in phase grading;" in said
    assert re.search(r"^rank 1: .*/ranks.py\", line \d+ in hang$", said, re.MULTILINE)


def test_a_rank_may_wait_longer_than_the_limit_while_another_makes_progress():
    assert run_ranks(2, ranks.patient) == [None, None]


def test_a_signal_to_a_rank_that_waits_is_heard_by_the_others():
    """A signal stops one run, not the next one of the same processes."""
    assert run_ranks(2, ranks.hears) == [[True, False], [True, True, False, False]]


def test_an_export_of_what_is_not_there_is_refused_and_the_usage_is_said(two_ranks):
    for argv, said in ((["3", "x"], "one of step_000002, step_000004"), (["4", "x", "ref"], "has no ref"),
                       (["", "x"], "no step ''; needed: a number, best or last"), ([".", "x"], "no step '.'"),
                       (["4"], "needed: python ckpt.py export RUN STEP.best.last OUT")):
        with pytest.raises(UserError, match=said):
            ckpt.main(["export", str(two_ranks[0]), *argv])


def test_a_run_begun_elsewhere_goes_on_in_its_own_folder(tmp_path, monkeypatch):
    (there,), (eight, ten) = marked(tmp_path / "there", [6]), marked(tmp_path / "here", [8, 10])
    new, link = tmp_path / "new", tmp_path / "link"
    link.symlink_to("here")
    assert ckpt.find(new, "auto") is None
    assert ckpt.find(new, str(tmp_path / "there")) == there == ckpt.find(new, str(there))
    (tmp_path / "here/ckpt/best").symlink_to(eight.name)
    monkeypatch.chdir(tmp_path)
    for resume in ("auto", str(there), str(ten), "here/ckpt/../ckpt/step_000010"):
        assert ckpt.find(tmp_path / "here", resume) == ten
    for resume in (eight, "here/ckpt/best", "there/../here/ckpt/./step_000008", "here/8", "here/best"):
        with pytest.raises(UserError, match="is older than .*step_000010; needed: another --out"):
            ckpt.find(link, str(resume))
    with pytest.raises(UserError, match="no complete checkpoint"):
        ckpt.find(new, "nothing")
    assert ckpt.find(link, "nothing") == link / "ckpt" / ten.name


def test_a_checkpoint_has_several_names(tmp_path, monkeypatch):
    out = tmp_path / "run"
    two, four = marked(out, [2, 4])
    (out / "ckpt" / "best").symlink_to(two.name)
    (inside,) = marked(out / "2", [1])  # a run in the folder of a run
    monkeypatch.chdir(tmp_path)
    for name, path in ((out, four), (f"{out}/4", four), (f"{out}/step_000002", two), (two, two),
                       ("run/../run", four), (f"{out}/best", two), ("run/ckpt/best", two),
                       (f"{out}/ckpt/../2", inside), (f"{out}/2", inside)):
        assert ckpt.named(str(name)) == path, name
    with pytest.raises(UserError, match="no complete checkpoint; needed: one of step_000002, step_000004"):
        ckpt.named(f"{out}/3")


def test_a_run_may_start_from_another_ones_weights(base, two_ranks, tmp_path, capfd):
    """Policy and critic get new optimizers. The reference is the checkpoint's policy."""
    cfg = dataclasses.replace(base, out=str(tmp_path / "b"), start_from=f"{two_ranks[0]}/2", seed=7, steps=1,
                              lr_decay="constant", kl_coef=0.1)
    source = tmp_path / "a"
    shutil.copytree(ckpt.step_folder(two_ranks[0], 2), ckpt.step_folder(source, 2))
    whole, begun = restore(1, base, source)[0], run_ranks(1, ranks.prepared, cfg)[0]
    assert not isinstance(begun, str), begun
    assert begun.pop("start") == 0 and whole.pop("start") == 2
    weights = {k: v for k, v in whole.items() if "exp_avg" not in k and not k.endswith(".step")}
    ref = {k.replace("ref.", "policy."): begun.pop(k) for k in list(begun) if k.startswith("ref.")}
    assert equal(ref, {k: v for k, v in weights.items() if k.startswith("policy.")})
    assert equal(begun, weights)
    assert "started from" in capfd.readouterr().out
    assert run_ranks(1, ranks.main, cfg) == [""]
    again, = run_ranks(1, ranks.prepared, dataclasses.replace(cfg, steps=2))
    assert again["start"] == 1
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config["start_from"] == str(ckpt.step_folder(two_ranks[0], 2))
    elsewhere = dict(out=f"{tmp_path}/d", start_from="", resume=cfg.out)
    assert run_ranks(1, ranks.prepared, dataclasses.replace(cfg, **elsewhere))[0]["start"] == 1
    assert equal(ref, {k.replace("ref.", "policy."): x for k, x in again.items() if k.startswith("ref.")})
    other = shutil.copytree(base.model, tmp_path / "rope") / "config.json"
    other.write_text(other.read_text().replace("10000.0", "90000.0"))
    for model, words in ((other.parent, "rope_parameters: {'rope_theta': 10000.0, "),
                         (make_model(tmp_path / "deep", layers=3), "num_hidden_layers: 2 -> 3")):
        said, = run_ranks(1, ranks.prepared, dataclasses.replace(cfg, out=f"{tmp_path}/c", model=str(model)))
        assert words in said and f"critic's {words}" in said and f"--model {base.model}" in said
    for changes, words in (
            (dict(out=f"{tmp_path}/c", critic_model=str(other.parent)), "has a critic, and --critic_model"),
            (dict(steps=2, start_from=str(source)), f"not from {source}; needed: another --out, or")):
        said, = run_ranks(1, ranks.prepared, dataclasses.replace(cfg, **changes))
        assert words in said
    same = dataclasses.replace(cfg, steps=2, start_from=str(two_ranks[0]))  # another step of the same run
    assert run_ranks(1, ranks.prepared, same)[0]["start"] == 1


def test_signals_are_handled_only_while_training(capfd):
    """If training ends within the grace period after a signal, the process goes on."""
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGINT)
    with handle_signals(grace=600):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert dist.stop_signal and signal.getsignal(signal.SIGINT) != before[1]
        assert "SIGUSR1: the run saves and stops when phase" in capfd.readouterr().err
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGINT)) == before
    # With an empty list, the thread of `watch` does not end the process.
    assert dist.stop_signal == []


def tree(folder):
    return {str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_bytes()
            for p in sorted(folder.rglob("*")) if p.is_symlink() or p.is_file()}


def copy_of(two_ranks, out):
    shutil.copytree(two_ranks[0] / "ckpt", out / "ckpt", symlinks=True)
    return out


@pytest.mark.parametrize("where", "run run/ckpt mine link mine/thesis.tex dangling".split())
def test_an_export_goes_to_no_folder_of_the_user(two_ranks, tmp_path, where):
    """The export is refused before it reads the checkpoint, which is damaged here."""
    run_ = copy_of(two_ranks, tmp_path / "run")
    flip(next((run_ / "ckpt" / "step_000004").glob("shard-00001*")))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("a year of work")
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "dangling").symlink_to("nothing")
    before = tree(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path}/{where} exists; needed: a new path") as said:
        ckpt.main(["export", str(run_), "4", f"{tmp_path}/{where}"])
    assert "\n" not in str(said.value) and tree(tmp_path) == before


def test_an_earlier_export_gets_another_name(two_ranks, tmp_path):
    """Also what a user added to it stays."""
    (tmp_path / "empty").mkdir()
    for name in (".new.0123456789abcdef.part", ".new.mine.part"):
        (tmp_path / name).mkdir()
    for name, step in (("new", 2), ("empty", 2), ("new", 4), ("new", 2)):
        ckpt.main(["export", str(two_ranks[0]), str(step), str(tmp_path / name)])
        marker = json.loads((tmp_path / name / "torz.json").read_text())
        assert (marker["run"], marker["step"], marker["who"]) == (str(two_ranks[0]), step, "policy")
        (tmp_path / name / f"{step}.txt").write_text("mine")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".new.mine.part", "empty", "new", "new.1", "new.2"]
    assert tree(tmp_path / "new") == tree(tmp_path / "new.1") == tree(tmp_path / "empty")
    ours, theirs = (f / "model.safetensors" for f in (tmp_path / "new.2", two_ranks[0] / "export" / "policy"))
    assert ours.read_bytes() == theirs.read_bytes() != (tmp_path / "empty/model.safetensors").read_bytes()
    assert json.loads((theirs.parent / "torz.json").read_text())["step"] == 4


def test_make_demo_moves_a_finished_run_aside(tmp_path):
    """A finished run has export/policy. An unfinished run is not moved, so it continues."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.txt", "requirements-cpu.txt", ".venv/.demo", "runs/tiny-base-0/tiny.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    out = tmp_path / "runs" / "mine"
    (tmp_path / ".venv/bin").mkdir()
    program = tmp_path / ".venv/bin/python"  # replaces Python: writes $N to OUT/n instead of training
    program.write_text(f"#!/bin/sh\nmkdir -p {out}$DONE; [ -f {out}/n ] || echo $N > {out}/n\n")
    program.chmod(0o755)

    def demo(number, done):
        env = os.environ | {"N": number, "DONE": done}
        return subprocess.run(["make", "demo", f"OUT={out}"], cwd=tmp_path, env=env, capture_output=True,
                              text=True, check=True).stdout

    said = [demo(*args) for args in (("1", "/export/policy"), ("2", "/export/policy"), ("3", ""), ("4", ""))]
    assert {p.name: (p / "n").read_text() for p in out.parent.glob("mine*")} == {
        "mine": "3\n", "mine.1": "1\n", "mine.2": "2\n"}
    assert [f"{out} is now" in s for s in said] == [False, True, True, False]


def test_a_checkpoint_is_never_written_twice(two_ranks, tmp_path):
    """A save replaces an incomplete checkpoint, but no complete checkpoint, no link and no user's file."""
    run_ = copy_of(two_ranks, tmp_path / "run")
    final, temp = run_ / "ckpt" / "step_000004", run_ / "ckpt" / ".step_000004.x.part"

    def publish():
        shutil.rmtree(temp, ignore_errors=True)
        shutil.copytree(run_ / "ckpt" / "step_000002", temp)
        (temp / "COMPLETE").unlink()
        ckpt.publish(temp, final, {"step": 2}, {})

    for kept in (tree(final), {"notes.txt": b"mine"}):
        with pytest.raises(OSError, match="not empty.*step_000004"):
            publish()
        assert tree(final) == kept and temp.exists()
        (final / "COMPLETE").unlink(missing_ok=True)
        (final / "notes.txt").write_text("mine")
    (final / "notes.txt").unlink()
    publish()
    assert json.loads((final / "state.json").read_text()) == {"step": 2} and not temp.exists()
    (tmp_path / "else").mkdir()
    shutil.rmtree(final)
    final.symlink_to(tmp_path / "else")
    with pytest.raises(OSError, match="step_000004"):
        publish()
    assert final.is_symlink() and not list((tmp_path / "else").iterdir())


def small(out, **changes):
    """Returns a Saver for `out`, its models, and its list of warnings. Call on every rank."""
    mesh = dist.mesh(dist.init("cpu", "float32"))
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)), mesh=mesh)
    models = {"policy": (model, torch.optim.Adam(model.parameters()))}
    cfg = dataclasses.replace(PRESETS["tiny-ppo"], **{"lr_decay": "constant", "keep_best": ""} | changes)
    warnings = []
    return ckpt.Saver(out, models, cfg, {}, 0, warnings.append), models, warnings


def uploaded(out):
    """Saves a checkpoint with an upload that takes longer than torch's default limit of a collective."""
    _, models, warnings = small(out)
    publish = ckpt.publish

    def upload(*args):
        publish(*args)
        time.sleep(2)

    with pytest.MonkeyPatch.context() as patch:
        limit = datetime.timedelta(seconds=1)  # in place of 30 minutes
        patch.setattr("torch.distributed.distributed_c10d.default_pg_timeout", limit)
        patch.setattr(ckpt, "publish", upload)
        saver = ckpt.Saver(out, models, PRESETS["tiny-ppo"], {}, 0, warnings.append)
        saver.save(1)
        saver.finish()
    return saver.saved, warnings


def test_an_upload_may_take_longer_than_a_collective(tmp_path):
    assert run_ranks(2, uploaded, tmp_path) == [(1, [])] * 2


def test_a_run_that_is_shorter_than_its_checkpoint_is_refused(two_ranks):
    path = two_ranks[0] / "ckpt/step_000004"
    saved = ckpt.read_state(path)
    with pytest.raises(UserError, match="saved after 4 steps, but this run has 3; .*, where --start_from"):
        ckpt.check_resume(path, saved, saved | {"config": saved["config"] | {"steps": 3}})


# Edits of the model folder: name -> (file, old text, new text). Without an old text, the edit flips one bit.
EDITS = {
    "spaces": ("tokenizer.json", '": ', '"  :  '),
    "a sampling default": ("generation_config.json", "{", '{"top_k": 3,'),
    "one weight": ("model.safetensors", "", ""), "a token of no prompt": ("tokenizer.json", '"y":', '"yy":'),
    "spaces at decoding": ("tokenizer_config.json", '"clean_up_tokenization_spaces": false',
                           '"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": true, '
                           '"clean_up_tokenization_spaces": true'),
    "an end token": ("generation_config.json", ": 261", ": [5, 261]"),
    "a setting": ("config.json", "1e-06", "0.1")}


def edited(source, folder, *edits):
    shutil.copytree(source, folder)
    for file, text, new in map(EDITS.get, edits):
        path = folder / file
        path.write_text(path.read_text().replace(text, new)) if text else flip(path)
    return folder


def test_a_resumed_run_compares_what_it_reads_and_not_paths(base, two_ranks, resumed, tmp_path, capfd,
                                                            monkeypatch):
    """The model folder may move, and its files may change. With a KL term, the weights must be the same."""
    link = tmp_path / "model"
    link.symlink_to(base.model)
    cfg = dataclasses.replace(base, model=str(link), kl_coef=0.1, steps=1, out=f"{tmp_path}/run")
    assert run_ranks(1, ranks.main, cfg) == [""]
    same = edited(base.model, tmp_path / "same", "spaces", "a sampling default")
    assert run_ranks(1, ranks.prepared, dataclasses.replace(cfg, model=str(same)))[0]["start"] == 1
    assert "code: " not in capfd.readouterr().out
    for name, edits, words in (
            ("decoding", ["spaces at decoding"], ["(policy's tokenizer: "]),
            ("all", ["one weight", "a token of no prompt", "an end token", "a setting"],
             ["policy's tokenizer: ", "ref's weights: ", "end tokens: [261] -> [5, 261]",
              "policy's rms_norm_eps: 1e-06 -> 0.1; ", "critic's rms_norm"])):
        link.unlink()
        link.symlink_to(edited(base.model, tmp_path / name, *edits))
        found, = run_ranks(1, ranks.prepared, cfg)
        assert all(word in found for word in words), found
    for name in ("a setting", "one weight"):
        edited(base.model, tmp_path / name, name)
    for flag, name, words in (("critic_model", "a setting", "(critic's rms_norm_eps: 1e-06 -> 0.1)"),
                              ("ref_model", "one weight", "(ref's weights: ")):
        other = dataclasses.replace(cfg, model=base.model, **{flag: f"{tmp_path}/{name}"})
        found, = run_ranks(1, ranks.prepared, other)
        assert words in found
    assert "the whole plan" not in capfd.readouterr().out  # each was refused before the models were loaded
    monkeypatch.setitem(VERSIONS, "code", "edited")
    monkeypatch.setitem(VERSIONS, "mpmath", "0.1")
    again = dataclasses.replace(base, out=str(copy_of(two_ranks, tmp_path / "copy")), start_from="gone",
                                model=f"{tmp_path}/one weight", eval_data=(f"{tmp_path}/other.jsonl",))
    for name in ("train", "other"):  # a set of an old name must be the old set
        (tmp_path / f"{name}.jsonl").write_text(open(base.data[0]).readline())
    found, = run_ranks(1, ranks.prepared, dataclasses.replace(again, eval_data=(f"{tmp_path}/train.jsonl",)))
    assert re.search("--eval_data train: [0-9a-f]{8} -> [0-9a-f]{8}", found)
    twin = tmp_path / "twin" / os.path.basename(base.eval_data[0])  # both sets would have longer names
    twin.parent.mkdir()
    shutil.copy(f"{tmp_path}/train.jsonl", twin)
    more = dataclasses.replace(again, eval_data=(*base.eval_data, str(twin)))
    found, = run_ranks(1, ranks.prepared, more)
    assert re.search(r"--eval_data \w+ of the checkpoint would get another name, --eval_data \w+-", found)
    found, = run_ranks(1, ranks.prepared, again)
    assert equal(found, resumed(1)[0])
    output = capfd.readouterr().out
    assert re.search("resumed after 4 steps from .*; mpmath: .* -> 0.1; code: [0-9a-f]{8} -> edited; "
                     "files of the policy: [0-9a-f]{8} -> .*; model: .*one weight; .*out: ", output)
    assert "evaluation set other: 1 of 1 prompts are also in --data\n" in output


def test_a_chat_template_prints_the_same_date_on_every_day(base, tmp_path):
    """Runs and exports have the date of --date."""
    tokenizer, folder = make_tokenizer(), shutil.copytree(base.model, tmp_path / "model")
    tokenizer.chat_template = "[{{ strftime_now('%d %b %Y') }}]{{ messages[-1].content }}"
    tokenizer.save_pretrained(folder)
    cfg = dataclasses.replace(base, model=str(folder), template="chat", max_prompt_len=24, steps=1,
                              eval_every=0, lr_decay="constant", out=str(tmp_path / "run"))
    day = cfg.date
    assert run_ranks(1, ranks.main, cfg) == [""]
    assert json.loads((tmp_path / "run/config.json").read_text())["date"] == day
    ckpt.main(["export", str(tmp_path / "run"), "last", str(tmp_path / "hf")])
    text = time.strftime("[%d %b %Y]1+1=", time.strptime(day, "%Y-%m-%d"))
    for path in (tmp_path / "hf", tmp_path / "run/export/policy"):
        served = load_tokenizer(str(path))
        assert served.decode(asked(served, "1+1=")) == text
    asks, = evaluate.eval_configs([f"{tmp_path}/hf", *base.data])
    evaluated = evaluate.load_candidate(asks, print, False).tokenizer
    assert asks.date == day and asked(evaluated, "1+1=") == asked(served, "1+1=")
    edited = shutil.copytree(folder, tmp_path / "edited") / "chat_template.jinja"
    edited.write_text(edited.read_text() + "!")
    with pytest.raises(UserError, match="another config .chat template: .*; needed: --model with the folder"):
        ckpt.main(["export", f"{cfg.out}", "last", f"{tmp_path}/none", "--model", f"{tmp_path}/edited"])
    for other, words in ("2024-02-29", f"{day} -> 2024-02-29"), ("2024-02-30", "--date is 2024-02-30 ("):
        assert words in run_ranks(1, ranks.prepared, dataclasses.replace(cfg, steps=2, date=other))[0]
    for changes in {"template": "plain"}, {"model": base.model}:
        found, = run_ranks(1, ranks.prepared, dataclasses.replace(cfg, date=other, **changes))
        assert found.startswith(f"--date {other} has no effect: ")


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "state.json", "COMPLETE", "cut", "foreign",
                                  "carried-00001.json"])
def test_a_damaged_checkpoint_is_refused_on_every_rank(base, two_ranks, tmp_path, name):
    out = copy_of(two_ranks, tmp_path / "run")
    folder = out / "ckpt" / "step_000004"
    file = folder / {"cut": "shard-00001.safetensors", "foreign": "shard-00002.safetensors"}.get(name, name)
    if name == "foreign":
        shutil.copy(folder / "shard-00000.safetensors", file)
    elif name == "carried-00001.json":
        file.write_text("[]")
    elif name in ("cut", "COMPLETE"):
        os.truncate(file, file.stat().st_size - 1)
    else:
        flip(file)
    messages = run_ranks(2, ranks.main, dataclasses.replace(base, out=str(out)))
    assert messages[0] == messages[1] and "\n" not in messages[0]
    assert f"{file} is damaged" in messages[0] and f"move {folder} away" in messages[0]
    assert not (out / "export").exists()
    with pytest.raises(UserError, match=f"{file} is damaged"):
        ckpt.main(["export", str(out), "4", str(tmp_path / "hf")])
    folder.rename(out / "ckpt" / "damaged")
    assert ckpt.find(out, "auto").name == "step_000002"


def poisoned(out, what):
    """Saves finite numbers, then NaN or infinity. Returns the second save's warning and the third's error."""
    saver, models, warnings = small(out)
    model, optimizer = models["policy"]
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    saver.save(1)
    place = model[0].weight if what == "weight" else optimizer.state[model[0].weight]["exp_avg_sq"]
    local = place.to_local() if isinstance(place, DTensor) else place
    if dist.td.get_rank() == 1:  # rank 0 has only finite numbers
        with torch.no_grad():
            local.view(-1)[0] = torch.nan if what == "weight" else torch.inf
    saver.save(2)
    saver.finish()
    saver.save(3)
    return warnings[0], ranks.message_of(saver.finish)


@pytest.mark.parametrize("what", ["weight", "exp_avg_sq"])
def test_a_state_that_is_not_finite_is_never_saved(tmp_path, what):
    key = {"weight": "policy.0.weight", "exp_avg_sq": "policy.0.weight.exp_avg_sq"}[what]
    for warning, error in run_ranks(2, poisoned, tmp_path, what):
        for step, said in (2, warning), (3, error):
            assert f"{key} is not finite" in said and f"after {step} steps" in said
            assert "\n" not in said
    assert [p.name for p in (tmp_path / "ckpt").iterdir()] == ["step_000001"]


def exported(base, out):
    dist.init("cpu", "float32")
    policy, tokenizer = load_policy(base.model), load_tokenizer(base.model)
    facts = {"prompt": "{problem}", "system_prompt": ""}
    return ranks.message_of(ckpt.export_hf, dist.full_weights(policy), policy, tokenizer, base.model, out,
                            facts)


def ended(cfg) -> str:
    run = train.prepare(cfg)
    train.train(run)
    (run.log.out / "ckpt").touch()  # a file in the place of the folder
    return ranks.message_of(train.finish, run)


def test_a_run_does_not_end_well_if_its_last_checkpoint_cannot_be_saved(base, tmp_path):
    cfg = dataclasses.replace(base, steps=1, save_every=0, eval_every=0, out=str(tmp_path / "run"))
    assert run_ranks(1, ended, cfg)[0].startswith("two saves in a row failed")


@pytest.mark.parametrize("disk", ["64k"], indirect=True)
def test_an_export_that_finds_no_space_is_one_line(disk, base):
    for said in run_ranks(2, exported, base, disk / "hf"):
        assert said.startswith(f"{os.uname().nodename}: {disk}/hf can't be written (")
        assert "needed: space" in said
    assert not list(disk.iterdir())


def busy(out, steps, disk):
    """Saves a checkpoint of each step, with --keep 1. Calls disk() after the first save. Returns warnings."""
    saver, _, said = small(out, keep=1, keep_best="auto")
    for step in steps:
        saver.save(step)
        saver.finish()
        if disk and step == steps[0]:
            disk()
    return said


def test_the_best_checkpoint_is_the_best_on_the_present_evaluation_sets(tmp_path):
    rows = [(1, "a", 0.9), (2, "b", 0.2), (3, "b", 0.3), (4, "b", 0.1)]
    text = "".join(json.dumps({"step": step, f"eval/{name}/avg@1": x}) + "\n" for step, name, x in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 5, "reward": 1}\n')
    assert ckpt.best_of(tmp_path, [ckpt.step_folder(tmp_path, i) for i in range(6)], "auto").name[-1] == "3"


def evaluated_again(out) -> str:
    """Saves two steps. A restart sets step 2's row aside and evaluates step 2 again. Returns the best."""
    rows = [json.dumps({"step": step, "eval/a/avg@1": step}) + "\n" for step in (1, 2)]
    (out / "metrics.jsonl").write_text(rows[0])
    saver, models, warnings = small(out, keep_best="auto")
    for step in (1, 2):
        saver.save(step)
    saver.finish()
    again = ckpt.Saver(out, models, saver.cfg, {}, 2, warnings.append)
    assert os.readlink(out / "ckpt" / "best") == "step_000001" and not warnings
    (out / "metrics.jsonl").write_text("".join(rows))
    again.save(2)
    return os.readlink(out / "ckpt" / "best")


def test_a_last_step_that_is_evaluated_after_a_restart_may_be_the_best(tmp_path):
    assert run_ranks(1, evaluated_again, tmp_path) == ["step_000002"]


def test_what_a_user_puts_into_ckpt_is_left_alone(two_ranks, tmp_path):
    out = tmp_path / "run"
    folder = out / "ckpt"
    for name in ("step_000020_copy", "step_000020.bak", "step_best", "step_20", "best"):
        shutil.copytree(two_ranks[0] / "ckpt" / "step_000002", folder / name)
    shutil.copytree(folder / "step_best", tmp_path / "elsewhere")
    (folder / "step_000000").symlink_to(tmp_path / "elsewhere")
    (folder / "step_notes.txt").write_text("mine")
    rows = [json.dumps({"step": step, "eval/a/avg@1": 0.1 * step}) + "\n" for step in (1, 2, 3)]
    (out / "metrics.jsonl").write_text("".join(rows))
    before = tree(tmp_path)
    (said,) = run_ranks(1, busy, out, (1, 2, 3), None)
    assert len(said) == 3 and all("ckpt/best not made" in text for text in said)
    after = tree(tmp_path)
    assert {k: v for k, v in after.items() if "step_000003/" not in k} == before
    assert [p.name for p in ckpt.complete(out)] == ["step_000000", "step_000003"]
    assert ckpt.find(out, "auto").name == "step_000003"


def killed_while_it_prunes(out, number):
    """The process ends before it deletes or renames for the given time."""
    changes = []

    def hook(event, args):
        if event in ("os.remove", "os.rename"):
            changes.append(args)
            if len(changes) == number:
                os._exit(0)

    sys.addaudithook(hook)
    ckpt.prune(out, 1, "")


def begun(out):
    small(out, keep=1)


@pytest.mark.parametrize("number", range(1, 6))
def test_what_a_kill_leaves_of_an_old_checkpoint_is_deleted_at_the_next_start(tmp_path, number):
    """Otherwise each such kill would fill the disk with the size of a checkpoint."""
    old, _ = marked(tmp_path, [2, 4])
    for name in ("shard-00000.safetensors", "shard-00001.safetensors", "state.json"):
        (old / name).touch()
    process = get_context("fork").Process(target=killed_while_it_prunes, args=(tmp_path, number))
    process.start()
    process.join()
    assert [p.name for p in ckpt.complete(tmp_path)] == ["step_000002"][number - 1:] + ["step_000004"]
    assert len(os.listdir(tmp_path / "ckpt")) == 2
    run_ranks(1, begun, tmp_path)
    assert os.listdir(tmp_path / "ckpt") == ["step_000004"]


def test_notes_in_an_old_checkpoint_stay(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "ckpt").symlink_to(tmp_path / "big")
    old = tmp_path / "ckpt" / "step_000001"
    (said,) = run_ranks(1, busy, tmp_path, (1, 2, 3), lambda: (old / "notes.txt").write_text("mine"))
    # The failed removal deleted COMPLETE. So the next save ignores the folder and gives no second warning.
    assert len(said) == 1 and "not removed" in said[0] and "step_000001" in said[0]
    assert [p.name for p in old.iterdir()] == ["notes.txt"]
    assert [p.name for p in ckpt.complete(tmp_path)] == ["step_000003"]


def test_an_export_whose_base_model_has_moved(two_ranks, base, tmp_path):
    out, moved = copy_of(two_ranks, tmp_path / "run"), str(tmp_path / "moved")
    for folder in ckpt.complete(out):
        state = json.loads((folder / "state.json").read_text())
        state["config"]["model"] = "/gone/base"
        (folder / "state.json").write_text(json.dumps(state))
        mark = json.loads((folder / "COMPLETE").read_text())
        (folder / "COMPLETE").write_text(json.dumps(mark | ckpt._crc32s(folder / "state.json")))
    shutil.copytree(base.model, moved)
    for who, architecture in (("policy", "Qwen2ForCausalLM"), ("critic", "Qwen2ForSequenceClassification")):
        with pytest.raises(UserError, match="no model folder '/gone/base'; needed: --model"):
            ckpt.main(["export", str(out), "4", str(tmp_path / who), who])
        ckpt.main(["export", str(out), "4", str(tmp_path / who), who, "--model", moved])
        ours, theirs = tree(tmp_path / who), tree(two_ranks[0] / "export" / who)
        assert json.loads(ours["config.json"])["architectures"] == [architecture]
        assert {k: v for k, v in ours.items() if k != "torz.json"} == {
            k: v for k, v in theirs.items() if k != "torz.json"}
    file = tmp_path / "moved/tokenizer.json"
    file.write_text(file.read_text().replace('"7"', '"seven"'))
    for who in ("policy", "critic"):
        with pytest.raises(UserError, match=f"{who}'s tokenizer: .* the run started from .was: /gone/base"):
            ckpt.main(["export", str(out), "4", str(tmp_path / who), who, "--model", moved])


def test_no_pickle_is_read(two_ranks, resumed, base, tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    code = pickle.dumps(Payload())
    pickle.loads(code)
    (tmp_path / "ran").rmdir()  # an error if the load did not run the code
    out, model = copy_of(two_ranks, tmp_path / "run"), tmp_path / "model"
    shutil.copytree(base.model, model)
    for folder in (out / "ckpt" / "step_000004", out / "ckpt", out, model):
        for name in (".metadata", "0.metadata", "__0_0.distcp", "pytorch_model.bin", "training_args.bin"):
            (folder / name).write_bytes(code)
    assert equal(restore(1, base, out)[0], resumed(1)[0])
    ckpt.main(["export", str(out), "4", str(tmp_path / "hf"), "--model", str(model)])
    load_policy(str(model)), load_critic(str(model)), load_tokenizer(str(model))
    assert not (tmp_path / "ran").exists()


QUESTIONS = ["12+30=", "  Is 'a' < \"b\"?\\n\n\tpäivää \u2028 \U0001f600 {{ x }} {% if %} {problem} <b>&\n"]
# The text of a --template file. A prompt must contain the text's Jinja syntax unchanged.
FILE = "It's \"{problem}\"\\n\n{{ '{problem}' }}{# no #}\U0001f600\n"


def asked(tokenizer, question, system=""):
    turns = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("template", ["orz", "plain", "file", "chat", "chat with a system prompt"])
def test_an_exported_tokenizer_asks_as_the_training_did(base, tmp_path, template, bos):
    """The exported chat template refuses roles and turns for which --template has no place."""
    tokenizer = chat_tokenizer() if template.startswith("chat") else make_tokenizer()
    if bos:
        start = tokenizer.eos_token
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, tokenizer.eos_token_id)])
    (tmp_path / "ask.txt").write_text(FILE)
    config = dataclasses.asdict(dataclasses.replace(
        base, template=str(tmp_path / "ask.txt") if template == "file" else template.partition(" ")[0],
        system_prompt="It's \"short\".\n" if " " in template else ""))
    facts = ckpt.marker(tmp_path, 3, "policy", {"config": config, "prompt": prompt_form(config["template"])})
    policy = load_policy(base.model)
    ckpt.export_hf(dist.full_weights(policy), policy, tokenizer, base.model, tmp_path / "hf", facts)
    served = load_tokenizer(str(tmp_path / "hf"))
    encode = prompt_encoder(config["template"], tokenizer, config["system_prompt"])
    for question in QUESTIONS:
        trained = encode([("user", question)])
        assert asked(served, question) == list(trained)
        assert (trained[0] == tokenizer.eos_token_id) == (bos and not template.startswith("chat"))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    if template.startswith("chat"):
        assert asked(served, "a", "mine") == encode([("system", "mine"), ("user", "a")])
    else:
        for conversation in (turns[:3], turns[1:2], [{"role": "system", "content": "s"}, turns[0]]):
            with pytest.raises(TemplateError, match="one user turn"):
                served.apply_chat_template(conversation)
    marker = json.loads((tmp_path / "hf" / "torz.json").read_text())
    assert marker["template"] == config["template"] and marker["stop"] == list(base.stop)
    assert marker["temperature"] == base.temperature and marker["template_args"] == []


@pytest.mark.parametrize("ends", [[5, 261], 5])
def test_an_export_has_the_end_tokens_and_no_defaults_of_sampling(base, tmp_path, ends):
    """The policy was trained without the base model's defaults. All tokens that ended a response stay, also
    the tokenizer's, which the base model's file may lack: transformers stops only at those of the file. The
    file of this test is Qwen2.5-Instruct's, with the names that vLLM and transformers also know."""
    source = shutil.copytree(base.model, tmp_path / "base")
    ids = {"bos_token_id": 1, "eos_token_id": ends, "pad_token_id": 0}
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05,
                "min_p": 0.1, "typical_p": 0.9, "presence_penalty": 1.0, "max_new_tokens": 2048}
    (source / "generation_config.json").write_text(json.dumps(ids | sampling))
    config = dataclasses.asdict(base)
    facts = ckpt.marker(tmp_path, 3, "policy", {"config": config, "prompt": prompt_form(base.template)})
    policy = load_policy(str(source))
    ckpt.export_hf(dist.full_weights(policy), policy, make_tokenizer(), str(source), tmp_path / "hf", facts)
    found = GenerationConfig.from_pretrained(tmp_path / "hf").to_diff_dict()
    version = found["transformers_version"]
    assert found == ids | {"eos_token_id": [5, 261], "transformers_version": version}


def test_the_template_of_a_file_outlives_the_file(base, tmp_path):
    (tmp_path / "ask.txt").write_text("Q: {problem} A:")
    cfg = dataclasses.replace(base, template=str(tmp_path / "ask.txt"), steps=1, eval_data=(), save_every=1)
    run(cfg, tmp_path / "run")
    (tmp_path / "ask.txt").unlink()
    ckpt.main(["export", str(tmp_path / "run"), "last", str(tmp_path / "hf")])
    for folder in (tmp_path / "run" / "export" / "policy", tmp_path / "hf"):
        tokenizer = load_tokenizer(str(folder))
        assert tokenizer.decode(asked(tokenizer, "1+1=")) == "Q: 1+1= A:"


def test_a_run_that_was_killed_right_after_its_last_checkpoint_is_tidied(base, two_ranks, tmp_path, capfd):
    """The restarted run does not train. It makes the link `best` and deletes old and unfinished saves."""
    cfg = dataclasses.replace(base, keep=1, keep_best="reward", out=str(tmp_path))
    shutil.copytree(two_ranks[0], tmp_path, dirs_exist_ok=True, symlinks=True)
    best = tmp_path / "ckpt" / "best"
    best.unlink(missing_ok=True)
    (tmp_path / "ckpt" / ".step_000004.0123456789abcdef.part").mkdir()
    before = [p.stat().st_ino for p in sorted(tmp_path.glob("ckpt/step_000004/*"))]
    assert run_ranks(2, ranks.main, cfg) == ["", ""] and "!!" not in capfd.readouterr().out
    names = {path.name for path in (tmp_path / "ckpt").iterdir()}
    assert best.is_symlink() and names == {"best", "step_000004", best.resolve().name}
    assert before == [p.stat().st_ino for p in sorted(tmp_path.glob("ckpt/step_000004/*"))]
