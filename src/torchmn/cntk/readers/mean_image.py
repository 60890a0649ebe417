"""Mean images in XML files as OpenCV and CNTK write them."""

import os
from pathlib import Path
from typing import Any, Literal, get_args
from xml.etree import ElementTree

import numpy as np

from torchmn.base.errors import DataError, UsageError, raise_if_unknown
from torchmn.base.private_files import write_whole
from torchmn.cluster.units import MiB
from torchmn.cntk.readers.files import open_file

Array = np.ndarray[Any, Any]
MeanLayout = Literal["hwc-bgr", "chw-rgb"]

MAX_FILE_BYTES = 64 * MiB
_MATRIX = ("MeanImg/rows", "MeanImg/cols")


def read_mean_image(filename: str | os.PathLike[str], layout: MeanLayout = "hwc-bgr") -> Array:
    """Read a mean image: float32 (channels, height, width), in the order blue, green, red. Local.

    Args:
        filename: the path of the XML file.
        layout: the layout of the numbers in the file, see `torchmn.cntk.readers.transforms.mean`.

    Raises:
        DataError: the file cannot be read, or is no mean image.

    >>> import pathlib, tempfile
    >>> from torchmn.cntk.readers.mean_image import read_mean_image, write_mean_image
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "mean.xml"
    >>> write_mean_image(file, np.ones((3, 2, 2), np.float32))
    >>> read_mean_image(file).shape
    (3, 2, 2)
    """
    raise_if_unknown("layout", layout, get_args(MeanLayout))
    path = os.fspath(filename)
    storage = _parsed(path)
    channels, rows, columns, height, width = (
        _size(path, storage, name) for name in ("Channel", "Row", "Col", *_MATRIX)
    )
    count = channels * rows * columns
    if height * width not in (rows * columns, count):  # channels may be in the type, such as 3f
        raise DataError(
            f"{path}: MeanImg has {height} x {width} numbers, and Channel x Row x Col is "
            f"{channels} x {rows} x {columns}. {_FORM}"
        )
    words = _text(path, storage, "MeanImg/data").split(None, count)
    if len(words) != count or len(words[-1].split()) != 1:
        found = "more" if len(words) >= count else len(words)
        raise DataError(f"{path}: MeanImg/data should have {count} numbers, and has {found}.")
    try:
        with np.errstate(over="ignore"):
            values = np.array(words, np.float64).astype(np.float32)
    except ValueError as error:
        raise DataError(f"{path}: MeanImg/data: {error}.") from None
    if not np.isfinite(values).all():
        wrong = words[int(np.flatnonzero(~np.isfinite(values))[0])]
        raise DataError(f"{path}: MeanImg/data: {wrong!r} is no number of float32.")
    if layout == "chw-rgb":
        return np.ascontiguousarray(values.reshape(channels, rows, columns)[::-1])
    return np.ascontiguousarray(values.reshape(rows, columns, channels).transpose(2, 0, 1))


def _parsed(path: str) -> ElementTree.Element:
    with open_file(path, MAX_FILE_BYTES) as file:
        content = file.read()
    if b"<!DOCTYPE" in content:  # whose entities may grow without limit
        raise DataError(f"{path}: a DOCTYPE, which a mean image does not have. {_FORM}")
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise DataError(f"{path}: no XML: {error}.") from error
    if root.tag != "opencv_storage":
        raise DataError(f"{path}: the element is {root.tag[:40]!r}. {_FORM}")
    return root


def _text(path: str, storage: ElementTree.Element, name: str) -> str:
    found = storage.findtext(name)
    if found is None:
        raise DataError(f"{path}: no element {name}. {_FORM}")
    return found


def _size(path: str, storage: ElementTree.Element, name: str) -> int:
    digits = _text(path, storage, name).strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10 and int(digits) > 0):
        raise DataError(f"{path}: {name} is {digits[:40]!r} and should be a number of at least 1.")
    return int(digits)


def write_mean_image(filename: str | os.PathLike[str], image: Array) -> None:
    """Write a mean image for `torchmn.cntk.readers.transforms.mean` and for CNTK. Local.

    Args:
        filename: the file to write; it is replaced as a whole, or not at all.
        image: (channels, height, width), in the order blue, green, red, as minibatches have them.

    Raises UsageError: ``image`` has another number of dimensions, or numbers that are not finite.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = pathlib.Path(folder.name, "mean.xml")
        >>> write_mean_image(file, np.full((3, 2, 2), 0.5))
        >>> read_mean_image(file, "hwc-bgr").shape
        (3, 2, 2)
        >>> folder.cleanup()
    """
    values = np.asarray(image, np.float32)
    if values.ndim != 3 or values.size == 0 or not np.isfinite(values).all():
        raise UsageError(
            f"A mean image is an array (channels, height, width) of finite numbers, and this one "
            f"is {values.shape}."
        )
    channels, rows, columns = values.shape
    numbers = [f"{value:.9g}" for value in values.transpose(1, 2, 0).ravel().tolist()]
    lines = "\n      ".join(" ".join(numbers[k : k + 8]) for k in range(0, len(numbers), 8))
    text = (
        '<?xml version="1.0"?>\n<opencv_storage>\n'
        f"  <Channel>{channels}</Channel>\n  <Row>{rows}</Row>\n  <Col>{columns}</Col>\n"
        f'  <MeanImg type_id="opencv-matrix">\n    <rows>1</rows>\n'
        f"    <cols>{values.size}</cols>\n    <dt>f</dt>\n    <data>\n      {lines}\n"
        "    </data>\n  </MeanImg>\n</opencv_storage>\n"
    )
    write_whole(Path(filename), text.encode(), mode=0o666)


_FORM = (
    "A mean image has the elements Channel, Row, Col and MeanImg (rows, cols, dt, data) in "
    "opencv_storage; write_mean_image writes one."
)
