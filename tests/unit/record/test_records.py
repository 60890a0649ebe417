from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchmn.control.codec import decode_union
from torchmn.record.records import FORMAT, MAX_FILES, Line, RecordFile, RunStart, Step


def start(rank: int = 0) -> RunStart:
    return RunStart(
        format=FORMAT,
        rank=rank,
        size=2,
        intra_rank=rank,
        inter_rank=0,
        host="a",
        pid=1,
        device="cpu",
        cpus=[0],
        unix_s=1.0,
        at_s=1.0,
        settings={"script": "a\udcff.py"},
        versions={},
    )


def step(number: int) -> Step:
    return Step(step=number, at_s=1.0, seconds=0.5, phases={"forward": 0.5}, sent={"b": 3})


def read(path: Path) -> list[Line]:
    return [decode_union(line, Line) for line in path.read_text().splitlines()]


def test_lines_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, start(1))
    file.write(step(0))
    file.close()
    assert read(tmp_path / "steps" / "rank1.jsonl") == [start(1), step(0)]
    assert (tmp_path / "steps" / "rank1.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_file_is_readable_while_it_is_written(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, start())
    file.write(step(0))
    file.flush()
    assert len(read(tmp_path / "steps" / "rank0.jsonl")) == 2
    file.close()


def test_of_a_long_run_the_first_and_the_newest_files_are_kept(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, start(), max_bytes=200)
    for number in range(3 * MAX_FILES):
        file.write(step(number))
        file.flush()
    file.close()
    numbers = sorted(
        int(name.split(".")[1]) if name.count(".") == 2 else 0
        for name in os.listdir(tmp_path / "steps")
    )
    assert len(numbers) == MAX_FILES
    assert numbers[0] == 0
    assert numbers[1:] == list(range(numbers[-1] - MAX_FILES + 2, numbers[-1] + 1))
    assert isinstance(read(tmp_path / "steps" / "rank0.jsonl")[0], RunStart)
    last = read(tmp_path / "steps" / f"rank0.{numbers[-1]}.jsonl")[-1]
    assert last == step(3 * MAX_FILES - 1)


def test_a_full_disk_ends_the_record_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RecordFile(tmp_path, start())

    def is_full(descriptor: int, text: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", is_full)
    for number in range(3):
        file.write(step(number))
        file.flush()
    monkeypatch.undo()
    file.close()
    assert caplog.text.count("ends here (No space left on device)") == 1


def test_a_record_is_never_written_over(tmp_path: Path) -> None:
    RecordFile(tmp_path, start()).close()
    with pytest.raises(FileExistsError):
        RecordFile(tmp_path, start())
