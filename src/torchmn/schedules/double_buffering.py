"""Double buffering: step k applies mean(g_{k-1}) while the sum of g_k is under way.

    backward k:  start the sum of g_k;  p.grad <- mean(g_{k-1})
    step k:      w_{k+1} = w_k - update(mean(g_{k-1}))        (k >= 2; the first step does nothing)
    flush:       w = w - update(mean(g_N))

Source: ChainerMN's `_DoubleBufferingOptimizer`, CNTK's ``useBufferedAsyncGradientAggregation``.
Staleness is exactly one step. Differences: no iteration is spent on a broadcast, so that N
iterations give N-1 steps instead of N-2; `flush()` applies the last gradient; the pending gradient
is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmn.errors import UnsupportedError
from torchmn.gradients.bucket_set import BucketSet
from torchmn.schedules.base import Schedule


class DoubleBuffering(Schedule):
    """Gradients are applied one step late, and their exchange overlaps with a whole step."""

    name = "double_buffering"
    num_sets = 2
    staleness_steps = 1

    def __init__(self) -> None:
        self._pending: BucketSet | None = None
        self._has_mean = False
        self._num_backwards = 0

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`."""
        self._num_backwards += 1
        if self._num_backwards > 1:
            raise UnsupportedError(
                "Two backward passes before step() with double_buffering: the second would add to "
                "the mean of the step before. Wrap all passes but the last in optimizer.no_sync()."
            )
        reducer = self._reducer
        reducer.start_remaining()
        before, self._pending = self._pending, reducer.swap_buffers()
        if before is None:
            for slot in self._pending.slots:
                slot.parameter.grad = None
            return
        reducer.set_grads(before)
        self._has_mean = True

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`."""
        loss = closure() if closure is not None else None
        if self._num_backwards == 0:
            self._reducer.exchange_now()
        elif self._reducer.has_unexchanged:
            raise UnsupportedError(
                "A backward pass under no_sync() came after the one that was exchanged, before "
                "step(). With double_buffering the pass outside no_sync() must be the last one."
            )
        self._num_backwards = 0
        has_mean, self._has_mean = self._has_mean, False
        if has_mean:
            self._inner.step()
        return loss

    def shadow_step(self) -> int:
        """See `Schedule.shadow_step`."""
        if self._pending is not None:
            self._pending.wait()
        reducer = self._reducer
        reducer.finish_filling()
        reducer.start_remaining()
        if self._pending is not None:
            reducer.discard(self._pending)
        filling = reducer.filling
        filling.wait()
        if filling.num_active:  # in the same turns as the others: their buckets belong together
            self._pending = reducer.swap_buffers()
        else:
            filling.restart()
        return filling.num_active

    def on_zero_grad(self) -> None:
        """See `Schedule.on_zero_grad`. The mean in ``p.grad`` is dropped: no step applies it."""
        self._num_backwards = 0
        self._has_mean = False

    def flush(self) -> None:
        """See `Schedule.flush`."""
        has_mean, self._has_mean, self._num_backwards = self._has_mean, False, 0
        if has_mean:  # there was a backward pass, but no step yet
            self._inner.step()
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._reducer.set_grads(pending)
        self._inner.step()

    def state_dict(self) -> dict[str, Any]:
        """See `Schedule.state_dict`: the mean that the next step will apply, by name."""
        if self._pending is None:
            return {}
        self._pending.wait()
        return {"pending": self._pending.means(), "pending_record": self._pending.record()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Schedule.load_state_dict`. Raises UsageError: other parameters than saved."""
        if self._pending is not None:
            self._pending.drain()  # its memory is used again
        self._pending, self._has_mean, self._num_backwards = None, False, 0
        if "pending" in state:
            self._reducer.filling.load_means(state["pending"], state.get("pending_record"))
            self._pending = self._reducer.swap_buffers()
