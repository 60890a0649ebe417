"""Train ResNet-50 on ImageNet, by the recipe of the source document or by a modern one.

    torchmn run -n 8 examples/imagenet/train_imagenet.py /data/imagenet --compile

docs/how-to/imagenet.md has the rest. A second start continues from the last checkpoint, and the
scheduler's signal or time limit makes all ranks save and exit with status 85.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from options import RECIPES, build_optimizer, build_schedule, parse_options
from pytorch_pfn_extras.reporting import Reporter, report
from pytorch_pfn_extras.training.extensions import Evaluator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Subset

import torchmn
from torchmn import Communicator
from torchmn.train.evaluation import Ratio
from torchmn.train.large_batch import GlobalBatch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets.photos import Photos, find_photos, whole_batch
from models import ImageNetResNet

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of red, green, blue


def main() -> None:
    options = parse_options()
    comm = torchmn.create_communicator(options.communicator)
    device = torch.device("cpu") if options.cpu else comm.device
    train, val = (find_photos(options.data, part, comm) for part in ("train", "val"))
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    model = build(options, train.num_classes, comm).to(device, memory_format=torch.channels_last)
    average = None
    if options.ema:
        average = AveragedModel(
            model, multi_avg_fn=get_ema_multi_avg_fn(options.ema), use_buffers=True
        )
    network = Network(options, model, device)
    evaluator = build_evaluator(
        options, Photos(val, options.image_size), Network(options, average or model, device), comm
    )
    if options.evaluate:
        write(options, comm, evaluate(evaluator))
        return

    global_batch = options.global_batch or options.batchsize * comm.size
    batch = GlobalBatch(global_batch, local_batch=options.batchsize, comm=comm)
    photos = Photos(train, options.image_size, seed=options.seed)
    sampler = batch.sampler(photos, options.seed, drop_last=True)
    loader = DataLoader(photos, batch_sampler=sampler, **loading(options, device))
    loader = torchmn.scatter_loader(loader, comm)  # counts what the loop has received
    optimizer = torchmn.create_multi_node_optimizer(build_optimizer(options, model), comm, model)
    schedule = build_schedule(options, optimizer, batch)
    smoothing = RECIPES[options.recipe].label_smoothing

    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "schedule": schedule}
    state |= {} if average is None else {"average": average}
    checkpointer = torchmn.create_multi_node_checkpointer(comm, options.out, "checkpoints")
    step = checkpointer.resume(state)

    def save_and_finish() -> None:
        checkpointer.save(step, state)
        checkpointer.finish()

    preemption = torchmn.Preemption(
        comm, save_and_finish, margin_s=options.margin, period_s=options.check
    )
    if comm.rank == 0:
        print(f"{batch}, {options.recipe} recipe, from step {step}", flush=True)
    while True:
        if step and sampler.position == 0:  # an epoch has ended, now or before this start
            write(options, comm, {"epoch": sampler.epoch, "step": step, **evaluate(evaluator)})
        if sampler.epoch >= options.epochs:
            break
        photos.epoch = sampler.epoch
        began_s, began_step = time.monotonic(), step
        for samples in loader:
            optimizer.zero_grad()
            total = torch.zeros((), device=device)
            for (images, labels), share in batch.micro_batches(samples, optimizer):
                labels = labels.to(device, non_blocking=True)
                loss = cross_entropy(network(images), labels, label_smoothing=smoothing)
                (loss * share).backward()
                total += loss.detach() * share
            optimizer.step()
            rate = schedule.get_last_lr()[0]
            schedule.step()
            if average is not None:
                average.update_parameters(model)
            step += 1
            if step % options.log_steps == 0:
                loss = mean_loss(total, len(samples[1]), comm)
                elapsed_s, began_s = time.monotonic() - began_s, time.monotonic()
                speed = round((step - began_step) * global_batch / elapsed_s, 1)
                began_step = step
                write(options, comm, {"step": step, "loss": loss, "lr": rate, "photos/s": speed})
            if step % options.save_steps == 0:
                checkpointer.save(step, state)
            preemption.step_ended()
    checkpointer.save(step, state)
    checkpointer.finish()
    preemption.close()
    if comm.rank == 0:
        torch.save((average.module if average else model).state_dict(), options.out / "weights.pt")
    comm.finalize()


def build(options: argparse.Namespace, num_classes: int, comm: Communicator) -> ImageNetResNet:
    """The network, equal on all ranks, since they have the same seed."""
    model = ImageNetResNet(options.arch, num_classes, options.model_width, zero_init_residual=True)
    if options.weights:
        model.load_state_dict(torch.load(options.weights, map_location="cpu", weights_only=True))
    if options.batch_norm == "all":
        torchmn.nn.convert_batch_norm(model, comm)
    return model


class Network(nn.Module):
    """A network from bytes in the order blue, green, red to logits in float32."""

    def __init__(self, options: argparse.Namespace, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.run = torch.compile(model) if options.compile else model
        self.device = device
        self.bf16 = options.bf16
        mean, deviation = (255 * torch.tensor(v).view(3, 1, 1) for v in (MEAN, DEVIATION))
        self.mean, self.deviation = mean.to(device), deviation.to(device)

    def forward(self, photos: Tensor) -> Tensor:
        """Normalize the photos and return their logits."""
        images = photos.to(self.device, non_blocking=True).flip(1).float()
        images = ((images - self.mean) / self.deviation).to(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            return self.run(images).float()


def loading(options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """How a DataLoader reads photos."""
    return {"num_workers": options.workers, "pin_memory": device.type == "cuda",
            "collate_fn": whole_batch}  # fmt: skip


def build_evaluator(
    options: argparse.Namespace, val: Photos, network: Network, comm: Communicator
) -> Evaluator:
    """Loss, and accuracy of the first and of the first five classes, over each photo once."""
    part = Subset(val, range(comm.rank, len(val), comm.size))
    loader = DataLoader(part, options.batchsize, **loading(options, network.device))

    def count(photos: Tensor, labels: Tensor) -> None:
        labels = labels.to(network.device)
        logits = network(photos)
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        loss = cross_entropy(logits, labels, reduction="sum")
        sums = {"loss": loss, "top-1": best[:, 0].sum(), "top-5": best.sum()}
        report({f"validation/{name}": Ratio(value, len(labels)) for name, value in sums.items()})

    evaluator = Evaluator(loader, network, eval_func=count)
    return torchmn.create_multi_node_evaluator(evaluator, comm)


def evaluate(evaluator: Evaluator) -> dict[str, float]:
    """The exact means over all photos. *Collective.*"""
    with Reporter():
        return evaluator()


def mean_loss(total: Tensor, count: int, comm: Communicator) -> float:
    """The mean over the photos of all ranks. *Collective.*"""
    sums = torch.tensor([float(total) * count, count], dtype=torch.float64)
    sums = comm.allreduce(sums, "sum")
    return float(sums[0] / sums[1])


def write(options: argparse.Namespace, comm: Communicator, row: dict[str, object]) -> None:
    """Print a line of the log and add it to its file. Rank 0."""
    if comm.rank == 0:
        line = json.dumps(row)
        print(line, flush=True)
        with open(options.out / "log.jsonl", "a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    torchmn.run_main(main)
