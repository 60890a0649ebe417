"""CIFAR-10 from its official binary or Python files, as a folder or an archive, or from ``.npz``.

The Python files are pickles, which are read without running anything: see `read_python_batch`.
Format: https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from torchmn.errors import DataError

from .files import (
    AGAIN,
    Bytes,
    Labels,
    RawImages,
    RawImageSet,
    checked_labels,
    raise_if_other_sum,
    reading,
)

NUM_CLASSES = 10
IMAGE_SHAPE = (3, 32, 32)
_IMAGE_BYTES = 3 * 32 * 32
_OFFICIAL_IMAGES = 10_000
_BINARY = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_PYTHON = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_FOLDERS = (".", "cifar10", "cifar-10-batches-bin", "cifar-10-batches-py")
_ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
_NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")
# Published in torchvision's list of the Python version; the binary version has no such list.
_PYTHON_SUMS = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}

Batch = tuple[Bytes, Labels]
ReadBatch = Callable[[Path, bytes], Batch]


def find_cifar10(root: Path) -> Path | None:
    """The folder of batches, archive or ``.npz``: ``root`` itself, or one in or below it.

    In this order: batches, archives, ``.npz``. Raises DataError: several ``.npz`` to choose from.
    """
    if root.is_file():
        return root
    folders = [root / folder for folder in _FOLDERS]
    folders += sorted(folder for folder in root.glob("cifar*10*") if folder.is_dir())
    for folder in folders:
        if any((folder / name).is_file() for name in (*_BINARY, *_PYTHON)):
            return folder
    for folder in folders:
        for name in _ARCHIVES:
            if (folder / name).is_file():
                return folder / name
    found = sorted({path.resolve() for folder in folders for path in folder.glob("*cifar*10*.npz")})
    if len(found) > 1:
        raise DataError(
            f"{root} has several files that may be CIFAR-10: {', '.join(map(str, found))}. Pass "
            "the one to use as --data-root."
        )
    return found[0] if found else None


def read_cifar10(source: Path, *, verify: bool = True) -> RawImageSet:
    """Read what `find_cifar10` found, or a file that the user named.

    Raises DataError: a file is missing, damaged or of another format; or, with ``verify``, a
    Python batch has the size of the original and another content.
    """
    if source.is_dir():
        return _read_batches(source, _folder_files(source), verify)
    with reading(source), source.open("rb") as file:
        start = file.read(4)
    if start[:2] == b"PK":
        return _read_npz(source)
    if start[:2] == b"\x1f\x8b":
        return _read_batches(source, _archive_files(source), verify)
    raise DataError(
        f"{source} is neither a .npz file nor a .tar.gz archive: it begins with the bytes "
        f"{start.hex(' ') or '(none)'}. Pass the folder of CIFAR-10's batches, "
        f"{' or '.join(_ARCHIVES)}, or a .npz with {', '.join(_NPZ_KEYS)}."
    )


# ---- the six batches


def _folder_files(folder: Path) -> dict[str, bytes]:
    names = _BINARY if any((folder / name).is_file() for name in _BINARY) else _PYTHON
    files = {}
    for name in names:
        with reading(folder / name):
            if (folder / name).is_file():
                files[name] = (folder / name).read_bytes()
    return files


def _archive_files(archive: Path) -> dict[str, bytes]:
    """The batches in an archive, by their bare names. Nothing is written to disk."""
    files = {}
    with reading(archive), gzip.open(archive) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as members:
            for member in members:
                name = PurePosixPath(member.name).name
                content = members.extractfile(member) if member.isfile() else None
                if content is not None and name in (*_BINARY, *_PYTHON):
                    files[name] = content.read()
        # gzip compares its checksum only at the end of the stream.
        while stream.read(2**20):
            pass
    return files


def _read_batches(source: Path, files: Mapping[str, bytes], verify: bool) -> RawImageSet:
    names = _BINARY if any(name in files for name in _BINARY) else _PYTHON
    missing = [name for name in names if name not in files]
    if missing:
        raise DataError(
            f"{source} lacks {', '.join(missing)} of the six batches of CIFAR-10. {AGAIN}"
        )
    read = _read_binary_batch if names is _BINARY else read_python_batch
    batches = {}
    for name in names:
        batches[name] = read(source / name, files[name])
        if verify and name in _PYTHON_SUMS and len(batches[name][1]) == _OFFICIAL_IMAGES:
            raise_if_other_sum(source / name, files[name], _PYTHON_SUMS[name], f"CIFAR-10's {name}")
    *train, test = (batches[name] for name in names)
    lengths = [len(labels) for _, labels in train]
    if len(set(lengths)) > 1:
        raise DataError(
            f"{source}: the five training batches have {', '.join(map(str, lengths))} images and "
            f"should have the same number each. One is cut off. {AGAIN}"
        )
    images = np.concatenate([images for images, _ in train])
    labels = np.concatenate([labels for _, labels in train])
    return RawImageSet(RawImages(images, labels), RawImages(*test), source)


def _read_binary_batch(path: Path, payload: bytes) -> Batch:
    """Records of one label byte and 3,072 bytes of red, green and blue planes."""
    record = 1 + _IMAGE_BYTES
    if not payload or len(payload) % record:
        raise DataError(
            f"{path} has {len(payload):,} bytes, which is no multiple of the {record:,} bytes of "
            f"an image with its label. It is cut off or of another format. {AGAIN}"
        )
    table = np.frombuffer(payload, np.uint8).reshape(-1, record)
    labels = checked_labels(path, table[:, 0], NUM_CLASSES)
    return table[:, 1:].reshape(-1, *IMAGE_SHAPE), labels


# ---- Python batches


def read_python_batch(path: Path, payload: bytes) -> Batch:
    """A pickled dict with ``data`` (n, 3072) uint8 and ``labels``, without running anything in it.

    Only the names that such a file needs resolve, and they resolve to our own placeholders, which
    only store their arguments. Everything else in a pickle is numbers, texts and containers. So a
    hostile file can give wrong images, but cannot run anything.

    Raises DataError: it needs other names, is damaged, or holds something else.
    """
    with reading(path):
        content = _BatchUnpickler(io.BytesIO(payload), encoding="bytes").load()
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, no dict. {AGAIN}")
    content = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in content.items()}
    data, labels = content.get("data"), content.get("labels")
    if not isinstance(data, _PickledArray) or not isinstance(labels, list):
        raise DataError(
            f"{path} lacks an array 'data' or a list 'labels'; it has "
            f"{', '.join(map(str, content))}. {AGAIN}"
        )
    images = data.images(path)
    if len(images) != len(labels) or not all(type(label) is int for label in labels):
        raise DataError(
            f"{path} has {len(images)} images and {len(labels)} labels. It needs one integer for "
            f"each image. {AGAIN}"
        )
    return images, checked_labels(path, labels, NUM_CLASSES)


class _PickledDtype:
    """Stands in for ``numpy.dtype``."""

    def __init__(self, name: object = None, *_: object) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment do not matter for unsigned bytes."""


