"""Tests of a run's logs: metrics, alarms, trackers and saved samples."""

import dataclasses
import io
import json
import math
import os
import re
import resource
import shutil
import signal
import struct
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch
from conftest import ROOT, maths, run, run_ranks, start_ranks
from transformers import AutoModelForCausalLM

from configs import PRESETS, parse
from data import load_problems
from guard.alarms import active_alarms, new_alarms
from guard.files import read_jsonl
from guard.messages import UserError
from log import Logger, Meter, Tracker, measure_samples, read_metrics
from model import load_tokenizer

PPO = PRESETS["tiny-ppo"]


def healthy(steps: int = 60) -> list[dict]:
    rows = []
    for i in range(steps):
        left = 0.6**i
        rows.append({
            "step": i, "reward": 0.97 - 0.43 * left, "score": 0.97 - 0.43 * left,
            "response_len": 20.5 - 6 * left, "truncated": 0.0,
            "entropy": 0.014 + 0.19 * left, "uniform_groups": 0.85 * (1 - left),
            "explained_variance": -0.01 - 6 * left, "clip_share": 0.02, "logp_gap/mean": 3e-7,
            "grade/error": 0.0, "grade/timeout": 0.0, "time/step": 2.0 + (i % 20 == 0), "time/rollout": 1.0,
            "time/policy": 1.0})
    return rows


def learning(steps: int = 60) -> list[dict]:
    values = {"reward": 0.6, "score": 0.6, "entropy": 0.3, "uniform_groups": 0.3, "explained_variance": 0.3,
              "response_len": 400.0}
    return [row | values for row in healthy(steps)]


def raised(rows: list[dict], cfg=PPO) -> list[tuple[int, str]]:
    return [(rows[i]["step"], text) for i in range(len(rows)) for text in new_alarms(rows[:i + 1], cfg)]


# Alarm -> (metrics that raise it, maximum number of steps until it is raised, words of its text).
WRONG = {"entropy": ({"entropy": 0.02}, 5, ["0.02", "(first step: 0.3)", "--policy_lr"]),
    "truncated": ({"truncated": 0.9}, 5, ["%", "--max_response_len 48"]),
    "uniform": ({"uniform_groups": 0.95}, 5, ["%", "--samples_per_prompt"]),
    "gap": ({"logp_gap/mean": 0.05}, 5, ["nats", "--max_logp_gap 0.1"]),
    "grading": ({"grade/error": 0.1, "grade/timeout": 0.2}, 5, ["10%", "20%", "--grade_deadline", "now 5"])}


def test_a_constant_reward_is_an_alarm_at_the_first_step():
    rows = [row | {"score": 0.5, "reward": 0.3, "uniform_groups": 1.0} for row in learning(30)]
    (alarm,) = raised(rows)
    assert alarm[0] == 0 and "100% of the prompts" in alarm[1] and "--reward may ignore" in alarm[1]


def test_a_constant_reward_with_a_penalty_that_varies_is_no_alarm():
    """Training compares scores. So `uniform_groups` counts prompts whose samples have equal scores."""
    samples = [dataclasses.replace(s, reward=1.0, parts={"overlong": -0.1 * (s.sample_id % 2) * s.prompt_id})
               for s in ranks.make_samples(8)]
    meter = Meter()
    measure_samples(meter, samples, dataclasses.replace(PPO, samples_per_prompt=4))
    assert meter.reduce()["uniform_groups"] == 0.5  # prompt 0 of two


@pytest.mark.parametrize("values,told", [
    ([0.0] * 20, [4]), ([1 / 3] * 20, [4]), ([0.0] * 4, []), ([0.5] + [0.6] * 19, []),
    ([None, 0.2] * 9, [9])])
def test_a_term_of_the_reward_that_is_constant_is_an_alarm(values, told):
    """In a step without rows of its data set, a term has no value."""
    cfg = dataclasses.replace(PPO, reward=("math", "format=0.5"))
    rows = [row | {"reward/accuracy": 0.5 + i / 99} | ({} if x is None else {"reward/format": x})
            for i, (row, x) in enumerate(zip(learning(), values, strict=False))]
    alarms = raised(rows, cfg)
    assert [step for step, _ in alarms] == told
    assert all("teaches nothing: format (" in text and "\n" not in text for _, text in alarms)


