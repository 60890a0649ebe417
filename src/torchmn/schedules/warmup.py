"""Every step in float32 for a number of samples; then another schedule, or the codec.

At first gradients are large and change quickly: the residual of a codec with error feedback is of a
gradient that is out of date, and ranks that train alone move apart. `Warmup(n, EveryStep())` delays
the codec, `Warmup(n, PeriodicAverage())` is post-local SGD (Lin et al., *Don't Use Large
Mini-Batches, Use Local SGD*, 2020). Both are CNTK's ``distributed_after``, with one difference:
CNTK trained redundantly until then, each worker on all data; here the workers share the data from
the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from torchmn.communicators import Communicator
from torchmn.compression import Codec
from torchmn.errors import UnsupportedError, UsageError
from torchmn.gradients.reducer import GradientReducer
from torchmn.resharding import reshard_object, warnings_of
from torchmn.schedules.base import ReplicaConsistency
from torchmn.schedules.every_step import EveryStep
from torchmn.schedules.local_updates.base import LocalUpdateSchedule


class Warmup(EveryStep):
    """`EveryStep` in float32 until ``warmup_samples`` over all workers; then ``schedule``.

    The number of samples is part of each exchange, so that all ranks switch at the same step.

    Args:
        warmup_samples: samples over all workers; 0 starts with ``schedule``.
        schedule: `EveryStep` or a `LocalUpdateSchedule`, which also has the codec.

    Raises UsageError: not a finite number, 0 or more; UnsupportedError: another schedule.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedule = Warmup(20000, torchmn.schedules.BlockMomentum(block_size=4096))
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, schedule=schedule)
    """

    counts_samples = True

    def __init__(self, warmup_samples: float, schedule: EveryStep | LocalUpdateSchedule) -> None:
        if not 0 <= warmup_samples < float("inf"):
            raise UsageError(f"warmup_samples={warmup_samples} must be 0 or more.")
        if not isinstance(schedule, (EveryStep, LocalUpdateSchedule)):
            raise UnsupportedError(
                f"Warmup cannot be followed by {type(schedule).__name__}. Use EveryStep or a "
                "local-update schedule."
            )
        super().__init__()
        self.name = f"warmup+{schedule.name}"
        self.num_sets = schedule.num_sets
        self.warmup_samples = warmup_samples
        self.schedule = schedule
        self.num_warmup_samples = 0.0
        """Over all workers, in the exchanges of the warm-up so far. The same on all ranks."""
        self.is_warming_up = warmup_samples > 0
        self._is_mean_unapplied = False
        """Whether ``p.grad`` is a mean of the warm-up, whose last backward pass has ended."""
        self._is_stepping = False
        self._num_missed_steps = 0
        """Steps of the warm-up since this rank left its loop."""

    @property
    def replica_consistency(self) -> ReplicaConsistency:
        """``per_step`` during the warm-up."""
        return "per_step" if self.is_warming_up else self.schedule.replica_consistency

    def attach(self, reducer: GradientReducer, inner: Optimizer) -> None:
        super().attach(reducer, inner)
        self._comm: Communicator = reducer.comm
        self._codec: Codec | None = reducer.codec
        self.schedule.attach(reducer, inner)
        if self.is_warming_up:
            reducer.reconfigure(self._comm, None)

    def backward_ended(self) -> None:
        if not self.is_warming_up:
            self.schedule.backward_ended()
            return
        super().backward_ended()
        self.num_warmup_samples += self.num_samples
        # Not in step(), which a GradScaler may skip; but a closure may be called again.
        if not self._is_stepping and self._is_complete():
            self._end_warmup()
            self._is_mean_unapplied = True

    def step(self, closure: Callable[[], float] | None) -> float | None:
        if not (self.is_warming_up or self._is_mean_unapplied):
            return self.schedule.step(closure)
        self._is_stepping = True
        try:
            is_exchanged = self._reducer.is_needed
            result = super().step(closure) if is_exchanged else self._inner.step(closure)
        finally:
            self._is_stepping = False
        self._is_mean_unapplied = False
        if self.is_warming_up:
            if not self._reducer.is_needed:  # one rank alone
                self.num_warmup_samples += self._reducer.contribution.num_samples
            if self._is_complete():
                self._end_warmup()
        return result

    def shadow_step(self) -> int:
        self._is_mean_unapplied = False
        if not self.is_warming_up:
            return self.schedule.shadow_step()
        if not self._reducer.is_needed:
            return 0
        num_active = super().shadow_step()
        self.num_warmup_samples += self.num_samples
        # When all ranks have left, the optimizer copies parameters and state.
        self._num_missed_steps = self._num_missed_steps + 1 if num_active else 0
        if self._is_complete():
            self._end_warmup()
        return num_active

    def _is_complete(self) -> bool:
        return self.num_warmup_samples >= self.warmup_samples

    def _end_warmup(self) -> None:
        self.is_warming_up = False
        if isinstance(self.schedule, LocalUpdateSchedule):
            self.schedule.begin(self._num_missed_steps)
        else:
            self._reducer.reconfigure(self._comm, self._codec)
        self._num_missed_steps = 0

    def on_zero_grad(self) -> None:
        super().on_zero_grad()
        self.schedule.on_zero_grad()
        self._is_mean_unapplied = False

    def flush(self) -> None:
        self._is_mean_unapplied = False
        if not self.is_warming_up:
            self.schedule.flush()

    def rebuild(self) -> None:
        self.schedule.rebuild()

    def close(self) -> None:
        self.schedule.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_warmup_samples": self.num_warmup_samples,
            "is_warming_up": self.is_warming_up,
            "after": self.schedule.state_dict(),
        }

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """See `Resharding`."""
        if not all("after" in state for state in states):
            return states[0]
        after = reshard_object(self.schedule, [state["after"] for state in states], comm)
        return {**states[0], "after": after}

    def resume_warnings(self) -> list[str]:
        """Those of the schedule that follows."""
        return warnings_of(self.schedule)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.schedule.load_state_dict(state.get("after", {}))
        self.num_warmup_samples = state.get("num_warmup_samples", 0.0)
        self._is_mean_unapplied, self._num_missed_steps = False, 0
        if self._codec is not None:
            self._codec.load_state_dict({})  # no residual from before it was in use
        was_warming_up = self.is_warming_up
        self.is_warming_up = state.get("is_warming_up", self.warmup_samples > 0)
        if self.is_warming_up and not was_warming_up:
            self._reducer.reconfigure(self._comm, None)
        elif was_warming_up and not self.is_warming_up:
            self._end_warmup()
