"""Transports: gloo, NCCL, MPI, TCP and shared memory behind one interface."""

from torchmn.comm.transports.base import TimeLimit, Transport

__all__ = ["TimeLimit", "Transport"]
