"""Warm-up: every step in float32 first, by the number of samples over all workers; then another.

At first gradients are large and change quickly: the residual of a codec with error feedback is of a
gradient that is out of date, and ranks that train alone move apart.

Sources: Lin et al., *Don't Use Large Mini-Batches, Use Local SGD*, 2020 (post-local SGD); CNTK's
``distributed_after``. Difference from CNTK, which trained redundantly until then, each worker on
all data: here the workers share the data from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from torchmn.base.errors import UnsupportedError, UsageError
from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.resharding import reshard_object, warnings_of
from torchmn.exchange.schedules.base import Schedule, Traits
from torchmn.exchange.schedules.every_step import EveryStep
from torchmn.exchange.schedules.local_updates.base import LocalUpdateSchedule


class Warmup(Schedule):
    """`EveryStep` in float32 until ``warmup_samples`` over all workers; then ``schedule``.

    The number of samples is part of each exchange, so that all ranks switch at the same step.
    `Warmup(n, EveryStep())` delays the codec, `Warmup(n, PeriodicAverage())` is post-local SGD;
    both are CNTK's ``distributed_after``.

    Args:
        warmup_samples: samples over all workers; 0 starts with ``schedule``.
        schedule: `EveryStep` or a `LocalUpdateSchedule`, which also has the codec.

    Raises UsageError: not a finite number, 0 or more; UnsupportedError: another schedule.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedule = Warmup(20000, torchmn.schedules.BlockMomentum(block_size=4096))
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, schedule=schedule)
        >>> optimizer.schedule.current.name
        'every_step'
    """

    def __init__(self, warmup_samples: float, schedule: EveryStep | LocalUpdateSchedule) -> None:
        if not 0 <= warmup_samples < float("inf"):
            raise UsageError(f"warmup_samples={warmup_samples} must be a number that is 0 or more.")
        if not isinstance(schedule, (EveryStep, LocalUpdateSchedule)):
            raise UnsupportedError(
                f"{type(schedule).__name__} cannot follow a warm-up. Use EveryStep or a "
                "local-update schedule."
            )
        self.warmup_samples = warmup_samples
        self.schedule = schedule
        self.is_over = warmup_samples == 0
        """Whether ``schedule`` is in use. The same on all ranks."""
        self._warmup = EveryStep()
        self._num_every_step_samples = 0.0
        """Samples over all workers in steps of `EveryStep`."""
        self._has_unapplied_mean = False
        """Whether ``p.grad`` still holds the last mean of the warm-up, though that is over."""
        self._is_stepping = False
        self._num_missed_steps = 0
        """Number of steps of the other ranks in the warm-up since this rank left its loop."""

    @property
    def current(self) -> EveryStep | LocalUpdateSchedule:
        """The schedule in use. The same on all ranks."""
        return self.schedule if self.is_over else self._warmup

    @property
    def num_samples(self) -> float:
        """Samples over all workers in all exchanges so far. The same on all ranks."""
        blocks = self.schedule
        in_blocks = blocks.num_samples if isinstance(blocks, LocalUpdateSchedule) else 0.0
        return self._num_every_step_samples + in_blocks

    @property
    def traits(self) -> Traits:
        """See `Schedule.traits`: what they say about parameters applies to the schedule in use."""
        following = self.schedule.traits
        return replace(
            self.current.traits,
            name=f"warmup+{self.schedule.name}",
            num_sets=1,
            averages_gradients=True,
            has_own_steps=following.has_own_steps,
            counts_samples=True,
        )

    def attach(
        self, reducer: GradientReducer, inner: Optimizer, models: Sequence[nn.Module]
    ) -> None:
        """See `Schedule.attach`. Raises UsageError, UnsupportedError: as ``schedule`` does."""
        super().attach(reducer, inner, models)
        self._codec: Codec | None = reducer.codec
        self.schedule.attach(reducer, inner, models)
        self._warmup.attach(reducer, inner, models)
        if not self.is_over:
            self._configure()

    # ---- the schedule ----

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`."""
        exchange, current = self._exchange, self.current
        if not exchange.num_in_step:  # zero_grad has dropped the mean
            self._has_unapplied_mean = False
        current.backward_ended()
        if isinstance(current, EveryStep):
            self._num_every_step_samples += exchange.num_samples
            # Switch here and not in step(), which a GradScaler may skip on some steps. But not if a
            # closure may be called again, or late ranks take over gradients of the warm-up in
            # step(): then step() switches.
            if not (self._is_stepping or exchange.are_late_on_some):
                self._has_unapplied_mean = self._end_if_due()

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`."""
        if not self._reducer.is_active:
            self._step_without_data()
            return None
        if not self._exchange.num_in_step:
            self._has_unapplied_mean = False
        current = self._warmup if self._has_unapplied_mean else self.current
        if isinstance(current, EveryStep):
            result = self._every_step(current, closure)
        else:
            result = current.step(closure)
        self._end_if_due()
        return result

    def _every_step(self, current: EveryStep, closure: Callable[[], float] | None) -> float | None:
        self._is_stepping = True
        try:
            is_exchanged = self._reducer.is_needed
            result = current.step(closure) if is_exchanged else self._step_inner(closure)
        finally:
            self._is_stepping = False
        self._has_unapplied_mean = False
        if current is self.current and not self._reducer.is_needed:  # one rank alone
            self._num_every_step_samples += self._contribution.num_samples
        return result

    def _step_without_data(self) -> None:
        """Take part in a step of the other ranks. *Collective.*"""
        self._has_unapplied_mean = False
        current, exchange = self.current, self._exchange
        if isinstance(current, EveryStep) and not self._reducer.is_needed:
            exchange.num_active = 0
            return
        current.step(None)
        num_active = exchange.num_active
        if isinstance(current, EveryStep):
            self._num_every_step_samples += exchange.num_samples
            # When all ranks have left, the optimizer copies parameters and state.
            self._num_missed_steps = self._num_missed_steps + 1 if num_active else 0
        self._end_if_due()
        exchange.num_active = num_active

    def before_access(self, access: Literal["read", "load"]) -> None:
        """See `Schedule.before_access`."""
        self.current.before_access(access)

    def flush(self) -> None:
        """See `Schedule.flush`."""
        self._has_unapplied_mean = False
        self.current.flush()

    def rebuild(self) -> None:
        """See `Schedule.rebuild`."""
        self.schedule.rebuild()

    def close(self) -> None:
        """See `Schedule.close`."""
        self.schedule.close()

    # ---- the end of the warm-up ----

    def _end_if_due(self) -> bool:
        """End the warm-up if its samples are processed; returns whether it ends. *Collective.*"""
        if self.is_over or self.num_samples < self.warmup_samples:
            return False
        self.is_over = True
        self._configure()
        return True

    def _configure(self) -> None:
        """Configure the reducer for the schedule in use. *Collective.*"""
        if isinstance(self.current, LocalUpdateSchedule):
            self.current.begin(self._num_missed_steps)
            self._num_missed_steps = 0
        elif self.is_over and self._codec is not None:
            # Without residuals of a run that was under way before a state was loaded.
            self._reducer.reconfigure(self._comm, self._codec.new_instance())
        else:
            self._reducer.reconfigure(self._comm, None)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """See `Schedule.state_dict`."""
        return {
            "is_over": self.is_over,
            "num_every_step_samples": self._num_every_step_samples,
            "current": self.current.state_dict(),
        }

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """See `Resharding`. Raises UsageError: the warm-up was over on some old ranks only."""
        if not all("current" in state for state in states):
            return states[0]
        are_over = [state["is_over"] for state in states]
        if len(set(are_over)) > 1:
            raise UsageError(
                f"{comm.rank_label}: the warm-up was over on some of the old ranks ({are_over}), "
                "and their states cannot be combined for another number of ranks. Save where all "
                "ranks have made the same number of steps, or after optimizer.flush()."
            )
        if not are_over[0]:
            return states[0]
        current = reshard_object(self.schedule, [state["current"] for state in states], comm)
        return {**states[0], "current": current}

    def resume_warnings(self) -> list[str]:
        """See `MultiNodeOptimizer.resume_warnings`."""
        return warnings_of(self.schedule)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Schedule.load_state_dict`."""
        was_over, self.is_over = self.is_over, state.get("is_over", self.warmup_samples == 0)
        self._num_every_step_samples = state.get("num_every_step_samples", 0.0)
        self._has_unapplied_mean, self._num_missed_steps = False, 0
        self.schedule.load_state_dict(state.get("current", {}) if self.is_over else {})
        if self.is_over != was_over:
            self._configure()
