"""Records are read whole or sampled, while they are written and after a kill."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.unit.recorded_runs import ImitatedRun
from torchmn.control.codec import encode
from torchmn.errors import DataError
from torchmn.observe.read.run_reader import find_records, read_run
from torchmn.observe.read.seeking import step_range
from torchmn.record.records import PHASES, RunStart, Step, Value


def records_of(folder: Path, rank: int = 0) -> Path:
    return folder / "steps" / f"rank{rank}.jsonl"


def test_all_that_was_recorded_is_read(tmp_path: Path) -> None:
    imitated = ImitatedRun(num_ranks=3, num_steps=25)
    run = read_run(imitated.write(tmp_path))
    for rank, lines in enumerate(imitated.lines()):
        record = run.ranks[rank]
        steps = [line for line in lines if isinstance(line, Step)]
        assert record.start == lines[0]
        assert record.steps.step.tolist() == [line.step for line in steps]
        assert record.steps.seconds.tolist() == [line.seconds for line in steps]
        forward = record.steps.phases[:, PHASES.index("forward")]
        np.testing.assert_allclose(forward, [line.phases["forward"] for line in steps], rtol=1e-6)
        buckets = [bucket for line in steps for bucket in line.buckets]
        assert record.steps.buckets.ended_s.tolist() == [bucket.ended_s for bucket in buckets]
        assert record.steps.buckets.row.tolist() == [n for n in range(25) for _ in range(3)]
        assert sum(record.sent.values()) == sum(sum(line.sent.values()) for line in steps)
        assert record.values["loss"][0].tolist() == [0, 5, 10, 15, 20]
    assert (run.size, run.is_sampled, run.is_running) == (3, False, False)


@pytest.mark.parametrize("cut", [1, 7, 300, 2000])
def test_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path: Path, cut: int) -> None:
    folder = ImitatedRun(num_ranks=2, has_ended=False).write(tmp_path)
    whole = read_run(folder).ranks[1]
    path = records_of(folder, 1)
    os.truncate(path, path.stat().st_size - cut)
    record = read_run(folder).ranks[1]
    assert 0 < len(record.steps) <= len(whole.steps)
    assert record.steps.step.tolist() == list(range(len(record.steps)))
    assert (record.num_damaged, record.end) == (0, None)
    assert read_run(folder).is_running
    os.utime(path, (0, 0))
    os.utime(records_of(folder, 0), (0, 0))
    assert not read_run(folder).is_running


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    folder = ImitatedRun(num_ranks=1, num_steps=10).write(tmp_path)
    lines = records_of(folder).read_bytes().splitlines(keepends=True)
    damaged = [*lines[:9], b'{"type": "Step", "step": "x"}\n', b"\x00\xff\n", b"[]\n", *lines[9:]]
    records_of(folder).write_bytes(b"".join(damaged))
    record = read_run(folder).ranks[0]
    assert (record.num_damaged, len(record.steps)) == (3, 10)


def test_rotated_files_continue_each_other(tmp_path: Path) -> None:
    folder = ImitatedRun(num_ranks=1, num_steps=60).write(tmp_path)
    whole = read_run(folder).ranks[0]
    lines = records_of(folder).read_bytes().splitlines(keepends=True)
    records_of(folder).write_bytes(b"".join(lines[:20]))
    for number in range(1, 13):  # rank0.10.jsonl comes after rank0.9.jsonl
        part = lines[20 + (number - 1) * 6 : 20 + number * 6 if number < 12 else None]
        (folder / "steps" / f"rank0.{number}.jsonl").write_bytes(b"".join([lines[0], *part]))
    record = read_run(folder).ranks[0]
    assert record.steps.step.tolist() == whole.steps.step.tolist()
    assert record.num_starts == 1


def test_a_file_that_is_removed_while_a_run_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the oldest but the first of a long run, when its rank begins another one."""
    folder = ImitatedRun(num_ranks=1, num_steps=30).write(tmp_path)
    lines = records_of(folder).read_bytes().splitlines(keepends=True)
    records_of(folder).write_bytes(b"".join(lines[:10]))
    for number, part in enumerate((lines[10:20], lines[20:]), start=1):
        (folder / "steps" / f"rank0.{number}.jsonl").write_bytes(b"".join([lines[0], *part]))

    def removing(path: Path) -> tuple[int, int] | None:
        (folder / "steps" / "rank0.1.jsonl").unlink(missing_ok=True)
        return step_range(path)

    monkeypatch.setattr("torchmn.observe.read.run_reader.step_range", removing)
    steps = read_run(folder).ranks[0].steps.step.tolist()
    assert 0 in steps
    assert 29 in steps
    assert len(steps) < 30


