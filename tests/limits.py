"""Time limits of tests: all come from here, and they are longer on a machine that is slow or busy.

A limit ends a test that hangs; it says nothing of how fast the machine is. The process that begins
the run measures the machine once and leaves the factor in the environment, for its workers.
"""

import os
import time

VARIABLE = "TORCHMN_TEST_SLOWNESS"
_NUM_TURNS = 1_000_000
_QUIET_S = 0.03
"""Of processor time for that many turns, on the machine for which the limits were written."""


def limit(seconds: float) -> float:
    """The seconds that something may take here, if it may take ``seconds`` on a quiet machine."""
    return seconds * slowness()


def slowness() -> float:
    """How many times longer than on a quiet machine something may take here."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{_measured():.2f}"
    return float(os.environ[VARIABLE])


def _measured() -> float:
    began_s, began_busy_s = time.perf_counter(), time.thread_time()
    turns = 0
    while turns < _NUM_TURNS:
        turns += 1
    busy_s = time.thread_time() - began_busy_s
    wait = (time.perf_counter() - began_s) / busy_s  # others have had the processor meanwhile
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    # A test shares its core with one beside it, and what it waits for may begin after it.
    return max(1.0, busy_s / _QUIET_S) * (1 + max(wait, 1 + load))
