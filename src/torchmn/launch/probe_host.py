"""``python -m torchmn.launch.probe_host``: a host tells its facts before anything is started on it.

Reads what is asked from its standard input and answers on the standard output, each a line of JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict

from torchmn.launch.host_checks import HostFacts, find_problem, versions
from torchmn.launch.starters.local import reserve_port


def main() -> None:
    """Answer one question."""
    asked = json.loads(sys.stdin.readline())
    keeper, port = reserve_port("")
    with closing(keeper):
        facts = HostFacts(
            versions=versions(), port=port, problem=find_problem(asked["cwd"], asked["script"])
        )
        print(json.dumps(asdict(facts)), flush=True)


if __name__ == "__main__":
    main()
