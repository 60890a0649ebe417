"""Communicators of many processes that are forked from one which has imported torch.

So 256 ranks take the memory that they change, and no time to import. They share the machine's
cores: seconds are those of all ranks one after another on them.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable

import torch

import torchmn
from torchmn.control.ports import reserve_port
from torchmn.transports import base, gloo_nccl

NUM_TRIALS = 3
LIMIT_S = 170.0


def run_exchange(num_ranks: int, *, connects_all: bool, name: str = "flat") -> dict[str, float]:
    """Seconds of creating, of collectives and of ending, and sockets: of the slowest rank.

    ``connects_all``: as with few ranks, all connected with each other and gathering directly.
    """
    keeper, port = reserve_port()
    torch.set_num_threads(1)
    reading, writing = os.pipe()
    began = time.time()
    children = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reading)
                found = _rank(rank, num_ranks, port, connects_all, name, began)
                os.write(writing, json.dumps(found).encode() + b"\n")
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    os.close(writing)
    text = b""
    deadline = time.monotonic() + LIMIT_S
    os.set_blocking(reading, False)
    try:
        while text.count(b"\n") < num_ranks and time.monotonic() < deadline:
            try:
                chunk = os.read(reading, 1 << 16)
            except BlockingIOError:
                time.sleep(0.05)
                continue
            if not chunk:
                break
            text += chunk
    finally:
        for pid in children:
            if text.count(b"\n") < num_ranks:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(reading)
        keeper.close()
    rows = [json.loads(line) for line in text.splitlines()]
    if len(rows) < num_ranks:
        raise RuntimeError(f"{num_ranks - len(rows)} of {num_ranks} ranks did not answer")
    found = {key: max(row[key] for row in rows) for key in rows[0]}
    found["sockets_of_all"] = sum(row["sockets"] for row in rows)
    found["private_bytes"] = statistics.mean(row["private_bytes"] for row in rows)
    return found


def _rank(
    rank: int, num_ranks: int, port: int, connects_all: bool, name: str, began: float
) -> dict[str, float]:
    if connects_all:
        base.MAX_DIRECT_RANKS = gloo_nccl.MAX_DIRECT_RANKS = 1 << 30
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHMN_RECORD": "off",
    }
    forked_s = time.time() - began
    comm = torchmn.create_communicator(name, timeout_s=LIMIT_S)
    created_s = time.time() - began
    numbers = torch.ones(1)
    comm.allreduce(numbers)
    found = {"forked_s": forked_s, "created_s": created_s, "first_s": time.time() - began}

    def timed(key: str, call: Callable[[], object]) -> None:
        seconds = []
        for _ in range(NUM_TRIALS):
            comm.barrier()
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        found[key] = statistics.median(seconds)

    timed("barrier_s", comm.barrier)
    timed("allreduce_8_bytes_s", lambda: comm.allreduce(torch.ones(2)))
    timed("allgather_obj_s", lambda: comm.allgather_obj(rank))
    timed("gather_obj_2_kb_s", lambda: comm.gather_obj("x" * 2048))
    timed("bcast_obj_s", lambda: comm.bcast_obj("x" * 100))
    block = torch.ones(1 << 18)
    timed("allreduce_1_mb_s", lambda: comm.allreduce(block))
    found["sockets"] = float(_num_sockets())
    found["threads"] = float(len(os.listdir("/proc/self/task")))
    found["private_bytes"] = float(_private_bytes())
    comm.barrier()
    ending = time.time()
    comm.finalize()
    found["finalize_s"] = time.time() - ending
    found["total_s"] = time.time() - began
    return found


def _num_sockets() -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except OSError:
            continue
    return count


def _private_bytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        rows = dict(line.split(":") for line in file.read().splitlines()[1:])
    return sum(int(rows[key].split()[0]) for key in ("Private_Clean", "Private_Dirty")) * 1024
