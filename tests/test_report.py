"""Tests of tools/report.py: the report of a run, and the comparison of several runs."""

import csv
import dataclasses
import json
import math
import random
import re
import sys
from html import unescape
from statistics import fmean

import pytest
from matplotlib.figure import Figure
from test_log import METRICS, PPO, healthy, learning, written

from bench import ablations
from configs import run_command
from guard.files import read_jsonl
from guard.messages import UserError
from log import Logger, read_metrics
from tools import report
from tools.report import PANELS, plot, recipes, report_on, story, write_report


def page_of(text: str) -> tuple[set, list, str]:
    """Returns a page's tags, its <pre> texts, and its text without tags."""
    tags = {re.sub('"[^"]*"', '""', tag) for tag in re.findall("<[^>]*>", text)}
    pre = [unescape(re.sub("</?mark>", "", x)) for x in re.findall("<pre>(.*?)</pre>", text, re.DOTALL)]
    return tags, pre, unescape(re.sub("<[^>]*>", "", text))


EVIL = ("</pre></article><script>alert(1)</script><img src=x onerror=alert(1)> &amp; $title \u2028 next \x85 "
        "\"' 7 < 8 \x9b2J")


def sample(prompt_id, sample_id, right, text=EVIL, **more) -> dict:
    return dict(prompt_id=prompt_id, sample_id=sample_id, problem=f"<b>problem</b> {prompt_id}",
                gold=f"gold<{prompt_id}>", response=text, answer="7<8" if right else None,
                reward=float(right), reason="correct" if right else "unparsed", stopped=right, tokens=8,
                **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a run with report.html. The samples contain HTML code."""
    out = tmp_path_factory.mktemp("runs") / "small<run>"
    out.mkdir()
    cfg = dataclasses.replace(PPO, out=str(out), steps=24)
    plan = {"run": {"ranks": 2, "a step": "<i>32 prompts</i>"}}
    logger = Logger(out, cfg, True, 0, {"torch": "2"}, plan)
    for row in healthy(24):
        step = row.pop("step")
        if step % 12 == 0:
            row |= {"eval/aime/avg@1": 0.3 + step / 100, "eval/aime/response_len": 20.0}
            logger.save_samples("samples", step, [
                sample(i // 2, i % 2, i % 2 == 0, f"{step}.{i} {EVIL}",
                       **({"segments": [f"{step}.", f"{i} ", EVIL]} if i else {})) for i in range(4)])
            logger.save_samples("eval", step, [
                sample(i, 0, step > 0, f"eval {step}.{i} {EVIL}", set="aime<x>") for i in range(3)])
        logger.step(step, row)
    logger.alarm("the <b>disk</b> is full", 12)
    logger.step(24, {"eval/aime/avg@1": 0.9})
    logger.close()
    write_report(out)
    return out


def test_a_report_shows_no_responses_of_a_run_that_went_further_before(tmp_path):
    """A run without a checkpoint died after step 36. The run that began again in its folder has 24 steps."""
    logger = Logger(tmp_path, PPO, True, 0, {}, {})
    for step in (0, 24, 36):
        for kind in ("samples", "eval"):
            logger.save_samples(kind, step, [sample(0, 0, True, f"{kind} after {step}", set="aime")])
    for step in (0, 24):
        logger.step(step, {"reward": 0.5, "time/step": 1.0})
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    for step in (0, 24, 36):
        assert (f"samples after {step}" in page) == (f"eval after {step}" in page) == (step < 36)
    assert "step_000024 ✓" in story(tmp_path) and "step_000036" not in story(tmp_path)


def test_the_report_holds_every_text_alarm_and_metric_and_nothing_that_runs_or_loads(folder):
    html = (folder / "report.html").read_text(encoding="utf-8")
    tags, pre, text = page_of(html)
    names = "html title style h1 h2 div table tr td details summary article b br mark pre".split()
    assert tags <= {"<!doctype html>", '<html lang="">', '<meta charset="">', '<meta name="" content="">',
                    '<img alt="" src="">',
                    *(f"<{name}>" for name in names), *(f"</{name}>" for name in names)}
    assert not re.search(r"url\(|@import|https?://", html) and html.count(' src="data:image/png;base64,') == 1
    rows = [r for kind in ("samples", "eval") for f in (folder / kind).iterdir() for r in read_jsonl(f)]
    assert len(rows) == 14 and all(pre.count(r["response"]) == 1 for r in rows)
    assert all(r["problem"] in text and r["gold"] in text for r in rows)
    assert text.count("✓ correct") == text.count("✗ unparsed") == 4 + 3 and "wrong: " not in text
    assert html.count("<mark>3 </mark>") == html.count("<mark>1 </mark>") == 2 and html.count("<mark>") == 6
    assert text.index("Curves") < text.index("Samples of the training") < text.index("Answers to held-out")
    assert re.findall("^(.*) { white-space: pre-wrap", html, re.M) == ["article pre"]  # no other <pre> wraps
    assert all(r["text"] in text for r in read_jsonl(folder / "alarms.jsonl"))
    assert all(key in text for row in read_metrics(folder) for key in row if key != "step")
    assert all(field.name in text for field in dataclasses.fields(PPO))
    assert "small<run>" in text and "<i>32 prompts</i>" in text


def test_of_many_samples_the_report_shows_some_of_each_prompt(tmp_path):
    """A step has 24 wrong and 24 right samples. Of each of 5 steps, the report shows 6 wrong and 6 right."""
    rows = healthy(30)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "samples").mkdir()
    for step in range(30):
        rows = [sample(i, j, j % 2 == 1, f"answer {step} {i} {j}") | {"set": "a"} for i in range(3)
                for j in range(16)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "samples" / f"step_{step:06d}.jsonl").write_text(text)
    write_report(tmp_path)
    _, pre, text = page_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    shown = [response for response in pre if response.startswith("answer")]
    assert "None was raised" in text and shown == [
        f"answer {step} {i} {right + j}" for step in (29, 23, 17, 11, 5) for right in (0, 1)
        for i in range(3) for j in (0, 8)]


def test_the_story_has_accuracy_alarms_and_texts_on_one_line_each(folder, tmp_path, capsys):
    text = story(folder)
    report_on((folder,))
    assert "\x9b" in text and capsys.readouterr().out == text.replace("\x9b", r"\x9b") + "\n"
    assert re.search(r"aime/avg@1 +0.300 → 0.900 \(best 0.900 at step 24\)\n", text)
    assert "problem</b> 2" in text and re.search(r"alarms +1\n", text)
    assert "!! step 12: the <b>disk</b> is full\n" in text
    assert "  step_000000 ✗ eval 0.2 </pre>" in text and "  step_000012 ✓ eval 12.2 </pre>" in text
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/e/avg@1": 0.5}\n')  # the run has only begun
    assert "0.500" in story(tmp_path) and "export/policy" not in story(tmp_path)  # the model comes at the end
    (tmp_path / "export/policy").mkdir(parents=True)
    assert story(tmp_path).endswith(f"\nmodel    {tmp_path}/export/policy")


def test_the_story_shows_three_problems_of_which_each_has_many_responses(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/e/avg@4": 0.5}\n{"step": 12}\n')
    (tmp_path / "eval").mkdir()
    for step in (0, 12):  # the later evaluation has its problems in another order
        numbers = sorted(range(5), key=lambda i: i if step else -i)
        rows = [sample(i, j, False, f"{step} {i}") for i in numbers for j in range(4)]
        lines = "".join(f"{json.dumps(row | {'problem': str(row['prompt_id'])})}\n" for row in rows)
        (tmp_path / "eval" / f"step_{step:06d}.jsonl").write_text(lines)
    shown = re.findall(r"step_\d+ ✗ (\d+ \d)", story(tmp_path))
    assert shown == ["0 4", "12 4", "0 3", "12 3", "0 2", "12 2"]


def test_the_default_metric_is_that_of_the_last_evaluation(tmp_path):
    """A run was continued with another --eval_samples, so its row of step 0 has another metric."""
    rows = [{"step": 0, "reward": 0.5, "eval/e/avg@4": 0.5}, {"step": 2, "reward": 0.8, "eval/e/avg@2": 0.9},
            {"step": 3, "reward": 0.9}]
    report_on(tuple(run_of(tmp_path / str(seed), seed, rows) for seed in range(2)), tmp_path / "t.csv")
    head, row = csv.reader((tmp_path / "t.csv").read_text().splitlines())
    assert (head[2], row[1:3]) == ("eval/e/avg@2", ["2", "0.9000"])


def test_the_length_of_responses_is_no_accuracy(tmp_path, capsys):
    """Also if the name of the held-out set has an @."""
    metrics = {"eval/a@b/avg@2": 0.5, "eval/a@b/response_len": 17.5}
    written(tmp_path, [{"step": 0, "reward": 0.5, **metrics}])
    for text in (capsys.readouterr().out, story(tmp_path)):
        assert re.search(r"a@b/avg@2 +0.500", text) and "response_len" not in text


def test_several_runs_have_their_facts_and_a_row_for_each_recipe(tmp_path, capsys):
    changes = dict(policy_lr=1e-4, algo="grpo", eval_data=("a.jsonl", "b.jsonl"))
    runs = [tmp_path / name for name in ("a" * 60, "b", "c")]
    for i, (run, final) in enumerate(zip(runs, (0.5, 0.5, 0.7), strict=True)):
        rows = healthy(20) if i == 0 else learning(30)
        rows[-1] |= {"eval/e/avg@2": final}
        rows[10] |= {"eval/e/avg@2": 0.75}
        run_of(run, i, rows, **(changes if i else {}))
    (runs[0] / "eval").mkdir()
    (runs[0] / "eval/step_000019.jsonl").write_text("".join(
        json.dumps(sample(i, j, i % 2 if j else i < 2 and name == "e", set=name)) + "\n"
        for name in ("e", "other") for i in range(4) for j in range(2)))
    capsys.readouterr()
    report_on(tuple(runs), tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    warning, _, out = capsys.readouterr().out.partition("\n")
    assert warning == "!! the table compares eval/e/avg@2 of different steps: 19, 29"
    parts = out.split("\n\n")
    assert [part.partition("\n")[0] for part in parts[:3]] == [str(run) for run in runs]
    said = [dict(line.split(maxsplit=1) for line in part.splitlines()[1:]) for part in parts[:3]]
    assert [facts["run"].partition(",")[0] for facts in said] == ["ppo", "grpo", "grpo"]
    assert [facts["eval/e/avg@2"] for facts in said] == [
        f"0.750 → {last} (best 0.750 at step 10)" for last in ("0.500 ± 0.204", "0.500", "0.700")]
    assert [facts["steps"].split()[0] for facts in said] == ["20", "30", "30"]
    assert {facts["alarms"] for facts in said} == {"0"}
    _, first, second = parts[3].splitlines()
    flags = [set(re.findall(r"--(\w+)", line)) for line in (first, second)]
    assert flags[0] == flags[1] == set(changes)


@pytest.mark.parametrize("argv,words", [
    ([], ["no metrics in metrics.jsonl; needed: "]),
    (["/no/such/run"], ["no metrics in /no/such/run", "train.py's --out"]),
    (["EMPTY"], ["no metrics in", "metrics.jsonl"]),
    (["RUN", "--curves"], ["--curves", "tools.report --help"]),
    (["RUN", "RUN", "--out", "/no/such/folder/x.png"], ["/no/such/folder/x.png"]),
    (["RUN", "RUN", "--out", "x.what"], ["what"])])
def test_a_mistake_is_one_line(folder, tmp_path, argv, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words_typed = [str({"EMPTY": tmp_path, "RUN": folder}.get(a, a)) for a in argv]
    monkeypatch.setattr(sys, "argv", ["-", *words_typed])
    with pytest.raises(SystemExit) as e:
        run_command(report_on, "tools.report")
    said = e.value.code
    assert isinstance(said, str) and said.startswith("tools.report: ") and "\n" not in said
    assert all(word in said for word in words), said


def test_a_folder_that_cannot_be_written_is_one_line_and_its_name_is_no_formula(tmp_path):
    run = tmp_path / "$_$"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 0, "reward": 1, "time/step": 1}\n')
    report_on((run,))
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    with pytest.raises(UserError, match="can't write to .*report.html.*; needed: permission"):
        report_on((run,))


def run_of(folder, seed, rows, **changes):
    folder.mkdir(parents=True)
    written(folder, rows, cfg=dataclasses.replace(PPO, seed=seed, out=str(folder), **changes))
    return folder


def test_a_recipe_is_the_runs_that_differ_only_in_seed_and_folder(tmp_path):
    ppo = [run_of(tmp_path / f"ppo-{i}", i, healthy(1)) for i in (10, 11)]
    slow = run_of(tmp_path / "slow", 10, healthy(1), policy_lr=1e-9)
    link = tmp_path / "latest"
    link.symlink_to(ppo[1])
    assert recipes([*ppo, slow, ppo[0], link]) == [ppo, [slow]]
    config = slow / "config.json"  # "versions" has packages, code and data
    config.write_text((ppo[0] / "config.json").read_text().replace('"torch": "2"', '"torch": "3"'))
    assert recipes([*ppo, slow]) == [ppo, [slow]]
    assert "--torch 3" in report.table([*ppo, slow], "reward")[2][0]
    two = run_of(tmp_path / "two", 10, healthy(1), reward=("f.py:score=0.5", "math"))
    assert "--reward f.py:score=0.5 math" in report.table([ppo[0], two], "reward")[2][0]
    bare = [tmp_path / "a", tmp_path / "b"]
    assert recipes(bare) == [[run] for run in bare]


def test_the_band_holds_the_line_of_every_seed_and_their_mean():
    """The line of the mean has a gap where one of the runs has no value."""
    draw = random.Random(0)
    curves = [{step: draw.gauss(0, 1) for step in range(40) if draw.random() < 0.9} for _ in range(3)]
    curves[0][5] = math.nan
    figure = Figure()
    rows = [[{"step": step, "reward": value} for step, value in curve.items()] for curve in curves]
    lines = {"three": report._values(rows, "reward"), "alone": report._values(rows[:1], "reward")}
    report._draw(figure.add_subplot(), lines, "linear")
    three, alone = figure.axes[0].lines
    assert alone.get_ydata().tolist() == pytest.approx(list(curves[0].values()), nan_ok=True)
    means = dict(zip(three.get_xdata(), three.get_ydata(), strict=True))
    assert list(means) == sorted(set().union(*curves))
    band = {(round(x), y) for path in figure.axes[0].collections[0].get_paths() for x, y in path.vertices}
    for step, mean in means.items():
        values = [c[step] for c in curves if step in c and not math.isnan(c[step])]
        assert {(step, min(values)), (step, max(values))} <= band
        assert mean == pytest.approx(fmean(values)) if len(values) == 3 else math.isnan(mean)


def test_panels_have_lines_for_metrics_or_for_recipes(tmp_path, monkeypatch):
    """With one recipe, a panel has a line for each metric. With several recipes, each metric has its own
    panel, with a line for each recipe. No legend covers data."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    names = ("eval/e/avg@1", *(f"eval/{i}_is_a_held_out_set_with_a_long_name/avg@16" for i in range(2)))
    rows = [row | dict.fromkeys(names, 0.0) | {"time/eval": 0.0, "time/wait": 0.0} for row in learning(3)]
    others = [{name: x for name, x in row.items() if name != "time/rollout"} for row in rows]
    runs = [run_of(tmp_path / "run", 0, rows), *(
        run_of(tmp_path / f"{i}_is_a_run_with_a_long_name", i, others, algo="grpo", steps=i)
        for i in range(5))]
    plot(runs[:1], tmp_path / "one.png")
    plot(runs, tmp_path / "all.png")
    one, many = [{axis.get_title(): axis for axis in figure.axes} for figure in drawn]
    accuracy = one["held-out accuracy"].lines
    assert tuple(line.get_label() for line in accuracy) == names and len(one) == 8
    assert len({line.get_linestyle() for line in accuracy}) == 3
    assert f"{runs[0]}: ppo, seed 0, model {PPO.model}" == drawn[0].get_suptitle()
    assert [text.get_text() for text in drawn[1].legends[0].get_texts()] == [
        f"{run}: {'ppo' if run is runs[0] else 'grpo'}, seed {max(0, i)}, model {PPO.model}"
        for i, run in enumerate(runs, -1)]
    assert {len(axis.lines) for axis in many.values()} == {6}
    assert {names[1], "reward", "time/rollout"} <= many.keys() <= rows[0].keys()
    for figure in drawn:
        figure.draw_without_rendering()
        assert len({round(axis.get_window_extent().height) for axis in figure.axes}) == 1
        axes = [axis.get_window_extent() for axis in figure.axes]
        for words in [*figure.legends, *filter(None, (axis.get_legend() for axis in figure.axes))]:
            box = words.get_window_extent()
            assert not box.count_overlaps(axes) and box.y0 >= 0 and box.x1 <= figure.bbox.x1 + 1
    for _, pattern, _ in PANELS:
        assert any(re.fullmatch(pattern, name.replace("<k>", "1")) for name in METRICS), pattern


def test_a_table_has_intervals_and_paired_differences(tmp_path, monkeypatch, capsys):
    """The first recipe has seeds 0 to 4, the second 1 to 5. The intervals are those of bench.ablations, which
    has a printed table of Student's t."""
    monkeypatch.chdir(tmp_path)
    draw, scores, runs = random.Random(0), [{}, {}], []
    for i, clip in enumerate((0.2, 0.28)):
        for seed in range(i, 5 + i):
            scores[i][seed] = draw.random()
            rows = [{"step": 0, "reward": 0.1, "eval/e/avg@2": 0.3}, {"step": 1, "reward": 0.2},
                    {"step": 2, "eval/e/avg@2": scores[i][seed]}]
            runs.append(run_of(tmp_path / f"{i}-{seed}", seed, rows, clip_high=clip))
    for n in range(2, 32):
        values = [draw.gauss(0, 1) for _ in range(n)]
        want = 2.0423 / ablations.T_975[-1] if n == 31 else 1.0  # T_975 ends at 30 values
        assert report.half_interval(values) == pytest.approx(ablations.estimate(values).half * want, rel=5e-4)
    assert math.isnan(report.half_interval([1.0]))
    head, *body = report.table(runs, "eval/e/avg@2")
    assert [row[:2] for row in body] == [["--clip_high 0.2", "5"], ["--clip_high 0.28", "5"]]
    gaps = [scores[1][seed] - scores[0][seed] for seed in range(1, 5)]
    assert body[0][4:] == ["", ""]
    for row, values in zip(body, scores, strict=True):
        for cells, part in ((row[2:4], list(values.values())), (body[1][4:], gaps)):
            found = ablations.estimate(part)
            assert [float(cell) for cell in cells] == pytest.approx([found.mean, found.half], abs=2e-4)
    report_on(tuple(runs), tmp_path / "t.csv")
    printed = capsys.readouterr().out
    assert all(cell in printed for row in (head, *body) for cell in row)
    read = list(csv.reader((tmp_path / "t.csv").read_text().splitlines()))
    assert read == [head, *body]
    report_on(tuple(runs), tmp_path / "t.tex", "reward")
    lines = (tmp_path / "t.tex").read_text().splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrr}" and lines[-1] == r"\end{tabular}"
    assert lines[1] == r"recipe & runs & reward & $\pm$ 95 \% & minus the first & $\pm$ 95 \% \\"
    assert lines[3] == r"-{}-clip\_high 0.28 & 5 & 0.2000 & 0.0000 & 0.0000 & 0.0000 \\"
    rows = [["--system_prompt a\\boxed{}.\n\n~1 & $2^3 #_% <a|b> ---"]]
    report.write_table(rows, tmp_path / "t.tex")
    assert (tmp_path / "t.tex").read_text().splitlines()[1] == (
        r"-{}-system\_prompt a\textbackslash{}boxed\{\}. \textasciitilde{}1 \& \$2\^{}3 \#\_\% "
        r"\textless{}a\textbar{}b\textgreater{} -{}-{}- \\")
    with pytest.raises(UserError, match="has no metric nothing; needed: --metric of"):
        report_on(tuple(runs), tmp_path / "t.tex", "nothing")
    (runs[1] / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/e/avg@2": 1.0}))  # a run in progress
    finished = runs[:1] + runs[2:]
    assert report.table(runs, "eval/e/avg@2") == report.table(finished, "eval/e/avg@2")
    assert f"{runs[1]} has no eval/e/avg@2 at step 2, so the table leaves it out" in capsys.readouterr().out
    table = report.table([runs[1], runs[0]], "eval/e/avg@2")  # one recipe, and its first run is left out
    assert table[1][:3] == [f"{runs[1]} {runs[0]}", "1", f"{scores[0][0]:.4f}"]
    twins = [run_of(tmp_path / str(value), 0, [{"step": 0, "reward": value}]) for value in (0.2, 0.8)]
    assert report.table(twins, "reward")[1][1:3] == ["2", "0.5000"]  # two runs with one seed
