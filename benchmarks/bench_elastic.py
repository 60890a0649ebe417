"""How long does an elastic job pause when a host is lost, how many steps are lost, and what does a
checkpoint copy in memory cost?

    make bench-elastic ARGS="--losses 5"

Two test hosts with a worker each (`tests.netlab`, needs root), a copy in memory every 5
steps of about 50 ms. *Killed*: all processes of the second host at once. *Cut off*: its link goes
down, which the other one detects after 8 s of silence. The time is from the loss to the end of the
first step of the remaining worker. Starting Python and importing torch is most of it, so it is
measured separately by a process that only imports them.

The time of a copy is that of the rank that sends it: when it returns, the bytes are held by a
process of its host and of the next host. All hosts are this machine, so the network is its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from record import Bar, median_bar, report
from tests.netlab import Lab, netlab

import torchmn

COPY_PERIOD = 5
LIMIT_S = 180.0
SIZES_MB = (1, 16, 64, 256)
NUM_COPIES = 5
TRAINING = f"""
import json, os, sys, time, torch, torchmn
comm = torchmn.create_communicator("naive", timeout_s=30)
model = torch.nn.Linear(1000, 1000)
sgd = torch.optim.SGD(model.parameters(), 0.01)
optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
checkpointer = torchmn.create_multi_node_checkpointer(comm, "checkpoints", "x")
state = {{"model": model, "optimizer": optimizer}}
step = checkpointer.resume(state)
number = os.environ["TORCHMN_ROUND"]
with open(f"steps-{{number}}-{{comm.rank}}", "a", buffering=1) as log:
    while True:
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).square().mean().backward()
        optimizer.step()
        step += 1
        log.write(json.dumps([step, time.time(), os.getpid()]) + "\\n")
        time.sleep(0.05)
        if step % {COPY_PERIOD} == 0:
            checkpointer.save_in_memory(step, state)
"""
COPYING = f"""
import json, os, time, torchmn
from torchmn.control.checkpoint_replicas.client import ReplicaClient
comm = torchmn.create_communicator("naive")
copies = ReplicaClient.of(os.environ)
seconds = {{}}
for size_mb in {SIZES_MB}:
    part = bytearray(size_mb << 20)
    for step in range({NUM_COPIES} + 1):
        name = f"{{size_mb}}-{{step}}"
        comm.barrier()
        began = time.perf_counter()
        is_held_twice = copies.put(step, name, f"rank{{comm.rank}}", [part])
        spent = time.perf_counter() - began
        assert is_held_twice == (len(set(comm.topology.hosts)) > 1)
        if step:
            seconds.setdefault(size_mb, []).append(spent)
if comm.rank == 0:
    with open("copies.json", "w") as file:
        json.dump(seconds, file)
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=int, default=3, help="number of losses of each kind")
    losses = parser.parse_args().losses
    bars: list[Bar] = []
    with netlab(2, None) as lab:
        for kind in ("killed", "cut off"):
            found = [lose(lab, kind) for _ in range(losses)]
            bars.append(median_bar(f"{kind}: loss to next step", [s for s, _ in found], "s"))
            bars.append(median_bar(f"{kind}: steps lost", [n for _, n in found], "steps"))
        for name, hosts in (("both hosts", "n0:1,n1:1"), ("one host", "n0:1")):
            for size, seconds in copy(lab, hosts).items():
                per_mb = [1e3 * each / int(size) for each in seconds]
                bars.append(median_bar(f"copy of {size} MB held by {name}", per_mb, "ms/MB"))
    bars.append(median_bar("python -c 'import torchmn, torch'", imports(), "s"))
    return report("elastic", bars)


def start(lab: Lab, folder: Path, script: str, *options: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(script)
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(torchmn.__file__).parents[1]),
        "TORCHMN_RSH": str(lab.rsh_agent),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torchmn", "run", "--backend", "gloo", "--log-dir", "logs"]
    with open(folder / "output", "w") as output:
        return lab.hosts[0].popen(
            [*command, *options, "script.py"], env=env, cwd=folder, stdout=output, stderr=output
        )


def lose(lab: Lab, kind: str) -> tuple[float, int]:
    """Seconds from the loss of a host to the next step, and how many steps were lost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ("--elastic", "1:2", "--hosts", "n0:1,n1:1")
        process = start(lab, folder, TRAINING, *options)
        link = ["ip", "link", "set", lab.hosts[1].interface]
        try:
            wait_for(lambda: len(steps(folder, 1, 1)) > 2 * COPY_PERIOD + 2, process, folder)
            node = psutil.Process(steps(folder, 1, 1)[0][2]).parent().parent()
            lost = [node, *node.children(recursive=True)]
            lost_at = time.time()
            if kind == "killed":
                for each in lost:
                    each.kill()
            else:
                lab.hosts[1].run([*link, "down"])
            wait_for(lambda: steps(folder, 2, 0), process, folder)
            first, at, _ = steps(folder, 2, 0)[0]
            return at - lost_at, int(steps(folder, 1, 0)[-1][0] - (first - 1))
        finally:
            lab.hosts[1].run([*link, "up"])
            process.terminate()
            process.wait(60)


def steps(folder: Path, number: int, rank: int) -> list[list[float]]:
    path = folder / f"steps-{number}-{rank}"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def wait_for(holds, process: subprocess.Popen[str], folder: Path) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit((folder / "output").read_text())
        time.sleep(0.01)


def copy(lab: Lab, hosts: str) -> dict[str, list[float]]:
    """Seconds of each copy in memory, by size in MB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_hosts = hosts.count(",") + 1
        process = start(
            lab, folder, COPYING, "--elastic", f"{num_hosts}:{num_hosts}", "--hosts", hosts
        )
        if process.wait(LIMIT_S):
            raise SystemExit((folder / "output").read_text())
        found: dict[str, list[float]] = json.loads((folder / "copies.json").read_text())
        return found


def imports() -> list[float]:
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torchmn, torch"], check=True)
        spent.append(time.perf_counter() - began)
    return [statistics.median(spent)]


if __name__ == "__main__":
    sys.exit(main())
