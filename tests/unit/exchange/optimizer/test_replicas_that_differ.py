"""What makes replicas differ is noticed at the next exchange, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import on_ranks
from tests.unit.models import batch, equal, loss_of, mlp, optimizer_of, sgd, train, values, wrap
from torchmn import create_multi_node_optimizer, scatter_loader
from torchmn.errors import RankMismatchError, ResultWarning
from torchmn.exchange.replica_divergence import EVERY, ReplicaWatch
from torchmn.testing import run_ranks

DIFFER = "the parameters of the ranks differ"
SCHEDULES = ["every_step", "double_buffering"]
Change = Callable[[int, nn.Module], object]


def load_on_one_rank(rank: int, model: nn.Module) -> None:
    if rank == 0:
        model.load_state_dict(mlp(seed=5).state_dict())


def draw_parameters(rank: int, model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters())[0, 0] = rank


def decay_on_one_rank(rank: int, model: nn.Module) -> None:
    if rank == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.999)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("change", [load_on_one_rank, draw_parameters, decay_on_one_rank])
def test_parameters_that_a_script_changes_are_warned_of(
    change: Change, size: int, schedule: str
) -> None:
    """In one turn of all parameters; the tests make an error of the warning."""

    def rank_main(comm):
        model, optimizer = wrap(comm, schedule=schedule)
        for step in range(EVERY * (len(values(model)) + 2)):
            train(model, optimizer, comm.rank, [step])
            if step == 2:
                change(comm.rank, model)

    with pytest.raises(ResultWarning, match=DIFFER):
        run_ranks(rank_main, size)


class Codebook(nn.Module):
    """As of a VQ-VAE: each row becomes the moving average of the samples nearest to it."""

    def __init__(self, *, persistent: bool = True, replaced: bool = False) -> None:
        super().__init__()
        self.replaced = replaced
        rows = torch.arange(9.0, dtype=torch.float64).view(3, 3) / 10
        self.register_buffer("rows", rows, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x, self.rows).argmin(1)
        if self.training:
            counts = torch.bincount(nearest, minlength=3).clamp(min=1).unsqueeze(1)
            means = torch.zeros_like(self.rows).index_add_(0, nearest, x.detach()) / counts
            if self.replaced:
                self.rows = 0.9 * self.rows + 0.1 * means
            else:
                self.rows.mul_(0.9).add_(means, alpha=0.1)
        return x + (self.rows[nearest] - x).detach()


class Counter(nn.Module):
    """Counts its calls, which are as many on all ranks; from the fifth on it has a buffer less."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 5:
            self.flag = None
        return x


def train_with(layer: nn.Module, schedule: str) -> None:
    def rank_main(comm):
        model = nn.Sequential(mlp(), copy.deepcopy(layer).double())
        optimizer = optimizer_of(comm, model, schedule=schedule)
        train(model, optimizer, comm.rank, range(EVERY * 12))
        optimizer.close()

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("replaced", [False, True])
def test_a_buffer_that_forward_computes_from_its_samples_is_warned_of(
    schedule: str, replaced: bool
) -> None:
    with pytest.raises(ResultWarning, match="differ in the buffer '1.rows' after step"):
        train_with(Codebook(replaced=replaced), schedule)


def test_checksums_depend_on_the_order() -> None:
    watch = ReplicaWatch()
    found = set()
    rows = torch.arange(24 * 128.0).view(24, 128)
    for shift in range(12):
        watch.watch([("rows", rows.roll(shift, 0))])
        watch.note(EVERY, 2)
        found.add(int(watch.checksum))  # type: ignore[arg-type]
    assert len(found) > 9


def test_a_buffer_that_was_added_after_wrapping_is_warned_of() -> None:
    """The mask of each rank's own random pruning, of equal numbers: the parameters stay equal."""

    def rank_main(comm):
        model, optimizer = wrap(comm)
        for step in range(EVERY * 12):
            train(model, optimizer, comm.rank, [step])
            if step == 2:
                mask = torch.ones_like(model[0].weight)
                mask[0, comm.rank] = 0
                prune.custom_from_mask(model[0], "weight", mask)

    with pytest.raises(ResultWarning, match=r"differ in the buffer '0\.weight_mask' after step"):
        run_ranks(rank_main, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3),
        nn.Sequential(
            nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()
        ),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
        Codebook(persistent=False),
        Counter(),
    ],
    ids=["batch norm", "instance norm", "spectral norm", "not persistent", "counter"],
)
def test_buffers_that_may_be_used(layer: nn.Module, schedule: str) -> None:
    train_with(layer, schedule)


@on_ranks(2, 3)
def test_a_step_that_one_rank_leaves_out_is_refused_on_all(comm) -> None:
    model, optimizer = wrap(comm)
    seen = []

    def train():
        for step in range(5):
            seen.append(step)
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            if step != 2 or comm.rank != 1:
                optimizer.step()

    with pytest.raises(RankMismatchError, match="different numbers of optimizer steps"):
        train()
    assert seen == [0, 1, 2, 3]
    optimizer.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.filterwarnings("ignore:(.|\n)*no multi-node optimizer trains them")
