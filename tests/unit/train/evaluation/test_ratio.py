import copy
import pickle

import pytest
import torch
from pytorch_pfn_extras.reporting import DictSummary

from torchmn.errors import UsageError
from torchmn.train.evaluation import Ratio


def test_pytorch_pfn_extras_weighs_it() -> None:
    summary = DictSummary()
    for ratio in (Ratio(1, 1), Ratio(torch.tensor(2.0), torch.tensor(5)), Ratio(0, 0)):
        summary.add({"accuracy": ratio})
    assert float(summary.compute_mean()["accuracy"]) == pytest.approx(3 / 6)


def test_it_drops_the_graph() -> None:
    assert not Ratio(torch.ones((), requires_grad=True) * 2, 3).sum.requires_grad


@pytest.mark.parametrize("again", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_copies(again: object) -> None:
    ratio = again(Ratio(3, 4))  # type: ignore[operator]
    assert (type(ratio), ratio.sum, ratio.weight, float(ratio)) == (Ratio, 3.0, 4.0, 0.75)


@pytest.mark.parametrize("count", [-1, float("inf"), float("nan")])
def test_impossible_counts(count: float) -> None:
    with pytest.raises(UsageError, match="count"):
        Ratio(1, count)


def test_a_vector_is_no_sum() -> None:
    with pytest.raises(UsageError, match=r"\[2\]"):
        Ratio(torch.ones(2), 2)
