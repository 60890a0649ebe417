"""Image files as arrays. JPEG by simplejpeg (libjpeg-turbo), the rest by Pillow.

Both give the same bits; simplejpeg takes half of Pillow's time.
"""

import functools
import importlib
import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import numpy as np

from torchmn.base.errors import DataError, require
from torchmn.cluster.units import KiB

Image = np.ndarray[Any, Any]
Reduction = Literal[1, 2, 4, 8]

MAX_PIXELS = 2**27
_JPEG = b"\xff\xd8"
_EXIF = b"Exif\0\0"
_ORIENTATION = 0x0112


class ImageMemory:
    """Reusable memory for images that one thread decodes one after another.

    New pages from the kernel take up to a third of the time of decoding.
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def __call__(self, nbytes: int) -> Image:
        """At least ``nbytes`` bytes, flat: those of the call before, if they are enough."""
        if self._bytes.size < nbytes:
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes


def image_size(content: bytes) -> tuple[int, int]:
    """Height and width as `decode` gives them, without decoding.

    Raises DataError and UnsupportedError as `decode`.
    """
    rows, columns = _jpeg_size(content) or _size_by_pillow(content)
    _raise_if_huge(columns, rows)
    return (columns, rows) if _orientation(content) >= 5 else (rows, columns)


def decode(
    content: bytes, channels: int, *, reduction: Reduction = 1, memory: ImageMemory | None = None
) -> Image:
    """Decode an image: (height, width, channels), uint8; blue, green, red, or one grey channel.

    Its EXIF orientation is applied. With a reduction, each pixel is the mean of 2 x 2, 4 x 4 or
    8 x 8, and the height and width are rounded up. JPEG is decoded to the smaller size at
    once, which takes less time; there the means are of libjpeg's inverse transform, and those of
    Pillow, where simplejpeg is missing, may differ by a few levels. With ``memory`` the image is
    valid until that is used again.

    Raises:
        DataError: ``content`` is no image, damaged, or very large. The caller adds its name.
        UnsupportedError: the libraries are not installed.
    """
    size = _jpeg_size(content)
    simplejpeg = _simplejpeg()
    if size is None or simplejpeg is None:
        return _decode_by_pillow(content, channels, reduction)
    rows, columns = size
    _raise_if_huge(columns, rows)
    rows, columns = -(-rows // reduction), -(-columns // reduction)
    options: dict[str, Any] = {}
    if reduction > 1:
        options = {"min_height": rows, "min_width": columns, "min_factor": reduction}
    if memory is not None:
        options["buffer"] = memory(rows * columns * channels)
    try:
        image: Image = simplejpeg.decode_jpeg(
            content, "BGR" if channels == 3 else "GRAY", **options
        )
    except ValueError as error:
        raise DataError(f"a damaged JPEG: {error}") from error
    return _turned(image, _orientation(content))


def _jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Height and width, not turned; None for what simplejpeg does not decode."""
    simplejpeg = _simplejpeg()
    if simplejpeg is None or not content.startswith(_JPEG):
        return None
    try:
        rows, columns, _, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return None  # a rare kind, or no JPEG
    return rows, columns


def _size_by_pillow(content: bytes) -> tuple[int, int]:
    with _opened(content) as image:
        columns, rows = image.size
    return rows, columns


def _decode_by_pillow(content: bytes, channels: int, reduction: Reduction) -> Image:
    with _opened(content) as image:
        _raise_if_huge(*image.size)
        converted = image.convert("RGB" if channels == 3 else "L")
        pixels = np.asarray(converted.reduce(reduction) if reduction > 1 else converted)
    bgr = pixels[:, :, ::-1] if channels == 3 else pixels[:, :, None]
    return _turned(bgr, _orientation(content))


@contextmanager
def _opened(content: bytes) -> Iterator[Any]:
    """Open an image with Pillow. Raises DataError for any exception while it is read."""
    module = pillow()
    try:
        with module.open(io.BytesIO(content)) as image:
            yield image
    except DataError:
        raise
    except Exception as error:  # Pillow's plugins raise all kinds for damaged files
        reason = str(error).replace(f" {content!r}", "")[:200]
        raise DataError(f"no image, or a damaged one: {type(error).__name__}: {reason}") from error


def _raise_if_huge(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise DataError(f"{width} x {height} pixels, more than {MAX_PIXELS} in all")


def _orientation(content: bytes) -> int:
    """The EXIF orientation, from 1 to 8; 1 for a file without one."""
    if content.startswith(_JPEG) and _EXIF not in content[: 128 * KiB]:  # after other segments
        return 1
    try:
        with pillow().open(io.BytesIO(content)) as file:
            orientation = file.getexif().get(_ORIENTATION, 1)
    except Exception:  # the pixels are fine
        return 1
    return orientation if orientation in range(1, 9) else 1


def _turned(image: Image, orientation: int) -> Image:
    """Turn and mirror an image according to its EXIF orientation."""
    if orientation in (2, 4, 5, 7):
        image = image[:, ::-1]
    turns = {3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}.get(orientation, 0)
    return np.rot90(image, turns)


@functools.cache
def _simplejpeg() -> ModuleType | None:
    is_installed = importlib.util.find_spec("simplejpeg") is not None
    return importlib.import_module("simplejpeg") if is_installed else None


def pillow() -> ModuleType:
    """Pillow's module ``Image``. Raises UnsupportedError: it is not installed."""
    return require("PIL.Image", "Reading images", "torchmn[images]")
