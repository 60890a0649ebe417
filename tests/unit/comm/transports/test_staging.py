"""Messages by way of host memory, and waiting for a stream with a limit."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.limits import limit
from tests.unit.comm.fake_device import FakeDevice, FakeEvent, FakeStreams
from tests.unit.comm.ranks import run_transports
from torchmn.comm.streams import streams_of
from torchmn.comm.transports.base import TimeLimit
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.comm.transports.staging import Staging, await_stream
from torchmn.errors import TimeLimitError, UnsupportedError


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.bool])
def test_what_is_sent_arrives_in_the_tensors_of_the_caller(dtype: torch.dtype) -> None:
    def rank_main(transport: TorchDistributedTransport) -> list[torch.Tensor]:
        rank = transport.rank
        staging, until, peer = Staging(), TimeLimit(limit(20)), 1 - rank
        for numel in (5, 1, 3000):  # the buffer grows, and is used again
            own = [torch.arange(n).add(rank).to(dtype) for n in (numel, 0, 3)]
            arrived = [torch.zeros_like(x) for x in own]
            staging.exchange(
                [(peer, x) for x in own],
                [(peer, x) for x in arrived],
                until,
                lambda out, into: transport.exchange(out, into, until, 5),
            )
        return arrived

    for rank, arrived in enumerate(run_transports(rank_main, 2)):
        expected = [torch.arange(n).add(1 - rank).to(dtype) for n in (3000, 0, 3)]
        assert all(map(torch.equal, arrived, expected))


def staged(transport: TorchDistributedTransport, streams: FakeStreams | None = None) -> None:
    """Messages of different sizes between all ranks, some of which are sent in chunks."""
    rank, size = transport.rank, transport.size
    find = (lambda device: streams) if streams else streams_of
    staging, until = Staging(chunk_bytes=64, find_streams=find), TimeLimit(limit(20))

    def adopt(x: torch.Tensor) -> torch.Tensor:
        return streams.device.adopt(x) if streams and x.numel() else x

    peers = [peer for peer in range(size) if peer != rank]

    def values(source: int, target: int, turn: int) -> list[torch.Tensor]:
        numels = (5 + source, 700 + 31 * target, 0, 17)
        return [torch.arange(n) + 1000 * turn + 100 * source + target for n in numels]

    rounds: list[int] = []

    def on_host(out, into) -> None:
        assert len({peer for peer, _ in out}) == len(out)
        rounds.append(len(out) + len(into))
        transport.exchange(out, into, until, 5)

    for turn in range(3):
        own = [(peer, adopt(x)) for peer in peers for x in values(rank, peer, turn)]
        wanted = [(peer, x) for peer in peers for x in values(peer, rank, turn)]
        arrived = [(peer, adopt(torch.zeros_like(x))) for peer, x in wanted]
        with streams.device.running() if streams else contextlib.nullcontext():
            sends = [(peer, x * 2 - x) for peer, x in own]  # computed by the device just before
            staging.exchange(sends, arrived, until, on_host)
            after = [x + 0 for _, x in arrived]
        if streams:
            streams.device.synchronize()
        assert all(map(torch.equal, after, (x for _, x in wanted)))
    assert len(rounds) > 3 * 8  # chunks, and not messages


@pytest.mark.parametrize("size", [2, 3])
def test_large_messages_are_sent_in_chunks(size: int) -> None:
    run_transports(staged, size)


@pytest.mark.parametrize("order", ["caller first", "exchange first"])
def test_chunks_wait_for_the_copies_of_a_device_that_runs_late(order: str) -> None:
    def rank_main(transport: TorchDistributedTransport) -> None:
        device = FakeDevice(order)
        device.begin()
        with contextlib.closing(device):
            staged(transport, FakeStreams(device))

    run_transports(rank_main, 2)


class Unordered(FakeStreams):
    """Events that are over before what was queued before them."""

    def record(self) -> FakeEvent:
        event = FakeEvent()
        event.is_over = True
        return event


def test_a_chunk_that_does_not_wait_is_found() -> None:
    def rank_main(transport: TorchDistributedTransport) -> None:
        with contextlib.closing(FakeDevice()) as device, pytest.raises(AssertionError):
            staged(transport, Unordered(device))

    run_transports(rank_main, 2)


class Stream:
    """A stream of a GPU that passes an event some time after it was recorded."""

    def __init__(self, seconds: float) -> None:
        self.passes_s = time.monotonic() + seconds

    def record(self, stream: object) -> None:
        assert stream is self

    def query(self) -> bool:
        return time.monotonic() >= self.passes_s


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_it_returns_when_the_stream_is_there(monkeypatch, seconds: float) -> None:
    stream = Stream(seconds)
    monkeypatch.setattr(torch.cuda, "Event", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    await_stream(torch.device("cuda", 0), TimeLimit(limit(20)))
    assert time.monotonic() >= stream.passes_s


def test_a_stream_that_never_gets_there_is_an_error(monkeypatch) -> None:
    stream = Stream(1000)
    monkeypatch.setattr(torch.cuda, "Event", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    with pytest.raises(TimeLimitError, match="cuda:3 of this rank did not finish its own work"):
        await_stream(torch.device("cuda", 3), TimeLimit(0.1, lambda: False))


def test_without_a_gpu_there_is_nothing_to_wait_for() -> None:
    await_stream(torch.device("cpu"), TimeLimit(0.0))


def test_a_rank_without_a_gpu_refuses_tensors_of_one() -> None:
    transport = TorchDistributedTransport(HashStore(), 0, 1, timeout_s=limit(20))
    tensor = SimpleNamespace(is_cuda=True, device="cuda:0", numel=lambda: 1)
    with pytest.raises(UnsupportedError, match="this rank was given no GPU to exchange from"):
        transport._is_staged(tensor)
    transport.use_gpu(torch.device("cuda", 0), may_use_nccl=False)
    assert transport._is_staged(tensor)
    assert not transport.supports_nccl
    transport.close()
