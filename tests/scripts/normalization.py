"""Batch normalization over ranks, after `convert_batch_norm`."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .memory import _images
from .models import built, fit, steps, take_step, train
from .registry import script
from .worker import Worker


def _normalized(momentum: float | None = 0.1) -> nn.Sequential:
    return built(
        lambda: nn.Sequential(
            nn.Linear(5, 6, bias=False),
            nn.BatchNorm1d(6, momentum=momentum),
            nn.Tanh(),
            nn.Linear(6, 6),
            nn.BatchNorm1d(6),
            nn.Tanh(),
            nn.Linear(6, 3),
        )
    )


def _convolutions() -> nn.Sequential:
    return built(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, bias=False),  # AdamW would enlarge what rounding leaves of it
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(16, 3),
        )
    )


@script("Batch normalization over ranks, statistics included")
def normalized_over_ranks(worker: Worker) -> nn.Module:
    model = worker.across_ranks(_normalized())
    return fit(worker, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


@script('Uneven batches of it, `weight="samples"` and `loss_weight="samples"`')
def normalized_uneven_batches(worker: Worker) -> nn.Module:
    model = worker.across_ranks(_normalized(), loss_weight="samples")
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    return fit(worker, model, sgd, batches=worker.uneven_batches(), weight="samples")


@script("Images in channels last, `AdamW`, converted after the optimizer was made")
def normalized_channels_last(worker: Worker) -> nn.Module:
    model = _convolutions().to(memory_format=torch.channels_last)
    adam = torch.optim.AdamW(model.parameters(), 0.01)
    worker.across_ranks(model)
    images = ((_images(x).to(memory_format=torch.channels_last), y) for x, y in worker.batches())
    return fit(worker, model, adam, batches=images)


@script("Accumulation of its gradients under `no_sync`")
def normalized_accumulation(worker: Worker) -> nn.Module:
    model = worker.across_ranks(_normalized())
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    batches = list(worker.batches())
    for first, second in steps(optimizer, zip(batches[::2], batches[1::2], strict=True)):
        with worker.no_sync(optimizer):
            (mse_loss(model(first[0]), first[1]) / 2).backward()
        (mse_loss(model(second[0]), second[1]) / 2).backward()
    return model


@script("Compiled, uneven batches", is_slow=True)
def normalized_compiled(worker: Worker) -> nn.Module:
    model = worker.across_ranks(_normalized(), loss_weight="samples")
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = worker.optimizer(sgd, model, weight="samples")
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    train(compiled, optimizer, worker.uneven_batches())
    return model


@script("A running average of the model, statistics included (`AveragedModel`)")
def normalized_average(worker: Worker) -> list[nn.Module]:
    model = worker.across_ranks(_normalized())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for x, y in worker.batches():
        take_step(model, optimizer, x, y)
        worker.flush(optimizer)
        average.update_parameters(model)
    return [model, average.module]


@script("Its evaluation in turns with training, and a reset of its statistics")
def normalized_evaluation(worker: Worker) -> nn.Module:
    model = worker.across_ranks(_normalized())
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    held_out, targets = list(worker.batches(9))[8]
    for step, (x, y) in enumerate(worker.batches()):
        model.train()
        take_step(model, optimizer, x, y)
        if step == 4:
            model[1].reset_running_stats()
        model.eval()
        with torch.no_grad():
            worker.log("loss of evaluation", worker.mean(mse_loss(model(held_out), targets)))
    return model


@script("One of its layers frozen: `eval()`, without gradients of its own")
def normalized_frozen(worker: Worker) -> nn.Module:
    model = worker.across_ranks(_normalized())
    model[1].eval().requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return fit(worker, model, torch.optim.SGD(trained, 0.1))


@script("Its state loaded into a plain model in the middle, which then continues")
def normalized_state(worker: Worker) -> nn.Module:
    model: nn.Module = worker.across_ranks(_normalized())
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for step, (x, y) in enumerate(worker.batches()):
        if step == 4:
            worker.flush(optimizer)
            worker.close(optimizer)
            saved = copy.deepcopy(model.state_dict())
            model = _normalized()
            model.load_state_dict(saved)
            worker.across_ranks(model)
            optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
        take_step(model, optimizer, x, y)
    return model


def _weighted(outputs: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """A mean over weighted samples, and what it was divided by."""
    weights = 0.2 + y[:, 0].abs()
    total = weights.sum()
    return (weights * (outputs - y).square().mean(1)).sum() / total, total.item()


@script("Weighted samples, `set_weight()` with the sum of the weights; clipped and averaged")
def normalized_weighted(worker: Worker) -> list[nn.Module]:
    model = worker.across_ranks(_normalized())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    for x, y in worker.uneven_batches():
        optimizer.zero_grad()
        loss, weight = _weighted(model(x), y)
        worker.set_weight(optimizer, weight)
        loss.backward()
        worker.log("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
        worker.flush(optimizer)
        average.update_parameters(model)
    return [model, average.module]


@script("The same with a `GradScaler`, evaluated in turns with training")
def normalized_weighted_scaled(worker: Worker) -> nn.Module:
    model = worker.across_ranks(_normalized())
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    held_out, targets = list(worker.batches(9))[8]
    for x, y in worker.uneven_batches():
        model.train()
        optimizer.zero_grad()
        loss, weight = _weighted(model(x), y)
        worker.set_weight(optimizer, weight)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model.eval()
        with torch.no_grad():
            worker.log("loss of evaluation", worker.mean(mse_loss(model(held_out), targets)))
    return model


@script("The same in two passes per step, each of which exchanges")
def normalized_weighted_accumulation(worker: Worker) -> nn.Module:
    model = worker.across_ranks(_normalized())
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    batches = list(worker.uneven_batches())
    for pair in steps(optimizer, zip(batches[::2], batches[1::2], strict=True)):
        for x, y in pair:
            loss, weight = _weighted(model(x), y)
            worker.set_weight(optimizer, weight)
            (loss / 2).backward()
    return model
