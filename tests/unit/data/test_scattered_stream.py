"""Streams on ranks: rank 0 reads and hands out, or each rank reads its share."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import torchmn
from torchmn.data import StreamLoader, gather_outputs, scatter_loader
from torchmn.data.batch_rows import rows_of
from torchmn.errors import DataError, RankMismatchError, UnknownNameError, UsageError
from torchmn.testing import run_ranks

SIZES = [1, 2, 3, 4]
NUM = 21


class Numbers(IterableDataset[Any]):
    """The numbers of a range, of which each worker of a DataLoader yields its own."""

    def __init__(self, begin: int = 0, end: int = NUM, step: int = 1) -> None:
        self.numbers = range(begin, end, step)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from map(self.sample, itertools.islice(self.numbers, first, None, step))

    def sample(self, number: int) -> Any:
        return torch.tensor(number), torch.full((12,), number / 7, dtype=torch.float64)


class Shuffled(Numbers):
    """In an order of its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from map(self.sample, torch.randperm(NUM, generator=generator).tolist())


class WithState(Numbers):
    """Continues where its state was saved, as the streams of Hugging Face."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers[self.position :]:
            self.position += 1
            yield self.sample(number)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Broken(Numbers):
    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(super().__iter__(), 5)
        raise OSError("the shard is damaged")


def sized(rank: int, ends: Any) -> Numbers:
    """The share of a rank: as many numbers as ``ends`` says, none of which another rank has."""
    return Numbers(100 * rank, 100 * rank + ends[rank])


def seen(loader: Any) -> list[list[int]]:
    """The samples of each batch that a loop receives."""
    return [numbers.tolist() for numbers, _ in loader]


def joined(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The samples of each step over all ranks, in rank order."""
    return [sum(parts, []) for parts in zip(*ranks, strict=True)]


OPTIONS: dict[str, dict[str, Any]] = {
    "a short last batch": {"batch_size": 8},
    "drop_last": {"batch_size": 8, "drop_last": True},
    "fewer samples than ranks": {"batch_size": 2},
    "one batch": {"batch_size": 64},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPTIONS)
def test_rank_0_hands_out_the_batches_of_one_process(name: str, size: int) -> None:
    options = OPTIONS[name]
    expected = seen(DataLoader(Shuffled(), **options))

    def run(comm: torchmn.Communicator) -> Any:
        data = Shuffled()
        loader = scatter_loader(DataLoader(data, **options), comm, read_by="rank_0")
        passes = [seen(loader), seen(loader)]
        data.set_epoch(1)
        return passes, seen(loader)

    ranks = run_ranks(run, size)
    for number in range(2):
        assert joined([passes[number] for passes, _ in ranks]) == expected
    data = Shuffled()
    data.set_epoch(1)
    assert joined([last for _, last in ranks]) == seen(DataLoader(data, **options))
    assert all(
        max(map(len, parts)) - min(map(len, parts)) <= 1
        for parts in zip(*[passes[0] for passes, _ in ranks], strict=True)
    )


BATCHES: dict[str, Callable[[], Any]] = {
    "batch_size=None": lambda: DataLoader(list(_batches()), batch_size=None),  # type: ignore[arg-type]
    "a generator": lambda: _batches(),
    "an iterable": lambda: Again(),
}


class Again:
    def __iter__(self) -> Iterator[Any]:
        return _batches()


def _batches() -> Iterator[Any]:
    for begin in range(0, NUM, 4):
        numbers = torch.arange(begin, min(begin + 4, NUM))
        yield numbers, [f"sample {number}" for number in numbers.tolist()]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BATCHES)
def test_rank_0_divides_batches_that_are_made(name: str, size: int) -> None:
    def run(comm: torchmn.Communicator) -> Any:
        loader = scatter_loader(BATCHES[name](), comm, read_by="rank_0")
        assert isinstance(loader, StreamLoader)
        batches = [*loader]
        assert all(
            names == [f"sample {number}" for number in numbers.tolist()]
            for numbers, names in batches
        )
        return seen(batches)

    assert joined(run_ranks(run, size)) == seen(_batches())


