"""Images and labels as stored in the files, and the errors that all readers raise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchmn.errors import DataError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Labels = np.ndarray[Any, np.dtype[np.int64]]

AGAIN = "Fetch it again, or pass another --data-root."


@dataclass(frozen=True)
class RawImages:
    """One part of a data set: images ``(n, channels, height, width)`` and labels ``(n,)``."""

    images: Bytes
    labels: Labels


@dataclass(frozen=True)
class RawImageSet:
    """A whole data set as stored in its files, and where those are."""

    train: RawImages
    test: RawImages
    path: Path


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error about a damaged file into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}. {AGAIN}") from error
    except Exception as error:  # a damaged archive may raise anything
        raise DataError(
            f"{path} is damaged, cut off or of another format "
            f"({type(error).__name__}: {error}). {AGAIN}"
        ) from error


def checked_labels(path: Path, labels: Any, num_classes: int) -> Labels:
    """Labels as int64. Raises DataError: one is outside 0 .. ``num_classes - 1``."""
    found = np.asarray(labels, dtype=np.int64)
    wrong = found[(found < 0) | (found >= num_classes)]
    if len(wrong):
        raise DataError(
            f"{path} has a label {wrong[0]}, and labels go from 0 to {num_classes - 1}. The file "
            f"is damaged or of another data set. {AGAIN}"
        )
    return found


def raise_if_other_sum(path: Path, payload: bytes, md5: str, what: str) -> None:
    """Raises DataError: the bytes are not those of the official file."""
    seen = hashlib.md5(payload, usedforsecurity=False).hexdigest()
    if seen != md5:
        raise DataError(
            f"{path} has the size of {what} but not its content: its md5 sum is {seen} and should "
            f"be {md5}. {AGAIN} If it is another data set of the same form on purpose, pass "
            "verify=False."
        )
