"""Sequences of several chunks as one tensor per stream."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from torchmn.base.errors import DataError
from torchmn.cntk.readers.deserializer import (
    Chunk,
    ChunkPart,
    Indices,
    Seed,
    StreamData,
    StreamInformation,
    csr_tensor,
)


def gather(
    chunks: Indices,
    indices: Indices,
    streams: Sequence[StreamInformation],
    chunk: Callable[[int], Chunk],
    seed: Seed,
) -> dict[str, StreamData]:
    """Decode sequences, given by their chunks and their places there, and return them in order.

    Each chunk decodes its own at once; then their rows are sorted, unless the chunks do both.

    Raises DataError: what a chunk returned does not fit its streams.
    """
    if not len(chunks):
        return {info.name: empty(info) for info in streams}
    by_chunk = np.argsort(chunks, kind="stable")
    sorted_chunks, sorted_indices = chunks[by_chunk], indices[by_chunk]
    bounds = [0, *(np.flatnonzero(np.diff(sorted_chunks)) + 1).tolist(), len(chunks)]
    parts = [
        ChunkPart(chunk(int(sorted_chunks[begin])), sorted_indices[begin:end], by_chunk[begin:end])
        for begin, end in pairwise(bounds)
    ]
    assemble = getattr(parts[0].chunk, "assemble", None)
    if assemble is not None:
        return dict(assemble(parts, seed))
    pieces = []
    for part, begin in zip(parts, bounds, strict=False):
        found = part.chunk.sequences(part.indices, seed)
        _raise_if_wrong(found, streams, len(part.indices), int(sorted_chunks[begin]))
        pieces.append(found)
    is_sorted = bool((by_chunk[1:] > by_chunk[:-1]).all())
    order = None if is_sorted else np.argsort(by_chunk)
    return {info.name: join([piece[info.name] for piece in pieces], order) for info in streams}


def empty(stream: StreamInformation) -> StreamData:
    """A stream's data for no sequence: a tensor of 0 rows."""
    dtype = torch.from_numpy(np.zeros(0, stream.dtype)).dtype
    if stream.is_sparse:
        nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
        rows = torch.zeros(1, dtype=torch.int64, device="cpu")
        values = torch.zeros(0, dtype=dtype, device="cpu")
        return csr_tensor(rows, nothing, values, (0, stream.shape[0])), None
    return torch.zeros(0, *stream.shape, dtype=dtype, device="cpu"), None


def rows_of(starts: Indices, lengths: Indices) -> Indices:
    """The numbers of all rows of sequences that begin at ``starts``."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    rows: Indices = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return rows


def select(data: torch.Tensor, rows: Indices) -> torch.Tensor:
    """Some rows of a dense or sparse CSR tensor, in order."""
    if data.layout != torch.sparse_csr:
        return data[torch.from_numpy(rows)]
    begins = data.crow_indices().numpy()
    counts = begins[rows + 1] - begins[rows]
    entries = torch.from_numpy(rows_of(begins[rows], counts))
    crow = torch.from_numpy(np.concatenate(([0], np.cumsum(counts))))
    size = (len(rows), data.shape[1])
    return csr_tensor(crow, data.col_indices()[entries], data.values()[entries], size)


def join(pieces: Sequence[StreamData], order: Indices | None = None) -> StreamData:
    """Sequences of several pieces, sorted by ``order`` if there is one."""
    tensors = [data for data, _ in pieces]
    if all(lengths is None for _, lengths in pieces):
        return _sorted(tensors, order), None
    lengths = np.concatenate(
        [np.ones(rows.shape[0], np.int64) if own is None else own.numpy() for rows, own in pieces]
    )
    if order is None:
        return _sorted(tensors, None), torch.from_numpy(lengths)
    starts = np.cumsum(lengths) - lengths
    data = _sorted(tensors, rows_of(starts[order], lengths[order]))
    return data, torch.from_numpy(lengths[order])


def _sorted(tensors: list[torch.Tensor], rows: Indices | None) -> torch.Tensor:
    """Some rows, in order, of all tensors one after another; of dense ones each exactly once."""
    if rows is None:
        return _stack(tensors)
    if len(tensors) == 1 or tensors[0].layout == torch.sparse_csr:
        return select(_stack(tensors), rows)
    into = torch.empty(len(rows), dtype=torch.int64, device="cpu")
    into[torch.from_numpy(rows)] = torch.arange(len(rows), device="cpu")
    found = tensors[0].new_empty(len(rows), *tensors[0].shape[1:])
    for part, places in zip(tensors, into.split([len(t) for t in tensors]), strict=True):
        found.index_copy_(0, places, part)  # without a copy of all before
    return found


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    if tensors[0].layout != torch.sparse_csr:
        return torch.cat(tensors)
    counts = torch.cat([t.crow_indices().diff() for t in tensors])
    crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    columns = torch.cat([t.col_indices() for t in tensors])
    size = (sum(t.shape[0] for t in tensors), tensors[0].shape[1])
    return csr_tensor(crow, columns, torch.cat([t.values() for t in tensors]), size)


def _raise_if_wrong(
    found: Mapping[str, StreamData],
    streams: Sequence[StreamInformation],
    num_sequences: int,
    chunk_id: int,
) -> None:
    for stream in streams:
        if stream.name not in found:
            raise DataError(
                f"Chunk {chunk_id} has no stream {stream.name!r}, which stream_infos() lists. It "
                f"has {', '.join(found) or 'none'}."
            )
        data, lengths = found[stream.name]
        wanted = stream.shape
        num_rows = num_sequences if lengths is None else int(lengths.sum())
        counted = num_sequences if lengths is None else len(lengths)
        if counted != num_sequences or tuple(data.shape) != (num_rows, *wanted):
            raise DataError(
                f"Chunk {chunk_id} returned stream {stream.name!r} as a tensor "
                f"{tuple(data.shape)} and {counted} lengths for {num_sequences} sequences. It "
                f"should be {(num_rows, *wanted)}: the samples of all sequences one after another, "
                f"each of the shape {wanted} that stream_infos() gives."
            )
