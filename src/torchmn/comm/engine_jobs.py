"""The jobs of collectives: the functions that the engine runs for a call and its arguments.

Arguments are checked and inputs are copied when the job is made. If an argument is invalid on this
rank, the job sends the error to all ranks. Otherwise it begins with a `CallCheck`, in which all
ranks compare their calls.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from torchmn.base.errors import RankMismatchError, UsageError
from torchmn.comm import object_codec
from torchmn.comm.checksums import digest
from torchmn.comm.collective_checks import INLINE_BYTES, Call, CallCheck, Row
from torchmn.comm.group import Group
from torchmn.comm.local_tensors import local_part, placement_of
from torchmn.comm.reductions import Reduction, dense, dense_parts, described, without_backward
from torchmn.comm.transports.base import fold

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Job = Callable[[], Result]
Maker = Callable[Concatenate["CollectiveJobs", Arguments], Job[Result]]


def _rejecting(make: Maker[Arguments, Result]) -> Maker[Arguments, Result]:
    """Decorator: if making a job raises, return a job that raises on all ranks.

    If an argument requires a gradient, `backward` through the result raises UsageError.
    """

    @wraps(make)
    def make_or_reject(
        jobs: CollectiveJobs, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Job[Result]:
        name = make.__name__
        try:
            job = make(jobs, *args, **kwargs)
        except Exception as error:
            # Not raised here: the other ranks are in the collective, or will be, and would wait.
            return jobs.rejected(name, error)
        if name.endswith("_obj") or not any(map(_records_gradients, args)):
            return job
        return lambda: cast(Result, without_backward(name, job()))

    return make_or_reject


def _records_gradients(argument: object) -> bool:
    parts = argument if isinstance(argument, (list, tuple)) else (argument,)
    is_on = torch.is_grad_enabled()
    return is_on and any(isinstance(part, Tensor) and part.requires_grad for part in parts)


class CollectiveJobs:
    """Makes the jobs of a communicator's collectives. Each method is named after its collective.

    The jobs are collective. `Communicator` documents arguments, results and errors.
    """

    def __init__(self, world: Group, trust: object_codec.Trust, device: torch.device) -> None:
        self.rank, self.size = world.rank, world.size
        self.check = CallCheck(world)
        self.objects = ObjectExchange(world, self.check, trust, device)
        self._world = world

    def rejected(self, name: str, error: Exception) -> Callable[[], Any]:
        """A job that raises ``error`` on this rank and RankMismatchError on the other ranks."""
        return lambda: self.check.reject(name, error)

    # ---- tensors ----

    @_rejecting
    def bcast(self, x: Tensor | None, root: int) -> Job[Tensor]:
        self._check_root(root)
        own = _own(dense("bcast", x)) if self.rank == root else None
        call = Call("bcast", root=root)
        return lambda: cast(Tensor, self.objects.broadcast(call, own, root))

    @_rejecting
    def gather(self, x: Tensor, root: int) -> Job[tuple[Tensor, ...] | None]:
        self._check_root(root)
        own = _own(dense("gather", x))
        return lambda: self._to_root(Call("gather", root=root), own, root)

    @_rejecting
    def allgather(self, x: Tensor) -> Job[tuple[Tensor, ...]]:
        own = _own(dense("allgather", x))
        return lambda: self._to_all(Call("allgather"), dict.fromkeys(range(self.size), own))

    @_rejecting
    def alltoall(self, xs: Sequence[Tensor]) -> Job[tuple[Tensor, ...]]:
        parts = [_own(part) for part in dense_parts("alltoall", xs, self.size)]
        return lambda: self._to_all(Call("alltoall"), dict(enumerate(parts)))

    @_rejecting
    def scatter(self, xs: Sequence[Tensor] | Tensor | None, root: int) -> Job[Tensor]:
        self._check_root(root)
        parts = dense_parts("scatter", xs, self.size) if self.rank == root else []
        own = [part.contiguous() for part in parts]

        def job() -> Tensor:
            # The root gets its own part back as it is; a result must not share memory with `xs`.
            mine = cast(Tensor, self._from_root(Call("scatter", root=root), own, root))
            return _own(mine) if self.rank == root else mine

        return job

    @_rejecting
    def allreduce(
        self, x: Tensor, op: str, prescale_factor: float, postscale_factor: float
    ) -> Job[Tensor]:
        reduction = Reduction(op, prescale_factor, postscale_factor)
        source = dense("allreduce", x)
        reduction.raise_if_unfit(source)
        # Copied now, because the caller may change `x` as soon as the job is submitted.
        result = source.clone(memory_format=torch.contiguous_format)
        is_bool = result.dtype == torch.bool
        flat = (result.to(torch.uint8) if is_bool else result).view(-1)
        call = _call_of("allreduce", reduction, tensor=described(source))

        def job() -> Tensor:
            self._reduce_(call, reduction, flat)
            return (flat != 0).view(result.shape) if is_bool else result

        return job

    def _reduce_(self, call: Call, reduction: Reduction, flat: Tensor) -> None:
        """Reduce over all ranks, in place. Short tensors are sent along with the check."""
        reduction.prepare_(flat, self.size)
        if self.size > 1:
            # Not for a GPU, whose values the host would have to wait for.
            is_inline = flat.nbytes <= INLINE_BYTES and not flat.is_cuda
            inline = object_codec.as_bytes(flat).numpy().tobytes() if is_inline else None
            rows = self.check.compare(call, flat.nbytes, inline)
            if not is_inline:
                self._world.all_reduce_(flat, reduction.transport_op)
            elif flat.numel():  # torch.frombuffer() refuses empty buffers
                # Every rank has the tensors of all ranks and reduces them itself, in rank order.
                pieces = [
                    torch.frombuffer(bytearray(cast(bytes, row.inline)), dtype=flat.dtype)
                    for row in rows
                ]
                fold(flat, pieces, reduction.transport_op)
        reduction.finish_(flat)

    @_rejecting
    def reduce_scatter(
        self,
        xs: Sequence[Tensor] | Tensor,
        op: str,
        prescale_factor: float,
        postscale_factor: float,
    ) -> Job[Tensor]:
        reduction = Reduction(op, prescale_factor, postscale_factor)
        parts = dense_parts("reduce_scatter", xs, self.size)
        for part in parts:
            reduction.raise_if_unfit(part)
        call = _call_of("reduce_scatter", reduction, parts=[described(p) for p in parts])
        shares = [reduction.prepare_(_own(part), self.size) for part in parts]

        def job() -> Tensor:
            received = self._to_all(call, dict(enumerate(shares)))
            if self.size == 1:
                return reduction.finish_(received[0])
            result = torch.empty_like(received[0], memory_format=torch.contiguous_format)
            fold(result, received, reduction.transport_op)
            return reduction.finish_(result)

        return job

    # ---- objects ----

    @_rejecting
    def bcast_obj(self, obj: object, root: int, name: str = "bcast_obj") -> Job[Any]:
        self._check_root(root)
        return lambda: self.objects.broadcast(Call(name, root=root), obj, root)

    @_rejecting
    def gather_obj(self, obj: object, root: int) -> Job[tuple[Any, ...] | None]:
        self._check_root(root)
        return lambda: self._to_root(Call("gather_obj", root=root), obj, root)

    @_rejecting
    def scatter_obj(
        self, objs: Sequence[object] | None, root: int, name: str = "scatter_obj"
    ) -> Job[Any]:
        self._check_root(root)
        own = list(objs) if self.rank == root and objs is not None else []
        if self.rank == root and len(own) != self.size:
            raise UsageError(f"scatter_obj needs {self.size} parts, got {len(own)}.")
        return lambda: self._from_root(Call(name, root=root), own, root)

    def allgather_obj(self, obj: object, name: str = "allgather_obj") -> Job[list[Any]]:
        return lambda: list(self._to_all(Call(name), dict.fromkeys(range(self.size), obj)))

    @_rejecting
    def sum_over_ranks(self, values: Sequence[Tensor | float]) -> Job[tuple[Tensor | float, ...]]:
        own = tuple(summand(value) for value in values)

        def job() -> tuple[Tensor | float, ...]:
            gathered = self.allgather_obj(own, "sum_over_ranks")()
            return sums_of(gathered, values)

        return job

    # ---- models and groups ----

    @_rejecting
    def bcast_data(self, model: nn.Module) -> Job[list[str]]:
        """Copy rank 0's tensors where ranks differ; the result are the names of those sent."""
        named = dict([*model.named_parameters(), *model.named_buffers()])
        tensors = {
            n: dense(f"bcast_data of '{n}'", local_part(tensor)) for n, tensor in named.items()
        }
        placements = [placement_of(tensor) for tensor in named.values()]
        call = Call(
            "bcast_data",
            [f"{d}{p}" for d, p in zip(_described(tensors), placements, strict=True)],
        )

        def job() -> list[str]:
            self.check.compare(call)
            plain = {n: t.detach().resolve_conj().resolve_neg() for n, t in tensors.items()}
            digests = [digest(each.cpu().contiguous()) for each in plain.values()]
            # What all ranks have read from the same file is not sent: over a slow link the weights
            # of a language model would take minutes.
            found = self.allgather_obj(digests, "bcast_data")()
            sent = [n for n, *of_ranks in zip(plain, *found, strict=True) if len({*of_ranks}) > 1]
            with torch.no_grad():
                for name in sent:
                    # A copy: a transport may make the storage that it sends not resizable.
                    flat = plain[name].clone(memory_format=torch.contiguous_format).view(-1)
                    self._world.broadcast_(object_codec.as_bytes(flat), 0)
                    tensors[name].copy_(flat.view(tensors[name].shape))
            return sent

        return job

    @_rejecting
    def multi_node_mean_grad(self, model: nn.Module, zero_fill: bool) -> Job[dict[str, Tensor]]:
        """Compare the gradients of all ranks; the result is this rank's, in the order of names."""
        grads: dict[str, Tensor] = {}
        for name, parameter in sorted(model.named_parameters()):
            if parameter.grad is None:
                if not zero_fill or not parameter.requires_grad:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            grads[name] = dense(f"multi_node_mean_grad of '{name}'", local_part(parameter.grad))
        call = Call("multi_node_mean_grad", _described(grads))

        def job() -> dict[str, Tensor]:
            self.check.compare(call)
            return grads

        return job

    @_rejecting
    def split(self, color: int, key: int) -> Job[list[int]]:
        """The ranks with this rank's color, ordered by key, then by rank."""
        own = (operator.index(color), operator.index(key))

        def job() -> list[int]:
            entries = self.allgather_obj(own, "split")()
            return [
                r for _, r in sorted((e[1], r) for r, e in enumerate(entries) if e[0] == own[0])
            ]

        return job

    @_rejecting
    def subgroup(self, ranks: Sequence[int]) -> Job[list[int]]:
        """The ranks as a list of ints, compared between all ranks."""
        members = [operator.index(rank) for rank in ranks]
        outside = [rank for rank in members if not 0 <= rank < self.size]
        if not members or outside or len(set(members)) < len(members):
            raise UsageError(
                f"ranks={members}. Give at least one rank, each once, from 0 to {self.size - 1}."
            )

        def job() -> list[int]:
            self.check.compare(Call("subgroup", ranks=members))
            return members

        return job

    # ---- parts of a job ----

    def _to_all(self, call: Call, outgoing: Mapping[int, object]) -> tuple[Any, ...]:
        """Send ``outgoing[r]`` to rank r and return the objects for this rank in rank order."""
        received = self.objects.exchange(call, outgoing, range(self.size))
        return tuple(received[peer] for peer in range(self.size))

    def _to_root(self, call: Call, obj: object, root: int) -> tuple[Any, ...] | None:
        sources = range(self.size) if self.rank == root else ()
        received = self.objects.exchange(call, {root: obj}, sources)
        return tuple(received[peer] for peer in sources) if self.rank == root else None

    def _from_root(self, call: Call, objs: Sequence[object], root: int) -> Any:
        return self.objects.exchange(call, dict(enumerate(objs)), (root,))[root]

    def _check_root(self, root: int) -> None:
        if not 0 <= operator.index(root) < self.size:
            raise UsageError(f"root={root} must be a rank from 0 to {self.size - 1}.")


