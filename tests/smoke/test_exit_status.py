"""A job that ends, raises or gets SIGTERM under every launcher; the table of all that happens."""

import pytest

from tests.all.processes.exit_status import PAGE, Row, Site, cases, check, site, table
from tests.all.processes.runner import Runner

__all__ = ["site"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.mark.parametrize(("site", "row"), cases(in_smoke=True), indirect=["site"])
def test_row(site: Site, row: Row, runner: Runner) -> None:
    check(row, site, runner)


def test_the_page_has_this_table() -> None:
    assert table() in PAGE.read_text()
