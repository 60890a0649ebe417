"""The communicator: who is there, what they can say to each other, and the path of a mean.

The collectives that users call are in `collectives`, written once over groups. A route is a
subclass that says along which path a buffer is summed (`_sum_`) and which placements it accepts.
"""

from __future__ import annotations

import operator
import socket
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from torchmn.communicators import object_codec
from torchmn.communicators.allreduce import Cargo, Wire, create_allreduce
from torchmn.communicators.collectives import Collectives
from torchmn.communicators.engine import Engine, Work
from torchmn.communicators.flight_recorder import FlightRecorder
from torchmn.communicators.group import Group
from torchmn.communicators.opening import Call
from torchmn.communicators.reductions import dense, described
from torchmn.compression import Codec
from torchmn.errors import UnsupportedError, UsageError
from torchmn.monitor import script_monitor
from torchmn.topology import Topology
from torchmn.transports.base import TimeLimit, Transport
from torchmn.transports.shared_memory import SharedMemoryTransport
from torchmn.units import MiB

Granularity = Literal["parameter", "everything", "bucket"]


class Communicator(Collectives, ABC):
    """Ranks that train together. Made by `create_communicator`, on every rank.

    Methods are *collective* unless they say otherwise: every rank calls them in the same order.
    All raise TimeLimitError or PeerLostError when other ranks do not come within ``timeout_s``,
    and RankMismatchError when they come with something else.
    """

    name: ClassVar[str]
    granularity: ClassVar[Granularity] = "bucket"
    """What one exchange of gradients holds: one parameter, all, or a bucket behind backward."""
    bucket_bytes: int = 4 * MiB
    shards_parameters: ClassVar[bool] = False
    """Whether what crosses nodes is cut wherever ranks' shares end, inside of a parameter too."""

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        *,
        device: torch.device,
        timeout_s: float,
        trust: object_codec.Trust,
        codec: Codec | None = None,
        reason: str = "",
        first_timeout_s: float | None = None,
        job_ranks: Sequence[int] | None = None,
    ) -> None:
        self.topology = topology
        self.place = topology.place(transport.rank)
        self.rank, self.size = self.place.rank, self.place.size
        self.intra_rank, self.intra_size = self.place.intra_rank, self.place.intra_size
        self.inter_rank, self.inter_size = self.place.inter_rank, self.place.inter_size
        self.host = topology.hosts[self.rank]
        self.device = device
        self.timeout_s = timeout_s
        self.first_timeout_s = timeout_s if first_timeout_s is None else first_timeout_s
        self.codec = codec
        self.reason = reason
        self.trust = trust
        self.num_steps: int | None = None
        """Steps of the optimizers made with it, by which data loading tells training from looks."""
        self.journal = FlightRecorder(
            job_ranks=range(self.size) if job_ranks is None else job_ranks
        )
        script_monitor.follow(self.journal)
        self.engine = Engine(device, is_threaded=getattr(transport, "is_threaded", True))
        self.world = Group(
            "world",
            transport,
            journal=self.journal,
            engine=self.engine,
            timeout_s=timeout_s,
            rank_label=self.rank_label,
            first_timeout_s=first_timeout_s,
        )
        self._open_collectives(trust, device)
        self._num_splits = 0
        self._subgroups: list[Group] = []
        self._shared_memory: SharedMemoryTransport | None = None
        self._before_end: list[Callable[[], None]] = []
        self.check_placement()
        self._connect()

    # ---- what a route says ----

    def check_placement(self) -> None:
        """Raise UnsupportedError if this route cannot serve this placement. Local, same on all."""

    def _connect(self) -> None:
        """Make the groups that the route needs, once."""

    @abstractmethod
    def _sum_(self, cargo: Cargo, wire: Wire) -> None:
        """Sum a cargo over all ranks, in place, the same bits on all. Inside an engine job."""

    def _send_ahead(self, cargo: Cargo, wire: Wire) -> None:
        """Announce what `_sum_` will send first if nothing is summed before that. Local."""

    def _agree(self, is_valid: bool) -> bool:
        """Whether what was decoded is valid on all ranks, inside an engine job.

        Here all ranks have decoded the same bytes and are of one opinion.
        """
        return is_valid

    @property
    def overlaps_backward(self) -> bool:
        """Whether gradients should leave while backward runs: whether waiting can be hidden."""
        return self.granularity == "bucket"

    @property
    def inter_node_group(self) -> Group | None:
        """The group whose sums cross what is slow here; None where there is none."""
        return self.world

    @property
    def encodes_between(self) -> str:
        """Whose messages a codec encodes on this route, in words; empty where nobody's."""
        return f"all {self.size} ranks" if self.size > 1 else ""

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros (numel,), to sum in, where this route sums fastest: on one node in shared memory.

        *Collective*: all ranks ask for the same sizes in the same order.
        """
        shared = self._shared_memory
        if shared is None or device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        limit = TimeLimit(self.world.limit_s)
        try:
            return self.engine.call(lambda: shared.allocate(numel, dtype, limit))
        except UnsupportedError as error:
            self._shared_memory = None
            if shared.rank == 0:
                warnings.warn(
                    f"{self.rank_label}: {error} Gradients are copied into shared memory in chunks "
                    "instead, which is slower.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return torch.zeros(numel, dtype=dtype, device=device)

    # ---- the exchange's way in ----

    @property
    def rank_label(self) -> str:
        """How errors name this rank."""
        return f"rank {self.rank} of {self.size} on {self.host} ({socket.gethostname()})"

    def sum_(
        self,
        cargo: Cargo | Tensor,
        wire: Wire | None = None,
        *,
        bucket: int | None = None,
        step: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Sum a one-dimensional contiguous buffer over all ranks, in place.

        ``wire`` is how to carry it, by default with the communicator's own codec. ``then`` is
        called behind the sum, before the next exchange of this rank begins.
        """
        self.engine.call(self._sum_job(cargo, wire, bucket, step, then))

    def start_sum_(
        self,
        cargo: Cargo | Tensor,
        wire: Wire | None = None,
        *,
        bucket: int | None = None,
        step: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> Work[None]:
        """Start a sum and return at once; the buffer is the exchange's until `Work.wait`."""
        return self.engine.submit(self._sum_job(cargo, wire, bucket, step, then))

    def agree(self, is_valid: bool) -> bool:
        """Whether what was decoded is valid on all ranks. In the ``then`` of a sum only."""
        return self._agree(is_valid)

    def _sum_job(
        self,
        cargo: Cargo | Tensor,
        wire: Wire | None,
        bucket: int | None,
        step: int | None,
        then: Callable[[], None] | None,
    ) -> Callable[[], None]:
        chosen = wire if wire is not None else create_allreduce(self.codec)
        freight = cargo if isinstance(cargo, Cargo) else Cargo.of(cargo)
        self._send_ahead(freight, chosen)

        def job() -> None:
            if bucket is None:
                self._sum_(freight, chosen)
            else:
                with self.journal.label(bucket=bucket, step=step):
                    self._sum_(freight, chosen)
            if then is not None:
                then()

        return job

    def channels(self, name: str) -> Transport:
        """A transport of all ranks for somebody's own threads, closed by `finalize`.

        Whoever asks sees to its time limits, and that each message between two ranks has its own
        tag and thread.
        """
        self._num_splits += 1
        world, key = (
            self.world.over(self.world.transport.thread_safe_transport),
            f"{name}{self._num_splits}",
        )
        group = self.engine.call(lambda: world.split(name, range(self.size), key))
        self._subgroups.append(group)
        return group.transport

    def _part_of(self, name: str, ranks: Sequence[int]) -> Group | None:
        """A group of some ranks; None for a rank outside it. Part of `_connect`."""
        self._num_splits += 1
        if self.rank not in ranks:
            return None
        group = self.world.split(name, ranks, f"{name}{self._num_splits}-{ranks[0]}")
        self.journal.know(name, ranks)
        self._subgroups.append(group)
        return group

    def _with_shared_memory(self, group: Group) -> Group:
        """The same ranks, which share a node, with collectives through memory. Part of `_connect`.

        GPUs have faster ways, and where the ranks cannot share memory a warning says why.
        """
        if group.size == 1 or self.device.type != "cpu":
            return group
        try:
            transport = self.engine.call(
                lambda: SharedMemoryTransport(group.transport, TimeLimit(group.limit_s))
            )
        except UnsupportedError as error:
            if group.rank == 0:
                warnings.warn(
                    f"{self.rank_label}: {error} Going on with {group.transport.name}, slower.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return group
        shared = group.over(transport)
        self._subgroups.append(shared)
        self._shared_memory = transport
        return shared

    def _own_part_of(self, name: str, partition: Sequence[Sequence[int]]) -> Group:
        """This rank's part of a partition of the ranks. Part of `_connect`."""
        parts = [self._part_of(name, ranks) for ranks in partition]
        return next(part for part in parts if part is not None)

    # ---- models ----

    def multi_node_mean_grad(self, model: nn.Module, zero_fill: bool = False) -> None:
        """Replace every ``p.grad`` by its mean over ranks, sorted by name, in place.

        ``zero_fill`` gives parameters without a gradient one of zeros; else they are skipped, and
        all ranks must skip the same ones. Raises RankMismatchError on all ranks, before anything is
        written: they have gradients of other names, shapes or dtypes.
        """
        grads: dict[str, Tensor] = {}

        def prepare() -> Callable[[], object]:
            for name, parameter in sorted(model.named_parameters()):
                if parameter.grad is None:
                    if not zero_fill or not parameter.requires_grad:
                        continue
                    parameter.grad = torch.zeros_like(parameter)
                grads[name] = dense(f"multi_node_mean_grad of '{name}'", parameter.grad)
            parts = [f"'{name}' {described(grad)}" for name, grad in grads.items()]
            return lambda: self._opening.meet(Call("multi_node_mean_grad", parts))

        self.engine.call(self._job("multi_node_mean_grad", prepare))
        for grad in grads.values():
            mean = grad.clone(memory_format=torch.contiguous_format).div_(self.size)
            self.sum_((torch.view_as_real(mean) if mean.is_complex() else mean).view(-1))
            grad.copy_(mean)

    # ---- life ----

    def split(self, color: int, key: int) -> Communicator:
        """A communicator of the ranks with the same ``color``, ordered by ``key``, then rank.

        It has the class and the settings of this one.
        """

        def prepare() -> Callable[[], list[tuple[int, int]]]:
            mine = (operator.index(color), operator.index(key))
            return lambda: self._to_everybody(Call("split"), mine)

        entries = self.engine.call(self._job("split", prepare))
        ranks = [r for _, r in sorted((e[1], r) for r, e in enumerate(entries) if e[0] == color)]
        return self._split_off("split", ranks)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of these ranks, in this order; None on the ranks that are not in it.

        *Collective over all ranks of this communicator*, with the same list. It has the class and
        the settings of this one, and its own ranks from 0. Horovod's process sets.

        Raises UsageError: no rank is given, one is given twice, or is outside of this communicator.
        """

        def prepare() -> Callable[[], object]:
            members = [operator.index(rank) for rank in ranks]
            outside = [rank for rank in members if not 0 <= rank < self.size]
            if not members or outside or len(set(members)) < len(members):
                raise UsageError(
                    f"ranks={members}. Give at least one rank, each once, from 0 to "
                    f"{self.size - 1}."
                )
            return lambda: self._opening.meet(Call("subgroup", ranks=members))

        self.engine.call(self._job("subgroup", prepare))
        members = [operator.index(rank) for rank in ranks]
        if self.rank in members:
            return self._split_off("subgroup", members)
        self._num_splits += 1  # counted on all ranks alike
        return None

    def _split_off(self, kind: str, ranks: Sequence[int]) -> Communicator:
        """A communicator of these ranks, which hold this one."""
        self._num_splits += 1
        name = f"{kind}{self._num_splits}"
        group = self.engine.call(lambda: self.world.split(name, ranks, f"{name}-{ranks[0]}"))
        return type(self)(
            group.transport,
            self.topology.subset(ranks),
            device=self.device,
            timeout_s=self.timeout_s,
            trust=self.trust,
            codec=self.codec,
            reason=self.reason,
            first_timeout_s=self.first_timeout_s,
            job_ranks=[self.journal.job_ranks[rank] for rank in ranks],
        )

    def on_finalize(self, callback: Callable[[], None]) -> None:
        """Have it called when `finalize` begins: by whoever has threads of his own here. Local."""
        self._before_end.append(callback)

    def forget_before_end(self, callback: Callable[[], None]) -> None:
        """Call it no more, and hold on to its object no more: its threads have ended. Local."""
        if callback in self._before_end:
            self._before_end.remove(callback)

    def end_channels(self, transport: Transport) -> None:
        """Close what `channels` has made before `finalize` does, unused from now on. Local.

        Over MPI, where closing is collective, `finalize` does it nevertheless.
        """
        if transport.name != "mpi":
            self._subgroups = [g for g in self._subgroups if g.transport is not transport]
            transport.close()

    def finalize(self) -> None:
        """End this communicator: finish what is in flight, close its connections."""
        while self._before_end:
            self._before_end.pop()()
        self.engine.close()
        for group in (*reversed(self._subgroups), self.world):
            group.transport.close()
        self._subgroups.clear()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.rank_label}, {self.topology}, {self.world.transport.name}>"


def all_agree(group: Group, is_valid: bool) -> bool:
    """Whether it is valid on all ranks of a group. *Collective over the group.*"""
    if group.size == 1:
        return is_valid
    flag = torch.tensor([0 if is_valid else 1], dtype=torch.int32, device="cpu")
    group.all_reduce_(flag, "max")
    return not int(flag)
