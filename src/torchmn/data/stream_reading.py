"""Reading a stream on one rank: batch by batch, with its position, from which it can continue.

The position has the state of what keeps one: a loader such as torchdata's StatefulDataLoader, or a
data set with ``state_dict`` that this process itself reads. For other streams, the batches already
seen are read again and skipped. They are the same only if the stream draws the same numbers again,
so the generators begin as they did then, and the first and the last of these batches are compared.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple, TypedDict

import numpy as np
from torch import Tensor

from torchmn.base.errors import UsageError
from torchmn.base.torch_private import tree_map
from torchmn.data.global_sampler import EmptyBatchCollate
from torchmn.data.sampler_randomness import capture, replayed
from torchmn.data.scatter import shard_bounds
from torchmn.data.stream_position import PositionedDataset, holder_of

END = object()
"""In place of a batch after the last one."""
_MIN_DISTINCT = 8
"""Different entries of a batch from which on two equal batches are no coincidence."""


class StreamState(TypedDict, total=False):
    """State of a loader of a stream: the position of the rank which reads, ``rank`` of ``size``.

    ``batches`` counts the batches of the pass over all ranks, and ``stream`` is the stream's own
    state. Without one, ``randomness`` and ``digests`` let it be read again and compared.
    """

    batches: int
    read_by: str
    rank: int
    size: int
    stream: Any
    randomness: dict[str, Any]
    digests: list[str]


class StreamReading:
    """One pass over a stream, on a rank that reads it. Local.

    Args:
        source: a loader or another iterable of batches, as `positioned` returns it.
        num_seen: number of batches before the position with which the pass begins.
        position: where it begins; None for the beginning of the stream.

    Raises UsageError: the stream cannot continue there.
    """

    def __init__(
        self,
        source: Iterable[Any],
        num_seen: int = 0,
        position: StreamState | None = None,
    ) -> None:
        dataset = getattr(source, "dataset", None)
        if isinstance(dataset, PositionedDataset):
            dataset = dataset.dataset
        drawing = SimpleNamespace(generator=getattr(source, "generator", None), sampler=dataset)
        self._holder = holder_of(source)
        self._randomness = capture(drawing)
        self._digests = ["", ""]
        if position is None:
            self._batches = iter(source)
        elif "stream" in position and self._holder is not None:
            self._holder.load_state_dict(position["stream"])
            with replayed(self._randomness, drawing):  # whose seed of workers was drawn before
                self._batches = iter(source)
            self._randomness, self._digests = position["randomness"], [*position["digests"]]
        else:
            self._randomness = position["randomness"]
            with replayed(self._randomness, drawing):
                self._batches = iter(source)
                for _ in range(num_seen):
                    self.read()
            if self._digests != position["digests"]:
                raise UsageError(
                    "scatter_loader: the state was saved in the middle of a pass over a stream, "
                    f"and the {num_seen} batches before it, which were read again, are different: "
                    "the stream has changed, or draws random numbers in the process that trains. "
                    "Let it have a generator of its own, seeded in __iter__; read it by workers "
                    "(num_workers=1); give the data set state_dict() and load_state_dict(); or "
                    "save and resume between two passes."
                )

    def read(self) -> Any:
        """The next batch, or `END`. Raises what the stream raises."""
        batch = next(self._batches, END)
        if batch is not END:
            self._digests[1] = batch.digest if isinstance(batch, Parts) else _digest(batch)
            self._digests[0] = self._digests[0] or self._digests[1]
        return batch

    def position(self) -> StreamState:
        """The position after the batches read so far."""
        own = StreamState(randomness=self._randomness, digests=[*self._digests])
        if self._holder is not None:
            own["stream"] = copy.deepcopy(self._holder.state_dict())
        return own


class Parts(NamedTuple):
    """The batches of all ranks, as `PartsCollate` makes them."""

    digest: str
    """The digest of the whole batch, the same for any number of ranks."""
    batches: list[tuple[int, Any]]
    """The number of samples and the batch of each rank."""


def entries_of(batch: Any) -> list[str]:
    """Texts and numbers of a batch, at most 64 of each tensor. Local; never raises."""
    found: list[str] = []

    def add(leaf: Any) -> None:
        if isinstance(leaf, (Tensor, np.ndarray)):
            flat = leaf.reshape(-1)
            found.extend(map(str, flat[:: max(1, len(flat) // 64)].tolist()))
        else:
            found.append(str(leaf) if isinstance(leaf, (str, int, float)) else type(leaf).__name__)

    with suppress(Exception):  # of a tensor of a rare kind, or a user's class
        tree_map(add, batch)
    return found


def recognizable(batch: Any) -> str:
    """A text that is the same for the same batch only; "" if others could be equal by chance."""
    found = entries_of(batch)
    return str(found) if len({*found}) >= _MIN_DISTINCT else ""


def _digest(batch: Any) -> str:
    return hashlib.sha256(repr(entries_of(batch)).encode()).hexdigest()


class PartsCollate:
    """Makes the batch of each rank out of the samples of a whole batch, where they are read."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any], size: int) -> None:
        self.collate_fn, self.size = collate_fn, size

    def __call__(self, samples: list[Any]) -> Parts:
        """Return the parts of all ranks, the larger ones first."""
        collate = EmptyBatchCollate(samples, self.collate_fn)
        parts = divided(len(samples), self.size, lambda begin, end: collate(samples[begin:end]))
        return Parts(_digest([samples[0], samples[-1]]), parts)


class NoRows:
    """In place of a batch of 0 rows that cannot be made."""

    def __init__(self, why: str) -> None:
        self.why = why


def divided(num_samples: int, size: int, part: Callable[[int, int], Any]) -> list[tuple[int, Any]]:
    """The samples of each rank and ``part(begin, end)``: `NoRows` if that is empty and raises."""
    parts = []
    for rank in range(size):
        begin, end = shard_bounds(num_samples, size, rank, force_equal_length=False)
        batch: Any = None
        try:
            batch = part(begin, end)
        except UsageError as error:
            if end > begin:
                raise
            batch = NoRows(str(error))  # which an evaluation does not need
        parts.append((end - begin, batch))
    return parts
