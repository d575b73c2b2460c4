"""Reports on runs: plots of their curves, a summary as text, and an HTML page.

    python -m tools.report RUN                             # RUN/plot.png, RUN/report.html and a summary
    python -m tools.report RUN RUN2 … --out compare.png    # several runs side by side, as text and as curves

Runs that differ only in their seed belong to one recipe. A plot of a recipe has a line for the mean of the
runs, and a band from the lowest to the highest run.
"""

import base64
import re
import warnings
from collections.abc import Sequence
from html import escape
from itertools import chain
from pathlib import Path

import numpy as np

from configs import exists, explained, read_json, read_jsonl, require, run_command, shorten, show
from log import ALARM, NAN, read_metrics
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


def _keys_of(rows, pattern):
    return [name for name in dict.fromkeys(chain(*rows)) if re.fullmatch(pattern, name)]


def _values(runs, key):
    """Returns the steps at which any run has a value of the metric `key`, and the values as an array
    of shape (runs, steps). Where a run has no value, the array has NaN."""
    curves = [{row["step"]: row[key] for row in rows if key in row} for rows in runs]
    steps = sorted(set(chain(*curves)))
    return steps, np.array([[curve.get(step, NAN) for step in steps] for curve in curves])


def _flags(run):
    """Returns the content of a run's config.json as a dict: its packages, code, data and models, and its
    flags except `seed` and `out`. The dict is empty if there is no config.json."""
    config = read_json(run / "config.json", {"versions": dict})
    config |= config.pop("versions", {})
    return {
        f"--{name.lstrip('-')}": str(value)
        for name, value in config.items()
        if name not in ("seed", "out")
    }


def recipes(runs: Sequence[Path]) -> list[list[Path]]:
    """Returns a list with the runs of each recipe. The config.json files of one recipe's runs differ only in
    `seed` and `out`."""
    groups = {}
    for run in dict.fromkeys(runs):
        groups.setdefault(str(_flags(run) or run), []).append(run)
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


def _draw(axis, lines, scale):
    """Draw a panel of a plot. Neighbouring lines have different dashes, so that two equal lines can both be
    seen.

    lines: label of a line -> the result of `_values` for the runs whose mean the line shows"""
    for i, (label, (steps, values)) in enumerate(lines.items()):
        gap = i % 3 * 4
        (line,) = axis.plot(steps, values.mean(0), ".", linestyle=(0, (12 - gap, gap)), label=label)
        axis.fill_between(
            steps, np.fmin.reduce(values), np.fmax.reduce(values), color=line.get_color(), alpha=0.2
        )
    if scale == "log":
        axis.set_yscale("log")
    elif scale == "variance":  # a new critic's explained variance is far below -1, and is cut off
        axis.set_ylim(-1.02, 1.02)
    elif scale == "share":
        axis.axhspan(0, 1, alpha=0)  # an invisible area, so that the axis includes 0 and 1
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)


def plot(runs: Sequence[Path], to: Path) -> None:
    """Draw the curves of the runs and write the picture to the file `to`. Raises OSError if the file can't be
    written, and ValueError for an unknown type of picture."""
    from matplotlib.figure import Figure

    data = {
        f"{group[0]}: {facts(group)['run']}": [read_metrics(run) for run in group]
        for group in recipes(runs)
    }
    alone, panels = len(data) == 1, []
    for title, pattern, scale in PANELS:
        keys = _keys_of(chain(*chain(*data.values())), pattern)
        for together in [keys] if alone else [[key] for key in keys]:
            lines = {
                key if alone else name: _values(group, key)
                for key in together
                for name, group in data.items()
            }
            if lines:
                panels.append((title if alone else together[0], lines, scale))
    height = (len(panels) + 2) // 3 or 1
    figure = Figure(figsize=(13.2, 3.8 * height), dpi=130, layout="constrained")
    for place, (title, lines, scale) in enumerate(panels, 1):
        axis = figure.add_subplot(height, 3, place, title=title, xlabel="step")
        _draw(axis, lines, scale)
        if alone:
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)
    if alone:
        figure.suptitle(*data)
    else:  # all panels have the same lines
        figure.legend(handles=axis.lines, loc="outside upper left")
    figure.savefig(to, format=to.suffix[1:])


