"""A lab: hosts that run commands, and links with a rate and counters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from tests.limits import limit
from tests.netlab.cleanup import END_S
from tests.netlab.construction import INTERFACE, MAX_HOSTS, HostParts, LabParts, port_of, shape
from tests.netlab.namespaces import call, entering, missing_requirement, pinned, tool
from torchmn.cluster.network import rate_bytes_per_s
from torchmn.errors import LaunchError, UsageError

_START = '[ -e "$0" ] && cd -- "$1" && shift && exec "$@"'
Stream = int | IO[Any] | None
ROOT = Path(__file__).parents[2]
"""The checkout: the supervisor imports `tests` wherever its owner runs."""


@dataclass(frozen=True, kw_only=True)
class Host(HostParts):
    """One test host, with its ``name`` and ``address``, which runs commands."""

    index: int
    _track: Callable[[subprocess.Popen[str]], None]

    interface = INTERFACE
    """The name of the network interface, for ``GLOO_SOCKET_IFNAME`` and the like."""

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        cores: Collection[int] | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> subprocess.Popen[str]:
        """Start a command on this host; it is killed with its descendants when the lab ends.

        ``env`` and ``cwd`` default to the caller's, ``cores`` (on which it may run) to the host's.
        The process is the command itself, not a shell; a command that is not found exits with 127.
        """
        cores = cores or self.cores
        process = subprocess.Popen(
            [
                *entering(self.namespaces),
                *(pinned(cores) if cores else ()),
                *("/bin/sh", "-c", _START, str(self.is_open), str(cwd or os.getcwd())),
                *map(str, command),
            ],
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )
        self._track(process)
        return process

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        cores: Collection[int] | None = None,
        check: bool = True,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host and return its result.

        Raises:
            LaunchError: it failed and ``check`` is true.
            subprocess.TimeoutExpired: it was killed after ``timeout_s``.
        """
        pipe = subprocess.PIPE
        null = subprocess.DEVNULL
        with self.popen(
            command, env=env, cwd=cwd, cores=cores, stdin=null, stdout=pipe, stderr=pipe
        ) as process:
            try:
                output, errors = process.communicate(timeout=limit(timeout_s))
            except BaseException:
                process.kill()
                raise
        if check and process.returncode:
            raise LaunchError(
                f"{' '.join(map(str, command))} ended with {process.returncode} on {self.name}: "
                f"{(errors or output).strip()}"
            )
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


class Lab:
    """Test hosts behind one switch, created by `netlab`."""

    def __init__(
        self, supervisor: subprocess.Popen[str], parts: LabParts, rate: str | None
    ) -> None:
        self.supervisor = supervisor
        self.folder = parts.folder
        self.rsh_agent = parts.folder / "enter"
        """Called by a launcher in place of ssh, or by hand: ``enter n0``."""
        self.hosts = tuple(
            Host(index=index, _track=self._track, **vars(host))
            for index, host in enumerate(parts.hosts)
        )
        self._switch = parts.switch
        self._rates = [rate] * len(self.hosts)
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def rates(self) -> tuple[str | None, ...]:
        """The rate of every host's link; None where there is no limit."""
        return tuple(self._rates)

    def set_rate(self, rate: str | None, *, hosts: Sequence[Host] | None = None) -> None:
        """Change the rate of all links, or of some hosts'; traffic continues.

        Raises UsageError: not a rate.
        """
        if rate is not None:
            rate_bytes_per_s(rate)
        chosen = self.hosts if hosts is None else hosts
        for host in chosen:
            shape(host.namespaces, [INTERFACE], rate)
            self._rates[host.index] = rate
        shape(self._switch, [port_of(host.index) for host in chosen], rate)

    def cut_link(self, host: Host) -> None:
        """Set the host's link down at the switch: packets are lost silently."""
        self._set_link(host, "down")

    def restore_link(self, host: Host) -> None:
        """Set the host's link up again."""
        self._set_link(host, "up")

    def _set_link(self, host: Host, state: Literal["up", "down"]) -> None:
        port = port_of(host.index)
        call([*entering(self._switch), tool("ip"), "link", "set", "dev", port, state])

    def bytes_sent(self, host: Host) -> int:
        """Bytes from the host to the switch since the lab was created.

        The kernel hands packets of up to 64 KB to the link and counts the headers of each once,
        so this is 0.1 to 0.2 percent above the payload of a bulk transfer over TCP. (What the
        link's rate limits are frames of 1500 bytes with a header each, 4 to 5 percent more.)
        """
        return self._counter(host, "rx")

    def bytes_received(self, host: Host) -> int:
        """Bytes from the switch to the host, counted as in `bytes_sent`."""
        return self._counter(host, "tx")

    def _counter(self, host: Host, direction: Literal["rx", "tx"]) -> int:
        port = port_of(host.index)
        words = [*entering(self._switch), tool("ip"), "-j", "-s", "link", "show", "dev", port]
        return int(json.loads(call(words))[0]["stats64"][direction]["bytes"])

    def hostfile(self, slots: int = 1) -> Path:
        """A file with all hosts and their slots, for mpirun and torchmn."""
        path = self.folder / f"hostfile-{slots}"
        path.write_text("".join(f"{host.name} slots={slots}\n" for host in self.hosts))
        return path

    def close(self) -> None:
        """Kill all processes on the hosts and remove them; a second call does nothing.

        Raises LaunchError: the supervisor failed.
        """
        for process in self._processes:
            process.kill()
        _end_supervisor(self.supervisor)
        for process in self._processes:
            process.wait()
        if self.supervisor.returncode and self.folder.exists():
            raise LaunchError(
                f"The supervisor of the test hosts exited with {self.supervisor.returncode} and "
                f"left {self.folder}. The next lab, or "
                "python -m tests.netlab down, removes it."
            )

    def _track(self, process: subprocess.Popen[str]) -> None:
        self._processes = [p for p in self._processes if p.poll() is None]
        self._processes.append(process)