def _own(x: Tensor) -> Tensor:
    """This rank's part of a result: a copy, without the memory or autograd graph of ``x``."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _described(tensors: Mapping[str, Tensor]) -> list[str]:
    return [f"'{name}' {described(tensor)}" for name, tensor in tensors.items()]


def _call_of(
    name: str, reduction: Reduction, parts: Sequence[str] = (), **arguments: object
) -> Call:
    """The `Call` of a reduction, which omits scale factors of 1."""
    factors = {
        key: value
        for key in ("prescale_factor", "postscale_factor")
        if (value := getattr(reduction, key)) != 1
    }
    return Call(name, parts, op=reduction.op, **arguments, **factors)


def summand(value: object) -> Tensor | float:
    """A value of `sum_over_ranks` as it is sent: a number, or a tensor on the CPU.

    Raises UsageError: the value is neither a number nor a tensor.
    """
    if isinstance(value, Tensor):
        return dense("sum_over_ranks", value).detach().cpu()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (int, float)):
        return value + 0  # a bool counts
    if isinstance(value, np.ndarray):
        raise UsageError(
            "sum_over_ranks got a numpy array. It adds numbers and tensors: pass torch.as_tensor(x)"
            " and call .numpy() on the sum."
        )
    raise UsageError(
        f"sum_over_ranks got a {type(value).__name__}. It adds numbers and tensors: pass the parts "
        "of a container one by one, and use allreduce_obj for other objects."
    )


def sums_of(
    gathered: Sequence[Sequence[Tensor | float]], own: Sequence[Tensor | float]
) -> tuple[Tensor | float, ...]:
    """The sum over ranks of each value, added in rank order; tensors on the devices of ``own``.

    Raises RankMismatchError on all ranks: the numbers of values or the shapes differ.
    """
    counts = [len(theirs) for theirs in gathered]
    if len(set(counts)) > 1:
        raise RankMismatchError(
            f"sum_over_ranks: ranks 0 to {len(counts) - 1} passed {counts} values. Pass the same "
            "number on every rank."
        )
    return tuple(
        _sum(index, column, like)
        for index, (column, like) in enumerate(zip(zip(*gathered, strict=True), own, strict=True))
    )


def _sum(index: int, column: Sequence[Tensor | float], like: Tensor | float) -> Tensor | float:
    tensors = [value for value in column if isinstance(value, Tensor)]
    numbers = [value for value in column if not isinstance(value, Tensor)]
    total = _sum_of_numbers(numbers)
    if not tensors:
        return total
    shapes = [list(tensor.shape) for tensor in tensors]
    if any(shape != shapes[0] for shape in shapes):
        raise RankMismatchError(
            f"sum_over_ranks: value {index} is a tensor of the shapes {shapes} on the ranks. Pass "
            "tensors of the same shape on every rank."
        )
    dtype = tensors[0].dtype
    for value in column:
        dtype = torch.promote_types(dtype, _dtype_of(value, dtype))
    wide = torch.float64 if dtype.is_floating_point else dtype
    added = torch.stack([tensor.to(wide) for tensor in tensors]).sum(0)  # integers in int64
    device = like.device if isinstance(like, Tensor) else torch.device("cpu")
    return (added + total).to(device, dtype if dtype.is_floating_point else added.dtype)


def _sum_of_numbers(numbers: Sequence[float]) -> float:
    """The sum of numbers: exact for integers, rounded once for floats."""
    if all(isinstance(number, int) for number in numbers):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # infinities, which sum() adds as floats do
        return float(sum(numbers))


def _dtype_of(value: Tensor | float, other: torch.dtype) -> torch.dtype:
    """The dtype of a value by torch's type promotion: a Python number counts by category only."""
    if isinstance(value, Tensor):
        return value.dtype
    return torch.result_type(torch.empty(1, dtype=other, device="cpu"), value)


