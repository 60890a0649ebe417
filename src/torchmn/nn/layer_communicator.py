"""The communicator that the layers of a model use within forward and backward.

Gradients are exchanged while backward runs. A layer that communicates then has a communicator of
its own, a copy of the user's: otherwise it would wait for the buckets in flight, and ranks that
fill their buckets at different times would call the same collectives in different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from torchmn.base.errors import RankMismatchError, UnsupportedError, UsageError
from torchmn.base.torch_private import current_graph_task_id
from torchmn.comm import Communicator
from torchmn.comm.group import Group

_COPIES: WeakKeyDictionary[Communicator, LayerCommunicator] = WeakKeyDictionary()


class LayerCommunicator:
    """All ranks of a communicator, for its layers. Made at the first forward. *Collective.*"""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm.split(0, comm.rank)
        comm.on_finalize(self.comm.finalize)
        self._group: Group = self.comm.groups.for_small_messages()
        self._rank_label = comm.rank_label
        self._num_layers = 0
        self._seen: WeakSet[nn.Module] = WeakSet()
        self._num_passes = 0

    def new_layer(self) -> int:
        """Number a new layer, in the order of first forward passes."""
        self._num_layers += 1
        return self._num_layers

    def note_forward(self, layer: nn.Module) -> None:
        """Count forward passes: the time limit is shorter after the first one. Local."""
        if current_graph_task_id() != -1:  # a checkpointed function runs again
            return
        if layer in self._seen:
            self._seen.clear()
            self._num_passes += 1
        self._seen.add(layer)
        self.comm.flight_recorder.set_label(None, self._num_passes)

    def gather_rows(self, row: Tensor, describe: Callable[[int], str]) -> Tensor:
        """Gather float64 rows (n,) of W ranks to (W, n). *Collective*, one message to each rank.

        Element 0 is a whole number that identifies the call; ``describe`` makes it a text for
        errors.

        Raises RankMismatchError on all ranks: they are in different calls with rows of one length.
        """
        table = self.comm.engine.call(lambda: self._group.all_gather_fixed(row, name="batch_norm"))
        if table.is_cuda:  # comparing would wait for the GPU
            return table
        calls = [int(call) for call in table[:, 0].tolist()]
        if len(set(calls)) > 1:
            seen = "; ".join(f"rank {rank}: {describe(call)}" for rank, call in enumerate(calls))
            raise RankMismatchError(
                f"{self._rank_label}: ranks are in different layers: {seen}. All ranks must run "
                "the same layers in the same order; a rank without samples runs them with an empty "
                "batch, forward and backward."
            )
        return table


def _no_weight() -> None:
    return None


class Ranks:
    """The communicator of a layer, as its attribute: copies share it, pickles leave it out."""

    def __init__(self, comm: Communicator | None) -> None:
        self.comm = comm
        # The weight of this rank's loss in the pass under way, if the script has given one.
        self.given_weight: Callable[[], float | None] = _no_weight

    def required(self, layer: nn.Module, cure: str) -> Communicator:
        """The communicator. Raises UsageError with the cure: it was left out of a pickle."""
        if self.comm is None:
            raise UsageError(
                f"This {type(layer).__name__} was loaded from a pickle, which holds no "
                f"communicator. {cure}"
            )
        return self.comm

    def layers(self, layer: nn.Module, cure: str) -> LayerCommunicator:
        """The communicator of all layers over these ranks. *Collective* at the first call.

        Raises as `required`.
        """
        comm = self.required(layer, cure)
        found = _COPIES.get(comm)
        if found is None:
            found = _COPIES[comm] = LayerCommunicator(comm)
        return found

    def __deepcopy__(self, memo: object) -> Ranks:
        return self

    def __copy__(self) -> Ranks:
        return self

    def __reduce__(self) -> tuple[type[Ranks], tuple[None]]:
        return Ranks, (None,)


def has_collective_layers(model: nn.Module) -> bool:
    """Whether the model has layers that all ranks run together, also with empty batches. Local."""
    return any(isinstance(vars(module).get("_ranks"), Ranks) for module in model.modules())


# Gradients that cannot be differentiated again: an error in place of one that is silently wrong.
#
# ``once_differentiable`` of torch refuses it only where the gradient that comes in requires one.
# It may be a constant, as the ones of a sum, while what backward returns depends on inputs.

_Backward = Callable[..., Sequence[Tensor | None]]


def differentiable_once(what: str) -> Callable[[_Backward], _Backward]:
    """Decorate the backward of a function; ``what`` is the error of a second one. Local."""

    def decorate(backward: _Backward) -> _Backward:
        @wraps(backward)
        def once(ctx: Any, *grads: Tensor | None) -> Sequence[Tensor | None]:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return found
            # The results must require a gradient, or a second backward would not reach `_Refused`.
            anchor = torch.empty(0, requires_grad=True, device="cpu")
            return tuple(
                None if each is None else _Refused.apply(what, anchor, each)  # type: ignore[no-untyped-call]
                for each in found
            )

        return once

    return decorate


class _Refused(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, what: str, anchor: Tensor, grad: Tensor) -> Tensor:
        ctx.what = what
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise UnsupportedError(ctx.what)
