"""What torch.compile does with torchmn's own code: nothing.

A script may compile a function that calls ``loss.backward()`` and ``optimizer.step()``. The hooks
that torch then calls, and the steps, would be compiled as well, with threads, locks and sockets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])
_frames: Any = torch._C._dynamo.eval_frame
_IS_SKIPPED_ALONE = hasattr(_frames, "skip_code")
"""Up to torch 2.12: what a function calls is compiled although the function itself is not."""


def not_compiled(
    function: _Function, reason: str = "torchmn exchanges gradients there"
) -> _Function:
    """Decorate a function that torch.compile leaves alone, with all that it calls.

    Code that is being compiled calls it as it is (a graph break, which ``fullgraph=True`` refuses
    with the ``reason``). The same as ``torch.compiler.disable``, which loads the compiler: that
    takes seconds.
    """
    marked: Any = _with_compiler_off(function) if _IS_SKIPPED_ALONE else function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    _skip(marked, is_recursive=True)
    return cast(_Function, marked)


def leave_to_python(*functions: Callable[..., object]) -> None:
    """Do not compile them by themselves: compiled code cannot ask whether backward calls it.

    Where they are called by code that is compiled as a whole they are compiled with it.
    """
    for function in functions:
        _skip(function, is_recursive=False)


def _with_compiler_off(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> object:
        before = _frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _frames.set_eval_frame(before)

    return call


def _skip(function: Callable[..., object], *, is_recursive: bool) -> None:
    if _IS_SKIPPED_ALONE:
        _frames.skip_code(function.__code__)
        return
    action = _frames._FrameAction
    rest = action.SKIP if is_recursive else action.DEFAULT
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(action.SKIP, rest))
