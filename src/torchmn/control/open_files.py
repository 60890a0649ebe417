"""How many files a process may have open: each connection to a rank is one (``ulimit -n``).

The soft limit is raised for the process that is connected to all ranks, and for no other: scripts
see the limit that the user has set.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import partial

from torchmn.errors import LaunchError

_OTHER_FILES = 64
"""Standard streams, logs, listeners, pipes to processes that are being started."""
_given: list[tuple[int, int]] = []
"""The soft and the hard limit before the soft one was raised: at most one pair."""


def allow_connections(num_connections: int, what: str) -> None:
    """Raise the soft limit of this process to the hard one if this many connections need that.

    ``what`` opens them, in the message. Raises LaunchError: the hard limit is too low as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{what} needs {needed:,} open files, one for each of {num_connections:,} connections "
            f"and {_OTHER_FILES} others, and the hard limit of open files is {hard:,}. Raise it "
            "('nofile' in /etc/security/limits.conf, or the settings of the scheduler's or "
            "container's daemon; ulimit -Hn shows it), or start fewer ranks."
        )
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard)
    )
    if not _given:
        _given.append((soft, hard))


def lower_in_child() -> Callable[[], None] | None:
    """For ``preexec_fn``: the child has the limit that this process had before it was raised."""
    return partial(resource.setrlimit, resource.RLIMIT_NOFILE, _given[0]) if _given else None
