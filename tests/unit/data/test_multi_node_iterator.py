"""Refusals of iterators over ranks, and a trainer that uses them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.limits import limit
from torchmn import (
    SerialIterator,
    StandardUpdater,
    Trainer,
    create_multi_node_iterator,
    create_synchronized_iterator,
)
from torchmn.data import GlobalSampler
from torchmn.errors import DataError, RankMismatchError, UnsupportedError, UsageError
from torchmn.testing import run_ranks


def test_what_cannot_be_iterated_is_named_on_all_ranks() -> None:
    def rank_main(comm):
        with pytest.raises(UsageError, match="rank 1 is the master and passed a NoneType"):
            create_multi_node_iterator(range(3) if comm.rank == 0 else None, comm, rank_master=1)
        with pytest.raises(UsageError, match="root=2"):
            create_multi_node_iterator(None, comm, rank_master=2)

    run_ranks(rank_main, 2)


def test_without_a_state_there_is_an_error() -> None:
    def rank_main(comm):
        iterator = create_multi_node_iterator(iter([1, 2]) if comm.rank == 0 else None, comm)
        with pytest.raises(UsageError, match="rank 0 has no state_dict"):
            iterator.state_dict()
        assert list(iterator) == [1, 2]

    run_ranks(rank_main, 2)


def test_a_batch_that_cannot_be_sent_raises_on_all_ranks() -> None:
    def rank_main(comm):
        batches = iter([object(), 5])
        iterator = create_multi_node_iterator(batches if comm.rank == 0 else None, comm)
        with pytest.raises(UnsupportedError if comm.rank == 0 else RankMismatchError):
            next(iterator)
        assert next(iterator) == 5

    run_ranks(rank_main, 2, is_trusted=False)


def test_a_loader_without_length() -> None:
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from range(3)

    def rank_main(comm):
        loader = DataLoader(Endless(), 2) if comm.rank == 0 else None
        loader = create_multi_node_iterator(loader, comm)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2]]

    run_ranks(rank_main, 2)


def test_synchronizing_what_cannot_be() -> None:
    def rank_main(comm):
        with pytest.raises(UsageError, match="rank 1 passed a list"):
            create_synchronized_iterator(
                SerialIterator(range(3), 1) if comm.rank == 0 else [1], comm
            )
        sampler = GlobalSampler(4, comm, global_batch=2)
        with pytest.raises(UsageError, match="GlobalSampler, which has no generator"):
            create_synchronized_iterator(DataLoader(range(4), batch_sampler=sampler), comm)
        with pytest.raises(RankMismatchError, match="is 3 samples.* on rank 0 and 4 samples"):
            create_synchronized_iterator(SerialIterator(range(3 + comm.rank), 1), comm)
        loader = DataLoader(range(3))
        assert create_synchronized_iterator(loader, comm) is loader

    run_ranks(rank_main, 2)


def test_a_trainer_sees_the_epochs_of_the_master(tmp_path) -> None:
    """Batches of one rank in the updaters of two, which stop at the same iteration."""

    def rank_main(comm):
        data = [(torch.ones(2), torch.ones(1))] * 10
        iterator = SerialIterator(data, 4) if comm.rank == 0 else None
        iterator = create_multi_node_iterator(iterator, comm)
        model = nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        updater = StandardUpdater(
            iterator, sgd, model, loss_func=lambda x, y: nn.functional.mse_loss(model(x), y)
        )
        trainer = Trainer(updater, (2, "epoch"), out=str(tmp_path / str(comm.rank)))
        trainer.run()
        return trainer.updater.iteration, iterator.epoch, iterator.state_dict()

    first, second = run_ranks(rank_main, 2)
    assert first == second
    assert first[:2] == (5, 2)


def test_a_state_that_raises_at_the_end_raises_on_all_ranks() -> None:
    class Odd(SerialIterator):
        is_over = False

        def __next__(self):
            try:
                return super().__next__()
            except StopIteration:
                self.is_over = True
                raise

        def state_dict(self):
            if self.is_over:
                raise RuntimeError("exhausted")
            return super().state_dict()

    def rank_main(comm):
        own = Odd([1, 2], 1, repeat=False, shuffle=False) if comm.rank == 0 else None
        iterator = create_multi_node_iterator(own, comm)
        assert [next(iterator).tolist(), next(iterator).tolist()] == [[1], [2]]
        with pytest.raises(RuntimeError if comm.rank == 0 else DataError, match="exhausted"):
            next(iterator)

    run_ranks(rank_main, 2, timeout_s=limit(5))
