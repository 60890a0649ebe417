"""``python -m torchmn.doctor.host_main``: examine this host as the launcher orders, line by line.

Orders come on standard input and replies go to standard output, so that nothing but the remote
shell is needed. What else writes to standard output is redirected to standard error. Ends with its
standard input.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torchmn.control.codec import Record, decode, decode_union, encode
from torchmn.doctor import disks, gpus, limits, network, processors, versions
from torchmn.doctor.findings import AskTime, Begin, Examine, Failed, Finding, Order, Ready, TimeIs
from torchmn.doctor.link_probe import measure_link, serve_probes


class Check(NamedTuple):
    """A check of all hosts.

    ``examine(request, host)`` reads the facts on each host, and ``findings(facts, request)``
    derives findings from the facts of all hosts that answered, by host.
    """

    facts: type[Record]
    examine: Callable[..., Record]
    findings: Callable[..., Iterable[Finding]]


# A new one is a file, and a line here.
CHECKS = {
    "network": Check(network.NetworkFacts, network.examine, network.findings),
    "versions": Check(versions.VersionFacts, versions.examine, versions.findings),
    "limits": Check(limits.LimitFacts, limits.examine, limits.findings),
    "gpus": Check(gpus.GpuFacts, gpus.examine, gpus.findings),
    "processors": Check(processors.ProcessorFacts, processors.examine, processors.findings),
    "disks": Check(disks.DiskFacts, disks.examine, disks.findings),
}


def main() -> None:
    """Carry out orders until there are none."""
    # Replies have a descriptor of their own, so that what a check prints cannot mix with them.
    replies = os.dup(1)
    os.dup2(2, 1)
    begin = decode(sys.stdin.readline(), Begin)
    _reply(replies, Ready(machine=processors.machine_of_host(), port=serve_probes(begin.secret)))
    for line in sys.stdin:
        try:
            reply = _carry_out(decode_union(line, Order), begin)
        except Exception as error:  # the other checks are still of use
            reply = Failed(f"{type(error).__name__}: {error}")
        _reply(replies, reply)


def _carry_out(order: Order, begin: Begin) -> Record:
    if isinstance(order, AskTime):
        return TimeIs(time.time())
    if isinstance(order, Examine):
        return CHECKS[order.check].examine(begin.request, begin.host)
    return measure_link(order, begin.secret)


def _reply(descriptor: int, reply: Record) -> None:
    line = memoryview(encode(reply))
    while line:
        line = line[os.write(descriptor, line) :]


if __name__ == "__main__":
    main()
