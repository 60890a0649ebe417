"""``python -m torchmn.doctor.loading_main SECONDS SCRIPT ARGS...``: the rate of its first loader.

Prints `LoadingFacts` as a line and exits. Nothing of the script after its first batch runs.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from torchmn.control.codec import encode
from torchmn.doctor.data_loading import LoadingFacts

_MAX_FIRST_S = 60.0


def main(args: list[str]) -> None:
    """Run the script until it asks a DataLoader for an iterator."""
    seconds, script = float(args[0]), args[1]
    iterate = DataLoader.__iter__

    def measure(loader: DataLoader[Any]) -> Iterator[Any]:
        _print(_measure(loader, iterate, seconds))
        os._exit(0)

    DataLoader.__iter__ = measure  # type: ignore[method-assign,assignment]
    sys.argv = args[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    _print(LoadingFacts(error="the script ended without iterating over a DataLoader"))


def _measure(loader: DataLoader[Any], iterate: Any, seconds: float) -> LoadingFacts:
    """Take batches for ``seconds``, beginning again at the end of the data."""
    num_samples = num_batches = 0
    started = time.perf_counter()
    first_batch_s = 0.0
    counted_from = end = started + _MAX_FIRST_S
    while time.perf_counter() < end:
        is_empty = True
        for batch in iterate(loader):
            is_empty = False
            now = time.perf_counter()
            if not first_batch_s:
                first_batch_s, counted_from, end = now - started, now, now + seconds
                continue
            num_batches += 1
            num_samples += _size(batch, loader.batch_size or 1)
            if now > end:
                break
        if is_empty:
            return LoadingFacts(error="the DataLoader is empty")
    took_s = time.perf_counter() - counted_from
    return LoadingFacts(
        samples_per_s=num_samples / took_s,
        batches_per_s=num_batches / took_s,
        first_batch_s=first_batch_s,
        num_workers=loader.num_workers,
    )


def _size(batch: Any, usual: int) -> int:
    """The first dimension of the first tensor in it."""
    while isinstance(batch, list | tuple | dict) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else usual


def _print(facts: LoadingFacts) -> None:
    print("\n" + encode(facts).decode(), end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
