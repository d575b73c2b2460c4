"""The notebook runs: every cell, in order, in one namespace, on a base model that is taught four sums in seconds."""

import json
import os
import random
import shutil

import pytest
import torch
from conftest import ROOT, run_ranks

NOTEBOOK = ROOT / "notebooks" / "tour.ipynb"


def cells(kind: str) -> list[dict]:
    return [c for c in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


@pytest.fixture(scope="module")
def taught(tiny, tmp_path_factory) -> str:
    """A folder like the demo's base model: right every other time, on four sums."""
    from transformers import Qwen2ForCausalLM

    import tiny as demo

    folder = tmp_path_factory.mktemp("taught") / "base"
    shutil.copytree(tiny, folder)
    model, sums = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32), [(37, 45), (12, 34), (60, 17), (58, 29)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(BATCHES=80, BATCH=16, GUESSES=0.5, WARMUP=5).items():
            patch.setattr(demo, name, value)
        demo._teach(model, demo.make_tokenizer(), sums[:], random.Random(0), demo.prompt_len(2))
    model.save_pretrained(folder)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(folder)


def execute(base: str, steps: int) -> dict:
    """What the notebook's names stand for at its end, as far as the test looks at it. In a process of its own."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.close("all")  # what this process was forked with
    os.environ |= {"BASE": base, "STEPS": str(steps)}
    os.chdir(NOTEBOOK.parent)
    names: dict = {"__name__": "__main__"}
    for i, cell in enumerate(cells("code")):
        exec(compile("".join(cell["source"]), f"code cell {i}", "exec"), names)
    from model import load_policy

    moved = [not torch.equal(a, b) for a, b in zip(load_policy(base).parameters(), names["policy"].parameters(), strict=True)]
    drawn = [len(axis.lines) for n in pyplot.get_fignums() for axis in pyplot.figure(n).axes]
    return {"history": names["history"], "moved": moved, "drawn": drawn, "rewards": [s.reward for s in names["first"]]}


def test_every_cell_runs_and_the_policy_learns(taught):
    """The cells' own assertions compare hand-made advantages, log-probs and clipping with the modules'."""
    seen = run_ranks(1, execute, taught, 3)[0]
    rewards = [r for r, _ in seen["history"]]
    assert len(rewards) == 3 and all(seen["moved"])
    assert 0 < sum(seen["rewards"]) < len(seen["rewards"])  # some right, some wrong: something to learn from
    assert rewards[-1] > rewards[0], rewards
    assert len(seen["drawn"]) == 6 and all(seen["drawn"])


def test_it_is_a_notebook_without_outputs():
    """Version 4.5 of the format: every cell has an id of its own, and what a run leaves behind is not kept."""
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5) and {"kernelspec", "language_info"} <= set(book["metadata"])
    assert len({c["id"] for c in book["cells"]}) == len(book["cells"]) == len(cells("code")) + len(cells("markdown"))
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in cells("code"))
