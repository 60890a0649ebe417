"""Memory that a node's ranks map together: a failure of one rank reaches all at once."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import pytest

from tests.limits import limit
from torchmn.comm import Communicator
from torchmn.comm.transports.base import TimeLimit
from torchmn.comm.transports.shared_memory import SharedMemoryTransport
from torchmn.comm.transports.shared_segment import SharedMemorySegment
from torchmn.errors import UnsupportedError
from torchmn.testing import run_ranks


@pytest.mark.parametrize(
    ("call", "failing"),
    [
        ("create", 0),
        ("address", 0),
        ("attach", 2),
        ("address", 2),
        ("map_shared", 0),
        ("map_shared", 2),
    ],
)
def test_a_failure_of_one_rank_is_raised_on_all(
    monkeypatch: pytest.MonkeyPatch, call: str, failing: int
) -> None:
    own = threading.local()
    original = getattr(SharedMemorySegment, call)

    def fail(*arguments: Any) -> Any:
        if own.rank == failing:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return original(*arguments)

    is_class_method = call in ("create", "attach")
    monkeypatch.setattr(SharedMemorySegment, call, staticmethod(fail) if is_class_method else fail)

    def rank_main(comm: Communicator) -> str:
        def share() -> SharedMemoryTransport:
            own.rank = comm.rank
            return SharedMemoryTransport(comm.world.transport, TimeLimit(limit(20)))

        with pytest.raises(UnsupportedError) as caught:
            comm.engine.call(share)
        return str(caught.value)

    messages = run_ranks(rank_main, 3)
    assert len(set(messages)) == 1
    assert f"because of local rank {failing}: [Errno 24] Too many open files" in messages[0]
