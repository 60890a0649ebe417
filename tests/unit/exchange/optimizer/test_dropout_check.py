"""Equal dropout masks on all ranks are reported. Ranks are processes: threads share a generator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.limits import limit
from torchmn import create_multi_node_optimizer
from torchmn.testing import run_ranks

SCRIPT = """
import sys
import torch, torchmn
from torch import nn
comm = torchmn.create_communicator()
{seed}
model = nn.Sequential(nn.Linear(2, 64), nn.Dropout({p}), nn.Linear(64, 1))
sgd = torch.optim.SGD(model.parameters(), 0.1)
optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
model(torch.ones(1, 2))  # training begins
mask = (nn.Dropout(0.5)(torch.ones(64)) > 0).tolist()
if comm.rank == 0:
    print("equal" if len(set(map(str, comm.allgather_obj(mask)))) == 1 else "different")
else:
    comm.allgather_obj(mask)
"""


def run(folder: Path, seed: str, p: float = 0.1) -> tuple[str, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(seed=seed, p=p))
    done = subprocess.run(
        [sys.executable, "-m", "torchmn", "run", "-n", "2", str(script)],
        capture_output=True, text=True, timeout=limit(55), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    masks = next(text for text in ("equal", "different") if text in done.stdout)
    return masks, "".join(line for line in done.stderr.splitlines() if "same masks" in line)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("seed", "p", "masks", "is_warned"),
    [
        ("torch.manual_seed(3)", 0.1, "equal", True),
        ("torch.manual_seed(3)", 0.0, "equal", False),
        ("torchmn.seed_ranks(3, comm)", 0.1, "different", False),
    ],
)
def test_one_seed_on_all_ranks(
    tmp_path: Path, seed: str, p: float, masks: str, is_warned: bool
) -> None:
    seen, warning = run(tmp_path, seed, p)
    assert seen == masks
    assert bool(warning) == is_warned
    if is_warned:
        assert "torchmn.seed_ranks(seed, comm)" in warning
        assert "rank 0 of 2" in warning


@pytest.mark.filterwarnings("error")
def test_ranks_that_are_threads_of_one_process_are_not_asked() -> None:
    def wrap(comm):
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        create_multi_node_optimizer(torch.optim.SGD(model.parameters(), 0.1), comm, model)

    run_ranks(wrap, 2)
