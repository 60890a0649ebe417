"""Configuration of a training session: when it saves, evaluates and tests, and on what data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from torchmn.base.errors import UsageError
from torchmn.cntk.readers import MinibatchSource, UserMinibatchSource, as_minibatch_source
from torchmn.cntk.readers.deserializer import wanted_streams
from torchmn.cntk.schedules import Schedule, minibatch_size_schedule

# Gets the index of a cross validation, the mean error, its samples and minibatches.
Callback = Callable[[int, float, int, int], bool | None]
Source = MinibatchSource | UserMinibatchSource


class DataUnit(Enum):
    """The unit of a frequency: samples or minibatches over all ranks, or sweeps over the data.

    >>> from torchmn import cntk
    >>> [unit.name for unit in cntk.DataUnit]
    ['sample', 'minibatch', 'sweep']
    """

    sample = "sample"
    minibatch = "minibatch"
    sweep = "sweep"


# A number of samples, ``(n, DataUnit.minibatch)``, or None for the end of the training only.
Frequency = int | tuple[int, DataUnit] | None
Size = int | Schedule


@dataclass
class CheckpointConfig:
    """Where and when a session saves.

    Args:
        filename: the folder of the checkpoints, which are torchmn's: see docs/reference/cntk.md.
            None saves nothing.
        frequency: samples or ``(n, unit)``; None: once, at the end.
        restore: continue from the newest checkpoint, if there is one.
        preserve_all: keep every checkpoint, also in folders of its own: ``filename`` with an index.

    Raises UsageError: ``frequency`` has no filename, or is not a positive number.

    >>> from torchmn import cntk
    >>> cntk.CheckpointConfig("models/net", frequency=(1, cntk.DataUnit.sweep)).restore
    True
    """

    filename: str | Path | None
    frequency: Frequency = None
    restore: bool = True
    preserve_all: bool = False

    def __post_init__(self) -> None:
        if self.filename is None and self.frequency is not None:
            raise UsageError(
                f"CheckpointConfig(None, frequency={self.frequency}) has a frequency and no "
                "filename. Give the folder for checkpoints, or no CheckpointConfig."
            )
        checked_frequency(self.frequency)


@dataclass
class CrossValidationConfig:
    """What a session evaluates during training and when, and a callback that may stop it.

    Args:
        minibatch_source: the data, read from the same position at each cross validation; None only
            calls the callback, with zeros.
        frequency: samples or ``(n, unit)``; None: once, at the end.
        minibatch_size: samples over all ranks, or a schedule of them.
        callback: called on all ranks with the index, the mean error over all samples, the number of
            samples and of minibatches. If it returns False on any rank, all ranks stop training.
        max_samples: how many samples to evaluate; None: to the end of the source.
        model_inputs_to_streams: names of arguments to streams; None: as for training.
        criterion: loss, or (loss, metric), in place of the trainer's.
        source: CNTK's earlier name of ``minibatch_source``.
        mb_size: CNTK's earlier name of ``minibatch_size``.

    Raises UsageError: there is neither data nor a callback, an infinite source has no
        ``max_samples``, or a frequency or size is not a positive number.

    >>> from torchmn import cntk
    >>> def stop_early(index, average_error, num_samples, num_minibatches):
    ...     return average_error > 0.01
    >>> cntk.CrossValidationConfig(frequency=1000, callback=stop_early).frequency
    1000
    """

    minibatch_source: Source | None = None
    frequency: Frequency = None
    minibatch_size: Size = 32
    callback: Callback | None = None
    max_samples: int | None = None
    model_inputs_to_streams: Mapping[Any, Any] | None = None
    criterion: Any = None
    source: Source | None = None
    mb_size: Size | None = None

    def __post_init__(self) -> None:
        _check(self)
        if self.minibatch_source is None and self.callback is None:
            raise UsageError("CrossValidationConfig needs a minibatch_source, a callback or both.")
        if self.max_samples is None:
            raise_if_infinite("cross validation", self.minibatch_source, "max_samples=")
        checked_frequency(self.frequency)


@dataclass
class TestConfig:
    """What a session evaluates at the end.

    Args:
        minibatch_source: the data.
        minibatch_size: samples over all ranks, or a schedule of them.
        model_inputs_to_streams: names of arguments to streams; None: as for training.
        criterion: loss, or (loss, metric), in place of the trainer's.
        source: CNTK's earlier name of ``minibatch_source``.
        mb_size: CNTK's earlier name of ``minibatch_size``.

    Raises UsageError: there is no source or an infinite one, or a size is not a positive number.

    >>> from torchmn import cntk
    >>> source = cntk.MinibatchSourceFromData(
    ...     {"x": np.ones((4, 2), np.float32)}, max_sweeps=1
    ... )
    >>> cntk.TestConfig(source, minibatch_size=2).minibatch_size
    2
    """

    __test__ = False  # no test of pytest

    minibatch_source: Source | None = None
    minibatch_size: Size = 32
    model_inputs_to_streams: Mapping[Any, Any] | None = None
    criterion: Any = None
    source: Source | None = None
    mb_size: Size | None = None

    def __post_init__(self) -> None:
        _check(self)
        if self.minibatch_source is None:
            raise UsageError("TestConfig needs a minibatch_source.")
        raise_if_infinite("test", self.minibatch_source, "the source max_samples= or max_sweeps=")


def checked_frequency(frequency: Frequency) -> tuple[int | None, DataUnit]:
    """Return (period, unit), with None as the period for the end only. Raises UsageError."""
    if frequency is None:
        return None, DataUnit.sample
    period, unit = frequency if isinstance(frequency, tuple) else (frequency, DataUnit.sample)
    if not is_positive_int(period) or not isinstance(unit, DataUnit):
        raise UsageError(
            f"A frequency of {frequency!r} must be a positive int, which is a number of samples, "
            "(n, DataUnit.sample), (n, DataUnit.minibatch), (n, DataUnit.sweep) or None."
        )
    return int(period), unit


def is_positive_int(value: object) -> bool:
    """Whether a value is a positive integer of Python or NumPy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) > 0


def _check(config: CrossValidationConfig | TestConfig) -> None:
    """Apply CNTK's earlier names, and check what both have. Raises UsageError."""
    if config.source is not None:
        if config.minibatch_source is not None:
            raise UsageError("source= is CNTK's earlier name of minibatch_source=. Give one.")
        config.minibatch_source, config.source = config.source, None
    if config.mb_size is not None:
        config.minibatch_size, config.mb_size = config.mb_size, None
    minibatch_size_schedule(config.minibatch_size)
    if config.minibatch_source is not None:
        streams = as_minibatch_source(config.minibatch_source).streams
        wanted_streams(config.model_inputs_to_streams, streams)


def raise_if_infinite(what: str, source: Source | None, cure: str) -> None:
    """Raise UsageError if a source never ends."""
    if source is not None and as_minibatch_source(source).is_infinite:
        raise UsageError(
            f"The minibatch source of the {what} is infinite, so the {what} would never end. "
            f"Give {cure}."
        )
