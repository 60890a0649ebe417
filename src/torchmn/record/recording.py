"""The record of this process: whether there is one, how it begins and how it ends.

`create_communicator` begins it where ``TORCHMN_RECORD`` names a folder, as under ``torchmn run``,
or the script by `record`. It observes `torchmn.base.events` and the steps of all optimizers, for
which torch has hooks, and ends with the communicator or with the script.
"""

from __future__ import annotations

import atexit
import contextlib
import cProfile
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchmn.base import events
from torchmn.base.compiling import not_compiled
from torchmn.base.errors import UsageError
from torchmn.base.log import Log
from torchmn.base.private_files import make_private_folder
from torchmn.cluster.environment_variables import RECORD_VARIABLE
from torchmn.cluster.network import nominal_speed, route_of
from torchmn.control.processes import resident_nbytes
from torchmn.control.rank_listener import RankAddress
from torchmn.record.clock_offsets import ClockServer, measure_offset
from torchmn.record.profile_request import FOLDER as PROFILE_FOLDER
from torchmn.record.profile_request import ProfileRequest, is_record_off
from torchmn.record.records import (
    FOLDER,
    FORMAT,
    ClockOffset,
    Memory,
    RecordFile,
    RunEnd,
    RunStart,
)
from torchmn.record.step_recorder import StepRecorder
from torchmn.record.step_trace import RequestedTrace, StepTrace, running
from torchmn.record.timeline import clock_of

_PERIOD_S = 1.0
_MEMORY_PERIOD_S = 10.0
_CLOCK_PERIOD_S = 60.0
_log = Log(__name__)
_VERSIONED = ("torch", "numpy", "mpi4py")


