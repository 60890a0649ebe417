"""Whole tasks: how one trains, searches and selects."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset, TensorDataset

from .models import blobs, layers, loader_of, seeded, step_by, steps
from .registry import script
from .worker import Worker


def _train(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        step_by(optimizer, F.cross_entropy(model(x), y))


def _score(worker: Worker, model: nn.Module, loader: Any) -> float:
    """The mean loss over all samples of a loader."""
    total, num = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += F.cross_entropy(model(x), y, reduction="sum").item()
            num += len(x)
    total, num = worker.sum_over_ranks(total, num)
    return total / num


@script("Cross-validation: an optimizer and loaders for each fold, the best epoch of each is kept")
def folds(worker: Worker) -> list[nn.Module]:
    (x, y), kept = blobs(45), []
    for fold in range(3):
        is_test = torch.arange(45) % 3 == fold
        model = layers(6, 8, 3, seed=fold)
        optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.3), model)
        train = loader_of(worker, TensorDataset(x[~is_test], y[~is_test]))
        test = loader_of(worker, TensorDataset(x[is_test], y[is_test]))
        best = float("inf")
        for _ in range(2):
            _train(model, optimizer, train)
            score = _score(worker, model, test)
            worker.log("score", score)
            if score < best:
                best, state = score, copy.deepcopy(model.state_dict())
        model.load_state_dict(state)
        kept.append(model)
    return kept


class _Pruned(Exception):
    """A trial that is given up."""


@script("A search over rates: trials are pruned by an exception, or stopped early")
def search(worker: Worker) -> list[nn.Module]:
    (x, y), finished = blobs(45), []

    def trial(rate: float) -> nn.Module:
        model = layers(6, 8, 3)
        optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), rate), model)
        train = loader_of(worker, TensorDataset(x[:30], y[:30]))
        test = loader_of(worker, TensorDataset(x[30:], y[30:]))
        best = float("inf")
        for _ in range(4):
            _train(model, optimizer, train)
            score = _score(worker, model, test)
            worker.log("score", score)
            if score > 3:
                raise _Pruned
            if score > best - 0.05:
                break
            best = score
        return model

    for rate in (0.01, 30.0, 0.3):
        try:
            finished.append(trial(rate))
        except _Pruned:
            worker.log("pruned", rate)
    return finished


@script("FixMatch: iterators begun again at their ends, one forward pass of three batches, a mask")
def fixmatch(worker: Worker) -> list[nn.Module]:
    x, y = blobs(86)
    noise = torch.randn(86, 6, generator=seeded(2))
    loaders = [
        loader_of(worker, TensorDataset(x[:14], y[:14]), 4, drop_last=True),
        loader_of(worker, TensorDataset(x[14:] + 0.1 * noise[14:], x[14:] - noise[14:]), 12),
    ]
    model = layers(6, 8, 3)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    average = AveragedModel(model, avg_fn=lambda average, new, _: 0.9 * average + 0.1 * new)
    iterators = [iter(loader) for loader in loaders]

    def following(number: int) -> list[Tensor]:
        try:
            return next(iterators[number])
        except StopIteration:
            iterators[number] = iter(loaders[number])
            return next(iterators[number])

    for _ in range(8):
        (labelled, labels), (weak, strong) = following(0), following(1)
        outputs = model(torch.cat([labelled, weak, strong]))
        known, *others = outputs.split([len(labelled), len(weak), len(strong)])
        confidence, guess = others[0].detach().softmax(1).max(1)
        losses = F.cross_entropy(others[1], guess, reduction="none") * (confidence > 0.6)
        step_by(optimizer, F.cross_entropy(known, labels) + losses.mean())
        average.update_parameters(model)
    return [model, average]


@script("Reptile: copies are trained on tasks, how far they went becomes `p.grad`")
def reptile(worker: Worker) -> nn.Module:
    model, tasks = layers(1, 8, 1), worker.share(5)
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 1e-2), model)
    for number in steps(optimizer, range(3)):
        worker.set_weight(optimizer, len(tasks))
        for task in tasks:
            x = 6 * torch.rand(10, 1, generator=seeded(10 * number + task))
            learner = copy.deepcopy(model)
            inner = torch.optim.SGD(learner.parameters(), 0.05)
            for _ in range(3):
                step_by(inner, F.mse_loss(learner(x), (x + task).sin()))
            for own, new in zip(model.parameters(), learner.parameters(), strict=True):
                way = (own - new).detach() / len(tasks)
                own.grad = way if own.grad is None else own.grad + way
    return model


class _ManyTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.log_variances = layers(6, 8, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@script(
    "Tasks with missing labels and learned weights: sums divided by the counts of all ranks, "
    "`reduction='sum'`, a penalty divided by their number"
)
def missing_labels(worker: Worker) -> nn.Module:
    x = blobs(45)[0]
    wanted = torch.stack([x.sum(1), x[:, 0] ** 2, x[:, 1].sin()], 1)
    wanted[torch.rand(45, 3, generator=seeded(2)) < 0.5] = torch.nan
    model = _ManyTasks()
    inner = torch.optim.Adam(model.parameters(), 1e-2)
    optimizer = worker.optimizer(inner, model, reduction="sum")
    for own, targets in loader_of(worker, TensorDataset(x, wanted)):
        is_known = ~targets.isnan()
        counts, _ = worker.sum_over_ranks(is_known.sum(0), 0)
        squares = (model(own) - targets.nan_to_num()).square() * is_known
        by_task = squares.sum(0) / counts.clamp(min=1)
        loss = (by_task * (-model.log_variances).exp()).sum()
        step_by(optimizer, loss + model.log_variances.sum() / worker.size)
    return model


@script(
    "Co-teaching: each of two models learns from samples of the batch that the other finds easy"
)
def co_teaching(worker: Worker) -> list[nn.Module]:
    models = layers(6, 8, 3), layers(6, 8, 3, seed=1)
    optimizers = [
        worker.optimizer(torch.optim.Adam(model.parameters(), 1e-2), model, reduction="sum")
        for model in models
    ]
    for x, y in loader_of(worker, TensorDataset(*blobs(45)), 12):
        losses = [F.cross_entropy(model(x), y, reduction="none") for model in models]
        every = [worker.gather(loss.detach()) for loss in losses]
        num = int(0.7 * len(every[0]))
        is_easy = [
            loss.detach() <= all_losses.kthvalue(num).values
            for loss, all_losses in zip(losses, every, strict=True)
        ]
        for optimizer, loss, chosen in zip(optimizers, losses, reversed(is_easy), strict=True):
            step_by(optimizer, loss[chosen].sum() / num)
    return [*models]


class _Reverse(torch.autograd.Function):
    """The gradient changes its sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


