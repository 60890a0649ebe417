"""Ranks as threads: over a transport of the test's own, and with one that stays away."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import HashStore

from tests.limits import limit
from torchmn.comm import Communicator
from torchmn.comm.transports.base import TimeLimit
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.comm.transports.tcp import TcpTransport
from torchmn.testing import run_ranks, run_threads

SHORT_S = limit(0.3)
"""A limit that passes."""


def run_transports(
    function: Callable[[Any], Any],
    size: int,
    *,
    make: Callable[..., Any] = TorchDistributedTransport,
    over: Callable[[Any], Any] = lambda inner: inner,
    **options: Any,
) -> list[Any]:
    """Call ``function(transport)`` on every rank, threads; results in rank order."""
    store = HashStore()

    def rank_main(rank: int) -> Any:
        inner = make(store, rank, size, timeout_s=limit(20), **options)
        with contextlib.closing(over(inner)) as transport:
            return function(transport)

    return run_threads(rank_main, size)


def tcp_over(inner: TorchDistributedTransport) -> TcpTransport:
    """TCP connections for large messages."""
    return TcpTransport.connect(inner, TimeLimit(limit(20)))


def one_stays_away(
    call: Callable[[Communicator], Any],
    *,
    absent: int = 1,
    before: Callable[[Communicator], object] = lambda comm: None,
    timeout_s: float = SHORT_S,
    **options: Any,
) -> Any:
    """What ``call`` gives on one rank of two; the other one does ``before`` and does not arrive.

    It waits until the call has raised: else a connection would close, which is another error.
    """
    has_raised = threading.Event()

    def rank_main(comm: Communicator) -> Any:
        if comm.rank == absent:
            before(comm)
            assert has_raised.wait(timeout=limit(20))
            return None
        try:
            return call(comm)
        finally:
            has_raised.set()

    return run_ranks(rank_main, 2, timeout_s=timeout_s, **options)[1 - absent]
