"""Norms and clipping."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from .models import mlp, mlp_and_sgd, steps, take_step
from .registry import script
from .worker import Worker


@script("A plain loop: `zero_grad()`, `backward()`, `step()`; the mean loss is logged")
def plain_loop(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for x, y in worker.batches():
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        worker.log("loss", worker.mean(loss))
    return model


@script("`clip_grad_norm_(model.parameters())`, its norm logged")
def clip_by_norm(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(model(x), y).backward()
        worker.log("norm", clip_grad_norm_(model.parameters(), 0.5))
    return model


@script("`clip_grad_value_(model.parameters())`")
def clip_by_value(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(model(x), y).backward()
        clip_grad_value_(model.parameters(), 0.05)
    return model


@script("Norms of gradients and parameters are logged after `step()`")
def log_norms_after_step(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in worker.batches():
        take_step(model, optimizer, x, y)
        for name, parameter in model.named_parameters():
            worker.log(f"gradient of {name}", parameter.grad.norm())
            worker.log(name, parameter.norm())
    return model


@script("Clipping through `optimizer.param_groups`, each group by a norm of its own")
def clip_each_group(worker: Worker) -> nn.Module:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2:].parameters()}]
    optimizer = worker.optimizer(torch.optim.SGD(groups, 0.05), model)
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(model(x), y).backward()
        for group in optimizer.param_groups:
            clip_grad_norm_(group["params"], 0.3)
    return model


@script("A head is trained: the optimizer has a part of the model, all of the model is clipped")
def clip_more_than_is_trained(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.SGD(model[4].parameters(), 0.1), model)
    for x, y in worker.batches():
        model.zero_grad()
        mse_loss(model(x), y).backward()
        worker.log("norm", clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return model
