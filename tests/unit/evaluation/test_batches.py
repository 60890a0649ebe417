from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from torchmn.evaluation import batch_to, call_with_batch, num_samples

Pair = namedtuple("Pair", "image label")
X, Y = torch.zeros(7, 3), torch.zeros(7)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, 7),
        (np.zeros((4, 2)), 4),
        ((X, Y), 7),
        ([X, Y], 7),
        ({"weight": torch.tensor(1.0), "x": X}, 7),
        (UserDict(x=X), 7),
        (Pair(X, Y), 7),
        ([[X, X], Y], 7),
        ((3, "text", X), 7),
        (torch.zeros(0, 5), 0),
        ((), None),
        ([], None),
        (torch.tensor(3.0), None),
        (5, None),
        (["a", "b"], 2),
        ({"text": ["a", "b"], "label": torch.zeros(2)}, 2),
        ({"text": ["a", "b"]}, 2),
        (pack_sequence([torch.zeros(5), torch.zeros(2)]), 2),
    ],
)
def test_num_samples(batch: Any, expected: int | None) -> None:
    assert num_samples(batch) == expected


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
