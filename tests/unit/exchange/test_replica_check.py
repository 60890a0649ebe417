"""A replica that has diverged is named: by `ReplicaCheck` every N steps, by a checkpoint anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchmn
from tests.ranks import on_ranks
from tests.unit.models import batch, loss_of, mlp, sgd, train, wrap
from torchmn.errors import RankMismatchError, ResultWarning, UsageError
from torchmn.exchange.schedules import PeriodicAverage
from torchmn.testing import run_ranks


def slow_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Steps so short that no bit is lost in rounding."""
    return sgd(model, lr=0.01)


def diverge(model: torch.nn.Sequential) -> None:
    """One bit of one element."""
    with torch.no_grad():
        model[2].bias.view(torch.int64)[0] ^= 1


SCHEDULES = ["every_step", "double_buffering"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(1, 2, 3, 4)
def test_equal_replicas(comm: torchmn.Communicator, schedule: str) -> None:
    model, optimizer = wrap(comm, slow_sgd, schedule=schedule)
    check = torchmn.ReplicaCheck(comm, model, every=2, optimizer=optimizer)
    assert str(check.report()) == "replicas were not compared yet"
    for step in range(5):
        train(model, optimizer, comm.rank, [step])
        check.step_ended()
    report = check.report()
    assert (report.num_checks, report.last_step, report.differences) == (2, 4, ())
    assert str(report) == "replicas were equal in 2 checks up to step 4"


@on_ranks(2, 3, 4)
def test_one_flipped_bit_is_named(comm: torchmn.Communicator) -> None:
    model, optimizer = wrap(comm, slow_sgd)
    check = torchmn.ReplicaCheck(comm, model, every=3)
    for step in range(6):
        train(model, optimizer, comm.rank, [step])
        if step == 4 and comm.rank == 1:
            diverge(model)
        if step < 5:
            check.step_ended()
    with pytest.raises(RankMismatchError) as caught:
        check.step_ended()
    assert check.report().differences[0][0] == 6
    words = str(caught.value)
    assert "after step 6 in '2.bias'" in words
    assert ("rank 1 differs from" if comm.size > 2 else "with no majority") in words


def test_warning_continues_and_the_report_has_gradients_that_were_not_finite() -> None:
    def rank_main(comm: torchmn.Communicator) -> Any:
        model, optimizer = wrap(comm, slow_sgd, on_nonfinite="ignore")
        check = torchmn.ReplicaCheck(
            comm, model, every=1, optimizer=optimizer, on_difference="warn"
        )
        optimizer.zero_grad()
        value = float("nan") if comm.rank == 1 else 1.0
        (loss_of(model, batch(comm.rank, 0)) * value).backward()
        if comm.rank == 1:
            diverge(model)
        check.step_ended()
        return check.report()

    with pytest.warns(ResultWarning, match="not finite before") as warned:
        report = run_ranks(rank_main, 2)[0]
    assert len(warned) == 1  # one rank warns
    assert report.differences[0][1].name == "2.bias"
    assert "rank" in report.nonfinite[0]
    assert report.nonfinite[0] in str(report)


def test_replicas_that_differ_by_design_are_not_compared(tmp_path: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> Any:
        model, optimizer = wrap(comm, slow_sgd, schedule=PeriodicAverage(block_size=1000))
        check = torchmn.ReplicaCheck(comm, model, every=1, optimizer=optimizer)
        checkpointer = torchmn.create_multi_node_checkpointer(comm, tmp_path, "run")
        for step in range(2):
            train(model, optimizer, comm.rank, [step])
            check.step_ended()
        checkpointer.save(2, {"model": model, "optimizer": optimizer})
        checkpointer.finish()
        bare = torchmn.ReplicaCheck(comm, model, every=1)
        with pytest.raises(RankMismatchError):
            bare.step_ended()
        return check.report()

    assert run_ranks(rank_main, 2)[0].num_checks == 0


@pytest.mark.parametrize("check_replicas", [True, False])
def test_at_each_checkpoint(tmp_path: Path, check_replicas: bool) -> None:
    def rank_main(comm: torchmn.Communicator) -> list[str]:
        warned: list[str] = []
        model, optimizer = wrap(comm, slow_sgd)
        state = {"model": model, "optimizer": optimizer}
        checkpointer = torchmn.create_multi_node_checkpointer(
            comm, tmp_path, "run", check_replicas=check_replicas
        )
        train(model, optimizer, comm.rank, [0])
        checkpointer.save(1, state)
        train(model, optimizer, comm.rank, [1])
        if comm.rank == 2:
            diverge(model)
        checkpointer.save(2, state)
        try:
            checkpointer.finish()
        except RankMismatchError as error:
            warned.append(str(error))
        return warned

    warned = run_ranks(rank_main, 3)
    written = sorted(path.name for path in (tmp_path / "run").iterdir())
    words = "after step 2 in 'model/2.bias': rank 2 differs from ranks 0, 1"
    if check_replicas:
        assert all(words in texts[0] for texts in warned)
        assert written == ["step-00000001"]
    else:
        assert written == ["step-00000001", "step-00000002"]
        assert warned == [[], [], []]


@on_ranks(2)
def test_buffers_are_each_ranks_own(comm: torchmn.Communicator) -> None:
    model = torch.nn.BatchNorm1d(3)
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), 0.1), comm, model
    )
    model.running_mean.fill_(comm.rank)
    check = torchmn.ReplicaCheck(comm, model, every=1, optimizer=optimizer)
    check.step_ended()
    assert check.report().num_checks == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, r"every=0 must be a number of steps, at least 1"),
        ({"every": 1.5}, r"every=1.5 must be a number of steps"),
        ({"on_difference": "ignore"}, r"Unknown on_difference 'ignore'. Known: raise, warn"),
    ],
)
def test_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_ranks(lambda comm: torchmn.ReplicaCheck(comm, mlp(), **options), 1)
