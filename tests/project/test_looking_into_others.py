"""Nothing in ``src`` looks into its callers or changes what belongs to others.

Frames, counts of references, assigned classes and replaced functions make a script depend on how it
is written, on the version of a library, and on what else runs in its process. Where they cannot be
left out each kind has one file, which says why.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .source import parsed, root

FRAMES = {
    *("_getframe", "_current_frames", "_current_exceptions", "currentframe", "f_back", "f_locals"),
    *("gi_frame", "cr_frame", "ag_frame", "tb_frame", "getouterframes", "getinnerframes"),
    *("extract_stack", "walk_stack", "call_tracing", "settrace", "setprofile"),
    "_getframemodulename",
}
REFERENCES = {"getrefcount", "get_referrers", "get_referents", "get_objects", "getweakrefs"}
LOOKED_INTO = {"sys", "inspect", "gc", "threading", "traceback", "builtins"}
"""Modules in which a name that is put together could be any of these."""
OWN = {"self", "cls", "own", "made", "clone", "copied", "twin", "part"}
"""What a function or its class has made itself."""

FRAME, REFERENCE, CLASS, PATCH = "frame", "reference", "class", "patch"

ALLOWED = {
    # The line of the user's script, for the text of an error.
    "base/script_line.py": {FRAME},
    # The order of delegates, and exchanges inside of checkpoints: only frames tell.
    "nn/functions/recomputation.py": {FRAME},
    # Memory that a script still uses: how often its storage is used.
    "exchange/gradient_memory.py": {REFERENCE},
    # What is planted on a user's module and taken off by `close`.
    "exchange/model_hooks.py": {PATCH},
    # What changes an object in place, for users who ask for just this.
    "nn/batch_norm.py": {CLASS},
    "train/frameworks/accelerate.py": {CLASS},
    # Stacks of blocked threads and of errors, as text for a report.
    "control/script.py": {FRAME},
    "run/launch_local.py": {FRAME},
    "run/monitor/script_monitor.py": {FRAME, PATCH},  # and sys.exit, where a script asks for it
    "run/monitor/bootstrap.py": {FRAME, PATCH},  # it is the interpreter of the script
    # Settings that a library wants to be set so, and objects of our own that look like others'.
    "cli/options.py": {PATCH},
    "comm/engine.py": {PATCH},
    "comm/transports/mpi.py": {PATCH},
    # Until `finalize`, where a script asks for ``quiet=True``.
    "comm/create.py": {PATCH},
}


def kinds(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What a module does of this, with the lines."""
    foreign = set(imported(tree))
    for node in ast.walk(tree):
        name = named(node)
        if name in FRAMES or (name == "stack" and is_of(node, "inspect")):
            yield FRAME, node.lineno
        if name in REFERENCES:
            yield REFERENCE, node.lineno
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if node.attr == "__class__":
                yield CLASS, node.lineno
            elif root(node) in foreign:
                yield PATCH, node.lineno
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            table = node.value
            is_vars = isinstance(table, ast.Call) and named(table.func) == "vars"
            if is_vars or (isinstance(table, ast.Attribute) and table.attr == "__dict__"):
                owner = table.args[0] if is_vars else table.value
                if root(owner) not in OWN:
                    yield PATCH, node.lineno
        if isinstance(node, ast.Call):
            yield from of_call(node)


def of_call(node: ast.Call) -> Iterator[tuple[str, int]]:
    function, arguments = named(node.func), node.args
    if function in ("MethodType", "method_cache", "patch"):
        yield PATCH, node.lineno
    if function in ("setattr", "delattr", "__setattr__", "__delattr__") and arguments:
        if len(arguments) > 1 and text(arguments[1]) == "__class__":
            yield CLASS, node.lineno
        elif root(arguments[0]) not in OWN and not is_super(node.func):
            yield PATCH, node.lineno
    if function in ("getattr", "attrgetter", "methodcaller") and arguments:
        asked = text(arguments[-1 if function != "getattr" else 1])
        is_unknown = asked is None and root(arguments[0]) in LOOKED_INTO
        if is_unknown or asked in FRAMES:
            yield FRAME, node.lineno
        elif asked in REFERENCES:
            yield REFERENCE, node.lineno
    if function in ("eval", "exec") and arguments and named(node.func) == function:
        yield FRAME, node.lineno


