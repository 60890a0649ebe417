"""What one process can show on a GPU: streams, copies, clocks, generators, NCCL with one rank."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.limits import limit
from torchmn.checkpoint.snapshot import CopyMemory
from torchmn.comm.codecs import Quantized
from torchmn.comm.codecs.layout import Layout, Segment
from torchmn.comm.engine import Engine
from torchmn.comm.transports.base import TimeLimit
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.comm.transports.staging import Staging, await_stream
from torchmn.data import rng_state
from torchmn.data.rank_seeds import RandomStreams
from torchmn.errors import TimeLimitError
from torchmn.exchange.buckets import plan_buckets
from torchmn.exchange.finiteness import Finiteness
from torchmn.record.recording import _memory
from torchmn.record.step_recorder import StepRecorder
from torchmn.record.timeline import clock_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = torch.device("cuda", 0)
LONG_CYCLES = 200_000_000
"""Of `torch.cuda._sleep`: about a tenth of a second."""


@pytest.fixture
def engine():
    made = Engine(GPU)
    yield made
    made.close()


def test_jobs_see_what_was_launched_before_them(engine: Engine) -> None:
    for number in range(30):
        torch.cuda._sleep(LONG_CYCLES // 20)
        x = torch.full((100_000,), float(number), device=GPU)
        work = engine.submit(lambda x=x: x.mul_(2))
        assert (work.wait() == 2 * number).all()


def test_jobs_of_both_kinds_share_memory_in_order(engine: Engine) -> None:
    """A job that was started still reads scratch memory while the next one is called."""
    scratch = torch.zeros(1_000_000, device=GPU)

    def job(value: float, result: torch.Tensor) -> None:
        scratch.fill_(value)
        torch.cuda._sleep(LONG_CYCLES // 10)
        result.copy_(scratch)

    for number in range(10):
        started, called = torch.zeros(2, 1_000_000, device=GPU)
        work = engine.submit(lambda: job(number, started))  # noqa: B023 - waited for below
        assert work.is_done_within(10)  # on the host; the stream is not there yet
        engine.call(lambda: job(-1.0, called))  # noqa: B023
        work.wait()
        assert (started == number).all()
        assert (called == -1).all()


def test_results_inside_of_containers_keep_their_memory(engine: Engine) -> None:
    for number in range(20):
        work = engine.submit(lambda n=number: {"x": [torch.full((500_000,), float(n), device=GPU)]})
        x = work.wait()["x"][0]
        torch.cuda._sleep(LONG_CYCLES // 10)
        seen = x * 1
        del x, work
        engine.submit(lambda: torch.full((500_000,), -1.0, device=GPU)).wait()
        assert (seen == number).all()


def test_the_engines_thread_uses_its_gpu() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    engine = Engine(device)
    assert engine.submit(torch.cuda.current_device).wait() == device.index
    of_jobs = engine.submit(lambda: torch.cuda.current_stream()).wait()
    assert of_jobs not in (torch.cuda.current_stream(), torch.cuda.default_stream())
    assert engine.submit(lambda: torch.cuda.current_stream()).wait() == of_jobs
    assert engine.call(torch.cuda.current_device) == device.index
    engine.close()


def test_staging_carries_bytes_there_and_back() -> None:
    staging, limit = Staging(), TimeLimit(20)
    for numel in (1, 1000, 3_000_001):  # the last is sent in chunks
        x = torch.randn(numel, device=GPU, dtype=torch.float64)
        y = torch.zeros_like(x)
        small = torch.arange(7, device=GPU, dtype=torch.int16)
        other = torch.zeros_like(small)

        def swap(sends, recvs) -> None:
            assert all(tensor.is_pinned() for _, tensor in (*sends, *recvs))
            for (_, source), (_, target) in zip(sends, recvs, strict=True):
                target.copy_(source)

        staging.exchange([(0, x), (0, small)], [(0, y), (0, other)], limit, swap)
        assert torch.equal(x, y)
        assert torch.equal(small, other)


def test_a_stream_that_is_stuck_is_an_error_in_time() -> None:
    torch.cuda._sleep(50 * LONG_CYCLES)
    began = time.monotonic()
    with pytest.raises(TimeLimitError, match="did not finish its own work within"):
        await_stream(GPU, TimeLimit(0.3))
    assert time.monotonic() - began < limit(3)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int16])
def test_nccl_with_one_rank(dtype: torch.dtype) -> None:
    transport = TorchDistributedTransport(HashStore(), 0, 1, timeout_s=30, cuda_device=GPU)
    assert transport.has_nccl
    x = torch.arange(1000, device=GPU).to(dtype)
    expected = x.clone()
    transport.all_reduce_(x, "sum", TimeLimit(30))
    transport.broadcast_(x, 0, TimeLimit(30))
    part = transport.split([0], "part", TimeLimit(30))
    part.all_reduce_(x, "max", TimeLimit(30))
    assert torch.equal(x, expected)
    part.close()
    transport.close()


def test_nccl_that_cannot_begin_in_time_is_an_error_and_leaves_the_gpu_usable() -> None:
    transport = TorchDistributedTransport(HashStore(), 0, 1, timeout_s=30, cuda_device=GPU)
    x = torch.ones(1000, device=GPU)
    transport.all_reduce_(x, "sum", TimeLimit(30))
    torch.cuda._sleep(50 * LONG_CYCLES)
    with pytest.raises(TimeLimitError, match="did not complete within 0.5 s"):
        transport.all_reduce_(x, "sum", TimeLimit(0.5))
    transport.close()
    torch.cuda.synchronize()
    assert float((x * 2).sum()) == 2000.0


def test_the_record_has_the_times_of_the_gpu() -> None:
    lines: list[object] = []
    recorder = StepRecorder(lines.append, clock_of("cuda"))
    for step in range(5):
        recorder.forward(4, is_training=True)
        torch.cuda._sleep(LONG_CYCLES)
        recorder.phase("backward", True)
        torch.cuda._sleep(2 * LONG_CYCLES)
        for begins in (True, False):
            recorder.phase("optimizer", begins)
        recorder.end_step(step)
    torch.cuda.synchronize()
    recorder.write_ended()
    steps = [line for line in lines if type(line).__name__ == "Step"]
    assert len(steps) == 5
    for step in steps[1:]:
        assert step.phases["backward"] > 1.3 * step.phases["forward"] > 0.01


def test_memory_is_that_of_this_ranks_gpu_on_any_thread() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    kept = torch.zeros(1_000_000, device=device)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(_memory(device).device_nbytes))
    thread.start()
    thread.join()
    assert seen[0] >= kept.nbytes


def test_generators_continue_after_they_are_restored() -> None:
    rng_state.start(7, 0, 1, GPU)
    state = rng_state.capture(GPU)
    expected = torch.rand(5, device=GPU), torch.rand(5)
    torch.rand(100, device=GPU)
    rng_state.restore(state, GPU)
    assert torch.equal(torch.rand(5, device=GPU), expected[0])
    assert torch.equal(torch.rand(5), expected[1])


def test_shared_numbers_of_gpus_and_those_of_each_rank() -> None:
    def draw() -> list[float]:
        return [*torch.rand(3, device=GPU).tolist(), *torch.rand(3).tolist()]

    torch.manual_seed(5)
    wanted = [draw(), draw()]
    own = []
    for rank in range(2):
        streams = RandomStreams(5, rank, GPU).seed_generators()
        assert draw() == wanted[0]
        streams.draw_apart()
        own.append(draw())
        streams.draw_together()
        streams.fork()
        own.append(draw())
        assert (own[-1] == wanted[1]) == (rank == 0)
    assert len({value for drawn in own for value in drawn}) == 24


def test_what_is_not_finite_is_counted_and_named_without_a_wait() -> None:
    names = ("a", "b", "c")
    parameters = [
        (name, torch.nn.Parameter(torch.zeros(100, device=GPU, dtype=torch.float64)))
        for name in names
    ]
    buckets = plan_buckets(parameters, granularity="bucket", bucket_bytes=1 << 20, num_footer=4)
    found = Finiteness()
    for bucket in buckets:
        for slot in bucket.slots:
            slot.tensor.fill_(1e300 if slot.name == "a" else 1.0)  # finite, and not in float32
            if slot.name == "b":
                slot.tensor[7] = float("nan")
        found.check(bucket)
    assert float(found.count(GPU)) == 1.0
    assert found.here == ["b"]


def test_a_copy_for_a_checkpoint_has_the_values_of_the_gpu(tmp_path: Path) -> None:
    torch.cuda._sleep(LONG_CYCLES)
    x = torch.randn(1000, 300, device=GPU)
    transposed = x.T
    copies = CopyMemory()
    found = copies._copy({"x": x, "t": transposed, "cpu": torch.arange(5)})
    assert torch.equal(found["x"], x.cpu())
    assert torch.equal(found["t"], transposed.cpu())
    assert found["cpu"].tolist() == list(range(5))


@pytest.mark.timeout(300)
def test_more_elements_than_32_bits_can_count() -> None:
    numel = 2**31 + 4096
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * 2**30:
        pytest.skip(reason=f"{free / 2**30:.0f} GiB of GPU memory are free, and it needs 24")
    stripe = Layout((Segment("p", 0, numel),), torch.float32)
    codec = Quantized(8, block_length=4096)
    values = torch.zeros(numel, device=GPU)
    values[-4096:] = torch.linspace(-3, 3, 4096, device=GPU)
    encoded = torch.empty(codec.stripe_nbytes(stripe), dtype=torch.uint8, device=GPU)
    codec.encode_stripe(values, stripe, encoded)
    tail = values[-4096:].cpu()
    values.zero_()
    codec.decode_stripe(encoded, stripe, values)
    small = Layout((Segment("p", 0, 4096),), torch.float32)
    expected = torch.zeros(4096)
    there = torch.empty(codec.stripe_nbytes(small), dtype=torch.uint8)
    codec.encode_stripe(tail, small, there)
    codec.decode_stripe(there, small, expected)
    assert torch.equal(values[-4096:].cpu(), expected)
    assert not values[: numel - 4096].any()
