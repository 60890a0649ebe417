"""A backward pass: when it ends, whether it still runs, and what runs inside of it.

Autograd calls back at the end of a pass that completes. After one that raised, out of memory or by
Ctrl-C, it does not; but then it releases the callback, which can be seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torchmn.compiling import not_compiled
from torchmn.errors import CommunicationError, UsageError
from torchmn.torch_private import at_end_of_backward


class _Members:
    """The exchanges that one backward pass of autograd makes."""

    num = 0


_MEMBERS: weakref.WeakValueDictionary[int, _Members] = weakref.WeakValueDictionary()
"""By autograd's number of the pass."""


class BackwardPass:
    """A backward pass that has begun."""

    def __init__(self, backward_id: int, callback: AtEnd, *, packs_early: bool) -> None:
        self.ids = {backward_id}
        """Of the pass, and of those that run inside of it."""
        self.packs_early = packs_early
        """Whether gradients can be packed before the pass ends."""
        self.is_cleared = False
        """Whether the gradients were cleared since it raised."""
        self.failure: BaseException | None = None
        """Why its exchange failed, after which the ranks no longer agree."""
        self._callback = weakref.ref(callback)
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

    def raise_if_unfinished(self, rank_label: str) -> None:
        """Raise unless its gradients were cleared since it raised.

        UsageError: they were not, or this is called inside of the pass; CommunicationError: its
        exchange failed.
        """
        if self.failure is not None:
            raise CommunicationError(
                f"{rank_label}: the previous backward pass did not complete ({self.failure}), so "
                "the ranks no longer agree on what was exchanged. End the job and continue from "
                "the last checkpoint."
            )
        if self.is_running:
            raise UsageError(
                f"{rank_label}: step() or an exchange is called inside of a backward pass, whose "
                "means are there when backward() has returned. Call step() after backward(), not "
                "in a hook of a gradient."
            )
        if not self.is_cleared:
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
