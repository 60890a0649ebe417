"""How long starting takes: to the first step, as torchrun does, and what we add to each engine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from record import Bar, median_bar, median_interval, ratio_bar, report

NUM_RUNS = 7
HELP_S = 0.3
ADDED_S = 0.5
FIRST_STEP = """
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
RUN = (sys.executable, "-m", "torchmn", "run", "-n", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
MPIRUN = (str(Path(sys.executable).parent / "mpirun"), "--map-by", ":OVERSUBSCRIBE", "-n", "2")
TO_FIRST_STEP = {
    "torchmn run (auto)": RUN,
    "torchmn run --backend gloo": (*RUN, "--backend", "gloo"),
    "torchrun": TORCHRUN,
}
WITH_AND_WITHOUT_US = {
    "mpirun": ((*RUN, "--backend", "mpi"), (*MPIRUN, sys.executable)),
    "torchrun": ((*RUN, "--backend", "gloo", "--launcher", "torchrun"), TORCHRUN),
    "no engine": ((*RUN, "--backend", "gloo"), (sys.executable,)),
}
"""A script that does nothing, started by the engine through us and by the engine itself."""


def main() -> int:
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as folder:
        bars += _to_first_step(Path(folder))
        bars += _added(Path(folder))
        bars.append(_help(Path(folder)))
    return report("startup", bars)


def _to_first_step(folder: Path) -> list[Bar]:
    script, stamp = folder / "first_step.py", folder / "stamp"
    script.write_text(FIRST_STEP)
    times: dict[str, list[float]] = {name: [] for name in TO_FIRST_STEP}
    for _ in range(NUM_RUNS):
        for name, command in TO_FIRST_STEP.items():
            started = time.time()
            _run((*command, str(script)), folder, {"STAMP": str(stamp)})
            times[name].append(float(stamp.read_text()) - started)
    bars = [median_bar(name, seconds, "s") for name, seconds in times.items()]
    for name in list(TO_FIRST_STEP)[:2]:
        bars.append(ratio_bar(f"time, {name} / torchrun", times[name], times["torchrun"]))
    return bars


def _added(folder: Path) -> list[Bar]:
    script = folder / "nothing.py"
    script.write_text("")
    bars = []
    for engine, (with_us, without_us) in WITH_AND_WITHOUT_US.items():
        added = []
        for _ in range(NUM_RUNS):
            seconds = [_run((*command, str(script)), folder) for command in (with_us, without_us)]
            added.append(seconds[0] - seconds[1])
        bar = median_bar(f"torchmn run adds to {engine}", added, "s")
        bar.interval = median_interval(added)
        bar.limit, bar.holds = f"<= {ADDED_S}", bar.interval[1] <= ADDED_S
        bars.append(bar)
    return bars


def _help(folder: Path) -> Bar:
    command = (str(Path(sys.executable).parent / "torchmn"), "--help")
    bar = median_bar("torchmn --help", [_run(command, folder) for _ in range(NUM_RUNS)], "s")
    bar.limit, bar.holds = f"<= {HELP_S}", bar.value <= HELP_S
    return bar


def _run(command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> float:
    """Seconds of a command from its start to its end."""
    more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    started = time.perf_counter()
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **more, **(env or {})},
        cwd=folder,
    )
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