# --- text


def facts(runs: Sequence[Path]) -> dict[str, str]:
    """Returns the summary of a recipe's runs as a dict: name -> text. Values are means over the runs. ± is
    the standard error over the runs, or, for a single run, over its problems."""
    data, configs = (
        [read_metrics(run) for run in runs],
        [read_json(run / "config.json") for run in runs],
    )
    config, seeds = configs[0], ", ".join(str(config.get("seed", "–")) for config in configs)
    times = np.nanmean(_values(data, "time/step")[1], 0)
    found = {
        "run": f"{config.get('algo', '–')}, seed {seeds}, model {config.get('model', '–')}",
        "steps": f"{len(times)} of {config.get('steps', '–')} in {sum(times) / 60:.1f} minutes",
        "alarms": f"{sum(len(read_jsonl(run / 'alarms.jsonl', ALARM)) for run in runs)}",
    }
    for key in _keys_of(chain(*data), "reward|eval/.+@.+"):
        steps, values = _values(data, key)
        common = np.isfinite(values).all(0)
        steps, values = np.array(steps)[common], values[:, common]
        if len(steps):
            means = values.mean(0)
            scores = values[:, -1] if len(runs) > 1 else _scores(*runs, key, steps[-1])
            error = (
                f" ± {np.std(scores, ddof=1) / len(scores) ** 0.5:.3f}" if len(scores) > 1 else ""
            )
            best = "(best {:.3f} at step {})".format(*max(zip(means, steps, strict=True)))
            found[key] = f"{means[0]:.3f} → {means[-1]:.3f}{error} {best}"
    return found


def _scores(run, key, step):
    """Returns the mean reward of each problem at the step, if `key` is eval/SET/avg@N; else []."""
    problems = {}
    for row in read_jsonl(run / f"eval/step_{step:06d}.jsonl", ROW):
        if key.startswith(f"eval/{row.get('set')}/avg@"):
            problems.setdefault(row["prompt_id"], []).append(row["reward"])
    return list(map(np.mean, problems.values()))


def compare(runs: Sequence[Path]) -> str:
    """Returns, as text, the `facts` of each recipe and the flags in which the recipes differ."""
    columns = {str(group[0]): facts(group) | _flags(group[0]) for group in recipes(runs)}
    lines = []
    for field in dict.fromkeys(chain(*columns.values())):
        cells = {name: column.get(field, "–") for name, column in columns.items()}
        if field[:2] != "--" or len(set(cells.values())) > 1:
            lines.append(field)
            lines += [
                f"  {shorten(name, 40):40}  {shorten(cell, 56)}" for name, cell in cells.items()
            ]
    return (
        "\n".join(lines) + "\n\n± standard error, over the runs; of a single run, over the problems"
    )


def story(run: Path) -> str:
    """Returns the summary of a run as text: `facts`, three held-out problems with responses before and after
    training, the last alarms, and the paths of report, plot, metrics and exported model."""
    lines = [f"{name:19} {value}" for name, value in facts([run]).items()]
    files = _files(run, "eval")
    if len(files) > 1:
        for base, trained in zip(
            read_jsonl(files[0], ROW)[:3], read_jsonl(files[-1], ROW), strict=False
        ):
            lines.append(f"\n{shorten(base['problem'])}  (answer {base.get('gold')})")
            for name, row in ("base   ", base), ("trained", trained):
                lines.append(
                    f"  {name} {'✓' if row['reward'] >= 1 else '✗'} {shorten(row['response'])}"
                )
    for alarm in read_jsonl(run / "alarms.jsonl", ALARM)[-5:]:
        lines.append(f"\n!! step {alarm['step']}: {alarm['text']}")
    return "\n".join(
        [
            *lines,
            "",
            f"report   {run}/report.html",
            f"plot     {run}/plot.png",
            f"metrics  {run}/metrics.jsonl  (tensorboard --logdir {run}/tb)",
            f"model    {run}/export/policy",
        ]
    )


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
SHOWN = (
    8  # largest number of wrong responses, and of right responses, that the page shows of a step
)


def _table(rows):
    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{'<tr>'.join(cells)}</table>"


