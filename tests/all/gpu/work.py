"""What ranks do in the checks on a GPU. Each function is called on every rank and asserts.

All of them work on any `comm.device`, so that the ordinary tests run them on CPUs: there they show
that the checks ask for the right thing.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchmn
from tests.limits import limit
from torchmn.cntk.train.minibatch_sums import MinibatchSums, start_sum
from torchmn.comm import Communicator
from torchmn.errors import (
    CommunicationError,
    RankMismatchError,
    TimeLimitError,
    UnsupportedError,
)
from torchmn.exchange.schedules import BlockMomentum, DiLoCo, DoubleBuffering

NUM_STEPS = 6
SHARED = {"folder": Path()}
"""A folder that all ranks see, for those that save."""


def drawn(*shape: int, seed: int, like: Tensor) -> Tensor:
    """Random numbers that every rank can draw for every other, on any device the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


def network(comm: Communicator, dtype: torch.dtype = torch.float64, dropout: float = 0.0):
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 64), nn.Tanh()
    )
    model.append(nn.Linear(64, 4))
    model.to(comm.device, dtype)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=number, like=parameter) / 4)
    return model


def batch(step: int, like: Tensor) -> tuple[Tensor, Tensor]:
    x = drawn(12, 8, seed=1000 + step, like=like)
    return x, x[:, :4].sin()


def train(
    comm: Communicator | None, model: nn.Module, optimizer, steps=range(NUM_STEPS)
) -> list[float]:
    losses = []
    weight = next(model.parameters())
    for step in steps:
        x, y = batch(step, weight)
        if comm is not None:
            x, y = x.chunk(comm.size)[comm.rank], y.chunk(comm.size)[comm.rank]
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def assert_replicas(comm: Communicator, model: nn.Module) -> None:
    own = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.isfinite(own).all()
    for rank, other in enumerate(comm.allgather(own)):
        assert torch.equal(own, other), f"rank {rank} has other bits than rank {comm.rank}"


def assert_close(model: nn.Module, expected: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        error = float((ours - theirs).detach().abs().max())
        assert error <= tolerance, f"{name} is off by {error}"


# ---- collectives and streams ----


def collectives(comm: Communicator) -> None:
    """Every collective, and messages, for several dtypes, on tensors of the device."""
    device, size, own = comm.device, comm.size, comm.rank
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64):
        x = torch.arange(5, device=device).to(dtype) + own
        total = sum(torch.arange(5, device=device).to(dtype) + r for r in range(size))
        assert torch.equal(comm.allreduce(x), total), dtype
        assert torch.equal(comm.bcast(x, size - 1), x - own + size - 1), dtype
        assert [int(t[0]) for t in comm.allgather(x)] == list(range(size)), dtype
        parts = comm.alltoall([x + 10 * peer for peer in range(size)])
        assert [int(part[0]) for part in parts] == [r + 10 * own for r in range(size)], dtype
        gathered = comm.gather(x, 0)
        assert (gathered is not None) == (own == 0)
        scattered = comm.scatter([x + peer for peer in range(size)] if own == 0 else None, 0)
        assert int(scattered[0]) == own
    nested = {"all": [torch.full((3,), float(own), device=device), (own, "text")]}
    for rank, other in enumerate(comm.allgather_obj(nested)):
        assert other["all"][0].device == device
        assert other["all"][0].tolist() == [rank] * 3
    if size > 1 and own < 2:
        x = torch.full((1000,), own + 1.0, device=device)
        if own == 0:
            comm.send(x, 1, tag=5)
            assert comm.recv(1, tag=6).tolist() == [2.0] * 1000
        else:
            assert comm.recv(0, tag=5).tolist() == [1.0] * 1000
            comm.send(x, 0, tag=6)


