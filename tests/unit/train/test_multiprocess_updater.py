"""Two processes on CPU devices equal one on the union of their batches; failures are reported."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.limits import limit
from tests.unit.train.setups import Line, points, sgd
from torchmn import (
    MultiprocessParallelUpdater,
    SerialIterator,
    Trainer,
    create_multi_node_optimizer,
    split_dataset_n_random,
)
from torchmn.errors import LaunchError, PeerLostError, UnsupportedError, UsageError
from torchmn.testing import run_ranks

SCRIPT = Path(__file__).with_name("multiprocess_script.py")
CPUS = {"main": "cpu", "gpu1": "cpu"}


class Troubled(Line):
    """Does something bad in its third batch, on a worker only."""

    def __init__(self, trouble: str = "") -> None:
        super().__init__()
        self.trouble = trouble
        self.main_pid = os.getpid()
        self.num_calls = 0

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.num_calls += 1
        if os.getpid() != self.main_pid and self.num_calls == 3:
            if self.trouble == "raise":
                raise ArithmeticError("the loss of this worker is not a number")
            if self.trouble == "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs, targets)


def iterators(n: int = 22, num_parts: int = 2) -> list[Any]:
    parts = split_dataset_n_random(points(n), num_parts, seed=0)
    return [SerialIterator(part, 4, seed=rank) for rank, part in enumerate(parts)]


def make_updater(model: Line, optimizer: Any = None, **options: Any) -> MultiprocessParallelUpdater:
    return MultiprocessParallelUpdater(
        options.pop("iterators", None) or iterators(),
        optimizer or sgd(model, weight_decay=0.01),
        model,
        **{"devices": CPUS, "timeout_s": limit(20), **options},
    )


def one_process(num_steps: int, **options: Any) -> tuple[Tensor, list[list[float]]]:
    """Parameters and each part's losses of one process on the union of both parts' batches."""
    model = Line()
    optimizer = sgd(model, **{"weight_decay": 0.01, **options})
    losses = []
    sources = iterators()
    for _ in range(num_steps):
        batches = [next(source) for source in sources]
        losses.append([float(model(*batch).detach()) for batch in batches])
        union = [torch.cat(part) for part in zip(*batches, strict=True)]
        optimizer.zero_grad()
        model(*union).backward()
        optimizer.step()
    return model.weight.detach(), losses


@pytest.mark.processes
@pytest.mark.timeout(180)
class TestTraining:
    def test_two_devices_equal_one_process_on_the_union(self, tmp_path: Path) -> None:
        """Also when resumed in mid-epoch by new processes, after 4 of 7 iterations of 11 / 4."""
        expected, losses = one_process(7)
        model = Line()
        threads_before = torch.get_num_threads()
        first = Trainer(make_updater(model), (4, "iteration"), tmp_path)
        seen: list[Any] = []
        first.extend(lambda manager: seen.append(dict(manager.observation)), name="look")
        states: list[Any] = []
        first.extend(lambda manager: states.append(manager.updater.state_dict()), name="save")
        first.run()
        assert [s["main/loss"] for s in seen] == pytest.approx(
            [sum(pair) / 2 for pair in losses[:4]], rel=1e-12
        )
        assert torch.get_num_threads() == threads_before

        second_model = Line()
        optimizer = sgd(second_model, weight_decay=0.01)
        second_model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(first.updater.optimizer.state_dict())
        updater = make_updater(second_model, optimizer)
        updater.load_state_dict(states[-1])
        second = Trainer(updater, (7, "iteration"), tmp_path)
        second.extend(lambda manager: seen.append(dict(manager.observation)), name="look")
        second.run()
        assert (updater.iteration, updater.epoch) == (7, 2)
        assert torch.allclose(second_model.weight, expected, rtol=1e-12, atol=0)
        assert [s["main/loss"] for s in seen[4:]] == pytest.approx(
            [sum(pair) / 2 for pair in losses[4:]], rel=1e-12
        )
        assert optimizer.param_groups[0]["lr"] == 0.05

    @pytest.mark.parametrize("num_devices", [1, 2])
    def test_a_parameter_without_gradient_on_any_rank_is_not_decayed(
        self, tmp_path: Path, num_devices: int
    ) -> None:
        model = Line()
        model.unused = torch.nn.Parameter(torch.ones(3))
        devices = ["cpu"] * num_devices
        updater = make_updater(model, iterators=iterators(22, num_devices), devices=devices)
        Trainer(updater, (2, "iteration"), tmp_path).run()
        assert model.unused.tolist() == [1, 1, 1]
        assert model.unused.grad is None

    @pytest.mark.parametrize(
        ("trouble", "message"),
        [("raise", "ArithmeticError: the loss of this worker is not a number"), ("die", "SIGKILL")],
    )
    def test_failed_worker_ends_training_with_a_report(
        self, tmp_path: Path, trouble: str, message: str
    ) -> None:
        trainer = Trainer(make_updater(Troubled(trouble)), (9, "iteration"), tmp_path)
        begin_s: list[float] = []
        trainer.extend(lambda manager: begin_s.append(time.monotonic()), name="clock")
        with pytest.raises(PeerLostError) as raised:
            trainer.run()
        assert time.monotonic() - begin_s[-1] < limit(15)  # less than that of an exchange
        assert trainer.iteration == 2
        assert "rank 0 is 'gpu1' on cpu" in str(raised.value)
        assert message in str(raised.value)
        assert ("in forward" in str(raised.value)) == (trouble == "raise")

    def test_a_model_that_workers_cannot_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Odd(Line):
            pass

        Odd.__module__, Odd.__qualname__ = "no_such_file", "Odd"
        module = ModuleType("no_such_file")
        module.Odd = Odd  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "no_such_file", module)
        updater = make_updater(Odd())
        with pytest.raises(LaunchError, match="no_such_file"):
            updater.update()
        updater.finalize()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
class TestScript:
    def test_error_without_a_guard(self) -> None:
        done = subprocess.run(
            [sys.executable, SCRIPT, "unguarded"],
            capture_output=True,
            text=True,
            timeout=limit(170),
            check=False,
        )
        assert done.returncode == 1
        assert 'if __name__ == "__main__":' in done.stderr
        assert "Traceback" not in done.stderr

    def test_killing_main_leaves_no_orphan(self) -> None:
        with subprocess.Popen(
            [sys.executable, SCRIPT], stdout=subprocess.PIPE, text=True
        ) as process:
            watchdog = threading.Timer(limit(170), process.kill)
            watchdog.start()
            line = process.stdout.readline()  # type: ignore[union-attr]
            process.kill()
            watchdog.cancel()
        processes = [int(pid) for pid in line.split()]
        assert len(processes) == 3  # launcher, agent, worker
        deadline = time.monotonic() + limit(10)
        while any(map(psutil.pid_exists, processes)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in processes if psutil.pid_exists(pid)]


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises((UsageError, UnsupportedError)) as raised:
        make()
    return str(raised.value)


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"devices": {"gpu0": "cpu"}}, "a dict with 'main'"),
            ({"devices": []}, "with main first"),
            ({"devices": ["cpu", 0]}, "cpu, cuda:0. All must be GPUs or all CPUs"),
            ({"devices": ["cuda", 0]}, "Name each GPU once"),
            ({"devices": ["cpu"] * 3}, "2 iterators for 3"),
            ({"iterators": [DataLoader(points(4)), DataLoader(points(5))]}, "[4, 5]"),
            ({"optimizer": sgd(Line())}, "not in the model"),
        ],
    )
    def test_what_does_not_fit_together(self, options: dict[str, Any], words: str) -> None:
        assert words in refusal(lambda: make_updater(Line(), **options))

    def test_a_multi_node_optimizer(self) -> None:
        def body(comm: Any) -> str:
            model = Line()
            optimizer = create_multi_node_optimizer(sgd(model), comm, model)
            return refusal(lambda: make_updater(model, optimizer))

        assert "plain optimizer" in run_ranks(body, 1)[0]

    def test_what_cannot_be_pickled(self) -> None:
        updater = make_updater(Line(), loss_func=lambda *batch: None)
        assert "must be picklable" in refusal(updater.update)
        updater.finalize()

    def test_an_updater_that_has_ended(self) -> None:
        updater = make_updater(Line())
        updater.finalize()
        assert "has ended" in refusal(updater.update)
