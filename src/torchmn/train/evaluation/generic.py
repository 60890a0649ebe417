"""Evaluation that is not a mean: each rank computes results, and one rank aggregates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from pytorch_pfn_extras.training import extension
from torch import nn

from torchmn import events
from torchmn.comm.heartbeat import HeartbeatGather
from torchmn.errors import UsageError
from torchmn.train.evaluation.evaluation_batches import (
    batch_to,
    call_with_batch,
    evaluation_mode,
    one_pass,
)

if TYPE_CHECKING:
    from torchmn.comm import Communicator


class GenericMultiNodeEvaluator(extension.Extension):
    """Base class: `calc_local` for every batch of every rank, `aggregate` once at the root.

    For scores that need all outputs at once, such as BLEU. Shards may be uneven or empty and ranks
    may take different times. It reports nothing itself; calling it returns the result of
    `aggregate` on the root and None on other ranks.

    Args:
        comm: the ranks that participate.
        iterator: this rank's batches, iterated from the beginning at each call.
        target: a module, or several by name, set to evaluation mode during a call.
        device: batches are moved to it before `calc_local`; None does not move them.
        converter: moves a batch: ``converter(batch, device)``.
        root: the rank that aggregates.
        progress_hook: called with (batches done on this rank,) after each batch.

    Example:
        >>> class Longest(torchmn.GenericMultiNodeEvaluator):
        ...     def calc_local(self, *words):  # for each batch, on every rank
        ...         return max(map(len, words))
        ...     def aggregate(self, results):  # once, at the root
        ...         return max(results)
        >>> Longest(comm, [("a", "abc"), ("ab",)], torch.nn.Identity())()
        3
    """

    trigger = (1, "epoch")
    default_name = "validation"
    priority = extension.PRIORITY_WRITER

    def __init__(
        self,
        comm: Communicator,
        iterator: Iterable[Any],
        target: nn.Module | Mapping[str, nn.Module],
        device: torch.device | str | None = None,
        converter: Callable[[Any, Any], Any] = batch_to,
        root: int = 0,
        *,
        progress_hook: Callable[[int], None] | None = None,
    ) -> None:
        if not 0 <= root < comm.size:
            raise UsageError(f"root={root} is outside 0..{comm.size - 1}.")
        self.comm = comm
        self.root = root
        self.iterator = one_pass(iterator)
        self.targets = {"main": target} if isinstance(target, nn.Module) else dict(target)
        self.device = device
        self.converter = converter
        self.progress_hook = progress_hook

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """The result of one batch, whose parts are the arguments; not None. Override it. Local."""
        raise NotImplementedError(f"{type(self).__name__} must define calc_local().")

    def aggregate(self, results: list[Any]) -> Any:
        """Aggregate the results of all ranks. Override it. Called on the root only.

        ``results`` has the first batches of rank 0, 1, ..., then the second batches and so on.
        """
        raise NotImplementedError(f"{type(self).__name__} must define aggregate().")

    @events.during("evaluation")
    def __call__(self, manager: Any = None) -> Any:
        """Evaluate. *Collective.* Raises CommunicationError: another rank raised."""
        what = f"evaluation '{self.name or self.default_name}'"
        gather = HeartbeatGather(self.comm, what)
        try:
            with torch.no_grad(), evaluation_mode(self.targets.values()):
                results = self._local_results(gather)
        except Exception as error:
            gather.fail(error)
            raise
        gather.finish(None)
        gathered = self.comm.gather_obj(results, self.root)
        gather = HeartbeatGather(self.comm, what)
        result = None
        try:
            if gathered is not None:
                result = self.aggregate(_round_robin(gathered))
        except Exception as error:
            gather.fail(error)
            raise
        gather.finish(None)
        return result

    def _local_results(self, gather: HeartbeatGather) -> list[Any]:
        results = []
        for number, batch in enumerate(self.iterator, start=1):
            gather.heartbeat()
            result = call_with_batch(self.calc_local, self.converter(batch, self.device))
            if result is None:
                raise UsageError(
                    f"{type(self).__name__}.calc_local() returned None. Return the batch's result."
                )
            results.append(result)
            if self.progress_hook:
                self.progress_hook(number)
        return results


def _round_robin(parts: list[list[Any]]) -> list[Any]:
    num_rounds = max(map(len, parts))
    return [part[k] for k in range(num_rounds) for part in parts if k < len(part)]
