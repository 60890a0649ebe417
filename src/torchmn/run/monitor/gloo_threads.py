"""Lets the threads of torch's gloo groups finish what they do before the interpreter ends.

Work of gloo keeps the Python objects of the thread that started it (in a backward pass the context
variables), and the thread of the group drops them after it has reported that the work is complete.
For that it takes the interpreter. Before Python 3.14 a thread that does so while the interpreter
finalizes is ended in the middle of a destructor, and with it the process, by SIGABRT ("terminate
called without an active exception"): a script whose training was complete has failed.
"""

from __future__ import annotations

import os
import time

_NAME = "pt_gloo_runloop"
_PERIOD_S = 0.001


def wait_for_gloo_threads(limit_s: float = 5.0) -> None:
    """Wait until all of them wait for work. Call it at exit, in the main thread. Linux only."""
    deadline = time.monotonic() + limit_s
    before, now = None, _look()
    while now and time.monotonic() < deadline:
        # One that waits for the interpreter gets it during the pause, and then has been switched.
        is_idle = all(state == "S" for state, _ in now.values())
        if is_idle and now == before:
            return
        time.sleep(_PERIOD_S)
        before, now = now, _look()


def _look() -> dict[str, tuple[str, str]]:
    """The state of each thread and how often it has waited."""
    found = {}
    for thread in _threads():
        try:
            with open(f"/proc/self/task/{thread}/status") as file:
                facts = dict(line.split(":", 1) for line in file)
        except OSError:  # it has ended
            continue
        if facts["Name"].strip() == _NAME:
            found[thread] = facts["State"].split()[0], facts["voluntary_ctxt_switches"]
    return found


def _threads() -> list[str]:
    try:
        return os.listdir("/proc/self/task")
    except OSError:
        return []
