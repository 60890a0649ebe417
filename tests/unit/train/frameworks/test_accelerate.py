"""`attach` refuses what it cannot serve."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from torchmn.errors import UnsupportedError, UsageError
from torchmn.train.frameworks import attach


def test_another_kind_of_object() -> None:
    with pytest.raises(UsageError, match="but got Linear"):
        attach(nn.Linear(1, 1))


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_what_exchanges_by_itself(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"uses {kind}"):
        attach(SimpleNamespace(prepare_model=None, distributed_type=SimpleNamespace(value=kind)))


def test_after_prepare() -> None:
    used = SimpleNamespace(prepare_model=None, distributed_type="NO", _models=[nn.Linear(1, 1)])
    with pytest.raises(UsageError, match=r"after accelerator.prepare\(\)"):
        attach(used)
