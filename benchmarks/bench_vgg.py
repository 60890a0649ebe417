"""VGG for CIFAR on 2 workers of this machine: our routes and DistributedDataParallel on gloo.

All sides live in the same two processes and take turns, one step each, so that a slow spell of the
machine meets all of them. Real CIFAR-10 images where TORCHMN_TEST_DATA holds them, else random
ones: the time of a step does not depend on what is in the picture.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from figure import draw
from record import Bar, median_bar, ratio_bar, report, run_workers

BATCH = 32
NUM_STEPS = 9
NUM_WARM_UP = 2
AS_VIEW = "auto, gradient_as_bucket_view"
SIDES = ("alone", "ddp gloo", "auto", AS_VIEW, "auto float16", "double_buffering", "hierarchical",
         "two_dimensional", "flat", "naive")  # fmt: skip
LIMIT = ">= 0.98"


def worker(model_name: str, backend: str, folder: str, num_steps: str) -> None:
    """Time steps of every side in turn; rank 0 writes seconds per step."""
    import torch

    import torchmn

    torch.set_num_threads(1)
    comm = torchmn.create_communicator("auto")
    sides = {side: _make_side(side, model_name, comm, folder) for side in SIDES}
    generator = torch.Generator().manual_seed(comm.rank)
    shape = (BATCH, 3, 32, 32) if model_name == "vgg" else (BATCH, 784)
    inputs = torch.rand(shape, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for index in range(NUM_WARM_UP + int(num_steps)):
        for side, step in sides.items():
            comm.barrier()
            started = time.perf_counter()
            step(inputs, labels)
            if index >= NUM_WARM_UP:
                times[side].append(time.perf_counter() - started)
    if comm.rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    comm.barrier()


def _make_side(side: str, model_name: str, comm, folder: str) -> Callable:
    import torch
    import torch.distributed as dist

    import torchmn

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from models.mlp import MLP
    from models.vgg import VGG

    torch.manual_seed(0)
    model: torch.nn.Module = VGG(10) if model_name == "vgg" else MLP()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4
    )
    if side == "ddp gloo":
        store = dist.FileStore(str(Path(folder) / "store"), comm.size)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif side != "alone":
        is_auto = side in (AS_VIEW, "auto float16", "double_buffering")
        name = "auto" if is_auto else side
        own = torchmn.create_communicator(name)
        optimizer = torchmn.create_multi_node_optimizer(
            optimizer,
            own,
            model,
            codec="float16" if side == "auto float16" else None,
            double_buffering=side == "double_buffering",
            gradient_as_bucket_view=side == AS_VIEW,
        )

    def step(inputs, labels) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def measure(model_name: str, backend: str, num_steps: int) -> dict[str, list[float]]:
    """Seconds per step of every side, measured under ``torchmn run -n 2``."""
    with tempfile.TemporaryDirectory() as folder:
        run_workers(__file__, 2, backend, model_name, backend, folder, str(num_steps))
        return json.loads((Path(folder) / "times.json").read_text())


def main() -> int:
    bars: list[Bar] = []
    for backend in ("auto", "gloo"):
        times = measure("vgg", backend, NUM_STEPS)
        label = f"backend {backend}"
        for side, seconds in times.items():
            rate = [2 * BATCH / s for s in seconds]
            bars.append(median_bar(f"{label}: {side}", rate, "images/s"))
        for side in SIDES[2:]:
            name = f"{label}: throughput, {side} / ddp gloo"
            limit = LIMIT if side == "auto" else None
            bars.append(ratio_bar(name, times["ddp gloo"], times[side], limit))
        name = f"{label}: time, gradients of their own / {AS_VIEW}"
        bars.append(ratio_bar(name, times["auto"], times[AS_VIEW]))
        name = f"{label}: efficiency, auto / alone"
        bars.append(ratio_bar(name, times["alone"], times["auto"]))
    status = report("vgg", bars)
    print(f"drawn: {draw()}")
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        raise SystemExit(main())
