"""How each side is built inside a worker, on plain torch, on torchmn or on a peer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from exchange.table import BATCH, BLOCK_STEPS, Side

_ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(_ROOT / "examples"))
for _peer in ("torchft", "horovod"):  # last: their folders also hold older packages of ours
    sys.path.append(str(_ROOT / ".peers" / _peer))
from models.mlp import MLP  # noqa: E402
from models.vgg import VGG  # noqa: E402

Step = Callable[[], object]
NUM_BATCHES = 4
TIMEOUT_S = 240


@dataclass
class Runner:
    """One side, built: ``step`` trains once, ``drain`` returns when nothing is in flight.

    ``resume`` runs before a turn and starts what would disturb the turns of the other sides.
    ``notes`` describes the side after its warm-up, ``plan`` is the schedule and the codec that
    `auto` has chosen.
    """

    step: Step
    drain: Step = lambda: None
    resume: Step = lambda: None
    notes: Callable[[], str] = lambda: ""
    plan: Callable[[], Mapping[str, str] | None] = lambda: None


def build(side: Side) -> Runner:
    """Build a side. *Collective.* Raises whatever prevents it."""
    return BUILDERS[side.build](side.options)


class _SmallNetwork(nn.Module):
    """In place of VGG in a smoke test: 1.3 million parameters, a step of a millisecond."""

    def __init__(self) -> None:
        super().__init__()
        pooled = [nn.MaxPool2d(4), nn.Flatten(), nn.Linear(1024, 1024)]
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *pooled)
        self.classifier = nn.Sequential(
            nn.Linear(1024, 256), nn.BatchNorm1d(256), nn.Linear(256, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))  # type: ignore[no-any-return]


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, the same on all workers."""
    torch.manual_seed(0)  # the same model on all workers; each worker is a process of its own
    model: nn.Module = _SmallNetwork() if os.environ.get("BENCH_SMOKE") else VGG(10)
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def _step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...] = (3, 32, 32)
) -> Step:
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = cycle(
        [
            (
                torch.randn((BATCH, *shape), generator=generator),
                torch.randint(10, (BATCH,), generator=generator),
            )
            for _ in range(NUM_BATCHES)
        ]
    )

    def step() -> None:
        images, labels = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def _alone(options: Mapping[str, object]) -> Runner:
    """Plain torch. With ``barrier`` all workers wait for each other at the end of a step."""
    step = _step_of(*training())
    if not options.get("barrier"):
        return Runner(step)
    flag = torch.zeros(1)

    def step_and_wait() -> None:
        step()
        dist.all_reduce(flag)

    return Runner(step_and_wait)


def _ddp(options: Mapping[str, object]) -> Runner:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model, optimizer = training()
    wrapped = nn.parallel.DistributedDataParallel(model)
    hook = str(options.get("hook", ""))
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook:
        from torchmn.exchange.optimizer import ddp_hook

        ddp_hook(hook.removeprefix("torchmn ")).register(wrapped)
    return Runner(_step_of(wrapped, optimizer))


def _post_local_sgd(options: Mapping[str, object]) -> Runner:
    """torch's recipe with every worker as a subgroup: local steps, then one average."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model, inner = training()
    own_group, _ = dist.new_subgroups(group_size=1)
    # Buffers would be broadcast before every forward: a synchronous step in all but name.
    wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    state = PostLocalSGDState(process_group=None, subgroup=own_group, start_localSGD_iter=0)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=BLOCK_STEPS, warmup_steps=0)
    return Runner(_step_of(wrapped, PostLocalSGDOptimizer(inner, averager)))


def torchft_manager() -> Any:
    """A manager that makes each worker a replica group of its own. *Collective.*"""
    import logging
    from datetime import timedelta

    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(name).setLevel(logging.ERROR)
    lighthouse: list[object] = [None]
    if dist.get_rank() == 0:
        _alive.append(
            LighthouseServer(bind="[::]:0", min_replicas=dist.get_world_size(), join_timeout_ms=100)
        )
        lighthouse = [_alive[-1].address()]
    dist.broadcast_object_list(lighthouse, 0)
    store = dist.TCPStore(
        os.environ["OWN_ADDRESS"], 0, is_master=True, wait_for_workers=False, use_libuv=True
    )
    _alive.append(store)
    timeout = timedelta(seconds=TIMEOUT_S)
    return Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        min_replica_size=dist.get_world_size(),
        load_state_dict=lambda state: None,
        state_dict=dict,
        replica_id=f"worker{dist.get_rank()}",
        store_addr=os.environ["OWN_ADDRESS"],
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=str(lighthouse[0]),
        hostname=os.environ["OWN_ADDRESS"],
        use_async_quorum=False,
        init_sync=False,
        timeout=timeout,
        quorum_timeout=timeout,
    )


def _torchft(options: Mapping[str, object]) -> Runner:
    """torchft's DiLoCo, with each worker as a replica group."""
    manager = torchft_manager()
    from torchft.local_sgd import DiLoCo

    model, inner = training()
    features = list(model.features)  # type: ignore[union-attr]
    half = len(features) * 3 // 4  # about half of the parameters on each side
    parts = [nn.Sequential(*features[:half]), nn.Sequential(*features[half:], model.classifier)]
    fragments = parts if options["fragments"] == 2 else [model]
    outer = [
        torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        for part in fragments
    ]
    diloco = DiLoCo(
        manager,
        fragments,
        inner,
        outer,
        sync_every=BLOCK_STEPS,
        use_bucketization=True,
        fragment_sync_delay=options["delay_steps"],
    )
    diloco.__enter__()
    _alive.append(diloco)
    return Runner(_step_of(model, inner))


