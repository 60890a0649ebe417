"""Parameters that get other memory."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from .models import convolutions, mlp, mlp_and_sgd, take_step, train
from .registry import script
from .worker import Worker

F32 = 32 * torch.finfo(torch.float32).eps
IN_F32 = "sums in float32 are rounded in another order"


def _images(x: Tensor) -> Tensor:
    squares = torch.einsum("bi,bj->bij", x, x)[:, None, :, :].repeat(1, 3, 1, 1)
    return nn.functional.pad(squares, (0, 1, 0, 1))


def _train_convolutions(worker: Worker, *, change_at: int | None) -> nn.Module:
    model = convolutions()
    if change_at is None:
        model = model.to(memory_format=torch.channels_last)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    for step, (x, y) in enumerate(worker.batches()):
        if step == change_at:
            model = model.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        mse_loss(model(_images(x).to(memory_format=torch.channels_last)), y).backward()
        optimizer.step()
    return model


@script("`model.to(memory_format=torch.channels_last)` before wrapping")
def channels_last_before(worker: Worker) -> nn.Module:
    return _train_convolutions(worker, change_at=None)


@script("`model.to(memory_format=torch.channels_last)` in the middle of training")
def channels_last_in_the_middle(worker: Worker) -> nn.Module:
    return _train_convolutions(worker, change_at=5)


def _train_and_change(
    worker: Worker, change: Callable[[nn.Module], None], at: int = 5
) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for step, (x, y) in enumerate(worker.batches(10)):
        if step == at:
            change(model)
        optimizer.zero_grad()
        mse_loss(model(x.to(model[0].weight.dtype)), y.to(model[0].weight.dtype)).backward()
        optimizer.step()
    return model


@script("`model.half(); model.double()` in the middle: the values are rounded, the memory is new")
def half_and_back(worker: Worker) -> nn.Module:
    return _train_and_change(worker, lambda model: model.half().double())


@script(
    "`model.float()` in the middle of training: parameters of another type",
    tolerance=F32,
    why_tolerance=IN_F32,
)
def float_in_the_middle(worker: Worker) -> nn.Module:
    return _train_and_change(worker, lambda model: model.float())


@script("`model.double()` after wrapping a float32 model", tolerance=F32, why_tolerance=IN_F32)
def double_after_wrapping(worker: Worker) -> nn.Module:
    model = mlp().float()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    model.double()
    train(model, optimizer, worker.batches())
    return model


def _give_other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@script("`p.data = p.data.clone()` for every parameter in the middle of training")
def data_replaced(worker: Worker) -> nn.Module:
    return _train_and_change(worker, _give_other_memory)


def _swap(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.half().double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@script("Swapped parameters (`set_swap_module_params_on_conversion`)")
def parameters_swapped(worker: Worker) -> nn.Module:
    return _train_and_change(worker, _swap)


@script("A layer is replaced in the middle, and its parameters are given to a new optimizer")
def layer_replaced(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for step, (x, y) in enumerate(worker.batches(12)):
        if step == 6:
            model[4] = copy.deepcopy(mlp(seed=5)[4])
            optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
        take_step(model, optimizer, x, y)
    return model


@script("`model.share_memory()` after wrapping")
def memory_shared(worker: Worker) -> nn.Module:
    return _train_and_change(worker, lambda model: model.share_memory())
