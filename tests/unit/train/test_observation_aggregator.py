"""One value for all ranks in the observation, and stopping by it on all ranks at once."""

import copy
import time
from pathlib import Path
from typing import Any

import pytest
from pytorch_pfn_extras.training import ExtensionsManager

from tests.limits import limit
from torchmn.comm import Communicator
from torchmn.errors import CommunicationError
from torchmn.testing import run_ranks
from torchmn.train import MultiNodeEarlyStoppingTrigger, ObservationAggregator, Trainer
from torchmn.train.evaluation import Ratio

from .setups import Line, sgd
from .test_trainer import Counter


def observed(
    comm: Communicator, out: Path, values: Any, *, num_iterations: int = 4, **options: Any
) -> list[Any]:
    """The value of ``all`` after each iteration; ``values(rank, iteration)`` is observed."""
    trainer = Trainer(Counter(10, 4), (num_iterations, "iteration"), out, comm=comm)

    def observe(manager: Any) -> None:
        value = values(comm.rank, manager.iteration)
        if value is not None:
            manager.observation["own"] = value

    trainer.extend(observe, priority=1000)
    trainer.extend(ObservationAggregator(comm, "own", "all", **options))
    seen: list[Any] = []
    trainer.extend(lambda manager: seen.append(manager.observation.get("all")), name="look")
    trainer.run()
    return seen


def test_ranks_without_a_value(tmp_path: Path) -> None:
    """Where Chainer divided by zero at rank 0 and the others waited forever."""

    def body(comm: Communicator) -> list[Any]:
        return observed(comm, tmp_path, lambda rank, k: k if rank == 1 and k != 2 else None)

    assert run_ranks(body, 2) == [[1.0, None, 3.0, 4.0]] * 2


def test_ratios_count_with_their_denominators(tmp_path: Path) -> None:
    def body(comm: Communicator) -> list[Any]:
        return observed(comm, tmp_path, lambda rank, k: Ratio(rank, 1 + 2 * rank))

    assert run_ranks(body, 2) == [[0.25] * 4] * 2


def test_an_own_aggregator_gets_a_list_per_rank(tmp_path: Path) -> None:
    def body(comm: Communicator) -> list[Any]:
        return observed(
            comm,
            tmp_path,
            lambda rank, k: 10 * rank + k,
            comm_trigger=(2, "iteration"),
            aggregator=lambda lists: max(map(sum, lists)) if len(lists) == 2 else None,
        )

    assert run_ranks(body, 2) == [[None, 23, None, 27]] * 2


def test_an_aggregator_that_raises_ends_all(tmp_path: Path) -> None:
    def body(comm: Communicator) -> Exception | None:
        try:
            observed(comm, tmp_path, lambda rank, k: k, aggregator=lambda lists: 1 / 0)
        except Exception as error:
            return error
        return None

    begin_s = time.monotonic()
    first, second = run_ranks(body, 2)
    assert time.monotonic() - begin_s < limit(10)
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, CommunicationError)
    assert "ZeroDivisionError" in str(second)


def early_stop(comm: Communicator, out: Path, **options: Any) -> tuple[int, list[float]]:
    """Epoch of the end. Rank 0's value falls forever, rank 1's rises: their mean turns at 3."""
    stop = MultiNodeEarlyStoppingTrigger(
        comm, monitor="value", check_trigger=(1, "epoch"), **options
    )
    trainer = Trainer(Counter(8, 4), stop, out, comm=comm)

    def observe(manager: Any) -> None:
        epoch = (manager.iteration - 1) // 2
        manager.observation["value"] = -epoch if comm.rank == 0 else (epoch - 2) ** 2 - 3 * epoch

    trainer.extend(observe, priority=1000)
    trainer.run()
    return trainer.epoch, [trainer.observation["value_aggregated"]]


@pytest.mark.parametrize(("patience", "end"), [(1, 6), (2, 7), (None, 8)])
def test_all_ranks_stop_together(tmp_path: Path, patience: int | None, end: int) -> None:
    """Means of the epochs are 2, -1.5, -4, -5.5, -6, -5.5, -4, -1.5: the best is the fifth."""
    results = run_ranks(lambda comm: early_stop(comm, tmp_path, patience=patience), 2)
    assert [epoch for epoch, _ in results] == [end, end]


def test_it_prints_on_rank_0_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(lambda comm: early_stop(comm, tmp_path, verbose=True, patience=1), 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["early stopping: operator is less", "Epoch 6: early stopping"]


def test_state_and_copies(tmp_path: Path) -> None:
    """Managers of pytorch-pfn-extras copy their stop trigger, which holds a communicator."""

    def body(comm: Communicator) -> None:
        trigger = MultiNodeEarlyStoppingTrigger(comm, monitor="value")
        model = Line()
        manager = ExtensionsManager(
            model, sgd(model), 3, iters_per_epoch=2, out_dir=str(tmp_path), stop_trigger=trigger
        )
        num_iterations = 0
        while not manager.stop_trigger:
            with manager.run_iteration():
                manager.observation["value"] = float(num_iterations)
                num_iterations += 1
        assert num_iterations == 8  # the first epoch is the best, three more are borne
        assert trigger.get_training_length() == (100, "epoch")
        twin = copy.deepcopy(MultiNodeEarlyStoppingTrigger(comm, monitor="value"))
        twin.load_state_dict(trigger.state_dict())
        assert twin.state_dict() == trigger.state_dict()

    run_ranks(body, 2)
