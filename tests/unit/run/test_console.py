"""What is shown of several ranks on files and terminals."""

import io

from torchmn.run.console import RankOutput


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_streams_are_separate() -> None:
    out, err = io.StringIO(), io.StringIO()
    output = RankOutput(out, err)
    output.lines(0, "out", ["a", ""])
    output.lines(11, "err", ["b"])
    output.say("a text.")
    output.quote("as it is")
    assert out.getvalue() == "[0] a\n[0] \n"
    assert err.getvalue() == "[11] b\ntorchmn: a text.\nas it is\n"


def test_progress_bars_only_on_terminals() -> None:
    out, err = io.StringIO(), io.StringIO()
    output = RankOutput(out, err)
    assert not output.shows_bars
    output.refresh(0, "10 %")
    assert err.getvalue() == ""


def test_progress_bar_is_erased_before_lines() -> None:
    terminal = Terminal()
    output = RankOutput(terminal, terminal)
    output.refresh(0, "10 %")
    output.refresh(1, "20 %")
    output.lines(0, "out", ["line"])
    output.lines(0, "out", ["next"])
    erase = "\r\x1b[K"
    assert terminal.getvalue() == f"[0] 10 %{erase}[1] 20 %{erase}[0] line\n[0] next\n"


def test_characters_outside_the_encoding() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    RankOutput(out, io.StringIO()).lines(0, "out", ["grün"])
    assert raw.getvalue() == b"[0] gr?n\n"
