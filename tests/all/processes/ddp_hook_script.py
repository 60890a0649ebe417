"""Run by test_ddp_hook.py on three ranks: every check of the hook, with real DDP models on gloo.

Arguments: rank, size, port of the store, file of the outcomes. Each check says "ok" or why not.
"""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from torchmn import create_communicator, create_multi_node_optimizer
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.comm.codecs import CODECS, ErrorFeedback, Float16, PowerSGD, Quantized
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.errors import PeerLostError, RankMismatchError, UsageError
from torchmn.exchange.optimizer import ddp_hook

NUM_STEPS = 4
MANY_BUCKETS = 0.008  # MiB: about one matrix each
ONE_BUCKET = 25.0


class Net(nn.Module):
    """Parameters large enough to be encoded, used in another order than they are registered."""

    def __init__(self, *, has_branch: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.last = nn.Linear(64, 40)
        self.first = nn.Linear(50, 130)
        self.middle = nn.Linear(130, 64)
        self.branch = nn.Linear(64, 40) if has_branch else None
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)

    def forward(self, x: Tensor, takes_branch: bool = False) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))))
        if takes_branch and self.branch is not None:
            return self.last(hidden) + self.branch(hidden)
        return self.last(hidden)


class Chain(nn.Module):
    """Gradients arrive in the order of registration: DDP's new buckets are as the old ones."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        sizes = [(64, 40), (130, 64), (50, 130)]
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in sizes)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 50, generator=generator)


def loss_of(model: nn.Module, x: Tensor, *more: bool) -> Tensor:
    return model(x, *more).pow(2).mean()


def local_gradients(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(model, batch(rank, step)), list(model.parameters())))


class World:
    """The first ``size`` ranks: a process group for DDP and a communicator for the reference."""

    def __init__(self, group: dist.ProcessGroup, comm: Communicator) -> None:
        self.group, self.comm = group, comm
        self.rank, self.size = comm.rank, comm.size
        self._hooks = []

    def ddp(self, model: nn.Module, codec: object, *, comm=None, timeout_s=20, **options: object):
        options.setdefault("bucket_cap_mb", ONE_BUCKET)
        wrapped = DistributedDataParallel(model, process_group=self.group, **options)
        hook = ddp_hook(codec, comm=comm, timeout_s=timeout_s)
        assert hook.register(wrapped) is hook
        self._hooks.append(hook)
        return wrapped, hook

    def close(self) -> None:
        for hook in self._hooks:
            hook.close()
        self._hooks.clear()

    def require_replicas(self, model: nn.Module) -> None:
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        for other in self.comm.allgather(flat):
            assert torch.equal(other, flat), "ranks hold different bits"


def nearness(codec: str) -> float:
    """How far a first mean may be off, beside the largest gradient in it."""
    known = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3, "int8": 0.02, "int4": 0.3}
    return known.get(codec, 9)


def as_every_step(world: World, codec: str) -> None:
    """The bits of torchmn's own exchange, in one bucket of the same order."""
    mine, theirs = Chain(), Chain()
    wrapped, _ = world.ddp(mine, codec)
    own = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
    reference = create_multi_node_optimizer(
        torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9), world.comm, theirs, codec=codec
    )
    for step in range(NUM_STEPS):
        own.zero_grad()
        reference.zero_grad()
        truth = [local_gradients(mine, rank, step) for rank in range(world.size)]
        loss_of(wrapped, batch(world.rank, step)).backward()
        loss_of(theirs, batch(world.rank, step)).backward()
        for a, b, *parts in zip(mine.parameters(), theirs.parameters(), *truth, strict=True):
            is_exact = codec != "float32" or world.size == 2  # a ring adds in another order
            assert torch.equal(a.grad, b.grad) if is_exact else torch.allclose(a.grad, b.grad), (
                f"step {step} differs from every_step"
            )
            error = (a.grad - sum(parts) / world.size).abs().max()
            largest = max(part.abs().max() for part in parts)
            assert step or error <= nearness(codec) * largest, (float(error), largest)
        own.step()
        reference.step()
    world.require_replicas(mine)


