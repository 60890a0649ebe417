"""What resuming must give: the same bits, or with other ranks the same residuals.

A run is described by a `Recipe` and created as often as needed. What is saved passes through the
description that checkpoints use (`communicators.objects`), so that only what it can describe is in
it. Each function is called on every rank and raises `ContractError`. Ranks may be threads: random
numbers come from a generator of the model's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from tests.contracts.suites.communicator_contracts import filled, require, require_near, seeded
from tests.contracts.suites.schedule_contracts import block_schedule
from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec
from torchmn.comm.object_codec import Trust, as_bytes, pack, unpack, unpack_head
from torchmn.data import GlobalSampler
from torchmn.exchange.optimizer import MultiNodeOptimizer, create_multi_node_optimizer
from torchmn.exchange.options import Weight
from torchmn.exchange.schedules import (
    DoubleBuffering,
    EveryStep,
    LocalUpdateSchedule,
    Schedule,
    Warmup,
)

NUM_STEPS = 8
States = list[dict[str, Any]]


def momentum(model: nn.Module) -> Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a run is made."""

    schedule: Callable[[int], Schedule | str] = lambda num_ranks: EveryStep()
    """From the number of ranks."""
    codec: str | Codec | None = None
    inner: Callable[[nn.Module], Optimizer] = momentum
    global_batch: int = 12
    num_samples: int = 44
    """Of the data set: an epoch has four steps, whose last batch is of 8. Under the schedules by
    blocks all ranks must have seen the same number at every place: 48."""
    num_passes: int = 1
    """Backward passes per step, all but the last under no_sync()."""
    weight: Weight = "samples"
    max_grad_norm: float | None = None
    scales: bool = False
    """With a GradScaler that finds its scale in the run."""
    zero_fill: bool = True
    has_noise: bool = True
    """Dropout and batch normalization: what differs between ranks."""


class Dropout(nn.Module):
    """Dropout with random numbers of its own, which are part of its state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        """A fifth of the elements become zeros."""
        if not self.training:
            return x
        return x * (torch.rand(x.shape, generator=self.generator) > 0.2) / 0.8

    def get_extra_state(self) -> Tensor:
        """The generator's."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from it."""
        self.generator.set_state(state)


class Run:
    """A training run on one rank that can be saved and loaded between any two passes."""

    def __init__(self, comm: Communicator, recipe: Recipe) -> None:
        self.comm, self.recipe = comm, recipe
        self.model = _network(comm.rank, has_noise=recipe.has_noise)
        schedule = recipe.schedule(comm.size)
        self.optimizer: MultiNodeOptimizer = create_multi_node_optimizer(
            recipe.inner(self.model), comm, self.model, schedule=schedule, codec=recipe.codec,
            weight=recipe.weight, max_grad_norm=recipe.max_grad_norm, zero_fill=recipe.zero_fill,
        )  # fmt: skip
        self.rates = ExponentialLR(self.optimizer, 0.97)
        # On the CPU scaled gradients of float64 stay finite, so it only ever grows.
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=64.0, growth_interval=3, enabled=recipe.scales
        )
        self.sampler = GlobalSampler(recipe.num_samples, comm, recipe.global_batch, seed=3)
        self._batches = iter(self.sampler)
        self.losses: list[float] = []
        self.num_passes = 0

    @property
    def objects(self) -> dict[str, Any]:
        """What a user would give to a checkpointer, models first."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "rates": self.rates,
            "scaler": self.scaler,
            "sampler": self.sampler,
        }

    def go_to(self, num_passes: int) -> None:
        """Train until ``num_passes`` backward passes were done."""
        while self.num_passes < num_passes:
            self.do_pass()

    def do_pass(self) -> None:
        """One backward pass, and the step if it is the last pass of one."""
        optimizer, recipe = self.optimizer, self.recipe
        if self.num_passes % recipe.num_passes == 0:
            optimizer.zero_grad()
        self.num_passes += 1
        indices = next(self._batches, None)
        if indices is None:
            self._batches = iter(self.sampler)
            indices = next(self._batches)
        if self.num_passes % recipe.num_passes:
            with optimizer.no_sync():
                self._backward(indices)
            return
        self._backward(indices)
        if recipe.scales:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        self.rates.step()

    def _backward(self, indices: Sequence[int]) -> None:
        """Of the loss, a mean over samples. The order of the last samples is that of the epoch."""
        x = torch.stack([seeded(index, 5, salt=77) / 10 for index in indices])
        loss = self.model(x).pow(2).mean()
        self.losses.append(float(loss.detach()))
        self.scaler.scale(loss).backward()

    def save(self) -> dict[str, Any]:
        """The states of all objects, as they are read from a file."""
        states = {name: each.state_dict() for name, each in self.objects.items()}
        saved: dict[str, Any] = described({**states, "num_passes": self.num_passes})
        return saved

    def load(self, states: dict[str, Any]) -> None:
        """Continue from `save`, or from `resharded`. *Collective* under some schedules."""
        for name, each in self.objects.items():
            each.load_state_dict(states[name])
        self._batches = iter(self.sampler)
        self.num_passes = states["num_passes"]

    def resharded(self, old_states: States) -> dict[str, Any]:
        """What this rank loads of the states of all old ranks, as checkpoints make it. Local."""
        states = {
            name: each.reshard_state_dict([old[name] for old in old_states], self.comm)
            if hasattr(each, "reshard_state_dict")
            else old_states[0][name]
            for name, each in self.objects.items()
        }
        own: dict[str, Any] = described({**states, "num_passes": old_states[0]["num_passes"]})
        return own

    def parameters(self) -> list[Tensor]:
        """Copies of them."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def described(state: Any) -> Any:
    """A state after packing and unpacking without pickle: tensors are copies."""
    message = pack(state, Trust())
    _, body, tensors = unpack_head(message.head, torch.device("cpu"))
    for tensor, buffer in zip(tensors, message.buffers, strict=True):
        as_bytes(tensor).copy_(buffer)
    return unpack(body, tensors, Trust())


