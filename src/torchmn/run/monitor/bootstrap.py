"""Start the script of a rank with the script monitor installed. Run by the agent of the rank.

``python .../bootstrap.py SCRIPT [ARGS]`` and ``python .../bootstrap.py -m MODULE [ARGS]`` behave as
``python SCRIPT`` and ``python -m MODULE`` do. `sys.argv`, ``sys.path[0]`` and ``__main__`` are the
script's, so that its classes can be pickled and `multiprocessing` can import it again, and
tracebacks begin in the script. `sys.excepthook`, `sys.exit` and `atexit` are left alone: this
module is the caller of the script and sees its exceptions and its exit status itself.

The process differs from a plain one in three ways: `faulthandler` is enabled, a daemon thread
answers the agent (`torchmn.run.monitor.script_monitor`) and the last function at exit waits for
threads of gloo; and the variable ``TORCHMN_MONITOR``, which names the connection to the agent, is
consumed before the script runs.

A command that is not a Python script or module, such as a shell script, is started unchanged and
keeps that variable. Only `torchmn.run.install_crash_handler` reads it: a Python script that
such a command starts is monitored from that call on.
"""

import atexit
import builtins
import io
import os
import pkgutil
import re
import runpy
import signal
import sys
import time
import types
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import TracebackType
from typing import NoReturn

from torchmn.cluster.environment_variables import INPUT_RANK_VARIABLE
from torchmn.control.script import prints_to_launcher, show_exception, unprinted_text
from torchmn.control.terminal_input import TerminalInput, explained, skip_breakpoint
from torchmn.run.monitor import script_monitor

_FLAGS = re.compile("-[bBdEIOPqsSuvx]+")  # options of the interpreter that take no argument


def with_bootstrap(argv: Sequence[str]) -> list[str]:
    """Insert the bootstrap into a command that runs a Python script or module, else copy it.

    >>> with_bootstrap(["sh", "run.sh"])
    ['sh', 'run.sh']
    """
    options = 1
    while options < len(argv) and _FLAGS.fullmatch(argv[options]):
        options += 1
    rest = argv[options:]
    is_python = bool(rest) and argv[0] == sys.executable
    if is_python and (rest[0] == "-m" or not rest[0].startswith("-")):
        return [*argv[:options], __file__, *rest]
    return list(argv)


def main() -> None:
    """Install the monitor and run the command in `sys.argv`. Raises what the script raises."""
    monitor = script_monitor.install_from_environment(os.environ)
    if monitor is not None and INPUT_RANK_VARIABLE in os.environ:
        # Both are Python's own places for this; a debugger of PYTHONBREAKPOINT stays.
        if os.isatty(0):
            sys.stdin = TerminalInput(monitor.awaits_input)
        elif "PYTHONBREAKPOINT" not in os.environ:
            sys.breakpointhook = skip_breakpoint
    atexit.register(wait_for_gloo_threads)  # the first, so that it runs last
    own_pid = os.getpid()
    del sys.argv[0]
    if not _is_path_safe():
        del sys.path[0]  # the folder of this file
    status, unprinted = 0, ""
    has_log = monitor is not None and monitor.has_log
    try:
        _unblock_interrupt()
        if sys.argv[0] == "-m":
            del sys.argv[0]
            _run_module(sys.argv[0], folder="" if _is_path_safe() else os.getcwd())
        elif pkgutil.get_importer(sys.argv[0]) is not None:  # an archive
            _run_module("__main__", folder=os.path.abspath(sys.argv[0]), alter_argv=False)
        else:
            _run_script(sys.argv[0])
    except SystemExit as request:
        status = script_monitor.status_of(request.code)
        # The launcher prints the text of sys.exit("text") once for all ranks that exit with it.
        if has_log and os.getpid() == own_pid and prints_to_launcher():
            unprinted = "" if isinstance(request.code, int | None) else str(request.code)
        if unprinted:
            raise SystemExit(status) from None
        raise
    except KeyboardInterrupt as interrupt:
        status = 128 + signal.SIGINT
        _leave_out_own_frames(interrupt)
        if has_log and os.getpid() == own_pid:
            unprinted = unprinted_text(interrupt, sys.excepthook)
        if unprinted:
            sys.excepthook = _print_nothing
        raise  # the interpreter turns it into an end by SIGINT
    except BaseException as error:
        status = 1
        error = explained(error)
        _leave_out_own_frames(error)
        if monitor is not None:
            monitor.note_fatal(error)  # the launcher may ask already where this rank waits
        if os.getpid() == own_pid:
            _end_record(status)  # before this process is ended, at once where MPI is in use
        if monitor is None:
            show_exception(error, sys.excepthook)
        else:
            monitor.script_failed(error, sys.excepthook)
        raise SystemExit(1) from None
    finally:
        if os.getpid() != own_pid:
            _end_child(status)
        _end_record(status)
        if monitor is not None:
            monitor.script_exits(0 if status == 128 + signal.SIGINT else status, unprinted)


