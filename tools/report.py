"""What a person reads about a run: curves, a summary as text, a comparison of recipes, and HTML pages.

    python -m tools.report RUN                             # RUN/plot.png, RUN/report.html and a story
    python -m tools.report RUN --watch 30                  # writes both every 30 seconds until the run ends
    python -m tools.report RUN RUN2 … --out compare.png    # prints the runs side by side, and draws them
    python -m tools.report RUN RUN2 … --out compare.html   # the same as a page, with a table of the recipes

Runs that differ only in their seed are one recipe: its mean, in a band from the lowest to the highest run.
Everything is read from the files of the run's folder, so it works while the run goes on and after a crash.
A page is one file that needs no network. What models wrote is escaped in it.
"""

import argparse
import base64
import io
import json
import math
import os
import re
import signal
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import chain, groupby, product
from operator import itemgetter
from pathlib import Path
from string import Template

from configs import UserError, read_jsonl, require, user_errors
from log import NAN, metric_meanings, read_metrics


def keys_of(rows: Iterable[Mapping], pattern: str) -> list[str]:
    """The metrics whose whole name matches the regular expression, in the order of their first row."""
    return [name for name in dict.fromkeys(chain(*rows)) if re.fullmatch(pattern, name)]


def _values_of(rows, key):
    """The values of one metric, of the steps that have it."""
    return [row[key] for row in rows if key in row]


def _read_json(path):
    """What config.json or plan.json holds; {} where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


# --- recipes


def recipes(runs: Iterable[Path]) -> dict[str, list[Path]]:
    """The runs of each recipe: those whose config.json differs only in seed and out. A run without the file
    is alone. A recipe has its folder's name, or what its folders' names begin with."""
    groups, named = {}, {}
    for run in {run.resolve(): run for run in runs}.values():
        config = _read_json(run / "config.json")
        same = json.dumps({field: value for field, value in config.items() if field not in ("seed", "out")})
        groups.setdefault(same if config else str(run), []).append(run)
    groups = _joined(groups)
    for group in groups.values():
        names = [run.resolve().name for run in group]
        if len(group) > 1:  # seeds 10 and 11 both begin with 1
            names[0] = re.sub(r"\d*$", "", os.path.commonprefix(names)).rstrip("-_. ")
        unique = names[0] != "" and names[0] not in named
        named[names[0] if unique else str(group[0].resolve())] = group
    return named


def _joined(groups):
    """Groups of one run each whose configs are equal when -SEED stands for their seeds in paths are one: the
    demo has a base model for each seed, in a folder named for it."""
    joined = {}
    for same, runs in groups.items():
        seed = _read_json(runs[0] / "config.json").get("seed", "")
        key = re.sub(rf"-{seed}(?=[\"/])", "-SEED", same) if len(runs) == 1 else same
        joined.setdefault(key, []).extend(runs)
    return joined


def band(curves: Sequence[Mapping[int, float]]) -> list[tuple[int, float, float, float]]:
    """(step, lowest, mean, highest) of several runs' values at each step (step -> value). The mean is NaN
    where a run has no value, so that it never jumps because a run ended."""
    points = []
    for step in sorted(set(chain(*curves))):
        values = [curve[step] for curve in curves if not math.isnan(curve.get(step, NAN))] or [NAN]
        mean = statistics.fmean(values) if len(values) == len(curves) else NAN
        points.append((step, min(values), mean, max(values)))
    return points


# --- curves

# Title; the metrics it draws of a single run; of several runs; its vertical axis.
PANELS = [re.split("  +", row) for row in r"""
reward                              reward                               reward                    share
held-out accuracy                   eval/.+/avg@\d+                      eval/.+/avg@\d+           share
response length (tokens)            response_len(/right|/wrong)?         response_len              linear
shares                              truncated|uniform_groups|clip_share  truncated|uniform_groups  share
entropy (nats a token)              entropy                              entropy                   linear
gradient norm                       grad_norm/.+                         grad_norm/policy          log
|engine − trainer| log-prob (nats)  logp_gap/(mean|p99|max)              logp_gap/mean             log
critic: explained variance          explained_variance                   explained_variance        variance
reflections (a response)            reflections                          reflections               share
tokens a second                     tokens_per_s                         tokens_per_s              linear
seconds a step                      time/(?!step).+                      time/step                 stacked
""".strip().splitlines()]
# A phase has the same colour in every run. One that is not here is black.
PHASES = {
    "rollout": "tab:blue", "critic": "tab:orange", "policy": "tab:green", "eval": "tab:red",
    "wait": "tab:purple", "sync": "tab:brown", "wake": "tab:pink", "sleep": "tab:gray", "pack": "tab:olive",
    "ref": "tab:cyan", "old_logp": "navy", "save": "gold", "report": "darkseagreen", "selfcheck": "thistle"}
LINES = "solid", "dotted", "dashed", "dashdot"  # of the metrics of a panel that has several recipes
WIDTH, HEIGHT = 572, 468  # of a panel, in pixels


def _curve(rows, key):
    """The values of one metric, step -> value. A p99 below its mean is NaN: under 1 % of the tokens then make
    up the mean, and the p99 may be as low as the histogram's first edge, 1e-9, where most tokens agree."""
    of_mean = re.sub("/p99$", "/mean", key)
    return {row["step"]: NAN if row[key] < row.get(of_mean, NAN) else row[key] for row in rows if key in row}


