"""A multi-node optimizer as frameworks use one: closures, and checkpoints that rank 0 writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch

from torchmn.exchange.optimizer import MultiNodeOptimizer
from torchmn.exchange.schedules import EveryStep

RANKS = "torchmn_ranks"
"""In a saved state: what differs between ranks, in rank order."""


class FrameworkOptimizer(MultiNodeOptimizer):
    """Made by `torchmn.train.frameworks.exchange.Exchange.wrap`.

    It differs from its base class in two points:

    - `step` runs a closure first and then steps without one, unless the inner optimizer cannot do
      without (LBFGS). Lightning passes forward, backward and clipping as a closure, to any
      optimizer; taken as a closure of `torch.optim` it would make every schedule synchronous and
      cost one more sum per step.
    - Frameworks save the state of rank 0 and load it on every rank, but residuals and local updates
      differ between ranks: `gathered_state_dict` holds those of all, and `load_state_dict` takes
      out this rank's own, or distributes them again over another number of ranks.
    """

    prepared_state: dict[str, Any] | None = None
    """What `state_dict` returns while a framework writes a checkpoint."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """See `MultiNodeOptimizer.step`. *Collective.*"""
        if closure is None or self._needs_closure:
            return super().step(closure)
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss

    @property
    def is_replaced(self) -> bool:
        """Whether a later optimizer has taken its parameters over."""
        return bool(self._taken_over_by)

    @property
    def counts_samples(self) -> bool:
        """Whether means or blocks depend on the number of samples."""
        return self._counts_samples

    @property
    def _needs_closure(self) -> bool:
        closure = inspect.signature(self.inner.step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty

    def state_dict(self) -> dict[str, Any]:
        """See `MultiNodeOptimizer.state_dict`."""
        return super().state_dict() if self.prepared_state is None else self.prepared_state

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks in one, on rank 0; other ranks get their own. *Collective.*"""
        state = super().state_dict()
        comm = self.communicator
        own: dict[str, Any] = {}
        if self.schedule.replica_consistency != "per_step":
            own = state
        elif (
            self.reducer.codec is not None
            or self._has_local_passes
            or not isinstance(self.schedule, EveryStep)
        ):
            own = {"torchmn": state["torchmn"]}
        ranks = comm.gather_obj(own) if own else [{}] * comm.size
        return state if ranks is None else {**state, RANKS: ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `MultiNodeOptimizer.load_state_dict`; a state of all ranks may be of any number."""
        shared = dict(state_dict)
        ranks = cast(list[dict[str, Any]] | None, shared.pop(RANKS, None))
        if ranks is not None:
            comm = self.communicator
            states = [{**shared, **own} for own in ranks]
            is_same = len(states) == comm.size
            shared = states[comm.rank] if is_same else self.reshard_state_dict(states, comm)
        super().load_state_dict(shared)
