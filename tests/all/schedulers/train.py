"""A small training that saves when its job is about to end, and resumes: FOLDER STEPS MARGIN_S.

It is slow as long as there is a file ``slow`` in the folder. Rank 0 writes down each step with the
run that took it, and at the end the parameters.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import torchmn


def main(folder: Path, num_steps: int, margin_s: float) -> None:
    comm = torchmn.create_communicator("flat")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), comm, model
    )
    state = {"model": model, "optimizer": optimizer}
    checkpointer = torchmn.create_multi_node_checkpointer(comm, folder / "saved", "run")
    step = checkpointer.resume(state)
    run = f"{time.time():.6f}"

    def save() -> None:
        checkpointer.save(step, state)
        checkpointer.finish()

    preemption = torchmn.Preemption(comm, save, margin_s=margin_s, period_s=0.2)
    while step < num_steps:
        generator = torch.Generator().manual_seed(1000 * step + comm.rank)
        inputs = torch.randn(12, 6, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        step += 1
        if comm.rank == 0:
            with open(folder / "steps", "a") as file:
                file.write(f"{step} {run} {os.uname().nodename}\n")
        if step % 5 == 0 and step < num_steps:
            checkpointer.save(step, state)
        if (folder / "slow").exists():
            time.sleep(0.8)
        preemption.step_ended()
    checkpointer.finish()
    if comm.rank == 0:
        torch.save(model.state_dict(), folder / "draft")
        (folder / "draft").rename(folder / "finished")
    comm.finalize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
