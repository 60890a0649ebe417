"""The page has the table whose rows `test_schedulers.py` runs."""

from tests.all.schedulers.exit_status import PAGE, table


def test_the_page_has_this_table() -> None:
    assert table() in PAGE.read_text()