def sums(comm: Communicator) -> None:
    """The route's sum of small and large buffers: right, and the same bits on all ranks."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for numel in (1, 7, 1000, 1_000_003):
            parts = [
                drawn(numel, seed=rank, like=torch.empty(0, dtype=dtype, device=comm.device))
                for rank in range(comm.size)
            ]
            buffer = parts[comm.rank].clone()
            comm.route.sum_(buffer)
            error = float((buffer - torch.stack(parts).sum(0)).abs().max())
            assert error < tolerance * 10 * comm.size, (dtype, numel, error)
            for other in comm.allgather(buffer):
                assert torch.equal(other, buffer), (dtype, numel)


def order_of_streams(comm: Communicator) -> None:
    """Sums see what was launched before them, and what comes after sees the sums.

    Long products run before and after; memory is given back and taken again meanwhile; blocking
    calls come between sums that are under way, which share scratch memory with them.
    """
    device = comm.device
    factor = torch.eye(700, device=device)
    for turn in range(20):
        buffers = []
        for number in range(4):
            slow = torch.full((700, 700), float(comm.rank + number + turn), device=device)
            for _ in range(4):
                slow = slow @ factor
            buffers.append(slow.view(-1))
        works = [comm.route.start_sum_(buffer) for buffer in buffers]
        token = comm.allreduce(torch.full((50_000,), 1.0, device=device))
        arrived = comm.allgather_obj([torch.full((20_000,), float(turn), device=device)])
        junk = [torch.full((700 * 700,), -1.0, device=device) for _ in range(4)]
        for number, (work, buffer) in enumerate(zip(works, buffers, strict=True)):
            work.wait()
            expected = sum(rank + number + turn for rank in range(comm.size))
            assert (buffer == expected).all(), (turn, number)
        assert (token == comm.size).all()
        assert all((one[0] == turn).all() for one in arrived)
        del junk, arrived


def minibatch_sums(comm: Communicator) -> None:
    """Those of CNTK's trainer, which are started while the GPU still computes the loss."""
    loss = torch.full((), comm.rank + 1.0, device=comm.device)
    if comm.device.type == "cuda":
        torch.cuda._sleep(20_000_000)
    own = MinibatchSums(loss * 2, num_samples=3, is_sweep_end=comm.rank == 0)
    loss.zero_()
    await_sums = start_sum(own, comm)
    found = await_sums()
    assert found.loss == comm.size * (comm.size + 1)
    assert (found.metric, found.num_samples, found.is_sweep_end) == (None, 3 * comm.size, True)


def other_streams(comm: Communicator) -> None:
    """A script with a stream of its own: sums are ordered with that one."""
    if comm.device.type != "cuda":
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        order_of_streams(comm)
    stream.synchronize()


# ---- training ----


def every_step(comm: Communicator) -> None:
    """As one process with the whole batch."""
    model = network(comm)
    expected = copy.deepcopy(model)
    optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model)
    train(comm, model, optimizer)
    train(None, expected, sgd(expected))
    assert_replicas(comm, model)
    assert_close(model, expected)


def _trained(
    comm: Communicator,
    num_steps: int,
    lr: float = 0.02,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> nn.Module:
    """Train with these options on one batch, so that the loss falls."""
    model = network(comm, dtype)
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, **options)
    losses = train(comm, model, optimizer, steps=[0] * num_steps)
    optimizer.flush()
    assert losses[-1] < losses[0], losses
    return model


def _codec(name: str) -> Callable[[Communicator], None]:
    def work(comm: Communicator) -> None:
        assert_replicas(comm, _trained(comm, 30, 0.05, torch.float32, codec=name))

    return work


def _schedule(make: Callable[[], object]) -> Callable[[Communicator], None]:
    def work(comm: Communicator) -> None:
        assert_replicas(comm, _trained(comm, 24, schedule=make()))

    return work


codec_int8 = _codec("int8")
codec_int4 = _codec("int4")
codec_1bit = _codec("1bit")
codec_float16 = _codec("float16")
codec_power_sgd = _codec("power_sgd")
double_buffering = _schedule(DoubleBuffering)
eager_double_buffering = _schedule(lambda: DoubleBuffering(eager=True))
diloco = _schedule(lambda: DiLoCo(48, overlap_steps=2, num_fragments=2, eager=True))
block_momentum = _schedule(lambda: BlockMomentum(48))


