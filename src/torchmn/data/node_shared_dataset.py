"""One copy of the root's data set for each node, in memory that the node's ranks share."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from torchmn.base.errors import TorchmnError
from torchmn.cluster.units import MiB
from torchmn.comm.heartbeat import raise_if_any_failed, run_on_one_rank
from torchmn.comm.transports.shared_segment import Address, SharedMemorySegment, memory_error_from
from torchmn.data.packed_samples import COPY, Layout, PackedSamples, pack_dataset
from torchmn.data.sub_dataset import SizedDataset

if TYPE_CHECKING:
    from torchmn.comm import Communicator

Made = TypeVar("Made")

# Nodes forward the copy along a chain; small chunks let all of them work at the same time.
_CHUNK_BYTES = 4 * MiB


def copy_to_nodes(
    dataset: SizedDataset[Any] | None,
    comm: Communicator,
    root: int,
    *,
    max_buf_len: int,
    shared_directory: str,
) -> PackedSamples:
    """Give every node one copy of the root's data set, and every rank a view of it. *Collective*.

    The root reads every sample once and writes it to its node's memory. From there the bytes are
    forwarded along a chain with one rank of each node; all ranks synchronize after every
    ``max_buf_len`` bytes, so the whole copy may take longer than the communicator's time limit.
    Then the other ranks of a node attach. The memory has no name (see `shared_segment`), so nothing
    is left after a crash.

    Raises:
        DataError, SharedMemoryError: the data set raised, or a node's memory is too small; with the
            same message on all ranks.
    """
    writers = [root if root in ranks else ranks[0] for ranks in comm.topology.nodes]
    own_writer = writers[comm.inter_rank]
    memory: SharedMemorySegment | None = None

    def pack(heartbeat: Callable[[], None]) -> tuple[Layout, int]:
        nonlocal memory
        source = cast("SizedDataset[Any]", dataset)
        memory, layout = pack_dataset(source, comm.trust, shared_directory, heartbeat)
        return layout, memory.size

    layout, size = run_on_one_rank(comm, root, pack)
    if len(writers) > 1:
        is_receiver = comm.rank == own_writer and comm.rank != root
        received, error = _attempt(
            lambda: (
                SharedMemorySegment.create(size, COPY, shared_directory) if is_receiver else None
            )
        )
        raise_if_any_failed(comm, error)
        memory = received if is_receiver else memory
        chain = [root, *(writer for writer in writers if writer != root)]
        _pass_along(comm, chain, memory, size, max_buf_len, shared_directory)
    addresses = comm.allgather_obj(None if memory is None else memory.address())

    def open_here() -> PackedSamples:
        own = memory or SharedMemorySegment.attach(cast(Address, addresses[own_writer]))
        return PackedSamples(own, layout, comm.trust)

    packed, error = _attempt(open_here)
    # After this every rank has its node's memory open, and writers may exit.
    raise_if_any_failed(comm, error)
    return cast(PackedSamples, packed)


def _attempt(make: Callable[[], Made]) -> tuple[Made | None, Exception | None]:
    """Return an error, so that a rank first tells the others, which would wait for it."""
    try:
        return make(), None
    except (TorchmnError, OSError) as error:
        return None, error


def _pass_along(
    comm: Communicator,
    chain: list[int],
    memory: SharedMemorySegment | None,
    size: int,
    max_buf_len: int,
    shared_directory: str,
) -> None:
    """Copy ``size`` bytes from ``chain[0]`` to all others of the chain. *Collective*."""
    for begin in range(0, size, max_buf_len):
        end = min(begin + max_buf_len, size)
        error = mapped = None
        if memory is not None:
            try:
                if comm.rank != chain[0]:
                    memory.reserve(begin, end)
                mapped = memory.map_shared()
            except OSError as full:
                error = memory_error_from(full, size, shared_directory, COPY)
        # All ranks learn of a full memory before the chunk moves, or others would wait in recv.
        raise_if_any_failed(comm, error)
        if mapped is not None:
            _pass_chunk(comm, chain, mapped, begin, end)


def _pass_chunk(
    comm: Communicator, chain: list[int], mapped: mmap.mmap, begin: int, end: int
) -> None:
    """Receive a chunk from the previous rank of the chain and send it to the next one."""
    place = chain.index(comm.rank)
    for offset in range(begin, end, _CHUNK_BYTES):
        count = min(_CHUNK_BYTES, end - offset)
        piece = torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=offset)
        if place > 0:
            piece.copy_(cast(Tensor, comm.recv(chain[place - 1])))
        if place + 1 < len(chain):
            comm.send(piece, chain[place + 1])
