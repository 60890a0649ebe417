"""Values of samples from all ranks, in the order of the data set and by index."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchmn.data import gather_by_index, gather_outputs, scatter_loader
from torchmn.errors import UsageError
from torchmn.testing import run_ranks

NUM = 11
SIZES = [1, 2, 3, 4]
Pair = namedtuple("Pair", ["first", "second"])
pytestmark = pytest.mark.filterwarnings("ignore:scatter_loader. batches of")


def _data() -> TensorDataset:
    return TensorDataset(torch.arange(NUM), torch.arange(NUM).double().view(-1, 1) / 7)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "parts of different sizes": ({"batch_size": 4}, [*range(NUM)]),
    "a last batch of one": ({"batch_size": 5}, [*range(NUM)]),
    "fewer samples than ranks": ({"batch_size": 1}, [*range(NUM)]),
    "all in one batch": ({"batch_size": 64}, [*range(NUM)]),
    "shuffled": ({"batch_size": 4, "shuffle": True, "generator": _generator()}, [*range(NUM)]),
    "drop_last": ({"batch_size": 4, "drop_last": True}, [*range(8)]),
    "nothing": ({"batch_size": 64, "drop_last": True}, []),
    "repeated": ({"batch_size": 4, "sampler": [0, 5, 5, 0, 1, 9, 5]}, [0, 1, 5, 9]),
    "a worker": ({"batch_size": 4, "num_workers": 1}, [*range(NUM)]),
}


@pytest.mark.parametrize(
    ("name", "size"),
    # Workers are forked: not from more threads than must be, for the others may hold locks.
    [(name, size) for name in LOADERS for size in SIZES if name != "a worker" or size == 2],
)
def test_outputs_are_in_the_order_of_the_data_set(name: str, size: int) -> None:
    options, expected = LOADERS[name]
    if "generator" in options:
        options = options | {"generator": _generator()}

    def rank_main(comm):
        loader = scatter_loader(DataLoader(_data(), **options), comm)
        results = []
        for _ in range(2):
            with torch.no_grad():
                outputs = [
                    {
                        "x": 2 * x,
                        "pair": Pair(x.numpy(), (y, [f"{i}" for i in x.tolist()])),
                    }
                    for x, y in loader
                ]
            results.append(gather_outputs(loader, outputs))
        return results

    index = torch.tensor(expected)
    for results in run_ranks(rank_main, size):
        for found in results:
            if not expected:
                assert found == []
                continue
            assert torch.equal(found["x"], 2 * index)
            assert isinstance(found["pair"], Pair)
            assert np.array_equal(found["pair"].first, index.numpy())
            assert torch.equal(found["pair"].second[0], _data().tensors[1][index])
            assert found["pair"].second[1] == [f"{i}" for i in expected]


@pytest.mark.parametrize("size", SIZES)
def test_a_loop_that_was_left(size: int) -> None:
    def rank_main(comm):
        loader = scatter_loader(DataLoader(_data(), 4, num_workers=1, prefetch_factor=4), comm)
        outputs = []
        with torch.no_grad():
            for number, (x, _) in enumerate(loader):
                outputs.append(x)
                if number == 1:
                    break
        return gather_outputs(loader, outputs).tolist()

    assert run_ranks(rank_main, size) == [[*range(8)]] * size


OUTPUT = "an output for 2 samples is a"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda outputs: outputs[1:], "2 outputs for the 3 batches"),
        (lambda outputs: [x.double().mean() for x in outputs], f"{OUTPUT} Tensor with no rows"),
        (lambda outputs: [torch.cat([x, x]) for x in outputs], f"{OUTPUT} Tensor with 4 rows"),
        (lambda outputs: [1.0 for _ in outputs], f"{OUTPUT} float with no rows"),
    ],
    ids=["the first is missing", "means", "other rows", "numbers"],
)
def test_outputs_that_do_not_fit_are_refused_on_all_ranks(change: Any, text: str) -> None:
    def rank_main(comm):
        loader = scatter_loader(DataLoader(_data(), 4), comm)
        with torch.no_grad():
            outputs = [x for x, _ in loader]
        with pytest.raises(UsageError, match=f"Rank 1: {text}"):
            gather_outputs(loader, change(outputs) if comm.rank == 1 else outputs)
        with pytest.raises(UsageError, match="cannot be joined"):
            gather_outputs(
                loader,
                [x.expand(len(outputs), -1).T for x in outputs[:-1]] + [outputs[-1].view(-1, 1)],
            )

    run_ranks(rank_main, 2)


def test_a_pass_that_trains_and_another_loader_are_refused() -> None:
    def rank_main(comm):
        loader = scatter_loader(DataLoader(_data(), 4), comm)
        with pytest.raises(UsageError, match=r"last loop under torch\.no_grad"):
            gather_outputs(loader, [x for x, _ in loader])
        with pytest.raises(UsageError, match="that scatter_loader has returned"):
            gather_outputs(DataLoader(_data(), 4), [])

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("size", SIZES)
def test_values_by_index(size: int) -> None:
    """Of repeated samples it is the last one, as in one process."""
    indices = torch.tensor([7, 2, 2, 9, 0, 7])
    values = torch.arange(6.0)

    def rank_main(comm):
        own = torch.arange(6).tensor_split(comm.size)[comm.rank]
        leaf = values.clone().requires_grad_()
        found, of_all = gather_by_index(indices[own], leaf[own], comm)
        assert not of_all.requires_grad
        nothing = gather_by_index([], torch.zeros(0), comm)
        assert nothing[0].tolist() == []
        return found.tolist(), of_all.tolist()

    assert run_ranks(rank_main, size) == [([0, 2, 7, 9], [4.0, 2.0, 5.0, 3.0])] * size


def test_indices_must_be_integers() -> None:
    def rank_main(comm):
        with pytest.raises(UsageError, match="Rank 0: the indices of samples must be integers"):
            gather_by_index([0.5] if comm.rank == 0 else [1], torch.zeros(1), comm)

    run_ranks(rank_main, 2)
