"""What ranks compare with rank 0 when a pass over a loader begins, beside the order of samples.

The broadcast of the order carries it, so that nothing is sent for it. A script that exchanges
nothing in its steps has no other collective that could.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

if TYPE_CHECKING:
    from torchmn.comm import Communicator


class PassFact(Protocol):
    """Something that is the same on all ranks. Both methods are local, and called on all ranks."""

    def at_pass(self) -> Any:
        """What is compared when a pass begins: numbers and strings; None if nothing is."""

    def compare(self, comm: Communicator, own: Any, of_rank_0: Any) -> None:
        """Raise or warn if this rank's differs from that of rank 0, which are not None."""


class PassFacts:
    """The facts of one communicator, by number. They are not kept alive."""

    def __init__(self) -> None:
        self._facts: WeakValueDictionary[int, PassFact] = WeakValueDictionary()
        self._num_facts = 0

    def add(self, fact: PassFact) -> None:
        """Compare it from now on. All ranks add theirs in the same order."""
        self._facts[self._num_facts] = fact
        self._num_facts += 1

    def now(self) -> dict[int, Any]:
        """What is compared in the pass that begins, by the number of its fact."""
        found = {number: fact.at_pass() for number, fact in sorted(self._facts.items())}
        return {number: value for number, value in found.items() if value is not None}

    def compare(self, comm: Communicator, own: dict[int, Any], rows: Iterable[Any]) -> None:
        """Compare with what rank 0 has sent: rows of `now`."""
        for number, of_rank_0 in rows:
            fact = self._facts.get(number)
            if fact is not None and number in own:
                fact.compare(comm, own[number], of_rank_0)


_known: WeakKeyDictionary[Communicator, PassFacts] = WeakKeyDictionary()


def pass_facts(comm: Communicator) -> PassFacts:
    """What is compared when a pass over a loader of this communicator begins."""
    return _known.setdefault(comm, PassFacts())
