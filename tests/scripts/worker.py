"""What a user script sees of the number of ranks: the lines that differ from one process."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from torchmn import create_multi_node_optimizer, functions
from torchmn.comm import Communicator
from torchmn.data import (
    EmptyBatchCollate,
    gather_by_index,
    gather_outputs,
    scatter_loader,
    shard_bounds,
)
from torchmn.exchange.optimizer.trained_objects import Trained
from torchmn.exchange.schedules.base import Schedule
from torchmn.nn import convert_batch_norm

NUM_STEPS = 8  # enough for each schedule to have measured, planned and deferred updates
BATCH_SIZE = 8
NUM_INPUTS, NUM_OUTPUTS = 5, 3


class Worker:
    """One process that trains on whole batches, without torchmn."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.logged: list[tuple[str, Any]] = []

    def optimizer(self, inner: Optimizer, model: Trained, **options: Any) -> Optimizer:
        """The user's optimizer, wrapped where there are ranks."""
        return inner

    def across_ranks(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model, with batch normalization over all ranks."""
        return model

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a batch ``(batch, ...)``."""
        return whole.tensor_split(self.size)[self.rank]

    def scatter_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The user's loader of whole batches; on ranks with this rank's part of each."""
        return loader

    def sum_over_ranks(self, *values: Any) -> Any:
        """The sums over ranks of what a loop has added up."""
        return values

    def gather_outputs(self, loader: DataLoader[Any], outputs: list[Tensor]) -> Tensor:
        """The outputs for all samples in the order of the data set, which is that of the loop."""
        return torch.cat(outputs)

    def gather_by_index(self, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The samples of all ranks and their values."""
        return indices, values.detach()

    def mean(self, value: Tensor | float) -> float:
        """The mean over ranks, for example of a loss."""
        return torch.as_tensor(value).item()

    def sum_without_gradient(self, value: Tensor) -> Tensor:
        """The sum over ranks by the communicator itself."""
        return value

    def gather(self, part: Tensor) -> Tensor:
        """The parts ``(samples, ...)`` of all ranks, in order."""
        return part

    def gather_with_gradient(self, part: Tensor) -> Tensor:
        """As `gather`, for a loss over the whole batch."""
        return part

    def sum_with_gradient(self, sums: Tensor) -> Tensor:
        """The sums over ranks, for a loss over the whole batch."""
        return sums

    def share(self, num: int) -> range:
        """This rank's part of ``num`` things that no loader has."""
        return range(*shard_bounds(num, self.size, self.rank, force_equal_length=False))

    def no_sync(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Around the passes of an accumulation but the last."""
        return nullcontext()

    def set_weight(self, optimizer: Optimizer, weight: float) -> None:
        """How much this rank's next mean counts."""

    def skip_backward(self, optimizer: Optimizer) -> None:
        """In place of a backward pass on a rank that has none."""

    def flush(self, optimizer: Optimizer) -> None:
        """What docs ask for before parameters are read by a user's own code."""

    def close(self, optimizer: Optimizer) -> None:
        """What docs ask for when an optimizer is no longer used."""

    def log(self, name: str, value: object) -> None:
        """A number that the user looks at; compared as the parameters are."""
        self.logged.append((name, value.detach().clone() if isinstance(value, Tensor) else value))

    def batches(
        self, num_steps: int = NUM_STEPS, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of each batch: ``(samples, 5)`` and ``(samples, 3)``."""
        for step in range(num_steps):
            x, y = whole_batch(step, batch_size)
            yield self.part(x), self.part(y)

    def uneven_batches(self, num_steps: int = NUM_STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        """As `batches`, but on two ranks one has more samples, in each step others."""
        for step in range(num_steps):
            x, y = whole_batch(step)
            bounds = [0, 3 + step % 4, BATCH_SIZE] if self.size == 2 else [0, BATCH_SIZE]
            rows = slice(bounds[self.rank], bounds[self.rank + 1])
            yield x[rows], y[rows]


class Rank(Worker):
    """One of several ranks, with torchmn's lines."""

    def __init__(self, comm: Communicator, schedule: Callable[[], str | Schedule]) -> None:
        super().__init__()
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._schedule = schedule

    def optimizer(self, inner: Optimizer, model: Trained, **options: Any) -> Optimizer:
        """See `Worker.optimizer`."""
        return create_multi_node_optimizer(
            inner, self.comm, model, schedule=self._schedule(), **options
        )

    def across_ranks(self, model: nn.Module, **options: Any) -> nn.Module:
        """See `Worker.across_ranks`."""
        return convert_batch_norm(model, self.comm, **options)

    def scatter_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """See `Worker.scatter_loader`."""
        return scatter_loader(loader, self.comm)

    def sum_over_ranks(self, *values: Any) -> Any:
        """See `Worker.sum_over_ranks`."""
        return self.comm.sum_over_ranks(*values)

    def gather_outputs(self, loader: DataLoader[Any], outputs: list[Tensor]) -> Any:
        """See `Worker.gather_outputs`."""
        return gather_outputs(loader, outputs)

    def gather_by_index(self, indices: Tensor, values: Tensor) -> tuple[Tensor, Any]:
        """See `Worker.gather_by_index`."""
        return gather_by_index(indices, values, self.comm)

    def mean(self, value: Tensor | float) -> float:
        """See `Worker.mean`."""
        return float(self.comm.allreduce(torch.as_tensor(value).detach().reshape(1), "mean"))

    def sum_without_gradient(self, value: Tensor) -> Tensor:
        """See `Worker.sum_without_gradient`."""
        return self.comm.allreduce(value)

    def gather(self, part: Tensor) -> Tensor:
        """See `Worker.gather`."""
        return torch.cat(self.comm.allgather(part))

    def gather_with_gradient(self, part: Tensor) -> Tensor:
        """See `Worker.gather_with_gradient`."""
        return torch.cat(functions.allgather(self.comm, part))

    def sum_with_gradient(self, sums: Tensor) -> Tensor:
        """See `Worker.sum_with_gradient`."""
        return functions.allreduce(self.comm, sums)

    def no_sync(self, optimizer: Any) -> AbstractContextManager[None]:
        """See `Worker.no_sync`."""
        context: AbstractContextManager[None] = optimizer.no_sync()
        return context

    def set_weight(self, optimizer: Any, weight: float) -> None:
        """See `Worker.set_weight`."""
        optimizer.set_weight(weight)

    def skip_backward(self, optimizer: Any) -> None:
        """See `Worker.skip_backward`."""
        optimizer.skip_backward()

    def flush(self, optimizer: Any) -> None:
        """See `Worker.flush`."""
        optimizer.flush()

    def close(self, optimizer: Any) -> None:
        """See `Worker.close`."""
        optimizer.close()


class IsolatedRank(Worker):
    """One of several ranks that exchange nothing, which every script must detect."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def scatter_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """This rank's part of what its own sampler draws."""
        mine = copy.copy(loader)
        parts = _Parts(loader.batch_sampler, self.rank, self.size)
        vars(mine).update(
            batch_sampler=parts, collate_fn=EmptyBatchCollate(loader.dataset, loader.collate_fn)
        )
        return mine

    def skip_backward(self, optimizer: Optimizer) -> None:
        """Gradients of zero, which a GradScaler can look at: nobody else has any."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)


class _Parts:
    """The parts of one rank of some batches."""

    def __init__(self, batches: Any, rank: int, size: int) -> None:
        self._batches, self._rank, self._size = batches, rank, size

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            begin, end = shard_bounds(len(batch), self._size, self._rank, force_equal_length=False)
            yield batch[begin:end]


def whole_batch(step: int, batch_size: int = BATCH_SIZE) -> tuple[Tensor, Tensor]:
    """The same on all ranks: ``(batch, 5)`` inputs and ``(batch, 3)`` targets."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(batch_size, NUM_INPUTS, generator=generator, dtype=torch.float64)
    y = torch.stack([x.sum(1), x[:, 0] * x[:, 1], x[:, 2].sin()], dim=1)
    return x, y
