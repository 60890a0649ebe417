"""How a script ends: one line for an error of torchmn, callbacks before the process exits, and what
the job script needs to know to decide whether the job is resubmitted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from torchmn.environment_variables import PROGRESS_VARIABLE, TRACEBACK_VARIABLE
from torchmn.errors import TorchmnError

_on_error: list[Callable[[BaseException], None]] = []


def on_error(callback: Callable[[BaseException], None]) -> None:
    """Call ``callback`` with the error for which `run_main` is about to end this process. Local."""
    _on_error.append(callback)


def record_progress(line: str) -> None:
    """Append a line to the file of ``torchmn submit --requeue``, if this is such a job. Rank 0.

    ``checkpoint ...`` names one that is complete, ``limit ...`` is when the scheduler ends the job,
    in seconds since 1970, and ``exit ...`` says why all ranks save and exit.
    Without the latter exit status 85 is the script's own; see `torchmn.launch.submit.requeue`.
    """
    path = os.environ.get(PROGRESS_VARIABLE)
    if path:
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            print(
                f"torchmn: {path} cannot be written ({error.strerror}): this job will not be "
                "resubmitted.",
                file=sys.stderr,
                flush=True,
            )


def run_main(main: Callable[[], object]) -> None:
    """Run a script's ``main`` and turn a `TorchmnError` into one line and exit status 1. Local.

    Any other exception keeps its traceback, and ``TORCHMN_TRACEBACK=1`` keeps that of a
    `TorchmnError` as well. Where MPI is in use the whole job is aborted, since `MPI_Finalize` at
    exit would wait for the other ranks. Raises SystemExit: ``main`` raised a `TorchmnError`.
    """
    try:
        main()
    except TorchmnError as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        print(f"torchmn: {error}", file=sys.stderr, flush=True)
        for callback in _on_error:
            callback(error)
        if mpi := sys.modules.get("mpi4py.MPI"):
            mpi.COMM_WORLD.Abort(1)
        raise SystemExit(1) from None
