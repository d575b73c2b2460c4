"""Writes a run's metrics, samples, alarms, progress bars and TensorBoard files. ckpt.py writes checkpoints.

Every rank adds numbers to its own `Meter`. On rank 0, the `Logger` writes the files. docs/metrics.md explains
every metric."""

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

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

import dist
from configs import (
    Config,
    Say,
    explained,
    follow_umask,
    printable,
    read_json,
    read_jsonl,
    replace_text,
    shorten,
)
from data import Pack, Sample, group_by_prompt
from grading.worker import REASONS
from reward import repeated_ngrams

NAN = float("nan")
# The shapes (configs.misfit) of rows of metrics.jsonl and alarms.jsonl
METRICS = {"step": int, str: float | int | None}
ALARM = {"step": int, "text": str}


class Meter:
    """Collects the metrics of a step on one rank. The sums are tensors on `device`, so that the CPU does not
    wait for the GPU. `reduce` matches the metrics of different ranks by their order, so every rank must add
    the same metrics in the same order."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        # name -> a tensor: (1,) the sum; (2,) numerator and denominator of a mean
        self.sums = defaultdict(float)
        self.peaks = {}  # name -> maximum

    def _double(self, x):
        if isinstance(x, Tensor):
            return x.detach().to(self.device, torch.float64)
        # torch.tensor(x) would make the CPU wait for the GPU
        return torch.full((), x, dtype=torch.float64, device=self.device)

    def add(self, name: str, total: Tensor | float, count: Tensor | float | None = None) -> None:
        """Add `total` to the metric `name`. With `count` the metric is a mean, total / count. A mean whose
        counts sum to 0 is not logged."""
        self.sums[name] += torch.stack([self._double(x) for x in (total, count) if x is not None])

    def add_max(self, name: str, x: Tensor | float) -> None:
        x = self._double(x)
        self.peaks[name] = torch.maximum(self.peaks.get(name, x), x)

    def add_mean_and_max(self, name: str, x: Tensor) -> None:
        """Add the values x (n,), which must be 0 or more, to the metrics NAME/mean and NAME/max."""
        x = self._double(x)
        self.add(f"{name}/mean", x.sum(), len(x))
        self.add_max(f"{name}/max", x.max() if len(x) else 0.0)

    def reduce(self, all_sum: Callable, all_max: Callable) -> dict[str, float]:
        """Returns a dict: name -> value, for all metrics. all_sum, all_max: functions that return the sum and
        the maximum of a tensor over the ranks."""
        sums = dist.on_host(all_sum(torch.cat(list(self.sums.values()))))
        peaks = (
            dist.on_host(all_max(torch.stack(list(self.peaks.values())))).tolist()
            if self.peaks
            else []
        )
        metrics = dict(zip(self.peaks, peaks, strict=True))
        sizes = [len(x) for x in self.sums.values()]
        for name, x in zip(self.sums, sums.split(sizes), strict=True):
            if len(x) == 1:
                metrics[name] = x.item()
            elif x[1]:
                metrics[name] = (x[0] / x[1]).item()
        return metrics


# --- metrics of a step's samples


def measure_samples(
    meter: Meter,
    samples: Sequence[Sample],
    parts: Iterable[str],
    turns: bool = False,
    per_prompt: int = 0,
) -> None:
    """Add the metrics of the step's samples to `meter`.

    samples: this rank's samples, ordered by (prompt_id, sample_id)
    parts: names of graders and reward parts; each has a metric `reward/NAME`
    turns: whether to add `turns` and `response_len/sampled` (true with --env)
    per_prompt: `pass@n` and `uniform_groups` count only prompts with at least this number of samples. With
        --carry, a prompt may have fewer samples in the step"""
    groups, lengths = group_by_prompt(samples), [len(s.ids) for s in samples]
    whole = [group for group in groups if len(group) >= per_prompt]
    metrics = {
        "reward": [s.reward for s in samples],
        "score": [s.score for s in samples],
        "pass@n": [any(s.right for s in group) for group in whole],
        "uniform_groups": [len({s.score for s in group}) == 1 for group in whole],
        "response_len": lengths,
        "response_len²": [length**2 for length in lengths],
        "response_len/right": [len(s.ids) for s in samples if s.right],
        "response_len/wrong": [len(s.ids) for s in samples if not s.right],
        "sample_len": [s.length for s in samples],
        "truncated": [not s.stopped for s in samples],
        "reflections": [reflections(s.policy_text) for s in samples],
        "repetition": [repeated_ngrams(s.policy_text) for s in samples],
    }
    if turns:
        metrics["turns"] = [s.turns for s in samples]
        metrics["response_len/sampled"] = [int(s.is_sampled.sum()) for s in samples]
    for part in (
        parts
    ):  # a grader may be for one data set only; the mean is over the samples that it graded
        own = [s for s in samples if part in s.entered]
        metrics[f"reward/{part}"] = [s.entered[part] for s in own]
        metrics[f"reward/{part}/failed"] = [part in s.failed for s in own]
    metrics |= {f"grade/{reason}": [s.reason == reason for s in samples] for reason in REASONS}
    for name, numbers in metrics.items():
        meter.add(name, sum(numbers), len(numbers))


REFLECTIONS = ("wait,", "recheck", "retry", "alternatively,", "however,")


def reflections(text: str) -> int:
    """Returns how often the words of REFLECTIONS occur in a text, as Open-Reasoner-Zero counts them."""
    text = text.lower()
    return sum(text.count(word) for word in REFLECTIONS)


# --- the run's folder

STEP_LINE = {  # metric -> its format in a step's printed line
    "reward": "reward {:.3f}",
    "response_len": "len {:.0f}",
    "entropy": "ent {:.2f}",
    "truncated": "trunc {:.0%}",
    "logp_gap/mean": "gap {:.0e}",
    "time/step": "{:.1f} s",
}


class Logger(contextlib.AbstractContextManager):
    """Writes metrics, samples, alarms and config into the run's folder `out`. Only rank 0 (`main`) writes,
    except in `dump`.

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
        self.out, self.cfg, self.main, self.next_step = out, cfg, main, start
        if not main:
            return
        config = dataclasses.asdict(cfg) | {"versions": versions}
        with explained(
            f"can't write to {out}", "space and permission there, or another --out", OSError
        ):
            replace_text(out / "config.json", json.dumps(config, indent=1))
            replace_text(out / "plan.json", json.dumps(plan, indent=1))
            for path, shape in (out / "metrics.jsonl", METRICS), (out / "alarms.jsonl", ALARM):
                _set_aside(path, shape, start if own else 0)
        rows = read_metrics(out)
        self.history = [
            row for row in rows if "reward" in row
        ]  # rows of training steps, for guard.alarms
        self.writer = None  # TensorBoard's SummaryWriter; created at the first row
        self.unwritten = []  # rows to write; they are kept while the disk is full
        self.steps = self.bar("Step", cfg.steps, start)
        self.samples = []
        self.trackers = [TRACKERS[name](out, config, rows, self.alarm) for name in cfg.track]

    def __exit__(self, error: type | None, *_) -> None:
        self.close(failed=error is not None)

    def say(self, text: str) -> None:
        """Print `text` on rank 0, above the progress bars."""
        if self.main:
            with contextlib.suppress(
                OSError
            ):  # the terminal was closed, or the disk of a log file is full
                tqdm.write(printable(text))
                sys.stdout.flush()

    def alarm(self, text: str, step: int | None = None) -> None:
        """Print `!! step N: {text}` and append it to alarms.jsonl. If `step` is None, N is the next step."""
        if self.main:
            step = self.next_step if step is None else step
            self.say(f"!! step {step}: {text}")
            with contextlib.suppress(OSError):
                _append(self.out / "alarms.jsonl", {"step": step, "text": text})

    def dump(self, name: str, packs: Sequence[Pack]) -> str:
        """Saves this rank's packs to OUT/{name}_rank{rank}.safetensors, for example after a skipped update.
        Returns a text with this path, or with the error. In the file, `0.tokens` is the field `tokens` of the
        first pack."""
        path = self.out / f"{name}_rank{os.environ.get('RANK', '0')}.safetensors"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # save_file refuses tensors that share memory
            save_file(
                {
                    f"{i}.{field}": torch.as_tensor(x).cpu().clone()
                    for i, p in enumerate(packs)
                    for field, x in vars(p).items()
                    if x is not None
                },
                path,
            )
            follow_umask(path)
        except (OSError, SafetensorError) as e:
            return f"its packs can't be written to {path} ({shorten(str(e))})"
        return f"its packs are in {path}"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
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
        """Write the rows in `unwritten`. If the disk is full, keep the rows for the next step, and log an
        alarm."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        try:
            while self.unwritten:
                row = self.unwritten[0]
                # purge_step: from this step on, TensorBoard hides the rows that an interrupted run wrote.
                if self.writer is None:
                    self.writer = SummaryWriter(str(self.out / "tb"), purge_step=row["step"])
                values = [Summary.Value(tag=name, simple_value=x) for name, x in row.items()]
                self.writer.file_writer.add_summary(Summary(value=values), row["step"])
                _append(self.out / "metrics.jsonl", row)
                self.unwritten.pop(0)
        except OSError as e:
            self.alarm(
                f"can't write the metrics ({e.strerror}); they are kept until the next step", step
            )
            self.writer = None  # a SummaryWriter can't be used again after an error

    def save_samples(self, kind: str, step: int, rows: Sequence[Mapping]) -> None:
        """Write the rows to OUT/{kind}/step_NNNNNN.jsonl, and rows of kind "samples" to the trackers."""
        if not self.main:
            return
        if kind == "samples":
            self.samples = rows
        path = self.out / kind / f"step_{step:06d}.jsonl"
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        try:
            path.parent.mkdir(exist_ok=True)
            # UTF-8 can't encode a lone surrogate
            path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
        except OSError as e:
            self.alarm(f"can't write {path} ({e.strerror})")

    def bar(self, name: str, total: int, done: int = 0) -> tqdm:
        return tqdm(
            total=total,
            initial=done,
            desc=name,
            leave=False,
            dynamic_ncols=True,
            disable=None if self.main else True,
        )

    def close(self, failed: bool = False) -> None:
        """Write the rows in `unwritten`, then close everything. failed: true if an error ends the run."""
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
    """Returns the rows as lines of JSON. NaN and infinity, which JSON lacks, become null."""
    finite = (
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        for row in rows
    )
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in finite)


def _set_aside(path, shape, start):
    """Moves the rows of step `start` and of later steps from NAME.jsonl to NAME.old.jsonl. Raises OSError if
    a file can't be written."""
    rows = read_jsonl(path, shape)
    later = [row for row in rows if row["step"] >= start]
    if later:
        with path.with_suffix(".old.jsonl").open("a") as file:
            file.write(_lines(later))
    replace_text(path, _lines(row for row in rows if row["step"] < start))


