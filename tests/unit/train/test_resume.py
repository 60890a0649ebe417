"""Iterators, logs and trainers on the same and on another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_pfn_extras.training.extension import Extension
from torch.utils.data import DataLoader

from tests.contracts.suites.resume_contracts import described
from torchmn import (
    GlobalSampler,
    MultiprocessParallelUpdater,
    SerialIterator,
    create_multi_node_optimizer,
)
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.errors import UsageError
from torchmn.testing import run_ranks
from torchmn.train import (
    EpochLoader,
    LogReport,
    MultiNodeEarlyStoppingTrigger,
    ObservationAggregator,
    StandardUpdater,
    Trainer,
)

from .setups import Line, points, sgd


def places(size: int) -> list[Any]:
    topology = Topology(("localhost",) * size)
    return [topology.place(rank) for rank in range(size)]


# ---- batches ----


@pytest.mark.parametrize("num_done", range(10))
@pytest.mark.parametrize("has_own_generator", [True, False])
def test_a_pass_that_is_continued_takes_no_random_number(
    num_done: int, has_own_generator: bool
) -> None:
    """A DataLoader draws a number when a pass begins, so later dropout would differ."""

    def body(comm: Communicator) -> None:
        def make() -> tuple[EpochLoader, torch.Generator]:
            own = torch.Generator().manual_seed(7) if has_own_generator else None
            sampler = GlobalSampler(20, comm, 6)
            loader = DataLoader(range(20), batch_sampler=sampler, generator=own)
            return EpochLoader(loader), torch.default_generator if own is None else own

        def draw(source: EpochLoader, generator: torch.Generator) -> list[Any]:
            return [(next(source).tolist(), generator.get_state().tolist()) for _ in range(6)]

        torch.manual_seed(3)
        first, generator = make()
        for _ in range(num_done):
            next(first)
        state, random_state = described(first.state_dict()), torch.get_rng_state()
        expected = draw(first, generator)
        torch.manual_seed(99)
        second, generator = make()
        torch.set_rng_state(random_state)
        second.load_state_dict(state)
        assert draw(second, generator) == expected

    run_ranks(body, 1)


@pytest.mark.parametrize("old", [1, 2, 3, 4])
@pytest.mark.parametrize("new", [1, 2, 3, 4])
def test_shards_continue_as_far_as_they_were(old: int, new: int) -> None:
    """The same number of samples is done, but not the same ones: there is a warning."""
    length, num_steps = 120, 7
    before = [SerialIterator(range(length // old), 4, seed=rank) for rank in range(old)]
    for iterator in before:
        for _ in range(num_steps):
            next(iterator)
    states = [iterator.state_dict() for iterator in before]
    for place in places(new):
        after = SerialIterator(range(length // new), 4)
        after.load_state_dict(after.reshard_state_dict(states, place))
        done = before[0].epoch_detail
        assert after.epoch_detail == pytest.approx(done, abs=new / length)
        assert after.state_dict()["seed"] == place.rank % old
        next(after)
        assert "twice and some not at all" in after.resume_warnings()[0]


def test_a_position_that_a_smaller_shard_does_not_have() -> None:
    before = SerialIterator(range(100), 10, seed=1)
    for _ in range(9):
        next(before)
    after = SerialIterator(range(7), 2)
    after.load_state_dict(after.reshard_state_dict([before.state_dict()], places(1)[0]))
    assert (after.epoch, after.current_position) == (0, 6)


def test_loaders_redistribute_the_batches_that_were_done() -> None:
    before = EpochLoader(DataLoader(range(40), 2))
    for _ in range(9):
        next(before)
    states = [described(before.state_dict())] * 2
    for place in places(3):
        after = EpochLoader(DataLoader(range(26), 2))
        after.load_state_dict(after.reshard_state_dict(states, place))
        assert after.epoch_detail == pytest.approx(6 / 13)
        assert "loader has no GlobalSampler" in after.resume_warnings()[0]


# ---- observations ----


def test_what_was_observed_counts_once() -> None:
    """Rank i of W has seen i + 1, ..., and the new ranks one value each."""

    def observe(comm: Communicator, states: Any) -> Any:
        report = LogReport(comm)
        aggregator = ObservationAggregator(comm, "x")
        stop = MultiNodeEarlyStoppingTrigger(comm, monitor="x")
        if states is not None:
            each: Any
            for each, name in ((report, "log"), (aggregator, "aggregator"), (stop, "stop")):
                theirs = [state[name] for state in states]
                each.load_state_dict(described(each.reshard_state_dict(theirs, comm)))
        values = [float(comm.rank + 1)] * (2 if states is None else 1)
        for value in values:
            report._summary.add({"x": value})
            aggregator._history.append(value)
            stop._aggregator._history.append(value)
        history = comm.allgather_obj(aggregator.state_dict()["history"])
        state = {
            "log": report.state_dict(),
            "aggregator": aggregator.state_dict(),
            "stop": stop.state_dict(),
        }
        return described(state), report._summary.compute_mean()["x"], sum(history, [])

    for old in (1, 2, 3):
        first = run_ranks(lambda comm: observe(comm, None), old)
        states = [state for state, _, _ in first]
        for new in (1, 2, 4):
            expected = [r + 1.0 for r in range(old) for _ in range(2)]
            expected += [r + 1.0 for r in range(new)]
            for _, mean, history in run_ranks(
                lambda comm, states=states: observe(comm, states), new
            ):
                assert mean == pytest.approx(sum(expected) / len(expected), rel=1e-14)
                assert sorted(history) == sorted(expected)


# ---- all together ----


class Save(Extension):
    """Keeps states of the trainer."""

    needs_model_state = True

    def __init__(self) -> None:
        self.states: list[Any] = []

    def __call__(self, manager: Any) -> None:
        self.states.append(described(manager.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        return {}


def make(comm: Communicator, out: Path, epochs: int) -> tuple[Trainer, Line]:
    model = Line()
    sampler = GlobalSampler(22, comm, 6, seed=3)
    loader = DataLoader(points(22), batch_sampler=sampler)
    optimizer = create_multi_node_optimizer(sgd(model), comm, model, weight="samples")
    trainer = Trainer(StandardUpdater(loader, optimizer, model), (epochs, "epoch"), out, comm=comm)
    trainer.extend(LogReport(comm, trigger=(5, "iteration")))
    trainer.extend(ObservationAggregator(comm, "main/loss", "loss", comm_trigger=(3, "iteration")))
    return trainer, model


@pytest.mark.parametrize(("old", "new"), [(2, 2), (1, 3), (3, 2), (2, 4)])
@pytest.mark.parametrize("stop_after", [3, 6])
def test_a_trainer_continues(tmp_path: Path, old: int, new: int, stop_after: int) -> None:
    """In mid-epoch, between two entries of the log; bit-identical on the same number of ranks."""

    def straight(comm: Communicator) -> Any:
        trainer, model = make(comm, tmp_path / "straight", 3)
        trainer.run()
        return model.weight.detach(), trainer.get_extension("LogReport").log

    def first(comm: Communicator) -> Any:
        trainer, _ = make(comm, tmp_path / "first", 3)
        saved = Save()
        trainer.extend(saved, name="save", trigger=(stop_after, "iteration"), priority=-200)
        trainer.run()
        return saved.states[0]

    def second(comm: Communicator) -> Any:
        trainer, model = make(comm, tmp_path / "second", 3)
        same = old == new
        mine = states[comm.rank] if same else trainer.reshard_state_dict(states, comm)
        trainer.load_state_dict(described(mine))
        assert trainer.iteration == stop_after
        assert trainer.resume_warnings() == []
        trainer.run()
        return model.weight.detach(), trainer.get_extension("LogReport").log

    expected, log = run_ranks(straight, old)[0]
    states = run_ranks(first, old)
    for weight, theirs in run_ranks(second, new):
        if old == new:
            assert torch.equal(weight, expected)
        assert torch.allclose(weight, expected, rtol=1e-12, atol=0)
        assert [entry["iteration"] for entry in theirs] == [entry["iteration"] for entry in log]
        if old == new:
            assert [e["main/loss"] for e in theirs] == [e["main/loss"] for e in log]


def test_another_number_of_devices_is_refused() -> None:
    def updater(size: int) -> MultiprocessParallelUpdater:
        model = Line()
        parts = [SerialIterator(points(24 // size), 2, seed=rank) for rank in range(size)]
        return MultiprocessParallelUpdater(parts, sgd(model), model, devices=["cpu"] * size)

    state = described(updater(3).state_dict())
    with pytest.raises(UsageError, match="saved with 3 devices, and there are 2 now"):
        updater(2).load_state_dict(state)
