"""Shares of the batch that follow the speeds of the ranks."""

import copy
import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.limits import limit
from torchmn import create_multi_node_checkpointer, create_multi_node_optimizer, scatter_loader
from torchmn.comm import Communicator
from torchmn.data.batch_shares import BatchShares, in_proportion
from torchmn.data.scatter import shard_bounds
from torchmn.errors import RankMismatchError, UnknownNameError, UsageError
from torchmn.exchange.schedules import PeriodicAverage
from torchmn.nn import convert_batch_norm
from torchmn.testing import run_ranks
from torchmn.train.large_batch import BatchGrowth, GlobalBatch
from torchmn.train.large_batch.speed_shares import _OwnTime, next_shares


@given(st.integers(0, 200), st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_proportions_are_whole_and_as_near_as_can_be(total: int, weights: list[int]) -> None:
    sizes = in_proportion(total, weights)
    assert sum(sizes) == total
    for size, weight in zip(sizes, weights, strict=True):
        assert abs(size - total * weight / sum(weights)) < 1


@given(st.integers(0, 200), st.integers(1, 9))
def test_equal_shares_are_those_of_scatter_dataset(total: int, num_ranks: int) -> None:
    bounds = [
        shard_bounds(total, num_ranks, rank, force_equal_length=False) for rank in range(num_ranks)
    ]
    assert BatchShares(num_ranks).sizes(total, at=0) == [end - begin for begin, end in bounds]


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0.001, 100.0)), min_size=1, max_size=6),
)
def test_changes_are_bounded(ranks: list[tuple[int, float]]) -> None:
    shares, costs = [share for share, _ in ranks], [cost for _, cost in ranks]
    found = next_shares(shares, costs)
    assert sum(found) == sum(shares)
    assert min(found) >= 1
    if found != shares:  # the slowest rank gains
        slowest = costs.index(max(costs))
        assert found[slowest] < shares[slowest]


def follow(
    shares: list[int], cost: Callable[[int, int], float], num_decisions: int
) -> list[list[int]]:
    """The shares after each decision; ``cost(rank, samples)`` is what a step takes."""
    history = [shares]
    for _ in range(num_decisions):
        costs = [cost(rank, samples) for rank, samples in enumerate(history[-1])]
        history.append(next_shares(history[-1], costs))
    return history


@pytest.mark.parametrize(
    ("slowness", "fixed", "best"),
    [
        ([1.0, 3.0], 0.0, [48, 16]),
        ([1.0, 1.0, 2.0], 0.0, [26, 26, 13]),
        ([1.0, 3.0], 20.0, [48, 16]),
        ([1.0, 12.0], 0.0, [59, 5]),
    ],
)
def test_the_shares_approach_the_best_ones_and_stay(
    slowness: list[float], fixed: float, best: list[int]
) -> None:
    """Also if a part of the step takes as long with fewer samples."""
    equal = in_proportion(sum(best), [1] * len(best))
    history = follow(equal, lambda rank, num: fixed + slowness[rank] * num, 20)
    assert history[-1] == history[-5]
    costs = [fixed + slow * num for slow, num in zip(slowness, history[-1], strict=True)]
    fastest = max(fixed + slow * num for slow, num in zip(slowness, best, strict=True))
    assert max(costs) <= 1.1 * fastest
    assert abs(history[-1][0] - best[0]) <= 4


def test_noise_does_not_move_them() -> None:
    numbers = random.Random(1)
    noisy = follow([32, 32], lambda _, num: num * numbers.uniform(0.98, 1.02), 100)
    assert noisy[-1] == [32, 32]
    settled = follow(
        [32, 32], lambda rank, num: num * (1 + rank) * numbers.uniform(0.98, 1.02), 100
    )
    assert len({tuple(shares) for shares in settled[20:]}) <= 2
    assert 40 <= settled[-1][0] <= 45


