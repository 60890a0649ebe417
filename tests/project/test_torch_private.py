"""torch's private names are in one file, each with the versions in which it was tried."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch

from torchmn.base import torch_private

from .source import parsed

FILE = "base/torch_private.py"

NOT_OF_TORCH = {
    # Python's
    *("_asdict", "_current_frames", "_exit", "_getframe", "_inheriting", "_replace"),
    "_run_module_as_main",
    # pytorch-pfn-extras'
    *("_extensions", "_iterators", "_optimizers", "_progress_bar", "_start_extensions_called"),
    *("_start_time", "_state_objects"),
    # Lightning's and Accelerate's
    *("_backward_sync_control", "_current_fx_name", "_dataloaders"),
    # Of a class of torch that the class in the file extends, as that is meant
    *("_check_input_dim", "_conv_forward", "_shutdown", "_shutdown_timeout", "_step_count"),
    # Attributes that torchmn sets on another object
    *("_batch_schedule", "_torchmn_results"),
}
OF_MODULES = {"_buffers", "_post_accumulate_grad_hooks", "_version"}
"""Of modules and tensors, and names that classes of torchmn have too."""


def defined(trees: list[ast.AST]) -> set[str]:
    """The names that torchmn itself defines."""
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif is_set_on(node, "self", "part"):
                found.add(node.attr)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(tree: ast.AST, own: set[str], vocabulary: set[str] = frozenset()) -> set[str]:
    """The private names of torch in a file. ``vocabulary``: known ones, also as texts."""
    of_torch = set(imported_from_torch(tree))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_torch(node.module):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            found |= {name for name in names if is_private(name)}
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = node.attr in own or node.attr in NOT_OF_TORCH
            is_of_self = root(node) in ("self", "cls")
            is_others = not is_own or (node.attr in OF_MODULES and not is_of_self)
            is_others = root(node) in of_torch or (is_others and not is_of_self)
            if is_others and not node.attr.startswith("_foreach_"):
                found.add(node.attr)  # torch documents the functions for lists of tensors
        elif isinstance(node, ast.Constant) and node.value in vocabulary:
            found.add(str(node.value))
    return found


def private_texts(tree: ast.AST) -> set[str]:
    texts = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {text for text in texts if is_private(text)}


def root(node: ast.AST) -> str:
    """The name with which an expression begins."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_set_on(node: ast.AST, *names: str) -> bool:
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and root(node) in names


def imported_from_torch(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.asname or a.name.split(".")[0] for a in node.names if is_torch(a.name))
        elif isinstance(node, ast.ImportFrom) and is_torch(node.module):
            yield from (alias.asname or alias.name for alias in node.names)


def is_torch(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "torch"


def test_no_other_file_names_them() -> None:
    trees = dict(parsed())
    own = defined(list(trees.values()))
    vocabulary = (private_names(trees[FILE], own) | private_texts(trees.pop(FILE))) - own
    found = {file: private_names(tree, own, vocabulary) for file, tree in trees.items()}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch\ntorch._C._is_tracing()", "_C"),
        ("from torch._C import _is_tracing", "_is_tracing"),
        ("from torch.nn.modules.dropout import _DropoutNd", "_DropoutNd"),
        ("from torch.utils._pytree import tree_map", "_pytree"),
        ("import torch as t\nt.autograd.Variable._execution_engine", "_execution_engine"),
        ("scaler._per_optimizer_states[0]", "_per_optimizer_states"),
        ("getattr(optimizer, '_optimizer_step_pre_hooks')", "_optimizer_step_pre_hooks"),
        ("module._buffers['mean']", "_buffers"),
    ],
)
def test_the_check_sees(code: str, name: str) -> None:
    assert name in private_names(ast.parse(code), {"_buffers"}, {"_optimizer_step_pre_hooks"})


def test_functions_for_lists_of_tensors_are_documented_ones() -> None:
    assert not private_names(ast.parse("import torch\ntorch._foreach_add_(xs, ys)"), set())


def test_they_were_tried_with_this_torch() -> None:
    installed = [int(part) for part in torch.__version__.split(".")[:2]]
    ranges = {"the others": torch_private.TRIED, **torch_private.TRIED_IN}
    assert torch_private.TRIED_IN.keys() <= vars(torch_private).keys()
    for name, (oldest, newest) in ranges.items():
        first, last = ([int(part) for part in version.split(".")] for version in (oldest, newest))
        assert first <= installed <= last, f"try {name} with torch {torch.__version__}"
