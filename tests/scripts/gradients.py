"""Gradients read, kept and edited."""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import mse_loss

from .models import fit, mlp, mlp_and_sgd, steps, train
from .registry import refused, script
from .worker import Worker


@script("`p.grad.data` is edited in place: decay of weights by hand, gradients centralised")
def edit_through_data(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad.data.add_(parameter.data, alpha=0.01)
            if parameter.dim() > 1:
                parameter.grad.data -= parameter.grad.data.mean(1, keepdim=True)
    return model


@script("`p.grad` is replaced by another tensor: sign SGD")
def replace_gradients(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.01), model)
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.sign()
    return model


@script("`p.grad.data = ...`: the memory of a gradient is exchanged for other memory")
def replace_data_of_gradients(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data * 0.5
    return model


@script("`p.grad = None` for some parameters before `step()`")
def drop_some_gradients(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
    for step, (x, y) in enumerate(steps(optimizer, worker.batches())):
        mse_loss(model(x), y).backward()
        if step % 2:
            model[0].weight.grad = None
    return model


@script("`zero_grad(set_to_none=False)`")
def zero_in_place(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for x, y in worker.batches():
        optimizer.zero_grad(set_to_none=False)
        mse_loss(model(x), y).backward()
        optimizer.step()
    return model


@script("`model.zero_grad()` in place of the optimizer's")
def zero_by_the_model(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for step, (x, y) in enumerate(worker.batches()):
        model.zero_grad(set_to_none=step % 2 == 0)
        mse_loss(model(x), y).backward()
        optimizer.step()
    return model


@script("PCGrad: the gradients of two tasks, projected onto each other")
def pcgrad(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    parameters = list(model.parameters())
    for x, y in worker.batches():
        of_tasks = []
        for loss in ((model(x)[:, :2] - y[:, :2]).pow(2).mean(), (model(x)[:, 2] - 1).abs().mean()):
            optimizer.zero_grad()
            loss.backward()
            of_tasks.append([parameter.grad for parameter in parameters])
        for parameter, a, b in zip(parameters, *of_tasks, strict=True):
            dot = (a * b).sum()
            parameter.grad = a + b - torch.clamp(dot, max=0) * (b / b.pow(2).sum().clamp(1e-9))
        worker.log("dot", dot)
        optimizer.step()
    return model


@script("A tensor hook on a parameter scales its gradient")
def tensor_hook(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    model[0].weight.register_hook(lambda gradient: gradient * 0.3)
    model[4].bias.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1) * 0 + gradient / 2)
    train(model, optimizer, worker.batches())
    return model


def _halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


@script("A post-accumulate hook, registered before wrapping, scales `p.grad` in place")
def hook_before_wrapping(worker: Worker) -> nn.Module:
    model = mlp()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_halve)
    return fit(worker, model)


@script("A post-accumulate hook, registered after wrapping, scales `p.grad` in place")
def hook_after_wrapping(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_halve)
    train(model, optimizer, worker.batches())
    return model


@script("A step hook of the user's optimizer looks at the gradients")
def step_hook(worker: Worker) -> nn.Module:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = worker.optimizer(sgd, model)
    sgd.register_step_pre_hook(
        lambda *args: [worker.log("norm", p.grad.norm()) for p in model.parameters()] and None
    )
    train(model, optimizer, worker.batches())
    return model


@script("Gradients by `torch.autograd.grad`, assigned to `p.grad`")
def gradients_by_hand(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    parameters = list(model.parameters())
    for x, y in worker.batches():
        gradients = torch.autograd.grad(mse_loss(model(x), y), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return model


@script("Gradients made as zeros before training, and zeroed by `p.grad.zero_()`")
def gradients_zeroed_by_hand(worker: Worker) -> nn.Module:
    model = mlp()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    for x, y in worker.batches():
        mse_loss(model(x), y).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.zero_()
    return model


@script("SGD by hand: `p -= rate * p.grad`, the optimizer is never stepped")
def update_by_hand(worker: Worker) -> nn.Module:
    model = mlp()
    worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for x, y in worker.batches():
        model.zero_grad()
        mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return model


@script("`backward(inputs=...)`: gradients of the last layer alone")
def backward_for_some_inputs(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for step, (x, y) in enumerate(steps(optimizer, worker.batches())):
        inputs = None if step % 2 else list(model[4].parameters())
        mse_loss(model(x), y).backward(inputs=inputs)
    return model


@script(
    "`backward(create_graph=True)` and the curvature along a vector, as AdaHessian does",
    **refused(
        "which has no graph",
        "take the gradients by `torch.autograd.grad(loss, parameters, create_graph=True)`",
    ),
)
def curvature(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    parameters = list(model.parameters())
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(model(x), y).backward(create_graph=True)
        gradients = [parameter.grad for parameter in parameters]
        products = torch.autograd.grad(gradients, parameters, gradients)
        for parameter, product in zip(parameters, products, strict=True):
            parameter.grad = parameter.grad.detach() / (1 + product.abs())
    return model


@script(
    "`optimizer.step()` inside `backward()`, one optimizer for each parameter",
    **refused("Call step() after backward()", cure="call `step()` after `backward()`"),
)
def step_inside_backward(worker: Worker) -> nn.Module:
    model = mlp()
    optimizers = {p: worker.optimizer(torch.optim.SGD([p], 0.1), model) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for x, y in worker.batches():
        mse_loss(model(x), y).backward()
    return model


@script("Gradients of single samples by `torch.func`, clipped, their mean assigned to `p.grad`")
def gradients_of_samples(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)

    def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(functional_call(model, parameters, (x,)), y)

    of_samples = vmap(grad(loss_of), in_dims=(None, 0, 0))
    for x, y in worker.batches():
        gradients = of_samples({n: p.detach() for n, p in model.named_parameters()}, x, y)
        squares = [g.flatten(1).pow(2).sum(1) for g in gradients.values()]
        scale = (0.5 / torch.stack(squares).sum(0).sqrt()).clamp(max=1)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.einsum("s,s...->...", scale, gradients[name]) / len(x)
        optimizer.step()
    return model
