"""What a person sees: metrics.jsonl, TensorBoard, bars and alarms while a run goes on; curves, comparisons and a report after.

    python log.py RUN              # RUN/plot.png and RUN/report.html again, and the run's story
    python log.py RUN RUN2 …       # the runs side by side: a table, and --out compare.png

Rank 0 writes. Metrics are sums over counts, added up over packs and ranks before they are divided (`Meter`), so that no
mean is ever one of means. The report is one file that needs no network; what models wrote is escaped in it.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import errno
import io
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

BINS = torch.logspace(-9, 2, 1101)  # edges of the histogram behind a 99th percentile over all tokens of all ranks


class Meter:
    """Means to be: for each name a sum and a count, as float64 tensors, so that nothing waits for the device. Every rank
    adds the same names, if only zeros."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.sums: dict[str, Tensor] = {}
        self.peaks: dict[str, Tensor] = {}
        self.bins: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 1.0) -> None:
        """Add to the numerator and to the denominator of metric `name`. A pure sum has count 0."""
        pair = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=self.device).detach() for x in (total, count)])
        self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def spread(self, name: str, x: Tensor) -> None:
        """Mean, 99th percentile (within 2.3 %) and maximum of the positive values x: name/mean, name/p99, name/max."""
        self.add(f"{name}/mean", x.sum(), len(x))
        self.most(f"{name}/max", x.max() if len(x) else 0.0)
        count = torch.bincount(torch.bucketize(x, BINS.to(x.device)), minlength=len(BINS) + 1)
        self.bins[name] = self.bins.get(name, 0) + count

    def most(self, name: str, x: Tensor | float) -> None:
        """The largest x of metric `name`, over all ranks."""
        x = torch.as_tensor(x, dtype=torch.float64, device=self.device).detach()
        self.peaks[name] = torch.maximum(self.peaks.get(name, x), x)

    def reduce(self, all_sum: Callable[[Tensor], Tensor], all_max: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The metrics over all ranks: one sum and, if there is anything to it, one maximum."""
        sums = all_sum(torch.cat([*self.sums.values(), *(b.double() for b in self.bins.values())])).cpu()
        table, *bins = sums.split([2 * len(self.sums)] + [len(BINS) + 1] * len(self.bins))
        pairs = zip(self.sums, table.view(-1, 2).tolist(), strict=True)
        out = {name: total / count if count else total for name, (total, count) in pairs}
        if self.peaks:
            out |= dict(zip(self.peaks, all_max(torch.stack(list(self.peaks.values()))).tolist(), strict=True))
        for name, count in zip(self.bins, bins, strict=True):
            share = count.cumsum(0)
            at = int((share >= 0.99 * share[-1]).nonzero()[0])
            out[f"{name}/p99"] = min(float(BINS[min(at, len(BINS) - 1)]), out[f"{name}/max"])
        return out


class Logger:
    """Everything that a run writes besides checkpoints. `start`: the first step that will be logged; what a killed run had
    logged from there on is dropped, so that no step is there twice."""

    def __init__(self, out: Path, cfg: Any, main: bool, start: int, versions: Mapping[str, str]) -> None:
        self.out, self.cfg, self.main, self.next = out, cfg, main, start
        if not main:
            return
        for name in ("samples", "eval"):
            (out / name).mkdir(exist_ok=True)
        (out / "config.json").write_text(json.dumps(dataclasses.asdict(cfg) | {"versions": dict(versions)}, indent=1))
        self.files = {}
        for name in ("metrics", "alarms"):
            rows = [r for r in read_rows(out / f"{name}.jsonl") if r["step"] < start]
            (out / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
            self.files[name] = (out / f"{name}.jsonl").open("ab", buffering=0)
        self.seen = [r for r in read_metrics(out) if "reward" in r]
        self.tb = board(out, start)
        self.unwritten: list[dict[str, float]] = []
        self.steps = self.bar("Step", cfg.steps, start)

    def say(self, text: str) -> None:
        """A line for people, from rank 0, that leaves bars alone."""
        if self.main:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def plan(self, rows: Mapping[str, Any]) -> None:
        """Keep the run's plan for the report."""
        if self.main:
            (self.out / "plan.json").write_text(json.dumps({k: str(v) for k, v in rows.items()}, indent=1))

    def alarm(self, text: str, step: int | None = None) -> None:
        """A line that a person should see, if there is one to say; kept in alarms.jsonl too."""
        if text and self.main:
            self.say(f"!! {text}" if step is None else f"!! step {step}: {text}")
            with contextlib.suppress(OSError):
                append(self.files["alarms"], {"step": self.next if step is None else step, "text": text})

    def dump(self, name: str, what: Any) -> Path:
        """Keep a rank's tensors for a look; returns the file."""
        path = self.out / f"{name}_rank{os.environ.get('RANK', '0')}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(what, path)
        return path

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics, its line, and the alarms that it raises."""
        if not self.main:
            return
        row = {"step": step} | {k: float(v) for k, v in metrics.items()}
        self.unwritten.append(row)
        try:
            while self.unwritten:
                self._write(self.unwritten[0])
                self.unwritten.pop(0)
        except OSError as e:  # a disk that is full now may not be so at the next step
            self.alarm(f"can't write its metrics ({e.strerror}): they wait for the next", step)
            self.tb = None
        self.next = step + 1
        width = len(str(self.cfg.steps))
        parts = [f"step {step:{width}}/{self.cfg.steps}"]
        for key, form in (("reward", "reward {:.3f}"), ("response_len", "len {:.0f}"), ("entropy", "ent {:.2f}"),
                          ("truncated", "trunc {:.0%}"), ("logp_gap/mean", "gap {:.0e}"), ("time/step", "{:.1f} s")):
            if key in row:
                parts.append(form.format(row[key]))
        if "reward" in row:
            self.say("  ".join(parts))
        for key in [k for k in row if k.startswith("eval/") and "@" in k]:
            self.say(f"  {key} {row[key]:.3f}")
        if "reward" in row:
            self.seen.append(row)
            for text in begun(self.seen, self.cfg):
                self.alarm(text, step)
            self.steps.set_postfix(reward=f"{row['reward']:.3f}", refresh=False)
            self.steps.update()

    def _write(self, row: Mapping[str, float]) -> None:
        """The row to TensorBoard, as one event, and to metrics.jsonl. A writer stays broken once it failed."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.tb = self.tb or board(self.out, int(row["step"]))
        values = [Summary.Value(tag=k, simple_value=v) for k, v in row.items()]
        self.tb.file_writer.add_summary(Summary(value=values), int(row["step"]))
        append(self.files["metrics"], row)

    def rows(self, kind: str, step: int, rows: list[dict]) -> None:
        """Write rows to samples/ or eval/ step_NNNNNN.jsonl."""
        if self.main:
            path = self.out / kind / f"step_{step:06d}.jsonl"
            try:
                path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
            except OSError as e:
                self.alarm(f"can't write {path} ({e.strerror})")

    def bar(self, name: str, total: int, done: int = 0) -> tqdm:
        """A bar over `total`, on rank 0 and where there is a terminal; below the bar over steps."""
        return tqdm(total=total, initial=done, desc=name, leave=False, dynamic_ncols=True,
                    disable=None if self.main else True, file=sys.stderr)

    def close(self) -> None:
        """Flush; draw the plot and write the report."""
        if self.main:
            self.steps.close()
            if self.tb:
                with contextlib.suppress(OSError):
                    self.tb.close()
            for file in self.files.values():
                file.close()
            report(self.out)


def append(file: io.FileIO, row: Mapping) -> None:
    """The row as a line, whole or not at all. Raises OSError."""
    at, line = file.seek(0, os.SEEK_END), (json.dumps(row) + "\n").encode()
    if file.write(line) < len(line):
        file.truncate(at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def board(out: Path, start: int) -> Any:
    """TensorBoard's writer for a run that goes on at step `start`."""
    import logging

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(out / "tb"), purge_step=start)


def read_rows(path: Path, starts: tuple[str, ...] | None = None) -> list[dict]:
    """A .jsonl file's rows, or those whose line starts so; none where there is no file. A line that a crash cut short is left
    out."""
    rows = []
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:  # splitlines() would cut at U+2028 too
            for line in lines:
                if starts is None or line.startswith(starts):
                    with contextlib.suppress(json.JSONDecodeError):
                        rows.append(json.loads(line))
    return rows


def read_metrics(run: Path, steps: Collection[int] | None = None) -> list[dict]:
    """The run's metrics, a dict a step; of these `steps` alone, without the time that reading a long run's takes."""
    return read_rows(run / "metrics.jsonl", None if steps is None else tuple(f'{{"step": {s},' for s in steps))


def read_json(path: Path) -> dict:
    """What config.json or plan.json holds; nothing where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


# --- alarms

LAST = 5  # steps that an alarm's numbers are means over, so that one odd step raises none
QUIET = 10  # steps that an alarm must have been gone for to be raised again


def alarms(rows: Sequence[Mapping[str, float]], cfg: Any) -> dict[str, str]:
    """What is wrong after the training steps `rows` (metrics that a step lacks are passed over): for each thing its name and
    a line with the number, its meaning and the knob. Most of it is as it should be once the reward is near its top, 1."""
    def mean(key: str, end: int = len(rows)) -> float:
        last = [r[key] for r in rows[max(end - LAST, 0):end] if key in r]
        return sum(last) / len(last) if last else float("nan")  # which compares false

    reward, entropy, length, truncated = mean("reward"), mean("entropy"), mean("response_len"), mean("truncated")
    uniform, clipped, gap, ess = mean("uniform_groups"), mean("clip_share"), mean("logp_gap/mean"), mean("ess")
    errors, timeouts = mean("grade/error"), mean("grade/timeout")
    first = next((r["entropy"] for r in rows if "entropy" in r), float("nan"))
    longest = max(range(len(rows)), key=lambda i: rows[i].get("response_len", 0.0), default=-1)
    most, then = max((r.get("response_len", 0.0) for r in rows), default=0.0), mean("reward", longest + 1)
    explained = max((r.get("explained_variance", 1.0) for r in rows[20:][-10:]), default=1.0)
    low = reward < 0.9
    found = {
        "entropy": (low and (entropy < 0.1 * first or entropy < 0.01), f"entropy is {entropy:.2g} nats a token, {first:.2g} at "
                    f"the first step, at reward {reward:.2f}: the policy has nearly stopped exploring; a lower --policy_lr, a "
                    "--clip_high of 0.28, or a small --entropy_coef"),
        "length": (low and length < most / 3 and reward <= then, f"responses have {length:.0f} tokens, at most they had "
                   f"{most:.0f}, and reward went from {then:.2f} to {reward:.2f}: the policy writes less and gains nothing; "
                   "a lower --policy_lr, and a look at samples/"),
        "truncated": (truncated > 0.5, f"{truncated:.0%} of the responses are cut at --max_response_len {cfg.max_response_len} "
                      "and so score 0: a larger one, or a --stop that ends what is seen in samples/"),
        "uniform": (low and uniform > 0.8 and cfg.samples_per_prompt > 1, f"{uniform:.0%} of the prompts have samples that all "
                    f"score the same, at reward {reward:.2f}: there is little to tell better from worse by; "
                    f"{'easier' if reward < 0.5 else 'harder'} problems, or more --samples_per_prompt"),
        "critic": (len(rows) >= 30 and explained <= 0 and 0.05 < reward < 0.9, "for 10 steps the critic explained none of the "
                   f"returns' variance ({explained:.2g} at best): its advantages are noise; a higher --critic_lr, more "
                   "--critic_updates, or --freeze_policy_steps to train it ahead"),
        "clip": (clipped > 0.3, f"{clipped:.0%} of the tokens are clipped: the updates go further than the step's samples can "
                 f"tell; a lower --policy_lr, or fewer --policy_updates ({cfg.policy_updates} now)"),
        "gap": (gap > 0.1 * cfg.max_logp_gap, f"engine and trainer differ by {gap:.2g} nats a token, and the run stops at "
                f"--max_logp_gap {cfg.max_logp_gap:g}: --dtype float32 tells whether it is rounding; if it grows, it isn't"),
        "ess": (ess < 0.9, f"the effective sample size is {ess:.0%}: engine and trainer disagree so much that few tokens carry "
                f"the update; --dtype float32 tells whether it is rounding, --tis_clip ({cfg.tis_clip} now) caps their weight"),
        "grading": (errors + timeouts > 0.05, f"{errors + timeouts:.0%} of the answers weren't graded ({errors:.0%} errors, "
                    f"{timeouts:.0%} timeouts) and score 0: mend --reward, or raise --grade_deadline {cfg.grade_deadline:g}"),
    }
    return {name: text for name, (wrong, text) in found.items() if wrong}


def begun(rows: Sequence[Mapping[str, float]], cfg: Any) -> list[str]:
    """The alarms that the last row raises: those that held at none of the QUIET steps before. A function of the rows alone, so
    a resumed run raises what one that was never stopped does."""
    now = alarms(rows, cfg)
    for back in range(1, min(QUIET, len(rows) - 1) + 1):
        if now:
            before = alarms(rows[:-back], cfg)
            now = {name: text for name, text in now.items() if name not in before}
    return list(now.values())


# --- curves

PANELS = (  # title; the metrics of one run that it draws; those of several
    ("reward", "reward", "reward"),
    ("held-out accuracy", r"eval/.+/avg@\d+", r"eval/.+/avg@\d+"),
    ("response length (tokens)", "response_len", "response_len"),
    ("shares", "truncated|uniform_groups|clip_share", "truncated|uniform_groups"),
    ("entropy (nats a token)", "entropy", "entropy"),
    ("gradient norm", "grad_norm/.+", "grad_norm/policy"),
    ("|engine − trainer| log-prob (nats)", "logp_gap/(mean|p99|max)", "logp_gap/mean"),
    ("critic: explained variance", "explained_variance", "explained_variance"),
    ("seconds a step", "time/(?!step).+", "time/step"),
)


def keys_of(rows: Iterable[Mapping], pattern: str) -> list[str]:
    """The metrics whose whole name matches, in the order that they came in."""
    return [k for k in dict.fromkeys(k for r in rows for k in r) if re.fullmatch(pattern, k)]


def names_of(runs: Sequence[Path]) -> list[str]:
    """The runs' folder names, or their paths where names are the same."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def plot(runs: Sequence[Path], to: Path) -> dict[str, bytes]:
    """Draw the runs' curves over their steps into the picture `to`; returns the panels of a single one as PNG, by title."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    data, one = dict(zip(names_of(runs), map(read_metrics, runs), strict=True)), len(runs) == 1
    panels = [(title, p if one else q) for title, p, q in PANELS if any(keys_of(rows, p) for rows in data.values())]
    high = max(-(-len(panels) // 3), 1)
    figure, axes = plt.subplots(high, 3, figsize=(13, 3.2 * high), squeeze=False, layout="constrained", dpi=130)
    for axis in axes.flat[len(panels):]:
        axis.set_axis_off()
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    for axis, (title, pattern) in zip(axes.flat, panels, strict=False):
        keys = keys_of([r for rows in data.values() for r in rows], pattern)
        for i, rows in enumerate(data.values()):
            if one and title == "seconds a step":
                timed = [r for r in rows if "reward" in r]
                axis.stackplot([r["step"] for r in timed], [[r.get(k, 0.0) for r in timed] for k in keys],
                               labels=[k.removeprefix("time/") for k in keys])
                continue
            for j, key in enumerate(keys):
                points = [(r["step"], r[key]) for r in rows if key in r]
                axis.plot([x for x, _ in points], [y for _, y in points], color=f"C{j if one else i}", label="" if i else key,
                          linestyle="-" if one else ("-", "--", ":", "-.")[j % 4], marker="o" if len(points) < 12 else "", ms=4)
        values = [v for line in axis.lines for v in line.get_ydata()]
        if title == "critic: explained variance":
            axis.set_ylim(-1.02, 1.02)  # the first steps of a new critic are far below
        elif values and title in ("reward", "held-out accuracy", "shares") and min(values) >= 0 and max(values) <= 1:
            axis.set_ylim(-0.02, 1.02)
        elif "norm" in title or "log-prob" in title:
            axis.set_yscale("log")
        if len(keys) > 1 or title == "held-out accuracy":
            legend = axis.legend(fontsize=8)
            for line in legend.get_lines() if not one else ():  # a colour is a run, a stroke a metric
                line.set_color("black")
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step", fontsize=9)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if not one:
        figure.legend([plt.Line2D([], [], color=f"C{i}", linewidth=3) for i in range(len(data))], list(data),
                      loc="outside upper center", ncols=min(len(data), 4))
    figure.savefig(to)
    pictures = {}
    for axis, (title, _) in zip(axes.flat, panels if one else (), strict=False):
        image = np.asarray(figure.canvas.buffer_rgba())
        left, low, right, top = (round(v) for v in axis.get_tightbbox().padded(6).extents)
        file = io.BytesIO()
        plt.imsave(file, image[max(len(image) - top, 0):len(image) - max(low, 0), max(left, 0):right], format="png")
        pictures[title] = file.getvalue()
    plt.close(figure)
    return pictures


# --- the story and the comparison, as text


def story(run: Path) -> str:
    """The end of a run as text: accuracy before and after, three completions of each, and where everything lies."""
    rows = read_metrics(run)
    lines = []
    keys = sorted(keys_of(rows, "eval/.*@.*"))
    if keys:
        wide = max(len(k) for k in keys)
        lines += ["", f"{'':{wide}}     base  trained"]
        for key in keys:
            seen = [r[key] for r in rows if key in r]
            lines.append(f"{key:{wide}}   {seen[0]:6.3f}   {seen[-1]:6.3f}")
    evals = sorted((run / "eval").glob("step_*.jsonl"))
    if len(evals) > 1:
        for b, a in zip(*(read_rows(f)[:3] for f in (evals[0], evals[-1])), strict=False):
            lines += ["", f"{_short(b['problem'])}  (answer {b['gold']})"]
            lines += [f"  {name:8} {'✓' if r['reward'] > 0 else '✗'} {_short(r['response'])}"
                      for name, r in (("base", b), ("trained", a))]
    raised = read_rows(run / "alarms.jsonl")
    lines += ["", f"alarms   {len(raised)}"] + [f"  step {r['step']}: {_short(r['text'], 100)}" for r in raised[-5:]]
    lines += ["", f"report   {run / 'report.html'}", f"plot     {run / 'plot.png'}",
              f"metrics  {run / 'metrics.jsonl'}  (tensorboard --logdir {run / 'tb'})", f"model    {run / 'export' / 'policy'}"]
    return "\n".join(lines)


def _short(text: str, width: int = 66) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[:width // 2 - 1]} … {text[-(width // 2 - 2):]}"


def differences(runs: Sequence[Path]) -> dict[str, list[str]]:
    """The fields in which the runs' configs and versions differ, each with the runs' values; --out isn't one."""
    configs = [read_json(run / "config.json") for run in runs]
    configs = [c | {f"versions/{k}": v for k, v in c.get("versions", {}).items()} for c in configs]
    fields = [k for k in dict.fromkeys(k for c in configs for k in c) if k not in ("out", "versions")]
    values = {k: [json.dumps(c[k], ensure_ascii=False) if k in c else "–" for c in configs] for k in fields}
    return {k: v for k, v in values.items() if len(set(v)) > 1}


def compare(runs: Sequence[Path]) -> str:
    """The runs side by side, as a table: accuracy, steps, speed, and where their configs differ."""
    every = [read_metrics(run) for run in runs]
    table = {"": names_of(runs)}
    for key in sorted(keys_of([r for rows in every for r in rows], "eval/.*@.*")):
        seen = [[(r[key], r["step"]) for r in rows if key in r] for rows in every]
        table[f"{key}, last"] = [f"{s[-1][0]:.3f}" if s else "–" for s in seen]
        table[f"{key}, best"] = [f"{max(s)[0]:.3f} at step {max(s)[1]}" if s else "–" for s in seen]
    trained = [[r for r in rows if "reward" in r] for rows in every]
    table["steps"] = [str(len(rows)) for rows in trained]
    table["steps to reward 0.9"] = [str(next((r["step"] for r in rows if r["reward"] >= 0.9), "–")) for rows in trained]
    table["seconds a step (median)"] = [f"{statistics.median([r['time/step'] for r in rows] or [0]):.2f}" for rows in trained]
    table["alarms"] = [str(len(read_rows(run / "alarms.jsonl"))) for run in runs]
    table |= {f"--{k}": v for k, v in differences(runs).items()}
    wide = [max(map(len, column)) for column in zip(*([k, *v] for k, v in table.items()), strict=True)]
    return "\n".join("  ".join(f"{c:{w}}" for c, w in zip([k, *v], wide, strict=True)).rstrip() for k, v in table.items())


# --- the report

PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 1200px; margin: 0 auto;
  padding: 12px 16px }
