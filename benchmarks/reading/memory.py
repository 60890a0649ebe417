"""Reads one sweep of a CTF file and prints how much memory that took at most, in bytes.

memory.py FILE DIMENSION WINDOW_IN_CHUNKS
"""

from __future__ import annotations

import sys
from pathlib import Path

from torchmn.readers import CTFDeserializer, MinibatchSource, StreamDef


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def sweep(path: str, dimension: int, window: int) -> int:
    streams = {"x": StreamDef(shape=dimension)}
    source = MinibatchSource(
        CTFDeserializer(path, streams), max_sweeps=1, randomization_window_in_chunks=window
    )
    samples = 0
    while minibatch := source.next_minibatch(4096):
        samples += minibatch[source["x"]].num_samples
    return samples


def main() -> None:
    path, small, dimension, window = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    sweep(small, dimension, window)  # what the libraries and the compiler take
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    samples = sweep(path, dimension, window)
    print(samples, resident("VmHWM") - before)


if __name__ == "__main__":
    main()
