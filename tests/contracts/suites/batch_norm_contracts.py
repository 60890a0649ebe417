"""What batch normalization over ranks must do: what one process does that has the whole batch.

Each function takes a communicator and is called on every rank. It raises `ContractError` where the
contract is broken.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tests.contracts.suites.communicator_contracts import contracts_in, require
from torchmn import create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.nn import convert_batch_norm
from torchmn.nn.batch_norm import LossWeight

EXACT = 1e-12
SPLITS = ([7, 0, 2, 5], [1, 1, 1, 1], [0, 4, 0, 3], [3, 3, 3, 3])
"""Samples of each rank; of fewer ranks the first ones."""
NUM_CHANNELS = 5


@dataclass
class Case:
    """A layer of torch and the shape of one sample."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    memory_format: torch.memory_format = torch.contiguous_format
    splits: Sequence[Sequence[int]] = field(default_factory=lambda: SPLITS)


CASES = {
    "1d": Case(lambda: nn.BatchNorm1d(NUM_CHANNELS), (NUM_CHANNELS,), splits=SPLITS[:1]),
    "1d of sequences": Case(lambda: nn.BatchNorm1d(NUM_CHANNELS), (NUM_CHANNELS, 3)),
    "2d": Case(lambda: nn.BatchNorm2d(NUM_CHANNELS), (NUM_CHANNELS, 3, 4)),
    "2d channels last": Case(
        lambda: nn.BatchNorm2d(NUM_CHANNELS), (NUM_CHANNELS, 3, 4), torch.channels_last
    ),
    "3d": Case(lambda: nn.BatchNorm3d(NUM_CHANNELS), (NUM_CHANNELS, 2, 3, 2)),
    "no parameters": Case(lambda: nn.BatchNorm2d(NUM_CHANNELS, affine=False), (NUM_CHANNELS, 2, 2)),
    "no statistics": Case(
        lambda: nn.BatchNorm2d(NUM_CHANNELS, track_running_stats=False), (NUM_CHANNELS, 2, 2)
    ),
    "plain average": Case(lambda: nn.BatchNorm1d(NUM_CHANNELS, momentum=None), (NUM_CHANNELS, 2)),
}


def own_rows(comm: Communicator, whole: Tensor, split: Sequence[int]) -> Tensor:
    """This rank's part of a batch, in the layout of the whole."""
    start = sum(split[: comm.rank])
    return whole[start : start + split[comm.rank]].clone()


