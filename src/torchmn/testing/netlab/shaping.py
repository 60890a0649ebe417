"""The rate of a link: what a user may write, and what tc is told.

A token bucket (tbf) at both ends of a link, since netem and fq are not in every kernel. What does
not fit is dropped after 20 ms of queueing, as in a switch with a small buffer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torchmn.errors import UsageError

_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
_BUCKET = "burst 128kb latency 20ms"


def rate_bytes_per_s(rate: str) -> float:
    """What a rate such as ``1gbit``, ``100mbit`` or ``2.5gbit`` comes to.

    Raises UsageError: it is no positive number of ``bit``, ``kbit``, ``mbit`` or ``gbit``.

    >>> rate_bytes_per_s("100mbit")
    12500000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    bytes_per_s = float(match[1]) * _FACTORS[match[2]] / 8 if match else 0.0
    if bytes_per_s <= 0:
        raise UsageError(
            f"The rate {rate!r} is no positive number of bits per second. "
            "Write it as '1gbit', '100mbit' or '64kbit', or give None for a link without a limit."
        )
    return bytes_per_s


def tc_batch(devices: Iterable[str], rate: str | None) -> str:
    """What ``tc -batch`` reads to shape the sending side of these devices; None: no limit.

    A queue that is there is changed in place, so that packets which wait in it are not lost.
    """
    queue = f"tbf rate {rate} {_BUCKET}" if rate is not None else "noqueue"
    return "".join(f"qdisc replace dev {device} root {queue}\n" for device in devices)
