"""Trackers: other programs that get the run's metrics, samples and alarms too (--track): Weights & Biases,
Trackio and MLflow. Each is a small class in TRACKERS; its package is imported only if it is asked for.
"""

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from configs import replace_text

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
