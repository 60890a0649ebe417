"""What an asynchronous schedule must do, which guarantees little about replicas.

As `schedule_contracts`: each function is called on every rank, and ``make`` takes the options of
`ParameterServer`. Ranks may be threads, or processes of one machine.
"""

from __future__ import annotations

import bisect
import io
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tests.contracts.suites.communicator_contracts import contracts_in, require, seeded
from tests.contracts.suites.schedule_contracts import require_same, small_network
from torchmn.comm import Communicator
from torchmn.errors import NonFiniteGradientError
from torchmn.exchange.optimizer import MultiNodeOptimizer, create_multi_node_optimizer
from torchmn.exchange.schedules import ParameterServer

MakeServer = Callable[..., ParameterServer]

NUM_STEPS = 6
RATE = 0.01
_SLOW_S = {1: 0.3}  # by step; the first one waits for all workers. Long also for a busy machine


def check_sums(comm: Communicator, make: MakeServer) -> None:
    """Every push is applied once, in any order of workers, and all ranks end with the result.

    The gradients do not depend on the parameters, so the order does not matter. Rank r has 2 r + 1
    batches.
    """
    run = _Run(comm, make())
    with run.optimizer.join():
        for step in range(2 * comm.rank + 1 if not run.optimizer.schedule.traits.serves else 0):
            run.step(step)
    run.require_sum("after join()")
    run.require_replicas("after join()")
    run.optimizer.close()


def check_flush(comm: Communicator, make: MakeServer) -> None:
    """After flush() all pushes are applied and all ranks hold the same model and optimizer state.

    The same holds after the next one. The other ranks make so many more steps than rank 0 that they
    push the last gradient when it waits in flush(): its last pull is never the final model.
    """
    staleness = 1
    run = _Run(comm, make(max_staleness=staleness), momentum=0.9)
    num_steps = NUM_STEPS + (staleness + 2 if comm.rank > 0 else 0)
    for turn in range(2):
        for step in range(num_steps if not run.optimizer.schedule.traits.serves else 0):
            run.step(num_steps * turn + step)
        run.optimizer.flush()
        run.require_replicas(f"after flush() number {turn}")
        num_states = len(run.optimizer.state)
        require(num_states == len(list(run.model.parameters())), f"{num_states} states")
    run.optimizer.close()


def check_bound(comm: Communicator, make: MakeServer) -> None:
    """No worker begins a step more than ``max_staleness`` steps ahead of the slowest live one.

    One worker is slow on purpose. A step is counted as made when its push is about to begin, so
    what is measured is never more than what is true.
    """
    for max_staleness in (0, 1, 3):
        run = _Run(comm, make(max_staleness=max_staleness))
        began: list[float] = []
        continued: list[float] = []
        with run.optimizer.join():
            for step in range(NUM_STEPS if not run.optimizer.schedule.traits.serves else 0):
                if comm.rank == 0:
                    time.sleep(_SLOW_S.get(step, 0.02))
                run.backward(step)
                began.append(time.monotonic())
                run.optimizer.step()
                continued.append(time.monotonic())
        gathered = comm.allgather_obj((began, continued))
        for fast, (_, times) in enumerate(gathered):
            for slow, (pushes, _) in enumerate(gathered):
                for step, at in enumerate(times if pushes else ()):
                    num_made = bisect.bisect_right(pushes, at)
                    require(
                        step + 1 - num_made <= max_staleness or num_made == NUM_STEPS,
                        f"rank {fast} continued after {step + 1} steps, when rank {slow} had made "
                        f"{num_made}; allowed are {max_staleness} ahead",
                    )
        run.optimizer.close()


def check_zeros(comm: Communicator, make: MakeServer) -> None:
    """Gradients of zeros leave the parameters as they are."""
    run = _Run(comm, make())
    before = [p.detach().clone() for p in run.model.parameters()]
    with run.optimizer.join():
        for _ in range(3 if not run.optimizer.schedule.traits.serves else 0):
            run.optimizer.zero_grad()
            sums = [parameter.sum() for parameter in run.model.parameters()]
            (torch.stack(sums).sum() * 0).backward()
            run.optimizer.step()
    for old, new in zip(before, run.model.parameters(), strict=True):
        require(torch.equal(old, new), "zeros have changed a parameter")
    run.optimizer.close()


def check_alone(comm: Communicator, make: MakeServer) -> None:
    """One worker is as the plain optimizer, bit by bit, with changing hyper-parameters too."""
    alone = comm.split(comm.rank, 0)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        plain_model, model = small_network(), small_network()
        plain, inner = (
            kind([{"params": network.parameters(), "momentum": 0.9}], 0.05, weight_decay=0.01)
            for network in (plain_model, model)
        )
        optimizer = create_multi_node_optimizer(inner, alone, model, schedule=make(max_staleness=0))
        for step in range(NUM_STEPS):
            for each, network in ((plain, plain_model), (optimizer, model)):
                each.param_groups[0]["lr"] = 0.05 / (step + 1)
                each.zero_grad()
                inputs = seeded(comm.rank, 4, 1, 6, 6, salt=300 + step) / 10
                network(inputs).pow(2).mean().backward()
                each.step()
            if step == 2:
                optimizer.flush()
        for (name, expected), got in zip(
            plain_model.named_parameters(), model.parameters(), strict=True
        ):
            require(torch.equal(got, expected), f"'{name}' has other bits with {kind.__name__}")
        optimizer.close()
    alone.finalize()


