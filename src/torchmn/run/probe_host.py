"""``python -m torchmn.run.probe_host``: check a host before anything is started on it.

Its order, `ProbeHost`, is a line on standard input; it prints its `HostFacts` as a line.
"""

from __future__ import annotations

import sys

from torchmn.cluster import local_address_among, route_of
from torchmn.control.codec import decode, encode
from torchmn.control.connection import find_free_port
from torchmn.run.host_checks import HostFacts, find_problem, versions
from torchmn.run.orders import ProbeHost


def main() -> None:
    """Answer one request."""
    order = decode(sys.stdin.readline(), ProbeHost)
    problem = find_problem(order.cwd, order.script)
    address = local_address_among(order.hosts)
    route = None if address is None else route_of(address)
    facts = HostFacts(
        versions=versions(),
        port=find_free_port(""),
        network=route.network if route else "",
        problem=problem,
    )
    print(encode(facts).decode(), end="", flush=True)


if __name__ == "__main__":
    main()
