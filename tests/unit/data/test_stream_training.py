"""Training on streams: the parameters on ranks are those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import torchmn
from tests.unit.data.test_scattered_stream import Numbers, WithState
from torchmn.data import scatter_loader
from torchmn.errors import UsageError
from torchmn.testing import run_ranks

READERS = ["rank_0", "each_rank"]
NUM_EPOCHS = 2


class Rows(Numbers):
    """Samples by number, the same on all ranks."""

    def sample(self, number: int) -> Any:
        own = torch.Generator().manual_seed(number)
        values = torch.randn(7, generator=own, dtype=torch.float64)
        return {"x": values[:6], "labels": values[6:]}


class Resumable(Rows, WithState):
    """With a state, which the process that reads it keeps."""


class Batches:
    """An iterable of batches, such as a pipeline makes."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


@dataclass(frozen=True)
class Case:
    """The stream of one process, and those of ranks."""

    read_by: Any
    kind: str
    batch_size: int  # that of all ranks
    ends: tuple[int, ...]  # of each rank's share, or of the whole stream for ``rank_0``
    drop_last: bool = False
    data: type[Rows] = Rows

    def of_one(self) -> Any:
        """The batches over all ranks."""
        workers = 2 if self.kind == "workers" else 0
        times = NUM_EPOCHS if self.kind == "generator" else 1
        if self.read_by == "rank_0":
            whole = self._loader(self.data(0, self.ends[0]), self.batch_size, workers)
            return itertools.chain(*[whole] * times) if self.kind == "generator" else whole
        sizes = [self._size(rank) for rank in range(len(self.ends))]
        shares = [
            [*self._loader(self._share(rank), size, workers)] * times
            for rank, size in enumerate(sizes)
        ]
        steps = zip(*shares, strict=False) if self.drop_last else itertools.zip_longest(*shares)
        joined = [
            {key: torch.cat([part[key] for part in step if part]) for key in ("x", "labels")}
            for step in steps
        ]
        return Batches(lambda: iter([dict(batch) for batch in joined]))

    def on(self, comm: Any) -> Any:
        """The parts of this rank."""
        if self.read_by == "rank_0":
            data, size = self.data(0, self.ends[0]), self.batch_size
        else:
            data, size = self._share(comm.rank), self._size(comm.rank)
        given: Any
        if self.kind == "generator":  # one pass alone
            given = itertools.chain.from_iterable(
                self._loader(data, size) for _ in range(NUM_EPOCHS)
            )
        elif self.kind == "iterable":
            given = Batches(lambda: iter(self._loader(data, size)))
        else:
            given = self._loader(data, self.batch_size, 2 if self.kind == "workers" else 0)
        return scatter_loader(given, comm, read_by=self.read_by)

    def _loader(self, data: Any, size: int, workers: int = 0) -> Any:
        return DataLoader(data, size, num_workers=workers, drop_last=self.drop_last)

    def _share(self, rank: int) -> Rows:
        return self.data(100 * rank, 100 * rank + self.ends[rank])

    def _size(self, rank: int) -> int:
        return len(range(self.batch_size)[rank :: len(self.ends)])


def made_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    own = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=own, dtype=torch.float64))
    return model


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    labels = batch.pop("labels")  # as with the batches of Hugging Face
    return ((model(batch["x"]) - labels) ** 2).mean()


class Training:
    """A loop with what loops have: clipping, a scaler of losses, averaged parameters."""

    def __init__(
        self, case: Case, comm: Any = None, *, every: int = 1, second: Case | None = None
    ) -> None:
        self.case, self.comm, self.every, self.second = case, comm, every, second
        self.model = made_model()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        if comm is not None:
            self.optimizer = torchmn.create_multi_node_optimizer(self.optimizer, comm, self.model)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.loader = self.made(case)
        self.losses: list[float] = []
        self.num_steps = 0

    def made(self, case: Case) -> Any:
        """Its loader here."""
        return case.of_one() if self.comm is None else case.on(self.comm)

    def train(self, num_batches: int | None = None) -> Training:
        """One pass, or the first batches of one."""
        batches: Any = self.loader
        if self.second is not None:
            batches = zip(batches, self.made(self.second), strict=True)
        for number, batch in enumerate(itertools.islice(batches, num_batches), 1):
            if number % self.every == 1 % self.every:
                self.optimizer.zero_grad()
            if number % self.every and self.comm is not None:
                with self.optimizer.no_sync():
                    self._backward(batch)
            else:
                self._backward(batch)
            if number % self.every == 0:
                self._step()
        return self

    def _backward(self, batch: Any) -> None:
        pair = (batch,) if self.second is None else batch
        loss = sum(loss_of(self.model, each) for each in pair) / self.every
        self.scaler.scale(loss).backward()

    def _step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.ema.update_parameters(self.model)
        self.num_steps += 1

    def evaluate(self) -> Training:
        """The mean loss over a stream that rank 0 reads."""
        case = Case("rank_0", "loader", 4, (11,))
        total, num = 0.0, 0
        with torch.no_grad():
            for batch in self.made(case):
                num += len(batch["x"])
                total += len(batch["x"]) * loss_of(self.model, batch).item()
        if self.comm is not None:
            total, num = self.comm.sum_over_ranks(total, num)
        self.losses.append(total / num)
        return self

    @property
    def numbers(self) -> torch.Tensor:
        """The parameters, averaged ones too, and what was evaluated."""
        parameters = [*self.model.parameters(), *self.ema.parameters()]
        losses = torch.tensor([*self.losses, self.num_steps], dtype=torch.float64)
        return torch.cat([*(p.detach().flatten() for p in parameters), losses])


