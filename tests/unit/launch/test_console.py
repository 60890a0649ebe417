"""What is shown of several ranks on files and terminals."""

from __future__ import annotations

import io

from torchmn.launch.console import RankOutput


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_streams_stay_apart() -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = RankOutput(out, err)
    screen.lines(0, "out", ["a", ""])
    screen.lines(11, "err", ["b"])
    screen.say("a sentence.")
    screen.quote("as it is")
    assert out.getvalue() == "[0] a\n[0] \n"
    assert err.getvalue() == "[11] b\ntorchmn: a sentence.\nas it is\n"


def test_bars_are_for_terminals() -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = RankOutput(out, err)
    assert not screen.shows_bars
    screen.refresh(0, "10 %")
    assert err.getvalue() == ""


def test_bar_makes_room_for_lines() -> None:
    terminal = Terminal()
    screen = RankOutput(terminal, terminal)
    screen.refresh(0, "10 %")
    screen.refresh(1, "20 %")
    screen.lines(0, "out", ["line"])
    screen.lines(0, "out", ["next"])
    erase = "\r\x1b[K"
    assert terminal.getvalue() == f"[0] 10 %{erase}[1] 20 %{erase}[0] line\n[0] next\n"


def test_letters_that_the_terminal_lacks() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    RankOutput(out, io.StringIO()).lines(0, "out", ["grün"])
    assert raw.getvalue() == b"[0] gr?n\n"
