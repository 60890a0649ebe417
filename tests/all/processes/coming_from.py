"""Run by test_coming_from.py: what the pages for users of DDP and Horovod say, on two ranks.

The ranks are started as DDP's tutorial starts them. Each row of a page's tables is a function here,
which runs torchmn's column and, on DDP's page, that of torch beside it. Arguments: the port of the
rendezvous, and the file of the outcomes: "ok" or why not, by page and row.
"""

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchmn
from torchmn.comm import Communicator
from torchmn.run.plan import RunOptions, plan_job
from torchmn.run.rank_environment import torchrun_variables
from torchmn.train.evaluation import sync_buffers_

NUM_RANKS = 2
BATCH = 6  # of all ranks
Row = Callable[[Communicator], None]
ROWS: dict[str, dict[str, Row]] = {"ddp": {}, "horovod": {}}


def row(page: str, *cells: str) -> Callable[[Row], Row]:
    """A function that shows the rows of a page whose first cells begin like this."""

    def add(function: Row) -> Row:
        for cell in cells:
            ROWS[page][cell] = function
        return function

    return add


# ---- the same training, by torch on one process, by DDP, and by torchmn ------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
            self.branch = nn.Linear(4, 8)

    def forward(self, x: Tensor, takes_branch: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden + self.branch(x) if takes_branch else hidden)


def samples(number: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(number, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (number,), generator=generator))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)


def plain_net() -> Net:
    """All of its parameters take part."""
    model = Net()
    model.branch.requires_grad_(False)
    return model


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> Tensor:
    for _ in range(2):
        for x, t in loader:
            optimizer.zero_grad()
            loss_of(model(x), t).backward()
            optimizer.step()
    return flat(model)


def alone(data: TensorDataset | None = None) -> Tensor:
    model = plain_net()
    return train(model, sgd(model), DataLoader(data or samples(), BATCH))


def by_ddp(**options: object) -> Tensor:
    model = DistributedDataParallel(plain_net(), **options)
    data = samples()
    sampler = DistributedSampler(data, shuffle=False)
    return train(model, sgd(model), DataLoader(data, BATCH // NUM_RANKS, sampler=sampler))


def by_torchmn(comm: Communicator, data: TensorDataset | None = None, **options: object) -> Tensor:
    model = plain_net()
    loader = torchmn.scatter_loader(DataLoader(data or samples(), BATCH), comm)
    with_comm = torchmn.create_multi_node_optimizer(sgd(model), comm, model, **options)
    trained = train(model, with_comm, loader)
    with_comm.close()
    return trained


def assert_close(one: Tensor, other: Tensor, limit: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=limit)


def share(comm: Communicator) -> tuple[Tensor, Tensor]:
    x, t = samples().tensors
    return x[comm.rank :: comm.size], t[comm.rank :: comm.size]


# ---- DDP: starting ----------------------------------------------------------------------------


@row("ddp", "mp.spawn(main, args=(n,), nprocs=n)")
def group_is_adopted(comm: Communicator) -> None:
    assert (comm.rank, comm.size) == (dist.get_rank(), NUM_RANKS)
    again = torchmn.create_communicator("naive")
    assert again.allgather_obj(os.getpid()) == comm.allgather_obj(os.getpid())
    again.finalize()
    total = torch.tensor([1.0])
    dist.all_reduce(total)  # the group is still there
    assert total == NUM_RANKS


@row("ddp", "torchrun --nproc-per-node 2 train.py")
def variables_of_torchrun(comm: Communicator) -> None:
    names = {"RANK": comm.rank, "WORLD_SIZE": comm.size, "LOCAL_RANK": comm.intra_rank}
    found = torchrun_variables(list(comm.topology.hosts))[comm.rank]
    assert {name: int(found[name]) for name in names} == names
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, str(1 - value if name == "RANK" else value))
        patch.setattr("multiprocessing.parent_process", lambda: None)  # as torchrun starts it
        with pytest.raises(torchmn.errors.TopologyError, match="init_process_group"):
            torchmn.create_communicator()


@row("ddp", "dist.get_rank()")
@row("horovod", "hvd.rank()")
def rank_and_size(comm: Communicator) -> None:
    assert (comm.rank, comm.size) == (dist.get_rank(), dist.get_world_size())


@row("ddp", "torch.cuda.set_device(local_rank)")
@row("horovod", "torch.cuda.set_device(hvd.local_rank())")
def device(comm: Communicator) -> None:
    assert next(Net().to(comm.device).parameters()).device == comm.device


@row("ddp", "torch.manual_seed(s)")
def seeds(comm: Communicator) -> None:
    state = torch.get_rng_state()
    torchmn.seed_ranks(3, comm)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
    optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model)
    first, *others = comm.allgather(flat(model))
    assert all(torch.equal(first, other) for other in others)
    loader = torchmn.scatter_loader(DataLoader(samples(), BATCH), comm)
    train(model, optimizer, loader)
    drawn = comm.allgather(torch.rand(8))
    assert not torch.equal(*drawn)
    optimizer.close()
    torch.set_rng_state(state)


