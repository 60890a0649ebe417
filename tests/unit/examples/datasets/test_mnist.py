"""MNIST's idx files, whole and damaged."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from examples.datasets.files import RawImageSet
from examples.datasets.mnist import OFFICIAL, find_mnist, read_mnist

from tests.unit.examples.datasets.makers import (
    MNIST_PARTS,
    flipped,
    grey_part,
    idx_bytes,
    write_mnist_folder,
)
from torchmn.errors import DataError


def assert_whole(found: RawImageSet) -> None:
    for prefix, part in zip(MNIST_PARTS, (found.train, found.test), strict=True):
        np.testing.assert_array_equal(part.images, grey_part(prefix).images)
        np.testing.assert_array_equal(part.labels, grey_part(prefix).labels)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("folder", [".", "mnist", "MNIST/raw"])
def test_found_and_read(tmp_path: Path, folder: str, is_packed: bool) -> None:
    written = write_mnist_folder(tmp_path / folder, is_packed=is_packed)
    assert find_mnist(tmp_path) == written
    assert_whole(read_mnist(written))


def test_the_real_files(real_data: Path, tmp_path: Path) -> None:
    folder = find_mnist(real_data)
    assert folder is not None
    found = read_mnist(folder)
    assert found.train.images.shape == (60_000, 1, 28, 28)
    assert found.test.images.shape == (10_000, 1, 28, 28)
    assert found.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    for name in OFFICIAL:
        payload = gzip.decompress((folder / f"{name}.gz").read_bytes())
        (tmp_path / name).write_bytes(payload)
    np.testing.assert_array_equal(read_mnist(tmp_path).train.images, found.train.images)

    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(flipped(path.read_bytes(), 5000))
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte has the size .* md5 sum is"):
        read_mnist(tmp_path)
    read_mnist(tmp_path, verify=False)


@pytest.mark.parametrize("name", sorted(OFFICIAL))
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    folder = write_mnist_folder(tmp_path, is_packed=False)
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"has no {name} and no {name}\.gz"):
        read_mnist(folder)


@pytest.mark.parametrize("name", sorted(OFFICIAL))
@pytest.mark.parametrize("is_packed", [True, False])
def test_cut_off(tmp_path: Path, name: str, is_packed: bool) -> None:
    folder = write_mnist_folder(tmp_path, is_packed=is_packed)
    path = folder / (f"{name}.gz" if is_packed else name)
    for kept in (0, 3, 7, len(path.read_bytes()) - 1):
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(DataError, match=name):
            read_mnist(folder)


def test_images_and_labels_of_different_sets(tmp_path: Path) -> None:
    folder = write_mnist_folder(tmp_path, is_packed=False)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(3, np.uint8)))
    with pytest.raises(DataError, match="4 images and .* 3 labels"):
        read_mnist(folder)


def test_a_label_out_of_range(tmp_path: Path) -> None:
    folder = write_mnist_folder(tmp_path, is_packed=False)
    (folder / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.array([1, 2, 10, 3])))
    with pytest.raises(DataError, match="has a label 10"):
        read_mnist(folder)
