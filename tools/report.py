"""Reports on runs: plots of their curves, a summary as text, and an HTML page.

    python -m tools.report RUN                             # RUN/plot.png, RUN/report.html and a summary
    python -m tools.report RUN RUN2 … --out compare.png    # several runs: summaries, table and curves
    python -m tools.report RUN RUN2 … --out table.tex      # their table as LaTeX, or as .csv

Runs that differ only in their seed belong to one recipe. A plot of a recipe has a line for the mean of the
runs, and a band from the lowest to the highest run. The table has 95 % intervals over the runs.
"""

import base64
import csv
import math
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from html import escape
from itertools import chain, cycle, product
from pathlib import Path

if __name__ == "__main__":
    print("loading torch …", file=sys.stderr)

import numpy as np

from configs import run_command
from guard.files import read_json, read_jsonl
from guard.messages import explained, require, shorten, show
from log import ALARM, read_metrics
from tools.plan import as_text

# The shape (guard.files.checked) of the rows of samples/ and eval/
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
    """Returns the names of the metrics that match the regular expression `pattern`. rows: of metrics.jsonl"""
    names = dict.fromkeys(chain(*rows))  # the keys of all rows, each once
    return [name for name in names if re.fullmatch(pattern, name)]


def _curve(rows, name):
    """Returns a dict: step -> value of the metric. rows: of metrics.jsonl"""
    return {row["step"]: row[name] for row in rows if name in row}


def _values(runs, name):
    """Returns (steps, values): steps is a sorted list of the steps at which any run has a value of the
    metric; values is an array (runs, steps), with NaN where a run has no value.

    runs: the rows of each run's metrics.jsonl"""
    curves = [_curve(rows, name) for rows in runs]
    steps = sorted(set(chain(*curves)))
    values = []
    for curve in curves:
        values.append([curve.get(step, np.nan) for step in steps])
    return steps, np.array(values)


def _flags(run):
    """Returns a run's flags without `seed` and `out`, and its packages, code and data, as a dict:
    --name -> value, as a command line would have it."""
    config = read_json(run / "config.json", {"versions": dict})  # UserError if versions is no dict
    config |= config.pop("versions", {})
    flags = {}
    for name, value in config.items():
        name = name.lstrip("-")  # some names in `versions` are flags already, such as --env
        if name not in ("seed", "out"):
            values = value if isinstance(value, list) else [value]
            flags[f"--{name}"] = shlex.join(map(str, values))
    return flags


def recipes(runs: Sequence[Path]) -> list[list[Path]]:
    """Returns a list of recipes, each as the list of its runs. The config.json files of a recipe's runs
    differ only in `seed` and `out`. A run without config.json is alone in its recipe."""
    unique = {}
    for run in runs:
        unique.setdefault(run.resolve(), run)  # a link to a run is the same run
    groups = {}
    for run in unique.values():
        key = str(_flags(run) or run)  # {}: no config.json
        groups.setdefault(key, []).append(run)
    return list(groups.values())


# --- curves

# The panels of a plot: title, regular expression for the metrics, scale of the axis (see `_draw`). A plot of
# one recipe has a line for each metric. With several recipes, each metric has its own panel, with a line for
# each recipe.
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
        label = f"{group[0]}: {_who(group)}"
        label = label.replace("$", r"\$")  # matplotlib reads $…$ as a formula
        data[label] = list(map(read_metrics, group))
    alone = len(data) == 1  # there is only one recipe
    rows_of_runs = chain(*data.values())
    rows = list(chain(*rows_of_runs))
    panels = {}  # (title, scale) -> label of a line -> (steps, values)
    for title, pattern, scale in PANELS:
        # A recipe without a metric has an empty line, so that each recipe keeps its colour.
        for name, label in product(_names(rows, pattern), data):
            panel = (title if alone else name, scale)
            line = name if alone else label
            lines = panels.setdefault(panel, {})
            lines[line] = _values(data[label], name)
    height = (len(panels) + 2) // 3 or 1  # number of rows with three panels each
    figure = Figure(
        figsize=(13.2, 3.8 * height),
        dpi=130,
        layout="constrained",
    )
    for place, (title, scale) in enumerate(panels, 1):
        axis = figure.add_subplot(height, 3, place)
        axis.set(title=title, xlabel="step")
        _draw(axis, panels[title, scale], scale)
        if alone:
            axis.legend(
                loc="upper center",
                bbox_to_anchor=(0.5, -0.2),
                ncols=2,
                frameon=False,
            )
    if alone:
        figure.suptitle(*data)  # the only label
    elif panels:  # all panels have the same lines, so the legend takes those of the last panel
        figure.legend(handles=axis.lines, loc="outside upper left")
    figure.savefig(to, format=to.suffix[1:])


