"""DCP on one rank, over versions of torch."""

from __future__ import annotations

import pytest
import torch

from torchmn.checkpoint import dcp
from torchmn.errors import UnsupportedError


def test_a_torch_whose_dcp_cannot_run_on_one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6: its functions have no ``no_dist``."""

    def save(state: object, *, storage_writer: object = None) -> None:
        pass

    assert dcp._alone(save) == {}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(UnsupportedError, match="on all ranks of the default process group"):
        dcp._alone(save)
