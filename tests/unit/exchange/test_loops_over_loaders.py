"""Ordinary loops over loaders on 2 and 3 ranks: the parameters of one process, or one refusal."""

from __future__ import annotations

import contextlib
import gc
import queue
import random
import threading
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import on_ranks
from torchmn import GlobalSampler, create_multi_node_optimizer, scatter_loader
from torchmn.data.divided_batches import divided_batches
from torchmn.errors import UsageError
from torchmn.testing import run_ranks

NUM = 29
"""Samples: batches of 8 end with one of 5, which 2 ranks have as 3 and 2, and 3 as 2, 2 and 1."""
pytestmark = pytest.mark.filterwarnings("ignore:More than one backward pass before step")


class Run:
    """One process, or a rank of several: what a script writes differs in these lines only."""

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm
        self.trained: list[nn.Module] = []

    def loader(self, batch_size: int = 8, num: int = NUM, **options: Any) -> DataLoader[Any]:
        own = torch.Generator().manual_seed(num + batch_size)
        data = TensorDataset(torch.randn(num, 5, generator=own).double(), torch.arange(num) / num)
        options = {"shuffle": True, "generator": own, **options}
        loader = DataLoader(data, batch_size, **options)
        return loader if self.comm is None else scatter_loader(loader, self.comm)

    def model(self) -> tuple[nn.Module, Any]:
        own = torch.Generator().manual_seed(len(self.trained))
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=own))
        self.trained.append(model)
        return model, self.wrap(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)

    def wrap(self, optimizer: Any, model: nn.Module) -> Any:
        return (
            optimizer
            if self.comm is None
            else create_multi_node_optimizer(optimizer, self.comm, model)
        )

    def no_sync(self, optimizer: Any) -> Any:
        return contextlib.nullcontext() if self.comm is None else optimizer.no_sync()


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return mse_loss(model(x)[:, 0], y)


