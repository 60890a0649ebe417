"""FSDP2 inside of two islands, and what exchanges gradients between them at 1 Gb/s.

    bench_sharded.py [--units N] [--rate 1gbit]

Two test hosts (needs root) of two ranks each; a transformer is sharded over the ranks of a host.
Sides: FSDP2 without any exchange between the hosts, HSDP (torch's own replicate axis, on gloo) and
torchmn's optimizer with several codecs and schedules. All are in the same processes, on the same
groups, and take turns. A figure is samples per second over a turn.

Memory is counted when backward has ended: the bytes of all memory in which parameters, gradients,
states of the optimizer and torchmn's buckets lie, each byte once. What codecs and schedules keep
besides (residuals, anchors) is a figure of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

SIDES = ("fsdp2", "hsdp", "float32", "int8", "1bit", "diloco")
"""The first exchanges nothing between hosts; the second is torch's, the others are torchmn's."""
NUM_STEPS = {"diloco": 8}
"""Steps of a turn, where they are not `DEFAULT_STEPS`: a whole block."""
DEFAULT_STEPS = 4
BATCH, LENGTH, WORDS, WIDTH, LAYERS = 4, 16, 2000, 384, 6
LIMIT = 1.5
BARS = ("int8", "1bit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--units", type=int, default=4, help="turns of every side")
    parser.add_argument("--rate", default="1gbit", help="of the link of each host")
    arguments = parser.parse_args()
    from rank_processes import end_ranks, one_core_each, request, start_ranks
    from record import Bar, median_bar, ratio_bar, report
    from tests.netlab import missing_requirement, netlab

    if reason := missing_requirement():
        print(f"Test hosts are not available: {reason}.", file=sys.stderr)
        return 2
    cores = one_core_each(2)
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    nbytes: dict[str, list[dict[str, int]]] = {}
    with netlab(2, arguments.rate, cores=cores) as lab:
        job = start_ranks([__file__, "worker"], lab, ranks_per_host=2)
        for side in SIDES:  # the first turn also counts memory
            nbytes[side] = [rank["nbytes"] for rank in request(job, side, 2)]
        for unit in range(arguments.units):
            turn = unit % len(SIDES)
            for side in SIDES[turn:] + SIDES[:turn]:
                num_steps = NUM_STEPS.get(side, DEFAULT_STEPS)
                seconds = max(rank["seconds"] for rank in request(job, side, num_steps))
                rates[side].append(4 * BATCH * num_steps / seconds)
        end_ranks(job)
    bars = [median_bar(f"{side}", values, "samples/s") for side, values in rates.items()]
    for side in SIDES[2:]:
        limit = f">= {LIMIT}" if side in BARS else None
        bars.append(ratio_bar(f"throughput, {side} / hsdp", rates[side], rates["hsdp"], limit))
    for side in SIDES[1:]:
        pairs = zip(nbytes[side], nbytes["fsdp2"], strict=True)
        ratio = max(mine["counted"] / alone["counted"] for mine, alone in pairs)
        limit = None if side == "hsdp" else "<= 1.1"
        name = f"memory per rank, {side} / fsdp2"
        bars.append(Bar(name, ratio, "ratio", limit, None if limit is None else ratio <= 1.1))
        kept = max(rank["kept"] for rank in nbytes[side])
        if kept:
            bars.append(Bar(f"kept besides, {side}", kept / 1e6, "MB"))
    return report("sharded", bars)


# ---- a rank ----


def work() -> None:
    import torch

    import torchmn

    torch.set_num_threads(1)
    comm = torchmn.create_communicator()
    grid = torchmn.Grid(comm, data=2, model=2)
    turns = {side: trainer(side, grid) for side in SIDES}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        side, num_steps = line.split()
        step, count = turns[side]
        comm.barrier()
        began = time.perf_counter()
        for _ in range(int(num_steps)):
            step()
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "nbytes": count()}), flush=True)
    grid.finalize()
    comm.finalize()


def trainer(side: str, grid: Any) -> tuple[Callable[[], None], Callable[[], dict[str, int]]]:
    """What makes a step of one side, and what counts its memory after the last backward."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import torchmn

    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(LAYERS)
    ]
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))
    mesh = grid.device_mesh("data", "model") if side == "hsdp" else grid.device_mesh("model")
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inner = torch.optim.AdamW(model.parameters(), 1e-4)
    optimizer: Any = inner
    if side == "diloco":
        schedule = torchmn.schedules.DiLoCo(4 * BATCH * NUM_STEPS["diloco"] // 2)
        optimizer = torchmn.create_multi_node_optimizer(inner, grid.data, model, schedule=schedule)
    elif side in SIDES[2:]:
        optimizer = torchmn.create_multi_node_optimizer(inner, grid.data, model, codec=side)
    words = torch.randint(WORDS, (BATCH, LENGTH + 1))
    counted: dict[str, int] = {}

    def step() -> None:
        optimizer.zero_grad()
        output = model(words[:, :-1])
        nn.functional.cross_entropy(output.flatten(0, 1), words[:, 1:].flatten()).backward()
        if len(inner.state):
            counted.update(counted or count(model, inner, optimizer))
        optimizer.step()

    return step, lambda: counted


def count(model: Any, inner: Any, optimizer: Any) -> dict[str, int]:
    """Bytes of parameters, gradients, states and buckets, and of what is kept besides them."""
    import torch

    def local(tensor: Any) -> Any:
        return getattr(tensor, "_local_tensor", tensor)

    parameters = [p for group in inner.param_groups for p in group["params"]]
    held = [local(p) for p in parameters]
    held += [local(p.grad) for p in parameters if p.grad is not None]
    held += [local(v) for s in inner.state.values() for v in s.values() if torch.is_tensor(v)]
    kept: list[Any] = []
    if optimizer is not inner:
        held += [
            bucket.buffer for each in optimizer.reducer.buffers.sets for bucket in each.buckets
        ]
        kept = list(tensors(optimizer.state_dict()["torchmn"]))
    return {"counted": num_bytes(held), "kept": num_bytes(kept)}


def tensors(value: Any) -> Iterator[Any]:
    import torch

    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def num_bytes(held: Iterable[Any]) -> int:
    """The size of the union of their memory."""
    total = last = 0
    for begin, end in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in held):
        total += max(0, end - max(begin, last))
        last = max(last, end)
    return total


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        work()
    else:
        raise SystemExit(main())
