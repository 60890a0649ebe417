"""Every step in float32 for a number of samples; then another schedule, or the codec.

At first gradients are large and change quickly: the residual of a codec with error feedback is of a
gradient that is out of date, and ranks that train alone move apart. `Warmup(n, EveryStep())` delays
the codec, `Warmup(n, PeriodicAverage())` is post-local SGD. Both are CNTK's ``distributed_after``,
and two of the `Phases` that there can be.
"""

from __future__ import annotations

from torchmn.errors import UnsupportedError, UsageError
from torchmn.exchange.schedules.every_step import EveryStep
from torchmn.exchange.schedules.local_updates.base import LocalUpdateSchedule
from torchmn.exchange.schedules.phases import Phase, Phases


class Warmup(Phases):
    """`EveryStep` in float32 until ``warmup_samples`` over all workers; then ``schedule``.

    The number of samples is part of each exchange, so that all ranks switch at the same step.

    Args:
        warmup_samples: samples over all workers; 0 starts with ``schedule``.
        schedule: `EveryStep` or a `LocalUpdateSchedule`, which also has the codec.

    Raises UsageError: not a finite number, 0 or more; UnsupportedError: another schedule.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedule = Warmup(20000, torchmn.schedules.BlockMomentum(block_size=4096))
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, schedule=schedule)
    """

    def __init__(self, warmup_samples: float, schedule: Phase) -> None:
        if not 0 <= warmup_samples < float("inf"):
            raise UsageError(f"warmup_samples={warmup_samples} must be 0 or more.")
        if not isinstance(schedule, (EveryStep, LocalUpdateSchedule)):
            raise UnsupportedError(
                f"Warmup cannot be followed by {type(schedule).__name__}. Use EveryStep or a "
                "local-update schedule."
            )
        super().__init__({0: EveryStep(exact=True), warmup_samples: schedule})
        self.name = f"warmup+{schedule.name}"
        self.warmup_samples = warmup_samples
        self.schedule = schedule

    @property
    def is_warming_up(self) -> bool:
        """Whether the warm-up has not ended. The same on all ranks."""
        return self.current is not self.schedule

    @property
    def num_warmup_samples(self) -> float:
        """Over all workers, in the exchanges of the warm-up so far. The same on all ranks."""
        return self.num_samples if self.is_warming_up else self.began_at[-1]
