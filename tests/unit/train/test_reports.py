"""What rank 0 prints and writes: log, table, plots, snapshots."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchmn import create_multi_node_evaluator, create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.testing import run_ranks
from torchmn.train import (
    AllreducePersistent,
    Classifier,
    StandardUpdater,
    Trainer,
    extend_with_reports,
)

from .setups import sgd
from .test_trainer import Counter


def classifier() -> Classifier:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return Classifier(network)


def images(rank: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(12, 3, generator=generator) + rank
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def train(
    comm: Communicator, out: Path, num_epochs: int = 2, snapshot: Path | None = None, **options: Any
) -> nn.Module:
    from pytorch_pfn_extras.training.extensions import Evaluator

    model = classifier()
    optimizer = create_multi_node_optimizer(sgd(model), comm, model)
    updater = StandardUpdater(DataLoader(images(comm.rank), 4), optimizer, model)
    trainer = Trainer(updater, (num_epochs, "epoch"), out / str(comm.rank), comm=comm)
    evaluator = Evaluator(DataLoader(images(comm.rank), 5), model)
    trainer.extend(create_multi_node_evaluator(evaluator, comm))
    extend_with_reports(trainer, comm, images_per_epoch=24, **options)
    if snapshot is not None:
        trainer.resume(snapshot)
    trainer.run()
    return model


def test_the_speed_after_a_resume_is_that_since_the_last_row(tmp_path: Path) -> None:
    snapshot = tmp_path / "0" / "snapshot_iter_6"
    run_ranks(lambda comm: train(comm, tmp_path), 1)
    run_ranks(lambda comm: train(comm, tmp_path, num_epochs=3, snapshot=snapshot), 1)
    log = json.loads((tmp_path / "0" / "log").read_text())
    speed = 24 / (log[2]["elapsed_time"] - log[1]["elapsed_time"])
    assert log[2]["images/s"] == pytest.approx(speed)


def test_everything_by_rank_0_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = run_ranks(lambda comm: train(comm, tmp_path), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == [
        "accuracy.png",
        "log",
        "loss.png",
        "snapshot_iter_3",
        "snapshot_iter_6",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["epoch", "main/loss", "validation/main/loss"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2"]
    assert "\033" not in "".join(lines)
    log = json.loads((tmp_path / "0" / "log").read_text())
    assert f"{log[1]['main/loss']:g}" == lines[2].split()[1]
    speed = 24 / (log[1]["elapsed_time"] - log[0]["elapsed_time"])
    assert log[1]["images/s"] == pytest.approx(speed)
    saved = torch.load(tmp_path / "0" / "snapshot_iter_6", weights_only=True)["models"]["main"]
    for model in models:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, saved[name]), name


def test_persistents_are_averaged_at_the_end_of_epochs(tmp_path: Path) -> None:
    def body(comm: Communicator) -> list[float]:
        updater = Counter(10, 4)
        updater.model.register_buffer("mean", torch.tensor(0.0))
        trainer = Trainer(updater, (2, "epoch"), tmp_path, comm=comm)

        def drift(manager: Any) -> None:
            updater.model.mean += comm.rank + 1  # type: ignore[operator]

        trainer.extend(drift, priority=1000)
        trainer.extend(AllreducePersistent(updater.model, comm))
        seen: list[float] = []
        trainer.extend(lambda m: seen.append(float(updater.model.mean)), name="look")  # type: ignore[arg-type]
        trainer.run()
        return seen

    first, second = run_ranks(body, 2)
    assert first == [1.0, 2.0, 4.5, 5.5, 7.5]
    assert second == [2.0, 4.0, 4.5, 6.5, 7.5]
