"""The learners against CNTK's formulas, written again here in plain NumPy.

``recorded_cntk_2_7.json`` holds what CNTK 2.7 itself made of the same minibatches: the formulas
below agree with it, so that neither they nor the learners are wrong in the same way.
``record_cntk_2_7.py`` writes it.
"""

from __future__ import annotations

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
Update = Callable[[Array, Array, dict[str, Any], float, int], Array]
RECORDED = json.loads((Path(__file__).parent / "recorded_cntk_2_7.json").read_text())


def minibatch(index: int) -> tuple[Array, Array]:
    """Inputs (n, 3) and targets (n, 1); the same as in the record."""
    random = np.random.RandomState(index)
    n = SIZES[index]
    return (
        random.randn(n, 3).astype(np.float32).astype(float),
        random.randn(n, 1).astype(np.float32).astype(float),
    )


# ---- the formulas, for the sum g of the gradients of n samples and the rate r for it ----


def plain(w: Array, g: Array, s: dict[str, Any], r: float, n: int) -> Array:
    return w - r * g


def with_momentum(m: Callable[[int], float], *, gain: bool = True, ahead: bool = False) -> Update:
    def update(w: Array, g: Array, s: dict[str, Any], r: float, n: int) -> Array:
        new = (1 - m(n) if gain else 1) * r * g
        s["v"] = m(n) * s.get("v", 0) + new
        return w - (m(n) * s["v"] + new if ahead else s["v"])

    return update


def adam(
    m: Callable[[int], float],
    v: Callable[[int], float],
    *,
    gain: bool = True,
    eps: float = 1e-8,
    largest: bool = False,
) -> Update:
    def update(w: Array, g: Array, s: dict[str, Any], r: float, n: int) -> Array:
        s["t"] = s.get("t", 0) + 1
        s["a"] = m(n) * s.get("a", 0) + (1 - m(n) if gain else 1) * g
        if largest:
            s["b"] = np.maximum(v(n) * s.get("b", 0), np.abs(g))
            root, correction = s["b"], 1 / (1 - m(n) ** s["t"])
        else:
            s["b"] = v(n) * s.get("b", 0) + (1 - v(n)) * g * g
            root = np.sqrt(s["b"])
            correction = math.sqrt(1 - v(n) ** s["t"]) / (1 - m(n) ** s["t"])
        return w - r * correction * s["a"] / (root + eps)

    return update


def adagrad(*, averages: bool = True) -> Update:
    def update(w: Array, g: Array, s: dict[str, Any], r: float, n: int) -> Array:
        s["b"] = s.get("b", 0) + g * g
        factor = 1 / np.sqrt(s["b"] + 1e-16)
        return w - r / (factor.mean() if averages else 1) * factor * g

    return update


def rmsprop(*, averages: bool = True) -> Update:
    gamma, inc, dec, high, low = 0.9, 1.2, 0.7, 10, 0.01

    def update(w: Array, g: Array, s: dict[str, Any], r: float, n: int) -> Array:
        if not s:
            s.update(b=g * g, p=np.full_like(g, 0.02), sign=np.zeros_like(g))
        s["b"] = gamma * s["b"] + (1 - gamma) * g * g
        same = s["sign"] * np.sign(g) > 0
        s["p"] = np.where(same, np.minimum(s["p"] * inc, high), np.maximum(s["p"] * dec, low))
        s["sign"] = np.sign(g)
        factor = s["p"] / np.sqrt(s["b"] + 1e-6)
        return w - r / (factor.mean() if averages else 1) * factor * g

    return update


def by_hand(
    update: Update,
    rate: Callable[[int, int], float] = lambda n, seen: 0.02,
    *,
    l1: float = 0.0,
    l2: float = 0.0,
    clip: float = math.inf,
    truncates: bool = True,
    is_mean: bool = False,
) -> list[list[float]]:
    """The parameters of a linear model after each minibatch."""
    weights = [np.array([[0.5], [-0.3], [0.02]]), np.array([0.1])]
    states: list[dict[str, Any]] = [{}, {}]
    history, seen = [], 0
    for index, n in enumerate(SIZES):
        x, y = minibatch(index)
        error = x @ weights[0] + weights[1] - y
        sums = [2 * x.T @ error, 2 * error.sum(0)]
        r = rate(n, seen)
        for j, g in enumerate(sums):
            count = n
            if is_mean:
                g, count = g / n, 1
            if truncates:
                g = np.clip(g, -clip * count, clip * count)
            elif (norm := np.sqrt((g**2).sum())) > clip * count:
                g = g * (clip * count / norm)
            g = g + l2 * count * weights[j]
            w = update(weights[j], g, states[j], r, n)
            weights[j] = np.sign(w) * np.maximum(0, np.abs(w) - r * l1 * count)
        seen += n
        history.append([*weights[0].ravel(), weights[1][0]])
    return history


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


def tau(samples: float) -> Callable[[int], float]:
    return lambda n: math.exp(-n / samples)


def constant(m: float) -> Callable[[int], float]:
    return lambda n: m


def of_minibatch(n: int, seen: int) -> float:
    return 0.08 / n


