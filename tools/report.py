"""Reports on runs: plots of their curves, a summary as text, and an HTML page.

    python -m tools.report RUN                             # RUN/plot.png, RUN/report.html and a summary
    python -m tools.report RUN RUN2 … --out compare.png    # several runs side by side, as text and as curves

Runs that differ only in their seed belong to one recipe. A plot of a recipe has a line for the mean of the
runs, and a band from the lowest to the highest run. The command works during a run and after a crash, because
it reads only the files of the run's folder.
"""

import argparse
import base64
import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from string import Template

import numpy as np

from configs import UserError, read_jsonl, require, shorten, show, user_errors
from log import NAN, read_metrics
from tools.plan import as_text


def _keys_of(rows, pattern):
    """Returns the names of the metrics in `rows` that match the regular expression `pattern`."""
    return [name for name in dict.fromkeys(chain(*rows)) if re.fullmatch(pattern, name)]


def _curve(rows, key):
    """Returns the curve of the metric `key`: step -> value."""
    return {row["step"]: row[key] for row in rows if key in row}


def _read_json(path):
    """Returns the content of a JSON file; {} if the file does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def recipes(runs: Iterable[Path]) -> dict[str, list[Path]]:
    """Returns name of a recipe -> its runs. A recipe is a group of runs whose config.json files differ only
    in `seed` and `out`. A run without config.json is a recipe of its own."""
    groups = {}
    for run in dict.fromkeys(runs):
        config = _read_json(run / "config.json") or {"run": str(run)}
        same = json.dumps({field: value for field, value in config.items() if field not in ("seed", "out")})
        groups.setdefault(same, []).append(run)
    return {f"{group[0]} ({len(group)} seeds)" if len(group) > 1 else str(group[0]): group
            for group in groups.values()}


# --- curves

# The panels of a plot. Columns: title of the panel; regular expression for the metrics; scale of the axis
# ("share" includes 0 and 1, "variance" ends at -1 and 1). A plot of one recipe has a line for each metric. A
# plot of several recipes has a panel for each metric, with a line for each recipe.
PANELS = [re.split("  +", row) for row in r"""
reward                                reward                               share
held-out accuracy                     eval/.+/avg@\d+                      share
response length (tokens)              response_len(/right|/wrong)?         linear
shares                                truncated|uniform_groups|clip_share  share
entropy (nats a token)                entropy                              linear
gradient norm                         grad_norm/.+                         log
|engine − trainer| log-prob (nats)    logp_gap/(mean|max)                  log
critic: explained variance (≥ −1)     explained_variance                   variance
reflections (a response)              reflections                          share
tokens a second                       tokens_per_s                         linear
seconds a step        time/(step|rollout|critic|policy|eval|wait|sync)     linear
""".strip().splitlines()]


def _draw(figure, title, lines, scale):
    """Draw a panel of a plot. lines: label of a line -> the curves (step -> value) of its runs. scale: a word
    of PANELS. A line shows the mean of the runs, at the steps where all runs have a value. A band shows the
    range from the lowest to the highest run."""
    axis = figure.add_subplot(xlabel="step")
    for label, curves in lines.items():
        steps = sorted(set(chain(*curves)))
        values = np.array([[curve.get(step, NAN) for step in steps] for curve in curves])
        line, = axis.plot(steps, values.mean(0), ".-", markersize=4, label=shorten(label, 48))
        axis.fill_between(steps, np.fmin.reduce(values), np.fmax.reduce(values), color=line.get_color(),
                          alpha=0.2, linewidth=0)
    if scale == "log":
        axis.set_yscale("log")
    elif scale == "variance":  # cuts off the values of a new critic, which are far below -1
        axis.set_ylim(-1.02, 1.02)
    elif scale == "share":
        axis.axhspan(0, 1, alpha=0)  # an invisible area, so that the axis includes 0 and 1
    figure.suptitle(title, fontsize=12)
    if len(lines) > 1:
        figure.legend(loc="outside lower center", fontsize=9, frameon=False)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)


def plot(runs: Sequence[Path], to: Path) -> None:
    """Draw the curves of the runs and write the picture to the file `to`. Raises OSError if the file can't be
    written, and ValueError for an unknown type of picture."""
    from matplotlib.figure import Figure

    data = {name: [read_metrics(run) for run in group] for name, group in recipes(runs).items()}
    every_row, panels = list(chain(*chain(*data.values()))), []
    for title, pattern, scale in PANELS:
        keys = _keys_of(every_row, pattern)
        if len(data) == 1:
            lines = {key: [_curve(rows, key) for rows in chain(*data.values())] for key in keys}
            panels += [(title, lines, scale)] if lines else []
        else:
            panels += [(key, {name: [_curve(rows, key) for rows in group] for name, group in data.items()},
                        scale) for key in keys]
    height = max(1, math.ceil(len(panels) / 3))
    figure = Figure(figsize=(13.2, 3.6 * height), dpi=130, layout="constrained")
    for part, panel in zip(figure.subfigures(height, 3).flat, panels, strict=False):
        _draw(part, *panel)
    figure.savefig(to)


# --- text


def facts(run: Path) -> dict[str, str]:
    """Returns the summary of a run, name -> text: algorithm, model, steps, seconds, number of alarms, and the
    first, last and best value of the reward and of the metrics of the held-out problems."""
    rows, config = read_metrics(run), _read_json(run / "config.json")
    seconds = _curve(rows, "time/step").values()
    found = {
        "algorithm": f"{config.get('algo', '–')}, seed {config.get('seed', '–')}",
        "model": f"{config.get('model', '–')}",
        "steps": f"{len(seconds)} of {config.get('steps', '–')} in {sum(seconds) / 60:.1f} minutes",
        "alarms": f"{len(read_jsonl(run / 'alarms.jsonl'))}"}
    for key in _keys_of(rows, "reward|eval/.+@.+"):
        curve = _curve(rows, key)
        best = max(curve, key=curve.get)
        values = list(curve.values())
        found[key] = f"{values[0]:.3f} → {values[-1]:.3f} (best {curve[best]:.3f} at step {best})"
    return found


def compare(runs: Sequence[Path]) -> str:
    """Returns a table as text, with a column for each run. The lines are the `facts` of the runs and the
    flags in which the runs differ."""
    columns = [{"": str(run)} | facts(run) for run in runs]
    configs = [_read_json(run / "config.json") for run in runs]
    for field in dict.fromkeys(chain(*configs)):
        values = [str(config.get(field, "–")) for config in configs]
        if field != "out" and len(set(values)) > 1:
            for column, value in zip(columns, values, strict=True):
                column[f"--{field}"] = value
    table = [[field, *(column.get(field, "–") for column in columns)]
             for field in dict.fromkeys(chain(*columns))]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def story(run: Path) -> str:
    """Returns the summary of a run as text: its settings and results (`compare`), three held-out problems
    with responses of the base model and of the trained model, the last five alarms, and the paths of the
    run's files."""
    lines = [compare([run])]
    files = sorted((run / "eval").glob("step_*.jsonl"))
    if len(files) > 1:
        for base, trained in zip(read_jsonl(files[0])[:3], read_jsonl(files[-1]), strict=False):
            lines.append(f"\n{shorten(base['problem'])}  (answer {base['gold']})")
            for name, row in ("base   ", base), ("trained", trained):
                lines.append(f"  {name} {'✓' if row['reward'] >= 1 else '✗'} {shorten(row['response'])}")
    for alarm in read_jsonl(run / "alarms.jsonl")[-5:]:
        lines.append(f"\n!! step {alarm['step']}: {alarm['text']}")
    return "\n".join(lines) + f"""

report   {run}/report.html
plot     {run}/plot.png
metrics  {run}/metrics.jsonl  (tensorboard --logdir {run}/tb)
model    {run}/export/policy"""


