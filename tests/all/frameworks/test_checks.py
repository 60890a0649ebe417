"""The real frameworks on two ranks: the numbers of one process and the bits of plain torchmn."""

import ast
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.all.frameworks.running import FOLDER, need, outcomes_of, require_ok

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
FRAMEWORKS = ("lightning", "accelerate", "transformers", "peft")


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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, str]]]:
    """Of a framework's script, which both ranks run once for all of its tests."""

    @cache
    def of(framework: str) -> list[dict[str, str]]:
        return outcomes_of(f"{framework}_script.py", tmp_path_factory.mktemp(framework))

    return of


@pytest.mark.parametrize(("framework", "name"), [*checks()])
def test_check(framework: str, name: str, outcomes: Callable[[str], list[dict[str, str]]]) -> None:
    need(framework)
    require_ok(name, outcomes(framework))
