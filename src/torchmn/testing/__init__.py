"""What tests of torchmn, and of code that uses it, need: ranks without a cluster."""

from torchmn.testing.mpi_pool import MpiPool
from torchmn.testing.ranks import run_ranks

__all__ = ["MpiPool", "run_ranks"]