@pytest.mark.parametrize("name,told", [("eval/held/avg@1", False), ("eval/*", False), ("rewrd", True),
                                       ("eval/held", True), ("auto", False), ("", False)])
def test_a_best_metric_that_does_not_exist_is_an_alarm(name, told):
    """Otherwise the best checkpoints would be deleted without a word. Evaluations may be rare."""
    rows = learning(30)
    rows[0]["eval/held/avg@1"] = 0.5
    found = raised(rows, dataclasses.replace(PPO, keep_best=name))
    assert [step for step, _ in found] == [0] * told and all(f"named {name} (--keep" in x for _, x in found)


def test_a_run_that_only_a_teacher_trains_has_no_alarm_about_its_rewards():
    """With --reward math=0, all scores are 0."""
    cfg = dataclasses.replace(PPO, reward=("math=0",), kl_coef=1.0, ref_model="teacher")
    rows = [row | {"score": 0.0, "uniform_groups": 1.0, "reward/accuracy": 0.0} for row in learning()]
    assert raised(rows, cfg) == [] != raised(rows)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "orz-32b"])
def test_an_alarm_recommends_no_flag_that_is_refused(preset):
    """Types each flag of each alarm with a value, after the preset's name."""
    typed = {"policy_lr": "1e-7", "clip_high": "0.28", "entropy_coef": "1e-3", "critic_lr": "1e-5",
             "critic_updates": "16", "freeze_policy_steps": "2", "grade_deadline": "9", "dtype": "float32",
             "max_logp_gap": "1", "engine_share": "0.4", "samples_per_prompt": "64",
             "max_response_len": "30000 --pack_len 60000 --max_model_len 0"}
    cfg = PRESETS[preset]
    rows = [row | {"score": row["reward"]} for row in learning()]
    for name, (bad, _, _) in WRONG.items():
        alarms = active_alarms([*rows, *(row | bad for row in rows[-5:])], cfg)
        flags = {*re.findall(r"--(\w+)", alarms.get(name, ""))} & typed.keys()
        parse([preset, *(word for flag in flags for word in (f"--{flag}", *typed[flag].split()))])


def test_the_metrics_of_a_run_are_read_from_a_path_or_a_text(tmp_path):
    written(tmp_path, learning(2))
    assert read_metrics(tmp_path) == read_metrics(str(tmp_path)) == learning(2)


def test_no_alarm_is_raised_by_a_healthy_run_a_single_odd_step_or_success():
    grpo = [{k: v for k, v in r.items() if k != "explained_variance"} for r in healthy()]
    assert raised(healthy()) == raised(learning()) == raised(grpo, PRESETS["tiny-grpo"]) == []
    for name in WRONG.keys() - {"grading", "gap"}:  # one bad step raises these two alarms
        rows = learning()
        rows[40] |= WRONG[name][0]
        assert raised(rows) == [], name
    for name in ("entropy", "uniform"):
        bad = WRONG[name][0] | {"reward": 0.95}
        rows = [row | (bad if row["step"] >= 40 else {"reward": 0.95}) for row in learning()]
        assert raised(rows) == [], name


@pytest.mark.parametrize("name", WRONG)
def test_an_alarm_is_raised_when_its_cause_begins_and_again_only_after_it_was_gone(name):
    bad, within, words = WRONG[name]
    rows = learning(110)
    for i in (*range(40, 60), *range(90, 110)):
        rows[i] |= bad
    said = [step for step, _ in raised(rows)]
    assert len(said) == 2, said
    assert all(start <= step < start + within for start, step in zip((40, 90), said, strict=True)), said
    last = active_alarms(rows[:60], PPO)
    assert list(last) == [name] and "\n" not in last[name]
    assert all(word in last[name] for word in words), last


def test_a_metric_that_was_both_infinities_stops_no_run():
    rows = learning(20)
    rows[-1]["policy_loss"], rows[-2]["policy_loss"] = math.inf, -math.inf
    assert isinstance(active_alarms(rows, PPO), dict)


