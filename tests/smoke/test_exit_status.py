"""A job that ends, raises or gets SIGTERM under every launcher; the table of all that happens."""

from collections.abc import Iterator

import pytest

from tests.all.processes.exit_status import PAGE, Row, Site, cases, check, site_of, table
from tests.all.processes.runner import Runner

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with site_of(request.param, tmp_path_factory.mktemp("site")) as found:
        yield found


@pytest.mark.parametrize(("site", "row"), cases(in_smoke=True), indirect=["site"])
def test_row(site: Site, row: Row, runner: Runner) -> None:
    check(row, site, runner)


def test_the_page_has_this_table() -> None:
    assert table() in PAGE.read_text()
