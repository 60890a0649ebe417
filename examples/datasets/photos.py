"""Photos in files: a folder of classes, a map file, or tar shards with their labels."""

from __future__ import annotations

import math
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from torchmn.cntk.readers.decoding import ImageMemory, Reduction, decode, image_size
from torchmn.cntk.readers.transforms import Crop, Draw, Region, contiguous, crop
from torchmn.comm import Communicator
from torchmn.comm.heartbeat import run_on_one_rank
from torchmn.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png")
_WHOLE_FILE = -1
Entry = tuple[str, int, int, int]
"""File, first byte, number of bytes, label."""

# Szegedy et al. 2015, arXiv 1409.4842, section 6: 8 % to 100 % of the area, sides of 3/4 to 4/3.
RANDOM_CROP = crop(
    "randomarea", area_ratio=(0.08, 1), aspect_ratio=(0.75, 1), jitter_type="uniratio"
)
CENTER_CROP = crop("center", side_ratio=0.875)  # 224 of a shorter side of 256


@dataclass(frozen=True)
class PhotoList:
    """Where each photo is, in two arrays that the workers of a DataLoader share."""

    files: np.ndarray
    """The distinct files, as bytes: one each, or the shards."""
    places: np.ndarray
    """Number of the file, first byte, number of bytes and label, shape ``(photos, 4)``."""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return int(self.places[:, 3].max()) + 1

    def read(self, index: int) -> tuple[bytes, int]:
        """The content of an image file, and its label."""
        number, begin, nbytes, label = self.places[index].tolist()
        file = os.open(self.files[number], os.O_RDONLY | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(file).st_size if nbytes == _WHOLE_FILE else nbytes
            return os.pread(file, nbytes, begin), label
        finally:
            os.close(file)


def find_photos(root: Path, part: str, comm: Communicator) -> PhotoList:
    """The photos of ``train`` or ``val``. *Collective:* rank 0 looks for them.

    The first of these that exists: ``root/train/*.tar`` or ``root/train-*.tar``, shards with
    ``name.jpg`` and ``name.cls``, the label, as WebDataset's; ``root/train_map.txt`` with lines of
    path, a tab and label, as CNTK's; ``root/train/<class>/*.jpg`` with the classes of ``train``.

    Raises DataError: there are none, or a list of them is wrong; on all ranks.
    """

    def search(heartbeat: Callable[[], None]) -> tuple[str, Tensor]:
        numbers: dict[str, int] = {}
        rows = []
        for name, begin, nbytes, label in _entries(root, part):
            rows.append((numbers.setdefault(name, len(numbers)), begin, nbytes, label))
            if len(rows) % 1000 == 0:
                heartbeat()
        if not rows:
            raise DataError(
                f"{root} has no photos for {part!r}. It should have {part}/<class>/*.jpg, "
                f"{part}_map.txt, {part}/*.tar or {part}-*.tar."
            )
        return "\n".join(numbers), torch.tensor(rows)

    names, places = run_on_one_rank(comm, 0, search)
    return PhotoList(np.array([os.fsencode(n) for n in names.split("\n")]), places.numpy())


def _entries(root: Path, part: str) -> Iterator[Entry]:
    shards = sorted((root / part).glob("*.tar")) or sorted(root.glob(f"{part}-*.tar"))
    if shards:
        for shard in shards:
            yield from _of_shard(shard)
    elif (root / f"{part}_map.txt").exists():
        yield from _of_map_file(root / f"{part}_map.txt")
    elif (root / part).is_dir():
        classes = sorted(path.name for path in (root / "train").iterdir() if path.is_dir())
        for folder in sorted(path for path in (root / part).iterdir() if path.is_dir()):
            if folder.name not in classes:
                raise DataError(f"{folder} is a class that {root / 'train'} does not have.")
            label = classes.index(folder.name)
            for path in sorted(folder.iterdir()):
                if path.suffix.lower() in SUFFIXES:
                    yield str(path), 0, _WHOLE_FILE, label


def _of_map_file(path: Path) -> Iterator[Entry]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        *_, name, label = ("", *line.split("\t"))
        if not (name and label.isdigit()):
            raise DataError(f"{path}, line {number}: it should be path, a tab and label.")
        if name.startswith("..."):  # in the folder of the map file
            name = str(path.parent / name[3:].lstrip("/\\"))
        yield name, 0, _WHOLE_FILE, int(label)


def _of_shard(path: Path) -> Iterator[Entry]:
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as file:
            for member in file:
                key, suffix = os.path.splitext(member.name)
                if suffix.lower() in SUFFIXES:
                    images[key] = member.offset_data, member.size
                elif suffix == ".cls":
                    content = file.extractfile(member)
                    labels[key] = int(content.read() if content else b"")
    except (tarfile.TarError, ValueError) as error:
        raise DataError(f"{path} is no tar file of images and labels: {error}") from error
    if images.keys() != labels.keys():
        example = min(images.keys() ^ labels.keys())
        raise DataError(f"{path}: {example} should have an image and a label, {example}.cls.")
    for key, (begin, nbytes) in images.items():
        yield str(path), begin, nbytes, labels[key]


class Photos(Dataset[tuple[Tensor, Tensor]]):
    """Photos (3, size, size) of bytes in the order blue, green, red, and their labels.

    What is random in a photo depends on the seed, ``epoch`` and its number, and on nothing else. A
    DataLoader needs ``collate_fn=whole_batch``, since batches are read whole. They are in
    channels-last memory.
    """

    def __init__(self, photos: PhotoList, size: int, *, seed: int | None = None) -> None:
        """With a seed random parts, half of them mirrored; without one the centres."""
        self.photos = photos
        self.size = size
        self.seed = seed
        self.epoch = 0
        """To be set before the DataLoader is iterated."""

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A batch of photos (batch, 3, size, size), and their labels (batch)."""
        images = batch_of_bytes(len(indices), self.size, self.size, 3)
        memory = ImageMemory()
        files = [self.photos.read(index) for index in indices]  # at once, for the caches' sake
        for index, (content, _), into in zip(indices, files, images.numpy(), strict=True):
            self._write(index, content, into, memory)
        return images.permute(0, 3, 1, 2), torch.tensor([label for _, label in files])

    def _write(self, index: int, content: bytes, into: np.ndarray, memory: ImageMemory) -> None:
        draw = Draw(self.seed or 0, self.epoch, index)
        try:
            region = self._crop.region(*image_size(content), draw)
            # Decoded no smaller than twice the result, so that the weights are still its own.
            most = min(region.height, region.width) / (2 * self.size)
            reduction: Reduction = 8 if most >= 8 else 4 if most >= 4 else 2 if most >= 2 else 1
            pixels = decode(content, 3, reduction=reduction, memory=memory)
        except DataError as error:
            name = os.fsdecode(self.photos.files[self.photos.places[index, 0]])
            raise DataError(f"photo {index}, in {name}: {error}") from error
        _resize(pixels, region, reduction, into)

    @property
    def _crop(self) -> Crop:
        return CENTER_CROP if self.seed is None else RANDOM_CROP


def batch_of_bytes(*shape: int) -> Tensor:
    """An empty batch; in a worker of a DataLoader, in memory that the training loop shares."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))  # as default_collate does
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)


def whole_batch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The ``collate_fn`` of a DataLoader of `Photos`."""
    return batch


def _resize(pixels: np.ndarray, region: Region, reduction: int, into: np.ndarray) -> None:
    """Write a region of an image that was decoded to a smaller size.

    As ``interpolate(mode="bilinear", antialias=True)``, but in half the time, without its copies.
    """
    height, width = region.height // reduction, region.width // reduction
    top = min(round(region.top / reduction), len(pixels) - height)
    left = min(round(region.left / reduction), pixels.shape[1] - width)
    part = contiguous(pixels[top : top + height, left : left + width])
    source, target = (torch.from_numpy(a).permute(2, 0, 1).unsqueeze(0) for a in (part, into))
    torch.ops.aten._upsample_bilinear2d_aa.out(source, into.shape[:2], False, out=target)
    if region.is_mirrored:
        np.copyto(into, contiguous(into[:, ::-1]))
