"""Exit statuses of processes and what they mean to a launcher."""

from __future__ import annotations

SAVED_STATUS = 85
"""The exit status of ranks that saved a checkpoint and exited before the job's time limit."""

DOCTOR_STATUS = {"note": 0, "warning": 3, "error": 4}
"""The exit status of `torchmn doctor` by its worst finding. As for all commands 1 and 2 are errors:
it could not begin, or was asked for something invalid."""


def shell_code(returncode: int) -> int:
    """An exit code as a shell reports it: 128 + signal for a process that a signal ended."""
    return 128 - returncode if returncode < 0 else returncode
