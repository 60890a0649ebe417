"""The communicator: the ranks of a job, their collectives, and a route for sums of gradients.

The collectives that users call are in `collectives`, implemented once on top of groups. Sums of
gradients are computed by the route.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from torchmn.base import events
from torchmn.base.errors import UnsupportedError
from torchmn.base.log import Log
from torchmn.cluster import Topology
from torchmn.comm import object_codec
from torchmn.comm.codecs import Codec
from torchmn.comm.collectives import Collectives
from torchmn.comm.engine import Engine
from torchmn.comm.engine_jobs import CollectiveJobs
from torchmn.comm.flight_recorder import FlightRecorder
from torchmn.comm.group import Group, Groups
from torchmn.comm.point_to_point import PointToPoint, Replies
from torchmn.comm.routes.base import Route
from torchmn.comm.training_start import share_training_steps, training_start
from torchmn.comm.transports.base import Transport
from torchmn.comm.transports.join import make_process_group, mesh_of_groups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Communicator(Collectives):
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
        timeout_s: how long a collective waits for ranks that will not arrive, in seconds.
        codec: the codec of ``allreduce_grad_dtype``, or None.
        name, reason: the route of sums, and why ``name="auto"`` chose it; may be empty.
        flight_recorder: the last collectives of this rank.
        route, world, groups, engine, replies, trust: for torchmn's own modules.

    Example:
        >>> comm.rank, comm.size, comm.allreduce(torch.tensor([1.0, 2.0]), "mean").tolist()
        (0, 1, [1.0, 2.0])
        >>> comm.allgather_obj({"rank": comm.rank})
        [{'rank': 0}]
    """

    def __init__(
        self,
        route: type[Route],
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
        place = topology.place(transport.rank)
        self.rank, self.size = place.rank, place.size
        self.intra_rank, self.intra_size = place.intra_rank, place.intra_size
        self.inter_rank, self.inter_size = place.inter_rank, place.inter_size
        self.topology, self.host = topology, topology.hosts[self.rank]
        self.name, self.reason = route.name, reason
        self.device, self.codec, self.trust = device, codec, trust
        self.timeout_s = timeout_s
        self._process_group: dist.ProcessGroup | None = None
        self.flight_recorder = FlightRecorder(
            job_ranks=range(self.size) if job_ranks is None else job_ranks,
            has_whole_job=job_ranks is None,
            hosts=topology.hosts,
        )
        self.engine = Engine(device, has_peers=transport.size > 1)
        self.flight_recorder.look_at_engine = self.engine.status
        self.world = Group(
            "world",
            transport,
            flight_recorder=self.flight_recorder,
            engine=self.engine,
            timeout_s=timeout_s,
            first_timeout_s=timeout_s if first_timeout_s is None else first_timeout_s,
            rank_label=self.rank_label,
        )
        self.groups = Groups(self.world, topology, device)
        self._jobs = CollectiveJobs(self.world, trust, device)
        self._messages = PointToPoint(self.world, trust, device)
        self.replies = Replies(self.world, trust, device)
        self._on_finalize: list[list[Callable[[], None]]] = []
        self.route = route(self.groups, topology, device, codec)
        for observer in events.observers:
            observer.communicator(self, begins=True)

    @property
    def rank_label(self) -> str:
        """The name of this rank in error messages."""
        return f"rank {self.rank} of {self.size} on {self.host} ({socket.gethostname()})"

    def logger(
        self, name: str = "torchmn", *, all_ranks: bool = False
    ) -> logging.LoggerAdapter[logging.Logger]:
        """A logger for messages of rank 0 alone, or with ``all_ranks`` of every rank. Local.

        It passes them on to ``logging.getLogger(name)``, so that levels and handlers are those that
        the script sets there. Each record has ``rank``, ``world_size`` and ``host`` for formatters.
        While no handler is there, messages from INFO on are printed to standard error.

        Example:
            >>> log = comm.logger("train", all_ranks=True)
            >>> log.info("%d samples", 128)
        """
        is_silent = self.rank != 0 and not all_ranks
        return Log(name, rank=self.rank, size=self.size, host=self.host, is_silent=is_silent)

    # ---- what is recorded ----

    @property
    def settings(self) -> dict[str, str]:
        """Route and transports, for the record of the run. Local."""
        return {
            "route": self.name,
            "transport": ", ".join(self.groups.transport_names),
            "topology": str(self.topology),
            "allreduce_grad_dtype": "" if self.codec is None else self.codec.name,
            "reason": self.reason,
        }

    def traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes sent and received so far, by the host at the other end. Local.

        Traffic through shared memory counts for this host. Collectives that a library runs by its
        own algorithm are counted as if they used a ring.
        """
        return self.groups.traffic()

    @property
    def num_sent_nbytes(self) -> int:
        """Bytes sent so far, as `traffic` counts them. Local."""
        return self.groups.num_sent_nbytes

    # ---- models ----

    def multi_node_mean_grad(self, model: nn.Module, zero_fill: bool = False) -> None:
        """Replace every ``p.grad`` by its mean over ranks, in place and in the order of names.

        Args:
            model: the same model on every rank.
            zero_fill: give parameters without a gradient one of zeros; otherwise they are skipped,
                and all ranks must skip the same ones.

        Raises RankMismatchError on all ranks, before anything is written: the gradients of the
        ranks differ in names, shapes or dtypes.
        """
        training_start.begin()  # in a loop without a multi-node optimizer
        grads = self.engine.call(self._jobs.multi_node_mean_grad(model, zero_fill))
        for grad in grads.values():
            # A contiguous copy, because routes sum flat buffers of real numbers; gradients may be
            # complex and have any strides.
            mean = grad.clone(memory_format=torch.contiguous_format).div_(self.size)
            self.route.sum_((torch.view_as_real(mean) if mean.is_complex() else mean).view(-1))
            grad.copy_(mean)

    # ---- life ----

    def split(self, color: int, key: int) -> Communicator:
        """A communicator of the ranks with the same ``color``, ordered by ``key``, then by rank.

        It has the class and the settings of this one. Unlike in MPI every rank needs a color, an
        integer. Call its `finalize` on all of its ranks.

        Raises TypeError: ``color`` or ``key`` is not an integer (RankMismatchError on other ranks).
        """
        ranks = self.engine.call(self._jobs.split(color, key))
        return self._split_off("split", ranks)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of ``ranks``, in this order; None on all other ranks.

        *Collective over all ranks of this communicator*, with the same list. It has the class and
        the settings of this one, and its own ranks from 0. Compare Horovod's process sets.

        Raises UsageError: ``ranks`` is empty, has duplicates, or a rank outside this communicator.
        """
        members = self.engine.call(self._jobs.subgroup(ranks))
        if self.rank in members:
            return self._split_off("subgroup", members)
        self.groups.count_split()
        return None

    @property
    def process_group(self) -> dist.ProcessGroup:
        """A process group of `torch.distributed` of the same ranks. *Collective* the first time.

        Its backend is gloo for CPU tensors, also under MPI, and NCCL in addition on GPUs. The
        default process group is initialized if the script has not done so. Raises UnsupportedError:
        ranks are threads, or their order differs from that of the default process group.
        """
        if self._process_group is None:
            self._process_group = make_process_group(self)
        return self._process_group

    def device_mesh(self, name: str = "model") -> DeviceMesh:
        """A one-dimensional DeviceMesh of these ranks, as for `fully_shard`. *Collective.*

        `Grid.device_mesh` makes meshes of several axes. Raises the same errors as `process_group`.
        """
        return mesh_of_groups(
            [self.process_group], [name], torch.empty(0, device="cpu"), self.device.type
        )

    def _split_off(self, kind: str, ranks: Sequence[int]) -> Communicator:
        """A communicator of ``ranks``, which must include this rank."""
        group = self.groups.split_off(kind, ranks)
        part = type(self)(
            type(self.route),
            group.transport,
            self.topology.subset(ranks),
            device=self.device,
            timeout_s=self.timeout_s,
            trust=self.trust,
            codec=self.codec,
            reason=self.reason,
            first_timeout_s=self.world.first_timeout_s,
            job_ranks=[self.flight_recorder.job_ranks[rank] for rank in ranks],
        )
        share_training_steps(self, part)
        # One listener answers for all communicators of a rank, so the part asks the same peers.
        part.flight_recorder.peers = self.flight_recorder.peers
        return part

    def on_finalize(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Register a callback to run at the start of `finalize`, last registered first. Local.

        Returns a function that unregisters the callback and drops all references to it.
        """
        entry = [callback]
        self._on_finalize.append(entry)

        def cancel() -> None:
            entry.clear()  # `cancel` may be kept by the object of the callback: no cycle
            self._on_finalize[:] = [each for each in self._on_finalize if each]

        return cancel

    def finalize(self) -> None:
        """End this communicator: complete pending collectives and close its connections.

        Call it on every rank: over MPI it waits for the others. The communicator cannot be used
        afterwards.
        """
        # One at a time, because a callback may cancel others.
        while self._on_finalize:
            entry = self._on_finalize.pop()
            callback = entry.pop()
            callback()
        try:
            self.engine.close()
        finally:
            for observer in events.observers:
                observer.communicator(self, begins=False)
            self.groups.close()

    def __copy__(self) -> Communicator:
        return self

    def __deepcopy__(self, memo: object) -> Communicator:
        """Return the communicator itself: copies of a model share it."""
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