class World(events.Communicator, Protocol):
    """The part of a communicator that the record uses."""

    rank: int
    size: int
    intra_rank: int
    inter_rank: int
    device: torch.device
    groups: Any  # its connections, with the addresses at which other ranks reach this one
    flight_recorder: Any  # its last collectives

    @property
    def settings(self) -> dict[str, str]:
        """Settings of the communicator, such as route and transport, as text."""

    def on_finalize(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `finalize` call ``callback`` first; returns a function that cancels this."""

    def bcast_obj(self, obj: object, root: int = 0) -> Any:
        """Give every rank the root's object. *Collective.*"""


class Recording:
    """The record of one process, from its beginning to `close`.

    A background thread writes lines about every second, and measures memory and clocks.

    >>> import tempfile
    >>> recording = torchmn.record.record(comm, tempfile.mkdtemp())
    >>> for loss in (2.0, 1.0):  # the training
    ...     torchmn.record.report_value("loss", loss)
    >>> recording.close()
    >>> sorted(path.name for path in recording.folder.iterdir())
    ['steps']
    """

    def __init__(
        self, comm: World, folder: Path, clocks: RankAddress | None, server: ClockServer | None
    ) -> None:
        self.folder = folder
        self.comm = comm
        self._clocks, self._server = clocks, server
        self._file = RecordFile(folder, _run_start(comm))
        self.recorder = StepRecorder(self._file.write, clock_of(comm.device.type))
        self.recorder.communicator(comm, True)
        self._gpu = comm.device if comm.device.type == "cuda" else None
        self._offset: ClockOffset | None = None
        self._requested: RequestedTrace | None = None
        self._functions: tuple[cProfile.Profile, Path] | None = None
        self._stopping = threading.Event()
        self._is_closed = False
        # Hooks of torch for every optimizer of the process, since the script may have any number of
        # them; the recorder decides which one's steps count.
        self._optimizer_hooks = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ended),
        ]
        events.add(self.recorder)
        self._forget_finalize = comm.on_finalize(self.close)
        self._thread = threading.Thread(target=self._run, name="torchmn-record", daemon=True)
        self._thread.start()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(0 if error[0] is None else 1)

    def close(self, status: int = 0) -> None:
        """End the record with the script's exit status. Further calls do nothing. Local."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stopping.set()
        if _current and _current[0] is self:
            _current.clear()
        atexit.unregister(self._close_at_exit)
        self._forget_finalize()
        self._stop_observing()
        recorder = self.recorder
        recorder.close()
        self._end_profile()
        self._file.write(RunEnd(at_s=time.perf_counter(), status=status, phases=recorder.rest()))
        self._file.close()
        if self._server is not None:
            self._server.stop()
        self._thread.join(_PERIOD_S)  # it may still wait for an answer of rank 0

    def forget_in_child(self) -> None:
        """Stop recording in a forked child, whose parent still writes the files.

        Takes no lock: a thread that does not exist in the child may have held it at the fork.
        """
        self._is_closed = True
        atexit.unregister(self._close_at_exit)
        events.observers = ()  # as `_stop_observing`
        for hook in self._optimizer_hooks:
            hook.remove()

    def _stop_observing(self) -> None:
        events.remove(self.recorder)
        for hook in self._optimizer_hooks:
            hook.remove()

    @not_compiled
    def _step_begins(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.recorder.step_begins(optimizer)

    @not_compiled
    def _step_ended(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.recorder.step_ended(optimizer, self.recorder.num_steps)

    def new_trace(self, name: str) -> StepTrace:
        """Make a profile of this rank that is written to a file of this name."""
        path = self.folder / PROFILE_FOLDER / f"{name}.json"
        recent = self.comm.flight_recorder.recent_collectives
        return StepTrace(self.recorder, recent, path, self.comm.rank, lambda: self._offset)

    def profile(self, request: ProfileRequest) -> None:
        """Begin the profile that ``torchmn run --profile`` requests, or wait for its first step."""
        name = request.file_name(self.comm.rank)
        if request.kind == "functions":
            self._functions = cProfile.Profile(), self.folder / PROFILE_FOLDER / f"{name}.prof"
            self._functions[0].enable()
        else:
            self._requested = RequestedTrace(request, self.new_trace(name))
            self.recorder.on_step.append(self._requested.step_begins)

    def _end_profile(self) -> None:
        if self._requested is not None:
            self._requested.close()
        if self._functions is not None:
            profile, path = self._functions
            profile.disable()
            try:
                make_private_folder(path.parent)
                profile.dump_stats(path)
                path.chmod(0o600)
            except OSError as error:
                _log.warning("the profile %s cannot be written: %s", path, error.strerror or error)

    def _close_at_exit(self) -> None:
        # Functions at exit are not told the status; an uncaught exception leaves ``last_value``.
        self.close(1 if getattr(sys, "last_value", None) is not None else 0)

    def _run(self) -> None:
        memory_at = clocks_at = 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= memory_at:
                memory_at = now + _MEMORY_PERIOD_S
                measured = _memory(self._gpu)
                self._file.write(measured)
                for observer in events.observers:
                    observer.memory(measured.device_nbytes)
            if now >= clocks_at and self._clocks is not None:
                clocks_at = now + _CLOCK_PERIOD_S
                offset = (
                    ClockOffset(at_s=time.perf_counter(), offset_s=0.0, error_s=0.0)
                    if self._server is not None
                    else measure_offset(self._clocks)
                )
                if offset is not None:
                    self._offset = offset
                    self._file.write(offset)
            if self._server is not None:
                self._server.serve(_PERIOD_S)
            else:
                self._stopping.wait(_PERIOD_S)
            self._file.flush()
        if self._server is not None:  # not by `close`: the server belongs to this thread
            self._server.close()


# In tests and notebooks ranks are threads, which begin at the same time: see `start`.
_starting = threading.Lock()
_current: list[Recording] = []
"""The record of this process: at most one, since its hooks observe the whole process."""


def _forget_in_child() -> None:
    """Forget the record in a forked child, which is not a rank."""
    for recording in _current:
        recording.forget_in_child()
    _current.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def current() -> StepRecorder | None:
    """Return the recorder of this process, None if nothing is recorded."""
    return _current[0].recorder if _current else None


def wants_record(environ: Mapping[str, str]) -> bool:
    """Whether the next communicator should begin the record of this process."""
    return bool(environ.get(RECORD_VARIABLE)) and not is_record_off(environ) and not _current


def start(comm: World, folder: Path) -> Recording | None:
    """Begin the record of this process. *Collective.*

    Rank 0 chooses the folder for all: ``folder``, or a new one in it if it has a record already.
    Returns None, after a message, if this rank cannot write its file.
    """
    request = ProfileRequest.of(os.environ)
    server, offer = None, None
    if comm.rank == 0:
        if (folder / FOLDER).exists():
            folder = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        with contextlib.suppress(OSError):  # without sockets clocks are not compared
            server = ClockServer(comm.groups.addresses)
        offer = str(folder), None if server is None else server.address
    name, address = comm.bcast_obj(offer)
    try:
        with _starting:
            if _current:  # ranks as threads of one process: the first one is recorded
                if server is not None:
                    server.close()
                return _current[0]
            recording = Recording(comm, Path(name), address, server)
            _current.append(recording)
    except OSError as error:
        Log(__name__, rank=comm.rank, size=comm.size).warning(
            "rank %d: no record of steps is kept, for %s cannot be written (%s). %s=off switches "
            "it off.",
            comm.rank,
            name,
            error.strerror or error,
            RECORD_VARIABLE,
        )
        if server is not None:
            server.close()
        return None
    atexit.register(recording._close_at_exit)
    if request is not None:
        recording.profile(request)
    return recording


def record(comm: World, folder: str | Path = "torchmn-record") -> Recording:
    """Begin to record the steps of this process in ``folder``/steps. *Collective.*

    Call it after `create_communicator`. If ``torchmn run`` or ``TORCHMN_RECORD`` has begun a
    record, that one is returned. A record ends with ``comm.finalize()``, with the process, with
    `Recording.close`, or at the end of a ``with`` block.

    Raises UsageError: the files cannot be written.

    >>> import tempfile
    >>> with torchmn.record.record(comm, tempfile.mkdtemp()) as recording:
    ...     pass  # train; then: torchmn report FOLDER
    """
    if _current:
        return _current[0]
    recording = start(comm, Path(folder))
    if recording is None:
        raise UsageError(f"The folder {str(folder)!r} cannot be written. Give another one.")
    return recording


def trace(name: str = "%h-%r") -> AbstractContextManager[Path]:
    """Run torch's profiler in a ``with`` block, and add torchmn's exchanges to its trace. Local.

    The file is ``profile/NAME.json`` in the folder of the record; in ``name`` %h stands for the
    host, %r for the rank and %p for the process. Enter and leave it between steps, and at the same
    steps on all ranks; ``python -m torchmn.observe FOLDER`` merges the files.

    Raises UsageError: this process keeps no record, or the name is invalid.

    >>> import tempfile
    >>> with torchmn.record.record(comm, tempfile.mkdtemp()):
    ...     with torchmn.record.trace("first-%r") as path:
    ...         total = comm.allreduce(torch.ones(3))  # some steps
    >>> path.name, path.exists()
    ('first-0.json', True)
    """
    if not _current:
        raise UsageError(
            "trace() needs the record of steps, whose clocks it uses. Call "
            "torchmn.record.record(comm) first, or start the script with torchmn run."
        )
    own = _current[0]
    request = ProfileRequest.parse(f"0:1,{name}")
    return running(own.new_trace(request.file_name(own.comm.rank)))


def end(status: int) -> None:
    """End the record, if there is one, with the script's exit status. Local."""
    if _current:
        _current[0].close(status)


