"""What other systems are told: a sentence at import on Windows, and at the start of ranks on macOS.

None of them is here: the name of the system is another one, and what only Linux has is taken away.
"""

import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import torchmn
from tests.limits import limit
from torchmn.cluster.cpus import available_processors
from torchmn.errors import UnsupportedError
from torchmn.run.plan import RunOptions, plan_job

OPTIONS = RunOptions(argv=("python", "train.py"), num_ranks=2, hosts="a:2", elastic="1:1")
STARTS: dict[str, Callable[[], object]] = {
    "torchmn run": lambda: plan_job(RunOptions(argv=("python", "train.py"), num_ranks=2), {}),
    "torchmn run --elastic": lambda: plan_job(OPTIONS, {}),
    "launch_local": lambda: torchmn.launch_local(max, 2, [1, 5]),
    "torchrun": torchmn.create_communicator,
    "doctor": available_processors,
}
# Of Python's standard library on macOS.
MISSING = {
    "os": [
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "O_TMPFILE"),
        *("posix_fallocate", "waitid"),
    ],
    "socket": ["TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "SO_PEERCRED"],
}
TRAIN = f"""
import os, socket, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
for module, names in {MISSING}.items():
    for name in names:
        delattr(sys.modules[module], name)
import torchmn.cluster.operating_system, types
torchmn.cluster.operating_system.sys = types.SimpleNamespace(platform="darwin")
comm = torchmn.create_communicator(quiet=True)
torchmn.seed_ranks(0, comm)
model = torch.nn.Linear(2, 1)
loader = torchmn.scatter_loader(DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4), comm)
optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters()), comm, model)
for (batch,) in loader:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
checkpointer = torchmn.create_multi_node_checkpointer(comm, sys.argv[1], "net")
checkpointer.save(1, {{"model": model, "optimizer": optimizer}})
checkpointer.finish()
print(comm.sum_over_ranks(2.0), comm.reason)
"""


@contextmanager
def named(platform: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, the operating system has another name."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", platform)
        yield


def test_the_import_on_windows_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torchmn.__file__
    with named("win32", monkeypatch), pytest.raises(ImportError, match="Use WSL 2"):
        runpy.run_path(torchmn.__file__)


@pytest.mark.parametrize("name", STARTS)
def test_ranks_on_another_system_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        if name == "torchrun":
            monkeypatch.setenv(variable, text)
    with named("darwin", monkeypatch), pytest.raises(UnsupportedError) as found:
        STARTS[name]()
    assert "needs Linux and this is darwin" in str(found.value)


@pytest.mark.processes
def test_one_process_trains_without_what_only_linux_has(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", TRAIN, str(tmp_path / "checkpoints")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2.0")
