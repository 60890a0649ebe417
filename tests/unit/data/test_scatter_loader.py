"""An ordinary DataLoader on ranks: together they have the batches of one process, in its order."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import torchmn
from torchmn.control.script import show_exception
from torchmn.data import GlobalSampler, scatter_loader
from torchmn.data.sampler_randomness import GeneratorMarks, capture, replayed
from torchmn.data.scattered_batches import ScatteredBatches
from torchmn.errors import DataError, RankMismatchError, UsageError
from torchmn.testing import run_ranks

SIZES = [1, 2, 3, 4]
NUM = 21
few_samples = pytest.mark.filterwarnings("ignore:scatter_loader. batches of")


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(num: int = NUM) -> TensorDataset:
    return TensorDataset(torch.arange(num), torch.arange(num) * 10)


class Descending(Sampler[int]):
    """A sampler of one's own, without a generator and without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM - 1, -1, -1))


class TwoLengths(Sampler[list[int]]):
    """A batch sampler of one's own: batches of different lengths, and `set_epoch`."""

    epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(NUM, generator=generator(self.epoch)).tolist()
        yield order[:5]
        yield order[5:17]
        yield order[17:]

    def __len__(self) -> int:
        return 3

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class EagerGenerator(Sampler[list[int]]):
    """Draws all batches of a pass as soon as an iterator is made, as the samplers of torchdata."""

    def __init__(self) -> None:
        self.generator = generator()

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(NUM, generator=self.generator).tolist()
        return iter([order[:8], order[8:16], order[16:]])

    def __len__(self) -> int:
        return 3


def eager_loader(**options: Any) -> DataLoader[Any]:
    sampler = EagerGenerator()
    return DataLoader(data(), batch_sampler=sampler, generator=sampler.generator, **options)


LOADERS: dict[str, Any] = {
    "drawn at once from a generator": eager_loader,
    "drawn at once, with a worker": lambda: eager_loader(num_workers=1),
    "in order": lambda: DataLoader(data(), 8),
    "shuffled": lambda: DataLoader(data(), 8, shuffle=True, generator=generator()),
    "drop_last": lambda: DataLoader(data(), 8, True, drop_last=True, generator=generator()),
    "batch smaller than the ranks": lambda: DataLoader(data(), 2),
    "weighted": lambda: DataLoader(
        data(),
        8,
        sampler=WeightedRandomSampler(np.arange(NUM).tolist(), 30, generator=generator()),
    ),
    "with replacement": lambda: DataLoader(
        data(), 8, sampler=RandomSampler(data(), True, 1000, generator=generator())
    ),
    "a length that stands for no end": lambda: DataLoader(
        data(), 8, sampler=RandomSampler(data(), True, 10**12, generator=generator())
    ),
    "subset": lambda: DataLoader(
        data(), 4, sampler=SubsetRandomSampler(range(3, 17), generator=generator())
    ),
    "own sampler without a length": lambda: DataLoader(data(), 4, sampler=Descending()),
    "own batch sampler": lambda: DataLoader(data(), batch_sampler=TwoLengths()),
    "list of batches": lambda: DataLoader(data(), batch_sampler=[[4, 3, 2], [1], [0, 5]]),
    "tensors of indices": lambda: DataLoader(
        data(),
        batch_sampler=torch.arange(NUM).split(4),  # type: ignore[arg-type]
    ),
    "keys": lambda: DataLoader(
        {key: ord(key) for key in "abcdef"},  # type: ignore[arg-type]
        batch_sampler=BatchSampler(list("fedcba"), 3, drop_last=False),
        collate_fn=torch.tensor,
    ),
    "two workers": lambda: DataLoader(data(), 8, True, num_workers=2, generator=generator()),
    "workers that stay": lambda: DataLoader(
        data(), 8, True, num_workers=1, persistent_workers=True, generator=generator()
    ),
}


def passes(loader: DataLoader[Any], num: int = 3) -> list[list[list[int]]]:
    """The first field of every batch of some passes, which may have no end."""
    return [[first_of(batch).tolist() for batch in islice(loader, 150)] for _ in range(num)]


def first_of(batch: Any) -> torch.Tensor:
    return batch if isinstance(batch, torch.Tensor) else batch[0]


