"""What is the same over all transports."""

from __future__ import annotations

import pytest

from tests.limits import limit
from tests.unit.comm.ranks import run_transports
from torchmn.comm.transports.base import TimeLimit, gather_json


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_tell_each_other_values_of_any_length(size: int) -> None:
    values = [{"rank": rank, "text": "é" * 1000 * rank} for rank in range(size)]
    found = run_transports(lambda t: gather_json(t, values[t.rank], TimeLimit(limit(20))), size)
    assert found == [values] * size
