"""How long does an elastic job pause when a host is lost, and how many steps are lost?

    make bench-elastic ARGS="--losses 5"

Two test hosts with a worker each (`tests.netlab`, needs root), a checkpoint every 5
steps of about 50 ms. *Killed*: all processes of the second host at once. *Cut off*: its link goes
down, which the other one detects after 8 s of silence. The time is from the loss to the end of the
first step of the remaining worker. Starting Python and importing torch is most of it, so it is
measured separately by a process that only imports them.
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

SAVE_PERIOD = 5
LIMIT_S = 180.0
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
        if step % {SAVE_PERIOD} == 0:
            checkpointer.save(step, state)
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
            wait_for(lambda: len(steps(folder, 1, 1)) > 2 * SAVE_PERIOD + 2, process, folder)
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


def imports() -> list[float]:
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torchmn, torch"], check=True)
        spent.append(time.perf_counter() - began)
    return [statistics.median(spent)]


if __name__ == "__main__":
    sys.exit(main())
