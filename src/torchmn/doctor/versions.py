"""Check the versions that all hosts must have in common."""

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress

from torchmn.cluster.commands import ask
from torchmn.control.codec import Record
from torchmn.doctor.findings import Finding, Request, deviating, listed
from torchmn.run.backend import find_mpirun
from torchmn.run.host_checks import COMPARED, find_problem, version_of, versions

_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_ANSWER_S = 10.0


class VersionFacts(Record, frozen=True, kw_only=True):
    """Versions by name, "missing" for a package not installed; and why nothing can run."""

    versions: dict[str, str]
    problem: str = ""


def examine(request: Request, host: str) -> VersionFacts:
    """Read what is installed; imports none of it."""
    found = {**versions(), "numpy": version_of("numpy")}
    nccl = next((text for name in _NCCL if (text := version_of(name)) != "missing"), "missing")
    found |= {"NCCL": nccl, "MPI": _mpi_version(), "processor": platform.machine()}
    with suppress(OSError), open("/sys/module/nvidia/version") as file:
        found["NVIDIA driver"] = file.read().strip()
    return VersionFacts(versions=found, problem=find_problem(request.cwd, ""))


def findings(found: Mapping[str, VersionFacts], request: Request) -> Iterator[Finding]:
    """Find hosts whose versions differ from those of most others."""
    for host, facts in found.items():
        if facts.problem:
            yield Finding(
                severity="error",
                hosts=[host],
                seen=f"on {host} {facts.problem}",
                rule="Every host sees the folder that the job starts in.",
                cure="Mount the same file system on all hosts.",
            )
    names = dict.fromkeys(name for facts in found.values() for name in facts.versions)
    for name in names:
        usual, others = deviating(
            {host: facts.versions.get(name, "missing") for host, facts in found.items()}
        )
        for version, hosts in others.items():
            yield Finding(
                severity="error" if name in COMPARED else "warning",
                hosts=hosts,
                seen=f"{name} is {version} on {listed(hosts)} and {usual} on other hosts",
                rule=f"All hosts have the same {name}.",
                cure=f"Install {name} {usual} on {listed(hosts)}, into the environment of "
                f"{sys.executable}, or share one environment.",
            )


def _mpi_version() -> str:
    path = find_mpirun(os.environ)
    if path is None:
        return "missing"
    answer = ask([path, "--version"], limit_s=_ANSWER_S)
    return (answer.out.strip() or answer.text).splitlines()[0]
