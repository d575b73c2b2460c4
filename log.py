"""Writes a run's metrics, samples, alarms, progress bars and TensorBoard files. ckpt.py writes checkpoints.

Every rank adds numbers to its own `Meter`. On rank 0, the `Logger` writes the files. docs/metrics.md explains
every metric."""

import contextlib
import errno
import json
import math
import os
import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import dist
from configs import Config, Say
from data import Sample, group_by_prompt
from grading.worker import REASONS
from guard.files import if_there, read_jsonl, replace_text, write_jsonl
from guard.messages import explained, printable, shorten
from reward import repeated_ngrams, terms_of

# Fields that a row must have, with their types, in metrics.jsonl and in alarms.jsonl (see files.checked)
METRICS = {"step": int}
ALARM = {"step": int, "text": str}


class Meter:
    """Collects the metrics of a step on one rank. The sums are tensors on `device`, so that the CPU does not
    wait for the GPU. `reduce` matches the metrics of different ranks by their order, so every rank must add
    the same metrics in the same order."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        # (name, i) -> the argument sums[i] of `add`, summed over all calls
        self.sums = defaultdict(float)
        self.peaks = {}  # name -> maximum, for `add_max`
        self.variances = {}  # name -> variance, after `reduce`

    def _double(self, x):
        """Returns the tensor or number x as a float64 tensor on `device`."""
        if isinstance(x, Tensor):
            return x.detach().to(self.device, torch.float64)
        # torch.tensor(x) would make the CPU wait for the GPU
        return torch.full((), x, dtype=torch.float64, device=self.device)

    def add(self, name: str, *sums: Tensor | float) -> None:
        """Adds to the metric `name`. sums: one of

        total                   the metric is the sum of the totals
        total, count            the metric is a mean, total / count; it is not logged if the counts sum to 0
        total, count, squares   also a variance, if `squares` is a sum of squares (see `variances`)
        """
        for i, x in enumerate(sums):
            self.sums[name, i] += self._double(x)

    def add_values(self, name: str, x: Tensor) -> None:
        """Adds the values x (n,) to a metric with mean and variance."""
        x = self._double(x)
        squares = (x * x).sum()
        self.add(name, x.sum(), len(x), squares)

    def add_max(self, name: str, x: Tensor | float) -> None:
        """Add the scalar x to a metric that is the maximum over all calls and ranks."""
        x = self._double(x)
        earlier = self.peaks.get(name, x)
        self.peaks[name] = torch.maximum(earlier, x)

    def add_mean_and_max(self, name: str, x: Tensor) -> None:
        """Add the values x (n,), which must be 0 or more, to the metrics NAME/mean and NAME/max."""
        total = self._double(x).sum()
        largest = x.max() if len(x) else 0.0
        self.add(f"{name}/mean", total, len(x))
        self.add_max(f"{name}/max", largest)

    def reduce(self) -> dict[str, float]:
        """Combines the metrics of all ranks: sums, means or maxima, as each was added. Returns a dict:
        name -> value. Fills `variances`. All ranks must call this method."""
        metrics = _over_ranks(self.peaks, dist.all_max)
        sums = _over_ranks(self.sums, dist.all_sum)
        for name, i in sums:  # i: 0 for the total, 1 for the count, 2 for the squares (see `add`)
            count = sums.get((name, 1), 1.0)  # 1.0: the metric is a sum
            if i > 0 or count == 0:
                continue
            metrics[name] = mean = sums[name, 0] / count
            if (name, 2) in sums:
                self.variances[name] = max(sums[name, 2] / count - mean**2, 0.0)
        return metrics


def _over_ranks(values, reduction):
    """Returns a dict: key -> the reduction of values[key] over all ranks, as a float."""
    if not values:
        return {}
    own = torch.stack([*values.values()])
    return dict(zip(values, reduction(own).tolist(), strict=True))


# --- metrics of a step's samples

REFLECTIONS = ("wait,", "recheck", "retry", "alternatively,", "however,")


def reflections(text: str) -> int:
    """Returns how often the words of REFLECTIONS occur in a text, as Open-Reasoner-Zero counts them."""
    text = text.lower()
    return sum(map(text.count, REFLECTIONS))


OF_SAMPLES = {  # metric, a mean over samples -> its value for one sample
    "reward": lambda s: s.reward,
    "score": lambda s: s.score,
    "sample_len": lambda s: s.length,
    "truncated": lambda s: not s.stopped,
    "reflections": lambda s: reflections(s.policy_text),
    "repetition": lambda s: repeated_ngrams(s.policy_text),
}


def measure_samples(
    meter: Meter,
    samples: Sequence[Sample],
    cfg: Config,
) -> None:
    """Add the metrics of the step's samples to `meter`. Each term of --reward has a metric `reward/NAME`.

    samples: this rank's samples, ordered by (prompt_id, sample_id)"""

    def add(name, numbers):  # the metric is the mean of the numbers of all ranks
        meter.add(name, sum(numbers), len(numbers))

    lengths = torch.tensor([len(s.ids) for s in samples])
    meter.add_values("response_len", lengths)
    for name, value in OF_SAMPLES.items():
        add(name, [value(s) for s in samples])
    solved = []
    uniform = []
    for group in group_by_prompt(samples):
        # With --carry, a prompt may have only a part of its samples in the step.
        if len(group) >= cfg.samples_per_prompt:
            scores = {s.score for s in group}
            solved.append(any(s.right for s in group))
            uniform.append(len(scores) == 1)
    add("pass@n", solved)
    add("uniform_groups", uniform)
    add("response_len/right", [len(s.ids) for s in samples if s.right])
    add("response_len/wrong", [len(s.ids) for s in samples if not s.right])
    if cfg.env:
        add("turns", [s.turns for s in samples])
        add("response_len/sampled", [int(s.is_sampled.sum()) for s in samples])
    # A grader may be for one data set only. The mean is over the samples that it graded.
    for term in terms_of(cfg):
        name = term.name
        own = [s for s in samples if name in s.entered]
        add(f"reward/{name}", [s.entered[name] for s in own])
        add(f"reward/{name}/failed", [name in s.failed for s in own])
    for reason in REASONS:
        add(f"grade/{reason}", [s.reason == reason for s in samples])