def residuals_through_new_buckets(world: World, codec: object, **options: object) -> None:
    """What was returned and the residuals of all ranks are the sum of the true means."""
    model = Net()
    wrapped, hook = world.ddp(model, codec, bucket_cap_mb=MANY_BUCKETS, **options)
    names = [name for name, _ in model.named_parameters()]
    returned = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    true = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    seen = []
    for step in range(NUM_STEPS):
        wrapped.zero_grad()
        for rank in range(world.size):
            for name, part in zip(names, local_gradients(model, rank, step), strict=True):
                true[name] += part / world.size
        loss_of(wrapped, batch(world.rank, step)).backward()
        seen.append(list(hook._layouts))
        for name, parameter in model.named_parameters():
            returned[name] += parameter.grad
    assert len(seen[0]) == 1, seen[0]
    assert len(seen[-1]) > 1, f"DDP did not build its buckets again: {seen[-1]}"
    residuals = {name: torch.zeros(p.numel()) for name, p in model.named_parameters()}
    for state in world.comm.allgather_obj(hook.state_dict()):
        for entry in state["state"]["residuals"]:
            first = entry["offset"]
            residuals[entry["name"]][first : first + len(entry["values"])] += entry["values"]
    assert any(values.any() for values in residuals.values()), "no residual: a test of nothing"
    for name in names:
        total = returned[name] + residuals[name].view(returned[name].shape)
        assert torch.allclose(total, true[name], atol=2e-6, rtol=1e-4), (
            f"{name} is off by {float((total - true[name]).abs().max())}"
        )


def nan_leaves_no_trace(world: World, codec: object) -> None:
    model = Net()
    wrapped, hook = world.ddp(model, codec, bucket_cap_mb=MANY_BUCKETS)
    for step in range(NUM_STEPS):
        before = hook.state_dict()
        wrapped.zero_grad()
        loss = loss_of(wrapped, batch(world.rank, step))
        if step == 2 and world.rank == 1:
            handle = model.middle.weight.register_hook(lambda g: g.index_fill(0, ZERO, NAN))
        loss.backward()
        if step == 2:
            if world.rank == 1:
                handle.remove()
            assert not model.middle.weight.grad.isfinite().all(), "NaN did not reach this rank"
            assert same(before, hook.state_dict()), "residuals changed"
        else:
            assert all(p.grad.isfinite().all() for p in model.parameters())
            assert not same(before, hook.state_dict()), "a test of nothing"
    assert [(n.step, n.in_sum) for n in hook.nonfinite] == [(2, ["middle.weight"])]
    assert world.comm.allgather_obj(hook.nonfinite[0].by_rank) == [hook.nonfinite[0].by_rank] * 2


ZERO, NAN = torch.tensor([0]), float("nan")


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):

        def key(entry: object) -> str:
            keys = ("side", "name", "offset")
            return str([entry[k] for k in keys]) if isinstance(entry, dict) else ""

        a, b = sorted(a, key=key), sorted(b, key=key)
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def unused_parameters(world: World) -> None:
    """A branch that only rank 0 takes, then no rank."""
    model = Net(has_branch=True)
    wrapped, _ = world.ddp(model, "int8", find_unused_parameters=True, bucket_cap_mb=MANY_BUCKETS)
    sgd = torch.optim.SGD(wrapped.parameters(), 0.1)
    for step in range(NUM_STEPS):
        sgd.zero_grad()
        loss_of(wrapped, batch(world.rank, step), world.rank == 0 and step < 3).backward()
        assert (model.branch.weight.grad is None) == (step == 3)
        sgd.step()
    world.require_replicas(model)


