"""Capturing the random generators of a sampler, so that it can draw the same order again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, TypeVar

import torch

from torchmn.data import rng_state

Batch = TypeVar("Batch")
_CPU = torch.device("cpu")
"""Samplers draw on the CPU, whatever device the rank trains on."""


def capture(sampler: object) -> dict[str, Any]:
    """The state of every generator that ``sampler`` may use, as tensors and numbers. Local.

    These are the process's own (torch's on the CPU, Python's, numpy's) and the torch generators
    that the sampler, or the sampler in it, has as its ``generator``.
    """
    return {
        **rng_state.capture(_CPU),
        "generators": [generator.get_state() for generator in _generators(sampler)],
    }


def has_drawn_since(state: Mapping[str, Any], sampler: object) -> bool:
    """Whether any of the generators has changed since a `capture`. Local."""
    now = capture(sampler)
    return not (
        _are_equal([state["torch"], *state["generators"]], [now["torch"], *now["generators"]])
        and state["python"] == now["python"]
        and state["numpy"] == now["numpy"]
    )


@contextmanager
def process_numbers_kept() -> Iterator[None]:
    """Run the body, after which the process's own generators are as before. Local."""
    before = rng_state.capture(_CPU)
    try:
        yield
    finally:
        rng_state.restore(before, _CPU)


def set_process_numbers(state: Mapping[str, Any]) -> None:
    """Give the process's own generators the state of a `capture`. Local."""
    rng_state.restore(state, _CPU)


@contextmanager
def replayed(state: Mapping[str, Any] | None, sampler: object) -> Iterator[None]:
    """Run the body with the generators in the state of a `capture`. Local; nothing for None.

    Afterwards the process's own generators are as before, and the sampler's are where the draws
    have left them.
    """
    if state is None:
        yield
        return
    with process_numbers_kept():
        for generator, own in zip(_generators(sampler), state["generators"], strict=True):
            generator.set_state(own)
        set_process_numbers(state)
        yield


class GeneratorMarks:
    """Records the states of a sampler's torch generators after each batch of a pass. Local.

    A pass is drawn ahead of the loop. If the loop leaves it early, `rewind` gives the generators
    the states that they would have if it had been drawn batch by batch.
    """

    def __init__(self, sampler: object) -> None:
        self._generators = _generators(sampler)
        self._states = [(0, self._now())]
        """(number of batches, states) for each batch that has changed a generator."""
        self._last = self._states[0][1]

    def marked(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, and record the states as they are drawn."""
        for number, batch in enumerate(batches, 1):
            if self._generators and not _are_equal(states := self._now(), self._states[-1][1]):
                self._states.append((number, states))
            yield batch

    def drawn(self) -> None:
        """Note that drawing pauses: until it goes on, the script may use the generators."""
        self._last = self._now()

    def forget_before(self, num_batches: int) -> None:
        """Discard states that only fewer batches need: an endless pass keeps few of them."""
        del self._states[: self._index(num_batches)]

    def rewind(self, num_batches: int) -> None:
        """Restore the states after this many batches, unless the script has used the generators."""
        if _are_equal(self._now(), self._last):
            _, states = self._states[self._index(num_batches)]
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    def _index(self, num_batches: int) -> int:
        return bisect_right(self._states, num_batches, key=itemgetter(0)) - 1

    def _now(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]


def _are_equal(states: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, states, others))


def _generators(sampler: object) -> list[torch.Generator]:
    """The torch generators of a sampler and of the samplers nested in it, each once."""
    found: list[torch.Generator] = []
    seen: list[object] = []
    while sampler is not None and not any(sampler is other for other in seen):
        seen.append(sampler)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found:
            found.append(generator)
        sampler = getattr(sampler, "sampler", None)
    return found
