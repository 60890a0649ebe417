"""A worker: executes the runs of a plan, one after another, together with the other worker."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from record import commit
from torch import Tensor, nn

from accuracy.experiments import EXPERIMENTS
from accuracy.runs import Run, append
from accuracy.sides import Side
from accuracy.tasks import NUM_WORKERS, Images, Task, batches, load


def work(plan: str, runs_path: str, folder: str) -> None:
    """Execute the runs of a plan, a JSON list of (task, side, seed). *Collective.*"""
    import torchmn

    torch.set_num_threads(1)
    tasks = {name: task for each in EXPERIMENTS for name, task in each.tasks.items()}
    sides = {name: side for each in EXPERIMENTS for name, side in each.sides.items()}
    is_leader = torchmn.create_communicator("flat", transport="torch").rank == 0
    data: dict[str, Images] = {}
    wanted = [tuple(entry) for entry in json.loads(Path(plan).read_text())]
    for task_name, side_name, seed in wanted:
        task, side = tasks[task_name], sides[side_name]
        if task_name not in data:
            data.clear()
            data[task_name] = load(task, folder)
        started = time.perf_counter()
        outcome = _outcome(task, side, seed, data[task_name])
        if is_leader:
            seconds = time.perf_counter() - started
            run = Run.of(task, side, seed, **outcome, seconds=seconds, commit=commit())
            append(Path(runs_path), run)
            print(run, flush=True)


def _outcome(task: Task, side: Side, seed: int, images: Images) -> dict[str, Any]:
    from torchmn.errors import NonFiniteGradientError, UnknownNameError, UnsupportedError

    try:
        return train(task, side, seed, images)
    except (UnknownNameError, UnsupportedError, ImportError) as error:
        return {"status": "not built", "why": f"{type(error).__name__}: {error}"}
    except NonFiniteGradientError as error:  # on all ranks
        return {"status": "failed", "why": str(error)}


def train(task: Task, side: Side, seed: int, images: Images) -> dict[str, Any]:
    """One run. *Collective.* The workers are on two hosts, so that all messages are encoded."""
    import torchmn
    from torchmn.cluster import Topology
    from torchmn.train.evaluation import sync_buffers_

    options = dict(side.options)
    if side.block_steps is not None:
        options["block_size"] = side.block_steps * task.batch * NUM_WORKERS
    num_steps = task.num_steps(len(images.train[1]))
    schedule = make_schedule(side.schedule, options)
    comm = torchmn.create_communicator(
        "hierarchical",
        transport="torch",
        topology=Topology.blocks([1] * NUM_WORKERS),
        timeout_s=60,
    )
    try:
        torch.manual_seed(seed)
        model = task.network().to(memory_format=torch.channels_last)
        torch.manual_seed(NUM_WORKERS * seed + comm.rank)  # dropout
        inner = torch.optim.SGD(
            model.parameters(),
            task.learning_rate * side.learning_rate_factor,
            momentum=task.momentum,
            nesterov=task.momentum > 0,
            weight_decay=task.weight_decay,
        )
        optimizer = torchmn.create_multi_node_optimizer(
            inner, comm, model, codec=side.codec, schedule=schedule
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: task.rate(step, num_steps)
        )
        losses, hits = torch.zeros(2, num_steps)
        for step, (inputs, labels) in enumerate(batches(task, images, seed, comm.rank)):
            optimizer.zero_grad()
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses[step] = loss.detach()
            hits[step] = (logits.detach().argmax(1) == labels).float().mean()
        optimizer.flush()
        staleness = _staleness(schedule, comm)
        optimizer.close()
        sync_buffers_([model], comm, "average")
        comm.bcast_data(model)  # asynchronous replicas differ: take those of rank 0
        accuracy, test_loss = evaluate(model, images.test, comm)
        few = task.num_loss_images
        _, loss_at_end = evaluate(model, (images.train[0][:few], images.train[1][:few]), comm)
        losses, hits = comm.allreduce(torch.stack([losses, hits]), "mean")
    finally:
        comm.finalize()
    return {
        "status": "done",
        "accuracy": accuracy,
        "loss": loss_at_end,
        "test_loss": test_loss,
        "curve": [float(part.mean()) for part in losses.split(task.curve_steps)],
        "hits": [100 * float(part.mean()) for part in hits.split(task.curve_steps)],
        "num_steps": num_steps,
        "staleness": staleness,
    }


def make_schedule(name: str, options: Mapping[str, object]) -> Any:
    """A schedule by its name and options. Raises UnknownNameError: there is none."""
    from torchmn.errors import UnknownNameError
    from torchmn.exchange.optimizer.create import SCHEDULES

    if name not in SCHEDULES:
        raise UnknownNameError("schedule", name, SCHEDULES)
    factory: Any = SCHEDULES[name]
    chosen = dict(options)
    return factory.recommended(**chosen) if chosen.pop("recommended", False) else factory(**chosen)


def evaluate(model: nn.Module, data: tuple[Tensor, Tensor], comm: Any) -> tuple[float, float]:
    """Accuracy in percent and mean loss; each rank evaluates its share. *Collective.*"""
    inputs, labels = (part[comm.rank :: comm.size] for part in data)
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for x, y in zip(inputs.split(250), labels.split(250), strict=True):
            logits = model(x)
            sums[0] += (logits.argmax(1) == y).sum()
            sums[1] += nn.functional.cross_entropy(logits, y, reduction="sum")
            sums[2] += len(y)
    model.train()
    correct, loss, number = comm.allreduce(sums).tolist()
    return (100 * correct / number, loss / number) if number else (math.nan, math.nan)


def _staleness(schedule: Any, comm: Any) -> dict[str, float] | None:
    """The staleness of the worst worker under an asynchronous schedule, otherwise None.

    *Collective.*
    """
    if not hasattr(schedule, "staleness"):
        return None
    met = comm.allgather_obj(schedule.staleness())
    return {
        "mean": max(worker.mean for worker in met),
        "max": max(worker.max for worker in met),
        "bound in steps": schedule.max_staleness,
    }
