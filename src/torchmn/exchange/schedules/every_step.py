"""Every step: p.grad <- mean over ranks of p.grad, overlapped with backward.

Synchronous SGD. Differs from ChainerMN in that the mean is complete when ``backward()`` returns,
not inside ``update()``: the user's clipping and unscaling see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchmn.base.errors import PerformanceWarning, RankMismatchError, ResultWarning
from torchmn.base.names import EVERY_STEP
from torchmn.base.warn import warn
from torchmn.cluster.units import listed
from torchmn.comm.collectives import allgather_for
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.schedules.base import Schedule, Traits
from torchmn.exchange.sparse_gradients import sparse_gradient


class EveryStep(Schedule):
    """Gradients are averaged at each backward pass.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, schedule=EveryStep())
    """

    traits = Traits(name=EVERY_STEP)

    def __init__(self) -> None:
        self._has_warned = False

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`."""
        exchange = self._exchange
        if exchange.num_in_step and not self._has_warned:
            self._warn_of_second_pass()
        exchange.assign(exchange.send())

    def _warn_of_second_pass(self) -> None:
        """Warn once, on rank 0, if gradients were added to means."""
        filled = self._exchange.filled
        if not filled.is_accumulating:
            return
        self._has_warned = True
        if self._comm.rank == 0:
            warn(
                "More than one backward pass before step(): each one exchanges all gradients. The "
                "result is right. To exchange once, wrap all passes but the last in "
                "optimizer.no_sync(), which is exact if their batches have the same size.",
                PerformanceWarning,
            )

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`. A rank without any backward pass takes part here."""
        reducer, exchange, local = self._reducer, self._exchange, self._local_passes
        if not reducer.is_active:
            reducer.shadow_exchange()
            share_with_late_ranks(reducer)
            return None
        if closure is None:
            reducer.exchange_if_late()
            if exchange.are_late_on_some or local.were_changed:
                share_with_late_ranks(reducer)
        exchange.num_in_step = 0
        return self._step_inner(closure)

    def flush(self) -> None:
        """See `Schedule.flush`: only the checks of the last exchange may be pending, on a GPU."""
        self._reducer.settle()


# ---- ranks that have no backward pass in a step, and so exchange in `step` only ----
#
# A rank whose part of a batch is empty may leave ``backward()`` out. What the script does between
# ``backward()`` and ``step()``, such as clipping, then changes the means on the other ranks, but
# finds no gradients on this one. So after such an exchange the late ranks take over the gradients
# of a rank that was not late, as they are when it steps.

_CHANGED = (
    "gradients were changed before they were exchanged, as by clip_grad_norm_: the last backward "
    "pass before step() was under no_sync(), so they were this rank's own and not the means. Call "
    "the last backward() of a step outside of no_sync(), with a batch of 0 rows if there is no "
    "other."
)

_NOT_SHARED = (
    "gradients were changed between backward() and step(), as by clip_grad_norm_, and a rank "
    "without a backward pass had none to change. It cannot take over these, because ranks hold "
    "shards of parameters. Clip by create_multi_node_optimizer(max_grad_norm=...), or call "
    "backward() on all ranks: a batch of 0 rows will do."
)


def share_with_late_ranks(reducer: GradientReducer) -> None:
    """Give late ranks the gradients of another rank, if only some ranks are late.

    *Collective* then; otherwise nothing is sent. Called after the exchange of a step, before the
    optimizer uses its means.

    Raises RankMismatchError: on all ranks, if a late rank's own gradients were changed; on a rank
    that changed its gradients, if they are of shards of parameters, which no other rank has.
    """
    comm, exchange, local = reducer.comm, reducer.exchange, reducer.local_passes
    if not exchange.are_late_on_some:
        if local.were_changed:
            warn(f"{comm.rank_label}: {_CHANGED}", ResultWarning)
        return
    if exchange.parameters.are_sharded:
        if reducer.is_active and not reducer.is_late and exchange.were_changed:
            raise RankMismatchError(f"{comm.rank_label}: {_NOT_SHARED}")
        return
    is_late = reducer.is_late or not reducer.is_active
    own_state = (is_late, local.were_changed)
    states = allgather_for(comm, "state of late ranks", own_state)
    changed = [rank for rank, (_, was_changed) in enumerate(states) if was_changed]
    if changed:
        raise RankMismatchError(f"{comm.rank_label}: on {listed('rank', changed)} {_CHANGED}")
    source = [is_late for is_late, _ in states].index(False)
    parameters = [parameter for _, parameter in exchange.parameters.trained()]
    own = None
    if comm.rank == source:
        own = [_sent(p.grad) for p in parameters]
    gradients = comm.bcast_obj(own, source)
    if is_late and reducer.is_active:
        for parameter, parts in zip(parameters, gradients, strict=True):
            parameter.grad = _received(parameter, parts)


def _sent(gradient: Tensor | None) -> list[Tensor]:
    """A gradient as dense CPU tensors: the gradient itself, or row indices and values."""
    if gradient is None:
        return []
    if gradient.layout is torch.strided:
        return [gradient.detach().cpu()]
    gradient = gradient.detach().coalesce()
    return [gradient.indices()[0].cpu(), gradient.values().cpu()]


def _received(parameter: nn.Parameter, parts: Sequence[Tensor]) -> Tensor | None:
    here = [part.to(parameter.device) for part in parts]
    if len(here) == 2:
        return sparse_gradient(parameter, *here)
    return here[0] if here else None
