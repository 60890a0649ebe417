"""Observations of all ranks as one, and early stopping by it (ancestors 1.8)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pytorch_pfn_extras.training import extension
from pytorch_pfn_extras.training.trigger import (  # type: ignore[attr-defined]
    TriggerLike,
    get_trigger,
)

from torchmn.errors import CommunicationError
from torchmn.evaluation import WeightedSums, means_of

if TYPE_CHECKING:
    from torchmn.communicators import Communicator

Aggregator = Callable[[list[list[Any]]], Any]


def mean_of_all(observations: list[list[Any]]) -> float | None:
    """The mean of all values of all ranks; a `Ratio` counts as often as it says. None: no value."""
    sums = WeightedSums()
    for of_rank in observations:
        for value in of_rank:
            sums.add("value", value)
    return means_of(sums.sums()).get("value")


class ObservationAggregator(extension.Extension):
    """Puts one value for all ranks into the observation. *Collective* where its trigger fires.

    Args:
        comm: who takes part.
        original_key: what each rank observes, at least now and then.
        aggregated_key: the name of the result; the same name if not given.
        comm_trigger: when to communicate. Between, values are kept.
        aggregator: from a list per rank of the values since the last time to the result; None means
            no result. It is called at rank 0. The mean of all values if not given.

    Raises CommunicationError on the other ranks: the aggregator raised.
    """

    trigger = (1, "iteration")
    priority = extension.PRIORITY_EDITOR

    def __init__(
        self,
        comm: Communicator,
        original_key: str,
        aggregated_key: str | None = None,
        *,
        comm_trigger: TriggerLike = (1, "iteration"),
        aggregator: Aggregator | None = None,
    ) -> None:
        self.comm = comm
        self.original_key = original_key
        self.aggregated_key = original_key if aggregated_key is None else aggregated_key
        self.comm_trigger = get_trigger(comm_trigger)
        self.aggregator = mean_of_all if aggregator is None else aggregator
        self._history: list[Any] = []

    def __call__(self, manager: Any) -> None:
        """Keep what is observed; communicate if it is time."""
        if self.original_key in manager.observation:
            value = manager.observation[self.original_key]
            self._history.append(_as_number(value))
        if not self.comm_trigger(manager):
            return
        history, self._history = self._history, []
        gathered = self.comm.gather_obj(history)
        result = self._aggregated(gathered)
        if result is not None:
            manager.observation[self.aggregated_key] = result

    def _aggregated(self, gathered: list[list[Any]] | None) -> Any:
        if gathered is None:
            problem, result = self.comm.bcast_obj(None)
            if problem is not None:
                raise CommunicationError(
                    f"{self.comm.rank_label}: the aggregator of '{self.original_key}' raised "
                    f"{problem} on rank 0."
                )
            return result
        try:
            result = _as_number(self.aggregator(gathered))
        except Exception as error:
            self.comm.bcast_obj((f"{type(error).__name__}: {error}", None))
            raise
        self.comm.bcast_obj((None, result))
        return result

    def state_dict(self) -> dict[str, Any]:
        """The values that were not communicated yet, of this rank."""
        return {"history": list(self._history), "trigger": self.comm_trigger.state_dict()}

    def load_state_dict(self, to_load: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._history = list(to_load["history"])
        self.comm_trigger.load_state_dict(to_load["trigger"])

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local.

        Every value that was kept is kept once: those of old rank i by rank i modulo their number.
        """
        mine = [state["history"] for state in states[comm.rank :: comm.size]]
        return {**states[0], "history": [value for history in mine for value in history]}

    def __deepcopy__(self, memo: dict[int, Any]) -> ObservationAggregator:
        """Share the communicator: managers of pytorch-pfn-extras copy their stop trigger."""
        twin = copy.copy(self)
        twin.comm_trigger = copy.deepcopy(self.comm_trigger, memo)
        twin._history = list(self._history)
        return twin


def _as_number(value: Any) -> Any:
    """Scalars as numbers and pairs as pairs of them, which travel without pickle."""
    if isinstance(value, tuple) and len(value) == 2:
        return (float(value[0]), float(value[1]))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    shape = getattr(value, "shape", None)
    return float(value) if shape is not None and len(shape) == 0 else value
