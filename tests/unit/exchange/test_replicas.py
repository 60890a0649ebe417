"""Ranks that would not send the same all raise before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.limits import limit
from tests.ranks import on_ranks
from tests.unit.models import equal, fill, mlp, sgd, values
from torchmn import create_multi_node_optimizer
from torchmn.comm.collectives import bcast_where_different
from torchmn.errors import CommunicationError, RankMismatchError, UnsupportedError, UsageError
from torchmn.exchange import replicas
from torchmn.exchange.replicas import different_tensors
from torchmn.exchange.sharded_parameters import ModelMesh
from torchmn.testing import run_ranks


def messages(build: Callable, world_size: int = 3, **options: Callable) -> list[str]:
    """The error on every rank when ``build(rank)`` gives (model, inner optimizer)."""

    def rank_main(comm):
        model, inner = build(comm.rank)
        given = {name: option(comm.rank) for name, option in options.items()}
        with pytest.raises(RankMismatchError) as caught:
            create_multi_node_optimizer(inner, comm, model, **given)
        return str(caught.value)

    texts = run_ranks(rank_main, world_size, timeout_s=limit(5))
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank} of {world_size}")
        assert "All ranks must build the same model and the same optimizer." in text
    return texts


def _another_order(rank: int) -> nn.Module:
    names = ["a", "b"] if rank == 0 else ["b", "a"]
    return nn.ModuleDict([(name, nn.Linear(2, 2)) for name in names])


def _frozen(rank: int) -> nn.Module:
    model = mlp()
    model[0].bias.requires_grad_(rank != 1)
    return model


def _channels_last(rank: int) -> nn.Module:
    """A bucket holds elements in the order of memory: means would mix them up."""
    model = nn.Conv2d(2, 3, 2)
    return model.to(memory_format=torch.channels_last) if rank == 1 else model


MODELS = {
    "'weight': rank 0 has [3, 4] torch.float32, rank 2 has [5, 4] torch.float32": (
        lambda rank: nn.Linear(4, 5 if rank == 2 else 3)
    ),
    "rank 0 has [3, 4] torch.float32, rank 1 has [3, 4] torch.float64": (
        lambda rank: nn.Linear(4, 3, dtype=torch.float64 if rank else torch.float32)
    ),
    "'right.weight': rank 0 has [2, 2] torch.float32, rank 1 has none": (
        lambda rank: nn.ModuleDict({"left" if rank else "right": nn.Linear(2, 2)})
    ),
    "'1.weight': rank 0 has none, rank 1 has [2, 2]": (
        lambda rank: nn.Sequential(*(nn.Linear(2, 2) for _ in range(2 if rank == 1 else 1)))
    ),
    "rank 0 and rank 1 hold the same things in another order": _another_order,
    "with strides": _channels_last,
    "'0.bias': rank 0 has [7] torch.float64, rank 1 has [7] torch.float64, frozen": _frozen,
}


@pytest.mark.parametrize("message", MODELS)
def test_other_models(message: str) -> None:
    def build(rank: int) -> tuple:
        model = MODELS[message](rank)
        return model, sgd(model)

    assert all(message in text for text in messages(build))


OPTIMIZERS = {
    "not in the optimizer": (
        lambda rank, model: sgd(model[2:] if rank else model)  # of a part of the model
    ),
    "'lr of group 0': rank 0 has 0.1, rank 1 has 0.2": (
        lambda rank, model: sgd(model, 0.1 * (rank + 1))
    ),
    "'class': rank 0 has SGD, rank 1 has Adam": (
        lambda rank, model: (torch.optim.Adam if rank else torch.optim.SGD)(model.parameters(), 0.1)
    ),
}


@pytest.mark.parametrize("message", OPTIMIZERS)
def test_other_optimizers(message: str) -> None:
    def build(rank: int) -> tuple:
        model = mlp()
        return model, OPTIMIZERS[message](rank, model)

    assert all(message in text for text in messages(build))


@pytest.mark.parametrize(
    ("option", "first", "second"),
    [
        ("zero_fill", True, False),
        ("schedule", "every_step", "double_buffering"),
        ("codec", None, "float16"),
        ("weight", "rank", "samples"),
    ],
)
def test_other_requests(option: str, first: object, second: object) -> None:
    def build(_):
        model = mlp()
        return model, sgd(model)

    for text in messages(build, 2, **{option: lambda rank: second if rank else first}):
        assert f"'{option}': rank 0 has {first}, rank 1 has {second}" in text


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_and_buffers_of_rank_0_go_to_all(world_size: int) -> None:
    def build(seed: int) -> nn.Module:
        model = nn.Sequential(mlp(seed), nn.BatchNorm1d(3, dtype=torch.float64))
        model[1].running_mean.fill_(seed + 1.0)
        model[1].num_batches_tracked.fill_(seed + 7)
        model.register_buffer("empty", torch.zeros(0))
        model.register_buffer("flags", torch.tensor([True, seed == 0]))
        model.register_buffer("narrow", torch.full((3,), seed + 0.5, dtype=torch.bfloat16))
        fill(model, seed)
        return model

    def rank_main(comm):
        model = build(comm.rank)
        assert bool(different_tensors(comm, [model])) is (comm.size > 1)
        create_multi_node_optimizer(sgd(model), comm, model)
        assert different_tensors(comm, [model]) == []
        return model.state_dict()

    expected = build(0).state_dict()
    for state in run_ranks(rank_main, world_size):
        assert list(state) == list(expected)
        assert equal(list(state.values()), list(expected.values()))


def test_a_broadcast_that_fails_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(comm, model):
        sent = bcast_where_different(comm, model)
        if comm.rank == 1:
            next(model.parameters()).data.view(-1)[0] += 1e-9
        return sent

    monkeypatch.setattr(replicas, "bcast_where_different", forgets)

    def rank_main(comm):
        model = mlp(comm.rank)
        with pytest.raises(CommunicationError, match=r"ranks still differ in \['0.weight'\]"):
            create_multi_node_optimizer(sgd(model), comm, model)

    run_ranks(rank_main, 3)


@on_ranks(2)
def test_a_parameter_that_is_not_in_the_model_is_named(comm) -> None:
    model, other = mlp(), nn.Linear(4, 2)
    unnamed = torch.optim.SGD([{"params": model.parameters()}, {"params": [other.weight]}])
    with pytest.raises(
        UsageError, match=r"number 0 of the optimizer's group 1, shape \[2, 4\], is not in the"
    ):
        create_multi_node_optimizer(unnamed, comm, model)
    named = torch.optim.SGD([("head.weight", other.weight)], 0.1)
    with pytest.raises(UsageError, match=r"head\.weight"):
        create_multi_node_optimizer(named, comm, model)
    before = values(model)
    create_multi_node_optimizer(unnamed, comm, [model, other])
    assert equal(values(model), before)


@on_ranks(2)
def test_lazy_layers_are_refused_until_they_have_shapes(comm):
    model = nn.Sequential(nn.LazyLinear(3))
    inner = sgd(model)
    with pytest.raises(UnsupportedError, match=r"'0\.weight' is not initialized.*one forward"):
        create_multi_node_optimizer(inner, comm, model)
    with pytest.raises(UsageError, match="not in the model"):
        create_multi_node_optimizer(inner, comm, mlp())
    model(torch.ones(1, 4))
    create_multi_node_optimizer(inner, comm, model)
    return values(model)


# ---- the ranks that hold one model among them ----


def test_without_shards_a_rank_agrees_with_itself() -> None:
    mesh = ModelMesh([torch.zeros(2)])
    assert mesh.size == 1
    assert mesh.means(2.0, 3.0) == (2.0, 3.0)
    assert mesh.any(True)
    assert not mesh.any(False)


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo,cuda:gloo", "cpu"), ("cuda:nccl", "cuda")],
)
def test_what_ranks_of_a_model_agree_on_goes_through_the_host_if_it_can(
    monkeypatch, backends: str, device: str
) -> None:
    """By stand-ins: this machine may have no GPU."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    group = SimpleNamespace(size=lambda: 2)
    parameter: Any = torch.zeros(2)
    parameter.device_mesh = SimpleNamespace(device_type="cuda", ndim=1, get_group=lambda dim: group)
    mesh = ModelMesh([parameter])
    assert mesh.size == 2
    assert mesh._devices == [device]
