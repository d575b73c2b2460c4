"""Output of a run, except for checkpoints: metrics, TensorBoard, trackers, samples, progress bars, alarms.

Every rank adds to its own `Meter`. `Meter.reduce` sums numerators and counts over the ranks, and then
divides. So a metric is never a mean of means. On rank 0, the `Logger` writes into the run's folder.
docs/metrics.md tells the meaning of every metric. tools/report.py draws the plots and writes the HTML report.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

import dist
from configs import Config, UserError, read_jsonl, replace_text
from data import Pack, Sample, group_by_prompt
from grading.worker import REASONS

NAN = float("nan")


class Meter:
    """Collects the metrics of a step on one rank. The sums are float64 tensors on `device`, so adding never
    waits for the device. Every rank must add the same names. A rank without a value adds 0."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        # name -> (1,) a sum, (2,) a mean's numerator and denominator, or (1101,) a histogram's counts
        self.sums = defaultdict(float)
        self.peaks = {}

    def _double(self, x):
        if isinstance(x, Tensor):
            return x.detach().to(self.device, torch.float64)
        return torch.full((), x, dtype=torch.float64, device=self.device)  # a copy from the host would wait

    def add(self, name: str, total: Tensor | float, count: Tensor | float | None = None) -> None:
        """Add to the mean `name`: `total` to its numerator, `count` to its denominator. A mean whose count
        stays 0 is not logged. Without `count` the metric is a sum."""
        self.sums[name] += torch.stack([self._double(x) for x in (total, count) if x is not None])

    def add_max(self, name: str, x: Tensor | float) -> None:
        """Keep the maximum of x for the metric `name`, over all calls and ranks."""
        x = self._double(x)
        self.peaks[name] = torch.maximum(self.peaks.get(name, x), x)

    def add_quantiles(self, name: str, x: Tensor) -> None:
        """Add the values `x` (any number of them, 1-D, not negative) to the metrics name/mean, name/p99 and
        name/max. The 99th percentile is read from a histogram with 100 bins a decade, from 1e-9 to 100, so it
        is at most 2.4 % too high."""
        x = self._double(x)
        self.add(f"{name}/mean", x.sum(), len(x))
        self.add_max(f"{name}/max", x.max() if len(x) else 0.0)
        bins = (100 * x.nan_to_num(100).clamp(1e-9, 100).log10() + 900).long()
        counts = torch.zeros(1101, dtype=torch.float64, device=self.device)
        self.sums[f"{name}/p99"] += counts.index_add(0, bins, torch.ones_like(x))  # bincount would wait

    def reduce(self, all_sum: Callable, all_max: Callable) -> dict[str, float]:
        """Returns the metrics over all ranks. `all_sum` and `all_max` reduce a tensor over the ranks. all_max
        is called only if add_max was called before."""
        sums = dist.on_host(all_sum(torch.cat(list(self.sums.values()))))
        peaks = dist.on_host(all_max(torch.stack(list(self.peaks.values())))).tolist() if self.peaks else []
        metrics = dict(zip(self.peaks, peaks, strict=True))
        sizes = [len(x) for x in self.sums.values()]
        for name, x in zip(self.sums, sums.split(sizes), strict=True):
            if len(x) == 1:
                metrics[name] = x.item()
            elif len(x) == 2:
                total, count = x.tolist()
                if count:
                    metrics[name] = total / count
            elif x.any():
                below = x.cumsum(0)
                p99 = int(torch.searchsorted(below, 0.99 * below[-1]))
                upper_edge = 10 ** ((p99 - 899) / 100)
                metrics[name] = min(upper_edge, metrics[name.replace("/p99", "/max")])
        return metrics


# --- metrics of a step's samples


