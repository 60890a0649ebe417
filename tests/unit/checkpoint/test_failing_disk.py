"""Disks that are full, read-only or missing: the checkpoint is aborted, and training continues."""

import errno
import grp
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchmn
from tests.unit.checkpoint.training import checkpointer_of, names, on_ranks, saved, with_warnings
from torchmn.errors import CheckpointWarning, DataError, UsageError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(reason=f"nothing can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk))
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def model_of(numel: int, value: float) -> nn.Module:
    model = nn.Linear(numel, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("is_async", [True, False])
def test_full_disk(small_disk: Path, is_async: bool) -> None:
    """Two checkpoints fit, a third only when an old one is gone; 500 kB for each rank never fit."""

    def rank_main(comm: torchmn.Communicator) -> Any:
        checkpointer, warned = with_warnings(comm, small_disk, keep=1, is_async=is_async)
        small = {"model": model_of(20_000, 1.0 + comm.rank)}
        large = {"model": model_of(200_000, 1.0 + comm.rank)}
        checkpointer.save(1, small)
        checkpointer.save(2, large)
        checkpointer.save(3, small)
        checkpointer.save(4, large)
        with pytest.raises(DataError) as caught:
            checkpointer.finish()
        return warned, str(caught.value), checkpointer.resume(small)

    results = on_ranks(rank_main, 2)
    warned, error, step = results[0]
    assert len(warned) >= 1
    assert (
        "the checkpoint of step 2 was aborted; the newest one is step-00000001: rank" in warned[0]
    )
    assert f"No space left on device (errno {errno.ENOSPC})" in warned[0]
    assert str(small_disk) in warned[0]
    assert "step 4 was aborted" in error
    assert (step, results[1][2]) == (3, 3)
    assert results[1][0] == []  # one rank says it
    assert names(small_disk) == ["step-00000003"]  # nothing of those that failed


@pytest.mark.root
@needs_root
def test_full_disk_raises_where_asked(small_disk: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> None:
        checkpointer = checkpointer_of(comm, small_disk, on_failure="raise")
        checkpointer.save(1, {"model": model_of(900_000, comm.rank)})
        with pytest.raises(DataError, match="No space left on device"):
            checkpointer.save(2, {"model": model_of(9, comm.rank)})
        checkpointer.save(2, {"model": model_of(9, comm.rank)})
        checkpointer.finish()

    on_ranks(rank_main, 3)
    assert names(small_disk) == ["step-00000002"]


@pytest.mark.root
@needs_root
def test_folder_that_has_become_read_only(small_disk: Path) -> None:
    def save(comm: torchmn.Communicator) -> None:
        saved(comm, small_disk, 1, {"model": model_of(9, 5.0)})

    def resume(comm: torchmn.Communicator) -> Any:
        model = model_of(9, 0.0)
        checkpointer, warned = with_warnings(comm, small_disk)
        step = checkpointer.resume({"model": model})
        checkpointer.save(2, {"model": model})
        with pytest.raises(DataError, match="Read-only file system"):
            checkpointer.finish()
        return step, float(model.weight.detach().sum())

    on_ranks(save, 2)
    mount("-o", "remount,ro", str(small_disk))
    with pytest.warns(CheckpointWarning, match=r"no checkpoint can be written: .*Read-only"):
        assert on_ranks(resume, 2) == [(1, 45.0), (1, 45.0)]


def test_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"checkpoints cannot be created: .*errno 20"):
        on_ranks(lambda comm: checkpointer_of(comm, tmp_path / "file" / "below"), 2)


def test_folder_that_is_removed_is_not_written_to_until_it_is_there_again(tmp_path: Path) -> None:
    where = tmp_path / "above"

    def rank_main(comm: torchmn.Communicator) -> list[str]:
        checkpointer, warned = with_warnings(comm, where)
        checkpointer.save(1, {"model": model_of(9, 1.0)})
        checkpointer.finish()
        if comm.rank == 0:
            shutil.rmtree(where)
        comm.barrier()
        checkpointer.save(2, {"model": model_of(9, 1.0)})
        with pytest.raises(DataError, match="No such file or directory"):
            checkpointer.finish()
        if comm.rank == 0:
            (where / "a run").mkdir(parents=True)
        comm.barrier()
        checkpointer.save(3, {"model": model_of(9, 1.0)})
        checkpointer.finish()
        return warned

    on_ranks(rank_main, 2)
    assert names(where) == ["step-00000003"]


@pytest.mark.root
@needs_root
def test_mount_that_is_gone_is_not_written_under(small_disk: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> str:
        checkpointer = checkpointer_of(comm, small_disk)
        comm.barrier()
        if comm.rank == 0:
            subprocess.run(["umount", "-l", str(small_disk)], check=True)
        comm.barrier()
        checkpointer.save(1, {"model": model_of(9, 1.0)})
        with pytest.raises(DataError) as caught:
            checkpointer.finish()
        return str(caught.value)

    for text in on_ranks(rank_main, 2):
        assert "was aborted; there is no earlier one" in text
        assert "No such file or directory (errno 2)" in text
    assert list(small_disk.iterdir()) == []
    mount("-t", "tmpfs", "tmpfs", str(small_disk))  # for the fixture to remove


def test_who_may_read(tmp_path: Path) -> None:
    """Only the user, whatever the umask; and a group if it is named."""
    group = grp.getgrgid(os.getgid()).gr_name

    def save(comm: torchmn.Communicator) -> None:
        for where, options in (("own", {}), ("shared", {"group": group})):
            saved(comm, tmp_path / where, 1, {"model": model_of(9, comm.rank)}, **options)
            if comm.rank == 0:
                modes[where, "owner"] = (tmp_path / where / "a run" / ".owner").stat().st_mode

    modes: dict[tuple[str, str], int] = {}
    before = os.umask(0)
    try:
        on_ranks(save, 2)
    finally:
        os.umask(before)
    for where, of_folders, of_files in (("own", 0o700, 0o600), ("shared", 0o2750, 0o640)):
        folder = tmp_path / where / "a run"
        files = list((folder / "step-00000001").iterdir())
        assert len(files) == 5
        found = {path: path.stat().st_mode for path in (folder, folder / "step-00000001", *files)}
        for path, mode in found.items():
            assert stat.S_IMODE(mode) == (of_folders if path.is_dir() else of_files), path
            assert path.stat().st_gid == os.getgid()
        assert stat.S_IMODE(modes[where, "owner"]) == of_files
    with pytest.raises(UsageError, match="name of a group"):
        on_ranks(lambda comm: checkpointer_of(comm, tmp_path, group="no such group"), 2)


class OneRankFails:
    """A storage whose disk fails on one rank only, which threads cannot have for real."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def write(self, draft: str, file: str, pieces: Any) -> None:
        if file.endswith(".safetensors"):
            raise OSError(errno.EIO, "Input/output error", f"/disk/{file}")
        self.storage.write(draft, file, pieces)


@pytest.mark.parametrize("failing", [0, 2])
def test_one_rank_fails(tmp_path: Path, failing: int) -> None:
    def rank_main(comm: torchmn.Communicator) -> str:
        checkpointer = checkpointer_of(comm, tmp_path)
        model = {"model": model_of(9, float(comm.rank))}
        checkpointer.save(1, model)
        checkpointer.finish()
        storage = checkpointer._writer.storage
        if comm.rank == failing:
            checkpointer._writer.storage = OneRankFails(storage)
        checkpointer.save(2, model)
        with pytest.raises(DataError) as caught:
            checkpointer.finish()
        checkpointer._writer.storage = storage
        checkpointer.save(3, model)
        checkpointer.finish()
        return str(caught.value)

    for message in on_ranks(rank_main, 3):
        assert f"rank {failing} of 3 on localhost" in message
        assert f"/disk/rank000{failing}.safetensors: Input/output error (errno 5)" in message
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_old_one_that_cannot_be_removed(tmp_path: Path) -> None:
    """The new one counts all the same, and the others that are too old are removed."""

    class NoRemoval(OneRankFails):
        def write(self, draft: str, file: str, pieces: Any) -> None:
            self.storage.write(draft, file, pieces)

        def remove(self, name: str) -> None:
            if name == "step-00000001":
                raise OSError(errno.EBUSY, "Device or resource busy", name)
            self.storage.remove(name)

    def rank_main(comm: torchmn.Communicator) -> list[str]:
        checkpointer, warned = with_warnings(comm, tmp_path, keep=1)
        checkpointer._writer.storage = NoRemoval(checkpointer._writer.storage)
        for step in (1, 2, 3, 4):
            checkpointer.save(step, {"model": model_of(9, 1.0)})
        checkpointer.finish()
        return warned

    (warned,) = on_ranks(rank_main, 1)
    assert len(warned) == 3
    for text in warned:
        assert "old checkpoints could not be removed: rank 0 of 1" in text
        assert "step-00000001: Device or resource busy (errno 16)." in text
    assert names(tmp_path) == ["step-00000001", "step-00000004"]
