"""Format the output of `torchmn doctor`: findings, the worst first, and measurements."""

import json
import statistics
import textwrap
from collections.abc import Iterator

import msgspec

from torchmn.cluster.units import GiB, counted, grouped
from torchmn.doctor.examination import Examination
from torchmn.doctor.findings import Finding, worst

# The exit status by the worst finding. As for all commands 1 and 2 are errors: it could not begin,
# or was asked for something invalid.
STATUS = {"note": 0, "warning": 3, "error": 4}
_MAX_HOSTS = 16
_WIDTH = 100


def exit_status(examination: Examination) -> int:
    """Return the exit status for the worst finding."""
    return STATUS[worst(examination.findings)]


def as_json(examination: Examination) -> str:
    """Return everything that was found, and the exit status, as JSON."""
    plain = msgspec.to_builtins(examination, str_keys=True)
    return json.dumps({"status": exit_status(examination), **plain}, indent=1)


def as_text(examination: Examination) -> str:
    """Return the report for a terminal."""
    lines = [line for finding in examination.findings for line in _described(finding)]
    lines += [*_hosts(examination), *_links(examination), *_taken(examination)]
    count = {
        each: sum(finding.severity == each for finding in examination.findings)
        for each in ("error", "warning")
    }
    found = ", ".join(counted(number, severity) for severity, number in count.items())
    result = found if any(count.values()) else "healthy"
    hosts = counted(len(examination.hosts), "host")
    lines.append(f"{hosts} examined in {examination.seconds:.0f} s: {result}.")
    return "\n".join(lines)


def _described(finding: Finding) -> Iterator[str]:
    def wrapped(head: str, text: str) -> str:
        return textwrap.fill(
            text,
            _WIDTH,
            initial_indent=head,
            subsequent_indent=" " * 9,
            break_on_hyphens=False,
            break_long_words=False,
        )

    yield wrapped(f"{finding.severity.upper():9}", f"{finding.seen}.")
    if finding.severity != "note":
        yield wrapped("         Rule: ", finding.rule)
        yield wrapped("         Cure: ", finding.cure)


def _hosts(examination: Examination) -> Iterator[str]:
    """Return a line per host with what was measured there."""
    processors = examination.facts.get("processors", {})
    disks = examination.facts.get("disks", {})
    gpus = examination.facts.get("gpus", {})
    if not processors:
        return
    yield ""
    yield f"{'host':16} {'cores':>5} {'GiB free':>8} {'GPUs':>4}  room"
    for host, facts in list(processors.items())[:_MAX_HOSTS]:
        folders = disks[host].folders if host in disks else []
        room = ", ".join(f"{each.free_bytes / GiB:.4g} GiB {each.path}" for each in folders)
        num_gpus = len(gpus[host].gpus) if host in gpus else 0
        yield (
            f"{host[:16]:16} {facts.num_cores:5} {facts.available_bytes / GiB:8.4g} "
            f"{num_gpus:4}  {room}"
        )
    if len(processors) > _MAX_HOSTS:
        yield f"and {len(processors) - _MAX_HOSTS} more: see --json"


def _taken(examination: Examination) -> Iterator[str]:
    """Describe which interface libraries choose by themselves, on the first host."""
    facts = examination.facts.get("network", {})
    if len(facts) > 1:
        host, found = next(iter(facts.items()))
        words = ", ".join(f"{library} {interface}" for library, interface in found.taken.items())
        yield f"interfaces that libraries take by themselves (on {host}): {words}"


def _links(examination: Examination) -> Iterator[str]:
    """Describe the rates of each network, and each link if there are few hosts."""
    good = [link for link in examination.links if not link.measured.error]
    by_network = grouped((f"{link.interface} ({link.network})", link.measured) for link in good)
    for name, measured in by_network.items():
        rates = [each.bytes_per_s * 8e-9 for each in measured]
        latency_s = measured[-1].latency_s
        yield (
            f"{name}: {len(rates)} links, {min(rates):.3g} to {max(rates):.3g} Gb/s, median "
            f"{statistics.median(rates):.3g}; a round trip takes some {latency_s * 1e3:.2g} ms"
        )
