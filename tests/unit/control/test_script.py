"""How an uncaught exception is printed: the user's code and the message."""

import builtins
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType

import pytest
import torch

from tests.unit.comm.ranks import one_stays_away
from torchmn.comm import Communicator
from torchmn.control.script import frames_of_script, show_exception, traceback_text, whole_text
from torchmn.errors import PeerLostError, TimeLimitError, UsageError
from torchmn.exchange.schedules import ParameterServer


def error_of(max_staleness: int) -> UsageError:
    with pytest.raises(UsageError) as caught:
        ParameterServer(max_staleness=max_staleness)
    return caught.value


def test_the_users_code_alone_is_shown() -> None:
    text = traceback_text(error_of(-1))
    first, *frames, note, message = text.splitlines()
    assert first == "Traceback (most recent call last):"
    assert f'File "{__file__}"' in frames[0]
    assert "ParameterServer(max_staleness=max_staleness)" in frames[1]
    assert note == "  (frames of torchmn and torch: 1; TORCHMN_TRACEBACK=1 shows them)"
    assert message.startswith("torchmn.errors.UsageError: max_staleness=-1 must not be")
    assert "parameter_server" not in text


def test_a_variable_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHMN_TRACEBACK", "1")
    assert "parameter_server" in traceback_text(error_of(-1))


def test_nothing_is_folded_without_frames_of_torchmn_and_torch() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - which one is Python's
        int("x")
    assert traceback_text(caught.value) == whole_text(caught.value)
    assert "ValueError: invalid literal" in traceback_text(caught.value)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in backward")


NOTE = re.compile(r"[ |]*\(frames of torchmn and torch: \d+; TORCHMN_TRACEBACK=1 shows them\)")


def test_frames_are_folded_where_they_are() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        Broken.apply(torch.ones(1, requires_grad=True)).backward()
    lines = traceback_text(caught.value).splitlines()
    frames = [bool(NOTE.fullmatch(line)) for line in lines if "File" in line or "frames" in line]
    assert frames == [False, True, False]
    assert lines[-1] == "ZeroDivisionError: in backward"
    assert "torch/_tensor.py" in whole_text(caught.value)


def test_an_error_within_torch_ends_with_its_message() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(4, 4)(torch.ones(2, 5))
    *_, note, message = traceback_text(caught.value).splitlines()
    assert NOTE.fullmatch(note)
    assert message.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_frames_in_chains_and_groups_are_folded() -> None:
    def fails() -> None:
        torch.nn.Linear(4, 4)(torch.ones(2, 5))

    errors: list[Exception] = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            fails()
        errors.append(caught.value)
    with pytest.raises(ValueError, match="chained") as chained:
        raise ValueError("chained") from errors[0]
    found: list[BaseException] = [chained.value]
    if sys.version_info >= (3, 11):
        with pytest.raises(builtins.ExceptionGroup) as group:
            raise builtins.ExceptionGroup("two", errors)
        found.append(group.value)
    for error, num in zip(found, (1, 2), strict=False):
        text = traceback_text(error)
        assert text.count("mat1 and mat2 shapes cannot be multiplied") == num
        assert len(NOTE.findall(text)) == num
        assert text.count("in fails") == num
        assert "torch/nn" not in text
        assert "torch/nn" in whole_text(error)


def test_the_traceback_of_a_worker_in_a_message_is_folded() -> None:
    folder = Path(torch.__file__).parent
    original = (
        f'Traceback:\n  File "{folder}/worker.py", line 9, in loop\n    data = fetch()\n'
        f'           ^^^^^^^\n  File "{folder}/fetch.py", line 4, in fetch\n    return data\n'
        '  File "train.py", line 2, in get\n    {}[i]\nKeyError: 0'
    )
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError(f"Caught KeyError in worker.\n{original}")
    *_, title, note, frame, source, error = traceback_text(caught.value).splitlines()
    assert (title, error) == ("Traceback:", "KeyError: 0")
    assert "torch: 2;" in note
    assert (frame, source) == ('  File "train.py", line 2, in get', "    {}[i]")


def test_a_stack_that_ends_in_torch() -> None:
    stack = [
        traceback.FrameSummary("train.py", 1, "main", line="wait()"),
        traceback.FrameSummary(str(Path(torch.__file__).parent / "x.py"), 2, "wait", line="pass"),
    ]
    assert [line.strip() for line in frames_of_script(stack)] == [
        'File "train.py", line 1, in main',
        "wait()",
        "(frames of torchmn and torch: 1; TORCHMN_TRACEBACK=1 shows them)",
    ]
    assert frames_of_script(stack[1:]) == []


def test_causes_within_torchmn_are_in_the_message_alone() -> None:
    error = PeerLostError("a peer closed its connection")
    error.__cause__ = RuntimeError("pair.cc")
    with pytest.raises(PeerLostError) as caught:
        raise error
    assert "pair.cc" not in traceback_text(caught.value)


def test_a_cause_that_leaves_a_block_of_torchmn_is_in_the_message_alone() -> None:
    def call(comm: Communicator) -> str:
        with pytest.raises(TimeLimitError) as caught:
            comm.barrier()
        return traceback_text(caught.value)

    text = one_stays_away(call)
    assert "comm.barrier()" in text
    assert "contextlib" not in text
    assert "direct cause" not in text


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

    error = error_of(-1)
    show_exception(error, hook)
    assert seen == [(UsageError, error, error.__traceback__)]
