"""gloo and NCCL as a transport: what the library does not survive by itself."""

from __future__ import annotations

import subprocess
import sys
import threading

import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.limits import limit
from tests.unit.comm.ranks import run_transports
from torchmn.base.errors import CommunicationError, PeerLostError, TimeLimitError
from torchmn.comm.transports import base, gloo_nccl
from torchmn.comm.transports.base import MAX_DIRECT_RANKS, TimeLimit
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.testing import run_ranks

SCRIPT = f"""
import time
from torchmn.errors import CommunicationError
from torchmn.testing import run_ranks
def rank_main(comm):
    try:
        comm.barrier() if comm.rank == 1 else comm.allgather_obj(1)
    except CommunicationError as error:
        print("message:", error)
    time.sleep({limit(1)})
run_ranks(rank_main, 3, timeout_s={limit(1)})
"""


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_in_different_collectives_raise() -> None:
    """gloo ends the process when the sizes of two messages with one tag differ."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert "terminate called" not in done.stderr, done.stderr[-300:]
    assert done.stdout.count("message:") == 3


def run(function, size):
    """Call ``function(transport)`` on every rank; none is closed before all are done."""

    def rank_main(transport):
        result = function(transport)
        transport.barrier(TimeLimit(limit(20)))
        return result

    return run_transports(rank_main, size)


def gathered(transport, numel):
    """An all-gather of stripes that begin as this rank's own and nothing else; and its peers."""
    buffer = torch.full([numel], -1, dtype=torch.int64)
    transport.stripes(buffer)[transport.rank].fill_(transport.rank)
    transport.all_gather_stripes_(buffer, TimeLimit(limit(20)))
    return buffer, {peer for peer, nbytes in transport.sent.items() if nbytes}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("numel", [0, 1, 5, 16, 41])
def test_gathering_in_rounds_gives_every_stripe(size, numel, monkeypatch) -> None:
    monkeypatch.setattr(base, "MAX_DIRECT_RANKS", 1)
    for buffer, _ in run(lambda transport: gathered(transport, numel), size):
        expected = [torch.full_like(s, r) for r, s in enumerate(buffer.tensor_split(size))]
        assert torch.equal(buffer, torch.cat(expected))


def test_many_ranks_send_to_few_when_they_gather() -> None:
    size = MAX_DIRECT_RANKS + 3
    for rank, (buffer, peers) in enumerate(run(lambda t: gathered(t, 2 * size), size)):
        assert torch.equal(buffer, torch.arange(size).repeat_interleave(2))
        assert peers == {(rank - distance) % size for distance in (1, 2, 4, 8, 16)}


@pytest.mark.skipif(not gloo_nccl._CAN_BE_LAZY, reason="this torch connects all ranks at once")
def test_ranks_that_are_connected_when_they_exchange(monkeypatch) -> None:
    """Everything that a transport does, over connections that are made by doing it."""
    monkeypatch.setattr(gloo_nccl, "MAX_DIRECT_RANKS", 1)
    size = 4

    def rank_main(transport):
        rank, until = transport.rank, TimeLimit(limit(20))
        total = torch.tensor([rank + 1.0])
        transport.all_reduce_(total, "sum", until)
        striped = torch.full([9], rank + 1.0)
        transport.striped_all_reduce_(striped, "sum", until)
        row = torch.full([3], rank)
        transport.broadcast_(row, 2, until)
        if rank == 0:
            found = set()
            for _ in range(size - 1):
                buffer = torch.zeros(1, dtype=torch.int64)
                found.add((transport.receive_any(buffer, until, 5), int(buffer)))
        else:
            found = None
            transport.exchange([(0, torch.tensor([10 * rank]))], [], until, 5)
        ranks = [0, 1] if rank < 2 else [2, 3]
        part = transport.split(ranks, f"half{ranks[0]}", until)
        half = torch.tensor([rank])
        part.all_reduce_(half, "sum", until)
        part.close()
        return float(total), striped.tolist(), row.tolist(), int(half), found

    results = run(rank_main, size)
    for rank, (total, striped, row, half, found) in enumerate(results):
        assert (total, striped, row) == (10.0, [10.0] * 9, [2] * 3)
        assert half == (1 if rank < 2 else 5)
        assert found == ({(1, 10), (2, 20), (3, 30)} if rank == 0 else None)


@pytest.mark.skipif(not gloo_nccl._CAN_BE_LAZY, reason="this torch connects all ranks at once")
def test_idle_ranks_have_no_connections(monkeypatch) -> None:
    """Counted as sockets of this process: two for each pair of connected ranks."""
    size = 6

    def sockets(max_direct):
        monkeypatch.setattr(gloo_nccl, "MAX_DIRECT_RANKS", max_direct)
        waiting = threading.Barrier(size)

        def count(_):
            waiting.wait()
            found = len(psutil.Process().net_connections()) if waiting.wait() == 0 else 0
            waiting.wait()
            return found

        return max(run(count, size))

    eager, lazy = sockets(16), sockets(1)
    assert eager - lazy >= size * (size - 1)


NCCL_ERROR = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.30.3"
    "\n{}: {}\nLast error:\n{}"
)
SYSTEM = ("unhandled system error", "ncclSystemError", "System call (e.g. socket, malloc) failed.")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (PeerLostError, "[pair.cc:553] Connection closed by peer [127.0.0.1]:1. GLHF!"),
        (PeerLostError, "[pair.cc:547] writev [127.0.0.1]:1: Broken pipe"),
        (PeerLostError, "[pair.cc:547] Read error [10.0.0.1]:1: No route to host"),
        (PeerLostError, "Failed to recv, got 0 bytes. Connection was likely closed."),
        (PeerLostError, NCCL_ERROR.format(*SYSTEM, "Connection closed by remote peer node1")),
        (
            PeerLostError,
            NCCL_ERROR.format(
                "remote process exited or there was a network error", "ncclRemoteError", "", ""
            ),
        ),
        (TimeLimitError, "[unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation"),
        (TimeLimitError, "Application timeout caused pair closure"),
        (CommunicationError, NCCL_ERROR.format(*SYSTEM, "No space left on device /dev/shm/nccl-1")),
        (CommunicationError, "[enforce fail at allreduce.cc:41] elements > 0"),
        (CommunicationError, "CUDA out of memory. Tried to allocate 20.00 MiB."),
    ],
)
def test_an_error_is_that_of_a_lost_peer_only_if_it_says_so(kind: type, text: str) -> None:
    class Failing:
        def allreduce(self, *_: object) -> None:
            raise RuntimeError(text)

    transport = TorchDistributedTransport(HashStore(), 0, 1, timeout_s=limit(20))
    transport._gloo = Failing()
    with pytest.raises(CommunicationError) as raised:
        transport.all_reduce_(torch.ones(1), "sum", TimeLimit(1))
    assert type(raised.value) is kind
    assert all(line in str(raised.value) for line in text.splitlines())  # the last error of NCCL


def test_a_tensor_that_gloo_refuses_is_no_lost_peer() -> None:
    def rank_main(comm):
        with pytest.raises(CommunicationError, match="unsupported device type meta.$") as raised:
            comm.world.all_reduce_(torch.ones(2, device="meta"))
        assert type(raised.value) is CommunicationError

    run_ranks(rank_main, 2)
