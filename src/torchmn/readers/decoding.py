"""Image files as arrays. JPEG by simplejpeg (libjpeg-turbo), the rest by Pillow.

Both give the same bits; simplejpeg takes half of Pillow's time (`make bench-reading`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
from types import ModuleType
from typing import Any

import numpy as np

from torchmn.errors import DataError, UnsupportedError

Image = np.ndarray[Any, Any]

MAX_PIXELS = 2**27
_JPEG = b"\xff\xd8"
_EXIF = b"Exif\0\0"
_ORIENTATION = 0x0112


def decode(content: bytes, channels: int) -> Image:
    """An image (height, width, channels), uint8: blue, green, red, or grey for one channel.

    It is turned as its EXIF orientation says.

    Raises:
        DataError: no image, or a damaged or very large one. The caller adds which.
        UnsupportedError: the libraries are not installed.
    """
    if content.startswith(_JPEG) and _has_simplejpeg():
        import simplejpeg

        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(content)
        except ValueError:
            return _decode_by_pillow(content, channels)  # a rare kind, or no JPEG
        _raise_if_huge(width, height)
        try:
            image: Image = simplejpeg.decode_jpeg(content, "BGR" if channels == 3 else "GRAY")
        except ValueError as error:
            raise DataError(f"a damaged JPEG: {error}") from error
        return _turned(image, content) if _EXIF in content[:64] else image
    return _decode_by_pillow(content, channels)


def _decode_by_pillow(content: bytes, channels: int) -> Image:
    module = pillow()
    try:
        with module.open(io.BytesIO(content)) as image:
            _raise_if_huge(*image.size)
            pixels = np.asarray(image.convert("RGB" if channels == 3 else "L"))
    except DataError:
        raise
    except Exception as error:  # Pillow's plugins raise all kinds for damaged files
        reason = str(error).replace(f" {content!r}", "")[:200]
        raise DataError(f"no image, or a damaged one: {type(error).__name__}: {reason}") from error
    bgr = pixels[:, :, ::-1] if channels == 3 else pixels[:, :, None]
    return _turned(bgr, content)


def _raise_if_huge(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise DataError(f"{width} x {height} pixels, more than {MAX_PIXELS} in all")


def _turned(image: Image, content: bytes) -> Image:
    """The image as its EXIF orientation says."""
    try:
        with pillow().open(io.BytesIO(content)) as file:
            orientation = file.getexif().get(_ORIENTATION, 1)
    except Exception:  # the pixels are fine
        return image
    if orientation in (2, 4, 5, 7):
        image = image[:, ::-1]
    turns = {3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}.get(orientation, 0)
    return np.rot90(image, turns)


@functools.cache
def _has_simplejpeg() -> bool:
    return importlib.util.find_spec("simplejpeg") is not None


def pillow() -> ModuleType:
    """Pillow's module ``Image``. Raises UnsupportedError: it is not installed."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise UnsupportedError(
            "Reading images needs Pillow, and JPEG is twice as fast with simplejpeg. Install both: "
            "pip install 'torchmn[images]'."
        ) from error