# --- the HTML page

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<title>$title</title>
<style>
body { font: 15px sans-serif; max-width: 1200px; margin: auto } img { width: 100% }
pre, td { white-space: pre-wrap; overflow-wrap: anywhere; vertical-align: top }
pre { background: #f4f4f4; max-height: 24em; overflow-y: auto }
</style>
<h1>$title</h1>"""
SAMPLE = """<article><b>$graded: $reason</b>, answer $answer, reward $reward, $tokens tokens
Gold answer $gold: $problem<pre>$response</pre></article>"""
SHOWN = 16  # number of responses that the page shows for a step


def _fill(template, values):
    """Returns the template with values[name] in place of each $name. The values are escaped, because a
    response may contain HTML."""
    return Template(template).substitute({name: escape(str(value)) for name, value in values.items()})


def _table(rows):
    """Returns an HTML table of `rows`. The values are escaped for HTML."""
    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{'<tr>'.join(cells)}</table>"


def _fold(title, html):
    """Returns `html` as a section that opens at a click on the title."""
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def _samples(run, kind):
    """Returns up to SHOWN responses of each of up to six steps as HTML, the newest step first. kind: the
    folder with the responses, "samples" or "eval".
    """
    files, html = sorted((run / kind).glob("step_*.jsonl"), reverse=True), ""
    for file in files[::len(files) // 6 + 1]:
        rows = read_jsonl(file)
        cards = [_fill(SAMPLE, row | {"graded": "right" if row["reward"] >= 1 else "wrong"})
                 for row in rows[::len(rows) // SHOWN + 1]]
        html += _fold(f"{kind}/{file.name}", "".join(cards))
    return html


def write_report(run: Path) -> None:
    """Write plot.png and report.html into the folder of a run. Raises OSError."""
    plot([run], run / "plot.png")
    picture = base64.b64encode((run / "plot.png").read_bytes()).decode()
    alarms = [(f"step {alarm['step']}", alarm["text"]) for alarm in read_jsonl(run / "alarms.jsonl")]
    plan = "\n".join(as_text(_read_json(run / "plan.json")))
    last = {key: value for row in read_metrics(run) for key, value in row.items()}
    sections = {
        "Summary": _table(facts(run).items()),
        "Alarms": _table(alarms) if alarms else "None was raised.",
        "Curves": f'<img alt="curves" src="data:image/png;base64,{picture}">',
        "Samples of the training": _samples(run, "samples"),
        "Answers to held-out problems": _samples(run, "eval"),
        "Numbers": _fold("Last values of the metrics (see docs/metrics.md)", _table(last.items()))
        + _fold("Plan", f"<pre>{escape(plan)}</pre>")
        + _fold("Configuration", _table(_read_json(run / "config.json").items()))}
    page = _fill(PAGE, {"title": run.resolve().name}) + "".join(
        f"<h2>{title}</h2>{html}" for title, html in sections.items() if html)
    (run / "report.html").write_text(page, encoding="utf-8", errors="replace")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("tools.report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run: train.py's --out")
    parser.add_argument("--out", type=Path, help="picture of the runs (of several: compare.png)")
    parser.error = lambda found: require(
        False, found, "python -m tools.report RUN, or RUN RUN2 … [--out compare.png]")
    with user_errors("tools.report"):
        args = parser.parse_args(argv)
        for run in args.runs:
            require(bool(read_metrics(run)), f"no metrics in {run}",
                    "the folder of a run that has logged a step (train.py's --out, with metrics.jsonl in it)")
        if len(args.runs) == 1 and not args.out:
            write_report(*args.runs)
            show(story(*args.runs))
            return
        to = args.out or Path("compare.png")
        try:
            plot(args.runs, to)
        except (OSError, ValueError) as e:  # --out can't be written, or its suffix is no type of picture
            raise UserError(str(e)) from None
        show(f"{compare(args.runs)}\n\nplot  {to}")


if __name__ == "__main__":
    main()
