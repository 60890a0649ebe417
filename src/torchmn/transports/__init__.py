"""What carries the bytes."""

from torchmn.transports.base import TimeLimit, Transport

__all__ = ["TimeLimit", "Transport"]
