"""Backward passes under no_sync(), whose gradients no exchange has taken yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from torchmn.exchange.gradient_memory import GradientState, gradient_state


class LocalPasses:
    """What passes under no_sync() have left in ``p.grad``. Every method is local."""

    def __init__(self) -> None:
        self.are_on = False
        """Whether a pass now is one of these."""
        self.may_exist = False
        """Whether ``p.grad`` may hold gradients of such passes, also where none are noted because
        nothing is exchanged."""
        self.were_changed = False
        """Whether the script had changed their gradients before an exchange in `step` took them."""
        self.states: dict[Tensor, GradientState | None] = {}
        """The gradients by parameter after the last of these passes; None if a hook of the script
        may change one later."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Passes inside are local."""
        before, self.are_on = self.are_on, True
        self.may_exist = True
        try:
            yield
        finally:
            self.are_on = before

    @property
    def exist(self) -> bool:
        """Whether there were any since the last exchange."""
        return bool(self.states)

    def note(self, parameter: Tensor, *, is_final: bool) -> None:
        """Such a pass has computed a gradient."""
        self.states[parameter] = gradient_state(parameter) if is_final else None

    def end(self, *, is_late: bool) -> None:
        """An exchange is about to take them; ``is_late``: in `step`."""
        self.were_changed = is_late and any(
            state is not None and state != gradient_state(parameter)
            for parameter, state in self.states.items()
        )
