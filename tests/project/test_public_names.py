"""The public surface is each package's __all__, and every name is documented."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import torchmn
from tests.limits import limit
from torchmn.cli.run import run
from torchmn.run.torchrun_options import TorchrunOptions

from .names import INTERNAL, PAGE, names_of, packages, page, without_example

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = Path(torchmn.__file__).parent
PACKAGES = [package for package in packages() if package]


def test_the_root_is_small() -> None:
    assert len(torchmn.__all__) <= 40


def test_the_surface_is_small() -> None:
    """A name counts once, wherever it is offered."""
    names = {name for package in packages() for name in names_of(package)}
    assert len(names) <= 220


def members_of(kind: type) -> set[str]:
    """Public attributes of a class; those that ``__init__`` sets are not among them."""
    return {name for name in dir(kind) if not name.startswith("_")}


def test_classes_that_everybody_uses_are_small() -> None:
    """What only torchmn's own modules use belongs to them."""
    assert len(members_of(torchmn.Communicator)) <= 36
    of_torch = members_of(torch.optim.Optimizer) | {"defaults", "param_groups", "state"}
    assert len(members_of(torchmn.MultiNodeOptimizer) - of_torch) <= 12


def test_options_are_few() -> None:
    """ChainerMN's arguments and torchrun's spellings do not count."""
    options = set(inspect.signature(torchmn.create_multi_node_optimizer).parameters)
    of_chainermn = {"optimizer", "comm", "double_buffering", "zero_fill"}
    assert len(options - of_chainermn) <= 10
    of_torchrun = {each.name for each in dataclasses.fields(TorchrunOptions)}
    of_torchrun |= {"is_module", "log_dir", "max_restarts"}
    arguments = {"target", "args"}
    assert len(set(inspect.signature(run).parameters) - of_torchrun - arguments) <= 16


def test_all_is_reality() -> None:
    assert set(torchmn.__all__) <= set(dir(torchmn))


def test_type_checkers_know_the_same_names_of_the_root() -> None:
    """What loads on first use is no import of the root, so its stub says where it comes from."""
    known = {}
    for node in ast.parse((SOURCE / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            module = import_module(str(node.module))
            known |= {a.asname: getattr(module, a.name) for a in node.names if a.asname}
        elif isinstance(node, ast.Assign):
            assert ast.unparse(node) == "compression = codecs"
            known["compression"] = torchmn.comm.codecs
    offered = {*torchmn._HOME, *torchmn._SUBMODULES}
    assert known == {name: getattr(torchmn, name) for name in offered}


@pytest.mark.parametrize("package", packages(), ids=lambda package: package or "root")
def test_names_of_a_package_exist_and_have_docstrings(package: str) -> None:
    module = import_module(f"torchmn.{package}".rstrip("."))
    assert module.__doc__
    assert len(module.__all__) == len(set(module.__all__))
    values = {name: getattr(module, name) for name in module.__all__}
    code = {n: v for n, v in values.items() if inspect.isclass(v) or inspect.isroutine(v)}
    assert [name for name, value in code.items() if not inspect.getdoc(value)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_imports_is_in_all(package: str) -> None:
    """From its own modules: nothing public is missing."""
    tree = ast.parse((SOURCE / package.replace(".", "/") / "__init__.py").read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"torchmn.{package}.")
        if node.module != "torchmn.base.errors"
        for alias in node.names
        if (alias.asname or "") != alias.name  # a submodule, for type checkers
        for name in (
            import_module(str(node.module)).__all__
            if alias.name == "*"
            else [alias.asname or alias.name]
        )
    }
    names = set(import_module(f"torchmn.{package}").__all__)
    assert {name for name in imported if not name.startswith("_")} <= names


@pytest.mark.parametrize("name", torchmn.__all__)
def test_root_names_are_described(name: str) -> None:
    """On a page that is written by hand."""
    pages = "\n".join(p.read_text() for p in (DOCS / "reference").glob("*.md") if p != PAGE)
    assert re.search(rf"`(torchmn\.)?{name}\b", pages), f"docs/reference does not describe {name}"


def test_every_package_is_in_the_reference() -> None:
    assert PAGE.read_text() == page(), "write it again: python -m tests.project.names"


def test_wings_are_public_or_internal() -> None:
    """All public ones say what they offer but `exchange`: two packages within it do."""
    found = {path.stem for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"}
    public = {name for name in found - INTERNAL if not name.startswith("__")} - {"exchange"}
    assert [
        n for n in sorted(public) if not hasattr(import_module(f"torchmn.{n}"), "__all__")
    ] == []
    assert public == set(torchmn._SUBMODULES) - {"schedules", "compression", "frameworks"}
    assert set(torchmn._SUBMODULES) <= set(dir(torchmn))


def test_submodules_load_by_attribute_after_a_plain_import() -> None:
    script = (
        "import sys, torchmn\n"
        "assert 'torch' not in sys.modules\n"
        "for name, module in torchmn._SUBMODULES.items():\n"
        "    for loaded in [m for m in sys.modules if m.startswith('torchmn.')]:\n"
        "        vars(torchmn).pop(loaded.split('.')[1], None)\n"
        "    assert getattr(torchmn, name).__name__ == module\n"
        "torchmn.train.large_batch.LARS, torchmn.nn.functions.send, torchmn.comm.codecs.PowerSGD\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=limit(50))


def test_names_have_examples_that_run() -> None:
    assert without_example() == []


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        torchmn.nothing  # noqa: B018