def _append(path, row):
    """Append the row as one line. If the disk is full, remove the incomplete line and raise OSError."""
    line = _lines([row]).encode()
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(line) < len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_metrics(run: Path | str) -> list[dict]:
    """Returns the rows of metrics.jsonl in the folder `run`. JSON's null becomes NaN."""
    return [
        {name: NAN if x is None else x for name, x in row.items()}
        for row in read_jsonl(Path(run) / "metrics.jsonl", METRICS)
    ]


# --- trackers (--track)


class Tracker:
    """Sends the rows of metrics.jsonl to a service for experiment tracking. Sends no row twice.

    A file stores the run's id at the service and the next step to send. A failed tracker logs an alarm, and
    training goes on.

    To add a service, write a subclass like WandbTracker, and add its name to TRACKERS and configs.Tracker.
    The subclass defines:
        start   start or continue a run with the id self.state["id"]
        send    send one row
        finish  end the run
    """

    def __init__(self, out: Path, config: Mapping, rows: Sequence[Mapping], alarm: Say) -> None:
        self.out, self.config, self.alarm, self.failed = out, config, alarm, False
        self.file = out / f"{type(self).__name__}.json"
        # A run that begins anew is another run at the service.
        known = read_json(self.file, {"id": str, "next_step": int}) if rows else {}
        self.state = {"id": uuid.uuid4().hex, "next_step": 0} | known
        self._attempt(self.start)
        for row in rows:  # sends the rows that were not sent before the run was resumed
            self.step(row, [])

    def _attempt(self, action, *arguments):
        try:
            action(*arguments)
        except Exception as e:
            self.failed = True
            reason = shorten(f"{type(e).__name__}: {e}", 200)
            self.alarm(
                f"{type(self).__name__} failed ({reason}); training goes on without it, and a "
                "resumed run sends it the steps after this one"
            )

    def step(self, row: Mapping[str, float], samples: Sequence[Mapping]) -> None:
        """Send a step's metrics and saved samples, unless the step was sent before."""
        if row["step"] >= self.state["next_step"] and not self.failed:
            # The file is written before the row is sent: a crash can lose a row, never send it twice.
            self.state["next_step"] = row["step"] + 1
            self._attempt(replace_text, self.file, json.dumps(self.state))
            if not self.failed:
                self._attempt(self.send, row, samples)

    def close(self, run_failed: bool) -> None:
        """End the run at the service. run_failed: true if an error ends the run."""
        if not self.failed:
            self._attempt(self.finish, run_failed)