def test_a_process_that_was_started_again_is_read_from_there(tmp_path: Path) -> None:
    folder = ImitatedRun(num_ranks=1, num_steps=20).write(tmp_path)
    again = ImitatedRun(num_ranks=1, num_steps=10, seed=1, slow_start_s=1.0).lines()[0]
    start = again[0]
    assert isinstance(start, RunStart)
    again[0] = RunStart(**{**{n: getattr(start, n) for n in start.__struct_fields__}, "pid": 7})
    with records_of(folder).open("ab") as file:
        file.writelines(encode(line) for line in again)
    record = read_run(folder).ranks[0]
    assert (record.num_starts, record.start.pid, len(record.steps)) == (2, 7, 10)


def test_missing_and_unreadable_ranks(tmp_path: Path) -> None:
    folder = ImitatedRun(num_ranks=4, num_steps=5).write(tmp_path)
    records_of(folder, 1).unlink()
    records_of(folder, 2).write_bytes(b"")
    first = records_of(folder, 3).read_bytes()
    records_of(folder, 3).write_bytes(first[:50])
    run = read_run(folder)
    assert [rank.start.rank for rank in run.ranks] == [0]
    assert list(run.unreadable) == [2, 3]
    assert "is empty" in run.unreadable[2]


def test_a_folder_without_records(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it has no steps/rank\*.jsonl"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="it does not exist"):
        read_run(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="it is no folder"):
        read_run(tmp_path / "file")


def test_a_folder_of_nothing_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    records_of(tmp_path).write_bytes(b"hello\n")
    with pytest.raises(DataError, match="does not begin with a valid line of type RunStart"):
        read_run(tmp_path)


def test_records_of_a_newer_version(tmp_path: Path) -> None:
    folder = ImitatedRun(num_ranks=1).write(tmp_path)
    text = records_of(folder).read_text()
    records_of(folder).write_text(re.sub('"format": 1', '"format": 9, "new": 1', text, count=1))
    with pytest.raises(DataError, match="format 9, which a newer version"):
        read_run(folder)


def test_where_records_are_found(tmp_path: Path) -> None:
    folder = ImitatedRun(num_ranks=1, num_steps=1).write(tmp_path / "logs" / "run1")
    (tmp_path / "logs" / "latest").symlink_to("run1")
    for path in (folder, folder / "steps", tmp_path / "logs"):
        assert find_records(path).resolve() == folder / "steps"


def test_of_an_elastic_run_the_last_round_is_read(tmp_path: Path) -> None:
    for number in (2, 9, 10):
        ImitatedRun(num_ranks=1, num_steps=1).write(tmp_path / "run1" / f"round{number}")
    (tmp_path / "run1" / "round11").mkdir()  # whose ranks have not started
    (tmp_path / "latest").symlink_to("run1")
    for path in (tmp_path / "run1", tmp_path):
        assert find_records(path).resolve() == tmp_path / "run1" / "round10" / "steps"


def test_a_sample_has_the_same_steps_of_all_ranks(tmp_path: Path) -> None:
    folder = ImitatedRun(num_ranks=3, num_steps=1500).write(tmp_path)
    whole = read_run(folder)
    sample = read_run(folder, max_nbytes=300_000)
    assert sample.is_sampled
    taken = sample.ranks[0].steps.step.tolist()
    assert all(rank.steps.step.tolist() == taken for rank in sample.ranks)
    assert 60 < len(taken) < 250
    assert (taken[0], taken[-1]) == (0, 1499)
    for rank in range(3):
        rows = np.searchsorted(whole.ranks[rank].steps.step, taken)
        expected = whole.ranks[rank].steps.seconds[rows].tolist()
        assert sample.ranks[rank].steps.seconds.tolist() == expected
        assert sample.ranks[rank].end == whole.ranks[rank].end
    quarters = np.histogram(taken, bins=4, range=(0, 1500))[0]
    assert quarters.min() > 10


@pytest.mark.parametrize("step", [10_000_000, 0, 40])
def test_values_may_be_reported_for_any_step(tmp_path: Path, step: int) -> None:
    """Of samples or epochs; after the last step the next one has begun."""
    folder = ImitatedRun(num_ranks=2, num_steps=40).write(tmp_path)
    line = encode(Value(step=step, name="accuracy", value=0.5))
    for rank in range(2):
        lines = records_of(folder, rank).read_bytes().splitlines(keepends=True)
        middle = len(lines) // 2
        records_of(folder, rank).write_bytes(
            b"".join([*lines[:middle], line, *lines[middle:-1], line, lines[-1]])
        )
    for rank in read_run(folder, last_steps=10).ranks:
        assert (rank.first_step, rank.last_step) == (0, 39)
        assert rank.steps.step.tolist() == list(range(30, 40))
    sampled = read_run(folder, max_nbytes=10_000)
    assert sampled.is_sampled
    assert sampled.ranks[0].steps.step[-1] == 39


def test_lines_far_longer_than_a_block_are_sampled(tmp_path: Path) -> None:
    folder = ImitatedRun(num_ranks=1, num_steps=400, bucket_nbytes=(1000,) * 200).write(tmp_path)
    sample = read_run(folder, max_nbytes=1_000_000)
    taken = sample.ranks[0].steps.step.tolist()
    assert (taken[0], taken[-1]) == (0, 399)
    assert len(taken) < 100
    assert np.diff(taken).max() > 8


MEASURE = """
import sys
from pathlib import Path
from torchmn.observe.read.run_reader import read_run
run = read_run(Path(sys.argv[1]))
print(len(run.ranks), min(len(r.steps) for r in run.ranks), run.ranks[0].last_step)
status = Path("/proc/self/status").read_text().split()  # getrusage begins with the parent's
print(int(status[status.index("VmHWM:") + 1]) / 1024)
"""


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 ranks x 100,000 steps: after their first steps all ranks share a file."""
    folder = tmp_path_factory.mktemp("long")
    ImitatedRun(num_ranks=1000, ranks_per_host=8, num_steps=3, has_ended=False).write(folder)
    steps = [
        line
        for line in ImitatedRun(num_ranks=1, num_steps=1000, has_ended=False).lines()[0]
        if isinstance(line, Step)
    ]
    shared = folder / "shared"
    with shared.open("wb") as file:
        pieces = [encode(line).split(b'"step": %d,' % line.step, 1) for line in steps]
        for number in range(3, 100_000):
            before, after = pieces[number % 1000]
            file.write(before + b'"step": %d,' % number + after)
    for rank in range(1000):
        (folder / "steps" / f"rank{rank}.1.jsonl").hardlink_to(shared)
    return folder


def test_a_thousand_ranks_of_a_hundred_thousand_steps(long_run: Path) -> None:
    command = [sys.executable, "-c", MEASURE, str(long_run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts, megabytes = done.stdout.splitlines()
    num_ranks, num_read, last_step = map(int, counts.split())
    assert (num_ranks, last_step) == (1000, 99_999)
    assert num_read > 50
    assert float(megabytes) < 400
