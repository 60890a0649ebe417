"""Models sharded among the ranks of an island, exchanged between two islands; run by torchmn run.

Each case is written once, for a `Side`: four ranks of a grid, or one process on the whole batch.
"""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchmn
from torchmn.checkpoint.parts import nowhere, place_parts
from torchmn.comm.local_tensors import with_parts

NUM_STEPS = 4
_GENERATOR = threading.Lock()
Result = dict[str, Any]
State = dict[str, Tensor]


class Net(nn.Module):
    """Odd sizes: shards of different sizes, and one that is empty on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.narrow = nn.Linear(9, 1)
        self.last = nn.Linear(1, 3)
        self.skip = nn.Linear(9, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(self.narrow(hidden)) + self.skip(hidden)


class Pair(nn.Module):
    """Even sizes, for tensor parallelism; the norm is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 12)
        self.down = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Side:
    """One process with the whole model and the whole batch."""

    def model(self, kind: Callable[[], nn.Module] = Net, **_: Any) -> nn.Module:
        torch.manual_seed(0)
        return kind()

    def optimizer(self, inner: Any, model: nn.Module, **_: Any) -> Any:
        inner.no_sync = contextlib.nullcontext
        inner.flush = inner.close = lambda: None
        return inner

    def part(self, x: Tensor) -> Tensor:
        return x

    def whole(self, model: nn.Module) -> State:
        """The parameters of the whole model."""
        return {name: p.detach().clone() for name, p in model.named_parameters()}


class OnGrid(Side):
    """Ranks of a grid: shards inside of an island, replicas between islands."""

    num_samples = 2

    def __init__(self, grid: torchmn.Grid) -> None:
        self.grid, self.replicas = grid, grid.data

    def model(self, kind: Callable[[], nn.Module] = Net, how: str = "fsdp", **options: Any) -> Any:
        torch.manual_seed(self.grid.coordinates["data"])  # island 0 gives its model to the others
        model = kind()
        mesh = self.grid.device_mesh("model")
        if how == "tensor":
            split_layers(model, mesh)
        elif how == "both":
            mesh = self.grid.device_mesh("fsdp", "model")
            split_layers(model, mesh["model"])
            shard(model, mesh["fsdp"])
        elif how == "body":
            shard(model.body, mesh)
        else:
            shard(model, mesh, **options)
        return model

    def optimizer(self, inner: Any, model: nn.Module, **options: Any) -> Any:
        return torchmn.create_multi_node_optimizer(inner, self.grid.data, model, **options)

    def part(self, x: Tensor) -> Tensor:
        comm = self.grid.comm
        return x.tensor_split(comm.size)[comm.rank]

    def whole(self, model: nn.Module) -> State:
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        return {name: full(p) for name, p in model.named_parameters()}


class AsIsland(Side):
    """A rank that is an island by itself."""

    num_samples = 4  # in a step

    def __init__(self, comm: torchmn.Communicator) -> None:
        self.replicas = comm

    def model(self, kind: Callable[[], nn.Module] = Net, **options: Any) -> nn.Module:
        with _GENERATOR:  # which threads share
            return super().model(kind, **options)

    def optimizer(self, inner: Any, model: nn.Module, **options: Any) -> Any:
        return torchmn.create_multi_node_optimizer(inner, self.replicas, model, **options)

    def part(self, x: Tensor) -> Tensor:
        return x.tensor_split(self.replicas.size)[self.replicas.rank]


class InPairs(OnGrid):
    """As `OnGrid`, where the ranks of an island see the same samples."""

    def part(self, x: Tensor) -> Tensor:
        return x.tensor_split(self.grid.data.size)[self.grid.data.rank]


def full(p: Tensor) -> Tensor:
    whole: Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p
    return whole.detach().clone()


