"""Reports on runs: plots of their curves, a summary as text, and an HTML page.

    python -m tools.report RUN                             # RUN/plot.png, RUN/report.html and a summary
    python -m tools.report RUN RUN2 … --out compare.png    # several runs side by side, as text and as curves
    python -m tools.report RUN RUN2 … --out table.tex      # their table as LaTeX, or as .csv

Runs that differ only in their seed belong to one recipe. A plot of a recipe has a line for the mean of the
runs, and a band from the lowest to the highest run. The table has 95 % intervals over the runs.
"""

import base64
import math
import re
import warnings
from collections.abc import Sequence
from html import escape
from itertools import chain, cycle, product
from pathlib import Path

import numpy as np

from configs import explained, read_json, read_jsonl, require, run_command, shorten, show
from log import ALARM, read_metrics
from tools.plan import as_text

# The shape (configs.checked) of the rows of samples/ and eval/
ROW = {
    "set": str | None,
    "prompt_id": int,
    "problem": str,
    "response": str,
    "segments": list | None,
    "reward": float | int,
    "reason": str,
}
# A metric that is 0 in the whole run has no logarithm. Its panel stays empty. Hide matplotlib's warning.
warnings.filterwarnings("ignore", "Data has no positive values")


def _names(rows, pattern):
    """Returns the names of the metrics that match the regular expression `pattern`."""
    return [name for name in dict.fromkeys(chain(*rows)) if re.fullmatch(pattern, name)]


def _values(runs, name):
    """Returns the steps at which any run has a value of the metric, and an array (runs, steps) of the values.
    It has NaN where a run has no value. runs: the rows of each run's metrics.jsonl"""
    steps = sorted({row["step"] for row in chain(*runs) if name in row})
    values = []
    for rows in runs:
        curve = {row["step"]: row[name] for row in rows if name in row}
        values.append([curve.get(step, np.nan) for step in steps])
    return steps, np.array(values)


def _flags(run):
    """Returns a run's flags without `seed` and `out`, and its packages, code and data, as a dict:
    --name -> text."""
    config = read_json(run / "config.json", {"versions": dict})
    config |= config.pop("versions", {})
    flags = {f"--{name.lstrip('-')}": str(value) for name, value in config.items()}
    for name in ("--seed", "--out"):
        flags.pop(name, None)
    return flags


def recipes(runs: Sequence[Path]) -> list[list[Path]]:
    """Returns the runs of each recipe. The config.json files of its runs differ only in `seed` and `out`. A
    run without config.json is a recipe of its own."""
    groups = {}
    for run in dict.fromkeys(runs):
        key = str(_flags(run) or run)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


# --- curves

# The panels of a plot: title, regular expression for the metrics, scale of the axis. A plot of one recipe has
# a line for each metric. With several recipes, each metric has its own panel, with a line for each recipe.
PANELS = [
    ("reward", "reward", "share"),
    ("held-out accuracy", r"eval/.+/avg@\d+", "share"),
    ("response length (tokens)", "response_len(/right|/wrong)?", "linear"),
    ("shares", "truncated|uniform_groups|clip_share", "share"),
    ("entropy (nats a token)", "entropy", "linear"),
    ("gradient norm", "grad_norm/.+", "log"),
    ("|engine − trainer| log-prob (nats)", "logp_gap/(mean|max)", "log"),
    ("critic: explained variance (≥ −1)", "explained_variance", "variance"),
    ("reflections (a response)", "reflections", "share"),
    ("tokens a second", "tokens_per_s", "linear"),
    ("seconds a step", "time/(step|rollout|critic|policy|eval|wait|sync)", "linear"),
]


def plot(runs: Sequence[Path], to: Path) -> None:
    """Draw the curves of the runs and write the picture to the file `to`. Raises OSError if the file can't be
    written, and ValueError for an unknown type of picture."""
    from matplotlib.figure import Figure

    data = {}  # label of a recipe -> the metrics of its runs
    for group in recipes(runs):
        label = f"{group[0]}: {facts(group)['run']}"
        label = label.replace("$", r"\$")  # matplotlib reads $…$ as a formula
        data[label] = list(map(read_metrics, group))
    alone = len(data) == 1
    rows = list(chain(*chain(*data.values())))  # of all runs
    panels = {}  # title and scale -> label of a line -> steps and values
    for title, pattern, scale in PANELS:
        # A recipe without a metric has an empty line, so that each recipe keeps its colour.
        for name, (label, group) in product(_names(rows, pattern), data.items()):
            panel = title if alone else name
            line = name if alone else label
            panels.setdefault((panel, scale), {})[line] = _values(group, name)
    height = (len(panels) + 2) // 3 or 1
    figure = Figure(figsize=(13.2, 3.8 * height), dpi=130, layout="constrained")
    for place, ((title, scale), lines) in enumerate(panels.items(), 1):
        axis = figure.add_subplot(height, 3, place, title=title, xlabel="step")
        _draw(axis, lines, scale)
        if alone:
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)
    if alone:
        figure.suptitle(*data)
    else:  # all panels have the same lines
        figure.legend(handles=axis.lines, loc="outside upper left")
    figure.savefig(to, format=to.suffix[1:])


