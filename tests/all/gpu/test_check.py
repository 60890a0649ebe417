"""The runner of `make check-gpu`, with small checks in place of those on a GPU."""

from __future__ import annotations

import inspect
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.all.gpu import check, test_one_process
from tests.limits import limit
from torchmn.comm.engine import Engine
from torchmn.record.timeline import HostClock

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

LIMIT_S = round(limit(4))
"""Of a check that hangs: longer than Python and pytest take to start."""

CHECKS = """
import os, signal, subprocess, sys, time
import pytest
pytestmark = pytest.mark.gpu
def test_that_passes(): pass
def test_that_fails(): assert 1 == 2, "one is not two"
def test_that_crashes(): os.kill(os.getpid(), signal.SIGSEGV)
def test_that_exits(): os._exit(7)
def test_that_hangs():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(600)
@pytest.mark.skip(reason="needs two GPUs")
def test_that_skips(): pass
def test_after_all(): pass
"""


GROUP = ("test_that_passes", "test_that_fails", "test_that_crashes", "test_that_skips",
         "test_after_all")  # fmt: skip


@pytest.fixture
def checks(tmp_path: Path) -> Path:
    path = tmp_path / "test_small.py"
    path.write_text(CHECKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a CUDA device\n")
    return path


def run(checks: Path, *names: str, limit_s: float = limit(60), total_s: float = limit(60)):
    return check.run_all(
        [f"{checks}::{name}" for name in names],
        check_limit_s=limit_s,
        total_limit_s=total_s,
        console=Console(quiet=True),
    )


def test_each_check_has_its_row_whatever_the_others_do(checks: Path) -> None:
    names = ("fails", "crashes", "exits", "skips")
    rows = run(checks, *(f"test_that_{name}" for name in names), "test_after_all")
    assert [row.outcome for row in rows] == ["failed", "failed", "failed", "not run", "passed"]
    assert "one is not two" in rows[0].message
    assert rows[1].message.startswith("ended by SIGSEGV")
    assert rows[2].message.startswith("exit status 7")
    assert rows[3].message == "needs two GPUs"


def test_those_that_share_a_process_do_not_hurt_each_other(checks: Path) -> None:
    rows = check.run_checks([f"{checks}::{name}" for name in GROUP], limit(60))
    assert [row.outcome for row in rows] == ["passed", "failed", "failed", "not run", "passed"]
    assert "one is not two" in rows[1].message
    assert rows[2].message.startswith("ended by SIGSEGV")


def test_only_checks_without_ranks_share_a_process() -> None:
    names = ["a/test_ranks.py::test_x", "a/test_one.py::x", "a/test_ranks.py::test_y"]
    assert check.in_groups([*names, "a/test_one.py::y"]) == [
        [names[0]],
        ["a/test_one.py::x", "a/test_one.py::y"],
        [names[2]],
    ]


def test_a_check_that_hangs_is_killed_with_what_it_has_started(checks: Path) -> None:
    [row] = run(checks, "test_that_hangs", limit_s=LIMIT_S)
    assert row.outcome == "failed"
    assert row.message.startswith(f"no end within {LIMIT_S} s")


def test_one_that_hangs_takes_no_time_from_those_that_share_its_process(checks: Path) -> None:
    names = [f"{checks}::test_that_{name}" for name in ("passes", "hangs")]
    began_s = time.monotonic()
    rows = check.run_checks(names, LIMIT_S, began_s + limit(60))
    assert [row.outcome for row in rows] == ["passed", "failed"]
    assert rows[1].message.startswith(f"no end within {LIMIT_S} s")
    [late] = check.run_checks(names[:1], LIMIT_S, began_s)
    assert (late.outcome, late.message) == ("not run", "the total time limit was over")


def test_all_tests_marked_gpu_are_found() -> None:
    names, of_several = check.collect(check.TESTS), check.collect(check.TESTS, "several_gpus")
    assert len(names) == len(set(names)) > 35
    assert len(of_several) > 20
    assert not {*names} & {*of_several}
    assert all("nccl" in name for name in of_several)
    assert any("test_on_a_gpu" in name for name in names)
    assert not any("test_on_cpus" in name for name in names)


@pytest.mark.parametrize(
    "name",
    [
        "test_jobs_see_what_was_launched_before_them",
        "test_jobs_of_both_kinds_share_memory_in_order",
        "test_results_inside_of_containers_keep_their_memory",
        "test_the_record_has_the_times_of_the_gpu",
        "test_generators_continue_after_they_are_restored",
        "test_shared_numbers_of_gpus_and_those_of_each_rank",
        "test_a_copy_for_a_checkpoint_has_the_values_of_the_gpu",
    ],
)
def test_checks_of_one_process_call_what_there_is(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU, those that ask for nothing that only CUDA has."""
    monkeypatch.setattr(test_one_process, "GPU", torch.device("cpu"))
    clock = HostClock()
    clock.now_s = 1.0
    clock.mark = lambda: clock.now_s  # which runs in sleeps only

    def sleep(cycles: int) -> None:
        clock.now_s += cycles / 2e9

    monkeypatch.setattr(test_one_process, "clock_of", lambda device: clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    given = {"engine": Engine(torch.device("cpu")), "tmp_path": tmp_path}
    check_one = getattr(test_one_process, name)
    check_one(**{key: given[key] for key in inspect.signature(check_one).parameters})
    given["engine"].close()
