"""An existing `DataLoader`, which `scatter_loader` divides among the ranks."""

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

from .models import fit, mlp, mlp_and_sgd, steps, take_step, train
from .registry import refused, script
from .worker import Worker, whole_batch

# Samples: in batches of 8 the last one has 5, in batches of 9 it has 1, which is 0 on a rank.
NUM = 37


def _data(seed: int = 0) -> TensorDataset:
    return TensorDataset(*whole_batch(seed, NUM))


def _generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _loader(worker: Worker, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    """The user's loader, shuffled unless it has a sampler of its own, and the line of torchmn."""
    if not {*options} & {"sampler", "batch_sampler", "shuffle"}:
        options["shuffle"] = True
    if "batch_sampler" not in options:
        options["batch_size"] = batch_size
    return worker.scatter_loader(DataLoader(_data(), generator=_generator(), **options))


def _mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y)


def _train(
    worker: Worker, batches: Any, num_epochs: int = 2, loss: Callable[..., Tensor] = _mean
) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for _ in range(num_epochs):
        for x, y in steps(optimizer, batches):
            loss(model, x, y).backward()
    return model


@script("`shuffle=True`, a short last batch")
def shuffled(worker: Worker) -> nn.Module:
    return _train(worker, _loader(worker))


@script("A last batch with fewer samples than there are ranks")
def tiny_last_batch(worker: Worker) -> nn.Module:
    return _train(worker, _loader(worker, 9))


@script("`WeightedRandomSampler`")
def weighted_sampler(worker: Worker) -> nn.Module:
    weights = torch.arange(1.0, NUM + 1).tolist()
    sampler = WeightedRandomSampler(weights, 30, generator=_generator(1))
    return _train(worker, _loader(worker, sampler=sampler))


class _ByNorm(Sampler[list[int]]):
    """Batches of similar samples, of different sizes: as for sequences by length."""

    def __iter__(self) -> Iterator[list[int]]:
        order = _data().tensors[0].norm(dim=1).argsort().tolist()
        yield from (order[:4], order[4:17], order[17:26], order[26:])

    def __len__(self) -> int:
        return 4


@script("A `batch_sampler` of one's own, with batches of different sizes")
def own_batch_sampler(worker: Worker) -> nn.Module:
    return _train(worker, _loader(worker, batch_sampler=_ByNorm()))


