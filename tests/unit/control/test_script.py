"""How an uncaught exception is printed: the user's code and the message."""

import sys
from types import TracebackType

import pytest

from torchmn.control.script import show_exception, traceback_text
from torchmn.errors import PeerLostError, UsageError
from torchmn.exchange.schedules import DoubleBuffering


def error_of(delay_compensation: float) -> UsageError:
    with pytest.raises(UsageError) as caught:
        DoubleBuffering(delay_compensation=delay_compensation)
    return caught.value


def test_the_users_code_alone_is_shown() -> None:
    text = traceback_text(error_of(-1.0))
    first, *frames, note, message = text.splitlines()
    assert first == "Traceback (most recent call last):"
    assert f'File "{__file__}"' in frames[0]
    assert "DoubleBuffering(delay_compensation=delay_compensation)" in frames[1]
    assert note == "  (frames of torchmn and torch: 1; TORCHMN_TRACEBACK=1 shows them)"
    assert message.startswith("torchmn.errors.UsageError: delay_compensation=-1.0 must be")
    assert "double_buffering.py" not in text


def test_a_variable_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHMN_TRACEBACK", "1")
    assert "double_buffering.py" in traceback_text(error_of(-1.0))


def test_another_exception_keeps_all_frames() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - which one is Python's
        int("x")
    assert "TORCHMN_TRACEBACK" not in traceback_text(caught.value)
    assert "ValueError: invalid literal" in traceback_text(caught.value)


def test_causes_within_torchmn_are_in_the_message_alone() -> None:
    error = PeerLostError("a peer closed its connection")
    error.__cause__ = RuntimeError("pair.cc")
    with pytest.raises(PeerLostError) as caught:
        raise error
    assert "pair.cc" not in traceback_text(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("cause", "direct cause of the following"),
        ("context", "another exception occurred"),
        ("neither", ""),
    ],
)
def test_what_was_raised_in_user_code_before_is_shown(kind: str, words: str) -> None:
    """As by a data set that a loader of torchmn reads: the error is the consequence."""

    def reads() -> None:
        raise ValueError("sample 7 is broken")

    def loads() -> None:
        try:
            reads()
        except ValueError as error:
            if kind == "context":
                raise UsageError("rank 0 cannot read")  # noqa: B904 - one of the cases
            raise UsageError("rank 0 cannot read") from (error if kind == "cause" else None)

    with pytest.raises(UsageError) as caught:
        loads()
    text = traceback_text(caught.value)
    assert text.count("Traceback (most recent call last)") == (2 if words else 1)
    assert ("ValueError: sample 7 is broken\n\n" in text) == bool(words)
    assert words in text
    assert text.endswith("torchmn.errors.UsageError: rank 0 cannot read")


def test_lines_after_the_loss_of_another_rank_are_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PeerLostError) as caught:
        raise PeerLostError("a peer closed its connection")
    show_exception(caught.value, sys.__excepthook__)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 2
    assert all(line.startswith("follow-up: ") for line in lines)


def test_a_hook_of_the_script_gets_the_whole_exception() -> None:
    seen = []

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        seen.append((kind, error, trace))

    error = error_of(-1.0)
    show_exception(error, hook)
    assert seen == [(UsageError, error, error.__traceback__)]
