"""``python -m torchmn.launch.probe_host``: check a host before anything is started on it.

Reads a request from standard input and writes the answer to standard output, a line of JSON each.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from torchmn.control.ports import find_free_port
from torchmn.launch.host_checks import HostFacts, find_problem, versions


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.readline())
    problem = find_problem(request["cwd"], request["script"])
    facts = HostFacts(versions=versions(), port=find_free_port(""), problem=problem)
    print(json.dumps(asdict(facts)), flush=True)


if __name__ == "__main__":
    main()
