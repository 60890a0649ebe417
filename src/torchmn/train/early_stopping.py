"""Early stopping on all ranks together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytorch_pfn_extras.training.trigger import Trigger, TriggerLike  # type: ignore[attr-defined]
from pytorch_pfn_extras.training.triggers.early_stopping_trigger import EarlyStoppingTrigger

from torchmn.train.observation_aggregator import ObservationAggregator

if TYPE_CHECKING:
    from torchmn.comm import Communicator


class MultiNodeEarlyStoppingTrigger(Trigger):
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
        self._trigger = EarlyStoppingTrigger(
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
        return self._trigger(manager)

    def get_training_length(self) -> tuple[float, str]:
        """The maximum length of training, for progress bars."""
        return self._trigger.get_training_length()

    def may_fire(self, iteration: int, epoch_len: int) -> bool:
        """Whether it could fire in an iteration."""
        return self._trigger.may_fire(iteration, epoch_len)

    def state_dict(self) -> dict[str, Any]:
        """The best value and the number of comparisons without improvement."""
        trigger = self._trigger
        return {
            "count": trigger.count,
            "best": trigger.best,
            "summary": trigger._summary.state_dict(),
            "aggregator": self._aggregator.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self._trigger.count, self._trigger.best = state["count"], state["best"]
        self._trigger._summary.load_state_dict(state["summary"])
        self._aggregator.load_state_dict(state["aggregator"])

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local."""
        parts = [state["aggregator"] for state in states]
        return {**states[0], "aggregator": self._aggregator.reshard_state_dict(parts, comm)}

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeEarlyStoppingTrigger:
        """Share the communicator: managers of pytorch-pfn-extras copy their stop trigger."""
        twin = copy.copy(self)
        twin._trigger = copy.deepcopy(self._trigger, memo)
        twin._aggregator = copy.deepcopy(self._aggregator, memo)
        return twin
