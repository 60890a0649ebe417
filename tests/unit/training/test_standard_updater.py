from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchmn.errors import UsageError
from torchmn.training import StandardUpdater

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


def as_dict(rows: list[Any]) -> dict[str, Tensor]:
    inputs, targets = (torch.stack(part) for part in zip(*rows, strict=True))
    return {"inputs": inputs, "targets": targets}


def test_a_step() -> None:
    assert torch.equal(after_one_step(DataLoader(points(4), 4)), expected())


def test_a_batch_that_is_a_dict() -> None:
    loader = DataLoader(points(4), 4, collate_fn=as_dict)
    assert torch.equal(after_one_step(loader), expected())


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
