"""Finding and ending the labs on this machine, and removing those of dead owners.

Every lab has a folder, which its supervisor locks as long as it lives; a folder that can be locked
is abandoned. The folder's ``hosts`` file is mounted as ``/etc/hosts`` in every host of the lab and
nowhere else, which identifies its processes in whatever session or group they run.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.limits import limit
from torchmn.control.processes import send
from torchmn.errors import LaunchError

PREFIX = "torchmn-netlab-"
RECORD = "lab.json"
OPEN = "open"
"""Processes may enter the lab's hosts while the folder has this file."""
END_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RunningLab:
    """A lab whose supervisor is alive. ``persistent``: created by ``up``."""

    folder: Path
    supervisor: int
    owner: int
    persistent: bool


def claim_folder(*, owner: int, persistent: bool) -> Path:
    """Create the folder of a lab, locked by this process until it ends.

    It gets its name after it was locked, so that it never looks abandoned.
    """
    folder = Path(tempfile.mkdtemp())
    _lock(folder)
    record = {"supervisor": os.getpid(), "owner": owner, "persistent": persistent}
    (folder / RECORD).write_text(json.dumps(record))
    return folder.rename(folder.with_name(PREFIX + folder.name.removeprefix("tmp")))


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock, or None if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _folders() -> Iterator[Path]:
    """The folders of this user's labs."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with suppress(FileNotFoundError):
            if folder.lstat().st_uid == os.geteuid() and folder.is_dir():
                yield folder


def running_labs() -> list[RunningLab]:
    """The labs on this machine whose supervisor is alive."""
    found = []
    for folder in _folders():
        with suppress(FileNotFoundError, NotADirectoryError):
            descriptor = _lock(folder)
            if descriptor is None:
                record = json.loads((folder / RECORD).read_text())
                found.append(RunningLab(folder=folder, **record))
            else:
                os.close(descriptor)
    return found


def end_lab(lab: RunningLab) -> None:
    """End a lab through its supervisor, and wait for it.

    Raises LaunchError: it has not ended within ten seconds.
    """
    send(lab.supervisor, signal.SIGTERM)
    deadline = time.monotonic() + limit(END_S)
    while time.monotonic() < deadline:
        if lab.folder not in [other.folder for other in running_labs()]:
            return
        time.sleep(0.02)
    raise LaunchError(
        f"The lab in {lab.folder} did not end within {END_S:g} s. End its supervisor, process "
        f"{lab.supervisor}, with kill -9 and try again."
    )


def sweep() -> list[Path]:
    """Remove the labs whose supervisors died; return their folders."""
    removed = []
    for folder in _folders():
        with suppress(FileNotFoundError, NotADirectoryError):
            descriptor = _lock(folder)
            if descriptor is None:
                continue
            try:
                take_down(folder)
                removed.append(folder)
            finally:
                os.close(descriptor)
    return removed


def take_down(folder: Path) -> None:
    """Kill every process inside the lab's hosts and remove its folder.

    A process that is entering checks for the file `OPEN` once inside, so that none is missed.

    Raises LaunchError: processes are still alive after ten seconds.
    """
    (folder / OPEN).unlink(missing_ok=True)
    deadline = time.monotonic() + limit(END_S)
    while inside := processes_inside(folder):
        if time.monotonic() > deadline:
            raise LaunchError(f"Processes {inside} in test hosts could not be killed.")
        for pid in inside:
            send(pid, signal.SIGKILL)
        time.sleep(0.01)
    shutil.rmtree(folder)


def processes_inside(folder: Path) -> list[int]:
    """The living processes in any host of the lab that has this folder."""
    mark = f"/{folder.name}/hosts".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            # a zombie has no mounts: reading them is an error
            with suppress(OSError), open(f"/proc/{entry}/mountinfo", "rb") as file:
                if mark in file.read():
                    found.append(int(entry))
    return found
