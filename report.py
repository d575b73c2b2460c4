"""What a person reads about a run: curves, a summary as text, a comparison of runs, and an HTML report.

    python report.py RUN              # writes RUN/plot.png and RUN/report.html, prints the run's story
    python report.py RUN RUN2 …       # prints the runs side by side, draws them into --out compare.png

Everything is read from the files of the run's folder, so it works while the run goes on and after a crash.
The report is one file that needs no network. What models wrote is escaped in it.
"""

import argparse
import base64
import io
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from string import Template

from configs import UserError, read_jsonl, require, user_errors
from log import metric_meanings, read_metrics


def keys_of(rows: Iterable[Mapping], pattern: str) -> list[str]:
    """The metrics whose whole name matches the regular expression, in the order of their first row."""
    return [name for name in dict.fromkeys(chain(*rows)) if re.fullmatch(pattern, name)]


def _values_of(rows, key):
    """The values of one metric, of the steps that have it."""
    return [row[key] for row in rows if key in row]


def _read_json(path):
    """What config.json or plan.json holds; {} where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


# --- curves

# Title; the metrics it draws of a single run; of several runs; its vertical axis.
PANELS = [re.split("  +", row) for row in r"""
reward                              reward                               reward                    share
held-out accuracy                   eval/.+/avg@\d+                      eval/.+/avg@\d+           share
response length (tokens)            response_len                         response_len              linear
shares                              truncated|uniform_groups|clip_share  truncated|uniform_groups  share
entropy (nats a token)              entropy                              entropy                   linear
gradient norm                       grad_norm/.+                         grad_norm/policy          log
|engine − trainer| log-prob (nats)  logp_gap/(mean|p99|max)              logp_gap/mean             log
critic: explained variance          explained_variance                   explained_variance        variance
seconds a step                      time/(?!step).+                      time/step                 stacked
""".strip().splitlines()]


def _draw(axis, runs, keys, scale):
    """Draw one panel: the metrics `keys` of all runs (name -> rows)."""
    for name, rows in runs.items():
        for key in keys:
            steps = [row["step"] for row in rows if key in row]
            if steps:
                axis.plot(steps, _values_of(rows, key), label=f"{name} {key}" if len(runs) > 1 else key,
                          marker="o" if len(steps) < 12 else "")
    if scale == "log":
        axis.set_yscale("log")
    elif scale == "variance":
        axis.set_ylim(-1.02, 1.02)  # a new critic starts far below
    elif scale == "share":
        axis.axhspan(0, 1, alpha=0)  # invisible: the axis reaches from 0 to 1, or further


def _draw_phases(axis, rows, keys):
    """Draw where a run's time goes: the seconds of each phase, stacked."""
    steps = [row for row in rows if "time/step" in row]
    seconds = [[row.get(key, 0.0) for row in steps] for key in keys]
    axis.stackplot(_values_of(steps, "step"), seconds, labels=[key.removeprefix("time/") for key in keys])