# The exchange of objects: a check of the call, then descriptions, then tensors.
#
# The check (see `collective_checks`) compares the calls and carries the sizes of the descriptions,
# or the descriptions themselves if they are short. An object without tensors takes one or two
# rounds, an object with tensors one more.


@dataclass(eq=False)
class ObjectExchange:
    """Sends objects over a group. Methods are *collective* and run inside engine jobs.

    All raise RankMismatchError if the calls of the ranks differ or a rank rejected its own, and
    UnsupportedError if this rank's object cannot be sent.
    """

    _group: Group
    _check: CallCheck
    _trust: object_codec.Trust
    _device: torch.device

    def exchange(
        self, call: Call, outgoing: Mapping[int, object], sources: Sequence[int]
    ) -> dict[int, Any]:
        """Send ``outgoing[peer]`` to each peer; returns the object from each source, by rank."""
        own = self._group.rank
        targets = self._pack(call, {p: obj for p, obj in outgoing.items() if p != own})
        remote = [peer for peer in sources if peer != own]
        # Each message tells the receiver how long the next one is: the row of the check the
        # description, and that the tensors. A library needs the memory before it can receive.
        size, inline = _announced(list(targets.values()))
        rows = self._check.compare(call, size, inline)
        heads = {peer: _empty_head(rows[peer]) for peer in remote}
        # Descriptions are padded to the longest one, because a row of the check holds one size.
        sends = {} if inline is not None else {p: [_head(m, size)] for p, m in targets.items()}
        recvs = {p: [head] for p, head in heads.items() if rows[p].inline is None}
        exchange_tensors(self._group, call.name, sends, recvs)
        described = {
            p: object_codec.unpack_head(h.numpy().tobytes(), self._device) for p, h in heads.items()
        }
        exchange_tensors(
            self._group,
            call.name,
            {p: m.buffers for p, m in targets.items()},
            {p: [object_codec.as_bytes(t) for t in d[2]] for p, d in described.items()},
        )
        result = {p: object_codec.unpack(d[1], d[2], self._trust) for p, d in described.items()}
        if own in sources:
            result[own] = outgoing[own]
        return result

    def broadcast(self, call: Call, obj: object, root: int) -> Any:
        """Return the root's object on every rank."""
        if self._group.size == 1:
            return obj
        is_root = self._group.rank == root
        messages = list(self._pack(call, {-1: obj}).values()) if is_root else []
        row = self._check.compare(call, *_announced(messages))[root]
        head = _head(messages[0], row.nbytes) if is_root else _empty_head(row)
        if row.inline is None:
            self._group.broadcast_(head, root)
        if is_root:
            for buffer in messages[0].buffers:
                self._group.broadcast_(buffer, root)
            return obj
        _, body, tensors = object_codec.unpack_head(head.numpy().tobytes(), self._device)
        for tensor in tensors:
            self._group.broadcast_(object_codec.as_bytes(tensor), root)
        return object_codec.unpack(body, tensors, self._trust)

    def _pack(self, call: Call, outgoing: Mapping[int, object]) -> dict[int, object_codec.Message]:
        """The message to each peer. An object for several peers is packed once."""
        packed: dict[int, object_codec.Message] = {}
        try:
            for obj in outgoing.values():
                # By identity: all peers of an all-gather get the same object.
                if id(obj) not in packed:
                    packed[id(obj)] = object_codec.pack(obj, self._trust)
        except Exception as error:
            self._check.reject(call.name, error)
        return {peer: packed[id(obj)] for peer, obj in outgoing.items()}