# --- the run's folder

STEP_LINE = {  # metric -> its format in a step's printed line
    "reward": "reward {:.3f}",
    "response_len": "len {:.0f}",
    "entropy": "ent {:.2f}",
    "truncated": "trunc {:.0%}",
    "logp_gap/mean": "gap {:.0e}",
    "time/step": "{:.1f} s",
}


def tell(text: str) -> None:
    """Print `text` above the progress bars."""
    # OSError: the terminal was closed, or the disk of a log file is full.
    with contextlib.suppress(OSError):
        tqdm.write(printable(text))


class Logger(contextlib.AbstractContextManager):
    """Writes metrics, samples, alarms and config into the run's folder `out`. Only rank 0 (`main`) writes.

    `start` is the first step to log. An interrupted run may have left rows of step `start` and of later
    steps. These rows are moved to metrics.old.jsonl and alarms.old.jsonl. If `own` is False, another run
    wrote all rows, and all are moved. Raises UserError if the folder can't be written to."""

    def __init__(
        self,
        out: Path,
        cfg: Config,
        main: bool,
        start: int,
        versions: Mapping[str, str],
        plan: Mapping[str, Mapping],
        own: bool = True,
    ) -> None:
        self.out = out
        self.cfg = cfg
        self.main = main
        self.next_step = start  # the step after the last logged step
        if not main:
            return
        # Now, because it takes a while: a kill between a step's save and its row would lose the row.
        from torch.utils.tensorboard import SummaryWriter

        self.make_writer = SummaryWriter
        first = start if own else 0  # rows from this step on are set aside
        config = vars(cfg) | {"versions": versions}
        needed = "space and permission there, or another --out"
        with explained(f"can't write to {out}", needed, OSError):
            replace_text(out / "config.json", json.dumps(config, indent=1))
            replace_text(out / "plan.json", json.dumps(plan, indent=1))
            before = read_metrics(out)
            _set_aside(out / "metrics.jsonl", METRICS, first)
            _set_aside(out / "alarms.jsonl", ALARM, first)
        # The last row may have only an evaluation.
        trained = [row for row in before if "reward" in row]
        self.history = [row for row in trained if row["step"] < first]  # for guard.alarms
        self.writer = None  # TensorBoard's SummaryWriter; created at the first row
        self.unwritten = []  # rows to write; they are kept while the disk is full
        self.steps = self.bar("Step", cfg.steps, start)
        self.samples = []  # the current step's saved samples, for the trackers
        # The last step whose training metrics may have been sent, plus 1; 0 in a new run
        unsent = trained[-1]["step"] + 1 if first and trained else 0
        self.trackers = [Tracker(out, config, unsent, self.alarm) for _ in cfg.track]

    def say(self, text: str) -> None:
        """Print `text` on rank 0, above the progress bars."""
        if self.main:
            tell(text)

    def alarm(self, text: str, step: int | None = None) -> None:
        """Print `!! step N: {text}` and append it to alarms.jsonl. If `step` is None, N is the next step."""
        if self.main:
            if step is None:
                step = self.next_step
            self.say(f"!! step {step}: {text}")
            with contextlib.suppress(OSError):
                row = {"step": step, "text": text}
                _append(self.out / "alarms.jsonl", row)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics. Leaves out NaN and infinity, which JSON lacks."""
        if not self.main:
            return
        finite = {name: x for name, x in metrics.items() if math.isfinite(x)}
        row = {"step": step, **finite}
        self.unwritten.append(row)
        self._write(step)
        for tracker in self.trackers:
            if step >= tracker.unsent:  # `unsent`: the first step that was not sent before a resume
                tracker.attempt(tracker.send, row, self.samples)
        self.samples = []
        self.next_step = step + 1
        line = f"step {step:{len(str(self.cfg.steps))}}/{self.cfg.steps}"
        for name, text in STEP_LINE.items():
            if name in row:
                line += "  " + text.format(row[name])
        self.say(line)
        for name in row:
            if re.fullmatch("eval/.+/.+@.+", name):  # such as eval/aime2024/pass@8
                self.say(f"  {name} {row[name]:.3f}")
        if "reward" in row:
            self.history.append(row)
            self.steps.update()  # the progress bar

    def _write(self, step):
        """Write the rows in `unwritten`. If the disk is full, keep the rows for the next step, and log an
        alarm."""
        try:
            while self.unwritten:
                row = self.unwritten[0]
                _append(self.out / "metrics.jsonl", row)
                self.unwritten.pop(0)
                # purge_step: from this step on, TensorBoard hides the rows that an interrupted run wrote.
                if self.writer is None:
                    self.writer = self.make_writer(str(self.out / "tb"), purge_step=row["step"])
                for name, x in row.items():
                    self.writer.add_scalar(name, x, row["step"])
        except OSError as e:
            text = f"can't write metrics.jsonl or tb/ ({e.strerror}); the next step tries again"
            self.alarm(text, step)
            self.writer = None  # a SummaryWriter can't be used again after an error

    def save_samples(self, kind: str, step: int, rows: Sequence[Mapping]) -> None:
        """Write the rows to OUT/{kind}/step_NNNNNN.jsonl, and rows of kind "samples" to the trackers."""
        if not self.main:
            return
        if kind == "samples":
            self.samples = rows
        path = self.out / kind / f"step_{step:06d}.jsonl"
        try:
            path.parent.mkdir(exist_ok=True)
            write_jsonl(path, rows)
        except OSError as e:
            self.alarm(f"can't write {path} ({e.strerror})")

    def bar(self, name: str, total: int, done: int = 0) -> tqdm:
        """Returns a progress bar, which only rank 0 shows. total: 0 shows a count only"""
        return tqdm(
            total=total,
            initial=done,
            desc=name,
            leave=False,
            disable=None if self.main else True,  # None: shown only in a terminal
        )

    def close(self, error: type | None = None, *_) -> None:
        """Write the rows in `unwritten`, then close everything. This is also the method `__exit__`.

        error: class of the exception that ends the run, or None"""
        if not self.main:
            return
        self._write(self.next_step)
        self.steps.close()
        for tracker in self.trackers:
            tracker.attempt(tracker.finish, error is not None)
        if self.writer:
            with contextlib.suppress(OSError):
                self.writer.close()

    __exit__ = close


def _lines(rows):
    """Returns the rows as JSON, one a line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def _set_aside(path, shape, start):
    """Moves the rows of step `start` and of later steps from NAME.jsonl to NAME.old.jsonl. Raises OSError if
    a file can't be written."""
    rows = read_jsonl(path, shape)  # shape: METRICS or ALARM
    earlier = [row for row in rows if row["step"] < start]
    later = [row for row in rows if row["step"] >= start]
    if later:
        _append(path.with_suffix(".old.jsonl"), *later)
    replace_text(path, _lines(earlier))


