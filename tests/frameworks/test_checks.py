"""The real frameworks on two ranks: the numbers of one process and the bits of plain torchmn."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.frameworks.running import FOLDER, need, outcomes_of, require_ok

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
FRAMEWORKS = ("lightning", "accelerate", "transformers")


def checks() -> Iterator[tuple[str, str]]:
    """The names in CHECKS of each script, which cannot be imported without its framework."""
    for framework in FRAMEWORKS:
        tree = ast.parse((FOLDER / f"{framework}_script.py").read_text())
        [names] = [
            node.value.elts
            for node in tree.body
            if isinstance(node, ast.AnnAssign)
            and getattr(node.target, "id", "") == "CHECKS"
            and isinstance(node.value, ast.List)
        ]
        yield from ((framework, name.id) for name in names if isinstance(name, ast.Name))


@pytest.fixture(scope="module", params=FRAMEWORKS)
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """Both ranks run a script once for all of its tests."""
    need(request.param)
    return outcomes_of(f"{request.param}_script.py", tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("outcomes", "name"), [*checks()], indirect=["outcomes"])
def test_check(name: str, outcomes: list[dict[str, str]]) -> None:
    require_ok(name, outcomes)
