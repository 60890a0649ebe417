"""The examples in docstrings and in the README are run."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from torchmn.communicators import Communicator
from torchmn.testing import run_ranks
from torchmn.testing.netlab import missing_requirement

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
NEED_HOSTS = {"torchmn.testing.netlab.lab"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


MODULES = {
    name_of(path): path.read_text().count(">>> ")
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text()
}


@pytest.fixture(autouse=True)
def _random_numbers_as_before() -> Any:
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()
    yield
    torch.random.set_rng_state(torch_state)
    np.random.set_state(numpy_state)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    if name in NEED_HOSTS and missing_requirement():
        pytest.skip(reason=f"no test hosts: {missing_requirement()}")
    module = import_module(name)

    def rank_main(comm: Communicator) -> doctest.TestResults:
        runner = doctest.DocTestRunner()
        names = {"comm": comm, "np": np, "torch": torch, "torchmn": torchmn}
        for found in doctest.DocTestFinder().find(module, extraglobs=names):
            runner.run(found)
        return runner.summarize()

    (results,) = run_ranks(rank_main, 1)
    assert (results.failed, results.attempted) == (0, MODULES[name])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block, with what the user has before: a network, loaders and an optimizer."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.randn(6, 3), torch.randn(6, 1))
    model = torch.nn.Linear(3, 1)
    names: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "train_loader": DataLoader(data, 2),
        "test_loader": DataLoader(data, 3),
        "loss_sum": 1.5,
        "num_correct": 2,
    }
    try:
        for block in blocks:
            names["sgd"] = names["optimizer"] = torch.optim.SGD(model.parameters(), 0.1)
            exec(compile(block, "README.md", "exec"), names)
            optimizer = names["optimizer"]
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.close()
        assert [len(x) for x, _ in names["train_loader"]] == [2, 2, 2]
    finally:
        names["comm"].finalize()
    assert (names["loss_sum"], names["num_correct"]) == (1.5, 2)
    assert torch.load(tmp_path / "model.pt").keys() == model.state_dict().keys()