def of_eight(n: int, seen: int) -> float:
    return 0.08 / 8


def changing(n: int, seen: int) -> float:
    return [0.02, 0.01, 0.04][min(seen // 6, 2)]


EXPECTED: dict[str, list[list[float]]] = {
    "sgd_sample": by_hand(plain),
    "sgd_minibatch": by_hand(plain, of_minibatch),
    "sgd_float": by_hand(plain, of_minibatch),
    "sgd_ref8": by_hand(plain, of_eight),
    "sgd_ref8_learner": by_hand(plain, of_eight),
    "sgd_l2_sample": by_hand(plain, l2=0.1),
    "sgd_l2_minibatch": by_hand(plain, of_minibatch, l2=0.1),
    "sgd_l1_sample": by_hand(plain, l1=0.1),
    "sgd_l1_minibatch": by_hand(plain, of_minibatch, l1=0.1),
    "sgd_trunc": by_hand(plain, clip=0.3),
    "sgd_norm": by_hand(plain, clip=0.3, truncates=False),
    "sgd_norm_mb": by_hand(plain, of_minibatch, clip=0.3, truncates=False),
    "sgd_norm_l2": by_hand(plain, clip=0.3, truncates=False, l2=0.1),
    "sgd_mean": by_hand(plain, is_mean=True),
    "sgd_mean_clip_l2": by_hand(plain, is_mean=True, clip=0.1, l2=0.1),
    "sgd_mean_l1": by_hand(plain, is_mean=True, l1=0.1),
    "schedule_pairs": by_hand(plain, changing),
    "sweeps": by_hand(plain),
    "mom_sample": by_hand(with_momentum(constant(0.9))),
    "mom_minibatch": by_hand(with_momentum(constant(0.9)), of_minibatch),
    "mom_time": by_hand(with_momentum(tau(20))),
    "mom_time_mb": by_hand(with_momentum(tau(20)), of_minibatch),
    "mom_ref8": by_hand(with_momentum(lambda n: 0.9 ** (n / 8))),
    "mom_learner_mb": by_hand(with_momentum(lambda n: 0.9 ** (n / 8)), of_eight),
    "mom_nogain": by_hand(with_momentum(constant(0.9), gain=False)),
    "mom_l1l2": by_hand(with_momentum(constant(0.9)), l1=0.1, l2=0.2),
    "mom_mean": by_hand(with_momentum(constant(0.9)), is_mean=True),
    "nag_sample": by_hand(with_momentum(constant(0.9), ahead=True)),
    "nag_nogain": by_hand(with_momentum(constant(0.9), gain=False, ahead=True)),
    "nag_mb": by_hand(with_momentum(tau(20), ahead=True), of_minibatch),
    "nag_lr_changes": by_hand(with_momentum(constant(0.9), ahead=True), changing),
    "adam_var": by_hand(adam(constant(0.9), constant(0.99))),
    "adam_var_nogain": by_hand(adam(constant(0.9), constant(0.99), gain=False)),
    "adam_eps": by_hand(adam(constant(0.9), constant(0.99), eps=0.1)),
    "adam_mb_eps": by_hand(adam(constant(0.9), constant(0.99), eps=0.1), of_minibatch),
    "adam_time": by_hand(adam(tau(20), tau(200)), of_minibatch),
    "adam_mean": by_hand(adam(constant(0.9), constant(0.99), eps=0.1), is_mean=True),
    "adam_mb_mean": by_hand(
        adam(constant(0.9), constant(0.99), eps=0.1), lambda n, seen: 0.08, is_mean=True
    ),
    "adam_lr_changes": by_hand(adam(constant(0.9), constant(0.99)), changing),
    "adamax": by_hand(adam(constant(0.9), constant(0.99), largest=True)),
    "adagrad": by_hand(adagrad()),
    "adagrad_mb": by_hand(adagrad(), of_minibatch),
    "adagrad_noave": by_hand(adagrad(averages=False)),
    "adagrad_mean": by_hand(adagrad(), is_mean=True),
    "rmsprop": by_hand(rmsprop()),
    "rmsprop_mb": by_hand(rmsprop(), of_minibatch),
    "rmsprop_noave": by_hand(rmsprop(averages=False)),
    "rmsprop_mean_mb": by_hand(rmsprop(), lambda n, seen: 0.08, is_mean=True),
}
"""By hand, for the learners of `learner_cases`; two are compared with the record only."""
CASES = cases(C)


@pytest.mark.parametrize("name", CASES)
def test_formula(name: str) -> None:
    found = by_learner(CASES[name])
    if name in EXPECTED:
        np.testing.assert_allclose(found, EXPECTED[name], atol=2e-6)
    np.testing.assert_allclose(found, RECORDED[name], atol=2e-6)


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


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="'momentum' of sgd"):
        C.sgd(nn.Linear(1, 1).parameters(), 0.1, momentum=0.9)  # type: ignore[call-arg]


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


def test_no_parameters() -> None:
    with pytest.raises(UsageError, match="no parameters"):
        C.sgd(nn.Identity().parameters(), 0.1)
