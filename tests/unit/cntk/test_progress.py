"""CNTK's lines, at CNTK's minibatches.

The expected texts were printed by CNTK 2.7 for the same numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from torchmn.cntk import logging, progress
from torchmn.cntk.logging import (
    ProgressPrinter,
    ProgressWriter,
    TensorBoardProgressWriter,
    TrainingSummaryProgressCallback,
    log_number_of_parameters,
)
from torchmn.errors import UnsupportedError, UsageError


class Clock:
    """Seconds that pass only when asked."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (logging, progress):
        monkeypatch.setattr(module, "time", clock)
    return clock


def train(writer: ProgressWriter, num: int, *, samples: int = 64, metric: bool = True) -> None:
    """Minibatches with the mean losses 1, 2, 3, ... and half of the samples wrong."""
    for index in range(1, num + 1):
        writer.update_training(samples, float(index * samples), samples / 2 if metric else None)


def test_lines_of_minibatches_and_epochs(clock: Clock, capsys: Any) -> None:
    printer = ProgressPrinter(freq=2, tag="Training", num_epochs=160)
    train(printer, 5)
    clock.now_s += 20.1
    printer.write_training_summary()
    train(printer, 2)

    assert capsys.readouterr().out.splitlines() == [
        " Minibatch[   1-   2]: loss = 1.500000 * 128, metric = 50.00% * 128;",
        " Minibatch[   3-   4]: loss = 3.500000 * 128, metric = 50.00% * 128;",
        "Finished Epoch[1 of 160]: [Training] loss = 3.000000 * 320, metric = 50.00% * 320 20.100s "
        "( 15.9 samples/s);",
        " Minibatch[   1-   2]: loss = 1.500000 * 128, metric = 50.00% * 128;",
    ]


def test_the_geometric_schedule_prints_columns(capsys: Any) -> None:
    printer = ProgressPrinter(freq=0)
    train(printer, 8, samples=16)
    printer.write_training_summary()  # has no line in columns

    assert capsys.readouterr().out.splitlines() == [
        " average      since    average      since      examples",
        "    loss       last     metric       last              ",
        " ------------------------------------------------------",
        "        1          1        0.5        0.5            16",
        "        2        2.5        0.5        0.5            48",
        "        4        5.5        0.5        0.5           112",
    ]


def test_the_first_minibatches_have_their_own_lines(capsys: Any) -> None:
    train(ProgressPrinter(freq=4, first=2), 8)

    lines = [line.split(":")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        f"Minibatch[{first:4d}-{last:4d}]" for first, last in [(1, 1), (2, 2), (3, 4), (5, 8)]
    ]


def test_no_frequency_prints_summaries_only(clock: Clock, capsys: Any) -> None:
    printer = ProgressPrinter(metric_is_pct=False)
    train(printer, 3)
    printer.write_training_summary()
    printer.write_training_summary()  # nothing was trained since

    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Finished Epoch[1]: loss = 2.000000 * 192, metric = 0.500000 * 192 ")


def test_lines_of_evaluations(capsys: Any) -> None:
    printer = ProgressPrinter(test_freq=2)
    for _ in range(3):
        printer.update_test(64, 16.0)
    printer.write_test_summary()
    printer.update_test(10, 1.0)
    printer.write_test_summary()

    assert capsys.readouterr().out.splitlines() == [
        " Evaluation Minibatch[   1-   2]: metric = 25.00% * 128;",
        "Finished Evaluation [1]: Minibatch[1-3]: metric = 25.00% * 192;",
        "Finished Evaluation [2]: Minibatch[1-1]: metric = 10.00% * 10;",
    ]


def test_lines_of_synchronizations(capsys: Any) -> None:
    printer = ProgressPrinter(distributed_freq=2)
    for _ in range(4):
        printer.update_distributed_sync(1600)

    assert (
        capsys.readouterr().out.splitlines()
        == ["Distributed training: #Syncs elapsed = 2, #Samples elapsed = 3200"] * 2
    )


def test_heartbeats_are_ten_seconds_apart(clock: Clock, capsys: Any) -> None:
    printer = ProgressPrinter(gen_heartbeat=True, num_epochs=8)
    for seconds in (0, 9, 1, 5):  # CNTK prints 0.00% at all times
        clock.now_s += seconds
        train(printer, 1)
    printer.write_training_summary()
    clock.now_s += 10
    train(printer, 1)

    lines = [line for line in capsys.readouterr().out.splitlines() if "PROGRESS" in line]
    assert lines == ["PROGRESS: 0.00%", "PROGRESS: 0.00%", "PROGRESS: 12.50%"]


