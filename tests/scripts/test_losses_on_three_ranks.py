"""Losses in which the number of ranks and the sizes of their parts count."""

import pytest

from . import losses
from .registry import SCRIPTS
from .running import check_exact, on_ranks

# Parts of 3, 3 and 2 rows; where few are positive, two ranks have none.
OF_COUNTS = (
    "sum_and_penalty",
    "positives",
    "positives_or_no_backward",
    "scaled_positives_or_no_backward",
)


@pytest.mark.parametrize("name", OF_COUNTS)
def test_as_one_process_on_three_ranks(name: str) -> None:
    script = next(each for each in SCRIPTS[losses.__name__] if each.name == name)
    check_exact(script, on_ranks(script, 3, "every_step"))