def measure_samples(meter: Meter, samples: Sequence[Sample], parts: Iterable[str],
                    turns: bool = False, per_prompt: int = 0) -> None:
    """Add the metrics of the step's samples. Each metric is the mean, over all ranks, of a list below.

    parts: names of the reward parts turns: whether responses may have several turns (--env); then
    response_len includes the environment's tokens per_prompt: number of samples of a prompt. With --carry,
    some prompts may have fewer samples; pass@n and
        uniform_groups leave these prompts out
    """
    groups, lengths = group_by_prompt(samples), [len(s.ids) for s in samples]
    whole = [group for group in groups if len(group) >= per_prompt]
    metrics = {
        "reward": [s.reward for s in samples],
        "score": [s.score for s in samples],
        "pass@n": [any(s.reward > 0 for s in group) for group in whole],
        "uniform_groups": [len({s.reward for s in group}) == 1 for group in whole],
        "response_len": lengths,
        "response_len²": [length**2 for length in lengths],
        "response_len/right": [len(s.ids) for s in samples if s.reward > 0],
        "response_len/wrong": [len(s.ids) for s in samples if s.reward <= 0],
        "sample_len": [s.length for s in samples],
        "truncated": [not s.stopped for s in samples],
        "reflections": [reflections(s.text) for s in samples],
        "repetition": [repeat_score(group[0].text) for group in groups],  # slow: one response a prompt
    }
    if turns:
        metrics["turns"] = [s.turns for s in samples]
        metrics["response_len/sampled"] = [int(s.is_sampled.sum()) for s in samples]
    for part in parts:  # a grader of one data set is a part that other samples do not have
        own = [s for s in samples if part in s.entered]
        metrics[f"reward/{part}"] = [s.entered[part] for s in own]
        metrics[f"reward/{part}/failed"] = [part in s.failed for s in own]
    metrics |= {f"grade/{reason}": [s.reason == reason for s in samples] for reason in REASONS}
    for name, numbers in metrics.items():
        meter.add(name, sum(numbers), len(numbers))


REFLECTIONS = ("wait,", "recheck", "retry", "alternatively,", "however,")


def reflections(text: str) -> int:
    """Returns how often words of REFLECTIONS occur in a response. Open-Reasoner-Zero counts the same
    words."""
    text = text.lower()
    return sum(text.count(word) for word in REFLECTIONS)


def repeat_score(text: str) -> float:
    """Returns how much a text of n characters repeats itself, from 0 to nearly 1: 2 Σ LCP / n(n+1). All
    suffixes of the text are sorted. LCP is the length of the longest common prefix of two neighbouring
    suffixes. This is Open-Reasoner-Zero's measure. Prefix doubling sorts the suffixes in O(n log² n) (Manber
    and Myers 1990)."""
    if not text:
        return 0.0
    n = len(text)
    ranks, keys = [], list(text)  # ranks[k][i]: rank of the suffix at i by its first 2^k characters
    while not ranks or ranks[-1].max() < n - 1:
        rank = np.unique(keys, return_inverse=True)[1]
        ranks.append(np.append(rank, -1))  # the empty suffix, at n, comes first
        second_half = np.minimum(np.arange(n) + 2 ** (len(ranks) - 1), n)
        keys = rank * (n + 1) + ranks[-1][second_half]
    order = np.argsort(ranks[-1])[1:]
    i, j = order[:-1], order[1:]  # neighbouring suffixes; the loop moves both past their common prefix
    for k in reversed(range(len(ranks))):
        common = 2**k * (ranks[k][i] == ranks[k][j])
        i, j = i + common, j + common
    return 2 * float((i - order[:-1]).sum()) / (n * (n + 1))


# --- the run's folder

STEP_LINE = {  # metric -> its form in the line that is printed after each step
    "reward": "reward {:.3f}", "response_len": "len {:.0f}", "entropy": "ent {:.2f}",
    "truncated": "trunc {:.0%}", "logp_gap/mean": "gap {:.0e}", "time/step": "{:.1f} s"}


