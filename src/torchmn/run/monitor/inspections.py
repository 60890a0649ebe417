"""Both ends of `torchmn inspect`: what every rank of a running job does.

The process that is connected to all ranks listens on the loopback interface of its host, with a
secret of its own: who knows it can look and nothing else. Address and secret are in a private file
in the log folder, which that process keeps open until the job ends. So `/proc` shows which jobs
run, and nothing is left of one that was killed.
"""

import os
import secrets
import shlex
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from torchmn.base.errors import LaunchError
from torchmn.base.log import Log
from torchmn.base.private_files import make_private_folder, write_whole
from torchmn.control.authenticated_listener import AuthenticatedListener, connect_authenticated
from torchmn.control.codec import Record, decode, encode
from torchmn.control.connection import Channel, address_of, listen_on
from torchmn.control.messages import Inspection, InspectRequest, RankState, StatusRequest
from torchmn.control.processes import open_files, start_time
from torchmn.run.monitor.failure_detector import status_of
from torchmn.run.monitor.job_result import JOB_FILE, LATEST

if TYPE_CHECKING:
    from torchmn.run.monitor.rank_session import RankSession

_log = Log(__name__)
INSPECT_FILE = "inspect.json"
_ROLE = "inspector"
_NUM_RECENT = 8
_ANSWER_S = 20.0


class Inspector(Record, frozen=True, kw_only=True):
    """The content of `INSPECT_FILE`: where a job can be inspected, and by which process."""

    address: str
    secret: str
    host: str
    pid: int
    started: str

    @property
    def may_run(self) -> bool:
        """Whether its process runs, or runs on another host, where this one cannot look."""
        return self.host != socket.gethostname() or start_time(self.pid) == self.started


class Inspections:
    """Answers `torchmn inspect` in the control loop of a job. Never blocks.

    If the file in ``folder`` cannot be written, that is said, and nobody will ask.
    """

    def __init__(self, folder: Path) -> None:
        self._began_at = time.time()
        self._folder = folder
        self._waiting: list[Channel] = []
        self._answered: list[Channel] = []
        self._answer_at: float | None = None  # the replies of ranks are awaited until then
        listener, secret = listen_on("127.0.0.1"), secrets.token_hex(32)
        self._listener = AuthenticatedListener(listener, secret=secret, role=_ROLE)
        own = Inspector(
            address=address_of(listener),
            secret=secret,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=start_time(os.getpid()),
        )
        self._file: IO[bytes] | None = None
        try:
            make_private_folder(folder)
            write_whole(folder / INSPECT_FILE, encode(own))
            self._file = open(folder / INSPECT_FILE, "rb")  # noqa: SIM115  until `close`
        except OSError as error:
            _log.warning("torchmn inspect will not find this job: %s", error)

    def serve(self, session: "RankSession") -> None:
        """Admit clients, request the status of all ranks, and send it. Call it often."""
        for channel, identity in self._listener.admit():
            if isinstance(identity, InspectRequest):
                self._waiting.append(channel)
            else:
                channel.close()
        detector, now = session.detector, session.clock.now
        if self._waiting and self._answer_at is None:
            self._answer_at = now
            # Those that are requested for the report of a hang, or that come no more, will do.
            if session.has_started and not (detector.has_queried or session.is_ending):
                detector.forget_replies()
                self._answer_at += detector.replies_limit_s
                limit_s = detector.reply_limit_s
                session.post(StatusRequest(limit_s=limit_s, num_recent=_NUM_RECENT))
        if self._answer_at is not None and (detector.has_all_replies or now >= self._answer_at):
            self._answer_at = None
            answer = self._inspection(session)
            for channel in self._waiting:
                channel.post(answer)
            self._answered += self._waiting
            self._waiting = []
        # Stacks of many ranks do not fit into a socket's buffer, and this loop must not wait.
        for channel in self._answered:
            channel.flush()
            if not channel.pending_bytes:
                channel.close()
        self._answered = [each for each in self._answered if each.is_open]

    def _inspection(self, session: "RankSession") -> Inspection:
        ranks = []
        for record in session.records:
            connection, status = session.connections.get(record.rank), status_of(record)
            text = "" if status is None else status.text
            if connection is None or not session.has_started:
                text = text or "has not started yet"
            pid = 0 if connection is None else connection.script_pid
            state = RankState(
                rank=record.rank, host=record.host, pid=pid, text=text, reply=record.status_reply
            )
            ranks.append(state)
        return Inspection(
            log_dir=str(self._folder.absolute()),
            host=socket.gethostname(),
            seconds=round(time.time() - self._began_at, 1),
            ranks=tuple(ranks),
        )

    def close(self) -> None:
        """Stop answering, and remove the file, with its folder if that has nothing else."""
        if self._file is not None:
            self._file.close()
            with suppress(OSError):
                (self._folder / INSPECT_FILE).unlink()
                self._folder.rmdir()
        for channel in (*self._waiting, *self._answered):
            channel.close()
        self._listener.close()