def test_each_rank_has_its_file_which_is_continued(tmp_path: Path, capsys: Any) -> None:
    for _ in range(2):  # a training and its continuation
        for rank in range(2):
            printer = ProgressPrinter(log_to_file=tmp_path / "new" / "log", rank=rank)
            printer.write("Learning rate per minibatch", 0.1)

    for rank in range(2):
        file = tmp_path / "new" / f"logrank{rank}"
        assert file.read_text() == "Learning rate per minibatch: 0.1\n" * 2
        assert f"Redirecting log to file {file}" in capsys.readouterr().out or rank


def test_sums_on_a_device_are_added_without_reading_them() -> None:
    class Unread(torch.Tensor):
        def __float__(self) -> float:
            raise AssertionError("a minibatch without a line has waited for the device")

    writer = ProgressWriter(freq=100)
    loss = torch.ones(()).as_subclass(Unread)
    writer.update_training(64, loss, loss)
    writer.update_training(64, loss, loss)


def test_a_resumed_printer_continues_its_lines(clock: Clock, capsys: Any) -> None:
    whole = ProgressPrinter(freq=3, num_epochs=4)
    train(whole, 7)
    clock.now_s += 3
    whole.write_training_summary()
    train(whole, 4)
    clock.now_s += 1
    state = whole.state_dict()
    train(whole, 2)
    clock.now_s += 1
    whole.write_training_summary()
    expected = capsys.readouterr().out.splitlines()[-2:]

    resumed = ProgressPrinter(freq=3, num_epochs=4)
    clock.now_s += 50  # until the job was started again
    resumed.load_state_dict(state)
    train(resumed, 2)
    clock.now_s += 1
    resumed.write_training_summary()

    assert capsys.readouterr().out.splitlines() == expected
    assert resumed.total_training_updates() == 13
    assert expected[1].startswith("Finished Epoch[2 of 4]")


def test_a_callback_gets_the_sums_of_each_summary() -> None:
    calls: list[tuple[Any, ...]] = []
    writer = TrainingSummaryProgressCallback(50, lambda *arguments: calls.append(arguments))
    for _ in range(2):
        train(writer, 2, samples=10)
        writer.write_training_summary()

    assert calls == [(0, 30.0, 10.0, 20), (1, 30.0, 10.0, 20)]


@pytest.mark.parametrize("freq", [-1, 0.5, "3"])
def test_a_frequency_must_be_a_number_of_minibatches(freq: Any) -> None:
    with pytest.raises(UsageError, match=r"^test_freq=.* must be a number of minibatches"):
        ProgressPrinter(test_freq=freq)


def test_the_number_of_parameters(capsys: Any) -> None:
    log_number_of_parameters(torch.nn.Linear(3, 2), trace_level=1)
    assert capsys.readouterr().out == (
        "Training 8 parameters in 2 parameter tensors.\n\n\t(2, 3)\n\t(2,)\n"
    )


# ---- TensorBoard ----


class Events:
    """Stands for torch's SummaryWriter."""

    made: list[Events] = []

    def __init__(self, folder: str) -> None:
        self.values: list[tuple[str, float, int]] = []
        self.is_closed = False
        Events.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values.append((name, value, step))

    def flush(self) -> None:
        assert not self.is_closed

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Events]:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Events  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Events, "made", [])
    return Events.made


def test_only_rank_0_writes_events(events: list[Events], tmp_path: Path) -> None:
    writers = [TensorBoardProgressWriter(2, tmp_path, rank) for rank in range(3)]
    for writer in writers:
        train(writer, 5, samples=10)
        writer.write_training_summary()
        writer.update_test(8, 2.0)
        writer.write_test_summary()
        writer.close()

    (held,) = events
    assert held.is_closed
    assert held.values == [
        ("minibatch/avg_loss", 1.5, 2),
        ("minibatch/avg_metric", 0.5, 2),
        ("minibatch/avg_loss", 3.5, 4),
        ("minibatch/avg_metric", 0.5, 4),
        ("summary/avg_loss", 3.0, 1),
        ("summary/avg_metric", 0.5, 1),
        ("minibatch/test_avg_metric", 0.25, 5),
    ]


def test_events_of_an_evaluation_without_training(events: list[Events], tmp_path: Path) -> None:
    writer = TensorBoardProgressWriter(log_dir=tmp_path)
    writer.update_test(8, 2.0)
    writer.write_test_summary()
    assert events[0].values == [("summary/test_avg_metric", 0.25, 1)]


def test_missing_tensorboard_is_an_error_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UnsupportedError, match="pip install tensorboard"):
        TensorBoardProgressWriter(log_dir=tmp_path)
    TensorBoardProgressWriter(log_dir=tmp_path, rank=1)  # needs nothing
    with pytest.raises(UsageError, match="freq=0"):
        TensorBoardProgressWriter(0)


def test_a_file_of_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    writers = [TensorBoardProgressWriter(1, tmp_path, rank) for rank in range(2)]
    for writer in writers:
        train(writer, 1)
        writer.close()
    (file,) = tmp_path.iterdir()
    assert b"minibatch/avg_loss" in file.read_bytes()