def ranks_that_end_early(world: World) -> None:
    model = Net()
    wrapped, _ = world.ddp(model, "int8")
    sgd = torch.optim.SGD(wrapped.parameters(), 0.1)
    with wrapped.join():
        for step in range(2 + world.rank):
            sgd.zero_grad()
            loss_of(wrapped, batch(world.rank, step)).backward()
            sgd.step()
    world.require_replicas(model)


def resume(world: World, codec: str) -> None:
    """The bits of a run without a break, in which DDP keeps its buckets."""

    def train(first: int, last: int, model: nn.Module, state: object) -> tuple[list, object]:
        wrapped, hook = world.ddp(model, codec)
        if state is not None:
            hook.load_state_dict(state)
        sgd = torch.optim.SGD(wrapped.parameters(), 0.1)
        for step in range(first, last):
            sgd.zero_grad()
            loss_of(wrapped, batch(world.rank, step)).backward()
            sgd.step()
        return [p.detach().clone() for p in model.parameters()], hook.state_dict()

    whole, _ = train(0, 5, Chain(), None)
    model = Chain()
    _, state = train(0, 3, model, None)
    halves, _ = train(3, 5, model, state)
    for a, b in zip(whole, halves, strict=True):
        assert torch.equal(a, b), "resuming changed the bits"


class OddKinds(nn.Module):
    """Half precision, complex numbers and channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(40, 50, dtype=torch.bfloat16))
        self.complex = nn.Parameter(torch.ones(40, 50, dtype=torch.complex64))
        image = torch.ones(8, 16, 3, 3).contiguous(memory_format=torch.channels_last)
        self.image = nn.Parameter(image)

    def forward(self, rank: int) -> Tensor:
        """A sum whose gradients are random numbers of this rank."""
        total = torch.zeros(())
        for salt, parameter in enumerate(self.parameters()):
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            generator = torch.Generator().manual_seed(10 * rank + salt)
            total = total + (real * torch.randn(real.shape, generator=generator)).float().sum()
        return total


def odd_kinds(world: World) -> None:
    model, plain = OddKinds(), OddKinds()
    wrapped, _ = world.ddp(model, "int8")
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(world.rank).backward()
        parts = [torch.autograd.grad(plain(rank), list(plain.parameters())) for rank in (0, 1)]
        for parameter, a, b in zip(model.parameters(), *parts, strict=True):
            assert parameter.grad.dtype == parameter.dtype
            assert (parameter.grad - (a + b) / 2).abs().max() < 0.1


def over_a_route(world: World, topology: Topology) -> None:
    """Any communicator of the same ranks: here sums in two nodes, and int8 between them."""
    comm = reference_communicator("route", world.rank, world.size, "hierarchical", topology)
    model = Net()
    wrapped, hook = world.ddp(model, "int8", comm=comm)
    loss_of(wrapped, batch(world.rank, 0)).backward()
    parts = [local_gradients(Net(), rank, 0) for rank in range(world.size)]
    for parameter, column in zip(model.parameters(), zip(*parts, strict=True), strict=True):
        assert torch.allclose(parameter.grad, sum(column) / world.size, atol=1e-3)
    world.require_replicas(model)
    hook.close()
    comm.barrier()  # not the hook's own: it stays open
    comm.finalize()


def plain_registration(world: World) -> None:
    """torch's own way to give a hook, among all ranks; parameters have no names."""
    results = []
    for is_named in (True, False):
        model = Net()
        hook = ddp_hook("1bit", timeout_s=20)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=MANY_BUCKETS)
        if is_named:
            hook.register(wrapped)
        else:
            wrapped.register_comm_hook(None, hook)
        sgd = torch.optim.SGD(wrapped.parameters(), 0.1)
        for step in range(NUM_STEPS):
            sgd.zero_grad()
            loss_of(wrapped, batch(world.rank, step)).backward()
            sgd.step()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        if not is_named:
            with pytest.raises(UsageError, match="names of parameters"):
                hook.state_dict()
            other = DistributedDataParallel(Net())
            other.register_comm_hook(None, hook)
            with pytest.raises(UsageError, match="given to two models"):
                loss_of(other, batch(world.rank, 0)).backward()
        hook.close()
    assert torch.equal(*results)


