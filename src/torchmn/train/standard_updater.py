"""One iteration on one device: batch, loss, gradients, step."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from pytorch_pfn_extras import reporting
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from torchmn.base import events
from torchmn.base.errors import UsageError
from torchmn.comm import Communicator
from torchmn.data.batch_settings import BatchSettings, batch_settings_of
from torchmn.data.batch_size import num_samples
from torchmn.exchange.resharding import reshard_object, warnings_of
from torchmn.nn.layer_communicator import has_collective_layers
from torchmn.train.batch_source import batch_source, iterations_per_epoch
from torchmn.train.evaluation import batch_to, call_with_batch


class StandardUpdater:
    """Draws a batch, computes the loss, steps the optimizer. *Collective* with a multi-node one.

    Args:
        iterator: a `torchmn.SerialIterator`, or a DataLoader, whose epochs are passes over it;
            ``set_epoch`` of its sampler is called. If a `GlobalSampler` as its ``batch_sampler``
            gives this rank a batch without samples, the rank participates in the step with weight
            0; the model is run only if it has batch normalization over ranks.
        optimizer: any optimizer, also one of `create_multi_node_optimizer`.
        model: called with the batch, it returns the loss. What it reports with
            ``pytorch_pfn_extras.reporting.report(values, self)`` is observed as ``main/...``.
        loss_func: called in place of the model.
        device: where the batch is moved to; None does not move the batch.
        converter: moves the batch: ``converter(batch, device)``.

    Raises UsageError: ``iterator`` can be iterated only once.

    Example:
        >>> model = torchmn.train.Classifier(torch.nn.Linear(3, 2))
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
        >>> iterator = torchmn.SerialIterator([(torch.ones(3), 1)] * 8, 4)
        >>> updater = torchmn.StandardUpdater(iterator, optimizer, model)
        >>> torchmn.Trainer(updater, (2, "epoch"), out=None).run()
        >>> updater.iteration
        4
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        loss_func: Callable[..., Tensor] | None = None,
        device: torch.device | str | None = None,
        converter: Callable[[Any, Any], Any] = batch_to,
    ) -> None:
        self.source = batch_source(iterator)
        self.optimizer = optimizer
        self.model = model
        self.loss_func: Callable[..., Tensor] = model if loss_func is None else loss_func
        self.device = device
        self.converter = converter
        self.iteration = 0

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self.source.epoch

    @property
    def epoch_detail(self) -> float:
        """Epochs done, with the fraction of the current one."""
        return self.source.epoch_detail

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last iteration; None before the first."""
        return self.source.previous_epoch_detail

    @property
    def is_new_epoch(self) -> bool:
        """Whether the last iteration ended an epoch."""
        return self.source.is_new_epoch

    @property
    def iterations_per_epoch(self) -> Fraction | None:
        """The mean number of iterations in an epoch; None if it is not known."""
        return iterations_per_epoch(self.source)

    def update(self) -> None:
        """Do one iteration."""
        with events.during("data"):
            batch = next(self.source)
        if num_samples(batch) == 0:
            self._step_without_samples(batch)
        else:
            with events.during("copy"):
                batch = self.converter(batch, self.device)
            self.update_core(batch)
        self.iteration += 1

    def update_core(self, batch: Any) -> None:
        """Compute gradients of a batch and step. Override it for another computation."""
        self.optimizer.zero_grad()
        compute_gradients(self.loss_func, batch)
        self.optimizer.step()

    def finalize(self) -> None:
        """Do nothing: no resources are held."""

    def state_dict(self) -> dict[str, Any]:
        """The iteration and the position in the data, also in the middle of an epoch."""
        return {"iteration": self.iteration, "source": dict(self.source.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, to resume with the very next batch."""
        self.iteration = int(state["iteration"])
        self.source.load_state_dict(state["source"])

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local."""
        sources = [state["source"] for state in states]
        return {**states[0], "source": reshard_object(self.source, sources, comm)}

    def resume_warnings(self) -> list[str]:
        """Warnings for loading a state of another number of ranks."""
        return warnings_of(self.source)

    def batch_settings(self) -> BatchSettings | None:
        """The global batch that a checkpoint records: that of the source, if it knows one."""
        return batch_settings_of(self.source)

    def _step_without_samples(self, batch: Any) -> None:
        set_weight = getattr(self.optimizer, "set_weight", None)
        if set_weight is None:
            return
        self.optimizer.zero_grad()
        set_weight(0.0)
        if has_collective_layers(self.model):  # the other ranks' layers wait for those of this one
            reporter = reporting.Reporter()
            reporter.add_observer("main", self.model)
            reporter.add_observers("main", self.model.named_modules())
            with reporter.scope({}):  # means over no samples are not numbers, and not observed
                compute_gradients(self.loss_func, self.converter(batch, self.device))
        self.optimizer.step()


def compute_gradients(loss_func: Callable[..., Tensor], batch: Any) -> None:
    """Compute the loss of a batch and its gradients. Local.

    Raises UsageError: what ``loss_func`` returned is not a tensor.
    """
    loss = call_with_batch(loss_func, batch)
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"The model returned a {type(loss).__name__} where the loss is needed. Let it return "
            "the loss, or pass loss_func=."
        )
    loss.backward()


class Classifier(nn.Module):
    """A network with its loss, like Chainer's ``L.Classifier``. Local.

    Called with inputs ``(batch, ...)`` and labels ``(batch,)``, it returns the loss and reports
    ``loss`` and ``accuracy``, the fraction of the batch whose largest logit is that of the label.

    Args:
        predictor: from inputs to logits ``(batch, classes)``.
        loss_func: from logits and labels to the mean loss.

    Example:
        >>> classifier = torchmn.train.Classifier(torch.nn.Linear(3, 2))
        >>> classifier(torch.rand(4, 3), torch.tensor([0, 1, 0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self,
        predictor: nn.Module,
        loss_func: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
    ) -> None:
        super().__init__()
        self.predictor = predictor
        self.loss_func = loss_func

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        logits = self.predictor(inputs)
        loss = self.loss_func(logits, labels)
        with torch.no_grad():
            accuracy = (logits.argmax(dim=1) == labels).float().mean()
        reporting.report({"loss": loss, "accuracy": accuracy}, self)
        return loss
