"""CNTK's ``cntk.io``: all names of `torchmn.readers`."""

from torchmn.cntk.io import transforms as transforms
from torchmn.readers import *  # noqa: F403
