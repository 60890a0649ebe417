"""Starting and supervising the ranks of a job; preemption; crashes. Starts without torch.

The names load on first use: an agent, which runs once per rank, needs few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmn.run.crash import install_crash_handler
    from torchmn.run.preemption import SAVED_STATUS, Preemption

__all__ = [
    "SAVED_STATUS",
    "Preemption",
    "install_crash_handler",
]
_NAMES = {
    "crash": ("install_crash_handler",),
    "preemption": ("SAVED_STATUS", "Preemption"),
}


def __getattr__(name: str) -> object:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"torchmn.run.{module}"), name)
    raise AttributeError(f"module 'torchmn.run' has no attribute {name!r}")
