"""Write the state of a run as OpenMetrics text, which Prometheus' node exporter reads."""

import re
from collections.abc import Iterable
from pathlib import Path

from torchmn.base.errors import UsageError
from torchmn.base.private_files import write_whole
from torchmn.observe.read.run_reader import read_run
from torchmn.observe.report.summary import Summary, summarize
from torchmn.record.records import PHASES

LAST_STEPS = 100  # means are over this number of steps

Rows = Iterable[tuple[dict[str, str], float]]  # labels and value of each sample of a metric


def write_metrics(path: Path, file: Path) -> None:
    """Write phases, step, lateness and memory of each rank over its last steps to a file.

    The file is replaced as a whole, so that a collector never reads half of it. Raises DataError:
    the run cannot be read; UsageError: the file cannot be written.
    """
    if "/" not in str(file) and re.fullmatch(r"[+-]?\d+|.*:.*", str(file)):
        raise UsageError(
            f"--metrics={file}: torchmn serves no port. Write a file again and again for the "
            "textfile collector of Prometheus' node exporter: `while sleep 15; do torchmn report "
            f"RUN --metrics run.prom; done`; ./{file} if it is the name of a file."
        )
    text = _text(summarize(read_run(path, last_steps=LAST_STEPS)))
    try:
        write_whole(file, text.encode(), mode=0o666)
    except OSError as error:
        raise UsageError(f"The file {str(file)!r} cannot be written: {error.strerror}.") from None


def _text(summary: Summary) -> str:
    lines: list[str] = []

    def family(name: str, kind: str, what: str, rows: Rows) -> None:
        lines.append(f"# TYPE torchmn_{name} {kind}")
        unit = next((u for u in ("seconds", "bytes") if name.endswith(f"_{u}")), None)
        if unit:
            lines.append(f"# UNIT torchmn_{name} {unit}")
        lines.append(f"# HELP torchmn_{name} {what}")
        suffix = "_total" if kind == "counter" else ""
        for labels, value in rows:
            text = ",".join(f'{key}="{_escaped(each)}"' for key, each in labels.items())
            lines.append(f"torchmn_{name}{suffix}{{{text}}} {value:.9g}")

    names = [{"rank": str(r.start.rank), "host": r.start.host} for r in summary.ranks]
    means = summary.mean_phases
    late = summary.lateness_s[summary.num_warmup :].mean(0)
    own = f"mean of the last {len(summary.steady)} steps"
    family(
        "phase_seconds",
        "gauge",
        f"Time of a phase of a step, {own}",
        (
            ({**names[rank], "phase": phase}, means[rank, index])
            for rank in range(len(names))
            for index, phase in enumerate(PHASES)
        ),
    )
    family("step_seconds", "gauge", f"Time of a step, {own}", zip(names, means.sum(1), strict=True))
    family(
        "late_seconds",
        "gauge",
        f"How much later than the median rank it is ready for the exchange, {own}",
        zip(names, late, strict=True),
    )
    family(
        "memory_bytes",
        "gauge",
        "Memory of the process, and of its device",
        (
            ({**name, "of": kind}, column[-1])
            for name, rank in zip(names, summary.ranks, strict=True)
            for kind, column in zip(("process", "device"), rank.memory[1:], strict=True)
            if len(column)
        ),
    )
    family(
        "steps",
        "counter",
        "Steps since the record begins",
        (
            (name, rank.last_step - rank.first_step + 1)
            for name, rank in zip(names, summary.ranks, strict=True)
        ),
    )
    if summary.samples_per_s is not None:
        rate = [({"ranks": str(summary.run.size)}, summary.samples_per_s)]
        family("samples_per_second", "gauge", f"Of all ranks together, {own}", rate)
    running = [({"ranks": str(summary.run.size)}, float(summary.run.is_running))]
    family("running", "gauge", "1 while the run is going", running)
    return "\n".join([*lines, "# EOF", ""])


def _escaped(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