def step(model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def ends_early(run: Run) -> None:
    model, optimizer = run.model()
    loader = run.loader()
    for epoch in range(3):
        for number, batch in enumerate(loader):
            step(model, optimizer, batch)
            if number == epoch:
                break
    for batch in loader:
        step(model, optimizer, batch)
    step(model, optimizer, batch)  # once more with the last one


def some_batches(run: Run) -> None:
    model, optimizer = run.model()
    loader = run.loader(7)
    for _ in range(3):
        for batch in islice(loader, 3):
            step(model, optimizer, batch)


def cycled(run: Run) -> None:
    """From the second pass on, batches come again that the loader does not hand out."""
    model, optimizer = run.model()
    for batch in islice(cycle(run.loader()), 11):
        step(model, optimizer, batch)


def kept_and_shuffled(run: Run) -> None:
    kept = [*run.loader()]
    model, optimizer = run.model()
    order = random.Random(3)
    for _ in range(3):
        order.shuffle(kept)
        for batch in kept:
            step(model, optimizer, batch)


def one_batch_again_and_again(run: Run) -> None:
    batch = next(iter(run.loader(5)))
    model, optimizer = run.model()
    for _ in range(4):
        step(model, optimizer, batch)


def requested_early(run: Run) -> None:
    """One batch in advance, across the ends of passes."""
    model, optimizer = run.model()

    def endless(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    batches = endless(run.loader())
    following = next(batches)
    for _ in range(10):
        batch, following = following, next(batches)
        step(model, optimizer, batch)


def requested_by_a_thread(run: Run) -> None:
    model, optimizer = run.model()
    loader = run.loader()
    for _ in range(2):
        waiting: queue.Queue[Any] = queue.Queue(2)

        def fill(loader: Any = loader, waiting: Any = waiting) -> None:
            for batch in loader:
                waiting.put(batch)
            waiting.put(None)

        thread = threading.Thread(target=fill)
        thread.start()
        while (batch := waiting.get()) is not None:
            step(model, optimizer, batch)
        thread.join()


def accumulated(run: Run) -> None:
    """Pairs under `no_sync`, and the short batch by itself."""
    model, optimizer = run.model()
    loader = run.loader(num=37)
    for _ in range(2):
        for number, batch in enumerate(loader):
            if number % 2 == 0:
                optimizer.zero_grad()
            is_last = number % 2 or number + 1 == len(loader)
            with contextlib.nullcontext() if is_last else run.no_sync(optimizer):
                loss_of(model, batch).backward()
            if is_last:
                optimizer.step()


def accumulated_with_each_exchanged(run: Run) -> None:
    model, optimizer = run.model()
    for number, batch in enumerate(run.loader()):
        if number % 2 == 0:
            optimizer.zero_grad()
        loss_of(model, batch).backward()
        if number % 2:
            optimizer.step()


def left_out(run: Run) -> None:
    """Batches are left out, after a forward pass as well; parts are 5 and 4, or 3 each."""
    model, optimizer = run.model()
    for number, batch in enumerate(run.loader(9)):
        if number == 1:
            continue
        if number == 2:
            loss_of(model, batch)
            optimizer.zero_grad()
            continue
        step(model, optimizer, batch)


def two_optimizers(run: Run) -> None:
    """As a GAN: one steps with each batch, one with every third; and one twice with a batch."""
    (critic, often), (other, seldom) = run.model(), run.model()
    for _ in range(2):
        for number, batch in enumerate(run.loader()):
            step(critic, often, batch)
            step(critic, often, batch)
            if number % 3 == 0:
                seldom.zero_grad()
                (critic(batch[0]) * other(batch[0])).mean().backward()
                seldom.step()


def evaluated_between(run: Run) -> None:
    """With gradients enabled; a look at a batch and a statistic come first."""
    model, optimizer = run.model()
    train, test = run.loader(9), run.loader(7, 23)
    next(iter(train))
    for x, _ in test:
        x.mean()
    for batch in train:
        for other in test:
            loss_of(model, other)
        step(model, optimizer, batch)


def zipped_in_proportion(run: Run) -> None:
    model, optimizer = run.model()
    for (x, y), (more, _) in zip(
        run.loader(9, drop_last=True), run.loader(9, 20, drop_last=True), strict=False
    ):
        optimizer.zero_grad()
        found = model(torch.cat([x, more]))[:, 0]
        (mse_loss(found[: len(x)], y) + found[len(x) :].square().mean()).backward()
        optimizer.step()


def closure(run: Run) -> None:
    model = run.model()[0]
    optimizer = run.wrap(torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3), model)
    for batch in run.loader():

        def loss(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            found = loss_of(model, batch)
            found.backward()
            return found

        optimizer.step(loss)


def layers_called(run: Run) -> None:
    """The model itself is never called, and is in `eval()`."""
    model, optimizer = run.model()
    model.eval()
    for x, y in run.loader():
        optimizer.zero_grad()
        mse_loss(model[2](model[1](model[0](x)))[:, 0], y).backward()
        optimizer.step()


class Own(DataLoader[Any]):
    """With a constructor, a loop and batches of its own."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, 8, collate_fn=self.collate)
        self.color = "red"

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        x, y = zip(*samples, strict=True)
        return {"x": torch.stack(x), "y": torch.stack(y)}

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch["x"], batch["y"]


def own_class(run: Run) -> None:
    model, optimizer = run.model()
    loader: Any = Own(run.loader().dataset)
    if run.comm is not None:
        loader = scatter_loader(loader, run.comm)
        assert loader.color == "red"
    for _ in range(2):
        for batch in loader:
            step(model, optimizer, batch)


def made_in_each_epoch(run: Run) -> None:
    """The optimizer is there before any loader."""
    model, optimizer = run.model()
    for batch_size in (8, 5, 9):
        for batch in run.loader(batch_size):
            step(model, optimizer, batch)


LOOPS: list[Callable[[Run], None]] = [
    ends_early,
    some_batches,
    cycled,
    kept_and_shuffled,
    one_batch_again_and_again,
    requested_early,
    requested_by_a_thread,
    accumulated,
    accumulated_with_each_exchanged,
    left_out,
    two_optimizers,
    evaluated_between,
    zipped_in_proportion,
    closure,
    layers_called,
    own_class,
    made_in_each_epoch,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("size", [2, 3])
def test_as_one_process(loop: Callable[[Run], None], size: int) -> None:
    def parameters(comm: Any = None) -> list[Tensor]:
        run = Run(comm)
        loop(run)
        return [p.detach() for model in run.trained for p in model.parameters()]

    wanted = parameters()
    for found in run_ranks(parameters, size):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


# ---- right for none ----


def labelled_and_not(run: Run) -> None:
    """As FixMatch: one forward pass, two means, parts in no common proportion."""
    model, optimizer = run.model()
    for (x, y), (more, _) in zip(run.loader(9), run.loader(7), strict=False):
        optimizer.zero_grad()
        found = model(torch.cat([x, more]))[:, 0]
        (mse_loss(found[: len(x)], y) + found[len(x) :].square().mean()).backward()
        optimizer.step()


def accumulated_unevenly(run: Run) -> None:
    model, optimizer = run.model()
    batches = iter(run.loader())
    for batch, other in zip(batches, batches, strict=True):
        optimizer.zero_grad()
        with run.no_sync(optimizer):
            loss_of(model, batch).backward()
        loss_of(model, other).backward()
        optimizer.step()


def summed_unevenly(run: Run) -> None:
    model, optimizer = run.model()
    batches = iter(run.loader())
    step(model, optimizer, next(batches))
    step(model, optimizer, next(batches))
    optimizer.zero_grad()
    sum(loss_of(model, batch) for batch in batches).backward()


def other_data_in_the_loop(run: Run) -> None:
    model, optimizer = run.model()
    for _ in run.loader(9):
        step(model, optimizer, (torch.ones(4, 5).double(), torch.ones(4).double()))


def repeated_by_its_class(run: Run) -> None:
    class Twice(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield batch
                yield batch

    model, optimizer = run.model()
    for batch in scatter_loader(Twice(run.loader().dataset, 8), run.comm):
        step(model, optimizer, batch)


def iterator_made_before(run: Run) -> None:
    class Endless(DataLoader[Any]):
        def __init__(self, data: Any) -> None:
            super().__init__(data, 8)
            self.iterator = super().__iter__()

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    next(iter(scatter_loader(Endless(run.loader().dataset), run.comm)))


REFUSED = {
    labelled_and_not: "batches of several loaders",
    accumulated_unevenly: "leave out no_sync",
    summed_unevenly: "leave out no_sync",
    other_data_in_the_loop: "weight='rank'",
    repeated_by_its_class: "that its batch_sampler has not drawn",
    iterator_made_before: "that its batch_sampler has not drawn",
}


@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("size", [2, 3])
def test_one_weight_that_would_be_wrong_is_refused_on_all_ranks(
    loop: Callable[[Run], None], size: int
) -> None:
    if loop is other_data_in_the_loop and size == 3:
        pytest.skip(reason="batches of 9 are even parts of 3 ranks")

    def rank_main(comm: Any) -> None:
        with pytest.raises(UsageError, match=REFUSED[loop]):
            loop(Run(comm))

    run_ranks(rank_main, size)


# ---- who follows which batches ----


@pytest.mark.parametrize("when", ["not read", "read to the end", "trained with", "gone", "even"])
@on_ranks(2)
def test_a_model_that_never_sees_a_loader_s_batches_keeps_equal_weights(
    comm: Any, when: str
) -> None:
    """Ranks train it with different numbers of samples: the mean of ranks, as without a loader."""
    run = Run(comm)
    loader = run.loader(8 if when == "even" else 9, 32 if when == "even" else 27)
    if when == "trained with":
        model, optimizer = run.model()
        for batch in loader:
            step(model, optimizer, batch)
    model, optimizer = run.model()
    if when in ("read to the end", "gone"):
        with torch.no_grad():
            list(loader)
    if when == "gone":
        del loader
        gc.collect()
    elif when == "even":  # in the same loop
        next(iter(loader))
    x = torch.full((comm.rank + 1, 5), comm.rank + 1.0).double()
    optimizer.zero_grad()
    model(x).mean().backward()
    found = model[2].weight.grad.clone()
    own = model[:2](x).mean(0, keepdim=True).detach()
    torch.testing.assert_close(found, comm.allreduce(own, "mean"), rtol=0, atol=1e-12)


@on_ranks(2)
def test_loaders_of_another_communicator_are_not_followed(comm: Any) -> list[float]:
    others = comm.split(0, comm.rank)
    run = Run(others)
    loader = run.loader(9)
    model, _ = Run(comm).model()
    weights = []
    for x, y in loader:
        loss_of(model, (x[:1], y[:1])).backward()
        weights.append(float(model[2].bias.grad))
    assert divided_batches(comm).passes == []
    assert divided_batches(others).is_used
    return weights


@pytest.mark.parametrize("loading", ["scatter_loader", "plain", "workers"])
def test_a_sampler_of_global_batches_divides_for_an_optimizer_too(loading: str) -> None:
    """What workers have prefetched is weighted by what forward sees."""

    def train(comm: Any = None) -> list[Tensor]:
        run = Run(comm)
        model, optimizer = run.model()
        data = Run().loader().dataset
        for start in range(0, NUM, 8) if comm is None else ():
            step(model, optimizer, data[start : start + 8])
        if comm is not None:
            sampler = GlobalSampler(data, comm, 8, shuffle=False)
            workers = {"num_workers": 1, "multiprocessing_context": "fork"}
            options: Any = workers if loading == "workers" else {}
            loader = DataLoader(data, batch_sampler=sampler, **options)
            if loading == "scatter_loader":
                loader = scatter_loader(loader, comm)
            for batch in loader:
                step(model, optimizer, batch)
            assert sampler.state_dict() == {"epoch": 1, "position": 0}
        return [p.detach() for p in model.parameters()]

    for found in run_ranks(train, 3):
        torch.testing.assert_close(found, train(), rtol=0, atol=1e-12)


def test_a_weight_that_is_given_is_not_compared_in_any_pass() -> None:
    """The samples come second here, and batches are kept."""

    class Second(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, constants: Tensor, x: Tensor) -> Tensor:
            return self.inner(x) + constants.mean()

    def train(comm: Any = None) -> list[Tensor]:
        run = Run(comm)
        inner, _ = run.model()
        model = Second(inner)
        optimizer = run.wrap(torch.optim.SGD(model.parameters(), 0.1), model)
        for _ in range(3):
            for x, y in [*run.loader()]:
                optimizer.zero_grad()
                loss = mse_loss(model(torch.ones(7), x)[:, 0], y)
                if comm is not None:
                    optimizer.set_weight(len(x))
                loss.backward()
                optimizer.step()
        return [p.detach() for p in inner.parameters()]

    for found in run_ranks(train, 2):
        torch.testing.assert_close(found, train(), rtol=0, atol=1e-12)