def _draw(axis, lines, scale):
    """Draw a panel of a plot. Neighbouring lines have different dashes, so that two equal lines can be seen.

    lines: label -> steps and values (see `_values`) of the runs whose mean the line shows"""
    dashes = cycle([".-", ".--", ".:"])
    for label, (steps, values) in lines.items():
        # The mean is NaN, so there is no line, where a run has no value.
        (line,) = axis.plot(steps, values.mean(0), next(dashes), label=label)
        axis.fill_between(
            steps,
            np.fmin.reduce(values),  # ignores NaN
            np.fmax.reduce(values),
            color=line.get_color(),
            alpha=0.2,
        )
    if scale == "log":
        axis.set_yscale("log")
    elif scale == "variance":  # a new critic's explained variance is far below -1, and is cut off
        axis.set_ylim(-1.02, 1.02)
    elif scale == "share":
        axis.axhspan(0, 1, alpha=0)  # an invisible area, so that the axis includes 0 and 1
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)


# --- text


def _who(runs):
    """Returns algorithm, seeds and model of a recipe's runs, as text."""
    seeds = []
    for run in runs:
        config = read_json(run / "config.json")
        seeds.append(str(config.get("seed", "–")))
    algo = config.get("algo", "–")
    model = config.get("model", "–")
    return f"{algo}, seed {', '.join(seeds)}, model {model}"


def facts(run: Path) -> dict[str, str]:
    """Returns the summary of a run as a dict: name -> text. ± is the standard error over the problems."""
    rows = read_metrics(run)
    seconds = _curve(rows, "time/step").values()
    steps = read_json(run / "config.json").get("steps", "–")
    alarms = read_jsonl(run / "alarms.jsonl", ALARM)
    found = {
        "run": _who([run]),
        "steps": f"{len(seconds)} of {steps} in {sum(seconds) / 60:.1f} minutes",
        "alarms": str(len(alarms)),
    }
    for name in _names(rows, "reward|eval/.+/.+@.+"):
        curve = _curve(rows, name)
        values = [*curve.values()]
        best = max(curve, key=curve.get)  # step of the largest value
        error = _error(run, name, step=max(curve))
        change = f"{values[0]:.3f} → {values[-1]:.3f}{error}"
        found[name] = f"{change} (best {curve[best]:.3f} at step {best})"
    return found


def _error(run, metric, step):
    """Returns the standard error over the problems at a step, as text such as ` ± 0.012`, if the metric is
    eval/SET/avg@N; else ""."""
    rewards = {}  # problem -> its rewards
    for row in read_jsonl(run / f"eval/step_{step:06d}.jsonl", ROW):
        if metric.startswith(f"eval/{row.get('set')}/avg@"):
            of_problem = rewards.setdefault(row["prompt_id"], [])
            of_problem.append(row["reward"])
    if len(rewards) < 2:
        return ""
    scores = [*map(np.mean, rewards.values())]
    error = np.std(scores, ddof=1) / len(scores) ** 0.5
    return f" ± {error:.3f}"


def _summary(run):
    """Returns the `facts` of a run as lines of text."""
    return [f"{name:19} {value}" for name, value in facts(run).items()]


def half_interval(values: Sequence[float]) -> float:
    """Returns half of the 95 % interval of the mean of n values, by Student's t; NaN if n < 2."""
    freedom = len(values) - 1
    if freedom < 1:
        return math.nan
    # t is √freedom × the tangent of an angle with the density cos^(freedom - 1).
    quarter = math.pi / 2
    angle = np.linspace(-quarter, quarter, 100_001)
    below = np.cumsum(np.cos(angle) ** (freedom - 1))  # weight of all smaller angles
    # The angle below which 97.5 % of the weight is
    quantile = np.interp(0.975 * below[-1], below, angle)
    t = math.tan(quantile) * freedom**0.5
    error = np.std(values, ddof=1) / len(values) ** 0.5
    return t * error