def plot(runs: Sequence[Path], to: Path) -> dict[str, bytes]:
    """Draw the runs' curves over their steps into the picture `to`, three panels in a row. Returns each
    panel, title -> PNG. Raises OSError or ValueError where the picture can't be written."""
    from matplotlib.figure import Figure
    from PIL import Image

    data = {str(run): read_metrics(run) for run in runs}
    single, panels = len(data) == 1, {}
    sheet = Image.new("RGB", (3 * 572, 3 * 429), "white")  # a panel has 572 × 429 pixels
    for title, of_single, of_several, scale in PANELS:
        keys = keys_of(chain(*data.values()), of_single if single else of_several)
        if not keys:
            continue
        figure, file = Figure(figsize=(4.4, 3.3), layout="tight", dpi=130), io.BytesIO()
        axis = figure.add_subplot(title=title, xlabel="step")
        if single and scale == "stacked":
            _draw_phases(axis, *data.values(), keys)
        else:
            _draw(axis, data, keys, scale)
        if len(data) * len(keys) > 1:
            axis.legend(fontsize=8)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(file)
        sheet.paste(Image.open(file), (len(panels) % 3 * 572, len(panels) // 3 * 429))
        panels[title] = file.getvalue()
    sheet.save(to)
    return panels


# --- the story and the comparison, as text


def _shorten(text):
    """`text` on one line of at most 66 columns: its beginning and its end."""
    text = " ".join(text.split())
    return text if len(text) <= 66 else f"{text[:32]} … {text[-31:]}"


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


# --- the HTML report

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 1200px;
  margin: 0 auto; padding: 12px 16px }
h1, h2, h3 { line-height: 1.2; margin: 1.6em 0 .5em }
h1 { margin-top: .3em; overflow-wrap: anywhere } h3 { font-size: 1em }
.grid { display: grid; gap: 10px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)) }
img { width: 100%; height: auto }
table { border-collapse: collapse; width: 100%; max-width: 860px } tr { border-top: 1px solid #ddd }
td, th { overflow-wrap: anywhere; vertical-align: top; text-align: left; padding: 3px 8px 3px 0 }
.numbers td + td, .numbers th + th { text-align: right } .numbers td + td, code { white-space: nowrap }
small { color: #555; display: block; white-space: pre-wrap; overflow-wrap: anywhere }
summary { cursor: pointer; font-weight: 600; padding: 6px 0 }
article { border: 1px solid #ccc; border-left: 6px solid; border-radius: 4px; padding: 6px 10px;
  min-width: 0; overflow-wrap: anywhere }
.right { border-left-color: #18794e; background: #f1faf4 }
.wrong { border-left-color: #c62a2f; background: #fdf3f3 }
.alarm { border-left-color: #ad5700; background: #fff8ec; margin: 6px 0 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0;
  font: 13px/1.45 ui-monospace, monospace; max-height: 24em; overflow-y: auto }
@media (max-width: 600px) {
  body { font-size: 14px; padding: 8px 10px } td, th { font-size: 13px; padding-right: 5px } }
</style>
<h1>$title</h1>
$facts
<h2>Alarms</h2>
$alarms
<h2>Curves</h2>
<div class="grid">$curves</div>
<h2>Plan and configuration</h2>
$plan
<details><summary>Every value of the configuration</summary>$config</details>
<h2>Seconds by phase</h2>
$seconds
<h2>Metrics</h2>
<details><summary>Meaning and first, last, lowest and highest value of all others</summary>$metrics</details>
<h2>The same held-out problems as the run went on</h2>
$held_out
<h2>Samples of the training</h2>
<details open><summary>Each problem's first right sample and first wrong sample</summary>$samples</details>
</html>
"""
ALARM = '<article class="alarm"><b>⚠ step $step</b> $text</article>'
CURVE = '<img alt="$title" src="data:image/png;base64,$png">'
PROBLEM = "<h3>Gold answer $gold</h3><pre>$problem</pre>"
CARD = """<article class="$graded"><small>$head</small><b>$graded: $reason</b> answer $answer, reward $reward,
$tokens tokens<pre>$response</pre></article>"""


def _fill(template, **values):
    """The template with its $names replaced by the values, which are escaped."""
    return Template(template).substitute({name: escape(str(value)) for name, value in values.items()})


def _html_table(rows, *head):
    """Rows of values as an HTML table, escaped. What follows a line end in a cell becomes small print. With a
    `head`, all columns but the first are numbers."""
    lines = []
    for cells in filter(None, (head, *rows)):
        tag = "th" if cells is head else "td"
        texts = [re.sub("\n(.*)", r"<small>\1</small>", escape(str(cell))) for cell in cells]
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
        shown = [f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}" for x in map(numbers.get, head)]
        meaning = next((text for name, text in meanings.items() if re.fullmatch(name, key)), "")
        table.append([f"{key}\n{meaning}", *shown])
    return _html_table(table, "metric", *head)


def _texts(run, kind, most):
    """Problems and the policy's answers as HTML, from up to 6 steps of `kind`, samples or eval: of the first
    `most` prompts of a step, the first right and the first wrong sample. Colour and word tell which."""
    files, problems = sorted((run / kind).glob("step_*.jsonl")), {}
    for file in sorted({*files[::len(files) // 5 + 1], *files[-1:]}):
        for r in read_jsonl(file):
            if r["prompt_id"] < most:
                graded = "right" if r["reward"] > 0 else "wrong"
                head = f"{r.get('set', '')} step {int(file.stem[5:])}"
                cards = problems.setdefault(_fill(PROBLEM, **r), {})
                cards.setdefault((file, graded), _fill(CARD, graded=graded, head=head, **r))
    return "".join(f'{problem}<div class="grid">{"".join(cards.values())}</div>'
                   for problem, cards in problems.items())


def write_report(run: Path) -> Path:
    """Write RUN/plot.png and RUN/report.html from the files in RUN. Returns the report's path."""
    rows = read_metrics(run)
    alarms = [_fill(ALARM, **r) for r in read_jsonl(run / "alarms.jsonl")]
    curves = [_fill(CURVE, title=title, png=base64.b64encode(png).decode())
              for title, png in plot([run], run / "plot.png").items()]
    page = Template(PAGE).substitute(
        title=escape(run.resolve().name),
        facts=_html_table(facts(run).items()),
        alarms=re.sub("(--[a-z_]+)", r"<code>\1</code>", "\n".join(alarms)) or "<p>None was raised.</p>",
        curves="\n".join(curves),
        plan=_html_table(_read_json(run / "plan.json").items()),
        config=_html_table(_read_json(run / "config.json").items()),
        seconds=_metrics_table(rows, "time/.+", "sum", "mean", "highest"),
        metrics=_metrics_table(rows, "(?!step$|time/).*", "first", "last", "lowest", "highest"),
        held_out=_texts(run, "eval", 3), samples=_texts(run, "samples", 8))
    (run / "report.html").write_text(page, encoding="utf-8", errors="replace")
    return run / "report.html"


def main(argv: Sequence[str] | None = None) -> None:
    """The command. Exits with one line on a user's mistake."""
    parser = argparse.ArgumentParser("report.py", description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run: train.py's --out")
    parser.add_argument("--out", type=Path, default=Path("compare.png"), help="picture of several runs")
    parser.error = lambda found: require(False, found, "python report.py RUN [RUN2 …] [--out compare.png]")
    with user_errors("report.py"):
        args = parser.parse_args(argv)
        for run in args.runs:
            require(bool(read_metrics(run)), f"{'no metrics in' if run.is_dir() else 'no folder'} {run}",
                    "the folder of a run that has logged a step (train.py's --out, with metrics.jsonl in it)")
        if len(args.runs) == 1:
            write_report(*args.runs)
            print(story(*args.runs))
            return
        try:
            plot(args.runs, args.out)
        except (OSError, ValueError) as e:  # a folder or a kind of picture that can't be written
            raise UserError(str(e)) from None
        print(f"{compare(args.runs)}\n\nplot  {args.out}")


if __name__ == "__main__":
    main()
