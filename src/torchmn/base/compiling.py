"""Exclude torchmn's own code from torch.compile.

A script may compile a function that calls ``loss.backward()`` and ``optimizer.step()``. Without
these functions the compiler would also trace torchmn's hooks and steps, which use threads, locks
and sockets.
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
    """Decorator: torch.compile compiles neither the function nor anything that it calls.

    A call from compiled code is a graph break; with ``fullgraph=True`` the compiler raises an error
    that contains ``reason``. Equivalent to ``torch.compiler.disable``, which is not used because it
    imports the compiler, which takes seconds.
    """
    marked: Any = function
    # Up to torch 2.12 a skipped frame does not protect the functions that it calls, so the compiler
    # is switched off for this thread while the function runs.
    if torch_private.IS_SKIPPED_ALONE:
        marked = _with_compiler_off(function)
    torch_private.mark_as_disabled(marked, reason)
    torch_private.skip_code(marked.__code__, is_recursive=True)
    return cast(_Function, marked)


def leave_to_python(*functions: Callable[..., object]) -> None:
    """Exclude functions from being compiled on their own, as the entry point of a graph.

    Compiled code cannot find out whether a backward pass is running. Functions that are called from
    code that is being compiled are still compiled as a part of it.
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