def table(runs: Sequence[Path], metric: str) -> list[list[str]]:
    """Returns a header row, and a row for each recipe: the flags in which recipes differ, the number of runs,
    the mean of the metric's last value, and the mean difference from the first recipe (pairs of equal seeds).
    After each mean comes half of its 95 % interval."""
    interval = "± 95 %"  # title of the columns with half intervals
    rows = [["recipe", "runs", metric, interval, "minus the first", interval]]
    groups = recipes(runs)
    flags = [_flags(group[0]) for group in groups]
    first = {}  # the first recipe's scores
    last_steps = set()
    for group, own in zip(groups, flags, strict=True):
        scores, step = _last_values(group, metric)  # scores: seed -> value
        last_steps.add(step)
        # Empty for the first recipe, because `first` is still empty
        gaps = [scores[seed] - first[seed] for seed in scores if seed in first]
        first = first or scores
        words = []  # the recipe's flags that not all recipes have
        for name in sorted(own):
            if any(other.get(name) != own[name] for other in flags):
                words.append(f"{name} {own[name]}")
        row = [" ".join(words or map(str, group)), str(len(scores))]
        for numbers in ([*scores.values()], gaps):
            if numbers:
                row.append(f"{np.mean(numbers):.4f}")
                half = half_interval(numbers)
                row.append("" if math.isnan(half) else f"{half:.4f}")
        rows.append(row + [""] * (6 - len(row)))  # 6 columns
    if len(last_steps) > 1:
        numbers = ", ".join(map(str, sorted(last_steps)))
        show(f"!! the table compares {metric} of different steps: {numbers}")
    return rows


def _last_values(runs, metric):
    """Returns (found, step): step is the last step at which any of the recipe's runs has the metric; found is
    a dict: seed of a run -> its value of the metric at that step. A second run with the same seed has its
    path as the key. A run without a value at that step is left out, and a line that says so is printed."""
    steps, values = _values(list(map(read_metrics, runs)), metric)
    require(
        values.size > 0,
        f"{runs[0]} has no metric {metric}",
        "--metric of docs/metrics.md",
    )
    found = {}
    for run, curve in zip(runs, values, strict=True):
        if math.isnan(curve[-1]):
            show(f"{run} has no {metric} at step {steps[-1]}, so the table leaves it out")
            continue
        seed = read_json(run / "config.json").get("seed", run)
        found[run if seed in found else seed] = curve[-1]
    return found, steps[-1]


# Signs with a meaning in LaTeX -> how to print them
TEX = {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\textasciitilde{}", "±": r"$\pm$"}
TEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
TEX |= {sign: f"\\{sign}" for sign in "_%#&${}"}


def write_table(rows: Sequence[Sequence[str]], to: Path) -> None:
    """Write the rows of `table` as LaTeX (.tex) or as CSV. Raises OSError if this fails."""
    if to.suffix == ".csv":
        with to.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)
        return
    body = ""
    for row in rows:
        cells = [" ".join(cell.split()).translate(str.maketrans(TEX)) for cell in row]
        body += " & ".join(cells) + " \\\\\n"
    body = re.sub("-(?=-)", "-{}", body)  # LaTeX would print "--" as a dash
    columns = "l" + "r" * (len(rows[0]) - 1)
    text = f"\\begin{{tabular}}{{{columns}}}\n{body}\\end{{tabular}}\n"
    to.write_text(text, encoding="utf-8")


def story(run: Path) -> str:
    """Returns the summary of a run as text: `facts`, three held-out problems with responses before and after
    training, the last alarms, and the paths of report, plot, metrics and exported model."""
    lines = _summary(run)
    files = _files(run, "eval")  # in the order of their steps
    if len(files) > 1:
        first = _first_responses(files[0])
        last = _first_responses(files[-1])
        both = [problem for problem in first if problem in last]
        for problem in both[:3]:
            base = first[problem]
            lines.append(f"\n{shorten(problem)}  (answer {base.get('gold')})")
            for file, row in (files[0], base), (files[-1], last[problem]):
                lines.append(f"  {file.stem} {_mark(row)} {shorten(row['response'])}")
    for alarm in read_jsonl(run / "alarms.jsonl", ALARM)[-5:]:
        lines.append(f"\n!! step {alarm['step']}: {alarm['text']}")
    lines += [
        "",
        f"report   {run}/report.html",
        f"plot     {run}/plot.png",
        f"metrics  {run}/metrics.jsonl  (tensorboard --logdir {run}/tb)",
    ]
    if (run / "export/policy").exists():  # only after the run's last step
        lines.append(f"model    {run}/export/policy")
    return "\n".join(lines)


def _first_responses(file):
    """Returns a dict: problem -> the first of its rows in a file of samples."""
    found = {}
    for row in read_jsonl(file, ROW):
        found.setdefault(row["problem"], row)
    return found


def _mark(row):
    """Returns a sign that says whether the response is right."""
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
    """Returns an HTML table of the rows, whose cells are any values."""
    html = ""
    for row in rows:
        html += "<tr>"
        for cell in row:
            html += f"<td>{escape(str(cell))}</td>"
    return f"<table>{html}</table>"