def together(ranks: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    """What all ranks have in each step, in rank order."""
    return [
        [sum(parts, []) for parts in zip(*of_pass, strict=True)]
        for of_pass in zip(*ranks, strict=True)
    ]


@few_samples
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LOADERS)
def test_the_batches_of_one_process(name: str, size: int) -> None:
    if name == "keys" and size > 3:
        pytest.skip(reason="an empty part needs a sample 0, which this data set has not")
    wanted = passes(LOADERS[name]())

    def rank_main(comm):
        loader = scatter_loader(LOADERS[name](), comm)
        if name != "own sampler without a length":
            assert len(loader) == len(LOADERS[name]())
        return passes(loader)

    ranks = run_ranks(rank_main, size)
    assert together(ranks) == wanted
    if name == "shuffled":
        assert wanted[0] != wanted[1]  # new in each pass
    lengths = [[len(part) for batches in own for part in batches] for own in ranks]
    assert all(max(parts) - min(parts) <= 1 for parts in zip(*lengths, strict=True))


def test_options_and_class_are_kept() -> None:
    class Mine(DataLoader[Any]):
        def __init__(self) -> None:  # another constructor
            super().__init__(data(), 4, shuffle=True, num_workers=2, prefetch_factor=3, timeout=7)
            self.color = "red"

    def rank_main(comm):
        loader = Mine()
        scattered = scatter_loader(loader, comm)
        assert isinstance(scattered, Mine)
        assert loader.batch_sampler is not scattered.batch_sampler
        assert type(scattered).__name__ == "ScatteredMine"
        assert {*vars(scattered)} == {*vars(loader)}
        other = [n for n, value in vars(scattered).items() if value is not getattr(loader, n)]
        assert {*other} <= {"batch_sampler", "collate_fn"}

    run_ranks(rank_main, 2)


def test_an_attribute_of_the_batch_sampler() -> None:
    def rank_main(comm):
        loader = scatter_loader(DataLoader(data(), batch_sampler=TwoLengths()), comm)
        loader.batch_sampler.set_epoch(5)
        with pytest.raises(AttributeError, match="no_such_name"):
            loader.batch_sampler.no_such_name  # noqa: B018
        return passes(loader, 1)

    alone = TwoLengths()
    alone.set_epoch(5)
    assert together(run_ranks(rank_main, 2)) == [[*alone]]


# ---- parts without samples ----


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_without_samples_gets_no_rows_in_training_and_nothing_in_evaluation(
    size: int,
) -> None:
    def rank_main(comm):
        loader = scatter_loader(DataLoader(data(9), 8), comm)
        trained = [len(x) for x, _ in loader]
        with torch.no_grad():
            evaluated = [len(x) for x, _ in loader]
        with torch.inference_mode():
            assert [len(x) for x, _ in loader] == evaluated
        return trained, evaluated

    ranks = run_ranks(rank_main, size)
    assert [len(trained) for trained, _ in ranks] == [2] * size
    assert [len(evaluated) for _, evaluated in ranks] == [2] + [1] * (size - 1)
    assert sum(sum(evaluated) for _, evaluated in ranks) == 9
    assert ranks[-1][0][-1] == 0


# ---- weights ----


@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("size", [2, 3])
def test_means_are_exact_for_uneven_parts(size: int, when: str) -> None:
    """Whatever is made first: 21 samples in batches of 8, the last one of 5."""
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(NUM, 5).double(), torch.randn(NUM, 3).double())
    start = nn.Linear(5, 3).double().state_dict()

    def train(comm=None):
        model = nn.Linear(5, 3).double()
        model.load_state_dict(start)
        loader = DataLoader(samples, 8, shuffle=True, generator=generator())
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if comm is not None:
            if when == "before":
                loader = scatter_loader(loader, comm)
            optimizer = torchmn.create_multi_node_optimizer(optimizer, comm, model)
            if when == "between":  # another step than the first that has an exchange
                nn.functional.mse_loss(model(samples[0][0][None]), samples[0][1][None]).backward()
                optimizer.zero_grad()
            if when != "before":
                loader = scatter_loader(loader, comm)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        return model.weight.detach()

    wanted = train()
    for weight in run_ranks(train, size):
        torch.testing.assert_close(weight, wanted, rtol=0, atol=1e-12)


