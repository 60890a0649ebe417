"""The examples in docstrings and in the README are run."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchmn
from tests.limits import limit
from tests.project import docstrings
from torchmn.testing import run_ranks

ROOT = Path(__file__).parents[2]
FLAGS = re.DOTALL | re.MULTILINE
SOURCE = ROOT / "src"


def name_of(path: Path) -> str:
    """The module in which the examples of a file are found: errors say another one."""
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    return "torchmn.errors" if name == "torchmn.base.errors" else name


MODULES = {
    name_of(path): path.read_text().count(">>> ")
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text()
}


def no_package(name: str) -> str | None:
    is_missing = importlib.util.find_spec(name) is None
    return f"{name} is not installed (pip install {name})" if is_missing else None


# Examples that start processes, or need more than torchmn does, and what of that is missing.
#
# Each is run in the main thread of a process of its own.
ALONE: dict[str, Callable[[], str | None]] = {
    "torchmn.cntk.logging.TensorBoardProgressWriter": partial(no_package, "tensorboard"),
    "torchmn.train.frameworks.accelerate.attach": partial(no_package, "accelerate"),
    "torchmn.train.frameworks.lightning.fabric_strategy": partial(no_package, "lightning"),
    "torchmn.train.frameworks.lightning.lightning_strategy": partial(no_package, "lightning"),
    "torchmn.train.multiprocess_updater.MultiprocessParallelUpdater": lambda: None,
    "torchmn.run.rank_environment.run_as_rank": lambda: None,
    "torchmn.run.start.run_job": lambda: None,
}


@pytest.fixture(autouse=True)
def _random_numbers_as_before() -> Any:
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()
    yield
    torch.random.set_rng_state(torch_state)
    np.random.set_state(numpy_state)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    found = docstrings.examples(name)
    assert sum(len(each.examples) for each in found) == MODULES[name]
    here = [each for each in found if each.name not in ALONE]
    (results,) = run_ranks(partial(docstrings.run, here), 1)
    assert results.failed == 0


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ALONE)
def test_docstring_in_a_process(name: str, tmp_path: Path) -> None:
    if reason := ALONE[name]():
        pytest.skip(reason=reason)
    python_path = os.pathsep.join([str(Path(torchmn.__file__).parents[1]), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.project.docstrings", name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=limit(180),
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_readme() -> None:
    """With what the user has before; `tests/smoke/test_plain_example.py` runs its seven lines."""
    [block] = re.findall(r"^ *```python\n(.*?)^ *```", (ROOT / "README.md").read_text(), FLAGS)
    model = torch.nn.Linear(3, 1)
    comm = torchmn.create_communicator()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    names: dict[str, Any] = {"torchmn": torchmn, "comm": comm, "model": model}
    names["optimizer"] = optimizer
    before = model.weight.detach().clone()
    try:
        exec(compile(textwrap.dedent(block), "README.md", "exec"), names)
        wrapped = names["optimizer"]
        model(torch.ones(2, 3)).sum().backward()
        wrapped.step()
        wrapped.close()
    finally:
        comm.finalize()
    assert wrapped is not optimizer
    torch.testing.assert_close(model.weight, before - 0.2)
