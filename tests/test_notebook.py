"""Tests that all cells of notebooks/tour.ipynb run, with a tiny base model."""

import json
import os
import re

import torch
from conftest import ROOT, run_ranks

from data import Problem

NOTEBOOK = ROOT / "notebooks" / "tour.ipynb"


def cells(kind: str) -> list[dict]:
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [c for c in book["cells"] if c["cell_type"] == kind]


def execute(base: str, steps: int) -> dict:
    """Runs all code cells. Returns what the test checks. Changes the process's folder and environment."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.close("all")  # closes figures that the fork inherits from its parent process
    os.environ |= {"BASE": base, "STEPS": str(steps)}
    os.chdir(NOTEBOOK.parent)
    names: dict = {"__name__": "__main__"}
    for i, cell in enumerate(cells("code")):
        exec(compile("".join(cell["source"]), f"code cell {i}", "exec"), names)
    from model import load_policy

    pairs = zip(load_policy(base).parameters(), names["policy"].parameters(), strict=True)
    figures = [pyplot.figure(n) for n in pyplot.get_fignums()]
    return {"history": names["history"],
            "moved": [not torch.equal(before, after) for before, after in pairs],
            "lines": [len(axis.lines) for figure in figures for axis in figure.axes],
            "rewards": [s.reward for s in names["first"]]}


def test_every_cell_runs_and_the_policy_learns(half_right):
    seen = run_ranks(1, execute, half_right, 3)[0]
    rewards = [reward for reward, _ in seen["history"]]
    assert len(rewards) == 3 and all(seen["moved"])
    assert 0 < sum(seen["rewards"]) < len(seen["rewards"])
    assert rewards[-1] > rewards[0], rewards
    assert len(seen["lines"]) == 6 and all(seen["lines"])


def test_the_example_of_the_docs_computes_the_policys_loss(half_right, tmp_path, monkeypatch):
    """Runs the code of docs/faq.md. Its ratio is 1, so its loss is minus the mean advantage of the tokens."""
    (code,) = re.findall(r"```python\n(from configs.*?)```", (ROOT / "docs/faq.md").read_text(), re.DOTALL)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/tiny-base-0").symlink_to(half_right)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    p, loss = names["p"], names["loss"].detach()
    torch.testing.assert_close(loss, -p.advantages[p.loss_tokens].mean())
    grads = [x.grad for x in names["policy"].parameters()]
    assert loss != 0 and len(names["samples"]) == 32 and all(g.isfinite().all() and g.any() for g in grads)


def test_the_stored_outputs_can_be_read_without_running_it():
    """The file has plots, rewards and responses, but no paths of a machine."""
    outputs = [output for cell in cells("code") for output in cell["outputs"]]
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert re.search(r"step  9  reward 0\.\d+", text) and r"\boxed{" in text
    (printed,) = re.findall(r"^Problem\(.*", text, re.M)
    assert repr(eval(printed, {"Problem": Problem})) == printed  # Problem still has these fields
    assert "/home" not in text and "/work" not in text and "Warning" not in text
    assert not any(output.get("name") == "stderr" or output["output_type"] == "error" for output in outputs)