def test_weights_that_were_asked_for_stay() -> None:
    def rank_main(comm):
        model = nn.Linear(5, 3)
        made = [
            torchmn.create_multi_node_optimizer(
                torch.optim.SGD(model.parameters(), 0.1), comm, model, **options
            )
            for options in ({"weight": "rank"}, {"weight": "samples"}, {"reduction": "sum"})
        ]
        assert all(each.reducer.contribution.batches is None for each in made)
        model = nn.Linear(5, 3)
        closed = torchmn.create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), 0.1), comm, model
        )
        hooks = len(model._forward_pre_hooks)
        closed.close()
        scatter_loader(DataLoader(data()), comm)
        assert len(model._forward_pre_hooks) <= hooks

    run_ranks(rank_main, 2)


# ---- state ----


@pytest.mark.parametrize(
    "name",
    [
        "shuffled",
        "weighted",
        "own batch sampler",
        "two workers",
        "workers that stay",
        "drawn at once from a generator",
    ],
)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 3), (3, 1)])
def test_resumes_in_the_middle_of_a_pass(name: str, before: int, after: int) -> None:
    wanted = passes(LOADERS[name](), 2)

    def save(comm):
        loader = scatter_loader(LOADERS[name](), comm)
        batches = loader.batch_sampler
        assert isinstance(batches, ScatteredBatches)
        assert batches.state_dict() == {"batches": 0}
        for number, _ in enumerate(loader):
            if number == 1:
                state = batches.state_dict()
                break
        assert batches.state_dict() == {"batches": 0}, "left early: the next for is a new pass"
        return state

    states = run_ranks(save, before)
    assert [state["batches"] for state in states] == [2] * before

    def resume(comm):
        random.seed(99)
        loader = scatter_loader(LOADERS[name](), comm)
        loader.batch_sampler.load_state_dict(states[0])
        assert loader.batch_sampler.state_dict()["batches"] == 2
        return passes(loader, 2)

    found = together(run_ranks(resume, after))
    assert found == [wanted[0][2:], wanted[1]]


