"""A backward pass: when it ends, whether it still runs, and what runs inside of it.

Autograd calls back at the end of a pass that completes. After one that raised, out of memory or by
Ctrl-C, it does not; but then it releases the callback, which can be seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum

from torchmn.base.compiling import not_compiled
from torchmn.base.errors import CommunicationError, UsageError
from torchmn.base.torch_private import at_end_of_backward, current_graph_task_id


class _Members:
    """The exchanges that one backward pass of autograd makes."""

    num = 0


_MEMBERS: weakref.WeakValueDictionary[int, _Members] = weakref.WeakValueDictionary()
"""By autograd's number of the pass."""


class BackwardPass:
    """A backward pass that has begun."""

    def __init__(
        self, callback: AtEnd, on_release: Callable[[], None], *, packs_early: bool
    ) -> None:
        backward_id = current_graph_task_id()
        self.ids = {backward_id}
        """Of the pass, and of those that run inside of it."""
        self.packs_early = packs_early
        """Whether gradients can be packed before the pass ends."""
        self.is_cleared = False
        """Whether the gradients were cleared since it raised."""
        self.failure: BaseException | None = None
        """Why its exchange failed, after which the ranks no longer agree."""
        self._callback = weakref.ref(callback, lambda _: on_release())
        self._members = _MEMBERS.setdefault(backward_id, _Members())
        self._members.num += 1

    @property
    def is_joint(self) -> bool:
        """Whether other optimizers exchange in it too, known at its end."""
        return self._members.num > 1

    @property
    def is_running(self) -> bool:
        """Whether autograd will still call back: it lets go of the callback of one that raised."""
        return self._callback() is not None


class PassState(Enum):
    """What the backward passes of one reducer are doing.

    =======  ============================  =====================================================
    state    means                         what changes it
    =======  ============================  =====================================================
    IDLE     no pass has begun             the first gradient of one: FILLING
    FILLING  gradients are being computed  the end of backward, after the exchange: IDLE, or
                                           FAILED; an error in the pass: RAISED
    RAISED   the pass raised               `zero_grad`: CLEARED
    CLEARED  and gradients were cleared    the next gradient or exchange, which first ends the
                                           exchange that the pass had begun: FILLING
    FAILED   the ranks no longer agree     nothing
    =======  ============================  =====================================================
    """

    IDLE = "idle"
    FILLING = "filling"
    RAISED = "raised"
    CLEARED = "cleared"
    FAILED = "failed"


class Passes:
    """The backward passes of one reducer, one after another. Every method is local."""

    def __init__(self, rank_label: str) -> None:
        self._rank_label = rank_label
        self.current: BackwardPass | None = None
        """The one that has begun and not ended."""
        self.is_joint = False
        """Whether other optimizers exchange in the pass that ends."""
        self.are_compared = False
        """Whether that pass has found the parameters as they were laid out."""

    @property
    def state(self) -> PassState:
        """Where they are."""
        current = self.current
        if current is None:
            return PassState.IDLE
        if current.failure is not None:
            return PassState.FAILED
        if current.is_running:
            return PassState.FILLING
        return PassState.CLEARED if current.is_cleared else PassState.RAISED

    def begin(
        self, callback: AtEnd, on_release: Callable[[], None], *, packs_early: bool
    ) -> BackwardPass:
        """A pass has computed its first gradient; ``callback`` is called when it ends.

        ``on_release`` is called when it raises, before another one can begin.
        """
        self.current = BackwardPass(callback, on_release, packs_early=packs_early)
        at_end_of_backward(callback)
        return self.current

    def end(self) -> BackwardPass | None:
        """The pass has ended: its exchange comes."""
        ended, self.current = self.current, None
        self.is_joint = ended is not None and ended.is_joint
        self.are_compared = ended is not None and ended.packs_early
        return ended

    def fail(self, ended: BackwardPass | None, error: BaseException) -> None:
        """The exchange of a pass failed, after which the ranks no longer agree."""
        self.current = ended
        if ended is not None:
            ended.failure = error

    def clear(self) -> None:
        """Gradients were cleared."""
        if self.current is not None:
            self.current.is_cleared = True

    @property
    def are_inside(self) -> bool:
        """Whether this is called while a pass computes gradients."""
        return self.current is not None and current_graph_task_id() != -1

    def raise_if_unfinished(self) -> None:
        """Raise if a pass began that did not end, and was not cleared.

        UsageError: it raised, and the gradients were not cleared since, or this is called inside of
        a pass; CommunicationError: an exchange failed.
        """
        if self.current is None:
            return
        state, rank_label = self.state, self._rank_label
        if state is PassState.FAILED:
            raise CommunicationError(
                f"{rank_label}: the previous backward pass did not complete "
                f"({self.current.failure}), so the ranks no longer agree on what was exchanged. "
                "End the job and continue from the last checkpoint."
            )
        if state is PassState.FILLING:
            raise UsageError(
                f"{rank_label}: step() or an exchange is called inside of a backward pass, whose "
                "means are there when backward() has returned. Call step() after backward(), not "
                "in a hook of a gradient."
            )
        if state is PassState.RAISED:
            raise UsageError(
                f"{rank_label}: the previous backward pass raised an exception, so the gradients "
                "are not complete. Call optimizer.zero_grad() and run forward and backward again, "
                "or leave this step out; on all ranks."
            )


class AtEnd:
    """What autograd calls at the end of a backward pass, and holds only until then.

    ``is_last``: after what others have asked it to call, as `fully_shard` does to reduce what is
    left.
    """

    def __init__(self, method: Callable[[], None], *, is_last: bool = False) -> None:
        self._method = method
        self._is_last = is_last

    @not_compiled
    def __call__(self) -> None:
        """The pass has reached its end."""
        if self._is_last:
            self._is_last = False
            at_end_of_backward(self)
            return
        self._method()
