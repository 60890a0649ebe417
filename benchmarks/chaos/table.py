"""The summary of all recorded runs: a table by fault, and the bars."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from record import Bar, quartiles
from rich.console import Console
from rich.table import Table

from chaos.faults import KINDS

Record = dict[str, Any]
_GOAL_RUNS = 200
_FOLDERS = re.compile(r"""(?<![\w.])/(?:[^\s/:;,'"\\]+/)+""")
_COLUMNS: tuple[str, ...] = (
    *("fault", "where", "runs", "ended", "continued", "too late", "hangs", "orphans", "wrong"),
    *("named", "detected s", "all ended s", "resumed"),
)


def read(path: Path) -> list[Record]:
    """All runs of the result file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def append(path: Path, record: Record) -> None:
    """Append a run, without folder names, which mean nothing on another machine."""
    with path.open("a") as file:
        file.write(_FOLDERS.sub("", json.dumps(record)) + "\n")


def show(records: Sequence[Record]) -> None:
    """Print a summary by fault and place, and every problem."""
    table = Table(title=f"{len(records)} runs")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("fault", "where") else "right")
    for kind in dict.fromkeys(KINDS):
        for where in ("one machine", "test hosts"):
            chosen = [r for r in records if r["fault"]["kind"] == kind and where_of(r) == where]
            if chosen:
                table.add_row(*_row(kind, where, chosen))
    console = Console(width=150)
    console.print(table)
    for record in records:
        if record["problems"]:
            fault = record["fault"]
            what = f"{fault['kind']} of rank {fault['rank']} at {fault['when']}"
            console.print(
                f"seed {record['seed']} run {record['number']}, {record['setting']['name']}, "
                f"{what}: {'; '.join(record['problems'])[:400]}",
                markup=False,
            )


def where_of(record: Record) -> str:
    """One machine or several test hosts."""
    return "test hosts" if len(record["setting"]["workers"]) > 1 else "one machine"


def _row(kind: str, where: str, records: Sequence[Record]) -> list[str]:
    named = [r["named"] for r in records if r.get("named") is not None]
    injected = [r for r in records if "too_late" not in r]
    return [
        kind,
        where,
        str(len(records)),
        str(sum(not r["continued"] for r in injected)),
        str(sum(r["continued"] for r in injected)),
        str(len(records) - len(injected)),
        str(sum(r["hang"] for r in records)),
        str(sum(bool(r["orphans"]) for r in records)),
        str(sum(map(is_wrong, records))),
        f"{sum(named)} of {len(named)}" if named else "",
        _spread(r.get("detection_s") for r in injected),
        _spread(r.get("end_s") for r in injected if not r["continued"]),
        str(sum(r.get("bit_equal", False) for r in records)),
    ]


def is_wrong(record: Record) -> bool:
    """Whether the result is missing, or its bits differ although they must not."""
    return record["setting"]["is_exact"] and not record.get("bit_equal", False)


def _spread(values: Iterable[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return ""
    return f"{statistics.median(known):.1f} ({known[0]:.1f}..{known[-1]:.1f})"


def bars(records: Sequence[Record]) -> list[Bar]:
    """The limits of the benchmark."""
    injected = [record for record in records if "too_late" not in record]
    found = [
        Bar("runs with a fault", len(injected), "", f">= {_GOAL_RUNS}", len(injected) >= _GOAL_RUNS)
    ]
    counts: tuple[tuple[str, Callable[[Record], bool]], ...] = (
        ("hangs over 90 s", lambda r: r["hang"]),
        ("runs with orphans", lambda r: bool(r["orphans"])),
        ("wrong results", is_wrong),
        ("causes not named", lambda r: r.get("named") is False),
    )
    for name, is_bad in counts:
        number = sum(map(is_bad, records))
        found.append(Bar(name, number, "", "<= 0", number == 0))
    for where, limit_s in (("one machine", 3.0), ("test hosts", 10.0)):
        ends = [
            r["end_s"]
            for r in injected
            if r["fault"]["kind"] in ("kill", "flipped byte")
            and where_of(r) == where
            and r["end_s"] is not None
            and not r["continued"]
        ]
        if ends:
            median = statistics.median(ends)
            name = f"kill -9 to the end of the last process, {where}"
            holds = median < limit_s
            found.append(Bar(name, median, "s", f"< {limit_s:g}", holds, ends, quartiles(ends)))
    late = [
        r["detection_s"] - (r["hang_limit_s"] - 5)
        for r in injected
        if r["fault"]["kind"] == "SIGSTOP" and r["detection_s"] is not None
    ]
    if late:
        name = "SIGSTOP to the hang report, beyond the time-out, maximum"
        found.append(Bar(name, max(late), "s", "<= 5", max(late) <= 5, late, quartiles(late)))
    return found
