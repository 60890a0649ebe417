"""Which gradients are exchanged, and when they leave."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.contracts.suites.communicator_contracts import seeded
from tests.limits import limit
from tests.unit.models import batch, equal, fill, grads, local_grads, loss_of, mlp, near, values
from torchmn import create_multi_node_optimizer
from torchmn.errors import UnsupportedError
from torchmn.testing import run_ranks

WORLDS = [1, 2, 3, 4]
ROUTES = ["naive", "flat", "hierarchical"]
SCHEDULES = ["every_step", "double_buffering"]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-2)


def mean_over_ranks(model, size, step=0):
    parts = [local_grads(model, batch(rank, step)) for rank in range(size)]
    return [sum(column) / size for column in zip(*parts, strict=True)]


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_accumulation_with_no_sync_is_exact_and_sends_once(world_size: int, name: str) -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(sgd(model), comm, model)
        num_before = len(comm.flight_recorder.entries())
        with optimizer.no_sync():
            for step in range(2):
                loss_of(model, batch(comm.rank, step)).backward()
        assert len(comm.flight_recorder.entries()) == num_before
        loss_of(model, batch(comm.rank, 2)).backward()
        steps = [mean_over_ranks(model, comm.size, step) for step in range(3)]
        assert near(grads(model), [sum(column) for column in zip(*steps, strict=True)])
        return grads(model)

    results = run_ranks(rank_main, world_size, name=name)
    for result in results:
        assert equal(result, results[0])


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_without_no_sync_it_stays_right_and_warns_once(world_size: int, name: str) -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(sgd(model), comm, model)
        for _ in range(2):
            optimizer.zero_grad()
            for step in range(3):
                loss_of(model, batch(comm.rank, step)).backward()
            steps = [mean_over_ranks(model, comm.size, step) for step in range(3)]
            assert near(grads(model), [sum(column) for column in zip(*steps, strict=True)])
        return grads(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run_ranks(rank_main, world_size, name=name)
    for result in results:
        assert equal(result, results[0])
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (0 if world_size == 1 else 1)  # on rank 0
    assert all("no_sync()" in text for text in texts)


def test_all_passes_under_no_sync_are_exchanged_by_step() -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(sgd(model), comm, model)
        with optimizer.no_sync():
            loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.step()
        assert near(grads(model), expected)
        return values(model)

    expected = mean_over_ranks(mlp(), 2)
    assert equal(*run_ranks(rank_main, 2))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_optimizers_in_turn_as_a_gan_has_them(schedule: str) -> None:
    """The generator's pass goes through the discriminator, which is not trained in it."""

    def train(generator, critic, g_optimizer, d_optimizer, ranks):
        for step in range(4):
            noise = [seeded(r, 4, 3, salt=step) / 10 for r in ranks]
            real = [batch(r, step) for r in ranks]
            critic.requires_grad_(True)
            d_optimizer.zero_grad()
            fake = [generator(z).detach() for z in noise]
            pairs = zip(fake, real, strict=True)
            (
                sum(critic(f).mean() - critic(r).pow(2).mean() for f, r in pairs) / len(ranks)
            ).backward()
            d_optimizer.step()
            critic.requires_grad_(False)
            g_optimizer.zero_grad()
            (sum(critic(generator(z)).pow(2).mean() for z in noise) / len(ranks)).backward()
            g_optimizer.step()
        return values(generator) + values(critic)

    def build():
        generator = fill(nn.Sequential(nn.Linear(3, 5), nn.Tanh()).double(), 1)
        return generator, mlp(2)

    def rank_main(comm):
        generator, critic = build()
        g_optimizer = create_multi_node_optimizer(
            sgd(generator), comm, generator, schedule=schedule
        )
        d_optimizer = create_multi_node_optimizer(
            torch.optim.Adam(critic.parameters(), 0.01), comm, critic, schedule=schedule
        )
        return train(generator, critic, g_optimizer, d_optimizer, [comm.rank])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = run_ranks(rank_main, 3)
    for result in results[1:]:
        assert equal(result, results[0])
    if schedule == "every_step":
        generator, critic = build()
        alone = train(
            generator, critic, sgd(generator), torch.optim.Adam(critic.parameters(), 0.01), range(3)
        )
        assert near(results[0], alone, 1e-10)


