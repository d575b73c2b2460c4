"""Makes base models, within seconds, for tests that check learning."""

from pathlib import Path

import pytest

from tools import tiny


def taught(task: tiny.Task, folder: Path, count: int, batches: int, batch: int) -> str:
    """Pretrains a model with `batches` updates of `batch` texts. It then solves half of `count` problems.
    Returns the model's folder, in which train.jsonl and heldout.jsonl both have these problems."""
    few = task._replace(problems=lambda rng: 2 * task.problems(rng)[:count])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(HELD_OUT=count, BATCHES=batches, BATCH=batch, WARMUP=5).items():
            patch.setattr(tiny, name, value)
        return tiny.build_task(few, str(folder))