def chosen_by_measurement(comm: Communicator) -> None:
    """`auto` changes plans between steps, as one process with the whole batch.

    On a GPU its times are those of the GPU, though the host is never kept waiting in a step.
    """
    model = network(comm)
    expected = copy.deepcopy(model)
    least_s = 0.0
    if comm.device.type == "cuda":
        model.register_forward_hook(lambda *_: torch.cuda._sleep(20_000_000))  # some 10 ms
        least_s = 0.005
    optimizer = torchmn.create_multi_node_optimizer(
        sgd(model), comm, model, codec="auto", schedule="auto"
    )
    steps = range(60)
    for step in steps:
        x, y = (part.chunk(comm.size)[comm.rank] for part in batch(step, next(model.parameters())))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    optimizer.flush()
    assert optimizer.tuner is not None
    assert optimizer.tuner.plan is not None
    assert all(trial.step_s > least_s for trial in optimizer.tuner.trials), optimizer.tuner.trials
    train(None, expected, sgd(expected), steps)
    assert_replicas(comm, model)
    assert_close(model, expected, 1e-9)


def grad_scaler(comm: Communicator) -> None:
    """float16 autocast with GradScaler: infinite gradients of one rank skip the step of all."""
    kind = comm.device.type
    model = network(comm, torch.float32)
    optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model, on_nonfinite="ignore")
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
    weight = next(model.parameters())
    for step in range(NUM_STEPS):
        x, y = (each.chunk(comm.size)[comm.rank] for each in batch(step, weight))
        before = weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast(kind, torch.float16 if kind == "cuda" else torch.bfloat16):
            loss = (model(x).float() - y).square().mean()
        if step == 2 and comm.rank == comm.size - 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, weight) == (step == 2), f"step {step}"
        assert_replicas(comm, model)
    assert scaler.get_scale() == 512.0


def compiled(comm: Communicator) -> None:
    """A model under torch.compile trains as without."""
    model = network(comm)
    expected = copy.deepcopy(model)
    optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model)
    fast = torch.compile(model)
    for step in range(NUM_STEPS):
        x, y = (e.chunk(comm.size)[comm.rank] for e in batch(step, next(model.parameters())))
        optimizer.zero_grad()
        (fast(x) - y).square().mean().backward()
        optimizer.step()
    train(None, expected, sgd(expected))
    assert_replicas(comm, model)
    assert_close(model, expected, 1e-9)


