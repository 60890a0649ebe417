"""MNIST (60,000 / 10,000) to at least 99.0 % in 5 epochs with 1, 2 and 4 workers.

`examples/mnist/train_mnist.py` with its defaults: linear scaling of the learning rate and warm-up,
seed 0. The images are those of TORCHMN_TEST_DATA, or a folder given as the first argument.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from record import Bar, report

SCRIPT = Path(__file__).parents[1] / "examples" / "mnist" / "train_mnist.py"
NUM_WORKERS = (1, 2, 4)
LIMIT = 0.990


def accuracy_after_five_epochs(num_workers: int, data_root: str) -> tuple[float, float]:
    """(validation accuracy of the last epoch, seconds of training)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torchmn", "run", "-n", str(num_workers)]
        command += ["--log-dir", f"{folder}/logs", str(SCRIPT), "--data-root", data_root]
        command += ["--epoch", "5", "--no_snapshot", "--out", folder]
        subprocess.run(command, check=True)
        last = json.loads((Path(folder) / "log").read_text())[-1]
    return last["validation/main/accuracy"], last["elapsed_time"]


def main() -> int:
    data_root = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("TORCHMN_TEST_DATA")
    if data_root is None:
        print("bench_mnist: give the folder of MNIST, or set TORCHMN_TEST_DATA.", file=sys.stderr)
        return 2
    bars: list[Bar] = []
    for num_workers in NUM_WORKERS:
        accuracy, seconds = accuracy_after_five_epochs(num_workers, data_root)
        name = f"{num_workers} workers: accuracy after 5 epochs"
        bars.append(Bar(name, accuracy, "", f">= {LIMIT}", accuracy >= LIMIT, [accuracy]))
        bars.append(Bar(f"{num_workers} workers: time", seconds, "s", samples=[seconds]))
    return report("mnist", bars)


if __name__ == "__main__":
    raise SystemExit(main())
