"""Under the bootstrap a script behaves as under plain Python, and the agent gets its reports."""

import os
import socket
import subprocess
import sys
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchmn
from tests.limits import limit
from torchmn.cluster.environment_variables import MONITOR_VARIABLE
from torchmn.control.connection import Channel
from torchmn.control.messages import Failed, Leaving, Message
from torchmn.run.monitor import bootstrap
from torchmn.run.monitor.bootstrap import wait_for_gloo_threads, with_bootstrap

SOURCES = str(Path(torchmn.__file__).parents[1])
LOOK = """
import json, multiprocessing, os, pickle, sys

class Local:
    pass

def work(queue):
    queue.put([__name__, pickle.dumps(Local()).decode("latin1")])

if __name__ == "__main__":
    queue = multiprocessing.get_context("spawn").Queue()
    child = multiprocessing.get_context("spawn").Process(target=work, args=(queue,))
    child.start()
    assert isinstance(pickle.loads(pickle.dumps(Local())), Local)
    main = sys.modules["__main__"]
    assert main.Local is Local
    print(json.dumps([sys.argv, sys.path, __name__, __file__, __package__, main.__spec__ is None,
                      sorted(set(vars(main)) - {"__annotations__", "__cached__"}),
                      __builtins__.__name__, queue.get(), os.environ.get("TORCHMN_MONITOR")]))
    child.join()
"""


def run(
    command: list[str], folder: Path, **env: str
) -> tuple[subprocess.CompletedProcess[str], list[Message]]:
    """Run a command as an agent does; how it ended and what it reported."""
    own, other = socket.socketpair()
    other.set_inheritable(True)
    variable = {MONITOR_VARIABLE: f"{other.fileno()}:{os.getpid()}"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCES, **variable, **env},
        close_fds=False,
        capture_output=True,
        text=True,
        timeout=limit(50),
    )
    other.close()
    channel = Channel(own)
    messages = channel.collect()
    channel.close()
    return done, messages


def plain(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCES, **env},
        capture_output=True,
        text=True,
        timeout=limit(50),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "package" / "tool.py").write_text(LOOK)
    (package / "__main__.py").write_text("import sys; print(sys.argv, __name__, __spec__.name)")
    (tmp_path / "link.py").symlink_to("package/tool.py")
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("__main__.py", "import sys; print(sys.argv, __file__, sys.path[0])")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["package/tool.py", "-n", "a b"],
        ["link.py"],
        ["-m", "package.tool", "-m"],
        ["-m", "package.inner"],
        ["archive", "x"],
    ],
)
@pytest.mark.parametrize("safe_path", ["", "1"])
def test_a_script_sees_what_plain_python_shows_it(
    folder: Path, words: list[str], safe_path: str
) -> None:
    if safe_path and (words[0] == "-m" or sys.version_info < (3, 11)):
        pytest.skip(reason="the folder is not in sys.path, or the variable is unknown")
    command = [sys.executable, *words]
    alone = plain(command, folder, PYTHONSAFEPATH=safe_path)
    assert alone.returncode == 0, alone.stderr
    monitored, messages = run(with_bootstrap(command), folder, PYTHONSAFEPATH=safe_path)
    assert (monitored.stdout, monitored.stderr) == (alone.stdout, alone.stderr)
    assert messages == [Leaving(status=0)]


@pytest.mark.parametrize(
    ("text", "num_failures", "statuses"),
    [
        ("def fail():\n    raise ValueError('no')\nfail()\n", 1, [0]),
        ("a b\n", 1, [0]),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError(1)\n", 1, [0]),
        ("import sys\nsys.excepthook = lambda *words: print('mine')\nraise ValueError\n", 1, [0]),
        ("import atexit, sys\natexit.register(print, 'bye')\nsys.exit('reason')\n", 0, [1]),
        ("import sys\ntry:\n    sys.exit(3)\nfinally:\n    print('x')\n", 0, [3]),
        ("raise SystemExit\n", 0, [0]),
        ("import os\nos.kill(os.getpid(), 9)\n", 0, []),
        ("import sys\nsys.stderr = sys.stdout\nsys.exit('reason')\n", 0, [1]),
        ("import sys\nsys.stderr = sys.stdout\nraise ValueError\n", 1, [0]),
        ("raise KeyboardInterrupt\n", 0, [0]),
        ("raise ValueError('x' * 100_000)\n", 1, [0]),
        ("import os, sys\nif os.fork() == 0:\n    sys.exit(4)\nprint(os.wait()[1])\n", 0, [0]),
    ],
)
def test_a_script_ends_as_under_plain_python(
    tmp_path: Path, text: str, num_failures: int, statuses: list[int]
) -> None:
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, "script.py"]
    alone = plain(command, tmp_path)
    monitored, messages = run(with_bootstrap(command), tmp_path)
    left = [m.whole for m in messages if isinstance(m, Failed) and not m.is_shown]
    left += [m.text for m in messages if isinstance(m, Leaving) and m.text]
    shown = monitored.stderr + "".join(f"{text}\n" for text in left)  # by the launcher
    assert (monitored.stdout, shown) == (alone.stdout, alone.stderr)
    assert monitored.returncode == alone.returncode
    assert sum(isinstance(message, Failed) for message in messages) == num_failures
    assert [m.status for m in messages if isinstance(m, Leaving)] == statuses


def test_other_commands_are_left_alone() -> None:
    for argv in (["bash", "run.sh"], [sys.executable], [sys.executable, "-uc", "1"]):
        assert with_bootstrap(argv) == argv


def test_options_of_the_interpreter_stay_in_front() -> None:
    command = with_bootstrap([sys.executable, "-P", "-uB", "-m", "a", "-x"])
    assert command == [sys.executable, "-P", "-uB", bootstrap.__file__, "-m", "a", "-x"]


def test_threads_of_gloo_are_waited_for_after_all_functions_at_exit(tmp_path: Path) -> None:
    """A group that the script keeps may work until then."""
    (tmp_path / "script.py").write_text(
        "import atexit\n"
        "import os\n"
        "os.listdir = lambda folder: print('waited') or []\n"  # of threads
        "atexit.register(print, 'exits')\n"
    )
    done, _ = run(with_bootstrap([sys.executable, "script.py"]), tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, ["exits", "waited"])


# ---- threads of gloo have dropped their Python objects before the interpreter finalizes ----


NUM_LATE, MAX_TRIES = 5, 2000


class Context:
    """As the context variables that autograd keeps for the threads of a backward pass."""


@pytest.fixture
def slow_switches() -> Iterator[None]:
    """A thread that waits for the interpreter gets it only when this one gives it up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)
    yield
    sys.setswitchinterval(before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at threads in /proc")
@pytest.mark.skipif(
    not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch cannot drop the object again"
)
@pytest.mark.usefixtures("slow_switches")
def test_they_have_dropped_the_objects_of_complete_work() -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    wait_for_gloo_threads()
    num_late = num_tries = 0
    while num_late < NUM_LATE and num_tries < MAX_TRIES:
        num_tries += 1
        context = Context()
        kept = weakref.ref(context)
        torch._C._stash_obj_in_tls("context", context)
        work = group.allreduce([torch.ones(1)])
        torch._C._remove_obj_from_tls("context")
        del context
        while not work.is_completed():  # wait() would let the thread have the interpreter
            pass
        del work
        num_late += kept() is not None  # one in ten
        wait_for_gloo_threads()
        assert kept() is None
    if not num_late:
        pytest.skip(reason=f"the thread was never late in {MAX_TRIES} tries: nothing was shown")