def test_several_groups_and_a_list_of_modules() -> None:
    def train(first, second, optimizer, ranks):
        for step in range(4):
            optimizer.zero_grad()
            outputs = [second(first(batch(r, step))) for r in ranks]
            (sum(o.pow(2).mean() for o in outputs) / len(ranks)).backward()
            optimizer.step()
        return values(first) + values(second)

    def build():
        first, second = mlp(), fill(nn.Sequential(nn.Linear(3, 4)).double(), 5)
        groups = [
            {"params": second.parameters(), "lr": 0.5},
            {"params": [first[0].weight]},
            {"params": [first[0].bias, *first[2].parameters()], "momentum": 0.9},
        ]
        return first, second, torch.optim.SGD(groups, 0.1)

    def rank_main(comm):
        first, second, inner = build()
        optimizer = create_multi_node_optimizer(inner, comm, [first, second])
        assert [name for name, _ in optimizer.reducer.parameters.trained()] == [
            *(f"0.{n}" for n, _ in first.named_parameters()),
            *(f"1.{n}" for n, _ in second.named_parameters()),
        ]
        return train(first, second, optimizer, [comm.rank])

    results = run_ranks(rank_main, 3)
    for result in results:
        assert equal(result, results[0])
    first, second, inner = build()
    assert near(results[0], train(first, second, inner, range(3)))


