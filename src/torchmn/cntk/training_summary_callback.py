"""Summaries of training as calls of a function."""

from __future__ import annotations

from collections.abc import Callable

from torchmn.cntk.progress_writer import ProgressWriter


class TrainingSummaryProgressCallback(ProgressWriter):
    """Calls a function at each summary of training. Local, on every rank that has one.

    Args:
        epoch_size: not used, as in CNTK: ``progress_frequency`` of the session decides.
        callback: gets the index of the summary, from 0, the sums of losses and of metrics (None
            without a metric) over its samples, and the number of samples.

    >>> from torchmn import cntk
    >>> writer = cntk.TrainingSummaryProgressCallback(
    ...     1000, lambda epoch, loss, metric, num_samples: print(epoch, loss)
    ... )
    >>> isinstance(writer, cntk.ProgressWriter)
    True
    """

    def __init__(
        self, epoch_size: int, callback: Callable[[int, float, float | None, int], object]
    ) -> None:
        super().__init__()
        self._callback = callback

    def on_write_training_summary(  # noqa: D102
        self,
        samples: int,
        updates: int,
        summaries: int,
        aggregate_loss: float,
        aggregate_metric: float | None,
        elapsed_milliseconds: float,
    ) -> None:
        self._callback(summaries - 1, aggregate_loss, aggregate_metric, samples)
