from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from tests.limits import limit
from tests.ranks import on_ranks
from tests.unit.models import batch, equal, fill, loss_of, mlp, near, train, values
from torchmn.cluster import Topology
from torchmn.comm import Communicator, create_communicator
from torchmn.comm.transports.base import TimeLimit
from torchmn.comm.transports.tcp import TcpTransport
from torchmn.errors import (
    CommunicationError,
    TimeLimitError,
    TorchmnWarning,
    UnsupportedError,
    UsageError,
)
from torchmn.exchange.optimizer import MultiNodeOptimizer, create_multi_node_optimizer
from torchmn.exchange.schedules import ParameterServer
from torchmn.exchange.schedules.parameter_server.messages import WorkerThread
from torchmn.testing import run_ranks


def make(
    comm: Communicator, model: nn.Module, schedule: ParameterServer, **options: object
) -> MultiNodeOptimizer:
    inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return create_multi_node_optimizer(inner, comm, model, schedule=schedule, **options)  # type: ignore[arg-type]


def wrap_server(
    comm: Communicator,
    servers: int | str = "all",
    max_staleness: int | None = None,
    **options: object,
) -> tuple[nn.Module, MultiNodeOptimizer]:
    model = mlp()
    given = {} if max_staleness is None else {"max_staleness": max_staleness}
    return model, make(comm, model, ParameterServer(servers, **given), **options)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"servers": 0}, "positive number of ranks"),
            ({"servers": "some"}, "'all' or a positive number"),
            ({"max_staleness": -1}, "must not be negative"),
        ],
    )
    def test_are_checked(self, options: dict[str, object], text: str) -> None:
        with pytest.raises(UsageError, match=text):
            ParameterServer(**options)  # type: ignore[arg-type]


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("world_size", "servers", "inner", "codec", "text"),
        [
            (1, "all", torch.optim.LBFGS, None, "LBFGS"),
            (2, 2, torch.optim.SGD, None, "leave none to train"),
            (2, "all", torch.optim.SGD, "int8", "parameter_server has no codec, and int8"),
        ],
        ids=["an optimizer that couples parameters", "no rank that trains", "codecs"],
    )
    def test_when_it_is_made(self, world_size: int, servers, inner: type, codec, text: str) -> None:
        def job(comm: Communicator) -> None:
            model = mlp()
            made, schedule = inner(model.parameters(), lr=0.1), ParameterServer(servers)
            create_multi_node_optimizer(made, comm, model, schedule=schedule, codec=codec)

        with pytest.raises(UnsupportedError, match=text):
            run_ranks(job, world_size)

    @on_ranks(1)
    def test_closures(self, comm: Communicator) -> None:
        with pytest.raises(UnsupportedError, match="workers do not step together"):
            make(comm, mlp(), ParameterServer()).step(lambda: 0.0)

    @pytest.mark.parametrize("kind", ["set_weight", "samples"])
    @on_ranks(1)
    def test_weights(self, comm: Communicator, kind: str) -> None:
        model, optimizer = wrap_server(comm, weight="samples" if kind == "samples" else "rank")
        if kind == "set_weight":
            optimizer.set_weight(3)
        with pytest.raises(UnsupportedError, match="does not support weights"):
            train(model, optimizer, comm.rank, range(1))

    @on_ranks(1)
    def test_more_parameters(self, comm: Communicator) -> None:
        model = mlp()
        inner = torch.optim.SGD(model[0].parameters(), 0.1)
        optimizer = create_multi_node_optimizer(inner, comm, model, schedule=ParameterServer())
        with pytest.raises(UnsupportedError, match="make a new optimizer"):
            optimizer.add_param_group({"params": list(model[2].parameters())})

    @on_ranks(1)
    def test_sparse_gradients(self, comm: Communicator) -> None:
        model = nn.Embedding(5, 3, sparse=True)
        optimizer = make(comm, model, ParameterServer())
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(UnsupportedError, match=r"'weight' is sparse"):
            optimizer.step()


