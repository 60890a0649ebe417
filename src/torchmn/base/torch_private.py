"""All of torch's private names that torchmn uses: nothing else in ``src`` may name one.

A private name is one with an underscore, and each may go with any release of torch: `TRIED` is the
oldest and the newest one with which it was tried. ``torch._foreach_*`` is none: torch documents
these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter, methodcaller
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, Store, TCPStore
from torch.autograd import profiler
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

__all__ = ["GradBucket", "HashStore", "PrefixStore", "Store", "TCPStore", "tree_map"]

TRIED = "2.6", "2.14"
# What has been tried in other versions than the rest, by its name here.
TRIED_IN: dict[str, tuple[str, str]] = {}

# ---- autograd: the backward pass that runs ----

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that this thread runs; -1 outside of one."""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward pass that runs was called with ``retain_graph=True``."""

will_execute_node: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the backward pass that runs will reach a node."""

is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether `torch.jit.trace` records what is done now."""

functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""The innermost transformation of `torch.func` that runs; None outside of one."""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback()`` at the end of the backward pass that runs, unless it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def packs_saved_tensors() -> bool:
    """Whether `torch.autograd.graph.saved_tensors_hooks` are set, as activation checkpoints do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


# ---- tensors ----

COUNTS_USES = hasattr(torch._C, "_storage_Use_Count") and hasattr(Tensor, "_use_count")
"""Whether this torch can say how often a tensor and its storage are used."""

tensor_use_count: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda tensor: 0)
"""How often C++ uses a tensor; 0 where unknown."""

storage_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda address: 0)
"""How often the storage with an address is used; 0 where unknown."""

storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Where a storage's own object in C++ is."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place."""

gradient_hooks: Callable[[Tensor], dict[int, Callable[..., object]] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)
"""The hooks for when the gradient of a parameter is accumulated, in their order."""


class HooksOfWhole(torch.nn.Parameter):
    """A parameter with the gradient hooks of another one."""

    whole: Tensor

    @property
    def _post_accumulate_grad_hooks(self) -> Any:  # type: ignore[override]
        return gradient_hooks(self.whole)


made_as: Callable[..., Any] = Tensor._make_subclass
"""A tensor in the memory of another one, of a class whose ``__init__`` is not called."""


local_tensor: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""The part of a DTensor that this rank holds, which may still be under way."""

layout_of: Callable[[Any], Any] = attrgetter("_spec")
"""Mesh, placements and shape of a DTensor, for the constructor of another one."""


def local_shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which part of the whole this rank holds of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole = tensor.shape, tensor.device_mesh, tensor.placements
    return compute_local_shape_and_global_offset(*whole)


# ---- modules ----

# The base classes of batch normalization, of layers with running statistics, and of dropout.
BatchNorm = _BatchNorm
Normalization = _NormBase
Dropout = _DropoutNd

MODULE_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_load_state_dict_pre_hooks",
    "_state_dict_pre_hooks",
)
"""The attributes of a module that hold hooks of the kinds that torchmn registers."""
MODULES, PARAMETERS = "_modules", "_parameters"
"""The attributes of a module that hold its own."""
REPLICA = "_replicate_for_data_parallel"
"""The method that makes what `torch.nn.DataParallel` puts on a device."""


def replica_of(module: torch.nn.Module) -> torch.nn.Module:
    """What `torch.nn.DataParallel` makes of a module of this class."""
    return type(module)._replicate_for_data_parallel(module)  # type: ignore[no-any-return]


buffers_of: Callable[[torch.nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""The module's own buffers by their names."""

non_persistent_buffers: Callable[[torch.nn.Module], set[str]] = attrgetter(
    "_non_persistent_buffers_set"
)
"""The names of the module's own buffers that its state_dict leaves out."""


def active_ddp() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward runs."""
    return DistributedDataParallel._active_ddp_module


# ---- optimizers ----


STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
"""The attributes of an optimizer that hold the hooks of its step, as ordered dicts."""


# ---- process groups ----


default_store: Callable[[], Store] = distributed_c10d._get_default_store
"""The store of the default process group."""

store_of: Callable[[Any], Store] = distributed_c10d._get_process_group_store
"""The store of a process group."""


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the time limit in the options of a process group that is made next."""
    options._timeout = timeout


def gloo_options(timeout: timedelta, devices: list[Any]) -> Any:
    """Options of a gloo group: its time limit, and the interfaces that it uses."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._devices = timeout, devices
    return options


start_coalescing: Callable[[Any], None] = methodcaller("_start_coalescing")
"""Begin to collect messages of an NCCL group into one operation."""

end_coalescing: Callable[[Any], Any] = methodcaller("_end_coalescing")
"""Start the collected messages and return their work."""

source_rank: Callable[[Any], int] = methodcaller("_source_rank")
"""From which rank a message of `recv_anysource` has come."""


# ---- profiler and compiler ----


def is_profiler_running() -> bool:
    """Whether torch's profiler runs in this process, of which there can be one."""
    return bool(profiler._is_profiler_enabled)


_frames: Any = torch._C._dynamo.eval_frame
IS_SKIPPED_ALONE = hasattr(_frames, "skip_code")
"""Up to torch 2.12: what a function calls is compiled although the function itself is not."""


def set_compiler(callback: Any) -> Any:
    """Set what compiles the frames of this thread (None: nothing) and return what did before."""
    return _frames.set_eval_frame(callback)


def mark_as_disabled(function: Any, reason: str) -> None:
    """Mark a function as `torch.compiler.disable` does."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


def skip_code(code: CodeType, *, is_recursive: bool) -> None:
    """Do not compile a function; with ``is_recursive`` nor what it calls (torch 2.13 and later)."""
    if IS_SKIPPED_ALONE:
        _frames.skip_code(code)
        return
    action = _frames._FrameAction
    rest = action.SKIP if is_recursive else action.DEFAULT
    _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(action.SKIP, rest))
