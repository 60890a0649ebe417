"""The runner of `make check-gpu`, with small checks in place of those on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.all.gpu import check

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

CHECKS = """
import os, signal, subprocess, sys, time
import pytest
pytestmark = pytest.mark.gpu
def test_that_passes(): pass
def test_that_fails(): assert 1 == 2, "one is not two"
def test_that_crashes(): os.kill(os.getpid(), signal.SIGSEGV)
def test_that_exits(): os._exit(7)
def test_that_hangs():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    time.sleep(60)
@pytest.mark.skip(reason="needs two GPUs")
def test_that_skips(): pass
def test_after_all(): pass
"""


@pytest.fixture
def checks(tmp_path: Path) -> Path:
    path = tmp_path / "test_small.py"
    path.write_text(CHECKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a CUDA device\n")
    return path


def run(checks: Path, *names: str, limit_s: float = 60, total_s: float = 60):
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


def test_a_check_that_hangs_is_killed_with_what_it_has_started(checks: Path) -> None:
    [row] = run(checks, "test_that_hangs", limit_s=8)
    assert row.outcome == "failed"
    assert row.message.startswith("no end within 8 s")


def test_all_tests_marked_gpu_are_found() -> None:
    names, of_several = check.collect(check.TESTS), check.collect(check.TESTS, "several_gpus")
    assert len(names) == len(set(names)) > 40
    assert len(of_several) > 30
    assert not {*names} & {*of_several}
    assert all("nccl" in name for name in of_several)
    assert any("test_on_a_gpu" in name for name in names)
    assert not any("test_on_cpus" in name for name in names)


NONE = {"torch": "2.13.0", "cuda": None, "gpus": [], "num_device_files": 0}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (NONE, "no GPU"),
        ({**NONE, "num_device_files": 2}, "2 GPU(s), but torch 2.13.0 cannot use them"),
    ],
)
def test_without_a_gpu_it_says_so_and_is_no_failure(
    facts, reason: str, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "find_facts", lambda: facts)
    assert check.main(["--record", str(tmp_path / "gpu.jsonl")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("check-gpu: not run: ")
    assert reason in out
    assert not (tmp_path / "gpu.jsonl").exists()


def test_the_table_and_the_record(
    checks: Path, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
) -> None:
    facts = {**NONE, "gpus": [{"name": "A GPU"}], "driver": "1.2"}
    monkeypatch.setattr(check, "find_facts", lambda: facts)
    of_marks = {"several_gpus": ["a check of two GPUs"]}
    found = [f"{checks}::test_that_fails"]
    monkeypatch.setattr(check, "collect", lambda tests, marks="": of_marks.get(marks, found))
    assert check.main(["--record", str(tmp_path / "gpu.jsonl")]) == 1
    out = capsys.readouterr().out
    assert "A GPU" in out
    assert "0 passed, 1 failed, 1 not run" in out
    [entry] = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert entry["gpu"]["driver"] == "1.2"
    assert entry["environment"]["python"] == sys.version.split()[0]
    assert [row["outcome"] for row in entry["checks"]] == ["failed", "not run"]
    assert "NCCL refuses two ranks on one GPU" in entry["checks"][1]["message"]