class _OfDict(nn.Module):
    """A model that takes a batch as one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(batch["x"])


def _to_dict(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    x, y = zip(*samples, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


@script("`collate_fn` that makes dicts, which the model takes whole")
def collate_to_dicts(worker: Worker) -> nn.Module:
    model = _OfDict()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    for batch in steps(optimizer, _loader(worker, 9, collate_fn=_to_dict)):
        mse_loss(model(batch), batch["y"]).backward()
    return model


@script("Two DataLoader workers")
def two_workers(worker: Worker) -> nn.Module:
    return _train(worker, _loader(worker, num_workers=2, multiprocessing_context="fork"))


@script("`break` in each epoch")
def early_break(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    loader = _loader(worker)
    for _ in range(3):
        for number, (x, y) in enumerate(loader):
            if number == 2:
                break
            take_step(model, optimizer, x, y)
    return model


@script("Two loaders zipped, with batches of different sizes and two losses")
def zipped(worker: Worker) -> nn.Module:
    other = worker.scatter_loader(DataLoader(_data(5), 4, shuffle=True, generator=_generator(3)))
    both = zip(_loader(worker, drop_last=True), other, strict=False)
    return _train_zipped(worker, ((x, y, more) for (x, y), (more, _) in both))


def _train_zipped(worker: Worker, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for x, y, more in steps(optimizer, batches):
        (mse_loss(model(x), y) + 0.1 * model(more).square().mean()).backward()
    return model


@script("An endless `cycle(loader)`, counted in steps")
def endless(worker: Worker) -> nn.Module:
    return _train(worker, [*islice(cycle(_loader(worker)), 12)], 1)


@script("Gradient accumulation: two batches in a step")
def accumulation(worker: Worker) -> nn.Module:
    return _accumulate(worker, _loader(worker, drop_last=True))


def _accumulate(worker: Worker, loader: DataLoader[Any]) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    batches = iter(loader)
    for (x, y), (more_x, more_y) in steps(optimizer, zip(batches, batches, strict=True)):
        with worker.no_sync(optimizer):
            (mse_loss(model(x), y) / 2).backward()
        (mse_loss(model(more_x), more_y) / 2).backward()
    return model


@script("Clipping, an average of the parameters and `OneCycleLR` with `len(loader)`")
def usual_extras(worker: Worker) -> list[nn.Module]:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    loader = _loader(worker)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=2 * len(loader))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            worker.flush(optimizer)
            average.update_parameters(model)
            rates.step()
    return [model, average]


@script("An evaluation after each epoch: sums over ranks, a last batch of one sample")
def evaluated(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    train, test = _loader(worker), _loader(worker, 9, shuffle=False)
    for _ in range(2):
        for x, y in train:
            take_step(model, optimizer, x, y)
        worker.flush(optimizer)
        loss_sum, num_right, num = 0.0, 0, 0
        with torch.no_grad():
            for x, y in test:
                output = model(x)
                loss_sum += mse_loss(output, y, reduction="sum").item()
                num_right += (output.argmax(1) == y.argmax(1)).sum().item()
                num += len(x)
        loss_sum, num_right, num = worker.sum_over_ranks(loss_sum, num_right, num)
        worker.log("test loss", loss_sum / num)
        worker.log("right", num_right)
    return model


@script("`torch.compile(model)`, batches of different sizes", is_slow=True)
def compiled_with_loader(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for _ in range(2):
        train(compiled, optimizer, _loader(worker, 9))
    return model


class _Recomputed(nn.Module):
    """A model that recomputes its layers in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.layers[:2], x, use_reentrant=False)
        return checkpoint(self.layers[2:], hidden, use_reentrant=False)


@script("Activation checkpointing in the model's `forward`, batches of different sizes")
def checkpointed_with_loader(worker: Worker) -> nn.Module:
    model = _Recomputed()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return fit(worker, model, sgd, batches=_loader(worker, 9))


@script("Parts of the model are called, `model[:2]` and `model[2:]`, never the model")
def parts_called(worker: Worker) -> nn.Module:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model[2:](model[:2](x)), y)

    return _train(worker, _loader(worker, 9), 1, loss)


@script("`ReduceLROnPlateau` and the best parameters, by the loss of all samples")
def best_of_epochs(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    loader = _loader(worker)
    rates = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
    best, kept = float("inf"), {}
    for _ in range(4):
        loss_sum, num = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(x)
            num += len(x)
        worker.flush(optimizer)
        loss_sum, num = worker.sum_over_ranks(loss_sum, num)
        rates.step(loss_sum / num)
        worker.log("rate", optimizer.param_groups[0]["lr"])
        if loss_sum / num < best:
            best, kept = loss_sum / num, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return model


@script("A loss that divides by the number of samples itself, `reduction='sum'`")
def own_mean(worker: Worker) -> nn.Module:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y, reduction="sum") / len(x)

    return _train(worker, _loader(worker), 1, loss)


