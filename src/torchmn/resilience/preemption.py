"""Save and leave before the scheduler ends the job, all ranks at the same step.

Ranks learn of the end at different moments: a signal reaches some of them, clocks differ. So now
and then, about once a second, all ranks come together and leave if any of them must. At which step
they come together next they agree on as well, for a rank alone cannot know how long a step takes
the others. Nothing is saved inside a signal handler: it sets a flag.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from torchmn.communicators import Communicator
from torchmn.errors import UsageError
from torchmn.exit_status import SAVED_STATUS
from torchmn.topology.walltime import job_end

__all__ = ["SAVED_STATUS", "Preemption"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send before the end: PBS and Slurm the first, ``--signal=USR1`` and Grid Engine's
``-notify`` the others."""
_MOST_STEPS = 1000


class Preemption:
    """Watches for the end of the job, and saves in time. *Collective*: all ranks, every step.

    ```python
    preemption = torchmn.Preemption(comm, save=lambda: save(step), margin_s=120)
    for step, batch in enumerate(batches, start):
        ...
        preemption.step_ended()   # saves and exits with status 85 when time is up
    ```
    With `Trainer` give it to ``trainer.extend(preemption, trigger=(1, "iteration"))``. The job
    scripts of ``torchmn submit --requeue`` take status 85 for "go on in a new job".

    Args:
        comm: the ranks that train.
        save: called on all ranks at the same step, after it has ended.
        margin_s: how long before the limit ranks save, in seconds: longer than saving takes.
        end: the limit in seconds since the epoch; read from the scheduler when not given.
        period_s: how often ranks come together, in seconds.

    Raises UsageError: ``margin_s`` or ``period_s`` is no positive number.

    Signals are watched where this is made in the main thread; the handlers that were there before
    are put back by `close`.
    """

    def __init__(
        self,
        comm: Communicator,
        save: Callable[[], object],
        *,
        margin_s: float = 120.0,
        end: float | None = None,
        period_s: float = 1.0,
    ) -> None:
        for name, value in (("margin_s", margin_s), ("period_s", period_s)):
            if not value > 0:
                raise UsageError(f"{name}={value} must be a positive number of seconds.")
        self._comm = comm
        self._save = save
        self._period_s = period_s
        known = end if end is not None else (job_end(os.environ) if comm.rank == 0 else None)
        self._leave_at = None if known is None else known - margin_s
        self.reason = ""
        """Why this rank wants to leave, in words; empty as long as it does not."""
        self._num_steps = 0
        self._meet_at = 1
        self._met_at_s = time.monotonic()
        self._met_at_step = 0
        self._before = self._watch(SIGNALS)

    def is_due(self) -> bool:
        """Whether all ranks must save and leave now. *Collective*, once after every step."""
        self._num_steps += 1
        if self._num_steps < self._meet_at:
            return False
        if self._leave_at is not None and time.time() >= self._leave_at and not self.reason:
            self.reason = "the job's time is nearly over"
        now = time.monotonic()
        step_s = (now - self._met_at_s) / (self._num_steps - self._met_at_step)
        steps = min(_MOST_STEPS, max(1, int(self._period_s / max(step_s, 1e-9))))
        # the largest of "leave" and of minus the steps: the fewest
        row = self._comm.allreduce(
            torch.tensor([int(bool(self.reason)), -steps], device="cpu"), "max"
        )
        self._met_at_s, self._met_at_step = now, self._num_steps
        self._meet_at = self._num_steps - int(row[1])
        return bool(row[0])

    def step_ended(self) -> None:
        """Save and exit with `SAVED_STATUS` on all ranks if it is time. *Collective*."""
        if not self.is_due():
            return
        self._save()
        self._comm.barrier()
        if self.reason:
            print(f"torchmn: saved and left, for {self.reason}.", file=sys.stderr, flush=True)
        self.close()
        raise SystemExit(SAVED_STATUS)

    def __call__(self, trainer: object = None) -> None:
        """As an extension of a trainer: `step_ended`."""
        self.step_ended()

    def close(self) -> None:
        """Put the handlers of signals back."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def _watch(self, signums: Iterable[signal.Signals]) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {signum: signal.signal(signum, self._on_signal) for signum in signums}

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        self.reason = f"{signal.Signals(signum).name} came"
