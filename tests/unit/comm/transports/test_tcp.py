"""Large messages over TCP connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from functools import partial

import pytest
import torch

from tests.contracts.suites.communicator_contracts import seeded
from tests.limits import limit
from tests.unit.comm.ranks import run_transports, tcp_over
from torchmn.cluster import Topology
from torchmn.comm import create_communicator
from torchmn.comm.transports import tcp, tcp_stream
from torchmn.comm.transports.base import TimeLimit, Transport
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.control.rank_listener import RankAddress
from torchmn.errors import CommunicationError, PeerLostError, TimeLimitError

LARGE = 70_001  # elements
run = partial(run_transports, over=tcp_over)


@pytest.fixture(autouse=True)
def _connections_may_take_long(monkeypatch) -> None:
    monkeypatch.setattr(tcp, "_CONNECT_S", limit(5))


def part(rank, dtype=torch.float64, numel=LARGE):
    return seeded(rank, numel).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_sums_are_right_and_the_same_bits_everywhere(size, dtype) -> None:
    def rank_main(transport):
        assert transport.name == "tcp"
        buffer = part(transport.rank, dtype, size * LARGE)
        transport.all_reduce_(buffer, "sum", TimeLimit(limit(20)))
        return buffer

    results = run(rank_main, size)
    total = sum(part(rank, dtype, size * LARGE).double() for rank in range(size))
    for result in results:
        assert torch.equal(result, results[0])
        torch.testing.assert_close(result.double(), total, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_by_pieces_are_those_by_two_steps(monkeypatch, size, dtype) -> None:
    monkeypatch.setattr(tcp, "_PIECE_BYTES", 10_001)
    monkeypatch.setattr(tcp_stream, "_WAKE_BYTES", 5_000)
    monkeypatch.setattr(tcp, "_LARGE_BYTES", 10_000)

    def rank_main(transport):
        by_pieces = part(transport.rank, dtype, size * LARGE + 1)
        by_steps = by_pieces.clone()
        transport.striped_all_reduce_(by_pieces, "sum", TimeLimit(limit(20)))
        Transport.striped_all_reduce_(transport, by_steps, "sum", TimeLimit(limit(20)))
        return torch.equal(by_pieces, by_steps)

    assert run(rank_main, size) == [True] * size


def test_small_and_large_messages_to_all_in_one_exchange() -> None:
    def rank_main(transport):
        me, others = transport.rank, [r for r in range(3) if r != transport.rank]
        sizes = (LARGE, 5, 0, 2 * LARGE)
        got = {(r, n): torch.zeros(n, dtype=torch.float64) for r in others for n in sizes}
        transport.exchange(
            [(r, part(10 * me + r, numel=n)) for r in others for n in sizes],
            [(r, got[r, n]) for r in others for n in sizes],
            TimeLimit(limit(20)),
        )
        for (r, n), tensor in got.items():
            assert torch.equal(tensor, part(10 * r + me, numel=n))

    run(rank_main, 3)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_announced_sums_have_the_same_bits(size, dtype) -> None:
    numels = [size * LARGE, size * LARGE + 1, 5, 2 * size * LARGE]

    def rank_main(transport):
        until = TimeLimit(limit(20))
        plain = [part(transport.rank + i, dtype, n) for i, n in enumerate(numels)]
        ahead = [buffer.clone() for buffer in plain]
        for buffer in plain:
            transport.all_reduce_(buffer, "sum", until)
        for buffer in ahead:
            transport.prefetch_send(buffer)
        other = torch.ones(size * LARGE)
        transport.all_reduce_(other, "max", until)  # may come between them
        for buffer in ahead:
            transport.all_reduce_(buffer, "sum", until)
        return plain, ahead

    for plain, ahead in run(rank_main, size):
        assert all(map(torch.equal, plain, ahead))


def test_announced_sums_are_made_in_their_order() -> None:
    def rank_main(transport):
        first, second = torch.ones(2 * LARGE), torch.ones(2 * LARGE)
        transport.prefetch_send(first)
        transport.prefetch_send(second)
        with pytest.raises(CommunicationError, match="sum 2 is made before sum 1"):
            transport.all_reduce_(second, "sum", TimeLimit(limit(20)))

    run(rank_main, 2)


def test_ranks_that_announce_different_sums_raise() -> None:
    def rank_main(transport):
        buffer = torch.ones(2 * LARGE)
        if transport.rank == 1:
            transport.prefetch_send(torch.zeros(2 * LARGE))
            transport._announced.popleft()
        transport.prefetch_send(buffer)
        if transport.rank == 0:
            with contextlib.suppress(PeerLostError):
                transport.all_reduce_(buffer, "sum", TimeLimit(limit(20)))
        else:
            with pytest.raises(PeerLostError, match="with tag 2 where .* different collective"):
                transport.all_reduce_(buffer, "sum", TimeLimit(limit(20)))

    run(rank_main, 2)


def test_a_late_rank_is_named_when_the_time_limit_passes() -> None:
    is_over = threading.Event()

    def rank_main(transport):
        if transport.rank == 1:
            assert is_over.wait(timeout=limit(20))
            return
        try:
            with pytest.raises(TimeLimitError, match=r"ranks \[1\].*within 0\.3 s"):
                transport.exchange([], [(1, torch.zeros(LARGE))], TimeLimit(0.3))
        finally:
            is_over.set()

    run(rank_main, 2)


def test_a_closed_connection_is_detected_immediately() -> None:
    def rank_main(transport):
        if transport.rank == 0:
            with pytest.raises(PeerLostError, match="rank 1 of the group closed"):
                transport.exchange([], [(1, torch.zeros(LARGE))], TimeLimit(limit(20)))

    run(rank_main, 2)


def test_a_message_of_another_collective_is_rejected() -> None:
    def rank_main(transport):
        if transport.rank == 1:
            # The other rank aborts and closes, perhaps before all was sent.
            with contextlib.suppress(PeerLostError):
                transport.exchange([(0, torch.zeros(2 * LARGE))], [], TimeLimit(limit(20)), tag=7)
        else:
            with pytest.raises(PeerLostError, match="tag 7 .* different collective"):
                transport.exchange([], [(1, torch.zeros(2 * LARGE))], TimeLimit(limit(20)), tag=8)

    run(rank_main, 2)


def test_where_ranks_cannot_connect_all_continue_without(monkeypatch) -> None:
    monkeypatch.setattr(tcp, "_CONNECT_S", 0.3)
    monkeypatch.setattr(tcp, "own_addresses", lambda preferred: [])

    def rank_main(transport):
        assert transport.name == "torch.distributed"
        assert transport.fallback_reason == "ranks 0, 1, 2 could not be connected in 0.3 s"
        buffer = torch.ones(LARGE)
        transport.all_reduce_(buffer, "sum", TimeLimit(limit(20)))
        assert (buffer == 3).all()

    run(rank_main, 3)


def test_ranks_without_the_secret_do_not_connect(monkeypatch) -> None:
    """They know the token, which travels by the inner transport, and not the secret of the job."""
    monkeypatch.setattr(tcp, "_CONNECT_S", 0.3)
    known = threading.local()
    secret = property(lambda address: f"{known.secret} {address.token}")
    monkeypatch.setattr(RankAddress, "secret", secret)

    def with_another_secret(inner):
        known.secret = f"of job {inner.rank}"
        return tcp_over(inner)

    found = run_transports(lambda t: (t.name, t.fallback_reason), 2, over=with_another_secret)
    assert found == [("torch.distributed", "ranks 0, 1 could not be connected in 0.3 s")] * 2


def test_clients_without_the_secret_do_not_block_ranks(monkeypatch) -> None:
    """They connect first, and send nothing, something, or the token without the secret."""
    monkeypatch.setenv("TORCHMN_SECRET", "of this job")
    listen, clients = tcp.listen_for_ranks, contextlib.ExitStack()

    def disturbed(hosts, role):
        listener, address = listen(hosts, role)
        for number in range(60):
            client = socket.create_connection((address.hosts[0], address.port), limit(10))
            sent = (b"", bytes(100), address.token.encode() + b"\n")[number % 3]
            clients.enter_context(client).sendall(sent)
        return listener, address

    monkeypatch.setattr(tcp, "listen_for_ranks", disturbed)
    with clients:
        names = run_transports(
            lambda transport: transport.name, 2, over=tcp_over, own_address="127.0.0.1"
        )
    assert names == ["tcp"] * 2


def test_groups_of_too_many_ranks_may_have_connections(monkeypatch) -> None:
    monkeypatch.setattr(tcp, "MAX_PEERS", 1)

    def rank_main(transport):
        assert (transport.name, transport.fallback_reason) == (
            "torch.distributed",
            "3 ranks are more than 2",
        )
        transport.prefetch_send(torch.ones(3 * LARGE))
        whole = torch.ones(3 * LARGE)
        transport.all_reduce_(whole, "sum", TimeLimit(limit(20)))
        assert (whole == 3).all()
        if transport.rank == 2:
            return
        leaders = transport.split([0, 1], "leaders", TimeLimit(limit(20)))
        assert (leaders.name, leaders.fallback_reason) == ("tcp", "")
        buffer = torch.ones(2 * LARGE)
        leaders.all_reduce_(buffer, "sum", TimeLimit(limit(20)))
        assert (buffer == 2).all()
        leaders.close()

    run(rank_main, 3)


@pytest.mark.parametrize(
    ("name", "ranks_per_node", "is_warned"),
    [("flat", [2, 1], True), ("hierarchical", [2, 1], False)],
)
def test_the_fallback_to_gloo_is_a_reason_on_all_ranks(
    monkeypatch, caplog, name, ranks_per_node, is_warned
) -> None:
    monkeypatch.setattr(tcp, "MAX_PEERS", 1)

    def rank_main(transport):
        topology = Topology.blocks(ranks_per_node)
        comm = create_communicator(
            name, transport=transport, topology=topology, timeout_s=limit(20)
        )
        reason = comm.reason
        comm.finalize()
        return reason

    reasons = run(rank_main, 3)
    texts = [text for text in caplog.messages if "TCP connections" in text]
    assert len(texts) == is_warned  # of rank 0 alone
    for reason in reasons:
        assert ("no TCP connections between hosts: 3 ranks are more than 2" in reason) is is_warned
    for text in texts:
        assert text.startswith("rank 0 of 3")
        assert "large messages are slower" in text


def test_a_library_that_sends_in_calls_only_is_called_while_a_rank_waits() -> None:
    """What is left in its buffers may be what the other rank waits for before it sends."""
    released = threading.Event()

    class Lazy(TorchDistributedTransport):
        progress_period_s = 0.01

        def progress(self) -> None:
            released.set()

    def rank_main(transport):
        if transport.rank == 1:
            assert released.wait(limit(10))
        buffer = torch.ones(LARGE)
        transport.all_reduce_(buffer, "sum", TimeLimit(limit(10)))
        return float(buffer.sum()) / LARGE

    assert run(rank_main, 2, make=Lazy) == [2.0, 2.0]


def test_listens_at_the_address_that_gloo_was_given(monkeypatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    hosts = []

    def listen(address, **options):
        hosts.append(address[0])
        return create_server(address, **options)

    create_server = socket.create_server
    monkeypatch.setattr(tcp.socket, "create_server", listen)
    assert run(lambda transport: transport.name, 2, own_address="127.0.0.1") == ["tcp"] * 2
    assert set(hosts) == {"127.0.0.1"}
