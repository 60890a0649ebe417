"""A lab as a test sees it: hosts that run commands, and links with a rate and counters."""

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

from torchmn.errors import LaunchError, UsageError
from torchmn.testing.netlab.construction import (
    INTERFACE,
    MAX_HOSTS,
    HostParts,
    LabParts,
    port_of,
    shape,
)
from torchmn.testing.netlab.leftovers import END_S
from torchmn.testing.netlab.namespaces import call, entering, missing_requirement, pinned, tool
from torchmn.testing.netlab.shaping import rate_bytes_per_s

_START = '[ -e "$0" ] && cd -- "$1" && shift && exec "$@"'
Stream = int | IO[Any] | None


@dataclass(frozen=True, kw_only=True)
class Host(HostParts):
    """One test host: its ``name``, its ``address``, and how to run something on it."""

    index: int
    _note: Callable[[subprocess.Popen[str]], None]

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
        """Start a command on this host; it is killed with all it started when the lab ends.

        ``env`` and ``cwd`` are the caller's where they are not given, ``cores`` (the only ones it
        may run on) the host's. The process is the command itself, not a shell around it; a command
        that cannot be found ends with exit code 127.
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
        self._note(process)
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
        """Run a command on this host to its end; what it wrote.

        Raises:
            LaunchError: it failed, and ``check`` is on.
            subprocess.TimeoutExpired: it was killed after ``timeout_s``.
        """
        pipe = subprocess.PIPE
        null = subprocess.DEVNULL
        with self.popen(
            command, env=env, cwd=cwd, cores=cores, stdin=null, stdout=pipe, stderr=pipe
        ) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
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
    """Test hosts behind one switch. `netlab` makes one."""

    def __init__(self, keeper: subprocess.Popen[str], parts: LabParts, rate: str | None) -> None:
        self.keeper = keeper
        self.folder = parts.folder
        self.rsh_agent = parts.folder / "enter"
        """What a launcher calls in place of ssh, and a person to look around: ``enter n0``."""
        self.hosts = tuple(
            Host(index=index, _note=self._note, **vars(host))
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
        """Shape the links of all hosts, or of some, anew; what flows goes on flowing.

        Raises UsageError: not a rate.
        """
        if rate is not None:
            rate_bytes_per_s(rate)
        chosen = self.hosts if hosts is None else hosts
        for host in chosen:
            shape(host.namespaces, [INTERFACE], rate)
            self._rates[host.index] = rate
        shape(self._switch, [port_of(host.index) for host in chosen], rate)

    def cut(self, host: Host) -> None:
        """Set the host's link down, at the switch: what is sent gets lost, and nobody is told."""
        self._set_link(host, "down")

    def mend(self, host: Host) -> None:
        """Set the host's link up again."""
        self._set_link(host, "up")

    def _set_link(self, host: Host, state: Literal["up", "down"]) -> None:
        port = port_of(host.index)
        call([*entering(self._switch), tool("ip"), "link", "set", "dev", port, state])

    def bytes_sent(self, host: Host) -> int:
        """What came through the host's link to the switch since the lab was made.

        The kernel hands packets of up to 64 KB to the link and counts the headers of each once,
        so this is 0.1 to 0.2 percent above the payload of a bulk transfer over TCP. (What the
        link's rate limits are frames of 1500 bytes with a header each, 4 to 5 percent more.)
        """
        return self._counter(host, "rx")

    def bytes_received(self, host: Host) -> int:
        """What went through the host's link from the switch, counted as in `bytes_sent`."""
        return self._counter(host, "tx")

    def _counter(self, host: Host, direction: Literal["rx", "tx"]) -> int:
        port = port_of(host.index)
        words = [*entering(self._switch), tool("ip"), "-j", "-s", "link", "show", "dev", port]
        return int(json.loads(call(words))[0]["stats64"][direction]["bytes"])

    def hostfile(self, slots: int = 1) -> Path:
        """A file that names all hosts with their slots, as mpirun and torchmn read it."""
        path = self.folder / f"hostfile-{slots}"
        path.write_text("".join(f"{host.name} slots={slots}\n" for host in self.hosts))
        return path

    def close(self) -> None:
        """Kill what runs on the hosts and remove them; a second call does nothing.

        Raises LaunchError: the keeper could not.
        """
        for process in self._processes:
            process.kill()
        _end_keeper(self.keeper)
        for process in self._processes:
            process.wait()
        if self.keeper.returncode and self.folder.exists():
            raise LaunchError(
                f"The keeper of the test hosts ended with {self.keeper.returncode} and left "
                f"{self.folder}. The next lab removes it, or: python -m torchmn.testing.netlab down"
            )

    def _note(self, process: subprocess.Popen[str]) -> None:
        self._processes = [p for p in self._processes if p.poll() is None]
        self._processes.append(process)


def _end_keeper(keeper: subprocess.Popen[str]) -> None:
    for pipe in (keeper.stdin, keeper.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    # Children that this process forked may hold the pipe open too, so a signal in any case.
    keeper.terminate()
    try:
        keeper.wait(timeout=2 * END_S)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()


@contextmanager
def netlab(
    num_hosts: int = 2,
    rate: str | None = "1gbit",
    *,
    cores: Sequence[Collection[int] | None] | None = None,
    is_standing: bool = False,
) -> Iterator[Lab]:
    """Test hosts ``n0``, ``n1``, ... joined by links of this rate, until the block is left.

    However the block is left, also by kill -9, what runs on the hosts is killed and the hosts are
    gone. ``rate`` is that of every link in each direction, None for no limit. ``cores`` are those
    that each host's processes may run on. ``is_standing`` marks a lab that `down` may end.

    Raises:
        LaunchError: test hosts cannot be made here; see `missing_requirement`.
        UsageError: not a number of hosts, a rate or one set of cores per host.

    >>> with netlab(2, "100mbit") as lab:
    ...     lab.hosts[1].run(["hostname"]).stdout.strip()
    'n1'
    """
    if not 1 <= num_hosts <= MAX_HOSTS:
        raise UsageError(f"num_hosts={num_hosts} must lie in 1..{MAX_HOSTS}.")
    if rate is not None:
        rate_bytes_per_s(rate)
    if cores is not None and len(cores) != num_hosts:
        raise UsageError(f"cores has {len(cores)} entries for {num_hosts} hosts; give one each.")
    if reason := missing_requirement():
        raise LaunchError(f"{reason[0].upper()}{reason[1:]}.")
    own = [sorted(each) if each else None for each in cores or [None] * num_hosts]
    order = {
        "owner": os.getpid(),
        "is_standing": is_standing,
        "lab": {"num_hosts": num_hosts, "rate": rate, "cores": own},
    }
    keeper = subprocess.Popen(
        [sys.executable, "-m", "torchmn.testing.netlab.keeper", json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        lab = Lab(keeper, _heard_from(keeper), rate)
    except BaseException:
        _end_keeper(keeper)
        raise
    try:
        yield lab
    finally:
        lab.close()


def _heard_from(keeper: subprocess.Popen[str]) -> LabParts:
    line = keeper.stdout.readline() if keeper.stdout else ""
    said: dict[str, Any] = json.loads(line) if line else {"error": "the keeper ended at its start"}
    if "error" in said:
        raise LaunchError(f"Test hosts could not be made: {said['error']}")
    return LabParts(
        folder=Path(said["folder"]),
        switch=said["switch"],
        hosts=tuple(
            HostParts(**{**host, "is_open": Path(host["is_open"])}) for host in said["hosts"]
        ),
    )