@pytest.mark.parametrize("name", ["flat", "hierarchical"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_frozen_and_later_unfrozen(schedule: str, name: str) -> None:
    """The first linear layer is frozen, then trained alone, then both are."""

    def train(model, optimizer, ranks, check=None):
        model[0].requires_grad_(False)
        for step in range(6):
            if step in (2, 4):
                model[0].requires_grad_(True)
                model[2].requires_grad_(step == 4)
            optimizer.zero_grad()
            (sum(loss_of(model, batch(r, step)) for r in ranks) / len(ranks)).backward()
            if check is not None:
                check(grads(model))
            optimizer.step()
        return values(model)

    def rank_main(comm):
        comm.bucket_bytes = 1
        model = mlp()
        model[0].requires_grad_(False)
        optimizer = create_multi_node_optimizer(sgd(model), comm, model, schedule=schedule)

        def same_everywhere(mine) -> None:
            for theirs in comm.allgather_obj([g for g in mine if g is not None]):
                assert equal(theirs, [g for g in mine if g is not None])

        check = same_everywhere if schedule == "every_step" else None
        return train(model, optimizer, [comm.rank], check)

    results = run_ranks(rank_main, 3, name=name)
    for result in results:
        assert equal(result, results[0])
    if schedule == "every_step":
        model = mlp()
        assert near(results[0], train(model, sgd(model), range(3)))


@pytest.mark.parametrize(
    ("users", "world_size"),
    [("no rank", 1), ("no rank", 3), ("rank 1", 3), ("all ranks", 1), ("all ranks", 3)],
)
@pytest.mark.parametrize("zero_fill", [True, False])
def test_unused_parameters(zero_fill: bool, users: str, world_size: int) -> None:
    def rank_main(comm):
        comm.bucket_bytes = 1
        model = nn.ModuleDict({"used": mlp(), "rare": mlp(3)})
        inner = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
        optimizer = create_multi_node_optimizer(inner, comm, model, zero_fill=zero_fill)
        uses = users == "all ranks" or (users == "rank 1" and comm.rank == 1)
        before = values(model["rare"])
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model["used"], batch(comm.rank, step))
            if uses:
                loss = loss + loss_of(model["rare"], batch(comm.rank, step))
            loss.backward()
            optimizer.step()
        rare = grads(model["rare"])
        if users == "no rank" and not zero_fill:
            assert rare == [None] * 4
            assert equal(values(model["rare"]), before)
        elif users == "no rank":
            assert all(not g.any() for g in rare)
            decayed = [b * (1 - 0.1 * 0.1) ** 3 for b in before]
            assert near(values(model["rare"]), decayed)
        else:
            assert all(g.any() for g in rare)
        return values(model)

    results = run_ranks(rank_main, world_size, name="hierarchical")
    for result in results:
        assert equal(result, results[0])


class Odd(nn.Module):
    """Parameters of every kind of shape, memory and dtype, each used in the output."""

    def __init__(self, seed: int, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        make = iter(range(1000))

        def values_(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            real = seeded(seed, *shape, salt=next(make)) / 10
            if dtype.is_complex:
                return torch.complex(real, seeded(seed, *shape, salt=next(make)) / 10).to(dtype)
            return real.to(dtype)

        made: list[torch.Tensor] = []
        for dtype in dtypes:
            made += [
                values_(3, 4, dtype=dtype),
                values_(dtype=dtype),
                values_(0, 3, dtype=dtype),
                values_(4, 3, dtype=dtype).t(),
                values_(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=torch.channels_last),
                values_(4, 6, dtype=dtype)[:, ::2],
                values_(5, dtype=dtype).expand(3, 5)[:1],
            ]
        self.parameters_ = nn.ParameterList([nn.Parameter(t) for t in made])

    def forward(self, factor: float) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for parameter in self.parameters_:
            parts = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            wave = torch.linspace(0.5, 1.5, max(1, parts.numel()), dtype=torch.float64)
            total = total + (parts.double().reshape(-1) * wave[: parts.numel()]).pow(2).sum()
        return total * factor


DTYPES = {
    "float64": [torch.float64],
    "complex": [torch.complex128, torch.complex64],
    "mixed": [torch.float32, torch.float16, torch.float64, torch.bfloat16],
    "half last": [torch.float16, torch.float32],
}


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_odd_parameters(schedule: str, kind: str, name: str) -> None:
    def rank_main(comm):
        comm.bucket_bytes = 200
        model = Odd(comm.rank, DTYPES[kind])
        strides = [p.stride() for p in model.parameters()]
        inner = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        optimizer = create_multi_node_optimizer(inner, comm, model, schedule=schedule)
        start = Odd(0, DTYPES[kind])
        assert equal(values(model), values(start))
        model(comm.rank + 1.0).backward()
        start((comm.size + 1) / 2).backward()
        optimizer.step()
        optimizer.flush()
        for p, q in zip(model.parameters(), start.parameters(), strict=True):
            assert p.grad.dtype == q.dtype
            loose = 1e-2 if q.dtype in (torch.float16, torch.bfloat16) else 1e-6
            torch.testing.assert_close(p.grad, q.grad, rtol=loose, atol=loose)
        assert [p.stride() for p in model.parameters()] == strides
        return grads(model), values(model)

    results = run_ranks(rank_main, 3, name=name)
    for mine, after in results:
        assert equal(mine, results[0][0])
        assert equal(after, results[0][1])


def test_shared_parameters_are_exchanged_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(5, 5, dtype=torch.float64)
            self.decode = nn.Linear(5, 5, dtype=torch.float64)
            self.decode.weight = self.encode.weight
            fill(self)

        def forward(self, x):
            return self.decode(self.encode(x).tanh())

    def rank_main(comm):
        model = Tied()
        optimizer = create_multi_node_optimizer(sgd(model), comm, model)
        assert len(optimizer.reducer.parameters.trained()) == 3
        loss_of(model, batch(comm.rank, 0)).backward()
        assert near(grads(model), mean_over_ranks(model, comm.size))
        optimizer.step()
        assert model.decode.weight is model.encode.weight

    run_ranks(rank_main, 2, name="hierarchical")


def test_hooks_never_block() -> None:
    """All hooks of rank 0 have run before rank 1 begins its backward pass."""
    rank_0_is_through = threading.Event()

    def rank_main(comm):
        comm.bucket_bytes = 1
        model = mlp()
        create_multi_node_optimizer(sgd(model), comm, model)
        loss = loss_of(model, batch(comm.rank, 0))
        if comm.rank == 0:
            # These come after ours; all gradients of the model have been made when all have run.
            arrived: list[int] = []

            def note(parameter: torch.Tensor) -> None:
                arrived.append(len(arrived))
                if len(arrived) == 4:
                    rank_0_is_through.set()

            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(note)
        else:
            assert rank_0_is_through.wait(timeout=limit(10)), "a hook of rank 0 waits for rank 1"
        loss.backward()
        assert near(grads(model), mean_over_ranks(model, 2))
        buckets = {e.bucket for e in comm.flight_recorder.entries() if e.step == 0}
        assert buckets == {0, 1, 2, 3}

    run_ranks(rank_main, 2, name="hierarchical")


def test_buckets_leave_in_one_order_whatever_the_order_of_gradients() -> None:
    """Rank 1 uses the layers in another order, and one bucket is full early."""

    def rank_main(comm):
        comm.bucket_bytes = 1
        layers = nn.ModuleList([nn.Linear(3, 3, dtype=torch.float64) for _ in range(4)])
        fill(layers)
        optimizer = create_multi_node_optimizer(sgd(layers), comm, layers)
        x = torch.ones(2, 3, dtype=torch.float64)
        order = range(4) if comm.rank == 0 else (2, 0, 3, 1)
        for i in order:
            x = layers[i](x).tanh()
        x.sum().backward()
        optimizer.step()
        return [e.bucket for e in comm.flight_recorder.entries() if e.step == 0], grads(layers)

    (order_0, grads_0), (order_1, grads_1) = run_ranks(rank_main, 2, name="hierarchical")
    assert order_0 == order_1
    assert [b for i, b in enumerate(order_0) if b not in order_0[:i]] == list(range(8))
    assert equal(grads_0, grads_1)


def test_checkpointing_without_reentry_works() -> None:
    def rank_main(comm):
        comm.bucket_bytes = 1
        model = mlp()
        create_multi_node_optimizer(sgd(model), comm, model)
        x = batch(comm.rank, 0)
        hidden = checkpoint(model[:2], x, use_reentrant=False)
        checkpoint(model[2], hidden, use_reentrant=False).pow(2).mean().backward()
        assert near(grads(model), mean_over_ranks(model, comm.size))

    run_ranks(rank_main, 2, name="hierarchical")


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_backward_pass_with_create_graph_is_refused_and_training_continues() -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(sgd(model), comm, model)
        with pytest.raises(UnsupportedError, match=r"use torch\.autograd\.grad\(loss"):
            loss_of(model, batch(comm.rank, 0)).backward(create_graph=True)
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, 0)).backward()
        assert near(grads(model), mean_over_ranks(model, comm.size))

    run_ranks(rank_main, 2)


def test_gradient_penalty_by_autograd_grad_sends_nothing_by_itself() -> None:
    def rank_main(comm):
        model = mlp()
        create_multi_node_optimizer(sgd(model), comm, model)
        x = batch(comm.rank, 0).requires_grad_()
        num_before = len(comm.flight_recorder.entries())
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert len(comm.flight_recorder.entries()) == num_before
        slope.pow(2).sum().backward()
        return [g for g in grads(model) if g is not None]

    a, b = run_ranks(rank_main, 2)
    assert equal(a, b)


def test_a_model_without_anything_to_train() -> None:
    def rank_main(comm):
        model = mlp().requires_grad_(False)
        optimizer = create_multi_node_optimizer(sgd(model), comm, model)
        before = values(model)
        optimizer.step()
        assert equal(values(model), before)
        model.requires_grad_(True)
        loss_of(model, batch(comm.rank, 0)).backward()
        assert near(grads(model), mean_over_ranks(model, comm.size))

    run_ranks(rank_main, 2, name="hierarchical")


def test_what_is_deleted_is_freed() -> None:
    """torch's own hook on a parameter would keep all that the exchange holds forever."""

    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(sgd(model), comm, model, schedule="auto")
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
        return [weakref.ref(owner) for owner in (optimizer, next(model.parameters()))]

    kept = sum(run_ranks(rank_main, 2, name="hierarchical"), [])
    gc.collect()
    assert [reference() for reference in kept] == [None] * 4


@pytest.mark.parametrize("options", [{"schedule": "double_buffering"}, {"codec": "int8"}])
def test_what_is_closed_is_freed_while_the_communicator_lives(options: dict) -> None:
    """The last exchange ran on the engine's thread, which waits for the next one."""

    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(sgd(model), comm, model, **options)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
        optimizer.close()
        kept = [weakref.ref(owner) for owner in (optimizer, *model.parameters())]
        del model, optimizer
        while not comm.engine.is_idle:
            pass
        comm.barrier()
        if comm.rank == 0:
            gc.collect()
        comm.barrier()
        return [reference() for reference in kept]

    for alive in run_ranks(rank_main, 2):
        assert alive == [None] * len(alive)


def test_gradients_are_means_even_if_the_optimizer_is_not_kept() -> None:
    def rank_main(comm):
        model = mlp()
        create_multi_node_optimizer(sgd(model), comm, model)
        gc.collect()
        loss_of(model, batch(comm.rank, 0)).backward()
        assert near(grads(model), mean_over_ranks(model, comm.size))
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert len(comm.flight_recorder.entries()) > 0
        num_before = len(comm.flight_recorder.entries())
        loss_of(copied, batch(comm.rank, 0)).backward()
        assert near(grads(copied), local_grads(copied, batch(comm.rank, 0)))
        assert len(comm.flight_recorder.entries()) == num_before

    run_ranks(rank_main, 2)


def test_an_optimizer_that_was_closed_is_freed_before_its_model() -> None:
    def rank_main(comm):
        model = mlp()
        optimizer = create_multi_node_optimizer(sgd(model), comm, model)
        loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.close()
        optimizer.close()
        return model, weakref.ref(optimizer)

    living = run_ranks(rank_main, 2)
    gc.collect()
    assert [reference() for _, reference in living] == [None, None]
