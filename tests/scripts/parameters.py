"""Parameters read, averaged, shared and frozen."""

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from .models import built, closure_of, fit, mlp, mlp_and_sgd, steps, take_step
from .registry import script
from .worker import Worker


@script("`AveragedModel` with `SWALR`")
def stochastic_weight_averaging(worker: Worker) -> list[nn.Module]:
    model, optimizer = mlp_and_sgd(worker)
    average = AveragedModel(model)
    schedule = SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
    for step, (x, y) in enumerate(worker.batches()):
        take_step(model, optimizer, x, y)
        schedule.step()
        if step >= 2:
            average.update_parameters(model)
    return [model, average]


@script("`AveragedModel` as an exponential moving average, with buffers, evaluated in each step")
def averaged_model_evaluated(worker: Worker) -> list[nn.Module]:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.AdamW(model.parameters(), 0.01), model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    for x, y in worker.batches():
        take_step(model, optimizer, x, y)
        average.update_parameters(model)
        with torch.no_grad():
            worker.log("loss of the average", worker.mean(mse_loss(average(x), y)))
    return [model, average]


@script("Lookahead: every third step goes back halfway, by `p.data.copy_()`")
def lookahead(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    slow = [p.detach().clone() for p in model.parameters()]
    for step, (x, y) in enumerate(worker.batches()):
        take_step(model, optimizer, x, y)
        if step % 3 == 2:
            for p, q in zip(model.parameters(), slow, strict=True):
                q.add_(p.data - q, alpha=0.5)
                p.data.copy_(q)
    return model


@script("Tied weights of two layers")
def tied_weights(worker: Worker) -> nn.Module:
    model = built(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)))
    model[2].weight = model[0].weight
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    for x, _ in steps(optimizer, worker.batches()):
        (model(x) - x.flip(1)).pow(2).mean().backward()
    return model


@script("Layers frozen, then unfrozen one by one")
def frozen_then_unfrozen(worker: Worker) -> nn.Module:
    model = mlp()
    model[:4].requires_grad_(False)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    for step, (x, y) in enumerate(worker.batches(10)):
        if step == 3:
            model[2].requires_grad_(True)
        if step == 6:
            model[0].requires_grad_(True)
        take_step(model, optimizer, x, y)
    return model


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x).tanh())


@script("Parameters that are unused in every other step: `Adam` leaves them and their state alone")
def unused_parameters_rest(worker: Worker) -> nn.Module:
    model = built(_TwoHeads)
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
    for step, (x, y) in enumerate(steps(optimizer, worker.batches())):
        mse_loss(model(x, step % 2), y).backward()
    return model


def _zeros_for_unused(worker: Worker) -> nn.Module:
    """One process in which a parameter that is not used has a gradient of zeros."""
    model = built(_TwoHeads)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step, (x, y) in enumerate(worker.batches()):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        mse_loss(model(x, step % 2), y).backward()
        optimizer.step()
    return model


@script(
    "Parameters that are unused in every other step, with `Adam` and `zero_fill=True`",
    own_definition="an unused parameter has a gradient of zeros",
    reference=_zeros_for_unused,
)
def unused_parameters_are_zeros(worker: Worker) -> nn.Module:
    model = built(_TwoHeads)
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 0.01), model, zero_fill=True)
    for step, (x, y) in enumerate(steps(optimizer, worker.batches())):
        mse_loss(model(x, step % 2), y).backward()
    return model


@script("Each rank uses another head: a parameter without a gradient counts as zeros")
def each_rank_another_head(worker: Worker) -> nn.Module:
    model = built(_TwoHeads)
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
    for x, y in steps(optimizer, worker.batches()):
        if worker.size == 1:
            (xs, ys) = x.chunk(2), y.chunk(2)
            loss = sum(mse_loss(model(xs[i], i), ys[i]) for i in range(2)) / 2
        else:
            loss = mse_loss(model(x, worker.rank), y)
        loss.backward()
    return model


@script("`torch.func.functional_call` with the model's own parameters")
def functional_calls(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(functional_call(model, dict(model.named_parameters()), (x,)), y).backward()
    return model


@script("MAML: an inner step per task through `functional_call`, and the gradient through it")
def inner_steps_of_tasks(worker: Worker) -> nn.Module:
    model = mlp()
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
    for xs, ys in steps(optimizer, worker.batches()):
        losses = []
        for x, y in zip(xs.split(2), ys.split(2), strict=True):  # tasks of two samples
            fast = dict(model.named_parameters())
            inner = mse_loss(functional_call(model, fast, (x,)), y)
            slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
            losses.append(mse_loss(functional_call(model, fast, (x.flip(0),)), y.flip(0)))
        torch.stack(losses).mean().backward()
    return model


@script("Every rank starts from parameters of its own: those of rank 0 are taken")
def initialised_apart(worker: Worker) -> nn.Module:
    model = mlp(seed=worker.rank)
    return fit(worker, model)


@script("Loaded again in the middle: `model.load_state_dict()` of an earlier state, by all ranks")
def loaded_in_the_middle(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for step, (x, y) in enumerate(worker.batches(10)):
        if step == 2:
            kept = copy.deepcopy(model.state_dict())
        if step == 6:
            model.load_state_dict(kept)
        take_step(model, optimizer, x, y)
    return model


@script("`vector_to_parameters()` in each step: parameters become views of one vector")
def parameters_from_a_vector(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    for x, y in worker.batches():
        take_step(model, optimizer, x, y)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.99, model.parameters())
    return model


@script("Encoder and decoder, one optimizer for both")
def two_models_one_optimizer(worker: Worker) -> list[nn.Module]:
    encoder = built(lambda: nn.Linear(5, 4), seed=1)
    decoder = built(lambda: nn.Linear(4, 3), seed=2)
    inner = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 0.01)
    optimizer = worker.optimizer(inner, [encoder, decoder])
    for x, y in steps(optimizer, worker.batches()):
        mse_loss(decoder(encoder(x).tanh()), y).backward()
    return [encoder, decoder]


class _Transposed(nn.Module):
    """Parameters whose elements do not lie in order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5).t())
        self.every_second = nn.Parameter(torch.randn(10, 3)[::2])

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh() + x @ self.every_second


@script("Parameters that are transposed or strided views")
def strided_parameters(worker: Worker) -> nn.Module:
    model = built(_Transposed)
    return fit(worker, model, torch.optim.Adam(model.parameters(), 0.05))


@script("Style transfer: an image is trained by `LBFGS`, the model is frozen")
def trained_image(worker: Worker) -> Tensor:
    features = mlp().requires_grad_(False)
    image = torch.linspace(-1, 1, 5).requires_grad_(True)
    optimizer = worker.optimizer(torch.optim.LBFGS([image], 0.1, max_iter=3), image)
    for x, y in worker.batches(3):
        closure = closure_of(optimizer, lambda x=x, y=y: mse_loss(features(x * image), y))
        worker.log("loss", optimizer.step(closure))
    return image


@script("Tensors and a `ParameterList` of no module, in a list; the wrapped optimizer is not kept")
def trained_tensors(worker: Worker) -> list[Tensor]:
    codes = nn.ParameterList([torch.ones(5), torch.zeros(3)])
    matrix = torch.linspace(-1, 1, 15).view(5, 3).requires_grad_(True)
    adam = torch.optim.Adam([*codes, matrix], 0.05)
    worker.optimizer(adam, [codes, [matrix]])
    for x, y in steps(adam, worker.batches()):
        mse_loss((x * codes[0]) @ matrix + codes[1], y).backward()
    return [*codes, matrix]
