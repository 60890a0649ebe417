"""Transformers, the real one: the numbers of one process and the bits of plain torchmn."""

from __future__ import annotations

import ast

import pytest

from tests.frameworks.running import FOLDER, need, outcomes_of, require_ok

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
SCRIPT = "transformers_script.py"


def checks() -> list[str]:
    """Without importing the script, which needs the framework."""
    for node in ast.parse((FOLDER / SCRIPT).read_text()).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "CHECKS":
            assert isinstance(node.value, ast.List)
            return [name.id for name in node.value.elts if isinstance(name, ast.Name)]
    raise AssertionError("no CHECKS")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Both ranks run once for all tests."""
    need("transformers")
    return outcomes_of(SCRIPT, tmp_path_factory.mktemp("transformers"))


@pytest.mark.parametrize("name", checks())
def test_transformers(name: str, outcomes: list[dict[str, str]]) -> None:
    require_ok(name, outcomes)
