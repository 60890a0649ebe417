"""Differentiable communication under ChainerMN's name: `torchmn.nn.functions`."""

from torchmn.nn.functions import *  # noqa: F403
from torchmn.nn.functions import __all__ as __all__
