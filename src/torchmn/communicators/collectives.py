"""The collectives that users call, written once over a group.

Each one is a job for the engine: the blocking method runs it, ``start_...`` submits it and returns
a handle. A job begins with a `CallCheck`, in which all ranks compare their calls. An invalid
argument is found before that, on the rank that has it, and its error is sent in the check.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from torchmn.communicators import object_codec
from torchmn.communicators.collective_checks import INLINE_BYTES, Call, CallCheck
from torchmn.communicators.engine import Engine, Work
from torchmn.communicators.group import Group
from torchmn.communicators.object_exchange import ObjectExchange
from torchmn.communicators.point_to_point import ANY_SOURCE, HasStatus, PointToPoint, checked_tag
from torchmn.communicators.reductions import Reduction, UserOp, dense, dense_parts, described
from torchmn.errors import UsageError
from torchmn.transports.base import fold

Result = TypeVar("Result")


class Collectives:
    """The collectives and messages of a communicator. See `Communicator`."""

    rank: int
    size: int
    engine: Engine
    world: Group
    _check: CallCheck
    _objects: ObjectExchange
    _messages: PointToPoint

    def _open_collectives(self, trust: object_codec.Trust, device: torch.device) -> None:
        """Make what these methods need. After ``world`` and ``engine`` are set."""
        self._check = CallCheck(self.world)
        self._objects = ObjectExchange(self.world, self._check, trust, device)
        self._messages = PointToPoint(self.world, trust, device)

    def _job(self, name: str, prepare: Callable[[], Callable[[], Result]]) -> Callable[[], Result]:
        """The job that ``prepare`` makes of the arguments; if it raises, one in which all raise."""
        try:
            return prepare()
        except Exception as error:
            invalid = error
        return lambda: self._check.reject(name, invalid)

    # ---- point to point ----

    def send(self, data: Tensor | Sequence[Tensor], dest: int, tag: int = 0) -> None:
        """Send a tensor, or a tuple or list of tensors, of any shapes and dtypes.

        Called by the sender only. It may block until the receiver receives; when it returns,
        ``data`` may be changed.

        Args:
            data: dense tensors.
            dest: the receiver, another rank.
            tag: 0 to 2**63 - 1; the receiver selects messages by it.

        Raises UsageError: ``data`` are no dense tensors, ``dest`` is no other rank, or ``tag`` is
        out of range.
        """
        if isinstance(data, (list, tuple)):
            self.send_obj(tuple(dense("send", x) for x in data), dest, tag)
        else:
            self.send_obj(dense("send", data), dest, tag)

    def recv(
        self, source: int, tag: int = 0, status: HasStatus | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Receive what ``source`` has sent by `send`: a tensor or a tuple of tensors.

        Called by the receiver only. It blocks until the message has arrived. A CUDA tensor arrives
        on ``comm.device``, any other on the CPU. ``source``, ``tag`` and ``status`` are those of
        `recv_obj`.

        Raises UsageError: there is no such rank or tag, or the message is an object of `send_obj`;
        RankMismatchError: the sender could not send it.
        """
        got = self.recv_obj(source, tag, status)
        if not all(isinstance(x, Tensor) for x in (got if isinstance(got, tuple) else (got,))):
            raise UsageError(
                f"The message is a {type(got).__name__} and not a tensor. Use recv_obj for objects."
            )
        return cast("Tensor | tuple[Tensor, ...]", got)

    def send_obj(self, obj: object, dest: int, tag: int = 0) -> None:
        """Send an object. Called by the sender only; see `send`.

        Raises:
            UsageError: ``dest`` is no other rank, or ``tag`` is out of range.
            UnsupportedError: the object needs pickle, which this transport does not accept, or
                cannot be pickled; the receiver raises RankMismatchError.
        """
        self._check_peer("dest", dest)
        checked_tag(tag)
        self.engine.call(lambda: self._messages.send(obj, dest, tag))

    def recv_obj(self, source: int, tag: int = 0, status: HasStatus | None = None) -> Any:
        """Receive an object. Called by the receiver only. It blocks until the message has arrived.

        Args:
            source: a rank, or `ANY_SOURCE`: the first that sends a message with this tag.
            tag: the tag it was sent with, 0 to 2**63 - 1, or `ANY_TAG`. Messages with other tags
                are queued until they are requested; those of one sender and tag keep their order.
            status: its ``source`` and ``tag`` become those of the message.

        Raises:
            UsageError: there is no such rank or tag.
            RankMismatchError: the sender could not send the object.
            CommunicationError: a pickled object does not carry the seal of this job.
            UnsupportedError: `ANY_SOURCE`, which this transport does not support.
        """
        if source != ANY_SOURCE:
            self._check_peer("source", source)
        checked_tag(tag, may_be_any=True)
        obj, seen = self.engine.call(lambda: self._messages.receive(source, tag))
        if status is not None:
            status.source, status.tag = seen.source, seen.tag
        return obj

    # ---- tensors ----

    def bcast(self, x: Tensor | None, root: int = 0) -> Tensor:
        """The root's tensor on every rank, as a new tensor of its shape and dtype.

        ``x`` of other ranks is ignored and may be None. A CUDA tensor arrives on ``comm.device``.

        Raises:
            UsageError: at the root, ``x`` is no dense tensor; on all ranks, there is no such
                ``root``.
            RankMismatchError: ranks differ in ``root``, or the root raised UsageError.
        """
        return self.engine.call(self._bcast_job(x, root))

    def start_bcast(self, x: Tensor | None, root: int = 0) -> Work[Tensor]:
        """Start `bcast` and return at once. See `start_allreduce`."""
        return self.engine.submit(self._bcast_job(x, root))

    def _bcast_job(self, x: Tensor | None, root: int) -> Callable[[], Tensor]:
        def prepare() -> Callable[[], Tensor]:
            self._check_root(root)
            own = _own(dense("bcast", x)) if self.rank == root else None
            call = Call("bcast", root=root)
            return lambda: cast(Tensor, self._objects.broadcast(call, own, root))

        return self._job("bcast", prepare)

    def gather(self, x: Tensor, root: int = 0) -> tuple[Tensor, ...] | None:
        """All ranks' tensors at the root in rank order; None on other ranks.

        Shapes and dtypes may differ. Raises as `bcast`, and UnsupportedError: a tensor of a
        subclass needs pickle.
        """

        def prepare() -> Callable[[], dict[int, Tensor]]:
            self._check_root(root)
            own, call = _own(dense("gather", x)), Call("gather", root=root)
            sources = range(self.size) if self.rank == root else ()
            return lambda: self._objects.exchange(call, {root: own}, sources)

        got = self.engine.call(self._job("gather", prepare))
        return tuple(got[peer] for peer in range(self.size)) if self.rank == root else None

    def allgather(self, x: Tensor) -> tuple[Tensor, ...]:
        """All ranks' tensors in rank order on every rank; shapes and dtypes may differ.

        Raises UsageError: ``x`` is no dense tensor (RankMismatchError on other ranks).
        """
        return self.engine.call(self._allgather_job(x))

    def start_allgather(self, x: Tensor) -> Work[tuple[Tensor, ...]]:
        """Start `allgather` and return at once. See `start_allreduce`."""
        return self.engine.submit(self._allgather_job(x))

    def _allgather_job(self, x: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        def prepare() -> Callable[[], tuple[Tensor, ...]]:
            own = _own(dense("allgather", x))
            return lambda: tuple(self._to_all(Call("allgather"), own))

        return self._job("allgather", prepare)

    def alltoall(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Send ``xs[i]`` to rank i; returns the tensors for this rank, in rank order.

        Shapes and dtypes may differ. Raises UsageError: ``len(xs) != size``, or a part is no dense
        tensor (RankMismatchError on other ranks).
        """
        return self.engine.call(self._alltoall_job(xs))

    def start_alltoall(self, xs: Sequence[Tensor]) -> Work[tuple[Tensor, ...]]:
        """Start `alltoall` and return at once. See `start_allreduce`."""
        return self.engine.submit(self._alltoall_job(xs))

    def _alltoall_job(self, xs: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        def prepare() -> Callable[[], tuple[Tensor, ...]]:
            parts = [_own(part) for part in dense_parts("alltoall", xs, self.size)]
            return lambda: self._all_to_all(Call("alltoall"), parts)

        return self._job("alltoall", prepare)

    def scatter(self, xs: Sequence[Tensor] | Tensor | None, root: int = 0) -> Tensor:
        """Rank i receives ``xs[i]`` of the root: W tensors of any shapes, or one of shape (W, ...).

        ``xs`` of other ranks is ignored and may be None. Raises as `bcast`; at the root also
        UsageError: not W parts.
        """

        def prepare() -> Callable[[], Tensor]:
            self._check_root(root)
            parts = dense_parts("scatter", xs, self.size) if self.rank == root else []
            outgoing = {peer: part.contiguous() for peer, part in enumerate(parts)}
            call = Call("scatter", root=root)
            return lambda: cast(Tensor, self._objects.exchange(call, outgoing, (root,))[root])

        mine = self.engine.call(self._job("scatter", prepare))
        return _own(mine) if self.rank == root else mine

    def allreduce(
        self,
        x: Tensor,
        op: UserOp = "sum",
        *,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Tensor:
        """Sum, mean, product, max or min over ranks, elementwise, as a new tensor.

        Each rank's ``x`` is multiplied by ``prescale_factor`` before the reduction and the result
        by ``postscale_factor``, as in Horovod. Sums and products of 16-bit floats are formed in
        float32 and rounded once. All ranks get the same bits.

        Raises:
            UnknownNameError: unknown ``op``.
            UsageError: a mean or a factor for integers, an ``op`` that the dtype does not have, or
                ``x`` is no dense tensor.
            RankMismatchError: ranks differ in shape, dtype, device type, op or factors, or another
                rank raised one of the above.
        """
        return self.engine.call(self._allreduce_job(x, op, prescale_factor, postscale_factor))

    def start_allreduce(
        self,
        x: Tensor,
        op: UserOp = "sum",
        *,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Work[Tensor]:
        """Start `allreduce` and return at once with a handle.

        ``handle.wait()`` returns the result or raises what the blocking method would raise;
        ``handle.done`` is whether it has ended. ``x`` may be changed immediately. All ranks start
        their collectives, blocking or not, in the same order; they may wait in any order. Compare
        Horovod's ``allreduce_async`` and ``synchronize``, MPI's ``Iallreduce`` and ``Wait``.
        """
        return self.engine.submit(self._allreduce_job(x, op, prescale_factor, postscale_factor))

    def _allreduce_job(
        self, x: Tensor, op: str, prescale_factor: float, postscale_factor: float
    ) -> Callable[[], Tensor]:
        def prepare() -> Callable[[], Tensor]:
            reduction = Reduction(op, prescale_factor, postscale_factor)
            source = dense("allreduce", x)
            reduction.raise_if_unfit(source)
            result = source.clone(memory_format=torch.contiguous_format)
            is_bool = result.dtype == torch.bool
            flat = (result.to(torch.uint8) if is_bool else result).view(-1)
            call = _call_of("allreduce", reduction, tensor=described(source))

            def job() -> Tensor:
                self._reduce_(call, reduction, flat)
                return (flat != 0).view(result.shape) if is_bool else result

            return job

        return self._job("allreduce", prepare)

    def _reduce_(self, call: Call, reduction: Reduction, flat: Tensor) -> None:
        """Reduce over all ranks, in place; short tensors are sent with the check."""
        reduction.prepare_(flat, self.size)
        if self.size > 1:
            is_inline = flat.nbytes <= INLINE_BYTES and not flat.is_cuda
            inline = object_codec.as_bytes(flat).numpy().tobytes() if is_inline else None
            rows = self._check.compare(call, flat.nbytes, inline)
            if not is_inline:
                self.world.all_reduce_(flat, reduction.transport_op)
            elif flat.numel():
                pieces = [
                    torch.frombuffer(bytearray(cast(bytes, row.inline)), dtype=flat.dtype)
                    for row in rows
                ]
                fold(flat, pieces, reduction.transport_op)
        reduction.finish_(flat)

    def reduce_scatter(
        self,
        xs: Sequence[Tensor] | Tensor,
        op: UserOp = "sum",
        *,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Tensor:
        """The reduction of ``xs[r]`` over all ranks, at rank r, as a new tensor.

        ``xs`` are W tensors, the r-th of the same shape and dtype on every rank, or one tensor of
        shape (W, ...). Otherwise as `allreduce`, errors included. Raises also UsageError: not W
        parts (RankMismatchError on other ranks).
        """
        return self.engine.call(self._reduce_scatter_job(xs, op, prescale_factor, postscale_factor))

    def start_reduce_scatter(
        self,
        xs: Sequence[Tensor] | Tensor,
        op: UserOp = "sum",
        *,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Work[Tensor]:
        """Start `reduce_scatter` and return at once. See `start_allreduce`."""
        return self.engine.submit(
            self._reduce_scatter_job(xs, op, prescale_factor, postscale_factor)
        )

    def _reduce_scatter_job(
        self,
        xs: Sequence[Tensor] | Tensor,
        op: str,
        prescale_factor: float,
        postscale_factor: float,
    ) -> Callable[[], Tensor]:
        def prepare() -> Callable[[], Tensor]:
            reduction = Reduction(op, prescale_factor, postscale_factor)
            parts = dense_parts("reduce_scatter", xs, self.size)
            for part in parts:
                reduction.raise_if_unfit(part)
            call = _call_of("reduce_scatter", reduction, parts=[described(p) for p in parts])
            shares = [reduction.prepare_(_own(part), self.size) for part in parts]

            def job() -> Tensor:
                received = self._all_to_all(call, shares)
                if self.size == 1:
                    return reduction.finish_(received[0])
                result = torch.empty_like(received[0], memory_format=torch.contiguous_format)
                fold(result, received, reduction.transport_op)
                return reduction.finish_(result)

            return job

        return self._job("reduce_scatter", prepare)

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        self.engine.call(lambda: self._check.compare(Call("barrier")))

    # ---- objects ----

    def bcast_obj(self, obj: object, root: int = 0) -> Any:
        """The root's object on every rank; ``obj`` of other ranks is ignored.

        Numbers, text, bytes, containers, dtypes, dense tensors and arrays are sent without pickle;
        other objects only where the transport is trusted, see `docs/security.md`. The root gets its
        own object, other ranks a copy.

        Raises (as all methods that end with ``_obj``):
            UnsupportedError: this rank's object needs pickle, which this transport does not accept,
                or cannot be pickled (RankMismatchError on other ranks).
            UsageError: on all ranks, there is no such ``root``.
            RankMismatchError: ranks differ in ``root`` or in the call.
            CommunicationError: a pickled object does not carry the seal of this job.
        """

        def prepare() -> Callable[[], Any]:
            self._check_root(root)
            return lambda: self._objects.broadcast(Call("bcast_obj", root=root), obj, root)

        return self.engine.call(self._job("bcast_obj", prepare))

    def gather_obj(self, obj: object, root: int = 0) -> list[Any] | None:
        """All ranks' objects in rank order at the root; None on other ranks. See `bcast_obj`."""

        def prepare() -> Callable[[], dict[int, Any]]:
            self._check_root(root)
            call, sources = Call("gather_obj", root=root), range(self.size)
            return lambda: self._objects.exchange(
                call, {root: obj}, sources if self.rank == root else ()
            )

        got = self.engine.call(self._job("gather_obj", prepare))
        return [got[peer] for peer in range(self.size)] if self.rank == root else None

    def allgather_obj(self, obj: object) -> list[Any]:
        """All ranks' objects in rank order on every rank. See `bcast_obj`."""
        return self.engine.call(lambda: self._to_all(Call("allgather_obj"), obj))

    def scatter_obj(self, objs: Sequence[object] | None, root: int = 0) -> Any:
        """Rank i receives ``objs[i]`` of the root; ``objs`` of other ranks is ignored.

        Raises as `bcast_obj`; at the root also UsageError: not W objects.
        """

        def prepare() -> Callable[[], Any]:
            self._check_root(root)
            outgoing: dict[int, object] = {}
            if self.rank == root:
                length = 0 if objs is None else len(objs)
                if length != self.size:
                    raise UsageError(f"scatter_obj needs {self.size} parts, got {length}.")
                outgoing = dict(enumerate(cast("Sequence[object]", objs)))
            call = Call("scatter_obj", root=root)
            return lambda: self._objects.exchange(call, outgoing, (root,))[root]

        return self.engine.call(self._job("scatter_obj", prepare))

    def allreduce_obj(self, obj: Any) -> Any:
        """The objects of all ranks added with ``+`` in rank order, on every rank. See `bcast_obj`.

        What ``+`` raises is raised on every rank.
        """
        total, *others = self.engine.call(lambda: self._to_all(Call("allreduce_obj"), obj))
        for other in others:
            total = total + other
        return total

    # ---- models ----

    def bcast_data(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0, in place.

        Raises, before anything is written:
            RankMismatchError: the models differ in the names, the order, the shapes or the dtypes
                of their tensors; on all ranks.
            UsageError: a tensor is sparse, quantized, nested or on the meta device
                (RankMismatchError on other ranks).
        """

        def prepare() -> Callable[[], None]:
            named = [*model.named_parameters(), *model.named_buffers()]
            tensors = [dense(f"bcast_data of '{name}'", tensor) for name, tensor in named]
            parts = [
                f"'{name}' {described(tensor)}"
                for (name, _), tensor in zip(named, tensors, strict=True)
            ]
            return lambda: self._bcast_data(Call("bcast_data", parts), tensors)

        self.engine.call(self._job("bcast_data", prepare))

    def _bcast_data(self, call: Call, tensors: Sequence[Tensor]) -> None:
        self._check.compare(call)
        with torch.no_grad():
            for tensor in tensors:
                flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
                self.world.broadcast_(object_codec.as_bytes(flat), 0)
                if flat.data_ptr() != tensor.data_ptr():
                    tensor.copy_(flat.view(tensor.shape))

    # ---- parts of a call ----

    def _to_all(self, call: Call, obj: object) -> list[Any]:
        all_ranks = range(self.size)
        got = self._objects.exchange(call, dict.fromkeys(all_ranks, obj), all_ranks)
        return [got[peer] for peer in all_ranks]

    def _all_to_all(self, call: Call, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        all_ranks = range(self.size)
        got = self._objects.exchange(call, dict(enumerate(parts)), all_ranks)
        return tuple(got[peer] for peer in all_ranks)

    def _check_root(self, root: int) -> None:
        if not 0 <= operator.index(root) < self.size:
            raise UsageError(f"root={root} is outside 0..{self.size - 1}.")

    def _check_peer(self, role: str, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise UsageError(
                f"{role}={peer}: a rank of {self.size} other than this one ({self.rank}) is needed."
            )


def _own(x: Tensor) -> Tensor:
    """A rank's own part of a result: like the others, without memory or graph of ``x``."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _call_of(
    name: str, reduction: Reduction, parts: Sequence[str] = (), **arguments: object
) -> Call:
    """A call that names only the factors that are not 1."""
    factors = {
        key: value
        for key in ("prescale_factor", "postscale_factor")
        if (value := getattr(reduction, key)) != 1
    }
    return Call(name, parts, op=reduction.op, **arguments, **factors)
