"""What a person sees: alarms that begin, and no others; a report that escapes what models write; runs told apart."""

import dataclasses
import io
import json
import re
import sys
from html.parser import HTMLParser

import pytest

import log
from configs import PRESETS
from log import Logger, alarms, begun, compare, differences, main, read_metrics, read_rows, report, story

PPO = PRESETS["tiny-ppo"]


def healthy(steps: int = 60) -> list[dict]:
    """A run like the demo's: reward rises to 0.97, entropy falls and responses grow as the policy becomes sure."""
    rows = []
    for i in range(steps):
        far = 0.6**i  # of the way still to go
        rows.append({
            "step": i, "reward": 0.97 - 0.43 * far, "response_len": 20.5 - 6 * far, "truncated": 0.0,
            "entropy": 0.014 + 0.19 * far, "uniform_groups": 0.85 * (1 - far), "explained_variance": -0.01 - 6 * far,
            "clip_share": 0.02, "ess": 1.0, "logp_gap/mean": 3e-7, "grade/error": 0.0, "grade/timeout": 0.0,
            "time/step": 2.0 + (i % 20 == 0), "time/rollout": 1.0, "time/policy": 1.0})
    return rows


def learning(steps: int = 60) -> list[dict]:
    """A run that is half-way: reward 0.6, entropy 0.3, groups of all kinds."""
    return [r | {"reward": 0.6, "entropy": 0.3, "uniform_groups": 0.3, "explained_variance": 0.3, "response_len": 400.0}
            for r in healthy(steps)]


def raised(rows: list[dict], cfg=PPO) -> list[tuple[int, str]]:
    """(step, text) of every alarm of a run."""
    return [(rows[i]["step"], text) for i in range(len(rows)) for text in begun(rows[:i + 1], cfg)]


WRONG = {  # what goes wrong, within how many steps it is told, and the number and the knob that are named
    "entropy": ({"entropy": 0.02}, 5, ["0.02", "0.3 at", "--policy_lr"]),
    "length": ({"response_len": 40.0, "reward": 0.5}, 5, ["40 tokens", "400", "0.60 to 0.50", "--policy_lr"]),
    "truncated": ({"truncated": 0.9}, 5, ["%", "--max_response_len 48"]),
    "uniform": ({"uniform_groups": 0.95}, 5, ["%", "--samples_per_prompt"]),
    "critic": ({"explained_variance": -0.2}, 10, ["-0.2", "--critic_lr"]),
    "clip": ({"clip_share": 0.5}, 5, ["%", "--policy_updates"]),
    "gap": ({"logp_gap/mean": 0.05}, 5, ["nats", "--max_logp_gap 0.1"]),
    "ess": ({"ess": 0.5}, 5, ["%", "--tis_clip"]),
    "grading": ({"grade/error": 0.1, "grade/timeout": 0.2}, 5, ["%", "--grade_deadline 5"]),
}


def test_a_healthy_run_raises_no_alarm():
    assert raised(healthy()) == [] and raised(learning()) == []
    grpo = [{k: v for k, v in r.items() if k != "explained_variance"} for r in healthy()]
    assert raised(grpo, PRESETS["tiny-grpo"]) == []


@pytest.mark.parametrize("name", WRONG)
def test_an_alarm_is_raised_once_when_its_cause_begins_and_again_only_after_it_had_gone(name):
    bad, within, words = WRONG[name]
    rows = learning(110)
    for i in (*range(40, 60), *range(90, 110)):
        rows[i] |= bad
    said = [step for step, _ in raised(rows)]
    assert len(said) == 2 and all(start <= step < start + within for start, step in zip((40, 90), said, strict=True)), said
    last = alarms(rows[:60], PPO)
    assert list(last) == [name] and all(w in last[name] for w in words) and "\n" not in last[name], last


def test_what_one_step_shows_is_no_alarm():
    for name in WRONG.keys() - {"grading", "gap"}:  # whose limits are a tenth of what they are here
        rows = learning()
        rows[40] |= WRONG[name][0]
        assert raised(rows) == []


def test_an_alarm_that_comes_and_goes_is_raised_once():
    rows = learning()
    for r in rows[20:27] + rows[33:40] + rows[46:]:
        r |= WRONG["ess"][0]
    assert [bool(alarms(rows[:i + 1], PPO)) for i in (26, 32, 39, 45, 52)] == [True, False, True, False, True]
    assert len(raised(rows)) == 1


@pytest.mark.parametrize("name", ["entropy", "length", "uniform", "critic"])
def test_what_convergence_brings_is_no_alarm(name):
    rows = [r | {"reward": 0.95} for r in learning()]
    for r in rows[40:]:
        r |= WRONG[name][0] | {"reward": 0.95}
    assert raised(rows) == []


