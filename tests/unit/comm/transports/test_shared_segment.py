"""Shared memory without a name: access, errors of a full folder, clean-up."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchmn.comm.transports.shared_segment import SharedMemorySegment
from torchmn.errors import UnsupportedError


@pytest.fixture
def memory_folder() -> Iterator[str]:
    """A folder in memory; the test fails if something is left in it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="torchmn-test-") as folder:
        yield folder
        assert list(Path(folder).iterdir()) == []


def test_attached_memory_is_the_same() -> None:
    memory = SharedMemorySegment.create(3)
    other = SharedMemorySegment.attach(memory.address())
    memory.map_shared()[:] = b"abc"
    assert other.map_shared()[:] == b"abc"


@pytest.mark.parametrize("change", [{"number": 9999}, {"pid": 2**22 + 1}, {"inode": 1}])
def test_an_address_of_another_file(change: dict[str, int]) -> None:
    memory = SharedMemorySegment.create(3)
    address = dataclasses.replace(memory.address(), **change)
    with pytest.raises(UnsupportedError, match=r"cannot be opened at /proc/\d+/fd/\d+"):
        SharedMemorySegment.attach(address)


@pytest.mark.parametrize(
    ("nbytes", "folder", "reason"),
    [
        (2**42, "/dev/shm", r"/dev/shm has .* MiB free and .* needs 4194304\.0"),
        (1, "/nowhere", "no folder /nowhere"),
        (1, "/proc", "/proc cannot hold files without a name"),
    ],
    ids=["too large", "a missing folder", "no nameless files"],
)
def test_folders_that_cannot_hold_it(nbytes: int, folder: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        SharedMemorySegment.create(nbytes, folder)


def test_other_operating_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    with pytest.raises(UnsupportedError, match="needs Linux"):
        SharedMemorySegment.create(1)


@pytest.mark.root
@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_folder_is_an_error_and_no_crash(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip(reason="this machine does not allow mounts")
    try:
        with pytest.raises(UnsupportedError, match=r"has 1\.0 MiB free"):
            SharedMemorySegment.create(2 * 2**20, str(tmp_path))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


KILLED = """
import os, signal, sys
from torchmn.comm.transports.shared_segment import SharedMemorySegment
memory = SharedMemorySegment.create(64, sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_nothing_is_left_after_kill(memory_folder: str) -> None:
    died = subprocess.run([sys.executable, "-c", KILLED, memory_folder], check=False)
    assert died.returncode == -signal.SIGKILL
    assert os.listdir(memory_folder) == []