def _end_supervisor(supervisor: subprocess.Popen[str]) -> None:
    for pipe in (supervisor.stdin, supervisor.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    # Forked children of this process may also hold the pipe open, so always send a signal.
    supervisor.terminate()
    try:
        supervisor.wait(timeout=limit(2 * END_S))
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


@contextmanager
def netlab(
    num_hosts: int = 2,
    rate: str | None = "1gbit",
    *,
    cores: Sequence[Collection[int] | None] | None = None,
    persistent: bool = False,
) -> Iterator[Lab]:
    """Test hosts ``n0``, ``n1``, ... joined by links of this rate, until the block is left.

    When the block is left, also by kill -9, all processes on the hosts are killed and the hosts are
    removed. ``rate`` limits every link in each direction, None for no limit. ``cores`` are those on
    which each host's processes may run. ``persistent`` marks a lab that `down` may end.

    Raises:
        LaunchError: test hosts cannot be created here; see `missing_requirement`.
        UsageError: an argument is invalid.
    """
    if not 1 <= num_hosts <= MAX_HOSTS:
        raise UsageError(f"num_hosts={num_hosts} must be in 1..{MAX_HOSTS}.")
    if rate is not None:
        rate_bytes_per_s(rate)
    if cores is not None and len(cores) != num_hosts:
        raise UsageError(f"cores has {len(cores)} entries for {num_hosts} hosts; give one each.")
    if reason := missing_requirement():
        raise LaunchError(f"{reason[0].upper()}{reason[1:]}.")
    own = [sorted(each) if each else None for each in cores or [None] * num_hosts]
    order = {
        "owner": os.getpid(),
        "persistent": persistent,
        "lab": {"num_hosts": num_hosts, "rate": rate, "cores": own},
    }
    python_path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "tests.netlab.supervisor", json.dumps(order)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        lab = Lab(supervisor, _read_parts(supervisor), rate)
    except BaseException:
        _end_supervisor(supervisor)
        raise
    try:
        yield lab
    finally:
        lab.close()


def _read_parts(supervisor: subprocess.Popen[str]) -> LabParts:
    line = supervisor.stdout.readline() if supervisor.stdout else ""
    report: dict[str, Any] = json.loads(line) if line else {"error": "the supervisor did not start"}
    if "error" in report:
        raise LaunchError(f"Test hosts could not be created: {report['error']}")
    return LabParts(
        folder=Path(report["folder"]),
        switch=report["switch"],
        hosts=tuple(
            HostParts(**{**host, "is_open": Path(host["is_open"])}) for host in report["hosts"]
        ),
    )
