"""The table of a module's parameters, which brings them up to date before they are read.

`nn.Module` looks up ``module.weight`` and everything that `parameters` and `state_dict` go through
in one dict per module. Code that gets its parameters there finds them updated, and may change them.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, ValuesView

from torch import nn

_NAME = "_parameters"
_Held = nn.Parameter | None
_BeforeOne = Callable[[nn.Parameter], None]


class ParameterTable(dict[str, _Held]):
    """In place of the dict of one module. Copies of the module have a dict.

    Several optimizers may train parts of one module, so it has one listener for each of them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.__dict__[_NAME])
        self.listeners: dict[object, tuple[_BeforeOne, Callable[[], None]]] = {}
        module.__dict__[_NAME] = self

    def __getitem__(self, name: str) -> _Held:
        """One parameter is read, as an attribute of its module."""
        parameter = super().__getitem__(name)
        if parameter is not None:
            for before_one, _ in list(self.listeners.values()):
                before_one(parameter)
        return parameter

    def items(self) -> ItemsView[str, _Held]:  # type: ignore[override]
        """All are iterated over."""
        self._before_all()
        return super().items()

    def values(self) -> ValuesView[_Held]:  # type: ignore[override]
        """All are iterated over."""
        self._before_all()
        return super().values()

    def _before_all(self) -> None:
        for _, before_all in list(self.listeners.values()):
            before_all()


def listen(
    module: nn.Module, owner: object, before_one: _BeforeOne, before_all: Callable[[], None]
) -> None:
    """Call these before one, or all, of the module's parameters are read."""
    table = module.__dict__[_NAME]
    if not isinstance(table, ParameterTable):
        table = ParameterTable(module)
    table.listeners[owner] = before_one, before_all


def put_back(module: nn.Module, owner: object) -> None:
    """End what `listen` began; after the last one the module has a plain dict again."""
    table = module.__dict__[_NAME]
    if isinstance(table, ParameterTable):
        table.listeners.pop(owner, None)
        if not table.listeners:
            module.__dict__[_NAME] = dict(dict.items(table))
