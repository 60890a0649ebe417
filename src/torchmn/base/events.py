"""Events: what torchmn does, reported to observers while it happens.

The record of a run (`torchmn.record`) and the launcher's monitor (`script_monitor`) are observers.
The observed code does not import them and behaves the same without them. It calls them in place:

    for observer in events.observers:
        observer.phase("exchange", True)

Without observers this only iterates over an empty tuple.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Stage = Literal["ready", "queued", "started", "ended"]


class Communicator(Protocol):
    """The methods of a communicator that observers use."""

    @property
    def num_sent_nbytes(self) -> int:
        """Bytes sent since the communicator was created."""

    def traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes sent and bytes received since the communicator was created, by remote host."""


class Collective(Protocol):
    """A collective that has not completed within its time limit."""

    group: str
    in_group: int
    limit_s: float


class Collectives(Protocol):
    """The collectives of one communicator. All methods may be called from any thread."""

    def overdue(self) -> Collective | None:
        """A collective that exceeded its time limit, or None."""

    def describe(self) -> Sequence[Any]:
        """The most recent collective of each group."""

    def recent(self, count: int) -> Sequence[Any]:
        """The last collectives, the oldest first."""

    def engine_status(self) -> Any:
        """What is running and queued; None if these collectives have no engine."""


@dataclass(frozen=True)
class Gradient:
    """The size of a parameter whose gradient has been computed."""

    numel: int
    nbytes: int
    is_small: bool


class Observer:
    """Base class of observers: one method for each kind of event in this process. Local.

    Methods are called on the thread on which the event happens and do nothing by default; a
    subclass overrides those that it needs. They must neither raise nor wait for another thread.
    """

    ends_lost_ranks = False
    """Whether a launcher supervises the job and ends processes whose peers are lost."""
    notice = ""
    """Why this process must save and exit, if a launcher knows that its host will be preempted."""

    # ---- what is done ----

    def phase(self, name: str, begins: bool) -> None:
        """The current thread begins or ends a phase of a step, such as ``exchange``.

        The phase ``backward`` is reported as begun at each gradient of a backward pass and ends
        with the pass; ``pack`` copies a gradient into its bucket. Phases may be nested. If a phase
        raises, its end may not be reported.
        """

    def forward(self, num_samples: int | None, *, is_training: bool) -> None:
        """The forward of a trained model is called, with a batch of ``num_samples`` if known."""

    def gradient(self, gradient: Gradient) -> None:
        """A gradient has been computed. Reported in some steps only."""

    def step_begins(self, optimizer: object) -> None:
        """An optimizer begins its step."""

    def step_ended(self, optimizer: object, number: int | None, samples: int | None = None) -> None:
        """An optimizer ended its step with this ``number``; None if the step raised.

        ``samples`` is the number of samples of the step, if `forward` did not report them.
        """

    def optimizer_closed(self, optimizer: object) -> None:
        """An optimizer will not step again."""

    def settings(self, step: int, values: dict[str, str]) -> None:
        """Training uses these settings from step ``step`` on."""

    # ---- what is exchanged ----

    def communicator(self, comm: Communicator, begins: bool) -> None:
        """A communicator was created, or is being finalized."""

    def exchange(self, comm: Communicator, block: Any, bucket: int | None, stage: Stage) -> None:
        """A block is ready or queued for its sum, or the sum has started or ended.

        ``bucket`` is the number of the bucket, or None if the block is not a bucket of gradients.
        """

    def collectives(self, recorder: Collectives) -> None:
        """A new communicator records its collectives in ``recorder``."""

    def collective(self, entry: Collective) -> None:
        """A collective exceeded its time limit. Called before the error is raised."""

    def joining(self, limit_s: float, begins: bool) -> None:
        """This process starts to join the other ranks, or all ranks have joined."""

    def failed(self, error: BaseException) -> None:
        """A communicator has become unusable because of ``error``; the script may still run."""

    def memory(self, device_nbytes: int) -> None:
        """The record has measured the memory that torch has allocated on this rank's device."""

    def checkpoint_saved(self, step: int) -> None:
        """All ranks have saved the checkpoint of step ``step``."""


observers: tuple[Observer, ...] = ()
"""The observers of this process, in the order in which they were added."""

# `add` and `remove` replace the tuple instead of changing a list: other threads iterate over
# `observers` at any time, without a lock. The lock is for two changes at once.
_changing = threading.Lock()


def add(observer: Observer) -> None:
    """Add an observer: it is called for all later events."""
    global observers
    with _changing:
        observers = (*observers, observer)


def remove(observer: Observer) -> None:
    """Remove an observer. Does nothing if it was removed before."""
    global observers
    with _changing:
        observers = tuple(other for other in observers if other is not observer)


@contextmanager
def during(name: str) -> Iterator[None]:
    """Context manager and decorator that reports its body as the phase ``name``."""
    for observer in observers:
        observer.phase(name, True)
    try:
        yield
    finally:
        for observer in observers:
            observer.phase(name, False)