def ranks_that_disagree(world: World) -> None:
    with pytest.raises(RankMismatchError, match=r"rank 0: int4\+residual, rank 1: int8\+residual"):
        world.ddp(Net(), "int8" if world.rank else "int4")


def a_peer_that_leaves(world: World) -> None:
    """The others get a message, in backward, and the process continues."""
    wrapped, hook = world.ddp(Net(), "1bit", bucket_cap_mb=MANY_BUCKETS)
    for step in range(2):
        loss_of(wrapped, batch(world.rank, step)).backward()
    if world.rank == 1:
        hook.close()
        return
    with pytest.raises(PeerLostError, match="peer closed"):
        loss_of(wrapped, batch(world.rank, 2)).backward()


def checks() -> dict[str, tuple[int, Callable[[World], None]]]:
    """Every check by name, with its number of ranks, in an order that is the same on all."""
    found: dict[str, tuple[int, Callable[[World], None]]] = {}
    for size in (2, 3):
        for codec in CODECS:
            found[f"as_every_step-{codec}-{size}"] = size, bound(as_every_step, codec)
        for codec in (ErrorFeedback(Quantized(bits=1)), ErrorFeedback(Float16()), PowerSGD(2)):
            found[f"residuals_through_new_buckets-{codec.name}-{size}"] = (
                size,
                bound(residuals_through_new_buckets, codec),
            )
    found["residuals_through_new_buckets-views"] = (
        2,
        lambda world: residuals_through_new_buckets(world, "int4", gradient_as_bucket_view=True),
    )
    for codec in ("1bit", "power_sgd"):
        found[f"nan_leaves_no_trace-{codec}"] = 2, bound(nan_leaves_no_trace, codec)
    found["unused_parameters"] = 2, unused_parameters
    found["ranks_that_end_early"] = 3, ranks_that_end_early
    for codec in ("int8", "power_sgd"):
        found[f"resume-{codec}"] = 2, bound(resume, codec)
    found["odd_kinds"] = 2, odd_kinds
    found["over_a_route"] = 3, lambda world: over_a_route(world, Topology.blocks([2, 1]))
    found["plain_registration"] = 3, plain_registration
    found["ranks_that_disagree"] = 2, ranks_that_disagree
    found["a_peer_that_leaves"] = 2, a_peer_that_leaves
    return found


def bound(check: Callable[[World, object], None], codec: object) -> Callable[[World], None]:
    return lambda world: check(world, codec)


def reference_communicator(
    label: str, rank: int, size: int, name: str = "flat", topology: Topology | None = None
) -> Communicator:
    store = PrefixStore(label, dist.distributed_c10d._get_default_store())
    return create_communicator(
        name,
        transport=TorchDistributedTransport(store, rank, size, timeout_s=20),
        topology=topology or Topology(("localhost",) * size),
    )


def main() -> None:
    rank, size, port = (int(text) for text in sys.argv[1:4])
    wanted = sys.argv[5:]
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    groups = {2: dist.new_group([0, 1]), 3: dist.group.WORLD}
    worlds = {
        n: World(group, reference_communicator(f"reference{n}", rank, n))
        for n, group in groups.items()
        if rank < n
    }
    outcomes: dict[str, str] = {}
    for name, (num_ranks, check) in checks().items():
        if rank >= num_ranks or (wanted and name not in wanted):
            continue
        try:
            check(worlds[num_ranks])
            outcomes[name] = "ok"
        except Exception:
            outcomes[name] = traceback.format_exc()
        finally:
            worlds[num_ranks].close()
    Path(sys.argv[4]).write_text(json.dumps(outcomes))
    dist.barrier()  # rank 0's connections are the others'
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