class Clock:
    """A clock of each rank, which is a thread, that only `work` moves."""

    is_host = True

    def __init__(self) -> None:
        self._own = threading.local()

    def work(self, seconds: float) -> None:
        self._own.now = self.mark() + seconds

    def mark(self) -> float:
        return getattr(self._own, "now", 0.0)

    def is_over(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("torchmn.train.large_batch.speed_shares.clock_of", lambda _: made)
    return made


NUM_SAMPLES = 203
NUMBERS = torch.Generator().manual_seed(3)
X = torch.randn(NUM_SAMPLES, 6, generator=NUMBERS, dtype=torch.float64)
Y = torch.randn(NUM_SAMPLES, 1, generator=NUMBERS, dtype=torch.float64)


class Training:
    """One rank's training of a small model in double precision."""

    def __init__(
        self, comm: Communicator, clock: Clock, *, num_workers: int = 0, **options: Any
    ) -> None:
        self.comm, self.clock = comm, clock
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        own = torch.Generator().manual_seed(1)  # ranks are threads, and share torch's own one
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=own) / 3)
        inner = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        more = {name: options.pop(name) for name in ("weight",) if name in options}
        self.optimizer = create_multi_node_optimizer(inner, comm, self.model, **more)
        self.batch = GlobalBatch(options.pop("global_batch", 24), comm=comm, **options)
        self.sampler = self.batch.sampler(NUM_SAMPLES, seed=5)
        plain = DataLoader(TensorDataset(X, Y), batch_sampler=self.sampler, num_workers=num_workers)
        self.loader = scatter_loader(plain, comm)
        self.sizes: list[int] = []
        self.slowness = 1 + comm.rank

    def train(self, num_epochs: int) -> None:
        for _ in range(num_epochs):
            for samples in self.loader:
                self.step(samples)

    def step(self, samples: Any) -> None:
        self.sizes.append(len(samples[0]))
        self.optimizer.zero_grad()
        for (x, y), share in self.batch.micro_batches(samples, self.optimizer):
            self.clock.work(len(x) * self.slowness)
            ((self.model(x) - y).square().mean() * share).backward()
        self.optimizer.step()

    @property
    def weights(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"local_batch": 5},
        {"num_workers": 1},
        {"weight": "rank"},  # micro_batches weights by samples in any case
        {"growth": BatchGrowth([3], 2)},
    ],
)
def test_the_means_are_those_of_one_process(
    clock: Clock, size: int, options: dict[str, Any]
) -> None:
    """Every sample counts once, whatever the shares are, also where workers prefetch."""

    def rank_main(comm: Communicator) -> tuple[torch.Tensor, list[int]]:
        training = Training(comm, clock, shares="speed", **options)
        training.train(6)
        return training.weights, training.sizes

    ((alone, whole),) = run_ranks(rank_main, 1)
    found = run_ranks(rank_main, size)
    for weights, _ in found:
        torch.testing.assert_close(weights, alone, rtol=1e-9, atol=1e-9)
    assert [sum(parts) for parts in zip(*(sizes for _, sizes in found), strict=True)] == whole
    fast, slow = found[0][1], found[-1][1]
    assert max(fast) >= 1.7 * max(slow[-5:])  # the best is 2 or 3 times as many


def test_the_split_is_near_the_best(clock: Clock) -> None:
    def rank_main(comm: Communicator) -> tuple[int, str]:
        training = Training(comm, clock, shares="speed")
        training.train(8)
        return training.batch.share, repr(training.batch)

    found = run_ranks(rank_main, 2)
    assert [share for share, _ in found] == [16, 8]
    assert "2 ranks x 8 to 16, in 2 passes of up to 8" in found[0][1]


def test_a_rank_that_sleeps_gets_fewer_samples() -> None:
    """On the real clock; other work on this machine may move the split."""

    class Sleep(Clock):
        def work(self, seconds: float) -> None:
            time.sleep(limit(0.001) * seconds)  # longer than what a busy machine adds

    def rank_main(comm: Communicator) -> int:
        training = Training(comm, Sleep(), shares="speed", local_batch=24)
        training.slowness = 1 + 3 * comm.rank
        training.train(5)
        return training.batch.share

    fast, slow = run_ranks(rank_main, 2)  # the best: four to one
    assert fast + slow == 24
    assert fast >= 1.5 * slow


def test_shares_are_resumed(clock: Clock) -> None:
    """The batches after the state are divided as in a run that did not stop."""

    def rank_main(comm: Communicator) -> tuple[list[int], list[int], dict[str, Any]]:
        training = Training(comm, clock, shares="speed")
        training.train(3)
        batches = iter(training.loader)
        for _ in range(4):
            training.step(next(batches))
        state = copy.deepcopy(training.sampler.state_dict())
        other = Training(comm, clock, shares="speed")
        other.sampler.load_state_dict(state)
        following = [len(part) for part in list(other.sampler)]
        return following, [len(x) for x, _ in batches], dict(state)

    found = run_ranks(rank_main, 2)
    for following, went_on, state in found:
        assert following == went_on
        assert (state["epoch"], state["position"]) == (3, 96)
        assert state["shares"] == found[0][2]["shares"]
    assert sum(found[0][0]) > sum(found[1][0])


