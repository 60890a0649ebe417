"""What works on which operating system."""

import sys

from torchmn.base.errors import UnsupportedError


def require_linux(what: str) -> None:
    """Raise UnsupportedError unless this is Linux: ``what`` starts or joins other ranks. Local."""
    if sys.platform != "linux":
        raise UnsupportedError(
            f"{what} needs Linux and this is {sys.platform}: ranks are bound to cores, watched and "
            "ended by means of its kernel. Use Linux, also in a container or a virtual machine; "
            "a script that one process runs (python train.py) trains here without it."
        )
