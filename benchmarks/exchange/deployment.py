"""Starts the workers of a line on test hosts: one set for all sides of PyTorch, one for CNTK.

Every worker connects to a socket of this process and waits there for commands.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rank_processes import one_core_each
from tests.netlab import Host, Lab, netlab

from exchange.table import SIDES, Line, Runtime
from torchmn.run.backend import find_mpirun

SCRIPT = Path(__file__).parents[1] / "bench_exchange.py"
CNTK_SCRIPT = Path(__file__).parent / "cntk_worker.py"
CNTK = Path(__file__).parents[2] / ".peers" / "cntk"
PORT = 29500
START_TIMEOUT_S = 120.0
REPLY_TIMEOUT_S = 400.0
KEEP_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""Have malloc return no memory to the kernel. The second value is what glibc arrives at by itself
after some steps, but setting the first one turns that off."""


class WorkersLostError(Exception):
    """A worker died, did not reply in time, or a command failed on it."""


class Workers:
    """The workers of one runtime, ordered by rank."""

    def __init__(self, streams: list[Any], folder: Path) -> None:
        self._streams = streams
        self._folder = folder

    def request(self, command: str, **arguments: object) -> list[dict[str, Any]]:
        """Send all workers the same command; return their replies. Raises WorkersLostError."""
        return self.request_each([{"command": command, **arguments}] * len(self._streams))

    def request_each(self, commands: list[dict[str, object]]) -> list[dict[str, Any]]:
        """Send a command to each worker. Raises WorkersLostError with the ends of their logs."""
        replies: list[dict[str, Any]] = []
        try:
            for stream, command in zip(self._streams, commands, strict=True):
                stream.write(json.dumps(command) + "\n")
                stream.flush()
            for stream in self._streams:
                line = stream.readline()
                if not line:
                    raise OSError(f"worker {len(replies)} died")
                replies.append(json.loads(line))
        except OSError as error:
            raise WorkersLostError(f"{error} {log_tails(self._folder)}") from error
        for reply in replies:
            if "failed" in reply:
                raise WorkersLostError(reply["failed"].strip())
        return replies


class Deployment:
    """Test hosts and the workers on them."""

    def __init__(self, lab: Lab, workers: Mapping[Runtime, Workers]) -> None:
        self._lab = lab
        self._workers = workers

    def workers_of(self, side: str) -> Workers:
        """The workers that run this side."""
        return self._workers[SIDES[side].runtime]

    def set_rate(self, rate: str | None) -> None:
        """Change the rate of all links."""
        self._lab.set_rate(rate)

    def bytes_over_links(self) -> list[int]:
        """What each host has sent, then what each has received, so far."""
        hosts = self._lab.hosts
        return [
            *(self._lab.bytes_sent(host) for host in hosts),
            *(self._lab.bytes_received(host) for host in hosts),
        ]


def why_missing(runtime: Runtime) -> str:
    """Why the workers of a runtime cannot be started here, empty if they can."""
    if runtime == "cntk" and not (CNTK / "run").exists():
        return "CNTK 2.7 was not found in .peers: run scripts/setup_peers.sh"
    return ""


def log_tails(folder: Path) -> str:
    """The ends of the logs."""
    texts = [path.read_text().strip() for path in sorted(folder.glob("*.log"))]
    return " | ".join(text[-600:] for text in texts if text)


@contextmanager
def deployed(line: Line, runtimes: Collection[Runtime]) -> Iterator[Deployment]:
    """Test hosts with the workers of this line, connected to each other."""
    with ExitStack() as stack:
        lab = stack.enter_context(netlab(line.num_hosts, line.rate, cores=_cores_of(line)))
        yield Deployment(
            lab, {runtime: _start(runtime, line, lab, stack) for runtime in sorted(runtimes)}
        )