def test_an_alarm_that_comes_and_goes_is_raised_once():
    rows = learning()
    for r in rows[20:27] + rows[33:40] + rows[46:]:
        r |= WRONG["truncated"][0]
    active = [bool(active_alarms(rows[:i + 1], PPO)) for i in (26, 32, 39, 45, 52)]
    assert active == [True, False, True, False, True]
    assert len(raised(rows)) == 1


def written(out, rows, start=0, cfg=PPO) -> Logger:
    logger = Logger(out, cfg, True, start, {"torch": "2"}, {})
    for row in rows:
        logger.step(row["step"], {k: v for k, v in row.items() if k != "step"})
        for text in new_alarms(logger.history, cfg):
            logger.alarm(text, row["step"])
    return logger


def test_rows_are_json_and_those_of_another_run_are_kept_beside(tmp_path):
    """A Logger that starts at step N moves existing rows of step N and of later steps to *.old.jsonl."""
    def steps(name):
        return [(row["step"], row["reward"]) for row in read_jsonl(tmp_path / name)]

    logger = written(tmp_path, [{"step": i, "reward": 0.5, "response_len": 9.0, "entropy": math.nan}
                                for i in range(4)])
    logger.alarm("late", 3)
    file = tmp_path / "metrics.jsonl"
    assert "entropy" not in file.read_text() and len(read_metrics(tmp_path)) == 4
    with file.open("a") as f:
        f.write('{"step": 4, "rew')
    written(tmp_path, [{"step": 2, "reward": 0.7, "response_len": 9.0}], start=2)
    assert steps("metrics.jsonl") == [(0, 0.5), (1, 0.5), (2, 0.7)]
    assert steps("metrics.old.jsonl") == [(2, 0.5), (3, 0.5)]
    Logger(tmp_path, PPO, True, 2, {}, {}, own=False)  # --resume names another run's checkpoint
    assert steps("metrics.old.jsonl")[2:] == [(0, 0.5), (1, 0.5), (2, 0.7)] and steps("metrics.jsonl") == []
    assert len(read_jsonl(tmp_path / "alarms.old.jsonl")) == 1


def test_the_row_of_the_first_step_waits_for_no_slow_import(tmp_path, monkeypatch):
    """A checkpoint that is saved meanwhile would count, and a run killed then would never have the row."""
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard")
    written(tmp_path, [])
    assert "torch.utils.tensorboard" in sys.modules


