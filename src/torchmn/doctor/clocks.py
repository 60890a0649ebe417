"""Clocks of hosts, compared with that of the launcher's host by round trips."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from torchmn.doctor.findings import Finding

_MAX_OFFSET_S = 0.5


def clock_findings(offsets: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """From how far each clock is ahead of the launcher's, and the error of that, in seconds.

    The median counts as right; of two hosts the one whose clock agrees with the launcher's.
    """
    usual = statistics.median(found for found, _ in offsets.values()) if len(offsets) > 2 else 0.0
    for host, (offset_s, error_s) in offsets.items():
        off_s = offset_s - usual
        way = "ahead of" if off_s > 0 else "slower than"
        if abs(off_s) > _MAX_OFFSET_S + error_s:
            yield Finding(
                check="clocks",
                severity="warning",
                hosts=[host],
                seen=f"the clock of {host} is {abs(off_s):.3g} s {way} those of other hosts "
                f"(within {error_s * 1e3:.2g} ms)",
                rule=f"Clocks differ by at most {_MAX_OFFSET_S:g} s, or logs, files and time "
                "limits of several hosts contradict each other.",
                cure="Start chrony or ntpd on it (chronyc tracking, timedatectl).",
                value=off_s,
                unit="s",
            )
