"""Streams become lines, whatever the chunks; progress bars become their last state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmn.run.script_output import LineSplitter


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
    assert splitter.unfinished == ""
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
