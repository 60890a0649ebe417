"""What the watch over a job costs: the step of a small model with and without it, in turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import Bar, median_bar, ratio_bar, report

NUM_PAIRS = 7
STEPS = """
import json, os, sys, threading, time, torch
if sys.argv[1] == "without" and threading.active_count() > 1:
    os.execv(sys.executable, [sys.executable, *sys.argv])
import torchmn
comm = torchmn.create_communicator("auto")
model = torch.nn.Sequential(
    torch.nn.Linear(784, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 1000), torch.nn.ReLU(),
    torch.nn.Linear(1000, 10),
)
sgd = torch.optim.SGD(model.parameters(), 0.01)
optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
x = torch.randn(32, 784)
seconds = []
for step in range(400):
    began = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    seconds.append(time.perf_counter() - began)
watch = [t.native_id for t in threading.enumerate() if t.name == "torchmn-monitor"]
busy_s = sum(int(open(f"/proc/self/task/{tid}/schedstat").read().split()[0]) / 1e9 for tid in watch)
if comm.rank == 0:
    with open(sys.argv[2], "w") as file:
        json.dump([seconds[50:], busy_s / sum(seconds)], file)
"""


def main() -> int:
    times: dict[str, list[float]] = {"with": [], "without": []}
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "steps.py").write_text(STEPS)
        for _ in range(NUM_PAIRS):
            for side, medians in times.items():
                median, share = _median_step(folder, side)
                medians.append(median)
                if side == "with":
                    shares.append(100 * share)
    bars: list[Bar] = [
        median_bar(f"{side} the watch", [1e3 * s for s in seconds], "ms a step")
        for side, seconds in times.items()
    ]
    bars.append(
        ratio_bar("time, with / without the watch", times["with"], times["without"], "<= 1.01")
    )
    bars.append(median_bar("processor time of the watch's thread", shares, "% of a step"))
    return report("watch", bars)


def _median_step(folder: Path, side: str) -> tuple[float, float]:
    """In seconds, and the share of the time in which the watch's thread has run."""
    subprocess.run(
        [
            *(sys.executable, "-m", "torchmn", "run", "-n", "2", "--backend", "gloo"),
            *("--log-dir", "logs", "steps.py", side, "seconds.json"),
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    seconds, share = json.loads((folder / "seconds.json").read_text())
    return statistics.median(seconds), share


if __name__ == "__main__":
    raise SystemExit(main())
