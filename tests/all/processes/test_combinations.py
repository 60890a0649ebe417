"""Ordinary combinations train what one process trains, under both kinds of launcher."""

import json
from pathlib import Path

import pytest

from tests.all.processes.test_examples import run

SCRIPT = Path(__file__).with_name("combinations_script.py")
LAUNCHERS = {
    "torchmn run": ["-m", "torchmn", "run", "-n", "3"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
}


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_train_what_one_process_trains(tmp_path: Path, launcher: str) -> None:
    run([SCRIPT, tmp_path, "one"])
    run([*LAUNCHERS[launcher], SCRIPT, tmp_path])
    wanted, *ranks = (
        json.loads(path.read_text())
        for path in (tmp_path / "one.json", *sorted(tmp_path.glob("rank*.json")))
    )
    assert len(ranks) == (3 if launcher == "torchmn run" else 2)
    for found in ranks:
        assert found.keys() == wanted.keys()
        for name, parameters in wanted.items():
            for own, expected in zip(found[name], parameters, strict=True):
                assert own == pytest.approx(expected, abs=1e-12), name
