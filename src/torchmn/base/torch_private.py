"""All private names of torch that torchmn uses. No other module in ``src`` may use one.

Private names are those with a leading underscore; any release of torch may remove them. `TRIED`
holds the oldest and the newest release with which they were tested. ``torch._foreach_*`` does not
count as private: torch documents these functions.
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
# Names of this module that were tested with other releases than the rest.
TRIED_IN: dict[str, tuple[str, str]] = {}

# ---- autograd: the backward pass that runs ----

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward pass that runs on this thread; -1 outside a backward pass."""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running backward pass was called with ``retain_graph=True``."""

will_execute_node: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the running backward pass will execute a node of the graph."""

is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether `torch.jit.trace` is recording on this thread."""

functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""The level of the innermost active `torch.func` transform; None outside of any."""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback()`` at the end of the running backward pass.

    If the pass raises, autograd drops the callback without calling it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def packs_saved_tensors() -> bool:
    """Whether `torch.autograd.graph.saved_tensors_hooks` are set, as activation checkpoints do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


# ---- tensors ----

COUNTS_USES = hasattr(torch._C, "_storage_Use_Count") and hasattr(Tensor, "_use_count")
"""Whether this release of torch provides reference counts of tensors and storages."""

tensor_use_count: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda tensor: 0)
"""The C++ reference count of a tensor; 0 if unknown."""

storage_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda address: 0)
"""The reference count of the storage at `storage_address`; 0 if unknown."""

storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The address of a storage's C++ object (StorageImpl), not of its data."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""The version counter of a tensor, which counts in-place changes."""

gradient_hooks: Callable[[Tensor], dict[int, Callable[..., object]] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)
"""The post-accumulate-grad hooks of a tensor, in order of registration."""


class HooksOfWhole(torch.nn.Parameter):
    """A parameter that shares the gradient hooks of another one, ``whole``."""

    whole: Tensor

    @property
    def _post_accumulate_grad_hooks(self) -> Any:  # type: ignore[override]
        return gradient_hooks(self.whole)


made_as: Callable[..., Any] = Tensor._make_subclass
"""Make an instance of a Tensor subclass from a tensor; memory is shared, ``__init__`` not run."""


local_tensor: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""This rank's part of a DTensor; a collective that produces it may still be pending."""

layout_of: Callable[[Any], Any] = attrgetter("_spec")
"""Mesh, placements and shape of a DTensor, as its constructor takes them."""


def local_shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part of a DTensor, and its offset in the whole tensor."""
    # Imported here, because only scripts with DTensors need it.
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
"""The attributes of a module that hold its direct children and its own parameters."""
REPLICA = "_replicate_for_data_parallel"
"""The method with which `torch.nn.DataParallel` copies a module to each device."""


def replica_of(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module as `torch.nn.DataParallel` makes it: by the method of its class."""
    return type(module)._replicate_for_data_parallel(module)  # type: ignore[no-any-return]


buffers_of: Callable[[torch.nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""A module's own buffers by name, without those of its children."""

non_persistent_buffers: Callable[[torch.nn.Module], set[str]] = attrgetter(
    "_non_persistent_buffers_set"
)
"""The names of a module's own buffers that are not part of its state_dict."""


def active_ddp() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running; None if there is none."""
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
    """Set the time limit in ``options``, from which a process group is made."""
    options._timeout = timeout


def gloo_options(timeout: timedelta, devices: list[Any]) -> Any:
    """Options for a gloo process group: its time limit, and the network devices it uses."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._devices = timeout, devices
    return options


start_coalescing: Callable[[Any], None] = methodcaller("_start_coalescing")
"""Start to coalesce the sends and receives of an NCCL group into one operation."""

end_coalescing: Callable[[Any], Any] = methodcaller("_end_coalescing")
"""Launch the coalesced operations and return their Work."""

source_rank: Callable[[Any], int] = methodcaller("_source_rank")
"""The sender of a message received by ``recv_anysource``."""


# ---- profiler and compiler ----


def is_profiler_running() -> bool:
    """Whether torch's profiler is running in this process."""
    return bool(profiler._is_profiler_enabled)


_frames: Any = torch._C._dynamo.eval_frame
IS_SKIPPED_ALONE = hasattr(_frames, "skip_code")
"""Up to torch 2.12 skipping a function does not skip what it calls, which is still compiled."""


def set_compiler(callback: Any) -> Any:
    """Set this thread's frame compiler (None: no compilation) and return the previous one."""
    return _frames.set_eval_frame(callback)


def mark_as_disabled(function: Any, reason: str) -> None:
    """Mark a function as `torch.compiler.disable` does."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


def skip_code(code: CodeType, *, is_recursive: bool) -> None:
    """Exclude a function from compilation, and what it calls if ``is_recursive``.

    Up to torch 2.12 ``is_recursive`` has no effect.
    """
    if IS_SKIPPED_ALONE:
        _frames.skip_code(code)
        return
    action = _frames._FrameAction
    rest = action.SKIP if is_recursive else action.DEFAULT
    _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(action.SKIP, rest))
