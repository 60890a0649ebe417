"""Save and exit before the scheduler ends the job, at the same step on all ranks.

Ranks learn of the end at different times: a signal, or the notice that a cloud gives the host of a
rank (`torchmn.run.preemption_notice`), reaches only some of them, and clocks differ. So
about once a second all ranks synchronize, and exit if any of them must. They also agree on the step
of the next synchronization, since a rank does not know how long a step takes on the others. Signal
handlers only set a flag and save nothing.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from torchmn.base import events
from torchmn.base.errors import SAVED_STATUS, CheckpointWarning, UsageError
from torchmn.base.warn import warn
from torchmn.cluster.walltime import job_end
from torchmn.comm import Communicator
from torchmn.control.script import record_progress

__all__ = ["SAVED_STATUS", "Preemption"]

# What schedulers send before the end: PBS and Slurm the first, ``--signal=USR1`` and Grid Engine's
# ``-notify`` the others.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_MAX_STEPS = 1000


class Preemption:
    """Detects that the job is about to end, and saves in time. *Collective*: all ranks, every step.

    ```python
    preemption = torchmn.Preemption(comm, save=lambda: save(step), margin_s=120)
    for step, batch in enumerate(batches, start):
        ...
        preemption.step_ended()   # saves and exits with status 85 when time is up
    ```
    With `Trainer` give it to ``trainer.extend(preemption, trigger=(1, "iteration"))``. The job
    scripts of ``torchmn submit --requeue`` resubmit a job that exits with status 85.

    Args:
        comm: the ranks that train.
        save: called on all ranks at the same step, after it has ended.
        margin_s: how long before the limit ranks save, in seconds; more than saving takes.
        end: the limit in seconds since the epoch; read from the scheduler when not given.
        period_s: how often ranks synchronize, in seconds.

    Raises UsageError: ``margin_s`` or ``period_s`` is no positive number.

    Signals are handled if this is created in the main thread. `close` restores the old handlers.

    Example:
        >>> preemption = torchmn.Preemption(comm, save=lambda: None, margin_s=60)
        >>> preemption.step_ended()  # time is left
        >>> preemption.close()
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
        # One rank that knows the limit is enough: all save and exit when any of them must.
        known = end if end is not None else (job_end(os.environ) if comm.rank == 0 else None)
        self._leave_at = None if known is None else known - margin_s
        if known is not None and comm.rank == 0:
            _warn_if_short(known - time.time(), margin_s)
            record_progress(f"limit {known:.0f}")
        self.reason = ""
        """Reason why this rank must exit; empty as long as it need not."""
        self._num_steps = 0
        self._sync_at = 1
        self._synced_at_s = time.monotonic()
        self._synced_at_step = 0
        self._before = self._watch(SIGNALS)

    def is_due(self) -> bool:
        """Whether all ranks must save and exit now. *Collective*: call it once after every step."""
        self._num_steps += 1
        if self._num_steps < self._sync_at:
            return False
        if self._leave_at is not None and time.time() >= self._leave_at and not self.reason:
            self.reason = "the time limit of the job is near"
        notices = [each.notice for each in events.observers if each.notice]
        if notices and not self.reason:
            self.reason = f"this host will be preempted: {notices[0]}"
        now = time.monotonic()
        step_s = (now - self._synced_at_s) / (self._num_steps - self._synced_at_step)
        steps = min(_MAX_STEPS, max(1, int(self._period_s / max(step_s, 1e-9))))
        # the largest of "leave" and of minus the steps: the fewest
        row = self._comm.allreduce(
            torch.tensor([int(bool(self.reason)), -steps], device="cpu"), "max"
        )
        self._synced_at_s, self._synced_at_step = now, self._num_steps
        self._sync_at = self._num_steps - int(row[1])
        is_due = bool(row[0])
        if is_due and self._comm.rank == 0:
            record_progress(f"exit: {self.reason or 'another rank must exit'}")
        return is_due

    def step_ended(self) -> None:
        """Save and exit with `SAVED_STATUS` on all ranks if it is time. *Collective*."""
        if not self.is_due():
            return
        self._save()
        # A launcher may end the job when the first rank exits, while others still save.
        self._comm.barrier()
        if self.reason:
            # The reason is that of one rank, or of each that got a signal.
            self._comm.logger(__name__, all_ranks=True).info("saved and exited: %s.", self.reason)
        self.close()
        raise SystemExit(SAVED_STATUS)

    def __call__(self, trainer: object = None) -> None:
        """Call `step_ended`, as an extension of a trainer."""
        self.step_ended()

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def _watch(self, signums: Iterable[signal.Signals]) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {signum: signal.signal(signum, self._on_signal) for signum in signums}

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        self.reason = f"received {signal.Signals(signum).name}"


def _warn_if_short(left_s: float, margin_s: float) -> None:
    """Warn if the job, and each job that continues it, would save after its first step."""
    if left_s <= margin_s:
        warn(
            f"The scheduler ends this job in {left_s:.0f} s, and margin_s={margin_s:g}: all ranks "
            "save and exit after their first step. Ask for a longer time limit, or pass a smaller "
            "margin_s.",
            CheckpointWarning,
        )
