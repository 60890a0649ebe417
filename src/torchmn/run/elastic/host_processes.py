"""The processes that run the hosts of an elastic job, restarted whenever they end."""

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchmn.base.errors import LaunchError
from torchmn.control.processes import kill_descendants, send_group, signal_name
from torchmn.run.child_processes import start_process
from torchmn.run.job import Command

_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0


@dataclass
class _HostProcess:
    """A host's process. ``pause_s`` is the pause before the next attempt to start it."""

    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    pause_s: float = _FIRST_PAUSE_S
    start_at: float = 0.0
    kill_at: float | None = None


class HostProcesses:
    """Starts all hosts, and restarts those that have ended, with growing pauses.

    ``command`` returns the command for a host's name; their output goes to files in ``log_dir``.
    """

    def __init__(self, names: list[str], command: Callable[[str], Command], log_dir: Path) -> None:
        self._command = command
        self._hosts = {name: _HostProcess(name, log_dir / f"host-{name}.log") for name in names}

    @property
    def are_gone(self) -> bool:
        """Whether no process runs."""
        return not any(host.process for host in self._hosts.values())

    def start_due(self) -> list[tuple[str, str]]:
        """Start processes that are due, and kill those that have exceeded their time.

        Returns (host, reason) for each host that could not be started.
        """
        now, failed = time.monotonic(), []
        for host in self._hosts.values():
            if host.process is None and now >= host.start_at:
                host.kill_at = None
                try:
                    # The host notices by the end of its input that this process is gone, also
                    # where the remote shell in between is killed and passes no signal on.
                    command = self._command(host.name)
                    host.process = start_process(command, host.log, keeps_stdin=True)
                except LaunchError as error:
                    _start_later(host)
                    failed.append((host.name, str(error)))
            elif host.process and host.kill_at is not None and now > host.kill_at:
                # Those below first: they may have sessions of their own, and would be orphans.
                kill_descendants(host.process.pid, limit_s=1.0)
                send_group(host.process.pid, signal.SIGKILL)
        return failed

    def ended(self, pid: int, returncode: int) -> tuple[str, str] | None:
        """Note that a child has ended, and schedule a restart; return its host and how it ended.

        Returns None for a process that is not a host's.
        """
        for host in self._hosts.values():
            if host.process is not None and host.process.pid == pid:
                _close(host.process)
                host.process = None
                _start_later(host)
                how = signal_name(returncode) or f"exit code {returncode}"
                reason = _last_line(host.log)
                return host.name, f"{how}: {reason}" if reason else how
        return None

    def has_joined(self, name: str) -> None:
        """Note that a host takes part: reset its pause, so that it is restarted soon if lost."""
        if name in self._hosts:  # others have joined by themselves
            self._hosts[name].pause_s = _FIRST_PAUSE_S

    def give_up(self, name: str, kill_after_s: float) -> None:
        """End the process of a lost host, by force after ``kill_after_s``, to restart it then."""
        host = self._hosts.get(name)
        if host is not None and host.process is not None:
            _close(host.process)
            host.kill_at = time.monotonic() + kill_after_s


def _start_later(host: _HostProcess) -> None:
    host.start_at = time.monotonic() + host.pause_s
    host.pause_s = min(2 * host.pause_s, _MAX_PAUSE_S)


def _close(process: subprocess.Popen[bytes]) -> None:
    """Close standard input of a process, at the end of which it exits."""
    if process.stdin is not None:
        process.stdin.close()


def _last_line(path: Path) -> str:
    """Return the last line of a log that is not blank, for a message."""
    with suppress(OSError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].removeprefix("torchmn: ").rstrip(".") if lines else ""
    return ""