def written(out, rows, start=0, cfg=PPO) -> Logger:
    """The folder `out` with these metrics logged from step `start` on."""
    logger = Logger(out, cfg, True, start, {"torch": "2"})
    for r in rows:
        logger.step(r["step"], {k: v for k, v in r.items() if k != "step"})
    return logger


def test_a_resumed_run_has_the_alarms_of_one_never_stopped(tmp_path, capsys):
    rows = learning(50)
    for r in rows[15:25] + rows[40:]:
        r |= WRONG["clip"][0] | WRONG["gap"][0]
    (tmp_path / "whole").mkdir()
    whole = written(tmp_path / "whole", rows)
    whole.alarm("a save failed")
    whole.alarm("")
    said = capsys.readouterr().out
    kept = read_rows(tmp_path / "whole" / "alarms.jsonl")
    assert len(kept) == 5 and kept[-1] == {"step": 50, "text": "a save failed"}
    assert all(r["text"] in said for r in kept) and said.count("!! ") == 5
    assert {r["step"] for r in kept[:2]} < set(range(15, 25)) and {r["step"] for r in kept[2:4]} < set(range(40, 50))
    for stop, start in ((44, 43), (30, 16), (50, 20)):  # killed after `stop` steps; `start` of them are in its checkpoint
        out = tmp_path / f"{stop}-{start}"
        out.mkdir()
        written(out, rows[:stop])
        with (out / "alarms.jsonl").open("a") as f:
            f.write('{"step": 3, "te')
        resumed = written(out, rows[start:], start)
        resumed.alarm("a save failed")
        assert (out / "alarms.jsonl").read_text() == (tmp_path / "whole" / "alarms.jsonl").read_text()
        assert read_metrics(out) == read_metrics(tmp_path / "whole")


def test_a_disk_that_is_full_loses_no_step_and_ends_no_run(tmp_path):
    logger = written(tmp_path, learning(2))
    logger.files["alarms"].close()
    logger.files["alarms"] = logger.files["metrics"] = open("/dev/full", "ab", buffering=0)
    logger.step(2, {"reward": 0.5})
    logger.files["metrics"] = (tmp_path / "metrics.jsonl").open("ab", buffering=0)
    logger.step(3, {"reward": 0.5})
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1, 2, 3]


