"""Steps of training on a device that runs late and out of step: results, and no wait of the host.

The exchange itself is that of GPUs over NCCL: gradients are packed on the caller's stream, sums are
queued on the exchange's, the footer arrives a step later. Each missing wait changes the parameters.
"""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from tests.limits import limit
from tests.unit.comm.fake_device import FakeDevice, FakeNccl, FakeStreams, Meeting
from tests.unit.models import optimizer_of
from torchmn.base import events
from torchmn.base.events import Observer
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.comm.object_codec import Trust
from torchmn.comm.routes.flat import FlatRoute
from torchmn.comm.streams import Deferred
from torchmn.comm.transports.base import WrappingTransport
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.comm.watcher import Watcher
from torchmn.errors import CommunicationError, RankMismatchError, UnsupportedError
from torchmn.testing import run_threads

SIZE, NUM_STEPS = 2, 4


class ArrivesLate(FakeStreams):
    """The device does nothing until the host waits for a number."""

    def fetch(self, values, check=lambda: None) -> Deferred:
        deferred, device = super().fetch(values, check), self.device
        get = deferred.get

        def begin_and_get() -> Tensor:
            device.begin()
            try:
                return get()
            finally:
                device.pause()

        deferred.get = begin_and_get
        return deferred


class OneStep(FlatRoute):
    """Buckets that are summed while backward runs, in memory of the device."""

    granularity = "bucket"
    bucket_bytes = 100
    device_of_rank: FakeDevice | None = None

    @property
    def overlaps_backward(self) -> bool:
        return True

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.device_of_rank is None:
            return super().new_buffer(numel, dtype, device)
        return self.device_of_rank.adopt(torch.zeros(numel, dtype=dtype))


class GlooAndFakeNccl(WrappingTransport):
    def __init__(self, inner, nccl: FakeNccl | None = None) -> None:
        super().__init__(inner)
        self.nccl = nccl
        self.name = inner.name

    def split(self, ranks, key, limit):
        return self.inner.split(ranks, key, limit)

    def close(self) -> None:
        self.inner.close()

    def queues(self, buffer) -> bool:
        return self.nccl is not None and self.nccl._streams.device.owns(buffer)

    def all_reduce_(self, buffer, op, limit) -> None:
        if self.nccl is not None and self.nccl._streams.device.owns(buffer):
            self.nccl.all_reduce_(buffer, op, limit)
        else:
            self.inner.all_reduce_(buffer, op, limit)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1))


