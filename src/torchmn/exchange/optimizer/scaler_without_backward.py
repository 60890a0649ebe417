"""Steps of a GradScaler on a rank that had no backward pass: it takes part before the scaler looks.

Then it finds the same values that are not finite as those of other ranks, and leaves out the same
steps. See `torchmn.exchange.ranks_without_backward` for what a late rank does without a scaler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.amp.grad_scaler import GradScaler, OptState

if TYPE_CHECKING:
    from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer


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
