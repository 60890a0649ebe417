"""Processes under a real mpirun, one set of them for all tests of a module."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from torchmn.launch.backend import find_mpirun
from torchmn.testing import MpiPool


@pytest.fixture(scope="module")
def pool() -> Iterator[MpiPool]:
    if find_mpirun(os.environ) is None:
        pytest.skip(reason="no mpirun: install it with 'make setup'")
    with MpiPool(4) as started:
        yield started
