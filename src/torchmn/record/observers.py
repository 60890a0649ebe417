"""What is put around torch's own calls while a record is kept, and taken off at its end.

A loop that torchmn does not run is seen where it calls torch: the iterator of a DataLoader,
`torch.autograd.backward` (which ``loss.backward()`` calls), and the step of an optimizer, for which
torch has hooks. Each is passed on unchanged; the clock is read before and after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchmn.compiling import not_compiled
from torchmn.record.records import Phase
from torchmn.record.step_recorder import StepRecorder


class Observers:
    """Tells a recorder what the training thread calls. Local."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._before: list[Phase | None] = []
        self._undo: list[Callable[[], object]] = []

    def install(self) -> None:
        """Look at what is called from now on."""
        recorder = self._recorder
        plain_next: Callable[[Any], Any] = _BaseDataLoaderIter.__next__

        @not_compiled
        @functools.wraps(plain_next)
        def timed_next(iterator: Any) -> Any:
            before = recorder.data_begins()
            try:
                return plain_next(iterator)
            finally:
                recorder.data_ends(before)

        plain_backward = torch.autograd.backward

        @not_compiled
        @functools.wraps(plain_backward)
        def timed_backward(*args: Any, **kwargs: Any) -> None:
            is_timed = recorder.backward_begins(args[0] if args else kwargs.get("tensors"))
            try:
                plain_backward(*args, **kwargs)
            finally:
                if is_timed:
                    recorder.backward_ends()

        self._replace(_BaseDataLoaderIter, "__next__", plain_next, timed_next)
        self._replace(torch.autograd, "backward", plain_backward, timed_backward)
        for register, function in (
            (register_optimizer_step_pre_hook, self._step_begins),
            (register_optimizer_step_post_hook, self._step_ends),
        ):
            self._undo.append(register(function).remove)

    def remove(self) -> None:
        """Put everything back as it was."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, plain: object, timed: object) -> None:
        def put_back() -> None:
            if getattr(owner, name) is timed:  # else another tool has put itself around it
                setattr(owner, name, plain)

        setattr(owner, name, timed)
        self._undo.append(put_back)

    @not_compiled
    def _step_begins(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Of any optimizer; those inside of another one's step are parts of it."""
        self._before.append(self._recorder.enter("optimizer"))

    @not_compiled
    def _step_ends(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        before = self._before.pop() if self._before else None
        if before is not None:
            self._recorder.leave("other" if before in ("forward", "backward") else before)
            self._recorder.optimizer_stepped(optimizer)
