"""Hooks on the modules of a model that are left out when the model is copied or saved.

`copy.deepcopy`, pickle, `torch.save`, `torch.optim.swa_utils.AveragedModel` and `torch.jit.script`
see the modules as if there were no hooks: a copy is not trained, and it must load where torchmn is
not installed. They ask a module for its state (``__getstate__``), or for a module to script in its
place (``__prepare_scriptable__``); an attribute of the single module answers both, and leaves
itself out of the answer.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchmn.base.compiling import leave_to_python
from torchmn.base.torch_private import MODULE_HOOKS, MODULES, PARAMETERS, REPLICA, replica_of

_STATE, _SCRIPTABLE = "__getstate__", "__prepare_scriptable__"
_FORWARD = "forward"


class ModelHooks:
    """A set of hooks on any modules, active until `remove`. Local."""

    def __init__(self) -> None:
        self._handles: list[tuple[nn.Module, RemovableHandle]] = []
        self._listeners: list[tuple[nn.Module, Callable[[], None]]] = []
        self._shown: list[nn.Module] = []
        """Modules whose hooks torch.compile must not miss."""

    def before_forward(
        self,
        module: nn.Module,
        function: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
        *,
        prepend: bool = False,
    ) -> None:
        """Call ``function(module, args, kwargs)`` before the module's forward, even if compiled."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            function(module, args, kwargs)

        leave_to_python(hook, function)
        self._keep(
            module, module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=True)
        )

    def show_to_compiler(self, module: nn.Module) -> None:
        """Prevent code that was compiled without these hooks from being used for the module.

        torch.compile does not check that a module still has no hooks (``skip_nnmodule_hook_guards``
        of torch._dynamo), and shares code between modules of one structure: code compiled when the
        model had no hooks, or for another model, would run for this one. It does check whether
        ``forward`` is an attribute of the module itself, so the module gets one.
        """
        _hide(module).show_to_compiler()
        self._shown.append(module)

    def before_load(self, module: nn.Module, function: Callable[[], None]) -> None:
        """Call ``function()`` before `load_state_dict` of it, or of a module that contains it."""
        self._keep(module, module.register_load_state_dict_pre_hook(lambda *_: function()))

    def before_state_dict(self, module: nn.Module, function: Callable[[nn.Module], None]) -> None:
        """Call ``function(module)`` before `state_dict` of it, or of a module that contains it."""
        handle = module.register_state_dict_pre_hook(lambda module, *_: function(module))
        self._keep(module, handle)

    def before_copy(self, module: nn.Module, function: Callable[[], None]) -> None:
        """Call ``function()`` before the module is copied, pickled or scripted."""
        _hide(module).listeners.append(function)
        self._listeners.append((module, function))

    def remove(self) -> None:
        """Remove these hooks; calling it again does nothing."""
        for module, handle in self._handles:
            handle.remove()
            _hide(module).ids.discard(handle.id)
        for module, function in self._listeners:
            listeners = _hide(module).listeners
            listeners[:] = [other for other in listeners if other is not function]
        for module in self._shown:
            _hide(module).hide_from_compiler()
        for module in (*(m for m, _ in (*self._handles, *self._listeners)), *self._shown):
            _show(module)
        self._handles, self._listeners, self._shown = [], [], []

    def _keep(self, module: nn.Module, handle: RemovableHandle) -> None:
        _hide(module).ids.add(handle.id)
        self._handles.append((module, handle))


class _Hidden:
    """The hooks of one module that its copies leave out; a call returns the module's state."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # weak, as the module refers to this object
        self.ids: set[int] = set()
        self.listeners: list[Callable[[], None]] = []
        self.num_shown = 0
        self._forward: MethodType | None = None

    def __call__(self) -> Any:
        """The module's state as its class returns it, without the hidden hooks."""
        module = self._module()
        for function in self.listeners:
            function()
        kind: Any = type(module)
        own_state = getattr(kind, "__getstate__", None)  # which Python 3.10 does not have
        state = module.__dict__ if own_state is None else own_state(module)
        if not isinstance(state, dict):
            return state
        state = {key: value for key, value in state.items() if not self._is_own(key, value)}
        if PARAMETERS in state:  # which may do more than a dict does
            state[PARAMETERS] = dict(state[PARAMETERS].items())
        for name in MODULE_HOOKS:
            if name in state:
                state[name] = type(state[name])(
                    (key, value) for key, value in state[name].items() if key not in self.ids
                )
        return state

    def show_to_compiler(self) -> None:
        """Store the class's ``forward`` as an attribute of the module, unless there is one."""
        module = self._module()
        self.num_shown += 1
        if module is None or _FORWARD in module.__dict__:
            return
        forward = inspect.getattr_static(type(module), _FORWARD, None)
        if isinstance(forward, FunctionType):
            self._forward = MethodType(forward, module)
            module.__dict__[_FORWARD] = self._forward
            # DataParallel copies attributes into its replicas, which would run this module's
            # forward.
            module.__dict__[REPLICA] = self.replica

    def hide_from_compiler(self) -> None:
        """Remove that attribute once nothing needs it."""
        module = self._module()
        self.num_shown -= 1
        if self.num_shown or module is None or self._forward is None:
            return
        for key in (_FORWARD, REPLICA):
            if self._is_own(key, module.__dict__.get(key)):
                del module.__dict__[key]
        self._forward = None

    def replica(self) -> nn.Module:
        """The replica that `torch.nn.DataParallel` creates, without the attributes set here."""
        module: Any = self._module()
        replica = replica_of(module)
        for key, value in [*replica.__dict__.items()]:
            if self._is_own(key, value):
                del replica.__dict__[key]
        return replica

    def _is_own(self, key: str, value: object) -> bool:
        """Whether an attribute of the module was set here, and not by the user."""
        if key == _FORWARD:
            return self._forward is not None and value is self._forward
        return key in (_STATE, _SCRIPTABLE, REPLICA)

    def scriptable(self) -> nn.Module | None:
        """A copy of the module and its submodules, sharing parameters, for `torch.jit.script`."""
        module = self._module()
        return None if module is None else _twin(module, {})


def _hide(module: nn.Module) -> _Hidden:
    hidden = module.__dict__.get(_STATE)
    if not isinstance(hidden, _Hidden):
        hidden = _Hidden(module)
        module.__dict__[_STATE] = hidden
        module.__dict__[_SCRIPTABLE] = hidden.scriptable
    return hidden


def _show(module: nn.Module) -> None:
    """Remove the attributes of a module of which nothing is hidden any more."""
    hidden = module.__dict__.get(_STATE)
    if isinstance(hidden, _Hidden) and not (hidden.ids or hidden.listeners or hidden.num_shown):
        del module.__dict__[_STATE], module.__dict__[_SCRIPTABLE]


def _twin(module: nn.Module, twins: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in twins:
        if isinstance(module, torch.jit.ScriptModule):
            return module
        twins[module] = twin = copy.copy(module)
        twin.__dict__[MODULES] = {
            name: None if child is None else _twin(child, twins)
            for name, child in vars(module)[MODULES].items()
        }
    return twins[module]
