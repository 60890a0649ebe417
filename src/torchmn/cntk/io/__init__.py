"""CNTK's ``cntk.io``: all names of `torchmn.cntk.readers`."""

from torchmn.cntk.io import transforms as transforms
from torchmn.cntk.readers import *  # noqa: F403
