"""Arrays, tensors and lists of sequences as a chunk, and as a data set of one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchmn.base.errors import UsageError
from torchmn.cntk.readers.assembly import join, rows_of, select
from torchmn.cntk.readers.deserializer import (
    Chunk,
    ChunkInfo,
    Indices,
    Seed,
    StreamData,
    StreamInformation,
    csr_tensor,
)


class ArrayChunk:
    """Arrays, tensors and lists of sequences; also as a data set of one chunk. Local.

    Args:
        data_streams: see `MinibatchSourceFromData`.
        streams: the streams, which have the dtypes that values get.
    """

    is_in_memory = True

    def __init__(
        self, data_streams: Mapping[str, Any], streams: Sequence[StreamInformation] = ()
    ) -> None:
        if not data_streams:
            raise UsageError("There are no streams. Give at least one: {'features': array}.")
        self._columns = {name: _column(name, value) for name, value in data_streams.items()}
        for stream in streams:
            rows, lengths = self._columns[stream.name]
            dtype = torch.from_numpy(np.zeros(0, stream.dtype)).dtype
            self._columns[stream.name] = (rows.to(dtype), lengths)
        counts = {name: len(_lengths(column)) for name, column in self._columns.items()}
        if len(set(counts.values())) > 1:
            raise UsageError(
                "The streams have different numbers of sequences: "
                f"{', '.join(f'{name} {count}' for name, count in counts.items())}. All streams of "
                "a source need the same number."
            )
        self._num_sequences = next(iter(counts.values()))

    def stream_infos(self) -> list[StreamInformation]:
        """The streams, described from their arrays."""
        return [
            StreamInformation(
                name,
                number,
                "sparse" if data.layout == torch.sparse_csr else "dense",
                _values(data).numpy().dtype,
                tuple(data.shape[1:]),
            )
            for number, (name, (data, _)) in enumerate(self._columns.items())
        ]

    def info(self, counted: str | None = None) -> ChunkInfo:
        """The chunk's numbers, in samples of one stream, or of each sequence's longest one."""
        columns = [self._columns[counted]] if counted else list(self._columns.values())
        if all(lengths is None for _, lengths in columns):
            return ChunkInfo(num_sequences=self._num_sequences, num_samples=self._num_sequences)
        longest = np.max([_lengths(column) for column in columns], axis=0)
        return ChunkInfo(
            num_sequences=self._num_sequences, num_samples=int(longest.sum()), lengths=longest
        )

    def has_one_sample(self) -> dict[str, bool]:
        """See `Deserializer`."""
        return {name: lengths is None for name, (_, lengths) in self._columns.items()}

    def sequences(self, indices: Indices, seed: Seed) -> dict[str, StreamData]:
        """See `Chunk`."""
        found: dict[str, StreamData] = {}
        for name, (data, lengths) in self._columns.items():
            if lengths is None:
                found[name] = (select(data, indices), None)
            else:
                starts = np.cumsum(lengths) - lengths
                own = lengths[indices]
                rows = rows_of(starts[indices], own)
                found[name] = (select(data, rows), torch.from_numpy(own))
        return found

    # ---- as a data set of one chunk

    def num_chunks(self) -> int:
        """See `Deserializer`."""
        return 1

    def chunk_infos(self) -> list[ChunkInfo]:
        """See `Deserializer`."""
        return [self.info()]

    def get_chunk(self, chunk_id: int) -> Chunk:
        """See `Deserializer`."""
        return self

    def __repr__(self) -> str:
        return f"data in memory ({', '.join(self._columns)})"


Column = tuple[torch.Tensor, Indices | None]


def _values(data: torch.Tensor) -> torch.Tensor:
    return data.values() if data.layout == torch.sparse_csr else data


def _lengths(column: Column) -> Indices:
    data, lengths = column
    return np.ones(data.shape[0], np.int64) if lengths is None else lengths


def _column(name: str, value: Any) -> Column:
    if isinstance(value, tuple):  # CNTK's (value, type); the tensors know their types
        value = value[0]
    if isinstance(value, list) and value:
        rows = [_rows(part) for part in value]
        if all(own is not None and own.dim() > 0 for own in rows):
            lengths = np.array([own.shape[0] for own in rows if own is not None], np.int64)
            return join([(own, None) for own in rows if own is not None])[0], lengths
    rows_or_none = _rows(value) if not isinstance(value, list) else None
    if rows_or_none is not None and rows_or_none.dim() > 0:
        return rows_or_none, None
    raise UsageError(
        f"The stream {name!r} is a {type(value).__name__}. It can be a NumPy array or tensor "
        "(num_sequences, *shape), a sparse matrix, or a list of arrays (length, *shape), one for "
        "each sequence."
    )


def _rows(value: Any) -> torch.Tensor | None:
    """An array, tensor or sparse matrix as a tensor; None for anything else."""
    if isinstance(value, torch.Tensor):
        return _as_float32(value.detach().cpu())
    if hasattr(value, "tocsr"):  # SciPy's sparse matrices
        matrix = value.tocsr()
        crow, columns = (
            torch.from_numpy(a.astype(np.int64)) for a in (matrix.indptr, matrix.indices)
        )
        values = torch.from_numpy(np.asarray(matrix.data))
        return csr_tensor(crow, columns, _as_float32(values), matrix.shape)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return _as_float32(torch.from_numpy(np.require(value, requirements=("C", "W"))))
    return None


def _as_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor
