"""The sources of torchmn, parsed once for all tests that look into them."""

import ast
import functools
from pathlib import Path

import torchmn

SOURCE = Path(torchmn.__file__).parent


@functools.cache
def parsed() -> dict[str, ast.Module]:
    """The files by their names in ``src/torchmn``, in order."""
    return {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text())
        for path in sorted(SOURCE.rglob("*.py"))
    }


def root(node: ast.AST) -> str:
    """The name with which an expression begins."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