# ---- on the same number of ranks ----


def check_resume_is_exact(
    comm: Communicator, recipe: Recipe, places: Sequence[int] | None = None
) -> None:
    """Saved after any pass and built again, a run ends with the bits of one without a break.

    Those are losses, parameters, buffers, and the states of all objects. ``places``: the numbers
    of passes after which it is saved; each if not given.
    """
    comm.route.bucket_bytes = 700
    num_passes = NUM_STEPS * recipe.num_passes
    untouched, saving = Run(comm, recipe), Run(comm, recipe)
    untouched.go_to(num_passes)
    expected = untouched.save()
    held: dict[int, dict[str, Any]] = {}
    for place in places or range(1, num_passes):
        saving.go_to(place)
        held[place] = saving.save()
    saving.go_to(num_passes)
    _require_equal(saving.save(), expected, "state", "of a run that was saved on its way")
    _close(saving)
    for place, states in held.items():
        again = Run(comm, recipe)
        again.load(states)
        again.go_to(num_passes)
        what = f"resumed from pass {place} of {num_passes}"
        _require_equal(again.losses, untouched.losses[place:], "losses", what)
        _require_equal(again.save(), expected, "state", what)
        _close(again)
    _close(untouched)


def _close(run: Run) -> None:
    run.optimizer.close()


def _require_equal(got: Any, expected: Any, path: str, what: str) -> None:
    """All bits of all tensors, all numbers, all keys."""
    require(type(got) is type(expected), f"{what}: {path} is a {type(got).__name__}")
    if isinstance(expected, dict):
        require(got.keys() == expected.keys(), f"{what}: {path} has {sorted(map(str, got))}")
        for key, value in expected.items():
            _require_equal(got[key], value, f"{path}.{key}", what)
    elif isinstance(expected, (list, tuple)):
        require(len(got) == len(expected), f"{what}: {path} has {len(got)} items")
        for index, value in enumerate(expected):
            _require_equal(got[index], value, f"{path}.{index}", what)
    elif isinstance(expected, Tensor):
        is_same = got.dtype == expected.dtype and torch.equal(got, expected)
        require(is_same, f"{what}: {path} has other bits")
    else:
        is_nan = expected != expected and got != got
        require(is_nan or got == expected, f"{what}: {path} is {got}, not {expected}")


