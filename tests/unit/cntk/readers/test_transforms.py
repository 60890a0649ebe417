"""Transforms of images, beside their formulas."""

import colorsys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchmn.cntk.readers.mean_image import write_mean_image
from torchmn.cntk.readers.transforms import Draw, color, crop, mean, scale
from torchmn.errors import DataError, UnknownNameError, UsageError

ROWS, COLUMNS = 40, 60
IMAGE: Any = np.arange(ROWS * COLUMNS * 3, dtype=np.uint32).reshape(ROWS, COLUMNS, 3)


def draws(count: int = 200) -> list[Draw]:
    return [Draw(0, 0, number) for number in range(count)]


class TestCrop:
    @pytest.mark.parametrize(
        ("options", "width", "height"),
        [
            ({"crop_size": 20}, 20, 20),
            ({"crop_size": "30:20"}, 30, 20),
            ({"crop_size": (30, 20)}, 30, 20),
            ({"crop_size": 50}, 50, 40),
            ({"side_ratio": 0.5}, 20, 20),
            ({"side_ratio": "0.5:0.8"}, 20, 20),  # without jitter the lower end
            ({"area_ratio": 0.25}, 24, 24),  # sqrt(40 * 60 * 0.25) = 24.49
            ({}, 60, 40),
        ],
    )
    def test_the_centre(self, options: dict[str, Any], width: int, height: int) -> None:
        cut = crop(**options).apply(IMAGE, Draw(0, 0, 0))
        left, top = (COLUMNS - width) // 2, (ROWS - height) // 2
        np.testing.assert_array_equal(cut, IMAGE[top : top + height, left : left + width])

    def test_random_places_cover_the_image_and_half_are_mirrored(self) -> None:
        transform = crop("randomside", side_ratio=0.5)
        places = set()
        mirrored = 0
        for draw in draws():
            cut = transform.apply(IMAGE, draw)
            is_mirrored = bool(cut[0, 0, 0] > cut[0, 1, 0])
            mirrored += is_mirrored
            corner = (cut[:, ::-1] if is_mirrored else cut)[0, 0, 0] // 3
            places.add((int(corner) // COLUMNS, int(corner) % COLUMNS))
        assert 70 < mirrored < 130
        assert {row for row, _ in places} == set(range(21))
        assert {column for _, column in places} <= set(range(41))
        assert len({column for _, column in places}) > 35

    def test_jitter_draws_sizes_from_the_range(self) -> None:
        transform = crop("randomside", side_ratio="0.5:0.75", jitter_type="uniratio")
        sizes = {transform.apply(IMAGE, draw).shape[0] for draw in draws()}
        assert sizes == set(range(20, 31))

    def test_the_aspect_ratio_keeps_the_area(self) -> None:
        transform = crop("randomarea", area_ratio=0.25, aspect_ratio=0.64)
        shapes = {transform.apply(IMAGE, draw).shape[:2] for draw in draws()}
        assert shapes == {(19, 30), (30, 19)}

    @pytest.mark.parametrize(
        "options",
        [
            {"crop_type": "corner"},
            {"jitter_type": "unilength"},
            {"crop_type": "randomside"},
            {"side_ratio": 1.5},
            {"side_ratio": "0.8:0.5"},
            {"side_ratio": "a:b"},
            {"side_ratio": float("nan")},
            {"side_ratio": 0.5, "area_ratio": 0.5},
            {"aspect_ratio": 0},
            {"crop_size": -1},
            {"crop_size": 2.5},
        ],
    )
    def test_arguments_that_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(UsageError):
            crop(**options)


def bilinear(image: Any, width: int, height: int) -> Any:
    """The weighted mean of the four nearest pixels, with the edges repeated."""
    rows, columns = image.shape[:2]
    found = np.empty((height, width, image.shape[2]))
    for i in range(height):
        for j in range(width):
            y, x = (i + 0.5) * rows / height - 0.5, (j + 0.5) * columns / width - 0.5
            top, left = int(np.floor(y)), int(np.floor(x))
            total = np.zeros(image.shape[2])
            for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
                weight = (1 - abs(y - top - dy)) * (1 - abs(x - left - dx))
                at = np.clip(top + dy, 0, rows - 1), np.clip(left + dx, 0, columns - 1)
                total += weight * image[at]
            found[i, j] = total
    return found


class TestScale:
    @pytest.mark.parametrize("size", [(7, 5), (12, 9), (20, 33)])
    def test_linear_is_bilinear(self, size: tuple[int, int]) -> None:
        image = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
        scaled = scale(*size, 3).apply(image, Draw(0, 0, 0))
        assert scaled.shape == (size[1], size[0], 3)
        assert np.abs(scaled - bilinear(image, *size)).max() <= 1

    @pytest.mark.parametrize("interpolation", ["nearest", "linear", "cubic", "lanczos"])
    def test_a_uniform_image_stays_uniform(self, interpolation: Any) -> None:
        if interpolation == "lanczos":
            pytest.importorskip("PIL", reason="Pillow is not installed")
        image = np.full((9, 12, 3), [10, 20, 30], np.uint8)
        scaled = scale(5, 17, 3, interpolation).apply(image, Draw(0, 0, 0))
        assert scaled.shape == (17, 5, 3)
        assert (scaled == [10, 20, 30]).all()

    def test_crop_cuts_the_longer_side(self) -> None:
        image = IMAGE.astype(np.float32)
        scaled = scale(20, 20, 3, scale_mode="crop").apply(image, Draw(0, 0, 0))
        whole = scale(30, 20, 3).apply(image, Draw(0, 0, 0))
        np.testing.assert_array_equal(scaled, whole[:, 5:25])

    @pytest.mark.parametrize("pad_value", [-1, 7])
    def test_pad_fills_the_shorter_side(self, pad_value: int) -> None:
        image = IMAGE.astype(np.float32)
        padded = scale(30, 30, 3, scale_mode="pad", pad_value=pad_value).apply(image, Draw(0, 0, 0))
        whole = scale(30, 20, 3).apply(image, Draw(0, 0, 0))
        np.testing.assert_array_equal(padded[5:25], whole)
        assert (padded[:5] == (whole[0] if pad_value < 0 else 7)).all()

    @pytest.mark.parametrize("mode", ["crop", "pad"])
    def test_a_mode_that_cannot_make_the_size(self, mode: Any) -> None:
        transform = scale(50, 20, 3, scale_mode=mode)
        with pytest.raises(DataError, match=f"scale_mode='{mode}'"):
            transform.apply(IMAGE.astype(np.float32), Draw(0, 0, 0))

    @pytest.mark.parametrize(
        "options",
        [
            {"width": 0},
            {"channels": 4},
            {"interpolations": "area"},
            {"scale_mode": "stretch"},
            {"pad_value": 300},
        ],
    )
    def test_arguments_that_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(UsageError):
            scale(**{"width": 4, "height": 4, "channels": 3, **options})


class TestMean:
    def test_is_subtracted_in_float32(self, tmp_path: Path) -> None:
        planes = np.random.default_rng(0).random((3, 4, 5), np.float32) * 200
        write_mean_image(tmp_path / "mean.xml", planes)
        image = np.random.default_rng(1).integers(0, 256, (4, 5, 3), np.uint8)
        found = mean(tmp_path / "mean.xml").apply(image, Draw(0, 0, 0))
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, image.astype(np.float32) - planes.transpose(1, 2, 0))

    def test_another_size_is_refused(self, tmp_path: Path) -> None:
        write_mean_image(tmp_path / "mean.xml", np.zeros((3, 4, 5)))
        with pytest.raises(DataError, match="5 x 4 pixels with 3 channels.* 60 x 40"):
            mean(tmp_path / "mean.xml").apply(IMAGE, Draw(0, 0, 0))

    def test_an_unknown_layout_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UnknownNameError, match="chw-rgb"):
            mean(tmp_path / "mean.xml", layout="rgb")  # type: ignore[arg-type]


