"""`torchmn.launch_local` in a notebook: the cells are executed by a real kernel."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.all.processes.runner import PYTHON_PATH
from tests.limits import limit

nbformat = pytest.importorskip("nbformat", reason="no nbformat: pip install nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="no nbclient: pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="no ipykernel: pip install nbclient ipykernel")

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(400)]

BEGIN = """
import os, signal, sys, time
import torch, torchmn
from torch import nn
"""
TRAIN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x)

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))

def train(epochs, num_loaders=0):
    torch.manual_seed(0)
    comm = torchmn.create_communicator("naive")
    model = Net()
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), 0.1), comm, model
    )
    own = torchmn.scatter_dataset(data, comm)
    losses = []
    for _ in range(epochs):
        for x, y in torch.utils.data.DataLoader(own, 8, num_workers=num_loaders):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    if comm.rank == 0:
        print("trained", flush=True)
    return model, losses
"""


class Notebook:
    """A kernel that executes one cell after another."""

    def __init__(self, client: Any, notebook: Any) -> None:
        self.client = client
        self._notebook = notebook

    def run(self, source: str) -> str:
        """What the cell shows."""
        cell = nbformat.v4.new_code_cell(source)
        self._notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self._notebook.cells) - 1)
        return "".join(
            output.get("text", "") or output.get("data", {}).get("text/plain", "")
            for output in cell.outputs
        )

    def error(self, source: str) -> Any:
        with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
            self.run(source)
        return caught.value

    @property
    def kernel(self) -> psutil.Process:
        return psutil.Process(self.client.km.provisioner.process.pid)

    def ranks(self) -> list[psutil.Process]:
        try:
            children = self.kernel.children(recursive=True)
            return [p for p in children if "torchmn" in " ".join(p.cmdline())]
        except psutil.NoSuchProcess:
            return []


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("PYTHONPATH", f"{PYTHON_PATH}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    document = nbformat.v4.new_notebook()
    client = nbclient.NotebookClient(
        document, timeout=int(limit(120)), resources={"metadata": {"path": str(tmp_path)}}
    )
    with client.setup_kernel():
        made = Notebook(client, document)
        made.run(BEGIN)
        yield made
        assert made.ranks() == []


def test_functions_and_figures_of_cells(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("def scaled(f):\n    return lambda x: f * x * (int(os.environ['RANK']) + 1)")
    shown = notebook.run("torchmn.launch_local(scaled(10), 2, 3, all_results=True)")
    assert shown.rstrip().endswith("[30, 60]")
    figure = (
        "def draw():\n"
        "    import matplotlib.pyplot as plt\n"
        "    figure, axes = plt.subplots()\n"
        "    axes.plot([1, 2, 3])\n"
        "    plt.show()\n"
        "    return figure\n"
        "figure = torchmn.launch_local(draw, 1)\n"
        "print(type(figure).__name__, len(figure.axes[0].lines))"
    )
    assert "Figure 1" in notebook.run(figure)
    assert os.listdir(tmp_path / "torchmn-logs")


def test_an_exception_has_the_lines_of_the_cell(notebook: Notebook) -> None:
    notebook.run(
        "def fails():\n"
        "    comm = torchmn.create_communicator('naive')\n"
        "    if comm.rank == 1:\n"
        "        raise KeyError('a missing key')  # in a cell\n"
        "    comm.barrier()"
    )
    error = notebook.error("torchmn.launch_local(fails, 2)")
    assert error.ename == "RankError"
    assert "Rank 1 of 2 raised KeyError: 'a missing key'" in error.evalue
    assert "raise KeyError('a missing key')  # in a cell" in error.evalue
    caught = notebook.run(
        "try:\n"
        "    torchmn.launch_local(fails, 2)\n"
        "except torchmn.errors.RankError as error:\n"
        "    print('cause', repr(error.__cause__), error.rank)"
    )
    assert "cause KeyError('a missing key') 1" in caught
    assert notebook.run("1 + 1") == "2"


def test_a_kernel_that_is_killed_leaves_no_rank(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(
        "import threading\n"
        "def waits():\n"
        "    open(f\"started{os.environ['RANK']}\", 'w').close()\n"
        "    time.sleep(600)"
    )
    source = (
        "def kill():\n"
        "    while not all(os.path.exists(f'started{rank}') for rank in range(2)):\n"
        "        time.sleep(0.05)\n"
        "    import psutil\n"
        "    pids = [p.pid for p in psutil.Process().children(recursive=True)]\n"
        "    open('pids', 'w').write(' '.join(map(str, pids)))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "threading.Thread(target=kill).start()\n"
        "torchmn.launch_local(waits, 2)"
    )
    with pytest.raises(nbclient.exceptions.DeadKernelError):
        notebook.run(source)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= 5  # a launcher, two agents and two scripts
    deadline = time.monotonic() + limit(30)
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.1)
