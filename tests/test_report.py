"""What a person reads about a run: the report escapes what models write and holds everything; runs are told
apart; a mistake on the command line is one line."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure
from test_log import PPO, healthy, learning, written

from configs import read_jsonl
from log import Logger, read_metrics
from report import PANELS, _draw_phases, compare, differences, keys_of, main, story, write_report


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
    ([], ["RUN", "python report.py RUN"]),
    (["/no/such/run"], ["no folder /no/such/run", "train.py's --out"]),
    (["EMPTY"], ["no metrics in", "metrics.jsonl"]),
    (["RUN", "EMPTY"], ["no metrics in"]),
    (["RUN", "--curves"], ["--curves", "python report.py RUN"]),
    (["RUN", "RUN", "--out", "/no/such/folder/x.png"], ["/no/such/folder/x.png"]),
    (["RUN", "RUN", "--out", "x.what"], ["what"]),
])
def test_a_mistake_is_one_line(folder, tmp_path, argv, words):
    with pytest.raises(SystemExit) as e:
        main([str({"EMPTY": tmp_path, "RUN": folder}.get(a, a)) for a in argv])
    said = e.value.code
    assert isinstance(said, str) and said.startswith("report.py: ") and "\n" not in said
    assert all(word in said for word in words), said
