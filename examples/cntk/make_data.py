"""Write CIFAR-10 as map files, or MNIST as text, in the formats of CNTK's examples.

    python examples/cntk/make_data.py cifar10 --download --data-root archives --out data/cifar10
    python examples/cntk/make_data.py mnist --download --data-root archives --out data/mnist

CIFAR-10 becomes PNG files in ``train`` and ``test``, ``train_map.txt``, ``test_map.txt`` and the
mean of the training images, ``CIFAR-10_mean.xml``. MNIST becomes ``Train-28x28_cntk_text.txt`` and
``Test-28x28_cntk_text.txt``. Archives are downloaded from the official addresses, or from a
``--mirror``, and compared with their checksums.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.data import TensorDataset

import torchmn
from torchmn.cntk.readers import write_mean_image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets import load_images


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write images in the formats of CNTK's examples.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("dataset", choices=["cifar10", "mnist"], help="images")
    add("--out", type=Path, default=Path("data"), help="folder to write to")
    add("--data-root", help="folder or file of the archives")
    add("--download", action="store_true", help="download them if they are missing")
    add("--mirror", help="address to download from instead of the official one")
    add("--images", type=int, help="write the first images of each part only")
    options = parser.parse_args()
    found = load_images(
        options.dataset, options.data_root, download=options.download, mirror=options.mirror
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for part, data in (("train", found.train), ("test", found.test)):
        pixels, labels = bytes_of(data, options.images)
        if options.dataset == "cifar10":
            write_map_file(options.out, part, pixels, labels)
        else:
            write_text(options.out / f"{part.title()}-28x28_cntk_text.txt", pixels, labels)
        print(f"{len(labels)} images of {found.path} for {part} are in {options.out}", flush=True)


def bytes_of(data: TensorDataset, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Pixels as in the archive, uint8 (images, channels, height, width), and labels."""
    images, labels = (tensor[:limit] for tensor in data.tensors)
    return (images * 255).round().byte().numpy(), labels.numpy()


def write_map_file(out: Path, part: str, pixels: np.ndarray, labels: np.ndarray) -> None:
    (out / part).mkdir(exist_ok=True)
    lines = []
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        name = f"{part}/{number:05}.png"
        Image.fromarray(image.transpose(1, 2, 0)).save(out / name)
        lines.append(f".../{name}\t{label}")
    if part == "train":
        mean = pixels.mean(axis=0, dtype=np.float64)[::-1]  # blue, green, red
        write_mean_image(out / "CIFAR-10_mean.xml", mean)
    write_lines(out / f"{part}_map.txt", lines)


def write_text(path: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    one_hot = np.eye(10, dtype=np.uint8)
    write_lines(
        path,
        (
            f"|labels {joined(one_hot[label])} |features {joined(image)}"
            for image, label in zip(pixels, labels, strict=True)
        ),
    )


def joined(numbers: np.ndarray) -> str:
    return " ".join(map(str, numbers.ravel().tolist()))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """The file has its name when it is complete."""
    part = path.with_suffix(".part")
    with part.open("w") as file:
        file.writelines(f"{line}\n" for line in lines)
    part.replace(path)


if __name__ == "__main__":
    torchmn.run_main(main)
