"""What schedules and codecs must do whatever the weights of the ranks are, and however they change.

Weights by samples or tokens, short last batches, ranks without data, blocks that end early: in each
the optimizer is given the true weighted means, but for what encoding loses, and that is kept. With
R_k for the sum of all ranks' residuals after exchange k, in units of the mean,

    applied_k = true mean_k + R_(k-1) - R_k

to rounding, for every codec, schedule, route and number of ranks. Called as `schedule_contracts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.contracts.suites.communicator_contracts import require
from tests.contracts.suites.schedule_contracts import (
    TOLERANCE,
    Contract,
    MakeSchedule,
    TrackedRun,
    block_schedule,
    flat,
    variants,
)
from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec
from torchmn.exchange.optimizer import MultiNodeOptimizer
from torchmn.exchange.schedules.base import ReplicaConsistency
from torchmn.exchange.schedules.local_updates.fragments import Fragment, PseudoGradient

Weights = Sequence[Sequence[float]]
"""Of each step, by rank."""

LOST_OF_ONE = {"int8": 0.02, "int4": 0.3, "int2": 1.0, "1bit": 1.2, "power_sgd": 1.0}
"""The largest part that an exchange may lose: the norm of all that is lost, over the sum of the
norms of what the ranks gave to it. Workers and owners of stripes may each lose a part."""


def weights_of(size: int) -> Weights:
    """Equal, unequal and changing ones, short last batches, ranks without data, tokens."""
    ranks = range(size)
    return [
        [1.0 for _ in ranks],
        [4.0 for _ in ranks],
        [1.0 + rank for rank in ranks],
        [4.0 * (size - rank) for rank in ranks],
        [0.25 for _ in ranks],
        [0.0 if rank == 0 and size > 1 else 4.0 for rank in ranks],
        [4.0 if rank < size - 1 else 0.5 for rank in ranks],
        [float(317 + 1000 * ((3 * rank) % 5)) for rank in ranks],
        [3.0 if rank == size - 1 else 0.0 for rank in ranks],
        [1.0 for _ in ranks],
    ]


# ---- every step ----


def check_weighted_means(
    comm: Communicator, make: MakeSchedule, codec: str | None, weights: Weights | None = None
) -> None:
    """Every mean is the weighted one, and what a codec loses of it is added to the next."""
    weights = weights or weights_of(comm.size)
    run = TrackedRun(comm, make, codec)
    lost = [_lost(run.optimizer)]
    for step, by_rank in enumerate(weights):
        run.optimizer.set_weight(by_rank[comm.rank])
        run.step(step)
        lost.append(_lost(run.optimizer))
    run.optimizer.flush()
    require(len(run.applied) == len(weights), f"{len(run.applied)} of {len(weights)} means arrived")
    for step, (got, by_rank) in enumerate(zip(run.applied, weights, strict=True)):
        own = _Own(flat(run.local[step]), by_rank[comm.rank], lost[step], lost[step + 1])
        _require_accounted(comm, codec, flat(got), own, f"step {step}")


def check_weighted_join(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """Where one rank alone continues, the means are its own; other ranks' residuals are added."""
    run = TrackedRun(comm, make, codec)
    longest, num_rounds = comm.size - 1, 7
    num_own = num_rounds if comm.rank == longest else 2
    with run.optimizer.join():
        for step in range(num_own):
            run.optimizer.set_weight(1.0 + comm.rank + step % 3)
            run.step(step)
    applied = comm.bcast_obj(run.applied, longest)
    require(len(applied) == num_rounds, f"{len(applied)} of {num_rounds} means arrived")
    total = torch.zeros_like(_lost(run.optimizer))
    for step in range(num_rounds):
        weight = 1.0 + comm.rank + step % 3 if step < num_own else 0.0
        total += _weighted_mean(comm, flat(run.local[min(step, num_own - 1)]), weight)
    got = torch.stack([flat(gradients) for gradients in applied]).sum(0)
    largest = num_rounds * comm.allreduce(flat(run.local[0]).abs().max(), "max")
    error = float((got - (total - comm.allreduce(_lost(run.optimizer)))).abs().max())
    _require_small(codec, error, float(largest), "join()")