def test_a_start_that_cannot_write_loses_no_history(tmp_path):
    written(tmp_path, learning(4))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / ".metrics.jsonl.part").mkdir()  # makes the Logger fail when it writes a file of this name
    with pytest.raises(UserError, match=f"can't write to {tmp_path} "):
        written(tmp_path, [], start=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("room", [0.2, 1.2])  # for rows
def test_a_row_that_is_set_aside_follows_no_half_a_line_and_is_set_aside_once(room, tmp_path):
    """As on a disk that was full at one start and has space at the next."""
    written(tmp_path, learning(4)).close()
    (tmp_path / "metrics.old.jsonl").write_text('{"step": 0}\n' * 410)
    room *= len((tmp_path / "metrics.jsonl").read_bytes()) / 4  # bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (410 * 12 + round(room), hard))
    try:
        with pytest.raises(UserError, match=f"can't write to {tmp_path} "):
            written(tmp_path, [], start=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    written(tmp_path, [], start=2)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.old.jsonl")][410:] == [2, 3]


def test_a_response_may_hold_what_utf8_has_not(tmp_path):
    written(tmp_path, []).save_samples("samples", 0, [{"prompt_id": 0, "response": "a\udc80é"}])
    assert read_jsonl(tmp_path / "samples" / "step_000000.jsonl")[0]["response"] == "a\udc80é"


def test_a_resumed_run_has_the_alarms_of_one_never_stopped(tmp_path, capsys):
    rows = learning(50)
    for r in rows[15:25] + rows[40:]:
        r |= WRONG["truncated"][0] | WRONG["gap"][0]
    for stop, start in ((50, 50), (44, 43), (30, 16), (50, 20)):
        out = tmp_path / f"{stop}-{start}"
        out.mkdir()
        written(out, rows[:stop])
        with (out / "alarms.jsonl").open("a") as f:
            f.write('{"step": 3, "te')
        capsys.readouterr()
        resumed = written(out, rows[start:], start)
        resumed.alarm("a save failed")
        kept = read_jsonl(out / "alarms.jsonl")
        assert [(row["step"], row["text"]) for row in kept] == [*raised(rows), (50, "a save failed")]
        said = re.findall("^!! .*", capsys.readouterr().out, re.M)
        assert said == [f"!! step {row['step']}: {row['text']}" for row in kept if row["step"] >= start]
        assert read_metrics(out) == rows


def test_a_disk_that_is_full_loses_no_step_and_ends_no_run(tmp_path):
    """A row that did not fit is written at the next step, or when the Logger is closed."""
    logger, files = written(tmp_path, learning(2)), [tmp_path / "metrics.jsonl", tmp_path / "alarms.jsonl"]
    for step, next_one in (2, lambda: logger.step(3, {"reward": 0.5})), (4, logger.close):
        for file in files:
            file.rename(f"{file}.kept")
            file.symlink_to("/dev/full")
        logger.step(step, {"reward": 0.5})
        for file in files:
            Path(f"{file}.kept").replace(file)
        next_one()
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_broken_tensorboard_folder_costs_no_metrics(tmp_path, capsys):
    (tmp_path / "tb").touch()
    logger = written(tmp_path, learning(3))
    logger.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1, 2]
    assert "!! step 2: can't write metrics.jsonl or tb/ (File exists); the next" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bars_are_nested_on_a_terminal_and_nothing_elsewhere(tmp_path, monkeypatch, capsys):
    for stream in sys.stderr, Terminal():
        monkeypatch.setattr(sys, "stderr", stream)
        logger = written(tmp_path, learning(2))
        with logger.bar("Policy Train epoch [1/1]", 3) as bar:
            bar.update(3)
            bar.refresh()
        logger.steps.refresh()
        logger.steps.close()
    said, bars = capsys.readouterr(), stream.getvalue()
    assert said.err == ""
    assert [line.split("/")[0] for line in said.out.splitlines()] == ["step  0", "step  1"] * 2
    assert re.search(r"\n\rPolicy Train epoch \[1/1\]: 100%", bars) and "2/24" in bars


def test_a_meter_divides_sums_by_counts_over_all_ranks(monkeypatch):
    values = [torch.logspace(-6, 1, 300), torch.logspace(-3, 2, 50), torch.zeros(0)]
    meters = [Meter() for _ in values]
    for meter, x in zip(meters, values, strict=True):
        meter.add_mean_and_max("gap", x)
        meter.add_mean_and_max("equal", torch.full((9,), 0.5))
        meter.add_mean_and_max("beyond", torch.tensor([0.0, math.nan, math.inf]))
        meter.add("tokens", len(x))
        meter.add_values("values", x)
        meter.add("nothing", 0, 0)
        meter.add_max("peak", len(x))
    sums = sum(torch.stack(list(meter.sums.values())) for meter in meters)
    peaks = torch.stack([torch.stack(list(meter.peaks.values())) for meter in meters]).amax(0)
    monkeypatch.setattr("dist.all_sum", lambda _: sums)
    monkeypatch.setattr("dist.all_max", lambda _: peaks)
    found, every = meters[0].reduce(), torch.cat(values)
    assert "nothing" not in found and found["tokens"] == 350 and found["peak"] == 300
    assert found["gap/mean"] == pytest.approx(every.mean().item(), rel=1e-5)
    assert found["values"] == found["gap/mean"]
    assert meters[0].variances == {"values": pytest.approx(every.var(unbiased=False).item(), rel=1e-5)}
    assert found["gap/max"] == pytest.approx(every.max().item())
    assert [found[f"equal/{x}"] for x in ("mean", "max")] == [0.5] * 2
    assert math.isnan(found["beyond/mean"])


COLUMNS = ["step", "problem", "response", "gold", "reward", "advantage", "tokens", "reason"]
SAMPLE = {"prompt_id": 0, "sample_id": 0, "answer": "3", "reward": 1.0, "reason": "correct", "stopped": True,
          "problem": "1+2=", "gold": "3", "response": "a\udc80é", "tokens": 4, "advantage": 0.5}


@pytest.fixture(scope="module")
def wandb():
    """Imports wandb's slow modules once, so that forked processes have them."""
    import wandb.proto.wandb_internal_pb2  # noqa: F401


def log_run(out, rows, start, samples_at=(), environment=None, killed=False):
    os.environ |= {"WANDB_MODE": "offline", **(environment or {})}
    with Logger(out, dataclasses.replace(PPO, track=("wandb",)), True, start, {"torch": "2"}, {}) as logger:
        for row in rows:
            if row["step"] in samples_at:
                logger.save_samples("samples", row["step"], [SAMPLE])
            logger.step(row["step"], {k: v for k, v in row.items() if k != "step"})
        if killed:
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)
    return [row["text"] for row in read_jsonl(out / "alarms.jsonl")]


