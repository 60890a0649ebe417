"""A batch that grows where a learning rate would fall.

Smith, Kindermans, Ying and Le, *Don't Decay the Learning Rate, Increase the Batch Size*, 2017,
arXiv 1711.00489, sections 3 and 5.1: the noise of SGD is about ``g = lr N / (B (1 - momentum))``
for N samples and batches of B, so that multiplying B by f anneals it as dividing lr by f does, in
fewer steps. Once B is as large as it may be, the rate falls instead (`DecayAfterGrowth`).

The size is a function of the samples seen, so it is the same on all ranks, for any number of ranks
and after resuming. A batch that has begun before a milestone keeps its size.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Literal, get_args

from torchmn.base.errors import UsageError, raise_if_no_count, raise_if_unknown
from torchmn.data.global_sampler import GlobalSampler, SamplerState

Unit = Literal["epochs", "samples"]


class BatchGrowth:
    """Multiply the global batch by ``factor`` at each milestone.

    Args:
        milestones: increasing, in ``unit``.
        factor: more than 1; the factor by which the rate would be divided instead.
        unit: ``epochs`` of the sampler, or ``samples`` over all ranks.
        max_batch: the largest global batch. Smith et al. stay at a tenth of the data set.

    Raises UsageError: an argument is out of range.

    Example:
        >>> torchmn.train.large_batch.BatchGrowth([30, 60], factor=4, max_batch=4096)
        BatchGrowth([30, 60], factor=4, unit='epochs', max_batch=4096)
    """

    def __init__(
        self,
        milestones: Sequence[float],
        factor: float = 2.0,
        *,
        unit: Unit = "epochs",
        max_batch: int | None = None,
    ) -> None:
        check_milestones(milestones, unit)
        if not 1 < factor < float("inf"):
            raise UsageError(f"factor={factor} must be a finite number greater than 1.")
        if max_batch is not None:
            raise_if_no_count("max_batch", max_batch, "a whole number")
        self.milestones = tuple(milestones)
        self.factor = factor
        self.unit: Unit = unit
        self.max_batch = max_batch

    def __repr__(self) -> str:
        limit = "" if self.max_batch is None else f", max_batch={self.max_batch}"
        return (
            f"BatchGrowth({list(self.milestones)}, factor={self.factor:g}, unit={self.unit!r}"
            f"{limit})"
        )

    def wanted_at(self, initial: int, samples: int, epoch_samples: int) -> float:
        """The global batch after ``samples`` samples, without ``max_batch`` and not rounded."""
        if samples == 0:  # also where the length of an epoch is not known yet
            return initial
        return initial * self.factor ** bisect_right(self._in_samples(epoch_samples), samples)

    def size_at(self, initial: int, samples: int, epoch_samples: int) -> int:
        """The global batch of the step that begins after ``samples`` samples."""
        wanted = round(self.wanted_at(initial, samples, epoch_samples))
        return wanted if self.max_batch is None else max(initial, min(wanted, self.max_batch))

    def next_milestone(self, samples: int, epoch_samples: int) -> float:
        """The first milestone after ``samples``, in samples; infinite after the last."""
        later = [each for each in self._in_samples(epoch_samples) if each > samples]
        return later[0] if later else float("inf")

    def _in_samples(self, epoch_samples: int) -> list[float]:
        if self.unit == "samples":
            return list(self.milestones)
        if not epoch_samples:
            raise UsageError(
                f"{self!r} counts epochs, and this GlobalBatch has no sampler. Make it by "
                "batch.sampler(dataset) first, or give unit='samples'."
            )
        return [milestone * epoch_samples for milestone in self.milestones]


class GrowingSampler(GlobalSampler):
    """A `GlobalSampler` whose global batches grow; made by `GlobalBatch.sampler`.

    >>> from torchmn.train.large_batch import BatchGrowth, GlobalBatch
    >>> batch = GlobalBatch(2, comm=comm, growth=BatchGrowth([1], 2, max_batch=4))
    >>> sampler = batch.sampler(8)
    >>> [len(part) for part in sampler], [len(part) for part in sampler]
    ([2, 2, 2, 2], [4, 4])
    """

    def __init__(self, *args: Any, growth: BatchGrowth, **options: Any) -> None:
        """Take the arguments of `GlobalSampler`. Raises UsageError: ``drop_last`` drops all."""
        self.growth = growth
        super().__init__(*args, **options)
        # After so many samples all milestones have passed.
        largest = growth.size_at(self._initial, 2**62, max(self.dataset_length, 1))
        if self.drop_last and 0 < self.dataset_length < largest:
            raise UsageError(
                f"The batch grows to {largest} samples, and drop_last=True then drops all "
                f"{self.dataset_length} of the data set. Give BatchGrowth max_batch=, or "
                "drop_last=False."
            )

    @property
    def global_batch(self) -> int:
        """Samples over all ranks of the next batch, if the epoch has that many left."""
        return self._size_at(self.state_dict())[0]

    @global_batch.setter
    def global_batch(self, initial: int) -> None:
        self._initial = initial

    def _size_at(self, state: SamplerState) -> tuple[int, int]:
        length = self.dataset_length
        before = state["epoch"] * length
        seen = before + state["position"]
        size = self.growth.size_at(self._initial, seen, max(length, 1))
        until = self.growth.next_milestone(seen, max(length, 1)) - before
        # A milestone may be between two samples: the batch that begins after it is larger.
        return size, length if until >= length else -int(-until // 1)


def check_milestones(milestones: Sequence[float], unit: str) -> None:
    """Raise UsageError: the milestones do not increase, or the unit is not known."""
    raise_if_unknown("unit", unit, get_args(Unit))
    is_increasing = all(a < b for a, b in zip([0, *milestones], milestones, strict=False))
    if not (is_increasing and milestones):
        raise UsageError(f"milestones={list(milestones)} must be increasing numbers above 0.")