@pytest.mark.parametrize("read_by", ["rank_0", "each_rank"])
@pytest.mark.parametrize("stays", [False, True])
def test_workers(read_by: Any, stays: bool) -> None:
    def run(comm: torchmn.Communicator) -> Any:
        data = Numbers() if read_by == "rank_0" else sized(comm.rank, (13, 6))
        loader = DataLoader(data, 4, num_workers=2, persistent_workers=stays)
        scattered = scatter_loader(loader, comm, read_by=read_by)
        passes = [seen(scattered) for _ in range(2)]
        for _ in scattered:
            break
        return [*passes, seen(scattered)]

    ranks = run_ranks(run, 2)
    expected = Numbers().numbers if read_by == "rank_0" else [*range(13), *range(100, 106)]
    for each in zip(*ranks, strict=True):
        steps = joined([*each])
        assert Counter(sum(steps, [])) == Counter(expected)
        if read_by == "rank_0":
            assert steps == seen(DataLoader(Numbers(), 4, num_workers=2))


SHARES = {
    "equal": (8, 8, 8, 8),
    "one ends early": (2, 9, 12, 5),
    "one has none": (0, 7, 1, 9),
    "the last has none": (9, 3, 4, 0),
    "none has any": (0, 0, 0, 0),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SHARES)
def test_each_rank_reads_its_share_and_all_end_together(name: str, size: int) -> None:
    ends = SHARES[name]

    def run(comm: torchmn.Communicator) -> Any:
        loader = DataLoader(sized(comm.rank, ends), 2 * comm.size)
        scattered = scatter_loader(loader, comm, read_by="each_rank")
        shapes = [(x.shape[1:], x.dtype) for _, x in scattered]
        assert set(shapes) <= {(torch.Size([12]), torch.float64)}
        trained = seen(scattered)
        with torch.no_grad():
            evaluated = seen(scattered)
        return trained, evaluated

    ranks = run_ranks(run, size)
    for rank, (trained, evaluated) in enumerate(ranks):
        own = [*range(100 * rank, 100 * rank + ends[rank])]
        assert sum(trained, []) == own
        assert evaluated == [own[i : i + 2] for i in range(0, len(own), 2)]
    assert {len(trained) for trained, _ in ranks} == {-(-max(ends[:size]) // 2)}


@pytest.mark.parametrize("size", [1, 3])
def test_drop_last_ends_with_the_first_rank_that_has_no_full_batch(size: int) -> None:
    def run(comm: torchmn.Communicator) -> Any:
        loader = DataLoader(sized(comm.rank, (9, 5, 12)), 2 * comm.size, drop_last=True)
        return seen(scatter_loader(loader, comm, read_by="each_rank"))

    ranks = run_ranks(run, size)
    assert {len(steps) for steps in ranks} == {4 if size == 1 else 2}
    assert all(len(batch) == 2 for steps in ranks for batch in steps)


def test_batches_that_each_rank_makes_are_kept() -> None:
    def run(comm: torchmn.Communicator) -> Any:
        own = [(torch.arange(3 + comm.rank), None)] * (1 + comm.rank)
        return seen(scatter_loader(iter(own), comm, read_by="each_rank"))

    assert run_ranks(run, 2) == [[[0, 1, 2], []], [[0, 1, 2, 3]] * 2]


def trained(batches: Any, comm: torchmn.Communicator, schedule: Any) -> list[torch.Tensor]:
    """The parameters after a pass with a loss that is a mean over the batch of a rank."""
    model = nn.Linear(12, 1, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, schedule=schedule)
    for numbers, x in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x).squeeze(1), numbers / 10).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_means_over_shares_that_end_at_different_steps_applied_a_step_later() -> None:
    """See test_stream_training.py for the means of the same step."""
    ends, schedule = (2, 9, 5), "double_buffering"

    def of_rank(comm: torchmn.Communicator) -> Any:
        given = DataLoader(sized(comm.rank, ends), 6)
        return trained(scatter_loader(given, comm, read_by="each_rank"), comm, schedule)

    whole = [[*DataLoader(sized(rank, ends), 2)] for rank in range(3)]
    steps = [
        [torch.cat(parts) for parts in zip(*filter(None, step), strict=True)]
        for step in itertools.zip_longest(*whole)
    ]
    (expected,) = run_ranks(lambda comm: trained(steps, comm, schedule), 1)
    for found in run_ranks(of_rank, 3):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("read_by", ["rank_0", "each_rank"])
