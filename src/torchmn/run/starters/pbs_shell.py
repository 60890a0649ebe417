"""``python -m torchmn.run.starters.pbs_shell HOST COMMAND...``: a remote shell for PBS jobs.

`pbs_tmrsh` starts a task that PBS counts and ends, but is no remote shell: it runs a program, not a
line for a shell; the task's standard input is /dev/null and its output goes to the job's own files;
and a task continues when `pbs_tmrsh` is killed. So it only starts the other half of this program on
HOST, which reads its order from a file that only this user can read, connects back, and gives its
connections to the command as standard streams. Either half ends when the other one does.
"""

import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

from torchmn.base.errors import LaunchError, TorchmnError, shell_code
from torchmn.base.terminal import say
from torchmn.cluster.network import local_address_for
from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import AuthenticatedListener, connect
from torchmn.control.codec import Record, decode, encode
from torchmn.control.processes import (
    adopt_orphans,
    kill_descendants,
    kill_on_parent_death,
    python_module,
)
from torchmn.run.starters.remote import PBS_COMMAND, PBS_SHELL

_ROLE = "remote shell"
# The connections of one command: its input and output, its errors, and its exit status.
_STREAMS = ("stdio", "stderr", "status")
_LOST_STATUS = 255  # as ssh's, for everything that is not the command's own end
_END_S = 10.0
_CHUNK_BYTES = 1 << 16


class RunForShell(Record, frozen=True, kw_only=True):
    """Order to the half on the other host: run this shell line for the listener at ``address``."""

    command: str
    address: str
    secret: str


def main(args: list[str]) -> int:
    """Run one half: with ``--serve FILE`` that on the other host, else the calling one."""
    # `qsig` signals every process of a job, but it is the launcher that informs the ranks.
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda *_: None)  # not SIG_IGN, which `pbs_tmrsh` would inherit
    try:
        if args[:1] == ["--serve"]:
            return _serve(Path(args[1]))
        host, *command = args
        return _call(host, " ".join(command))
    except TorchmnError as error:
        say(str(error))
        return _LOST_STATUS


def _call(host: str, command: str) -> int:
    """Run the command on the host with our standard streams and return its exit status."""
    address = local_address_for(host)
    if address is None:
        raise LaunchError(f"No route from {socket.gethostname()} to {host}.")
    listener = channels.listen_on(address)
    order = RunForShell(
        command=command, address=channels.address_of(listener), secret=secrets.token_hex(32)
    )
    file = _write_order(order)
    try:
        starter = _start(host, file)
        try:
            with closing(AuthenticatedListener(listener, secret=order.secret, role=_ROLE)) as own:
                found = _accept_streams(own, starter, host, order.address)
            return _relay(found, host)
        finally:
            starter.kill()
            starter.wait()
    finally:
        file.unlink(missing_ok=True)


def _start(host: str, file: Path) -> subprocess.Popen[bytes]:
    path = os.environ.get("PYTHONPATH")
    prefix = ("env", f"PYTHONPATH={path}") if path else ()
    try:
        return subprocess.Popen(
            [PBS_COMMAND, host, *prefix, *python_module(PBS_SHELL), "--serve", str(file)],
            stdin=subprocess.DEVNULL,
            preexec_fn=kill_on_parent_death(),
        )
    except OSError as error:
        raise LaunchError(f"{PBS_COMMAND} cannot be run: {error.strerror}.") from None


def _write_order(order: RunForShell) -> Path:
    """Write the order to a private file in the current folder, which all hosts share."""
    file = Path.cwd() / f".torchmn-order-{secrets.token_hex(8)}"
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(encode(order))
    except OSError as error:
        file.unlink(missing_ok=True)
        raise LaunchError(
            f"No file can be written in {file.parent} ({error.strerror}), by which other hosts get "
            "their orders: start the job from a folder that all hosts share and you can write to."
        ) from None
    return file