h1, h2, h3 { line-height: 1.2; margin: 1.6em 0 .5em } h1 { margin-top: .3em; overflow-wrap: anywhere } h3 { font-size: 1em }
.grid { display: grid; gap: 10px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)) }
img { width: 100%; height: auto }
table { border-collapse: collapse; width: 100%; max-width: 860px } tr { border-top: 1px solid #ddd }
td, th { overflow-wrap: anywhere; vertical-align: top; text-align: left; padding: 3px 8px 3px 0 }
.n { text-align: right } .n, code { white-space: nowrap }
.small { border: 0; font-size: 13px; color: #555 } .small td { padding-top: 0 }
small { color: #555; display: block; white-space: pre-wrap; overflow-wrap: anywhere }
summary { cursor: pointer; font-weight: 600; padding: 6px 0 }
article { border: 1px solid #ccc; border-left: 6px solid; border-radius: 4px; padding: 6px 10px; min-width: 0;
  overflow-wrap: anywhere }
.right { border-left-color: #18794e; background: #f1faf4 } .wrong { border-left-color: #c62a2f; background: #fdf3f3 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0; font: 13px/1.45 ui-monospace, monospace; max-height: 24em;
  overflow-y: auto } .alarm { border-left-color: #ad5700; background: #fff8ec; margin: 6px 0 }
@media (max-width: 600px) { body { font-size: 14px; padding: 8px 10px } td, th { font-size: 13px; padding-right: 5px } }
</style>
<h1>$title</h1>
$body
</html>
""")


def report(run: Path) -> Path:
    """Write RUN/report.html, with the curves that it draws into RUN/plot.png; returns it."""
    rows, config, plan = read_metrics(run), read_json(run / "config.json"), read_json(run / "plan.json")
    raised = [f'<article class="alarm"><b>⚠ step {r["step"]}</b> {escape(r["text"])}</article>'
              for r in read_rows(run / "alarms.jsonl")]
    raised = [re.sub("(--[a-z_]+)", r"<code>\1</code>", text) for text in raised]  # a flag isn't broken at its hyphens
    curves = [f'<img alt="{escape(title)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
              for title, png in plot([run], run / "plot.png").items()]
    metrics, means = [], glossary()
    for key in keys_of(rows, "(?!step$).*"):
        seen = [r[key] for r in rows if key in r]
        fitting = [pattern for pattern in means if re.search(f"(^|/){pattern}$", key)]
        metrics.append((f"{key}\n{means.get(max(fitting, key=len, default=''), '')}",
                        *(f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.3g}" for v in (seen[0], seen[-1], min(seen), max(seen)))))
    body = [
        html_table(None, summary(rows, config).items()),
        "<h2>Alarms</h2>", *(raised or ["<p>None was raised.</p>"]),
        '<h2>Curves</h2><div class="grid">', *curves, "</div>",
        "<h2>Plan</h2>" if plan else "<h2>Configuration</h2>", html_table(None, plan.items()),
        "<details><summary>Every value of the configuration</summary>",
        html_table(None, ((k, json.dumps(v, ensure_ascii=False)) for k, v in config.items())), "</details>",
        "<h2>Seconds by phase</h2>", html_table(("phase", "in all", "a step", "share"), timings(rows)),
        "<h2>Metrics</h2><details><summary>First, last, lowest and highest of each</summary>",
        html_table(("metric", "first", "last", "lowest", "highest"), metrics), "</details>", *texts(run)]
    page = PAGE.substitute(title=escape(run.resolve().name), body="\n".join(body))
    (run / "report.html").write_text(page, encoding="utf-8", errors="replace")
    return run / "report.html"


def summary(rows: Sequence[Mapping], config: Mapping) -> dict[str, str]:
    """A run in a few lines: what was trained, for how long, to what."""
    trained = [r for r in rows if "reward" in r]
    minutes = sum(r["time/step"] for r in trained) / 60
    facts = {"algorithm": f"{config.get('algo', '–')}, seed {config.get('seed', '–')}", "model": str(config.get("model", "–")),
             "steps": f"{len(trained)} of {config.get('steps', '–')} in {minutes:.1f} minutes"}
    for key in ["reward"] + sorted(keys_of(rows, "eval/.*@.*")):
        seen = [r[key] for r in rows if key in r]
        if seen:
            facts[key] = f"{seen[0]:.3f} → {seen[-1]:.3f}" + (f" (best {max(seen):.3f})" if len(seen) > 2 else "")
    return facts


def timings(rows: Sequence[Mapping]) -> Iterator[tuple[str, ...]]:
    """Seconds of each phase over the run, a step that had it, and its share."""
    rows = [r for r in rows if "time/step" in r]
    total = sum(r["time/step"] for r in rows) or 1.0
    for key in keys_of(rows, "time/(?!step).*") + ["time/step"]:
        seen = [r[key] for r in rows if key in r]
        name = key.removeprefix("time/").replace("step", "whole steps")
        yield name, f"{sum(seen):.1f}", f"{sum(seen) / max(len(seen), 1):.2f}", f"{sum(seen) / total:.0%}"


def texts(run: Path) -> Iterator[str]:
    """What the policy wrote, from up to 6 steps: the same held-out problems over and over, and samples of its training."""
    evals: dict[tuple, list[str]] = {}
    for step, rows in some_steps(run / "eval"):
        for r in rows:
            if r["slot"] < 3 and r["index"] == 0:
                evals.setdefault((r["set"], r["slot"], r["problem"], r["gold"]), []).append(card(r, f"step {step}"))
    if evals:
        yield "<h2>The same held-out problems as the run went on</h2>"
    for (name, _, problem, gold), cards in evals.items():
        yield f'<h3>{escape(name)}: gold answer {escape(str(gold))}</h3><pre>{escape(problem)}</pre><div class="grid">'
        yield from cards
        yield "</div>"
    samples = list(some_steps(run / "samples"))
    if samples:
        yield "<h2>Samples of the training</h2><p>Of more than 16, each problem's first right one and first wrong one.</p>"
    for step, rows in samples:
        first = {(r["slot"], r["reward"] > 0): r for r in reversed(rows)}
        shown = rows if len(rows) <= 16 else sorted(first.values(), key=lambda r: (r["slot"], r["index"]))
        is_open = " open" * (step in (samples[0][0], samples[-1][0]))
        yield f'<details{is_open}><summary>Step {step}: {len(shown)} of {len(rows)} kept</summary><div class="grid">'
        yield from (card(r, f"{r['problem']}\ngold answer {r['gold']}") for r in shown)
        yield "</div></details>"


def some_steps(folder: Path) -> Iterator[tuple[int, list[dict]]]:
    """(step, rows) of up to 6 of the folder's files, the first and the last among them."""
    files = sorted(folder.glob("step_*.jsonl"))
    for i in sorted({round(i * (len(files) - 1) / 5) for i in range(6)}) if files else ():
        yield int(files[i].stem.removeprefix("step_")), read_rows(files[i])


def card(r: Mapping[str, Any], head: str) -> str:
    """A graded sample as a box, right or wrong by colour, sign and word."""
    right, answer = r["reward"] > 0, r["answer"] or "none"
    facts = f"answer {answer}, reward {r['reward']:g}, {r['tokens']} tokens"
    return (f'<article class="{"right" if right else "wrong"}"><small>{escape(head)}</small><b>{"✓" if right else "✗"} '
            f"{escape(r['reason'])}</b> {escape(facts)}<pre>{escape(r['response'])}</pre></article>")


def html_table(head: Sequence[str] | None, rows: Iterable[Sequence[str]]) -> str:
    """Cells are escaped; all but a row's first are numbers where there is a head; what follows a line's end is small print."""
    kind, lines = ' class="n"' if head else "", []
    for cells, tag in [*([(head, "th")] if head else []), *((r, "td") for r in rows)]:
        first, _, small = cells[0].partition("\n")
        lines.append(f"<tr><{tag}>{escape(first)}</{tag}>" + "".join(f"<{tag}{kind}>{escape(c)}</{tag}>" for c in cells[1:]))
        if small:
            lines.append(f'<tr class="small"><td colspan="{len(cells)}">{escape(small)}')
    return "<table>" + "\n".join(lines) + "</table>"


def glossary() -> dict[str, str]:
    """Pattern of the end of a metric's name -> meaning, by the README's table of metrics, units and meanings."""
    readme, found = Path(__file__).with_name("README.md"), {}
    for line in readme.read_text(encoding="utf-8").splitlines() if readme.is_file() else ():
        cells = [c.strip() for c in re.split(r"(?<!\\)\|", line)]
        for name in re.findall("`(.+?)`", cells[1]) if len(cells) == 5 and cells[1].startswith("`") else ():
            pattern = re.sub("<.+?>", "[^/]+", re.escape(name.lstrip("/")))
            found.setdefault(pattern, f"{cells[3]} ({cells[2]})".replace("`", "").replace("\\|", "|"))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """`python log.py RUN [RUN2 …]`. Exits with one line on a mistake."""
    parser = argparse.ArgumentParser(prog="log.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="*", type=Path, help="folder of a run: train.py's --out")
    parser.add_argument("--out", type=Path, default=Path("compare.png"), help="picture of several runs")
    parser.error = lambda found: sys.exit(f"log.py: {found}; needed: python log.py RUN [RUN2 …] [--out compare.png]")
    args = parser.parse_args(argv)
    if not args.runs:
        parser.error("no run given")
    for run in args.runs:
        if not read_metrics(run):
            sys.exit(f"log.py: {'no metrics in' if run.is_dir() else 'no folder'} {run}; needed: the folder of a run that has "
                     "logged a step (train.py's --out, with metrics.jsonl in it)")
    try:
        if len(args.runs) == 1:
            report(args.runs[0])
            print(story(args.runs[0]))
        else:
            plot(args.runs, args.out)
            print(compare(args.runs) + f"\n\nplot  {args.out}")
    except (OSError, ValueError) as e:
        sys.exit(f"log.py: {e}")


if __name__ == "__main__":
    main()
