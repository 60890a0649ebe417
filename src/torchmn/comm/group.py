"""Groups: every collective of every transport passes through `Group._run`.

A `Group` is a transport with a name, the flight recorder of its rank and a time limit. Its methods
block and are called inside engine jobs; routes and all-reduce algorithms are built on them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from torchmn.base.errors import (
    CommunicationError,
    PeerLostError,
    PerformanceWarning,
    TimeLimitError,
    UnsupportedError,
)
from torchmn.base.warn import warn
from torchmn.cluster import Topology
from torchmn.cluster.network import own_addresses
from torchmn.comm.codecs.base import IsValid
from torchmn.comm.engine import Engine
from torchmn.comm.flight_recorder import CollectiveRecord, FlightRecorder
from torchmn.comm.transports.base import Message, QueuedWork, ReduceOp, TimeLimit, Transport
from torchmn.comm.transports.shared_memory import SharedMemoryTransport
from torchmn.comm.transports.staging import await_stream
from torchmn.comm.waiting import Wait

Result = TypeVar("Result")
_CURES: dict[type[CommunicationError], str] = {
    TimeLimitError: "Another rank may be slower than the limit (raise timeout_s=), may have ended, "
    "or may be in a different collective: check the logs of the other ranks.",
    PeerLostError: "That rank has ended: the cause is in its output, or it has left its loop "
    "before the others (optimizer.join() is for uneven data).",
}
_DTYPE_NAMES = {
    value: name
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and name == str(value).removeprefix("torch.")
}


@dataclass(eq=False)
class Group:
    """Some ranks of a communicator: all of them, those of one node, or the leaders of nodes.

    Methods are *collective* unless documented otherwise. All raise TimeLimitError,
    PeerLostError or, for another failure, CommunicationError, with the collective, the rank and its
    host in the message.
    """

    name: str
    transport: Transport
    flight_recorder: FlightRecorder
    engine: Engine
    timeout_s: float
    first_timeout_s: float
    rank_label: str

    def __post_init__(self) -> None:
        self.rank, self.size = self.transport.rank, self.transport.size
        # Starting after this rank, so that the first messages of all ranks have different targets.
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]

    @property
    def limit_s(self) -> float:
        """The time limit of the next collective, in seconds.

        ``first_timeout_s`` until the sums of the first step are over: until then ranks read data
        and compile at different speeds.
        """
        return self.timeout_s if self.flight_recorder.has_stepped else self.first_timeout_s

    def wait(self) -> Wait:
        """A `Wait` for the next collective, which starts now. Local."""
        limit_s, peers = self.limit_s, self.flight_recorder.peers
        # `PeerStatus` ends the wait after `limit_s` if the others will not arrive; only ranks that
        # are computing are waited for up to `busy_s`.
        longest_s = limit_s if peers is None else max(limit_s, peers.longest_s)
        limit = TimeLimit(longest_s, self.engine.is_eager)
        ask_s = math.inf if peers is None else limit_s
        return Wait(limit, self.transport, ask_s, time.monotonic())

    def with_transport(self, transport: Transport) -> Group:
        """A group of the same ranks over another transport. Local."""
        return replace(self, transport=transport)

    def split(self, name: str, ranks: Sequence[int], key: str) -> Group:
        """A group of ``ranks``, which must include the caller. Called by these ranks only."""
        transport = self._run("split", None, self.transport.split, ranks, key, shape=(len(ranks),))
        return replace(self, name=name, transport=transport)

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
        """Reduce a buffer over all ranks, in place; bit-identical on all ranks."""
        self._run("all_reduce", buffer, self.transport.all_reduce_, buffer, op)

    def striped_all_reduce_(self, buffer: Tensor) -> None:
        """Sum a buffer over all ranks, in place, by `Transport.striped_all_reduce_`."""
        self._run("all_reduce", buffer, self.transport.striped_all_reduce_, buffer, "sum")

    def reduce_(self, buffer: Tensor, root: int) -> None:
        """Sum over all ranks into the root's buffer; other ranks' buffers become undefined."""
        self._run("reduce", buffer, self.transport.reduce_, buffer, root)

    def broadcast_(self, buffer: Tensor, root: int) -> None:
        """Copy the root's buffer to all ranks."""
        self._run("broadcast", buffer, self.transport.broadcast_, buffer, root)

    def reduce_scatter_stripes_(self, buffer: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce stripe r of all ranks into rank r's buffer; returns this rank's stripe, a view."""
        self._run("reduce_scatter", buffer, self.transport.reduce_scatter_stripes_, buffer, op)
        return self.transport.stripes(buffer)[self.rank]

    def all_gather_stripes_(self, buffer: Tensor) -> None:
        """Copy stripe r of rank r's buffer to all ranks, for all r."""
        self._run("all_gather", buffer, self.transport.all_gather_stripes_, buffer)

    def all_gather_fixed(self, row: Tensor, *, name: str = "all_gather") -> Tensor:
        """Gather a row (n,) of each rank into a table (W, n), in rank order."""
        table = row.new_empty(self.size * row.numel())
        table[self.rank * row.numel() : (self.rank + 1) * row.numel()] = row
        self._run(name, row, self.transport.all_gather_stripes_, table)
        return table.view(self.size, row.numel())

    def receive_any(self, buffer: Tensor, *, name: str, tag: int) -> int:
        """Receive from whichever rank sends first; returns its rank. Called by the receiver."""
        return self._run(name, buffer, self.transport.receive_any, buffer, tag=tag)

    def barrier(self) -> None:
        """Block until all ranks have called it."""
        self._run("barrier", None, self.transport.barrier)

    def await_stream(self, device: torch.device) -> None:
        """Block until a GPU has completed what is queued on the current stream. Local."""
        self._run("await_gpu", None, await_stream, device)

    def all_true(self, flag: IsValid) -> IsValid:
        """Whether a flag is True on all ranks; for a tensor, a tensor on the same device."""
        if self.size == 1:
            return flag
        # A flag on a device stays there: to read it, the host would wait for what is queued before.
        on_device = flag if isinstance(flag, Tensor) else torch.tensor(flag, device="cpu")
        is_true = on_device.to(torch.int32).view(1)
        self.all_reduce_(is_true, "min")
        result = is_true.view(()) != 0
        return result if isinstance(flag, Tensor) else bool(result)

    def _run(
        self,
        name: str,
        tensor: Tensor | None,
        method: Callable[..., Result],
        *arguments: object,
        shape: tuple[int, ...] = (),
        **options: object,
    ) -> Result:
        """Call a method of the transport with a time limit and record it in the flight recorder."""
        dtype = "-"
        if tensor is not None:
            shape, dtype = tuple(tensor.shape), _DTYPE_NAMES.get(tensor.dtype, "?")
            if not tensor.is_contiguous():  # libraries take its address and its size only
                raise CommunicationError(
                    f"{self.rank_label}: {name} needs contiguous memory, and the tensor of shape "
                    f"{shape} has the strides {tensor.stride()}. Use .contiguous()."
                )
        wait = self.wait()
        queued: list[QueuedWork] = []
        # Only a job of the engine may return before the device has done its work: the watcher then
        # enforces the limit. For any other caller the transport itself waits.
        if self.engine.may_queue:
            wait.limit.on_queued = queued.append
        entry = self.flight_recorder.begin(self.name, name, shape, dtype, wait.limit.seconds, wait)
        with self._reported(entry, wait):
            result = method(*arguments, limit=wait.limit, **options)
        if queued:
            self.engine.watcher.watch(_QueuedCollective(self, entry, wait, queued))
        else:
            self.flight_recorder.end(entry, "done")
        return result

    @contextmanager
    def _reported(self, entry: CollectiveRecord, wait: Wait) -> Iterator[None]:
        """Record errors of the body and raise them again with the collective, rank and host."""
        try:
            yield
        except CommunicationError as error:
            # Before `abort`: an aborted sum lets the device continue, so that its event completes
            # and undefined numbers reach the host.
            self.engine.begin_to_fail()
            self.transport.abort()
            is_late = isinstance(error, TimeLimitError)
            self.flight_recorder.end(entry, "late" if is_late else "failed")
            text = reason = wait.reason
            if not (is_late and reason):  # to which the words of a transport add nothing
                text = f"{error} {reason or _CURES.get(type(error), '')}".rstrip()
            raise type(error)(f"{self.rank_label}: {entry}: {text}") from error
        except Exception as error:
            self.flight_recorder.end(entry, "failed")
            raise CommunicationError(f"{self.rank_label}: {entry} failed: {error}") from error


class _QueuedCollective:
    """A collective whose work is queued on a device, as the engine's `Watcher` sees it."""

    def __init__(
        self, group: Group, entry: CollectiveRecord, wait: Wait, works: list[QueuedWork]
    ) -> None:
        self._group, self._entry, self._wait, self._works = group, entry, wait, works

    def begin(self) -> None:
        """Start the time limit: all collectives before this one have ended."""
        self._wait.restart()
        self._entry.started_s = self._wait.began_s

    def is_over(self) -> bool:
        limit = self._wait.limit
        with self._group._reported(self._entry, self._wait):
            if not all(work.is_done() for work in self._works):
                if limit.left_s > 0:
                    return False
                what = self._works[0].what
                raise TimeLimitError(f"{what} did not complete within {limit.seconds:g} s.")
        self._group.flight_recorder.end(self._entry, "done")
        return True

    def drop(self) -> None:
        self._group.flight_recorder.end(self._entry, "failed")


class Groups:
    """The world of a communicator and the groups that were split from it.

    Args:
        world: the group of all ranks.
        topology: the hosts of all ranks.
        device: the GPU of this rank, or the CPU.
    """

    def __init__(self, world: Group, topology: Topology, device: torch.device) -> None:
        self.world = world
        self._topology = topology
        self._device = device
        self._num_splits = 0
        self._subgroups: list[Group] = []
        self._shared_memory: SharedMemoryTransport | None = None
        self._counted: list[tuple[Transport, list[str]]] = []
        self._num_counted_groups = 0

    def __len__(self) -> int:
        return 1 + len(self._subgroups)

    # ---- made ----

    def part(self, name: str, ranks: Sequence[int]) -> Group | None:
        """A group of ``ranks``; None on all other ranks. *Collective* over the world."""
        self.count_split()
        if self.world.rank not in ranks:
            return None
        group = self.world.split(name, ranks, f"{name}{self._num_splits}-{ranks[0]}")
        self.world.flight_recorder.register_group(name, ranks)
        self._subgroups.append(group)
        return group

    def own_part(self, name: str, partition: Sequence[Sequence[int]]) -> Group:
        """Split the world by a partition of its ranks; returns this rank's group. *Collective*."""
        parts = [self.part(name, ranks) for ranks in partition]
        return next(part for part in parts if part is not None)

    def with_shared_memory(self, group: Group) -> Group:
        """A group of ranks of one node whose collectives use shared memory. *Collective.*

        Returns ``group`` itself for GPUs and, with a warning, if the ranks cannot share memory.
        """
        if group.size == 1 or self._device.type != "cpu":
            return group
        try:
            transport = group.engine.call(
                lambda: SharedMemoryTransport(group.transport, TimeLimit(group.limit_s))
            )
        except UnsupportedError as error:
            if group.rank == 0:
                warn(
                    f"{group.rank_label}: {error} Continuing with {group.transport.name}, "
                    "which is slower.",
                    PerformanceWarning,
                )
            return group
        shared = group.with_transport(transport)
        self._subgroups.append(shared)
        self._shared_memory = transport
        return shared

    def for_small_messages(self) -> Group:
        """The world over the transport that is fastest for a few KiB. *Collective.*

        That is shared memory if all ranks are on one node, unless the library is faster.
        """
        shared = self._shared_memory
        if shared is not None and shared.size == self.world.size:
            return self.world.with_transport(shared)
        if len(self._topology.nodes) > 1 or self.world.transport.has_fast_small_sums:
            return self.world
        return self.with_shared_memory(self.world)

    def queue_sums_of(self, buffer: Tensor) -> bool:
        """Whether sums over every group return once they are queued on the device. Local."""
        groups = (self.world, *self._subgroups)
        return all(group.size == 1 or group.transport.queues(buffer) for group in groups)

    def split_off(self, kind: str, ranks: Sequence[int]) -> Group:
        """A group of ``ranks``, including this one, for a new communicator, which closes it."""
        self.count_split()
        name = f"{kind}{self._num_splits}"
        # `Communicator.split` makes one part per color under the same number: the first rank of a
        # part makes its key unique.
        return self.world.engine.call(lambda: self.world.split(name, ranks, f"{name}-{ranks[0]}"))

    def count_split(self) -> None:
        """Count a split. Ranks outside the new group count it too, so that names agree."""
        self._num_splits += 1

    def new_transport(self, name: str) -> Transport:
        """A transport of all ranks for use by other threads, closed by `close`. *Collective.*

        The caller passes time limits. Threads may exchange at the same time if each has a peer or a
        tag of its own.
        """
        self.count_split()
        world = self.world.with_transport(self.world.transport.thread_safe_transport)
        key = f"{name}{self._num_splits}"
        group = world.engine.call(lambda: world.split(name, range(world.size), key))
        self._subgroups.append(group)
        return group.transport

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Route.new_buffer`. *Collective.*"""
        shared = self._shared_memory
        if shared is None or device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        limit = TimeLimit(self.world.limit_s)
        try:
            return self.world.engine.call(lambda: shared.allocate(numel, dtype, limit))
        except UnsupportedError as error:
            # The error is raised on all ranks of the node, so all of them stop allocating there.
            self._shared_memory = None
            if shared.rank == 0:
                warn(
                    f"{self.world.rank_label}: {error} Gradients are copied into shared memory in "
                    "chunks instead, which is slower.",
                    PerformanceWarning,
                )
            return torch.zeros(numel, dtype=dtype, device=device)

    # ---- counted ----

    @property
    def addresses(self) -> list[str]:
        """The addresses at which other ranks reach this rank, best first. Local."""
        if len(self._topology.nodes) == 1:
            return ["127.0.0.1"]
        return own_addresses(self.world.transport.own_address)

    @property
    def transport_names(self) -> list[str]:
        """The transports of all groups with more than one rank, each once."""
        groups = (self.world, *self._subgroups)
        return list(dict.fromkeys(group.transport.name for group in groups if group.size > 1))

    def traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        """See `Communicator.traffic`. Local."""
        sent: dict[str, int] = {}
        received: dict[str, int] = {}
        for transport, hosts in self._counted_transports():
            for total, own in ((sent, transport.sent), (received, transport.received)):
                # Copied, because the exchange thread may add a peer during the iteration.
                for peer, nbytes in own.copy().items():
                    total[hosts[peer]] = total.get(hosts[peer], 0) + nbytes
        return sent, received

    @property
    def num_sent_nbytes(self) -> int:
        """Bytes sent so far, as `traffic` counts them. Local."""
        return sum(sum(each.sent.copy().values()) for each, _ in self._counted_transports())

    def _counted_transports(self) -> list[tuple[Transport, list[str]]]:
        """All transports, each once, with the hosts of their ranks."""
        groups = (self.world, *self._subgroups)
        if self._num_counted_groups != len(groups):
            found: dict[int, tuple[Transport, list[str]]] = {}
            for group in groups:
                ranks = self.world.flight_recorder.members(group.name)
                hosts = [self._topology.hosts[rank] for rank in ranks or range(self.world.size)]
                for transport in group.transport.transports():
                    found.setdefault(id(transport), (transport, hosts))
            self._counted, self._num_counted_groups = list(found.values()), len(groups)
        return self._counted

    # ---- closed ----

    def close_transport(self, transport: Transport) -> None:
        """Close a transport made by `new_transport` early. Local.

        Does nothing if closing is collective, as over MPI: `close` does it then.
        """
        if not transport.is_close_collective:
            self._subgroups = [g for g in self._subgroups if g.transport is not transport]
            transport.close()

    def close(self) -> None:
        """Close the connections of all groups, in reverse order of creation."""
        for group in (*reversed(self._subgroups), self.world):
            group.transport.close()
        self._subgroups.clear()
