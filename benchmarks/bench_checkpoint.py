"""How long does a checkpoint of a 100 M-parameter model stop training?

    make bench-checkpoint ARGS="--turns 9 --folder FOLDER"

Two workers with AdamW: 1.2 GB of state on each, the same on both. In each turn all sides save once,
each in another order, with a training step before; what a side still writes is waited for, and the
disk is synchronized, before the next one begins. A side's time is that of the worker that is
blocked longest. They are compared with a plain copy of the same bytes into existing memory:
no side that lets training continue can be faster, because what it writes must not change.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from record import RECORDS, Bar, environment, median_bar, ratio_bar, report, run_workers

SIDES = ("copy in memory", "ours", "ours, not async", "torch.save by rank 0", "dcp.async_save")
NUM_WORKERS = 2
WIDTH, DEPTH = 3536, 8  # 100.05 M parameters
LIMIT = "<= 1.1"


def tensors_of(state: object) -> Iterator[object]:
    import torch

    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors_of(value)


class Sides:
    """The ways to save one state; each returns when training could continue."""

    def __init__(self, comm: object, model: object, optimizer: object, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        import torchmn

        self.comm, self.folder = comm, folder
        self.objects = {"model": model, "optimizer": optimizer}
        self.pending: Callable[[], object] = lambda: None
        self.num_saves = 0
        make = torchmn.create_multi_node_checkpointer
        self.ours = make(comm, folder, "ours", keep=1)
        self.ours_sync = make(comm, folder, "ours-sync", keep=1, is_async=False)
        self.tensors = [t.detach() for t in tensors_of(self.state())]
        self.memory = [torch.zeros_like(t) for t in self.tensors]
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size
        )

    def state(self) -> dict[str, object]:
        return {name: obj.state_dict() for name, obj in self.objects.items()}

    def save(self, side: str) -> float:
        """Seconds until training can continue, on this rank."""
        self.comm.barrier()
        began = self.began = time.perf_counter()
        {
            "copy in memory": self._copy,
            "ours": lambda: self.ours.save(self.num_saves, self.objects),
            "ours, not async": lambda: self.ours_sync.save(self.num_saves, self.objects),
            "torch.save by rank 0": self._torch_save,
            "dcp.async_save": self._dcp,
        }[side]()
        return time.perf_counter() - began

    def finish(self) -> float:
        """Wait for what is still being written, and for the disk.

        Returns the seconds from the beginning of `save` until it was written.
        """
        self.pending()
        self.pending = lambda: None
        self.ours.finish()
        written_s = time.perf_counter() - self.began
        self.comm.barrier()
        if self.comm.rank == 0:
            for path in self.folder.glob("other-*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        self.comm.barrier()
        self.num_saves += 1
        return written_s

    def _copy(self) -> None:
        for into, tensor in zip(self.memory, self.tensors, strict=True):
            into.copy_(tensor)

    def _torch_save(self) -> None:
        import torch

        if self.comm.rank == 0:
            torch.save(self.state(), self.folder / f"other-{self.num_saves}.pt")
        self.comm.barrier()  # the others would wait for rank 0 in the next exchange

    def _dcp(self) -> None:
        import torch.distributed.checkpoint as dcp

        path = self.folder / f"other-{self.num_saves}"
        self.pending = dcp.async_save(self.state(), checkpoint_id=path).result


def worker(folder: Path, num_turns: int) -> None:
    import torch
    from torch import nn

    import torchmn

    comm = torchmn.create_communicator("flat")
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    model = nn.Sequential(*layers)
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.AdamW(model.parameters(), 1e-4), comm, model
    )

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()

    step()  # the optimizer has its state from here on
    sides = Sides(comm, model, optimizer, folder)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    first_s = math.nan
    written: list[float] = []
    for turn in range(num_turns + 1):  # the first one warms up
        for side in (*SIDES[turn % len(SIDES) :], *SIDES[: turn % len(SIDES)]):
            step()
            slowest = comm.allreduce(torch.tensor([sides.save(side)]), "max")
            written_s = sides.finish()
            if turn:
                seconds[side].append(float(slowest))
            if side == "ours":
                first_s = float(slowest) if turn == 0 else first_s
                written.append(written_s)
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "nbytes": sum(t.nbytes for t in sides.tensors),
        "seconds": seconds,
        "first_s": first_s,
        "written_s": written[1:],
        "environment": environment(),
    }
    if comm.rank == 0:
        (folder / "result.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()
    comm.finalize()


def main() -> int:
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]), int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description="How long does a checkpoint stop training?")
    parser.add_argument("--turns", type=int, default=11, help="saves of each side that count")
    parser.add_argument("--folder", help="on the disk that is written to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run_workers(__file__, NUM_WORKERS, "gloo", folder, str(options.turns))
        facts = json.loads((Path(folder) / "result.json").read_text())
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / "checkpoint.json").write_text(json.dumps(facts, indent=1) + "\n")
    seconds = facts["seconds"]
    bars: list[Bar] = [
        Bar("parameters", facts["parameters"] / 1e6, "M"),
        Bar("state of each worker", facts["nbytes"] / 1e9, "GB"),
    ]
    bars += [median_bar(f"training is stopped: {side}", seconds[side], "s") for side in SIDES]
    bars.append(Bar("training is stopped: ours, the first time", facts["first_s"], "s"))
    bars.append(median_bar("ours: until it is on the disk", facts["written_s"], "s"))
    bars.append(
        ratio_bar("ours / copy in memory", seconds["ours"], seconds["copy in memory"], LIMIT)
    )
    for side in SIDES[2:]:
        bar = ratio_bar(f"{side} / ours", seconds[side], seconds["ours"], ">= 1")
        bars.append(bar)
    return report("checkpoint", bars)


if __name__ == "__main__":
    raise SystemExit(main())
