"""Follow a submitted job: show its output until it ends, and return its exit status."""

from __future__ import annotations

import codecs
import glob
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from torchmn.base.errors import SAVED_STATUS, LaunchError
from torchmn.base.log import Log
from torchmn.cluster.commands import ask
from torchmn.submit.request import JobRequest
from torchmn.submit.scheduler import RESUBMITTED, Ask, JobState, Scheduler
from torchmn.submit.script import ENDED

_log = Log(__name__)
_MAX_FAILED_QUERIES = 30
_NUM_QUERIES_AFTER_END = 8


@dataclass(frozen=True, kw_only=True)
class Follower:
    """Shows a job's output on ``out`` and ``err``."""

    job: JobRequest
    scheduler: Scheduler
    out: TextIO
    err: TextIO
    ask: Ask = ask
    sleep: Callable[[float], None] = time.sleep

    def follow(self, job_id: str) -> int:
        """Show the job's output until its end and return its exit status, as shells report it.

        A job that was resubmitted is followed there. Raises LaunchError: the scheduler stopped
        answering, or the exit status is unknown.
        """
        try:
            while True:
                log = _Log(self, job_id)
                status = self._exit_status(log, self._end_of(log))
                if status != SAVED_STATUS or log.next_job in (None, job_id):
                    return status
                job_id = str(log.next_job)
                _log.info("following %s job %s", self.scheduler.title, job_id)
        except KeyboardInterrupt:
            cancel = self.scheduler.cancel_command
            _log.info("the job keeps running; `%s %s` ends it.", cancel, job_id)
            raise

    def _end_of(self, log: _Log) -> JobState:
        """Wait until a job has ended, and show its output meanwhile."""
        word, num_failed = "", 0
        for pause in _pauses():
            # asked before the log is read, so that nothing of an ended job is missed
            state = self.scheduler.state(log.job_id, self.ask)
            log.show()
            if state is None:
                num_failed += 1
                if num_failed > _MAX_FAILED_QUERIES:
                    break
            elif state.is_requeued and num_failed < _MAX_FAILED_QUERIES:
                num_failed += 1
            elif state.has_ended:
                return state
            else:
                num_failed = 0
                if state.word != word:
                    word = state.word
                    _log.info("%s job %s: %s", self.scheduler.title, log.job_id, word)
            self.sleep(pause)
        raise LaunchError(
            f"{self.scheduler.title} no longer reports the state of job {log.job_id}. It may still "
            f"run; its output is in {log.pattern}."
        )

    def _exit_status(self, log: _Log, state: JobState) -> int:
        """Return the exit status in the last line of the log, else the scheduler's.

        Both may arrive late. The log is preferred: PBS reports 0 for a job whose login shell was
        ended by a signal, and Slurm reports SIGTERM for a cancelled job even if its ranks saved.
        """
        pauses = _pauses()
        for look in range(_NUM_QUERIES_AFTER_END):
            if look > 0:
                self.sleep(next(pauses))
                state = self.scheduler.state(log.job_id, self.ask) or state
                log.show()
            status = state.exit_status if log.exit_status is None else log.exit_status
            if status is not None:
                if state.reason:
                    _log.warning("%s job %s: %s", self.scheduler.title, log.job_id, state.reason)
                return status
        raise LaunchError(
            f"{self.scheduler.title} job {log.job_id} ended, but neither {self.scheduler.title} "
            "nor the job's log has its exit status: it was probably killed. Its output is in "
            f"{log.pattern}."
        )


def _pauses() -> Iterator[float]:
    """Yield pauses in seconds: short at first, then longer, to spare the scheduler."""
    pause = 0.2
    while True:
        yield pause
        pause = min(5.0, 2 * pause)


@dataclass
class _Shown:
    """How much of a file was shown, and a decoder, since a chunk may end inside a character."""

    num_bytes: int = 0
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )


class _Log:
    """The files of one job, shown as they grow."""

    def __init__(self, follower: Follower, job_id: str) -> None:
        self.job_id = job_id
        self.exit_status: int | None = None
        self.next_job: str | None = None
        self._follower = follower
        self._folder = Path(follower.job.log_dir)
        self._stem = f"{follower.job.name}.{job_id.partition('.')[0]}"
        self._shown: dict[Path, _Shown] = {}
        self._unfinished = ""

    @property
    def pattern(self) -> str:
        """Pattern of the log files, for messages."""
        return str(self._folder / f"{self._stem}.*")

    def show(self) -> None:
        """Show new output in all files, and read the status lines of the job script."""
        for path in self._files():
            if path not in self._shown and re.search(r"\d-\d+\.(log|out)$", path.name):
                self.exit_status = None  # that of an earlier run of the job
            is_error = path.suffix in (".err", ".ER")
            text = self._new_text(path)
            if not text:
                continue
            stream = self._follower.err if is_error else self._follower.out
            encoding = stream.encoding or "utf-8"
            stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()
            if not is_error:
                self._read(text)

    def _files(self) -> list[Path]:
        """Return the files in the order of their dates: a requeued job has one for each run."""
        stem = glob.escape(self._stem)
        own = self._follower.scheduler.own_output(self._follower.job, self.job_id)
        patterns = [f"{stem}.*.{ending}" for ending in ("log", "out", "err")]
        patterns += [glob.escape(name) for name in own]
        return sorted(path for pattern in patterns for path in self._folder.glob(pattern))

    def _new_text(self, path: Path) -> str:
        shown = self._shown.setdefault(path, _Shown())
        try:
            with path.open("rb") as file:
                file.seek(shown.num_bytes)
                chunk = file.read()
        except OSError:  # network file systems may be late
            return ""
        shown.num_bytes += len(chunk)
        return shown.decoder.decode(chunk)

    def _read(self, text: str) -> None:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            if ended := re.fullmatch(rf"{ENDED} (\d+)", line):
                self.exit_status = int(ended[1])
            if resubmitted := re.fullmatch(rf"{RESUBMITTED} (\S+)", line):
                self.next_job = resubmitted[1]