# ---- on other ranks ----


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a run leaves for another number of ranks, and the results that are expected of them."""

    states: States
    num_ranks: int
    flushed: list[Tensor]
    """The parameters if it is flushed immediately."""
    finished: list[Tensor]
    """The parameters some steps later, flushed."""
    residuals: dict[str, Tensor]
    """By parameter, in units of the mean."""


def leave(comm: Communicator, recipe: Recipe, num_passes: int) -> Left:
    """Train so far. *Collective*; the same on all ranks."""
    comm.route.bucket_bytes = 700
    run = Run(comm, recipe)
    run.go_to(num_passes)
    states = comm.allgather_obj(run.save())
    other = Run(comm, recipe)
    other.load(described(states[comm.rank]))  # torch's optimizers keep the tensors they load
    other.optimizer.flush()
    flushed = other.parameters()
    _close(other)
    run.go_to(num_passes + 4 * recipe.num_passes)
    run.optimizer.flush()
    _close(run)
    return Left(
        states=states, num_ranks=comm.size, flushed=flushed, finished=run.parameters(),
        residuals=_residuals([state["optimizer"] for state in states]),
    )  # fmt: skip


def check_other_ranks(comm: Communicator, recipe: Recipe, left: Left) -> None:
    """Residuals are kept, all new ranks begin with the same state, and no rank's part is lost.

    Without a codec, and where nothing depends on the number of ranks, as steps with own gradients
    do: a block that ends now has
    the result that it would have had on the old ranks, and training with a fixed global batch at
    every step continues as it would have, both to rounding.
    """
    comm.route.bucket_bytes = 700
    run = Run(comm, recipe)
    before = described(left.states)
    states = run.resharded(left.states)
    _require_equal(left.states, before, "state", "reshard_state_dict() has changed what it read")
    run.load(states)
    _require_replicas(run)
    _require_residuals(run, left)
    schedule = run.optimizer.schedule
    if isinstance(schedule, Warmup):
        schedule = schedule.current
    if isinstance(schedule, LocalUpdateSchedule):
        _require_blocks(run, left)
    is_exact = recipe.codec in (None, "float32") and not recipe.has_noise
    # block momentum takes its gain from the number of ranks
    if is_exact and isinstance(schedule, LocalUpdateSchedule) and schedule.name != "block_momentum":
        run.optimizer.flush()
        require_near(run.parameters(), left.flushed, "flushed immediately")
    elif is_exact and not (isinstance(schedule, LocalUpdateSchedule) or _is_eager(schedule)):
        run.go_to(states["num_passes"] + 4 * recipe.num_passes)
        run.optimizer.flush()
        require_near(run.parameters(), left.finished, "some steps later")
    else:
        run.go_to(states["num_passes"] + 4 * recipe.num_passes)
        run.optimizer.flush()
    _require_replicas(run)
    _close(run)


def _is_eager(schedule: Schedule) -> bool:
    return isinstance(schedule, DoubleBuffering) and schedule.eager


def _require_replicas(run: Run) -> None:
    gathered = run.comm.allgather_obj(run.parameters())
    for rank, theirs in enumerate(gathered):
        for index, (mine, other) in enumerate(zip(gathered[0], theirs, strict=True)):
            require(torch.equal(mine, other), f"parameter {index} differs on rank {rank}")


def _require_residuals(run: Run, left: Left) -> None:
    """Residuals are the same in units of the mean, whatever the ranks' weights were and will be."""
    comm = run.comm
    gathered = comm.allgather_obj(described(run.optimizer.state_dict()))
    # Where ranks of a node each encode a share, each holds all residuals until a stripe takes some.
    copies = comm.intra_size if comm.route.shards_parameters else 1
    residuals = {name: total / copies for name, total in _residuals(gathered).items()}
    expected = left.residuals
    require(residuals.keys() == expected.keys(), f"residuals of {residuals.keys()}")
    for name, total in expected.items():
        error = float((residuals[name] - total).abs().max() / (total.abs().max() + 1e-30))
        require(error < 1e-6, f"of the residual of '{name}' {error} (relative) is lost or added")


def _residuals(states: States) -> dict[str, Tensor]:
    """By parameter, in units of the mean."""
    residuals: dict[str, Tensor] = {}
    for state in states:
        ours = state["torchmn"]
        fragments = ours.get("current", ours).get("fragments", [])
        for codec in (ours["codec"], *(fragment["codec"] for fragment in fragments)):
            for entry in codec.get("state", {}).get("residuals", []):
                first, values = entry["offset"], entry["values"].double() / entry["scale"]
                total = residuals.get(entry["name"], values.new_zeros(0))
                missing = max(0, first + len(values) - len(total))
                total = torch.nn.functional.pad(total, (0, missing))
                total[first : first + len(values)] += values
                residuals[entry["name"]] = total
    return residuals


def _require_blocks(run: Run, left: Left) -> None:
    schedule = block_schedule(run.optimizer)
    old = [state["optimizer"]["torchmn"] for state in left.states]
    old = [state.get("current", state) for state in old]  # phases
    state = schedule.state_dict()
    for name, anchor in old[0]["anchors"].items():
        require(torch.equal(state["anchors"][name], anchor), f"the anchor of {name} has changed")
    require(schedule.num_samples == old[0]["num_samples"], "other samples were counted")

    def in_block(states: States) -> list[float]:
        counts = zip(
            *(
                [f["num_samples"] / each["num_sharing"] for f in each["fragments"]]
                for each in states
            ),
            strict=True,
        )
        return [sum(count) for count in counts]

    now, before = in_block(run.comm.allgather_obj(described(state))), in_block(old)
    same = all(abs(a - b) < 1e-9 * (1 + b) for a, b in zip(now, before, strict=True))
    require(same, f"blocks hold {now} samples instead of {before}")


def _network(rank: int, *, has_noise: bool) -> nn.Sequential:
    """A float64 network with a matrix that is large enough to be quantized."""
    noise = [nn.BatchNorm1d(33), Dropout(rank)] if has_noise else []
    model = nn.Sequential(
        nn.Linear(5, 33), *noise, nn.Tanh(), nn.Linear(33, 34), nn.Tanh(), nn.Linear(34, 3)
    )
    return filled(model)
