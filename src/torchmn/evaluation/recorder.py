"""What an evaluation reports, batch by batch, as sums and counts in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from pytorch_pfn_extras import reporting
from torch import Tensor

from torchmn.errors import UsageError
from torchmn.evaluation.batches import num_samples
from torchmn.evaluation.ratio import Ratio

Sums = dict[str, tuple[float, float]]  # name -> (weighted sum, weight)


class Recorder:
    """Collects the values of each batch with the number of its samples. Local."""

    def __init__(self, beat: Callable[[], None] = lambda: None) -> None:
        self.num_samples = 0
        self._beat = beat
        self._sums: dict[str, Any] = {}
        self._weights: dict[str, float] = {}
        self._batch: dict[str, Any] | None = None
        self._batch_size: int | None = None

    def batches_of(self, loader: Any) -> Any:
        """The same loader, watched: each batch that it gives begins a batch here."""
        return _Watched(loader, self)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear what is reported to the current reporter; it gets everything as before."""
        reporter = reporting.get_current_reporter()
        report = reporter.report

        def heard(values: Mapping[str, Any], observer: torch.nn.Module | None = None) -> None:
            observation, reporter.observation = reporter.observation, {}
            try:
                report(values, observer)
                named = reporter.observation
            finally:
                reporter.observation = observation
            if self._batch is not None:
                for name, value in named.items():
                    _raise_if_no_mean(name, value)
                self._batch.update(named)
            observation.update(named)

        reporter.report = heard  # type: ignore[method-assign]
        try:
            yield
        finally:
            del reporter.report

    def begin_batch(self, batch: Any) -> None:
        """A batch begins and the one before ends."""
        self.end_batch()
        self._beat()
        self._batch, self._batch_size = {}, num_samples(batch)
        self.num_samples += self._batch_size or 0

    def end_batch(self) -> None:
        """Count what the batch reported. Raises UsageError: a value that has no mean."""
        reported, self._batch = self._batch or {}, None
        for name, value in reported.items():
            total, weight = self._weighed(name, value)
            if weight:
                self._sums[name] = self._sums.get(name, 0.0) + total
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def sums_of(self, result: Mapping[str, Any]) -> Sums:
        """Sum and weight of every name in what ``evaluate()`` returned.

        A value that no batch reported is one of a custom ``evaluate()``: a mean over the samples
        of this rank, or a `Ratio`.
        """
        self.end_batch()
        sums: Sums = {}
        for name, value in result.items():
            if name in self._weights:
                sums[name] = (float(self._sums.get(name, 0.0)), self._weights[name])
            else:
                total, weight = _weighed(name, value, self.num_samples)
                sums[name] = (float(total) if weight else 0.0, weight)
        return sums

    def _weighed(self, name: str, value: Any) -> tuple[Any, float]:
        if self._batch_size is None and not isinstance(value, tuple):
            raise UsageError(
                f"'{name}' was reported for a batch in which there is no tensor, so it is not "
                "known how many samples it stands for. Report Ratio(sum, count)."
            )
        return _weighed(name, value, self._batch_size or 0)


def _weighed(name: str, value: Any, weight: float) -> tuple[Any, float]:
    """(value x weight, weight) in float64; a tensor stays on its device, so that nobody waits."""
    if isinstance(value, Ratio):
        return value.sum, value.weight
    if isinstance(value, tuple) and len(value) == 2:  # pytorch-pfn-extras: (value, weight)
        value, weight = value[0], float(value[1])
    if callable(value):  # pytorch-pfn-extras: a value that is computed when it is needed
        value = value()
    _raise_if_no_mean(name, value)
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64) * weight, weight
    return float(value) * weight, weight


def _raise_if_no_mean(name: str, value: Any) -> None:
    if isinstance(value, (tuple, int, float, np.number, np.bool_)) or callable(value):
        return
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        return
    kind = f"of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)[:40]
    raise UsageError(
        f"'{name}' was reported as a {type(value).__name__} {kind}, which has no mean over "
        "samples. Report scalars or Ratio(sum, count), one name per entry."
    )


class _Watched:
    """A loader whose batches a recorder knows of."""

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
