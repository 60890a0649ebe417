"""Injects a fault into a job at a given moment."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from chaos.faults import Fault
from chaos.job import Job, children_of, parent_of
from chaos.settings import Setting
from chaos.testbed import Testbed

_LIMIT_S = 90.0
_POLL_S = 0.002
_SIGNALS = {
    "kill": signal.SIGKILL,
    "flipped byte": signal.SIGKILL,
    "SIGSTOP": signal.SIGSTOP,
    "SIGTERM": signal.SIGTERM,
}
FULL = "filler"
NO_SPACE = os.strerror(errno.ENOSPC)
SECOND = "second.txt"


class TooLateError(Exception):
    """The job ended before the moment of the fault."""


def inject(fault: Fault, job: Job, setting: Setting, testbed: Testbed, folder: Path) -> float:
    """Inject the fault at its moment; returns the time (monotonic). Raises TooLateError."""
    if fault.script_fault:
        began = _wait_for_inside(job, folder)
        if fault.kind == "second job":
            _start_second(setting, testbed, folder)
            (folder / "continue").touch()
        return began
    pid = _wait_for_moment(fault, job, setting, folder)
    now = time.monotonic()
    try:
        if fault.kind in _SIGNALS:
            os.kill(pid, _SIGNALS[fault.kind])
        elif fault.kind == "launcher killed":
            os.kill(job.process.pid, signal.SIGKILL)
        elif fault.kind == "agent killed":
            os.kill(parent_of(pid), signal.SIGKILL)
        elif fault.kind == "loader killed":
            _wait_for(lambda: bool(children_of(pid)), job)
            os.kill(children_of(pid)[-1], signal.SIGKILL)
        elif fault.kind == "out of memory":
            testbed.limit_memory(pid)
        elif fault.kind == "no file handles":
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))  # what is open stays open
        elif fault.kind == "shm full":
            with open(Path("/proc", str(pid), "root/dev/shm", FULL), "wb", buffering=0) as filler:
                _write_until_full(filler.fileno())
        elif fault.kind == "stdout closed":
            job.close_output()
        elif fault.kind.startswith("network"):
            _cut(fault, job, setting, testbed)
        else:
            _fill(fault, job, pid, folder)
    except (ProcessLookupError, FileNotFoundError):
        raise TooLateError("the process had ended") from None
    return now


def _start_second(setting: Setting, testbed: Testbed, folder: Path) -> None:
    """The same job again, beside the first; its output goes to the file `SECOND`."""
    job = testbed.start(setting, folder)
    gone_at = job.wait_until_gone(_LIMIT_S)
    (folder / SECOND).write_text(f"{gone_at is not None} {job.process.returncode}\n{job.text}")
    job.kill_all()


def _wait_for_inside(job: Job, folder: Path) -> float:
    path = folder / "injected"
    deadline = time.monotonic() + _LIMIT_S
    while not (path.exists() and path.read_text()):
        if job.process.poll() is not None and not path.exists() or time.monotonic() > deadline:
            raise TooLateError("the script did not reach the place of the fault")
        time.sleep(_POLL_S)
    return time.monotonic() - (time.time() - float(path.read_text()))


def _wait_for_moment(fault: Fault, job: Job, setting: Setting, folder: Path) -> int:
    """Sleep until the moment of the fault; returns the process of the rank."""
    try:
        pid = job.wait_for_pid(fault.rank, _LIMIT_S)
    except TimeoutError as error:
        raise TooLateError(str(error)) from None
    if fault.moment != "start":
        _wait_for(lambda: _num_steps(folder) >= fault.step, job)
    if fault.moment == "write":
        last = setting.num_steps - 3  # drafts exist for milliseconds and may be missed
        drafts = (folder / "checkpoints").glob
        _wait_for(lambda: any(drafts(".tmp-*")) or _num_steps(folder) >= last, job)
    if fault.kind == "flipped byte":
        _wait_for(lambda: len(complete(folder)) > 1, job)
    time.sleep(fault.delay_s)
    return pid


def _wait_for(condition: Callable[[], bool], job: Job) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if job.process.poll() is not None or time.monotonic() > deadline:
            raise TooLateError("the moment of the fault did not occur")
        time.sleep(_POLL_S)


def _num_steps(folder: Path) -> int:
    with suppress(FileNotFoundError):
        return (folder / "progress").stat().st_size - 1
    return -1


def _cut(fault: Fault, job: Job, setting: Setting, testbed: Testbed) -> None:
    """Set the link of a host down, and up again if the fault is temporary."""
    host = testbed.lab.hosts[host_of(fault.rank, setting)]
    testbed.lab.cut_link(host)
    if fault.lasts_s is not None:
        time.sleep(fault.lasts_s)
        testbed.lab.restore_link(host)


def host_of(rank: int, setting: Setting) -> int:
    """The index of the host of a rank."""
    for index, num in enumerate(setting.workers):
        if rank < num:
            return index
        rank -= num
    raise IndexError(rank)


def _fill(fault: Fault, job: Job, pid: int, folder: Path) -> None:
    """Fill the disk, keep it full while the fault lasts, and kill the rank if the fault says so."""
    started = time.monotonic()
    with (folder / "disk" / FULL).open("wb", buffering=0) as filler:
        while job.process.poll() is None:
            _write_until_full(filler.fileno())
            if NO_SPACE in job.text:
                break
            if fault.lasts_s is not None and time.monotonic() - started > fault.lasts_s:
                break
            time.sleep(_POLL_S)
    if fault.lasts_s is not None:
        free(folder)
    if fault.is_followed_by_kill and NO_SPACE in job.text:
        os.kill(pid, signal.SIGKILL)


def _write_until_full(descriptor: int) -> None:
    for nbytes in (1 << 16, 1 << 9):
        try:
            while os.write(descriptor, bytes(nbytes)):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def free(folder: Path) -> None:
    """Free the space of the disk."""
    (folder / "disk" / FULL).unlink(missing_ok=True)


def complete(folder: Path) -> list[Path]:
    """The checkpoints with a manifest, oldest first."""
    return sorted(path.parent for path in (folder / "checkpoints").glob("step-*/manifest.json"))


def flip_one_bit(folder: Path, source: random.Random) -> str:
    """Change one bit of the newest checkpoint; returns its place."""
    files = sorted(path for path in complete(folder)[-1].iterdir() if path.stat().st_size)
    path = source.choices(files, [file.stat().st_size for file in files])[0]
    if source.random() < 0.5:  # small files too
        path = source.choice(files)
    content = bytearray(path.read_bytes())
    position = source.randrange(len(content))
    content[position] ^= 1 << source.randrange(8)
    path.write_bytes(content)
    return f"{path.parent.name}/{path.name} byte {position}"
