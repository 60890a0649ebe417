"""What `make train` does: train on real images with one worker, then with two, and compare.

It runs `cifar/train_cifar_multi_node.py` by `torchmn run` twice, with one core for each worker, so
that the two runs differ in the number of workers and in nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchmn.cluster.cpus import available_processors
from torchmn.control.script import run_main
from torchmn.errors import DataError, LaunchError

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "cifar" / "train_cifar_multi_node.py"
PREFIX = re.compile(r"^\[0\] ?")
QUIET_SHARE = 0.75  # of the time of their cores, starting included
THROUGHPUT = re.compile(r"^Throughput: ([0-9.]+) \[images/sec\.\]")


def main() -> None:
    options = parse_options()
    cores = separate_cores()
    out = Path(options.out)
    print("One core for each worker, so that the runs with one and with two workers compare.")
    print("Each worker trains with 32 images in a step, so that the losses of two workers, whose")
    print("steps have 64, differ from those of one. In examples/plain the batch is that of all")
    print("workers, and the losses are the same.")
    if len(cores) < 2:
        print("There is only one core here, which two workers share: expect no speed-up.")
    speeds, shares = [], []
    for num_workers in (1, 2):
        title = "one worker" if num_workers == 1 else "two workers"
        print(f"\n---- {title} ----", flush=True)
        folder = out / title.replace(" ", "-")
        if folder.exists():
            shutil.rmtree(folder)
        begin_s, begin_cpu_s = time.monotonic(), cpu_seconds_of_children()
        with only_on(cores[:num_workers]):
            speeds.append(train(num_workers, folder, options))
        used_s = cpu_seconds_of_children() - begin_cpu_s
        shares.append(used_s / (time.monotonic() - begin_s) / min(num_workers, len(cores)))
    speed_up = speeds[1] / speeds[0]
    print(f"\nSpeed-up of two workers over one: {speed_up:.2f}")
    print(f"Parallel efficiency: {speed_up / 2:.0%}")
    if min(shares) < QUIET_SHARE and len(cores) > 1:
        print(
            f"Other processes were busy here: the workers had {shares[0]:.0%} and {shares[1]:.0%} "
            "of their cores, so the speed-up says little. Run it again on a quiet machine."
        )
    print(f"Log, plots (loss.png, accuracy.png) and snapshots are in {out.resolve()}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data-root", help="folder with CIFAR-10; the digits of scikit-learn without it")
    add("--epoch", type=int, default=10, help="number of epochs")
    add("--out", default="result/make-train", help="folder for what the runs leave")
    return parser.parse_args()


def train(num_workers: int, folder: Path, options: argparse.Namespace) -> float:
    """Train and show what it prints; returns images per second. Raises LaunchError: it failed."""
    data = ["--dataset", "digits"]
    if options.data_root:
        data = ["--dataset", "cifar10", "--data-root", options.data_root]
    command = [sys.executable, "-m", "torchmn", "run", "-n", str(num_workers)]
    command += ["--log-dir", str(folder / "workers"), str(SCRIPT), "--model", "small", *data]
    command += ["--epoch", str(options.epoch), "--learnrate", "0.02", "--out", str(folder)]
    speed = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        for line in process.stdout or ():
            line = PREFIX.sub("", line.rstrip("\n"))
            print(line, flush=True)
            if found := THROUGHPUT.match(line):
                speed = float(found[1])
    if process.returncode != 0:
        raise LaunchError(f"Training with {num_workers} worker(s) ended with {process.returncode}.")
    if speed is None:
        raise DataError(f"{SCRIPT.name} printed no line with its throughput.")
    return speed


def cpu_seconds_of_children() -> float:
    """Processor time of all processes that we started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def environment() -> dict[str, str]:
    """This process's environment, but keeping bytecode, which setup has not written yet.

    Where workers cannot be bound to cores, each gets one thread.
    """
    kept = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    return kept if hasattr(os, "sched_setaffinity") else {**kept, "OMP_NUM_THREADS": "1"}


def separate_cores() -> list[int]:
    """The logical cores that we may use, one of each physical core first."""
    processors = available_processors()
    first_of: dict[tuple[int, int], int] = {}
    for logical, physical in zip(processors.logical, processors.physical, strict=True):
        first_of.setdefault(physical, logical)
    firsts = list(first_of.values())
    return firsts + [logical for logical in processors.logical if logical not in firsts]


@contextmanager
def only_on(cores: Sequence[int]) -> Iterator[None]:
    """Start processes on these cores only; `torchmn run` divides them among its workers."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    run_main(main)
