"""Hooks on modules that do not travel with copies of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """Calls a function; in a copy of the module, or one that was pickled, it does nothing.

    A copy is not what is trained, and what the function belongs to can be neither copied nor
    pickled.
    """

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """What torch calls."""
        if self._function is not None:
            self._function(*args)

    def __deepcopy__(self, memo: object) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return (ModuleHook, ())