def _draw(axis, lines, scale):
    """Draw a panel of a plot. Neighbouring lines have different dashes, so that two equal lines can be seen.

    lines: label -> steps and values (see `_values`) of the runs whose mean the line shows"""
    dashes = cycle([".-", ".--", ".:"])
    for label, (steps, values) in lines.items():
        (line,) = axis.plot(steps, values.mean(0), next(dashes), label=label)
        lowest = np.fmin.reduce(values)  # ignores NaN
        highest = np.fmax.reduce(values)
        axis.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.2)
    if scale == "log":
        axis.set_yscale("log")
    elif scale == "variance":  # a new critic's explained variance is far below -1, and is cut off
        axis.set_ylim(-1.02, 1.02)
    elif scale == "share":
        axis.axhspan(0, 1, alpha=0)  # an invisible area, so that the axis includes 0 and 1
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)


# --- text


def facts(runs: Sequence[Path]) -> dict[str, str]:
    """Returns the summary of a recipe's runs as a dict: name -> text. Values are means over the runs. ± is
    the standard error over the runs, or, for a single run, over its problems."""
    data = list(map(read_metrics, runs))
    configs = [read_json(run / "config.json") for run in runs]
    names = ("algo", "model", "steps")
    algo, model, steps = (configs[0].get(name, "–") for name in names)
    seeds = ", ".join(str(config.get("seed", "–")) for config in configs)
    _, times = _values(data, "time/step")
    minutes = np.nanmean(times, 0).sum() / 60
    alarms = [read_jsonl(run / "alarms.jsonl", ALARM) for run in runs]
    found = {
        "run": f"{algo}, seed {seeds}, model {model}",
        "steps": f"{times.shape[1]} of {steps} in {minutes:.1f} minutes",
        "alarms": str(sum(map(len, alarms))),
    }
    for name in _names(chain(*data), "reward|eval/.+@.+"):
        steps, values = _values(data, name)
        in_all = np.isfinite(values).all(0)
        if in_all.any():
            steps = np.array(steps)[in_all]
            found[name] = _change(runs, name, steps, values[:, in_all])
    return found


def _change(runs, name, steps, values):
    """Returns the first, last and best value of a metric as text. values: array (runs, steps)"""
    means = values.mean(0)
    scores = values[:, -1]
    if len(runs) == 1:
        scores = _scores(runs[0], name, steps[-1])
    error = ""
    if len(scores) > 1:
        error = f" ± {np.std(scores, ddof=1) / len(scores) ** 0.5:.3f}"
    best = means.argmax()
    change = f"{means[0]:.3f} → {means[-1]:.3f}{error}"
    return f"{change} (best {means[best]:.3f} at step {steps[best]})"


def _scores(run, key, step):
    """Returns the mean reward of each problem at the step, if `key` is eval/SET/avg@N; else []."""
    problems = {}
    for row in read_jsonl(run / f"eval/step_{step:06d}.jsonl", ROW):
        if key.startswith(f"eval/{row.get('set')}/avg@"):
            problems.setdefault(row["prompt_id"], []).append(row["reward"])
    return list(map(np.mean, problems.values()))


def compare(runs: Sequence[Path]) -> str:
    """Returns, as text, the `facts` of each recipe, and the flags, packages, code and data that differ."""
    columns = {}
    for group in recipes(runs):
        columns[str(group[0])] = facts(group) | _flags(group[0])
    lines = []
    for field in dict.fromkeys(chain(*columns.values())):
        cells = {name: column.get(field, "–") for name, column in columns.items()}
        if field.startswith("--") and len(set(cells.values())) == 1:
            continue
        lines.append(field)
        lines += [f"  {shorten(name, 40):40}  {shorten(cell, 56)}" for name, cell in cells.items()]
    lines += ["", "± standard error, over the runs; of a single run, over the problems"]
    return "\n".join(lines)


