"""Train a GPT-style language model on bytes, with few bytes between the workers.

    torchmn run -n 2 examples/lm/train_lm.py --data text.gz --schedule streaming --codec int8

DiLoCo (Douillard et al. 2023, 2025) lets every worker train by itself for a block of steps and then
exchanges parameters: between sites, or over 100 Mb/s, where gradients at every step would take many
times longer than the computation. ``--schedule every_step`` is ordinary data parallelism. A job
that the scheduler ends saves first; started again with the same --out it continues.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import torch
from options import Excerpts, exchange_of, load_text, parse_options
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import torchmn
from torchmn.train.large_batch import Cosine, GlobalBatch, GradualWarmup, weight_decay_groups

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import GPT


def loss_of(model: nn.Module, excerpts: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of each byte after the first of excerpts ``(batch, length + 1)``."""
    scores = model(excerpts[:, :-1])
    return cross_entropy(scores.flatten(0, 1), excerpts[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def validate(model: nn.Module, test: Excerpts, comm: torchmn.Communicator) -> float:
    """The mean loss over all validation bytes. *Collective.*

    Within a block each rank evaluates its part with its own parameters.
    """
    model.eval()
    part = torchmn.scatter_dataset(test, comm, force_equal_length=False)
    sums = torch.zeros(2, dtype=torch.float64)
    for excerpts in DataLoader(part, 64):
        num_bytes = excerpts.shape[0] * (excerpts.shape[1] - 1)
        loss = loss_of(model, excerpts.to(comm.device), "sum")
        sums += torch.tensor([loss.item(), num_bytes])
    model.train()
    total, num_bytes = comm.allreduce(sums).tolist()
    return total / num_bytes


def main() -> None:
    options = parse_options()
    comm = torchmn.create_communicator(options.communicator)
    train, test = load_text(options)
    torch.manual_seed(options.seed)
    model = GPT(256, options.length, options.layers, options.width, options.heads)
    model.to(comm.device)
    batch = GlobalBatch(options.batchsize, comm=comm)
    sampler = batch.sampler(train, seed=options.seed, drop_last=True)
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.AdamW(weight_decay_groups(model, 0.1), options.learnrate, betas=(0.9, 0.95)),
        comm, model, weight="samples", **exchange_of(options),
    )  # fmt: skip
    num_samples = options.steps * options.batchsize
    schedule = GradualWarmup(optimizer, batch, num_samples / 20, unit="samples")
    schedule = Cosine(schedule, batch, num_samples, final=0.1, unit="samples")
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler}
    checkpointer = torchmn.create_multi_node_checkpointer(comm, options.out, "lm")
    step = checkpointer.resume(state)

    def save() -> None:
        checkpointer.save(step, state)
        checkpointer.finish()

    preemption = torchmn.Preemption(comm, save)
    if comm.rank == 0:
        num_parameters = sum(p.numel() for p in model.parameters())
        print(f"{num_parameters:,} parameters, {comm.size} worker(s), step {step}", flush=True)
    began, first = time.perf_counter(), step
    while step < options.steps:
        for excerpts in DataLoader(train, batch_sampler=sampler):
            optimizer.zero_grad()
            loss_of(model, excerpts.to(comm.device)).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % options.eval == 0 or step == options.steps:
                if step == options.steps:
                    optimizer.flush()  # of the last block
                loss = validate(model, test, comm)
                if comm.rank == 0:
                    rate = (step - first) * options.batchsize * options.length
                    rate /= time.perf_counter() - began
                    print(
                        f"step {step}: validation loss {loss:.6f}, {loss / math.log(2):.3f} bits "
                        f"per byte, {rate:.0f} bytes/s",
                        flush=True,
                    )
                checkpointer.save(step, state)
            preemption.step_ended()
            if step == options.steps:
                break
    checkpointer.finish()
    comm.finalize()


if __name__ == "__main__":
    torchmn.run_main(main)
