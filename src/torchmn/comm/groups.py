"""The groups of a communicator: made in the same order on all ranks, counted, closed together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from torchmn.cluster import Topology
from torchmn.comm.group import Group
from torchmn.comm.transports.base import TimeLimit, Transport
from torchmn.comm.transports.shared_memory import SharedMemoryTransport
from torchmn.errors import UnsupportedError


class Groups:
    """The world of a communicator and the groups that were split from it.

    Args:
        world: all ranks.
        topology: their hosts.
        device: the GPU of this rank, or the CPU.
    """

    def __init__(self, world: Group, topology: Topology, device: torch.device) -> None:
        self._world = world
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
        """A group of some ranks; None on the other ranks. *Collective*."""
        self.count_split()
        if self._world.rank not in ranks:
            return None
        group = self._world.split(name, ranks, f"{name}{self._num_splits}-{ranks[0]}")
        self._world.flight_recorder.register_group(name, ranks)
        self._subgroups.append(group)
        return group

    def own_part(self, name: str, partition: Sequence[Sequence[int]]) -> Group:
        """The group of this rank in a partition of the ranks. *Collective*."""
        parts = [self.part(name, ranks) for ranks in partition]
        return next(part for part in parts if part is not None)

    def with_shared_memory(self, group: Group) -> Group:
        """A group of ranks of one node with collectives through shared memory. *Collective.*

        The same group for GPUs, and with a warning where the ranks cannot share memory.
        """
        if group.size == 1 or self._device.type != "cpu":
            return group
        try:
            transport = group.engine.call(
                lambda: SharedMemoryTransport(group.transport, TimeLimit(group.limit_s))
            )
        except UnsupportedError as error:
            if group.rank == 0:
                warnings.warn(
                    f"{group.rank_label}: {error} Continuing with {group.transport.name}, "
                    "which is slower.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return group
        shared = group.with_transport(transport)
        self._subgroups.append(shared)
        self._shared_memory = transport
        return shared

    def for_small_messages(self) -> Group:
        """All ranks, over what is fastest for some KiB: shared memory on one node. *Collective.*"""
        shared = self._shared_memory
        if shared is not None and shared.size == self._world.size:
            return self._world.with_transport(shared)
        if len(self._topology.nodes) > 1 or self._world.transport.has_fast_small_sums:
            return self._world
        return self.with_shared_memory(self._world)

    def split_off(self, kind: str, ranks: Sequence[int]) -> Group:
        """A group of these ranks, which hold this one, for a communicator that will close it."""
        self.count_split()
        name = f"{kind}{self._num_splits}"
        return self._world.engine.call(lambda: self._world.split(name, ranks, f"{name}-{ranks[0]}"))

    def count_split(self) -> None:
        """Number a group, also on the ranks that are not in it: names are the same on all."""
        self._num_splits += 1

    def new_transport(self, name: str) -> Transport:
        """See `Communicator.new_transport`. *Collective.*"""
        self.count_split()
        world = self._world.with_transport(self._world.transport.thread_safe_transport)
        key = f"{name}{self._num_splits}"
        group = world.engine.call(lambda: world.split(name, range(world.size), key))
        self._subgroups.append(group)
        return group.transport

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Communicator.new_buffer`. *Collective.*"""
        shared = self._shared_memory
        if shared is None or device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        limit = TimeLimit(self._world.limit_s)
        try:
            return self._world.engine.call(lambda: shared.allocate(numel, dtype, limit))
        except UnsupportedError as error:
            self._shared_memory = None
            if shared.rank == 0:
                warnings.warn(
                    f"{self._world.rank_label}: {error} Gradients are copied into shared memory in "
                    "chunks instead, which is slower.",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return torch.zeros(numel, dtype=dtype, device=device)

    # ---- counted ----

    @property
    def transport_names(self) -> list[str]:
        """Of the groups of several ranks, each name once."""
        groups = (self._world, *self._subgroups)
        return list(dict.fromkeys(group.transport.name for group in groups if group.size > 1))

    def traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        """See `Communicator.traffic`. Local."""
        sent: dict[str, int] = {}
        received: dict[str, int] = {}
        for transport, hosts in self._counted_transports():
            for total, own in ((sent, transport.sent), (received, transport.received)):
                for peer, nbytes in own.copy().items():
                    total[hosts[peer]] = total.get(hosts[peer], 0) + nbytes
        return sent, received

    @property
    def num_sent_nbytes(self) -> int:
        """Bytes sent so far, as `traffic` counts them. Local."""
        return sum(sum(each.sent.copy().values()) for each, _ in self._counted_transports())

    def _counted_transports(self) -> list[tuple[Transport, list[str]]]:
        """Each transport once, with the host of each of its ranks."""
        groups = (self._world, *self._subgroups)
        if self._num_counted_groups != len(groups):
            found: dict[int, tuple[Transport, list[str]]] = {}
            for group in groups:
                ranks = self._world.flight_recorder.members(group.name)
                hosts = [self._topology.hosts[rank] for rank in ranks or range(self._world.size)]
                for transport in group.transport.transports():
                    found.setdefault(id(transport), (transport, hosts))
            self._counted, self._num_counted_groups = list(found.values()), len(groups)
        return self._counted

    # ---- closed ----

    def close_transport(self, transport: Transport) -> None:
        """See `Communicator.close_transport`. Local."""
        if not transport.is_close_collective:
            self._subgroups = [g for g in self._subgroups if g.transport is not transport]
            transport.close()

    def close(self) -> None:
        """Close the connections of all groups, those that were made last first."""
        for group in (*reversed(self._subgroups), self._world):
            group.transport.close()
        self._subgroups.clear()
