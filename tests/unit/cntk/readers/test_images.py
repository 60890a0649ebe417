"""Images from map files and from base64."""

import base64
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from torchmn.cntk.readers import decoding, deserializer, images
from torchmn.cntk.readers.deserializer import StreamDef
from torchmn.cntk.readers.images import Base64ImageDeserializer, ImageDeserializer
from torchmn.cntk.readers.minibatch_source import MinibatchSource
from torchmn.cntk.readers.transforms import color, crop, scale
from torchmn.errors import DataError, UnsupportedError, UsageError

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def pixels(number: int, rows: int = 6, columns: int = 8) -> Any:
    """Red, green, blue."""
    return np.random.default_rng(number).integers(0, 256, (rows, columns, 3), np.uint8)


def encoded(array: Any, kind: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    PIL.fromarray(array).save(content, kind, **options)
    return content.getvalue()


def make(folder: Path, lines: str | bytes | None = None, count: int = 3) -> str:
    for number in range(count):
        (folder / f"{number}.png").write_bytes(encoded(pixels(number)))
    if lines is None:
        lines = "".join(f".../{number}.png\t{number % 4}\n" for number in range(count))
    path = folder / "map.txt"
    path.write_bytes(lines.encode() if isinstance(lines, str) else lines)
    return str(path)


def streams(*transforms: Any, classes: int | None = 4) -> dict[str, StreamDef]:
    found = {"features": StreamDef(field="image", transforms=list(transforms))}
    if classes:
        found["labels"] = StreamDef(field="label", shape=classes)
    return found


def read(
    deserializer: ImageDeserializer | Base64ImageDeserializer, seed: tuple[int, int] = (0, 0)
) -> tuple[torch.Tensor, torch.Tensor]:
    found = [
        deserializer.get_chunk(number).sequences(np.arange(info.num_sequences), seed)
        for number, info in enumerate(deserializer.chunk_infos())
    ]
    labels = [part["labels"][0].to_dense() for part in found if "labels" in part]
    return torch.cat([part["features"][0] for part in found]), torch.cat(labels or [torch.zeros(0)])


def bgr_planes(array: Any) -> torch.Tensor:
    return torch.from_numpy(array[:, :, ::-1].transpose(2, 0, 1).astype(np.float32))


class TestMapFiles:
    def test_images_are_planes_of_blue_green_red_and_labels_one_hot(self, tmp_path: Path) -> None:
        deserializer = ImageDeserializer(make(tmp_path), streams())
        features, labels = read(deserializer)
        assert torch.equal(features, torch.stack([bgr_planes(pixels(n)) for n in range(3)]))
        assert labels.tolist() == torch.eye(4)[:3].tolist()
        image, label = deserializer.stream_infos()
        assert (image.shape, image.storage_format) == ((3, 6, 8), "dense")
        assert (label.shape, label.storage_format) == ((4,), "sparse")

    def test_paths_ids_blank_lines_and_marks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.writestr("in/side.png", encoded(pixels(9)))
        (tmp_path / "at@.png").write_bytes(encoded(pixels(8)))
        text = (
            f"\ufeff{tmp_path}/0.png\t0\r\n\r\n7\t...\\1.png\t1\r\n2.png\t2\n"
            f".../a.zip@/in/side.png\t3\n.../a.zip@\\in\\side.png\t3\n.../at@.png\t0"
        )
        path = make(tmp_path, text)
        monkeypatch.chdir(tmp_path)
        features, labels = read(ImageDeserializer(path, streams()))
        assert torch.equal(
            features, torch.stack([bgr_planes(pixels(n)) for n in (0, 1, 2, 9, 9, 8)])
        )
        assert labels.argmax(1).tolist() == [0, 1, 2, 3, 3, 0]

    def test_it_can_be_sent_to_a_worker_process(self, tmp_path: Path) -> None:
        deserializer = ImageDeserializer(make(tmp_path), streams(scale(4, 4, 3)))
        copy = pickle.loads(pickle.dumps(deserializer))
        assert torch.equal(read(copy)[0], read(deserializer)[0])

    def test_labels_may_be_left_out(self, tmp_path: Path) -> None:
        path = make(tmp_path, ".../0.png\tcat\n")
        assert len(read(ImageDeserializer(path, streams(classes=None)))[0]) == 1

    def test_grey(self, tmp_path: Path) -> None:
        path = make(tmp_path)
        features, _ = read(ImageDeserializer(path, streams(scale(8, 6, 1))))
        expected = np.asarray(PIL.fromarray(pixels(0)).convert("L"))
        assert features[0, 0].tolist() == expected.tolist()

    def test_each_image_has_ten_views(self, tmp_path: Path) -> None:
        path = make(tmp_path)
        transforms = crop("multiview10", crop_size=4), scale(4, 4, 3)
        deserializer = ImageDeserializer(path, streams(*transforms))
        features, labels = read(deserializer)
        assert deserializer.chunk_infos()[0].num_samples == len(features) == 30
        assert labels.argmax(1).tolist() == [0] * 10 + [1] * 10 + [2] * 10
        whole = bgr_planes(pixels(0))
        assert torch.equal(features[3], whole[:, 2:, 4:])
        assert torch.equal(features[8], whole[:, 2:, 4:].flip(2))

    def test_random_transforms_depend_on_seed_sweep_and_sequence_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = make(tmp_path, count=6)
        random_transforms = (
            crop("randomside", side_ratio=(0.5, 0.9), jitter_type="uniratio"),
            scale(5, 5, 3),
            color(0.2, 0.2, 0.2),
        )
        whole, _ = read(ImageDeserializer(path, streams(*random_transforms)), (3, 1))
        monkeypatch.setattr(images, "IMAGES_PER_CHUNK", 4)
        again = ImageDeserializer(path, streams(*random_transforms))
        some = again.get_chunk(1).sequences(np.array([1, 0, 1]), (3, 1))["features"][0]
        assert torch.equal(some, whole[[5, 4, 5]])
        for seed in ((3, 2), (4, 1)):
            other = again.get_chunk(1).sequences(np.array([1]), seed)["features"][0]
            assert not torch.equal(other[0], whole[5])


def test_images_of_several_chunks_are_put_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "IMAGES_PER_CHUNK", 2)
    deserializer = ImageDeserializer(make(tmp_path, count=7), streams())
    for seed in range(3):
        source = MinibatchSource(deserializer, max_sweeps=1, randomization_seed=seed)
        minibatch = source.next_minibatch(7)
        data = minibatch[source.streams.features].data
        labels = minibatch[source.streams.labels].data.to_dense().argmax(1).tolist()
        numbers = [
            n for image in data for n in range(7) if torch.equal(image, bgr_planes(pixels(n)))
        ]
        assert [n % 4 for n in numbers] == labels
        assert sorted(numbers) == list(range(7))
        source.close()


