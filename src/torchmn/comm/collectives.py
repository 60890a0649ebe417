"""The collectives and messages that users call.

Each is a job for the engine: the blocking method runs the job, ``start_...`` submits it and returns
a handle. The jobs are in `torchmn.comm.engine_jobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast, overload

from torch import Tensor, nn

from torchmn.base.errors import UsageError
from torchmn.comm.collective_checks import Call
from torchmn.comm.engine import Engine, Work
from torchmn.comm.engine_jobs import CollectiveJobs
from torchmn.comm.point_to_point import ANY_SOURCE, HasStatus, PointToPoint, checked_tag
from torchmn.comm.reductions import UserOp, dense

Item = TypeVar("Item")
Sum = TypeVar("Sum", int, float, Tensor)
Sum2 = TypeVar("Sum2", int, float, Tensor)
Sum3 = TypeVar("Sum3", int, float, Tensor)


class Collectives:
    """The collectives and messages of a communicator. See `Communicator`."""

    rank: int
    size: int
    engine: Engine
    _jobs: CollectiveJobs
    _messages: PointToPoint

    # ---- point to point ----

    def send(self, data: Tensor | Sequence[Tensor], dest: int, tag: int = 0) -> None:
        """Send a tensor, or a tuple or list of tensors, of any shapes and dtypes.

        Called by the sender only. May block until the receiver receives. ``data`` may be changed
        after the call.

        Args:
            data: dense tensors.
            dest: the receiver, another rank.
            tag: 0 to 2**63 - 1; the receiver selects messages by it.

        Raises UsageError: ``data`` is not a dense tensor or a sequence of them, ``dest`` is not
        another rank, or ``tag`` is out of range.
        """
        if isinstance(data, (list, tuple)):
            # A tuple of one tensor stays a tuple, so that the receiver returns what was sent.
            self.send_obj(tuple(dense("send", x) for x in data), dest, tag)
        else:
            self.send_obj(dense("send", data), dest, tag)

    def recv(
        self, source: int, tag: int = 0, status: HasStatus | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Receive a tensor or a tuple of tensors that ``source`` sent with `send`.

        Called by the receiver only. Blocks until the message has arrived. CUDA tensors arrive on
        ``comm.device``, all others on the CPU. For ``source``, ``tag`` and ``status`` see
        `recv_obj`.

        Raises UsageError: ``source`` or ``tag`` is invalid, or the message was sent with
        `send_obj`; RankMismatchError: the sender could not send it.
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
            UsageError: ``dest`` is not another rank, or ``tag`` is out of range.
            UnsupportedError: the object needs pickle, which this transport does not accept, or
                cannot be pickled; the receiver raises RankMismatchError.
        """
        self._check_peer("dest", dest)
        checked_tag(tag)
        self.engine.call(lambda: self._messages.send(obj, dest, tag))

    def recv_obj(self, source: int, tag: int = 0, status: HasStatus | None = None) -> Any:
        """Receive an object. Called by the receiver only. Blocks until the message has arrived.

        Args:
            source: the sender, or `ANY_SOURCE` for the first rank that sends a message with
                this tag.
            tag: the tag of the message, 0 to 2**63 - 1, or `ANY_TAG`. Messages with other tags
                are queued until they are requested. Messages of one sender and tag keep their
                order.
            status: set to the source and tag of the message.

        Raises:
            UsageError: ``source`` or ``tag`` is invalid.
            RankMismatchError: the sender could not send the object.
            CommunicationError: a pickled object was not signed with the secret of this job.
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
        """Return the root's tensor on every rank, as a new tensor of its shape and dtype.

        ``x`` is ignored on other ranks and may be None there. A CUDA tensor arrives on
        ``comm.device``.

        Raises:
            UsageError: at the root, ``x`` is not a dense tensor; on all ranks, ``root`` is not a
                rank.
            RankMismatchError: ranks differ in ``root``, or the root raised UsageError.
        """
        return self.engine.call(self._jobs.bcast(x, root))

    def start_bcast(self, x: Tensor | None, root: int = 0) -> Work[Tensor]:
        """Start `bcast` and return at once. See `start_allreduce`."""
        return self.engine.submit(self._jobs.bcast(x, root))

    def gather(self, x: Tensor, root: int = 0) -> tuple[Tensor, ...] | None:
        """Return all ranks' tensors at the root, in rank order, and None on other ranks.

        Shapes and dtypes may differ. Raises the same errors as `bcast`, and UnsupportedError: a
        tensor subclass needs pickle, which this transport does not accept.
        """
        return self.engine.call(self._jobs.gather(x, root))

    def allgather(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return all ranks' tensors on every rank, in rank order. Shapes and dtypes may differ.

        Raises UsageError: ``x`` is not a dense tensor (RankMismatchError on other ranks).
        """
        return self.engine.call(self._jobs.allgather(x))

    def start_allgather(self, x: Tensor) -> Work[tuple[Tensor, ...]]:
        """Start `allgather` and return at once. See `start_allreduce`."""
        return self.engine.submit(self._jobs.allgather(x))

    def alltoall(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Send ``xs[i]`` to rank i; returns the tensors sent to this rank, in rank order.

        Shapes and dtypes may differ. Raises UsageError: ``len(xs) != size``, or a part is not a
        dense tensor (RankMismatchError on other ranks).
        """
        return self.engine.call(self._jobs.alltoall(xs))

    def start_alltoall(self, xs: Sequence[Tensor]) -> Work[tuple[Tensor, ...]]:
        """Start `alltoall` and return at once. See `start_allreduce`."""
        return self.engine.submit(self._jobs.alltoall(xs))

    def scatter(self, xs: Sequence[Tensor] | Tensor | None, root: int = 0) -> Tensor:
        """Return the root's ``xs[i]`` on rank i.

        ``xs`` is a sequence of W tensors of any shapes, where W is the number of ranks, or one
        tensor of shape (W, ...). It is ignored on other ranks and may be None there. Raises the
        same errors as `bcast`; at the root also UsageError: ``xs`` does not have W parts.
        """
        return self.engine.call(self._jobs.scatter(xs, root))

    def allreduce(
        self,
        x: Tensor,
        op: UserOp = "sum",
        *,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Tensor:
        """Reduce over ranks, elementwise: sum, mean, product, max or min, as a new tensor.

        Each rank's ``x`` is multiplied by ``prescale_factor`` before the reduction and the result
        by ``postscale_factor``, as in Horovod. Sums and products of 16-bit floats are computed in
        float32 and rounded once. The result is bit-identical on all ranks.

        This and the other collectives are not differentiable. If ``x`` requires a gradient, so does
        the result, and ``backward()`` through it raises UsageError. See `torchmn.functions` for
        differentiable collectives.

        Raises:
            UnknownNameError: unknown ``op``.
            UsageError: a mean or a factor for integers, an ``op`` that the dtype does not support,
                or ``x`` is not a dense tensor.
            RankMismatchError: ranks differ in shape, dtype, device type, op or factors, or another
                rank raised one of the above.
        """
        return self.engine.call(self._jobs.allreduce(x, op, prescale_factor, postscale_factor))

    def start_allreduce(
        self,
        x: Tensor,
        op: UserOp = "sum",
        *,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Work[Tensor]:
        """Start `allreduce` and return at once with a handle.

        ``handle.wait()`` returns the result or raises the errors of the blocking method;
        ``handle.done`` tells whether it has ended. ``x`` may be changed immediately. All ranks must
        start their collectives, blocking or not, in the same order; they may wait in any order.
        Compare Horovod's ``allreduce_async`` and ``synchronize``, MPI's ``Iallreduce`` and
        ``Wait``.
        """
        return self.engine.submit(self._jobs.allreduce(x, op, prescale_factor, postscale_factor))

    def reduce_scatter(
        self,
        xs: Sequence[Tensor] | Tensor,
        op: UserOp = "sum",
        *,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Tensor:
        """Reduce ``xs[r]`` over all ranks; returns the result on rank r, as a new tensor.

        ``xs`` is a sequence of W tensors, where W is the number of ranks, or one tensor of shape
        (W, ...). The r-th part has the same shape and dtype on every rank. Otherwise like
        `allreduce`, including errors. Also raises UsageError: ``xs`` does not have W parts
        (RankMismatchError on other ranks).
        """
        return self.engine.call(
            self._jobs.reduce_scatter(xs, op, prescale_factor, postscale_factor)
        )

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
            self._jobs.reduce_scatter(xs, op, prescale_factor, postscale_factor)
        )

    def barrier(self) -> None:
        """Block until all ranks have called it."""
        self.engine.call(lambda: self._jobs.check.compare(Call("barrier")))

    # ---- objects ----

    def bcast_obj(self, obj: object, root: int = 0) -> Any:
        """Return the root's object on every rank; ``obj`` of other ranks is ignored.

        Numbers, text, bytes, containers, dtypes, dense tensors and arrays are sent without pickle;
        other objects only if the transport is trusted, see `docs/security.md`. The root gets its
        own object, other ranks a copy.

        Raises (like all methods whose names end with ``_obj``):
            UnsupportedError: this rank's object needs pickle, which this transport does not accept,
                or cannot be pickled (RankMismatchError on other ranks).
            UsageError: on all ranks, ``root`` is not a rank.
            RankMismatchError: ranks differ in ``root`` or in the call.
            CommunicationError: a pickled object was not signed with the secret of this job.
        """
        return self.engine.call(self._jobs.bcast_obj(obj, root))

    def gather_obj(self, obj: Item, root: int = 0) -> list[Item] | None:
        """Return all ranks' objects at the root, in rank order; None elsewhere. See `bcast_obj`."""
        gathered = self.engine.call(self._jobs.gather_obj(obj, root))
        return None if gathered is None else list(gathered)

    def allgather_obj(self, obj: Item) -> list[Item]:
        """Return all ranks' objects on every rank, in rank order. See `bcast_obj`."""
        return self.engine.call(self._jobs.allgather_obj(obj))

    def scatter_obj(self, objs: Sequence[object] | None, root: int = 0) -> Any:
        """Return the root's ``objs[i]`` on rank i; ``objs`` of other ranks is ignored.

        Raises the same errors as `bcast_obj`; at the root also UsageError: ``len(objs) != size``.
        """
        return self.engine.call(self._jobs.scatter_obj(objs, root))

    def allreduce_obj(self, obj: Item) -> Item:
        """Add all ranks' objects with ``+``, in rank order, on every rank. See `bcast_obj`.

        If ``+`` raises, it does so on every rank.
        """
        total, *others = self.engine.call(self._jobs.allgather_obj(obj, "allreduce_obj"))
        for other in others:
            total = total + other  # += could change the caller's own object in place
        return cast(Item, total)

    @overload
    def sum_over_ranks(self, value: Sum, /) -> Sum: ...

    @overload
    def sum_over_ranks(self, first: Sum, second: Sum2, /) -> tuple[Sum, Sum2]: ...

    @overload
    def sum_over_ranks(
        self, first: Sum, second: Sum2, third: Sum3, /
    ) -> tuple[Sum, Sum2, Sum3]: ...

    @overload
    def sum_over_ranks(self, *values: Tensor | float) -> Any: ...

    def sum_over_ranks(self, *values: Tensor | float) -> Any:
        """Sum each value over all ranks, such as the totals of an evaluation loop.

        ``loss_sum, correct = comm.sum_over_ranks(loss_sum, correct)`` after the loop gives every
        rank the totals over all samples. A single value is returned by itself, several as a tuple.

        Integers are exact and floats are rounded only once, so the sum does not depend on the order
        of ranks. Tensors must have the same shape on all ranks. They are added in float64 or int64
        and keep their device and dtype, except integers, which become int64 as in `torch.sum`. A
        rank without a tensor, because it has seen no batch, may pass a number instead. For a mean,
        sum the numerator and the count, then divide.

        Args:
            values: numbers or tensors, the same number of them on every rank.

        Raises:
            UsageError: a value is neither a number nor a tensor (RankMismatchError on other ranks).
            RankMismatchError: on all ranks, ranks pass different numbers of values, or tensors of
                different shapes.

        >>> comm.sum_over_ranks(2.5, 3, torch.tensor([1, 2]))
        (2.5, 3, tensor([1, 2]))
        """
        totals = self.engine.call(self._jobs.sum_over_ranks(values))
        return totals[0] if len(totals) == 1 else totals

    def bcast_data(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to all ranks, in place.

        A tensor that has the same digest (SHA-256) on all ranks is not sent.

        Raises, before anything is written:
            RankMismatchError: on all ranks, the models differ in the names, the order, the shapes
                or the dtypes of their tensors.
            UsageError: a tensor is sparse, quantized, nested or on the meta device
                (RankMismatchError on other ranks).
        """
        bcast_where_different(self, model)

    def _check_peer(self, role: str, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise UsageError(
                f"{role}={peer} must be a rank from 0 to {self.size - 1} other than this one "
                f"({self.rank})."
            )


# ---- for other parts of torchmn ----


def allgather_for(comm: Collectives, name: str, obj: object) -> list[Any]:
    """`Communicator.allgather_obj` as a part of another operation; errors call it ``name``."""
    return comm.engine.call(comm._jobs.allgather_obj(obj, name))


def bcast_for(comm: Collectives, name: str, obj: object) -> Any:
    """`Communicator.bcast_obj` from rank 0 as a part of another one; errors call it ``name``."""
    return comm.engine.call(comm._jobs.bcast_obj(obj, 0, name))


def bcast_where_different(comm: Collectives, model: nn.Module) -> list[str]:
    """`Communicator.bcast_data`; returns the names of the tensors that were sent. *Collective.*"""
    return comm.engine.call(comm._jobs.bcast_data(model))


def scatter_for(comm: Collectives, name: str, objs: Sequence[object] | None) -> Any:
    """`Communicator.scatter_obj` from rank 0 as a part of another one; errors call it ``name``."""
    return comm.engine.call(comm._jobs.scatter_obj(objs, 0, name))


def unread_messages(comm: Collectives) -> list[tuple[int, int, Any]]:
    """Source, tag and object of messages that have arrived and were not requested. Local."""
    return comm._messages.unread()
