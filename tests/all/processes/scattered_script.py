"""An ordinary script with `scatter_loader` and a checkpointer, which a signal may end in a pass."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchmn

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 37, 8, 4
STOP_AFTER = 7  # steps: in the middle of the second pass
NUM_STEPS = NUM_EPOCHS * -(-NUM_SAMPLES // BATCH_SIZE)


def parts(num_workers: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """What the script of one process has: a model, an optimizer and a loader that shuffles."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(5, 3, generator=generator, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    loader = DataLoader(
        TensorDataset(x, y), BATCH_SIZE, shuffle=True, num_workers=num_workers, generator=generator
    )
    return model, torch.optim.Adam(model.parameters(), 0.02), loader


def one_process() -> dict[str, torch.Tensor]:
    """The parameters without torchmn."""
    model, optimizer, loader = parts(0)
    for _ in range(NUM_EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.state_dict()


def main(folder: str, num_workers: int, step_s: float) -> None:
    """Train on, save before the end and after every third step."""
    comm = torchmn.create_communicator("flat")
    model, inner, loader = parts(num_workers)
    loader = torchmn.scatter_loader(loader, comm)
    optimizer = torchmn.create_multi_node_optimizer(inner, comm, model)
    checkpointer = torchmn.create_multi_node_checkpointer(comm, folder, "run")
    state = {"model": model, "optimizer": optimizer, "batches": loader.batch_sampler}
    step = checkpointer.resume(state)
    print(f"begins at {step}", flush=True)

    def save() -> None:
        checkpointer.save(step, state)
        checkpointer.finish()

    preemption = torchmn.Preemption(comm, save=save, period_s=0.01)
    while step < NUM_STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            time.sleep(step_s)
            step += 1
            print(f"ended step {step}", flush=True)
            while step == STOP_AFTER and step_s and not preemption.reason:  # for the test's signal
                time.sleep(0.01)
            if step % 3 == 0:
                checkpointer.save(step, state)
            preemption.step_ended()
    checkpointer.finish()
    if comm.rank == 0:
        torch.save(model.state_dict(), Path(folder) / "parameters.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
