"""What a person sees: metrics.jsonl, TensorBoard, progress bars, the plot, and the story at the end.

    python log.py RUN        # draws RUN/plot.png again and tells the run's story

Rank 0 writes. Metrics are sums over counts, added up over packs and ranks before they are divided (`Meter`), so that no
mean is ever one of means.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
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
        peak = x.max() if len(x) else x.new_zeros(())
        self.peaks[name] = torch.maximum(self.peaks.get(name, peak), peak)
        count = torch.bincount(torch.bucketize(x, BINS.to(x.device)), minlength=len(BINS) + 1)
        self.bins[name] = self.bins.get(name, 0) + count

    def reduce(self, all_sum: Callable[[Tensor], Tensor], all_max: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The metrics over all ranks."""
        table = all_sum(torch.stack(list(self.sums.values()))).tolist()
        out = {n: total / count if count else total for n, (total, count) in zip(self.sums, table, strict=True)}
        for name, peak in self.peaks.items():
            share = all_sum(self.bins[name]).cumsum(0)
            at = int((share >= 0.99 * share[-1]).nonzero()[0])
            out[f"{name}/p99"] = min(float(BINS[min(at, len(BINS) - 1)]), float(all_max(peak)))
            out[f"{name}/max"] = float(all_max(peak))
        return out


class Logger:
    """Everything that a run writes besides checkpoints. `start`: the first step that will be logged; what a killed run had
    logged from there on is dropped, so that no step is there twice."""

    def __init__(self, out: Path, cfg: Any, main: bool, start: int, versions: Mapping[str, str]) -> None:
        self.out, self.steps, self.main = out, cfg.steps, main
        if not main:
            return
        for name in ("samples", "eval"):
            (out / name).mkdir(exist_ok=True)
        (out / "config.json").write_text(json.dumps(dataclasses.asdict(cfg) | {"versions": dict(versions)}, indent=1))
        rows = [r for r in read_metrics(out) if r["step"] < start]
        (out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        self.file = (out / "metrics.jsonl").open("ab", buffering=0)
        self.tb = board(out, start)
        self.unwritten: list[dict[str, float]] = []

    def say(self, text: str) -> None:
        """A line for people, from rank 0, that leaves bars alone."""
        if self.main:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def alarm(self, text: str) -> None:
        """A line that a person should see, if there is one to say."""
        if text:
            self.say(f"!! {text}")

    def dump(self, name: str, what: Any) -> Path:
        """Keep a rank's tensors for a look; returns the file."""
        path = self.out / f"{name}_rank{os.environ.get('RANK', '0')}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(what, path)
        return path

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics and its line."""
        if not self.main:
            return
        row = {"step": step} | {k: float(v) for k, v in metrics.items()}
        self.unwritten.append(row)
        try:
            while self.unwritten:
                self._write(self.unwritten[0])
                self.unwritten.pop(0)
        except OSError as e:  # a disk that is full now may not be so at the next step
            self.alarm(f"can't write the metrics of step {step} ({e.strerror}): they wait for the next")
            self.tb = None
        width = len(str(self.steps))
        parts = [f"step {step:{width}}/{self.steps}"]
        for key, form in (("reward", "reward {:.3f}"), ("response_len", "len {:.0f}"), ("entropy", "ent {:.2f}"),
                          ("truncated", "trunc {:.0%}"), ("logp_gap/mean", "gap {:.0e}"), ("time/step", "{:.1f} s")):
            if key in row:
                parts.append(form.format(row[key]))
        if "reward" in row:
            self.say("  ".join(parts))
        for key in [k for k in row if k.startswith("eval/") and "@" in k]:
            self.say(f"  {key} {row[key]:.3f}")

    def _write(self, row: Mapping[str, float]) -> None:
        """The row to TensorBoard, whose writer stays broken once it failed, and as a line, whole or not at all."""
        self.tb = self.tb or board(self.out, int(row["step"]))
        for k, v in row.items():
            self.tb.add_scalar(k, v, int(row["step"]))
        at, line = self.file.seek(0, os.SEEK_END), (json.dumps(row) + "\n").encode()
        if self.file.write(line) < len(line):
            self.file.truncate(at)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def rows(self, kind: str, step: int, rows: list[dict]) -> None:
        """Write rows to samples/ or eval/ step_NNNNNN.jsonl."""
        if self.main:
            path = self.out / kind / f"step_{step:06d}.jsonl"
            try:
                path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
            except OSError as e:
                self.alarm(f"can't write {path} ({e.strerror})")

    def bar(self, name: str, total: int) -> tqdm:
        """A bar over packs, on rank 0 and where there is a terminal."""
        return tqdm(total=total, desc=f"{name} epoch [1/1]", leave=False, dynamic_ncols=True,
                    disable=None if self.main else True, file=sys.stderr)

    def close(self) -> None:
        """Flush and draw the plot."""
        if self.main:
            if self.tb:
                with contextlib.suppress(OSError):
                    self.tb.close()
            self.file.close()
            plot(self.out)


def board(out: Path, start: int) -> Any:
    """TensorBoard's writer for a run that goes on at step `start`."""
    import logging

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(out / "tb"), purge_step=start)


