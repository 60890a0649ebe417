"""Labs that stand on this machine: found, ended, and swept away behind a dead owner.

Every lab has a folder. Its keeper holds a lock on it for as long as it lives, so that a folder
that can be locked belongs to nobody. The folder's ``hosts`` file is mounted as ``/etc/hosts`` in
every host of the lab and nowhere else: by that its processes are known, whatever sessions and
groups they made for themselves.
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

from torchmn.control.processes import send
from torchmn.errors import LaunchError

PREFIX = "torchmn-netlab-"
RECORD = "lab.json"
OPEN = "open"
"""While the folder has this file, processes may enter the lab's hosts."""
END_S = 10.0


@dataclass(frozen=True, kw_only=True)
class LivingLab:
    """A lab whose keeper lives. ``is_standing``: made by ``up``, not by a program of its own."""

    folder: Path
    keeper: int
    owner: int
    is_standing: bool


def claim_folder(*, owner: int, is_standing: bool) -> Path:
    """A new folder of a lab, locked by this process until it ends.

    It gets its name only when it is locked: before that nobody takes it for one left behind.
    """
    made = Path(tempfile.mkdtemp())
    _lock(made)
    record = {"keeper": os.getpid(), "owner": owner, "is_standing": is_standing}
    (made / RECORD).write_text(json.dumps(record))
    return made.rename(made.with_name(PREFIX + made.name.removeprefix("tmp")))


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, or None where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _folders() -> Iterator[Path]:
    """The folders of labs; not what other users put under such a name."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with suppress(FileNotFoundError):
            if folder.lstat().st_uid == os.geteuid() and folder.is_dir():
                yield folder


def living_labs() -> list[LivingLab]:
    """The labs on this machine that have a keeper."""
    found = []
    for folder in _folders():
        with suppress(FileNotFoundError, NotADirectoryError):
            descriptor = _lock(folder)
            if descriptor is None:
                record = json.loads((folder / RECORD).read_text())
                found.append(LivingLab(folder=folder, **record))
            else:
                os.close(descriptor)
    return found


def end_lab(lab: LivingLab) -> None:
    """Ask the keeper to take its lab down, and wait until it has.

    Raises LaunchError: it still lives after ten seconds.
    """
    send(lab.keeper, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        if lab.folder not in [other.folder for other in living_labs()]:
            return
        time.sleep(0.02)
    raise LaunchError(
        f"The lab in {lab.folder} did not end within {END_S:g} s. End its keeper, process "
        f"{lab.keeper}, with kill -9 and try again."
    )


def sweep() -> list[Path]:
    """Take down the labs whose keepers died; their folders."""
    swept = []
    for folder in _folders():
        with suppress(FileNotFoundError, NotADirectoryError):
            descriptor = _lock(folder)
            if descriptor is None:
                continue
            try:
                take_down(folder)
                swept.append(folder)
            finally:
                os.close(descriptor)
    return swept


def take_down(folder: Path) -> None:
    """Kill every process inside the lab's hosts and remove its folder.

    Who is on the way in looks for the file `OPEN` once inside, so that nobody comes after us.

    Raises LaunchError: processes are left after ten seconds.
    """
    (folder / OPEN).unlink(missing_ok=True)
    deadline = time.monotonic() + END_S
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