class _PickledArray:
    """Stands in for ``numpy.ndarray``: keeps its shape, dtype and bytes."""

    def __init__(self, *_: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def images(self, path: Path) -> Bytes:
        """The images in it. Raises DataError: it is no ``(n, 3072)`` of unsigned bytes."""
        match self.state:
            case (_, (int(rows), columns), _PickledDtype(name="u1"), order, bytes(raw)) if (
                columns == _IMAGE_BYTES and len(raw) == rows * columns
            ):
                table = np.frombuffer(raw, np.uint8)
                return table.reshape((rows, _IMAGE_BYTES), order="F" if order else "C").reshape(
                    -1, *IMAGE_SHAPE
                )
        raise DataError(
            f"{path}: 'data' is no array of n x {_IMAGE_BYTES:,} unsigned bytes with all its "
            f"bytes. {AGAIN}"
        )


def _latin1(text: str, encoding: str) -> bytes:
    """Stands in for ``_codecs.encode``, as which Python 3 writes bytes in old protocols."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r} instead of latin1")
    return text.encode("latin1")


_BYTEARRAY = pickle.BYTEARRAY8[0]
_PLACEHOLDERS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledDtype,
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
    ("_codecs", "encode"): _latin1,
}


class _BatchUnpickler(pickle._Unpickler):
    """Written in Python, because a damaged length makes the C unpickler allocate gigabytes."""

    dispatch = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != _BYTEARRAY
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLACEHOLDERS:
            return _PLACEHOLDERS[module, name]
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no such batch needs")


# ---- .npz


def _read_npz(path: Path) -> RawImageSet:
    with reading(path), zipfile.ZipFile(path) as archive:
        # numpy does not read past the end of an array, so it may not check the checksum.
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
    with reading(path), np.load(path, allow_pickle=False) as archive:
        missing = [key for key in _NPZ_KEYS if key not in archive]
        if missing:
            raise DataError(
                f"{path} lacks {', '.join(missing)}; it has {', '.join(archive.files)}. "
                f"CIFAR-10 as .npz needs {', '.join(_NPZ_KEYS)}."
            )
        arrays = {key: archive[key] for key in _NPZ_KEYS}
    parts = [
        _checked_part(path, part, arrays[f"x_{part}"], arrays[f"y_{part}"])
        for part in ("train", "test")
    ]
    return RawImageSet(parts[0], parts[1], path)


def _checked_part(path: Path, part: str, x: Any, y: Any) -> RawImages:
    if x.ndim == 4 and x.shape[1:] == (32, 32, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1:] != IMAGE_SHAPE:
        raise DataError(
            f"{path}: x_{part} is {x.dtype} of shape {x.shape} and must be uint8 of shape "
            "(n, 3, 32, 32) or (n, 32, 32, 3)."
        )
    y = y.reshape(-1) if y.shape == (len(x), 1) else y
    if y.shape != (len(x),) or y.dtype.kind not in "iu":
        raise DataError(
            f"{path}: y_{part} is {y.dtype} of shape {y.shape} and must be one integer for each of "
            f"the {len(x)} images."
        )
    return RawImages(np.ascontiguousarray(x), checked_labels(path, y, NUM_CLASSES))
