"""A small real training that logs which samples every step used: FOLDER PAUSE SAVE [saves].

SAVE is a period in steps, 0 for never; with ``saves`` it saves and exits when it is preempted. It
ends with the epoch in which a file ``enough`` appears in the folder.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import torchmn
from torchmn.data import GlobalSampler

NUM_SAMPLES, GLOBAL_BATCH = 96, 12


def main() -> None:
    folder, pause_s = Path(sys.argv[1]), float(sys.argv[2])
    save_period = int(sys.argv[3])
    comm = torchmn.create_communicator("naive", timeout_s=20)
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 5, generator=numbers)
    y = x @ torch.randn(5, 1, generator=numbers)
    torch.manual_seed(2)
    model = torch.nn.Linear(5, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
    sampler = GlobalSampler(NUM_SAMPLES, comm, GLOBAL_BATCH, seed=3)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    checkpointer = torchmn.create_multi_node_checkpointer(comm, folder, "checkpoints")
    step = checkpointer.resume(state)
    preemption = None

    def save_now() -> None:
        checkpointer.save(step, state)
        checkpointer.finish()

    if "saves" in sys.argv:
        preemption = torchmn.Preemption(comm, save_now, period_s=0.1)
    number = int(os.environ.get("TORCHMN_ROUND", "0"))
    print(f"rank {comm.rank} of {comm.size} begins at step {step} in round {number}")
    with (folder / f"steps-{number}-{comm.rank}").open("a") as log:
        while not comm.bcast_obj((folder / "enough").exists()):
            for samples in sampler:
                optimizer.zero_grad()
                loss = ((model(x[samples]) - y[samples]) ** 2).mean()
                loss.backward()
                optimizer.step()
                step += 1
                words = [number, comm.size, step, samples, os.getpid(), os.getppid(), time.time()]
                log.write(json.dumps(words) + "\n")
                log.flush()
                time.sleep(pause_s)
                if save_period and step % save_period == 0:
                    checkpointer.save(step, state)
                if comm.rank == 0:
                    print(f"step {step}")
                if preemption is not None:
                    preemption.step_ended()
    checkpointer.finish()
    if comm.rank == 0:
        torch.save(model.state_dict(), folder / "final.pt")


if __name__ == "__main__":
    main()
