"""Backward passes under no_sync() whose gradients no exchange has taken yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from torchmn.exchange.gradient_memory import GradientState, gradient_state


class LocalPasses:
    """The gradients that passes under no_sync() left in ``p.grad``. Every method is local."""

    def __init__(self) -> None:
        self.are_on = False
        """Whether no_sync() is in effect, so that a pass that begins now is local."""
        self.may_exist = False
        """Whether ``p.grad`` may hold gradients of local passes; also set if nothing is exchanged
        and so no gradients are noted."""
        self.were_changed = False
        """Whether the script changed these gradients before an exchange in `step` took them."""
        self.states: dict[Tensor, GradientState | None] = {}
        """The state of each parameter's gradient after the last local pass; None if a hook of the
        script may change it later."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes are local."""
        # Contexts may be nested: an inner one must not end the outer one.
        before, self.are_on = self.are_on, True
        self.may_exist = True
        try:
            yield
        finally:
            self.are_on = before

    @property
    def exist(self) -> bool:
        """Whether there were local passes since the last exchange."""
        return bool(self.states)

    def note(self, parameter: Tensor, *, is_final: bool) -> None:
        """Note a gradient that a local pass has computed."""
        self.states[parameter] = gradient_state(parameter) if is_final else None

    def end(self, *, is_late: bool) -> None:
        """Note that an exchange, ``is_late`` if made in `step`, is about to take the gradients."""
        self.were_changed = is_late and any(
            state is not None and state != gradient_state(parameter)
            for parameter, state in self.states.items()
        )