def _draw(axis, data, keys, scale):
    """Draw one panel: the metrics `keys` of all recipes (name -> rows of each of its runs). A recipe of
    several runs is their mean and a band. Notes on what is drawn, and what is not, stand below the axis."""
    metrics, notes = [key.partition("/")[2] or key for key in keys], ["step"]
    if len(data) > 1 and len(keys) > 1:
        notes += [_shorten(f"{line}: {metric}", 48) for line, metric in zip(LINES, metrics, strict=False)]
    for (i, (name, runs)), (j, key) in product(enumerate(data.items()), enumerate(keys)):
        points = band([_curve(rows, key) for rows in runs])
        if not points:  # GRPO has no critic
            continue
        steps, low, mean, high = zip(*points, strict=True)
        holes = any(map(math.isnan, mean))
        size = 4 if len(steps) < 12 else 2 if holes else 0  # a line has no point between two holes
        if len(data) == 1:
            axis.plot(steps, mean, "o-", markersize=size, color=f"C{j}", label=_shorten(metrics[j], 48))
        else:
            axis.plot(steps, mean, "o", markersize=size, color=f"C{i}", linestyle=LINES[j % 4],
                      label=_shorten(name, 48) if j == 0 else None)
        if len(runs) > 1:
            axis.fill_between(steps, low, high, color=axis.lines[-1].get_color(), alpha=0.2, linewidth=0)
        if key.endswith("/p99") and holes:
            notes.append("no p99 where 99 % of the tokens are below the mean")
        if scale == "variance" and min(low) < -1:  # a new critic starts far below
            notes.append(f"cut off below −1; lowest: {min(low):.2g}")
    axis.set_xlabel("\n".join(notes))
    if scale == "log":
        axis.set_yscale("log")
    elif scale == "variance":
        axis.set_ylim(-1.02, 1.02)
    elif scale == "share":
        axis.axhspan(0, 1, alpha=0)  # invisible: the axis reaches from 0 to 1, or further


def _draw_phases(axis, rows, keys):
    """Draw where a run's time goes: the seconds of each phase, stacked."""
    steps = [row for row in rows if "time/step" in row]
    seconds = [[row.get(key, 0.0) for row in steps] for key in keys]
    names = [key.removeprefix("time/") for key in keys]
    colours = [PHASES.get(name, "black") for name in names]
    axis.stackplot(_values_of(steps, "step"), seconds, labels=names, colors=colours)
    axis.set_xlabel("step")


