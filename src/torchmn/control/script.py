"""The end of a script: errors of torchmn as one line, callbacks before the process exits, and the
progress file by which the job script decides whether to resubmit the job.

An error that only reports the loss of another rank is marked in every line (`FOLLOW_UP`), since its
cause is elsewhere.
"""

import os
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from torchmn.base.errors import CommunicationError, RankMismatchError, TimeLimitError, TorchmnError
from torchmn.base.log import Log
from torchmn.base.script_line import is_internal
from torchmn.cluster.environment_variables import PROGRESS_VARIABLE, TRACEBACK_VARIABLE

FOLLOW_UP = "follow-up: "
_MAX_UNPRINTED_CHARS = 1 << 15
"""What fits into the buffer of a socket in any encoding: the process may end right after it."""
_FRAME = re.compile(r'(?P<margin>[ |]*)File "(?P<file>[^"]+)", line \d')
_FOLDED = f"frames of torchmn and torch: {{}}; {TRACEBACK_VARIABLE}=1 shows them"
_PEER_ERRORS = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout")

_log = Log(__name__)
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_on_error: list[Callable[[BaseException, str], object]] = []


# While they exist, their ``failure_note()`` is added to an exception that ends the script, if it is
# not empty: what may explain it.
failure_notes: weakref.WeakSet[Any] = weakref.WeakSet()


def on_error(callback: Callable[[BaseException, str], object]) -> None:
    """Call ``callback`` with the error for which `run_main` is about to end this process. Local.

    It is also given the line that `run_main` would print, and prints it in its place.
    """
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
            # Appended: the job script reads it after a job that was killed at any moment.
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            _log.warning(
                "%s cannot be written (%s): this job will not be resubmitted.", path, error.strerror
            )


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
        text = f"torchmn: {error}"
        for callback in _on_error or [_print_error]:
            callback(error, text)
        if mpi := sys.modules.get("mpi4py.MPI"):
            # Last, since it ends this process as well.
            mpi.COMM_WORLD.Abort(1)
        raise SystemExit(1) from None


def _print_error(error: BaseException, text: str) -> None:
    print(_marked(error, text), file=sys.stderr, flush=True)


def show_exception(error: BaseException, hook: Hook | None, text: str = "") -> None:
    """Print an uncaught exception with ``hook``, and mark what follows from another failure.

    The interpreter's hook is replaced by ``text``, by default `traceback_text`, for errors of
    torchmn, and for those that only follow from the loss of another rank, of which every line is
    marked. ``hook`` may be None if there is a text.
    """
    _add_notes(error)
    is_default = hook is None or hook is sys.__excepthook__
    if hook is None or (is_default and (isinstance(error, TorchmnError) or _is_follow_up(error))):
        _print_error(error, text or traceback_text(error))
    else:
        hook(type(error), error, error.__traceback__)


def unprinted_text(error: BaseException, hook: Hook | None) -> str:
    """Return what a launcher may print in the place of this process, with all frames.

    Empty if the script has its own ``hook`` or standard error, or if the text is too long for a
    message.
    """
    if hook not in (None, sys.__excepthook__) or not prints_to_launcher():
        return ""
    _add_notes(error)
    text = _marked(error, whole_text(error))
    return text if len(text) <= _MAX_UNPRINTED_CHARS else ""


def prints_to_launcher() -> bool:
    """Whether `sys.stderr` is still the one with which the process was started."""
    return sys.stderr is not None and sys.stderr is sys.__stderr__


def _add_notes(error: BaseException) -> None:
    """Add the `failure_notes` to an exception that is not torchmn's (since Python 3.11)."""
    if isinstance(error, TorchmnError) or not hasattr(error, "add_note"):
        return
    for note in filter(None, [each.failure_note() for each in list(failure_notes)]):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def whole_text(error: BaseException) -> str:
    """Return the traceback of an exception as Python prints it."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return text.rstrip("\n")


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an exception with the frames of torchmn and torch folded.

    For a `TorchmnError` it also omits chained exceptions without user code, which the message
    describes. Nothing is omitted with ``TORCHMN_TRACEBACK=1`` or outside of user code.
    """
    shown = traceback.TracebackException.from_exception(error, compact=True)
    if os.environ.get(TRACEBACK_VARIABLE) or not _has_user_code(shown):
        return whole_text(error)
    if isinstance(error, TorchmnError):
        _drop_internal(shown)
    return _folded("".join(shown.format()).rstrip("\n"))


def _drop_internal(shown: traceback.TracebackException) -> None:
    """Remove those without user code from the exceptions that an exception follows from."""
    current: traceback.TracebackException | None = shown
    while current is not None:
        before = _before(current)
        if before is None or _has_user_code(before):
            current = before
        elif current.__cause__ is not None:
            current.__cause__ = _before(before)
        else:
            current.__context__ = _before(before)


def _before(shown: traceback.TracebackException) -> traceback.TracebackException | None:
    """The exception that Python prints before this one."""
    if shown.__cause__ is not None:
        return shown.__cause__
    return None if shown.__suppress_context__ else shown.__context__


def _has_user_code(shown: traceback.TracebackException) -> bool:
    return any(not is_internal(frame.filename) for frame in shown.stack)


def _folded(text: str) -> str:
    """Replace frames of torchmn and torch in tracebacks by their number.

    In the text, because a message may hold the traceback of another process, as that of an error
    in a worker of a DataLoader does.
    """
    lines: list[str] = []
    num_folded, margin = 0, ""
    for line in [*text.split("\n"), ""]:
        frame = _FRAME.match(line)
        if frame and is_internal(frame["file"]):
            num_folded, margin = num_folded + 1, frame["margin"]
            continue
        if num_folded and not frame and line.startswith((f"{margin} ", f"{margin}[")):
            continue  # the source of the frame above it
        if num_folded:
            lines.append(f"{margin}({_FOLDED.format(num_folded)})")
            num_folded = 0
        lines.append(line)
    return "\n".join(lines[:-1])


def frames_of_script(stack: Sequence[traceback.FrameSummary]) -> list[str]:
    """Format the frames of a stack outside of torchmn and torch, and the number of others.

    Empty with ``TORCHMN_TRACEBACK=1``, and if there are no such frames.
    """
    if os.environ.get(TRACEBACK_VARIABLE) or all(is_internal(each.filename) for each in stack):
        return []
    return _folded("".join(traceback.format_list(stack))).splitlines(keepends=True)


def script_stack(thread: threading.Thread) -> str:
    """Format the script's frames in the stack of a thread; empty if there are none."""
    frame = sys._current_frames().get(thread.ident or 0)
    lines = frames_of_script(traceback.extract_stack(frame)) if frame else []
    return "".join([f"{thread.name}:\n", *lines]).rstrip("\n") if lines else ""


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


def _is_communication_error(error: BaseException) -> bool:
    """Whether gloo, NCCL or MPI raised it, in a script that uses them directly."""
    module, name = type(error).__module__, type(error).__name__
    if module.startswith("mpi4py"):
        return True
    is_distributed = name in ("DistBackendError", "DistNetworkError", "DistStoreError")
    # not str(), which may raise in an exception of the user's own
    text = "".join(traceback.format_exception_only(error)).lower()
    return (is_distributed or "gloo" in text) and any(part in text for part in _PEER_ERRORS)
