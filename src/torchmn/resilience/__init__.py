"""What keeps a training alive: leaving in time before a scheduler ends the job, equal replicas."""

from torchmn.resilience.preemption import SAVED_STATUS, Preemption
from torchmn.resilience.replica_check import ReplicaCheck, ReplicaReport

__all__ = ["SAVED_STATUS", "Preemption", "ReplicaCheck", "ReplicaReport"]
