"""Every two values of different axes meet."""

from itertools import product

import pytest

from tests.contracts.pairs import in_pairs

LETTERS, DIGITS, SIGNS = "abcdefgh", "123456", "+-*/"


@pytest.mark.parametrize("excluded", [[], [("a", "1"), ("b", "+"), ("2", "-")]])
def test_all_pairs(excluded: list[tuple[str, str]]) -> None:
    found = in_pairs(LETTERS, DIGITS, SIGNS, excluded=excluded)
    pairs = {pair for a, b, c in found for pair in ((a, b), (a, c), (b, c))}
    axes = (LETTERS, DIGITS), (LETTERS, SIGNS), (DIGITS, SIGNS)
    assert pairs == {pair for two in axes for pair in product(*two)} - {*excluded}
    assert len(found) == len(LETTERS) * len(DIGITS) - len({("a", "1")} & {*excluded})


def test_a_third_axis_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="do not meet. Let the third axis be the shortest"):
        in_pairs("ab", "12", SIGNS)
