"""``python -m torchmn.doctor.host_main``: examine this host as the launcher orders, line by line.

Orders come on standard input and replies go to standard output, so that nothing but the remote
shell is needed. What else writes to standard output is redirected to standard error. Ends with its
standard input.
"""

import os
import sys
import time
from typing import Any

from torchmn.control.codec import Record, decode, decode_union, encode
from torchmn.doctor.findings import AskTime, Begin, Examine, Failed, Order, Ready, TimeIs
from torchmn.doctor.gpus import GpuCheck
from torchmn.doctor.limits import DiskCheck, LimitCheck
from torchmn.doctor.link_probe import measure_link, serve_probes
from torchmn.doctor.network import NetworkCheck
from torchmn.doctor.processors import ProcessorCheck, machine_of_host
from torchmn.doctor.versions import VersionCheck

# The checks that each host takes part in. A new one is a file, and a line here: ``examine`` reads
# on each host, and ``findings`` follow from the facts of all hosts that answered.
CHECKS: dict[str, Any] = {
    check.name: check
    for check in (
        NetworkCheck(),
        VersionCheck(),
        LimitCheck(),
        GpuCheck(),
        ProcessorCheck(),
        DiskCheck(),
    )
}


def main() -> None:
    """Carry out orders until there are none."""
    replies = os.dup(1)
    os.dup2(2, 1)
    begin = decode(sys.stdin.readline(), Begin)
    _reply(replies, Ready(machine=machine_of_host(), port=serve_probes(begin.secret)))
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
        facts: Record = CHECKS[order.check].examine(begin.request, begin.host)
        return facts
    return measure_link(order, begin.secret)


def _reply(descriptor: int, reply: Record) -> None:
    line = memoryview(encode(reply))
    while line:
        line = line[os.write(descriptor, line) :]


if __name__ == "__main__":
    main()
