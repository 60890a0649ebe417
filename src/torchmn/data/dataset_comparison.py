"""Whether the ranks' data sets hold the same samples in the same order.

Equal lengths are not enough: a directory may list its files in another order, a split may be drawn
from other random numbers, a set may have another order. The comparison uses the attributes that a
data set, and the data sets in it, have for their samples (tensors, arrays, frames, lists of files,
labels, indices) or for their classes (lists of strings, numberings of strings); of each at most
1024 entries.

- Integers and texts must be equal. Of paths only the part below their common folder counts: hosts
  may keep copies in different places. Floating-point numbers and bytes may differ a little:
  processors round, and versions of a library decode images differently.
- ``__getitem__`` of a class of the user's is called only where the class has no such attribute and
  its loader has no workers, which would inherit from here what the call opens and starts: files,
  threads of libraries. A copy is read several times, each time with the same random numbers, so
  that neither the data set nor the random numbers of the training change. If it is slow, has random
  numbers of its own, or raises, it does not count. Nor does a list with a None in it, which may be
  a cache that each rank fills for itself.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import length_hint
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchmn.base.errors import RankMismatchError, ResultWarning
from torchmn.base.warn import warn
from torchmn.data import rng_state
from torchmn.data.sub_dataset import SubDataset

if TYPE_CHECKING:
    from torchmn.comm import Communicator

_MAX_ENTRIES = 1024
"""Entries of an attribute that are compared, evenly spaced."""
_MAX_PARTS, _MAX_DEPTH = 64, 8
"""Data sets that one contains, as a ConcatDataset does, and levels of nesting."""
_NUM_READINGS, _READING_S = 8, 0.5
"""Readings of three samples, and the seconds for all of them.

