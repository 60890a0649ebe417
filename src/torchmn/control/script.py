"""The end of a script: errors of torchmn as one line, callbacks before the process exits, and the
progress file by which the job script decides whether to resubmit the job.

An error that only reports the loss of another rank is marked in every line (`FOLLOW_UP`), since its
cause is elsewhere.
"""

import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from torchmn.base.errors import CommunicationError, RankMismatchError, TimeLimitError, TorchmnError
from torchmn.base.terminal import say
from torchmn.cluster.environment_variables import PROGRESS_VARIABLE, TRACEBACK_VARIABLE

FOLLOW_UP = "follow-up: "
_CAUSED = "The above exception was the direct cause of the following exception:"
_RAISED_DURING = "During handling of the above exception, another exception occurred:"
_PEER_ERRORS = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout")

_on_error: list[Callable[[BaseException], None]] = []


# While they exist, their ``failure_note()`` is added to an exception that ends the script, if it is
# not empty: what may explain it.
failure_notes: weakref.WeakSet[Any] = weakref.WeakSet()


def on_error(callback: Callable[[BaseException], None]) -> None:
    """Call ``callback`` with the error for which `run_main` is about to end this process. Local."""
    _on_error.append(callback)


def record_progress(line: str) -> None:
    """Append a line to the file of ``torchmn submit --requeue``, if this is such a job. Rank 0.

    ``checkpoint ...`` names one that is complete, ``limit ...`` is when the scheduler ends the job,
    in seconds since 1970, and ``exit ...`` says why all ranks save and exit.
    Without the latter exit status 85 is the script's own; see `torchmn.submit.scheduler`.
    """
    path = os.environ.get(PROGRESS_VARIABLE)
    if path:
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            say(f"{path} cannot be written ({error.strerror}): this job will not be resubmitted.")


def run_main(main: Callable[[], object]) -> None:
    """Run a script's ``main`` and turn a `TorchmnError` into one line and exit status 1. Local.

    Any other exception keeps its traceback, and ``TORCHMN_TRACEBACK=1`` keeps that of a
    `TorchmnError` as well. Where MPI is in use the whole job is aborted, since `MPI_Finalize` at
    exit would wait for the other ranks. Raises SystemExit: ``main`` raised a `TorchmnError`.

    Example:
        >>> run_main(lambda: print("trained"))
        trained
    """
    try:
        main()
    except TorchmnError as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        print(_marked(error, f"torchmn: {error}"), file=sys.stderr, flush=True)
        for callback in _on_error:
            callback(error)
        if mpi := sys.modules.get("mpi4py.MPI"):
            mpi.COMM_WORLD.Abort(1)
        raise SystemExit(1) from None


def show_exception(
    error: BaseException,
    hook: Callable[[type[BaseException], BaseException, TracebackType | None], object],
) -> None:
    """Print an uncaught exception with ``hook``, and mark what follows from another failure.

    The interpreter's hook is replaced by `traceback_text` for errors of torchmn, and for those that
    only follow from the loss of another rank, of which every line is marked. Exceptions that are
    not torchmn's get the `failure_notes` first (since Python 3.11).
    """
    if not isinstance(error, TorchmnError) and hasattr(error, "add_note"):
        for note in filter(None, [each.failure_note() for each in list(failure_notes)]):
            error.add_note(note)
    if hook is sys.__excepthook__ and (isinstance(error, TorchmnError) or _is_follow_up(error)):
        print(_marked(error, traceback_text(error)), file=sys.stderr, flush=True)
    else:
        hook(type(error), error, error.__traceback__)


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an exception; that of a `TorchmnError` only shows user code.

    It omits frames of torchmn and torch, and chained exceptions without user code, which the
    message describes. Nothing is omitted with ``TORCHMN_TRACEBACK=1`` or outside of user code.
    """
    own = _text_of_script(error)
    if not isinstance(error, TorchmnError) or not own:
        own = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    else:
        for each, link in _shown_before(error):
            if before := _text_of_script(each):
                own = f"{before}\n{link}\n\n{own}"
    return own.rstrip("\n")


def _text_of_script(error: BaseException) -> str:
    """Format an exception with its frames of user code; empty if it has none."""
    lines = frames_of_script(traceback.extract_tb(error.__traceback__))
    end = traceback.format_exception_only(error)
    return "".join(["Traceback (most recent call last):\n", *lines, *end]) if lines else ""


def frames_of_script(stack: Sequence[traceback.FrameSummary]) -> list[str]:
    """Format the frames of a stack outside of torchmn and torch, and the number of others.

    Empty with ``TORCHMN_TRACEBACK=1``, and if there are no such frames.
    """
    own = [frame for frame in stack if not _is_internal(frame.filename)]
    if not own or os.environ.get(TRACEBACK_VARIABLE):
        return []
    num_hidden = len(stack) - len(own)
    note = f"  (frames of torchmn and torch: {num_hidden}; {TRACEBACK_VARIABLE}=1 shows them)\n"
    return [*traceback.format_list(own), *[note] * bool(num_hidden)]


def script_stack(thread: threading.Thread) -> str:
    """Format the script's frames in the stack of a thread; empty if there are none."""
    frame = sys._current_frames().get(thread.ident or 0)
    lines = frames_of_script(traceback.extract_stack(frame)) if frame else []
    return "".join([f"{thread.name}:\n", *lines]).rstrip("\n") if lines else ""


def _is_internal(file: str) -> bool:
    """Whether a file belongs to torchmn or torch."""
    return file.startswith(tuple(_folder_of(name) for name in ("torchmn", "torch")))


def _folder_of(package: str) -> str:
    module = sys.modules.get(package)
    folder = os.path.dirname(getattr(module, "__file__", None) or "")
    return os.path.join(folder, "") if folder else os.devnull


def is_consequence(error: BaseException) -> bool:
    """Whether an error only reports that other ranks have ended or do not answer."""
    for each in _causes(error):
        if isinstance(each, RankMismatchError):
            return False
        if isinstance(each, CommunicationError) or _is_communication_error(each):
            return True
    return False


def _is_follow_up(error: BaseException) -> bool:
    """As `is_consequence`, except for time limits: theirs may be the only error of the job."""
    is_late = any(isinstance(each, TimeLimitError) for each in _causes(error))
    return is_consequence(error) and not is_late


def _marked(error: BaseException, text: str) -> str:
    mark = FOLLOW_UP if _is_follow_up(error) else ""
    return "\n".join(f"{mark}{line}" for line in text.split("\n"))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause or context, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _shown_before(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    """Yield the chained exceptions that Python prints before an error, the nearest first.

    With each comes the sentence that Python prints after it.
    """
    link = ""
    for each in _causes(error):
        if link:
            yield each, link
        if each.__cause__ is None and each.__suppress_context__:
            return
        link = _CAUSED if each.__cause__ is not None else _RAISED_DURING


def _is_communication_error(error: BaseException) -> bool:
    """Whether gloo, NCCL or MPI raised it, in a script that uses them directly."""
    module, name = type(error).__module__, type(error).__name__
    if module.startswith("mpi4py"):
        return True
    is_distributed = name in ("DistBackendError", "DistNetworkError", "DistStoreError")
    # not str(), which may raise in an exception of the user's own
    text = "".join(traceback.format_exception_only(error)).lower()
    return (is_distributed or "gloo" in text) and any(part in text for part in _PEER_ERRORS)
