"""The global batch of a training run, which checkpoints record and a resumed run is compared with.

`GlobalBatch`, `GlobalSampler` and the schedules of `torchmn.train.large_batch` know it. An object
that holds one of them forwards `HasBatchSettings.batch_settings` to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Protocol, runtime_checkable

from msgspec import Meta

Samples = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """A global batch, and how ranks and passes divide it.

    >>> saved = BatchSettings(global_batch=64, initial=64, shares=[32, 32])
    >>> BatchSettings(global_batch=64, initial=64, shares=[64]).warning_after(saved, step=10)
    >>> print(BatchSettings(global_batch=128, initial=128).warning_after(saved, step=10)[:69])
    the checkpoint of step 10 was saved with a global batch of 64 samples
    """

    global_batch: Samples
    """Samples of the next step over all ranks."""
    initial: Samples
    """The global batch at the beginning; it differs where the batch grows."""
    growth: str = ""
    """Description of how the batch grows; empty if it does not."""
    shares: list[int] = field(default_factory=list)
    """The samples of each rank in the next step."""
    local_batch: int | None = None
    """Most samples of one backward pass; None if unknown, as with a `GlobalSampler` alone."""
    accumulation: int | None = None
    """Backward passes of each rank in the next step; None if unknown."""
    epoch_steps: int | None = None
    """Steps of an epoch; None without a sampler."""

    def warning_after(self, saved: BatchSettings, step: int) -> str | None:
        """A warning for a run that was ``saved`` after ``step`` steps and resumes with this batch.

        None if both learn from the same batches, however ranks and passes divide them.
        """
        if (self.initial, self.growth) == (saved.initial, saved.growth):
            return None
        effects = []
        if self.initial != saved.initial:
            effects += [f"a step has {self.initial / saved.initial:.3g} times the samples"]
        if self.growth != saved.growth:
            effects += ["the batch grows differently"]
        if self.epoch_steps and saved.epoch_steps and self.epoch_steps != saved.epoch_steps:
            effects += [f"an epoch has {self.epoch_steps} steps in place of {saved.epoch_steps}"]
        return (
            f"the checkpoint of step {step} was saved with a global batch of {saved._described()}, "
            f"and training continues with {self._described()}: {', '.join(effects)}, and learning "
            "rates stay as they were, unless LinearScaling or SquareRootScaling scales them with "
            f"the batch. Give {saved._described()} to train as before."
        )

    def _described(self) -> str:
        return f"{self.initial} samples" + (f" and {self.growth}" if self.growth else "")


@runtime_checkable
class HasBatchSettings(Protocol):
    """An object that knows the global batch. The checkpointer asks it on rank 0."""

    def batch_settings(self) -> BatchSettings | None:
        """The settings now, or None if this one knows none. Local."""


def batch_settings_of(target: object) -> BatchSettings | None:
    """The settings that an object knows, if it knows any. Local."""
    return target.batch_settings() if isinstance(target, HasBatchSettings) else None


def batch_settings_by_name(state: Mapping[str, object]) -> dict[str, BatchSettings]:
    """The settings of the objects of a state that know some, by their names. Local."""
    known = {name: batch_settings_of(obj) for name, obj in state.items()}
    return {name: settings for name, settings in known.items() if settings is not None}
