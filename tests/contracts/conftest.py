"""What several contract suites run on: 1 to 4 ranks, as threads over gloo and as MPI processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.mpi_pool import MpiPool
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.testing import run_ranks

Run = Callable[[Callable[[Communicator], None]], object]
SIZES = (1, 2, 3, 4)


@pytest.fixture(params=SIZES)
def over_gloo(request: pytest.FixtureRequest) -> Run:
    """Runs a contract on threads."""
    return lambda contract: run_ranks(contract, request.param)


@pytest.fixture(params=SIZES)
def over_mpi(request: pytest.FixtureRequest, mpi_pool: MpiPool) -> Run:
    """Runs a contract on MPI processes."""
    topology = Topology.blocks([request.param])
    return lambda contract: mpi_pool.run(contract, request.param, name="flat", topology=topology)