class WandbTracker(Tracker):
    """Sends metrics and samples to Weights & Biases. The user's environment variables override
    ENVIRONMENT."""

    ENVIRONMENT = {
        "WANDB_PROJECT": "torz",
        "WANDB_CONSOLE": "off",  # otherwise wandb captures stdout and breaks the progress bars
        "WANDB_QUIET": "true",
        "WANDB_FINISH_TIMEOUT": "60",  # seconds; the default has no limit
        "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",  # seconds; a killed run loses at most its last second
    }
    COLUMNS = "problem response gold reward advantage tokens reason".split()
    SAMPLES = 512  # largest number of samples to send for each step

    def start(self) -> None:
        import wandb

        for key, value in self.ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        self.run = wandb.init(
            name=self.out.resolve().name,
            id=self.state["id"],
            resume="allow",
            dir=self.out,
            config=self.config,
            allow_val_change=True,
        )

    def send(self, row: Mapping[str, float], samples: Sequence[Mapping]) -> None:
        import wandb

        values = {name: x for name, x in row.items() if name != "step"}
        if samples:
            table = [
                [row["step"], *map(sample.get, self.COLUMNS)] for sample in samples[: self.SAMPLES]
            ]
            values["samples"] = wandb.Table(["step", *self.COLUMNS], table, allow_mixed_types=True)
        # commit=True sends the row now
        self.run.log(values, step=row["step"], commit=True)

    def finish(self, run_failed: bool) -> None:
        self.run.finish(exit_code=int(run_failed))


TRACKERS = {"wandb": WandbTracker}
