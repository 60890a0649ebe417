"""What a process is, as far as a library could change it; and a training that changes nothing.

torchmn run -n 2 process_state.py [unended]: prints what differs after `close` and `finalize`, or
without them.
"""

import atexit
import builtins
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import checkpoint, data
from torch.utils.data import DataLoader, TensorDataset

import torchmn

OWNERS = (
    *(sys, threading, warnings, signal, os, random, builtins),
    *(torch, torch.autograd, torch.autograd.graph, torch.autograd.function, torch.amp.grad_scaler),
    *(torch.nn.modules.module, sys.modules["torch.optim.optimizer"], data, data.dataloader),
    *(torch.distributed, torch.Tensor, nn.Module, nn.Parameter, nn.Linear, checkpoint),
    *(torch.optim.Optimizer, torch.optim.SGD, torch.amp.GradScaler, data.DataLoader),
    *(data.dataloader._BaseDataLoaderIter, data.dataloader._SingleProcessDataLoaderIter),
    *(data.dataloader._MultiProcessingDataLoaderIter, data.Sampler, data.BatchSampler),
)
NOT_COMPARED = {
    *("last_type", "last_value", "last_traceback", "last_exc"),  # of an error that was printed
    *("modules", "path_importer_cache", "_active", "_dangling", "environ"),  # below, or loaded
    *("nan", "reduce_op"),  # equal to nothing, and deprecated
}


SHARED = "torchmn.comm.transports."
"""The ranks' connections, which later communicators of the process share, are closed at exit."""
at_exit: list[str] = []
"""The functions of torchmn that are called at exit, from `watch_exit` on."""


def watch_exit() -> None:
    register, unregister = atexit.register, atexit.unregister
    functions: list[Any] = []

    def note() -> None:
        names = [f"{f.__module__}.{f.__qualname__}" for f in map(inner, functions)]
        at_exit[:] = sorted(name for name in names if name.startswith("torchmn."))

    def noted(function: Any, *args: Any, **kwargs: Any) -> Any:
        functions.append(function)
        note()
        return register(function, *args, **kwargs)

    def removed(function: Any) -> None:
        functions[:] = [each for each in functions if each != function]
        note()
        unregister(function)

    atexit.register, atexit.unregister = noted, removed


def inner(function: Any) -> Any:
    return getattr(function, "func", function)  # of a partial


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything of this process that can be compared."""
    found: dict[str, Any] = {
        "signal handlers": {each: signal.getsignal(each) for each in signal.valid_signals()},
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "warnings": list(warnings.filters),
        "at exit": [each for each in at_exit if not each.startswith(SHARED)],
        "collector": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "tracing": (sys.gettrace(), sys.getprofile(), faulthandler.is_enabled()),
        "switch interval": sys.getswitchinterval(),
        "torch": (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.distributed.is_initialized(),
        ),
        "random numbers": (random.getstate(), str(np.random.get_state())),  # loaders draw torch's
    }
    for owner in OWNERS:
        for name, value in list(vars(owner).items()):
            if name not in NOT_COMPARED and not isinstance(value, types.ModuleType):
                found[f"{owner.__name__}.{name}"] = shallow(value)
    for path, module in model.named_modules():
        found[f"module {path}"] = {"class": type(module), **contents(vars(module))}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = (id(parameter), parameter.requires_grad, hooks(parameter))
    found["optimizer"] = {"class": type(optimizer), **contents(vars(optimizer))}
    found["step"] = optimizer.step.__func__
    return found


def hooks(parameter: nn.Parameter) -> list[object]:
    return [
        len(table or {})
        for table in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    ]


def contents(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes, and which hooks are in the tables of hooks; state and gradients may change."""
    return {
        name: shallow(value) if "hooks" in name else type(value)
        for name, value in attributes.items()
    }


def shallow(value: Any) -> Any:
    """An object by its identity, a container by what is in it."""
    if isinstance(value, Mapping):
        return {key: id(each) for key, each in list(value.items())}
    if isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes)):
        return [id(each) for each in value]
    return value if isinstance(value, (int, float, str, bytes, type(None))) else id(value)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names of what is another one now. A module that was loaded meanwhile is none."""
    return [name for name, value in before.items() if not is_equal(value, after.get(name))] + [
        name
        for name in after.keys() - before.keys()
        if name.split(" ")[0] in ("module", "parameter")
    ]


def is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(is_equal, first, second))
    return bool(first == second)


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def plain_training(model: nn.Module) -> torch.optim.Optimizer:
    """What makes torch load and prepare what it does at its first use."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for (x,) in DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4, num_workers=1):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    for thread in threading.enumerate():  # that of the loader's worker, which ends after it
        if thread.name == "QueueFeederThread":
            thread.join()
    return optimizer


def training(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_ended: bool = True) -> None:
    """A communicator and optimizers from their beginning to their end."""
    comm = torchmn.create_communicator("flat")
    dataset = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))
    sampler = torchmn.GlobalSampler(dataset, comm, global_batch=8)
    loaders = [
        torchmn.scatter_loader(DataLoader(dataset, batch_size=8), comm),
        DataLoader(dataset, batch_sampler=sampler),
    ]
    for schedule, codec in (
        ("every_step", None),
        ("every_step", "int8"),
        ("double_buffering", None),
        ("diloco", None),
    ):
        wrapped = torchmn.create_multi_node_optimizer(
            optimizer, comm, model, schedule=schedule, codec=codec, weight="samples"
        )
        for loader in loaders:
            for (x,) in loader:
                wrapped.zero_grad()
                model(x).square().mean().backward()
                wrapped.step()
        wrapped.flush()
        if is_ended:
            wrapped.close()
    torchmn.functions.allgather(comm, torch.ones(2, requires_grad=True))[0].sum().backward()
    if is_ended:
        comm.finalize()


if __name__ == "__main__":
    watch_exit()
    own = new_model()
    trained = plain_training(own)
    before = state(own, trained)
    training(own, trained, is_ended="unended" not in sys.argv)
    print(f"changed: {differences(before, state(own, trained))}", flush=True)
