"""The interface of a scheduler, for writing job scripts and following jobs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchmn.submit.request import JobRequest


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The output of a scheduler's command."""

    returncode: int
    out: str = ""
    err: str = ""

    @property
    def text(self) -> str:
        """Standard error and output, for messages."""
        parts = [part.strip() for part in (self.err, self.out) if part.strip()]
        return "\n".join(parts) or "nothing"


Ask = Callable[[Sequence[str]], Answer]


def ask(argv: Sequence[str], *, limit_s: float = 60.0) -> Answer:
    """Run a command of a scheduler to its end. Never raises: a failure is an answer too."""
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
    """The state of a job in the scheduler's word, and its exit status if the scheduler has it.

    ``reason`` is why the scheduler itself ended the job, empty if the job ended by itself.
    ``is_requeued``: it ended to run again, and the scheduler does not know it at the moment.
    """

    word: str
    has_ended: bool = False
    exit_status: int | None = None
    reason: str = ""
    is_requeued: bool = False


class Scheduler(Protocol):
    """One scheduler. A new one is a new file and an entry in `torchmn.submit.choose`."""

    name: str  # on the command line and in a site file
    title: str  # in messages
    prefix: str  # of a directive
    submit_command: tuple[str, ...]  # takes the job script as last argument, prints the job's name
    cancel_command: str
    probe_command: str  # only this scheduler has it: PBS and Grid Engine share qsub
    job_id: str  # the job's number inside the job, as a shell word
    finds_commands: tuple[str, ...]  # shell lines that add its commands to the PATH of a job
    folder: str  # from which the job was submitted, as a shell word
    sends_warning: bool = False  # whether it can signal the script, and only that, before the limit

    def directives(self, job: JobRequest) -> list[str]:
        """The header of the script. Raises UsageError: this scheduler cannot run such a job."""

    def resubmission(self, job: JobRequest) -> list[str]:
        """Shell lines that submit the job again; ``$status`` is 85."""

    def state(self, job_id: str, ask: Ask) -> JobState | None:
        """The state of a job, ``None`` without an answer. Called every few seconds."""

    def own_output(self, job: JobRequest, job_id: str) -> tuple[str, ...]:
        """Patterns, below the log folder, of files that only the scheduler writes.

        None by default: its files are named like the job's own, and so are found with them.
        """
        return ()


def filled(name: str, /, **values: str | Sequence[str]) -> list[str]:
    """The lines of a shell file of this folder, with a value for each ``@name@``.

    A line that has such a name only becomes the lines of its value.
    """
    lines: list[str] = []
    for line in Path(__file__).with_name(name).read_text().splitlines():
        alone = re.fullmatch(r"( *)@(\w+)@", line)
        if alone is not None:
            lines += [f"{alone[1]}{each}" for each in values[alone[2]]]
        else:
            lines.append(re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), line))
    return lines
