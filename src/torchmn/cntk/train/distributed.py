"""CNTK's ``cntk.train.distributed``: distributed learners and the communicator."""

from torchmn.cntk.communicator import Communicator, WorkerDescriptor, mpi_communicator
from torchmn.cntk.distributed_learners import (
    DistributedLearner,
    block_momentum_distributed_learner,
    data_parallel_distributed_learner,
)

__all__ = [
    "Communicator",
    "DistributedLearner",
    "WorkerDescriptor",
    "block_momentum_distributed_learner",
    "data_parallel_distributed_learner",
    "mpi_communicator",
]
