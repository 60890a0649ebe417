"""CTF, CNTK's text format: ``[id] |name value value |name index:value ...`` on each line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchmn.base.errors import DataError, raise_if_no_count
from torchmn.cluster.units import MiB
from torchmn.cntk.readers.ctf_index import ChunkPlace, Index, make_index
from torchmn.cntk.readers.ctf_parse import Sequences, columns_of, describe, parse
from torchmn.cntk.readers.deserializer import (
    ChunkInfo,
    ChunkPart,
    Indices,
    Seed,
    StreamData,
    StreamDef,
    StreamInformation,
)
from torchmn.cntk.readers.files import ProcessLock

Array = np.ndarray[Any, Any]


class CTFDeserializer:
    """Reads a file of CNTK's text format. Local.

    Each line has samples of one or more inputs: ``|name 0.1 0.2`` is dense, ``|name 3:1 7:0.5``
    sparse. Neighbouring lines that begin with the same number are one sequence; without numbers
    each line is one. ``|# text`` is a comment, up to the next ``|`` or the end of the line.

    The first use reads the file once for an index of its chunks. Text is parsed when a minibatch
    needs it, by code that numba compiles (``pip install 'torchmn[compression]'``).

    Args:
        filename: the path of a UTF-8 text file.
        streams: what to read, by stream name: `StreamDef` with ``shape`` and, unless it is the
            stream's name, ``field``, the name in the file. Other inputs of the file are ignored.
        chunk_bytes: bytes of text that are read at once. A longer sequence is a chunk of its own.
        skip_sequence_ids: each line is a sequence, also where lines begin with numbers.
        fill_with_zeros: a dense sample may end early, as CNTK permits; the rest is zero.

    Raises:
        DataError: the file cannot be read, or a line is wrong; names file, line and column.
        UnsupportedError: numba is not installed; when the file is first read.
        UsageError: a stream has no shape, or an option that text does not support.

    Example:
        >>> import pathlib, tempfile
        >>> from torchmn.cntk.readers import MinibatchSource, StreamDefs
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = pathlib.Path(folder.name, "train.ctf")
        >>> _ = file.write_text("|x 1 2 |y 0\\n|x 3 4 |y 1\\n")
        >>> streams = StreamDefs(x=StreamDef(shape=2), y=StreamDef(shape=1))
        >>> source = MinibatchSource(CTFDeserializer(file, streams), randomize=False)
        >>> source.next_minibatch(2, {"x": source.streams.x})["x"].data.tolist()
        [[1.0, 2.0], [3.0, 4.0]]
        >>> folder.cleanup()
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        streams: Mapping[str, StreamDef],
        *,
        chunk_bytes: int = 32 * MiB,
        skip_sequence_ids: bool = False,
        fill_with_zeros: bool = False,
    ) -> None:
        raise_if_no_count("chunk_bytes", chunk_bytes, "a number of bytes")
        self._path = os.fspath(filename)
        self._columns = columns_of(streams)
        self._chunk_bytes = chunk_bytes
        self._skip_ids = skip_sequence_ids
        self._fill = fill_with_zeros
        self._lock = ProcessLock()
        self._index: Index | None = None

    def stream_infos(self) -> list[StreamInformation]:
        """The streams, in the order of ``streams``."""
        return list(self._columns.infos)

    def has_one_sample(self) -> dict[str, bool]:
        """See `Deserializer`; reads the file on the first call."""
        has_one = np.stack([chunk.has_one for chunk in self._indexed().chunks])
        return {info.name: bool(has_one[:, n].all()) for n, info in enumerate(self._columns.infos)}

    def num_chunks(self) -> int:
        """The number of chunks; reads the file on the first call."""
        return len(self._indexed().chunks)

    def chunk_infos(self) -> Sequence[ChunkInfo]:
        """Sequences and samples of each chunk; reads the file on the first call."""
        return [chunk.info for chunk in self._indexed().chunks]

    def get_chunk(self, chunk_id: int) -> CTFChunk:
        """Read the text of a chunk and find its sequences."""
        index = self._indexed()
        place = index.chunks[chunk_id]
        text, sequences = index.read(place)
        return CTFChunk(self, place, text, sequences, index.with_ids or self._skip_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._path!r})"

    def _indexed(self) -> Index:
        with self._lock:
            if self._index is None:
                self._index = make_index(
                    self._path, self._columns, self._chunk_bytes, self._skip_ids
                )
            return self._index


class CTFChunk:
    """Text of a file in memory, and where its sequences are.

    Args:
        of: the deserializer of the file.
        place: the place of the chunk in the file.
        text: the text of the chunk.
        sequences: where the sequences are in the text.
        may_have_ids: whether lines may begin with numbers.
    """

    def __init__(
        self,
        of: CTFDeserializer,
        place: ChunkPlace,
        text: Array,
        sequences: Sequences,
        may_have_ids: bool,
    ) -> None:
        self.of = of
        self.place = place
        self.text = text
        self.begins = sequences.begins
        self.counts = sequences.counts
        # By stream, whether each sequence has one sample of it; None: of every stream.
        self.has_one = None if self.counts is None else (self.counts == 1).all(axis=0)
        self.may_have_ids = may_have_ids

    def sequences(self, indices: Indices, seed: Seed) -> Mapping[str, StreamData]:
        """Parse some sequences. Raises DataError: one is wrong; names file, line and column."""
        return self.assemble([ChunkPart(self, indices, np.arange(len(indices)))], seed)

    def assemble(self, parts: Sequence[ChunkPart], seed: Seed) -> Mapping[str, StreamData]:
        """See `Chunk`."""
        return parse(parts, self.of._columns, self.may_have_ids, self.of._fill)

    def error(self, kind: int, at: int, number: int) -> DataError:
        """Make the error at a byte of the text; see `torchmn.cntk.readers.ctf_parse.describe`."""
        before = self.text[:at].tobytes()
        line = self.place.line + before.count(b"\n")
        column = at - (before.rfind(b"\n") + 1) + 1
        what = describe(kind, self.text[at : at + 64].tobytes(), number, self.of._columns.fields)
        return DataError(f"{self.of._path}, line {line}, column {column}: {what}.")