# ---- by blocks ----


@dataclass
class _Exchanged:
    """One exchange of a fragment, on one rank."""

    weight: float
    pseudo_gradient: Tensor
    mean: Tensor | None = None
    """What the recipe was given; None of a block without samples."""
    lost: Tensor | None = None
    """The residuals of this rank after it."""


class _Watch:
    """Notes the exchanges of one fragment."""

    def __init__(self, fragment: Fragment) -> None:
        self.exchanges: list[_Exchanged] = []
        self.num_samples = 0.0
        """Of this rank since the last exchange."""
        pack, means = fragment.pack, fragment.pseudo_gradients

        def pack_and_note(weight: float, *, is_active: bool, step: int) -> None:
            pairs = zip(fragment.anchors, fragment.parameters, strict=True)
            pseudo_gradient = flat([(anchor - parameter).detach() for anchor, parameter in pairs])
            self.exchanges.append(_Exchanged(self.num_samples, pseudo_gradient))
            self.num_samples = 0.0
            pack(weight, is_active=is_active, step=step)

        def means_and_note() -> list[PseudoGradient]:
            pseudo_gradients = means()
            sizes = {each.name: each.mean.numel() for each in pseudo_gradients}
            self.exchanges[-1].mean = flat([each.mean for each in pseudo_gradients])
            self.exchanges[-1].lost = _residuals_of(fragment.codec, sizes)
            return pseudo_gradients

        fragment.pack = pack_and_note  # type: ignore[method-assign]
        fragment.pseudo_gradients = means_and_note  # type: ignore[method-assign]


def check_weighted_blocks(
    comm: Communicator, make: MakeSchedule, codec: str | None, weights: Weights | None = None
) -> None:
    """The mean movement of every block is the weighted one, wherever in a block it is taken.

    Batches differ between ranks and steps, `flush` is called at every position of a block, and in
    the end one rank continues alone.
    """
    run = TrackedRun(comm, make, codec)
    schedule = block_schedule(run.optimizer)
    watches = [_Watch(fragment) for fragment in schedule._fragments]

    def train(step: int, num_samples: float) -> None:
        for watch in watches:
            watch.num_samples += num_samples
        run.optimizer.set_weight(num_samples)
        run.step(step)

    weights = weights or weights_of(comm.size)
    step = 0
    for num_steps in (4, 1, 3, 2, 1, 1):
        for _ in range(num_steps):
            train(step, weights[step % len(weights)][comm.rank])
            step += 1
        run.optimizer.flush()
    with run.optimizer.join():
        for extra in range(5 if comm.rank == comm.size - 1 else 1):
            train(step + extra, 4.0)
    num_exchanges = 0
    for index, watch in enumerate(watches):
        before: Tensor | None = None
        for number, exchange in enumerate(watch.exchanges):
            if exchange.mean is None or exchange.lost is None:
                continue  # no rank had seen a sample
            num_exchanges += 1
            lost = torch.zeros_like(exchange.lost) if before is None else before
            own = _Own(exchange.pseudo_gradient, exchange.weight, lost, exchange.lost)
            what = f"exchange {number} of fragment {index}"
            _require_accounted(comm, codec, exchange.mean, own, what)
            before = exchange.lost
    require(num_exchanges > 6, f"{num_exchanges} blocks were exchanged")


def check_parts_of_blocks(comm: Communicator, make: MakeSchedule, codec: str | None) -> None:
    """A block of n of B samples in which no rank moves goes n / B of the way of a full one."""
    if codec not in (None, "float32"):
        return  # what was lost before is added, whatever the block is
    schedule = block_schedule(TrackedRun(comm, make, codec).optimizer)
    if schedule.num_fragments > 1 or schedule.overlap_steps:
        return  # blocks of fragments end at several places
    ways = []
    for num_steps in (3, 1, 2):  # a full block is of three
        run = TrackedRun(comm, make, codec)
        for step in range(6):
            run.step(step)
        start = flat(run.parameters())
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        for step in range(num_steps):
            run.step(6 + step)
        run.optimizer.flush()
        ways.append(flat(run.parameters()) - start)
    full, *parts = ways
    for num_steps, way in enumerate(parts, 1):
        error = float((way - num_steps / 3 * full).abs().max())
        bound = 1e-9 * float(full.abs().max())
        require(
            error <= bound,
            f"a block of {num_steps} steps of 3 went {float(way.norm() / full.norm())} of the way",
        )


