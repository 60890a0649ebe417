"""The communicator: who is there, what they can say to each other, and the path of a mean.

The collectives that users call are written once, over groups. A route is a subclass that says
along which path a buffer is summed (`_sum_`) and which placements it accepts.
"""

from __future__ import annotations

import socket
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from torchmn.communicators import objects
from torchmn.communicators.delivery import Delivery, Refusal
from torchmn.communicators.engine import Engine, Work
from torchmn.communicators.group import Group
from torchmn.communicators.journal import Journal
from torchmn.communicators.transports.base import TimeLimit, Transport, fold
from torchmn.communicators.transports.shared_memory import SharedMemoryTransport
from torchmn.communicators.wire import Cargo, Wire, create_wire
from torchmn.compression import Codec
from torchmn.errors import DisagreementError, UnknownNameError, UnsupportedError, UsageError
from torchmn.launch.watch import watched
from torchmn.topology import Topology
from torchmn.units import MiB

Result = TypeVar("Result")
UserOp = Literal["sum", "mean", "max", "min"]
Granularity = Literal["parameter", "everything", "bucket"]

_OPS = ("sum", "mean", "max", "min")
_MAX_DIMS = 16
_USER_TAG = 64  # tags of send and recv start here; collectives use 0
_DTYPES = sorted({str(v) for v in vars(torch).values() if isinstance(v, torch.dtype)})


def _own(x: Tensor) -> Tensor:
    """A rank's own part of a result: as the others' parts, without memory or graph of ``x``."""
    return x.detach().clone()


