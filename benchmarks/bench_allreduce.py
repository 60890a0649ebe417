"""All-reduce of 4 KB to 64 MB, per transport, and the raw call of its library, on 2 workers."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from record import Bar, median_bar, ratio_bar, report, run_workers

SIZES = {"4 KB": 4096, "1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
REPEATS = {"4 KB": 400, "1 MB": 100, "16 MB": 41, "64 MB": 25}
LATENCY_LIMIT_US = 15


def worker(transport: str, out: str) -> None:
    """Time the raw call, our transport, the user's `allreduce` and shared memory, in turn."""
    import torch

    import torchmn

    torch.set_num_threads(1)
    comm = torchmn.create_communicator("flat", transport=transport)  # the transport as it is
    shared = torchmn.create_communicator("single_node", transport=transport)
    raw = _raw_mpi() if transport == "mpi" else _raw_gloo(comm)
    samples: dict[str, dict[str, list[float]]] = {}
    for label, nbytes in SIZES.items():
        tensor = torch.ones(nbytes // 4)
        calls: dict[str, Callable[[], object]] = {
            "raw": lambda tensor=tensor: raw(tensor),
            "ours": lambda tensor=tensor: comm.sum_(tensor),
            "allreduce()": lambda tensor=tensor: comm.allreduce(tensor),
            "shared memory": lambda tensor=tensor: shared.sum_(tensor),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(REPEATS[label]):
            for name, call in calls.items():
                tensor.fill_(1)
                comm.barrier()
                started = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - started)
        samples[label] = times
    if comm.rank == 0:
        Path(out).write_text(json.dumps(samples))
    comm.finalize()


def _raw_mpi() -> Callable:
    from mpi4py import MPI

    return lambda tensor: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())


def _raw_gloo(comm) -> Callable:
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
    return dist.all_reduce


def main() -> int:
    bars: list[Bar] = []
    for transport, backend in (("mpi", "mpi"), ("torch", "gloo")):
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "samples.json")
            run_workers(__file__, 2, backend, transport, out)
            samples = json.loads(Path(out).read_text())
        for label, times in samples.items():
            for side in times:
                milliseconds = [1e3 * t for t in times[side]]
                bars.append(median_bar(f"{backend} {label}: {side}", milliseconds, "ms"))
            if label == "4 KB":
                extra = [1e6 * (a - b) for a, b in zip(times["ours"], times["raw"], strict=True)]
                bar = median_bar(f"{backend} {label}: ours - raw", extra, "us")
                bar.limit, bar.holds = f"<= {LATENCY_LIMIT_US}", bar.value <= LATENCY_LIMIT_US
                bars.append(bar)
            else:
                name = f"{backend} {label}: time, ours / raw"
                bars.append(ratio_bar(name, times["ours"], times["raw"], "<= 1.10"))
                name = f"{backend} {label}: time, shared memory / raw"
                bars.append(ratio_bar(name, times["shared memory"], times["raw"], "<= 1.10"))
    return report("allreduce", bars)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        raise SystemExit(main())
