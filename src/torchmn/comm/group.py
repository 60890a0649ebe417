"""The one place through which every collective of every transport passes.

A `Group` is a transport with a name, the flight recorder of its rank and a time limit. Its methods
block and run inside engine jobs; routes and all-reduce algorithms are written in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchmn.comm.engine import Engine
from torchmn.comm.flight_recorder import FlightRecorder
from torchmn.comm.transports.base import Message, ReduceOp, TimeLimit, Transport
from torchmn.comm.transports.staging import await_stream
from torchmn.errors import CommunicationError, PeerLostError, TimeLimitError

Result = TypeVar("Result")


class Group:
    """Some ranks of a communicator: the world, one node, the leaders. Every method is collective.

    Raises from every method: TimeLimitError, PeerLostError, with the collective, rank and host.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        flight_recorder: FlightRecorder,
        engine: Engine,
        timeout_s: float,
        rank_label: str,
        first_timeout_s: float | None = None,
    ) -> None:
        self.name = name
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.flight_recorder = flight_recorder
        self.engine = engine
        self.timeout_s = timeout_s
        self.first_timeout_s = timeout_s if first_timeout_s is None else first_timeout_s
        self.rank_label = rank_label

    @property
    def limit_s(self) -> float:
        """Of the next collective: the first ones wait for what ranks do at different speeds."""
        return self.timeout_s if self.flight_recorder.has_stepped else self.first_timeout_s

    def with_transport(self, transport: Transport) -> Group:
        """The same ranks over another transport."""
        return Group(
            self.name,
            transport,
            flight_recorder=self.flight_recorder,
            engine=self.engine,
            timeout_s=self.timeout_s,
            rank_label=self.rank_label,
            first_timeout_s=self.first_timeout_s,
        )

    def split(self, name: str, ranks: Sequence[int], key: str) -> Group:
        """The group of ``ranks``, which must hold the caller's; members only."""
        part = self.with_transport(
            self._run("split", None, self.transport.split, ranks, key, shape=(len(ranks),))
        )
        part.name = name
        return part

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        name: str = "exchange",
        tag: int = 0,
    ) -> None:
        """Post all messages at once and wait for all; see `Transport.exchange`."""
        first = (*sends, *recvs)[0][1] if sends or recvs else None
        self._run(name, first, self.transport.exchange, sends, recvs, tag=tag)

    def all_reduce_(self, buffer: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place over all ranks, with the same bits on every rank."""
        self._run("all_reduce", buffer, self.transport.all_reduce_, buffer, op)

    def striped_all_reduce_(self, buffer: Tensor) -> None:
        """Sum in place over all ranks, by the same algorithm over all transports."""
        self._run("all_reduce", buffer, self.transport.striped_all_reduce_, buffer, "sum")

    def reduce_(self, buffer: Tensor, root: int) -> None:
        """Sum into the root's buffer; those of other ranks become undefined."""
        self._run("reduce", buffer, self.transport.reduce_, buffer, root)

    def broadcast_(self, buffer: Tensor, root: int) -> None:
        """Give every rank the root's buffer."""
        self._run("broadcast", buffer, self.transport.broadcast_, buffer, root)

    def reduce_scatter_stripes_(self, buffer: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce stripe r into rank r's buffer; returns the caller's stripe, a view."""
        self._run("reduce_scatter", buffer, self.transport.reduce_scatter_stripes_, buffer, op)
        return self.transport.stripes(buffer)[self.rank]

    def all_gather_stripes_(self, buffer: Tensor) -> None:
        """Give every rank stripe r of rank r's buffer."""
        self._run("all_gather", buffer, self.transport.all_gather_stripes_, buffer)

    def all_gather_fixed(self, row: Tensor, *, name: str = "all_gather") -> Tensor:
        """(n,) on every rank to (W, n): rows in rank order."""
        table = row.new_empty(self.size * row.numel())
        table[self.rank * row.numel() : (self.rank + 1) * row.numel()] = row
        self._run(name, row, self.transport.all_gather_stripes_, table)
        return table.view(self.size, row.numel())

    def receive_any(self, buffer: Tensor, *, name: str, tag: int) -> int:
        """Receive from the rank that sends first; returns its rank. Called by the receiver."""
        return self._run(name, buffer, self.transport.receive_any, buffer, tag=tag)

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        self._run("barrier", None, self.transport.barrier)

    def await_stream(self, device: torch.device) -> None:
        """Return when a GPU has done what is queued on the current stream. Local."""
        self._run("await_gpu", None, await_stream, device)

    def all_true(self, flag: bool) -> bool:
        """Whether the flag is True on all ranks."""
        if self.size == 1:
            return flag
        is_false = torch.tensor([0 if flag else 1], dtype=torch.int32, device="cpu")
        self.all_reduce_(is_false, "max")
        return not int(is_false)

    def _run(
        self,
        name: str,
        tensor: Tensor | None,
        method: Callable[..., Result],
        *arguments: object,
        shape: tuple[int, ...] = (),
        **options: object,
    ) -> Result:
        """Call a method of the transport with a time limit, recorded with name and tensor."""
        dtype = "-"
        if tensor is not None:
            shape, dtype = tuple(tensor.shape), _DTYPE_NAMES.get(tensor.dtype, "?")
        limit_s = self.limit_s
        entry = self.flight_recorder.begin(self.name, name, shape, dtype, limit_s)
        try:
            limit = TimeLimit(limit_s, self.engine.is_eager)
            result = method(*arguments, limit=limit, **options)
        except (TimeLimitError, PeerLostError) as error:
            self.flight_recorder.end(
                entry, "late" if isinstance(error, TimeLimitError) else "failed"
            )
            cure = (
                "Another rank may be slower than the limit (raise timeout_s=), may have ended, or "
                "may be in a different collective: check the logs of the other ranks."
            )
            raise type(error)(f"{self.rank_label}: {entry}: {error} {cure}") from error
        except Exception as error:
            self.flight_recorder.end(entry, "failed")
            raise CommunicationError(f"{self.rank_label}: {entry} failed: {error}") from error
        self.flight_recorder.end(entry, "done")
        return result


_DTYPE_NAMES = {
    value: name
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and name == str(value).removeprefix("torch.")
}
