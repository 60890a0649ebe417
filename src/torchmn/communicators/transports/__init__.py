"""What carries the bytes."""

from torchmn.communicators.transports.base import TimeLimit, Transport

__all__ = ["TimeLimit", "Transport"]
