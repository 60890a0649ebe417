"""What the first steps show: which module needs a parameter, when, and when its gradient is there.

A module's parameters are as a rule read in its own forward. Some are read in another's: the weight
of `nn.MultiheadAttention.out_proj`, an embedding that is used again as an output layer. The meter
sees every torch function that is called in a forward pass, and which module runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchmn.compiling import is_compiled_call
from torchmn.gradients.model_hooks import ModelHooks

_VALUE_READERS = ("item", "tolist", "__bool__", "__float__", "__int__")


class PassMeter:
    """Watches training passes of some models until `close`. Local."""

    def __init__(self, models: Sequence[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
        self.readers: dict[nn.Parameter, set[nn.Module]] = {}
        """The modules in whose own forward a parameter was the first time read in a pass."""
        self.needed_s: dict[nn.Parameter, float] = {}
        """When its first reader began, from the beginning of forward."""
        self.ready_s: dict[Tensor, float] = {}
        """When its gradient was final, from the first gradient."""
        self.backward_s = 0.0
        self._watched = set(parameters)
        self._seen: set[nn.Parameter] = set()
        self._running: list[tuple[nn.Module, float]] = []
        self._mode: _Reads | None = None
        self._forward_began_s: float | None = None
        self._backward_began_s: float | None = None
        self._hooks = ModelHooks()
        for module in dict.fromkeys(m for model in models for m in model.modules()):
            self._hooks.before_forward(module, self._enter, prepend=True)
            self._hooks.after_forward(module, self._leave)

    @property
    def has_seen_all(self) -> bool:
        """Whether a forward and a backward pass were seen."""
        return bool(self.needed_s) and self.backward_s > 0

    def close(self) -> None:
        """Stop watching."""
        self._hooks.remove()

    def gradient_arrived(self, parameter: Tensor) -> None:
        """A gradient of the running backward pass is final."""
        now_s = time.perf_counter()
        if self._backward_began_s is None:
            self._backward_began_s = now_s
            self.ready_s = {}
        self.ready_s[parameter] = now_s - self._backward_began_s

    def backward_ended(self) -> None:
        """All gradients are there, and nothing has waited for an exchange yet."""
        if self._backward_began_s is not None:
            self.backward_s = time.perf_counter() - self._backward_began_s
        self._backward_began_s = self._forward_began_s = None
        self._seen.clear()

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling() or is_compiled_call():
            return  # nothing could be seen
        now_s = time.perf_counter()
        if not self._running and torch.is_grad_enabled():
            if self._forward_began_s is None:
                self._forward_began_s = now_s
            self._mode = _Reads(self._read)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._running.append((module, now_s))

    def _leave(self, module: nn.Module) -> None:
        if torch.compiler.is_compiling():
            return
        # A forward that raised leaves modules above it in the list.
        while self._running:
            last, _ = self._running.pop()
            if last is module:
                break
        if not self._running and self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None

    def _read(self, parameter: nn.Parameter) -> None:
        if parameter not in self._watched or parameter in self._seen or not self._running:
            return
        module, began_s = self._running[-1]
        self._seen.add(parameter)
        self.readers.setdefault(parameter, set()).add(module)
        self.needed_s[parameter] = began_s - (self._forward_began_s or began_s)


class _Reads(TorchFunctionMode):
    """Calls back for each parameter whose values a torch function takes."""

    def __init__(self, read: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._callback = read

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # What gives no tensor asks for a shape, a device or the like.
        if _holds_tensor(result) or getattr(func, "__name__", "") in _VALUE_READERS:
            for argument in (*args, *(kwargs or {}).values()):
                parts = argument if isinstance(argument, (list, tuple)) else (argument,)
                for part in parts:
                    if isinstance(part, nn.Parameter):
                        self._callback(part)
        return result


def _holds_tensor(result: object) -> bool:
    if isinstance(result, (list, tuple)):
        return any(isinstance(part, Tensor) for part in result)
    return isinstance(result, Tensor)
