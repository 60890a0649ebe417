"""Trains a little under torchmn run, saves as it goes, and is killed where an argument says."""

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from torchmn.train import EpochLoader

NUM_STEPS = 14  # epochs of five steps


def main(folder: str, schedule: str, codec: str, result: str, kill_at: int) -> None:
    comm = torchmn.create_communicator("flat")
    torch.manual_seed(5 + comm.rank)  # dropout differs between ranks
    model = nn.Sequential(
        nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Dropout(0.2), nn.ReLU(), nn.Linear(40, 3)
    )
    chosen = torchmn.schedules.DiLoCo(48, overlap_steps=1) if schedule == "diloco" else schedule
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.Adam(model.parameters(), 0.01), comm, model, schedule=chosen, codec=codec
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 6, generator=generator)
    data = TensorDataset(inputs, inputs[:, 0].gt(0).long() + inputs[:, 1].gt(0).long())
    sampler = torchmn.GlobalSampler(len(data), comm, 12, seed=1)
    batches = EpochLoader(DataLoader(data, batch_sampler=sampler))
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    checkpointer = torchmn.create_multi_node_checkpointer(comm, folder, "run")
    first = checkpointer.resume(state)
    print(f"begins at {first}", flush=True)
    for step in range(first, NUM_STEPS):
        if step == kill_at and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % 3 == 1:  # mid-epoch, mid-block
            checkpointer.save(step + 1, state)
    checkpointer.finish()
    torch.save((model.state_dict(), optimizer.state_dict()), f"{result}.rank{comm.rank}")
    comm.finalize()


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
