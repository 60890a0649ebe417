"""Requests of `torchmn run --profile`, and what is made of the ranks' files."""

from __future__ import annotations

import cProfile
import gzip
import json
import os
import random
import socket
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from torchmn.errors import DataError, UsageError
from torchmn.record.merged_trace import merge_profiles, merge_traces
from torchmn.record.profile_request import ProfileRequest


def test_requests() -> None:
    assert ProfileRequest.parse("100:110") == ProfileRequest("steps", 100, 110, "%h-%r")
    assert ProfileRequest.parse("cprofile,run_%h").name == "run_%h-%r"
    request = ProfileRequest.parse("0:1,profile_%h-%p")
    assert request.file_name(3) == f"profile_{socket.gethostname()}-{os.getpid()}"


@pytest.mark.parametrize("text", ["", "5", "5:5", "9:3", "a:b", "0:1,../x-%r", "0:1,%h %r", "-1:3"])
def test_what_cannot_be_profiled(text: str) -> None:
    with pytest.raises(UsageError, match="profile"):
        ProfileRequest.parse(text)


def trace(rank: int, *, clock_s: float, offset_s: float, clock_us: float) -> dict[str, Any]:
    """Of a rank whose profiler shows ``clock_us`` at ``clock_s``; 1 s later it has one event."""
    at_s = clock_s + 1
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "torchmn clock", "pid": 77, "tid": 1, "ts": clock_us, "dur": 1},
            {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 1, "ts": clock_us + 1e6, "dur": 5},
            {"ph": "s", "name": "ac2g", "id": 4, "pid": 77, "tid": 1, "ts": clock_us},
        ],
        "torchmn": {
            "rank": rank,
            "host": "ab"[rank],
            "pid": 77,
            "clock_s": clock_s,
            "offset_s": offset_s,
            "error_s": 1e-5 if rank else None,
            "events": [
                {"track": "exchanges", "name": "bucket 0", "at_s": at_s, "seconds": 0.5, "args": {}}
            ],
        },
    }


def merged(folder: Path) -> list[dict[str, Any]]:
    path = merge_traces(folder)
    assert path is not None
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_traces_are_put_on_one_clock(tmp_path: Path) -> None:
    """At the same moment rank 0's clock shows 100 s and rank 1's 7 s."""
    first = trace(0, clock_s=100, offset_s=0, clock_us=5e9)
    second = trace(1, clock_s=7, offset_s=93, clock_us=8e3)
    (tmp_path / "a-0.json").write_text(json.dumps(first))
    (tmp_path / "b-1.json").write_text(json.dumps(second))
    events = merged(tmp_path)
    for name in ("aten::mm", "bucket 0"):
        at = [event["ts"] for event in events if event["name"] == name]
        assert at == pytest.approx([1e6, 1e6], abs=1), name
    processes = {
        event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"
    }
    assert len(set(processes.values())) == len(processes) == 4
    assert {"rank 0 on a: python", "rank 1 on b: torchmn"} <= processes.keys()
    assert len({event["id"] for event in events if event["name"] == "ac2g"}) == 2


