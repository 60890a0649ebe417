"""Chainer's iterators in evaluators: one whole pass at each evaluation."""

from collections import namedtuple
from typing import Any

import pytest
import pytorch_pfn_extras as ppe
import torch
from pytorch_pfn_extras.training.extensions import Evaluator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchmn import GenericMultiNodeEvaluator, SerialIterator
from torchmn.errors import UsageError
from torchmn.testing import run_ranks
from torchmn.train.evaluation import batch_to, call_with_batch, create_multi_node_evaluator

VALUES = torch.arange(11, dtype=torch.float64)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> None:
        ppe.reporting.report({"mean": x.mean()}, self)


def shard(comm) -> TensorDataset:  # type: ignore[no-untyped-def]
    return TensorDataset(VALUES[comm.rank :: comm.size])


@pytest.mark.parametrize("in_dict", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_serial_iterator_gives_what_a_loader_gives_each_time(size: int, in_dict: bool) -> None:
    def evaluate(comm):
        iterator = SerialIterator(shard(comm), 3, repeat=False)
        evaluator = create_multi_node_evaluator(
            Evaluator({"main": iterator} if in_dict else iterator, Mean()), comm
        )
        return [evaluator()["main/mean"] for _ in range(3)]

    for values in run_ranks(evaluate, size):
        assert values == pytest.approx([5.0] * 3, rel=1e-12)


def test_the_generic_evaluator_begins_again_too() -> None:
    class Count(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            return len(x)

        def aggregate(self, results):
            return sum(results)

    def evaluate(comm):
        evaluator = Count(comm, SerialIterator(shard(comm), 3, repeat=False), Mean())
        return [evaluator() for _ in range(2)]

    assert run_ranks(evaluate, 2)[0] == [11, 11]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (lambda data: SerialIterator(data, 3), "would never end.*repeat=False"),
        (lambda data: iter(DataLoader(data)), "can be iterated only once"),
        (lambda data: {"test": DataLoader(data)}, "One must be named 'main'"),
    ],
)
def test_what_cannot_be_evaluated(batches, message: str) -> None:  # type: ignore[no-untyped-def]
    def attempt(comm):
        with pytest.raises(UsageError, match=message):
            create_multi_node_evaluator(Evaluator(batches(shard(comm)), Mean()), comm)

    run_ranks(attempt, 2)


# ---- a batch on its device, and as arguments ----


Pair = namedtuple("Pair", "image label")
X, Y = torch.zeros(7, 3), torch.zeros(7)


def test_batch_to_keeps_the_structure() -> None:
    batch = {"pair": Pair(X, Y), "rest": [X, (Y, "text")]}
    moved = batch_to(batch, "meta")
    assert moved["pair"].image.is_meta
    assert moved["rest"][1][0].is_meta
    assert moved["rest"][1][1] == "text"
    assert type(moved["rest"][1]) is tuple
    assert batch_to(batch, None) is batch


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((1, 2), ((1, 2), {})),
        ([1, 2], ((1, 2), {})),
        ({"a": 1}, ((), {"a": 1})),
        (Pair(1, 2), ((Pair(1, 2),), {})),
        (5, ((5,), {})),
    ],
)
def test_call_with_batch(batch: Any, expected: Any) -> None:
    assert call_with_batch(lambda *args, **kwargs: (args, kwargs), batch) == expected
