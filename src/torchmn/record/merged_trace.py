"""Merge the traces of all ranks into one file for Perfetto (ui.perfetto.dev) or chrome://tracing.

All times are converted to rank 0's clock. In the trace a rank has a process for each process and
GPU that torch's profiler has seen, and one for torchmn's phases, exchanges and collectives.

Slices of one track must not overlap: Perfetto cuts or drops them. So times are whole nanoseconds
until they are written, and exchanges of several communicators that overlap have tracks of their
own.
"""

import gzip
import json
import math
import pstats
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from torchmn.base.errors import DataError
from torchmn.base.private_files import write_whole
from torchmn.cluster.units import counted
from torchmn.record.profile_request import FOLDER

MERGED = "trace.json.gz"
_KEY, _CLOCK_EVENT = "torchmn", "torchmn clock"
_MAX_PROCESSES = 1000  # of one rank
_MAX_LANES = 1000  # of one track
_TRACKS = ("phases", "exchanges", "collectives")
Event = dict[str, Any]


def merge_traces(folder: Path) -> Path | None:
    """Merge the traces in a folder into its `MERGED`; None if it has none.

    Raises DataError: none of the files can be read.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        return None
    found, problems = [], []
    for path in paths:
        try:
            trace = json.loads(path.read_text())
            found.append((int(trace[_KEY]["rank"]), trace))
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path.name}: {type(error).__name__}: {error}")
    if not found:
        raise DataError(f"No trace in {folder} can be read: {'; '.join(problems)}.")
    found.sort(key=lambda pair: pair[0])
    begin_ns = min(_ns(own["clock_s"] + own["offset_s"]) for own in (t[_KEY] for _, t in found))
    events: list[Event] = []
    for rank, trace in found:
        events += _events_of(rank, trace, begin_ns)
    merged = folder / MERGED
    content = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
    write_whole(merged, gzip.compress(content.encode(), 5))
    return merged


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def _us(ns: int) -> float:
    """Convert nanoseconds to microseconds that a reader which truncates converts back exactly.

    Perfetto multiplies by 1000 and cuts, so that 0.001 less than a nanosecond would be a whole one.
    """
    us = ns / 1000
    while int(us * 1000.0) != ns:
        us = math.nextafter(us, math.copysign(math.inf, ns))
    return us


def _clock_ns(trace: dict[str, Any]) -> int | None:
    """Return the trace's own time of `_CLOCK_EVENT` in nanoseconds, None if it is missing."""
    for event in trace["traceEvents"]:
        if event.get("name") == _CLOCK_EVENT and event.get("ph") == "X":
            return round(1000 * float(event["ts"]))
    return None


def _events_of(rank: int, trace: dict[str, Any], begin_ns: int) -> Iterator[Event]:
    own = trace[_KEY]
    to_rank_0_ns = _ns(own["offset_s"]) - begin_ns
    start_ns = _clock_ns(trace)
    label = f"rank {rank} on {own['host']}"
    error = own["error_s"]
    clock = "clock not aligned" if error is None else f"clock +- {1e6 * error:.0f} us"
    pids: dict[object, int] = {}
    if start_ns is not None:
        shift_ns = _ns(own["clock_s"]) - start_ns + to_rank_0_ns
        for event in trace["traceEvents"]:
            yield _moved(event, rank, label, shift_ns, pids)
    pid = (rank + 1) * _MAX_PROCESSES - 1
    yield _named("process_name", pid, 0, name=f"{label}: torchmn")
    yield _named("process_labels", pid, 0, labels=clock)
    yield _named("process_sort_index", pid, 0, sort_index=rank * _MAX_PROCESSES - 1)
    for index, track in enumerate(_TRACKS):
        lanes = _in_lanes([event for event in own["events"] if event["track"] == track])
        for lane, events in enumerate(lanes or [[]]):
            tid = index * _MAX_LANES + lane
            yield _named("thread_name", pid, tid, name=f"{track} {lane + 1}" if lane else track)
            yield _named("thread_sort_index", pid, tid, sort_index=tid)
            for begin, end, event in events:
                yield {
                    "ph": "X",
                    "cat": "torchmn",
                    "name": event["name"],
                    "pid": pid,
                    "tid": tid,
                    "ts": _us(begin + to_rank_0_ns),
                    "dur": _us(end - begin),
                    "args": event["args"],
                }


def _in_lanes(events: list[Event]) -> list[list[tuple[int, int, Event]]]:
    """Put events, with begin and end in nanoseconds, into as few lists without overlaps."""
    lanes: list[list[tuple[int, int, Event]]] = []
    for event in sorted(events, key=lambda each: each["at_s"]):
        begin, end = _ns(event["at_s"]), _ns(event["at_s"] + event["seconds"])
        free = next((lane for lane in lanes if lane[-1][1] <= begin), None)
        if free is None:
            lanes.append([(begin, end, event)])
        else:
            free.append((begin, end, event))
    return lanes


def _moved(event: Event, rank: int, label: str, shift_ns: int, pids: dict[object, int]) -> Event:
    """Convert an event of torch's trace to the common clock and to numbers unique to its rank."""
    pid = event.get("pid")
    number = pids.setdefault(pid, rank * _MAX_PROCESSES + len(pids) % (_MAX_PROCESSES - 1))
    moved = {**event, "pid": number}
    if "ts" in event and event.get("ph") != "M":
        moved["ts"] = _us(round(1000 * event["ts"]) + shift_ns)
    if "dur" in event:
        moved["dur"] = _us(round(1000 * event["dur"]))
    if "id" in event:
        moved["id"] = f"{rank}/{event['id']}"
    arguments = event.get("args")
    if event.get("ph") == "M" and isinstance(arguments, dict):
        if event.get("name") == "process_name":
            moved["args"] = {"name": f"{label}: {arguments.get('name', '')}"}
        elif event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": number}
    return moved


def _named(kind: str, pid: int, tid: int, **arguments: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def finish_profile(run: Path) -> list[str]:
    """Merge the profiles of all ranks in a run's folder, and in the folders of its rounds.

    Returns a sentence about each file that was written. Raises DataError: no trace can be read.
    """
    made = []
    for folder in (run / FOLDER, *sorted(run.glob(f"*/{FOLDER}"))):
        if folder.is_dir():
            trace, table = merge_traces(folder), merge_profiles(folder)
            if trace is not None:
                made.append(f"profile of all ranks, for ui.perfetto.dev: {trace}")
            if table is not None:
                made.append(f"times of functions on all ranks: {table}")
    return made


TABLE = "cprofile.txt"
_NUM_SHOWN = 60


def merge_profiles(folder: Path) -> Path | None:
    """Write the functions of all ``.prof`` files in a folder to its `TABLE`; None if it has none.

    The format is that of ``python -m pstats``, sorted by the time spent in the function itself.
    """
    found, skipped = [], []
    for path in sorted(folder.glob("*.prof")):
        try:
            found.append((path.stem, pstats.Stats(str(path))))
        except (OSError, ValueError, EOFError, TypeError) as error:
            skipped.append(f"{path.name} cannot be read: {error}")
    if not found:
        return None
    names = ", ".join(name for name, _ in found)
    head = [f"Seconds in functions on {counted(len(found), 'rank')}: {names}", *skipped, ""]
    table, output = folder / TABLE, StringIO()
    output.write("\n".join(head))
    merged = pstats.Stats(stream=output)
    merged.add(*(stats for _, stats in found))
    merged.sort_stats("tottime").print_stats(_NUM_SHOWN)
    write_whole(table, output.getvalue().encode(errors="replace"))
    return table