def resume(comm: Communicator) -> None:
    """A run with dropout that is saved and resumed has the bits of one that is not."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, dict]:
        model = network(comm, dropout=0.3)
        optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model)
        return model, optimizer, {"model": model, "optimizer": optimizer}

    torchmn.seed_ranks(3, comm)
    model, optimizer, state = begin()
    checkpointer = torchmn.create_multi_node_checkpointer(comm, SHARED["folder"], "run")
    train(comm, model, optimizer, range(3))
    checkpointer.save(3, state)
    checkpointer.finish()
    train(comm, model, optimizer, range(3, NUM_STEPS))
    optimizer.close()
    again, optimizer, state = begin()
    torch.rand(7, device=comm.device)  # generators have moved on
    assert checkpointer.resume(state) == 3
    train(comm, again, optimizer, range(3, NUM_STEPS))
    assert_close(again, model, 0.0)
    checkpointer.close()


def batch_norm(comm: Communicator) -> None:
    """Statistics of all ranks: outputs and gradients of the whole batch."""
    x = drawn(12, 5, seed=1, like=torch.empty(0, dtype=torch.float64, device=comm.device))
    target = drawn(12, 5, seed=2, like=x)
    whole = nn.BatchNorm1d(5).to(x)
    theirs = x.clone().requires_grad_()
    (whole(theirs) * target).sum().backward()
    layer = torchmn.links.MultiNodeBatchNorm1d(5, comm).to(x)
    ours = x.chunk(comm.size)[comm.rank].clone().requires_grad_()
    (layer(ours) * target.chunk(comm.size)[comm.rank]).sum().backward()
    expected = theirs.grad.chunk(comm.size)[comm.rank]
    assert torch.allclose(ours.grad, expected, rtol=0, atol=1e-10)
    assert torch.allclose(layer.running_var, whole.running_var, rtol=0, atol=1e-12)


def _batch_norm_of_images(dtype: torch.dtype, tolerance: float) -> Callable[[Communicator], None]:
    def work(comm: Communicator) -> None:
        like = torch.empty(0, device=comm.device)
        for memory_format in (torch.contiguous_format, torch.channels_last):

            def images(seed: int, shape=(8, 6, 5, 7), memory_format=memory_format) -> Tensor:
                x = drawn(*shape, seed=seed, like=like).mul_(2).add_(1)
                return x.to(dtype).contiguous(memory_format=memory_format)

            x, target = images(1), images(2)
            whole = nn.BatchNorm2d(6).to(comm.device)
            layer = torchmn.links.MultiNodeBatchNorm2d(6, comm).to(comm.device)
            theirs = x.float().clone().requires_grad_()
            expected = whole(theirs)
            (expected * target.float()).sum().backward()
            ours = x.chunk(comm.size)[comm.rank].clone(memory_format=memory_format)
            ours.requires_grad_()
            y = layer(ours)
            assert y.dtype == dtype
            (y * target.chunk(comm.size)[comm.rank]).sum().backward()
            for found, wanted in (
                (y, expected.chunk(comm.size)[comm.rank]),
                (ours.grad, theirs.grad.chunk(comm.size)[comm.rank]),
                (comm.allreduce(layer.weight.grad), whole.weight.grad),
                (layer.running_mean, whole.running_mean),
                (layer.running_var, whole.running_var),
            ):
                scale = float(wanted.detach().abs().max())
                error = float((found.float() - wanted).detach().abs().max())
                assert error <= tolerance * scale, (memory_format, error, scale)

    return work


batch_norm_float32 = _batch_norm_of_images(torch.float32, 1e-5)
batch_norm_bfloat16 = _batch_norm_of_images(torch.bfloat16, 2e-2)
batch_norm_float16 = _batch_norm_of_images(torch.float16, 4e-3)


def clipped(comm: Communicator) -> None:
    """By torch's function between backward and step, and by ours."""
    for option, by_hand in (({"max_grad_norm": 0.05}, False), ({}, True)):
        model = network(comm)
        expected = copy.deepcopy(model)
        optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model, **option)
        plain = sgd(expected)
        for step in range(NUM_STEPS):
            x, y = batch(step, next(model.parameters()))
            for net, opt, own, is_ours in (
                (model, optimizer, slice(comm.rank, comm.rank + 1), True),
                (expected, plain, slice(None), False),
            ):
                opt.zero_grad()
                parts = [torch.cat(t.chunk(comm.size)[own]) for t in (x, y)]
                (net(parts[0]) - parts[1]).square().mean().backward()
                if by_hand or not is_ours:
                    nn.utils.clip_grad_norm_(net.parameters(), 0.05)
                opt.step()
        assert_replicas(comm, model)
        assert_close(model, expected)
        optimizer.close()


class Branches(nn.Module):
    """Two halves, each on a stream of its own where there are streams, and what joins them."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.halves = nn.ModuleList([network(comm), network(comm)])
        is_gpu = comm.device.type == "cuda"
        self.streams = [torch.cuda.Stream() if is_gpu else None for _ in self.halves]

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for half, stream in zip(self.halves, self.streams, strict=True):
            if stream is None:
                outs.append(half(x))
                continue
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # so that a missing wait is seen
                    torch.cuda._sleep(2_000_000)
                outs.append(half(x))
        for stream in self.streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        return outs[0] * 2 - outs[1]


def two_streams(comm: Communicator) -> None:
    """Gradients of one bucket are computed on two streams of the script."""
    model, expected = Branches(comm), Branches(comm)
    expected.load_state_dict(model.state_dict())
    expected.streams = [None, None]
    optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model)
    train(comm, model, optimizer)
    train(None, expected, sgd(expected))
    assert_replicas(comm, model)
    assert_close(model, expected)


def images_in_bfloat16(comm: Communicator) -> None:
    """Convolutions, channels_last, under autocast."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 4 * 4, 4),
    )  # fmt: skip
    model = model.to(comm.device, memory_format=torch.channels_last)
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.AdamW(model.parameters(), 3e-3), comm, model
    )
    like = torch.empty(0, device=comm.device)
    x = drawn(16, 3, 8, 8, seed=comm.rank, like=like).contiguous(memory_format=torch.channels_last)
    labels = (x.mean((2, 3)).argmax(1)).long()
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast(comm.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_replicas(comm, model)
    assert losses[-1] < 0.7 * losses[0], losses


def compiled_reduce_overhead(comm: Communicator) -> None:
    """A model in CUDA graphs that torch.compile makes: `backward` and `step` are outside."""
    _graphed(comm, lambda model, x: torch.compile(model, mode="reduce-overhead"))


def graphed_callables(comm: Communicator) -> None:
    """A model in CUDA graphs that the script makes."""
    _graphed(comm, lambda model, x: torch.cuda.make_graphed_callables(model, (x,)))


def _graphed(comm: Communicator, graphed: Callable[[nn.Module, Tensor], nn.Module]) -> None:
    model = network(comm)
    expected = copy.deepcopy(model)
    x, _ = batch(0, next(model.parameters()))
    fast = model
    if comm.device.type == "cuda":
        fast = graphed(model, torch.zeros_like(x.chunk(comm.size)[comm.rank]))
    model.zero_grad()
    optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model)
    train(comm, fast, optimizer)
    train(None, expected, sgd(expected))
    assert_replicas(comm, model)
    assert_close(model, expected, 1e-9)


