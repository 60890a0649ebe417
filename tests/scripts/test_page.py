"""docs/reference/works-with.md holds what the tests of the scripts show."""

from __future__ import annotations

from .known_defects import KNOWN_DEFECTS
from .page import PAGE, text
from .registry import SCHEDULES, WORLD_SIZES
from .suite import all_scripts


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == text(), "write it again: python -m tests.scripts.page"


def test_names_are_distinct() -> None:
    names = [script.name for script in all_scripts()]
    assert len(set(names)) == len(names)


def test_known_defects_name_scripts() -> None:
    names = {script.name for script in all_scripts()}
    for name, schedule, world_size in KNOWN_DEFECTS:
        assert name in names
        assert schedule in SCHEDULES
        assert world_size in WORLD_SIZES
