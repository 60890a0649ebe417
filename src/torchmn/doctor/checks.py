"""The checks that each host takes part in. A new one is a file, and a line here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torchmn.control.codec import Record
from torchmn.doctor.disks import DiskCheck
from torchmn.doctor.findings import Finding, Request
from torchmn.doctor.gpus import GpuCheck
from torchmn.doctor.limits import LimitCheck
from torchmn.doctor.network import NetworkCheck
from torchmn.doctor.processors import ProcessorCheck
from torchmn.doctor.versions import VersionCheck


class Check(Protocol):
    """What a host finds out about itself, and what follows from that of all hosts."""

    name: str
    facts: Any  # the type of the facts

    def examine(self, request: Request, host: str) -> Record:
        """On each host: read. Local."""

    def findings(self, found: Mapping[str, Any], request: Request) -> Iterator[Finding]:
        """From the facts of all hosts that answered, by name. Pure."""


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
