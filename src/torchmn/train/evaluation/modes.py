"""Models in evaluation mode for a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(models: Iterable[nn.Module]) -> Iterator[None]:
    """All modules of models in evaluation mode, and afterwards each as it was. Local.

    A layer that is kept in evaluation mode while the model trains, as frozen batch normalization,
    stays so.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2).eval())
        >>> with torchmn.train.evaluation.evaluation_mode([model]):
        ...     pass
        >>> [module.training for module in model]
        [True, False]
    """
    models = list(models)
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
