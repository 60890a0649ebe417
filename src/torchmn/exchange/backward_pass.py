"""The state of a backward pass: when it ends, whether it still runs, which passes run inside it.

Autograd calls a callback at the end of a pass that completes. If the pass raised (out of memory,
Ctrl-C), autograd drops the callback without calling it; a weak reference tells.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum

from torchmn.base.compiling import not_compiled
from torchmn.base.errors import CommunicationError, UsageError
from torchmn.base.torch_private import at_end_of_backward, current_graph_task_id
from torchmn.comm import Communicator
from torchmn.exchange.agreements.facts import NO_JOINT_PASS


class _Members:
    """Multi-node optimizers that exchange gradients in one backward pass, or that may do so."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[Passes] = weakref.WeakSet()
        self.are_elsewhere = False
        """Whether one of them has begun another pass since."""

    @property
    def share_next_pass(self) -> bool:
        """Whether several of them may exchange gradients in their next pass."""
        return len(self.optimizers) > 1 and not self.are_elsewhere


class _OnCommunicator(_Members):
    """The optimizers of a communicator, whose next pass is unknown once another one was made."""

    num_made = 0

    def add(self, passes: Passes) -> int:
        """Add an optimizer that was just made; returns its number."""
        self.optimizers.add(passes)
        self.are_elsewhere = False
        self.num_made += 1
        return self.num_made


_ON_COMMUNICATOR: weakref.WeakKeyDictionary[Communicator, _OnCommunicator] = (
    weakref.WeakKeyDictionary()
)
_MEMBERS: weakref.WeakValueDictionary[int, _Members] = weakref.WeakValueDictionary()
"""The counts of the passes that run, by autograd's number of the pass."""


class BackwardPass:
    """A backward pass that has begun, from its first gradient on."""

    def __init__(
        self,
        passes: Passes,
        callback: AtEnd,
        on_release: Callable[[], None],
        *,
        packs_early: bool,
    ) -> None:
        backward_id = current_graph_task_id()
        self.ids = {backward_id}
        """Autograd's numbers of this pass and of the passes that run inside it."""
        self.packs_early = packs_early
        """Whether gradients can be packed before the pass ends."""
        self.is_cleared = False
        """Whether the gradients were cleared since the pass raised."""
        self.failure: BaseException | None = None
        """The error of its exchange, after which the ranks no longer agree; None if there is
        none."""
        # Weak: only autograd may keep the callback alive, so that its release can be noticed.
        self._callback = weakref.ref(callback, lambda _: on_release())
        self.members = members = _MEMBERS.setdefault(backward_id, _Members())
        members.optimizers.add(passes)

    @property
    def is_running(self) -> bool:
        """Whether autograd will still call the callback: it drops that of a pass that raised."""
        return self._callback() is not None


class PassState(Enum):
    """The state of the backward passes of one reducer.

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

    def __init__(self, comm: Communicator) -> None:
        self._rank_label = comm.rank_label
        self.current: BackwardPass | None = None
        """The pass that has begun and not ended."""
        self._members = _Members()  # of the last pass that ended
        self._on_communicator = _ON_COMMUNICATOR.setdefault(comm, _OnCommunicator())
        self.number = self._on_communicator.add(self)
        """The number of this optimizer among those that were made on its communicator."""
        self.is_joint = False
        """Whether other optimizers exchange gradients in the pass that is ending."""
        self.are_zeros = False
        """Whether gradients were set to zeros, and not to None, since they were exchanged."""
        self.are_compared = False
        """Whether that pass found the parameters unchanged since they were laid out."""

    @property
    def state(self) -> PassState:
        """The current state, see `PassState`."""
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
        """Register a pass that has computed its first gradient.

        Autograd calls ``callback`` when the pass ends. ``on_release`` is called if it raises,
        before another pass can begin.
        """
        self._members.are_elsewhere = self._on_communicator.are_elsewhere = True
        self.current = BackwardPass(self, callback, on_release, packs_early=packs_early)
        at_end_of_backward(callback)
        return self.current

    def end(self) -> BackwardPass | None:
        """Note that the pass has ended and is about to be exchanged; returns it."""
        ended, self.current = self.current, None
        if ended is not None:
            self._members = ended.members
        self.is_joint = ended is not None and len(ended.members.optimizers) > 1
        self.are_compared = ended is not None and ended.packs_early
        return ended

    def fail(self, ended: BackwardPass | None, error: BaseException) -> None:
        """Note that the exchange of a pass failed, after which the ranks no longer agree."""
        self.current = ended
        if ended is not None:
            ended.failure = error

    def clear(self) -> None:
        """Note that gradients were cleared."""
        if self.current is not None:
            self.current.is_cleared = True

    def close(self) -> None:
        """Note that this optimizer takes part in no pass any more."""
        for members in (self._members, self._on_communicator):
            members.optimizers.discard(self)

    @property
    def are_inside(self) -> bool:
        """Whether the caller runs inside a backward pass, as a hook of autograd does."""
        return self.current is not None and current_graph_task_id() != -1

    def raise_if_others_share_one(self) -> None:
        """Raise UsageError if other optimizers may share the next pass of this one.

        They shared its last one, or the last of them was made after it, and none has begun another.
        For ranks that exchange without a pass while others may have such a pass.
        """
        may_share = self._members.share_next_pass or self._on_communicator.share_next_pass
        if may_share and not self.is_joint:
            raise UsageError(f"{self._rank_label}: {NO_JOINT_PASS}")

    def raise_if_unfinished(self) -> None:
        """Raise if a pass has begun but not ended, and its gradients were not cleared.

        Raises UsageError: the pass raised, or this is called inside a pass; CommunicationError: the
        exchange of a pass failed.
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
    """The callback at the end of a backward pass, which autograd holds only until then.

    ``is_last``: whether it runs after the callbacks of others, such as the one in which
    `fully_shard` reduces its last gradients.
    """

    def __init__(self, method: Callable[[], None], *, is_last: bool = False) -> None:
        self._method = method
        self._is_last = is_last

    @not_compiled
    def __call__(self) -> None:
        """Called by autograd: the pass has reached its end."""
        if self._is_last:
            # Autograd also calls callbacks that are queued now, after all that were queued before.
            self._is_last = False
            at_end_of_backward(self)
            return
        self._method()