def test_another_number_of_ranks_begins_with_equal_shares(clock: Clock) -> None:
    def rank_main(comm: Communicator) -> int:
        training = Training(comm, clock, shares="speed")
        training.sampler.load_state_dict({"epoch": 1, "position": 24, "shares": [[0, 3, 1]]})
        return training.batch.share

    assert run_ranks(rank_main, 3) == [8, 8, 8]
    assert run_ranks(rank_main, 2) == [18, 6]


def test_a_checkpoint_has_the_shares(clock: Clock, tmp_path: Path) -> None:
    def rank_main(comm: Communicator, trains: bool) -> tuple[int, int, int]:
        training = Training(comm, clock, shares="speed")
        checkpointer = create_multi_node_checkpointer(comm, tmp_path, "test")
        state = {"model": training.model, "sampler": training.sampler}
        if trains:
            training.train(5)
            checkpointer.save(5, state)
            checkpointer.finish()
        else:
            assert checkpointer.resume(state) == 5
        return training.sampler.epoch, training.sampler.position, training.batch.share

    saved = run_ranks(lambda comm: rank_main(comm, True), 2)
    assert saved == [(5, 0, 16), (5, 0, 8)]
    assert run_ranks(lambda comm: rank_main(comm, False), 2) == saved
    assert run_ranks(lambda comm: rank_main(comm, False), 3) == [(5, 0, 8)] * 3


class LateClock(Clock):
    """As that of a GPU: the time of a mark is known only when later ones were made."""

    def __init__(self) -> None:
        super().__init__()
        self._known = threading.local()

    def mark(self) -> float:
        now = super().mark()
        self._known.until = now - 30.0
        return now

    def is_over(self, mark: float) -> bool:
        return mark <= self._known.until

    def seconds(self, begin: float, end: float) -> float:
        assert self.is_over(end)
        return end - begin


def test_marks_that_a_gpu_has_not_passed_yet_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = LateClock()
    monkeypatch.setattr("torchmn.train.large_batch.speed_shares.clock_of", lambda _: late)

    def rank_main(comm: Communicator) -> int:
        training = Training(comm, late, shares="speed")
        training.train(6)
        return training.batch.share

    assert run_ranks(rank_main, 2) == [16, 8]


def test_what_a_rank_waits_for_is_not_its_own_time(clock: Clock) -> None:
    """Else all ranks would take as long, and the shares would stay."""
    own = _OwnTime(clock)
    own.counts = True
    own.end_step()
    for _ in range(3):
        clock.work(1.0)
        own.phase("exchange", begins=True)
        own.phase("exchange", begins=True)  # within the other one
        clock.work(5.0)
        own.phase("exchange", begins=False)
        clock.work(2.0)
        own.phase("exchange", begins=False)
        own.phase("backward", begins=True)
        own.end_step()
    assert own.median() == 1.0
    own.forget()
    assert own.median() == 0.0


def test_equal_shares_have_the_state_as_before() -> None:
    def rank_main(comm: Communicator) -> object:
        return GlobalBatch(4, comm=comm).sampler(8).state_dict()

    assert run_ranks(rank_main, 2) == [{"epoch": 0, "position": 0}] * 2


def test_each_rank_keeps_a_sample(clock: Clock) -> None:
    def rank_main(comm: Communicator) -> list[int]:
        training = Training(comm, clock, shares="speed", global_batch=4)
        training.sampler.load_state_dict({"epoch": 0, "position": 0, "shares": [[0, 99, 1]]})
        return training.sampler.shares.sizes(4, at=0)

    assert run_ranks(rank_main, 2) == [[3, 1]] * 2


def test_layers_over_all_ranks_make_as_many_passes(clock: Clock) -> None:
    def rank_main(comm: Communicator) -> list[int]:
        training = Training(comm, clock, shares="speed", local_batch=12)
        norm = convert_batch_norm(nn.BatchNorm1d(6), comm).double()
        training.model = nn.Sequential(norm, *training.model)
        training.train(4)
        return training.sizes[-3:-1]

    fast, slow = run_ranks(rank_main, 2)
    assert fast[0] > slow[0]