def named(node: ast.AST) -> str:
    """The last name of an expression, or of an import."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.alias):
        return node.name.split(".")[-1]
    return node.id if isinstance(node, ast.Name) else ""


def text(node: ast.AST) -> str | None:
    """A text that can be read off; None for one that is put together."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def is_of(node: ast.AST, module: str) -> bool:
    return isinstance(node, ast.Attribute) and root(node) == module


def is_super(function: ast.AST) -> bool:
    return isinstance(function, ast.Attribute) and root(function) == "super"


def imported(tree: ast.AST) -> Iterator[str]:
    """The names of modules and classes that are not of torchmn."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (alias.asname or alias.name).split(".")[0]
                for alias in node.names
                if not alias.name.startswith("torchmn")
            )
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("torchmn"):
            yield from (alias.asname or alias.name for alias in node.names)


def test_each_kind_is_in_its_files_and_in_no_other() -> None:
    found = {name: lines for name, tree in parsed().items() if (lines := list(kinds(tree)))}
    assert {name: {kind for kind, _ in lines} for name, lines in found.items()} == ALLOWED, found


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (FRAME, "import sys\nsys._getframe(1)"),
        (FRAME, "from sys import _getframe as f\nf(1)"),
        (FRAME, "import sys\ngetattr(sys, '_get' + 'frame')(1)"),
        (FRAME, "import sys\ngetattr(sys, NAME)(1)"),
        (FRAME, "import inspect\ninspect.currentframe()"),
        (FRAME, "import inspect\ninspect.stack()[1]"),
        (FRAME, "import sys\nsys._current_frames()[thread]"),
        (FRAME, "error.__traceback__.tb_frame.f_back"),
        (FRAME, "iterator.gi_frame.f_locals['x']"),
        (FRAME, "from operator import attrgetter\nattrgetter('f_locals')(frame)"),
        (FRAME, "exec('import sys; sys._getframe()')"),
        (REFERENCE, "import sys\nsys.getrefcount(x) < 3"),
        (REFERENCE, "import gc\ngc.get_referrers(x)"),
        (CLASS, "module.__class__ = Other"),
        (CLASS, "setattr(module, '__class__', Other)"),
        (CLASS, "object.__setattr__(module, '__class__', Other)"),
        (PATCH, "import torch\ntorch.autograd.backward = f"),
        (PATCH, "from torch.utils.data import DataLoader\nDataLoader.__iter__ = f"),
        (PATCH, "from torch.utils.data import DataLoader\nsetattr(DataLoader, '__iter__', f)"),
        (PATCH, "import types\nmodel.forward = types.MethodType(f, model)"),
        (PATCH, "object.__setattr__(model, 'forward', f)"),
        (PATCH, "model.__dict__['forward'] = f"),
        (PATCH, "vars(model)['forward'] = f"),
        (PATCH, "import sys\nsys.excepthook = f"),
    ],
)
def test_the_check_sees(kind: str, code: str) -> None:
    assert kind in {found for found, _ in kinds(ast.parse(code))}


@pytest.mark.parametrize(
    "code",
    [
        "self.attribute = 1",
        "setattr(self, name, value)",
        "object.__setattr__(self, 'shape', shape)",
        "super().__setattr__(name, value)",
        "import sys\ngetattr(sys, 'last_value', None)",
        "self.__dict__['x'] = 1",
    ],
)
def test_what_an_object_does_with_itself_is_its_own(code: str) -> None:
    assert not list(kinds(ast.parse(code)))
