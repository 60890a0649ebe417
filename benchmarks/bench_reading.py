"""How fast are CTF text and JPEG read, compared with CNTK 2.7, WebDataset and a bare loop?

Rates are per second of processor time of all threads, so "per core", which other programs disturb
less than the clock; both are reported. Sides take turns in one run. Photos are those of
flower-photos-160 in the folder TORCHMN_TEST_DATA (or --data). CNTK, WebDataset and a Rust decoder
are compared where `scripts/setup_peers.sh cntk cntk-images readers` has installed them.

    bench_reading.py [--data FOLDER] [--quick] [--large-mb 2000]
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import Bar, median_bar, ratio_bar, report

PEERS = Path(__file__).parents[1] / ".peers"
sys.path.append(str(PEERS / "readers"))

from torchmn.readers import (  # noqa: E402
    CTFDeserializer,
    ImageDeserializer,
    MinibatchSource,
    StreamDef,
    transforms,
)
from torchmn.readers.decoding import pillow  # noqa: E402

MINIBATCH = 256
SIDE = 128
NUM_PHOTOS = 1000
WINDOW_IN_CHUNKS = 8
CHUNK_BYTES = 32 * 2**20

Sweep = Callable[[], tuple[int, float, float]]
"""Reads everything once: samples, seconds, processor seconds."""


def timed(work: Callable[[], int]) -> tuple[int, float, float]:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    samples = work()
    return samples, time.perf_counter() - begin, time.process_time() - begin_cpu


class Cntk:
    """A process of Python 3.6 with CNTK's readers."""

    def __init__(self) -> None:
        reader = Path(__file__).parent / "reading" / "cntk_reader.py"
        self._process = subprocess.Popen(
            [str(PEERS / "cntk" / "run"), "python", str(reader)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def sweep(self, request: dict[str, Any]) -> tuple[int, float, float]:
        assert self._process.stdin is not None  # noqa: S101
        assert self._process.stdout is not None  # noqa: S101
        self._process.stdin.write(json.dumps({"minibatch_size": MINIBATCH, **request}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("= "):
                answer = json.loads(line[2:])
                if "error" in answer:
                    raise RuntimeError(f"CNTK: {answer['error']}")
                return answer["samples"], answer["seconds"], answer["processor_seconds"]
        raise RuntimeError("CNTK's process has ended.")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def take_turns(sides: dict[str, Sweep], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds and processor seconds per sample of each side; a side that fails is left out."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, sweep in list(sides.items()):
            try:
                samples, seconds, processor_seconds = sweep()
            except (RuntimeError, ImportError) as error:
                print(f"not measured: {name}: {error}", file=sys.stderr)
                del sides[name], found[name]
                continue
            if turn:  # the first one compiles, and fills the page cache
                found[name].append((seconds / samples, processor_seconds / samples))
    return found


def bars_of(
    title: str, found: dict[str, list[tuple[float, float]]], units: float, unit: str
) -> Iterator[Bar]:
    for name, spent in found.items():
        yield median_bar(f"{title}: {name}", [units / s for _, s in spent], f"{unit}/core s")
        yield median_bar(
            f"{title}: {name}, by the clock", [units / s for s, _ in spent], f"{unit}/s"
        )


def compare(
    title: str,
    found: dict[str, list[tuple[float, float]]],
    ours: str,
    theirs: str,
    limit: str | None,
) -> Iterator[Bar]:
    if ours in found and theirs in found:
        rates = [[1 / s for _, s in found[side]] for side in (ours, theirs)]
        yield ratio_bar(f"{title}: {ours} / {theirs}", *rates, limit)


# ---- CTF


def ctf_files(folder: Path, megabytes: int) -> dict[str, tuple[Path, list[tuple[str, int, bool]]]]:
    """Pixels, numbers with six digits and sparse words, about as large as asked."""
    rng = np.random.default_rng(0)

    def pixels() -> str:
        row = rng.integers(0, 256, 784) * (rng.random(784) < 0.2)
        label = " ".join("1" if k == 3 else "0" for k in range(10))
        return f"|y {label} |x {' '.join(map(str, row.tolist()))}\n"

    def floats() -> str:
        return (
            f"|y {rng.integers(10)}:1 |x {' '.join(f'{v:.6f}' for v in rng.standard_normal(200))}\n"
        )

    def words() -> str:
        columns = np.unique(rng.integers(0, 20000, 100))
        return f"|y {rng.integers(2)} |x {' '.join(f'{c}:1' for c in columns)}\n"

    kinds: dict[str, tuple[Callable[[], str], list[tuple[str, int, bool]]]] = {
        "pixels": (pixels, [("x", 784, False), ("y", 10, False)]),
        "numbers": (floats, [("x", 200, False), ("y", 10, True)]),
        "sparse": (words, [("x", 20000, True), ("y", 1, False)]),
    }
    found = {}
    for name, (line, streams) in kinds.items():
        lines = [line() for _ in range(500)]
        path = folder / f"{name}.ctf"
        repeats = max(megabytes * 10**6 // sum(map(len, lines)), 1)
        path.write_text("".join(lines) * repeats)
        found[name] = path, streams
    return found


def read_ctf(path: Path, streams: list[tuple[str, int, bool]]) -> int:
    definitions = {name: StreamDef(shape=dim, is_sparse=sparse) for name, dim, sparse in streams}
    source = MinibatchSource(CTFDeserializer(path, definitions), max_sweeps=1)
    samples = 0
    while minibatch := source.next_minibatch(MINIBATCH):
        samples += minibatch[source["x"]].num_samples
    return samples


def bench_ctf(folder: Path, cntk: Cntk | None, rounds: int, megabytes: int) -> list[Bar]:
    bars: list[Bar] = []
    for name, (path, streams) in ctf_files(folder, megabytes).items():
        request = {"kind": "ctf", "path": str(path), "streams": streams}
        sides: dict[str, Sweep] = {
            "torchmn": lambda p=path, s=streams: timed(lambda: read_ctf(p, s))
        }
        if cntk is not None:
            sides["CNTK"] = lambda r=request: cntk.sweep(r)
        found = take_turns(sides, rounds)
        per_sample = path.stat().st_size / 1e6 / sum(1 for _ in path.open())
        bars += compare(f"CTF {name}", found, "torchmn", "CNTK", ">= 1.0")
        bars += bars_of(f"CTF {name}", found, per_sample, "MB")
    return bars


# ---- JPEG


class Photos:
    """Photos in a folder with a map file, and in a tar of WebDataset."""

    def __init__(self, data: Path, folder: Path, count: int) -> None:
        self.map_file = folder / "map.txt"
        self.shard = folder / "photos-000000.tar"
        self.paths: list[Path] = []
        lines = []
        archive = data / "flower-photos-160" / "flower_photos_160.tar"
        with tarfile.open(archive) as tar, tarfile.open(self.shard, "w") as shard:
            photos = (member for member in tar if member.name.lower().endswith(".jpg"))
            for number, member in enumerate(itertools.islice(photos, count)):
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                path = folder / f"{number:05d}.jpg"
                path.write_bytes(content)
                self.paths.append(path)
                lines.append(f"{path}\t{number % 5}\n")
                for name, part in (("jpg", content), ("cls", b"%d" % (number % 5))):
                    info = tarfile.TarInfo(f"{number:05d}.{name}")
                    info.size = len(part)
                    shard.addfile(info, io.BytesIO(part))
        self.map_file.write_text("".join(lines))


def read_images(map_file: Path, chain: Sequence[Any]) -> int:
    streams = {
        "features": StreamDef(field="image", transforms=chain),
        "labels": StreamDef(field="label", shape=5),
    }
    source = MinibatchSource(ImageDeserializer(map_file, streams), max_sweeps=1)
    samples = 0
    while minibatch := source.next_minibatch(MINIBATCH):
        samples += minibatch[source["features"]].num_samples
    return samples


def centre_of(image: Any) -> Any:
    top, left = (image.shape[0] - SIDE) // 2, (image.shape[1] - SIDE) // 2
    return image[top : top + SIDE, left : left + SIDE]


def bare_loop(photos: Photos) -> int:
    """What one writes by hand: read, decode, cut, and fill the tensor of a batch."""
    import simplejpeg

    for begin in range(0, len(photos.paths), MINIBATCH):
        paths = photos.paths[begin : begin + MINIBATCH]
        batch = torch.empty(len(paths), 3, SIDE, SIDE)
        planes = batch.numpy()
        for row, path in enumerate(paths):
            image = simplejpeg.decode_jpeg(path.read_bytes(), "BGR")
            planes[row] = centre_of(image).transpose(2, 0, 1)
    return len(photos.paths)


def decode_only(photos: Photos) -> int:
    import simplejpeg

    for path in photos.paths:
        simplejpeg.decode_jpeg(path.read_bytes(), "BGR")
    return len(photos.paths)


def web_dataset(photos: Photos) -> int:
    import webdataset

    def planes(image: Any) -> torch.Tensor:
        return torch.from_numpy(centre_of(image).transpose(2, 0, 1).astype(np.float32))

    dataset = webdataset.WebDataset(str(photos.shard), shardshuffle=False)
    dataset = dataset.decode("rgb8").to_tuple("jpg", "cls").map_tuple(planes, int)
    return sum(len(images) for images, _ in dataset.batched(MINIBATCH))


def bench_images(photos: Photos, cntk: Cntk | None, rounds: int) -> list[Bar]:
    def ours(chain: Sequence[Any]) -> Sweep:
        return lambda: timed(lambda: read_images(photos.map_file, chain))

    def theirs(chain: list[tuple[str, dict[str, Any]]]) -> Sweep:
        request = {"kind": "images", "path": str(photos.map_file), "transforms": chain}
        return lambda: cntk.sweep(request)  # type: ignore[union-attr]

    scale = {"width": SIDE, "height": SIDE, "channels": 3}
    cut = {"crop_type": "center", "crop_size": SIDE}
    sides: dict[str, Sweep] = {
        "torchmn": ours([transforms.crop("center", crop_size=SIDE)]),
        "bare loop": lambda: timed(lambda: bare_loop(photos)),
        "decoding only": lambda: timed(lambda: decode_only(photos)),
        "WebDataset": lambda: timed(lambda: web_dataset(photos)),
    }
    if cntk is not None:
        sides["CNTK"] = theirs([("crop", cut), ("scale", scale)])
    found = take_turns(sides, rounds)
    bars = [
        *compare("JPEG", found, "torchmn", "bare loop", ">= 0.9"),
        *compare("JPEG", found, "torchmn", "WebDataset", ">= 1.0"),
        *compare("JPEG", found, "torchmn", "CNTK", ">= 1.0"),
        *bars_of("JPEG", found, 1, "images"),
    ]
    random_cut = {"crop_type": "randomside", "side_ratio": 0.8}
    sides = {
        "torchmn": ours([transforms.crop("randomside", side_ratio=0.8), transforms.scale(**scale)])
    }
    if cntk is not None:
        sides["CNTK"] = theirs([("crop", random_cut), ("scale", scale)])
    found = take_turns(sides, rounds)
    bars += compare("JPEG, cut and scaled", found, "torchmn", "CNTK", ">= 1.0")
    bars += bars_of("JPEG, cut and scaled", found, 1, "images")
    return bars


def bench_decoders(photos: Photos, rounds: int) -> list[Bar]:
    """The choice of the library: decoding from memory."""
    contents = [path.read_bytes() for path in photos.paths]

    def through(name: str) -> Callable[[bytes], Any]:
        if name == "Pillow":
            module = pillow()
            return lambda content: np.asarray(module.open(io.BytesIO(content)).convert("RGB"))
        if name == "simplejpeg":
            import simplejpeg

            return lambda content: simplejpeg.decode_jpeg(content, "BGR")
        import kornia_rs

        return kornia_rs.io.decode_image_jpeg  # type: ignore[no-any-return]

    def side(name: str) -> Sweep:
        def work() -> int:
            decode = through(name)
            for content in contents:
                decode(content)
            return len(contents)

        return lambda: timed(work)

    names = ("Pillow", "simplejpeg", "kornia-rs (Rust)")
    found = take_turns({name: side(name) for name in names}, rounds)
    return [bar for bar in bars_of("decoder", found, 1, "images") if "clock" not in bar.bar]


# ---- memory


def bench_memory(folder: Path, megabytes: int) -> list[Bar]:
    """A file much larger than the window; the growth is compared with the window's text."""
    dimension = 100
    rng = np.random.default_rng(0)
    block = "".join(
        f"|x {' '.join(f'{value:.5f}' for value in row)}\n"
        for row in rng.standard_normal((5000, dimension))
    )
    small, large = folder / "small.ctf", folder / "large.ctf"
    small.write_text(block)
    with large.open("w") as file:
        for _ in range(max(megabytes * 10**6 // len(block), 1)):
            file.write(block)
    script = Path(__file__).parent / "reading" / "memory.py"
    try:
        done = subprocess.run(
            [
                sys.executable,
                str(script),
                str(large),
                str(small),
                str(dimension),
                str(WINDOW_IN_CHUNKS),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        size = large.stat().st_size
    finally:
        large.unlink()
    growth = int(done.stdout.split()[1])
    window = WINDOW_IN_CHUNKS * CHUNK_BYTES
    limit = 1.25
    bar = Bar(f"memory / text of the window, {size / 1e9:.1f} GB of CTF", growth / window, "ratio")
    bar.limit, bar.holds = f"<= {limit}", growth / window <= limit
    return [bar, Bar("memory", growth / 1e6, "MB")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("TORCHMN_TEST_DATA"))
    parser.add_argument("--quick", action="store_true", help="small files and few turns")
    parser.add_argument(
        "--large-mb", type=int, default=2000, help="megabytes of the large CTF file"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 3 if options.quick else 11
    print(f"load of the machine at the beginning: {os.getloadavg()}")
    cntk = Cntk() if (PEERS / "cntk" / "run").exists() else None
    if cntk is None:
        print("not measured: CNTK: run scripts/setup_peers.sh cntk", file=sys.stderr)
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            bars += bench_ctf(folder, cntk, rounds, 5 if options.quick else 40)
            if options.data is None:
                print("not measured: JPEG: set TORCHMN_TEST_DATA", file=sys.stderr)
            else:
                photos = Photos(options.data, folder, 100 if options.quick else NUM_PHOTOS)
                bars += bench_images(photos, cntk, rounds)
                bars += bench_decoders(photos, rounds)
        finally:
            if cntk is not None:
                cntk.close()
        bars += bench_memory(
            folder, min(options.large_mb, 400) if options.quick else options.large_mb
        )
    print(f"load of the machine at the end: {os.getloadavg()}")
    return report("reading", bars)


if __name__ == "__main__":
    raise SystemExit(main())
