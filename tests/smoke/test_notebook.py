"""Ranks that a cell of a notebook starts."""

import pytest

from tests.all.processes.test_notebook import TRAIN, Notebook, notebook

__all__ = ["notebook"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def test_training_and_then_the_model_in_the_notebook(notebook: Notebook) -> None:
    notebook.run(TRAIN)
    shown = notebook.run("model, losses = torchmn.launch_local(train, 2, 3)")
    assert "[0] trained" in shown
    assert "2 ranks with gloo" in shown
    assert notebook.run("type(model) is Net, model(torch.ones(1, 4)).shape") == (
        "(True, torch.Size([1, 3]))"
    )
    assert notebook.run("sum(losses[8:]) < sum(losses[:4]), len(losses)") == "(True, 12)"
    notebook.run("model(torch.ones(1, 4)).sum().backward()")  # it can be trained here, too
    second = notebook.run("len(torchmn.launch_local(train, 2, 1, 2)[1])")  # DataLoader workers
    assert second.rstrip().endswith("4")
