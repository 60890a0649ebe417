"""Warnings of torchmn have its categories, and name the line of the script."""

import warnings
from pathlib import Path

import pytest

from torchmn.base import script_line
from torchmn.base.warn import warn
from torchmn.errors import PerformanceWarning, ResultWarning, TorchmnWarning


@pytest.fixture
def _of_torchmn(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nested` is called by this file, and stands for the code of torchmn."""
    folders = script_line._libraries()
    monkeypatch.setattr(script_line, "_libraries", lambda: (*folders, "<of torchmn>"))


NESTED = """
import contextlib
def inner():
    warn("slow", PerformanceWarning)
def nested():
    inner()
@contextlib.contextmanager
def block():
    yield
    inner()
"""


def compiled() -> dict[str, object]:
    names: dict[str, object] = {"warn": warn, "PerformanceWarning": PerformanceWarning}
    exec(compile(NESTED, "<of torchmn>", "exec"), names)
    return names


@pytest.mark.usefixtures("_of_torchmn")
def test_the_line_is_that_of_the_script_however_deep() -> None:
    names = compiled()
    for function in ("inner", "nested"):
        with pytest.warns(PerformanceWarning) as caught:
            names[function]()  # type: ignore[operator]
        (found,) = caught
        assert found.filename == __file__
        assert "names[function]()" in Path(__file__).read_text().splitlines()[found.lineno - 1]


@pytest.mark.usefixtures("_of_torchmn")
def test_at_the_end_of_a_block_the_line_is_that_of_its_begin() -> None:
    names = compiled()
    with pytest.warns(PerformanceWarning) as caught, names["block"]():  # type: ignore[operator]
        pass
    (found,) = caught
    assert found.filename == __file__
    assert "caught, names[" in Path(__file__).read_text().splitlines()[found.lineno - 1]


def test_the_default_filter_shows_each_line_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        for _ in range(3):
            warn("one")
        warn("one")
    assert len(caught) == 2


def test_users_filter_by_category() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResultWarning)
        warnings.simplefilter("ignore", PerformanceWarning)
        warn("slow", PerformanceWarning)
        with pytest.raises(ResultWarning, match="another model"):
            warn("another model", ResultWarning)
    assert issubclass(TorchmnWarning, UserWarning)


def test_a_thread_without_a_line_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchmn.base.warn.script_frame", lambda: None)
    with pytest.warns(TorchmnWarning, match="late"):
        warn("late")