class TestServersOfTheirOwn:
    def test_do_not_train_and_end_with_the_same_model(self) -> None:
        def job(comm: Communicator) -> tuple[bool, list[torch.Tensor], int]:
            model = mlp(comm.rank)
            optimizer = make(comm, model, ParameterServer(2))
            if optimizer.schedule.traits.serves:
                with pytest.raises(UsageError, match=r"call optimizer\.serve\(\)"):
                    optimizer.step()
                assert optimizer.serve()
            else:
                with optimizer.join():
                    train(model, optimizer, comm.rank, range(5))
            return (
                optimizer.schedule.traits.serves,
                values(model),
                len(optimizer.state_dict()["state"]),
            )

        outcome = run_ranks(job, 4)
        assert [o[0] for o in outcome] == [False, False, True, True]
        assert all(equal(o[1], outcome[0][1]) for o in outcome)
        assert not near(outcome[0][1], values(mlp(0)))
        assert [o[2] for o in outcome] == [4] * 4

    @on_ranks(1)
    def test_workers_do_not_serve(self, comm: Communicator) -> None:
        assert not make(comm, mlp(), ParameterServer()).serve()


@pytest.mark.parametrize(
    "kind",
    ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD",
     "Rprop", "Adafactor"],
)  # fmt: skip
@on_ranks(1)
def test_every_optimizer_of_torch_runs_at_the_server(comm: Communicator, kind: str) -> None:
    cls = getattr(torch.optim, kind)
    plain_model, model = mlp(), mlp()
    plain = cls(plain_model.parameters(), lr=0.01)
    inner = cls(model.parameters(), lr=0.01)
    optimizer = create_multi_node_optimizer(
        inner, comm, model, schedule=ParameterServer(max_staleness=0)
    )
    for step in range(4):
        for each, network in ((plain, plain_model), (optimizer, model)):
            each.zero_grad()
            loss_of(network, batch(0, step)).backward()
            each.step()
    optimizer.flush()
    saved, expected = optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert saved.keys() == expected.keys()
    for index, state in expected.items():
        for key, value in state.items():
            got = saved[index][key]
            if isinstance(value, torch.Tensor):
                assert torch.equal(got, value), key
            else:
                assert got == value, key
    assert equal(values(plain_model), values(model))


