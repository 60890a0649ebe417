"""The owner of a checkpoint folder: the one process that may add checkpoints to it.

Two jobs that save in one folder would each resume with the model of the other. So rank 0 keeps a
file in the folder that names its process, and updates the file's modification time every 5 s (the
heartbeat). No clocks are compared, and no file locks are used, which differ between NFS, Lustre and
local disks. A process that finds the file of another one

    of an earlier round of its own elastic job    takes it over
    of this machine, which has ended              takes it over, with a warning
    of this machine, which is alive               is refused
    whose time changes while it watches           is refused
    whose time does not change for 30 s           takes it over, with a warning

The owner looks at the file again before it completes a checkpoint: one that was taken for dead,
because it was suspended for a long time, adds nothing to the folder of its successor.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from torchmn.base.errors import DataError, TopologyError
from torchmn.cluster.allocation import allocation
from torchmn.cluster.environment_variables import JOB_VARIABLE, ROUND_VARIABLE
from torchmn.control.codec import Record, decode, encode
from torchmn.control.processes import is_running, start_time

OWNER = ".owner"
PERIOD_S = 5.0
STALE_S = 30.0
_PAUSE_S = 0.5
_RACE_S = 0.2
_MAX_NBYTES = 10_000
# Number of checkpointers by (process id, folder). A forked child inherits this table, but not the
# ownership of its parent: hence the id.
_num_uses: Counter[tuple[int, str]] = Counter()


class Owner(Record, frozen=True, kw_only=True):
    """A process that owns a folder. Process ids are unique within one ``machine``.

    ``machine`` identifies a boot of a kernel and a PID namespace, of which containers have their
    own.
    """

    machine: str
    pid: int
    started: str
    host: str
    user: str
    command: str
    scheduled_as: str
    since: str
    job: str
    round: int

    def __str__(self) -> str:
        by = f"{self.scheduled_as}, " if self.scheduled_as else ""
        return (
            f"{by}process {self.pid} on {self.host} ({self.command}; user {self.user}, since "
            f"{self.since})"
        )

    def is_same_process(self, other: Owner) -> bool:
        """Whether both describe the same process, and not a later one that reuses its id."""
        return (self.machine, self.pid, self.started) == (other.machine, other.pid, other.started)

    def continues(self, other: Owner) -> bool:
        """Whether this is a later round of the same elastic job: its earlier rounds have ended."""
        return bool(self.job) and self.job == other.job and self.round > other.round


def this_process() -> Owner:
    """Describe this process as an owner."""
    scheduled_as = ""
    with suppress(TopologyError):
        if (given := allocation(os.environ)) is not None:
            scheduled_as = f"{given.scheduler} job {given.job_id}"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container has no name for it
        user = str(os.getuid())
    return Owner(
        machine=_machine(),
        pid=os.getpid(),
        started=start_time(os.getpid()),
        host=socket.gethostname(),
        user=user,
        command=" ".join(sys.argv)[:200] or "python",
        scheduled_as=scheduled_as,
        since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        job=os.environ.get(JOB_VARIABLE, ""),
        round=int(os.environ.get(ROUND_VARIABLE) or 0),
    )


class FolderOwner:
    """Ownership of one folder by this process. Rank 0 only.

    ``make_file`` creates a file with the permissions of checkpoints.
    """

    def __init__(self, folder: Path, make_file: Callable[[Path, bytes], None]) -> None:
        self._folder = folder
        self._path = folder / OWNER
        self._make_file = make_file
        self._own = this_process()
        self._use = self._own.pid, os.path.realpath(folder)
        self._watched: tuple[tuple[int, int], float] | None = None
        self._lost: str | None = None
        self._other: Owner | None = None  # the owner that was read last
        self._looking = threading.Lock()
        self._is_owned = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="torchmn-owner", daemon=True)

    def attempt(self, limit_s: float) -> tuple[Literal["owned", "waiting", "refused"], str]:
        """Try to own the folder, for at most ``limit_s``; return the result and a message or "".

        Call it again while the result is "waiting". Raises OSError.
        """
        found = self._look()
        if found is None:
            try:
                self._make_file(self._path, encode(self._own))
            except FileExistsError:  # creation is exclusive, and another job was faster
                return "waiting", ""
            return self._owned("")
        other, stamp = found
        if other is not None and other.is_same_process(self._own):
            return self._owned("")
        if other is not None and self._own.continues(other):
            return self._take_over("")
        name = other or "an unknown process"
        if other is not None and other.machine == self._own.machine:
            if is_running(other.pid) and start_time(other.pid) == other.started:
                return "refused", self._refusal(name)
            return self._take_over(
                f"{self._folder} was taken over from {name}, which has ended without leaving it."
            )
        now_s = time.monotonic()
        if self._watched is None:
            self._watched = stamp, now_s
            time.sleep(min(limit_s, _PAUSE_S))
            return "waiting", (
                f"{self._folder} was left in the name of {name}. If that shows no sign of life for "
                f"{STALE_S:g} s, it is taken over."
            )
        first, since_s = self._watched
        if stamp != first:
            return "refused", self._refusal(name)
        if now_s - since_s >= STALE_S:
            return self._take_over(
                f"{self._folder} was taken over from {name}, which has shown no sign of life for "
                f"{STALE_S:g} s."
            )
        time.sleep(min(limit_s, _PAUSE_S))
        return "waiting", ""

    def confirm(self) -> None:
        """Verify the ownership; called before a checkpoint is completed.

        Raises DataError: another process owns the folder now.
        """
        # The heartbeat's thread and this one must not make the file at once: the one would read
        # what the other has not filled yet, as a file of another process.
        with self._looking:
            if self._lost is None and not self._is_ours():
                self._lost = (
                    f"the folder was taken over by {self._other or 'an unknown process'}, after "
                    "this process had shown no sign of life"
                )
        if self._lost is not None:
            raise DataError(self._lost)

    def _is_ours(self) -> bool:
        """Whether the file names this process; it is made again if it is gone."""
        found = self._look()
        if found is None:  # it was removed, or the folder could not be written to before
            self._make_file(self._path, encode(self._own))
            return True
        other = self._other = found[0]
        return other is not None and (
            other.is_same_process(self._own) or self._own.continues(other)
        )

    def release(self) -> None:
        """Give up the folder, unless another checkpointer of this process uses it.

        Never raises. Does nothing in a forked child, whose parent still owns the folder.
        """
        if os.getpid() != self._own.pid:
            return
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(PERIOD_S)  # no longer, on a file system that hangs
        if self._is_owned:
            self._is_owned = False
            _num_uses[self._use] -= 1
        with suppress(OSError):
            if not _num_uses[self._use] and self._is_own_file():
                self._path.unlink()

    def _owned(self, text: str) -> tuple[Literal["owned"], str]:
        self._is_owned = True
        _num_uses[self._use] += 1
        self._thread.start()
        return "owned", text

    def _take_over(self, text: str) -> tuple[Literal["owned", "waiting"], str]:
        draft = self._folder / f"{OWNER}-{self._own.machine[:8]}-{self._own.pid}"
        draft.unlink(missing_ok=True)
        self._make_file(draft, encode(self._own))
        draft.replace(self._path)
        # Another job may replace the file now. After a pause it names the last one: the owner.
        time.sleep(_RACE_S)
        if self._is_own_file():
            return self._owned(text)
        self._watched = None
        return "waiting", ""

    def _is_own_file(self) -> bool:
        owner, _ = self._look() or (None, None)
        return owner is not None and owner.is_same_process(self._own)

    def _refusal(self, name: object) -> str:
        return (
            f"{self._folder} belongs to another job: {name}. Only one job at a time may save in a "
            "folder, or each would resume with the model of the other. Give this training a name= "
            "of its own, or end the other job. With read_only=True its checkpoints can be read."
        )

    def _look(self) -> tuple[Owner | None, tuple[int, int]] | None:
        """Read the file: the owner (None if unreadable), and a stamp that each heartbeat changes.

        None if there is no file.
        """
        try:
            # NFS asks the server for a file's current content and times when the file is opened.
            with self._path.open("rb") as file:
                state, text = os.fstat(file.fileno()), file.read(_MAX_NBYTES)
        except FileNotFoundError:
            return None
        stamp = state.st_ino, state.st_mtime_ns
        try:
            return decode(text, Owner), stamp
        except ValueError:  # it is being written, or of another version
            return None, stamp

    def _beat(self) -> None:
        while not self._end.wait(PERIOD_S):
            # The disk may recover; a lost ownership is raised before the next commit.
            with suppress(OSError, DataError):
                self.confirm()
                os.utime(self._path)  # needs no space on a full disk


def _machine() -> str:
    """The boot of the kernel and the PID namespace of this process, else the host's name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
