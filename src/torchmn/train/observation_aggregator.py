"""Aggregating the observations of all ranks, and stopping early on them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytorch_pfn_extras.training import extension
from pytorch_pfn_extras.training.trigger import TriggerLike, get_trigger  # type: ignore[attr-defined]
from pytorch_pfn_extras.training.triggers.early_stopping_trigger import EarlyStoppingTrigger

from torchmn.comm import Communicator
from torchmn.comm.heartbeat import work_of_all_ranks
from torchmn.train.evaluation import WeightedSums, means_of

Aggregator = Callable[[list[list[Any]]], Any]


def mean_of_all(observations: list[list[Any]]) -> float | None:
    """The mean of all values of all ranks, a `Ratio` weighted by its count; None without values."""
    sums = WeightedSums()
    for of_rank in observations:
        for value in of_rank:
            sums.add("value", value)
    return means_of(sums.sums()).get("value")


class ObservationAggregator(extension.Extension):
    """Adds one value for all ranks to the observation. *Collective* when its trigger fires.

    Args:
        comm: the ranks that participate.
        original_key: what each rank observes, not necessarily in every iteration.
        aggregated_key: the name of the result; ``original_key`` by default.
        comm_trigger: when to communicate. Values are kept until then.
        aggregator: called on rank 0 with a list for each rank of the values since the last call;
            returns the result, or None for no result. The mean of all values by default.

    Raises CommunicationError on the other ranks: the aggregator raised.

    Example:
        >>> aggregator = torchmn.ObservationAggregator(comm, "main/loss", "main/mean_loss")
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
        """Keep the observed value; communicate if the trigger fires."""
        if self.original_key in manager.observation:
            value = manager.observation[self.original_key]
            self._history.append(_as_number(value))
        if not self.comm_trigger(manager):
            return
        history, self._history = self._history, []
        gathered = self.comm.gather_obj(history)
        # The other ranks wait for rank 0, and must hear of an exception that the function raises.
        with work_of_all_ranks(self.comm, f"the aggregator of '{self.original_key}'") as gather:
            own = None if gathered is None else _as_number(self.aggregator(gathered))
        result = gather.finish(own)[0]
        if result is not None:
            manager.observation[self.aggregated_key] = result

    def state_dict(self) -> dict[str, Any]:
        """The values of this rank that were not communicated yet."""
        return {"history": list(self._history), "trigger": self.comm_trigger.state_dict()}

    def load_state_dict(self, to_load: dict[str, Any]) -> None:
        """Restore a saved state."""
        self._history = list(to_load["history"])
        self.comm_trigger.load_state_dict(to_load["trigger"])

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local.

        Each value is kept once: rank i modulo the number of ranks keeps those of old rank i.
        """
        mine = [state["history"] for state in states[comm.rank :: comm.size]]
        return {**states[0], "history": [value for history in mine for value in history]}


def _as_number(value: Any) -> Any:
    """Convert scalars to numbers and pairs to pairs of numbers, which are sent without pickle."""
    if isinstance(value, tuple) and len(value) == 2:
        return (float(value[0]), float(value[1]))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    shape = getattr(value, "shape", None)
    return float(value) if shape is not None and len(shape) == 0 else value


class MultiNodeEarlyStoppingTrigger(EarlyStoppingTrigger):
    """Fires on all ranks when the mean over ranks of an observation no longer improves.

    A stop trigger. *Collective*: every rank calls it after every iteration. The arguments are those
    of ``EarlyStoppingTrigger`` and ``suffix``, which is appended to ``monitor`` to name the mean in
    the observation.

    Args:
        comm: the ranks that participate.
        check_trigger: when to compare the mean since the last time with the best one.
        monitor: the name of the observation.
        patience: the number of comparisons in a row without improvement to allow; 3 by default.
        mode: ``max``, ``min`` or ``auto``: ``max`` if the name contains "accuracy".
        verbose: print a message when it stops; on rank 0 only.
        max_trigger: the maximum length of training.
        suffix: see above.

    Example:
        >>> stop = torchmn.MultiNodeEarlyStoppingTrigger(comm, monitor="main/loss", patience=5)
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        check_trigger: TriggerLike = (1, "epoch"),
        monitor: str = "main/loss",
        patience: int | None = None,
        mode: str = "auto",
        verbose: bool = False,
        max_trigger: tuple[int, str] = (100, "epoch"),
        suffix: str = "_aggregated",
    ) -> None:
        self._aggregator = ObservationAggregator(comm, monitor, monitor + suffix)
        super().__init__(
            check_trigger=check_trigger,
            monitor=monitor + suffix,
            patience=3 if patience is None else patience,
            mode=mode,
            verbose=verbose and comm.rank == 0,
            max_trigger=max_trigger,
        )

    def __call__(self, manager: Any) -> bool:
        """Whether to stop."""
        self._aggregator(manager)
        return super().__call__(manager)

    def state_dict(self) -> dict[str, Any]:
        """The best value and the number of comparisons without improvement."""
        return {
            "count": self.count,
            "best": self.best,
            "summary": self._summary.state_dict(),
            "aggregator": self._aggregator.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.count, self.best = state["count"], state["best"]
        self._summary.load_state_dict(state["summary"])
        self._aggregator.load_state_dict(state["aggregator"])

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local."""
        parts = [state["aggregator"] for state in states]
        return {**states[0], "aggregator": self._aggregator.reshard_state_dict(parts, comm)}