def graph_by_hand(comm: Communicator) -> None:
    """A whole step in a CUDA graph is refused before anything has begun, and training goes on."""
    model = network(comm)
    expected = copy.deepcopy(model)
    optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model)
    train(comm, model, optimizer, range(3))
    if comm.device.type == "cuda":
        x, y = batch(0, next(model.parameters()))
        torch.cuda.synchronize()
        error: BaseException | None = None
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                (model(x) - y).square().mean().backward()
        except Exception as raised:  # the end of a capture that was broken off raises as well
            error = raised
        while error is not None and not isinstance(error, UnsupportedError):
            error = error.__context__
        assert error is not None, "the capture was not refused"
        assert "A CUDA graph is being captured" in str(error)
    train(comm, model, optimizer, range(3, NUM_STEPS))
    train(None, expected, sgd(expected))
    assert_replicas(comm, model)
    assert_close(model, expected)


class RunsOut(torch.autograd.Function):
    """Passes a value on, and runs out of memory in backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        if dy.is_cuda:
            return torch.empty(2**45, device=dy.device)
        raise torch.OutOfMemoryError("there is no GPU to run out of memory on")


def out_of_memory(comm: Communicator) -> None:
    """One rank catches it in backward and tries again: all ranks get the same error at once."""
    model = network(comm)
    optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model)
    train(comm, model, optimizer, range(2))
    x, y = batch(0, next(model.parameters()))
    began = time.monotonic()

    def three_steps() -> None:  # on a GPU the others know a step later
        for step in range(3):
            optimizer.zero_grad()
            if step == 0 and comm.rank == 1:
                with pytest.raises(torch.OutOfMemoryError):
                    model[2:](RunsOut.apply(model[:2](x))).square().mean().backward()
                optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()

    with pytest.raises(RankMismatchError, match="rank 1 raised an exception in its backward"):
        three_steps()
    assert time.monotonic() - began < comm.timeout_s / 2 + limit(5), "the error came late"


def _on_a_grid(
    comm: Communicator, divide: Callable[[nn.Module, object], None], own_batches: bool
) -> None:
    """Models divided over pairs of ranks, exchanged between the pairs: as one process."""
    grid = torchmn.Grid(comm, data=-1, model=2)
    model = network(comm, torch.float32)
    expected = copy.deepcopy(model)
    divide(model, grid.device_mesh("model"))
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), 0.05), grid.data, model
    )
    plain = torch.optim.SGD(expected.parameters(), 0.05)
    whose = comm if own_batches else grid.data
    for step in range(NUM_STEPS):
        x, y = batch(step, next(expected.parameters()))
        own = [t.chunk(whose.size)[whose.rank] for t in (x, y)]
        for net, opt, (inputs, targets) in ((model, optimizer, own), (expected, plain, (x, y))):
            opt.zero_grad()
            (net(inputs) - targets).square().mean().backward()
            opt.step()
    optimizer.flush()
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(whole, theirs, rtol=1e-4, atol=1e-5, msg=name)


def fully_sharded(comm: Communicator) -> None:
    """`fully_shard` over pairs of ranks."""
    from torch.distributed.fsdp import fully_shard

    def divide(model: nn.Module, mesh) -> None:
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    _on_a_grid(comm, divide, own_batches=True)


def tensor_parallel(comm: Communicator) -> None:
    """Columns and rows over pairs of ranks."""
    from torch.distributed.tensor import parallel

    def divide(model: nn.Module, mesh) -> None:
        plan = {"0": parallel.ColwiseParallel(), "3": parallel.RowwiseParallel()}
        parallel.parallelize_module(model, mesh, plan)

    _on_a_grid(comm, divide, own_batches=False)


def ddp_hook(comm: Communicator) -> None:
    """Our codec under DistributedDataParallel: replicas stay the same."""
    import torch.distributed as dist

    store = dist.FileStore(str(SHARED["folder"] / "store"), comm.size)
    own_gpu = comm.name == "pure_nccl" and comm.size > 1
    dist.init_process_group(
        "nccl" if own_gpu else "gloo", store=store, rank=comm.rank, world_size=comm.size
    )
    model = network(comm, torch.float32)
    ddp = nn.parallel.DistributedDataParallel(model)
    hook = torchmn.ddp_hook("int8").register(ddp)
    losses = train(comm, ddp, torch.optim.SGD(ddp.parameters(), 0.05), [0] * 20)
    assert_replicas(comm, model)
    assert losses[-1] < losses[0]
    hook.close()
    dist.destroy_process_group()


def parameter_server(comm: Communicator) -> None:
    _trained(comm, 12, schedule="parameter_server")


def chain(comm: Communicator) -> None:
    """A pipeline over all ranks computes what one process computes."""
    layers = [nn.Linear(6, 6).to(comm.device, torch.float64) for _ in range(comm.size)]
    with torch.no_grad():
        for number, parameter in enumerate(p for layer in layers for p in layer.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=number, like=parameter))
    x = drawn(8, 6, seed=77, like=layers[0].weight)
    y = x
    for layer in layers:
        y = layer(y)
    y.square().mean().backward()
    expected = layers[comm.rank].weight.grad.clone()
    layers[comm.rank].zero_grad()
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    model = torchmn.links.MultiNodeChainList(comm, num_microbatches=4)
    model.add_link(
        layers[comm.rank],
        rank_in=None if first else comm.rank - 1,
        rank_out=None if last else comm.rank + 1,
    )
    model.forward_backward(
        x if first else None, x if last else None, lambda out, _: out.square().mean()
    )
    assert torch.allclose(layers[comm.rank].weight.grad, expected, rtol=0, atol=1e-10)


# ---- what goes wrong ----


def sum_and_await_the_error(comm: Communicator, x: torch.Tensor) -> None:
    """Over NCCL a sum is queued, and a later call raises its error."""
    comm.route.sum_(x)  # without a comparison of calls before
    while True:
        time.sleep(0.05)
        comm.engine.call(lambda: None)


def stuck_stream(comm: Communicator) -> None:
    """A rank whose stream waits for a kernel that does not end: all ranks get an error in time."""
    if comm.device.type != "cuda":
        return
    x = torch.ones(1000, device=comm.device)
    comm.allreduce(x)
    torch.cuda.synchronize()
    if comm.rank == 0:
        torch.cuda._sleep(60_000_000_000)  # about half a minute
    began = time.monotonic()
    expected = TimeLimitError if comm.rank == 0 else CommunicationError
    with pytest.raises(expected):
        sum_and_await_the_error(comm, x)
    assert time.monotonic() - began < comm.timeout_s + limit(20), "the error came late"


def missing_rank(comm: Communicator) -> None:
    """A rank that does not come: the others get an error in time, and can use their GPU then."""
    x = torch.ones(1000, device=comm.device)
    comm.allreduce(x)
    if comm.rank == 0:
        time.sleep(2 * comm.timeout_s)
        return
    began = time.monotonic()
    with pytest.raises(CommunicationError):
        sum_and_await_the_error(comm, x)
    assert time.monotonic() - began < comm.timeout_s + limit(20), "the error came late"
    assert float((torch.ones(10, device=comm.device) * 2).sum()) == 20.0


def refuses_nccl(comm: Communicator) -> None:
    """Two ranks on one GPU: the route is not pure_nccl, and asking for it is an error."""
    assert comm.name != "pure_nccl"
    with pytest.raises(UnsupportedError, match="NCCL"):
        torchmn.create_communicator("pure_nccl")
