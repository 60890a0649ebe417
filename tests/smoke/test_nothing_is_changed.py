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


def replace(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: plain(*args, **kwargs))


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
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = state(model, optimizer)
    replace(monkeypatch, owner, name)
    assert any(found.endswith(f".{name}") for found in differences(before, state(model, optimizer)))


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "environment": lambda monkeypatch: monkeypatch.setenv("X_TORCHMN", "1"),
    "folder": lambda monkeypatch: monkeypatch.chdir("/"),
    "warnings": lambda monkeypatch: monkeypatch.setattr(
        warnings, "filters", [warnings.filters[0], *warnings.filters]
    ),
    "random numbers": lambda _: random.random(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_process_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = state(model, optimizer)
    CHANGES[name](monkeypatch)
    assert name in differences(before, state(model, optimizer))


def test_a_signal_handler_a_thread_and_a_setting_of_torch_are_seen() -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = state(model, optimizer)
    end, num_threads = threading.Event(), torch.get_num_threads()
    thread = threading.Thread(target=end.wait)
    thread.start()
    handler = signal.signal(signal.SIGUSR1, print)
    torch.set_num_threads(num_threads + 1)
    found = differences(before, state(model, optimizer))
    torch.set_num_threads(num_threads)
    signal.signal(signal.SIGUSR1, handler)
    end.set()
    thread.join()
    assert {"threads", "signal handlers", "torch"} <= {*found}


def test_a_global_hook_is_seen() -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = state(model, optimizer)
    hooks = register_module_forward_pre_hook(print), register_optimizer_step_pre_hook(print)
    found = " ".join(differences(before, state(model, optimizer)))
    for hook in hooks:
        hook.remove()
    assert "_global_forward_pre_hooks" in found
    assert "_global_optimizer_pre_hooks" in found


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("module 0", lambda model, _: model[0].register_forward_pre_hook(print)),
        ("module 0", lambda model, _: vars(model[0]).update(forward=model[0].forward)),
        ("parameter 0.weight", lambda model, _: model[0].weight.register_hook(print)),
        ("optimizer", lambda _, optimizer: optimizer.register_step_pre_hook(print)),
        ("optimizer", lambda _, optimizer: vars(optimizer).update(step=optimizer.step)),
    ],
)
def test_what_is_planted_on_a_model_or_an_optimizer_is_seen(
    name: str, change: Callable[..., object]
) -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = state(model, optimizer)
    change(model, optimizer)
    assert name in differences(before, state(model, optimizer))
