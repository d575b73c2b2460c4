"""Tests that each change in docs/forking.md works in a copy of the program."""

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, maths, run_ranks
from ranks import main  # noqa: F401  loads the libraries of all forks once
from safetensors.torch import load_file
from torch.optim._muon import _zeropower_via_newtonschulz

import ckpt
from guard.files import read_jsonl
from log import read_metrics

DOC = (ROOT / "docs/forking.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
TAKEN = set()


def told(start: str) -> str:
    """Returns the Python block of docs/forking.md that starts with `start`."""
    (block,) = [block for block in BLOCKS if block.startswith(start)]
    TAKEN.add(block)
    return block


# Each list below has the edits of one fork, a copy of the program: (file, old text, new text).
# OPO (arXiv 2505.23585) is in section 1 of docs/forking.md.
OPO = [("configs.py", '    "return_whiten",\n]\n', told('    "return_whiten"')),
       ("train.py", "    else:\n        advantages = grpo.group_advantages(",
        told("    elif cfg.advantage == ") + "    else:\n        advantages = grpo.group_advantages(")]
# Section 1, SAPO (arXiv 2511.20347).
SAPO = [("configs.py", 'Ratio = Literal["token", "sequence", "clipped",',
         'Ratio = Literal["soft", "token", "sequence", "clipped",'),
        ("grpo.py", '    elif ratio in ("token", "sequence"):',
         told('    elif ratio == "soft":') + '    elif ratio in ("token", "sequence"):')]
# Section 2: the reference is a moving average of the policy's weights.
AVERAGE = [("train.py", """    if (step + 1) * per_step // n > step * per_step // n:
        for old, new in zip(run.ref.model.parameters(), run.policy.model.parameters(), strict=True):
            old.copy_(new)
""", told("    for old, new in zip(run.ref"))]
# Section 3: a new metric.
REWARD = '    "reward": lambda s: s.reward,\n'
DIGITS = [("log.py", REWARD, REWARD + told('    "digits": '))]
# Section 4: the engine ends a response that repeats itself.
ENDS = [("engine.py", "        if not self.may_stop[ids[-1]]:\n",
         told("        if len(ids) >= 32") + "        if not self.may_stop[ids[-1]]:\n"),
        ("engines/torch_engine.py", "        slots = self._allocate(waiting)\n",
         told("        self.may_end[:]") + "        slots = self._allocate(waiting)\n")]
# Section 4: a run ends when nearly all samples are right.
STOP = [("train.py", "    return dist.stop_requested()\n", told("    return dist.stop_requested()"))]
# Section 5: data from CSV files.
CSV = [("configs.py", 'DATA_FILES = (".arrow", ".parquet", ".jsonl", ".json")\n', told("DATA_FILES = ")),
       ("grading/rows.py", '    if file.suffix in (".parquet", ".arrow"):\n',
        told('    if file.suffix == ".csv":'))]
# Section 6: an engine without a cache.
ENGINE = [("engines/slow_engine.py", "", told('"""An engine without a cache."""')),
          ("configs.py", 'engine: Literal["auto", "torch", "vllm"]', told("engine: Literal").strip()),
          ("rollout.py", 'ENGINES = {"torch": TorchEngine, "vllm": VLLMEngine}\n',
           told("from engines.slow_engine"))]
# Section 7: Muon optimizes the matrices of the layers.
MUON = [("guard/start.py", "    return torch.optim.AdamW(model.parameters(), lr, **options, fused=True)\n",
         told("    matrices = "))]
# Section 8: checkpoints are copied to S3.
NEWEST = "    *older, newest = complete(out) or [None]\n"
S3 = [("ckpt.py", "    _sync(final.parent)\n", "    _sync(final.parent)\n" + told("    s3_sync(")),
      ("ckpt.py", NEWEST, told("    loaded = ") + NEWEST)]
# Section 9: the reward has a second part.
BREVITY = [("reward.py", "\nREWARD_PARTS = {\n", "\n" + told("def brevity("))]
# Section 12: only the last layers are trained.
OPTIMIZER = "        roles[who] = Role(who, model, None)\n"
LAYERS = [("guard/start.py", OPTIMIZER, told("        model.requires_grad_(False)") + OPTIMIZER)]
SUBSET = told("import random\n\nfrom grading")  # section 13: random rows of a data file
TESTED = [OPO, SAPO, AVERAGE, DIGITS, ENDS, STOP, CSV, ENGINE, MUON, S3, BREVITY, LAYERS]
FOLDERS = ("", "engines", "grading", "guard", "layers", "tools")


def sources(root: Path) -> dict[str, Path]:
    return {p.relative_to(root).as_posix(): p for folder in FOLDERS for p in (root / folder).glob("*.py")}


def fork(folder: Path, edits) -> str:
    for file in ROOT.glob("*.py"):
        shutil.copy2(file, folder)
    for name in (*FOLDERS[1:], "__pycache__"):  # with what Python has compiled
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    for name, old, new in edits:
        file = folder / name
        text = file.read_text(encoding="utf-8") if old else ""
        assert text.count(old) == 1, f"{name} has changed: {old!r}"
        file.write_text(text.replace(old, new), encoding="utf-8")
    return str(folder)


def test_a_change_takes_at_most_three_places():
    assert all(len(edits) <= 3 for edits in TESTED)
    assert sum(len(edits) <= 2 for edits in TESTED) >= len(TESTED) / 2


def test_the_documented_code_is_tested():
    """This file uses all code blocks of docs/forking.md except nine, which other test files use."""
    elsewhere = [block for block in BLOCKS if block not in TAKEN]
    assert [re.search(r"def (\w+)", block)[1] for block in elsewhere] == [
        "advantage", "judge", "limit", "respond", *["__init__"] * 3, "task", "environment"]


def become(folder: str) -> None:
    for name in sources(ROOT):
        sys.modules.pop(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."), None)
    sys.modules.pop("ranks", None)
    sys.path.insert(0, folder)


def configured(model: str, *flags: str):
    from configs import parse

    return parse(["tiny-grpo", "--model", model, "--device", "cpu", "--samples_per_prompt", "4",
                  "--prompts_per_step", "6", "--pack_len", "4096", *flags])


def advantages_and_gradients(folder: str, model: str, kinds: list[str]) -> dict:
    """kinds: values of --advantage. Returns kind -> (advantages, policy gradient), and also "rewards" and
    "lengths" -> one number for each sample."""
    become(folder)
    import ranks

    import train

    samples, out = ranks.make_samples(24), {}
    for kind in kinds:
        cfg = configured(model, "--advantage", kind)
        with_advantages = train.add_group_advantages(samples, cfg)
        gradients = ranks.gradients(cfg, with_advantages)
        of_policy = {k: v for k, v in gradients.items() if k.startswith("policy.")}
        out[kind] = [s.advantage for s in with_advantages], of_policy
    assert train.__file__.startswith(folder)
    return out | {"rewards": [s.reward for s in samples], "lengths": [len(s.ids) for s in samples]}


def test_another_advantage(tiny, tmp_path):
    """OPO's baseline is a mean weighted by length, so a group's sum of length × advantage is 0."""
    kinds = ["group_mean", "length_weighted"]
    results = run_ranks(1, advantages_and_gradients, fork(tmp_path, OPO), tiny, kinds)[0]
    advantages, gradient = results["length_weighted"]
    for g in range(0, 24, 4):
        r, n, a = (x[g:g + 4] for x in (results["rewards"], results["lengths"], advantages))
        baseline = sum(x * y for x, y in zip(r, n, strict=True)) / sum(n)
        assert a == pytest.approx([x - baseline if len(set(r)) > 1 else 0.0 for x in r])
        assert sum(x * y for x, y in zip(a, n, strict=True)) == pytest.approx(0, abs=1e-9)
    mean_advantages, mean_gradient = results["group_mean"]
    assert max(abs(x - y) for x, y in zip(advantages, mean_advantages, strict=True)) > 0.05
    assert all(g.isfinite().all() for g in gradient.values())
    difference = sum(((gradient[k] - mean_gradient[k]) ** 2).sum() for k in gradient)
    assert difference / sum((g**2).sum() for g in mean_gradient.values()) > 1e-3


def losses(folder: str, model: str, kinds: list[str]) -> dict:
    """Computes the loss for each value of --ratio in `kinds`. Returns kind -> (loss, d loss / d log-probs,
    d loss / d weights), and also "pack" -> (log-probs, old log-probs, advantages, mask)."""
    become(folder)
    from dataclasses import replace

    import ranks

    import data
    import grpo
    import ppo
    import train
    from log import Meter
    from model import load_policy

    policy, p = load_policy(model), data.pack(ranks.make_samples(24))
    with torch.no_grad():
        logp, _ = policy(p, 1.0)
    noise = torch.randn(len(logp), generator=torch.Generator().manual_seed(0))
    p = replace(p, old_logp=torch.where(p.mask, logp + 0.5 * noise, 0))
    tokens, segment, out = int(p.mask.sum()), ppo.segment_ids(p.cu_seqlens, len(p.mask)), {}
    for kind in kinds:
        cfg = configured(model, "--ratio", kind, "--mismatch", "none")
        policy.zero_grad()
        loss = train.policy_pack_loss(policy, p, tokens, p.responses, cfg, Meter())
        loss.backward()
        x = logp.clone().requires_grad_()
        grpo.policy_loss(x, p.old_logp, p.advantages, p.mask, segment, p.mask / tokens, kind)[0].backward()
        out[kind] = loss.item(), x.grad, torch.cat([w.grad.flatten() for w in policy.parameters()])
    assert train.__file__.startswith(folder)
    return out | {"pack": (logp, p.old_logp, p.advantages, p.mask)}


def test_another_ratio(tiny, tmp_path):
    results = run_ranks(1, losses, fork(tmp_path, SAPO), tiny, ["token", "soft"])[0]
    *tensors, mask = results["pack"]
    logp, old, advantages = (x[mask].double() for x in tensors)
    loss, gradient, weights = results["soft"]
    _, token_gradient, token_weights = results["token"]
    tau = torch.tensor([1.0 if a > 0 else 1.05 for a in advantages], dtype=torch.float64)
    rho = (logp - old).exp()
    gate = 1 / (1 + (-tau * (rho - 1)).exp())
    assert loss == pytest.approx(float(-(4 / tau * gate * advantages).mean()), rel=1e-5)
    want = -4 * gate * (1 - gate) * rho * advantages / len(rho)  # eq. 8 of SAPO
    assert torch.allclose(gradient[mask].double(), want, rtol=1e-4, atol=1e-9)
    assert not gradient[~mask].any()
    clipped = token_gradient[mask] == 0
    assert clipped.sum() > 20 and (want[clipped] != 0).all()
    assert (weights - token_weights).norm() / token_weights.norm() > 0.05


def train_with(folder: str, fields: dict) -> bool:
    become(folder)
    import train
    from configs import Config

    assert train.__file__.startswith(folder)
    run = train.prepare(Config(**fields))
    complete = train.train(run)
    if complete:
        train.finish(run)
    run.grader.close()
    run.log.close()
    return complete


def run_fork(folder: str, cfg, world: int = 1, complete: bool = True, **changes) -> list[dict]:
    fixed = dict(eval_data=(), eval_every=1, save_every=1, out=f"{folder}/run")
    fields = dataclasses.asdict(cfg) | fixed | changes
    assert run_ranks(world, train_with, folder, fields) == [complete] * world
    return read_metrics(Path(fields["out"]))


def saved(out: Path, step: int, who: str, model: str, suffix: str = "",
          names=None) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    shapes = {name: x.shape for name, x in load_file(f"{model}/model.safetensors").items()}
    tensors = {name + suffix: torch.empty(shapes[name]) for name in (names or shapes)}
    reader = dcp.HuggingFaceStorageReader(ckpt.step_folder(out, step))
    dcp.load({who: tensors}, storage_reader=reader, no_dist=True)
    return {name.removesuffix(suffix): x for name, x in tensors.items()}


def check_resume(folder: str, cfg, out: Path, rows: list[dict], world: int = 1) -> None:
    """Asserts that a run resumed after the first step of `out` equals `out`, bit by bit."""
    copy = out.with_name("resumed")
    shutil.copytree(out / "ckpt/step_000001", copy / "ckpt/step_000001")
    (copy / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert maths(run_fork(folder, cfg, world, out=str(copy), steps=2)) == maths(rows)
    ours, theirs = saved(copy, 2, "policy", cfg.model), saved(out, 2, "policy", cfg.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def samples_at(folder: Path, step: int) -> list[dict]:
    rows = read_jsonl(folder / f"run/samples/step_{step:06d}.jsonl")
    assert len(rows) == 32
    return rows


def test_a_moving_average_as_the_reference(base, tmp_path):
    rows = run_fork(fork(tmp_path, AVERAGE), base, kl_coef=0.001, ref_refresh=True, steps=3)
    start = load_file(f"{base.model}/model.safetensors")
    average = {name: x.double() for name, x in start.items()}
    for step in (1, 2, 3):
        policy, ref = (saved(tmp_path / "run", step, who, base.model) for who in ("policy", "ref"))
        for name in average:
            average[name] += 0.01 * (policy[name].double() - average[name])
            assert (ref[name] - average[name]).abs().max() < 3e-7, (step, name)
    assert max(float((ref[name] - start[name]).abs().max()) for name in start) > 1e-5
    assert abs(rows[0]["kl"]) < 1e-9 and 0 < rows[1]["kl"] < rows[2]["kl"]


def test_another_metric(base, tmp_path):
    rows = run_fork(fork(tmp_path, DIGITS), base, steps=2)
    for step in (0, 1):
        counts = [sum(c in "0123456789" for c in s["response"]) for s in samples_at(tmp_path, step)]
        assert rows[step]["digits"] == pytest.approx(sum(counts) / 32) and sum(counts) > 0


LATE = '''
from pathlib import Path

def late(response, answer, kind):
    """1 from the third step on. A response that is cut scores 0 without it."""
    return float((Path(__file__).parent / "run/metrics.jsonl").read_text().count("\\n") >= 2)
'''


def test_another_stop_rule(base, tmp_path):
    folder, out = fork(tmp_path, STOP), tmp_path / "run"
    (tmp_path / "late.py").write_text(LATE)
    rows = run_fork(folder, base, complete=False, steps=9, reward=(f"{tmp_path}/late.py:late",))
    assert 2 < len(rows) < 9 and [r["step"] for r in rows] == list(range(len(rows)))
    assert rows[-1]["reward"] > 0.99 and all(r["reward"] <= 0.99 for r in rows[:-1])
    assert ckpt.complete(out)[-1] == ckpt.step_folder(out, len(rows)) and not (out / "export").exists()
    ckpt.main(["export", str(out), str(len(rows)), str(tmp_path / "exported")])
    policy = saved(out, len(rows), "policy", base.model)
    for name, x in load_file(tmp_path / "exported/model.safetensors").items():
        assert torch.equal(x, policy[name].bfloat16())


def test_responses_that_repeat_themselves_end(base, tmp_path):
    """Here a response ends as soon as two of its last 6 tokens are equal."""
    edits = [(file, old, new.replace("32", "6").replace("< 8", "< 6")) for file, old, new in ENDS]
    run_fork(fork(tmp_path, edits), base, steps=1, stop=(), save_samples="all", save_logps=True)
    ended = 0
    for row in samples_at(tmp_path, 0):
        ids = row["ids"]
        repeats = [n for n in range(6, len(ids) + 1) if len(set(ids[n - 6:n])) < 6]
        assert repeats in ([], [len(ids)])
        ended += bool(repeats)
    assert ended > 5


def test_a_subset_of_a_data_file(tmp_path, monkeypatch):
    rows = [{"prompt": f"{i}+0=", "answer": str(i)} for i in range(1500)]
    (tmp_path / "test.json").write_text(json.dumps(rows))
    monkeypatch.chdir(tmp_path)
    exec(SUBSET.replace("test.parquet", "test.json"), {})
    subset = read_jsonl(tmp_path / "subset.jsonl")
    assert len(subset) == 1000 and all(row in rows for row in subset)


def read_csv(folder: str, file: str) -> list:
    become(folder)
    from grading.rows import problem_rows
    from guard.messages import UserError

    try:
        return [(n, row.text, row.answer) for n, row in problem_rows(file, "math")]
    except UserError as e:
        return [str(e)]


def test_csv_files(tmp_path):
    (tmp_path / "a.csv").write_text('problem,answer\n"1, 2 and\n3?",6\n"say ""4""",4\n')
    folder = fork(tmp_path, CSV)
    found = run_ranks(1, read_csv, folder, f"{tmp_path}/a.csv")[0]
    assert found == [(1, "1, 2 and\n3?", "6"), (2, 'say "4"', "4")]
    (tmp_path / "a.csv").write_text("problem,answer\n1+1=,2\nWhat is 1,000+2?,1002\n")
    (found,) = run_ranks(1, read_csv, folder, f"{tmp_path}/a.csv")[0]
    assert re.search(r"a\.csv row 2 has the unknown reward \['1002'\]; needed: one of", found)


def test_a_new_engine(base, tmp_path):
    rows = run_fork(fork(tmp_path, ENGINE), base, steps=1, engine="slow")
    assert rows[0]["logp_gap/max"] < 1e-4 and rows[0]["grad_norm/policy"] > 0


def test_muon(base, tmp_path):
    folder, out = fork(tmp_path, MUON), tmp_path / "run"
    base = dataclasses.replace(base, algo="grpo", critic_updates=1)
    rows = run_fork(folder, base, world=2, steps=2)
    start, lr = load_file(f"{base.model}/model.safetensors"), rows[0]["lr/policy"]
    weights, compared = saved(out, 1, "policy", base.model), 0
    matrices = [name for name, x in start.items() if ".layers." in name and x.ndim == 2]
    buffer = saved(out, 1, "policy", base.model, ".momentum_buffer", matrices)
    for name in matrices:
        scale = lr * 0.2 * max(start[name].shape) ** 0.5
        want = _zeropower_via_newtonschulz(buffer[name], (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
        done = (start[name] - weights[name]) / scale
        compared += 1
        assert (done - want).norm() < 0.2 * want.norm(), name  # Muon computes in bf16
    assert compared == 14
    check_resume(folder, base, out, rows, world=2)


AWS = """#!/bin/sh
[ "$1 $2" = "s3 sync" ] || exit 1
from=${3#s3://my-bucket/} to=${4#s3://my-bucket/}
cd BUCKET && mkdir -p "$to" && [ ! -d "$from" ] || cp -r "$from/." "$to" && rm -rf "$to/lock"
"""


def test_checkpoints_in_s3(base, tmp_path, monkeypatch):
    """A run whose folder was deleted continues from the bucket. A script replaces the command `aws`."""
    folder, out, bucket = fork(tmp_path, S3), tmp_path / "run", tmp_path / "bucket"
    (tmp_path / "bin").mkdir()
    bucket.mkdir()
    (tmp_path / "bin/aws").write_text(AWS.replace("BUCKET", str(bucket)))
    (tmp_path / "bin/aws").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    base = dataclasses.replace(base, algo="grpo", critic_updates=1)
    rows = run_fork(folder, base, world=2, steps=2)
    weights = saved(out, 2, "policy", base.model)
    shutil.rmtree(out)
    shutil.rmtree(bucket / "runs/orz-7b/ckpt/step_000002")
    again = run_fork(folder, base, world=2, steps=2)
    assert (out / "ckpt/step_000001/COMPLETE").exists()
    assert maths(again)[-1] == maths(rows)[-1]
    assert all(torch.equal(x, weights[name]) for name, x in saved(out, 2, "policy", base.model).items())


def test_a_second_reward_part(base, tmp_path):
    rows = run_fork(fork(tmp_path, BREVITY), base, steps=2, reward=(*base.reward, "brevity"))
    for step in (0, 1):
        samples = samples_at(tmp_path, step)
        lengths = [s["tokens"] for s in samples]
        parts = [0.001 * (min(t["tokens"] for t in samples if t["prompt_id"] == s["prompt_id"]) - s["tokens"])
                 for s in samples]
        scores = [s["reward"] + part for s, part in zip(samples, parts, strict=True)]
        row, total = rows[step], sum(n * score for n, score in zip(lengths, scores, strict=True))
        assert row["reward/brevity"] == pytest.approx(sum(parts) / 32) and min(parts) < 0
        assert row["returns"] == pytest.approx(total / sum(lengths), rel=1e-4)
        assert row["score"] == pytest.approx(row["reward"] + row["reward/brevity"])


def test_a_part_of_the_layers(base, tmp_path):
    edits = [(file, old, new.replace("[-4:]", "[-1:]")) for file, old, new in LAYERS]
    folder, out = fork(tmp_path, edits), tmp_path / "run"
    rows = run_fork(folder, base, world=2, steps=2)
    start, end = load_file(f"{base.model}/model.safetensors"), saved(out, 2, "policy", base.model)
    trained = {name for name in start if name.startswith("model.layers.1.")}
    assert len(trained) == 12 < len(start)
    for name, x in start.items():
        assert torch.equal(x, end[name]) == (name not in trained), name
    reader = torch.distributed.checkpoint.HuggingFaceStorageReader(ckpt.step_folder(out, 2))
    keys = set(reader.read_metadata().state_dict_metadata)
    assert {name for name in start if f"policy.{name}.exp_avg" in keys} == trained
    check_resume(folder, base, out, rows, world=2)
