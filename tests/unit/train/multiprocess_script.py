"""A plain script that trains on two CPU devices; ``unguarded`` as it must not be written."""

import sys
import time
from pathlib import Path

import psutil

import torchmn

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from setups import Line, points, sgd


def main() -> None:
    model = Line()
    parts = torchmn.split_dataset_n_random(points(8), 2, seed=0)
    iterators = [torchmn.SerialIterator(part, 4) for part in parts]
    devices = {"main": "cpu", "gpu1": "cpu"}
    updater = torchmn.MultiprocessParallelUpdater(iterators, sgd(model), model, devices=devices)
    updater.update()
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    time.sleep(600)


if __name__ == "__main__" or "unguarded" in sys.argv:
    torchmn.run_main(main)
