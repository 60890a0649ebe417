"""How a script ends: errors of torchmn as one sentence, callbacks before the process exits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from torchmn.environment_variables import TRACEBACK_VARIABLE
from torchmn.errors import TorchmnError

_before_exit: list[Callable[[BaseException], None]] = []


def before_exit(callback: Callable[[BaseException], None]) -> None:
    """Have it called with the error for which `run_main` is about to end this process. Local."""
    _before_exit.append(callback)


def run_main(main: Callable[[], object]) -> None:
    """Run a script's ``main`` and turn a `TorchmnError` into one sentence and exit status 1.

    Local. Any other exception keeps its traceback. ``TORCHMN_TRACEBACK=1`` keeps ours as well.
    Where MPI is in use the whole job is ended: at exit `MPI_Finalize` would wait for the others.
    """
    try:
        main()
    except TorchmnError as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        print(f"torchmn: {error}", file=sys.stderr, flush=True)
        for callback in _before_exit:
            callback(error)
        if mpi := sys.modules.get("mpi4py.MPI"):
            mpi.COMM_WORLD.Abort(1)
        raise SystemExit(1) from None
