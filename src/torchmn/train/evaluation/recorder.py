"""The values that an evaluation reports, batch by batch, as sums and counts in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pytorch_pfn_extras import reporting

from torchmn.data.batch_size import num_samples
from torchmn.errors import UsageError
from torchmn.train.evaluation.sums import Sums, WeightedSums, raise_if_no_mean


class Recorder:
    """Collects the values of each batch with the number of its samples. Local."""

    def __init__(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        self.num_samples = 0
        self._heartbeat = heartbeat
        self._sums = WeightedSums()
        self._batch: dict[str, Any] | None = None
        self._batch_size: int | None = None

    def batches_of(self, loader: Any) -> Any:
        """The same loader, which notifies this recorder of each batch."""
        return _RecordedLoader(loader, self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is reported to the current reporter, which still receives everything."""
        reporter = reporting.get_current_reporter()
        report = reporter.report

        def record(values: Mapping[str, Any], observer: torch.nn.Module | None = None) -> None:
            observation, reporter.observation = reporter.observation, {}
            try:
                report(values, observer)
                named = reporter.observation
            finally:
                reporter.observation = observation
            if self._batch is not None:
                for name, value in named.items():
                    raise_if_no_mean(name, value)
                self._batch.update(named)
            observation.update(named)

        reporter.report = record  # type: ignore[method-assign]
        try:
            yield
        finally:
            del reporter.report

    def begin_batch(self, batch: Any) -> None:
        """Begin a batch, and end the one before."""
        self.end_batch()
        self._heartbeat()
        self._batch, self._batch_size = {}, num_samples(batch)
        self.num_samples += self._batch_size or 0

    def end_batch(self) -> None:
        """Count what the batch reported. Raises UsageError: its number of samples is not known."""
        reported, self._batch = self._batch or {}, None
        for name, value in reported.items():
            if self._batch_size is None and not isinstance(value, tuple):
                raise UsageError(
                    f"'{name}' was reported for a batch without a tensor, so its number of "
                    "samples is not known. Report Ratio(sum, count)."
                )
            self._sums.add(name, value, self._batch_size or 0)

    def sums_of(self, result: Mapping[str, Any]) -> Sums:
        """Sum and weight of every name in the result of ``evaluate()``.

        A value that no batch reported comes from a custom ``evaluate()``: a mean over the samples
        of this rank, or a `Ratio`.
        """
        self.end_batch()
        for name, value in result.items():
            if name not in self._sums:
                self._sums.add(name, value, self.num_samples)
        return {name: pair for name, pair in self._sums.sums().items() if name in result}


class _RecordedLoader:
    """A loader that notifies a recorder of its batches."""

    def __init__(self, loader: Any, recorder: Recorder) -> None:
        self._loader = loader
        self._recorder = recorder

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._recorder.begin_batch(batch)
            yield batch
        self._recorder.end_batch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
