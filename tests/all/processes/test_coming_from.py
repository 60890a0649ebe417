"""The pages for users of DDP and Horovod: each row is true, on two ranks of `mp.spawn`, and what
the page for DDP changes in a script runs before and after."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.all.processes.coming_from import ROWS
from tests.all.processes.runner import Runner, free_port
from tests.limits import limit

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
CELLS = [(page, cell) for page, rows in ROWS.items() for cell in rows]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    file = tmp_path_factory.mktemp("rows") / "outcomes.json"
    command = [sys.executable, "-m", "tests.all.processes.coming_from", str(free_port()), str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(120))
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("page", "cell"), CELLS, ids=[f"{page}: {cell}" for page, cell in CELLS])
def test_row(outcomes: dict[str, dict[str, str]], page: str, cell: str) -> None:
    assert outcomes[page][cell] == "ok"


@pytest.mark.parametrize("page", ROWS)
def test_each_row_of_the_page_is_run_and_no_other(page: str) -> None:
    lines = (ROOT / "docs" / f"coming-from-{page}.md").read_text().splitlines()
    rows = [line.removeprefix("| ") for line in lines if line.startswith("| ")]
    first = [row.split(" | ")[0].replace("`", "") for row in rows]
    cells = [cell for cell in first if cell.lower() != page]
    assert cells
    for cell in cells:
        assert len([known for known in ROWS[page] if cell.startswith(known)]) == 1, cell
    for known in ROWS[page]:
        assert [cell for cell in cells if cell.startswith(known)], known


# What the page leaves out between the parts of its difference, in both scripts.
BEFORE = """
import torch, torchmn
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
"""
DATA = """
numbers = torch.Generator().manual_seed(1)
x = torch.randn(403, 6, generator=numbers)
rows = TensorDataset(x, x[:, 0].gt(0).long())
train, test = (torch.utils.data.Subset(rows, part) for part in (range(300), range(300, 403)))
"""
MODEL = """
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
loss_function = nn.CrossEntropyLoss()
"""
EVALUATION = """
test_loss, num_correct = 0.0, 0
with torch.no_grad():
    for x, y in test_loader:
        output = model(x)
        test_loss += float(loss_function(output, y)) * len(x)
        num_correct += int(output.argmax(1).eq(y).sum())
"""


@pytest.mark.timeout(200)
def test_the_difference_from_a_ddp_script(runner: Runner) -> None:
    """Both sides run on two ranks; the ported one saves what it saves in one process."""
    page = (ROOT / "docs" / "coming-from-ddp.md").read_text()
    [(_, shown)] = re.findall(r'```diff title="(.*?)"\n(.*?)```', page, re.DOTALL)
    saved = {}
    for side, num_ranks in (("-", 2), ("+", 2), ("+", 1)):
        own = "\n".join(line[1:] for line in shown.splitlines() if line[:1] in (" ", side, ""))
        start, loaders, training, end = own.split("\n\n")
        text = "\n".join([BEFORE, start, DATA, loaders, MODEL, training, EVALUATION, end])
        words = ("-n", str(num_ranks), "--backend", "gloo")
        done = runner.run(*words, runner.script(text), limit_s=60)
        assert done.returncode == 0, done.stderr
        saved[side, num_ranks] = torch.load(runner.folder / "model.pt", weights_only=True)
    one = saved["+", 1]
    assert saved["-", 2].keys() == saved["+", 2].keys() == one.keys()
    for name, tensor in saved["+", 2].items():
        torch.testing.assert_close(tensor, one[name], rtol=0, atol=1e-5)