def _append(path, *rows):
    """Append each row as one line. If the disk is full, append nothing and raise OSError."""
    text = _lines(rows).encode()
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(text) < len(text):  # only a part was written
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_metrics(run: Path | str) -> list[dict]:
    """Returns the rows of metrics.jsonl in the folder `run`."""
    return read_jsonl(Path(run) / "metrics.jsonl", METRICS)


# --- trackers (--track)


class Tracker:
    """Sends the rows of metrics.jsonl, and samples, to Weights & Biases. Sends no training metrics twice. If
    wandb fails, logs an alarm, and training goes on. The user's environment variables override ENVIRONMENT.

    For another service, change the methods `start`, `send` and `finish`.

    unsent: first step without training metrics in metrics.jsonl before the run was resumed; 0 in a new run"""

    ENVIRONMENT = {
        "WANDB_PROJECT": "torz",
        "WANDB_CONSOLE": "off",  # otherwise wandb captures stdout and breaks the progress bars
        "WANDB_QUIET": "true",
        "WANDB_FINISH_TIMEOUT": "60",  # seconds; the default has no limit
        "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",  # seconds; a killed run loses at most its last second
    }
    COLUMNS = "problem response gold reward advantage tokens reason".split()
    SAMPLES = 512  # largest number of samples to send for each step

    def __init__(self, out: Path, config: Mapping, unsent: int, alarm: Say) -> None:
        self.out = out
        self.config = config
        self.alarm = alarm
        self.failed = False
        file = out / "wandb-id.txt"  # the run's id at wandb
        # A resumed run goes on under its id. A new run, or one whose file is missing, gets a new id.
        known = if_there(Path.read_text, file) if unsent else None
        self.id = known or uuid.uuid4().hex
        self.unsent = unsent if known else 0
        self.attempt(replace_text, file, self.id)
        self.attempt(self.start)

    def attempt(self, action: Callable, *arguments: Any) -> None:
        """Call the action, unless an earlier one has failed. If it fails, log an alarm."""
        if self.failed:
            return
        try:
            action(*arguments)
        except Exception as e:
            self.failed = True
            reason = shorten(f"{type(e).__name__}: {e}", 200)
            self.alarm(f"--track failed ({reason}); training goes on without it")

    def start(self) -> None:
        import wandb

        for key, value in self.ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        self.run = wandb.init(
            name=self.out.resolve().name,
            id=self.id,
            resume="allow",
            dir=self.out,
            config=self.config,
            allow_val_change=True,
        )

    def send(self, row: Mapping[str, float], samples: Sequence[Mapping]) -> None:
        """Send a step's metrics and saved samples."""
        import wandb

        values = dict(row)
        step = values.pop("step")
        if samples:
            columns = ["step", *self.COLUMNS]
            table = wandb.Table(columns, allow_mixed_types=True)
            for sample in samples[: self.SAMPLES]:
                cells = map(sample.get, self.COLUMNS)  # None where the sample lacks a field
                table.add_data(step, *cells)
            values["samples"] = table
        self.run.log(values, step=step, commit=True)  # commit=True sends the row now

    def finish(self, run_failed: bool) -> None:
        """End the run at the service. run_failed: true if an error ends the run."""
        self.run.finish(exit_code=int(run_failed))
