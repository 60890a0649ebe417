"""Equal dropout masks on all ranks are reported. Ranks are processes: threads share a generator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from tests.limits import limit
from tests.ranks import on_ranks
from tests.unit.models import optimizer_of

SCRIPT = """
import sys, warnings
import torch, torchmn
from torch import nn
comm = torchmn.create_communicator()
seeds = {"one seed": torch.manual_seed, "seed_ranks": lambda seed: torchmn.seed_ranks(seed, comm)}
for name, p in (("one seed", 0.0), ("seed_ranks", 0.1), ("one seed", 0.1)):
    seeds[name](3)
    model = nn.Sequential(nn.Linear(2, 64), nn.Dropout(p), nn.Linear(64, 1))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torchmn.create_multi_node_optimizer(sgd, comm, model)
        model(torch.ones(1, 2))  # training begins
    masks = comm.allgather_obj((nn.Dropout(0.5)(torch.ones(64)) > 0).tolist())
    texts = [str(each.message) for each in caught if "same masks" in str(each.message)]
    if comm.rank == 0:
        print(name, p, "equal" if masks[0] == masks[1] else "different", *texts)
    else:
        assert not texts
"""


@pytest.mark.processes
def test_one_seed_on_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torchmn", "run", "-n", "2", str(script)],
        capture_output=True, text=True, timeout=limit(55), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    *others, warned = [line for line in shown if line.startswith(("one seed", "seed_ranks"))]
    assert others == ["one seed 0.0 equal", "seed_ranks 0.1 different"]
    assert warned.startswith("one seed 0.1 equal rank 0 of 2")
    assert "torchmn.seed_ranks(seed, comm)" in warned


SEEDED_AGAIN = """
import warnings
import torch, torchmn
from torch import nn
from torch.utils.data import DataLoader
comm = torchmn.create_communicator()
data = torch.ones(8, 2)
seeds = {
    "one seed": torch.manual_seed,
    "a seed of its own": lambda seed: torch.manual_seed(seed + comm.rank),
    "seed_ranks": lambda seed: torchmn.seed_ranks(seed, comm),
}
cases = ("one seed", 0.0), ("a seed of its own", 0.1), ("seed_ranks", 0.1), ("one seed", 0.1)
for name, p in cases:
    torchmn.seed_ranks(3, comm)
    loader = torchmn.scatter_loader(DataLoader(data, 4), comm)
    model = nn.Sequential(nn.Linear(2, 64), nn.Dropout(p), nn.Linear(64, 1))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(3):
            seeds[name](epoch)
            for x in loader:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
    texts = [str(each.message) for each in caught if "not independent" in str(each.message)]
    print(name, p, len(texts))
    optimizer.close()
"""


@pytest.mark.processes
def test_one_seed_on_all_ranks_during_training(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SEEDED_AGAIN)
    done = subprocess.run(
        [sys.executable, "-m", "torchmn", "run", "-n", "2", str(script)],
        capture_output=True, text=True, timeout=limit(55), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = ("one seed", "a seed", "seed_ranks")
    shown = [line for line in done.stdout.splitlines() if line[4:].startswith(names)]
    none = ["one seed 0.0 0", "a seed of its own 0.1 0", "seed_ranks 0.1 0"]
    assert [line[4:] for line in shown if line.startswith("[0]")] == [*none, "one seed 0.1 0"]
    assert [line[4:] for line in shown if line.startswith("[1]")] == [*none, "one seed 0.1 1"]


@pytest.mark.filterwarnings("error")
@on_ranks(2)
def test_ranks_that_are_threads_of_one_process_are_not_asked(comm) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    optimizer_of(comm, model)
