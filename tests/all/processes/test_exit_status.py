"""The rows of docs/reference/exit-status.md that `tests/smoke` does not test."""

import pytest

from tests.all.processes.exit_status import Row, Site, cases, check, site
from tests.all.processes.runner import Runner

__all__ = ["site"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.mark.parametrize(("site", "row"), cases(in_smoke=False), indirect=["site"])
def test_row(site: Site, row: Row, runner: Runner) -> None:
    check(row, site, runner)
