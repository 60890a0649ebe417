"""What every schedule must do, with every codec, route and world size, held to what it declares.

Each function is called on every rank with the communicator, something that makes the schedule, and
the name of a codec, and raises `ContractError` where the contract is broken. Ranks may be threads.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.contracts.suites.communicator_contracts import (
    ContractError,
    filled,
    require,
    require_near,
    seeded,
)
from torchmn.comm import Communicator
from torchmn.errors import NonFiniteGradientError
from torchmn.exchange.optimizer import MultiNodeOptimizer, create_multi_node_optimizer
from torchmn.exchange.optimizer.create import SCHEDULES
from torchmn.exchange.schedules import (
    EveryStep,
    LocalUpdateSchedule,
    PeriodicAverage,
    Schedule,
    Warmup,
)
from torchmn.exchange.schedules.base import ReplicaConsistency
from torchmn.exchange.schedules.local_updates.fragments import PseudoGradient

MakeSchedule = Callable[[], Schedule]
Gradients = list[Tensor]

TOLERANCE = {None: 1e-12, "float32": 1e-12, "float16": 2e-3, "bfloat16": 2e-2}
"""Of a mean, relative to the largest gradient that is in it. Only the sum over steps of what other
codecs return has a bound, see `check_sums_up`: of one mean they give the number of gradients."""
NUM_STEPS = 5


def check_means(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """The optimizer is given the mean of every backward pass, in order, none lost, none twice."""
    run = TrackedRun(comm, make, codec)
    for step in range(NUM_STEPS):
        run.step(step)
    run.optimizer.flush()
    require(
        len(run.applied) == NUM_STEPS,
        f"{NUM_STEPS} backward passes and a flush gave {len(run.applied)} steps",
    )
    run.require_means(
        (got, local, comm.size, f"step {step}")
        for step, (got, local) in enumerate(zip(run.applied, run.local, strict=True))
    )


def check_staleness(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """``p.grad`` is as late as declared when backward returns, and so are the steps."""
    run = TrackedRun(comm, make, codec)
    late = run.optimizer.schedule.traits.staleness_steps
    means: list[tuple[Gradients, Gradients, int, str]] = []
    for step in range(NUM_STEPS):
        run.backward(step)
        got = run.gradients()
        if step < late:
            require(not got, f"backward pass {step} left gradients, of which step?")
        elif comm.size > 1 or late:
            means.append((got, run.local[step - late], comm.size, f"backward pass {step}"))
        run.optimizer.step()
        num_expected = max(0, step + 1 - late)
        require(
            len(run.applied) == num_expected,
            f"after {step + 1} iterations there were {len(run.applied)} steps, not {num_expected}",
        )
    run.require_means(means)
    for _ in range(2):
        run.optimizer.flush()
        require(len(run.applied) == NUM_STEPS, f"flush() led to {len(run.applied)} steps")


def check_replicas(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """All ranks hold the same bits after every step, in parameters and optimizer state."""
    run = TrackedRun(comm, make, codec)
    held: dict[str, Tensor] = {}
    for step in range(NUM_STEPS):
        run.step(step)
        held |= {f"{name} after step {step}": t.clone() for name, t in run.replicated().items()}
    run.require_same(held, "in a run")
    run.optimizer.flush()
    run.require_replicas("after flush()")


def check_resume(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """Resuming from a saved state gives the bits of a run without a break."""
    run = TrackedRun(comm, make, codec)
    for step in range(NUM_STEPS):
        run.step(step)
    file = io.BytesIO()
    torch.save((run.model.state_dict(), run.optimizer.state_dict()), file)
    again = TrackedRun(comm, make, codec)
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
        require(torch.equal(got, expected), f"{name} has other bits after resuming")


def check_accumulation(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """Passes under no_sync() and the one after them count as one pass of their sum."""
    run = TrackedRun(comm, make, codec)
    sums = []
    for step in range(NUM_STEPS):
        run.optimizer.zero_grad()
        with run.optimizer.no_sync():
            run.add_pass(2 * step)
        run.add_pass(2 * step + 1)
        sums.append([a + b for a, b in zip(*run.local[-2:], strict=True)])
        run.optimizer.step()
    run.optimizer.flush()
    applied = run.applied
    require(len(applied) == NUM_STEPS, f"{NUM_STEPS} steps of two passes gave {len(applied)}")
    run.require_means(
        (got, local, comm.size, f"step {step}")
        for step, (got, local) in enumerate(zip(applied, sums, strict=True))
    )


def check_join(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """Rank r has r + 1 batches: means are over ranks that have data, replicas equal at the end."""
    run = TrackedRun(comm, make, codec)
    with run.optimizer.join():
        for step in range(comm.rank + 1):
            run.step(step)
    run.require_replicas("after join()")
    longest = comm.size - 1
    applied = comm.bcast_obj(run.applied, longest)
    require(len(applied) == comm.size, f"the longest loop led to {len(applied)} steps")
    nothing = [torch.zeros_like(p) for p in run.model.parameters()]
    run.require_means(
        (
            got,
            run.local[step] if step <= comm.rank else nothing,
            comm.size - step,
            f"round {step} of uneven loops",
        )
        for step, got in enumerate(applied)
    )


def check_sums_up(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """What was applied adds up to the sum of the true means, less the residuals."""
    run = TrackedRun(comm, make, codec)
    for step in range(NUM_STEPS):
        run.step(step)
    run.optimizer.flush()
    if codec in TOLERANCE and codec not in (None, "float32"):
        return  # rounds, and keeps no residual
    entries = run.optimizer.state_dict()["torchmn"]["codec"].get("state", {}).get("residuals", [])
    residuals = [e for entries in comm.allgather_obj(entries) for e in entries]
    for index, (name, parameter) in enumerate(run.model.named_parameters()):
        local = torch.stack([gradients[index] for gradients in run.local]).sum(0)
        total = comm.allreduce(local, "mean").flatten()
        found = torch.stack([gradients[index] for gradients in run.applied]).sum(0).flatten()
        _add_residuals(found, residuals, name)
        off = float((found - total).abs().max() / (total.abs().max() + 1e-300))
        require(off < 1e-5, f"of '{name}' {off} (relative) is neither applied nor in the residual")
        require(bool(parameter.isfinite().all()), f"'{name}' is not finite")


def check_zeros(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """Gradients of zeros lead to none but zeros."""
    run = TrackedRun(comm, make, codec)
    for _ in range(NUM_STEPS):
        run.optimizer.zero_grad()
        sums = [parameter.sum() for parameter in run.model.parameters()]
        (torch.stack(sums).sum() * 0).backward()
        run.optimizer.step()
    run.optimizer.flush()
    for gradients in run.applied:
        for gradient in gradients:
            require(not gradient.any(), f"zeros became {gradient.unique()[:3]}")


def check_nonfinite(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """A gradient that is not finite is refused on all ranks, by name, and leaves no trace."""
    run, untouched = TrackedRun(comm, make, codec), TrackedRun(comm, make, codec)
    failing_rank = comm.size - 1
    refusals = []
    for step in (0, 1, 2, 3, None, 4, 5):
        before = run.values()
        try:
            if step is None:
                run.optimizer.zero_grad()
                loss = run.model(seeded(comm.rank, 4, 1, 6, 6) / 10).pow(2).mean()
                (loss * (float("inf") if comm.rank == failing_rank else 1.0)).backward()
                run.optimizer.step()
            else:
                run.step(step)
        except NonFiniteGradientError as error:
            refusals.append(str(error))
            for held, value in zip(before, run.values(), strict=True):
                require(torch.equal(held, value), "the refused step changed parameters")
        if step is not None:
            untouched.step(step)
    for each in (run, untouched):
        each.optimizer.flush()
    run.require_replicas("after a refused step")
    require(len(refusals) == 1, f"one bad step led to {len(refusals)} refusals")
    require(f"rank {failing_rank}: " in refusals[0], f"the rank is not named: {refusals[0]}")
    require(len(run.optimizer.nonfinite) == 1, "it is not recorded")
    named = run.optimizer.nonfinite[0].by_rank
    names = {name for name, _ in run.model.named_parameters()}
    is_named = set(named) == {failing_rank} and set(named[failing_rank]) == names
    require(is_named, f"named: {named}")
    if run.optimizer.schedule.traits.staleness_steps:
        return  # later gradients were taken at other parameters
    for (name, expected), got in zip(
        untouched.model.named_parameters(), run.model.parameters(), strict=True
    ):
        require(torch.equal(got, expected), f"{name} has other bits since")


def check_options(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """A step is taken with the learning rate that `step` was called with."""
    run = TrackedRun(comm, make, codec)
    late = run.optimizer.schedule.traits.staleness_steps
    for step in range(NUM_STEPS):
        run.step(step)
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.7
    run.optimizer.flush()
    replay = small_network()
    inner = _Recorder(replay)
    for step, gradients in enumerate(run.applied):
        for parameter, gradient in zip(replay.parameters(), gradients, strict=True):
            parameter.grad = gradient
        inner.param_groups[0]["lr"] = 0.05 * 0.7 ** (step + late)
        inner.step()
    require_near(run.values(), list(replay.parameters()), "other options")


def check_trajectory(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """What is not late ends where `every_step` does: no layer runs with old parameters."""
    run, plain = TrackedRun(comm, make, codec), TrackedRun(comm, EveryStep, codec)
    if run.optimizer.schedule.traits.staleness_steps or codec not in (None, "float32"):
        return
    for each in (run, plain):
        for step in range(NUM_STEPS):
            each.step(step)
        each.optimizer.flush()
    require_near(run.values(), plain.values(), "another path than every_step")


# ---- schedules by blocks ----


def check_block_means(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """The first block moves all along the mean of the ranks' movements, weighted by samples.

    The factor is the recipe's; the direction is the same for all.
    """
    run = TrackedRun(comm, make, codec, batch_size=2 + comm.rank)
    start = run.parameters()
    run.step(0)
    here = [(b - w).double() for b, w in zip(start, run.parameters(), strict=True)]
    run.optimizer.flush()
    moved = flat([(b - w).double() for b, w in zip(start, run.parameters(), strict=True)])
    gathered = comm.allgather_obj((2 + comm.rank, flat(here)))
    total = sum(num_samples for num_samples, _ in gathered)
    mean = torch.stack([num_samples * part / total for num_samples, part in gathered]).sum(0)
    factor = float(moved @ mean / (mean @ mean))
    error = float((moved - factor * mean).abs().max())
    largest = max(float(part.abs().max()) for _, part in gathered)
    require(factor > 0, f"the block moved by {factor} times the mean of the ranks' movements")
    if codec in TOLERANCE:
        bound = 2 * TOLERANCE[codec] * largest * abs(factor)
        require(error <= bound, f"the block moved by {factor} means and {error}, bound {bound}")
    counted = block_schedule(run.optimizer).num_samples
    require(counted == total, f"{counted} samples were counted instead of {total}")


def check_block_replicas(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """Anchors are the same bits on all ranks at all times, parameters at the end of each block.

    Between, ranks do differ. With overlap parameters are the same after flush() only.
    """
    run = TrackedRun(comm, make, codec)
    schedule = block_schedule(run.optimizer)
    num_moves = 0
    for step in range(3 * NUM_STEPS):
        before = [anchor.clone() for anchor in schedule.anchors.values()]
        run.step(step)
        anchors = list(schedule.anchors.values())
        run.require_same(dict(schedule.anchors), f"of the anchors after step {step}")
        if step == 0 or all(map(torch.equal, anchors, before)):
            continue
        num_moves += 1
        if schedule.overlap_steps == 0 and schedule.num_fragments == 1:
            run.require_same(run.named_parameters(), f"after step {step}, the end of a block")
    require(num_moves >= 3, f"{3 * NUM_STEPS} steps led to {num_moves} new anchors")
    run.optimizer.flush()
    run.require_same(run.named_parameters(), "after flush()")
    held = zip(run.parameters(), schedule.anchors.values(), strict=True)
    require(all(torch.equal(p, a) for p, a in held), "flush() left parameters off their anchors")


def check_block_accumulation(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """The optimizer is given the rank's own gradients, summed over the passes of a step."""
    run = TrackedRun(comm, make, codec)
    for step in range(2):
        run.optimizer.zero_grad()
        with run.optimizer.no_sync():
            run.add_pass(2 * step)
        run.add_pass(2 * step + 1)
        run.optimizer.step()
        sums = [a + b for a, b in zip(*run.local[-2:], strict=True)]
        require(len(run.applied) == step + 1, f"step {step} led to {len(run.applied)} steps")
        for index, (got, expected) in enumerate(zip(run.applied[-1], sums, strict=True)):
            error = float((got - expected).abs().max())
            bound = 1e-12 * float(expected.abs().max())
            require(error <= bound, f"step {step}: gradient {index} is off by {error}")


