"""The rate of a link: its syntax, and the commands for tc.

A token bucket filter (tbf) is used at both ends of a link, since netem and fq are not in every
kernel. Packets are dropped after 20 ms of queueing, as in a switch with a small buffer.
"""

from collections.abc import Iterable

_BUCKET = "burst 128kb latency 20ms"


def tc_batch(devices: Iterable[str], rate: str | None) -> str:
    """Commands for ``tc -batch`` that limit what these devices send; None: no limit.

    An existing queue is changed in place, so that packets in it are not lost.
    """
    queue = f"tbf rate {rate} {_BUCKET}" if rate is not None else "noqueue"
    return "".join(f"qdisc replace dev {device} root {queue}\n" for device in devices)
