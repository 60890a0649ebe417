"""Parts of photos at a given size, without decoding the rest of them.

Training on photos takes a random part of each, half of it on average. For a JPEG file the time of
its other blocks is that of finding their ends, and what follows the part is not read, so that
damage there may not be noticed. Pixels are those of `decode` bit by bit. The weights of resizing
are those of torchvision's ``antialias``; values differ by up to two levels from PyTorch's, which
rounds in another order.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from torchmn.readers.decoding import Image, is_turned
from torchmn.readers.transforms import Region

Decode = Callable[[Image, int, int, int, int], np.ndarray[Any, Any]]
Resize = Callable[[np.ndarray[Any, Any], int, bool, Image], None]


def read_part(content: bytes, region: Region, into: Image) -> bool:
    """Decode the part of a JPEG file that a region is, and resize it to an image.

    Args:
        content: of the file.
        region: of the image as `decode` gives it.
        into: uint8 (height, width, 3) in one piece, which becomes blue, green, red. Not written to
            if False is returned.

    Returns:
        False for what is to be decoded otherwise: without numba, and other formats, progressive and
        other rare kinds of JPEG, those whose EXIF says that they are turned, and damaged files.
    """
    compiled = kernels()
    if compiled is None or is_turned(content):
        return False
    decode, resize = compiled
    top, left, height, width, is_mirrored = region
    colors = decode(np.frombuffer(content, np.uint8), top, left, height, width)
    if not colors.size:
        return False
    resize(colors, width, is_mirrored, into)
    return True


@functools.cache
def kernels() -> tuple[Decode, Resize] | None:
    """The compiled functions, ready to be called; warns once if there is no compiler.

    The first call on a machine takes half a minute, and numba keeps the machine code. A process
    that will fork calls it before.
    """
    if importlib.util.find_spec("numba") is None:
        warnings.warn(
            "Photos are decoded whole, which takes up to twice the time of parts. Install numba: "
            "pip install 'torchmn[compression]'.",
            stacklevel=2,
        )
        return None
    from torchmn.readers.jpeg_compiled import decode
    from torchmn.readers.resize_compiled import resize

    decode(np.frombuffer(b"no image", np.uint8), 0, 0, 1, 1)
    resize(np.zeros((1, 64), np.uint64), 1, False, np.empty((1, 1, 3), np.uint8))
    return decode, resize
