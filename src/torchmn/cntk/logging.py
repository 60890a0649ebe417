"""CNTK's ``cntk.logging``: receivers of the progress of a training.

A trainer gives each of its writers the sums of a minibatch over all ranks, so what all ranks write
is the same: the progress since the last summary. A session asks for a summary every
``progress_frequency``. Counters are saved in checkpoints: a resumed training continues its lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from torchmn.base.errors import UsageError, require
from torchmn.cntk.progress import Pair, ProgressWriter, Sums, mean

__all__ = [
    "ProgressPrinter",
    "ProgressWriter",
    "TensorBoardProgressWriter",
    "TrainingSummaryProgressCallback",
    "log_number_of_parameters",
]


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


_HEARTBEAT_S = 10.0


class ProgressPrinter(ProgressWriter):
    """Prints lines in CNTK's columns. Local; each rank prints its own, which are equal.

    ```text
     Minibatch[   1- 100]: loss = 1.234567 * 6400, metric = 45.12% * 6400;
    Finished Epoch[1 of 160]: [Training] loss = 1.500000 * 50000, metric = 55.00% * 50000 20.100s (2487.6 samples/s);
    Finished Evaluation [1]: Minibatch[1-157]: metric = 22.50% * 10000;
    ```

    Args:
        freq: minibatches per line; 0 for the 1st, 3rd, 7th, ... in columns, None for no lines.
        first: print each of the first ``first`` minibatches.
        tag: written in lines of epochs, as ``[tag]``.
        log_to_file: a file for the lines in place of standard output, continued if it exists.
        rank: appended to its name, as ``rank3``, so that each rank has its own.
        gen_heartbeat: print ``PROGRESS: 12.50%``, the part of ``num_epochs`` that has ended, every
            10 seconds; 0 without ``num_epochs``.
        num_epochs: written in lines of epochs.
        test_freq: as ``freq``, for minibatches of an evaluation.
        test_first: as ``first``, for minibatches of an evaluation.
        metric_is_pct: print the metric as a percentage.
        distributed_freq: as ``freq``, for synchronizations of block momentum.
        distributed_first: as ``first``, for synchronizations of block momentum.

    >>> from torchmn import cntk
    >>> printer = cntk.ProgressPrinter(freq=2)
    >>> for loss in (1.0, 2.0):
    ...     printer.update_training(64, 64 * loss, 32.0)
     Minibatch[   1-   2]: loss = 1.500000 * 128, metric = 50.00% * 128;
    """  # noqa: E501

    def __init__(
        self,
        freq: int | None = None,
        first: int = 0,
        tag: str = "",
        log_to_file: str | Path | None = None,
        rank: int | None = None,
        gen_heartbeat: bool = False,
        num_epochs: int | None = None,
        test_freq: int | None = None,
        test_first: int = 0,
        metric_is_pct: bool = True,
        distributed_freq: int | None = None,
        distributed_first: int = 0,
    ) -> None:
        super().__init__(freq, first, test_freq, test_first, distributed_freq, distributed_first)
        self._tag = f"[{tag}] " if tag else ""
        self._num_epochs = num_epochs
        self._is_percentage = metric_is_pct
        self._next_heartbeat_s = 0.0 if gen_heartbeat else float("inf")
        self._path: Path | None = None
        if log_to_file is not None:
            self._path = Path(f"{log_to_file}{'' if rank is None else f'rank{rank}'}")
            print(f"Redirecting log to file {self._path}", flush=True)
            self._path.parent.mkdir(parents=True, exist_ok=True)
        if freq == 0:
            self.log(" average      since    average      since      examples")
            self.log("    loss       last     metric       last              ")
            self.log(" ------------------------------------------------------")

    def log(self, message: str) -> None:
        """Print a line where the others are printed."""
        if self._path is None:
            print(message, flush=True)
        else:
            with self._path.open("a") as file:
                file.write(f"{message}\n")

    def end_progress_print(self, msg: str = "") -> None:
        """Print a last message."""
        if msg:
            self.log(msg)

    def write(self, key: str, value: object) -> None:  # noqa: D102
        self.log(f"{key}: {value}")

    def on_write_training_update(  # noqa: D102
        self, samples: Pair, updates: Pair, aggregate_loss: Sums, aggregate_metric: Sums | None
    ) -> None:
        self._print_update(
            self._training.freq, "", samples, updates, aggregate_loss, aggregate_metric
        )

    def on_training_update_end(self) -> None:  # noqa: D102
        now_s = time.monotonic()
        if now_s >= self._next_heartbeat_s:
            done = self._training.summaries / self._num_epochs if self._num_epochs else 0.0
            print(f"PROGRESS: {min(done, 1.0):.2%}", flush=True)
            self._next_heartbeat_s = now_s + _HEARTBEAT_S

    def on_write_training_summary(  # noqa: D102
        self,
        samples: int,
        updates: int,
        summaries: int,
        aggregate_loss: float,
        aggregate_metric: float | None,
        elapsed_milliseconds: float,
    ) -> None:
        if self._training.freq == 0:  # columns have no lines of epochs
            return
        of = "" if self._num_epochs is None else f" of {self._num_epochs}"
        seconds = elapsed_milliseconds / 1000
        parts = [f"loss = {mean(aggregate_loss, samples):.6f} * {samples}"]
        if aggregate_metric is not None:
            parts.append(self._metric(aggregate_metric, samples))
        self.log(
            f"Finished Epoch[{summaries}{of}]: {self._tag}{', '.join(parts)} {seconds:.3f}s "
            f"({mean(samples, seconds):5.1f} samples/s);"
        )

    def on_write_test_update(  # noqa: D102
        self, samples: Pair, updates: Pair, aggregate_metric: Sums | None
    ) -> None:
        self._print_update(self._test.freq, "Evaluation ", samples, updates, None, aggregate_metric)

    def on_write_test_summary(  # noqa: D102
        self,
        samples: int,
        updates: int,
        summaries: int,
        aggregate_metric: float | None,
        elapsed_milliseconds: float,
    ) -> None:
        text = "" if aggregate_metric is None else f" {self._metric(aggregate_metric, samples)}"
        self.log(f"Finished Evaluation [{summaries}]: Minibatch[1-{updates}]:{text};")

    def on_write_distributed_sync_update(  # noqa: D102
        self, samples: Pair, updates: Pair, aggregate_metric: Sums | None
    ) -> None:
        self.log(
            f"Distributed training: #Syncs elapsed = {updates[1] - updates[0]}, "
            f"#Samples elapsed = {samples[1] - samples[0]}"
        )

    def _metric(self, total: float, samples: int) -> str:
        value = mean(total, samples)
        text = f"{100 * value:.2f}%" if self._is_percentage else f"{value:.6f}"
        return f"metric = {text} * {samples}"

    def _print_update(
        self,
        freq: int | None,
        name: str,
        samples: Pair,
        updates: Pair,
        loss: Sums | None,
        metric: Sums | None,
    ) -> None:
        new = samples[1] - samples[0]
        if freq == 0:
            columns = [
                f"{mean(sums[1], samples[1]):8.3g}   {mean(sums[1] - sums[0], new):8.3g}   "
                if sums is not None
                else f"{'':8}   {'':8}   "
                for sums in (loss, metric)
            ]
            self.log(f" {''.join(columns)} {samples[1]:10d}")
            return
        parts = []
        if loss is not None:
            parts.append(f"loss = {mean(loss[1] - loss[0], new):.6f} * {new}")
        if metric is not None:
            parts.append(self._metric(metric[1] - metric[0], new))
        where = f"{name}Minibatch[{updates[0] + 1:4d}-{updates[1]:4d}]"
        self.log(f" {where}: {', '.join(parts)};")


def log_number_of_parameters(model: nn.Module, trace_level: int = 0) -> None:
    """Print how many parameters a model has; with ``trace_level`` also the shape of each. Local.

    Example:
        >>> log_number_of_parameters(torch.nn.Linear(3, 2))
        Training 8 parameters in 2 parameter tensors.
    """
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    num = sum(parameter.numel() for parameter in model.parameters())
    print(f"Training {num} parameters in {len(shapes)} parameter tensors.", flush=True)
    if trace_level > 0:
        print("".join(f"\n\t{shape}" for shape in shapes), flush=True)


class TensorBoardProgressWriter(ProgressWriter):
    """Writes events for TensorBoard, on rank 0 only. Local; needs the package tensorboard.

    The means of the loss and of the metric are ``minibatch/avg_loss`` and ``minibatch/avg_metric``
    by the number of minibatches, and ``summary/avg_loss`` and ``summary/avg_metric`` by that of
    summaries; an evaluation's is ``minibatch/test_avg_metric``, without training
    ``summary/test_avg_metric``.

    Args:
        freq: minibatches per event; None for summaries only.
        log_dir: a folder for the file of events.
        rank: the rank of this process; ranks other than 0 write nothing.
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
        self._writer: Any = None
        if not rank:
            module = require("torch.utils.tensorboard", "TensorBoardProgressWriter", "tensorboard")
            self._writer = module.SummaryWriter(str(log_dir))

    def write_value(self, name: str, value: float, step: int) -> None:
        """Write a value."""
        if self._writer is not None:
            self._writer.add_scalar(name, float(value), int(step))

    def flush(self) -> None:
        """Write what is in memory."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is in memory and close the file."""
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
