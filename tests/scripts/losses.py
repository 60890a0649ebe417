"""Losses that are not a mean over samples alone."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from .models import built, fit, mlp, mlp_and_sgd, steps
from .registry import refused, script
from .worker import Worker


def _penalty(model: nn.Module) -> Tensor:
    return 0.05 * sum(p.square().sum() for p in model.parameters())


@script("A mean over samples, and a penalty on the parameters")
def mean_and_penalty(worker: Worker) -> nn.Module:
    model = mlp()
    return fit(worker, model, loss=lambda x, y: mse_loss(model(x), y) + _penalty(model))


@script('`reduction="sum"`, and a penalty on the parameters, divided by the number of ranks')
def sum_and_penalty(worker: Worker) -> nn.Module:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), 0.005)
    optimizer = worker.optimizer(sgd, model, reduction="sum")
    for x, y in steps(optimizer, worker.batches()):
        (mse_loss(model(x), y, reduction="sum") + _penalty(model) / worker.size).backward()
    return model


@script("A normalizing flow: the log-determinant of a layer once for each sample, a sum")
def flow(worker: Worker) -> nn.Module:
    model = built(lambda: nn.Linear(5, 5))
    with torch.no_grad():
        model.weight.add_(torch.eye(5))
    sgd = torch.optim.SGD(model.parameters(), 0.005)
    optimizer = worker.optimizer(sgd, model, reduction="sum")
    for x, _ in steps(optimizer, worker.uneven_batches()):
        logdet = torch.linalg.slogdet(model.weight).logabsdet
        (model(x).square().sum() / 2 - len(x) * logdet).backward()
    return model


@script('A contrastive loss of all samples, by `torchmn.functions.allgather`, `weight="rank"`')
def contrastive(worker: Worker) -> nn.Module:
    model = mlp()
    adam = torch.optim.Adam(model.parameters(), 0.01)
    optimizer = worker.optimizer(adam, model, weight="rank")
    for x, _ in steps(optimizer, worker.uneven_batches()):
        a, b = (worker.gather_with_gradient(normalize(model(view))) for view in (x, x.flip(1)))
        loss = cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))
        loss.backward()
        worker.log("loss", loss)
    return model


@script("Soft Dice and a mean, both of the whole batch by `torchmn.functions.allreduce`")
def dice(worker: Worker) -> nn.Module:
    model = mlp()
    adam = torch.optim.Adam(model.parameters(), 0.01)
    optimizer = worker.optimizer(adam, model, weight="rank")
    for x, y in steps(optimizer, worker.uneven_batches()):
        p, mask = model(x).sigmoid(), (y > 0).to(x.dtype)
        own = torch.stack([(p * mask).sum(), (p + mask).sum(), (p - mask).square().sum()])
        intersection, total, squares = worker.sum_with_gradient(own)
        number = worker.sum_with_gradient(torch.tensor(float(len(x))))
        loss = 1 - 2 * intersection / total + squares / number
        loss.backward()
        worker.log("loss", loss)
    return model


@script("Cross entropy with class weights and ignored samples, `set_weight()`")
def class_weights_and_ignored(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    weights = torch.tensor([0.2, 1.0, 5.0])
    for x, y in worker.uneven_batches():
        classes = y.argmax(1)
        classes[x[:, 0] > 1] = -100
        optimizer.zero_grad()
        worker.set_weight(optimizer, weights[classes[classes >= 0]].sum().item())
        cross_entropy(model(x), classes, weights).backward()
        optimizer.step()
    return model


def _positive(step: int, x: Tensor) -> Tensor:
    """Few, and none at all in every third step."""
    return x[:, 0] > (0.7 if step % 3 else 9)


@script(
    "A mean over positives, `set_weight(their number)`, which is 0 on a rank or on all; clipped"
)
def positives(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, (x, y) in enumerate(worker.batches()):
        positive = _positive(step, x)
        number = int(positive.sum())
        optimizer.zero_grad()
        worker.set_weight(optimizer, number)
        of_samples = (model(x) - y).square().mean(1)
        scaler.scale(of_samples[positive].sum() / max(number, 1)).backward()
        scaler.unscale_(optimizer)
        worker.log("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
    return model


@script("The same with `set_weight(0)` and no `backward()` where there are none")
def positives_or_no_backward(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for step, (x, y) in enumerate(worker.batches()):
        positive = _positive(step, x)
        optimizer.zero_grad()
        worker.set_weight(optimizer, int(positive.sum()))
        if positive.any():
            mse_loss(model(x[positive]), y[positive]).backward()
        optimizer.step()
    return model


@script("A `GradScaler` and clipping, `skip_backward()` on a rank whose batch has no positives")
def scaled_positives_or_no_backward(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # it has no scale before the first loss
    for x, y in worker.batches():
        positive = x[:, 0] > 0.7  # on one rank in each step at least
        optimizer.zero_grad()
        if positive.any():
            worker.set_weight(optimizer, int(positive.sum()))
            scaler.scale(mse_loss(model(x[positive]), y[positive])).backward()
        else:
            worker.skip_backward(optimizer)
        scaler.unscale_(optimizer)
        worker.log("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
    return model


@script("Two losses weighted by trained variances: `create_multi_node_optimizer(..., [model, v])`")
def trained_variances(worker: Worker) -> list[nn.Module | Tensor]:
    model = mlp()
    v = nn.Parameter(torch.zeros(2))
    adam = torch.optim.Adam([*model.parameters(), v], 0.01)
    optimizer = worker.optimizer(adam, [model, v])
    for x, y in steps(optimizer, worker.batches()):
        found = model(x)
        losses = torch.stack([mse_loss(found[:, 0], y[:, 0]), mse_loss(found[:, 1], y[:, 1])])
        (losses * (-v).exp() + v).sum().backward()
    return [model, v]


@script("A constant of the whole batch in the loss: its largest output, by `allreduce` detached")
def constant_of_all_ranks(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in steps(optimizer, worker.batches()):
        found = model(x)
        size = worker.sum_without_gradient(found.square().sum()).detach()
        mse_loss(found / size.sqrt(), y).backward()
    return model


@script("The loss is averaged by `comm.allreduce(loss)` to be printed, with its graph")
def reduced_to_be_printed(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    total = 0.0
    for x, y in worker.batches():
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        mean = worker.sum_without_gradient(loss) / worker.size
        loss.backward()
        optimizer.step()
        total += mean.item()
        worker.log("loss", f"{mean:.6f}")
    worker.log("total", total)
    return model


@script(
    "A loss that holds the result of `comm.allreduce` of what is trained",
    **refused(
        "comm.allreduce was given a tensor that requires a gradient",
        cure="`torchmn.functions.allreduce`, or `detach()` for a constant",
        on_one_rank=True,
    ),
)
def reduced_in_the_loss(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in steps(optimizer, worker.batches()):
        mean = worker.sum_without_gradient(model(x).mean()) / worker.size
        (mse_loss(model(x), y) + mean.square()).backward()
    return model
