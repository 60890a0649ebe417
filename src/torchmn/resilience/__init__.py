"""Crash handling, preemption and replica checks."""

from torchmn.resilience.crash import install_crash_handler
from torchmn.resilience.preemption import SAVED_STATUS, Preemption
from torchmn.resilience.replica_check import ReplicaCheck, ReplicaReport

__all__ = ["SAVED_STATUS", "Preemption", "ReplicaCheck", "ReplicaReport", "install_crash_handler"]