class Logger:
    """Writes all files in the run's folder `out`, except for checkpoints. Only the rank with `main` writes.

    `start` is the first step that will be logged. If an earlier run already logged step `start` or later
    steps, the rows of these steps move to *.old.jsonl. So no step is in a file twice. Raises UserError if the
    folder can't be written to.

    Use as `with logger:`, which closes it and tells the trackers whether the run failed.
    """

    def __init__(self, out: Path, cfg: Config, main: bool, start: int, versions: Mapping[str, str]) -> None:
        self.out, self.cfg, self.main, self.next_step = out, cfg, main, start
        if not main:
            return
        config = dataclasses.asdict(cfg) | {"versions": dict(versions)}
        try:
            replace_text(out / "config.json", json.dumps(config, indent=1))
            for path in (out / "metrics.jsonl", out / "alarms.jsonl"):
                _set_aside(path, start)
        except OSError as e:
            raise UserError(f"can't write to {out} ({e.strerror}); needed: space and permission there, or "
                            "another --out") from None
        rows = read_metrics(out)
        self.history = [row for row in rows if "reward" in row]  # the training steps, for guard.alarms
        self.writer = None  # TensorBoard's, made with the first row
        self.unwritten = []  # rows that a full disk did not take
        self.steps = self.bar("Step", cfg.steps, start)
        self.samples = []  # of the step, for the trackers
        self.trackers = [TRACKERS[name](out, config, rows, start > 0, self.alarm) for name in cfg.track]

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, error: type | None, *_) -> None:
        self.close(failed=error is not None)

    def say(self, text: str) -> None:
        """Print `text` on rank 0, above the progress bars."""
        if self.main:
            tqdm.write(text)
            sys.stdout.flush()

    def save_plan(self, plan: Mapping[str, Mapping]) -> None:
        """Write the run's plan (tools.plan.Plan) to plan.json."""
        if self.main:
            (self.out / "plan.json").write_text(json.dumps(plan, indent=1))

    def alarm(self, text: str, step: int | None = None) -> None:
        """Print `!! step N: {text}`, and append the text to alarms.jsonl. An empty text does nothing. Default
        of `step`: the next step."""
        if text and self.main:
            step = self.next_step if step is None else step
            self.say(f"!! step {step}: {text}")
            with contextlib.suppress(OSError):
                _append(self.out / "alarms.jsonl", {"step": step, "text": text})

    def dump(self, name: str, packs: Sequence[Pack]) -> Path:
        """Save this rank's packs to OUT/{name}_rank{rank}.safetensors, and return this path. The tensor
        `0.tokens` is the first pack's field `tokens`."""
        path = self.out / f"{name}_rank{os.environ.get('RANK', '0')}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Clones, because save_file takes no two tensors that share memory.
        save_file({f"{i}.{field}": torch.as_tensor(x).cpu().clone() for i, p in enumerate(packs)
                   for field, x in vars(p).items() if x is not None}, path)
        return path

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and print the metrics of a step. After the last training step, only evaluation has
        metrics."""
        if not self.main:
            return
        row = {"step": step, **metrics}
        self.unwritten.append(row)
        self._write(step)
        for tracker in self.trackers:
            tracker.step(row, self.samples)
        self.samples, self.next_step = [], step + 1
        count = f"step {step:{len(str(self.cfg.steps))}}/{self.cfg.steps}"
        shown = [text.format(row[name]) for name, text in STEP_LINE.items() if name in row]
        self.say("  ".join([count, *shown]))
        for name in row:
            if re.fullmatch("eval/.+@.+", name):
                self.say(f"  {name} {row[name]:.3f}")
        if "reward" in row:
            self.history.append(row)
            self.steps.update()

    def _write(self, step):
        """Write the unwritten rows to TensorBoard and metrics.jsonl. If the disk is full, the rows are kept,
        and the next step or `close` tries again."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        try:
            while self.unwritten:
                row = self.unwritten[0]
                if self.writer is None:  # TensorBoard hides what earlier writers logged from this step on
                    self.writer = SummaryWriter(str(self.out / "tb"), purge_step=row["step"])
                values = [Summary.Value(tag=name, simple_value=x) for name, x in row.items()]
                self.writer.file_writer.add_summary(Summary(value=values), row["step"])  # one event
                _append(self.out / "metrics.jsonl", row)
                self.unwritten.pop(0)
        except OSError as e:
            self.alarm(f"can't write the metrics ({e.strerror}); they are kept until the next step", step)
            self.writer = None  # a writer cannot be used again after an error

    def save_samples(self, kind: str, step: int, rows: Sequence[Mapping]) -> None:
        """Write rows to OUT/{kind}/step_NNNNNN.jsonl; `kind` is samples or eval. Trackers get the samples
        together with the step's metrics."""
        if not self.main:
            return
        if kind == "samples":
            self.samples = rows
        path = self.out / kind / f"step_{step:06d}.jsonl"
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        try:
            path.parent.mkdir(exist_ok=True)
            # A response may hold half of a surrogate pair, which UTF-8 lacks; JSON writes it as \udc80.
            path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
        except OSError as e:
            self.alarm(f"can't write {path} ({e.strerror})")

    def bar(self, name: str, total: int, done: int = 0) -> tqdm:
        """Returns a progress bar that counts to `total`. Only rank 0's terminal shows the bar."""
        return tqdm(total=total, initial=done, desc=name, leave=False, dynamic_ncols=True,
                    disable=None if self.main else True)

    def close(self, failed: bool = False) -> None:
        """Write the rows that are left, and close the bar, TensorBoard's file and the trackers. `failed`: an
        error ends the run."""
        if not self.main:
            return
        self._write(self.next_step)
        self.steps.close()
        for tracker in self.trackers:
            tracker.close(failed)
        if self.writer:
            with contextlib.suppress(OSError):
                self.writer.close()


def _lines(rows):
    """Returns the rows as lines of JSON. NaN and infinity become null, because JSON has neither."""
    finite = ({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
              for row in rows)
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in finite)