@script("An evaluation with gradients enabled, in `train()`, before each step")
def evaluated_with_gradients(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    test = worker.scatter_loader(DataLoader(_data(3), 16))
    for x, y in _loader(worker, 9):
        loss_sum = sum(mse_loss(model(a), b, reduction="sum").item() for a, b in test)
        worker.log("test loss", worker.sum_over_ranks(loss_sum, 1)[0])
        take_step(model, optimizer, x, y)
    return model


@script("Gradient accumulation without `no_sync`, batches and groups of different sizes")
def uneven_accumulation(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    loader = _loader(worker, 9)
    for number, (x, y) in enumerate(loader):
        if number % 3 == 0:
            optimizer.zero_grad()
        (mse_loss(model(x), y) / 3).backward()
        if number % 3 == 2 or number + 1 == len(loader):
            optimizer.step()
    return model


@script("Class weights: `set_weight()` by the sum of the weights that the mean divides by")
def class_weights(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    weights = torch.tensor([1.0, 3.0, 0.2])
    for x, y in _loader(worker, 9):
        labels = y.argmax(1)
        optimizer.zero_grad()
        worker.set_weight(optimizer, weights[labels].sum().item())
        loss = cross_entropy(model(x), labels, weight=weights, reduction="sum")
        (loss / max(weights[labels].sum(), 1e-12)).backward()
        optimizer.step()
    return model


class _OfSequences(nn.Module):
    """``(time, batch, 5)`` to ``(batch, 3)``, the time first as in `nn.RNN`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sum(0))


def _time_first(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return torch.stack([x, 2 * x, -x]), y


def _train_sequences(worker: Worker, *, has_weights: bool) -> nn.Module:
    model = _OfSequences()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for x, y in steps(optimizer, _loader(worker, 9, collate_fn=_time_first)):
        if has_weights:
            worker.set_weight(optimizer, x.shape[1])
        mse_loss(model(x), y).backward()
    return model


@script("Sequences with the time first, with `set_weight(x.shape[1])`")
def time_first(worker: Worker) -> nn.Module:
    return _train_sequences(worker, has_weights=True)


_MISCOUNTED = refused(
    "not in proportion to the ranks' parts", cure="`optimizer.set_weight(len(y))`"
)


@script("Sequences with the time first, whose samples are not counted", **_MISCOUNTED)
def time_first_uncounted(worker: Worker) -> nn.Module:
    return _train_sequences(worker, has_weights=False)


@script("The model sees ten more samples, the same on all ranks, in each step", **_MISCOUNTED)
def more_samples(worker: Worker) -> nn.Module:
    kept, _ = whole_batch(9, 10)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y) + model(kept).square().mean()

    return _train(worker, _loader(worker, 9), 1, loss)


_OUT_OF_PROPORTION = refused("not in proportion", cure="`optimizer.set_weight(len(y))`")


class _WithPrompts(nn.Module):
    """Compares samples with constant inputs, which it is given first."""

    def __init__(self) -> None:
        super().__init__()
        self.of_samples, self.of_prompts = mlp(), mlp(seed=1)

    def forward(self, prompts: Tensor, x: Tensor) -> Tensor:
        return self.of_samples(x) @ self.of_prompts(prompts).T


@script(
    "Four constant tensors come first, and the parts have two samples and one",
    **_OUT_OF_PROPORTION,
)
def constants_first(worker: Worker) -> nn.Module:
    model = _WithPrompts()
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    prompts, _ = whole_batch(9, 4)
    for x, _ in steps(optimizer, _loader(worker, 3)):
        model(prompts, x).square().mean().backward()
    return model


def _zipped_unevenly(worker: Worker) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of 9 and of 6, of which two ranks have 5 and 3 samples, and 4 and 3."""
    other = worker.scatter_loader(DataLoader(_data(5), 6, shuffle=True, generator=_generator(3)))
    for (x, y), (more, _) in zip(_loader(worker, 9, drop_last=True), other, strict=False):
        yield x, y, more


@script(
    "Two loaders zipped, two losses, parts that are not in the same proportion",
    **refused(
        "not in proportion",
        cure="batch sizes that are multiples of the number of ranks, `drop_last=True`",
    ),
)
def zipped_out_of_proportion(worker: Worker) -> nn.Module:
    return _train_zipped(worker, _zipped_unevenly(worker))


def _train_as_one(worker: Worker, *, has_weights: bool, has_two_means: bool) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for x, _, more in steps(optimizer, _zipped_unevenly(worker)):
        if has_weights:
            worker.set_weight(optimizer, len(x) + len(more))
        squares = model(torch.cat([x, more])).square()
        loss = squares.mean()
        if has_two_means:
            loss = squares[: len(x)].mean() + squares[len(x) :].mean()
        loss.backward()
    return model


@script("Two loaders zipped, whose batches the model takes as one, with `set_weight()`")
def zipped_into_one(worker: Worker) -> nn.Module:
    return _train_as_one(worker, has_weights=True, has_two_means=False)


_ZIPPED = refused(
    "has batches of several loaders",
    cure="batch sizes that are multiples of the number of ranks, `drop_last=True`; for one "
    "mean over all samples `optimizer.set_weight(len(x) + len(more))`",
)


@script("The same without `set_weight()`, parts that are not in the same proportion", **_ZIPPED)
def zipped_into_one_unweighted(worker: Worker) -> nn.Module:
    return _train_as_one(worker, has_weights=False, has_two_means=False)


@script("FixMatch: two loaders in one forward pass, a mean over each, parts as before", **_ZIPPED)
def zipped_with_two_means(worker: Worker) -> nn.Module:
    return _train_as_one(worker, has_weights=False, has_two_means=True)


@script(
    "Accumulation under `no_sync()` with a short last batch",
    **refused(
        "batches of different sizes, or that are divided differently, are accumulated",
        cure="`drop_last=True`, or no `no_sync()`: each batch then has its own weight",
    ),
)
def accumulated_unevenly(worker: Worker) -> nn.Module:
    return _accumulate(worker, worker.scatter_loader(DataLoader(_data(), 7)))  # the last has 2


@script(
    "A batch that one rank leaves out by itself, as where its part of the loss is not finite",
    **refused(
        "the ranks exchange gradients of different batches",
        cure="decide by a value that all ranks share, or call `set_weight(0)`",
    ),
)
def left_out_on_one_rank(worker: Worker) -> nn.Module:
    batches = enumerate(_loader(worker))
    return _train(worker, (b for number, b in batches if number != 3 or worker.rank != 1), 1)


@script(
    "A task that each rank chooses by its own random numbers",
    **refused(
        "the ranks exchange gradients of different batches",
        cure="draw it from a generator with the same seed on all ranks",
    ),
)
def task_of_own(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker)
    tasks = [iter(_loader(worker)) for _ in range(2)]
    for number in range(8):
        x, y = next(tasks[(number + worker.rank * (number > 2)) % 2])
        take_step(model, optimizer, x, y)
    return model


@script("All batches of an epoch are kept in a list")
def kept_batches(worker: Worker) -> nn.Module:
    return _train(worker, [*_loader(worker), *_loader(worker)], 1)


@script("The next batch is requested before the model is called, as to copy it to a device")
def requested_in_advance(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    loader = _loader(worker)
    for _ in range(2):
        batches = iter(loader)
        following = next(batches, None)
        while following is not None:
            x, y = following
            following = next(batches, None)
            take_step(model, optimizer, x, y)
    return model


@script("Batches are left out of gradient accumulation, the same ones on all ranks")
def left_out(worker: Worker) -> nn.Module:
    batches = (batch for number, batch in enumerate(_loader(worker)) if number % 3 != 1)
    return _train(worker, batches, 1)


@script("Trained in `eval()`")
def trained_in_eval(worker: Worker) -> nn.Module:
    model = mlp().eval()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return fit(worker, model, sgd, batches=_loader(worker, 9))


@script("`backward()` left out for a batch of 0 rows, then `clip_grad_norm_`")
def clipped_without_backward(worker: Worker) -> nn.Module:
    model, optimizer = mlp_and_sgd(worker, momentum=0.9)
    for x, y in steps(optimizer, _loader(worker, 9)):
        if len(x):
            mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    return model
