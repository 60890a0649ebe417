"""Parts of tensors are put together whatever their shapes, and what is missing is noticed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from torchmn.checkpoint.parts import nowhere, place_parts
from torchmn.comm.local_tensors import PART
from torchmn.errors import DataError

WHOLE = torch.arange(35.0).view(7, 5)


def part(rows: slice, columns: slice) -> dict[str, object]:
    return {
        PART: WHOLE[rows, columns].clone(),
        "shape": [7, 5],
        "offsets": [rows.start, columns.start],
    }


def put_together(parts: Sequence[dict[str, object]]) -> torch.Tensor:
    states = [{"model": {"w": each, "step": 3}} for each in parts]
    state = place_parts(states[0], nowhere, states, "model")
    assert state["model"]["step"] == 3
    result: torch.Tensor = state["model"]["w"]
    return result


@pytest.mark.parametrize(
    "parts",
    [
        [part(slice(0, 4), slice(0, 5)), part(slice(4, 7), slice(0, 5))],
        [part(slice(0, 7), slice(0, 3)), part(slice(0, 7), slice(3, 5))],
        [part(slice(0, 4), slice(0, 3)), part(slice(0, 4), slice(3, 5)),
         part(slice(4, 7), slice(0, 3)), part(slice(4, 7), slice(3, 5))],
        [part(slice(0, 4), slice(0, 5)), part(slice(0, 4), slice(0, 5)),
         part(slice(4, 7), slice(0, 5)), part(slice(4, 7), slice(0, 5))],
        [part(slice(0, 0), slice(0, 5)), part(slice(0, 7), slice(0, 5))],
    ],
    ids=["rows", "columns", "both", "replicas", "empty"],
)  # fmt: skip
def test_the_whole_is_what_its_parts_were(parts: Sequence[dict[str, object]]) -> None:
    assert torch.equal(put_together(parts), WHOLE)


def test_a_part_that_is_missing_is_noticed() -> None:
    twice = part(slice(0, 4), slice(0, 5))
    with pytest.raises(DataError, match=r"model\['model'\]\['w'\]: the parts"):
        put_together([twice, twice, part(slice(5, 7), slice(0, 5))])
