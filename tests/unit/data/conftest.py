"""Folders for the tests of data."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_folder() -> Iterator[str]:
    """A folder in memory; the test fails if something is left in it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="torchmn-test-") as folder:
        yield folder
        assert list(Path(folder).iterdir()) == []