@on_ranks(2)
def test_what_all_ranks_do_is_no_difference(comm, schedule: str):
    """Steps left out, states loaded, parameters added or changed; ranks that leave their loops."""
    model = nn.Sequential(mlp(), nn.Conv1d(1, 2, 1).double()).to(torch.float64)
    model[1].weight.data = torch.ones(2, 1, 1, dtype=torch.float64)
    model[1].bias.data = torch.zeros(2, dtype=torch.float64)
    inner = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)
    optimizer = create_multi_node_optimizer(inner, comm, model, schedule=schedule)

    def train(steps, *, is_stepping=True):
        for step in steps:
            optimizer.zero_grad()
            (loss_of(model[0], batch(comm.rank, step)) + model[1].weight.sum() ** 2).backward()
            if is_stepping:
                optimizer.step()

    train(range(3))
    if schedule == "every_step":
        train([3], is_stepping=False)
    train(range(4, 6))
    optimizer.load_state_dict(optimizer.state_dict())
    train([6])
    optimizer.add_param_group({"params": list(model[1].parameters())})
    train(range(7, 9))
    with optimizer.join():
        train(range(9, 11 + comm.rank))
    train(range(12, 15))
    optimizer.flush()
    comm.bcast_data(model)
    train([15])
    optimizer.close()
    return values(model)


@pytest.mark.parametrize(
    "parameter",
    [
        torch.randn(3, 4),
        torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[:, ::2],
        torch.randn(5).bfloat16(),
        torch.randn(5).half(),
        torch.randn(5, dtype=torch.complex64),
        torch.tensor(1.5, dtype=torch.float64),
        torch.randn(70_000),
    ],
    ids=lambda tensor: f"{tensor.dtype} {[*tensor.shape]}",
)
def test_any_element_of_any_parameter_is_seen_in_turn(parameter: torch.Tensor) -> None:
    """Each element changed by itself (some of many), within the steps that a whole turn takes."""
    others = [("first", torch.zeros(3)), ("empty", torch.zeros(0))]
    num_steps = 2 * -(-parameter.numel() // 65_536)

    def checksums(changed: torch.Tensor) -> list[int]:
        watch, found = ReplicaWatch(), []
        watch.watch([*others, ("it", changed)])
        for step in range(num_steps):
            watch.note(EVERY * step, 2)
            checksum = watch.checksum
            assert checksum is not None
            found.append(int(checksum))
        return found

    before = checksums(parameter)
    assert all(0 <= each < 4096 for each in before)
    for place in range(0, parameter.numel(), max(1, parameter.numel() // 7)):
        changed = parameter.clone(memory_format=torch.preserve_format)
        index = [int(each) for each in torch.unravel_index(torch.tensor(place), changed.shape)]
        changed[tuple(index)] *= 1.5
        assert checksums(changed) != before


# ---- parameters that are changed without a backward pass ----


def zeroth_order(comm, model: nn.Module, x: torch.Tensor, step: int, *, is_shared: bool) -> None:
    """MeZO: along random numbers of a seed, by how the loss differs to both sides."""

    def move(by: float) -> None:
        draw = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
            parameter.data.add_(noise, alpha=by)

    with torch.no_grad():
        move(1e-3)
        above = loss_of(model, x)
        move(-2e-3)
        slope = (above - loss_of(model, x)).item() / 2e-3
        if is_shared:
            slope = float(comm.sum_over_ranks(slope)) / comm.size
        move(1e-3 - 1e-2 * slope)


def rank_of_zeroth_order(comm, *, steps: bool, is_shared: bool) -> list[torch.Tensor]:
    model, optimizer = wrap(comm, weight="rank")
    data = TensorDataset(torch.cat([batch(0, number, 8) for number in range(4)]))
    loader = scatter_loader(DataLoader(data, batch_size=8), comm)
    for epoch in range(3):
        for number, (x,) in enumerate(loader):
            zeroth_order(comm, model, x, 4 * epoch + number, is_shared=is_shared)
            if steps:
                optimizer.step()
    return values(model)


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_changes_without_a_backward_pass_are_warned_of(size: int, steps: bool) -> None:
    """By the exchanges of `step`, or, if there are none, when the next pass begins."""

    def rank_main(comm):
        with pytest.raises(ResultWarning, match=DIFFER) as caught:
            rank_of_zeroth_order(comm, steps=steps, is_shared=False)
        return str(caught.value)

    if steps:
        for text in run_ranks(rank_main, size):
            assert "after step 4." in text
        return
    with pytest.raises(ResultWarning, match=DIFFER) as caught:  # not on rank 0, with which it is
        run_ranks(partial(rank_of_zeroth_order, steps=steps, is_shared=False), size)
    assert "'0.weight' without an exchange of gradients." in str(caught.value)


@pytest.mark.parametrize("steps", [False, True])
def test_changes_without_a_backward_pass_that_ranks_share_are_not(steps: bool) -> None:
    results = run_ranks(partial(rank_of_zeroth_order, steps=steps, is_shared=True), 3)
    assert all(equal(result, results[0]) for result in results)


@on_ranks(2)
def test_a_model_that_is_trained_after_close_is_the_ranks_own(comm) -> None:
    model = mlp()
    create_multi_node_optimizer(sgd(model), comm, model).close()
    loader = scatter_loader(DataLoader(TensorDataset(batch(0, 0, 8)), batch_size=8), comm)
    own = sgd(model)
    for _ in range(3):
        for (x,) in loader:
            own.zero_grad()
            loss_of(model, x).backward()
            own.step()
