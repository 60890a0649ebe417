"""What a framework's loop costs beside torchmn's own, on 2 workers: Lightning, Accelerate, ...

All sides live in the same two processes, each loop in a thread of its own that waits in its data
loader, and take turns, one step each. The time of a step is that from the batch it is given to the
one it asks for next: forward, backward, exchange, the optimizer, and all the framework does between
(logging, progress bars and checkpoints are off). ``ddp`` is the framework as it comes. The model is
VGG-16 for CIFAR or, with ``--model mlp``, a perceptron whose step takes a few milliseconds: then
only the time that a framework adds is of interest, and no bar applies.

Memory of a thread comes from heaps of 64 MB that glibc gives back to the system and maps again, in
each thread at other times: three loops of torchmn itself then differed by up to 3 % in all their
steps. The workers of all sides therefore have one heap that keeps freed memory
(`KEEP_FREED_MEMORY`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from record import Bar, median_bar, ratio_bar, report, run_workers

BATCH = 32
NUM_WARM_UP = 3
PLAIN = "torchmn"
FRAMEWORKS = ("lightning", "fabric", "accelerate", "transformers")
KEEP_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Of glibc: one heap, no mappings for single blocks, and nothing is given back."""
SIDES = (PLAIN, *(f"{name}, {by}" for name in FRAMEWORKS for by in ("torchmn", "ddp")))


class Turns:
    """A data loader that gives a batch when it is this side's turn."""

    def __init__(self, batch: Any, number: int) -> None:
        self.batch, self.number = batch, number
        self.turn, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.waits = threading.Event()
        self.failed = ""

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.number):
            if index:
                self.done.release()
            self.waits.set()
            self.turn.acquire()
            yield self.batch

    def __len__(self) -> int:
        return self.number

    def step(self) -> float:
        """Let it make one step, after the last one also what the loop does at its end; seconds."""
        started = time.perf_counter()
        self.turn.release()
        self.done.acquire()
        if self.failed:
            raise RuntimeError(self.failed)
        return time.perf_counter() - started

    def run(self, loop: Callable[[Turns], None]) -> None:
        """The loop, in a thread of its own."""
        try:
            loop(self)
        except BaseException:
            self.failed = traceback.format_exc()
        finally:  # only now, for a loop may end with collectives of a group that others share
            self.waits.set()
            self.done.release()


def worker(model_name: str, folder: str, num_steps: str) -> None:
    """Time steps of every side in turn; rank 0 writes seconds per step."""
    import torch

    import torchmn

    torch.set_num_threads(1)
    comm = torchmn.create_communicator("auto")
    torch.distributed.init_process_group("gloo")
    number = NUM_WARM_UP + int(num_steps) + 1  # the last one ends the loop and does not count
    generator = torch.Generator().manual_seed(comm.rank)
    shape = (BATCH, 3, 32, 32) if model_name == "vgg" else (BATCH, 784)
    batch = torch.rand(shape, generator=generator), torch.randint(10, (BATCH,), generator=generator)
    sides = {side: Turns(batch, number) for side in SIDES}
    threads = []
    for side, turns in sides.items():
        name, _, by = side.partition(", ")
        loop = LOOPS[name](model_name, by != "ddp", comm)
        threads.append(threading.Thread(target=turns.run, args=(loop,), daemon=True))
    times: dict[str, list[float]] = {side: [] for side in sides}
    for thread, turns in zip(threads, sides.values(), strict=True):
        thread.start()  # one after another: loops begin with collectives
        turns.waits.wait()
        comm.barrier()
    for index in range(number):
        for side, turns in sides.items():
            comm.barrier()
            seconds = turns.step()
            if NUM_WARM_UP <= index < number - 1:
                times[side].append(seconds)
    if comm.rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    comm.barrier()


def _build(model_name: str) -> tuple[Any, Any]:
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from models.mlp import MLP
    from models.vgg import VGG

    torch.manual_seed(0)
    model: Any = VGG(10) if model_name == "vgg" else MLP()
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)


