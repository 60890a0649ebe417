"""A small real training: digits, batch normalization, dropout, a checkpoint every few steps.

    torchmn run -n 2 benchmarks/chaos/training.py FOLDER --digits FILE [--schedule ... --fault ...]

``FOLDER`` receives ``checkpoints``, ``progress`` (one byte for each step of rank 0), ``resumed``
(the first step of a run), ``injected`` (the time of a fault in the script), ``accuracy`` and
``final-rank<r>.safetensors``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from torchmn.errors import TorchmnError
from torchmn.exchange.schedules import BlockMomentum, DiLoCo, PeriodicAverage
from torchmn.run import install_crash_handler

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from models.small_cnn import SmallCNN

GLOBAL_BATCH = 48
_BLOCK_STEPS = 8

SCHEDULES = {"block_momentum": BlockMomentum, "diloco": DiLoCo, "periodic_average": PeriodicAverage}
"""Schedules whose default blocks are longer than this training; others are given by name."""


class InsideFault:
    """A fault that the script raises itself, at the place and step of ``--fault``.

    ``KIND:RANK:STEP:PLACE``; the kind is ``exception``, ``exit<status>``, ``_exit<status>``,
    ``lock``, ``clock<seconds>`` or ``pause``, until there is a file ``continue``; the rank is -1
    for all of them. It is raised once, also if ranks are restarted.
    """

    def __init__(self, text: str, folder: Path) -> None:
        kind, rank, step, place = text.split(":") if text else ("", "-2", "-1", "")
        self._kind, self._place = kind, place
        self._rank, self._step = int(rank), int(step)
        self._folder = folder

    def raise_if_due(self, rank: int, step: int, place: str) -> None:
        """Called at every place where a fault can be raised."""
        if self._rank in (rank, -1) and place == self._place and step >= self._step:
            is_for_all, self._rank = self._rank == -1, -2
            injected = self._folder / "injected"
            if is_for_all or not injected.exists():
                injected.write_text(str(time.time()))
                self._raise()

    def _raise(self) -> None:
        if self._kind == "pause":
            while not (self._folder / "continue").exists():
                time.sleep(0.02)
            return
        if self._kind == "lock":  # of the script's own, held by a thread that has forgotten it
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if self._kind.startswith("clock"):
            now, jump_s = time.time, int(self._kind.removeprefix("clock"))
            time.time = lambda: now() + jump_s
            return
        if self._kind.startswith("_exit"):
            os._exit(int(self._kind.removeprefix("_exit")))
        if self._kind.startswith("exit"):
            sys.exit(int(self._kind.removeprefix("exit")))
        raise RuntimeError("a fault injected by the benchmark")


class Bystander:
    """An object with a state, whose saving may fail."""

    def __init__(self, raise_if_due: Callable[[], None]) -> None:
        self._raise_if_due = raise_if_due

    def state_dict(self) -> dict[str, int]:
        """A dummy state."""
        self._raise_if_due()
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to do."""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path, help="folder of checkpoints and results")
    add("--digits", type=Path, required=True, help="file with the images and labels")
    add("--route", default="hierarchical")
    add("--schedule", default="every_step")
    add("--codec", default="float32")
    add("--steps", type=int, default=100)
    add("--period", type=int, default=8, help="steps between checkpoints")
    add("--loaders", type=int, default=0, help="DataLoader workers of each rank")
    add("--timeout", type=float, default=10.0, help="seconds; doubled for the first exchange")
    add("--fault", default="", help="KIND:RANK:STEP:PLACE")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    folder: Path = options.folder
    fault = InsideFault(options.fault, folder)
    launched_rank = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
    fault.raise_if_due(launched_rank, 0, "start")
    torch.set_num_threads(1)
    comm = torchmn.create_communicator(
        options.route,
        timeout_s=torchmn.Timeout(options.timeout, options.timeout, 2 * options.timeout),
    )
    install_crash_handler(comm)
    digits = load_file(options.digits)

    torch.manual_seed(0)
    model = SmallCNN(image_size=digits["images"].shape[-1])
    torch.manual_seed(1 + comm.rank)  # dropout differs between workers
    sgd = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    schedule = options.schedule
    if schedule in SCHEDULES:
        schedule = SCHEDULES[schedule](_BLOCK_STEPS * GLOBAL_BATCH)
    optimizer = torchmn.create_multi_node_optimizer(
        sgd, comm, model, codec=options.codec, schedule=schedule
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.05, total_steps=options.steps + 1)
    sampler = torchmn.GlobalSampler(len(digits["labels"]), comm, GLOBAL_BATCH)
    checkpointer = torchmn.create_multi_node_checkpointer(comm, folder, "checkpoints")
    step = 0
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "sampler": sampler,
        "bystander": Bystander(lambda: fault.raise_if_due(comm.rank, step, "save")),
    }
    step = checkpointer.resume(state)
    if comm.rank == 0:
        (folder / "resumed").write_text(str(step))
    first_parameter = next(model.parameters())
    first_parameter.register_hook(lambda _: fault.raise_if_due(comm.rank, step, "backward"))

    progress = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    if comm.rank == 0:
        os.write(progress, b"." * (1 + step))  # one more: the run has started
    model.train()
    digits_of_training = TensorDataset(digits["images"], digits["labels"])
    loader = DataLoader(
        digits_of_training,
        batch_sampler=sampler,
        num_workers=options.loaders,
        generator=torch.Generator(),  # else each pass draws from the default one
    )
    while step < options.steps:
        for inputs, labels in loader:
            fault.raise_if_due(comm.rank, step, "step")
            loss = cross_entropy(model(inputs), labels)
            fault.raise_if_due(comm.rank, step, "forward")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if comm.rank == 0:
                os.write(progress, b".")
            if step % options.period == 0 and step < options.steps:
                checkpointer.save(step, state)
            if step == options.steps:
                break
    try:
        checkpointer.finish()
    except TorchmnError as error:  # the training is complete without its last checkpoint
        print(f"no last checkpoint: {error}", flush=True)
    optimizer.flush()
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    draft = folder / f"draft-rank{comm.rank}"
    save_file(tensors, draft)
    draft.rename(folder / f"final-rank{comm.rank}.safetensors")
    if comm.rank == 0:
        model.eval()
        with torch.no_grad():
            is_right = model(digits["test_images"]).argmax(1) == digits["test_labels"]
        (folder / "accuracy").write_text(json.dumps(float(is_right.float().mean())))
    comm.finalize()


if __name__ == "__main__":
    torchmn.run_main(main)