def wandb_records(file):
    """Yields the records of a .wandb file, which has LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        size, kind = struct.unpack("<HB", data[at + 4:at + 7])
        record += data[at + 7:at + 7 + size]
        at += 7 + size
        at += (-at % 32768) * (-at % 32768 < 7)  # skip a block's end if it can't hold a header (7 bytes)
        if kind in (1, 4):  # 1: a whole record; 4: the last part of a record
            yield Record.FromString(record)
            record = b""


def tracked_by_wandb(out):
    """Returns what wandb stored: (names of runs, metrics, samples, config, exit codes)."""
    runs, rows, tables, config, exits = {}, [], [], {}, []
    for file in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(file):
            values = {tuple(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if record.HasField("run"):
                runs[record.run.run_id] = record.run.display_name
                config |= {x.key: json.loads(x.value_json) for x in record.run.config.update}
            if record.HasField("exit"):
                exits.append(record.exit.exit_code)
            if ("samples", "path") in values:
                table = json.loads((file.parent / "files" / values["samples", "path"]).read_text())
                assert table["columns"] == COLUMNS
                tables += table["data"]
            if values:
                rows.append({"step": values["_step",]} | {
                    key[0]: x for key, x in values.items() if len(key) == 1 and key[0][0] != "_"})
    return list(runs.values()), rows, tables, config, exits


def test_wandb_has_the_rows_of_the_run_and_no_step_twice(wandb, tmp_path):
    out = tmp_path / "my-run"
    out.mkdir()
    rows = [{"step": i, "reward": i / 4, "eval/my set/avg@4": 1 / (i + 1)} for i in range(6)]
    (process,), folder = start_ranks(1, log_run, out, rows[:4], 0, (0, 3), None, True)
    process.join(300)
    folder.cleanup()
    assert process.exitcode == -signal.SIGKILL
    assert run_ranks(1, log_run, out, rows[2:], 2, (3, 4)) == [[]]
    (runs, found, tables, config, exits), = run_ranks(1, tracked_by_wandb, out)
    assert read_metrics(out) == rows == found and runs == ["my-run"] and exits == [0]
    assert [table[0] for table in tables] == [0, 3, 4]
    assert all(table[1] == "1+2=" and table[3:] == ["3", 1.0, 0.5, 4, "correct"] for table in tables)
    assert float(config["policy_lr"]) == PPO.policy_lr


class ListTracker(Tracker):
    """A tracker that writes each row to a file, and raises an error at step 2."""

    def start(self) -> None:
        (self.out / "tracked").mkdir(exist_ok=True)

    def send(self, row, samples) -> None:
        if row["step"] == 2:
            raise ValueError("no\nspace")
        with (self.out / "tracked" / self.id).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def finish(self, run_failed: bool) -> None:
        pass


def test_a_tracker_that_fails_ends_no_run_and_is_one_alarm(tmp_path, monkeypatch):
    monkeypatch.setattr("log.Tracker", ListTracker)
    rows, cfg = learning(6), dataclasses.replace(PPO, track=("wandb",))

    def tracked():
        return sorted(map(read_jsonl, (tmp_path / "tracked").iterdir()), key=len)

    with written(tmp_path, rows[:4], cfg=cfg):
        pass
    assert [row["text"].split(";")[0] for row in read_jsonl(tmp_path / "alarms.jsonl")] == [
        "--track failed (ValueError: no space)"]
    assert read_metrics(tmp_path) == rows[:4] and tracked() == [rows[:2]]
    written(tmp_path, rows[3:], 3, cfg)
    assert tracked() == [rows[:2] + rows[4:]]
    (tmp_path / "wandb-id.txt").unlink()
    written(tmp_path, [], 2, cfg)
    written(tmp_path, rows[:1], 0, cfg)  # another run in the same folder
    assert tracked() == [rows[:1], rows[:2] + rows[4:]]


def test_a_lengthened_run_keeps_the_evaluation_of_its_old_last_step(base, tmp_path, monkeypatch):
    """Step 1 has an evaluation only because the shorter run ends there. Later its row has training metrics,
    too, and is sent again."""
    monkeypatch.setattr("log.Tracker", ListTracker)
    cfg = dataclasses.replace(base, algo="grpo", lr_decay="constant", steps=1, eval_every=3, save_every=0,
                              track=("wandb",))
    first, _ = run(cfg, tmp_path)
    rows, _ = run(dataclasses.replace(cfg, steps=2), tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2] and "reward" not in first[1] and "reward" in rows[1]
    assert rows[0] == first[0] and rows[1].items() >= first[1].items()
    assert set(first[1]) - {"step"} == {name for name in rows[1] if name.startswith("eval/")}
    (tracked,) = (tmp_path / "tracked").iterdir()
    assert read_jsonl(tracked) == [*first, rows[1]]


def test_a_server_that_does_not_answer_ends_no_run(wandb, tmp_path):
    nowhere = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40,
               "WANDB_INIT_TIMEOUT": "1"}
    alarms, = run_ranks(1, log_run, tmp_path, learning(2), 0, (), nowhere)
    assert [alarm.split(" failed")[0] for alarm in alarms] == ["--track"]
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize("fails", [False, True])
def test_a_whole_run_is_tracked_by_one_rank_and_closed(fails, wandb, base, tmp_path, monkeypatch):
    """The tracker is closed even if the run fails."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    cfg = dataclasses.replace(base, algo="grpo", steps=1, track=("wandb",), out=str(tmp_path / "r"),
                              max_logp_gap=1e-12 if fails else 0.1)
    messages = run_ranks(1 if fails else 2, ranks.main, cfg)
    assert all(("differ by" in message) == fails for message in messages), messages
    (_, found, tables, _, exits), = run_ranks(1, tracked_by_wandb, tmp_path / "r")
    assert exits == [int(fails)]
    if not fails:
        assert found == read_metrics(tmp_path / "r") and len(found) == 2
        saved = read_jsonl(tmp_path / "r" / "samples" / "step_000000.jsonl")
        assert tables == [[0, *map(r.get, COLUMNS[1:])] for r in saved] and len(saved) == 32


