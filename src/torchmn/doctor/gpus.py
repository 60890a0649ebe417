"""Check GPUs with ``nvidia-smi``: their number, memory errors, and clock rates."""

import csv
import io
import shutil
from collections.abc import Iterator, Mapping

from torchmn.cluster.commands import ask
from torchmn.cluster.gpus import count_gpus
from torchmn.control.codec import Record
from torchmn.doctor.findings import Finding, Request, deviating, listed

_ANSWER_S = 30.0
# Our names of what `nvidia-smi --query-gpu` is asked for; it answers "[N/A]" where it cannot.
_FIELDS = {
    "index": "index",
    "name": "name",
    "memory_mib": "memory.total",
    "used_mib": "memory.used",
    "uncorrected": "ecc.errors.uncorrected.volatile.total",
    "pending": "retired_pages.pending",
    "hw_slowdown": "clocks_throttle_reasons.hw_slowdown",
    "sw_thermal": "clocks_throttle_reasons.sw_thermal_slowdown",
    "temperature": "temperature.gpu",
    "width": "pcie.link.width.current",
    "max_width": "pcie.link.width.max",
}
_MAX_USED = 0.1


class GpuFacts(Record, frozen=True, kw_only=True):
    """The driver's report on each GPU, by `_FIELDS`, and the pairs without peer access."""

    num_devices: int
    gpus: list[dict[str, str]] = []
    without_peer_access: list[list[str]] = []
    error: str = ""


def examine(request: Request, host: str) -> GpuFacts:
    """Read the facts of this host's GPUs from the driver."""
    num_devices, command = count_gpus({}), shutil.which("nvidia-smi")
    if command is None:
        missing = "there is no nvidia-smi" if num_devices else ""
        return GpuFacts(num_devices=num_devices, error=missing)
    query = f"--query-gpu={','.join(_FIELDS.values())}"
    answer = ask([command, query, "--format=csv,noheader,nounits"], limit_s=_ANSWER_S)
    error = answer.text.splitlines()[-1] if answer.returncode else ""
    rows = [[word.strip() for word in row] for row in csv.reader(io.StringIO(answer.out)) if row]
    gpus = [dict(zip(_FIELDS, row, strict=False)) for row in rows if len(row) == len(_FIELDS)]
    if not error and len(gpus) < len(rows):
        error = f"nvidia-smi answers {answer.text.splitlines()[-1][:200]!r}"
    matrix = ask([command, "topo", "-p2p", "r"], limit_s=_ANSWER_S).out if len(gpus) > 1 else ""
    return GpuFacts(
        num_devices=num_devices,
        gpus=gpus,
        without_peer_access=_pairs_without(matrix),
        error=error,
    )


def findings(found: Mapping[str, GpuFacts], request: Request) -> Iterator[Finding]:
    """Check each GPU by itself, and number and kind in comparison with other hosts."""
    for host, facts in found.items():
        if facts.error and (facts.num_devices or any(each.gpus for each in found.values())):
            yield Finding(
                "error",
                [host],
                f"the GPU driver of {host} does not answer: {facts.error}",
                "nvidia-smi lists the GPUs of every host.",
                "Look for Xid errors in dmesg; load the driver again, or restart the host.",
            )
        for gpu in facts.gpus:
            yield from _one_gpu(host, gpu)
        if facts.without_peer_access:
            pairs = [" and ".join(pair) for pair in facts.without_peer_access]
            yield Finding(
                "warning",
                [host],
                f"GPUs {listed(pairs)} of {host} have no peer access",
                "GPUs of one host reach each other's memory, or NCCL copies through the host's.",
                "Switch off ACS in the BIOS, and give a container all GPUs of the host.",
            )
    for what, values in (
        ("GPUs", {host: str(len(facts.gpus)) for host, facts in found.items()}),
        ("kinds of GPUs", {host: _kinds(facts) for host, facts in found.items()}),
    ):
        usual, others = deviating(values)
        for value, hosts in others.items():
            if any(found[host].error for host in hosts) or (
                what != "GPUs" and "none" in (usual, value)
            ):
                continue
            yield Finding(
                severity="error" if what == "GPUs" else "warning",
                hosts=hosts,
                seen=f"{listed(hosts)} has {value} {what if what == 'GPUs' else ''}".rstrip()
                + f", other hosts have {usual}",
                rule="All hosts have the same number of GPUs of the same kind.",
                cure="Look for Xid errors in dmesg (a GPU that has fallen off the bus needs a "
                "restart of the host), or correct the slots of the host.",
            )


def _one_gpu(host: str, gpu: Mapping[str, str]) -> Iterator[Finding]:
    name = f"GPU {gpu['index']} of {host}"
    errors = _number(gpu["uncorrected"])
    if errors or gpu["pending"] == "Yes":
        yield Finding(
            "error",
            [host],
            f"{name} has {errors:.0f} uncorrected memory errors"
            + (" and a page to be retired" if gpu["pending"] == "Yes" else ""),
            "A GPU has no uncorrected memory errors: results may be wrong.",
            "Reset the GPU (nvidia-smi --gpu-reset) or restart the host; if they come back, have "
            "it replaced.",
        )
    active = [word for word in ("hw_slowdown", "sw_thermal") if gpu[word] == "Active"]
    if active:
        yield Finding(
            "warning",
            [host],
            f"{name} is throttled ({listed(active)}) at {gpu['temperature']} degrees",
            "No GPU lowers its clock because of heat or power: all ranks wait for the slowest.",
            "Check fans, air flow and power supply.",
        )
    width, max_width = _number(gpu["width"]), _number(gpu["max_width"])
    if width and width < max_width:
        yield Finding(
            "warning",
            [host],
            f"{name} uses {width:.0f} of {max_width:.0f} PCIe lanes",
            "A GPU uses all lanes that it has.",
            "Seat the card again, or look for a riser or a slot with fewer lanes.",
        )
    used, total = _number(gpu["used_mib"]), _number(gpu["memory_mib"])
    if total and used > _MAX_USED * total:
        yield Finding(
            "warning",
            [host],
            f"{used:.0f} of {total:.0f} MiB of {name} are in use",
            f"Before a job at most {_MAX_USED:.0%} of a GPU's memory is in use.",
            "End what runs there (nvidia-smi lists the processes).",
        )


def _kinds(facts: GpuFacts) -> str:
    return ", ".join(sorted({gpu["name"] for gpu in facts.gpus})) or "none"


def _pairs_without(matrix: str) -> list[list[str]]:
    """Return the pairs of GPUs that ``nvidia-smi topo -p2p r`` does not mark OK."""
    rows = [line.split() for line in matrix.splitlines() if line.strip().startswith("GPU")]
    names = rows[0] if rows else []
    found = []
    for number, row in enumerate(rows[1:]):
        for other, state in zip(names[number + 1 :], row[number + 2 :], strict=False):
            if state != "OK":
                found.append([row[0], other])
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0  # [N/A]
