"""When which fragment of the parameters is exchanged."""

from __future__ import annotations

from typing import Any


class FragmentSchedule:
    """Counts what a worker has seen, and says which fragment's block is full. Local.

    Of F fragments, f is due when ``(f + 1) / F`` of ``share`` samples were counted, its share of a
    block of all workers; then it begins anew.
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
        """This worker has seen samples."""
        self._samples += num_samples
        place = (self._next + self._num_due) % self.num_fragments
        while self._samples * self.num_fragments >= self.share * (place + 1):
            self._num_due += 1
            place += 1
            if place == self.num_fragments:
                place, self._samples = 0, 0.0

    def take_due(self) -> bool:
        """Whether the next fragment is due; it is not asked for twice."""
        is_due = self._num_due > 0
        self._num_due -= is_due
        return is_due

    def advance(self) -> int:
        """The fragment whose turn it is, by index. Behind it comes the next one's."""
        index = self._next
        self._next = (index + 1) % self.num_fragments
        return index

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"next": self._next, "samples": self._samples, "num_due": self._num_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._next, self._samples = state["next"], state["samples"]
        self._num_due = state["num_due"]