class OwnState(DataLoader[Any]):
    """As torchdata's StatefulDataLoader: a state of its own, in terms of its own sampler."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_with_a_state_of_its_own(num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        return OwnState(data(), 4, True, generator=generator(), num_workers=num_workers)

    wanted = passes(make(), 2)

    def save(comm):
        loader: Any = scatter_loader(make(), comm)
        for number, _ in enumerate(loader):
            if number == 1:
                break
        return loader.state_dict()  # of the pass that was left, as torchdata's

    states = run_ranks(save, 2)

    def resume(comm):
        loader: Any = scatter_loader(make(), comm)
        loader.load_state_dict(states[0])
        for _ in loader:
            state = loader.state_dict()
            break
        assert state["batches"] == 3, "counted from the beginning of the pass"
        loader.load_state_dict(states[0])
        return passes(loader, 2)

    assert together(run_ranks(resume, 3)) == [wanted[0][2:], wanted[1]]


def test_resume_leaves_the_process_s_numbers_as_they_are() -> None:
    """In one process, whose default generator draws the order and, for example, dropout."""

    def train(num_batches: int, state: Any = None) -> tuple[list[Any], Any]:
        def rank_main(comm):
            loader = scatter_loader(DataLoader(data(), 4, shuffle=True), comm)
            seen: list[Any] = []
            if state is not None:
                loader.batch_sampler.load_state_dict(state[0])
                torch.set_rng_state(state[1])
            while len(seen) < num_batches:
                for x, _ in loader:
                    seen.append((x.tolist(), torch.rand(()).item()))
                    if len(seen) == num_batches:
                        return seen, (loader.batch_sampler.state_dict(), torch.get_rng_state())
            raise AssertionError

        return run_ranks(rank_main, 1)[0]

    torch.manual_seed(5)
    wanted, _ = train(14)
    torch.manual_seed(5)
    begun, state = train(8)  # in the second pass
    torch.manual_seed(77)
    resumed, _ = train(6, state)
    assert begun + resumed == wanted


def test_states_of_another_order_are_refused() -> None:
    def rank_main(comm):
        loader = scatter_loader(DataLoader(data(), 8, shuffle=True, generator=generator()), comm)
        iterator = iter(loader)
        next(iterator)
        state = loader.batch_sampler.state_dict()
        other = scatter_loader(DataLoader(data(), 4, shuffle=True, generator=generator()), comm)
        other.batch_sampler.load_state_dict(state)
        with pytest.raises(UsageError, match="draws another order"):
            next(iter(other))
        with pytest.raises(UsageError, match="is not a state"):
            other.batch_sampler.load_state_dict({"epoch": 0, "position": 3})
        return [len(x) for x, _ in other]  # and it continues with a new pass

    assert run_ranks(rank_main, 2) == [[2] * 5 + [1], [2] * 5 + [0]]


# ---- errors ----


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Broken(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1
        raise LookupError("no more weights")

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda comm: data(), "a TensorDataset. It needs a torch.utils.data.DataLoader"),
        (
            lambda comm: DataLoader(Stream(), 4),
            "a DataLoader of a Stream, a stream, which has no batches of indices",
        ),
        (
            lambda comm: DataLoader(data(), batch_size=None),
            "a TensorDataset with batch_size=None, a stream",
        ),
        (
            lambda comm: DataLoader(data(), 4, sampler=DistributedSampler(data(), 2, 0)),
            "DistributedSampler gives each rank its part already",
        ),
        (
            lambda comm: scatter_loader(
                DataLoader(data(), batch_sampler=GlobalSampler(NUM, comm, 4)), comm
            ),
            "GlobalSampler gives each rank its part already",
        ),
        (
            lambda comm: scatter_loader(DataLoader(data(), 4), comm),
            "ScatteredBatches gives each rank its part already",
        ),
        (
            lambda comm: DataLoader(torchmn.scatter_dataset(data(), comm), 4),
            "a shard of scatter_dataset",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(make: Any, text: str) -> None:
    def rank_main(comm):
        with pytest.raises(UsageError, match="scatter_loader: rank 0 passed") as caught:
            scatter_loader(make(comm), comm)
        return str(caught.value)

    texts = run_ranks(rank_main, 2)
    assert texts[0] == texts[1]
    assert text in texts[0]


def test_a_part_made_by_split_dataset_is_no_shard() -> None:
    first, _ = torchmn.data.split_dataset(data(), 6)

    def rank_main(comm):
        return passes(scatter_loader(DataLoader(first, 4), comm), 1)

    assert together(run_ranks(rank_main, 2)) == [[[0, 1, 2, 3], [4, 5]]]


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: DataLoader(data(20 + rank), 4),
        lambda rank: DataLoader(data(), 4 + rank),
        lambda rank: DataLoader(data(), 4, sampler=Descending(), num_workers=rank),
        lambda rank: [DataLoader(data(), 4)] * (1 + rank),
    ],
)
def test_loaders_that_differ_are_refused(make: Any) -> None:
    def rank_main(comm):
        with pytest.raises(RankMismatchError, match="rank 0 .* rank 1") as caught:
            scatter_loader(make(comm.rank), comm)
        return str(caught.value)

    texts = run_ranks(rank_main, 2)
    assert texts[0] == texts[1]


def test_a_sampler_that_raises_ends_all_ranks() -> None:
    def rank_main(comm):
        loader = scatter_loader(DataLoader(data(), 4, sampler=Broken()), comm)
        with pytest.raises((LookupError, DataError), match="no more weights") as caught:
            next(iter(loader))
        return caught.type

    assert run_ranks(rank_main, 2) == [LookupError, DataError]


# ---- how people loop ----


def test_a_generator_used_between_passes_stays_as_it_was_left() -> None:
    def rank_main(comm):
        own = generator()
        loader = scatter_loader(DataLoader(data(), 8, shuffle=True, generator=own), comm)
        next(iter(loader))
        torch.rand(1, generator=own)
        left = own.get_state()
        batches = iter(loader.batch_sampler)  # type: ignore[arg-type]
        assert torch.equal(own.get_state(), left)
        return len(list(batches))

    assert run_ranks(rank_main, 2) == [3, 3]


def test_workers_of_ranks_draw_different_numbers() -> None:
    """Also where all ranks have given the loader the same generator."""

    class Noise(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(())

    def rank_main(comm):
        loader = scatter_loader(DataLoader(Noise(), 4, num_workers=1, generator=generator()), comm)
        return torch.cat(list(loader)).tolist()

    first, second = run_ranks(rank_main, 2)
    assert set(first).isdisjoint(second)


def test_a_framework_that_makes_the_batch_sampler_again_is_refused() -> None:
    """As Lightning does: over a sampler of its own, with what the batch sampler shows."""

    def rank_main(comm: Any) -> None:
        found: Any = scatter_loader(DataLoader(data(), batch_size=4), comm).batch_sampler
        shown = {"batch_size": found.batch_size, "drop_last": found.drop_last}
        with pytest.raises(UsageError, match="use_distributed_sampler=False"):
            type(found)(SequentialSampler(data()), **shown)
        assert len([*copy.copy(found)]) == 6

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("is_of_another_loader", [True, False])
def test_ranks_in_different_passes_raise(is_of_another_loader: bool) -> None:
    """One rank validates by itself while the others continue: no rank gets the order of another."""

    def rank_main(comm: torchmn.comm.Communicator) -> str:
        first, second = scatter_loader((DataLoader(data(), 4), DataLoader(data(), 4)), comm)
        is_alone = comm.rank == 0
        loader = second if is_alone and is_of_another_loader else first
        with (
            torch.set_grad_enabled(is_of_another_loader or not is_alone),
            pytest.raises(RankMismatchError, match="ranks are in different calls") as caught,
        ):
            next(iter(loader))
        return str(caught.value)

    for text in run_ranks(rank_main, 2):
        assert "a pass over loader 0 of scatter_loader to train" in text
        other = "loader 1 of scatter_loader to train" if is_of_another_loader else "to evaluate"
        assert other in text


# ---- a sampler that draws again from the same random numbers ----


def test_every_generator_is_replayed_and_the_process_s_own_continue() -> None:
    own = torch.Generator().manual_seed(1)
    sampler = BatchSampler(RandomSampler(range(9), generator=own), 3, drop_last=False)

    def draw() -> tuple[object, ...]:
        drawn = torch.rand(2).tolist(), random.random(), np.random.rand(), random.gauss(0, 1)
        return (*drawn, np.random.randn(), list(sampler))

    state = capture(sampler)
    wanted = draw()
    left = own.get_state()
    before = capture(None)
    with replayed(state, sampler):
        assert draw() == wanted
    assert torch.equal(own.get_state(), left), "it stays where the draws have left it"
    first = torch.rand(2).tolist(), random.random(), np.random.rand()
    with replayed(before, None):
        assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == first


def test_an_endless_pass_keeps_few_marks() -> None:
    own = torch.Generator()
    marks = GeneratorMarks(RandomSampler(range(3), generator=own))

    def draws():
        while True:
            yield torch.rand(1, generator=own)

    batches = marks.marked(draws())
    for number in range(1, 101):
        next(batches)
        marks.forget_before(number - 1)
        if number == 99:
            wanted = own.get_state()
    marks.drawn()
    assert len(marks._states) == 2
    marks.rewind(99)
    assert torch.equal(own.get_state(), wanted)


# ---- what the script changes between passes ----


CHANGES: dict[str, Callable[[DataLoader[Any]], None]] = {
    "batch_size": lambda loader: setattr(loader.batch_sampler, "batch_size", 9),
    "drop_last": lambda loader: setattr(loader.batch_sampler, "drop_last", True),
    "sampler": lambda loader: setattr(
        loader.batch_sampler, "sampler", SequentialSampler(range(13))
    ),
    "more data": lambda loader: setattr(loader.dataset, "tensors", data(33).tensors),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_passes_holds_as_in_one_process(change: str, size: int) -> None:
    def two_passes(loader: DataLoader[Any]) -> list[Any]:
        before = passes(loader, 1)
        CHANGES[change](loader)
        return [*before, *passes(loader, 1), len(loader)]

    def make() -> DataLoader[Any]:
        return DataLoader(data(), 8, shuffle=True, generator=generator())

    *wanted, num = two_passes(make())
    ranks = run_ranks(lambda comm: two_passes(scatter_loader(make(), comm)), size)
    assert [each.pop() for each in ranks] == [num] * size
    assert together(ranks) == wanted


@pytest.mark.parametrize("changed_rank", [0, 1])
def test_a_batch_size_that_one_rank_changes_is_refused(changed_rank: int) -> None:
    def rank_main(comm):
        loader = scatter_loader(DataLoader(data(), 8), comm)
        if comm.rank == changed_rank:
            CHANGES["batch_size"](loader)
        with pytest.raises(RankMismatchError, match="batch_size=9"):
            next(iter(loader))

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("name", ["batch_size", "sampler", "drop_last", "dataset"])
def test_what_torch_refuses_to_set_is_refused(name: str) -> None:
    loader = run_ranks(lambda comm: scatter_loader(DataLoader(data(), 8), comm), 1)[0]
    with pytest.raises(ValueError, match="should not be set after"):
        setattr(loader, name, 4)


def test_a_data_set_that_ranks_change_in_different_ways() -> None:
    def rank_main(comm):
        own = data()
        loader = scatter_loader(DataLoader(own, 8), comm)
        passes(loader, 2)
        own.tensors[1][5] = comm.rank  # a pseudo-label
        return passes(loader, 1)

    with pytest.warns(UserWarning, match=r"tensors\[1\] differ.*gather_by_index") as caught:
        run_ranks(rank_main, 2)
    assert len(caught) == 1


@pytest.mark.parametrize("is_new", [False, True])
def test_weights_of_a_sampler_that_ranks_change_in_different_ways(is_new: bool) -> None:
    """Rank 0 draws: it would never use what the others have written."""

    def rank_main(comm):
        def divided():
            sampler = WeightedRandomSampler(weights, 2 * NUM, generator=generator())
            return scatter_loader(DataLoader(data(), 8, sampler=sampler), comm)

        weights = torch.ones(NUM, dtype=torch.float64)
        loader = divided()
        passes(loader, 2)
        weights[comm.rank] = 9  # the loss of one of the rank's own samples
        return passes(divided() if is_new else loader, 1)

    with pytest.warns(
        UserWarning, match=r"WeightedRandomSampler.weights differ.*gather_by_index"
    ) as caught:
        run_ranks(rank_main, 2)
    assert len(caught) == 1


def test_what_a_sampler_of_the_user_keeps_is_not_compared() -> None:
    class Kept(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            self.drawn = [*torch.randperm(NUM, generator=generator()).tolist()]
            return iter(self.drawn)

    def rank_main(comm):
        loader = scatter_loader(DataLoader(data(), 8, sampler=Kept(data())), comm)
        assert passes(loader, 3)

    run_ranks(rank_main, 2)


# ---- few samples ----


@pytest.mark.parametrize("is_training", [True, False])
def test_batches_with_fewer_samples_than_ranks_warn_at_once(is_training: bool) -> None:
    def rank_main(comm):
        loader = scatter_loader(DataLoader(data(), 2), comm)
        with torch.set_grad_enabled(is_training):
            next(iter(loader), None)

    with pytest.warns(UserWarning, match="batches of 2 for 3 ranks: 1 of the ranks get no sample"):
        run_ranks(rank_main, 3)


@pytest.mark.parametrize("num", [1, 21])
def test_a_short_batch_does_not_warn(num: int) -> None:
    def rank_main(comm):
        passes(scatter_loader(DataLoader(data(num), 10), comm), 1)

    run_ranks(rank_main, 2)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before")
@pytest.mark.parametrize(("num", "notes"), [(19, "1 of the 3 samples"), (17, "0 of the 1 samples")])
def test_an_exception_of_a_tiny_part_is_given_its_size(num: int, notes: str) -> None:
    def rank_main(comm):
        layer = nn.BatchNorm1d(1) if num == 19 else nn.Identity()
        loader = scatter_loader(DataLoader(data(num), 4 if num == 19 else 8), comm)
        shown: list[str] = []
        try:
            for x, _ in loader:
                layer(x.float().view(-1, 1)).sum().item() / len(x)
        except (ValueError, ZeroDivisionError) as error:
            show_exception(error, lambda kind, value, trace: shown.extend(value.__notes__))
        return shown

    first, last = run_ranks(rank_main, 2)
    assert first == []
    assert len(last) == 1
    assert notes in last[0]
