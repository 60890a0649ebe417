"""What makes a wrapper of an optimizer a `torch.optim.Optimizer`."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from torchmn.errors import UnsupportedError


class WrappedOptimizer(Optimizer):
    """Has the groups, state, defaults and other attributes of ``inner``, and none of its own.

    A subclass sets ``inner`` first, and does not call ``__init__`` of `torch.optim.Optimizer`,
    which would make groups and state.
    """

    inner: Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's own. Local; it never waits."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's own. Local; it never waits."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's own."""
        return self.inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet: __init__ has not run, as in copying
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "A multi-node optimizer cannot be copied or pickled: it holds connections to the other "
            "ranks. Save its state_dict(), or copy optimizer.inner."
        )
