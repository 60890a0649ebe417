"""Every step, in full precision for a number of samples over all ranks, then with the codec.

At first gradients are large and turn quickly, and the residuals of a codec with error feedback are
of a gradient that is long out of date (CNTK's ``distributed_after``). Difference: CNTK trained
redundantly until then, each worker on all data; here the ranks share the data from the beginning.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from torchmn.compression import Codec
from torchmn.errors import UsageError
from torchmn.gradients.reducer import GradientReducer
from torchmn.schedules.every_step import EveryStep


class CompressionWarmup(EveryStep):
    """`EveryStep` whose codec is used after ``warmup_samples`` samples over all ranks.

    The number of samples comes from the exchanges, so that all ranks switch at the same step.
    """

    name = "compression_warmup"
    counts_samples = True
    _codec: Codec | None

    def __init__(self, warmup_samples: float) -> None:
        if not 0 <= warmup_samples < float("inf"):
            raise UsageError(f"warmup_samples={warmup_samples} must be 0 or more.")
        super().__init__()
        self.warmup_samples = warmup_samples
        self.total_samples = 0.0
        """Over all ranks, in all exchanges so far. The same on all ranks."""

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
            self._codec.load_state_dict({})  # it had no residuals before the switch
        self._choose_codec()

    def _count(self) -> None:
        self.total_samples += self.num_samples
        self._choose_codec()

    def _choose_codec(self) -> None:
        codec = self._codec if self.total_samples >= self.warmup_samples else None
        if self._reducer.codec is not codec:
            self._reducer.reconfigure(self._reducer.comm, codec)
