"""A user's script under mypy and pyright: what comes out has the type of what goes in."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import torchmn
from torchmn.comm import RouteName
from torchmn.comm.codecs import CodecName, ErrorFeedback, Quantized
from torchmn.data import StreamLoader, SubDataset
from torchmn.exchange.schedules import BlockMomentum, ScheduleName


class OwnLoader(DataLoader[Tensor]):
    """A loader of the user's."""


class Words:
    """A data set of the user's."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return "word"


def stream() -> Iterator[dict[str, Tensor]]:
    """Yield batches."""
    yield {"x": torch.ones(2)}


def train(
    route: RouteName, codec: CodecName, schedule: ScheduleName, place: tuple[str, int]
) -> None:
    """Names are checked, and so are objects."""
    comm = torchmn.create_communicator(route, transport="torch", allreduce_grad_dtype="float16")
    comm = torchmn.create_communicator(allreduce_grad_dtype=torch.bfloat16)
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = torchmn.create_multi_node_optimizer(
        sgd, comm, model, codec=codec, schedule=schedule
    )
    optimizer = torchmn.create_multi_node_optimizer(
        sgd,
        comm,
        model,
        codec=ErrorFeedback(Quantized(bits=1)),
        schedule=BlockMomentum(block_learning_rate=0.5),
    )
    optimizer = torchmn.create_multi_node_optimizer(
        sgd, comm, model, codec="auto", schedule=torchmn.Auto(stale=True)
    )
    assert_type(optimizer, torchmn.MultiNodeOptimizer)

    assert_type(comm.sum_over_ranks(1), int)
    assert_type(comm.sum_over_ranks(0.5), float)
    loss, num, counts = comm.sum_over_ranks(0.5, 3, torch.zeros(2))
    assert_type((loss, num, counts), tuple[float, int, Tensor])
    assert_type(comm.sum_over_ranks(torch.zeros(()), 3), tuple[Tensor, int])
    assert_type(comm.allgather_obj(place), list[tuple[str, int]])
    assert_type(comm.gather_obj("a"), list[str] | None)
    assert_type(comm.allreduce_obj([1]), list[int])

    table = TensorDataset(torch.ones(4))
    own = OwnLoader(torch.ones(4), batch_size=2)  # type: ignore[arg-type]  # pyright: ignore
    plain = DataLoader(table, batch_size=2)
    assert_type(torchmn.scatter_loader(own, comm), OwnLoader)
    assert_type(
        torchmn.scatter_loader((own, plain), comm),
        tuple[OwnLoader, DataLoader[tuple[Tensor, ...]]],
    )
    assert_type(torchmn.scatter_loader([own], comm), tuple[OwnLoader, ...])
    batches = torchmn.scatter_loader(stream(), comm, read_by="each_rank")
    assert_type(batches, StreamLoader[dict[str, Tensor]])
    for batch in batches:
        assert_type(batch, dict[str, Tensor])
    shard = torchmn.scatter_dataset(Words(), comm)
    assert_type(shard, SubDataset[str])
    assert_type(shard[0], str)
    torchmn.frameworks.torchmetrics_options(comm)


def refused(comm: torchmn.Communicator, optimizer: torch.optim.Optimizer) -> None:
    """Each line has one error, and no other line has any."""
    model = torch.nn.Linear(1, 1)
    torchmn.create_communicator("hierarchic")  # refused
    torchmn.create_communicator(transport="tcp")  # refused
    torchmn.create_communicator(allreduce_grad_dtype="fp16")  # refused
    torchmn.create_multi_node_optimizer(optimizer, comm, model, codec="int16")  # refused
    torchmn.create_multi_node_optimizer(optimizer, comm, model, schedule="local_sgd")  # refused
    torchmn.scatter_loader(stream(), comm, read_by="rank_1")  # refused
    torchmn.scatter_loader(stream(), comm)  # refused
    torchmn.launch_local(max, 2, backend="mpi")  # refused
