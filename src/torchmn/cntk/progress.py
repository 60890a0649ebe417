"""The base class of receivers of the progress of a training, and its counters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchmn.base.errors import UsageError

Pair = tuple[int, int]  # a counter at the last line and now, from the last summary on
Sums = tuple[float, float]
"""A sum over samples at the last line and now, from the last summary on."""
# Samples, updates, and the sums of losses and of metrics.
Totals = tuple[int, int, float, float | None]
_NOTHING: Totals = (0, 0, 0.0, None)


class ProgressWriter:
    """Receives the progress of a trainer and decides when something is written. Local.

    Subclass it and override the methods ``on_write_...``, which do nothing here. They get counters
    and sums as pairs (at the last call, now), both since the last summary: the mean loss of the new
    samples is ``(loss[1] - loss[0]) / (samples[1] - samples[0])``.

    Args:
        freq: write every ``freq`` minibatches; 0 for the 1st, 3rd, 7th, 15th, ..., None for never.
        first: write each of the first ``first`` minibatches.
        test_freq: the same for minibatches of an evaluation.
        test_first: the same for minibatches of an evaluation.
        distributed_freq: the same for synchronizations of block momentum.
        distributed_first: the same for synchronizations of block momentum.

    Raises UsageError: a frequency is not a number of minibatches.

    >>> from torchmn import cntk
    >>> class MeanLoss(cntk.ProgressWriter):
    ...     def on_write_training_update(self, samples, updates, loss, metric):
    ...         print(updates[1], (loss[1] - loss[0]) / (samples[1] - samples[0]))
    >>> writer = MeanLoss(freq=2)  # cntk.Trainer(..., progress_writers=[writer]) does the rest
    >>> for loss_sum in (8.0, 4.0):
    ...     writer.update_training(samples=4, loss=loss_sum)
    2 1.5
    """

    def __init__(
        self,
        freq: int | None = None,
        first: int = 0,
        test_freq: int | None = None,
        test_first: int = 0,
        distributed_freq: int | None = None,
        distributed_first: int = 0,
    ) -> None:
        self._training = _Progress("freq", freq, first)
        self._test = _Progress("test_freq", test_freq, test_first)
        self._syncs = _Progress("distributed_freq", distributed_freq, distributed_first)

    def total_training_updates(self) -> int:
        """Minibatches that were trained on, from the beginning."""
        return self._training.total_updates

    # ---- called by a trainer ----

    def update_training(
        self, samples: int, loss: float | Tensor, metric: float | Tensor | None = None
    ) -> None:
        """Count a minibatch of all ranks: its samples, the sums of their losses and metrics."""
        if self._training.add(samples, loss, metric):
            self.on_write_training_update(*self._training.since_last_line())
        self.on_training_update_end()

    def write_training_summary(self) -> None:
        """Write a summary of what was trained since the last one, if anything was."""
        if (end := self._training.summary()) is not None:
            self.on_write_training_summary(*end)

    def skip_training_summary(self) -> None:
        """Begin the next part of the training as `write_training_summary`, without writing."""
        self._training.summary()

    def skip_test_summary(self) -> None:
        """Count an evaluation that was summarized before this training was resumed."""
        self._test.summaries += 1

    def update_test(self, samples: int, metric: float | Tensor | None = None) -> None:
        """Count a minibatch of an evaluation: samples and the sum of their metrics."""
        if self._test.add(samples, 0.0, metric):
            samples_, updates, _, metrics = self._test.since_last_line()
            self.on_write_test_update(samples_, updates, metrics)

    def write_test_summary(self) -> None:
        """Write a summary of the evaluation that has ended, if it had samples."""
        if (end := self._test.summary()) is not None:
            samples, updates, summaries, _, metric, elapsed_ms = end
            self.on_write_test_summary(samples, updates, summaries, metric, elapsed_ms)

    def update_distributed_sync(self, samples: int, metric: float | Tensor | None = None) -> None:
        """Count a synchronization of block momentum after ``samples`` further samples."""
        if self._syncs.add(samples, 0.0, metric):
            samples_, updates, _, metrics = self._syncs.since_last_line()
            self.on_write_distributed_sync_update(samples_, updates, metrics)

    def write(self, key: str, value: object) -> None:
        """Write a value by name, such as a learning rate that has changed."""

    # ---- overridden by writers ----

    def on_write_training_update(
        self, samples: Pair, updates: Pair, aggregate_loss: Sums, aggregate_metric: Sums | None
    ) -> None:
        """Called at the frequency ``freq`` with the progress of the training."""

    def on_training_update_end(self) -> None:
        """Called after each minibatch of the training."""

    def on_write_training_summary(
        self,
        samples: int,
        updates: int,
        summaries: int,
        aggregate_loss: float,
        aggregate_metric: float | None,
        elapsed_milliseconds: float,
    ) -> None:
        """Called with the ``summaries``-th summary, of what was trained since the last one."""

    def on_write_test_update(
        self, samples: Pair, updates: Pair, aggregate_metric: Sums | None
    ) -> None:
        """Called at the frequency ``test_freq`` with the progress of an evaluation."""

    def on_write_test_summary(
        self,
        samples: int,
        updates: int,
        summaries: int,
        aggregate_metric: float | None,
        elapsed_milliseconds: float,
    ) -> None:
        """Called when the ``summaries``-th evaluation has ended."""

    def on_write_distributed_sync_update(
        self, samples: Pair, updates: Pair, aggregate_metric: Sums | None
    ) -> None:
        """Called at the frequency ``distributed_freq`` when parameters were synchronized."""

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """The counters, as numbers."""
        return {name: progress.state_dict() for name, progress in self._progress().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters."""
        for name, progress in self._progress().items():
            progress.load_state_dict(state[name])

    def _progress(self) -> dict[str, _Progress]:
        return {"training": self._training, "test": self._test, "syncs": self._syncs}