class TestColor:
    def test_saturation_moves_along_the_line_of_hue(self) -> None:
        image = np.random.default_rng(0).integers(0, 256, (5, 5, 3)).astype(np.float32)
        found = color(saturation_radius=0.5).apply(image, Draw(0, 0, 1))
        ratios = []
        for before, after in zip(image.reshape(-1, 3), found.reshape(-1, 3), strict=True):
            h1, s1, v1 = colorsys.rgb_to_hsv(*before[::-1] / 255)
            h2, s2, v2 = colorsys.rgb_to_hsv(*after[::-1] / 255)
            assert (h2, v2) == pytest.approx((h1, v1), abs=1e-4)
            if 0 < s2 < 0.999:
                ratios.append(s2 / s1)
        assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-4)
        assert 0.5 <= ratios[0] <= 1.5
        assert ratios[0] != 1

    def test_brightness_is_a_part_of_the_mean_and_contrast_a_factor(self) -> None:
        image = np.random.default_rng(0).integers(80, 120, (9, 9, 3)).astype(np.float32)
        shifts = [color(brightness_radius=0.2).apply(image, d) - image for d in draws(50)]
        assert all(np.ptp(shift) < 1e-3 for shift in shifts)
        assert all(abs(shift.mean()) <= 0.2 * image.mean() for shift in shifts)
        assert np.ptp([shift.mean() for shift in shifts]) > 0.2 * image.mean()
        factors = [color(contrast_radius=0.2).apply(image, d) / image for d in draws(50)]
        assert all(np.ptp(factor) < 1e-3 for factor in factors)
        assert all(0.8 <= factor.mean() <= 1.2 for factor in factors)

    def test_values_stay_from_0_to_255_and_the_image_is_not_changed(self) -> None:
        image = np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)
        before = image.copy()
        for draw in draws(20):
            found = color(1, 1, 1).apply(image, draw)
            assert found.dtype == np.float32
            assert found.min() >= -1e-3
            assert found.max() <= 255.001
        np.testing.assert_array_equal(image, before)

    def test_a_radius_outside_of_0_to_1_is_refused(self) -> None:
        with pytest.raises(UsageError, match="contrast_radius=1.5"):
            color(contrast_radius=1.5)