# ---- DDP: data --------------------------------------------------------------------------------


@row("ddp", "DataLoader(data, sampler=DistributedSampler(data))")
@row("horovod", "DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())")
def each_sample_once(comm: Communicator) -> None:
    data = TensorDataset(torch.arange(11))
    theirs = DataLoader(data, 3, sampler=DistributedSampler(data))
    ours = torchmn.scatter_loader(DataLoader(data, BATCH, shuffle=True), comm)
    seen = [[int(i) for (batch,) in loader for i in batch] for loader in (theirs, ours)]
    by_theirs, by_ours = (sorted(sum(comm.allgather_obj(each), [])) for each in seen)
    assert len(by_theirs) == 12
    assert by_ours == list(range(11))


@row("ddp", "sampler.set_epoch(epoch)")
def order_of_passes(comm: Communicator) -> None:
    data = TensorDataset(torch.arange(12))
    theirs = DataLoader(data, 3, sampler=DistributedSampler(data))
    ours = torchmn.scatter_loader(DataLoader(data, BATCH, shuffle=True), comm)
    first, second = ([int(i) for (batch,) in theirs for i in batch] for _ in range(2))
    assert first == second  # without set_epoch
    orders = [comm.allgather_obj([int(i) for (batch,) in ours for i in batch]) for _ in range(4)]
    assert any(order != orders[0] for order in orders[1:])
    assert all(sorted(sum(order, [])) == list(range(12)) for order in orders)


@row("ddp", "batch_size")
@row("horovod", "lr * hvd.size()")
def batch_of_all_ranks(comm: Communicator) -> None:
    loader = torchmn.scatter_loader(DataLoader(samples(), BATCH), comm)
    assert [len(x) for x, _ in loader] == [BATCH // NUM_RANKS] * 2
    assert_close(by_torchmn(comm), alone())


# ---- DDP: training ----------------------------------------------------------------------------


@row("ddp", "model = DistributedDataParallel(model)")
@row("horovod", "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())")
def training(comm: Communicator) -> None:
    assert_close(by_torchmn(comm), by_ddp())
    uneven = samples(10)  # a last batch of four rows
    assert_close(by_torchmn(comm, uneven), alone(uneven))


@row("ddp", "model.module")
def names_of_a_state(comm: Communicator) -> None:
    model = Net()
    theirs = DistributedDataParallel(copy.deepcopy(model)).state_dict()
    optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model)
    assert all(name.startswith("module.") for name in theirs)
    model.load_state_dict({name.removeprefix("module."): x for name, x in theirs.items()})
    optimizer.close()


@row("ddp", "find_unused_parameters=True")
def parameters_of_some_ranks(comm: Communicator) -> None:
    theirs, ours = DistributedDataParallel(Net(), find_unused_parameters=True), Net()
    optimizer = torchmn.create_multi_node_optimizer(sgd(ours), comm, ours)
    x, t = share(comm)
    for model in (theirs, ours):
        loss_of(model(x, takes_branch=comm.rank == 1), t).backward()
    for one, other in zip(theirs.module.parameters(), ours.parameters(), strict=True):
        assert_close(one.grad, other.grad)
    optimizer.close()


@row("ddp", "static_graph=True", "gradient_as_bucket_view=True")
def buckets(comm: Communicator) -> None:
    theirs = by_ddp(static_graph=True, bucket_cap_mb=1, gradient_as_bucket_view=True)
    assert_close(by_torchmn(comm), theirs)
    assert_close(by_torchmn(comm, gradient_as_bucket_view=True), theirs)


@row("ddp", "nn.SyncBatchNorm.convert_sync_batchnorm(model)")
@row("horovod", "hvd.SyncBatchNorm")
def batch_normalization(comm: Communicator) -> None:
    whole, ours = nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4))
    x, _ = share(comm)
    with pytest.raises(ValueError, match="only work with GPU modules"):
        DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4)))(x)
    torchmn.links.convert_batch_norm(ours, comm)
    assert_close(ours(x), whole(samples().tensors[0])[comm.rank :: comm.size])


