"""Cutting a batch into micro-batches, and finding the tensors of an object."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from torchmn.base.errors import UsageError
from torchmn.data.batch_size import num_samples

_NUM_SAMPLES: ContextVar[int | None] = ContextVar("_NUM_SAMPLES", default=None)


@contextmanager
def part_of(num_samples: int) -> Iterator[None]:
    """Run the body on a part of a batch of this many samples; see `samples_of_loss`. Local."""
    token = _NUM_SAMPLES.set(num_samples)
    try:
        yield
    finally:
        _NUM_SAMPLES.reset(token)


def samples_of_loss(x: Tensor) -> int:
    """The samples over which the loss is a mean: the rows of ``x``, or more in a micro-batch."""
    found = _NUM_SAMPLES.get()
    return x.shape[0] if found is None else found


def tensors_of(obj: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dicts, in order."""
    if isinstance(obj, Tensor):
        yield obj
    elif isinstance(obj, (tuple, list)):
        for item in obj:
            yield from tensors_of(item)
    elif isinstance(obj, dict):
        for item in obj.values():
            yield from tensors_of(item)


def with_tensors(obj: Any, tensors: Iterator[Tensor]) -> Any:
    """Replace the tensors in an object, in the order of `tensors_of`."""
    if isinstance(obj, Tensor):
        return next(tensors)
    if isinstance(obj, (tuple, list)):
        items = [with_tensors(item, tensors) for item in obj]
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    if isinstance(obj, dict):
        return type(obj)((key, with_tensors(item, tensors)) for key, item in obj.items())
    return obj


def placed(chosen: Iterable[Any], flags: Sequence[bool], values: Sequence[Any]) -> tuple[Any, ...]:
    """The values, with those that have a flag replaced by the chosen ones."""
    waiting = iter(chosen)
    return tuple(
        next(waiting) if flag else value for value, flag in zip(values, flags, strict=True)
    )


def samples_to_cut(batch: Any, name: str) -> int:
    """The samples of a batch, which are in dim 0 of all tensors with dims; 1 without any.

    Raises UsageError: they are not, so that `split` cannot cut the batch.
    """
    sizes = {tensor.size(0) for tensor in tensors_of(batch) if tensor.dim()}
    if not sizes:
        return 1
    found = num_samples(batch)
    if found is None or sizes != {found}:
        raise UsageError(
            f"{name} has {found} samples, and its tensors have {sorted(sizes)} in dim 0, which "
            "must be the same to cut them into micro-batches."
        )
    return found


def split(batch: Any, num_parts: int) -> list[Any]:
    """Cut along dim 0: sizes differ by at most one, the larger parts come first.

    Objects without a dim 0 are in every part.
    """
    parts = [
        [_apart(piece) for piece in tensor.tensor_split(num_parts)]
        if tensor.dim()
        else [tensor] * num_parts
        for tensor in tensors_of(batch)
    ]
    return [with_tensors(batch, (pieces[i] for pieces in parts)) for i in range(num_parts)]


def _apart(piece: Tensor) -> Tensor:
    """The same memory with a version counter of its own, unless it requires a gradient.

    Views share a counter: autograd would take an in-place change of one part for changes of all.
    """
    return piece if piece.requires_grad else piece.data