def drawn(seed: int, *shape: int) -> Tensor:
    """The same on all ranks, in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_whole_batch(comm: Communicator) -> None:
    """Outputs, gradients and running statistics of several steps, for all kinds of layers."""
    for name, case in CASES.items():
        whole = _parameters_drawn(case.make().double())
        own = convert_batch_norm(copy.deepcopy(whole), comm)
        for step, split in enumerate(case.splits):
            _check_step(comm, f"{name}, step {step}", case, (whole, own), split, step)
        for (key, wanted), found in zip(
            whole.state_dict().items(), own.state_dict().values(), strict=True
        ):
            _require_equal(f"{name}: {key}", found, wanted)
        whole.eval(), own.eval()  # type: ignore[unused-ignore]
        if whole.track_running_stats:
            x = drawn(9, 2, *case.shape)
            _require_equal(f"{name} in eval()", own(x), whole(x))


def _check_step(
    comm: Communicator,
    what: str,
    case: Case,
    layers: tuple[nn.Module, nn.Module],
    split: Sequence[int],
    seed: int,
) -> None:
    whole, own = layers
    split = split[: comm.size]
    total = sum(split)
    if total * torch.Size(case.shape[1:]).numel() < 2:
        return  # one value for each channel is an error
    x = (drawn(seed, total, *case.shape) * 0.7 + 3).requires_grad_()
    dy = drawn(seed + 100, total, *case.shape)
    if case.memory_format != torch.contiguous_format:
        x = x.detach().to(memory_format=case.memory_format).requires_grad_()
    own_x = own_rows(comm, x.detach(), split).requires_grad_()
    y, own_y = whole(x), own(own_x)
    whole.zero_grad(), own.zero_grad()  # type: ignore[unused-ignore]
    y.backward(dy)
    own_y.backward(own_rows(comm, dy, split))
    _require_equal(f"{what}: outputs", own_y, own_rows(comm, y, split))
    if own_y.numel() and case.memory_format != torch.contiguous_format:
        require(own_y.is_contiguous(memory_format=case.memory_format), f"{what}: layout of outputs")
    _require_equal(f"{what}: gradient", own_x.grad, own_rows(comm, x.grad, split))
    for (name, parameter), other in zip(whole.named_parameters(), own.parameters(), strict=True):
        _require_equal(f"{what}: gradient of {name}", comm.allreduce(other.grad), parameter.grad)


def check_large_mean(comm: Communicator) -> None:
    """In float32 a mean of 10^4 with a variance of 10^-4 does not cancel."""
    whole = (drawn(1, 4 * comm.size, NUM_CHANNELS, 16, 16) * 1e-2 + 1e4).float()
    dy = drawn(2, *whole.shape).float()
    wanted = whole.double().requires_grad_()
    reference = nn.BatchNorm2d(NUM_CHANNELS, eps=1e-12).double()
    y = reference(wanted)
    y.backward(dy.double())
    own = convert_batch_norm(nn.BatchNorm2d(NUM_CHANNELS, eps=1e-12), comm)
    split = [4] * comm.size
    if comm.size == 1:
        return  # torch's own layer
    x = own_rows(comm, whole, split).requires_grad_()
    own_y = own(x)
    own_y.backward(own_rows(comm, dy, split))
    _require_equal("outputs", own_y, own_rows(comm, y, split), 1e-4)
    _require_equal("gradient / 100", x.grad / 100, own_rows(comm, wanted.grad, split) / 100, 1e-4)
    _require_equal("variance x 10^4", 1e4 * own.running_var, 1e4 * reference.running_var, 1e-2)


def check_sixteen_bits(comm: Communicator) -> None:
    """Inputs in 16 bits are rounded once, at the end."""
    for dtype in (torch.float16, torch.bfloat16):
        split = [5, 0, 3, 2][: comm.size]
        whole = (drawn(3, sum(split), NUM_CHANNELS, 6, 6) + 2).to(dtype)
        dy = drawn(4, *whole.shape).to(dtype)
        wanted = whole.double().requires_grad_()
        y = nn.BatchNorm2d(NUM_CHANNELS).double()(wanted)
        y.backward(dy.double())
        own = convert_batch_norm(nn.BatchNorm2d(NUM_CHANNELS), comm)
        x = own_rows(comm, whole, split).requires_grad_()
        own_y = own(x)
        own_y.backward(own_rows(comm, dy, split))
        require(own_y.dtype == x.grad.dtype == dtype, f"{dtype}: became {own_y.dtype}")
        rounding = 0.51 * torch.finfo(dtype).eps
        _require_equal(f"{dtype}: outputs", own_y, own_rows(comm, y, split), rounding)
        _require_equal(f"{dtype}: gradient", x.grad, own_rows(comm, wanted.grad, split), rounding)


def check_groups(comm: Communicator) -> None:
    """Ranks of another part of a communicator do not count."""
    part = comm.split(comm.rank % 2, comm.rank)
    layer = convert_batch_norm(nn.BatchNorm1d(NUM_CHANNELS).double(), part)
    x = drawn(5, comm.size, 3, NUM_CHANNELS)
    y = layer(x[comm.rank])
    members = range(comm.rank % 2, comm.size, 2)
    wanted = nn.BatchNorm1d(NUM_CHANNELS).double()(x[list(members)].flatten(0, 1))
    _require_equal("outputs", y, wanted[3 * part.rank : 3 * part.rank + 3])
    comm.barrier()
    part.finalize()


def check_training(comm: Communicator) -> None:
    """A multi-node optimizer whose buckets are sent while layers send theirs, on uneven batches.

    For losses that are means, weighted by samples, and for losses that are sums.
    """
    weights: tuple[LossWeight, ...] = ("samples", "rank")
    for weight in weights:
        is_mean = weight == "samples"
        reduction = "mean" if is_mean else "sum"
        alone = _network()
        model = convert_batch_norm(_network(), comm, loss_weight=weight)
        comm.route.bucket_bytes = 400
        optimizer = create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
            comm,
            model,
            weight=weight,
            reduction=reduction,
        )
        plain = torch.optim.SGD(alone.parameters(), 0.05, momentum=0.9)
        for step, given in enumerate(SPLITS[:1] + SPLITS[2:]):
            split = given[: comm.size] if any(given[: comm.size]) else [3] * comm.size
            x = drawn(20 + step, sum(split), 2, 6, 6)
            labels = torch.arange(sum(split)) % 3
            for net, opt, part in (
                (alone, plain, (x, labels)),
                (model, optimizer, (own_rows(comm, x, split), own_rows(comm, labels, split))),
            ):
                opt.zero_grad()
                loss = cross_entropy(net(part[0]), part[1], reduction=reduction)
                loss.backward()
                opt.step()
        optimizer.close()
        for name, wanted in alone.state_dict().items():
            _require_equal(f"{weight}: {name}", model.state_dict()[name], wanted)


def check_given_weights(comm: Communicator) -> None:
    """Weights of `set_weight`, here by class, whatever the layers were to assume.

    Each rank has another number of samples and other classes.
    """
    class_weights = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    assumed: tuple[LossWeight, ...] = ("samples", "rank")
    for weight in assumed:
        alone = _network()
        model = convert_batch_norm(_network(), comm, loss_weight=weight)
        optimizer = create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), 0.05), comm, model, weight=weight
        )
        plain = torch.optim.SGD(alone.parameters(), 0.05)
        split = [4, 1, 3, 2][: comm.size]
        for step in range(3):
            x = drawn(60 + step, sum(split), 2, 6, 6)
            labels = torch.arange(sum(split)) % 3
            own = own_rows(comm, labels, split)
            optimizer.zero_grad()
            optimizer.set_weight(class_weights[own].sum().item())
            cross_entropy(model(own_rows(comm, x, split)), own, class_weights).backward()
            optimizer.step()
            plain.zero_grad()
            cross_entropy(alone(x), labels, class_weights).backward()
            plain.step()
        optimizer.close()
        for name, wanted in alone.state_dict().items():
            _require_equal(f"{weight}: {name}", model.state_dict()[name], wanted)


def check_checkpointing(comm: Communicator) -> None:
    """What is run again in backward gives what it gives in one process, statistics included."""
    alone, model = _network(), convert_batch_norm(_network(), comm)
    split = [4, 0, 3, 1][: comm.size]
    x = drawn(30, sum(split), 2, 6, 6)
    for net, part in ((alone, x), (model, own_rows(comm, x, split))):
        hidden = checkpoint(net[:3], part, use_reentrant=False)
        checkpoint(net[3:], hidden, use_reentrant=False).square().sum().backward()
    for (name, wanted), parameter in zip(alone.named_parameters(), model.parameters(), strict=True):
        _require_equal(f"gradient of {name}", comm.allreduce(parameter.grad), wanted.grad)
    for name, buffer in alone.named_buffers():
        _require_equal(name, model.get_buffer(name), buffer)


def check_one_message(comm: Communicator) -> None:
    """One collective for each layer and direction, whatever a layer has."""
    model = convert_batch_norm(_network(), comm)
    x = drawn(40, 4, 2, 6, 6)
    model(x).sum().backward()  # the first one makes connections
    before = _num_collectives(model)
    model(x).sum().backward()
    sent = _num_collectives(model) - before
    num_layers = sum(isinstance(layer, nn.BatchNorm2d) for layer in model)
    expected = 0 if comm.size == 1 else 2 * num_layers
    require(sent == expected, f"{sent} collectives, not {expected}")


def _num_collectives(model: nn.Module) -> int:
    """Of the communicator that the layers have to themselves."""
    layer = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    if layer.comm.size == 1:
        return 0
    entries = layer._ranks.layers(layer, "")._group.flight_recorder.entries()
    return max((entry.number for entry in entries), default=0)


def _network() -> nn.Sequential:
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, bias=False),
        nn.BatchNorm2d(6, momentum=0.3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 3),
    ).double()
    return _parameters_drawn(network)


def _parameters_drawn(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(drawn(50 + seed, *parameter.shape) * 0.5)
    return model


def _require_equal(
    what: str, found: Tensor | None, wanted: Tensor | None, tolerance: float = EXACT
) -> None:
    """Relative to 1 plus the value, as one process has it."""
    if found is None or wanted is None:
        require(found is wanted, f"{what}: {found} instead of {wanted}")
        return
    require(found.shape == wanted.shape, f"{what}: {found.shape} instead of {wanted.shape}")
    found, wanted = found.detach().double(), wanted.detach().double()
    error = (found - wanted).abs() / (1 + wanted.abs())
    worst = float(error.max()) if error.numel() else 0.0
    require(worst <= tolerance, f"{what}: off by {worst:.2g}, where {tolerance:.2g} is allowed")


CONTRACTS = contracts_in(globals())


def check_all(comm: Communicator) -> None:
    """All of them."""
    for contract in CONTRACTS:
        contract(comm)
