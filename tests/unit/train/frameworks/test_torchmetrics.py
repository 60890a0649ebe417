"""Metrics of torchmetrics over ranks: their values are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchmn
from torchmn.errors import UsageError
from torchmn.testing import run_ranks
from torchmn.train.frameworks import torchmetrics_options

torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

NUM, NUM_CLASSES, SIZE = 41, 4, 3
NUMBERS = torch.Generator().manual_seed(3)
LOGITS = torch.randn(NUM, NUM_CLASSES, generator=NUMBERS, dtype=torch.float64)
LABELS = torch.randint(NUM_CLASSES, (NUM,), generator=NUMBERS)
ENDS = {"uneven": [20, 26, NUM], "one rank has none": [23, 23, NUM]}
"""The sample before which the part of each rank ends."""

Update = Callable[[Any, slice], Any]


def of_classes(metric: Any, part: slice) -> Any:
    return metric(LOGITS[part].softmax(1), LABELS[part])


def of_values(metric: Any, part: slice) -> Any:
    return metric(LOGITS[part, 0].contiguous(), LOGITS[part, 1].contiguous())


def of_weighted(metric: Any, part: slice) -> Any:
    return metric(LOGITS[part, 0], weight=LABELS[part])


def _collection(**options: Any) -> Any:
    classification = torchmetrics.classification
    return torchmetrics.MetricCollection(
        {
            "accuracy": classification.MulticlassAccuracy(NUM_CLASSES, **options),
            "f1": classification.MulticlassF1Score(NUM_CLASSES, **options),
            "auroc": classification.MulticlassAUROC(NUM_CLASSES, **options),
        }
    )


METRICS: dict[str, tuple[Callable[..., Any], Update]] = {
    "sums": (
        lambda **options: torchmetrics.classification.MulticlassAccuracy(NUM_CLASSES, **options),
        of_classes,
    ),
    "a matrix": (
        lambda **options: torchmetrics.classification.MulticlassConfusionMatrix(
            NUM_CLASSES, **options
        ),
        of_classes,
    ),
    "lists of samples": (
        lambda **options: torchmetrics.classification.MulticlassAUROC(NUM_CLASSES, **options),
        of_classes,
    ),
    "ranks of samples": (
        lambda **options: torchmetrics.regression.SpearmanCorrCoef(**options),
        of_values,
    ),
    "moments": (lambda **options: torchmetrics.regression.PearsonCorrCoef(**options), of_values),
    "a weighted mean": (lambda **options: torchmetrics.MeanMetric(**options), of_weighted),
    "a maximum": (
        lambda **options: torchmetrics.MaxMetric(**options),
        lambda metric, part: metric(LOGITS[part, 0]),
    ),
    "a collection": (_collection, of_classes),
}


def computed(make: Callable[..., Any], update: Update, begin: int, end: int, **options: Any) -> Any:
    """The value after batches of 5 samples, and once more after the same ones again."""
    metric, values = make(**options).double(), []
    metric.set_dtype(torch.float64)
    for _ in range(2):
        for at in range(begin, end, 5):
            update(metric, slice(at, min(at + 5, end)))
        values.append(metric.compute())
    return values


@pytest.mark.parametrize("parts", ENDS)
@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torchmetrics', of a rank without samples
def test_the_value_is_that_of_one_process(name: str, parts: str) -> None:
    make, update = METRICS[name]
    expected = computed(make, update, 0, NUM)

    def rank_main(comm: torchmn.Communicator) -> Any:
        begin, end = ([0, *ENDS[parts]][comm.rank + i] for i in range(2))
        return computed(make, update, begin, end, **torchmetrics_options(comm))

    for found in run_ranks(rank_main, SIZE):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_each_step_may_be_over_all_ranks() -> None:
    def rank_main(comm: torchmn.Communicator) -> Any:
        options = torchmetrics_options(comm)
        metric = torchmetrics.MeanMetric(dist_sync_on_step=True, **options)
        return [metric(torch.tensor(float(comm.rank + step))).item() for step in range(2)]

    assert run_ranks(rank_main, SIZE) == [[1.0, 2.0]] * SIZE


def test_a_process_group_beside_the_options_is_refused() -> None:
    def rank_main(comm: torchmn.Communicator) -> None:
        metric = torchmetrics.MeanMetric(process_group="other", **torchmetrics_options(comm))
        metric.update(1.0)
        with pytest.raises(UsageError, match="Leave out process_group="):
            metric.compute()

    run_ranks(rank_main, 2)
