"""The ranks that hold one model among them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchmn.errors import UnsupportedError
from torchmn.exchange.sharded_parameters import ModelMesh


def test_without_shards_a_rank_agrees_with_itself() -> None:
    mesh = ModelMesh([torch.zeros(2)])
    assert mesh.size == 1
    assert mesh.means(2.0, 3.0) == (2.0, 3.0)
    assert mesh.any(True)
    assert not mesh.any(False)


def test_shards_on_gpus_are_refused_with_the_cure() -> None:
    """By a stand-in: this machine may have no GPU."""
    parameter: Any = torch.zeros(2)
    parameter.device_mesh = SimpleNamespace(device_type="cuda", ndim=1)
    with pytest.raises(UnsupportedError, match=r"on cuda are not exchanged yet.*HSDP"):
        ModelMesh([parameter])
