"""Functions as ranks: results, exceptions and the end, from an ordinary process.

`tests/all/processes/test_notebook.py` does the same from cells of a notebook.
"""

import linecache
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import torchmn
from tests.all.processes.runner import PYTHON_PATH
from torchmn.errors import (
    CommunicationError,
    RankError,
    UnknownNameError,
    UnsupportedError,
    UsageError,
)
from torchmn.run.launch_local import _dumps, _sources

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)


def left_overs(folder: Path) -> list[str]:
    """Processes of ours that still run, and files but the logs."""
    children = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
    files = [path.name for path in folder.iterdir() if path.name != "torchmn-logs"]
    others = ("tests.mpi_pool", "resource_tracker")  # of other tests, and Python itself
    ours = [text for text in children if "torchmn" in text and not any(o in text for o in others)]
    return [*ours, *files]


def test_results_of_closures_and_lambdas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offset = 5

    def sums(scale: float) -> tuple[torch.Tensor, int]:
        comm = torchmn.create_communicator("naive")
        print("hello", flush=True)
        print("a warning", file=sys.stderr, flush=True)
        return comm.allreduce(torch.full((2,), scale * (comm.rank + 1)), "sum") + offset, comm.rank

    total, rank = torchmn.launch_local(sums, 2, 10.0)
    assert (total.tolist(), rank) == ([35.0, 35.0], 0)
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] hello", "[1] hello"]
    assert {"[0] a warning", "[1] a warning"} <= set(shown.err.splitlines())
    ranks = torchmn.launch_local(lambda: int(os.environ["RANK"]) * 7, 2, all_results=True)
    assert ranks == [0, 7]
    assert left_overs(tmp_path) == []
    assert len(list((tmp_path / "torchmn-logs").glob("2*"))) == 2  # one folder for each call


class OwnError(Exception):
    """Cannot be made again from its text, as many exceptions of libraries."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


def _raises(kind: str) -> None:
    comm = torchmn.create_communicator("naive")
    if comm.rank == 1:
        if kind == "own":
            raise OwnError(3, "no such file")
        raise ValueError("no such file")
    comm.barrier()


@pytest.mark.parametrize("kind", ["builtin", "own"])
def test_an_exception_of_a_rank(tmp_path: Path, kind: str) -> None:
    """That of the rank which failed first, not the lost connections of the others."""
    with pytest.raises(RankError) as caught:
        torchmn.launch_local(_raises, 2, kind)
    assert caught.value.rank == 1
    text = str(caught.value)
    assert "Rank 1 of 2 raised" in text
    assert "no such file" in text
    assert 'raise ValueError("no such file")' in text or kind == "own"
    if kind == "builtin":
        assert type(caught.value.__cause__) is ValueError
    assert not isinstance(caught.value.__cause__, CommunicationError)
    assert left_overs(tmp_path) == []


def test_code_keeps_the_names_of_its_files() -> None:
    """Tracebacks of the ranks find their lines by it; cloudpickle 3.1.3 would replace it."""
    space: dict[str, Any] = {"__name__": "__main__"}
    source = "def outer():\n    def inner():\n        return 1\n    return inner\n"
    exec(compile(source, "<cell 7>", "exec"), space)
    received = pickle.loads(_dumps(space["outer"]))
    assert received.__code__ is not space["outer"].__code__
    assert received.__code__.co_filename == received().__code__.co_filename == "<cell 7>"
    assert received()() == 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: sys.exit(3), "exit code 3"),
        (lambda: sys.exit(0), "exited with status 0 before the function returned"),
        (lambda: (each for each in ()), r"What rank 0 returned \(a generator\) cannot be sent"),
    ],
    ids=["killed", "exit", "exit0", "generator"],
)
def test_ranks_that_end_otherwise(
    tmp_path: Path, function: Callable[[], object], words: str
) -> None:
    with pytest.raises(RankError, match=words):
        torchmn.launch_local(function, 1)
    assert left_overs(tmp_path) == []


def test_an_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    """Also ranks that ignore it."""

    def waits(folder: Path) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        (folder / f"started{os.environ['RANK']}").touch()
        time.sleep(600)

    def interrupt() -> None:
        while not all((tmp_path / f"started{rank}").exists() for rank in range(2)):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        torchmn.launch_local(waits, 2, tmp_path)
    thread.join()
    for rank in range(2):
        (tmp_path / f"started{rank}").unlink()
    assert left_overs(tmp_path) == []


@pytest.mark.parametrize(
    ("num_ranks", "options", "error", "words"),
    [
        (0, {}, UsageError, "must be an integer, at least 1, got 0"),
        (True, {}, UsageError, "got True"),
        (1, {"backend": "mpi"}, UnsupportedError, "MPI needs its own mpirun"),
        (1, {"backend": "ucx"}, UnknownNameError, "auto, gloo, nccl"),
    ],
)
def test_requests_that_cannot_be_met(
    num_ranks: int, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        torchmn.launch_local(os.getpid, num_ranks, **options)


def _adds(first: int, second: int) -> int:
    return first + second


@pytest.mark.parametrize(
    ("words", "options", "error", "text"),
    [
        (("train", 2), {}, UsageError, "needs a function first, got 'train'"),
        ((_adds, 1, 1, 2), {"log_dir": "file/x"}, UsageError, "choose another with log_dir="),
        (
            (_adds, 2, 1, 2),
            {"backend": "nccl"},
            UnsupportedError,
            "NCCL needs a GPU for each of the 2 ranks, and this machine has no CUDA GPU",
        ),
    ],
)
def test_what_would_fail_on_every_rank_starts_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "file").touch()
    with pytest.raises(error, match=text):
        torchmn.launch_local(*words, **options)
    assert capfd.readouterr() == ("", "")
    (tmp_path / "file").unlink()
    assert left_overs(tmp_path) == []


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    with (
        open(tmp_path / "file", "w") as file,
        pytest.raises(UsageError, match=r"The argument 1 cannot be sent.*inside of the function"),
    ):
        torchmn.launch_local(print, 1, 0, file)
    (tmp_path / "file").unlink()
    assert left_overs(tmp_path) == []


def test_in_a_rank_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="this process is itself one of several"):
        torchmn.launch_local(os.getpid, 1)


def test_a_failure_of_an_earlier_run_is_not_reported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RankError):
        torchmn.launch_local(lambda: sys.exit(3), 1)
    monkeypatch.setenv("TORCHMN_HEARTBEAT_S", "never")  # the launcher refuses to start
    with pytest.raises(torchmn.errors.LaunchError, match="see the messages above"):
        torchmn.launch_local(os.getpid, 1)


def test_another_thread_reads_source_lines_while_they_are_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = (6, None, ["x = 1\n"], "<cell 1>")
    monkeypatch.setattr(linecache, "cache", {"<cell 1>": cell, "<cell 2>": cell})

    def exists(name: str) -> bool:
        linecache.cache[f"<another of {name}>"] = cell
        return False

    monkeypatch.setattr(os.path, "exists", exists)
    assert _sources().keys() == {"<cell 1>", "<cell 2>"}
