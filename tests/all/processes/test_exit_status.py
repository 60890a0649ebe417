"""The rows of docs/reference/exit-status.md that `tests/smoke` does not test."""

import os
from collections.abc import Iterator

import pytest

from tests.all.processes.exit_status import Row, Site, cases, check, site_of
from tests.all.processes.runner import Runner

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Of the whole module, so that test hosts are there before a test that leaves nothing."""
    is_elsewhere = request.param == "srun" or request.param.startswith("plain")
    if is_elsewhere and not os.environ.get("TORCHMN_TEST_LAUNCHERS"):
        pytest.skip(reason="'make test-launchers' runs these")  # mostly of other programs
    with site_of(request.param, tmp_path_factory.mktemp("site")) as found:
        yield found


@pytest.mark.parametrize(("site", "row"), cases(in_smoke=False), indirect=["site"])
def test_row(site: Site, row: Row, runner: Runner) -> None:
    check(row, site, runner)