@row("ddp", "broadcast_buffers=True")
def buffers(comm: Communicator) -> None:
    theirs, ours = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    wrapped = DistributedDataParallel(theirs)
    for model in (wrapped, ours):
        model(share(comm)[0])
    sync_buffers_([ours], comm, "rank0")
    wrapped(share(comm)[0])  # copies rank 0's before it adds this batch
    expected = 0.9 * ours.running_mean + 0.1 * share(comm)[0].mean(0)
    assert_close(theirs.running_mean, expected)


@row("ddp", "with model.no_sync():")
@row("horovod", "backward_passes_per_step=2")
def accumulation(comm: Communicator) -> None:
    theirs, ours, whole = DistributedDataParallel(plain_net()), plain_net(), plain_net()
    optimizer = torchmn.create_multi_node_optimizer(sgd(ours), comm, ours)
    x, t = share(comm)
    for model, no_sync in ((theirs, theirs.no_sync), (ours, optimizer.no_sync)):
        with no_sync():
            loss_of(model(x[:3]), t[:3]).backward()
        loss_of(model(x[3:]), t[3:]).backward()
    data, target = samples().tensors
    (2 * loss_of(whole(data), target)).backward()
    for one, other in zip(theirs.module.parameters(), ours.parameters(), strict=True):
        if one.grad is not None:
            assert_close(one.grad, other.grad)
    assert_close(ours.last.weight.grad, whole.last.weight.grad)
    optimizer.close()


@row("ddp", "clip_grad_norm_(model.parameters(), 1.0)")
@row("horovod", "optimizer.synchronize()")
def clipping(comm: Communicator) -> None:
    theirs, ours = DistributedDataParallel(plain_net()), plain_net()
    optimizer = torchmn.create_multi_node_optimizer(sgd(ours), comm, ours)
    x, t = share(comm)
    norms = []
    for model, used in ((theirs, sgd(theirs)), (ours, optimizer)):
        loss_of(model(x), t).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.05))
        used.step()
    assert_close(*norms)
    assert_close(flat(theirs), flat(ours))
    optimizer.close()


@row("ddp", "model.register_comm_hook(None, fp16_compress_hook)")
@row("horovod", "compression=hvd.Compression.fp16")
def half_precision(comm: Communicator) -> None:
    x, t = share(comm)
    theirs, ours, plain = DistributedDataParallel(plain_net()), plain_net(), plain_net()
    theirs.register_comm_hook(None, fp16_compress_hook)
    # Of one host: the route that encodes between all ranks.
    half = torchmn.create_communicator("flat", allreduce_grad_dtype="float16")
    optimizers = [
        torchmn.create_multi_node_optimizer(sgd(model), used, model)
        for model, used in ((ours, half), (plain, comm))
    ]
    for model in (theirs, ours, plain):
        loss_of(model(x), t).backward()
    gradient, exact = ours.first.weight.grad, plain.first.weight.grad
    assert_close(theirs.module.first.weight.grad, gradient, 1e-3)
    assert 0 < (gradient - exact).abs().max() < 1e-3
    for optimizer in optimizers:
        optimizer.close()
    half.finalize()


@row("ddp", "with Join([model]):")
@row("horovod", "hvd.join()")
def uneven_loops(comm: Communicator) -> None:
    theirs, ours = DistributedDataParallel(plain_net()), plain_net()
    optimizer, inner = torchmn.create_multi_node_optimizer(sgd(ours), comm, ours), sgd(theirs)
    x, t = share(comm)

    def loop(model: nn.Module, used: torch.optim.Optimizer) -> None:
        for _ in range(1 + comm.rank):
            used.zero_grad()
            loss_of(model(x), t).backward()
            used.step()

    with Join([theirs], divide_by_initial_world_size=False):
        loop(theirs, inner)
    with optimizer.join():
        loop(ours, optimizer)
    first, second = comm.allgather(flat(ours))
    assert torch.equal(first, second)
    assert_close(comm.allgather(flat(theirs))[1], second)
    optimizer.close()


