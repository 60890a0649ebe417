"""A worker: executes commands from a socket, at the same time as the other workers.

Between commands it is blocked in a read, so that it uses no processor and no link meanwhile.
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

OPTIONAL = ("torchft", "horovod", "mpi4py")
"""A side that cannot import these was not built; any other error is a fault of the benchmark."""


def serve(address: str) -> None:
    """Execute commands until the socket is closed. Commands and replies are lines of JSON."""
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
                os._exit(0)  # process groups of peers would wait for each other in an orderly exit
            command = json.loads(line)
            reply = _COMMANDS[command.pop("command")](runners, **command)


def _init(
    runners: dict[str, sides.Runner], rank: int, size: int, init_method: str
) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size)
    return {}


def _build(runners: dict[str, sides.Runner], side: str) -> dict[str, Any]:
    """Build a side and warm it up. The reply has its notes and its plan, or why there are none."""
    from torchmn.errors import UnsupportedError

    try:
        runner = sides.build(SIDES[side])
    except UnsupportedError as error:
        return {"not_built": f"{type(error).__name__}: {error}"}
    except ImportError as error:
        if (error.name or "").split(".")[0] not in OPTIONAL:
            return {"failed": traceback.format_exc()}
        return {"not_built": f"{type(error).__name__}: {error}"}
    except Exception:
        return {"failed": traceback.format_exc()}
    try:
        for _ in range(SIDES[side].warm_up_steps):
            runner.step()
        runner.drain()
    except Exception:
        return {"failed": traceback.format_exc()}
    runners[side] = runner
    return {"notes": runner.notes(), "plan": runner.plan()}


def _turn(
    runners: dict[str, sides.Runner], side: str, lead_steps: int, steps: int
) -> dict[str, Any]:
    """Time some steps. The reply has wall-clock and processor seconds per step, and page faults."""
    runner = runners[side]
    busy = time.process_time()
    try:
        runner.resume()
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


_COMMANDS = {"init": _init, "build": _build, "turn": _turn}
