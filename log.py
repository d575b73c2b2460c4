"""What a run writes while it goes on: metrics.jsonl, TensorBoard, trackers, sample texts, progress bars and
alarms.

Every rank adds to its own `Meter`; `Meter.reduce` adds the ranks' sums and counts before it divides, so a
metric is never a mean of means. Rank 0 has the `Logger`, which writes the run's folder. The last part of this
file holds the alarms and METRICS, the table of what every metric means. Plots and the HTML report are in
tools/report.py.
"""

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

import dist
from configs import Config, UserError, check_trackers, read_jsonl, replace_text
from data import Pack, Sample, group_by_prompt
from grading.worker import REASONS

# Edges of the histogram behind a 99th percentile. It takes the tokens of all packs and ranks.
NAN = float("nan")  # a metric that no row has; every comparison with it is false
BINS = torch.logspace(-9, 2, 1101)


@functools.cache
def _edges(device):
    edges = BINS[:-1]
    return edges.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else edges


class Meter:
    """Collects one rank's part of a step's metrics. Sums and counts are float64 tensors on `device`, so
    adding never waits for the device. Every rank must add the same names, with zeros where it has nothing."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.optional = set()  # means that are left out where nothing was added to them
        self.sums = defaultdict(float)  # (2,) numerator and denominator of a mean, or a histogram's counts
        self.peaks = {}

    def _double(self, x):
        if isinstance(x, Tensor):
            return x.detach().to(self.device, torch.float64)
        return torch.full((), x, dtype=torch.float64, device=self.device)  # a copy from the host would wait

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 1.0) -> None:
        """Add to the numerator and the denominator of the mean `name`. A metric that is a pure sum has
        count 0."""
        self.sums[name] += torch.stack([self._double(total), self._double(count)])

    def mean(self, name: str) -> float:
        """The mean `name` on this rank so far; 0 where nothing was added."""
        total, count = dist.on_host(self.sums.get(name, torch.zeros(2))).tolist()
        return total / max(count, 1)

    def add_max(self, name: str, x: Tensor | float) -> None:
        """Keep the largest x of metric `name`, over all calls and ranks."""
        x = self._double(x)
        self.peaks[name] = torch.maximum(self.peaks.get(name, x), x)

    def add_quantiles(self, name: str, x: Tensor) -> None:
        """Add the positive values `x` (any number of them, 1-D) to the metrics name/mean, name/p99 (within
        2.3 %) and name/max."""
        self.add(f"{name}/mean", x.sum(), len(x))
        self.add_max(f"{name}/max", x.max() if len(x) else 0.0)
        bins = torch.bucketize(x, _edges(x.device))  # the last bin also takes what is larger
        counts = torch.zeros(len(BINS), dtype=torch.float64, device=x.device)  # bincount waits for the device
        self.sums[f"{name}/p99"] += self._double(counts.index_add(0, bins, torch.ones_like(x).double()))

    def reduce(self, all_sum: Callable, all_max: Callable) -> dict[str, float]:
        """The metrics over all ranks. `all_sum` and `all_max` map a rank's tensor to that of all ranks;
        all_max is called only where add_max was."""
        sums = dist.on_host(all_sum(torch.cat(list(self.sums.values()))))
        peaks = dist.on_host(all_max(torch.stack(list(self.peaks.values())))).tolist() if self.peaks else []
        peaks, metrics = dict(zip(self.peaks, peaks, strict=True)), {}
        for name, x in zip(self.sums, sums.split(list(map(len, self.sums.values()))), strict=True):
            if len(x) == 2:
                total, count = x.tolist()
                if count or name not in self.optional:
                    metrics[name] = total / count if count else total
            else:
                below = x.cumsum(0)
                p99 = int(torch.searchsorted(below, 0.99 * below[-1]))
                metrics[name] = min(float(BINS[p99]), peaks[name.replace("/p99", "/max")])
        return metrics | peaks


# --- what a step's samples were like


def measure_samples(meter: Meter, samples: Sequence[Sample], parts: Iterable[str],
                    turns: bool = False, per_prompt: int = 0) -> None:
    """Add the metrics of the step's samples: the mean of each list below, over all ranks. `parts`: names of
    what enters their scores. A part that no sample has is left out. `turns`: responses may have several
    (--env); their lengths count the environment's tokens too. `per_prompt`: samples of a prompt that are all
    here."""
    groups, lengths = group_by_prompt(samples), [len(s.ids) for s in samples]
    whole = [group for group in groups if len(group) >= per_prompt]  # with --carry some are here in part
    meter.optional |= {"pass@n", "uniform_groups"}
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
        "repetition": [repetition(group[0].text) for group in groups],  # of one response each: it is slow
    }
    if turns:
        metrics["turns"] = [s.turns for s in samples]
        metrics["response_len/sampled"] = [int(s.is_sampled.sum()) for s in samples]
    for part in parts:  # a grader of one data set adds to the samples of that data set alone
        own = [s for s in samples if part in s.entered]
        metrics[f"reward/{part}"] = [s.entered[part] for s in own]
        metrics[f"reward/{part}/failed"] = [part in s.failed for s in own]
        meter.optional |= {f"reward/{part}", f"reward/{part}/failed"}
    metrics |= {f"grade/{reason}": [s.reason == reason for s in samples] for reason in REASONS}
    for name, numbers in metrics.items():
        meter.add(name, sum(numbers), len(numbers))


REFLECTIONS = ("wait,", "recheck", "retry", "alternatively,", "however,")


def reflections(text: str) -> int:
    """How often a response contains one of REFLECTIONS, the words that Open-Reasoner-Zero counts."""
    text = text.lower()
    return sum(text.count(word) for word in REFLECTIONS)


def repetition(text: str) -> float:
    """How much a text repeats itself, from 0 to nearly 1: 2 Σ LCP / n(n+1) over neighbours in the suffix
    array of its n characters (Open-Reasoner-Zero's score). LCP is the length of the longest common prefix.
    Manber and Myers 1990: a rank by 2s characters is the rank of a pair of ranks by s characters."""
    n = len(text)
    if n < 2:
        return 0.0

    def ranked(keys):  # -1 is the rank of the empty suffix, at n
        return np.append(np.unique(keys, return_inverse=True)[1], -1)

    ranks = [ranked(list(text))]  # ranks[k][i]: rank of the suffix at i by its first 2^k characters
    while ranks[-1].max() < n - 1:
        rank, step = ranks[-1], 2 ** (len(ranks) - 1)
        second = rank[np.minimum(np.arange(n) + step, n)]
        ranks.append(ranked(rank[:n] * (n + 1) + second))
    order = np.argsort(ranks[-1])[1:]
    i, j = order[:-1], order[1:]  # neighbours; both move to the end of what they have in common
    for k in reversed(range(len(ranks))):
        common = 2**k * (ranks[k][i] == ranks[k][j])
        i, j = i + common, j + common
    return 2 * float((i - order[:-1]).sum()) / (n * (n + 1))


# --- the run's folder

STEP_LINE = {  # metric -> how the line that is printed after each step shows it
    "reward": "reward {:.3f}", "response_len": "len {:.0f}", "entropy": "ent {:.2f}",
    "truncated": "trunc {:.0%}", "logp_gap/mean": "gap {:.0e}", "time/step": "{:.1f} s"}


class Logger:
    """Writes everything in the run's folder `out` that is not a checkpoint. Only the rank with `main` writes.

    `start` is the first step that will be logged. A killed or an earlier run may have logged steps from there
    on; they are moved to *.old.jsonl, so that no step is there twice. `new_alarms`: guard.alarms.new_alarms;
    the default raises none. Raises UserError where it can't write.

    Use as `with logger:`, which closes it, and tells the trackers whether the run failed.
    """

    def __init__(self, out: Path, cfg: Config, main: bool, start: int, versions: Mapping[str, str],
                 new_alarms: Callable[[Sequence[Mapping], Config], list[str]] = lambda rows, cfg: []) -> None:
        self.new_alarms = new_alarms
        self.out, self.cfg, self.main, self.next_step = out, cfg, main, start
        check_trackers(cfg)
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
        self.history = [row for row in rows if "reward" in row]
        self.writer = None  # of TensorBoard's file, made with the first row
        self.unwritten = []  # rows that the disk did not take
        self.steps = self.bar("Step", cfg.steps, start)
        self.trackers = Trackers(out, self.alarm)
        self.trackers.start(cfg.track, config, rows, resumed=start > 0)

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, error: type | None, *_) -> None:
        self.close(failed=error is not None)

    def say(self, text: str) -> None:
        """Print `text` on rank 0, above the progress bars."""
        if self.main:
            tqdm.write(text)
            sys.stdout.flush()

    def save_plan(self, rows: Mapping[str, str]) -> None:
        """Write the run's plan to plan.json, for the report."""
        if self.main:
            (self.out / "plan.json").write_text(json.dumps(dict(rows), indent=1))

    def alarm(self, text: str, step: int | None = None) -> None:
        """Print `text` with a mark and keep it in alarms.jsonl. Does nothing for an empty text. `step`: the
        next step if not given."""
        if text and self.main:
            self.say(f"!! {text}" if step is None else f"!! step {step}: {text}")
            row = {"step": self.next_step if step is None else step, "text": text}
            with contextlib.suppress(OSError):
                _append(self.out / "alarms.jsonl", row)
            self.trackers.alarm(row["step"], text)

    def dump(self, name: str, packs: Sequence[Pack]) -> Path:
        """Save this rank's packs; `0.tokens` is the field `tokens` of the first one. Returns the file,
        OUT/{name}_rank{rank}.safetensors."""
        path = self.out / f"{name}_rank{os.environ.get('RANK', '0')}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {f"{i}.{key}": value for i, p in enumerate(packs) for key, value in vars(p).items()}
        # Copies, because save_file takes no two tensors that share memory.
        state = {k: torch.as_tensor(x).to("cpu", copy=True) for k, x in fields.items() if x is not None}
        save_file(state, path)
        return path

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and print a step's metrics, and raise its alarms. The step may have only an evaluation."""
        if not self.main:
            return
        row = {"step": step, **metrics}
        self.unwritten.append(row)
        self._write_rows(step)
        self.trackers.step(row)
        self.next_step = step + 1
        count = f"step {step:{len(str(self.cfg.steps))}}/{self.cfg.steps}"
        shown = [text.format(row[name]) for name, text in STEP_LINE.items() if name in row]
        self.say("  ".join([count, *shown]))
        for name in row:
            if name.startswith("eval/") and "@" in name:
                self.say(f"  {name} {row[name]:.3f}")
        if "reward" in row:
            self.history.append(row)
            for text in self.new_alarms(self.history, self.cfg):
                self.alarm(text, step)
            self.steps.set_postfix(reward=f"{row['reward']:.3f}", refresh=False)
            self.steps.update()

    def _write_rows(self, step):
        """Write what was not written yet. A full disk may have room at the next step, or at the end."""
        try:
            while self.unwritten:
                self._write(self.unwritten[0])
                self.unwritten.pop(0)
        except OSError as e:
            self.alarm(f"can't write the metrics ({e.strerror}); they are kept until the next step", step)
            self.writer = None

    def _write(self, row):
        """Write the row to TensorBoard, as one event, and to metrics.jsonl. Raises OSError. After an error a
        TensorBoard writer stays broken; `step` then drops it, and the next call makes a new one."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        step = row["step"]
        if self.writer is None:  # TensorBoard hides what earlier writers logged from this step on
            self.writer = SummaryWriter(str(self.out / "tb"), purge_step=step)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self.writer.file_writer.add_summary(Summary(value=values), step)
        _append(self.out / "metrics.jsonl", row)

    def rows(self, kind: str, step: int, rows: Iterable[Mapping]) -> None:
        """Write rows to OUT/{kind}/step_NNNNNN.jsonl; `kind` is samples or eval. Trackers get the samples
        together with the step's metrics."""
        if not self.main:
            return
        path, rows = self.out / kind / f"step_{step:06d}.jsonl", list(rows)
        if kind == "samples":
            self.trackers.samples = rows
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        try:
            path.parent.mkdir(exist_ok=True)
            # A response may hold half of a surrogate pair, which UTF-8 has not; JSON writes it as \udc80.
            path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
        except OSError as e:
            self.alarm(f"can't write {path} ({e.strerror})")

    def bar(self, name: str, total: int, done: int = 0) -> tqdm:
        """A progress bar that counts to `total`, below the bar of the steps; shown on rank 0's terminal."""
        return tqdm(total=total, initial=done, desc=name, leave=False, dynamic_ncols=True,
                    disable=None if self.main else True)

    def close(self, failed: bool = False) -> None:
        """Write what is left, and close the bar, TensorBoard's file and the trackers. `failed`: an error ends
        the run."""
        if not self.main:
            return
        self._write_rows(self.next_step)
        self.steps.close()
        self.trackers.close(failed)
        if self.writer:
            with contextlib.suppress(OSError):
                self.writer.close()


def _lines(rows):
    """Rows as lines of JSON, which has no NaN and no infinity: they are null."""
    finite = ({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
              for row in rows)
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in finite)


def _set_aside(path, start):
    """Move the rows of steps from `start` on to NAME.old.jsonl, after those that are there. A line that a
    crash cut is dropped. Raises OSError."""
    path.touch()
    rows = read_jsonl(path)
    later = [row for row in rows if row["step"] >= start]
    if later:
        with path.with_suffix(".old.jsonl").open("a") as file:
            file.write(_lines(later))
    kept = _lines(row for row in rows if row["step"] < start)
    if path.read_bytes() != kept.encode():
        replace_text(path, kept)


def _append(path, row):
    """Append the row as one line, or nothing. Raises OSError, also where the disk takes only a part of it."""
    line = _lines([row]).encode()
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(line) < len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_metrics(run: Path, steps: Collection[int] | None = None) -> list[dict]:
    """The run's metrics, one dict a step; null is NaN. With `steps`, only those: other lines are not parsed,
    which saves seconds on a long run."""
    prefixes = ("",) if steps is None else tuple(f'{{"step": {step},' for step in steps)
    return [{name: NAN if x is None else x for name, x in row.items()}
            for row in read_jsonl(run / "metrics.jsonl", prefixes)]


# --- the metrics

# key | unit | meaning. In a key, <…> stands for any name. docs/metrics.md has the same table.
METRICS = """
step | – | steps done before this one; the row after the last step has only the last evaluation
reward | reward | mean over the step's samples; with the built-in rewards, the share of right answers
score | reward | mean of what training maximises: the reward, times its weight, and all parts
reward/<part> | reward | mean of a weighted part over the samples that have it; see the notes
reward/<part>/failed | share | of these samples, those for which the part's function raised; it is 0 then
sample_len | tokens | mean length of prompt and response together
response_len | tokens | mean length of the step's responses; with `--env` of all turns and answers
response_len/std | tokens | standard deviation of the length
response_len/right | tokens | mean length of responses with a reward over 0
response_len/wrong | tokens | mean length of the other responses
response_len/sampled | tokens | mean number of the tokens that the policy sampled; only with `--env`
turns | – | mean number of turns that the policy sampled in a response; only with `--env`
truncated | share | responses that the length limit ended
rollout_tail | share | of the sampling time, the part after 90 % of the responses have ended
carried | – | trajectories that go on in the next step; only with `--round_len`
staleness/mean | steps | age of the weights that sampled a token, mean; 0: the step's; only with `--round_len`
staleness/max | steps | the oldest of them
pass@n | share | prompts with a right sample among their `--samples_per_prompt`
repetition | – | 2 Σ LCP / n(n+1) over the suffix array of each prompt's first response; 0: none, 1: most
reflections | – | occurrences of `wait,` `recheck` `retry` `alternatively,` `however,` in a response
uniform_groups | share | prompts whose samples all have the same graded reward, before `--resample_rounds`
grade/correct | share | samples whose answer is right
grade/wrong | share | samples whose answer is wrong
grade/unparsed | share | samples without a box in `<answer>`, or with over 2000 characters in it
grade/truncated | share | samples that the length limit ended; they score 0 unread
grade/timeout | share | samples whose grading, or `--env`, took longer than `--grade_deadline`
grade/error | share | samples whose grading, or `--env`, raised an error
entropy | nats/token | mean entropy of the policy's next-token distribution
policy_loss | – | the policy's loss, mean over the step's tokens; near 0 with one update a step
value_loss | reward² | the critic's loss, mean over the step's tokens, each at its own update
values | reward | the critic's mean value, before its first update of the step
returns | reward | mean return over tokens; long responses count more than they do in `reward`
explained_variance | – | 1 − Var(R − V) / Var(R); 1: a perfect critic, 0: no better than a constant
clip_share | share | tokens whose ratio was clipped; 0 with one update a step, where the ratio is 1
kl | nats/token | mean KL from the policy to the reference; only with `--kl_coef`
grad_norm/policy | – | the policy's gradient norm before clipping, mean over the step's updates
grad_norm/critic | – | the critic's gradient norm before clipping, mean over the step's updates
skipped_updates | share | updates of the step that were skipped because the gradient was not finite
lr/policy | – | the policy's learning rate, mean over the step's updates
lr/critic | – | the critic's learning rate, mean over the step's updates
logp_gap/mean | nats | mean absolute difference of engine and trainer log-prob, over the sampled tokens
logp_gap/p99 | nats | 99th percentile of this difference, within 2.3 %
logp_gap/max | nats | maximum of this difference
tis/mean | – | mean weight that corrects it: π_trainer / π_engine, at most `--tis_clip`
ess | share | effective sample size, mean(w)² / mean(w²) of these weights; 1 where engine and trainer agree
eval/<set>/avg@<k> | reward | on a held-out set: mean over k samples a problem, then over problems
eval/<set>/pass@<k> | share | chance that k of a problem's n samples hold a right one (arXiv 2107.03374)
eval/<set>/maj@<k> | share | problems whose most frequent answer is right; `--eval_samples` over 2
eval/<set>/response_len | tokens | mean length of the responses to the held-out problems
eval/<set>/truncated | share | responses to the held-out problems that the length limit ended
time/selfcheck | s | compare the engine with the trainer's policy, once, before the first step
time/wake | s | give the engine its memory back; the slowest rank's
time/sync | s | copy the policy's weights into the engine; the slowest rank's
time/eval | s | evaluate on the held-out sets
time/rollout | s | sample and grade
time/sleep | s | take the engine's memory away; the slowest rank's
time/wait | s | wait for the slowest rank's engine
time/pack | s | put samples into packs
time/ref | s | log-probs of the reference; only with `--kl_coef`
time/old_logp | s | log-probs of the policy before its updates; only where they are needed
time/critic | s | values, advantages and the critic's updates
time/policy | s | the policy's updates
time/save | s | save a checkpoint: the part that training waits for
time/report | s | add these metrics up over the ranks
time/step | s | the whole step
tokens | tokens | prompts and responses of the step
tokens_per_s | tokens/s | `tokens` divided by `time/step`
unique_share | share | of `tokens`, those computed in an update: a shared prefix is computed once in a pack
tflops | TFLOP/s | training FLOP a rank by `time/step`: 6N a computed token, and attention; no recomputation
mfu | share | `tflops` divided by the device's peak; only on GPUs whose peak is known
mem/trainer_gb | GiB | device memory held before the engine wakes; on a CPU the process's, here and below
mem/awake_gb | GiB | device memory held while the engine is awake
mem/asleep_gb | GiB | device memory held when the engine sleeps again
mem/residual_gb | GiB | held with the sleeping engine minus held before it was made; an alarm if it grows
mem/host_peak_gb | GiB | peak host memory of the largest rank since it started
"""


def metric_meanings() -> dict[str, str]:
    """The rows of METRICS: regular expression of a metric's whole name -> "meaning (unit)"."""
    rows = re.findall(r"^(.+) \| (.+) \| (.+)$", METRICS, re.MULTILINE)
    return {re.sub("<.+?>", "[^/]+", key): f"{meaning} ({unit})".replace("`", "")
            for key, unit, meaning in rows}


PROJECT = "torz"  # the project, or MLflow's experiment, that all runs go to
TABLE_ROWS = 512  # of a step's samples, at most
COLUMNS = {  # of the table of samples: the name in samples/*.jsonl
    "prompt": "problem", "response": "response", "gold": "gold", "reward": "reward",
    "advantage": "advantage", "length": "tokens", "reason": "reason"}
ENVIRONMENT = {  # what the packages read, where the user has not set it
    "WANDB_CONSOLE": "off",  # otherwise it takes over stdout, and with it the progress bars
    "WANDB_QUIET": "true",
    "WANDB_FINISH_TIMEOUT": "60",  # seconds; otherwise the end of a run waits for the network for ever
    "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",  # seconds; a killed run loses so much of its file
    "MLFLOW_ALLOW_FILE_STORE": "true",  # a folder; for SQLite, mlflow-skinny lacks a package
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds; a step waits for it
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}


class Trackers:
    """The run's trackers. Each gets every row of metrics.jsonl once, in the order of the steps.

    track.json keeps each tracked run's id and next step. A resumed run continues them, and sends the rows
    that a tracker lacks. A tracker that fails is dropped with an alarm, and training goes on.
    """

    def __init__(self, out: Path, alarm: Callable[[str], None]) -> None:
        self.out, self.on_failure = out, alarm
        self.running = {}  # name -> tracker
        self.kept = {}  # name -> id and next step, as in track.json
        self.samples = []  # of the step, until its metrics are there

    def start(self, names: Sequence[str], config: Mapping, rows: Sequence[Mapping], resumed: bool) -> None:
        """Open the trackers `names`, and send them the rows of earlier steps that they lack. If not
        `resumed`, each begins another tracked run."""
        file = self.out / "track.json"
        if not resumed:
            file.unlink(missing_ok=True)  # of a run in this folder that saved nothing
        elif file.exists():
            self.kept = json.loads(file.read_text())
        for key, value in ENVIRONMENT.items() if names else ():
            os.environ.setdefault(key, value)
        for name in dict.fromkeys(names):
            self._attempt(name, self._start, name, config, rows)

    def _start(self, name, config, rows):
        kept = self.kept.setdefault(name, {"id": "", "next_step": 0})
        self.running[name] = TRACKERS[name](self.out, config, kept["id"])
        kept["id"] = self.running[name].id
        for row in rows:
            self._send(name, row, [])

    def _attempt(self, name, action, *arguments):
        """Call an action of a tracker. Whatever it raises is an alarm: a network, a disk or a package that
        fails must not end the run."""
        try:
            action(*arguments)
        except Exception as e:
            self.running.pop(name, None)
            reason = " ".join(f"{type(e).__name__}: {e}".split())
            self.on_failure(f"{name} failed ({reason:.200}); training goes on without it, and a resumed run "
                            "sends it the steps after this one")

    def step(self, row: Mapping[str, float]) -> None:
        """Send a step's metrics, and its samples if some were saved."""
        samples, self.samples = self.samples, []
        for name in list(self.running):
            self._attempt(name, self._send, name, row, samples)

    def _send(self, name, row, samples):
        """Send a row, unless the tracker has that step: a killed run logged it, and the resumed run repeats
        it. Numbers that are not finite are left out."""
        step, kept = row["step"], self.kept[name]
        if step < kept["next_step"]:
            return
        # Kept first. After a crash between the two a row is missing, and none is there twice.
        kept["next_step"] = step + 1
        replace_text(self.out / "track.json", json.dumps(self.kept))
        metrics = {k: v for k, v in row.items() if k != "step" and math.isfinite(v)}
        table = [[step, *(_printable(sample.get(field)) for field in COLUMNS.values())]
                 for sample in samples[:TABLE_ROWS]]
        self.running[name].log(step, metrics, table)

    def alarm(self, step: int, text: str) -> None:
        """Send an alarm."""
        for name, tracker in list(self.running.items()):
            self._attempt(name, tracker.alarm, step, text)

    def close(self, failed: bool) -> None:
        """Close all trackers. Waits for what is on its way, about a minute at most."""
        for name, tracker in list(self.running.items()):
            self._attempt(name, tracker.close, failed)
        self.running = {}


def _printable(x):
    """A text without halves of surrogate pairs, which UTF-8 has not; other values as they are."""
    return x.encode(errors="replace").decode() if isinstance(x, str) else x


class WandbTracker:
    """A run at Weights & Biases. WANDB_PROJECT, WANDB_MODE=offline and its other variables have their effect.

    `run_id`, here and below: the tracked run to continue, "" for a new one. The attribute `id` is its id."""

    def __init__(self, out: Path, config: Mapping, run_id: str) -> None:
        import wandb

        self.table = wandb.Table
        self.run = wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), name=out.resolve().name,
                              id=run_id or None, resume="allow", dir=out, config=dict(config),
                              allow_val_change=True)
        self.id = self.run.id

    def log(self, step: int, metrics: Mapping[str, float], table: Sequence[Sequence]) -> None:
        """Send a step's metrics, and the table of its samples if it has rows. Sent at once: by default wandb
        waits for the next step."""
        values = dict(metrics)
        if table:
            values["samples"] = self.table(columns=["step", *COLUMNS], data=table, allow_mixed_types=True)
        self._log(values, step)

    def _log(self, values, step):
        self.run.log(values, step=step, commit=True)

    def alarm(self, step: int, text: str) -> None:
        """Send an alarm."""
        self.run.alert(title=f"step {step}", text=text)

    def close(self, failed: bool) -> None:
        """End the run."""
        self.run.finish(exit_code=int(failed))


