"""What torch.compile does with torchmn's own code: nothing.

A script may compile a function that calls ``loss.backward()`` and ``optimizer.step()``. The hooks
that torch then calls, and the steps, would be compiled as well, with threads, locks and sockets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torchmn.base import torch_private

_Function = TypeVar("_Function", bound=Callable[..., object])


def not_compiled(
    function: _Function, reason: str = "torchmn exchanges gradients there"
) -> _Function:
    """Decorate a function that torch.compile leaves alone, with all that it calls.

    Code that is being compiled calls it as it is (a graph break, which ``fullgraph=True`` refuses
    with the ``reason``). The same as ``torch.compiler.disable``, which loads the compiler: that
    takes seconds.
    """
    marked: Any = function
    if torch_private.IS_SKIPPED_ALONE:
        marked = _with_compiler_off(function)
    torch_private.mark_as_disabled(marked, reason)
    torch_private.skip_code(marked.__code__, is_recursive=True)
    return cast(_Function, marked)


def leave_to_python(*functions: Callable[..., object]) -> None:
    """Do not compile them by themselves: compiled code cannot ask whether backward calls it.

    Where they are called by code that is compiled as a whole they are compiled with it.
    """
    for function in functions:
        torch_private.skip_code(function.__code__, is_recursive=False)


def _with_compiler_off(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> object:
        before = torch_private.set_compiler(None)
        try:
            return function(*args, **kwargs)
        finally:
            torch_private.set_compiler(before)

    return call