def _unblock_interrupt() -> None:
    """Let Ctrl-C through, which the agent has blocked; one that came before ends the process."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback of this module
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, handler)


def _print_nothing(*_: object) -> None:
    """Stand in for `sys.excepthook` once the launcher has the traceback."""


def _end_record(status: int) -> None:
    if record := sys.modules.get("torchmn.record.recording"):  # which imports torch
        record.end(status)


def _end_child(status: int) -> NoReturn:
    """End a process that the script has forked, without cleaning up, as `multiprocessing` does.

    The threads that serve the parent's connections do not exist in the child, and closing these
    connections without them would crash it.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


def _run_script(path: str) -> None:
    """Run a file, source or compiled, as ``__main__``."""
    if not _is_path_safe():
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    file = os.path.abspath(path)
    module = _new_main()
    module.__file__ = file
    module.__loader__ = SourceFileLoader("__main__", file)
    with io.open_code(file) as stream:
        code = pkgutil.read_code(stream)
        if code is None:
            stream.seek(0)
            code = compile(stream.read(), file, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _run_module(name: str, *, folder: str, alter_argv: bool = True) -> None:
    """Run a module as ``__main__``, by the function that the interpreter calls for ``-m``.

    `runpy.run_module` would restore ``__main__`` when the module returns, although functions that
    the module has registered with `atexit` still need it.
    """
    if folder:
        sys.path.insert(0, folder)
    _new_main()
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _is_path_safe() -> bool:
    """Whether the interpreter runs with ``-P`` and adds no folder to `sys.path` (since 3.11)."""
    return bool(getattr(sys.flags, "safe_path", False))


def _new_main() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module


def _leave_out_own_frames(error: BaseException) -> None:
    """Remove this module's frames from an exception, and set `sys.last_value` and its peers."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error


# Lets the threads of torch's gloo groups finish what they do before the interpreter ends.
#
# Work of gloo keeps the Python objects of the thread that started it (in a backward pass the
# context variables), and the thread of the group drops them after it has reported that the work is
# complete. For that it takes the interpreter. Before Python 3.14 a thread that does so while the
# interpreter finalizes is ended in the middle of a destructor, and with it the process, by SIGABRT
# ("terminate called without an active exception"): a script whose training was complete has failed.

_NAME = "pt_gloo_runloop"
_PERIOD_S = 0.001


def wait_for_gloo_threads(limit_s: float = 5.0) -> None:
    """Wait until all threads of gloo are idle. Call it at exit, in the main thread. Linux only."""
    deadline = time.monotonic() + limit_s
    before, now = None, _look()
    while now and time.monotonic() < deadline:
        # One that waits for the interpreter gets it during the pause, and then has been switched.
        is_idle = all(state == "S" for state, _ in now.values())
        if is_idle and now == before:
            return
        time.sleep(_PERIOD_S)
        before, now = now, _look()


def _look() -> dict[str, tuple[str, str]]:
    """Return the state of each gloo thread and how often it has waited, by thread id."""
    found = {}
    for thread in _threads():
        try:
            with open(f"/proc/self/task/{thread}/status") as file:
                facts = dict(line.split(":", 1) for line in file)
        except OSError:  # it has ended
            continue
        if facts["Name"].strip() == _NAME:
            found[thread] = facts["State"].split()[0], facts["voluntary_ctxt_switches"]
    return found


def _threads() -> list[str]:
    try:
        return os.listdir("/proc/self/task")
    except OSError:
        return []


if __name__ == "__main__":
    main()
