"""What waits when the supervisor does not show it."""

import contextlib
import io
import itertools
import os
import re
import selectors
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress

from torchmn.control.connection import Channel
from torchmn.control.messages import Output
from torchmn.run import script_output
from torchmn.run.script_output import LineSplitter, ScriptOutput

NUM_LINES = 150_000
TEXT = "".join(f"line {i}\n" for i in range(NUM_LINES)).encode()


class Script:
    """A script that writes as much as is read, and the supervisor's end of the connection."""

    def __init__(self, path: Path) -> None:
        ours, theirs = socket.socketpair()
        self.supervisor = Channel(theirs)
        self.channel = Channel(ours)
        self.output = ScriptOutput(path, self.channel, wants_refreshes=False)
        self.output.open_log()
        reading, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        self.output.follow("out", os.fdopen(reading, "rb", buffering=0))
        self.num_written = 0
        self.shown: list[str] = []

    def write(self) -> bool:
        """Write and have it read once; whether anything could be written."""
        before = self.num_written
        with contextlib.suppress(BlockingIOError):
            self.num_written += os.write(self.pipe, TEXT[before : before + (1 << 15)])
        with selectors.DefaultSelector() as selector:
            self.output.register(selector)
            for key, _ in selector.select(0) if selector.get_map() else ():
                key.data()
        return self.num_written > before

    def show(self) -> int:
        """Read what has been sent; how much."""
        self.channel.flush()
        sent = [m for m in self.supervisor.collect() if isinstance(m, Output)]
        for message in sent:
            self.shown += message.lines
        return sum(message.num_bytes for message in sent)

    def acknowledge(self) -> None:
        self.output.on_shown(self.show())


@pytest.mark.parametrize("has_log", [True, False])
def test_a_script_waits_only_where_there_is_no_log(tmp_path: Path, has_log: bool) -> None:
    script = Script(tmp_path / "rank0.log" if has_log else Path("/dev/null/rank0.log"))
    while script.num_written < len(TEXT) and script.write():
        pass
    assert (script.num_written == len(TEXT)) is has_log
    assert script.show() < 2 * script_output._MAX_UNSHOWN_BYTES
    while script.num_written < len(TEXT):
        script.output.on_shown(1 << 20)
        script.acknowledge()
        script.write()
    os.close(script.pipe)
    script.output.on_shown(1 << 20)
    script.output.drain(script.acknowledge, is_urgent=False)
    script.acknowledge()
    assert script.shown == TEXT.decode().splitlines()
    script.supervisor.close()
    script.channel.close()


# ---- streams become lines, whatever the chunks; progress bars become their last state ----


def split(*chunks: bytes) -> list[str]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()


@given(st.lists(st.text(st.characters(exclude_characters="\n\r\x1b", codec="utf-8"))), st.data())
def test_chunks_do_not_matter(lines: list[str], draw: st.DataObject) -> None:
    stream = "".join(f"{line}\n" for line in lines).encode()
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    bounds = [0, *cuts, len(stream)]
    chunks = [stream[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert split(*chunks) == lines


@pytest.mark.parametrize(
    ("stream", "lines"),
    [
        (b"windows\r\nline\r\n", ["windows", "line"]),
        (b"\r 1 %\r 2 %\r 3 %\n", [" 3 %"]),
        (b" 1 %\r 2 %\r\n", [" 2 %"]),
        (b"no end", ["no end"]),
        (b"\n\n", ["", ""]),
        (b"\xff\xfe\n", ["\ufffd\ufffd"]),
        (b"\x1b[31mred\x1b[0m\n", ["\x1b[31mred\x1b[0m"]),
        (b"\x1b[2A\x1b[Jup\x1b[K\x1b[?25l\n", ["up"]),
    ],
)
def test_lines(stream: bytes, lines: list[str]) -> None:
    assert split(stream) == lines


def test_unfinished_bar() -> None:
    splitter = LineSplitter()
    splitter.feed(b"text\nhalf a line")
    assert splitter.unfinished == "half a line"
    splitter.feed(b"\n\r10 %\r20 %")
    assert splitter.unfinished == "20 %"
    assert splitter.feed(b"\n") == ["20 %"]
    assert splitter.unfinished == ""


def test_endless_line_does_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(100) for line in splitter.feed(b"x" * 10_000)]
    assert sum(map(len, lines)) > 900_000
    bar = LineSplitter()
    for i in range(100_000):
        assert bar.feed(f"\r{i}".encode()) == []
    assert bar.unfinished == "99999"
    assert len(bar._rest) < 10_000
    full = LineSplitter()
    full.feed(b"\r1" * 5000 + b"\r2\r")
    assert full.feed(b"\n") == ["2"]


@given(st.integers(1, 3), st.lists(st.integers(1, 400), min_size=1, max_size=5))
def test_live_displays_are_shown_as_lines_at_their_end(num_bars: int, sizes: list[int]) -> None:
    """Progress bars of rich are drawn again in place, together with lines above them."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=60, legacy_windows=False)
    console.print("first")
    with Progress("{task.description} {task.completed}", console=console, auto_refresh=False) as p:
        tasks = [p.add_task(f"bar{i}", total=9) for i in range(num_bars)]
        for step in range(3):
            for task in tasks:
                p.advance(task)
            p.refresh()
            console.print("line", step)
    console.print("last")
    data, splitter, lines, at = written.getvalue().encode(), LineSplitter(), list[str](), 0
    for size in itertools.cycle(sizes):
        lines += splitter.feed(data[at : at + size])
        at += size
        if at >= len(data):
            break
    assert splitter.finish() == []
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in lines]
    drawn_first = [line for line in plain if re.fullmatch("bar. 0", line)]
    assert len(drawn_first) <= num_bars
    bars = [f"bar{i} 3" for i in range(num_bars)]
    rest = [line for line in plain if line not in drawn_first]
    assert rest == ["first", "line 0", "line 1", "line 2", *bars, "last"]


def test_a_live_display_is_one_unfinished_line() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\x1b[?25lone\ntwo") == ["one"]  # it may be no display
    assert splitter.unfinished == "two"
    assert splitter.feed(b"\r\x1b[2K\x1b[1A\x1b[2Kone again, longer\ntwo again") == []
    assert splitter.unfinished == "two again"
    assert splitter.feed(b"\n\x1b[?25h") == ["one again, longer", "two again"]


@pytest.mark.parametrize("has_log", [True, False])
def test_what_the_launcher_prints_is_in_the_log_alone(tmp_path: Path, has_log: bool) -> None:
    """After all that the script has printed, and on lines of its own."""
    script = Script(tmp_path / "rank0.log" if has_log else Path("/proc/none/rank0.log"))
    reading, pipe = os.pipe()
    script.output.follow("err", os.fdopen(reading, "rb", buffering=0))
    os.write(pipe, b"one\nunfinished")
    script.output.write_to_log("Traceback\nValueError: \ud800")
    os.write(pipe, b" line\n")
    os.close(pipe)
    os.close(script.pipe)
    script.output.drain(script.acknowledge, is_urgent=False)
    script.show()
    if has_log:
        text = (tmp_path / "rank0.log").read_text()
        assert text == "one\nunfinished\nTraceback\nValueError: ?\n line\n"
        assert script.shown == ["one", "unfinished line"]
    else:
        assert [line for line in script.shown if "Error" in line] == ["ValueError: ?"]
    script.channel.close()
    script.supervisor.close()
