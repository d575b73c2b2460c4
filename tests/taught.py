"""Base models for tests of learning, each pretrained in seconds on a few problems of a task."""

from pathlib import Path

import pytest

from tools import tiny


def taught(task: tiny.Task, folder: Path, count: int, batches: int, batch: int) -> str:
    """Returns the folder of a model like the demo's that solves about half of `count` problems of a task. The
    held-out problems are the same problems."""
    few = task._replace(problems=lambda rng: 2 * task.problems(rng)[:count])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(HELD_OUT=count, BATCHES=batches, BATCH=batch, WARMUP=5).items():
            patch.setattr(tiny, name, value)
        return tiny.build_task(few, str(folder))
