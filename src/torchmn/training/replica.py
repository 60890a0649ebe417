"""One of several copies of a model on one machine: gradients to main, parameters back.

    on every process:  g_i <- gradient of the mean loss of its own batch of n_i samples
    to main:           g   <- sum of n_i g_i / sum of n_i
    on main only:      the optimizer's step, and with it weight decay and momentum
    from main:         parameters

The computation of Chainer's MultiprocessParallelUpdater (ancestors 3.3), which sums gradients and
divides the learning rate by their number instead, so that weight decay becomes weaker with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from pytorch_pfn_extras import reporting
from torch import Tensor, nn

from torchmn.communicators import Communicator
from torchmn.errors import UsageError
from torchmn.evaluation import (
    Ratio,
    Sums,
    WeightedSums,
    batch_to,
    call_with_batch,
    merge_sums,
    num_samples,
    scalars_of,
)
from torchmn.training.batch_source import BatchSource

_MAIN = 0


class FlatTensors:
    """Room for some tensors in one buffer per dtype, each a view into it."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        shapes = list(tensors)
        self.buffers: dict[torch.dtype, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in shapes):
            total = sum(tensor.numel() for tensor in shapes if tensor.dtype == dtype)
            self.buffers[dtype] = shapes[0].new_empty(total, dtype=dtype)
        filled = dict.fromkeys(self.buffers, 0)
        self.views: list[Tensor] = []
        for tensor in shapes:
            begin = filled[tensor.dtype]
            filled[tensor.dtype] = begin + tensor.numel()
            flat = self.buffers[tensor.dtype][begin : filled[tensor.dtype]]
            self.views.append(flat.view(tensor.shape))


class Replica:
    """What main and the workers do alike in an iteration. *Collective*, making one too.

    Args:
        comm: main is rank 0.
        model, loss_func, source: as for `StandardUpdater`, on this process.
        device: of this process.
        observes: whether what it observes counts.
    """

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        loss_func: Callable[..., Tensor],
        source: BatchSource,
        device: torch.device,
        *,
        observes: bool,
    ) -> None:
        self.comm = comm
        self.model = model
        self.loss_func = loss_func
        self.source = source
        self.device = device
        self.observes = observes
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._flat = FlatTensors(self._parameters)
        self._reporter = reporting.Reporter()
        self._reporter.add_observer("main", model)
        self._reporter.add_observers("main", list(model.named_modules()))
        comm.bcast_data(model)

    def gradients_to_main(self) -> Sums:
        """Compute on the next batch. On main ``p.grad`` then holds the mean over all samples.

        Returns the sums of what the processes observed, the same on all. Raises UsageError: the
        model did not return a loss.
        """
        observed, num_own = self._compute()
        said = self.comm.allgather_obj((num_own, observed))
        num_all = sum(num for num, _ in said)
        share = num_own / num_all if num_all else 0.0
        for parameter, view in zip(self._parameters, self._flat.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(parameter.grad, share, out=view)
        for buffer in self._flat.buffers.values():
            self.comm.engine.call(partial(self.comm.world.reduce_, buffer, _MAIN))
        if self.comm.rank == _MAIN:
            for parameter, view in zip(self._parameters, self._flat.views, strict=True):
                parameter.grad = view
        return merge_sums([sums for _, sums in said])

    @torch.no_grad()
    def parameters_from_main(self) -> None:
        """Give all processes the parameters of main."""
        pairs = list(zip(self._parameters, self._flat.views, strict=True))
        if self.comm.rank == _MAIN:
            for parameter, view in pairs:
                parameter.grad = None  # it lies where the parameters now go
                view.copy_(parameter)
        for buffer in self._flat.buffers.values():
            self.comm.engine.call(partial(self.comm.world.broadcast_, buffer, _MAIN))
        if self.comm.rank != _MAIN:
            for parameter, view in pairs:
                parameter.copy_(view)

    def _compute(self) -> tuple[Sums, float]:
        """Forward and backward. What was observed, and the number of samples."""
        batch = next(self.source)
        num = num_samples(batch)
        for parameter in self._parameters:
            parameter.grad = None
        if num == 0:
            return {}, 0.0
        observation: dict[str, Any] = {}
        with self._reporter.scope(observation):
            loss = call_with_batch(self.loss_func, batch_to(batch, self.device))
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"The model returned a {type(loss).__name__} where the loss is needed. Let it "
                "return the loss, or pass loss_func=."
            )
        loss.backward()
        sums = WeightedSums()
        for name, value in scalars_of(observation).items() if self.observes else ():
            sums.add(name, value)
        return sums.sums(), float(1 if num is None else num)


def report_sums(sums: Sums, num_replicas: int) -> None:
    """Report means to the current reporter, if there is one.

    What each replica observed once is a number, what has another weight a `Ratio`.
    """
    means: dict[str, Any] = {
        name: total / weight if weight == num_replicas else Ratio(total, weight)
        for name, (total, weight) in sums.items()
    }
    reporting.report(means)
