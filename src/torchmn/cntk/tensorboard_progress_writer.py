"""Progress as events for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from torchmn.cntk.progress_writer import Pair, ProgressWriter, Sums, mean
from torchmn.errors import UsageError, require


class TensorBoardProgressWriter(ProgressWriter):
    """Writes events for TensorBoard, on rank 0 only. Local; needs the package tensorboard.

    The means of the loss and of the metric are ``minibatch/avg_loss`` and ``minibatch/avg_metric``
    by the number of minibatches, and ``summary/avg_loss`` and ``summary/avg_metric`` by that of
    summaries; an evaluation's is ``minibatch/test_avg_metric``, without training
    ``summary/test_avg_metric``.

    Args:
        freq: minibatches per event; None for summaries only.
        log_dir: a folder for the file of events.
        rank: of this process; ranks other than 0 write nothing.
        model: not used; CNTK drew its graph.

    Raises:
        UsageError: ``freq`` is 0.
        UnsupportedError: on rank 0, tensorboard is not installed.

    >>> import tempfile
    >>> from torchmn import cntk
    >>> folder = tempfile.mkdtemp()
    >>> writer = cntk.TensorBoardProgressWriter(freq=100, log_dir=folder, rank=comm.rank)
    >>> writer.write_value("learning_rate", 0.1, step=1)
    >>> writer.close()
    """

    def __init__(
        self,
        freq: int | None = None,
        log_dir: str | Path = ".",
        rank: int | None = None,
        model: nn.Module | None = None,
    ) -> None:
        if freq == 0:
            raise UsageError("freq=0 must be a number of minibatches, or None for summaries only.")
        super().__init__(freq)
        self._writer: Any = _summary_writer(log_dir) if not rank else None
        self._is_closed = False

    def write_value(self, name: str, value: float, step: int) -> None:
        """Write a value. Raises UsageError: this writer was closed."""
        self._raise_if_closed()
        if self._writer is not None:
            self._writer.add_scalar(name, float(value), int(step))

    def flush(self) -> None:
        """Write what is in memory. Raises UsageError: this writer was closed."""
        self._raise_if_closed()
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is in memory and close the file. Raises UsageError: it was closed before."""
        self.flush()
        self._is_closed = True
        if self._writer is not None:
            self._writer.close()

    def on_write_training_update(  # noqa: D102
        self, samples: Pair, updates: Pair, aggregate_loss: Sums, aggregate_metric: Sums | None
    ) -> None:
        step, new = self.total_training_updates(), samples[1] - samples[0]
        for name, sums in (("loss", aggregate_loss), ("metric", aggregate_metric)):
            if sums is not None:
                self.write_value(f"minibatch/avg_{name}", mean(sums[1] - sums[0], new), step)

    def on_write_training_summary(  # noqa: D102
        self,
        samples: int,
        updates: int,
        summaries: int,
        aggregate_loss: float,
        aggregate_metric: float | None,
        elapsed_milliseconds: float,
    ) -> None:
        for name, total in (("loss", aggregate_loss), ("metric", aggregate_metric)):
            if total is not None:
                self.write_value(f"summary/avg_{name}", mean(total, samples), summaries)

    def on_write_test_summary(  # noqa: D102
        self,
        samples: int,
        updates: int,
        summaries: int,
        aggregate_metric: float | None,
        elapsed_milliseconds: float,
    ) -> None:
        if aggregate_metric is None:
            return
        step = self.total_training_updates()
        kind, step = ("minibatch", step) if step else ("summary", summaries)
        self.write_value(f"{kind}/test_avg_metric", mean(aggregate_metric, samples), step)

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise UsageError("This TensorBoardProgressWriter was closed.")


def _summary_writer(log_dir: str | Path) -> Any:
    module = require("torch.utils.tensorboard", "TensorBoardProgressWriter", "tensorboard")
    return module.SummaryWriter(str(log_dir))