@row("ddp", "DistributedDataParallel(model, process_group=dist.new_group(ranks))")
@row("horovod", "hvd.add_process_set([0, 2])")
def some_ranks(comm: Communicator) -> None:
    groups = [dist.new_group([rank]) for rank in range(NUM_RANKS)]
    theirs, ours = (
        DistributedDataParallel(plain_net(), process_group=groups[comm.rank]),
        plain_net(),
    )
    own = comm.split(comm.rank, comm.rank)
    optimizer = torchmn.create_multi_node_optimizer(sgd(ours), own, ours)
    x, t = share(comm)
    for model in (theirs, ours):
        loss_of(model(x), t).backward()
    assert own.size == 1
    assert_close(theirs.module.last.weight.grad, ours.last.weight.grad)
    assert not torch.equal(*comm.allgather(ours.last.weight.grad))
    optimizer.close()
    own.finalize()


@row("ddp", 'init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))')
def meshes(comm: Communicator) -> None:
    theirs = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    grid = torchmn.Grid(comm, data=2, model=1)
    ours = grid.device_mesh()
    assert torch.equal(theirs.mesh, ours.mesh)
    assert theirs.get_coordinate() == ours.get_coordinate()
    assert ours.mesh_dim_names == theirs.mesh_dim_names
    grid.finalize()


# ---- DDP: values, saving, the end --------------------------------------------------------------


@row("ddp", "dist.all_reduce(x)")
@row("horovod", "hvd.allreduce(x)")
def sums(comm: Communicator) -> None:
    given, theirs = torch.tensor([comm.rank + 1.0]), torch.tensor([comm.rank + 1.0])
    dist.all_reduce(theirs)
    assert (comm.allreduce(given), comm.allreduce(given, "mean")) == (theirs, theirs / NUM_RANKS)
    assert given == comm.rank + 1
    assert comm.sum_over_ranks(0.5, comm.rank) == (1.0, 1)


@row("ddp", "dist.all_gather(xs, x)")
@row("horovod", "hvd.allgather(x)")
def gathered(comm: Communicator) -> None:
    x = torch.tensor([float(comm.rank)])
    theirs = [torch.empty(1) for _ in range(NUM_RANKS)]
    dist.all_gather(theirs, x)
    assert list(comm.allgather(x)) == theirs
    at_root = comm.gather(x)
    assert at_root == tuple(theirs) if comm.rank == 0 else at_root is None
    assert torch.cat(comm.allgather(torch.ones(comm.rank + 1))).shape == (3,)


@row("ddp", "dist.all_gather_object(values, value)")
def objects(comm: Communicator) -> None:
    value = {"rank": comm.rank}
    theirs: list[object] = [None] * NUM_RANKS
    dist.all_gather_object(theirs, value)
    assert comm.allgather_obj(value) == theirs
    assert comm.bcast_obj(value) == theirs[0]


@row("ddp", "dist.broadcast(x, 0)")
def broadcast(comm: Communicator) -> None:
    theirs = torch.tensor([comm.rank + 1.0])
    ours = comm.bcast(theirs.clone())
    dist.broadcast(theirs, 0)
    assert torch.equal(ours, theirs)


@row("ddp", "if rank == 0: torch.save(model.module.state_dict(), file)")
@row("horovod", "if hvd.rank() == 0: torch.save(...)")
def saving(comm: Communicator) -> None:
    file, model = Path(f"{sys.argv[2]}.state"), Net()
    optimizer = torchmn.create_multi_node_optimizer(sgd(model), comm, model)
    if comm.rank == 0:
        torch.save(model.state_dict(), file)
    comm.barrier()
    DistributedDataParallel(copy.deepcopy(model)).module.load_state_dict(torch.load(file))
    optimizer.close()


@row("ddp", "dist.destroy_process_group()")
@row("horovod", "hvd.shutdown()")
def the_end(comm: Communicator) -> None:
    own = torchmn.create_communicator()
    own.finalize()
    assert dist.is_initialized()
    assert comm.allreduce_obj(1) == NUM_RANKS


# ---- Horovod: what it has and DDP has not --------------------------------------------------------


@row("horovod", "horovodrun -np 4 -H a:2,b:2 python train.py")
def command_line(comm: Communicator) -> None:
    options = RunOptions(argv=("python", "train.py"), num_ranks=4, hosts="a:2,b:2", backend="gloo")
    job, _ = plan_job(options, dict(os.environ))
    assert (job.num_ranks, [str(host) for host in job.hosts]) == (4, ["a:2", "b:2"])


@row("horovod", "hvd.elastic.run")
def elastic_command_line(comm: Communicator) -> None:
    options = RunOptions(
        argv=("python", "train.py"), elastic="1:2", hosts="a:2,b:2", backend="gloo"
    )
    job, _ = plan_job(options, dict(os.environ))
    assert job.limits is not None
    assert (job.limits.min_hosts, job.limits.max_hosts) == (1, 2)