def inspect(run: Path | None) -> Inspection:
    """Return what the ranks of a running job do.

    ``run`` is its log folder, or a folder whose link ``latest`` leads there. By default it is the
    newest of the user's jobs on this host that log below the current folder, else the only one.
    Raises LaunchError: there is no such job or more than one, it has ended, it runs elsewhere, or
    it does not answer.
    """
    folder = _default() if run is None else _log_folder(run)
    own = read_inspector(folder)
    if own is None:
        raise LaunchError(f"The job of {folder} has ended: there is nothing to inspect.")
    here = socket.gethostname()
    if own.host != here:
        raise LaunchError(
            f"The job of {folder} was started on {own.host}, and this is {here}: run torchmn "
            "inspect there."
        )
    if not own.may_run:
        raise LaunchError(
            f"The job of {folder} has ended: the process {own.pid} that followed it was killed."
        )
    channel = connect_authenticated(
        own.address, secret=own.secret, role=_ROLE, identity=InspectRequest(), limit_s=_ANSWER_S
    )
    try:
        return channel.wait_for(Inspection, _ANSWER_S)
    except LaunchError as error:
        raise LaunchError(
            f"The job of {folder} does not answer ({error}) It may be ending, or the process "
            f"{own.pid} that follows it is stopped."
        ) from None
    finally:
        channel.close()


def read_inspector(folder: Path) -> Inspector | None:
    """Read the file of a job in its log folder, None if there is none: the job has ended.

    Raises LaunchError: other users can write or read it, or it cannot be read.
    """
    path = folder / INSPECT_FILE
    try:
        with open(path, "rb") as file:
            # Of the open file, as its path may lead to another one by now.
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o77:
                raise LaunchError(
                    f"{path} belongs to user {status.st_uid} and has mode "
                    f"{status.st_mode & 0o777:o}. It must be yours and private (0600), for it says "
                    "which process to ask, and holds a secret."
                )
            return decode(file.readline(), Inspector)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path} cannot be read: {error}.") from None


def _default() -> Path:
    found = []
    for path in open_files(INSPECT_FILE):
        with suppress(OSError):  # the job has ended since it was listed
            found.append((os.stat(path).st_mtime, Path(path).parent))
    found.sort(reverse=True)
    if not found:
        raise LaunchError(
            f"No job of yours that can be inspected runs on {socket.gethostname()}. Run torchmn "
            "inspect on the host where `torchmn run` was started. A job that mpirun, srun or "
            "torchrun started is found on the host of its rank 0, if its script calls "
            "torchmn.run.install_crash_handler()."
        )
    current = os.path.realpath(os.curdir)
    here = [folder for _, folder in found if folder.is_relative_to(current)]
    if not here and len(found) > 1:
        names = "".join(f"\n  torchmn inspect {shlex.quote(str(folder))}" for _, folder in found)
        raise LaunchError(
            f"{len(found)} jobs of yours run on {socket.gethostname()}, and none of them logs "
            f"below this folder. Name one; the newest is the first:{names}"
        )
    return here[0] if here else found[0][1]


def _log_folder(run: Path) -> Path:
    for folder in (run, run / LATEST):
        try:
            if (folder / INSPECT_FILE).exists() or (folder / JOB_FILE).exists():
                return folder.resolve()
        except PermissionError:
            raise LaunchError(f"{folder} is not yours to read: name a run of your own.") from None
    what = "has no job.json" if run.exists() else "does not exist"
    raise LaunchError(f"{str(run)!r} is no log folder of `torchmn run`: it {what}.")
