"""The version of torchmn."""

__version__ = "0.1.0"