def _fold(title, html):
    """Returns HTML that shows the title, and `html` after a click on it."""
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def _files(run, kind):
    """Returns the files of responses, one for each step, in the order of the steps. Leaves out files of steps
    after the last row of metrics.jsonl: the run was continued, or begun again, at an earlier step.

    kind: the folder's name, samples or eval"""
    last = max((row["step"] for row in read_metrics(run)), default=0)
    files = sorted((run / kind).glob("step_*.jsonl"))
    return [file for file in files if file.stem <= f"step_{last:06d}"]


def _samples(run, kind):
    """Returns HTML with wrong and right responses. They come from up to six steps, the newest step first."""
    files = _files(run, kind)
    every = len(files) // 6 + 1  # shows every n-th file
    html = ""
    for file in files[::-every]:  # from the newest
        rows = read_jsonl(file, ROW)
        cards = ""
        for right in (False, True):
            some = [row for row in rows if (row["reward"] >= 1) == right]
            stride = len(some) // SHOWN + 1  # so that at most SHOWN responses are left
            cards += "".join(map(_card, some[::stride]))
        html += _fold(f"{kind}/{file.name}", cards)
    return html


def _card(row):
    """Returns a response as HTML. The texts of an environment (--env) are marked."""
    grade = f"{_mark(row)} {row['reason']}, reward {row['reward']}"
    answers = f"answer {row.get('answer')}, gold {row.get('gold')}, {row.get('tokens')} tokens"
    text = ""
    # segments: with --env, texts of the policy and of the environment in turn. Without it, the response
    for i, segment in enumerate(row.get("segments", [row["response"]])):
        shown = escape(segment)
        if i % 2 == 1:  # the environment's
            shown = f"<mark>{shown}</mark>"
        text += shown
    return (
        f"<article><b>{escape(f'{grade}, {answers}')}</b><br>"
        f"{escape(row['problem'])}<pre>{text}</pre></article>"
    )


def write_report(run: Path) -> None:
    """Write plot.png and report.html into the folder of a run. Raises OSError if this fails."""
    file = run / "plot.png"
    plot([run], file)
    picture = base64.b64encode(file.read_bytes()).decode()
    alarms = [alarm.values() for alarm in read_jsonl(run / "alarms.jsonl", ALARM)]  # (step, text)
    config = read_json(run / "config.json")
    plan = "\n".join(as_text(read_json(run / "plan.json")))
    last = {}  # metric -> its last value
    for row in read_metrics(run):
        last |= row
    numbers = [
        _fold("Last values of the metrics (see docs/metrics.md)", _table(last.items())),
        _fold("Plan", f"<pre>{escape(plan)}</pre>"),
        _fold("Configuration", _table(config.items())),
    ]
    sections = {
        "Summary (± standard error)": _table(facts(run).items()),
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
    runs: tuple[Path, ...] = (Path(),),
    /,
    out: Path | None = None,
    metric: str = "",
) -> None:
    """Write plot.png and report.html to the folder of a run, and print a summary. If there are several runs,
    or if --out or --metric is given, print summaries and a table instead, and write their curves to --out,
    or the table if --out ends in .csv or .tex.

    Args:
        runs: folders of runs (train.py's --out); if none is given, the current folder
        out: file for the picture of the runs, or .csv or .tex for their table; for several runs or with
            --metric, the default is compare.png
        metric: metric of the table; the default is the first eval/…/avg@k of the first run's last
            evaluation, or else reward"""
    for run in runs:
        require(
            bool(read_metrics(run)),
            f"no metrics in {run / 'metrics.jsonl'}",
            "the folder of a run that has logged a step (train.py's --out)",
        )
    runs = list(chain(*recipes(runs)))  # each run once, the runs of a recipe together
    if len(runs) == 1 and not out and not metric:
        run = runs[0]
        with explained(f"can't write to {run}", "permission and space, or --out FILE", OSError):
            write_report(run)
        show(story(run))
        return
    to = out or Path("compare.png")
    if not metric:
        # The newest rows come first, because a run may be continued with other --eval_data or --eval_samples.
        accuracies = _names(read_metrics(runs[0])[::-1], r"eval/.+/avg@\d+")
        metric = accuracies[0] if accuracies else "reward"
    rows = table(runs, metric)
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
    lines = []
    for run in runs:
        lines += [f"{run}", *_summary(run), ""]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]  # of the table's columns
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append(" ".join(cells).rstrip())
    lines += ["", f"file  {to}"]
    show("\n".join(lines))


if __name__ == "__main__":
    run_command(report_on, "tools.report")