def half_interval(values: Sequence[float]) -> float:
    """Returns half of the 95 % interval of the mean of n values, by Student's t; NaN if n < 2."""
    freedom = len(values) - 1
    if freedom < 1:
        return math.nan
    # t is √freedom × the tangent of an angle with the density cos^(freedom - 1).
    angle = np.linspace(-math.pi / 2, math.pi / 2, 100_001)
    share = np.cumsum(np.cos(angle) ** (freedom - 1))
    t = math.tan(np.interp(0.975 * share[-1], share, angle)) * freedom**0.5
    return t * np.std(values, ddof=1) / len(values) ** 0.5


def table(runs: Sequence[Path], metric: str) -> list[list[str]]:
    """Returns a header row, and a row for each recipe: the flags in which recipes differ, the number of runs,
    the mean of the metric's last value, and the mean difference from the first recipe (pairs of equal seeds).
    After each mean comes half of its 95 % interval."""
    rows = [["recipe", "runs", metric, "± 95 %", "minus the first", "± 95 %"]]
    groups = recipes(runs)
    flags = [set(_flags(group[0]).items()) for group in groups]
    first = {}
    for group, own in zip(groups, flags, strict=True):
        _, values = _values(list(map(read_metrics, group)), metric)
        require(
            values.size > 0, f"{group[0]} has no metric {metric}", "--metric of docs/metrics.md"
        )
        seeds = [read_json(run / "config.json").get("seed", run) for run in group]
        scores = dict(zip(seeds, values[:, -1], strict=True))
        first = first or scores
        differ = sorted(own - set.intersection(*flags))
        rows.append([" ".join(map(" ".join, differ)) or str(group[0]), str(len(group))])
        gaps = [scores[seed] - first[seed] for seed in scores if seed in first]
        for numbers in filter(None, (list(scores.values()), gaps)):
            rows[-1] += [f"{np.mean(numbers):.4f}", f"{half_interval(numbers):.4f}"]
    return rows


def write_table(rows: Sequence[Sequence[str]], to: Path) -> None:
    """Write the rows as LaTeX (.tex) or as CSV. Raises OSError if this fails."""
    if to.suffix == ".tex":
        body = "".join(" & ".join(row) + " \\\\\n" for row in rows)
        body = re.sub("([_%#])", r"\\\1", body).replace("±", r"$\pm$")
        text = f"\\begin{{tabular}}{{lrrrrr}}\n{body}\\end{{tabular}}\n"
    else:
        text = "".join(f'"{row[0]}",{",".join(row[1:])}\n' for row in rows)
    to.write_text(text, encoding="utf-8")


def story(run: Path) -> str:
    """Returns the summary of a run as text: `facts`, three held-out problems with responses before and after
    training, the last alarms, and the paths of report, plot, metrics and exported model."""
    lines = [f"{name:19} {value}" for name, value in facts([run]).items()]
    files = _files(run, "eval")
    if len(files) > 1:
        first = read_jsonl(files[0], ROW)[:3]
        last = read_jsonl(files[-1], ROW)
        for base, trained in zip(first, last, strict=False):
            lines.append(f"\n{shorten(base['problem'])}  (answer {base.get('gold')})")
            for name, row in ("base   ", base), ("trained", trained):
                lines.append(f"  {name} {_mark(row)} {shorten(row['response'])}")
    for alarm in read_jsonl(run / "alarms.jsonl", ALARM)[-5:]:
        lines.append(f"\n!! step {alarm['step']}: {alarm['text']}")
    lines += [
        "",
        f"report   {run}/report.html",
        f"plot     {run}/plot.png",
        f"metrics  {run}/metrics.jsonl  (tensorboard --logdir {run}/tb)",
        f"model    {run}/export/policy",
    ]
    return "\n".join(lines)


def _mark(row):
    return "✓" if row["reward"] >= 1 else "✗"


# --- the HTML page

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
body { font: 15px sans-serif; max-width: 1200px; margin: auto; padding: 0 8px }
img { width: 100%; min-width: 800px }
div, table { display: block; overflow: auto }
td { vertical-align: top; overflow-wrap: anywhere; padding: 0 8px }
td:first-child { white-space: nowrap }
pre { background: #f4f4f4; overflow: auto }
article pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 24em }
</style>
<h1>$title</h1>"""
SHOWN = 8  # largest number of wrong responses, and of right responses, that are shown of a step


def _table(rows):
    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{'<tr>'.join(cells)}</table>"


def _fold(title, html):
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def _files(run, kind):
    """Returns the files of responses, one for each step. kind: the folder's name, samples or eval"""
    return sorted((run / kind).glob("step_*.jsonl"))


