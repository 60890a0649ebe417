"""Ranks of this host whose connections have a limited rate, where there can be no test hosts.

Linux paces each TCP connection that has ``SOMAX_PACING_RATE`` by itself, without any right. The
ranks are given a topology in which each is alone on its host, so that they do not use shared
memory.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rank_processes import Job, request

from torchmn.cluster.network import rate_bytes_per_s

VARIABLE = "BENCH_RANKS_ARE_PACED"
PACE = "pace"
MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)  # <asm-generic/socket.h>
_NO_LIMIT = 2**32 - 1  # as the kernel writes it


@dataclass(frozen=True)
class _Host:
    """This host, in the place of a test host."""

    _job: Job
    name = socket.gethostname()
    interface = "lo"

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str], stdin: int, stdout: int
    ) -> subprocess.Popen[str]:
        variables = {**env, VARIABLE: "1"}
        process = subprocess.Popen(command, env=variables, stdin=stdin, stdout=stdout, text=True)
        self._job.append(process)
        return process


@dataclass
class PacedRanks:
    """In the place of a lab, for `start_ranks`; made by `paced_ranks`."""

    num_ranks: int
    _job: Job = field(default_factory=list)

    @property
    def hosts(self) -> tuple[_Host, ...]:
        return (_Host(self._job),) * self.num_ranks

    def set_rate(self, rate: str | None) -> None:
        """Limit the rate of the connections that the running ranks have."""
        running = [process for process in self._job if process.poll() is None]
        request(running, PACE, _NO_LIMIT if rate is None else int(rate_bytes_per_s(rate)), "-")


@contextmanager
def paced_ranks(num_ranks: int) -> Iterator[PacedRanks]:
    ranks = PacedRanks(num_ranks)
    try:
        yield ranks
    finally:
        for process in ranks._job:
            process.kill()
            process.wait()


def pace(bytes_per_s: int) -> int:
    """Limit the rate of each TCP connection of this process; returns how many there are."""
    num_paced = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.setsockopt(
                    socket.SOL_SOCKET, MAX_PACING_RATE, bytes_per_s.to_bytes(4, sys.byteorder)
                )
                num_paced += 1
    return num_paced
