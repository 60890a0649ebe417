"""Transforms of images: `crop`, `scale`, `mean` and `color`, with CNTK's arguments.

An image is an array (height, width, channels), uint8 as it was decoded or float32, with values from
0 to 255 and the channels in the order blue, green, red. Random numbers come from a `Draw`, which
belongs to one image in one sweep, so that a sample is the same on any number of ranks.

Sizes are rounded, and colours computed, as CNTK's reader does; it takes its random numbers from
generators of its threads, so that ours differ.
"""

import hashlib
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch

from torchmn.base.errors import DataError, UsageError, raise_if_unknown
from torchmn.cntk.readers.mean_image import MeanLayout, read_mean_image

Image = np.ndarray[Any, Any]
Shape = tuple[int, int, int]  # height, width, channels

CropType = Literal["center", "randomside", "randomarea", "multiview10"]
JitterType = Literal["none", "uniratio"]
Interpolation = Literal["nearest", "linear", "cubic", "lanczos"]
ScaleMode = Literal["fill", "crop", "pad"]

NUM_VIEWS = 10
_MAX_ATTEMPTS = 10
_LANCZOS = 1  # Pillow's number
_EIGHT_NUMBERS = struct.Struct("<8Q")


class Draw:
    """The random numbers of one image in one sweep.

    Args:
        seed: the seed of the source.
        sweep: the number of the sweep, from 0.
        sequence: the number of the image in the data set.
        view: the number of the view under ``crop("multiview10")``.
    """

    def __init__(self, seed: int, sweep: int, sequence: int, view: int = 0) -> None:
        self.view = view
        self._key = f"{seed} {sweep} {sequence}"
        self._numbers: list[int] = []

    def uniform(self, low: float, high: float) -> float:
        """A number between two others."""
        if not self._numbers:
            # A hash of the key: to seed a generator takes as long as to decode 50 rows of pixels.
            self._key += "."
            bits = hashlib.blake2b(self._key.encode()).digest()
            self._numbers.extend(_EIGHT_NUMBERS.unpack(bits))
        return low + (high - low) * (self._numbers.pop() >> 11) * 2**-53

    def integer(self, highest: int) -> int:
        """An integer from 0 to ``highest``."""
        return min(int(self.uniform(0, highest + 1)), highest)

    def coin(self) -> bool:
        """True for half of the images."""
        return self.uniform(0, 1) < 0.5


class ImageTransform(Protocol):
    """A transform of images. Transforms of your own have these two methods."""

    def apply(self, image: Image, draw: Draw) -> Image:
        """Return the transformed image, a new array or a view; ``image`` is not changed."""

    def output_shape(self, shape: Shape | None) -> Shape | None:
        """The shape of transformed images of one shape; None if it depends on the image."""


# ---- crop