def _start(runtime: Runtime, line: Line, lab: Lab, stack: ExitStack) -> Workers:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(str(folder / "commands"))
    server.listen()
    server.settimeout(START_TIMEOUT_S)
    if runtime == "cntk":
        _start_cntk(line, lab, folder)
    elif line.launcher == "mpirun":
        _start_by_mpirun(line, lab, folder)
    else:
        _start_one_by_one(line, lab, folder)
    streams: dict[int, Any] = {}
    for _ in range(line.num_workers):
        try:
            connection, _ = server.accept()
        except TimeoutError:
            raise WorkersLostError(f"not all workers have connected: {log_tails(folder)}") from None
        connection.settimeout(REPLY_TIMEOUT_S)
        stack.callback(connection.close)
        stream = stack.enter_context(connection.makefile("rw"))
        streams[json.loads(stream.readline())["rank"]] = stream
    workers = Workers([streams[rank] for rank in range(line.num_workers)], folder)
    init_method = f"tcp://{lab.hosts[0].name}:{PORT + 1}"
    workers.request_each(
        [
            {"command": "init", "rank": rank, "size": line.num_workers, "init_method": init_method}
            for rank in range(line.num_workers)
        ]
    )
    return workers


def _cores_of(line: Line) -> list[set[int]]:
    """One core per host, assigned round-robin; a single host has all of them."""
    return [os.sched_getaffinity(0)] if line.num_hosts == 1 else one_core_each(line.num_hosts)


def _environment(line: Line) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0)) if line.num_hosts == 1 else []
    return {
        **os.environ,
        **KEEP_HEAP,
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "MASTER_ADDR": "n0",
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": Host.interface,
        "BENCH_CORES": ",".join(map(str, cores)),
    }


def _spawn(host: Host, command: list[str | Path], env: dict[str, str], log: Path) -> None:
    with log.open("w") as stream:
        host.popen(command, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)


def _start_one_by_one(line: Line, lab: Lab, folder: Path) -> None:
    """One process per rank with the variables that torchrun would set."""
    for rank in range(line.num_workers):
        host = lab.hosts[rank // line.workers_per_host]
        env = {
            **_environment(line),
            "RANK": str(rank),
            "WORLD_SIZE": str(line.num_workers),
            "LOCAL_RANK": str(rank % line.workers_per_host),
            "LOCAL_WORLD_SIZE": str(line.workers_per_host),
            "OWN_ADDRESS": host.address,
        }
        command = [sys.executable, SCRIPT, "worker", folder / "commands"]
        _spawn(host, command, env, folder / f"rank{rank}.log")


def _start_by_mpirun(line: Line, lab: Lab, folder: Path) -> None:
    """By Open MPI on a single host."""
    mpirun = find_mpirun(os.environ)
    if mpirun is None:
        raise WorkersLostError("mpirun was not found: pip install 'torchmn[mpi]'")
    env = {**_environment(line), "OWN_ADDRESS": lab.hosts[0].address}
    command: list[str | Path] = [mpirun, "--allow-run-as-root", "--bind-to", "none"]
    command += ["-n", str(line.num_workers), sys.executable, SCRIPT, "worker", folder / "commands"]
    _spawn(lab.hosts[0], command, env, folder / "mpirun.log")


def _start_cntk(line: Line, lab: Lab, folder: Path) -> None:
    """By CNTK's own mpirun on the first host, with the remote shell agent of the lab."""
    command: list[str | Path] = [
        *(CNTK / "run", "mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none"),
        *("-n", str(line.num_workers), "--hostfile", lab.hostfile(line.workers_per_host)),
        *("--mca", "plm_rsh_agent", lab.rsh_agent, "--mca", "orte_launch_agent", CNTK / "orted"),
        *("--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", Host.interface),
        *("--mca", "pml", "ob1", "--mca", "oob_tcp_if_include", Host.interface),
        *("-x", "OMP_NUM_THREADS", "-x", "LD_LIBRARY_PATH", "-x", "PATH"),
        *("python", CNTK_SCRIPT, folder / "commands"),
    ]
    _spawn(lab.hosts[0], command, _environment(line), folder / "mpirun.log")
