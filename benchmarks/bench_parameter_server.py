"""What one slow step of one worker costs all of them: bounded staleness and every step.

Three workers whose step takes 30 ms, and one time in ten 150 ms, each at its own times. The step is
a sleep, so that workers do not take the cores from one another, and every schedule meets the same
slow steps. One worker alone would make 1000 / 42 steps in a second. Then the exchange itself, of 60
MB between two workers that do nothing else. Sides take turns.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

from record import Bar, median_bar, ratio_bar, report, run_workers

NUM_ROUNDS = 5
NUM_STEPS = 40
USUAL_S, SLOW_S, SHARE_SLOW = 0.03, 0.15, 0.1
SIDES = {
    "every_step": None,
    "servers, 0 steps ahead": {"max_staleness": 0},
    "servers, 4 steps ahead": {"max_staleness": 4},
    "servers, 16 steps ahead": {"max_staleness": 16},
}


def worker(backend: str, folder: str, kind: str) -> None:
    """Time loops of every side in turn; rank 0 writes steps per second and worker."""
    import torch

    import torchmn
    from torchmn.exchange.schedules import ParameterServer

    torch.set_num_threads(1)
    is_large = kind == "large"
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    late: dict[str, str] = {}
    num_steps = 6 if is_large else NUM_STEPS
    for number in range(NUM_ROUNDS):
        for side, options in SIDES.items():
            comm = torchmn.create_communicator("flat")
            model = torch.nn.Linear(1500, 10_000 if is_large else 20)
            schedule = "every_step" if options is None else ParameterServer(**options)
            optimizer = torchmn.create_multi_node_optimizer(
                torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9),
                comm, model, schedule=schedule,
            )  # fmt: skip
            chance = random.Random(1000 * number + comm.rank)
            comm.barrier()
            started = time.perf_counter()
            with optimizer.join():
                for _ in range(num_steps):
                    optimizer.zero_grad()
                    if not is_large:
                        time.sleep(SLOW_S if chance.random() < SHARE_SLOW else USUAL_S)
                    (model.weight.sum() + model.bias.sum()).backward()
                    optimizer.step()
            rates[side].append(num_steps / (time.perf_counter() - started))
            if options is not None:
                late[side] = str(optimizer.schedule.staleness())
            optimizer.close()
            comm.finalize()
    comm = torchmn.create_communicator("flat")
    if comm.rank == 0:
        (Path(folder) / "rates.json").write_text(json.dumps([rates, late]))
    comm.barrier()


def measure(backend: str, kind: str) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Steps per second and worker of every side, under ``torchmn run``."""
    with tempfile.TemporaryDirectory() as folder:
        num_workers = 2 if kind == "large" else 3
        run_workers(__file__, num_workers, backend, backend, folder, kind)
        rates, late = json.loads((Path(folder) / "rates.json").read_text())
        return rates, late


def main() -> int:
    bars: list[Bar] = []
    for backend in ("gloo", "mpi"):
        rates, late = measure(backend, "small")
        for side, samples in rates.items():
            bars.append(median_bar(f"{backend}, slow steps: {side}", samples, "steps/s a worker"))
        name = f"{backend}, slow steps: servers, 4 steps ahead / every_step"
        fast = rates["servers, 4 steps ahead"]
        bars.append(ratio_bar(name, fast, rates["every_step"]))  # depends on how steps are slow
        print(late["servers, 4 steps ahead"])
        rates, _ = measure(backend, "large")
        for side, samples in rates.items():
            bars.append(median_bar(f"{backend}, 60 MB only: {side}", samples, "steps/s a worker"))
    return report("parameter_server", bars)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        raise SystemExit(main())
