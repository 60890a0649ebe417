"""The log of pytorch-pfn-extras with means over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytorch_pfn_extras.training.extensions import log_report
from pytorch_pfn_extras.training.trigger import TriggerLike  # type: ignore[attr-defined]

from torchmn.record import recording
from torchmn.train.evaluation import WeightedSums, means_of, merge_sums
from torchmn.train.evaluation.sums import scalars_of

if TYPE_CHECKING:
    from torchmn.comm import Communicator


class LogReport(log_report.LogReport):
    """Writes the log from what all ranks observed. *Collective*: added on all ranks.

    Each rank adds up what it observes, and the sums are gathered for each entry of the log, so an
    iteration requires no communication. Rank 0 writes the file.

    Args:
        comm: the ranks that participate.
        keys, trigger, postprocess, filename: as for pytorch-pfn-extras' LogReport.

    Example:
        >>> report = torchmn.train.LogReport(comm, trigger=(1, "epoch"))
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        keys: list[str] | None = None,
        trigger: TriggerLike = (1, "epoch"),
        postprocess: Callable[[Mapping[str, Any]], None] | None = None,
        filename: str | None = None,
    ) -> None:
        self._comm = comm
        super().__init__(keys, trigger, postprocess, filename)

    def _init_summary(self) -> None:
        self._summary: Any = SummaryOverRanks(self._comm)

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local.

        Values since the last entry are counted once: rank 0 keeps them all.
        """
        parts = [
            {name: (pair[0], pair[1]) for name, pair in state["_summary"].items()}
            for state in states
        ]
        merged = {name: list(pair) for name, pair in merge_sums(parts).items()}
        return {**states[0], "_summary": merged if comm.rank == 0 else {}}


class SummaryOverRanks:
    """Replaces a ``DictSummary``; its means are over all ranks."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._sums = WeightedSums()

    def add(self, observation: Mapping[str, Any]) -> None:
        """Add the scalars of an iteration. Local."""
        for name, value in scalars_of(observation).items():
            self._sums.add(name, value)

    def compute_mean(self) -> dict[str, float]:
        """Means over ranks and iterations in which a key was observed. *Collective*."""
        means = means_of(merge_sums(self._comm.allgather_obj(self._sums.sums())))
        for name, mean in means.items():
            recording.report_value(name, mean)
        return means

    def state_dict(self) -> dict[str, list[float]]:
        """The sums of this rank. Local."""
        return {name: list(pair) for name, pair in self._sums.sums().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved sums. Local."""
        self._sums = WeightedSums.of(state)
