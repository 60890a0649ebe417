"""Run a function as ranks on this machine, from a notebook cell or any Python process.

The ranks are new processes under the agents of `torchmn run`, so that CUDA and threads that the
caller has started do no harm, and none outlives the call. Function, arguments and results travel by
cloudpickle through a private temporary folder: what is defined in a notebook has no module from
which a rank could import it.
"""

import codecs
import functools
import io
import linecache
import os
import pickle
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any, Literal, NoReturn, TextIO, TypeVar, get_args, overload

from torchmn.base.errors import (
    LaunchError,
    RankError,
    UnknownNameError,
    UnsupportedError,
    UsageError,
    require,
)
from torchmn.base.private_files import write_whole
from torchmn.cluster.launcher_env import read_launcher_env
from torchmn.cluster.units import counted
from torchmn.control.rank_claim import claimed_by
from torchmn.control.script import is_consequence
from torchmn.run.backend import choose_backend, this_machine
from torchmn.run.job import FAILURE_GRACE_S
from torchmn.run.local_ranks import LocalRanks, start_local_ranks
from torchmn.run.monitor.job_result import LOG_DIR

LocalBackend = Literal["auto", "gloo", "nccl"]
_BACKENDS = get_args(LocalBackend)
_END_LIMIT_S = FAILURE_GRACE_S + 5.0
_KILL_LIMIT_S = 2.0
_CALL, _RESULT, _ERROR = "function", "result", "error"

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class _Call:
    """The pickled call that every rank reads."""

    function: Callable[..., object]
    arguments: tuple[object, ...]
    returning: int  # the ranks from 0 whose results are wanted
    # Lines of code that is in no file, by the name that tracebacks give it.
    sources: Mapping[str, list[str]]


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """An exception of a rank; ``pickled`` is empty where it cannot be sent."""

    rank: int
    at_s: float
    is_consequence: bool
    summary: str
    trace: str
    pickled: bytes


@overload
def launch_local(
    function: Callable[..., Result],
    num_ranks: int,
    *args: object,
    backend: LocalBackend = "auto",
    log_dir: str | Path | None = None,
) -> Result: ...


@overload
def launch_local(
    function: Callable[..., Result],
    num_ranks: int,
    *args: object,
    backend: LocalBackend = "auto",
    log_dir: str | Path | None = None,
    all_results: Literal[True],
) -> list[Result]: ...


def launch_local(
    function: Callable[..., Any],
    num_ranks: int,
    *args: object,
    backend: LocalBackend = "auto",
    log_dir: str | Path | None = None,
    all_results: bool = False,
) -> Any:
    """Run ``function(*args)`` as ranks on this machine and return what rank 0 returns.

    ```python
    def train(epochs):
        comm = torchmn.create_communicator()
        ...
        return model.cpu()

    model = torchmn.launch_local(train, 2, 5)
    ```
    >>> torchmn.launch_local(max, 2, [1, 5])
    5

    Made for notebooks: function, arguments and results may be defined in a cell, closures and
    lambdas too. Output of the ranks appears in the cell, each line with its rank. The call returns
    when all ranks have ended; Ctrl-C, or the interruption of the kernel, ends them all. Local: to
    be called in the process that the user works in, not on a rank.

    Args:
        function: what every rank calls. It makes its own communicator.
        num_ranks: at least 1.
        args: arguments of the function, the same for all ranks. Each rank gets a copy.
        backend: ``gloo``, ``nccl``, or ``auto``: NCCL with a GPU for every rank, else gloo.
        log_dir: parent of this run's log folder, by default ``torchmn-logs``.
        all_results: return a list with the results of all ranks, in the order of ranks.

    Tensors come back on their device. Ranks import modules from their files as they are now, also
    those that this process has imported before.

    Raises UsageError: a number or an argument does not fit, the log folder cannot be used, or
    something cannot be pickled; UnsupportedError: the backend cannot be used here, or cloudpickle
    is not installed (``pip install 'torchmn[notebook]'``); RankError: a rank raised an exception,
    which is the ``__cause__``, or was ended; LaunchError: the ranks could not be started.
    """
    _pickler()  # or an error that names the extra
    if not callable(function):
        raise UsageError(
            f"launch_local needs a function first, got {function!r}: launch_local(train, 2)."
        )
    chosen = _checked(num_ranks, backend)
    logs = _log_folder(log_dir)
    folder = Path(tempfile.mkdtemp(prefix="torchmn-"))  # readable by this user alone
    num_results = num_ranks if all_results else 1
    ranks: LocalRanks | None = None
    try:
        (folder / _CALL).write_bytes(_pickled_call(function, args, num_results))
        ranks = start_local_ranks(
            _call,
            [(str(folder),)] * num_ranks,
            backend=chosen,
            attached_logs=logs,
            env=_environment(os.environ),
        )
        _show_output(ranks)
        status = ranks.process.wait()
        if status != 0:
            _raise_failure(folder, ranks, status, num_ranks)
        results = [_result(folder, rank) for rank in range(num_results)]
    finally:
        if ranks is not None:
            ranks.end(_KILL_LIMIT_S)
        shutil.rmtree(folder, ignore_errors=True)
    return results if all_results else results[0]


