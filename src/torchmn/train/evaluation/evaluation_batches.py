"""One pass over the batches to be evaluated, from the beginning, at each evaluation.

pytorch-pfn-extras needs a DataLoader, or a dict of them. Chainer's evaluators had iterators, such
as ``SerialIterator(test, batch_size, repeat=False)``, and reset them at each evaluation.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchmn.base.errors import UsageError
from torchmn.data.batch_rows import mapped


class OnePass:
    """Wraps an iterator with ``reset`` as a loader, whose length is its number of batches. Local.

    Raises UsageError: the iterator never ends, or cannot be reset.
    """

    def __init__(self, iterator: Any) -> None:
        kind = type(iterator).__name__
        if getattr(iterator, "repeat", False):
            raise UsageError(
                f"The evaluation would never end: its {kind} repeats. Create it with repeat=False, "
                "or pass a DataLoader."
            )
        if not hasattr(iterator, "reset"):
            raise UsageError(
                f"An evaluator got a {kind} for its batches, which can be iterated only once. It "
                "needs a DataLoader, a SerialIterator with repeat=False, or a dict of them with "
                "'main'."
            )
        self.iterator = iterator

    def __len__(self) -> int:
        num_samples: int = len(self.iterator.dataset)
        batch_size: int = self.iterator.batch_size
        return -(-num_samples // batch_size)

    def __iter__(self) -> Iterator[Any]:
        self.iterator.reset()
        yield from self.iterator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)


def one_pass(loader: Any) -> Any:
    """The loader itself, or `OnePass` over an iterator."""
    return OnePass(loader) if hasattr(loader, "__next__") else loader


def named_loaders(given: Any) -> dict[str, Any]:
    """The loaders of an evaluator, by name.

    Raises UsageError: there is no 'main', or see `OnePass`.
    """
    loaders = dict(given) if isinstance(given, Mapping) else {"main": given}
    if "main" not in loaders:
        raise UsageError(
            f"The evaluator's loaders are {', '.join(map(repr, loaders)) or 'none'}. One must be "
            "named 'main'."
        )
    return {name: one_pass(loader) for name, loader in loaders.items()}


@contextmanager
def evaluation_mode(models: Iterable[nn.Module]) -> Iterator[None]:
    """Set all modules of models to evaluation mode, and each back to its mode at the end. Local.

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


Result = TypeVar("Result")


def batch_to(batch: Any, device: torch.device | str | None) -> Any:
    """Move the tensors of a batch to ``device``; None leaves the batch as it is. Local.

    Example:
        >>> batch_to({"x": torch.ones(2), "name": "a"}, "cpu")["x"].device
        device(type='cpu')
    """
    if device is None:
        return batch
    if isinstance(batch, (Tensor, PackedSequence)):
        return batch.to(torch.device(device), non_blocking=True)  # type: ignore[arg-type]
    if isinstance(batch, Mapping):
        return {name: batch_to(part, device) for name, part in batch.items()}
    is_sequence = isinstance(batch, (list, tuple))
    return mapped(lambda part: batch_to(part, device), batch) if is_sequence else batch


def call_with_batch(function: Callable[..., Result], batch: Any) -> Result:
    """Call a function with a batch as pytorch-pfn-extras' Evaluator does.

    A tuple or list becomes the arguments, a dict the keyword arguments; a named tuple and anything
    else is the one argument.

    Example:
        >>> call_with_batch(lambda x, t: x + t, (1, 2)), call_with_batch(lambda x: x, {"x": 3})
        (3, 3)
    """
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return function(*batch)
    if isinstance(batch, dict):
        return function(**batch)
    return function(batch)