# ---- means and residuals ----


@dataclass
class _Own:
    """What one rank has to do with an exchange, all (n,)."""

    local: Tensor
    """Its gradient or movement."""
    weight: float
    lost_before: Tensor
    """Its residuals, in units of the mean."""
    lost_after: Tensor


def _require_accounted(
    comm: Communicator, codec: str | None, got: Tensor, own: _Own, what: str
) -> None:
    """``got`` is the true mean, what was lost before, and not what is lost now. *Collective.*"""
    exact = _weighted_mean(comm, own.local, own.weight)
    before, after = comm.allreduce(own.lost_before), comm.allreduce(own.lost_after)
    largest = max(
        float(comm.allreduce(own.local.abs().max(), "max")), float((exact + before).abs().max())
    )
    error = float((got - (exact + before - after)).abs().max())
    _require_small(codec, error, largest, what)
    total = float(comm.allreduce(torch.tensor(own.weight, dtype=torch.float64)))
    share = own.local * (own.weight / total) if own.weight else torch.zeros_like(own.local)
    given = float(comm.allreduce((share + own.lost_before).norm()))
    part = LOST_OF_ONE.get(codec or "", 1.0)
    lost = float(after.norm())
    require(lost <= part * given, f"{what}: {lost / given} of what was given is lost, not {part}")


def _require_small(codec: str | None, error: float, largest: float, what: str) -> None:
    bound = 1e-9 * largest
    if codec in ("float16", "bfloat16"):
        bound = TOLERANCE[codec] * largest + 1e-6
    require(error <= bound, f"{what}: {error} is in neither mean nor residual, bound {bound}")


def _weighted_mean(comm: Communicator, local: Tensor, weight: float) -> Tensor:
    """sum_i w_i x_i / sum_i w_i. *Collective.*"""
    mine = local * weight if weight else torch.zeros_like(local)
    total = float(comm.allreduce(torch.tensor(weight, dtype=torch.float64)))
    return comm.allreduce(mine) / (total or 1.0)


def _lost(optimizer: MultiNodeOptimizer) -> Tensor:
    """The residuals of this rank, one after the other for all parameters. Local."""
    sizes = {name: parameter.numel() for name, parameter in optimizer.reducer.parameters.trained()}
    optimizer.state_dict()  # it waits for what is pending
    return _residuals_of(optimizer.reducer.codec, sizes)


def _residuals_of(codec: Codec | None, sizes: dict[str, int]) -> Tensor:
    parts = {name: torch.zeros(numel, dtype=torch.float64) for name, numel in sizes.items()}
    state = {} if codec is None else codec.state_dict()
    for entry in state.get("residuals", []):
        first, values = entry["offset"], entry["values"]
        parts[entry["name"]][first : first + len(values)] += values / entry["scale"]
    return torch.cat(list(parts.values()))


WEIGHT_CONTRACTS: dict[ReplicaConsistency, tuple[Contract, ...]] = {
    "per_step": (check_weighted_means, check_weighted_join),
    "per_block": (check_weighted_blocks, check_parts_of_blocks),
}
"""What must hold, by what a schedule declares: its `replica_consistency`."""


def check_all(comm: Communicator, schedule: str, codec: str | None) -> None:
    """All contracts for a schedule by name, with buckets so small that there are several."""
    comm.route.bucket_bytes = 5000
    for make in variants(comm, schedule):
        for contract in WEIGHT_CONTRACTS[make().traits.replica_consistency]:
            contract(comm, make, codec)
