"""Steps whose samples no forward pass has counted, under a schedule that needs their number.

Blocks of local updates would never end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchmn.errors import UsageError
from torchmn.exchange.model_tensors import parameters_of
from torchmn.exchange.weights import miscount

if TYPE_CHECKING:
    from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer
from typing import TYPE_CHECKING

from torch.amp.grad_scaler import GradScaler, OptState

if TYPE_CHECKING:
    from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer


_MAX_STEPS = 10
"""In a row: a script may step more than once with a gradient."""


class UncountedSteps:
    """What a rank remembers from one step to the next. Local."""

    def __init__(self) -> None:
        self._num_steps = 0
        """In a row."""

    def before_step(self, optimizer: MultiNodeOptimizer) -> None:
        """Raise UsageError if nothing was counted, or something else than samples."""
        comm, reducer = optimizer.communicator, optimizer.reducer
        own = reducer.contribution
        if not optimizer.schedule.counts_samples:
            return
        if comm.size > 1 and not own.is_checked and own.is_miscounted(own.compare(own.num_samples)):
            raise UsageError(f"{comm.rank_label}: {miscount(own.num_samples)}")
        is_own_step = reducer.is_suspended  # else exchanges have taken what was counted
        if own.is_known or (own.was_ever_known and not is_own_step):
            self._num_steps = 0
            return
        if all(p.grad is None for p in parameters_of(optimizer.inner)):
            return
        self._num_steps += 1
        if own.was_ever_known and self._num_steps < _MAX_STEPS:
            return
        since = f" in {_MAX_STEPS} steps" if own.was_ever_known else ""
        raise UsageError(
            f"{comm.rank_label}: {optimizer.schedule.name} counts samples, but the model's forward "
            f"has seen no tensor with a batch dimension{since}. Calls of the whole model in "
            "train() are counted; otherwise call optimizer.set_weight(number_of_samples) before "
            "step()."
        )


# Steps of a GradScaler on a rank that had no backward pass: it takes part before the scaler looks.
#
# Then it finds the same values that are not finite as those of other ranks, and leaves out the same
# steps. See `torchmn.exchange.ranks_without_backward` for what a late rank does without a scaler.


class LateScalerSteps:
    """What a rank remembers from one step of its scaler to the next."""

    def __init__(self) -> None:
        self._num_passes = -1
        """How many exchanges there had been at the last one."""

    def take_part(self, optimizer: MultiNodeOptimizer, scaler: object) -> None:
        """Take part in the exchange, if this rank has not. *Collective* for a GradScaler."""
        if not isinstance(scaler, GradScaler):
            return
        reducer, schedule = optimizer.reducer, optimizer.schedule
        if reducer.num_passes == self._num_passes:  # of a step that it left out
            schedule.on_zero_grad()
        schedule.exchange_if_late()
        self._num_passes = reducer.num_passes
        state = scaler._per_optimizer_states[id(optimizer)]
        if not state["found_inf_per_device"]:  # if the script has called unscale_(), for nothing
            state["stage"] = OptState.READY
