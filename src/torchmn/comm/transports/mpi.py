"""MPI, through mpi4py.

`mpi4py.MPI` is imported, which initializes MPI, only when this transport is made. All calls are
non-blocking and are polled until their deadline, because blocking MPI calls have no time limit.
Polling busy-waits on a thread that has nothing else to do, and sleeps on a thread that shares its
core with the computation (Open MPI makes progress only inside MPI calls).

Measured on one machine, 2 ranks, sum of 64 MB float32: `MPI_Allreduce` 27 ms, `MPI_Iallreduce` 54
ms, stripes by `Isend`/`Irecv` with torch's addition 12 ms. So only small buffers use
`MPI_Iallreduce`, large ones the algorithm of the base class.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchmn.base.errors import LaunchError, TimeLimitError, UnsupportedError
from torchmn.base.log import Log
from torchmn.base.terminal import say
from torchmn.cluster.environment_variables import EXIT_TIMEOUT_VARIABLE
from torchmn.cluster.units import GiB, KiB
from torchmn.comm.transports.base import (
    SYNCHRONOUS_TAG,
    Message,
    ReduceOp,
    Scratch,
    TimeLimit,
    Transport,
    poll_until,
)
from torchmn.comm.transports.staging import Staging
from torchmn.control.mpi_start import limited_mpi_start

_NATIVE_BYTES = 16 * KiB
_POLLS_BEFORE_YIELD = 2000
_NOTE_AFTER_S = 60.0
"""Seconds that a rank waits at exit before it prints a message."""
_TURN = threading.Lock()
"""Held during each MPI call, none of which blocks: THREAD_SERIALIZED allows one thread at a time,
and a parameter server has several threads."""


class MpiTransport(Transport):
    """A transport over an MPI communicator, which it then owns (see `world`). *Collective.*

    CUDA tensors are staged through pinned host memory. Threads call MPI one at a time, which needs
    THREAD_SERIALIZED.
    """

    name = "mpi"
    is_trusted = True
    is_concurrent = False
    is_close_collective = True
    has_fast_small_sums = True
    progress_period_s = 0.02

    def __init__(self, mpi_comm: Any, *, scratch: Scratch | None = None) -> None:
        self._mpi = load_mpi()
        self._comm = mpi_comm
        super().__init__(mpi_comm.Get_rank(), mpi_comm.Get_size(), scratch)
        self._staging = Staging()
        self._native = _native_types(self._mpi)
        self._ops = {
            "sum": self._mpi.SUM,
            "product": self._mpi.PROD,
            "max": self._mpi.MAX,
            "min": self._mpi.MIN,
        }

    @classmethod
    def world(cls, timeout_s: float) -> MpiTransport:
        """The transport of all ranks of MPI.COMM_WORLD. *Collective.*"""
        with limited_mpi_start(timeout_s):
            mpi = load_mpi()
        if mpi.Is_finalized():
            raise LaunchError("MPI is already finalized; a process can join it only once.")
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise UnsupportedError(
                "MPI was initialized below THREAD_SERIALIZED, so the thread that exchanges "
                "gradients must not call it. Create the communicator before importing mpi4py.MPI, "
                "or set mpi4py.rc.thread_level = 'serialized'."
            )
        # A duplicate, so that messages of torchmn never match those of the script.
        comm, request = mpi.COMM_WORLD.Idup()
        transport = cls(comm)
        transport._wait([request], TimeLimit(timeout_s), "joining MPI.COMM_WORLD")
        return transport

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], limit: TimeLimit, tag: int = 0
    ) -> None:
        if any(tensor.is_cuda for _, tensor in (*sends, *recvs)):
            self._staging.exchange(
                sends, recvs, limit, lambda out, into: self.exchange(out, into, limit, tag)
            )
            return
        self._count_bytes(sends, recvs)
        # By address: mpi4py does not know torch's tensors, and their dtypes do not matter here.
        comm, memory, byte = self._comm, self._mpi.buffer.fromaddress, self._mpi.BYTE
        requests = []
        with _TURN:
            for peer, tensor in recvs:
                for address, nbytes in _portions(tensor):
                    requests.append(comm.Irecv([memory(address, nbytes), nbytes, byte], peer, tag))
            num_recvs = len(requests)
            start = comm.Issend if tag >= SYNCHRONOUS_TAG else comm.Isend
            for peer, tensor in sends:
                for address, nbytes in _portions(tensor):
                    requests.append(start([memory(address, nbytes), nbytes, byte], peer, tag))
        if not requests:
            return
        try:
            self._wait(requests, limit, "an exchange")
        except TimeLimitError:
            with _TURN:
                for request in requests[:num_recvs]:
                    request.Cancel()  # the caller may free the memory after this error
            raise

    def receive_any(self, buffer: Tensor, limit: TimeLimit, tag: int = 0) -> int:
        status = self._mpi.Status()
        memory = self._mpi.buffer.fromaddress(buffer.data_ptr(), buffer.nbytes)
        with _TURN:
            request = self._comm.Irecv(
                [memory, buffer.nbytes, self._mpi.BYTE], self._mpi.ANY_SOURCE, tag
            )

        if not self._completes(lambda: request.Test(status), limit):
            with _TURN:
                request.Cancel()
            raise TimeLimitError(f"no rank sent a message within {limit.seconds:g} s.")
        source = int(status.Get_source())
        self.received[source] += buffer.nbytes
        return source

    def all_reduce_(self, buffer: Tensor, op: ReduceOp, limit: TimeLimit) -> None:
        datatype = self._native.get(buffer.dtype)
        nbytes = buffer.numel() * buffer.element_size()
        if self.size == 1 or nbytes == 0:
            return
        if nbytes > _NATIVE_BYTES or datatype is None or buffer.is_cuda:
            super().all_reduce_(buffer, op, limit)
            return
        self._count_ring(nbytes)
        memory = self._mpi.buffer.fromaddress(buffer.data_ptr(), nbytes)
        with _TURN:
            request = self._comm.Iallreduce(
                self._mpi.IN_PLACE, [memory, buffer.numel(), datatype], self._ops[op]
            )
        self._wait([request], limit, "all_reduce")

    def progress(self) -> None:
        """See `Transport.progress`. Open MPI sends only during MPI calls."""
        with _TURN:
            self._comm.Iprobe()

    def barrier(self, limit: TimeLimit) -> None:
        with _TURN:
            request = self._comm.Ibarrier()
        self._wait([request], limit, "barrier")

    def _wait(self, requests: list[Any], limit: TimeLimit, what: str) -> None:
        test_all = self._mpi.Request.Testall
        if not self._completes(lambda: test_all(requests), limit):
            raise TimeLimitError(f"{what} did not complete within {limit.seconds:g} s.")

    def _completes(self, test: Callable[[], Any], limit: TimeLimit) -> bool:
        """Poll an MPI test; returns whether it succeeded within the limit."""

        def is_done() -> bool:
            with _TURN:
                return bool(test())

        return poll_until(is_done, limit, _POLLS_BEFORE_YIELD)

    def split(self, ranks: Sequence[int], key: str, limit: TimeLimit) -> Transport:
        self.barrier_of(ranks, limit)  # finds missing ranks in time: Create_group has no limit
        with _TURN:
            group = self._comm.Get_group().Incl(list(ranks))
            try:
                # MPI guarantees only tags up to 32767.
                tag = int.from_bytes(key.encode()[-2:], "big") % 32768
                comm = self._comm.Create_group(group, tag)
            finally:
                group.Free()
        return MpiTransport(comm, scratch=self.scratch)

    def close(self) -> None:
        with _TURN:
            if self._comm != self._mpi.COMM_NULL and not self._mpi.Is_finalized():
                self._comm.Free()


def _portions(tensor: Tensor) -> list[tuple[int, int]]:
    """(address, bytes) of the parts of a tensor to send: MPI counts are 32-bit integers."""
    nbytes = tensor.numel() * tensor.element_size()
    address = tensor.data_ptr()
    if nbytes <= GiB:
        return [(address, nbytes)] if nbytes else []
    return [(address + at, min(GiB, nbytes - at)) for at in range(0, nbytes, GiB)]


def _native_types(mpi: Any) -> dict[torch.dtype, Any]:
    """The torch dtypes that `MPI_Iallreduce` can reduce, with their MPI datatypes."""
    return {
        torch.float32: mpi.FLOAT,
        torch.float64: mpi.DOUBLE,
        torch.int8: mpi.INT8_T,
        torch.uint8: mpi.UINT8_T,
        torch.int16: mpi.INT16_T,
        torch.int32: mpi.INT32_T,
        torch.int64: mpi.INT64_T,
    }


def load_mpi() -> Any:
    """Import `mpi4py.MPI`, which initializes MPI, and register its clean-up at exit.

    Raises UnsupportedError: mpi4py or the MPI library is not installed.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:  # otherwise the script has initialized MPI
            mpi4py.rc.thread_level = "serialized"
            mpi4py.rc.finalize = False  # `_leave` does it, after a barrier that can be limited
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"transport='mpi' needs mpi4py and an MPI library ({error}). "
            "Install them with: pip install 'torchmn[mpi]', or use transport='torch'."
        ) from error
    _register_exit_cleanup(MPI)
    return MPI