def _figure(data, title, keys, scale, phases):
    """A panel as a figure, with `phases` that of a run's seconds. The legend stands above the axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 130, HEIGHT / 130), layout="constrained", dpi=130)
    axis = figure.add_subplot()
    if phases:
        _draw_phases(axis, *chain(*data.values()), keys)
    else:
        _draw(axis, data, keys, scale)
    if len(data) * len(keys) > 1:
        longest = max(map(len, axis.get_legend_handles_labels()[1]))
        columns = max(1, 52 // (longest + 5))  # a line has room for 52 characters
        figure.legend(loc="outside upper center", ncols=columns, fontsize=9, frameon=False, title=title,
                      title_fontsize=12)
    else:
        axis.set_title(title, fontsize=12)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def plot(runs: Sequence[Path], to: Path | None = None) -> dict[str, bytes]:
    """Draw the runs' curves over their steps. Returns each panel, title -> PNG, and writes all into the
    picture `to`, three in a row. Raises OSError or ValueError where it can't be written."""
    from PIL import Image

    data = {name + f" ({len(group)} runs)" * (len(group) > 1): [read_metrics(run) for run in group]
            for name, group in recipes(runs).items()}
    rows, single, drawn = list(chain(*chain(*data.values()))), len(runs) == 1, {}
    for title, of_single, of_several, scale in PANELS:
        keys, file = keys_of(rows, of_single if single else of_several), io.BytesIO()
        if keys:
            _figure(data, title, keys, scale, single and scale == "stacked").savefig(file)
            drawn[title] = file.getvalue()
    if to:
        high = max(1, math.ceil(len(drawn) / 3)) * HEIGHT  # a run that was stopped at once has no panel
        sheet = Image.new("RGB", (3 * WIDTH, high), "white")
        for i, png in enumerate(drawn.values()):
            sheet.paste(Image.open(io.BytesIO(png)), (i % 3 * WIDTH, i // 3 * HEIGHT))
        sheet.save(to)
    return drawn


# --- the story and the comparison, as text


def _shorten(text, most=66):
    """`text` on one line of at most `most` columns: its beginning and its end."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most // 2 - 1]} … {text[2 - most // 2:]}"


def facts(run: Path) -> dict[str, str]:
    """A run in short: what was trained, for how long, and its reward and held-out accuracy."""
    rows, config = read_metrics(run), _read_json(run / "config.json")
    seconds = _values_of(rows, "time/step")
    solved = [row["step"] for row in rows if row.get("reward", 0) >= 0.9]
    found = {
        "algorithm": f"{config.get('algo', '–')}, seed {config.get('seed', '–')}",
        "model": f"{config.get('model', '–')}",
        "steps": f"{len(seconds)} of {config.get('steps', '–')} in {sum(seconds) / 60:.1f} minutes",
        "seconds a step (median)": f"{statistics.median(seconds or [0]):.2f}",
        "step of first reward 0.9": f"{solved[0] if solved else '–'}",
        "alarms": f"{len(read_jsonl(run / 'alarms.jsonl'))}"}
    for key in keys_of(rows, "reward|eval/.+@.+"):
        values = [(row[key], row["step"]) for row in rows if key in row]
        best, step = max(values)
        found[key] = f"{values[0][0]:.3f} → {values[-1][0]:.3f} (best {best:.3f} at step {step})"
    return found


def _side_by_side(columns):
    """The fields of several dicts: field -> the text of its value in each of them."""
    return {field: [str(column.get(field, "–")) for column in columns] for field in chain(*columns)}


def differences(runs: Sequence[Path]) -> dict[str, list[str]]:
    """The fields in which the runs' configurations or package versions differ, with each run's value. --out
    does not count."""
    fields = _side_by_side([_read_json(run / "config.json") for run in runs])
    return {field: values for field, values in fields.items() if len(set(values)) > 1 and field != "out"}


def compare(runs: Sequence[Path]) -> str:
    """The runs side by side, as a text table: their facts, and the flags in which they differ."""
    fields = _side_by_side([{"": run} | facts(run) for run in runs])
    fields |= {f"--{field}": values for field, values in differences(runs).items()}
    table = [[field, *values] for field, values in fields.items()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def story(run: Path) -> str:
    """A run as text: its facts, three held-out problems with the base model's and the trained model's
    answers, the last alarms, and where the files are."""
    lines = [compare([run])]
    files = sorted((run / "eval").glob("step_*.jsonl"))
    if len(files) > 1:
        for base, trained in zip(read_jsonl(files[0])[:3], read_jsonl(files[-1]), strict=False):
            lines.append(f"\n{_shorten(base['problem'])}  (answer {base['gold']})")
            for name, r in ("base   ", base), ("trained", trained):
                lines.append(f"  {name} {'✓' if r['reward'] > 0 else '✗'} {_shorten(r['response'])}")
    for alarm in read_jsonl(run / "alarms.jsonl")[-5:]:
        lines.append(f"\n!! step {alarm['step']}: {alarm['text']}")
    return "\n".join(lines) + f"""

report   {run}/report.html
plot     {run}/plot.png
metrics  {run}/metrics.jsonl  (tensorboard --logdir {run}/tb)
model    {run}/export/policy"""


# --- the HTML pages

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<!--reload--><title>$title</title>
<style>
:root { color-scheme: light dark; --ink: light-dark(#1c1c1c, #e2e2e2); --paper: light-dark(#fff, #191919);
  --faint: light-dark(#555, #a8a8a8); --line: light-dark(#ccc, #444); --right: light-dark(#f1faf4, #17251c);
  --wrong: light-dark(#fdf3f3, #2b1a1a); --alarm: light-dark(#fff8ec, #2b2212) }
@media (prefers-color-scheme: dark) { img { filter: invert(.902) hue-rotate(180deg) } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1200px; margin: 0 auto; padding: 10px; overflow-wrap: anywhere }
h1, h2 { line-height: 1.2; margin: 1.6em 0 .5em } h1 { margin-top: .3em }
.grid { display: grid; gap: 10px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)) }
img { width: 100%; height: auto }
table { border-collapse: collapse; width: 100%; max-width: 860px } tr { border-top: 1px solid var(--line) }
td, th { vertical-align: top; text-align: left; padding: 3px 8px 3px 0 } th { overflow-wrap: break-word }
.numbers td + td, .numbers th + th { text-align: right } .numbers th:first-child { min-width: 5em }
small { color: var(--faint); display: block; white-space: pre-wrap } code { white-space: nowrap }
summary { cursor: pointer; margin: 6px 0; white-space: pre-wrap } details details { margin-left: 12px }
details:not([open]) > summary { max-height: 3em; overflow: hidden }
article { border: 1px solid var(--line); border-left: 6px solid; padding: 6px 10px; min-width: 0 }
.right { border-left-color: #18794e; background: var(--right) }
.wrong { border-left-color: #c62a2f; background: var(--wrong) }
.alarm { border-left-color: #ad5700; background: var(--alarm); margin: 6px 0 }
pre { white-space: pre-wrap; margin: 6px 0; font: 13px/1.45 monospace; max-height: 24em; overflow-y: auto }
@media (max-width: 600px) { td, th { font-size: 13px } }
</style>
<h1>$title</h1>
<p>$line</p>
"""
ALARM = '<article class="alarm"><b>⚠ step $step</b> $text</article>'
CURVE = '<img alt="$title" src="data:image/png;base64,$png">'
PROBLEM = "<summary>Gold answer $gold: $problem</summary>"
CARD = """<article class="$graded"><small>$set step $step</small><b>$graded: $reason</b> answer $answer,
reward $reward, $more$tokens tokens"""


def _page(title, line, sections, reload=0.0):
    """A page: its title, one line, and the sections that are not empty, heading -> HTML. With `reload` the
    browser loads it again after so many seconds."""
    again = f'<meta http-equiv="refresh" content="{math.ceil(reload)}">\n' if reload else ""
    body = "\n".join(f"<h2>{heading}</h2>\n{html}" for heading, html in sections.items() if html)
    return _fill(PAGE, title=title, line=line).replace("<!--reload-->", again, 1) + body + "</html>\n"


def _fill(template, **values):
    """The template with its $names replaced by the values, which are escaped."""
    return Template(template).substitute({name: escape(str(value)) for name, value in values.items()})


def _fold(summary, html, more=""):
    """HTML behind a line that opens it."""
    return f"<details{more}><summary>{summary}</summary>{html}</details>"


def _grid(parts):
    """Pieces of HTML side by side, as many as the window has room for."""
    return f'<div class="grid">{"".join(parts)}</div>'


def _curves(drawn):
    """Panels, title -> PNG, as HTML."""
    return _grid(_fill(CURVE, title=key, png=base64.b64encode(png).decode()) for key, png in drawn.items())


def _short(x):
    """A number with three digits, or all that stand before its point."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def _html_table(rows, *head):
    """Rows of values as an HTML table, escaped. What follows a line end in a cell is small print. With a
    `head`, all columns but the first are numbers."""
    lines = []
    for cells in filter(None, (head, *rows)):
        tag = "th" if cells is head else "td"
        texts = [re.sub("\n(.*)", r"<small>\1</small>", escape(str(cell)), flags=re.S) for cell in cells]
        lines.append("<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts))
    return f'<table class="{"numbers" if head else "texts"}">{"".join(lines)}</table>'


def _metrics_table(rows, pattern, *head):
    """The metrics whose names match `pattern` as an HTML table: name and meaning, and the numbers that `head`
    names: first, last, lowest, highest, mean, sum."""
    table, meanings = [], metric_meanings()
    for key in keys_of(rows, pattern):
        values = _values_of(rows, key)
        numbers = dict(first=values[0], last=values[-1], lowest=min(values), highest=max(values),
                       mean=statistics.mean(values), sum=sum(values))
        shown = [_short(numbers[name]) for name in head]
        meaning = next((text for name, text in meanings.items() if re.fullmatch(name, key)), "")
        table.append([f"{key}\n{meaning}", *shown])
    return _html_table(table, "metric", *head)


def _response(row):
    """A response as HTML. Where the row has log-probs and texts of its tokens, improbable ones are shaded."""
    texts, logp = row.get("texts") or [], row.get("logps") or []
    if not texts or len(texts) != len(logp):
        return escape(row["response"])
    shades = [round(1 - math.exp(min(x or 0, 0)), 1) for x in logp]
    tokens = groupby(zip(shades, texts, strict=True), key=itemgetter(0))
    return "".join(f'<span style="background: rgb(230 130 0 / {shade / 2})">'
                   f'{escape("".join(text for _, text in same))}</span>' for shade, same in tokens)


def _samples(run, kind, most):
    """(step, problem, answer) of up to 6 steps of `kind`, samples or eval: the latter two as HTML. Of the
    first `most` prompts of a step, the first right and the first wrong sample. Colour and word tell which."""
    files = sorted((run / kind).glob("step_*.jsonl"))
    for file in sorted({*files[::len(files) // 5 + 1], *files[-1:]}):
        step, seen = int(file.stem[5:]), set()
        for row in read_jsonl(file):
            row = {"set": "", "advantage": None, "graded": "right" if row["reward"] > 0 else "wrong", **row}
            which = (row["set"], row["prompt_id"], row["graded"])
            if row["prompt_id"] < most and which not in seen:
                seen.add(which)
                has = isinstance(row["advantage"], int | float)
                more = f"advantage {row['advantage']:.3g}, " if has else ""
                card = _fill(CARD, **row, step=step, more=more)
                yield step, _fill(PROBLEM, **row), f"{card}<pre>{_response(row)}</pre></article>"


def _problems(found, opened):
    """What `_samples` yields, problem by problem, each behind its text. The first `opened` are open."""
    cards, html = {}, ""
    for _, problem, card in found:
        cards.setdefault(problem, []).append(card)
    for i, (problem, answers) in enumerate(cards.items()):
        html += f"<details{' open' * (i < opened)}>{problem}{_grid(answers)}</details>"
    return html


def _viewer(run):
    """The samples of the training as HTML, the newest step first and open. A step that is opened closes the
    one before."""
    steps = {step: _problems(found, 2)
             for step, found in groupby(_samples(run, "samples", 8), key=itemgetter(0))}
    return "".join(_fold(f"step {step}", steps[step], ' name="step"' + " open" * (step == max(steps)))
                   for step in reversed(steps))


def write_report(run: Path, reload: float = 0.0) -> Path:
    """Write RUN/plot.png and RUN/report.html from the files in RUN. Returns the report's path. With `reload`
    a browser loads it again every so many seconds."""
    rows, found = read_metrics(run), facts(run)
    scores = [f"{key} {found[key].partition(' (')[0]}" for key in keys_of([found], "reward|eval/.+@.+")]
    line = " · ".join([found["algorithm"], found["steps"], *scores, f"alarms: {found['alarms']}"])
    alarms = "\n".join(_fill(ALARM, **r) for r in read_jsonl(run / "alarms.jsonl"))
    page = _page(run.resolve().name, line, {
        "Samples of the training": _viewer(run),
        "Alarms": re.sub("(--[a-z_]+)", r"<code>\1</code>", alarms) or "<p>None was raised.</p>",
        "Curves": _curves(plot([run], run / "plot.png")),
        "The same held-out problems as the run went on": _problems(_samples(run, "eval", 3), 1),
        "In numbers": _html_table(found.items()),
        "Seconds by phase": _metrics_table(rows, "time/.+", "sum", "mean", "highest"),
        "All values": _fold("Metrics: meaning and first, last, lowest and highest value", _metrics_table(
            rows, "(?!step$|time/).*", "first", "last", "lowest", "highest"))
        + _fold("Plan", _html_table(_read_json(run / "plan.json").items()))
        + _fold("Configuration", _html_table(_read_json(run / "config.json").items()))}, reload)
    part = run / f".report.html.{os.getpid()}"  # a browser that reloads never reads half a page
    part.write_text(page, encoding="utf-8", errors="replace")
    return part.replace(run / "report.html")


def watch(run: Path, seconds: float) -> None:
    """Write the report of a run every `seconds` seconds until the run ends, which removes its lock, or until
    ctrl-C. The page reloads itself, but the last one does not."""
    if (run / "lock").exists():
        print(f"{run}/report.html is written every {seconds:g} seconds until the run ends, or ctrl-C")
    stopped, due = [], 0.0
    # Not by KeyboardInterrupt: raised in a destructor, as of a figure, it is printed and lost.
    before = signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
    while (run / "lock").exists() and not stopped:
        if time.monotonic() >= due and read_metrics(run):
            write_report(run, seconds)
            due = time.monotonic() + seconds
        time.sleep(0.1)
    signal.signal(signal.SIGINT, before)


# --- the comparison of recipes


def _outcome(run, threshold):
    """What came of a run, for the table of recipes. None: it never did, or nothing was measured."""
    rows = read_metrics(run)
    rewards = _values_of(rows, "reward")
    accuracy = [[row[key] for key in keys_of([row], r"eval/.+/avg@\d+")] for row in rows]
    return {"reward, last 5 steps": statistics.fmean(rewards[-5:]) if rewards else None,
            "best held-out accuracy": max(map(statistics.fmean, filter(None, accuracy)), default=None),
            "minutes": sum(_values_of(rows, "time/step")) / 60,
            f"steps to reward {threshold:.3g}": next(
                (row["step"] for row in rows if row.get("reward", NAN) >= threshold), None)}


def _spread(values):
    """A number of each of a recipe's runs as text: their mean, and in small print range and count. None: a
    run that has none."""
    known = sorted(x for x in values if x is not None)
    if not known or len(values) == 1:
        return _short(known[0]) if known else "–"
    count = "" if len(known) == len(values) else f", {len(known)} of {len(values)} runs"
    return f"{_short(statistics.fmean(known))}\n{_short(known[0])} to {_short(known[-1])}{count}"


def write_comparison(runs: Sequence[Path], to: Path) -> None:
    """Write a page that compares recipes: a table, the curves, the flags in which they differ. Raises
    OSError."""
    named, table = recipes(runs), []
    best = max(chain(*(_values_of(read_metrics(run), "reward") for run in runs)), default=0)
    for name, group in named.items():
        outcomes = [_outcome(run, 0.9 * best) for run in group]
        seeds = ", ".join(str(_read_json(run / "config.json").get("seed", "–")) for run in group)
        table.append([f"{name}\nseed {seeds}", *(_spread([o[key] for o in outcomes]) for key in outcomes[0])])
    flags = differences([group[0] for group in named.values()]).items()
    line = "A band and small print: lowest and highest of a recipe's runs."
    page = _page(f"{len(runs)} runs of {len(named)} recipe{'s' * (len(named) > 1)}", line, {
        "Recipes": _html_table(table, "recipe", *outcomes[0]), "Curves": _curves(plot(runs)),
        "Flags": _fold("The flags in which the recipes differ", _html_table(
            [["", *named], *([f"--{field}", *values] for field, values in flags if field != "seed")]))})
    to.write_text(page, encoding="utf-8", errors="replace")


def main(argv: Sequence[str] | None = None) -> None:
    """The command. Exits with one line on a user's mistake."""
    usage = "python -m tools.report RUN [--watch SECONDS], or RUN RUN2 … [--out compare.png or compare.html]"
    parser = argparse.ArgumentParser("tools.report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run: train.py's --out")
    parser.add_argument("--out", type=Path, help="comparison of several runs: .png or .html")
    parser.add_argument("--watch", metavar="SECONDS", nargs="?", type=float, const=10.0,
                        help="write the report of a run again and again until the run ends")
    parser.error = lambda found: require(False, found, usage)
    with user_errors("tools.report"):
        args = parser.parse_args(argv)
        if args.watch is not None:
            require(len(args.runs) == 1 and args.watch > 0,
                    f"--watch {args.watch:g} with {len(args.runs)} runs", "one run and over 0 seconds")
            watch(args.runs[0], args.watch)
        for run in args.runs:
            require(bool(read_metrics(run)), f"{'no metrics in' if run.is_dir() else 'no folder'} {run}",
                    "the folder of a run that has logged a step (train.py's --out, with metrics.jsonl in it)")
        require(len(args.runs) > 1 or args.out is None, f"--out {args.out} with one run",
                "two runs or more; the report of one is written into its folder")
        if len(args.runs) == 1:
            write_report(*args.runs)
            print(story(*args.runs))
            return
        args.out = args.out or Path("compare.png")
        try:
            (write_comparison if args.out.suffix == ".html" else plot)(args.runs, args.out)
        except (OSError, ValueError) as e:  # a folder or a kind of picture that can't be written
            raise UserError(str(e)) from None
        print(f"{compare(args.runs)}\n\n{'page' if args.out.suffix == '.html' else 'plot'}  {args.out}")


if __name__ == "__main__":
    main()