def check_rows(rows, cfg):
    """Compares saved log-probs with those of transformers, and saved advantages with GRPO's formula."""
    tokenizer = load_tokenizer(cfg.model)
    prompts = {p.text: list(p.ids) for p in load_problems(cfg.data, tokenizer, cfg)}
    policy = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    for row in rows[:8]:
        prompt, ids = prompts[row["problem"]], row["ids"]
        assert len(ids) == len(row["logps"]) == row["tokens"]
        assert tokenizer.decode(ids, skip_special_tokens=True).startswith(row["response"])
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1]
        exact = logits.log_softmax(-1)[range(len(ids)), ids]
        assert row["logps"] == pytest.approx(exact.tolist(), abs=1e-4)
        assert all(x == round(x, 4) for x in row["logps"])
    if "advantage" in rows[0]:
        rewards = torch.tensor([row["reward"] for row in rows]).double().view(-1, cfg.samples_per_prompt)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        assert [row["advantage"] for row in rows] == pytest.approx(advantages.flatten().tolist(), abs=1e-6)


def test_all_or_some_samples_are_saved_with_log_probs_or_without(base, tmp_path):
    """--save_samples changes no metric."""
    cfg = dataclasses.replace(base, algo="grpo", prompts_per_step=10, steps=2, eval_every=2, save_every=1,
                              max_response_len=3)
    everything = dataclasses.replace(cfg, save_samples="all", save_logps=True)
    cases = {"all": everything, "some": cfg}
    metrics = {name: run(case, tmp_path / name)[0] for name, case in cases.items()}
    assert maths(metrics["all"]) == maths(metrics["some"])
    alarms = [(row["step"], row["text"]) for row in read_jsonl(tmp_path / "some" / "alarms.jsonl")]
    assert alarms == raised([row for row in metrics["some"] if "reward" in row], cfg) != []
    saved = {name: {file.relative_to(tmp_path / name).as_posix(): read_jsonl(file)
                    for kind in ("samples", "eval") for file in (tmp_path / name / kind).glob("*")}
             for name in cases}
    first, second = "samples/step_000000.jsonl", "samples/step_000001.jsonl"
    evals = dict.fromkeys(["eval/step_000000.jsonl", "eval/step_000002.jsonl"], 10)
    counts = {name: {file: len(rows) for file, rows in files.items()} for name, files in saved.items()}
    assert counts == {"all": {first: 40, second: 40} | evals, "some": {first: 32} | evals}
    assert not {"ids", "logps"} & set(saved["some"][first][0])
    for file in first, "eval/step_000000.jsonl":
        check_rows(saved["all"][file], cfg)
        assert {"advantage" in row for row in saved["all"][file]} == {file == first}
    shutil.copytree(tmp_path / "some/ckpt/step_000001", tmp_path / "more/ckpt/step_000001")
    run(everything, tmp_path / "more")
    assert read_jsonl(tmp_path / "more" / second) == saved["all"][second]


