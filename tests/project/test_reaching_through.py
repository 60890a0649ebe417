"""No module of `exchange` reaches through an object into what that one has: ``a.b.c.d()``.

A chain of three attributes or more is one, unless it begins with the name of something imported, or
ends with a fact of a tensor such as ``device.type``. The files that still have some may not get
more, and this list must shrink with them.
"""

from __future__ import annotations

import ast
from pathlib import Path

EXCHANGE = Path(__file__).parents[2] / "src/torchmn/exchange"
MAX_ATTRIBUTES = 2
OF_TENSORS = {"data", "device", "dtype", "grad", "is_complex", "itemsize", "shape", "type"}
LEFT = {
    "agreements/weights.py": 1,
    "optimizer/ddp_hook.py": 2,
    "optimizer/multi_node_optimizer.py": 2,
}
"""Chains that are there today."""


def reaches(source: str) -> list[str]:
    """The chains of attributes that reach through objects."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    found: list[str] = []
    inner: set[ast.AST] = set()  # parts of a longer chain, which comes before them
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node in inner:
            continue
        names: list[str] = []
        each: ast.AST = node
        while isinstance(each, ast.Attribute):
            inner.add(each)
            names.insert(0, each.attr)
            each = each.value
        while names and names[-1] in OF_TENSORS:
            names.pop()
        is_object = isinstance(each, ast.Name) and each.id not in imported
        if is_object and len(names) > MAX_ATTRIBUTES:
            found.append(".".join([each.id, *names]))
    return found


def test_chains_of_attributes() -> None:
    found = {
        str(path.relative_to(EXCHANGE)): reaches(path.read_text())
        for path in sorted(EXCHANGE.rglob("*.py"))
    }
    more = {path: chains for path, chains in found.items() if len(chains) > LEFT.get(path, 0)}
    assert not more


def test_what_is_a_chain() -> None:
    source = "\n".join(
        [
            "import torch",
            "torch.autograd.graph.increment_version(x)",
            "self.buckets.footer.check()",
            "slot.tensor.device.type",
            "self.buckets.clear()",
            "a.b(c).d.e.f",
        ]
    )
    assert reaches(source) == ["self.buckets.footer.check"]