def _log_folder(log_dir: str | Path | None) -> Path:
    """Return the absolute path of the log folder, and create it. Raises UsageError."""
    path = Path(log_dir or LOG_DIR).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(path, os.W_OK | os.X_OK) else "it is not writable"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise UsageError(
            f"The log folder {str(path)!r} cannot be used ({why}): choose another with log_dir=."
        )
    return path


def _checked(num_ranks: int, backend: str) -> Literal["gloo", "nccl", "mpi"]:
    """Check the arguments and return the backend to use.

    Raises UsageError, UnknownNameError or UnsupportedError.
    """
    if not isinstance(num_ranks, int) or isinstance(num_ranks, bool) or num_ranks < 1:
        raise UsageError(f"num_ranks must be an integer, at least 1, got {num_ranks!r}.")
    place = read_launcher_env(os.environ)
    if place and place.known_size not in (None, 1) and claimed_by(os.environ) is None:
        raise UsageError(
            f"launch_local starts ranks, and this process is itself one of several: {place}. Call "
            "it in a plain Python process, or let the launcher start the ranks that you need."
        )
    if backend == "mpi":
        raise UnsupportedError(
            "launch_local starts the ranks itself, and MPI needs its own mpirun: use "
            '`torchmn run --backend mpi` with a script, or backend="gloo".'
        )
    if backend not in _BACKENDS:
        raise UnknownNameError("backend", backend, _BACKENDS)
    machine = replace(this_machine(os.environ), mpirun=None)
    return choose_backend(backend, machine, num_ranks)[0]


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with a matplotlib backend that needs no cell, which ranks do not have."""
    is_inline = env.get("MPLBACKEND", "").startswith("module://")
    return {**env, **({"MPLBACKEND": "Agg"} if is_inline else {})}


# ---- what travels ------------------------------------------------------------------------------


def _pickled_call(
    function: Callable[..., object], args: tuple[object, ...], num_results: int
) -> bytes:
    """Pickle the call. Raises UsageError: the function or an argument cannot be pickled."""
    call = _Call(function=function, arguments=args, returning=num_results, sources=_sources())
    try:
        return _dumps(call)
    except Exception as error:
        parts = {"function": function, **{f"argument {n}": arg for n, arg in enumerate(args)}}
        raise UsageError(_pickle_problem(parts, error)) from error


def _pickle_problem(parts: Mapping[str, object], error: Exception) -> str:
    found = "call"
    for name, part in parts.items():
        try:
            _dumps(part)
        except Exception as reason:
            found, error = name, reason
            break
    return (
        f"The {found} cannot be sent to the ranks: {type(error).__name__}: {error}. What it uses "
        "from outside travels with it: make open files, locks, communicators, generators and "
        "loaders with workers inside of the function."
    )


def _dumps(value: object) -> bytes:
    """Pickle a value, with functions and classes of a notebook by value instead of by name."""
    stream = io.BytesIO()
    _pickler()(stream).dump(value)
    return stream.getvalue()


@functools.cache
def _pickler() -> Any:
    """Return a subclass of cloudpickle's ``Pickler`` that keeps the file name of code objects.

    Tracebacks find source lines by that name; cloudpickle 3.1.3 writes "<dynamic-code>" instead.
    Raises UnsupportedError: cloudpickle is not installed.
    """
    theirs = require("cloudpickle", "launch_local", "torchmn[notebook]").Pickler

    def reduce_code(code: CodeType) -> tuple[object, ...]:
        make, arguments = theirs.dispatch_table[CodeType](code)
        return _restore_code, (make, arguments, code.co_filename)

    table = ChainMap({CodeType: reduce_code}, theirs.dispatch_table)
    return type("Pickler", (theirs,), {"dispatch_table": table})


def _restore_code(
    make: Callable[..., CodeType], arguments: tuple[object, ...], filename: str
) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


def _sources() -> dict[str, list[str]]:
    """Return the source lines of notebook cells, so that tracebacks of ranks can show them."""
    return {
        name: list(entry[2])
        for name, entry in list(linecache.cache.items())  # other threads may add to it
        if len(entry) == 4 and not os.path.exists(name)
    }


# ---- in a rank ---------------------------------------------------------------------------------


def _call(where: str) -> None:
    """Call the function as a rank, and write its result or its exception to a file."""
    folder, rank = Path(where), int(os.environ["RANK"])
    try:
        call: _Call = pickle.loads((folder / _CALL).read_bytes())
        for name, lines in call.sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        result = call.function(*call.arguments)
        if rank < call.returning:
            write_whole(folder / f"{_RESULT}{rank}", _pickled_result(result, rank))
    except Exception as error:
        write_whole(folder / f"{_ERROR}{rank}", pickle.dumps(_failure_of(error, rank)))
        raise


def _pickled_result(result: object, rank: int) -> bytes:
    try:
        return _dumps(result)
    except Exception as error:
        raise UsageError(
            f"What rank {rank} returned (a {type(result).__name__}) cannot be sent back: "
            f"{type(error).__name__}: {error}. Return tensors, numbers, state dicts or modules."
        ) from error


def _failure_of(error: Exception, rank: int) -> _Failure:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    trace = "".join(traceback.format_exception(type(error), error, frames))
    try:
        pickled = _dumps(error)
        pickle.loads(pickled)
    except Exception:  # classes with arguments of their own cannot be made again
        pickled = b""
    return _Failure(
        rank=rank,
        at_s=time.time(),
        is_consequence=is_consequence(error),
        summary=traceback.format_exception_only(type(error), error)[-1].strip(),
        trace=trace,
        pickled=pickled,
    )


# ---- in the caller -----------------------------------------------------------------------------


def _show_output(ranks: LocalRanks) -> None:
    """Show what the ranks write until they have ended; Ctrl-C ends them."""
    try:
        _copy_output(ranks)
    except KeyboardInterrupt:
        # The launcher is in a session of its own, so the terminal's SIGINT has not reached it.
        ranks.process.send_signal(signal.SIGINT)
        _copy_output(ranks, limit_s=_END_LIMIT_S)
        raise


def _copy_output(ranks: LocalRanks, limit_s: float | None = None) -> None:
    """Copy the ranks' output to `sys.stdout` and `sys.stderr`, in a notebook those of the cell.

    Returns at the end of both pipes, or after ``limit_s``.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    decoder = codecs.getincrementaldecoder("utf-8")
    with selectors.DefaultSelector() as selector:
        for pipe, stream in (
            (ranks.process.stdout, sys.stdout),
            (ranks.process.stderr, sys.stderr),
        ):
            if pipe is not None and not pipe.closed:
                selector.register(pipe, selectors.EVENT_READ, (stream, decoder("replace")))
        while selector.get_map():
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            for key, _ in selector.select(left_s):
                stream, decode = key.data
                chunk = os.read(key.fd, 1 << 16)
                _show(stream, decode.decode(chunk, final=not chunk))
                if not chunk:
                    selector.unregister(key.fileobj)


