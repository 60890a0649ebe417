"""MNIST from its four idx files, plain or gzipped.

An idx file is ``0, 0, type, number of dimensions``, the dimensions as big-endian int32, the data.
Format: http://yann.lecun.com/exdb/mnist/
"""

from __future__ import annotations

import gzip
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchmn.errors import DataError

from .files import (
    AGAIN,
    Bytes,
    RawImages,
    RawImageSet,
    checked_labels,
    raise_if_other_sum,
    reading,
)

_UNSIGNED_BYTE = 8


@dataclass(frozen=True)
class _Official:
    """The file of the original data set: its size in bytes and md5 sum, unpacked."""

    num_bytes: int
    md5: str


OFFICIAL = {
    "train-images-idx3-ubyte": _Official(47_040_016, "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": _Official(60_008, "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": _Official(7_840_016, "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": _Official(10_008, "27ae3e4e09519cfbb04c329615203637"),
}
FOLDERS = (".", "mnist", "MNIST", "MNIST/raw")


def find_mnist(root: Path) -> Path | None:
    """The folder that has one of the four files: ``root``, a known one below, or of a file."""
    candidates = [root.parent] if root.is_file() else [root / folder for folder in FOLDERS]
    for folder in candidates:
        if any(_file(folder, name) is not None for name in OFFICIAL):
            return folder
    return None


def read_mnist(folder: Path, *, verify: bool = True) -> RawImageSet:
    """Read all four files.

    Raises DataError: one is missing, damaged or of another format; or, with ``verify``, has the
    size of the original and another content.
    """
    return RawImageSet(
        train=_read_part(folder, "train", verify),
        test=_read_part(folder, "t10k", verify),
        path=folder,
    )


def _read_part(folder: Path, prefix: str, verify: bool) -> RawImages:
    images_path, images = _read(folder, f"{prefix}-images-idx3-ubyte", 3, verify)
    labels_path, labels = _read(folder, f"{prefix}-labels-idx1-ubyte", 1, verify)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} has {len(images)} images and {labels_path} {len(labels)} labels. "
            f"They belong together and must be of one data set. {AGAIN}"
        )
    return RawImages(images[:, None], checked_labels(labels_path, labels, 10))


def _file(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def _read(folder: Path, name: str, num_dims: int, verify: bool) -> tuple[Path, Bytes]:
    path = _file(folder, name)
    if path is None:
        raise DataError(
            f"{folder} has no {name} and no {name}.gz, one of the four files of MNIST. {AGAIN}"
        )
    with reading(path):
        payload = path.read_bytes()
        if path.suffix == ".gz":
            payload = gzip.decompress(payload)
    array = parse_idx(path, payload, num_dims)
    official = OFFICIAL[name]
    if verify and len(payload) == official.num_bytes:
        raise_if_other_sum(path, payload, official.md5, f"MNIST's {name}")
    return path, array


def parse_idx(path: Path, payload: bytes, num_dims: int) -> Bytes:
    """The array in an idx file of unsigned bytes with ``num_dims`` dimensions.

    Raises DataError: another format, or more or fewer bytes than its header says.
    """
    head = 4 + 4 * num_dims
    magic = bytes([0, 0, _UNSIGNED_BYTE, num_dims])
    if payload[:4] != magic or len(payload) < head:
        raise DataError(
            f"{path} begins with the bytes {payload[:4].hex(' ') or '(none)'} and an idx file "
            f"of {num_dims}-dimensional unsigned bytes with {magic.hex(' ')}. {AGAIN}"
        )
    shape = struct.unpack_from(f">{num_dims}I", payload, 4)
    expected = head + math.prod(shape)
    if len(payload) != expected:
        raise DataError(
            f"{path} has {len(payload):,} bytes and according to its header {expected:,} "
            f"({' x '.join(map(str, shape))}). It is cut off or damaged. {AGAIN}"
        )
    return np.frombuffer(payload, np.uint8, offset=head).reshape(shape)
