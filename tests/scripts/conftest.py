"""What holds for all user scripts: they run in float64, and ``auto`` tries every plan."""

from collections.abc import Iterator

import pytest
import torch

from tests.all.processes.conftest import _quick_start
from torchmn.comm.link_speed import LinkSpeed
from torchmn.exchange.auto import tuner

__all__ = ["_quick_start"]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def _auto_tries_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the few steps of a script: what it would choose must not depend on the machine."""
    monkeypatch.setattr(tuner, "NUM_WARM_UP", 1)
    monkeypatch.setattr(tuner, "NUM_TIMED", 1)
    monkeypatch.setattr(tuner, "WITHIN", float("inf"))
    monkeypatch.setattr(tuner, "MAX_TRIALS", 100)
    link = LinkSpeed(latency_s=1e-4, bandwidth_bytes_per_s=1e8)
    monkeypatch.setattr(tuner, "measure_links", lambda group, *_: link if group.size > 1 else None)
