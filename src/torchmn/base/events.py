"""What torchmn does, told to observers while it does it.

The record of a run (`torchmn.record`) and the launcher's monitor (`script_monitor`) are observers.
What they observe imports neither of them, and works the same without. It says so in place:

    for observer in events.observers:
        observer.phase("exchange", True)

which costs nothing but a look at an empty tuple where nobody observes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Stage = Literal["ready", "queued", "started", "ended"]


class Communicator(Protocol):
    """The communicator as observers see it."""

    @property
    def num_sent_nbytes(self) -> int:
        """Bytes sent since its beginning."""

    def traffic(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes sent and received since its beginning, by the host at the other end."""


class Collective(Protocol):
    """A collective that has not completed within its time limit."""

    group: str
    in_group: int
    limit_s: float


class Collectives(Protocol):
    """The collectives of one communicator, which any thread may read."""

    def overdue(self) -> Collective | None:
        """A collective that has not completed within its time limit, if any."""

    def describe(self) -> Sequence[Any]:
        """The newest collective of each group."""


@dataclass(frozen=True)
class Gradient:
    """A parameter whose gradient is final."""

    numel: int
    nbytes: int
    is_small: bool


class Observer:
    """Is called for what happens in this process, on the thread on which it happens.

    A method of this class does nothing, so that an observer defines those that it needs. It must
    neither raise nor wait for another thread.
    """

    ends_lost_ranks = False
    """Whether somebody ends a process of this job whose peers are gone."""

    # ---- what is done ----

    def phase(self, name: str, begins: bool) -> None:
        """The thread begins or ends a part of a step, such as ``exchange``.

        In a backward pass ``backward`` begins with a gradient, again and again, and ends with the
        pass; ``pack`` copies a gradient into its bucket. Parts may be nested; one that raises may
        lack its end.
        """

    def forward(self, num_samples: int | None, *, is_training: bool) -> None:
        """A model that an optimizer trains is called. ``num_samples``: of its batch, if known."""

    def gradient(self, gradient: Gradient) -> None:
        """A gradient is final, in some steps only."""

    def step_begins(self, optimizer: object) -> None:
        """An optimizer begins its step."""

    def step_ended(self, optimizer: object, number: int | None, samples: int | None = None) -> None:
        """An optimizer has ended its step: ``number`` is None if the step raised.

        ``samples``: of the step, if forward has not seen them.
        """

    def optimizer_closed(self, optimizer: object) -> None:
        """An optimizer will not step again."""

    def settings(self, step: int, values: dict[str, str]) -> None:
        """The training uses these settings from a step on."""

    # ---- what is exchanged ----

    def communicator(self, comm: Communicator, begins: bool) -> None:
        """A communicator was made, or is finalized."""

    def exchange(self, comm: Communicator, block: Any, bucket: int | None, stage: Stage) -> None:
        """A block is ready or queued, or its sum has started or ended.

        ``bucket``: its number, None for what is no bucket of gradients.
        """

    def collectives(self, recorder: Collectives) -> None:
        """The collectives of a new communicator can be read here, for as long as it exists."""

    def collective(self, entry: Collective) -> None:
        """A collective has exceeded its time limit; its error is raised next."""

    def joining(self, limit_s: float, begins: bool) -> None:
        """This process begins to join the others, or all have joined."""

    def failed(self, error: BaseException) -> None:
        """A communicator cannot be used any more, whether or not the script ends."""

    def checkpoint_saved(self, step: int) -> None:
        """All ranks have finished a checkpoint."""


observers: tuple[Observer, ...] = ()
"""Those of this process, in the order in which they came. Replaced, never changed."""

_changing = threading.Lock()


def add(observer: Observer) -> None:
    """Call an observer from now on."""
    global observers
    with _changing:
        observers = (*observers, observer)


def remove(observer: Observer) -> None:
    """Call it no more; removing it again does nothing."""
    global observers
    with _changing:
        observers = tuple(other for other in observers if other is not observer)


@contextmanager
def during(name: str) -> Iterator[None]:
    """What is done inside is this part of a step. Also a decorator."""
    for observer in observers:
        observer.phase(name, True)
    try:
        yield
    finally:
        for observer in observers:
            observer.phase(name, False)
