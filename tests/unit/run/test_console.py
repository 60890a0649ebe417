"""What is shown of several ranks on files and terminals."""

import io
import shutil

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


def test_a_prompt_stays_below_the_lines_of_others() -> None:
    terminal = Terminal()
    output = RankOutput(terminal, terminal)
    output.prompting = 0
    output.refresh(0, "(Pdb) ")
    output.refresh(1, "20 %")
    output.lines(1, "out", ["line"])
    output.prompting = None
    output.lines(0, "out", ["next"])
    erase = "\r\x1b[K"
    assert terminal.getvalue() == f"[0] (Pdb) {erase}[1] line\n[0] (Pdb) {erase}[0] next\n"


def test_variables_for_scripts_on_a_terminal() -> None:
    terminal = Terminal()
    found = RankOutput(terminal, terminal).variables(11, {})
    assert found["FORCE_COLOR"] == "1"
    assert int(found["COLUMNS"]) == max(1, shutil.get_terminal_size().columns - len("[10] "))
    for env in ({"NO_COLOR": ""}, {"TERM": "dumb"}):
        assert "FORCE_COLOR" not in RankOutput(terminal, terminal).variables(1, env)
    assert RankOutput(terminal, io.StringIO()).variables(1, {}) == {}
