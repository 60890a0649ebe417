"""A plain script that trains on two CPU devices: with ``unguarded`` as it must not be written.

With ``large`` the data are more than a pipe holds.
"""

from __future__ import annotations

import sys
import time

from setups import Line, points, sgd

import torchmn
from torchmn.training import MultiprocessParallelUpdater


def main() -> None:
    model = Line()
    num_samples = 100_000 if "large" in sys.argv else 8
    parts = torchmn.split_dataset_n_random(points(num_samples), 2, seed=0)
    iterators = [torchmn.SerialIterator(part, 4) for part in parts]
    devices = {"main": "cpu", "gpu1": "cpu"}
    updater = MultiprocessParallelUpdater(iterators, sgd(model), model, devices=devices)
    updater.update()
    print(f"worker {updater._workers[0].process.pid}", flush=True)
    time.sleep(600)


if __name__ == "__main__" or "unguarded" in sys.argv:
    torchmn.run_main(main)