def _show(stream: TextIO | None, text: str) -> None:
    if stream is None or not text:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with suppress(BrokenPipeError, ValueError):  # the reader has left: the logs have the output
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()


def _raise_failure(folder: Path, ranks: LocalRanks, status: int, num_ranks: int) -> NoReturn:
    """Raise RankError for the rank that failed first, from its exception if that can be had.

    Raises LaunchError: no rank and no launcher has reported anything.
    """
    found: list[_Failure] = [pickle.loads(path.read_bytes()) for path in folder.glob(f"{_ERROR}*")]
    first = min(found, key=lambda each: (each.is_consequence, each.at_s), default=None)
    report = ranks.failure(0.0)
    if report and (first is None or first.is_consequence):
        raise RankError(report)
    if first is None:
        ended = f"The {counted(num_ranks, 'rank')} ended with exit status {status}"
        raise LaunchError(f"{ended}: see the messages above.")
    original: BaseException | None = None
    if first.pickled and not first.is_consequence:
        with suppress(Exception):  # its class cannot be imported here
            original = pickle.loads(first.pickled)
    raise RankError(
        f"Rank {first.rank} of {num_ranks} raised {first.summary}\n\n{first.trace}",
        rank=first.rank,
    ) from original


def _result(folder: Path, rank: int) -> object:
    path = folder / f"{_RESULT}{rank}"
    if not path.exists():
        raise RankError(
            f"Rank {rank} exited with status 0 before the function returned: let it return "
            "instead of calling sys.exit.",
            rank=rank,
        )
    return pickle.loads(path.read_bytes())
