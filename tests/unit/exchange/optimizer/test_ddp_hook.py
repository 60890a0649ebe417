"""What the hook for DistributedDataParallel refuses; tests/all/processes has the rest."""

from __future__ import annotations

import pytest
from torch import nn

from torchmn.errors import UsageError
from torchmn.exchange.optimizer import ddp_hook


def test_other_models_are_refused() -> None:
    with pytest.raises(UsageError, match="got Linear"):
        ddp_hook("int8").register(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_time_limit_is_positive() -> None:
    with pytest.raises(UsageError, match="timeout_s=0"):
        ddp_hook("int8", timeout_s=0)


def test_state_needs_a_model() -> None:
    with pytest.raises(UsageError, match="register"):
        ddp_hook("int8").state_dict()