class Communicator(ABC):
    """Ranks that train together. Made by `create_communicator`, on every rank.

    Methods are *collective* unless they say otherwise: every rank calls them in the same order.
    All raise TimeLimitError or PeerLostError when other ranks do not come within ``timeout_s``,
    and DisagreementError when they come with something else.
    """

    name: ClassVar[str]
    granularity: ClassVar[Granularity] = "bucket"
    """What one exchange of gradients holds: one parameter, all, or a bucket behind backward."""
    bucket_bytes: int = 4 * MiB
    cuts_parameters: ClassVar[bool] = False
    """Whether what crosses nodes is cut wherever ranks' shares end, inside of a parameter too."""

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        *,
        device: torch.device,
        timeout_s: float,
        trust: objects.Trust,
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
        self.journal = Journal(job_ranks=range(self.size) if job_ranks is None else job_ranks)
        watched.follow(self.journal)
        self.engine = Engine(device, is_threaded=getattr(transport, "is_threaded", True))
        self.world = Group(
            "world",
            transport,
            journal=self.journal,
            engine=self.engine,
            timeout_s=timeout_s,
            speaker=self.speaker,
            first_timeout_s=first_timeout_s,
        )
        self._delivery = Delivery(self.world, trust, device)
        self._num_splits = 0
        self._subgroups: list[Group] = []
        self._shared_memory: SharedMemoryTransport | None = None
        self._before_end: list[Callable[[], None]] = []
        self.check_placement()
        self._connect()

    # ---- what a route says ----

    def check_placement(self) -> None:  # noqa: B027 - most routes accept every placement
        """Raise UnsupportedError if this route cannot serve this placement. Local, same on all."""

    def _connect(self) -> None:  # noqa: B027 - most routes need no group but the world
        """Make the groups that the route needs, once."""

    @abstractmethod
    def _sum_(self, cargo: Cargo, wire: Wire) -> None:
        """Sum a cargo over all ranks, in place, the same bits on all. Inside an engine job."""

    def _send_ahead(self, cargo: Cargo, wire: Wire) -> None:  # noqa: B027 - a hint
        """Announce what `_sum_` will send first if nothing is summed before that. Local."""

    def _agree(self, is_valid: bool) -> bool:
        """Whether what was decoded is valid on all ranks, inside an engine job.

        Here all ranks have decoded the same bytes and are of one opinion.
        """
        return is_valid

    @property
    def hides_exchange(self) -> bool:
        """Whether gradients should leave while backward runs: whether waiting can be hidden."""
        return self.granularity == "bucket"

    @property
    def link_group(self) -> Group | None:
        """The group whose sums cross what is slow here; None where there is none."""
        return self.world

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
                    f"{self.speaker}: {error} Gradients are copied into shared memory in chunks "
                    "instead, which is slower.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return torch.zeros(numel, dtype=dtype, device=device)

    # ---- the exchange's way in ----

    @property
    def speaker(self) -> str:
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
        chosen = wire if wire is not None else create_wire(self.codec)
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
        world, key = self.world.over(self.world.transport.for_threads), f"{name}{self._num_splits}"
        group = self.engine.call(lambda: world.split(name, range(self.size), key))
        self._subgroups.append(group)
        return group.transport

    def _subgroup(self, name: str, ranks: Sequence[int]) -> Group | None:
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
                    f"{self.speaker}: {error} Going on with {group.transport.name}, slower.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return group
        shared = group.over(transport)
        self._subgroups.append(shared)
        self._shared_memory = transport
        return shared

    def _own_subgroup(self, name: str, partition: Sequence[Sequence[int]]) -> Group:
        """This rank's part of a partition of the ranks. Part of `_connect`."""
        parts = [self._subgroup(name, ranks) for ranks in partition]
        return next(part for part in parts if part is not None)

    # ---- tensors ----

    def send(self, data: Tensor | Sequence[Tensor], dest: int, tag: int = 0) -> None:
        """Send a tensor, or a tuple or list of tensors, of any shapes. Called by the sender."""
        self.send_obj(tuple(data) if isinstance(data, (list, tuple)) else data, dest, tag)

    def recv(self, source: int, tag: int = 0) -> Tensor | tuple[Tensor, ...]:
        """Receive what ``source`` sent: a tensor or a tuple of tensors. Called by the receiver.

        A CUDA tensor arrives on ``comm.device``, any other on the CPU.
        """
        return cast("Tensor | tuple[Tensor, ...]", self.recv_obj(source, tag))

    def bcast(self, x: Tensor | None, root: int = 0) -> Tensor:
        """The root's tensor on every rank; ``x`` of other ranks is ignored."""
        return cast(Tensor, self.bcast_obj(x, root)).detach()

    def gather(self, x: Tensor, root: int = 0) -> tuple[Tensor, ...] | None:
        """All ranks' tensors, shapes may differ, at the root in rank order; None elsewhere."""
        gathered = self.gather_obj(x, root)
        if gathered is None:
            return None
        gathered[self.rank] = _own(x)
        return tuple(gathered)

    def allgather(self, x: Tensor) -> tuple[Tensor, ...]:
        """All ranks' tensors, shapes may differ, in rank order on every rank."""
        gathered = self.allgather_obj(x)
        gathered[self.rank] = _own(x)
        return tuple(gathered)

    def alltoall(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``xs[i]`` goes to rank i; returns what every rank sent here. Shapes may differ.

        Raises UsageError: ``len(xs) != size`` (DisagreementError on the other ranks).
        """
        return self._alltoall("alltoall", xs)

    def _alltoall(self, what: str, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        refusal = self._length_refusal(what, len(xs))
        outgoing = {peer: refusal or xs[peer] for peer in range(self.size)}
        got = self.engine.call(lambda: self._delivery.deliver(what, outgoing, range(self.size), 0))
        if refusal:
            raise UsageError(refusal.text)
        got[self.rank] = _own(xs[self.rank])
        return tuple(got[peer] for peer in range(self.size))

    def scatter(self, xs: Sequence[Tensor] | Tensor | None, root: int = 0) -> Tensor:
        """Rank i gets ``xs[i]`` of the root: W tensors of any shapes, or one of shape (W, ...)."""
        mine = self.scatter_obj(cast("Sequence[object] | None", xs), root)
        return _own(mine) if self.rank == root else cast(Tensor, mine)

    def allreduce(self, x: Tensor, op: UserOp = "sum") -> Tensor:
        """Sum, mean, max or min over ranks, elementwise, as a new tensor.

        16-bit floats are summed in float32. Raises UsageError: unknown ``op`` or a mean of
        integers; DisagreementError: ranks differ in shape, dtype or op.
        """
        self._check_op(op, x.dtype)
        result = x.detach().clone(memory_format=torch.contiguous_format)
        flat = result.view(-1)
        is_bool = flat.dtype == torch.bool
        if is_bool:
            flat = flat.to(torch.uint8)

        def job() -> None:
            self._raise_if_ranks_disagree("allreduce", x, op)
            if self.size > 1 and flat.numel():
                if op == "mean":
                    flat.div_(self.size)
                self.world.all_reduce_(flat, "sum" if op == "mean" else op)

        self.engine.call(job)
        return (flat != 0).view(x.shape) if is_bool else result

    def reduce_scatter(self, xs: Sequence[Tensor] | Tensor, op: UserOp = "sum") -> Tensor:
        """``xs[r]`` of all ranks reduced, at rank r.

        W tensors, the r-th of the same shape on every rank, or one of shape (W, ...). 16-bit floats
        are summed in float32. Raises UsageError: not W parts (DisagreementError on other ranks).
        """
        parts = list(xs)
        for part in parts[:1]:
            self._check_op(op, part.dtype)
        received = self._alltoall("reduce_scatter", parts)
        shapes = {tuple(part.shape) for part in received}
        if len(shapes) > 1:
            raise DisagreementError(
                f"{self.speaker}: reduce_scatter got parts of shapes {sorted(shapes)} from the "
                "ranks. Every rank must give the same shape for the same part."
            )
        if self.size == 1:
            return received[0]
        if op == "mean":
            received = tuple(part / self.size for part in received)
        result = torch.empty_like(received[0], memory_format=torch.contiguous_format)
        fold(result, received, "sum" if op == "mean" else op)
        return result

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        self.engine.call(self.world.barrier)

    # ---- objects ----

    def send_obj(self, obj: object, dest: int, tag: int = 0) -> None:
        """Send an object. Called by the sender. Raises UsageError: no other rank of the world."""
        self._check_peer("dest", dest)
        self.engine.call(lambda: self._delivery.deliver("send", {dest: obj}, (), tag + _USER_TAG))

    def recv_obj(self, source: int, tag: int = 0) -> Any:
        """Receive an object. Called by the receiver."""
        self._check_peer("source", source)
        return self.engine.call(
            lambda: self._delivery.deliver("send", {}, (source,), tag + _USER_TAG)
        )[source]

    def bcast_obj(self, obj: object, root: int = 0) -> Any:
        """The root's object on every rank; ``obj`` of other ranks is ignored."""
        self._check_root(root)
        return self.engine.call(lambda: self._delivery.broadcast(obj, root))

    def gather_obj(self, obj: object, root: int = 0) -> list[Any] | None:
        """All ranks' objects in rank order at the root, None elsewhere."""
        self._check_root(root)
        sources = range(self.size) if self.rank == root else ()
        got = self.engine.call(lambda: self._delivery.deliver("gather", {root: obj}, sources, 0))
        return [got[peer] for peer in range(self.size)] if self.rank == root else None

    def allgather_obj(self, obj: object) -> list[Any]:
        """All ranks' objects in rank order on every rank."""
        everybody = range(self.size)
        outgoing = dict.fromkeys(everybody, obj)
        got = self.engine.call(lambda: self._delivery.deliver("allgather", outgoing, everybody, 0))
        return [got[peer] for peer in everybody]

    def scatter_obj(self, objs: Sequence[object] | None, root: int = 0) -> Any:
        """Rank i gets ``objs[i]`` of the root. Raises UsageError at the root: not W objects."""
        self._check_root(root)
        outgoing: dict[int, object] = {}
        refusal = None
        if self.rank == root:
            refusal = self._length_refusal("scatter", 0 if objs is None else len(objs))
            outgoing = {
                peer: refusal or cast("Sequence[object]", objs)[peer] for peer in range(self.size)
            }
        got = self.engine.call(lambda: self._delivery.deliver("scatter", outgoing, (root,), 0))
        if refusal:
            raise UsageError(refusal.text)
        return got[root]

    def allreduce_obj(self, obj: Any) -> Any:
        """The objects of all ranks added with ``+`` in rank order, on every rank."""
        total, *others = self.allgather_obj(obj)
        for other in others:
            total = total + other
        return total

    # ---- models ----

    def bcast_data(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0, in place."""
        tensors = [*model.parameters(), *model.buffers()]

        def job() -> None:
            with torch.no_grad():
                for tensor in tensors:
                    flat = tensor.detach().contiguous().view(-1)
                    self.world.broadcast_(objects.as_bytes(flat), 0)
                    if flat.data_ptr() != tensor.data_ptr():
                        tensor.copy_(flat.view(tensor.shape))

        self.engine.call(job)

    def multi_node_mean_grad(self, model: nn.Module, zero_fill: bool = False) -> None:
        """Replace every ``p.grad`` by its mean over ranks, sorted by name, in place.

        ``zero_fill`` gives parameters without a gradient one of zeros; else they are skipped, and
        all ranks must skip the same ones.
        """
        for _, parameter in sorted(model.named_parameters()):
            if parameter.grad is None:
                if not zero_fill or not parameter.requires_grad:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad.detach()
            mean = grad.clone(memory_format=torch.contiguous_format).div_(self.size)
            self.sum_((torch.view_as_real(mean) if mean.is_complex() else mean).view(-1))
            grad.copy_(mean)

    # ---- life ----

    def split(self, color: int, key: int) -> Communicator:
        """A communicator of the ranks with the same ``color``, ordered by ``key``, then rank.

        It has the class and the settings of this one.
        """
        entries = self.allgather_obj((color, key))
        ranks = [r for _, r in sorted((e[1], r) for r, e in enumerate(entries) if e[0] == color)]
        self._num_splits += 1
        name = f"split{self._num_splits}"
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

    def before_end(self, callback: Callable[[], None]) -> None:
        """Have it called when `finalize` begins: by whoever has threads of his own here. Local."""
        self._before_end.append(callback)

    def finalize(self) -> None:
        """End this communicator: finish what is in flight, close its connections."""
        while self._before_end:
            self._before_end.pop()()
        self.engine.close()
        for group in (*reversed(self._subgroups), self.world):
            group.transport.close()
        self._subgroups.clear()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.speaker}, {self.topology}, {self.world.transport.name}>"
        )

    # ---- checks ----

    def _raise_if_ranks_disagree(self, what: str, x: Tensor, op: str) -> None:
        """Compare shape, dtype and op over ranks before the collective that would hang."""
        if self.size == 1:
            return
        row = [_OPS.index(op), _DTYPES.index(str(x.dtype)), x.dim(), *x.shape]
        fingerprint = zlib.crc32(str(row).encode())
        extremes = torch.tensor([fingerprint, -fingerprint])
        self.world.all_reduce_(extremes, "max")
        highest, lowest = extremes.tolist()
        if highest == -lowest:
            return
        row += [0] * (_MAX_DIMS + 3 - len(row))
        table = self.world.all_gather_fixed(torch.tensor(row))
        said = [
            f"rank {rank}: {_OPS[r[0]]} of {_DTYPES[r[1]]}{r[3 : 3 + r[2]]}"
            for rank, r in enumerate(table.tolist())
        ]
        raise DisagreementError(
            f"{self.speaker}: ranks disagree in {what} ({'; '.join(said)}). All ranks must give "
            "the same shape, dtype and op."
        )

    def _check_op(self, op: str, dtype: torch.dtype) -> None:
        if op not in _OPS:
            raise UnknownNameError("reduction", op, _OPS)
        if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            raise UsageError(f"A mean of {dtype} is not an integer. Use op='sum' or .float().")

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise UsageError(f"root={root} is outside 0..{self.size - 1}.")

    def _check_peer(self, role: str, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise UsageError(
                f"{role}={peer}: a rank of {self.size} other than this one ({self.rank}) is needed."
            )

    def _length_refusal(self, what: str, length: int) -> Refusal | None:
        if length == self.size:
            return None
        return Refusal(f"{self.speaker}: {what} needs {self.size} parts, got {length}.")


def all_agree(group: Group, is_valid: bool) -> bool:
    """Whether it is valid on all ranks of a group. *Collective over the group.*"""
    if group.size == 1:
        return is_valid
    flag = torch.tensor([0 if is_valid else 1], dtype=torch.int32)
    group.all_reduce_(flag, "max")
    return not int(flag)
