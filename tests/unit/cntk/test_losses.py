"""Losses per sample, for targets in every form."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchmn.cntk as C
from torchmn.cntk.readers.minibatch import MinibatchData
from torchmn.errors import UsageError

OUTPUT = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.5, 2.0], [0.1, 0.2, 0.3]])
CLASSES = torch.tensor([0, 2, 2, 1])
ONE_HOT = nn.functional.one_hot(CLASSES).float()
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


@pytest.mark.parametrize(
    "form",
    [
        lambda: CLASSES,
        lambda: CLASSES.int(),
        lambda: ONE_HOT,
        lambda: ONE_HOT.to_sparse_csr(),
        lambda: MinibatchData(ONE_HOT, 4, 4),
        lambda: MinibatchData(ONE_HOT.to_sparse_csr(), 4, 4),
    ],
    ids=["classes", "int32", "dense", "sparse", "data", "sparse data"],
)
def test_classes(form: Callable[[], Tensor | MinibatchData]) -> None:
    target = form()
    output = OUTPUT.clone().requires_grad_()
    loss = C.cross_entropy_with_softmax(output, target)
    by_hand = [-torch.softmax(row, 0)[c].log() for row, c in zip(OUTPUT, CLASSES, strict=True)]
    torch.testing.assert_close(loss, torch.stack(by_hand))
    loss.sum().backward()
    torch.testing.assert_close(output.grad, torch.softmax(OUTPUT, 1) - ONE_HOT)
    assert C.classification_error(OUTPUT, target).tolist() == [0.0, 1.0, 0.0, 1.0]
    assert C.classification_error(OUTPUT, target, topN=2).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_distributions() -> None:
    target = torch.tensor([[0.5, 0.25, 0.25]])
    expected = -(target * OUTPUT[:1].log_softmax(1)).sum(1)
    torch.testing.assert_close(C.cross_entropy_with_softmax(OUTPUT[:1], target), expected)
    sparse = C.cross_entropy_with_softmax(OUTPUT[:1], target.to_sparse_csr())
    torch.testing.assert_close(sparse, expected)


def test_squared_error() -> None:
    target = torch.zeros(4, 3)
    expected = OUTPUT.pow(2).sum(1)
    torch.testing.assert_close(C.squared_error(OUTPUT, target), expected)
    torch.testing.assert_close(C.squared_error(OUTPUT, target.to_sparse_csr()), expected)


@pytest.mark.parametrize("target", [torch.zeros(4, 2), torch.zeros(3).long(), torch.zeros(4)])
def test_shapes_that_do_not_belong_together(target: Tensor) -> None:
    for function in (C.cross_entropy_with_softmax, C.classification_error, C.squared_error):
        with pytest.raises(UsageError, match=r"shape \(4, 3\) and the target"):
            function(OUTPUT, target)
