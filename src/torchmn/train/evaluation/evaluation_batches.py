"""One pass over the batches to be evaluated, from the beginning, at each evaluation.

pytorch-pfn-extras needs a DataLoader, or a dict of them. Chainer's evaluators had iterators, such
as ``SerialIterator(test, batch_size, repeat=False)``, and reset them at each evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchmn.errors import UsageError


class OnePass:
    """An iterator with ``reset`` as a loader whose length is its number of batches. Local.

    Raises UsageError: it never ends, or cannot be reset.
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
