"""What holds for every test: its tier and its limit, and that it leaves nothing."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import pytest_timeout
import torch
from hypothesis import HealthCheck, settings
from xdist.workermanage import WorkerController

from tests.all.processes.runner import PYTHON_PATH
from tests.compile_once import compile_once
from tests.limits import limit, slowness
from tests.mpi_pool import MpiPool
from torchmn.cluster.gpus import count_gpus
from torchmn.run.backend import find_mpirun
from torchmn.testing import run_ranks

ROOT = Path(__file__).parents[1]

torch.set_num_threads(1)  # ranks are threads, several of them for each core
# A thread that waits for the interpreter, to answer another rank, gets it after half a millisecond:
# with the default of 5 ms four ranks as threads need more than twice the time.
sys.setswitchinterval(5e-4)
# A thread that is woken leaves the core to the one that has woken it. gloo's own thread, woken by a
# rank that holds the lock of their connection, would spin until its time slice ends: with several
# ranks for each core a third of the processor time of most tests. Some sandboxes do not allow it.
if os.sched_getscheduler(0) == os.SCHED_OTHER:
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# No test asks how long an example takes: the machine may be busy with the tests beside it.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

LIBRARIES_SET = {
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
}
"""Variables that libraries set when they are imported."""
LIBRARIES_START = (
    "resource_tracker",
    "semaphore_tracker",
    "forkserver",
    "torch_shm_manager",
    "compile_worker",
)
"""Processes that libraries keep until the end of the interpreter."""
PATIENCE_S = 3.0
SLOW_FOLDER = ROOT / "tests" / "all"
"""Whatever is in it is in the tier of `make test-all`, like what is marked slow elsewhere."""
IGNORED = pytest.StashKey[list[int]]()
MAX_WORKERS = 8
"""Of ``-n auto``: many tests start several processes or threads each."""


def pytest_configure(config: pytest.Config) -> None:
    """The ordinary tests are about CPUs on any machine; `make check-gpu` runs those about GPUs."""
    if "gpu" not in config.getoption("markexpr") and count_gpus(os.environ):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[IGNORED] = _ignored_signals(config)
    for signum in config.stash[IGNORED]:
        signal.signal(signum, lambda *_: None)
    slowness()  # measured once, before there are workers
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        compile_once()
    for function in (run_ranks, MpiPool.run):
        function.__kwdefaults__["timeout_s"] = limit(function.__kwdefaults__["timeout_s"])


def _ignored_signals(config: pytest.Config) -> list[int]:
    """Those that nohup, or a shell that starts it in the background, makes this run ignore.

    Children inherit what is ignored, and tests send them signals. A handler that does nothing
    ignores a signal, too, but is no longer there in what is started.
    """
    given = getattr(config, "workerinput", {}).get("ignored_signals", [])
    own = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
    return [*given, *(int(each) for each in own if signal.getsignal(each) is signal.SIG_IGN)]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """The workers of a run ignore what it ignores."""
    node.workerinput["ignored_signals"] = node.config.stash[IGNORED]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` need not read the folder of which it runs nothing."""
    return collection_path == SLOW_FOLDER and config.getoption("markexpr") == "not slow" or None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests are slow by their folder, too."""
    if item.path.is_relative_to(SLOW_FOLDER):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share MPI processes come first, together: one worker starts these for all."""
    items.sort(key=lambda item: "mpi_pool" not in getattr(item, "fixturenames", ()))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for tests lives as long as the run: collections of garbage leave it out."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """The limits of tests, in pyproject.toml and in marks, are for a quiet machine."""
    longer = settings._replace(timeout=limit(settings.timeout))
    return pytest_timeout.pytest_timeout_set_timer(item, longer)


def pytest_xdist_auto_num_workers() -> int:
    """How many processes run tests: one for each core that this one may use."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


@pytest.fixture(autouse=True)
def _leaves_no_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    changed = {
        name
        for name in {*before, *os.environ} - LIBRARIES_SET
        if before.get(name) != os.environ.get(name)
    }
    for name in changed:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    if changed:
        pytest.fail(f"the test changed the environment: {', '.join(sorted(changed))}")


@pytest.fixture(autouse=True)
def _leaves_no_thread() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and not t.daemon]
    deadline = time.monotonic() + limit(PATIENCE_S)
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = [thread.name for thread in left if thread.is_alive()]
    if names:
        pytest.fail(f"the test left threads running: {', '.join(names)}")


def _children_of(pid: str) -> list[str]:
    """As Linux keeps them; psutil looks at every process of the machine, which takes 3 ms."""
    children = []
    for file in Path("/proc", pid, "task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            children += file.read_text().split()
    return children


def _is_zombie(pid: str) -> bool:
    return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _living_children(pid: str = "self") -> dict[int, str]:
    found = {}
    for child in _children_of(pid):
        with suppress(OSError):  # it has ended meanwhile
            words = Path("/proc", child, "cmdline").read_text().replace("\0", " ")
            if not words and _is_zombie(child):  # one that is about to be executed has none, too
                continue
            if not any(name in words for name in LIBRARIES_START):
                found[int(child)] = words
            found |= _living_children(child)
    return found


@pytest.fixture(autouse=True)
def _leaves_no_process() -> Iterator[None]:
    """Fixtures of a wider scope may keep processes: they are started before this one looks."""
    before = _living_children()
    yield
    deadline = time.monotonic() + limit(PATIENCE_S)
    while True:
        left = {pid: words for pid, words in _living_children().items() if pid not in before}
        if not left:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in left:
        try:
            psutil.Process(pid).kill()
        except psutil.NoSuchProcess:
            continue
    pytest.fail(f"the test left processes running: {'; '.join(left.values())}")


@pytest.fixture(scope="session")
def mpi_pool() -> Iterator[MpiPool]:
    """Four MPI processes under a real mpirun, for functions that they can import by name."""
    if find_mpirun(os.environ) is None:
        pytest.skip(reason="no mpirun: install it with 'make setup'")
    with MpiPool(4, search_path=f"{PYTHON_PATH}{os.pathsep}{ROOT}") as started:
        yield started


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real samples that TORCHMN_TEST_DATA names; a skip without it."""
    text = os.environ.get("TORCHMN_TEST_DATA")
    if not text:
        pytest.skip(reason="TORCHMN_TEST_DATA names no folder with real samples")
    folder = Path(text)
    if not folder.is_dir():
        pytest.skip(reason=f"TORCHMN_TEST_DATA is {text!r}, which is no folder")
    return folder