@script(
    "Domains: a reversed gradient, three networks and one optimizer, two loaders, `set_weight()`"
)
def domains(worker: Worker) -> nn.Module:
    (x, y), (other, _) = blobs(40), blobs(56, seed=1)
    networks = nn.ModuleList([layers(6, 8), layers(8, 3), layers(8, 1)])
    body, classes, domain = networks
    inner = torch.optim.SGD(networks.parameters(), 0.1, momentum=0.9)
    optimizer = worker.optimizer(inner, networks)
    loaders = (loader_of(worker, TensorDataset(*data)) for data in ((x, y), (other,)))
    for (own, labels), (more,) in zip(*loaders, strict=False):
        features = body(torch.cat([own, more]))
        scores = domain(_Reverse.apply(features))[:, 0]
        is_other = torch.cat([torch.zeros(len(own)), torch.ones(len(more))])
        loss = F.binary_cross_entropy_with_logits(scores, is_other)
        worker.set_weight(optimizer, len(own))
        step_by(optimizer, loss + F.cross_entropy(classes(features[: len(own)]), labels))
    return networks


@script("A population: the worst model takes over the best one's parameters and optimizer's state")
def population(worker: Worker) -> list[nn.Module]:
    x, y = blobs(45)
    train = loader_of(worker, TensorDataset(x[:30], y[:30]))
    test = loader_of(worker, TensorDataset(x[30:], y[30:]))
    models = [layers(6, 8, 3, seed=seed) for seed in range(3)]
    optimizers = [
        worker.optimizer(torch.optim.SGD(model.parameters(), rate, momentum=0.9), model)
        for model, rate in zip(models, (0.001, 0.03, 0.3), strict=True)
    ]
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            _train(model, optimizer, train)
        scores = [_score(worker, model, test) for model in models]
        best, worst = scores.index(min(scores)), scores.index(max(scores))
        models[worst].load_state_dict(models[best].state_dict())
        optimizers[worst].load_state_dict(optimizers[best].state_dict())
        optimizers[worst].param_groups[0]["lr"] *= 1.2
        worker.log("scores", torch.tensor(scores))
    return models


