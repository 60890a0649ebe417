"""A lock that a forked process finds open."""

from __future__ import annotations

import os
import threading


class ProcessLock:
    """A lock for the threads of each process by itself.

    A thread that holds a `threading.Lock` while another one forks, as a DataLoader does, leaves it
    locked in the new process for ever. This one is a new lock there, and in copies by pickle.
    """

    def __init__(self) -> None:
        self._locks = {os.getpid(): threading.RLock()}

    def __enter__(self) -> None:
        process = os.getpid()
        if process not in self._locks:
            self._locks.setdefault(process, threading.RLock())
        self._locks[process].acquire()

    def __exit__(self, *_: object) -> None:
        self._locks[os.getpid()].release()

    def __reduce__(self) -> tuple[object, ...]:
        return ProcessLock, ()
