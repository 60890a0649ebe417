"""A worker: does what it is told over a socket, at the same time as the other workers.

Between orders it sleeps in a read, so that nothing of it spins or sends while others measure.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist

from exchange import sides
from exchange.table import SIDES


def serve(address: str) -> None:
    """Carry out orders until the socket closes. One line of JSON each way per order."""
    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    if cores := os.environ.get("BENCH_CORES"):
        own = [int(core) for core in cores.split(",")]
        os.sched_setaffinity(0, {own[rank % len(own)]})
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        stream = connection.makefile("rw")
        reply: dict[str, Any] = {"rank": rank}
        runners: dict[str, sides.Runner] = {}
        while True:
            stream.write(json.dumps(reply) + "\n")
            stream.flush()
            line = stream.readline()
            if not line:
                os._exit(0)  # groups of peers wait for each other at an orderly end
            order = json.loads(line)
            reply = _DO[order.pop("do")](runners, **order)


def _meet(runners: dict[str, sides.Runner], rank: int, size: int, meeting: str) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    return {}


def _build(runners: dict[str, sides.Runner], side: str) -> dict[str, Any]:
    """Build a side and let it run warm. The reply has its words and its plan, or why not."""
    from torchmn.errors import UnknownNameError, UnsupportedError

    told = SIDES[side]
    try:
        runner = sides.build(told)
    except (UnknownNameError, UnsupportedError, ImportError, AttributeError) as error:
        return {"not_built": f"{type(error).__name__}: {error}"}
    except Exception:
        return {"failed": traceback.format_exc()}
    try:
        for _ in range(told.warm_up_steps):
            runner.step()
        runner.drain()
    except Exception:
        return {"failed": traceback.format_exc()}
    runners[side] = runner
    return {"words": runner.words(), "plan": runner.plan()}


def _turn(
    runners: dict[str, sides.Runner], side: str, lead_steps: int, steps: int
) -> dict[str, Any]:
    """Time some steps. The reply: seconds of the clock and of the processor, per step."""
    runner = runners[side]
    busy = time.process_time()
    try:
        dist.barrier()
        for _ in range(lead_steps):
            runner.step()
        clock, main, every = time.perf_counter(), time.thread_time(), time.process_time()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(steps):
            runner.step()
        reply = {
            "seconds": (time.perf_counter() - clock) / steps,
            "main_thread_s": (time.thread_time() - main) / steps,
            "all_threads_s": (time.process_time() - every) / steps,
            "page_faults": (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / steps,
        }
        runner.drain()
        dist.barrier()
    except Exception:
        return {"failed": traceback.format_exc()}
    return {**reply, "busy_s": time.process_time() - busy}


_DO = {"meet": _meet, "build": _build, "turn": _turn}
