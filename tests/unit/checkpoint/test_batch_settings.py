"""The global batch in a checkpoint's manifest, and the warning about another one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from tests.unit.checkpoint.training import on_ranks, saved, with_warnings
from tests.unit.models import fill
from torchmn.checkpoint.storage import FolderStorage
from torchmn.checkpoint.writer import read_manifest
from torchmn.data import GlobalSampler
from torchmn.data.batch_settings import BatchSettings
from torchmn.train import Classifier
from torchmn.train.large_batch import BatchGrowth, GlobalBatch, LinearScaling

NUM_SAMPLES = 60
Make = Callable[[torchmn.Communicator], GlobalBatch]


def batch_of(global_batch: int, **options: Any) -> Make:
    return lambda comm: GlobalBatch(global_batch, comm=comm, **options)


class Training:
    """A model whose rate is for a batch of 6, or follows the batch by linear scaling."""

    def __init__(self, comm: torchmn.Communicator, make: Make, *, scales: bool) -> None:
        self.batch = make(comm)
        self.data = torch.linspace(-1, 1, NUM_SAMPLES).reshape(-1, 1)
        model = fill(nn.Linear(1, 1))
        self.inner = torch.optim.SGD(model.parameters(), 0.06)
        self.optimizer = torchmn.create_multi_node_optimizer(self.inner, comm, model)
        sampler = self.batch.sampler(NUM_SAMPLES, seed=1)
        self.loader = DataLoader(TensorDataset(self.data), batch_sampler=sampler)
        self.model = model
        self.schedule = LinearScaling(self.optimizer, self.batch, base_batch=6) if scales else None
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": self.optimizer,
            "sampler": sampler,
            **({} if self.schedule is None else {"schedule": self.schedule}),
        }

    def step(self) -> None:
        (x,) = next(iter(self.loader))
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()


def save(path: Path, num_ranks: int, make: Make, *, scales: bool = False) -> None:
    def rank_main(comm: torchmn.Communicator) -> None:
        training = Training(comm, make, scales=scales)
        training.step()
        saved(comm, path, 1, training.state)

    on_ranks(rank_main, num_ranks)


def resumed(
    path: Path, num_ranks: int, make: Make, *, scales: bool = False
) -> tuple[list[str], float]:
    """The warnings, of rank 0 alone, and the rate of the second step after that."""

    def rank_main(comm: torchmn.Communicator) -> tuple[list[str], float]:
        training = Training(comm, make, scales=scales)
        checkpointer, warned = with_warnings(comm, path)
        assert checkpointer.resume(training.state) == 1
        training.step()
        return warned, training.inner.param_groups[0]["lr"]

    (warned, rate), *others = on_ranks(rank_main, num_ranks)
    assert others == [([], rate)] * (num_ranks - 1)
    return warned, rate


def saved_batches(path: Path) -> dict[str, BatchSettings]:
    return read_manifest(FolderStorage(path / "a run"), "step-00000001").batches


def test_the_manifest_has_the_batch_and_how_it_was_divided(tmp_path: Path) -> None:
    save(tmp_path, 2, batch_of(13, local_batch=4), scales=True)
    expected = BatchSettings(
        global_batch=13, initial=13, shares=[7, 6], local_batch=4, accumulation=2, epoch_steps=5
    )
    assert saved_batches(tmp_path) == {"sampler": expected, "schedule": expected}
    manifest = json.loads((tmp_path / "a run/step-00000001/manifest.json").read_text())["manifest"]
    assert manifest["world_size"] == 2
    assert manifest["batches"]["sampler"]["shares"] == [7, 6]


def test_a_batch_that_grows_is_saved_as_it_is_then(tmp_path: Path) -> None:
    save(tmp_path, 2, batch_of(6, growth=BatchGrowth([6], 2, unit="samples")))
    found = saved_batches(tmp_path)["sampler"]
    assert (found.initial, found.global_batch, found.shares) == (6, 12, [6, 6])
    assert found.growth == "BatchGrowth([6], factor=2, unit='samples')"


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (2, 3), (1, 2)])
def test_the_same_batch_says_nothing_on_any_ranks_in_any_passes(
    tmp_path: Path, before: int, after: int
) -> None:
    save(tmp_path, before, batch_of(12))
    assert resumed(tmp_path, after, batch_of(12, local_batch=3)) == ([], 0.06)


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize(("scales", "rate"), [(False, 0.06), (True, 0.3)])
def test_another_batch_is_reported_once_with_what_follows(
    tmp_path: Path, after: int, scales: bool, rate: float
) -> None:
    """The learning rate of the steps that follow is as the warning has it."""
    save(tmp_path, 2, batch_of(6), scales=scales)
    warned, found = resumed(tmp_path, after, batch_of(30), scales=scales)
    assert warned == [
        "the checkpoint of step 1 was saved with a global batch of 6 samples, and training "
        "continues with 30 samples: a step has 5 times the samples, an epoch has 2 steps in place "
        "of 10, and learning rates stay as they were, unless LinearScaling or SquareRootScaling "
        "scales them with the batch. Give 6 samples to train as before."
    ]
    assert found == pytest.approx(rate)


def test_another_growth_is_reported(tmp_path: Path) -> None:
    save(tmp_path, 2, batch_of(6))
    warned, _ = resumed(tmp_path, 2, batch_of(6, growth=BatchGrowth([1])))
    assert len(warned) == 1
    assert "continues with 6 samples and BatchGrowth([1], factor=2" in warned[0]
    assert "the batch grows differently" in warned[0]


def test_objects_that_know_no_batch_and_older_checkpoints_say_nothing(tmp_path: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> list[str]:
        counted = GlobalBatch(6, comm=comm, growth=BatchGrowth([1]))  # epochs of unknown length
        state = {"batch": counted, "model": nn.Linear(1, 1)}
        checkpointer = saved(comm, tmp_path, 1, state)
        warned: list[str] = []
        checkpointer._warn = warned.append
        checkpointer.resume({**state, "batch": GlobalBatch(8, comm=comm)})
        return warned

    assert on_ranks(rank_main, 2) == [[], []]
    assert saved_batches(tmp_path) == {}


def test_a_trainer_and_a_sampler_of_its_own(tmp_path: Path) -> None:
    def rank_main(comm: torchmn.Communicator, global_batch: int) -> list[str]:
        model = Classifier(nn.Linear(5, 2))
        optimizer = torchmn.create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), 0.1), comm, model
        )
        data = TensorDataset(torch.ones(20, 5), torch.zeros(20, dtype=torch.long))
        loader = DataLoader(data, batch_sampler=GlobalSampler(20, comm, global_batch))
        updater = torchmn.StandardUpdater(loader, optimizer, model)
        trainer = torchmn.Trainer(updater, (1, "epoch"), None, comm=comm)
        checkpointer, warned = with_warnings(comm, tmp_path)
        checkpointer.maybe_load(trainer)
        checkpointer.save(1, {"trainer": trainer})
        checkpointer.finish()
        return warned

    assert on_ranks(lambda comm: rank_main(comm, 5), 2) == [[], []]
    expected = BatchSettings(global_batch=5, initial=5, shares=[3, 2], epoch_steps=4)
    assert saved_batches(tmp_path) == {"trainer": expected}
    warned, other = on_ranks(lambda comm: rank_main(comm, 10), 2)
    assert "an epoch has 2 steps in place of 4" in warned[0]
    assert other == []
