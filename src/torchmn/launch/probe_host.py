"""``python -m torchmn.launch.probe_host``: a host tells its facts before anything is started on it.

Its order, `ProbeHost`, is a line on standard input; it prints its `HostFacts` as a line.
"""

from __future__ import annotations

import sys
from contextlib import closing

from torchmn.control.codec import decode, encode
from torchmn.launch.host_checks import HostFacts, find_problem, versions
from torchmn.launch.orders import ProbeHost
from torchmn.launch.starters.local import reserve_port


def main() -> None:
    """Answer one question."""
    order = decode(sys.stdin.readline(), ProbeHost)
    keeper, port = reserve_port("")
    with closing(keeper):
        facts = HostFacts(
            versions=versions(), port=port, problem=find_problem(order.cwd, order.script)
        )
        print(encode(facts).decode(), end="", flush=True)


if __name__ == "__main__":
    main()
