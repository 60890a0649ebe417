"""Write the state of a run as Prometheus text, which its node exporter reads from a file."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torchmn.base.errors import UsageError, require
from torchmn.base.private_files import write_whole
from torchmn.observe.read.run_reader import read_run
from torchmn.observe.report.summary import Summary, summarize
from torchmn.record.records import PHASES

LAST_STEPS = 100  # means are over this number of steps

Rows = Iterable[tuple[dict[str, str], float]]  # labels and value of each sample of a metric


def write_metrics(path: Path, file: Path) -> None:
    """Write phases, step, lateness and memory of each rank over its last steps to a file.

    The file is replaced as a whole, so that a collector never reads half of it. Raises DataError:
    the run cannot be read; UsageError: the file cannot be written; UnsupportedError: there is no
    ``prometheus_client``.
    """
    if "/" not in str(file) and re.fullmatch(r"[+-]?\d+|.*:.*", str(file)):
        raise UsageError(
            f"--metrics={file}: torchmn serves no port. Write a file again and again for the "
            "textfile collector of Prometheus' node exporter: `while sleep 15; do torchmn report "
            f"RUN --metrics run.prom; done`; ./{file} if it is the name of a file."
        )
    client = require("prometheus_client", "--metrics", "torchmn[report]")
    text = client.generate_latest(_Registry(summarize(read_run(path, last_steps=LAST_STEPS))))
    try:
        write_whole(file, text, mode=0o666)
    except OSError as error:
        raise UsageError(f"The file {str(file)!r} cannot be written: {error.strerror}.") from None


class _Registry:
    """The metrics of a run, as ``prometheus_client`` asks for them."""

    def __init__(self, summary: Summary) -> None:
        self._summary = summary

    def collect(self) -> Iterator[Any]:
        """Return the families of metrics, each with its samples."""
        core = require("prometheus_client.core", "--metrics", "torchmn[report]")
        kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        for name, kind, what, rows in _families(self._summary):
            samples = list(rows)
            labels = list(samples[0][0]) if samples else []
            family = kinds[kind](f"torchmn_{name}", what, labels=labels)
            for values, value in samples:
                # prometheus_client encodes them as UTF-8, which names of hosts need not be.
                texts = [each.encode(errors="replace").decode() for each in values.values()]
                family.add_metric(texts, value)
            yield family


def _families(summary: Summary) -> Iterator[tuple[str, str, str, Rows]]:
    """Return name, kind, description and samples of each metric."""
    names = [{"rank": str(r.start.rank), "host": r.start.host} for r in summary.ranks]
    means = summary.mean_phases
    late = summary.lateness_s[summary.num_warmup :].mean(0)
    own = f"mean of the last {len(summary.steady)} steps"
    yield (
        "phase_seconds",
        "gauge",
        f"Time of a phase of a step, {own}",
        (
            ({**names[rank], "phase": phase}, means[rank, index])
            for rank in range(len(names))
            for index, phase in enumerate(PHASES)
        ),
    )
    step = zip(names, means.sum(1), strict=True)
    yield "step_seconds", "gauge", f"Time of a step, {own}", step
    yield (
        "late_seconds",
        "gauge",
        f"How much later than the median rank it is ready for the exchange, {own}",
        zip(names, late, strict=True),
    )
    yield (
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
    yield (
        "steps",
        "counter",
        "Steps since the record begins",
        (
            (name, rank.last_step - rank.first_step + 1)
            for name, rank in zip(names, summary.ranks, strict=True)
        ),
    )
    all_ranks = {"ranks": str(summary.run.size)}
    if summary.samples_per_s is not None:
        rate = [(all_ranks, summary.samples_per_s)]
        yield "samples_per_second", "gauge", f"Of all ranks together, {own}", rate
    running = [(all_ranks, float(summary.run.is_running))]
    yield "running", "gauge", "1 while the run is going", running