def test_a_thread_that_prefetches_is_refused(read_by: Any) -> None:
    """It would communicate while gradients are exchanged, in another order on each rank."""

    def rank_main(comm: Any) -> None:
        numbers = Numbers(comm.rank, NUM, comm.size) if read_by == "each_rank" else Numbers()
        model = nn.Linear(12, 1).double()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
        batches = iter(scatter_loader(DataLoader(numbers, batch_size=4), comm, read_by=read_by))
        with ThreadPoolExecutor(1) as thread:
            _, x = thread.submit(next, batches).result()
        if comm.size > 1:
            with pytest.raises(UsageError, match=r"in the thread that trains.*num_workers="):
                model(x)
        _, x = next(batches)
        model(x).mean().backward()
        optimizer.step()

    for size in (1, 2):
        run_ranks(rank_main, size)


@pytest.mark.parametrize(
    ("read_by", "is_training", "num_workers"),
    [
        ("rank_0", True, 0),
        ("rank_0", False, 0),
        ("each_rank", True, 0),
        ("each_rank", False, 0),
        ("each_rank", True, 1),
    ],
)
def test_an_error_in_the_stream_reaches_all_ranks_at_once(
    read_by: Any, is_training: bool, num_workers: int
) -> None:
    bad = 0 if read_by == "rank_0" else 1

    def run(comm: torchmn.Communicator) -> Any:
        kind = Broken if comm.rank == bad else Numbers
        data = kind(100 * comm.rank, 100 * comm.rank + NUM)
        given = DataLoader(data, 3, num_workers=num_workers if comm.rank == bad else 0)
        steps = 0
        try:
            with torch.set_grad_enabled(is_training):
                for _ in scatter_loader(given, comm, read_by=read_by):
                    steps += 1
        except (OSError, DataError) as error:
            return steps, type(error), str(error)
        return None

    found = run_ranks(run, 2)
    gc.collect()  # an error that torch raises for a worker holds the iterator, in a cycle
    assert len({steps for steps, _, _ in found}) == 1
    for rank, (_, kind, text) in enumerate(found):
        assert "the shard is damaged" in text
        assert kind is (OSError if rank == bad else DataError)
        assert rank == bad or f"rank {bad}" in text


def test_an_error_of_the_iterator_itself_reaches_all_ranks() -> None:
    class Closed:
        def __iter__(self) -> Any:
            raise OSError("no such bucket")

    def run(comm: torchmn.Communicator) -> Any:
        with pytest.raises((OSError, DataError), match="no such bucket"):
            next(iter(scatter_loader(Closed(), comm, read_by="rank_0")))

    run_ranks(run, 3)


def first_steps(loader: Any, num: int) -> list[list[int]]:
    return seen(itertools.islice(loader, num))


STREAMS: dict[str, Callable[[int, int], Any]] = {
    "a state of its own": lambda begin, end: DataLoader(WithState(begin, end), 6),
    "skipped": lambda begin, end: DataLoader(Numbers(begin, end), 6),
    "skipped by a worker": lambda begin, end: DataLoader(Numbers(begin, end), 6, num_workers=1),
    "batches": lambda begin, end: iter([*DataLoader(Numbers(begin, end), 3)]),
}


@pytest.mark.parametrize("read_by", ["rank_0", "each_rank"])
@pytest.mark.parametrize("name", STREAMS)
def test_resume_in_the_middle_of_a_pass(name: str, read_by: Any) -> None:
    def made(comm: torchmn.Communicator) -> Any:
        begin = 100 * comm.rank * (read_by == "each_rank")
        given = STREAMS[name](begin, begin + NUM)
        return scatter_loader(given, comm, read_by=read_by)

    def run(comm: torchmn.Communicator) -> Any:
        whole = seen(made(comm))
        loader = made(comm)
        before = first_steps(loader, 2)
        state = loader.state_dict()
        assert state["batches"] == 2
        resumed = made(comm)
        resumed.load_state_dict(state)
        torch.manual_seed(1234)
        before_pass = torch.get_rng_state()
        assert before + seen(resumed) == whole
        assert resumed.state_dict() == {"batches": 0}
        if name != "batches":
            assert seen(resumed) == whole
        return torch.equal(before_pass, torch.get_rng_state()) or name == "skipped by a worker"

    run_ranks(run, 2)


