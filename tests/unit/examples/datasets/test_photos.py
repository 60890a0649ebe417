"""Photos of a folder, of a map file and of shards are the same samples."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.datasets.photos import (
    CENTER_CROP,
    RANDOM_CROP,
    PhotoList,
    Photos,
    find_photos,
    whole_batch,
)
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader

from tests.unit.examples.datasets.makers import unpack_flowers
from torchmn.cntk.readers.decoding import decode
from torchmn.cntk.readers.transforms import Draw
from torchmn.errors import DataError
from torchmn.testing import run_ranks

pytest.importorskip("PIL", reason="Pillow is not installed")
CLASSES = ["daisy", "dandelion", "roses", "sunflowers", "tulips"]


@pytest.fixture(scope="module")
def flowers(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_flowers(real_data, tmp_path_factory.mktemp("flowers"), train=3, val=2)


def found(root: Path, part: str = "train") -> PhotoList:
    """What two ranks have found, which is the same."""
    lists = run_ranks(lambda comm: find_photos(root, part, comm), 2)
    assert (lists[0].files == lists[1].files).all()
    assert (lists[0].places == lists[1].places).all()
    return lists[0]


def add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))


def paths(root: Path) -> list[tuple[Path, int]]:
    return [
        (path, label)
        for label, name in enumerate(CLASSES)
        for path in sorted((root / "train" / name).iterdir())
    ]


def test_folder_map_file_and_shards_give_the_same_samples(flowers: Path, tmp_path: Path) -> None:
    (tmp_path / "map").mkdir()
    lines = [f"{path}\t{label}\n" for path, label in paths(flowers)]
    (tmp_path / "map" / "train_map.txt").write_text("".join(lines))
    (tmp_path / "shards").mkdir()
    for number in range(2):
        with tarfile.open(tmp_path / "shards" / f"train-{number}.tar", "w") as shard:
            for path, label in paths(flowers)[number * 8 : number * 8 + 8]:
                add(shard, f"{path.stem}.cls", str(label).encode())
                add(shard, f"{path.stem}.jpg", path.read_bytes())
    lists = [found(root) for root in (flowers, tmp_path / "map", tmp_path / "shards")]
    assert [len(photos.files) for photos in lists] == [15, 15, 2]
    expected, *others = (list(Photos(photos, 32, seed=1)) for photos in lists)
    assert [int(label) for _, label in expected] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    for other in others:
        for one, two in zip(expected, other, strict=True):
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1], two[1])


def test_what_is_random_depends_on_seed_epoch_and_photo(flowers: Path) -> None:
    photos = found(flowers)

    def images(seed: int, epoch: int, workers: int = 0) -> torch.Tensor:
        dataset = Photos(photos, 32, seed=seed)
        dataset.epoch = epoch
        loader = DataLoader(dataset, 4, num_workers=workers, collate_fn=whole_batch)
        return torch.cat([batch for batch, _ in loader])

    first = images(0, 0)
    assert (first.shape, first.dtype) == ((15, 3, 32, 32), torch.uint8)
    assert torch.equal(first, images(0, 0, workers=2))
    for other in (images(0, 1), images(1, 0)):
        differs = (first != other).flatten(1).any(dim=1)
        assert differs.all()
    centre = Photos(photos, 32)
    same = centre[3][0]
    centre.epoch = 1
    assert torch.equal(same, centre[3][0])


@pytest.mark.parametrize("seed", [None, 0])
def test_batches_have_the_pixels_of_the_part(flowers: Path, seed: int | None) -> None:
    """Of large parts too, which are decoded to a smaller size; each photo alone is the same."""
    transform = CENTER_CROP if seed is None else RANDOM_CROP
    listed = found(flowers)
    for size in (12, 40, 200):
        photos = Photos(listed, size, seed=seed)
        images, labels = photos.__getitems__(range(len(photos)))
        assert images.shape == (15, 3, size, size)
        assert images.is_contiguous(memory_format=torch.channels_last)
        for index in range(0, 15, 4):
            image, label = photos[index]
            assert torch.equal(image, images[index])
            assert label == labels[index]
            whole = decode(listed.read(index)[0], 3)
            part = transform.apply(whole, Draw(seed or 0, 0, index)).astype(np.float32)
            planes = torch.from_numpy(part).permute(2, 0, 1).unsqueeze(0)
            expected = interpolate(planes, (size, size), mode="bilinear", antialias=True)[0]
            difference = (image.float() - expected).abs()
            if size == 12:  # the part begins a little beside its place
                assert difference.mean() < (image.float().flip(2) - expected).abs().mean() / 2
            else:
                assert difference.max() < 3  # of 255


def test_val_has_the_classes_of_train(flowers: Path, tmp_path: Path) -> None:
    assert found(flowers, "val").num_classes == 5
    (tmp_path / "train" / "daisy").mkdir(parents=True)
    (tmp_path / "val" / "weeds").mkdir(parents=True)
    with pytest.raises(DataError, match=r"weeds is a class that .* does not have"):
        found(tmp_path, "val")


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no photos for 'train'"):
        found(tmp_path)
    with tarfile.open(tmp_path / "train-0.tar", "w") as shard:
        add(shard, "a.jpg", b"")
    with pytest.raises(DataError, match=r"a should have an image and a label, a\.cls"):
        found(tmp_path)
    (tmp_path / "train-0.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(DataError, match="no tar file of images"):
        found(tmp_path)
    (tmp_path / "train-0.tar").unlink()
    (tmp_path / "train_map.txt").write_text("a.jpg\t0\nb.jpg\tc\n")
    with pytest.raises(DataError, match="line 2: it should be path, a tab and label"):
        found(tmp_path)
    (tmp_path / "a.jpg").write_bytes(b"no image")
    (tmp_path / "train_map.txt").write_text(".../a.jpg\t0\n")
    with pytest.raises(DataError, match=r"photo 0, in .*a\.jpg: no image"):
        Photos(found(tmp_path), 32)[0]
