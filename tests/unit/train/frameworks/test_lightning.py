"""The parts of Lightning's strategies that need no Lightning."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from torchmn.train.frameworks import fabric_strategy, lightning_strategy
from torchmn.train.frameworks.lightning import _leave_out_repeated


@pytest.mark.parametrize(("number", "size"), [(13, 2), (12, 2), (7, 3), (3, 3)])
def test_no_sample_is_repeated(number: int, size: int) -> None:
    data = TensorDataset(torch.arange(number))
    seen: list[int] = []
    for rank in range(size):
        sampler: Any = DistributedSampler(data, size, rank, shuffle=False)
        _leave_out_repeated(DataLoader(data, batch_size=1, sampler=sampler), 1.0)
        seen += list(sampler)
        assert len(list(sampler)) == len(sampler)
    assert sorted(seen) == list(range(number))


def test_every_rank_keeps_a_batch() -> None:
    """Lightning leaves the evaluation out on a rank without any, and others would wait for it."""
    data = TensorDataset(torch.arange(2))
    sampler: Any = DistributedSampler(data, 3, 2, shuffle=False)
    assert not _leave_out_repeated(DataLoader(data, sampler=sampler), 1.0)
    assert len(list(sampler)) == 1


def test_other_samplers_are_left_alone() -> None:
    data = TensorDataset(torch.arange(13))
    assert not _leave_out_repeated(DataLoader(data), 1.0)
    sampler: Any = DistributedSampler(data, 2, 1, drop_last=True)
    assert not _leave_out_repeated(DataLoader(data, sampler=sampler), 1.0)
    assert len(sampler) == 6


@pytest.mark.parametrize("make", [lightning_strategy, fabric_strategy])
def test_what_to_install(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    from torchmn.train.frameworks import lightning

    lightning._class.cache_clear()
    for name in ("lightning", "pytorch_lightning", "lightning_fabric"):
        for loaded in [m for m in sys.modules if m.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'torchmn\[lightning\]'"):
        make()
    lightning._class.cache_clear()