def assert_as_in_one_process(
    case: Case, size: int, loop: Callable[[Training], Training], **options: Any
) -> None:
    expected = loop(Training(case, **options)).numbers
    assert not torch.equal(
        expected[:4], nn.utils.parameters_to_vector(made_model().parameters())[:4]
    )
    for found in run_ranks(lambda comm: loop(Training(case, comm, **options)).numbers, size):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


KINDS = ["generator", "iterable", "loader", "workers"]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read_by", READERS)
def test_clipped_scaled_and_averaged_with_an_uneven_end(read_by: Any, kind: str, size: int) -> None:
    """Shares end at different steps, and the last batch has fewer samples than there are ranks."""
    ends = (19,) if read_by == "rank_0" else (7, 20, 13)[:size]

    def loop(training: Training) -> Training:
        if kind == "generator":  # its one pass has the samples of two
            return training.train().evaluate()
        return training.train().train().evaluate()

    assert_as_in_one_process(Case(read_by, kind, 6, ends), size, loop)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read_by", READERS)
def test_a_rank_without_samples(read_by: Any, kind: str) -> None:
    ends = (7,) if read_by == "rank_0" else (0, 5, 4)
    size = 2 if read_by == "rank_0" else 3  # of a batch
    assert_as_in_one_process(Case(read_by, kind, size, ends), 3, lambda training: training.train(3))


@pytest.mark.parametrize("kind", ["iterable", "loader", "workers"])
@pytest.mark.parametrize("read_by", READERS)
def test_left_early_with_evaluations_between(read_by: Any, kind: str) -> None:
    ends = (23,) if read_by == "rank_0" else (5, 20)

    def loop(training: Training) -> Training:
        return training.train(3).evaluate().train(2).evaluate().train().evaluate()

    assert_as_in_one_process(Case(read_by, kind, 6, ends), 2, loop)


@pytest.mark.parametrize("kind", ["generator", "iterable", "loader"])
@pytest.mark.parametrize(
    ("read_by", "batch_size", "ends"),
    [("rank_0", 6, (24, None, None)), ("each_rank", 6, (8, 8, 8)), ("each_rank", 5, (12, 8))],
)
def test_accumulated(read_by: Any, batch_size: int, ends: Any, kind: str) -> None:
    """Parts of one size, and of 3 and 2 samples, which are in proportion."""
    case = Case(read_by, kind, batch_size, ends, drop_last=True)
    size = len(ends)
    assert_as_in_one_process(case, size, lambda training: training.train(4), every=2)


@pytest.mark.parametrize("kind", ["iterable", "loader"])
@pytest.mark.parametrize("read_by", READERS)
def test_two_that_are_zipped(read_by: Any, kind: str) -> None:
    ends = (24,) if read_by == "rank_0" else (8, 8, 8)
    case = Case(read_by, kind, 6, ends, drop_last=True)
    assert_as_in_one_process(case, 3, lambda training: training.train().train(), second=case)


@pytest.mark.parametrize("read_by", READERS)
@pytest.mark.parametrize("is_zipped", [False, True])
def test_one_step_of_batches_without_a_common_proportion_is_refused(
    is_zipped: bool, read_by: Any
) -> None:
    ends = (9,) if read_by == "rank_0" else (6, 3)
    case, second = Case(read_by, "loader", 5, ends), Case(read_by, "loader", 6, ends)
    options: dict[str, Any] = {"second": second} if is_zipped else {"every": 2}
    text = "not in proportion" if is_zipped else "or that are divided differently, are accumulated"
    with pytest.raises(UsageError, match=text):
        run_ranks(lambda comm: Training(case, comm, **options).train(), 2)


@pytest.mark.parametrize("data", [Rows, Resumable])
@pytest.mark.parametrize("kind", ["loader", "workers"])
@pytest.mark.parametrize("read_by", READERS)
@pytest.mark.parametrize("num", [1, 4])
def test_resumed_in_the_middle_of_a_pass(
    num: int, read_by: Any, kind: str, data: type[Rows]
) -> None:
    """With 4 batches one of the shares has ended before."""
    ends = (29,) if read_by == "rank_0" else (7, 14)
    case = Case(read_by, kind, 6, ends, data=Rows if kind == "workers" else data)

    def loop(training: Training) -> Training:
        if training.comm is None:
            return training.train().train()
        state = training.train(num).loader.state_dict()
        training.loader = training.made(case)
        training.loader.load_state_dict(state)
        return training.train().train()

    assert_as_in_one_process(case, 2, loop)
