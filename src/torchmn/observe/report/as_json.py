"""The report as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite

from torchmn.observe.report.findings import Finding
from torchmn.observe.report.scaling import Scaling
from torchmn.observe.report.summary import Summary
from torchmn.record.records import PHASES

FORMAT = 1


def as_json(
    reports: Sequence[tuple[Summary, Sequence[Finding]]], scaling: Scaling | None
) -> dict[str, object]:
    """What `docs/reference/report.md` describes. Numbers that are not finite are null."""
    runs = [_run(summary, findings) for summary, findings in reports]
    compared = None if scaling is None else asdict(scaling)
    return {"format": FORMAT, "runs": runs, "scaling": _finite(compared)}


def _run(summary: Summary, findings: Sequence[Finding]) -> object:
    run = summary.run
    return _finite(
        {
            "folder": str(run.folder),
            "num_ranks": run.size,
            "hosts": {
                host: [summary.ranks[index].start.rank for index in indices]
                for host, indices in summary.hosts.items()
            },
            "is_running": run.is_running,
            "is_sampled": run.is_sampled,
            "notes": list(summary.notes),
            "num_steps_read": len(summary.step),
            "first_step": int(summary.step[0]),
            "last_step": int(summary.step[-1]),
            "step_s": summary.step_s,
            "samples_per_s": summary.samples_per_s,
            "gradient_noise_scale": summary.noise_scale,
            "share_of_exposed_exchange": summary.share_of_exposed_exchange,
            "share_of_waiting": summary.share_of_waiting,
            "findings": [asdict(finding) for finding in findings],
            "phases_s": {
                str(rank.start.rank): dict(zip(PHASES, map(float, means), strict=True))
                for rank, means in zip(summary.ranks, summary.mean_phases, strict=True)
            },
            "links": [asdict(link) for link in summary.links],
            "slowest_steps": [asdict(step) for step in summary.slowest_steps()],
            "settings": summary.ranks[0].settings,
            "versions": summary.ranks[0].start.versions,
        }
    )


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