def read_metrics(run: Path) -> list[dict]:
    """The run's metrics, a dict a step. A line that a crash cut short is left out."""
    path = run / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def plot(run: Path) -> Path:
    """Draw reward, accuracy, length, entropy, |Δlogp| and seconds by phase over the steps into RUN/plot.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_metrics(run)
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), constrained_layout=True)

    def draw(axis: Any, keys: Iterable[str], **style: Any) -> None:
        for key in keys:
            points = [(r["step"], r[key]) for r in rows if key in r]
            if points:
                axis.plot(*zip(*points, strict=True), label=key, **style)

    every = sorted({k for r in rows for k in r})
    panels = {
        "reward (mean of the step's samples)": ["reward"],
        "held-out accuracy": [k for k in every if k.startswith("eval/") and "avg@" in k],
        "response length (tokens)": ["response_len"],
        "entropy (nats a token)": ["entropy"],
        "|engine − trainer| log-prob (nats)": ["logp_gap/mean", "logp_gap/p99", "logp_gap/max"],
    }
    for axis, (title, keys) in zip(axes.flat, panels.items(), strict=False):
        draw(axis, keys, marker="o" if "accuracy" in title else None)
        axis.set_title(title, fontsize=10)
        if len(keys) > 1 or "accuracy" in title:
            axis.legend(fontsize=8)
    axes[0, 0].set_ylim(0, 1.02)
    axes[0, 1].set_ylim(0, 1.02)
    axes[1, 1].set_yscale("log")
    phases = [k for k in every if k.startswith("time/") and k != "time/step"]
    timed = [r for r in rows if "time/step" in r and "reward" in r]
    if timed:
        axes[1, 2].stackplot([r["step"] for r in timed], [[r.get(k, 0.0) for r in timed] for k in phases],
                             labels=[k.removeprefix("time/") for k in phases])
        axes[1, 2].legend(fontsize=7, loc="upper right")
    axes[1, 2].set_title("seconds a step, by phase", fontsize=10)
    for axis in axes.flat:
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(run / "plot.png", dpi=110)
    plt.close(figure)
    return run / "plot.png"


def story(run: Path) -> str:
    """The end of a run as text: accuracy before and after, three completions of each, and where everything lies."""
    rows = read_metrics(run)
    lines = []
    keys = sorted({k for r in rows for k in r if k.startswith("eval/") and "@" in k})
    if keys:
        wide = max(len(k) for k in keys)
        lines += ["", f"{'':{wide}}     base  trained"]
        for key in keys:
            seen = [r[key] for r in rows if key in r]
            lines.append(f"{key:{wide}}   {seen[0]:6.3f}   {seen[-1]:6.3f}")
    evals = sorted((run / "eval").glob("step_*.jsonl"))
    if len(evals) > 1:
        before, after = ([json.loads(line) for line in f.read_text().splitlines()[:3]] for f in (evals[0], evals[-1]))
        for b, a in zip(before, after, strict=False):
            lines += ["", f"{_short(b['problem'])}  (answer {b['gold']})"]
            lines += [f"  {name:8} {'✓' if r['reward'] > 0 else '✗'} {_short(r['response'])}"
                      for name, r in (("base", b), ("trained", a))]
    lines += ["", f"plot     {run / 'plot.png'}", f"metrics  {run / 'metrics.jsonl'}  (tensorboard --logdir {run / 'tb'})",
              f"model    {run / 'export' / 'policy'}"]
    return "\n".join(lines)


def _short(text: str, width: int = 66) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[:width // 2 - 1]} … {text[-(width // 2 - 2):]}"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "metrics.jsonl").is_file():
        sys.exit("log.py: needed: python log.py RUN, with RUN a folder that holds metrics.jsonl")
    plot(Path(sys.argv[1]))
    print(story(Path(sys.argv[1])))