@pytest.mark.parametrize("name", ["a state of its own", "skipped"])
def test_what_rank_0_reads_resumes_on_another_number_of_ranks(name: str) -> None:
    def made(comm: torchmn.Communicator) -> Any:
        return scatter_loader(STREAMS[name](0, NUM), comm, read_by="rank_0")

    def save(comm: torchmn.Communicator) -> Any:
        loader = made(comm)
        return first_steps(loader, 2), loader.state_dict()

    saved = run_ranks(save, 2)
    states = [state for _, state in saved]

    def resume(comm: torchmn.Communicator) -> Any:
        loader = made(comm)
        loader.load_state_dict(loader.reshard_state_dict(states, comm))
        return seen(loader)

    rest = joined(run_ranks(resume, 3))
    assert joined([steps for steps, _ in saved]) + rest == seen(STREAMS[name](0, NUM))


def test_a_share_is_resumed_by_its_own_rank_only() -> None:
    def run(comm: torchmn.Communicator) -> Any:
        loader = scatter_loader(DataLoader(sized(comm.rank, (9, 9)), 4), comm, read_by="each_rank")
        first_steps(loader, 2)
        states = comm.allgather_obj(loader.state_dict())
        with pytest.raises(UsageError, match="on every rank"):
            loader.load_state_dict(states[1 - comm.rank])
        with pytest.raises(UsageError, match="shares of 2 ranks are different"):
            loader.reshard_state_dict(states[:1], comm)
        assert loader.reshard_state_dict([{"batches": 0}], comm) == {"batches": 0}
        with pytest.raises(UsageError, match="on every rank"):
            loader.load_state_dict({"epoch": 1})

    run_ranks(run, 2)


class Random(Numbers):
    """Draws its order from the numbers of the process that reads it, as training does."""

    def __iter__(self) -> Iterator[Any]:
        for _ in self.numbers:
            yield torch.randint(1000, (12,))


def test_a_stream_that_cannot_be_repeated_is_refused_with_the_cure() -> None:
    def made(comm: torchmn.Communicator, num_workers: int) -> Any:
        return scatter_loader(
            DataLoader(Random(), 2, num_workers=num_workers), comm, read_by="rank_0"
        )

    def run(comm: torchmn.Communicator, num_workers: int) -> list[Any]:
        loader = made(comm, num_workers)
        for _ in itertools.islice(loader, 3):
            torch.rand(5)  # as dropout
        state = loader.state_dict()
        rest = [*itertools.islice(loader, 3)]
        resumed = made(comm, num_workers)
        resumed.load_state_dict(state)
        assert len([*itertools.islice(resumed, 3)]) == len(rest)
        return []

    torch.manual_seed(0)
    with pytest.raises(UsageError, match="draws random numbers in the process that trains"):
        run_ranks(lambda comm: run(comm, 0), 1)
    run_ranks(lambda comm: run(comm, 1), 1)  # the cure


def test_a_stream_that_has_changed_is_refused() -> None:
    def run(comm: torchmn.Communicator) -> None:
        loader = scatter_loader(DataLoader(Numbers(), 4), comm, read_by="rank_0")
        first_steps(loader, 2)
        other = scatter_loader(DataLoader(Numbers(1), 4), comm, read_by="rank_0")
        other.load_state_dict(loader.state_dict())
        with pytest.raises((UsageError, DataError), match="the stream has changed"):
            next(iter(other))

    run_ranks(run, 2)


def test_break_begins_a_new_pass_and_the_state_keeps_the_position() -> None:
    def run(comm: torchmn.Communicator) -> Any:
        loader = scatter_loader(DataLoader(Numbers(), 6), comm, read_by="rank_0")
        for _ in loader:
            break
        assert loader.state_dict()["batches"] == 1
        return seen(loader)

    assert joined(run_ranks(run, 2)) == seen(DataLoader(Numbers(), 6))