@cache
def _register_exit_cleanup(mpi: Any) -> None:
    """Register `_leave` at exit, once, in place of mpi4py's own call of `MPI_Finalize`."""
    atexit.register(_leave, mpi)


def _abort(mpi: Any, status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    mpi.COMM_WORLD.Abort(status)


def _leave(mpi: Any) -> None:
    """Finalize MPI at exit, after all ranks have reached their exit, as `MPI_Finalize` requires.

    Waits without a limit by default: another rank may still save or evaluate, and its collectives
    have time limits of their own. With ``TORCHMN_EXIT_TIMEOUT_S`` the job is aborted after that
    time. After an uncaught exception it is aborted at once.
    """
    if mpi.Is_finalized():
        return
    # In an interactive session (sys.ps1) an exception does not end the process.
    has_failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    if has_failed and mpi.COMM_WORLD.Get_size() > 1:
        _abort(mpi, 1)
    # A barrier that is polled, because MPI_Finalize blocks without a limit and without a message.
    with _TURN:
        request = mpi.COMM_WORLD.Ibarrier()
    limit_s = float(os.environ.get(EXIT_TIMEOUT_VARIABLE, "inf"))
    began_at, has_noted = time.monotonic(), False
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()

    def is_done() -> bool:
        with _TURN:
            return bool(request.Test())

    while not is_done():
        waited_s = time.monotonic() - began_at
        if waited_s > limit_s:
            say(
                f"rank {rank} has exited, but other ranks did not within {limit_s:g} s "
                "(TORCHMN_EXIT_TIMEOUT_S); aborting the job. Exit all ranks together, or call "
                "comm.finalize() on all of them."
            )
            _abort(mpi, 1)
        if waited_s > _NOTE_AFTER_S and not has_noted and rank in (0, size - 1):
            has_noted = True
            Log(__name__, rank=rank, size=size).warning(
                "rank %d of %d has reached the end of its script and waits for the other ranks to "
                "do so (%s sets a limit).",
                rank,
                size,
                EXIT_TIMEOUT_VARIABLE,
            )
        time.sleep(0.001 if waited_s < 1 else 0.01)
    mpi.Finalize()