def check_state(comm: Communicator, make: MakeServer) -> None:
    """What is saved after flush() is what a newly created optimizer continues with."""
    run = _Run(comm, make(), momentum=0.9)
    with run.optimizer.join():
        for step in range(NUM_STEPS if not run.optimizer.schedule.traits.serves else 0):
            run.step(step)
    file = io.BytesIO()
    torch.save((run.model.state_dict(), run.optimizer.state_dict()), file)
    again = _Run(comm, make(), momentum=0.9)
    with again.optimizer.join():
        if not again.optimizer.schedule.traits.serves:
            again.step(77)  # so that there is something to forget
    file.seek(0)
    model_state, optimizer_state = torch.load(file, weights_only=True)
    again.model.load_state_dict(model_state)
    again.optimizer.load_state_dict(optimizer_state)
    expected = {name: tensor.clone() for name, tensor in run.tensors().items()}
    for each in (run, again):
        each.optimizer.flush()  # by way of the servers
        held = each.tensors()
        require(held.keys() == expected.keys(), f"{list(expected)} became {list(held)}")
        for name, tensor in held.items():
            require(torch.equal(tensor, expected[name]), f"{name} has other bits after loading")
    for each in (run, again):
        each.optimizer.close()


def check_nonfinite(comm: Communicator, make: MakeServer) -> None:
    """A gradient that is not finite is refused where it is, and reaches no server."""
    run = _Run(comm, make())
    failing_rank, names = 0, {name for name, _ in run.model.named_parameters()}
    refusal = ""
    with run.optimizer.join():
        for step in range(NUM_STEPS if not run.optimizer.schedule.traits.serves else 0):
            if step == 3 and comm.rank == failing_rank:
                run.optimizer.zero_grad()
                sums = [parameter.sum() for parameter in run.model.parameters()]
                (torch.stack(sums).sum() * float("inf")).backward()
                try:
                    run.optimizer.step()
                except NonFiniteGradientError as error:
                    refusal = str(error)
            else:
                run.step(step)
    run.require_sum("after a refused step")
    require(bool(refusal) == (comm.rank == failing_rank), f"rank {comm.rank} got {refusal!r}")
    named = [problem.by_rank for problem in run.optimizer.nonfinite]
    expected = [failing_rank] if comm.rank == failing_rank else []
    require([set(by_rank) for by_rank in named] == [{r} for r in expected], f"named: {named}")
    require(not named or set(named[0][failing_rank]) == names, f"named: {named}")
    run.optimizer.close()


class _Run:
    """Training with gradients that do not depend on the parameters: the loss is linear in them."""

    def __init__(
        self,
        comm: Communicator,
        schedule: ParameterServer,
        *,
        momentum: float = 0,
    ) -> None:
        self.comm = comm
        self.model = small_network()
        self.begin = [p.detach().clone() for p in self.model.parameters()]
        self.total = [torch.zeros_like(p) for p in self.begin]
        inner = torch.optim.SGD(self.model.parameters(), RATE, momentum=momentum)
        self.optimizer: MultiNodeOptimizer = create_multi_node_optimizer(
            inner, comm, self.model, schedule=schedule
        )

    def step(self, step: int) -> None:
        """One, with gradients that are accounted for."""
        self.backward(step)
        self.optimizer.step()

    def backward(self, step: int) -> None:
        """Gradients of the size of 1."""
        self.optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for index, parameter in enumerate(self.model.parameters()):
            gradient = seeded(self.comm.rank, *parameter.shape, salt=1000 * step + index) / 10
            self.total[index] += gradient
            loss = loss + (parameter * gradient).sum()
        loss.backward()

    def require_sum(self, when: str) -> None:
        """The parameters are those of plain SGD with all ranks' gradients. *Collective.*"""
        for index, (name, parameter) in enumerate(self.model.named_parameters()):
            total = self.comm.allreduce(self.total[index]).flatten()
            moved = (self.begin[index] - parameter.detach()).flatten() / RATE
            off = float((moved - total).abs().max())
            require(off <= 1e-8, f"{when}: '{name}' is off by {off}")

    def require_replicas(self, when: str) -> None:
        """*Collective.*"""
        require_same(self.comm, self.tensors(), when)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer state by name."""
        held = {name: p.detach() for name, p in self.model.named_parameters()}
        names = {p: name for name, p in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            held.update({f"{k} {names[parameter]}": v for k, v in state.items() if v is not None})
        return dict(sorted(held.items()))


SERVER_CONTRACTS = contracts_in(globals())


def check_all(comm: Communicator, servers: int | str) -> None:
    """All contracts, with servers everywhere (``"all"``) or on the last ranks only."""

    def make(**options: object) -> ParameterServer:
        own_servers = servers if comm.size > 1 else "all"
        return ParameterServer(own_servers, **options)  # type: ignore[arg-type]

    for contract in SERVER_CONTRACTS:
        if contract is check_alone:
            contract(comm, lambda **options: ParameterServer("all", **options))
        else:
            contract(comm, make)
