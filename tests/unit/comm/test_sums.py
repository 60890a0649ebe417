"""The sums of an evaluation loop over ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from torchmn.errors import RankMismatchError, UsageError
from torchmn.testing import run_ranks

SIZES = [1, 2, 3]


@pytest.mark.parametrize("size", SIZES)
def test_numbers_and_tensors(size: int) -> None:
    def rank_main(comm):
        rank = comm.rank
        return comm.sum_over_ranks(
            0.1 * rank,
            10**20 + rank,
            torch.tensor([rank, 1]),
            torch.tensor(0.5 * rank, dtype=torch.float16),
            True,
            np.float32(0.5),
            np.int64(rank),
        )

    for loss, large, both, half, flag, single, whole in run_ranks(rank_main, size):
        ranks = range(size)
        assert loss == math.fsum(0.1 * rank for rank in ranks)
        assert (large, type(large)) == (sum(10**20 + rank for rank in ranks), int)
        assert both.tolist() == [sum(ranks), size]
        assert both.dtype == torch.int64
        assert (half.item(), half.dtype) == (0.5 * sum(ranks), torch.float16)
        assert (flag, type(flag)) == (size, int)
        assert (single, whole) == (0.5 * size, sum(ranks))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_small_integers_do_not_overflow(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    for found in run_ranks(lambda comm: comm.sum_over_ranks(torch.tensor([most], dtype=dtype)), 3):
        assert (found.tolist(), found.dtype) == ([3 * most], torch.int64)


def test_floats_are_rounded_once() -> None:
    """In rank order, with a rounding at each addition, the small ones would be lost."""
    values = [1e16, 1.0, 1.0]
    assert run_ranks(lambda comm: comm.sum_over_ranks(values[comm.rank]), 3) == [1e16 + 2] * 3
    tensors = [torch.tensor(x) for x in (2.0**24, 1.0, 1.0)]  # float32
    for found in run_ranks(lambda comm: comm.sum_over_ranks(tensors[comm.rank]), 3):
        assert (found.item(), found.dtype) == (2**24 + 2, torch.float32)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite(value: float) -> None:
    for found in run_ranks(lambda comm: comm.sum_over_ranks(value if comm.rank else -math.inf), 2):
        assert found == -math.inf if value == -math.inf else math.isnan(found)


def test_a_rank_without_batches_has_no_tensor_yet() -> None:
    def rank_main(comm):
        correct: Any = 0
        for _ in range(comm.rank):
            correct += torch.tensor(2)
        return comm.sum_over_ranks(correct, 1.5 if comm.rank else 0)

    for correct, loss in run_ranks(rank_main, 3):
        assert (int(correct), loss) == (6, 3.0)


def test_values_that_need_a_gradient() -> None:
    def rank_main(comm):
        loss = torch.ones(3, requires_grad=True).sum()
        return comm.sum_over_ranks(loss)

    for found in run_ranks(rank_main, 2):
        assert found.item() == 6.0
        with pytest.raises(UsageError, match=r"torchmn\.functions"):
            found.backward()


def test_ranks_that_differ() -> None:
    def rank_main(comm):
        texts = []
        for values in ([1] * (1 + comm.rank), [torch.zeros(1 + comm.rank)]):
            with pytest.raises(RankMismatchError, match="sum_over_ranks") as caught:
                comm.sum_over_ranks(*values)
            texts.append(str(caught.value))
        return texts, comm.sum_over_ranks(1)

    first, second = run_ranks(rank_main, 2)
    assert first == second
    assert first[1] == 2, "the ranks can continue"


@pytest.mark.parametrize("value", ["text", [1, 2], None, np.zeros(2), torch.zeros(2).to_sparse()])
def test_other_values_are_refused_on_all_ranks(value: object) -> None:
    def rank_main(comm):
        with pytest.raises((UsageError, RankMismatchError), match="sum_over_ranks"):
            comm.sum_over_ranks(value if comm.rank == 1 else 1)
        return comm.sum_over_ranks(1)

    assert run_ranks(rank_main, 2) == [2, 2]
