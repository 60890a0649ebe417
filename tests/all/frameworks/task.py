"""One small task for all frameworks, and how one process and plain torchmn train it."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchmn import create_multi_node_optimizer
from torchmn.comm import Communicator

NUM_SAMPLES, NUM_FEATURES, BATCH, NUM_EPOCHS = 48, 6, 8, 2
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Sequential):
    """Float64, so that only the order of sums makes a difference, of 1e-16."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        super().__init__(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)


def samples(number: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(number, NUM_FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.sin(3 * inputs.sum(1, keepdim=True))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def strided(rank: int, size: int, batch: int = BATCH) -> list[list[int]]:
    """One epoch of a rank's batches, as DistributedSampler shares them out."""
    own = range(rank, NUM_SAMPLES, size)
    return [list(own[i : i + batch // size]) for i in range(0, len(own), batch // size)]


def in_blocks(rank: int, size: int, batch: int = BATCH) -> list[list[int]]:
    """One epoch of a rank's batches, as Accelerate shares them out."""
    part = batch // size
    first = range(rank * part, NUM_SAMPLES, batch)
    return [list(range(start, start + part)) for start in first]


def uneven(rank: int) -> list[list[int]]:
    """One epoch of a rank's batches: two ranks have five and three samples of each eight."""
    cuts = ((0, 5), (5, 8))[rank]
    return [list(range(k + cuts[0], k + cuts[1])) for k in range(0, NUM_SAMPLES, BATCH)]


def train(
    batches: list[list[int]],
    *,
    comm: Communicator | None = None,
    make: Make = sgd,
    every: int = 1,
    max_norm: float | None = None,
    num_epochs: int = NUM_EPOCHS,
    net: nn.Module | None = None,
    **options: Any,
) -> nn.Module:
    """A loop by hand, in one process or, with ``comm``, with plain torchmn.

    ``every`` passes are accumulated; what an epoch leaves over is a shorter step.
    """
    net = net or Net()
    inputs, targets = samples()
    optimizer: Any = make(net.parameters())
    if comm is not None:
        optimizer = create_multi_node_optimizer(optimizer, comm, net, **options)
    for _ in range(num_epochs):
        for index, batch in enumerate(batches):
            is_last = (index + 1) % every == 0 or index + 1 == len(batches)
            if index % every == 0:
                optimizer.zero_grad()

            def run(batch: list[int] = batch) -> None:
                loss = nn.functional.mse_loss(net(inputs[batch]), targets[batch])
                (loss / every).backward()

            if comm is not None and not is_last:
                with optimizer.no_sync():
                    run()
            else:
                run()
            if is_last:
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), max_norm)
                optimizer.step()
    if comm is not None:
        optimizer.flush()
        optimizer.close()
    return net


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def same_bits(one: nn.Module, other: nn.Module) -> None:
    assert torch.equal(flat(one), flat(other)), float((flat(one) - flat(other)).abs().max())


def same_numbers(one: nn.Module, other: nn.Module, tolerance: float = 1e-12) -> None:
    difference = float((flat(one) - flat(other)).abs().max())
    assert difference < tolerance, f"parameters differ by {difference}"
    assert not torch.equal(flat(one), flat(Net())), "nothing was trained"


def same_on_all(comm: Communicator, net: nn.Module) -> None:
    for other in comm.allgather(flat(net)):
        assert torch.equal(other, flat(net)), "ranks hold different parameters"


def raises(kind: type[BaseException], text: str, function: Callable[[], object]) -> None:
    with pytest.raises(kind) as caught:
        function()
    assert text in str(caught.value), str(caught.value)


def run_checks(checks: dict[str, Callable[[], None]]) -> None:
    """Run by each rank: what it says of every check goes to a file of the rank.

    Arguments of the script: the folder of the files, and the names of checks if not all.
    """
    torch.set_num_threads(1)
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    outcomes = {}
    for name, check in checks.items():
        if wanted and name not in wanted:
            continue
        torch.manual_seed(0)
        try:
            check()
            outcomes[name] = "ok"
        except Exception:
            outcomes[name] = traceback.format_exc()
            break  # the other ranks may be elsewhere
    rank = os.environ.get("RANK", "0")
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
