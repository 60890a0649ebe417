"""What `num_samples` answers for each kind of batch, and that all who need the number agree on it.

Kinds of libraries that need not be installed are classes of the same shape.
"""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import default_collate

from tests.contracts.suites.communicator_contracts import require
from torchmn.cntk.readers import MinibatchData
from torchmn.cntk.train import trainer as cntk_trainer
from torchmn.data import EmptyBatchCollate, num_samples
from torchmn.errors import UsageError
from torchmn.exchange.weights import Contribution
from torchmn.nn.micro_batches import samples_to_cut, tensors_of
from torchmn.train.evaluation.create import Recorder
from torchmn.train.frameworks.lightning import TrainerStrategy

Count = Callable[[Any], int | None]
"""None: the number is not known."""


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


@dataclass
class Tokens:
    scale: float
    tokens: Tensor


class BatchEncoding(UserDict[str, Any]):
    """Like that of transformers, whose attributes are its keys."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def _images(*heights: int, channels: int = 3) -> list[Tensor]:
    return [torch.zeros(channels, height, 50) for height in heights]


def _nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the strided layout is a prototype
        return torch.nested.nested_tensor([torch.zeros(n, 2) for n in (3, 5, 4)], layout=layout)


X, LABELS = torch.zeros(7, 3), torch.zeros(7, dtype=torch.int64)
TARGETS = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (2, 0, 3, 1, 9)]
KINDS: dict[str, tuple[Any, int | None]] = {
    "tensor": (X, 7),
    "array": (np.zeros((4, 2)), 4),
    "default collate of pairs": (default_collate([(torch.zeros(3), 1)] * 7), 7),
    "default collate of two inputs and a label": (
        default_collate([((torch.zeros(3), torch.zeros(5)), 1)] * 7),
        7,
    ),
    "default collate of dicts": (default_collate([{"x": torch.zeros(3), "name": "a"}] * 7), 7),
    "default collate of texts": (default_collate([("a", 0), ("b", 1)]), 2),
    "fields with other sizes after the first": ([X, torch.zeros(7, 1)], 7),
    "five images": (_images(40, 50, 60, 70, 80), 5),
    "grey images": (_images(40, 50, channels=1), 2),
    "sequences of other lengths": ([torch.zeros(5, 2), torch.zeros(4, 2)], 2),
    "detection": ((_images(40, 50, 60, 70, 80), TARGETS), 5),
    "detection of images of one size": ((_images(40, 40, 40, 40, 40), TARGETS), 5),
    "detection with tuples": ((tuple(_images(40, 40)), tuple(TARGETS[:2])), 2),
    "images by name": ({"images": _images(40, 40), "height": 40}, 2),
    "a list of dicts as an argument": ((TARGETS,), 5),
    "dict with a scalar first": ({"weight": torch.tensor(1.0), "x": X}, 7),
    "scalars and texts first": ((3, "text", torch.tensor(2.0), X), 7),
    "dict of a library": (UserDict(x=X), 7),
    "BatchEncoding": (BatchEncoding(input_ids=torch.zeros(4, 9), labels=torch.zeros(4)), 4),
    "PackedSequence": (pack_sequence([torch.zeros(5), torch.zeros(2)]), 2),
    "PackedSequence as a field": ((pack_sequence([torch.zeros(5), torch.zeros(2)]), LABELS[:2]), 2),
    "nested tensor": (_nested(torch.strided), 3),
    "jagged tensor": ({"x": _nested(torch.jagged)}, 3),
    "graphs": (SimpleNamespace(x=torch.zeros(30, 2), num_graphs=6), 6),
    "named tuple": (Pair(X, LABELS), 7),
    "dataclass": (Tokens(0.5, torch.zeros(6, 9)), 6),
    "texts": (["a", "b"], 2),
    "texts by name": ({"text": ("a", "b"), "label": LABELS[:2]}, 2),
    "tensor without rows": (torch.zeros(0, 5), 0),
    "what a rank without samples gets": (EmptyBatchCollate([(torch.zeros(3), 1)])([]), 0),
    "empty list": ([], 0),
    "detection without samples": (([], []), 0),
    "MinibatchData": (MinibatchData(X, num_sequences=7, num_samples=7), 7),
    "nothing": ((), None),
    "scalar": (torch.tensor(3.0), None),
    "number": (5, None),
    "text": ("text", None),
}


# ---- those who need the number ----


def evaluation(batch: Any) -> int | None:
    """The weight of a value that an evaluation reports."""
    recorder = Recorder()
    recorder.begin_batch(batch)
    return recorder._batch_size


def weight(batch: Any) -> int | None:
    """The weight of a rank. The model gets fields as its arguments, and all else as one."""
    contribution = Contribution(is_by_samples=True)
    has_fields = isinstance(batch, tuple) and not isinstance(batch, PackedSequence)
    has_fields = has_fields or (isinstance(batch, list) and len(batch) != num_samples(batch))
    contribution.count(nn.Identity(), tuple(batch) if has_fields else (batch,), {})
    return round(contribution.weight) if contribution.is_known else None


def micro_batches(batch: Any) -> int | None:
    """What is cut into micro-batches; what cannot be cut is refused."""
    tensors = [tensor for tensor in tensors_of(batch) if tensor.dim()]
    try:
        found = samples_to_cut(batch, "the batch")
    except UsageError:
        require(
            {tensor.size(0) for tensor in tensors} != {num_samples(batch)},
            "micro-batches of tensors with the same samples are refused",
        )
        return num_samples(batch)
    return found if tensors else num_samples(batch)


def lightning(batch: Any) -> int | None:
    """What a training_step has seen that calls layers and not the module."""

    class Theirs:
        def training_step(self, *args: Any) -> None:
            pass

    contribution = Contribution(is_by_samples=True)
    optimizer = SimpleNamespace(
        counts_samples=True, reducer=SimpleNamespace(contribution=contribution)
    )
    strategy: Any = object.__new__(type("Strategy", (TrainerStrategy, Theirs), {}))
    strategy.exchange = SimpleNamespace(optimizers=[optimizer])
    strategy.lightning_module = SimpleNamespace(automatic_optimization=True)
    strategy.training_step(batch)
    return round(contribution.num_samples)


def cntk(batch: Any) -> int | None:
    """The rows of an argument of a minibatch, which is an array; others are not asked for."""
    is_array = isinstance(batch, (Tensor, np.ndarray, MinibatchData))
    return cntk_trainer._num_samples(batch) if is_array else num_samples(batch)


PLACES: dict[str, Count] = {
    "num_samples": num_samples,
    "evaluation": evaluation,
    "weight": weight,
    "micro-batches": micro_batches,
    "lightning": lightning,
    "cntk": cntk,
}


def check_answers(place: str, count: Count) -> None:
    """All kinds have the number of samples that is written here, at this place."""
    for kind in KINDS:
        check_answer(kind, place, count)


def check_answer(kind: str, place: str, count: Count) -> None:
    """The same of one kind."""
    batch, expected = KINDS[kind]
    found = count(batch)
    if place == "lightning":  # counts nothing where nothing is known
        expected = expected or 0
    require(found == expected, f"{place}: {kind} has {expected} samples, not {found}")