def _accept_streams(
    accepting: AuthenticatedListener, starter: subprocess.Popen[bytes], host: str, address: str
) -> dict[str, socket.socket]:
    """Return the other half's connections by name. Raises LaunchError: it ended before."""
    found: dict[str, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(accepting, selectors.EVENT_READ)
        while len(found) < len(_STREAMS):
            # Asked first: connections that were made before its end are still accepted below.
            has_ended = starter.poll() is not None
            selector.select(0.2)
            for connection, identity in accepting.accept():
                found[identity.decode().strip()] = connection
            if has_ended and len(found) < len(_STREAMS):
                raise LaunchError(
                    f"{PBS_COMMAND} ended with exit code {shell_code(starter.returncode)} before "
                    f"{host} had connected to {address}. {host} must see the folder {Path.cwd()} "
                    f"and {sys.executable}; what it wrote is in the output of the job that PBS "
                    "delivers at the job's end."
                )
    for connection in found.values():
        connection.setblocking(True)
    channels.set_timeouts(found["status"])
    return found


def _relay(found: dict[str, socket.socket], host: str) -> int:
    """Copy between standard streams and connections; return the command's exit status.

    Raises LaunchError: the connection was lost before the status came.
    """
    copies = [
        threading.Thread(target=_copy, args=(found[name].fileno(), to), daemon=True)
        for name, to in (("stdio", 1), ("stderr", 2))
    ]
    # A daemon, since it may block on standard input after the command has ended.
    sender = threading.Thread(target=_send_input, args=(found["stdio"],), daemon=True)
    for thread in (*copies, sender):
        thread.start()
    answer = b""
    with suppress(OSError):
        while not answer.endswith(b"\n") and (chunk := found["status"].recv(64)):
            answer += chunk
    if not answer.endswith(b"\n"):
        raise LaunchError(f"The connection to {host} was lost.")
    for thread in copies:
        thread.join()
    return int(answer)


def _copy(source: int, target: int) -> None:
    """Copy until the end of ``source``; after an error of ``target`` the rest is discarded."""
    is_open = True
    with suppress(OSError):
        while chunk := os.read(source, _CHUNK_BYTES):
            try:
                while is_open and chunk:
                    chunk = chunk[os.write(target, chunk) :]
            except OSError:
                is_open = False


def _send_input(connection: socket.socket) -> None:
    _copy(0, connection.fileno())
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


def _serve(file: Path) -> int:
    """Read the order, connect back and run the command.

    The daemons that a command leaves, such as Open MPI's, remain a part of the job: this process
    waits for them. PBS signals all processes of the task's session, of which the command is no
    part: the launcher informs the ranks, which must be able to save. So SIGTERM ends nothing here;
    the end of the calling half does, or SIGKILL: agents and daemons end without their launcher.
    """
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        order = decode(file.read_bytes(), RunForShell)
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"The order in {file} cannot be read on {socket.gethostname()}: {error}. The folder "
            "must be shared between the hosts."
        ) from None
    streams = {
        name: connect(order.address, secret=order.secret, role=_ROLE, line=f"{name}\n".encode())
        for name in _STREAMS
    }
    for connection in streams.values():
        connection.setblocking(True)
    channels.set_timeouts(streams["status"])
    process = subprocess.Popen(
        ["/bin/sh", "-c", order.command],
        stdin=streams["stdio"].fileno(),
        stdout=streams["stdio"].fileno(),
        stderr=streams["stderr"].fileno(),
        start_new_session=True,
        preexec_fn=kill_on_parent_death(),
    )
    # Only the command holds these now, so that the calling half sees the end of its output.
    streams.pop("stdio").close()
    streams.pop("stderr").close()
    status = streams["status"]
    threading.Thread(target=_end_if_lost, args=(status, process), daemon=True).start()
    code = shell_code(process.wait())
    with suppress(OSError):
        status.sendall(f"{code}\n".encode())
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return code


def _end_if_lost(status: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of the calling half; end the command if that comes first."""
    with suppress(OSError):
        status.recv(1)
    if process.returncode is None:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the command end by itself, as agents do, and kill what remains below this process."""
    with suppress(OSError):
        process.terminate()
    timer = threading.Timer(_END_S, kill_descendants, [os.getpid()])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
