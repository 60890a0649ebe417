"""Whole jobs of ``torchmn run`` whose scripts import no torch: start, hang, failure, clean end.

Agents, connections, reports and the ends of processes are the real ones. In place of a first
collective the ranks wait until each has written a byte into one file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

MARK = "TORCHMN_BENCH_SCALE"
LIMIT_S = 5.0
"""Of joining, in the job that hangs."""
SCRIPT = f"""
import os, sys, time
from torchmn.run.monitor import script_monitor
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
kind, path = sys.argv[1:]
with open(path, "ab", buffering=0) as file:
    file.write(b".")
while os.path.getsize(path) < size:
    time.sleep(0.2)
if rank == 0:
    with open(path + ".met", "w") as file:
        file.write(repr(time.time()))
if kind == "hang" and rank != 1:
    script_monitor.current().joining({LIMIT_S}, begins=True)
    time.sleep(600)
if kind == "hang":
    time.sleep(600)
if kind == "failure" and rank == 1:
    while not os.path.exists(path + ".met"):  # or the job would end before rank 0 has written it
        time.sleep(0.2)
    raise ValueError("planted")
if kind == "failure":
    time.sleep(600)
"""


def run_job(num_ranks: int, kind: str) -> dict[str, float]:
    """Seconds of one job from its start until all ranks have met, and from then to its end.

    ``kind`` is "end", "hang" or "failure". Also the memory and the processes at its peak, and how
    many processes it left.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        began = time.time()
        command = (
            sys.executable,
            "-m",
            "torchmn",
            "run",
            "-n",
            str(num_ranks),
            "--backend",
            "gloo",
        )
        with (folder / "output").open("w") as output:
            job = subprocess.Popen(
                [*command, "script.py", kind, str(folder / "ranks")],
                cwd=folder,
                env={**os.environ, MARK: mark, "TORCHMN_RECORD": "off"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            met = folder / "ranks.met"
            while job.poll() is None and not met.exists():
                time.sleep(0.2)
            used = peak_memory(mark) if job.poll() is None else {}
            status = job.wait()
        ended = time.time()
        text = (folder / "output").read_text(errors="replace")
        if not met.exists():
            raise RuntimeError(f"{num_ranks} ranks did not meet, status {status}:\n{text[-2000:]}")
        found = {"start_s": float(met.read_text()) - began, "end_s": ended - float(met.read_text())}
        time.sleep(0.5)
        left = processes(mark)
        is_named = {"end": status == 0, "hang": "rank 1 did not reach it" in text,
                    "failure": "rank 1" in text and "planted" in text}[kind]  # fmt: skip
        return {**found, **used, "left": len(left), "is_named": float(is_named)}


def processes(mark: str) -> list[psutil.Process]:
    """The processes of a job."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def peak_memory(mark: str) -> dict[str, float]:
    """Processes of a job, and their memory, pages that several share counted once in all."""
    total, count = 0, 0
    for process in processes(mark):
        try:
            total += process.memory_full_info().pss
            count += 1
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return {"num_processes": count, "memory_bytes": total}
