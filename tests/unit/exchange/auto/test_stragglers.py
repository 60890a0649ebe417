"""The slowest of several ranks."""

from __future__ import annotations

import random
import statistics

import pytest

from torchmn.exchange.auto.predict import expected_maximum, waiting_share


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
def test_as_drawing_shows(num_ranks: int) -> None:
    rng = random.Random(0)
    sample = [rng.gauss(0.0, 0.05) for _ in range(500)]
    drawn = [max(rng.choices(sample, k=num_ranks)) for _ in range(20_000)]
    assert expected_maximum(sample, num_ranks) == pytest.approx(statistics.mean(drawn), abs=0.002)


def test_many_draws_tend_to_the_largest_value() -> None:
    assert expected_maximum([0.0, 0.1, 0.3], 1000) == pytest.approx(0.3)


def test_one_rank_waits_for_none() -> None:
    assert waiting_share([0.0, 0.5], 1, 1) == 0.0
    assert waiting_share([], 8, 1) == 0.0
    assert waiting_share([0.2, 0.2], 8, 1) == pytest.approx(0.0)
