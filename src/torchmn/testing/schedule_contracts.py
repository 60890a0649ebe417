"""What every schedule must do, with every codec and world size, held to what it declares.

Each function is called on every rank with the communicator, something that makes the schedule, and
the name of a codec, and raises `ContractError` where the contract is broken. Ranks may be threads.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchmn.communicators import Communicator
from torchmn.exchange import (
    SCHEDULES,
    MultiNodeOptimizer,
    Schedule,
    create_multi_node_optimizer,
)
from torchmn.testing.contracts import network, require, seeded

MakeSchedule = Callable[[], Schedule]
Gradients = list[Tensor]

TOLERANCE = {None: 1e-12, "float32": 1e-12, "float16": 2e-3, "bfloat16": 2e-2}
"""Of a mean, relative to the largest gradient that is in it."""
NUM_STEPS = 5


def check_means(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """The optimizer is given the mean of every backward pass, in order, none lost, none twice."""
    run = _Run(comm, make, codec)
    for step in range(NUM_STEPS):
        run.step(step)
    run.optimizer.flush()
    require(
        len(run.applied) == NUM_STEPS,
        f"{NUM_STEPS} backward passes and a flush gave {len(run.applied)} steps",
    )
    for step, (got, local) in enumerate(zip(run.applied, run.local, strict=True)):
        run.require_mean(got, local, comm.size, f"step {step}")


def check_staleness(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """``p.grad`` is as late as declared when backward returns, and so are the steps."""
    run = _Run(comm, make, codec)
    late = run.optimizer.schedule.staleness_steps
    for step in range(NUM_STEPS):
        run.backward(step)
        got = run.gradients()
        if step < late:
            require(not got, f"backward pass {step} left gradients, of which step?")
        elif comm.size > 1 or late:
            run.require_mean(got, run.local[step - late], comm.size, f"backward pass {step}")
        run.optimizer.step()
        num_expected = max(0, step + 1 - late)
        require(
            len(run.applied) == num_expected,
            f"after {step + 1} iterations there were {len(run.applied)} steps, not {num_expected}",
        )
    for _ in range(2):
        run.optimizer.flush()
        require(len(run.applied) == NUM_STEPS, f"flush() led to {len(run.applied)} steps")


def check_replicas(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """All ranks hold the same bits after every step, in parameters and optimizer state."""
    run = _Run(comm, make, codec)
    for step in range(NUM_STEPS):
        run.step(step)
        run.require_replicas(f"after step {step}")
    run.optimizer.flush()
    run.require_replicas("after flush()")


def check_resume(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """Going on from a saved state gives the bits of going on without a break."""
    run = _Run(comm, make, codec)
    for step in range(NUM_STEPS):
        run.step(step)
    file = io.BytesIO()
    torch.save((run.model.state_dict(), run.optimizer.state_dict()), file)
    again = _Run(comm, make, codec)
    again.step(77)  # so that there is something to forget
    file.seek(0)
    model_state, optimizer_state = torch.load(file, weights_only=True)
    again.model.load_state_dict(model_state)
    again.optimizer.load_state_dict(optimizer_state)
    for each in (run, again):
        for step in range(NUM_STEPS, 2 * NUM_STEPS):
            each.step(step)
        each.optimizer.flush()
    for (name, expected), got in zip(
        run.model.named_parameters(), again.model.parameters(), strict=True
    ):
        require(torch.equal(got, expected), f"{name} has other bits after going on from a state")


def check_accumulation(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """Passes under no_sync() and the one after them count as one pass of their sum."""
    run = _Run(comm, make, codec)
    sums = []
    for step in range(3):
        run.optimizer.zero_grad()
        with run.optimizer.no_sync():
            run.add_pass(2 * step)
        run.add_pass(2 * step + 1)
        sums.append([a + b for a, b in zip(*run.local[-2:], strict=True)])
        run.optimizer.step()
    run.optimizer.flush()
    require(len(run.applied) == 3, f"three steps of two passes gave {len(run.applied)} steps")
    for step, (got, local) in enumerate(zip(run.applied, sums, strict=True)):
        run.require_mean(got, local, comm.size, f"step {step}")


def check_join(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """Rank r has r + 1 batches: means are over ranks that have data, replicas equal at the end."""
    run = _Run(comm, make, codec)
    with run.optimizer.join():
        for step in range(comm.rank + 1):
            run.step(step)
    run.require_replicas("after join()")
    longest = comm.size - 1
    applied = comm.bcast_obj(run.applied, longest)
    require(len(applied) == comm.size, f"the longest loop led to {len(applied)} steps")
    nothing = [torch.zeros_like(p) for p in run.model.parameters()]
    for step, got in enumerate(applied):
        local = run.local[step] if step <= comm.rank else nothing
        run.require_mean(got, local, comm.size - step, f"round {step} of uneven loops")


class _Run:
    """A training run that remembers local gradients and what the inner optimizer was given."""

    def __init__(self, comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
        self.comm = comm
        self.codec = codec
        self.model: nn.Module = network(0)
        inner = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.applied: list[Gradients] = []
        inner.register_step_pre_hook(lambda *_: self.applied.append(self.gradients()))
        self.optimizer: MultiNodeOptimizer = create_multi_node_optimizer(
            inner, comm, self.model, schedule=make(), codec=codec
        )
        self.local: list[Gradients] = []

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.add_pass(step)

    def add_pass(self, step: int) -> None:
        inputs = seeded(self.comm.rank, 4, 1, 6, 6, salt=200 + step) / 10
        parameters = list(self.model.parameters())
        loss = self.model(inputs).pow(2).mean()
        self.local.append(list(torch.autograd.grad(loss, parameters, retain_graph=True)))
        loss.backward()

    def gradients(self) -> Gradients:
        """Copies of what is in ``p.grad``."""
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def require_mean(self, got: Gradients, local: Gradients, num_ranks: int, what: str) -> None:
        """``got`` is the sum of all ranks' ``local`` over ``num_ranks``. *Collective.*"""
        everybody = self.comm.allgather_obj(local)
        require(len(got) == len(local), f"{what}: {len(got)} gradients instead of {len(local)}")
        for index, mine in enumerate(got):
            parts = torch.stack([rank_local[index] for rank_local in everybody])
            error = float((mine - parts.sum(0) / num_ranks).abs().max())
            bound = TOLERANCE[self.codec] * float(parts.abs().max())
            require(error <= bound, f"{what}: gradient {index} is off by {error}, bound {bound}")

    def require_replicas(self, when: str) -> None:
        """*Collective.*"""
        held = {name: p.detach() for name, p in self.model.named_parameters()}
        for index, state in enumerate(self.optimizer.state.values()):
            held.update({f"{key} {index}": v for key, v in state.items() if v is not None})
        for rank, theirs in enumerate(self.comm.allgather_obj(held)):
            require(theirs.keys() == held.keys(), f"{when}: rank {rank} holds other tensors")
            for name, tensor in held.items():
                require(torch.equal(theirs[name], tensor), f"{when}: {name} differs on rank {rank}")


SCHEDULE_CONTRACTS: tuple[Callable[[Communicator, MakeSchedule, str | None], None], ...] = (
    check_means,
    check_staleness,
    check_replicas,
    check_resume,
    check_accumulation,
    check_join,
)


def check_all(comm: Communicator, schedule: str, codec: str | None) -> None:
    """All contracts for a schedule by name, with buckets so small that there are several."""
    comm.bucket_bytes = 200
    for contract in SCHEDULE_CONTRACTS:
        contract(comm, SCHEDULES[schedule], codec)
