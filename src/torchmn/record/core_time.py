"""Read from the kernel's counters how long a thread ran and how long it waited for a core."""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple


class CoreTime(NamedTuple):
    """Seconds that the training thread waited for a core, that it ran, and that others ran."""

    run_queue_s: float
    cpu_s: float
    others_cpu_s: float


class CoreTimeReader:
    """Reads the counters of the thread that calls `since_last`. Local."""

    def __init__(self) -> None:
        self._thread = 0
        self._schedstat = -1
        """The descriptor of the kernel's file for this thread, if it is open."""
        self._last_ns = (0, 0, 0)

    def since_last(self) -> CoreTime | None:
        """Return the times since this thread's last call; None if the system has no counters."""
        try:
            if self._schedstat < 0 or self._thread != threading.get_native_id():
                self._open()
            before_ns, self._last_ns = self._last_ns, self._read_ns()
        except (OSError, ValueError, IndexError):  # another system, or a kernel without it
            return None
        run_s, queue_s, process_s = (
            (now - before) / 1e9 for now, before in zip(self._last_ns, before_ns, strict=True)
        )
        return CoreTime(queue_s, run_s, max(0.0, process_s - run_s))

    def close(self) -> None:
        """Close the kernel's file. A later call of `since_last` opens it again."""
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1

    def _open(self) -> None:
        self.close()
        self._thread = threading.get_native_id()
        path = f"/proc/self/task/{self._thread}/schedstat"
        self._schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._last_ns = self._read_ns()

    def _read_ns(self) -> tuple[int, int, int]:
        """Return nanoseconds that the thread ran, waited for a core, and its process ran."""
        run_ns, queue_ns = os.pread(self._schedstat, 64, 0).split()[:2]
        return int(run_ns), int(queue_ns), time.process_time_ns()
