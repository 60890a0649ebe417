"""The communicator of a framework's processes, and its optimizers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchmn.comm import Communicator
from torchmn.errors import UnsupportedError, UsageError
from torchmn.testing import run_ranks
from torchmn.train.frameworks import ExchangeOptions, attach
from torchmn.train.frameworks.exchange import Exchange

CPU = torch.device("cpu")


def exchange_of(comm: Communicator, **options: str) -> Exchange:
    exchange = Exchange(ExchangeOptions(**options))  # type: ignore[arg-type]
    exchange._comm = comm
    return exchange


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_no_sync_of_one_model_leaves_the_other_alone() -> None:
    def rank_main(comm: Communicator) -> list[bool]:
        exchange = exchange_of(comm)
        models = [nn.Linear(3, 1), nn.Linear(3, 1)]
        for model in models:
            exchange.wrap(sgd(model), [model], CPU)
        with exchange.no_sync(models[0]):
            for model in models:
                model(torch.full((1, 3), float(comm.rank + 1))).sum().backward()
        grads = [model.weight.grad for model in models]
        same = []
        for grad in grads:
            assert grad is not None
            parts = comm.allgather(grad)
            same.append(torch.equal(*parts))
        return same

    assert run_ranks(rank_main, 2) == [[False, True]] * 2


def test_a_new_optimizer_takes_the_place_of_the_old_one() -> None:
    def rank_main(comm: Communicator) -> int:
        exchange = exchange_of(comm)
        model = nn.Linear(3, 1)
        for _ in range(3):
            exchange.wrap(sgd(model), [model], CPU)
        return len(exchange.optimizers)

    assert run_ranks(rank_main, 2) == [1, 1]


def test_a_model_that_nothing_exchanges_is_an_error() -> None:
    def rank_main(comm: Communicator) -> None:
        exchange = exchange_of(comm)
        used, left_out, teacher = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)
        exchange.wrap(sgd(used), [used], CPU)
        used(torch.ones(1, 3)).sum().backward()
        exchange.raise_if_left_out([used, left_out, teacher])
        left_out(torch.ones(1, 3)).sum().backward()
        with pytest.raises(UsageError, match="'weight' of Linear has got a gradient"):
            exchange.raise_if_left_out([used, teacher, left_out])

    run_ranks(rank_main, 2)


def test_one_rank_alone_may_train_without() -> None:
    def rank_main(comm: Communicator) -> None:
        model = nn.Linear(3, 1)
        model(torch.ones(1, 3)).sum().backward()
        exchange_of(comm).raise_if_left_out([model])

    run_ranks(rank_main, 1)


def test_a_parameter_server_is_refused() -> None:
    def rank_main(comm: Communicator) -> None:
        exchange = exchange_of(comm, schedule="parameter_server")
        model = nn.Linear(3, 1)
        with pytest.raises(UnsupportedError, match="parameter_server"):
            exchange.wrap(sgd(model), [model], CPU)

    run_ranks(rank_main, 2)


def test_a_second_mean_is_refused() -> None:
    class DistributedDataParallel(nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    def rank_main(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(3, 1), DistributedDataParallel())
        with pytest.raises(UsageError, match="averaged again"):
            exchange_of(comm).wrap(sgd(model), [model], CPU)

    run_ranks(rank_main, 2)


def test_a_framework_alone_is_one_rank() -> None:
    exchange = Exchange(ExchangeOptions())
    assert exchange.communicator is None
    comm = exchange.connect(CPU)
    assert comm.size == 1
    assert exchange.connect(CPU) is comm
    comm.finalize()


def test_processes_that_lightning_starts_have_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """WORLD_SIZE alone, which torchrun never sets alone: the process group says the rank."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        comm = Exchange(ExchangeOptions()).connect(CPU)
        assert (comm.rank, comm.size) == (0, 1)
        comm.finalize()
    finally:
        dist.destroy_process_group()


def test_another_device_is_refused() -> None:
    with pytest.raises(UsageError, match="trains on meta"):
        Exchange(ExchangeOptions()).connect(torch.device("meta"))


# ---- attach refuses what it cannot serve ----


def test_another_kind_of_object() -> None:
    with pytest.raises(UsageError, match="but got Linear"):
        attach(nn.Linear(1, 1))


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_what_exchanges_by_itself(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"uses {kind}"):
        attach(SimpleNamespace(prepare_model=None, distributed_type=SimpleNamespace(value=kind)))


def test_after_prepare() -> None:
    used = SimpleNamespace(prepare_model=None, distributed_type="NO", _models=[nn.Linear(1, 1)])
    with pytest.raises(UsageError, match=r"after accelerator.prepare\(\)"):
        attach(used)


def test_to_ask_whether_a_step_unscales_exchanges_nothing() -> None:
    """Lightning asks before it unscales, before it clips, and in the step of its GradScaler."""

    def rank_main(comm: Communicator) -> tuple[int, list[bool], torch.Tensor]:
        model = nn.Linear(3, 1)
        nn.init.ones_(model.weight)
        optimizer = exchange_of(comm).wrap(sgd(model), [model], CPU)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.full((1, 3), float(comm.rank + 1))).sum()).backward()
        asked = [optimizer._step_supports_amp_scaling for _ in range(2)]
        scaler.step(optimizer)
        return optimizer.reducer.num_passes, asked, model.weight.detach()

    for num_exchanges, asked, weight in run_ranks(rank_main, 2):
        assert (num_exchanges, asked) == (1, [False, False])
        assert torch.allclose(weight, torch.full((1, 3), 1 - 0.1 * 1.5))
