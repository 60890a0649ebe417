"""What iterators over ranks must do: batches, epochs and states of one plain iterator on all ranks.

Each function takes a communicator and is called on every rank. It raises `ContractError` where the
contract is broken.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.contracts.suites.communicator_contracts import contracts_in, require
from torchmn import (
    SerialIterator,
    create_empty_dataset,
    create_multi_node_iterator,
    create_synchronized_iterator,
)
from torchmn.comm import Communicator
from torchmn.errors import DataError

SEED = 7
PROGRESS = ("epoch", "is_new_epoch", "epoch_detail", "previous_epoch_detail", "current_position")


class Samples:
    """Of several kinds and dtypes, the same wherever they are read."""

    def __init__(self, length: int = 10, fails_at: int | None = None) -> None:
        self._length, self._fails_at = length, fails_at

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, object]:
        if index == self._fails_at:
            raise OSError("the disk is gone")
        return {
            "image": torch.full((2, 3), index / 7, dtype=torch.float64),
            "half": torch.full((1,), float(index), dtype=torch.bfloat16),
            "label": index,
            "name": f"sample {index}",
        }


def plain(batch_size: int = 4, **options: object) -> SerialIterator:
    """The iterator that one process would use."""
    return SerialIterator(Samples(), batch_size, seed=SEED, **options)


def text(batch: object) -> str:
    """A batch with its dtypes, to compare."""
    return repr(batch)


def check_batches(comm: Communicator) -> None:
    """Batches, ends and epochs are the master's, whichever rank it is and however it repeats."""
    for master in range(comm.size):
        for repeat in (True, False):
            own = plain(repeat=repeat) if comm.rank == master else None
            iterator = create_multi_node_iterator(own, comm, rank_master=master)
            wanted = plain(repeat=repeat)
            require(iterator.batch_size == 4, f"batches of {iterator.batch_size}")
            require(len(iterator.dataset) == 10, f"{len(iterator.dataset)} samples")
            for number in range(7 if repeat else 4):
                where = f"master {master}, batch {number}"
                a, b = next(iterator, None), next(wanted, None)
                require(text(a) == text(b), f"{where}: {a} instead of {b}")
                for name in PROGRESS:
                    found, expected = getattr(iterator, name), getattr(wanted, name)
                    require(found == expected, f"{where}: {name} is {found}, not {expected}")
            iterator.reset()
            wanted.reset()
            require(text(next(iterator)) == text(next(wanted)), "after reset()")


def check_states(comm: Communicator) -> None:
    """A state goes from the plain iterator to the one of all ranks and back, and is one state."""
    master = comm.size - 1
    first = plain()
    next(first), next(first), next(first)
    shuffled_otherwise = SerialIterator(Samples(), 4, seed=SEED + 1)
    iterator = create_multi_node_iterator(
        shuffled_otherwise if comm.rank == master else None, comm, rank_master=master
    )
    iterator.load_state_dict(first.state_dict() if comm.rank == master else {})
    require(iterator.epoch_detail == first.epoch_detail, "progress after loading")
    require(text(next(iterator)) == text(next(first)), "the next batch after loading")
    state = iterator.state_dict()
    require(state == first.state_dict(), f"{state} instead of {first.state_dict()}")
    second = SerialIterator(Samples(), 4)
    second.load_state_dict(state)
    require(text(next(iterator)) == text(next(second)), "the next batch of a plain iterator")


def check_loaders(comm: Communicator) -> None:
    """A DataLoader on one rank is one on all ranks: passes, early ends, lengths."""
    data = TensorDataset(torch.arange(10), torch.arange(10) / 3)

    def make() -> DataLoader:
        generator = torch.Generator().manual_seed(SEED)
        return DataLoader(data, 4, shuffle=True, generator=generator)

    loader = create_multi_node_iterator(make() if comm.rank == 0 else None, comm)
    wanted = make()
    require(len(loader) == len(wanted), f"{len(loader)} batches")
    for number in range(3):
        found = [text(batch) for batch in loader]
        expected = [text(batch) for batch in wanted]
        require(found == expected, f"pass {number}: {found} instead of {expected}")
    for (a, _), (b, _) in zip(loader, wanted, strict=True):
        require(torch.equal(a, b), "a pass that is left")
        break
    require([text(b) for b in loader] == [text(b) for b in wanted], "after a pass that was left")


def check_errors(comm: Communicator) -> None:
    """An error of the master ends the call on all ranks, which may continue."""
    failing = SerialIterator(Samples(fails_at=5), 2, shuffle=False)
    iterator = create_multi_node_iterator(failing if comm.rank == 0 else None, comm)
    next(iterator), next(iterator)
    kind = OSError if comm.rank == 0 else DataError
    try:
        next(iterator)
    except kind as error:
        require("the disk is gone" in str(error), f"{error} does not name the cause")
    except Exception as error:
        require(False, f"raised {error!r}")
    else:
        require(False, "raised nothing")
    require(text(next(iterator)["label"]) == text(torch.tensor([6, 7])), "the batch after it")


def check_synchronized(comm: Communicator) -> None:
    """All ranks see one order, over data sets of their own; states are the plain iterator's."""
    data: object = Samples() if comm.rank == 0 else create_empty_dataset(Samples())
    numbers = Numbers(data)
    iterator = create_synchronized_iterator(
        SerialIterator(numbers, 3, seed=comm.rank, collate_fn=list), comm
    )
    seen = [next(iterator) for _ in range(8)]
    theirs = comm.allgather_obj(seen)
    require(all(each == seen for each in theirs), f"other orders: {theirs}")
    require(sum(seen, [])[:10] != list(range(10)), "not shuffled")
    again = SerialIterator(numbers, 3, collate_fn=list)
    again.load_state_dict(iterator.state_dict())
    require(next(again) == next(iterator), "the next batch of a plain iterator")
    loader = create_synchronized_iterator(DataLoader(range(10), 3, shuffle=True), comm)
    passes = [[batch.tolist() for batch in loader] for _ in range(2)]
    theirs = comm.allgather_obj(passes)
    require(all(each == passes for each in theirs), f"other orders of a DataLoader: {theirs}")
    require(passes[0] != passes[1], "the same order in each pass")


class Numbers:
    """The number of each sample of a data set."""

    def __init__(self, data: object) -> None:
        self._length = len(data)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


CONTRACTS = contracts_in(globals())


def check_all(comm: Communicator) -> None:
    """All of them."""
    for contract in CONTRACTS:
        contract(comm)
