"""Run programs of the system for their answer, such as a scheduler's, mpirun or nvidia-smi."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Output and exit code of a command."""

    returncode: int
    out: str = ""
    err: str = ""

    @property
    def text(self) -> str:
        """Standard error and output, for messages."""
        parts = [part.strip() for part in (self.err, self.out) if part.strip()]
        return "\n".join(parts) or "nothing"


def ask(
    argv: Sequence[str],
    *,
    limit_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    order: str = "",
) -> Answer:
    """Run a command to its end, with ``order`` as its input. A failure is returned, not raised.

    The exit code is 127 for a command that cannot be run, and 124 for one that exceeds the limit.
    """
    try:
        done = subprocess.run(
            list(argv),
            input=order,
            env=env,
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
