"""load_images: from a name to tensors, on one process and on several ranks."""

import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.datasets import default_data_root, load_images
from examples.datasets import images as module

from tests.unit.examples.datasets.makers import cifar_parts, write_cifar_folder, write_mnist_folder
from torchmn.errors import DataError, TorchmnError, UnknownNameError
from torchmn.testing import run_ranks

# ---- digits


def test_digits() -> None:
    digits = load_images("digits")
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert (digits.shape, digits.num_classes, digits.path) == ((1, 8, 8), 10, None)
    image, label = digits.train[0]
    assert (image.shape, image.dtype) == ((1, 8, 8), torch.float32)
    assert (label.shape, label.dtype) == ((), torch.int64)
    images = torch.cat([digits.train.tensors[0], digits.test.tensors[0]])
    assert (images.min(), images.max()) == (0, 1)
    # No scan is in both parts, and all are in one.
    assert len({tuple(image.flatten().tolist()) for image in images}) == 1797


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match=r"pip install 'torchmn\[examples\]'"):
        load_images("digits")


# ---- from files


def test_cifar10(tmp_path: Path) -> None:
    folder = write_cifar_folder(tmp_path / "cifar-10-batches-bin", "binary")
    loaded = load_images("cifar10", tmp_path)
    train, test = cifar_parts()
    for part, raw in ((loaded.train, train), (loaded.test, test)):
        images, labels = part.tensors
        assert images.dtype == torch.float32
        np.testing.assert_allclose(images.numpy(), raw.images / np.float32(255))
        np.testing.assert_array_equal(labels.numpy(), raw.labels)
    assert (loaded.path, loaded.shape, loaded.name) == (folder, (3, 32, 32), "cifar10")


@pytest.mark.parametrize(("name", "length"), [("mnist", 60_000), ("cifar10", 10_000)])
def test_real_files(real_data: Path, name: str, length: int) -> None:
    loaded = load_images(name, real_data)
    assert len(loaded.train) == length
    assert 0.1 < loaded.train.tensors[0].mean() < 0.6


def test_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="'imagenet'. Known: digits, cifar10, mnist"):
        load_images("imagenet")


@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_nothing_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"not found in .*--data-root, or --download it from https"):
        load_images(name, tmp_path)
    with pytest.raises(DataError, match="gone, which does not exist"):
        load_images(name, tmp_path / "gone")


def test_the_default_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_data_root() == tmp_path / "torchmn"
    write_mnist_folder(default_data_root() / "mnist", is_packed=False)
    assert len(load_images("mnist").train) == 4
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_data_root() == Path.home() / ".cache" / "torchmn"


# ---- downloads


@pytest.mark.parametrize(("name", "num_files"), [("cifar10", 1), ("mnist", 4)])
def test_download_once(
    tmp_path: Path, mirror: tuple[str, list[str]], name: str, num_files: int
) -> None:
    address, requests = mirror
    root = tmp_path / "root"
    for _ in range(2):
        loaded = load_images(name, root, download=True, mirror=address)
        assert len(loaded.test) == 4
        assert len(requests) == num_files
    assert len(load_images(name, root).test) == 4
    assert {path.name for path in (root / name).iterdir()} == {r.strip("/") for r in requests}


def test_a_download_that_was_interrupted_continues(
    tmp_path: Path, mirror: tuple[str, list[str]]
) -> None:
    address, requests = mirror
    load_images("mnist", tmp_path, download=True, mirror=address)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    requests.clear()
    load_images("mnist", tmp_path, download=True, mirror=address)
    assert requests == ["/t10k-labels-idx1-ubyte.gz"]


def test_what_is_there_is_not_downloaded(tmp_path: Path) -> None:
    write_cifar_folder(tmp_path, "python")
    load_images("cifar10", tmp_path, download=True, mirror="http://127.0.0.1:9")


def test_the_official_checksum_is_compared(
    tmp_path: Path, mirror: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = module.IMAGE_FILES["mnist"]
    monkeypatch.setitem(
        module.IMAGE_FILES, "mnist", replace(files, md5_sums=dict.fromkeys(files.md5_sums, "0"))
    )
    with pytest.raises(DataError, match="should have 0"):
        load_images("mnist", tmp_path / "root", download=True, mirror=mirror[0])


def test_the_official_checksums_are_those_of_the_real_files(real_data: Path) -> None:
    for file, md5 in module.IMAGE_FILES["mnist"].md5_sums.items():
        assert hashlib.md5((real_data / "mnist" / file).read_bytes()).hexdigest() == md5


# ---- several ranks


def test_rank_0_alone_downloads(tmp_path: Path, mirror: tuple[str, list[str]]) -> None:
    address, requests = mirror

    def length(comm):
        root = tmp_path / "root"
        return len(load_images("mnist", root, download=True, mirror=address, comm=comm).train)

    assert run_ranks(length, 3) == [4] * 3
    assert len(requests) == 4


def test_an_error_of_one_rank_is_raised_by_all(tmp_path: Path) -> None:
    write_mnist_folder(tmp_path / "has" / "mnist", is_packed=True)
    os.mkdir(tmp_path / "lacks")

    def attempt(comm):
        root = tmp_path / ("lacks" if comm.rank == 1 else "has")
        try:
            return load_images("mnist", root, comm=comm)
        except TorchmnError as error:
            return type(error), str(error)

    (first, *others) = run_ranks(attempt, 3)
    assert first[0] is DataError
    assert first[1].startswith("Rank 1 on localhost: MNIST was not found")
    assert others == [first] * 2
