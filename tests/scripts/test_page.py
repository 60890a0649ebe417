"""docs/reference/works-with.md holds what the tests of the scripts show."""

from .page import PAGE, text
from .suite import all_scripts


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == text(), "write it again: python -m tests.scripts.page"


def test_names_are_distinct() -> None:
    names = [script.name for script in all_scripts()]
    assert len(set(names)) == len(names)
