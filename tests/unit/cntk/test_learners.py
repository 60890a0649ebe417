"""The learners: the parameters that CNTK 2.7 has after the same minibatches, and what is refused.

``recorded_cntk_2_7.json`` holds them; ``record_cntk_2_7.py`` writes it.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import torchmn.cntk as C
from torchmn.cntk.learner import LearnerSet
from torchmn.errors import UnsupportedError, UsageError

from .learner_cases import SIZES, cases

Array = npt.NDArray[np.float64]
RECORDED = json.loads((Path(__file__).parent / "recorded_cntk_2_7.json").read_text())


def minibatch(index: int) -> tuple[Array, Array]:
    """Inputs (n, 3) and targets (n, 1); the same as in the record."""
    random = np.random.RandomState(index)
    n = SIZES[index]
    return (
        random.randn(n, 3).astype(np.float32).astype(float),
        random.randn(n, 1).astype(np.float32).astype(float),
    )


def by_learner(make: Callable[[list[nn.Parameter]], Any]) -> list[list[float]]:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.3, 0.02]]))
        model.bias.fill_(0.1)
    trainer = C.Trainer(model, C.squared_error, make(list(model.parameters())))
    history = []
    for index in range(len(SIZES)):
        x, y = minibatch(index)
        assert trainer.train_minibatch(
            {"input": torch.tensor(x).float(), "y": torch.tensor(y).float()}
        )
        history.append([*model.weight[0].tolist(), model.bias.item()])
    return history


CASES = cases(C)


@pytest.mark.parametrize("name", CASES)
def test_as_cntk(name: str) -> None:
    np.testing.assert_allclose(by_learner(CASES[name]), RECORDED[name], atol=2e-6)


def test_all_that_is_recorded_is_tried() -> None:
    assert CASES.keys() == RECORDED.keys()


def test_options_of_a_group() -> None:
    """Two groups with weights of their own are two learners."""

    def groups(p: list[nn.Parameter]) -> Any:
        return C.sgd([{"params": p[:1], "l2_regularization_weight": 0.1}, {"params": p[1:]}], 0.08)

    def learners(p: list[nn.Parameter]) -> Any:
        return [C.sgd(p[:1], 0.08, l2_regularization_weight=0.1), C.sgd(p[1:], 0.08)]

    assert by_learner(groups) == by_learner(learners)
    assert by_learner(groups) != by_learner(lambda p: C.sgd(p, 0.08))


def test_learners_that_step_together_call_a_closure_once() -> None:
    """And before any of them steps."""
    model, calls = nn.Linear(1, 1), []

    def closure() -> float:
        before = [model.weight.item(), model.bias.item()]
        loss = model(torch.ones(1, 1)).sum()
        loss.backward()
        calls.append([before, model.weight.requires_grad and loss.requires_grad])
        return loss.item()

    learners = [C.sgd([model.weight], 0.5), torch.optim.SGD([model.bias], 0.25)]
    before = [model.weight.item(), model.bias.item()]
    learners[0].begin_minibatch(1)
    assert LearnerSet(learners).step(closure) == sum(before)
    assert calls == [[before, True]]
    assert [model.weight.item(), model.bias.item()] == [before[0] - 0.5, before[1] - 0.25]


@pytest.mark.parametrize("are_groups", [True, False], ids=["groups", "learners"])
def test_noise_differs_between_groups_and_learners(are_groups: bool) -> None:
    model = torch.nn.Linear(1, 1)
    groups = [{"params": [each]} for each in model.parameters()]
    options: Any = {"lr": 0.0, "gaussian_noise_injection_std_dev": 1.0}
    learners = [
        C.sgd(each, **options) for each in ([groups] if are_groups else [[g] for g in groups])
    ]
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    x = torch.ones(1, 1)
    C.Trainer(model, lambda output: output[:, 0], learners).train_minibatch({"input": x})
    assert model.weight.item() != model.bias.item() != 0


def test_noise_has_its_deviation_and_is_repeatable() -> None:
    def noisy(p: Any) -> Any:
        return C.sgd(p, 0.0, gaussian_noise_injection_std_dev=[0.5, 0.0], epoch_size=None)

    model = nn.Linear(100, 200)
    before = model.weight.detach().clone()
    learner = noisy(model.parameters())
    model(torch.zeros(1, 100)).sum().backward()
    learner.begin_minibatch(1)
    learner.step()
    moved = model.weight.detach() - before
    assert moved.std().item() == pytest.approx(0.5, rel=0.05)
    assert moved.mean().abs().item() < 0.02
    assert by_learner(noisy) == by_learner(noisy)


def test_step_without_a_number_of_samples() -> None:
    learner = C.sgd(nn.Linear(1, 1).parameters(), 0.1)
    with pytest.raises(UsageError, match="begin_minibatch"):
        learner.step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"l1_regularization_weight": -1.0}, "l1_regularization_weight=-1.0"),
        ({"l2_regularization_weight": math.nan}, "l2_regularization_weight=nan"),
        ({"gradient_clipping_threshold_per_sample": 0.0}, "threshold_per_sample=0.0"),
        ({"minibatch_size": -4}, "minibatch_size=-4"),
    ],
)
def test_options_out_of_range(options: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        C.sgd(nn.Linear(1, 1).parameters(), 0.1, **options)


def test_arguments_that_are_refused() -> None:
    with pytest.raises(TypeError, match="'momentum' of sgd"):
        C.sgd(nn.Linear(1, 1).parameters(), 0.1, momentum=0.9)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="no parameters"):
        C.sgd(nn.Identity().parameters(), 0.1)


def test_sparse_gradients() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    dense = nn.Embedding(4, 2)
    dense.weight.data.copy_(table.weight.data)
    for module in (table, dense):
        trainer = C.Trainer(
            module, lambda output: output.pow(2).sum(1), C.sgd(module.parameters(), 0.1)
        )
        assert trainer.train_minibatch({"input": torch.tensor([1, 3, 1])})
    torch.testing.assert_close(table.weight, dense.weight)
    trainer = C.Trainer(
        table, lambda output: output.sum(1), C.momentum_sgd(table.parameters(), 0.1, 0.9)
    )
    with pytest.raises(UnsupportedError, match="sparse=False"):
        trainer.train_minibatch({"input": torch.tensor([1])})


def test_schedules_of_the_script_stay() -> None:
    model = nn.Linear(2, 1)
    saved = C.sgd(model.parameters(), 0.5, l2_regularization_weight=0.1)
    saved.end_minibatch(7)
    learner = C.sgd(model.parameters(), 0.25, l2_regularization_weight=0.2)
    learner.load_state_dict(saved.state_dict())
    assert learner.total_number_of_samples_seen == 7
    assert learner.learning_rate() == 0.25
    assert learner.param_groups[0]["l2_regularization_weight"] == 0.2


def test_a_rate_that_is_set_is_refused() -> None:
    """It would have no effect: by a scheduler of torch, or for one group."""
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="SGD: the learning rate of a group was set to 0.5"):
        C.sgd([{"params": model.parameters(), "lr": 0.5}], 0.1)
    for learner in (C.sgd(model.parameters(), 0.1), C.momentum_sgd(model.parameters(), 0.1, 0.9)):
        scheduler = torch.optim.lr_scheduler.StepLR(learner, 1, 0.1)
        trainer = C.Trainer(
            model, lambda output: output[:, 0], C.data_parallel_distributed_learner(learner)
        )
        minibatch = {"input": torch.ones(3, 2)}
        trainer.train_minibatch(minibatch)
        scheduler.step()
        with pytest.raises(UsageError, match="reset_learning_rate"):
            trainer.train_minibatch(minibatch)


def test_a_new_schedule_is_followed() -> None:
    model = nn.Linear(2, 1)
    learner = C.sgd(model.parameters(), C.learning_rate_schedule([0.2, 0.1], C.UnitType.sample, 3))
    trainer = C.Trainer(model, lambda output: output[:, 0], learner)
    rates = []
    for count in range(3):
        if count == 2:
            learner.reset_learning_rate(0.05)
        trainer.train_minibatch({"input": torch.ones(3, 2)})
        rates.append(learner.param_groups[0]["lr"])
    assert rates == [0.2, 0.1, 0.05]
