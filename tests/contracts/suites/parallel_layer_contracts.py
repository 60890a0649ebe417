"""What layers divided among ranks must do: what one process does that has the whole layer.

Each function takes a communicator and is called on every rank. It raises `ContractError` where the
contract is broken.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tests.contracts.suites.batch_norm_contracts import _require_equal as require_equal
from tests.contracts.suites.batch_norm_contracts import drawn
from tests.contracts.suites.communicator_contracts import contracts_in, require
from torchmn.comm import Communicator
from torchmn.nn import ParallelConv2d, ParallelLinear, gather_state_dict, load_whole_state_dict
from torchmn.nn.parallel_layer import Split

SPLITS: tuple[Split, ...] = ("output", "input")
_BUILDING = threading.Lock()
"""Ranks may be threads, which share the random generator."""


def built(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """A module under a seed, in float64."""
    with _BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().double()


def linear(comm: Communicator | None, split: Split, **options: bool) -> nn.Module:
    """7 to 5 features, of one process without a communicator."""
    if comm is None:
        return nn.Linear(7, 5, **options)
    return ParallelLinear(7, 5, comm, split=split, **options)


def convolution(comm: Communicator | None, split: Split, **options: object) -> nn.Module:
    """5 to 6 channels."""
    given = {"stride": 2, "padding": 1, "padding_mode": "reflect", **options}
    if comm is None:
        return nn.Conv2d(5, 6, 3, **given)
    return ParallelConv2d(5, 6, 3, comm, split=split, **given)


INPUTS = {linear: (2, 3, 7), convolution: (2, 5, 6, 5)}


def network(comm: Communicator | None) -> nn.Sequential:
    """Layers of both kinds among layers that all ranks have."""
    return nn.Sequential(
        convolution(comm, "output", dilation=1),
        nn.Tanh(),
        nn.Conv2d(6, 4, 2),
        nn.Flatten(),
        linear_of(comm, 16, 10, "output"),
        nn.Tanh(),
        linear_of(comm, 10, 5, "input"),
    )


def linear_of(comm: Communicator | None, inputs: int, outputs: int, split: Split) -> nn.Module:
    """A linear layer, of one process without a communicator."""
    if comm is None:
        return nn.Linear(inputs, outputs)
    return ParallelLinear(inputs, outputs, comm, split=split)


def check_layers(comm: Communicator) -> None:
    """Initial values, outputs and gradients of each layer, with and without a bias."""
    for make, shape in INPUTS.items():
        for split in SPLITS:
            for bias in (True, False):
                what = f"{make.__name__} by {split}{'' if bias else ' without bias'}"
                whole = built(lambda m=make, s=split, b=bias: m(None, s, bias=b))
                own = built(lambda m=make, s=split, b=bias: m(comm, s, bias=b))
                _check_parts(comm, f"{what}: initial", whole, own, gradients=False)
                x = drawn(1, *shape).requires_grad_()
                own_x = x.detach().clone().requires_grad_()
                y, own_y = whole(x), own(own_x)
                dy = drawn(2, *y.shape)
                y.backward(dy)
                own_y.backward(dy)
                require_equal(f"{what}: output", own_y, y)
                require_equal(f"{what}: gradient of the input", own_x.grad, x.grad)
                _check_parts(comm, f"{what}: gradient of", whole, own, gradients=True)


def _check_parts(
    comm: Communicator, what: str, whole: nn.Module, own: nn.Module, *, gradients: bool
) -> None:
    """Parameters, or their gradients, of this rank are its part of the whole layer's."""
    dim = 0 if own.split == "output" else 1
    for name, wanted in whole.named_parameters():
        value, found = wanted, own.get_parameter(name)
        if gradients:
            value, found = wanted.grad, found.grad
        if name == "weight" or dim == 0:
            value = value.tensor_split(comm.size, dim)[comm.rank]
        require_equal(f"{what} {name}", found, value)


def check_training(comm: Communicator) -> None:
    """Several steps of a network, and the state of the whole one after them."""
    alone, model = built(lambda: network(None)), built(lambda: network(comm))
    for net in (alone, model):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            cross_entropy(net(_images(step)), torch.arange(3)).backward()
            optimizer.step()
    state = gather_state_dict(model)
    wanted = alone.state_dict()
    require(list(state) == list(wanted), f"{list(state)} instead of {list(wanted)}")
    for name, value in wanted.items():
        require_equal(name, state[name], value)


def check_states(comm: Communicator) -> None:
    """A state of one process is loaded in parts, on other numbers of ranks too, and is kept."""
    alone = built(lambda: network(None), seed=4)
    model = built(lambda: network(comm))
    load_whole_state_dict(model, alone.state_dict())
    require_equal("output", model(_images(0)), alone(_images(0)))
    for name, value in gather_state_dict(model).items():
        require(torch.equal(value, alone.state_dict()[name]), f"{name} has changed")
    part = comm.split(comm.rank // 2, comm.rank)
    other = built(lambda: network(part))
    load_whole_state_dict(other, gather_state_dict(model))
    require_equal("output on other ranks", other(_images(0)), alone(_images(0)))
    comm.barrier()
    part.finalize()


def check_recomputation(comm: Communicator) -> None:
    """Activation checkpointing, and gradients of gradients.

    The state of the random generator, which ranks share as threads, is left alone.
    """
    alone, model = built(lambda: network(None)), built(lambda: network(comm))
    found: list[Tensor] = []
    for net in (alone, model):
        x = _images(0).requires_grad_()
        y = checkpoint(net, x, use_reentrant=False, preserve_rng_state=False)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        (dx_of_plain,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx_of_plain.square().sum(), x)
        found += [dx, ddx]
    require_equal("gradient", found[2], found[0])
    require_equal("gradient of the gradient", found[3], found[1])


def _images(step: int) -> Tensor:
    return drawn(10 + step, 3, 5, 6, 6)


CONTRACTS = contracts_in(globals())


def check_all(comm: Communicator) -> None:
    """All of them."""
    for contract in CONTRACTS:
        contract(comm)
