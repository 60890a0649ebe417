from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from torchmn.train.evaluation import batch_to, call_with_batch

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