class TestWhatUsersDo:
    @on_ranks(1)
    def test_accumulation_and_clipping(self, comm: Communicator) -> None:
        plain_model, model = mlp(), mlp()
        plain = torch.optim.SGD(plain_model.parameters(), 0.05, momentum=0.9)
        optimizer = make(comm, model, ParameterServer(max_staleness=0), max_grad_norm=0.01)
        for step in range(4):
            plain.zero_grad()
            optimizer.zero_grad()
            for part in range(2):
                x = batch(0, 2 * step + part)
                loss_of(plain_model, x).backward()
                if part == 0:
                    with optimizer.no_sync():
                        loss_of(model, x).backward()
                else:
                    loss_of(model, x).backward()
            nn.utils.clip_grad_norm_(plain_model.parameters(), 0.01)
            plain.step()
            optimizer.step()
        assert equal(values(plain_model), values(model))

    @on_ranks(2)
    def test_a_grad_scaler(self, comm: Communicator) -> None:
        model = mlp(dtype=torch.float32)
        optimizer = make(comm, model, ParameterServer())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with optimizer.join():
            for step in range(4):
                optimizer.zero_grad()
                loss = loss_of(model, batch(comm.rank, step, dtype=torch.float32))
                if step == 2 and comm.rank == 0:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert all(bool(p.isfinite().all()) for p in model.parameters())

    @on_ranks(2)
    def test_zero_fill_off_leaves_unused_parameters_alone(self, comm: Communicator) -> None:
        same = []
        for zero_fill in (False, True):
            model = mlp()
            inner = torch.optim.SGD(model.parameters(), 0.05, weight_decay=0.1)
            optimizer = create_multi_node_optimizer(
                inner, comm, model, schedule=ParameterServer(), zero_fill=zero_fill
            )
            before = values(model)[0]
            for parameter in list(model.parameters())[1:]:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.flush()
            same.append(torch.equal(before, values(model)[0]))
        assert same == [True, False]

    def test_another_number_of_ranks_continues(self) -> None:
        def first(comm: Communicator) -> tuple[dict[str, object], dict[str, object]]:
            model, optimizer = wrap_server(comm)
            train(model, optimizer, comm.rank, range(3))
            optimizer.flush()
            return model.state_dict(), optimizer.state_dict()

        [saved, *_] = run_ranks(first, 3)

        def second(comm: Communicator) -> list[torch.Tensor]:
            model = mlp(3)
            optimizer = make(comm, model, ParameterServer(max_staleness=0))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            train(model, optimizer, 0, range(3, 5))
            return values(model)

        def plain() -> list[torch.Tensor]:
            model = mlp(3)
            model.load_state_dict(saved[0])
            inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            inner.load_state_dict({k: v for k, v in saved[1].items() if k != "torchmn"})
            for step in range(3, 5):
                inner.zero_grad()
                loss_of(model, batch(0, step)).backward()
                inner.step()
            return values(model)

        assert equal(run_ranks(second, 1)[0], plain())

    def test_more_servers_than_parameters(self) -> None:
        def job(comm: Communicator) -> list[torch.Tensor]:
            model = nn.Linear(5, 3, bias=False).double()
            optimizer = make(comm, model, ParameterServer())
            train(model, optimizer, comm.rank, range(3))
            optimizer.flush()
            return values(model)

        outcome = run_ranks(job, 3)
        assert all(equal(v, outcome[0]) for v in outcome)

    def test_mixed_dtypes(self) -> None:
        class Mixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Parameter(torch.ones(3, 2))
                self.b = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
                self.c = nn.Parameter(torch.ones(4, dtype=torch.complex64))
                self.d = nn.Parameter(torch.ones(()))
                self.e = nn.Parameter(torch.ones(0))

        def job(comm: Communicator) -> list[torch.Tensor]:
            model = Mixed()
            optimizer = make(comm, model, ParameterServer())
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 0.5)
                optimizer.step()
            optimizer.flush()
            return values(model)

        outcome = run_ranks(job, 2)
        assert equal(outcome[0], outcome[1])
        assert all(float(v.real.max()) < 1 for v in outcome[0] if v.numel())


class TestWaiting:
    def test_a_loop_left_without_flush_raises_on_the_others(self) -> None:
        over = threading.Event()

        def job(comm: Communicator) -> None:
            model, optimizer = wrap_server(comm, 1, max_staleness=2)
            if optimizer.schedule.traits.serves:
                with pytest.raises(TimeLimitError):
                    optimizer.flush()
                return
            train(model, optimizer, comm.rank, range(2))
            if comm.rank == 0:
                with pytest.raises(TimeLimitError, match=r"rank 1 has made 2 steps"):
                    train(model, optimizer, comm.rank, range(2, 9))
                over.set()
            else:
                assert over.wait(limit(30))

        run_ranks(job, 3, timeout_s=2)

    @pytest.mark.parametrize("place", ["step", "_send", "_receive"])
    @pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
    def test_an_error_of_a_server_is_raised_on_all_workers(
        self, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], place: str
    ) -> None:
        """One of torch, not of ours: its thread ends, and no worker waits for its time limit."""
        num_calls = iter(range(1000))

        def failing(original: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object) -> object:
                result = original(*arguments) if place == "_receive" else None
                if next(num_calls) == 4:
                    raise kind("out of memory")
                return result or original(*arguments)

            return call

        owner = torch.optim.SGD if place == "step" else WorkerThread
        monkeypatch.setattr(owner, place, failing(getattr(owner, place)))

        def job(comm: Communicator) -> str:
            model, optimizer = wrap_server(comm, 1, max_staleness=0)
            steps = partial(train, model, optimizer, comm.rank, range(50))
            began = time.monotonic()
            use = optimizer.flush if optimizer.schedule.traits.serves else steps
            with pytest.raises(CommunicationError) as caught:
                use()
            assert time.monotonic() - began < limit(15)
            comm.barrier()  # no rank leaves before all have their error
            return str(caught.value)

        for text in run_ranks(job, 3, timeout_s=limit(30)):
            assert f"the server on rank 2 raised {kind.__name__}: out of memory" in text

    def test_a_wait_may_be_longer_than_the_limit_while_others_make_progress(self) -> None:
        """The servers tell a worker that waits that they live, also while another one is slow."""
        timeout_s = limit(0.5)

        def job(comm: Communicator) -> list[torch.Tensor]:
            model, optimizer = wrap_server(comm)
            for step in range(24 if comm.rank == 0 else 1):
                train(model, optimizer, comm.rank, range(step, step + 1))
                time.sleep(timeout_s / 10)  # the machine may be busy
            began = time.monotonic()
            optimizer.flush()
            assert comm.rank == 0 or time.monotonic() - began > timeout_s
            return values(model)

        first, second, third = run_ranks(job, 3, timeout_s=timeout_s)
        assert equal(first, second)
        assert equal(first, third)

    def test_a_rank_that_leaves_is_reported_and_others_continue(self) -> None:
        def job(comm: Communicator) -> tuple[list[torch.Tensor], set[int]]:
            model = mlp()
            optimizer = make(comm, model, schedule := ParameterServer(1, max_staleness=1))
            if comm.rank == 1:
                train(model, optimizer, comm.rank, range(2))
                optimizer.close()
                return [], set()
            if comm.rank == 0:
                train(model, optimizer, comm.rank, range(8))
            optimizer.flush()
            return values(model), schedule.lost

        with pytest.warns(TorchmnWarning, match="rank 1 is lost"):
            (first, lost), _, (third, _) = run_ranks(job, 3)
        assert lost == {1}
        assert equal(first, third)


