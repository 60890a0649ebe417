"""What `make lint` cannot ask for: no output is committed, and skipped tests say why."""

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from .source import parsed

ROOT = Path(__file__).parents[2]


def test_nothing_that_git_ignores_is_tracked() -> None:
    """Logs of a run, which name folders and programs of the machine, among it."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip(reason="no git, or no checkout")
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


SKIPS = {"skip", "skipif", "xfail"}


def _skips_without_reason(source: str) -> list[int]:
    """Lines of a call of pytest's skip, skipif or xfail that has no ``reason=``."""
    if not any(name in source for name in SKIPS):  # most files, which need not be parsed
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in SKIPS
        and ast.unparse(node.func.value) in ("pytest", "pytest.mark")
        and not any(keyword.arg == "reason" for keyword in node.keywords)
    ]


def test_every_skipped_test_says_why() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert _skips_without_reason(path.read_text()) == [], path


@pytest.mark.parametrize(
    ("function", "arguments"),
    [("skip", "'no GPU'"), ("mark.skipif", "True"), ("mark.xfail", "strict=True")],
)
def test_a_skip_without_a_reason_is_found(function: str, arguments: str) -> None:
    assert _skips_without_reason(f"x = 1\npytest.{function}({arguments})") == [2]
    assert _skips_without_reason(f"pytest.{function}({arguments}, reason='no GPU')") == []


def test_what_runs_a_module_as_a_program_stands_at_its_end() -> None:
    """What is defined below it does not exist yet when the program runs."""
    for name, tree in parsed().items():
        guards = [n for n in tree.body if isinstance(n, ast.If) and "__main__" in ast.dump(n.test)]
        assert all(guard is tree.body[-1] for guard in guards), name
