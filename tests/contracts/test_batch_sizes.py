"""The number of samples of every kind of batch, and implementations that count something else."""

import pytest
import torch

from tests.contracts.broken import batch_sizes as broken
from tests.contracts.suites.batch_size_contracts import (
    KINDS,
    PLACES,
    Count,
    check_answer,
    check_answers,
)
from tests.contracts.suites.communicator_contracts import ContractError
from torchmn.data import num_samples


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_places_give_one_answer(kind: str, place: str) -> None:
    check_answer(kind, place, PLACES[place])


@pytest.mark.parametrize("wrong", broken.WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_count_is_caught(wrong: Count) -> None:
    with pytest.raises(ContractError):
        check_answers("wrong", wrong)


def test_equal_sizes_are_fields_in_a_list_and_samples_in_a_field() -> None:
    images = [torch.zeros(3, 8, 8)] * 5
    assert num_samples(images) == 3
    assert num_samples((images,)) == 5