class Region(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int
    is_mirrored: bool  # left and right are to be exchanged


@dataclass(frozen=True)
class Crop:
    """See `crop`."""

    crop_type: CropType
    width: int
    height: int
    side_ratio: tuple[float, float]
    area_ratio: tuple[float, float]
    aspect_ratio: tuple[float, float]
    jitter_type: JitterType

    def apply(self, image: Image, draw: Draw) -> Image:
        """See `ImageTransform.apply`."""
        rows, columns = image.shape[:2]
        region = self.region(rows, columns, draw)
        below, right = region.top + region.height, region.left + region.width
        cut = image[region.top : below, region.left : right]
        return cut[:, ::-1] if region.is_mirrored else cut

    def region(self, rows: int, columns: int, draw: Draw) -> Region:
        """The region to cut out of an image of this size."""
        width, height = self._size(rows, columns, draw)
        right, down = columns - width, rows - height
        if self.crop_type == "center":
            return Region(down // 2, right // 2, height, width, is_mirrored=False)
        if self.crop_type == "multiview10":
            places = [(0, 0), (right, 0), (0, down), (right, down), (right // 2, down // 2)]
            left, top = places[draw.view % 5]
            return Region(top, left, height, width, is_mirrored=draw.view >= NUM_VIEWS // 2)
        left, top = draw.integer(right), draw.integer(down)
        return Region(top, left, height, width, is_mirrored=draw.coin())

    def output_shape(self, shape: Shape | None) -> Shape | None:
        """See `ImageTransform.output_shape`."""
        if self.width and shape is not None:
            return min(self.height, shape[0]), min(self.width, shape[1]), shape[2]
        return None

    def _size(self, rows: int, columns: int, draw: Draw) -> tuple[int, int]:
        if self.width:
            return min(self.width, columns), min(self.height, rows)
        for _ in range(_MAX_ATTEMPTS):
            width, height = columns, rows
            if self.side_ratio[1]:
                width = height = _rounded(min(rows, columns) * self._jitter(self.side_ratio, draw))
            elif self.area_ratio[1]:
                area = rows * columns * self._jitter(self.area_ratio, draw)
                width = height = _rounded(math.sqrt(area))
            aspect = self._jitter(self.aspect_ratio, draw)
            if aspect != 1:
                size = width * height
                short, long = int(math.sqrt(size * aspect)), int(math.sqrt(size / aspect))
                width, height = (short, long) if draw.coin() else (long, short)
            width, height = max(width, 1), max(height, 1)
            if width <= columns and height <= rows:
                return width, height
        return columns, rows

    def _jitter(self, ratio: tuple[float, float], draw: Draw) -> float:
        low, high = ratio
        return low if self.jitter_type == "none" or low == high else draw.uniform(low, high)


def _rounded(value: float) -> int:
    return int(value + 0.5)  # halves away from zero, not to even


Ratio = float | tuple[float, float] | str


def crop(
    crop_type: CropType = "center",
    crop_size: int | tuple[int, int] | str = 0,
    side_ratio: Ratio = 0.0,
    area_ratio: Ratio = 0.0,
    aspect_ratio: Ratio = 1.0,
    jitter_type: JitterType = "none",
) -> Crop:
    """Cut out a part of an image.

    Args:
        crop_type: ``center``; ``randomside`` and ``randomarea``: at a random place, and mirrored
            half of the time; ``multiview10``: each image becomes ten sequences, its corners and its
            centre, then the same mirrored.
        crop_size: pixels of the side of a square, or ``(width, height)``, or CNTK's
            ``"width:height"``. The ratios are then ignored.
        side_ratio: the side of a square over the shorter side of the image, in (0, 1]; two numbers,
            also as ``"0.5:0.8"``, are the ends of its range.
        area_ratio: the same for the area of a square over that of the image.
        aspect_ratio: the shorter side of the part over the longer one, in (0, 1]; which of them is
            the width is random.
        jitter_type: ``uniratio`` draws each ratio from its range; ``none`` takes the lower end.

    Raises:
        UsageError: a ratio is outside of (0, 1], or both side and area are given.
    """
    raise_if_unknown("crop_type", crop_type, get_args(CropType))
    raise_if_unknown("jitter_type", jitter_type, get_args(JitterType))
    sizes = _two("crop_size", crop_size)
    if min(sizes) < 0 or any(size != int(size) for size in sizes):
        raise UsageError(f"crop_size={crop_size!r} is not a number of pixels, 0 or more.")
    width, height = int(sizes[0]), int(sizes[1])
    side = _ratio("side_ratio", side_ratio, may_be_absent=True)
    area = _ratio("area_ratio", area_ratio, may_be_absent=True)
    if side[1] and area[1]:
        raise UsageError(
            "Both side_ratio and area_ratio are given, and each sets the size: choose one."
        )
    is_random = crop_type in ("randomside", "randomarea")
    if is_random and not (width and height) and not (side[1] or area[1]):
        raise UsageError(
            f"crop_type={crop_type!r} needs a size: side_ratio=..., area_ratio=... or crop_size=..."
        )
    aspect = _ratio("aspect_ratio", aspect_ratio)
    return Crop(
        crop_type, *((width, height) if height else (0, 0)), side, area, aspect, jitter_type
    )


def _two(name: str, value: object) -> tuple[float, float]:
    parts = value.split(":") if isinstance(value, str) else value
    try:
        numbers = [float(part) for part in (parts if isinstance(parts, Sequence) else [parts])]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) not in (1, 2) or not all(map(math.isfinite, numbers)):
        raise UsageError(f"{name}={value!r} is not a number, nor two of them such as '0.5:0.8'.")
    return numbers[0], numbers[-1]


def _ratio(name: str, value: object, *, may_be_absent: bool = False) -> tuple[float, float]:
    low, high = _two(name, value)
    if not (0 < low <= high <= 1 or (may_be_absent and low == high == 0)):
        raise UsageError(
            f"{name}={value!r} must be above 0 and at most 1, and a range in ascending order."
        )
    return low, high


# ---- scale


@dataclass(frozen=True)
class Scale:
    """Resize an image.

    Args:
        width: pixels of the result.
        height: pixels of the result.
        channels: 3, or 1 for images that are to be read in grey.
        interpolations: ``linear`` and ``cubic`` weigh the 4 and 16 nearest pixels, as OpenCV does;
            they do not average over more where an image is made much smaller. ``lanczos`` does, and
            is Pillow's.
        scale_mode: ``fill`` ignores the aspect ratio, ``crop`` keeps it and cuts the longer side,
            ``pad`` keeps it and adds edges to the shorter side.
        pad_value: the brightness of the edges; -1 repeats the outermost pixels.
    """

    width: int
    height: int
    channels: int
    interpolations: Interpolation = "linear"
    scale_mode: ScaleMode = "fill"
    pad_value: int = -1

    def __post_init__(self) -> None:
        raise_if_unknown("interpolations", self.interpolations, get_args(Interpolation))
        raise_if_unknown("scale_mode", self.scale_mode, get_args(ScaleMode))
        width, height = self.width, self.height
        if width < 1 or height < 1 or width * height > 2**28:
            raise UsageError(
                f"scale to {width} x {height} pixels: at least 1 each, and at most 2^28 in all."
            )
        if self.channels not in (1, 3):
            raise UsageError(
                f"channels={self.channels}. An image has 3 channels, or 1 if it is grey."
            )
        if not -1 <= self.pad_value <= 255:
            raise UsageError(f"pad_value={self.pad_value} must be a brightness of 0 to 255, or -1.")

    def apply(self, image: Image, draw: Draw) -> Image:
        """See `ImageTransform.apply`."""
        rows, columns = image.shape[:2]
        if self.scale_mode == "fill":
            return _resized(image, self.width, self.height, self.interpolations)
        by_width = columns < rows if self.scale_mode == "crop" else columns > rows
        if by_width:
            width, height = self.width, max(_rounded(rows * self.width / columns), 1)
        else:
            width, height = max(_rounded(columns * self.height / rows), 1), self.height
        is_crop = self.scale_mode == "crop"
        right, below = self.width - width, self.height - height
        if max(right, below) > 0 if is_crop else min(right, below) < 0:
            size, other = ("smaller", "pad") if is_crop else ("larger", "crop")
            raise DataError(
                f"scale_mode={self.scale_mode!r} makes an image of {columns} x {rows} pixels "
                f"{width} x {height}, which is {size} than {self.width} x {self.height}. Use "
                f"'fill' or '{other}', or an equal width and height."
            )
        resized = _resized(image, width, height, self.interpolations)
        if is_crop:
            left, top = -right // 2, -below // 2
            return resized[top : top + self.height, left : left + self.width]
        top, left = below // 2, right // 2
        edges = (top, self.height - height - top), (left, self.width - width - left), (0, 0)
        if self.pad_value < 0:
            return np.pad(resized, edges, mode="edge")
        return np.pad(resized, edges, constant_values=self.pad_value)

    def output_shape(self, shape: Shape | None) -> Shape | None:
        """See `ImageTransform.output_shape`."""
        return self.height, self.width, self.channels


scale = Scale


def _resized(image: Image, width: int, height: int, interpolation: Interpolation) -> Image:
    if image.shape[:2] == (height, width):
        return image
    if interpolation == "lanczos":
        return _resized_by_pillow(image, width, height)
    tensor = torch.from_numpy(contiguous(image)).permute(2, 0, 1).unsqueeze(0)
    mode = {"nearest": "nearest", "linear": "bilinear", "cubic": "bicubic"}[interpolation]
    corners = None if mode == "nearest" else False
    of_bytes = image.dtype == np.uint8
    if mode == "bicubic" and of_bytes:
        tensor = tensor.float()  # OpenCV's weights, which PyTorch has for floats only
    resized = torch.nn.functional.interpolate(
        tensor, (height, width), mode=mode, align_corners=corners
    )
    if mode == "bicubic" and of_bytes:
        resized = resized.round_().clamp_(0, 255).to(torch.uint8)
    found: Image = resized.squeeze(0).permute(1, 2, 0).numpy()
    return found


def contiguous(image: Image) -> Image:
    """Make the rows of an image contiguous; mirrored ones are copied faster than by NumPy."""
    if image.strides[1] >= 0 or image.dtype != np.uint8:
        return np.ascontiguousarray(image)
    rows = torch.from_numpy(np.ascontiguousarray(image[:, ::-1]))
    found: Image = rows.permute(2, 0, 1).unsqueeze(0).flip(3)[0].permute(1, 2, 0).numpy()
    return found


def _resized_by_pillow(image: Image, width: int, height: int) -> Image:
    from torchmn.cntk.readers.decoding import pillow

    channels = [
        np.asarray(
            pillow()
            .fromarray(np.ascontiguousarray(image[:, :, c]))
            .resize((width, height), _LANCZOS)
        )
        for c in range(image.shape[2])
    ]
    return np.stack(channels, axis=2)


# ---- mean and colour


@dataclass(frozen=True, eq=False)
class Mean:
    """See `mean`. ``image`` is float32 (height, width, channels)."""

    filename: str
    image: Image = field(repr=False)

    def apply(self, image: Image, draw: Draw) -> Image:
        """See `ImageTransform.apply`."""
        if image.shape != self.image.shape:
            raise DataError(
                f"The mean image of {self.filename} is {size_of(self.image)}, and an image that "
                f"comes to it {size_of(image)}. Scale images to the size of the mean before it."
            )
        difference: Image = np.subtract(image, self.image, dtype=np.float32)
        return difference

    def output_shape(self, shape: Shape | None) -> Shape | None:
        """See `ImageTransform.output_shape`."""
        rows, columns, channels = self.image.shape
        return rows, columns, channels


def mean(filename: str | os.PathLike[str], layout: MeanLayout = "hwc-bgr") -> Mean:
    """Subtract a mean image, which an XML file of OpenCV holds.

    Args:
        filename: made by `write_mean_image`, OpenCV or CNTK's scripts; read here and now.
        layout: ``hwc-bgr`` is how CNTK reads every file. ``chw-rgb`` is how its script
            ``install_cifar10.py`` wrote ``CIFAR-10_mean.xml``, so that this reads what was meant.

    Raises:
        DataError: the file cannot be read; names file and line.
    """
    planes = read_mean_image(filename, layout)
    return Mean(os.fspath(filename), np.ascontiguousarray(planes.transpose(1, 2, 0)))


def size_of(image: Image) -> str:
    """Describe the size of an image, for messages."""
    rows, columns, channels = image.shape
    return f"{columns} x {rows} pixels with {channels} channels"


@dataclass(frozen=True)
class Color:
    """Change the colours at random.

    Args:
        brightness_radius: adds up to this part of the image's mean, up or down; 0 to 1.
        contrast_radius: multiplies by 1 plus or minus up to this; 0 to 1.
        saturation_radius: the same for the saturation in HSV; 0 to 1.
    """

    brightness_radius: float = 0.0
    contrast_radius: float = 0.0
    saturation_radius: float = 0.0

    def __post_init__(self) -> None:
        for name, radius in vars(self).items():
            if not 0 <= radius <= 1:
                raise UsageError(f"{name}={radius} must be from 0 to 1.")

    def apply(self, image: Image, draw: Draw) -> Image:
        """See `ImageTransform.apply`."""
        if self.brightness_radius or self.contrast_radius:
            shift, factor = 0.0, 1.0
            if self.brightness_radius:
                radius = self.brightness_radius
                shift = draw.uniform(-radius, radius) * float(image.mean())
            if self.contrast_radius:
                factor += draw.uniform(-self.contrast_radius, self.contrast_radius)
            image = image * np.float32(factor) + np.float32(shift)
            np.clip(image, 0, 255, out=image)
        if self.saturation_radius and image.shape[2] == 3:
            factor = 1 + draw.uniform(-self.saturation_radius, self.saturation_radius)
            image = _saturated(image.astype(np.float32), np.float32(factor))
        return image

    def output_shape(self, shape: Shape | None) -> Shape | None:
        """See `ImageTransform.output_shape`."""
        return shape


def _saturated(image: Image, factor: np.float32) -> Image:
    """The image with its saturation in HSV times ``factor``, at most 1; hue and value stay.

    A channel is ``value * (1 - saturation * h)`` with an h of the hue, so each one moves along the
    line from the value.
    """
    value = image.max(axis=2, keepdims=True)
    spread = value - image.min(axis=2, keepdims=True)
    largest = np.divide(value, spread, out=np.full_like(value, np.inf), where=spread > 0)
    moved: Image = value - (value - image) * np.minimum(factor, largest)
    return moved


color = Color
