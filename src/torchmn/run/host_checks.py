"""Check what all hosts of a job must have in common. Local, without torch.

``python -m torchmn.run.host_checks`` checks a host before anything is started on it: its order,
`ProbeHost`, is a line on standard input, and it prints its `HostFacts` as a line.
"""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from torchmn.cluster.network import local_address_among, route_of
from torchmn.cluster.units import grouped
from torchmn.control.codec import Record, decode, encode

COMPARED = ("python", "torch", "torchmn")


class ProbeHost(Record, frozen=True, kw_only=True):
    """Order to `torchmn.run.host_checks`: check the folder and the script, print `HostFacts`."""

    cwd: str
    script: str
    hosts: list[str] = []


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Facts about one host of a job, as found by `torchmn.run.host_checks`.

    ``versions`` are those of the `COMPARED` programs, ``network`` is the one through which the host
    reaches the other hosts, and ``problem`` is the reason why the command cannot run there (empty
    if it can).
    """

    versions: dict[str, str]
    network: str = ""
    problem: str = ""


def versions() -> dict[str, str]:
    """Return the installed versions by name, without importing torch."""
    return {"python": platform.python_version(), **{n: version_of(n) for n in COMPARED[1:]}}


def version_of(package: str, missing: str = "missing") -> str:
    """Return the installed version of a package, or ``missing``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return missing


def find_problem(cwd: str, script: str) -> str:
    """Return why this host cannot run the script ("" for no script); empty if it can."""
    if not os.path.isdir(cwd):
        return f"there is no folder {cwd}: share it between the hosts, or start from one that is"
    if script and not os.access(Path(cwd) / script, os.R_OK):
        return f"the script {Path(cwd) / script} is not there: put it where all hosts see it"
    return ""


def differences(found: Mapping[str, Mapping[str, str]]) -> str:
    """Describe the versions that differ between hosts; empty if none do.

    >>> differences({"a": {"torch": "2.12"}, "b": {"torch": "2.13"}})
    'torch is 2.12 on a and 2.13 on b'
    """
    found_differences = []
    for name in COMPARED:
        hosts = grouped((each[name], host) for host, each in found.items() if name in each)
        if len(hosts) > 1:
            parts = [f"{version} on {', '.join(at)}" for version, at in hosts.items()]
            found_differences.append(f"{name} is {' and '.join(parts)}")
    return "; ".join(found_differences)


def main() -> None:
    """Read one `ProbeHost` from standard input and print the `HostFacts`."""
    order = decode(sys.stdin.readline(), ProbeHost)
    problem = find_problem(order.cwd, order.script)
    address = local_address_among(order.hosts)
    route = None if address is None else route_of(address)
    facts = HostFacts(
        versions=versions(),
        network=route.network if route else "",
        problem=problem,
    )
    print(encode(facts).decode(), end="", flush=True)


if __name__ == "__main__":
    main()
