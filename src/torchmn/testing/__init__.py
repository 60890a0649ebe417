"""Ranks as threads, for tests of torchmn and of code that uses it."""

from torchmn.testing.ranks import run_ranks

__all__ = ["run_ranks"]
