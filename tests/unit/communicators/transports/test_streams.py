"""Large messages over sockets of our own."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from torchmn.communicators.transports import streams
from torchmn.communicators.transports.base import TimeLimit
from torchmn.communicators.transports.streams import StreamTransport
from torchmn.communicators.transports.torch_distributed import TorchDistributedTransport
from torchmn.errors import CommunicationError, PeerLostError, TimeLimitError
from torchmn.testing.contracts import seeded
from torchmn.testing.ranks import run_threads

LARGE = 70_001  # elements


def run(function, size, timeout_s=20.0):
    """Call ``function(transport)`` on every rank, threads; results in rank order."""
    store = HashStore()

    def rank_main(rank):
        inner = TorchDistributedTransport(store, rank, size, timeout_s=timeout_s)
        with contextlib.closing(StreamTransport.over(inner, TimeLimit(timeout_s))) as transport:
            return function(transport)

    return run_threads(rank_main, size)


def part(rank, dtype=torch.float64, numel=LARGE):
    return seeded(rank, numel).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_sums_are_right_and_the_same_bits_everywhere(size, dtype) -> None:
    def rank_main(transport):
        assert transport.name == "streams"
        buffer = part(transport.rank, dtype, size * LARGE)
        transport.all_reduce_(buffer, "sum", TimeLimit(20))
        return buffer

    results = run(rank_main, size)
    total = sum(part(rank, dtype, size * LARGE).double() for rank in range(size))
    for result in results:
        assert torch.equal(result, results[0])
        torch.testing.assert_close(result.double(), total, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("op", ["max", "min"])
def test_other_reductions(op) -> None:
    def rank_main(transport):
        buffer = part(transport.rank, numel=2 * LARGE)
        transport.all_reduce_(buffer, op, TimeLimit(20))
        return buffer

    expected = getattr(torch, f"{op}imum")(*(part(r, numel=2 * LARGE) for r in range(2)))
    for result in run(rank_main, 2):
        assert torch.equal(result, expected)


def test_small_and_large_messages_to_all_in_one_exchange() -> None:
    def rank_main(transport):
        me, others = transport.rank, [r for r in range(3) if r != transport.rank]
        sizes = (LARGE, 5, 0, 2 * LARGE)
        got = {(r, n): torch.zeros(n, dtype=torch.float64) for r in others for n in sizes}
        transport.exchange(
            [(r, part(10 * me + r, numel=n)) for r in others for n in sizes],
            [(r, got[r, n]) for r in others for n in sizes],
            TimeLimit(20),
        )
        for (r, n), tensor in got.items():
            assert torch.equal(tensor, part(10 * r + me, numel=n))

    run(rank_main, 3)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_announced_sums_are_those_that_are_not(size, dtype) -> None:
    numels = [size * LARGE, size * LARGE + 1, 5, 2 * size * LARGE]

    def rank_main(transport):
        limit = TimeLimit(20)
        plain = [part(transport.rank + i, dtype, n) for i, n in enumerate(numels)]
        ahead = [buffer.clone() for buffer in plain]
        for buffer in plain:
            transport.all_reduce_(buffer, "sum", limit)
        for buffer in ahead:
            transport.send_ahead(buffer)
        other = torch.ones(size * LARGE)
        transport.all_reduce_(other, "max", limit)  # may come between them
        for buffer in ahead:
            transport.all_reduce_(buffer, "sum", limit)
        return plain, ahead

    for plain, ahead in run(rank_main, size):
        assert all(map(torch.equal, plain, ahead))


def test_announced_sums_are_made_in_their_order() -> None:
    def rank_main(transport):
        first, second = torch.ones(2 * LARGE), torch.ones(2 * LARGE)
        transport.send_ahead(first)
        transport.send_ahead(second)
        with pytest.raises(CommunicationError, match="sum 2 is made before sum 1"):
            transport.all_reduce_(second, "sum", TimeLimit(20))

    run(rank_main, 2)


def test_ranks_that_announce_something_else_are_told() -> None:
    def rank_main(transport):
        buffer = torch.ones(2 * LARGE)
        if transport.rank == 1:
            transport.send_ahead(torch.zeros(2 * LARGE))
            transport._announced.popleft()
        transport.send_ahead(buffer)
        if transport.rank == 0:
            with contextlib.suppress(PeerLostError):
                transport.all_reduce_(buffer, "sum", TimeLimit(20))
        else:
            with pytest.raises(PeerLostError, match="with tag 1 where .* different collective"):
                transport.all_reduce_(buffer, "sum", TimeLimit(20))

    run(rank_main, 2)


def test_a_part_has_connections_of_its_own() -> None:
    def rank_main(transport):
        if transport.rank == 1:
            return
        group = transport.split([0, 2], "part", TimeLimit(20))
        buffer = torch.ones(2 * LARGE)
        group.all_reduce_(buffer, "sum", TimeLimit(20))
        assert (buffer == 2).all()
        group.close()

    run(rank_main, 3)


def test_who_does_not_come_is_named_when_the_time_is_over() -> None:
    is_over = threading.Event()

    def rank_main(transport):
        if transport.rank == 1:
            assert is_over.wait(timeout=20)
            return
        try:
            with pytest.raises(TimeLimitError, match=r"ranks \[1\].*within 0\.3 s"):
                transport.exchange([], [(1, torch.zeros(LARGE))], TimeLimit(0.3))
        finally:
            is_over.set()

    run(rank_main, 2)


def test_a_closed_connection_is_noticed_at_once() -> None:
    def rank_main(transport):
        if transport.rank == 0:
            with pytest.raises(PeerLostError, match="rank 1 of the group closed"):
                transport.exchange([], [(1, torch.zeros(LARGE))], TimeLimit(20))

    run(rank_main, 2)


def test_a_message_of_another_collective_is_not_taken() -> None:
    def rank_main(transport):
        if transport.rank == 1:
            # The other rank gives up, and closes, perhaps before all was sent.
            with contextlib.suppress(PeerLostError):
                transport.exchange([(0, torch.zeros(2 * LARGE))], [], TimeLimit(20), tag=7)
        else:
            with pytest.raises(PeerLostError, match="tag 7 .* different collective"):
                transport.exchange([], [(1, torch.zeros(2 * LARGE))], TimeLimit(20), tag=8)

    run(rank_main, 2)


def test_where_ranks_cannot_reach_each_other_all_go_on_without(monkeypatch) -> None:
    monkeypatch.setattr(streams, "_CONNECT_S", 0.3)
    monkeypatch.setattr(streams, "_own_addresses", list)

    def rank_main(transport):
        assert isinstance(transport, TorchDistributedTransport)
        buffer = torch.ones(LARGE)
        transport.all_reduce_(buffer, "sum", TimeLimit(20))
        assert (buffer == 3).all()

    run(rank_main, 3)