class TrackioTracker(WandbTracker):
    """A run of Trackio, whose functions are named like wandb's. It finds a run by its name alone, and keeps
    all runs in the folder TRACKIO_DIR."""

    def __init__(self, out: Path, config: Mapping, run_id: str) -> None:
        import trackio

        self.table = trackio.Table
        self.run = trackio.init(PROJECT, out.resolve().name, config=dict(config), embed=False,
                                resume="must" if run_id else "never")
        self.id = self.run.id
        if self.id != (run_id or self.id):
            self.run.finish()
            raise ValueError(f"a newer run is named {self.run.name} too")

    def _log(self, values, step):
        self.run.log(values, step)

    def close(self, failed: bool) -> None:
        """End the run."""
        self.run.finish()


class MlflowTracker:
    """A run of MLflow: at MLFLOW_TRACKING_URI, or in the folder `mlruns` beside the run's."""

    def __init__(self, out: Path, config: Mapping, run_id: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.out, self.id, folder = out, run_id, (out.resolve().parent / "mlruns").as_uri()
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", folder))
        if run_id:
            self.client.update_run(run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name)
        self.id = self.client.create_run(experiment, run_name=out.resolve().name).info.run_id
        params = [Param(key, str(value)[:6000]) for key, value in config.items()]  # 6000: MLflow's limit
        for i in range(0, len(params), 100):  # 100: its limit a call
            self.client.log_batch(self.id, params=params[i:i + 100])

    def log(self, step: int, metrics: Mapping[str, float], table: Sequence[Sequence]) -> None:
        """Send a step's metrics, and the table of its samples as a JSON artifact. In names, @ and / become
        dots. MLflow takes no @, and in its folder reward is a file, so reward/part can't be one."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        named = [Metric(re.sub(r"[^\w: -]", ".", name), x, now, step) for name, x in metrics.items()]
        self.client.log_batch(self.id, named)
        if table:
            columns = {"columns": ["step", *COLUMNS], "data": table}
            self.client.log_dict(self.id, columns, f"samples/step_{step:06d}.json")

    def alarm(self, step: int, text: str) -> None:
        """Send all alarms so far, as a file."""
        self.client.log_artifact(self.id, self.out / "alarms.jsonl")

    def close(self, failed: bool) -> None:
        """End the run."""
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


TRACKERS = {"wandb": WandbTracker, "trackio": TrackioTracker, "mlflow": MlflowTracker}