A random flip is the same in all readings once in 2 million data sets."""
_TOLERANCE = 0.02
"""Difference of floating-point numbers, relative to value and standard deviation."""
_CPU = torch.device("cpu")

Content = tuple[str, np.ndarray[Any, Any]]
"""The digest of texts and integers, and the floating-point numbers."""


def raise_if_datasets_differ(
    caller: str, datasets: Sequence[tuple[Any, bool]], comm: Communicator, root: int = 0
) -> None:
    """Compare the data sets of all ranks with those of ``root``, in order. *Collective.*

    Args:
        caller: the name of the public function, for the error.
        datasets: as many on every rank, None where a rank has none, each with whether the
            ``__getitem__`` of a class of the user's may be called.

    Raises RankMismatchError, on all ranks: they differ.
    """
    own = [contents(dataset, may_read=may_read) for dataset, may_read in datasets]
    found = [
        f"{name} of data set {number}" if len(own) > 1 else name
        for number, pair in enumerate(zip(own, comm.bcast_obj(own, root), strict=True))
        for name in _differing(*pair)
    ]
    for rank_label, names in comm.allgather_obj((comm.rank_label, found[:3])):
        if names:
            raise RankMismatchError(
                f"{caller}: the data set of {rank_label} has as many samples as that of rank "
                f"{root}, but different ones or in a different order: {', '.join(names)} differ. "
                "Some would be trained on twice and some never. Usual causes: the order of a "
                "directory or of a set (sorted(...)); a split or a shuffle from this rank's random "
                "numbers (seed_ranks before it, or generator=torch.Generator().manual_seed(0)); "
                "only this rank's part of the data (pass all of it)."
            )


def contents(dataset: Any, *, may_read: bool = False) -> dict[str, Content]:
    """The comparable contents of a data set, by attribute name. Local; never raises."""
    found: dict[str, Content] = {}
    with suppress(Exception):  # of a user's class
        _add(found, "", dataset, length_hint(dataset), may_read, 0)
    return found


def sampler_contents(batches: Any) -> dict[str, Content]:
    """What the sampler of a batch sampler draws from, such as weights or indices. Local.

    Only of torch's samplers, which do not change it: others may keep there what they have drawn,
    on rank 0 alone.
    """
    sampler = getattr(batches, "sampler", None)
    found: dict[str, Content] = {}
    if type(sampler).__module__ == torch.utils.data.sampler.__name__:
        for key, value in vars(sampler).items():
            if key != "data_source" and _is_compared(value, 1):
                found.update(_known(f"sampler.{key}", value))
    return found


def warn_if_changed(
    comm: Communicator, own: dict[str, Content], of_rank_0: dict[str, Content]
) -> None:
    """Warn if data sets and samplers have changed in different ways. Local."""
    if names := _differing(own, of_rank_0):
        warn(
            f"{comm.rank_label}: its data set or sampler has changed in a different way from that "
            f"of rank 0: {', '.join(names)} differ. Write what belongs to samples, such as "
            "pseudo-labels or the weights of a sampler, on all ranks alike: "
            "torchmn.data.gather_by_index gives each rank the values of all.",
            ResultWarning,
        )


def _differing(own: dict[str, Content], other: dict[str, Content]) -> list[str]:
    """The names of contents that both have and that differ."""
    return [name for name in own if name in other and not _are_equal(own[name], other[name])]


def _add(
    found: dict[str, Content], name: str, data: Any, length: int, may_read: bool, depth: int
) -> None:
    """Add the contents of a data set of this length, or of a short container in one."""
    if hasattr(data, "with_format"):  # of Hugging Face: its rows without the user's transform
        may_read, data = True, data.with_format(None)
    parts: Any = getattr(data, "__dict__", None) or {"its samples": data}
    if isinstance(data, SubDataset):
        parts = {"dataset": data.dataset, "indices": data.indices}
    elif isinstance(data, (Mapping, list, tuple)) and depth:
        items = data.items() if isinstance(data, Mapping) else enumerate(data)
        parts = {f"[{key!r}]": value for key, value in items}
    num_before, is_large = len(found), False
    for key, value in parts.items():
        label = f"{name}{'.' if name and key[0] != '[' else ''}{key}"
        is_large |= length_hint(value) > _MAX_ENTRIES
        is_dataset = isinstance(value, Dataset) or hasattr(value, "with_format")
        is_short = isinstance(value, (Mapping, list, tuple)) and len(value) <= _MAX_PARTS
        if value is data or (not is_dataset and _is_compared(value, length)):
            found.update(_known(label, value))
        elif (is_dataset or is_short) and depth < _MAX_DEPTH:
            own_length = length_hint(value) if is_dataset else length
            _add(found, label, value, own_length, may_read and is_dataset, depth + 1)
    if may_read and length and not is_large and len(found) == num_before:
        found.update(_read(name or "its samples", data, length))


def _is_compared(value: Any, length: int) -> bool:
    """Whether a value may hold an entry for each sample, names of classes or their numbers."""
    if isinstance(value, dict):
        numbers = [number for number in value.values() if isinstance(number, int)]
        return sorted(numbers) == [*range(len(value))]
    if isinstance(value, (list, tuple)):
        are_classes = len(value) > 1 and all(isinstance(item, str) for item in value)
        may_be_cache = any(item is None for item in value)
        return are_classes or (len(value) >= max(length, 1) and not may_be_cache)
    is_sized = isinstance(value, (Tensor, np.ndarray)) or hasattr(value, "iloc")
    return is_sized and length_hint(value) >= max(length, 1)


def _known(name: str, value: Any) -> dict[str, Content]:
    """The entries of a value by its name; nothing if none is of a kind that can be compared."""
    texts: list[str] = []
    numbers: list[float] = []
    try:
        _collect(value, texts, numbers, _MAX_ENTRIES)
        folders = [os.path.dirname(text) for text in texts if os.path.isabs(text)]
        common = os.path.commonpath(folders) if folders else ""
    except Exception:  # of a user's class, or of a tensor of a rare kind
        return {}
    relative = [text.removeprefix(common) for text in texts]
    digest = hashlib.sha256(repr([relative, len(numbers)]).encode()).hexdigest()
    chosen = np.asarray(numbers, np.float64)[_spaced(len(numbers), _MAX_ENTRIES)]
    return {name: (digest, chosen)} if texts or numbers else {}


def _spaced(num: int, most: int) -> np.ndarray[Any, Any]:
    """At most this many of the indices 0 .. num - 1."""
    return np.linspace(0, num - 1, min(num, most)).astype(np.int64)


def _collect(value: Any, texts: list[str], numbers: list[float], most: int) -> None:
    """Append the entries of a value: at most this many, and fewer of each that has more."""
    if hasattr(value, "iloc"):
        value = value.iloc[_spaced(len(value), most)].to_numpy()
    if isinstance(value, (Tensor, np.ndarray)):
        where = np.unravel_index(_spaced(math.prod(value.shape), most), (1, *value.shape))
        entries = value[None][where]
        value = entries.tolist()
        if any(kind in str(entries.dtype) for kind in ("float", "uint8")):
            numbers += value
            return
    if isinstance(value, (float, np.floating)):
        numbers.append(float(value))
    elif isinstance(value, (str, bytes, int, np.generic, os.PathLike)):
        texts.append(str(value))
    elif isinstance(value, Mapping):
        _collect(sorted(value.items(), key=str), texts, numbers, most)
    elif isinstance(value, Sequence):
        for index in _spaced(len(value), most).tolist():
            _collect(value[index], texts, numbers, max(most // 16, 1))


def _read(name: str, dataset: Any, length: int) -> dict[str, Content]:
    """Three samples by a name; nothing if reading them raises, is slow or random."""
    # Generators belong to the process: ranks that are its threads must not seed them at once.
    with rng_state.in_turn:
        before, end_s = rng_state.capture(_CPU), time.monotonic() + _READING_S
        try:
            mine, first = copy.deepcopy(dataset), None
            for _ in range(_NUM_READINGS):
                rng_state.start(0, 0, 0, _CPU)
                seen = _known(name, [mine[index] for index in (0, length // 2, length - 1)])
                first = first or seen
                if not _are_equal(seen[name], first[name]) or time.monotonic() > end_s:
                    return {}
            return first or {}
        except Exception:
            return {}
        finally:
            rng_state.restore(before, _CPU)


def _are_equal(content: Content, other: Content) -> bool:
    (digest, numbers), (other_digest, others) = content, other
    finite = others[np.isfinite(others)]
    tolerance = _TOLERANCE * float(finite.std()) if len(finite) else 0.0
    return digest == other_digest and np.allclose(
        numbers, others, rtol=_TOLERANCE, atol=tolerance, equal_nan=True
    )