_alive: list[Any] = []  # servers that live as long as the worker


def _horovod(options: Mapping[str, object]) -> Runner:
    """Horovod's DistributedOptimizer over gloo, with its defaults for fusion and cycle time.

    Horovod's background thread exchanges messages with the other ranks in every cycle (1 ms), also
    while nothing trains. It is therefore shut down between turns and initialized again before one.
    """
    import horovod.torch as hvd
    from horovod.runner.http.http_server import RendezvousServer

    rank, size = dist.get_rank(), dist.get_world_size()
    address: list[object] = [None]
    server = RendezvousServer()
    if rank == 0:
        address = [(os.environ["OWN_ADDRESS"], server.start())]
        _alive.append(server)
    dist.broadcast_object_list(address, 0)
    host, port = address[0]  # type: ignore[misc]
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    variables = {
        "HOSTNAME": os.environ["OWN_ADDRESS"],
        "RANK": rank,
        "SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": local_size,
        "CROSS_RANK": rank // local_size,
        "CROSS_SIZE": size // local_size,
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": os.environ["GLOO_SOCKET_IFNAME"],
        "GLOO_RENDEZVOUS_ADDR": host,
        "GLOO_RENDEZVOUS_PORT": port,
        "GLOO_TIMEOUT_SECONDS": TIMEOUT_S,
    }
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in variables.items()})

    def resume() -> None:
        if hvd.is_initialized():
            return
        if rank == 0:
            server.init([])  # forgets the addresses of the previous turn
        dist.barrier()
        hvd.init()

    def drain() -> None:
        dist.barrier()
        hvd.shutdown()

    resume()
    model, inner = training()
    optimizer = hvd.DistributedOptimizer(
        inner,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, str(options.get("compression", "none"))),
    )
    return Runner(_step_of(model, optimizer), drain, resume)


def communicator(options: Mapping[str, object]) -> Any:
    """A communicator of all workers. *Collective.*"""
    import torchmn
    from torchmn.comm.create import ROUTES
    from torchmn.comm.routes.flat import FlatRoute

    class FlatInBuckets(FlatRoute):
        """One all-reduce over all workers for each bucket: what DDP does."""

        name = "flat in buckets"
        granularity = "bucket"

    ROUTES.setdefault("flat in buckets", FlatInBuckets)
    comm = torchmn.create_communicator(
        str(options.get("route", "auto")),
        transport=str(options.get("transport", "torch")),
        timeout_s=TIMEOUT_S,
    )
    if "bucket_bytes" in options:
        comm.route.bucket_bytes = int(str(options["bucket_bytes"]))
    return comm


def _torchmn(options: Mapping[str, object], schedule: object = None) -> Runner:
    import torchmn

    model, inner = training()
    comm = communicator(options)
    more: dict[str, Any] = dict(options.get("optimizer", {}))  # type: ignore[call-overload]
    codec, schedule = options.get("codec"), schedule or options.get("schedule")
    auto = torchmn.Auto(lossy=more.pop("lossy", False), stale=more.pop("stale", False))
    optimizer = torchmn.create_multi_node_optimizer(
        inner,
        comm,
        model,
        codec=auto if codec == "auto" else codec,
        schedule=auto if schedule == "auto" else schedule,
        **more,
    )
    step = _step_of(model, optimizer)
    if options.get("schedule") == "parameter_server":
        return Runner(step, optimizer.flush)
    # Queued in the engine after whatever is in flight; 'auto' may have chosen another engine.
    return Runner(
        step,
        lambda: optimizer.reducer.comm.barrier(),
        notes=lambda: optimizer.tuner.reason if optimizer.tuner is not None else "",
        plan=lambda: _plan_of(optimizer),
    )


