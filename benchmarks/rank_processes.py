"""Ranks that train on request and print what they measured: for sides that take turns.

A rank prints the JSON text "ready" once, and then a line of JSON for each line of its input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

Job = list[subprocess.Popen[str]]


def one_core_each(num_hosts: int) -> list[set[int]]:
    """The cores of each test host, in turn, of those that this process may use."""
    own = sorted(os.sched_getaffinity(0))
    return [{own[index % len(own)]} for index in range(num_hosts)]


def start_ranks(
    words: Sequence[str],
    lab: Any,
    *,
    ranks_per_host: int = 1,
    cores: Sequence[set[int]] = (),
    port: int = 29500,
    variables: Mapping[str, str] | None = None,
) -> Job:
    """Start a script on every test host, as torchrun would; the ranks are killed with the lab.

    ``words`` are the script and its arguments. Without a lab all ranks are on this host, each on
    its own of ``cores``.
    """
    size = ranks_per_host * (len(lab.hosts) if lab else 1)
    job = []
    for rank in range(size):
        env = {
            **os.environ,
            **(variables or {}),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": lab.hosts[0].name if lab else "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank % ranks_per_host),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
        }
        command = [sys.executable, *words]
        start: Callable[..., subprocess.Popen[str]] = partial(subprocess.Popen, text=True)
        if lab:
            host = lab.hosts[rank // ranks_per_host]
            env["GLOO_SOCKET_IFNAME"] = host.interface
            start = host.popen
        else:
            command = ["taskset", "-c", ",".join(map(str, cores[rank])), *command]
        job.append(start(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    for process in job:
        if process.stdout is None or process.stdout.readline() != '"ready"\n':
            raise RuntimeError(f"a rank of {list(words)} has ended with status {process.wait()}")
    return job


def request(job: Job, *words: object) -> list[dict[str, Any]]:
    """Give all ranks a line; what they printed."""
    for process in job:
        print(*words, file=process.stdin, flush=True)
    return [json.loads(process.stdout.readline()) for process in job if process.stdout]


def end_ranks(job: Job) -> None:
    """Let all ranks end by themselves."""
    for process in job:
        if process.stdin:
            process.stdin.close()
        process.wait()