def parts(rank: int, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(rank)
    shapes = (3, 5), (3, 1)
    return [tuple(torch.randn(*s, generator=made) for s in shapes) for _ in range(num_steps)]


def on_device(optimizer, comm: Communicator, streams: FakeStreams, nccl: FakeNccl) -> None:
    """From now on work of the exchange is queued, as if the parameters were on a GPU."""
    engine = comm.engine
    engine.streams, engine.watcher = streams, Watcher(streams, engine._fail)
    comm.world.transport.nccl = nccl
    buckets_on_device(optimizer, streams)


def buckets_on_device(optimizer, streams: FakeStreams) -> None:
    for buckets in optimizer.reducer.exchange.sets:
        buckets.streams = buckets.footer.streams = streams
        buckets.is_deferred = buckets.is_on_gpu = True
        buckets.finiteness.check = lambda bucket: bucket.totals.clear()


def backward(optimizer, model: nn.Module, rank: int, number: int, x: Tensor, y: Tensor) -> None:
    (model(x) - y).square().mean().backward()


def trained(
    streams_class: type[FakeStreams] | None,
    order: str,
    *,
    backward=backward,
    begin=on_device,
    num_steps: int = NUM_STEPS,
    error: str = "",
    **options,
) -> list[list[Tensor]]:
    """The parameters of all ranks; without ``streams_class`` on the CPU.

    With an ``error`` each rank must raise a RankMismatchError of this text.
    """
    store, meeting, first = HashStore(), Meeting(SIZE), network()

    def rank_main(rank: int) -> list[Tensor]:
        inner = TorchDistributedTransport(store, rank, SIZE, timeout_s=limit(20))
        comm = Communicator(
            OneStep,
            GlooAndFakeNccl(inner),
            Topology(("localhost",) * SIZE),
            device=torch.device("cpu"),
            timeout_s=limit(20),
            trust=Trust(),
        )
        model = copy.deepcopy(first)
        device = FakeDevice(order)
        if streams_class is not None:
            comm.route.device_of_rank = device
            for parameter in model.parameters():
                parameter.data = device.adopt(parameter.data)
        optimizer = optimizer_of(comm, model, **options)
        batches = parts(rank, num_steps)

        def train() -> None:
            for number, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                backward(optimizer, model, rank, number, x, y)
                optimizer.step()

        try:
            if streams_class is None:
                train()
                optimizer.flush()
            else:
                streams = streams_class(device)
                begin(optimizer, comm, streams, FakeNccl(meeting, rank, streams))
                batches = [(device.adopt(x), device.adopt(y)) for x, y in batches]
                expected = pytest.raises(RankMismatchError, match=error or None)
                with device.running(), expected if error else nullcontext():
                    train()
                    optimizer.flush()
                assert comm.engine._thread is None  # sums are queued by the thread of backward
                device.synchronize()
            return [parameter.detach().clone() for parameter in model.parameters()]
        finally:
            device.begin()
            comm.finalize()
            device.close()

    return run_threads(rank_main, SIZE)


def equal(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(
        torch.allclose(x, y, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(a, b, strict=True)
        for x, y in zip(ours, theirs, strict=True)
    )


OPTIONS = {
    "every_step": {},
    "view": {"gradient_as_bucket_view": True},
    "double_buffering": {"schedule": "double_buffering"},
}


@pytest.mark.parametrize("order", ["caller first", "exchange first"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_parameters_are_those_of_a_cpu(name: str, order: str) -> None:
    expected = trained(None, order, **OPTIONS[name])
    assert equal(trained(ArrivesLate, order, **OPTIONS[name]), expected)


class NoWaitOfJobs(ArrivesLate):
    def wait(self, event) -> None:
        if self.device.current != "exchange":
            super().wait(event)


class NoWaitOfCallers(ArrivesLate):
    def wait(self, event) -> None:
        if self.device.current == "exchange":
            super().wait(event)


@pytest.mark.parametrize("broken", [NoWaitOfJobs, NoWaitOfCallers])
def test_a_missing_wait_changes_the_parameters(broken: type[FakeStreams]) -> None:
    def holds(order: str) -> bool:
        try:
            return equal(trained(broken, order), trained(None, order))
        except CommunicationError:  # a footer was wrong as well
            return False

    assert not all(holds(order) for order in ("caller first", "exchange first"))


class Waits(Observer):
    """The phases in which the calling rank waits for an exchange."""

    def __init__(self, device: FakeDevice) -> None:
        self.thread, self.device = threading.get_ident(), device
        self.num_queued: list[int] = []

    def phase(self, name: str, begins: bool) -> None:
        if name == "exchange" and threading.get_ident() == self.thread:
            num = len(self.device._queues["caller"])
            self.num_queued.append(num if begins else num - self.num_queued.pop())


@pytest.mark.parametrize("name", OPTIONS)
def test_the_wait_of_a_stream_for_an_exchange_is_reported(name: str) -> None:
    """The host waits for nothing; the waits that it queues are within the phase."""
    found = []

    def begin(optimizer, comm: Communicator, streams: FakeStreams, nccl: FakeNccl) -> None:
        on_device(optimizer, comm, streams, nccl)
        found.append(Waits(streams.device))
        events.add(found[-1])

    try:
        trained(ArrivesLate, "caller first", begin=begin, **OPTIONS[name])
    finally:
        for observer in found:
            events.remove(observer)
    assert len(found) == SIZE
    for observer in found:
        assert sum(num > 0 for num in observer.num_queued) >= NUM_STEPS


class RunsOut(nn.Module):
    """A model whose backward runs out of memory after its last layers."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.first, self.last = model[:2], model[2:]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Raises.apply(self.first(x)))


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory is left")


@pytest.mark.parametrize("order", ["caller first", "exchange first"])
def test_a_backward_that_one_rank_repeats_is_the_same_error_on_all(order: str) -> None:
    """As after out of memory. The others know at the next exchange, and nobody waits for long."""

    def repeated(optimizer, model, rank: int, number: int, x: Tensor, y: Tensor) -> None:
        if number == 1 and rank == 1:
            with pytest.raises(torch.OutOfMemoryError):
                backward(optimizer, RunsOut(model), rank, number, x, y)
            optimizer.zero_grad()
        backward(optimizer, model, rank, number, x, y)

    trained(
        ArrivesLate, order, backward=repeated, error="rank 1 raised an exception in its backward"
    )


def test_a_graph_is_refused_before_anything_has_begun() -> None:
    """Training goes on as if the capture had not been tried."""

    def captured(optimizer, model, rank: int, number: int, x: Tensor, y: Tensor) -> None:
        if number == 2:
            streams = optimizer.reducer.comm.engine.streams
            streams.is_in_capture = True
            with pytest.raises(UnsupportedError, match="A CUDA graph is being captured"):
                backward(optimizer, model, rank, number, x, y)
            streams.is_in_capture = False
            optimizer.zero_grad()
        backward(optimizer, model, rank, number, x, y)

    expected = trained(None, "caller first")
    assert equal(trained(ArrivesLate, "caller first", backward=captured), expected)