def _plan_of(optimizer: Any) -> Mapping[str, str] | None:
    plan = optimizer.tuner.plan if optimizer.tuner is not None else None
    return None if plan is None else {"schedule": plan.schedule, "codec": plan.codec}


def _mlp() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MLP()
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def _mlp_alone(options: Mapping[str, object]) -> Runner:
    return Runner(_step_of(*_mlp(), shape=(784,)))


def _mlp_with_cntk_names(options: Mapping[str, object]) -> Runner:
    """The learners under their CNTK names, to be compared with `cntk_worker.py`."""
    from torchmn.cntk.train import distributed as cntk

    model, inner = _mlp()
    comm = communicator(options)
    if options.get("block"):
        size = BLOCK_STEPS * BATCH * dist.get_world_size()
        learner = cntk.block_momentum_distributed_learner(inner, size, comm=comm)
    else:
        bits = options["bits"]
        learner = cntk.data_parallel_distributed_learner(inner, 0, bits, comm=comm)
    _, [learner] = cntk.optimizers_of([learner], [model])
    return Runner(_step_of(model, learner, shape=(784,)), comm.barrier)


def _torchmn_blocks(options: Mapping[str, object]) -> Runner:
    import torchmn.exchange.schedules

    schedule = getattr(torchmn.exchange.schedules, str(options["schedule"]))
    block_size = BLOCK_STEPS * BATCH * dist.get_world_size()
    make = schedule.recommended if options["recommended"] else schedule
    return _torchmn(options, make(block_size, **options["schedule_options"]))  # type: ignore[arg-type]


def _double_buffering_recommended(options: Mapping[str, object]) -> Runner:
    from torchmn.exchange.schedules import DoubleBuffering

    return _torchmn(options, DoubleBuffering.recommended())


def _mean(options: Mapping[str, object]) -> Runner:
    """One mean, exchanged like gradients: in pieces of ``bucket_bytes`` by the engine, or whole.

    It is a sum, because gradients are divided when they are packed.
    """
    comm = communicator(options)
    numel = int(str(options["nbytes"])) // 4
    size = numel if options.get("whole") else comm.route.bucket_bytes // 4
    pieces = [
        comm.route.new_buffer(min(size, numel - start), torch.float32, torch.device("cpu"))
        for start in range(0, numel, size)
    ]
    for piece in pieces:
        piece.fill_(0)  # pages that were never written are read much faster
    return Runner(
        lambda: [work.wait() for work in [comm.route.start_sum_(piece) for piece in pieces]]
    )


def _mean_by_gloo(options: Mapping[str, object]) -> Runner:
    """torch's own all-reduce, whole or as DDP calls it: in pieces, all in flight at once."""
    buffer = torch.zeros(int(str(options["nbytes"])) // 4).fill_(0)
    pieces = buffer.split(int(str(options.get("bucket_bytes", options["nbytes"]))) // 4)

    def step() -> None:
        for work in [dist.all_reduce(piece, async_op=True) for piece in pieces]:
            work.wait()  # type: ignore[union-attr]

    return Runner(step)


def _mean_by_mpi(options: Mapping[str, object]) -> Runner:
    from mpi4py import MPI

    buffer = torch.zeros(int(str(options["nbytes"])) // 4).fill_(0).numpy()
    return Runner(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer))


BUILDERS: dict[str, Callable[[Mapping[str, object]], Runner]] = {
    "alone": _alone,
    "ddp": _ddp,
    "post-local SGD": _post_local_sgd,
    "torchft": _torchft,
    "horovod": _horovod,
    "MLP alone": _mlp_alone,
    "MLP with CNTK's names": _mlp_with_cntk_names,
    "torchmn": _torchmn,
    "torchmn blocks": _torchmn_blocks,
    "double buffering, recommended": _double_buffering_recommended,
    "mean": _mean,
    "mean by gloo": _mean_by_gloo,
    "mean by MPI": _mean_by_mpi,
}
