"""Iterators that return the batches of one rank on all ranks, which hold parts of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchmn.base.errors import DataError, UsageError
from torchmn.data.sub_dataset import length_of

if TYPE_CHECKING:
    from torchmn.comm import Communicator

_PROGRESS = (
    "epoch",
    "is_new_epoch",
    "epoch_detail",
    "previous_epoch_detail",
    "current_position",
)


def create_multi_node_iterator(
    iterator: Any, comm: Communicator, rank_master: int = 0
) -> MultiNodeIterator | MultiNodeLoader:
    """An iterator that returns the batches of ``rank_master`` on every rank. *Collective.*

    Args:
        iterator: on the master, an iterator of batches such as `SerialIterator`, or an iterable
            that is iterated once per epoch, such as a DataLoader. On other ranks it is not read and
            may be None.
        comm: the ranks that get the same batches, such as those that share a model.
        rank_master: the rank that reads.

    Returns a `MultiNodeIterator` or, for a DataLoader, a `MultiNodeLoader`. Tensors arrive with
    their shapes and dtypes; CUDA tensors on ``comm.device``.

    Raises, on all ranks:
        UsageError: the master's ``iterator`` cannot be iterated, or there is no such rank.
        RankMismatchError: ranks passed different ranks as master.

    >>> import torchmn
    >>> comm = torchmn.create_communicator()
    >>> plain = torchmn.SerialIterator(range(4), 2, shuffle=False, collate_fn=list)
    >>> iterator = torchmn.create_multi_node_iterator(plain, comm)
    >>> next(iterator), iterator.epoch_detail
    ([0, 1], 0.5)
    >>> comm.finalize()
    """
    facts = comm.bcast_obj(_facts(iterator) if comm.rank == rank_master else None, rank_master)
    if not (facts["is_iterator"] or facts["is_loader"]):
        raise UsageError(
            f"create_multi_node_iterator: rank {rank_master} is the master and passed a "
            f"{facts['type']}. Pass an iterator of batches or a DataLoader there."
        )
    kind = MultiNodeIterator if facts["is_iterator"] else MultiNodeLoader
    return kind(iterator if comm.rank == rank_master else None, comm, rank_master, facts)


class _FromMaster:
    """Calls the iterator of one rank, and gives all ranks the outcome."""

    def __init__(
        self, actual: Any, comm: Communicator, rank_master: int, facts: Mapping[str, Any]
    ) -> None:
        self._actual = actual
        self._comm = comm
        self._master = rank_master
        self._length: int | None = facts["length"]
        self._state: Mapping[str, Any] | None = None
        self.batch_size: int | None = facts["batch_size"]
        """Samples in a batch, if the master's iterator has it."""
        if facts["dataset_length"] is not None:
            self.dataset = [()] * facts["dataset_length"] if actual is None else actual.dataset
            """The master's data set; on other ranks an empty one of its length."""
        self._note(facts)

    def state_dict(self) -> Mapping[str, Any]:
        """The state of the master's iterator, on every rank. Local.

        A plain iterator of the same kind loads it. Raises UsageError: that one has no state.
        """
        if self._state is None:
            raise UsageError(
                f"The iterator of rank {self._master} has no state_dict(). Use SerialIterator, or "
                "save the state of what it reads on that rank."
            )
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the master's state, also that of a plain iterator. *Collective.*"""
        self._on_master(lambda actual: actual.load_state_dict(state))

    def _on_master(self, function: Callable[[Any], Any]) -> Any:
        """Return on all ranks what ``function(iterator)`` returns on the master. *Collective.*

        Raises StopIteration if the function did. If it raised anything else, the master raises that
        and the other ranks raise DataError.
        """
        outcome: dict[str, Any] = {}
        own_error: Exception | None = None
        if self._comm.rank == self._master:
            try:
                with suppress(StopIteration):  # then there is no value
                    outcome["value"] = function(self._actual)
                outcome["seen"] = _seen(self._actual)
            except Exception as error:  # the other ranks wait for the broadcast
                own_error, outcome = error, {"problem": f"{type(error).__name__}: {error}"}
        outcome = self._comm.bcast_obj(outcome, self._master)
        if own_error is not None:
            raise own_error
        if "problem" in outcome:
            raise DataError(
                f"Rank {self._master}, which reads for all ranks, raised {outcome['problem']}"
            )
        self._note(outcome["seen"])
        if "value" not in outcome:
            raise StopIteration
        return outcome["value"]

    def _note(self, seen: Mapping[str, Any]) -> None:
        # Sent with every batch, so that `state_dict` is the same on all ranks, and local.
        self._state = seen["state"]
        for name, value in seen["progress"].items():
            setattr(self, name, value)


class MultiNodeIterator(_FromMaster):
    """The batches of one rank's iterator on every rank; see `create_multi_node_iterator`.

    ``epoch``, ``is_new_epoch``, ``epoch_detail``, ``previous_epoch_detail`` and
    ``current_position`` are those of the master's iterator, as far as it has them.

    >>> plain = torchmn.SerialIterator([1, 2, 3, 4], 2, shuffle=False)
    >>> iterator = torchmn.create_multi_node_iterator(plain, comm)
    >>> next(iterator), iterator.is_new_epoch
    (tensor([1, 2]), False)
    """

    epoch: int
    is_new_epoch: bool
    epoch_detail: float
    previous_epoch_detail: float | None
    current_position: int

    def __iter__(self) -> MultiNodeIterator:
        return self

    def __next__(self) -> Any:
        """The master's next batch. *Collective.*

        Raises, on all ranks: StopIteration if the master's iterator ended; DataError, or on the
        master its own error, if it raised; UnsupportedError (RankMismatchError on others): the
        batch cannot be sent.
        """
        return self._on_master(next)

    next = __next__

    def reset(self) -> None:
        """Begin again, as the master's iterator does. *Collective.*"""
        self._on_master(lambda actual: actual.reset())


class MultiNodeLoader(_FromMaster):
    """The batches of one rank's DataLoader on every rank; see `create_multi_node_iterator`.

    Each ``for`` over it is a pass over the master's loader. *Collective*: all ranks begin, leave
    and end passes together.

    >>> loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=2)
    >>> [batch.tolist() for batch in torchmn.create_multi_node_iterator(loader, comm)]
    [[1, 2], [3]]
    """

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"The loader of rank {self._master} has no length.")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        passes: list[Iterator[Any]] = []

        def draw(loader: Iterable[Any]) -> Any:
            # The pass begins with the first batch, so that all ranks hear of an error in `iter`.
            if not passes:
                passes.append(iter(loader))
            return next(passes[0])

        while True:
            try:
                batch = self._on_master(draw)
            except StopIteration:
                return
            yield batch


def _facts(iterator: Any) -> dict[str, Any]:
    """Facts about the master's iterator that all ranks need."""
    batch_size = getattr(iterator, "batch_size", None)
    return {
        "is_iterator": hasattr(iterator, "__next__"),
        "is_loader": hasattr(iterator, "__iter__"),
        "type": type(iterator).__name__,
        "length": length_of(iterator),
        "dataset_length": length_of(getattr(iterator, "dataset", None)),
        "batch_size": batch_size if isinstance(batch_size, int) else None,
        **_seen(iterator),
    }


def _seen(iterator: Any) -> dict[str, Any]:
    """The progress and the state of an iterator, as far as it has them."""
    state_dict = getattr(iterator, "state_dict", None)
    return {
        "progress": {
            name: getattr(iterator, name) for name in _PROGRESS if hasattr(iterator, name)
        },
        "state": state_dict() if state_dict is not None else None,
    }