def report_value(name: str, value: float, step: int | None = None) -> None:
    """Record a number such as a loss or an accuracy, for the report. Local, from any thread.

    ``step`` is the current step by default. Does nothing if no record is kept.

    Example:
        >>> torchmn.record.report_value("accuracy", 0.75)
    """
    if _current:
        _current[0].recorder.value(name, float(value), step)


# ---- facts ----


def _run_start(comm: World) -> RunStart:
    return RunStart(
        format=FORMAT,
        rank=comm.rank,
        size=comm.size,
        intra_rank=comm.intra_rank,
        inter_rank=comm.inter_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=str(comm.device),
        cpus=sorted(os.sched_getaffinity(0)),
        unix_s=time.time(),
        at_s=time.perf_counter(),
        settings={"script": " ".join(sys.argv), **comm.settings},
        versions=_versions(),
        link_bytes_per_s=_link_bytes_per_s(comm.groups.addresses),
    )


def _link_bytes_per_s(addresses: Sequence[str]) -> float:
    route = route_of(addresses[0]) if addresses else None
    return 0.0 if route is None else nominal_speed(route.interface)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("torchmn", *_VERSIONED):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _memory(gpu: torch.device | None) -> Memory:
    """Measure the memory of this process, and what torch has allocated on ``gpu`` if not None."""
    # The GPU is passed on, since the current device of a new thread is always the first one.
    device_nbytes = 0 if gpu is None else torch.cuda.memory_allocated(gpu)
    rss_nbytes = resident_nbytes(os.getpid())
    return Memory(at_s=time.perf_counter(), rss_nbytes=rss_nbytes, device_nbytes=device_nbytes)