def _set_aside(path, start):
    """Move the rows of step `start` and later ones to the end of NAME.old.jsonl. Drop a line that a crash cut
    short. Raises OSError."""
    rows = read_jsonl(path)
    later = [row for row in rows if row["step"] >= start]
    if later:
        with path.with_suffix(".old.jsonl").open("a") as file:
            file.write(_lines(later))
    replace_text(path, _lines(row for row in rows if row["step"] < start))


def _append(path, row):
    """Append the row as one line. Raises OSError; then the file is unchanged, without a part of the line."""
    line = _lines([row]).encode()
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(line) < len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_metrics(run: Path) -> list[dict]:
    """Returns the run's metrics, one dict a step. null becomes NaN."""
    return [{name: NAN if x is None else x for name, x in row.items()}
            for row in read_jsonl(run / "metrics.jsonl")]


# --- trackers: programs that --track sends the metrics to, beside TensorBoard


class Tracker:
    """Sends every row of metrics.jsonl once, in the order of the steps, to a program that shows runs.

    A file in the run's folder keeps the tracked run's id and next step. A resumed run continues the tracked
    run, and first sends the rows that it lacks. A tracker that raises an error is stopped with an alarm, and
    training goes on.

    For another program, copy WandbTracker, and add the copy to TRACKERS and configs.Tracker. Its methods are
    `start`, which starts or continues the tracked run state["id"], `send` and `finish`.
    """

    def __init__(self, out: Path, config: Mapping, rows: Sequence[Mapping], resumed: bool,
                 alarm: Callable[[str], None]) -> None:
        self.out, self.config, self.alarm, self.failed = out, config, alarm, False
        self.file = out / f"{type(self).__name__}.json"
        self.state = {"id": uuid.uuid4().hex, "next_step": 0}
        if resumed and self.file.exists():
            self.state = json.loads(self.file.read_text())
        self._attempt(self.start)
        for row in rows:
            self.step(row, [])

    def _attempt(self, action, *arguments):
        """Call `action`. Anything that it raises is an alarm: a network or a disk must not end the run."""
        try:
            action(*arguments)
        except Exception as e:
            self.failed = True
            reason = " ".join(f"{type(e).__name__}: {e}".split())
            self.alarm(f"{type(self).__name__} failed ({reason:.200}); training goes on without it, and a "
                       "resumed run sends it the steps after this one")

    def step(self, row: Mapping[str, float], samples: Sequence[Mapping]) -> None:
        """Send a step's metrics, and samples if any were saved. A resumed run repeats the steps after its
        checkpoint; they are not sent again."""
        if row["step"] >= self.state["next_step"] and not self.failed:
            # Written before the row is sent, so a crash between the two loses a row and repeats none.
            self.state["next_step"] = row["step"] + 1
            self._attempt(replace_text, self.file, json.dumps(self.state))
            self._attempt(self.send, row, samples)

    def close(self, run_failed: bool) -> None:
        """End the tracked run. Waits for its uploads."""
        if not self.failed:
            self._attempt(self.finish, run_failed)


class WandbTracker(Tracker):
    """A run at Weights & Biases. The user can set the environment variables of wandb, such as WANDB_PROJECT
    and WANDB_MODE=offline. ENVIRONMENT has the defaults that torz uses for some of these variables."""

    ENVIRONMENT = {
        "WANDB_PROJECT": "torz",
        "WANDB_CONSOLE": "off",  # otherwise it takes over stdout, and with it the progress bars
        "WANDB_QUIET": "true",
        "WANDB_FINISH_TIMEOUT": "60",  # seconds; otherwise the end of a run waits for the network for ever
        "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",  # seconds of metrics that a killed run may lose
    }
    COLUMNS = ("problem", "response", "gold", "reward", "advantage", "tokens", "reason")
    SAMPLES = 512  # largest number of samples that are sent a step

    def start(self) -> None:
        """Start or continue the run."""
        import wandb

        for key, value in self.ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        self.run = wandb.init(name=self.out.resolve().name, id=self.state["id"], resume="allow", dir=self.out,
                              config=dict(self.config), allow_val_change=True)

    def send(self, row: Mapping[str, float], samples: Sequence[Mapping]) -> None:
        """Send a step's metrics, and a table of its samples."""
        import wandb

        values = {name: x for name, x in row.items() if name != "step"}
        if samples:
            table = [[row["step"], *map(sample.get, self.COLUMNS)] for sample in samples[:self.SAMPLES]]
            values["samples"] = wandb.Table(["step", *self.COLUMNS], table, allow_mixed_types=True)
        self.run.log(values, step=row["step"], commit=True)  # otherwise wandb waits for the next step

    def finish(self, run_failed: bool) -> None:
        """End the run."""
        self.run.finish(exit_code=int(run_failed))


TRACKERS = {"wandb": WandbTracker}
