"""Phases: one schedule after another, by the number of samples over all workers.

Post-local SGD exchanges at every step first, and trains in blocks afterwards: at first gradients
are large and change quickly, so that ranks that train alone move apart. The other way round, blocks
first and every step at the end, saves communication while the learning rate is high, and the noise
that blocks leave is averaged out at the end.

Sources: Lin et al., *Don't Use Large Mini-Batches, Use Local SGD*, 2020 (post-local SGD); Wang and
Joshi, *Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in
Local-Update SGD*, 2019, who exchange more often towards the end; CNTK's ``distributed_after``.
Difference from CNTK, which trained redundantly until then, each worker on all data: here the
workers share the data from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.errors import RankMismatchError, UnsupportedError, UsageError
from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec
from torchmn.comm.local_tensors import local_part
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.replicas import broadcast_optimizer_state, parameters_of
from torchmn.exchange.resharding import reshard_object, warnings_of
from torchmn.exchange.schedules.base import Schedule, Traits
from torchmn.exchange.schedules.every_step import EveryStep
from torchmn.exchange.schedules.local_updates.base import LocalUpdateSchedule

Phase = EveryStep | LocalUpdateSchedule


class Phases(Schedule):
    """Several schedules, each used from a given number of samples over all workers on.

    The number of samples is part of each exchange, so that all ranks switch at the same exchange. A
    phase of blocks ends with the block in which that number is reached: the ranks then flush, and
    before a phase of every step they take the mean of their optimizers' states (momenta and such).

    Args:
        phases: the schedules, each `EveryStep` or a `LocalUpdateSchedule`, by the number of samples
            over all workers at which they begin. The first one begins at 0. Each uses the codec
            of the optimizer, without residuals of the phase before; ``EveryStep(exact=True)`` uses
            none.

    Raises UsageError: a number is not finite or negative, none is 0, or an object is given twice;
    UnsupportedError: a schedule is of another class.

    Example:
        >>> from torchmn.exchange.schedules import EveryStep, PeriodicAverage
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedule = Phases({
        ...     0: EveryStep(exact=True), 20_000: PeriodicAverage(4096), 900_000: EveryStep()
        ... })
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, schedule=schedule)
        >>> optimizer.schedule.current.name
        'every_step'
    """

    def __init__(self, phases: Mapping[float, Phase]) -> None:
        self.starts = sorted(phases)
        """The number of samples at which each phase begins."""
        self.schedules = [phases[start] for start in self.starts]
        _check(self.starts, self.schedules)
        self._name = "+".join(schedule.name for schedule in self.schedules)
        self.began_at = [0.0]
        """The number of samples at which each phase so far actually began."""
        self._num_every_step_samples = 0.0
        """Samples over all workers in the current phase, if that is `EveryStep`."""
        self._unapplied: EveryStep | None = None
        """The previous phase, if ``p.grad`` still holds its last mean though the next has begun."""
        self._is_stepping = False
        self._num_missed_steps = 0
        """Number of `EveryStep` steps of the other ranks since this rank left its loop."""

    @property
    def current(self) -> Phase:
        """The schedule of the current phase. The same on all ranks."""
        return self.schedules[len(self.began_at) - 1]

    @property
    def num_samples(self) -> float:
        """Samples over all workers in all exchanges so far. The same on all ranks."""
        phase = self.current
        if isinstance(phase, LocalUpdateSchedule):
            return self.began_at[-1] + phase.num_samples
        return self.began_at[-1] + self._num_every_step_samples

    @property
    def traits(self) -> Traits:
        """See `Schedule.traits`: what they say about parameters applies to the current phase."""
        return replace(
            self.current.traits,
            name=self._name,
            num_sets=1,
            averages_gradients=any(s.traits.averages_gradients for s in self.schedules),
            has_own_steps=any(s.traits.has_own_steps for s in self.schedules),
            counts_samples=True,
        )

    def attach(
        self, reducer: GradientReducer, inner: Optimizer, models: Sequence[nn.Module]
    ) -> None:
        """See `Schedule.attach`. Raises UsageError, UnsupportedError: as the schedules do."""
        super().attach(reducer, inner, models)
        self._codec: Codec | None = reducer.codec
        for schedule in reversed(self.schedules):  # the first one last: it begins
            is_as_made = reducer.comm is self._comm and reducer.codec is self._codec
            if reducer.is_suspended or not is_as_made:
                reducer.reconfigure(self._comm, self._codec)
            schedule.attach(reducer, inner, models)

    # ---- the schedule ----

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`."""
        if not self._exchange.num_in_step:  # zero_grad has dropped the mean
            self._unapplied = None
        phase = self.current
        phase.backward_ended()
        if isinstance(phase, EveryStep):
            self._num_every_step_samples += self._exchange.num_samples
            # Switch here and not in step(), which a GradScaler may skip on some steps. But not if a
            # closure may be called again, or late ranks take over gradients of this phase in
            # step(): then step() switches.
            if not (self._is_stepping or self._exchange.are_late_on_some) and self._is_over():
                self._begin_next()
                self._unapplied = phase

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`."""
        if not self._reducer.is_active:
            self._step_without_data()
            return None
        if not self._exchange.num_in_step:
            self._unapplied = None
        phase = self._unapplied or self.current
        if not isinstance(phase, EveryStep):
            result = phase.step(closure)
        else:
            self._is_stepping = True
            try:
                is_exchanged = self._reducer.is_needed
                result = phase.step(closure) if is_exchanged else self._inner.step(closure)
            finally:
                self._is_stepping = False
            self._unapplied = None
            if phase is self.current and not self._reducer.is_needed:  # one rank alone
                self._num_every_step_samples += self._contribution.num_samples
        if self._is_over():
            self._begin_next()
        return result

    def _step_without_data(self) -> None:
        """Take part in a step of the other ranks. *Collective.*"""
        self._unapplied = None
        phase, exchange = self.current, self._exchange
        if isinstance(phase, EveryStep) and not self._reducer.is_needed:
            exchange.num_active = 0
            return
        phase.step(None)
        num_active = exchange.num_active
        if isinstance(phase, EveryStep):
            self._num_every_step_samples += exchange.num_samples
            # When all ranks have left, the optimizer copies parameters and state.
            self._num_missed_steps = self._num_missed_steps + 1 if num_active else 0
        if self._is_over():
            num_in_loops = self._begin_next()
            if not isinstance(phase, EveryStep):  # ranks that flush take part as if they had left
                num_active = num_in_loops
        exchange.num_active = num_active

    def before_access(self, access: Literal["read", "load"]) -> None:
        """See `Schedule.before_access`."""
        self.current.before_access(access)

    def flush(self) -> None:
        """See `Schedule.flush`."""
        self._unapplied = None
        self.current.flush()
        if self._is_over():
            self._begin_next()

    def rebuild(self) -> None:
        """See `Schedule.rebuild`."""
        for schedule in self.schedules:
            schedule.rebuild()

    def close(self) -> None:
        """See `Schedule.close`."""
        for schedule in self.schedules:
            schedule.close()

    # ---- from one phase to the next ----

    def _is_over(self) -> bool:
        """Whether as many samples are processed as the next phase begins at."""
        following = self.starts[len(self.began_at) :]
        return bool(following) and self.num_samples >= following[0]

    def _begin_next(self) -> int:
        """Begin the next phase, or a later one if that is due as well. *Collective.*

        Returns the number of ranks that have not left their loops, if the phase before had blocks.
        """
        before, num_in_loops = self.current, 0
        # All ranks end their blocks in one exchange: those that were flushing have done so already.
        if isinstance(before, LocalUpdateSchedule):
            if not before.is_flushed:
                before.flush()
            num_in_loops = sum(self._comm.allgather_obj(self._reducer.is_active))
        num_samples = self.num_samples
        while self._is_over():
            self.began_at.append(num_samples)
            self._num_every_step_samples = 0.0
        if isinstance(before, LocalUpdateSchedule) and isinstance(self.current, EveryStep):
            average_inner_state(self._comm, self._inner, is_active=self._reducer.is_active)
            self._contribution.reset()
        self._open()
        return num_in_loops

    def _open(self) -> None:
        """Configure the reducer for the current phase. *Collective.*"""
        phase = self.current
        if isinstance(phase, LocalUpdateSchedule):
            phase.begin(self._num_missed_steps)
            self._num_missed_steps = 0
        elif phase.exact or self._codec is None:
            self._reducer.reconfigure(self._comm, None)
        else:
            # Without residuals, which are those of an earlier phase and out of date by now.
            self._reducer.reconfigure(self._comm, self._codec.new_instance())

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """See `Schedule.state_dict`."""
        return {
            "began_at": list(self.began_at),
            "num_every_step_samples": self._num_every_step_samples,
            "current": self.current.state_dict(),
        }

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """See `Resharding`. Raises UsageError: the old ranks were in different phases."""
        if not all("current" in state for state in states):
            return states[0]
        phases = [len(state["began_at"]) for state in states]
        if len(set(phases)) > 1:
            raise UsageError(
                f"{comm.rank_label}: the old ranks were saved in different phases ({phases}), and "
                "cannot be combined for another number of ranks. Save where all ranks have made "
                "the same number of steps, or after optimizer.flush()."
            )
        schedule = self.schedules[phases[0] - 1]
        current = reshard_object(schedule, [state["current"] for state in states], comm)
        return {**states[0], "current": current}

    def resume_warnings(self) -> list[str]:
        """The warnings of all phases, each once."""
        found = [text for schedule in self.schedules for text in warnings_of(schedule)]
        return list(dict.fromkeys(found))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Schedule.load_state_dict`. Raises UsageError: there are fewer phases than saved."""
        began_at = state.get("began_at", [0.0])
        if len(began_at) > len(self.schedules):
            raise UsageError(
                f"This state was saved in phase {len(began_at)}, and there are "
                f"{len(self.schedules)}. Give the phases that it was saved with."
            )
        before, self.began_at = self.current, list(began_at)
        self._num_every_step_samples = state.get("num_every_step_samples", 0.0)
        self._unapplied, self._num_missed_steps = None, 0
        for schedule in self.schedules:
            is_current = schedule is self.current
            schedule.load_state_dict(state.get("current", {}) if is_current else {})
        if self.current is not before:
            self._open()


def _check(starts: Sequence[float], schedules: Sequence[Schedule]) -> None:
    if not starts or not all(0 <= start < float("inf") for start in starts) or starts[0] != 0:
        raise UsageError(
            f"Phases begin at {list(starts)} samples. Each must be a number that is 0 or more, and "
            "the first one 0."
        )
    for schedule in schedules:
        if not isinstance(schedule, (EveryStep, LocalUpdateSchedule)):
            raise UnsupportedError(
                f"{type(schedule).__name__} cannot be a phase of several. Use EveryStep or a "
                "local-update schedule."
            )
    if len({id(schedule) for schedule in schedules}) < len(schedules):
        raise UsageError("A schedule object holds the state of one phase. Make one for each phase.")


# Averaging the inner optimizers' states after blocks, when all ranks begin to make the same steps.
#
# Parameters are equal after a flush, but each rank's momenta come from its own gradients.


@torch.no_grad()
def average_inner_state(comm: Communicator, inner: Optimizer, *, is_active: bool) -> None:
    """Make the optimizer's state the same on all ranks: the mean of its tensors. *Collective.*

    Step counts become those of rank 0, and so does the whole state if the ranks do not have state
    for the same parameters. ``is_active``: whether this rank is still in its loop.

    Raises RankMismatchError on all ranks: ranks in their loops have different learning rates.
    """
    _raise_if_rates_differ(comm, inner, is_active=is_active)
    tensors: dict[str, Tensor] = {}
    for index, parameter in enumerate(parameters_of(inner)):
        for name, value in inner.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() and not value.is_sparse:
                tensors[f"{index}.{name}"] = local_part(value)
    means = {n: t for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    described = [(name, list(tensor.shape)) for name, tensor in means.items()]
    if all(theirs == described for theirs in comm.allgather_obj(described)):
        for tensor in means.values():
            tensor.copy_(comm.allreduce(tensor, "mean"))
    broadcast_optimizer_state(comm, inner)


def _raise_if_rates_differ(comm: Communicator, inner: Optimizer, *, is_active: bool) -> None:
    rates = [float(group["lr"]) for group in inner.param_groups if "lr" in group]
    gathered = comm.allgather_obj(rates if is_active else None)
    present = {rank: theirs for rank, theirs in enumerate(gathered) if theirs is not None}
    if len(set(map(tuple, present.values()))) > 1:
        raise RankMismatchError(
            f"{comm.rank_label}: from here on all ranks take the same steps, and their learning "
            f"rates differ: {present}. Ranks have made different numbers of steps; let the rate "
            "depend on the samples over all workers (optimizer.schedule.num_samples)."
        )


class Warmup(Phases):
    """`EveryStep` in float32 until ``warmup_samples`` over all workers; then ``schedule``.

    The number of samples is part of each exchange, so that all ranks switch at the same step. At
    first gradients are large and change quickly: the residual of a codec with error feedback is of
    a gradient that is out of date, and ranks that train alone move apart. `Warmup(n, EveryStep())`
    delays the codec, `Warmup(n, PeriodicAverage())` is post-local SGD; both are CNTK's
    ``distributed_after``.

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

    def __init__(self, warmup_samples: float, schedule: Phase) -> None:
        super().__init__({0: EveryStep(exact=True), warmup_samples: schedule})
        self._name = f"warmup+{schedule.name}"
        self.warmup_samples = warmup_samples
        self.schedule = schedule