def shard(model: nn.Module, mesh: Any, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for module in list(model.children())[:-1]:
        fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def split_layers(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 7, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def loss_of(side: Side, model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return nn.functional.cross_entropy(model(side.part(x)), side.part(y))


def adam(model: nn.Module) -> Any:
    return torch.optim.Adam(model.parameters(), 0.05)


def steps(
    side: Side, model: nn.Module, optimizer: Any, num: int = NUM_STEPS, first: int = 0
) -> Iterator[tuple[int, State]]:
    """Ordinary steps, with the parameters after each."""
    for step in range(first, first + num):
        optimizer.zero_grad()
        loss_of(side, model, step).backward()
        optimizer.step()
        yield step, side.whole(model)


# ---- cases that equal one process ----


def plain(side: Side) -> Result:
    model = side.model()
    optimizer = side.optimizer(adam(model), model)
    states = [side.whole(model), *(state for _, state in steps(side, model, optimizer))]
    optimizer.close()
    return {"states": states}


def tensor_parallel(side: Side) -> Result:
    """Columns and rows over the ranks of an island, and a norm that is whole on each."""
    model = side.model(Pair, how="tensor")
    optimizer = side.optimizer(adam(model), model)
    return {"states": [state for _, state in steps(side, model, optimizer)]}


def clipped(side: Side) -> Result:
    """By torch's function between backward and step, and by ours."""
    states = []
    for ours in (False, True):
        model = side.model()
        optimizer = side.optimizer(
            torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), model,
            **({"max_grad_norm": 0.05} if ours else {}),
        )  # fmt: skip
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            loss_of(side, model, step).backward()
            if not ours or type(side) is Side:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                if not ours:
                    states.append({"norm": full(norm)})
            optimizer.step()
            states.append(side.whole(model))
        optimizer.close()
    return {"states": states}


def accumulated(side: Side) -> Result:
    """Passes under no_sync(), then under torch's own switch; a scheduler."""
    states = []
    for ours in (True, False):
        model = side.model()
        optimizer = side.optimizer(adam(model), model)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            with optimizer.no_sync() if ours else contextlib.nullcontext():
                if not ours and hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(False)
                loss_of(side, model, 100 + step).backward()
            if not ours and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(True)
            loss_of(side, model, step).backward()
            optimizer.step()
            rates.step()
            states.append(side.whole(model))
        optimizer.close()
    return {"states": states}


def evaluated(side: Side) -> Result:
    """A forward without backward between steps leaves the last layers whole; two passes."""
    model = side.model()
    optimizer = side.optimizer(adam(model), model)
    states = []
    for step, state in steps(side, model, optimizer):
        with torch.no_grad():
            model(side.part(batch(step)[0]))
        states.append(state)
        if step == 1:
            optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.zero_grad()
        loss_of(side, model, 50).backward()
        loss_of(side, model, 51).backward()
        optimizer.step()
    return {"states": [*states, side.whole(model)]}


def parts_unused(side: Side) -> Result:
    """A layer that no loss reaches in some steps, one that is frozen, and one thawed later."""
    model = side.model()
    model.narrow.weight.requires_grad_(False)
    optimizer = side.optimizer(adam(model), model)
    states = []
    for step in range(NUM_STEPS):
        if step == 3:
            model.narrow.weight.requires_grad_(True)
        optimizer.zero_grad()
        x, y = batch(step)
        output = model(side.part(x))
        if step % 2:
            output = model.skip(torch.tanh(model.first(side.part(x))))
        nn.functional.cross_entropy(output, side.part(y)).backward()
        optimizer.step()
        states.append(side.whole(model))
    return {"states": states}


def scaled(side: Side) -> Result:
    """A GradScaler, which skips a step of infinite gradients on one rank, on all."""
    model = side.model()
    optimizer = side.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    states = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(side, model, step)
        if step == 2 and (type(side) is Side or side.part(torch.arange(4))[0] == 3):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        states.append(side.whole(model))
    return {"states": states}


class Body(nn.Module):
    """A part that is sharded, and a head that is not: its gradients come first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def plain_head(side: Side) -> Result:
    """The end of backward must be after what `fully_shard` reduces there."""
    model = side.model(Body, how="body")
    optimizer = side.optimizer(adam(model), model)
    states = [state for _, state in steps(side, model, optimizer)]
    if isinstance(side, OnGrid):  # what comes later would be exchanged in a second pass
        assert optimizer.reducer.num_passes == NUM_STEPS
    optimizer.close()
    return {"states": states}


def both_kinds(side: Side) -> Result:
    """Columns and rows over two ranks, and each part of these sharded over two more."""
    model = side.model(Pair, how="both")
    optimizer = side.optimizer(adam(model), model)
    states = [state for _, state in steps(side, model, optimizer)]
    optimizer.close()
    if isinstance(side, OnGrid):
        for name, p in model.named_parameters():
            parts = side.grid.comm.allgather_obj(with_parts(p))
            found = place_parts(parts[0], nowhere, parts, name)
            assert torch.equal(found, states[-1][name]), name
    return {"states": states}


def uneven(side: Side) -> Result:
    """Batches of 3, 2, 2 and 1 samples; islands of 5 and 3 count by their samples."""
    model = side.model()
    optimizer = side.optimizer(torch.optim.SGD(model.parameters(), 0.1), model, weight="samples")
    states = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        if type(side) is Side:  # inside of an island the mean is over ranks, as fully_shard's is
            bounds = ((0, 3), (3, 5)), ((5, 7), (7, 8))
            loss = sum(
                weight * sum(nn.functional.cross_entropy(model(x[a:b]), y[a:b]) for a, b in island)
                for island, weight in zip(bounds, (5 / 16, 3 / 16), strict=True)
            )
        else:
            a, b = ((0, 3), (3, 5), (5, 7), (7, 8))[side.grid.comm.rank]  # type: ignore[attr-defined]
            loss = nn.functional.cross_entropy(model(x[a:b]), y[a:b])
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        states.append(side.whole(model))
    return {"states": states}


def joined(side: Side) -> Result:
    """One island has a batch more than the other, and takes the last step alone."""
    model = side.model()
    optimizer = side.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    is_whole = type(side) is Side
    num_steps = NUM_STEPS if is_whole else NUM_STEPS - 1 + side.replicas.rank  # type: ignore[attr-defined]
    with contextlib.nullcontext() if is_whole else optimizer.join():
        for step in range(num_steps):
            optimizer.zero_grad()
            x, y = batch(step)
            if is_whole and step == NUM_STEPS - 1:
                x, y = x[len(x) // 2 :], y[len(y) // 2 :]
            elif not is_whole:
                x, y = side.part(x), side.part(y)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {"states": [side.whole(model)]}


def unfrozen(side: Side) -> Result:
    """`add_param_group` in the middle, as for layers that are unfrozen."""
    model = side.model()
    first = list(model.first.parameters())
    others = [p for p in model.parameters() if all(p is not each for each in first)]
    for p in first:
        p.requires_grad_(False)
    optimizer = side.optimizer(torch.optim.Adam(others, 0.01), model)
    states = []
    for step, state in steps(side, model, optimizer):
        states.append(state)
        if step == 1:
            for p in first:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": first, "lr": 0.02})
    return {"states": states}


EQUAL: dict[str, Callable[[Side], Result]] = {
    case.__name__: case
    for case in (
        plain, tensor_parallel, clipped, accumulated, evaluated, parts_unused, scaled, plain_head,
        both_kinds, uneven, joined, unfrozen,
    )
}  # fmt: skip
# Cases in which the ranks of an island see the same samples.
IN_PAIRS = ("tensor_parallel", "plain_head")


# ---- cases that keep the contract of their schedule or codec ----


def island_losses(
    side: OnGrid | AsIsland, schedule: Any, codec: str | None, **options: Any
) -> Result:
    """Trains; the loss before and after, and the parameters where replicas must be equal."""
    model = side.model()
    optimizer = side.optimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model,
        schedule=schedule, codec=codec, **options,
    )  # fmt: skip

    def loss() -> float:
        with torch.no_grad():
            x, y = batch(1000, 64)
            return float(nn.functional.cross_entropy(model(x), y))

    before, states = loss(), []
    for step in range(16):
        optimizer.zero_grad()
        loss_of(side, model, step).backward()
        optimizer.step()
        if optimizer.schedule.traits.replica_consistency == "per_step" and step % 8 == 5:
            states.append(side.whole(model))
    optimizer.flush()
    states.append(side.whole(model))
    check = torchmn.ReplicaCheck(side.replicas, model, every=1, optimizer=optimizer)
    check.step_ended()
    after = loss()
    optimizer.close()
    return {"before": before, "after": after, "states": states}


def blocks(side: OnGrid | AsIsland, name: str, **options: Any) -> Any:
    """Blocks of four steps."""
    kind = {
        "diloco": torchmn.schedules.DiLoCo,
        "block_momentum": torchmn.schedules.BlockMomentum,
        "periodic_average": torchmn.schedules.PeriodicAverage,
    }[name]
    return kind(4 * 2 * side.num_samples, **options)


COMPRESSED: dict[str, Callable[[Any], Result]] = {
    "int8": lambda side: island_losses(side, None, "int8"),
    "1bit": lambda side: island_losses(side, None, "1bit"),
    "power_sgd": lambda side: island_losses(side, None, "power_sgd"),
    "1bit_blocks": lambda side: island_losses(side, blocks(side, "periodic_average"), "1bit"),
}
UNCOMPRESSED: dict[str, Callable[[Any], Result]] = {
    "double_buffering": lambda side: island_losses(side, "double_buffering", None),
    "views": lambda side: island_losses(side, None, None, gradient_as_bucket_view=True),
    "diloco": lambda side: island_losses(side, blocks(side, "diloco"), None),
    "diloco_overlapped": lambda side: island_losses(
        side, blocks(side, "diloco", overlap_steps=1, num_fragments=2), None
    ),
    "block_momentum": lambda side: island_losses(side, blocks(side, "block_momentum"), None),
}


# ---- compared with torch's own replicate axis ----


def beside_hsdp(side: OnGrid) -> Result:
    """Computation in bfloat16, clipped and compiled: torchmn between islands, and torch's HSDP."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    result: Result = {}
    for name, axes in (("torchmn", ["model"]), ("hsdp", ["data", "model"])):
        torch.manual_seed(0)
        model = Net()
        shard(model, side.grid.device_mesh(*axes), mp_policy=policy)
        run = torch.compile(model, backend="eager")
        inner = optimizer = adam(model)
        if name == "torchmn":
            optimizer = side.optimizer(inner, model)
        states = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            x, y = (side.part(each) for each in batch(step))
            nn.functional.cross_entropy(run(x).float(), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            states.append(side.whole(model))
        result[name] = states
    return result


BESIDE: dict[str, Callable[[OnGrid], Result]] = {"beside_hsdp": beside_hsdp}


# ---- cases that go wrong ----


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except torchmn.TorchmnError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def mistakes(side: OnGrid) -> Result:
    model = side.model()
    make = torchmn.create_multi_node_optimizer
    grid = side.grid
    return {
        "all ranks": error_of(lambda: make(adam(model), grid.comm, model)),
        "server": error_of(
            lambda: make(adam(model), grid.data, model, schedule="parameter_server")
        ),
        "bcast_data": error_of(lambda: grid.comm.bcast_data(model)),
    }


def uneven_inside(side: OnGrid) -> Result:
    """Ranks of one island with batches of other sizes: a warning, whose cure gives the mean."""
    sizes = ((0, 3), (3, 5), (5, 7), (7, 8))
    a, b = sizes[side.grid.comm.rank]
    average = (5 if side.grid.data.rank == 0 else 3) / 2
    result: Result = {}
    for name, is_cured in (("plain", False), ("cured", True)):
        model = side.model()
        optimizer = side.optimizer(
            torch.optim.SGD(model.parameters(), 0.1), model, weight="samples"
        )
        states = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(NUM_STEPS):
                optimizer.zero_grad()
                x, y = batch(step)
                loss = nn.functional.cross_entropy(model(x[a:b]), y[a:b])
                if is_cured:
                    optimizer.set_weight(average)
                    loss = loss * (b - a) / average
                loss.backward()
                optimizer.step()
                states.append(side.whole(model))
        texts = [str(w.message) for w in caught if "fully_shard weights them" in str(w.message)]
        result |= {name: texts, f"states {name}": states}
        optimizer.close()
    return result


def too_early(side: OnGrid) -> Result:
    """Broken on purpose: one exchange, before `fully_shard` has reduced what it reduces last."""
    from torchmn.exchange import reducer
    from torchmn.exchange.sharded_parameters import whole_of

    right_end, right_take = reducer.AtEnd, reducer.GradientReducer._on_gradient
    num_exchanged = 0

    def take(self: Any, index: int) -> None:
        nonlocal num_exchanged
        if whole_of(self._watched[index]) is model.head.bias:  # the first of a pass
            num_exchanged = self.num_passes
        if self.num_passes == num_exchanged:
            right_take(self, index)

    reducer.AtEnd = lambda method, is_last: right_end(method)  # type: ignore[assignment, misc]
    reducer.GradientReducer._on_gradient = take  # type: ignore[method-assign]
    try:
        pairs = InPairs(side.grid)
        model = pairs.model(Body, how="body")
        optimizer = pairs.optimizer(adam(model), model)
        states = [state for _, state in steps(pairs, model, optimizer)]
        optimizer.close()
    finally:
        reducer.AtEnd = right_end  # type: ignore[misc]
        reducer.GradientReducer._on_gradient = right_take  # type: ignore[method-assign]
    return {"states": states}


def torn(side: OnGrid) -> Result:
    """A gradient that is not finite in one part of the model ends the step on all ranks."""
    model = side.model()
    optimizer = side.optimizer(adam(model), model)
    loss_of(side, model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.skip.weight.register_hook(lambda grad: grad)
    loss_of(side, model, 1).backward()
    if side.grid.comm.rank == 2:
        part = model.first.weight.grad._local_tensor
        part.fill_(float("nan"))
    optimizer.reducer.exchange_now()
    return {"error": error_of(optimizer.step)}


WRONG: dict[str, Callable[[OnGrid], Result]] = {
    "mistakes": mistakes,
    "uneven_inside": uneven_inside,
    "too_early": too_early,
    "torn": torn,
}


# ---- checkpoints ----


def resumed(comm: Any, folder: Path) -> Result:
    """Saved on a grid of 2 x 2 after two steps, continued on other grids."""
    kinds = {
        "2x2": (2, 2, "fsdp"), "1x4": (1, 4, "fsdp"), "4x1": (4, 1, "whole"),
    }  # fmt: skip
    states: dict[str, State] = {}
    for name, (data, size, how) in [("saved", kinds["2x2"]), *kinds.items()]:
        grid = torchmn.Grid(comm, data=data, model=size)
        side = OnGrid(grid)
        model = side.model() if how == "fsdp" else Side().model()
        optimizer = side.optimizer(adam(model), model)
        checkpointer = torchmn.create_multi_node_checkpointer(grid, folder, "run")
        state = {"model": model, "optimizer": optimizer}
        if name == "saved":
            for _ in steps(side, model, optimizer, 2):
                pass
            checkpointer.save(2, state)
            checkpointer.finish()
            checkpointer.export_dcp(folder / "dcp")
        else:
            assert checkpointer.resume(state) == 2
            for _, after in steps(side, model, optimizer, 2, first=2):
                states[name] = after
        checkpointer.close()
        optimizer.close()
        grid.finalize()
    states["dcp"] = through_dcp(comm, folder)
    return {"states": states}


def through_dcp(comm: Any, folder: Path) -> State:
    """Our export, loaded by torch into shards of four; saved by torch, loaded by it into two."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    grid = torchmn.Grid(comm, data=1, model=4)
    side = OnGrid(grid)
    model = side.model()
    optimizer = side.optimizer(adam(model), model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = {"model": model.state_dict()}
        dcp.load(exported, checkpoint_id=str(folder / "dcp"), no_dist=True)
        model.load_state_dict(exported["model"])
        checkpointer = torchmn.create_multi_node_checkpointer(grid, folder, "run", read_only=True)
        checkpointer.resume({"optimizer": optimizer})
        saved = get_state_dict(model, optimizer.inner)
        dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=str(folder / "torch"))
        optimizer.close()
        grid.finalize()
        grid = torchmn.Grid(comm, data=2, model=2)
        side = OnGrid(grid)
        model = side.model()
        optimizer = side.optimizer(adam(model), model)
        names = get_state_dict(model, optimizer.inner)
        wanted = {"model": names[0], "optimizer": names[1]}
        dcp.load(wanted, checkpoint_id=str(folder / "torch"))
        set_state_dict(
            model, optimizer.inner,
            model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"],
        )  # fmt: skip
    after = {}
    for _, state in steps(side, model, optimizer, 2, first=2):
        after = state
    optimizer.close()
    grid.finalize()
    return after


def main(folder: str, *names: str) -> None:
    comm = torchmn.create_communicator("flat")
    for name in names:
        print(name, flush=True)
        if name == "resumed":
            result = resumed(comm, Path(folder))
        elif name == "both_kinds":
            grid = torchmn.Grid(comm, data=1, fsdp=2, model=2)
            result = both_kinds(InPairs(grid))
            grid.finalize()
        else:
            grid = torchmn.Grid(comm, data=-1, model=2)
            side = InPairs(grid) if name in IN_PAIRS else OnGrid(grid)
            result = {**EQUAL, **COMPRESSED, **UNCOMPRESSED, **BESIDE, **WRONG}[name](side)  # type: ignore[arg-type]
            grid.finalize()
        torch.save(result, Path(folder) / f"{name}.rank{comm.rank}")
    comm.finalize()


if __name__ == "__main__":
    main(*sys.argv[1:])