def _fold(title, html):
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def _files(run, kind):
    """Returns the files of responses (kind: samples or eval) of the steps in metrics.jsonl. Files of other
    steps, which an earlier run may have left, are not returned."""
    files = [
        run / kind / f"step_{row['step']:06d}.jsonl"
        for row in read_metrics(run)
        if kind != "eval" or any("eval/" in name for name in row)
    ]
    return list(filter(exists, files))


def _samples(run, kind):
    """Returns HTML with wrong and right responses. They come from up to six steps, the newest step first.
    kind: the folder's name"""
    files, html = _files(run, kind)[::-1], ""
    for file in files[:: len(files) // 6 + 1]:
        rows, cards = read_jsonl(file, ROW), ""
        for right in (False, True):
            some = [row for row in rows if (row["reward"] >= 1) == right]
            cards += "".join(map(_card, some[:: len(some) // SHOWN + 1]))
        html += _fold(f"{kind}/{file.name}", cards)
    return html


def _card(row):
    """Returns a response as HTML. The texts of an environment (--env) are marked."""
    grade = f"{'✓' if row['reward'] >= 1 else '✗'} {row['reason']}, reward {row['reward']}"
    answers = (
        f"answer {row.get('answer')}, gold answer {row.get('gold')}, {row.get('tokens')} tokens"
    )
    texts = [
        f"<mark>{escape(text)}</mark>" if i % 2 else escape(text)
        for i, text in enumerate(row.get("segments", [row["response"]]))
    ]
    return (
        f"<article><b>{escape(f'{grade}, {answers}')}</b><br>"
        f"{escape(row['problem'])}<pre>{''.join(texts)}</pre></article>"
    )


def write_report(run: Path) -> None:
    """Write plot.png and report.html into the folder of a run. Raises OSError if this fails."""
    plot([run], run / "plot.png")
    picture = base64.b64encode((run / "plot.png").read_bytes()).decode()
    alarms = [alarm.values() for alarm in read_jsonl(run / "alarms.jsonl", ALARM)]
    plan = "\n".join(as_text(read_json(run / "plan.json")))
    last = dict(chain(*map(dict.items, read_metrics(run))))  # metric -> its last value
    sections = {
        "Summary (± standard error)": _table(facts([run]).items()),
        "Alarms (step, text)": _table(alarms) if alarms else "None was raised.",
        "Curves": f'<div><img alt="curves" src="data:image/png;base64,{picture}"></div>',
        "Samples of the training": _samples(run, "samples"),
        "Answers to held-out problems": _samples(run, "eval"),
        "Numbers": _fold("Last values of the metrics (see docs/metrics.md)", _table(last.items()))
        + _fold("Plan", f"<pre>{escape(plan)}</pre>")
        + _fold("Configuration", _table(read_json(run / "config.json").items())),
    }
    page = PAGE.replace("$title", escape(run.resolve().name)) + "".join(
        f"<h2>{title}</h2>{html}" for title, html in sections.items() if html
    )
    (run / "report.html").write_text(page, encoding="utf-8", errors="replace")


def report_on(runs: tuple[Path, ...] = (Path(),), /, out: Path | None = None) -> None:
    """Write plot.png and report.html to the folder of a run, and print a summary. With several runs or --out,
    draw their curves in one picture, and print their summaries side by side.

    Args:
        runs: folders of runs (train.py's --out); if none is given, the current folder
        out: file for the picture of the runs; for several runs, the default is compare.png"""
    for run in runs:
        require(
            bool(read_metrics(run)),
            f"no metrics in {run / 'metrics.jsonl'}",
            "the folder of a run that has logged a step (train.py's --out)",
        )
    if len(runs) == 1 and not out:
        write_report(*runs)
        show(story(*runs))
        return
    to = out or Path("compare.png")
    # ValueError: the suffix of --out is no type of picture
    with explained(
        f"can't write {to}",
        "--out with a .png, .pdf or .svg file in a folder that exists",
        (OSError, ValueError),
    ):
        plot(runs, to)
    show(f"{compare(runs)}\n\nplot  {to}")


if __name__ == "__main__":
    run_command(report_on, "tools.report")
