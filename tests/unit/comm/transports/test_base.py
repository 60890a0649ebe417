"""What is the same over all transports."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from tests.limits import limit
from torchmn.comm.transports.base import TimeLimit, gather_json
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.testing import run_threads


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_tell_each_other_values_of_any_length(size: int) -> None:
    store = HashStore()

    def rank_main(rank: int) -> list[object]:
        transport = TorchDistributedTransport(store, rank, size, timeout_s=limit(20))
        return gather_json(transport, {"rank": rank, "text": "é" * 1000 * rank}, TimeLimit(20))

    expected = [{"rank": rank, "text": "é" * 1000 * rank} for rank in range(size)]
    assert run_threads(rank_main, size) == [expected] * size