class TestErrors:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (".../1.png", "line 2: 1 columns"),
            ("a\t.../1.png\t1\t2", "line 2: 4 columns"),
            ("\t1", "line 2, column 1: no path"),
            (".../1.png\t4", "line 2, column 11: the label '4' is no class from 0 to 3"),
            (".../1.png\t-1", "line 2, column 11: the label '-1'"),
            ("5\t.../1.png\tcat", "line 2, column 13: the label 'cat'"),
            (".../1.png\t" + "9" * 5000, "line 2, column 11: the label '9999"),
            ("x\0y\t1", "line 2, column 1: no path"),
            ("x" * 70000, "line 2: more than 65536 bytes"),
        ],
    )
    def test_wrong_lines_are_named(self, tmp_path: Path, line: str, message: str) -> None:
        path = make(tmp_path, f".../0.png\t0\n{line}\n.../2.png\t2\n")
        with pytest.raises(DataError, match=message) as caught:
            ImageDeserializer(path, streams())
        assert path in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("absent.png", "No such file"),
            (".", "a folder"),
            ("pipe", "a pipe or a device"),
            ("text.png", "no image, or a damaged one"),
            ("empty.png", "no image, or a damaged one"),
            ("short.png", "no image, or a damaged one"),
            ("short.jpg", "damaged"),
            ("no.zip@/x.png", "No such file"),
            ("text.png@/x.png", "File is not a zip file"),
            ("a.zip@/absent.png", "the archive has no file absent.png"),
            ("bad.zip@/x.png", "cannot be read"),
        ],
    )
    def test_images_that_cannot_be_read(self, tmp_path: Path, name: str, message: str) -> None:
        path = make(tmp_path, f".../0.png\t0\n.../{name}\t1\n")
        jpeg = encoded(pixels(0, 40, 40), "JPEG")
        for file, content in {
            "text.png": b"hello",
            "empty.png": b"",
            "short.png": encoded(pixels(1))[:-30],
            "short.jpg": jpeg[: len(jpeg) // 2],
        }.items():
            (tmp_path / file).write_bytes(content)
        for archive in ("a.zip", "bad.zip"):
            with zipfile.ZipFile(tmp_path / archive, "w", zipfile.ZIP_DEFLATED) as file_:
                file_.writestr("x.png", b"x" * 1000)
        damaged = bytearray((tmp_path / "bad.zip").read_bytes())
        damaged[36:40] = b"\xff" * 4
        (tmp_path / "bad.zip").write_bytes(damaged)
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(DataError, match=f"{path}, line 2: .*{message}"):
            read(ImageDeserializer(path, streams()))

    def test_images_of_another_size(self, tmp_path: Path) -> None:
        path = make(tmp_path)
        (tmp_path / "1.png").write_bytes(encoded(pixels(1, 7, 8)))
        with pytest.raises(DataError, match=r"line 2: .*8 x 7 .* 8 x 6 with 3\. Add scale"):
            read(ImageDeserializer(path, streams()))

    def test_a_huge_image_is_refused_before_it_is_decoded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decoding, "MAX_PIXELS", 47)
        with pytest.raises(DataError, match="line 1: .*8 x 6 pixels, more than 47"):
            ImageDeserializer(make(tmp_path), streams())
        (tmp_path / "0.png").write_bytes(encoded(pixels(0), "JPEG"))
        with pytest.raises(DataError, match="line 1: .*8 x 6 pixels, more than 47"):
            ImageDeserializer(make(tmp_path, count=0, lines=".../0.png\t0"), streams())

    def test_map_files_without_images(self, tmp_path: Path) -> None:
        for lines in ("", "\n \n"):
            with pytest.raises(DataError, match="lists no images"):
                ImageDeserializer(make(tmp_path, lines), streams())
        with pytest.raises(DataError, match="a folder"):
            ImageDeserializer(tmp_path, streams())

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({}, "have the fields"),
            ({"x": StreamDef(field="pixels")}, "have the fields"),
            ({"x": StreamDef(field="image"), "y": StreamDef(field="label")}, "number of"),
            ({"x": StreamDef(field="image", transforms=[len])}, "A transform"),
            ({"x": StreamDef(field="image", shape=(3, 9, 9))}, "Leave the shape out"),
            (
                {"x": StreamDef(field="image", transforms=[scale(1, 1, 1), scale(1, 1, 3)])},
                "several",
            ),
        ],
    )
    def test_streams_that_images_cannot_have(
        self, tmp_path: Path, wrong: dict[str, StreamDef], message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            ImageDeserializer(make(tmp_path), wrong)

    def test_the_extra_is_named_if_pillow_is_missing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
        with pytest.raises(UnsupportedError, match=r"pip install 'torchmn\[images\]'"):
            ImageDeserializer(make(tmp_path, count=0, lines=make_png(tmp_path)), streams())


def make_png(folder: Path) -> str:
    (folder / "one.png").write_bytes(b"\x89PNG")
    return ".../one.png\t0\n"


class TestJpeg:
    @pytest.mark.parametrize("has_simplejpeg", [True, False])
    def test_is_decoded_as_by_pillow(
        self, has_simplejpeg: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if has_simplejpeg:
            pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
        else:
            monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)
        for mode, channels in (("RGB", 3), ("L", 3), ("L", 1)):
            content = io.BytesIO()
            PIL.fromarray(pixels(1, 30, 20)).convert(mode).save(content, "JPEG")
            found = decoding.decode(content.getvalue(), channels)
            expected = PIL.open(content).convert("RGB" if channels == 3 else "L")
            array = np.asarray(expected).reshape(30, 20, channels)[:, :, ::-1]
            np.testing.assert_array_equal(found, array)

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_is_turned_as_exif_says(self, orientation: int) -> None:
        from PIL import ImageOps

        exif = PIL.Exif()
        exif[0x0112] = orientation
        content = encoded(pixels(2, 16, 24), "JPEG", exif=exif)
        comment = b"\xff\xfe\x00\x66" + bytes(100)  # another segment may come before EXIF's
        content = content[:2] + comment + content[2:]
        turned = ImageOps.exif_transpose(PIL.open(io.BytesIO(content)))
        expected = np.asarray(turned)[:, :, ::-1]
        np.testing.assert_array_equal(decoding.decode(content, 3), expected)

    @pytest.mark.parametrize("reduction", [2, 4, 8])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_is_decoded_to_a_smaller_size(
        self, reduction: Literal[2, 4, 8], channels: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """About the means of squares, of whichever library; the last ones may be incomplete."""
        rows, columns = np.mgrid[0:45, 0:67]
        smooth = np.stack([rows * 2, columns * 2, rows + columns], axis=2).astype(np.uint8)
        pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
        for kind, has_simplejpeg in (("PNG", True), ("JPEG", True), ("JPEG", False)):
            if not has_simplejpeg:
                monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)
            options = {"quality": 95} if kind == "JPEG" else {}
            content = encoded(smooth, kind, **options)
            whole = decoding.decode(content, channels).astype(float)
            found = decoding.decode(content, channels, reduction=reduction)
            assert found.shape == (-(-45 // reduction), -(-67 // reduction), channels)
            height, width = 45 // reduction, 67 // reduction
            squares = whole[: height * reduction, : width * reduction]
            squares = squares.reshape(height, reduction, width, reduction, channels)
            np.testing.assert_allclose(found[:height, :width], squares.mean(axis=(1, 3)), atol=4)


class TestBase64:
    def test_lines_with_and_without_ids(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = [base64.b64encode(encoded(pixels(n))).decode() for n in range(5)]
        ids = ["0\t", "", "2\t", "", "4\t"]
        text = "".join(f"{ids[n]}{n % 4}\t{content[n]} \r\n\n" for n in range(5))
        path = tmp_path / "images.txt"
        path.write_text(text.rstrip())
        for size in (512, 2, 1):
            monkeypatch.setattr(images, "IMAGES_PER_CHUNK", size)
            deserializer = Base64ImageDeserializer(path, streams(color(0.1)))
            features, labels = read(deserializer)
            assert labels.argmax(1).tolist() == [0, 1, 2, 3, 0]
            if size == 512:
                whole = features
            assert torch.equal(features, whole)
            assert deserializer.num_chunks() == -(-5 // size)
        path.write_text(text)
        with pytest.raises(DataError, match="the file has changed since it was first read"):
            read(deserializer)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("1", "line 3: 1 columns"),
            ("1\t2\t3\t4", "line 3: 4 columns"),
            ("5\taa==", "line 3, column 1: the label '5'"),
            ("a\t1\ta*==", "line 3, column 5: not base64"),
            ("1\tAAAA", "line 3, column 3: no image"),
        ],
    )
    def test_wrong_lines_are_named(self, tmp_path: Path, line: str, message: str) -> None:
        good = f"0\t{base64.b64encode(encoded(pixels(0))).decode()}\n"
        path = tmp_path / "images.txt"
        path.write_text(f"{good}\n{line}\n{good}")
        with pytest.raises(DataError, match=message) as caught:
            read(Base64ImageDeserializer(path, streams()))
        assert str(path) in str(caught.value)

    def test_files_that_cannot_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "images.txt"
        path.write_text("\n")
        with pytest.raises(DataError, match="lists no images"):
            Base64ImageDeserializer(path, streams())
        monkeypatch.setattr(images, "MAX_BASE64_LINE_BYTES", 40)
        path.write_text("\n" + "1\t" + "A" * 100)
        with pytest.raises(DataError, match="line 2: more than 40 bytes"):
            Base64ImageDeserializer(path, streams())


@pytest.mark.parametrize(
    "name",
    ["CBFDeserializer", "HTKFeatureDeserializer", "HTKMLFDeserializer", "LatticeDeserializer"],
)
def test_other_formats_name_what_to_use(name: str) -> None:
    with pytest.raises(UnsupportedError, match="CTF"):
        getattr(deserializer, name)("file", {})


# ---- any bytes
