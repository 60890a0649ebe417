"""``python -m torchmn.launch.probe_host``: a host tells its facts before anything is started on it.

Reads what is asked from its standard input and answers on the standard output, each a line of JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from torchmn.control.ports import find_free_port
from torchmn.launch.host_checks import HostFacts, find_problem, versions


def main() -> None:
    """Answer one question."""
    asked = json.loads(sys.stdin.readline())
    problem = find_problem(asked["cwd"], asked["script"])
    facts = HostFacts(versions=versions(), port=find_free_port(""), problem=problem)
    print(json.dumps(asdict(facts)), flush=True)


if __name__ == "__main__":
    main()
