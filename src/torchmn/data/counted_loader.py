"""A DataLoader that counts the batches that the script has received.

A DataLoader with workers prefetches batches: its sampler has drawn more of them than the loop has
received, and is exhausted before the loop ends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader, Sampler

from torchmn.base import events
from torchmn.base.errors import UsageError
from torchmn.control.script import failure_notes
from torchmn.data.divided_batches import LoaderPass, divided_batches

if TYPE_CHECKING:
    from torchmn.comm import Communicator

Loader = TypeVar("Loader", bound=DataLoader[Any])


class CountedPasses:
    """The passes over a loader of this rank's parts, which are counted. Local."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self._comm, self._name = comm, name
        self._number = divided_batches(comm).new_loader()
        self._pass: LoaderPass | None = None
        failure_notes.add(self)

    def _name_of(self, what: str) -> str:
        """The name of a collective of these passes, for messages and reports of hangs."""
        purpose = "train" if torch.is_grad_enabled() else "evaluate"
        return f"{what} loader {self._number} of {self._name} to {purpose}"

    def failure_note(self) -> str:
        """Tell the size of the current part, if it may explain an exception; else return ""."""
        last = self._pass
        if last is None or not last.num_parts or last.has_ended:
            return ""
        own, whole, _ = last.latest
        if own > 1 or own == whole:
            return ""
        return (
            f"torchmn: this rank has {own} of the {whole} samples of this batch of {self._name}: "
            "none to divide by, or too few for layers such as BatchNorm1d. Give it drop_last=True, "
            "or another batch size."
        )


class PassSampler(CountedPasses, Sampler[list[Any]]):
    """A batch sampler of this rank's parts, whose passes are counted. Local."""

    def __init__(self, comm: Communicator, name: str) -> None:
        super().__init__(comm, name)
        self._announced: LoaderPass | None = None
        """A pass over a loader whose iterator has drawn nothing yet."""

    def _started(self, one_pass: LoaderPass) -> None:
        """Called when a pass begins, before it replaces ``_pass``."""

    def _parts(self, one_pass: LoaderPass) -> Iterator[list[Any]]:
        """The indices of this rank's parts, drawn as they are requested."""
        raise NotImplementedError

    def begin_pass(self, *, is_of_loader: bool, fetches: bool) -> LoaderPass:
        """Begin the pass of a ``for``. ``fetches``: this process reads samples, and no workers."""
        batches = divided_batches(self._comm)
        one_pass = LoaderPass(batches, self._number, is_of_loader=is_of_loader)
        self._started(one_pass)
        self._pass = one_pass
        self._announced = one_pass if is_of_loader else None
        if self._comm.rank > 0 and not fetches:
            one_pass.streams.draw_apart()  # the seed of workers, which comes next
        one_pass.is_fetched_here = fetches
        return one_pass

    def __iter__(self) -> Iterator[list[Any]]:
        # A DataLoader with workers calls this twice before it draws, and uses the second iterator.
        one_pass = self._announced or self.begin_pass(is_of_loader=False, fetches=False)
        indices = self._counted(one_pass, self._parts(one_pass))
        return indices if one_pass.is_of_loader else _Loop(indices, one_pass)

    def _counted(self, one_pass: LoaderPass, indices: Iterator[list[Any]]) -> Iterator[list[Any]]:
        if self._announced is one_pass:
            self._announced = None
        one_pass.streams.draw_together(has_seed_of_workers=True)
        for batch in indices:
            one_pass.num_drawn += 1
            if one_pass.is_fetched_here:
                one_pass.streams.draw_apart()  # until the batch is fetched
            yield batch
        one_pass.is_exhausted = True


class CountedLoader(DataLoader[Any]):
    """Mixed with the class of a DataLoader whose batch sampler is a `PassSampler`."""

    def __iter__(self) -> Any:
        sampler: Any = self.batch_sampler
        one_pass = sampler.begin_pass(is_of_loader=True, fetches=self.num_workers == 0)
        return LoopOfScript(super().__iter__(), one_pass, type(self).__name__)


class _Loop:
    """An iterator whose batches are counted: what the script, or a DataLoader, iterates over.

    The pass holds no reference to it, so that it is deleted, and says so, when a loop is left.
    """

    def __init__(self, batches: Iterator[Any], one_pass: LoaderPass) -> None:
        self._batches, self._pass = batches, one_pass

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        self._pass.thread = threading.get_ident()
        if self._pass.before_next is not None:
            self._pass.before_next(self._pass.num_received)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._pass.has_ended = self._pass.is_over = True
            raise
        self._pass.num_received += 1
        return batch

    def __del__(self) -> None:
        # The garbage collector may run in any thread, at any line: nothing but flags is written.
        self._pass.was_left = self._pass.is_over = True


class LoopOfScript(_Loop):
    """The iterator of a script's loop over a loader."""

    def __init__(self, batches: Iterator[Any], one_pass: LoaderPass, name: str) -> None:
        super().__init__(batches, one_pass)
        self._name = name

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        one_pass = self._pass
        for observer in events.observers:
            observer.phase("data", begins=True)
        try:
            batch = super().__next__()
        finally:
            # This rank may have drawn numbers of its own for the samples, also if that raised.
            one_pass.streams.draw_together()
            for observer in events.observers:
                observer.phase("data", begins=False)
        if one_pass.num_received > one_pass.num_drawn:
            raise UsageError(
                f"The iterator of {self._name} returns batches that its batch_sampler has not "
                "drawn in this pass: it was made before scatter_loader, or makes several batches "
                "of one, so that they are not this rank's parts. Give scatter_loader a "
                "torch.utils.data.DataLoader, or one whose __iter__ begins with super().__iter__()."
            )
        return batch


def loader_copy(loader: Loader, mixin: Any = None, **own: Any) -> Loader:
    """Copy a DataLoader with some attributes replaced, as a subclass of ``mixin``, if given. Local.

    No constructor is called, since a user's class may have other arguments.
    """
    kind: Any = type(loader)
    copy: Loader = object.__new__(kind if mixin is None else _mixed_class(mixin, kind))
    vars(copy).update(vars(loader) | own)  # a DataLoader lets no attribute of these be set
    return copy


@functools.cache
def _mixed_class(mixin: Any, kind: Any) -> Any:
    return type(f"Scattered{kind.__name__}", (mixin, kind), {})
