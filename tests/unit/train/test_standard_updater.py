from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from torchmn import create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.data import EmptyBatchCollate, GlobalSampler
from torchmn.errors import UsageError
from torchmn.nn import convert_batch_norm
from torchmn.testing import run_ranks
from torchmn.train import StandardUpdater

from .setups import Line, points, sgd


def after_one_step(iterator: Any, **options: Any) -> Tensor:
    model = Line()
    updater = StandardUpdater(iterator, sgd(model), model, **options)
    updater.update()
    assert updater.iteration == 1
    return model.weight.detach()


def expected() -> Tensor:
    model = Line()
    model(*points(4)[:]).backward()
    sgd(model).step()
    return model.weight.detach()


def test_a_step() -> None:
    assert torch.equal(after_one_step(DataLoader(points(4), 4)), expected())


def test_gradients_do_not_add_up() -> None:
    model = Line()
    updater = StandardUpdater(DataLoader(points(4), 4), sgd(model, lr=0.0), model)
    updater.update()
    once = model.weight.grad.clone()  # type: ignore[union-attr]
    updater.update()
    assert torch.equal(model.weight.grad, once)  # type: ignore[arg-type]


def test_another_loss() -> None:
    model = Line()
    updater = StandardUpdater(
        DataLoader(points(4), 4),
        sgd(model, lr=1.0, momentum=0.0),
        model,
        loss_func=lambda inputs, targets: model.weight.sum(),
    )
    updater.update()
    assert model.weight.tolist() == [-0.5, -1.25]


def test_the_batch_is_moved() -> None:
    seen: list[Any] = []

    def converter(batch: Any, device: Any) -> Any:
        seen.append(device)
        return batch

    after_one_step(DataLoader(points(4), 4), device="cpu", converter=converter)
    assert seen == ["cpu"]


def test_a_model_that_returns_no_loss() -> None:
    with pytest.raises(UsageError, match="returned a NoneType"):
        after_one_step(DataLoader(points(4), 4), loss_func=lambda *batch: None)


def test_a_batch_without_samples_changes_nothing_on_one_process() -> None:
    empty = (torch.zeros(0, 2, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
    assert torch.equal(after_one_step([empty]), Line().weight.detach())


def test_a_batch_without_samples_runs_batch_normalization_over_ranks() -> None:
    """As one process on whole batches, with a last one of fewer samples than ranks."""

    def network() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                values = torch.linspace(-1, 1, parameter.numel(), dtype=parameter.dtype)
                parameter.copy_(values.view_as(parameter))
        return model

    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))

    def rank_main(comm: Communicator) -> dict[str, Tensor]:
        model = convert_batch_norm(network(), comm, loss_weight="samples")
        optimizer = create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), 0.1), comm, model, weight="samples"
        )
        sampler = GlobalSampler(len(data), comm, global_batch=4, seed=1)
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=EmptyBatchCollate(data))
        updater = StandardUpdater(
            loader, optimizer, model, loss_func=lambda a, b: mse_loss(model(a), b)
        )
        for _ in range(6):
            updater.update()
        return model.state_dict()

    (alone,) = run_ranks(rank_main, 1)
    for state in run_ranks(rank_main, 3):
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
