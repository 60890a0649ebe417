"""Several passes per step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from .models import built, closure_of, fit, mlp, mlp_and_sgd, steps
from .registry import script
from .worker import Worker


@script("Accumulation over two passes under `no_sync()`")
def accumulate_without_exchange(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for x, y in steps(optimizer, worker.batches()):
        (xs, ys) = x.chunk(2), y.chunk(2)
        with worker.no_sync(optimizer):
            (mse_loss(model(xs[0]), ys[0]) / 2).backward()
        (mse_loss(model(xs[1]), ys[1]) / 2).backward()
    return model


@script("Accumulation over three passes, each of which exchanges")
def accumulate_with_exchange(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for step, (x, y) in enumerate(worker.batches(12)):
        (mse_loss(model(x), y) / 3).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


@script("Two losses and two forward passes, `backward()` after each")
def two_losses(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(model(x), y).backward()
        (0.1 * model(-x).pow(2).mean()).backward()
    return model


@script("Two losses of one graph: `backward(retain_graph=True)`, then `backward()`")
def two_losses_of_one_graph(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in steps(optimizer, worker.batches()):
        outputs = model(x)
        mse_loss(outputs, y).backward(retain_graph=True)
        (0.1 * outputs.abs().mean()).backward()
    return model


@script("Gradient penalty with double backward")
def gradient_penalty(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.05), model)
    for x, y in steps(optimizer, worker.batches()):
        x = x.requires_grad_()
        outputs = model(x)
        slopes = torch.autograd.grad(outputs.sum(), x, create_graph=True)[0]
        (mse_loss(outputs, y) + 0.1 * slopes.pow(2).sum(1).mean()).backward()
    return model


@script("SAM: a step up, a second pass there, a step from where it began")
def sharpness_aware(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    parameters = list(model.parameters())
    for x, y in worker.batches():
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        before = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(0.05 * parameter.grad / norm)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)
        optimizer.step()
    return model


@script("LBFGS with a closure and a line search")
def lbfgs(worker: Worker) -> nn.Module:
    return _lbfgs(worker, worker.batches(4), line_search_fn="strong_wolfe")


def _lbfgs(worker: Worker, batches: Any, weight: Any = None, **options: Any) -> nn.Module:
    model = mlp()
    inner = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4, history_size=5, **options)
    optimizer = worker.optimizer(inner, model, weight=weight)
    for x, y in batches:
        closure = closure_of(optimizer, lambda x=x, y=y: mse_loss(model(x), y))
        worker.log("loss", optimizer.step(closure))
    return model


@script("Wasserstein GAN: critic and generator, weights clamped by `p.data.clamp_()`")
def wasserstein_gan(worker: Worker) -> list[nn.Module]:
    generator = mlp(seed=1)
    critic = built(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), seed=2)
    of_generator = worker.optimizer(torch.optim.RMSprop(generator.parameters(), 0.01), generator)
    of_critic = worker.optimizer(torch.optim.RMSprop(critic.parameters(), 0.01), critic)
    for x, y in worker.batches():
        of_critic.zero_grad()
        (critic(generator(x).detach()).mean() - critic(y).mean()).backward()
        of_critic.step()
        for parameter in critic.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        of_generator.zero_grad()
        (-critic(generator(x)).mean()).backward()
        of_generator.step()
    worker.log("bound", max(p.abs().max().item() for p in critic.parameters()))
    return [generator, critic]


@script("Activation checkpointing with `use_reentrant=False`")
def checkpointing(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in steps(optimizer, worker.batches()):
        hidden = checkpoint(model[:2], x, use_reentrant=False)
        mse_loss(checkpoint(model[2:], hidden, use_reentrant=False), y).backward()
    return model


@script('Activation checkpointing of the model for large batches only, `weight="samples"`')
def checkpointing_weighted_by_samples(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, weight="samples")
    for x, y in steps(optimizer, worker.uneven_batches()):
        outputs = checkpoint(model, x, use_reentrant=False) if len(x) > 3 else model(x)
        mse_loss(outputs, y).backward()
    return model


@script("Activation checkpointing with `use_reentrant=True`, the whole model in segments")
def reentrant_checkpointing(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in steps(optimizer, worker.batches()):
        hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
        mse_loss(checkpoint(model[2:], hidden, use_reentrant=True), y).backward()
    return model


@script("Activation checkpointing with `use_reentrant=True`, a part of the model in a segment")
def reentrant_checkpointing_of_a_part(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in steps(optimizer, worker.batches()):
        hidden = checkpoint(model[1:], model[0](x), use_reentrant=True)
        mse_loss(hidden, y).backward()
    return model


@script("Activation checkpointing with `use_reentrant=True`, one layer in two segments")
def reentrant_checkpointing_of_a_shared_layer(worker: Worker) -> nn.Module:
    model = built(lambda: nn.Linear(5, 5))
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for x, _ in steps(optimizer, worker.batches()):
        hidden = checkpoint(model, x.requires_grad_(), use_reentrant=True)
        checkpoint(model, hidden.tanh(), use_reentrant=True).pow(2).mean().backward()
    return model


@script('Batches of different sizes on the ranks, `weight="samples"`')
def uneven_batches(worker: Worker) -> nn.Module:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return fit(worker, model, sgd, batches=worker.uneven_batches(), weight="samples")


@script('LBFGS with a closure, batches of different sizes, `weight="samples"`')
def lbfgs_weighted_by_samples(worker: Worker) -> nn.Module:
    return _lbfgs(worker, worker.uneven_batches(4), weight="samples")


@script("A graph cut in two: the head's pass first, then the body's with its gradient")
def graph_cut_in_two(worker: Worker) -> nn.Module:
    return _train_cut(worker, "rank", worker.batches())


@script('A graph cut in two, batches of different sizes, `weight="samples"`')
def graph_cut_in_two_weighted_by_samples(worker: Worker) -> nn.Module:
    return _train_cut(worker, "samples", worker.uneven_batches())


def _train_cut(worker: Worker, weight: str, batches: Iterable[tuple[Tensor, Tensor]]) -> nn.Module:
    model = _Cut()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model, weight=weight)
    for x, y in steps(optimizer, batches):
        hidden, cut, outputs = model(x)
        mse_loss(outputs, y).backward()
        hidden.backward(cut.grad)
    return model


class _Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.layers[:2](x)
        cut = hidden.detach().requires_grad_()
        return hidden, cut, self.layers[2:](cut)


@script("Weighted by the number of tokens: `set_weight()`")
def weighted_by_tokens(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in steps(optimizer, worker.batches()):
        tokens = x > -0.5
        errors = (model(x) - y).pow(2).sum(1, keepdim=True) * tokens
        worker.set_weight(optimizer, tokens.sum().item())
        (errors.sum() / tokens.sum()).backward()
    return model


@script('A loss that is a sum over the batch, with `reduction="sum"`, parts of different sizes')
def sum_of_losses(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 0.01), model, reduction="sum")
    for x, y in steps(optimizer, worker.uneven_batches()):
        mse_loss(model(x), y, reduction="sum").backward()
        worker.log("norm", nn.utils.clip_grad_norm_(model.parameters(), 5.0))
    return model


@script("GAN whose discriminator is frozen by `requires_grad_(False)` in the generator's pass")
def gan_frozen_in_turns(worker: Worker) -> list[nn.Module]:
    generator = mlp(seed=1)
    critic = built(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), seed=2)
    of_generator = worker.optimizer(torch.optim.Adam(generator.parameters(), 0.01), generator)
    of_critic = worker.optimizer(torch.optim.Adam(critic.parameters(), 0.01), critic)
    for x, y in worker.batches():
        fake = generator(x)
        critic.requires_grad_(False)
        of_generator.zero_grad()
        (critic(fake) - 1).pow(2).mean().backward()
        of_generator.step()
        critic.requires_grad_(True)
        of_critic.zero_grad()
        ((critic(y) - 1).pow(2).mean() + critic(fake.detach()).pow(2).mean()).backward()
        of_critic.step()
    return [generator, critic]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(x, hidden)
        return self.out(hidden), hidden


@script("Truncated backpropagation through time: two cells per pass, the state detached")
def truncated_backpropagation(worker: Worker) -> nn.Module:
    model = built(_Recurrent)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    hidden = worker.part(torch.zeros(8, 6))
    for x, y in worker.batches():
        hidden = hidden.detach()
        optimizer.zero_grad()
        first, hidden = model(x, hidden)
        second, hidden = model(x.flip(1), hidden)
        (mse_loss(first, y) + mse_loss(second, y.flip(1))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


@script("A closure that clips, given to `Adam`")
def closure_that_clips(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
    for x, y in worker.batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            worker.log("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.2))
            return loss

        optimizer.step(closure)
    return model