@row("horovod", "horovod.run(train, np=2)", "HOROVOD_TIMELINE", "op=hvd.Adasum")
def is_there_or_not(comm: Communicator) -> None:
    """What it does has tests of its own: of notebooks, and of records."""
    assert callable(torchmn.launch_local)
    assert callable(torchmn.record.trace)
    assert not [name for name in dir(torchmn) if "adasum" in name.lower()]


@row("horovod", "hvd.init()")
def init(comm: Communicator) -> None:
    assert isinstance(comm, torchmn.Communicator)
    assert comm.size == NUM_RANKS


@row("horovod", "hvd.local_rank()")
def places(comm: Communicator) -> None:
    assert (comm.intra_rank, comm.intra_size) == (comm.rank, NUM_RANKS)
    assert (comm.inter_rank, comm.inter_size) == (0, 1)


@row("horovod", "hvd.broadcast_parameters(model.state_dict(), root_rank=0)")
def parameters_of_rank_0(comm: Communicator) -> None:
    model = nn.BatchNorm1d(2)
    nn.init.constant_(model.weight, comm.rank + 5)
    model.running_mean.fill_(comm.rank)
    torchmn.create_multi_node_optimizer(sgd(model), comm, model).close()
    assert (model.weight == 5).all()
    assert (model.running_mean == 0).all()
    nn.init.constant_(model.weight, comm.rank + 6)
    comm.bcast_data(model)
    assert (model.weight == 6).all()


@row("horovod", "hvd.broadcast_optimizer_state(optimizer, root_rank=0)")
def state_of_rank_0(comm: Communicator) -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.Adam(model.parameters())
    (model(torch.full((1, 2), comm.rank + 1.0)).sum()).backward()
    inner.step()
    torchmn.create_multi_node_optimizer(inner, comm, model).close()
    averages = comm.allgather(inner.state[model.weight]["exp_avg"])
    assert torch.equal(*averages)
    torch.testing.assert_close(averages[0], torch.full((1, 2), 0.1))


@row("horovod", "op=hvd.Sum")
def sum_of_losses(comm: Communicator) -> None:
    ours, whole = plain_net(), plain_net()
    optimizer = torchmn.create_multi_node_optimizer(sgd(ours), comm, ours, reduction="sum")
    nn.functional.cross_entropy(ours(share(comm)[0]), share(comm)[1], reduction="sum").backward()
    x, t = samples().tensors
    nn.functional.cross_entropy(whole(x), t, reduction="sum").backward()
    assert_close(ours.last.weight.grad, whole.last.weight.grad)
    optimizer.close()


@row("horovod", "hvd.broadcast(x, root_rank=0)")
def values_of_rank_0(comm: Communicator) -> None:
    assert comm.bcast(torch.tensor([comm.rank])) == 0
    assert comm.bcast_obj({"lr": comm.rank}) == {"lr": 0}


@row("horovod", "hvd.alltoall(x)")
def exchanged(comm: Communicator) -> None:
    xs = [torch.tensor([10.0 * comm.rank + i]) for i in range(NUM_RANKS)]
    assert [int(x) for x in comm.alltoall(xs)] == [comm.rank, 10 + comm.rank]
    assert comm.reduce_scatter(xs) == 10 + 2 * comm.rank


@row("horovod", "hvd.barrier()", "a stall inspector that warns")
def waiting(comm: Communicator) -> None:
    comm.barrier()
    hasty = torchmn.create_communicator("naive", timeout_s=torchmn.Timeout(0.2, 0.2, 20))
    hasty.flight_recorder.has_stepped = True
    if comm.rank == 0:
        with pytest.raises(torchmn.errors.CommunicationError, match="rank 0 of 2"):
            hasty.barrier()
    comm.barrier()


def failure_of(function: Row, comm: Communicator) -> str:
    try:
        function(comm)
    except Exception:
        return traceback.format_exc()
    return ""


def main(rank: int, num_ranks: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    comm = torchmn.create_communicator()
    outcomes: dict[str, dict[str, str]] = {page: {} for page in ROWS}
    done: dict[Row, str] = {}
    for page, rows in ROWS.items():
        for cell, function in rows.items():
            if function not in done:
                failures = comm.allgather_obj(failure_of(function, comm))
                done[function] = "\n".join(filter(None, failures)) or "ok"
            outcomes[page][cell] = done[function]
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(outcomes))
    comm.finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(NUM_RANKS,), nprocs=NUM_RANKS)
