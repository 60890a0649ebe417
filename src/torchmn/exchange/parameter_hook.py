"""Hooks that call a method when a gradient is final, without keeping its owner alive.

torch's own hook on a parameter would keep the method's owner, and through it buckets, threads and
the parameter itself, alive forever: the garbage collector does not see such a cycle, for it runs
through C++. So parameters refer weakly to the owner, and the model keeps it, which the collector
sees. Copies and pickles of the model carry none of this and load without torchmn.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchmn.base.compiling import not_compiled
from torchmn.base.torch_private import gradient_hooks
from torchmn.exchange.sharded_parameters import whole_of


class GradientHook:
    """The hook registered on a parameter. Copies and pickles of parameters carry no such hooks."""

    def __init__(self, method: Callable[[Any], None], argument: object = None) -> None:
        # Not a WeakMethod, which takes five times as long to call.
        self._owner = weakref.ref(method.__self__)  # type: ignore[attr-defined]
        self._function = method.__func__  # type: ignore[attr-defined]
        self._argument = argument

    @property
    def owner(self) -> object | None:
        """The object whose method is called; None once it was freed."""
        return self._owner()

    @not_compiled
    def __call__(self, parameter: Tensor) -> None:
        """Called by autograd after it has accumulated the gradient of ``parameter``."""
        owner = self._owner()
        if owner is not None:
            self._function(owner, parameter if self._argument is None else self._argument)


def watch_gradient(
    parameter: nn.Parameter, method: Callable[[Any], None], argument: object = None
) -> RemovableHandle:
    """Call the bound ``method`` whenever the gradient of ``parameter`` is final. Local.

    A frozen parameter can be watched too: its hook is called once it is trained. Something must
    keep the method's owner alive, such as a hook on the model, see `ModelHooks`. The method is
    called with ``argument``, or, if that is None, with the model's own parameter (the DTensor of a
    `LocalShard`). The argument lives as long as the parameter, so it must not refer to tensors.
    """
    parameter = cast(nn.Parameter, whole_of(parameter))
    # torch accepts such a hook only on a tensor that requires a gradient at that moment.
    is_trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(
        GradientHook(method, argument)
    )
    parameter.requires_grad_(is_trainable)
    return handle


def owners_of(parameters: Iterable[nn.Parameter]) -> list[object]:
    """The owners of the hooks that `watch_gradient` put on any of the parameters, each once."""
    owners = {}
    for parameter in parameters:
        for hook in (gradient_hooks(parameter) or {}).values():
            if isinstance(hook, GradientHook) and hook.owner is not None:
                owners[id(hook.owner)] = hook.owner
    return list(owners.values())


class Arrivals(list[Tensor]):
    """The parameters of one bucket whose gradients are final, in the order of their arrival.

    The list's ``append`` is itself registered as a hook: autograd calls it without running a line
    of Python, so what is in the list is as reliable as a call of a Python hook.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams: set[Hashable] = set()
        """The streams on which gradients of the bucket were computed."""
        self.numbers: dict[int, int] = {}
        """The numbers of the expected parameters, by their ``id``."""
        self.last: int | None = None
        """The number of the parameter that arrived last in the previous pass."""
        self.current_stream: Callable[[], Hashable] | None = None
        """Returns the current stream of the device; None on a CPU."""

    def expect(self, numbers: dict[int, int]) -> None:
        """Expect these parameters from now on: their numbers by their ``id``."""
        self.numbers, self.last = numbers, None
        self.clear()

    def restart(self, current_stream: Callable[[], Hashable] | None) -> None:
        """Forget the arrivals, as another pass begins."""
        self.current_stream = current_stream
        if self:
            self.last = self.numbers[id(self[-1])]
        self.clear()
        self.streams.clear()

    @not_compiled
    def note(self, parameter: Tensor) -> None:
        """Append a parameter whose gradient was computed on the current stream of a device."""
        self.append(parameter)
        if self.current_stream is not None:
            self.streams.add(self.current_stream())

    @property
    def are_complete(self) -> bool:
        """Whether each of the expected parameters has arrived exactly once."""
        numbers = self.numbers
        return len(self) == len(numbers) and numbers.keys() == {*map(id, self)}


class GradientHooks:
    """The hooks of a reducer: each calls ``method`` with the number of its parameter. Local.

    While a backward pass runs, most of them only note their parameter in a list, see `note_in`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], method: Callable[[int], None]) -> None:
        self._entries: list[tuple[dict[int, Any], int, GradientHook]] = []
        for number, parameter in enumerate(parameters):
            handle = watch_gradient(parameter, method, number)
            hooks = cast("dict[int, Any]", gradient_hooks(parameter))
            self._entries.append((hooks, handle.id, hooks[handle.id]))

    def note_in(self, arrivals: Arrivals) -> None:
        """Let hooks only append their parameter to ``arrivals``, instead of calling the method.

        The parameter that arrived last in the previous pass still calls it, when the others are
        expected to be there. `call_again` must undo this before another pass begins, whose first
        gradient has to call the method.
        """
        last = arrivals.last
        if last is None:
            return
        # Replaced in torch's own dict, the hook keeps its place among the script's hooks.
        note = arrivals.append if arrivals.current_stream is None else arrivals.note
        for number in arrivals.numbers.values():
            if number != last:
                hooks, key, _ = self._entries[number]
                hooks[key] = note

    def call_again(self) -> None:
        """Let every hook call the method again."""
        for hooks, key, hook in self._entries:
            hooks[key] = hook

    def have_later(self, numbers: Iterable[int]) -> bool:
        """Whether a hook of the script runs after that of one of these, and may change a gradient.

        ``numbers`` are those of parameters.
        """
        for number in numbers:
            hooks, own_key, _ = self._entries[number]
            if len(hooks) > 1:
                for key in reversed(hooks):
                    if key == own_key:
                        break
                    if not _is_of_torchmn(hooks[key]):
                        return True
        return False

    def remove(self) -> None:
        """Remove all hooks."""
        for hooks, key, _ in self._entries:
            hooks.pop(key, None)
        self._entries = []


def _is_of_torchmn(hook: object) -> bool:
    return isinstance(hook, GradientHook) or isinstance(getattr(hook, "__self__", None), Arrivals)
