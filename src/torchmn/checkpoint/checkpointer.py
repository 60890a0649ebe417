"""The checkpointer that users hold: save, resume, finish."""

import atexit
import math
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torchmn.base import events
from torchmn.base.errors import (
    CheckpointWarning,
    CommunicationError,
    DataError,
    RankMismatchError,
    TorchmnError,
    UsageError,
    raise_if_no_count,
)
from torchmn.base.warn import warn
from torchmn.checkpoint.dcp import export_dcp
from torchmn.checkpoint.folder_owner import FolderOwner
from torchmn.checkpoint.manifest import Manifest, is_checkpoint, order_of, parse
from torchmn.checkpoint.reader import SavedCheckpoint
from torchmn.checkpoint.restore import RestoreOperation
from torchmn.checkpoint.snapshot import CopyMemory, Stateful
from torchmn.checkpoint.writer import Outcome, Request, Writer, read_manifest
from torchmn.comm import Communicator, Grid
from torchmn.data import rank_seeds

OnFailure = Literal["warn", "raise"]
_PAUSE_S = 0.05
_GRACE_S = 5.0


class MultiNodeCheckpointer:
    """Saves a training run on all ranks, and resumes it; see `create_multi_node_checkpointer`.

    It is called from a loop, or is an extension of a trainer. It saves all objects that have a
    ``state_dict``, and the random generators of every rank.

    >>> import tempfile
    >>> model = torch.nn.Linear(3, 1)
    >>> checkpointer = torchmn.create_multi_node_checkpointer(comm, tempfile.mkdtemp(), "net")
    >>> checkpointer.save(7, {"model": model})
    >>> checkpointer.finish()
    >>> checkpointer.resume({"model": model})
    7
    """

    trigger = (1, "epoch")
    priority = -100  # after extensions that change what is saved, as snapshots
    default_name = "checkpointer"

    def __init__(
        self,
        comm: Communicator,
        writer: Writer,
        *,
        is_async: bool,
        checks_replicas: bool,
        on_failure: OnFailure,
        owner: FolderOwner | None = None,
        read_only: bool = False,
        grid: Grid | None = None,
    ) -> None:
        self._comm = comm
        self._grid = grid
        self._owner = owner
        self._is_read_only = read_only
        self._writer = writer
        self._channel = writer.channel
        self._where = writer.storage.folder
        self.is_async = is_async
        """Whether training continues while a checkpoint is written."""
        self._checks_replicas = checks_replicas
        self._on_failure = on_failure
        self._memory = CopyMemory()
        self._thread: threading.Thread | None = None
        # Set by the thread that writes, and read once it has been joined: hence without a lock.
        self._outcome: Outcome | Exception | None = None
        self._last_problem: TorchmnError | None = None
        self._broken: Exception | None = None
        self._is_closed = False
        self._save_times_s: list[float] = []
        self.resumed_from: str | None = None
        """The checkpoint that `resume` has loaded; None if there was none."""
        self._forget_close = comm.on_finalize(self.close)
        # The thread that writes is a daemon: the interpreter would end it in the middle of a save.
        atexit.register(self._close_at_exit)

    def __repr__(self) -> str:
        return f"<MultiNodeCheckpointer {self._comm.rank_label}, {self._where}>"

    # ---- saving ----

    @events.during("checkpoint")
    def save(
        self, step: int, state: Mapping[str, Stateful], *, metric: float | None = None
    ) -> None:
        """Save the state after ``step`` steps. *Collective.*

        ``metric`` is what ``best=`` compares; rank 0's value counts. The call returns once a copy
        has been made in memory, or after everything is written if not ``is_async``. If the previous
        save is still being written, it waits for that one first.

        If a rank cannot write its part, the checkpoint is aborted on all ranks and earlier ones are
        kept. The next `save` or `finish` reports it, by a warning or, with ``on_failure="raise"``,
        by DataError.

        Raises:
            UsageError: an object has no ``state_dict``, the step is negative, or the checkpointer
                was created with ``read_only=True``.
            UnsupportedError: a state holds something that would have to be pickled.
            RankMismatchError: replicas that must be equal differed when the previous checkpoint was
                taken, which is aborted.
        """
        self._raise_if_unusable()
        if self._is_read_only:
            raise UsageError(
                f"{self._comm.rank_label}: save() was called on a checkpointer of {self._where} "
                "that was created with read_only=True."
            )
        raise_if_no_count("step", step, "a number of steps", least=0)
        began_s = time.monotonic()
        self._wait()
        self._handle_outcome()
        try:
            copy = self._memory.copy(
                state,
                rank_seeds.capture(self._comm.device),
                with_replicated=self._checks_replicas,
                compares_parts=self._grid is not None,
            )
            compared = _finite(metric)
        except Exception as error:  # the other ranks must not wait for this rank
            problem = f"{self._comm.rank_label}: {type(error).__name__}: {error}"
            self._start(Request(step=step, copy=None, problem=problem))
            raise
        self._start(Request(step=step, copy=copy, metric=compared))
        self._save_times_s.append(time.monotonic() - began_s)
        if not self.is_async:
            self._handle_outcome()

    @events.during("checkpoint")
    def finish(self) -> None:
        """Wait until everything is written. *Collective.*

        Raises DataError: the last checkpoint could not be written; RankMismatchError: as in `save`.
        """
        self._wait()
        self._handle_outcome(is_last=True)
        problem, self._last_problem = self._last_problem, None
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Finish the save in progress and close the connections. Local; never raises or hangs.

        Called by `Communicator.finalize` and at the end of the interpreter. It waits for other
        ranks no longer than the communicator's time limit, or 5 s if this rank ends by an error.
        """
        self._close(has_failed=sys.exc_info()[0] is not None)

    def _close_at_exit(self) -> None:
        # At exit no exception is being handled; an uncaught one has set `sys.last_type`.
        self._close(has_failed=hasattr(sys, "last_type"))

    def _close(self, *, has_failed: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._close_at_exit)
        self._forget_close()
        grace_s = min(self._comm.timeout_s, _GRACE_S if has_failed else math.inf)
        thread = self._thread
        while thread is not None and thread.is_alive():
            thread.join(_PAUSE_S)
            # Only the wait for other ranks is limited, not the time of a slow disk.
            if self._channel.waited_s() > grace_s:
                self._channel.abort()
                thread.join(_GRACE_S)
                break
        if thread is None or not thread.is_alive():  # else the thread may still use both
            self._channel.close(self._comm)
            self._memory = CopyMemory()
        if self._owner is not None:
            self._owner.release()
        outcome = self._outcome
        if isinstance(outcome, Exception):
            self._warn(str(outcome))
        elif outcome is not None:
            for text in (outcome.problem, outcome.disagreement, outcome.note):
                self._warn(text)

    def get_stats(self) -> str:
        """Describe how long saves have interrupted training, in ChainerMN's format. Local."""
        seconds = self._save_times_s
        if not seconds:
            return "No stats available"
        mean = sum(seconds) / len(seconds)
        return (
            f"Snapshot duration stats (sec): avg={mean:f}, min={min(seconds):f}, "
            f"max={max(seconds):f}"
        )

    # ---- as an extension of a trainer ----

    def __call__(self, trainer: Any) -> None:
        """Save the trainer. *Collective.* The value for ``best=`` comes from its observation."""
        metric = None
        if (best := self._writer.best) is not None:
            metric = trainer.observation.get(best.key)
            if metric is None:
                self._warn_once_per_job(
                    f"the observation has no '{best.key}' for the best checkpoint at "
                    f"iteration {trainer.iteration}; it has {', '.join(trainer.observation)}."
                )
        self.save(trainer.iteration, {"trainer": trainer}, metric=metric)

    def maybe_load(self, trainer: Any) -> int:
        """Resume a trainer, after its last `extend`; return its iteration. *Collective.*"""
        return self.resume({"trainer": trainer})

    def finalize(self, trainer: object = None) -> None:
        """Wait for the last save. Called by a trainer when it ends, normally or by an exception."""
        if sys.exc_info()[0] is None:
            self.finish()
            return
        # Nothing may replace the exception that is being raised; `close` reports the outcome.
        self._wait(self._comm.timeout_s)

    # ---- resuming ----

    def resume(self, state: Mapping[str, Stateful]) -> int:
        """Load the newest valid checkpoint in place and return its step; 0 if there is none.

        *Collective.* Nothing is loaded before all ranks have read and checked everything. A damaged
        checkpoint is named in a warning, and the one before it is tried.

        With the same number of ranks, each rank loads what it has saved. Otherwise, an object with
        ``reshard_state_dict(states, comm)`` gets the states of all old ranks and returns what this
        rank loads; any other object loads the state of old rank 0. Random generators: see
        `rng_state`.

        Raises:
            DataError: there are checkpoints, but none is valid; the message has all reasons.
            UsageError: it was saved with different names for the objects.
        """
        self._raise_if_unusable()
        self._wait()
        self._handle_outcome()
        problems: list[str] = []
        for name, manifest, problem in self._candidates():
            if manifest is not None:
                problem = self._load(name, manifest, state)
                if problem is None:
                    self.resumed_from = name
                    log = self._comm.logger(__name__)
                    log.info("resumed after step %d from %s/%s", manifest.step, self._where, name)
                    if problems:
                        self._warn_once_per_job(
                            f"{self._where}: not every checkpoint is valid. {'; '.join(problems)}. "
                            f"Training resumes from {name}."
                        )
                    return manifest.step
            problems.append(f"{name}: {problem}")
            self._writer.bad.add(name)
        if problems:
            raise DataError(
                f"{self._comm.rank_label}: no checkpoint in {self._where} is valid. "
                f"{'; '.join(problems)}. Move the folder away to start from scratch."
            )
        return 0

    def _candidates(self) -> list[tuple[str, Manifest | None, str | None]]:
        """List (name, manifest or None, problem), newest first, as rank 0 sees. *Collective.*"""
        storage, found, problem = self._writer.storage, [], None
        try:
            names = filter(is_checkpoint, storage.names() if self._comm.rank == 0 else ())
            for name in sorted(names, key=order_of, reverse=True):
                try:
                    found.append([name, read_manifest(storage, name).to_bytes().decode(), None])
                except DataError as error:
                    found.append([name, None, str(error)])
        except OSError as error:
            problem = error.strerror or str(error)
        gathered = self._channel.all_gather([found, problem], "checkpoints were looked for")
        found, problem = gathered[0]
        if problem is not None:
            raise DataError(f"{self._comm.rank_label}: {self._where} cannot be read: {problem}.")
        return [
            (name, None if text is None else parse(text.encode()), reason)
            for name, text, reason in found
        ]

    def _load(self, name: str, manifest: Manifest, state: Mapping[str, Stateful]) -> str | None:
        """Load one checkpoint, or return why it is invalid, the same on all ranks. *Collective.*"""
        restore = RestoreOperation(self._comm, manifest, self._grid)
        problem = reason = None
        rejection: Exception | None = None
        try:
            with SavedCheckpoint(self._writer.storage, name, manifest) as saved:
                restore.read(saved, state)
        except DataError as caught:
            problem = str(caught)
        except UsageError as caught:
            rejection, reason = caught, str(caught)
        except Exception as caught:  # the other ranks must not wait for this rank
            rejection = caught
            reason = f"{self._comm.rank_label}: {type(caught).__name__}: {caught}"
        mine = [problem, reason]
        nbytes = sum(entry.nbytes for entry in manifest.files.values())
        gathered = self._channel.all_gather(mine, f"{name} was read", nbytes=nbytes)
        if rejections := [theirs for _, theirs in gathered if theirs]:
            raise rejection or UsageError(rejections[0])
        if any(theirs for theirs, _ in gathered):
            return "; ".join(dict.fromkeys(theirs for theirs, _ in gathered if theirs))
        # From here on objects are overwritten: an older checkpoint can no longer be tried instead.
        error = restore.load(state)
        reports = self._channel.all_gather(
            None if error is None else f"{type(error).__name__}: {error}",
            f"{name} was loaded",
            nbytes=nbytes,
        )
        if error is not None:
            raise error
        if any(reports):
            rank = next(rank for rank, text in enumerate(reports) if text)
            raise CommunicationError(
                f"{self._comm.rank_label}: rank {rank} could not load {name}: {reports[rank]}"
            )
        for note in restore.notes(state):
            self._warn_once_per_job(note)
        return None

    def export_dcp(self, folder: str | Path) -> None:
        """Write the newest checkpoint for `torch.distributed.checkpoint`. *Collective.*

        Rank 0 writes its state, the others wait; see `torchmn.checkpoint.export_dcp`. Raises
        DataError on all ranks: there is no valid checkpoint, or it cannot be written.
        """
        self._wait()
        self._handle_outcome()
        found = [name for name, manifest, _ in self._candidates() if manifest is not None]
        problem = None if found else "there is no checkpoint"
        if self._comm.rank == 0 and found:
            try:
                export_dcp(self._where / found[0], folder)
            except DataError as error:
                problem = str(error)
        problem = self._channel.all_gather(problem, "a checkpoint was exported")[0]
        if problem is not None:
            raise DataError(f"{self._comm.rank_label}: no export of {self._where}: {problem}.")

    # ---- inside ----

    def _start(self, request: Request) -> None:
        if not self.is_async:
            self._run(request)
            return
        self._thread = threading.Thread(
            target=self._run, args=(request,), name="torchmn-checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, request: Request) -> None:
        outcome: Outcome | Exception
        try:
            outcome = self._writer.write(request)
        except Exception as error:  # raised by the next call
            outcome = error
        if request.copy is not None:  # else this rank has raised it already
            self._outcome = outcome

    def _wait(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _handle_outcome(self, *, is_last: bool = False) -> None:
        """Report the outcome of the previous save; `finish` raises that of the last one."""
        outcome, self._outcome, self._thread = self._outcome, None, None
        if outcome is None:
            return
        if isinstance(outcome, Exception):
            if isinstance(outcome, CommunicationError):
                self._broken = outcome  # ranks may have left the channel in different rounds
            raise outcome
        self._last_problem = None
        if outcome.disagreement is not None:
            raise RankMismatchError(f"{self._comm.rank_label}: {outcome.disagreement}")
        self._warn_once_per_job(outcome.note)
        if outcome.problem is not None:
            error = DataError(f"{self._comm.rank_label}: {outcome.problem}")
            if self._on_failure == "raise":
                raise error
            self._last_problem = error
            if not is_last:
                self._warn_once_per_job(outcome.problem)

    def _warn_once_per_job(self, text: str | None) -> None:
        if text and self._comm.rank == 0:
            self._warn(text)

    def _warn(self, text: str | None) -> None:
        if text:
            warn(f"{self._comm.rank_label}: {text}", CheckpointWarning)

    def _raise_if_unusable(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self._comm.rank_label}: this checkpointer was closed.")
        if self._broken is not None:
            raise CommunicationError(
                f"No checkpoint can be written after a rank was lost: {self._broken}"
            ) from self._broken


def _finite(metric: Any) -> float | None:
    """Convert a number, or a tensor of one element, to a float; None if JSON cannot express it."""
    value = math.nan if metric is None else float(metric)
    return value if math.isfinite(value) else None
