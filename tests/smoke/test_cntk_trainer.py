"""A loop around `torchmn.cntk.Trainer` that is killed and resumed."""

from __future__ import annotations

import pytest

from tests.all.processes.runner import Runner
from tests.all.processes.test_cntk_trainer import SCRIPT, results

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_killed_and_resumed_bit_for_bit(runner: Runner) -> None:
    script = runner.script(SCRIPT)
    straight = runner.run("-n", "2", script, "none", "straight", limit_s=60)
    assert straight.returncode == 0, straight.stderr
    assert runner.run("-n", "2", script, "killed", "broken", limit_s=60).returncode != 0
    resumed = runner.run("-n", "2", script, "none", "broken", limit_s=60)
    assert resumed.returncode == 0, resumed.stderr
    first, *others = results(straight.stdout) + results(resumed.stdout)
    assert first[0] == 0
    assert [other[0] for other in others] == [0, 6, 6]
    assert all(other[1:] == first[1:] for other in others)
