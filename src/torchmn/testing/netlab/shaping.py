"""The rate of a link: its syntax, and the commands for tc.

A token bucket filter (tbf) is used at both ends of a link, since netem and fq are not in every
kernel. Packets are dropped after 20 ms of queueing, as in a switch with a small buffer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torchmn.errors import UsageError

_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
_BUCKET = "burst 128kb latency 20ms"


def rate_bytes_per_s(rate: str) -> float:
    """The bytes per second of a rate such as ``1gbit``, ``100mbit`` or ``2.5gbit``.

    Raises UsageError: it is not a positive number of ``bit``, ``kbit``, ``mbit`` or ``gbit``.

    >>> rate_bytes_per_s("100mbit")
    12500000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    bytes_per_s = float(match[1]) * _FACTORS[match[2]] / 8 if match else 0.0
    if bytes_per_s <= 0:
        raise UsageError(
            f"The rate {rate!r} is not a positive number of bits per second. "
            "Write it as '1gbit', '100mbit' or '64kbit', or pass None for no limit."
        )
    return bytes_per_s


def tc_batch(devices: Iterable[str], rate: str | None) -> str:
    """Commands for ``tc -batch`` that limit what these devices send; None: no limit.

    An existing queue is changed in place, so that packets in it are not lost.
    """
    queue = f"tbf rate {rate} {_BUCKET}" if rate is not None else "noqueue"
    return "".join(f"qdisc replace dev {device} root {queue}\n" for device in devices)