class _Progress:
    """Counters and sums since the last summary, and when they are written."""

    def __init__(self, name: str, freq: int | None, first: int) -> None:
        if freq is not None and (type(freq) is not int or freq < 0):
            raise UsageError(f"{name}={freq!r} must be a number of minibatches, 0 or None.")
        self.freq = freq
        self._first = first
        self.total_updates = 0
        self.summaries = 0
        self._began_s: float | None = None
        self._elapsed_before_s = 0.0
        self._samples = self._updates = 0
        self._loss: Any = 0.0
        self._metric: Any = None
        self._at_last_line = _NOTHING

    def add(self, samples: int, loss: float | Tensor, metric: float | Tensor | None) -> bool:
        """Count a minibatch; returns whether it is time to write a line."""
        if self._began_s is None:
            self._began_s = time.monotonic()
        self._samples += int(samples)
        self._updates += 1
        self.total_updates += 1
        self._loss = self._loss + _detached(loss)
        if metric is not None:
            self._metric = (0.0 if self._metric is None else self._metric) + _detached(metric)
        if self._updates <= self._first:
            return True
        if self.freq == 0:  # the 1st, 3rd, 7th, ...
            return (self._updates + 1) & self._updates == 0
        return self.freq is not None and self._updates % self.freq == 0

    def since_last_line(self) -> tuple[Pair, Pair, Sums, Sums | None]:
        """Pairs (at the last line, now) of samples, updates, losses and metrics."""
        before, now = self._at_last_line, self._now()
        self._at_last_line = now
        metrics = None if now[3] is None else (before[3] or 0.0, now[3])
        return (before[0], now[0]), (before[1], now[1]), (before[2], now[2]), metrics

    def summary(self) -> tuple[int, int, int, float, float | None, float] | None:
        """Arguments for `on_write_training_summary`; None if nothing was counted since the last."""
        if self._updates == 0:
            return None
        samples, updates, loss, metric = self._now()
        elapsed_ms = 1000 * self._elapsed_s()
        self._began_s, self._elapsed_before_s = time.monotonic(), 0.0
        self.summaries += 1
        self._samples, self._updates, self._loss, self._metric = self._at_last_line = _NOTHING
        return samples, updates, self.summaries, loss, metric, elapsed_ms

    def state_dict(self) -> dict[str, Any]:
        return {
            "total_updates": self.total_updates,
            "summaries": self.summaries,
            "at_last_line": list(self._at_last_line),
            "now": list(self._now()),
            "elapsed_s": self._elapsed_s(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total_updates, self.summaries = state["total_updates"], state["summaries"]
        self._at_last_line = tuple(state["at_last_line"])
        self._samples, self._updates, self._loss, self._metric = state["now"]
        self._began_s, self._elapsed_before_s = None, float(state["elapsed_s"])

    def _elapsed_s(self) -> float:
        running_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        return self._elapsed_before_s + running_s

    def _now(self) -> Totals:
        # Called when something is written: only then does the host wait for sums on a GPU.
        self._loss = float(self._loss)
        self._metric = None if self._metric is None else float(self._metric)
        return self._samples, self._updates, self._loss, self._metric


def _detached(value: float | Tensor) -> float | Tensor:
    """A value as float64; tensors stay on their device, so that counting need not wait for it."""
    return value.detach().double() if isinstance(value, Tensor) else float(value)


def mean(total: float, count: float) -> float:
    """Divide a total by a count; 0 if the count is 0."""
    return total / count if count > 0 else 0.0
