"""Every error that torchmn raises, and the categories of its warnings: `torchmn.base.errors`."""

from torchmn.base.errors import *  # noqa: F403
from torchmn.base.errors import __all__ as __all__