TEXT = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
TABLE = re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", TEXT, re.M)
METRICS = {name: re.sub("<.+?>", "[^/]+", name) for name in TABLE}  # in the table, <…> stands for any name
# Metric -> the settings that a run must have to log it.
ONLY = {"turns": dict(env="FILE.py:respond"), "response_len/sampled": dict(env="FILE.py:respond"),
    **dict.fromkeys(["carried", "staleness/mean", "staleness/max"], dict(round_len=12, carry=0.5)),
    "kl": dict(kl_coef=0.1), "time/ref": dict(kl_coef=0.1), "time/old_logp": dict(policy_updates=2),
    "solved": dict(skip_solved=0.5), "eval/<set>/pass@<k>": dict(eval_samples=(4,)),
    "eval/<set>/maj@<k>": dict(eval_samples=(4,))}
# The test's runs lack these metrics. They need, in order, a GPU, vLLM and a sample with reward 1.
ELSEWHERE = {"mfu", "mem/weights_gb", "response_len/right"}


def test_the_table_is_the_metrics_of_a_run(two_ranks, base, tmp_path):
    """Every metric is in one row of docs/metrics.md."""
    settings = {k: v for only in ONLY.values() for k, v in only.items()}
    settings["env"] = base.reward[0].replace(":digits", ":respond")
    unusual, _ = run(dataclasses.replace(base, steps=1, eval_every=1, **settings), tmp_path / "run")
    usual, special = ({key for row in rows for key in row} for rows in (two_ranks[1], unusual))
    assert len(METRICS) == len(TABLE)
    for key in usual | special:
        assert sum(bool(re.fullmatch(p, key)) for p in METRICS.values()) == 1, f"{key}: not once in the table"
    for name, pattern in METRICS.items():
        in_usual, in_special = (any(re.fullmatch(pattern, key) for key in keys) for keys in (usual, special))
        if name in ONLY:
            assert in_special and not in_usual, f"{name} comes with {ONLY[name]} alone"
        else:
            assert in_usual or name in ELSEWHERE, f"no run has {name}"
