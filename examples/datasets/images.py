"""Real image data sets in memory: digits, CIFAR-10 and MNIST, found on disk or downloaded."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from torchmn.comm.heartbeat import raise_if_any_failed, run_on_one_rank
from torchmn.errors import DataError, UnknownNameError, UsageError

from .cifar import find_cifar10, read_cifar10
from .download import download as fetch
from .files import RawImages, RawImageSet, reading
from .mnist import find_mnist, read_mnist

if TYPE_CHECKING:
    from torchmn.comm import Communicator


@dataclass(frozen=True)
class ImageData:
    """Two data sets of (float32 image (channels, height, width) in 0..1, int64 label)."""

    train: TensorDataset
    test: TensorDataset
    num_classes: int
    shape: tuple[int, int, int]
    name: str
    path: Path | None
    """Where it was read; None for data that a package contains."""

    def resized(self, size: int, *, channels: int | None = None) -> ImageData:
        """Images of ``size`` x ``size``, bilinear; grey ones repeated to ``channels``.

        Raises UsageError: colour images cannot get another number of channels.
        """
        wanted = self.shape[0] if channels is None else channels
        if wanted != self.shape[0] and self.shape[0] != 1:
            raise UsageError(
                f"The images of {self.name} have {self.shape[0]} channels. Only images with one "
                f"channel can be repeated to {wanted}."
            )

        def change(images: Tensor) -> Tensor:
            if images.shape[-2:] != (size, size):
                images = torch.nn.functional.interpolate(
                    images, size=(size, size), mode="bilinear", align_corners=False
                )
            return images.expand(-1, wanted, -1, -1).contiguous()

        return self._with(change, (wanted, size, size))

    def normalised(self) -> ImageData:
        """Mean 0 and standard deviation 1 in each channel over the training images."""
        images = self.train.tensors[0]
        mean = images.mean(dim=(0, 2, 3), keepdim=True)
        deviation = images.std(dim=(0, 2, 3), keepdim=True).clamp_min(1e-6)
        return self._with(lambda images: (images - mean) / deviation, self.shape)

    def _with(self, change: Callable[[Tensor], Tensor], shape: tuple[int, int, int]) -> ImageData:
        train, test = (
            TensorDataset(change(part.tensors[0]), part.tensors[1])
            for part in (self.train, self.test)
        )
        return replace(self, train=train, test=test, shape=shape)


class ReadImages(Protocol):
    """Reads what was found on disk."""

    def __call__(self, source: Path, /, *, verify: bool) -> RawImageSet:
        """Raises DataError."""
        ...


@dataclass(frozen=True)
class ImageFiles:
    """A data set stored in files: how it is found and read, and where it comes from."""

    title: str
    find: Callable[[Path], Path | None]
    read: ReadImages
    address: str
    md5_sums: Mapping[str, str]
    """md5 sum of each file to download, by its name."""


IMAGE_FILES: dict[str, ImageFiles] = {
    "cifar10": ImageFiles(
        title="CIFAR-10",
        find=find_cifar10,
        read=read_cifar10,
        address="https://www.cs.toronto.edu/~kriz",
        md5_sums={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    ),
    "mnist": ImageFiles(
        title="MNIST",
        find=find_mnist,
        read=read_mnist,
        address="https://ossci-datasets.s3.amazonaws.com/mnist",
        md5_sums={
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
}
IMAGE_SETS = ("digits", *IMAGE_FILES)
_NUM_TEST_DIGITS = 360


def load_images(
    name: str,
    data_root: str | os.PathLike[str] | None = None,
    *,
    download: bool = False,
    verify: bool = True,
    mirror: str | None = None,
    comm: Communicator | None = None,
) -> ImageData:
    """One of `IMAGE_SETS` in memory: ``digits``, ``cifar10`` or ``mnist``.

    Local without ``comm``, else *collective*: every rank reads the files, rank 0 alone downloads
    them, and an error on one rank is raised on all.

    Args:
        name: ``digits`` are scikit-learn's 1,797 scans of 8 x 8, always split the same way into
            1,437 and 360; they need no files.
        data_root: the file or folder with the data, or a folder above it; the default is
            `default_data_root()`.
        download: fetch missing files into ``data_root``.
        verify: compare files that have the size of the original with the original's checksum.
        mirror: an address to download from instead of the official one.
        comm: the ranks that load the same data.

    Raises:
        UnknownNameError: no such data set.
        DataError: not found, not downloaded, damaged or of another format.
    """
    if name not in IMAGE_SETS:
        raise UnknownNameError("data set", name, IMAGE_SETS)
    if name == "digits":
        return _in_memory(name, _read_digits(), None)
    files = IMAGE_FILES[name]
    root = default_data_root() if data_root is None else Path(data_root)

    def provide(heartbeat: Callable[[], None]) -> None:
        if download:
            _download(files, root / name, mirror or files.address, heartbeat, _find(files, root))

    if comm is None:
        provide(lambda: None)
        return _load(name, files, root, verify)
    run_on_one_rank(comm, 0, provide)
    loaded, error = None, None
    try:
        loaded = _load(name, files, root, verify)
    except DataError as own:
        error = own
    raise_if_any_failed(comm, error)
    return loaded  # type: ignore[return-value]


def default_data_root() -> Path:
    """``torchmn`` in the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torchmn"


def _download(
    files: ImageFiles,
    folder: Path,
    address: str,
    heartbeat: Callable[[], None],
    found: Path | None,
) -> None:
    """Fetch all files where none was found, or those that an earlier download left out."""
    have = [file for file in files.md5_sums if (folder / file).exists()]
    if found is not None and not have:
        return
    for file, md5 in files.md5_sums.items():
        if file not in have:
            url = f"{address.rstrip('/')}/{file}"
            fetch(url, folder / file, md5=md5, heartbeat=heartbeat)


def _find(files: ImageFiles, root: Path) -> Path | None:
    with reading(root):
        return files.find(root)


def _load(name: str, files: ImageFiles, root: Path, verify: bool) -> ImageData:
    source = _find(files, root)
    if source is None:
        seen = "" if root.exists() else ", which does not exist"
        raise DataError(
            f"{files.title} was not found in {root}{seen}. Pass the folder or file that has it as "
            f"--data-root, or --download it from {files.address}."
        )
    raw = files.read(source, verify=verify)
    return _in_memory(name, raw, raw.path)


def _in_memory(name: str, raw: RawImageSet, path: Path | None) -> ImageData:
    train, test = (_tensors(part) for part in (raw.train, raw.test))
    channels, height, width = raw.train.images.shape[1:]
    return ImageData(
        train=train,
        test=test,
        num_classes=10,
        shape=(channels, height, width),
        name=name,
        path=path,
    )


def _tensors(part: RawImages) -> TensorDataset:
    images = torch.from_numpy(part.images.astype(np.float32)).div_(255)
    return TensorDataset(images, torch.from_numpy(part.labels))


def _read_digits() -> RawImageSet:
    """Read the file of ``load_digits``, since importing scikit-learn takes two seconds."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError(
            "The digits come with scikit-learn, which is not installed here. Install it with: "
            "pip install 'torchmn[examples]', or pass --dataset mnist or cifar10."
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, delimiter=",")  # 64 pixels and the digit
    labels = table[:, -1]
    # 0 .. 16 in the scans.
    images = np.rint(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.random.RandomState(0).permutation(len(images))
    test, train = order[:_NUM_TEST_DIGITS], order[_NUM_TEST_DIGITS:]
    labels = labels.astype(np.int64)
    return RawImageSet(
        RawImages(images[train], labels[train]), RawImages(images[test], labels[test]), Path()
    )
