"""Exchanges inside of `torch.utils.checkpoint`: what has been received is not requested again.

A checkpointed function runs a second time during backward, when the other ranks are elsewhere. So
the results of its exchanges are kept with the checkpoint, and the second run takes them from there.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import checkpoint

from torchmn.base.errors import UsageError
from torchmn.base.script_line import script_frame
from torchmn.base.torch_private import current_graph_task_id

Made = tuple[tuple[Tensor, ...], Any]
"""The tensors that an exchange has received, and further facts about it."""
Kind = Literal["none", "reentrant", "nonreentrant"]

_FILE = checkpoint.__file__
_REENTRANT = checkpoint.CheckpointFunction
_FORWARD: CodeType = _REENTRANT.forward.__code__
_BACKWARD: CodeType = _REENTRANT.backward.__code__
backward_functions: set[CodeType] = set()
"""Functions that run in backward and make exchanges of their own, in a checkpoint or not."""


@dataclass
class _Results:
    """Results of the exchanges in one checkpointed function, in order."""

    values: list[Made] = field(default_factory=list)
    num_taken: dict[int, int] = field(default_factory=dict)
    """Number of results taken, by the backward pass that runs the function again."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpointed functions on the stack."""

    running: tuple[Any, ...]
    """Objects of the functions that run for the first time; torch keeps them for the second."""
    again: Any
    """The object of the function that runs again during backward, or None."""
    kind: Kind
    """The kind of checkpoint that runs again."""
    is_reentrant_forward: bool
    """Whether gradients are not recorded because a checkpoint will run again to record them."""

    @property
    def is_in_program(self) -> bool:
        """Whether backward runs the graph recorded now, which may only provide saved tensors."""
        return self.kind != "nonreentrant"

    def records(self, x: Tensor) -> bool:
        """Whether a gradient of ``x`` will be recorded, now or when a checkpoint runs again."""
        if torch.is_grad_enabled():
            return x.requires_grad
        return self.is_reentrant_forward and has_gradients(x)

    def once(self, exchange: Callable[[], Made]) -> Made:
        """Run an exchange; when its function runs again, return the results of the first run."""
        made = exchange() if self.again is None else self._taken()
        if not self.running and self.again is None:
            return made
        for owner in self.running:
            _results_of(owner).values.append(made)
        tensors, facts = made  # copies: the function may change what it has received
        return tuple(x.clone() for x in tensors), facts

    def _taken(self) -> Made:
        results = _results_of(self.again)
        pass_id = current_graph_task_id()
        index = results.num_taken.get(pass_id, 0)
        if index >= len(results.values):
            raise UsageError(
                "A checkpointed function exchanges more when it runs again during backward than "
                f"in its first run ({len(results.values)}). It must do the same in both."
            )
        results.num_taken[pass_id] = index + 1
        return results.values[index]


def checkpoints() -> Checkpoints:
    """The checkpointed functions in which the caller runs. Local."""
    # torch does not tell a function that it runs in a checkpoint: only the frames on the stack do.
    running: list[Any] = []
    again, kind, is_reentrant_forward = None, "none", False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and again is None:
        code = frame.f_code
        if code in backward_functions:
            break
        if code.co_filename == _FILE:
            if code is _FORWARD:
                context = frame.f_locals["ctx"]
                is_reentrant_forward |= any(context.needs_input_grad)
                running.append(context)
            elif code is _BACKWARD:
                again, kind = frame.f_locals["ctx"], "reentrant"
            elif frame.f_locals.get("gen") is not None:  # of `checkpoint`, in 2.14 what it calls
                running.append(frame.f_locals["gen"].gi_frame.f_locals["new_frame"])
            elif code.co_name == "unpack_hook" and "frame" in frame.f_locals:
                again, kind = frame.f_locals["frame"], "nonreentrant"
        frame = frame.f_back
    return Checkpoints(tuple(running), again, kind, is_reentrant_forward)  # type: ignore[arg-type]


def has_gradients(x: Tensor) -> bool:
    """Whether a tensor of this dtype can require a gradient."""
    return x.is_floating_point() or x.is_complex()


def _results_of(owner: Any) -> _Results:
    results: _Results | None = getattr(owner, "_torchmn_results", None)
    if results is None:
        results = owner._torchmn_results = _Results()
    return results


# Where in the program a call is: whether a function that sends is followed, in the same run of the
# function that called it, by one that can take its delegate. Only frames tell.

_JUMPS = {*dis.hasjrel, *dis.hasjabs}

Position = tuple[tuple[CodeType, int], ...]
"""The calls on the stack, outermost first, each with its instruction."""


def position() -> Position:
    """The position of the program outside of torchmn and torch. Local."""
    found = []
    frame = script_frame()
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(found))


def is_before(earlier: Position, later: Position) -> bool:
    """Whether a call and one after it are in one run of the same function.

    The second may be in a function that is called there; no loop has only one of both.
    """
    if not 0 < len(earlier) <= len(later) or earlier[:-1] != later[: len(earlier) - 1]:
        return False
    (code, first), (other, second) = earlier[-1], later[len(earlier) - 1]
    if code is not other or first >= second:
        return False
    return not any(
        (start <= first <= end) != (start <= second <= end) for start, end in _loops(code)
    )


@cache
def _loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """First and last instruction of each loop of a function, found by its backward jumps."""
    return tuple(
        (instruction.argval, instruction.offset)
        for instruction in dis.get_instructions(code)
        if instruction.opcode in _JUMPS and instruction.argval <= instruction.offset
    )