def slices_of(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Begin and end of the slices of each track, in nanoseconds, as Perfetto reads them.

    It multiplies by 1000 and cuts off what is less than a nanosecond.
    """
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            begin, seconds = int(event["ts"] * 1000.0), int(event["dur"] * 1000.0)
            found.setdefault((event["pid"], event["tid"]), []).append((begin, begin + seconds))
    return {
        track: sorted(each, key=lambda pair: (pair[0], -pair[1])) for track, each in found.items()
    }


def overlapping(slices: list[tuple[int, int]]) -> int:
    """How many slices end after the one in which they begin: Perfetto cuts or drops them."""
    count = 0
    stack: list[tuple[int, int]] = []
    for begin, end in slices:
        while stack and stack[-1][1] <= begin:
            stack.pop()
        count += bool(stack) and end > stack[-1][1]
        stack.append((begin, end))
    return count


def test_slices_do_not_overlap(tmp_path: Path) -> None:
    """Phases follow each other without a gap, and operators end with those that call them."""
    clock_s, offset_s = 123_456.789012345, -93_123.123456789
    rng = random.Random(0)
    own = trace(0, clock_s=clock_s, offset_s=0.0, clock_us=5_528_370.123)
    other = trace(1, clock_s=clock_s, offset_s=offset_s, clock_us=5_528_370.123)
    for each in (own, other):
        at_ns, phases = round(clock_s * 1e9), []
        for number in range(500):
            seconds_ns = rng.randrange(1, 5_000_000)
            begin_s, end_s = at_ns / 1e9, (at_ns + seconds_ns) / 1e9
            phases.append(("phases", f"p{number}", begin_s, end_s - begin_s))
            at_ns += seconds_ns
        ts_ns = 5_528_370_123
        for _ in range(500):
            outer = rng.randrange(1_000, 900_000)
            inner = rng.randrange(1, outer)
            spans = [(ts_ns, outer), (ts_ns, inner), (ts_ns + inner, outer - inner)]
            each["traceEvents"] += [
                {"ph": "X", "name": "op", "pid": 77, "tid": 1, "ts": b / 1000, "dur": n / 1000}
                for b, n in spans
            ]
            ts_ns += outer
        each["traceEvents"] = [e for e in each["traceEvents"] if e["name"] != "aten::mm"]
        each["torchmn"]["events"] = [
            {"track": track, "name": name, "at_s": at_s, "seconds": seconds, "args": {}}
            for track, name, at_s, seconds in phases
        ]
    (tmp_path / "a-0.json").write_text(json.dumps(own))
    (tmp_path / "b-1.json").write_text(json.dumps(other))
    tracks = slices_of(merged(tmp_path))
    assert sorted(map(len, tracks.values())) == [500, 500, 1501, 1501]
    assert {track: overlapping(each) for track, each in tracks.items()} == dict.fromkeys(tracks, 0)


def test_exchanges_that_overlap_have_tracks_of_their_own(tmp_path: Path) -> None:
    """Those of two communicators run at the same time."""
    own = trace(0, clock_s=1, offset_s=0, clock_us=0)
    own["torchmn"]["events"] = [
        {"track": "exchanges", "name": name, "at_s": at_s, "seconds": 2.0, "args": {}}
        for name, at_s in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0))
    ]
    (tmp_path / "a-0.json").write_text(json.dumps(own))
    events = merged(tmp_path)
    assert all(overlapping(each) == 0 for each in slices_of(events).values())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    of = {e["name"]: names[e["tid"]] for e in events if e["name"] in "abcd"}
    assert of == {"a": "exchanges", "b": "exchanges 2", "c": "exchanges", "d": "exchanges 2"}


def test_the_check_sees_slices_that_overlap() -> None:
    """As those of this trace did, by a nanosecond."""
    assert overlapping([(0, 10), (0, 4), (4, 10), (10, 12)]) == 0
    assert overlapping([(0, 11), (10, 20)]) == 1


def test_a_trace_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    good = trace(0, clock_s=1, offset_s=0, clock_us=0)
    (tmp_path / "a-0.json").write_text(json.dumps(good))
    (tmp_path / "b-1.json").write_text('{"traceEvents": [')
    assert any(event["name"] == "aten::mm" for event in merged(tmp_path))
    (tmp_path / "a-0.json").unlink()
    with pytest.raises(DataError, match=r"b-1\.json"):
        merge_traces(tmp_path)
    (tmp_path / "b-1.json").unlink()
    assert merge_traces(tmp_path) is None


def test_the_times_of_functions_on_all_ranks(tmp_path: Path) -> None:
    for rank, times in enumerate((2, 20)):
        profile = cProfile.Profile(count().__next__, 1e-3)  # every look at the clock is later
        profile.enable()
        for _ in range(times):
            sorted(range(20_000))
        profile.disable()
        profile.dump_stats(tmp_path / f"a-{rank}.prof")
    (tmp_path / "a-2.prof").write_bytes(b"half")
    path = merge_profiles(tmp_path)
    assert path is not None
    text = path.read_text()
    assert "on 2 ranks: a-0, a-1" in text
    assert "a-2.prof cannot be read" in text
    (line,) = (line for line in text.splitlines() if "built-in method builtins.sorted" in line)
    assert line.split()[0] == "22"
