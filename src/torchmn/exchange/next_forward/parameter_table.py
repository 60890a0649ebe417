"""The table of a module's parameters, which brings them up to date before anybody gets them.

`nn.Module` looks up ``module.weight`` and everything that `parameters` and `state_dict` go through
in one dict per module. Code that gets its parameters there finds them updated, and may change them.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, ValuesView

from torch import nn

_NAME = "_parameters"
_Held = nn.Parameter | None


class ParameterTable(dict[str, _Held]):
    """In place of the dict of one module, until `put_back`. Copies of the module have a dict."""

    def __init__(
        self,
        module: nn.Module,
        before_one: Callable[[nn.Parameter], None],
        before_all: Callable[[], None],
    ) -> None:
        super().__init__(module.__dict__[_NAME])
        self._before_one = before_one
        self._before_all = before_all
        module.__dict__[_NAME] = self

    def __getitem__(self, name: str) -> _Held:
        """One parameter is read, as an attribute of its module."""
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._before_one(parameter)
        return parameter

    def items(self) -> ItemsView[str, _Held]:  # type: ignore[override]
        """All are gone through."""
        self._before_all()
        return super().items()

    def values(self) -> ValuesView[_Held]:  # type: ignore[override]
        """All are gone through."""
        self._before_all()
        return super().values()


def put_back(module: nn.Module) -> None:
    """Give the module a plain dict again."""
    table = module.__dict__[_NAME]
    if isinstance(table, ParameterTable):
        module.__dict__[_NAME] = dict(dict.items(table))
