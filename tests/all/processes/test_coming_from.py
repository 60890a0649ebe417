"""The pages for users of DDP and Horovod: each row is true, on two ranks of `mp.spawn`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.all.processes.coming_from import ROWS
from tests.all.processes.runner import free_port
from tests.limits import limit

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
CELLS = [(page, cell) for page, rows in ROWS.items() for cell in rows]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    file = tmp_path_factory.mktemp("rows") / "outcomes.json"
    command = [sys.executable, "-m", "tests.all.processes.coming_from", str(free_port()), str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(120))
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("page", "cell"), CELLS, ids=[f"{page}: {cell}" for page, cell in CELLS])
def test_row(outcomes: dict[str, dict[str, str]], page: str, cell: str) -> None:
    assert outcomes[page][cell] == "ok"


@pytest.mark.parametrize("page", ROWS)
def test_each_row_of_the_page_is_run_and_no_other(page: str) -> None:
    lines = (ROOT / "docs" / f"coming-from-{page}.md").read_text().splitlines()
    rows = [line.removeprefix("| ") for line in lines if line.startswith("| ")]
    first = [row.split(" | ")[0].replace("`", "") for row in rows]
    cells = [cell for cell in first if cell.lower() != page]
    assert cells
    for cell in cells:
        assert len([known for known in ROWS[page] if cell.startswith(known)]) == 1, cell
    for known in ROWS[page]:
        assert [cell for cell in cells if cell.startswith(known)], known