def test_the_random_numbers_of_rank_0_stay_those_of_one_process() -> None:
    class Augmented(Numbers):
        def __iter__(self) -> Iterator[Any]:
            for number in self.numbers:
                yield torch.tensor(number), torch.rand(2)

    def drawn(loader: Any) -> Any:
        found = [[x.tolist() for x in batch] for batch in loader]
        return found, torch.rand(3).tolist()

    torch.manual_seed(5)
    expected = drawn(DataLoader(Augmented(), 7))

    def run(comm: torchmn.Communicator) -> Any:
        torch.manual_seed(5)
        return drawn(scatter_loader(DataLoader(Augmented(), 7), comm, read_by="rank_0"))

    assert run_ranks(run, 1) == [expected]


def test_several_loaders_of_which_one_is_a_stream() -> None:
    def run(comm: torchmn.Communicator) -> Any:
        table = TensorDataset(torch.arange(5))
        train, test = scatter_loader(
            (DataLoader(Numbers(), 6), DataLoader(table, 2)), comm, read_by="rank_0"
        )
        assert type(train).__name__ == "ScatteredDataLoader"
        assert isinstance(train, DataLoader)
        with torch.no_grad():
            return seen(train), gather_outputs(test, [x for (x,) in test]).tolist()

    for _, outputs in run_ranks(run, 2):
        assert outputs == [0, 1, 2, 3, 4]


def test_the_length_is_that_of_a_pass() -> None:
    class Sized(Numbers):
        def __len__(self) -> int:
            return len(self.numbers)

    def run(comm: torchmn.Communicator) -> Any:
        of_rank_0 = scatter_loader(DataLoader(Sized(), 4), comm, read_by="rank_0")
        data = Sized(100 * comm.rank, 100 * comm.rank + 5 + comm.rank)
        shares = scatter_loader(DataLoader(data, 4), comm, read_by="each_rank")
        with pytest.raises(TypeError, match="no length"):
            len(scatter_loader(DataLoader(Numbers(), 4), comm, read_by="rank_0"))
        return len(of_rank_0), len(shares), len([*shares])

    assert run_ranks(run, 2) == [(6, 3, 3)] * 2


