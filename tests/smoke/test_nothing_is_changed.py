"""A communicator, optimizers, loaders and a record leave a process as it was."""

import ast
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tests.all.processes.test_examples import run
from tests.smoke.process_state import differences, new_model, state

SCRIPT = Path(__file__).with_name("process_state.py")


def changed(*arguments: str) -> list[list[str]]:
    """What the ranks say that has changed."""
    command = ["-m", "torchmn", "run", "-n", "2", "--backend", "gloo", SCRIPT, *arguments]
    lines, _ = run(command)
    return [ast.literal_eval(line.split("changed: ")[1]) for line in lines if "changed: " in line]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_what_close_and_finalize_leave_is_as_it_was() -> None:
    assert changed() == [[], []]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_without_close_and_finalize_it_is_not() -> None:
    for found in changed("unended"):
        assert {"threads", "at exit", "optimizer"} <= {*found}
        assert any(name.startswith("module ") for name in found)
        assert any("_global_optimizer_pre_hooks" in name for name in found)


class Watched:
    """A model and its optimizer, and what has changed since they were made."""

    def __init__(self) -> None:
        self.model = new_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self._before = state(self.model, self.optimizer)

    def changes(self) -> list[str]:
        return differences(self._before, state(self.model, self.optimizer))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.autograd, "backward"),
        (torch.Tensor, "backward"),
        (_BaseDataLoaderIter, "__next__"),
        (DataLoader, "__iter__"),
        (torch.nn.Module, "__call__"),
        (torch.optim.SGD, "step"),
        (torch.amp.GradScaler, "step"),
        (sys, "excepthook"),
        (sys, "exit"),
        (threading, "excepthook"),
        (warnings, "warn"),
    ],
)
def test_a_replaced_function_is_seen(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    watched, plain = Watched(), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: plain(*args, **kwargs))
    assert any(found.endswith(f".{name}") for found in watched.changes())


CHANGES: dict[str, tuple[str, Callable[[Watched, pytest.MonkeyPatch], object]]] = {
    "environment": ("environment", lambda _, patch: patch.setenv("X_TORCHMN", "1")),
    "folder": ("folder", lambda _, patch: patch.chdir("/")),
    "filter of warnings": (
        "warnings",
        lambda _, patch: patch.setattr(
            warnings, "filters", [*warnings.filters[:1], *warnings.filters]
        ),
    ),
    "random numbers": ("random numbers", lambda *_: random.random()),
    "hook of a module": (
        "module 0",
        lambda watched, _: watched.model[0].register_forward_pre_hook(print),
    ),
    "method of a module": (
        "module 0",
        lambda watched, _: vars(watched.model[0]).update(forward=watched.model[0].forward),
    ),
    "hook of a parameter": (
        "parameter 0.weight",
        lambda watched, _: watched.model[0].weight.register_hook(print),
    ),
    "hook of an optimizer": (
        "optimizer",
        lambda watched, _: watched.optimizer.register_step_pre_hook(print),
    ),
    "method of an optimizer": (
        "optimizer",
        lambda watched, _: vars(watched.optimizer).update(step=watched.optimizer.step),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    watched = Watched()
    name, make = CHANGES[change]
    make(watched, monkeypatch)
    assert name in watched.changes()


def test_what_holds_for_the_whole_process_is_seen() -> None:
    """A signal handler, a thread, a setting of torch and global hooks."""
    watched = Watched()
    end, num_threads = threading.Event(), torch.get_num_threads()
    thread = threading.Thread(target=end.wait)
    thread.start()
    handler = signal.signal(signal.SIGUSR1, print)
    torch.set_num_threads(num_threads + 1)
    hooks = register_module_forward_pre_hook(print), register_optimizer_step_pre_hook(print)
    found = watched.changes()
    for hook in hooks:
        hook.remove()
    torch.set_num_threads(num_threads)
    signal.signal(signal.SIGUSR1, handler)
    end.set()
    thread.join()
    assert {"threads", "signal handlers", "torch"} <= {*found}
    assert "_global_forward_pre_hooks" in " ".join(found)
    assert "_global_optimizer_pre_hooks" in " ".join(found)
