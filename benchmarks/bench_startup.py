"""From the command to the first training step on 2 workers: `torchmn run` beside torchrun."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import Bar, median_bar, ratio_bar, report

NUM_RUNS = 7
SCRIPT = """
import os, time, torch
import torchmn
comm = torchmn.create_communicator("auto")
model = torch.nn.Linear(10, 10)
sgd = torch.optim.SGD(model.parameters(), 0.1)
optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
model(torch.ones(1, 10)).sum().backward()
optimizer.step()
if comm.rank == 0:
    with open(os.environ["STAMP"], "w") as file:
        file.write(repr(time.time()))
comm.barrier()
"""
COMMANDS = {
    "torchmn run (auto)": ["-m", "torchmn", "run", "-n", "2"],
    "torchmn run --backend gloo": ["-m", "torchmn", "run", "-n", "2", "--backend", "gloo"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
}


def first_step_s(command: list[str], script: str, stamp: Path) -> float:
    """Seconds from the command's start to the end of the first step."""
    import os

    started = time.time()
    subprocess.run(
        [sys.executable, *command, script],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ, STAMP=str(stamp)),
        cwd=stamp.parent,
    )
    return float(stamp.read_text()) - started


def main() -> int:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first_step.py"
        script.write_text(SCRIPT)
        for _ in range(NUM_RUNS):
            for name, command in COMMANDS.items():
                times[name].append(first_step_s(command, str(script), Path(folder) / "stamp"))
    bars: list[Bar] = [median_bar(name, seconds, "s") for name, seconds in times.items()]
    for name in list(COMMANDS)[:2]:
        bar = ratio_bar(f"time, {name} / torchrun", times[name], times["torchrun"], "<= 1.0")
        bar.limit = bar.holds = None
        bars.append(bar)
    return report("startup", bars)


if __name__ == "__main__":
    raise SystemExit(main())