class _Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """Some of the samples, with their numbers."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers, self._data = numbers, blobs(60)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        number = self._numbers[index]
        return self._data[0][number], self._data[1][number], number


@script("Active learning: the samples that all ranks find least certain join the training data")
def active_learning(worker: Worker) -> nn.Module:
    labelled, others = [*range(12)], [*range(12, 60)]
    for _ in range(2):
        model = layers(6, 8, 3)
        optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 3e-2), model)
        _train(model, optimizer, [batch[:2] for batch in loader_of(worker, _Numbered(labelled))])
        found = [torch.zeros(0, 2)]
        with torch.no_grad():
            for x, _, numbers in loader_of(worker, _Numbered(others), 16):
                found.append(torch.stack([model(x).softmax(1).max(1).values, numbers], 1))
        certainty, numbers = worker.gather(torch.cat(found)).unbind(1)
        chosen = sorted(numbers[certainty.argsort()[:5]].int().tolist())
        worker.log("chosen", chosen)
        labelled, others = labelled + chosen, [n for n in others if n not in chosen]
    return model


class _Centers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(3, 4, generator=seeded(2)))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return (features - self.places[labels]).square().sum(1).mean()


@script("Centre loss: a loss with an optimizer of its own, its `p.grad` rescaled before `step()`")
def center_loss(worker: Worker) -> list[nn.Module]:
    body, head, centers = layers(6, 8, 4), layers(4, 3), _Centers()
    model = nn.Sequential(body, head)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    other = worker.optimizer(torch.optim.SGD(centers.parameters(), 0.5), centers)
    for x, y in loader_of(worker, TensorDataset(*blobs(37))):
        features = body(x)
        optimizer.zero_grad()
        other.zero_grad()
        worker.set_weight(optimizer, len(x))
        (F.cross_entropy(head(features), y) + 0.1 * centers(features, y)).backward()
        centers.places.grad.mul_(10)
        optimizer.step()
        other.step()
    return [model, centers]


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = layers(6, 4)
        self.experts = nn.ModuleList(layers(6, 5, 3, seed=seed) for seed in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shares = self.gate(x).softmax(1)
        best, which = shares.max(1)
        outputs = torch.zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = which == number
            if rows.any():
                outputs[rows] = expert(x[rows]) * best[rows, None]
        return outputs, shares, F.one_hot(which, 4).double()


@script("A mixture of experts: some have no samples on a rank; balance over the whole batch")
def experts(worker: Worker) -> nn.Module:
    model = _Experts()
    inner = torch.optim.Adam(model.parameters(), 1e-2)
    optimizer = worker.optimizer(inner, model, weight="rank")
    for x, y in loader_of(worker, TensorDataset(*blobs(37))):
        outputs, shares, chosen = model(x)
        losses = F.cross_entropy(outputs, y, reduction="none")[:, None]
        ones = torch.ones(len(x), 1)
        sums = worker.sum_with_gradient(torch.cat([losses, ones, shares, chosen], 1).sum(0))
        loss, num, of_shares, of_chosen = sums.split([1, 1, 4, 4])
        balance = (of_shares / num * (of_chosen / num)).sum()
        step_by(optimizer, loss[0] / num[0] + 0.4 * balance)
    return model
