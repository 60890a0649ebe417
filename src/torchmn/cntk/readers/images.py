"""Images that a map file lists, or that a text file holds in base64."""

from __future__ import annotations

import base64
import binascii
import os
import zipfile
import zlib
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch

from torchmn.base.errors import DataError, UsageError
from torchmn.cluster.units import KiB, MiB
from torchmn.cntk.readers.decoding import ImageMemory, decode
from torchmn.cntk.readers.deserializer import (
    ChunkInfo,
    ChunkPart,
    Indices,
    Seed,
    StreamData,
    StreamDef,
    StreamInformation,
    csr_tensor,
)
from torchmn.cntk.readers.files import ProcessLock, open_file
from torchmn.cntk.readers.transforms import (
    NUM_VIEWS,
    Color,
    Crop,
    Draw,
    ImageTransform,
    Mean,
    Scale,
    size_of,
)

Image = np.ndarray[Any, Any]

IMAGES_PER_CHUNK = 512
MAX_MAP_LINE_BYTES = 64 * KiB
MAX_IMAGE_BYTES = 256 * MiB
MAX_BASE64_LINE_BYTES = 256 * MiB
_MAX_LABELS = 2**31 - 1


class _Images:
    """Base class of the deserializers of images, of a text file with a line for each image."""

    is_parallel = True
    _lines: _Lines
    _decoder: _Decoder

    def stream_infos(self) -> list[StreamInformation]:
        """The image stream, and the label stream if there is one."""
        return self._decoder.infos

    def has_one_sample(self) -> dict[str, bool]:
        """See `Deserializer`."""
        return {info.name: True for info in self.stream_infos()}

    def num_chunks(self) -> int:
        """The number of chunks, each of `IMAGES_PER_CHUNK` lines."""
        return -(-len(self._lines) // IMAGES_PER_CHUNK)

    def chunk_infos(self) -> Sequence[ChunkInfo]:
        """See `Deserializer`."""
        starts = range(0, len(self._lines), IMAGES_PER_CHUNK)
        sizes = [min(IMAGES_PER_CHUNK, len(self._lines) - start) for start in starts]
        return [self._decoder.chunk_info(size) for size in sizes]

    def get_chunk(self, chunk_id: int) -> ImageChunk:
        """A chunk, which reads each image when it is asked for."""
        first = chunk_id * IMAGES_PER_CHUNK
        return ImageChunk(self._decoder, first, lambda index: self._item(first + index))

    def _item(self, number: int) -> _Item:
        """Read the image of a line."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._lines.path!r})"


class ImageDeserializer(_Images):
    """Reads images that a map file lists, and their labels. Local.

    Each line is ``path<TAB>label``, or ``id<TAB>path<TAB>label``. A path that begins with ``...``
    is in the map file's folder, others are as the process sees them; ``photos.zip@/a/b.jpg`` is a
    file in an archive. Images are float32 (channels, height, width) from 0 to 255, in the order
    blue, green, red, as CNTK's. Labels are one-hot and sparse.

    Args:
        filename: the path of the map file.
        streams: one `StreamDef` with ``field="image"`` and its ``transforms``, and one with
            ``field="label"`` and the number of classes as ``shape``, which may be left out. All
            images must have one shape: their own, or that of `scale`.

    Raises:
        DataError: a file cannot be read, or a line is wrong; names file, line and column.
        UsageError: the streams are not as above.
        UnsupportedError: the libraries are missing: ``pip install 'torchmn[images]'``.

    >>> import pathlib, tempfile
    >>> from PIL import Image
    >>> from torchmn.cntk.readers import ImageDeserializer, StreamDef
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> Image.new("RGB", (4, 4)).save(folder / "0.png")
    >>> line = chr(9).join([".../0.png", "1"])  # a tab between the image and its label
    >>> num_written = (folder / "map.txt").write_text(line)
    >>> streams = {"x": StreamDef(field="image"), "y": StreamDef(field="label", shape=2)}
    >>> sorted(info.name for info in ImageDeserializer(folder / "map.txt", streams).stream_infos())
    ['x', 'y']
    """

    def __init__(self, filename: str | os.PathLike[str], streams: Mapping[str, StreamDef]) -> None:
        path, classes = os.fspath(filename), _label_stream(streams)
        self._lines = _Lines(path, classes, _MAP_FORM, MAX_MAP_LINE_BYTES, image=-2, keeps=True)
        self._folder = os.path.dirname(os.path.abspath(path))
        self._archives = _Archives()
        self._decoder = _Decoder(streams, lambda: self._item(0))

    def _item(self, number: int) -> _Item:
        raw, label, line, _ = self._lines.image(number)
        name = os.fsdecode(raw)
        if name.startswith("..."):
            name = os.path.join(self._folder, name[3:].replace("\\", "/").lstrip("/"))
        try:
            archive, at, member = name.partition("@")
            if at and not os.path.exists(name):
                content = self._archives.read(archive, member.replace("\\", "/").lstrip("/"))
            else:
                with open_file(name, MAX_IMAGE_BYTES, buffering=0) as file:
                    content = file.read()
        except (DataError, OSError) as error:
            raise DataError(f"{line}: {error}") from error
        return _Item(content, label, f"{line}: {name}")


class Base64ImageDeserializer(_Images):
    """Reads images from a text file with a line ``[id<TAB>]label<TAB>image in base64`` each. Local.

    Streams and images are those of `ImageDeserializer`.

    Args:
        filename: the path of the text file.
        streams: see `ImageDeserializer`.

    Raises:
        DataError: the file cannot be read, or a line is wrong; names file, line and column.
        UsageError: the streams are not as they should be.
        UnsupportedError: the libraries are missing: ``pip install 'torchmn[images]'``.

    >>> import base64, io, pathlib, tempfile
    >>> from PIL import Image
    >>> from torchmn.cntk.readers import Base64ImageDeserializer, StreamDef
    >>> encoded = io.BytesIO()
    >>> Image.new("RGB", (4, 4)).save(encoded, "png")
    >>> text = base64.b64encode(encoded.getvalue()).decode()
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "images.txt"
    >>> num_written = file.write_text(chr(9).join(["1", text]))  # a tab after the label
    >>> streams = {"x": StreamDef(field="image"), "y": StreamDef(field="label", shape=2)}
    >>> [info.shape for info in Base64ImageDeserializer(file, streams).stream_infos()]
    [(3, 4, 4), (2,)]
    """

    def __init__(self, filename: str | os.PathLike[str], streams: Mapping[str, StreamDef]) -> None:
        path, classes = os.fspath(filename), _label_stream(streams)
        self._lines = _Lines(path, classes, _BASE64_FORM, MAX_BASE64_LINE_BYTES, image=-1)
        self._decoder = _Decoder(streams, lambda: self._item(0))

    def _item(self, number: int) -> _Item:
        text, label, line, column = self._lines.image(number)
        place = f"{line}, column {column}"
        try:
            return _Item(base64.b64decode(text.strip(), validate=True), label, place)
        except binascii.Error as error:
            raise DataError(f"{place}: not base64: {error}.") from error


_MAP_FORM = "Each line should be: path, a tab, label; or id, path and label with tabs between."
_BASE64_FORM = "Each line should be: label, a tab, image in base64; or an id and a tab before them."


@dataclass(frozen=True)
class _Item:
    """An image file's content and its label, and where it comes from, for messages."""

    content: bytes
    label: int
    place: str


@dataclass(frozen=True, eq=False)
class ImageChunk:
    """Images that are decoded when they are asked for."""

    decoder: _Decoder
    first: int
    item: Callable[[int], _Item]

    def sequences(self, indices: Indices, seed: Seed) -> Mapping[str, StreamData]:
        """Decode and transform some images."""
        return self.assemble([ChunkPart(self, indices, np.arange(len(indices)))], seed)

    def assemble(self, parts: Sequence[ChunkPart], seed: Seed) -> Mapping[str, StreamData]:
        """See `Chunk`."""
        image, *others = self.decoder.infos
        num = sum(len(part.indices) for part in parts)
        images = torch.empty((num, *self.decoder.shape), dtype=torch.float32, device="cpu")
        labels = np.empty(num, np.int64)
        for part in parts:
            part.chunk._decode(part.indices, seed, part.places, images.numpy(), labels)
        return {
            image.name: (images, None),
            **{other.name: (_one_hot(labels, other.shape[0]), None) for other in others},
        }

    def _decode(
        self, indices: Indices, seed: Seed, places: Indices, pixels: Image, labels: Indices
    ) -> None:
        decoder = self.decoder
        memory = ImageMemory() if decoder.may_reuse_memory else None
        for place, index in zip(places.tolist(), indices.tolist(), strict=True):
            number, view = divmod(index, decoder.num_views)
            item = self.item(number)
            labels[place] = item.label
            draw = Draw(*seed, self.first + number, view)
            decoder.transform(item, draw, pixels[place], memory)


def _one_hot(labels: Indices, num_classes: int) -> torch.Tensor:
    crow = torch.arange(len(labels) + 1, device="cpu")
    ones = torch.ones(len(labels), device="cpu")
    return csr_tensor(crow, torch.from_numpy(labels), ones, (len(labels), num_classes))


class _Decoder:
    """Decodes and transforms images to one shape, which the first image may decide."""

    def __init__(self, streams: Mapping[str, StreamDef], first: Callable[[], _Item]) -> None:
        name = next(name for name, stream in streams.items() if stream.field == "image")
        self._transforms: list[ImageTransform] = list(streams[name].transforms or ())
        for transform in self._transforms:
            if not (hasattr(transform, "apply") and hasattr(transform, "output_shape")):
                raise UsageError(
                    f"A transform of the stream {name!r} is a {type(transform).__name__}. Use "
                    "crop, scale, mean and color, or an object with apply and output_shape."
                )
        scales = [t for t in self._transforms if isinstance(t, Scale)]
        self._channels = scales[0].channels if scales else 3
        if len({scale.channels for scale in scales}) > 1:
            raise UsageError(f"The transforms of {name!r} scale to several numbers of channels.")
        crops = [t for t in self._transforms if isinstance(t, Crop)]
        own = (Crop, Scale, Mean, Color)  # a user's transform may keep the image that it is given
        self.may_reuse_memory = all(isinstance(t, own) for t in self._transforms)
        self.num_views = NUM_VIEWS if any(c.crop_type == "multiview10" for c in crops) else 1
        self.shape = self._shape(streams[name], first)
        self.infos = [StreamInformation(name, 0, "dense", np.float32, self.shape)]
        for other, stream in streams.items():
            if stream.field == "label":
                classes = stream.sample_shape
                self.infos.append(StreamInformation(other, 1, "sparse", np.float32, classes))

    def chunk_info(self, num_images: int) -> ChunkInfo:
        """Each view of an image is a sequence of one sample."""
        count = num_images * self.num_views
        return ChunkInfo(num_sequences=count, num_samples=count)

    def transform(self, item: _Item, draw: Draw, into: Image, memory: ImageMemory | None) -> None:
        """Write the image as (channels, height, width)."""
        image = self._transformed(item, draw, memory)
        if (image.shape[2], *image.shape[:2]) != into.shape:
            raise DataError(
                f"{item.place}: the image is {size_of(image)} after its transforms, and others "
                f"are {into.shape[2]} x {into.shape[1]} with {into.shape[0]}. Add "
                "scale(width, height, channels) to the transforms."
            )
        np.copyto(into, np.ascontiguousarray(image.transpose(2, 0, 1)))  # faster than in one step

    def _transformed(self, item: _Item, draw: Draw, memory: ImageMemory | None = None) -> Image:
        try:
            image = decode(item.content, self._channels, memory=memory)
            for transform in self._transforms:
                image = transform.apply(image, draw)
        except DataError as error:
            raise DataError(f"{item.place}: {error}") from error
        return image

    def _shape(self, stream: StreamDef, first: Callable[[], _Item]) -> tuple[int, int, int]:
        shape: tuple[int, int, int] | None = None
        for transform in self._transforms:
            shape = transform.output_shape(shape)
        if shape is None:
            image = self._transformed(first(), Draw(0, 0, 0))
            rows, columns, channels = image.shape
        else:
            rows, columns, channels = shape
        found = channels, rows, columns
        if stream.sample_shape and stream.sample_shape != found:
            raise UsageError(
                f"The image stream has shape={stream.sample_shape}, and its images are {found} "
                "(channels, height, width). Leave the shape out, or change scale()."
            )
        return found


def _label_stream(streams: Mapping[str, StreamDef]) -> int | None:
    """The number of classes, None if labels are not asked for. Checks the streams."""
    fields = [stream.field for stream in streams.values()]
    if sorted(str(field) for field in fields) not in (["image"], ["image", "label"]):
        raise UsageError(
            f"The streams of images have the fields {fields}. There must be one with field='image' "
            "and may be one with field='label'."
        )
    for name, stream in streams.items():
        if stream.field == "label":
            if len(stream.sample_shape) != 1 or stream.sample_shape[0] > _MAX_LABELS:
                raise UsageError(
                    f"The stream {name!r} has shape={stream.shape!r}. It should be the number of "
                    "classes."
                )
            return stream.sample_shape[0]
    return None


def _label_of(text: bytes, num_classes: int | None, place: str, column: int) -> int:
    if num_classes is None:
        return 0
    digits = text.strip()
    label = int(digits) if digits.isdigit() and len(digits) < 12 else -1
    if not 0 <= label < num_classes:
        shown = digits[:40].decode("utf-8", "replace")
        raise DataError(
            f"{place}, column {column}: the label {shown!r} is no class from 0 to "
            f"{num_classes - 1}, as the shape of the label stream has it."
        )
    return label


# ---- files of lines


class _Lines:
    """The images and labels of a file of lines, in compact arrays.

    Args:
        path: the file.
        num_classes: number of classes of labels; None: labels are not read.
        form: the form of a line, for errors.
        max_bytes: the most bytes of a line.
        image: the column of the image from the end, -1 or -2; that of the label is the other one.
        keeps: keep the images' columns in memory, as for paths; else they are read again.
    """

    def __init__(
        self,
        path: str,
        num_classes: int | None,
        form: str,
        max_bytes: int,
        *,
        image: int,
        keeps: bool = False,
    ) -> None:
        self.path = path
        self._kept = bytearray() if keeps else None
        # Five numbers per line: offset and size of the image's column, line, column, label.
        self._table = array("q")
        begin = line = 0
        with open_file(path) as file:
            while text := file.readline(max_bytes + 1):
                line += 1
                place = f"{path}, line {line}"
                if len(text) > max_bytes:
                    raise DataError(f"{place}: more than {max_bytes} bytes. {form}")
                skipped = len(BOM_UTF8) if line == 1 and text.startswith(BOM_UTF8) else 0
                begin += len(text)
                columns = text[skipped:].rstrip(b"\r\n").split(b"\t")
                if not text[skipped:].strip():
                    continue
                if len(columns) not in (2, 3):
                    raise DataError(f"{place}: {len(columns)} columns. {form}")
                last = sum(map(len, columns)) + len(columns) - len(columns[-1])
                at = {-1: last, -2: last - len(columns[-2]) - 1}  # where the columns begin, from 1
                if not columns[image].strip() or b"\0" in columns[image]:
                    what = "path of an image" if keeps else "image"
                    raise DataError(f"{place}, column {at[image]}: no {what}. {form}")
                label = _label_of(columns[-3 - image], num_classes, place, at[-3 - image])
                where = begin - len(text) + skipped + at[image] - 1
                if self._kept is not None:
                    where = len(self._kept)
                    self._kept += columns[image]
                self._table.extend((where, len(columns[image]), line, at[image], label))
            self._version = _version(file)
        if not self._table:
            raise DataError(f"{path}: the file lists no images. {form}")

    def __len__(self) -> int:
        return len(self._table) // 5

    def image(self, number: int) -> tuple[bytes, int, str, int]:
        """Return the image's column, its label, its line as text, and the number of the column."""
        where, nbytes, line, column, label = self._table[5 * number : 5 * number + 5]
        place = f"{self.path}, line {line}"
        if self._kept is not None:
            return bytes(self._kept[where : where + nbytes]), label, place, column
        with open_file(self.path) as file:
            if _version(file) != self._version:
                raise DataError(
                    f"{self.path}: the file has changed since it was first read. Write new data "
                    "to a new file and start again."
                )
            file.seek(where)
            return file.read(nbytes), label, place, column


def _version(file: BinaryIO) -> tuple[int, int, int]:
    """A stamp that differs after the file has changed."""
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


class _Archives:
    """Open zip files of each process: a forked child would share the positions of its parent's."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._open: dict[tuple[int, str], zipfile.ZipFile] = {}

    def read(self, path: str, member: str) -> bytes:
        key = (os.getpid(), path)
        try:
            with self._lock:
                if key not in self._open:
                    open_file(path).close()  # raises if it is no ordinary file
                    self._open[key] = zipfile.ZipFile(path)
                archive = self._open[key]
            # Without the lock: a ZipFile has its own, and threads decompress side by side.
            size = archive.getinfo(member).file_size
            if size > MAX_IMAGE_BYTES:
                raise DataError(f"{path}: {member} has {size} bytes, more than {MAX_IMAGE_BYTES}.")
            return archive.read(member)
        except KeyError:
            raise DataError(f"{path}: the archive has no file {member}.") from None
        except (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
            raise DataError(f"{path}: {member} cannot be read: {error}.") from error

    def __reduce__(self) -> tuple[object, ...]:
        return _Archives, ()
