"""A classifier that reports loss and accuracy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pytorch_pfn_extras import reporting
from torch import Tensor, nn
from torch.nn import functional


class Classifier(nn.Module):
    """A network with its loss, like Chainer's ``L.Classifier``.

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