def _samples(run, kind):
    """Returns HTML with wrong and right responses. They come from up to six steps, the newest step first."""
    files = _files(run, kind)[::-1]
    html = ""
    for file in files[:: len(files) // 6 + 1]:
        rows = read_jsonl(file, ROW)
        cards = ""
        for right in (False, True):
            some = [row for row in rows if (row["reward"] >= 1) == right]
            every = len(some) // SHOWN + 1
            cards += "".join(map(_card, some[::every]))
        html += _fold(f"{kind}/{file.name}", cards)
    return html


def _card(row):
    """Returns a response as HTML. The texts of an environment (--env) are marked."""
    grade = f"{_mark(row)} {row['reason']}, reward {row['reward']}"
    answers = (
        f"answer {row.get('answer')}, gold answer {row.get('gold')}, {row.get('tokens')} tokens"
    )
    text = ""
    for i, segment in enumerate(row.get("segments", [row["response"]])):
        of_env = i % 2 == 1
        text += f"<mark>{escape(segment)}</mark>" if of_env else escape(segment)
    return (
        f"<article><b>{escape(f'{grade}, {answers}')}</b><br>"
        f"{escape(row['problem'])}<pre>{text}</pre></article>"
    )


def write_report(run: Path) -> None:
    """Write plot.png and report.html into the folder of a run. Raises OSError if this fails."""
    file = run / "plot.png"
    plot([run], file)
    picture = base64.b64encode(file.read_bytes()).decode()
    alarms = [alarm.values() for alarm in read_jsonl(run / "alarms.jsonl", ALARM)]
    config = read_json(run / "config.json")
    plan = as_text(read_json(run / "plan.json"))
    plan = escape("\n".join(plan))
    last = {}  # metric -> its last value
    for row in read_metrics(run):
        last |= row
    numbers = [
        _fold("Last values of the metrics (see docs/metrics.md)", _table(last.items())),
        _fold("Plan", f"<pre>{plan}</pre>"),
        _fold("Configuration", _table(config.items())),
    ]
    sections = {
        "Summary (± standard error)": _table(facts([run]).items()),
        "Alarms (step, text)": _table(alarms) if alarms else "None was raised.",
        "Curves": f'<div><img alt="curves" src="data:image/png;base64,{picture}"></div>',
        "Samples of the training": _samples(run, "samples"),
        "Answers to held-out problems": _samples(run, "eval"),
        "Numbers": "".join(numbers),
    }
    page = PAGE.replace("$title", escape(run.resolve().name))
    for title, html in sections.items():
        page += f"<h2>{title}</h2>{html}" if html else ""
    (run / "report.html").write_text(page, encoding="utf-8", errors="replace")


def report_on(
    runs: tuple[Path, ...] = (Path(),), /, out: Path | None = None, metric: str = ""
) -> None:
    """Write plot.png and report.html to the folder of a run, and print a summary. With several runs or --out,
    print a comparison and a table. Write their curves to --out, or the table if --out ends in .csv or .tex.

    Args:
        runs: folders of runs (train.py's --out); if none is given, the current folder
        out: file for the picture of the runs, or .csv or .tex for their table; for several runs, the default
            is compare.png
        metric: metric of the table; the default is the first eval/…/avg@k, or else reward"""
    for run in runs:
        require(
            bool(read_metrics(run)),
            f"no metrics in {run / 'metrics.jsonl'}",
            "the folder of a run that has logged a step (train.py's --out)",
        )
    if len(runs) == 1 and not out:
        with explained(f"can't write to {run}", "permission and space, or --out FILE", OSError):
            write_report(run)
        show(story(*runs))
        return
    to = out or Path("compare.png")
    found = _names(read_metrics(runs[0]), r"eval/.+/avg@\d+")
    rows = table(runs, metric or [*found, "reward"][0])
    # ValueError: the suffix of --out is no type of picture
    with explained(
        f"can't write {to}",
        "--out with a .png, .pdf, .svg, .csv or .tex file in a folder that exists",
        (OSError, ValueError),
    ):
        if to.suffix in (".csv", ".tex"):
            write_table(rows, to)
        else:
            plot(runs, to)
    lines = ["\t".join(row).expandtabs(18) for row in rows]
    show("\n".join([compare(runs), "", *lines, "", f"file  {to}"]))


if __name__ == "__main__":
    run_command(report_on, "tools.report")
