"""Copies and files of a model while its optimizer is open."""

import copy
import io
import pickle
import threading

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel

from .models import mlp_and_sgd, steps, take_step
from .registry import script
from .worker import Worker

# Ranks are threads here, and `ast.parse` of Python 3.11 fails at times in two threads at once: "AST
# constructor recursion depth mismatch".
_parsing = threading.Lock()


def _best_of(worker: Worker, copied: object, weight: str = "rank") -> list[nn.Module]:
    """Keeps a copy of the model of every third step, and trains on."""
    model, optimizer = mlp_and_sgd(worker, weight=weight)
    copies = []
    for step, (x, y) in enumerate(worker.batches(10)):
        take_step(model, optimizer, x, y)
        if step % 3 == 2:
            copies.append(copied(model))
    return [model, *copies]


def _pickled(model: nn.Module) -> nn.Module:
    text = pickle.dumps(model)
    if b"torchmn" in text:
        raise AssertionError("the pickle of the model names torchmn")
    return pickle.loads(text)


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    if b"torchmn" in file.getvalue():
        raise AssertionError("the file of the model names torchmn")
    file.seek(0)
    return torch.load(file, weights_only=False)


@script("`copy.deepcopy(model)` of the best model so far")
def deepcopy_of_the_model(worker: Worker) -> list[nn.Module]:
    return _best_of(worker, copy.deepcopy)


@script("`pickle.dumps(model)`: it holds nothing of torchmn")
def pickle_of_the_model(worker: Worker) -> list[nn.Module]:
    return _best_of(worker, _pickled, "samples")


@script("`torch.save(model)`: it holds nothing of torchmn")
def file_of_the_model(worker: Worker) -> list[nn.Module]:
    return _best_of(worker, _saved, "samples")


@script('`AveragedModel(model)` made in each epoch, with `weight="samples"`')
def averaged_model_made_later(worker: Worker) -> list[nn.Module]:
    return _best_of(worker, AveragedModel, "samples")


@script("`torch.jit.script(model)` after training")
def scripted(worker: Worker) -> list[nn.Module]:
    def compiled(model: nn.Module) -> nn.Module:
        with _parsing:
            return torch.jit.script(model)

    return _best_of(worker, compiled, "samples")


def _train_and_trace(worker: Worker, *, on_one_rank: bool = False) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, weight="samples")
    for step, (x, y) in enumerate(steps(optimizer, worker.batches())):
        if step % 3 == 1 and (worker.rank == 0 or not on_one_rank):
            torch.jit.trace(model, x[:1], check_trace=False)
        mse_loss(model(x), y).backward()
    return model


@script("`torch.jit.trace(model)` during training, as TensorBoard's `add_graph` does")
def traced(worker: Worker) -> nn.Module:
    return _train_and_trace(worker)


@script("`torch.jit.trace(model)` on rank 0 during training")
def traced_on_rank_0(worker: Worker) -> nn.Module:
    return _train_and_trace(worker, on_one_rank=True)


@script("A copy of the model is trained further without torchmn")
def copy_trained_alone(worker: Worker) -> list[nn.Module]:
    model, *copies = _best_of(worker, copy.deepcopy)
    alone = copies[-1]
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    x, y = torch.ones(2, 5), torch.zeros(2, 3)
    for _ in range(3):
        take_step(alone, optimizer, x, y)
    return [model, alone]


@script("`torch.save(p.grad)` writes the gradient, not more")
def file_of_a_gradient(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(model(x), y).backward()
        for name, parameter in model.named_parameters():
            file = io.BytesIO()
            torch.save(parameter.grad, file)
            file.seek(0)
            loaded = torch.load(file)
            worker.log(name, loaded)
            worker.log("bytes", loaded.untyped_storage().nbytes())
    return model


@script("A gradient's `.numpy()` is kept over the next step")
def numpy_of_a_gradient(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    kept = []
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(model(x), y).backward()
        kept.append(model[0].weight.grad.numpy())
    for i, gradient in enumerate(kept):
        worker.log(f"gradient of step {i}", torch.from_numpy(gradient))
    return model
