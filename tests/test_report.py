"""What a person reads about a run: the report escapes what models write and holds everything; runs are told
apart; a mistake on the command line is one line."""

import dataclasses
import json
import math
import os
import random
import re
import signal
import threading
import time
from html.parser import HTMLParser
from statistics import fmean

import pytest
from matplotlib.figure import Figure
from test_log import PPO, healthy, learning, written

from configs import read_jsonl
from log import METRICS, Logger, read_metrics
from tools import report
from tools.report import PANELS, _draw_phases, compare, differences, keys_of, main, story, write_report


class Page(HTMLParser):
    """The elements, addresses, event handlers and texts of a page; the texts of <pre> also one by one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.addresses, self.handlers, self.pre = set(), [], [], []
        self.text, self.inside = "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [v for k, v in attrs if k in ("src", "href", "srcset", "action")]
        self.handlers += [k for k, _ in attrs if k.startswith("on")]
        if tag == "pre":
            self.inside = True
            self.pre.append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "pre"

    def handle_data(self, data):
        self.text += data
        if self.inside:
            self.pre[-1] += data


EVIL = ("</pre></article><script>alert(1)</script><img src=x onerror=alert(1)> &amp; $title \u2028 next \x85 "
        "\"' 7 < 8")


def sample(prompt_id, sample_id, right, text=EVIL, **more) -> dict:
    """A row of samples/ or eval/."""
    return dict(prompt_id=prompt_id, sample_id=sample_id, problem=f"<b>problem</b> {prompt_id}",
                gold=f"gold<{prompt_id}>", response=text, answer="7<8" if right else None,
                reward=float(right), reason="correct" if right else "unparsed", stopped=right, tokens=8,
                **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small run's folder as Logger writes it: 24 steps, samples of hostile text, one alarm, a plan."""
    out = tmp_path_factory.mktemp("runs") / "small<run>"
    out.mkdir()
    cfg = dataclasses.replace(PPO, out=str(out), steps=24)
    logger = Logger(out, cfg, True, 0, {"torch": "2"})
    logger.save_plan({"ranks": "2", "a step": "<i>32 prompts</i>"})
    for row in healthy(24):
        step = row.pop("step")
        if step % 12 == 0:
            row |= {"eval/aime/avg@1": 0.3 + step / 100, "eval/aime/response_len": 20.0}
            logger.rows("samples", step,
                        [sample(i // 2, i % 2, i % 2 == 0, f"{step}.{i} {EVIL}") for i in range(4)])
            logger.rows("eval", step,
                        [sample(i, 0, step > 0, f"eval {step}.{i} {EVIL}", set="aime<x>") for i in range(3)])
        logger.step(step, row)
    logger.alarm("the <b>disk</b> is full", 12)
    logger.step(24, {"eval/aime/avg@1": 0.9})
    logger.close()
    write_report(out)
    return out


def test_the_report_holds_every_text_alarm_and_metric_and_nothing_that_runs_or_loads(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags <= {
        "html", "meta", "title", "style", "h1", "h2", "h3", "table", "tr", "td", "th", "p", "div", "img",
        "details", "summary", "small", "article", "b", "pre", "code"}
    assert not page.handlers
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.search(r"url\(|@import|https?://", text)
    rows = [r for kind in ("samples", "eval") for f in (folder / kind).iterdir() for r in read_jsonl(f)]
    assert len(rows) == 14 and all(page.pre.count(r["response"]) == 1 for r in rows)
    assert all(r["problem"] in page.text and r["gold"] in page.text for r in rows)
    assert page.text.count("right: correct") == page.text.count("wrong: unparsed") == 4 + 3
    assert all(r["text"] in page.text for r in read_jsonl(folder / "alarms.jsonl"))
    metrics = read_metrics(folder)
    assert all(key in page.text for row in metrics for key in row)
    assert all(field.name in page.text for field in dataclasses.fields(PPO))
    assert "small<run>" in page.text and "<i>32 prompts</i>" in page.text
    assert len(page.addresses) == sum(bool(keys_of(metrics, pattern)) for _, pattern, _, _ in PANELS) > 5


def test_of_many_samples_the_report_shows_each_prompts_first_right_and_first_wrong_one(folder, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(healthy(1)[0]) + "\n")
    (tmp_path / "samples").mkdir()
    for step in range(30):
        rows = [sample(i, j, j % 2 == 1, f"answer {step} {i} {j}") for i in range(3) for j in range(16)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "samples" / f"step_{step:06d}.jsonl").write_text(text)
    shown = [text for text in Page(write_report(tmp_path).read_text()).pre if text.startswith("answer")]
    steps = sorted({int(text.split()[1]) for text in shown})
    assert len(steps) <= 6 and steps[0] == 0 and steps[-1] == 29
    assert sorted(shown) == sorted(f"answer {s} {i} {j}" for s in steps for i in range(3) for j in range(2))


def test_the_story_has_accuracy_alarms_and_texts_on_one_line_each(folder):
    text = story(folder)
    assert re.search(r"aime/avg@1 +0.300 → 0.900 \(best 0.900 at step 24\)\n", text)
    assert "problem</b> 2" in text and re.search(r"alarms +1\n", text)
    assert "!! step 12: the <b>disk</b> is full\n" in text
    assert "  base    ✗ eval 0.2 </pre>" in text and "  trained ✓ eval 12.2 </pre>" in text


def test_the_seconds_of_a_step_are_its_phases_stacked():
    """Also a phase that some steps lack. The row after the last step, which has only an evaluation, is left
    out."""
    rows = [{"step": 0, "time/a": 1.0, "time/b": 2.0, "time/step": 3.0},
            {"step": 1, "time/a": 4.0, "time/step": 4.0}, {"step": 2, "eval/e/avg@1": 0.5}]
    axis = Figure().add_subplot()
    _draw_phases(axis, rows, ["time/a", "time/b"])
    assert axis.get_legend_handles_labels()[1] == ["a", "b"]
    tops = [area.get_datalim(axis.transData).extents.tolist() for area in axis.collections]
    assert tops == [[0, 0, 1, 4], [0, 1, 1, 4]]


def test_a_run_that_only_began_has_a_report(tmp_path):
    """One step; a folder of which only metrics.jsonl is left."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps(healthy(1)[0]) + "\n")
    assert "None was raised" in write_report(tmp_path).read_text(encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/e/avg@1": 0.5}) + "\n")
    assert "0.500" in write_report(tmp_path).read_text(encoding="utf-8") and "0.500" in story(tmp_path)


def test_two_runs_differ_in_just_the_fields_in_which_they_differ(tmp_path):
    changes = dict(policy_lr=1e-4, algo="grpo", eval_data=("a.jsonl", "b.jsonl"))
    both = (("a", PPO, healthy(20)), ("b", dataclasses.replace(PPO, **changes), learning(30)))
    for name, cfg, rows in both:
        (tmp_path / name).mkdir()
        rows[-1] |= {"eval/e/avg@1": 0.5}
        rows[10] |= {"eval/e/avg@1": 0.75}
        written(tmp_path / name, rows, cfg=dataclasses.replace(cfg, out=str(tmp_path / name)))
    runs = [tmp_path / "a", tmp_path / "b"]
    found = differences(runs)
    assert set(found) == set(changes) and found["algo"] == ["ppo", "grpo"]
    assert differences([runs[0], runs[0]]) == {}
    lines = [re.split(" {2,}", line) for line in compare(runs).splitlines()]
    cells = {line[0]: line[1:] for line in lines}
    assert cells[""] == [str(run) for run in runs]
    assert cells["eval/e/avg@1"] == ["0.750 → 0.500 (best 0.750 at step 10)"] * 2
    assert [text.split()[0] for text in cells["steps"]] == ["20", "30"]
    assert cells["step of first reward 0.9"] == ["4", "–"]
    assert cells["seconds a step (median)"] == ["2.00", "2.00"] and cells["alarms"] == ["0", "0"]
    main([*map(str, runs), "--out", str(tmp_path / "both.png")])
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("argv,words", [
    ([], ["RUN", "python -m tools.report RUN"]),
    (["/no/such/run"], ["no folder /no/such/run", "train.py's --out"]),
    (["EMPTY"], ["no metrics in", "metrics.jsonl"]),
    (["RUN", "EMPTY"], ["no metrics in"]),
    (["RUN", "--curves"], ["--curves", "python -m tools.report RUN"]),
    (["RUN", "RUN", "--out", "/no/such/folder/x.png"], ["/no/such/folder/x.png"]),
    (["RUN", "RUN", "--out", "x.what"], ["what"]),
    (["RUN", "RUN", "--out", "/no/such/folder/x.html"], ["/no/such/folder/x.html"]),
    (["RUN", "RUN", "--watch"], ["--watch 10 with 2 runs", "one run"]),
    (["RUN", "--watch", "0"], ["--watch 0", "over 0"]),
    (["RUN", "--watch", "soon"], ["soon", "--watch SECONDS"]),
])
def test_a_mistake_is_one_line(folder, tmp_path, argv, words):
    with pytest.raises(SystemExit) as e:
        main([str({"EMPTY": tmp_path, "RUN": folder}.get(a, a)) for a in argv])
    said = e.value.code
    assert isinstance(said, str) and said.startswith("tools.report: ") and "\n" not in said
    assert all(word in said for word in words), said


# --- several seeds of one recipe


def run_of(folder, seed, rows, **changes):
    """A run's folder with these metrics and the configuration PPO, changed."""
    folder.mkdir(parents=True)
    written(folder, rows, cfg=dataclasses.replace(PPO, seed=seed, out=str(folder), **changes))
    return folder


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Two seeds of one recipe, the second shorter, with reward 0.97 at the end, and a run of another."""
    out = tmp_path_factory.mktemp("seeds")
    noisy = [row | {"reward": row["reward"] - 0.1 * (row["step"] % 2)} for row in healthy(8)]
    return [run_of(out / "ppo-10", 10, healthy(10)), run_of(out / "ppo-11", 11, noisy),
            run_of(out / "slow", 10, learning(10), policy_lr=1e-9)]


def test_a_recipe_is_the_runs_that_differ_only_in_seed_and_folder(seeds, tmp_path):
    """The same run given twice counts once. Without config.json nothing is known to be the same. Recipes
    whose folders have the same name keep apart."""
    assert report.recipes([*seeds, seeds[0]]) == {"ppo": seeds[:2], "slow": seeds[2:]}
    bare = [tmp_path / "a", tmp_path / "b"]
    assert list(report.recipes(bare).values()) == [[run] for run in bare]
    again = run_of(tmp_path / "slow", 10, healthy(1), policy_lr=1.0)
    assert list(report.recipes([*seeds, again]).values()) == [seeds[:2], seeds[2:], [again]]
    own = [run_of(tmp_path / str(i), i, healthy(i), model="Qwen/Qwen2.5-0.5B", data=(f"base-{i}/d.jsonl",))
           for i in (0, 1)]
    assert list(report.recipes(own).values()) == [own]  # each seed has its own base model
    same = [run_of(tmp_path / f"same-{i}", i, healthy(i), model="runs/base-0") for i in (0, 1, 2)]
    assert list(report.recipes(same).values()) == [same]  # one base model, with the number of a seed


def test_the_band_holds_the_line_of_every_seed_and_their_mean():
    """At every step that a run has. The mean is drawn where all have one."""
    draw = random.Random(0)
    curves = [{step: draw.gauss(0, 1) for step in range(40) if draw.random() < 0.9} for _ in range(3)]
    curves[0][5] = math.nan
    found = {step: (low, mean, high) for step, low, mean, high in report.band(curves)}
    assert list(found) == sorted(set().union(*curves))
    for step, (low, mean, high) in found.items():
        values = [c[step] for c in curves if step in c and not math.isnan(c[step])]
        assert low == min(values) and high == max(values)
        assert mean == pytest.approx(fmean(values)) if len(values) == 3 else math.isnan(mean)
    axis, (one, two) = Figure().add_subplot(), (healthy(30), learning(30))
    report._draw(axis, {"both": [one, two], "alone": [one]}, ["reward"], "share")
    assert [line.get_label() for line in axis.lines] == ["both", "alone"]
    area = [shape for shape in axis.collections if len(shape.get_paths())]
    assert len(area) == 1  # a run alone has no band
    drawn = {}
    for x, y in area[0].get_paths()[0].vertices:
        drawn.setdefault(round(x), []).append(y)
    for a, b in zip(one, two, strict=True):
        assert {a["reward"], b["reward"]} <= set(drawn[a["step"]])


def test_the_page_of_a_comparison_has_a_row_for_each_recipe(seeds, capsys):
    out = seeds[0].parent / "compare.html"
    main([*map(str, seeds), "--out", str(out)])
    text = out.read_text(encoding="utf-8")
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)(?=<tr>|</table>)", text)]
    final = [fmean(row["reward"] for row in read_metrics(run)[-5:]) for run in seeds]
    ppo, slow = rows[1:3]
    assert ppo[0] == "ppo<small>seed 10, 11</small>" and slow[0] == "slow<small>seed 10</small>"
    assert ppo[1] == f"{fmean(final[:2]):.3g}<small>{final[1]:.3g} to {final[0]:.3g}</small>"
    assert slow[1] == "0.6" and slow[4] == "–"  # it never had 0.9 of the best reward
    best = max(row["reward"] for row in read_metrics(seeds[0]))
    first = [next(r["step"] for r in read_metrics(run) if r["reward"] >= 0.9 * best) for run in seeds[:2]]
    assert ppo[4] == f"{fmean(first):.3g}<small>{min(first)} to {max(first)}</small>"
    assert ["--policy_lr", str(PPO.policy_lr), "1e-09"] in rows
    assert len(Page(text).addresses) == sum(bool(keys_of(healthy(1), several)) for _, _, several, _ in PANELS)
    assert str(out) in capsys.readouterr().out


# --- panels


def test_no_p99_is_drawn_below_its_mean_and_the_panel_says_so():
    """Where under 1 % of the tokens differ, the p99 is the histogram's first edge, and the mean is not."""
    def drawn(p99):
        rows = [{"step": i, "logp_gap/mean": 4e-9, "logp_gap/p99": x} for i, x in enumerate(p99)]
        axis = Figure().add_subplot(xlabel="step")
        report._draw(axis, {"": [rows]}, ["logp_gap/mean", "logp_gap/p99"], "log")
        return axis.get_xlabel(), axis.lines[1].get_ydata()

    note, values = drawn([1e-7, 1e-9, 1e-6])
    assert "p99" in note and values[0] == 1e-7 and math.isnan(values[1]) and values[2] == 1e-6
    assert drawn([1e-7, 1e-8])[0] == "step"


@pytest.mark.parametrize("lowest, says", [(-6.1, True), (-0.9, False)])
def test_an_axis_says_what_it_cuts_off(lowest, says):
    axis = Figure().add_subplot(xlabel="step")
    rows = [{"step": 0, "explained_variance": lowest}, {"step": 1, "explained_variance": 0.5}]
    report._draw(axis, {"": [rows]}, ["explained_variance"], "variance")
    assert (axis.get_ylim()[0] > lowest) == says == ("cut off" in axis.get_xlabel())
    assert (str(lowest) in axis.get_xlabel()) == says


def test_each_phase_has_its_own_colour_in_every_run():
    phases = [name for name in re.findall(r"^time/(\w+)", METRICS, re.M) if name != "step"]
    assert set(phases) == set(report.PHASES) and len(set(report.PHASES.values())) == len(phases) > 10

    def colours(names):
        axis = Figure().add_subplot()
        _draw_phases(axis, [{"step": i, "time/step": 1.0} for i in range(2)], [f"time/{n}" for n in names])
        return dict(zip(names, (area.get_facecolor().tolist() for area in axis.collections), strict=True))

    everything, few = colours(phases), colours(phases[3::4])
    assert few == {name: everything[name] for name in few}
    assert len({tuple(*colour) for colour in everything.values()}) == len(phases)


def test_no_legend_covers_data_and_no_word_is_cut():
    """Also of all phases, and of six recipes with three held-out sets and long names."""
    phases = [f"time/{name}" for name in report.PHASES]
    sets = [f"eval/{i}_is_a_held_out_set_with_quite_a_long_name_in_this_test/avg@16" for i in range(3)]
    rows = [{"step": i, "time/step": 14.0} | dict.fromkeys([*phases, *sets], 1.0) for i in range(3)]
    six = {f"{i} is a recipe with a very long name: /home/me/runs/{i} ({i} runs)": [rows] for i in range(6)}
    for figure in (report._figure({"": [rows]}, "seconds a step", phases, "stacked", True),
                   report._figure({"": [rows]}, "held-out accuracy", sets, "share", False),
                   report._figure(six, "held-out accuracy", sets, "share", False)):
        figure.draw_without_rendering()
        (axis,), (legend,) = figure.axes, figure.legends
        assert not legend.get_window_extent().overlaps(axis.get_window_extent())
        inside = figure.bbox.padded(1)
        for box in (legend.get_window_extent(), axis.get_tightbbox()):
            assert inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
        assert axis.get_window_extent().height > 0.25 * figure.bbox.height


def test_lengths_of_right_and_wrong_reflections_and_speed_are_drawn():
    drawn = {key for _, pattern, _, _ in PANELS for key in re.findall(r"^([\w/]+) \|", METRICS, re.M)
             if re.fullmatch(pattern, key)}
    assert drawn >= {"response_len/right", "response_len/wrong", "reflections", "tokens_per_s"}


# --- the page


def test_the_page_begins_with_samples_and_folds_the_plan(folder):
    """Title, one line, samples, curves. The newest step is open and comes first."""
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert re.search(r"<h1>small&lt;run&gt;</h1>\n<p>ppo, seed 0 · 24 of 24 [^\n]+ · reward 0.540 → 0.970"
                     r"[^\n]*alarms: 1</p>\n<h2>Samples", text)
    at = [text.index(part) for part in (
        "<h1>", '<details name="step" open><summary>step 12<', "12.0 &lt;/pre&gt;",
        '<details name="step"><summary>step 0<', "<img ", "<summary>Plan<", "&lt;i&gt;32 prompts")]
    assert at == sorted(at)


def test_the_page_has_no_fixed_width_and_follows_the_systems_colours(folder):
    style = re.search("<style>(.*?)</style>", (folder / "report.html").read_text(encoding="utf-8"), re.S)[1]
    assert not re.findall(r"(?<![-\w])(?:min-)?width: *\d+px", style)
    assert "nowrap" not in re.sub(r"code \{.*?\}", "", style)
    assert "color-scheme: light dark" in style and "prefers-color-scheme: dark) { img" in style
    names = re.findall(r"(--\w+): light-dark\(#\w+, #\w+\)", style)
    assert set(names) == set(re.findall(r"var\((--\w+)\)", style)) and len(names) > 5
    assert not re.findall(r"(?<!-left-)(?:color|background): #", style)  # all but the marks of samples


def test_tokens_are_shaded_by_their_log_prob_and_stay_text(tmp_path):
    """Only where a row has the tokens' texts. An advantage is shown where there is one."""
    texts = ["<script>", "alert(1)", "</script>", "&amp;"]
    logp = [0.0, -0.2, -1.0, -9.0]
    rows = [sample(0, 0, True, "".join(texts), advantage=-0.51234, logps=logp, texts=texts),
            sample(0, 1, False, "no texts <i>", logp=[-1.0]), sample(1, 0, True, "plain", advantage=None)]
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/step_000000.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(healthy(1)[0]) + "\n")
    text = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags and {r["response"] for r in rows} <= set(page.pre)
    shades = [float(x) for x in re.findall(r"<span [^>]*/ ([\d.]+)\)", text)]
    assert shades == sorted(set(shades)) and len(shades) == 4 and 0 <= shades[0] and shades[-1] <= 1
    assert page.text.count("advantage") == 1 and "advantage -0.512" in page.text


@pytest.mark.parametrize("end", ["lock", "ctrl-C"])
def test_watching_reloads_the_page_until_the_run_ends(tmp_path, capsys, end):
    """Or until ctrl-C. A run that has logged nothing yet is waited for."""
    lock, page, seen = tmp_path / "lock", tmp_path / "report.html", []
    lock.touch()

    def run():
        time.sleep(0.2)
        (tmp_path / "metrics.jsonl").write_text(json.dumps(healthy(1)[0]) + "\n")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not page.exists():
            time.sleep(0.02)
        seen.append(page.read_text())  # a whole page, at whatever moment it is read
        if end == "lock":
            lock.unlink()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        main([str(tmp_path), "--watch", "0.1"])
    except KeyboardInterrupt:
        pytest.fail("ctrl-C has a traceback")
    thread.join()
    again = '<meta http-equiv="refresh" content="1">'
    assert again in seen[0] and again not in page.read_text()
    assert seen[0].endswith("</html>\n") and page.read_text().endswith("</html>\n")
    assert {path.name for path in tmp_path.iterdir()} <= {"lock", "metrics.jsonl", "report.html", "plot.png"}
    assert f"report   {tmp_path}/report.html" in capsys.readouterr().out