def test_over_a_transport_for_one_thread_at_a_time() -> None:
    """Streams have one order for all tags: the servers go by what is under them."""

    def job(comm: Communicator) -> list[torch.Tensor]:
        until = TimeLimit(limit(20))
        inner = comm.world.transport.split(range(comm.size), "for-streams", until)
        streams = TcpTransport.connect(inner, until)
        assert isinstance(streams, TcpTransport)
        own = create_communicator(
            "flat",
            transport=streams,
            topology=Topology.blocks([1] * comm.size),
            timeout_s=limit(20),
        )
        model = fill(nn.Sequential(*(nn.Linear(200, 200) for _ in range(3))).double())
        optimizer = make(own, model, ParameterServer())
        optimizer.param_groups[0]["lr"] = 1e-9  # what matters is what arrives
        for step in range(15):
            optimizer.zero_grad()
            x = batch(comm.rank, step)[:, :1].expand(4, 200) / 20
            model(x).pow(2).mean().backward()
            optimizer.step()
        optimizer.flush()
        own.finalize()
        return values(model)

    outcome = run_ranks(job, 3)
    assert all(equal(v, outcome[0]) for v in outcome)


def test_parameters_are_changed_after_flush_only() -> None:
    """Elsewhere the values of the servers would replace the change at the end of the next step."""

    def rank_main(comm: Communicator) -> None:
        model, optimizer = wrap_server(comm)
        train(model, optimizer, comm.rank, range(2))
        with torch.no_grad():
            for parameter in model.parameters():  # as sharpness-aware steps do, and take back
                parameter.add_(0.3).sub_(0.3)
        train(model, optimizer, comm.rank, range(2, 4))
        optimizer.flush()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.01, 0.01)
        before = values(model)
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, comm.rank, range(4, 6))
        if comm.size == 1:
            assert near(values(model), before)
        comm.barrier()  # a rank that ends its training ends that of the others
        model.load_state_dict(mlp(1).state_dict())
        with pytest.raises(UsageError, match=r"changed '0.weight' and 3 more since .*flush"):
            train(model, optimizer, comm.rank, range(6, 7))
        with pytest.raises(UsageError, match="has changed '0.weight' and 3 more since"):
            optimizer.flush()
        optimizer.close()

    for world_size in (1, 2):
        run_ranks(rank_main, world_size)
