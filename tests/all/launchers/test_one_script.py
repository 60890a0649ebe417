"""One script under every launcher, on 1, 2 and 4 test hosts, trains to the same losses.

To the bit where the route is the same: the same ranks on the same hosts with the same transport.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.all.launchers.ways import NUM_RANKS, WAYS, Site
from tests.marks import ON_TEST_HOSTS
from tests.netlab import Lab, netlab

pytestmark = [
    *ON_TEST_HOSTS,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not os.environ.get("TORCHMN_TEST_LAUNCHERS"), reason="'make test-launchers' runs these"
    ),
]

NUM_STEPS = 6
PROBLEM = f"""
import torch
NUM_STEPS = {NUM_STEPS}

def problem():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)

def batch(step, rank):
    random = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(3, 7, generator=random)
    return inputs, inputs.sum(1, keepdim=True).sin()
"""
SCRIPT = (
    PROBLEM
    + """
import torchmn
comm = torchmn.create_communicator("hierarchical")
model, optimizer = problem()
optimizer = torchmn.create_multi_node_optimizer(optimizer, comm, model)
losses = []
for step in range(NUM_STEPS):
    inputs, targets = batch(step, comm.rank)
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(float(comm.allreduce(loss.detach())) / comm.size)
weights = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
assert comm.allgather_obj(weights) == [weights] * comm.size
if comm.rank == 0:
    transport = comm.world.transport
    print("transport", getattr(transport, "inner", transport).name, "on", comm.inter_size)
    print("losses", *(loss.hex() for loss in losses))
    print("weights", *(weight.hex() for weight in weights), flush=True)
comm.finalize()
"""
)
# What a number of hosts and a transport found first: losses and weights, and in which way.
_found: dict[tuple[int, str], tuple[str, list[list[str]]]] = {}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with netlab(4, None) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], list[float]]:
    """The losses, and the weights, of one process with the batches of all ranks."""
    names: dict[str, Any] = {}
    exec(PROBLEM, names)
    model, optimizer = names["problem"]()
    losses = []
    for step in range(NUM_STEPS):
        batches = [names["batch"](step, rank) for rank in range(NUM_RANKS)]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, torch.nn.utils.parameters_to_vector(model.parameters()).tolist()


def raise_if_different(
    way: str, num_hosts: int, transport: str, output: str, expected: tuple[list[float], list[float]]
) -> None:
    """Compare what rank 0 printed with one process, and with the other ways of the same route."""
    assert re.findall(r"transport (\S+) on (\d+)", output) == [(transport, str(num_hosts))]
    found = []
    for name, numbers in zip(("losses", "weights"), expected, strict=True):
        (line,) = re.findall(rf"{name} (.*)", output)
        found.append(line.split())
        assert [float.fromhex(each) for each in found[-1]] == pytest.approx(
            numbers, rel=1e-5, abs=1e-6 if name == "weights" else None
        )
    first, same = _found.setdefault((num_hosts, transport), (way, found))
    assert found == same, f"{way} and {first} differ"


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
@pytest.mark.parametrize("name", WAYS)
def test_the_same_losses(
    lab: Lab, expected: tuple[list[float], list[float]], tmp_path: Path, name: str, num_hosts: int
) -> None:
    way = WAYS[name]
    if reason := way.why_not():
        pytest.skip(reason=reason)
    if num_hosts < way.min_hosts:
        pytest.skip(reason="needs another host")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    output = way.start(Site(lab, num_hosts, tmp_path, script))
    raise_if_different(name, num_hosts, way.transport, output, expected)
