"""CIFAR-10 in all its forms, whole and damaged."""

import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from examples.datasets import cifar as module
from examples.datasets.cifar import find_cifar10, read_cifar10, read_python_batch
from examples.datasets.files import RawImageSet

from tests.unit.examples.datasets.makers import (
    cifar_archive,
    cifar_files,
    cifar_parts,
    flipped,
    write_cifar_folder,
    write_npz,
)
from torchmn.errors import DataError


def assert_whole(found: RawImageSet) -> None:
    for part, expected in zip((found.train, found.test), cifar_parts(), strict=True):
        np.testing.assert_array_equal(part.images, expected.images)
        np.testing.assert_array_equal(part.labels, expected.labels)
        assert (part.images.dtype, part.labels.dtype) == (np.uint8, np.int64)


@pytest.fixture(
    params=["binary folder", "python folder", "binary archive", "python archive", "npz"]
)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """CIFAR-10 in one of its forms."""
    form, _, kind = request.param.partition(" ")
    if form == "npz":
        return write_npz(tmp_path / "cifar10.npz")
    if kind == "folder":
        return write_cifar_folder(tmp_path / f"cifar-10-batches-{form[:2]}", form)
    path = tmp_path / f"cifar-10-{form}.tar.gz"
    path.write_bytes(cifar_archive(form))
    return path


# ---- whole


def test_it_is_found_below_the_root_and_by_its_own_name(source: Path) -> None:
    if source.name.endswith("batches-py") or source.name.endswith("batches-bi"):
        source = source.rename(source.with_name(source.name.replace("-bi", "-bin")))
    assert find_cifar10(source.parent) == source
    assert find_cifar10(source) == source
    assert_whole(read_cifar10(find_cifar10(source.parent)))


def test_nothing_to_be_found(tmp_path: Path) -> None:
    (tmp_path / "other.npz").write_bytes(b"")
    assert find_cifar10(tmp_path) is None


def test_batches_come_before_archives_and_archives_before_npz(tmp_path: Path) -> None:
    npz = write_npz(tmp_path / "cifar10.npz")
    assert find_cifar10(tmp_path) == npz
    archive = tmp_path / "cifar-10-python.tar.gz"
    archive.write_bytes(cifar_archive("python"))
    assert find_cifar10(tmp_path) == archive
    assert find_cifar10(write_cifar_folder(tmp_path, "binary")) == tmp_path


def test_several_npz_are_refused(tmp_path: Path) -> None:
    for name in ("cifar10-a.npz", "cifar10-b.npz"):
        write_npz(tmp_path / name)
    with pytest.raises(DataError, match=r"several files .*cifar10-a\.npz, .*cifar10-b\.npz"):
        find_cifar10(tmp_path)


def test_the_real_subset(real_data: Path) -> None:
    path = find_cifar10(real_data)
    assert path is not None
    found = read_cifar10(path)
    assert found.train.images.shape == (10_000, 3, 32, 32)
    assert np.bincount(found.train.labels).tolist() == [1000] * 10
    assert np.bincount(found.test.labels).tolist() == [200] * 10
    frog = found.train.images[0]  # the first picture of the official order is a frog
    assert found.train.labels[0] == 6
    assert frog[:, 0, 0].tolist() == [59, 62, 63]


# ---- damaged


def damaged(source: Path, change) -> Path:
    """The file, or the third file of the folder, changed in place."""
    path = source if source.is_file() else sorted(source.iterdir())[2]
    path.write_bytes(change(path.read_bytes()))
    return path


def test_cut_off(source: Path) -> None:
    path = damaged(source, lambda payload: payload[: len(payload) // 2 + 1])
    with pytest.raises(DataError, match=path.name):
        read_cifar10(source)


def test_a_flipped_bit_in_an_official_python_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = cifar_files("python")
    sums = {name: hashlib.md5(payload).hexdigest() for name, payload in files.items()}
    monkeypatch.setattr(module, "_PYTHON_SUMS", sums)
    monkeypatch.setattr(module, "_OFFICIAL_IMAGES", 4)
    folder = write_cifar_folder(tmp_path, "python")
    assert_whole(read_cifar10(folder))
    path = folder / "data_batch_3"
    path.write_bytes(flipped(path.read_bytes(), 6000))
    with pytest.raises(DataError, match=r"data_batch_3 has the size .* md5 sum is .* should be"):
        read_cifar10(folder)
    read_cifar10(folder, verify=False)


@pytest.mark.parametrize("form", ["binary", "python"])
def test_a_missing_batch(tmp_path: Path, form: str) -> None:
    folder = write_cifar_folder(tmp_path, form)
    name = sorted(path.name for path in folder.iterdir())[2]
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"lacks {name} of the six batches"):
        read_cifar10(folder)


def test_a_label_out_of_range(tmp_path: Path) -> None:
    folder = write_cifar_folder(tmp_path, "binary")
    path = folder / "data_batch_2.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"data_batch_2\.bin has a label 10, .* 0 to 9"):
        read_cifar10(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "lacks y_test"),
        ({"x_test": np.zeros((4, 3, 32, 32), np.float32)}, "x_test is float32"),
        ({"y_train": np.zeros(19, np.int64)}, "one integer for each of the 20 images"),
        ({"y_train": np.full(20, -1)}, "label -1"),
    ],
)
def test_npz_of_another_form(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_cifar10(write_npz(tmp_path / "a.npz", **changes))


# ---- hostile


class Hostile:
    """Runs a command when it is unpickled without care."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "mark"

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_something(tmp_path: Path, protocol: int) -> None:
    hostile = Hostile(tmp_path)
    payload = pickle.dumps({b"data": hostile, b"labels": []}, protocol=protocol)
    with pytest.raises(DataError, match="it refers to posix.mkdir, which no such batch needs"):
        read_python_batch(tmp_path / "batch", payload)
    assert not hostile.mark.exists()
    pickle.loads(payload)
    assert hostile.mark.exists(), "the pickle is harmless: the test shows nothing"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({b"data": np.zeros((2, 3072), np.uint8)}, "lacks an array 'data' or a list 'labels'"),
        ({b"data": np.zeros((2, 3072), np.float32), b"labels": [1, 2]}, "unsigned bytes"),
        ({b"data": np.zeros((2, 3072), object), b"labels": [1, 2]}, "unsigned bytes"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "2 images and 1 labels"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["a"]}, "one integer for each"),
    ],
)
def test_a_pickle_of_something_else(content: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_python_batch(Path("batch"), pickle.dumps(content, protocol=2))
