"""The seam to a scheduler: what a job script and its follower need to know of each."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchmn.launch.submit.request import JobRequest


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command of a scheduler said."""

    returncode: int
    out: str = ""
    err: str = ""

    @property
    def words(self) -> str:
        """All it said, for messages."""
        parts = [text.strip() for text in (self.err, self.out) if text.strip()]
        return "\n".join(parts) or "nothing"


Ask = Callable[[Sequence[str]], Answer]


def ask(argv: Sequence[str], *, limit_s: float = 60.0) -> Answer:
    """Run a command of a scheduler to its end. A command that cannot be run is an answer too."""
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(returncode=124, err=f"{argv[0]} did not end within {limit_s:g} s")
    except OSError as error:
        return Answer(returncode=127, err=f"{argv[0]} cannot be run: {error.strerror}")
    return Answer(returncode=done.returncode, out=done.stdout, err=done.stderr)


@dataclass(frozen=True, kw_only=True)
class JobState:
    """How far a job is: the scheduler's word, and how it ended where the scheduler says so."""

    word: str
    has_ended: bool = False
    exit_status: int | None = None


class Scheduler(Protocol):
    """One scheduler. A new one is a new file and a line in `torchmn.launch.submit.choose`.

    ``sign`` is a command that only this scheduler has, for PBS and Grid Engine share ``qsub``;
    ``job_id`` and ``folder`` are shell words for the job's number and the folder it comes from.
    """

    @property
    def name(self) -> str:
        """As on the command line and in a site's file."""

    @property
    def title(self) -> str:
        """As in sentences."""

    @property
    def prefix(self) -> str:
        """What a directive begins with."""

    @property
    def submit_command(self) -> tuple[str, ...]:
        """The command that takes the job script as its last word and prints the job's name."""

    @property
    def cancel_command(self) -> str:
        """The command that ends a job."""

    @property
    def sign(self) -> str:
        """A command that is on the PATH where this scheduler is."""

    @property
    def job_id(self) -> str:
        """The job's number inside the job, as a shell word."""

    @property
    def folder(self) -> str:
        """The folder from which the job was submitted, as a shell word."""

    @property
    def tells_job_end(self) -> bool:
        """Whether a job can learn from the scheduler itself when its time is over."""

    def directives(self, job: JobRequest) -> list[str]:
        """The lines that ask for the job. Raises UsageError: it cannot be asked for like that."""

    def resubmission(self, job: JobRequest) -> list[str]:
        """Shell lines that let the job go on in a new one; ``$status`` is 85."""

    def state(self, job_id: str, ask: Ask) -> JobState | None:
        """The state of a job, ``None`` if it does not answer. Called every few seconds."""

    def own_output(self, job: JobRequest, job_id: str) -> tuple[str, ...]:
        """Patterns, below the log folder, of files in which only the scheduler writes."""
