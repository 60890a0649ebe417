"""How many photos per second and core does the input pipeline of train_imagenet.py read?

Three sides take turns on one core, over the photos of flower-photos-160 in the folder
TORCHMN_TEST_DATA (or --data):

    decoder         simplejpeg over the same bytes in memory, whole photos, and nothing else
    shortest loop   a pipeline as one writes it by hand: read the file, decode it, cut, resize and
                    mirror it by OpenCV into the tensor of a batch
    pipeline        what the training loop receives: DataLoader, GlobalSampler, random crops. It
                    decodes only the part that it cuts out

and the pipeline again with one process that reads, whose time is added. Rates are per second of
processor time. The loop normalizes on the model's device, so that this is part of no side.

The photos have a shorter side of 160 pixels. 96 pixels of them are in the proportion of 224 pixels
of ImageNet's. The mosaics of six photos have about as many pixels (181,000) and bytes (110,000) as
the mean photo of ImageNet; they are resized to 224.

    bench_imagenet.py [--data FOLDER] [--quick]
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import sys
import tarfile
import tempfile
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from bench_reading import Sweep, bars_of, compare, take_turns, timed
from record import Bar, report
from torch.utils.data import DataLoader

import torchmn
from torchmn.large_batch import GlobalBatch
from torchmn.readers.decoding import pillow
from torchmn.readers.transforms import Draw

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from datasets.photos import RANDOM_CROP, PhotoList, Photos, find_photos, whole_batch

BATCH = 64
NUM_PHOTOS, NUM_MOSAICS = 1000, 300
TILES, QUALITY = (3, 2), 96
ROUNDS = 11


def unpack(data: Path, folder: Path, count: int) -> None:
    """Photos of all classes to ``folder/photos/train/CLASS``."""
    archive = data / "flower-photos-160" / "flower_photos_160.tar"
    with tarfile.open(archive) as tar:
        members = [m for m in tar if m.isfile() and m.name.startswith("train/")]
        for member in members[:: max(len(members) // count, 1)][:count]:
            content = tar.extractfile(member)
            path = folder / "photos" / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())  # type: ignore[union-attr]


def write_mosaics(folder: Path, count: int) -> None:
    """Photos in rows and columns, cut to the smallest of them, to ``folder/mosaics``."""
    out = folder / "mosaics" / "train" / "all"
    out.mkdir(parents=True)
    contents = [path.read_bytes() for path in sorted((folder / "photos").rglob("*.jpg"))]
    rows, columns = TILES
    chosen = itertools.cycle(contents)
    for number in range(count):
        tiles = [simplejpeg.decode_jpeg(next(chosen), "RGB") for _ in range(rows * columns)]
        height, width = (min(tile.shape[dim] for tile in tiles) for dim in (0, 1))
        grid = np.array([tile[:height, :width] for tile in tiles])
        grid = grid.reshape(rows, columns, height, width, 3).swapaxes(1, 2)
        packed = io.BytesIO()
        image = pillow().fromarray(grid.reshape(rows * height, columns * width, 3))
        image.save(packed, "jpeg", quality=QUALITY)
        (out / f"{number:05d}.jpg").write_bytes(packed.getvalue())


def shortest_loop(photos: PhotoList, size: int) -> int:
    import cv2

    for begin in range(0, len(photos), BATCH):
        numbers = range(begin, min(begin + BATCH, len(photos)))
        batch = np.empty((len(numbers), size, size, 3), np.uint8)
        for row, number in zip(batch, numbers, strict=True):
            content, _ = photos.read(number)
            image = simplejpeg.decode_jpeg(content, "BGR")
            part = RANDOM_CROP.region(*image.shape[:2], Draw(0, 0, number))
            cut = image[part.top : part.top + part.height, part.left : part.left + part.width]
            cv2.resize(cut, (size, size), dst=row)
            if part.is_mirrored:
                cv2.flip(row, 1, dst=row)
    return len(photos)


def decode_only(contents: list[bytes]) -> int:
    for content in contents:
        simplejpeg.decode_jpeg(content, "BGR")
    return len(contents)


class Pipeline:
    """The loader of train_imagenet.py; each sweep is an epoch."""

    def __init__(self, photos: PhotoList, size: int, comm: Any, workers: int) -> None:
        self._photos = Photos(photos, size, seed=0)
        self._sampler = GlobalBatch(BATCH, local_batch=BATCH, comm=comm).sampler(
            self._photos, drop_last=True
        )
        self._loader = DataLoader(
            self._photos,
            batch_sampler=self._sampler,
            num_workers=workers,
            collate_fn=whole_batch,
            persistent_workers=workers > 0,
        )
        self._before = set(active_children())

    def sweep(self) -> tuple[int, float, float]:
        iterator = iter(self._loader)
        readers = [child.pid for child in set(active_children()) - self._before]
        begun = sum(map(processor_seconds, readers))
        samples, seconds, own_seconds = timed(lambda: sum(len(labels) for _, labels in iterator))
        return samples, seconds, own_seconds + sum(map(processor_seconds, readers)) - begun


def processor_seconds(pid: int | None) -> float:
    """Of all threads of another process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def bench(
    title: str, photos: PhotoList, size: int, rounds: int, comm: Any, limit: str | None
) -> list[Bar]:
    contents = [photos.read(number)[0] for number in range(len(photos))]
    headers = [simplejpeg.decode_jpeg_header(content) for content in contents]
    pixels = sum(header[0] * header[1] for header in headers) / len(headers)
    title = f"{title} to {size}"
    sides: dict[str, Sweep] = {
        "decoder": lambda: timed(lambda: decode_only(contents)),
        "shortest loop": lambda: timed(lambda: shortest_loop(photos, size)),
        "pipeline": Pipeline(photos, size, comm, 0).sweep,
        "pipeline, a process that reads": Pipeline(photos, size, comm, 1).sweep,
    }
    found = take_turns(sides, rounds)
    return [
        Bar(f"{title}: pixels of a photo", pixels, "pixels"),
        Bar(f"{title}: bytes of a photo", sum(map(len, contents)) / len(contents), "bytes"),
        *compare(title, found, "pipeline", "decoder", limit),
        *compare(title, found, "pipeline", "shortest loop", ">= 0.9"),
        *compare(title, found, "shortest loop", "decoder", None),
        *compare(title, found, "pipeline, a process that reads", "decoder", None),
        *bars_of(title, found, 1, "photos"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("TORCHMN_TEST_DATA"))
    parser.add_argument("--quick", action="store_true", help="few photos and turns")
    options = parser.parse_args()
    if options.data is None:
        print("not measured: set TORCHMN_TEST_DATA", file=sys.stderr)
        return report("imagenet", [])
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rounds = 3 if options.quick else ROUNDS
    comm = torchmn.create_communicator("naive")
    print(f"load of the machine at the beginning: {os.getloadavg()}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack(options.data, folder, 128 if options.quick else NUM_PHOTOS)
        write_mosaics(folder, 64 if options.quick else NUM_MOSAICS)
        photos = find_photos(folder / "photos", "train", comm)
        mosaics = find_photos(folder / "mosaics", "train", comm)
        bars = [
            *bench("photos", photos, 96, rounds, comm, ">= 0.9"),
            *bench("photos", photos, 224, rounds, comm, None),
            *bench("mosaics", mosaics, 224, rounds, comm, ">= 0.9"),
        ]
    comm.finalize()
    print(f"{time.monotonic() - began:.0f} s; load at the end: {os.getloadavg()}")
    return report("imagenet", bars)


if __name__ == "__main__":
    raise SystemExit(main())
