"""Modules that communicate, under ChainerMN's name: `torchmn.nn`."""

from torchmn.nn import *  # noqa: F403
from torchmn.nn import __all__ as __all__
