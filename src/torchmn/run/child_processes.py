"""The processes that a launcher has started, and the signals that it receives."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torchmn.base.errors import LaunchError, shell_code
from torchmn.base.private_files import open_private
from torchmn.control.processes import (
    adopt_orphans,
    descendants,
    kill_descendants,
    lower_in_child,
    reap_children,
    signal_socket,
)
from torchmn.run.console import RankOutput
from torchmn.run.job import Command

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUT_S = 1.0  # how often `finish_output` looks for signals while the output is read


class ProcessOwner:
    """Reaps and kills the processes below this one, and collects the signals sent to it.

    Replaces the handlers of SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGCHLD, and makes this
    process the parent of all orphans among its descendants, so the process should do nothing else.
    One per process, made in the main thread.
    """

    def __init__(self, output: RankOutput) -> None:
        self._output = output
        self._ended_by: int | None = None
        self._received: list[int] = []
        self._existing = descendants(os.getpid())
        adopt_orphans()
        self._wakeup = signal_socket(signal.SIGCHLD)
        for signum in _ENDING_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, self._on_signal)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, self._on_signal)

    @property
    def interrupted_by(self) -> int | None:
        """The signal that asked for the end; SIGPIPE if the reader of the output has left.

        A signal shows here only after `take_signals_to_forward` has returned it, so that no SIGTERM
        ends the job before the scripts have received it.
        """
        if self._ended_by is None and self._output.is_closed:
            return signal.SIGPIPE
        return self._ended_by

    @property
    def end_signal(self) -> int:
        """The signal that ends scripts: SIGINT after Ctrl-C, else SIGTERM."""
        return signal.SIGINT if self._ended_by == signal.SIGINT else signal.SIGTERM

    def fileno(self) -> int:
        """Return a descriptor that is readable when `reap` has something to do."""
        return self._wakeup.fileno()

    def reap(self) -> list[tuple[int, int]]:
        """Reap children; return (process, exit code or minus the signal) for each."""
        with suppress(BlockingIOError):
            self._wakeup.recv(64)
        return reap_children()

    def take_signals_to_forward(self, *, awaits_input: bool = False) -> list[int]:
        """Return the received signals that scripts should get.

        SIGHUP ends the job at once, and so does SIGINT unless a script awaits input.
        """
        taken, self._received = self._received, []
        kept = {signal.SIGHUP} if awaits_input else {signal.SIGHUP, signal.SIGINT}
        for signum in taken:
            if signum == signal.SIGINT and awaits_input:
                continue
            # Ctrl-C ends a job also while it takes its time to save after SIGTERM
            if signum == signal.SIGINT or (self._ended_by is None and signum in _ENDING_SIGNALS):
                self._ended_by = signum
        return [signum for signum in taken if signum not in kept]

    def finish_output(self) -> None:
        """Wait until the output was read, unless a signal asks for the end."""
        while not self._output.finish(_OUTPUT_S) and self._ended_by is None:
            self.take_signals_to_forward()

    def kill_all(self) -> None:
        """Kill all processes below this one except those that were there before."""
        kill_descendants(os.getpid(), spare=self._existing)

    def close(self) -> None:
        """Look for no more ends of children. Signals to this process are still collected."""
        os.close(signal.set_wakeup_fd(-1))
        self._wakeup.close()

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        """Record the signal for the loop; at a second Ctrl-C kill everything and exit."""
        # A handler may run between any two bytecodes of the loop, so it only appends to a list.
        if signum == signal.SIGINT and signum in (self._ended_by, *self._received):
            self.kill_all()
            os._exit(shell_code(-signum))
        self._received.append(signum)


def start_process(
    command: Command, log: Path, *, keeps_stdin: bool = False
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; its output is appended to ``log``.

    With ``keeps_stdin`` its standard input stays open, and ends when this process does. Raises
    LaunchError: it cannot be started.
    """
    try:
        with open(log, "ab", opener=open_private) as file:
            process = subprocess.Popen(
                command.argv,
                env=command.env,
                stdin=subprocess.PIPE if keeps_stdin or command.stdin else subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                bufsize=0,
                start_new_session=True,  # so that Ctrl-C reaches us alone, who pass it on
                preexec_fn=lower_in_child(),
            )
    except OSError as error:
        raise LaunchError(
            f"{command.name} cannot be started: {error.filename or command.argv[0]}: "
            f"{error.strerror}"
        ) from None
    process.returncode = 0  # the owner reaps; without it Popen would warn
    if process.stdin is not None:
        rest = memoryview(command.stdin)
        with suppress(BrokenPipeError):
            while rest:  # a signal may come in the middle of a write
                rest = rest[process.stdin.write(rest) :]
        if not keeps_stdin:
            process.stdin.close()
    return process