class Holding(Numbers):
    """Knows its rank, and yields a share."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, NUM, size)
        self.rank, self.world_size = rank, size


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a stream": (
        lambda comm: scatter_loader(DataLoader(Numbers(), 4), comm),
        "Pass read_by='rank_0' if it yields all samples.*Pass read_by='each_rank' if",
    ),
    "batch_size=None": (
        lambda comm: scatter_loader(
            DataLoader(TensorDataset(torch.ones(3)), batch_size=None), comm
        ),
        "a DataLoader of a TensorDataset with batch_size=None, a stream",
    ),
    "a share": (
        lambda comm: scatter_loader(DataLoader(Holding(comm.rank, comm.size), 4), comm),
        "It holds rank=0 and world_size=2, so it seems to yield this rank's share",
    ),
    "the share of another rank": (
        lambda comm: scatter_loader(DataLoader(Holding(0, 2), 4), comm, read_by="each_rank"),
        "rank 1 passed .*holds rank=0 and world_size=2 on rank 1: the share of rank 0 would",
    ),
    "a share that rank 0 would read": (
        lambda comm: scatter_loader(
            DataLoader(Holding(comm.rank, comm.size), 4), comm, read_by="rank_0"
        ),
        "the other shares would never be read",
    ),
    "batches that are too small": (
        lambda comm: scatter_loader(DataLoader(Numbers(), 1), comm, read_by="each_rank"),
        "batch_size=1 for 2 ranks",
    ),
    "no stream": (
        lambda comm: scatter_loader(
            DataLoader(TensorDataset(torch.ones(3)), 2), comm, read_by="rank_0"
        ),
        "for loaders that are not streams",
    ),
    "twice": (
        lambda comm: scatter_loader(
            scatter_loader(DataLoader(Numbers(), 4), comm, read_by="rank_0"),
            comm,
            read_by="rank_0",
        ),
        "that scatter_loader has returned",
    ),
    "a data set": (
        lambda comm: scatter_loader(TensorDataset(torch.ones(3)), comm, read_by="rank_0"),
        "It needs a torch.utils.data.DataLoader",
    ),
    "nothing that counts": (
        lambda comm: next(iter(scatter_loader(iter([1.0]), comm, read_by="each_rank"))),
        "tells the number of its samples",
    ),
    "rows that differ": (
        lambda comm: next(
            iter(scatter_loader(iter([(torch.ones(3), torch.ones(2))]), comm, read_by="rank_0"))
        ),
        "a field of it, a Tensor, has torch.Size",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_cure(name: str) -> None:
    call, match = REFUSED[name]

    def run(comm: torchmn.Communicator) -> None:
        with pytest.raises((UsageError, DataError), match=match):
            call(comm)

    run_ranks(run, 2)


def test_unknown_and_different_readers_are_refused() -> None:
    def unknown(comm: torchmn.Communicator) -> None:
        scatter_loader(DataLoader(Numbers(), 4), comm, read_by="me")  # type: ignore[call-overload]

    with pytest.raises(UnknownNameError, match="rank_0"):
        run_ranks(unknown, 1)

    def different(comm: torchmn.Communicator) -> None:
        read_by: Any = ["rank_0", "each_rank"][comm.rank]
        with pytest.raises(RankMismatchError, match="read_by is rank_0 on rank 0"):
            scatter_loader(DataLoader(Numbers(), 4), comm, read_by=read_by)

    run_ranks(different, 2)


def test_equal_shares_are_warned_of() -> None:
    def run(comm: torchmn.Communicator) -> None:
        next(iter(scatter_loader(DataLoader(Numbers(), 12), comm, read_by="each_rank")))

    with pytest.warns(
        torchmn.errors.ResultWarning, match="rank 1.*this rank and rank 0 have read the same first"
    ):
        run_ranks(run, 2)


def test_rows_of_batches() -> None:
    x, images = torch.arange(6).view(3, 2), [torch.zeros(3, 4, n) for n in (4, 5, 6)]
    batch = {"x": x, "names": ["a", "b", "c"], "scale": 0.5, "pair": (x, x.numpy()), "none": None}
    part = rows_of(batch, 1, 2, 3)
    assert part["x"].tolist() == [[2, 3]]
    assert (part["names"], part["scale"], part["none"]) == (["b"], 0.5, None)
    assert part["pair"][0].tolist() == [[2, 3]] == part["pair"][1].tolist()
    assert [each.shape[2] for each in rows_of((images, torch.ones(3)), 0, 2, 3)[0]] == [4, 5]
    assert [each.shape[2] for each in rows_of(images, 2, 3, 3)] == [6]
    assert rows_of(["a", "b"], 0, 1, 2) == ["a"]
    first, second = rows_of([x, x[:, 0]], 0, 0, 3)
    assert (first.shape, second.shape) == ((0, 2), (0,))


def test_a_saved_state_does_not_change_while_others_read_on() -> None:
    def run(comm: torchmn.Communicator) -> None:
        given = DataLoader(sized(comm.rank, (1, 9)), 4)
        loader = scatter_loader(given, comm, read_by="each_rank")
        states = [loader.state_dict() for _ in loader]
        assert [state["batches"] for state in states] == [1, 2, 3, 4, 5]

    run_ranks(run, 2)


@pytest.mark.parametrize(("read_by", "size"), [("rank_0", 2), ("rank_0", 3), ("each_rank", 2)])
def test_a_checkpointer_saves_and_restores_the_position(
    read_by: Any, size: int, tmp_path: Any
) -> None:
    def made(comm: torchmn.Communicator) -> Any:
        begin = 100 * comm.rank * (read_by == "each_rank")
        loader = scatter_loader(DataLoader(WithState(begin, begin + NUM), 6), comm, read_by=read_by)
        return loader, torchmn.create_multi_node_checkpointer(comm, tmp_path, "run")

    def save(comm: torchmn.Communicator) -> Any:
        loader, checkpointer = made(comm)
        first = first_steps(loader, 2)
        checkpointer.save(2, {"loader": loader})
        checkpointer.close()
        return first

    def resume(comm: torchmn.Communicator) -> Any:
        loader, checkpointer = made(comm)
        assert checkpointer.resume({"loader": loader}) == 2
        checkpointer.close()
        return seen(loader)

    first, rest = run_ranks(save, 2), run_ranks(resume, size)
    everything = sorted(sum(joined(first) + joined(rest), []))
    shares = range(size) if read_by == "each_rank" else [0]
    assert everything == [100 * rank + n for rank in shares for n in range(NUM)]
