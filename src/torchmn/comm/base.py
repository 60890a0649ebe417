"""The communicator: the ranks of a job, their collectives, and the route of a sum.

The collectives that users call are in `collectives`, written once over groups. A route is a
subclass that defines how a buffer is summed (`_sum_`) and which placements it supports.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchmn import events
from torchmn.cluster import Topology
from torchmn.cluster.network import own_addresses
from torchmn.cluster.units import MiB
from torchmn.comm import object_codec
from torchmn.comm.allreduce import (
    AllReduceAlgorithm,
    NativeAllReduce,
    ReduceBlock,
    create_allreduce,
)
from torchmn.comm.codecs import Codec
from torchmn.comm.collectives import Collectives
from torchmn.comm.engine import Engine, Work
from torchmn.comm.engine_jobs import CollectiveJobs
from torchmn.comm.flight_recorder import FlightRecorder
from torchmn.comm.group import Group, Groups
from torchmn.comm.point_to_point import PointToPoint
from torchmn.comm.scattered_loaders import DividedBatches
from torchmn.comm.training_start import training_start
from torchmn.comm.transports.base import Transport
from torchmn.comm.transports.join import make_process_group, mesh_of_groups
from torchmn.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Granularity = Literal["parameter", "everything", "bucket"]


@dataclass(slots=True)
class _Steps:
    """What a communicator and its parts count together."""

    count: int | None = None


class Communicator(Collectives, ABC):
    """The ranks of a job and their collectives. Made by `create_communicator`, on every rank.

    Methods are *collective* unless documented otherwise: every rank calls them in the same order.
    They block until the result is available, but for those named ``start_...``. All raise
    TimeLimitError or PeerLostError if other ranks do not arrive within ``timeout_s``,
    RankMismatchError if ranks make different calls, and CommunicationError after `finalize` or
    after a failed collective.

    Attributes:
        rank, size: this rank, 0 to size - 1, and the number of ranks.
        intra_rank, intra_size: this rank on its node, and the number of ranks there.
        inter_rank, inter_size: this rank's node, and the number of nodes.
        host, topology: the host of this rank, and the hosts of all ranks.
        device: the GPU of this rank, or the CPU.
        timeout_s, first_timeout_s: the limits of `create_communicator`, in seconds.
        codec: the codec of ``allreduce_grad_dtype``, or None.
        reason: why ``name="auto"`` chose this route; may be empty.
        flight_recorder: the last collectives of this rank.

    Example:
        >>> comm.rank, comm.size, comm.allreduce(torch.tensor([1.0, 2.0]), "mean").tolist()
        (0, 1, [1.0, 2.0])
        >>> comm.allgather_obj({"rank": comm.rank})
        [{'rank': 0}]
    """

    name: ClassVar[str]
    granularity: ClassVar[Granularity] = "bucket"
    """What is summed at once: one parameter, all, or a bucket while backward runs."""
    bucket_bytes: int = 4 * MiB
    shards_parameters: ClassVar[bool] = False
    """Whether messages between nodes may hold a part of a parameter."""
    plain_sum: ClassVar[AllReduceAlgorithm] = NativeAllReduce()
    """How this route sums without a codec."""

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
        self._steps = _Steps()
        self._process_group: dist.ProcessGroup | None = None
        self.flight_recorder = FlightRecorder(
            job_ranks=range(self.size) if job_ranks is None else job_ranks,
            has_whole_job=job_ranks is None,
        )
        self.engine = Engine(
            device, is_threaded=transport.is_threaded, has_peers=transport.size > 1
        )
        self.world = Group(
            "world",
            transport,
            flight_recorder=self.flight_recorder,
            engine=self.engine,
            timeout_s=timeout_s,
            first_timeout_s=self.first_timeout_s,
            rank_label=self.rank_label,
        )
        self._groups = Groups(self.world, topology, device)
        self._jobs = CollectiveJobs(self.world, trust, device)
        self._messages = PointToPoint(self.world, trust, device)
        self._gradients = PointToPoint(self.world, trust, device, is_synchronous=True)
        self._num_answered: Counter[int] = Counter()
        self._default_algorithm = self.allreduce_algorithm(codec)
        self._on_finalize: list[Callable[[], None]] = []
        self._resume_warnings: list[str] = []
        self.divided_batches = DividedBatches()
        """What `scatter_loader` divides among its ranks."""
        self.check_placement()
        self._connect()
        for observer in events.observers:
            observer.communicator(self, begins=True)

    @property
    def num_steps(self) -> int | None:
        """Steps of the optimizers made with it, with what it was split from, or with other parts.

        By these data loading recognizes training steps; None before there is an optimizer.
        """
        return self._steps.count

    @num_steps.setter
    def num_steps(self, count: int | None) -> None:
        self._steps.count = count

    # ---- what a route defines ----

    def check_placement(self) -> None:
        """Raise UnsupportedError if this route cannot serve this placement. Local, same on all."""

    def _connect(self) -> None:
        """Make the groups that the route needs, once, by methods of ``self._groups``."""

    @abstractmethod
    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        """Sum a block over all ranks, in place, with the same bits on all. In an engine job."""

    def _prefetch_send(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        """Announce what `_sum_` will send first, if that is known before it runs. Local."""

    def all_valid(self, is_valid: bool) -> bool:
        """Whether what was decoded is valid on all ranks. Only in ``on_complete`` of a sum.

        By default all ranks have decoded the same bytes, so they agree.
        """
        return is_valid

    @property
    def overlaps_backward(self) -> bool:
        """Whether gradients should be exchanged while backward runs."""
        return self.granularity == "bucket"

    @property
    def inter_node_group(self) -> Group | None:
        """The group whose sums cross the slow links; None where there are none."""
        return self.world

    @property
    def codec_scope(self) -> str:
        """Between whom a codec encodes messages, as text for errors; empty if it encodes none."""
        return f"all {self.size} ranks" if self.size > 1 else ""

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros (numel,) where this route sums fastest: on one node in shared memory.

        *Collective*: all ranks request the same sizes in the same order.
        """
        return self._groups.new_buffer(numel, dtype, device)

    # ---- sums of gradients ----

    @property
    def rank_label(self) -> str:
        """How errors name this rank."""
        return f"rank {self.rank} of {self.size} on {self.host} ({socket.gethostname()})"

    def allreduce_algorithm(self, codec: Codec | None) -> AllReduceAlgorithm:
        """How this route sums with a codec, or without one. Local. Make it once and keep it.

        Raises UsageError: the codec is neither a StripeCodec nor PowerSGD.
        """
        return self.plain_sum if codec is None else create_allreduce(codec)

    def sum_(
        self,
        block: ReduceBlock | Tensor,
        algorithm: AllReduceAlgorithm | None = None,
        *,
        bucket: int | None = None,
        step: int | None = None,
        on_complete: Callable[[], None] | None = None,
    ) -> None:
        """Sum a buffer over all ranks, in place, with the same bits on all.

        Args:
            block: a tensor (n,), contiguous, of the same n and floating dtype on all ranks, which
                is not compared; or a `ReduceBlock`, whose layout codecs need.
            algorithm: from `allreduce_algorithm`; by default with the communicator's own codec.
            bucket: a number for the flight recorder, with ``step``.
            step: the step of the optimizer, for the flight recorder.
            on_complete: called after the sum, before the next exchange of this rank begins.

        Raises UnsupportedError: the codec needs whole parameters and the route or block has parts.
        """
        self.engine.call(self._sum_job(block, algorithm, bucket, step, on_complete))

    def start_sum_(
        self,
        block: ReduceBlock | Tensor,
        algorithm: AllReduceAlgorithm | None = None,
        *,
        bucket: int | None = None,
        step: int | None = None,
        on_complete: Callable[[], None] | None = None,
    ) -> Work[None]:
        """Start `sum_` and return at once; do not touch the buffer before `Work.wait` returns.

        All ranks start their sums and collectives in the same order. ``on_complete`` is called on
        the engine's thread. `Work.wait` raises what `sum_` would raise.
        """
        return self.engine.submit(self._sum_job(block, algorithm, bucket, step, on_complete))

    def _sum_job(
        self,
        block: ReduceBlock | Tensor,
        algorithm: AllReduceAlgorithm | None,
        bucket: int | None,
        step: int | None,
        on_complete: Callable[[], None] | None,
    ) -> Callable[[], None]:
        chosen = self._default_algorithm if algorithm is None else algorithm
        whole = block if isinstance(block, ReduceBlock) else ReduceBlock(block)
        self._prefetch_send(whole, chosen)
        if bucket is not None:
            for observer in events.observers:
                observer.exchange(self, whole, bucket, "queued")

        def job() -> None:
            self.flight_recorder.set_label(bucket, step)
            if bucket is not None:
                for observer in events.observers:
                    observer.exchange(self, whole, bucket, "started")
            try:
                self._sum_(whole, chosen)
            finally:
                self.flight_recorder.set_label(None, None)
                if bucket is not None:
                    for observer in events.observers:
                        observer.exchange(self, whole, bucket, "ended")
            if on_complete is not None:
                on_complete()

        return job

    # ---- what is recorded ----

    @property
    def addresses(self) -> list[str]:
        """Those at which the other ranks reach this one, best first. Local."""
        if self.inter_size == 1:
            return ["127.0.0.1"]
        return own_addresses(self.world.transport.own_address)

    @property
    def settings(self) -> dict[str, str]:
        """Route and transports, for the record of the run. Local."""
        return {
            "route": self.name,
            "transport": ", ".join(self._groups.transport_names),
            "topology": str(self.topology),
            "allreduce_grad_dtype": "" if self.codec is None else self.codec.name,
            "reason": self.reason,
        }

    def traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes sent and received so far, by the host at the other end. Local.

        What passes through shared memory counts for this host, and what a library sends by an
        algorithm of its own as if it were a ring.
        """
        return self._groups.traffic()

    @property
    def num_sent_nbytes(self) -> int:
        """Bytes sent so far, as `traffic` counts them. Local."""
        return self._groups.num_sent_nbytes

    def recent_collectives(self) -> list[dict[str, Any]]:
        """The last collectives that have ended, for a profile: what they moved, and when. Local."""
        to_own_clock_s = time.perf_counter() - time.monotonic()
        return [
            {
                "number": entry.number,
                "name": entry.name,
                "group": entry.group,
                "bucket": entry.bucket,
                "step": entry.step,
                "shape": list(entry.shape),
                "dtype": entry.dtype,
                "hosts": sorted(
                    {
                        self.topology.hosts[rank]
                        for rank in self.flight_recorder.members(entry.group) or range(self.size)
                    }
                ),
                "started_s": entry.started_s + to_own_clock_s,
                "ended_s": entry.ended_s + to_own_clock_s,
            }
            for entry in self.flight_recorder.entries()
            if entry.ended_s is not None
        ]

    # ---- transports and groups ----

    def new_transport(self, name: str) -> Transport:
        """A transport of all ranks for use in other threads, closed by `finalize`. *Collective.*

        The caller gives it time limits, and each message between two ranks has its own tag and
        thread.
        """
        return self._groups.new_transport(name)

    def close_transport(self, transport: Transport) -> None:
        """Close a transport of `new_transport` before `finalize` does. Local.

        Where closing is collective, as over MPI, `finalize` does it nevertheless.
        """
        self._groups.close_transport(transport)

    def group_for_small_messages(self) -> Group:
        """All ranks, over what is fastest for some KiB: shared memory on one node. *Collective.*"""
        return self._groups.for_small_messages()

    # ---- models ----

    def multi_node_mean_grad(self, model: nn.Module, zero_fill: bool = False) -> None:
        """Replace every ``p.grad`` by its mean over ranks, sorted by name, in place.

        Args:
            model: the same model on every rank.
            zero_fill: give parameters without a gradient one of zeros; otherwise they are skipped,
                and all ranks must skip the same ones.

        Raises RankMismatchError on all ranks, before anything is written: their gradients differ in
        names, shapes or dtypes.
        """
        training_start.begin()  # in a loop without a multi-node optimizer
        grads = self.engine.call(self._jobs.multi_node_mean_grad(model, zero_fill))
        for grad in grads.values():
            mean = grad.clone(memory_format=torch.contiguous_format).div_(self.size)
            self.sum_((torch.view_as_real(mean) if mean.is_complex() else mean).view(-1))
            grad.copy_(mean)

    # ---- life ----

    def split(self, color: int, key: int) -> Communicator:
        """A communicator of the ranks with the same ``color``, ordered by ``key``, then by rank.

        It has the class and the settings of this one. Unlike in MPI every rank needs a color, an
        integer. Call its `finalize` on all of its ranks.

        Raises TypeError: ``color`` or ``key`` is no integer (RankMismatchError on other ranks).
        """
        ranks = self.engine.call(self._jobs.split(color, key))
        return self._split_off("split", ranks)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of these ranks, in this order; None on the ranks that are not in it.

        *Collective over all ranks of this communicator*, with the same list. It has the class and
        the settings of this one, and its own ranks from 0. Horovod's process sets.

        Raises UsageError: no rank is given, one is given twice, or is outside of this communicator.
        """
        members = self.engine.call(self._jobs.subgroup(ranks))
        if self.rank in members:
            return self._split_off("subgroup", members)
        self._groups.count_split()
        return None

    @property
    def process_group(self) -> dist.ProcessGroup:
        """A process group of `torch.distributed` of the same ranks. *Collective* the first time.

        gloo on CPUs, under MPI too; on GPUs NCCL beside it. The default world of torch.distributed
        is made if the script has not made it. Raises UnsupportedError: ranks are threads, or their
        order is not that of torch's default world.
        """
        if self._process_group is None:
            self._process_group = make_process_group(self)
        return self._process_group

    def device_mesh(self, name: str = "model") -> DeviceMesh:
        """A mesh of one axis over these ranks, as `fully_shard` takes. *Collective.*

        `Grid.device_mesh` makes those of several axes. Raises as `process_group`.
        """
        return mesh_of_groups(
            [self.process_group], [name], torch.empty(0, device="cpu"), self.device.type
        )

    def _split_off(self, kind: str, ranks: Sequence[int]) -> Communicator:
        """A communicator of these ranks, which hold this one."""
        group = self._groups.split_off(kind, ranks)
        part = type(self)(
            group.transport,
            self.topology.subset(ranks),
            device=self.device,
            timeout_s=self.timeout_s,
            trust=self.trust,
            codec=self.codec,
            reason=self.reason,
            first_timeout_s=self.first_timeout_s,
            job_ranks=[self.flight_recorder.job_ranks[rank] for rank in ranks],
        )
        part._steps = self._steps
        part.flight_recorder.peers = self.flight_recorder.peers
        return part

    def add_resume_warning(self, text: str) -> None:
        """Of something that is not saved and differs on another number of ranks. Local."""
        self._resume_warnings.append(text)

    def resume_warnings(self) -> list[str]:
        """What does not hold when a state is loaded by another number of ranks. Local."""
        return self._resume_warnings

    def on_finalize(self, callback: Callable[[], None]) -> None:
        """Register a callback to run at the start of `finalize`, last registered first. Local."""
        self._on_finalize.append(callback)

    def cancel_on_finalize(self, callback: Callable[[], None]) -> None:
        """Remove a callback of `on_finalize`, and the reference to its object. Local."""
        if callback in self._on_finalize:
            self._on_finalize.remove(callback)

    def finalize(self) -> None:
        """End this communicator: complete what is in flight, close its connections.

        Call it on every rank: over MPI it waits for the others. The communicator cannot be used
        after it.
        """
        while self._on_finalize:
            self._on_finalize.pop()()
        self.engine.close()
        for observer in events.observers:
            observer.communicator(self, begins=False)
        self._groups.close()

    def __copy__(self) -> Communicator:
        return self

    def __deepcopy__(self, memo: object) -> Communicator:
        """Copies of a model that holds a communicator share it."""
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.rank_label}: a communicator is connections of this process and cannot be "
            "pickled. Save state_dict() of the object that holds it; to load it, make the object "
            "again with a communicator."
        )

    def __repr__(self) -> str:
        transport = self.world.transport.name
        return f"<{type(self).__name__} {self.rank_label}, {self.topology}, {transport}>"