def test_what_cannot_be_exact_is_refused(clock: Clock) -> None:
    def rank_main(comm: Communicator) -> None:
        model = nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        batch = GlobalBatch(4, comm=comm, shares="speed")
        x = torch.ones(2, 2)
        with pytest.raises(UsageError, match=r"own sampler, and there is none.*batch_sampler="):
            [*batch.micro_batches(x, sgd)]
        batch.sampler(8)
        with pytest.raises(UsageError, match="by which SGD does not weight them"):
            [*batch.micro_batches(x, sgd)]
        averaging = create_multi_node_optimizer(sgd, comm, model, schedule=PeriodicAverage(16))
        with pytest.raises(UsageError, match=r"periodic_average: each rank steps.*every_step"):
            [*batch.micro_batches(x, averaging)]
        with torch.no_grad():
            assert len([*batch.micro_batches(x)]) == 1
        with pytest.raises(UnknownNameError, match="equal"):
            GlobalBatch(4, comm=comm, shares="fast")  # type: ignore[arg-type]
        with pytest.raises(RankMismatchError, match="GlobalBatch"):
            GlobalBatch(4, comm=comm, shares="speed" if comm.rank else "equal")

    run_ranks(rank_main, 2)


UNEQUAL = {"epoch": 0, "position": 0, "shares": [[0, 3, 1]]}


@pytest.mark.parametrize("options", [{}, {"weight": "rank"}])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_loop_that_measures_nothing_is_refused_at_its_second_batch(
    clock: Clock, is_resumed: bool, options: dict[str, Any]
) -> None:
    """Its shares would stay equal, or, if a state was loaded, as they were."""

    def rank_main(comm: Communicator) -> int:
        training = Training(comm, clock, shares="speed", **options)
        if is_resumed:
            training.sampler.load_state_dict(UNEQUAL)
        batches = iter(training.loader)
        x, y = next(batches)
        (training.model(x) - y).square().mean().backward()
        training.optimizer.step()
        with pytest.raises(UsageError, match=r"has made a step without it.*micro_batches"):
            next(batches)
        return training.sampler.shares.sizes(24, at=0)[0]

    assert run_ranks(rank_main, 2) == [18 if is_resumed else 12] * 2


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("sets_epoch", [False, True])
def test_a_loop_that_leaves_each_pass_and_measures_nothing_is_refused(
    clock: Clock, sets_epoch: bool, num_workers: int
) -> None:
    """At its second pass, as another loop is at its second batch."""

    def rank_main(comm: Communicator) -> None:
        training = Training(comm, clock, shares="speed", num_workers=num_workers)
        next(iter(training.loader))  # a peek
        for epoch in range(2):
            with pytest.raises(UsageError, match="micro_batches") if epoch else nullcontext():
                if sets_epoch:
                    training.sampler.set_epoch(epoch)
                for x, y in training.loader:
                    (training.model(x) - y).square().mean().backward()
                    training.optimizer.step()
                    break

    run_ranks(rank_main, 2)


def test_a_loop_that_leaves_each_pass_and_measures_is_followed(clock: Clock) -> None:
    def rank_main(comm: Communicator) -> int:
        training = Training(comm, clock, shares="speed")
        for _ in range(40):
            training.step(next(iter(training.loader)))
        return training.batch.share

    assert run_ranks(rank_main, 2) == [16, 8]


def test_a_step_over_loaded_shares_has_the_mean_of_one_process(clock: Clock) -> None:
    """Also without `micro_batches`: the optimizer weights by the parts that the sampler tells."""

    def rank_main(comm: Communicator) -> tuple[torch.Tensor, list[int]]:
        training = Training(comm, clock, shares="speed")
        training.sampler.load_state_dict(UNEQUAL if comm.size > 1 else {**UNEQUAL, "shares": []})
        x, y = next(iter(training.loader))
        (training.model(x) - y).square().mean().backward()
        training.optimizer.step()
        return training.weights, training.sampler.shares.sizes(24, at=0)

    ((alone, _),) = run_ranks(rank_main, 1)
    for weights, sizes in run_ranks(rank_main, 2):
        assert sizes == [18, 6]
        torch.testing.assert_close(weights, alone, rtol=1e-9, atol=1e-9)


def test_accumulated_steps_over_shares_that_change_in_between_are_refused(clock: Clock) -> None:
    def rank_main(comm: Communicator) -> None:
        training = Training(comm, clock, shares="speed")
        training.sampler.load_state_dict({**UNEQUAL, "shares": [[0, 3, 1], [24, 1, 1]]})
        batches = iter(training.loader)
        with training.optimizer.no_sync():
            x, y = next(batches)
            (training.model(x) - y).square().mean().backward()
        x, y = next(batches)
        with pytest.raises(UsageError, match="or that are divided differently, are accumulated"):
            (training.model(x) - y).square().mean().backward()

    run_ranks(rank_main, 2)
