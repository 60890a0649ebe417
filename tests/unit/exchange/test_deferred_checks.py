"""Where the host does not wait for a device: what ranks disagree about is raised one step late."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from tests.limits import limit
from tests.ranks import on_ranks
from tests.unit.models import batch, loss_of, near, optimizer_of, wrap
from torchmn.comm.streams import Deferred, HostStreams
from torchmn.errors import NonFiniteGradientError, RankMismatchError, UsageError
from torchmn.testing import run_ranks

NUM_RANKS = 3


class LateEvent:
    """Not over before the host has made a step, or asked for the numbers."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


class LateStreams(HostStreams):
    """Numbers arrive when `arrive` is called, or the host waits for them."""

    is_host = False

    def __init__(self) -> None:
        self.events: list[LateEvent] = []
        self.num_waits = 0
        """How often the host has asked for numbers that were not there."""

    def fetch(self, values: Tensor, check=lambda: None) -> Deferred:
        event = LateEvent()
        self.events.append(event)

        def wait() -> None:
            if not event.is_over:
                self.num_waits += 1
                event.is_over = True
            check()

        return Deferred(values.detach().clone(), event, check=wait)

    def arrive(self) -> None:
        for event in self.events:
            event.is_over = True
        self.events.clear()


def late(comm):
    """The same communicator, as on a device."""
    comm.engine.streams = LateStreams()
    return comm


def train(comm, *, weights=(1.0,) * NUM_RANKS, num_steps=4, **options) -> list[Tensor]:
    model, optimizer = wrap(comm, **options)
    for step in range(num_steps):
        optimizer.zero_grad()
        optimizer.set_weight(weights[comm.rank])
        loss_of(model, batch(comm.rank, step)).backward()
        optimizer.step()
        if isinstance(comm.engine.streams, LateStreams):
            comm.engine.streams.arrive()
    optimizer.flush()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 3.0, 0.0)], ids=["equal", "uneven"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zero_fill": True},
        {"gradient_as_bucket_view": True},
        {"schedule": "double_buffering"},
        {"codec": "int8"},
    ],
    ids=str,
)
@on_ranks(NUM_RANKS)
def test_the_means_are_those_of_a_host_that_waits(comm, options, weights) -> None:
    expected = train(comm, weights=weights, **options)
    assert near(train(late(comm), weights=weights, **options), expected, 1e-6)


@on_ranks(NUM_RANKS)
def test_no_step_waits_for_numbers(comm) -> None:
    train(late(comm))
    assert comm.engine.streams.num_waits == 0


def diverging_step(comm, optimizer, model, *, is_bad: bool) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, batch(comm.rank, 0))
    (loss * (float("nan") if is_bad else 1.0)).backward()


class TestNotFinite:
    @on_ranks(NUM_RANKS)
    def test_is_raised_before_the_next_exchange_and_says_that_a_step_was_made(self, comm) -> None:
        model, optimizer = wrap(late(comm))
        diverging_step(comm, optimizer, model, is_bad=comm.rank == 1)
        optimizer.step()
        with pytest.raises(NonFiniteGradientError) as error:
            diverging_step(comm, optimizer, model, is_bad=False)
        assert "rank 1: " in str(error.value)
        assert "the parameters have taken the step" in str(error.value)
        diverging_step(comm, optimizer, model, is_bad=False)  # and training can go on
        assert len(optimizer.nonfinite) == 1

    @on_ranks(NUM_RANKS)
    def test_is_dropped_where_a_scaler_has_left_the_step_out(self, comm) -> None:
        model, optimizer = wrap(late(comm))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for is_bad in (comm.rank == 1, False):
            optimizer.zero_grad()
            loss = loss_of(model, batch(comm.rank, 0))
            scaler.scale(loss * (float("inf") if is_bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.flush()
        are_finite = all(bool(p.isfinite().all()) for p in model.parameters())
        assert (are_finite, len(optimizer.nonfinite)) == (True, 1)

    @on_ranks(NUM_RANKS)
    def test_flush_raises_what_the_last_step_has_met(self, comm) -> None:
        model, optimizer = wrap(late(comm))
        diverging_step(comm, optimizer, model, is_bad=comm.rank == 0)
        optimizer.step()
        with pytest.raises(NonFiniteGradientError, match="have taken the step"):
            optimizer.flush()


@on_ranks(NUM_RANKS)
def test_weights_of_zero_are_raised_before_the_next_exchange(comm) -> None:
    model, optimizer = wrap(late(comm), weight="samples")
    first = model[0]
    optimizer.zero_grad()
    first.weight.square().sum().backward()  # no forward pass of the model: no samples
    optimizer.step()
    with pytest.raises(UsageError, match="weights of all ranks are zero.*taken the step"):
        first.weight.square().sum().backward()


@on_ranks(NUM_RANKS)
def test_a_gradient_that_only_one_rank_has_is_there_on_all(comm) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    optimizer = optimizer_of(late(comm), model)
    loss = model["a"](torch.ones(1, 2)).sum()
    if comm.rank == 0:
        loss = loss + model["b"](torch.ones(1, 2)).sum()
    loss.backward()
    found = model["b"].weight.grad is not None
    optimizer.zero_grad()
    model["a"](torch.ones(1, 2)).sum().backward()
    assert (found, model["b"].weight.grad is None) == (True, True)


def test_a_late_rank_beside_clipping_is_noticed_one_step_late() -> None:
    def rank_main(comm):
        model, optimizer = wrap(late(comm))
        if comm.rank != 2:
            loss_of(model, batch(comm.rank, 0)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 2:  # it has changed nothing itself
            return
        with pytest.raises(RankMismatchError, match="gradients were changed between"):
            loss_of(model, batch(comm.rank, 0)).backward()

    try:
        run_ranks(rank_main, NUM_RANKS, timeout_s=limit(5))
    except RankMismatchError:
        pytest.fail("a rank that has changed nothing raised")


def test_a_bucket_waits_for_all_streams_of_its_gradients() -> None:
    class Named(LateStreams):
        """Streams by thread-local names."""

        def __init__(self) -> None:
            super().__init__()
            self.local = threading.local()
            self.waits: list[object] = []

        def current(self):
            return getattr(self.local, "name", "main")

        def wait_for(self, stream) -> None:
            self.waits.append(stream)

    def rank_main(comm):
        comm.engine.streams = streams = Named()
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = optimizer_of(comm, model)
        for _ in range(2):
            optimizer.zero_grad()
            streams.waits.clear()
            y = model(torch.ones(1, 2)).sum()

            def enter(_, streams=streams) -> None:
                streams.local.name = "side"

            handle = model[0].weight.register_hook(lambda g: enter(g) or g)
            y.backward()
            handle.remove()
            streams.local.name = "main"
            optimizer.step()
        return set(streams.waits) - {"side"} != set() or "side" in streams.waits

    assert all(run_ranks(rank_main, 2))
