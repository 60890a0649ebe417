"""Mean images in XML files as OpenCV and CNTK write them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, get_args
from xml.parsers import expat

import numpy as np

from torchmn.cluster.units import MiB
from torchmn.cntk.readers.files import open_file
from torchmn.errors import DataError, UnknownNameError, UsageError

Array = np.ndarray[Any, Any]
MeanLayout = Literal["hwc-bgr", "chw-rgb"]

MAX_FILE_BYTES = 64 * MiB
_BLOCK_BYTES = MiB
_MAX_DEPTH = 8
_NAMES = ("Channel", "Row", "Col", "MeanImg/rows", "MeanImg/cols", "MeanImg/data")


def read_mean_image(filename: str | os.PathLike[str], layout: MeanLayout = "hwc-bgr") -> Array:
    """A mean image, float32 (channels, height, width), channels in the order blue, green, red.

    Args:
        filename: of the XML file.
        layout: of the numbers in the file, see `torchmn.cntk.readers.transforms.mean`.

    Raises:
        DataError: the file cannot be read, or is no mean image; names file and line.

    >>> import pathlib, tempfile
    >>> from torchmn.cntk.readers.mean_image import read_mean_image, write_mean_image
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "mean.xml"
    >>> write_mean_image(file, np.ones((3, 2, 2), np.float32))
    >>> read_mean_image(file).shape
    (3, 2, 2)
    """
    _check_layout(layout)
    path = os.fspath(filename)
    found = _Document(path).read()
    sizes = {}
    for name in _NAMES:
        if name not in found:
            raise DataError(f"{path}: no element {name.replace('/', ' > ')}. {_FORM}")
        if name != "MeanImg/data":
            sizes[name] = _whole(path, name, *found[name])
    channels, rows, columns = sizes["Channel"], sizes["Row"], sizes["Col"]
    line, text = found["MeanImg/data"]
    if sizes["MeanImg/rows"] * sizes["MeanImg/cols"] not in (
        rows * columns,  # with channels in the type, such as 3f
        channels * rows * columns,
    ):
        raise DataError(
            f"{path}: MeanImg has {sizes['MeanImg/rows']} x {sizes['MeanImg/cols']} numbers, and "
            f"Channel x Row x Col is {channels} x {rows} x {columns}. {_FORM}"
        )
    values = _numbers(path, line, text, channels * rows * columns)
    if layout == "chw-rgb":
        return np.ascontiguousarray(values.reshape(channels, rows, columns)[::-1])
    return np.ascontiguousarray(values.reshape(rows, columns, channels).transpose(2, 0, 1))


def write_mean_image(filename: str | os.PathLike[str], image: Array) -> None:
    """Write a mean image for `torchmn.cntk.readers.transforms.mean` and for CNTK. Local.

    Args:
        filename: replaced as a whole, or not at all.
        image: (channels, height, width), in the order blue, green, red, as minibatches have them.

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
    path = Path(filename)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    unfinished.write_text(
        '<?xml version="1.0"?>\n<opencv_storage>\n'
        f"  <Channel>{channels}</Channel>\n  <Row>{rows}</Row>\n  <Col>{columns}</Col>\n"
        f'  <MeanImg type_id="opencv-matrix">\n    <rows>1</rows>\n'
        f"    <cols>{values.size}</cols>\n    <dt>f</dt>\n    <data>\n      {lines}\n"
        "    </data>\n  </MeanImg>\n</opencv_storage>\n"
    )
    unfinished.replace(path)


_FORM = (
    "A mean image has the elements Channel, Row, Col and MeanImg (rows, cols, dt, data) in "
    "opencv_storage; write_mean_image writes one."
)


class _Document:
    """Reads the texts of the elements. Entities, which can grow without limit, are refused."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stack: list[str] = []
        self._found: dict[str, tuple[int, str]] = {}
        self._text: list[str] = []
        self._line = 0
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartDoctypeDeclHandler = self._refuse_doctype
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text.append

    def read(self) -> dict[str, tuple[int, str]]:
        """By name: the line where the text begins, and the text."""
        try:
            with open_file(self._path, MAX_FILE_BYTES) as file:
                while block := file.read(_BLOCK_BYTES):
                    self._parser.Parse(block, False)
                self._parser.Parse(b"", True)
        except expat.ExpatError as error:
            reason = expat.ErrorString(error.code)
            raise DataError(
                f"{self._path}, line {error.lineno}, column {error.offset + 1}: no XML: {reason}."
            ) from error
        return self._found

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._stack.append(name)
        if len(self._stack) > _MAX_DEPTH:
            raise DataError(f"{self._place()}: {_MAX_DEPTH} elements are open. {_FORM}")
        if len(self._stack) == 1 and name != "opencv_storage":
            raise DataError(f"{self._place()}: the element is {name[:40]!r}. {_FORM}")
        self._text.clear()
        self._line = self._parser.CurrentLineNumber

    def _end(self, name: str) -> None:
        key = "/".join(self._stack[1:])
        if key in _NAMES:
            if key in self._found:
                raise DataError(f"{self._place()}: a second element {name}. {_FORM}")
            self._found[key] = (self._line, "".join(self._text))
        self._text.clear()
        self._stack.pop()

    def _refuse_doctype(self, *_: object) -> None:
        raise DataError(f"{self._place()}: a DOCTYPE, which a mean image does not have. {_FORM}")

    def _place(self) -> str:
        parser = self._parser
        line, column = parser.CurrentLineNumber, parser.CurrentColumnNumber + 1
        return f"{self._path}, line {line}, column {column}"


def _whole(path: str, name: str, line: int, text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10 and int(digits) > 0):
        raise DataError(
            f"{path}, line {line}: {name.replace('/', ' > ')} is {digits[:40]!r} and should be a "
            "number of at least 1."
        )
    return int(digits)


def _numbers(path: str, line: int, text: str, count: int) -> Array:
    tokens = text.split(None, count)
    if len(tokens) != count or len(tokens[-1].split()) != 1:
        found = "more" if len(tokens) >= count else str(len(tokens))
        raise DataError(
            f"{path}, line {line}: MeanImg > data should have Channel x Row x Col = {count} "
            f"numbers, and has {found}."
        )
    try:
        with np.errstate(over="ignore"):
            values = np.array(tokens, np.float64).astype(np.float32)
        if np.isfinite(values).all():
            return values
    except ValueError:
        pass
    for number, row in enumerate(text.split("\n")):
        for token in row.split():
            if not _is_number(token):
                line, column = line + number, row.index(token) + 1
                raise DataError(
                    f"{path}, line {line}, column {column}: {token[:40]!r} is no number of float32."
                )
    raise DataError(f"{path}, line {line}: MeanImg > data has what is no number of float32.")


def _is_number(token: str) -> bool:
    try:
        value = float(token)
    except ValueError:
        return False
    return bool(abs(value) <= float(np.finfo(np.float32).max))


def _check_layout(layout: object) -> None:
    if layout not in get_args(MeanLayout):
        raise UnknownNameError("layout", layout, get_args(MeanLayout))