def exchange_tensors(
    group: Group,
    name: str,
    sends: Mapping[int, Sequence[Tensor]],
    recvs: Mapping[int, Sequence[Tensor]],
    tag: int = 0,
) -> None:
    """Exchange CPU tensors, then CUDA tensors, which may use different libraries."""
    for is_cuda in (False, True):
        outgoing = [(p, t) for p, ts in sends.items() for t in ts if t.is_cuda is is_cuda]
        incoming = [(p, t) for p, ts in recvs.items() for t in ts if t.is_cuda is is_cuda]
        if outgoing or incoming:
            group.exchange(outgoing, incoming, name=name, tag=tag)


def _announced(messages: Sequence[object_codec.Message]) -> tuple[int, bytes | None]:
    """For the check: the size of the longest description, and a single short one itself."""
    size = max((len(message.head) for message in messages), default=0)
    if len({id(message) for message in messages}) == 1 and size <= INLINE_BYTES:
        return size, messages[0].head
    return size, None


def _head(message: object_codec.Message, size: int) -> Tensor:
    """A description as bytes, padded to ``size`` with blanks, which JSON ignores."""
    return torch.frombuffer(bytearray(message.head.ljust(size)), dtype=torch.uint8)


def _empty_head(row: Row) -> Tensor:
    """A tensor with the description in a row, or to receive it if the row does not contain it."""
    if row.inline is not None:
        return torch.frombuffer(bytearray(row.inline), dtype=torch.uint8)
    return torch.empty(row.nbytes, dtype=torch.uint8, device="cpu")
