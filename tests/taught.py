"""Makes base models for tests that check learning. Pretraining takes seconds, on a few problems of a task."""

from pathlib import Path

import pytest

from tools import tiny


def taught(task: tiny.Task, folder: Path, count: int, batches: int, batch: int) -> str:
    """Pretrains a model that solves about half of `count` problems of a task, on `batches` batches of `batch`
    texts. The held-out problems are the training problems. Returns the model's folder."""
    few = task._replace(problems=lambda rng: 2 * task.problems(rng)[:count])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(HELD_OUT=count, BATCHES=batches, BATCH=batch, WARMUP=5).items():
            patch.setattr(tiny, name, value)
        return tiny.build_task(few, str(folder))