def _plain(model_name: str, is_ours: bool, comm: Any) -> Callable[[Turns], None]:
    import torch

    import torchmn

    model, inner = _build(model_name)
    optimizer = torchmn.create_multi_node_optimizer(
        inner, torchmn.create_communicator("auto"), model
    )

    def loop(turns: Turns) -> None:
        for inputs, labels in turns:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    return loop


def _lightning(model_name: str, is_ours: bool, comm: Any) -> Callable[[Turns], None]:
    import lightning
    import torch
    from lightning.pytorch.strategies import DDPStrategy

    from torchmn.frameworks import lightning_strategy

    model, optimizer = _build(model_name)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Any) -> Any:
            return self.model(inputs)

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=comm.size,
        strategy=lightning_strategy() if is_ours else DDPStrategy(process_group_backend="gloo"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    return lambda turns: trainer.fit(Module(), turns)


def _fabric(model_name: str, is_ours: bool, comm: Any) -> Callable[[Turns], None]:
    import lightning
    import torch

    from torchmn.frameworks import fabric_strategy

    model, optimizer = _build(model_name)
    fabric = lightning.Fabric(
        accelerator="cpu", devices=comm.size, strategy=fabric_strategy() if is_ours else "ddp"
    )
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

    def loop(turns: Turns) -> None:
        for inputs, labels in turns:
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()

    return loop


def _accelerate(model_name: str, is_ours: bool, comm: Any) -> Callable[[Turns], None]:
    import torch
    from accelerate import Accelerator

    from torchmn.frameworks import attach

    model, optimizer = _build(model_name)
    accelerator = Accelerator(cpu=True)
    if is_ours:
        attach(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)

    def loop(turns: Turns) -> None:
        for inputs, labels in turns:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()

    return loop


def _transformers(model_name: str, is_ours: bool, comm: Any) -> Callable[[Turns], None]:
    import torch
    from torch import nn
    from transformers import Trainer, TrainingArguments

    from torchmn.frameworks import attach

    network, _ = _build(model_name)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, inputs: Any, labels: Any) -> Any:
            return {"loss": torch.nn.functional.cross_entropy(self.network(inputs), labels)}

    class OwnLoader(Trainer):
        turns: Turns

        def get_train_dataloader(self) -> Any:
            return self.turns

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)

    def loop(turns: Turns) -> None:
        turns.batch = {"inputs": turns.batch[0], "labels": turns.batch[1]}
        trainer = OwnLoader(
            model,
            TrainingArguments(
                output_dir=tempfile.gettempdir(),
                num_train_epochs=1,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=[None],
            optimizers=(optimizer, None),
        )
        trainer.turns = turns
        if is_ours:
            attach(trainer)
        trainer.train()

    return loop


LOOPS = {
    PLAIN: _plain,
    "lightning": _lightning,
    "fabric": _fabric,
    "accelerate": _accelerate,
    "transformers": _transformers,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="vgg", choices=["vgg", "mlp"])
    parser.add_argument("--backend", default="gloo", help="of torchmn run")
    parser.add_argument("--steps", type=int, default=25, help="of every side")
    options = parser.parse_args()
    os.environ.update(KEEP_FREED_MEMORY)
    with tempfile.TemporaryDirectory() as folder:
        run_workers(__file__, 2, options.backend, options.model, folder, str(options.steps))
        times = json.loads((Path(folder) / "times.json").read_text())
    bars: list[Bar] = []
    for side, seconds in times.items():
        bars.append(median_bar(f"{options.model}: {side}", [1e3 * s for s in seconds], "ms a step"))
    for name in FRAMEWORKS:
        ours = times[f"{name}, torchmn"]
        limit = "<= 1.02" if options.model == "vgg" else None
        bars.append(
            ratio_bar(f"{options.model}: {name} / plain torchmn", ours, times[PLAIN], limit)
        )
        added = [1e3 * (a - b) for a, b in zip(ours, times[PLAIN], strict=True)]
        bars.append(median_bar(f"{options.model}: {name} adds", added, "ms a step"))
        theirs = times[f"{name}, ddp"]
        bars.append(ratio_bar(f"{options.model}: {name}, torchmn / ddp", ours, theirs))
    return report("frameworks", bars)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        raise SystemExit(main())
