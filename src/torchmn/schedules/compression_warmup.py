"""Every step, in full precision until so many samples over all workers, then with the codec.

At first gradients are large and turn quickly, and what a codec with error feedback owes is of a
gradient that is long gone (CNTK's ``distributed_after``, ancestors 2.2). Difference: CNTK trained
redundantly until then, each worker on all data; here the workers share the data from the beginning.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from torchmn.communicators import Communicator
from torchmn.compression import Codec
from torchmn.errors import UsageError
from torchmn.gradients.reducer import GradientReducer
from torchmn.schedules.every_step import EveryStep


class CompressionWarmup(EveryStep):
    """`EveryStep` whose codec comes in after ``distributed_after`` samples over all workers.

    The number of samples comes out of the exchanges, so that all ranks switch at one step.
    """

    name = "full_precision_first"
    counts_samples = True
    _codec: Codec | None
    _comm: Communicator

    def __init__(self, distributed_after: float) -> None:
        if not 0 <= distributed_after < float("inf"):
            raise UsageError(f"distributed_after={distributed_after} must be 0 or more.")
        super().__init__()
        self.distributed_after = distributed_after
        self.total_samples = 0.0
        """Over all workers, in all exchanges so far. The same on all ranks."""

    def attach(self, reducer: GradientReducer, inner: Optimizer) -> None:
        """See `Schedule.attach`."""
        super().attach(reducer, inner)
        self._codec = reducer.codec
        self._choose_codec()

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`."""
        super().backward_ended()
        self._count()

    def shadow_step(self) -> int:
        """See `Schedule.shadow_step`."""
        num_active = super().shadow_step()
        self._count()
        return num_active

    def state_dict(self) -> dict[str, Any]:
        """See `Schedule.state_dict`."""
        return {"total_samples": self.total_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Schedule.load_state_dict`."""
        super().load_state_dict(state)
        self.total_samples = state.get("total_samples", 0.0)
        if self._codec is not None:
            self._codec.load_state_dict({})  # nothing was owed before it came in
        self._choose_codec()

    def _count(self) -> None:
        self.total_samples += self.num_samples
        self._choose_codec()

    def _choose_codec(self) -> None:
        codec = self._codec if self.total_samples >= self.distributed_after else None
        if self._reducer.codec is not codec:
            self._reducer.redirect(self._reducer.comm, codec)
