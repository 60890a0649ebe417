"""The example of parallel convolution trains as one process does."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.all.processes.runner import Runner
from tests.all.processes.test_examples import EXAMPLES, run

SCRIPT = EXAMPLES / "model_parallel" / "train_mnist_parallel_convolution.py"
OPTIONS = ["--dataset", "digits", "--batchsize", "128", "--steps", "8", "--epoch", "1"]

pytestmark = pytest.mark.processes


def losses(num_workers: int, out: Path) -> list[tuple[str, float]]:
    """What it prints: losses and the accuracy."""
    command = ["-m", "torchmn", "run", "-n", str(num_workers), "--log-dir", out.parent / "logs"]
    lines, _ = run([*command, SCRIPT, *OPTIONS, "--out", out])
    pairs = [line.rsplit(" ", 1) for line in lines]
    return [(name, float(value)) for name, value in pairs if name.startswith(("step", "epoch"))]


def test_two_workers_train_as_one_does(tmp_path: Path) -> None:
    alone, together = losses(1, tmp_path / "alone.pt"), losses(2, tmp_path / "together.pt")
    assert [name for name, _ in together] == [name for name, _ in alone]
    assert len(together) == 9
    assert together[-2][1] < together[0][1]
    for (name, wanted), (_, found) in zip(alone, together, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3), name
    states = [torch.load(tmp_path / name) for name in ("alone.pt", "together.pt")]
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-4)
    first = nn.Conv2d(1, 17, 3)
    first.load_state_dict({"weight": states[1]["0.weight"], "bias": states[1]["0.bias"]})


def test_distributed_data_parallel_needs_the_ranks_of_the_data_axis(runner: Runner) -> None:
    """It would give all ranks rank 0's part, and average what belongs to different ones."""
    script = runner.script("""
import pytest
import torch
import torchmn
from torch.nn.parallel import DistributedDataParallel

comm = torchmn.create_communicator(timeout_s=20)
grid = torchmn.Grid(comm, data=1, model=2)
data, every = grid.data.process_group, comm.process_group
layer = torchmn.links.ParallelLinear(4, 6, grid.model)
part = layer.weight.detach().clone()
x = torch.ones(2, 4)
y = layer(x)
assert torch.equal(DistributedDataParallel(layer, process_group=data)(x), y)
assert torch.equal(layer.weight, part)
wrong = DistributedDataParallel(layer, process_group=every)
with pytest.raises(torchmn.errors.UnsupportedError, match="process_group=grid.data.process_group"):
    wrong(x)
comm.finalize()
""")
    done = runner.run("-n", "2", "--backend", "gloo", script, limit_s=60)
    assert done.returncode == 0, done.stderr
