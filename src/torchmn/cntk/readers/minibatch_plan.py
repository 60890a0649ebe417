"""Which sequences each minibatch of a source has, and its position. Nothing is read here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmn.base.errors import UsageError
from torchmn.cntk.readers.deserializer import ChunkInfo
from torchmn.cntk.readers.randomization import GlobalMinibatch, Position, SequenceOrder
from torchmn.cntk.readers.truncation import RowPosition, TruncatedMinibatch, TruncatedOrder

INFINITELY_REPEAT = 2**64 - 1
"""``max_samples`` or ``max_sweeps`` of a source without end."""
FULL_DATA_SWEEP = 2**64 - 2
"""``max_samples`` of a source that ends after one sweep."""
DEFAULT_WINDOW_IN_CHUNKS = 128


# The sequences of a minibatch over all partitions.
PlannedMinibatch = GlobalMinibatch | TruncatedMinibatch


@dataclass(frozen=True)
class Progress:
    """The position of a source: its next sequence, and the samples of all partitions so far."""

    position: Position | RowPosition
    num_samples: int = 0

    def after(self, minibatch: PlannedMinibatch) -> Progress:
        """The progress after the next minibatch."""
        return Progress(minibatch.next_position, self.num_samples + minibatch.num_samples)


@dataclass(frozen=True)
class Request:
    """The arguments of a call: samples over all partitions, and which partition to return."""

    minibatch_size: int
    num_partitions: int
    partition: int
    crosses_sweeps: bool = True

    @classmethod
    def checked(cls, size: int, num_partitions: int | None, partition: int | None) -> Request:
        """Make a request from the arguments of a call. Raises UsageError: one is out of range."""
        num_partitions = 1 if num_partitions is None else num_partitions
        partition = 0 if partition is None else partition
        if size < 1:
            raise UsageError(
                f"minibatch_size_in_samples={size} must be at least 1: the samples of all "
                "partitions."
            )
        if not 0 <= partition < num_partitions:
            raise UsageError(
                f"partition_index={partition} must be from 0 to num_data_partitions - 1 = "
                f"{num_partitions - 1}. Give num_data_partitions=comm.size, "
                "partition_index=comm.rank."
            )
        return cls(int(size), int(num_partitions), int(partition))


class MinibatchPlan:
    """The minibatches of a source, the same for any number of partitions. Local.

    Args:
        infos: infos of the chunks; only those of blocks that are reached are read.
        max_samples: see `MinibatchSource`, as for the following ones.
        max_sweeps: the number of sweeps after which it ends.
        window_in_chunks: chunks in memory.
        window_in_samples: the same in samples.
        seed: the seed of the shuffling; None keeps the order of the data.
        frame_mode: saved in states, as another order.
        truncation_length: cut sequences into pieces of this length; 0 keeps them whole.
    """

    def __init__(
        self,
        infos: Sequence[ChunkInfo],
        *,
        max_samples: int,
        max_sweeps: int,
        window_in_chunks: int,
        window_in_samples: int,
        seed: int | None,
        frame_mode: bool,
        truncation_length: int,
    ) -> None:
        self._infos = infos
        if max_samples == FULL_DATA_SWEEP:
            max_samples, max_sweeps = INFINITELY_REPEAT, 1
        self._max_samples = max_samples
        self._max_sweeps = max_sweeps
        if not window_in_chunks and not window_in_samples:
            window_in_chunks = DEFAULT_WINDOW_IN_CHUNKS
        self._sequences = SequenceOrder(infos, seed, window_in_chunks, window_in_samples)
        # Of sequences, or of their pieces: both have the same methods.
        self._order: Any = self._sequences
        if truncation_length:
            self._order = TruncatedOrder(self._sequences, truncation_length)
        self._settings = {
            "seed": -1 if seed is None else seed,
            "num_chunks": len(infos),
            "window_in_chunks": window_in_chunks,
            "window_in_samples": window_in_samples,
            "frame_mode": int(frame_mode),
            "truncation_length": truncation_length,
        }

    @property
    def is_infinite(self) -> bool:
        """Whether it never ends."""
        return self._max_samples == INFINITELY_REPEAT and self._max_sweeps == INFINITELY_REPEAT

    @property
    def num_samples_of_sweep(self) -> int | None:
        """Samples in a sweep; None where that is not known without reading the data."""
        infos = self._infos
        known = isinstance(infos, (list, tuple))
        return sum(info.num_samples for info in infos) if known else None

    # ---- minibatches

    def start(self, sweep: int = 0) -> Progress:
        """The progress at the first sequence of a sweep."""
        num_samples = 0
        if sweep and self._max_samples != INFINITELY_REPEAT:
            num_samples = sweep * sum(info.num_samples for info in self._infos)
        return Progress(self._order.start(sweep), num_samples)

    def take(self, progress: Progress, request: Request) -> PlannedMinibatch | None:
        """The next minibatch; None at the end."""
        left = self._max_samples - progress.num_samples
        if left <= 0 or progress.position.sweep >= self._max_sweeps:
            return None
        end_sweep = None if self._max_sweeps == INFINITELY_REPEAT else self._max_sweeps
        size = min(request.minibatch_size, left)
        found: PlannedMinibatch | None = self._order.take(
            progress.position, size, end_sweep, request.crosses_sweeps
        )
        return found

    def fraction(self, progress: Progress) -> float:
        """Sweeps done, with the fraction of the current one, counted in blocks of chunks."""
        return self._sequences.fraction(self._order.reading_at(progress.position))

    # ---- the window

    @property
    def keeps_all_chunks(self) -> bool:
        """Whether all chunks fit into the window."""
        return self._sequences.keeps_all

    def chunk_ids(self, progress: Progress) -> tuple[int, ...]:
        """The chunks of the block that is read."""
        return self._sequences.chunk_ids(self._order.reading_at(progress.position))

    def next_chunk_ids(self, progress: Progress) -> tuple[int, ...]:
        """The chunks of the next block to read by now: the fraction that is done of this block."""
        position = self._order.reading_at(progress.position)
        following = self._sequences.next_block(position)
        if following.sweep == self._max_sweeps:
            return ()
        chunk_ids = self._sequences.chunk_ids(following)
        block = self._sequences.block(position)
        return chunk_ids[: -(-len(chunk_ids) * position.sequence // max(len(block), 1))]

    # ---- state

    def state(self, progress: Progress) -> dict[str, Any]:
        """Numbers for a checkpoint."""
        return {**progress.position.state(), "num_samples": progress.num_samples, **self._settings}

    def restored(self, state: Mapping[str, Any]) -> Progress:
        """The inverse of `state`. Raises UsageError: the state is that of another plan."""
        missing = [name for name in self.state(self.start()) if name not in state]
        if missing:
            raise UsageError(
                f"The state of a MinibatchSource lacks {', '.join(missing)}. It has "
                f"{', '.join(map(str, state)) or 'nothing'}."
            )
        for name, value in self._settings.items():
            if int(state[name]) != value:
                raise UsageError(
                    f"The state was saved with {name}={state[name]} and the source has {value}, "
                    "so its order of samples differs. Make the source as it was when the state was "
                    "saved."
                )
        return Progress(self._order.restored(state), int(state["num_samples"]))
