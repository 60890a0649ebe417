"""Small files in the official formats of CIFAR-10 and MNIST, and real photos of flowers."""

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from examples.datasets.files import RawImages

NUM_IMAGES = 4
CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
MNIST_PARTS = ("train", "t10k")


def colour_batch(number: int) -> RawImages:
    """Random colour images of one of the six batches."""
    draw = np.random.RandomState(number)
    images = draw.randint(0, 256, (NUM_IMAGES, 3, 32, 32)).astype(np.uint8)
    return RawImages(images, draw.randint(0, 10, NUM_IMAGES).astype(np.int64))


def binary_bytes(batch: RawImages) -> bytes:
    rows = batch.images.reshape(len(batch.labels), -1)
    return np.hstack([batch.labels.astype(np.uint8)[:, None], rows]).tobytes()


def python_bytes(batch: RawImages, protocol: int = 2) -> bytes:
    """As Python 2 wrote them, so with bytes as keys."""
    content = {
        b"batch_label": b"training batch",
        b"labels": [int(label) for label in batch.labels],
        b"data": batch.images.reshape(len(batch.labels), -1),
        b"filenames": [b"a.png"] * len(batch.labels),
    }
    return pickle.dumps(content, protocol=protocol)


def cifar_files(form: str) -> dict[str, bytes]:
    """The six files of the ``binary`` or ``python`` version."""
    if form == "binary":
        return {
            f"{name}.bin": binary_bytes(colour_batch(i)) for i, name in enumerate(CIFAR_BATCHES)
        }
    return {name: python_bytes(colour_batch(i)) for i, name in enumerate(CIFAR_BATCHES)}


def write_cifar_folder(folder: Path, form: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, payload in cifar_files(form).items():
        (folder / name).write_bytes(payload)
    return folder


def cifar_archive(form: str) -> bytes:
    """A ``.tar.gz`` with a folder and a file that is no batch."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, payload in {**cifar_files(form), "readme.html": b"<p>"}.items():
            entry = tarfile.TarInfo(f"cifar-10-batches/{name}")
            entry.size = len(payload)
            archive.addfile(entry, io.BytesIO(payload))
    return packed.getvalue()


def cifar_parts() -> tuple[RawImages, RawImages]:
    """What all forms of the files hold: training and test images."""
    *train, test = (colour_batch(i) for i in range(6))
    return (
        RawImages(
            np.concatenate([part.images for part in train]),
            np.concatenate([part.labels for part in train]),
        ),
        test,
    )


def write_npz(path: Path, **changes: object) -> Path:
    train, test = cifar_parts()
    arrays = {
        "x_train": train.images,
        "y_train": train.labels,
        "x_test": test.images,
        "y_test": test.labels.astype(np.uint8),
        **changes,
    }
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def grey_part(prefix: str) -> RawImages:
    draw = np.random.RandomState(MNIST_PARTS.index(prefix))
    images = draw.randint(0, 256, (NUM_IMAGES, 1, 28, 28)).astype(np.uint8)
    return RawImages(images, draw.randint(0, 10, NUM_IMAGES).astype(np.int64))


def idx_bytes(array: np.ndarray) -> bytes:
    head = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def mnist_files() -> dict[str, bytes]:
    """The four files, unpacked."""
    files = {}
    for prefix in MNIST_PARTS:
        part = grey_part(prefix)
        files[f"{prefix}-images-idx3-ubyte"] = idx_bytes(part.images[:, 0])
        files[f"{prefix}-labels-idx1-ubyte"] = idx_bytes(part.labels)
    return files


def write_mnist_folder(folder: Path, *, is_packed: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, payload in mnist_files().items():
        if is_packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(payload, mtime=0))
        else:
            (folder / name).write_bytes(payload)
    return folder


def flipped(payload: bytes, position: int) -> bytes:
    changed = bytearray(payload)
    changed[position] ^= 0x10
    return bytes(changed)


def unpack_flowers(real_data: Path, folder: Path, *, train: int, val: int) -> Path:
    """The first photos of each of the five classes, as ``train/<class>`` and ``val/<class>``."""
    archive = real_data / "flower-photos-160" / "flower_photos_160.tar"
    if not archive.is_file():
        pytest.skip(reason=f"{archive} is not there")
    left: dict[str, int] = {}
    with tarfile.open(archive) as file:
        for member in file:
            parent = str(Path(member.name).parent)
            limit = train if parent.startswith("train") else val
            left[parent] = left.get(parent, limit) - member.isfile()
            content = file.extractfile(member)
            if content is not None and left[parent] >= 0:
                (folder / parent).mkdir(parents=True, exist_ok=True)
                (folder / member.name).write_bytes(content.read())
    return folder