def check_block_join(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """Rank r has r + 1 batches: no rank's samples are lost, replicas equal at the end."""
    run = TrackedRun(comm, make, codec)
    schedule = block_schedule(run.optimizer)
    num_samples = 0
    for extra in (1, 3):
        with run.optimizer.join():
            for step in range(comm.rank + extra):
                run.step(step)
        run.require_same(run.named_parameters(), "after join()")
        num_samples += 4 * sum(rank + extra for rank in range(comm.size))
        counted = schedule.num_samples
        require(counted == num_samples, f"{counted} samples were counted of {num_samples}")
    require(len(run.applied) == 2 * comm.rank + 4, f"{len(run.applied)} steps of this rank")


def check_block_sums_up(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """What recipes were given adds up to the ranks' mean movements, less the residuals."""
    run = TrackedRun(comm, make, codec)
    schedule = block_schedule(run.optimizer)
    if schedule.overlap_steps or codec in ("float16", "bfloat16"):
        return  # what is pending cannot be seen; rounds, and keeps no residual
    after_steps: list[list[Tensor]] = []
    run.optimizer.inner.register_step_post_hook(lambda *_: after_steps.append(run.parameters()))
    moved = {name: torch.zeros_like(p) for name, p in run.named_parameters().items()}
    given = {name: torch.zeros_like(p) for name, p in moved.items()}
    outer_step = schedule.outer_step

    def note(pseudo_gradients: Sequence[PseudoGradient], num_samples: float) -> None:
        after = dict(zip(moved, after_steps[-1], strict=True))
        for each in pseudo_gradients:
            moved[each.name] += each.anchor - after[each.name]
            given[each.name] += each.mean
        outer_step(pseudo_gradients, num_samples)

    schedule.outer_step = note  # type: ignore[method-assign]
    for step in range(4 * 3):
        run.step(step)
    residuals = [e for entries in comm.allgather_obj(_residuals(schedule)) for e in entries]
    for name, local in moved.items():
        total = comm.allreduce(local, "mean").flatten()
        found = given[name].flatten()
        _add_residuals(found, residuals, name)
        off = float((found - total).abs().max() / (total.abs().max() + 1e-300))
        require(off < 1e-5, f"of '{name}' {off} (relative) is neither in means nor in residuals")


def check_block_zeros(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """Where no rank moves, anchors stay."""
    run = TrackedRun(comm, make, codec)
    start = run.parameters()
    for _ in range(7):
        run.optimizer.zero_grad()
        (run.model(seeded(comm.rank, 4, 1, 6, 6) / 10).sum() * 0).backward()
        run.optimizer.step()
    run.optimizer.flush()
    require(all(map(torch.equal, run.parameters(), start)), "gradients of zeros moved parameters")


def check_block_nonfinite(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """A block that is not finite on one rank is an error on all, which go back to its beginning.

    Its parameter's residuals are as before.
    """
    run = TrackedRun(comm, make, codec)
    schedule = block_schedule(run.optimizer)
    for step in range(2):
        run.step(step)
    run.optimizer.flush()
    name, parameter = max(run.model.named_parameters(), key=lambda item: item[1].numel())
    start, residuals = parameter.detach().clone(), _residuals(schedule)
    run.backward(2)
    if comm.rank == comm.size - 1 and parameter.grad is not None:
        parameter.grad.view(-1)[0] = float("nan")
    try:
        run.optimizer.step()
        run.optimizer.flush()
    except NonFiniteGradientError as error:
        expected = f"rank {comm.size - 1}: {name}"
        require(expected in str(error), f"the error does not name {expected!r}: {error}")
    else:
        require(False, "a movement that is not finite was no error on this rank")
    anchor = schedule.anchors[name]
    require(torch.equal(anchor, start), "a block that is not finite has moved the anchor")
    require(torch.equal(parameter, start), f"{name} has not gone back to the anchor")
    for before, after in zip(residuals, _residuals(schedule), strict=True):
        if before["name"] == name:
            lost, kept = (each["values"] / each["scale"] for each in (before, after))
            is_same = torch.allclose(kept, lost, rtol=1e-12, atol=0)  # one more conversion
            require(is_same, f"the residuals of {name} have changed")
    run.step(3)
    run.optimizer.flush()
    run.require_same(run.named_parameters(), "after the next block")
    require(bool(parameter.isfinite().all()), "the next block is not finite either")


# ---- warm-up ----


def check_warmup(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """It ends with the exchange that completes its samples; until then all ranks are equal."""
    run = TrackedRun(comm, make, codec)
    schedule = run.optimizer.schedule
    if not isinstance(schedule, Warmup):
        raise ContractError(f"{schedule!r} has no warm-up")
    for step in range(2 * NUM_STEPS):
        run.step(step)
        num_samples = 4 * comm.size * (step + 1)
        is_due = num_samples >= schedule.warmup_samples
        require(schedule.is_over == is_due, f"{schedule.current.name} after step {step}")
        require(schedule.num_samples <= num_samples, f"{schedule.num_samples} of {num_samples}")
        if schedule.traits.replica_consistency == "per_step":
            counted = schedule.num_samples
            require(counted == num_samples, f"{counted} samples were counted of {num_samples}")
            run.require_replicas(f"after step {step}, in the warm-up")
    run.optimizer.flush()
    run.require_same(run.named_parameters(), "after flush()")


def check_warmup_join(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """Ranks may leave their loops during the warm-up: replicas are equal when all have left."""
    for longest in (3, 7, 12):
        run = TrackedRun(comm, make, codec)
        with run.optimizer.join():
            for step in range(longest if comm.rank == comm.size - 1 else 1 + comm.rank):
                run.step(step)
        run.require_same(run.named_parameters(), f"after join() with up to {longest} steps")
        with run.optimizer.join():
            for step in range(longest, longest + 3):
                run.step(step)
        run.optimizer.flush()
        run.require_same(run.named_parameters(), f"after {longest} and 3 steps")


def _add_residuals(values: Tensor, entries: Sequence[dict[str, Any]], name: str) -> None:
    """Those of a parameter to its flat values, in units of the mean."""
    for entry in entries:
        if entry["name"] == name:
            first = entry["offset"]
            values[first : first + len(entry["values"])] += entry["values"] / entry["scale"]


def _residuals(schedule: LocalUpdateSchedule) -> list[dict[str, Any]]:
    """The residuals of this rank, fragment by fragment."""
    codecs = [fragment["codec"] for fragment in schedule.state_dict()["fragments"]]
    return [entry for each in codecs for entry in each.get("state", {}).get("residuals", [])]


def block_schedule(optimizer: MultiNodeOptimizer) -> LocalUpdateSchedule:
    """The optimizer's schedule, by blocks. Raises ContractError."""
    schedule = optimizer.schedule
    if isinstance(schedule, Warmup):
        schedule = schedule.current
    if not isinstance(schedule, LocalUpdateSchedule):
        raise ContractError(f"{schedule!r} declares blocks, but is no LocalUpdateSchedule")
    return schedule


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All elements, one tensor after the other."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def require_same(comm: Communicator, held: dict[str, Tensor], when: str) -> None:
    """The same bits on all ranks. *Collective.*"""
    for rank, theirs in enumerate(comm.allgather_obj(held)):
        require(theirs.keys() == held.keys(), f"{when}: rank {rank} holds other tensors")
        for name, tensor in held.items():
            require(torch.equal(theirs[name], tensor), f"{when}: {name} differs on rank {rank}")


class TrackedRun:
    """A training run that remembers local gradients and what the inner optimizer was given."""

    def __init__(
        self, comm: Communicator, make: MakeSchedule, codec: str | None, batch_size: int = 4
    ) -> None:
        self.comm = comm
        self.batch_size = batch_size
        self.codec = codec
        self.model: nn.Module = small_network()
        self._inner = _Recorder(self.model)
        self.optimizer: MultiNodeOptimizer = create_multi_node_optimizer(
            self._inner, comm, self.model, schedule=make(), codec=codec
        )
        self.local: list[Gradients] = []

    @property
    def applied(self) -> list[Gradients]:
        """The gradients of every step that was taken."""
        given = [self._inner.given.get(p, []) for p in self.model.parameters()]
        numbers = {len(gradients) for gradients in given}
        require(len(numbers) == 1, f"the parameters had {sorted(numbers)} steps")
        return [list(gradients) for gradients in zip(*given, strict=True)]

    def values(self) -> list[Tensor]:
        """Copies of the parameters, as they are saved."""
        return [value.clone() for value in self.model.state_dict().values()]

    def step(self, step: int) -> None:
        """One step as users write it."""
        self.backward(step)
        self.optimizer.step()

    def backward(self, step: int) -> None:
        """All of a step but `step` itself."""
        self.optimizer.zero_grad()
        self.add_pass(step)

    def add_pass(self, step: int) -> None:
        """A forward and a backward pass; ``step`` makes the batch."""
        inputs = seeded(self.comm.rank, self.batch_size, 1, 6, 6, salt=200 + step) / 10
        parameters = list(self.model.parameters())
        loss = self.model(inputs).pow(2).mean()
        self.local.append(list(torch.autograd.grad(loss, parameters, retain_graph=True)))
        loss.backward()

    def gradients(self) -> Gradients:
        """Copies of what is in ``p.grad``."""
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def parameters(self) -> list[Tensor]:
        """Copies of them."""
        return [p.detach().clone() for p in self.model.parameters()]

    def named_parameters(self) -> dict[str, Tensor]:
        """As they are, by name."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def require_means(self, means: Iterable[tuple[Gradients, Gradients, int, str]]) -> None:
        """Check each ``(got, local, num_ranks, what)``. *Collective*: one exchange for all of them.

        ``got`` is the sum of all ranks' ``local`` over ``num_ranks``.
        """
        means = list(means)
        gathered = self.comm.allgather_obj([local for _, local, _, _ in means])
        for number, (got, local, num_ranks, what) in enumerate(means):
            require(len(got) == len(local), f"{what}: {len(got)} gradients instead of {len(local)}")
            if self.codec not in TOLERANCE:
                continue
            for index, mine in enumerate(got):
                parts = torch.stack([theirs[number][index] for theirs in gathered])
                error = float((mine - parts.sum(0) / num_ranks).abs().max())
                bound = TOLERANCE[self.codec] * float(parts.abs().max())
                require(error <= bound, f"{what}: gradient {index} is off by {error}, {bound=}")

    def require_replicas(self, when: str) -> None:
        """Parameters and optimizer state. *Collective.*"""
        self.require_same(self.replicated(), when)

    def replicated(self) -> dict[str, Tensor]:
        """Parameters and optimizer state, by name."""
        held = dict(self.model.state_dict())
        for index, state in enumerate(self.optimizer.state.values()):
            held.update({f"{key} {index}": v for key, v in state.items() if v is not None})
        return held

    def require_same(self, held: dict[str, Tensor], when: str) -> None:
        """The same bits on all ranks. *Collective.*"""
        require_same(self.comm, held, when)


class _Recorder(Optimizer):
    """SGD with momentum that keeps a copy of every gradient that it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.05, "momentum": 0.9})
        self.given: dict[Tensor, Gradients] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.given.setdefault(parameter, []).append(parameter.grad.clone())
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                velocity = self.state[parameter]["momentum_buffer"]
                velocity.mul_(group["momentum"]).add_(parameter.grad)
                parameter.sub_(group["lr"] * velocity)


def small_network() -> nn.Sequential:
    """A small float64 network with matrices that are large enough to be quantized."""
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 4 * 4, 45), nn.Tanh(),
        nn.Linear(45, 41), nn.Tanh(), nn.Linear(41, 4),
    )  # fmt: skip
    return filled(model)


Contract = Callable[[Communicator, MakeSchedule, str | None], None]
SCHEDULE_CONTRACTS: dict[ReplicaConsistency, tuple[Contract, ...]] = {
    "per_step": (
        check_means,
        check_staleness,
        check_replicas,
        check_resume,
        check_accumulation,
        check_join,
        check_sums_up,
        check_zeros,
        check_nonfinite,
        check_options,
        check_trajectory,
    ),
    "per_block": (
        check_block_means,
        check_block_replicas,
        check_resume,
        check_block_accumulation,
        check_block_join,
        check_block_sums_up,
        check_block_zeros,
        check_block_nonfinite,
    ),
}
"""What must hold, by what a schedule declares: its `replica_consistency`."""


OPTION_CONTRACTS: dict[str, tuple[Callable[[int], Schedule], tuple[Contract, ...]]] = {
    "warm-up": (
        lambda size: Warmup(8 * size, PeriodicAverage(12 * size)),
        (check_warmup, check_warmup_join, check_resume),
    ),
    "warm-up, overlapped": (
        lambda size: Warmup(8 * size, PeriodicAverage(12 * size, overlap_steps=2, num_fragments=2)),
        (check_warmup, check_warmup_join, check_resume),
    ),
    "warm-up of a codec": (
        lambda size: Warmup(8 * size, EveryStep()),
        (check_warmup, check_warmup_join, check_resume),
    ),
}
"""By option, a schedule for a number of ranks, and the contracts that it is held to."""


def check_option(comm: Communicator, option: str, codec: str | None) -> None:
    """All contracts for a schedule with an option, with buckets so small that there are several."""
    comm.route.bucket_bytes = 5000
    make, contracts = OPTION_CONTRACTS[option]
    for contract in contracts:
        contract(comm, partial(make, comm.size), codec)


def variants(comm: Communicator, schedule: str) -> list[MakeSchedule]:
    """A schedule by name; one by blocks with small blocks of three steps, whole and streamed."""
    make = SCHEDULES[schedule]
    if isinstance(make, type) and issubclass(make, LocalUpdateSchedule):
        whole = partial(make, 12 * comm.size)
        return [whole, partial(whole, overlap_steps=2, num_fragments=2)]
    return [SCHEDULES[schedule]]


def check_all(comm: Communicator, schedule: str, codec: str | None) -> None:
    """All contracts for a schedule by name, with buckets so small that there are several."""
    comm.route.bucket_bytes = 5000
    for make in variants(comm, schedule):
        for contract in SCHEDULE_CONTRACTS[make().traits.replica_consistency]:
            contract(comm, make, codec)