class Page(HTMLParser):
    """The elements, addresses and texts of a page; texts of <pre> apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.addresses, self.handlers, self.pre, self.text, self.inside = set(), [], [], [], "", False
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


EVIL = "</pre></article><script>alert(1)</script><img src=x onerror=alert(1)> &amp; $title \u2028 next \x85 \"' 7 < 8"


def sample(slot, index, right, text=EVIL, **more) -> dict:
    return dict(slot=slot, index=index, problem=f"<b>problem</b> {slot}", gold=f"gold<{slot}>", response=text,
                answer="7<8" if right else None, reward=float(right), reason="correct" if right else "unparsed", stopped=right,
                tokens=8, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small run's folder as Logger writes it: 24 steps, samples of hostile text, one alarm, a plan."""
    out = tmp_path_factory.mktemp("runs") / "small<run>"
    out.mkdir()
    cfg = dataclasses.replace(PPO, out=str(out), steps=24)
    logger = Logger(out, cfg, True, 0, {"torch": "2"})
    logger.plan({"ranks": "2", "a step": "<i>32 prompts</i>"})
    for r in healthy(24):
        step = r.pop("step")
        if step % 12 == 0:
            r |= {"eval/aime/avg@1": 0.3 + step / 100, "eval/aime/response_len": 20.0}
            logger.rows("samples", step, [sample(i // 2, i % 2, i % 2 == 0, f"{step}.{i} {EVIL}") for i in range(4)])
            logger.rows("eval", step, [sample(i, 0, step > 0, f"eval {step}.{i} {EVIL}", set="aime<x>") for i in range(3)])
        logger.step(step, r)
    logger.alarm("the <b>disk</b> is full", 12)
    logger.step(24, {"eval/aime/avg@1": 0.9})
    logger.close()
    return out


def test_the_report_holds_every_text_alarm_and_metric_and_nothing_that_runs_or_loads(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags <= {"html", "meta", "title", "style", "h1", "h2", "h3", "table", "tr", "td", "th", "p", "div", "img",
                         "details", "summary", "small", "article", "b", "pre", "code"}
    assert not page.handlers and all(a.startswith("data:image/png;base64,") for a in page.addresses)
    assert not re.search(r"url\(|@import|https?://", text)
    written = [r for kind in ("samples", "eval") for f in (folder / kind).iterdir() for r in read_rows(f)]
    assert len(written) == 14 and all(page.pre.count(r["response"]) == 1 for r in written)
    assert all(r["problem"] in page.text and r["gold"] in page.text for r in written)
    assert page.text.count("✓ correct") == 4 + 3 and page.text.count("✗ unparsed") == 4 + 3
    assert all(r["text"] in page.text for r in read_rows(folder / "alarms.jsonl"))
    assert all(k in page.text for r in read_metrics(folder) for k in r)
    assert all(f.name in page.text for f in dataclasses.fields(PPO))
    assert "small<run>" in page.text and "<i>32 prompts</i>" in page.text
    assert len(page.addresses) == sum(bool(log.keys_of(read_metrics(folder), p)) for _, p, _ in log.PANELS)


def test_the_story_tells_texts_with_ends_of_lines_of_their_own(folder):
    assert "aime/avg@1    0.300    0.900" in story(folder) and "problem</b> 2" in story(folder)
    assert "1\n  step 12: the <b>disk</b> is full" in story(folder)


def test_a_run_that_only_began_has_a_report(tmp_path):
    """One step; a folder of which only metrics.jsonl is left."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps(healthy(1)[0]) + "\n")
    assert "None was raised" in report(tmp_path).read_text(encoding="utf-8")


def test_two_runs_differ_in_just_the_fields_in_which_they_differ(tmp_path):
    changes = dict(policy_lr=1e-4, algo="grpo", eval_data=("a.jsonl", "b.jsonl"))
    for name, cfg, rows in (("a", PPO, healthy(20)), ("b", dataclasses.replace(PPO, **changes), learning(30))):
        (tmp_path / name).mkdir()
        rows[-1] |= {"eval/e/avg@1": 0.5}
        rows[10] |= {"eval/e/avg@1": 0.75}
        written(tmp_path / name, rows, cfg=dataclasses.replace(cfg, out=str(tmp_path / name)))
    runs = [tmp_path / "a", tmp_path / "b"]
    found = differences(runs)
    assert set(found) == set(changes) and found["algo"] == ['"ppo"', '"grpo"']
    assert differences([runs[0], runs[0]]) == {}
    cells = {cells[0]: cells[1:] for cells in (re.split(" {2,}", line) for line in compare(runs).splitlines())}
    assert cells[""] == ["a", "b"] and cells["eval/e/avg@1, last"] == ["0.500", "0.500"]
    assert cells["eval/e/avg@1, best"] == ["0.750 at step 10", "0.750 at step 10"]
    assert cells["steps"] == ["20", "30"] and cells["steps to reward 0.9"] == ["4", "–"]
    assert cells["seconds a step (median)"] == ["2.00", "2.00"]
    main([*map(str, runs), "--out", str(tmp_path / "both.png")])
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("argv,words", [
    ([], ["no run given", "python log.py RUN"]),
    (["/no/such/run"], ["no folder /no/such/run", "train.py's --out"]),
    (["EMPTY"], ["no metrics in", "metrics.jsonl"]),
    (["RUN", "EMPTY"], ["no metrics in"]),
    (["RUN", "--curves"], ["--curves", "python log.py RUN"]),
    (["RUN", "RUN", "--out", "/no/such/folder/x.png"], ["/no/such/folder/x.png"]),
    (["RUN", "RUN", "--out", "x.what"], ["what"]),
])
def test_a_mistake_is_one_line(folder, tmp_path, argv, words):
    with pytest.raises(SystemExit) as e:
        main([str({"EMPTY": tmp_path, "RUN": folder}.get(a, a)) for a in argv])
    assert isinstance(e.value.code, str) and e.value.code.startswith("log.py: ") and "\n" not in e.value.code
    assert all(w in e.value.code for w in words), e.value.code


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bars_are_nested_on_a_terminal_and_nothing_elsewhere(tmp_path, monkeypatch, capsys):
    def step():
        logger = written(tmp_path, learning(2))
        with logger.bar("Actor Train epoch [1/1]", 3) as bar:
            bar.update(3)
            bar.refresh()
        logger.steps.refresh()
        logger.steps.close()

    step()
    said = capsys.readouterr()
    assert said.err == "" and [line.split("/")[0] for line in said.out.splitlines()] == ["step  0", "step  1"]
    monkeypatch.setattr(sys, "stderr", Terminal())
    step()
    assert "Actor Train epoch [1/1]: 100%" in sys.stderr.getvalue() and "2/24" in sys.stderr.getvalue()
    assert re.search(r"\n\rActor Train", sys.stderr.getvalue())  # a line below


def test_every_metric_of_a_run_has_its_meaning_in_the_readme():
    named = """reward response_len truncated uniform_groups tokens grade/correct grade/timeout values returns value_loss entropy
        grad_norm/critic lr/critic skipped_updates logp_gap/mean logp_gap/p99 logp_gap/max tis/mean policy_loss clip_share kl
        grad_norm/policy lr/policy explained_variance ess time/rollout time/step tokens_per_s mfu mem/host_peak_gb
        mem/device_peak_gb eval/aime/avg@16 eval/aime/pass@16 eval/aime/response_len eval/aime/truncated""".split()
    for key in named:
        assert any(re.search(f"(^|/){p}$", key) and text for p, text in log.glossary().items()), key
