"""As an extension of a Trainer: ChainerMN's names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_pfn_extras.training.extensions import Evaluator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from tests.unit.checkpoint.training import assert_same, names, on_ranks
from torchmn.checkpoint import Best
from torchmn.errors import CheckpointWarning
from torchmn.train import Classifier, LogReport

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def train(
    path: Path, num_ranks: int, num_epochs: int, stop: int | None = None, **options: Any
) -> Any:
    def rank_main(comm: torchmn.Communicator) -> Any:
        network = nn.Linear(5, 2)
        with torch.no_grad():
            network.weight.fill_(0.1)
            network.bias.zero_()
        model = Classifier(network)
        optimizer = torchmn.create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), comm, model
        )
        sampler = torchmn.GlobalSampler(40, comm, 8, 0)
        loader = DataLoader(TensorDataset(X, Y), batch_sampler=sampler)
        updater = torchmn.StandardUpdater(loader, optimizer, model)
        trainer = torchmn.Trainer(updater, (num_epochs, "epoch"), path / "out", comm=comm)
        evaluator = Evaluator(
            DataLoader(TensorDataset(X, Y), 10), model, eval_func=lambda *b: model(*b)
        )
        trainer.extend(torchmn.create_multi_node_evaluator(evaluator, comm))
        log = LogReport(comm)
        trainer.extend(log)
        checkpointer = torchmn.create_multi_node_checkpointer(comm, path, "a run", **options)
        trainer.extend(checkpointer, trigger=(3, "iteration"))
        if stop is not None:
            trainer.extend(stop_at(stop), trigger=(1, "iteration"), priority=-200)
        start = checkpointer.maybe_load(trainer)
        try:
            trainer.run()
        except KeyboardInterrupt:
            return start, [], []
        parameters = [p.detach().clone() for p in model.parameters()]
        accuracies = [entry["validation/main/accuracy"] for entry in log.log]
        return start, parameters, accuracies

    return on_ranks(rank_main, num_ranks)


def stop_at(iteration: int) -> Any:
    def stop(trainer: Any) -> None:
        if trainer.iteration == iteration:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_continues_in_the_middle_of_an_epoch(tmp_path: Path, num_ranks: int) -> None:
    whole = train(tmp_path / "whole", num_ranks, 3)
    train(tmp_path / "parts", num_ranks, 3, stop=7)
    assert names(tmp_path / "parts") == ["step-00000003", "step-00000006"]  # kept on failure
    parts = train(tmp_path / "parts", num_ranks, 3)
    assert [start for start, *_ in parts] == [6] * num_ranks
    assert_same([p[:2] for p in parts], [w[:2] for w in whole])
    assert [p[2] for p in parts] == [w[2] for w in whole]


def test_best_of_the_observation(tmp_path: Path) -> None:
    best = Best("validation/main/accuracy")
    with pytest.warns(CheckpointWarning, match="has no 'validation/main/accuracy'"):
        train(tmp_path, 2, 3, keep=1, best=best)
    assert "step-00000015" in names(tmp_path)


def test_the_loop_of_the_page_runs_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "checkpoints.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        names_of_it: dict[str, Any] = {}
        exec(code, names_of_it)
        names_of_it["comm"].finalize()
    folder = tmp_path / "checkpoints" / "first-try"
    assert sorted(path.name for path in folder.iterdir())[-1] == "step-00000300"
    assert names_of_it["checkpointer"].resumed_from == "step-00000300"
