"""Epochs follow the iterator, triggers fire at their ends, rank 0 writes, snapshots resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_pfn_extras.training import extensions, triggers
from torch.utils.data import DataLoader, Subset

from tests.limits import limit
from torchmn import GlobalSampler, SerialIterator, create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.errors import DataError, RankMismatchError, UsageError
from torchmn.testing import run_ranks
from torchmn.train import LogReport, StandardUpdater, Trainer

from .setups import Line, points, sgd


class Counter:
    """An updater that computes nothing."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self.source: SerialIterator[Any] = SerialIterator(range(num_samples), batch_size)
        self.model, self.iteration, self.iterations_per_epoch = Line(), 0, None
        self.optimizer = sgd(self.model)

    epoch = property(lambda self: self.source.epoch)
    epoch_detail = property(lambda self: self.source.epoch_detail)
    previous_epoch_detail = property(lambda self: self.source.previous_epoch_detail)

    def update(self) -> None:
        next(self.source)
        self.iteration += 1

    def finalize(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "source": self.source.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.iteration = state["iteration"]
        self.source.load_state_dict(state["source"])


def fired(trainer: Trainer, trigger: Any) -> list[int]:
    """The iterations after which an extension with this trigger runs."""
    iterations: list[int] = []
    trainer.extend(
        lambda manager: iterations.append(manager.iteration), name="probe", trigger=trigger
    )
    return iterations


@pytest.mark.parametrize(("num_samples", "batch_size"), [(10, 3), (100, 7), (7, 7), (3, 10)])
@pytest.mark.parametrize("period", [1, 2, 0.3])
def test_interval_triggers_fire_where_chainers_did(
    tmp_path: Path, num_samples: int, batch_size: int, period: float
) -> None:
    trainer = Trainer(Counter(num_samples, batch_size), (6, "epoch"), tmp_path)
    iterations = fired(trainer, (period, "epoch"))
    trainer.run()
    period_tenths = round(period * 10)
    passed = [k * batch_size * 10 // (period_tenths * num_samples) for k in range(1000)]
    last = -(-6 * num_samples // batch_size)
    assert iterations == [k for k in range(1, last + 1) if passed[k] != passed[k - 1]]


def test_every_kind_of_trigger_follows(tmp_path: Path) -> None:
    trainer = Trainer(Counter(10, 4), (4, "epoch"), tmp_path)  # epochs end at 3, 5, 8, 10
    manual = fired(trainer, triggers.ManualScheduleTrigger([1, 2.5, 3], "epoch"))
    by_iteration = fired(trainer, (4, "iteration"))
    trainer.extend(lambda manager: manager.observation.update(value=manager.iteration))
    best = fired(trainer, triggers.MaxValueTrigger("value", (2, "epoch")))
    trainer.extend(extensions.LogReport(trigger=(1, "epoch")))

    class Either(triggers.IntervalTrigger):
        """A user's class, with triggers in a list."""

        others = [triggers.IntervalTrigger(1, "epoch"), triggers.IntervalTrigger(9, "iteration")]

        def __call__(self, manager: Any) -> bool:
            return any(other(manager) for other in self.others)

    either = fired(trainer, Either(1, "epoch"))
    trainer.run()
    assert manual == [3, 7, 8]
    assert either == [3, 5, 8, 9, 10]
    assert by_iteration == [4, 8]
    assert best == [5, 10]
    log = json.loads((tmp_path / "log").read_text())
    assert [(row["epoch"], row["iteration"]) for row in log] == [(1, 3), (2, 5), (3, 8), (4, 10)]


def test_errors_reach_the_caller_after_the_end_of_extensions(tmp_path: Path) -> None:
    class Fails(Counter):
        ended = False

        def update(self) -> None:
            super().update()
            if self.iteration == 3:
                raise ArithmeticError("diverged")

        def finalize(self) -> None:
            self.ended = True

    class Probe(extensions.LogReport):
        ended = False

        def finalize(self, manager: Any) -> None:
            self.ended = True
            raise OSError("disk full")  # as a checkpoint that cannot be written

    updater, probe = Fails(10, 4), Probe()
    trainer = Trainer(updater, (4, "epoch"), tmp_path)
    trainer.extend(probe)
    with pytest.raises(OSError, match="disk full") as raised:
        trainer.run()
    assert isinstance(raised.value.__context__, ArithmeticError)
    assert updater.ended
    assert probe.ended
    with pytest.raises(UsageError, match="has run"):
        trainer.run()


# ---- a real network ----


def make(
    comm: Communicator | None, out: Path, kind: str, *, epochs: float = 2, n: int = 22
) -> tuple[Trainer, Line]:
    model = Line()
    optimizer: torch.optim.Optimizer = sgd(model)
    iterator: Any
    if kind == "sampler":
        assert comm is not None
        sampler = GlobalSampler(n, comm, 6, seed=3)
        iterator = DataLoader(points(n), batch_sampler=sampler)
    elif kind == "loader":
        generator = torch.Generator().manual_seed(5)
        iterator = DataLoader(points(n), 6, shuffle=True, generator=generator)
    else:
        iterator = SerialIterator(points(n), 6, seed=2)
    if comm is not None:
        optimizer = create_multi_node_optimizer(optimizer, comm, model, weight="samples")
    updater = StandardUpdater(iterator, optimizer, model)
    return Trainer(updater, (epochs, "epoch"), out, comm=comm), model


@pytest.mark.parametrize("size", [2, 3])
def test_many_ranks_train_as_one(tmp_path: Path, size: int) -> None:
    """The last batch of an epoch has 4 samples: 2 + 2, or 2 + 1 + 1, weighted by samples."""

    def body(comm: Communicator) -> Any:
        trainer, model = make(comm, tmp_path / f"{comm.size}", "sampler")
        trainer.run()
        return model.weight.detach(), trainer.iteration, trainer.epoch

    [(expected, iterations, epochs)] = run_ranks(body, 1)
    for weight, *rest in run_ranks(body, size):
        assert torch.allclose(weight, expected, rtol=1e-12, atol=0)
        assert rest == [iterations, epochs] == [8, 2]


@pytest.mark.parametrize("kind", ["serial", "loader", "sampler"])
@pytest.mark.parametrize("stop_after", [3, 4])
def test_resuming_is_bit_equal(tmp_path: Path, kind: str, stop_after: int) -> None:
    """Epochs have 4 iterations (3.67 for the serial iterator)."""

    def straight(comm: Communicator) -> torch.Tensor:
        trainer, model = make(comm, tmp_path / "straight", kind, epochs=4)
        trainer.run()
        return model.weight.detach()

    def in_two_parts(comm: Communicator) -> torch.Tensor:
        first, _ = make(comm, tmp_path / "parts", kind, epochs=4)
        first._stop_trigger = triggers.IntervalTrigger(stop_after, "iteration")
        if comm.rank == 0:
            first.extend(extensions.snapshot(), trigger=(stop_after, "iteration"))
        first.run()
        comm.barrier()
        second, model = make(comm, tmp_path / "parts", kind, epochs=4)
        if comm.rank == 0:
            second.extend(extensions.snapshot(), trigger=(100, "iteration"))
        second.resume(tmp_path / "parts" / f"snapshot_iter_{stop_after}")
        assert second.iteration == stop_after
        second.run()
        assert second.epoch == 4
        return model.weight.detach()

    for size in (1, 2):
        expected = run_ranks(straight, size)
        assert all(torch.equal(weight, expected[0]) for weight in run_ranks(in_two_parts, size))


def test_elapsed_time_continues(tmp_path: Path) -> None:
    first, _ = make(None, tmp_path, "serial")
    first.run()
    state = first.state_dict()
    assert state["elapsed_time_s"] == pytest.approx(first.elapsed_time, abs=1)
    state["elapsed_time_s"] = 1000.0
    second, _ = make(None, tmp_path, "serial", epochs=3)
    second.load_state_dict(state)
    second.run()
    assert 1000 < second.elapsed_time < 1000 + limit(30)


@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_a_snapshot_that_cannot_be_read_is_an_error_on_all_ranks(
    tmp_path: Path, damage: str
) -> None:
    file = tmp_path / "snapshot"
    if damage == "garbage":
        file.write_bytes(b"\x00" * 100)

    def body(comm: Communicator) -> str:
        trainer, _ = make(comm, tmp_path, "serial")
        with pytest.raises(DataError) as raised:
            trainer.resume(file)
        return str(raised.value)

    texts = run_ranks(body, 2)
    assert str(file) in texts[0]
    assert texts[0] == texts[1]


def test_other_extensions_than_saved_are_refused(tmp_path: Path) -> None:
    trainer, _ = make(None, tmp_path, "serial")
    trainer.run()
    other, _ = make(None, tmp_path, "serial")
    other.extend(extensions.LogReport())
    with pytest.raises(UsageError, match="LogReport"):
        other.load_state_dict(trainer.state_dict())


def test_the_log_has_the_mean_over_ranks(tmp_path: Path) -> None:
    """What is observed differs by rank and iteration, and one rank observes less often."""

    def body(comm: Communicator) -> Any:
        trainer = Trainer(Counter(10, 4), (2, "epoch"), tmp_path, comm=comm)

        def observe(manager: Any) -> None:
            value = 10 * comm.rank + manager.iteration
            manager.observation["main/loss"] = torch.tensor(float(value))
            if comm.rank == 0 or manager.iteration % 2:
                manager.observation["rare"] = value
            manager.observation["text"] = "not a number"

        trainer.extend(observe, priority=1000)
        report = LogReport(comm)
        trainer.extend(report)
        trainer.run()
        return report.log

    first, second = run_ranks(body, 2)[0]
    assert json.loads((tmp_path / "log").read_text()) == [first, second]
    assert first["main/loss"] == (1 + 2 + 3 + 11 + 12 + 13) / 6
    assert second["main/loss"] == (4 + 5 + 14 + 15) / 4
    assert first["rare"] == (1 + 2 + 3 + 11 + 13) / 5
    assert "text" not in first


@pytest.mark.parametrize(
    "make_iterator",
    [
        lambda rank: SerialIterator(points(10 + rank), 4, seed=1),
        lambda rank: DataLoader(Subset(points(9), range(8 + rank)), 4),
    ],
    ids=["iterator", "loader"],
)
def test_ranks_whose_epochs_differ_are_refused(
    tmp_path: Path, make_iterator: Callable[[int], Any]
) -> None:
    def body(comm: Communicator) -> str:
        model = Line()
        optimizer = create_multi_node_optimizer(sgd(model), comm, model)
        updater = StandardUpdater(make_iterator(comm.rank), optimizer, model)
        with pytest.raises(RankMismatchError) as raised:
            Trainer(updater, (1, "epoch"), tmp_path, comm=comm).run()
        return str(raised.value)

    for text in run_ranks(body, 2):
        assert "iterations per epoch" in text
        assert "force_equal_length" in text
