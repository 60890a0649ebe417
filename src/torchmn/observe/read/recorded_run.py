"""The record of a run as arrays: the result of `torchmn.observe.read.run_reader`."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchmn.record.records import GradientTimes, RunEnd, RunStart

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

RUNNING_S = 120.0  # a run whose files were written to since is taken to continue


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Exchanges of a rank, one per row, in order. Columns are some of `records.Bucket`."""

    row: Integers  # of the step, in `Steps`
    nbytes: Floats
    sent_nbytes: Floats
    started_s: Floats
    ended_s: Floats
    encode_s: Floats
    decode_s: Floats


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of a rank, one per row, in order. Columns as in `records.Step`, NaN for None.

    What no report needs is not read.
    """

    step: Integers
    at_s: Floats
    seconds: Floats
    phases: NDArray[np.float32]  # seconds ``(steps, phases)``, in the order of `records.PHASES`
    samples: Floats
    run_queue_s: Floats
    cpu_s: Floats
    others_cpu_s: Floats
    buckets: Buckets

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The record of one rank, or a sample of it."""

    start: RunStart
    settings: dict[str, str]  # the last ones
    steps: Steps
    sent: dict[str, int]  # bytes by host, over `steps`
    values: dict[str, tuple[Integers, Floats]]  # what the script reports, by name: steps and values
    memory: tuple[Floats, Floats, Floats]  # ``at_s``, bytes of the process, bytes of the device
    gradient_times: list[GradientTimes]
    first_step: int
    last_step: int  # of the whole record, also where `steps` is a sample
    end: RunEnd | None
    num_damaged: int  # lines that were read and are none of ours, without a last one that was cut
    is_sampled: bool
    # More than 1: the files continue those of an earlier process, which was left out.
    num_starts: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """The records of a run, by rank."""

    folder: Path
    ranks: tuple[RankRecord, ...]
    unreadable: dict[int, str]  # ranks whose file does not begin as it should, and why
    modified_s: float  # when a file was last written to, in seconds of the epoch

    @property
    def size(self) -> int:
        """Number of ranks of the run."""
        return self.ranks[0].start.size

    @property
    def is_sampled(self) -> bool:
        """Whether only a sample of the steps was read."""
        return any(rank.is_sampled for rank in self.ranks)

    @property
    def is_running(self) -> bool:
        """Whether the run seems to continue: a rank has not ended, and a file changed recently."""
        has_ended = all(rank.end is not None for rank in self.ranks)
        return not has_ended and time.time() - self.modified_s < RUNNING_S
