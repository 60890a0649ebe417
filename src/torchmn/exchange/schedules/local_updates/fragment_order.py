"""When each fragment of the parameters is exchanged."""

from __future__ import annotations

from typing import Any


class FragmentSchedule:
    """Counts the samples of a worker and decides which fragment's block is full. Local.

    Of F fragments, f is due when ``(f + 1) / F`` of ``share`` samples were counted, the worker's
    share of a block; then the count starts again from zero.
    """

    def __init__(self, num_fragments: int, share: float) -> None:
        self.num_fragments = num_fragments
        self.share = share
        self.restart()

    def restart(self) -> None:
        """Begin a block of the first fragment."""
        self._next = 0
        self._samples = 0.0
        self._num_due = 0

    def count(self, num_samples: float) -> None:
        """Add samples that this worker has processed."""
        self._samples += num_samples
        position = (self._next + self._num_due) % self.num_fragments
        while self._samples * self.num_fragments >= self.share * (position + 1):
            self._num_due += 1
            position += 1
            if position == self.num_fragments:
                position, self._samples = 0, 0.0

    def take_due(self) -> bool:
        """Whether the next fragment is due. Each fragment is reported once."""
        is_due = self._num_due > 0
        self._num_due -= is_due
        return is_due

    def advance(self) -> int:
        """The index of the next fragment to exchange; moves on to the one after it."""
        index = self._next
        self._next = (index + 1) % self.num_fragments
        return index

    def state_dict(self) -> dict[str, Any]:
        """The position in the order and the samples counted so far."""
        return {"next": self._next, "samples": self._samples, "num_due": self._num_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`."""
        self._next, self._samples = state["next"], state["samples"]
        self._num_due = state["num_due"]
